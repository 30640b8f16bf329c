"""MLP layers: a linear map and its ReLU as one step, forward and backward."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

PAD_TO = 16
"""Columns that a row is filled up to: 64 bytes of fp32, a cache line and a vector register."""
_NARROW = 64


class LinearReLU(nn.Linear):
    """`relu(x Wᵗ + b)`: `nn.Linear` and `nn.ReLU` with fewer passes over memory.

    The ReLU is applied in place, and nothing but input, weight and output is kept for backward.
    Products run over rows of whole cache lines: the input may have further columns of zeros (as
    `DotInteraction` makes them), then the weight gets as many for the product; narrow inputs are
    filled up here. Under autocast, input, weight and output are in its dtype, as autocast has it
    for the two modules; gradients come back in the dtype of what they belong to.
    """

    def forward(self, x: Tensor) -> Tensor:
        """`(B, in)`, or wider with zeros, → `(B, out)`."""
        assert x.shape[1] >= self.in_features, (x.shape, self.in_features)
        if torch.compiler.is_compiling():  # A graph for elsewhere is made of plain operators.
            return functional.relu(super().forward(x[:, : self.in_features]))
        device, dtype = x.device.type, x.dtype
        if torch.is_autocast_enabled(device) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(device)
        return _LinearReLU.apply(x, self.weight, self.bias, dtype)


def padded(num_columns: int, pad_to: int = PAD_TO) -> int:
    """The next multiple of `pad_to`."""
    return -(-num_columns // pad_to) * pad_to


def mlp(widths: Sequence[int]) -> nn.Sequential:
    """Linear layers between the widths, each followed by a ReLU.

    The layers are named 0, 2, 4 …, as if each ReLU were a module of its own: start values are drawn
    by name.
    """
    return nn.Sequential(
        OrderedDict(
            (str(2 * number), LinearReLU(num_inputs, num_outputs))
            for number, (num_inputs, num_outputs) in enumerate(pairwise(widths))
        )
    )


class _LinearReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.x_dtype, ctx.x_columns, ctx.weight_dtype = x.dtype, x.shape[1], weight.dtype
        ctx.in_features = weight.shape[1]
        x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
        if x.shape[1] < _NARROW:
            x = _fill_up(x, padded(x.shape[1]))
        weight = _fill_up(weight, x.shape[1])
        with torch.autocast(x.device.type, enabled=False):
            y = torch.addmm(bias, x, weight.t()).relu_()
        ctx.save_for_backward(x, weight, y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, y = ctx.saved_tensors
        grad = torch.ops.aten.threshold_backward(grads[0], y, 0)
        # Of a narrow input, the product is several times as fast the other way round.
        weight_grad = x.t().mm(grad).t() if x.shape[1] < _NARROW else grad.t().mm(x)
        weight_grad = weight_grad[:, : ctx.in_features].to(ctx.weight_dtype).contiguous()
        bias_grad = grad.sum(dim=0).to(ctx.weight_dtype)
        x_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = grad.mm(weight)[:, : ctx.x_columns].to(ctx.x_dtype)
        return x_grad, weight_grad, bias_grad, None


def _fill_up(values: Tensor, num_columns: int) -> Tensor:
    """The matrix with columns of zeros up to that many."""
    missing = num_columns - values.shape[1]
    return functional.pad(values, (0, missing)) if missing else values
