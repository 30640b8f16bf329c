"""Which rows of host-resident tables live on the device, and what that choice is expected to give.

Everything follows from one ranking (`hot_ranking.py`): the rows of all tables by look-ups per byte
of record (weights and optimizer state), then by order of the tables, then by id.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from embeddings.host.hot_ranking import TableCounts, best_ids, check_ids, divide_budgets
from embeddings.plan_words import NAME_WIDTH, shortened, shown_bytes

Int64Array = npt.NDArray[np.int64]

_MAX_LINES = 12


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
    hot_rows = divide_budgets([budget_bytes], tables, whole_rows)[0]
    hot = HotSet(
        ids={t.name: best_ids(t, num) for t, num in zip(tables, hot_rows, strict=True)},
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
        check_ids(hot_K, table.name, table.rows)
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
    hits = table.classes.hits(hot_rows)
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
        budgets_bytes, divide_budgets(budgets_bytes, tables, whole_rows), strict=True
    ):
        shares = [
            _hit_share(table, num, int(table.classes.hits(np.array([num]))[0]))
            for table, num in zip(tables, hot_rows, strict=True)
        ]
        prediction = _prediction(tables, hot_rows, shares)
        curve.append((budget_bytes, prediction.row_hit_share, prediction.all_hot_share))
    return curve


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
    width = min(max((len(name) for name in tables), default=0), NAME_WIDTH)
    width = max(width, len("table"))
    if tables:
        yield (
            f"  {'table':<{width}}  {'hot rows':>14}  {'of rows':>14}  {'size':>11}  "
            f"{'hits':>6}  {'of misses':>9}"
        )
    misses = math.fsum(table.misses_per_sample for table in tables.values())
    ordered = sorted(tables.items(), key=lambda item: -item[1].misses_per_sample)
    for name, table in ordered[:_MAX_LINES]:
        share = f"{table.misses_per_sample / misses:.1%}" if misses else "-"
        yield (
            f"  {shortened(name):<{width}}  {table.hot_rows:>14,}  {table.rows:>14,}  "
            f"{shown_bytes(table.num_bytes):>11}  {table.hit_share:>6.1%}  {share:>9}"
        )
    if len(ordered) > _MAX_LINES:
        yield f"  and {len(ordered) - _MAX_LINES:,} more"


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
