"""Checks and training runs with tables in host memory, so small that rows of every kind occur."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from data.parquet import PreparedDataset
from data.prepare import RawInputs, prepare
from data.schema import DenseColumn, RawFormat, Schema, SparseColumn, Split
from dlrm.check import CheckTask, prepare_check
from dlrm.config import CheckRun, to_config
from dlrm.planning import make_plan
from dlrm.trainer import Trainer
from embeddings.communicator import Communicator, SingleProcess
from embeddings.host.figures import HostCounters
from tests.trainer_ranks import Ranks

HOT_MB = 0.0012
"""About 15 of the 161 rows of `write_baskets`, in fp64 with a state as wide as the row."""


def write_baskets(
    folder: Path,
    num_rows: int,
    *,
    seed: int = 0,
    changes_at: int | None = None,
    weightless: float = 0.0,
) -> PreparedDataset:
    """A prepared dataset for host tables: two samples of five look up a few popular rows only, the
    others rows from anywhere. Bags of many ids (mean, weighted), empty bags, example weights, a
    table that two features share, a table of one row.

    Args:
        changes_at: from this row on other rows are the popular ones, and nobody looks up the first.
        weightless: share of the rows whose example weight is 0.
    """
    rng = np.random.default_rng(seed)
    is_weightless = np.random.default_rng(seed).random(num_rows) < weightless

    def bag(low: int, high: int, most: int) -> str:
        return "|".join(str(i) for i in rng.integers(low, high, rng.integers(0, most + 1)))

    lines = []
    for row in range(num_rows):
        first = 0 if changes_at is None or row < changes_at else 20
        low, high = (first, first + 3) if rng.random() < 0.4 else (first, first + 20)
        is_wide = changes_at is None and high == 20
        words = bag(low, 50 if is_wide else high, 3)
        factors = "|".join(f"{rng.random():.3f}" for _ in words.split("|")) if words else ""
        ids = [str(rng.integers(low, 40 if is_wide else high)) for _ in range(2)]
        many = bag(low, 70 if is_wide else high, 3)
        dense = [f"{rng.normal():.4f}", f"{rng.normal(0, 3):.4f}"]
        label, weight = str(rng.integers(0, 2)), f"{rng.uniform(0.2, 3.0):.3f}"
        if is_weightless[row]:
            weight = "0"
        lines.append("\t".join([label, weight, *dense, *ids, many, words, factors, "0"]))
    folder.mkdir(parents=True, exist_ok=True)
    raw = folder / "baskets.tsv"
    raw.write_text("\n".join(lines) + "\n")
    fields = ["label", "weight", "x", "y", "a", "b", "many", "words", "factor", "one"]
    small = {"token": "int", "vocabulary": "hash", "missing": "empty"}
    schema = Schema(
        name="baskets",
        format=RawFormat(columns=fields),
        example_weight="weight",
        dense={"x": DenseColumn("identity"), "y": DenseColumn("identity")},
        sparse={
            "a": SparseColumn(rows=40, table="shared", **small),
            "b": SparseColumn(rows=40, table="shared", **small),
            "many": SparseColumn(rows=70, separator="|", pooling="mean", **small),
            "words": SparseColumn(rows=50, separator="|", bag_weights="factor", **small),
            "one": SparseColumn(rows=1, **small),
        },
        split=Split(kind="in_order", valid=0.0, test=0.0),
    )
    prepare(schema, RawInputs([raw]), folder / "prepared")
    return PreparedDataset(folder / "prepared")


def in_host(
    mode: str, lookahead: int = 2, *, hot_mb: float = HOT_MB, layout: str = "auto", **more: Any
) -> dict[str, Any]:
    """Overrides: tables in host memory, none of them hot as a whole."""
    host = {"mode": mode, "lookahead": lookahead, "hot_mb": hot_mb, "whole_rows": 0, **more}
    return {"sharding": {"layout": layout, "memory": "host", "host": host}}


def host_check_task(
    dataset: PreparedDataset, world_size: int, *overrides: dict[str, Any]
) -> CheckTask:
    """A check of the dataset of `write_baskets`, under the plan that the command would make."""
    base = {
        "data": {"name": "baskets", "cache": "", "batch_size": 8},
        "model": {
            "embedding_dim": 4,
            "bottom_mlp": [6],
            "top_mlp": [5],
            "table_dims": {"words": 7, "many": 6},
        },
        "check": {"steps": 6},
    }
    merged = OmegaConf.merge(OmegaConf.structured(CheckRun), base, *overrides)
    config: CheckRun = to_config(merged)  # type: ignore[arg-type]
    plan = make_plan(config, dataset, world_size).plan
    assert any(shard.memory == "host" for shard in plan.shards)
    prepare_check(config, dataset, plan)
    return CheckTask(config, dataset.root, plan)


class HostRanks(Ranks):
    """As `Ranks`, under the plan that the command would make of the configuration."""

    def __init__(
        self,
        dataset: PreparedDataset,
        folder: Path,
        world_size: int,
        overrides: dict[str, Any],
        **more: Any,
    ) -> None:
        super().__init__(dataset, folder, world_size, "table_wise", overrides, **more)
        self.plan = make_plan(self.config, dataset, world_size).plan

    def trainer(self, comm: Communicator | None = None) -> Trainer:
        return super().trainer(SingleProcess() if comm is None else comm)


def counters_of(trainer: Trainer) -> HostCounters:
    """What a trainer's host tables did."""
    assert trainer.embeddings.host is not None
    return trainer.embeddings.host.counters
