"""Updates single rows of arrays, wherever these lie: a store's, or staged records on a device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from embeddings import row_kernels
from embeddings.compiled import in_parts
from embeddings.row_optim import (
    NO_STEP_BEGUN,
    RowOptimizerConfig,
    decayed,
    row_squares,
    state_widths,
    update_rows,
)

_UPDATE_BLOCK_BYTES = 1 << 18
_KERNEL_BLOCK_BYTES = 1 << 24


def update_in_place(
    optimizer: RowOptimizerConfig,
    weights: Tensor,
    states: Mapping[str, Tensor],
    rows_K: Tensor,
    grads_KD: Tensor,
    *,
    lr: float,
    num_steps: int,
    row_state_K1: Tensor | None = None,
) -> None:
    """One step of the rule for some rows.

    Rows on the CPU are updated by `row_kernels`; on other devices, and where the state of whole
    rows was made elsewhere, by `update_rows`, in blocks: what a rule makes on its way stays in the
    cache, and needs no memory of the size of all touched rows. Both are the same arithmetic, and
    may differ in last bits.

    Args:
        optimizer: rule and constants.
        weights: `(R, D)`.
        states: `(R, width)` by name; written only without `row_state_K1`.
        rows_K: distinct rows of these, int64.
        grads_KD: one gradient per row, duplicates summed.
        lr: learning rate.
        num_steps: number of this step in the run, from 1.
        row_state_K1: see `update_rows`.

    Raises:
        ValueError: see `_check_rows`.
        IndexError: for a row that isn't there.
    """
    if row_state_K1 is None and _has_kernel(weights, *states.values()):
        _check_rows(optimizer, weights, states, rows_K, grads_KD)
        # In blocks for the little that is worked out for all of a block's rows before.
        block_rows = max(1, _KERNEL_BLOCK_BYTES // max(1, weights.shape[1] * weights.itemsize))
        for low in range(0, rows_K.numel(), block_rows):
            block = slice(low, low + block_rows)
            _update_by_kernel(
                optimizer,
                weights,
                states,
                rows_K[block],
                grads_KD[block],
                lr=lr,
                num_steps=num_steps,
            )
        return
    block_rows = max(1, _UPDATE_BLOCK_BYTES // (weights.shape[1] * weights.element_size()))
    for low in range(0, rows_K.numel(), block_rows):
        block = slice(low, low + block_rows)
        block_rows_K = rows_K[block]
        rows_KD = weights.index_select(0, block_rows_K)
        touched = {name: state.index_select(0, block_rows_K) for name, state in states.items()}
        update_rows(
            optimizer,
            rows_KD,
            touched,
            grads_KD[block],
            lr=lr,
            num_steps=num_steps,
            row_state_K1=None if row_state_K1 is None else row_state_K1[block],
        )
        weights.index_copy_(0, block_rows_K, rows_KD)
        if row_state_K1 is None:
            for name, state in states.items():
                state.index_copy_(0, block_rows_K, touched[name])


def compile_rule(optimizer: RowOptimizerConfig, dtype: torch.dtype) -> None:
    """Compiles a rule's kernel, if that wasn't done before: not within the first step, for which
    other ranks wait."""
    weights, rows_K = torch.zeros(1, 1, dtype=dtype), torch.zeros(1, dtype=torch.int64)
    states = {
        name: torch.ones(1, width, dtype=dtype)
        for name, width in state_widths(optimizer, 1).items()
    }
    update_in_place(optimizer, weights, states, rows_K, weights.clone(), lr=0.0, num_steps=1)


def _has_kernel(*arrays: Tensor) -> bool:
    return all(
        array.device.type == "cpu"
        and array.stride(1) == 1
        and array.dtype in (torch.float32, torch.float64)
        for array in arrays
    )


def _check_rows(
    optimizer: RowOptimizerConfig,
    weights: Tensor,
    states: Mapping[str, Tensor],
    rows_K: Tensor,
    grads_KD: Tensor,
) -> None:
    """Kernels check no index and no type: what is let through here, they write.

    Raises:
        ValueError: for arrays of another shape or type than the kernel's.
        IndexError: for a row that isn't there.
    """
    num_rows, dim = weights.shape
    if rows_K.dim() != 1 or rows_K.dtype != torch.int64 or rows_K.device.type != "cpu":
        raise ValueError(f"rows are {_kind(rows_K)}, must be flat int64 on the CPU")
    widths = state_widths(optimizer, dim)
    if set(states) != set(widths):
        raise ValueError(f"{optimizer.name} has the states {list(widths)}, not {list(states)}")
    expected = {name: (states[name], num_rows, width) for name, width in widths.items()}
    expected["gradients"] = (grads_KD, rows_K.numel(), dim)
    for name, (array, *shape) in expected.items():
        if list(array.shape) != shape or array.dtype != weights.dtype:
            raise ValueError(f"{name}: {_kind(array)}, must be {shape} of {weights.dtype}")
    if grads_KD.device.type != "cpu":
        raise ValueError(f"gradients are on {grads_KD.device}, the rows on the CPU")
    if rows_K.numel():
        first, last = int(rows_K.min()), int(rows_K.max())
        if first < 0 or last >= num_rows:
            raise IndexError(f"rows {first} … {last} of {num_rows}")


def _kind(array: Tensor) -> str:
    return f"{list(array.shape)} of {array.dtype} on {array.device}"


def _update_by_kernel(
    optimizer: RowOptimizerConfig,
    weights: Tensor,
    states: Mapping[str, Tensor],
    rows_K: Tensor,
    grads_KD: Tensor,
    *,
    lr: float,
    num_steps: int,
) -> None:
    if not grads_KD.numel():
        return
    dim, keys = weights.shape[1], rows_K.numpy()
    if optimizer.weight_decay:
        grads_KD = decayed(optimizer, weights.index_select(0, rows_K), grads_KD)
    grads: Any = grads_KD.detach().contiguous().numpy()
    # In the order of the kernels' arguments.
    in_order = [weights, *(states[name] for name in state_widths(optimizer, dim))]
    arrays: list[Any] = [part for array in in_order for part in _flat(array)]
    number = arrays[0].dtype.type  # fp64 constants would have the kernels compute in fp64.
    eps = number(optimizer.eps)
    update: tuple[Any, ...]
    if optimizer.name == "sgd":
        update = row_kernels.sgd, number(lr)
    elif optimizer.name == "adagrad":
        update = row_kernels.adagrad, number(lr), eps
    elif optimizer.name == "rowwise_adagrad":
        squares_K1 = row_squares(grads_KD.detach(), dim).numpy()
        update = row_kernels.rowwise_adagrad, squares_K1, number(lr), eps
    else:
        if num_steps < 1:
            raise ValueError(NO_STEP_BEGUN)
        beta1, beta2 = optimizer.beta1, optimizer.beta2
        step_size = lr * math.sqrt(1 - beta2**num_steps) / (1 - beta1**num_steps)
        shares = number(1 - beta1), number(beta2), number(1 - beta2)
        update = row_kernels.adam, number(step_size), eps, *shares
    kernel, *constants = update
    in_parts(kernel, len(keys), keys, grads, *arrays, *constants)


def _flat(array_RD: Tensor) -> tuple[Any, int]:
    """The memory from the first row to the last as one array, and the distance of two rows in it;
    for `row_kernels`."""
    num_rows, dim = array_RD.shape
    distance = array_RD.stride(0)
    size = (num_rows - 1) * distance + dim
    return array_RD.detach().as_strided((size,), (1,), array_RD.storage_offset()).numpy(), distance
