"""A file system that fails: the n-th write, flush to disk, rename, removal or opening for writing.

Calls of Python's own are counted (`os.…`, files of `open`), on paths within one folder; what a
library writes in C++ is not. An opening that fails leaves no file, a write that fails half of what
it was given, as on a disk that is full.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

OPERATIONS = ("open", "write", "fsync", "rename", "unlink", "mkdir")


def no_space() -> OSError:
    """What a full disk says."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@dataclass
class Calls:
    """What was counted.

    Attributes:
        count: calls so far.
        failed: (operation, path) of the calls that failed.
    """

    count: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)


@contextmanager
def fail_at(
    n: int | None,
    *,
    within: Path,
    operations: Sequence[str] = OPERATIONS,
    error: Callable[[], OSError] = no_space,
    stays: bool = False,
) -> Iterator[Calls]:
    """Within, the n-th call on a path in the folder `within` fails.

    Args:
        n: from 0; None: none fails, they are only counted.
        within: the folder whose files fail.
        operations: what is counted, of `OPERATIONS`.
        error: makes the error; a call that the system would name a file in gets one.
        stays: all calls from the n-th on fail, but for removals.
    """
    calls = Calls()
    root = os.path.realpath(within)

    def check(operation: str, path: Any, *, named: bool = True) -> None:
        if operation not in operations or not _is_within(path, root):
            return
        number = calls.count
        calls.count += 1
        fails = number == n or (stays and n is not None and number > n and operation != "unlink")
        if fails:
            calls.failed.append((operation, str(path)))
            raised = error()
            if named:
                raised.filename = str(path)
            raise raised

    with ExitStack() as patches:
        for target, name, replacement in _replacements(check):
            patches.enter_context(patch.object(target, name, replacement))
        yield calls


def _replacements(check: Callable[..., None]) -> list[tuple[Any, str, Any]]:
    class CheckedFile(io.FileIO):
        def write(self, data: Any) -> int:
            view = memoryview(data).cast("B")
            try:
                check("write", self.name, named=False)
            except OSError:
                super().write(view[: len(view) // 2])
                raise
            return super().write(view) or 0

    def of_path(operation: str, original: Any) -> Any:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            check(operation, path)
            return original(path, *args, **kwargs)

        return call

    def of_descriptor(operation: str, original: Any) -> Any:
        def call(descriptor: int, *args: Any) -> Any:
            check(operation, os.readlink(f"/proc/self/fd/{descriptor}"), named=False)
            return original(descriptor, *args)

        return call

    open_plainly = io.open

    def open_checked(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **kw: Any) -> Any:
        if not set(mode) & set("wax+") or isinstance(file, int) or "opener" in kw:
            return open_plainly(file, mode, buffering, *args, **kw)
        check("open", os.fspath(file))
        raw = CheckedFile(file, mode.replace("b", "").replace("t", ""))
        if buffering == 0:
            return raw
        size = io.DEFAULT_BUFFER_SIZE if buffering < 2 else buffering
        buffered = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw, size)
        if "b" in mode:
            return buffered
        return io.TextIOWrapper(buffered, *args, **kw)

    return [
        (builtins, "open", open_checked),
        (io, "open", open_checked),
        (os, "write", of_descriptor("write", os.write)),
        (os, "fsync", of_descriptor("fsync", os.fsync)),
        (os, "rename", of_path("rename", os.rename)),
        (os, "replace", of_path("rename", os.replace)),
        (os, "unlink", of_path("unlink", os.unlink)),
        (os, "remove", of_path("unlink", os.remove)),
        (os, "mkdir", of_path("mkdir", os.mkdir)),
    ]


def _is_within(path: Any, root: str) -> bool:
    if isinstance(path, bytes):
        path = os.fsdecode(path)
    if not isinstance(path, (str, os.PathLike)):
        return False
    real = os.path.realpath(path)
    return real == root or real.startswith(root + os.sep)
