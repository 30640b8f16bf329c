"""`SharedMemory` gives what gloo gives, with few buffers, and tells of a lost peer."""

from __future__ import annotations

import os
import random
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch import Tensor

from data.batch import JaggedIds
from data.errors import UserError
from data.parquet import PreparedDataset
from dlrm.build import communicator
from dlrm.check import CheckTask, check_with, verdict
from dlrm.check_pass import PassResult
from dlrm.config import LaunchConfig
from dlrm.heartbeat import NoHeartbeat
from dlrm.launch import WorkerContext
from embeddings import PeerLost, Plan, ProcessGroup, RowOptimizerConfig
from embeddings.communicator import Communicator, Pending
from embeddings.shared_memory import (
    _MESSAGE,
    SharedMemory,
    _Peer,
    _place_here,
    why_not_shared,
)
from embeddings.shared_pool import Block, FileLimitError, SharedPool
from tests.check_cases import check_task, optimizers
from tests.commands import compose_config, read_result, tiny, write_visits
from tests.dist import train_entries
from tests.dist.test_exchange_gloo import Traffic, _traffic, in_own_network, train_rank
from tests.dist.worker_pool import WorkerPool, Workers
from tests.sharding_cases import (
    History,
    Model,
    assert_equal_runs,
    draw_batches,
    plan_of,
    train,
    train_reference,
)

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="built for Linux only")

# Longer than any wait of a test that passes; a fault shows by it within the pool's own limit.
TIMEOUT_S = 20.0
DTYPES = (
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)
INTERFACE = "GLOO_SOCKET_IFNAME"


# ------------------------------------------------------------------------------ what workers run


def draw(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Values of both signs and many magnitudes, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        return torch.randint(0, 100, (count,), generator=generator).to(dtype)
    exponents = torch.randint(-4, 5, (count,), generator=generator)
    return torch.ldexp(torch.randn(count, generator=generator), exponents).to(dtype)


def draw_splits(world_size: int, seed: int, most: int = 50) -> list[list[int]]:
    """Elements that each rank (first index) sends to each: one in three is 0, of one seed all."""
    chooser = random.Random(seed)
    return [
        [
            chooser.randint(1, most) * (chooser.random() < 2 / 3) * (seed > 0)
            for _ in range(world_size)
        ]
        for _ in range(world_size)
    ]


def exchange(
    comm: Communicator, number: int, dtype: torch.dtype, splits: list[list[int]]
) -> tuple[Pending, Tensor]:
    """An all-to-all under way, and what is to come of it."""
    world_size = comm.world_size
    # The values tell sender and receiver, so that a part in a wrong place shows.
    sent = [
        [
            draw(splits[a][b], dtype, (number * world_size + a) * world_size + b)
            for b in range(world_size)
        ]
        for a in range(world_size)
    ]
    num_in = [splits[rank][comm.rank] for rank in range(world_size)]
    recv = torch.full((sum(num_in),), 77, dtype=dtype)
    send = torch.cat(sent[comm.rank])
    pending = comm.all_to_all("rows", send, splits[comm.rank], recv, num_in)
    return pending, torch.cat([of_rank[comm.rank] for of_rank in sent])


def reduction(
    comm: Communicator, number: int, dtype: torch.dtype, size: int
) -> tuple[Pending, Tensor]:
    """An all-reduce under way, and the sum in the order of the ranks."""
    parts = [draw(size, dtype, number * comm.world_size + rank) for rank in range(comm.world_size)]
    expected = parts[0].clone()
    for part in parts[1:]:
        expected += part
    return comm.all_reduce("dense", parts[comm.rank].clone()), expected


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def collectives(rank: int, world_size: int) -> dict[str, list[list[Tensor]]]:
    """See `gloo_s_and_own`."""
    return gloo_s_and_own(SharedMemory(timeout_s=TIMEOUT_S))


def gloo_s_and_own(own: Communicator) -> dict[str, list[list[Tensor]]]:
    """The same ones over both: what each gave, and what was to come of it. Several at once, waited
    for in an order of each rank's own."""
    world_size = own.world_size
    found: dict[str, list[list[Tensor]]] = {}
    counters = []
    for name in ("gloo", "own"):
        comm = ProcessGroup() if name == "gloo" else own
        results: list[list[Tensor]] = []
        for number, dtype in enumerate(DTYPES):
            under_way = [
                exchange(comm, 10 * number + seed, dtype, draw_splits(world_size, seed))
                for seed in range(4)
            ]
            under_way += [
                reduction(comm, 10 * number + size, dtype, size) for size in (0, 1, 7, 40_000)
            ]
            order = list(range(len(under_way)))
            if name == "own":
                random.Random(own.rank).shuffle(order)
            for index in order:
                under_way[index][0].wait()
            results += [[pending.wait(), expected] for pending, expected in under_way]
        found[name] = results
        counters.append((comm.counters.num_collectives, comm.counters.sent_bytes))
    assert counters[0] == counters[1], "counted otherwise than over gloo"
    return found


@dataclass
class Held:
    """What a process holds of memory without a name.

    Attributes:
        num_files: open files.
        mapped_bytes: of this rank's buffers and the others'.
    """

    num_files: int
    mapped_bytes: int


def held() -> Held:
    """As the kernel tells it."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in maps if "/memfd:dlrm" in line]
    return Held(
        len(os.listdir("/proc/self/fd")),
        sum(int(stop, 16) - int(start, 16) for start, stop in ranges),
    )


def thousands(rank: int, world_size: int, count: int) -> list[Held]:
    """`count` collectives of all sizes, up to four under way, waited for in an order of each rank's
    own; what is held before, and after each thousand."""
    at_start = held()
    comm = SharedMemory(timeout_s=TIMEOUT_S)
    # Both of all ranks: the sizes. Of this one: which of those under way it waits for.
    sizes, waits = random.Random(1), random.Random(rank)
    under_way: list[tuple[Pending, Tensor]] = []
    issued: list[int] = []
    found = [at_start]
    for number in range(count):
        largest = 10 ** sizes.randint(0, 4)
        if sizes.random() < 0.7:
            splits = draw_splits(world_size, number, most=max(1, largest // world_size))
            under_way.append(exchange(comm, number, torch.float32, splits))
        else:
            under_way.append(reduction(comm, number, torch.float32, sizes.randint(0, largest)))
        issued.append(number)
        while len(under_way) > sizes.randint(0, 4):
            # In any order, but none stays for long.
            oldest = issued[0] < number - 6
            index = 0 if oldest else waits.randrange(len(under_way))
            issued.pop(index)
            pending, expected = under_way.pop(index)
            assert_same_bits(pending.wait(), expected)
        if number % 1000 == 999:
            found.append(held())
    for pending, expected in under_way:
        assert_same_bits(pending.wait(), expected)
    del comm, pending, under_way
    found.append(held())
    return found


def one_under_way_throughout(rank: int, world_size: int, count: int) -> None:
    """As an evaluation within an epoch, while the next batch's ids are under way: after the first
    few, nothing is opened or made any more."""
    comm = SharedMemory(timeout_s=TIMEOUT_S)
    early, ids = exchange(comm, 0, torch.int64, draw_splits(world_size, 1))

    def others(numbers: Sequence[int]) -> None:
        for number in numbers:
            pending, expected = exchange(comm, number, torch.float32, draw_splits(world_size, 2))
            assert_same_bits(pending.wait(), expected)

    others(range(1, 10))
    with patch.object(os, "memfd_create", side_effect=AssertionError("one more buffer")):
        others(range(10, count))
    assert_same_bits(early.wait(), ids)


def many_at_once(rank: int, world_size: int, count: int) -> None:
    """All issued before the first is waited for, as `train.accumulate` does with counts."""
    comm = SharedMemory(timeout_s=2.0)
    under_way = [reduction(comm, number, torch.float32, 9) for number in range(count)]
    for pending, expected in under_way:
        assert_same_bits(pending.wait(), expected)


def read_late(rank: int, world_size: int) -> None:
    """The last rank reads nothing until the others have issued and read all they can."""
    comm = SharedMemory(timeout_s=TIMEOUT_S)
    splits = draw_splits(world_size, 3, most=1000)

    def issue(numbers: Sequence[int]) -> Iterator[tuple[Pending, Tensor]]:
        for number in numbers:
            yield exchange(comm, number, torch.float32, splits)
            yield reduction(comm, number, torch.float32, 1000)

    def check(under_way: Sequence[tuple[Pending, Tensor]]) -> None:
        for pending, expected in under_way:
            assert_same_bits(pending.wait(), expected)

    if rank < world_size - 1:
        for one in issue(range(6)):
            check([one])
        comm.barrier()
        comm.barrier()
        return
    first = list(issue(range(3)))
    check(first[-1:])  # The last of them: those before it are still to be read.
    rest = list(issue(range(3, 6)))
    comm.barrier()  # The others have read all six, and written them.
    check([*reversed(first), *rest])
    comm.barrier()


def train_shared(
    rank: int, world_size: int, model: Model, plan: Plan, batches: list[JaggedIds]
) -> History:
    return train(SharedMemory(timeout_s=TIMEOUT_S), model, plan, batches)


def check_shared(rank: int, world_size: int, task: CheckTask) -> list[PassResult]:
    return check_with(SharedMemory(timeout_s=TIMEOUT_S), task)


def traffic_of_collectives(rank: int, world_size: int) -> Traffic:
    """Of 50 all-reduces and 50 all-to-alls of a quarter of a megabyte."""
    comm = SharedMemory(timeout_s=TIMEOUT_S)
    values = torch.ones(60_000)

    def steps() -> None:
        splits = [values.numel() // world_size] * world_size
        for _ in range(50):
            comm.all_reduce("dense", values.clone()).wait()
            comm.all_to_all("rows", values, splits, torch.empty_like(values), splits).wait()

    return _traffic(comm, steps)


def lose_a_peer(rank: int, world_size: int, how: str) -> tuple[str, list[str | None]]:
    """The last rank is gone or silent: what the others' wait says, and what they waited for."""
    comm = SharedMemory(timeout_s=0.5 if how == "silent" else TIMEOUT_S)
    comm.all_reduce("dense", torch.ones(3)).wait()
    gloo = ProcessGroup()
    if rank == world_size - 1:
        gloo.barrier()
        if how != "silent":
            del comm  # Closes its sockets, as the kernel does for a process that has ended.
        gloo.barrier()
        gloo.barrier()
        return "", []
    waits: list[str | None] = []
    comm.on_wait = waits.append
    if how == "gone before":
        gloo.barrier()
        gloo.barrier()
        with pytest.raises(PeerLost) as caught:
            comm.all_reduce("grads", torch.ones(3))
    else:
        pending = comm.all_reduce("grads", torch.ones(3))
        gloo.barrier()
        gloo.barrier()
        with pytest.raises(PeerLost) as caught:
            pending.wait()
    gloo.barrier()
    return str(caught.value), waits


# Connects, says something, tells that it has, and stays until it is told to go.
STRANGER = """
import contextlib, socket, sys
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect("\\0" + sys.argv[1])
if sys.argv[2] == "closes":
    connection.close()
elif sys.argv[2]:
    with contextlib.suppress(OSError):  # Turned away already.
        connection.send(bytes.fromhex(sys.argv[2]))
print("here", flush=True)
input()
"""


class Beset(SharedMemory):
    """A stranger, another process of this user, connects to rank 0 before rank 1 does."""

    does: str
    stranger: subprocess.Popen[str]

    def all_gather_object(self, value: Any) -> list[Any]:
        """As the class's; then rank 0's socket has its name, and rank 1 hasn't connected to it."""
        gathered = super().all_gather_object(value)
        name = re.search(r"dlrm-[0-9a-f]+", str(gathered[0]))
        if self.rank == 1 and name:
            command = [sys.executable, "-I", "-c", STRANGER, name[0], self.does]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            type(self).stranger = subprocess.Popen(command, text=True, **pipes)
            assert self.stranger.stdout is not None
            assert self.stranger.stdout.readline() == "here\n"
        return gathered


def join_with_a_stranger(rank: int, world_size: int, does: str) -> None:
    Beset.does = does
    try:
        comm = Beset(timeout_s=3.0)
        pending, expected = reduction(comm, 0, torch.float32, 9)
        assert_same_bits(pending.wait(), expected)
    finally:
        if rank == 1:
            with Beset.stranger as stranger:
                stranger.kill()


@contextmanager
def no_more_files() -> Iterator[None]:
    """No file can be opened, nor be received."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open("/dev/null", os.O_RDONLY)
    os.close(free)  # The lowest free number.
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def receive_without_room(rank: int, world_size: int) -> str:
    """Rank 1 can't open another file when values come that need a larger one than it has: what its
    wait says, or nothing where it gave the right values."""
    comm = SharedMemory(timeout_s=TIMEOUT_S)
    for number in range(4):
        reduction(comm, number, torch.float32, 9)[0].wait()
    # What is for rank 1 would lie within the smaller one, too.
    splits = [[0, 9, 400_000], [0, 0, 0], [0, 0, 0]]
    pending, expected = exchange(comm, 4, torch.float32, splits)
    comm.barrier()
    text = ""
    with no_more_files() if rank == 1 else nullcontext():
        try:
            assert_same_bits(pending.wait(), expected)
        except (OSError, PeerLost) as error:
            text = str(error)
    comm.barrier()
    return text


def many_in_few_files(rank: int, world_size: int, count: int) -> None:
    """As `many_at_once`, where a process may open few files more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (least + 32, limits[1]))
    try:
        many_at_once(rank, world_size, count)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def reasons(rank: int, world_size: int, how: str) -> str | None:
    """`why_not_shared` where the last rank is different."""
    if rank < world_size - 1 or how == "same":
        return why_not_shared()
    if how == "host":
        with patch.object(Path, "read_text", lambda path: "another\n"):
            return why_not_shared()
    if how == "unset":
        del os.environ[INTERFACE]
    else:
        os.environ[INTERFACE] = "dlrm7"
    return why_not_shared()


def choose(rank: int, world_size: int, transport: str, interface: str) -> tuple[str, list[str]]:
    """The communicator of a run, and what its heartbeat was told; or the error."""
    os.environ[INTERFACE] = interface
    beats: list[str] = []

    class Heartbeat(NoHeartbeat):
        def waiting(self, what: str | None) -> None:
            beats.append(str(what))

    context = WorkerContext(rank, world_size, rank, Heartbeat())
    launch = LaunchConfig(nproc=world_size, transport=transport, timeout_s=TIMEOUT_S)
    try:
        comm = communicator(context, launch)
    except UserError as error:
        return str(error), beats
    comm.all_reduce("dense", torch.ones(1)).wait()
    return type(comm).__name__, beats


# ---------------------------------------------------------------------------------- the values


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_collectives_equal_gloo_s(world_size: int, workers: Workers) -> None:
    """Of more than two ranks gloo adds in another order: there, the sums are of the ranks' order,
    so all ranks have the same bits."""
    for of_rank in workers(world_size).run(collectives):
        pairs = zip(of_rank["gloo"], of_rank["own"], strict=True)
        for number, ((theirs, _), (ours, expected)) in enumerate(pairs):
            assert_same_bits(ours, expected)
            is_exchange = number % 8 < 4
            if is_exchange or world_size == 2 or not ours.dtype.is_floating_point:
                assert_same_bits(ours, theirs)


def test_thousands_of_collectives_need_few_buffers(workers: Workers) -> None:
    """Four under way, none for longer than seven others; a rank's next collective tells what it has
    read. What is held goes with the communicator."""
    world_size, most = 3, 16
    for start, *found, end in workers(world_size).run(thousands, 3000):
        for one in found:
            # Two of each own buffer, one of each that another rank has, and the sockets.
            assert one.num_files - start.num_files <= (world_size + 1) * most + world_size
            assert one.mapped_bytes <= world_size * most * 1.5 * 40_000
        assert found[-1].num_files <= found[0].num_files + 2 * world_size
        assert end == start


def test_one_under_way_throughout_needs_no_buffers(workers: Workers) -> None:
    """A buffer that all have read is free, whatever older one is still to be read."""
    workers(2).run(one_under_way_throughout, 300)


def test_issuing_never_waits(workers: Workers) -> None:
    workers(2).run(many_at_once, 1000)


def test_f22_hundreds_under_way_need_few_files(workers: Workers) -> None:
    """Whatever `train.accumulate` is, the limit of open files (often 1,024) suffices."""
    workers(2).run(many_in_few_files, 1200)


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_a_rank_has_yet_to_read_is_not_overwritten(world_size: int, workers: Workers) -> None:
    workers(world_size).run(read_late)


# --------------------------------------------------------------------------------------- a run


@pytest.mark.parametrize(
    ("world_size", "layout", "exchange", "optimizer"),
    [
        (2, "row_wise", "kv", "adagrad"),
        (3, "table_wise", "pooled", "sgd"),
        (4, "column_wise", "kv", "rowwise_adagrad"),
        (2, "replicated", "kv", "adam"),
    ],
)
def test_training_equals_the_oracle_and_counts_as_over_gloo(
    world_size: int, layout: str, exchange: str, optimizer: str, workers: Workers
) -> None:
    model = Model(RowOptimizerConfig(optimizer, eps=1e-6))  # type: ignore[arg-type]
    plan = plan_of(layout, world_size, exchange)
    batches = draw_batches(model, "weighted", 7)
    pool = workers(world_size)
    ranks = pool.run(train_shared, model, plan, batches)
    assert_equal_runs(ranks, train_reference(model, batches))
    for found, expected in zip(ranks, pool.run(train_rank, model, plan, batches), strict=True):
        assert found.num_collectives == expected.num_collectives
        assert found.sent_bytes == expected.sent_bytes


def test_a_check_passes(workers: Workers, tmp_path: Path) -> None:
    visits: PreparedDataset = write_visits(tmp_path / "visits", 70)
    more = {"train": {"accumulate": 2}, "check": {"steps": 4}}
    task = check_task(visits, 3, "mixed", "mixed", optimizers("adagrad", clip_norm=0.2), more)
    results = workers(3).run(check_shared, task)
    verdict(task.config, results[0])
    assert len(results[0]) == 2


def test_values_do_not_go_through_the_network() -> None:
    """Only the barriers around them do."""

    def measure() -> list[Traffic]:
        with WorkerPool(2) as pool:
            return pool.run(traffic_of_collectives)

    found = in_own_network(measure)
    counted_bytes = sum(traffic.counted_bytes for traffic in found)
    assert counted_bytes == 2 * 50 * (240_000 + 120_000)
    assert found[0].loopback_bytes < 0.01 * counted_bytes


@pytest.mark.smoke
def test_a_run_comes_to_the_model_of_gloo(
    workers: Workers, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Two ranks: the same bits."""
    results = {}
    for transport in ("gloo", "shared_memory"):
        launch = ("launch.nproc=2", f"launch.transport={transport}", "sharding=row_wise")
        config = compose_config("train", *tiny(tmp_path_factory), *launch, "train.max_steps=8")
        folder = tmp_path / transport
        workers(2).run(train_entries.train_joined, config, folder)
        results[transport] = read_result(folder)
        assert results[transport]["status"] == "completed"
    ours, theirs = results["shared_memory"], results["gloo"]
    assert ours["model_digest"] == theirs["model_digest"]
    for name in ("collectives_per_step", "bytes_sent_per_step"):
        assert ours["comm"][name] == theirs["comm"][name]


# ------------------------------------------------------------------------------ lost, and strangers


@pytest.mark.parametrize(
    ("how", "words", "waits"),
    [
        ("gone before", r"\[Errno 32\] Broken pipe", []),
        ("gone", r"\[Errno 104\] Connection reset by peer|the connection is closed", ["grads"]),
        ("silent", r"nothing for 0\.5 s", ["grads"]),
    ],
)
def test_a_lost_peer_is_named(how: str, words: str, waits: list[str], workers: Workers) -> None:
    """What a rank waited for when it lost another stays for the launcher to see."""
    for rank, (text, waited) in enumerate(workers(3).run(lose_a_peer, how)[:2]):
        assert re.fullmatch(rf"rank {rank}, waiting for grads: rank 2: ({words})", text), text
        assert waited == waits


@pytest.mark.parametrize(
    "does",
    ["closes", "", "3f", "07000000", "01000000"],
    ids=["closes", "is silent", "says garbage", "says no rank", "says rank 1"],
)
def test_a_stranger_does_not_take_a_place(does: str, workers: Workers) -> None:
    workers(2).run(join_with_a_stranger, does)


def test_a_buffer_that_can_not_be_received_is_an_error(workers: Workers) -> None:
    assert "files" in workers(3).run(receive_without_room)[1]


@contextmanager
def lone_rank(world_size: int) -> Iterator[tuple[SharedMemory, dict[int, socket.socket]]]:
    """Rank 0 without a group, and the other ends of its connections."""
    comm = object.__new__(SharedMemory)
    comm.rank, comm.world_size, comm._timeout_s, comm._number = 0, world_size, 1.0, 0
    comm.on_wait = lambda what: None
    comm._pool, comm._peers = SharedPool(), {}
    ends = {}
    for peer in range(1, world_size):
        near, ends[peer] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        near.setblocking(False)
        comm._peers[peer] = _Peer(peer, near)
    yield comm, ends
    for peer, end in ends.items():
        end.close()
        comm._peers[peer].socket.close()


def fill(connected: socket.socket) -> None:
    """Leaves no room for a message."""
    with suppress(BlockingIOError):
        while True:
            connected.send(b"full")


def test_f22_who_can_not_take_a_file_blames_nobody_else() -> None:
    """Not the rank that it was telling something while its socket was full."""
    with lone_rank(3) as (comm, ends):
        fill(comm._peers[1].socket)
        ends[2].send(_MESSAGE.pack(1, 0, 0, 4, True))  # The kernel has left the file out.
        with pytest.raises(FileLimitError, match=r"files in this process: raise its limit"):
            comm._all_reduce("dense", torch.ones(1))


def test_f22_who_is_gone_is_blamed_while_another_s_socket_is_full() -> None:
    with lone_rank(3) as (comm, ends):
        fill(comm._peers[1].socket)
        ends[2].close()
        with pytest.raises(PeerLost, match="rank 0, waiting for dense: rank 2: "):
            comm._all_reduce("dense", torch.ones(1))


def test_f22_no_file_for_own_memory_names_the_limit() -> None:
    words = r"raise its limit \(ulimit -n, now \d+\)"
    with lone_rank(2) as (comm, _), no_more_files(), pytest.raises(FileLimitError, match=words):
        comm._all_reduce("dense", torch.ones(1))


def test_f23_a_sandbox_without_memfd_shares_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", Mock(side_effect=PermissionError(1, "not permitted")))
    assert _place_here() is None


def test_f22_blocks_are_taken_low_and_joined_when_given_back() -> None:
    """What was used lately is used again; nothing overlaps; pieces join, whatever the order."""
    pool = SharedPool()
    draw = random.Random(1)
    taken: list[Block] = []
    for _ in range(2000):
        if taken and draw.random() < 0.5:
            block = taken.pop(draw.randrange(len(taken)))
            assert bool((block.bytes(0, block.size) == id(block) % 251).all())
            pool.read_by_one(block)
        else:
            block = pool.take(draw.randint(0, 20_000))
            block.num_readers = 1
            block.bytes(0, block.size).fill_(id(block) % 251)
            taken.append(block)
    segments = pool._segments
    for block in taken:
        pool.read_by_one(block)
    assert [segment._free for segment in segments] == [[(0, len(s.bytes))] for s in segments]
    assert pool.take(9).start == 0


# ---------------------------------------------------------------------------------- when it is used


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("same", None),
        ("unset", None),
        ("interface", "GLOO_SOCKET_IFNAME asks for dlrm7"),
        ("host", "the ranks aren't on one host and in one network namespace"),
    ],
)
def test_why_not_shared_says_the_same_on_all_ranks(
    how: str, words: str | None, workers: Workers
) -> None:
    assert workers(3).run(reasons, how) == [words] * 3


@pytest.mark.parametrize(
    ("transport", "interface", "chosen"),
    [
        ("auto", "lo", "SharedMemory"),
        ("shared_memory", "lo", "SharedMemory"),
        ("gloo", "lo", "ProcessGroup"),
        ("gloo", "eth0", "ProcessGroup"),
    ],
)
def test_the_transport_is_chosen(
    transport: str, interface: str, chosen: str, workers: Workers
) -> None:
    """And the heartbeat is told of its waits, whichever it is."""
    for name, beats in workers(2).run(choose, transport, interface):
        assert name == chosen
        assert beats == ["dense", "None"]


def test_shared_memory_that_can_not_be_had_is_the_user_s_to_mend(workers: Workers) -> None:
    for text, _ in workers(2).run(choose, "shared_memory", "eth0"):
        assert text == (
            "launch.transport=shared_memory can't be had: GLOO_SOCKET_IFNAME asks for eth0; "
            "set launch.transport=auto"
        )
