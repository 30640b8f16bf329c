"""What a run writes down while it goes: metrics.jsonl, TensorBoard events and the display."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from dlrm.display import TrainDisplay
from dlrm.event_file import EventFile
from dlrm.metrics import EvalResult
from dlrm.phases import PHASES, PhaseTimer
from dlrm.run_folder import RunFolder
from dlrm.side_output import describe_os_error


class _Times:
    """Of some steps: how many, their time, that of their phases, their samples."""

    def __init__(self) -> None:
        self.num_steps, self.num_samples = 0, 0
        self.total_s = 0.0
        self.phase_s = dict.fromkeys(PHASES, 0.0)

    def add(self, seconds: float, phase_s: Mapping[str, float], num_samples: int) -> None:
        self.num_steps += 1
        self.num_samples += num_samples
        self.total_s += seconds
        for name, phase in phase_s.items():
            self.phase_s[name] += phase


class Recorder:
    """Collects steps and turns each `log_every` of them into one line.

    Args:
        folder: where the lines go.
        display: shows the same lines.
        log_every: steps per line.
        writes: False on all ranks but the first: figures are kept, nothing is written.

    Attributes:
        timer: of the phases.
        slowed_steps: numbers of the steps (from 1) whose times say nothing about the others, since
            they were profiled: no figure of speed has them in it. A line of metrics.jsonl that has
            no other steps is made of these.
        steps_without_weight: steps whose samples all had the example weight 0: they have no loss.
        on_step: told the number of each step that is done, before it is written down.
    """

    def __init__(
        self, folder: RunFolder, display: TrainDisplay, log_every: int, *, writes: bool = True
    ) -> None:
        self._folder, self._display, self._log_every = folder, display, log_every
        self._writes = writes
        self._board = EventFile(folder.path / "tensorboard")
        self._board_failed, self._metrics_failed = False, False
        self.timer = PhaseTimer()
        self.slowed_steps: Collection[int] = ()
        self.on_step: Callable[[int], None] = lambda step: None
        self.history: list[dict[str, Any]] = []
        self.samples = 0
        self.loss_last: float | None = None
        self._step_ms: list[float] = []
        self._times, self._window, self._slowed_window = _Times(), _Times(), _Times()
        self._num_steps = 0
        self.steps_without_weight = 0
        self._line_steps = self._line_without_weight = 0
        self._losses: list[float] = []
        self._last_step: dict[str, Any] = {}
        self._phases_so_far_s = dict(self.timer.total_s)

    def resume(
        self,
        step: int,
        samples: int,
        loss_last: float | None,
        history: Iterable[Mapping[str, Any]],
    ) -> None:
        """Goes on after a run's first steps; lines that are to come again are removed."""
        self._num_steps, self.samples, self.loss_last = step, samples, loss_last
        self.history = [dict(entry) for entry in history]
        if self._writes:
            self._folder.drop_metrics_after(step, {entry["step"] for entry in self.history})
            self._board.begin_after(step)

    def step(self, step: int, epoch: int, num_samples: int, loss: float | None, seconds: float,
             lrs: tuple[float, float]) -> None:  # fmt: skip
        """One optimizer step is done; `seconds` includes its waiting for data. `loss` is None where
        all example weights are 0: such a step counts in no mean of losses."""
        self.on_step(step)
        self._num_steps += 1
        self.samples += num_samples
        self._line_steps += 1
        if loss is None:
            self.steps_without_weight += 1
            self._line_without_weight += 1
        else:
            self.loss_last = loss
            self._losses.append(loss)
        self._last_step = {"step": step, "epoch": epoch, "lr_dense": lrs[0], "lr_sparse": lrs[1]}
        phase_s = {name: s - self._phases_so_far_s[name] for name, s in self.timer.total_s.items()}
        self._phases_so_far_s = dict(self.timer.total_s)
        if step in self.slowed_steps:
            self._slowed_window.add(seconds, phase_s, num_samples)
        else:
            self._step_ms.append(seconds * 1e3)
            for times in (self._window, self._times):
                times.add(seconds, phase_s, num_samples)
        self._display.advance(step)
        if step % self._log_every == 0:
            self.flush()

    def flush(self) -> None:
        """Writes the line of the steps since the last one; the rates are those of the last step."""
        if self._line_steps == 0:
            return
        window = self._window if self._window.num_steps else self._slowed_window
        phase_ms = {
            name: round(window.phase_s[name] * 1e3 / window.num_steps, 4) for name in PHASES
        }
        line = {
            "step": self._last_step["step"],
            "samples": self.samples,
            "epoch": self._last_step["epoch"],
            "loss": sum(self._losses) / max(len(self._losses), 1),
            "samples_per_s": round(window.num_samples / window.total_s, 1),
            "step_ms": round(window.total_s * 1e3 / window.num_steps, 3),
            "data_wait_ms": phase_ms["data_wait"],
            "lr_dense": self._last_step["lr_dense"],
            "lr_sparse": self._last_step["lr_sparse"],
            "phase_ms": phase_ms,
        }
        if self._slowed_window.num_steps:
            line["profiled_steps"] = self._slowed_window.num_steps
        if self._line_without_weight:
            line["steps_without_weight"] = self._line_without_weight
        self._write(line)
        names = ("loss", "samples_per_s", "step_ms", "lr_dense", "lr_sparse")
        self._show({f"train/{name}": line[name] for name in names}, line["step"])
        self._losses, self._window, self._slowed_window = [], _Times(), _Times()
        self._line_steps = self._line_without_weight = 0

    def evaluation(self, step: int, part: str, result: EvalResult) -> None:
        """An evaluation of the model after `step` steps."""
        values = result.as_dict()
        self._write({"step": step, "samples": self.samples, "eval": {"split": part, **values}})
        entry = {k: values[k] for k in ("auc", "logloss", "ne")}
        self.history.append({"step": step, "samples": self.samples, **entry})
        known = {f"{part}/{name}": value for name, value in values.items() if value is not None}
        self._show(known, step)

    def samples_at(self, step: int) -> int:
        """Samples seen by the model after `step` steps, as far as an evaluation recorded it."""
        return next((h["samples"] for h in self.history if h["step"] == step), self.samples)

    def figures(self, epochs: float) -> dict[str, Any]:
        """The `train` part of result.json; times are of the steps that aren't `slowed_steps`."""
        step_ms, times = self._step_ms, self._times
        quantiles = statistics.quantiles(step_ms, n=10) if len(step_ms) > 1 else []
        return {
            "steps": self._num_steps,
            "steps_without_weight": self.steps_without_weight,
            "samples": self.samples,
            "epochs": epochs,
            "loss_last": self.loss_last,
            "samples_per_s": round(times.num_samples / times.total_s, 1) if step_ms else None,
            "step_ms_p50": round(statistics.median(step_ms), 3) if step_ms else None,
            "step_ms_p90": round(quantiles[8], 3) if quantiles else None,
            "data_wait_share": (
                round(times.phase_s["data_wait"] / times.total_s, 5) if step_ms else None
            ),
        }

    def close(self) -> None:
        """Writes what is left, of a failed run too, and flushes the TensorBoard events."""
        self.flush()
        self._board.close()

    def _write(self, line: dict[str, Any]) -> None:
        """Adds a line to metrics.jsonl: where it can't, the run goes on, and tries again with the
        next line."""
        if not self._writes:
            return
        try:
            self._folder.append_metrics(line)
        except OSError as error:
            if not self._metrics_failed:
                self._metrics_failed = True
                warnings.warn(
                    f"{describe_os_error(error)}; training goes on, and lines are missing there "
                    "until it can be written again",
                    stacklevel=4,
                )
        self._display.log(line)

    def _show(self, scalars: Mapping[str, float], step: int) -> None:
        """Adds to TensorBoard's events, until that fails: a reader stops at a damaged event."""
        if not self._writes or self._board_failed:
            return
        try:
            self._board.add(scalars, step)
        except OSError as error:
            self._board_failed = True
            self._board.close()
            warnings.warn(
                f"{describe_os_error(error)}; training goes on, without events for TensorBoard",
                stacklevel=4,
            )
