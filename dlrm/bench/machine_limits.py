"""What this machine can do at most: matrix products and memory (`network.py` measures the link).

Measured by all ranks at once, with the threads that a rank has in a run, as they share the machine.
Each figure is the best of several tries, since what disturbs a try only makes it slower, and the
mean over the ranks.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from dlrm.launch import WorkerContext

_TRY_S, _LEAST_TRIES = 0.2, 3
# (m, k, n): square, and a batch through a layer.
_GEMM_SHAPES = ((1024, 1024, 1024), (2048, 512, 512), (2048, 512, 256))
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_CACHE = Path("/sys/devices/system/cpu/cpu0/cache")
_CACHE_MULTIPLE, _LEAST_ARRAYS_BYTES = 4, 256 * 2**20
_NUM_GATHERED_ROWS = 2**18


@dataclass(frozen=True)
class MachineLimits:
    """Of one rank, while all ranks work.

    Attributes:
        gemm_flops_per_s: by precision, matrix products of the best of some shapes.
        stream_bytes_per_s: read and written by a copy, or by `a + s·b` (McCalpin's triad), of
            arrays several times as large as the last cache.
        gather_bytes_per_s: of rows read from random places of a table of that size, once each.
        row_bytes: of such a row.
        arrays_bytes: what the arrays, and the table, take in all ranks together.
        link_bytes_per_s: what a rank sends while it receives as much; None for one rank.
        latency_us: until one byte is there, half of its round trip; None for one rank.
    """

    gemm_flops_per_s: dict[str, float]
    stream_bytes_per_s: float
    gather_bytes_per_s: float
    row_bytes: int
    arrays_bytes: int
    link_bytes_per_s: float | None = None
    latency_us: float | None = None


def measure_limits(context: WorkerContext, dim: int) -> MachineLimits:
    """Measures all but the link, for a few seconds; all ranks call it, within their process group.

    Args:
        context: this rank.
        dim: `D`, of the rows that are gathered.
    """
    arrays_bytes = max(_LEAST_ARRAYS_BYTES, _CACHE_MULTIPLE * last_cache_bytes())
    own_bytes = arrays_bytes // context.world_size
    rates = [
        *(_gemm_flops_per_s(context, dtype) for dtype in _DTYPES.values()),
        _stream_bytes_per_s(context, own_bytes),
        _gather_bytes_per_s(context, own_bytes, dim),
    ]
    if context.world_size > 1:
        gathered: list[Any] = [None] * context.world_size
        dist.all_gather_object(gathered, rates)
        rates = [fmean(of_ranks) for of_ranks in zip(*gathered, strict=True)]
    fp32, bf16, stream, gather = rates
    return MachineLimits({"fp32": fp32, "bf16": bf16}, stream, gather, 4 * dim, arrays_bytes)


def last_cache_bytes() -> int:
    """Size of the last level of cache; 0 where the system doesn't tell."""
    sizes = []
    for path in _CACHE.glob("index*/size"):
        found = re.fullmatch(r"(\d+)([KM])", path.read_text().strip())
        if found:
            sizes.append(int(found[1]) * {"K": 2**10, "M": 2**20}[found[2]])
    return max(sizes, default=0)


def _gemm_flops_per_s(context: WorkerContext, dtype: torch.dtype) -> float:
    best = 0.0
    for m, k, n in _GEMM_SHAPES:
        left, right = torch.ones(m, k).to(dtype), torch.ones(n, k).to(dtype).t()
        out = torch.empty(m, n, dtype=dtype)
        seconds = _best_s(context, partial(torch.mm, left, right, out=out))
        best = max(best, 2 * m * k * n / seconds)
    return best


def _stream_bytes_per_s(context: WorkerContext, arrays_bytes: int) -> float:
    a, b, c = (torch.ones(arrays_bytes // 12) for _ in range(3))
    copy_s = _best_s(context, lambda: c.copy_(a))
    triad_s = _best_s(context, lambda: torch.add(a, b, alpha=3.0, out=c))
    return max(2 * a.nbytes / copy_s, 3 * a.nbytes / triad_s)


def _gather_bytes_per_s(context: WorkerContext, table_bytes: int, dim: int) -> float:
    """The better of `index_select` and `embedding_bag`, whose kernels fetch ahead in other ways."""
    num_rows = table_bytes // (4 * dim)
    table_RD = torch.ones(num_rows, dim)
    generator = torch.Generator().manual_seed(0)
    num_read = min(_NUM_GATHERED_ROWS, num_rows // 4)
    rows_K = torch.randint(num_rows, (8, num_read), generator=generator)
    offsets_K = torch.arange(num_read)
    out_KD = torch.empty(num_read, dim)
    turn = 0

    def next_rows() -> torch.Tensor:
        nonlocal turn
        turn += 1
        return rows_K[turn % len(rows_K)]

    def pool() -> None:
        with torch.no_grad():
            functional.embedding_bag(next_rows(), table_RD, offsets_K, mode="sum")

    seconds = min(
        _best_s(context, lambda: torch.index_select(table_RD, 0, next_rows(), out=out_KD)),
        _best_s(context, pool),
    )
    return out_KD.nbytes / seconds


def _best_s(context: WorkerContext, call: Callable[[], Any]) -> float:
    """Seconds of the fastest of several calls, begun by all ranks at once."""
    context.heartbeat.beat(0, "limits")
    call()  # Touches the memory, and chooses kernels.
    if context.world_size > 1:
        dist.barrier()
    times_s: list[float] = []
    begin_s = time.perf_counter()
    while len(times_s) < _LEAST_TRIES or time.perf_counter() - begin_s < _TRY_S:
        start_s = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - start_s)
    return min(times_s)
