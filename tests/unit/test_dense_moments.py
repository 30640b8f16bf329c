"""Standardised columns of a warm start: a raw value means to the model what it meant to it before,
although the new data's mean and deviation are others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from data.parquet import PreparedDataset
from data.prepare import RawInputs, prepare
from data.schema import DenseColumn, RawFormat, Schema, SparseColumn, Split
from dlrm.checkpoint import CheckpointInfo, Checkpoints
from dlrm.dense_moments import moved_columns
from dlrm.warm_start import WarmStarted, warm_start
from tests.commands import dlrm, read_result, without_plots
from tests.trainer_ranks import Ranks, rules

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]

OVERRIDES = {"optim": rules("sgd", "sgd"), "model": {"table_dims": {}}}
_DATA = """
defaults: [base, _self_]
name: days
batch_size: 100
schema:
  name: days
  format: {kind: csv, delimiter: ",", header: true}
  label: {column: y}
  dense:
    x: {transform: standardise}
    z: {transform: identity}
  sparse_default: {token: text, vocabulary: hash, rows: 3, missing: row}
  sparse:
    c: {}
  split: {kind: in_order, valid: 0.0, test: 0.25}
"""


def write_day(path: Path, mean: float, *, deviation: float = 1.0, seed: int) -> None:
    """P(click) = sigmoid(2x - 1), whatever the day."""
    rng = np.random.default_rng(seed)
    xs = rng.normal(mean, deviation, 4000)
    clicks = rng.random(4000) < 1 / (1 + np.exp(1 - 2 * xs))
    lines = [f"{int(y)},{x:.5f},{x * 2:.3f},a" for x, y in zip(xs, clicks, strict=True)]
    path.write_text("\n".join(["y,x,z,c", *lines]) + "\n")


def test_c08_f04_a_warm_start_on_a_later_day_predicts_as_the_run_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With both learning rates 0: what `evaluate` says of the first run on the later day's rows."""
    without_plots(monkeypatch)
    monkeypatch.chdir(tmp_path)
    Path("my_conf/data").mkdir(parents=True)
    Path("my_conf/data/days.yaml").write_text(_DATA)
    write_day(Path("day0.csv"), 0.0, seed=0)
    write_day(Path("day1.csv"), 1.5, deviation=2.0, seed=1)
    own = [f"--config-dir={tmp_path / 'my_conf'}", "data=days", "launch.num_threads=1",
           "model.bottom_mlp=[8]", "model.top_mlp=[8]", "data.shuffle=true"]  # fmt: skip
    first = ["data.raw=day0.csv", "hydra.run.dir=first", "optim.dense.lr=0.1", "train.epochs=3"]
    assert dlrm("train", *own, *first) == 0
    warm = ["data.raw=day1.csv", "train.warm_start.path=first", "train.max_steps=1",
            "optim.dense.lr=0", "optim.sparse.lr=0", "hydra.run.dir=second"]  # fmt: skip
    capsys.readouterr()
    assert dlrm("train", *own, *warm) == 0
    assert "dense feature x: stored mean" in capsys.readouterr().out
    lines = Path("day1.csv").read_text().splitlines(keepends=True)
    Path("last.csv").write_text("".join([lines[0], *lines[-1000:]]))
    scored = ["run=first", "data.raw=last.csv", "hydra.run.dir=scored", "launch.num_threads=1"]
    assert dlrm("evaluate", *scored) == 0
    found, expected = (read_result(Path(name))["eval"] for name in ("second", "scored"))
    assert found["num_samples"] == expected["num_samples"] == 1000
    assert found["ne"] == pytest.approx(expected["ne"], rel=1e-4)
    assert found["calibration"] == pytest.approx(expected["calibration"], rel=1e-4)
    assert expected["ne"] < 0.9, "a model that has learnt nothing wouldn't tell"


def dataset_of(folder: Path, xs: np.ndarray, transform: str = "standardise") -> PreparedDataset:
    folder.mkdir(parents=True)
    lines = [f"{n % 2}\t{x}\t{n % 5}\ta" for n, x in enumerate(xs)]
    (folder / "raw.tsv").write_text("\n".join(lines) + "\n")
    schema = Schema(
        name="two",
        format=RawFormat(columns=["label", "x", "y", "c"]),
        dense={"x": DenseColumn(transform), "y": DenseColumn("standardise")},
        sparse={"c": SparseColumn()},
        split=Split(kind="in_order", valid=0.0, test=0.0),
    )
    prepare(schema, RawInputs([folder / "raw.tsv"]), folder / "prepared")
    return PreparedDataset(folder / "prepared")


def trained_on(dataset: PreparedDataset, folder: Path) -> CheckpointInfo:
    Ranks(dataset, folder, 1, overrides=OVERRIDES).fit()
    return Checkpoints(folder).find("latest")


def started(
    info: CheckpointInfo, dataset: PreparedDataset, folder: Path, **keys: object
) -> tuple[WarmStarted, dict[str, Tensor]]:
    wanted = {"warm_start": {"path": str(info.folder), **keys}}
    ranks = Ranks(dataset, folder, 1, overrides=OVERRIDES | {"train": wanted})
    trainer = ranks.trainer()
    outcome = warm_start(info, trainer.config, trainer.dataset, trainer.model, trainer.embeddings)
    return outcome, {k: v.clone() for k, v in trainer.model.state_dict().items()}


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> CheckpointInfo:
    folder = tmp_path_factory.mktemp("old")
    return trained_on(dataset_of(folder / "data", np.arange(60.0)), folder / "run")


@pytest.mark.parametrize("is_constant", [False, True])
def test_f04_the_first_layer_gives_each_raw_value_what_it_gave(
    is_constant: bool, old: CheckpointInfo, tmp_path: Path
) -> None:
    """Also where the new data's column has one value, whose deviation counts as 1."""
    xs = np.full(60, 30.0) if is_constant else np.arange(60.0) * 7 - 900
    dataset = dataset_of(tmp_path / "data", xs)
    _, dense = started(old, dataset, tmp_path / "run")
    raw = torch.tensor([[12.0], [-40.0], [1e3]], dtype=torch.float64)

    def first_layer(weights: dict[str, Tensor], mean: float, deviation: float) -> Tensor:
        column = weights["bottom.0.weight"].double()[:, 0]
        return (raw - mean) / deviation * column + weights["bottom.0.bias"].double()

    (old_mean, old_deviation), new = old.values["dense_moments"]["x"], dataset.manifest.moments["x"]
    torch.testing.assert_close(
        first_layer(dense, new.mean, new.deviation),
        first_layer(old.dense(), old_mean, old_deviation),
        rtol=1e-4,
        atol=1e-4,
    )
    # The other column's moments are what they were: so are its weights.
    assert torch.equal(dense["bottom.0.weight"][:, 1], old.dense()["bottom.0.weight"][:, 1])


def test_f04_equal_moments_and_weights_that_are_not_taken_change_nothing(
    old: CheckpointInfo, tmp_path: Path
) -> None:
    same = dataset_of(tmp_path / "same", np.arange(60.0))
    outcome, dense = started(old, same, tmp_path / "run")
    assert outcome.notes == []
    assert all(torch.equal(dense[name], values) for name, values in old.dense().items())
    other = dataset_of(tmp_path / "other", np.arange(60.0) + 5)
    outcome, _ = started(old, other, tmp_path / "none", dense="none")
    assert not [note for note in outcome.notes if "mean" in note]


def test_f04_of_an_older_checkpoint_the_data_tell_or_it_is_said_that_none_does(
    old: CheckpointInfo, tmp_path: Path
) -> None:
    dataset = dataset_of(tmp_path / "data", np.arange(60.0) + 5)
    values = {k: v for k, v in old.values.items() if k != "dense_moments"}
    moved, unknown = moved_columns(replace(old, values=values), dataset.manifest)
    assert ([column.name for column in moved], unknown) == (["x"], [])
    values["data_root"] = str(tmp_path / "gone")
    silent = replace(old, values=values)
    assert moved_columns(silent, dataset.manifest) == ([], ["x", "y"])
    outcome, _ = started(silent, dataset, tmp_path / "run", rows="index")
    assert [note for note in outcome.notes if "doesn't say by which mean" in note]
