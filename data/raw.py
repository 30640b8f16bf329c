"""Raw files → blocks of encoded columns, streaming, with the exact line named when one is bad.

A csv file is read in slices of whole lines; pyarrow parses them in worker threads. When a slice
fails, it is read again line by line in plain Python, only to say which line is wrong and why.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from data.errors import RawDataError
from data.raw_columns import as_fp32, combine, dense_values, is_plain_int, sparse_values
from data.raw_files import (
    BYTE_ORDER_MARK,
    CountingReader,
    bad_parquet,
    count_line_ends,
    has_label_column,
    names_of,
    whole_lines,
)
from data.raw_lines import check_closing_quotes, explain_bad_slice, header_problem
from data.raw_types import BadColumn, check_types, id_values
from data.schema import Feature, Schema, resolve_features, used_columns
from data.tokens import BadToken, EncodedColumn

SLICE_BYTES = 8 << 20
_PARQUET_BLOCK_ROWS = 65_536
_UNREADABLE = (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError)


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
        self._integers = [f.name for f in self.features if is_plain_int(f)]
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
            if b"\r" in piece.payload:
                num_returns = piece.payload.count(b"\r")
                if num_returns != piece.payload.count(b"\r\n"):
                    raise BadColumn("a carriage return inside a line")
            table = self._read_csv(piece.payload, columns)
            block = self._encode(table)
        except (pa.ArrowInvalid, BadToken, BadColumn) as error:
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
        name, line, num_blank = str(path), 1, 0
        columns: list[str] | None = None
        with open(path, "rb", buffering=0) as opened:
            counted = CountingReader(opened, hasher)
            for number, piece in enumerate(whole_lines(path, counted, SLICE_BYTES)):
                if number == 0:
                    piece = piece.removeprefix(BYTE_ORDER_MARK)
                if columns is None:
                    text = piece.lstrip(b"\r\n")
                    num_blank += count_line_ends(piece[: len(piece) - len(text)])
                    if not text:
                        continue
                    first, _, rest = text.partition(b"\n")
                    if self.schema.format.header:
                        columns, line = self._check_header(name, num_blank + 1, first), 2
                        text = rest
                    else:
                        columns = self._headless_columns(path, first)
                    # Blank lines in front stay, to be counted; they may follow the header as well.
                    piece = b"\n" * num_blank + text
                if piece:
                    num_lines = count_line_ends(piece) + (not piece.endswith(b"\n"))
                    yield RawSlice(name, piece, line, num_lines, columns, counted.take())
                    line += num_lines
            if columns is None and num_blank:
                blank = b"\n" * num_blank
                yield RawSlice(name, blank, 1, num_blank, self._used, counted.take())

    def _headless_columns(self, path: Path, line: bytes) -> list[str]:
        columns = self.schema.format.columns
        if self.labelled or has_label_column(path, line, self.schema):
            return columns
        return [
            c for c in columns if c not in (self.schema.label.column, self.schema.example_weight)
        ]

    def _check_header(self, file: str, number: int, line: bytes) -> list[str]:
        names = names_of(line, self.schema)
        absent = [name for name in self._used if name not in names]
        if absent:
            raise RawDataError(file, number, header_problem(names, absent, line, self.schema))
        twice = sorted({name for name in self._used if names.count(name) > 1})
        if twice:
            raise RawDataError(file, number, f"the header names a column twice: {', '.join(twice)}")
        return names

    def _read_csv(self, payload: bytes, columns: list[str]) -> pa.Table:
        form = self.schema.format
        text_kind = pa.string()
        types: dict[str, pa.DataType] = dict.fromkeys(columns, text_kind)
        if not form.trim:
            types.update(dict.fromkeys(self.schema.dense, pa.float64()))
            # The parser would take 0x1f for a whole number.
            if self._integers and not _may_hold_0x(payload):
                types.update(dict.fromkeys(self._integers, pa.int64()))
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
            raise BadColumn("a line break inside quotes isn't supported")
        if b"\\" + quote in payload:
            check_closing_quotes(payload, self.schema)

    def _encode(self, table: pa.Table) -> RawBlock:
        arrays = {name: combine(table[name]) for name in self._used}
        if self.schema.format.trim:
            arrays = {name: self._trimmed(name, values) for name, values in arrays.items()}
        for name in self._integers:
            if pa.types.is_string(arrays[name].type):
                arrays[name] = pc.utf8_trim(arrays[name], " \t")
        return self._block(arrays, table.num_rows)

    def _trimmed(self, name: str, values: pa.Array) -> pa.Array:
        text = pc.utf8_trim_whitespace(values)
        is_missing = pc.is_in(text, value_set=pa.array(self.schema.format.missing, pa.string()))
        text = pc.if_else(is_missing, pa.scalar(None, pa.string()), text)
        if name in self.schema.dense:
            return text.cast(pa.float64())
        return text

    # parquet

    def _parquet_slices(self, path: Path, hasher: Any) -> Iterator[RawSlice]:
        if hasher is not None:
            with open(path, "rb") as opened:
                while piece := opened.read(1 << 20):
                    hasher.update(piece)
        try:
            source = pq.ParquetFile(path)
        except _UNREADABLE as error:
            raise bad_parquet(path, error) from None
        with source:
            check_types(path, source.schema_arrow, self.schema, labelled=self.labelled)
            row, size = 1, path.stat().st_size
            total = max(source.metadata.num_rows, 1)
            batches = source.iter_batches(_PARQUET_BLOCK_ROWS, columns=self._used)
            while True:
                try:
                    batch = next(batches, None)
                except _UNREADABLE as error:
                    raise bad_parquet(path, error) from None
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
        except (BadToken, BadColumn) as error:
            last = piece.first_line + batch.num_rows - 1
            raise RawDataError(
                piece.file, None, f"rows {piece.first_line:,} to {last:,}: {error}"
            ) from None

    # both

    def _block(self, arrays: dict[str, pa.Array], num_rows: int) -> RawBlock:
        schema = self.schema
        dense = {name: dense_values(name, arrays[name]) for name in schema.dense}
        # A parquet file's nulls are its missing values.
        missing = schema.format.missing if schema.format.kind == "csv" else []
        sparse = {f.name: sparse_values(f, arrays, missing) for f in self.features}
        label_B = weight_B = None
        if self.labelled:
            label_B = self._label_values(arrays[schema.label.column])
            if schema.example_weight:
                weight_B = dense_values(schema.example_weight, arrays[schema.example_weight])
                weight_B = as_fp32(schema.example_weight, weight_B)
                if np.isnan(weight_B).any() or (weight_B < 0).any():
                    raise BadColumn(f"column {schema.example_weight}: missing or negative weight")
        return RawBlock(num_rows, label_B, weight_B, dense, sparse)

    def _label_values(self, values: pa.Array) -> np.ndarray:
        label = self.schema.label
        encoded = id_values(label.column, values, "text").dictionary_encode()
        meaning = []
        for text in encoded.dictionary.to_pylist():
            if text not in label.positive and text not in label.negative:
                raise BadColumn(f"column {label.column}: label {text!r}")
            meaning.append(text in label.positive)
        if encoded.null_count:
            raise BadColumn(f"column {label.column}: a label is missing")
        return np.array(meaning, dtype=np.uint8)[encoded.indices.to_numpy(zero_copy_only=False)]


def _may_hold_0x(payload: bytes) -> bool:
    # One letter is found many times faster than two, and often there is none.
    return (b"x" in payload and b"0x" in payload) or (b"X" in payload and b"0X" in payload)
