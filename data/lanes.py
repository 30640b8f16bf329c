"""Lanes: how a prepared part (train, valid, test) lies on disk, so that any order is cheap to read.

Row `i` of a part belongs to lane `i mod 64`, at index `i div 64` of it. A file holds 64 row groups,
one per lane and in lane order, of up to 8,192 rows each; the next file goes on where it ended.

    part-00000.parquet   row group 0: rows 0, 64, 128, …   row group 1: rows 1, 65, 129, …   …
    part-00001.parquet   row group 0: rows 524288, …       …

A global batch is the next slice of every lane (`data/parquet.py` reads them), a rank reads a
contiguous share of the lanes, and reading without shuffling gives back the raw order.
"""

from __future__ import annotations

from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data.files import WholeFile
from data.schema import Feature
from data.vocabulary import MappedIds

NUM_LANES = 64
LANE_GROUP_ROWS = 8192
_FILE_BYTES = 128 << 20
LABEL_COLUMN = "__label"
WEIGHT_COLUMN = "__weight"
BAG_WEIGHT_SUFFIX = "__weights"


@dataclass(frozen=True)
class Rows:
    """Some rows, ready to be written or batched.

    Attributes:
        label_B: uint8, or None.
        weight_B: fp32 example weights, or None.
        dense: fp32 by column, transformed.
        ids: by feature name.
        extra: fp32 columns that are carried along (a synthetic teacher's logit).
        missing_dense: by dense column, how many raw values were missing.
    """

    num_rows: int
    label_B: np.ndarray | None
    weight_B: np.ndarray | None
    dense: dict[str, np.ndarray]
    ids: dict[str, MappedIds]
    extra: dict[str, np.ndarray]
    missing_dense: dict[str, int] = field(default_factory=dict)

    def to_table(self, features: tuple[Feature, ...], table_rows: dict[str, int]) -> pa.Table:
        """As Arrow columns: list features as lists, ids as int32 where their table allows."""
        columns: dict[str, pa.Array] = {}
        if self.label_B is not None:
            columns[LABEL_COLUMN] = pa.array(self.label_B)
        if self.weight_B is not None:
            columns[WEIGHT_COLUMN] = pa.array(self.weight_B)
        columns.update({name: pa.array(values) for name, values in self.dense.items()})
        for feature in features:
            mapped = self.ids[feature.name]
            is_small = table_rows[feature.table] <= 2**31
            ids = pa.array(mapped.ids.astype(np.int32 if is_small else np.int64))
            if mapped.lengths is None:
                columns[feature.name] = ids
                continue
            offsets = np.zeros(self.num_rows + 1, dtype=np.int32)
            np.cumsum(mapped.lengths, out=offsets[1:])
            columns[feature.name] = pa.ListArray.from_arrays(pa.array(offsets), ids)
            if mapped.weights is not None:
                weights = pa.ListArray.from_arrays(pa.array(offsets), pa.array(mapped.weights))
                columns[feature.name + BAG_WEIGHT_SUFFIX] = weights
        columns.update({name: pa.array(values) for name, values in self.extra.items()})
        return pa.table(columns)


@dataclass(frozen=True)
class PartFile:
    """One finished parquet file of a part."""

    file: str
    rows: int
    num_bytes: int
    sha256: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the manifest."""
        return {
            "file": self.file,
            "rows": self.rows,
            "bytes": self.num_bytes,
            "sha256": self.sha256,
        }


class PartWriter:
    """Collects the rows of one part in raw order and writes its lane files.

    Memory: the rows of two files, one being collected and one being written; 524,288 rows each
    (84 MB for Criteo) or, where rows are wide, as many as fill 128 MiB going by the first ones.

    Args:
        root: the folder that the dataset is built in, without one for this part.
        part: `train`, `valid` or `test`; files go to `root/part/`.
        pool: writes files while the next rows are collected.
    """

    def __init__(self, root: Path, part: str, pool: Executor) -> None:
        self._root, self._part, self._pool = root, part, pool
        self._pending: list[pa.Table] = []
        self._num_pending = 0
        self._writing: Future[PartFile] | None = None
        self._files: list[PartFile] = []
        self.group_rows = LANE_GROUP_ROWS
        (root / part).mkdir()

    def append(self, rows: pa.Table) -> None:
        """Adds rows (see `Rows.to_table`); writes a file whenever one is full."""
        if not self._pending and not self._files and rows.num_rows:
            self.group_rows = _group_rows(rows.nbytes / rows.num_rows)
        self._pending.append(rows)
        self._num_pending += rows.num_rows
        full = NUM_LANES * self.group_rows
        while self._num_pending >= full:
            table = pa.concat_tables(self._pending)
            self._start_writing(table.slice(0, full))
            self._pending, self._num_pending = [table.slice(full)], table.num_rows - full

    def close(self) -> list[PartFile]:
        """Writes what is left; returns all files."""
        if self._num_pending:
            self._start_writing(pa.concat_tables(self._pending))
            self._pending, self._num_pending = [], 0
        self._wait()
        return self._files

    def _start_writing(self, table: pa.Table) -> None:
        self._wait()
        name = f"{self._part}/part-{len(self._files):05d}.parquet"
        self._writing = self._pool.submit(self._write, name, table)

    def _wait(self) -> None:
        if self._writing is not None:
            self._files.append(self._writing.result())
            self._writing = None

    def _write(self, name: str, table: pa.Table) -> PartFile:
        num_rows = table.num_rows
        table = _in_lane_order(table)
        with (
            WholeFile(self._root / name) as sink,
            pq.ParquetWriter(
                sink,
                table.schema,
                compression="lz4",
                use_dictionary=False,
                write_statistics=False,
                write_batch_size=LANE_GROUP_ROWS,
            ) as writer,
        ):
            start = 0
            for lane in range(min(NUM_LANES, num_rows)):
                size = lane_rows(num_rows, lane)
                writer.write_table(table.slice(start, size), row_group_size=size)
                start += size
        return PartFile(name, num_rows, sink.num_bytes, sink.sha256)


def _group_rows(row_bytes: float) -> int:
    """The rows of a row group: 8,192, halved until a file's rows fit its budget."""
    rows = LANE_GROUP_ROWS
    while rows > 1 and rows * NUM_LANES * row_bytes > _FILE_BYTES:
        rows //= 2
    return rows


def _in_lane_order(table: pa.Table) -> pa.Table:
    """The rows of a file sorted by (lane, index in lane)."""
    table = table.combine_chunks()
    if table.num_rows % NUM_LANES:
        return table.take(pa.array(lane_order(table.num_rows)))
    order = None
    columns = []
    for column in table.columns:
        values = column.chunk(0)
        if pa.types.is_list(values.type):
            order = pa.array(lane_order(table.num_rows)) if order is None else order
            columns.append(values.take(order))
        else:
            # A transposed copy is several times faster than a take.
            transposed = values.to_numpy(zero_copy_only=False).reshape(-1, NUM_LANES).T
            columns.append(pa.array(np.ascontiguousarray(transposed).reshape(-1)))
    return pa.Table.from_arrays(columns, schema=table.schema)


def lane_rows(num_rows: int, lane: int) -> int:
    """How many of rows `0 … num_rows-1` lie in `lane`."""
    return (num_rows - lane + NUM_LANES - 1) // NUM_LANES


def lane_order(num_rows: int) -> np.ndarray:
    """Row numbers sorted by (lane, index in lane), int64."""
    if num_rows % NUM_LANES == 0:
        return np.arange(num_rows).reshape(-1, NUM_LANES).T.reshape(-1)
    return np.concatenate([np.arange(lane, num_rows, NUM_LANES) for lane in range(NUM_LANES)])
