"""Runs with tables in host memory, for tests: batches planned and staged a window ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.batch import JaggedIds
from embeddings import (
    Communicator,
    FeatureConfig,
    Plan,
    RowOptimizerConfig,
    Shard,
    ShardedEmbeddings,
    TableConfig,
    sum_kv,
)
from embeddings.host.executor import Executor
from embeddings.host.host_tables import HostSettings
from embeddings.sharded import BatchPlan
from tests.sharding_cases import (
    SEED,
    History,
    Model,
    bounds_of_rank,
    draw_ids,
    gradient_of,
    learning_rate,
    part_of,
    plan_of,
    read_tables,
    train,
)


def host_plan(
    layout: str, world_size: int, tables: Sequence[TableConfig], on_device: Sequence[str] = ()
) -> Plan:
    """A plan of a layout whose tables are in host memory, but for replicas and those named."""
    plan = plan_of(layout, world_size, "kv", tables)
    stay = {t.name for t in tables if t.name in on_device or plan.is_replicated(t.name)}
    shards: list[Shard] = [
        shard if shard.table in stay else replace(shard, memory="host") for shard in plan.shards
    ]
    moved = Plan(world_size, tuple(shards), plan.exchange)
    moved.validate(tables)
    return moved


def first_rows(tables: Sequence[TableConfig], share: float) -> dict[str, np.ndarray]:
    """That share of every table's rows: the first, which `draw_ids` prefers."""
    return {t.name: np.arange(int(t.rows * share), dtype=np.int64) for t in tables}


def build_host(
    comm: Communicator,
    model: Model,
    plan: Plan,
    settings: HostSettings,
    executor: Executor | None,
    dtype: torch.dtype = torch.float64,
) -> ShardedEmbeddings:
    """This rank's tables, torch backend."""
    return ShardedEmbeddings(
        model.tables,
        model.features,
        model.optimizer,
        dtype=dtype,
        seed=SEED,
        plan=plan,
        comm=comm,
        backend="torch",
        host=settings,
        executor=executor,
    )


def train_host(
    comm: Communicator,
    model: Model,
    plan: Plan,
    batches: Sequence[JaggedIds],
    settings: HostSettings,
    hot: Mapping[str, np.ndarray],
    *,
    executor: Executor | None = None,
    dtype: torch.dtype = torch.float64,
    between: Callable[[int, ShardedEmbeddings], Any] = lambda step, embeddings: None,
    tamper: Callable[[ShardedEmbeddings], Any] = lambda embeddings: None,
) -> tuple[History, ShardedEmbeddings]:
    """One rank's part of a run with a window of `settings.window` staged steps.

    Args:
        between: called before every step.
        tamper: called once, before the first.
    """
    embeddings = build_host(comm, model, plan, settings, executor, dtype)
    assert embeddings.host is not None
    embeddings.host.choose_rows(hot)
    tamper(embeddings)
    history = History()
    staged: deque[tuple[int, int, Tensor, list[BatchPlan]]] = deque()
    upcoming = iter(enumerate(batches))

    def stage_next() -> None:
        for step, ids in upcoming:
            start, stop = bounds_of_rank(ids.batch_size, step, comm.rank, comm.world_size)
            part = part_of(ids, start, stop)
            # Under `hotline` in two parts, as the pipeline does: the wholly hot samples first.
            samples, num_hot = torch.arange(stop - start), stop - start
            if embeddings.splits_hot:
                samples, num_hot = embeddings.hot_first(part)
            parts = [samples[:num_hot], samples[num_hot:]] if embeddings.splits_hot else [samples]
            planned = [embeddings.plan_batch(part.take(samples_B)) for samples_B in parts]
            embeddings.stage(planned)
            staged.append((start, stop, samples, planned))
            return

    for step in range(len(batches)):
        between(step, embeddings)
        while len(staged) < settings.window + 1 and len(staged) < len(batches) - step:
            stage_next()
        start, stop, samples, planned = staged.popleft()
        num_samples = batches[step].batch_size
        pooled, gradients = [], []
        for plan_of_part in planned:
            pooled_BS = embeddings.lookup(plan_of_part)
            pooled.append(pooled_BS.detach().clone())
            gradient_BS = gradient_of(pooled_BS, num_samples)
            gradients.append(embeddings.backward(plan_of_part, gradient_BS, learning_rate(step)))
        pooled_BS = torch.empty_like(torch.cat(pooled))
        pooled_BS[samples] = torch.cat(pooled)
        history.pooled.append((start, stop, pooled_BS))
        embeddings.apply(sum_kv(gradients), learning_rate(step))
    history.tables = read_tables(embeddings, model)
    embeddings.close()
    return history, embeddings


def train_much_touched(comm: Communicator, hot_share: float | None, lookahead: int = 0) -> History:
    """A run in fp32 whose steps touch most rows on every rank, so that the gradients of replicas
    are summed as matrices.

    Args:
        comm: the ranks.
        hot_share: of each table's rows, in host memory; None: all tables in device memory.
        lookahead: 0: `gather`.
    """
    tables = (TableConfig("user", 7, 4), TableConfig("shop", 5, 3))
    features = (FeatureConfig("viewer", "user", "mean"), FeatureConfig("shop", "shop"))
    model = Model(RowOptimizerConfig("adagrad"), tables, features)
    generator = torch.Generator().manual_seed(1)
    batches = [draw_ids(model, 96, "multi_hot", generator) for _ in range(6)]
    on_device = [table.name for table in tables] if hot_share is None else ()
    plan = host_plan("row_wise", comm.world_size, tables, on_device)
    if hot_share is None:
        return train(comm, model, plan, batches, torch.float32)
    settings = HostSettings("lookahead" if lookahead else "gather", max(1, lookahead), 4)
    hot = first_rows(tables, hot_share)
    return train_host(comm, model, plan, batches, settings, hot, dtype=torch.float32)[0]


HOT_SHARES_AND_DEPTHS = ((None, 0), (0.0, 0), (0.5, 0), (1.0, 0), (0.5, 1), (1.0, 3))
"""Of `train_much_touched`; all come to the same bits."""
