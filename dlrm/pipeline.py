"""Batches with their plans, ahead of the step that trains on them.

The next batch's counts and ids travel while this one is trained on. With tables in host memory,
batches are planned as many steps ahead as their cold rows are to set out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise

import torch

from data.batch import Batch
from dlrm.recorder import PhaseTimer
from embeddings.sharded import BatchPlan, PendingBatchPlan, ShardedEmbeddings


@dataclass(frozen=True, eq=False)
class PlannedBatch:
    """A batch of one optimizer step.

    Attributes:
        batch: this rank's samples.
        micro_batches: the same in parts, in order, each with its plan; as many on every rank.
    """

    batch: Batch
    micro_batches: list[tuple[Batch, BatchPlan]]

    @property
    def plans(self) -> list[BatchPlan]:
        """Those of the micro-batches."""
        return [plan for _, plan in self.micro_batches]

    @property
    def global_batch_size(self) -> int:
        """Samples over all ranks."""
        return sum(plan.global_batch_size for plan in self.plans)

    @property
    def has_weight(self) -> bool:
        """Whether any sample of any rank has an example weight above 0; the same on all ranks."""
        return self.plans[0].total_weight > 0


class Pipeline:
    """Yields planned batches; a step calls `begin_next` and `send_next_ids` on its way.

    With `overlap`, `begin_next` reads the next batch, works out its requests and issues its counts,
    and `send_next_ids` issues its ids; both are to be called where something else is to be done
    meanwhile, by all ranks at the same place. Without, they do nothing, and a batch is planned when
    it is asked for. The plans are the same.

    Where tables are in host memory, `take` also sets out for the cold rows of the batch that comes
    `window` steps after the one it returns, so `window` batches are planned and staged beyond it.

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
        self._staged: deque[PlannedBatch] = deque()
        self._window = 0 if embeddings.host is None else embeddings.host.settings.window

    def take(self) -> PlannedBatch | None:
        """The next batch, completely planned, its rows on their way; None at the end."""
        while len(self._staged) <= self._window:
            if self._next is None:
                self._begin()
                self._send_ids()
            if self._next is None:
                break
            self._finish()
        return self._staged.popleft() if self._staged else None

    def begin_next(self) -> None:
        """Begins to plan the batch after those that are planned."""
        if self._overlap:
            assert self._next is None, "take the batch that was begun first"
            self._begin()

    def send_next_ids(self) -> None:
        """Sends that batch's ids; its counts have travelled in the meantime."""
        if self._overlap:
            self._send_ids()

    def replan(self) -> None:
        """Plans anew what was planned, between two steps, after the hot rows have changed.

        Called by all ranks, after `drop_staged`.
        """
        if self._next is not None:
            # Its ids were asked for by the old hot rows: what comes of it isn't used.
            self._staged.append(self._next.finish())
            self._next = None
        batches = [planned.batch for planned in self._staged]
        self._staged.clear()
        host = self._embeddings.host
        assert host is not None
        with host.uncounted():
            for batch in batches:
                with self._timer("plan"):
                    self._next = _PendingBatch(batch, self._embeddings, self._accumulate)
                self._send_ids()
                self._finish()

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

    def _finish(self) -> None:
        assert self._next is not None
        with self._timer("plan"):
            planned, self._next = self._next.finish(), None
            self._embeddings.stage(planned.plans)
            self._staged.append(planned)


class _PendingBatch:
    """A batch whose plans are under way."""

    def __init__(self, batch: Batch, embeddings: ShardedEmbeddings, accumulate: int) -> None:
        # Several ranks have local batches of different sizes but must issue equally many
        # collectives: some of their parts may be empty.
        one_process = embeddings.comm.world_size == 1
        if embeddings.splits_hot:
            order_B, num_hot = embeddings.hot_first(batch.ids)
            self._batch = batch.take(order_B)
            bounds = [0, num_hot, batch.batch_size]
            if one_process and num_hot in (0, batch.batch_size):
                bounds = [0, batch.batch_size]
        else:
            self._batch = batch
            num_parts = max(1, min(accumulate, batch.batch_size)) if one_process else accumulate
            bounds = [batch.batch_size * part // num_parts for part in range(num_parts + 1)]
        self._micro = list(_micro_batches(self._batch, bounds))
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


def _micro_batches(batch: Batch, bounds: list[int]) -> Iterator[Batch]:
    if len(bounds) == 2:
        yield batch
        return
    for start, stop in pairwise(bounds):
        yield batch.narrow(start, stop)


def weight_sum(batch: Batch) -> float:
    """Sum of the example weights of a batch; its size, where all are 1."""
    if batch.weight_B is None:
        return float(batch.batch_size)
    return float(batch.weight_B.sum(dtype=torch.float64))
