"""Workers are started, watched and ended: real processes, and no failure goes without its rank."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.errors import UserError
from dlrm.blame import WorkersFailed
from dlrm.config import LaunchConfig
from dlrm.launch import launch
from tests.dist import entries

CHECKOUT = Path(__file__).parents[2]
TIMEOUT_S = 3.0

# Nothing here may hang the suite: pytest-timeout interrupts the launcher, which ends its workers.
pytestmark = pytest.mark.timeout(90)

# A launcher in a process of its own, as the command is one. Shells start what runs in the
# background with SIGINT ignored, which would stay so: these tests may be run there, too.
LAUNCHER = """
import signal
import sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)
from dlrm.config import LaunchConfig
from dlrm.launch import launch
from tests.dist import entries
entry, args = getattr(entries, sys.argv[1]), eval(sys.argv[2])
try:
    print(launch(entry, args, LaunchConfig(nproc=2), Path("nowhere")))
except KeyboardInterrupt:
    sys.exit(130)
"""


READY = "from dlrm.streams import ready_streams\nready_streams()\n"


def start_launcher(folder: Path, entry: str, *args: Any) -> subprocess.Popen[str]:
    """Starts `LAUNCHER`; what it leaves when it is killed goes with `folder`."""
    return start_python("-c", LAUNCHER, entry, repr(args), TMPDIR=str(folder))


def start_python(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Starts Python in the checkout."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=CHECKOUT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """(exit status, stdout, stderr)."""
    with process:
        try:
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    return process.returncode, out, err


def wait_for(condition: Callable[[], bool], what: str, limit_s: float = 90.0) -> None:
    """Waits until something holds."""
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until, f"not within {limit_s} s: {what}"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody reaps doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def pids_in(folder: Path) -> list[int]:
    """The process numbers that `entries.three_steps` wrote."""
    return [int(path.read_text() or 0) for path in folder.glob("[0-9]")]


@pytest.fixture
def pids(tmp_path: Path) -> Path:
    """Folder for the process numbers of workers."""
    (tmp_path / "pids").mkdir()
    return tmp_path / "pids"


@pytest.fixture
def fail(tmp_path: Path, pids: Path, forked: None) -> Callable[..., str]:
    """Runs `entries.three_steps`, which must fail; returns the message. No process is left."""

    def run(how: str, who: int, error: type[Exception] = WorkersFailed) -> str:
        config = LaunchConfig(nproc=2, timeout_s=TIMEOUT_S)
        start_s = time.monotonic()
        with pytest.raises(error) as caught:
            launch(entries.three_steps, (how, who, str(pids)), config, tmp_path)
        # Starting takes a while, too, on a busy machine.
        assert time.monotonic() - start_s < TIMEOUT_S + 15 + 15
        assert len(pids_in(pids)) == 2
        assert not any(map(is_alive, pids_in(pids)))
        return str(caught.value)

    return run


# ------------------------------------------------------------------------------- a run that works


@pytest.mark.smoke
def test_rank_0_returns_its_value(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    environment = dict(os.environ)
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    found = launch(entries.describe, ({"a": [1]},), LaunchConfig(nproc=2, num_threads=3), tmp_path)
    assert (found["rank"], found["world_size"], found["local_rank"]) == (0, 2, 0)
    assert found["sum"] == 1  # The ranks of both met in an all-reduce.
    assert found["extra"] == {"a": [1]}
    assert found["num_threads"] == 3
    assert found["environment"]["OMP_NUM_THREADS"] == "3"
    assert found["environment"]["OMP_WAIT_POLICY"] == "PASSIVE"
    # The launcher is as it was, has said nothing, and has left nothing.
    assert dict(os.environ) == environment
    after = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert after == handlers
    assert capfd.readouterr() == ("", "")
    assert not list(tmp_path.iterdir())
    assert not is_alive(found["pid"])


def test_what_the_user_set_reaches_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    found = launch(entries.describe, (None,), LaunchConfig(nproc=1), tmp_path)
    assert found["world_size"] == 1
    assert found["environment"]["OMP_WAIT_POLICY"] == "ACTIVE"
    assert found["environment"]["MALLOC_MMAP_THRESHOLD_"] == "65536"


def test_warnings_come_once_and_output_passes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], forked: None
) -> None:
    launch(entries.warn, (), LaunchConfig(nproc=2), tmp_path)
    out, err = capfd.readouterr()
    assert err == "dlrm: warning: train.nothing is ignored\n"
    assert sorted(out.splitlines()) == ["rank 0 here", "rank 1 here"]


def test_a_long_phase_that_beats_is_no_hang(tmp_path: Path, forked: None) -> None:
    config = LaunchConfig(nproc=2, timeout_s=2.0)
    assert launch(entries.beat_slowly, (3.5,), config, tmp_path) > 1


def test_two_runs_at_once_beside_a_taken_port(tmp_path: Path) -> None:
    with socket.socket() as taken:
        with contextlib.suppress(OSError):  # Taken by somebody else: as good.
            taken.bind(("", 29500))
            taken.listen()
        runs = [start_launcher(tmp_path, "describe", number) for number in (1, 2)]
        ends = [finish(run) for run in runs]
    ports = set()
    for number, (status, out, err) in zip((1, 2), ends, strict=True):
        assert (status, err) == (0, "")
        found = eval(out)
        assert (found["sum"], found["extra"]) == (1, number)
        ports.add(found["environment"]["MASTER_PORT"])
    assert len(ports - {"29500"}) == 2


# ------------------------------------------------------------------------------ a run that fails


def test_an_exception_is_told_with_its_whole_traceback(
    fail: Callable[..., str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    message = fail("raise", 1)
    assert message.startswith("rank 1 of 2 (step 3, phase backward) failed: ArithmeticError: rows")
    assert message.count("Traceback (most recent call last)") == 1
    assert "entries.py" in message
    assert "in misbehave" in message
    assert "PeerLost" not in message  # The victim isn't told of…
    assert capfd.readouterr() == ("", "")
    kept = (tmp_path / "failures.txt").read_text()
    assert "rank 0: step 3" in kept  # … but is there for those who look closer.


@pytest.mark.parametrize(
    ("how", "who", "reason"),
    [
        ("exit 3", 1, "ended with exit status 3"),
        ("exit 0", 1, "ended with exit status 0 before its work was done"),
        ("SIGKILL", 0, "was killed by SIGKILL"),
    ],
)
def test_an_end_names_its_rank(fail: Callable[..., str], how: str, who: int, reason: str) -> None:
    assert fail(how, who).startswith(f"rank {who} of 2 (step 3, phase backward) {reason}")


# Rank 1 hangs while rank 0 waits; rank 1 hangs and can't even be told to end; both hang in Python,
# so that only the launcher can notice.
@pytest.mark.parametrize(("how", "who"), [("sleep", 1), ("SIGSTOP", 1), ("sleep", -1)])
def test_a_hang_names_its_rank_and_ends(fail: Callable[..., str], how: str, who: int) -> None:
    message = fail(how, who)
    rank = 1 if who == 1 else int(message.split()[1])
    assert message.startswith(f"rank {rank} of 2 (step 3, phase backward) ")
    # Either it was silent for all that time, or rank 0 had begun to wait some time before.
    assert "gave no sign of life for" in message or "didn't answer rank 0" in message
    if how == "sleep":
        assert "in misbehave" in message.split(f"where rank {rank} was:")[1]


def test_a_rank_that_left_early_is_blamed(tmp_path: Path, forked: None) -> None:
    with pytest.raises(WorkersFailed, match=r"rank 1 of 2 .* had finished, yet rank 0 waited"):
        launch(entries.leave, (), LaunchConfig(nproc=2), tmp_path)


def test_a_mistake_that_all_ranks_meet_is_told_once(
    fail: Callable[..., str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert fail("user error", -1, UserError) == "data.root=nowhere: no such folder"
    assert capfd.readouterr() == ("", "")
    assert not (tmp_path / "failures.txt").exists()


@pytest.mark.processes
@pytest.mark.parametrize("rank", [0, 1])
def test_f12_a_signal_to_one_worker_ends_the_run_in_order(
    tmp_path: Path, pids: Path, rank: int, forked: None
) -> None:
    """All ranks stop after the same step, and the launcher is told nothing of a failure."""
    config = LaunchConfig(nproc=2, timeout_s=30.0)
    args = (str(pids), rank, "SIGTERM")
    found = launch(entries.step_until_told, args, config, tmp_path, stops_in_order=True)
    assert found == signal.SIGTERM
    assert not any(map(is_alive, pids_in(pids)))


@pytest.mark.processes
def test_f12_a_signal_to_a_worker_of_what_keeps_no_state_is_the_exit_status(
    tmp_path: Path, pids: Path, forked: None, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        launch(entries.three_steps, ("SIGTERM", 1, str(pids)), LaunchConfig(nproc=2), tmp_path)
    assert caught.value.code == 128 + signal.SIGTERM
    err = capfd.readouterr().err
    assert err == (
        "dlrm: rank 1 of 2 (step 3, phase backward) was ended by a signal from elsewhere\n"
    )


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_f31_a_run_on_one_host_listens_on_loopback_only(tmp_path: Path, forked: None) -> None:
    found = launch(entries.open_ports, (), LaunchConfig(nproc=2), tmp_path)
    assert found, "the launcher has a store, at least"
    assert set(found) == {"0100007F"}, "127.0.0.1"


@pytest.mark.processes
def test_f20_neither_launcher_nor_ranks_need_semaphores(
    tmp_path: Path, forked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lie in /dev/shm, which may be full, tiny or read-only; memory that is shared doesn't."""
    monkeypatch.setattr("_multiprocessing.SemLock", entries.no_semaphore)
    found = launch(entries.without_semaphores, (), LaunchConfig(nproc=2), tmp_path)
    assert found == ["shared memory", "sockets", "gloo"]


@pytest.mark.slow
@pytest.mark.processes
def test_f34_ranks_go_on_when_nobody_reads_what_they_print(tmp_path: Path) -> None:
    """`dlrm train launch.nproc=2 | head -1`, at a terminal that knows ASCII only."""
    code = LAUNCHER.replace("import signal\n", "import signal\n" + READY, 1)
    more = {"TMPDIR": str(tmp_path), "PYTHONIOENCODING": "ascii"}
    launcher = start_python("-c", code, "print_to_nobody", "()", **more)
    assert launcher.stdout is not None
    assert launcher.stderr is not None
    with launcher:
        assert "\\u2026 here" in launcher.stdout.readline()
        launcher.stdout.close()
        assert launcher.stderr.read() == ""
        assert launcher.wait(timeout=60) == 0


@pytest.mark.slow
@pytest.mark.processes
def test_f14_a_suspended_run_goes_on(pids: Path) -> None:
    """Launcher and workers are stopped for longer than `launch.timeout_s`; then the run ends as if
    nothing had been."""
    code = LAUNCHER.replace("LaunchConfig(nproc=2)", "LaunchConfig(nproc=2, timeout_s=4.0)")
    code = code.replace('Path("nowhere")', 'Path("nowhere"), stops_in_order=True')
    args = repr((str(pids), -1, ""))
    launcher = start_python("-c", code, "step_until_told", args, TMPDIR=str(pids.parent))
    try:
        wait_for(lambda: len(pids_in(pids)) == 2, "both workers at work")
        everybody = [launcher.pid, *pids_in(pids)]
        for pid in everybody:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(6.0)  # What is tested is that time goes by.
        for pid in everybody:
            os.kill(pid, signal.SIGCONT)
        time.sleep(1.0)  # The watchdog has looked several times.
        assert all(map(is_alive, everybody))
        launcher.send_signal(signal.SIGTERM)
        status, out, err = finish(launcher)
    finally:
        launcher.kill()
    assert (status, out) == (0, "15\n"), err


def test_a_missing_file_stays_an_os_error(fail: Callable[..., str]) -> None:
    assert "/nowhere/at-all" in fail("no file", 1, FileNotFoundError)


# --------------------------------------------------------------------- the launcher itself ends


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, 128 + signal.SIGTERM),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_no_worker_outlives_its_launcher(pids: Path, number: signal.Signals, status: int) -> None:
    launcher = start_launcher(pids.parent, "three_steps", "sleep", -1, str(pids))
    try:
        wait_for(lambda: len(pids_in(pids)) == 2, "both workers at work")
        workers = pids_in(pids)
        launcher.send_signal(number)
        found, _, err = finish(launcher)
    finally:
        launcher.kill()
    assert (found, err) == (status, "")
    wait_for(lambda: not any(map(is_alive, workers)), "the end of the workers", 10.0)


# ----------------------------------------------------------------------------- an outer torchrun

JOINED = """
import sys
from dlrm.config import LaunchConfig
from dlrm.launch import join
from tests.dist import entries
found = join(getattr(entries, sys.argv[1]), eval(sys.argv[2]), LaunchConfig(timeout_s=3.0))
sys.stdout.write(f"{found['rank']} {found['world_size']} {found['sum']}\\n")
"""


def torchrun(tmp_path: Path, entry: str, *args: Any) -> tuple[int, str, str]:
    """Runs `JOINED` as two ranks."""
    script = tmp_path / "joined.py"
    script.write_text(JOINED)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    environment = {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
    return finish(start_python(*launcher, str(script), entry, repr(args), **environment))


def test_ranks_of_torchrun_join(tmp_path: Path) -> None:
    status, out, err = torchrun(tmp_path, "describe", None)
    assert status == 0, err
    assert sorted(out.splitlines()) == ["0 2 1", "1 2 1"]


def test_a_rank_of_torchrun_that_hangs_tells_so_itself(tmp_path: Path, pids: Path) -> None:
    status, _, err = torchrun(tmp_path, "three_steps", "sleep", 1, str(pids))
    assert status == 1
    assert "dlrm: rank 1 of 2 (step 3, phase backward) gave no sign of life for 3 s" in err
    assert "in misbehave" in err
    assert not any(map(is_alive, pids_in(pids)))
