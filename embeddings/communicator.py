"""The collectives of a rank, counted: what `exchange.py` and the dense reducer communicate through.

Every collective of a rank is issued by one thread in one fixed order, the same on all ranks (two
threads on one gloo group give silently wrong sums). A collective is *issued* when it is called and
*finished* by `Pending.wait`; in between it travels, where the backend has threads or streams of its
own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
_PATIENT = timedelta(days=7)
# What counts as which of `bytes_sent_per_step` in result.json.
KINDS = ("counts", "ids", "rows", "grads", "replicas", "squares", "norm", "dense", "other")


class PeerLost(RuntimeError):
    """A collective failed: a rank it needs is gone or silent. Another rank is to blame."""


@dataclass
class CommCounters:
    """Collectives issued and bytes sent to *other* ranks, by kind (see `KINDS`)."""

    num_collectives: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    sent_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))

    def add(self, kind: str, sent_bytes: int) -> None:
        """Counts one collective."""
        self.num_collectives[kind] += 1
        self.sent_bytes[kind] += sent_bytes


class Pending:
    """A collective under way.

    Args:
        values: what `wait` returns.
        finish: blocks until the values are there; None where they are there already.
    """

    def __init__(self, values: Tensor, finish: Callable[[], None] | None = None) -> None:
        self._values, self._finish = values, finish

    def wait(self) -> Tensor:
        """The received values; blocks until they are there. May be called again."""
        if self._finish is not None:
            self._finish()
            self._finish = None
        return self._values


class Deferred(Generic[T]):
    """What is worked out from values under way, once they are there.

    Args:
        finish: waits for them and works it out; called once.
    """

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish = finish

    def finish(self) -> T:
        """The result."""
        return self._finish()


class Communicator(ABC):
    """One rank's view of all ranks.

    Attributes:
        rank: this rank.
        world_size: `W`.
        counters: what was issued so far.
        on_wait: told what a blocking wait is for, and None when it is over (the heartbeat).
        transport: what values travel through.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.counters = CommCounters()
        self.on_wait: Callable[[str | None], None] = lambda what: None
        self.transport = "none"

    def all_to_all(
        self,
        kind: str,
        send: Tensor,
        send_splits: Sequence[int],
        recv: Tensor,
        recv_splits: Sequence[int],
    ) -> Pending:
        """Sends a part of `send` to every rank and fills `recv` with one part of each.

        Args:
            kind: what the values are, see `KINDS`.
            send: flat values, the part for rank 0 first; mustn't be changed before the wait.
            send_splits: elements for each rank.
            recv: flat, of the same type.
            recv_splits: elements from each rank.
        """
        for values, splits in ((send, send_splits), (recv, recv_splits)):
            if values.numel() != sum(splits):
                raise ValueError(f"{kind}: {values.numel()} values are no {sum(splits)}")
        to_others = sum(send_splits) - send_splits[self.rank]
        self._count(kind, to_others * send.element_size())
        return self._all_to_all(kind, send, send_splits, recv, recv_splits)

    def all_reduce(self, kind: str, values: Tensor) -> Pending:
        """Sums `values` over the ranks, in place; every rank gets the same bits.

        A ring sends `2 (W-1)/W` of the bytes per rank; that is what is counted.
        """
        self._count(kind, 2 * (self.world_size - 1) * values.nbytes // self.world_size)
        return self._all_reduce(kind, values)

    def all_reduce_in_order(self, kind: str, values: Tensor) -> Pending:
        """Sums `values` over the ranks in the order of the ranks, whatever the transport: the bits
        are those of `((rank 0 + rank 1) + rank 2) + …`.

        For what may also be summed by its owner, from what the ranks sent. Counted as an
        `all_reduce`, whose bytes it sends. All ranks wait for it at the same place of their
        sequence of collectives: half of it may be issued there.

        Args:
            kind: see `all_to_all`.
            values: mustn't be changed before the wait.
        """
        self._count(kind, 2 * (self.world_size - 1) * values.nbytes // self.world_size)
        return self._all_reduce_in_order(kind, values)

    def _all_reduce_in_order(self, kind: str, values: Tensor) -> Pending:
        """Each rank sums a share of the values and sends it to the others."""
        if self.world_size <= 2:
            return self._all_reduce(kind, values)  # A sum of two has one order.
        bounds = [values.numel() * rank // self.world_size for rank in range(self.world_size + 1)]
        sizes = [stop - start for start, stop in pairwise(bounds)]
        num_own = sizes[self.rank]
        same = [num_own] * self.world_size
        parts = values.new_empty(self.world_size * num_own)
        shares = self._all_to_all(kind, values, sizes, parts, same)
        summed = torch.empty_like(values)

        def finish() -> None:
            first, *others = shares.wait().split(num_own) if num_own else [parts]
            for part in others:
                first += part
            own = first.repeat(self.world_size)
            self._all_to_all(kind, own, same, summed, sizes).wait()

        return Pending(summed, finish)

    def _count(self, kind: str, sent_bytes: int) -> None:
        if self.world_size > 1:
            self.counters.add(kind, sent_bytes)

    def sum_scalar(self, kind: str, value: Tensor) -> Tensor:
        """A 0-d tensor summed over the ranks."""
        values = value.reshape(1).clone()
        return self.all_reduce(kind, values).wait()[0]

    @abstractmethod
    def _all_to_all(
        self,
        kind: str,
        send: Tensor,
        send_splits: Sequence[int],
        recv: Tensor,
        recv_splits: Sequence[int],
    ) -> Pending: ...

    @abstractmethod
    def _all_reduce(self, kind: str, values: Tensor) -> Pending: ...

    @abstractmethod
    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's `value`, by rank. For small things outside the steps: it pickles."""

    @abstractmethod
    def duplicate(self) -> Communicator:
        """The same ranks in a group of their own, for another thread; called by all ranks at once.

        Its waits have no timeout to speak of: what it does may take as long as a disk does.
        """

    def barrier(self) -> None:
        """Waits for every rank."""
        self.all_gather_object(None)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What is issued within doesn't count: evaluation between steps, reading rows."""
        counters, self.counters = self.counters, CommCounters()
        try:
            yield
        finally:
            self.counters = counters


class SingleProcess(Communicator):
    """One rank: nothing travels, nothing is counted."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def _all_to_all(
        self,
        kind: str,
        send: Tensor,
        send_splits: Sequence[int],
        recv: Tensor,
        recv_splits: Sequence[int],
    ) -> Pending:
        return Pending(recv.copy_(send))

    def _all_reduce(self, kind: str, values: Tensor) -> Pending:
        return Pending(values)

    def all_gather_object(self, value: Any) -> list[Any]:
        """`[value]`."""
        return [value]

    def duplicate(self) -> SingleProcess:
        """Another one."""
        return SingleProcess()


class ProcessGroup(Communicator):
    """A torch.distributed process group (gloo or NCCL), which must be initialised.

    Args:
        group: the group; None for the default one.

    Raises:
        PeerLost: by any wait, where another rank is gone or silent for longer than the group's
            timeout (of a run a week: the watchdog finds who is silent for `launch.timeout_s`).
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self._group = group
        self.transport = str(dist.get_backend(group))

    def _all_to_all(
        self,
        kind: str,
        send: Tensor,
        send_splits: Sequence[int],
        recv: Tensor,
        recv_splits: Sequence[int],
    ) -> Pending:
        return self._issue(
            kind,
            recv,
            lambda: dist.all_to_all_single(
                recv,
                send,
                list(recv_splits),
                list(send_splits),
                group=self._group,
                async_op=True,
            ),
        )

    def _all_reduce(self, kind: str, values: Tensor) -> Pending:
        return self._issue(
            kind, values, lambda: dist.all_reduce(values, group=self._group, async_op=True)
        )

    def all_gather_object(self, value: Any) -> list[Any]:
        """See `Communicator`; the processes of one run trust each other's pickles."""
        gathered: list[Any] = [None] * self.world_size
        self._blocking(
            "objects", lambda: dist.all_gather_object(gathered, value, group=self._group)
        )
        return gathered

    def duplicate(self) -> ProcessGroup:
        """See `Communicator`; over gloo, whatever this group's backend."""
        group = dist.new_group(backend="gloo", timeout=_PATIENT)
        return ProcessGroup(group)

    def _issue(self, kind: str, values: Tensor, start: Callable[[], dist.Work]) -> Pending:
        try:
            work = start()
        except RuntimeError as error:
            # A mistake of our own (sizes, types) isn't another rank's fault.
            if not isinstance(error, dist.DistError) and "gloo" not in str(error):
                raise
            raise self._lost(kind, error) from error

        def finish() -> None:
            self._blocking(kind, work.wait)

        return Pending(values, finish)

    def _blocking(self, what: str, call: Callable[[], Any]) -> None:
        self.on_wait(what)
        try:
            call()
        except RuntimeError as error:
            # `on_wait` isn't reset: what this rank waited for is what the launcher is to see.
            raise self._lost(what, error) from error
        self.on_wait(None)

    def _lost(self, what: str, error: RuntimeError) -> PeerLost:
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        return PeerLost(f"rank {self.rank}, waiting for {what}: {reason}")


class Buffers:
    """Flat buffers that grow and are kept, for what is packed and received.

    `get`: whoever asks may use the buffer until the next call with the same name. `lease`: until it
    is given back with `release`; for what may be under way several times at once.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._free: list[Tensor] = []

    def lease(self, num_bytes: int) -> Tensor:
        """An uninitialised buffer of at least that many bytes, uint8."""
        for index, buffer in enumerate(self._free):
            if buffer.numel() >= num_bytes:
                return self._free.pop(index)
        return torch.empty(num_bytes + num_bytes // 5, dtype=torch.uint8)

    def release(self, buffer: Tensor) -> None:
        """Gives a leased buffer back."""
        self._free = [*self._free[-7:], buffer]

    def get(self, name: str, num_elements: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised flat tensor."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < num_elements or buffer.dtype != dtype:
            # A fifth more than asked for: batches vary in size.
            buffer = torch.empty(num_elements + num_elements // 5, dtype=dtype)
            self._buffers[name] = buffer
        return buffer[:num_elements]
