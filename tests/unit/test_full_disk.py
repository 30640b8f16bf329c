"""A file system that fails at any moment, under every verb: one plain line, nothing half-written
that looks whole, and what was there before stays."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from data.parquet import PreparedDataset
from dlrm.checkpoint import open_checkpoint
from dlrm.launch import start
from tests.commands import TINY_MODEL, dlrm, read_json, without_plots, write_adult_csv
from tests.failing_files import Calls, fail_at

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with raw files, prepared/ and run/, a finished run."""
    folder = tmp_path_factory.mktemp("base")
    for seed, (name, rows) in enumerate((("train", 600), ("valid", 150), ("test", 150))):
        write_adult_csv(folder / f"{name}.csv", rows, seed=seed)
    with pytest.MonkeyPatch.context() as patched:
        without_plots(patched)
        assert dlrm(*train_in(folder), f"hydra.run.dir={folder / 'run'}") == 0
    return folder


def train_in(base: Path) -> list[str]:
    raw = [f"data.raw_{part}={base / f'{part}.csv'}" for part in ("train", "valid", "test")]
    more = ["train.checkpoint_every=2", "train.log_every=2", f"data.root={base / 'prepared'}"]
    return ["train", "data=adult", *raw, *TINY_MODEL, *more]


def commands(base: Path, out: Path) -> dict[str, list[str]]:
    """Each verb's command, which writes to `out` only."""
    raw = [text for text in train_in(base) if text.startswith("data.raw")]
    run, into = f"run={base / 'run'}", f"hydra.run.dir={out / 'run'}"
    exported = f"export.out={out / 'exported'}"
    check = [text for text in train_in(base)[1:] if not text.startswith("train.")]
    bench = ["data=synthetic", "data.synthetic.num_train=512", "data.synthetic.num_valid=0"]
    bench += ["data.synthetic.num_test=0", "data.synthetic.cardinality_scale=0.0001"]
    return {
        "prepare": ["prepare", "data=adult", *raw, f"data.root={out / 'prepared'}"],
        "train": [*train_in(base), into],
        "evaluate": ["evaluate", run, into],
        "predict": ["predict", run, f"data.raw={base / 'test.csv'}", into],
        "export": ["export", run, "export.tables=[education,sex]", exported, into],
        "export_npy": ["export", run, "export.tables=[sex]", "export.format=npy", exported, into],
        "export_model": ["export", run, "export.what=model", exported, into],
        "check": ["check", *check, "check.steps=2", into],
        "sweep": [*train_in(base), "-m", "seed=0,1", "train.max_steps=2",
                  f"hydra.sweep.dir={out / 'run'}"],
        "bench": ["bench", "loader", *bench, f"data.root={out / 'bench_data'}",
                  "bench.repeats=1", "bench.sides=[dlrm]", "launch.num_threads=1", into],
    }  # fmt: skip


VERBS = (
    "prepare", "train", "evaluate", "predict", "export", "export_npy", "export_model", "check",
)  # fmt: skip


def attempt(verb: str, base: Path, out: Path, n: int | None, *, stays: bool) -> tuple[int, Calls]:
    out.mkdir()
    with fail_at(n, within=out, stays=stays) as calls:
        status = dlrm(*commands(base, out)[verb])
    return status, calls


def look_at(verb: str, out: Path, status: int, err: str, calls: Calls) -> None:
    """What must hold after a command under which the file system failed."""
    assert calls.failed
    assert "Traceback" not in err
    lines = [line for line in err.splitlines() if line.startswith("dlrm: ")]
    if status:
        assert status == 1, err
        assert lines, err
        assert all("No space left on device" in line or "sweep" in line for line in lines), err
        assert str(out) in err
        if verb != "sweep":
            assert len(lines) == 1, err
    result = out / "run" / "result.json"
    if result.exists():
        is_complete = read_json(result)["status"] == "completed"
        assert is_complete == (status == 0), (status, read_json(result)["status"])
    elif status == 0:
        assert verb in ("prepare", "sweep")
    for path in out.rglob("*.parquet"):
        if ".partial" not in str(path) and "work" not in str(path):
            pq.read_metadata(path)  # Whole, or not there.
    if verb.startswith("export") and status:
        assert not list((out / "exported").glob("*")) or not (out / "exported").exists()
    for step in out.glob("run/checkpoints/step-*"):
        open_checkpoint(step)
    if (out / "prepared" / "manifest.json").exists():
        PreparedDataset(out / "prepared").check("train")
    left = [path for path in out.rglob("*.partial") if path.is_file() and verb.startswith("export")]
    assert not left


@pytest.fixture
def try_all(
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tree_digests: Callable[[Path], dict[str, str]],
) -> Callable[[str, int], None]:
    monkeypatch.chdir(tmp_path)
    without_plots(monkeypatch)

    def start_here(*args: Any, fresh_processes: bool, **more: Any) -> Any:
        return start(*args, fresh_processes=False, **more)

    monkeypatch.setattr("dlrm.train.start", start_here)  # Of the jobs of a sweep.

    def run(verb: str, num_tries: int) -> None:
        rng = random.Random(verb)
        before = tree_digests(base)
        status, counted = attempt(verb, base, tmp_path / "counted", None, stays=False)
        assert status == 0, capfd.readouterr().err
        moments = rng.sample(range(counted.count), min(num_tries, counted.count))
        for position, n in enumerate(moments):
            out = tmp_path / f"try{position}"
            capfd.readouterr()
            status, calls = attempt(verb, base, out, n, stays=position % 2 == 0)
            err = capfd.readouterr().err
            try:
                look_at(verb, out, status, err, calls)
            except AssertionError as error:
                raise AssertionError(
                    f"{verb}, call {n} of {counted.count}: {calls.failed[:2]}\n{err}"
                ) from error
        assert tree_digests(base) == before

    return run


@pytest.mark.parametrize("verb", ["evaluate", "export", "export_npy"])
def test_f30_c18_a_verb_under_a_failing_file_system(verb: str, try_all: Any) -> None:
    try_all(verb, 4)


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_f30_c18_every_verb_at_many_moments(verb: str, try_all: Any) -> None:
    try_all(verb, 20)
