"""The limits of a check follow what rounding may do: right runs pass in whatever order sums are
made, and a fault of ten times a limit in one element is found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from data.errors import UserError
from data.parquet import PreparedDataset
from dlrm import check_pass
from dlrm.check import CheckFailed, prepare_check, verdict
from dlrm.check_bounds import ErrorBounds, _TableErrors, bytes_of_bounds, likely_rounding
from dlrm.check_compare import (
    DENSE_STATE,
    DENSE_WEIGHTS,
    FP64_TOLERANCES,
    GRADIENTS,
    ROWS,
    STATE,
    Differences,
)
from dlrm.check_pass import PassResult
from dlrm.check_reference import PlainRun
from dlrm.check_rules import Ends, UpdateRule
from dlrm.pipeline import PlannedBatch
from tests.check_cases import check_task, optimizers, run_on_threads
from tests.commands import write_visits
from tests.reordered_products import reordered_trainers

EXACT = {"train": {"precision": "fp64", "backend": "torch"}}
RULES = ("sgd", "adagrad", "rowwise_adagrad", "adam")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def visits(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    return write_visits(tmp_path_factory.mktemp("visits"), 70)


def checked(
    visits: PreparedDataset, seed: int, world_size: int, layout: str, rule: str, **more: Any
) -> PassResult:
    """The fp64 pass, sums of the sharded side in another order."""
    task = check_task(
        visits, world_size, layout, "mixed", optimizers(rule), EXACT, {"seed": seed, **more}
    )
    with pytest.MonkeyPatch.context() as patch, reordered_trainers(seed, patch) as modes:
        (result,) = run_on_threads(task)
    assert all(mode.num_changed > 10 for mode in modes)
    return result


def verdict_of(result: PassResult) -> None:
    assert not result.differences.beyond(), result.differences.beyond()


@pytest.mark.parametrize(
    ("seed", "world_size", "layout", "rule"),
    [(0, 1, "table_wise", "adagrad"), (1, 2, "mixed", "rowwise_adagrad"), (2, 2, "mixed", "adam")],
)
def test_f10_another_order_of_sums_passes(
    seed: int, world_size: int, layout: str, rule: str, visits: PreparedDataset
) -> None:
    verdict_of(checked(visits, seed, world_size, layout, rule))


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(10))
def test_f10_another_order_of_sums_passes_for_every_seed(
    seed: int, rule: str, visits: PreparedDataset
) -> None:
    world_size = (1, 2, 4)[seed % 3]
    layout = ("table_wise", "row_wise", "column_wise", "table_row_wise", "replicated")[seed % 5]
    if world_size == 1:
        layout = "table_wise"
    verdict_of(checked(visits, seed, world_size, layout, rule))


def test_f10_the_memory_of_limits_is_counted(
    visits: PreparedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where only tables and reference fit the check is refused, with the size of the limits."""
    task = check_task(visits, 1, "table_wise", "kv", optimizers("adam"))
    run = PlainRun(task.config, visits.manifest, total_steps=10)
    widths = {table.name: 3 * table.dim for table in run.table_configs}
    tables = {t.name: _TableErrors({"weight": widths[t.name]}, t.rows) for t in run.table_configs}
    counted = 0
    for table in run.table_configs:
        errors, rows, num_lookups = tables[table.name], table.rows, table.rows // 3
        for stop in range(1, num_lookups + 1):
            errors.slots(torch.arange(stop))
        kept = errors._errors
        held = sum(v.nbytes for of in (kept.bounds, kept.shifts) for v in of.values())
        held += errors._slots_R.nbytes
        assert held <= bytes_of_bounds(rows, widths[table.name], num_lookups) <= 3 * held
        counted += bytes_of_bounds(rows, widths[table.name], 10**9)
    values = sum(8 * t.rows * widths[t.name] for t in run.table_configs)
    monkeypatch.setattr("dlrm.check.available_bytes", lambda: 2 * values + counted)
    prepare_check(task.config, visits, task.plan)
    monkeypatch.setattr("dlrm.check.available_bytes", lambda: 2 * values + counted - 1)
    with pytest.raises(
        UserError, match=r"GiB of limits of the rows that are looked up, but .* free"
    ):
        prepare_check(task.config, visits, task.plan)


def test_f10_near_zero_state_amplifies_and_a_large_gradient_does_not() -> None:
    """Of a gradient of the size of eps Adagrad's first step amplifies a difference by lr / (4 eps);
    of a large one, hardly at all."""
    rule = UpdateRule("adagrad", 1e-8, 0.0, 0.0, 0.0)
    grads = torch.tensor([1e-8, 1.0], dtype=torch.float64)
    zeros = torch.zeros_like(grads)
    margin = torch.full_like(grads, 1e-16)
    ends = rule.ends(0.1, 1, Ends.around(grads, margin), {"sum": Ends(zeros, zeros)})
    own = rule.after(0.1, 1, grads, {"sum": zeros})
    reach = ends["weight"].margin(own["weight"])
    assert reach[0] == pytest.approx(0.1 * 1e-16 / (4 * 1e-8), rel=1e-3)
    assert reach[1] < 1e-16


def test_f10_a_bound_counts_only_where_it_is_above_the_tolerance() -> None:
    expected = torch.ones(3, dtype=torch.float64)
    bound = torch.tensor([0.0, 1e-8, float("nan")], dtype=torch.float64)
    for shift, first in (
        ([0.9e-10, 0.9e-8, 0.9e-10], ""),
        ([1.1e-10, 0, 0], "rows of C1, "),
        ([0, 1.1e-8, 0], "rows of C1, "),
        ([0, 0, 1.1e-10], "rows of C1, "),
    ):
        differences = Differences(FP64_TOLERANCES)
        found = expected + torch.tensor(shift, dtype=torch.float64)
        differences.compare(ROWS, "C1", found, expected, 1.0, bound=bound)
        assert differences.first_beyond == first
        assert differences.num_widened() == 1
        figures = differences.to_json()["limits"]
        assert figures["widened_values"] == 1
        assert figures["widest"] == pytest.approx(1e-8)


@pytest.mark.parametrize("name", RULES)
def test_f10_no_update_leaves_its_ends(name: str) -> None:
    """Of gradients and states within their ends, no step and no new state is beyond the ends."""

    @settings(max_examples=80, deadline=None, derandomize=True)
    @given(seed=st.integers(0, 10**6))
    def holds(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            sizes = 10.0 ** torch.randint(-12, 1, shape, generator=generator)
            return torch.randn(shape, generator=generator, dtype=torch.float64) * sizes

        rule = UpdateRule(name, 1e-8, 0.9, 0.999, 0.0)
        width = 1 if name == "rowwise_adagrad" else 3
        widths = {state: width if state == "sum" else 3 for state in rule.states}
        grads, margin = draw(5, 3), draw(5, 3).abs()
        state = {n: draw(5, w) if n == "exp_avg" else draw(5, w).abs() for n, w in widths.items()}
        margins = {n: draw(5, w).abs() for n, w in widths.items()}
        box = {n: Ends.around(values, margins[n]) for n, values in state.items()}
        ends = rule.ends(0.1, 3, Ends.around(grads, margin), box)

        def within(values: Tensor, margin: Tensor) -> Tensor:
            shift = torch.rand(values.shape, generator=generator, dtype=torch.float64) * 2 - 1
            return values + shift * margin

        other = {n: within(values, margins[n]) for n, values in state.items()}
        other = {n: v if n == "exp_avg" else v.clamp(min=0) for n, v in other.items()}
        for n, values in rule.after(0.1, 3, within(grads, margin), other).items():
            rounding = 1e-12 * (values.abs() + ends[n].low.abs())
            assert bool((values >= ends[n].low - rounding).all()), n
            assert bool((values <= ends[n].high + rounding).all()), n

    holds()


# -------------------------------------------------------------------------- faults of ten times


class Planted:
    """In one comparison of a quantity, one element is ten times its limit away."""

    def __init__(self, quantity: str, after: int) -> None:
        self.quantity, self.after, self.calls = quantity, after, 0

    def __call__(self, original: Any) -> Any:
        def compare(
            differences: Differences, quantity: str, name: str, *values: Any, **more: Any
        ) -> None:
            found, expected, scale = values
            bound = more.get("bound")
            if quantity == self.quantity and found.numel():
                self.calls += 1
                if self.calls == self.after:
                    limit = torch.as_tensor(scale * 1e-10).expand_as(found).double()
                    if bound is not None:
                        limit = torch.maximum(limit, torch.as_tensor(bound).expand_as(found))
                    # The element that is allowed most, as a share of its scale.
                    most = int((limit / torch.as_tensor(scale)).expand_as(found).argmax())
                    found = found.clone()
                    found.view(-1)[most] += 10 * limit.reshape(-1)[most]
            original(differences, quantity, name, found, expected, scale, **more)

        return compare


@pytest.fixture
def compare() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("quantity", [ROWS, STATE, GRADIENTS, DENSE_WEIGHTS, DENSE_STATE])
def test_f10_ten_times_the_limit_in_one_element_is_found(
    quantity: str, rule: str, visits: PreparedDataset, compare: pytest.MonkeyPatch
) -> None:
    if rule == "sgd" and quantity in (STATE, DENSE_STATE):
        return  # It keeps none.
    planted = Planted(quantity, after=3)
    compare.setattr(Differences, "compare", planted(Differences.compare))
    task = check_task(visits, 1, "table_wise", "kv", optimizers(rule), EXACT)
    (result,) = run_on_threads(task)
    assert planted.calls >= 3
    with pytest.raises(CheckFailed, match=f"{quantity.replace('_', ' ')} of"):
        verdict(task.config, [result])
    ((times, _),) = result.differences.beyond()
    assert times == pytest.approx(10, rel=0.2)


@pytest.mark.parametrize("rule", RULES)
def test_f10_limits_stay_near_what_rounding_does(rule: str, visits: PreparedDataset) -> None:
    """After 18 steps in which nothing is amplified much, next to no limit is above 1e-10."""
    result = checked(visits, 3, 2, "mixed", rule)
    differences = result.differences
    assert differences.num_widened() < 0.01 * sum(
        differences.num_values(q) for q in differences.tolerances
    )
    assert differences.widest() < 1e-6


@pytest.mark.parametrize("times", [0.3, 10.0])
def test_f10_a_row_that_really_moves_is_found_from_its_limit_on(
    times: float, visits: PreparedDataset, compare: pytest.MonkeyPatch
) -> None:
    """After the last step an element of the sharded run's row moves by a part of its limit, or by
    ten times of it."""
    kept: list[ErrorBounds] = []
    start = ErrorBounds.__init__

    def keep(bounds: ErrorBounds, *arguments: Any) -> None:
        start(bounds, *arguments)
        kept.append(bounds)

    compare.setattr(ErrorBounds, "__init__", keep)
    task = check_task(visits, 1, "table_wise", "kv", optimizers("adagrad"), EXACT)
    (result,) = run_on_threads(task)
    verdict(task.config, [result])
    num_steps = result.differences.num_steps
    rows_R = torch.arange(13)
    bounds_RD = kept[0].of_rows("shared", rows_R)["weight"]
    row, column = divmod(int(bounds_RD.argmax()), bounds_RD.shape[1])

    class Moved(check_pass.Trainer):
        def step(self, planned: PlannedBatch) -> float:
            loss = super().step(planned)
            self.num_taken = getattr(self, "num_taken", 0) + 1
            if self.num_taken == num_steps:
                place = self.embeddings.store.places("shared")[0]
                weights_RD = self.embeddings.store.weights(place.group)[place.key :][:13]
                rms = float(weights_RD.square().mean().sqrt())
                size = max(float(weights_RD[row, column].abs()), rms)
                limit = max(1e-10 * size, float(bounds_RD[row, column]))
                weights_RD[row, column] += times * limit
            return loss

    compare.setattr(check_pass, "Trainer", Moved)
    (result,) = run_on_threads(task)
    assert [text.split(" differ")[0] for _, text in result.differences.beyond()] == (
        ["rows of shared"] if times > 1 else []
    )


def test_f10_rounding_of_a_sum_grows_as_its_root() -> None:
    assert likely_rounding(100) == pytest.approx(40 * 2.0**-53)
    assert likely_rounding(0) == likely_rounding(1)
