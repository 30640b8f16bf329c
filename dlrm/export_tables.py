"""Tables of a checkpoint as parquet, numpy or quantised files, written in stretches of rows."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from data.errors import UserError
from data.files import WholeFile, file_name
from data.parquet import PreparedDataset
from dlrm.checkpoint import CheckpointInfo
from dlrm.checkpoint_rows import PIECE_BYTES, RowsReader, StoredTable
from dlrm.export_folder import ExportFolder
from dlrm.export_rows import RowMeanings, row_meanings
from dlrm.tensor_file import pieces
from embeddings.store import WEIGHT

QUANTIZED_EXTRA_BYTES = 8
"""After a row's int8 values: its scale and its bias, fp32 each, little-endian."""


def write_parquet(
    info: CheckpointInfo, dataset: PreparedDataset, table: str, folder: ExportFolder
) -> dict[str, Any]:
    """Writes `TABLE.parquet`: `row`, `kind`, `token`, `vector`; returns its entry for result.json.

    Extra memory: a stretch of 8 MiB, and the tokens of a million rows.
    """
    stored = info.tables[table]
    vector = pa.list_(_arrow_type(stored.dtype), stored.dim)
    schema = _row_schema().append(pa.field("vector", vector, nullable=False))
    name = f"{file_name(table)}.parquet"
    reader = info.rows()
    try:
        with (
            TemporaryDirectory(prefix=".tokens-", dir=folder.path) as work,
            folder.open(name) as sink,
            pq.ParquetWriter(sink, schema, compression="zstd", use_dictionary=["kind"]) as writer,
        ):
            for window in row_meanings(dataset.root, dataset.manifest, table, Path(work)):
                for first, last in pieces(len(window), _weight_bytes(stored), PIECE_BYTES):
                    rows = window.slice(first, last)
                    values = reader.read(table, rows.start, rows.start + len(rows))[WEIGHT]
                    flat = pa.array(values.reshape(-1).numpy())
                    vectors = pa.FixedSizeListArray.from_arrays(flat, type=vector)
                    columns = [*_row_columns(rows), vectors]
                    writer.write_table(pa.Table.from_arrays(columns, schema=schema))
    finally:
        reader.close()
    return _entry(stored) | {"file": name}


def write_npy(
    info: CheckpointInfo, dataset: PreparedDataset, table: str, folder: ExportFolder
) -> dict[str, Any]:
    """Writes `TABLE.npy`, the whole matrix, and of a table with a dictionary
    `TABLE.tokens.parquet`: `row`, `kind`, `token`; returns their entry for result.json."""
    stored = info.tables[table]
    name = f"{file_name(table)}.npy"
    reader = info.rows()
    try:
        with folder.open(name) as sink:
            shape = (stored.rows, stored.dim)
            _write_header(sink, torch.empty(0, dtype=stored.dtype).numpy().dtype, shape)
            for start, stop in pieces(stored.rows, _weight_bytes(stored), PIECE_BYTES):
                _write_values(sink, reader.read(table, start, stop)[WEIGHT])
    finally:
        reader.close()
    entry = _entry(stored) | {"file": name}
    features = [f for f in dataset.manifest.features if f.table == table]
    if features[0].vocabulary != "dictionary":
        return entry
    tokens_name = f"{file_name(table)}.tokens.parquet"
    with (
        TemporaryDirectory(prefix=".tokens-", dir=folder.path) as work,
        folder.open(tokens_name) as sink,
        pq.ParquetWriter(sink, _row_schema(), compression="zstd") as writer,
    ):
        for window in row_meanings(dataset.root, dataset.manifest, table, Path(work)):
            columns = _row_columns(window)
            writer.write_table(pa.Table.from_arrays(columns, schema=_row_schema()))
    return entry | {"tokens_file": tokens_name}


class RowQuantizer:
    """fbgemm's int8 row-wise quantisation: `x ≈ int8 · scale + bias`, scale and bias by row.

    With `lo` and `hi` the extremes of a row, `scale = (hi - lo) / 255` and `bias = lo`: no value is
    off by more than half a scale.

    Raises:
        UserError: where fbgemm isn't installed, or doesn't load.
    """

    def __init__(self) -> None:
        try:
            importlib.import_module("fbgemm_gpu")
            self._quantize = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized
            self._dequantize = torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(
                f"export.what=quantized needs fbgemm, which doesn't load here ({reason}): install "
                "fbgemm-gpu-cpu, or export.what=tables"
            ) from error

    def quantize(self, rows_RD: Tensor) -> Tensor:
        """`(R, D)` → uint8 `(R, D + 8)`."""
        quantized: Tensor = self._quantize(rows_RD.float().contiguous())
        assert quantized.shape[1] == rows_RD.shape[1] + QUANTIZED_EXTRA_BYTES
        return quantized

    def dequantize(self, rows_RD8: Tensor) -> Tensor:
        """uint8 `(R, D + 8)` → fp32 `(R, D)`."""
        values: Tensor = self._dequantize(rows_RD8)
        return values


def write_quantized(
    info: CheckpointInfo,
    table: str,
    folder: ExportFolder,
    quantizer: RowQuantizer,
    replace: Callable[[int, Tensor], None],
) -> dict[str, Any]:
    """Writes `TABLE.int8.npy`; returns its entry for result.json.

    Args:
        info: the checkpoint.
        table: name of the table.
        folder: of the export.
        quantizer: fbgemm's.
        replace: gets the first row of each stretch, and its rows as they are read back.
    """
    stored = info.tables[table]
    name = f"{file_name(table)}.int8.npy"
    reader: RowsReader = info.rows()
    largest_error = 0.0
    try:
        with folder.open(name) as sink:
            shape = (stored.rows, stored.dim + QUANTIZED_EXTRA_BYTES)
            _write_header(sink, np.dtype(np.uint8), shape)
            for start, stop in pieces(stored.rows, _weight_bytes(stored), PIECE_BYTES):
                values = reader.read(table, start, stop)[WEIGHT]
                if not values.isfinite().all():
                    raise UserError(
                        f"table {table} of {info.folder} has values that aren't finite within rows "
                        f"{start}:{stop}, which int8 can't hold: choose another checkpoint="
                    )
                quantized = quantizer.quantize(values)
                _write_values(sink, quantized)
                restored = quantizer.dequantize(quantized).to(stored.dtype)
                largest_error = max(largest_error, float((restored - values).abs().max()))
                replace(start, restored)
    finally:
        reader.close()
    sizes = {"rows": stored.rows, "dim": stored.dim, "dtype": "int8"}
    return sizes | {"file": name, "largest_error": largest_error}


def _entry(stored: StoredTable) -> dict[str, Any]:
    dtype = str(stored.dtype).removeprefix("torch.")
    return {"rows": stored.rows, "dim": stored.dim, "dtype": dtype}


def _weight_bytes(stored: StoredTable) -> int:
    return stored.dim * stored.dtype.itemsize


def _arrow_type(dtype: torch.dtype) -> pa.DataType:
    return pa.from_numpy_dtype(torch.empty(0, dtype=dtype).numpy().dtype)


def _row_schema() -> pa.Schema:
    kind = pa.dictionary(pa.int8(), pa.string())
    return pa.schema(
        [
            pa.field("row", pa.int64(), nullable=False),
            pa.field("kind", kind, nullable=False),
            pa.field("token", pa.string()),
        ]
    )


def _row_columns(rows: RowMeanings) -> list[pa.Array]:
    return [pa.array(np.arange(rows.start, rows.start + len(rows))), rows.kinds, rows.tokens]


def _write_header(sink: WholeFile, dtype: np.dtype[Any], shape: tuple[int, int]) -> None:
    values = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(sink, values)


def _write_values(sink: WholeFile, values: Tensor) -> None:
    sink.write(values.contiguous().reshape(-1).view(torch.uint8).numpy())
