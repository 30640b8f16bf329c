"""Batches with their plans: the next batch's counts and ids travel while this one is trained on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch

from data.batch import Batch
from dlrm.recorder import PhaseTimer
from embeddings.sharded import BatchPlan, PendingBatchPlan, ShardedEmbeddings


@dataclass(frozen=True, eq=False)
class PlannedBatch:
    """A batch of one optimizer step.

    Attributes:
        batch: this rank's samples.
        micro_batches: the same in parts, each with its plan; as many on every rank.
    """

    batch: Batch
    micro_batches: list[tuple[Batch, BatchPlan]]

    @property
    def global_batch_size(self) -> int:
        """Samples over all ranks."""
        return sum(plan.global_batch_size for _, plan in self.micro_batches)


class Pipeline:
    """Yields planned batches; a step calls `begin_next` and `send_next_ids` on its way.

    With `overlap`, `begin_next` reads the next batch, works out its requests and issues its counts,
    and `send_next_ids` issues its ids; both are to be called where something else is to be done
    meanwhile, by all ranks at the same place. Without, they do nothing, and a batch is planned when
    it is asked for. The plans are the same.

    Args:
        batches: this rank's batches, as many on every rank.
        num_batches: how many of them to take at most.
        embeddings: makes the plans.
        accumulate: micro-batches per step.
        overlap: `train.overlap`.
        timer: adds up the time of waiting for data and of planning.
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        num_batches: int,
        embeddings: ShardedEmbeddings,
        *,
        accumulate: int,
        overlap: bool,
        timer: PhaseTimer,
    ) -> None:
        self._batches = iter(islice(batches, num_batches))
        self._embeddings, self._accumulate, self._overlap = embeddings, accumulate, overlap
        self._timer = timer
        self._next: _PendingBatch | None = None

    def take(self) -> PlannedBatch | None:
        """The next batch, completely planned; None at the end."""
        if self._next is None:
            self._begin()
            self._send_ids()
        pending, self._next = self._next, None
        if pending is None:
            return None
        with self._timer("plan"):
            return pending.finish()

    def begin_next(self) -> None:
        """Begins to plan the batch after the one that was taken."""
        if self._overlap:
            assert self._next is None, "take the batch that was begun first"
            self._begin()

    def send_next_ids(self) -> None:
        """Sends that batch's ids; its counts have travelled in the meantime."""
        if self._overlap:
            self._send_ids()

    def _begin(self) -> None:
        with self._timer("data_wait"):
            batch = next(self._batches, None)
        if batch is None:
            return
        with self._timer("plan"):
            self._next = _PendingBatch(batch, self._embeddings, self._accumulate)

    def _send_ids(self) -> None:
        if self._next is not None:
            with self._timer("plan"):
                self._next.send_ids()


class _PendingBatch:
    """A batch whose plans are under way."""

    def __init__(self, batch: Batch, embeddings: ShardedEmbeddings, accumulate: int) -> None:
        self._batch = batch
        # Several ranks have local batches of different sizes but must issue equally many
        # collectives: some of their parts may be empty.
        num_parts = accumulate
        if embeddings.comm.world_size == 1:
            num_parts = max(1, min(accumulate, batch.batch_size))
        self._micro = list(_micro_batches(batch, num_parts))
        # Of the whole step: each part's loss is divided by the weight of the global batch.
        weight = weight_sum(batch)
        self._plans: list[PendingBatchPlan] = []
        first_sample = 0
        for micro in self._micro:
            plan = embeddings.begin_plan(micro.ids, weight_sum=weight, first_sample=first_sample)
            self._plans.append(plan)
            first_sample += micro.batch_size

    def send_ids(self) -> None:
        for plan in self._plans:
            plan.send_ids()

    def finish(self) -> PlannedBatch:
        plans = [plan.finish() for plan in self._plans]
        return PlannedBatch(self._batch, list(zip(self._micro, plans, strict=True)))


def _micro_batches(batch: Batch, num_parts: int) -> Iterator[Batch]:
    if num_parts == 1:
        yield batch
        return
    for part in range(num_parts):
        start = batch.batch_size * part // num_parts
        yield batch.narrow(start, batch.batch_size * (part + 1) // num_parts)


def weight_sum(batch: Batch) -> float:
    """Sum of the example weights of a batch; its size, where all are 1."""
    if batch.weight_B is None:
        return float(batch.batch_size)
    return float(batch.weight_B.sum(dtype=torch.float64))
