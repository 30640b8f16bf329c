"""The floor: the matrix products that the dense network's layers can't do without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from data.batch import Batch
from data.parquet import PreparedDataset
from dlrm.bench.measure import SideTask
from dlrm.build import build_model
from dlrm.launch import WorkerContext


@contextmanager
def build(
    context: WorkerContext, task: SideTask, dataset: PreparedDataset, batches: list[Batch]
) -> Iterator[GemmSide]:
    """Three products per layer, two for the first, into memory that is there already."""
    model = build_model(task.config, dataset.manifest)
    dtype = torch.bfloat16 if task.config.train.precision == "bf16" else torch.float32
    yield GemmSide(model, batches[0].batch_size, dtype)


class GemmSide:
    """See `measure.Side`.

    Forward `Y = X Wᵗ`, backward `dW = dYᵗ X` and, but for the first layer, `dX = dY W`. No bias, no
    activation, no loss, no interaction, no optimizer.
    """

    def __init__(self, model: nn.Module, batch_size: int, dtype: torch.dtype) -> None:
        self.layers: list[GemmLayer] = []
        shapes = [m.weight.shape for m in model.modules() if isinstance(m, nn.Linear)]
        for number, (num_out, num_in) in enumerate(shapes):
            self.layers.append(GemmLayer(batch_size, num_in, num_out, dtype, number > 0))
        self.note = "matrix products of the linear layers only"

    def step(self) -> None:
        """See `measure.Side`."""
        for layer in self.layers:
            layer.forward()
        for layer in reversed(self.layers):
            layer.backward()

    def begin_window(self) -> None:
        """See `measure.Side`."""

    def figures(self) -> dict[str, Any]:
        """Floating-point operations of a step, on this rank."""
        return {"flops": sum(layer.flops for layer in self.layers)}

    def end_training(self) -> None:
        """See `measure.Side`."""

    def logits(self, batch: Batch) -> Tensor | None:
        """There is no model."""
        return None


class GemmLayer:
    """The products of one layer.

    Attributes:
        flops: two per multiplication and addition.
    """

    def __init__(
        self, batch_size: int, num_in: int, num_out: int, dtype: torch.dtype, needs_input_grad: bool
    ) -> None:
        generator = torch.Generator().manual_seed(0)

        def values(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=generator).to(dtype)

        self._input, self._weight = values(batch_size, num_in), values(num_out, num_in)
        self._output_grad = values(batch_size, num_out)
        self._output = torch.empty_like(self._output_grad)
        self._weight_grad = torch.empty_like(self._weight)
        self._input_grad = torch.empty_like(self._input) if needs_input_grad else None
        products = 3 if needs_input_grad else 2
        self.flops = 2 * batch_size * num_in * num_out * products

    def forward(self) -> None:
        """One product."""
        torch.mm(self._input, self._weight.t(), out=self._output)

    def backward(self) -> None:
        """Two products, or one."""
        torch.mm(self._output_grad.t(), self._input, out=self._weight_grad)
        if self._input_grad is not None:
            torch.mm(self._output_grad, self._weight, out=self._input_grad)
