"""The displays: greppable lines, a block that fits the terminal, and no harm to the run."""

from __future__ import annotations

import inspect
import io
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from data.prepare import ProgressListener
from dlrm.display import PrepareDisplay, TrainDisplay

ROOT = Path(__file__).parents[2]
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def console(clock: Clock, *, terminal: bool, width: int = 80) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    made = Console(
        file=file,
        force_terminal=terminal,
        force_interactive=terminal,
        width=width,
        color_system=None,
        get_time=clock,
        _environ={},
    )
    return made, file


def last_frame(output: str, first_word: str) -> list[str]:
    """The block that stays on the screen at the end."""
    text = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", output.replace("\r", ""))
    return text[text.rindex(first_word) :].rstrip("\n").split("\n")


def step_line(step: int, **changes: Any) -> dict[str, Any]:
    line = {
        "step": step,
        "samples": step * 2048,
        "loss": 0.4812,
        "samples_per_s": 61_240.4,
        "data_wait_ms": 0.13,
        "step_ms": 33.0,
    }
    return line | changes


def eval_line(step: int, auc: float | None = 0.7812) -> dict[str, Any]:
    figures = {"split": "valid", "auc": auc, "logloss": 0.4512, "ne": 0.8911}
    return {"step": step, "eval": figures | {"calibration": 1.0021, "num_samples": 1000}}


def train(display: TrainDisplay, clock: Clock, first_step: int, last_step: int) -> None:
    for step in range(first_step, last_step + 1):
        clock.now_s += 0.1
        display.advance(step)
        if step % 100 == 0:
            display.log(step_line(step))


def test_plain_lines_are_greppable() -> None:
    clock = Clock()
    target, file = console(clock, terminal=False, width=40)
    with TrainDisplay(1000, console=target, get_time=clock) as display:
        train(display, clock, 1, 100)
        display.log(eval_line(100))
        train(display, clock, 101, 200)
        display.status("evaluate")
        display.message("[checkpoint] checkpoints/step_200")
    # Narrower than the lines: they must not be broken, and brackets are no markup.
    assert file.getvalue().splitlines() == [
        "step 100/1000  loss 0.4812  samples/s 61,240  auc -  wait 0.4%  left 1:30",
        "step 100/1000  valid auc 0.7812  logloss 0.4512  ne 0.8911  calibration 1.002",
        "step 200/1000  loss 0.4812  samples/s 61,240  auc 0.7812  wait 0.4%  left 1:20",
        "[checkpoint] checkpoints/step_200",
    ]
    assert "\x1b" not in file.getvalue()


def test_unknown_figures_are_shown_as_such() -> None:
    clock = Clock()
    target, file = console(clock, terminal=False)
    with TrainDisplay(None, console=target, get_time=clock) as display:
        display.log({"step": 5})
        display.log(eval_line(5, auc=None))
        display.log(step_line(10, loss=float("nan"), step_ms=0.0))
    assert file.getvalue().splitlines() == [
        "step 5  loss -  samples/s -  auc -  wait -",
        "step 5  valid auc -  logloss 0.4512  ne 0.8911  calibration 1.002",
        "step 10  loss nan  samples/s 61,240  auc -  wait -",
    ]


@pytest.mark.parametrize("width", [80, 100, 200])
def test_live_block_fits_and_tells_all(width: int) -> None:
    clock = Clock()
    target, file = console(clock, terminal=True, width=width)
    with TrainDisplay(1000, console=target, get_time=clock) as display:
        train(display, clock, 1, 300)
        display.log(eval_line(300))
        train(display, clock, 301, 600)
    bar, names, values = last_frame(file.getvalue(), "train ")
    assert all(len(row) <= min(width, 100) for row in (bar, names, values))
    assert re.fullmatch(r"train +━+ +600/1,000 +60%", bar.rstrip())
    assert re.split(r" {2,}", names.strip()) == [
        "loss",
        "samples/s",
        "eval auc",
        "data wait",
        "elapsed",
        "left",
    ]
    assert values.split() == ["0.4812", "61,240", "0.7812", "0.4%", "1:00", "0:40"]
    # Evaluations stay readable above the block; steps don't scroll by.
    assert file.getvalue().count("valid auc 0.7812") == 1
    assert "samples/s 61,240" not in file.getvalue()


def test_a_resumed_run_counts_on_and_leaves_the_done_steps_out_of_its_speed() -> None:
    clock = Clock()
    target, file = console(clock, terminal=False)
    with TrainDisplay(1000, start_step=500, console=target, get_time=clock) as display:
        train(display, clock, 501, 600)
    line = file.getvalue()
    assert line.startswith("step 600/1000 ")
    assert line.endswith("left 0:40\n")


def test_steps_slower_than_a_refresh_still_give_a_time_left() -> None:
    clock = Clock()
    target, file = console(clock, terminal=False)
    with TrainDisplay(10, console=target, get_time=clock) as display:
        for step in range(1, 6):
            clock.now_s += 30
            display.advance(step)
            display.log(step_line(step))
    assert file.getvalue().splitlines()[-1].endswith("left 2:30")


def test_time_left_follows_the_last_minutes_however_short_the_steps() -> None:
    # 20 s at 100 steps/s, then 60 s at 33: 50 steps/s over the window, and 6,000 to go.
    clock = Clock()
    target, file = console(clock, terminal=False)
    with TrainDisplay(10_000, console=target, get_time=clock) as display:
        for step in range(1, 4001):
            clock.now_s += 0.01 if step <= 2000 else 0.03
            display.advance(step)
        display.log(step_line(4000))
    left = re.search(r"left 2:0(\d)", file.getvalue())
    assert left is not None, file.getvalue()


def test_live_loss_is_smoothed_and_recovers_from_nan() -> None:
    def shown_after(losses: list[float]) -> str:
        clock = Clock()
        target, file = console(clock, terminal=True)
        with TrainDisplay(10, console=target, get_time=clock) as display:
            for step, loss in enumerate(losses, start=1):
                display.log(step_line(step, loss=loss))
        return last_frame(file.getvalue(), "train ")[2].split()[0]

    assert shown_after([0.5]) == "0.5000"
    assert shown_after([0.5, 0.6]) == "0.5100"
    assert shown_after([0.5, float("nan")]) == "nan"
    assert shown_after([0.5, float("nan"), 0.4]) == "0.4000"


def test_redraws_are_limited() -> None:
    clock = Clock()
    target, file = console(clock, terminal=True)
    with TrainDisplay(10_000, console=target, get_time=clock) as display:
        for step in range(1, 1001):
            clock.now_s += 0.001
            display.advance(step)
    # One second: 4 redraws, and those of start and stop.
    assert file.getvalue().count("train ") <= 7
    assert "1,000/10,000" in last_frame(file.getvalue(), "train ")[0]


@pytest.mark.parametrize("make", [TrainDisplay, PrepareDisplay])
def test_terminal_is_restored_after_an_exception(make: Callable[..., Any]) -> None:
    clock = Clock()
    target, file = console(clock, terminal=True)
    stdout, stderr = sys.stdout, sys.stderr
    display = make(10, console=target) if make is TrainDisplay else make(console=target)
    with pytest.raises(KeyError, match="from the run"), display:  # noqa: PT012
        if isinstance(display, PrepareDisplay):
            display.phase("read", 10)
        assert HIDE_CURSOR in file.getvalue()
        raise KeyError("from the run")
    assert file.getvalue().rindex(SHOW_CURSOR) > file.getvalue().rindex(HIDE_CURSOR)
    assert (sys.stdout, sys.stderr) == (stdout, stderr)


@pytest.mark.parametrize("terminal", [True, False])
def test_disabled_displays_are_silent(terminal: bool) -> None:
    clock = Clock()
    target, file = console(clock, terminal=terminal)
    with TrainDisplay(10, enabled=False, console=target) as display:
        display.advance(1)
        display.log(step_line(1))
        display.log(eval_line(1))
        display.status("evaluate")
        display.message("text")
    with PrepareDisplay(enabled=False, console=target) as prepare:
        prepare.phase("read", 10)
        prepare.advance(5, 1)
    assert file.getvalue() == ""


class BrokenFile(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError("the disk of the log is full")


@pytest.mark.parametrize("terminal", [True, False])
def test_a_display_that_cannot_write_does_not_stop_the_run(
    terminal: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stdout = sys.stdout
    target = Console(file=BrokenFile(), force_terminal=terminal, force_interactive=terminal)
    with caplog.at_level(logging.WARNING):
        with TrainDisplay(10, console=target) as display:
            for step in range(1, 4):
                display.advance(step)
                display.log(step_line(step))
        with PrepareDisplay(console=target) as prepare:
            prepare.phase("read", 10)
            prepare.advance(10, 1)
    assert not display.enabled
    # Said once for each display, not at every step.
    assert [record.message.count("disk of the log is full") for record in caplog.records] == [1, 1]
    assert sys.stdout is stdout


def test_a_malformed_line_does_not_stop_the_run() -> None:
    clock = Clock()
    target, _ = console(clock, terminal=False)
    with TrainDisplay(10, console=target) as display:
        display.log({"loss": 0.5})
    assert not display.enabled


def test_an_exit_asked_for_by_a_signal_handler_passes() -> None:
    class ExitingFile(io.StringIO):
        def write(self, text: str) -> int:
            raise SystemExit(143)

    display = TrainDisplay(10, console=Console(file=ExitingFile()))
    with pytest.raises(SystemExit, match="143"):
        display.message("text")


def test_a_reader_that_went_away_does_not_stop_the_run(tmp_path: Path) -> None:
    # As in `dlrm train | head -1`.
    program = f"""
from pathlib import Path
from data.prepare import ProgressListener
from dlrm.display import TrainDisplay
with TrainDisplay(20_000) as display:
    for step in range(1, 20_001):
        display.log({{"step": step, "loss": 0.5}})
Path({str(tmp_path / "done")!r}).write_text("all steps done")
"""
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b"step 1/20000  loss 0.5000")
        process.stdout.close()
        stderr = process.stderr.read().decode()
        assert process.wait(timeout=60) == 0, stderr
    assert (tmp_path / "done").exists()
    assert stderr.count("display is switched off") == 1


def test_forced_colour_does_not_put_a_live_block_into_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with TrainDisplay(10) as display:
        display.log(step_line(1))
    assert capsys.readouterr().out.startswith("step 1/10  loss 0.4812")


def prepare(display: PrepareDisplay, clock: Clock, name: str, num_chunks: int) -> None:
    display.phase(name, 100_000_000)
    for _ in range(num_chunks):
        clock.now_s += 1
        display.advance(5_000_000, 20_000)


def test_prepare_lines_are_few_and_complete() -> None:
    clock = Clock()
    target, file = console(clock, terminal=False)
    with PrepareDisplay(console=target, get_time=clock) as display:
        prepare(display, clock, "count ids", 20)
        display.phase("merge", None)
        clock.now_s += 7
        display.advance(1_000_000, 0)
        prepare(display, clock, "write parquet", 3)
    assert file.getvalue().splitlines() == [
        "count ids   25%  100,000 rows  5 MB/s  left 0:15",
        "count ids   50%  200,000 rows  5 MB/s  left 0:10",
        "count ids   75%  300,000 rows  5 MB/s  left 0:05",
        "count ids  100%  400,000 rows  5 MB/s  in 0:20  done",
        "merge  0 rows  - MB/s",
        "merge  100%  0 rows  0 MB/s  in 0:07  done",
        "write parquet  100%  60,000 rows  5 MB/s  in 0:03  done",
    ]


def test_prepare_display_is_the_listener_that_prepare_asks_for() -> None:
    for method in ("phase", "advance"):
        asked = inspect.signature(getattr(ProgressListener, method))
        assert inspect.signature(getattr(PrepareDisplay, method)).parameters.keys() == (
            asked.parameters.keys()
        )


def test_a_phase_cut_short_by_an_exception_is_not_called_done() -> None:
    clock = Clock()
    target, file = console(clock, terminal=False)
    with pytest.raises(KeyError), PrepareDisplay(console=target, get_time=clock) as display:  # noqa: PT012
        prepare(display, clock, "count ids", 3)
        raise KeyError
    assert "done" not in file.getvalue()


@pytest.mark.parametrize("width", [80, 100])
def test_prepare_bars_fit_with_the_largest_figures(width: int) -> None:
    clock = Clock()
    target, file = console(clock, terminal=True, width=width)
    with PrepareDisplay(console=target, get_time=clock) as display:
        prepare(display, clock, "count ids", 3)
        display.phase("write parquet parts", 10**13)
        for _ in range(3):
            clock.now_s += 1
            display.advance(1_234_000_000, 1_333_333_333)
        first, second = last_frame(file.getvalue(), "count ids")
    assert all(len(row) <= width for row in (first, second))
    assert re.fullmatch(r"count ids +━+ 100% +60,000 rows +5 MB/s in 0:03", first.rstrip())
    assert re.fullmatch(
        r"write parquet parts +[━╸╺ ]+ 0% +3,999,999,999 rows +1,234 MB/s left 2:15:01",
        second.rstrip(),
    )
    assert file.getvalue().count(HIDE_CURSOR) == file.getvalue().count(SHOW_CURSOR)
