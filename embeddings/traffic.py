"""Expected traffic of a table: rows touched, and bytes a step moves under each exchange.

Everything here is an expectation under one model: the lookups of a batch are independent draws from
the id counts. n draws then touch row i with probability 1 - (1 - p_i)^n, and Σ_i of that is the
expected number of distinct rows (the occupancy problem, also known from the coupon collector:
Feller, "An Introduction to Probability Theory and Its Applications" I, chapters II.5 and IX.3).
Real samples are not independent, so real batches touch somewhat fewer rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from embeddings.table import FeatureConfig, TableConfig

_ID_BYTES = 4


@dataclass(frozen=True, eq=False)
class TableStats:
    """How a table is looked up in the training data.

    Attributes:
        lookups_per_sample: mean number of ids of a sample, over all features of the table.
        counts_K: int64, how often each of `ids_K` is looked up in all.
        ids_K: int64, the rows that are looked up at all, in rising order.

    Raises:
        ValueError: where the arrays don't fit together or the ids aren't in rising order.
    """

    lookups_per_sample: float
    counts_K: npt.NDArray[np.int64]
    ids_K: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        if self.lookups_per_sample < 0:
            raise ValueError(f"lookups_per_sample is {self.lookups_per_sample}, must be at least 0")
        if self.counts_K.shape != self.ids_K.shape or self.ids_K.ndim != 1:
            raise ValueError(
                f"counts_K has shape {self.counts_K.shape}, ids_K {self.ids_K.shape}: one count "
                f"per id is needed"
            )
        if np.any(self.ids_K[1:] <= self.ids_K[:-1]) or np.any(self.ids_K[:1] < 0):
            raise ValueError("ids_K must be in rising order, without repeats, and at least 0")
        if np.any(self.counts_K < 0):
            raise ValueError("counts_K must be at least 0")


@dataclass(frozen=True)
class Load:
    """Expected touches of a table's rows, summed up to any row.

    Attributes:
        ids_K: rows with a load, in rising order.
        upto_K1: fp64, `K + 1` values: the load of the first k rows of `ids_K`.
    """

    ids_K: npt.NDArray[np.int64]
    upto_K1: npt.NDArray[np.float64]

    @property
    def total(self) -> float:
        """Expected distinct rows."""
        return float(self.upto_K1[-1])

    def before(self, row: int) -> float:
        """Load of all rows below `row`."""
        return float(self.upto_K1[np.searchsorted(self.ids_K, row)])

    def row_at(self, load: float) -> int:
        """The border between two rows with nearest to `load` before it."""
        index = int(np.searchsorted(self.upto_K1, load))
        if index > 0 and load - self.upto_K1[index - 1] < self.upto_K1[index] - load:
            index -= 1
        return 0 if index == 0 else int(self.ids_K[index - 1]) + 1


class TableTraffic:
    """What one table is expected to cost per step.

    All bytes are those that the samples of *one* rank cause, ids, rows and gradients together,
    including the share that stays on the rank.

    Args:
        table: the table.
        num_features: features that look it up.
        stats: id counts; None: one id per bag, all of them distinct.
        samples_per_rank: samples of a rank's local batch.
        value_bytes: bytes of a value on the wire.

    Raises:
        ValueError: where the counts name a row that the table doesn't have.
    """

    def __init__(
        self,
        table: TableConfig,
        num_features: int,
        stats: TableStats | None,
        *,
        samples_per_rank: float,
        value_bytes: int = 4,
    ) -> None:
        if stats is not None and len(stats.ids_K) and stats.ids_K[-1] >= table.rows:
            raise ValueError(
                f"table {table.name!r}: the id counts name row {stats.ids_K[-1]}, but the table "
                f"has {table.rows} rows"
            )
        self.table = table
        self._stats = stats
        self._vector_bytes = table.dim * value_bytes
        self.num_bags = num_features * samples_per_rank
        """Bags of a rank's local batch."""
        self.num_lookups = (
            self.num_bags if stats is None else stats.lookups_per_sample * samples_per_rank
        )
        """Ids of a rank's local batch."""

    def load(self) -> Load | None:
        """Where the touched rows lie; None without counts. As long as the counts, so not kept."""
        touched_K = self._touched()
        if self._stats is None or touched_K is None:
            return None
        upto_K1 = np.zeros(len(touched_K) + 1)
        np.cumsum(touched_K, out=upto_K1[1:])
        return Load(self._stats.ids_K, upto_K1)

    @cached_property
    def num_distinct(self) -> float:
        """Expected distinct rows of a rank's local batch."""
        touched_K = self._touched()
        if touched_K is None:
            return min(self.num_lookups, float(self.table.rows))
        return float(touched_K.sum())

    def _touched(self) -> npt.NDArray[np.float64] | None:
        if self._stats is None or not self._stats.counts_K.any():
            return None
        return touch_probability(self._stats.counts_K, self.num_lookups)

    def kv_bytes(self, *, col_parts: int = 1) -> float:
        """`kv`: each distinct id goes out to every owner of columns; row and gradient travel."""
        return self.num_distinct * (_ID_BYTES * col_parts + 2 * self._vector_bytes)

    def pooled_bytes(self, *, row_parts: int = 1, col_parts: int = 1) -> float:
        """`pooled`: all ids and the bags' lengths go out; a vector per bag and its gradient travel.

        A bag of L ids over P row owners gets partial sums from those that hold an id of it: in
        expectation P · (1 - (1 - 1/P)^L), were all owners looked up alike.
        """
        if not self.num_bags:
            return 0.0
        bag_length = self.num_lookups / self.num_bags
        vectors_per_bag = row_parts * -np.expm1(
            bag_length * np.log1p(-1 / row_parts) if row_parts > 1 else -np.inf
        )
        ids = (self.num_lookups + self.num_bags * row_parts) * _ID_BYTES * col_parts
        return float(ids + self.num_bags * vectors_per_bag * 2 * self._vector_bytes)

    def replicated_bytes(self, world_size: int) -> float:
        """Replicated: the distinct keys' gradients go to all other ranks, or all rows are summed.

        The cheaper of both: a gather sends (W - 1) · distinct · (key + gradient), a ring's
        all-reduce of the whole table 2 · (W - 1) / W · rows · gradient.
        """
        gathered = (world_size - 1) * self.num_distinct * (_ID_BYTES + self._vector_bytes)
        reduced = 2 * (world_size - 1) / world_size * self.table.rows * self._vector_bytes
        return min(gathered, reduced)


def touch_probability(
    counts_K: npt.NDArray[np.int64], num_lookups: float
) -> npt.NDArray[np.float64]:
    """Probability that `num_lookups` draws from the counts touch each row, 1 - (1 - p)^n, fp64.

    One array of the counts' length is made and worked on in place: tables may have 40 M rows.
    """
    touched_K = counts_K / -float(counts_K.sum())
    if num_lookups == 0:
        return np.zeros_like(touched_K)
    with np.errstate(divide="ignore"):  # The only row looked up: log(1 - 1), and it is touched.
        np.log1p(touched_K, out=touched_K)
    touched_K *= num_lookups
    np.expm1(touched_K, out=touched_K)
    np.negative(touched_K, out=touched_K)
    return touched_K


def table_traffic(
    tables: Sequence[TableConfig],
    features: Sequence[FeatureConfig],
    stats: Mapping[str, TableStats],
    *,
    samples_per_rank: float,
    value_bytes: int = 4,
) -> dict[str, TableTraffic]:
    """The traffic of each table, by name and in order."""
    num_features = dict.fromkeys((table.name for table in tables), 0)
    for feature in features:
        num_features[feature.table] += 1
    return {
        table.name: TableTraffic(
            table,
            num_features[table.name],
            stats.get(table.name),
            samples_per_rank=samples_per_rank,
            value_bytes=value_bytes,
        )
        for table in tables
    }
