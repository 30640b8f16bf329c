"""One process at a time writes to a run folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data.errors import UserError

LOCK = ".lock"
_POLL_S = 0.1
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def locked_run(run_dir: Path, wait_s: float = 0.0) -> Iterator[None]:
    """Within, no other process that asks as well writes to the folder.

    The kernel holds the lock (`flock`) and drops it when the process ends, however it ends. The
    file that carries it says who holds it, and is removed at the end.

    Args:
        run_dir: the folder; made where it is missing.
        wait_s: how long to wait for a holder that is about to end.

    Raises:
        UserError: naming the process that holds it, and its host.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    descriptor = _take(run_dir, time.monotonic() + wait_s)
    if descriptor is None:
        yield
        return
    try:
        with contextlib.suppress(OSError):  # It only tells others who holds it.
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        # While it is held: who opens the file hereafter makes another.
        with contextlib.suppress(OSError):
            (run_dir / LOCK).unlink()
        os.close(descriptor)


def _take(run_dir: Path, until_s: float) -> int | None:
    """The locked file, or None where the file system knows no locks."""
    path = run_dir / LOCK
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same(path, descriptor):
                return descriptor
            os.close(descriptor)  # Its holder has just removed it.
        except BlockingIOError:
            holder = os.read(descriptor, 256).decode(errors="replace") or "another process"
            os.close(descriptor)
            if time.monotonic() >= until_s:
                raise UserError(
                    f"hydra.run.dir={run_dir} is being written by {holder}; wait until that ends, "
                    "end it, or choose another folder"
                ) from None
            time.sleep(_POLL_S)
        except OSError as error:
            os.close(descriptor)
            if error.errno not in _UNSUPPORTED:
                raise
            warnings.warn(
                f"{path} can't be locked ({error.strerror}): nothing keeps a second run out of "
                "the folder",
                stacklevel=4,
            )
            return None


def _is_same(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False
