"""Sums in another order, as another processor's kernels or number of threads would make them.

Within `ReorderedProducts` every matrix product and sum of this thread goes over its reduced
dimension shuffled and in blocks of random lengths. Backward passes of CPU tensors run in the thread
that calls them, so they are meant too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dlrm import check_pass
from dlrm.trainer import Trainer

aten = torch.ops.aten


class ReorderedProducts(TorchDispatchMode):
    """Active in a `with` block.

    Args:
        seed: of the orders.

    Attributes:
        num_changed: products and sums that were made in another order.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)
        self.num_changed = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Called for every operator."""
        if not kwargs and func is aten.mm.default:
            return self._product(*args)
        if not kwargs and func is aten.bmm.default:
            return self._product(*args)
        if not kwargs and func is aten.addmm.default:
            bias, left, right = args
            return bias + self._product(left, right)
        if func is aten.sum.dim_IntList and args[1] == [0] and args[0].dim() == 2:
            ones = args[0].new_ones(1, args[0].shape[0])
            total = self._product(ones, args[0])
            return total if len(args) > 2 and args[2] else total[0]
        return func(*args, **(kwargs or {}))

    def _product(self, left: Tensor, right: Tensor) -> Tensor:
        self.num_changed += 1
        length = left.shape[-1]
        order = torch.randperm(length, generator=self._generator)
        result = left.new_zeros(*left.shape[:-1], right.shape[-1])
        start = 0
        while start < length:
            stop = start + int(torch.randint(1, 400, (), generator=self._generator))
            part = order[start:stop]
            result = result + left[..., part] @ right[..., part, :]
            start = stop
        return result


@contextmanager
def reordered_trainers(seed: int, patch: Any) -> Iterator[list[ReorderedProducts]]:
    """Every trainer of a check makes its steps with `ReorderedProducts`, each rank with its own.

    Args:
        seed: of the orders.
        patch: pytest's monkeypatch, or one like it.
    """
    modes: list[ReorderedProducts] = []

    class Reordered(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            mode = ReorderedProducts(1000 * seed + self.comm.rank)
            modes.append(mode)
            step: Callable[..., float] = self.step

            def reordered_step(*arguments: Any) -> float:
                with mode:
                    return step(*arguments)

            self.step = reordered_step  # type: ignore[method-assign]

    patch.setattr(check_pass, "Trainer", Reordered)
    yield modes
