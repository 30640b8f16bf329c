"""Builders of plans: which rank gets what, by a layout for all tables and overrides for some.

A layout is a rule of a few lines, not a kind of runtime object: what comes out is a `Plan`. Nothing
here does I/O or draws random numbers; equal inputs give equal plans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from embeddings.plan import ExchangeName, Memory, Plan, Shard
from embeddings.plan_choice import (
    ExchangeChoice,
    Layout,
    LayoutChoice,
    PlannedLayout,
    TableChoice,
    Workload,
    check_overrides,
)
from embeddings.plan_words import shown_bytes
from embeddings.row_cuts import cut_columns, cut_rows
from embeddings.table import FeatureConfig, TableConfig
from embeddings.traffic import TableStats, TableTraffic, table_traffic

# `auto` replicates no table above this many bytes and this part of a rank's even share.
_REPLICATED_BYTES = 1 << 20
_REPLICATED_SHARE = 0.05
# `auto` cuts a table into rows where it exceeds this many even shares.
_ROW_WISE_SHARES = 1.25
_VALUE_BYTES = 4


def table_wise(workload: Workload) -> Plan:
    """Whole tables, longest first on the least loaded rank (by bytes and expected lookups)."""
    return _plan(workload, "table_wise")


def row_wise(workload: Workload) -> Plan:
    """Every table cut into rows over all ranks, by expected lookups where there are id counts."""
    return _plan(workload, "row_wise")


def column_wise(workload: Workload) -> Plan:
    """Every table cut into column slices over as many ranks as its dim allows."""
    return _plan(workload, "column_wise")


def table_row_wise(workload: Workload) -> Plan:
    """Every table cut into rows over the ranks of one host, the least loaded one."""
    return _plan(workload, "table_row_wise")


def replicated(workload: Workload) -> Plan:
    """Every table whole on every rank."""
    return _plan(workload, "replicated")


def auto(workload: Workload) -> PlannedLayout:
    """Small tables replicated, those well above a rank's even share row-wise, others table-wise.

    Small: replicating moves no more bytes per step than an exchange would, and takes little memory.
    """
    return plan_workload(workload, LayoutChoice("auto"))


def build_plan(
    tables: Sequence[TableConfig],
    features: Sequence[FeatureConfig],
    stats: Mapping[str, TableStats],
    choice: LayoutChoice,
    world_size: int,
    ranks_per_host: int,
    batch_size: int,
) -> PlannedLayout:
    """`plan_workload` of a `Workload` of these; see there."""
    workload = Workload(tables, features, world_size, stats, ranks_per_host, batch_size)
    return plan_workload(workload, choice)


def plan_workload(workload: Workload, choice: LayoutChoice) -> PlannedLayout:
    """The plan of a choice: a default layout, and overrides for some tables.

    Raises:
        ValueError: naming the key, for an override of an unknown table or ranks that can't hold it;
            naming the table, for id counts of another table.
    """
    check_overrides(choice, [table.name for table in workload.tables], workload.world_size)
    return _Builder(workload, choice).build()


def _plan(workload: Workload, layout: Layout) -> Plan:
    return plan_workload(workload, LayoutChoice(layout)).plan


class _Builder:
    """Places the tables of one plan; keeps how much each rank has got."""

    def __init__(self, workload: Workload, choice: LayoutChoice) -> None:
        self.tables = workload.tables
        self.world_size = workload.world_size
        self.hosts = workload.hosts()
        self.choice = choice
        self.traffic = table_traffic(
            workload.tables,
            workload.features,
            workload.stats,
            samples_per_rank=workload.batch_size / workload.world_size,
            value_bytes=choice.wire_bytes,
        )
        self.figures = _load_figures(self.tables, self.traffic)
        self.held_W = [0.0] * self.world_size
        # Where the next table's first part goes: not always to rank 0, or it would get the only
        # part of each small table and the odd row of each large one.
        self.next_rank = 0

    def build(self) -> PlannedLayout:
        layouts: dict[str, Layout] = {}
        reasons: dict[str, str] = {}
        for table in self.tables:
            own = self._override(table).layout
            layouts[table.name] = own or self.choice.layout
            key = f"sharding.tables.{table.name}.layout" if own else "sharding.layout"
            reasons[table.name] = f"{layouts[table.name]} ({key})"
        automatic = [table for table in self.tables if layouts[table.name] == "auto"]
        for name, (layout, reason) in self._automatic(automatic).items():
            layouts[name], reasons[name] = layout, f"{layout}: {reason}"

        shards = self._place(layouts)
        exchange: dict[str, ExchangeName] = {}
        for table in self.tables:
            layout, placed = layouts[table.name], shards[table.name]
            exchange[table.name], reason = self._exchange(table, layout, placed)
            reasons[table.name] += f"; {reason}" if reason else ""
        ordered = tuple(shard for table in self.tables for shard in shards[table.name])
        return PlannedLayout(Plan(self.world_size, ordered, exchange), reasons)

    # ------------------------------------------------------------------------- who gets what

    def _place(self, layouts: Mapping[str, Layout]) -> dict[str, list[Shard]]:
        """The shards of each table. Tables that go to the least loaded rank or host come last,
        longest first (Graham's rule), so that they fill what the others left."""
        placers: dict[Layout, Callable[[TableConfig, Sequence[int]], list[Shard]]] = {
            "table_wise": self._whole,
            "row_wise": self._by_rows,
            "column_wise": self._by_columns,
            "table_row_wise": self._by_rows,
            "replicated": self._copies,
        }
        balanced = ("table_wise", "table_row_wise")
        tables = [table for table in self.tables if layouts[table.name] not in balanced]
        rest = [table for table in self.tables if layouts[table.name] in balanced]
        rest.sort(key=lambda table: -self.figures[table.name])
        # Ranks given by name are no choice: they come first.
        rest.sort(key=lambda table: self._override(table).ranks is None)
        shards = {}
        for table in [*tables, *rest]:
            layout = layouts[table.name]
            ranks = self._ranks(table, layout)
            memory = self._memory(table, layout)
            placed = placers[layout](table, ranks)
            shards[table.name] = [replace(shard, memory=memory) for shard in placed]
            for shard in shards[table.name]:
                share = shard.num_rows * shard.num_cols / (table.rows * table.dim)
                self.held_W[shard.rank] += share * self.figures[table.name]
        return shards

    def _override(self, table: TableConfig) -> TableChoice:
        return self.choice.tables.get(table.name, TableChoice())

    def _ranks(self, table: TableConfig, layout: Layout) -> Sequence[int]:
        """Ranks for the parts of a table, in their order."""
        given = self._override(table).ranks
        if given is not None:
            self._check_one_host(table, layout, given)
            return given
        if layout == "table_wise":
            return [min(range(self.world_size), key=self.held_W.__getitem__)]
        if layout == "table_row_wise":
            # A table adds its figure over the host's ranks: hosts may have unequal numbers.
            figure = self.figures[table.name]
            host = min(
                self.hosts,
                key=lambda ranks: (sum(self.held_W[r] for r in ranks) + figure) / len(ranks),
            )
            return self._rotated(host)
        if layout == "replicated":
            return range(self.world_size)
        return self._rotated(range(self.world_size))

    def _check_one_host(self, table: TableConfig, layout: Layout, given: Sequence[int]) -> None:
        if layout == "table_row_wise" and not any(set(given) <= set(host) for host in self.hosts):
            raise ValueError(
                f"sharding.tables.{table.name}.ranks={list(given)}: the layout table_row_wise "
                f"keeps a table within one host, which has {len(self.hosts[0])} ranks "
                f"(launch.ranks_per_host)"
            )

    def _rotated(self, ranks: Sequence[int]) -> list[int]:
        first = self.next_rank % len(ranks)
        return [*ranks[first:], *ranks[:first]]

    def _advance(self, num_parts: int, num_ranks: int) -> None:
        """The next table begins behind this one's last part, or one on after a full round."""
        self.next_rank = (self.next_rank + max(1, num_parts % num_ranks)) % self.world_size

    def _whole(self, table: TableConfig, ranks: Sequence[int]) -> list[Shard]:
        return [self._shard(table, ranks[0])]

    def _copies(self, table: TableConfig, ranks: Sequence[int]) -> list[Shard]:
        return [self._shard(table, rank) for rank in ranks]

    def _by_columns(self, table: TableConfig, ranks: Sequence[int]) -> list[Shard]:
        slices = cut_columns(table.dim, len(ranks))
        self._advance(len(slices), len(ranks))
        return [
            self._shard(table, rank, cols=cols) for rank, cols in zip(ranks, slices, strict=False)
        ]

    def _by_rows(self, table: TableConfig, ranks: Sequence[int]) -> list[Shard]:
        load = self.traffic[table.name].load() if len(ranks) > 1 else None
        parts = cut_rows(table.rows, table.dim, len(ranks), load)
        self._advance(len(parts), len(ranks))
        shards = [
            self._shard(table, rank, rows=rows)
            for rank, part in zip(ranks, parts, strict=False)
            for rows in part
        ]
        return sorted(shards, key=lambda shard: shard.row_start)

    def _shard(
        self,
        table: TableConfig,
        rank: int,
        *,
        rows: tuple[int, int] | None = None,
        cols: tuple[int, int] | None = None,
    ) -> Shard:
        row_start, row_stop = rows or (0, table.rows)
        col_start, col_stop = cols or (0, table.dim)
        return Shard(table.name, row_start, row_stop, col_start, col_stop, rank)

    def _memory(self, table: TableConfig, layout: Layout) -> Memory:
        """Where a table's shards lie.

        Raises:
            ValueError: naming the key, for replicas in host memory.
        """
        own = self._override(table)
        memory = own.memory or self.choice.memory
        if memory == "device" or layout != "replicated" or self.world_size == 1:
            return memory
        if own.memory is None and (own.layout or self.choice.layout) == "auto":
            return "device"
        key = f"sharding.tables.{table.name}.memory" if own.memory else "sharding.memory"
        raise ValueError(
            f"{key}=host: table {table.name!r} is replicated, which means a copy on every rank's "
            "device; choose another layout for it, or memory=device"
        )

    # ------------------------------------------------------------------------- auto

    def _automatic(self, tables: Sequence[TableConfig]) -> dict[str, tuple[Layout, str]]:
        """Layout and reason of each table that `auto` decides on."""
        if self.world_size == 1:
            return {table.name: ("table_wise", "there is one rank") for table in tables}
        even_bytes = sum(_table_bytes(table) for table in tables) / self.world_size
        small_bytes = max(_REPLICATED_BYTES, _REPLICATED_SHARE * even_bytes)
        chosen: dict[str, tuple[Layout, str]] = {}
        for table in tables:
            summed = self.traffic[table.name].replicated_bytes(self.world_size)
            # Of the traffic of an exchange, 1/W stays on the rank.
            exchanged = self._exchange_bytes(table) * (1 - 1 / self.world_size)
            if _table_bytes(table) <= small_bytes and summed <= exchanged:
                chosen[table.name] = (
                    "replicated",
                    f"{shown_bytes(_table_bytes(table))}; gradients {shown_bytes(summed)} a step, "
                    f"an exchange {shown_bytes(exchanged)}",
                )
        rest = [table for table in tables if table.name not in chosen]
        even_bytes = sum(_table_bytes(table) for table in rest) / self.world_size
        for table in rest:
            shares = _table_bytes(table) / even_bytes
            layout: Layout = "row_wise" if shares > _ROW_WISE_SHARES else "table_wise"
            times = f"{shares:.2f}" if shares >= 0.01 else "<0.01"
            chosen[table.name] = (
                layout,
                f"{shown_bytes(_table_bytes(table))}, {times} even shares of a rank",
            )
        return chosen

    def _asked_exchange(self, table: TableConfig) -> ExchangeChoice:
        return self._override(table).exchange or self.choice.exchange

    def _exchange_bytes(self, table: TableConfig) -> float:
        """Of the whole table on one rank, under the exchange that it would get."""
        traffic, asked = self.traffic[table.name], self._asked_exchange(table)
        if asked == "auto":
            return min(traffic.kv_bytes(), traffic.pooled_bytes())
        return traffic.kv_bytes() if asked == "kv" else traffic.pooled_bytes()

    def _exchange(
        self, table: TableConfig, layout: Layout, shards: Sequence[Shard]
    ) -> tuple[ExchangeName, str]:
        """The exchange of a placed table, and why (nothing where it has no meaning)."""
        asked = self._asked_exchange(table)
        if any(shard.memory == "host" for shard in shards):
            return self._host_exchange(table, asked)
        if self.world_size == 1 or layout == "replicated":
            return "kv" if asked == "auto" else asked, ""
        if asked != "auto":
            own = self._override(table).exchange
            key = f"sharding.tables.{table.name}.exchange" if own else "sharding.exchange"
            return asked, f"{asked} ({key})"
        traffic = self.traffic[table.name]
        row_parts = len({shard.rank for shard in shards if shard.col_start == 0})
        col_parts = len({shard.col_start for shard in shards})
        kv = traffic.kv_bytes(col_parts=col_parts)
        pooled = traffic.pooled_bytes(row_parts=row_parts, col_parts=col_parts)
        if kv <= pooled:
            return "kv", f"kv {shown_bytes(kv)} a step, pooled {shown_bytes(pooled)}"
        return "pooled", f"pooled {shown_bytes(pooled)} a step, kv {shown_bytes(kv)}"

    def _host_exchange(self, table: TableConfig, asked: ExchangeChoice) -> tuple[ExchangeName, str]:
        if asked == "pooled":
            own = self._override(table).exchange
            key = f"sharding.tables.{table.name}.exchange" if own else "sharding.exchange"
            raise ValueError(
                f"{key}=pooled: table {table.name!r} is in host memory, whose hot rows are pooled "
                "on every rank; set kv or auto"
            )
        return "kv", "kv: in host memory" if self.world_size > 1 else ""


def _table_bytes(table: TableConfig) -> int:
    return table.rows * table.dim * _VALUE_BYTES


def _load_figures(
    tables: Sequence[TableConfig], traffic: Mapping[str, TableTraffic]
) -> dict[str, float]:
    """Per table its share of all bytes plus its share of all values looked up, 2 in all.

    Values looked up: distinct rows of a rank's batch times dim.
    """
    size = {table.name: float(_table_bytes(table)) for table in tables}
    work = {table.name: traffic[table.name].num_distinct * table.dim for table in tables}
    total_size, total_work = sum(size.values()), sum(work.values())
    return {
        name: size[name] / total_size + (work[name] / total_work if total_work else 0.0)
        for name in size
    }
