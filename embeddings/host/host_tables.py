"""Tables in host memory, as one rank's exchange sees them: hot rows here, cold rows staged.

Every schedule is this one, with another window:

    stage(plans of step t + window)     records set out from the store
    rows(plan), hot_rows(plan)          the step's vectors, from records and from hot rows
    update(gradients)                   records and hot rows
    retire()                            records go on to the next step that holds them, or back

A row is hot or cold for all ranks alike, so a requester asks its owner for cold rows only.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from data.batch import JaggedIds
from embeddings.communicator import Communicator
from embeddings.field_checks import option, whole_number
from embeddings.host.cold_rows import ColdRows, RecordLayout, StagedRows
from embeddings.host.executor import Executor
from embeddings.host.figures import HostCounters
from embeddings.host.hot_rows import COLD, HotRows
from embeddings.host.hot_squares import HotSquares, NewHotState
from embeddings.host.recent_counts import RecentCounts
from embeddings.host.staging import RingBytes, StagingRing
from embeddings.keys import largest_counts
from embeddings.kv_gradients import KVGradients
from embeddings.layout import FeatureSlice, KeySpace, keys_of, stretches_of
from embeddings.replicas import ReplicaRows
from embeddings.requests import HotPart, SplitHot
from embeddings.store import RowStore
from embeddings.table import FeatureConfig, TableConfig
from embeddings.table_group import ColumnRange, TableGroup

Int64Array = npt.NDArray[np.int64]
Mode = Literal["gather", "lookahead", "hotline"]
_RECENT_BYTES = 32 << 20


@dataclass(frozen=True)
class HostSettings:
    """How cold rows are brought (`sharding.host.…`).

    Attributes:
        mode: the schedule.
        lookahead: steps that `lookahead` stages ahead, from 1.
        batch_rows: rows of one step that the buffers are made for.
        staging_bytes: bound of all buffers of this rank on the device, or None: they grow.
        hot_bytes: bound of the hot rows with their state on the device.
        recent_steps: latest steps of which lookups are counted by row; 0: of none.

    Raises:
        ValueError: naming the field, for another type or a value below its least.
    """

    mode: Mode = "gather"
    lookahead: int = 1
    batch_rows: int = 1024
    staging_bytes: int | None = None
    hot_bytes: int = 64 << 20
    recent_steps: int = 0

    def __post_init__(self) -> None:
        option("sharding.host.mode", self.mode, get_args(Mode))
        for key, least in (
            ("lookahead", 1),
            ("batch_rows", 0),
            ("hot_bytes", 0),
            ("recent_steps", 0),
            ("staging_bytes", 0),
        ):
            value = getattr(self, key)
            if value is not None or key != "staging_bytes":
                number = whole_number(f"sharding.host: {key}", value, least=least)
                object.__setattr__(self, key, number)

    @property
    def window(self) -> int:
        """Steps that are staged beyond the one that is computed."""
        return self.lookahead if self.mode == "lookahead" else 0


class HotStretch(NamedTuple):
    """Hot rows of one table, among others.

    Attributes:
        table: name of the table.
        columns: the column ranges that are held here.
        rows_K: their rows.
        position_K: where they are among the others.
    """

    table: str
    columns: tuple[ColumnRange, ...]
    rows_K: Tensor
    position_K: Tensor


@dataclass(eq=False)
class StagedStep:
    """The cold rows of an optimizer step, by key space."""

    rows: dict[int, StagedRows]
    is_used: bool = False


@dataclass(eq=False)
class StagedPlan:
    """Where the records lie that one micro-batch asks for; empty until its step is staged.

    Attributes:
        step: the step's rows.
        position_L: per key space the record of each key asked for.
    """

    step: StagedStep | None = None
    position_L: dict[int, Int64Array] = field(default_factory=dict)


class HostTables:
    """The host tables of one rank: hot rows and cold rows of every key space in host memory.

    Who owns what: the store has every row; `HotRows` and the ring's buffers hold the newest copies
    of some, until `settle`. Called by one thread; the executor's queues read and write the store.
    Collectives: those of `HotRows.load`, at the first `stage` after the hot rows were chosen, and
    that of `HotSquares`.

    Attributes:
        settings: the schedule.
        counters: what it did.
        spaces: the key spaces in host memory, by their index.
        hot: their hot rows.
        hot_group: their groups of hot rows, numbered after the store's: what gradients name.

    Args:
        spaces: all key spaces.
        features: every sparse feature.
        store: this rank's rows.
        comm: the ranks.
        executor: moves records.
        settings: the schedule.
        dtype: type of rows and state.
    """

    def __init__(
        self,
        spaces: Sequence[KeySpace],
        features: Sequence[FeatureConfig],
        store: RowStore,
        comm: Communicator,
        executor: Executor,
        settings: HostSettings,
        dtype: torch.dtype,
    ) -> None:
        self.settings, self.counters, self.executor = settings, HostCounters(), executor
        self._store, self._comm, self._features = store, comm, tuple(features)
        self.spaces = {i: space for i, space in enumerate(spaces) if space.memory == "host"}
        self.hot = {
            i: HotRows(space, store, comm, executor, dtype) for i, space in self.spaces.items()
        }
        first_group = len(store.groups)
        self.hot_group = {i: first_group + n for n, i in enumerate(self.spaces)}
        self._space_of_hot_group = {group: i for i, group in self.hot_group.items()}
        self._hot_squares: HotSquares | None = None
        self._cold: dict[int, ColdRows] = {}
        self._rings: list[StagingRing] = []
        self._space_of_group: dict[int, int] = {}
        for index, space in self.spaces.items():
            group = space.group_of_rank[comm.rank]
            if group is not None:
                ring = self._ring(group, dtype)
                self._rings.append(ring)
                self._cold[index] = ColdRows(store, group, executor, ring, self.counters)
                self._space_of_group[group] = index
        self._recent: dict[int, RecentCounts] = {}
        if settings.recent_steps:
            self._recent = {
                index: RecentCounts(settings.recent_steps, limit_bytes=_RECENT_BYTES)
                for index in self.spaces
            }
        self._window: deque[StagedStep] = deque()
        self._is_settled = self._is_counting = True
        self._num_staged = 0
        # Weak: a store knows nothing of who copies its rows, and mustn't keep it.
        settle = weakref.WeakMethod(self.settle)
        store.before_whole_rows = lambda: _call(settle)

    def _ring(self, group: int, dtype: torch.dtype) -> StagingRing:
        settings = self.settings
        width = RecordLayout.of(self._store.optimizer, self._store.groups[group].dim).width
        num_buffers = settings.window + 2
        most = max(self._store.groups[group].num_rows, 1)
        limit = None
        if settings.staging_bytes is not None:
            groups = sum(1 for g in self._store.groups if g.memory == "host")
            # Over a link, a buffer has a second place for the records that go back.
            places = groups * num_buffers * (2 if self.executor.has_link else 1)
            limit = settings.staging_bytes // (places * width * dtype.itemsize)
        rows = min(settings.batch_rows, most) if limit is None else min(limit, most)
        return StagingRing(
            self.executor, num_buffers, width, dtype, capacity_rows=rows, limit_rows=limit
        )

    # ---------------------------------------------------------------------------- hot and cold

    def split(self, index: int, keys_K: Int64Array) -> HotPart:
        """Which of a batch's distinct keys of a space are hot."""
        slot_K = self.hot[index].slot_of[keys_K]
        is_hot_K = slot_K != COLD
        hot_K = np.flatnonzero(is_hot_K)
        return HotPart(
            torch.from_numpy(np.flatnonzero(~is_hot_K)),
            torch.from_numpy(hot_K),
            torch.from_numpy(slot_K[hot_K].astype(np.int64)),
        )

    def replicas(self) -> list[ReplicaRows]:
        """The hot rows, as rows that every rank holds: as many as there may be."""
        return [
            ReplicaRows(self.hot_group[index], 0, self.hot_capacity(index), space.dim)
            for index, space in self.spaces.items()
        ]

    def hot_capacity(self, index: int) -> int:
        """Hot rows that a space may have at most."""
        num_rows = int(self.spaces[index].bases[-1])
        return min(num_rows, self.settings.hot_bytes // self.hot[index].record_bytes)

    def hot_row_bytes(self) -> dict[str, int]:
        """Per table what a hot row takes, at most: a record for each cut of its columns."""
        num_bytes: dict[str, int] = {}
        for index, hot in self.hot.items():
            for table, _ in self._cuts(index):
                num_bytes[table] = num_bytes.get(table, 0) + hot.record_bytes
        return num_bytes

    def choose_rows(self, rows_of_table: Mapping[str, Int64Array]) -> None:
        """As `choose_hot`, by rows of tables: all their columns in host memory become hot.

        Args:
            rows_of_table: per table distinct rows.
        """
        chosen: dict[int, Int64Array] = {}
        for index in self.spaces:
            keys = [
                keys_of(part, rows_of_table[table])[0]
                for (table, _), part in self._cuts(index).items()
                if table in rows_of_table
            ]
            if keys:
                chosen[index] = np.unique(np.concatenate(keys))
        self.choose_hot(chosen)

    def split_of(self, index: int) -> SplitHot | None:
        """Splits and counts the distinct keys of a batch; None for a space in device memory."""
        if index not in self.spaces:
            return None

        def split(keys_K: Int64Array, counts_K: Int64Array) -> HotPart:
            part = self.split(index, keys_K)
            if self._is_counting:
                self.count_batch(part, counts_K)
                if index in self._recent:
                    self._recent[index].add(keys_K, counts_K)
            return part

        return split

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What is planned within was counted before."""
        self._is_counting = False
        try:
            yield
        finally:
            self._is_counting = True

    def all_hot(self, ids: JaggedIds) -> npt.NDArray[np.bool_]:
        """Per sample whether every id is hot, or of a table in device memory.

        By cumulative sums, which are right for empty bags too. The ids must have been checked.
        """
        values_L, offsets = ids.values_L.numpy(), ids.offsets.numpy()
        batch_size = ids.batch_size
        all_hot_B = np.ones(batch_size, dtype=bool)
        for index, space in self.spaces.items():
            slot_of = self.hot[index].slot_of
            for part in space.slices:
                first = part.feature * batch_size
                bags = offsets[first : first + batch_size + 1]
                keys_L, kept_L = keys_of(part, values_L[bags[0] : bags[-1]])
                is_cold_L = slot_of[keys_L] == COLD
                if kept_L is not None:
                    is_cold_L, kept_cold_L = np.zeros(kept_L.size, dtype=bool), is_cold_L
                    is_cold_L[kept_L] = kept_cold_L
                num_cold = np.concatenate([[0], np.cumsum(is_cold_L)])
                bounds = bags - bags[0]
                all_hot_B &= num_cold[bounds[1:]] == num_cold[bounds[:-1]]
        return all_hot_B

    def count_samples(self, is_hot_B: npt.NDArray[np.bool_]) -> None:
        """Counts samples, of which `all_hot` has told which are wholly hot."""
        if self._is_counting:
            self.counters.num_samples += is_hot_B.size
            self.counters.num_hot_samples += int(is_hot_B.sum())

    def count_batch(self, part: HotPart, counts_K: Int64Array) -> None:
        """Counts a batch's lookups in one space; `counts_K` is how often each key occurs."""
        counters = self.counters
        counters.num_lookups += int(counts_K.sum())
        counters.num_hot_lookups += int(counts_K[part.hot_K.numpy()].sum())
        counters.num_unique += counts_K.size
        counters.num_hot_unique += part.hot_K.numel()

    def recent_rows(self) -> dict[str, tuple[Int64Array, Int64Array]]:
        """Per table the rows that this rank's samples looked up in the latest steps, ascending, and
        how often each: those with any columns in host memory. A row that several cuts hold there
        is counted by each of them, and once here."""
        rows: dict[str, list[tuple[Int64Array, Int64Array]]] = {}
        for index, recent in self._recent.items():
            keys_K, counts_K = recent.merged()
            for (table, _), part in self._cuts(index).items():
                rows.setdefault(table, []).extend(
                    (keys_K[low:high] - shift, counts_K[low:high])
                    for low, high, shift in stretches_of(part, keys_K)
                )
        return {table: largest_counts(stretches) for table, stretches in rows.items()}

    def _cuts(self, index: int) -> dict[tuple[str, tuple[ColumnRange, ...]], FeatureSlice]:
        """By table and columns one of the slices of a space: features of one table have equal
        ones."""
        return {
            (self._features[part.feature].table, part.columns): part
            for part in self.spaces[index].slices
        }

    def own_hot_rows(self, group: int, slots_K: Tensor) -> list[HotStretch]:
        """Of some hot rows those that this rank owns, by table."""
        index = self._space_of_hot_group[group]
        space, rank = self.spaces[index], self._comm.rank
        own_group = space.group_of_rank[rank]
        if own_group is None:
            return []
        keys_K = torch.from_numpy(self.hot[index].keys_H)[slots_K.cpu()] - int(space.bases[rank])
        table_group = self._store.groups[own_group]
        found = []
        for piece, key in zip(table_group.pieces, table_group.first_keys, strict=True):
            at_K = torch.nonzero((keys_K >= key) & (keys_K < key + piece.num_rows))[:, 0]
            rows_K = keys_K[at_K] - key + piece.row_start
            found.append(HotStretch(piece.table, piece.columns, rows_K, at_K))
        return found

    @property
    def staging_bytes(self) -> RingBytes:
        """Bytes of all staging buffers of this rank."""
        rings = [ring.num_bytes for ring in self._rings]
        return RingBytes(sum(r.host for r in rings), sum(r.device for r in rings))

    @property
    def slot_map_bytes(self) -> int:
        """Bytes that tell which rows are hot."""
        return sum(hot.slot_of.nbytes for hot in self.hot.values())

    def choose_hot(self, keys_of_space: Mapping[int, Int64Array]) -> None:
        """Makes these keys the hot ones, per space ascending and distinct: the same on all ranks,
        between steps, with nothing staged. A row is hot with all its columns in host memory.

        Raises:
            ValueError: for keys that aren't ascending rows of their space, more than there may be,
                or a row of which only some columns are chosen. Nothing is changed then.
        """
        assert not self._window, "nothing may be staged while the hot rows change"
        empty = np.empty(0, dtype=np.int64)
        keys = {index: keys_of_space.get(index, empty) for index in self.spaces}
        for index, keys_H in keys.items():
            self._check_keys(index, keys_H)
        self._check_whole_rows(keys)
        self.settle()
        for index, hot in self.hot.items():
            hot.choose(keys[index])
        if self._hot_squares is not None:
            self._hot_squares.hot_rows_chosen()
        for recent in self._recent.values():
            recent.clear()  # The next choice is by what comes from now on.

    def _check_keys(self, index: int, keys_H: Int64Array) -> None:
        num_rows, most = int(self.spaces[index].bases[-1]), self.hot_capacity(index)
        if keys_H.size > most:
            raise ValueError(
                f"{keys_H.size:,} hot rows are chosen where sharding.host.hot_mb holds {most:,}; "
                "raise it or choose fewer"
            )
        is_ascending = keys_H.size < 2 or bool((np.diff(keys_H) > 0).all())
        if keys_H.size and not (is_ascending and keys_H[0] >= 0 and keys_H[-1] < num_rows):
            raise ValueError(f"hot keys must be distinct, ascending and within 0 to {num_rows - 1}")

    def _check_whole_rows(self, keys_of_space: Mapping[int, Int64Array]) -> None:
        """Refuses a row that is hot in some of its columns only: the state that it has as a whole
        (`HotSquares`) would be made from some of them."""
        hot_rows: dict[str, list[Int64Array]] = {}
        for index, keys_H in keys_of_space.items():
            for (table, _), part in self._cuts(index).items():
                for low, high, shift in stretches_of(part, keys_H):
                    hot_rows.setdefault(table, []).append(keys_H[low:high] - shift)
        rows_of_table = {name: np.unique(np.concatenate(rows)) for name, rows in hot_rows.items()}
        for index, keys_H in keys_of_space.items():
            for (table, columns), part in self._cuts(index).items():
                rows = rows_of_table.get(table)
                if rows is None:
                    continue
                wanted, is_here = keys_of(part, rows)
                missing = np.flatnonzero(np.isin(wanted, keys_H, invert=True))
                if missing.size:
                    row = (rows if is_here is None else rows[is_here])[missing[0]]
                    cut = ", ".join(f"{start}:{stop}" for start, stop in columns)
                    raise ValueError(
                        f"table {table!r}: row {row} is chosen as hot in some of its columns but "
                        f"not in columns {cut}; a row is hot with all its columns"
                    )

    # ------------------------------------------------------------------------------------ steps

    def stage(self, plans: Sequence[tuple[StagedPlan, Sequence[Int64Array | None]]]) -> None:
        """Sets out for the cold rows of an optimizer step; called once per step, in their order,
        by all ranks, at most `settings.window` steps ahead.

        Args:
            plans: per micro-batch where to note the records, and per key space the keys that all
                ranks ask of this one.

        Raises:
            StagingOverflow: where a step has more cold rows than the buffers may hold; nothing is
                staged then.
        """
        self.load_hot()
        keys_of_space: dict[int, Int64Array] = {}
        for index, cold in self._cold.items():
            asked = [keys[index] for _, keys in plans]
            keys_L = [keys for keys in asked if keys is not None]
            keys_K = np.unique(np.concatenate(keys_L)) if keys_L else np.empty(0, dtype=np.int64)
            cold.prepare(keys_K)
            keys_of_space[index] = keys_K
        # From here nothing fails: a step is staged in all spaces or in none.
        self._num_staged += 1
        step = StagedStep({})
        for index, keys_K in keys_of_space.items():
            step.rows[index] = self._cold[index].stage(
                keys_K, self._num_staged, after_writes=self.settings.mode == "hotline"
            )
        for staged, keys in plans:
            staged.step = step
            for index, rows in step.rows.items():
                keys_here = keys[index]
                assert keys_here is not None
                staged.position_L[index] = rows.positions(keys_here)
        self._window.append(step)

    def rows(self, index: int, plan: StagedPlan) -> Tensor:
        """What was asked of this rank in a space, `(L, D)`; waits until it is here."""
        assert plan.step is not None, "the step isn't staged"
        position_L = plan.position_L[index]
        if position_L.size:
            self._use(plan.step)
        return self._cold[index].gather(plan.step.rows[index], position_L)

    def hot_rows(self, index: int, slots_K: Tensor) -> Tensor:
        """Weights of hot rows, `(K, D)`."""
        return self.hot[index].gather(slots_K)

    def holds(self, group: int) -> bool:
        """Whether gradients of this group are for `update`."""
        return group in self._space_of_group or group in self._space_of_hot_group

    def begin_update(self) -> None:
        """The oldest staged step is about to be updated."""
        self.load_hot()
        self._is_settled = False
        self._use(self._window[0])

    def update(
        self,
        group: int,
        keys_K: Tensor,
        grads_KD: Tensor,
        lr: float,
        row_state_K1: Tensor | None = None,
    ) -> None:
        """Updates rows of the oldest staged step: by keys of a group in the store, or by slots of a
        space's hot rows. `row_state_K1`: see `RowStore.apply`."""
        if not keys_K.numel():
            return
        if group not in self._space_of_hot_group:
            index = self._space_of_group[group]
            self._cold[index].update(keys_K, grads_KD, lr, row_state_K1)
            return
        index = self._space_of_hot_group[group]
        first_K = None
        if row_state_K1 is not None:
            assert self._hot_squares is not None
            first_K = self._hot_squares.first_columns(index, keys_K)
        self.hot[index].update(keys_K, grads_KD, lr, row_state_K1, first_K)

    def keep_row_state(
        self, tables: Sequence[TableConfig], groups_of_rank: Sequence[Sequence[TableGroup]]
    ) -> None:
        """From now on hot rows have one state for all their columns, which are cut.

        Args:
            tables: every table.
            groups_of_rank: the groups of every rank.
        """
        self._hot_squares = HotSquares(
            self.spaces,
            self.hot,
            self._features,
            tables,
            self._store,
            self._comm,
            groups_of_rank,
        )
        self._hot_squares.hot_rows_chosen()

    def new_row_state(
        self,
        gradients: Sequence[KVGradients],
        cold_state: Callable[[Sequence[KVGradients]], dict[int, Tensor]],
    ) -> dict[int, Tensor]:
        """By group, of hot rows or in the store, the new state of whole rows.

        Args:
            gradients: of hot rows and of the store's, one per group; called by all ranks.
            cold_state: makes that of rows in the store, all of whose columns it is given.
        """
        of_store = [entry for entry in gradients if entry.group not in self._space_of_hot_group]
        if self._hot_squares is None:
            return cold_state(of_store)
        touched = {
            self._space_of_hot_group[group]: (slots_K, grads_KD)
            for group, slots_K, grads_KD in gradients
            if group in self._space_of_hot_group and slots_K.numel()
        }
        new: NewHotState = self._hot_squares.new_state(touched, of_store)
        state = new.joined(cold_state(new.cold(of_store)), of_store)
        return state | {self.hot_group[index]: values for index, values in new.of_space.items()}

    def read(self, group: int, keys_K: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Copies of rows and states, the newest ones; in host memory those that are staged."""
        if group not in self._space_of_group:
            return self._store.gather_all(group, keys_K)
        return self._cold[self._space_of_group[group]].read(keys_K)

    def retire(self) -> None:
        """Ends the oldest staged step, after its update."""
        self._window.popleft()
        for cold in self._cold.values():
            cold.retire(waits=self.settings.mode == "gather")
        self.counters.num_steps += 1

    def _use(self, step: StagedStep) -> None:
        if step.is_used:
            return
        step.is_used = True
        for index, rows in step.rows.items():
            self._cold[index].use(rows)

    def load_hot(self) -> None:
        """Has the hot rows on the device; a collective of all ranks where they were chosen, or
        overwritten, since the last call."""
        if all(hot.is_loaded for hot in self.hot.values()):
            return
        with self._comm.uncounted():
            for hot in self.hot.values():
                hot.load()
        self.counters.num_hot_loads += 1

    # ------------------------------------------------------------------------------- whole rows

    @property
    def num_staged(self) -> int:
        """Steps that are staged and not retired."""
        return len(self._window)

    def settle(self) -> None:
        """Makes the store hold every row's newest values. Nothing that is staged is lost."""
        if self._is_settled:
            return
        for hot in self.hot.values():
            hot.settle()
        for cold in self._cold.values():
            cold.settle()
        self._is_settled = True

    def drop_staged(self) -> None:
        """Forgets the staged steps: their batches will be planned anew."""
        self.settle()
        for cold in self._cold.values():
            cold.drop()
        self._window.clear()

    def rows_changed(self) -> None:
        """The store's rows were overwritten, since the last `settle` and by all ranks alike: every
        copy, hot or staged, is read anew."""
        for hot in self.hot.values():
            hot.forget()
        for cold in self._cold.values():
            cold.refresh()
        self._is_settled = True

    def close(self) -> None:
        """Ends the executor's threads."""
        self.executor.close()


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Calls a method, unless its object is gone."""
    alive = method()
    if alive is not None:
        alive()
