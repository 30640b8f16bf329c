"""Standard streams that can be written to, whatever the command was started with.

What is printed is for people to read; that nobody reads it any more (`| head`), that it can't be
stored, or that a terminal knows ASCII only is no reason to end a run that took days.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import suppress
from typing import Any, TextIO

_STDERR = 2


def ready_streams() -> None:
    """Opens those that are closed, and has standard output and error fall silent where they can't
    be written to. To be called first of all in a process."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            _open_nothing(number)
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    sys.stdout = _forgiving(sys.stdout)
    sys.stderr = _forgiving(sys.stderr)


class _ForgivingFile(io.FileIO):
    """A file whose output goes nowhere once an error has met it. Which one, standard error is told,
    unless only the reader is gone."""

    def write(self, data: Any, /) -> int:
        """As the class's."""
        try:
            return super().write(data) or 0
        except BlockingIOError:
            raise
        except OSError as error:
            _point_at_nothing(self.fileno())
            if error.errno != errno.EPIPE and self.fileno() != _STDERR:
                text = f"dlrm: standard output falls silent: {error.strerror}\n"
                with suppress(OSError):
                    os.write(_STDERR, text.encode())
            return memoryview(data).nbytes


def _forgiving(stream: TextIO) -> TextIO:
    """The same stream; characters that it doesn't know are written as their numbers."""
    try:
        number = stream.fileno()
    except (OSError, ValueError, AttributeError):
        return stream  # Not a file: whoever put it there sees to it.
    with suppress(OSError, ValueError):
        stream.flush()
    errors = getattr(stream, "errors", None) or "strict"
    return io.TextIOWrapper(
        io.BufferedWriter(_ForgivingFile(number, "w", closefd=False)),
        encoding=stream.encoding,
        errors="backslashreplace" if errors == "strict" else errors,
        line_buffering=stream.isatty() or number == _STDERR,
    )


def _open_nothing(number: int) -> None:
    try:
        os.fstat(number)  # Something else has its number by now.
    except OSError:
        _point_at_nothing(number)


def _point_at_nothing(number: int) -> None:
    """Makes a descriptor lead nowhere, in programs that this one starts, too."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere == number:
        os.set_inheritable(number, True)
    else:
        os.dup2(nowhere, number)
        os.close(nowhere)
