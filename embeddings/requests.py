"""What a rank asks of the others for one batch, and what it serves: integer work, no communication.

For each key space a rank makes a `Request`: the keys, packed by the rank they lie on, and how the
vectors that come back become pooled columns. What the other ranks asked of this one arrives as a
`Service`. Both work on ids alone, so they can be made any number of steps ahead.

    kv       a request is each distinct key once; a vector comes back for each key, and the
             requester pools
    pooled   a request is bags of keys, only those bags that have keys on that rank; the owner
             pools, and one partial sum comes back for each such bag
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from data.batch import JaggedIds
from embeddings.keys import sort_keys
from embeddings.layout import KeySpace, keys_of
from embeddings.router import (
    BagRows,
    SampleMajorBags,
    key_factors,
    offsets_of,
    row_of_id,
    sample_major,
)
from embeddings.table import FeatureConfig

Int64Array = npt.NDArray[np.int64]


class VectorBags(NamedTuple):
    """In which bags each received vector occurs: the transposed lookup of the requester.

    Attributes:
        bags_L: int64 rows (see `BagRows`) of the bags, grouped by vector.
        starts: int64, one more than vectors; those of vector m are `bags_L[starts[m]:starts[m+1]]`.
        weights_L: factor of each occurrence, or None where all are 1.
    """

    bags_L: Tensor
    starts: Tensor
    weights_L: Tensor | None


class HotPart(NamedTuple):
    """Which of a request's distinct keys are hot rows of a table in host memory, which every rank
    has.

    Attributes:
        cold_K: positions of the others.
        hot_K: positions of the hot ones.
        slots_K: int64 slots of the hot ones, ascending.
    """

    cold_K: Tensor
    hot_K: Tensor
    slots_K: Tensor


SplitHot = Callable[[Int64Array, Int64Array], HotPart]
"""From distinct ascending keys and how often each occurs in the batch."""


@dataclass(frozen=True, eq=False)
class Request:
    """What this rank asks of all ranks in one key space.

    Attributes:
        keys_L: int64, rank by rank, less the rank's base: distinct and ascending for `kv`, bag by
            bag for `pooled`.
        num_keys: per rank how many of them.
        bag_lengths: int64 keys of each bag, rank by rank; None for `kv`.
        bag_weights_L: fp32 factors of the keys, or None where all are 1 and for `kv`.
        num_vectors: per rank the vectors that come back: keys (`kv`) or bags (`pooled`).
        bags: the pooled columns as bags of received vectors, which lie rank by rank.
        vectors: the transposed of `bags`.
        hot: of a space in host memory, which of the distinct keys are hot: only the others are in
            `keys_L`. `bags` and `vectors` speak of all distinct keys in ascending order.
    """

    keys_L: Int64Array
    num_keys: tuple[int, ...]
    bag_lengths: Int64Array | None
    bag_weights_L: npt.NDArray[np.float32] | None
    num_vectors: tuple[int, ...]
    bags: SampleMajorBags
    vectors: VectorBags
    hot: HotPart | None = None


@dataclass(frozen=True, eq=False)
class Service:
    """What all ranks ask of this one in one key space.

    Attributes:
        keys_L: int64 keys of this rank's group, rank after asking rank.
        offsets: bags in `keys_L`; None for `kv`, where each key is a bag of its own.
        weights_L: factor of each key, of the table's type, or None where all are 1.
        num_vectors: per asking rank the vectors to send.
    """

    keys_L: Tensor
    offsets: Tensor | None
    weights_L: Tensor | None
    num_vectors: tuple[int, ...]

    @cached_property
    def by_key(self) -> tuple[Tensor, VectorBags]:
        """The distinct keys, and which of the vectors each occurs in (at the first call)."""
        ordered = sort_keys(self.keys_L)
        if self.offsets is None:
            return ordered.keys_K, VectorBags(ordered.order_L, ordered.starts, None)
        lengths = self.offsets.diff()
        bag_of_id_L = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
        weights_L = None if self.weights_L is None else self.weights_L[ordered.order_L]
        vectors = VectorBags(bag_of_id_L[ordered.order_L], ordered.starts, weights_L)
        return ordered.keys_K, vectors


class _SliceIds(NamedTuple):
    """The ids of a feature slice, feature-major over the slices of a space.

    Attributes:
        keys_L: keys of the space.
        lengths_FB: keys per bag.
        kept_L: which ids of the slices' features have a key here, or None where all have one.
    """

    keys_L: Int64Array
    lengths_FB: Int64Array
    kept_L: npt.NDArray[np.bool_] | None


def plan_request(
    space: KeySpace,
    features: Sequence[FeatureConfig],
    ids: JaggedIds,
    dtype: torch.dtype,
    split: SplitHot | None = None,
    grad_rows: BagRows | None = None,
) -> Request:
    """This rank's request in one key space for one batch; its ids have been checked.

    Args:
        space: the key space.
        features: every sparse feature.
        ids: the batch.
        dtype: type of the factors.
        split: tells hot keys, of which none is asked for; None: all are asked for.
        grad_rows: where the gradients of the bags lie; None: in a matrix of their own.
    """
    routed = _route(space, ids)
    if space.exchange == "kv":
        return _plan_kv(space, features, ids, routed, dtype, split, grad_rows)
    return _plan_pooled(space, features, ids, routed, dtype, grad_rows)


def _plan_kv(
    space: KeySpace,
    features: Sequence[FeatureConfig],
    ids: JaggedIds,
    routed: _SliceIds,
    dtype: torch.dtype,
    split: SplitHot | None,
    grad_rows: BagRows | None,
) -> Request:
    ordered = sort_keys(torch.from_numpy(routed.keys_L))
    keys_K = ordered.keys_K.numpy()
    hot = None
    if split is not None:
        hot = split(keys_K, np.diff(ordered.starts.numpy()))
        keys_K = keys_K[hot.cold_K.numpy()]
    bounds = np.searchsorted(keys_K, space.bases)
    num_keys = np.diff(bounds)
    weights_L = _kept(key_factors(features, [part.feature for part in space.slices], ids), routed)
    offsets = offsets_of(routed.lengths_FB.reshape(-1))
    weights = None if weights_L is None else torch.from_numpy(weights_L).to(dtype)
    # The vector of a key is at the key's place among the distinct ones.
    bags = sample_major(routed.lengths_FB, offsets, ordered.inverse_L(), weights)
    order_L = ordered.order_L
    bag_of_id_L = torch.from_numpy(row_of_id(routed.lengths_FB, grad_rows))
    vectors = VectorBags(
        bag_of_id_L[order_L], ordered.starts, None if weights is None else weights[order_L]
    )
    counts = tuple(num_keys.tolist())
    return Request(
        keys_L=keys_K - np.repeat(space.bases[:-1], num_keys),
        num_keys=counts,
        bag_lengths=None,
        bag_weights_L=None,
        num_vectors=counts,
        bags=bags,
        vectors=vectors,
        hot=hot,
    )


def _plan_pooled(
    space: KeySpace,
    features: Sequence[FeatureConfig],
    ids: JaggedIds,
    routed: _SliceIds,
    dtype: torch.dtype,
    grad_rows: BagRows | None,
) -> Request:
    order_L, bag_P, lengths_P, num_keys, num_vectors = (
        _ranks_of_slices(space, routed.lengths_FB)
        if all(part.covers_table and len(part.key_shifts) == 1 for part in space.slices)
        else _ranks_of_keys(space, routed)
    )

    # The owner sums; a mean is divided here, by the length of the whole bag.
    positions = [part.feature for part in space.slices]
    bag_weights_L = _kept(key_factors(features, positions, ids, divide_means=False), routed)
    num_bags = routed.lengths_FB.size
    factor_bags = _mean_factors(space, features, ids)
    vector_weights = None if factor_bags is None else torch.from_numpy(factor_bags[bag_P]).to(dtype)
    by_bag_P = np.argsort(bag_P, kind="stable")
    bags = SampleMajorBags(
        keys_L=torch.from_numpy(by_bag_P),
        offsets=torch.from_numpy(offsets_of(np.bincount(bag_P, minlength=num_bags))),
        weights_L=None if vector_weights is None else vector_weights[torch.from_numpy(by_bag_P)],
    )
    row_P = bag_P if grad_rows is None else grad_rows.of_bags(bag_P)
    vectors = VectorBags(torch.from_numpy(row_P), torch.arange(bag_P.size + 1), vector_weights)
    return Request(
        keys_L=routed.keys_L[order_L] - np.repeat(space.bases[:-1], num_keys),
        num_keys=tuple(num_keys.tolist()),
        bag_lengths=lengths_P,
        bag_weights_L=(
            None if bag_weights_L is None else bag_weights_L[order_L].astype(np.float32)
        ),
        num_vectors=tuple(num_vectors.tolist()),
        bags=bags,
        vectors=vectors,
    )


class _RankOrder(NamedTuple):
    """The ids of a key space rank by rank, and their bags; see `Request`.

    Attributes:
        order_L: which ids these are; all, where they lie so.
        bag_P: of each bag on each rank, which sample-major bag it is a part of.
        lengths_P: its keys.
        num_keys: per rank.
        num_vectors: bags, per rank.
    """

    order_L: Int64Array | slice
    bag_P: Int64Array
    lengths_P: Int64Array
    num_keys: Int64Array
    num_vectors: Int64Array


def _ranks_of_slices(space: KeySpace, lengths_FB: Int64Array) -> _RankOrder:
    """Where each slice lies on one rank: work on bags alone, not on each id."""
    num_slices, batch_size = lengths_FB.shape
    first_keys = [part.row_starts[0] + part.key_shifts[0] for part in space.slices]
    rank_F = np.searchsorted(space.bases[1:], first_keys, side="right")
    order_F = np.argsort(rank_F, kind="stable")
    lengths_FB = lengths_FB[order_F]
    is_filled_FB = lengths_FB > 0
    bags_FB = order_F[:, None] + num_slices * np.arange(batch_size)
    keys_F, vectors_F = lengths_FB.sum(axis=1), is_filled_FB.sum(axis=1)
    order_L: Int64Array | slice = slice(None)
    if (order_F[1:] < order_F[:-1]).any():
        starts = offsets_of(keys_F[np.argsort(order_F)])
        order_L = np.concatenate([np.arange(starts[f], starts[f + 1]) for f in order_F])
    num_ranks = len(space.group_of_rank)
    rank_F = rank_F[order_F]
    return _RankOrder(
        order_L,
        bags_FB[is_filled_FB],
        lengths_FB[is_filled_FB],
        np.bincount(rank_F, keys_F, num_ranks).astype(np.int64),
        np.bincount(rank_F, vectors_F, num_ranks).astype(np.int64),
    )


def _ranks_of_keys(space: KeySpace, routed: _SliceIds) -> _RankOrder:
    """Where the ids of a bag may lie on several ranks."""
    num_ranks = len(space.group_of_rank)
    rank_L = np.searchsorted(space.bases[1:], routed.keys_L, side="right")
    order_L = np.argsort(rank_L, kind="stable")
    bag_L = row_of_id(routed.lengths_FB)[order_L]
    rank_L = rank_L[order_L]
    # A bag on a rank is a run of equal (rank, bag): within a rank, ids are still bag after bag.
    is_first_L = np.ones(rank_L.size, dtype=bool)
    is_first_L[1:] = (rank_L[1:] != rank_L[:-1]) | (bag_L[1:] != bag_L[:-1])
    first_P = np.flatnonzero(is_first_L)
    return _RankOrder(
        order_L,
        bag_L[first_P],
        np.diff(np.append(first_P, rank_L.size)),
        np.bincount(rank_L, minlength=num_ranks),
        np.bincount(rank_L[first_P], minlength=num_ranks),
    )


def _route(space: KeySpace, ids: JaggedIds) -> _SliceIds:
    """The key of every id in every slice of the space."""
    values_L, offsets = ids.values_L.numpy(), ids.offsets.numpy()
    batch_size = ids.batch_size
    all_lengths_FB = np.diff(offsets).reshape(ids.num_features, batch_size)
    keys: list[Int64Array] = []
    kept: list[npt.NDArray[np.bool_] | None] = []
    lengths_FB = np.empty((len(space.slices), batch_size), dtype=np.int64)
    for position, part in enumerate(space.slices):
        start = offsets[part.feature * batch_size]
        stop = offsets[(part.feature + 1) * batch_size]
        segment_L = values_L[start:stop]
        part_keys_L, kept_L = keys_of(part, segment_L)
        lengths_B = all_lengths_FB[part.feature]
        if kept_L is not None:
            bag_of_id_L = np.repeat(np.arange(batch_size), lengths_B)
            lengths_B = np.bincount(bag_of_id_L[kept_L], minlength=batch_size)
        lengths_FB[position] = lengths_B
        keys.append(part_keys_L)
        kept.append(kept_L)
    if all(kept_L is None for kept_L in kept):
        return _SliceIds(np.concatenate(keys), lengths_FB, None)
    filled = [
        np.ones(part_keys_L.size, dtype=bool) if kept_L is None else kept_L
        for part_keys_L, kept_L in zip(keys, kept, strict=True)
    ]
    return _SliceIds(np.concatenate(keys), lengths_FB, np.concatenate(filled))


def _kept(
    factors_L: npt.NDArray[np.float64] | None, routed: _SliceIds
) -> npt.NDArray[np.float64] | None:
    """The factors of those ids that have a key in the space."""
    if factors_L is None or routed.kept_L is None:
        return factors_L
    return factors_L[routed.kept_L]


def _mean_factors(
    space: KeySpace, features: Sequence[FeatureConfig], ids: JaggedIds
) -> npt.NDArray[np.float64] | None:
    """Per sample-major bag 1 / (ids in the whole bag) for a mean, else 1; None where all are 1."""
    means = [features[part.feature].pooling == "mean" for part in space.slices]
    if not any(means):
        return None
    lengths_FB = np.diff(ids.offsets.numpy()).reshape(ids.num_features, ids.batch_size)
    lengths_BF = lengths_FB[[part.feature for part in space.slices]].T
    factors_BF = np.where(means, 1.0 / np.maximum(lengths_BF, 1), 1.0)
    return None if (factors_BF == 1).all() else factors_BF.reshape(-1)
