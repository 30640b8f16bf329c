"""Builders of plans: whatever they are given, a valid plan; balanced, repeatable, explained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embeddings.plan import Plan
from embeddings.plan_builders import (
    auto,
    build_plan,
    column_wise,
    plan_workload,
    replicated,
    row_wise,
    table_row_wise,
    table_wise,
)
from embeddings.plan_choice import (
    LAYOUTS,
    ExchangeChoice,
    Layout,
    LayoutChoice,
    PlannedLayout,
    TableChoice,
    Workload,
)
from embeddings.row_cuts import MAX_EXCESS_ELEMENTS
from embeddings.table import FeatureConfig, TableConfig
from embeddings.traffic import TableStats, TableTraffic

BUILDERS: dict[str, Callable[[Workload], Plan]] = {
    "table_wise": table_wise,
    "row_wise": row_wise,
    "column_wise": column_wise,
    "table_row_wise": table_row_wise,
    "replicated": replicated,
    "auto": lambda workload: auto(workload).plan,
}


def zipf_stats(rows: int, lookups_per_sample: float = 1.0) -> TableStats:
    counts = (1e9 / np.arange(1, rows + 1)).astype(np.int64)
    return TableStats(lookups_per_sample, counts, np.arange(rows))


def features_of(*tables: TableConfig) -> list[FeatureConfig]:
    return [FeatureConfig(table.name, table.name) for table in tables]


def workload_of(
    *tables: TableConfig,
    world_size: int,
    stats: dict[str, TableStats] | None = None,
    ranks_per_host: int | None = None,
) -> Workload:
    return Workload(tables, features_of(*tables), world_size, stats or {}, ranks_per_host)


@st.composite
def stats_of(draw: st.DrawFn, rows: int) -> TableStats:
    ids = draw(st.lists(st.integers(0, rows - 1), unique=True, max_size=20))
    counts = [draw(st.integers(0, 1000)) for _ in ids]
    lookups = draw(st.floats(0, 50))
    return TableStats(lookups, np.array(counts, np.int64), np.array(sorted(ids), np.int64))


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    sizes = draw(
        st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=6)
    )
    tables = [TableConfig(f"t{n}", rows, dim) for n, (rows, dim) in enumerate(sizes)]
    features = [
        FeatureConfig(f"{table.name}_{n}", table.name)
        for table in tables
        for n in range(draw(st.integers(0, 2)))
    ]
    stats = {table.name: draw(stats_of(table.rows)) for table in tables if draw(st.booleans())}
    world_size = draw(st.integers(1, 9))
    ranks_per_host = draw(st.none() | st.integers(1, 10))
    batch_size = draw(st.integers(1, 5000))
    return Workload(tables, features, world_size, stats, ranks_per_host, batch_size)


@st.composite
def choices(draw: st.DrawFn, workload: Workload) -> LayoutChoice:
    exchange = st.sampled_from(["auto", "pooled", "kv"])
    overrides = {
        table.name: TableChoice(draw(st.none() | st.sampled_from(LAYOUTS)), draw(exchange))
        for table in workload.tables
        if draw(st.booleans())
    }
    return LayoutChoice(
        cast(Layout, draw(st.sampled_from(LAYOUTS))),
        cast(ExchangeChoice, draw(exchange)),
        wire_bytes=draw(st.sampled_from([2, 4])),
        tables=overrides,
    )


@settings(max_examples=200, deadline=None)
@given(workload=workloads(), builder=st.sampled_from(sorted(BUILDERS)))
def test_every_builder_gives_a_valid_plan(workload: Workload, builder: str) -> None:
    plan = BUILDERS[builder](workload)
    plan.validate(workload.tables)
    assert plan.world_size == workload.world_size
    assert plan == BUILDERS[builder](workload), "equal inputs, equal plans"
    assert Plan.from_json(plan.to_json()) == plan
    assert max(map(len, plan.describe())) <= 100


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_mixed_plans_are_valid_and_explained(data: st.DataObject) -> None:
    workload = data.draw(workloads())
    choice = data.draw(choices(workload))
    planned = plan_workload(workload, choice)
    planned.plan.validate(workload.tables)
    assert list(planned.reasons) == [table.name for table in workload.tables]
    assert all(reason and "\n" not in reason for reason in planned.reasons.values())
    for table in workload.tables:
        override = choice.tables.get(table.name, TableChoice())
        asked = override.exchange or choice.exchange
        assert asked in ("auto", planned.plan.exchange[table.name])
        if (override.layout or choice.layout) == "replicated":
            assert planned.plan.is_replicated(table.name) == (workload.world_size > 1)


@given(workload=workloads(), layout=st.sampled_from(LAYOUTS))
def test_one_rank_holds_every_table_whole(workload: Workload, layout: Layout) -> None:
    """Every layout works with one process, and comes down to the same."""
    one = Workload(workload.tables, workload.features, 1, workload.stats)
    shards = plan_workload(one, LayoutChoice(layout)).plan.shards
    assert [(s.table, s.num_rows, s.num_cols, s.rank) for s in shards] == [
        (table.name, table.rows, table.dim, 0) for table in workload.tables
    ]


@settings(deadline=None)
@given(workload=workloads())
def test_table_row_wise_stays_within_a_host(workload: Workload) -> None:
    hosts = workload.hosts()
    assert sorted(rank for host in hosts for rank in host) == list(range(workload.world_size))
    for shards in table_row_wise(workload).shards_by_table().values():
        ranks = {shard.rank for shard in shards}
        assert any(ranks <= set(host) for host in hosts)


# ------------------------------------------------------------------------------------- balance


def held_elements(plan: Plan) -> list[int]:
    held = [0] * plan.world_size
    for shard in plan.shards:
        held[shard.rank] += shard.num_rows * shard.num_cols
    return held


def expected_touches(plan: Plan, table: TableConfig, stats: TableStats, batch: int) -> np.ndarray:
    load = TableTraffic(table, 1, stats, samples_per_rank=batch / plan.world_size).load()
    assert load is not None
    held = np.zeros(plan.world_size)
    for shard in plan.shards:
        held[shard.rank] += load.before(shard.row_stop) - load.before(shard.row_start)
    return held


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_row_wise_balances_expected_lookups_and_rows_under_zipf(world_size: int) -> None:
    table, stats = TableConfig("t", 1_000_000, 16), zipf_stats(1_000_000)
    plan = row_wise(workload_of(table, world_size=world_size, stats={"t": stats}))
    touches = expected_touches(plan, table, stats, 2048)
    np.testing.assert_allclose(touches, touches.mean(), rtol=0.1)
    assert max(held_elements(plan)) <= 16_000_000 / world_size + MAX_EXCESS_ELEMENTS
    assert len(plan.shards) <= 2 * world_size - 1


def test_row_wise_balances_expected_lookups_of_small_tables_with_one_shard_a_rank() -> None:
    table, stats = TableConfig("t", 20_000, 16), zipf_stats(20_000)
    plan = row_wise(workload_of(table, world_size=4, stats={"t": stats}))
    assert len(plan.shards) == 4
    touches = expected_touches(plan, table, stats, 2048)
    np.testing.assert_allclose(touches, touches.mean(), rtol=0.1)
    assert plan.shards[0].num_rows < 5_000 / 10, "the head of the table is hot"
    # Without counts: equal rows.
    even = row_wise(workload_of(table, world_size=4))
    assert [shard.num_rows for shard in even.shards] == [5_000] * 4


def test_rows_of_tiny_tables_are_spread_over_the_ranks() -> None:
    """With every first part on rank 0 it would hold all 12 of them."""
    tables = [TableConfig(f"t{n}", 1, 4) for n in range(12)]
    plan = row_wise(workload_of(*tables, world_size=4))
    assert Counter(shard.rank for shard in plan.shards) == {0: 3, 1: 3, 2: 3, 3: 3}
    plan = column_wise(workload_of(*tables, world_size=4))
    assert Counter(shard.rank for shard in plan.shards) == {0: 3, 1: 3, 2: 3, 3: 3}
    # And the odd row of larger tables.
    tables = [TableConfig(f"t{n}", 5, 4) for n in range(12)]
    held = held_elements(row_wise(workload_of(*tables, world_size=4)))
    assert max(held) - min(held) <= 4


def test_a_rank_may_get_nothing() -> None:
    plan = row_wise(workload_of(TableConfig("t", 2, 4), world_size=5))
    assert [(s.row_start, s.row_stop) for s in plan.shards] == [(0, 1), (1, 2)]


def test_table_wise_balances_by_bytes_and_lookups() -> None:
    # One table has the bytes, two the lookups, and the rest fills up.
    big = TableConfig("big", 100_000, 16)
    hot = [TableConfig(f"hot{n}", 1_000, 16) for n in range(2)]
    small = [TableConfig(f"small{n}", 10_000, 16) for n in range(6)]
    stats = {table.name: zipf_stats(table.rows, 100.0) for table in hot}
    stats |= {table.name: zipf_stats(table.rows, 0.01) for table in [big, *small]}
    plan = table_wise(workload_of(big, *hot, *small, world_size=3, stats=stats))
    rank = {shard.table: shard.rank for shard in plan.shards}
    assert len({rank["big"], rank["hot0"], rank["hot1"]}) == 3
    beside_big = [table.name for table in small if rank[table.name] == rank["big"]]
    assert len(beside_big) <= 1, "big is 0.62 of the bytes, an even share of the figure 0.67"
    assert len(plan.shards) == 9


def test_table_wise_is_within_the_bound_of_longest_first() -> None:
    """Graham 1969: longest first is within 4/3 - 1/(3·W) of the best, which is the mean at least
    where no table exceeds it."""
    tables = [TableConfig(f"t{n}", 100 + 37 * n % 91, 4) for n in range(40)]
    held = held_elements(table_wise(workload_of(*tables, world_size=4)))
    assert max(held) <= sum(held) / 4 * (4 / 3)


def test_table_row_wise_balances_the_hosts() -> None:
    tables = [TableConfig(f"t{n}", 1_000, 16) for n in range(6)]
    plan = table_row_wise(workload_of(*tables, world_size=6, ranks_per_host=2))
    assert held_elements(plan) == [16_000] * 6
    # The last host has one rank of its own, and so half of what the others get.
    plan = table_row_wise(workload_of(*tables[:5], world_size=5, ranks_per_host=2))
    assert held_elements(plan) == [16_000] * 5


def test_table_wise_tables_fill_what_the_others_leave() -> None:
    tables = [TableConfig("fixed", 1_000, 16)] + [TableConfig(f"t{n}", 500, 16) for n in range(2)]
    choice = LayoutChoice("table_wise", tables={"fixed": TableChoice(ranks=(0,))})
    plan = plan_workload(workload_of(*tables, world_size=2), choice).plan
    assert held_elements(plan) == [16_000, 16_000]


# ------------------------------------------------------------------------------------ overrides


def planned_with(choice: LayoutChoice, *, ranks_per_host: int = 2) -> PlannedLayout:
    tables = [TableConfig("a", 100, 16), TableConfig("b", 100, 16)]
    return build_plan(tables, features_of(*tables), {}, choice, 4, ranks_per_host, 256)


def test_ranks_given_by_name_hold_the_table_in_their_order() -> None:
    override = {"a": TableChoice("row_wise", ranks=(3, 1)), "b": TableChoice(ranks=(2,))}
    planned = planned_with(LayoutChoice("table_wise", tables=override))
    assert [(s.table, s.row_start, s.row_stop, s.rank) for s in planned.plan.shards] == [
        ("a", 0, 50, 3),
        ("a", 50, 100, 1),
        ("b", 0, 100, 2),
    ]
    assert planned.reasons["a"].startswith("row_wise (sharding.tables.a.layout); ")
    assert planned.reasons["b"].startswith("table_wise (sharding.layout); ")
    columns = planned_with(LayoutChoice(tables={"a": TableChoice("column_wise", ranks=(2, 0))}))
    assert [(s.col_start, s.rank) for s in columns.plan.shards_by_table()["a"]] == [(0, 2), (8, 0)]
    within = {"a": TableChoice("table_row_wise", ranks=(3, 2))}
    assert [s.rank for s in planned_with(LayoutChoice(tables=within)).plan.shards[:2]] == [3, 2]


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (
            LayoutChoice(tables={"c": TableChoice(), "B": TableChoice()}),
            r"sharding.tables.B, sharding.tables.c: no such table; the tables are a, b",
        ),
        (
            LayoutChoice("row_wise", tables={"a": TableChoice(ranks=(4,))}),
            r"sharding.tables.a.ranks=\[4\]: rank 4 is outside 0 to 3 \(launch.nproc\)",
        ),
        (
            LayoutChoice("row_wise", tables={"a": TableChoice(ranks=(1, 1))}),
            r"sharding.tables.a.ranks=\[1, 1\]: must name at least one rank, and each once",
        ),
        (
            LayoutChoice("row_wise", tables={"a": TableChoice(ranks=())}),
            r"sharding.tables.a.ranks=\[\]: must name at least one rank",
        ),
        (
            LayoutChoice("table_wise", tables={"a": TableChoice(ranks=(0, 1))}),
            r"sharding.tables.a.ranks=\[0, 1\]: the layout table_wise puts a table on one rank",
        ),
        (
            LayoutChoice(tables={"a": TableChoice(ranks=(0,))}),
            r"sharding.tables.a.ranks=\[0\]: .*layout auto has no ranks to choose; .*a.layout",
        ),
        (
            LayoutChoice(tables={"a": TableChoice("replicated", ranks=(0, 1))}),
            r"sharding.tables.a.ranks=\[0, 1\]: .*layout replicated has no ranks",
        ),
        (
            LayoutChoice(tables={"a": TableChoice("table_row_wise", ranks=(1, 2))}),
            r"sharding.tables.a.ranks=\[1, 2\]: .*within one host, .*2 ranks.*ranks_per_host",
        ),
    ],
)
def test_overrides_that_cannot_be_name_their_key(choice: LayoutChoice, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planned_with(choice)


@pytest.mark.parametrize("name", ["world_size", "ranks_per_host", "batch_size"])
def test_a_workload_needs_ranks_and_samples(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0, must be at least 1"):
        Workload([], [], **{"world_size": 1, name: 0})  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------- exchange


@pytest.mark.parametrize("layout", ["table_wise", "row_wise", "column_wise"])
def test_auto_exchange_is_kv_for_one_id_and_pooled_for_long_bags(layout: Layout) -> None:
    tables = [TableConfig("one", 100_000, 64), TableConfig("bags", 100_000, 64)]
    stats = {"one": zipf_stats(100_000, 1.0), "bags": zipf_stats(100_000, 100.0)}
    workload = workload_of(*tables, world_size=2, stats=stats)
    planned = plan_workload(workload, LayoutChoice(layout))
    assert planned.plan.exchange == {"one": "kv", "bags": "pooled"}
    assert "; kv " in planned.reasons["one"]
    assert "; pooled " in planned.reasons["bags"]


def test_an_exchange_that_was_asked_for_is_taken() -> None:
    choice = LayoutChoice("row_wise", "pooled", tables={"b": TableChoice(exchange="kv")})
    planned = planned_with(choice)
    assert planned.plan.exchange == {"a": "pooled", "b": "kv"}
    assert planned.reasons["a"].endswith("; pooled (sharding.exchange)")
    assert planned.reasons["b"].endswith("; kv (sharding.tables.b.exchange)")


# ----------------------------------------------------------------------------------------- auto


def criteo_like() -> tuple[list[TableConfig], dict[str, TableStats]]:
    rows = [4, 27, 100, 300, 600, 2_000, 5_000, 12_000, 30_000, 90_000, 150_000, 1_500_000]
    tables = [TableConfig(f"C{n + 1}", count, 16) for n, count in enumerate(rows)]
    return tables, {table.name: zipf_stats(table.rows) for table in tables}


def test_auto_replicates_small_cuts_large_and_balances_the_rest() -> None:
    tables, stats = criteo_like()
    planned = auto(workload_of(*tables, world_size=4, stats=stats))
    plan = planned.plan
    assert plan.is_replicated("C1")
    assert not plan.is_replicated("C8")
    by_table = plan.shards_by_table()
    assert {shard.rank for shard in by_table["C12"]} == {0, 1, 2, 3}
    assert len(by_table["C11"]) == 1
    held = held_elements(plan)
    # A rank may hold one stretch's excess of rows for the sake of equal lookups.
    assert max(held) < np.mean(held) + MAX_EXCESS_ELEMENTS + 150_000 * 16 / 4
    assert planned.reasons["C1"] == ("replicated: 256 B; gradients 384 B a step, an exchange 396 B")
    assert planned.reasons["C12"].startswith("row_wise: 91.6 MiB, 3.35 even shares of a rank; kv ")
    assert planned.reasons["C11"].startswith("table_wise: 9.2 MiB, 0.34 even shares of a rank; ")
    assert max(map(len, planned.reasons.values())) <= 90


def test_auto_replicates_nothing_that_costs_more_than_an_exchange() -> None:
    tables, stats = criteo_like()
    workload = workload_of(*tables, world_size=4, stats=stats)
    planned = auto(workload)
    for table in tables:
        traffic = TableTraffic(table, 1, stats[table.name], samples_per_rank=512)
        summed, exchanged = traffic.replicated_bytes(4), traffic.kv_bytes() * 3 / 4
        assert planned.plan.is_replicated(table.name) == (summed <= exchanged), table.name


def test_auto_keeps_large_tables_off_every_rank_however_cheap_their_gradients() -> None:
    """Bags of thousands of ids touch every row: summing is cheap, W copies aren't."""
    tables = [TableConfig("wide", 40_000, 128), TableConfig("other", 40_000, 128)]
    stats = {
        table.name: TableStats(5_000.0, np.ones(40_000, np.int64), np.arange(40_000))
        for table in tables
    }
    choice = LayoutChoice(exchange="kv")
    plan = plan_workload(workload_of(*tables, world_size=4, stats=stats), choice).plan
    assert not plan.is_replicated("wide")


def test_auto_on_one_rank_says_so() -> None:
    assert auto(workload_of(TableConfig("t", 5, 4), world_size=1)).reasons == {
        "t": "table_wise: there is one rank"
    }
