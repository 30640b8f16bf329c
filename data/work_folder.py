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
    """Locks `root` and gives its work folder `root/.work`, which is removed on success.

    After a failure the folder stays: a rerun takes up what is finished in it.

    Raises:
        UserError: where another process holds the lock.
    """
    work = root / ".work"
    work.mkdir(exist_ok=True)
    with open(work / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"data.root={root} is being prepared by another process") from None
        try:
            yield work
        except BaseException:
            if (root / "manifest.json").exists():
                shutil.rmtree(work)  # A finished dataset was refused: there is nothing to take up.
            raise
        # Under the lock, so that nobody's new work goes; a process that waited at the lock of a
        # folder that is gone finds a finished dataset and has nothing to remove.
        shutil.rmtree(work, ignore_errors=True)
