"""The rows of a checkpoint: each rank's in a file of its own, read by any rank of any other run.

    rows-00000.safetensors   what rank 0 held: rectangles of tables and of their optimizer state
    rows-00000.json          where each of these lies in its table, and the file's digests

A rectangle is written from where it lies in memory, so writing needs no memory of the tables' size
and sends nothing. Whoever reads asks for rows of a table and gets them whole, whatever the plan
was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from data.files import naming, write_whole
from dlrm.tensor_file import (
    MALFORMED,
    CheckedFile,
    DamagedError,
    FileDigest,
    RowsOfTensor,
    TensorFile,
    TensorFileWriter,
    TensorInfo,
    check_size,
    pieces,
)
from embeddings.store import WEIGHT, RowsPart, assemble_rows
from embeddings.table_group import Piece

PIECE_BYTES = 4 << 20
"""Rows are written and read in stretches of that size. A reader holds two of them, and a block of
each file that it reads from; a writer holds none."""
_FILL_BYTES = 64 << 20
"""Rows that are read straight to where they belong: a piece that doesn't end with a block of the
file costs a copy of a part of one."""


@dataclass(frozen=True)
class StoredTable:
    """A table in a checkpoint: its size, and the width of each state, by name."""

    rows: int
    dim: int
    dtype: torch.dtype
    state_widths: dict[str, int]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row with its state."""
        return (self.dim + sum(self.state_widths.values())) * self.dtype.itemsize

    def blocks(self) -> Iterable[tuple[int, int]]:
        """(first, last + 1) of the stretches in which its rows are best read."""
        return pieces(self.rows, self.row_bytes, PIECE_BYTES)


@dataclass(frozen=True)
class _Rectangle:
    """One tensor of a rows file: `piece` of a table, of its weights or of a state."""

    piece: Piece
    name: str
    file: TensorFile
    tensor: str

    @property
    def width(self) -> int:
        """Columns of the tensor."""
        return self.file.tensors[self.tensor].shape[1]


def write_rows(
    folder: Path, rank: int, parts: Iterable[RowsPart], beat: Callable[[], None]
) -> dict[str, dict[str, Any]]:
    """Writes what this rank holds; returns the entries of both files for checkpoint.json.

    Args:
        folder: the checkpoint's.
        rank: of this process.
        parts: views of the rows (`ShardedEmbeddings.own_parts`), or copies of them.
        beat: called for every stretch.
    """
    tensors: dict[str, TensorInfo] = {}
    sources: list[Tensor] = []
    places: list[dict[str, Any]] = []
    for part in parts:
        columns = ",".join(f"{start}:{stop}" for start, stop in part.piece.columns)
        for name, values in part.values.items():
            rows = f"{part.row_start}:{part.row_stop}"
            key = f"{part.piece.table}.{name}[{rows},{columns}]"
            tensors[key] = TensorInfo(values.dtype, tuple(values.shape))
            sources.append(values)
            places.append(
                {
                    "tensor": key,
                    "table": part.piece.table,
                    "values": name,
                    "rows": [part.row_start, part.row_stop],
                    "columns": [list(c) for c in part.piece.columns],
                }
            )
    path = folder / f"rows-{rank:05d}.safetensors"
    writer = TensorFileWriter(path, tensors)
    try:
        for values in sources:
            row_bytes = values.shape[1] * values.element_size()
            for start, stop in pieces(values.shape[0], row_bytes, PIECE_BYTES):
                beat()
                writer.write(values[start:stop])
        digest = writer.close()
    except BaseException:
        writer.abandon()
        raise
    index = {
        "file": path.name,
        "bytes": digest.num_bytes,
        "tensors": places,
        "blocks": list(digest.blocks),
    }
    return {
        path.name: {"bytes": digest.num_bytes},
        **write_described(path.with_suffix(".json"), json.dumps(index).encode()),
    }


class RowsReader:
    """Reads rows of any table from the files of all ranks, checking what it reads.

    Keeps the files of one table open: read table by table, and each in ascending rows.

    Args:
        folder: the checkpoint's.
        files: `files` of checkpoint.json.
        tables: those of the checkpoint.

    Raises:
        DamagedError: for a file that isn't what was written, when it is opened or read.
    """

    def __init__(
        self,
        folder: Path,
        files: Mapping[str, Mapping[str, Any]],
        tables: Mapping[str, StoredTable],
    ) -> None:
        self._tables = tables
        self._of_table: dict[str, list[_Rectangle]] = {name: [] for name in tables}
        self._open: dict[str, RowsOfTensor] = {}
        self._open_table = ""
        self._filled_from: tuple[TensorFile, CheckedFile] | None = None
        for name in sorted(files):
            if name.startswith("rows-") and name.endswith(".json"):
                content = read_described(folder / name, files[name])
                try:
                    self._add(folder, content)
                except DamagedError:
                    raise
                except MALFORMED as error:
                    raise DamagedError(f"{folder / name} is damaged: it makes no sense") from error

    def read(self, table: str, start: int, stop: int, *, state: bool = False) -> dict[str, Tensor]:
        """Whole rows `start … stop-1` under `weight`, with `state` each state under its name."""
        stored = self._tables[table]
        widths = stored.state_widths if state else {}
        if table != self._open_table:
            self._close_table()
            self._open_table = table
        parts = []
        held = dict.fromkeys((WEIGHT, *widths), 0)
        for rectangle in self._of_table[table]:
            piece = rectangle.piece
            first, last = max(start, piece.row_start), min(stop, piece.row_stop)
            if first >= last or rectangle.name not in held:
                continue
            values = self._rows(rectangle).read(first - piece.row_start, last - piece.row_start)
            if last == piece.row_stop:  # Else as many blocks would be kept as there are rectangles.
                self._open.pop(rectangle.tensor).close()
            held[rectangle.name] += values.numel()
            if len(held) == 1 and values.shape == (stop - start, stored.dim):
                return {WEIGHT: values}
            parts.append(RowsPart(piece, first, last, {rectangle.name: values}))
        for name, width in {WEIGHT: stored.dim, **widths}.items():
            if held[name] != (stop - start) * width:
                raise DamagedError(
                    f"the checkpoint holds {held[name]:,} values of {name} for rows {start}:{stop} "
                    f"of table {table}, not {(stop - start) * width:,}"
                )
        return assemble_rows(stored.dim, widths, start, stop, parts, stored.dtype)

    def fill(
        self, part: RowsPart, names: Iterable[str], beat: Callable[[], None] = lambda: None
    ) -> bool:
        """Reads straight into the memory of `part`, without a copy in between.

        Args:
            part: views of rows that are held here (`RowStore.read_parts`).
            names: those of its values that are wanted.
            beat: called for every stretch.

        Returns:
            False where the files are cut into other columns, or the views aren't plain memory:
            nothing was read then, `read` can do it.
        """
        found: list[tuple[_Rectangle, int, Tensor]] = []
        for name in names:
            target = part.values[name]
            if not target.is_contiguous() or target.device.type != "cpu":
                return False
            held = 0
            for rectangle in self._of_table[part.piece.table]:
                piece = rectangle.piece
                first = max(part.row_start, piece.row_start)
                last = min(part.row_stop, piece.row_stop)
                if rectangle.name != name or first >= last:
                    continue
                if (piece.columns, rectangle.width) != (part.piece.columns, target.shape[1]):
                    return False
                rows = target[first - part.row_start : last - part.row_start]
                found.append((rectangle, first - piece.row_start, rows))
                held += last - first
            if held != part.row_stop - part.row_start:
                return False
        for rectangle, start, target in found:
            row_bytes = target.shape[1] * target.element_size()
            rows_of = rectangle.file.open_rows(rectangle.tensor, self._file(rectangle.file))
            for first, last in pieces(len(target), row_bytes, _FILL_BYTES):
                beat()
                rows_of.read_into(start + first, target[first:last])
        return True

    def close(self) -> None:
        """Closes the files."""
        self._close_table()
        if self._filled_from is not None:
            self._filled_from[1].close()
            self._filled_from = None

    def _close_table(self) -> None:
        for rows in self._open.values():
            rows.close()
        self._open = {}

    def _file(self, file: TensorFile) -> CheckedFile:
        """Opened; its last block is where the next tensor begins. One at a time keeps a block."""
        if self._filled_from is None or self._filled_from[0] is not file:
            if self._filled_from is not None:
                self._filled_from[1].close()
            self._filled_from = (file, file.open())
        return self._filled_from[1]

    def _rows(self, rectangle: _Rectangle) -> RowsOfTensor:
        if rectangle.tensor not in self._open:
            self._open[rectangle.tensor] = rectangle.file.open_rows(rectangle.tensor)
        return self._open[rectangle.tensor]

    def _add(self, folder: Path, content: bytes) -> None:
        index = json.loads(content)
        digest = FileDigest(index["bytes"], tuple(index["blocks"]))
        file = TensorFile(folder / index["file"], digest)
        for place in index["tensors"]:
            columns = tuple((start, stop) for start, stop in place["columns"])
            row_start, row_stop = place["rows"]
            piece = Piece(place["table"], 0, row_start, row_stop, columns)
            rectangle = _Rectangle(piece, place["values"], file, place["tensor"])
            self._of_table[place["table"]].append(rectangle)


def write_described(path: Path, content: bytes) -> dict[str, dict[str, Any]]:
    """Writes a small file; returns its entry for checkpoint.json."""
    with naming(path):
        write_whole(path, content)
    return {path.name: {"bytes": len(content), "xxh3": xxhash.xxh3_64_hexdigest(content)}}


def read_described(path: Path, entry: Mapping[str, Any]) -> bytes:
    """Reads a small file.

    Raises:
        DamagedError: where it isn't what was written.
    """
    check_size(path, entry["bytes"])
    content = path.read_bytes()
    if xxhash.xxh3_64_hexdigest(content) != entry["xxh3"]:
        raise DamagedError(f"{path} is damaged: its digest isn't the recorded one")
    return content
