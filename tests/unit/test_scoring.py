"""`dlrm evaluate` and `dlrm predict`: the trained model, on prepared parts and on raw files."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from data.parquet import PreparedDataset
from dlrm.checkpoint_load import load_model
from dlrm.config import ScoreRun
from dlrm.heartbeat import Heartbeat, heartbeat_file
from dlrm.launch import WorkerContext
from dlrm.metrics import BinaryMetrics, EvalResult
from dlrm.score import TrainedModel, evaluate_rank, make_task, predict_rank
from dlrm.scoring import teacher_result
from dlrm.trainer import Trainer
from embeddings.communicator import SingleProcess
from tests.commands import (
    TINY_MODEL,
    dlrm,
    eval_lines,
    latest,
    read_result,
    tiny,
    without_plots,
    write_adult_csv,
)

NUM_TEST = 500


@pytest.fixture(autouse=True)
def start_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands start in an empty folder and skip the plots."""
    monkeypatch.chdir(tmp_path)
    without_plots(monkeypatch)


@pytest.fixture(scope="module")
def adult(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train.csv, valid.csv, test.csv, unlabelled.csv (the test rows) and run/."""
    folder = tmp_path_factory.mktemp("adult")
    for seed, (name, rows) in enumerate((("train", 1500), ("valid", 400), ("test", NUM_TEST))):
        write_adult_csv(folder / f"{name}.csv", rows, seed=seed)
    write_adult_csv(folder / "unlabelled.csv", NUM_TEST, seed=2, labelled=False)
    files = [f"data.raw_{part}={folder / f'{part}.csv'}" for part in ("train", "valid", "test")]
    more = ["train.epochs=4", f"data.root={folder / 'prepared'}", f"hydra.run.dir={folder / 'run'}"]
    with pytest.MonkeyPatch.context() as patched:
        without_plots(patched)
        assert dlrm("train", "data=adult", *files, *TINY_MODEL, "data.batch_size=64", *more) == 0
    return folder


def evaluated(folder: Path, name: str, *more: str) -> dict[str, Any]:
    """The `eval` part that `dlrm evaluate` writes."""
    assert dlrm("evaluate", f"run={folder / 'run'}", f"hydra.run.dir={name}", *more) == 0
    values: dict[str, Any] = read_result(Path(name))["eval"]
    return values


def predicted(folder: Path, name: str, *more: str) -> dict[str, np.ndarray]:
    assert dlrm("predict", f"run={folder / 'run'}", f"out={name}.parquet", *more) == 0
    table = pq.read_table(f"{name}.parquet")
    return {column: table[column].to_numpy() for column in table.column_names}


def assert_near(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["num_samples"] == theirs["num_samples"]
    for name in ("auc", "logloss", "ne", "calibration"):
        assert ours[name] == pytest.approx(theirs[name], abs=1e-6), name


# --------------------------------------------------------------------------------- the same model


def test_the_model_learnt_something(adult: Path) -> None:
    """Or the comparisons below say nothing."""
    assert read_result(adult / "run")["eval"]["auc"] > 0.7


def test_evaluate_on_the_test_part_is_the_run_s_result(adult: Path) -> None:
    assert_near(evaluated(adult, "e"), read_result(adult / "run")["eval"])
    assert_near(evaluated(adult, "f", "data.batch_size=7"), read_result(adult / "run")["eval"])


def test_evaluate_on_the_raw_file_equals_the_prepared_part(adult: Path) -> None:
    """Through the stored vocabularies and the training part's mean and deviation."""
    prepared = evaluated(adult, "prepared")
    raw = evaluated(adult, "raw", f"data.raw={adult / 'test.csv'}")
    assert_near(raw, prepared)
    small = [f"data.raw={adult / 'test.csv'}", "data.batch_size=33"]
    assert_near(evaluated(adult, "small", *small), prepared)
    result = read_result(Path("raw"))
    assert (result["split"], result["model"], result["status"]) == ("raw", "best", "completed")


def test_other_parts_and_models_can_be_asked_for(adult: Path) -> None:
    valid = evaluated(adult, "valid", "part=valid")
    assert valid["num_samples"] == 400
    *history, _ = eval_lines(adult / "run")
    assert valid["auc"] == pytest.approx(max(line["eval"]["auc"] for line in history), abs=1e-6)
    last = evaluated(adult, "last", "part=valid", "checkpoint=latest")
    assert last["auc"] == pytest.approx(history[-1]["eval"]["auc"], abs=1e-6)


def test_predictions_are_in_order_and_equal_those_of_evaluate(adult: Path) -> None:
    expected = evaluated(adult, "e")
    labelled = predicted(adult, "labelled", f"data.raw={adult / 'test.csv'}", "data.batch_size=64")
    label_B = write_adult_csv(Path("again.csv"), NUM_TEST, seed=2)
    np.testing.assert_array_equal(labelled["row"], np.arange(NUM_TEST))
    np.testing.assert_array_equal(labelled["label"], label_B)
    np.testing.assert_allclose(labelled["probability"], 1 / (1 + np.exp(-labelled["logit"])))
    auc = roc_auc_score(label_B, labelled["probability"])
    assert auc == pytest.approx(expected["auc"], abs=1e-6)
    assert log_loss(label_B, labelled["probability"]) == pytest.approx(
        expected["logloss"], abs=1e-6
    )

    unlabelled = predicted(adult, "unlabelled", f"data.raw={adult / 'unlabelled.csv'}")
    assert unlabelled.keys() == {"row", "probability", "logit"}
    part = predicted(adult, "part", "part=test")
    for other in (unlabelled, part):
        np.testing.assert_array_equal(other["row"], np.arange(NUM_TEST))
        np.testing.assert_allclose(other["probability"], labelled["probability"], atol=1e-6)


def test_several_files_are_one_after_the_other(adult: Path) -> None:
    files = f"data.raw=[{adult / 'test.csv'},{adult / 'valid.csv'}]"
    both = predicted(adult, "both", files)
    test = predicted(adult, "test", f"data.raw={adult / 'test.csv'}")
    np.testing.assert_array_equal(both["row"], np.arange(NUM_TEST + 400))
    np.testing.assert_allclose(both["probability"][:NUM_TEST], test["probability"], atol=1e-6)


def test_ids_that_the_model_does_not_know_are_counted(
    adult: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    evaluated(adult, "part")
    evaluated(adult, "raw", f"data.raw={adult / 'test.csv'}")
    known = read_result(Path("part"))["unknown_id_share"]
    assert 0 < max(known.values()) < 0.5
    assert read_result(Path("raw"))["unknown_id_share"] == known
    assert read_result(adult / "run")["data"]["unknown_id_share"] == known
    assert "unknown to the model" not in capfd.readouterr().out
    Path("other.csv").write_text((adult / "test.csv").read_text().replace("Kind", "Sort"))
    evaluated(adult, "other", "data.raw=other.csv")
    assert min(read_result(Path("other"))["unknown_id_share"].values()) > 0.5
    assert "unknown to the model" in capfd.readouterr().out


def test_scoring_allocates_no_optimizer_state(adult: Path) -> None:
    task = make_task(ScoreRun(run=str(adult / "run")), Path("out"), print)
    trained = TrainedModel(task, SingleProcess())
    assert task.stored.optim.sparse.name == "adagrad"
    assert trained.embeddings.store.state_bytes() == 0
    assert trained.embeddings.store.table_bytes() > 0


@pytest.mark.parametrize(
    "more",
    [
        ["train.precision=bf16", "optim=adam"],
        ["train.precision=fp64", "train.accumulate=2"],
        ["train.backend=torch", "optim=sgd", "optim.clip_norm=1", "model=dlrm_dcnv2"],
    ],
)
def test_evaluate_knows_how_the_model_was_trained(
    more: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    small = ["model.embedding_dim=8", "model.dcn_rank=4"][: 1 + ("model=dlrm_dcnv2" in more)]
    shared = [*tiny(tmp_path_factory), *small, *more, "train.max_steps=4", "hydra.run.dir=run"]
    assert dlrm("train", *shared) == 0
    result = read_result(Path("run"))["eval"]
    assert evaluated(Path(), "e")["auc"] == pytest.approx(result["auc"], abs=1e-5)


# ---------------------------------------------------------------------------------------- refusals


def refusal(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    capfd.readouterr()
    assert dlrm(*arguments) == 2
    err = capfd.readouterr().err
    assert "Traceback" not in err
    return err


def test_what_cannot_be_scored_is_refused(adult: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = f"run={adult / 'run'}"
    unlabelled, test = adult / "unlabelled.csv", adult / "test.csv"
    err = refusal(capfd, "evaluate", run, f"data.raw={unlabelled}")
    assert f"{unlabelled}, line 1" in err
    assert "dlrm predict" in err
    assert "mixes" in refusal(capfd, "predict", run, f"data.raw=[{unlabelled},{test}]")
    assert "data.raw=no.csv" in refusal(capfd, "predict", run, "data.raw=no.csv")
    Path("there.parquet").write_text("mine")
    assert "there.parquet" in refusal(capfd, "predict", run, "out=there.parquet")
    assert Path("there.parquet").read_text() == "mine"
    Path("short.csv").write_text(test.read_text() + "1, 2, 3\n")
    err = refusal(capfd, "predict", run, "data.raw=short.csv", "out=short.parquet")
    assert f"line {NUM_TEST + 2}" in err
    assert not list(Path().glob("short.parquet*"))
    with pytest.warns(UserWarning, match=r"out=x\.parquet is ignored"):
        assert dlrm("evaluate", run, "out=x.parquet") == 0


def test_a_moved_dataset_can_be_named_and_another_is_refused(
    adult: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Another dataset's vocabularies would give wrong predictions without a word."""
    shutil.copytree(adult, tmp_path / "moved")
    shutil.move(tmp_path / "moved" / "prepared", tmp_path / "elsewhere")
    record = tmp_path / "moved" / "run" / "dataset.json"
    record.write_text(record.read_text().replace(str(adult), str(tmp_path / "moved")))
    err = refusal(capfd, "evaluate", f"run={tmp_path / 'moved' / 'run'}")
    assert str(tmp_path / "moved" / "prepared") in err
    moved = evaluated(tmp_path / "moved", "e", "data.root=elsewhere")
    assert_near(moved, read_result(adult / "run")["eval"])
    write_adult_csv(tmp_path / "other.csv", 900, seed=9)
    files = ["data.raw_train=other.csv", f"data.raw_test={adult / 'test.csv'}", "data.root=other"]
    assert dlrm("prepare", "data=adult", *files) == 0
    err = refusal(capfd, "evaluate", f"run={tmp_path / 'moved' / 'run'}", "data.root=other")
    assert "digest" in err


# ------------------------------------------------------------------- B28, B36: which model is kept


def stub_aucs(monkeypatch: pytest.MonkeyPatch, aucs: list[float | None]) -> None:
    """Evaluations of the valid part have these AUCs; the test part's is real."""
    evaluate = Trainer.evaluate
    left = iter(aucs)

    class Stub:
        def result(self) -> EvalResult:
            return EvalResult(next(left), 0.5, None, 1.0, 10, 3, 10.0)

    def stubbed(self: Trainer, part: str) -> BinaryMetrics | Stub:
        return Stub() if part == "valid" else evaluate(self, part)

    monkeypatch.setattr(Trainer, "evaluate", stubbed)


def test_b36_the_best_model_is_kept_and_is_the_one_tested(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """AUCs of .70, .80, undefined, .75 after 2, 4, 6 and 8 steps."""
    with monkeypatch.context() as patched:
        stub_aucs(patched, [0.70, 0.80, None, 0.75])
        more = ["train.eval_every=2", "train.max_steps=8", "hydra.run.dir=run"]
        assert dlrm("train", *tiny(tmp_path_factory), *more) == 0
    assert "(model of step 4)" in capfd.readouterr().out
    assert latest(tmp_path / "run", "best").name == "step-000004"
    assert latest(tmp_path / "run").name == "step-000008"
    result = read_result(tmp_path / "run")["eval"]
    assert_near(evaluated(tmp_path, "best"), result)
    assert evaluated(tmp_path, "last", "checkpoint=latest")["auc"] != pytest.approx(result["auc"])


def test_b36_nothing_to_evaluate_on_still_keeps_a_model(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_adult_csv(tmp_path / "train.csv", 300, seed=0)
    files = ["data=adult", "data.raw_train=train.csv", "data.root=d", "hydra.run.dir=run"]
    assert dlrm("train", *files, *TINY_MODEL) == 0
    assert "no rows to evaluate on" in capfd.readouterr().out
    result = read_result(tmp_path / "run")
    assert result["status"] == "completed"
    assert result["eval"] == {
        "auc": None,
        "logloss": None,
        "ne": None,
        "calibration": None,
        "num_samples": 0,
    }
    assert evaluated(tmp_path, "e", "part=train")["num_samples"] == 300
    assert "test part is empty" in refusal(capfd, "evaluate", "run=run")


@pytest.mark.parametrize(("given", "kept"), [("valid", "best"), ("test", "latest")])
def test_one_part_to_evaluate_on_is_enough(given: str, kept: str, tmp_path: Path) -> None:
    """But the test part chooses no model: its figures would flatter what it has chosen."""
    for seed, part in enumerate(("train", given)):
        write_adult_csv(tmp_path / f"{part}.csv", 300, seed=seed)
    files = [f"data.raw_{part}={part}.csv" for part in ("train", given)]
    more = ["data=adult", *files, *TINY_MODEL, "data.root=d", "hydra.run.dir=run"]
    assert dlrm("train", *more) == 0
    tested = eval_lines(tmp_path / "run")[-1]["eval"]
    assert (tested["split"], tested["model"]) == (given, kept)
    assert read_result(tmp_path / "run")["eval"]["auc"] is not None


def test_b28_a_valid_part_of_one_class(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Training goes on; AUC and NE are null; there is no best, and everybody says so."""
    for seed, part in enumerate(("train", "valid", "test")):
        labels = "negative" if part == "valid" else "both"
        write_adult_csv(tmp_path / f"{part}.csv", 300, seed=seed, labels=labels)
    files = [f"data.raw_{part}={part}.csv" for part in ("train", "valid", "test")]
    more = [*TINY_MODEL, "data.root=d", "train.epochs=3", "hydra.run.dir=run"]
    assert dlrm("train", "data=adult", *files, *more) == 0
    *valid, test = eval_lines(tmp_path / "run")
    assert len(valid) == 3
    for line in valid:
        assert line["eval"]["auc"] is line["eval"]["ne"] is None
        assert line["eval"]["logloss"] > 0
    assert not (tmp_path / "run" / "checkpoints" / "best").exists()
    assert (test["eval"]["model"], test["step"]) == ("latest", valid[-1]["step"])
    assert "no model is the best" in capfd.readouterr().out
    assert_near(evaluated(tmp_path, "e"), read_result(tmp_path / "run")["eval"])
    assert "no model is the best" in capfd.readouterr().out
    assert read_result(tmp_path / "e")["model"] == "latest"
    predicted(tmp_path, "p")
    assert "no model is the best" in capfd.readouterr().out


def test_b28_a_test_part_of_one_class(tmp_path: Path) -> None:
    for seed, part in enumerate(("train", "test")):
        labels = "negative" if part == "test" else "both"
        write_adult_csv(tmp_path / f"{part}.csv", 300, seed=seed, labels=labels)
    more = [*TINY_MODEL, "data.root=d", "hydra.run.dir=run"]
    files = ["data.raw_train=train.csv", "data.raw_test=test.csv"]
    assert dlrm("train", "data=adult", *files, *more) == 0
    result = read_result(tmp_path / "run")["eval"]
    assert result["auc"] is result["ne"] is result["calibration"] is None
    assert result["logloss"] > 0


def test_b28_training_on_one_class(tmp_path: Path) -> None:
    write_adult_csv(tmp_path / "train.csv", 300, seed=0, labels="negative")
    write_adult_csv(tmp_path / "test.csv", 300, seed=1)
    more = [*TINY_MODEL, "data.root=d", "hydra.run.dir=run"]
    files = ["data.raw_train=train.csv", "data.raw_test=test.csv"]
    assert dlrm("train", "data=adult", *files, *more) == 0
    assert read_result(tmp_path / "run")["eval"]["auc"] is not None


def test_real_data_have_no_teacher(adult: Path) -> None:
    assert teacher_result(PreparedDataset(adult / "prepared"), "test") is None
    data = read_result(adult / "run")["data"]
    assert data["best_auc"] is data["best_logloss"] is None
    assert data["synthetic"] is False


@pytest.mark.parametrize("entry", [evaluate_rank, predict_rank])
def test_f17_loading_a_model_of_any_size_is_no_hang(
    adult: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: Any
) -> None:
    """The launcher reads signs of life while tables are filled and rows are read."""
    monkeypatch.setattr("dlrm.heartbeat._KEEP_BEATING_S", 0.005)
    heartbeat = Heartbeat(heartbeat_file(tmp_path, 0))
    phases = []

    def load_slowly(*args: Any) -> None:
        before, until_s = heartbeat.last(0).time_s, time.monotonic() + 30
        while (beat := heartbeat.last(0)).time_s == before:
            assert time.monotonic() < until_s, "no sign of life"
        phases.append(beat.phase)
        load_model(*args)

    monkeypatch.setattr("dlrm.score.load_model", load_slowly)
    (tmp_path / "out").mkdir()
    config = ScoreRun(run=str(adult / "run"))
    task = make_task(config, tmp_path / "out", print)
    entry(WorkerContext(0, 1, 0, heartbeat), task)
    assert phases == ["load"]
