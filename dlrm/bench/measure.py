"""One measurement: a side in its own fresh processes, the same steps and the same clock for all."""

from __future__ import annotations

import os
import resource
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from data.batch import Batch
from data.parquet import PreparedDataset
from dlrm.bench.batches import memory_batches
from dlrm.bench.network import read_sent_bytes
from dlrm.config import BenchRun
from dlrm.launch import WorkerContext
from dlrm.metrics import BinaryMetrics, EvalResult
from embeddings.communicator import KINDS, Communicator
from embeddings.plan import Plan
from embeddings.shared_memory import SharedMemory


@dataclass(frozen=True)
class SideTask:
    """What every rank of a measurement gets.

    Attributes:
        config: the configuration, with the precision of this measurement.
        dataset_root: the prepared data.
        plan: who owns which rows, of this system.
        side: its name, see `sides.py`.
    """

    config: BenchRun
    dataset_root: Path
    plan: Plan
    side: str


class Steps(Protocol):
    """What takes steps: one rank of a system.

    Attributes:
        note: one line on what exactly it is.
    """

    note: str

    def step(self) -> None:
        """Takes the next batch."""

    def begin_window(self) -> None:
        """The warm-up is over."""

    def figures(self) -> dict[str, Any]:
        """Further figures of the measured steps, per step."""


class Side(Steps, Protocol):
    """What is measured: one rank of a system that trains."""

    def end_training(self) -> None:
        """Comes to rest after the last step, ready for `logits`."""

    def logits(self, batch: Batch) -> Tensor | None:
        """`(B,)` of a batch as the model is now; None of what has no model."""


BuildSide = Callable[
    [WorkerContext, SideTask, PreparedDataset, list[Batch]], AbstractContextManager[Side]
]
"""Builds a side that will be asked for as many steps as there are batches."""


def measure_rank(context: WorkerContext, task: SideTask) -> dict[str, Any]:
    """One rank of a measurement; the figures are rank 0's."""
    from dlrm.bench.sides import builder

    config, bench = task.config, task.config.bench
    dataset = PreparedDataset(task.dataset_root)
    started_s = time.perf_counter()
    batches = training_batches(context, config, dataset)
    num_eval = max(1, bench.eval_samples // config.data.batch_size)
    eval_batches = bench_batches(context, config, dataset, "valid", num_eval)
    context.heartbeat.beat(0, "build")
    with builder(task.side)(context, task, dataset, batches) as side:
        built_s = time.perf_counter()
        started = _evaluate(context, side, eval_batches)
        figures = timed_steps(context, side, config)
        side.end_training()
        context.heartbeat.beat(len(batches), "evaluate")
        evaluated = _evaluate(context, side, eval_batches)
        return {
            **figures,
            "logloss": None if evaluated is None else evaluated.logloss,
            "auc": None if evaluated is None else evaluated.auc,
            "logloss_start": None if started is None else started.logloss,
            "eval_samples": 0 if evaluated is None else evaluated.num_samples,
            "build_s": built_s - started_s,
        }


def timed_steps(context: WorkerContext, side: Steps, config: BenchRun) -> dict[str, Any]:
    """Warms up, then measures `bench.steps` steps of this rank; the figures of both."""
    bench = config.bench
    step_ms: list[float] = []
    sent = _SentBytes(context)
    for number in range(bench.warmup_steps + bench.steps):
        if number == bench.warmup_steps:
            sent.begin()
            side.begin_window()
        context.heartbeat.beat(number + 1, "step")
        start_s = time.perf_counter()
        side.step()
        step_ms.append((time.perf_counter() - start_s) * 1e3)
    sent_bytes = sent.end() / bench.steps
    measured = step_ms[bench.warmup_steps :]
    return {
        "note": side.note,
        "step_ms_p50": statistics.median(measured),
        "step_ms_mean": statistics.fmean(measured),
        "step_ms": [round(ms, 3) for ms in measured],
        "bytes_sent_per_step_and_rank": sent_bytes,
        **process_figures(),
        **side.figures(),
    }


def process_figures() -> dict[str, Any]:
    """What every measurement tells of its process."""
    return {
        "num_threads": torch.get_num_threads(),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def sent_figures(comm: Communicator, num_steps: int) -> dict[str, Any]:
    """Bytes and collectives by kind that this system has counted, per step, mean over the ranks.

    In place of the network interface's bytes where nothing passes it.
    """
    of_ranks = comm.all_gather_object(comm.counters.sent_bytes)
    scale = 1 / (num_steps * len(of_ranks))
    sent_bytes = {kind: scale * sum(one[kind] for one in of_ranks) for kind in KINDS}
    collectives = comm.counters.num_collectives
    figures: dict[str, Any] = {
        "sent_bytes": sent_bytes,
        "collectives": {kind: collectives[kind] / num_steps for kind in KINDS},
    }
    if isinstance(comm, SharedMemory):
        figures["bytes_sent_per_step_and_rank"] = sum(sent_bytes.values())
    return figures


def training_batches(
    context: WorkerContext, config: BenchRun, dataset: PreparedDataset
) -> list[Batch]:
    """This rank's batches for all steps, those to warm up included."""
    num_steps = config.bench.warmup_steps + config.bench.steps
    return bench_batches(context, config, dataset, "train", num_steps)


def bench_batches(
    context: WorkerContext, config: BenchRun, dataset: PreparedDataset, part: str, count: int
) -> list[Batch]:
    """This rank's share of the first global batches of a part, in memory."""
    context.heartbeat.beat(0, "batches")
    return memory_batches(
        dataset,
        part,
        batch_size=config.data.batch_size,
        num_batches=count,
        bag_size=config.bench.bag_size,
        seed=config.seed,
        rank=context.rank,
        world_size=context.world_size,
    )


@torch.no_grad()
def _evaluate(context: WorkerContext, side: Side, batches: list[Batch]) -> EvalResult | None:
    """The same metrics for all sides, over all ranks' samples; None without a model."""
    metrics = BinaryMetrics()
    for batch in batches:
        logits_B = side.logits(batch)
        if logits_B is None:
            return None
        assert batch.label_B is not None
        metrics.update(logits_B.float(), batch.label_B, batch.weight_B)
    if context.world_size == 1:
        return metrics.result()
    merged = BinaryMetrics()
    gathered: list[Any] = [None] * context.world_size
    dist.all_gather_object(gathered, metrics.to_arrays())
    for arrays in gathered:
        merged.merge(BinaryMetrics.from_arrays(arrays))
    return merged.result()


class _SentBytes:
    """Bytes that a rank's network interface sent, headers and all, whoever sent them.

    Over loopback one interface serves all ranks (and every other program of the machine), so a rank
    is given its equal share.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        self._num_ranks = context.world_size
        self._begin = 0

    def begin(self) -> None:
        if self._num_ranks > 1:
            self._begin = read_sent_bytes(self._interface)

    def end(self) -> float:
        if self._num_ranks == 1:
            return 0.0
        sent = float(read_sent_bytes(self._interface) - self._begin)
        if self._interface == "lo":
            return sent / self._num_ranks
        gathered: list[Any] = [None] * self._num_ranks
        dist.all_gather_object(gathered, sent)
        return statistics.fmean(gathered)
