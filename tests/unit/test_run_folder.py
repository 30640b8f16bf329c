"""What a run leaves behind: every file, result.json's keys, readable events; failed runs too."""

from __future__ import annotations

import hashlib
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from tensorboardX.proto.event_pb2 import Event

from data.errors import UserError
from data.manifest import load_manifest
from dlrm.checkpoint import open_checkpoint
from dlrm.run_folder import RunFolder
from dlrm.trainer import Trainer
from embeddings.plan import Plan
from tests.commands import (
    dlrm,
    eval_lines,
    latest,
    read_json,
    read_metrics,
    read_result,
    tiny,
    train_lines,
)

RUN_STEPS = 16  # 4,096 rows in batches of 256.
LOGGED = [5, 10, 15, 16]  # At every 5th step, and at the end.


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, report and all."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    more = ["train.log_every=5", "train.eval_every=6", "optim.dense.lr=0.01"]
    more.append(f"hydra.run.dir={folder}")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)  # The run is told to use 1.
    assert dlrm("train", *tiny(tmp_path_factory), *more) == 0
    torch.set_num_threads(num_threads)
    return folder


def test_all_files_are_there_and_no_others(run_dir: Path) -> None:
    assert {path.name for path in run_dir.iterdir()} == {
        "config.yaml",
        "dataset.json",
        "plan.json",
        "metrics.jsonl",
        "evaluation.json",
        "result.json",
        "report.html",
        "checkpoints",
        "tensorboard",
    }
    assert not list(run_dir.rglob("*.partial*"))


Number = (int, float)
# docs/formats.md, section 12; a tuple holds the types that are allowed.
RESULT_TYPES: dict[str, Any] = {
    "status": str,
    "world_size": int,
    "seed": int,
    "run_id": str,
    "num_threads": int,
    "versions": {"torch": str, "numpy": str, "numba": str, "pyarrow": str, "hydra-core": str},
    "config_digest": str,
    "plan_digest": str,
    "plan_reasons": {"C1": str},
    "model_digest": str,
    "data": {
        "name": str,
        "synthetic": bool,
        "digest": str,
        "best_auc": float,
        "best_logloss": float,
        "unknown_id_share": {},
    },
    "eval": {
        "auc": float,
        "logloss": float,
        "ne": float,
        "calibration": float,
        "num_samples": int,
    },
    "train": {
        "steps": int,
        "samples": int,
        "epochs": Number,
        "loss_last": float,
        "samples_per_s": Number,
        "step_ms_p50": Number,
        "step_ms_p90": Number,
        "data_wait_share": Number,
    },
    "comm": {
        "collectives_per_step": Number,
        "dense_collectives_per_step": Number,
        "bytes_sent_per_step": {"ids": Number, "rows": Number, "grads": Number, "dense": Number},
        "bytes_sent_per_step_max_rank": {"ids": Number, "rows": Number, "grads": Number},
        "imbalance": Number,
    },
    "memory": {
        "peak_rss_bytes_max_rank": int,
        "table_bytes_max_rank": int,
        "state_bytes_max_rank": int,
    },
}


def check_types(values: dict[str, Any], types: dict[str, Any], where: str) -> None:
    for key, kind in types.items():
        assert key in values, f"{where}{key} is missing"
        if isinstance(kind, dict):
            assert isinstance(values[key], dict), f"{where}{key}"
            check_types(values[key], kind, f"{where}{key}.")
        else:
            assert isinstance(values[key], kind), f"{where}{key} is {values[key]!r}"
            assert kind is bool or not isinstance(values[key], bool), f"{where}{key}"


def test_result_has_every_key_with_its_type(run_dir: Path) -> None:
    result = read_result(run_dir)
    check_types(result, RESULT_TYPES, "")
    assert result.keys() == RESULT_TYPES.keys()


def test_result_is_consistent(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    result = read_result(run_dir)
    assert result["status"] == "completed"
    assert (result["world_size"], result["seed"]) == (1, 0)
    assert result["num_threads"] == 1  # As launch.num_threads says.
    assert result["train"]["steps"] == RUN_STEPS
    assert result["train"]["samples"] == 4096
    assert result["train"]["epochs"] == 1
    assert result["eval"]["num_samples"] == 1024
    assert result["train"]["step_ms_p50"] <= result["train"]["step_ms_p90"]
    assert 0 <= result["train"]["data_wait_share"] <= 1
    # One process sends nothing; Adagrad keeps one number for each weight.
    assert result["comm"]["collectives_per_step"] == 0
    assert set(result["comm"]["bytes_sent_per_step"].values()) == {0}
    memory = result["memory"]
    assert memory["state_bytes_max_rank"] == memory["table_bytes_max_rank"] > 0
    manifest = load_manifest(tmp_path_factory.getbasetemp() / "tiny")
    assert memory["table_bytes_max_rank"] == 4 * 16 * sum(manifest.table_rows.values())
    assert result["data"]["name"] == "synthetic"
    assert result["data"]["synthetic"] is True
    assert result["data"]["digest"] == manifest.digest()
    # Nobody beats the teacher, and a second of training beats guessing.
    assert 0.5 < result["eval"]["auc"] < result["data"]["best_auc"]
    assert result["eval"]["logloss"] > result["data"]["best_logloss"]


def test_the_configuration_is_effective_and_digested(run_dir: Path) -> None:
    text = (run_dir / "config.yaml").read_text()
    config = OmegaConf.create(text)
    assert config.train.eval_every == 6
    assert config.optim.sparse.lr == 0.02  # The group's value, not the class's.
    assert config.optim.schedule.decay_power == 2.0  # The class's, where no file gives one.
    assert "${" not in text
    assert hashlib.sha256(text.encode()).hexdigest() == read_result(run_dir)["config_digest"]


def test_plan_and_dataset_are_those_of_the_run(run_dir: Path) -> None:
    plan = Plan.from_json((run_dir / "plan.json").read_text())
    assert plan.digest() == read_result(run_dir)["plan_digest"]
    recorded = read_json(run_dir / "dataset.json")
    assert load_manifest(Path(recorded["root"])).digest() == recorded["digest"]


def test_metrics_lines(run_dir: Path) -> None:
    lines = train_lines(run_dir)
    assert [line["step"] for line in lines] == LOGGED
    assert [line["samples"] for line in lines] == [256 * step for step in LOGGED]
    for line in lines:
        assert {"epoch", "loss", "samples_per_s", "step_ms", "data_wait_ms"} <= line.keys()
        assert line["lr_dense"] == 0.01
        assert line["lr_sparse"] == 0.02  # conf/optim/adagrad.yaml
        assert all(math.isfinite(line[key]) for key in ("loss", "samples_per_s", "step_ms"))
        # The phases are parts of the step, data_wait among them.
        assert sum(line["phase_ms"].values()) <= line["step_ms"] * 1.01 + 0.01
    evaluations = eval_lines(run_dir)
    assert [line["step"] for line in evaluations[:-1]] == [6, 12, 16]
    assert {line["eval"]["split"] for line in evaluations[:-1]} == {"valid"}
    assert evaluations[-1]["eval"]["split"] == "test"
    assert evaluations[-1]["eval"]["model"] == "best"
    assert evaluations[-1]["eval"]["auc"] == read_result(run_dir)["eval"]["auc"]


def test_the_model_tested_is_the_best_of_the_evaluations(run_dir: Path) -> None:
    *valid, test = eval_lines(run_dir)
    best = max(valid, key=lambda line: line["eval"]["auc"])
    assert test["step"] == best["step"]


def test_evaluation_holds_the_curves_of_the_report(run_dir: Path) -> None:
    values = read_json(run_dir / "evaluation.json")
    assert values["split"] == "test"
    assert [entry["step"] for entry in values["history"]] == [6, 12, 16]
    assert sum(weight for _, _, weight in values["calibration_curve"]) == pytest.approx(1024)
    assert values["roc_curve"][0] == [0.0, 0.0]
    assert values["roc_curve"][-1] == [1.0, 1.0]


def read_events(folder: Path) -> list[Event]:
    """TensorBoard's record format: length, checksum, payload, checksum."""
    (path,) = folder.glob("events.out.tfevents.*")
    content, events, position = path.read_bytes(), [], 0
    while position < len(content):
        length = int.from_bytes(content[position : position + 8], "little")
        events.append(Event.FromString(content[position + 12 : position + 12 + length]))
        position += 8 + 4 + length + 4
    return events


def test_tensorboard_events_are_the_metrics(run_dir: Path) -> None:
    events = read_events(run_dir / "tensorboard")
    scalars: dict[str, dict[int, float]] = {}
    for event in events:
        for value in event.summary.value:
            scalars.setdefault(value.tag, {})[event.step] = value.simple_value
    for line in train_lines(run_dir):
        assert scalars["train/loss"][line["step"]] == pytest.approx(line["loss"], rel=1e-6)
    for line in eval_lines(run_dir)[:-1]:
        assert scalars["valid/auc"][line["step"]] == pytest.approx(line["eval"]["auc"], rel=1e-6)
    assert scalars["train/lr_dense"].keys() == set(LOGGED)


def test_a_failed_run_says_so_and_has_a_report(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer.step

    def fail_at_step_4(self: Trainer, batch: Any) -> float:
        if self.steps_done == 3:
            raise RuntimeError("the unforeseen")
        return step(self, batch)

    monkeypatch.setattr(Trainer, "step", fail_at_step_4)
    folder = tmp_path / "run"
    more = ["train.log_every=2", f"hydra.run.dir={folder}"]
    assert dlrm("train", *tiny(tmp_path_factory), *more) == 1
    result = read_result(folder)
    assert result["status"] == "failed: RuntimeError: the unforeseen"
    assert result["train"]["steps"] == 3
    assert "eval" not in result
    assert "the unforeseen" in (folder / "report.html").read_text()
    assert [line["step"] for line in read_metrics(folder)] == [2, 3]


def test_a_stopped_run_says_so(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C: status 130, as of a shell, and nothing claims to be complete."""

    def interrupt(self: Trainer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "fit", interrupt)
    folder = tmp_path / "run"
    assert dlrm("train", *tiny(tmp_path_factory), f"hydra.run.dir={folder}") == 130
    assert read_result(folder)["status"].startswith("failed: KeyboardInterrupt")


# --------------------------------------------------------------------------------------- the class


def test_a_used_folder_is_refused_whatever_it_holds(tmp_path: Path) -> None:
    RunFolder(tmp_path / "new" / "deep")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"hydra\.run\.dir=.*notes\.txt"):
        RunFolder(tmp_path / "used")
    RunFolder(tmp_path / "used", overwrite=True)
    assert (tmp_path / "used" / "notes.txt").read_text() == "mine"


def test_overwriting_removes_all_of_the_earlier_run(run_dir: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(run_dir, copied)
    before = {path.relative_to(copied) for path in copied.rglob("*") if path.is_file()}
    folder = RunFolder(copied, overwrite=True)
    waiting = copied / "earlier-run"
    assert {path.relative_to(waiting) for path in waiting.rglob("*") if path.is_file()} == before
    folder.settle(is_kept=True)
    assert not [path for path in copied.rglob("*") if path.is_file()]


def test_numbers_that_json_has_not_are_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(ValueError, match="JSON"):
        folder.write_json("result.json", {"loss": math.nan})
    assert not (tmp_path / "run" / "result.json").exists()


def test_checkpoints_are_the_two_newest_and_the_best(run_dir: Path) -> None:
    """Two, so that one is left where the newest is damaged (`train.checkpoint_keep`)."""
    folders = sorted(path.name for path in (run_dir / "checkpoints").glob("step-*"))
    assert set(folders[:-2]) <= {latest(run_dir, "best").name}
    assert latest(run_dir).name == folders[-1]
    assert open_checkpoint(latest(run_dir)).step == RUN_STEPS


@pytest.mark.parametrize(
    ("status", "has_model", "is_refused"),
    [
        ("failed: UserError: no such file", False, False),
        ("failed: UserError: no such file", True, True),
        ("failed: not finished", False, True),
        ("completed", False, True),
    ],
)
def test_a_run_that_failed_at_its_start_may_be_repeated(
    tmp_path: Path, status: str, has_model: bool, is_refused: bool
) -> None:
    """Correct a typo in `data.raw` and start again in the same folder; anything else is kept."""
    RunFolder(tmp_path / "run").write_json("result.json", {"status": status})
    if has_model:
        (tmp_path / "run" / "checkpoints").mkdir()
    if is_refused:
        with pytest.raises(UserError, match="used"):
            RunFolder(tmp_path / "run")
    else:
        RunFolder(tmp_path / "run")
        assert not (tmp_path / "run" / "result.json").exists()
