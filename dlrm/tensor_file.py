"""safetensors files, written and read in stretches, every 1 MiB of them with a digest.

The format is that of https://huggingface.co/docs/safetensors: eight bytes with the header's size, a
JSON header, the tensors one after another. Its library writes a file from tensors that are all in
memory; tables are written from where they are, and read in stretches. Reading runs no code.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import xxhash
from torch import Tensor

from data.errors import UserError
from data.files import naming
from dlrm.early_write import EarlyWrite, allocate

BLOCK_BYTES = 1 << 20
"""What a digest is of, counted from the file's start; and what a reader keeps of each file."""
_READ_AHEAD_BYTES = 32 << 20
_ALIGN_BYTES = 64
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What reading JSON raises that isn't what was written."""


class DamagedError(UserError):
    """A file isn't what was written; the message names it."""


@dataclass(frozen=True)
class TensorInfo:
    """What a file's header says of a tensor; `begin` counts from the file's start."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int = 0

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FileDigest:
    """A file's size in bytes and the xxh3-64 digests of its blocks, hexadecimal."""

    num_bytes: int
    blocks: tuple[str, ...]


class TensorFileWriter:
    """Writes a file's tensors in order, each in as many stretches as the caller likes.

    Extra memory: none of the tensors' size. The file's whole size is allocated first: a full disk
    is told then.

    Args:
        path: the file; replaced if it is there.
        tensors: what `write` will be given, in this order.

    Raises:
        OSError: naming the file.
    """

    def __init__(self, path: Path, tensors: Mapping[str, TensorInfo]) -> None:
        header, num_bytes = _header(tensors)
        self._path, self._left = path, num_bytes
        self._digest, self._in_block = xxhash.xxh3_64(), 0
        self._blocks: list[str] = []
        self._num_bytes = len(header) + num_bytes
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115
        self._early = EarlyWrite(self._file.fileno())
        try:
            with naming(path):
                allocate(self._file.fileno(), self._num_bytes)
            self._put(memoryview(header))
        except BaseException:
            self.abandon()
            raise

    def write(self, values: Tensor) -> None:
        """Appends a stretch of the tensor whose turn it is."""
        array = values.detach().cpu().contiguous()
        view = array.reshape(-1).view(torch.uint8).numpy().data
        self._left -= len(view)
        assert self._left >= 0, "more than was announced"
        self._put(view)

    def close(self) -> FileDigest:
        """Flushes the file to disk; returns what proves that it is whole."""
        assert self._left == 0, f"{self._left} bytes less than was announced"
        if self._in_block:
            self._end_block()
        with naming(self._path):
            os.fsync(self._file.fileno())
            self._file.close()
        return FileDigest(self._num_bytes, tuple(self._blocks))

    def abandon(self) -> None:
        """Closes a file that won't be finished."""
        self._file.close()

    def _put(self, view: memoryview) -> None:
        position = 0
        while position < len(view):
            size = min(BLOCK_BYTES - self._in_block, len(view) - position)
            piece = view[position : position + size]
            self._digest.update(piece)  # What the cache holds now is written from there.
            written = 0
            while written < size:
                with naming(self._path):
                    written += self._file.write(piece[written:]) or 0
            position += size
            self._in_block += size
            if self._in_block == BLOCK_BYTES:
                self._end_block()

    def _end_block(self) -> None:
        self._early.grown_to(len(self._blocks) * BLOCK_BYTES)
        self._blocks.append(self._digest.hexdigest())
        self._digest.reset()
        self._in_block = 0


class CheckedFile:
    """Reads stretches of a file and checks every block that they touch.

    Keeps the last block, so that reading on from where one stopped reads nothing twice. The system
    is told to read on ahead of that, into its page cache: a disk works while digests are made.

    Args:
        path: the file.
        digest: as it was when it was written.

    Raises:
        DamagedError: for a missing file or one of another size; `read`, where a digest differs.
    """

    def __init__(self, path: Path, digest: FileDigest) -> None:
        self._path, self._digest = path, digest
        check_size(path, digest.num_bytes)
        self._file: BinaryIO = open(path, "rb", buffering=0)  # noqa: SIM115
        self._block = np.empty(0, dtype=np.uint8)
        self._kept = -1  # The number of the block that `_block` holds.
        self._told_bytes = 0  # Of the file, up to which the system was told to read.

    def read(self, begin: int, end: int) -> np.ndarray:
        """The bytes `begin … end-1`, as uint8; the caller's own."""
        whole = np.empty(end - begin, dtype=np.uint8)
        self.read_into(begin, whole)
        return whole

    def read_into(self, begin: int, target: np.ndarray) -> None:
        """Fills `target`, uint8, with the bytes from `begin` on; of damaged ones too, before they
        are known to be so."""
        end = begin + len(target)
        assert 0 <= begin <= end <= self._digest.num_bytes
        for number in range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            first = number * BLOCK_BYTES
            last = min(first + BLOCK_BYTES, self._digest.num_bytes)
            low, high = max(begin, first), min(end, last)
            wanted = target[low - begin : high - begin]
            if (low, high) == (first, last):  # Straight to where it is wanted.
                self._read_block(number, first, wanted)
                continue
            if self._kept != number:
                if not len(self._block):
                    self._block = np.empty(BLOCK_BYTES, dtype=np.uint8)
                self._kept = -1
                self._read_block(number, first, self._block[: last - first])
                self._kept = number
            wanted[:] = self._block[low - first : high - first]

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
        self._block, self._kept = np.empty(0, dtype=np.uint8), -1

    def __enter__(self) -> CheckedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_block(self, number: int, first: int, target: np.ndarray) -> None:
        view = target.data
        position = self._read_cached(view, first)
        if position < len(view):
            self._read_ahead(first + position)
        self._file.seek(first + position)
        while position < len(view):
            with naming(self._path):
                count = self._file.readinto(view[position:])  # type: ignore[attr-defined]
            if not count:
                break
            position += count
        if position < len(view) or xxhash.xxh3_64_hexdigest(view) != self._digest.blocks[number]:
            raise DamagedError(
                f"{self._path} is damaged: bytes {first:,} to {first + len(view) - 1:,} aren't "
                "those that were written"
            )

    def _read_cached(self, view: memoryview, first: int) -> int:
        """Reads what the page cache holds, and no further; returns the number of bytes."""
        if not hasattr(os, "RWF_NOWAIT"):
            return 0
        try:
            return os.preadv(self._file.fileno(), [view], first, os.RWF_NOWAIT)
        except OSError:  # Nothing is held, or the file system doesn't tell.
            return 0

    def _read_ahead(self, first: int) -> None:
        """Has the system read what follows `first`, half of the distance at a time."""
        begin = max(first, self._told_bytes)
        if begin - first > _READ_AHEAD_BYTES // 2 or begin >= self._digest.num_bytes:
            return
        self._told_bytes = min(first + _READ_AHEAD_BYTES, self._digest.num_bytes)
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):  # A file system may not take advice.
                os.posix_fadvise(
                    self._file.fileno(), begin, self._told_bytes - begin, os.POSIX_FADV_WILLNEED
                )


class TensorFile:
    """Reads tensors, or stretches of their rows, from a file that `TensorFileWriter` wrote.

    Args:
        path: the file.
        digest: as it was when it was written.

    Raises:
        DamagedError: for a file that isn't what was written, when it is opened or read.
    """

    def __init__(self, path: Path, digest: FileDigest) -> None:
        self._path, self._digest = path, digest
        with CheckedFile(path, digest) as file:
            self.tensors = _read_header(path, file, digest.num_bytes)

    def read(self, name: str) -> Tensor:
        """A whole tensor."""
        info = self.tensors[name]
        with CheckedFile(self._path, self._digest) as file:
            values = file.read(info.begin, info.begin + info.num_bytes)
        return _as_tensor(values, info.dtype, info.shape)

    def open(self) -> CheckedFile:
        """The file, to be read by several `open_rows`, one after the other."""
        return CheckedFile(self._path, self._digest)

    def open_rows(self, name: str, file: CheckedFile | None = None) -> RowsOfTensor:
        """One tensor of two dimensions, to be read in stretches of rows; from `file`, or from one
        of its own."""
        return RowsOfTensor(file or self.open(), self.tensors[name])


class RowsOfTensor:
    """Rows of a tensor in a file."""

    def __init__(self, file: CheckedFile, info: TensorInfo) -> None:
        self._file, self._info = file, info
        self._row_bytes = info.shape[1] * info.dtype.itemsize

    def read(self, start: int, stop: int) -> Tensor:
        """Rows `start … stop-1`."""
        begin = self._info.begin + start * self._row_bytes
        values = self._file.read(begin, begin + (stop - start) * self._row_bytes)
        return _as_tensor(values, self._info.dtype, (stop - start, self._info.shape[1]))

    def read_into(self, start: int, target: Tensor) -> None:
        """Fills `target`, contiguous, with the rows from `start` on; see `CheckedFile`."""
        begin = self._info.begin + start * self._row_bytes
        self._file.read_into(begin, target.detach().reshape(-1).view(torch.uint8).numpy())

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileDigest:
    """Writes small tensors at once."""
    infos = {name: TensorInfo(t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    writer = TensorFileWriter(path, infos)
    try:
        for values in tensors.values():
            writer.write(values)
        return writer.close()
    except BaseException:
        writer.abandon()
        raise


def dtype_name(dtype: torch.dtype) -> str:
    """`float32`."""
    return str(dtype).removeprefix("torch.")


def check_size(path: Path, num_bytes: int) -> None:
    """Refuses a file that is missing or of another size.

    Raises:
        DamagedError: naming both sizes.
    """
    found = path.stat().st_size if path.is_file() else None
    if found != num_bytes:
        what = "is missing" if found is None else f"has {found:,} bytes"
        raise DamagedError(f"{path} {what}, {num_bytes:,} bytes were written")


def _header(tensors: Mapping[str, TensorInfo]) -> tuple[bytes, int]:
    """The first bytes of the file, and the number of bytes that follow."""
    entries: dict[str, Any] = {}
    position = 0
    for name, info in tensors.items():
        end = position + info.num_bytes
        entries[name] = {
            "dtype": _NAMES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGN_BYTES)
    return len(text).to_bytes(8, "little") + text, position


def _read_header(path: Path, file: CheckedFile, num_bytes: int) -> dict[str, TensorInfo]:
    try:
        if num_bytes < 8:
            raise ValueError(num_bytes)
        size = int.from_bytes(file.read(0, 8).tobytes(), "little")
        if 8 + size > num_bytes:
            raise ValueError(size)
        entries = json.loads(file.read(8, 8 + size).tobytes())
        found = {}
        for name, entry in entries.items():
            shape, (begin, end) = entry["shape"], entry["data_offsets"]
            info = TensorInfo(_DTYPES[entry["dtype"]], tuple(shape), 8 + size + begin)
            is_sound = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
            if not is_sound or begin + info.num_bytes != end or 8 + size + end > num_bytes:
                raise ValueError(name)
            found[name] = info
    except DamagedError:
        raise
    except MALFORMED as error:
        raise DamagedError(f"{path} is damaged: its header makes no sense") from error
    return found


def _as_tensor(values: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not len(values):  # Which torch doesn't take for another type.
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(values).view(dtype).view(shape)


def pieces(num_rows: int, row_bytes: int, most_bytes: int) -> Iterator[tuple[int, int]]:
    """(first, last + 1) of stretches of rows of at most that many bytes, one row at least."""
    step = max(1, most_bytes // max(1, row_bytes))
    for start in range(0, num_rows, step):
        yield start, min(start + step, num_rows)


def names_of(tensors: Sequence[str]) -> str:
    """For messages: the first few names."""
    shown = ", ".join(tensors[:4])
    return shown if len(tensors) <= 4 else f"{shown} and {len(tensors) - 4} more"
