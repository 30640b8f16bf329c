"""Has the system write a file's bytes to disk while the rest of the file is made.

Without, Linux keeps gigabytes in its page cache until `fsync` asks for all of them at once: the
disk idles first, then the writer. `sync_file_range(2)` isn't in Python's `os`.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

STRETCH_BYTES = 8 << 20
_SYNC_FILE_RANGE_WRITE = 2


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
