"""The real `Trainer` on any number of ranks, as threads, and what a run of it came to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from data.parquet import PreparedDataset
from dlrm.build import build_tables
from dlrm.checkpoint import find_checkpoint
from dlrm.config import TrainRun, to_config
from dlrm.metrics import EvalResult
from dlrm.run_folder import RunFolder
from dlrm.trainer import Trainer
from embeddings import Plan
from embeddings.communicator import Communicator
from tests.commands import dense_values, train_lines
from tests.sharding_cases import plan_of
from tests.thread_ranks import run_ranks

LR = {"sgd": 0.5, "adagrad": 0.1, "rowwise_adagrad": 0.1, "adam": 0.02, "adamw": 0.02}
FP64 = {"precision": "fp64", "epochs": 3, "max_steps": 50, "log_every": 1}


def make_config(overrides: dict[str, Any]) -> TrainRun:
    """Tables of unequal dims, the torch backend; `overrides` as nested dictionaries."""
    base = {
        "data": {"name": "visits", "cache": "", "batch_size": 10, "eval_batch_size": 17},
        "model": {
            "embedding_dim": 4,
            "table_dims": {"many": 6, "words": 3},
            "bottom_mlp": [6],
            "top_mlp": [5],
        },
        "launch": {"num_threads": 1},
        "train": {"evals_per_epoch": 1, "backend": "torch"},
    }
    if "table_dims" in overrides.get("model", {}):
        del base["model"]["table_dims"]  # type: ignore[attr-defined]
    merged = OmegaConf.merge(OmegaConf.structured(TrainRun), base, overrides)
    config: TrainRun = to_config(merged)  # type: ignore[arg-type]
    return config


def rules(sparse: str, dense: str, **more: Any) -> dict[str, Any]:
    return {
        "sparse": {"name": sparse, "lr": LR[sparse]},
        "dense": {"name": dense, "lr": LR[dense]},
        **more,
    }


@dataclass
class Outcome:
    """What a run came to, on one rank.

    Attributes:
        tables: every row and its state, on rank 0.
        rows: of the raw data, in each of this rank's batches.
        kinds: its collectives in their order.
    """

    loss_last: float
    history: list[dict[str, Any]]
    tables: dict[str, Tensor]
    dense: dict[str, Tensor]
    digest: str
    evaluated: EvalResult
    rows: list[list[int]]
    kinds: list[str]

    @property
    def sizes(self) -> list[int]:
        """Samples of this rank's batches."""
        return [len(rows) for rows in self.rows]


class Ranks:
    """Trainers of one run in one folder, which is made here unless the run in it goes on.

    Args:
        dataset: what to train on.
        folder: the run's folder.
        world_size: 1: one process without a communicator.
        layout: of `sharding_cases.LAYOUTS`.
        overrides: of the configuration.
        exchange: of the plan.
        resume: `train.resume`; the trainers go on from there.
        stop_after: the step after which the run is told to end; None: at its end.
        stopping_rank: who is told so; the others only hear of it.
    """

    def __init__(
        self,
        dataset: PreparedDataset,
        folder: Path,
        world_size: int,
        layout: str = "table_wise",
        overrides: dict[str, Any] | None = None,
        exchange: str = "mixed",
        *,
        resume: str | None = None,
        stop_after: int | None = None,
        stopping_rank: int = 0,
    ) -> None:
        self._resume, self._stop_after = resume, stop_after
        self._stopping_rank = stopping_rank
        self.dataset, self.world_size, self.config = (
            dataset,
            world_size,
            make_config(overrides or {}),
        )
        self.folder = RunFolder.of_this_run(folder) if resume else RunFolder(folder)
        self.folder.path.mkdir(exist_ok=True)
        tables, _ = build_tables(self.config, dataset.manifest)
        self.plan: Plan = plan_of(layout, world_size, exchange, tables)

    def trainer(self, comm: Communicator | None = None) -> Trainer:
        folder = RunFolder.of_this_run(self.folder.path)
        plan = None if comm is None else self.plan
        is_told = comm is None or comm.rank == self._stopping_rank
        trainer = Trainer(
            self.config,
            self.dataset,
            folder,
            print,
            comm=comm,
            plan=plan,
            is_stop_asked=lambda: is_told and trainer.steps_done + 1 == self._stop_after,
        )
        if self._resume is not None:
            trainer.resume(find_checkpoint(self._resume, self.folder.path, "train.resume"))
        return trainer

    def run(self, function: Callable[[Trainer], Any]) -> list[Any]:
        """`function(trainer)` on every rank; results by rank."""
        if self.world_size == 1:
            return [function(self.trainer())]
        return run_ranks(self.world_size, lambda comm: function(self.trainer(comm)))

    def fit(self) -> list[Outcome]:
        """Trains to the end."""
        return self.run(fit)

    def losses(self) -> list[float]:
        return [line["loss"] for line in train_lines(self.folder.path)]


def fit(trainer: Trainer) -> Outcome:
    rows: list[list[int]] = []
    step = trainer.step

    def noted(planned: Any) -> float:
        rows.append(planned.batch.row_B.tolist())
        return step(planned)

    trainer.step = noted  # type: ignore[method-assign]
    trainer.fit()
    kinds = list(getattr(trainer.comm, "kinds", []))
    loss_last = trainer.recorder.loss_last
    assert loss_last is not None
    return Outcome(
        loss_last,
        trainer.recorder.history,
        read_tables(trainer),
        dense_values(trainer),
        trainer.digest(),
        trainer.evaluate("train").result(),
        rows,
        kinds,
    )


def read_tables(trainer: Trainer) -> dict[str, Tensor]:
    """Every row and its state on rank 0, nothing on the others; called by all ranks."""
    embeddings = trainer.embeddings
    whole = {table.name: embeddings.read(table.name, 0, table.rows) for table in embeddings.tables}
    return {
        f"{table}.{name}": tensor.clone()
        for table, values in whole.items()
        if values is not None
        for name, tensor in values.items()
    }


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(
            found[name], values, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_equal_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name


def assert_same_on_all_ranks(ranks: list[Outcome]) -> None:
    first = ranks[0]
    for rank in ranks[1:]:
        assert (rank.loss_last, rank.digest) == (first.loss_last, first.digest)
        assert (rank.history, rank.evaluated) == (first.history, first.evaluated)
        assert_equal_bits(rank.dense, first.dense)
        assert rank.kinds == first.kinds
