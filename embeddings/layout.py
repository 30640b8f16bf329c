"""The exchange's map, known to every rank: which lookups lead to which keys of which rank.

Computed once from the plan. A `KeySpace` lays the table groups of all ranks that have one local dim
end to end, so that one sort of a batch's keys yields, rank by rank, what to ask each for:

    rank 0's group        rank 1's group          rank 2 has none
    0 … bases[1]-1        bases[1] … bases[2]-1   (bases[2] = bases[3])
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from embeddings.plan import ExchangeName, Memory, Plan
from embeddings.table import FeatureConfig, TableConfig
from embeddings.table_group import ColumnRange, Piece, TableGroup

Int64Array = npt.NDArray[np.int64]
_MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, eq=False)
class FeatureSlice:
    """One feature's lookups in the pieces of its table that hold one set of columns.

    A feature of a table that is cut by rows only has one slice; of a table whose columns are cut
    into three sets, three. Each id of the feature has one key in each of its slices, or none where
    other columns are cut there (`covers_table` is False then).

    Attributes:
        feature: position of the feature.
        columns: column ranges of the table, as in `Piece`.
        row_starts: first row of each piece, ascending; of any rank.
        row_stops: one past the last row of each.
        key_shifts: a row's key is `row + key_shifts[piece]`.
        covers_table: whether every row lies in one of the pieces.
    """

    feature: int
    columns: tuple[ColumnRange, ...]
    row_starts: Int64Array
    row_stops: Int64Array
    key_shifts: Int64Array
    covers_table: bool


@dataclass(frozen=True, eq=False)
class KeySpace:
    """The keys of all ranks' table groups of one local dim and memory, as one flat space.

    Attributes:
        exchange: how the values of its slices travel; tables with another exchange have a key space
            of their own over the same groups.
        dim: local dim, `D`.
        bases: `W + 1` ascending keys; rank r's group has `bases[r] … bases[r+1]-1`.
        group_of_rank: per rank the index of its group, or None.
        wire_ids: per rank the type its keys (less `bases[r]`) travel in: int32 where they fit.
        slices: the lookups that lead here.
        memory: where the rows lie.
    """

    exchange: ExchangeName
    dim: int
    bases: Int64Array
    group_of_rank: tuple[int | None, ...]
    wire_ids: tuple[npt.DTypeLike, ...]
    slices: tuple[FeatureSlice, ...]
    memory: Memory = "device"


class PeerStretch(NamedTuple):
    """Rows whose columns lie on two pieces, of which one or both are on another rank.

    Attributes:
        table: name of the table.
        row_start: first row that both pieces hold.
        row_stop: one past the last.
        source: the piece whose figures travel.
        target: the piece that needs them.
    """

    table: str
    row_start: int
    row_stop: int
    source: Piece
    target: Piece


def build_key_spaces(
    plan: Plan,
    tables: Sequence[TableConfig],
    features: Sequence[FeatureConfig],
    groups_of_rank: Sequence[Sequence[TableGroup]],
) -> tuple[KeySpace, ...]:
    """The key spaces of all tables that aren't everywhere; the same on every rank."""
    exchanged = [
        (rank, index, group)
        for rank, groups in enumerate(groups_of_rank)
        for index, group in enumerate(groups)
        if not group.everywhere
    ]
    rows = {table.name: table.rows for table in tables}
    spaces: list[KeySpace] = []
    for dim, memory in dict.fromkeys((group.dim, group.memory) for _, _, group in exchanged):
        of_kind = [entry for entry in exchanged if (entry[2].dim, entry[2].memory) == (dim, memory)]
        of_rank: list[int | None] = [None] * plan.world_size
        sizes = np.zeros(plan.world_size + 1, dtype=np.int64)
        for rank, index, group in of_kind:
            of_rank[rank], sizes[rank + 1] = index, group.num_rows
        bases = np.cumsum(sizes)
        keyed = [
            (piece, int(bases[rank]) + key)
            for rank, _, group in of_kind
            for piece, key in zip(group.pieces, group.first_keys, strict=True)
        ]
        for exchange in ("kv", "pooled"):
            slices = tuple(
                part
                for position, feature in enumerate(features)
                if plan.exchange[feature.table] == exchange
                for part in _feature_slices(position, feature, rows[feature.table], keyed)
            )
            if slices:
                wire_ids = tuple(
                    np.int32 if size - 1 <= _MAX_INT32 else np.int64 for size in sizes[1:]
                )
                spaces.append(
                    KeySpace(exchange, dim, bases, tuple(of_rank), wire_ids, slices, memory)
                )
    return tuple(spaces)


def stretches_of(part: FeatureSlice, keys_K: Int64Array) -> Iterator[tuple[int, int, int]]:
    """Of ascending keys those that lie in a slice, piece by piece: `(low, high, shift)`, where the
    row of `keys_K[low:high]` is key - shift."""
    for start, stop, shift in zip(part.row_starts, part.row_stops, part.key_shifts, strict=True):
        low, high = np.searchsorted(keys_K, (start + shift, stop + shift))
        yield int(low), int(high), int(shift)


def keys_of(
    part: FeatureSlice, ids_L: Int64Array
) -> tuple[Int64Array, npt.NDArray[np.bool_] | None]:
    """The keys of those ids that have one in a slice, and which these are; None: all."""
    if part.covers_table and len(part.key_shifts) == 1:
        return ids_L + part.key_shifts[0], None
    piece_L = np.searchsorted(part.row_stops, ids_L, side="right")
    if part.covers_table:
        return ids_L + part.key_shifts[piece_L], None
    kept_L = piece_L < len(part.row_stops)
    kept_L[kept_L] = ids_L[kept_L] >= part.row_starts[piece_L[kept_L]]
    return ids_L[kept_L] + part.key_shifts[piece_L[kept_L]], kept_L


def _feature_slices(
    position: int, feature: FeatureConfig, num_rows: int, keyed: Sequence[tuple[Piece, int]]
) -> list[FeatureSlice]:
    by_columns: dict[tuple[ColumnRange, ...], list[tuple[Piece, int]]] = {}
    for piece, key in keyed:
        if piece.table == feature.table:
            by_columns.setdefault(piece.columns, []).append((piece, key))
    slices: list[FeatureSlice] = []
    for columns, pieces in by_columns.items():
        pieces.sort(key=lambda entry: entry[0].row_start)
        starts = np.array([piece.row_start for piece, _ in pieces], dtype=np.int64)
        stops = np.array([piece.row_stop for piece, _ in pieces], dtype=np.int64)
        first_keys = np.array([key for _, key in pieces], dtype=np.int64)
        covers = int((stops - starts).sum()) == num_rows
        slices.append(FeatureSlice(position, columns, starts, stops, first_keys - starts, covers))
    return slices


def split_row_stretches(
    plan: Plan, tables: Sequence[TableConfig], groups_of_rank: Sequence[Sequence[TableGroup]]
) -> tuple[PeerStretch, ...]:
    """Every pair of pieces that share rows of a column-split table, source and target in turn.

    The order is the same on every rank: by table, rows, source's and target's first column.
    """
    stretches: list[PeerStretch] = []
    for table in tables:
        pieces = [
            piece
            for groups in groups_of_rank
            for group in groups
            if not group.everywhere
            for piece in group.pieces
            if piece.table == table.name
        ]
        of_table = [
            PeerStretch(
                table.name,
                max(source.row_start, target.row_start),
                min(source.row_stop, target.row_stop),
                source,
                target,
            )
            for source in pieces
            for target in pieces
            if source is not target
            and max(source.row_start, target.row_start) < min(source.row_stop, target.row_stop)
        ]
        stretches += sorted(
            of_table, key=lambda s: (s.row_start, s.source.columns, s.target.columns)
        )
    return tuple(stretches)
