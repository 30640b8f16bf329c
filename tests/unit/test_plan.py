"""Plans: round trip, digest, and the rules they must obey."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embeddings.plan import ExchangeName, Plan, Shard, single_process_plan
from embeddings.table import TableConfig
from embeddings.table_group import local_groups

USER = TableConfig("user", rows=10, dim=8)
ITEM = TableConfig("item", rows=4, dim=4)


def plan_of(*shards: Shard, world_size: int = 2, exchange: ExchangeName = "kv") -> Plan:
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


def plan_json(**changes: object) -> str:
    """A plan of one shard with some fields replaced; `shard_NAME` is a field of the shard."""
    shard = {
        "table": "user",
        "row_start": 0,
        "row_stop": 10,
        "col_start": 0,
        "col_stop": 8,
        "rank": 1,
        "memory": "device",
    }
    fields = {"format_version": 1, "world_size": 2, "shards": [shard], "exchange": {"user": "kv"}}
    for name, value in changes.items():
        where = shard if name.startswith("shard_") else fields
        where[name.removeprefix("shard_")] = value  # type: ignore[index]
    return json.dumps(fields)


def without(text: str, name: str) -> str:
    """The same plan without a field, of the shard where the plan has none of that name."""
    fields = json.loads(text)
    del (fields if name in fields else fields["shards"][0])[name]
    return json.dumps(fields)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "format_version None"),
        (plan_json(format_version=2), "format_version 2, this program reads 1"),
        (plan_json(format_version=True), "format_version True"),
        (without(plan_json(), "shards"), "the plan: the field 'shards' is missing"),
        (without(plan_json(), "exchange"), "the plan: the field 'exchange' is missing"),
        (plan_json(comment="mine"), "the plan: there is no field 'comment'; .*world_size, shards"),
        (plan_json(world_size="2"), "the plan: world_size is '2', must be a whole number"),
        (plan_json(world_size=0), "the plan: world_size is 0, must be at least 1"),
        (plan_json(shards={}), "the plan: shards is {}, must be a list"),
        (plan_json(shards=[7]), "shard 0: is 7, must be an object"),
        (plan_json(exchange=["kv"]), r"the plan: exchange is \['kv'\], must be table: exchange"),
        (plan_json(exchange={"user": "pool"}), "table 'user': exchange is 'pool', .*exchange"),
        (
            plan_json(shard_tabel="a"),
            r"shard 0 \(table 'user', rank 1\): there is no field 'tabel'; .*row_start",
        ),
        (without(plan_json(), "row_stop"), r"table 'user', rank 1\): the field 'row_stop' is miss"),
        (without(plan_json(), "table"), r"shard 0 \(no table, rank 1\): the field 'table'"),
        (without(plan_json(), "rank"), r"shard 0 \(table 'user'\): the field 'rank' is missing"),
        (plan_json(shard_table=5), "table is 5, must be the name of a table"),
        (plan_json(shard_row_start=-1), r"'user', rank 1\): row_start is -1, must be at least 0"),
        (plan_json(shard_col_stop=8.0), r"'user', rank 1\): col_stop is 8.0, must be a whole"),
        (plan_json(shard_rank=-1), r"'user', rank -1\): rank is -1, must be at least 0"),
        (plan_json(shard_rank=None), r"'user', rank None\): rank is None, must be a whole"),
        (plan_json(shard_rank=True), "rank is True, must be a whole number"),
        (plan_json(shard_memory="disk"), r"rank 1\): memory is 'disk', .*sharding.memory"),
        (plan_json().replace('"kv"', '"kv", "user": "pooled"'), "'user' is given twice"),
    ],
)
def test_text_that_is_no_plan_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.from_json(text)


def test_memory_may_be_left_out_of_a_plan_written_by_hand() -> None:
    assert Plan.from_json(without(plan_json(), "memory")) == Plan.from_json(plan_json())


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
        ([WHOLE, WHOLE], r"'user', rank 0: overlap: 2 whole copies on one rank; a table is repl"),
        (
            [WHOLE, replace(WHOLE, rank=1), replace(WHOLE, rank=1, row_start=9)],
            r"'user', rank 1: overlap: rows 9:10 .* beside whole copies on ranks 0-1",
        ),
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


def test_a_replicated_table_lies_whole_on_every_rank() -> None:
    copies = [replace(WHOLE, rank=rank) for rank in (2, 0, 1)]
    plan = plan_of(*copies, Shard("item", 0, 4, 0, 4, rank=1), world_size=3)
    plan.validate([USER, ITEM])
    assert plan.is_replicated("user")
    assert not plan.is_replicated("item")
    assert not plan.is_replicated("no such table")
    assert Plan.from_json(plan.to_json()).is_replicated("user")
    # One rank replicates nothing: its plan is the single process's, exactly.
    assert not single_process_plan([USER]).is_replicated("user")
    halves = plan_of(replace(WHOLE, row_stop=5), replace(WHOLE, row_start=5, rank=1))
    assert not halves.is_replicated("user")


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_copies_on_some_ranks_only_are_refused(missing: int) -> None:
    copies = [replace(WHOLE, rank=rank) for rank in range(3) if rank != missing]
    with pytest.raises(ValueError, match=rf"'user', rank {missing}: .*none on rank {missing}; a t"):
        plan_of(*copies, world_size=3).validate([USER])


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
    with pytest.raises(ValueError, match=r"'user'.*: overlap"):
        plan_of(*order, order[victim]).validate([USER])
    if order[victim].row_stop < USER.rows:
        grown = replace(order[victim], row_stop=order[victim].row_stop + 1)
        with pytest.raises(ValueError, match=r"'user': overlap"):
            plan_of(*lost, grown).validate([USER])


def test_printout_has_a_line_per_table() -> None:
    plan = plan_of(
        replace(WHOLE, row_stop=6),
        replace(WHOLE, row_start=6, rank=1, memory="host"),
        Shard("item", 0, 4, 0, 4, rank=0),
        Shard("item", 0, 4, 0, 4, rank=1),
        Shard("cols", 0, 7, 0, 4, rank=1),
        Shard("cols", 0, 7, 4, 8, rank=0),
        Shard("word", 0, 2, 0, 4, rank=1),
        exchange="pooled",
    )
    heading, *lines = plan.describe()
    assert heading == f"plan {plan.digest()[:12]}: 4 tables, 7 shards, 2 ranks"
    words = [" ".join(line.split()) for line in lines]
    assert words == [
        "user rows in 2: 4 to 6 ranks 0-1 pooled device+host",
        "item replicated ranks 0-1 - device",
        "cols columns in 2: 4 each ranks 0-1 pooled device",
        "word whole: 2 × 4 rank 1 pooled device",
    ]


def test_printout_fits_a_terminal() -> None:
    """26 large tables over 4 ranks, long names, and ranks that form no simple range."""
    names = [f"a_rather_long_name_of_a_feature_{n}" for n in range(26)]
    shards = [
        Shard(name, rank * 25_000_000, (rank + 1) * 25_000_000, 0, 128, rank=2 * rank)
        for name in names
        for rank in range(4)
    ]
    lines = plan_of(*shards, world_size=8, exchange="pooled").describe()
    assert len(lines) == 27
    assert max(map(len, lines)) <= 100
    assert len({line.split()[0] for line in lines[1:]}) == 26, "shortened names stay apart"
    ranks = [Shard("t", row, row + 1, 0, 1, rank=2 * row) for row in range(50)]
    assert "50 ranks" in plan_of(*ranks, world_size=100).describe()[1]


def test_groups_are_the_shards_of_a_rank_by_local_dim() -> None:
    plan = plan_of(
        Shard("user", 0, 10, 0, 4, rank=0),
        Shard("user", 0, 10, 4, 8, rank=1),
        Shard("item", 0, 4, 0, 4, rank=0),
    )
    plan.validate([USER, ITEM])
    (group,) = local_groups(plan, rank=0, dtype=torch.float32, optimizer="sgd")
    assert (group.dim, group.num_rows) == (4, 14)
    assert group.first_keys == (0, 10)
    single = local_groups(
        single_process_plan([USER, ITEM]), rank=0, dtype=torch.float32, optimizer="sgd"
    )
    assert [group.dim for group in single] == [8, 4]
