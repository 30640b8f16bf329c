"""`CudaExecutor`: rows move on CUDA streams of their own, between pinned host memory and the GPU.

Each direction of the link has a stream and a thread that drives it: the thread waits for what the
host has to do first, which no stream can, and issues the copy. Work on the GPU is waited for by
streams, so the thread that computes isn't blocked by a copy under way. Threads that gather and
scatter are those of `ThreadExecutor`.

Memory comes from `host_empty` and `device_empty` only, and is kept: the allocator never gives a
block to another stream while one still uses it, so no `record_stream` is needed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from embeddings.host.executor import (
    LINK_QUEUES,
    Event,
    Executor,
    HostCall,
    Queue,
    QueueThreads,
    Timeline,
)


class CudaEvent(Event):
    """Work on a CUDA stream, perhaps not issued yet; its maker must `issue` or `fail` it."""

    def __init__(self) -> None:
        self._issued = threading.Event()
        self._end: torch.cuda.Event | None = None
        self._error: BaseException | None = None

    def issue(self, end: torch.cuda.Event) -> None:
        """The work is on its stream; `end` was recorded behind it."""
        self._end = end
        self._issued.set()

    def fail(self, error: BaseException) -> None:
        """The work won't be done, or went wrong after it was issued."""
        self._error = error
        self._issued.set()

    def is_done(self) -> bool:
        if not self._issued.is_set():
            return False
        return self._end is None or self._error is not None or self._end.query()

    def wait(self) -> None:
        self._wait_until_issued().synchronize()
        # The copy may have failed in the meantime.
        if self._error is not None:
            raise self._error

    def wait_on(self, stream: torch.cuda.Stream) -> None:
        """Has a stream wait for the work; blocks the calling thread until the work is issued.

        Raises:
            BaseException: what went wrong before the work was issued.
        """
        stream.wait_event(self._wait_until_issued())

    def _wait_until_issued(self) -> torch.cuda.Event:
        self._issued.wait()
        if self._error is not None:
            raise self._error
        assert self._end is not None
        return self._end


class CudaExecutor(Executor):
    """A GPU beside the host's memory; compute is what the caller's current stream was given.

    Work of `to_device` and `to_host` is issued to the queue's stream (`copy` does so without
    blocking); it may touch only memory from `host_empty` and `device_empty`. Works of one direction
    are issued one at a time, each when the one before is done, so that the timeline tells what the
    link did.

    Args:
        device: the GPU.

    Raises:
        ValueError: for a device that is no GPU.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(f"device {device}: a CUDA device is needed")
        index = device.index if device.index is not None else torch.cuda.current_device()
        self.device = torch.device("cuda", index)
        self.has_link = True
        self.timeline = Timeline()
        self._streams = {queue: torch.cuda.Stream(self.device) for queue in LINK_QUEUES}
        self._threads = QueueThreads()

    def submit(
        self,
        queue: Queue,
        work: Callable[[], None],
        *,
        num_bytes: int,
        after: Sequence[Event] = (),
        label: str = "",
        step: int = 0,
    ) -> Event:
        predecessors = tuple(after)
        if queue in LINK_QUEUES:
            return self._submit_copy(queue, work, predecessors, label, step)
        call = HostCall(self.timeline, queue, work, predecessors, label, step)
        self._threads.put(queue, call)
        return call.event

    def _submit_copy(
        self,
        queue: Queue,
        work: Callable[[], None],
        predecessors: tuple[Event, ...],
        label: str,
        step: int,
    ) -> Event:
        event = CudaEvent()
        stream = self._streams[queue]

        def run() -> None:
            try:
                with torch.cuda.device(self.device), torch.cuda.stream(stream):
                    for predecessor in predecessors:
                        if isinstance(predecessor, CudaEvent):
                            predecessor.wait_on(stream)
                        else:
                            predecessor.wait()
                    # `blocking`: who waits for one sleeps, and leaves the core to others.
                    begin, end = (
                        torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2)
                    )
                    begin.record(stream)
                    work()
                    end.record(stream)
                    event.issue(end)
                    end.synchronize()
                    end_s = self.timeline.clock()
                    duration_s = begin.elapsed_time(end) / 1e3
                self.timeline.add(queue, label, step, end_s - duration_s, end_s)
            except BaseException as error:
                event.fail(error)

        self._threads.put(queue, run)
        return event

    def compute_event(self) -> Event:
        end = torch.cuda.Event(blocking=True)
        end.record(torch.cuda.current_stream(self.device))
        event = CudaEvent()
        event.issue(end)
        return event

    def wait(self, event: Event) -> float:
        begin_s = time.perf_counter()
        if isinstance(event, CudaEvent):
            event.wait_on(torch.cuda.current_stream(self.device))
        else:
            event.wait()
        return time.perf_counter() - begin_s

    def host_empty(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_rows, width, dtype=dtype, pin_memory=True)

    def device_empty(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        rows = torch.empty(num_rows, width, dtype=dtype, device=self.device)
        # The allocator orders the use of a block by the stream it was asked on: a block that was
        # freed a moment ago may still be read there, and the other streams wouldn't wait.
        torch.cuda.current_stream(self.device).synchronize()
        return rows

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def close(self) -> None:
        self._threads.close()
