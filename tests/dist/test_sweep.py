"""A real sweep: processes of its own for each job, one of which fails in its workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.commands import TINY_DATA, TINY_MODEL, dlrm, read_result

pytestmark = pytest.mark.timeout(120)


def test_a_sweep_of_two_processes_each(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    forked: None,
) -> None:
    monkeypatch.chdir(tmp_path)
    more = ["data.cache=cache", "launch.nproc=2", "train.max_steps=4", "hydra.sweep.dir=sweep"]
    assert dlrm("train", "-m", "train.backend=fbgemm,torch", *TINY_DATA, *TINY_MODEL, *more) == 2
    failed, completed = json.loads(Path("sweep/sweep.json").read_text())
    assert failed["status"].startswith("failed: UserError: ")
    assert "train.backend=fbgemm" in failed["status"]
    assert completed["status"] == "completed"
    for job in (failed, completed):
        assert read_result(Path("sweep") / job["folder"])["status"] == job["status"]
    result = read_result(Path("sweep/1"))
    assert result["world_size"] == 2
    sent = result["comm"]["bytes_sent_per_step"]
    assert completed["table_bytes_sent_per_step"] == sent["ids"] + sent["rows"] + sent["grads"] > 0
    assert completed["step_ms_p50"] == result["train"]["step_ms_p50"] > 0
    assert completed["auc"] == result["eval"]["auc"]
    captured = capfd.readouterr()
    assert "dlrm: job 0: " in captured.err
    # Prepared once, by the first job.
    assert captured.out.count("generate") == 1
    assert len(list(Path("cache").glob("*/manifest.json"))) == 1
    lines = captured.out.splitlines()
    table = [line.split() for line in lines[lines.index("sweep   sweep/sweep.html") - 12 :]]
    assert ["0", "backend=fbgemm", "failed"] in [words[:3] for words in table]
    assert ["1", "backend=torch", "ok"] in [words[:3] for words in table]
