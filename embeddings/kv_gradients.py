"""KV gradients: the only form in which a gradient of rows exists outside a fused kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from embeddings.bag_sum import bag_sum
from embeddings.keys import sort_keys


class KVGradients(NamedTuple):
    """Gradients of one table group's rows.

    Attributes:
        group: index of the table group.
        keys_K: int64 keys, sorted and distinct.
        grads_KD: the gradient of each key's row, duplicates summed.
    """

    group: int
    keys_K: Tensor
    grads_KD: Tensor


def sum_kv(parts: Sequence[Sequence[KVGradients]]) -> list[KVGradients]:
    """Sum gradients of several micro-batches (or of several kinds of exchange), key by key.

    Args:
        parts: results of `ShardedEmbeddings.backward`, in the order of the samples.

    Returns:
        One `KVGradients` per group that occurs, keys sorted and distinct. Equal keys are summed in
        the order of the parts.
    """
    by_group: dict[int, list[KVGradients]] = {}
    for part in parts:
        for gradients in part:
            by_group.setdefault(gradients.group, []).append(gradients)
    summed: list[KVGradients] = []
    for group, entries in sorted(by_group.items()):
        if len(entries) == 1:
            summed.append(entries[0])
            continue
        ordered = sort_keys(torch.cat([entry.keys_K for entry in entries]))
        grads_LD = torch.cat([entry.grads_KD for entry in entries])
        grads_KD = bag_sum(grads_LD, ordered.order_L, ordered.starts, None)
        summed.append(KVGradients(group, ordered.keys_K, grads_KD))
    return summed
