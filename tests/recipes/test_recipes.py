"""Every experiment runs some steps on its real data, and so do small files of other formats."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import TINY_MODEL, dlrm, read_result, train_lines, without_plots

CONF = Path(__file__).parents[2] / "conf"
# Sweeps are of synthetic data; tests/unit/test_sweep.py has them.
EXPERIMENTS = sorted(
    path.stem for path in (CONF / "experiment").glob("*.yaml") if not path.stem.startswith("sweep_")
)
# Rows of the parts, from the data's own descriptions: the official split, 80/10/10, 7,200/800.
ROWS = {
    "adult": (32_561, 0, 16_281),
    "bank": (45_211,),
    "criteo_kaggle_sample": (7_200, 0, 800),
}


@pytest.fixture(autouse=True)
def start_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands start in an empty folder and skip the plots."""
    monkeypatch.chdir(tmp_path)
    without_plots(monkeypatch)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_runs(
    experiment: str,
    shared_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("DLRM_SHARED_DATA", str(shared_data))
    # One epoch of several, or the schedule of the whole run wouldn't fit.
    more = ["data.root=d", "hydra.run.dir=run", "launch.num_threads=1", "train.log_every=10"]
    small = ["train.max_steps=20", "optim.schedule.decay_steps=0", "optim.schedule.hold_steps=null"]
    schedule = ["optim.schedule.decay_power=2.0", *small]
    assert dlrm("train", f"experiment={experiment}", *more, *schedule) == 0
    result = read_result(tmp_path / "run")
    assert result["status"] == "completed"
    assert result["train"]["steps"] == 20
    assert not result["data"]["synthetic"]
    # Twenty steps of real rows teach something, and no run is so good on a row it wasn't shown.
    assert 0.5 < result["eval"]["auc"] < 0.95
    losses = [line["loss"] for line in train_lines(tmp_path / "run")]
    assert losses[-1] < losses[0]
    out = capfd.readouterr().out
    sizes = next(line for line in out.splitlines() if "rows;" in line)
    found = [int(word.strip(",").replace(",", "")) for word in sizes.split() if word[0].isdigit()]
    assert sum(found) == sum(ROWS[experiment])
    if len(ROWS[experiment]) == 3:
        assert tuple(found) == ROWS[experiment]


def test_experiments_without_their_data_say_which_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DLRM_SHARED_DATA", str(tmp_path / "nowhere"))
    for experiment in EXPERIMENTS:
        capfd.readouterr()
        assert dlrm("train", f"experiment={experiment}") == 2
        err = capfd.readouterr().err
        assert str(tmp_path / "nowhere") in err
        assert "no such file" in err


def test_criteo_1tb_prepares_its_first_rows(shared_data: Path, tmp_path: Path) -> None:
    """Files of days, the last held out, as the recipe's split says; day 0's rows serve twice."""
    (raw,) = (shared_data / "criteo_1tb_1k").glob("*.tsv")
    for day in (0, 1):
        (tmp_path / f"day_{day}").write_bytes(raw.read_bytes())
    files = ["data=criteo_1tb", "data.raw=day_*", "data.root=d"]
    small = ["data.schema.sparse_default.min_count=2", "data.schema.sparse_default.rows=300"]
    more = [*TINY_MODEL, "train.max_steps=3", "hydra.run.dir=run"]
    assert dlrm("train", *files, *small, *more) == 0
    result = read_result(tmp_path / "run")
    assert result["train"]["steps"] == 3
    assert result["eval"]["num_samples"] == 500
    assert result["memory"]["table_bytes_max_rank"] <= 26 * 300 * 16 * 4


def test_criteo_sample_of_another_project(shared_data: Path, tmp_path: Path) -> None:
    """DeepCTR's sample: comma, header, floats for counts; only the format is told."""
    raw = shared_data / "criteo_deepctr_200" / "criteo_sample.txt"
    form = ["header=true", "delimiter=','", "columns=[]"]
    form = [f"data.schema.format.{option}" for option in form]
    files = ["data=criteo_kaggle", f"data.raw={raw}", "data.root=d", *form]
    share = ["data.schema.split.valid=0.1", "data.schema.split.test=0.2"]
    assert dlrm("train", *files, *share, *TINY_MODEL, "hydra.run.dir=run") == 0
    assert read_result(tmp_path / "run")["eval"]["num_samples"] == 40
