"""`Sockets` gives what gloo gives, whatever is under way at once, and tells which peer is lost; why
ranks can't be connected is told on all of them alike.

The thread that carries messages is tested here in this process, against plain sockets; ranks are
processes.
"""

from __future__ import annotations

import os
import random
import re
import socket
import struct
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from data.errors import UserError
from dlrm.build import communicator
from dlrm.config import LaunchConfig
from dlrm.heartbeat import NoHeartbeat
from dlrm.launch import WorkerContext
from dlrm.train import TrainTask, train_rank
from embeddings import PeerLost, ProcessGroup, sockets
from embeddings.communicator import Pending
from embeddings.socket_engine import RECEIVE, SEND, Message, SocketEngine, SocketError
from embeddings.sockets import Sockets, connect_ranks
from tests.commands import dlrm, read_result, tiny, without_plots
from tests.dist import train_entries
from tests.dist.test_shared_memory import (
    INTERFACE,
    assert_same_bits,
    draw,
    draw_splits,
    exchange,
    gloo_s_and_own,
    no_more_files,
    reduction,
)
from tests.dist.worker_pool import Workers

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "eventfd"), reason="built for Linux only"),
    pytest.mark.timeout(90),
]

# Longer than any wait of a test that passes; a fault shows by it within the pool's own limit.
TIMEOUT_S = 20.0
SHORT_S = 0.4
HEADER = struct.Struct("<qq")  # Number and bytes of a message.
GREETING = struct.Struct("<16sQ")
LOST = r"the connection is (closed|broken)"


# ------------------------------------------------------------------ one end of the connections

Engines = Callable[..., SocketEngine]


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection over loopback; each plain call on them has a limit."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname(), TIMEOUT_S)
        other, _ = listener.accept()
    other.settimeout(TIMEOUT_S)
    return one, other


@pytest.fixture
def plain() -> Iterator[list[socket.socket]]:
    """The other ends of an engine's sockets, by peer: filled by `engine`."""
    ends: list[socket.socket] = []
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
def engine(plain: list[socket.socket]) -> Iterator[Engines]:
    """Makes an engine with plain sockets at the other ends."""
    with ExitStack() as stack:

        def make(num_peers: int = 1) -> SocketEngine:
            pairs = [tcp_pair() for _ in range(num_peers)]
            plain.extend(theirs for _, theirs in pairs)
            made = SocketEngine([ours for ours, _ in pairs], timeout_s=TIMEOUT_S)
            stack.callback(made.close)
            return made

        yield make


def post(engine: SocketEngine, direction: int, values: Tensor, peer: int = 0) -> Message:
    message = engine.post(direction, peer, values)
    engine.start()
    return message


def message_of(number: int, values: Tensor) -> bytes:
    """As it goes over a connection."""
    return HEADER.pack(number, values.nbytes) + values.numpy().tobytes()


def read_exactly(connected: socket.socket, num_bytes: int) -> bytes:
    found = b""
    while len(found) < num_bytes:
        part = connected.recv(num_bytes - len(found))
        assert part, "the connection is closed"
        found += part
    return found


def reset(connected: socket.socket) -> None:
    """Closes it as a host does that doesn't know of it any more: what is under way is lost."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connected.close()


def held() -> tuple[int, list[str]]:
    """Open files and threads of this process, without what only a garbage collection would find."""
    return len(os.listdir("/proc/self/fd")), sorted(t.name for t in threading.enumerate())


def test_a_socket_that_does_not_tell_of_what_has_come_is_looked_at(
    plain: list[socket.socket],
) -> None:
    """As with old kernels, where a socket may never have as many bytes as it is to tell of."""
    one, other = tcp_pair()
    plain.append(other)
    ours = SocketEngine([one], timeout_s=TIMEOUT_S)
    sent = draw(5, torch.float64, 0)
    found = torch.empty_like(sent)
    message = post(ours, RECEIVE, found)
    awaited = (socket.SOL_SOCKET, socket.SO_RCVLOWAT)
    until_s = time.monotonic() + TIMEOUT_S
    while one.getsockopt(*awaited) != HEADER.size and time.monotonic() < until_s:
        pass
    one.setsockopt(*awaited, 1 << 20)
    other.sendall(message_of(0, sent))
    ours.wait([message])
    assert torch.equal(found, sent)
    ours.close()


def test_a_message_may_come_in_any_pieces(engine: Engines, plain: list[socket.socket]) -> None:
    """Also its header; empty ones in between."""
    ours = engine()
    sent = [draw(count, torch.float64, count) for count in (3, 0, 1, 0, 0, 7)]
    found = [torch.full_like(values, 77) for values in sent]
    messages = [post(ours, RECEIVE, values) for values in found]
    plain[0].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream = b"".join(message_of(number, values) for number, values in enumerate(sent))
    chooser = random.Random(0)
    while stream:
        size = chooser.randint(1, 11)
        plain[0].sendall(stream[:size])
        stream = stream[size:]
    ours.wait(messages)
    for values, expected in zip(found, sent, strict=True):
        assert_same_bits(values, expected)


def test_messages_that_come_before_they_are_posted_wait(
    engine: Engines, plain: list[socket.socket]
) -> None:
    """And those that are sent go in the order in which they are posted."""
    ours = engine()
    values = [draw(count, torch.int64, count) for count in (4, 0, 2)]
    plain[0].sendall(b"".join(message_of(number, one) for number, one in enumerate(values)))
    ours.wait([post(ours, SEND, one) for one in values])
    for number, one in enumerate(values):
        assert read_exactly(plain[0], HEADER.size + one.nbytes) == message_of(number, one)
    for one in values:
        found = torch.empty_like(one)
        ours.wait([post(ours, RECEIVE, found)])
        assert_same_bits(found, one)


def test_messages_larger_than_any_buffer_go_both_ways_at_once() -> None:
    """Neither end reads first. And there may be no timeout to speak of."""
    num_bytes = 96 << 20
    engines = [SocketEngine([end], timeout_s=1e9) for end in tcp_pair()]
    sent = [torch.arange(num_bytes // 8) * factor for factor in (3, 5)]
    found = [torch.zeros_like(values) for values in sent]
    try:
        messages = []
        for own, engine in enumerate(engines):
            posted = [
                engine.post(SEND, 0, sent[own]),
                engine.post(RECEIVE, 0, found[1 - own]),
                engine.post(RECEIVE, 0, torch.empty(0)),
                engine.post(SEND, 0, torch.empty(0)),
            ]
            messages.append(posted)
        for engine in engines:
            engine.start()
        for engine, posted in zip(engines, messages, strict=True):
            engine.wait(posted)
    finally:
        for engine in engines:
            engine.close()
    for values, expected in zip(found, sent, strict=True):
        assert torch.equal(values, expected)


@pytest.mark.parametrize("leave", [socket.socket.close, reset], ids=["closed", "reset"])
@pytest.mark.parametrize("sent", [0, 9, HEADER.size, HEADER.size + 11])
def test_a_peer_that_goes_amid_a_message_is_told_of(
    leave: Callable[[socket.socket], None],
    sent: int,
    engine: Engines,
    plain: list[socket.socket],
) -> None:
    ours = engine()
    found = torch.zeros(32, dtype=torch.uint8)
    message = post(ours, RECEIVE, found)
    plain[0].sendall(message_of(0, found)[:sent])
    leave(plain[0])
    with pytest.raises(SocketError, match=LOST) as caught:
        ours.wait([message])
    assert caught.value.peer == 0
    # Nor does what is posted later wait for the timeout.
    with pytest.raises(SocketError, match=LOST):
        ours.wait([post(ours, SEND, found)])


@pytest.mark.parametrize("leave", [socket.socket.close, reset], ids=["closed", "reset"])
def test_a_peer_that_goes_while_it_is_sent_to_is_told_of(
    leave: Callable[[socket.socket], None], engine: Engines, plain: list[socket.socket]
) -> None:
    """It has read a part, and more than the buffers take is under way."""
    ours = engine()
    message = post(ours, SEND, torch.zeros(96 << 20, dtype=torch.uint8))
    read_exactly(plain[0], 1 << 20)
    leave(plain[0])
    with pytest.raises(SocketError, match=LOST):
        ours.wait([message])


@pytest.mark.parametrize("leave", [socket.socket.close, reset], ids=["closed", "reset"])
def test_what_a_peer_sent_before_it_went_is_received(
    leave: Callable[[socket.socket], None], engine: Engines, plain: list[socket.socket]
) -> None:
    """As the last messages of a rank whose run is over."""
    ours = engine()
    sent = [draw(9, torch.float32, number) for number in range(2)]
    plain[0].sendall(b"".join(message_of(number, values) for number, values in enumerate(sent)))
    leave(plain[0])
    found = [torch.zeros_like(values) for values in sent]
    messages = [ours.post(RECEIVE, 0, values) for values in found]
    ours.start()
    ours.wait(messages)
    for values, expected in zip(found, sent, strict=True):
        assert_same_bits(values, expected)
    with pytest.raises(SocketError, match=LOST):
        ours.wait([post(ours, RECEIVE, torch.zeros(9))])


@pytest.mark.parametrize(("number", "num_bytes"), [(1, 8), (0, 9), (0, 7), (0, 0), (0, -1)])
def test_another_message_than_is_due_is_an_error(
    number: int, num_bytes: int, engine: Engines, plain: list[socket.socket]
) -> None:
    """And nothing is written for it."""
    ours = engine()
    found = torch.full((8,), 77, dtype=torch.uint8)
    message = post(ours, RECEIVE, found)
    plain[0].sendall(HEADER.pack(number, num_bytes) + bytes(9))
    with pytest.raises(SocketError, match="it sent another message than is due"):
        ours.wait([message])
    assert found.tolist() == [77] * 8


def test_a_silent_peer_is_told_of(engine: Engines, plain: list[socket.socket]) -> None:
    """Where some of what is waited for came, too."""
    ours = engine(2)
    values = torch.ones(3)
    messages = [post(ours, RECEIVE, torch.zeros(3), peer) for peer in range(2)]
    plain[0].sendall(message_of(0, values))
    ours.wait(messages[:1])
    ours._timeout_s = SHORT_S
    with pytest.raises(SocketError, match=f"nothing for {SHORT_S:g} s") as caught:
        ours.wait(messages)
    assert caught.value.peer == 1


def test_a_peer_that_is_gone_is_told_of_before_others_have_sent(
    engine: Engines, plain: list[socket.socket]
) -> None:
    ours = engine(3)
    messages = [post(ours, RECEIVE, torch.zeros(3), peer) for peer in range(3)]
    plain[1].close()
    with pytest.raises(SocketError, match=LOST) as caught:
        ours.wait(messages)
    assert caught.value.peer == 1
    # The connections to the others are as good as before.
    values = draw(3, torch.float32, 0)
    plain[2].sendall(message_of(0, values))
    ours.wait(messages[2:])


def test_memory_under_way_is_kept(engine: Engines, plain: list[socket.socket]) -> None:
    """The caller may let go of what it posted; it is let go of here when others are posted."""
    ours = engine()
    count = 1 << 20
    kept = torch.empty(0, dtype=torch.int64)
    released = []

    class Watched(torch.Tensor):
        def __del__(self) -> None:
            released.append(self.nbytes)

    values = torch.arange(count).as_subclass(Watched)
    message = post(ours, SEND, values)
    del values
    assert released == []
    expected = message_of(0, torch.arange(count))
    assert read_exactly(plain[0], len(expected)) == expected
    ours.wait([message])
    post(ours, SEND, kept)
    assert released == [count * 8]


@pytest.mark.parametrize("is_under_way", [False, True])
def test_close_leaves_no_file_and_no_thread(
    is_under_way: bool, engine: Engines, plain: list[socket.socket]
) -> None:
    before = held()
    ours = engine(2)
    assert held() != before
    if is_under_way:
        for peer in range(2):
            post(ours, SEND, torch.zeros(32 << 20, dtype=torch.uint8), peer)
            post(ours, RECEIVE, torch.zeros(9), peer)
        read_exactly(plain[0], 1000)
    ours.close()
    ours.close()
    for end in plain:
        end.close()
    assert held() == before


def test_a_fork_that_closes_its_copy_takes_nothing_away(
    engine: Engines, plain: list[socket.socket]
) -> None:
    """As a process that a rank forks does at its end."""
    ours = engine()
    found = torch.zeros(5)
    message = post(ours, RECEIVE, found)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Newer Pythons': a fork with threads.
        pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    values = draw(5, torch.float32, 0)
    plain[0].sendall(message_of(0, values))
    ours.wait([message])
    assert_same_bits(found, values)


def test_a_loop_that_can_not_be_compiled_is_an_error_at_once() -> None:
    """Not one of the thread's, for which all ranks would wait until the timeout."""
    before = held()
    one, other = tcp_pair()
    broken = patch("embeddings.socket_engine._carry", side_effect=TypeError("no such type"))
    with one, other, broken, pytest.raises(TypeError, match="no such type"):
        SocketEngine([one], timeout_s=TIMEOUT_S)
    assert held() == before


# ------------------------------------------------------------------------------ what workers run


def connect() -> Sockets:
    comm = connect_ranks(TIMEOUT_S)
    assert isinstance(comm, Sockets), comm
    return comm


def collectives(rank: int, world_size: int) -> dict[str, list[list[Tensor]]]:
    """See `gloo_s_and_own`."""
    return gloo_s_and_own(connect())


def many_at_once(rank: int, world_size: int, count: int) -> None:
    """All issued before the first is waited for, which the last ones are."""
    comm = connect()
    under_way: list[tuple[Pending, Tensor]] = []
    for number in range(count):
        if number % 3 == 0 and world_size == 2:
            under_way.append(reduction(comm, number, torch.float32, number % 7))
        else:
            splits = draw_splits(world_size, number, most=9)
            under_way.append(exchange(comm, number, torch.float32, splits))
    random.Random(rank).shuffle(under_way)
    for pending, expected in under_way:
        assert_same_bits(pending.wait(), expected)


def large_both_ways(rank: int, world_size: int, num_values: int) -> None:
    """Two at once, each of so many values for every rank."""
    comm = connect()
    under_way = []
    for step in (1, 2):
        send = torch.arange(num_values * world_size) * (10 * step + rank)
        recv = torch.zeros_like(send)
        splits = [num_values] * world_size
        under_way.append((step, comm.all_to_all("rows", send, splits, recv, splits)))
    for step, pending in reversed(under_way):
        of_ranks = pending.wait().view(world_size, num_values)
        for other in range(world_size):
            mine = torch.arange(num_values * rank, num_values * (rank + 1))
            assert torch.equal(of_ranks[other], mine * (10 * step + other))


def one_exchange(comm: Sockets, kind: str = "grads") -> Pending:
    values, splits = torch.ones(3 * comm.world_size), [3] * comm.world_size
    return comm.all_to_all(kind, values, splits, torch.zeros_like(values), splits)


def lose_a_peer(rank: int, world_size: int, how: str) -> tuple[str, list[str | None]]:
    """The last rank is gone or silent: what the others' wait says, and what they waited for."""
    comm, gloo = connect(), ProcessGroup()
    one_exchange(comm).wait()
    if how == "silent":
        # Not from the start: on a busy machine a rank that isn't silent may take longer.
        comm._engine._timeout_s = SHORT_S
    if rank == world_size - 1:
        gloo.barrier()
        if how == "reset":
            for connected in comm._engine._sockets:
                linger = struct.pack("ii", 1, 0)
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        if how != "silent":
            del comm  # Closes its sockets, as the kernel does for a process that has ended.
        gloo.barrier()
        gloo.barrier()
        return "", []
    waits: list[str | None] = []
    comm.on_wait = waits.append
    is_late = how == "another is late" and rank == 1
    pending = None if is_late or how == "gone before" else one_exchange(comm)
    gloo.barrier()
    gloo.barrier()
    if is_late:
        gloo.barrier()
    with pytest.raises(PeerLost) as caught:
        (pending or one_exchange(comm)).wait()
    if not is_late:
        gloo.barrier()
    return str(caught.value), waits


def post_other_sizes(rank: int, world_size: int) -> str:
    """Each rank takes a larger all-reduce than the one before it for the same; what it is told."""
    comm = connect()
    with pytest.raises(PeerLost) as caught:
        comm.all_reduce("dense", torch.ones(3 + rank)).wait()
    comm.barrier()
    return str(caught.value)


class Announced(ProcessGroup):
    """Does something when all addresses are known, and before anyone connects."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """As the class's."""
        gathered = super().all_gather_object(value)
        return self.on_addresses(gathered) if isinstance(value, tuple) else gathered

    def on_addresses(self, of_ranks: list[Any]) -> list[Any]:
        """Address and secret of every rank, as this one is to see them."""
        raise NotImplementedError


class Beset(Announced):
    """A stranger connects to rank 0 before rank 1 does."""

    does: str
    stranger: socket.socket | None = None

    def on_addresses(self, of_ranks: list[Any]) -> list[Any]:
        """As they are."""
        if self.rank == 1:
            says = {
                "says garbage": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
                "says a part": GREETING.pack(of_ranks[0][1], 1)[:-1],
                "says another secret": GREETING.pack(of_ranks[1][1], 1),
                "says no rank": GREETING.pack(of_ranks[0][1], 2),
                "says a huge rank": GREETING.pack(of_ranks[0][1], 2**64 - 1),
                "says rank 0": GREETING.pack(of_ranks[0][1], 0),
            }
            stranger = socket.create_connection(of_ranks[0][0], TIMEOUT_S)
            stranger.sendall(says.get(self.does, b""))
            if self.does == "closes":
                stranger.close()
            elif self.does == "resets":
                reset(stranger)
            elif self.does == "says a part":
                stranger.shutdown(socket.SHUT_WR)
            type(self).stranger = stranger
        return of_ranks


def join_with_a_stranger(rank: int, world_size: int, does: str) -> None:
    Beset.does = does
    with patch.object(sockets, "ProcessGroup", Beset):
        comm = connect()
    pending, expected = reduction(comm, 0, torch.float32, 9)
    assert_same_bits(pending.wait(), expected)
    if Beset.stranger is not None:
        with Beset.stranger as stranger:
            if stranger.fileno() >= 0:
                with suppress(ConnectionResetError):
                    assert stranger.recv(1) == b"", "it was told something"
        Beset.stranger = None


class Unreachable(Announced):
    """Rank 1 announces an address where nobody listens: only ranks 1 and 2 can't be connected."""

    address: Any

    def on_addresses(self, of_ranks: list[Any]) -> list[Any]:
        """With that of rank 1."""
        first, second, *others = of_ranks
        return [first, (self.address, second[1]), *others]


def connect_in_vain(rank: int, world_size: int, how: str) -> str:
    """What is said on every rank; nothing is left of it."""
    before = held()
    with ExitStack() as stack:
        if how == "a rank has no files left" and rank == 1:
            stack.enter_context(no_more_files())
        if how == "a rank names another interface" and rank == world_size - 1:
            os.environ[INTERFACE] = "dlrm7"
        if how == "a rank isn't on Linux" and rank == 1:
            stack.enter_context(patch.object(sockets, "sys", SimpleNamespace(platform="darwin")))
        if how == "a rank can't be reached":
            silent = stack.enter_context(socket.socket())
            silent.bind(("127.0.0.1", 0))
            addresses = ProcessGroup().all_gather_object(silent.getsockname())
            Unreachable.address = addresses[1]
            stack.enter_context(patch.object(sockets, "ProcessGroup", Unreachable))
            stack.enter_context(patch.object(sockets, "_LONGEST_CONNECT_S", SHORT_S))
        reason = connect_ranks(TIMEOUT_S)
        assert isinstance(reason, str)
        ProcessGroup().barrier()  # The other ends are closed, too.
    assert held() == before
    return reason


class Late(Announced):
    """Rank 0 was kept waiting until the addresses were there; then rank 1 is slow to connect."""

    waited_s = 0.0

    def on_addresses(self, of_ranks: list[Any]) -> list[Any]:
        """As they are."""
        if self.rank == 0:
            type(self).waited_s = 1000.0
        else:
            time.sleep(SHORT_S)
        return of_ranks


def connect_after_a_long_look_up(rank: int, world_size: int) -> None:
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + Late.waited_s)
    with patch.object(sockets, "ProcessGroup", Late), patch.object(sockets, "time", clock):
        connect()


def connect_by(rank: int, world_size: int, interface: str | None, master: str) -> list[str]:
    """The addresses at the other ends, or why there are none."""
    os.environ.pop(INTERFACE)
    if interface is not None:
        os.environ[INTERFACE] = interface
    os.environ["MASTER_ADDR"] = master
    comm = connect_ranks(TIMEOUT_S)
    if isinstance(comm, str):
        return [comm]
    return [connected.getpeername()[0] for connected in comm._engine._sockets]


def come_and_go(rank: int, world_size: int, count: int) -> None:
    """As runs in one process, one after another; nothing is left of them."""
    before = held()
    for number in range(count):
        comm = connect()
        pending, expected = exchange(comm, number, torch.float32, draw_splits(world_size, number))
        assert_same_bits(pending.wait(), expected)
        del comm, pending
    assert held() == before


def choose(
    rank: int, world_size: int, transport: str, interface: str
) -> tuple[str, list[str], list[str]]:
    """The communicator of a run, what its heartbeat was told, and warnings; or the error."""
    os.environ[INTERFACE] = interface
    beats: list[str] = []

    class Heartbeat(NoHeartbeat):
        def waiting(self, what: str | None) -> None:
            beats.append(str(what))

    context = WorkerContext(rank, world_size, rank, Heartbeat())
    launch = LaunchConfig(nproc=world_size, transport=transport, timeout_s=TIMEOUT_S)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            comm = communicator(context, launch)
        except UserError as error:
            return str(error), beats, []
    comm.all_reduce("dense", torch.ones(1)).wait()
    return type(comm).__name__, beats, [str(one.message) for one in warned]


def train_without_addresses(context: WorkerContext, task: TrainTask) -> None:
    """`train_rank`, where rank 1 can't listen."""
    is_bad = context.rank == 1
    error = patch.object(sockets, "_own_address", side_effect=OSError("no way"))
    with error if is_bad else nullcontext():
        train_rank(context, task)


# ---------------------------------------------------------------------------------- the values


@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives_equal_gloo_s(world_size: int, workers: Workers) -> None:
    """To the bit, and as counted; of one- and two-byte types, too."""
    for of_rank in workers(world_size).run(collectives):
        pairs = zip(of_rank["gloo"], of_rank["own"], strict=True)
        for number, ((theirs, _), (ours, expected)) in enumerate(pairs):
            assert_same_bits(ours, theirs)
            if number % 8 < 4 or world_size == 2:  # Else gloo adds in another order.
                assert_same_bits(ours, expected)


@pytest.mark.parametrize("world_size", [2, 3])
def test_more_than_a_queue_takes_may_be_under_way(world_size: int, workers: Workers) -> None:
    workers(world_size).run(many_at_once, 700)


def test_large_messages_of_three_ranks_arrive(workers: Workers) -> None:
    """16 MB from each to each, all at once: more than the buffers of the connections take."""
    workers(3).run(large_both_ways, 1 << 20)


def test_nothing_is_left_of_runs_one_after_another(workers: Workers) -> None:
    workers(3).run(come_and_go, 3)


# ------------------------------------------------------------------------------------ lost peers


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("gone before", LOST),
        ("gone", LOST),
        ("reset", LOST),
        ("another is late", LOST),
        ("silent", f"nothing for {SHORT_S:g} s"),
    ],
)
def test_a_lost_peer_is_named(how: str, words: str, workers: Workers) -> None:
    """What a rank waited for when it lost another stays for the launcher to see."""
    for rank, (text, waits) in enumerate(workers(3).run(lose_a_peer, how)[:2]):
        assert re.fullmatch(rf"rank {rank}, waiting for grads: rank 2: ({words})", text), text
        assert waits == ["grads"]


def test_ranks_that_post_other_sizes_are_told(workers: Workers) -> None:
    for rank, text in enumerate(workers(2).run(post_other_sizes)):
        assert text == (
            f"rank {rank}, waiting for dense: rank {1 - rank}: it sent another message than is "
            "due: the ranks don't run the same program"
        )


# ------------------------------------------------------------------------------------ connecting


@pytest.mark.parametrize(
    "does",
    [
        "closes",
        "resets",
        "is silent",
        "says garbage",
        "says a part",
        "says another secret",
        "says no rank",
        "says a huge rank",
        "says rank 0",
    ],
)
def test_a_stranger_does_not_take_a_place(does: str, workers: Workers) -> None:
    workers(2).run(join_with_a_stranger, does)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("a rank has no files left", r"rank 1 can't listen: \[Errno 24\] Too many open files"),
        ("a rank names another interface", r"rank 2 can't listen: \[Errno 19\] No such device"),
        ("a rank isn't on Linux", "it is built for Linux only"),
        ("a rank can't be reached", r"ranks 1 and 2 \(127.0.0.1:\d+\) can't be connected: .+"),
    ],
)
def test_all_ranks_are_told_alike_why_they_are_not_connected(
    how: str, words: str, workers: Workers
) -> None:
    reasons = workers(3).run(connect_in_vain, how)
    assert re.fullmatch(words, reasons[0])
    assert reasons == reasons[:1] * 3


def test_a_slow_name_server_leaves_time_to_connect(workers: Workers) -> None:
    workers(2).run(connect_after_a_long_look_up)


@pytest.mark.parametrize(
    ("interface", "master", "words"),
    [
        (None, "127.0.0.1", r"127\.0\.0\.1"),
        (None, "localhost", r"127\.0\.0\.1"),
        ("", "127.0.0.1", r"127\.0\.0\.1"),
        ("lo", "192.0.2.1", r"127\.0\.0\.1"),
        ("lo,dlrm7", "192.0.2.1", r"127\.0\.0\.1"),
        (None, "::1", r"rank 0 can't listen: .+"),
    ],
)
def test_the_interface_is_gloo_s_or_leads_to_the_master(
    interface: str | None, master: str, words: str, workers: Workers
) -> None:
    for found in workers(2).run(connect_by, interface, master):
        assert len(found) == 1
        assert re.fullmatch(words, found[0]), found


# ------------------------------------------------------------------------------------------- runs


@pytest.mark.parametrize(
    ("transport", "interface", "chosen"),
    # `lo,lo`: one that is asked for, so memory isn't shared.
    [("sockets", "lo", "Sockets"), ("auto", "lo,lo", "Sockets"), ("auto", "dlrm7", "ProcessGroup")],
)
def test_the_transport_is_chosen(
    transport: str, interface: str, chosen: str, workers: Workers
) -> None:
    """And the heartbeat is told of its waits, whichever it is. That gloo is used for want of
    sockets is told once."""
    warning = (
        "ranks exchange over gloo, which is slower than sockets of our own: rank 0 can't listen: "
        "[Errno 19] No such device (launch.transport=gloo asks for it)"
    )
    for rank, (name, beats, warned) in enumerate(workers(2).run(choose, transport, interface)):
        assert name == chosen
        assert beats == ["dense", "None"]
        assert warned == ([warning] if chosen == "ProcessGroup" and rank == 0 else [])


def test_sockets_that_can_not_be_had_are_the_user_s_to_mend(workers: Workers) -> None:
    for text, *_ in workers(2).run(choose, "sockets", "dlrm7"):
        assert text == (
            "launch.transport=sockets can't be had: rank 0 can't listen: [Errno 19] No such "
            "device; set launch.transport=auto"
        )


@pytest.fixture
def train(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    forked: None,
) -> Callable[..., tuple[int, dict[str, Any]]]:
    """The command with two ranks: its exit status and result.json."""
    without_plots(monkeypatch)

    def run(transport: str, *, worker: Any = train_rank) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr("dlrm.train.train_rank", worker)
        launch = ("launch.nproc=2", f"launch.transport={transport}", "sharding=row_wise")
        run_dir = tmp_path / f"run_{len(list(tmp_path.iterdir()))}"
        overrides = (*tiny(tmp_path_factory), *launch, "train.max_steps=6")
        status = dlrm("train", *overrides, f"hydra.run.dir={run_dir}")
        return status, read_result(run_dir)

    return run


@pytest.mark.smoke
def test_a_run_comes_to_the_model_of_shared_memory(
    train: Callable[..., tuple[int, dict[str, Any]]],
) -> None:
    """Two ranks: the same bits. And processes end with the thread at work."""
    (status, ours), (_, theirs) = train("sockets"), train("shared_memory")
    assert status == 0
    assert [result["comm"]["transport"] for result in (ours, theirs)] == [
        "sockets",
        "shared memory",
    ]
    assert ours["model_digest"] == theirs["model_digest"]
    for name in ("collectives_per_step", "bytes_sent_per_step"):
        assert ours["comm"][name] == theirs["comm"][name]


def test_a_run_without_the_sockets_it_asks_for_ends_with_status_2(
    train: Callable[..., tuple[int, dict[str, Any]]], capfd: pytest.CaptureFixture[str]
) -> None:
    status, result = train("sockets", worker=train_without_addresses)
    assert status == 2
    words = "launch.transport=sockets can't be had: rank 1 can't listen: no way"
    assert words in result["status"]
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert words in lines[0]


def test_a_killed_rank_of_a_run_is_named(
    train: Callable[..., tuple[int, dict[str, Any]]],
    tmp_path_factory: pytest.TempPathFactory,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """As soon as the kernel closes its sockets: nobody waits for launch.timeout_s."""
    pids = str(tmp_path_factory.mktemp("pids"))
    worker = partial(train_entries.train_with_fault, "SIGKILL", 1, pids)
    status, result = train("sockets", worker=worker)
    assert status == 1
    place = "rank 1 of 2 (step 3, phase backward) was killed by SIGKILL"
    assert place in result["status"]
    assert f"dlrm: {place}" in capfd.readouterr().err
