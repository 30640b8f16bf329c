"""One measurement of the tables alone: ids → pooled vectors → given gradient → rows updated."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from data.batch import Batch
from data.parquet import PreparedDataset
from dlrm.bench.measure import Steps, bench_batches, timed_steps, training_batches
from dlrm.bench.sides import ALL_TO_ALL_FLOOR, EMBEDDING_BAG, TORCHREC, hush_torchrec
from dlrm.config import BenchRun
from dlrm.launch import WorkerContext
from embeddings.plan import Plan
from embeddings.table import FeatureConfig

NUM_HELD_OUT_BATCHES = 2
_REFERENCE_READY = "reference"


@dataclass(frozen=True)
class ExchangeTask:
    """What every rank of a measurement gets.

    Attributes:
        config: the configuration, in fp32, with this side's exchange.
        dataset_root: the prepared data.
        plan: who owns which rows, of this system; None for others.
        side: its name.
        folder: where the first side that has tables leaves its pooled vectors for the others.
        sent_bytes: of the floor: what it is to send, by kind, per step and rank.
    """

    config: BenchRun
    dataset_root: Path
    plan: Plan | None
    side: str
    folder: Path
    sent_bytes: dict[str, float] | None = None


class ExchangeSide(Steps, Protocol):
    """What is measured: one rank's tables."""

    def pooled(self, batch: Batch) -> Tensor | None:
        """`pooled_BS` as the rows are now, features in the data's order; None without tables."""


BuildExchange = Callable[
    [WorkerContext, ExchangeTask, PreparedDataset, list[Batch]],
    AbstractContextManager[ExchangeSide],
]
"""Builds a side that will be asked for as many steps as there are batches."""


def given_gradient(
    config: BenchRun, dims: dict[str, int], features: Sequence[FeatureConfig], batch: Batch
) -> Tensor:
    """`grad_BS`, the same for all sides and in every step; of a mean over the global batch.

    Each column has one sign, and magnitudes lie between a half and three halves: sums over samples
    don't cancel out, so that what Adagrad makes of their rounding stays rounding.

    Args:
        config: seed and batch size.
        dims: of the tables, by name.
        features: in the order of the columns.
        batch: of this rank, whose first row is a part of the seed.
    """
    first_row = int(batch.row_B[0]) if batch.batch_size else 0
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + first_row)
    num_columns = sum(dims[feature.table] for feature in features)
    sign_S = 1 - 2 * (torch.arange(num_columns) % 2)
    grad_BS = torch.rand(batch.batch_size, num_columns, generator=generator) + 0.5
    return grad_BS * sign_S / config.data.batch_size


def measure_exchange(context: WorkerContext, task: ExchangeTask) -> dict[str, Any]:
    """One rank of a measurement; the figures are rank 0's."""
    dataset = PreparedDataset(task.dataset_root)
    batches = training_batches(context, task.config, dataset)
    held_out = bench_batches(context, task.config, dataset, "valid", NUM_HELD_OUT_BATCHES)
    context.heartbeat.beat(0, "build")
    with _builder(task.side)(context, task, dataset, batches) as side:
        before = _pooled(side, held_out)
        figures = timed_steps(context, side, task.config)
        context.heartbeat.beat(len(batches), "compare")
        after = _pooled(side, held_out)
        if before is None or after is None:
            return figures
        moved = float((after - before).abs().max())
        return {
            **figures,
            "pooled_moved": max(_of_all_ranks(context, moved)),
            **_differences(context, task, before, after),
        }


def _builder(side: str) -> BuildExchange:
    if side in TORCHREC:
        hush_torchrec()
        module = "side_torchrec"
    else:
        module = "side_embedding_bag" if side == EMBEDDING_BAG else "exchange_sides"
    name = "build_floor" if side == ALL_TO_ALL_FLOOR else "build_exchange"
    build: BuildExchange = getattr(importlib.import_module(f"dlrm.bench.{module}"), name)
    return build


@torch.no_grad()
def _pooled(side: ExchangeSide, batches: list[Batch]) -> Tensor | None:
    found = [side.pooled(batch) for batch in batches]
    known = [pooled_BS.clone() for pooled_BS in found if pooled_BS is not None]
    return torch.cat(known) if len(known) == len(found) else None


def _differences(
    context: WorkerContext, task: ExchangeTask, before: Tensor, after: Tensor
) -> dict[str, Any]:
    """How far this side's pooled vectors lie from the first side's, rank by rank.

    Of the first side, 0 in the first turn: later turns tell whether it does the same again.
    """
    path = task.folder / f"{_REFERENCE_READY}.{context.rank}.npy"
    own = torch.stack([before, after]).numpy()
    if not path.exists():
        np.save(path, own)
    start, end = np.abs(own - np.load(path)).max(axis=(1, 2)).tolist()
    return {
        "pooled_start_difference": max(_of_all_ranks(context, start)),
        "pooled_difference": max(_of_all_ranks(context, end)),
        "pooled_difference_by_rank": _of_all_ranks(context, end),
    }


def _of_all_ranks(context: WorkerContext, value: float) -> list[float]:
    """Each rank's; NaN as infinity, which no `max` passes over."""
    value = float("inf") if value != value else value
    if context.world_size == 1:
        return [value]
    gathered: list[Any] = [None] * context.world_size
    dist.all_gather_object(gathered, value)
    return gathered
