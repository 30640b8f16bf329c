"""Runs of real processes that are told to end, or lose one of theirs, and go on.

tests/unit/test_resume.py has the many cases, on ranks that are threads.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.commands import dlrm, latest, read_metrics, read_result, train_lines, without_plots
from tests.dist.forked_workers import forked_workers
from tests.dist.test_launch import is_alive, wait_for

pytestmark = pytest.mark.timeout(150)

CHECKOUT = Path(__file__).parents[2]
NUM_STEPS = 400
EVERY = 100
RUN = (
    "data.root=prepared",
    "data.synthetic.num_train=12800",
    "data.synthetic.num_valid=256",
    "data.synthetic.num_test=256",
    "data.synthetic.cardinality_scale=0.0001",
    "data.batch_size=32",
    "model.bottom_mlp=[16]",
    "model.top_mlp=[16]",
    "optim.sparse.name=adam",
    "optim.dense.name=adam",
    "optim.schedule.warmup_steps=8",
    "train.evals_per_epoch=1",
    "train.log_every=1",
    "launch.num_threads=1",
)
# The command, without the report's plots. Shells start what runs in the background with SIGINT
# ignored, which would stay so: these tests may be run there, too.
COMMAND = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
import dlrm.report
from dlrm.__main__ import main
dlrm.report.write_report = lambda folder: folder / "report.html"
main()
"""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all commands are started: the program, and the data, prepared by the first run."""
    found = tmp_path_factory.mktemp("resume")
    (found / "command.py").write_text(COMMAND)
    return found


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Callable[[int], Path]:
    """The folder of a run that nobody disturbs, by the number of processes; made once."""
    known: dict[int, Path] = {}

    def run(world_size: int) -> Path:
        if world_size not in known:
            known[world_size] = folder / f"undisturbed-{world_size}"
            place = f"hydra.run.dir={known[world_size]}"
            with pytest.MonkeyPatch.context() as patched:
                patched.chdir(folder)
                without_plots(patched)
                with forked_workers():
                    assert dlrm("train", *RUN, f"launch.nproc={world_size}", place) == 0
        return known[world_size]

    return run


class Runs:
    """Commands in sessions of their own, of which nothing is left in the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Starts Python with these arguments."""
        launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        inherited = {key: value for key, value in os.environ.items() if key not in launcher}
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self._folder,
            env=inherited | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(CHECKOUT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def end_all(self) -> None:
        """Kills what still runs, workers first: they are in sessions of their own."""
        for process in self._started:
            if process.poll() is None:  # Else its number may be another's by now.
                for pid in (*workers_of(process).values(), process.pid):
                    with suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
                process.communicate(timeout=30)


@pytest.fixture
def runs(folder: Path) -> Iterator[Runs]:
    started = Runs(folder)
    yield started
    started.end_all()


def workers_of(launcher: subprocess.Popen[str]) -> dict[int, int]:
    """Process numbers of a launcher's workers, by rank."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher.pid and is_alive(int(entry.name)):
                environment = (entry / "environ").read_bytes().split(b"\0")
                ranks = [e.partition(b"=")[2] for e in environment if e.startswith(b"RANK=")]
                if ranks:
                    found[int(ranks[0])] = int(entry.name)
    return found


def steps_done(run_dir: Path) -> int:
    """The last step that a run has written down; 0 before it has."""
    with suppress(OSError, ValueError, IndexError):
        return int(train_lines(run_dir)[-1]["step"])
    return 0


def await_step(process: subprocess.Popen[str], run_dir: Path, step: int) -> None:
    """Waits until a step is written down."""
    _await(process, lambda: steps_done(run_dir) >= step, f"step {step}")


def await_checkpoint(process: subprocess.Popen[str], run_dir: Path, step: int) -> None:
    """Waits until the checkpoint of a step, or a later one, is the latest."""
    _await(process, lambda: step_kept(run_dir) >= step, f"the checkpoint of step {step}")


def step_kept(run_dir: Path) -> int:
    """Of the latest checkpoint; 0 where there is none."""
    with suppress(OSError):
        return int(latest(run_dir).name.removeprefix("step-"))
    return 0


def _await(process: subprocess.Popen[str], condition: Callable[[], bool], what: str) -> None:
    wait_for(lambda: condition() or process.poll() is not None, what, 60)
    if process.poll() is not None:
        _, err = process.communicate(timeout=30)
        pytest.fail(f"ended with {process.returncode} before {what}: {err}")


def assert_ends_as(run_dir: Path, expected: Path) -> None:
    """What the two runs come to; and no step is written down twice."""
    found, other = read_result(run_dir), read_result(expected)
    for key in ("status", "world_size", "model_digest", "plan_digest", "eval"):
        assert found[key] == other[key], key
    for key in ("collectives_per_step", "dense_collectives_per_step"):
        assert found["comm"][key] == other["comm"][key], key
    assert "stopped" not in found
    for line, expected_line in zip(read_metrics(run_dir), read_metrics(expected), strict=True):
        for key in ("step", "samples", "epoch", "loss", "lr_dense", "lr_sparse", "eval"):
            assert line.get(key) == expected_line.get(key), (line, expected_line)
    assert latest(run_dir).name == f"step-{NUM_STEPS:06d}"


# ------------------------------------------------------------------------------------- signals


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_signal_ends_a_run_in_order_and_the_printed_command_goes_on(
    world_size: int,
    runs: Runs,
    undisturbed: Callable[[int], Path],
    folder: Path,
    forked: None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """SIGTERM, later SIGINT, to the process that the user has started; then to the end."""
    without_plots(monkeypatch)
    monkeypatch.chdir(folder)
    expected = undisturbed(world_size)
    run_dir = folder / f"stopped-{world_size}"
    command = ["train", *RUN, f"launch.nproc={world_size}", f"hydra.run.dir={run_dir.name}"]
    wanted = 10
    for number, status in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        process = runs.start("command.py", *command)
        await_step(process, run_dir, wanted)
        workers = workers_of(process)
        assert len(workers) == (world_size if world_size > 1 else 0)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert process.returncode == status, err
        assert not any(map(is_alive, workers.values()))
        result = read_result(run_dir)
        step = result["stopped"]["step"]
        assert result["stopped"]["signal"] == number
        assert wanted <= step < NUM_STEPS
        assert latest(run_dir).name == f"step-{step:06d}"
        assert steps_done(run_dir) == step
        lines = err.splitlines()
        assert "Traceback" not in err
        assert len(lines) == 3, err
        assert lines[0].startswith(f"dlrm: {number.name}: the run keeps its state after this step")
        told = f"stopped by {number.name} after step {step}, which is kept"
        assert lines[1] == f"dlrm: {told}; go on with:"
        assert result["status"] == f"failed: {told}"
        name, *command = shlex.split(lines[2])
        assert name == "dlrm"
        wanted = step + 10
    capfd.readouterr()
    assert dlrm(*command) == 0
    out = capfd.readouterr().out
    assert f"resume  step {step} of {latest(run_dir).parent / f'step-{step:06d}'}" in out
    assert_ends_as(run_dir, expected)


@pytest.mark.slow
@pytest.mark.processes
def test_f12_a_signal_to_everybody_ends_a_run_in_order(
    runs: Runs, undisturbed: Callable[[int], Path], folder: Path
) -> None:
    """As service managers and batch systems send it: workers first, then the launcher."""
    undisturbed(2)
    run_dir = folder / "everybody"
    process = runs.start("command.py", "train", *RUN, "launch.nproc=2", f"hydra.run.dir={run_dir}")
    await_step(process, run_dir, 10)
    workers = workers_of(process)
    for pid in (*workers.values(), process.pid):
        os.kill(pid, signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert "Traceback" not in err
    step = read_result(run_dir)["stopped"]["step"]
    assert latest(run_dir).name == f"step-{step:06d}"
    assert not any(map(is_alive, workers.values()))


@pytest.mark.smoke
def test_a_second_signal_ends_at_once(
    runs: Runs, undisturbed: Callable[[int], Path], folder: Path
) -> None:
    """Workers that still start can't see the first; nothing is kept, and nobody is left."""
    undisturbed(2)
    run_dir = folder / "twice"
    process = runs.start("command.py", "train", *RUN, "launch.nproc=2", f"hydra.run.dir={run_dir}")
    wait_for(lambda: len(workers_of(process)) == 2, "both workers", 60)
    workers = workers_of(process)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (143, 130), err  # The kernel says which comes first.
    assert "Traceback" not in err
    assert err.startswith("dlrm: SIG")
    assert not any(map(is_alive, workers.values()))
    assert not (run_dir / "checkpoints").exists()
    assert read_result(run_dir)["status"].startswith("failed: ")


# ----------------------------------------------------------------------------- an outer torchrun


def test_torchrun_restarts_a_run_that_goes_on_by_itself(
    runs: Runs, undisturbed: Callable[[int], Path], folder: Path
) -> None:
    """A rank is killed before the first checkpoint: all begin anew. Another one is killed after it:
    all go on from there. One is told to end: all end after the same step, and go on after it."""
    expected = undisturbed(2)
    run_dir = folder / "restarted"
    every = f"train.checkpoint_every={EVERY}"
    command = ("command.py", "train", *RUN, every, f"hydra.run.dir={run_dir}")
    process = runs.start(*TORCHRUN, "--max-restarts=3", *command)
    await_step(process, run_dir, 5)
    first = workers_of(process)
    assert not (run_dir / "checkpoints").exists(), "killed too late"
    os.kill(first[1], signal.SIGKILL)
    await_checkpoint(process, run_dir, EVERY)
    second = workers_of(process)
    assert not set(first.values()) & set(second.values())
    os.kill(second[0], signal.SIGKILL)
    kept = step_kept(run_dir)
    await_checkpoint(process, run_dir, kept + EVERY)
    third = workers_of(process)
    os.kill(third[1], signal.SIGTERM)
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    told = re.findall(
        r"dlrm: stopped by SIGTERM after step (\d+), which is kept; go on with:\n(.*)", err
    )
    assert len(told) == 1, err
    step, how = told[0]
    assert kept + EVERY <= int(step) < NUM_STEPS
    assert how == f"  the same torchrun command and train.resume=latest hydra.run.dir={run_dir}"
    resumed = re.findall(r"resume  step (\d+) of ", out)
    assert resumed == [f"{kept}", step]
    assert not any(map(is_alive, (*first.values(), *second.values(), *third.values())))
    assert_ends_as(run_dir, expected)
