"""The update rules of rows: SGD, Adagrad, row-wise Adagrad, lazy Adam.

A rule changes touched rows and their state in place, from one gradient per row in which duplicates
are summed already. It knows no table, key or rank.

Where the rules differ from torch's optimizers over a dense parameter: rows that a step doesn't look
up change neither by weight decay nor by Adam's moments; Adam's bias correction counts the steps of
the run, not of the row; row-wise Adagrad keeps one number per row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from embeddings.field_checks import real_number, shown

RowOptimizerName = Literal["sgd", "adagrad", "rowwise_adagrad", "adam"]


@dataclass(frozen=True)
class RowOptimizerConfig:
    """Which rule updates the rows, and its constants. The learning rate comes with each step.

    Attributes:
        name: `sgd`, `adagrad`, `rowwise_adagrad` or `adam` (lazy).
        eps: added to the square root in the denominator; not read by `sgd`. With 0, a row whose
            gradient and state are both 0 becomes NaN, as in torch.
        weight_decay: L2 factor; `weight_decay · row` is added to the gradient of each touched row.
        beta1: decay of Adam's first moment; read by `adam` only.
        beta2: decay of Adam's second moment; read by `adam` only.

    Raises:
        ValueError: naming the config key, for an unknown rule or an impossible value.
    """

    name: RowOptimizerName = "adagrad"
    eps: float = 1e-8
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999

    def __post_init__(self) -> None:
        names = get_args(RowOptimizerName)
        if not isinstance(self.name, str) or self.name not in names:
            raise ValueError(
                f"optim.sparse.name is {shown(self.name)}, must be one of {list(names)}"
            )
        most = torch.finfo(torch.float32).max  # The updates compute with them in the tables' type.
        for key in ("eps", "weight_decay", "beta1", "beta2"):
            number = real_number(f"optim.sparse.{key}", getattr(self, key), least=0.0, most=most)
            object.__setattr__(self, key, number)
        for key, value in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0 <= value < 1:
                raise ValueError(f"optim.sparse.{key} is {value}, must be at least 0 and below 1")


NO_STEP_BEGUN = "Adam's first step is number 1: begin the step before updating rows"

# The state that is one number for a whole row, by the rule's name.
ROW_STATE = {"rowwise_adagrad": "sum"}


def state_widths(config: RowOptimizerConfig, dim: int) -> dict[str, int]:
    """Numbers of optimizer state per row, by the state's name (torch.optim's names)."""
    widths: dict[str, dict[str, int]] = {
        "sgd": {},
        "adagrad": {"sum": dim},
        "rowwise_adagrad": {"sum": 1},
        "adam": {"exp_avg": dim, "exp_avg_sq": dim},
    }
    return widths[config.name]


def update_rows(
    config: RowOptimizerConfig,
    rows_KD: Tensor,
    state: Mapping[str, Tensor],
    grads_KD: Tensor,
    *,
    lr: float,
    num_steps: int,
    row_state_K1: Tensor | None = None,
) -> None:
    """Apply one step of the rule to `rows_KD` and `state`, in place.

    Args:
        config: rule and constants.
        rows_KD: the touched rows, each once.
        state: per state name `(K, width)`, as declared by `state_widths`.
        grads_KD: one gradient per row; not changed.
        lr: learning rate.
        num_steps: number of this step in the run, from 1; read by Adam's bias correction.
        row_state_K1: new value of a state that belongs to whole rows, where `rows_KD` are not all
            of their columns (`row_squares`); None: it follows from these rows.
    """
    grads_KD = decayed(config, rows_KD, grads_KD)
    if config.name == "sgd":
        rows_KD.sub_(grads_KD, alpha=lr)
    elif config.name == "adagrad":
        sum_KD = state["sum"].addcmul_(grads_KD, grads_KD)
        rows_KD.addcdiv_(grads_KD, sum_KD.sqrt().add_(config.eps), value=-lr)
    elif config.name == "rowwise_adagrad":
        if row_state_K1 is None:
            sum_K1 = state["sum"].add_(row_squares(grads_KD, grads_KD.shape[1]))
        else:
            sum_K1 = state["sum"].copy_(row_state_K1)
        rows_KD.addcdiv_(grads_KD, sum_K1.sqrt().add_(config.eps), value=-lr)
    else:
        _update_adam(config, rows_KD, state, grads_KD, lr=lr, num_steps=num_steps)


def decayed(config: RowOptimizerConfig, rows_KD: Tensor, grads_KD: Tensor) -> Tensor:
    """The gradients with the rule's weight decay."""
    if not config.weight_decay:
        return grads_KD
    return grads_KD.add(rows_KD, alpha=config.weight_decay)


def row_squares(grads_KD: Tensor, dim: int) -> Tensor:
    """What these columns add to row-wise Adagrad's state, `(K, 1)`.

    Args:
        grads_KD: gradients of some columns of the rows, decayed.
        dim: columns of the whole table.
    """
    return grads_KD.square().sum(dim=1, keepdim=True) / dim


def _update_adam(
    config: RowOptimizerConfig,
    rows_KD: Tensor,
    state: Mapping[str, Tensor],
    grads_KD: Tensor,
    *,
    lr: float,
    num_steps: int,
) -> None:
    """Kingma and Ba, "Adam" (2015), section 2's efficient form, on touched rows only.

    As torch.optim.SparseAdam: `eps` is added to the uncorrected square root.
    """
    if num_steps < 1:
        raise ValueError(NO_STEP_BEGUN)
    exp_avg_KD = state["exp_avg"].lerp_(grads_KD, 1 - config.beta1)
    exp_avg_sq_KD = state["exp_avg_sq"]
    exp_avg_sq_KD.mul_(config.beta2).addcmul_(grads_KD, grads_KD, value=1 - config.beta2)
    correction1 = 1 - config.beta1**num_steps
    correction2 = 1 - config.beta2**num_steps
    step_size = lr * math.sqrt(correction2) / correction1
    rows_KD.addcdiv_(exp_avg_KD, exp_avg_sq_KD.sqrt().add_(config.eps), value=-step_size)
