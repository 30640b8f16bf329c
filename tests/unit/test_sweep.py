"""Sweeps: every job has a folder and a status, none hides another, and all are in one table."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from data.errors import UserError
from dlrm.config import TrainRun
from dlrm.run_folder import RunFolder
from dlrm.sweep import FIGURES, NOT_STARTED, Sweep, check_unused, short_names, show_bytes
from dlrm.sweep_table import MAX_WIDTH, print_table, write_page
from tests.commands import dlrm, read_json, read_result
from tests.failing_files import fail_at


def result(seed: int = 0, status: str = "completed") -> dict[str, Any]:
    """What a run of two processes writes, as far as a sweep reads it."""
    return {
        "status": status,
        "seed": seed,
        "train": {"step_ms_p50": 20.0 + seed, "samples_per_s": 10_000.0 - seed},
        "comm": {"bytes_sent_per_step": {"ids": 1000, "rows": 20_000, "grads": 30_000, "dense": 7}},
        "memory": {
            "table_bytes_max_rank": 3 * 2**20,
            "state_bytes_max_rank": 2**20,
            "peak_rss_bytes_max_rank": 400 * 2**20,
        },
        "eval": {"auc": 0.75, "logloss": None},
    }


def jobs_of(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "sweep.json").read_text())
    return found


def statuses(folder: Path) -> list[str]:
    return [job["status"] for job in jobs_of(folder)]


# ------------------------------------------------------------------------------------ the command


class FakeTraining:
    """Stands for `run_train`: writes a result at once; fails as the seed says."""

    def __init__(self) -> None:
        self.seeds: list[int] = []
        self.seen: list[list[str]] = []
        self.fresh: list[bool] = []
        self.raises: dict[int, BaseException] = {}
        self.sweep_dir = Path("sweep")

    def __call__(
        self, config: TrainRun, text: str, run_dir: Path, *, fresh_processes: bool
    ) -> dict[str, Any]:
        folder = RunFolder(run_dir, overwrite=config.train.overwrite)
        self.seeds.append(config.seed)
        self.fresh.append(fresh_processes)
        if self.sweep_dir.exists():
            self.seen.append(statuses(self.sweep_dir))
        if config.seed in self.raises:
            raise self.raises[config.seed]
        folder.write_text("config.yaml", text)
        folder.write_json("result.json", result(config.seed))
        return {}


@pytest.fixture(autouse=True)
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeTraining:
    """Commands start in an empty folder, and training and plots take no time."""
    monkeypatch.chdir(tmp_path)
    fake = FakeTraining()
    monkeypatch.setattr("dlrm.train.run_train", fake)
    monkeypatch.setattr("dlrm.hydra_jobs.write_page", lambda told: told.folder / "sweep.html")
    return fake


def sweep(*arguments: str) -> int:
    return dlrm("train", "-m", "hydra.sweep.dir=sweep", *arguments)


def test_every_combination_is_a_job_with_a_folder(training: FakeTraining) -> None:
    swept = ["seed=1,2", "data.batch_size=64,128"]
    assert dlrm("train", "launch.nproc=2", "hydra.sweep.dir=sweep", "--multirun", *swept) == 0
    found = jobs_of(Path("sweep"))
    assert [job["differing"] for job in found] == [
        {"seed": seed, "data.batch_size": size} for seed in "12" for size in ("64", "128")
    ]
    for number, job in enumerate(found):
        assert (job["job"], job["folder"], job["status"]) == (number, str(number), "completed")
        assert "launch.nproc=2" in job["overrides"]
        assert read_result(Path("sweep") / job["folder"])["seed"] == int(job["differing"]["seed"])
    assert training.fresh == [True] * 4


def test_a_job_alone_is_no_sweep(training: FakeTraining) -> None:
    assert dlrm("train", "hydra.run.dir=run") == 0
    assert training.fresh == [False]
    assert not list(Path().rglob("sweep.*"))


def test_a_failing_job_hides_no_other(
    training: FakeTraining, capfd: pytest.CaptureFixture[str]
) -> None:
    """One is the user's mistake in a value, one in a name, one shows in the run, one is ours."""
    training.raises = {
        1: UserError("optim.sparse.lr=9: too\nmuch"),
        2: RuntimeError("the unforeseen"),
    }
    assert sweep("seed=0,1,2,-1", "optim=adam,lamb") == 2
    assert statuses(Path("sweep"))[::2] == [
        "completed",
        "failed: UserError: optim.sparse.lr=9: too\nmuch",
        "failed: RuntimeError: the unforeseen",
        "failed: UserError: seed=-1: must be at least 0",
    ]
    assert all("optim/lamb" in status for status in statuses(Path("sweep"))[1::2])
    for job in jobs_of(Path("sweep")):
        folder = Path("sweep") / str(job["job"])
        assert read_result(folder)["status"] == job["status"]
    captured = capfd.readouterr()
    for said in (
        "job 2: optim.sparse.lr=9: too",
        "job 4: failed",
        "RuntimeError: the unforeseen",
        "job 6: seed=-1",
        "job 7: In 'train': Could not find 'optim/lamb'",
    ):
        assert said in captured.err
    assert captured.err.count("Traceback") == 1
    assert "job 2 failed: UserError: optim.sparse.lr=9: too\n" in captured.out
    # Told before the first job takes its time; only what can start is started.
    assert training.seen[0][6].startswith("failed: ")
    assert training.seeds == [0, 1, 2]


def test_the_status_is_that_of_the_worst_job(training: FakeTraining) -> None:
    training.raises = {1: RuntimeError("the unforeseen")}
    assert sweep("seed=1,0") == 1
    assert statuses(Path("sweep"))[1] == "completed"


def test_where_no_job_can_be_composed_nothing_is_made(
    training: FakeTraining, capfd: pytest.CaptureFixture[str]
) -> None:
    assert sweep("trian.epochs=1,2") == 2
    err = capfd.readouterr().err
    assert err.count("dlrm: ") == 1
    assert "did you mean train.epochs" in err
    assert not list(Path().iterdir())
    assert not training.seeds


def test_lines_tell_of_each_job(training: FakeTraining, capfd: pytest.CaptureFixture[str]) -> None:
    training.raises = {1: RuntimeError("the unforeseen")}
    assert sweep("seed=0,1", "optim=sgd", "train.epochs=3,4") == 1
    lines = capfd.readouterr().out.splitlines()
    assert "job 1 (2 of 4): seed=0 train.epochs=4" in lines
    (ended,) = (line for line in lines if line.startswith("job 0 (1 of 4) completed"))
    assert ended.endswith("step 20.0 ms, 10,000 samples/s, AUC 0.7500")
    (ended,) = (line for line in lines if line.startswith("job 3 (4 of 4) failed"))
    assert ended.endswith("RuntimeError: the unforeseen")


def test_an_interrupted_sweep_leaves_what_is_done(
    training: FakeTraining, capfd: pytest.CaptureFixture[str]
) -> None:
    training.raises = {1: KeyboardInterrupt()}
    assert sweep("seed=0,1,2") == 130
    assert statuses(Path("sweep")) == ["completed", "failed: not finished", NOT_STARTED]
    assert [job["folder"] for job in jobs_of(Path("sweep"))] == ["0", "1", None]
    rows = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert ["0", "seed=0", "ok"] in [words[:3] for words in rows]
    assert ["2", "seed=2", "not", "started"] in [words[:4] for words in rows]


def test_the_files_are_written_after_every_job(training: FakeTraining) -> None:
    """A sweep that is killed can't write any more."""
    assert sweep("seed=0,1,2") == 0
    running = "failed: not finished"
    assert training.seen == [
        [running, NOT_STARTED, NOT_STARTED],
        ["completed", running, NOT_STARTED],
        ["completed", "completed", running],
    ]


def test_a_used_folder_is_refused_and_left_alone(
    training: FakeTraining, capfd: pytest.CaptureFixture[str]
) -> None:
    assert sweep("seed=0,1") == 0
    before = {path: path.read_bytes() for path in Path("sweep").rglob("*") if path.is_file()}
    assert sweep("seed=2,3,4") == 2
    err = capfd.readouterr().err
    assert "hydra.sweep.dir=sweep is used" in err
    assert "train.overwrite=true" in err
    assert {path: path.read_bytes() for path in before} == before
    assert sweep("seed=2,3,4", "train.overwrite=true") == 0
    assert [job["differing"]["seed"] for job in jobs_of(Path("sweep"))] == ["2", "3", "4"]


def test_a_sweep_that_failed_altogether_may_be_repeated(training: FakeTraining) -> None:
    training.raises = {0: RuntimeError("the unforeseen"), 1: RuntimeError("the unforeseen")}
    assert sweep("seed=0,1") == 1
    training.raises = {}
    assert sweep("seed=0,1") == 0
    check_unused(Path("nowhere"), overwrite=False)


def test_a_folder_of_another_run_lends_no_figures(training: FakeTraining) -> None:
    RunFolder(Path("sweep/1")).write_json("result.json", result(7))
    assert sweep("seed=0,1") == 2
    first, second = jobs_of(Path("sweep"))
    assert first["auc"] == 0.75
    assert "is used" in second["status"]
    assert second["auc"] is None
    assert read_result(Path("sweep/1"))["seed"] == 7


def test_folders_are_named_as_the_user_says(training: FakeTraining) -> None:
    named = "hydra.sweep.subdir=${hydra.job.num}-${hydra:runtime.choices.optim}"
    assert sweep("optim=sgd,adam", named) == 0
    assert [job["folder"] for job in jobs_of(Path("sweep"))] == ["0-sgd", "1-adam"]
    assert Path("sweep/1-adam/result.json").is_file()


def test_a_file_can_hold_a_whole_sweep(training: FakeTraining) -> None:
    """Without `-m`; the command line replaces the file's values and adds others."""
    experiment = ["experiment=sweep_sharding", "hydra.sweep.dir=sweep"]
    assert dlrm("train", *experiment, "sharding.exchange=kv") == 0
    layouts = ("table_wise", "row_wise", "column_wise", "auto")
    assert [job["differing"] for job in jobs_of(Path("sweep"))] == [
        {"sharding": layout} for layout in layouts
    ]
    more = ["sharding=row_wise", "seed=0,1", "train.overwrite=true"]
    assert dlrm("train", *experiment, *more) == 0
    assert [job["differing"] for job in jobs_of(Path("sweep"))] == [
        {"sharding.exchange": exchange, "seed": seed}
        for exchange in ("pooled", "kv")
        for seed in ("0", "1")
    ]


def test_ranges_and_choices_count_up(
    training: FakeTraining, capfd: pytest.CaptureFixture[str]
) -> None:
    assert sweep("seed=range(1,4)") == 0
    assert training.seeds == [1, 2, 3]
    assert dlrm("train", "-m", "optim.dense.lr=interval(0.1,1)") == 2
    assert "optim.dense.lr=interval(0.1,1)" in capfd.readouterr().err


def test_torchrun_would_sweep_in_every_rank(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], training: FakeTraining
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert dlrm("train", "experiment=sweep_sharding", "hydra.run.dir=run") == 2
    assert "torchrun" in capfd.readouterr().err
    assert not training.seeds


# ------------------------------------------------------------------------------ files and table


def finished(folder: Path, overrides: list[list[str]], results: list[dict[str, Any]]) -> Sweep:
    """A sweep whose jobs had these results."""
    told = Sweep(folder, overrides, lambda line: None, get_time=lambda: 0.0)
    for number, values in enumerate(results):
        told.start(number)
        run_dir = folder / str(number)
        run_dir.mkdir(parents=True)
        (run_dir / "result.json").write_text(json.dumps(values))
        told.enter(number, run_dir)
        told.end(number, has_returned=True)
    return told


def printed(told: Sweep, **options: Any) -> list[str]:
    out = io.StringIO()
    print_table(told, Console(file=out, **{"width": MAX_WIDTH, **options}))
    return out.getvalue().splitlines()


def test_figures_are_those_of_the_results(tmp_path: Path) -> None:
    finished(tmp_path / "s", [["a=1"], ["a=2"]], [result(3), {"status": "failed: X: y\nz"}])
    with open(tmp_path / "s" / "sweep.csv", newline="") as opened:
        first, second = csv.DictReader(opened)
    assert first == {
        "job": "0",
        "folder": "0",
        "status": "completed",
        "a": "1",
        "wall_s": "0.0",
        "step_ms_p50": "23.0",
        "samples_per_s": "9997.0",
        "table_bytes_sent_per_step": "51000",
        "dense_bytes_sent_per_step": "7",
        "table_and_state_bytes_max_rank": str(4 * 2**20),
        "peak_rss_bytes_max_rank": str(400 * 2**20),
        "auc": "0.75",
        "logloss": "",
    }
    assert (second["status"], second["auc"], second["a"]) == ("failed: X: y z", "", "2")
    in_json = jobs_of(tmp_path / "s")[0]
    assert {name: str(in_json[name]) for name in first if name not in ("a", "logloss")} == {
        name: value for name, value in first.items() if name not in ("a", "logloss")
    }
    assert in_json["logloss"] is None


def test_only_what_differs_is_told_apart(tmp_path: Path) -> None:
    """A key that some jobs lack differs; Hydra's own and those of equal values don't."""
    told = Sweep(
        tmp_path,
        [
            ["hydra.x=1", "optim.dense.lr=1", "optim.sparse.lr=1", "+a.b=[1,2]", "same=0"],
            ["hydra.x=2", "optim.dense.lr=2", "optim.sparse.lr=2", "same=0"],
        ],
        print,
    )
    assert told.differing() == ["optim.dense.lr", "optim.sparse.lr", "a.b"]
    assert short_names(told.differing()) == {
        "optim.dense.lr": "optim.dense.lr",
        "optim.sparse.lr": "optim.sparse.lr",
        "a.b": "b",
    }
    assert jobs_of(tmp_path)[0]["differing"]["a.b"] == "[1,2]"
    assert jobs_of(tmp_path)[1]["differing"]["a.b"] is None
    assert "hydra.x=1" not in jobs_of(tmp_path)[0]["overrides"]


def test_the_table_of_all_jobs(tmp_path: Path) -> None:
    overrides = [[f"sharding={name}", "data.batch_size=8192"] for name in ("a", "b", "c", "d")]
    failed = {"status": "failed: PeerLost: rank 1, waiting in rows: gone " + "and away " * 20}
    told = finished(tmp_path / "s", overrides, [result(2), result(1), failed])
    lines = printed(told)
    assert all(len(line) <= MAX_WIDTH for line in lines)
    assert all(line.isascii() for line in lines)
    rows = {words[0]: words[1:] for line in lines if (words := line.split())}
    figures = ["49.8K", "7", "4.00M", "400M", "0.7500"]
    assert rows["0"] == ["sharding=a", "ok", "22.0", "9,998", *figures]
    assert rows["1"] == ["sharding=b", "fastest", "21.0", "9,999", *figures]
    assert rows["2"][:3] == ["sharding=c", "failed", "-"]
    assert rows["3"][:4] == ["sharding=d", "not", "started", "-"]
    assert not any("batch_size" in line for line in lines)
    (reason,) = (line for line in lines if line.startswith("job 2 failed: PeerLost: rank 1"))
    assert reason.endswith("...")


def test_a_table_fits_a_narrow_terminal_and_long_values(tmp_path: Path) -> None:
    overrides = [[f"data.raw=/a/long/folder/of/files/number{n}.tsv", f"b={n}"] for n in (0, 1)]
    told = finished(tmp_path / "s", overrides, [result(0), result(1)])
    for width in (80, MAX_WIDTH):
        lines = printed(told, width=width)
        assert all(len(line) <= width for line in lines)
        assert any("10,000" in line for line in lines)


def test_figures_that_no_job_has_take_no_column(tmp_path: Path) -> None:
    """Of `dlrm evaluate -m run=…` only those of the evaluation are there."""
    scores = [{"status": "completed", "eval": {"auc": auc, "logloss": 0.5}} for auc in (0.6, 0.7)]
    lines = printed(finished(tmp_path / "s", [["run=a"], ["run=b"]], scores))
    assert [line.split() for line in lines if line.startswith("  0")] == [
        ["0", "run=a", "ok", "0.6000", "0.5000"]
    ]
    assert not any("sent" in line for line in lines)


def test_the_page_tells_the_same(tmp_path: Path) -> None:
    overrides = [[f"sharding=<{n}>"] for n in (0, 1, 2)]
    failed = {"status": "failed: E: <why>"}
    told = finished(tmp_path / "s", overrides, [result(2), result(1), failed])
    html = write_page(told).read_text()
    for text in ("sharding=&lt;0&gt;", "E: &lt;why&gt;", "9,998", "fastest", "49.8K"):
        assert text in html
    assert html.count("<svg ") == 2
    assert "http://" not in html.replace('"http://www.w3.org', "")
    assert write_page(told).read_text() == html
    nothing_ran = Sweep(tmp_path / "none", [["a=1"], ["a=2"]], print)
    assert "<svg " not in write_page(nothing_ran).read_text()


def test_figures_of_odd_results_are_missing(tmp_path: Path) -> None:
    odd = {"status": "completed", "train": None, "comm": {"bytes_sent_per_step": {"ids": True}}}
    told = finished(tmp_path / "s", [["a=1"]], [odd | {"eval": {"auc": "high"}}])
    assert set(told.jobs[0].figures.values()) == {None}
    assert len(told.jobs[0].figures) == len(FIGURES)


@given(st.floats(0, 2.0**40))
def test_bytes_take_few_letters_and_keep_their_size(value: float) -> None:
    shown = show_bytes(value)
    assert len(shown) <= 6
    unit = {"K": 10, "M": 20, "G": 30}.get(shown[-1], 0)
    number = float(shown.rstrip("KMG"))
    assert number * 2**unit == pytest.approx(value, rel=0.0051, abs=0.5)


# ---- a full disk


@pytest.mark.parametrize(
    ("stays", "stride"),
    [
        pytest.param(True, 29, id="some"),
        pytest.param(False, 4, id="once", marks=pytest.mark.slow),
        pytest.param(True, 4, id="from then on", marks=pytest.mark.slow),
    ],
)
def test_f30_c18_a_full_disk_at_any_moment_of_a_sweep_is_told_in_plain_lines(
    stays: bool,
    stride: int,
    training: FakeTraining,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Its own files, the jobs' folders and results: one at a time, or all from a moment on. Jobs
    that completed keep their results, and none that didn't counts as completed."""
    monkeypatch.setattr("dlrm.hydra_jobs.write_page", write_page)
    monkeypatch.setattr("dlrm.report_plots.bars", lambda *_: "")
    with fail_at(None, within=Path.cwd()) as counted:
        assert dlrm("train", "-m", "hydra.sweep.dir=whole", "seed=0,1") == 0
    assert counted.count > 60
    for number in range(0, counted.count, stride):
        folder = Path(f"sweep{number}")
        capfd.readouterr()
        with fail_at(number, within=Path.cwd(), stays=stays) as calls:
            status = dlrm("train", "-m", f"hydra.sweep.dir={folder}", "seed=0,1")
        err = capfd.readouterr().err
        where = (number, calls.failed[:3], err)
        assert "Traceback" not in err, where
        told = [line for line in err.splitlines() if line.startswith("dlrm: ")]
        assert len(told) <= 3, where  # A line for each job, and one for the sweep.
        assert all(f"{folder}" in line and "No space left" in line for line in told), where
        assert (status == 1) == bool(told), where
        results = [folder / f"{job}" / "result.json" for job in range(2)]
        done = [path.exists() and read_json(path)["status"] == "completed" for path in results]
        assert status == 1 or all(done), where
        if (folder / "sweep.json").exists():
            kept = [job["status"] == "completed" for job in jobs_of(folder)]
            assert all(is_done or not is_kept for is_done, is_kept in zip(done, kept, strict=True))
            assert status == 1 or all(kept), where


def test_f30_a_sweep_whose_files_can_t_be_written_runs_its_jobs(
    training: FakeTraining, capfd: pytest.CaptureFixture[str]
) -> None:
    with fail_at(1, within=Path("sweep/sweep.json.partial"), operations=("open",), stays=True):
        assert sweep("seed=0,1") == 1
    assert training.seeds == [0, 1]
    assert [read_json(Path("sweep", f"{n}", "result.json"))["status"] for n in (0, 1)] == [
        "completed", "completed",
    ]  # fmt: skip
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("dlrm: ")]
    assert len(told) == 1
    assert "sweep.json" in told[0]
    assert "No space left on device" in told[0]
