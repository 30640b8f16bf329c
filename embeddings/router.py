"""Routing: ids of a batch → keys of the table groups that every rank holds, and what lookup and
backward need around them. (What is asked of other ranks is planned in `requests.py`.)

Works on ids alone, never on rows, so a batch can be planned any number of steps ahead. Everything
here is integer work of a few passes over the ids, done in NumPy: on one core it takes less time
than waking OpenMP threads, and it may run beside the training thread.

The order of bags. Ids arrive feature-major (`data.batch.JaggedIds`), and so are `keys_L` and
`offsets` of a group, which is what fbgemm reads. The pooled result is sample-major: bag `(f, b)` of
a group with `F` features is row `b · F + f` when the result is seen as one row of `D` per bag. The
torch backend looks up from `GroupPlan.sample_major`, so that its result needs no transposition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from data.batch import JaggedIds
from embeddings.keys import sort_keys
from embeddings.table import FeatureConfig, TableConfig, validate_tables
from embeddings.table_group import TableGroup

Int64Array = npt.NDArray[np.int64]


class IdOutOfRange(ValueError):
    """An id that is not a row of its table.

    Attributes:
        feature: name of the feature.
        table: name of its table.
        id: the offending id.
        rows: rows of the table; ids must be in `0 … rows-1`.
        sample: index of the sample in the batch that was planned.
        feature_index: position of the feature.
        rank: the rank whose part of the batch it is in; None in one process.
    """

    def __init__(
        self,
        *,
        feature: str,
        table: str,
        id: int,
        rows: int,
        sample: int,
        feature_index: int = 0,
        rank: int | None = None,
    ) -> None:
        self.feature, self.table, self.id, self.rows, self.sample = feature, table, id, rows, sample
        self.feature_index, self.rank = feature_index, rank
        batch = "the batch" if rank is None else f"rank {rank}'s part of the batch"
        super().__init__(
            f"feature {feature!r}, table {table!r}: id {id} of sample {sample} of {batch} is "
            f"outside 0 to {rows - 1}; give the table more rows, or let `data` hash, replace or "
            f"drop such ids"
        )


class BagRows(NamedTuple):
    """Where bags lie in a matrix with one row of `D` per bag: bag `(f, b)` is row
    `b · stride + firsts[f]`.

    Of all features' columns together, `(B, S)`, which are such a matrix where every feature's lie
    at a multiple of `D`: gradients are then read where they are. `(b · F + f)` numbers the bags of
    `F` features alone.

    Attributes:
        stride: rows per sample.
        firsts: int64, one per feature.
    """

    stride: int
    firsts: Int64Array

    @classmethod
    def within(cls, starts: Sequence[int], dim: int, num_columns: int) -> BagRows | None:
        """Of features of one dim among others.

        Args:
            starts: first column of each feature.
            dim: `D`.
            num_columns: `S`.

        Returns:
            None where the columns aren't such a matrix.
        """
        if num_columns % dim or any(start % dim for start in starts):
            return None
        return cls(num_columns // dim, np.array(starts, dtype=np.int64) // dim)

    def of_bags(self, bag_P: Int64Array) -> Int64Array:
        """Rows of sample-major bags, `b · F + f`."""
        sample_P, feature_P = np.divmod(bag_P, len(self.firsts))
        return self.stride * sample_P + self.firsts[feature_P]

    @classmethod
    def alone(cls, num_features: int) -> BagRows:
        """Of these features and no others."""
        return cls(num_features, np.arange(num_features))


class SampleMajorBags(NamedTuple):
    """The bags of a group ordered by sample, then feature.

    Attributes:
        keys_L: int64 keys.
        offsets: int64, `B·F + 1`; bag `(b, f)` is `keys_L[offsets[b·F+f] : offsets[b·F+f+1]]`.
        weights_L: factor of each key, or None where all are 1.
    """

    keys_L: Tensor
    offsets: Tensor
    weights_L: Tensor | None


class UniqueKeys(NamedTuple):
    """Each distinct key once, with the bags it occurs in: a lookup, transposed.

    Attributes:
        keys_K: int64, sorted, distinct.
        bags_L: int64 row (see `BagRows`) of each occurrence's bag, grouped by key and, within a
            key, in the feature-major order of the batch.
        starts: int64, `K + 1`; the occurrences of `keys_K[k]` are `bags_L[starts[k]:starts[k+1]]`.
        weights_L: factor of each occurrence, or None where all are 1.
    """

    keys_K: Tensor
    bags_L: Tensor
    starts: Tensor
    weights_L: Tensor | None


@dataclass(frozen=True, eq=False)
class GroupPlan:
    """One batch's work on one table group.

    Attributes:
        features: positions (in the router's feature list) of the group's features, in that order.
        batch_size: `B`.
        keys_L: int64 keys, feature-major over `features`.
        offsets: int64, `F·B + 1`, the bags in `keys_L`.
        weights_L: factor of each key in its bag, of the group's type, or None where all are 1. For
            a mean-pooled feature it is the bag weight divided by the number of ids in the bag.
        grad_rows: where the gradients of the bags lie; None: in a matrix of their own.
    """

    features: tuple[int, ...]
    batch_size: int
    keys_L: Tensor
    offsets: Tensor
    weights_L: Tensor | None
    grad_rows: BagRows | None = None

    @cached_property
    def lengths_FB(self) -> Int64Array:
        """Keys per bag, `(F, B)` (computed at the first call)."""
        return np.diff(self.offsets.numpy()).reshape(len(self.features), self.batch_size)

    @cached_property
    def sample_major(self) -> SampleMajorBags:
        """The same bags in the order of the pooled result (computed at the first call)."""
        return sample_major(self.lengths_FB, self.offsets.numpy(), self.keys_L, self.weights_L)

    @cached_property
    def unique(self) -> UniqueKeys:
        """The distinct keys and where they occur (computed at the first call)."""
        ordered = sort_keys(self.keys_L)
        bag_of_id_L = row_of_id(self.lengths_FB, self.grad_rows)
        weights_L = self.weights_L
        if weights_L is not None:
            weights_L = torch.from_numpy(weights_L.numpy()[ordered.order_L.numpy()])
        return UniqueKeys(
            keys_K=ordered.keys_K,
            bags_L=torch.from_numpy(bag_of_id_L[ordered.order_L.numpy()]),
            starts=ordered.starts,
            weights_L=weights_L,
        )


class Router:
    """Turns the ids of a batch into keys of the table groups.

    Args:
        tables: every table.
        features: every sparse feature, in the order of the batch's ids.
        groups: the table groups that are everywhere; their tables are whole.
        reads_whole_gradient: whether `GroupPlan.unique` is to number bags by their rows in the
            gradient of all features, where that can be.

    Raises:
        ValueError: where names repeat, or a feature's table is unknown.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        features: Sequence[FeatureConfig],
        groups: Sequence[TableGroup],
        *,
        reads_whole_gradient: bool = False,
    ) -> None:
        validate_tables(tables, features)
        by_name = {table.name: table for table in tables}
        self._features = tuple(features)
        self._rows_F = np.array([by_name[f.table].rows for f in features], dtype=np.int64)
        self._groups = tuple(groups)
        self._first_keys = [
            dict(zip((p.table for p in group.pieces), group.first_keys, strict=True))
            for group in groups
        ]
        self._features_of_group = tuple(
            tuple(i for i, f in enumerate(features) if f.table in first_keys)
            for first_keys in self._first_keys
        )
        ends = np.cumsum([by_name[feature.table].dim for feature in features], dtype=np.int64)
        self.grad_rows: list[BagRows | None] = [None for _ in groups]
        if reads_whole_gradient:
            self.grad_rows = [
                BagRows.within(
                    [int(ends[f]) - group.dim for f in of_group], group.dim, int(ends[-1:].sum())
                )
                for group, of_group in zip(groups, self._features_of_group, strict=True)
            ]
        for group in groups:
            for piece in group.pieces:
                table = by_name[piece.table]
                is_whole = (piece.num_rows, piece.dim) == (table.rows, table.dim)
                if not is_whole:
                    raise ValueError(f"table {table.name!r} isn't whole: {piece}")

    @property
    def features_of_group(self) -> tuple[tuple[int, ...], ...]:
        """Per group the positions of its features."""
        return self._features_of_group

    def plan_groups(self, ids: JaggedIds) -> tuple[GroupPlan, ...]:
        """Check the ids and route those of the groups; one plan per group.

        Args:
            ids: CPU tensors, one feature per configured feature, in that order; read, not kept.

        Raises:
            IdOutOfRange: see `check`.
            ValueError: where the number of features differs from the configured one.
        """
        self.check(ids)
        starts = _feature_starts(ids)
        return tuple(
            self._plan_group(group, features, ids, starts, first_keys, grad_rows)
            for group, features, first_keys, grad_rows in zip(
                self._groups,
                self._features_of_group,
                self._first_keys,
                self.grad_rows,
                strict=True,
            )
        )

    def check(self, ids: JaggedIds) -> None:
        """Check the ids of all features, also of those that lead to other ranks.

        Raises:
            IdOutOfRange: for the first id (by feature, then sample) that is negative or ≥ the
                table's rows.
            ValueError: where the number of features differs from the configured one.
        """
        if ids.num_features != len(self._features):
            raise ValueError(
                f"the batch has {ids.num_features} sparse features, the model {len(self._features)}"
            )
        self._check_ids(
            ids.values_L.numpy(), ids.offsets.numpy(), _feature_starts(ids), ids.batch_size
        )

    def _check_ids(
        self, values_L: Int64Array, offsets: Int64Array, feature_starts: Int64Array, batch_size: int
    ) -> None:
        filled_F = np.flatnonzero(np.diff(feature_starts))
        if not filled_F.size:
            return
        # Seen as unsigned, a negative id is larger than any number of rows: one maximum per
        # feature tells both faults.
        starts = feature_starts[filled_F]
        largest = np.maximum.reduceat(values_L.view(np.uint64), starts)
        bad = np.flatnonzero(largest >= self._rows_F[filled_F].astype(np.uint64))
        if not bad.size:
            return
        index = int(filled_F[bad[0]])
        rows = int(self._rows_F[index])
        start, stop = feature_starts[index], feature_starts[index + 1]
        position = int(start + np.argmax(values_L[start:stop].view(np.uint64) >= np.uint64(rows)))
        bag = int(np.searchsorted(offsets, position, side="right")) - 1
        raise self.id_error(index, int(values_L[position]), bag - index * batch_size)

    def id_error(
        self, feature_index: int, bad_id: int, sample: int, rank: int | None = None
    ) -> IdOutOfRange:
        """The error about an id, in words; `rank` where it is another rank's."""
        feature = self._features[feature_index]
        return IdOutOfRange(
            feature=feature.name,
            table=feature.table,
            id=bad_id,
            rows=int(self._rows_F[feature_index]),
            sample=sample,
            feature_index=feature_index,
            rank=rank,
        )

    def _plan_group(
        self,
        group: TableGroup,
        features: tuple[int, ...],
        ids: JaggedIds,
        feature_starts: Int64Array,
        first_keys: dict[str, int],
        grad_rows: BagRows | None,
    ) -> GroupPlan:
        batch_size = ids.batch_size
        values_L, all_offsets = ids.values_L.numpy(), ids.offsets.numpy()
        lengths_FB = np.diff(all_offsets).reshape(ids.num_features, batch_size)[list(features)]
        num_ids = int(lengths_FB.sum())
        keys_L = np.empty(num_ids, dtype=np.int64)
        position = 0
        for feature in features:
            segment_L = values_L[feature_starts[feature] : feature_starts[feature + 1]]
            stop = position + segment_L.size
            first_key = first_keys[self._features[feature].table]
            np.add(segment_L, first_key, out=keys_L[position:stop])
            position = stop
        factors_L = key_factors(self._features, features, ids)
        weights_L = None if factors_L is None else torch.from_numpy(factors_L).to(group.dtype)
        return GroupPlan(
            features=features,
            batch_size=batch_size,
            keys_L=torch.from_numpy(keys_L),
            offsets=torch.from_numpy(offsets_of(lengths_FB.reshape(-1))),
            weights_L=weights_L,
            grad_rows=grad_rows,
        )


def key_factors(
    features: Sequence[FeatureConfig],
    positions: Sequence[int],
    ids: JaggedIds,
    *,
    divide_means: bool = True,
) -> npt.NDArray[np.float64] | None:
    """Factor of each id of some features in its bag: its bag weight, divided by the number of the
    bag's ids for a mean.

    In fp64: a bag weight (fp32) is exact there, and a quotient that is then rounded to fp32 is the
    one that fp32 would give.

    Args:
        features: every sparse feature.
        positions: of those that are wanted, in that order.
        ids: the batch.
        divide_means: False leaves the division of means to the caller.

    Returns:
        One factor per id, feature after feature; None where all are 1.
    """
    lengths_FB = np.diff(ids.offsets.numpy()).reshape(ids.num_features, ids.batch_size)
    divides = [
        divide_means and features[f].pooling == "mean" and bool((lengths_FB[f] > 1).any())
        for f in positions
    ]
    if ids.weights_L is None and not any(divides):
        return None
    starts = _feature_starts(ids)
    parts: list[npt.NDArray[np.float64]] = []
    for feature, is_divided in zip(positions, divides, strict=True):
        start, stop = starts[feature], starts[feature + 1]
        if ids.weights_L is None:
            factors_L = np.ones(stop - start)
        else:
            factors_L = ids.weights_L[start:stop].numpy().astype(np.float64)
        if is_divided:
            factors_L /= np.repeat(lengths_FB[feature], lengths_FB[feature])
        parts.append(factors_L)
    factors_L = np.concatenate(parts) if parts else np.empty(0)
    return None if (factors_L == 1).all() else factors_L


def _feature_starts(ids: JaggedIds) -> Int64Array:
    """`F + 1` positions in `values_L` where the features' ids begin."""
    offsets: Int64Array = ids.offsets.numpy()
    if not ids.batch_size:
        return offsets[:1].repeat(ids.num_features + 1)
    return offsets[:: ids.batch_size]


def sample_major(
    lengths_FB: Int64Array, offsets: Int64Array, keys_L: Tensor, weights_L: Tensor | None
) -> SampleMajorBags:
    """Feature-major bags in the order of the pooled result: by sample, then feature.

    Args:
        lengths_FB: keys per bag.
        offsets: `F·B + 1`, where each bag starts.
        keys_L: keys, bag `(f, b)` after bag.
        weights_L: factor of each key, or None where all are 1.
    """
    length = common_length(lengths_FB)
    if length is not None:
        # Bags of one length: a transposition, several times as fast as a gather.
        def transposed(values_L: Tensor) -> Tensor:
            bags = values_L.numpy().reshape(*lengths_FB.shape, length)
            return torch.from_numpy(bags.transpose(1, 0, 2).reshape(-1))

        return SampleMajorBags(
            keys_L=transposed(keys_L),
            offsets=torch.from_numpy(offsets),  # The same, whatever the order of the bags.
            weights_L=None if weights_L is None else transposed(weights_L),
        )
    starts_BF = offsets[:-1].reshape(lengths_FB.shape).T.reshape(-1)
    lengths = lengths_FB.T.reshape(-1)
    major_offsets = offsets_of(lengths)
    # Where a bag starts, less where it goes: repeated over its ids, it is each id's shift.
    source_L = np.repeat(starts_BF - major_offsets[:-1], lengths)
    source_L += np.arange(source_L.size)
    return SampleMajorBags(
        keys_L=torch.from_numpy(keys_L.numpy()[source_L]),
        offsets=torch.from_numpy(major_offsets),
        weights_L=None if weights_L is None else torch.from_numpy(weights_L.numpy()[source_L]),
    )


def row_of_id(lengths_FB: Int64Array, rows: BagRows | None = None) -> Int64Array:
    """Of each key of feature-major bags, the row of its bag; without `rows` its sample-major bag,
    `b · F + f`."""
    num_features, batch_size = lengths_FB.shape
    stride, firsts = rows if rows is not None else BagRows.alone(num_features)
    bags = (firsts[:, None] + stride * np.arange(batch_size)).reshape(-1)
    length = common_length(lengths_FB)
    if length == 1:
        return bags
    return np.repeat(bags, lengths_FB.reshape(-1) if length is None else length)


def common_length(lengths: Int64Array) -> int | None:
    """The length, at least 1, that all bags have; None where they differ or there is none."""
    if not lengths.size:
        return None
    shortest, longest = int(lengths.min()), int(lengths.max())
    return longest if shortest == longest >= 1 else None


def offsets_of(lengths: Int64Array) -> Int64Array:
    """`n + 1` offsets of segments of these lengths."""
    length = common_length(lengths)
    if length is not None:
        return np.arange(0, lengths.size * length + 1, length)
    offsets = np.zeros(lengths.size + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
