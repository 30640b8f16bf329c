"""An executor without threads, which runs work in a seeded random order out of all legal ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from embeddings.host.executor import (
    LINK_QUEUES,
    QUEUES,
    Event,
    Executor,
    HostEvent,
    Queue,
    Timeline,
    copy_with_numpy,
)

# Share of the pending work that a call may run, on average.
_EAGERNESS = (0.0, 0.1, 0.3, 0.7, 1.0)


class SteppedExecutor(Executor):
    """Runs work on the caller's thread: some at each `submit` and `compute_event`, the needed at a
    wait.

    Work is ready when all of its `after` are done and it is the first of its queue. Which ready
    work runs, and how much of it at a call, is drawn by the seed; so is how eager the run is as a
    whole, from everything at once to nothing before somebody waits for it. Fresh memory holds NaN
    (the largest integer), so that records which nobody wrote are seen.

    Args:
        seed: of the order.
        has_link: host and device memory are apart.
        is_duplex: of the link; otherwise `to_device` and `to_host` run in the order of submission.

    Attributes:
        ran: queue, label and step of the work that ran, in that order; work that failed included.
    """

    def __init__(self, seed: int, has_link: bool, *, is_duplex: bool = True) -> None:
        self.device = torch.device("cpu")
        self.has_link = has_link
        self.timeline = Timeline(clock=lambda: float(len(self.ran)))
        self.ran: list[tuple[Queue, str, int]] = []
        self._rng = np.random.default_rng(seed)
        self._eagerness = float(self._rng.choice(_EAGERNESS))
        self._pending: dict[Queue, deque[_Op]] = {queue: deque() for queue in QUEUES}
        if not is_duplex:
            self._pending["to_host"] = self._pending["to_device"]
        self._is_running = self._is_closed = False

    @property
    def num_pending(self) -> int:
        """Work that hasn't run."""
        return sum(len(ops) for ops in self._queues())

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
        assert not self._is_closed, f"work for {queue} after close"
        assert not self._is_running, "work doesn't submit work"
        assert num_bytes >= 0, num_bytes
        assert self.has_link or queue not in LINK_QUEUES, f"{queue}: there is no link"
        event = _SteppedEvent(self)
        self._pending[queue].append(_Op(queue, work, tuple(after), label, step, event))
        self._run_some()
        return event

    def compute_event(self) -> Event:
        event = HostEvent()
        event.finish()
        self._run_some()
        return event

    def wait(self, event: Event) -> float:
        self.run_until(event)
        event.wait()
        return 0.0

    def host_empty(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        unwritten = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
        return torch.full((num_rows, width), unwritten, dtype=dtype)

    def device_empty(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        return self.host_empty(num_rows, width, dtype)

    def copy(self, target: Tensor, source: Tensor) -> None:
        copy_with_numpy(target, source)

    def close(self) -> None:
        self._is_closed = True
        while self._run_one():
            continue
        assert not self.num_pending, f"deadlock at close: {self._heads()}"

    def run_until(self, event: Event) -> None:
        """Runs ready work until an event is done."""
        assert not self._is_running or event.is_done(), "work waits for other work: use `after`"
        while not event.is_done():
            assert self._run_one(), f"deadlock: nothing left that could run; {self._heads()}"

    def _run_some(self) -> None:
        for _ in range(int(self._rng.binomial(self.num_pending, self._eagerness))):
            if not self._run_one():
                return

    def _run_one(self) -> bool:
        """Runs one ready piece of work, if there is one."""
        ready = [ops for ops in self._queues() if ops and ops[0].is_ready()]
        if not ready:
            return False
        op = ready[int(self._rng.integers(len(ready)))].popleft()
        begin_s = self.timeline.clock()
        self._is_running = True
        try:
            for predecessor in op.after:
                predecessor.wait()
            self.ran.append((op.queue, op.label, op.step))
            op.work()
        except Exception as error:  # An interrupt or a test's time limit is the caller's.
            op.event.finish(error)
        else:
            self.timeline.add(op.queue, op.label, op.step, begin_s, self.timeline.clock())
            op.event.finish()
        finally:
            self._is_running = False
        return True

    def _queues(self) -> list[deque[_Op]]:
        """Each queue once: a half-duplex link has one."""
        return list({id(ops): ops for ops in self._pending.values()}.values())

    def _heads(self) -> str:
        heads = [f"{ops[0].queue} {ops[0].label!r} {ops[0].step}" for ops in self._queues() if ops]
        return "first in line: " + (", ".join(heads) or "nothing")


class _SteppedEvent(HostEvent):
    """Work of a `SteppedExecutor`: waiting for it runs what is needed."""

    def __init__(self, executor: SteppedExecutor) -> None:
        super().__init__()
        self._executor = executor

    def wait(self) -> None:
        self._executor.run_until(self)
        super().wait()


@dataclass(frozen=True)
class _Op:
    queue: Queue
    work: Callable[[], None]
    after: tuple[Event, ...]
    label: str
    step: int
    event: _SteppedEvent

    def is_ready(self) -> bool:
        return all(event.is_done() for event in self.after)
