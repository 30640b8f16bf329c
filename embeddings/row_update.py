"""Updates single rows of arrays, wherever these lie: a store's, or staged records on a device."""

from __future__ import annotations

from collections.abc import Mapping

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
