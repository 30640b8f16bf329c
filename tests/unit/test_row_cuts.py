"""Cuts of rows and columns: they tile, and they share out evenly what they promise to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embeddings.row_cuts import MAX_EXCESS_ELEMENTS, Stretch, cut_columns, cut_rows, even_stretches
from embeddings.traffic import Load


def load_of(touched: np.ndarray, ids: np.ndarray | None = None) -> Load:
    ids = np.arange(len(touched)) if ids is None else ids
    return Load(ids, np.concatenate([[0.0], np.cumsum(touched)]))


def loads(parts: list[list[Stretch]], load: Load) -> np.ndarray:
    return np.array([sum(load.before(b) - load.before(a) for a, b in part) for part in parts])


def sizes(parts: list[list[Stretch]]) -> np.ndarray:
    return np.array([sum(b - a for a, b in part) for part in parts])


def assert_tiles(parts: list[list[Stretch]], rows: int) -> None:
    stretches = sorted(stretch for part in parts for stretch in part)
    assert all(start < stop for start, stop in stretches)
    assert [0, *(stop for _, stop in stretches)] == [*(start for start, _ in stretches), rows]


@pytest.mark.parametrize(
    ("dim", "parts", "widths"),
    [
        (16, 4, [4, 4, 4, 4]),
        (16, 3, [4, 4, 8]),
        (20, 4, [4, 4, 4, 8]),
        (10, 4, [5, 5]),
        (13, 3, [4, 4, 5]),
        (6, 4, [6]),
        (4, 4, [4]),
        (3, 4, [3]),
        (1, 2, [1]),
        (128, 4, [32] * 4),
        (10, 1, [10]),
    ],
)
def test_column_slices_keep_a_width_and_fours_together(
    dim: int, parts: int, widths: list[int]
) -> None:
    """A slice of a dim divisible by 4 stays divisible: the fused kernel takes it."""
    slices = cut_columns(dim, parts)
    assert sorted(stop - start for start, stop in slices) == widths
    assert_tiles([slices], dim)


@given(st.integers(1, 500), st.integers(1, 20))
def test_even_stretches(size: int, parts: int) -> None:
    stretches = even_stretches(size, parts)
    assert_tiles([stretches], size)
    assert len(stretches) == min(size, parts)
    lengths = [stop - start for start, stop in stretches]
    assert max(lengths) - min(lengths) <= 1


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=60),
    st.integers(1, 9),
    st.sampled_from([1, MAX_EXCESS_ELEMENTS * 2]),
    st.integers(1, 4),
)
def test_parts_tile_the_rows_whatever_the_load(
    touched: list[float], num_parts: int, dim: int, stride: int
) -> None:
    """With a dim beyond all measure, every excess row asks for a second stretch."""
    rows = len(touched) * stride
    load = load_of(np.array(touched), np.arange(0, rows, stride))
    parts = cut_rows(rows, dim, num_parts, load)
    assert len(parts) == min(rows, num_parts)
    assert_tiles(parts, rows)
    assert sum(map(len, parts)) <= 2 * len(parts) - 1
    assert parts == cut_rows(rows, dim, num_parts, load)


def test_cuts_follow_the_load_with_one_stretch_each() -> None:
    load = load_of(np.array([1.0, 1.0, 0.25, 0.25, 0.25, 0.25]))
    assert cut_rows(6, 4, 3, load) == [[(0, 1)], [(1, 2)], [(2, 6)]]
    # Rows that nobody looks up go to whoever is next to them.
    assert cut_rows(9, 4, 2, load_of(np.ones(2), np.array([3, 4]))) == [[(0, 4)], [(4, 9)]]
    # One row has all the load, and each part still gets a row.
    assert cut_rows(4, 4, 4, load_of(np.ones(1), np.array([3]))) == [[(n, n + 1)] for n in range(4)]


def test_without_a_load_cuts_are_even() -> None:
    assert cut_rows(7, 4, 3, None) == [[(0, 2)], [(2, 4)], [(4, 7)]]
    assert cut_rows(2, 4, 3, None) == [[(0, 1)], [(1, 2)]]
    assert cut_rows(7, 4, 3, load_of(np.zeros(7))) == cut_rows(7, 4, 3, None)


@pytest.mark.parametrize("num_parts", [2, 3, 4, 7, 16])
@pytest.mark.parametrize("order", ["falling", "rising", "random", "hot middle"])
def test_skewed_large_tables_share_out_rows_and_load(num_parts: int, order: str) -> None:
    """By load alone, the part with the rarest ids would hold most of the table."""
    touched = 1 - np.exp(-2048 / 8 / np.arange(1, 400_001) ** 1.05)
    if order == "rising":
        touched = touched[::-1]
    elif order == "random":
        np.random.default_rng(0).shuffle(touched)
    elif order == "hot middle":
        touched = np.roll(touched, 200_000)
    load = load_of(touched)
    parts = cut_rows(400_000, 64, num_parts, load)
    assert_tiles(parts, 400_000)
    assert sum(map(len, parts)) <= 2 * num_parts - 1
    assert sizes(parts).max() <= 400_000 / num_parts + MAX_EXCESS_ELEMENTS / 64
    share = loads(parts, load) / (load.total / num_parts)
    assert share.min() > 0.95
    assert share.max() < 1.05
