"""Raw files as bytes: finding them, unpacking them, cutting them into whole lines."""

from __future__ import annotations

import glob
import gzip
import io
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data.errors import RawDataError, UserError
from data.raw_lines import split_fields
from data.schema import Schema

_DAMAGED_ARCHIVE = (EOFError, gzip.BadGzipFile, zlib.error)


def expand_inputs(spec: str | list[str], base: Path, key: str) -> list[Path]:
    """The files that a path, a list of paths or a glob names, numbers in names sorted as numbers.

    Raises:
        UserError: where a path or pattern names no file, naming `key`.
    """
    patterns = [spec] if isinstance(spec, str) else list(spec)
    files: list[Path] = []
    for pattern in patterns:
        full = str(base / Path(pattern).expanduser())
        in_base = str(Path(glob.escape(str(base))) / Path(pattern).expanduser())
        found = [full] if Path(full).is_file() else sorted(glob.glob(in_base), key=_natural_order)
        found = [name for name in found if Path(name).is_file()]
        if not found:
            raise UserError(f"{key}={pattern}: no such file (looked for {full})")
        files += [Path(name) for name in found]
    resolved = [path.resolve() for path in files]
    twice = {str(path) for path in resolved if resolved.count(path) > 1}
    if twice:
        raise UserError(f"{key}: named twice: {', '.join(sorted(twice))}")
    return files


def has_labels(path: Path, schema: Schema) -> bool:
    """Whether a raw file holds the label column: by name, or by the fields of its first line.

    Raises:
        RawDataError: where there is no header and the count fits neither, or the file is damaged.
    """
    label, form = schema.label.column, schema.format
    if form.kind == "parquet":
        try:
            return label in pq.read_schema(path).names
        except (pa.ArrowInvalid, OSError) as error:
            raise bad_parquet(path, error) from None
    fields = names_of(_first_line(path), schema)
    if form.header:
        return label in fields
    absent = {label, schema.example_weight} - {None}
    counts = {len(form.columns): True, len(form.columns) - len(absent): False}
    if len(fields) not in counts:
        raise RawDataError(
            str(path),
            1,
            f"{len(fields)} fields found, {len(form.columns)} expected with labels or "
            f"{len(form.columns) - len(absent)} without",
        )
    return counts[len(fields)]


class CountingReader(io.RawIOBase):
    """Passes a file's bytes on, feeds the hash and counts them."""

    def __init__(self, source: io.RawIOBase | io.FileIO, hasher: Any) -> None:
        self._source, self._hasher, self._pending = source, hasher, 0

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        count = self._source.readinto(target) or 0
        if self._hasher is not None and count:
            self._hasher.update(memoryview(target)[:count])
        self._pending += count
        return count

    def read(self, size: int = -1) -> bytes:
        piece = self._source.read(size) or b""
        if self._hasher is not None:
            self._hasher.update(piece)
        self._pending += len(piece)
        return piece

    def take(self) -> int:
        """Bytes read since the last call."""
        count, self._pending = self._pending, 0
        return count


def whole_lines(path: Path, counted: CountingReader, slice_bytes: int) -> Iterator[bytes]:
    """The file's text in pieces of about `slice_bytes` that end where a line does.

    Raises:
        RawDataError: for a damaged archive, or where there is no line end.
    """
    is_archive = path.suffix == ".gz"
    if is_archive and path.stat().st_size == 0:
        raise _bad_archive(path, "it is empty")
    stream: Any = counted
    if is_archive:
        stream = gzip.GzipFile(fileobj=io.BufferedReader(counted, 1 << 20))
    rest = b""
    while True:
        try:
            chunk = stream.read(slice_bytes)
        except _DAMAGED_ARCHIVE as error:
            raise _bad_archive(path, error) from None
        if not chunk:
            break
        end = chunk.rfind(b"\n") + 1
        if end:
            yield b"".join((rest, memoryview(chunk)[:end]))
            rest = chunk[end:]
            continue
        rest += chunk
        if len(rest) > 4 * slice_bytes:
            limit = 4 * slice_bytes >> 20
            raise RawDataError(str(path), None, f"no line end within {limit} MiB: not a text file?")
    if rest:
        yield rest


def _bad_archive(path: Path, error: object) -> RawDataError:
    return RawDataError(
        str(path), None, f"the archive is damaged or cut short ({error}); fetch it again"
    )


def bad_parquet(path: Path, error: object) -> RawDataError:
    return RawDataError(str(path), None, f"not a readable parquet file ({error})")


def _first_line(path: Path) -> bytes:
    """The first line that isn't blank; empty where there is none."""
    opener: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as opened:
            first = opened.readline().removeprefix(b"\xef\xbb\xbf")
            while first and not first.strip(b"\r\n"):
                first = opened.readline()
            return first
    except _DAMAGED_ARCHIVE as error:
        raise _bad_archive(path, error) from None


def names_of(line: bytes, schema: Schema) -> list[str]:
    """The fields of a header line, blanks and quotes around them dropped."""
    text = line.decode("utf-8", errors="replace").rstrip("\r\n")
    quote = schema.format.quote or None
    return [name.strip().strip(quote) for name in split_fields(text, schema)]


def _natural_order(name: str) -> list[int | str]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def count_line_ends(data: bytes) -> int:
    # Several times faster than bytes.count for lines of this length.
    view = np.frombuffer(data, dtype=np.uint8)
    step = 1 << 18
    return sum(
        int(np.count_nonzero(view[at : at + step] == 10)) for at in range(0, len(view), step)
    )
