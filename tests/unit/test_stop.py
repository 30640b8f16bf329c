"""A first signal is a request, a second one ends the process; what was there before comes back."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dlrm.stop import SIGNALS, RunStopped, StopRequest, announce, stop_on_signal
from tests.commands import dlrm


@pytest.fixture(autouse=True)
def handlers() -> Iterator[Callable[[], list[Any]]]:
    """Python's own handlers, wherever the tests are run: shells start what runs in the background
    with SIGINT ignored. Afterwards they are as they were."""
    saved = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    yield lambda: [signal.getsignal(number) for number in SIGNALS]
    for number, handler in saved.items():
        signal.signal(number, handler)


def send(number: signal.Signals) -> None:
    """To this process; Python's handler has run when it returns."""
    signal.raise_signal(number)


# --------------------------------------------------------------------------------- signals


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_told_and_nothing_ends(
    number: signal.Signals, handlers: Callable[[], list[Any]]
) -> None:
    before, told = handlers(), []
    with stop_on_signal(told.append):
        assert handlers() != before
        send(number)
    assert told == [number]
    assert handlers() == before


@pytest.mark.parametrize(
    ("first", "second", "error", "status"),
    [
        (signal.SIGTERM, signal.SIGINT, KeyboardInterrupt, None),
        (signal.SIGINT, signal.SIGTERM, SystemExit, 143),
        (signal.SIGTERM, signal.SIGHUP, SystemExit, 129),
        (signal.SIGINT, signal.SIGINT, KeyboardInterrupt, None),
    ],
)
def test_the_second_signal_ends_at_once(
    first: signal.Signals,
    second: signal.Signals,
    error: type[BaseException],
    status: int | None,
    handlers: Callable[[], list[Any]],
) -> None:
    """By an exception, so that what is open is closed; of whichever kind the two are."""
    before, told = handlers(), []

    def run() -> None:
        with stop_on_signal(told.append):
            send(first)
            assert told == [first]
            send(second)

    with pytest.raises(error) as caught:
        run()
    assert told == [first]
    assert getattr(caught.value, "code", None) == status
    assert handlers() == before


def test_whoever_starts_others_sees_to_further_signals_itself() -> None:
    told: list[tuple[str, int]] = []
    with stop_on_signal(
        lambda number: told.append(("first", number)), lambda number: told.append(("more", number))
    ):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            send(number)
    assert told == [("first", 15), ("more", 2), ("more", 15)]


def test_signals_that_are_ignored_stay_so(handlers: Callable[[], list[Any]]) -> None:
    """SIGHUP under nohup, SIGINT of what a shell runs in the background."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    before, told = handlers(), []
    with stop_on_signal(told.append):
        send(signal.SIGHUP)
        send(signal.SIGINT)
        send(signal.SIGTERM)
    assert told == [signal.SIGTERM]
    assert handlers() == before


def test_handlers_come_back_after_an_error(handlers: Callable[[], list[Any]]) -> None:
    before = handlers()
    with pytest.raises(ArithmeticError), stop_on_signal(lambda number: None):
        raise ArithmeticError
    assert handlers() == before


def test_other_threads_change_nothing(handlers: Callable[[], list[Any]]) -> None:
    """Python lets the main thread alone set handlers."""
    before, found = handlers(), []

    def work() -> None:
        with stop_on_signal(lambda number: None):
            found.append(handlers())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert found == [before]


# --------------------------------------------------------------------------------- requests


def test_a_request_comes_by_a_signal_or_by_a_file(tmp_path: Path) -> None:
    by_signal = StopRequest()
    assert (by_signal.asked(), by_signal.number) == (False, 0)
    by_signal.number = signal.SIGINT
    assert by_signal.asked()
    file = tmp_path / "stop"
    by_file = StopRequest(file)
    assert not by_file.asked()
    file.write_text("")  # The launcher has opened it but not written yet.
    assert not by_file.asked()
    file.write_text("15")
    assert (by_file.asked(), by_file.number) == (True, 15)
    file.unlink()
    assert by_file.asked(), "a request isn't taken back"


def test_what_happens_is_told_to_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    announce(signal.SIGINT)
    out, err = capfd.readouterr()
    assert out == ""
    assert err == (
        "dlrm: SIGINT: the run keeps its state after this step and ends; once more ends it at "
        "once\n"
    )


def test_a_terminal_that_is_gone_is_no_error(capfd: pytest.CaptureFixture[str]) -> None:
    """As it is after SIGHUP: the run must be kept all the same."""
    reader, writer = os.pipe()
    saved = os.dup(2)
    os.dup2(writer, 2)
    os.close(reader)
    os.close(writer)
    try:
        with pytest.raises(BrokenPipeError):
            os.write(2, b"anything")
        announce(signal.SIGHUP)
    finally:
        os.dup2(saved, 2)
        os.close(saved)


# --------------------------------------------------------------------- what the command tells


@pytest.mark.parametrize(
    ("arguments", "environment", "told"),
    [
        (
            ["seed=3", "++train.resume=best", "hydra.run.dir=given"],
            {},
            "  dlrm train seed=3 train.resume=latest hydra.run.dir={}\n",
        ),
        (
            ["model.top_mlp=[8, 1]", "train.overwrite=true"],
            {},
            "  dlrm train 'model.top_mlp=[8, 1]' train.resume=latest hydra.run.dir={}\n",
        ),
        (
            ["seed=3", "hydra.run.dir=given"],
            {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
             "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            "  the same torchrun command and train.resume=latest hydra.run.dir={}\n",
        ),
        (
            ["-m", "seed=3,4", "hydra.sweep.dir=sweep"],
            {},
            "  the job's overrides and train.resume=latest hydra.run.dir={}\n",
        ),
    ],
)  # fmt: skip
def test_a_stopped_run_tells_how_it_goes_on(
    arguments: list[str],
    environment: dict[str, str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The exit status is that of the signal; a sweep ends with its job."""
    jobs = []

    def stopped(*args: Any, **more: Any) -> None:
        jobs.append(args)
        raise RunStopped(1234, signal.SIGTERM, tmp_path / "run")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dlrm.train.run_train", stopped)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert dlrm("train", *arguments) == 143
    err = capfd.readouterr().err
    assert "dlrm: stopped by SIGTERM after step 1,234, which is kept; go on with:\n" in err
    assert told.format(tmp_path / "run") in err
    assert "Traceback" not in err
    assert len(jobs) == 1
