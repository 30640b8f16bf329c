"""`train.warm_start`: a new run starts from another's model, whose tables may differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from data.errors import UserError
from data.parquet import PreparedDataset
from dlrm.build import build_model, build_tables
from dlrm.checkpoint import CheckpointInfo, find_checkpoint
from dlrm.checkpoint_load import on_all_ranks
from dlrm.checkpoint_rows import RowsReader, StoredTable
from dlrm.config import TrainRun
from dlrm.dense_moments import rescale_first_layer
from dlrm.resume import is_of_run
from dlrm.tensor_file import dtype_name, names_of
from dlrm.warm_start_fit import Fit
from embeddings.sharded import ShardedEmbeddings
from embeddings.store import WEIGHT, RowsPart, RowStore, take_columns
from embeddings.table import TableConfig


@dataclass(frozen=True)
class RowCounts:
    """What became of a table's rows.

    Attributes:
        kept: taken from the checkpoint.
        new: rows of this run's table that keep their start values.
        dropped: rows of the checkpoint's that have no place in it.
    """

    kept: int
    new: int
    dropped: int

    @property
    def is_whole(self) -> bool:
        """All rows, and no others."""
        return self.new == self.dropped == 0


@dataclass(frozen=True)
class WarmStarted:
    """What was loaded and what wasn't; the `warm_start` part of result.json.

    Attributes:
        checkpoint: its folder.
        step: of the run that it is of.
        rows: how they were matched, `token` or `index`.
        tables: of those that both have.
        new_tables: start anew.
        dropped_tables: of the checkpoint; a table that starts anew may be among them.
        state: the rule whose state came along with the rows, or None.
        dense_loaded: names of dense weights.
        dense_new: names of those that keep their start values.
        dense_dropped: names of the checkpoint's that were not taken.
        notes: what else a user is to know.
    """

    checkpoint: str
    step: int
    rows: str
    tables: dict[str, RowCounts]
    new_tables: list[str]
    dropped_tables: list[str]
    state: str | None
    dense_loaded: list[str]
    dense_new: list[str]
    dense_dropped: list[str]
    notes: list[str]

    def as_dict(self) -> dict[str, Any]:
        """JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For the terminal, a line of each kind that occurs."""
        lines = [f"from step {self.step:,} of {self.checkpoint}; this run begins at step 0"]
        whole = [counts for counts in self.tables.values() if counts.is_whole]
        changed = {name: c for name, c in self.tables.items() if not c.is_whole}
        if whole:
            rows = sum(counts.kept for counts in whole)
            lines.append(f"{_num(len(whole), 'table')} whole, {rows:,} rows, by {self.rows}")
        if changed:
            shown = "; ".join(
                f"{name} {c.kept:,} rows kept, {c.new:,} new, {c.dropped:,} dropped"
                for name, c in changed.items()
            )
            lines.append(f"{_num(len(changed), 'table')} changed, by {self.rows}: {shown}")
        for what, names in (("new", self.new_tables), ("dropped", self.dropped_tables)):
            if names:
                lines.append(f"{_num(len(names), 'table')} {what}: {', '.join(names)}")
        state = "starts anew" if self.state is None else f"comes along ({self.state})"
        lines.append(f"optimizer state of kept rows {state}, that of dense weights starts anew")
        dense = f"{_num(len(self.dense_loaded), 'dense weight')} loaded"
        for what, names in (("start anew", self.dense_new), ("dropped", self.dense_dropped)):
            if names:
                dense += f"; {len(names)} {what}: {', '.join(names)}"
        return [f"warm    {line}" for line in [*lines, dense, *self.notes]]


def find_warm_start(config: TrainRun, run_dir: Path) -> CheckpointInfo | None:
    """The checkpoint that `train.warm_start.path` names; None where it is null.

    Raises:
        UserError: where there is none, or it lies in this run's own folder.
    """
    given = config.train.warm_start.path
    if given is None:
        return None
    info = find_checkpoint(given, run_dir, "train.warm_start.path")
    if is_of_run(info, run_dir):
        raise UserError(
            f"train.warm_start.path={given}: {info.folder} is in this run's own folder; choose "
            "another with hydra.run.dir=, or go on with that run with train.resume=latest"
        )
    return info


def check_warm_start(info: CheckpointInfo, config: TrainRun, dataset: PreparedDataset) -> None:
    """Refuses a checkpoint that doesn't fit, before anything of the run is made.

    Raises:
        UserError: listing what differs, and the keys.
    """
    tables, _ = build_tables(config, dataset.manifest)
    Fit(info, config, dataset, tables, build_model(config, dataset.manifest)).check()


def warm_start(
    info: CheckpointInfo,
    config: TrainRun,
    dataset: PreparedDataset,
    model: nn.Module,
    embeddings: ShardedEmbeddings,
    beat: Callable[[], None] = lambda: None,
) -> WarmStarted:
    """Puts what fits of a checkpoint in place; the rest keeps its start values.

    Called by all ranks, before the first step; each writes the rows that it holds. A table's stored
    rows are read once, in order. Extra memory: a stretch of 8 MiB, and where tokens are compared,
    both dictionaries of one table and 8 bytes for each of its rows.

    Args:
        info: the checkpoint.
        config: of this run; `train.warm_start` says what may differ.
        dataset: what it trains on.
        model: the dense network, with start values.
        embeddings: the tables, with start values.
        beat: called for every stretch.

    Returns:
        What was loaded, the same on all ranks.

    Raises:
        UserError: on all ranks alike, listing what doesn't fit (before anything is loaded), or
            naming a file that is damaged.
    """
    comm = embeddings.comm
    loading = _Loading(info, config, dataset, model, embeddings)
    with comm.uncounted():
        on_all_ranks(comm, loading.check)
        on_all_ranks(comm, lambda: loading.load(beat))
        # The first rank has counted rows that others don't hold.
        outcome: WarmStarted = comm.all_gather_object(loading.outcome())[0]
    return outcome


class _Loading:
    """One rank's part; nothing in it communicates."""

    def __init__(
        self,
        info: CheckpointInfo,
        config: TrainRun,
        dataset: PreparedDataset,
        model: nn.Module,
        embeddings: ShardedEmbeddings,
    ) -> None:
        self._info, self._config = info, config
        self._model, self._embeddings = model, embeddings
        self._fit = Fit(info, config, dataset, embeddings.tables, model)
        self._counts: dict[str, RowCounts] = {}

    def check(self) -> None:
        """Refuses what doesn't fit."""
        self._fit.check()

    def load(self, beat: Callable[[], None]) -> None:
        """Overwrites what is held here."""
        store = self._embeddings.store
        reader = self._info.rows()
        try:
            for table in self._fit.kept:
                parts = store.read_parts(table.name, 0, table.rows)
                if parts or self._embeddings.comm.rank == 0:
                    beat()
                    self._load_table(reader, table, parts, beat)
        finally:
            reader.close()
        if self._takes_state:
            # Adam's bias correction belongs to its moments.
            store.num_steps = self._info.values["num_row_steps"]
        self._embeddings.rows_changed()
        own = self._model.state_dict()
        for name in self._fit.dense_taken:
            own[name].copy_(self._fit.dense[name])
        moved, _ = self._fit.moved_columns
        if moved:
            rescale_first_layer(own, moved)

    @property
    def _takes_state(self) -> bool:
        """Whether state of rows comes along: there must be some."""
        return self._config.train.warm_start.state and bool(self._fit.kept)

    def _load_table(
        self,
        reader: RowsReader,
        table: TableConfig,
        parts: list[RowsPart],
        beat: Callable[[], None],
    ) -> None:
        store, stored = self._embeddings.store, self._info.tables[table.name]
        names = [WEIGHT]
        if self._config.train.warm_start.state:
            names += store.state_widths(table.name)
        new_of_old = self._fit.matcher.match(table.name)
        self._counts[table.name] = _count(new_of_old, stored.rows, table.rows)
        rows = _Rows(reader, table, stored, names, self._embeddings.dtype, beat)
        if new_of_old is None:
            rows.copy(store)
        else:
            rows.scatter(parts, new_of_old)

    def outcome(self) -> WarmStarted:
        """What has been loaded."""
        config, fit = self._config.train.warm_start, self._fit
        kept, taken = {table.name for table in fit.kept}, set(fit.dense_taken)
        return WarmStarted(
            checkpoint=str(self._info.folder),
            step=self._info.step,
            rows=config.rows,
            tables=self._counts,
            new_tables=[t.name for t in self._embeddings.tables if t.name not in kept],
            dropped_tables=[name for name in self._info.tables if name not in kept],
            state=self._config.optim.sparse.name if self._takes_state else None,
            dense_loaded=fit.dense_taken,
            dense_new=[name for name in self._model.state_dict() if name not in taken],
            dense_dropped=[name for name in fit.dense if name not in taken],
            notes=self._notes(),
        )

    def _notes(self) -> list[str]:
        own = self._embeddings.dtype
        notes = [
            f"stored {dtype_name(dtype)}, here {dtype_name(own)} (train.precision): rows are "
            "converted"
            for dtype in {self._info.tables[table.name].dtype for table in self._fit.kept}
            if dtype != own
        ]
        moved, unknown = self._fit.moved_columns
        notes += [
            f"{column.describe()}; the first dense layer is rescaled, so that a value means what "
            "it meant"
            for column in moved
        ]
        if unknown:
            notes.append(
                f"the checkpoint doesn't say by which mean and deviation {names_of(unknown)} were "
                "standardised, and its data are gone: the dense weights may expect others than "
                "these data's"
            )
        # Under `matching`, a first layer may have been taken although its columns mean others.
        return notes + (self._fit.input_differences() if self._fit.dense_taken else [])


class _Rows:
    """The rows of one table, on their way from a checkpoint into the memory of this rank."""

    def __init__(
        self,
        reader: RowsReader,
        table: TableConfig,
        stored: StoredTable,
        names: list[str],
        dtype: torch.dtype,
        beat: Callable[[], None],
    ) -> None:
        self._reader, self._table, self._stored = reader, table, stored
        self._names, self._dtype, self._beat = names, dtype, beat

    def copy(self, store: RowStore) -> None:
        """Row n is row n."""
        name = self._table.name
        for start, end in self._stored.blocks():
            stop = min(end, self._table.rows)
            if start < stop and store.read_parts(name, start, stop):
                store.write(name, start, self._read(start, stop))

    def scatter(self, parts: list[RowsPart], new_of_old: np.ndarray) -> None:
        """Row n is row `new_of_old[n]`; -1: none. Stretches of which no row is held here aren't
        read."""
        for start, stop in self._stored.blocks():
            new_rows = new_of_old[start:stop]
            wanted = [
                (part, np.flatnonzero((new_rows >= part.row_start) & (new_rows < part.row_stop)))
                for part in parts
            ]
            if not any(len(at) for _, at in wanted):
                continue
            values = self._read(start, stop)
            for part, at in wanted:
                target_rows = torch.from_numpy(new_rows[at] - part.row_start)
                for name, target in part.values.items():
                    if name in values:
                        rows = values[name][torch.from_numpy(at)]
                        target.index_copy_(
                            0, target_rows, take_columns(rows, part.piece, self._table.dim)
                        )
            del values  # Not beside the next ones.

    def _read(self, start: int, stop: int) -> dict[str, Tensor]:
        self._beat()
        values = self._reader.read(self._table.name, start, stop, state=len(self._names) > 1)
        return {name: values[name].to(self._dtype) for name in self._names}


def _count(new_of_old: np.ndarray | None, old_rows: int, new_rows: int) -> RowCounts:
    kept = min(old_rows, new_rows)
    if new_of_old is not None:
        kept = int(np.count_nonzero(new_of_old >= 0))
    return RowCounts(kept, new_rows - kept, old_rows - kept)


def _num(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
