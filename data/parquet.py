"""Prepared parts → batches, in an order that depends on seed and epoch only.

A *position* `p` in an epoch belongs to lane `p mod 64`, index `p div 64`: global batch `t` holds
positions `t·G … (t+1)·G - 1` (`G` = global batch size), so it is the next slice of every lane.
Rank `r` of `W` reads lanes `64·r/W … 64·(r+1)/W - 1` and nothing else. Which row of its lane stands
at an index is decided by a shuffle per lane and epoch: the lane's row groups (up to 8,192 rows) in
random order, and the rows of each group in random order. Without shuffling, positions are rows.

Quality of the shuffle: a batch mixes 64 row groups drawn from anywhere in the part, each row group
spanning 524,288 consecutive rows. Memory: two row groups of each of the rank's lanes (285 MB for
Criteo on one rank).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data.batch import Batch
from data.columns import Bags, Columns, assemble_batch
from data.commit import dataset_file
from data.errors import UserError
from data.lanes import (
    BAG_WEIGHT_SUFFIX,
    LABEL_COLUMN,
    NUM_LANES,
    WEIGHT_COLUMN,
    lane_rows,
)
from data.loader import READER_THREAD
from data.manifest import Manifest, load_manifest
from data.split import PARTS

_OPEN_FILES = 96


@dataclass(frozen=True)
class Order:
    """Which samples come when.

    Attributes:
        global_batch_size: samples of a batch over all ranks.
        seed: of the shuffle.
        epoch: another epoch, another order.
        shuffle: False keeps the raw order (evaluation, prediction).
        rank: this rank.
        world_size: `W`.
        start_batch: batches to skip; the cursor of a resumed run.
    """

    global_batch_size: int
    seed: int = 0
    epoch: int = 0
    shuffle: bool = False
    rank: int = 0
    world_size: int = 1
    start_batch: int = 0


class PreparedDataset:
    """A prepared dataset folder.

    Args:
        root: the folder.
        parts: those that are to be read: only their files must be there.

    Raises:
        UserError: where the folder holds none, or a part isn't whole.
    """

    def __init__(self, root: Path, parts: Sequence[str] = PARTS) -> None:
        self.root = root
        self.manifest: Manifest = load_manifest(root)
        self.features = self.manifest.features
        self.singles = [f for f in self.features if not f.is_list]
        self.lists = [f for f in self.features if f.is_list]
        self._check_files(parts)

    def file(self, name: str) -> Path:
        """The path of a file that the manifest lists as `name`."""
        return dataset_file(self.root, self.manifest, name)

    def num_rows(self, part: str) -> int:
        """Rows of `train`, `valid` or `test`."""
        return self.manifest.parts[part].rows

    def num_batches(self, part: str, global_batch_size: int) -> int:
        """Batches of an epoch; the last one may be smaller."""
        return -(-self.num_rows(part) // global_batch_size)

    def batches(self, part: str, order: Order) -> Iterator[Batch]:
        """This rank's share of each global batch; it may be empty, the number of batches is not.

        The cursor of an epoch is the number of batches taken.
        """
        return _LaneReader(self, part, order).batches()

    def column(self, part: str, name: str) -> np.ndarray:
        """One column of a part, in row order."""
        values = []
        for entry in self.manifest.parts[part].files:
            table = pq.read_table(self.file(entry.file), columns=[name])
            lane_major = table[name].to_numpy()
            lanes = np.argsort(np.arange(entry.rows) % NUM_LANES, kind="stable")
            in_rows = np.empty_like(lane_major)
            in_rows[lanes] = lane_major
            values.append(in_rows)
        return np.concatenate(values) if values else np.empty(0, dtype=np.float32)

    def _check_files(self, parts: Sequence[str]) -> None:
        """Sizes only: digests would read the dataset once more at every start."""
        for part in parts:
            for entry in self.manifest.parts[part].files:
                path = self.file(entry.file)
                size = path.stat().st_size if path.is_file() else None
                if size != entry.num_bytes:
                    found = "is missing" if size is None else f"has {size:,} bytes"
                    raise UserError(
                        f"{path} {found}, {entry.num_bytes:,} bytes are recorded: the copy of this "
                        "dataset isn't whole; copy or prepare it again"
                    )

    def check(self, part: str) -> None:
        """Refuses a part without rows.

        Raises:
            UserError: naming the dataset and its parts.
        """
        if self.num_rows(part) == 0:
            sizes = ", ".join(f"{name} {p.rows:,}" for name, p in self.manifest.parts.items())
            raise UserError(f"data.root={self.root}: the {part} part is empty (rows: {sizes})")


class _LaneReader:
    """Reads the lanes of one rank in one epoch."""

    def __init__(self, dataset: PreparedDataset, part: str, order: Order) -> None:
        self._dataset, self._order = dataset, order
        self._files = dataset.manifest.parts[part].files
        self._group_rows = dataset.manifest.parts[part].lane_group_rows
        self._num_rows = dataset.num_rows(part)
        self._open: OrderedDict[int, pq.ParquetFile] = OrderedDict()
        self._columns = self._column_names()
        self._epoch_seed = _epoch_seed(part, order) if order.shuffle else None

    def batches(self) -> Iterator[Batch]:
        order = self._order
        first_lane = NUM_LANES * order.rank // order.world_size
        last_lane = NUM_LANES * (order.rank + 1) // order.world_size
        pool = ThreadPoolExecutor(1, thread_name_prefix=READER_THREAD)
        try:
            lanes = [
                _Lane(lane, self._group_order(lane), self._read_group, pool)
                for lane in range(first_lane, last_lane)
            ]
            size = order.global_batch_size
            for lane in lanes if order.start_batch == 0 else ():
                lane.request_first()  # All first row groups before any second: a quick first batch.
            for start in range(order.start_batch * size, self._num_rows, size):
                stop = min(start + size, self._num_rows)
                pieces = [
                    piece
                    for lane in lanes
                    for piece in lane.take(lane_rows(start, lane.lane), lane_rows(stop, lane.lane))
                ]
                yield self._batch(pieces)
        finally:
            # Not waited for: the garbage collector closes a generator that was dropped, and it may
            # run in any thread and under any lock, those of `threading` too.
            pool.shutdown(wait=False, cancel_futures=True)

    def _group_order(self, lane: int) -> list[tuple[int, int]]:
        """(file, rows) of the lane's row groups in the order in which they are read."""
        groups = [
            (number, rows)
            for number, entry in enumerate(self._files)
            if (rows := lane_rows(entry.rows, lane))
        ]
        if self._epoch_seed is None:
            return groups
        shuffled = np.random.default_rng([*self._epoch_seed, lane]).permutation(len(groups))
        return [groups[i] for i in shuffled]

    def _read_group(self, lane: int, file_number: int) -> Columns:
        table = self._file(file_number).read_row_group(
            lane, columns=self._columns, use_threads=False
        )
        num_rows = table.num_rows
        permutation = None
        if self._epoch_seed is not None:
            rng = np.random.default_rng([*self._epoch_seed, lane, file_number])
            permutation = rng.permutation(num_rows)
        first_row = file_number * NUM_LANES * self._group_rows + lane
        return self._decode(table, first_row, permutation)

    def _file(self, number: int) -> pq.ParquetFile:
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        if len(self._open) >= _OPEN_FILES:
            self._open.popitem(last=False)[1].close()
        opened = pq.ParquetFile(self._dataset.file(self._files[number].file))
        self._open[number] = opened
        return opened

    def _column_names(self) -> list[str]:
        manifest = self._dataset.manifest
        names = list(manifest.dense_columns)
        for feature in self._dataset.features:
            names.append(feature.name)
            if feature.bag_weights:
                names.append(feature.name + BAG_WEIGHT_SUFFIX)
        if manifest.schema.example_weight:
            names.append(WEIGHT_COLUMN)
        return [*names, LABEL_COLUMN]

    def _decode(self, table: pa.Table, first_row: int, permutation: np.ndarray | None) -> Columns:
        dataset = self._dataset
        num_rows = table.num_rows
        rows = np.arange(num_rows) if permutation is None else permutation

        def column(name: str) -> np.ndarray:
            values = table[name].chunk(0).to_numpy(zero_copy_only=False)
            return values if permutation is None else values[permutation]

        dense_names = dataset.manifest.dense_columns
        dense_BN = np.empty((num_rows, len(dense_names)), dtype=np.float32)
        for position, name in enumerate(dense_names):
            dense_BN[:, position] = column(name)
        single_FB = np.empty((len(dataset.singles), num_rows), dtype=np.int64)
        for position, feature in enumerate(dataset.singles):
            single_FB[position] = column(feature.name)
        bags = {}
        for feature in dataset.lists:
            weights = None
            if feature.bag_weights:
                weights = table[feature.name + BAG_WEIGHT_SUFFIX].chunk(0).flatten().to_numpy()
            values = table[feature.name].chunk(0)
            whole = Bags(
                _list_offsets(values),
                values.flatten().to_numpy().astype(np.int64),
                weights,
            )
            bags[feature.position] = whole if permutation is None else whole.take(permutation)
        has_weight = dataset.manifest.schema.example_weight is not None
        return Columns(
            dense_BN=dense_BN,
            label_B=column(LABEL_COLUMN).astype(np.float32),
            weight_B=column(WEIGHT_COLUMN) if has_weight else None,
            row_B=first_row + NUM_LANES * rows.astype(np.int64),
            single_FB=single_FB,
            bags=bags,
        )

    def _batch(self, pieces: list[tuple[Columns, int, int]]) -> Batch:
        return assemble_batch(
            pieces,
            num_features=len(self._dataset.features),
            single_positions=[f.position for f in self._dataset.singles],
            num_dense=len(self._dataset.manifest.dense_columns),
            has_weight=self._dataset.manifest.schema.example_weight is not None,
            has_bag_weights=any(f.bag_weights for f in self._dataset.features),
        )


class _Lane:
    """One lane's stream: the current row group and, in the background, the next one."""

    def __init__(
        self,
        lane: int,
        groups: list[tuple[int, int]],
        read: Callable[[int, int], Columns],
        pool: ThreadPoolExecutor,
    ) -> None:
        self.lane = lane
        self._groups, self._read, self._pool = groups, read, pool
        self._starts = np.concatenate([[0], np.cumsum([rows for _, rows in groups])]).astype(int)
        self._number = -1
        self._current: Columns | None = None
        self._next: tuple[int, Future[Columns]] | None = None

    def request_first(self) -> None:
        """Begins to read the first row group."""
        if self._groups:
            self._next = (0, self._request(0))

    def take(self, start: int, stop: int) -> list[tuple[Columns, int, int]]:
        """Indices `start … stop-1` as (columns, first, last + 1) pieces, in order."""
        pieces = []
        while start < stop:
            number = int(np.searchsorted(self._starts, start, side="right")) - 1
            self._advance(number)
            assert self._current is not None
            group_start, group_stop = int(self._starts[number]), int(self._starts[number + 1])
            end = min(stop, group_stop)
            pieces.append((self._current, start - group_start, end - group_start))
            start = end
        return pieces

    def _advance(self, number: int) -> None:
        if number == self._number:
            return
        if self._next is not None and self._next[0] == number:
            self._current = self._next[1].result()
        else:
            self._current = self._request(number).result()
        self._number, self._next = number, None
        if number + 1 < len(self._groups):
            self._next = (number + 1, self._request(number + 1))

    def _request(self, number: int) -> Future[Columns]:
        return self._pool.submit(self._read, self.lane, self._groups[number][0])


def _list_offsets(values: pa.ListArray) -> np.ndarray:
    offsets = values.offsets.to_numpy().astype(np.int64)
    return offsets - offsets[0]


def _epoch_seed(part: str, order: Order) -> tuple[int, int, int]:
    return (order.seed, order.epoch, PARTS.index(part))
