"""Rows updated where they lie are those of `update_rows`, and no others change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from embeddings.row_optim import (
    RowOptimizerConfig,
    RowOptimizerName,
    state_widths,
    update_rows,
)
from embeddings.row_update import update_in_place

RULES = get_args(RowOptimizerName)


@pytest.fixture(autouse=True)
def restored_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def make_rows(
    rule: RowOptimizerConfig, num_rows: int, dim: int, dtype: torch.dtype, generator: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    weights = torch.randn(num_rows, dim, generator=generator).to(dtype)
    widths = state_widths(rule, dim)
    state = {
        name: torch.rand(num_rows, width, generator=generator).to(dtype)
        for name, width in widths.items()
    }
    return weights, state


@given(
    name=st.sampled_from(RULES),
    beta1=st.sampled_from([0.0, 0.4, 0.8]),
    weight_decay=st.sampled_from([0.0, 0.3]),
    num_rows=st.integers(1, 40),
    dim=st.integers(1, 33),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_touched_rows_follow_the_rule_and_no_others_change(
    name: RowOptimizerName,
    beta1: float,
    weight_decay: float,
    num_rows: int,
    dim: int,
    dtype: torch.dtype,
    seed: int,
    data: st.DataObject,
) -> None:
    rule = RowOptimizerConfig(name=name, weight_decay=weight_decay, beta1=beta1, beta2=0.95)
    generator = torch.Generator().manual_seed(seed)
    weights, state = make_rows(rule, num_rows, dim, dtype, generator)
    rows_K = torch.randperm(num_rows, generator=generator)[: data.draw(st.integers(0, num_rows))]
    grads_KD = torch.randn(len(rows_K), dim, generator=generator).to(dtype)
    expected, expected_state = weights.clone(), {n: s.clone() for n, s in state.items()}
    rows_KD, touched = expected[rows_K], {n: s[rows_K] for n, s in expected_state.items()}
    update_rows(rule, rows_KD, touched, grads_KD, lr=0.1, num_steps=3)
    expected[rows_K] = rows_KD
    for key, values in touched.items():
        expected_state[key][rows_K] = values

    before = grads_KD.clone()
    update_in_place(rule, weights, state, rows_K, grads_KD, lr=0.1, num_steps=3)

    tolerance = 1e-5 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(weights, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(state, expected_state, rtol=tolerance, atol=tolerance)
    untouched = torch.ones(num_rows, dtype=torch.bool)
    untouched[rows_K] = False
    assert torch.equal(weights[untouched], expected[untouched])
    assert torch.equal(grads_KD, before)


@pytest.mark.parametrize("name", RULES)
def test_rows_within_records_get_the_bits_of_rows_that_follow_each_other(
    name: RowOptimizerName,
) -> None:
    """A staged record holds a row and its state; whether a row was staged must not be seen."""
    rule = RowOptimizerConfig(name=name)
    generator = torch.Generator().manual_seed(0)
    weights, state = make_rows(rule, 60, 12, torch.float32, generator)
    records = torch.cat([torch.zeros(60, 3), weights, *state.values(), torch.zeros(60, 2)], dim=1)
    position, views = 15, {}
    for key, values in state.items():
        views[key] = records[:, position : position + values.shape[1]]
        position += values.shape[1]
    rows_K = torch.randperm(60, generator=generator)[:37]
    grads_KD = torch.randn(37, 12, generator=generator)
    update_in_place(rule, records[:, 3:15], views, rows_K, grads_KD, lr=0.1, num_steps=1)
    update_in_place(rule, weights, state, rows_K, grads_KD, lr=0.1, num_steps=1)
    assert torch.equal(records[:, 3:15], weights)
    for key, values in state.items():
        assert torch.equal(views[key], values)
    assert not records[:, :3].any()
    assert not records[:, position:].any()


def test_a_part_of_a_larger_array_is_updated_in_place() -> None:
    """A table's rows are a stretch of its group's array."""
    whole = torch.zeros(6, 3)
    rule = RowOptimizerConfig(name="sgd")
    grads_KD = -torch.ones(2, 3)
    update_in_place(rule, whole[2:5], {}, torch.tensor([2, 0]), grads_KD, lr=1.0, num_steps=1)
    assert whole.sum(dim=1).tolist() == [0, 0, 3, 0, 3, 0]


@pytest.mark.parametrize("name", RULES)
def test_the_number_of_threads_changes_no_bit(name: RowOptimizerName) -> None:
    rule = RowOptimizerConfig(name=name)
    results = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        generator = torch.Generator().manual_seed(0)
        weights, state = make_rows(rule, 3000, 5, torch.float32, generator)
        rows_K = torch.randperm(3000, generator=generator)[:2500]
        grads_KD = torch.randn(2500, 5, generator=generator)
        update_in_place(rule, weights, state, rows_K, grads_KD, lr=0.1, num_steps=2)
        results.append([weights, *state.values()])
    for other in results[1:]:
        for first, second in zip(results[0], other, strict=True):
            assert torch.equal(first, second)


@pytest.mark.parametrize("row", [4, -1])
def test_a_row_that_is_not_there_is_an_error_and_changes_nothing(row: int) -> None:
    weights = torch.zeros(4, 2)
    rule = RowOptimizerConfig(name="sgd")
    rows_K = torch.tensor([1, row])
    with pytest.raises(IndexError):
        update_in_place(rule, weights, {}, rows_K, torch.ones(2, 2), lr=1.0, num_steps=1)
    assert not weights.any()


@pytest.mark.parametrize("size", [0, 8])
def test_blocks_of_rows_get_the_bits_of_all_at_once(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = RowOptimizerConfig(name="rowwise_adagrad", weight_decay=0.1)
    results = []
    for block_bytes in (1 << 20, size):
        monkeypatch.setattr("embeddings.row_update._KERNEL_BLOCK_BYTES", block_bytes)
        generator = torch.Generator().manual_seed(0)
        weights, state = make_rows(rule, 20, 3, torch.float32, generator)
        rows_K = torch.randperm(20, generator=generator)[:11]
        grads_KD = torch.randn(11, 3, generator=generator)
        update_in_place(rule, weights, state, rows_K, grads_KD, lr=0.1, num_steps=1)
        results.append([weights, *state.values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_state_is_taken_by_its_name() -> None:
    rule = RowOptimizerConfig(name="adam")
    results = []
    for names in (("exp_avg", "exp_avg_sq"), ("exp_avg_sq", "exp_avg")):
        generator = torch.Generator().manual_seed(0)
        weights, state = make_rows(rule, 5, 3, torch.float32, generator)
        rows_K, grads_KD = torch.tensor([4, 1]), torch.randn(2, 3, generator=generator)
        in_order = {name: state[name] for name in names}
        update_in_place(rule, weights, in_order, rows_K, grads_KD, lr=0.1, num_steps=1)
        results.append([weights, state["exp_avg"], state["exp_avg_sq"]])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("shape", [(3, 2), (4, 1), (4, 3)])
def test_state_of_another_shape_or_type_is_refused(shape: tuple[int, int]) -> None:
    """A kernel would write beside it."""
    rule, rows_K = RowOptimizerConfig(name="adagrad"), torch.tensor([1])
    weights, grads_KD = torch.zeros(4, 2), torch.ones(1, 2)
    for sums in (torch.zeros(shape), torch.zeros(4, 2).double()):
        with pytest.raises(ValueError, match=r"must be|has the states"):
            update_in_place(rule, weights, {"sum": sums}, rows_K, grads_KD, lr=1.0, num_steps=1)
    assert not weights.any()


def test_gradients_of_another_type_or_shape_are_refused() -> None:
    weights, rows_K = torch.zeros(4, 2), torch.tensor([1])
    rule = RowOptimizerConfig(name="sgd")
    for grads_KD in (torch.ones(1, 2).double(), torch.ones(1, 4), torch.ones(2, 2)):
        with pytest.raises(ValueError, match="gradients"):
            update_in_place(rule, weights, {}, rows_K, grads_KD, lr=1.0, num_steps=1)
