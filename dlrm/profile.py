"""`train.profile`: a few steps of a run through `torch.profiler`, on every rank.

The profiled steps, the one before them (the profiler warms up) and the one after them (ranks wait
for the slowest to have written its trace) are slower than the others; `Recorder.slowed_steps` keeps
them out of all figures of speed. They train like any other: profiling changes no bit of the model.

Off, a phase runs within `nullcontext`, and nothing else is different.
"""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from data.errors import UserError
from data.files import write_whole
from dlrm.config import TrainConfig
from dlrm.phases import with_other
from dlrm.profile_trace import (
    PYTHON,
    WAITING,
    TraceFigures,
    figures_of,
    issue_range,
    name_trace,
    step_range,
    wait_range,
)
from dlrm.recorder import Recorder
from dlrm.side_output import side_output
from embeddings.communicator import CommCounters, Communicator

PROFILE_FOLDER = "profile"
OPERATORS_FILE, TIMELINE_FILE = "operators.json", "timeline.json"
DEFAULT_START = 10
NUM_TOP_OPERATORS = 12
TABLE_WIDTH = 100


def profiled_steps(config: TrainConfig, num_steps: int) -> range:
    """The numbers of the steps to profile.

    Args:
        config: with `profile_steps` and `profile_start`.
        num_steps: of the whole run.

    Raises:
        UserError: where the run is too short.
    """
    count = config.profile_steps
    start = config.profile_start
    if start is None:
        start = min(DEFAULT_START, max(2, (num_steps - count) // 2 + 1))
    if start + count - 1 > num_steps:
        raise UserError(
            f"train.profile_steps={count}, from step {start} on, end with step "
            f"{start + count - 1:,}, but the run has {num_steps:,} steps. Lower "
            "train.profile_steps or train.profile_start, or train for longer"
        )
    return range(start, start + count)


class StepProfiler:
    """Records `steps` of one rank and writes `profile/trace.RANK.json.gz`.

    Rank 0 also writes `profile/operators.json` and `profile/timeline.json`. Create it after the
    trainer and before the first step: it follows the recorder's steps by itself. A run that ends
    before the last of `steps` leaves no profile.

    Args:
        steps: see `profiled_steps`.
        recorder: tells of phases and steps.
        comm: the ranks.
        run_dir: the run folder.
        beat: told what goes on between steps (the heartbeat).
        steps_done: of a run that was resumed.
    """

    def __init__(
        self,
        steps: range,
        recorder: Recorder,
        comm: Communicator,
        run_dir: Path,
        beat: Callable[[int, str], None],
        steps_done: int = 0,
    ) -> None:
        self._steps, self._recorder, self._comm, self._beat = steps, recorder, comm, beat
        self._folder = run_dir / PROFILE_FOLDER
        self._figures: TraceFigures | None = None
        self._profiler: profile | None = None
        self._next_step = 0
        self._step_range: record_function | None = None
        self._undo: Callable[[], None] = lambda: None
        recorder.slowed_steps = range(steps.start - 1, steps.stop + 1)
        recorder.on_step = self._after_step
        self._after_step(steps_done)

    def figures(self) -> dict[str, Any] | None:
        """The `profile` part of result.json, of this rank; None before the steps are done."""
        if self._figures is None:
            return None
        found = self._figures
        return {
            "steps": found.steps,
            "step_ms": round(found.step_ms, 4),
            "phase_ms": {name: round(ms, 4) for name, ms in found.phase_ms.items()},
            "operators_top": [o.as_dict() for o in found.operators[:NUM_TOP_OPERATORS]],
            "traces": [
                f"{PROFILE_FOLDER}/{_trace_name(rank)}" for rank in range(self._comm.world_size)
            ],
        }

    def close(self) -> None:
        """Ends what a run that failed within the steps has left running."""
        if self._profiler is None:
            return
        if self._step_range is not None:
            self._step_range.__exit__(None, None, None)
        self._undo()
        with _quiet_kineto():
            self._profiler.stop()
        self._profiler = None

    # the steps

    def _after_step(self, step: int) -> None:
        if step == self._steps.start - 2:
            self._beat(step, "start the profiler")
            self._profiler = profile(
                activities=[ProfilerActivity.CPU],
                schedule=schedule(wait=0, warmup=1, active=len(self._steps), repeat=1),
            )
            with _quiet_kineto():
                self._profiler.start()
            self._watch()
        elif self._profiler is not None:
            if self._step_range is not None:
                self._step_range.__exit__(None, None, None)
                self._step_range = None
            with _quiet_kineto():
                self._profiler.step()
            if step == self._steps.stop - 1:
                self._beat(step, "write the profile")
                profiler, self._profiler = self._profiler, None
                self._undo()
                with side_output("the profile isn't whole"):
                    self._write(profiler)
        self._next_step = step + 1

    @contextmanager
    def _phase_range(self, phase: str) -> Iterator[None]:
        """A step begins with its first phase: what lies between steps (evaluation) is no part."""
        if self._step_range is None:
            self._step_range = record_function(step_range(self._next_step))
            self._step_range.__enter__()
        with record_function(phase):
            yield

    def _watch(self) -> None:
        """Sets named ranges around phases and waits, and marks before collectives."""
        timer, comm = self._recorder.timer, self._comm
        around, counters, on_wait = timer.around, comm.counters, comm.on_wait
        waits: list[record_function] = []

        def waiting(what: str | None) -> None:
            if what is not None:
                waits.append(record_function(wait_range(what)))
                waits[-1].__enter__()
            elif waits:
                waits.pop().__exit__(None, None, None)
            on_wait(what)

        def undo() -> None:
            timer.around, comm.counters, comm.on_wait = around, counters, on_wait

        timer.around, comm.on_wait, self._undo = self._phase_range, waiting, undo
        comm.counters = _MarkedCounters(counters.num_collectives, counters.sent_bytes)

    # what is written

    def _write(self, profiler: profile) -> None:
        """The trace of this rank and, of rank 0, its figures."""
        self._folder.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._folder, prefix=".trace-") as name:
            exported = Path(name) / "trace.json"
            profiler.export_chrome_trace(str(exported))
            try:
                trace = json.loads(exported.read_text(encoding="utf-8"))
            except ValueError as error:  # Written in C++, which doesn't tell of a full disk.
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(exported)) from error
        self._figures = figures_of(trace["traceEvents"])
        name_trace(trace, self._comm.rank)
        packed = gzip.compress(json.dumps(trace).encode(), compresslevel=5)
        write_whole(self._folder / _trace_name(self._comm.rank), packed)
        if self._comm.rank == 0:
            found = self._figures
            operators = {
                "steps": found.steps,
                "step_ms": round(found.step_ms, 4),
                "operators": [o.as_dict() for o in found.operators],
            }
            for file, values in ((OPERATORS_FILE, operators), (TIMELINE_FILE, found.timeline)):
                write_whole(self._folder / file, json.dumps(values).encode() + b"\n")


def describe_profile(figures: dict[str, Any]) -> list[str]:
    """What is printed of `StepProfiler.figures`: two tables, at most 100 columns wide."""
    step_ms, steps = figures["step_ms"], figures["steps"]
    console = Console(file=io.StringIO(), width=TABLE_WIDTH, color_system=None)
    phases = _table("phase", "ms", "share")
    for name, ms in with_other(figures["phase_ms"], step_ms).items():
        phases.add_row(name.replace("_", " "), f"{ms:,.2f}", _percent(ms / step_ms))
    operators = _table("operator (without those it calls)", "ms", "share", "calls")
    for o in figures["operators_top"]:
        calls = "" if o["name"] in (PYTHON, WAITING) else f"{o['calls']:,.5g}"
        operators.add_row(o["name"], f"{o['self_ms']:,.2f}", _percent(o["share"]), calls)
    for table in (phases, operators):
        console.print()
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    first, last = steps[0], steps[-1]
    which = f"step {first}" if first == last else f"steps {first} to {last}"
    return [
        f"profile {which} of rank 0, {step_ms:,.1f} ms each; no figure of speed has them in it",
        *(line.rstrip() for line in console.file.getvalue().splitlines()),
        "",
        f"traces  {', '.join(figures['traces'][:2])}{' …' if len(figures['traces']) > 2 else ''}"
        " (ui.perfetto.dev, chrome://tracing)",
    ]


class _MarkedCounters(CommCounters):
    """Counts in the same dictionaries, and marks in the trace that a collective begins."""

    def add(self, kind: str, sent_bytes: int) -> None:
        """See `CommCounters.add`."""
        super().add(kind, sent_bytes)
        with record_function(issue_range(kind, sent_bytes)):
            pass


def _trace_name(rank: int) -> str:
    return f"trace.{rank}.json.gz"


def _table(name: str, *numbers: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(name, no_wrap=True, overflow="ellipsis", max_width=64)
    for number in numbers:
        table.add_column(number, justify="right", no_wrap=True)
    return table


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


@contextmanager
def _quiet_kineto() -> Iterator[None]:
    """Keeps kineto's marks of its start and stop out of the user's terminal."""
    name = "KINETO_LOG_LEVEL"
    is_set = name in os.environ
    os.environ.setdefault(name, "99")
    try:
        yield
    finally:
        if not is_set:
            del os.environ[name]
