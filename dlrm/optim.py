"""Optimizers as configured: settings of both parts, learning-rate schedule, gradient clipping.

The *dense* part is the network, stepped by torch; the *sparse* part is the tables' rows, updated
where they live (`embeddings.row_optim`). Schedule, eps, weight decay and clipping mean the same
for both.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from data.errors import UserError

_ADAM_FAMILY = ("adam", "adamw")
_DEFAULT_EPS = 1e-8


@dataclass
class PartOptimConfig:
    """What the optimizers of both parts have in common."""

    name: str = "adagrad"
    """The update rule."""
    lr: float = 0.005
    """Learning rate before the schedule's factor. The default, with Adagrad on both parts, is the
    setting of MLPerf's DLRM-DCNv2 reference."""
    eps: float | None = None
    """Added to the root in the denominator of adaptive rules; null: `optim.eps`. With 0, a gradient
    that was zero from the start gives NaN (0/0)."""
    weight_decay: float = 0.0
    """L2: this times the weight is added to its gradient (after clipping); `adamw`: the weight
    shrinks by lr times this instead, apart from the gradient."""
    beta1: float = 0.9
    """Adam: decay of the mean gradient."""
    beta2: float = 0.999
    """Adam: decay of the mean squared gradient."""

    _key: ClassVar[str] = "optim"
    _names: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        if self.name not in self._names:
            raise UserError(
                f"{self._key}.name={self.name}: must be one of {', '.join(self._names)}"
            )
        _check_at_least_0(self._key, lr=self.lr, eps=self.eps, weight_decay=self.weight_decay)
        for key, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0 <= beta < 1:
                raise UserError(f"{self._key}.{key}={beta}: must be at least 0 and below 1")
        ignored = []
        if self.name == "sgd" and self.eps is not None:
            ignored.append(f"eps={self.eps}")
        if self.name not in _ADAM_FAMILY:
            ignored += [f"beta1={self.beta1}"] if self.beta1 != PartOptimConfig.beta1 else []
            ignored += [f"beta2={self.beta2}"] if self.beta2 != PartOptimConfig.beta2 else []
        for option in ignored:
            warnings.warn(
                f"{self._key}.{option} is ignored: {self._key}.name={self.name} has no such option",
                stacklevel=3,
            )


@dataclass
class DenseOptimConfig(PartOptimConfig):
    """Optimizer of the dense network (`optim.dense.…`), one of torch's own.

    Raises:
        UserError: (a `ValueError`) for a value out of its limits; the message names the key.
    """

    name: str = "adagrad"
    """`sgd` (without momentum), `adagrad` (accumulator from 0), `adam` or `adamw`."""

    _key: ClassVar[str] = "optim.dense"
    _names: ClassVar[tuple[str, ...]] = ("sgd", "adagrad", "adam", "adamw")


@dataclass
class SparseOptimConfig(PartOptimConfig):
    """Optimizer of the tables' rows (`optim.sparse.…`). Only rows of the batch are touched.

    Raises:
        UserError: (a `ValueError`) for a value out of its limits; the message names the key.
    """

    name: str = "adagrad"
    """`sgd`, `adagrad` (one accumulator per element, from 0), `rowwise_adagrad` (one per row: the
    mean square of its gradient) or `adam` (lazy, with one global step count)."""

    _key: ClassVar[str] = "optim.sparse"
    _names: ClassVar[tuple[str, ...]] = ("sgd", "adagrad", "rowwise_adagrad", "adam")


@dataclass
class ScheduleConfig:
    """Factor of both learning rates by step (`optim.schedule.…`): warm-up, hold, decay.

    `Schedule` gives the formula.

    Raises:
        UserError: (a `ValueError`) for a value out of its limits; the message names the key.
    """

    warmup_steps: int = 0
    """Steps of linear warm-up; the first has the factor 1/warmup_steps, the last 1."""
    hold_steps: int | None = None
    """Steps with factor 1 after the warm-up. null: to the end of the run, less `decay_steps`."""
    decay_steps: int = 0
    """Steps of polynomial decay after the hold; 0: no decay."""
    decay_power: float = 2.0
    """Exponent of the decay; 1 is linear."""
    end_factor: float = 0.0
    """The decay stops at this factor, which holds from there on."""
    warmup_share: float | None = None
    """`warmup_steps` as a share of the run's steps, 0 to 1; null: `warmup_steps` says it."""
    decay_share: float | None = None
    """`decay_steps` as a share of the run's steps, 0 to 1; null: `decay_steps` says it."""

    def __post_init__(self) -> None:
        key = "optim.schedule"
        self._check_shares()
        _check_at_least_0(
            key,
            warmup_steps=self.warmup_steps,
            hold_steps=self.hold_steps,
            decay_steps=self.decay_steps,
        )
        if not (self.decay_power > 0 and math.isfinite(self.decay_power)):
            raise UserError(f"{key}.decay_power={self.decay_power}: must be above 0 and finite")
        if not 0 <= self.end_factor <= 1:
            raise UserError(f"{key}.end_factor={self.end_factor}: must be between 0 and 1")
        if self.decay_steps > 0 or self.decay_share:
            return
        if self.hold_steps is not None:
            raise UserError(
                f"{key}.hold_steps={self.hold_steps} says when the decay begins, but there is "
                f"none: set {key}.decay_steps or {key}.decay_share above 0, or "
                f"{key}.hold_steps=null"
            )
        for name in ("decay_power", "end_factor"):
            value = getattr(self, name)
            if value != getattr(ScheduleConfig, name):
                warnings.warn(
                    f"{key}.{name}={value} is ignored: {key}.decay_steps is 0", stacklevel=3
                )

    def _check_shares(self) -> None:
        key = "optim.schedule"
        shares = {"warmup": self.warmup_share, "decay": self.decay_share}
        for name, share in shares.items():
            if share is None:
                continue
            if not 0 <= share <= 1:
                raise UserError(
                    f"{key}.{name}_share={share}: must be between 0 and 1, a share of the run's "
                    f"steps ({key}.{name}_steps is their number)"
                )
            if steps := getattr(self, f"{name}_steps"):
                raise UserError(
                    f"{key}.{name}_steps={steps} and {key}.{name}_share={share} say the same in "
                    "two ways: set one of them"
                )
        warmup, decay = (share or 0.0 for share in shares.values())
        if warmup + decay > 1:
            raise UserError(
                f"{key}.warmup_share={warmup} and {key}.decay_share={decay} are more than the "
                "whole run together: lower one of them"
            )

    def in_steps(self, total_steps: int | None) -> ScheduleConfig:
        """The same with steps in place of shares, rounded; a share above 0 is a step at least.

        Args:
            total_steps: steps of the run; None where it isn't known in advance.

        Raises:
            UserError: for a share of an unknown number.
        """
        if self.warmup_share is None and self.decay_share is None:
            return self
        if total_steps is None:
            raise UserError(
                "optim.schedule.warmup_share and decay_share are shares of the run's steps, whose "
                "number isn't known: set warmup_steps and decay_steps, or train.max_steps"
            )
        warmup, decay = self.warmup_steps, self.decay_steps
        if self.warmup_share is not None:
            warmup = _steps_of(self.warmup_share, total_steps)
        if self.decay_share is not None:
            decay = _steps_of(self.decay_share, total_steps)
            # Two that are rounded up may be one step too many together.
            if self.warmup_share is not None and self.hold_steps is None:
                decay = min(decay, total_steps - warmup)
        # A decay that is no step long: nothing is left of the hold before it.
        hold = self.hold_steps if decay else None
        end = self.end_factor if decay else 0.0
        power = self.decay_power if decay else ScheduleConfig.decay_power
        return ScheduleConfig(warmup, hold, decay, power, end)


@dataclass
class OptimConfig:
    """Optimizers of both parts (`optim.…`).

    Raises:
        UserError: (a `ValueError`) for a value out of its limits; the message names the key.
    """

    eps: float = _DEFAULT_EPS
    """eps of both parts, where `dense.eps` or `sparse.eps` doesn't say otherwise."""
    sparse: SparseOptimConfig = field(default_factory=SparseOptimConfig)
    """The tables' rows."""
    dense: DenseOptimConfig = field(default_factory=DenseOptimConfig)
    """The dense network."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Factor of both learning rates by step."""
    clip_norm: float | None = None
    """Largest global L2 norm of the gradients of both parts together; null: no clipping."""

    def __post_init__(self) -> None:
        _check_at_least_0("optim", eps=self.eps)
        if self.clip_norm is not None and not (
            self.clip_norm > 0 and math.isfinite(self.clip_norm)
        ):
            raise UserError(
                f"optim.clip_norm={self.clip_norm}: must be above 0 and finite, or null for no "
                "clipping"
            )
        if self.eps != _DEFAULT_EPS and self.sparse.name == self.dense.name == "sgd":
            warnings.warn(
                f"optim.eps={self.eps} is ignored: sgd, of both parts, has no eps", stacklevel=3
            )

    def effective_eps(self, part: PartOptimConfig) -> float:
        """eps of `dense` or `sparse`: its own where it is set, else the common one."""
        return self.eps if part.eps is None else part.eps


def build_dense_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """torch's optimizer over the model's parameters, with every setting given explicitly.

    Build it once the model has its dtype and device: Adagrad's state is made here. torch's fused
    kernels are used: one pass over the weights, about 4 times as fast as its loop on CPU and equal
    to it within rounding.

    Returns:
        An optimizer whose only group has `lr` before the schedule's factor.
    """
    dense, eps = config.dense, config.effective_eps(config.dense)
    parameters = list(model.parameters())
    decay, betas = dense.weight_decay, (dense.beta1, dense.beta2)
    if dense.name == "sgd":
        return torch.optim.SGD(parameters, dense.lr, momentum=0, weight_decay=decay, fused=True)
    if dense.name == "adagrad":
        return torch.optim.Adagrad(
            parameters,
            dense.lr,
            lr_decay=0,
            weight_decay=decay,
            initial_accumulator_value=0,
            eps=eps,
            fused=True,
        )
    if dense.name == "adam":
        return torch.optim.Adam(parameters, dense.lr, betas, eps, weight_decay=decay, fused=True)
    assert dense.name == "adamw"
    return torch.optim.AdamW(parameters, dense.lr, betas, eps, weight_decay=decay, fused=True)


class Schedule:
    """Factor of the dense and the sparse learning rate alike, by step, counted from 0.

    With `begin = warmup_steps + hold_steps` and `end = begin + decay_steps`:

        t < warmup_steps      (t + 1) / warmup_steps
        t < begin             1
        t < end               max(((end - t) / decay_steps) ^ decay_power, end_factor)
        then                  end_factor        (1 where there is no decay)

    The shape is that of NVIDIA's DLRM (DeepLearningExamples) and of facebookresearch/dlrm's
    `LRPolicyScheduler`; the latter's warm-up starts at 0. Where `hold_steps` is null the hold lasts
    until the decay, if any, ends with the run. Shares are taken of the whole run, of a resumed one
    too: of as many steps as it will have had at its end.

    Args:
        config: the settings.
        total_steps: steps of the run; None where it isn't known in advance.

    Raises:
        UserError: where a hold to the end has no known or a too early end for the decay.
    """

    def __init__(self, config: ScheduleConfig, total_steps: int | None) -> None:
        self._config = config = config.in_steps(total_steps)
        hold_steps = config.hold_steps
        if hold_steps is None and config.decay_steps > 0:
            if total_steps is None:
                raise UserError(
                    f"optim.schedule.decay_steps={config.decay_steps} counts from the end of the "
                    "run, which isn't known: set optim.schedule.hold_steps or train.max_steps"
                )
            hold_steps = total_steps - config.warmup_steps - config.decay_steps
            if hold_steps < 0:
                raise UserError(
                    f"optim.schedule.warmup_steps={config.warmup_steps} and "
                    f"optim.schedule.decay_steps={config.decay_steps} don't fit into the run's "
                    f"{total_steps} steps: lower one of them, or set optim.schedule.hold_steps"
                )
        self._decay_begin = None if hold_steps is None else config.warmup_steps + hold_steps
        if total_steps is not None:
            self._warn_of_length(total_steps)

    def _warn_of_length(self, total_steps: int) -> None:
        """Warns of a schedule made for another run; said once, however often it is built."""
        config, begin = self._config, self._decay_begin
        if config.warmup_steps > total_steps:
            warnings.warn(
                f"optim.schedule.warmup_steps={config.warmup_steps:,} exceeds the run's "
                f"{total_steps:,} steps: the learning rates get no further than "
                f"{total_steps / config.warmup_steps:.0%} of optim.dense.lr and optim.sparse.lr; "
                "lower it, or set optim.schedule.warmup_share, a share of the run, instead",
                stacklevel=1,
            )
        elif begin is not None and begin >= total_steps:
            warnings.warn(
                f"optim.schedule: the decay would begin at step {begin:,}, after the run's "
                f"{total_steps:,} steps; lower optim.schedule.hold_steps, or set it to null: the "
                "decay then ends with the run",
                stacklevel=1,
            )
        if begin is None:
            return
        end = begin + config.decay_steps
        if end < total_steps and config.decay_steps and config.end_factor == 0:
            warnings.warn(
                f"optim.schedule ends at step {end:,}: the last {total_steps - end:,} of "
                f"{total_steps:,} steps have learning rate 0; raise decay_steps or hold_steps, "
                "or set end_factor",
                stacklevel=1,
            )

    def factor(self, step: int) -> float:
        """Factor at `step`, counted from 0 over the whole training (resumed parts included)."""
        assert step >= 0, step
        config = self._config
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        if self._decay_begin is None or step < self._decay_begin:
            return 1.0
        left = (self._decay_begin + config.decay_steps - step) / config.decay_steps
        return max(max(left, 0.0) ** config.decay_power, config.end_factor)


def clip_factor(
    dense_grads: Iterable[Tensor],
    kv_grads: Iterable[Tensor],
    max_norm: float,
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Global L2 norm of all gradients, and the factor that brings it down to `max_norm`.

    The factor is min(1, max_norm / (norm + 1e-6)), as in `torch.nn.utils.clip_grad_norm_`; rows
    outside the batch have no gradient, so the norm is that of the whole model. Of a norm that is
    not finite the factor is 0 or NaN: check the norm before using it.

    Args:
        dense_grads: gradients of the dense parameters, already equal on all ranks.
        kv_grads: `grads_KD` of this rank's rows, duplicates summed.
        max_norm: the limit.
        sum_over_ranks: sums the rows' scalar sum of squares over the ranks that own rows; None
            where `kv_grads` are the gradients of all rows.

    Returns:
        (norm, factor), two fp64 scalar tensors; multiplying by them keeps a gradient's dtype.
    """
    dense_squares, kv_squares = _sum_of_squares(dense_grads), _sum_of_squares(kv_grads)
    if sum_over_ranks is not None:
        kv_squares = sum_over_ranks(kv_squares)
    norm = (dense_squares + kv_squares.to(dense_squares.device)).sqrt()
    return norm, (max_norm / (norm + 1e-6)).clamp(max=1.0)


def describe_semantics(config: OptimConfig) -> list[str]:
    """What the user should be told once at start: effective settings, differences from dense torch.

    Returns:
        Lines of text: first the effective settings of both parts, then one line per difference
        that this configuration meets.
    """
    sparse = config.sparse
    lines = [
        f"optimizers: dense {_settings(config, config.dense)}; sparse {_settings(config, sparse)}"
    ]
    if sparse.name == "adam":
        lines.append(
            "sparse adam is lazy: a step moves only the rows of the batch and their moments, with "
            "one step count for all rows (as torch.optim.SparseAdam); dense Adam would move every "
            "row at every step"
        )
    if sparse.name == "rowwise_adagrad":
        lines.append(
            "sparse rowwise_adagrad keeps one number per row, the sum over steps of the mean "
            "square of the row's gradient; torch's Adagrad keeps one per element"
        )
    if sparse.weight_decay > 0:
        lines.append(
            f"sparse weight decay {sparse.weight_decay:g} acts only on the rows of the batch, once "
            "a step however often a row occurs; torch would decay every row at every step"
        )
    if sparse.weight_decay > 0 and config.dense.name == "adamw" and config.dense.weight_decay > 0:
        lines.append(
            "weight decay shrinks the weight itself in dense adamw, but is added to the gradient "
            f"(L2) in sparse {sparse.name}"
        )
    return lines


def _settings(config: OptimConfig, part: PartOptimConfig) -> str:
    text = f"{part.name} lr {part.lr:g}"
    if part.name != "sgd":
        text += f", eps {config.effective_eps(part):g}"
    if part.name in _ADAM_FAMILY:
        text += f", betas {part.beta1:g} {part.beta2:g}"
    return f"{text}, weight decay {part.weight_decay:g}"


def _sum_of_squares(grads: Iterable[Tensor]) -> Tensor:
    """fp64 scalar, on the device of the first gradient."""
    total = torch.zeros((), dtype=torch.float64)
    for index, grad in enumerate(grads):
        dtype = torch.promote_types(grad.dtype, torch.float32)
        square = torch.linalg.vector_norm(grad, dtype=dtype).double().square()
        total = square if index == 0 else total + square.to(total.device)
    return total


def _steps_of(share: float, total_steps: int) -> int:
    return max(round(share * total_steps), 1) if share > 0 else 0


def _check_at_least_0(key: str, **values: float | None) -> None:
    for name, value in values.items():
        if value is not None and not 0 <= value < math.inf:
            raise UserError(f"{key}.{name}={value}: must be at least 0 and finite")
