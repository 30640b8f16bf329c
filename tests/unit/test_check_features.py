"""`dlrm check` on data that have dense features only, or sparse features only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from data.parquet import PreparedDataset
from data.prepare import RawInputs, prepare
from data.schema import DenseColumn, RawFormat, Schema, SparseColumn, Split
from dlrm.check import CheckTask, prepare_check, verdict
from dlrm.check_batches import make_batches
from dlrm.check_bounds import ErrorBounds
from dlrm.check_reference import PlainRun
from dlrm.config import CheckRun, to_config
from dlrm.planning import make_plan
from embeddings.plan import Plan
from tests.check_cases import run_on_threads


def one_kind(folder: Path, kind: str) -> PreparedDataset:
    """40 rows with two dense features or two sparse ones."""
    rng = np.random.default_rng(0)
    raw = folder / "raw.tsv"
    raw.write_text(
        "".join(
            f"{rng.integers(0, 2)}\t{rng.integers(0, 9)}\t{rng.integers(0, 9)}\n" for _ in range(40)
        )
    )
    small: dict[str, Any] = {"token": "int", "vocabulary": "hash", "missing": "empty"}
    schema = Schema(
        name="one_kind",
        format=RawFormat(columns=["label", "a", "b"]),
        dense={n: DenseColumn("identity") for n in "ab"} if kind == "dense" else {},
        sparse={n: SparseColumn(rows=10, **small) for n in "ab"} if kind == "sparse" else {},
        split=Split(kind="in_order", valid=0.0, test=0.0),
    )
    prepare(schema, RawInputs([raw]), folder / "prepared")
    return PreparedDataset(folder / "prepared")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("interaction", ["dot", "cat", "dcnv2"])
@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_f19_data_of_one_kind_of_feature_are_checked(
    kind: str, interaction: str, tmp_path: Path
) -> None:
    dataset = one_kind(tmp_path, kind)
    config, plan = configured(dataset, interaction)
    passes = run_on_threads(CheckTask(config, dataset.root, plan))
    verdict(config, passes)


@pytest.mark.parametrize("interaction", ["cat", "dcnv2"])
def test_f19_the_reference_steps_without_sparse_features(interaction: str, tmp_path: Path) -> None:
    """Hand-made batches too, of which those made of ids are left out."""
    dataset = one_kind(tmp_path, "dense")
    config, plan = configured(dataset, interaction, {"train": {"precision": "fp64"}})
    run = PlainRun(config, dataset.manifest, total_steps=10)
    bounds = ErrorBounds(run, 0)
    made = make_batches(dataset, config, plan, [], [])
    assert {batch.name for batch in made} >= {"one sample", "first rank empty"}
    for number, batch in enumerate(made):
        step = run.gradients(batch.batch)
        assert step.loss > 0
        assert any(bool(gradient.any()) for gradient in step.dense_gradients)
        bounds.advance(number, step, bounds.measure(step))
        run.apply(number)


def configured(
    dataset: PreparedDataset, interaction: str, *more: dict[str, Any]
) -> tuple[CheckRun, Plan]:
    base = {
        "data": {"name": "one_kind", "cache": "", "batch_size": 16},
        "model": {"embedding_dim": 4, "bottom_mlp": [6], "top_mlp": [5]},
        "check": {"steps": 2},
    }
    interactions = {"model": {"interaction": interaction}}
    merged = OmegaConf.merge(OmegaConf.structured(CheckRun), base, interactions, *more)
    config: CheckRun = to_config(merged)  # type: ignore[arg-type]
    plan = make_plan(config, dataset, 1).plan
    prepare_check(config, dataset, plan)
    return config, plan
