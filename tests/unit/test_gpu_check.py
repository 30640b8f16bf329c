"""The GPU's check where there is no GPU: it says so and ends well, and the script runs on a CPU."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from embeddings.host.cold_rows import ColdRows

CHECKOUT = Path(__file__).parents[2]
SCRIPT = CHECKOUT / "scripts" / "gpu_host_check.py"
# Packages of this project that a GPU machine may lack.
ABSENT = ("fbgemm_gpu", "hydra", "omegaconf", "pyarrow", "pytest", "rich", "tensorboardX", "xxhash")
_RUN = """
import runpy, sys
for name in {absent!r}:
    sys.modules[name] = None  # Importing it fails.
sys.argv[1:] = {arguments!r}
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("gpu_host_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_host_check", module)
    spec.loader.exec_module(module)
    return module


def _environment(**more: str) -> dict[str, str]:
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(CHECKOUT), **more}


def test_without_a_gpu_the_command_says_so_and_ends_well(tmp_path: Path) -> None:
    # One line, nothing installed, nothing written.
    run = subprocess.run(
        [CHECKOUT / "scripts" / "gpu_check.sh", tmp_path / "out"],
        env=_environment(DLRM_PYTHON=sys.executable),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    (line,) = run.stdout.splitlines()
    assert line.startswith("gpu_check: skipped, nothing tested or measured: no GPU")
    assert list(tmp_path.iterdir()) == []


def test_without_a_gpu_nothing_is_measured(
    script: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script.main(["--json", str(tmp_path / "figures.json")]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("gpu_host_check: skipped, nothing measured: no GPU")
    assert list(tmp_path.iterdir()) == []


def test_every_figure_is_there_with_torch_and_numpy_alone(tmp_path: Path) -> None:
    # A GPU machine may have nothing else, fbgemm least of all.
    figures = tmp_path / "figures.json"
    arguments = ["--device", "cpu", "--quick", "--json", str(figures)]
    code = _RUN.format(absent=ABSENT, arguments=arguments, script=str(SCRIPT))
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=_environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr
    assert max(len(line) for line in run.stdout.splitlines() if str(tmp_path) not in line) <= 100
    content: dict[str, Any] = json.loads(figures.read_text())
    lines = content["lines"]
    assert all(math.isfinite(line["measured"]) and line["measured"] > 0 for line in lines)
    measured = [line["what"] for line in lines]
    assert measured.count("dense network") == 4
    assert measured.count("step, device tables") == 4
    staged = [line for line in lines if line["what"].startswith(("step, gather", "step, look"))]
    assert [line["what"] for line in staged] == [
        "step, gather", *(f"step, lookahead {n}" for n in (1, 2, 4))
    ]  # fmt: skip
    assert all(line["expected"] > 0 for line in staged)
    assert content["left_out"] == []
    work = content["steps"]["step, lookahead 4, pageable"]["work"]
    assert work["num_cold"] == pytest.approx(work["num_fetched"] + work["num_forwarded"])
    assert work["num_forwarded"] > 0


def test_what_there_is_no_time_for_is_named(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["--device", "cpu", "--quick", "--limit-s", "0"]) == 0
    left_out = [line for line in capsys.readouterr().out.splitlines() if "want of time" in line]
    assert left_out[0] == "left out for want of time: step, gather, pageable"
    assert len(left_out) == 4


def test_a_wrong_row_fails_the_check_without_pytest(
    script: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Records that aren't forwarded: stale or unwritten memory is trained on.
    monkeypatch.setattr(ColdRows, "_forward", lambda self, records, forward: None)
    assert script.main(["--device", "cpu", "--exactness"]) == 1
    out = capsys.readouterr().out
    assert "exactness: adam, window 2: lookup" in out
    assert "exactness on cpu: 3 of 12 cases are right" in out, "only windows of 0 forward nothing"


@pytest.mark.parametrize(
    ("times_s", "expected"),
    [
        ((0.003, 0.005, 0.007), (0.001, 0.002)),
        ((0.001, 0.003, 0.005), (0.0, (0.001 + 0.006 + 0.015) / 14)),
        ((0.006, 0.005, 0.004), (0.005, 0.0)),
    ],
)
def test_dense_times_have_no_negative_part(
    script: ModuleType, times_s: tuple[float, ...], expected: tuple[float, float]
) -> None:
    fitted = script.fit_dense((1, 2, 3), times_s)
    assert (fitted.fixed_s, fitted.per_sample_s) == pytest.approx(expected, abs=1e-12)
