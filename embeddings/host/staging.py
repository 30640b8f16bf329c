"""The staging ring: buffers that the records of cold rows pass through, used again in order.

A buffer belongs to one step at a time. Its state says who may touch it, and a handle of an earlier
use can't reach the rows of a later one.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from embeddings.host.executor import Event, Executor


class BufferState(Enum):
    """Whose turn it is: `FREE → FILLING → READY → IN_USE → DIRTY → FREE`."""

    FREE = "free"  # nobody's
    FILLING = "filling"  # gather and to_device write it
    READY = "ready"  # all records are there, or the compute waits for them by itself
    IN_USE = "in use"  # the compute reads and updates it
    DIRTY = "dirty"  # to_host and scatter read it


class StagingOverflow(ValueError):
    """A step has more cold rows than a staging buffer may hold.

    Attributes:
        num_rows: cold rows of the step.
        limit_rows: what a buffer may hold.
    """

    def __init__(self, num_rows: int, limit_rows: int, record_bytes: int, num_buffers: int) -> None:
        super().__init__(
            f"a step has {num_rows:,} cold rows ({num_rows * record_bytes:,} bytes with their "
            f"optimizer state), but each of the {num_buffers} staging buffers may hold "
            f"{limit_rows:,} rows ({limit_rows * record_bytes:,} bytes): raise "
            f"sharding.host.staging_mb, or raise sharding.host.hot_mb so that fewer rows are cold, "
            f"or lower sharding.host.lookahead so that fewer buffers share the memory"
        )
        self.num_rows, self.limit_rows = num_rows, limit_rows


class RingBytes(NamedTuple):
    """Bytes that the ring's buffers take in each memory; one memory: all under `host`."""

    host: int
    device: int


class StagingBuffer:
    """A buffer of the ring, lent to one step from `acquire` until it is free again.

    Every use asserts that the buffer is still lent to this step, so a late piece of work can't
    touch what has become another step's.

    Attributes:
        generation: how many times the ring's buffer had been lent, this one included.
        num_rows: rows in use.
        emptied: when the step that had the buffer before has done with its memory, which nobody may
            write before; None where it has.
    """

    def __init__(self, slot: _Slot, num_rows: int) -> None:
        self.generation = slot.generation
        self.num_rows = num_rows
        self.emptied = slot.emptied
        self._slot = slot

    @property
    def state(self) -> BufferState:
        """Whose turn it is."""
        return self._current().state

    @property
    def host_KR(self) -> Tensor:
        """The records' place in host memory, `(num_rows, record_width)`."""
        return self._current().host[: self.num_rows]

    @property
    def device_KR(self) -> Tensor:
        """The records' place in the device's memory; the same memory where there is no link."""
        return self._current().device[: self.num_rows]

    @property
    def packed_KR(self) -> Tensor:
        """Place for records on their way back to the host, in the device's memory, uninitialised.

        The records of one step that go back lie here side by side, so that the link carries no
        others. Only where there is a link.
        """
        packed = self._current().packed
        assert packed is not None, "nothing is packed where there is no link"
        return packed[: self.num_rows]

    @property
    def filled(self) -> Event:
        """When all records from the store are there (after `filled_by`)."""
        event = self._current().filled
        assert event is not None, "nothing fills this buffer yet"
        return event

    def filled_by(self, event: Event) -> None:
        """Stays FILLING until this event is done.

        Args:
            event: of the last work that writes the buffer before the compute does.
        """
        slot = self._in_state(BufferState.FILLING)
        assert slot.filled is None, "a buffer is filled once"
        slot.filled = event

    def ready(self) -> None:
        """FILLING → READY: the compute has waited for `filled` (see `Executor.wait`)."""
        slot = self._in_state(BufferState.FILLING)
        assert slot.filled is not None, "nothing fills this buffer yet"
        slot.state = BufferState.READY

    def use(self) -> None:
        """READY → IN_USE."""
        self._in_state(BufferState.READY).state = BufferState.IN_USE

    def dirty(self, event: Event) -> None:
        """IN_USE → DIRTY.

        Args:
            event: of the last work that reads the buffer; the compute's own where none does.
        """
        slot = self._in_state(BufferState.IN_USE)
        slot.state, slot.emptied = BufferState.DIRTY, event

    def free(self) -> None:
        """DIRTY → FREE, once the last event is done; `acquire` does so by itself.

        Raises:
            BaseException: what the work behind that event raised.
        """
        slot = self._in_state(BufferState.DIRTY)
        assert slot.emptied is not None
        assert slot.emptied.is_done(), "the buffer is still read"
        slot.emptied.wait()
        slot.free()

    def discard(self) -> None:
        """FILLING or READY → FREE, once what fills it is done: its records won't be used."""
        slot = self._in_state(BufferState.FILLING, BufferState.READY)
        assert slot.filled is None or slot.filled.is_done(), "the buffer is still written"
        assert self.emptied is None or self.emptied.is_done(), "the buffer is still read"
        slot.free()

    def _current(self) -> _Slot:
        slot = self._slot
        assert slot.generation == self.generation, (
            f"this buffer is another step's now: lend {slot.generation}, not {self.generation}"
        )
        return slot

    def _in_state(self, *states: BufferState) -> _Slot:
        slot = self._current()
        assert slot.state in states, f"the buffer is {slot.state}, which takes {states}"
        return slot


class StagingRing:
    """Buffers of records, lent in FIFO order; memory is allocated here, not step by step.

    Used by one thread; the buffers' rows may be read and written by others.

    Args:
        executor: allocates the memory and says whether there are two.
        num_buffers: steps that may hold a buffer at once.
        record_width: numbers per record: a row's weights and state.
        dtype: of the records.
        capacity_rows: rows that each buffer holds at the start.
        limit_rows: rows that a buffer may grow to, as the user chose; None: as many as come.

    Attributes:
        num_grown: how many times a buffer was made larger.
    """

    def __init__(
        self,
        executor: Executor,
        num_buffers: int,
        record_width: int,
        dtype: torch.dtype,
        *,
        capacity_rows: int,
        limit_rows: int | None = None,
    ) -> None:
        assert num_buffers >= 1, num_buffers
        assert record_width >= 1, record_width
        assert capacity_rows >= 0, capacity_rows
        assert limit_rows is None or capacity_rows <= limit_rows, (capacity_rows, limit_rows)
        self.num_grown = 0
        self._record_bytes = record_width * dtype.itemsize
        self._limit_rows = limit_rows
        self._slots = [
            _Slot(executor, record_width, dtype, capacity_rows) for _ in range(num_buffers)
        ]
        self._next = 0

    @property
    def num_in_use(self) -> int:
        """Buffers that are neither free nor free as soon as somebody asks."""
        return sum(not slot.is_available() for slot in self._slots)

    @property
    def num_bytes(self) -> RingBytes:
        """Bytes of all buffers, grown ones as they are."""
        device = [array for slot in self._slots for array in slot.device_arrays()]
        return RingBytes(
            host=sum(slot.host.nbytes for slot in self._slots),
            device=sum(array.nbytes for array in device),
        )

    def acquire(self, num_rows: int) -> StagingBuffer:
        """Lends the next buffer, FILLING. Its rows hold anything.

        The step that had it before must have given it back (`dirty`): there are buffers for so many
        steps at once, and no more. What still reads it may be under way: nobody waits here, unless
        the buffer has to grow; who writes the buffer comes after `emptied`.

        Args:
            num_rows: rows that are needed; above its capacity the buffer grows to the next power of
                two, within the limit.

        Raises:
            StagingOverflow: for more rows than the limit; the ring is as it was before.
            BaseException: what the work behind the last event raised.
        """
        self.prepare(num_rows)
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        slot.generation += 1
        buffer = StagingBuffer(slot, num_rows)
        slot.filled = slot.emptied = None
        slot.state = BufferState.FILLING
        return buffer

    def prepare(self, num_rows: int) -> None:
        """All of `acquire` that may fail, and lends nothing: for a step that needs a buffer of
        several rings, and is to have all or none.

        Args:
            num_rows: see `acquire`.

        Raises:
            StagingOverflow: see `acquire`.
            BaseException: see `acquire`; what the allocation of a larger buffer raised.
        """
        assert num_rows >= 0, num_rows
        if self._limit_rows is not None and num_rows > self._limit_rows:
            raise StagingOverflow(num_rows, self._limit_rows, self._record_bytes, len(self._slots))
        slot = self._slots[self._next]
        assert slot.state in (BufferState.FREE, BufferState.DIRTY), (
            f"all {len(self._slots)} buffers are lent: the next one is {slot.state}"
        )
        must_grow = num_rows > slot.host.shape[0]
        if slot.emptied is not None and (must_grow or slot.emptied.is_done()):
            slot.emptied.wait()
            slot.free()
        if must_grow:
            self._grow(slot, num_rows)

    def _grow(self, slot: _Slot, num_rows: int) -> None:
        capacity_rows = 1 << (num_rows - 1).bit_length()
        if self._limit_rows is not None:
            capacity_rows = min(capacity_rows, self._limit_rows)
        slot.allocate(capacity_rows)
        self.num_grown += 1


class _Slot:
    """A buffer's memory and state, whoever it is lent to."""

    def __init__(
        self, executor: Executor, record_width: int, dtype: torch.dtype, capacity_rows: int
    ) -> None:
        self.state = BufferState.FREE
        self.generation = 0
        self.filled: Event | None = None
        self.emptied: Event | None = None
        self._executor = executor
        self._width, self._dtype = record_width, dtype
        self.allocate(capacity_rows)

    def allocate(self, num_rows: int) -> None:
        """Replaces the memory; nobody may be using it."""
        # The old memory goes first, so that both never exist at once.
        self.host = self.device = torch.empty(0, self._width, dtype=self._dtype)
        self.packed: Tensor | None = None
        size = (num_rows, self._width, self._dtype)
        host = self._executor.host_empty(*size)
        if self._executor.has_link:
            self.device = self._executor.device_empty(*size)
            self.packed = self._executor.device_empty(*size)
        else:
            self.device = host
        self.host = host

    def device_arrays(self) -> list[Tensor]:
        """The arrays that aren't the host's."""
        return [self.device, self.packed] if self.packed is not None else []

    def is_available(self) -> bool:
        """Whether `acquire` could lend it at once."""
        return self.state is BufferState.FREE or (
            self.emptied is not None and self.emptied.is_done()
        )

    def free(self) -> None:
        """Lets the next step have it."""
        self.state = BufferState.FREE
        self.filled = self.emptied = None
