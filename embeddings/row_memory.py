"""Memory for rows: in huge pages where the system has them.

A lookup reads rows all over a table. In pages of 4 KiB nearly every row of a large table costs a
walk through the page tables; in pages of 2 MiB few do (docs/benchmarks.md, "Log of what was
tried").
"""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

_LEAST_BYTES = 4 << 20


def rows_to_fill(num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """`(num_rows, width)` values, all of which are to be written at once.

    (Not for optimizer state, of which short runs touch few rows: a huge page is made whole when its
    first row is touched.) Huge pages are asked for, not demanded: a system without them gives
    others.
    """
    num_bytes = num_rows * width * dtype.itemsize
    if num_bytes < _LEAST_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(num_rows, width, dtype=dtype)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # A kernel without them (EINVAL).
        pages.madvise(mmap.MADV_HUGEPAGE)
    # The tensor keeps the mapping alive.
    return torch.frombuffer(pages, dtype=dtype).view(num_rows, width)
