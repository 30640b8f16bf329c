"""What a plan is asked for: a layout and an exchange, overrides for some tables, a workload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from embeddings.plan import Memory, Plan
from embeddings.table import FeatureConfig, TableConfig
from embeddings.traffic import TableStats

Layout = Literal["auto", "table_wise", "row_wise", "column_wise", "table_row_wise", "replicated"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
ExchangeChoice = Literal["auto", "pooled", "kv"]


@dataclass(frozen=True)
class TableChoice:
    """What is asked for one table; None: as for all.

    Attributes:
        layout: any but a file.
        exchange: `auto`, `pooled` or `kv`.
        ranks: the ranks that hold the table, in the order of its parts; one for `table_wise`.
        memory: `device` or `host`.
    """

    layout: Layout | None = None
    exchange: ExchangeChoice | None = None
    ranks: tuple[int, ...] | None = None
    memory: Memory | None = None


@dataclass(frozen=True)
class LayoutChoice:
    """What is asked for.

    Attributes:
        layout: of every table that has no layout of its own in `tables`.
        exchange: of every table that has none of its own.
        memory: of every table that has none of its own; tables that `auto` replicates lie on the
            devices.
        wire_bytes: bytes of a value on the wire.
        tables: overrides by table.
    """

    layout: Layout = "auto"
    exchange: ExchangeChoice = "auto"
    memory: Memory = "device"
    wire_bytes: int = 4
    tables: Mapping[str, TableChoice] = field(default_factory=dict)


@dataclass(frozen=True)
class Workload:
    """What a plan is made for.

    Attributes:
        tables: all tables.
        features: what looks them up.
        world_size: number of ranks, `W`.
        stats: how often tables are looked up; those without: one distinct id per bag.
        ranks_per_host: ranks 0 … ranks_per_host - 1 share a host, and so on; None: one host.
        batch_size: global batch size.

    Raises:
        ValueError: where `world_size`, `ranks_per_host` or `batch_size` is below 1.
    """

    tables: Sequence[TableConfig]
    features: Sequence[FeatureConfig]
    world_size: int
    stats: Mapping[str, TableStats] = field(default_factory=dict)
    ranks_per_host: int | None = None
    batch_size: int = 2048

    def __post_init__(self) -> None:
        for name in ("world_size", "ranks_per_host", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}, must be at least 1")

    def hosts(self) -> list[range]:
        """The ranks of each host; the last may have fewer."""
        per_host = self.ranks_per_host or self.world_size
        firsts = range(0, self.world_size, per_host)
        return [range(first, min(first + per_host, self.world_size)) for first in firsts]


@dataclass(frozen=True)
class PlannedLayout:
    """A plan, and per table one line that says why."""

    plan: Plan
    reasons: dict[str, str]


def check_overrides(choice: LayoutChoice, names: Sequence[str], world_size: int) -> None:
    """Refuses overrides of unknown tables, and ranks that can't hold a table.

    Raises:
        ValueError: naming the key.
    """
    unknown = sorted(set(choice.tables) - set(names))
    if unknown:
        keys = ", ".join(f"sharding.tables.{name}" for name in unknown)
        raise ValueError(f"{keys}: no such table; the tables are {', '.join(sorted(names))}")
    for name, override in choice.tables.items():
        if override.ranks is None:
            continue
        key = f"sharding.tables.{name}.ranks={list(override.ranks)}"
        layout = override.layout or choice.layout
        if layout in ("auto", "replicated"):
            raise ValueError(
                f"{key}: a table with the layout {layout} has no ranks to choose; set "
                f"sharding.tables.{name}.layout to one that has"
            )
        if not override.ranks or len(set(override.ranks)) < len(override.ranks):
            raise ValueError(f"{key}: must name at least one rank, and each once")
        for rank in override.ranks:
            if not 0 <= rank < world_size:
                raise ValueError(
                    f"{key}: rank {rank} is outside 0 to {world_size - 1} (launch.nproc)"
                )
        if layout == "table_wise" and len(override.ranks) > 1:
            raise ValueError(f"{key}: the layout table_wise puts a table on one rank")
