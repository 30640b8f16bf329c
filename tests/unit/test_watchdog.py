"""Time limits don't run while whoever waits is stopped itself; signals of others stop in order."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from dlrm import worker
from dlrm.blame import Evidence, find_failed, find_hanging
from dlrm.heartbeat import Beat, Heartbeat, heartbeat_file
from dlrm.watchdog import Silence
from dlrm.worker import Failure, Stopped, end_file, failure_file, stop_file
from embeddings import socket_engine
from embeddings.awake_clock import AwakeClock
from embeddings.socket_engine import RECEIVE, SocketEngine

TIMEOUT_S = 30.0
POLL_S = 0.2


class Watched:
    """A watchdog's polls of ranks that beat or don't, on a clock of the test's."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._silence = Silence()
        self._last_s = dict.fromkeys(range(2), self.now_s)
        self.waits = ("", "")

    def poll(self, beating: tuple[int, ...] = ()) -> int | None:
        """One poll; returns the rank that is found to hang."""
        self._last_s |= dict.fromkeys(beating, self.now_s - 0.05)
        beats = [Beat(r, r, 3, "forward", self.waits[r], s) for r, s in self._last_s.items()]
        verdict = find_hanging(
            self._silence.adjusted(beats, self.now_s), {0, 1}, self.now_s, TIMEOUT_S
        )
        return None if verdict is None else verdict.beat.rank

    def polls(self, seconds: float, beating: tuple[int, ...] = ()) -> int | None:
        """Polls for a time; returns the first rank that is found to hang."""
        for _ in range(round(seconds / POLL_S)):
            self.now_s += POLL_S
            if (rank := self.poll(beating)) is not None:
                return rank
        return None


def test_f14_a_job_that_was_suspended_hangs_no_more_than_before() -> None:
    """Its ranks have beaten last before the night that it slept through, and take a while."""
    watched = Watched()
    assert watched.polls(5, beating=(0, 1)) is None
    watched.now_s += 40_000
    assert watched.poll() is None
    assert watched.polls(5) is None
    assert watched.polls(5, beating=(0, 1)) is None


def test_f14_a_rank_that_hangs_is_found_also_after_a_suspension() -> None:
    watched = Watched()
    watched.polls(5, beating=(0, 1))
    assert watched.polls(20, beating=(0,)) is None
    watched.now_s += 40_000
    assert watched.polls(8, beating=(0,)) is None
    assert watched.polls(5, beating=(0,)) == 1


def test_f14_who_waits_has_its_extra_also_after_a_suspension() -> None:
    watched = Watched()
    watched.waits = ("rows", "")
    watched.polls(1, beating=(0, 1))
    watched.now_s += 40_000
    assert watched.polls(TIMEOUT_S + 3, beating=(1,)) is None
    assert watched.polls(4, beating=(1,)) == 1, "rank 1 beats, but doesn't come"


def test_f14_only_a_rank_s_own_stop_is_held_against_it() -> None:
    """SIGSTOP to one worker: the others, and the watchdog, go on."""
    watched = Watched()
    watched.polls(5, beating=(0, 1))
    assert watched.polls(TIMEOUT_S + 1, beating=(0,)) == 1


def test_f14_the_clock_counts_a_second_for_any_stop() -> None:
    now_s = 0.0
    clock = AwakeClock(lambda: now_s)
    for step_s, expected in ((0.4, 0.4), (0.0, 0.4), (3600.0, 1.4), (-5.0, 1.4), (0.25, 1.65)):
        now_s += step_s
        assert clock() == pytest.approx(expected)


# ------------------------------------------------------------------------- signals to a worker


@pytest.fixture
def handle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """Has this process handle signals as a worker does; afterwards as before."""
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    saved = {number: signal.getsignal(number) for number in numbers}
    monkeypatch.setattr(worker, "faulthandler", Mock())
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    files = []

    def opened(path: Path, mode: str, encoding: str) -> object:
        files.append(path.open(mode, encoding=encoding))
        return files[-1]

    monkeypatch.setattr(worker, "open", opened, raising=False)
    yield lambda in_order: worker._handle_signals(tmp_path, 0, stops_in_order=in_order)
    for number, handler in saved.items():
        signal.signal(number, handler)
    for file in files:
        file.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_f12_a_worker_s_first_signal_ends_the_run_in_order(
    handle: Callable[[bool], None], tmp_path: Path, number: signal.Signals
) -> None:
    """Whether or not the launcher got it too; a second one ends the worker."""
    handle(True)
    os.kill(os.getpid(), number)
    assert stop_file(tmp_path).read_text() == str(int(number))
    with pytest.raises(Stopped) as caught:
        os.kill(os.getpid(), number)
    assert caught.value.number == number


def test_f12_the_launcher_s_word_does_not_make_a_signal_the_second(
    handle: Callable[[bool], None], tmp_path: Path
) -> None:
    """A batch system's signal comes to the launcher and to the workers in any order."""
    stop_file(tmp_path).write_text("15")
    handle(True)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop_file(tmp_path).read_text() == "15"


def gone() -> int:
    """The number of a process that was there."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return process.pid


@pytest.mark.parametrize("why", ["the launcher says so", "another failed", "another is gone"])
def test_f12_the_launcher_s_own_signal_ends_a_worker_at_once(
    handle: Callable[[bool], None], tmp_path: Path, why: str
) -> None:
    if why == "the launcher says so":
        end_file(tmp_path).touch()
    elif why == "another failed":
        failure_file(tmp_path, 1).touch()
    else:
        heartbeat = Heartbeat(heartbeat_file(tmp_path, 1))
        heartbeat._pid = gone()
        heartbeat.beat(3, "forward")
    handle(True)
    with pytest.raises(Stopped):
        os.kill(os.getpid(), signal.SIGTERM)
    assert not stop_file(tmp_path).exists()


def test_f12_a_rank_that_is_done_is_no_reason_to_end(
    handle: Callable[[bool], None], tmp_path: Path
) -> None:
    heartbeat = Heartbeat(heartbeat_file(tmp_path, 1))
    heartbeat._pid = gone()
    heartbeat.finished()
    handle(True)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop_file(tmp_path).exists()


def test_f12_what_keeps_no_state_ends_at_once(handle: Callable[[bool], None]) -> None:
    handle(False)
    with pytest.raises(Stopped):
        os.kill(os.getpid(), signal.SIGHUP)


def test_f12_ignored_signals_stay_ignored(handle: Callable[[bool], None]) -> None:
    """As SIGHUP is under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    handle(False)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


@pytest.mark.parametrize(
    ("told", "statuses", "number"),
    [
        ([Failure(1, "stopped", 1.0, "told to end", "", signal=1)], {1: 1, 0: 1}, signal.SIGHUP),
        ([], {1: -15, 0: 1}, signal.SIGTERM),
        ([], {1: -9, 0: 1}, 0),
    ],
)
def test_f12_an_end_by_a_signal_has_its_number(
    told: list[Failure], statuses: dict[int, int], number: int
) -> None:
    """The exit status is to be 128 + its number; SIGKILL is a failure: the kernel's, mostly."""
    beats = [Beat(rank, rank, 3, "forward", "", 0.5) for rank in range(2)]
    lost = Failure(0, "secondary", 2.0, "lost", "")
    verdict = find_failed(Evidence(beats, [*told, lost], statuses), TIMEOUT_S)
    assert verdict is not None
    assert (verdict.beat.rank, verdict.signal) == (1, number)


def test_f14_a_wait_in_a_transport_outlasts_a_suspension(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 was suspended with this one, and sends only when it has woken up, too."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        far = socket.create_connection(listener.getsockname())
        near, _ = listener.accept()
    times = iter([0.0, 0.4, 5000.0, 5000.4])

    def now_s() -> float:
        found = next(times, 5000.5)
        if found == 5000.5:
            far.sendall(header.tobytes() + b"12345678")
        return found

    monkeypatch.setattr(socket_engine, "AwakeClock", lambda: AwakeClock(now_s))
    monkeypatch.setattr(socket_engine, "LOOK_S", 0.001)
    header = torch.tensor([0, 8]).numpy()
    engine = SocketEngine([near], timeout_s=30.0)
    try:
        received = torch.zeros(8, dtype=torch.uint8)
        message = engine.post(RECEIVE, 0, received)
        engine.start()
        engine.wait([message])
    finally:
        engine.close()
        far.close()
    assert bytes(received.tolist()) == b"12345678"
