"""Rows written as pieces of memory: the values of `index_copy_`, and no row besides."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embeddings.row_update import row_writer


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Several leave it to `index_copy_`."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@given(
    num_rows=st.integers(1, 40),
    dim=st.integers(1, 33),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_rows_are_written_whole_and_no_others(
    num_rows: int, dim: int, dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(seed)
    array_RD = torch.randn(num_rows, dim, generator=generator).to(dtype)
    count = data.draw(st.integers(0, num_rows))
    rows_K = torch.randperm(num_rows, generator=generator)[:count]
    values_KD = torch.randn(count, dim, generator=generator).to(dtype)
    expected = array_RD.clone().index_copy_(0, rows_K, values_KD)
    row_writer(array_RD)(rows_K, values_KD)
    assert torch.equal(array_RD, expected)


def test_a_part_of_a_larger_array_is_written_in_place() -> None:
    """A table's rows are a stretch of its group's array."""
    whole = torch.zeros(6, 3)
    row_writer(whole[2:5])(torch.tensor([2, 0]), torch.ones(2, 3))
    assert whole.sum(dim=1).tolist() == [0, 0, 3, 0, 3, 0]


def test_columns_of_a_wider_array_are_written_in_place() -> None:
    """A staged record holds a row and its state."""
    records = torch.zeros(4, 5)
    row_writer(records[:, 1:3])(torch.tensor([3, 0]), torch.ones(2, 2))
    assert records.sum(dim=0).tolist() == [0, 2, 2, 0, 0]
    assert records.sum(dim=1).tolist() == [2, 0, 0, 2]


@pytest.mark.parametrize("row", [4, -5])
def test_a_row_that_is_not_there_is_an_error(row: int) -> None:
    with pytest.raises(IndexError):
        row_writer(torch.zeros(4, 2))(torch.tensor([row]), torch.ones(1, 2))


def test_other_types_and_shapes_are_not_reinterpreted() -> None:
    """The bytes of a wrong type would be written as they are."""
    with pytest.raises(AssertionError):
        row_writer(torch.zeros(4, 2))(torch.tensor([1]), torch.ones(1, 2).double())
    with pytest.raises(AssertionError):
        row_writer(torch.zeros(4, 2))(torch.tensor([1]), torch.ones(1, 4))
