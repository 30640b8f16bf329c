"""Collectives of ranks on one host: values in memory that they share, messages between pairs.

Over loopback, gloo copies values into the kernel and out of it, on threads of its own that take the
cores from the ranks. Here a rank writes what it sends into memory that the others map, tells each
of them by a short message on a Unix socket, and reads what they wrote when it waits.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from embeddings.awake_clock import LOOK_S, AwakeClock
from embeddings.communicator import PeerLost, Pending, ProcessGroup
from embeddings.shared_pool import Block, FileLimitError, SharedPool, map_file

# Number of the collective; segment, first byte and number of bytes of the values; whether the
# segment's file comes along, as it does where it is new. Then, eight bytes each, the numbers of
# collectives of the receiver's that the sender has read since its last message.
_MESSAGE = struct.Struct("<QIQQ?")
_NUMBER_BYTES = 8
_MOST_READ = 128
_MOST_BYTES = _MESSAGE.size + _MOST_READ * _NUMBER_BYTES
_CREDENTIALS = struct.Struct("iII")
_ALIGN_BYTES = 64
_BACKLOG = 128
_LONGEST_ACCEPT_S = 3600.0  # Milliseconds are counted in 31 bits.


def why_not_shared(group: dist.ProcessGroup | None = None) -> str | None:
    """Why the ranks of a group can't share memory or aren't meant to; None where they can and are.

    Called by all ranks, with the same result for each. They must communicate through gloo, be on
    one host and in one network namespace; and GLOO_SOCKET_IFNAME, where it is set, must be `lo`, as
    the launcher sets it: another interface means that values are to travel over that.
    """
    backend = dist.get_backend(group)
    if backend != "gloo":
        return f"the ranks communicate through {backend}"
    place = _place_here()
    of_ranks: list[Any] = [None] * dist.get_world_size(group)
    asked_here = os.environ.get("GLOO_SOCKET_IFNAME")
    dist.all_gather_object(of_ranks, (asked_here, place), group=group)
    asked = sorted({interface for interface, _ in of_ranks} - {None, "lo"})
    if asked:
        return f"GLOO_SOCKET_IFNAME asks for {' and '.join(asked)}"
    if not all(place for _, place in of_ranks):
        return "it is built for Linux, with /proc and memfd_create, only"
    if len({place for _, place in of_ranks}) > 1:
        return "the ranks aren't on one host and in one network namespace"
    return None


def _place_here() -> tuple[str, ...] | None:
    """What only processes of one host and in the same namespaces have in common; None where this
    isn't known."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        os.close(os.memfd_create("dlrm-try", os.MFD_CLOEXEC))  # A sandbox may forbid it.
        namespaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("net", "pid")]
        return Path("/proc/sys/kernel/random/boot_id").read_text(), *namespaces
    except OSError:
        return None


class SharedMemory(ProcessGroup):
    """The ranks of a gloo group that are on one host; see `why_not_shared`.

    Who owns what: a rank owns the memory that it sends from, blocks of a few files that the others
    map (`SharedPool`). A block that all have read is used again.

    Phases of a collective: once issued, its values are in shared memory and every other rank has a
    message; waited for, they are read from there. In between nothing runs, and the other ranks
    needn't be waited for longer than until they have issued it too. Issuing waits only for a socket
    that is full of messages (some 70), and takes those that have come meanwhile.

    Collectives, per rank: of an all-to-all, each value is written once and read once. An all-reduce
    of `n` values writes them, reads the others' `(W-1) n`, and adds in the order of the ranks, so
    that all get the same bits; of two ranks these are gloo's. What is counted is what a network
    would have carried. Objects and barriers go through gloo.

    Args:
        group: the group; None for the default one.
        timeout_s: see `PeerLost`.

    Raises:
        PeerLost: by any wait, where another rank is gone, or silent for longer than `timeout_s`
            (of time in which this process wasn't stopped).
        FileLimitError: this process may have too few open files.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout_s: float) -> None:
        super().__init__(group)
        assert self.world_size > 1, "one process has nobody to share with"
        self.transport = "shared memory"
        self._timeout_s = timeout_s
        self._number = 0
        self._pool = SharedPool()
        self._peers = self._connect()
        weakref.finalize(self, _close_all, [peer.socket for peer in self._peers.values()])

    def _all_to_all(
        self,
        kind: str,
        send: Tensor,
        send_splits: Sequence[int],
        recv: Tensor,
        recv_splits: Sequence[int],
    ) -> Pending:
        outgoing, incoming = send.split(list(send_splits)), recv.split(list(recv_splits))
        number = self._publish(kind, [((peer,), outgoing[peer]) for peer in self._peers])
        incoming[self.rank].copy_(outgoing[self.rank])

        def read() -> None:
            self._await(number)
            for peer in self._peers:
                incoming[peer].copy_(self._receive(peer, number, incoming[peer]))

        return self._pending(kind, number, recv, read)

    def _all_reduce(self, kind: str, values: Tensor) -> Pending:
        number = self._publish(kind, [(tuple(self._peers), values)])

        def read() -> None:
            self._await(number)
            parts = [
                values if rank == self.rank else self._receive(rank, number, values)
                for rank in range(self.world_size)
            ]
            if len(parts) == 2:
                torch.add(parts[0], parts[1], out=values)
                return
            total = parts[0] + parts[1]
            for part in parts[2:]:
                total += part
            values.copy_(total)

        return self._pending(kind, number, values, read)

    def _all_reduce_in_order(self, kind: str, values: Tensor) -> Pending:
        return self._all_reduce(kind, values)  # Which sums in the order of the ranks.

    def _publish(self, kind: str, parts: Sequence[tuple[tuple[int, ...], Tensor]]) -> int:
        """Writes each part and tells the ranks that it is for; returns the collective's number."""
        self._number += 1
        sizes = [-(-part.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES for _, part in parts]
        starts = list(accumulate(sizes, initial=0))
        block = self._pool.take(starts[-1])
        block.num_readers = len(self._peers)
        for start, (peers, part) in zip(starts, parts, strict=False):
            if part.numel():
                block.bytes(start, part.nbytes).view(part.dtype).copy_(part)
            for peer in peers:
                self._tell(kind, self._peers[peer], block, start, part.nbytes)
        return self._number

    def _tell(self, kind: str, peer: _Peer, block: Block, start: int, size: int) -> None:
        """Tells another rank where its values lie. While its socket is full, takes what the others
        have told: they may be waiting for that."""
        clock = AwakeClock()
        try:
            while not peer.tell(self._number, block, start, size):
                self._poll(list(self._peers.values()), clock, full=peer)
                for other in self._peers.values():
                    self._take_message(other)
        except _PeerError as error:
            raise self._lost_peer(kind, error.peer, error) from error

    def _take_message(self, peer: _Peer) -> bool:
        """Takes a rank's next message; False where none has come."""
        read = peer.take_message()
        if read is None:
            return False
        for block in read:
            self._pool.read_by_one(block)
        return True

    def _await(self, number: int) -> None:
        """Until every other rank has told of its values for a collective.

        Raises:
            _PeerError: of the first that is found to be gone, whichever are waited for besides; or
                of one that is silent.
        """
        clock = AwakeClock()
        missing = list(self._peers.values())
        while True:
            missing = [peer for peer in missing if not self._has_told(peer, number)]
            if not missing:
                return
            self._poll(missing, clock)

    def _has_told(self, peer: _Peer, number: int) -> bool:
        """Whether a rank's values of a collective are there, by what has come so far."""
        while not peer.has_arrived(number):
            if not self._take_message(peer):
                return False
        return True

    def _poll(
        self, peers: Sequence[_Peer], clock: AwakeClock, *, full: _Peer | None = None
    ) -> None:
        """Until one of the peers has sent something, or what is sent to `full` may be taken.

        Raises:
            _PeerError: none did before the clock, which began with the wait, was at `timeout_s`.
        """
        ready = select.poll()
        for peer in peers:
            ready.register(peer.socket, select.POLLIN)
        if full is not None:
            ready.register(full.socket, select.POLLIN | select.POLLOUT)
        while True:
            left_s = self._timeout_s - clock()
            if ready.poll(max(0.0, min(LOOK_S, left_s)) * 1e3):
                return
            if left_s <= 0:
                silent = full if full is not None else peers[0]
                raise _PeerError(silent.rank, f"nothing for {self._timeout_s:g} s")

    def _receive(self, peer: int, number: int, like: Tensor) -> Tensor:
        """The values that another rank has for this one, where they lie."""
        values = self._peers[peer].take_values(number)
        if values.numel() != like.nbytes:
            text = f"{values.numel()} bytes came where {like.nbytes} were awaited"
            raise _PeerError(peer, text)
        return values.view(like.dtype).view(like.shape)

    def _pending(self, kind: str, number: int, values: Tensor, read: Callable[[], None]) -> Pending:
        def finish() -> None:
            self.on_wait(kind)
            try:
                read()
            except _PeerError as error:
                # `on_wait` isn't reset: what this rank waited for is what the launcher is to see.
                raise self._lost_peer(kind, error.peer, error) from error
            self.on_wait(None)
            for peer in self._peers.values():
                peer.have_read(number)

        return Pending(values, finish)

    def _lost_peer(self, kind: str, peer: int, error: Exception) -> PeerLost:
        return PeerLost(f"rank {self.rank}, waiting for {kind}: rank {peer}: {error}")

    def _connect(self) -> dict[int, _Peer]:
        """A socket to every other rank."""
        sockets: dict[int, socket.socket] = {}
        try:
            self._open_sockets(sockets)
        except OSError as error:
            _close_all(list(sockets.values()))
            missing = [r for r in range(self.world_size) if r not in (self.rank, *sockets)]
            raise PeerLost(
                f"rank {self.rank}, waiting for the connections of ranks {missing}: {error}"
            ) from error
        # Each rank begins with another one: not all read what the same one wrote.
        order = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
        return {rank: _Peer(rank, sockets[rank]) for rank in order}

    def _open_sockets(self, sockets: dict[int, socket.socket]) -> None:
        """Each rank connects to those before it, who know it by its pid; what else connects is
        turned away."""
        name = f"\0dlrm-{uuid.uuid4().hex}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(name)
            listener.listen(_BACKLOG)
            of_ranks = self.all_gather_object((name, os.getpid()))
            rank_of_pid = {pid: rank for rank, (_, pid) in enumerate(of_ranks) if rank > self.rank}
            for rank in range(self.rank):
                sockets[rank] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                sockets[rank].connect(of_ranks[rank][0])
            until_s = time.monotonic() + self._timeout_s  # For all, whoever else connects.
            while len(sockets) < self.world_size - 1:
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError("timed out")
                listener.settimeout(min(left_s, _LONGEST_ACCEPT_S))
                connected, _ = listener.accept()
                accepted = rank_of_pid.pop(_pid_of(connected), None)
                if accepted is None:
                    connected.close()
                else:
                    sockets[accepted] = connected
        for connected in sockets.values():
            connected.setblocking(False)


class _PeerError(Exception):
    """Another rank is gone or silent."""

    def __init__(self, peer: int, text: str) -> None:
        super().__init__(text)
        self.peer = peer


class _Peer:
    """The connection to one other rank.

    Attributes:
        socket: messages to and from it.
        unread: by the number of the collective, the blocks with values that it has yet to read.
    """

    def __init__(self, rank: int, connected: socket.socket) -> None:
        self.rank, self.socket = rank, connected
        self.unread: dict[int, Block] = {}
        self._mapped: dict[int, Tensor] = {}
        self._arrived: dict[int, Tensor] = {}
        self._have_read: list[int] = []

    def have_read(self, number: int) -> None:
        """This rank has read its values of a collective; the next message says so."""
        self._have_read.append(number)

    def tell(self, number: int, block: Block, start: int, size: int) -> bool:
        """Tells it where the values of a collective lie in a block; False where its socket is full.

        Raises:
            _PeerError: it is gone.
            OSError: for what this process lacks.
        """
        segment = block.segment
        is_new = self.rank not in segment.known_to
        told = self._have_read[:_MOST_READ]
        message = _MESSAGE.pack(number, segment.number, block.start + start, size, is_new)
        message += struct.pack(f"<{len(told)}Q", *told)
        files = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", segment.file))]
        try:
            self.socket.sendmsg([message], files if is_new else [])
        except BlockingIOError:
            return False
        except ConnectionError as error:
            raise _PeerError(self.rank, str(error)) from error
        del self._have_read[: len(told)]
        self.unread[number] = block
        segment.known_to.add(self.rank)
        return True

    def has_arrived(self, number: int) -> bool:
        """Whether it has told of its values of a collective."""
        return number in self._arrived

    def take_values(self, number: int) -> Tensor:
        """Those of a collective that it has told of, uint8."""
        return self._arrived.pop(number)

    def take_message(self) -> list[Block] | None:
        """Takes the next one; the blocks that it says were read, or None where none has come.

        Raises:
            _PeerError: it is gone.
            FileLimitError: this process can't take the file that comes along.
        """
        try:
            message, files = self._next_message()
        except BlockingIOError:
            return None
        except OSError as error:
            raise _PeerError(self.rank, str(error)) from error
        if not message:
            raise _PeerError(self.rank, "the connection is closed")
        number, segment, start, size, is_new = _MESSAGE.unpack_from(message)
        were_read = struct.iter_unpack("<Q", message[_MESSAGE.size :])
        read = [self.unread.pop(earlier) for (earlier,) in were_read]
        if is_new and not files:
            raise FileLimitError  # The kernel leaves a file out where there may be no more.
        for file in files:
            try:
                self._mapped[segment] = map_file(file)
            finally:
                os.close(file)
        self._arrived[number] = self._mapped[segment][start : start + size]
        return read

    def _next_message(self) -> tuple[bytes, list[int]]:
        for was_reset in (False, True):
            try:
                message, files, _, _ = socket.recv_fds(self.socket, _MOST_BYTES, 1)
                return message, files
            except ConnectionResetError:
                # Told once, before what the other end sent when it was still there.
                if was_reset:
                    raise
        raise AssertionError("unreachable")


def _pid_of(connected: socket.socket) -> int:
    """The process at the other end."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid: int = _CREDENTIALS.unpack(credentials)[0]
    return pid


def _close_all(sockets: Sequence[socket.socket]) -> None:
    for connected in sockets:
        connected.close()
