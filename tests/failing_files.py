"""A file system that fails at the n-th thing that is done to it: a full disk, or a crash there.

What Python code does is counted (`os.…`, files of `open`); what a library does in C++ is not. An
opening that fails leaves no file, a write that fails half of what it was given, as on a full disk.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from dlrm import tensor_file

OPERATIONS = ("open", "write", "fsync", "allocate", "rename", "unlink", "mkdir", "rmdir")
REMOVALS = ("unlink", "rmdir")

Check = Callable[..., None]


class Crashed(BaseException):
    """The process is gone: nothing that it does hereafter reaches the disk."""


def no_space() -> OSError:
    """What a full disk says."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@dataclass
class Calls:
    """What was counted.

    Attributes:
        count: calls so far, those that failed too.
        failed: (operation, path) of the calls that failed.
    """

    count: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)


@contextmanager
def fail_at(
    n: int | None,
    *,
    within: Path | None = None,
    operations: Sequence[str] = OPERATIONS,
    error: Callable[[], BaseException] = no_space,
    stays: bool = False,
    spared: Sequence[str] = REMOVALS,
) -> Iterator[Calls]:
    """Within, the n-th call fails.

    Args:
        n: from 0; None: none fails, they are only counted.
        within: a folder; calls on paths elsewhere don't count. None: all files count.
        operations: what is counted, of `OPERATIONS`; `rename` is `os.replace` too.
        error: makes the error; an OSError gets the file's name where the system would give it.
        stays: all calls from the n-th on fail, but for `spared`.
        spared: what succeeds again after the n-th: a full disk lets files be removed.
    """
    calls = Calls()
    root = None if within is None else os.path.realpath(within)
    lock = threading.Lock()

    def check(operation: str, path: Any, *, named: bool = True) -> None:
        if operation not in operations or not _is_within(path, root):
            return
        with lock:
            number = calls.count
            calls.count += 1
            later = stays and n is not None and number > n and operation not in spared
            if not later and number != n:
                return
            calls.failed.append((operation, str(path)))
        raised = error()
        if named and isinstance(raised, OSError):
            raised.filename = str(path)
        raise raised

    with ExitStack() as patches:
        for target, name, replacement in _replacements(check, calls):
            patches.enter_context(patch.object(target, name, replacement))
        yield calls


def crash_at(n: int, within: Path | None = None) -> AbstractContextManager[Calls]:
    """As `fail_at`, but the process is gone from there on: clean-up reaches the disk no more."""
    return fail_at(n, within=within, error=Crashed, stays=True, spared=())


def _replacements(check: Check, calls: Calls) -> list[tuple[Any, str, Any]]:
    opened = _opening(check, calls)
    return [
        (builtins, "open", opened),
        (io, "open", opened),
        (os, "write", _of_descriptor(check, "write", os.write)),
        (os, "fsync", _of_descriptor(check, "fsync", os.fsync)),
        (tensor_file, "allocate", _of_descriptor(check, "allocate", tensor_file.allocate)),
        (os, "rename", _of_path(check, "rename", os.rename)),
        (os, "replace", _of_path(check, "rename", os.replace)),
        (os, "unlink", _of_path(check, "unlink", os.unlink)),
        (os, "remove", _of_path(check, "unlink", os.remove)),
        (os, "mkdir", _of_path(check, "mkdir", os.mkdir)),
        (os, "rmdir", _of_path(check, "rmdir", os.rmdir)),
    ]


def _of_path(check: Check, operation: str, original: Any) -> Any:
    def call(path: Any, *args: Any, **more: Any) -> Any:
        # As shutil.rmtree has it: a name in a folder that is open.
        folder = more.get("dir_fd")
        check(operation, path if folder is None else os.path.join(_path_of(folder), path))
        return original(path, *args, **more)

    return call


def _of_descriptor(check: Check, operation: str, original: Any) -> Any:
    def call(descriptor: int, *args: Any) -> Any:
        check(operation, _path_of(descriptor), named=False)
        return original(descriptor, *args)

    return call


def _opening(check: Check, calls: Calls) -> Any:
    class CheckedFile(io.FileIO):
        def write(self, data: Any) -> int:
            try:
                check("write", _path_of(self.fileno()), named=False)
            except BaseException:
                # A second try, as at closing, finds no more room.
                if len(calls.failed) == 1:
                    view = memoryview(data).cast("B")
                    super().write(view[: len(view) // 2])
                raise
            return super().write(data) or 0

    open_plainly = io.open

    def open_checked(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        if not set(mode) & set("wax+") or isinstance(file, int):
            return open_plainly(file, mode, buffering, encoding, errors, newline, closefd, opener)
        check("open", os.fspath(file))
        raw = CheckedFile(file, mode.replace("b", "").replace("t", ""), opener=opener)
        if buffering == 0:
            return raw
        size = io.DEFAULT_BUFFER_SIZE if buffering < 2 else buffering
        buffered = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw, size)
        if "b" in mode:
            return buffered
        return io.TextIOWrapper(buffered, encoding, errors, newline, buffering == 1)

    return open_checked


def _path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


def _is_within(path: Any, root: str | None) -> bool:
    if isinstance(path, bytes):
        path = os.fsdecode(path)
    if not isinstance(path, (str, os.PathLike)):
        return False
    if root is None:
        return not str(path).startswith(("pipe:", "socket:", "anon_inode:"))
    real = os.path.realpath(path)
    return real == root or real.startswith(root + os.sep)
