"""`data.root=` without `data=`: the folder says which data it is (F38); notes on the data (F44)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.commands import TINY_DATA, TINY_MODEL, dlrm, read_result, without_plots, write_adult_csv

Digests = Callable[[Path], dict[str, str]]
QUICK = (*TINY_MODEL, "train.max_steps=2")


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    without_plots(monkeypatch)


@pytest.fixture
def adult_root(tmp_path: Path) -> Path:
    """A dataset that was prepared from raw files."""
    for seed, part in enumerate(("train", "test")):
        write_adult_csv(tmp_path / f"{part}.csv", 300, seed=seed)
    files = ["data.raw_train=train.csv", "data.raw_test=test.csv"]
    assert dlrm("prepare", "data=adult", *files, "data.root=prepared") == 0
    return tmp_path / "prepared"


@pytest.mark.parametrize("verb", ["train", "prepare"])
def test_f38_a_misspelt_root_is_refused(
    verb: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It was filled with synthetic data, which then was trained on."""
    assert dlrm(verb, "data.root=typo", "hydra.run.dir=run") == 2
    err = capfd.readouterr().err
    assert "data.root=typo: no prepared dataset there" in err
    assert "data=synthetic" in err
    assert not (tmp_path / "typo").exists()


def test_f38_a_prepared_folder_says_which_data_it_is(
    adult_root: Path, tmp_path: Path, tree_digests: Digests, capfd: pytest.CaptureFixture[str]
) -> None:
    """It was refused, with the advice to overwrite it with synthetic rows."""
    before = tree_digests(adult_root)
    assert dlrm("train", "data.root=prepared", *QUICK, "hydra.run.dir=run") == 0
    data = read_result(tmp_path / "run")["data"]
    assert (data["name"], data["synthetic"]) == ("adult", False)
    stored = OmegaConf.load(tmp_path / "run" / "config.yaml")
    assert stored.data.name == "adult"
    assert stored.data.synthetic is None
    assert stored.data.schema.dense.age.transform == "standardise"
    # Named as well it is the same data; what the run recorded can be gone on with.
    assert dlrm("train", "data=adult", "data.root=prepared", *QUICK, "hydra.run.dir=named") == 0
    assert read_result(tmp_path / "named")["data"]["digest"] == data["digest"]
    assert dlrm("evaluate", "run=run", "hydra.run.dir=e") == 0
    assert tree_digests(adult_root) == before
    capfd.readouterr()
    overridden = "data.schema.split.kind=random"
    assert dlrm("train", "data.root=prepared", overridden, "hydra.run.dir=other") == 2
    assert overridden in capfd.readouterr().err


def test_f38_a_generated_folder_says_its_settings(tmp_path: Path) -> None:
    assert dlrm("prepare", "data=synthetic", *TINY_DATA, "data.root=made") == 0
    assert dlrm("train", "data.root=made", *QUICK, "hydra.run.dir=run") == 0
    assert read_result(tmp_path / "run")["data"]["synthetic"] is True
    stored = OmegaConf.load(tmp_path / "run" / "config.yaml")
    assert stored.data.synthetic.num_train == 4096


@pytest.mark.parametrize("more", [[], ["data.overwrite=true"]])
def test_f38_nothing_prepared_is_overwritten_by_synthetic_data(
    more: list[str],
    adult_root: Path,
    tree_digests: Digests,
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = tree_digests(adult_root)
    named = ["data=synthetic", *TINY_DATA, "data.root=prepared"]
    assert dlrm("train", *named, *more, "hydra.run.dir=run") == 2
    err = capfd.readouterr().err
    assert "choose another data.root" in err
    assert "data.overwrite=true\n" not in err
    after = {n: d for n, d in tree_digests(adult_root).items() if ".work" not in n}
    assert after == before
    assert json.loads((adult_root / "manifest.json").read_text(encoding="utf-8"))["inputs"]
