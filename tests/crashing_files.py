"""A file system that fails at the n-th thing that is done to it: a full disk, or a crash there.

Counts what Python code does to files: `open` for writing, `write`, `fsync`, `rename`, `replace`,
`unlink`, `mkdir`, `rmdir`. What C code writes by itself (pyarrow) isn't seen.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

OPERATIONS = ("open", "write", "fsync", "rename", "replace", "unlink", "mkdir", "rmdir")
NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Crashed(BaseException):
    """The process is gone: nothing that it does hereafter reaches the disk."""


class Failing:
    """What was done so far.

    Attributes:
        count: operations, those that failed too.
        has_failed: whether one did.
    """

    def __init__(
        self, number: int, error: BaseException, under: Path | None, *, lasting: bool
    ) -> None:
        self.count, self.has_failed = 0, False
        self._number, self._error, self._lasting = number, error, lasting
        self._under = None if under is None else str(under.resolve())
        self._lock = threading.Lock()

    def check(self, place: Any) -> None:
        """One operation on a path or a descriptor; raises where it is the one to fail."""
        path = f"/proc/self/fd/{place}" if isinstance(place, int) else os.fspath(place)
        where = os.path.realpath(os.fsdecode(path))
        if self._under is not None and not where.startswith(self._under):
            return
        with self._lock:
            self.count += 1
            fails = self.count == self._number or (self._lasting and self.has_failed)
            self.has_failed |= fails
        if not fails:
            return
        if isinstance(self._error, OSError):
            named = () if isinstance(place, int) else (str(path),)
            raise OSError(self._error.errno, self._error.strerror, *named)
        raise self._error


@contextmanager
def fail_at(
    number: int,
    operations: Sequence[str] = OPERATIONS,
    error: BaseException = NO_SPACE,
    *,
    lasting: bool = False,
    under: Path | None = None,
) -> Iterator[Failing]:
    """Within, the `number`-th of these operations fails, counted from 1; 0: none does.

    Args:
        operations: those that count.
        error: raised instead of doing it; an OSError is given the file's name where the system
            would give it.
        lasting: every later one fails too, as on a disk that stays full.
        under: a folder; operations elsewhere don't count. Names given relative to a descriptor, as
            shutil.rmtree does, are taken from the working folder: leave it out for these.
    """
    failing = Failing(number, error, under, lasting=lasting)
    with ExitStack() as patches:
        for name in ("fsync", "rename", "replace", "unlink", "mkdir", "rmdir", "write"):
            if name in operations:
                counted = _counted(getattr(os, name), failing)
                patches.enter_context(patch.object(os, name, counted))
        if {"open", "write"} & set(operations):
            opened = _opening(builtins.open, failing, operations)
            patches.enter_context(patch.object(builtins, "open", opened))
            patches.enter_context(patch.object(io, "open", opened))
        yield failing


def crash_at(number: int, under: Path | None = None) -> Any:
    """As `fail_at`, but the process is gone from there on: clean-up reaches the disk no more."""
    return fail_at(number, error=Crashed("crashed"), lasting=True, under=under)


def _counted(function: Callable[..., Any], failing: Failing) -> Callable[..., Any]:
    def call(place: Any, *arguments: Any, **more: Any) -> Any:
        failing.check(place)
        return function(place, *arguments, **more)

    return call


def _opening(
    function: Callable[..., Any], failing: Failing, operations: Sequence[str]
) -> Callable[..., Any]:
    def call(place: Any, mode: str = "r", *arguments: Any, **more: Any) -> Any:
        if not set(mode) & set("wax+"):
            return function(place, mode, *arguments, **more)
        if "open" in operations:
            failing.check(place)
        file = function(place, mode, *arguments, **more)
        return _Written(file, failing) if "write" in operations else file

    return call


class _Written:
    """A file of which each write counts."""

    def __init__(self, file: Any, failing: Failing) -> None:
        self._file, self._failing = file, failing

    def write(self, data: Any) -> Any:
        self._failing.check(self._file.fileno())
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Written:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
