"""Collectives over TCP connections of our own, for ranks on several hosts.

A message costs a few system calls on one thread that needs neither locks nor the interpreter. Over
gloo, posting a message waits for the thread that is at work on another, and a small exchange takes
several times as long (docs/benchmarks.md).
"""

from __future__ import annotations

import os
import platform
import secrets
import socket
import struct
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from embeddings.communicator import PeerLost, Pending, ProcessGroup
from embeddings.greetings import GREETING, SECRET_BYTES, accept_ranks
from embeddings.socket_engine import RECEIVE, SEND, Message, SocketEngine, SocketError

_BACKLOG = 128
_LONGEST_CONNECT_S = 20.0
_SIOCGIFADDR = 0x8915


def connect_ranks(timeout_s: float, group: dist.ProcessGroup | None = None) -> Sockets | str:
    """The ranks of a group over sockets, or in words why that can't be.

    Called by all ranks, with the same outcome on each: where one pair can't be connected, there are
    none.

    Args:
        timeout_s: of a collective; and, up to 20 s, of the connecting.
        group: the group; None for the default one.
    """
    backend = dist.get_backend(group)
    if backend != "gloo":
        return f"the ranks communicate through {backend}"
    comm = ProcessGroup(group)
    sockets: dict[int, socket.socket] = {}
    engine: SocketEngine | None = None
    reason = _why_not_here()
    if not any(comm.all_gather_object(reason)):
        reason = _connect(comm, sockets, min(timeout_s, _LONGEST_CONNECT_S))
        if len(sockets) == comm.world_size - 1:
            try:
                in_order = [sockets[peer] for peer in _peers(comm)]
                engine = SocketEngine(in_order, timeout_s=timeout_s)
            except Exception as error:  # Whatever it is, the other ranks are to know.
                reason = f"rank {comm.rank}: {type(error).__name__}: {error}"
    reasons = [text for text in comm.all_gather_object(reason) if text]
    if not reasons:
        assert engine is not None
        return Sockets(engine, group)
    if engine is not None:
        engine.close()
    for connected in sockets.values():
        connected.close()
    return str(reasons[0])


def _why_not_here() -> str | None:
    if sys.platform != "linux" or not hasattr(os, "eventfd"):
        return "it is built for Linux only"
    if platform.machine() != "x86_64":
        return f"it isn't built for {platform.machine()}"
    return None


def _peers(comm: ProcessGroup) -> list[int]:
    """The other ranks. Each begins with another one: not all send to the same one at once."""
    return [(comm.rank + step) % comm.world_size for step in range(1, comm.world_size)]


class Sockets(ProcessGroup):
    """The ranks of a gloo group, each connected to each by TCP; made by `connect_ranks`.

    Who owns what: values stay where the caller has them; a thread sends from there and receives
    there (`SocketEngine`).

    Phases of a collective: issued, its messages are posted, receives first, and the thread carries
    them both ways at once while the caller goes on; waited for, they are there.

    Collectives, per rank: an all-to-all is a message to and from each other rank, also where it is
    empty. An all-reduce of two ranks is one of all values both ways, and a sum: as many bytes as a
    ring takes, and its bits. Of more ranks it is gloo's. Objects and barriers go through gloo.

    Args:
        engine: with a socket to each other rank, in the order of `_peers`.
        group: the group; None for the default one.

    Raises:
        PeerLost: by any wait, where another rank is gone, or what it sends isn't there within the
            engine's `timeout_s`.
    """

    def __init__(self, engine: SocketEngine, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(group)
        self.transport = "sockets"
        self._place_of_peer = {peer: place for place, peer in enumerate(_peers(self))}
        self._engine = engine
        weakref.finalize(self, engine.close)

    def _all_to_all(
        self,
        kind: str,
        send: Tensor,
        send_splits: Sequence[int],
        recv: Tensor,
        recv_splits: Sequence[int],
    ) -> Pending:
        outgoing, incoming = send.split(list(send_splits)), recv.split(list(recv_splits))
        pending = self._exchange(kind, outgoing, incoming, recv)
        incoming[self.rank].copy_(outgoing[self.rank])
        return pending

    def _all_reduce(self, kind: str, values: Tensor) -> Pending:
        if self.world_size > 2:
            return super()._all_reduce(kind, values)
        received = torch.empty_like(values)
        exchanged = self._exchange(kind, [values, values], [received, received], values)

        def finish() -> None:
            exchanged.wait()
            values.add_(received)

        return Pending(values, finish)

    def _exchange(
        self, kind: str, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], values: Tensor
    ) -> Pending:
        """Posts a message from and to every other rank."""
        posted: list[Message] = []
        with self._blames(kind):
            for direction, parts in ((RECEIVE, incoming), (SEND, outgoing)):
                for peer, place in self._place_of_peer.items():
                    posted.append(self._engine.post(direction, place, parts[peer]))
        self._engine.start()

        def finish() -> None:
            self.on_wait(kind)
            with self._blames(kind):
                self._engine.wait(posted)
            self.on_wait(None)

        return Pending(values, finish)

    @contextmanager
    def _blames(self, kind: str) -> Iterator[None]:
        """Makes `PeerLost` of a socket's error, which names the other rank."""
        try:
            yield
        except SocketError as error:
            # `on_wait` isn't reset: what this rank waited for is what the launcher is to see.
            peer = _peers(self)[error.peer]
            raise PeerLost(f"rank {self.rank}, waiting for {kind}: rank {peer}: {error}") from error


def _connect(comm: ProcessGroup, sockets: dict[int, socket.socket], limit_s: float) -> str | None:
    """A connection to every other rank: each connects to those before it. What can't say the run's
    secret is turned away. Returns what went wrong."""
    reason: str | None = None
    listener: socket.socket | None = None
    try:
        listener = socket.create_server((_own_address(), 0), backlog=_BACKLOG)
    except (OSError, UnicodeError) as error:
        reason = f"rank {comm.rank} can't listen: {error}"
    with listener or nullcontext():
        address = None if listener is None else listener.getsockname()[:2]
        of_ranks = comm.all_gather_object((address, secrets.token_bytes(SECRET_BYTES)))
        if listener is None or any(address is None for address, _ in of_ranks):
            return reason
        secret = of_ranks[0][1]
        # From here: a rank may have waited for a name server.
        until_s = time.monotonic() + limit_s
        peer = 0
        try:
            for peer in range(comm.rank):
                left_s = max(0.1, until_s - time.monotonic())
                sockets[peer] = socket.create_connection(of_ranks[peer][0], left_s)
                sockets[peer].sendall(GREETING.pack(secret, comm.rank))
            later = set(range(comm.rank + 1, comm.world_size))
            peer = comm.rank
            accept_ranks(listener, secret, later, sockets, lambda: until_s - time.monotonic())
        except OSError as error:
            if peer == comm.rank:
                peer = min(later - sockets.keys())
            host, port = of_ranks[peer][0]
            return f"ranks {comm.rank} and {peer} ({host}:{port}) can't be connected: {error}"
    return None


def _own_address() -> str:
    """Where the other ranks reach this one: on the interface that GLOO_SOCKET_IFNAME names, else on
    that which leads to MASTER_ADDR.

    Raises:
        OSError: where there is none.
    """
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
    if interfaces:
        return _address_of(interfaces.split(",")[0])
    master = os.environ.get("MASTER_ADDR") or socket.gethostname()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 1))  # Sends nothing; it only chooses a way.
        address: str = probe.getsockname()[0]
    return address


def _address_of(interface: str) -> str:
    """The IPv4 address of a network interface."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("256s", interface.encode()[:15])
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
    return socket.inet_ntoa(answer[20:24])
