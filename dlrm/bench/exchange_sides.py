"""This system's tables alone as a side, and what sending the same bytes takes at least."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from data.batch import Batch
from data.parquet import PreparedDataset
from dlrm.bench.exchange_steps import ExchangeTask, given_gradient
from dlrm.bench.measure import sent_figures
from dlrm.build import build_embeddings, build_tables, communicator
from dlrm.launch import WorkerContext
from embeddings.communicator import CommCounters, Communicator
from embeddings.sharded import ShardedEmbeddings


@contextmanager
def build_exchange(
    context: WorkerContext, task: ExchangeTask, dataset: PreparedDataset, batches: list[Batch]
) -> Iterator[DlrmExchange]:
    """See `exchange_steps.BuildExchange`."""
    embeddings = build_embeddings(
        task.config,
        dataset.manifest,
        plan=task.plan,
        comm=communicator(context, task.config.launch),
    )
    tables, features = build_tables(task.config, dataset.manifest)
    dims = {table.name: table.dim for table in tables}
    grad_BS = given_gradient(task.config, dims, features, batches[0])
    yield DlrmExchange(embeddings, task, batches, grad_BS)


class DlrmExchange:
    """The four calls, one after the other: there is nothing to hide them behind."""

    def __init__(
        self,
        embeddings: ShardedEmbeddings,
        task: ExchangeTask,
        batches: list[Batch],
        grad_BS: Tensor,
    ) -> None:
        self._embeddings, self._batches, self._grad_BS = embeddings, iter(batches), grad_BS
        self._lr = task.config.optim.sparse.lr
        self._num_steps = 0
        sharding = task.config.sharding
        if embeddings.comm.world_size > 1:
            how = f"sharding {sharding.layout}, exchange {sharding.exchange}, "
            how += f"over {embeddings.comm.transport}"
        else:
            how = "one process"
        self.note = f"backend {embeddings.backend}, {how}"

    def step(self) -> None:
        """See `measure.Steps`."""
        plan = self._embeddings.plan_batch(next(self._batches).ids)
        self._embeddings.lookup(plan)
        gradients = self._embeddings.backward(plan, self._grad_BS, self._lr)
        self._embeddings.apply(gradients, self._lr)
        self._num_steps += 1

    def begin_window(self) -> None:
        """See `measure.Steps`."""
        self._num_steps = 0
        self._embeddings.comm.counters = CommCounters()

    def figures(self) -> dict[str, Any]:
        """Bytes and collectives by kind, per step, mean over the ranks."""
        return sent_figures(self._embeddings.comm, self._num_steps)

    def pooled(self, batch: Batch) -> Tensor:
        """See `exchange_steps.ExchangeSide`."""
        plan = self._embeddings.plan_batch(batch.ids, training=False)
        return self._embeddings.lookup(plan, training=False)


@contextmanager
def build_floor(
    context: WorkerContext, task: ExchangeTask, dataset: PreparedDataset, batches: list[Batch]
) -> Iterator[AllToAllFloor]:
    """See `exchange_steps.BuildExchange`."""
    assert task.sent_bytes is not None
    yield AllToAllFloor(task.sent_bytes, communicator(context, task.config.launch))


class AllToAllFloor:
    """For each kind of bytes one all-to-all of as many, equally many to every other rank.

    Nothing is sent to oneself; what is sent is there before the clock starts.
    """

    def __init__(self, sent_bytes: dict[str, float], comm: Communicator) -> None:
        self._comm = comm
        others = comm.world_size - 1
        self._buffers: list[tuple[Tensor, Tensor, list[int]]] = []
        for num_bytes in sent_bytes.values():
            each = round(num_bytes / others)
            splits = [0 if other == comm.rank else each for other in range(comm.world_size)]
            send = torch.zeros(each * others, dtype=torch.uint8)
            self._buffers.append((send, torch.empty_like(send), splits))
        self._sent_bytes = sum(send.numel() for send, _, _ in self._buffers)
        num = len(self._buffers)
        self.note = (
            f"{num} all-to-all of {self._sent_bytes:,} bytes together, over {comm.transport}"
        )

    def step(self) -> None:
        """See `measure.Steps`."""
        for send, received, splits in self._buffers:
            self._comm.all_to_all("other", send, splits, received, splits).wait()

    def begin_window(self) -> None:
        """See `measure.Steps`."""

    def figures(self) -> dict[str, Any]:
        """Bytes of this rank's buffers per step."""
        return {"all_to_all_bytes": self._sent_bytes}

    def pooled(self, batch: Batch) -> Tensor | None:
        """There are no tables."""
        return None
