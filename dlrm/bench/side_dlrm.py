"""This system as a side: the trainer's own step and pipeline."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from data.batch import Batch
from data.parquet import PreparedDataset
from dlrm.bench.measure import SideTask, sent_figures
from dlrm.build import communicator
from dlrm.launch import WorkerContext
from dlrm.recorder import PHASES
from dlrm.run_folder import RunFolder
from dlrm.scoring import autocast, dense_input
from dlrm.trainer import Trainer
from embeddings.communicator import CommCounters


@contextmanager
def build(
    context: WorkerContext, task: SideTask, dataset: PreparedDataset, batches: list[Batch]
) -> Iterator[DlrmSide]:
    """A trainer that is fed from memory; its own files go into a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="dlrm-bench-") as folder:
        trainer = Trainer(
            task.config,
            dataset,
            RunFolder(Path(folder)),
            lambda line: None,
            comm=communicator(context, task.config.launch),
            plan=task.plan,
            beat=context.heartbeat.beat,
        )
        try:
            yield DlrmSide(trainer, batches)
        finally:
            trainer.recorder.close()


class DlrmSide:
    """See `measure.Side`."""

    def __init__(self, trainer: Trainer, batches: list[Batch]) -> None:
        self._trainer = trainer
        trainer._pipeline = self._pipeline = trainer.pipeline(batches, len(batches))
        layout = trainer.config.sharding.layout if trainer.comm.world_size > 1 else "one process"
        self.note = (
            f"backend {trainer.embeddings.backend}, sharding {layout}, "
            f"wire {trainer.config.sharding.wire}, overlap {trainer.config.train.overlap}, "
            f"over {trainer.comm.transport}"
        )
        self._window_step = 0
        self._window_s: dict[str, float] = {}

    def step(self) -> None:
        """See `measure.Side`."""
        planned = self._pipeline.take()
        assert planned is not None
        self._trainer.step(planned)
        self._trainer.steps_done += 1

    def begin_window(self) -> None:
        """See `measure.Side`."""
        self._window_step = self._trainer.steps_done
        self._window_s = dict(self._trainer.recorder.timer.total_s)
        self._trainer.comm.counters = CommCounters()

    def figures(self) -> dict[str, Any]:
        """Time of each phase, collectives and bytes by kind, per step."""
        steps = self._trainer.steps_done - self._window_step
        now_s = self._trainer.recorder.timer.total_s
        return {
            "phase_ms": {
                name: (now_s[name] - self._window_s[name]) * 1e3 / steps for name in PHASES
            },
            **sent_figures(self._trainer.comm, steps),
        }

    def end_training(self) -> None:
        """Nothing is under way after the last batch."""

    def logits(self, batch: Batch) -> Tensor:
        """See `measure.Side`."""
        trainer = self._trainer
        plan = trainer.embeddings.plan_batch(batch.ids, training=False)
        pooled_BS = trainer.embeddings.lookup(plan, training=False)
        with autocast(trainer.config.train.precision):
            logits_B: Tensor = trainer.model(dense_input(trainer.model, batch), pooled_BS)
        return logits_B
