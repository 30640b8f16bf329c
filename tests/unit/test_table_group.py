"""Pieces and groups: what a rank makes of the plan's rectangles."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embeddings.plan import Plan, Shard, single_process_plan
from embeddings.table import TableConfig
from embeddings.table_group import (
    Piece,
    TableGroup,
    local_groups,
    merge_ranges,
    pieces_of_rank,
    tables_everywhere,
)
from tests.sharding_cases import TABLES, plan_of, tilings


def plan(world_size: int, *shards: Shard) -> Plan:
    return Plan(world_size, shards, {shard.table: "kv" for shard in shards})


def groups_of(plan: Plan, rank: int) -> tuple[TableGroup, ...]:
    return local_groups(plan, rank=rank, dtype=torch.float32, optimizer="adagrad")


@given(data=st.data(), world_size=st.integers(1, 4), rows=st.integers(1, 9), dim=st.integers(1, 6))
def test_pieces_of_any_tiling_hold_what_the_shards_do_with_one_piece_a_row(
    data: st.DataObject, world_size: int, rows: int, dim: int
) -> None:
    table = TableConfig("t", rows, dim)
    tiling = plan(world_size, *data.draw(tilings(table, world_size)))
    for rank in range(world_size):
        shards = [shard for shard in tiling.shards if shard.rank == rank]
        pieces = pieces_of_rank(tiling, rank)
        for row in range(rows):
            held = {
                column
                for s in shards
                if s.row_start <= row < s.row_stop
                for column in range(s.col_start, s.col_stop)
            }
            of_row = [piece for piece in pieces if piece.row_start <= row < piece.row_stop]
            assert len(of_row) == bool(held), "an id has one key on a rank"
            for piece in of_row:
                assert sorted(held) == [
                    c for start, stop in piece.columns for c in range(start, stop)
                ]
                assert piece.has_first_column == (0 in held)
        for piece, following in pairwise(pieces):
            assert piece.row_stop <= following.row_start, "in the order of the rows"
            could_merge = piece.row_stop == following.row_start
            assert not could_merge or piece.columns != following.columns, (
                "pieces are as large as can be"
            )
        for piece in pieces:
            gaps = [two[0] - one[1] for one, two in pairwise(piece.columns)]
            assert all(gap > 0 for gap in gaps), "ascending and not adjacent"
            assert (piece.table, piece.rank) == ("t", rank)


def test_shards_of_the_same_rows_are_one_piece_and_adjacent_ones_merge() -> None:
    tiling = plan(
        2,
        Shard("t", 0, 10, 8, 12, rank=0),
        Shard("t", 0, 10, 0, 2, rank=0),
        Shard("t", 0, 10, 2, 4, rank=0),
        Shard("t", 0, 10, 4, 8, rank=1),
    )
    (piece,) = pieces_of_rank(tiling, 0)
    assert piece == Piece("t", 0, 0, 10, ((0, 4), (8, 12)))
    assert (piece.num_rows, piece.dim, piece.has_first_column) == (10, 8, True)
    assert str(piece) == "rows 0:10 × columns 0:4, 8:12 on rank 0"
    (other,) = pieces_of_rank(tiling, 1)
    assert not other.has_first_column


def test_bands_with_other_columns_are_pieces_of_their_own() -> None:
    tiling = plan(
        2,
        Shard("t", 0, 6, 0, 3, rank=0),
        Shard("t", 0, 4, 3, 8, rank=1),
        Shard("t", 4, 6, 3, 8, rank=0),
        Shard("t", 6, 9, 0, 8, rank=0),
    )
    assert [str(piece) for piece in pieces_of_rank(tiling, 0)] == [
        "rows 0:4 × columns 0:3 on rank 0",
        "rows 4:9 × columns 0:8 on rank 0",
    ]


def test_rows_on_the_host_and_on_the_device_stay_apart() -> None:
    tiling = plan(
        2,
        Shard("t", 0, 4, 0, 8, rank=0, memory="host"),
        Shard("t", 4, 9, 0, 8, rank=0),
    )
    assert [(p.row_start, p.row_stop, p.memory) for p in pieces_of_rank(tiling, 0)] == [
        (0, 4, "host"),
        (4, 9, "device"),
    ]


def test_groups_are_by_local_dim_with_the_tables_that_are_everywhere_first() -> None:
    shards = [
        Shard("cut", 0, 10, 0, 4, rank=0),
        Shard("cut", 0, 10, 4, 8, rank=1),
        Shard("whole", 0, 7, 0, 4, rank=0),
        *(Shard("copied", 0, 5, 0, 4, rank=rank) for rank in range(2)),
        Shard("wide", 0, 3, 0, 8, rank=0),
    ]
    mixed = plan(2, *shards)
    assert tables_everywhere(mixed) == {"copied"}
    described = [
        (group.everywhere, group.dim, [piece.table for piece in group.pieces], group.first_keys)
        for group in groups_of(mixed, 0)
    ]
    assert described == [
        (True, 4, ["copied"], (0,)),
        (False, 4, ["cut", "whole"], (0, 10)),
        (False, 8, ["wide"], (0,)),
    ]
    assert [group.num_rows for group in groups_of(mixed, 0)] == [5, 17, 3]
    assert [(g.everywhere, g.dim, g.num_rows) for g in groups_of(mixed, 1)] == [
        (True, 4, 5),
        (False, 4, 10),
    ]


def test_in_one_process_every_table_is_everywhere_and_whole() -> None:
    for tiling in (single_process_plan(TABLES), plan_of("pinwheel", 1), plan_of("blocks", 1)):
        assert tables_everywhere(tiling) == {table.name for table in TABLES}
        pieces = [piece for group in groups_of(tiling, 0) for piece in group.pieces]
        assert {(p.table, p.num_rows, p.columns) for p in pieces} == {
            (table.name, table.rows, ((0, table.dim),)) for table in TABLES
        }
        assert all(group.everywhere for group in groups_of(tiling, 0))


def test_a_rank_with_nothing_has_no_groups() -> None:
    assert groups_of(plan_of("lone", 3), 0) == ()
    assert pieces_of_rank(plan_of("lone", 3), 1) == []


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        ([], ()),
        ([(4, 6), (0, 2)], ((0, 2), (4, 6))),
        ([(2, 4), (0, 2), (4, 5)], ((0, 5),)),
        ([(3, 4), (0, 1), (1, 2)], ((0, 2), (3, 4))),
    ],
)
def test_ranges_are_sorted_and_adjacent_ones_merged(ranges: Any, expected: Any) -> None:
    assert merge_ranges(ranges) == expected
