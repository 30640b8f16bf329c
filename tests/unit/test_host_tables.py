"""Tables in host memory equal tables in device memory: rows and state, whatever is staged when."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batch import JaggedIds
from embeddings import RowOptimizerConfig, SingleProcess
from embeddings.host.executor import LinkRates, SimulatedRates, ThreadExecutor
from embeddings.host.host_tables import HostSettings, Mode
from tests.host_cases import (
    HOT_SHARES_AND_DEPTHS,
    first_rows,
    host_plan,
    train_host,
    train_much_touched,
)
from tests.sharding_cases import (
    LAYOUTS,
    TABLES,
    History,
    Model,
    assert_equal_runs,
    draw_batches,
    train,
    train_reference,
)
from tests.stepped_executor import SteppedExecutor
from tests.thread_ranks import run_ranks

OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam")
HOT_SHARE = 0.2
ON_DEVICE = ("size", "flag")


def model_of(optimizer: Any) -> Model:
    return Model(RowOptimizerConfig(name=optimizer, weight_decay=0.01))


def assert_same_bits(found: History, expected: History) -> None:
    for step, (mine, theirs) in enumerate(zip(found.pooled, expected.pooled, strict=True)):
        assert torch.equal(mine[2], theirs[2]), f"step {step}: pooled vectors differ"
    for table, values in expected.tables.items():
        for name, array in values.items():
            assert torch.equal(found.tables[table][name], array), f"{table}.{name} differs"


def settings_of(lookahead: int) -> HostSettings:
    mode: Mode = "lookahead" if lookahead else "gather"
    return HostSettings(mode=mode, lookahead=max(1, lookahead), batch_rows=4)


# Each window with each rule, and either of them with each kind.
@pytest.mark.parametrize(
    ("optimizer", "kind", "lookahead"),
    [
        (optimizer, ("one_hot", "weighted")[(i + j) % 2], lookahead)
        for i, lookahead in enumerate((0, 1, 2, 4, 8))
        for j, optimizer in enumerate(OPTIMIZERS)
    ],
)
def test_one_process_equals_device_tables_to_the_bit(
    optimizer: str, kind: str, lookahead: int
) -> None:
    # Fails where a staged record isn't the row's newest value, weights or state, or where a sum
    # is made in another order.
    model = model_of(optimizer)
    batches, expected = device_run(optimizer, kind)
    found, embeddings = train_host(
        SingleProcess(),
        model,
        host_plan("table_wise", 1, TABLES, ON_DEVICE),
        batches,
        settings_of(lookahead),
        first_rows(TABLES, HOT_SHARE),
        executor=SteppedExecutor(lookahead, has_link=bool(lookahead % 2)),
    )
    assert_same_bits(found, expected)
    assert embeddings.host is not None
    counters = embeddings.host.counters
    assert counters.num_hot_lookups > 0
    assert counters.num_fetched > 0
    assert counters.num_written > 0
    assert (counters.num_forwarded > 0) == (lookahead > 0), "the case has nothing to forward"
    assert counters.num_cold == counters.num_fetched + counters.num_forwarded
    assert counters.num_cold == counters.num_written + counters.num_kept
    assert embeddings.host.num_staged == 0


@cache
def device_run(optimizer: str, kind: str) -> tuple[list[JaggedIds], History]:
    """Batches, and what they come to with all tables in device memory."""
    model = model_of(optimizer)
    batches = draw_batches(model, kind, 30)
    plan = host_plan("table_wise", 1, TABLES, [t.name for t in TABLES])
    return batches, train(SingleProcess(), model, plan, batches)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**31), st.integers(0, 8), st.booleans(), st.sampled_from([0.0, 0.1, 0.5, 1.0])
)
def test_any_interleaving_any_window_any_hot_rows_give_the_same_bits(
    seed: int, lookahead: int, has_link: bool, hot_share: float
) -> None:
    # Any order of the queues' work that their dependencies allow.
    model = model_of("rowwise_adagrad")
    batches = draw_batches(model, "multi_hot", 12, seed % 7)
    expected = _expected(seed % 7)
    found, _ = train_host(
        SingleProcess(),
        model,
        host_plan("table_wise", 1, TABLES),
        batches,
        settings_of(lookahead),
        first_rows(TABLES, hot_share),
        executor=SteppedExecutor(seed, has_link=has_link),
    )
    assert_same_bits(found, expected)


_EXPECTED: dict[int, History] = {}


def _expected(seed: int) -> History:
    if seed not in _EXPECTED:
        model = model_of("rowwise_adagrad")
        batches = draw_batches(model, "multi_hot", 12, seed)
        _EXPECTED[seed] = train(SingleProcess(), model, host_plan("table_wise", 1, TABLES,
                                [t.name for t in TABLES]), batches)  # fmt: skip
    return _EXPECTED[seed]


CUT = [name for name in LAYOUTS if name != "replicated"]


# Each layout with each rule, and either of them with each number of ranks.
@pytest.mark.parametrize(
    ("optimizer", "layout", "world_size"),
    [
        (optimizer, layout, (2, 4)[(i + j) % 2])
        for i, layout in enumerate(CUT)
        for j, optimizer in enumerate(("sgd", "rowwise_adagrad", "adam"))
    ],
)
def test_ranks_equal_the_reference(optimizer: str, layout: str, world_size: int) -> None:
    # Hot rows are replicas, cold rows their owners'; both sum over ranks before a rule is applied.
    model = model_of(optimizer)
    batches = draw_batches(model, "weighted", 20)
    plan = host_plan(layout, world_size, TABLES, ON_DEVICE)

    def work(comm: Any) -> tuple[History, Any]:
        return train_host(
            comm, model, plan, batches, settings_of(3), first_rows(TABLES, HOT_SHARE),
            executor=SteppedExecutor(comm.rank, has_link=True),
        )  # fmt: skip

    ranks = run_ranks(world_size, work)
    assert_equal_runs([history for history, _ in ranks], train_reference(model, batches))
    counters = [embeddings.host.counters for _, embeddings in ranks]
    assert sum(c.num_forwarded for c in counters) > 0
    assert sum(c.num_written for c in counters) > 0


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("hot_share", [0.0, 0.2, 1.0])
def test_ranks_equal_device_tables_to_the_bit(world_size: int, hot_share: float) -> None:
    # Which rows are hot changes whom they are asked of, but not the order of a sum.
    model = model_of("adagrad")
    batches = draw_batches(model, "weighted", 20)
    in_host = host_plan("row_wise", world_size, TABLES)
    on_device = host_plan("row_wise", world_size, TABLES, [t.name for t in TABLES])
    found = run_ranks(
        world_size,
        lambda comm: train_host(
            comm, model, in_host, batches, settings_of(2), first_rows(TABLES, hot_share),
            executor=SteppedExecutor(comm.rank, has_link=False),
        )[0],
    )  # fmt: skip
    expected = run_ranks(world_size, lambda comm: train(comm, model, on_device, batches))
    for mine, theirs in zip(found, expected, strict=True):
        assert_same_bits(mine, theirs)


def test_f09_hot_rows_and_lookahead_change_no_bit_of_much_touched_rows() -> None:
    # Their gradients are summed as matrices: in the order of the ranks, as an owner sums them.
    # `tests/dist/test_host.py` has the same over each transport.
    kinds = set()
    runs = []
    for case in HOT_SHARES_AND_DEPTHS:
        ranks = run_ranks(3, lambda comm, case=case: (train_much_touched(comm, *case), comm))
        runs.append(ranks[0][0])
        kinds.add(ranks[0][1].counters.num_collectives["replicas"] > 0)
    assert kinds == {True, False}, "no gradients were summed as matrices"
    for run in runs[1:]:
        for table, values in runs[0].tables.items():
            for name, array in values.items():
                assert torch.equal(run.tables[table][name], array), f"{table}.{name}"


def test_threads_and_a_simulated_link_change_nothing() -> None:
    model = model_of("adam")
    batches = draw_batches(model, "multi_hot", 20)
    plan = host_plan("table_wise", 1, TABLES)
    simulated = SimulatedRates(LinkRates(1e9, 1e-5), 1e9, 1e9)
    runs = [
        train_host(SingleProcess(), model, plan, batches, settings_of(lookahead),
                   first_rows(TABLES, HOT_SHARE), executor=executor)[0]
        for lookahead, executor in (
            (0, ThreadExecutor()), (2, ThreadExecutor()), (3, ThreadExecutor(simulated)),
        )
    ]  # fmt: skip
    for run in runs[1:]:
        assert_same_bits(run, runs[0])


def _settle(step: int, embeddings: Any) -> None:
    if step % 3 == 1:
        for table in embeddings.tables:
            embeddings.read(table.name, 0, table.rows)


def _evaluate(step: int, embeddings: Any) -> None:
    if step % 4 == 2:
        batch = draw_batches(model_of("adam"), "multi_hot", 1, seed=step)[0]
        with torch.no_grad():
            embeddings.lookup(embeddings.plan_batch(batch, training=False), training=False)


def _swap(step: int, embeddings: Any) -> None:
    if step == 7:
        embeddings.host.drop_staged()


@pytest.mark.parametrize("between", [_settle, _evaluate])
def test_reading_rows_between_steps_changes_nothing(between: Callable[[int, Any], None]) -> None:
    # A checkpoint or an evaluation with a window of staged steps in flight.
    model = model_of("adam")
    batches = draw_batches(model, "multi_hot", 21)
    plan = host_plan("table_wise", 1, TABLES)
    runs = [
        train_host(SingleProcess(), model, plan, batches, settings_of(3),
                   first_rows(TABLES, HOT_SHARE), executor=SteppedExecutor(3, has_link=True),
                   between=each)[0]
        for each in (lambda step, embeddings: None, between)
    ]  # fmt: skip
    assert_same_bits(runs[1], runs[0])


def test_rows_read_in_flight_are_the_newest() -> None:
    model = model_of("adam")
    batches = draw_batches(model, "multi_hot", 21)
    read: list[dict[str, Any]] = []

    def keep(step: int, embeddings: Any) -> None:
        if step == 10:
            read.append({t.name: embeddings.read(t.name, 0, t.rows) for t in TABLES})

    train_host(
        SingleProcess(), model, host_plan("table_wise", 1, TABLES), batches, settings_of(4),
        first_rows(TABLES, HOT_SHARE), executor=SteppedExecutor(1, has_link=False), between=keep,
    )  # fmt: skip
    expected = train_reference(model, batches[:10])
    for table, values in expected.tables.items():
        for name, array in values.items():
            torch.testing.assert_close(read[0][table][name], array, rtol=1e-10, atol=1e-12)


def test_samples_whose_every_id_is_hot() -> None:
    # Empty bags are hot; one cold id of one feature makes a sample cold.
    model = model_of("sgd")
    hot = first_rows(TABLES, 0.4)
    _, embeddings = train_host(
        SingleProcess(), model, host_plan("table_wise", 1, TABLES, ON_DEVICE),
        draw_batches(model, "multi_hot", 1), settings_of(0), hot,
    )  # fmt: skip
    assert embeddings.host is not None
    for batch in draw_batches(model, "multi_hot", 12, seed=4):
        found = embeddings.host.all_hot(batch)
        offsets, values = batch.offsets.tolist(), batch.values_L.tolist()
        for sample in range(batch.batch_size):
            is_hot = True
            for number, feature in enumerate(model.features):
                bag = number * batch.batch_size + sample
                for row in values[offsets[bag] : offsets[bag + 1]]:
                    in_device = feature.table in ON_DEVICE
                    is_hot &= in_device or row in hot[feature.table]
            assert found[sample] == is_hot, (sample, np.asarray(found))
