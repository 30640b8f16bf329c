"""Raw files → blocks of encoded columns, streaming, with the exact line named when one is bad.

A csv file is read in slices of whole lines; pyarrow parses them in worker threads. When a slice
fails, it is read again line by line in plain Python, only to say which line is wrong and why.
"""

from __future__ import annotations

import glob
import gzip
import io
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from data.errors import RawDataError, UserError
from data.raw_lines import explain_bad_slice, split_fields
from data.schema import Feature, Schema, resolve_features, used_columns
from data.tokens import MISSING, BadToken, EncodedColumn, encode

SLICE_BYTES = 8 << 20
_PARQUET_BLOCK_ROWS = 65_536
_DAMAGED_ARCHIVE = (EOFError, gzip.BadGzipFile, zlib.error)


@dataclass(frozen=True)
class RawBlock:
    """`B` parsed rows.

    Attributes:
        label_B: uint8 0 or 1, or None for a file without labels.
        weight_B: fp32 example weights, or None where the schema has none.
        dense: fp64 values by column before their transform; NaN means missing.
        sparse: encoded ids by feature name.
        num_blank_lines: empty lines that were skipped.
    """

    num_rows: int
    label_B: np.ndarray | None
    weight_B: np.ndarray | None
    dense: dict[str, np.ndarray]
    sparse: dict[str, EncodedColumn]
    num_blank_lines: int = 0


@dataclass(frozen=True)
class RawSlice:
    """A piece of a raw file that can be parsed on its own."""

    file: str
    payload: bytes | pa.RecordBatch
    first_line: int
    num_lines: int
    columns: list[str]
    """Names of the fields of its lines."""
    num_file_bytes: int
    """Bytes of the (compressed) file that were read for it; for progress."""


def expand_inputs(spec: str | list[str], base: Path, key: str) -> list[Path]:
    """The files that a path, a list of paths or a glob names, numbers in names sorted as numbers.

    Raises:
        UserError: where a path or pattern names no file, naming `key`.
    """
    patterns = [spec] if isinstance(spec, str) else list(spec)
    files: list[Path] = []
    for pattern in patterns:
        full = str(base / Path(pattern).expanduser())
        found = [full] if Path(full).is_file() else sorted(glob.glob(full), key=_natural_order)
        found = [name for name in found if Path(name).is_file()]
        if not found:
            raise UserError(f"{key}={pattern}: no such file (looked for {full})")
        files += [Path(name) for name in found]
    twice = {str(f) for f in files if files.count(f) > 1}
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
            raise _bad_parquet(path, error) from None
    fields = _names_of(_first_line(path), schema)
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


class RawReader:
    """Reads files of one schema. Immutable; `slices` reads, `parse` (thread-safe) parses.

    Args:
        schema: what the columns mean.
        labelled: whether the files hold the label (and example weight) columns.
    """

    def __init__(self, schema: Schema, *, labelled: bool = True) -> None:
        self.schema = schema
        self.labelled = labelled
        self.features: tuple[Feature, ...] = resolve_features(schema)
        self._used = used_columns(schema, with_label=labelled)

    def slices(self, path: Path, hasher: Any = None) -> Iterator[RawSlice]:
        """The file's slices in order; `hasher` (from hashlib) is fed with the file's own bytes.

        Raises:
            RawDataError: for an archive that ends early or isn't one.
        """
        if self.schema.format.kind == "parquet":
            yield from self._parquet_slices(path, hasher)
        else:
            yield from self._csv_slices(path, hasher)

    def parse(self, piece: RawSlice) -> RawBlock:
        """Parses and encodes one slice.

        Raises:
            RawDataError: naming file and line.
        """
        if isinstance(piece.payload, pa.RecordBatch):
            return self._encode_parquet(piece, piece.payload)
        columns = piece.columns
        try:
            self._check_quotes(piece.payload)
            table = self._read_csv(piece.payload, columns)
            if table.num_rows > piece.num_lines:
                raise _BadColumn("a carriage return inside a line")
            block = self._encode(table)
        except (pa.ArrowInvalid, BadToken, _BadColumn) as error:
            explain_bad_slice(
                piece.file, piece.payload, piece.first_line, self.schema, columns, self.labelled
            )
            raise RawDataError(
                piece.file, None, f"near line {piece.first_line:,}: {error}"
            ) from None
        blank = piece.num_lines - block.num_rows
        return RawBlock(
            block.num_rows, block.label_B, block.weight_B, block.dense, block.sparse, blank
        )

    # csv

    def _csv_slices(self, path: Path, hasher: Any) -> Iterator[RawSlice]:
        name, line = str(path), 1
        columns = self._headless_columns()
        with open(path, "rb", buffering=0) as opened:
            counted = _CountingReader(opened, hasher)
            is_first = True
            for piece in _whole_lines(path, counted):
                if is_first:
                    is_first = False
                    piece = piece.removeprefix(b"\xef\xbb\xbf")
                    if self.schema.format.header:
                        header, _, piece = piece.partition(b"\n")
                        columns, line = self._check_header(name, header), 2
                if piece:
                    num_lines = _count_line_ends(piece) + (not piece.endswith(b"\n"))
                    yield RawSlice(name, piece, line, num_lines, columns, counted.take())
                    line += num_lines

    def _headless_columns(self) -> list[str]:
        columns = self.schema.format.columns
        if self.labelled:
            return columns
        return [
            c for c in columns if c not in (self.schema.label.column, self.schema.example_weight)
        ]

    def _check_header(self, file: str, line: bytes) -> list[str]:
        names = _names_of(line, self.schema)
        absent = [name for name in self._used if name not in names]
        if absent:
            delimiter = self.schema.format.delimiter
            hint = f"; is the delimiter {delimiter!r}?" if len(names) == 1 else ""
            raise RawDataError(
                file,
                1,
                f"the header has no column {', '.join(absent)}; it names {', '.join(names)}{hint}",
            )
        twice = sorted({name for name in self._used if names.count(name) > 1})
        if twice:
            raise RawDataError(file, 1, f"the header names a column twice: {', '.join(twice)}")
        return names

    def _read_csv(self, payload: bytes, columns: list[str]) -> pa.Table:
        form = self.schema.format
        text_kind = pa.string()
        types: dict[str, pa.DataType] = dict.fromkeys(columns, text_kind)
        if not form.trim:
            types.update(dict.fromkeys(self.schema.dense, pa.float64()))
            types.update({f.name: pa.int64() for f in self.features if _is_plain_int(f)})
        return pa_csv.read_csv(
            pa.BufferReader(payload),
            read_options=pa_csv.ReadOptions(
                column_names=columns, block_size=max(len(payload), 1), use_threads=False
            ),
            parse_options=pa_csv.ParseOptions(
                delimiter=form.delimiter, quote_char=form.quote or False
            ),
            convert_options=pa_csv.ConvertOptions(
                column_types=types,
                include_columns=self._used,
                null_values=form.missing,
                strings_can_be_null=True,
            ),
        )

    def _check_quotes(self, payload: bytes) -> None:
        """Refuses a line break inside quotes: slices are cut at line breaks."""
        quote = self.schema.format.quote.encode()
        if not quote or quote not in payload:
            return
        text = np.frombuffer(payload, dtype=np.uint8)
        num_quotes = np.cumsum(text == quote[0])[text == 10]
        if (num_quotes % 2).any():
            raise _BadColumn("a line break inside quotes isn't supported")

    def _encode(self, table: pa.Table) -> RawBlock:
        arrays = {name: _combine(table[name]) for name in self._used}
        if self.schema.format.trim:
            arrays = {name: self._trimmed(name, values) for name, values in arrays.items()}
        return self._block(arrays, table.num_rows)

    def _trimmed(self, name: str, values: pa.Array) -> pa.Array:
        text = pc.utf8_trim_whitespace(values)
        is_missing = pc.is_in(text, value_set=pa.array(self.schema.format.missing, pa.string()))
        text = pc.if_else(is_missing, pa.scalar(None, pa.string()), text)
        if name in self.schema.dense:
            return text.cast(pa.float64())
        if any(f.name == name and _is_plain_int(f) for f in self.features):
            return text.cast(pa.int64())
        return text

    # parquet

    def _parquet_slices(self, path: Path, hasher: Any) -> Iterator[RawSlice]:
        if hasher is not None:
            with open(path, "rb") as opened:
                while piece := opened.read(1 << 20):
                    hasher.update(piece)
        try:
            source = pq.ParquetFile(path)
        except (pa.ArrowInvalid, OSError) as error:
            raise _bad_parquet(path, error) from None
        with source:
            absent = [n for n in self._used if n not in source.schema_arrow.names]
            if absent:
                raise RawDataError(str(path), None, f"has no column {', '.join(absent)}")
            row, size = 1, path.stat().st_size
            total = max(source.metadata.num_rows, 1)
            batches = source.iter_batches(_PARQUET_BLOCK_ROWS, columns=self._used)
            while True:
                try:
                    batch = next(batches, None)
                except (pa.ArrowInvalid, OSError) as error:
                    raise _bad_parquet(path, error) from None
                if batch is None:
                    return
                if batch.num_rows:
                    yield RawSlice(
                        str(path),
                        batch,
                        row,
                        batch.num_rows,
                        self._used,
                        size * batch.num_rows // total,
                    )
                row += batch.num_rows

    def _encode_parquet(self, piece: RawSlice, batch: pa.RecordBatch) -> RawBlock:
        arrays = {name: batch.column(name) for name in self._used}
        try:
            return self._block(arrays, batch.num_rows)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, BadToken, _BadColumn) as error:
            last = piece.first_line + batch.num_rows - 1
            raise RawDataError(
                piece.file, None, f"rows {piece.first_line:,} to {last:,}: {error}"
            ) from None

    # both

    def _block(self, arrays: dict[str, pa.Array], num_rows: int) -> RawBlock:
        schema = self.schema
        dense = {name: _dense_values(name, arrays[name]) for name in schema.dense}
        # A parquet file's nulls are its missing values.
        missing = schema.format.missing if schema.format.kind == "csv" else []
        sparse = {f.name: _sparse_values(f, arrays, missing) for f in self.features}
        label_B = weight_B = None
        if self.labelled:
            label_B = self._label_values(arrays[schema.label.column])
            if schema.example_weight:
                weight_B = _dense_values(schema.example_weight, arrays[schema.example_weight])
                weight_B = _as_fp32(schema.example_weight, weight_B)
                if np.isnan(weight_B).any() or (weight_B < 0).any():
                    raise _BadColumn(f"column {schema.example_weight}: missing or negative weight")
        return RawBlock(num_rows, label_B, weight_B, dense, sparse)

    def _label_values(self, values: pa.Array) -> np.ndarray:
        label = self.schema.label
        if pa.types.is_floating(values.type):
            values = values.cast(pa.int64())
        encoded = values.cast(pa.string()).dictionary_encode()
        meaning = []
        for text in encoded.dictionary.to_pylist():
            if text not in label.positive and text not in label.negative:
                raise _BadColumn(f"column {label.column}: label {text!r}")
            meaning.append(text in label.positive)
        if encoded.null_count:
            raise _BadColumn(f"column {label.column}: a label is missing")
        return np.array(meaning, dtype=np.uint8)[encoded.indices.to_numpy(zero_copy_only=False)]


class _BadColumn(ValueError):
    """A value that the schema doesn't admit; turned into a RawDataError that names the line."""


class _CountingReader(io.RawIOBase):
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


def _whole_lines(path: Path, counted: _CountingReader) -> Iterator[bytes]:
    """The file's text in pieces of about `SLICE_BYTES` that end where a line does.

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
            chunk = stream.read(SLICE_BYTES)
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
        if len(rest) > 4 * SLICE_BYTES:
            limit = 4 * SLICE_BYTES >> 20
            raise RawDataError(str(path), None, f"no line end within {limit} MiB: not a text file?")
    if rest:
        yield rest


def _bad_archive(path: Path, error: object) -> RawDataError:
    return RawDataError(
        str(path), None, f"the archive is damaged or cut short ({error}); fetch it again"
    )


def _bad_parquet(path: Path, error: object) -> RawDataError:
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


def _names_of(line: bytes, schema: Schema) -> list[str]:
    """The fields of a header line, blanks and quotes around them dropped."""
    text = line.decode("utf-8", errors="replace").rstrip("\r\n")
    quote = schema.format.quote or None
    return [name.strip().strip(quote) for name in split_fields(text, schema)]


def _natural_order(name: str) -> list[int | str]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _count_line_ends(data: bytes) -> int:
    # Several times faster than bytes.count for lines of this length.
    view = np.frombuffer(data, dtype=np.uint8)
    step = 1 << 18
    return sum(
        int(np.count_nonzero(view[at : at + step] == 10)) for at in range(0, len(view), step)
    )


def _is_plain_int(feature: Feature) -> bool:
    return feature.token == "int" and not feature.separator


def _combine(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    if isinstance(combined, pa.ChunkedArray):
        return combined.chunk(0) if combined.num_chunks else pa.array([], column.type)
    return combined


def _dense_values(name: str, values: pa.Array) -> np.ndarray:
    numbers = values.cast(pa.float64())
    array = numbers.to_numpy(zero_copy_only=False)
    is_finite = np.isfinite(array)
    if int(is_finite.sum()) + numbers.null_count != len(array):
        raise _BadColumn(f"column {name}: a value isn't finite")
    return array


def _as_fp32(name: str, values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    if np.isinf(narrow).any():
        raise _BadColumn(f"column {name}: a value is too large for fp32")
    return narrow


def _sparse_values(
    feature: Feature, arrays: dict[str, pa.Array], missing: list[str]
) -> EncodedColumn:
    values = arrays[feature.name]
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if feature.many:
        return _bags(feature, values, arrays, missing)
    encoded = encode(_as_token_type(feature, values), feature.token)
    if not feature.is_list:
        return encoded
    is_present = encoded.codes != MISSING
    return EncodedColumn(
        encoded.codes[is_present], is_present.astype(np.int32), encoded.keys, encoded.tokens
    )


def _as_token_type(feature: Feature, values: pa.Array) -> pa.Array:
    wanted = pa.int64() if feature.token == "int" else pa.string()
    return values if values.type == wanted else values.cast(wanted)


def _bags(
    feature: Feature, values: pa.Array, arrays: dict[str, pa.Array], missing: list[str]
) -> EncodedColumn:
    """List columns, or texts cut at the separator, to codes and lengths."""
    lengths, flat = _split_bags(values, feature.separator)
    is_missing = pc.is_in(flat, value_set=pa.array(missing, pa.string())) if missing else None
    if flat.null_count or (is_missing is not None and pc.any(is_missing).as_py()):
        raise _BadColumn(f"column {feature.name}: a missing id inside a bag")
    weights = None
    if feature.bag_weights:
        weight_lengths, flat_weights = _split_bags(arrays[feature.bag_weights], feature.separator)
        if not np.array_equal(lengths, weight_lengths):
            raise _BadColumn(
                f"column {feature.bag_weights}: a row's number of weights isn't the number of ids "
                f"in {feature.name}"
            )
        weights = _as_fp32(feature.bag_weights, _dense_values(feature.bag_weights, flat_weights))
        if np.isnan(weights).any():
            raise _BadColumn(f"column {feature.bag_weights}: a weight is missing")
    encoded = encode(_as_token_type(feature, flat), feature.token)
    codes = encoded.codes
    if feature.missing == "row":
        codes, lengths, weights = _fill_empty_bags(codes, lengths, weights)
    return EncodedColumn(codes, lengths, encoded.keys, encoded.tokens, weights)


def _split_bags(values: pa.Array, separator: str) -> tuple[np.ndarray, pa.Array]:
    lists = pc.split_pattern(values, separator) if separator else values
    if not (pa.types.is_list(lists.type) or pa.types.is_large_list(lists.type)):
        raise _BadColumn(f"is no list column but {values.type}; set many=false")
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    return lengths.astype(np.int32), lists.flatten()


def _fill_empty_bags(
    codes: np.ndarray, lengths: np.ndarray, weights: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    is_empty = lengths == 0
    if not is_empty.any():
        return codes, lengths, weights
    starts = np.cumsum(lengths) - lengths
    codes = np.insert(codes, starts[is_empty], MISSING)
    if weights is not None:
        weights = np.insert(weights, starts[is_empty], np.float32(1))
    return codes, np.where(is_empty, 1, lengths).astype(np.int32), weights
