"""Side outputs never end or hang a run: event files, metrics, the report, the profile, on a disk
that is full."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from dlrm.display import TrainDisplay
from dlrm.event_file import EventFile
from dlrm.recorder import Recorder
from dlrm.run_folder import RunFolder
from tests.commands import dlrm, read_json, read_metrics, read_result, tiny
from tests.failing_files import fail_at


def events_of(folder: Path) -> list[Event]:
    """Every event of a folder's files, in the order that TensorBoard reads them."""
    found = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            found.append(Event.FromString(data[12 : 12 + size]))
            data = data[16 + size :]
    return found


def record_steps(recorder: Recorder, first: int, stop: int) -> None:
    for step in range(first, stop):
        recorder.step(step, 0, 4, 0.5, 0.01, (0.1, 0.2))


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def recorder_of(folder: RunFolder) -> Recorder:
    return Recorder(folder, TrainDisplay(9, enabled=False), log_every=1)


def test_f11_a_full_disk_silences_the_events_with_one_warning(folder: RunFolder) -> None:
    """The writer of old died in its thread, and the tenth line waited for it for ever."""
    with fail_at(2, within=folder.path / "tensorboard", stays=True) as calls:
        recorder = recorder_of(folder)
        with pytest.warns(UserWarning, match="No space left on device.*TensorBoard") as warned:
            record_steps(recorder, 1, 100)
        recorder.close()
    assert len(warned) == 1
    assert "tensorboard/events.out" in str(warned[0].message)
    assert len(calls.failed) <= 2  # Closing tries what is left once more.
    assert [line["step"] for line in read_metrics(folder.path)] == [*range(1, 100)]


def test_f11_metrics_go_on_once_there_is_room_and_no_line_is_cut(folder: RunFolder) -> None:
    recorder = recorder_of(folder)
    record_steps(recorder, 1, 3)
    with (
        fail_at(0, within=folder.path / "metrics.jsonl", operations=("write",), stays=True),
        pytest.warns(UserWarning, match=r"metrics.jsonl: No space left") as warned,
    ):
        record_steps(recorder, 3, 6)
    record_steps(recorder, 6, 8)
    recorder.close()
    assert len(warned) == 1
    assert [line["step"] for line in read_metrics(folder.path)] == [1, 2, 6, 7]
    assert recorder.figures(1.0)["steps"] == 7


def test_f11_a_folder_that_can_t_be_made_is_told_once(folder: RunFolder) -> None:
    (folder.path / "tensorboard").write_text("a file")
    recorder = recorder_of(folder)
    with pytest.warns(UserWarning, match="tensorboard: File exists") as warned:
        record_steps(recorder, 1, 9)
    recorder.close()
    assert len(warned) == 1


def test_f11_f20_events_need_no_thread_and_no_semaphore(folder: RunFolder) -> None:
    """Where /dev/shm is read-only or full, a semaphore can't be made."""
    refused = OSError(errno.EROFS, "Read-only file system")
    threads = threading.active_count()
    with patch("_multiprocessing.SemLock", side_effect=refused):
        recorder = recorder_of(folder)
        record_steps(recorder, 1, 4)
        assert threading.active_count() == threads
        recorder.close()
    events = events_of(folder.path / "tensorboard")
    losses = [(e.step, v.simple_value) for e in events for v in e.summary.value if "loss" in v.tag]
    assert losses == [(1, 0.5), (2, 0.5), (3, 0.5)]


def test_f35_a_resumed_run_has_a_reader_forget_later_steps(folder: RunFolder) -> None:
    """Steps after the checkpoint were written before the kill, and are written again."""
    recorder_of_the_killed = recorder_of(folder)
    record_steps(recorder_of_the_killed, 1, 5)
    recorder_of_the_killed.close()
    recorder = recorder_of(folder)
    recorder.resume(3, 12, 0.5, [])
    with patch("time.time", return_value=4e9):  # Its file comes after the first.
        record_steps(recorder, 4, 6)
    recorder.close()
    restarts = [
        (event.session_log.status, event.step)
        for event in events_of(folder.path / "tensorboard")
        if event.HasField("session_log")
    ]
    assert restarts == [(SessionLog.START, 4)]


def test_events_say_their_version_first(tmp_path: Path) -> None:
    events = EventFile(tmp_path / "events")
    events.add({"a": 1.0, "b": 2.5}, 7)
    events.close()
    first, second = events_of(tmp_path / "events")
    assert first.file_version == "brain.Event:2"
    assert [(v.tag, v.simple_value) for v in second.summary.value] == [("a", 1.0), ("b", 2.5)]
    assert second.step == 7


# ---------------------------------------------------------------------------------- whole runs


@pytest.fixture
def arguments(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    monkeypatch.chdir(tmp_path)
    return ["train", *tiny(tmp_path_factory), "train.log_every=2", "hydra.run.dir=run"]


def no_room(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "run/report.html")


def test_f30_a_run_without_room_for_its_report_is_complete(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlrm.report.write_report", no_room)
    with pytest.warns(UserWarning, match=r"report.html: No space left on device; there is no rep"):
        assert dlrm(*arguments) == 0
    assert read_result(tmp_path / "run")["status"] == "completed"


def test_f30_a_report_that_fails_hides_no_error(
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Two tracebacks were printed, of which the second hid what had happened."""
    monkeypatch.setattr("dlrm.report.write_report", no_room)
    with (
        fail_at(0, within=tmp_path / "run" / "checkpoints", operations=("open",), stays=True),
        pytest.warns(UserWarning, match="there is no report"),
    ):
        assert dlrm(*arguments) == 1
    err = capfd.readouterr().err
    assert "Traceback" not in err
    (line,) = [line for line in err.splitlines() if line.startswith("dlrm: ")]
    assert "checkpoints" in line
    assert "No space left on device" in line
    assert "hydra.run.dir=" in line
    status = read_json(tmp_path / "run" / "result.json")["status"]
    assert "No space left on device" in status
