"""Checkpoints written while training goes on: it waits for one copy in memory, not for the disk."""

from __future__ import annotations

import atexit
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from data.errors import UserError
from dlrm.checkpoint import Checkpoints, Contents
from embeddings.communicator import Communicator
from embeddings.machine import available_bytes

_POLL_S = 1.0
_EXIT_WAIT_S = 60.0


class AsyncSaver:
    """Saves in a thread of its own, on a group of its own: two threads on one group would mix up
    their collectives.

    The copy is made into memory that is kept from one save to the next; a save waits until the one
    before it is on disk. So does the end of the process, for a while: a thread that still runs
    while Python ends may free a tensor then, which aborts the process.

    Args:
        checkpoints: of the run.
        comm: the ranks; duplicated here, so called by all of them at once.
        num_bytes: what this rank's copy takes (`bytes_to_copy`).
        beat: called while this rank waits for the disk.

    Raises:
        UserError: on all ranks alike, where the host's free memory doesn't hold the copies.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        comm: Communicator,
        num_bytes: int,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        _check_memory(comm, num_bytes)
        self._checkpoints, self._beat = checkpoints, beat
        self._comm = comm.duplicate()
        self._copies: list[Tensor] = []
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, contents: Contents, *, is_best: bool) -> None:
        """Copies what is to be kept and has it written. Called by all ranks.

        Raises:
            OSError: what an earlier save met, on all ranks alike.
        """
        self.wait()
        copied = self._copy(contents)

        def write() -> None:
            try:
                self._checkpoints.save(copied, self._comm, is_best=is_best)
            except BaseException as error:
                self._error = error
            finally:
                atexit.unregister(threading.current_thread().join)

        self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        # Not for ever: it may wait for a rank that is gone.
        atexit.register(self._thread.join, _EXIT_WAIT_S)
        self._thread.start()

    def wait(self) -> None:
        """Waits until what was saved is on disk.

        Raises:
            OSError: what the save met, on all ranks alike.
        """
        if self._thread is None:
            return
        while self._thread.is_alive():
            self._thread.join(_POLL_S)
            self._beat()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _copy(self, contents: Contents) -> Contents:
        tensors = _tensors(contents)
        if [t.shape for t in tensors] != [c.shape for c in self._copies]:
            self._copies = [tensor.clone() for tensor in tensors]
        else:
            for copy, tensor in zip(self._copies, tensors, strict=True):
                copy.copy_(tensor)
        copies = iter(self._copies)
        return replace(
            contents,
            dense={name: next(copies) for name in contents.dense},
            dense_state={name: next(copies) for name in contents.dense_state},
            parts=[
                part._replace(values={name: next(copies) for name in part.values})
                for part in contents.parts
            ],
        )


def bytes_to_copy(contents: Contents) -> int:
    """Bytes of a rank's rows, their state, and the dense network with its own."""
    return sum(tensor.nbytes for tensor in _tensors(contents))


def _tensors(contents: Contents) -> Sequence[Tensor]:
    rows = [tensor for part in contents.parts for tensor in part.values.values()]
    return [*contents.dense.values(), *contents.dense_state.values(), *rows]


def _check_memory(comm: Communicator, num_bytes: int) -> None:
    of_ranks = comm.all_gather_object((socket.gethostname(), num_bytes, available_bytes()))
    for host in sorted({host for host, *_ in of_ranks}):
        wanted = sum(size for other, size, _ in of_ranks if other == host)
        free = min((f for other, _, f in of_ranks if other == host and f is not None), default=None)
        if free is not None and wanted > free:
            raise UserError(
                f"train.checkpoint_async=true copies {wanted / 2**20:,.0f} MiB of rows and state "
                f"on {host}, which has {free / 2**20:,.0f} MiB of memory left; leave it out: "
                "checkpoints are then written from where the rows are"
            )
