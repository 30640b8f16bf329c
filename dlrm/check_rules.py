"""How far a step of an optimizer can carry errors of its gradient and of its state.

The rules are written here once more as functions of one element, with the state in the form in
which a check compares it (`check_compare`): of a sum of squares the root. All of them are monotone
in the gradient and in each state, or a quotient of parts that are; so their ends over a box of
gradients and states are found at its corners, without a derivative that would fail near zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dlrm.optim import DenseOptimConfig
from embeddings.row_optim import RowOptimizerConfig

_ROW_MEAN = "rowwise_adagrad"
_ADAMS = ("adam", "adamw")


class Ends(NamedTuple):
    """What each element may be: from `low` to `high`."""

    low: Tensor
    high: Tensor

    @classmethod
    def around(cls, values: Tensor, margin: Tensor) -> Ends:
        """Up to `margin` away from `values`."""
        return cls(values - margin, values + margin)

    def margin(self, values: Tensor) -> Tensor:
        """How far from `values`, which lie within, the ends are at most."""
        return torch.maximum(self.high - values, values - self.low)

    def squares(self) -> Ends:
        """Of the squares."""
        sizes = self.low.abs(), self.high.abs()
        least = torch.where(
            self.low.signbit() == self.high.signbit(), torch.minimum(*sizes).square(), 0.0
        )
        return Ends(least, torch.maximum(*sizes).square())


@dataclass(frozen=True)
class UpdateRule:
    """An optimizer's rule.

    Attributes:
        name: `sgd`, `adagrad`, `rowwise_adagrad`, `adam`, `adamw`.
        eps: added to the root in the denominator.
        beta1: decay of Adam's first moment.
        beta2: decay of Adam's second moment.
        weight_decay: added to the gradient as a multiple of the weight; not under `adamw`.
        corrects_root: Adam: the root is freed of its bias before `eps` is added (torch's dense
            Adam), not after (`SparseAdam`).
    """

    name: str
    eps: float
    beta1: float
    beta2: float
    weight_decay: float
    corrects_root: bool = False

    @classmethod
    def of_rows(cls, config: RowOptimizerConfig) -> UpdateRule:
        """That of the tables."""
        return cls(config.name, config.eps, config.beta1, config.beta2, config.weight_decay)

    @classmethod
    def of_dense(cls, config: DenseOptimConfig, eps: float) -> UpdateRule:
        """That of the dense network."""
        decay = 0.0 if config.name == "adamw" else config.weight_decay
        return cls(config.name, eps, config.beta1, config.beta2, decay, corrects_root=True)

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the states."""
        if self.name in _ADAMS:
            return ("exp_avg", "exp_avg_sq")
        return () if self.name == "sgd" else ("sum",)

    def after(
        self, lr: float, num_steps: int, grads: Tensor, state: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """What is taken from the weights (`weight`), and the new states.

        Args:
            lr: learning rate.
            num_steps: number of this step, from 1.
            grads: gradients, decayed.
            state: before the step, of sums of squares the roots.
        """
        numerator, root = self._parts(grads, state)
        if root is None:
            return {"weight": lr * numerator}
        scale, eps = self._scale(lr, num_steps)
        after = {"weight": scale * numerator / (root + eps)}
        if self.name in _ADAMS:
            return {**after, "exp_avg": numerator, "exp_avg_sq": root}
        return {**after, "sum": root}

    def ends(
        self, lr: float, num_steps: int, grads: Ends, state: Mapping[str, Ends]
    ) -> dict[str, Ends]:
        """The same where gradients and states are only known to lie between ends."""
        if self.name == "adagrad":  # Its step never falls with its gradient, which is in both.
            return self._adagrad_ends(lr, grads, state["sum"])
        if self.name == "sgd":
            return {"weight": Ends(lr * grads.low, lr * grads.high)}
        squares = grads.squares()
        root_state = state["exp_avg_sq" if self.name in _ADAMS else "sum"]
        root = Ends(
            self._root(root_state.low.clamp(min=0), squares.low),
            self._root(root_state.high, squares.high),
        )
        numerator = grads
        if self.name in _ADAMS:
            lows, highs = (
                average.lerp(grad, 1 - self.beta1)
                for average, grad in zip(state["exp_avg"], grads, strict=True)
            )
            numerator = Ends(lows, highs)
        scale, eps = self._scale(lr, num_steps)
        after = {"weight": _quotient_ends(numerator, root, scale, eps)}
        if self.name in _ADAMS:
            return {**after, "exp_avg": numerator, "exp_avg_sq": root}
        return {**after, "sum": root}

    def _parts(self, grads: Tensor, state: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Numerator of the step, and root of its denominator."""
        if self.name == "sgd":
            return grads, None
        if self.name in _ADAMS:
            average = state["exp_avg"].lerp(grads, 1 - self.beta1)
            return average, self._root(state["exp_avg_sq"], grads.square())
        return grads, self._root(state["sum"], grads.square())

    def _root(self, root: Tensor, squares: Tensor) -> Tensor:
        """The new root of a sum of squares."""
        if self.name == _ROW_MEAN:
            squares = squares.mean(1, keepdim=True)
        if self.name in _ADAMS:
            return (root.square() * self.beta2 + squares * (1 - self.beta2)).sqrt_()
        return (root.square() + squares).sqrt_()

    def _scale(self, lr: float, num_steps: int) -> tuple[float, float]:
        """Factor of the step, and what is added to the root."""
        if self.name not in _ADAMS:
            return lr, self.eps
        root_bias = math.sqrt(1 - self.beta2**num_steps)
        eps = self.eps * root_bias if self.corrects_root else self.eps
        return lr * root_bias / (1 - self.beta1**num_steps), eps

    def _adagrad_ends(self, lr: float, grads: Ends, state: Ends) -> dict[str, Ends]:
        squares = grads.squares()
        least, most = state.low.clamp(min=0), state.high

        def step(grad: Tensor, root: Tensor) -> Tensor:
            return lr * grad / (self._root(root, grad.square()) + self.eps)

        # A larger state brings a step nearer to 0.
        low = step(grads.low, torch.where(grads.low > 0, most, least))
        high = step(grads.high, torch.where(grads.high > 0, least, most))
        roots = Ends(self._root(least, squares.low), self._root(most, squares.high))
        return {"weight": Ends(low, high), "sum": roots}


def _quotient_ends(numerator: Ends, root: Ends, scale: float, eps: float) -> Ends:
    small, large = scale / (root.low + eps), scale / (root.high + eps)
    low = numerator.low * torch.where(numerator.low > 0, large, small)
    high = numerator.high * torch.where(numerator.high > 0, small, large)
    return Ends(low, high)
