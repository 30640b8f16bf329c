"""Collectives of ranks on one host: values in memory that they share, messages between pairs.

Over loopback, gloo copies values into the kernel and out of it, on threads of its own that take the
cores from the ranks. Here a rank writes what it sends into memory that the others map, tells each
of them by a short message on a Unix socket, and reads what they wrote when it waits.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import uuid
import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from embeddings.communicator import PeerLost, Pending, ProcessGroup

# Number of the collective; up to which number the sender has read those of the receiver; buffer,
# first byte and number of bytes of the values. The buffer's file comes along where it is new.
_MESSAGE = struct.Struct("<QQIQQ")
_RANK = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")
_ALIGN_BYTES = 64
_PAGE_BYTES = mmap.PAGESIZE


def why_not_shared(group: dist.ProcessGroup | None = None) -> str | None:
    """Why the ranks of a group can't share memory or aren't meant to; None where they can and are.

    Called by all ranks, with the same result for each. They must communicate through gloo, be on
    one host and in one network namespace; and GLOO_SOCKET_IFNAME, where it is set, must be `lo`, as
    the launcher sets it: another interface means that values are to travel over that.
    """
    backend = dist.get_backend(group)
    if backend != "gloo":
        return f"the ranks communicate through {backend}"
    is_linux = hasattr(os, "memfd_create")
    where = (
        os.environ.get("GLOO_SOCKET_IFNAME"),
        Path("/proc/sys/kernel/random/boot_id").read_text() if is_linux else "another system",
        os.stat("/proc/self/ns/net").st_ino if is_linux else 0,
    )
    of_ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, where, group=group)
    asked = sorted({interface for interface, *_ in of_ranks} - {None, "lo"})
    if asked:
        return f"GLOO_SOCKET_IFNAME asks for {' and '.join(asked)}"
    if not all(namespace for *_, namespace in of_ranks):
        return "it is built for Linux only"
    if len({(host, namespace) for _, host, namespace in of_ranks}) > 1:
        return "the ranks aren't on one host and in one network namespace"
    return None


class SharedMemory(ProcessGroup):
    """The ranks of a gloo group that are on one host; see `why_not_shared`.

    Who owns what: a rank owns the buffers that it sends from, which the others map. One that all
    have read is used again; where none is free there is one more, so issuing never waits. A buffer
    is a file in memory without a name (memfd): it goes with the last process that has it.

    Phases of a collective: once issued, its values are in shared memory and every other rank has a
    message; waited for, they are read from there. In between nothing runs, and the other ranks
    needn't be waited for longer than until they have issued it too.

    Collectives, per rank: of an all-to-all, each value is written once and read once. An all-reduce
    of `n` values writes them, reads the others' `(W-1) n`, and adds in the order of the ranks, so
    that all get the same bits; of two ranks these are gloo's. What is counted is what a network
    would have carried. Objects and barriers go through gloo.

    Args:
        group: the group; None for the default one.
        timeout_s: see `PeerLost`.

    Raises:
        PeerLost: by any wait, where another rank is gone, or silent for longer than `timeout_s`.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout_s: float) -> None:
        super().__init__(group, pairwise=False)
        self.transport = "shared memory"
        self._number = 0
        self._read_upto = _Upto()
        self._buffers: list[_Buffer] = []
        self._peers = self._connect(timeout_s)
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
            for peer in self._peers:
                incoming[peer].copy_(self._receive(peer, number, incoming[peer]))

        return self._pending(kind, number, recv, read)

    def _all_reduce(self, kind: str, values: Tensor) -> Pending:
        number = self._publish(kind, [(tuple(self._peers), values)])

        def read() -> None:
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

    def _publish(self, kind: str, parts: Sequence[tuple[tuple[int, ...], Tensor]]) -> int:
        """Writes each part and tells the ranks that it is for; returns the collective's number."""
        self._number += 1
        sizes = [-(-part.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES for _, part in parts]
        starts = list(accumulate(sizes, initial=0))
        buffer = self._free_buffer(starts[-1])
        buffer.used_by = self._number
        for start, (peers, part) in zip(starts, parts, strict=False):
            if part.numel():
                buffer.bytes[start : start + part.nbytes].view(part.dtype).copy_(part)
            for peer in peers:
                try:
                    self._peers[peer].tell(
                        self._number, self._read_upto.number, buffer, start, part.nbytes
                    )
                except OSError as error:
                    raise self._lost_peer(kind, peer, error) from error
        return self._number

    def _receive(self, peer: int, number: int, like: Tensor) -> Tensor:
        """The values that another rank has for this one, where they lie."""
        values = self._peers[peer].receive(number)
        assert values.numel() == like.nbytes, (peer, values.numel(), like.nbytes)
        return values.view(like.dtype)

    def _pending(self, kind: str, number: int, values: Tensor, read: Callable[[], None]) -> Pending:
        def finish() -> None:
            self.on_wait(kind)
            try:
                read()
            except _PeerError as error:
                # `on_wait` isn't reset: what this rank waited for is what the launcher is to see.
                raise self._lost_peer(kind, error.peer, error) from error
            self.on_wait(None)
            self._read_upto.add(number)

        return Pending(values, finish)

    def _lost_peer(self, kind: str, peer: int, error: Exception) -> PeerLost:
        return PeerLost(f"rank {self.rank}, waiting for {kind}: rank {peer}: {error}")

    def _free_buffer(self, num_bytes: int) -> _Buffer:
        """A buffer that no rank has yet to read, of at least that many bytes."""
        read_by_all = min(peer.has_read for peer in self._peers.values())
        free = [buffer for buffer in self._buffers if buffer.used_by <= read_by_all]
        large = [buffer for buffer in free if buffer.bytes.numel() >= num_bytes]
        if large:
            return min(large, key=lambda buffer: buffer.bytes.numel())
        number = len(self._buffers)
        if free:
            # In place of one that has become too small, in the other ranks' lists too.
            number = min(free, key=lambda buffer: buffer.bytes.numel()).number
            self._buffers = [buffer for buffer in self._buffers if buffer.number != number]
        self._buffers.append(_Buffer(number, num_bytes + num_bytes // 5))
        return self._buffers[-1]

    def _connect(self, timeout_s: float) -> dict[int, _Peer]:
        """A socket to every other rank; each connects to those before it."""
        name = f"\0dlrm-{uuid.uuid4().hex}"
        sockets: dict[int, socket.socket] = {}
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(name)
            listener.listen(self.world_size)
            names = self.all_gather_object(name)
            for rank in range(self.rank):
                sockets[rank] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                sockets[rank].connect(names[rank])
                sockets[rank].send(_RANK.pack(self.rank))
            listener.settimeout(timeout_s)
            while len(sockets) < self.world_size - 1:
                connected, _ = listener.accept()
                if _is_own_user(connected):
                    (rank,) = _RANK.unpack(connected.recv(_RANK.size))
                    sockets[rank] = connected
                else:
                    connected.close()
        for connected in sockets.values():
            connected.settimeout(timeout_s)
        # Each rank begins with another one: not all read what the same one wrote.
        order = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
        return {rank: _Peer(rank, sockets[rank], timeout_s) for rank in order}


class _PeerError(Exception):
    """Another rank is gone or silent."""

    def __init__(self, peer: int, text: str) -> None:
        super().__init__(text)
        self.peer = peer


class _Buffer:
    """Memory of this rank that the others map.

    Attributes:
        number: the place in their lists.
        file: what they map.
        bytes: the memory, uint8.
        used_by: the number of the collective whose values it holds.
        known_to: ranks that have its file.
    """

    def __init__(self, number: int, num_bytes: int) -> None:
        self.number, self.used_by = number, 0
        self.known_to: set[int] = set()
        self.file = os.memfd_create(f"dlrm-{number}", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.file)
        os.ftruncate(self.file, max(1, -(-num_bytes // _PAGE_BYTES)) * _PAGE_BYTES)
        self.bytes = _map(self.file)


class _Peer:
    """The connection to one other rank.

    Attributes:
        socket: messages to and from it.
        has_read: it has read what this rank sent in all collectives up to that number.
    """

    def __init__(self, rank: int, connected: socket.socket, timeout_s: float) -> None:
        self.socket, self.has_read = connected, 0
        self._rank, self._timeout_s = rank, timeout_s
        self._mapped: dict[int, Tensor] = {}
        self._arrived: dict[int, Tensor] = {}

    def tell(self, number: int, read_upto: int, buffer: _Buffer, start: int, size: int) -> None:
        """Tells it where the values of a collective lie."""
        message = _MESSAGE.pack(number, read_upto, buffer.number, start, size)
        if self._rank in buffer.known_to:
            self.socket.send(message)
        else:
            socket.send_fds(self.socket, [message], [buffer.file])
            buffer.known_to.add(self._rank)

    def receive(self, number: int) -> Tensor:
        """The values of a collective, uint8, once it has them.

        Raises:
            _PeerError: see there.
        """
        while number not in self._arrived:
            self._take_message()
        return self._arrived.pop(number)

    def _take_message(self) -> None:
        try:
            message, files, _, _ = socket.recv_fds(self.socket, _MESSAGE.size, 1)
        except TimeoutError:
            raise _PeerError(self._rank, f"nothing for {self._timeout_s:g} s") from None
        except OSError as error:
            raise _PeerError(self._rank, str(error)) from error
        if not message:
            raise _PeerError(self._rank, "the connection is closed")
        number, self.has_read, buffer, start, size = _MESSAGE.unpack(message)
        for file in files:
            self._mapped[buffer] = _map(file)
            os.close(file)
        self._arrived[number] = self._mapped[buffer][start : start + size]


class _Upto:
    """The largest number up to which all have been added.

    Attributes:
        number: that one.
    """

    def __init__(self) -> None:
        self.number = 0
        self._beyond: set[int] = set()

    def add(self, number: int) -> None:
        """In any order, each once."""
        self._beyond.add(number)
        while self.number + 1 in self._beyond:
            self.number += 1
            self._beyond.remove(self.number)


def _map(file: int) -> Tensor:
    """The whole of a file in memory, uint8, shared with whoever else maps it."""
    return torch.frombuffer(mmap.mmap(file, os.fstat(file).st_size), dtype=torch.uint8)


def _is_own_user(connected: socket.socket) -> bool:
    """Whether a process of this user is at the other end."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.getuid())


def _close_all(sockets: Sequence[socket.socket]) -> None:
    for connected in sockets:
        connected.close()
