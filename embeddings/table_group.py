"""What a rank keeps: pieces of tables, and the table groups whose key space they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch

from embeddings.plan import Memory, Plan, Shard

ColumnRange = tuple[int, int]


@dataclass(frozen=True)
class Piece:
    """A rank's part of a table in a band of rows: all columns that it holds there, side by side.

    The shards of one rank that cover the same rows are one piece, so an id travels to a rank once,
    however many shards it needs there. Columns 0:4 and 8:12 of a table make a piece of 8 columns.

    Attributes:
        table: name of the table.
        rank: the rank that holds it.
        row_start: first row.
        row_stop: one past the last row.
        columns: disjoint column ranges `(start, stop)`, ascending, adjacent ones merged.
        memory: `device` or `host`.
    """

    table: str
    rank: int
    row_start: int
    row_stop: int
    columns: tuple[ColumnRange, ...]
    memory: Memory = "device"

    @property
    def num_rows(self) -> int:
        """Rows of the piece."""
        return self.row_stop - self.row_start

    @property
    def dim(self) -> int:
        """Columns of the piece: the local dim."""
        return sum(stop - start for start, stop in self.columns)

    @property
    def has_first_column(self) -> bool:
        """Whether this piece keeps the state that belongs to whole rows."""
        return self.columns[0][0] == 0

    def __str__(self) -> str:
        columns = ", ".join(f"{start}:{stop}" for start, stop in self.columns)
        return f"rows {self.row_start}:{self.row_stop} × columns {columns} on rank {self.rank}"


@dataclass(frozen=True)
class TableGroup:
    """The pieces of one rank with equal local dim, type and optimizer, as one flat key space.

    Their rows lie one piece after the other in one contiguous array `[num_rows, dim]`; a *key* is a
    row number in it. With two tables of 10 and 5 rows, id 3 of the second has key 13.

    Attributes:
        pieces: in the order of their rows in the array.
        dim: local number of columns, `D`.
        dtype: type of weights and state.
        optimizer: name of the update rule (`RowOptimizerConfig.name`).
        everywhere: whether every rank holds all of these tables (one process, or replicas) in
            device memory. Such a group is looked up in locally; of all others the ids travel.
        memory: `device` or `host`.
    """

    pieces: tuple[Piece, ...]
    dim: int
    dtype: torch.dtype
    optimizer: str
    everywhere: bool = True
    memory: Memory = "device"

    @cached_property
    def first_keys(self) -> tuple[int, ...]:
        """Per piece the key of its first row."""
        keys: list[int] = []
        key = 0
        for piece in self.pieces:
            keys.append(key)
            key += piece.num_rows
        return tuple(keys)

    @cached_property
    def num_rows(self) -> int:
        """Rows of the flat array, `R`."""
        return sum(piece.num_rows for piece in self.pieces)


def local_groups(
    plan: Plan, *, rank: int, dtype: torch.dtype, optimizer: str
) -> tuple[TableGroup, ...]:
    """The groups of `rank`: those of tables that are everywhere first, then by local dim and memory
    in the order of first appearance. Every rank can compute those of every other."""
    everywhere = tables_everywhere(plan)
    by_kind: dict[tuple[bool, int, Memory], list[Piece]] = {}
    for piece in pieces_of_rank(plan, rank):
        kind = (piece.table in everywhere, piece.dim, piece.memory)
        by_kind.setdefault(kind, []).append(piece)
    return tuple(
        TableGroup(tuple(by_kind[kind]), kind[1], dtype, optimizer, kind[0], kind[2])
        for kind in sorted(by_kind, key=lambda kind: not kind[0])
    )


def tables_everywhere(plan: Plan) -> set[str]:
    """Tables that every rank holds whole in device memory: replicas and, in one process, every
    table of which no part is in host memory."""
    if plan.world_size == 1:
        in_host = {shard.table for shard in plan.shards if shard.memory == "host"}
        return {shard.table for shard in plan.shards} - in_host
    return {shard.table for shard in plan.shards if plan.is_replicated(shard.table)}


def pieces_of_rank(plan: Plan, rank: int) -> list[Piece]:
    """The pieces that `rank` holds, by table in the order of first appearance, then by rows."""
    by_table: dict[tuple[str, Memory], list[Shard]] = {}
    for shard in plan.shards:
        if shard.rank == rank:
            by_table.setdefault((shard.table, shard.memory), []).append(shard)
    pieces: list[Piece] = []
    for (table, memory), shards in by_table.items():
        borders = sorted({row for s in shards for row in (s.row_start, s.row_stop)})
        of_table: list[Piece] = []
        for start, stop in pairwise(borders):
            covering = [s for s in shards if s.row_start <= start and stop <= s.row_stop]
            columns = merge_ranges([(s.col_start, s.col_stop) for s in covering])
            if not columns:
                continue
            if of_table and of_table[-1].row_stop == start and of_table[-1].columns == columns:
                start = of_table.pop().row_start
            of_table.append(Piece(table, rank, start, stop, columns, memory))
        pieces += of_table
    return pieces


def merge_ranges(ranges: Sequence[ColumnRange]) -> tuple[ColumnRange, ...]:
    """Half-open ranges in ascending order, adjacent ones merged."""
    merged: list[ColumnRange] = []
    for start, stop in sorted(ranges):
        if merged and merged[-1][1] == start:
            start = merged.pop()[0]
        merged.append((start, stop))
    return tuple(merged)
