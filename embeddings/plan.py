"""The plan: which rank holds which rectangle of which table, and how its values travel.

A plan is a value: it can be printed, written to JSON, read back and compared by its digest. It is
the only thing that decides who owns what. `TableGroup` is the form a rank keeps its shards in.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import torch

from embeddings.table import TableConfig

FORMAT_VERSION = 1

Memory = Literal["device", "host"]
Exchange = Literal["pooled", "kv"]


@dataclass(frozen=True)
class Shard:
    """A rectangle of a table on one rank.

    Attributes:
        table: name of the table.
        row_start: first row.
        row_stop: one past the last row.
        col_start: first column.
        col_stop: one past the last column.
        rank: the rank that holds the rectangle and updates it.
        memory: `device` (where the dense network runs) or `host`.
    """

    table: str
    row_start: int
    row_stop: int
    col_start: int
    col_stop: int
    rank: int
    memory: Memory = "device"

    @property
    def num_rows(self) -> int:
        """Rows of the rectangle."""
        return self.row_stop - self.row_start

    @property
    def num_cols(self) -> int:
        """Columns of the rectangle: the local dim."""
        return self.col_stop - self.col_start

    def __str__(self) -> str:
        return (
            f"rows {self.row_start}:{self.row_stop} × columns {self.col_start}:{self.col_stop} "
            f"on rank {self.rank}"
        )


@dataclass(frozen=True)
class Plan:
    """The shards of every table and each table's exchange.

    Attributes:
        world_size: number of ranks, `W`.
        shards: every rectangle, in the order they are listed and printed.
        exchange: per table `pooled` (the owner pools and sends one vector per bag) or `kv` (the
            requester sends unique keys and gets rows).
    """

    world_size: int
    shards: tuple[Shard, ...]
    exchange: Mapping[str, Exchange]

    def to_json(self) -> str:
        """The plan as JSON text, which `from_json` reads back to an equal plan."""
        return json.dumps(self._fields(self.shards), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote. The result is not yet validated against tables.

        Raises:
            ValueError: where the text isn't a plan of this format version.
        """
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"the plan is not JSON: {error}") from error
        version = fields.get("format_version") if isinstance(fields, dict) else None
        if version != FORMAT_VERSION:
            raise ValueError(
                f"the plan has format_version {version!r}, this program reads {FORMAT_VERSION}"
            )
        try:
            return cls(
                world_size=int(fields["world_size"]),
                shards=tuple(Shard(**shard) for shard in fields["shards"]),
                exchange=dict(fields["exchange"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"the plan has a missing or an unknown field: {error}") from error

    def digest(self) -> str:
        """sha256 of the canonical JSON, which doesn't depend on the order of the shards."""
        ordered = sorted(self.shards, key=lambda s: (s.table, s.row_start, s.col_start, s.rank))
        text = json.dumps(self._fields(ordered), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def _fields(self, shards: Sequence[Shard]) -> dict[str, Any]:
        return {
            "format_version": FORMAT_VERSION,
            "world_size": self.world_size,
            "shards": [asdict(shard) for shard in shards],
            "exchange": dict(self.exchange),
        }

    def validate(self, tables: Sequence[TableConfig]) -> None:
        """Check that every element of every table lies in exactly one shard.

        Raises:
            ValueError: naming the table, the rank where there is one, and the broken rule.
        """
        if self.world_size < 1:
            raise ValueError(f"the plan's world_size is {self.world_size}, must be at least 1")
        known = {table.name: table for table in tables}
        for shard in self.shards:
            _validate_shard(shard, known.get(shard.table), self.world_size)
        for name in self.exchange:
            if name not in known:
                raise ValueError(f"table {name!r}: the plan gives an exchange for an unknown table")
        for table in tables:
            exchange = self.exchange.get(table.name)
            if exchange not in ("pooled", "kv"):
                raise ValueError(
                    f"table {table.name!r}: exchange is {exchange!r}, must be 'pooled' or 'kv' "
                    f"(sharding.exchange)"
                )
            _validate_cover(table, [s for s in self.shards if s.table == table.name])

    def describe(self) -> list[str]:
        """The plan as lines to print: a heading, then one line per shard."""
        num_tables = len({shard.table for shard in self.shards})
        lines = [
            f"plan {self.digest()[:12]}: {num_tables} tables, {len(self.shards)} shards, "
            f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        ]
        width = max((len(shard.table) for shard in self.shards), default=0)
        for shard in self.shards:
            lines.append(
                f"  {shard.table:<{width}}  rank {shard.rank}  {shard.memory:<6}  "
                f"rows {shard.row_start}:{shard.row_stop}  columns "
                f"{shard.col_start}:{shard.col_stop}  {self.exchange.get(shard.table, '?')}"
            )
        return lines


@dataclass(frozen=True)
class TableGroup:
    """The shards of one rank with equal local dim, type and optimizer, as one flat key space.

    Their rows lie one shard after the other in one contiguous array `[num_rows, dim]`; a *key* is a
    row number in it. With two tables of 10 and 5 rows, id 3 of the second has key 13.

    Attributes:
        shards: in the order of their rows; at most one per table.
        dim: local number of columns, `D`.
        dtype: type of weights and state.
        optimizer: name of the update rule (`RowOptimizerConfig.name`).
    """

    shards: tuple[Shard, ...]
    dim: int
    dtype: torch.dtype
    optimizer: str

    @cached_property
    def key_offsets(self) -> dict[str, int]:
        """Per table the key of the shard's first row."""
        offsets: dict[str, int] = {}
        key = 0
        for shard in self.shards:
            offsets[shard.table] = key
            key += shard.num_rows
        return offsets

    @cached_property
    def num_rows(self) -> int:
        """Rows of the flat array, `R`."""
        return sum(shard.num_rows for shard in self.shards)


def local_groups(
    plan: Plan, *, rank: int, dtype: torch.dtype, optimizer: str
) -> tuple[TableGroup, ...]:
    """The groups of `rank`, by local dim in the order of first appearance."""
    by_dim: dict[int, list[Shard]] = {}
    for shard in plan.shards:
        if shard.rank == rank:
            by_dim.setdefault(shard.num_cols, []).append(shard)
    return tuple(TableGroup(tuple(shards), dim, dtype, optimizer) for dim, shards in by_dim.items())


def single_process_plan(tables: Sequence[TableConfig]) -> Plan:
    """The plan of one process: every table whole on rank 0, with `kv` as its (unused) exchange."""
    shards = tuple(Shard(table.name, 0, table.rows, 0, table.dim, rank=0) for table in tables)
    return Plan(world_size=1, shards=shards, exchange={table.name: "kv" for table in tables})


def _validate_shard(shard: Shard, table: TableConfig | None, world_size: int) -> None:
    if table is None:
        raise ValueError(f"table {shard.table!r}: shard of an unknown table ({shard})")
    if not 0 <= shard.rank < world_size:
        raise ValueError(
            f"table {shard.table!r}: rank {shard.rank} is outside 0 to {world_size - 1} ({shard})"
        )
    if shard.memory not in ("device", "host"):
        raise ValueError(
            f"table {shard.table!r}, rank {shard.rank}: memory is {shard.memory!r}, must be "
            f"'device' or 'host' (sharding.memory)"
        )
    rows_fit = 0 <= shard.row_start < shard.row_stop <= table.rows
    cols_fit = 0 <= shard.col_start < shard.col_stop <= table.dim
    if not rows_fit or not cols_fit:
        raise ValueError(
            f"table {shard.table!r}, rank {shard.rank}: a shard must be a non-empty rectangle "
            f"within {table.rows} rows × {table.dim} columns, not {shard}"
        )


def _validate_cover(table: TableConfig, shards: Sequence[Shard]) -> None:
    """Sweep the bands between row borders; in each, the shards must tile the columns."""
    ordered = sorted(shards, key=lambda shard: shard.row_start)
    borders = sorted({0, table.rows, *(s.row_start for s in shards), *(s.row_stop for s in shards)})
    active: list[Shard] = []
    upcoming = 0
    for row, row_stop in pairwise(borders):
        active = [shard for shard in active if shard.row_stop > row]
        while upcoming < len(ordered) and ordered[upcoming].row_start == row:
            active.append(ordered[upcoming])
            upcoming += 1
        active.sort(key=lambda shard: shard.col_start)
        covered = 0
        for index, shard in enumerate(active):
            if shard.col_start < covered:
                raise ValueError(
                    f"table {table.name!r}: overlap: {active[index - 1]} and {shard} share rows "
                    f"{row}:{row_stop}"
                )
            if shard.col_start > covered:
                break
            covered = shard.col_stop
        if covered < table.dim:
            gap_stop = min(
                (s.col_start for s in active if s.col_start > covered), default=table.dim
            )
            raise ValueError(
                f"table {table.name!r}: gap: rows {row}:{row_stop} × columns {covered}:{gap_stop} "
                f"are on no rank"
            )
