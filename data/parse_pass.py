"""Pass 1 of `prepare`: raw files → spooled blocks, kept for a rerun until the dataset is done."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from data.arrays import save_arrays
from data.blocks import block_arrays
from data.errors import RawDataError
from data.files import file_sha256, write_whole
from data.manifest import InputFile
from data.progress import ProgressListener
from data.raw import RawReader, RawSlice
from data.schema import schema_to_dict
from data.work_folder import FINISHED, remove_folder

NUM_THREADS = 2


@dataclass(frozen=True)
class SpooledBlock:
    """Some rows of a raw file, on disk.

    Attributes:
        file_index: which raw file.
        start: its first row in that file.
        stop: the row after its last.
        path: its arrays.
        num_raw_bytes: its share of the raw file's size, for progress.
    """

    file_index: int
    start: int
    stop: int
    path: Path
    num_raw_bytes: int


@dataclass(frozen=True)
class SpooledFile:
    """A raw file whose blocks lie in `folder`."""

    info: InputFile
    folder: Path
    block_rows: list[int]


def spooled_blocks(files: list[SpooledFile]) -> Iterator[SpooledBlock]:
    """All blocks in raw order."""
    for file_index, entry in enumerate(files):
        start = 0
        for number, num_rows in enumerate(entry.block_rows):
            num_bytes = entry.info.num_bytes * num_rows // max(entry.info.rows, 1)
            path = _block_path(entry.folder, number)
            yield SpooledBlock(file_index, start, start + num_rows, path, num_bytes)
            start += num_rows


class ParsePass:
    """Parses raw files one after the other, slices of one in parallel.

    Args:
        reader: parses slices.
        work: folder for the spool.
        listener: follows the progress.
    """

    def __init__(self, reader: RawReader, work: Path, listener: ProgressListener) -> None:
        self._reader, self._work, self._listener = reader, work, listener
        self._key = self._parse_key()

    def run(self, files: list[Path]) -> list[SpooledFile]:
        """Spools every file; one that an interrupted run finished is taken as it is.

        Raises:
            RawDataError: for a file that breaks the schema, or where there are no rows at all.
        """
        self._listener.phase("parse", sum(path.stat().st_size for path in files))
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            spooled = [self._spool(number, path, pool) for number, path in enumerate(files)]
        if sum(entry.info.rows for entry in spooled) == 0:
            raise RawDataError(str(files[0]), None, "no rows in any input file")
        return spooled

    def _spool(self, number: int, path: Path, pool: ThreadPoolExecutor) -> SpooledFile:
        folder = self._work / f"input-{number:05d}"
        if finished := self._finished_before(folder, path):
            self._listener.advance(path.stat().st_size, finished.info.rows)
            return finished
        if folder.exists():
            remove_folder(folder)
        folder.mkdir()
        hasher = hashlib.sha256()
        block_rows: list[int] = []
        num_blank_lines = 0
        # A few slices in flight: enough to keep the threads busy, few enough to bound memory.
        flying: deque[tuple[Future[tuple[int, int]], int]] = deque()

        def land_oldest() -> int:
            """Waits for the oldest slice; returns its blank lines."""
            future, num_bytes = flying.popleft()
            num_rows, num_blank = future.result()
            block_rows.append(num_rows)
            self._listener.advance(num_bytes, num_rows)
            return num_blank

        for piece in self._reader.slices(path, hasher):
            target = _block_path(folder, len(block_rows) + len(flying))
            flying.append((pool.submit(self._parse, piece, target), piece.num_file_bytes))
            if len(flying) > NUM_THREADS + 1:
                num_blank_lines += land_oldest()
        while flying:
            num_blank_lines += land_oldest()
        size, digest = path.stat().st_size, hasher.hexdigest()
        info = InputFile(path.name, size, digest, sum(block_rows), num_blank_lines)
        marker = {"parse_key": self._key, "block_rows": block_rows, "info": vars(info)}
        write_whole(folder / FINISHED, json.dumps(marker).encode())
        return SpooledFile(info, folder, block_rows)

    def _parse(self, piece: RawSlice, target: Path) -> tuple[int, int]:
        """Runs in a worker thread; returns rows and blank lines."""
        block = self._reader.parse(piece)
        save_arrays(target, block_arrays(block))
        return block.num_rows, block.num_blank_lines

    def _finished_before(self, folder: Path, path: Path) -> SpooledFile | None:
        """The blocks of an interrupted run, if they are of this very content and schema."""
        marker = folder / FINISHED
        if not marker.exists():
            return None
        values = json.loads(marker.read_text(encoding="utf-8"))
        info = InputFile(**{**values["info"], "file": path.name})
        if values["parse_key"] != self._key or info.sha256 != file_sha256(path):
            return None
        return SpooledFile(info, folder, values["block_rows"])

    def _parse_key(self) -> str:
        """Digest of what parsing depends on: vocabulary rules and split may change without it."""
        schema = schema_to_dict(self._reader.schema)
        parsed = {key: schema[key] for key in ("format", "label", "example_weight")}
        parsed["dense"] = list(schema["dense"])
        parsed["sparse"] = [
            (f.name, f.token, f.separator, f.many, f.missing, f.bag_weights)
            for f in self._reader.features
        ]
        return hashlib.sha256(json.dumps(parsed).encode()).hexdigest()


def _block_path(folder: Path, number: int) -> Path:
    return folder / f"block-{number:06d}.arrow"
