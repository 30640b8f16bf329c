"""Update rules of rows, against hand-worked numbers and torch's optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from embeddings.row_optim import RowOptimizerConfig, state_widths, update_rows


def zero_state(config: RowOptimizerConfig, num_rows: int, dim: int) -> dict[str, Tensor]:
    widths = state_widths(config, dim)
    return {name: torch.zeros(num_rows, w, dtype=torch.float64) for name, w in widths.items()}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "adamw"),
        ("eps", -1e-9),
        ("eps", float("nan")),
        ("eps", float("inf")),
        ("weight_decay", -0.1),
        ("beta1", 1.0),
        ("beta2", -0.1),
    ],
)
def test_impossible_values_name_their_key(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"optim\.sparse\.{field} is .*{value}"):
        RowOptimizerConfig(**{field: value})


def test_state_widths() -> None:
    widths = {name: state_widths(RowOptimizerConfig(name=name), 16) for name in NAMES}
    assert widths == {
        "sgd": {},
        "adagrad": {"sum": 16},
        "rowwise_adagrad": {"sum": 1},
        "adam": {"exp_avg": 16, "exp_avg_sq": 16},
    }


NAMES: tuple[Any, ...] = ("sgd", "adagrad", "rowwise_adagrad", "adam")


@pytest.mark.parametrize("name", ["adagrad", "rowwise_adagrad"])
def test_eps_is_added_to_the_root(name: Any) -> None:
    """Gradient 1e-3, state 0, eps 1e-3: 1e-3 / (1e-3 + 1e-3) is half a learning rate (B24)."""
    config = RowOptimizerConfig(name=name, eps=1e-3)
    rows_KD, state = torch.zeros(1, 4, dtype=torch.float64), zero_state(config, 1, 4)
    grads_KD = torch.full((1, 4), 1e-3, dtype=torch.float64)
    update_rows(config, rows_KD, state, grads_KD, lr=1.0, num_steps=1)
    torch.testing.assert_close(rows_KD, torch.full_like(rows_KD, -0.5), rtol=1e-12, atol=0)


def test_rowwise_state_is_the_mean_square_of_the_row() -> None:
    config = RowOptimizerConfig(name="rowwise_adagrad", eps=0.0)
    rows_KD, state = torch.zeros(2, 2, dtype=torch.float64), zero_state(config, 2, 2)
    grads_KD = torch.tensor([[3.0, 1.0], [4.0, 4.0]], dtype=torch.float64)
    update_rows(config, rows_KD, state, grads_KD, lr=1.0, num_steps=1)
    assert state["sum"].tolist() == [[5.0], [16.0]]
    expected = -grads_KD / torch.tensor([[5.0], [16.0]], dtype=torch.float64).sqrt()
    torch.testing.assert_close(rows_KD, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_weight_decay_adds_to_the_gradient_before_the_rule(name: Any) -> None:
    decayed = RowOptimizerConfig(name=name, eps=1e-6, weight_decay=0.25)
    plain = RowOptimizerConfig(name=name, eps=1e-6)
    start_KD = torch.tensor([[1.0, -2.0]], dtype=torch.float64)
    grads_KD = torch.tensor([[0.5, 0.75]], dtype=torch.float64)
    rows_KD, state = start_KD.clone(), zero_state(decayed, 1, 2)
    update_rows(decayed, rows_KD, state, grads_KD, lr=0.1, num_steps=1)
    expected_KD, expected_state = start_KD.clone(), zero_state(plain, 1, 2)
    update_rows(plain, expected_KD, expected_state, grads_KD + 0.25 * start_KD, lr=0.1, num_steps=1)
    assert torch.equal(rows_KD, expected_KD)
    assert all(torch.equal(state[key], expected_state[key]) for key in state)
    assert grads_KD.tolist() == [[0.5, 0.75]], "the caller's gradient changed"


@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("sgd", lambda p: torch.optim.SGD([p], lr=0.1)),
        ("adagrad", lambda p: torch.optim.Adagrad([p], lr=0.1, eps=1e-4)),
        ("adam", lambda p: torch.optim.SparseAdam([p], lr=0.1, betas=(0.8, 0.95), eps=1e-4)),
    ],
)
def test_rules_equal_torch_optim_while_every_row_is_touched(name: Any, build: Any) -> None:
    config = RowOptimizerConfig(name=name, eps=1e-4, beta1=0.8, beta2=0.95)
    generator = torch.Generator().manual_seed(0)
    param = torch.randn(3, 5, generator=generator, dtype=torch.float64).requires_grad_()
    rows_KD, state = param.detach().clone(), zero_state(config, 3, 5)
    optimizer = build(param)
    for step in range(1, 21):
        grads_KD = torch.randn(3, 5, generator=generator, dtype=torch.float64)
        param.grad = grads_KD.to_sparse(1)
        # torch's own Adagrad warns where nobody has chosen whether to check sparse tensors.
        with torch.sparse.check_sparse_tensor_invariants(True):
            optimizer.step()
        update_rows(config, rows_KD, state, grads_KD, lr=0.1, num_steps=step)
    torch.testing.assert_close(rows_KD, param.detach(), rtol=1e-12, atol=1e-14)
    for key, value in state.items():
        torch.testing.assert_close(value, optimizer.state[param][key], rtol=1e-12, atol=1e-14)


def test_adam_without_a_begun_step_is_our_mistake() -> None:
    config = RowOptimizerConfig(name="adam")
    rows_KD = torch.zeros(1, 2, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"begin the step"):
        update_rows(config, rows_KD, zero_state(config, 1, 2), rows_KD, lr=1.0, num_steps=0)
