"""Tells the ranks that connect to this one from strangers, all listened to side by side."""

from __future__ import annotations

import secrets
import select
import socket
import struct
from collections.abc import Callable

SECRET_BYTES = 16
GREETING = struct.Struct(f"<{SECRET_BYTES}sQ")
"""The run's secret, the rank that connects."""
# So many may have connected without having said all of it; the one that came first has to go.
_MOST_CALLERS = 64
_LONGEST_POLL_S = 1.0


def accept_ranks(
    listener: socket.socket,
    secret: bytes,
    expected: set[int],
    accepted: dict[int, socket.socket],
    left_s: Callable[[], float],
) -> None:
    """Accepts connections until every expected rank has greeted; what greets otherwise, or not at
    all, is turned away and keeps nobody waiting.

    Args:
        listener: listens.
        secret: of the run.
        expected: the ranks that are to connect.
        accepted: takes their connections, also of those that came before an error.
        left_s: the time that is left for all of them together.

    Raises:
        TimeoutError: there is none left.
        OSError: of the listener.
    """
    listener.setblocking(False)
    ready = select.poll()
    ready.register(listener, select.POLLIN)
    callers: dict[int, tuple[socket.socket, bytearray]] = {}
    try:
        while not expected <= accepted.keys():
            if left_s() <= 0:
                raise TimeoutError("timed out")
            for file, _ in ready.poll(max(0.0, min(left_s(), _LONGEST_POLL_S)) * 1e3):
                if file == listener.fileno():
                    _let_in(listener, callers, ready)
                    continue
                caller, said = callers[file]
                if _says_more(caller, said):
                    continue
                ready.unregister(file)
                del callers[file]
                rank = _rank_of(said, secret)
                if rank is None or rank in accepted or rank not in expected:
                    caller.close()
                else:
                    accepted[rank] = caller
    finally:
        for caller, _ in callers.values():
            caller.close()


def _let_in(
    listener: socket.socket,
    callers: dict[int, tuple[socket.socket, bytearray]],
    ready: select.poll,
) -> None:
    try:
        caller, _ = listener.accept()
    except (BlockingIOError, ConnectionError):  # It has gone again.
        return
    caller.setblocking(False)
    callers[caller.fileno()] = caller, bytearray()
    ready.register(caller, select.POLLIN)
    if len(callers) > _MOST_CALLERS:
        first = next(iter(callers))
        ready.unregister(first)
        callers.pop(first)[0].close()


def _says_more(caller: socket.socket, said: bytearray) -> bool:
    """Takes what has come; whether more of a greeting may come."""
    try:
        part = caller.recv(GREETING.size - len(said))
    except BlockingIOError:
        return True
    except OSError:
        return False
    said += part
    return bool(part) and len(said) < GREETING.size


def _rank_of(said: bytearray, secret: bytes) -> int | None:
    """The rank that has greeted; None for a stranger."""
    if len(said) < GREETING.size:
        return None
    told, rank = GREETING.unpack(said)
    return int(rank) if secrets.compare_digest(told, secret) else None
