"""KV gradients: the only form in which a gradient of rows exists outside a fused kernel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from embeddings.bag_sum import bag_sum
from embeddings.compiled import compiled
from embeddings.keys import sort_keys

Int64Array = npt.NDArray[np.int64]


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
        entries = [entry for entry in entries if entry.keys_K.numel()] or entries[:1]
        if len(entries) == 1:
            summed.append(entries[0])
            continue
        by_key = sorted(entries, key=lambda entry: int(entry.keys_K[0]))
        if all(int(a.keys_K[-1]) < int(b.keys_K[0]) for a, b in pairwise(by_key)):
            # Keys that follow each other: nothing to sort, nothing to sum.
            keys_K = torch.cat([entry.keys_K for entry in by_key])
            grads_KD = torch.cat([entry.grads_KD for entry in by_key])
            summed.append(KVGradients(group, keys_K, grads_KD))
            continue
        ordered = sort_keys(torch.cat([entry.keys_K for entry in entries]))
        grads_LD = torch.cat([entry.grads_KD for entry in entries])
        grads_KD = bag_sum(grads_LD, ordered.order_L, ordered.starts, None)
        summed.append(KVGradients(group, ordered.keys_K, grads_KD))
    return summed


def are_disjoint(gradients: Sequence[KVGradients]) -> bool:
    """Whether no key of a group occurs in two of them: else its row would be updated twice."""
    by_first_key = sorted(
        (entry for entry in gradients if entry.keys_K.numel()),
        key=lambda entry: (entry.group, int(entry.keys_K[0])),
    )
    for index, entry in enumerate(by_first_key):
        for other in by_first_key[index + 1 :]:
            if other.group != entry.group or int(other.keys_K[0]) > int(entry.keys_K[-1]):
                break
            if _share_a_key(other.keys_K.numpy(), entry.keys_K.numpy()):
                return False
    return True


@compiled
def _share_a_key(keys_K: Int64Array, others_K: Int64Array) -> bool:
    """Whether two sorted arrays have a value in common."""
    k = other = 0
    while k < keys_K.shape[0] and other < others_K.shape[0]:
        if keys_K[k] == others_K[other]:
            return True
        if keys_K[k] < others_K[other]:
            k += 1
        else:
            other += 1
    return False
