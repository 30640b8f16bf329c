"""Pass 3 of `prepare`: spooled blocks → lane files of each part, and the id counts."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data.arrays import load_arrays
from data.blocks import select_rows
from data.counting import KeyCounter
from data.errors import UserError
from data.files import file_name
from data.hashing import DistinctKeys
from data.id_counts import write_id_counts
from data.lanes import PartFile, PartWriter, Rows
from data.manifest import PartInfo
from data.parse_pass import NUM_THREADS, SpooledBlock, SpooledFile, spooled_blocks
from data.progress import ProgressListener
from data.row_mapper import RowMapper
from data.split import PARTS, TRAIN, SplitRule

_COUNTER_BYTES = 64 << 20


@dataclass(frozen=True)
class PartBlock:
    """The rows of one block that belong to one part, ready to write.

    Attributes:
        table: the rows (see `Rows.to_table`).
        num_positive: rows with label 1.
        id_tallies: by feature: ids, unknown, missing.
        missing_dense: by dense column: missing values.
        used_ids: by feature: ids and how often each occurs (see `MappedIds.used_rows`).
        used_hashes: by hashed feature: its tokens (see `MappedIds.used_hashes`).
    """

    table: pa.Table
    num_positive: int
    id_tallies: dict[str, tuple[int, int, int]]
    missing_dense: dict[str, int]
    used_ids: dict[str, tuple[np.ndarray, np.ndarray]]
    used_hashes: dict[str, np.ndarray]


class WritePass:
    """Maps blocks in worker threads and writes parts in raw order.

    Args:
        mapper: applies vocabularies and transforms.
        root: the folder that the dataset is built in.
        work: folder for spilled counts.
        listener: follows the progress.
    """

    def __init__(
        self, mapper: RowMapper, root: Path, work: Path, listener: ProgressListener
    ) -> None:
        self._mapper, self._root, self._listener = mapper, root, listener
        share = _COUNTER_BYTES // max(len(mapper.features), 1)
        self._id_counters = {
            f.name: KeyCounter(work / "ids" / file_name(f.name), share) for f in mapper.features
        }
        self._distinct = {f.name: DistinctKeys() for f in mapper.features if f.vocabulary == "hash"}
        self._names: list[str] = []
        self._tallies = [PartTally([f.name for f in mapper.features]) for _ in PARTS]

    def run(
        self, spooled: list[SpooledFile], rule: SplitRule
    ) -> tuple[dict[str, PartInfo], dict[str, dict[str, Any]]]:
        """Writes everything; returns the parts and the summaries of the id counts."""
        self._names = [entry.info.file for entry in spooled]
        self._listener.phase("write", sum(entry.info.num_bytes for entry in spooled))
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            writers = [PartWriter(self._root, part, pool) for part in PARTS]
            jobs: deque[tuple[SpooledBlock, Future[dict[int, PartBlock]]]] = deque()
            for block in spooled_blocks(spooled):
                parts = rule.parts_of(block.file_index, block.start, block.stop)
                jobs.append((block, pool.submit(self._map, block, parts)))
                if len(jobs) > NUM_THREADS:
                    self._append(*jobs.popleft(), writers)
            while jobs:
                self._append(*jobs.popleft(), writers)
            files = [writer.close() for writer in writers]
        infos = {
            part: tally.info(written, writer.group_rows)
            for part, tally, written, writer in zip(
                PARTS, self._tallies, files, writers, strict=True
            )
        }
        counts = write_all_id_counts(self._id_counters, self._root)
        for name, distinct in self._distinct.items():
            counts[name]["distinct_tokens"] = distinct.estimate()
        return infos, counts

    def _append(
        self,
        block: SpooledBlock,
        job: Future[dict[int, PartBlock]],
        writers: list[PartWriter],
    ) -> None:
        for part, rows in job.result().items():
            writers[part].append(rows.table)
            self._tallies[part].add(
                rows.table.num_rows, rows.num_positive, rows.id_tallies, rows.missing_dense
            )
            for name, (ids, counts) in rows.used_ids.items() if part == TRAIN else ():
                self._id_counters[name].add(ids, counts)
            for name, hashes in rows.used_hashes.items() if part == TRAIN else ():
                self._distinct[name].add(hashes)
        self._listener.advance(block.num_raw_bytes, block.stop - block.start)

    def _map(self, block: SpooledBlock, parts: np.ndarray) -> dict[int, PartBlock]:
        """Runs in a worker thread."""
        arrays = load_arrays(block.path)
        mapper = self._mapper
        mapped = {}
        present = np.unique(parts).tolist()
        for part in present:
            is_chosen = parts == part
            chosen = arrays
            if len(present) > 1:
                chosen = select_rows(arrays, is_chosen, mapper.schema, mapper.features)
            try:
                rows = mapper.map_arrays(chosen, int(is_chosen.sum()))
            except UserError as error:
                where = f"rows {block.start + 1:,} to {block.stop:,} of raw file"
                raise UserError(f"{where} {self._names[block.file_index]}: {error}") from None
            assert rows.label_B is not None
            table_rows = {name: v.rows for name, v in mapper.vocabularies.items()}
            mapped[part] = PartBlock(
                table=rows.to_table(mapper.features, table_rows),
                num_positive=int(rows.label_B.sum()),
                id_tallies=id_tallies(rows),
                missing_dense=rows.missing_dense,
                used_ids={name: (m.used_rows, m.used_counts) for name, m in rows.ids.items()},
                used_hashes={
                    name: m.used_hashes for name, m in rows.ids.items() if m.used_hashes is not None
                },
            )
        return mapped


def id_tallies(rows: Rows) -> dict[str, tuple[int, int, int]]:
    """By feature: ids, unknown and missing ones among them."""
    return {name: (m.num_ids, m.num_unknown, m.num_missing) for name, m in rows.ids.items()}


class PartTally:
    """Row, label and id counts of one part."""

    def __init__(self, features: list[str]) -> None:
        self._rows = self._positives = 0
        self._ids = dict.fromkeys(features, 0)
        self._unknown, self._missing = dict(self._ids), dict(self._ids)
        self._missing_dense: dict[str, int] = {}

    def add(
        self,
        num_rows: int,
        num_positive: int,
        id_tallies: dict[str, tuple[int, int, int]],
        missing_dense: dict[str, int],
    ) -> None:
        """Some more rows."""
        for name, count in missing_dense.items():
            self._missing_dense[name] = self._missing_dense.get(name, 0) + count
        self._rows += num_rows
        self._positives += num_positive
        for name, (ids, unknown, missing) in id_tallies.items():
            self._ids[name] += ids
            self._unknown[name] += unknown
            self._missing[name] += missing

    def add_rows(self, rows: Rows) -> None:
        """The same from the rows themselves."""
        num_positive = 0 if rows.label_B is None else int(rows.label_B.sum())
        self.add(rows.num_rows, num_positive, id_tallies(rows), rows.missing_dense)

    def info(self, files: list[PartFile], group_rows: int) -> PartInfo:
        """For the manifest."""
        rate = self._positives / self._rows if self._rows else None
        return PartInfo(
            self._rows,
            files,
            group_rows,
            rate,
            self._unknown,
            self._missing,
            self._ids,
            self._missing_dense,
        )


def write_all_id_counts(counters: dict[str, KeyCounter], root: Path) -> dict[str, dict[str, Any]]:
    """Writes `root/counts/FEATURE.parquet` for each feature; returns their summaries."""
    folder = root / "counts"
    folder.mkdir()
    return {
        name: write_id_counts(counter, folder / f"{file_name(name)}.parquet", root)
        for name, counter in counters.items()
    }
