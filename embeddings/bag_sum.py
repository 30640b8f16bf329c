"""The one kernel of the torch backend: (weighted) sums of rows by bag, in a fixed order."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def bag_sum(rows_RD: Tensor, index_L: Tensor, offsets: Tensor, weights_L: Tensor | None) -> Tensor:
    """(Weighted) sum of `rows_RD[index_L]` per bag, each by one thread in the order of `index_L`.

    A lookup is such a sum over a table's rows; its backward is the transposed one, over the
    gradients of the bags; the sum over ranks of the gradients of a key is one over what came in.

    Args:
        rows_RD: `(R, D)`.
        index_L: int64 rows.
        offsets: int64, one more than bags; bag i is `index_L[offsets[i] : offsets[i+1]]`.
        weights_L: factor of each, or None where all are 1.

    Returns:
        `(bags, D)`; an empty bag gives 0.
    """
    if not index_L.numel():
        return torch.zeros(
            offsets.numel() - 1, rows_RD.shape[1], dtype=rows_RD.dtype, device=rows_RD.device
        )
    with torch.no_grad():
        return F.embedding_bag(
            index_L,
            rows_RD,
            offsets,
            mode="sum",
            per_sample_weights=weights_L,
            include_last_offset=True,
        )
