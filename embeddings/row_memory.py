"""Memory for rows: in huge pages where the system has them.

A lookup reads rows all over a table. In pages of 4 KiB nearly every row of a large table costs a
walk through the page tables; in pages of 2 MiB few do (docs/benchmarks.md, "Log of what was
tried").
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

_LEAST_BYTES = 4 << 20
_GIB = 2**30


class TablesDontFit(ValueError):
    """Tables for which there isn't the memory.

    Args:
        tables: their names, the largest first where that is known.
        needed_bytes: what they take on this host or rank.
        available: memory that there is; None: unknown.
    """

    def __init__(self, tables: Sequence[str], needed_bytes: int, available: int | None) -> None:
        shown = ", ".join(tables[:3])
        more = f" and {len(tables) - 3} more" if len(tables) > 3 else ""
        free = "that isn't free" if available is None else f"{available / _GIB:,.1f} GiB are free"
        what = "table" if len(tables) == 1 else "tables"
        super().__init__(
            f"{what} {shown}{more}: {needed_bytes / _GIB:,.1f} GiB of memory are needed here, "
            f"{free}. Lower model.embedding_dim (or "
            "model.table_dims.NAME), have fewer rows (data.schema.sparse.NAME: min_count, or rows "
            "of vocabulary=hash), or spread the tables over more hosts (torchrun)"
        )


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
