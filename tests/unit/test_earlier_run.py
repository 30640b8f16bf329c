"""A run folder that is used again: what was good stays until its successor is, what others wrote
stays for good, no link is followed, and one process at a time writes there."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from data.errors import UserError
from data.files import WholeFile, write_whole
from dlrm import own_files
from dlrm.checkpoint import Checkpoints, open_checkpoint
from dlrm.run_folder import RunFolder
from dlrm.run_lock import LOCK, locked_run
from dlrm.trainer import Trainer
from tests.commands import dlrm, latest, read_result, tiny, without_plots
from tests.failing_files import Crashed, crash_at, fail_at

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]


def shown(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, links not followed."""
    return {
        str(Path(where, name).relative_to(folder)): Path(where, name).read_bytes()
        for where, _, names in os.walk(folder)
        for name in names
        if not Path(where, name).is_symlink()
    }


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [*tiny(tmp_path_factory), "train.max_steps=4", "train.log_every=2"]


@pytest.fixture(scope="module")
def first_run(overrides: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first") / "run"
    assert dlrm("train", *overrides, f"hydra.run.dir={folder}") == 0
    return folder


@pytest.fixture
def run_dir(first_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run of one's own, in the working folder."""
    without_plots(monkeypatch)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(first_run, tmp_path / "run")
    return tmp_path / "run"


def overwrite(overrides: list[str], *more: str) -> int:
    return dlrm("train", *overrides, "hydra.run.dir=run", "train.overwrite=true", *more)


# ------------------------------------------------------------------------- the earlier run stays


@pytest.mark.parametrize(
    "mistake",
    [
        ["data=adult", "data.raw_train=nowhere.csv", "data.raw_test=nowhere.csv"],
        ["data.root=nowhere", "data=criteo_kaggle"],
        ["sharding=file", "sharding.plan=nowhere.json"],
        ["train.warm_start.path=nowhere"],
    ],
    ids=["data.raw", "data.root", "plan", "warm_start"],
)
def test_f52_a_mistyped_input_leaves_the_earlier_run(
    mistake: list[str], overrides: list[str], run_dir: Path
) -> None:
    """Whether it shows before anything of the new run begins, or after."""
    before = shown(run_dir)
    others = [o for o in overrides if not o.startswith("data.") or "batch" in o]
    given = others if mistake[0].startswith("data") else overrides
    assert overwrite(given, *mistake) == 2
    assert shown(run_dir) == before


def test_f52_a_run_that_fails_before_it_kept_a_model_gives_the_folder_back(
    overrides: list[str],
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = shown(run_dir)

    def fail(self: Trainer) -> None:
        raise RuntimeError("the unforeseen")

    monkeypatch.setattr(Trainer, "fit", fail)
    assert overwrite(overrides, "seed=5") == 1
    assert "run holds the earlier run again" in capsys.readouterr().out
    assert shown(run_dir) == before


def test_f52_the_earlier_run_goes_once_the_new_one_has_a_model(
    overrides: list[str], run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only then: until the first checkpoint it can be used where it waits."""
    step = Trainer.step
    waiting = run_dir / "earlier-run"
    seen: list[tuple[int, bool]] = []

    def look(self: Trainer, planned: Any) -> float:
        if not seen:
            assert Checkpoints(waiting).find("best").step == 4
        seen.append((self.steps_done, waiting.is_dir()))
        return step(self, planned)

    monkeypatch.setattr(Trainer, "step", look)
    assert overwrite(overrides, "seed=5", "train.checkpoint_every=2") == 0
    assert seen == [(0, True), (1, True), (2, False), (3, False)]
    assert not waiting.exists()
    assert read_result(run_dir)["seed"] == 5
    assert len(list((run_dir / "tensorboard").iterdir())) == 1


def test_f52_a_kill_before_the_first_checkpoint_keeps_the_earlier_run_aside(
    overrides: list[str], run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The next try replaces what came to nothing; a mistake in it brings the good run back."""
    before = shown(run_dir)
    folder = RunFolder(run_dir, overwrite=True)
    folder.write_json("result.json", {"status": "failed: not finished"})  # And then it was killed.
    assert dlrm("train", *overrides, "hydra.run.dir=run", "train.resume=latest") == 2
    assert "earlier-run" in capfd.readouterr().err
    assert overwrite(overrides, "sharding=file", "sharding.plan=nowhere.json") == 2
    assert shown(run_dir) == before


def test_f52_a_check_with_a_mistake_leaves_the_run_in_its_folder(
    overrides: list[str], run_dir: Path
) -> None:
    before = shown(run_dir)
    more = ["hydra.run.dir=run", "train.overwrite=true", "data.root=nowhere", "data=criteo_kaggle"]
    others = [o for o in overrides if not o.startswith("data.") or "batch" in o]
    assert dlrm("check", *others, *more) == 2
    assert shown(run_dir) == before


@pytest.mark.parametrize("what", ["set_aside", "restore"])
def test_f52_a_crash_or_a_full_disk_while_files_are_moved_loses_none(
    what: str, first_run: Path, tmp_path: Path
) -> None:
    before = shown(first_run)
    for number in itertools.count():
        for fail in (crash_at, fail_at):
            run = tmp_path / f"{number}-{fail.__name__}"
            shutil.copytree(first_run, run)
            if what == "restore":
                own_files.set_aside(run)
                (run / "result.json").write_text("{}")
            with fail(number) as calls, suppress(Crashed, OSError):
                getattr(own_files, what)(run)
            own_files.finish_moving(run)
            waiting = run / "earlier-run"
            assert shown(waiting if waiting.is_dir() else run) == before, number
        if not calls.failed:
            assert number > 3
            return


def test_f52_what_cannot_be_removed_is_told(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new run has its model: it isn't ended for the old one's sake, nor taken for it."""
    folder = RunFolder(run_dir, overwrite=True)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("dlrm.run_folder.remove_run", refuse)
    with pytest.warns(UserWarning, match=r"earlier-run can't be removed .*Permission denied"):
        folder.settle(is_kept=True)


# --------------------------------------------------------------------- of this run, and no other


def test_f02_overwriting_refuses_a_folder_whose_checkpoints_are_linked(
    overrides: list[str], run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The old run's steps would be taken for the new one's; nothing of either is touched."""
    os.rename(run_dir / "checkpoints", "moved")
    (run_dir / "checkpoints").symlink_to(Path("moved").resolve())
    before, elsewhere = shown(run_dir), shown(Path("moved"))
    assert overwrite(overrides, "seed=1") == 2
    message = capfd.readouterr().err
    assert f"checkpoints (a link to {Path('moved').resolve()})" in message
    assert (shown(run_dir), shown(Path("moved"))) == (before, elsewhere)


def test_f02_checkpoints_that_cannot_be_moved_end_the_new_run(
    overrides: list[str], run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = shown(run_dir)
    denied = partial(OSError, errno.EACCES, "Permission denied")
    checkpoints = run_dir / "checkpoints"
    with fail_at(0, within=checkpoints, operations=("rename",), error=denied) as calls:
        assert overwrite(overrides, "seed=1") != 0
    assert calls.failed == [("rename", str(checkpoints))]
    assert "Permission denied" in capfd.readouterr().err
    assert shown(run_dir) == before


def test_f02_a_checkpoint_of_another_run_is_not_taken_for_this_one_s(
    overrides: list[str], run_dir: Path
) -> None:
    """Put there at a later step, or in place of this run's: it is named, and passed over."""
    assert dlrm("train", *overrides, "seed=1", "train.max_steps=6", "hydra.run.dir=other") == 0
    shutil.copytree(latest(Path("other")), run_dir / "checkpoints" / "step-000006")
    (run_dir / "checkpoints" / "latest").write_text("step-000006")
    with pytest.warns(UserWarning, match="step-000006 was written by another run"):
        info = Checkpoints(run_dir).find("latest")
    assert info.step == 4
    assert info.run_id == read_result(run_dir)["run_id"]
    # Going on past it leaves it, under another name.
    more = ["train.resume=latest", "train.max_steps=6", "hydra.run.dir=run"]
    with pytest.warns(UserWarning, match="another run"):
        assert dlrm("train", *overrides, *more) == 0
    assert open_checkpoint(latest(run_dir)).run_id == read_result(run_dir)["run_id"] == info.run_id
    (left,) = (run_dir / "checkpoints").glob("step-000006-of-run-*")
    assert open_checkpoint(left).run_id == read_result(Path("other"))["run_id"]


# ------------------------------------------------------------------- links and what others wrote


def test_f16_rotation_removes_a_link_and_not_what_it_leads_to(
    overrides: list[str], run_dir: Path
) -> None:
    step = latest(run_dir)
    os.rename(step, "kept")
    step.symlink_to(Path("kept").resolve())
    before = shown(Path("kept"))
    more = ["train.resume=latest", "train.max_steps=16", "train.checkpoint_every=2"]
    assert dlrm("train", *overrides, *more, "hydra.run.dir=run") == 0
    assert shown(Path("kept")) == before
    assert not os.path.lexists(step)
    assert open_checkpoint(Path("kept").resolve()).step == 4


def test_f16_rotation_leaves_what_others_put_into_a_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "step-000001"
    folder.mkdir()
    for name in ("checkpoint.json", "rows-00000.safetensors", "dense.safetensors.partial"):
        (folder / name).write_text("")
    (folder / "notes.txt").write_text("mine")
    own_files.remove_checkpoint(folder)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    "place",
    [
        "checkpoints/notes.txt",
        "checkpoints/step-000004/notes.txt",
        "checkpoints/step-000004-good/checkpoint.json",
        "profile/mine.json",
        "report.html/page.html",
    ],
)
def test_f16_overwriting_refuses_where_others_have_put_files_among_a_run_s(
    place: str, overrides: list[str], run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if place.startswith("report.html"):
        (run_dir / "report.html").unlink(missing_ok=True)
    (run_dir / place).parent.mkdir(exist_ok=True)
    (run_dir / place).write_text("mine")
    before = shown(run_dir)
    assert overwrite(overrides) == 2
    named = place.rpartition("/")[0] if "good" in place or "html" in place else place
    assert named in capfd.readouterr().err
    assert shown(run_dir) == before


def test_f16_what_others_put_beside_a_run_stays(overrides: list[str], run_dir: Path) -> None:
    (run_dir / "notes.txt").write_text("mine")
    (run_dir / "tensorboard" / "mine").write_text("mine too")
    Path("elsewhere").write_text("theirs")
    (run_dir / "metrics.jsonl").unlink()
    (run_dir / "metrics.jsonl").symlink_to(Path("elsewhere").resolve())
    assert overwrite(overrides) == 0
    assert (run_dir / "notes.txt").read_text() == "mine"
    assert (run_dir / "tensorboard" / "mine").read_text() == "mine too"
    assert Path("elsewhere").read_text() == "theirs"


def test_f34_a_planted_link_is_not_written_through(overrides: list[str], run_dir: Path) -> None:
    """`result.json.partial` is what result.json is called until it is whole."""
    Path("theirs").write_text("untouched")
    for name in ("result.json", "metrics.jsonl", "plan.json", "config.yaml"):
        (run_dir / f"{name}.partial").symlink_to(Path("theirs").resolve())
    assert overwrite(overrides) == 0
    assert Path("theirs").read_text() == "untouched"
    (run_dir / "a.partial").symlink_to(Path("theirs").resolve())
    write_whole(run_dir / "a", b"whole")
    (run_dir / "b.partial").symlink_to(Path("theirs").resolve())
    with WholeFile(run_dir / "b") as file:
        file.write(b"whole")
    assert (run_dir / "a").read_text() == (run_dir / "b").read_text() == "whole"
    assert Path("theirs").read_text() == "untouched"


# --------------------------------------------------------------------------- one process at a time


def test_f15_a_second_run_in_a_folder_is_refused_by_process_and_host(
    overrides: list[str], run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = shown(run_dir)
    with locked_run(run_dir):
        for more in (["train.resume=latest"], ["train.overwrite=true"], []):
            assert dlrm("train", *overrides, "hydra.run.dir=run", *more) == 2
            message = capfd.readouterr().err
            assert f"process {os.getpid()} on {socket.gethostname()}" in message
            assert len(message.strip().splitlines()) == 1
        assert shown(run_dir).keys() - {LOCK} == before.keys()
    assert shown(run_dir) == before
    assert dlrm("train", *overrides, "hydra.run.dir=run", "train.resume=latest") == 0


@pytest.mark.processes
def test_f15_the_lock_ends_with_its_holder(tmp_path: Path) -> None:
    """Killed without a chance to tidy up: its file is left, and keeps nobody out."""
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom dlrm.run_lock import locked_run\n"
        "with locked_run(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"process {holder.pid} "), locked_run(tmp_path):
            pass
        holder.kill()
    assert (tmp_path / LOCK).exists()
    with locked_run(tmp_path):
        assert (tmp_path / LOCK).read_text().startswith(f"process {os.getpid()} ")
    assert not (tmp_path / LOCK).exists()


def test_f15_a_restarted_group_waits_for_its_predecessor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun starts a group again while the lock's holder may not be quite gone."""
    held = locked_run(tmp_path)
    held.__enter__()
    polls: list[float] = []

    def poll(seconds: float) -> None:
        polls.append(seconds)
        held.__exit__(None, None, None)

    monkeypatch.setattr("dlrm.run_lock.time.sleep", poll)
    with locked_run(tmp_path, wait_s=30.0):
        assert len(polls) == 1


def test_f15_a_file_system_without_locks_is_told_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, how: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("dlrm.run_lock.fcntl.flock", refuse)
    with pytest.warns(UserWarning, match="can't be locked"), locked_run(tmp_path):
        pass


# ------------------------------------------------------------------------------------- odd pointers


@pytest.mark.parametrize("ending", ["\n", "  \r\n"])
def test_f34_a_newline_after_the_name_in_a_pointer_is_no_part_of_it(
    ending: str, overrides: list[str], run_dir: Path
) -> None:
    """As an editor or `echo` leaves it; the best must not be rotated away for it either."""
    root = run_dir / "checkpoints"
    for name in ("latest", "best"):
        (root / name).write_text((root / name).read_text() + ending)
    best = Checkpoints(run_dir).find("best")
    assert (best.which, best.step) == ("best", 4)
    more = ["train.resume=latest", "train.max_steps=16", "train.checkpoint_every=2"]
    assert dlrm("train", *overrides, *more, "hydra.run.dir=run", "optim.sparse.lr=0") == 0
    assert Checkpoints(run_dir).find("best").folder.is_dir()


def test_f02_result_json_names_the_run_of_its_checkpoints(run_dir: Path) -> None:
    described = json.loads((latest(run_dir) / "checkpoint.json").read_text())["checkpoint"]
    assert described["run_id"] == read_result(run_dir)["run_id"]
    assert described["program"].startswith("dlrm-system")
