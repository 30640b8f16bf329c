"""From `sharding.…` to the plan of a run: its configuration, the id counts, the plan."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data.errors import UserError
from data.parquet import PreparedDataset
from embeddings.plan import Memory, Plan
from embeddings.plan_builders import build_plan
from embeddings.plan_choice import (
    LAYOUTS,
    ExchangeChoice,
    Layout,
    LayoutChoice,
    PlannedLayout,
    TableChoice,
)
from embeddings.table import TableConfig
from embeddings.traffic import TableStats

if TYPE_CHECKING:
    from dlrm.config import TrainRun

_FILE = "file"
_EXCHANGES = ("auto", "pooled", "kv")
_WIRE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass
class TableShardingConfig:
    """What holds for one table (`+sharding.tables.NAME.…`); null: as for all."""

    layout: str | None = None
    """`table_wise`, `row_wise`, `column_wise`, `table_row_wise`, `replicated` or `auto`."""
    exchange: str | None = None
    """`auto`, `pooled` or `kv`."""
    ranks: list[int] | None = None
    """The ranks that hold the table, in the order of its parts; one for `table_wise`."""


@dataclass
class ShardingConfig:
    """Who holds which part of which table, and how values travel (`sharding.…`).

    Raises:
        UserError: (a `ValueError`) for a value out of its limits; the message names the key.
    """

    layout: str = "auto"
    """Set by `sharding=NAME`. `table_wise`: whole tables. `row_wise`, `column_wise`: every table
    cut over all ranks. `table_row_wise`: cut into rows over the ranks of one host. `replicated`:
    whole on every rank. `auto`: one of these for each table. `file`: as `sharding.plan` says."""
    exchange: str = "auto"
    """`pooled`: the owner of rows pools them and sends a vector per bag. `kv`: it sends each
    distinct row once. `auto`: what is expected to move fewer bytes, for each table."""
    memory: str = "device"
    """Where shards lie: `device`, or `host` (not built yet)."""
    wire: str = "fp32"
    """Type of values on the way: `fp32` (the tables' own type, so fp64 under
    `train.precision=fp64`), `bf16` or `fp16`."""
    plan: str | None = None
    """`sharding=file`: a plan.json, of another run or written by hand."""
    # Not dict[str, TableShardingConfig]: OmegaConf refuses `+sharding.tables.C1.layout=…` in a dict
    # of dataclasses. __post_init__ makes a TableShardingConfig of each value.
    tables: dict[str, Any] = field(default_factory=dict)
    """What differs for single tables, by name: `layout`, `exchange`, `ranks`."""

    def __post_init__(self) -> None:
        self.tables = {name: _table_config(name, value) for name, value in self.tables.items()}
        _check_choice("sharding.layout", self.layout, (*LAYOUTS, _FILE))
        _check_choice("sharding.exchange", self.exchange, _EXCHANGES)
        _check_choice("sharding.memory", self.memory, ("device", "host"))
        _check_choice("sharding.wire", self.wire, tuple(_WIRE_BYTES))
        if self.memory == "host":
            raise UserError("sharding.memory=host: tables in host memory aren't built yet")
        if self.layout == _FILE:
            self._check_file()
        elif self.plan is not None:
            raise UserError(
                f"sharding.plan={self.plan}: a plan file is used with sharding=file only, not with "
                f"sharding={self.layout}"
            )
        for name, table in self.tables.items():
            self._check_table(f"sharding.tables.{name}", table)

    def _check_file(self) -> None:
        if self.plan is None:
            raise UserError("sharding=file: name the file, sharding.plan=…/plan.json")
        given = [f"sharding.tables.{name}" for name in self.tables]
        given += [f"sharding.exchange={self.exchange}"] if self.exchange != "auto" else []
        if given:
            raise UserError(
                f"{given[0]}: with sharding=file the plan file says this for every table; leave it "
                f"out, or edit {self.plan}"
            )

    def _check_table(self, key: str, table: TableShardingConfig) -> None:
        if table.layout is not None:
            _check_choice(f"{key}.layout", table.layout, LAYOUTS)
        if table.exchange is not None:
            _check_choice(f"{key}.exchange", table.exchange, _EXCHANGES)
        layout = table.layout or self.layout
        if layout == "replicated" and table.exchange in ("pooled", "kv"):
            warnings.warn(
                f"{key}.exchange={table.exchange} is ignored: a replicated table has no exchange",
                stacklevel=4,
            )
        if table.ranks is not None and (
            not isinstance(table.ranks, list)
            or not table.ranks
            or any(type(rank) is not int or rank < 0 for rank in table.ranks)
            or len(set(table.ranks)) < len(table.ranks)
        ):
            raise UserError(
                f"{key}.ranks={table.ranks}: must be a list of at least one rank, each once, "
                "counted from 0: [0,2]"
            )

    def choice(self) -> LayoutChoice:
        """The same for the builders of plans."""
        return LayoutChoice(
            layout=cast(Layout, self.layout),
            exchange=cast(ExchangeChoice, self.exchange),
            memory=cast(Memory, self.memory),
            wire_bytes=_WIRE_BYTES[self.wire],
            tables={
                name: TableChoice(
                    layout=cast("Layout | None", table.layout),
                    exchange=cast("ExchangeChoice | None", table.exchange),
                    ranks=None if table.ranks is None else tuple(table.ranks),
                )
                for name, table in self.tables.items()
            },
        )


def _table_config(name: str, value: Any) -> TableShardingConfig:
    """What `+sharding.tables.NAME.…` gave, as its dataclass."""
    key = f"sharding.tables.{name}"
    if isinstance(value, TableShardingConfig):
        return value
    known = [f.name for f in fields(TableShardingConfig)]
    if not isinstance(value, dict):
        raise UserError(f"{key}={value}: must have the keys {', '.join(known)}, or some of them")
    for entry in value:
        if entry not in known:
            raise UserError(f"{key}.{entry}: there is no such key; the keys are {', '.join(known)}")
    return TableShardingConfig(**value)


def make_plan(
    config: TrainRun,
    dataset: PreparedDataset,
    world_size: int,
    *,
    ranks_per_host: int | None = None,
) -> PlannedLayout:
    """The plan of a run, and per table why.

    Equal inputs give equal plans, on every rank alike.

    Args:
        config: the run's configuration.
        dataset: its data, for the tables and their id counts.
        world_size: number of ranks, `W`.
        ranks_per_host: what holds where `launch.ranks_per_host` is null; None: one host has all.

    Raises:
        UserError: naming the key, for overrides that don't fit the tables or the ranks, and for a
            plan file that can't be read, is of another world size or doesn't fit the tables.
    """
    from dlrm.build import build_tables  # dlrm.build imports dlrm.config, which imports this.

    tables, features = build_tables(config, dataset.manifest)
    sharding = config.sharding
    _check_table_names(sharding.tables, [table.name for table in tables])
    if sharding.layout == _FILE:
        assert sharding.plan is not None
        plan = _read_plan(Path(sharding.plan), tables, world_size)
        return PlannedLayout(plan, {table.name: f"from {sharding.plan}" for table in tables})
    try:
        return build_plan(
            tables,
            features,
            # One rank gets everything: nothing depends on the counts.
            load_table_stats(dataset) if world_size > 1 else {},
            sharding.choice(),
            world_size,
            config.launch.ranks_per_host or ranks_per_host or world_size,
            config.data.batch_size,
        )
    except ValueError as error:
        # `embeddings` knows no UserError; what it refuses here is the user's to mend.
        raise UserError(str(error)) from error


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
    for shard in plan.shards:
        if shard.memory == "host":
            raise UserError(
                f"{key}: table {shard.table!r}, rank {shard.rank}: memory is 'host', but tables in "
                "host memory aren't built yet"
            )
    return plan


def _check_choice(key: str, value: Any, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise UserError(f"{key}={value}: must be one of {', '.join(allowed)}")


def _check_table_names(
    overrides: Mapping[str, TableShardingConfig], tables: Collection[str]
) -> None:
    unknown = sorted(set(overrides) - set(tables))
    if unknown:
        keys = ", ".join(f"sharding.tables.{name}" for name in unknown)
        raise UserError(f"{keys}: no such table; the tables are {', '.join(sorted(tables))}")
