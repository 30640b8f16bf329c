"""The work folder of a dataset in the making, and the lock that keeps a second writer out."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data.errors import UserError


@contextmanager
def locked(root: Path) -> Iterator[Path]:
    """Locks `root` for writing and gives its work folder `root/.work`, removed on success.

    After a failure the folder stays: a rerun takes up what is finished in it. The lock's file stays
    beside it for good: a lock on a file that others may remove protects nothing.

    Raises:
        UserError: where another process holds the lock.
    """
    root.mkdir(parents=True, exist_ok=True)
    with open(root / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"data.root={root} is being prepared by another process") from None
        work = root / ".work"
        work.mkdir(exist_ok=True)
        yield work
        shutil.rmtree(work, ignore_errors=True)
