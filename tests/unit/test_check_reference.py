"""The plain side of a check: magnitudes of gradients, its tables, how far updates may differ."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.parquet import PreparedDataset
from dlrm.check_batches import own_batches
from dlrm.check_bounds import ErrorBounds
from dlrm.check_compare import comparable_state
from dlrm.check_reference import PlainRun, touched_rows
from dlrm.check_rules import Ends
from dlrm.config import CheckRun
from embeddings.row_optim import state_widths, update_rows
from tests.check_cases import LR, check_task, optimizers
from tests.commands import write_visits


@pytest.fixture(scope="module")
def visits(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    return write_visits(tmp_path_factory.mktemp("visits"), 70)


def plain_run(dataset: PreparedDataset, *overrides: dict[str, Any]) -> tuple[PlainRun, CheckRun]:
    exact = {"train": {"precision": "fp64"}}
    config = check_task(dataset, 1, "table_wise", "kv", exact, *overrides).config
    return PlainRun(config, dataset.manifest, total_steps=10), config


@pytest.mark.parametrize("name", LR)
def test_no_update_leaves_its_spread(name: str, visits: PreparedDataset) -> None:
    """Gradients that differ by the margin at most make rows and state differ by the spread at
    most; without a margin there is no spread."""
    run, _ = plain_run(visits, optimizers(name))

    @settings(max_examples=60, deadline=None)
    @given(seed=st.integers(0, 10**6), step=st.integers(0, 9))
    def holds(seed: int, step: int) -> None:
        assert_spread_holds(run, seed, step)

    holds()


def assert_spread_holds(run: PlainRun, seed: int, step: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        sizes = 10.0 ** torch.randint(-10, 1, shape, generator=generator)
        return torch.randn(shape, generator=generator, dtype=torch.float64) * sizes

    grads_KD, margin = draw(5, 3), draw(5, 3).abs()
    before = {"weight": draw(5, 3)}
    for state, width in state_widths(run.rule, 3).items():
        value = draw(5, width)
        before[state] = value if state == "exp_avg" else value.abs()
    _, lr = run.learning_rates(step)

    def updated(gradient: torch.Tensor) -> dict[str, torch.Tensor]:
        values = {key: value.clone() for key, value in before.items()}
        rows = values.pop("weight")
        update_rows(run.rule, rows, values, gradient, lr=lr, num_steps=step + 1)
        return {"weight": rows, **values}

    run.num_updates = step
    spread = run.update_spread(step, before, grads_KD, margin)
    shift = (torch.rand(5, 3, generator=generator, dtype=torch.float64) * 2 - 1) * margin
    ours, theirs = updated(grads_KD), updated(grads_KD + shift)
    assert spread.keys() == ours.keys()
    for key, limit in spread.items():
        rounding = 1e-12 * (ours[key].abs() + 1)
        assert bool(((ours[key] - theirs[key]).abs() <= limit + rounding).all()), key
    for key, limit in run.update_spread(step, before, grads_KD, 0 * margin).items():
        assert bool((limit.abs() <= 1e-12 * (ours[key].abs() + 1)).all()), key


def test_f10_a_batch_without_weight_is_not_counted(visits: PreparedDataset) -> None:
    """Limits use the number of updates that the optimizer itself has; such a batch moves none."""
    run, config = plain_run(visits, optimizers("adam"))
    bounds = ErrorBounds(run, 0)
    batch = next(own_batches(visits, config))
    rows_K = touched_rows(run.features, batch.ids)["shared"]
    rule, _ = run.update_rules()
    for step, (weight, num_updates) in enumerate([(1.0, 1), (0.0, 1), (0.5, 2)]):
        weighted = replace(batch, weight_B=torch.full((batch.batch_size,), weight))
        plain = run.gradients(weighted)
        errors = bounds.measure(plain)
        own = plain.row_gradients["shared"].grads_KD
        before, limits = run.tables.take("shared", rows_K), bounds.of_rows("shared", rows_K)
        spread = run.update_spread(step, before, own, 1e-3 * own.abs())
        bounds.advance(step, plain, errors)
        run.apply(step)
        assert run.num_updates == num_updates
        moved_KD = before["weight"] - run.tables.take("shared", rows_K)["weight"]
        if not weight:
            assert spread == {}
            assert not moved_KD.any()
            for name, of_rows in bounds.of_rows("shared", rows_K).items():
                assert torch.equal(of_rows, limits[name])
            continue
        state = {name: comparable_state(name, before[name]) for name in rule.states}
        lr = run.learning_rates(step)[1]
        step_KD = rule.after(lr, num_updates, own, state)["weight"]
        torch.testing.assert_close(moved_KD, step_KD, rtol=1e-9, atol=1e-15)
        grads = Ends.around(own, 1e-3 * own.abs())
        low, high = rule.ends(lr, num_updates, grads, {n: Ends(v, v) for n, v in state.items()})[
            "weight"
        ]
        torch.testing.assert_close(spread["weight"], high - low)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_magnitudes_are_those_of_the_terms(
    accumulate: int, clip_norm: float | None, visits: PreparedDataset
) -> None:
    """No gradient is larger than the sum of its terms' magnitudes, nor is that sum far larger."""
    overrides = {"train": {"accumulate": accumulate}}
    run, config = plain_run(visits, optimizers("sgd", clip_norm=clip_norm), overrides)
    batch = next(own_batches(visits, config))
    step = run.gradients(batch)
    rows = touched_rows(run.features, batch.ids)
    assert step.row_gradients.keys() == rows.keys() == {"shared", "many", "words"}
    for table, gradients in step.row_gradients.items():
        assert torch.equal(gradients.rows_K, rows[table])
        sizes = gradients.grads_KD.abs().amax(1, keepdim=True)
        assert bool((sizes <= gradients.magnitudes * (1 + 1e-12)).all())
        assert float((sizes / gradients.magnitudes).max()) > 0.05


def test_micro_batches_have_the_gradients_of_the_whole(visits: PreparedDataset) -> None:
    steps = []
    for accumulate in (1, 5):
        run, config = plain_run(visits, {"train": {"accumulate": accumulate}})
        steps.append(run.gradients(next(own_batches(visits, config))))
    assert steps[0].loss == pytest.approx(steps[1].loss, rel=1e-12)
    for table, whole in steps[0].row_gradients.items():
        torch.testing.assert_close(
            steps[1].row_gradients[table].grads_KD, whole.grads_KD, rtol=1e-10, atol=1e-15
        )


def test_a_zero_example_weight_takes_a_sample_out(visits: PreparedDataset) -> None:
    run, config = plain_run(visits)
    batch = next(own_batches(visits, config))
    assert batch.weight_B is not None
    weight_B = batch.weight_B.clone()
    weight_B[12:] = 0
    whole = run.gradients(replace(batch, weight_B=weight_B))
    other, _ = plain_run(visits)
    assert whole.loss == pytest.approx(other.gradients(batch.narrow(0, 12)).loss, rel=1e-12)


@pytest.mark.parametrize("name", LR)
def test_rows_that_are_put_are_those_that_the_next_step_takes(
    name: str, visits: PreparedDataset
) -> None:
    """Two runs that begin differently come to the same once rows, state and dense are equal."""
    runs = [plain_run(visits, optimizers(name), {"seed": seed})[0] for seed in (1, 2)]
    config = plain_run(visits)[1]
    first, second = islice(own_batches(visits, config), 2)
    for run in runs:
        run.gradients(first)
        run.apply(0)
    source, target = runs
    for table in source.table_configs:
        rows_K = torch.arange(table.rows)
        target.tables.put(table.name, rows_K, source.tables.take(table.name, rows_K))
    target.model.load_state_dict(source.model.state_dict())
    for found, wanted in zip(target.dense_state(), source.dense_state(), strict=True):
        for key, value in found.items():
            value.copy_(wanted[key])
    for run in runs:
        run.gradients(second)
        run.apply(1)
    for table in source.table_configs:
        for key, value in source.tables.take(table.name, torch.arange(table.rows)).items():
            found_value = target.tables.take(table.name, torch.arange(table.rows))[key]
            torch.testing.assert_close(found_value, value, rtol=1e-13, atol=0)


def test_a_gradient_that_is_set_is_the_one_that_is_applied(visits: PreparedDataset) -> None:
    run, config = plain_run(visits, optimizers("sgd"))
    run.gradients(next(own_batches(visits, config)))
    before = run.tables.weight("many").clone()
    dense = [torch.zeros_like(p) for p in run.model.parameters()]
    rows_K, grads_KD = torch.tensor([3, 7]), torch.ones(2, 6, dtype=torch.float64)
    empty = (torch.empty(0, dtype=torch.int64), torch.empty(0, 6, dtype=torch.float64))
    gradients = {"many": (rows_K, grads_KD), "shared": (empty[0], empty[1][:, :4])}
    gradients["words"] = (empty[0], torch.empty(0, 7, dtype=torch.float64))
    weights = [p.detach().clone() for p in run.model.parameters()]
    run.set_gradients(gradients, dense)
    run.apply(0)
    moved = run.tables.weight("many") - before
    assert torch.nonzero(moved.any(1))[:, 0].tolist() == [3, 7]
    torch.testing.assert_close(moved[rows_K], -LR["sgd"] * grads_KD, rtol=1e-12, atol=1e-12)
    assert all(torch.equal(p, w) for p, w in zip(run.model.parameters(), weights, strict=True))
