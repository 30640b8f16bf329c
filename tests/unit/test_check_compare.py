"""The arithmetic of a check: what a difference is relative to, what is beyond, what is counted."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlrm.check_compare import (
    DENSE_WEIGHTS,
    FP64_TOLERANCES,
    GRADIENTS,
    LOSSES,
    MODEL_QUANTITIES,
    POOLED,
    ROWS,
    STATE,
    TABLE_QUANTITIES,
    Differences,
    comparable_state,
    relative_differences,
    root_mean_square,
    size_or_rms,
    step_tolerances,
)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def compared(found: torch.Tensor, expected: torch.Tensor, scale: float) -> Differences:
    differences = Differences(FP64_TOLERANCES)
    differences.compare(ROWS, "C1", found, expected, scale)
    return differences


@pytest.mark.parametrize(("times", "is_beyond"), [(0.99, False), (1.01, True)])
def test_the_limit_is_where_it_is_said_to_be(times: float, is_beyond: bool) -> None:
    expected = tensor(2.0, -5.0)
    found = expected + tensor(0.0, 2.0 * 1e-10 * times)
    assert bool(compared(found, expected, 2.0).beyond()) == is_beyond


def test_a_difference_of_exactly_the_limit_passes() -> None:
    differences = Differences({ROWS: 0.25})
    differences.compare(ROWS, "C1", tensor(1.25), tensor(1.0), 1.0)
    assert not differences.beyond()
    differences.compare(ROWS, "C1", tensor(1.25 + 1e-15), tensor(1.0), 1.0)
    assert differences.beyond()


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (math.nan, 1.0),
        (1.0, math.nan),
        (math.nan, math.nan),
        (math.inf, math.inf),
        (math.inf, 1.0),
    ],
)
def test_what_is_not_finite_never_passes(found: float, expected: float) -> None:
    """Also where both runs have the same: there is nothing that would be proved."""
    differences = compared(tensor(0.0, found), tensor(0.0, expected), 1.0)
    assert differences.beyond()
    figures = differences.to_json()
    json.dumps(figures, allow_nan=False)
    assert figures["tables"]["C1"][ROWS] is None or math.isinf(found)


def test_equal_values_differ_by_nothing_whatever_the_scale() -> None:
    assert relative_differences(tensor(0.0, 3.0), tensor(0.0, 3.0), 0.0).tolist() == [0.0, 0.0]


def test_a_value_where_the_reference_has_nothing_is_beyond() -> None:
    assert float(relative_differences(tensor(1e-20), tensor(0.0), 0.0)) == 1e6


def test_allowed_is_taken_off_first() -> None:
    found, expected = tensor(1.5, 1.5), tensor(1.0, 1.0)
    ratios = relative_differences(found, expected, 1.0, tensor(0.5, 0.4))
    assert ratios.tolist() == pytest.approx([0.0, 0.1])


@given(
    st.lists(st.tuples(*[st.floats(-1e3, 1e3, width=32)] * 2), min_size=1, max_size=9),
    st.floats(0.125, 100, width=32),
)
def test_the_largest_is_the_largest(pairs: list[tuple[float, float]], scale: float) -> None:
    found, expected = (torch.tensor(values) for values in zip(*pairs, strict=True))
    differences = Differences({ROWS: 1.0})
    for value, other in zip(found, expected, strict=True):
        differences.compare(ROWS, "C1", value[None], other[None], scale)
    worst = max(abs(a - b) / scale for a, b in pairs)
    assert differences.worst(ROWS, "C1") == pytest.approx(worst)
    assert differences.num_values(ROWS) == len(pairs)
    assert bool(differences.beyond()) == (worst > 1.0)


def test_fp32_values_are_compared_in_fp64() -> None:
    """The difference of neighbouring fp32 numbers isn't lost in rounding."""
    found = torch.tensor([1.0 + 2.0**-23])
    assert float(relative_differences(found, torch.tensor([1.0]), 1.0)) == 2.0**-23


def test_the_message_names_quantity_table_place_and_the_first_of_all() -> None:
    differences = Differences(step_tolerances("fp32", "fp32"))
    differences.at = "step 3 (ragged bags)"
    found, expected = torch.zeros(2, 3), torch.zeros(2, 3)
    differences.compare(POOLED, "C2", found + 1, expected, 1.0)
    differences.at = "step 7"
    found[1, 2] = 0.5
    differences.compare(GRADIENTS, "C1", found, expected, 1e-3, rows_K=torch.tensor([4, 1_234]))
    differences.compare(DENSE_WEIGHTS, "head.bias", torch.ones(1), torch.ones(1), 1.0)
    (times, worst), (_, second) = differences.beyond()
    assert times == pytest.approx(500 / 1e-5)
    assert worst == "gradients of C1 differ by 5e+02 (allowed: 1e-05), row 1,234, column 2, step 7"
    assert second.startswith("pooled vectors of C2 differ by 1 (allowed: 1e-06)")
    assert second.endswith("step 3 (ragged bags)")
    assert differences.first_beyond == "pooled vectors of C2, step 3 (ragged bags)"


def test_the_worst_by_its_own_limit_comes_first() -> None:
    """1e-3 of rows (limit 1e-6) is worse than 1e-2 of pooled values that travel as bf16."""
    differences = Differences(step_tolerances("fp32", "bf16"))
    differences.compare(POOLED, "C1", torch.tensor([1.01]), torch.tensor([1.0]), 1.0)
    differences.compare(ROWS, "C1", torch.tensor([1.001]), torch.tensor([1.0]), 1.0)
    assert [text.split()[0] for _, text in differences.beyond()] == ["rows", "pooled"]


def test_figures_of_a_table_and_of_the_model_apart() -> None:
    differences = compared(tensor(1.0, 2.0), tensor(1.0, 2.5), 1.0)
    differences.compare(LOSSES, "", tensor(0.7), tensor(0.7), 0.7)
    differences.num_steps, differences.num_rows = 1, 2
    figures = differences.to_json()
    assert figures["tables"] == {"C1": {ROWS: 0.5}}
    assert figures[LOSSES] == 0.0
    assert figures["compared"]["rows"] == 2
    assert figures["compared"]["values"][ROWS] == 2
    assert figures["compared"]["values"][STATE] == 0
    assert figures["tolerances"] == dict(FP64_TOLERANCES)


def test_nothing_compared_is_nothing_and_not_zero() -> None:
    differences = Differences(FP64_TOLERANCES)
    differences.compare(ROWS, "C1", torch.empty(0, 4), torch.empty(0, 4), 1.0)
    assert differences.worst(ROWS, "C1") is None
    assert differences.worst(LOSSES) is None
    assert not differences.beyond()


def test_shapes_must_agree() -> None:
    """Broadcasting would compare one row with many."""
    with pytest.raises(AssertionError):
        compared(torch.zeros(3, 2), torch.zeros(1, 2), 1.0)


def test_scale_of_a_value_among_its_like() -> None:
    values = tensor(3.0, -4.0, 0.0, 0.0)
    assert root_mean_square(values) == 2.5
    assert size_or_rms(values).tolist() == [3.0, 4.0, 2.5, 2.5]
    assert size_or_rms(values, 10.0).tolist() == [10.0] * 4
    assert root_mean_square(tensor()) == 0.0


def test_sums_of_squares_are_compared_by_their_roots() -> None:
    values = tensor(4.0, 9.0)
    for name in ("sum", "exp_avg_sq"):
        assert comparable_state(name, values).tolist() == [2.0, 3.0]
    assert comparable_state("exp_avg", values).tolist() == [4.0, 9.0]


def test_tolerances_of_the_contract() -> None:
    """docs: rows to 1e-6, row gradients to 1e-5 of their terms, 1e-10 end to end."""
    exact = step_tolerances("fp32", "fp32")
    assert (exact[ROWS], exact[GRADIENTS]) == (1e-6, 1e-5)
    assert set(FP64_TOLERANCES.values()) == {1e-10}
    assert set(exact) == {*TABLE_QUANTITIES, *MODEL_QUANTITIES}
    for wire, rounding in (("bf16", 2.0**-8), ("fp16", 2.0**-11)):
        rounded = step_tolerances("fp32", wire)
        # What travels may be rounded; the update from it may not.
        assert rounded[POOLED] == rounded[GRADIENTS] == 2 * rounding
        assert rounded[ROWS] == 1e-6
    assert step_tolerances("bf16", "fp32")[ROWS] == 1e-6
