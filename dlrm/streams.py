"""Standard output and error that never end a run: closed, full, a pipe that nobody reads, or of an
encoding without our characters."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

_STDOUT, _STDERR = 1, 2


class _PatientFile(io.RawIOBase):
    """Writes to a descriptor until that fails, and from then on nowhere."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._has_failed = False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return not self._has_failed and os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        """Writes, or says that it did: what nobody can read is lost anyway."""
        view = memoryview(data).cast("B")
        if not self._has_failed:
            try:
                return os.write(self._descriptor, view)
            except OSError:
                self._has_failed = True
        return len(view)


def keep_streams() -> None:
    """Has this process print as far as it can, and never fail by it. Called first of all: a file
    that is opened while standard output is closed would get its number."""
    for descriptor in (0, _STDOUT, _STDERR):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free number: those below are open by now.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = _patient(sys.stdout, _STDOUT)
    sys.stderr = _patient(sys.stderr, _STDERR)


def _patient(stream: Any, descriptor: int) -> io.TextIOWrapper:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    is_line_wise = descriptor == _STDERR or os.isatty(descriptor)
    return io.TextIOWrapper(
        io.BufferedWriter(_PatientFile(descriptor)),
        encoding=encoding,
        errors="backslashreplace",
        line_buffering=is_line_wise,
        write_through=descriptor == _STDERR,
    )
