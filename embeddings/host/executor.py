"""Executors: where the work beside a step's compute runs, and what waits for what.

A schedule (who may run before whom) is written once, over `Executor`. What it is executed on is a
matter of the machine: CPU threads (`ThreadExecutor`), with or without a simulated link between two
memories, or CUDA streams (`embeddings.host.cuda_executor`).

No schedule can deadlock on a correct executor: a queue runs its work in the order of submission,
and an event exists only once its work was submitted, so the oldest unfinished work can always run.
"""

from __future__ import annotations

import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from embeddings.field_checks import real_number, shown

Queue = Literal["gather", "to_device", "to_host", "scatter"]
QUEUES: tuple[Queue, ...] = get_args(Queue)
LINK_QUEUES: tuple[Queue, ...] = ("to_device", "to_host")
COMPUTE = "compute"
_END_S = 5.0


class Event(ABC):
    """Something that will be done: submitted work, or the compute issued up to a moment."""

    @abstractmethod
    def is_done(self) -> bool:
        """Whether it is done, or has failed; never blocks."""

    @abstractmethod
    def wait(self) -> None:
        """Blocks the calling thread until it is done.

        Raises:
            BaseException: what the work raised, or the work of what it had to wait for.
        """


class HostEvent(Event):
    """An event that a thread declares done. Whoever makes one must `finish` it."""

    def __init__(self) -> None:
        self._finished = threading.Event()
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None = None) -> None:
        """Lets all waiters go on, or raises `error` in each of them."""
        assert not self._finished.is_set(), "an event is finished once"
        self._error = error
        self._finished.set()

    def is_done(self) -> bool:
        return self._finished.is_set()

    def wait(self) -> None:
        self._finished.wait()
        if self._error is not None:
            raise self._error


class OpSpan(NamedTuple):
    """When a piece of work ran, in seconds of the timeline's clock."""

    queue: str  # one of QUEUES, or COMPUTE
    label: str
    step: int
    begin_s: float
    end_s: float


class Timeline:
    """When work ran: sums always, single spans while recording is on. May be used by any thread.

    Args:
        capacity: spans that are kept; older ones make room.
        clock: seconds since some fixed moment.
    """

    def __init__(
        self, capacity: int = 65_536, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.is_recording = False
        self.clock = clock
        self._spans: deque[OpSpan] = deque(maxlen=capacity)
        self._busy_s: dict[str, float] = dict.fromkeys((*QUEUES, COMPUTE), 0.0)
        self._lock = threading.Lock()

    def add(self, queue: str, label: str, step: int, begin_s: float, end_s: float) -> None:
        """Adds to the queue's sum, and keeps the span if recording is on."""
        with self._lock:
            self._busy_s[queue] += end_s - begin_s
            if self.is_recording:
                self._spans.append(OpSpan(queue, label, step, begin_s, end_s))

    def spans(self) -> list[OpSpan]:
        """The spans kept, by their begin."""
        with self._lock:
            return sorted(self._spans, key=lambda span: (span.begin_s, span.end_s))

    def busy_s(self) -> dict[str, float]:
        """Seconds that each queue, and the compute as far as told, was at work."""
        with self._lock:
            return dict(self._busy_s)


class Executor(ABC):
    """Runs work beside the compute, which is the caller's own thread (on CUDA: current stream).

    One thread submits and waits. Work of one queue runs in the order of submission, one at a time;
    work of different queues at once. Work given to `gather` and `scatter` uses NumPy, never torch's
    operators: a second thread in torch's OpenMP pool slows both down many times over.

    Attributes:
        device: where `device_empty` lies.
        has_link: host and device memory are apart: rows have to be moved by the queues `to_device`
            and `to_host`, which mustn't be used otherwise.
        timeline: when work ran; keeps single spans from `timeline.is_recording = True` on.
    """

    device: torch.device
    has_link: bool
    timeline: Timeline

    @abstractmethod
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
        """Queues work; returns at once.

        Args:
            queue: where it runs.
            work: called once; what it raises is raised by every wait for it.
            num_bytes: what it moves; a simulated duration depends on it.
            after: what must be done before. If one of these failed, the work isn't run and fails
                with the same error.
            label: for the timeline.
            step: for the timeline.
        """

    @abstractmethod
    def compute_event(self) -> Event:
        """Done when the compute issued so far is done; where compute isn't asynchronous, at once"""

    @abstractmethod
    def wait(self, event: Event) -> float:
        """Makes the compute issued from here on wait for an event.

        Returns:
            Seconds that the calling thread was blocked.

        Raises:
            BaseException: what the work raised.
        """

    @abstractmethod
    def host_empty(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """`(num_rows, width)` values of host memory that the link reads and writes at its best."""

    @abstractmethod
    def device_empty(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """`(num_rows, width)` values of the device's memory, safe to use from any queue."""

    @abstractmethod
    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copies rows from one memory to the other: the work of `to_device` and `to_host`.

        Args:
            target: overwritten; contiguous.
            source: of the same shape and type; contiguous.
        """

    @abstractmethod
    def close(self) -> None:
        """Runs what was submitted to its end and ends the threads; raises no work's error.

        May be called again; nothing can be submitted afterwards.
        """


@dataclass(frozen=True)
class LinkRates:
    """A link between two memories.

    Attributes:
        bytes_per_s: in each direction.
        latency_s: per transfer, beside its bytes.
        is_duplex: both directions at once, each at its full rate; otherwise one transfer at a time,
            in the order of submission.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    is_duplex: bool = True

    def __post_init__(self) -> None:
        _check_rate("bytes_per_s", self.bytes_per_s)
        if real_number("latency_s", self.latency_s) < 0.0:
            raise ValueError(f"latency_s {self.latency_s}: a time of at least 0 is needed")

    def duration_s(self, num_bytes: float) -> float:
        """Seconds of one transfer, of so many bytes on average."""
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class SimulatedRates:
    """What `ThreadExecutor` pretends to be; None: no link, or as fast as it goes."""

    link: LinkRates | None
    gather_bytes_per_s: float | None
    scatter_bytes_per_s: float | None

    def __post_init__(self) -> None:
        if self.link is not None and not isinstance(self.link, LinkRates):
            raise ValueError(f"link is {shown(self.link)}, must be LinkRates")
        for name in ("gather_bytes_per_s", "scatter_bytes_per_s"):
            rate = getattr(self, name)
            if rate is not None:
                _check_rate(name, rate)

    def duration_s(self, queue: Queue, num_bytes: int) -> float:
        """Seconds that work of a queue takes at least."""
        if queue in LINK_QUEUES:
            return self.link.duration_s(num_bytes) if self.link else 0.0
        rate = self.gather_bytes_per_s if queue == "gather" else self.scatter_bytes_per_s
        return num_bytes / rate if rate else 0.0


def _check_rate(name: str, rate: float) -> None:
    if real_number(name, rate) <= 0.0:
        raise ValueError(f"{name} {shown(rate)}: a rate above 0 is needed")


class QueueThread:
    """Calls functions one after another on a daemon thread, which starts with the first.

    The functions may not raise: what goes wrong belongs into an event.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, call: Callable[[], None]) -> None:
        """Queues a call; returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_call_all, args=(self._calls,), name=self._name, daemon=True
            )
            self._thread.start()
        self._calls.put(call)

    def stop(self) -> None:
        """Lets the thread end after the calls that are queued; returns at once."""
        if self._thread is not None:
            self._calls.put(None)

    def join(self, limit_s: float | None = None) -> None:
        """Waits for the thread's end, or so many seconds; on the thread itself, which may be the
        last to know of what it worked for, returns at once."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(limit_s)


def _call_all(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    while (call := calls.get()) is not None:
        call()
        # What it holds (buffers, events) mustn't live until the next one comes.
        del call


class QueueThreads:
    """A `QueueThread` per queue. They end with `close`, with this object, or with the process: a
    thread that is left running frees tensors while Python ends, which aborts the process.

    Args:
        share_link: `to_device` and `to_host` share a thread.
    """

    def __init__(self, *, share_link: bool = False) -> None:
        self._threads = {queue: QueueThread(f"host-{queue}") for queue in QUEUES}
        if share_link:
            self._threads["to_host"] = self._threads["to_device"]
        self._is_closed = False
        self._all = list(dict.fromkeys(self._threads.values()))
        # Not for ever: work that never ends isn't to keep the process.
        self._end = weakref.finalize(self, _end_threads, self._all, _END_S)

    def put(self, queue: Queue, call: Callable[[], None]) -> None:
        """Queues a call, which may not raise."""
        assert not self._is_closed, f"work for {queue} after close"
        self._threads[queue].put(call)

    def close(self) -> None:
        """Waits until all is done that was queued; may be called again."""
        self._is_closed = True
        if self._end.detach() is not None:
            _end_threads(self._all)


def _end_threads(threads: Sequence[QueueThread], limit_s: float | None = None) -> None:
    """Lets the threads end after what is queued, and waits for it, no longer than `limit_s`."""
    for thread in threads:
        thread.stop()
    until_s = None if limit_s is None else time.monotonic() + limit_s
    for thread in threads:
        thread.join(None if until_s is None else max(0.0, until_s - time.monotonic()))


@dataclass(frozen=True, eq=False)
class HostCall:
    """Work for a `QueueThread`: waits for what comes before, runs, and finishes its event."""

    timeline: Timeline
    queue: Queue
    work: Callable[[], None]
    after: tuple[Event, ...]
    label: str
    step: int
    event: HostEvent = field(default_factory=HostEvent)

    def __call__(self) -> None:
        try:
            for predecessor in self.after:
                predecessor.wait()
            begin_s = self.timeline.clock()
            self.work()
            self.timeline.add(self.queue, self.label, self.step, begin_s, self.timeline.clock())
        except BaseException as error:  # Whatever it is: somebody may be waiting.
            self.event.finish(error)
        else:
            self.event.finish()


class ThreadExecutor(Executor):
    """CPU threads, one per queue; compute is done when it returns.

    Work that ends before its simulated duration sleeps for the rest of it, so a link of any rate
    can be tried where there is none: with `simulated.link`, host and device memory count as apart.

    Args:
        simulated: rates to pretend; None: one memory, as fast as it goes.
        clock: seconds since some fixed moment.
        sleep: waits for some seconds.
    """

    def __init__(
        self,
        simulated: SimulatedRates | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.device = torch.device("cpu")
        self.has_link = simulated is not None and simulated.link is not None
        self.timeline = Timeline(clock=clock)
        self._simulated = simulated
        self._clock, self._sleep = clock, sleep
        link = simulated.link if simulated else None
        self._threads = QueueThreads(share_link=link is not None and not link.is_duplex)

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
        assert self.has_link or queue not in LINK_QUEUES, f"{queue}: there is no link"
        duration_s = self._simulated.duration_s(queue, num_bytes) if self._simulated else 0.0
        paced = self._paced(work, duration_s) if duration_s > 0.0 else work
        call = HostCall(self.timeline, queue, paced, tuple(after), label, step)
        self._threads.put(queue, call)
        return call.event

    def _paced(self, work: Callable[[], None], duration_s: float) -> Callable[[], None]:
        def work_and_sleep() -> None:
            begin_s = self._clock()
            work()
            missing_s = duration_s - (self._clock() - begin_s)
            if missing_s > 0.0:
                self._sleep(missing_s)

        return work_and_sleep

    def compute_event(self) -> Event:
        event = HostEvent()
        event.finish()
        return event

    def wait(self, event: Event) -> float:
        if event.is_done():
            event.wait()
            return 0.0
        begin_s = self._clock()
        event.wait()
        return self._clock() - begin_s

    def host_empty(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_rows, width, dtype=dtype)

    def device_empty(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_rows, width, dtype=dtype)

    def copy(self, target: Tensor, source: Tensor) -> None:
        copy_with_numpy(target, source)

    def close(self) -> None:
        self._threads.close()


def copy_with_numpy(target: Tensor, source: Tensor) -> None:
    """`target.copy_(source)` without torch's thread pool: for contiguous CPU tensors.

    As bytes, since NumPy knows no bfloat16.
    """
    assert (target.shape, target.dtype) == (source.shape, source.dtype), "copies convert nothing"
    if target.numel():
        np.copyto(target.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())
