"""Strangers that connect while a run starts don't keep its ranks waiting."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from unittest.mock import patch

import pytest

from embeddings import greetings
from embeddings.greetings import GREETING, accept_ranks

SECRET = b"0123456789abcdef"


class Door:
    """A listening rank 0, and whoever connects to it."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=300))
        self.accepted: dict[int, socket.socket] = {}

    def call(self, says: bytes = b"") -> socket.socket:
        """Connects and says something."""
        caller = socket.create_connection(self.listener.getsockname())
        self._stack.enter_context(caller)
        caller.sendall(says)
        return caller

    def accept(self, expected: set[int], left_s: Callable[[], float]) -> set[int]:
        """The ranks that are accepted."""
        accept_ranks(self.listener, SECRET, expected, self.accepted, left_s)
        return set(self.accepted)


@pytest.fixture
def door() -> Iterator[Door]:
    with ExitStack() as stack:
        found = Door(stack)
        yield found
        for connected in found.accepted.values():
            connected.close()


def plenty() -> float:
    """Time that never runs out: a test would hang in vain."""
    return 30.0


def test_f32_silent_strangers_do_not_hold_up_the_ranks_behind_them(door: Door) -> None:
    strangers = [door.call() for _ in range(12)]
    ranks = [door.call(GREETING.pack(SECRET, rank)) for rank in (2, 1)]
    looks = itertools.count()

    def left_s() -> float:
        assert next(looks) < 100, "it waits for strangers"
        return 30.0

    assert door.accept({1, 2}, left_s) == {1, 2}
    assert [stranger.recv(1) for stranger in strangers] == [b""] * 12, "they are turned away"
    door.accepted[1].sendall(b"to rank 1")
    assert ranks[1].recv(20) == b"to rank 1"


def test_f32_a_stranger_that_says_a_byte_at_a_time_gains_no_time(door: Door) -> None:
    """One limit for all, whatever comes."""
    stranger = door.call()
    left = itertools.chain(range(40, 0, -1), itertools.repeat(0))

    def left_s() -> float:
        seconds = next(left)
        if seconds:
            stranger.sendall(b"x" if seconds > 25 else b"")
        return 0.001 * seconds

    with pytest.raises(TimeoutError):
        door.accept({1}, left_s)


def test_f32_more_strangers_than_are_listened_to_at_once(door: Door) -> None:
    with patch.object(greetings, "_MOST_CALLERS", 8):
        for _ in range(20):
            door.call(b"part of a greeting")
        door.call(GREETING.pack(SECRET, 1))
        assert door.accept({1}, plenty) == {1}


@pytest.mark.parametrize(
    "says",
    [
        GREETING.pack(b"another secret..", 1),
        GREETING.pack(SECRET, 0),
        GREETING.pack(SECRET, 2**64 - 1),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)
def test_f32_who_greets_otherwise_is_turned_away(door: Door, says: bytes) -> None:
    stranger = door.call(says)
    door.call(GREETING.pack(SECRET, 1))
    assert door.accept({1}, plenty) == {1}
    with suppress(ConnectionResetError):  # It had said more than was read.
        assert stranger.recv(1) == b""


def test_f32_a_greeting_may_come_in_pieces(door: Door) -> None:
    greeting = GREETING.pack(SECRET, 1)
    caller = door.call()
    pieces = iter([greeting[:1], greeting[1:20], greeting[20:]])

    def left_s() -> float:
        caller.sendall(next(pieces, b""))
        return 30.0

    assert door.accept({1}, left_s) == {1}
