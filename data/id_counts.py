"""Id counts of a feature: how often each row of its table is looked up in the training part.

Planners and hot sets need them, whatever the vocabulary rule was.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data.counting import KeyCounter
from data.files import WholeFile


def write_id_counts(counter: KeyCounter, path: Path, root: Path) -> dict[str, Any]:
    """Writes (id, count) of one feature, sorted by id; returns the manifest's summary of it."""
    schema = pa.schema([("id", pa.int64()), ("count", pa.int64())])
    ids_by_count: dict[int, int] = {}
    with WholeFile(path) as sink, pq.ParquetWriter(sink, schema, compression="zstd") as writer:
        for run in counter.merged():
            arrays = [pa.array(run.keys.view(np.int64)), pa.array(run.counts)]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
            for value, times in zip(*np.unique(run.counts, return_counts=True), strict=True):
                ids_by_count[int(value)] = ids_by_count.get(int(value), 0) + int(times)
    total = sum(value * times for value, times in ids_by_count.items())
    return {
        "file": str(path.relative_to(root)),
        "distinct": sum(ids_by_count.values()),
        "total": total,
        "share_of_top": _share_of_top(ids_by_count, total),
    }


def _share_of_top(ids_by_count: dict[int, int], total: int) -> dict[str, float]:
    """Share of all look-ups that go to the 1, 10, 100, … most frequent ids."""
    shares: dict[str, float] = {}
    top, taken, covered = 1, 0, 0
    for value in sorted(ids_by_count, reverse=True):
        times = ids_by_count[value]
        while top <= taken + times:
            shares[str(top)] = round((covered + (top - taken) * value) / total, 6)
            top *= 10
        taken += times
        covered += times * value
    return shares
