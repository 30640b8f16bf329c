"""The plan of a run: from its configuration and the id counts of its data."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data.errors import UserError
from data.parquet import PreparedDataset
from dlrm.build import PRECISION_DTYPES, build_tables
from dlrm.config import TrainRun
from dlrm.sharding import FILE_LAYOUT, TableShardingConfig
from embeddings.host.cost import why_plain
from embeddings.keys import sum_counts
from embeddings.machine import available_bytes
from embeddings.plan import Plan
from embeddings.plan_builders import build_plan
from embeddings.plan_choice import LayoutChoice, PlannedLayout
from embeddings.row_memory import TablesDontFit
from embeddings.table import TableConfig
from embeddings.traffic import TableStats


def make_plan(
    config: TrainRun,
    dataset: PreparedDataset,
    world_size: int,
    *,
    ranks_per_host: int | None = None,
    stats: Mapping[str, TableStats] | None = None,
) -> PlannedLayout:
    """The plan of a run, and per table why.

    Equal inputs give equal plans, on every rank alike.

    Args:
        config: the run's configuration.
        dataset: its data, for the tables and their id counts.
        world_size: number of ranks, `W`.
        ranks_per_host: what holds where `launch.ranks_per_host` is null; None: one host has all.
        stats: how often the tables are looked up; None: as the dataset's id counts say.

    Raises:
        UserError: naming the key, for overrides that don't fit the tables or the ranks, and for a
            plan file that can't be read, is of another world size or doesn't fit the tables.
    """
    tables, features = build_tables(config, dataset.manifest)
    sharding = config.sharding
    _check_table_names(sharding.tables, [table.name for table in tables])
    if sharding.layout == FILE_LAYOUT:
        assert sharding.plan is not None
        plan = _read_plan(Path(sharding.plan), tables, world_size)
        return PlannedLayout(plan, {table.name: f"from {sharding.plan}" for table in tables})
    if stats is None:
        # One rank gets everything: nothing depends on the counts.
        stats = load_table_stats(dataset) if world_size > 1 else {}
    try:
        return build_plan(
            tables,
            features,
            stats,
            _on_device(sharding.choice()) if why_on_device(config) else sharding.choice(),
            world_size,
            config.launch.ranks_per_host or ranks_per_host or world_size,
            config.data.batch_size,
        )
    except ValueError as error:
        # `embeddings` knows no UserError; what it refuses here is the user's to mend.
        raise UserError(str(error)) from error


def check_tables_fit(
    config: TrainRun, dataset: PreparedDataset, plan: Plan, ranks_here: int
) -> None:
    """Refuses tables whose rows this host has no memory for, before any rank fills them: the system
    would end a process without a word. Optimizer state counts once it is touched, not here.

    Args:
        config: the run's configuration.
        dataset: its data.
        plan: which rank holds what.
        ranks_here: ranks from 0 on that this host has.

    Raises:
        UserError: naming the largest tables, what is needed, and what there is.
    """
    tables, _ = build_tables(config, dataset.manifest)
    itemsize = PRECISION_DTYPES[config.train.precision].itemsize
    needed = dict.fromkeys((table.name for table in tables), 0)
    for shard in plan.shards:
        if shard.rank < ranks_here:
            shape = shard.row_stop - shard.row_start, shard.col_stop - shard.col_start
            needed[shard.table] += math.prod(shape) * itemsize
    available = available_bytes()
    if available is not None and sum(needed.values()) > available:
        largest_first = sorted(needed, key=lambda name: -needed[name])
        raise UserError(str(TablesDontFit(largest_first, sum(needed.values()), available)))


def why_on_device(config: TrainRun) -> str | None:
    """Why `sharding.host.mode=auto` leaves tables that were asked into host memory on the device,
    by the cost model; None where it doesn't, or none was asked there."""
    if not config.sharding.may_use_host or config.sharding.host.mode != "auto":
        return None
    assert config.launch.device == "cpu", "a GPU's link has to be measured"
    return why_plain(link=None)


def _on_device(choice: LayoutChoice) -> LayoutChoice:
    tables = {name: replace(table, memory=None) for name, table in choice.tables.items()}
    return replace(choice, memory="device", tables=tables)


def load_table_stats(dataset: PreparedDataset) -> dict[str, TableStats]:
    """Id counts of the training part by table; the counts of features that share a table add up.

    Tables of which a feature has no file of counts are left out. Takes 16 bytes for each row that
    is looked up at all.

    Raises:
        UserError: for a file that can't be read.
    """
    manifest = dataset.manifest
    num_samples = manifest.parts["train"].rows
    files: dict[str, list[Path | None]] = {name: [] for name in manifest.table_rows}
    for feature in manifest.features:
        entry = manifest.counts.get(feature.name)
        path = dataset.file(entry["file"]) if entry else None
        files[feature.table].append(path if path and path.is_file() else None)
    stats = {}
    for table, paths in files.items():
        whole = [path for path in paths if path is not None]
        if whole and len(whole) == len(paths):
            counts = [_read_counts(path) for path in whole]
            # A file's ids are distinct and ascending already, perhaps tens of millions of them.
            ids_K, counts_K = counts[0] if len(counts) == 1 else sum_counts(counts)
            lookups = float(counts_K.sum()) / num_samples if num_samples else 0.0
            stats[table] = TableStats(lookups, counts_K, ids_K)
    return stats


def _read_counts(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        columns = pq.read_table(path, columns=["id", "count"])
        return columns["id"].to_numpy(), columns["count"].to_numpy()
    except (pa.ArrowException, OSError, KeyError) as error:
        raise UserError(
            f"{path} can't be read ({error}): prepare the dataset again with data.overwrite=true"
        ) from error


def _read_plan(path: Path, tables: Sequence[TableConfig], world_size: int) -> Plan:
    key = f"sharding.plan={path}"
    try:
        plan = Plan.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{key}: can't be read ({error.strerror})") from error
    except ValueError as error:
        raise UserError(f"{key}: {error}") from error
    if plan.world_size != world_size:
        raise UserError(
            f"{key}: made for {plan.world_size} ranks, but the run has {world_size}: set "
            f"launch.nproc={plan.world_size}, or use another plan"
        )
    try:
        plan.validate(tables)
    except ValueError as error:
        raise UserError(f"{key}: {error}") from error
    return plan


def _check_table_names(
    overrides: Mapping[str, TableShardingConfig], tables: Collection[str]
) -> None:
    unknown = sorted(set(overrides) - set(tables))
    if unknown:
        keys = ", ".join(f"sharding.tables.{name}" for name in unknown)
        raise UserError(f"{keys}: no such table; the tables are {', '.join(sorted(tables))}")
