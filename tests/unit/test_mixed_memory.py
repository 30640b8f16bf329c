"""Any tiling with any memory per shard, under every rule, trains what the oracle trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batch import JaggedIds
from embeddings import (
    FeatureConfig,
    Plan,
    ReferenceEmbeddings,
    RowOptimizerConfig,
    Shard,
    ShardedEmbeddings,
    SingleProcess,
    TableConfig,
)
from embeddings.host.host_tables import HostSettings, Mode
from tests.host_cases import train_host
from tests.sharding_cases import (
    Model,
    assert_equal_runs,
    draw_batches,
    tilings,
    train,
    train_reference,
)
from tests.thread_ranks import run_ranks

RULES = ("sgd", "adagrad", "rowwise_adagrad", "adam")
MODES: tuple[Mode, ...] = ("gather", "lookahead", "hotline")
# Two tables of several columns, one of a single column; one table has two features.
TABLES = (
    TableConfig("user", 9, 6),
    TableConfig("item", 7, 4),
    TableConfig("flag", 3, 1),
)
FEATURES = (
    FeatureConfig("viewer", "user"),
    FeatureConfig("friends", "user", "mean"),
    FeatureConfig("item", "item"),
    FeatureConfig("flag", "flag", "mean"),
)


def model_of(rule: Any) -> Model:
    return Model(RowOptimizerConfig(name=rule, weight_decay=0.01), TABLES, FEATURES)


def check_plan(
    plan: Plan, rule: str, mode: Mode, hot: Mapping[str, np.ndarray], kind: str = "weighted"
) -> None:
    """Trains 9 steps on thread ranks and compares pooled vectors, rows and state."""
    plan.validate(TABLES)
    model = model_of(rule)
    batches = draw_batches(model, kind, 9)
    settings_ = HostSettings(mode=mode, lookahead=2, batch_rows=4)
    is_in_host = any(shard.memory == "host" for shard in plan.shards)

    def work(comm: Any) -> Any:
        if not is_in_host:
            return train(comm, model, plan, batches)
        return train_host(comm, model, plan, batches, settings_, hot)[0]

    ranks = run_ranks(plan.world_size, work)
    assert_equal_runs(ranks, train_reference(model, batches))


@pytest.mark.parametrize("hot", [[], [1], [0, 1, 2, 3]])
def test_f01_a_row_halved_between_memories(hot: list[int]) -> None:
    # The case of the report: state [7.5, 43.5, 111.5], whichever row is hot.
    table, feature = TableConfig("t", 4, 4), FeatureConfig("f", "t")
    rule = RowOptimizerConfig(name="rowwise_adagrad")
    halves = (Shard("t", 0, 4, 0, 2, 0, "host"), Shard("t", 0, 4, 2, 4, 0))
    plan = Plan(1, halves, {"t": "kv"})
    embeddings = ShardedEmbeddings(
        [table], [feature], rule, dtype=torch.float64, seed=0, plan=plan, host=HostSettings()
    )
    reference = ReferenceEmbeddings([table], [feature], rule, dtype=torch.float64, seed=0)
    assert embeddings.host is not None
    embeddings.host.choose_rows({"t": np.array(hot, dtype=np.int64)})
    ids = JaggedIds(torch.arange(3), torch.arange(4), 1)
    gradient = torch.arange(1.0, 13.0, dtype=torch.float64).view(3, 4)
    batch = embeddings.plan_batch(ids)
    embeddings.lookup(batch)
    embeddings.apply(embeddings.backward(batch, gradient, 0.1), 0.1)
    reference.lookup(ids).backward(gradient)
    reference.apply(0.1)
    found, expected = embeddings.read("t", 0, 4), reference.read("t")
    embeddings.close()
    assert found is not None
    assert found["sum"][:3, 0].tolist() == pytest.approx([7.5, 43.5, 111.5])
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=1e-12, atol=0)


def halved(world_size: int) -> Plan:
    """Every table in bands of two rows, each cut in two columns; memory and rank in turn."""
    shards = [
        Shard(
            table.name, row, min(row + 2, table.rows), left, right,
            (row // 2 + part) % world_size, ("host", "device")[(part + row // 4) % 2],
        )
        for table in TABLES
        for row in range(0, table.rows, 2)
        for part, (left, right) in enumerate(
            [(0, table.dim // 2), (table.dim // 2, table.dim)] if table.dim > 1 else [(0, 1)]
        )
    ]  # fmt: skip
    return Plan(world_size, tuple(shards), {table.name: "kv" for table in TABLES})


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mode", MODES)
def test_f01_hot_rows_cut_between_memories(rule: str, mode: Mode, world_size: int) -> None:
    # Some rows hot, some cold, first columns now here, now there.
    hot = {table.name: np.arange(0, table.rows, 2) for table in TABLES}
    check_plan(halved(world_size), rule, mode, hot)


def test_f01_hot_or_cold_a_cut_row_has_the_same_bits() -> None:
    model = model_of("rowwise_adagrad")
    batches = draw_batches(model, "weighted", 9)
    runs = [
        train_host(
            SingleProcess(), model, halved(1), batches, HostSettings(batch_rows=4),
            {table.name: np.arange(num_hot(table.rows)) for table in TABLES},
        )[0]
        for num_hot in (lambda rows: 0, lambda rows: rows // 2, lambda rows: rows)
    ]  # fmt: skip
    for run in runs[1:]:
        for table, values in runs[0].tables.items():
            for name, array in values.items():
                assert torch.equal(run.tables[table][name], array), f"{table}.{name}"


def test_f01_a_row_that_is_hot_in_some_columns_only_is_refused() -> None:
    # Hotness is a property of a row: chosen by keys, one cut of a row could be hot alone.
    cut = Plan(
        2,
        tuple(
            Shard(t.name, 0, t.rows, c, c + 1, c % 2, "host") for t in TABLES for c in range(t.dim)
        ),
        {t.name: "kv" for t in TABLES},
    )

    def work(comm: Any) -> str:
        embeddings = ShardedEmbeddings(
            TABLES, FEATURES, RowOptimizerConfig(), dtype=torch.float64, seed=0, plan=cut,
            comm=comm, host=HostSettings(),
        )  # fmt: skip
        assert embeddings.host is not None
        with pytest.raises(ValueError, match="row 0") as caught:
            embeddings.host.choose_hot({index: np.array([0]) for index in embeddings.host.spaces})
        embeddings.close()
        return str(caught.value)

    for message in run_ranks(2, work):
        assert "table 'user'" in message
        assert "row 0" in message


@pytest.mark.parametrize("world_size", [1, 2])
def test_f01_recent_lookups_count_by_any_columns_in_host_memory(world_size: int) -> None:
    """Hot rows are chosen anew by them. A row whose first columns lie on the device counted for
    nothing; one with several cuts in host memory must count once."""
    table, feature = TableConfig("t", 6, 4), FeatureConfig("f", "t")
    cuts = {
        0: ("device", "device", "device", "host"),
        2: ("device", "host", "host", "device"),
        4: ("host", "device", "host", "host"),
        5: ("device", "device", "device", "device"),
    }
    stops = dict(zip(cuts, [*list(cuts)[1:], 6], strict=True))
    shards = tuple(
        Shard("t", row, stops[row], column, column + 1, column % world_size, memory)  # type: ignore[arg-type]
        for row, memories in cuts.items()
        for column, memory in enumerate(memories)
    )
    plan = Plan(world_size, shards, {"t": "kv"})
    plan.validate([table])

    def work(comm: Any) -> Any:
        embeddings = ShardedEmbeddings(
            [table], [feature], RowOptimizerConfig(), dtype=torch.float64, seed=0, plan=plan,
            comm=comm, host=HostSettings(recent_steps=2),
        )  # fmt: skip
        assert embeddings.host is not None
        # Bags of one id; those of the first step leave the window.
        for ids in ([1, 1, 1, 3], [0, 1, 2, 2], [0, 4, 4, 5]):
            batch = JaggedIds(torch.tensor(ids), torch.arange(5), 1)
            embeddings.plan_batch(batch)
        rows, counts = embeddings.host.recent_rows()["t"]
        embeddings.close()
        return rows.tolist(), counts.tolist()

    for found in run_ranks(world_size, work):
        assert found == ([0, 1, 2, 4], [2, 1, 2, 2])


@st.composite
def placed_plans(draw: st.DrawFn, world_size: int) -> Plan:
    """Any tiling of each table, or a copy on every rank, each shard in any memory."""
    shards: list[Shard] = []
    exchange: dict[str, Any] = {}
    for table in TABLES:
        of_table = draw(tilings(table, world_size))
        is_copied = Plan(world_size, tuple(of_table), {}).is_replicated(table.name)
        if not is_copied:
            of_table = [
                replace(shard, memory=draw(st.sampled_from(["host", "device"])))
                for shard in of_table
            ]
        in_host = any(shard.memory == "host" for shard in of_table)
        exchange[table.name] = "kv" if in_host else draw(st.sampled_from(["kv", "pooled"]))
        shards += of_table
    return Plan(world_size, tuple(shards), exchange)


@st.composite
def cases(draw: st.DrawFn, world_size: int) -> tuple[Plan, str, Mode, dict[str, np.ndarray], str]:
    plan = draw(placed_plans(world_size))
    hot = {
        table.name: np.array(sorted(draw(st.sets(st.integers(0, table.rows - 1)))), dtype=np.int64)
        for table in TABLES
    }
    rule = draw(st.sampled_from([*RULES, "rowwise_adagrad", "rowwise_adagrad"]))
    kind = draw(st.sampled_from(["one_hot", "multi_hot", "weighted"]))
    return plan, rule, draw(st.sampled_from(MODES)), hot, kind


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_f01_some_plans_train_what_the_oracle_trains(world_size: int) -> None:
    @settings(max_examples=12, deadline=None, derandomize=True, database=None)
    @given(cases(world_size))
    def check(case: tuple[Plan, str, Mode, dict[str, np.ndarray], str]) -> None:
        check_plan(*case)

    check()


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_f01_any_plan_trains_what_the_oracle_trains(world_size: int) -> None:
    # Tiling x memory per shard x exchange x rule x mode x hot set x kind of ids.
    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(cases(world_size))
    def check(case: tuple[Plan, str, Mode, dict[str, np.ndarray], str]) -> None:
        check_plan(*case)

    check()
