"""Ranks as threads of one process: the real exchange code over a mailbox instead of a network.

Quick enough for property tests. Stricter than a network in two ways: the n-th collective of every
rank must be of the same kind, and what was sent is compared with what was announced.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from embeddings.communicator import Communicator, Pending

T = TypeVar("T")
WAIT_S = 30.0


class _Mailbox:
    """What every rank put into each of its collectives, by number."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._condition = threading.Condition()
        self._entries: dict[int, dict[int, tuple[str, Any]]] = {}
        self._is_broken = False
        self._duplicates: dict[int, _Mailbox] = {}

    def duplicate(self, number: int) -> _Mailbox:
        """The mailbox of the n-th group that the ranks have made of this one."""
        with self._condition:
            return self._duplicates.setdefault(number, _Mailbox(self.world_size))

    def put(self, number: int, rank: int, kind: str, value: Any) -> None:
        with self._condition:
            entries = self._entries.setdefault(number, {})
            entries[rank] = (kind, value)
            kinds = {kind for kind, _ in entries.values()}
            assert len(kinds) == 1, f"collective {number} differs between ranks: {kinds}"
            self._condition.notify_all()

    def take(self, number: int) -> list[Any]:
        """By rank; waits for all."""
        with self._condition:

            def is_complete() -> bool:
                return len(self._entries.get(number, {})) == self.world_size

            self._condition.wait_for(lambda: self._is_broken or is_complete(), timeout=WAIT_S)
            # What a rank has sent before it was gone arrives.
            if not is_complete():
                raise RuntimeError(f"collective {number}: a rank is gone")
            entries = self._entries[number]
            return [entries[rank][1] for rank in range(self.world_size)]

    def break_off(self) -> None:
        """Lets nobody wait for a rank that has raised."""
        with self._condition:
            self._is_broken = True
            self._condition.notify_all()
            duplicates = list(self._duplicates.values())
        for mailbox in duplicates:
            mailbox.break_off()


class ThreadRank(Communicator):
    """One rank; every call comes from one thread."""

    def __init__(self, rank: int, mailbox: _Mailbox) -> None:
        super().__init__(rank, mailbox.world_size)
        self._mailbox = mailbox
        self._number = 0
        self._num_duplicates = 0
        self.kinds: list[str] = []

    def _put(self, kind: str, value: Any) -> int:
        number, self._number = self._number, self._number + 1
        self.kinds.append(kind)
        self._mailbox.put(number, self.rank, kind, value)
        return number

    def _all_to_all(
        self,
        kind: str,
        send: Tensor,
        send_splits: Sequence[int],
        recv: Tensor,
        recv_splits: Sequence[int],
    ) -> Pending:
        # A copy: the sender may reuse its buffer only after its own wait, which isn't that of
        # the receivers.
        number = self._put(kind, [part.clone() for part in send.split(list(send_splits))])

        def finish() -> None:
            parts = [sent[self.rank] for sent in self._mailbox.take(number)]
            assert [part.numel() for part in parts] == list(recv_splits), (kind, recv_splits)
            assert all(part.dtype == recv.dtype for part in parts), kind
            recv.copy_(torch.cat(parts))

        return Pending(recv, finish)

    def _all_reduce(self, kind: str, values: Tensor) -> Pending:
        number = self._put(kind, values.clone())

        def finish() -> None:
            values.copy_(torch.stack(self._mailbox.take(number)).sum(dim=0))

        return Pending(values, finish)

    def duplicate(self) -> ThreadRank:
        self._num_duplicates += 1
        return ThreadRank(self.rank, self._mailbox.duplicate(self._num_duplicates))

    def all_gather_object(self, value: Any) -> list[Any]:
        return self._mailbox.take(self._put("objects", value))


def run_ranks(world_size: int, function: Callable[[ThreadRank], T]) -> list[T]:
    """Runs `function(rank)` in a thread per rank; results by rank, or the first rank's error."""
    mailbox = _Mailbox(world_size)
    results: list[Any] = [None] * world_size
    errors: list[tuple[int, BaseException]] = []

    def work(rank: int) -> None:
        try:
            results[rank] = function(ThreadRank(rank, mailbox))
        except BaseException as error:
            errors.append((rank, error))
            mailbox.break_off()

    threads = [
        threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_S)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        # A rank that only lost its peers isn't to blame.
        errors.sort(key=lambda entry: ("a rank is gone" in str(entry[1]), entry[0]))
        raise errors[0][1]
    return results
