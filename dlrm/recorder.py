"""What a run writes down while it goes: metrics.jsonl, TensorBoard events and the display."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tensorboardX import SummaryWriter

from dlrm.display import TrainDisplay
from dlrm.metrics import EvalResult
from dlrm.run_folder import RunFolder

PHASES = (
    "data_wait",
    "plan",
    "lookup",
    "forward",
    "backward",
    "dense_reduce",
    "apply",
    "dense_update",
)


class PhaseTimer:
    """Adds up the wall time of a step's phases.

    Attributes:
        total_s: by phase.
        on_phase: told whenever one begins.
    """

    def __init__(self) -> None:
        self.total_s = dict.fromkeys(PHASES, 0.0)
        self.on_phase: Callable[[str], None] = lambda phase: None

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self.on_phase(phase)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.total_s[phase] += time.perf_counter() - start


class Recorder:
    """Collects steps and turns each `log_every` of them into one line.

    Args:
        folder: where the lines go.
        display: shows the same lines.
        log_every: steps per line.
        writes: False on all ranks but the first: figures are kept, nothing is written.
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
        self.step_ms: list[float] = []
        self.history: list[dict[str, Any]] = []
        self.samples = 0
        self.loss_last: float | None = None
        self._losses: list[float] = []
        self._last_step: dict[str, Any] = {}
        self._window_samples = 0
        self._window_start_s = dict(self.timer.total_s)

    def step(self, step: int, epoch: int, num_samples: int, loss: float, seconds: float,
             lrs: tuple[float, float]) -> None:  # fmt: skip
        """One optimizer step is done; `seconds` includes its waiting for data."""
        self.step_ms.append(seconds * 1e3)
        self.samples += num_samples
        self.loss_last = loss
        self._losses.append(loss)
        self._last_step = {"step": step, "epoch": epoch, "lr_dense": lrs[0], "lr_sparse": lrs[1]}
        self._window_samples += num_samples
        self._display.advance(step)
        if step % self._log_every == 0:
            self.flush()

    def flush(self) -> None:
        """Writes the line of the steps since the last one; the rates are those of the last step."""
        count = len(self._losses)
        if count == 0:
            return
        window_ms = sum(self.step_ms[-count:])
        now_s = self.timer.total_s
        phase_ms = {
            name: round((now_s[name] - self._window_start_s[name]) * 1e3 / count, 4)
            for name in PHASES
        }
        line = {
            "step": self._last_step["step"],
            "samples": self.samples,
            "epoch": self._last_step["epoch"],
            "loss": sum(self._losses) / count,
            "samples_per_s": round(self._window_samples / window_ms * 1e3, 1),
            "step_ms": round(window_ms / count, 3),
            "data_wait_ms": phase_ms["data_wait"],
            "lr_dense": self._last_step["lr_dense"],
            "lr_sparse": self._last_step["lr_sparse"],
            "phase_ms": phase_ms,
        }
        self._write(line)
        for name in ("loss", "samples_per_s", "step_ms", "lr_dense", "lr_sparse"):
            self._board.add_scalar(f"train/{name}", line[name], line["step"])
        self._losses, self._window_samples = [], 0
        self._window_start_s = dict(now_s)

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
        """The `train` part of result.json."""
        total_s = sum(self.step_ms) / 1e3
        quantiles = statistics.quantiles(self.step_ms, n=10) if len(self.step_ms) > 1 else []
        return {
            "steps": len(self.step_ms),
            "samples": self.samples,
            "epochs": epochs,
            "loss_last": self.loss_last,
            "samples_per_s": round(self.samples / total_s, 1) if total_s else None,
            "step_ms_p50": round(statistics.median(self.step_ms), 3) if self.step_ms else None,
            "step_ms_p90": round(quantiles[8], 3) if quantiles else None,
            "data_wait_share": (
                round(self.timer.total_s["data_wait"] / total_s, 5) if total_s else None
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
