"""What a run writes down while it goes: metrics.jsonl, TensorBoard events and the display."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from tensorboardX import SummaryWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog

from dlrm.display import TrainDisplay
from dlrm.metrics import EvalResult
from dlrm.phases import PHASES, PhaseTimer
from dlrm.run_folder import RunFolder


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
        on_step: told the number of each step that is done, before it is written down.
    """

    def __init__(
        self, folder: RunFolder, display: TrainDisplay, log_every: int, *, writes: bool = True
    ) -> None:
        self._folder, self._display, self._log_every = folder, display, log_every
        self._writes = writes
        self._board = SummaryWriter(
            logdir=str(folder.path / "tensorboard"), flush_secs=10, write_to_disk=writes
        )
        self.timer = PhaseTimer()
        self.slowed_steps: Collection[int] = ()
        self.on_step: Callable[[int], None] = lambda step: None
        self.history: list[dict[str, Any]] = []
        self.samples = 0
        self.loss_last: float | None = None
        self._step_ms: list[float] = []
        self._times, self._window, self._slowed_window = _Times(), _Times(), _Times()
        self._num_steps = 0
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
            # Has TensorBoard forget what earlier event files say of the steps that come again.
            restart = SessionLog(status=SessionLog.START)
            self._board.file_writer.add_event(Event(step=step + 1, session_log=restart))

    def step(self, step: int, epoch: int, num_samples: int, loss: float, seconds: float,
             lrs: tuple[float, float]) -> None:  # fmt: skip
        """One optimizer step is done; `seconds` includes its waiting for data."""
        self.on_step(step)
        self._num_steps += 1
        self.samples += num_samples
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
        count = len(self._losses)
        if count == 0:
            return
        window = self._window if self._window.num_steps else self._slowed_window
        phase_ms = {
            name: round(window.phase_s[name] * 1e3 / window.num_steps, 4) for name in PHASES
        }
        line = {
            "step": self._last_step["step"],
            "samples": self.samples,
            "epoch": self._last_step["epoch"],
            "loss": sum(self._losses) / count,
            "samples_per_s": round(window.num_samples / window.total_s, 1),
            "step_ms": round(window.total_s * 1e3 / window.num_steps, 3),
            "data_wait_ms": phase_ms["data_wait"],
            "lr_dense": self._last_step["lr_dense"],
            "lr_sparse": self._last_step["lr_sparse"],
            "phase_ms": phase_ms,
        }
        if self._slowed_window.num_steps:
            line["profiled_steps"] = self._slowed_window.num_steps
        self._write(line)
        for name in ("loss", "samples_per_s", "step_ms", "lr_dense", "lr_sparse"):
            self._board.add_scalar(f"train/{name}", line[name], line["step"])
        self._losses, self._window, self._slowed_window = [], _Times(), _Times()

    def evaluation(self, step: int, part: str, result: EvalResult) -> None:
        """An evaluation of the model after `step` steps."""
        values = result.as_dict()
        self._write({"step": step, "samples": self.samples, "eval": {"split": part, **values}})
        entry = {k: values[k] for k in ("auc", "logloss", "ne")}
        self.history.append({"step": step, "samples": self.samples, **entry})
        for name, value in values.items():
            if value is not None:
                self._board.add_scalar(f"{part}/{name}", value, step)

    def samples_at(self, step: int) -> int:
        """Samples seen by the model after `step` steps, as far as an evaluation recorded it."""
        return next((h["samples"] for h in self.history if h["step"] == step), self.samples)

    def figures(self, epochs: float) -> dict[str, Any]:
        """The `train` part of result.json; times are of the steps that aren't `slowed_steps`."""
        step_ms, times = self._step_ms, self._times
        quantiles = statistics.quantiles(step_ms, n=10) if len(step_ms) > 1 else []
        return {
            "steps": self._num_steps,
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
        if not self._writes:
            return
        self._folder.append_metrics(line)
        self._display.log(line)
