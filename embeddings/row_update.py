"""Updates single rows of arrays, wherever these lie: a store's, or staged records on a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embeddings.row_optim import RowOptimizerConfig, update_rows

_UPDATE_BLOCK_BYTES = 1 << 18


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

    Works through the rows in blocks: what a rule makes on its way stays in the cache, and needs no
    memory of the size of all touched rows.

    Args:
        optimizer: rule and constants.
        weights: `(R, D)`.
        states: `(R, width)` by name; written only without `row_state_K1`.
        rows_K: distinct rows of these, int64.
        grads_KD: one gradient per row, duplicates summed.
        lr: learning rate.
        num_steps: number of this step in the run, from 1.
        row_state_K1: see `update_rows`.
    """
    block_rows = max(1, _UPDATE_BLOCK_BYTES // (weights.shape[1] * weights.element_size()))
    put_weights = row_writer(weights)
    put_state = {} if row_state_K1 is not None else {n: row_writer(s) for n, s in states.items()}
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
        put_weights(block_rows_K, rows_KD)
        for name, put in put_state.items():
            put(block_rows_K, touched[name])


def row_writer(array_RD: Tensor) -> Callable[[Tensor, Tensor], Any]:
    """A function that does `array_RD[rows_K] = values_KD`, of the same type, for distinct rows.

    By one CPU thread each row is written as one piece of memory; `index_copy_` goes over its
    elements, which took 1.2 to 3 times as long (docs/benchmarks.md). It is left to several threads,
    each of which has its share of the rows in its cache; to other devices; and to rows that don't
    follow each other, as in staged records, which hold rows and state.

    Args:
        array_RD: `(R, D)`.
    """
    if array_RD.device.type != "cpu" or torch.get_num_threads() > 1 or not array_RD.is_contiguous():
        return lambda rows_K, values_KD: array_RD.index_copy_(0, rows_K, values_KD)
    num_columns, dtype = array_RD.shape[1], array_RD.dtype
    row_type = np.dtype((np.void, num_columns * array_RD.element_size()))
    rows: Any = array_RD.detach().view(-1).numpy().view(row_type) if num_columns else None

    def put(rows_K: Tensor, values_KD: Tensor) -> None:
        assert values_KD.dtype == dtype, (values_KD.dtype, dtype)
        assert values_KD.shape == (rows_K.numel(), num_columns), values_KD.shape
        if values_KD.numel():
            values: Any = values_KD.contiguous().view(-1).numpy().view(row_type)
            np.put(rows, rows_K.numpy(), values)

    return put
