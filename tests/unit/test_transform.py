"""Dense transforms: what becomes of negatives, zeros and missing values, and the moments."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.errors import UserError
from data.schema import DenseColumn, Schema
from data.transform import Moments, transform_dense

MISSING = math.nan


def transformed(transform: str, values: list[float], moments: Moments | None = None) -> list[float]:
    schema = Schema(dense={"I2": DenseColumn(transform)})
    known = {} if moments is None else {"I2": moments}
    result = transform_dense(schema, {"I2": np.array(values, np.float64)}, known)["I2"]
    assert result.dtype == np.float32
    return result.tolist()


def test_log1p_of_negative_zero_and_missing_values() -> None:
    """B01: one transform for negatives and empty values, and nothing of it is NaN."""
    values = [-3.0, -2.0, -1.0, 0.0, 5.0, MISSING]
    assert transformed("log1p", values) == [0, 0, 0, 0, pytest.approx(math.log(6)), 0]


def test_identity_keeps_values_and_zeroes_missing_ones() -> None:
    values = [-3.0, 0.0, 5.5, MISSING]
    assert transformed("identity", values) == [-3.0, 0.0, 5.5, 0.0]


def test_standardise_gives_missing_the_mean() -> None:
    values = np.array([-3.0, -2.0, -1.0, 0.0, 5.0, MISSING])
    moments = Moments().plus(values)
    mean, deviation = -0.2, np.std([-3, -2, -1, 0, 5])
    expected = [(v - mean) / deviation for v in (-3, -2, -1, 0, 5)] + [0.0]
    assert transformed("standardise", values.tolist(), moments) == pytest.approx(expected)


@pytest.mark.parametrize("values", [[4.0, 4.0, MISSING], [MISSING, MISSING]])
def test_standardise_makes_a_constant_or_absent_column_zero(values: list[float]) -> None:
    moments = Moments().plus(np.array(values))
    assert transformed("standardise", values, moments) == [0.0] * len(values)


@pytest.mark.parametrize("transform", ["identity", "standardise"])
def test_a_value_that_fp32_cannot_hold_is_refused_naming_the_column(transform: str) -> None:
    with pytest.raises(UserError, match=r"column I2: .*too large.*data\.schema\.dense\.I2"):
        transformed(transform, [1.0, 1e39], Moments(2, 0.0, 1.0))
    assert transformed("log1p", [1e300]) == [pytest.approx(300 * math.log(10))]


CHUNKS = st.lists(
    st.lists(st.floats(-1e6, 1e6) | st.just(MISSING), max_size=20), min_size=1, max_size=6
)


@given(CHUNKS)
def test_moments_of_parts_are_those_of_the_whole(chunks: list[list[float]]) -> None:
    moments = Moments()
    for chunk in chunks:
        moments = moments.plus(np.array(chunk, dtype=np.float64))
    present = [v for chunk in chunks for v in chunk if not math.isnan(v)]
    assert moments.count == len(present)
    if present:
        scale = max(abs(v) for v in present) or 1.0
        assert moments.mean == pytest.approx(np.mean(present), rel=1e-9, abs=1e-9 * scale)
        # The deviation of nearly constant values is rounding noise of their size.
        assert (moments.squares / moments.count) ** 0.5 == pytest.approx(
            np.std(present), rel=1e-6, abs=1e-7 * scale
        )
    assert moments.deviation > 0
