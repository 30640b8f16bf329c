"""Fixtures of all tests: generated Criteo-like files, schemas, prepared parts, real data.

Nothing here is copied from a real file. Global is only that hypothesis takes its time: on a busy
machine that of a case says nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import settings

from data.prepare import RawInputs, prepare
from data.schema import DenseColumn, LabelColumn, RawFormat, Schema, SparseColumn, Split

pytest_plugins = ["tests.support.durations"]

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

NUM_LANES = 64
CHECKOUT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data: `DLRM_SHARED_DATA`, or `../shared/data` beside the checkout."""
    given = os.environ.get("DLRM_SHARED_DATA")
    folder = Path(given) if given else CHECKOUT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no real data: DLRM_SHARED_DATA isn't set, or {folder} is no folder")
    return folder


@pytest.fixture(scope="session")
def criteo_schema() -> Callable[..., Schema]:
    """Builds a schema of headless tab-separated lines: label, I1 … In, C1 … Cm."""

    def build(
        num_dense: int = 13,
        num_sparse: int = 26,
        *,
        transform: str = "log1p",
        split: Split | None = None,
        **sparse_default: Any,
    ) -> Schema:
        dense = [f"I{n + 1}" for n in range(num_dense)]
        sparse = [f"C{n + 1}" for n in range(num_sparse)]
        return Schema(
            name="criteo_like",
            format=RawFormat(columns=["label", *dense, *sparse]),
            label=LabelColumn(),
            dense={name: DenseColumn(transform) for name in dense},
            sparse={name: SparseColumn() for name in sparse},
            sparse_default=SparseColumn(**{"token": "hex", "missing": "row", **sparse_default}),
            split=split or Split(),
        )

    return build


@pytest.fixture(scope="session")
def criteo_lines() -> Callable[..., list[bytes]]:
    """Generates lines (with line ends) for `criteo_schema`: negatives, zeros, missing values."""

    def build(
        num_rows: int, num_dense: int = 13, num_sparse: int = 26, *, seed: int = 0
    ) -> list[bytes]:
        rng = np.random.default_rng(seed)
        lines = []
        for _ in range(num_rows):
            counts = rng.integers(-3, 500, num_dense)
            # Skewed, so that tokens repeat; a tenth of the values is missing.
            tokens = (rng.zipf(1.3, num_sparse) * 2654435761) % 2**32
            is_missing = rng.random(num_dense + num_sparse) < 0.1
            fields = [*(str(c) for c in counts), *(f"{t:08x}" for t in tokens)]
            fields = ["" if m else f for f, m in zip(fields, is_missing, strict=True)]
            label = str(int(rng.random() < 0.3))
            lines.append("\t".join([label, *fields]).encode() + b"\n")
        return lines

    return build


@pytest.fixture
def prepare_files(tmp_path: Path) -> Callable[..., Any]:
    """Writes raw files and prepares them: `(schema, {name: bytes}, root)` → manifest."""

    def run(schema: Schema, files: dict[str, bytes], root: Path | None = None, **more: Any) -> Any:
        raw = tmp_path / "raw"
        raw.mkdir(exist_ok=True)
        for name, content in files.items():
            (raw / name).write_bytes(content)
        inputs = RawInputs([raw / name for name in files], more.pop("file_parts", None))
        return prepare(schema, inputs, root or tmp_path / "prepared", **more)

    return run


@pytest.fixture(scope="session")
def read_part() -> Callable[[Path, str], dict[str, list[Any]]]:
    """Reads a prepared part's columns in the order of the raw rows, with plain pyarrow."""

    def read(root: Path, part: str) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {}
        for path in sorted((root / part).glob("*.parquet")):
            table = pq.read_table(path)
            rows = table.num_rows
            lane_major = [row for lane in range(NUM_LANES) for row in range(lane, rows, NUM_LANES)]
            for name in table.column_names:
                by_row = dict(zip(lane_major, table[name].to_pylist(), strict=True))
                columns.setdefault(name, []).extend(by_row[row] for row in range(rows))
        return columns

    return read


@pytest.fixture(scope="session")
def tree_digests() -> Callable[[Path], dict[str, str]]:
    """SHA-256 of every file below a folder but the lock, by relative path."""

    def digests(root: Path) -> dict[str, str]:
        return {
            str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(root.rglob("*"))
            if path.is_file() and path.name != ".lock"
        }

    return digests


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Ranks as threads share the cores already."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
