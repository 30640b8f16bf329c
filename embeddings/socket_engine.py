"""A thread that carries messages over sockets, in machine code: it never asks for the interpreter.

Messages of a pair of ranks are sent, and received into their places, in the order in which they are
posted; each is preceded by its number and its size, so that two ranks that don't agree on what
comes next find out. What the threads tell each other relies on x86's order of memory accesses.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from torch import Tensor

from embeddings.awake_clock import LOOK_S, AwakeClock
from embeddings.compiled import compiled

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]
Message = tuple[int, int, int]
"""Direction, peer and number of one that is posted."""

SEND, RECEIVE = 0, 1
FINE, CLOSED, BROKEN, UNEXPECTED = 0, 1, 2, 3
"""States of a socket: works; the other end is gone; an error; another message than was posted."""
_REASONS = {
    CLOSED: "the connection is closed",
    BROKEN: "the connection is broken",
    UNEXPECTED: "it sent another message than is due: the ranks don't run the same program",
}
_QUEUE_LENGTH = 256
_HEADER_BYTES = 16
_POLLIN, _POLLOUT, _POLLERR, _POLLHUP, _POLLNVAL = 1, 4, 8, 16, 32
_LOOK_MS = 200
"""After so long without a word from the kernel, the thread looks for itself."""
_MSG_DONTWAIT, _MSG_NOSIGNAL, _MSG_MORE = 0x40, 0x4000, 0x8000  # Linux's numbers.
_SOL_SOCKET, _SO_RCVLOWAT = 1, 18
_MOST_AWAITED_BYTES = 1 << 18

_int, _size, _address = numba.types.int32, numba.types.int64, numba.types.uintp
_poll: Any = numba.types.ExternalFunction("poll", _int(_address, _size, _int))
_send: Any = numba.types.ExternalFunction("send", _size(_int, _address, _size, _int))
_recv: Any = numba.types.ExternalFunction("recv", _size(_int, _address, _size, _int))
_read: Any = numba.types.ExternalFunction("read", _size(_int, _address, _size))
_setsockopt: Any = numba.types.ExternalFunction(
    "setsockopt", _int(_int, _int, _int, _address, _int)
)
_write: Any = numba.types.ExternalFunction("write", _size(_int, _address, _size))


class SocketError(Exception):
    """A socket that is needed doesn't work any more, or nothing came in time.

    Attributes:
        peer: its place among the sockets.
    """

    def __init__(self, peer: int, text: str) -> None:
        super().__init__(text)
        self.peer = peer


class SocketEngine:
    """Carries messages over connected stream sockets, one to each peer.

    Used by one thread. What is posted mustn't be changed (sent) or read (received) before `wait`
    has returned for it.

    Args:
        sockets: connected; they are closed by `close`.
        timeout_s: see `wait`.
    """

    def __init__(self, sockets: Sequence[socket.socket], *, timeout_s: float) -> None:
        num_peers = len(sockets)
        self._sockets, self._timeout_s = list(sockets), timeout_s
        for connected in sockets:
            connected.setblocking(False)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # By direction and peer: a ring of (address, bytes), how many were posted, how many done.
        self._queues = np.zeros((2, num_peers, _QUEUE_LENGTH, 2), dtype=np.int64)
        self._posted = np.zeros((2, num_peers), dtype=np.int64)
        self._done = np.zeros((2, num_peers), dtype=np.int64)
        self._states = np.zeros(num_peers, dtype=np.int64)
        self._is_closed = np.zeros(1, dtype=np.int64)
        self._tensors: list[list[deque[Tensor]]] = [
            [deque() for _ in sockets] for _ in (SEND, RECEIVE)
        ]
        shared = (self._queues, self._posted, self._done, self._states, self._is_closed)
        # Compiled here, where an error is seen, and before messages wait for it: it ends at once.
        self._is_closed[0] = 1
        _carry(np.empty(num_peers + 2, dtype=np.int32), *shared)
        self._is_closed[0] = 0
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._told = select.poll()
        self._told.register(self._news, select.POLLIN)
        files = np.array([*(s.fileno() for s in sockets), self._wake, self._news], dtype=np.int32)
        self._thread = threading.Thread(
            target=_carry, args=(files, *shared), name="sockets", daemon=True
        )
        self._thread.start()

    def post(self, direction: int, peer: int, values: Tensor) -> Message:
        """Queues a message; returns what `wait` takes.

        Args:
            direction: `SEND` or `RECEIVE`.
            peer: place of the socket.
            values: contiguous, on the CPU; what is sent or filled. Of the same number of bytes at
                both ends.
        """
        if not values.is_contiguous() or values.device.type != "cpu":
            # Its address is all that the thread gets.
            raise ValueError("a message is one piece of memory on the CPU")
        posted = int(self._posted[direction, peer])
        if posted - int(self._done[direction, peer]) == _QUEUE_LENGTH:
            self.wait([(direction, peer, posted - _QUEUE_LENGTH + 1)])
        kept = self._tensors[direction][peer]
        while len(kept) > posted - int(self._done[direction, peer]):
            kept.popleft()
        kept.append(values)
        self._queues[direction, peer, posted % _QUEUE_LENGTH] = values.data_ptr(), values.nbytes
        self._posted[direction, peer] = posted + 1
        return direction, peer, posted + 1

    def start(self) -> None:
        """Has the thread look at what was posted."""
        os.eventfd_write(self._wake, 1)

    def wait(self, messages: Sequence[Message]) -> None:
        """Until these messages are carried.

        Raises:
            SocketError: the peer of one of them is gone, whether or not others were still to come
                before; or nothing came for longer than `timeout_s`, of time in which this process
                wasn't stopped.
        """
        clock = AwakeClock()
        while True:
            # Read first: a message may have been carried right before the socket broke.
            states = self._states.copy()
            messages = [
                (d, peer, number) for d, peer, number in messages if self._done[d, peer] < number
            ]
            if not messages:
                return
            for _, peer, _ in messages:
                if states[peer] != FINE:
                    raise SocketError(peer, _REASONS[int(states[peer])])
            left_s = self._timeout_s - clock()
            if left_s <= 0:
                raise SocketError(messages[0][1], f"nothing for {self._timeout_s:g} s")
            if self._told.poll(min(left_s, LOOK_S) * 1e3):
                os.eventfd_read(self._news)

    def close(self) -> None:
        """Ends the thread and closes the sockets; what is under way may be lost."""
        if self._is_closed[0]:
            return
        self._is_closed[0] = 1
        self.start()
        self._thread.join()
        for connected in self._sockets:
            connected.close()
        os.close(self._wake)
        os.close(self._news)


@compiled
def _carry(
    files: Int32Array,
    queues: Int64Array,
    posted: Int64Array,
    done: Int64Array,
    states: Int64Array,
    is_closed: Int64Array,
) -> None:
    """The thread: until it is told to stop, waits for sockets with something to do, and does it."""
    num_peers = states.shape[0]
    news = files[num_peers + 1]
    # struct pollfd: int file; short events, revents.
    polled = np.zeros((num_peers + 1, 2), dtype=np.int32)
    polled[num_peers, 0] = files[num_peers]
    polled[num_peers, 1] = _POLLIN
    # By direction and peer, of the message at hand: its header and how many bytes are carried.
    headers = np.zeros((2, num_peers, 2), dtype=np.int64)
    carried = np.zeros((2, num_peers), dtype=np.int64)
    counter = np.zeros(1, dtype=np.int64)
    # Bytes of which a socket tells that they have come; else it does so for each packet, and the
    # step on this core is interrupted as often.
    awaited = np.ones((num_peers, 1), dtype=np.int32)
    while is_closed[0] == 0:
        for peer in range(num_peers):
            events = 0
            if posted[SEND, peer] > done[SEND, peer]:
                events |= _POLLOUT
            if posted[RECEIVE, peer] > done[RECEIVE, peer]:
                events |= _POLLIN
                place, offset = done[RECEIVE, peer] % _QUEUE_LENGTH, carried[RECEIVE, peer]
                # The header alone first: a message may be another than is due.
                missing = _HEADER_BYTES - offset
                if missing <= 0:
                    missing += queues[RECEIVE, peer, place, 1]
                missing = min(missing, _MOST_AWAITED_BYTES)
                if missing != awaited[peer, 0] and missing > 0:
                    awaited[peer, 0] = missing
                    address = awaited[peer].ctypes.data
                    _setsockopt(files[peer], _SOL_SOCKET, _SO_RCVLOWAT, address, 4)
            # One with nothing to do isn't looked at: that it is closed would be told again and
            # again.
            is_used = events != 0 and states[peer] == FINE
            polled[peer, 0] = files[peer] if is_used else -1
            polled[peer, 1] = events
        is_idle = True
        for peer in range(num_peers):
            is_idle &= polled[peer, 0] < 0
        num_found = _poll(polled.ctypes.data, num_peers + 1, -1 if is_idle else _LOOK_MS)
        if polled[num_peers, 1] >> 16:
            _read(files[num_peers], counter.ctypes.data, 8)
        is_news = False
        for peer in range(num_peers):
            found = polled[peer, 1] >> 16
            # Old kernels may not tell that as much has come as is awaited.
            if polled[peer, 0] < 0 or (found == 0 and num_found > 0):
                continue
            for direction in (RECEIVE, SEND):
                before = done[direction, peer]
                _advance(
                    direction, peer, files[peer], queues, posted, done, states, headers, carried
                )
                is_news |= done[direction, peer] != before
            if states[peer] == FINE and found & (_POLLERR | _POLLHUP | _POLLNVAL):
                # What had come was read; what is wanted besides won't come.
                states[peer] = CLOSED if found & _POLLHUP else BROKEN
            is_news |= states[peer] != FINE
        if is_news:
            counter[0] = 1
            _write(news, counter.ctypes.data, 8)


@compiled
def _advance(
    direction: int,
    peer: int,
    file: int,
    queues: Int64Array,
    posted: Int64Array,
    done: Int64Array,
    states: Int64Array,
    headers: Int64Array,
    carried: Int64Array,
) -> None:
    """Carries a peer's messages of one direction as far as the socket goes along."""
    header = headers[direction, peer]
    while done[direction, peer] < posted[direction, peer]:
        number = done[direction, peer]
        address = queues[direction, peer, number % _QUEUE_LENGTH, 0]
        num_bytes = queues[direction, peer, number % _QUEUE_LENGTH, 1]
        offset = carried[direction, peer]
        if direction == SEND and offset == 0:
            header[0], header[1] = number, num_bytes
        if offset < _HEADER_BYTES:
            start, size = header.ctypes.data + offset, _HEADER_BYTES - offset
            flags = _MSG_DONTWAIT | _MSG_NOSIGNAL | (_MSG_MORE if num_bytes else 0)
        else:
            flags = _MSG_DONTWAIT | _MSG_NOSIGNAL
            start, size = address + offset - _HEADER_BYTES, num_bytes + _HEADER_BYTES - offset
        if size:
            if direction == SEND:
                moved = _send(file, start, size, flags)
            else:
                moved = _recv(file, start, size, _MSG_DONTWAIT)
                if moved == 0:
                    states[peer] = CLOSED
            if moved <= 0:
                return
            offset += moved
        carried[direction, peer] = offset
        if offset < _HEADER_BYTES:
            continue
        if direction == RECEIVE and (header[0] != number or header[1] != num_bytes):
            states[peer] = UNEXPECTED
            return
        if offset == _HEADER_BYTES + num_bytes:
            carried[direction, peer] = 0
            done[direction, peer] = number + 1
