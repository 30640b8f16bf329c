"""Raw files as bytes: what their first lines tell, and cutting them into whole lines."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from data.errors import RawDataError
from data.raw_lines import delimiter_hint, split_fields
from data.schema import Schema
from data.unpack import archive_errors, packing_of, unpacked

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LOOK_BYTES = 1 << 20


def has_labels(path: Path, schema: Schema, *, with_value: bool = False) -> bool:
    """Whether a raw file holds the label column: by name, or by the fields of its first line.

    Args:
        path: the file.
        schema: what its columns mean.
        with_value: whether the first row must have a label in it, too.

    Raises:
        RawDataError: where there is no header and the count fits neither, or the file is damaged.
    """
    label, form = schema.label.column, schema.format
    if form.kind == "parquet":
        return _parquet_has_labels(path, label, with_value)
    lines = _first_lines(path)
    fields = names_of(lines[0], schema) if lines else []
    if form.header:
        if label not in fields or not with_value or len(lines) < 2:
            return label in fields
        return _first_value(lines[1], fields, schema) not in form.missing
    if not lines:
        return True
    has_column = has_label_column(path, lines[0], schema)
    if has_column and with_value:
        return _first_value(lines[0], form.columns, schema) not in form.missing
    return has_column


def has_label_column(path: Path, line: bytes, schema: Schema) -> bool:
    """The same of a line of a file without a header, by its number of fields."""
    num_columns = len(schema.format.columns)
    num_unlabelled = num_columns - len({schema.label.column, schema.example_weight} - {None})
    found = len(names_of(line, schema))
    if found not in (num_columns, num_unlabelled):
        text = line.decode("utf-8", errors="replace")
        raise RawDataError(
            str(path),
            1,
            f"{found} fields found, {num_columns} expected with labels or {num_unlabelled} without"
            f"{delimiter_hint(text, schema)}",
        )
    return found == num_columns


def _first_value(line: bytes, columns: list[str], schema: Schema) -> str:
    """The label's text in a line; of a line that is too short, some text: reading it tells."""
    fields = split_fields(line.decode("utf-8", errors="replace"), schema)
    place = columns.index(schema.label.column)
    return fields[place] if place < len(fields) else "?"


def _parquet_has_labels(path: Path, label: str, with_value: bool) -> bool:
    try:
        with pq.ParquetFile(path) as source:
            if label not in source.schema_arrow.names:
                return False
            if not with_value or source.schema_arrow.names.count(label) > 1:
                return True
            batch = next(source.iter_batches(1, columns=[label]), None)
            return batch is None or batch.num_rows == 0 or batch.column(0).null_count == 0
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
        raise bad_parquet(path, error) from None


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
        RawDataError: for a damaged archive or no text (see `packing_of`), or where there is no
            line end.
    """
    packing = packing_of(path)
    stream = unpacked(packing, counted)
    rest = b""
    while True:
        with archive_errors(path):
            chunk = stream.read(slice_bytes)
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


def bad_parquet(path: Path, error: object) -> RawDataError:
    """Of a file that isn't parquet, or is damaged."""
    return RawDataError(
        str(path), None, f"not a readable parquet file ({str(error).splitlines()[0]})"
    )


def _first_lines(path: Path) -> list[bytes]:
    """The first two lines that aren't blank, without their ends; fewer where there are no more."""
    lines: list[bytes] = []
    with open(path, "rb", buffering=0) as opened:
        pieces = whole_lines(path, CountingReader(opened, None), _LOOK_BYTES)
        for number, piece in enumerate(pieces):
            rest = piece if number else piece.removeprefix(BYTE_ORDER_MARK)
            while len(lines) < 2 and (rest := rest.lstrip(b"\r\n")):
                line, _, rest = rest.partition(b"\n")
                lines.append(line.rstrip(b"\r"))
            if len(lines) == 2:
                break
    return lines


def names_of(line: bytes, schema: Schema) -> list[str]:
    """The fields of a header line, blanks and quotes around them dropped."""
    text = line.decode("utf-8", errors="replace").rstrip("\r\n")
    quote = schema.format.quote or None
    return [name.strip().strip(quote) for name in split_fields(text, schema)]


def count_line_ends(data: bytes) -> int:
    # Several times faster than bytes.count for lines of this length.
    view = np.frombuffer(data, dtype=np.uint8)
    step = 1 << 18
    return sum(
        int(np.count_nonzero(view[at : at + step] == 10)) for at in range(0, len(view), step)
    )
