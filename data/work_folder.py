"""The work folder of a dataset in the making, and the lock that keeps a second writer out."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISREG

from data.errors import UserError
from data.files import write_whole

LOCK = ".lock"
WORK = ".work"
# Tells that the folder is ours, and which process holds the lock.
MARKER = "made-by-prepare"
# A finished dataset on its way to its place (`data/commit.py`): the last to be removed.
STAGED = "whole-"
# In a folder of the work folder: all of it is there, for a rerun to take up.
FINISHED = "finished.json"


@contextmanager
def locked(root: Path, wait: Callable[[str], None] | None = None) -> Iterator[Path]:
    """Locks `root` for writing and gives its work folder `root/.work`, removed on success.

    After a failure the folder stays: a rerun takes up what is finished in it. The lock's file stays
    beside it for good: a lock on a file that others may remove protects nothing. The lock itself
    ends with the process that holds it.

    Args:
        root: the dataset folder; made where it is missing.
        wait: called with who holds the lock, then waits for it; None: a held lock is refused.

    Raises:
        UserError: where another process holds the lock, or `root` holds a `.lock` or `.work` that
            isn't ours.
    """
    root.mkdir(parents=True, exist_ok=True)
    descriptor = _open_lock(root)
    try:
        _take_lock(descriptor, root, wait)
        check_work_folder(root)
        work = root / WORK
        work.mkdir(exist_ok=True)
        holder = f"process {os.getpid()} on {os.uname().nodename}"
        write_whole(work / MARKER, holder.encode())
        yield work
        remove_work_folder(root)
    finally:
        os.close(descriptor)


def check_work_folder(root: Path) -> None:
    """Refuses a `.work` or `.lock` that isn't ours.

    Raises:
        UserError: naming it.
    """
    lock, work = root / LOCK, root / WORK
    if os.path.lexists(lock):
        stat = os.lstat(lock)
        if not S_ISREG(stat.st_mode) or stat.st_size:
            raise _foreign(lock)
    if work.is_symlink() or (os.path.lexists(work) and not work.is_dir()):
        raise _foreign(work)
    if work.is_dir() and not (work / MARKER).is_file():
        names = {entry.name for entry in os.scandir(work)}
        if names - {f"{MARKER}.partial"}:  # Else its maker ended before it could sign it.
            raise _foreign(work)


def remove_work_folder(root: Path) -> None:
    """Removes `root/.work` with all in it: what a crash may leave of it stays recognisable."""
    work = root / WORK
    if not work.is_dir():
        return
    entries = sorted(os.scandir(work), key=lambda entry: entry.name.startswith(STAGED))
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            remove_folder(Path(entry.path))
        elif entry.name != MARKER:
            os.unlink(entry.path)
    (work / MARKER).unlink(missing_ok=True)
    work.rmdir()


def remove_folder(folder: Path) -> None:
    """Removes a folder of the work folder, its mark first: a rerun mustn't take what a crash leaves
    of it for all of it."""
    (folder / FINISHED).unlink(missing_ok=True)
    shutil.rmtree(folder)


def _open_lock(root: Path) -> int:
    """Never through a link.

    Raises:
        UserError: where it isn't ours.
    """
    path = root / LOCK
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR):
            raise _foreign(path) from None
        raise
    return descriptor


def _take_lock(descriptor: int, root: Path, wait: Callable[[str], None] | None) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _holder(root)
        if wait is None:
            raise UserError(
                f"data.root={root} is being prepared by another process ({holder}); wait for it, "
                "or choose another data.root"
            ) from None
        wait(holder)
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _holder(root: Path) -> str:
    try:
        return (root / WORK / MARKER).read_text(encoding="utf-8", errors="replace")
    except OSError:  # It is about to write it, or has just removed it.
        return "which has just begun or ended"


def _foreign(path: Path) -> UserError:
    return UserError(
        f"{path} wasn't made by this version of `dlrm prepare`, which needs that name: nothing was "
        "touched; choose another data.root, or remove it"
    )
