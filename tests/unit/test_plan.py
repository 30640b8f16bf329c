"""Plans: round trip, digest, and the rules they must obey."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embeddings.plan import Exchange, Plan, Shard, local_groups, single_process_plan
from embeddings.table import TableConfig

USER = TableConfig("user", rows=10, dim=8)
ITEM = TableConfig("item", rows=4, dim=4)


def plan_of(*shards: Shard, world_size: int = 2, exchange: Exchange = "kv") -> Plan:
    return Plan(world_size, shards, {shard.table: exchange for shard in shards})


def test_single_process_plan_holds_every_table_whole_on_rank_0() -> None:
    plan = single_process_plan([USER, ITEM])
    plan.validate([USER, ITEM])
    assert plan.world_size == 1
    assert plan.shards == (Shard("user", 0, 10, 0, 8, rank=0), Shard("item", 0, 4, 0, 4, rank=0))


def test_json_round_trip() -> None:
    plan = plan_of(
        Shard("user", 5, 10, 0, 8, rank=1, memory="host"), Shard("user", 0, 5, 0, 8, rank=0)
    )
    text = plan.to_json()
    assert json.loads(text)["format_version"] == 1
    assert Plan.from_json(text) == plan
    assert Plan.from_json(text).digest() == plan.digest()


def test_digest_knows_what_matters() -> None:
    upper, lower = Shard("user", 0, 5, 0, 8, rank=0), Shard("user", 5, 10, 0, 8, rank=1)
    plan = plan_of(upper, lower)
    assert plan_of(lower, upper).digest() == plan.digest(), "the order of shards means nothing"
    changed = [
        replace(plan, world_size=3),
        plan_of(upper, replace(lower, rank=0)),
        plan_of(upper, replace(lower, memory="host")),
        plan_of(upper, lower, exchange="pooled"),
    ]
    assert len({plan.digest(), *(other.digest() for other in changed)}) == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "format_version None"),
        ('{"format_version": 2}', "format_version 2, this program reads 1"),
        ('{"format_version": 1, "world_size": 1}', "shards"),
        (
            '{"format_version": 1, "world_size": 1, "shards": [{"tabel": "a"}], "exchange": {}}',
            "tabel",
        ),
    ],
)
def test_text_that_is_no_plan_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.from_json(text)


WHOLE = Shard("user", 0, 10, 0, 8, rank=0)


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([replace(WHOLE, row_stop=9)], r"'user': gap: rows 9:10 × columns 0:8 are on no rank"),
        ([replace(WHOLE, row_start=1)], r"'user': gap: rows 0:1"),
        ([replace(WHOLE, col_stop=4)], r"'user': gap: rows 0:10 × columns 4:8"),
        (
            [replace(WHOLE, col_stop=2), replace(WHOLE, col_start=5, rank=1)],
            r"'user': gap: rows 0:10 × columns 2:5",
        ),
        ([WHOLE, replace(WHOLE, rank=1)], r"'user': overlap: .*rank 0 and .*rank 1 .*rows 0:10"),
        (
            [replace(WHOLE, row_stop=6), replace(WHOLE, row_start=5, rank=1)],
            r"'user': overlap: .*rank 0 and .*rank 1 .*rows 5:6",
        ),
        ([replace(WHOLE, rank=2)], r"'user': rank 2 is outside 0 to 1"),
        ([replace(WHOLE, row_stop=11)], r"'user', rank 0: .*10 rows × 8 columns"),
        ([replace(WHOLE, row_start=10)], r"'user', rank 0: .*non-empty"),
        ([replace(WHOLE, memory="disk")], r"'user', rank 0: memory is 'disk'.*sharding.memory"),
        ([WHOLE, Shard("item", 0, 4, 0, 4, rank=0)], r"'item': .*unknown table"),
    ],
)
def test_broken_rules_are_named(shards: list[Shard], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(*shards).validate([USER])


def test_tables_and_exchanges_must_be_complete() -> None:
    with pytest.raises(ValueError, match=r"'item': gap"):
        Plan(1, (WHOLE,), {"user": "kv", "item": "kv"}).validate([USER, ITEM])
    with pytest.raises(ValueError, match=r"'user': exchange is None.*sharding.exchange"):
        Plan(1, (WHOLE,), {}).validate([USER])
    with pytest.raises(ValueError, match=r"'item': .*unknown table"):
        Plan(1, (WHOLE,), {"user": "kv", "item": "kv"}).validate([USER])
    with pytest.raises(ValueError, match=r"world_size is 0"):
        Plan(0, (), {}).validate([])


def tilings(rows: int, cols: int) -> st.SearchStrategy[list[tuple[int, int, int, int]]]:
    """Rectangles (row start, row stop, column start, column stop) that tile rows × cols."""

    def cut(draw: st.DrawFn, r0: int, r1: int, c0: int, c1: int, depth: int) -> list:
        by_row = draw(st.booleans())
        low, high = (r0, r1) if by_row else (c0, c1)
        if depth == 0 or high - low < 2 or not draw(st.booleans()):
            return [(r0, r1, c0, c1)]
        at = draw(st.integers(low + 1, high - 1))
        if by_row:
            return cut(draw, r0, at, c0, c1, depth - 1) + cut(draw, at, r1, c0, c1, depth - 1)
        return cut(draw, r0, r1, c0, at, depth - 1) + cut(draw, r0, r1, at, c1, depth - 1)

    @st.composite
    def strategy(draw: st.DrawFn) -> list[tuple[int, int, int, int]]:
        return cut(draw, 0, rows, 0, cols, 4)

    return strategy()


@given(tilings(10, 8), st.data())
def test_every_tiling_is_valid_and_none_survives_a_loss_a_copy_or_a_growth(
    rectangles: list[tuple[int, int, int, int]], data: st.DataObject
) -> None:
    shards = [Shard("user", *rectangle, rank=i % 2) for i, rectangle in enumerate(rectangles)]
    order = data.draw(st.permutations(shards))
    plan_of(*order).validate([USER])

    victim = data.draw(st.integers(0, len(order) - 1))
    lost = order[:victim] + order[victim + 1 :]
    with pytest.raises(ValueError, match=r"'user'"):
        Plan(2, tuple(lost), {"user": "kv"}).validate([USER])
    with pytest.raises(ValueError, match=r"'user': overlap"):
        plan_of(*order, order[victim]).validate([USER])
    if order[victim].row_stop < USER.rows:
        grown = replace(order[victim], row_stop=order[victim].row_stop + 1)
        with pytest.raises(ValueError, match=r"'user': overlap"):
            plan_of(*lost, grown).validate([USER])


def test_printout_has_a_line_per_shard() -> None:
    lines = plan_of(
        replace(WHOLE, row_stop=6), replace(WHOLE, row_start=6, rank=1, memory="host")
    ).describe()
    assert len(lines) == 3
    assert "1 tables, 2 shards, 2 ranks" in lines[0]
    assert all(word in lines[2] for word in ("user", "rank 1", "host", "6:10", "0:8", "kv"))


def test_groups_are_the_shards_of_a_rank_by_local_dim() -> None:
    plan = plan_of(
        Shard("user", 0, 10, 0, 4, rank=0),
        Shard("user", 0, 10, 4, 8, rank=1),
        Shard("item", 0, 4, 0, 4, rank=0),
    )
    plan.validate([USER, ITEM])
    (group,) = local_groups(plan, rank=0, dtype=torch.float32, optimizer="sgd")
    assert (group.dim, group.num_rows) == (4, 14)
    assert group.key_offsets == {"user": 0, "item": 10}
    single = local_groups(
        single_process_plan([USER, ITEM]), rank=0, dtype=torch.float32, optimizer="sgd"
    )
    assert [group.dim for group in single] == [8, 4]
