"""The ranking behind the choice of hot rows: how often rows are looked up, and how a budget is cut.

Rows of a table with an equal count are one *class* of that table, and there are few distinct
counts, so budgets are divided over classes; single rows are touched only to name the chosen ones.

    C classes of a table, or of all: largest count first    T tables
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


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
        check_ids(self.ids_K, self.name, self.rows)
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
    def classes(self) -> RowClasses:
        """Kept: sorting the counts is the dear part, and tables may have 40 M rows."""
        counts_C, rows_C = np.unique(self.counts_K[self.counts_K > 0], return_counts=True)
        num_unseen = self.rows - int(rows_C.sum())
        return RowClasses(np.append(counts_C[::-1], 0), np.append(rows_C[::-1], num_unseen))


@dataclass(frozen=True, eq=False)
class RowClasses:
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


def divide_budgets(
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
        classes = [table.classes for table in tables]
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


def best_ids(table: TableCounts, hot_rows: int) -> Int64Array:
    """The first `hot_rows` ids in order of their counts, then of the ids; returned rising."""
    if hot_rows == table.rows:
        return np.arange(table.rows, dtype=np.int64)
    least, num_least = table.classes.border(hot_rows)
    if least > 0:
        is_hot_K = table.counts_K > least
        is_hot_K[np.flatnonzero(table.counts_K == least)[:num_least]] = True
        return table.ids_K[is_hot_K]
    is_hot_R = np.zeros(table.rows, dtype=bool)
    is_hot_R[table.ids_K[table.counts_K > 0]] = True
    is_hot_R[np.flatnonzero(~is_hot_R)[:num_least]] = True
    return np.flatnonzero(is_hot_R)


def check_ids(ids_K: Int64Array, name: str, rows: int) -> None:
    if np.any(ids_K[1:] <= ids_K[:-1]):
        raise ValueError(f"table {name!r}: ids must be in rising order, without repeats")
    if len(ids_K) and not 0 <= ids_K[0] <= ids_K[-1] < rows:
        raise ValueError(
            f"table {name!r}: ids run from {ids_K[0]} to {ids_K[-1]}, but the table has {rows} rows"
        )
