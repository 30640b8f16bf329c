"""Tables, features and the start values."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from embeddings.table import FeatureConfig, TableConfig, fill_uniform, validate_tables


def start_values(
    rows: int,
    dim: int,
    *,
    name: str = "user",
    seed: int = 1,
    bound: float = 0.1,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    out_RD = torch.empty(rows, dim, dtype=dtype)
    fill_uniform(out_RD, seed=seed, table_name=name, row_start=0, col_start=0, dim=dim, bound=bound)
    return out_RD


def splitmix64(seed: int, index: int) -> int:
    """The `index`-th output of Vigna's splitmix64.c, in Python's own integers."""
    mask = (1 << 64) - 1
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_start_values_are_splitmix64_of_key_and_counter() -> None:
    # Published outputs of splitmix64 for seed 1234567: the oracle below is the real generator.
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [splitmix64(1234567, i) for i in range(3)] == published

    key = int.from_bytes(hashlib.sha256(b"7:item").digest()[:8], "little")
    values = start_values(3000, 50, name="item", seed=7, bound=0.3).view(-1)
    scale = np.float32(0.3 / 2**24)
    for index in (0, 1, 49, 50, 65535, 65536, 149_999):
        top = splitmix64(key, index) >> 39  # 25 bits, the highest of them the sign
        signed = top - (1 << 25) if top >= 1 << 24 else top
        assert values[index].item() == np.float32(signed | 1) * scale


def test_start_values_are_pinned() -> None:
    """A changed value breaks every user's reproduction of an earlier run."""
    values = start_values(1000, 16, name="C1", seed=42, bound=0.5)
    found = [values[row, col].item() for row, col in ((0, 0), (0, 1), (1, 0), (999, 15))]
    assert found == [
        0.27157601714134216,
        -0.31514617800712585,
        0.30629023909568787,
        -0.24929490685462952,
    ]


@given(
    rows=st.integers(1, 12),
    dim=st.integers(1, 12),
    data=st.data(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_a_rectangle_equals_the_slice_of_the_whole(
    rows: int, dim: int, data: st.DataObject, dtype: torch.dtype
) -> None:
    row_start = data.draw(st.integers(0, rows - 1))
    row_stop = data.draw(st.integers(row_start, rows))
    col_start = data.draw(st.integers(0, dim - 1))
    col_stop = data.draw(st.integers(col_start, dim))
    part = torch.empty(row_stop - row_start, col_stop - col_start, dtype=dtype)
    fill_uniform(
        part,
        seed=1,
        table_name="user",
        row_start=row_start,
        col_start=col_start,
        dim=dim,
        bound=0.1,
    )
    whole = start_values(rows, dim, dtype=dtype)
    assert torch.equal(part, whole[row_start:row_stop, col_start:col_stop])


@pytest.mark.parametrize(
    ("rows", "dim", "row_start", "row_stop", "col_start", "col_stop"),
    [
        (5000, 40, 1234, 4999, 0, 40),  # several chunks of whole rows
        (5000, 40, 17, 4000, 3, 38),  # several chunks of parts of rows
        (3, 150_000, 1, 3, 5, 149_000),  # a row longer than a chunk
    ],
)
def test_rectangles_larger_than_a_chunk(
    rows: int, dim: int, row_start: int, row_stop: int, col_start: int, col_stop: int
) -> None:
    part = torch.zeros(row_stop - row_start, col_stop - col_start)
    fill_uniform(
        part,
        seed=1,
        table_name="user",
        row_start=row_start,
        col_start=col_start,
        dim=dim,
        bound=0.1,
    )
    whole = start_values(rows, dim)
    assert torch.equal(part, whole[row_start:row_stop, col_start:col_stop])


def test_a_strided_view_is_filled_and_its_surroundings_are_not() -> None:
    backing = torch.full((6, 7), 9.0)
    fill_uniform(
        backing[1:4, 2:5],
        seed=1,
        table_name="user",
        row_start=1,
        col_start=2,
        dim=7,
        bound=0.1,
    )
    assert torch.equal(backing[1:4, 2:5], start_values(6, 7)[1:4, 2:5])
    backing[1:4, 2:5] = 9.0
    assert bool((backing == 9.0).all())


def test_rows_far_beyond_32_bits_have_their_own_values() -> None:
    far, near = torch.empty(2, 4), torch.empty(2, 4)
    for out, row_start in ((far, 1 << 40), (near, 0)):
        fill_uniform(
            out, seed=1, table_name="user", row_start=row_start, col_start=0, dim=4, bound=0.1
        )
    assert not torch.equal(far, near)
    key = int.from_bytes(hashlib.sha256(b"1:user").digest()[:8], "little")
    top = splitmix64(key, (1 << 40) * 4) >> 39
    signed = top - (1 << 25) if top >= 1 << 24 else top
    assert far[0, 0].item() == np.float32(signed | 1) * np.float32(0.1 / 2**24)


def test_fp64_starts_from_the_same_model_as_fp32() -> None:
    assert torch.equal(start_values(100, 16, dtype=torch.float64), start_values(100, 16).double())


def test_name_and_seed_alone_select_the_values() -> None:
    values = start_values(100, 8)
    assert torch.equal(values, start_values(100, 8))
    assert not torch.equal(values, start_values(100, 8, name="item"))
    assert not torch.equal(values, start_values(100, 8, seed=2))
    assert torch.equal(values[:50], start_values(50, 8)), "more rows change the first ones"
    # "1:1x" and "11:x" must not be confused: the seed is cut off the name unambiguously.
    assert not torch.equal(
        start_values(9, 8, seed=1, name="1x"), start_values(9, 8, seed=11, name="x")
    )


def test_distribution_is_uniform_in_the_open_interval() -> None:
    bound, n = 0.25, 1_000_000
    values = start_values(n // 10, 10, bound=bound, dtype=torch.float64)
    assert float(values.abs().max()) < bound
    assert float(values.abs().max()) > 0.9999 * bound
    # Five standard errors of the mean (variance b²/3) and of the variance (4b⁴/45).
    assert abs(float(values.mean())) < 5 * bound / (3 * n) ** 0.5
    variance = float(values.square().mean())
    assert abs(variance - bound**2 / 3) < 5 * bound**2 * (4 / 45 / n) ** 0.5
    counts = torch.histc(values, bins=100, min=-bound, max=bound)
    chi_square = float(((counts - n / 100) ** 2 / (n / 100)).sum())
    assert chi_square < 99 + 5 * (2 * 99) ** 0.5


def test_tables_seeds_rows_and_neighbours_are_uncorrelated() -> None:
    n, dim = 400_000, 16
    one = start_values(n // dim, dim, dtype=torch.float64).view(-1)
    others = {
        "another table": start_values(n // dim, dim, name="user2", dtype=torch.float64).view(-1),
        "another seed": start_values(n // dim, dim, seed=2, dtype=torch.float64).view(-1),
        "the next column": one.roll(1),
        "the next row": one.roll(dim),
        "64 k elements on": one.roll(65536),
    }
    for name, other in others.items():
        correlation = float((one * other).mean() / (one.std() * other.std()))
        assert abs(correlation) < 5 / n**0.5, name


def test_default_bound_is_that_of_the_reference_dlrm() -> None:
    assert TableConfig("user", rows=400, dim=3).default_bound == 1 / 20


def test_rectangles_outside_the_table_and_other_types_are_refused() -> None:
    common = {"seed": 1, "table_name": "user", "dim": 4, "bound": 0.1}
    with pytest.raises(ValueError, match=r"'user'.*columns 2 to 5"):
        fill_uniform(torch.empty(2, 3), row_start=0, col_start=2, **common)
    with pytest.raises(ValueError, match=r"'user'"):
        fill_uniform(torch.empty(2, 3), row_start=-1, col_start=0, **common)
    with pytest.raises(ValueError, match=r"'user'.*float16"):
        fill_uniform(torch.empty(2, 3, dtype=torch.float16), row_start=0, col_start=0, **common)


def test_impossible_configs_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'user': rows is 0"):
        TableConfig("user", rows=0, dim=4)
    with pytest.raises(ValueError, match=r"'user': dim is -1"):
        TableConfig("user", rows=3, dim=-1)
    with pytest.raises(ValueError, match=r"name"):
        TableConfig("", rows=3, dim=1)
    with pytest.raises(ValueError, match=r"'f'.*'user'.*'max'"):
        FeatureConfig("f", "user", pooling="max")  # type: ignore[arg-type]
    user = TableConfig("user", rows=3, dim=1)
    with pytest.raises(ValueError, match=r"table 'user' is defined twice"):
        validate_tables([user, TableConfig("user", rows=9, dim=2)], [])
    with pytest.raises(ValueError, match=r"feature 'f' is defined twice"):
        validate_tables([user], [FeatureConfig("f", "user"), FeatureConfig("f", "user")])
    with pytest.raises(ValueError, match=r"'f' looks up table 'item'"):
        validate_tables([user], [FeatureConfig("f", "item")])
