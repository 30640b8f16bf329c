"""Decoded columns of some rows, and how slices of them become a `Batch`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from data.batch import Batch, JaggedIds


@dataclass(frozen=True)
class Columns:
    """Decoded rows of one lane, as arrays.

    Attributes:
        dense_BN: fp32.
        label_B: fp32, or None.
        weight_B: fp32, or None.
        row_B: int64 row in the part.
        single_FB: int64 ids of the features with exactly one id per bag, `(F_single, B)`.
        bags: the list features, by position.
    """

    dense_BN: np.ndarray
    label_B: np.ndarray | None
    weight_B: np.ndarray | None
    row_B: np.ndarray
    single_FB: np.ndarray
    bags: dict[int, Bags]


@dataclass(frozen=True)
class Bags:
    """A jagged column: bag `b` is `ids_L[offsets[b] : offsets[b + 1]]`."""

    offsets: np.ndarray
    ids_L: np.ndarray
    weights_L: np.ndarray | None

    def take(self, rows: np.ndarray) -> Bags:
        """The bags of `rows`, in that order."""
        lengths = np.diff(self.offsets)[rows]
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        index_L = np.arange(offsets[-1]) + np.repeat(self.offsets[rows] - offsets[:-1], lengths)
        weights_L = None if self.weights_L is None else self.weights_L[index_L]
        return Bags(offsets, self.ids_L[index_L], weights_L)


def assemble_batch(
    pieces: list[tuple[Columns, int, int]],
    *,
    num_features: int,
    single_positions: list[int],
    num_dense: int,
    has_weight: bool = False,
    has_bag_weights: bool = False,
) -> Batch:
    """Slices of decoded columns, one after the other, as one `Batch`.

    Args:
        has_weight, has_bag_weights: what a batch without pieces is to hold: an empty share of a
            rank must have the same parts as the other ranks' shares.
    """
    if not pieces:
        no_values, no_rows = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
        offsets = torch.zeros(1, dtype=torch.int64)
        no_bag_weights = no_values if has_bag_weights else None
        no_ids = JaggedIds(no_rows, offsets, num_features, no_bag_weights)
        no_weights = no_values if has_weight else None
        return Batch(torch.zeros(0, num_dense), no_ids, no_values, no_weights, no_rows)
    first = pieces[0][0]
    dense_BN = np.concatenate([c.dense_BN[a:b] for c, a, b in pieces])
    single_FB = np.concatenate([c.single_FB[:, a:b] for c, a, b in pieces], axis=1)
    label_B = weight_B = None
    if first.label_B is not None:
        label_B = torch.from_numpy(np.concatenate([_of(c.label_B, a, b) for c, a, b in pieces]))
    if first.weight_B is not None:
        weight_B = torch.from_numpy(np.concatenate([_of(c.weight_B, a, b) for c, a, b in pieces]))
    return Batch(
        dense_BN=torch.from_numpy(dense_BN),
        ids=_jagged(pieces, single_FB, num_features, single_positions),
        label_B=label_B,
        weight_B=weight_B,
        row_B=torch.from_numpy(np.concatenate([c.row_B[a:b] for c, a, b in pieces])),
    )


def _jagged(
    pieces: list[tuple[Columns, int, int]],
    single_FB: np.ndarray,
    num_features: int,
    single_positions: list[int],
) -> JaggedIds:
    batch_size = single_FB.shape[1]
    if num_features == 0:
        no_ids = torch.zeros(0, dtype=torch.int64)
        return JaggedIds(no_ids, torch.zeros(1, dtype=torch.int64), 0, num_samples=batch_size)
    if len(single_positions) == num_features:
        all_one = torch.from_numpy(np.arange(num_features * batch_size + 1))
        return JaggedIds(torch.from_numpy(single_FB.reshape(-1)), all_one, num_features)
    single_at = {position: row for row, position in enumerate(single_positions)}
    has_weights = any(b.weights_L is not None for b in pieces[0][0].bags.values())
    ids: list[np.ndarray] = []
    lengths: list[np.ndarray] = []
    weights: list[np.ndarray] = []
    for position in range(num_features):
        if position in single_at:
            ids.append(single_FB[single_at[position]])
            lengths.append(np.ones(batch_size, dtype=np.int64))
            weights.append(np.ones(batch_size, dtype=np.float32))
            continue
        for columns, a, b in pieces:
            bags = columns.bags[position]
            begin, end = int(bags.offsets[a]), int(bags.offsets[b])
            ids.append(bags.ids_L[begin:end])
            lengths.append(np.diff(bags.offsets[a : b + 1]))
            weights.append(
                np.ones(end - begin, dtype=np.float32)
                if bags.weights_L is None
                else bags.weights_L[begin:end]
            )
    offsets = np.zeros(num_features * batch_size + 1, dtype=np.int64)
    np.cumsum(np.concatenate(lengths), out=offsets[1:])
    return JaggedIds(
        torch.from_numpy(np.concatenate(ids)),
        torch.from_numpy(offsets),
        num_features,
        torch.from_numpy(np.concatenate(weights)) if has_weights else None,
    )


def _of(values: np.ndarray | None, start: int, stop: int) -> np.ndarray:
    assert values is not None
    return values[start:stop]
