"""`LinearReLU` is `nn.Linear` and `nn.ReLU`: values, gradients, dtypes, NaN."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dlrm.mlp import PAD_TO, LinearReLU, mlp, padded


def plain(layer: LinearReLU) -> nn.Sequential:
    """The two modules, with the same parameters."""
    linear = nn.Linear(layer.in_features, layer.out_features, dtype=layer.weight.dtype)
    linear.load_state_dict(layer.state_dict())
    return nn.Sequential(linear, nn.ReLU())


def filled_up(values: Tensor, num_columns: int) -> Tensor:
    return nn.functional.pad(values, (0, num_columns - values.shape[1]))


def gradients(module: nn.Module, x: Tensor, y_grad: Tensor) -> list[Tensor]:
    """Output, and the gradients of input, weight and bias."""
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(y_grad)
    assert x.grad is not None
    found = [y.detach(), x.grad, *(p.grad for p in module.parameters() if p.grad is not None)]
    assert len(found) == 4
    return found


@pytest.mark.parametrize("extra", [0, 5], ids=["as wide", "wider, with zeros"])
@pytest.mark.parametrize("num_inputs", [1, 13, 63, 64, 70])
@pytest.mark.parametrize("batch_size", [0, 1, 9])
def test_equals_the_two_modules(batch_size: int, num_inputs: int, extra: int) -> None:
    """Narrow inputs and wide ones take other ways through the products."""
    generator = torch.Generator().manual_seed(num_inputs)
    layer = LinearReLU(num_inputs, 6, dtype=torch.float64)
    x = torch.randn(batch_size, num_inputs, generator=generator, dtype=torch.float64)
    y_grad = torch.randn(batch_size, 6, generator=generator, dtype=torch.float64)
    expected = gradients(plain(layer), x, y_grad)
    found = gradients(layer, filled_up(x, num_inputs + extra), y_grad)
    found[1] = found[1][:, :num_inputs]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.is_contiguous() or ours is found[1]
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_autocast_is_that_of_the_two_modules() -> None:
    """bf16 within, and the parameters' gradients in the parameters' type."""
    layer = LinearReLU(70, 6)
    x, y_grad = torch.randn(9, 70), torch.randn(9, 6).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = gradients(layer, x, y_grad), gradients(plain(layer), x, y_grad)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=2**-6)


def test_a_value_that_is_not_finite_is_not_hidden() -> None:
    """A ReLU by comparison makes 0 of NaN; then the loss would be finite and nobody told."""
    layer = LinearReLU(70, 6)
    x = torch.zeros(2, 70)
    x[1, 3] = torch.nan
    y = layer(x)
    assert y[0].isfinite().all()
    assert y[1].isnan().all()


def test_layers_have_the_names_and_start_of_modules_side_by_side() -> None:
    """Start values are drawn by name, and checkpoints are read by it."""
    layers = mlp([3, 4, 5])
    assert [name for name, _ in layers.named_parameters()] == [
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    ]
    assert layers(torch.ones(2, 3)).shape == (2, 5)


def test_rows_are_filled_up_to_whole_cache_lines() -> None:
    assert [padded(n) for n in (1, 16, 17, 367)] == [16, 16, 32, 368]
    assert PAD_TO * torch.float32.itemsize == 64
