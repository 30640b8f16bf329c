"""Real ranks of a training run with a fault planted in one of them: what workers of
tests/dist/test_train.py run. Workers import this module by its name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch._dynamo  # noqa: F401  (the first optimizer would import it: seconds on a busy machine)

from data.batch import Batch
from data.errors import RawDataError
from data.parquet import Order, PreparedDataset
from dlrm.config import TrainRun
from dlrm.heartbeat import NoHeartbeat
from dlrm.launch import WorkerContext
from dlrm.run_folder import RunFolder
from dlrm.train import TrainTask, _train_joined, train_rank
from dlrm.trainer import Trainer
from embeddings import Plan, ProcessGroup
from tests.dist.entries import misbehave

STEP = 3
BAD_ID = 1_000_000


def train_with_fault(
    how: str, who: int, pids: str, context: WorkerContext, task: TrainTask
) -> None:
    """`train_rank`, which in the backward pass of step 3 fails on rank `who` (see `misbehave`), or
    there reads an id that is no row (`bad id`)."""
    (Path(pids) / str(context.rank)).write_text(str(os.getpid()))
    if context.rank == who:
        if how == "bad id":
            _spoil_an_id()
        else:
            _misbehave_in_backward(how)
    train_rank(context, task)


def _misbehave_in_backward(how: str) -> None:
    backward = Trainer._backward

    def faulty(self: Trainer, *args: Any) -> Any:
        if self.steps_done == STEP - 1:
            misbehave(how)
        return backward(self, *args)

    Trainer._backward = faulty  # type: ignore[method-assign]


def _spoil_an_id() -> None:
    batches = PreparedDataset.batches

    def spoilt(self: PreparedDataset, part: str, order: Order) -> Iterator[Batch]:
        for number, batch in enumerate(batches(self, part, order)):
            if part == "train" and number == STEP - 1:
                values_L = batch.ids.values_L.clone()
                values_L[0] = BAD_ID
                batch = replace(batch, ids=replace(batch.ids, values_L=values_L))
            yield batch

    PreparedDataset.batches = spoilt  # type: ignore[method-assign]


def join_with_a_bad_file(rank: int, world_size: int, config: TrainRun, run_dir: Path) -> str:
    """What a rank under torchrun is told where the first one can't read the raw data."""
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    with pytest.raises(RawDataError) as caught:
        _train_joined(WorkerContext(rank, world_size, rank, NoHeartbeat()), config, "", run_dir)
    return str(caught.value)


def train_joined(rank: int, world_size: int, config: TrainRun, run_dir: Path) -> None:
    """A whole run of ranks that are there already, as those of torchrun; without plots."""
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    context = WorkerContext(rank, world_size, rank, NoHeartbeat())
    with patch("dlrm.report.write_report", lambda folder: folder / "report.html"):
        _train_joined(context, config, "", run_dir)


def train_and_digest(
    rank: int, world_size: int, config: TrainRun, root: Path, run_dir: Path, plan: Plan
) -> tuple[str, int]:
    """(digest of the model after a run, number of its evaluations)."""
    folder = RunFolder.of_this_run(run_dir)
    dataset = PreparedDataset(root)
    trainer = Trainer(config, dataset, folder, str, comm=ProcessGroup(), plan=plan)
    trainer.fit()
    return trainer.digest(), len(trainer.recorder.history)
