"""The quality that the recipes promise; scripts/bench_recipes.py measures more seeds."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tests.commands import dlrm, read_result, without_plots

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(autouse=True)
def start_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DLRM_CACHE", str(tmp_path / "cache"))
    without_plots(monkeypatch)


def trained(*overrides: str) -> dict[str, Any]:
    assert dlrm("train", *overrides, "hydra.run.dir=run", "launch.num_threads=1") == 0
    return read_result(Path("run"))


def regression_auc(root: Path) -> float:
    spec = importlib.util.spec_from_file_location("bench_recipes", SCRIPTS / "bench_recipes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return float(module.regression_auc(root))


def test_the_default_run_comes_within_a_hundredth_of_the_teacher() -> None:
    result = trained()
    assert result["eval"]["num_samples"] >= 50_000
    assert 0.78 <= result["data"]["best_auc"] <= 0.85
    assert result["eval"]["auc"] >= result["data"]["best_auc"] - 0.01
    assert result["train"]["data_wait_share"] is not None


def test_the_criteo_sample_reaches_070(shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLRM_SHARED_DATA", str(shared_data))
    assert trained("experiment=criteo_kaggle_sample")["eval"]["auc"] >= 0.70


def test_adult_reaches_0905(shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLRM_SHARED_DATA", str(shared_data))
    assert trained("experiment=adult")["eval"]["auc"] >= 0.905


def test_bank_beats_logistic_regression(shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By 0.005 at least; over five seeds the mean is ahead by 0.03 (docs/benchmarks.md)."""
    monkeypatch.setenv("DLRM_SHARED_DATA", str(shared_data))
    result = trained("experiment=bank")
    assert result["eval"]["auc"] >= regression_auc(Path(result["data"]["root"])) + 0.005
