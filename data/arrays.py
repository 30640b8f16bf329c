"""Named flat arrays in one Arrow file: how intermediate results are spooled to disk and read back.

A file holds one record batch of one row, each column a list: so arrays of different lengths share a
file, and reading maps the file and copies nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa

from data.files import naming

Arrays = dict[str, "np.ndarray | pa.Array"]


def save_arrays(path: Path, arrays: Arrays) -> None:
    """Writes `arrays` under `path`, whole or not at all (temporary name, then rename)."""
    columns = []
    for values in arrays.values():
        flat = values if isinstance(values, pa.Array) else pa.array(values)
        offsets = pa.array([0, len(flat)], type=pa.int64())
        columns.append(pa.LargeListArray.from_arrays(offsets, flat))
    table = pa.Table.from_arrays(columns, names=list(arrays))
    temporary = path.with_name(path.name + ".partial")
    with (
        naming(path),
        pa.OSFile(str(temporary), "wb") as sink,
        pa.ipc.new_file(sink, table.schema) as writer,
    ):
        writer.write_table(table)
    os.replace(temporary, path)


def load_arrays(path: Path, names: list[str] | None = None) -> Arrays:
    """The named arrays of a file, or all: numpy views of the mapped file; strings as Arrow."""
    with pa.memory_map(str(path)) as source:
        batch = pa.ipc.open_file(source).get_batch(0)
    arrays: Arrays = {}
    for name in names if names is not None else batch.schema.names:
        flat = batch.column(name).values
        is_text = pa.types.is_string(flat.type) or pa.types.is_large_string(flat.type)
        arrays[name] = flat if is_text else flat.to_numpy(zero_copy_only=True)
    return arrays
