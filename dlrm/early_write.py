"""Calls about a file's place on disk that Python's `os` lacks: room for it before it is written,
and its first bytes written while the rest of it is made.

Without the second, Linux keeps gigabytes in its page cache until `fsync` asks for all of them at
once: the disk idles first, then the writer.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Callable

STRETCH_BYTES = 8 << 20
_SYNC_FILE_RANGE_WRITE = 2


def allocate(descriptor: int, num_bytes: int) -> None:
    """Gives a file its size, and its room on disk where the file system can.

    Where it can't, glibc's `posix_fallocate` would write every block of it, twice the bytes and
    hours of silence for a large one: then a full disk is told only when it is met.

    Raises:
        OSError: where there is no room.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if call is not None:
        call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        while call(descriptor, 0, 0, num_bytes) != 0:
            number = ctypes.get_errno()
            if number in (errno.EOPNOTSUPP, errno.ENOSYS):
                break
            if number != errno.EINTR:
                raise OSError(number, os.strerror(number))
        else:
            return
    os.ftruncate(descriptor, num_bytes)


class EarlyWrite:
    """Starts writing every whole stretch of a file that grows; where the system can't, does
    nothing. Proves nothing: `fsync` must follow, and tells what went wrong.

    Args:
        descriptor: of the file, written from its start.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._begun_bytes = descriptor, 0
        self._sync = _sync_file_range()

    def grown_to(self, num_bytes: int) -> None:
        """Tells how far the file has been written."""
        size = num_bytes - self._begun_bytes
        if size >= STRETCH_BYTES:
            self._sync(self._descriptor, self._begun_bytes, size)
            self._begun_bytes = num_bytes


def _sync_file_range() -> Callable[[int, int, int], None]:
    if not sys.platform.startswith("linux"):
        return lambda descriptor, begin, size: None
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is None:
        return lambda descriptor, begin, size: None
    call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]

    def begin_writing(descriptor: int, begin: int, size: int) -> None:
        call(descriptor, begin, size, _SYNC_FILE_RANGE_WRITE)

    return begin_writing
