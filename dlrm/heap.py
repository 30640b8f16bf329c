"""Keeps the heap: what a step frees, the next step gets back without asking the system.

glibc returns large freed blocks to the system, and the next step's activations and gradients then
come as new pages, each of which costs an entry into the kernel when it is first touched
(docs/benchmarks.md, "Log of what was tried").
"""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD_BYTES = 1 << 30
_NEVER_TRIM = 2**31 - 1
# Whoever sets one of these has a will of their own, or another allocator.
_SET_BY_USER = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_heap() -> bool:
    """Has this process keep freed memory below 1 GiB a block; True where that could be done.

    Nothing else than speed and peak memory depends on it: not with another libc than glibc, nor
    where the user has set the allocator by environment variables.
    """
    if any(os.environ.get(name) for name in _SET_BY_USER):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    is_mapped_later = mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES) == 1
    is_kept = mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM) == 1
    return is_mapped_later and is_kept
