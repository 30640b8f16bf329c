"""Loops over memory as machine code: what NumPy and torch need many passes for, in one.

A function marked `compiled` is compiled by Numba at its first call with arguments of new types, and
kept on disk: beside its module, or in the user's cache folder (`NUMBA_CACHE_DIR` says another).
What is kept there is a convenience: where it is damaged it is made anew, and where it can't be read
or written, the function is compiled in each process.
Within it the arithmetic is IEEE's, in the written order, for fp32 and fp64 alike; the GIL isn't
held; indices are not checked, so whoever calls checks them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import numba
import torch
from numba.core.caching import FunctionCache

_Function = TypeVar("_Function", bound=Callable[..., Any])

_LEAST_ITEMS = 256
"""Of a part; of fewer, another thread isn't worth waking."""


def compiled(function: _Function) -> _Function:
    """Marks a function of arrays and numbers to be compiled."""
    kernel: Any = numba.njit(function, nogil=True, error_model="numpy")
    # No folder to keep it in, or none that can be read: it is compiled in each process.
    with contextlib.suppress(RuntimeError, OSError):
        kernel._cache = _ForgivingCache(function)  # As `cache=True` does with Numba's own.
    typed: _Function = kernel
    return typed


class _ForgivingCache(FunctionCache):
    """Numba's cache of one function on disk, where nothing that is wrong with its files is more
    than a miss: a full disk, a file that is cut, empty or another's. (Numba's own raises.)"""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled function for a signature; None where it isn't there, or can't be used."""
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # Unpickling a damaged file raises anything.
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keeps a compiled function, where that can be done; a damaged index is begun anew."""
        try:
            super().save_overload(sig, data)
        except Exception:
            with contextlib.suppress(Exception):
                self.flush()
                super().save_overload(sig, data)


def in_parts(kernel: Callable[..., None], num_items: int, *args: Any) -> None:
    """`kernel(first, stop, *args)` over `0 … num_items`, in as many parts as torch has threads.

    For kernels that treat each item apart: the result doesn't depend on the number of threads.

    Args:
        kernel: a `compiled` function.
        num_items: what `first` and `stop` count.
        args: the same for all parts.
    """
    num_parts = min(torch.get_num_threads(), num_items // _LEAST_ITEMS)
    if num_parts <= 1:
        kernel(0, num_items, *args)
        return
    bounds = [num_items * part // num_parts for part in range(num_parts + 1)]
    pool = _pool(os.getpid(), torch.get_num_threads())
    mine, *parts = itertools.pairwise(bounds)
    others = [pool.submit(kernel, *part, *args) for part in parts]
    try:
        kernel(*mine, *args)
    finally:
        wait(others)  # Whatever happens here, they write to the arrays.
    for other in others:
        other.result()


@functools.lru_cache(maxsize=1)
def _pool(process_id: int, num_threads: int) -> ThreadPoolExecutor:
    """Of one process: a forked one has none of its parent's threads."""
    return ThreadPoolExecutor(num_threads - 1, thread_name_prefix=f"compiled-{process_id}")
