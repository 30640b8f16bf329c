"""Runs the command on tiny data, reads back what it wrote, and generates raw files for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from data.parquet import PreparedDataset
from data.prepare import RawInputs, prepare
from data.schema import DenseColumn, RawFormat, Schema, SparseColumn, Split
from data.synthetic import SyntheticConfig, synthesise
from dlrm.__main__ import add_entry, run
from dlrm.checkpoint import open_checkpoint
from dlrm.config import TrainRun, register, to_config
from dlrm.hydra_jobs import register_sweeper
from dlrm.run_folder import RunFolder
from dlrm.trainer import Trainer

TINY_DATA = (
    "data.synthetic.num_train=4096",
    "data.synthetic.num_valid=512",
    "data.synthetic.num_test=1024",
    "data.synthetic.cardinality_scale=0.0001",
)
TINY_MODEL = (
    "data.batch_size=256",
    "model.bottom_mlp=[16]",
    "model.top_mlp=[16]",
    "train.evals_per_epoch=1",
    "launch.num_threads=1",
)
NUM_LANES = 64


def dlrm(*arguments: str | Path) -> int:
    """Runs the command in this process; returns its exit status. Threads stay as they were.

    Hydra composes the configuration twice, the first time only to see whether a file of it asks for
    a sweep (`hydra.mode`). Of ours experiment=sweep_… do, and it is a third of a tiny run's time.
    The dataclasses are made known to Hydra once per process, a third of what is left to compose.
    """
    texts = [str(argument) for argument in arguments]
    register_once()
    patches = ExitStack()
    patches.enter_context(patch("dlrm.config.register"))
    if not any(text.startswith("experiment=sweep_") for text in texts):
        patches.enter_context(patch("hydra._internal.hydra.Hydra.get_mode", return_value=None))
    num_threads = torch.get_num_threads()
    try:
        with patches:
            return run(texts)
    finally:
        torch.set_num_threads(num_threads)


@cache
def register_once() -> None:
    """Makes the dataclasses known to Hydra, whose store keeps them."""
    register()


def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides of a run of a second; the dataset is generated once per test session."""
    return [*TINY_DATA, *TINY_MODEL, f"data.root={tmp_path_factory.getbasetemp() / 'tiny'}"]


def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the report's plots, half of a tiny run's time, out of runs whose report isn't read."""
    monkeypatch.setattr("dlrm.report.write_report", lambda folder: folder / "report.html")


def start_python(*arguments: str | Path, cwd: Path, **environment: str) -> subprocess.Popen[str]:
    """Starts Python with one thread per process, without what a launcher would have set."""
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH")
    inherited = {key: value for key, value in os.environ.items() if key not in launcher}
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=inherited | {"OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of a process."""
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of a run folder."""
    values: dict[str, Any] = json.loads(path.read_text())
    return values


def read_result(run_dir: Path) -> dict[str, Any]:
    """result.json."""
    return read_json(run_dir / "result.json")


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def train_lines(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of logging steps."""
    return [line for line in read_metrics(run_dir) if "loss" in line]


def eval_lines(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of evaluations."""
    return [line for line in read_metrics(run_dir) if "eval" in line]


def latest(run_dir: Path, which: str = "latest") -> Path:
    """The folder of a kept model, `latest` or `best`."""
    return run_dir / "checkpoints" / (run_dir / "checkpoints" / which).read_text()


def arrays_of(folder: Path) -> dict[str, np.ndarray]:
    """Every array of a kept model."""
    info = open_checkpoint(folder)
    reader = info.rows()
    found = {
        f"{table}.{name}": values.numpy()
        for table, stored in info.tables.items()
        for name, values in reader.read(table, 0, stored.rows, state=True).items()
    }
    reader.close()
    for prefix, tensors in (("dense", info.dense()), ("dense_state", info.dense_state())):
        found |= {f"{prefix}/{name}": tensor.numpy() for name, tensor in tensors.items()}
    return found


def column_in_order(root: Path, part: str, name: str) -> np.ndarray:
    """A prepared column in the order of the raw rows, with plain pyarrow."""
    values: list[Any] = []
    for path in sorted((root / part).glob("*.parquet")):
        stored = pq.read_table(path)[name].to_pylist()
        lane_major = [r for lane in range(NUM_LANES) for r in range(lane, len(stored), NUM_LANES)]
        by_row = dict(zip(lane_major, stored, strict=True))
        values += [by_row[row] for row in range(len(stored))]
    return np.array(values)


# ------------------------------------------------------------------------- raw files as Adult's

_ADULT_FIELDS = (
    "age, workclass, fnlwgt, education, education-num, marital-status, occupation, relationship, "
    "race, sex, capital-gain, capital-loss, hours-per-week, native-country, Y"
)


def write_adult_csv(
    path: Path, num_rows: int, *, seed: int, labelled: bool = True, labels: str = "both"
) -> np.ndarray:
    """Generates a file as UCI Adult's: text tokens, missing values, a label that can be learnt.

    Args:
        labels: `both`, or `negative`: rows of one class.

    Returns:
        The labels, 0 or 1.
    """
    rng = np.random.default_rng(seed)
    num_fields = len(_ADULT_FIELDS.split(", "))
    numbers = rng.integers(17, 90, (num_rows, num_fields))
    tokens = rng.zipf(1.6, (num_rows, num_fields)) % 40
    is_missing = rng.random((num_rows, num_fields)) < 0.08
    score = (numbers[:, 0] - 50) / 15 + np.where(tokens[:, 3] % 2, 1.5, -1.5)
    label_B = (rng.random(num_rows) < 1 / (1 + np.exp(1.0 - score))).astype(int)
    if labels == "negative":
        label_B[:] = 0
    is_number = [0, 2, 4, 10, 11, 12]
    lines = [_ADULT_FIELDS if labelled else _ADULT_FIELDS.rsplit(", ", 1)[0]]
    for row in range(num_rows):
        fields = [
            str(numbers[row, f]) if f in is_number else f"Kind {tokens[row, f]}"
            for f in range(num_fields - 1)
        ]
        fields = ["?" if is_missing[row, f] else text for f, text in enumerate(fields)]
        if labelled:
            fields.append(">50K" if label_B[row] else "<=50K")
        lines.append(", ".join(fields))
    path.write_text("\n".join(lines) + "\n")
    return label_B


# ------------------------------------------------- a small dataset with everything that a step sees


def one_hot_dataset(root: Path) -> PreparedDataset:
    """300 + 130 rows of one-hot data, tables of 26 sizes down to one row."""
    sizes = SyntheticConfig(num_train=300, num_valid=130, num_test=0, cardinality_scale=1e-5)
    synthesise(sizes, root)
    return PreparedDataset(root)


def write_visits(
    folder: Path, num_rows: int, *, seed: int = 0, weightless: float = 0.0
) -> PreparedDataset:
    """A prepared dataset with example weights, bags of many ids (mean, and with bag weights),
    empty bags, a table that two features share, and dense features on different scales.

    Args:
        weightless: share of the rows whose example weight is 0.
    """
    rng = np.random.default_rng(seed)
    is_weightless = np.random.default_rng(seed).random(num_rows) < weightless

    def bag(most: int) -> str:
        return "|".join(str(i) for i in rng.integers(0, 30, rng.integers(0, most + 1)))

    lines = []
    for row in range(num_rows):
        words = bag(4)
        factors = "|".join(f"{rng.random():.3f}" for _ in words.split("|")) if words else ""
        weight = f"{rng.uniform(0.2, 3.0):.3f}"
        if is_weightless[row]:
            weight = "0"
        ids = [str(rng.integers(0, 12)), str(rng.integers(0, 12)), bag(5), words, factors]
        dense = [f"{rng.normal():.4f}", f"{rng.normal(0, 3):.4f}"]
        lines.append("\t".join([str(rng.integers(0, 2)), weight, *dense, *ids]))
    folder.mkdir(parents=True, exist_ok=True)
    raw = folder / "visits.tsv"
    raw.write_text("\n".join(lines) + "\n")
    fields = ["label", "weight", "x", "y", "a", "b", "many", "words", "factor"]
    small = {"token": "int", "vocabulary": "hash", "missing": "empty"}
    schema = Schema(
        name="visits",
        format=RawFormat(columns=fields),
        example_weight="weight",
        dense={"x": DenseColumn("identity"), "y": DenseColumn("identity")},
        sparse={
            "a": SparseColumn(rows=13, table="shared", **small),
            "b": SparseColumn(rows=13, table="shared", **small),
            "many": SparseColumn(rows=31, separator="|", pooling="mean", **small),
            "words": SparseColumn(rows=31, separator="|", bag_weights="factor", **small),
        },
        split=Split(kind="in_order", valid=0.0, test=0.0),
    )
    prepare(schema, RawInputs([raw]), folder / "prepared")
    return PreparedDataset(folder / "prepared")


@dataclass
class Parts:
    """A trainer and what it was built from."""

    trainer: Trainer
    config: TrainRun
    dataset: PreparedDataset


def build_trainer(dataset: PreparedDataset, folder: Path, overrides: dict[str, Any]) -> Parts:
    """A `Trainer` without the command around it; `overrides` as nested dictionaries."""
    base = {
        "data": {"name": "visits", "cache": "", "batch_size": 10},
        "model": {"embedding_dim": 4, "bottom_mlp": [6], "top_mlp": [5]},
        "launch": {"num_threads": 1},
        "train": {"evals_per_epoch": 1},
    }
    merged = OmegaConf.merge(OmegaConf.structured(TrainRun), base, overrides)
    assert OmegaConf.is_dict(merged)
    config: TrainRun = to_config(merged)  # type: ignore[arg-type]
    return Parts(Trainer(config, dataset, RunFolder(folder), print), config, dataset)


def table_values(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Every row and its state, by `table.name`."""
    store = trainer.embeddings.store
    return {
        f"{table.name}.{name}": values
        for table in store.tables
        for name, values in store.read(table.name, 0, table.rows).items()
    }


def dense_values(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Every dense weight by name."""
    return {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}


def compose_config(verb: str, *overrides: str) -> Any:
    """The dataclass that the command would get."""
    register_once()
    register_sweeper()
    with initialize_config_module("conf", version_base="1.3"):
        return to_config(compose(verb, overrides=[add_entry(o) for o in overrides]))
