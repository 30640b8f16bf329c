"""What a person sees during a run: one live block on a terminal, plain lines everywhere else.

A display only shows. It never raises into the run: where it can't write (a closed pipe, an
encoding without the bar's characters), it says so once in the log and stays silent from then on.
Nothing here runs in a thread of its own: the screen is redrawn, at most `REFRESH_PER_S` times a
second, from within the calls, so a run that hangs shows a clock that stands.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column, Table
from rich.text import Text

REFRESH_PER_S = 4
# Wider than this, the eye has to travel too far between the cells of a row.
MAX_WIDTH = 100
# Steps of the last minutes give the time left: long enough to hold a few very slow steps.
SPEED_WINDOW_S = 120.0
# Half of the smoothed loss stems from about the last seven logging lines.
LOSS_DECAY = 0.9

_log = logging.getLogger(__name__)
_P = ParamSpec("_P")
_DisplayT = TypeVar("_DisplayT", bound="_Display")


def _never_raises(
    method: Callable[Concatenate[_DisplayT, _P], None],
) -> Callable[Concatenate[_DisplayT, _P], None]:
    """Makes a failure of `method` the end of the display instead of the end of the run."""

    @functools.wraps(method)
    def guarded(self: _DisplayT, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        if not self.enabled:
            return
        try:
            method(self, *args, **kwargs)
        except SystemExit as error:
            # rich ends the program when nobody reads any more; other exits are meant.
            if not isinstance(error.__context__, BrokenPipeError):
                raise
            self._give_up(error.__context__)
        except Exception as error:
            self._give_up(error)

    return guarded


class _Display:
    """The part that both displays share: on or off, live or plain, and when to redraw."""

    def __init__(
        self, enabled: bool, console: Console | None, get_time: Callable[[], float]
    ) -> None:
        self.enabled = enabled
        self.console = console if console is not None else _default_console()
        self._get_time = get_time
        self._live: Live | None = None
        self._drawn_at_s = -math.inf

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop()

    @_never_raises
    def message(self, text: str) -> None:
        """Shows a line of its own, above the live block."""
        self._print(text)

    def _start_live(self) -> None:
        if self.console.is_interactive:
            self._live = Live(
                get_renderable=lambda: Constrain(self._render(), MAX_WIDTH),
                console=self.console,
                auto_refresh=False,
            )
            self._live.start()

    @_never_raises
    def _stop(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _redraw(self, now: bool = False) -> None:
        if now or self._is_due():
            self._drawn_at_s = self._get_time()
            if self._live is not None:
                self._live.refresh()

    def _is_due(self) -> bool:
        return self._get_time() - self._drawn_at_s >= 1 / REFRESH_PER_S

    def _print(self, text: str) -> None:
        """Prints one line as it is: no markup, no colours, never broken at the width."""
        self.console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def _give_up(self, error: BaseException) -> None:
        self.enabled = False
        live, self._live = self._live, None
        if live is not None:
            # The terminal is what failed, so restoring it may fail too.
            with contextlib.suppress(Exception, SystemExit):
                live.stop()
        _log.warning("the display is switched off for the rest of this run: %r", error)

    def _render(self) -> RenderableType:
        raise NotImplementedError


class TrainDisplay(_Display):
    """Shows training: steps, speed, loss, AUC of the last evaluation, waiting for data, time left.

    Used as a context manager. It is fed with the very lines that go to metrics.jsonl, so what a
    person sees is what the file holds:

        with TrainDisplay(total_steps, enabled=rank == 0) as display:
            ...
            display.advance(step)        # every step: cheap, reads no tensor
            display.log(line)            # every logging step and evaluation

    On a terminal: a block of three lines, redrawn in place, and above it one lasting line for each
    evaluation. Elsewhere: one line for each `log`, such as

        step 200/1000  loss 0.4812  samples/s 61,240  auc 0.7812  wait 0.4%  left 0:21

    The live block's loss is smoothed (an exponential mean over the logging lines); the plain line's
    is that of metrics.jsonl. `wait` is `data_wait_ms` over `step_ms`. `left` counts on with the
    speed of the last two minutes, pauses for evaluations included.

    Args:
        total_steps: steps at the end of the run; None where unknown.
        start_step: steps done before (a resumed run).
        enabled: False makes every method do nothing: ranks other than the main one.
        console: where to write; standard output where None.
        get_time: a clock in seconds.
    """

    def __init__(
        self,
        total_steps: int | None,
        *,
        start_step: int = 0,
        enabled: bool = True,
        console: Console | None = None,
        get_time: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(enabled, console, get_time)
        self._total_steps = total_steps
        self._step = start_step
        self._progress = Progress(
            TextColumn("{task.description:<8}", markup=False),
            _bar_column(),
            _StepColumn(),
            console=self.console,
            auto_refresh=False,
            get_time=get_time,
            speed_estimate_period=SPEED_WINDOW_S,
            expand=True,
        )
        self._task_id = self._progress.add_task("train", total=total_steps, completed=start_step)
        self._started_at_s = get_time()
        self._loss = _SmoothedLoss(LOSS_DECAY)
        self._last_line: Mapping[str, Any] = {}
        self._auc: float | None = None

    def __enter__(self) -> TrainDisplay:
        self._enter()
        return self

    @_never_raises
    def _enter(self) -> None:
        self._started_at_s = self._get_time()
        self._start_live()
        self._redraw(now=True)

    @_never_raises
    def resume(self, step: int, total_steps: int) -> None:
        """Tells that the run goes on after `step` steps; called before it is shown."""
        self._step, self._total_steps = step, total_steps
        self._progress.update(self._task_id, completed=step, total=total_steps)

    @_never_raises
    def advance(self, step: int) -> None:
        """Tells that `step` steps are done since the start of training."""
        self._step = step
        # rich keeps 1,000 updates to estimate the speed from: short steps must not use them up.
        if self._is_due():
            self._take_step()
            self._redraw()

    @_never_raises
    def log(self, line: Mapping[str, Any]) -> None:
        """Shows a line of metrics.jsonl, of a training step or (with the key `eval`) an evaluation.

        Keys that the line lacks are shown as `-`.
        """
        if "eval" in line:
            self._auc = line["eval"].get("auc")
            self._print(self._evaluation_line(line))
        else:
            self._last_line = line
            self._loss.add(line.get("loss"))
            self._step = line["step"]
            self._take_step()
            if self._live is None:
                self._print(self._step_line(line))
        self._redraw(now=True)

    @_never_raises
    def status(self, text: str = "train") -> None:
        """Names what goes on in front of the live bar, e.g. `evaluate`; says nothing elsewhere."""
        self._progress.update(self._task_id, description=text)
        self._redraw(now=True)

    @_never_raises
    def _stop(self) -> None:
        self._take_step()
        super()._stop()

    def _take_step(self) -> None:
        self._progress.update(self._task_id, completed=self._step)

    def _step_line(self, line: Mapping[str, Any]) -> str:
        parts = [
            self._step_of_total(line["step"]),
            f"loss {_fixed(line.get('loss'))}",
            f"samples/s {_grouped(line.get('samples_per_s'))}",
            f"auc {_fixed(self._auc)}",
            f"wait {_wait_share(line)}",
        ]
        if self._total_steps is not None:
            parts.append(f"left {_clock(self._progress.tasks[0].time_remaining)}")
        return "  ".join(parts)

    def _evaluation_line(self, line: Mapping[str, Any]) -> str:
        figures = line["eval"]
        shown = [f"{key} {_fixed(figures.get(key))}" for key in ("auc", "logloss", "ne")]
        shown.append(f"calibration {_fixed(figures.get('calibration'), 3)}")
        return f"{self._step_of_total(line['step'])}  {figures['split']} {'  '.join(shown)}"

    def _step_of_total(self, step: int) -> str:
        return f"step {step}" if self._total_steps is None else f"step {step}/{self._total_steps}"

    def _render(self) -> RenderableType:
        cells = {
            "loss": _fixed(self._loss.value),
            "samples/s": _grouped(self._last_line.get("samples_per_s")),
            "eval auc": _fixed(self._auc),
            "data wait": _wait_share(self._last_line),
            "elapsed": _clock(self._get_time() - self._started_at_s),
            "left": _clock(self._progress.tasks[0].time_remaining),
        }
        grid = Table.grid(expand=True, padding=(0, 1, 0, 0))
        for _ in cells:
            grid.add_column(ratio=1, no_wrap=True)
        grid.add_row(*(Text(name, style="dim") for name in cells))
        grid.add_row(*(Text(value, style="bold") for value in cells.values()))
        return Group(self._progress.get_renderable(), grid)


class PrepareDisplay(_Display):
    """Shows `dlrm prepare`: one bar for each phase, with rows, MB/s and time left.

    Used as a context manager, and given to `data.prepare` as its progress listener. On a terminal
    the bars of finished phases stay above the running one. Elsewhere: one line for each phase when
    it ends, and in between one at most every `plain_interval_s` seconds.

    Args:
        enabled: False makes every method do nothing.
        console: where to write; standard output where None.
        plain_interval_s: the least time between two lines of one phase.
        get_time: a clock in seconds.
    """

    def __init__(
        self,
        *,
        enabled: bool = True,
        console: Console | None = None,
        plain_interval_s: float = 5.0,
        get_time: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(enabled, console, get_time)
        self._plain_interval_s = plain_interval_s
        self._printed_at_s = get_time()
        self._task_id: TaskID | None = None
        self._progress = Progress(
            _CellColumn(lambda task: task.description, width=21),
            _bar_column(),
            _CellColumn(_share, width=4, justify="right"),
            _CellColumn(_rows, width=18, justify="right"),
            _CellColumn(_speed, width=10, justify="right"),
            _CellColumn(_phase_time, width=12),
            console=self.console,
            auto_refresh=False,
            get_time=get_time,
            expand=True,
        )

    def __enter__(self) -> PrepareDisplay:
        self._enter()
        return self

    @_never_raises
    def _enter(self) -> None:
        self._start_live()

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exception_type is None:
            self._end_phase()
        super().__exit__(exception_type, exception, traceback)

    @_never_raises
    def phase(self, name: str, total_bytes: int | None) -> None:
        """Begins a phase, and so ends the one before.

        Args:
            name: what is done, in a few words.
            total_bytes: bytes to go through; None where unknown.
        """
        self._end_phase()
        self._task_id = self._progress.add_task(name, total=total_bytes, num_rows=0)
        self._printed_at_s = self._get_time()
        self._redraw(now=True)

    @_never_raises
    def advance(self, num_bytes: int, num_rows: int) -> None:
        """Tells that this phase went through that many more bytes and rows."""
        task = self._running()
        if task is None:
            return
        rows = task.fields["num_rows"] + num_rows
        self._progress.update(task.id, advance=num_bytes, num_rows=rows)
        now_s = self._get_time()
        is_due = now_s - self._printed_at_s >= self._plain_interval_s
        if self._live is None and is_due and not task.finished:
            self._printed_at_s = now_s
            self._print(_phase_line(task))
        self._redraw()

    @_never_raises
    def _end_phase(self) -> None:
        task = self._running()
        if task is None:
            return
        self._task_id = None
        # What was announced in bytes may be estimated; a phase that ended is at 100 %.
        self._progress.update(task.id, total=task.completed)
        self._progress.stop_task(task.id)
        if self._live is None:
            self._print(f"{_phase_line(task)}  done")
        self._redraw(now=True)

    def _running(self) -> Task | None:
        tasks = self._progress.tasks
        return next((task for task in tasks if task.id == self._task_id), None)

    def _render(self) -> RenderableType:
        return self._progress.get_renderable()


class _StepColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text(f"{task.completed:,.0f} steps")
        return Text(f"{task.completed:,.0f}/{task.total:,.0f} {task.percentage:4.0f}%")


class _CellColumn(ProgressColumn):
    """A cell of fixed width, so that the bar takes what is left and nothing jumps."""

    def __init__(
        self, text_of: Callable[[Task], str], width: int, justify: JustifyMethod = "left"
    ) -> None:
        super().__init__(Column(width=width, no_wrap=True, justify=justify, overflow="crop"))
        self._text_of = text_of

    def render(self, task: Task) -> Text:
        return Text(self._text_of(task))


class _SmoothedLoss:
    """An exponential mean that starts at the first value instead of at 0."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self.value: float | None = None

    def add(self, loss: float | None) -> None:
        # A NaN is shown at once, and doesn't stay once the loss is a number again.
        if loss is None or self.value is None or not math.isfinite(self.value + loss):
            self.value = loss
        else:
            self.value = self._decay * self.value + (1 - self._decay) * loss


def _bar_column() -> BarColumn:
    return BarColumn(
        bar_width=None,
        complete_style="cyan",
        finished_style="green",
        table_column=Column(ratio=1),
    )


def _default_console() -> Console:
    # FORCE_COLOR makes rich take any file for a terminal; a log file must not get a live block.
    return Console(force_interactive=None if sys.stdout.isatty() else False)


def _phase_line(task: Task) -> str:
    parts = [task.description, _share(task), _rows(task), _speed(task), _phase_time(task)]
    return "  ".join(part for part in parts if part)


def _share(task: Task) -> str:
    return "" if task.total is None else f"{task.percentage:3.0f}%"


def _rows(task: Task) -> str:
    return f"{task.fields['num_rows']:,} rows"


def _speed(task: Task) -> str:
    if task.stop_time is not None and task.elapsed:
        return f"{task.completed / task.elapsed / 1e6:,.0f} MB/s"
    return "- MB/s" if task.speed is None else f"{task.speed / 1e6:,.0f} MB/s"


def _phase_time(task: Task) -> str:
    if task.stop_time is not None:
        return f"in {_clock(task.elapsed)}"
    return "" if task.total is None else f"left {_clock(task.time_remaining)}"


def _fixed(value: float | None, num_decimals: int = 4) -> str:
    return "-" if value is None else f"{value:.{num_decimals}f}"


def _grouped(value: float | None) -> str:
    return f"{value:,.0f}" if value is not None and math.isfinite(value) else "-"


def _wait_share(line: Mapping[str, Any]) -> str:
    data_wait_ms, step_ms = line.get("data_wait_ms"), line.get("step_ms")
    if data_wait_ms is None or not step_ms:
        return "-"
    return f"{100 * data_wait_ms / step_ms:.1f}%"


def _clock(seconds: float | None) -> str:
    """`0:21`, `12:05`, `3:07:09`; `-` where unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
