"""The cold rows of one table group: brought to the device ahead of use, and back.

A row's newest copy is at one place: in the record of the next staged step that holds the row, else
in the store. Three rules keep it so, whatever runs at the same time:

    stage     a row that an earlier step in the window holds isn't read from the store: its record
              will be *forwarded* by the latest of these, updated, with its optimizer state
    retire    after a step's update each record goes to the next staged step that holds the row, or,
              where none does, back to the store
    order     a read of the store waits for those writes that are under way and hold one of its rows
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from embeddings.host.executor import Event, Executor
from embeddings.host.figures import HostCounters
from embeddings.host.staging import StagingBuffer, StagingRing
from embeddings.row_optim import RowOptimizerConfig, state_widths
from embeddings.row_update import update_in_place
from embeddings.store import RowStore

Int64Array = npt.NDArray[np.int64]


@dataclass(eq=False)
class Forward:
    """Records of one staged step that a later one is given when the first is done with them."""

    target: StagedRows
    source_M: Int64Array
    target_M: Int64Array


@dataclass(eq=False)
class StagedRows:
    """One step's cold rows of one group.

    Records lie in the buffer as: those read from the store, then those that are forwarded, each in
    the order of the keys.

    Attributes:
        step: number of the step, from 1.
        keys_K: distinct keys of the group, ascending.
        position_K: where each key's record lies in the buffer.
        num_fetched: records read from the store.
        buffer: where they lie.
        forwards: what later steps get.
        is_held_later_K: per record whether a later staged step holds the row.
        newer: records that were forwarded here: the store's rows are older.
    """

    step: int
    keys_K: Int64Array
    position_K: Int64Array
    num_fetched: int
    buffer: StagingBuffer
    is_held_later_K: npt.NDArray[np.bool_]
    ready: Event | None = None
    forwards: list[Forward] = field(default_factory=list)
    newer: list[Int64Array] = field(default_factory=list)

    def find(self, keys_L: Int64Array) -> tuple[npt.NDArray[np.bool_], Int64Array]:
        """Which of the keys are held here, and where their records lie (where held)."""
        if not self.keys_K.size:
            return np.zeros(keys_L.size, dtype=bool), np.zeros(keys_L.size, dtype=np.int64)
        index_L = np.minimum(np.searchsorted(self.keys_K, keys_L), self.keys_K.size - 1)
        return self.keys_K[index_L] == keys_L, self.position_K[index_L]

    def keys_at(self, position_M: Int64Array) -> Int64Array:
        """The keys of some records."""
        index_of_position = np.empty_like(self.position_K)
        index_of_position[self.position_K] = np.arange(self.keys_K.size)
        return self.keys_K[index_of_position[position_M]]

    def positions(self, keys_L: Int64Array) -> Int64Array:
        """Where the records of keys lie, all of which are held here."""
        is_held_L, position_L = self.find(keys_L)
        if not is_held_L.all():
            raise ValueError("a row was asked for that isn't staged")
        return position_L


@dataclass(frozen=True, eq=False)
class _Write:
    """A write to the store that may be under way; its keys are ascending."""

    keys_K: Int64Array
    event: Event


class ColdRows:
    """The staged records of one table group of this rank, and their way between store and device.

    Owns the ring of buffers; borrows the store's rows. All methods are called by the thread that
    computes; reads and writes of the store run in the executor's queues. No collectives.

    Args:
        store: the rows.
        group: index of the group.
        executor: moves the records.
        ring: the buffers.
        counters: what is counted.
    """

    def __init__(
        self,
        store: RowStore,
        group: int,
        executor: Executor,
        ring: StagingRing,
        counters: HostCounters,
    ) -> None:
        self._store, self._group, self._executor, self._ring = store, group, executor, ring
        self._counters = counters
        self._layout = RecordLayout.of(store.optimizer, store.groups[group].dim)
        self._window: deque[StagedRows] = deque()
        self._writes: list[_Write] = []
        self._arrays = [array.numpy() for array in store.arrays(group)]

    def prepare(self, keys_K: Int64Array) -> None:
        """All of `stage` that may fail; nothing is staged.

        Raises:
            StagingOverflow: see `StagingRing.acquire`.
        """
        self._ring.prepare(keys_K.size)

    def stage(self, keys_K: Int64Array, step: int, *, after_writes: bool = False) -> StagedRows:
        """Begins to bring the records of a step here; steps come in order.

        Args:
            keys_K: distinct keys of the group, ascending.
            step: number of the step.
            after_writes: read the store only after all writes so far, not just those of its rows.

        Raises:
            StagingOverflow: see `StagingRing.acquire`.
        """
        num_rows = keys_K.size
        sources, is_fetched_K = self._sources(keys_K)
        num_fetched = int(is_fetched_K.sum())
        position_K = np.empty(num_rows, dtype=np.int64)
        position_K[is_fetched_K] = np.arange(num_fetched)
        position_K[~is_fetched_K] = np.arange(num_fetched, num_rows)
        staged = StagedRows(
            step,
            keys_K,
            position_K,
            num_fetched,
            self._ring.acquire(num_rows),
            np.zeros(num_rows, dtype=bool),
        )
        for source, index_M, source_M in sources:
            source.is_held_later_K[source_M] = True
            source.forwards.append(Forward(staged, source_M, position_K[index_M]))
        staged.ready = self._fetch(staged, keys_K[is_fetched_K], after_writes)
        staged.buffer.filled_by(staged.ready)
        self._window.append(staged)
        self._counters.count_staged(num_rows, num_fetched, self._row_bytes())
        return staged

    def use(self, staged: StagedRows) -> None:
        """Has the computation wait until the records are here."""
        assert staged.ready is not None
        self._counters.stall_s += self._executor.wait(staged.ready)
        staged.buffer.ready()
        staged.buffer.use()

    def gather(self, staged: StagedRows, position_L: Int64Array) -> Tensor:
        """A copy of weights, `(L, D)`, on the device.

        Args:
            staged: the step, after `use`.
            position_L: from `StagedRows.positions`.
        """
        weights = staged.buffer.device_KR[:, : self._layout.dim]
        return weights.index_select(0, self._on_device(position_L))

    def read(self, keys_K: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Copies of weights and states of keys that the oldest staged step holds."""
        staged = self._window[0]
        at = self._on_device(staged.positions(keys_K.numpy()))
        weights, states = self._layout.views(staged.buffer.device_KR.index_select(0, at))
        return weights, states

    def update(
        self, keys_K: Tensor, grads_KD: Tensor, lr: float, row_state_K1: Tensor | None = None
    ) -> None:
        """Updates the records of the oldest staged step, as `RowStore.apply` does rows.

        Args:
            keys_K: distinct keys of the group.
            grads_KD: one gradient per key.
            lr: learning rate.
            row_state_K1: see `RowStore.apply`.
        """
        staged = self._window[0]
        weights, state = self._layout.views(staged.buffer.device_KR)
        at_K = self._on_device(staged.positions(keys_K.cpu().numpy()))
        update_in_place(
            self._store.optimizer,
            weights,
            state,
            at_K,
            grads_KD,
            lr=lr,
            num_steps=self._store.num_steps,
            row_state_K1=row_state_K1,
        )
        if row_state_K1 is not None:
            (whole,) = state.values()
            for low, high in self._store.with_first_column(self._group, keys_K):
                whole.index_copy_(0, at_K[low:high], row_state_K1[low:high])

    def retire(self, *, waits: bool) -> None:
        """Gives the oldest step's records, now updated, to whom they belong next.

        Args:
            waits: return only when what goes back to the store is there.
        """
        staged = self._window.popleft()
        records = staged.buffer.device_KR
        for forward in staged.forwards:
            self._forward(records, forward)
        position_M = np.flatnonzero(~staged.is_held_later_K)
        keys_M = staged.keys_at(position_M)
        self._counters.count_retired(staged.keys_K.size, keys_M.size, self._row_bytes())
        event = self._write_back(staged.buffer, position_M, keys_M, staged.step)
        staged.buffer.dirty(event)
        if waits:
            self._counters.stall_s += self._executor.wait(event)
        self._forget_done_writes()
        if keys_M.size:
            self._writes.append(_Write(np.sort(keys_M), event))

    def settle(self) -> None:
        """Makes the store hold every row's newest values. Staged records stay as they are."""
        for write in self._writes:
            write.event.wait()
        self._writes = []
        for staged in self._window:
            if not staged.newer:
                continue
            position_M = np.unique(np.concatenate(staged.newer))
            staged.newer = []
            records = staged.buffer.device_KR.index_select(0, self._on_device(position_M))
            self._write(staged.keys_at(position_M), records.cpu().numpy())
            self._counters.num_flushed += position_M.size

    def refresh(self) -> None:
        """Reads the staged records anew: the store's rows were overwritten, and are the newest."""
        for write in self._writes:
            write.event.wait()
        self._writes = []
        for staged in self._window:
            assert staged.ready is not None
            staged.ready.wait()
            # Also those that an earlier step is to give: what it gives comes later.
            staged.newer = []
            records = torch.empty(
                staged.keys_K.size, self._layout.width, dtype=staged.buffer.device_KR.dtype
            )
            for array, columns in zip(self._arrays, self._layout.columns, strict=True):
                records.numpy()[:, columns] = array[staged.keys_K]
            at_K = self._on_device(staged.position_K)
            staged.buffer.device_KR.index_copy_(0, at_K, records.to(self._executor.device))

    def drop(self) -> None:
        """Forgets the staged steps, after `settle`: their batches are to be planned anew."""
        for staged in self._window:
            assert not staged.newer, "settle comes first"
            assert staged.ready is not None
            staged.ready.wait()
            staged.buffer.discard()
        self._window.clear()

    # ---------------------------------------------------------------------------------- the way

    def _sources(
        self, keys_K: Int64Array
    ) -> tuple[list[tuple[StagedRows, Int64Array, Int64Array]], npt.NDArray[np.bool_]]:
        """Which staged step each key comes from, the latest that holds it: (step, indices of the
        keys, where their records lie there); and which keys come from none."""
        is_open_K = np.ones(keys_K.size, dtype=bool)
        sources = []
        for earlier in reversed(self._window):
            open_M = np.flatnonzero(is_open_K)
            is_held_M, position_M = earlier.find(keys_K[open_M])
            if is_held_M.any():
                sources.append((earlier, open_M[is_held_M], position_M[is_held_M]))
                is_open_K[open_M[is_held_M]] = False
        return sources, is_open_K

    def _fetch(self, staged: StagedRows, keys_M: Int64Array, after_writes: bool) -> Event:
        buffer, num = staged.buffer, keys_M.size
        emptied = [] if buffer.emptied is None else [buffer.emptied]
        if not num:
            return emptied[0] if emptied else self._executor.compute_event()
        target = buffer.host_KR.numpy()[:num]

        def read() -> None:
            for array, columns in zip(self._arrays, self._layout.columns, strict=True):
                target[:, columns] = np.take(array, keys_M, axis=0, mode="clip")

        num_bytes = num * self._row_bytes()
        event = self._executor.submit(
            "gather",
            read,
            num_bytes=num_bytes,
            after=[*emptied, *self._writes_of(keys_M, after_writes)],
            label="gather",
            step=staged.step,
        )
        if not self._executor.has_link:
            return event

        host, device = buffer.host_KR[:num], buffer.device_KR[:num]
        return self._executor.submit(
            "to_device",
            lambda: self._executor.copy(device, host),
            num_bytes=num_bytes,
            after=[event],
            label="to device",
            step=staged.step,
        )

    def _writes_of(self, keys_M: Int64Array, after_writes: bool) -> list[Event]:
        """The writes that a read of these keys has to wait for."""
        self._forget_done_writes()
        return [
            write.event
            for write in self._writes
            if after_writes or _intersect(write.keys_K, keys_M)
        ]

    def _forget_done_writes(self) -> None:
        for write in self._writes:
            if write.event.is_done():
                write.event.wait()  # Raises what went wrong: nobody else might ask.
        self._writes = [write for write in self._writes if not write.event.is_done()]

    def _forward(self, records: Tensor, forward: Forward) -> None:
        """Copies updated records, weights and state, to a later step."""
        target = forward.target
        emptied = target.buffer.emptied
        if emptied is not None and not self._executor.has_link:
            # In one memory, the last step's records are written back from this very buffer.
            self._counters.stall_s += self._executor.wait(emptied)
        target.buffer.device_KR.index_copy_(
            0,
            self._on_device(forward.target_M),
            records.index_select(0, self._on_device(forward.source_M)),
        )
        target.newer.append(forward.target_M)

    def _write_back(
        self, buffer: StagingBuffer, position_M: Int64Array, keys_M: Int64Array, step: int
    ) -> Event:
        num_bytes = keys_M.size * self._row_bytes()
        if not keys_M.size:
            return self._executor.compute_event()
        if not self._executor.has_link:
            records = buffer.device_KR.numpy()
            return self._executor.submit(
                "scatter",
                lambda: self._write(keys_M, records[position_M]),
                num_bytes=num_bytes,
                after=[self._executor.compute_event()],
                label="scatter",
                step=step,
            )
        # Packed on the device, so that the link carries no row that stays.
        packed = buffer.packed_KR[: keys_M.size]
        torch.index_select(buffer.device_KR, 0, self._on_device(position_M), out=packed)
        host = buffer.host_KR[: keys_M.size]
        copied = self._executor.submit(
            "to_host",
            lambda: self._executor.copy(host, packed),
            num_bytes=num_bytes,
            after=[self._executor.compute_event()],
            label="to host",
            step=step,
        )
        return self._executor.submit(
            "scatter",
            lambda: self._write(keys_M, host.numpy()),
            num_bytes=num_bytes,
            after=[copied],
            label="scatter",
            step=step,
        )

    def _write(self, keys_M: Int64Array, records_MR: npt.NDArray[np.generic]) -> None:
        for array, columns in zip(self._arrays, self._layout.columns, strict=True):
            array[keys_M] = records_MR[:, columns]

    def _on_device(self, rows: Int64Array) -> Tensor:
        return index_on_device(torch.from_numpy(rows), self._executor.device)

    def _row_bytes(self) -> int:
        return self._layout.width * self._arrays[0].itemsize


@dataclass(frozen=True)
class RecordLayout:
    """A record: the weights of a row, then each of its states.

    Attributes:
        dim: columns of the weights, `D`.
        names: of the states.
        columns: of the weights and of each state.
        width: all columns.
    """

    dim: int
    names: tuple[str, ...]
    columns: tuple[slice, ...]
    width: int

    @classmethod
    def of(cls, optimizer: RowOptimizerConfig, dim: int) -> RecordLayout:
        """That of rows of `dim` columns."""
        widths = state_widths(optimizer, dim)
        columns, start = [], 0
        for width in (dim, *widths.values()):
            columns.append(slice(start, start + width))
            start += width
        return cls(dim, tuple(widths), tuple(columns), start)

    def views(self, records: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Weights and states of records, as views."""
        parts = [records[:, columns] for columns in self.columns]
        return parts[0], dict(zip(self.names, parts[1:], strict=True))


def index_on_device(rows: Tensor, device: torch.device) -> Tensor:
    """Row numbers where the rows are: themselves on a CPU, a copy on another device."""
    if device.type == "cuda" and rows.device.type == "cpu" and rows.numel():
        # From pageable memory the copy would wait for all that was issued to the stream before.
        return rows.pin_memory().to(device, non_blocking=True)
    return rows.to(device)


def _intersect(first: Int64Array, second: Int64Array) -> bool:
    """Whether two ascending arrays of distinct keys share one."""
    if first.size > second.size:
        first, second = second, first
    if not first.size:
        return False
    index = np.minimum(np.searchsorted(second, first), second.size - 1)
    return bool((second[index] == first).any())
