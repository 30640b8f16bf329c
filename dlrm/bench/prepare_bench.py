"""`dlrm bench prepare`: from raw Criteo rows to what training reads, of all sides, in turns."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import tempfile
import time
import warnings
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv

from data.errors import UserError
from data.files import open_new
from data.lanes import LABEL_COLUMN
from data.parquet import PreparedDataset
from data.prepare import RawInputs, prepare
from data.schema import DenseColumn, LabelColumn, RawFormat, Schema, SparseColumn, Split
from data.split import PARTS
from data.synthetic import GENERATOR_VERSION, NUM_DENSE, NUM_SPARSE, SyntheticConfig, write_raw_tsv
from dlrm.bench.comparison import Figure, Turns, Variant, Yardstick
from dlrm.bench.measure import process_figures
from dlrm.bench.sides import OWN, TORCHREC_DATA, data_sides, hush_torchrec
from dlrm.bench.turns import Bench, Session, take_turns
from dlrm.display import PrepareDisplay
from dlrm.launch import WorkerContext

READS = {
    "data": True,
    **{
        f"data.{name}": False
        for name in ("batch_size", "eval_batch_size", "shuffle", "root", "overwrite", "schema")
    },
    "data.synthetic.num_train": False,
    "data.synthetic.num_valid": False,
    "data.synthetic.num_test": False,
    "data.synthetic.raw_out": False,
    "bench.rows": True,
    "bench.peer_rows": True,
    "seed": False,
}
"""See `warn_of_ignored`."""

READER = "pyarrow_csv"
SIDES = (OWN, TORCHREC_DATA, READER)
MIN_COUNT = 4
"""Tokens that are rarer share a row, on both sides."""
_DEFAULT_PEER_ROWS = 200_000
_COLUMNS = (
    "label",
    *(f"I{n}" for n in range(1, NUM_DENSE + 1)),
    *(f"C{n}" for n in range(1, NUM_SPARSE + 1)),
)


@dataclass(frozen=True)
class PrepareTask:
    """What a measurement gets.

    Attributes:
        side: its name.
        raw: the raw file of this side.
        common_rows: the first rows, which every side gets.
        scratch: where what is prepared goes, and is removed again.
    """

    side: str
    raw: Path
    common_rows: int
    scratch: Path


def bench_prepare(session: Session) -> list[str]:
    """Measures, prints the table and adds it to the result; returns what makes the benchmark fail.

    Raises:
        UserError: for what can't be compared; nothing has been measured then.
    """
    config = session.config
    sides = data_sides(config, SIDES)
    if config.data.synthetic is None:
        raise UserError(
            f"data={config.data.name}: the raw rows of `dlrm bench prepare` are generated; set "
            "data=synthetic_full"
        )
    peer_rows = config.bench.peer_rows or min(_DEFAULT_PEER_ROWS, config.bench.rows)
    cache = Path.cwd() / Path(config.data.cache).expanduser()
    raw = raw_rows(config.data.synthetic, config.bench.rows, cache)
    peer_raw = first_rows(raw, peer_rows) if TORCHREC_DATA in sides else raw
    raw_bytes = raw.stat().st_size

    def task(side: str) -> PrepareTask:
        return PrepareTask(side, peer_raw if side == TORCHREC_DATA else raw, peer_rows, cache)

    turns = Bench(
        [Variant(side, "") for side in sides],
        lambda variant, _: (measure_prepare, (task(variant.side),)),
        prepare_yardstick(config.bench.rows, peer_rows),
        {
            "bench": f"prepare, {config.bench.rows:,} raw rows ({raw_bytes / 1e6:,.0f} MB), "
            f"{TORCHREC_DATA} the first {peer_rows:,}",
            "model": f"Criteo's columns, {sum(config.data.synthetic.cardinalities()):,} possible "
            f"tokens; tokens rarer than {MIN_COUNT} share a row",
            "steps": f"{config.num_turns} turns; the raw file is in the page cache",
        },
    )
    return take_turns(turns, session)


def prepare_yardstick(num_rows: int, peer_rows: int) -> Yardstick:
    """Rows per second; whether all sides have read the same rows.

    Args:
        num_rows: raw rows.
        peer_rows: those of TorchRec.
    """
    return Yardstick(
        Figure("rows_per_s", "rows_per_s", "k rows/s", 1, 1e-3),
        is_rate=True,
        columns=[
            Figure("rows", "rows", "rows", 0),
            Figure("common_label_sum", "common_label_sum", "label sum", 0),
            Figure("peak_rss_bytes", "peak_rss_bytes", "peak MiB", 0, 2**-20),
        ],
        own=(OWN,),
        torchrec=(TORCHREC_DATA,),
        floors=(READER,),
        disagreements=lambda turns: _disagreements(turns, num_rows, peer_rows),
        notes=lambda turns: _notes(turns, peer_rows),
    )


def raw_rows(synthetic: SyntheticConfig, num_rows: int, cache: Path) -> Path:
    """The raw file, generated where it isn't there yet."""
    wanted = replace(synthetic, num_train=num_rows, num_valid=0, num_test=0, raw_out=None)
    text = json.dumps([GENERATOR_VERSION, wanted.settings()], sort_keys=True)
    path = cache / f"raw-{hashlib.sha256(text.encode()).hexdigest()[:12]}.tsv"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with PrepareDisplay() as display:
            write_raw_tsv(wanted, path, display)
    return path


def first_rows(raw: Path, num_rows: int) -> Path:
    """The first rows as a file of their own, beside the whole; itself where it has no more."""
    path = raw.with_name(f"{raw.stem}.first-{num_rows}.tsv")
    if not path.exists():
        temporary = path.with_name(f"{path.name}.partial")
        with open(raw, "rb") as source, open_new(temporary) as sink:
            sink.writelines(islice(source, num_rows))
        temporary.replace(path)
    return path


def criteo_schema() -> Schema:
    """That of conf/data/criteo_kaggle.yaml."""
    return Schema(
        name="criteo_kaggle",
        format=RawFormat(kind="csv", delimiter="\t", header=False, columns=list(_COLUMNS)),
        label=LabelColumn(column="label", positive=["1"], negative=["0"]),
        dense={name: DenseColumn("log1p") for name in _COLUMNS if name.startswith("I")},
        sparse={name: SparseColumn() for name in _COLUMNS if name.startswith("C")},
        sparse_default=replace(
            Schema().sparse_default,
            token="hex",
            vocabulary="dictionary",
            min_count=MIN_COUNT,
            missing="row",
        ),
        split=Split(kind="in_order", valid=0.0714, test=0.0714),
    )


# ------------------------------------------------------------------------------ in the worker


def measure_prepare(context: WorkerContext, task: PrepareTask) -> dict[str, Any]:
    """Prepares the raw file once; the time, and what came of it."""
    context.heartbeat.beat(0, "read ahead")
    with open(task.raw, "rb") as source:
        while source.read(1 << 24):
            pass
    measure = {OWN: _measure_own, TORCHREC_DATA: _measure_torchrec, READER: _measure_reader}
    context.heartbeat.beat(1, "prepare")
    with tempfile.TemporaryDirectory(prefix="bench-", dir=task.scratch) as folder:
        figures = measure[task.side](task, Path(folder))
    return {**figures, "rows_per_s": figures["rows"] / figures["seconds"], **process_figures()}


def _measure_own(task: PrepareTask, folder: Path) -> dict[str, Any]:
    start_s = time.perf_counter()
    prepare(criteo_schema(), RawInputs([task.raw]), folder / "prepared")
    seconds = time.perf_counter() - start_s
    dataset = PreparedDataset(folder / "prepared")
    labels = np.concatenate([dataset.column(part, LABEL_COLUMN) for part in PARTS])
    note = "dictionaries, split, id counts, digests; shuffled when it is read"
    return {"seconds": seconds, "note": note, **_of_labels(labels, task)}


def _measure_torchrec(task: PrepareTask, folder: Path) -> dict[str, Any]:
    """Their two documented steps, `npy_preproc_criteo` and `contiguous_preproc_criteo`."""
    hush_torchrec()
    from torchrec.datasets.criteo import BinaryCriteoUtils

    warnings.simplefilter("ignore")  # Of functions that can't be pickled: nothing is.
    paths = {name: str(folder / f"day_0_{name}.npy") for name in ("dense", "sparse", "labels")}
    contiguous = folder / "contiguous"
    contiguous.mkdir()
    start_s = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):  # It reports on every column.
        BinaryCriteoUtils.tsv_to_npys(
            str(task.raw), paths["dense"], paths["sparse"], paths["labels"]
        )
        converted_s = time.perf_counter() - start_s
        BinaryCriteoUtils.sparse_to_contiguous(
            [paths["sparse"]], str(contiguous), frequency_threshold=MIN_COUNT
        )
    seconds = time.perf_counter() - start_s
    labels = np.load(paths["labels"])[:, 0]
    rate = len(labels) / converted_s
    note = (
        "BinaryCriteoUtils.tsv_to_npys and sparse_to_contiguous, in memory, one thread; no split, "
        f"counts or shuffle; tsv_to_npys alone {rate:,.0f} rows/s"
    )
    return {"seconds": seconds, "note": note, **_of_labels(labels, task)}


def _measure_reader(task: PrepareTask, folder: Path) -> dict[str, Any]:
    types = {name: pa.string() if name[0] == "C" else pa.int64() for name in _COLUMNS}
    start_s = time.perf_counter()
    table = pa_csv.read_csv(
        task.raw,
        read_options=pa_csv.ReadOptions(column_names=list(_COLUMNS), block_size=4 << 20),
        parse_options=pa_csv.ParseOptions(delimiter="\t", quote_char=False),
        convert_options=pa_csv.ConvertOptions(column_types=types),
    )
    seconds = time.perf_counter() - start_s
    note = f"pyarrow.csv.read_csv into memory, nothing else; {os.cpu_count()} threads"
    return {"seconds": seconds, "note": note, **_of_labels(table["label"].to_numpy(), task)}


def _of_labels(labels: np.ndarray, task: PrepareTask) -> dict[str, int]:
    return {
        "rows": len(labels),
        "common_label_sum": int(labels[: task.common_rows].sum()),
    }


# ------------------------------------------------------------------------------ what must agree


def _disagreements(turns: Turns, num_rows: int, peer_rows: int) -> list[str]:
    problems = []
    known = [(variant, m) for variant, found in turns.items() for m in found]
    for variant, measurement in known:
        wanted = peer_rows if variant.side == TORCHREC_DATA else num_rows
        rows = measurement.figures["rows"]
        if rows != wanted:
            problems.append(f"{variant.name} has made {rows:,} rows of {wanted:,}")
    sums = {variant.name: m.figures["common_label_sum"] for variant, m in known}
    if len(set(sums.values())) > 1:
        each = ", ".join(f"{name} {value:,}" for name, value in sums.items())
        problems.append(f"the labels of the first {peer_rows:,} rows have different sums: {each}")
    return list(dict.fromkeys(problems))


def _notes(turns: Turns, peer_rows: int) -> list[str]:
    lines = [
        f"label sum: over the first {peer_rows:,} rows, which every side gets; it must agree, and "
        "so must the number of rows"
    ]
    for variant, found in turns.items():
        if found:
            lines.append(f"{variant.name}: {found[0].figures['note']}")
    return lines
