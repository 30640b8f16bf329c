"""Key spaces: every rank agrees on which lookup leads to which key of which rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embeddings.layout import KeySpace, build_key_spaces, split_row_stretches
from embeddings.plan import Plan, Shard
from embeddings.table import FeatureConfig, TableConfig
from embeddings.table_group import TableGroup, local_groups
from tests.sharding_cases import FEATURES, LAYOUTS, TABLES, plan_of, tilings


def groups_by_rank(plan: Plan) -> list[tuple[TableGroup, ...]]:
    return [
        local_groups(plan, rank=rank, dtype=torch.float32, optimizer="sgd")
        for rank in range(plan.world_size)
    ]


def spaces_of(
    plan: Plan, tables: Sequence[TableConfig], features: Sequence[FeatureConfig]
) -> tuple[KeySpace, ...]:
    return build_key_spaces(plan, tables, features, groups_by_rank(plan))


def places_of_row(
    spaces: Sequence[KeySpace], plan: Plan, feature: int, row: int
) -> list[tuple[int, int, tuple[tuple[int, int], ...]]]:
    """`(rank, row of the piece's table, columns)` that the keys of an id lead to."""
    groups = groups_by_rank(plan)
    places = []
    for space in spaces:
        for part in (part for part in space.slices if part.feature == feature):
            for start, stop, shift in zip(
                part.row_starts, part.row_stops, part.key_shifts, strict=True
            ):
                if not start <= row < stop:
                    continue
                key = row + int(shift)
                rank = int(np.searchsorted(space.bases, key, side="right")) - 1
                index = space.group_of_rank[rank]
                assert index is not None
                group = groups[rank][index]
                assert group.dim == space.dim
                local = key - int(space.bases[rank])
                piece_index = int(np.searchsorted(group.first_keys, local, side="right")) - 1
                piece = group.pieces[piece_index]
                assert piece.columns == part.columns
                found = local - group.first_keys[piece_index] + piece.row_start
                places.append((rank, found, piece.columns))
    return places


@given(data=st.data(), world_size=st.integers(2, 4))
def test_the_keys_of_an_id_lead_to_all_columns_of_its_row_once_and_once_a_rank(
    data: st.DataObject, world_size: int
) -> None:
    tables = [
        TableConfig(f"t{i}", data.draw(st.integers(1, 6)), data.draw(st.integers(1, 5)))
        for i in range(2)
    ]
    features = [FeatureConfig("f0", "t0"), FeatureConfig("f1", "t1"), FeatureConfig("f2", "t0")]
    shards = [shard for table in tables for shard in data.draw(tilings(table, world_size))]
    plan = Plan(
        world_size,
        tuple(shards),
        {t.name: data.draw(st.sampled_from(["kv", "pooled"])) for t in tables},
    )
    spaces = spaces_of(plan, tables, features)
    for position, feature in enumerate(features):
        table = next(table for table in tables if table.name == feature.table)
        for row in range(table.rows):
            places = places_of_row(spaces, plan, position, row)
            if plan.is_replicated(table.name):
                assert places == [], "looked up locally"
                continue
            assert {found for _, found, _ in places} == {row}
            columns = [c for *_, ranges in places for a, b in ranges for c in range(a, b)]
            assert sorted(columns) == list(range(table.dim))
            ranks = [rank for rank, *_ in places]
            assert len(set(ranks)) == len(ranks), "an id goes to a rank once"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_slice_that_covers_its_table_has_every_row(layout: str) -> None:
    rows = {table.name: table.rows for table in TABLES}
    for space in spaces_of(plan_of(layout, 3, "mixed"), TABLES, FEATURES):
        for part in space.slices:
            held = sorted(
                row
                for start, stop in zip(part.row_starts, part.row_stops, strict=True)
                for row in range(start, stop)
            )
            whole = list(range(rows[FEATURES[part.feature].table]))
            assert part.covers_table == (held == whole)
            assert set(held) <= set(whole)


def test_groups_of_all_ranks_lie_end_to_end_and_each_exchange_has_its_own_slices() -> None:
    tables = [TableConfig("a", 10, 4), TableConfig("b", 6, 4), TableConfig("c", 5, 8)]
    features = [FeatureConfig(f"f_{t.name}", t.name) for t in tables]
    plan = Plan(
        3,
        (
            Shard("a", 0, 7, 0, 4, rank=0),
            Shard("a", 7, 10, 0, 4, rank=2),
            Shard("b", 0, 6, 0, 4, rank=2),
            Shard("c", 0, 5, 0, 8, rank=1),
        ),
        {"a": "kv", "b": "pooled", "c": "kv"},
    )
    described = [
        (
            space.exchange,
            space.dim,
            space.bases.tolist(),
            space.group_of_rank,
            [part.feature for part in space.slices],
        )
        for space in spaces_of(plan, tables, features)
    ]
    assert described == [
        ("kv", 4, [0, 7, 7, 16], (0, None, 0), [0]),
        ("pooled", 4, [0, 7, 7, 16], (0, None, 0), [1]),
        ("kv", 8, [0, 0, 5, 5], (None, 0, None), [2]),
    ]


def test_tables_without_features_and_replicas_have_no_lookups_here() -> None:
    assert spaces_of(plan_of("replicated", 3), TABLES, FEATURES) == ()
    idle = [table for table in TABLES if table.name == "idle"]
    assert spaces_of(plan_of("row_wise", 3, "kv", idle), idle, []) == ()


@pytest.mark.parametrize(
    ("rows", "dtype"), [(2**31 - 1, np.int32), (2**31, np.int32), (2**31 + 1, np.int64)]
)
def test_ids_travel_as_int32_to_ranks_whose_rows_are_numbered_in_31_bits(
    rows: int, dtype: type
) -> None:
    """Rank 1 has `rows` rows of one dim, of two tables; nothing is allocated."""
    tables = [TableConfig("big", 2**40 + rows, 4), TableConfig("small", 100, 4)]
    plan = Plan(
        2,
        (
            Shard("big", 0, 2**40 + 100, 0, 4, rank=0),
            Shard("big", 2**40 + 100, 2**40 + rows, 0, 4, rank=1),
            Shard("small", 0, 100, 0, 4, rank=1),
        ),
        {"big": "kv", "small": "kv"},
    )
    features = [FeatureConfig("f", "big"), FeatureConfig("g", "small")]
    (space,) = spaces_of(plan, tables, features)
    assert space.wire_ids == (np.int64, dtype)
    assert space.bases.tolist() == [0, 2**40 + 100, 2**40 + 100 + rows]


@given(data=st.data(), world_size=st.integers(2, 4))
def test_stretches_join_every_two_pieces_of_a_row_both_ways(
    data: st.DataObject, world_size: int
) -> None:
    table = TableConfig("t", data.draw(st.integers(1, 6)), data.draw(st.integers(1, 5)))
    plan = Plan(world_size, tuple(data.draw(tilings(table, world_size))), {"t": "kv"})
    groups = groups_by_rank(plan)
    stretches = split_row_stretches(plan, [table], groups)
    pieces = [p for of_rank in groups for g in of_rank if not g.everywhere for p in g.pieces]
    for row in range(table.rows):
        of_row = [piece for piece in pieces if piece.row_start <= row < piece.row_stop]
        expected = [(one, two) for one in of_row for two in of_row if one is not two]
        found = [(s.source, s.target) for s in stretches if s.row_start <= row < s.row_stop]
        assert sorted(map(str, found)) == sorted(map(str, expected))
    # The order doesn't depend on that of the shards, which ranks may hold in any order.
    assert stretches == split_row_stretches(plan, [table], [tuple(reversed(g)) for g in groups])


def test_rows_that_arent_split_have_no_stretches() -> None:
    for layout in ("table_wise", "row_wise", "table_row_wise", "replicated", "lone"):
        plan = plan_of(layout, 3)
        assert split_row_stretches(plan, TABLES, groups_by_rank(plan)) == (), layout
