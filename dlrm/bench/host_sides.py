"""One measurement of `dlrm bench host`: the tables in one mode, beside a compute that is slept.

Staging, forwarding, writing back and updating are the real ones, of real rows; how long the host's
stages and the compute take at least is given, so that a schedule shows the same on any machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.batch import Batch
from dlrm.bench.checkpoint_sides import own_tensors, values_digest
from dlrm.bench.host_work import (
    HostWorkload,
    host_features,
    host_plan,
    host_tables,
)
from dlrm.bench.measure import process_figures
from dlrm.build import row_optimizer
from dlrm.config import BenchRun
from dlrm.launch import WorkerContext
from dlrm.phases import PhaseTimer
from dlrm.pipeline import Pipeline
from embeddings.host.cost import DenseTime, HostRates
from embeddings.host.executor import QUEUES, Event, Queue, SimulatedRates, ThreadExecutor
from embeddings.host.figures import HostCounters
from embeddings.host.host_tables import HostSettings, Mode
from embeddings.kv_gradients import KVGradients, sum_kv
from embeddings.sharded import ShardedEmbeddings

# Of the time given: beyond it, a step's real work took longer than it was to take.
_LATE_SHARE = 1.02


@dataclass(frozen=True)
class HostTask:
    """What a measurement gets.

    Attributes:
        config: the configuration.
        mode: the schedule, which is the side.
        rates: of the host's stages.
        dense: of the compute.
        predicted_s: seconds of a step, by the simulator.
        folder: where the first side leaves its rows for the others.
    """

    config: BenchRun
    mode: Mode
    rates: HostRates
    dense: DenseTime
    predicted_s: float
    folder: Path


class Compute:
    """A compute that takes a given time: what is left of it after the real work is slept.

    Args:
        stalled_s: seconds that the compute has waited for rows so far, which aren't part of it.
        clock: seconds since some fixed moment.
        sleep: waits for some seconds.

    Attributes:
        num_late: times that the real work alone took longer.
        num_passes: times in all.
        busy_s: seconds of the real work.
    """

    def __init__(
        self,
        stalled_s: Callable[[], float],
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.clear()
        self._stalled_s, self._clock, self._sleep = stalled_s, clock, sleep
        self._begin_s, self._stall_s, self._wanted_s = 0.0, 0.0, 0.0
        self._is_open = False

    def clear(self) -> None:
        """Forgets what was counted."""
        self.num_late = self.num_passes = 0
        self.busy_s = 0.0

    def begin(self) -> None:
        """A pass begins."""
        self._begin_s, self._stall_s = self._clock(), self._stalled_s()

    def expect(self, seconds: float) -> None:
        """The pass is to take so long; `end` ends it."""
        self._wanted_s, self._is_open = seconds, True

    def end(self) -> None:
        """Sleeps until the pass has taken what it is to take; nothing if it has ended already."""
        if not self._is_open:
            return
        self._is_open = False
        spent_s = self._clock() - self._begin_s - (self._stalled_s() - self._stall_s)
        self.busy_s += spent_s
        self.num_passes += 1
        self.num_late += spent_s > _LATE_SHARE * self._wanted_s
        if spent_s < self._wanted_s:
            self._sleep(self._wanted_s - spent_s)


class _Executor(ThreadExecutor):
    """Ends the compute where its first record sets out for the host, which is the update's end."""

    end_compute: Callable[[], None] = staticmethod(lambda: None)

    def submit(
        self,
        queue: Queue,
        work: Callable[[], None],
        *,
        num_bytes: int,
        after: Sequence[Event] = (),
        label: str = "",
        step: int = 0,
    ) -> Event:
        if queue == "to_host":
            self.end_compute()
        return super().submit(queue, work, num_bytes=num_bytes, after=after, label=label, step=step)


class HostSteps:
    """Training steps without a dense network, over a pipeline as the trainer has it.

    All that the calling thread does between two updates is part of the compute, planning included,
    but for waiting for rows.
    """

    def __init__(self, task: HostTask, workload: HostWorkload) -> None:
        config = task.config
        host, tables = config.sharding.host, host_tables(config)
        simulated = SimulatedRates(
            task.rates.link, task.rates.gather_bytes_per_s, task.rates.scatter_bytes_per_s
        )
        self._executor = _Executor(simulated)
        self.embeddings = ShardedEmbeddings(
            tables,
            host_features(tables),
            row_optimizer(config),
            dtype=torch.float32,
            seed=config.seed,
            plan=host_plan(config),
            backend="torch",
            host=HostSettings(
                mode=task.mode,
                lookahead=host.lookahead,
                batch_rows=config.data.batch_size * len(tables),
                staging_bytes=host.staging_bytes,
                hot_bytes=host.hot_bytes,
            ),
            executor=self._executor,
        )
        assert self.embeddings.host is not None
        self._host = self.embeddings.host
        self._host.choose_rows(workload.hot_set(host.hot_bytes, host.whole_rows).ids)
        self.compute = Compute(lambda: self._host.counters.stall_s)
        self._executor.end_compute = self.compute.end
        self._dense, self._lr = task.dense, config.optim.sparse.lr
        self._grad_BS = _given_gradient(config, len(tables))
        batches = workload.batches()
        self._pipeline = Pipeline(
            batches,
            len(batches),
            self.embeddings,
            accumulate=1,
            overlap=True,
            timer=PhaseTimer(),
        )

    @property
    def counters(self) -> HostCounters:
        """What the host path did."""
        return self._host.counters

    def queue_s(self) -> dict[str, float]:
        """Seconds that each queue was at work so far."""
        busy_s = self._executor.timeline.busy_s()
        return {queue: busy_s[queue] for queue in QUEUES}

    def step(self) -> None:
        """Takes the next batch."""
        self.compute.begin()
        planned = self._pipeline.take()
        assert planned is not None, "more steps than batches"
        gradients: list[list[KVGradients]] = []
        for position, (micro, plan) in enumerate(planned.micro_batches):
            if position:
                self.compute.begin()
            self.embeddings.lookup(plan)
            self.compute.expect(self._dense.of_s(micro.batch_size))
            if not position:  # While the rows of a second part come.
                self._pipeline.begin_next()
                self._pipeline.send_next_ids()
            gradients.append(self.embeddings.backward(plan, self._gradient(micro), self._lr))
            if position < len(planned.micro_batches) - 1:
                self.compute.end()
        self.embeddings.apply(sum_kv(gradients), self._lr)
        self.compute.end()  # Where no record went to the host.

    def _gradient(self, micro: Batch) -> Tensor:
        return self._grad_BS.index_select(0, micro.row_B)

    def close(self) -> None:
        """Ends the threads."""
        self.embeddings.close()


def measure_host(context: WorkerContext, task: HostTask) -> dict[str, Any]:
    """One measurement; see `HostSteps`."""
    config, bench = task.config, task.config.bench
    context.heartbeat.beat(0, "build")
    workload = HostWorkload.draw(config)
    steps = HostSteps(task, workload)
    try:
        start = [tensor.clone() for tensor in own_tensors(steps.embeddings)]
        window = _Window(steps)
        for number in range(workload.num_steps):
            context.heartbeat.beat(number + 1, "step")
            if number == bench.warmup_steps:
                window.begin()
            steps.step()
            if bench.warmup_steps <= number < bench.warmup_steps + bench.steps:
                window.add_step()
        context.heartbeat.beat(workload.num_steps, "compare")
        counters = steps.counters
        end = own_tensors(steps.embeddings)
        step_s = typical(window.step_s, config.sharding.host.lookahead + 1)
        return {
            "note": _note(task),
            "step_ms_p50": step_s * 1e3,
            "predicted_ms": task.predicted_s * 1e3,
            "error": step_s / task.predicted_s - 1,
            **window.figures(),
            "counted": {
                "cold": counters.num_cold,
                "fetched": counters.num_fetched,
                "written": counters.num_written,
                "hot_samples": counters.num_hot_samples,
            },
            "num_forwarded": counters.num_forwarded,
            "moved_bytes": (counters.to_device_bytes + counters.to_host_bytes) / workload.num_steps,
            "start_digest": values_digest(start),
            "rows_digest": values_digest(end),
            "rows_moved": _max_difference(start, end),
            "rows_difference": _difference(task.folder, end),
            **process_figures(),
        }
    finally:
        steps.close()


def typical(step_s: Sequence[float], num_neighbours: int) -> float:
    """Seconds of a step: the median over stretches of neighbouring steps of their mean.

    Steps of a pipeline may come in bursts as long as it is deep, which a mean over as many evens
    out; a median then passes over what the machine did besides.

    Args:
        step_s: of each step, in order.
        num_neighbours: steps of a stretch; what is left over at the end belongs to the last one.
    """
    num_stretches = max(1, len(step_s) // num_neighbours)
    bounds = [number * num_neighbours for number in range(num_stretches)] + [len(step_s)]
    return statistics.median(
        statistics.fmean(step_s[start:stop]) for start, stop in pairwise(bounds)
    )


class _Window:
    """The measured steps: their times, and what compute and queues did meanwhile."""

    def __init__(self, steps: HostSteps) -> None:
        self._steps = steps
        self.step_s: list[float] = []
        self._last_s = self._stall_s = 0.0
        self._queue_s: dict[str, float] = {}
        self._figures: dict[str, Any] = {}

    def begin(self) -> None:
        """The warm-up is over."""
        self._steps.compute.clear()
        self._stall_s, self._queue_s = self._steps.counters.stall_s, self._steps.queue_s()
        self._last_s = time.perf_counter()

    def add_step(self) -> None:
        """A step has ended."""
        now_s = time.perf_counter()
        self.step_s.append(now_s - self._last_s)
        self._last_s = now_s
        per_step = 1e3 / len(self.step_s)
        compute = self._steps.compute
        self._figures = {
            "late_share": compute.num_late / compute.num_passes,
            "busy_ms": compute.busy_s * per_step,
            "stall_ms": (self._steps.counters.stall_s - self._stall_s) * per_step,
            "queue_ms": {
                queue: (seconds - self._queue_s[queue]) * per_step
                for queue, seconds in self._steps.queue_s().items()
            },
        }

    def figures(self) -> dict[str, Any]:
        """Per step."""
        return {
            "step_ms_mean": statistics.fmean(self.step_s) * 1e3,
            "step_ms": [round(seconds * 1e3, 3) for seconds in self.step_s],
            **self._figures,
        }


def _note(task: HostTask) -> str:
    ahead = task.config.sharding.host.lookahead
    return {
        "gather": "every stage after the other, step after step",
        "lookahead": f"rows set out {ahead} step(s) ahead, updated ones are forwarded",
        "hotline": "all-hot samples first, while the rows of the others come",
    }[task.mode]


def _given_gradient(config: BenchRun, num_features: int) -> Tensor:
    """`grad_BS`, the same in every step and of every mode; of a mean over the batch.

    As `exchange_steps.given_gradient`: sums over samples don't cancel out.
    """
    generator = torch.Generator().manual_seed(config.seed * 1_000_003)
    batch_size, num_columns = config.data.batch_size, num_features * config.model.embedding_dim
    sign_S = 1 - 2 * (torch.arange(num_columns) % 2)
    grad_BS = torch.rand(batch_size, num_columns, generator=generator) + 0.5
    return grad_BS * sign_S / batch_size


def _difference(folder: Path, tensors: Sequence[Tensor]) -> float:
    """How far rows and state lie from those of the first side of the first turn, which leaves them
    in the folder."""
    paths = [folder / f"rows.{number}.npy" for number in range(len(tensors))]
    if not paths[-1].exists():
        for path, tensor in zip(paths, tensors, strict=True):
            np.save(path, tensor.numpy())
    return _max_difference(tensors, [torch.from_numpy(np.load(path)) for path in paths])


def _max_difference(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """The greatest of all values, relative to those above 1; NaN as infinity, which no limit passes
    over."""
    found = max(
        float(((a - b).abs() / b.abs().clamp(min=1.0)).max())
        for a, b in zip(one, other, strict=True)
    )
    return float("inf") if found != found else found
