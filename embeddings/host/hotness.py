"""Which rows of host-resident tables live on the device, and what that choice is expected to give.

Everything follows from one ranking: the rows of all tables by look-ups per byte of record (weights
and optimizer state), then by order of the tables, then by id. Rows of a table with an equal count
are one *class* of that table, and there are few distinct counts, so budgets are divided and curves
drawn over classes; single rows are touched only to name the chosen ones.

    C classes of a table, or of all: largest count first    T tables
"""

from __future__ import annotations

import math
import warnings
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from embeddings.keys import sort_keys
from embeddings.plan_words import counted, shown_bytes

Int64Array = npt.NDArray[np.int64]

_MAX_LINES = 12
_NAME_WIDTH = 24


@dataclass(frozen=True, eq=False)
class TableCounts:
    """How often the rows of a table are looked up, and what a row takes.

    Attributes:
        name: the table's.
        rows: of the table.
        record_bytes: bytes of a row's weights and optimizer state.
        ids_K: int64, the rows that were looked up, in rising order.
        counts_K: int64, how often each of `ids_K` was looked up.
        bags: mean number of ids of a bag, one for each feature that reads the table.

    Raises:
        ValueError: where `rows` or `record_bytes` is below 1, the arrays don't fit together, the
            ids aren't in rising order or aren't rows of the table, or a number is negative.
    """

    name: str
    rows: int
    record_bytes: int
    ids_K: Int64Array
    counts_K: Int64Array
    bags: tuple[float, ...]

    def __post_init__(self) -> None:
        for field, value in (("rows", self.rows), ("record_bytes", self.record_bytes)):
            if value < 1:
                raise ValueError(f"table {self.name!r}: {field} is {value}, must be at least 1")
        if self.counts_K.shape != self.ids_K.shape or self.ids_K.ndim != 1:
            raise ValueError(
                f"table {self.name!r}: counts_K has shape {self.counts_K.shape}, ids_K "
                f"{self.ids_K.shape}: one count per id is needed"
            )
        _check_ids(self.ids_K, self.name, self.rows)
        if np.any(self.counts_K < 0):
            raise ValueError(f"table {self.name!r}: counts_K must be at least 0")
        for length in self.bags:
            if not 0 <= length < math.inf:
                raise ValueError(
                    f"table {self.name!r}: a bag's mean length is {length}, must be at least 0 "
                    f"and finite"
                )

    @property
    def num_bytes(self) -> int:
        """Of all its records."""
        return self.rows * self.record_bytes

    @property
    def lookups_per_sample(self) -> float:
        """Ids of a sample over all features that read the table."""
        return math.fsum(self.bags)

    @cached_property
    def num_lookups(self) -> int:
        """Look-ups counted, of all rows."""
        return int(self.counts_K.sum())

    @cached_property
    def _classes(self) -> _Classes:
        """Kept: sorting the counts is the dear part, and tables may have 40 M rows."""
        counts_C, rows_C = np.unique(self.counts_K[self.counts_K > 0], return_counts=True)
        num_unseen = self.rows - int(rows_C.sum())
        return _Classes(np.append(counts_C[::-1], 0), np.append(rows_C[::-1], num_unseen))


@dataclass(frozen=True, eq=False)
class HotSet:
    """The rows that live on the device, the same on every rank.

    Attributes:
        ids: int64 ids per table, in rising order; of every table, empty where none is hot.
        record_bytes: per table, bytes of a row's weights and optimizer state.
        budget_bytes: what they had to fit into.
    """

    ids: Mapping[str, Int64Array]
    record_bytes: Mapping[str, int]
    budget_bytes: int

    @property
    def num_rows(self) -> int:
        """Hot rows of all tables."""
        return sum(len(ids) for ids in self.ids.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of their records, on each rank; at most `budget_bytes`."""
        return sum(len(ids) * self.record_bytes[name] for name, ids in self.ids.items())


@dataclass(frozen=True)
class TablePrediction:
    """What is expected of one table.

    Attributes:
        hot_rows: rows of it that are hot.
        rows: all its rows.
        hit_share: share of its look-ups that find a hot row.
        num_bytes: of the hot rows' records.
        lookups_per_sample: ids of a sample over all features that read the table.
    """

    hot_rows: int
    rows: int
    hit_share: float
    num_bytes: int
    lookups_per_sample: float

    @property
    def misses_per_sample(self) -> float:
        """Look-ups of a sample that find a cold row, repeats included."""
        return self.lookups_per_sample * (1.0 - self.hit_share)


@dataclass(frozen=True)
class HotPrediction:
    """What is expected of a hot set.

    Attributes:
        row_hit_share: share of all look-ups that find a hot row; 1 where nothing is looked up.
        all_hot_share: share of samples whose every id is hot.
        per_table: the same per table, by name and in order.
    """

    row_hit_share: float
    all_hot_share: float
    per_table: Mapping[str, TablePrediction]


def choose_hot(tables: Sequence[TableCounts], *, budget_bytes: int, whole_rows: int) -> HotSet:
    """The rows to keep on the device.

    First come whole tables, with the ids that were never seen, since one miss makes a sample cold:
    those of at most `whole_rows` rows, the smallest in bytes first, as long as they fit. Then come
    the rows with the most look-ups per byte over all other tables, ties by order of the tables and
    then by id. Where a row doesn't fit, rows with smaller records may still. Rows that were never
    seen are last in that order, so they fill what is left of the budget, and a budget of all
    tables' bytes makes everything hot. Equal arguments give equal sets.

    The ranking is exact for count · record_bytes below 2^52; beyond that near-equal rows of
    different tables may change places.

    Args:
        tables: the tables, with different names.
        budget_bytes: for the records of all hot rows, on each rank; never exceeded.
        whole_rows: tables of at most so many rows are taken whole; 0: none is.

    Raises:
        ValueError: where the budget or `whole_rows` is negative, or two tables share a name.
    """
    hot_rows = _divide([budget_bytes], tables, whole_rows)[0]
    hot = HotSet(
        ids={t.name: _best_ids(t, num) for t, num in zip(tables, hot_rows, strict=True)},
        record_bytes={table.name: table.record_bytes for table in tables},
        budget_bytes=budget_bytes,
    )
    assert hot.num_bytes <= budget_bytes, (hot.num_bytes, budget_bytes)
    return hot


def predict(tables: Sequence[TableCounts], hot: HotSet) -> HotPrediction:
    """What `hot` gives if look-ups go on as counted; the set may come from other counts.

    The hit share of a table is that of its counts; where it has none, hot rows / rows, as if its
    ids were evenly spread. Tables weigh in `row_hit_share` as a sample looks them up.

    `all_hot_share` takes the ids of a sample, of all features and of one bag, as independent: it is
    the product of `hit_share ** m` over the features, with m ids in a mean bag. In real data
    frequent ids come together and bags differ in length, and both give more all-hot samples.

    Raises:
        ValueError: where `hot` isn't of these tables, or names a row that a table doesn't have.
    """
    if set(hot.ids) != {table.name for table in tables}:
        raise ValueError(
            f"the hot set is of the tables {sorted(hot.ids)}, but asked is for "
            f"{sorted(table.name for table in tables)}"
        )
    shares = []
    for table in tables:
        hot_K = hot.ids[table.name]
        _check_ids(hot_K, table.name, table.rows)
        shares.append(_hit_share(table, len(hot_K), _hits(table, hot_K)))
    return _prediction(tables, [len(hot.ids[table.name]) for table in tables], shares)


def hit_curve(table: TableCounts, num_points: int) -> list[tuple[int, float]]:
    """How a table's hit share grows with its hot rows, taken in the order of their counts.

    Args:
        table: the table.
        num_points: at most so many points are given, at least 2.

    Returns:
        (hot rows, hit share) from (0, 0.0) to (rows, 1.0), hot rows rising in even ratios.

    Raises:
        ValueError: where `num_points` is below 2.
    """
    if num_points < 2:
        raise ValueError(f"num_points is {num_points}, must be at least 2")
    inner = np.geomspace(1, table.rows, num_points - 1).round().astype(np.int64)
    hot_rows = np.unique(np.concatenate([[0], inner[:-1], [table.rows]]))
    hits = table._classes.hits(hot_rows)
    return [
        (num, _hit_share(table, num, num_hits))
        for num, num_hits in zip(hot_rows.tolist(), hits.tolist(), strict=True)
    ]


def budget_curve(
    tables: Sequence[TableCounts], budgets_bytes: Sequence[int], whole_rows: int
) -> list[tuple[int, float, float]]:
    """(budget, `row_hit_share`, `all_hot_share`) of the best hot set of each budget.

    The same as `choose_hot` and `predict` for each, without naming a row.

    Raises:
        ValueError: as `choose_hot`.
    """
    curve = []
    for budget_bytes, hot_rows in zip(
        budgets_bytes, _divide(budgets_bytes, tables, whole_rows), strict=True
    ):
        shares = [
            _hit_share(table, num, int(table._classes.hits(np.array([num]))[0]))
            for table, num in zip(tables, hot_rows, strict=True)
        ]
        prediction = _prediction(tables, hot_rows, shares)
        curve.append((budget_bytes, prediction.row_hit_share, prediction.all_hot_share))
    return curve


class RecentCounts:
    """How often the keys of one key space were looked up in the last steps.

    The counts of each step are kept as they come, so that the window moves by whole steps and what
    `merged` gives is exact. Its memory is bounded by both arguments: beyond `limit_bytes` the
    oldest steps are dropped, with one warning. The newest step always stays.

    Args:
        num_steps: length of the window.
        limit_bytes: of the keys and counts held.

    Raises:
        ValueError: where `num_steps` is below 1.
    """

    def __init__(self, num_steps: int, *, limit_bytes: int = 1 << 28) -> None:
        if num_steps < 1:
            raise ValueError(f"num_steps is {num_steps}, must be at least 1")
        self._num_steps = num_steps
        self._limit_bytes = limit_bytes
        self._steps: deque[tuple[Int64Array, Int64Array]] = deque()
        self._warned = False
        self.num_bytes = 0
        """Bytes of the keys and counts held."""

    @property
    def num_steps(self) -> int:
        """Steps that the counts are of: `num_steps` once the window is full, if memory allows."""
        return len(self._steps)

    def add(self, keys_K: Int64Array, counts_K: Int64Array) -> None:
        """One step's keys and how often each was looked up; both are copied.

        Raises:
            ValueError: where the arrays don't fit together or a key is negative.
        """
        if keys_K.shape != counts_K.shape or keys_K.ndim != 1:
            raise ValueError(
                f"counts_K has shape {counts_K.shape}, keys_K {keys_K.shape}: one count per key "
                f"is needed"
            )
        if keys_K.size and int(keys_K.min()) < 0:
            raise ValueError(f"key {int(keys_K.min())} is negative")
        step = np.array(keys_K, dtype=np.int64), np.array(counts_K, dtype=np.int64)
        self._steps.append(step)
        self.num_bytes += _nbytes(step)
        if len(self._steps) > self._num_steps:
            self._drop_oldest()
        while self.num_bytes > self._limit_bytes and len(self._steps) > 1:
            self._drop_oldest()
            self._warn()

    def merged(self) -> tuple[Int64Array, Int64Array]:
        """The distinct keys of the window in rising order, and their counts summed; both int64."""
        if not self.num_bytes:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        keys_L = np.concatenate([keys for keys, _ in self._steps])
        counts_L = np.concatenate([counts for _, counts in self._steps])
        by_key = sort_keys(torch.from_numpy(keys_L))
        ordered_L = counts_L[by_key.order_L.numpy()]
        return by_key.keys_K.numpy(), np.add.reduceat(ordered_L, by_key.starts.numpy()[:-1])

    def _drop_oldest(self) -> None:
        self.num_bytes -= _nbytes(self._steps.popleft())

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"counts of recent look-ups cover {counted(len(self._steps), 'step')} instead of "
                f"{self._num_steps:,}: more don't fit into {shown_bytes(self._limit_bytes)}",
                stacklevel=3,
            )


def lines(prediction: HotPrediction) -> list[str]:
    """A prediction for people, in at most 100 columns: all tables, then one line for each.

    Tables with the most misses come first, at most 12 of them, then how many more there are.
    """
    tables = prediction.per_table
    hot_rows = sum(table.hot_rows for table in tables.values())
    rows = sum(table.rows for table in tables.values())
    num_bytes = sum(table.num_bytes for table in tables.values())
    return [
        f"hot rows: {hot_rows:,} of {rows:,} in {shown_bytes(num_bytes)}",
        f"expected: {prediction.row_hit_share:.1%} of look-ups find a hot row, "
        f"{prediction.all_hot_share:.1%} of samples find only hot rows",
        *_table_lines(tables),
    ]


def _table_lines(tables: Mapping[str, TablePrediction]) -> Iterator[str]:
    # Columns: 2 + 24 + 2 + 14 + 2 + 14 + 2 + 11 + 2 + 6 + 2 + 9 = 90.
    width = min(max((len(name) for name in tables), default=0), _NAME_WIDTH)
    width = max(width, len("table"))
    if tables:
        yield (
            f"  {'table':<{width}}  {'hot rows':>14}  {'of rows':>14}  {'size':>11}  "
            f"{'hits':>6}  {'of misses':>9}"
        )
    misses = math.fsum(table.misses_per_sample for table in tables.values())
    ordered = sorted(tables.items(), key=lambda item: -item[1].misses_per_sample)
    for name, table in ordered[:_MAX_LINES]:
        if len(name) > _NAME_WIDTH:
            # Without its middle: both ends tell tables apart.
            name = f"{name[:11]}…{name[-12:]}"
        share = f"{table.misses_per_sample / misses:.1%}" if misses else "-"
        yield (
            f"  {name:<{width}}  {table.hot_rows:>14,}  {table.rows:>14,}  "
            f"{shown_bytes(table.num_bytes):>11}  {table.hit_share:>6.1%}  {share:>9}"
        )
    if len(ordered) > _MAX_LINES:
        yield f"  and {len(ordered) - _MAX_LINES:,} more"


@dataclass(frozen=True, eq=False)
class _Classes:
    """The rows of a table by their count.

    Attributes:
        counts_C: int64, the distinct counts, largest first; the last is 0.
        rows_C: int64, how many rows have each; the last may be none.
    """

    counts_C: Int64Array
    rows_C: Int64Array

    @cached_property
    def _rows_upto_C1(self) -> Int64Array:
        return np.append(0, np.cumsum(self.rows_C))

    @cached_property
    def _hits_upto_C1(self) -> Int64Array:
        return np.append(0, np.cumsum(self.rows_C * self.counts_C))

    def hits(self, hot_rows: Int64Array) -> Int64Array:
        """Look-ups of the first `hot_rows` rows."""
        index = self._class_of_last(hot_rows)
        return self._hits_upto_C1[index] + self.counts_C[index] * (
            hot_rows - self._rows_upto_C1[index]
        )

    def border(self, hot_rows: int) -> tuple[int, int]:
        """The least count among the first `hot_rows` rows, and how many of them have it."""
        index = int(self._class_of_last(np.array([hot_rows]))[0])
        return int(self.counts_C[index]), hot_rows - int(self._rows_upto_C1[index])

    def _class_of_last(self, hot_rows: Int64Array) -> Int64Array:
        index = np.searchsorted(self._rows_upto_C1, hot_rows, side="left") - 1
        return np.maximum(index, 0)


def _divide(
    budgets_bytes: Sequence[int], tables: Sequence[TableCounts], whole_rows: int
) -> list[list[int]]:
    """Per budget and table the number of hot rows, which are the first in order of their counts."""
    for budget_bytes in budgets_bytes:
        if budget_bytes < 0:
            raise ValueError(
                f"the budget of hot rows is {budget_bytes} bytes, must be at least 0: "
                f"set sharding.host.hot_mb"
            )
    if whole_rows < 0:
        raise ValueError(f"whole_rows is {whole_rows}, must be at least 0")
    repeated = [name for name, num in Counter(table.name for table in tables).items() if num > 1]
    if repeated:
        raise ValueError(f"more than one table is named {repeated[0]!r}")
    if not tables:
        return [[] for _ in budgets_bytes]
    ranking = _Ranking(tables)
    small_first = sorted(
        (place for place, table in enumerate(tables) if table.rows <= whole_rows),
        key=lambda place: tables[place].num_bytes,
    )
    divided = []
    for left_bytes in budgets_bytes:
        hot_rows_T = np.zeros(len(tables), dtype=np.int64)
        for place in small_first:
            if tables[place].num_bytes > left_bytes:
                break
            left_bytes -= tables[place].num_bytes
            hot_rows_T[place] = tables[place].rows
        ranking.fill(hot_rows_T, left_bytes)
        divided.append(hot_rows_T.tolist())
    return divided


class _Ranking:
    """The classes of all tables by look-ups per byte, ties by order of the tables."""

    def __init__(self, tables: Sequence[TableCounts]) -> None:
        self._record_bytes_T = np.array([table.record_bytes for table in tables])
        classes = [table._classes for table in tables]
        table_C = np.repeat(np.arange(len(tables)), [len(c.counts_C) for c in classes])
        rows_C = np.concatenate([c.rows_C for c in classes])
        per_byte_C = np.concatenate([c.counts_C for c in classes]) / self._record_bytes_T[table_C]
        order_C = np.argsort(-per_byte_C, kind="stable")
        self._table_C = table_C[order_C]
        self._rows_C = rows_C[order_C]

    def fill(self, hot_rows_T: Int64Array, left_bytes: int) -> None:
        """Raises `hot_rows_T` of the tables that have none yet by what fits into `left_bytes`."""
        record_bytes_C = self._record_bytes_T[self._table_C]
        bytes_C = self._rows_C * record_bytes_C
        places = np.flatnonzero(hot_rows_T[self._table_C] == 0)
        # A round ends with a row that doesn't fit. Then none with such a record does, so there are
        # at most as many rounds as sizes of records.
        while len(places):
            upto = np.cumsum(bytes_C[places])
            num_whole = int(np.searchsorted(upto, left_bytes, side="right"))
            taken = places[:num_whole]
            np.add.at(hot_rows_T, self._table_C[taken], self._rows_C[taken])
            left_bytes -= int(upto[num_whole - 1]) if num_whole else 0
            places = places[num_whole:]
            if len(places):
                cut = self._table_C[places[0]]
                num_rows, left_bytes = divmod(left_bytes, int(self._record_bytes_T[cut]))
                hot_rows_T[cut] += num_rows
                places = places[record_bytes_C[places] <= left_bytes]


def _best_ids(table: TableCounts, hot_rows: int) -> Int64Array:
    """The first `hot_rows` ids in order of their counts, then of the ids; returned rising."""
    if hot_rows == table.rows:
        return np.arange(table.rows, dtype=np.int64)
    least, num_least = table._classes.border(hot_rows)
    if least > 0:
        is_hot_K = table.counts_K > least
        is_hot_K[np.flatnonzero(table.counts_K == least)[:num_least]] = True
        return table.ids_K[is_hot_K]
    is_hot_R = np.zeros(table.rows, dtype=bool)
    is_hot_R[table.ids_K[table.counts_K > 0]] = True
    is_hot_R[np.flatnonzero(~is_hot_R)[:num_least]] = True
    return np.flatnonzero(is_hot_R)


def _hits(table: TableCounts, hot_K: Int64Array) -> int:
    """Look-ups that find one of the rising ids `hot_K`."""
    if len(hot_K) == table.rows:
        return table.num_lookups
    if not len(table.ids_K):
        return 0
    places = np.searchsorted(table.ids_K, hot_K)
    np.minimum(places, len(table.ids_K) - 1, out=places)
    return int(table.counts_K[places[table.ids_K[places] == hot_K]].sum())


def _hit_share(table: TableCounts, hot_rows: int, num_hits: int) -> float:
    return num_hits / table.num_lookups if table.num_lookups else hot_rows / table.rows


def _prediction(
    tables: Sequence[TableCounts], hot_rows: Sequence[int], hit_shares: Sequence[float]
) -> HotPrediction:
    per_table = {
        table.name: TablePrediction(
            num, table.rows, share, num * table.record_bytes, table.lookups_per_sample
        )
        for table, num, share in zip(tables, hot_rows, hit_shares, strict=True)
    }
    lookups = math.fsum(table.lookups_per_sample for table in tables)
    hits = math.fsum(table.lookups_per_sample * table.hit_share for table in per_table.values())
    all_hot_share = math.prod(
        share**length
        for table, share in zip(tables, hit_shares, strict=True)
        for length in table.bags
    )
    return HotPrediction(hits / lookups if lookups else 1.0, all_hot_share, per_table)


def _check_ids(ids_K: Int64Array, name: str, rows: int) -> None:
    if np.any(ids_K[1:] <= ids_K[:-1]):
        raise ValueError(f"table {name!r}: ids must be in rising order, without repeats")
    if len(ids_K) and not 0 <= ids_K[0] <= ids_K[-1] < rows:
        raise ValueError(
            f"table {name!r}: ids run from {ids_K[0]} to {ids_K[-1]}, but the table has {rows} rows"
        )


def _nbytes(step: tuple[Int64Array, Int64Array]) -> int:
    return step[0].nbytes + step[1].nbytes
