"""The plan of a run: from its configuration and the id counts of its data."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data.errors import UserError
from data.parquet import PreparedDataset
from dlrm.build import build_tables
from dlrm.config import TrainRun
from dlrm.sharding import FILE_LAYOUT, TableShardingConfig
from embeddings.plan import Plan
from embeddings.plan_builders import build_plan
from embeddings.plan_choice import LayoutChoice, PlannedLayout
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
            _on_device(sharding.choice()) if stays_on_device(config) else sharding.choice(),
            world_size,
            config.launch.ranks_per_host or ranks_per_host or world_size,
            config.data.batch_size,
        )
    except ValueError as error:
        # `embeddings` knows no UserError; what it refuses here is the user's to mend.
        raise UserError(str(error)) from error


def stays_on_device(config: TrainRun) -> bool:
    """Whether `sharding.host.mode=auto` leaves tables that were asked into host memory where the
    dense network runs: on CPU that is the same memory, and staging would only copy rows."""
    sharding = config.sharding
    return sharding.may_use_host and sharding.host.mode == "auto" and config.launch.device == "cpu"


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
        path = dataset.root / entry["file"] if entry else None
        files[feature.table].append(path if path and path.is_file() else None)
    stats = {}
    for table, paths in files.items():
        whole = [path for path in paths if path is not None]
        if whole and len(whole) == len(paths):
            ids_K, counts_K = _sum_counts([_read_counts(path) for path in whole])
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


def _sum_counts(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Ids in rising order and their counts, summed over the parts."""
    if len(parts) == 1:
        return parts[0]
    ids = np.concatenate([part[0] for part in parts])
    counts = np.concatenate([part[1] for part in parts])
    order = np.argsort(ids, kind="stable")
    ids, counts = ids[order], counts[order]
    firsts = np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1]])[: len(ids)])
    return ids[firsts], np.add.reduceat(counts, firsts) if len(firsts) else counts


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
