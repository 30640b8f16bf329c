"""`ShardedEmbeddings` over gloo: equal to the oracle; its counters to the network interface's."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from data.batch import JaggedIds
from embeddings import (
    FeatureConfig,
    IdOutOfRange,
    Plan,
    ProcessGroup,
    RowOptimizerConfig,
    TableConfig,
    sum_kv,
)
from embeddings.sockets import Sockets, connect_ranks
from tests.dist.worker_pool import WorkerPool, Workers
from tests.sharding_cases import (
    FEATURES,
    History,
    Model,
    assert_equal_runs,
    bounds_of_rank,
    build,
    draw_batches,
    draw_ids,
    gradient_of,
    part_of,
    plan_of,
    read_tables,
    train,
    train_reference,
)
from tests.thread_ranks import run_ranks

# Of the network that the reading process is in, unlike those of /sys.
INTERFACES = Path("/proc/self/net/dev")
T = TypeVar("T")


# ------------------------------------------------------------------------------ what workers run


def train_rank(
    rank: int, world_size: int, model: Model, plan: Plan, batches: list[JaggedIds]
) -> History:
    return train(ProcessGroup(), model, plan, batches)


def over_sockets() -> Sockets:
    comm = connect_ranks(20.0)
    assert isinstance(comm, Sockets), comm
    return comm


def train_over_sockets(
    rank: int, world_size: int, model: Model, plan: Plan, batches: list[JaggedIds]
) -> History:
    return train(over_sockets(), model, plan, batches)


def reduce_over_sockets(rank: int, world_size: int) -> list[torch.Tensor]:
    """Several sums under way at once, waited for in another order than issued."""
    comm = over_sockets()
    values = [torch.arange(5.0) * (rank + 1), torch.full((3,), 10.0**rank), torch.ones(0)]
    pending = [comm.all_reduce("dense", value) for value in values]
    return [pending[index].wait() for index in (1, 0, 2)]


def train_overlapped(
    rank: int, world_size: int, model: Model, plan: Plan, batches: list[JaggedIds], ahead: bool
) -> History:
    """fp32; with `ahead`, the next batch's counts and ids travel together with this one's rows and
    gradients."""
    comm = ProcessGroup()
    embeddings = build(comm, model, plan, torch.float32)
    history = History()

    def part(step: int) -> JaggedIds:
        ids = batches[step]
        return part_of(ids, *bounds_of_rank(ids.batch_size, step, rank, world_size))

    batch = embeddings.plan_batch(part(0))
    for step in range(len(batches)):
        has_next = step + 1 < len(batches)
        lookup = embeddings.begin_lookup(batch)
        following = embeddings.begin_plan(part(step + 1)) if ahead and has_next else None
        pooled_BS = lookup.finish()
        history.pooled.append((0, batch.batch_size, pooled_BS.detach().clone()))
        gradient_BS = gradient_of(pooled_BS, batch.global_batch_size)
        backward = embeddings.begin_backward(batch, gradient_BS, 0.05)
        if following is not None:
            following.send_ids()
        embeddings.apply(sum_kv([backward.finish()]), 0.05)
        if following is not None:
            batch = following.finish()
        elif has_next:
            batch = embeddings.plan_batch(part(step + 1))
    history.tables = read_tables(embeddings, model)
    return history


def plan_a_bad_id(rank: int, world_size: int, plan: Plan) -> str:
    """The last rank has a bad id; then a good batch, so that the ranks are seen to be in step."""
    embeddings = build(ProcessGroup(), Model(RowOptimizerConfig("sgd")), plan)
    values_L = torch.zeros(len(FEATURES), dtype=torch.int64)
    good = JaggedIds(values_L, torch.arange(len(FEATURES) + 1), len(FEATURES))
    bad_L = values_L.clone()
    bad_L[3] = 50 if rank == world_size - 1 else 0
    with pytest.raises(IdOutOfRange) as info:
        embeddings.plan_batch(JaggedIds(bad_L, good.offsets, len(FEATURES)))
    assert embeddings.plan_batch(good).global_batch_size == world_size
    return str(info.value)


@dataclass
class Traffic:
    """What went over the loopback interface while ranks communicated, and what one counted.

    Attributes:
        loopback_bytes: of all ranks.
        counted_bytes: of this rank.
    """

    loopback_bytes: int
    counted_bytes: int


def traffic_of_steps(
    rank: int, world_size: int, model: Model, plan: Plan, batches: list[JaggedIds]
) -> Traffic:
    comm = ProcessGroup()
    embeddings = build(comm, model, plan, torch.float32)

    def steps() -> None:
        for ids in batches:
            part = ids.narrow(*bounds_of_rank(ids.batch_size, 0, rank, world_size))
            batch = embeddings.plan_batch(part)
            gradient_BS = gradient_of(embeddings.lookup(batch), batch.global_batch_size)
            embeddings.apply(sum_kv([embeddings.backward(batch, gradient_BS, 0.1)]), 0.1)

    return _traffic(comm, steps)


def traffic_of_all_reduces(rank: int, world_size: int, num_values: int) -> Traffic:
    """Of 50 all-reduces of `num_values` fp32 each."""
    comm = ProcessGroup()

    def all_reduces() -> None:
        for _ in range(50):
            values = torch.full((num_values,), float(rank))
            comm.all_reduce("dense", values).wait()
            assert values[-1] == sum(range(world_size))

    return _traffic(comm, all_reduces)


def _traffic(comm: ProcessGroup, function: Callable[[], None]) -> Traffic:
    before = _read_counters(comm)
    function()
    after = _read_counters(comm)
    return Traffic(*(b - a for a, b in zip(before, after, strict=True)))


def _read_counters(comm: ProcessGroup) -> tuple[int, int]:
    """The fields of `Traffic` so far, read while no rank communicates."""
    comm.barrier()
    lines = [line.split() for line in INTERFACES.read_text().splitlines()]
    # Eight figures on what was received, then bytes sent.
    (loopback_bytes,) = (int(line[9]) for line in lines if line[0] == "lo:")
    comm.barrier()
    return loopback_bytes, sum(comm.counters.sent_bytes.values())


# ----------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize(
    ("world_size", "name", "exchange"),
    [(2, "rowwise_adagrad", "mixed"), (2, "adam", "pooled"), (4, "adagrad", "mixed")],
)
def test_10_steps_of_a_mixed_plan_equal_the_oracle(
    workers: Workers, world_size: int, name: str, exchange: str
) -> None:
    """Every layout in one plan, weighted bags, uneven and empty batches, fp64. What is counted is
    what ranks as threads count."""
    model = Model(RowOptimizerConfig(name, eps=1e-6, weight_decay=0.02))  # type: ignore[arg-type]
    plan = plan_of("mixed", world_size, exchange)
    batches = draw_batches(model, "weighted", 10)
    ranks = workers(world_size).run(train_rank, model, plan, batches)
    assert_equal_runs(ranks, train_reference(model, batches))
    threads = run_ranks(world_size, lambda comm: train(comm, model, plan, batches))
    for found, expected in zip(ranks, threads, strict=True):
        assert found.num_collectives == expected.num_collectives
        assert found.sent_bytes == expected.sent_bytes


@pytest.mark.parametrize("world_size", [2, 3])
def test_sockets_equal_the_collectives(workers: Workers, world_size: int) -> None:
    """As over a network; the bits, and what is counted, are those of loopback."""
    model = Model(RowOptimizerConfig("rowwise_adagrad", eps=1e-6))
    plan = plan_of("mixed", world_size, "mixed")
    batches = draw_batches(model, "weighted", 4)
    pool = workers(world_size)
    collectives = pool.run(train_rank, model, plan, batches)
    over_own = pool.run(train_over_sockets, model, plan, batches)
    assert_equal_runs(over_own, train_reference(model, batches))
    for found, expected in zip(over_own, collectives, strict=True):
        assert found.sent_bytes == expected.sent_bytes
        assert found.num_collectives == expected.num_collectives
    for found in pool.run(reduce_over_sockets):
        assert found[0].tolist() == [sum(10.0**rank for rank in range(world_size))] * 3
        weights = world_size * (world_size + 1) / 2
        assert found[1].tolist() == [weights * value for value in range(5)]
        assert found[2].numel() == 0


def test_overlapped_phases_and_a_second_run_give_the_same_bits(workers: Workers) -> None:
    model = Model(RowOptimizerConfig("rowwise_adagrad"))
    plan = plan_of("mixed", 2, "mixed")
    batches = draw_batches(model, "weighted", 10)
    runs = [
        workers(2).run(train_overlapped, model, plan, batches, ahead)
        for ahead in (False, True, False)
    ]
    for other in runs[1:]:
        for one, two in zip(runs[0], other, strict=True):
            for (*_, pooled_BS), (*_, again_BS) in zip(one.pooled, two.pooled, strict=True):
                assert torch.equal(pooled_BS, again_BS)
            for table, values in one.tables.items():
                assert all(torch.equal(values[name], two.tables[table][name]) for name in values)


def test_a_bad_id_of_one_rank_is_the_same_error_on_all(workers: Workers) -> None:
    texts = workers(4).run(plan_a_bad_id, plan_of("mixed", 4, "mixed"))
    assert len(set(texts)) == 1
    assert all(word in texts[0] for word in ("'item'", "id 50", "rank 3", "0 to 49"))


@pytest.mark.parametrize("world_size", [2, 4])
def test_counted_bytes_are_those_of_the_loopback_interface(world_size: int) -> None:
    """50 steps with row-wise, column-wise and replicated tables, and 50 all-reduces, which count
    2 (n-1)/n of their bytes per rank."""
    tables = (
        TableConfig("user", 4000, 64),
        TableConfig("item", 3000, 48),
        TableConfig("site", 2000, 32),
        TableConfig("hour", 20, 32),
    )
    layouts = ("row_wise", "column_wise", "replicated", "replicated")
    features = tuple(FeatureConfig(f"f_{t.name}", t.name) for t in tables)
    model = Model(RowOptimizerConfig("adagrad"), tables, features)
    generator = torch.Generator().manual_seed(3)
    batches = [draw_ids(model, 500 * world_size, "multi_hot", generator) for _ in range(50)]
    plans = []
    for exchange in ("kv", "pooled"):
        parts = [
            plan_of(layout, world_size, exchange, [table])
            for layout, table in zip(layouts, tables, strict=True)
        ]
        shards = tuple(shard for part in parts for shard in part.shards)
        plans.append(Plan(world_size, shards, {k: v for p in parts for k, v in p.exchange.items()}))

    def measure() -> int:
        with WorkerPool(world_size) as pool:
            for plan in plans:
                assert_agree(pool, traffic_of_steps, model, plan, batches)
            return assert_agree(pool, traffic_of_all_reduces, 60_000)

    counted_bytes = in_own_network(measure)
    assert counted_bytes == 50 * 2 * (world_size - 1) * 60_000 * 4


def assert_agree(pool: WorkerPool, function: Callable[..., Traffic], *args: object) -> int:
    """The bytes counted by all ranks, which are the interface's but for 3 % of packet headers.

    The interface also counts packets that are sent again because a rank on a busy machine was slow
    to acknowledge them. That only adds: the least of three runs is taken.
    """
    ratios: list[float] = []
    for _ in range(3):
        ranks = pool.run(function, *args)
        counted_bytes = sum(traffic.counted_bytes for traffic in ranks)
        ratios.append(ranks[0].loopback_bytes / counted_bytes)
        if 1 <= ratios[-1] < 1.03:
            return counted_bytes
    pytest.fail(f"bytes of the interface / counted: {ratios}")


def in_own_network(function: Callable[[], T]) -> T:
    """Calls it in a thread whose processes have a loopback interface that nobody else uses.

    Where that isn't allowed the test is skipped: other processes' bytes can't be told from ours.
    """
    clone_newnet, siocsifflags, iff_up = 0x40000000, 0x8914, 1

    def work() -> T:
        if ctypes.CDLL(None, use_errno=True).unshare(clone_newnet) != 0:
            pytest.skip(f"no network of one's own here: {os.strerror(ctypes.get_errno())}")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            fcntl.ioctl(control, siocsifflags, struct.pack("16sh14x", b"lo", iff_up))
        return function()

    if sys.platform != "linux":
        pytest.skip(f"{INTERFACES} is Linux's")
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(work).result()
