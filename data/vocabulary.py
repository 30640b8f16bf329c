"""Vocabularies: 64-bit keys → rows of a table, by the column's rule.

    dictionary   row 0: unknown (rare or never seen in training); row 1: missing;
                 rows 2, 3, …: tokens by falling count, equal counts by rising key
    hash         row 0: missing, rows 1 …: 1 + mix(key) mod (rows - 1); with missing=empty: mix(key)
                 mod rows. Datasets from before keys were mixed: the same without mix
    identity     the token is the row

With `missing=empty` a dictionary has no row for missing, and tokens begin at row 1.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data.counting import KeyCounter
from data.errors import UserError
from data.files import WholeFile, naming
from data.hashing import mix
from data.schema import Feature

UNKNOWN_ROW = 0
_SEGMENT_KEYS = 4 << 20


@dataclass(frozen=True)
class Dictionary:
    """Sorted `keys` (uint64) and the row of each (int64); memory-mapped where they are large."""

    keys: np.ndarray
    rows: np.ndarray
    num_rows: int

    def lookup(self, keys: np.ndarray) -> np.ndarray:
        """int64 row of each of sorted unique `keys`, `UNKNOWN_ROW` for those it doesn't hold.

        A mapped dictionary is read segment by segment and its pages released, so that resident
        memory stays bounded however large it is.
        """
        found = np.full(len(keys), UNKNOWN_ROW, dtype=np.int64)
        if len(self.keys) == 0 or len(keys) == 0:
            return found
        for start in range(0, len(self.keys), _SEGMENT_KEYS):
            segment = self.keys[start : start + _SEGMENT_KEYS]
            first = int(np.searchsorted(keys, segment[0]))
            last = int(np.searchsorted(keys, segment[-1], side="right"))
            if first == last:
                continue
            wanted = keys[first:last]
            at = np.searchsorted(segment, wanted)
            is_known = segment[at] == wanted
            rows = self.rows[start : start + _SEGMENT_KEYS]
            found[first:last][is_known] = rows[at[is_known]]
            for array in (self.keys, self.rows):
                if isinstance(array, np.memmap):
                    with contextlib.suppress(OSError):  # Optional: it only saves memory.
                        array._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]
        return found


@dataclass(frozen=True)
class MappedIds:
    """Rows of one feature for a block, and what was replaced on the way.

    Attributes:
        ids: int64, one per row or (with `lengths`) one per id.
        lengths: int32 ids per row, or None.
        weights: fp32 bag weights, or None.
        num_ids: ids before any was dropped.
        num_unknown: ids that went to the unknown row (or last row), or were dropped.
        num_missing: missing values that went to the missing row.
        used_rows: int64 rows that occur in `ids`, in any order, possibly several times.
        used_counts: int64, how often each does; the counts of equal rows add up.
        used_hashes: uint64 mixed keys of the tokens that occur, of hashed features; else None.
    """

    ids: np.ndarray
    lengths: np.ndarray | None
    weights: np.ndarray | None
    num_ids: int
    num_unknown: int
    num_missing: int
    used_rows: np.ndarray
    used_counts: np.ndarray
    used_hashes: np.ndarray | None = None


class Vocabulary:
    """The rule of one table. `rows` is the table's number of rows.

    Args:
        feature: any feature of the table.
        dictionary: for `dictionary` rules.
    """

    def __init__(self, feature: Feature, dictionary: Dictionary | None = None) -> None:
        self._rule = feature.vocabulary
        self._has_missing_row = feature.missing == "row"
        self._dictionary = dictionary
        if feature.vocabulary == "dictionary":
            assert dictionary is not None
            self.rows = dictionary.num_rows
        else:
            assert feature.rows is not None
            self.rows = feature.rows
        self.missing_row = missing_row(feature)

    def rows_of_keys(self, keys: np.ndarray, feature: Feature) -> tuple[np.ndarray, np.ndarray]:
        """int64 row (or -1: drop) and whether it is a replacement, for sorted unique `keys`.

        Raises:
            UserError: for an id outside an `identity` table with `out_of_range=error`.
        """
        if self._rule == "dictionary":
            assert self._dictionary is not None
            rows = self._dictionary.lookup(keys)
            return rows, rows == UNKNOWN_ROW
        if self._rule == "hash":
            first = 1 if self._has_missing_row else 0
            hashes = mix(keys) if feature.hash_rule == "mixed" else keys
            rows = first + (hashes % np.uint64(self.rows - first)).astype(np.int64)
            return rows, np.zeros(len(keys), dtype=bool)
        rows = keys.view(np.int64).copy()
        last = self.rows - 1 if feature.out_of_range == "last_row" else self.rows
        is_outside = (rows < 0) | (rows >= last)
        if is_outside.any():
            if feature.out_of_range == "error":
                raise UserError(
                    f"feature {feature.name}: id {rows[is_outside][0]} lies outside its table "
                    f"{feature.table} of {self.rows:,} rows; raise "
                    f"data.schema.sparse.{feature.name}.rows, or set .out_of_range=drop or last_row"
                )
            rows[is_outside] = -1 if feature.out_of_range == "drop" else self.rows - 1
        return rows, is_outside

    def map_codes(
        self,
        feature: Feature,
        keys: np.ndarray,
        codes: np.ndarray,
        lengths: np.ndarray | None,
        weights: np.ndarray | None,
    ) -> MappedIds:
        """The ids of a block from its local dictionary `keys` and `codes` (see `EncodedColumn`)."""
        rows, is_replaced = self.rows_of_keys(keys, feature)
        # Code -1 (missing) is counted first and picks the entry appended at the end.
        counts = np.bincount(codes + 1, minlength=len(keys) + 1)
        ids = np.append(rows, self.missing_row)[codes]
        num_missing = int(counts[0]) if self.missing_row >= 0 else 0
        num_unknown = int(counts[1:][is_replaced].sum())
        used_rows = np.append(self.missing_row, rows)
        is_used = (counts > 0) & (used_rows >= 0)
        if lengths is not None and counts[used_rows < 0].any():
            is_kept = ids >= 0
            bags = np.repeat(np.arange(len(lengths)), lengths)
            lengths = np.bincount(bags[is_kept], minlength=len(lengths)).astype(np.int32)
            ids, weights = ids[is_kept], None if weights is None else weights[is_kept]
        return MappedIds(
            ids=ids,
            lengths=lengths,
            weights=weights,
            num_ids=len(codes),
            num_unknown=num_unknown,
            num_missing=num_missing,
            used_rows=used_rows[is_used],
            used_counts=counts[is_used],
            used_hashes=mix(keys[counts[1:] > 0]) if self._rule == "hash" else None,
        )


def missing_row(feature: Feature) -> int:
    """The row of a missing value, or -1 where its bag is empty."""
    if feature.missing == "empty":
        return -1
    return 1 if feature.vocabulary == "dictionary" else 0


def build_dictionary(
    counter: KeyCounter, feature: Feature, path: Path, work: Path
) -> tuple[int, int]:
    """Writes the dictionary of one table to parquet; returns (rows of the table, tokens kept).

    Two passes over the counter, both streaming: the first counts how many keys have each count,
    which fixes the first row of every count; the second hands out rows in key order.

    Args:
        counter: counts of the training part.
        feature: holds `min_count` and the cap `rows`.
        path: parquet file: `key`, `row`, `count` and, for text, `token`, sorted by key.
        work: folder for the mapped copies that `load_dictionary` reads.
    """
    first_row = 2 if feature.missing == "row" else 1
    keys_by_count: dict[int, int] = {}
    for run in counter.merged():
        values, frequency = np.unique(run.counts, return_counts=True)
        for value, times in zip(values.tolist(), frequency.tolist(), strict=True):
            if value >= feature.min_count:
                keys_by_count[value] = keys_by_count.get(value, 0) + times
    next_row: dict[int, int] = {}
    row = first_row
    for value in sorted(keys_by_count, reverse=True):
        next_row[value] = row
        row += keys_by_count[value]
    limit = row if feature.rows is None else min(row, feature.rows)
    kept = 0
    is_text = feature.token == "text"
    columns = [("key", pa.uint64()), ("row", pa.int64()), ("count", pa.int64())]
    schema = pa.schema(columns + ([("token", pa.string())] if is_text else []))
    with (
        naming(work / path.stem),
        WholeFile(path) as sink,
        pq.ParquetWriter(sink, schema, compression="zstd") as writer,
        open(work / f"{path.stem}.keys", "wb") as keys_file,
        open(work / f"{path.stem}.rows", "wb") as rows_file,
    ):
        for run in counter.merged():
            rows = _hand_out_rows(run.counts, next_row)
            is_kept = (rows >= 0) & (rows < limit)
            arrays = [pa.array(run.keys[is_kept]), pa.array(rows[is_kept])]
            arrays.append(pa.array(run.counts[is_kept]))
            if is_text:
                arrays.append(pa.concat_arrays(_chunks(run.tokens)).filter(pa.array(is_kept)))
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
            keys_file.write(run.keys[is_kept].data)
            rows_file.write(rows[is_kept].data)
            kept += int(is_kept.sum())
    return max(limit, first_row + 1), kept


def map_dictionary(work: Path, table: str, num_rows: int, *, in_memory: bool) -> Dictionary:
    """The dictionary that `build_dictionary` left in `work`, loaded or memory-mapped."""
    keys_path, rows_path = work / f"{table}.keys", work / f"{table}.rows"
    if keys_path.stat().st_size == 0:
        return Dictionary(np.empty(0, np.uint64), np.empty(0, np.int64), num_rows)
    if in_memory:
        keys, rows = np.fromfile(keys_path, np.uint64), np.fromfile(rows_path, np.int64)
        return Dictionary(keys, rows, num_rows)
    mapped_keys = np.memmap(keys_path, np.uint64, mode="r")
    return Dictionary(mapped_keys, np.memmap(rows_path, np.int64, mode="r"), num_rows)


def load_dictionary(path: Path, num_rows: int) -> Dictionary:
    """The dictionary of a prepared dataset, from its parquet file."""
    table = pq.read_table(path, columns=["key", "row"])
    return Dictionary(table["key"].to_numpy(), table["row"].to_numpy(), num_rows)


def _hand_out_rows(counts: np.ndarray, next_row: dict[int, int]) -> np.ndarray:
    """The next free row of each key's count, advancing `next_row`; -1 for counts not in it."""
    order = np.argsort(counts, kind="stable")
    in_order = counts[order]
    rows = np.full(len(counts), -1, dtype=np.int64)
    starts = np.flatnonzero(np.append(True, in_order[1:] != in_order[:-1]))
    for start, stop in zip(starts, np.append(starts[1:], len(counts)), strict=True):
        value = int(in_order[start])
        if value in next_row:
            rows[order[start:stop]] = next_row[value] + np.arange(stop - start)
            next_row[value] += int(stop - start)
    return rows


def _chunks(tokens: pa.Array | pa.ChunkedArray | None) -> Iterator[pa.Array]:
    assert tokens is not None
    return iter(tokens.chunks) if isinstance(tokens, pa.ChunkedArray) else iter([tokens])
