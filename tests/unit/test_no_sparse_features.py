"""Data with dense columns only, or with sparse columns only: they train like any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from data.batch import Batch, JaggedIds
from data.parquet import PreparedDataset
from data.prepare import RawInputs, prepare
from data.schema import DenseColumn, RawFormat, Schema, SparseColumn, Split
from tests.commands import dlrm, read_result, without_plots
from tests.trainer_ranks import FP64, Ranks, assert_close, assert_same_on_all_ranks, rules

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]

INTERACTIONS = ("dot", "cat", "dcnv2")


def write_points(folder: Path, *, dense: bool, sparse: bool, num_rows: int = 97) -> PreparedDataset:
    """A prepared dataset of one kind of column; the label follows from either."""
    rng = np.random.default_rng(1)
    lines = []
    for _ in range(num_rows):
        x, y, a, b = rng.normal(), rng.normal(), rng.integers(0, 9), rng.integers(0, 5)
        label = int(rng.random() < 1 / (1 + np.exp(-(2 * x if dense else a - 4))))
        lines.append(f"{label}\t{x:.4f}\t{y:.4f}\t{a}\t{b}")
    folder.mkdir(parents=True, exist_ok=True)
    raw = folder / "points.tsv"
    raw.write_text("\n".join(lines) + "\n")
    ids = SparseColumn(token="int", vocabulary="dictionary", missing="row")
    schema = Schema(
        name="points",
        format=RawFormat(columns=["label", "x", "y", "a", "b"]),
        dense={"x": DenseColumn("identity"), "y": DenseColumn("identity")} if dense else {},
        sparse={"a": ids, "b": ids} if sparse else {},
        split=Split(kind="in_order", valid=0.0, test=0.0),
    )
    prepare(schema, RawInputs([raw]), folder / "prepared")
    return PreparedDataset(folder / "prepared")


@pytest.fixture(scope="module")
def dense_only(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    return write_points(tmp_path_factory.mktemp("dense"), dense=True, sparse=False)


@pytest.fixture(scope="module")
def sparse_only(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    return write_points(tmp_path_factory.mktemp("sparse"), dense=False, sparse=True)


def overrides_of(interaction: str, **train: Any) -> dict[str, Any]:
    return {
        "model": {"interaction": interaction, "table_dims": {}},
        "train": {**FP64, "max_steps": 20, **train},
        "optim": rules("adagrad", "adagrad"),
    }


@pytest.mark.parametrize("interaction", INTERACTIONS)
@pytest.mark.parametrize("kind", ["dense_only", "sparse_only"])
def test_f19_data_of_one_kind_of_column_train_alike_on_any_ranks(
    kind: str, interaction: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Two ranks, micro-batches and no overlap come to the model of one process."""
    dataset: PreparedDataset = request.getfixturevalue(kind)
    alone = Ranks(dataset, tmp_path / "alone", 1, overrides=overrides_of(interaction))
    expected = alone.fit()[0]
    losses = alone.losses()
    assert losses[-1] < losses[0]
    for train in ({}, {"accumulate": 3, "overlap": False}):
        folder = tmp_path / f"two{len(train)}"
        ranks = Ranks(dataset, folder, 2, "row_wise", overrides_of(interaction, **train))
        found = ranks.fit()
        np.testing.assert_allclose(ranks.losses(), losses, rtol=1e-10)
        assert_close(found[0].tables, expected.tables)
        assert_close(found[0].dense, expected.dense)
        assert_same_on_all_ranks(found)


@pytest.mark.parametrize("interaction", INTERACTIONS)
def test_f53_dense_columns_only_train_resume_and_score(
    interaction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the command, with everything that comes before and after training."""
    (tmp_path / "conf" / "data").mkdir(parents=True)
    (tmp_path / "conf" / "data" / "points.yaml").write_text(
        "defaults: [base, _self_]\nname: points\nschema:\n  name: points\n"
        "  format: {kind: csv, delimiter: ',', header: true}\n"
        "  label: {column: label, positive: ['1'], negative: ['0']}\n"
        "  dense: {x: {transform: standardise}}\n"
        "  split: {kind: random, valid: 0.1, test: 0.2, seed: 0}\n"
    )
    rng = np.random.default_rng(0)
    x_B = rng.normal(size=200)
    label_B = (rng.random(200) < 1 / (1 + np.exp(-3 * x_B))).astype(int)
    rows = [f"{label},{x:.4f}" for label, x in zip(label_B, x_B, strict=True)]
    (tmp_path / "points.csv").write_text("label,x\n" + "\n".join(rows) + "\n")
    folder = tmp_path / "run"
    arguments = [
        f"--config-dir={tmp_path / 'conf'}",
        "data=points",
        f"data.raw={tmp_path / 'points.csv'}",
        f"data.root={tmp_path / 'prepared'}",
        "data.batch_size=16",
        f"model.interaction={interaction}",
        "model.bottom_mlp=[8]",
        "model.top_mlp=[8]",
        "launch.num_threads=1",
        f"hydra.run.dir={folder}",
    ]
    without_plots(monkeypatch)
    assert dlrm("train", *arguments, "train.max_steps=3") == 0
    assert dlrm("train", *arguments, "train.resume=latest") == 0
    result = read_result(folder)
    assert result["train"]["steps"] > 3
    raw, out = f"data.raw={tmp_path / 'points.csv'}", tmp_path / "out.parquet"
    assert dlrm("evaluate", f"run={folder}", raw, f"hydra.run.dir={tmp_path / 'e'}") == 0
    assert read_result(tmp_path / "e")["eval"]["auc"] > 0.7
    scored = ["predict", f"run={folder}", raw, f"out={out}", f"hydra.run.dir={tmp_path / 'p'}"]
    assert dlrm(*scored) == 0
    assert pq.read_table(out).num_rows == 200
    export = ["export", f"run={folder}", "export.what=model", f"hydra.run.dir={tmp_path / 'x'}"]
    assert dlrm(*export) == 0


def test_f19_ids_without_features_know_their_number_of_samples() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    ids = JaggedIds(none, torch.zeros(1, dtype=torch.int64), 0, num_samples=5)
    assert ids.batch_size == 5
    assert ids.narrow(1, 4).batch_size == 3
    assert ids.take(torch.tensor([4, 0])).batch_size == 2
    assert ids.lengths_FB().shape == (0, 5)
    batch = Batch(torch.zeros(5, 2), ids, torch.zeros(5), None, torch.arange(5))
    assert batch.narrow(3, 5).ids.batch_size == 2
    with pytest.raises(ValueError, match="disagree on its size"):
        Batch(torch.zeros(4, 2), ids, torch.zeros(4), None, torch.arange(4))
    with pytest.raises(ValueError, match="num_samples=5"):
        JaggedIds(none, torch.zeros(6, dtype=torch.int64), 1, num_samples=5)
    with pytest.raises(ValueError, match="num_samples=-1"):
        JaggedIds(none, torch.zeros(1, dtype=torch.int64), 0, num_samples=-1)
