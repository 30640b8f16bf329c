"""Keys, sorted: the distinct ones, where each occurs, and which lie in a stretch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class SortedKeys(NamedTuple):
    """Keys grouped by value.

    Attributes:
        keys_K: int64, sorted and distinct.
        order_L: int64 positions of the keys, grouped by key and ascending within a key.
        starts: int64, `K + 1`; the positions of `keys_K[k]` are `order_L[starts[k]:starts[k+1]]`.
    """

    keys_K: Tensor
    order_L: Tensor
    starts: Tensor

    def inverse_L(self) -> Tensor:
        """Of each key, in the original order, its place among the distinct ones."""
        counts = np.diff(self.starts.numpy())
        inverse_L = np.empty(self.order_L.numel(), dtype=np.int64)
        inverse_L[self.order_L.numpy()] = np.repeat(np.arange(counts.size), counts)
        return torch.from_numpy(inverse_L)


def sort_keys(keys_L: Tensor) -> SortedKeys:
    """Sort keys and find the distinct ones.

    Args:
        keys_L: int64, not negative.
    """
    keys: Any = keys_L.numpy()
    num_ids = keys.size
    if not num_ids:
        empty = torch.empty(0, dtype=torch.int64)
        return SortedKeys(empty, empty, torch.zeros(1, dtype=torch.int64))
    position_bits = int(num_ids).bit_length()
    if int(keys.max()).bit_length() + position_bits < 64:
        # Key and position in one number: sorting values is several times as fast as sorting
        # positions by key, and the result is the stable order.
        packed = keys << position_bits
        packed |= np.arange(num_ids)
        packed.sort()
        order_L = packed & ((1 << position_bits) - 1)
        packed >>= position_bits
        sorted_L = packed
    else:
        order_L = np.argsort(keys, kind="stable")
        sorted_L = keys[order_L]
    is_first_L = np.empty(num_ids, dtype=bool)
    is_first_L[0] = True
    np.not_equal(sorted_L[1:], sorted_L[:-1], out=is_first_L[1:])
    first_K = np.flatnonzero(is_first_L)
    return SortedKeys(
        torch.from_numpy(sorted_L[first_K]),
        torch.from_numpy(order_L),
        torch.from_numpy(np.append(first_K, num_ids)),
    )


def sorted_stretch(keys_K: Tensor, first: int, stop: int) -> tuple[int, int]:
    """Positions of the keys `first … stop-1` in ascending `keys_K`, half-open."""
    low, high = np.searchsorted(keys_K.numpy(), [first, stop])
    return int(low), int(high)


def sum_counts(
    parts: Sequence[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The distinct keys of all parts, ascending, and the sums of their counts; both int64.

    Args:
        parts: keys in any order, and how often each occurs.
    """
    return _merge_counts(parts, np.add)


def largest_counts(
    parts: Sequence[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """As `sum_counts`, of keys that several parts may have counted each by itself: the largest
    count of each."""
    return _merge_counts(parts, np.maximum)


def _merge_counts(
    parts: Sequence[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]], merge: np.ufunc
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    empty = np.empty(0, dtype=np.int64)
    keys_L = np.concatenate([empty, *(keys for keys, _ in parts)])
    counts_L = np.concatenate([empty, *(counts for _, counts in parts)])
    if not keys_L.size:
        return keys_L, counts_L
    by_key = sort_keys(torch.from_numpy(keys_L))
    counts_K = merge.reduceat(counts_L[by_key.order_L.numpy()], by_key.starts.numpy()[:-1])
    return by_key.keys_K.numpy(), counts_K
