"""Signs of life are read as they were written, also from a rank that is just writing or dead."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dlrm.heartbeat import (
    NO_STEP,
    START,
    Beat,
    Heartbeat,
    NoHeartbeat,
    Work,
    heartbeat_file,
    read_heartbeats,
    still_working,
)


def read(folder: Path) -> Beat:
    """The only rank's beat."""
    (beat,) = read_heartbeats(folder)
    return beat


def test_the_last_beat_is_read(tmp_path: Path) -> None:
    heartbeat = Heartbeat(heartbeat_file(tmp_path, 0))
    first = read(tmp_path)
    assert (first.rank, first.pid, first.step, first.phase) == (0, os.getpid(), NO_STEP, START)
    assert "before the first step" in first.place
    heartbeat.beat(1234, "forward")
    heartbeat.waiting("all_to_all of ids")
    beat = read(tmp_path)
    assert beat.place == "step 1,234, phase forward, waiting in all_to_all of ids"
    assert beat.time_s >= first.time_s
    heartbeat.waiting(None)
    assert read(tmp_path).waits_for == ""
    heartbeat.waiting("rows")
    heartbeat.beat(1234, "apply")
    assert (read(tmp_path).waits_for, read(tmp_path).is_finished) == ("", False)
    heartbeat.finished()
    assert (read(tmp_path).step, read(tmp_path).is_finished) == (1234, True)


def test_f17_work_renews_the_last_beat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A phase of any length that computes is alive, at the place that it told last."""
    monkeypatch.setattr("dlrm.heartbeat._KEEP_BEATING_S", 0.005)
    heartbeat = Heartbeat(heartbeat_file(tmp_path, 0))
    heartbeat.beat(7, "load")
    told_s = read(tmp_path).time_s
    until_s = time.monotonic() + 30
    with still_working(heartbeat):
        while (beat := read(tmp_path)).time_s == told_s:
            assert time.monotonic() < until_s, "it works and isn't seen to"
    assert (beat.step, beat.phase) == (7, "load")


@pytest.mark.parametrize(
    ("after", "is_work"),
    [
        (Work(1.0, 0.5, 0), True),
        (Work(1.0, 0.02, 0), True),
        (Work(1.0, 0.0, 1 << 20), True),
        (Work(1.0, 0.001, 500), False),
        (Work(0.0, 0.0, 0), False),
    ],
    ids=["computes", "now and then", "reads", "hangs", "no time at all"],
)
def test_f17_what_hangs_does_no_work(after: Work, is_work: bool) -> None:
    """Asking takes a little of both."""
    assert after.is_more_than(Work(0.0, 0.0, 0)) == is_work


def test_f17_reading_and_computing_are_noticed(tmp_path: Path) -> None:
    before = Work.so_far()
    (tmp_path / "file").write_bytes(bytes(100_000))
    now = Work.so_far()
    assert now.cpu_s > before.cpu_s
    if now.io_bytes:  # Else the kernel doesn't tell.
        assert now.io_bytes - before.io_bytes >= 100_000
    assert now.is_more_than(before)


def test_f17_who_waits_for_others_does_not_count_as_working(tmp_path: Path) -> None:
    """Threads of its own may work meanwhile; the others are to be blamed all the same."""
    heartbeat = Heartbeat(heartbeat_file(tmp_path, 0))
    heartbeat.waiting("objects")
    before = read(tmp_path)
    heartbeat.renew()
    assert read(tmp_path) == before
    heartbeat.waiting(None)
    heartbeat.renew()
    assert read(tmp_path).time_s > before.time_s


def test_f17_nobody_watches_one_process() -> None:
    before = threading.active_count()
    with still_working(NoHeartbeat()):
        assert threading.active_count() == before


def test_ranks_come_in_order(tmp_path: Path) -> None:
    hearts = [Heartbeat(heartbeat_file(tmp_path, rank)) for rank in range(12)]
    for rank, heartbeat in enumerate(hearts):
        heartbeat.beat(rank * 7, "plan")
    heartbeat_file(tmp_path, 12).write_bytes(b"")  # Opened, and nothing in it yet.
    assert [(b.rank, b.step) for b in read_heartbeats(tmp_path)] == [
        (rank, rank * 7) for rank in range(12)
    ]


def test_long_names_are_cut(tmp_path: Path) -> None:
    heartbeat = Heartbeat(heartbeat_file(tmp_path, 0))
    heartbeat.beat(1, "phase" * 20)
    heartbeat.waiting("é" * 99)
    assert read(tmp_path).phase == ("phase" * 20)[:32]
    assert read(tmp_path).waits_for == "é" * 32


def test_no_torn_beat_is_read(tmp_path: Path) -> None:
    heartbeat = Heartbeat(heartbeat_file(tmp_path, 0))
    heartbeat.beat(0, "0")
    done = threading.Event()

    def write() -> None:
        step = 0
        while not done.is_set():
            step += 1
            heartbeat.beat(step, str(step))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        beats = [read(tmp_path) for _ in range(500)]
    finally:
        done.set()
        writer.join()
    assert all(beat.phase == str(beat.step) for beat in beats)
    assert [b.step for b in beats] == sorted(b.step for b in beats)


def test_the_beat_of_a_killed_process_stays(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from dlrm.heartbeat import Heartbeat\n"
        "Heartbeat(Path(sys.argv[1])).beat(41, 'apply'); os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", script, str(heartbeat_file(tmp_path, 3))]
    assert subprocess.run(command, cwd=Path(__file__).parents[2], timeout=60).returncode == -9
    beat = read(tmp_path)
    assert (beat.rank, beat.step, beat.phase) == (3, 41, "apply")
