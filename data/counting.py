"""`KeyCounter`: counts 64-bit keys exactly in bounded memory, spilling sorted runs to disk.

The usual external merge: additions are buffered; a full buffer is sorted and summed into a *run*
(sorted unique keys with their counts); runs are written to disk and, at the end, read together one
range of keys at a time. Runs of one level are merged when there are many, as in a log-structured
merge tree, so the number of open files stays small.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from data.files import naming
from data.tokens import collision_error

_RUNS_PER_LEVEL = 32
_SAMPLE_EVERY = 4096


@dataclass(frozen=True)
class Run:
    """Sorted unique `keys` (uint64), their `counts` (int64) and, for text, their `tokens`."""

    keys: np.ndarray
    counts: np.ndarray
    tokens: pa.Array | pa.ChunkedArray | None = None

    def slice(self, start: int, stop: int) -> Run:
        """Entries `start … stop-1`."""
        tokens = None if self.tokens is None else self.tokens.slice(start, stop - start)
        return Run(self.keys[start:stop], self.counts[start:stop], tokens)

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays."""
        text_bytes = 0 if self.tokens is None else self.tokens.nbytes
        return int(self.keys.nbytes + self.counts.nbytes + text_bytes)


class KeyCounter:
    """Counts of one vocabulary's keys.

    Args:
        folder: where runs are spilled; made when first needed.
        buffer_bytes: memory for additions before they are summed and, where that doesn't help,
            spilled.
    """

    def __init__(self, folder: Path, buffer_bytes: int) -> None:
        self._folder = folder
        self._buffer_bytes = buffer_bytes
        self._pending: list[Run] = []
        self._pending_bytes = 0
        self._levels: list[list[Path]] = []
        self._num_files = 0

    def add(self, keys: np.ndarray, counts: np.ndarray, tokens: pa.Array | None = None) -> None:
        """Adds `counts` of `keys`, in any order; keys with count 0 are left out."""
        is_counted = counts > 0
        if not is_counted.all():
            keys, counts = keys[is_counted], counts[is_counted]
            tokens = None if tokens is None else tokens.filter(pa.array(is_counted))
        if len(keys) == 0:
            return
        run = Run(np.array(keys, dtype=np.uint64), counts.astype(np.int64), tokens)
        self._pending.append(run)
        self._pending_bytes += run.num_bytes
        if self._pending_bytes > self._buffer_bytes:
            summed = _sum_runs(self._pending)
            self._pending, self._pending_bytes = [summed], summed.num_bytes
            if self._pending_bytes > self._buffer_bytes // 2:
                self._spill(0, iter([summed]))
                self._pending, self._pending_bytes = [], 0

    def merged(self, chunk_keys: int = 1 << 20) -> Iterator[Run]:
        """All keys in order with their total counts, in runs of about `chunk_keys` keys.

        May be called again.

        Raises:
            UserError: where two texts share a key (see `collision_error`).
        """
        runs = [_load_run(path) for level in self._levels for path in level]
        if self._pending:
            summed = _sum_runs(self._pending)
            self._pending, self._pending_bytes = [summed], summed.num_bytes
            runs.append(summed)
        yield from _merge(runs, chunk_keys)

    def _spill(self, level: int, runs: Iterator[Run]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"run-{self._num_files:06d}"
        self._num_files += 1
        _save_run(path, runs)
        while len(self._levels) <= level:
            self._levels.append([])
        self._levels[level].append(path)
        if len(self._levels[level]) >= _RUNS_PER_LEVEL:
            paths = self._levels[level]
            self._levels[level] = []
            self._spill(level + 1, _merge([_load_run(p) for p in paths], 1 << 20))
            for old in paths:
                _delete_run(old)


def _sum_runs(runs: list[Run]) -> Run:
    keys = np.concatenate([run.keys for run in runs])
    counts = np.concatenate([run.counts for run in runs])
    order = np.argsort(keys, kind="stable")
    keys, counts = keys[order], counts[order]
    is_first = np.empty(len(keys), dtype=bool)
    is_first[:1] = True
    np.not_equal(keys[1:], keys[:-1], out=is_first[1:])
    starts = np.flatnonzero(is_first)
    totals = np.add.reduceat(counts, starts) if len(starts) else counts
    tokens = None
    if runs[0].tokens is not None:
        tokens = _first_tokens(
            pa.concat_arrays([_combined(run.tokens) for run in runs]), order, is_first
        )
    return Run(keys[starts], totals, tokens)


def _first_tokens(tokens: pa.Array, order: np.ndarray, is_first: np.ndarray) -> pa.Array:
    """The token of each group of equal keys, after checking that all tokens of a group agree."""
    in_order = tokens.take(pa.array(order))
    group = np.cumsum(is_first) - 1
    firsts = in_order.filter(pa.array(is_first))
    if not firsts.take(pa.array(group)).equals(in_order):
        raise collision_error()
    return firsts


def _merge(runs: list[Run], chunk_keys: int) -> Iterator[Run]:
    """K-way merge by ranges of keys: cut points are taken from a sample of all runs' keys."""
    runs = [run for run in runs if len(run.keys)]
    if not runs:
        return
    samples = np.sort(np.concatenate([run.keys[::_SAMPLE_EVERY] for run in runs]))
    cuts = samples[:: max(1, chunk_keys // _SAMPLE_EVERY)][1:]
    cuts = np.unique(cuts)
    _release_pages(runs)
    bounds = [np.concatenate([[0], np.searchsorted(r.keys, cuts), [len(r.keys)]]) for r in runs]
    for piece in range(len(cuts) + 1):
        parts = [
            run.slice(int(bound[piece]), int(bound[piece + 1]))
            for run, bound in zip(runs, bounds, strict=True)
            if bound[piece + 1] > bound[piece]
        ]
        if parts:
            yield _sum_runs(parts)
            _release_pages(runs)


def _save_run(path: Path, runs: Iterator[Run]) -> None:
    """Streams a run to `path`.keys, .counts and, for text, .tokens (Arrow)."""
    tokens_writer = None
    with (
        naming(path),
        ExitStack() as opened,
        open(f"{path}.keys", "wb") as keys_file,
        open(f"{path}.counts", "wb") as counts_file,
    ):
        for run in runs:
            keys_file.write(np.ascontiguousarray(run.keys).data)
            counts_file.write(np.ascontiguousarray(run.counts).data)
            if run.tokens is not None:
                batch = pa.record_batch([_combined(run.tokens)], names=["token"])
                if tokens_writer is None:
                    tokens_file = opened.enter_context(pa.OSFile(f"{path}.tokens", "wb"))
                    tokens_writer = opened.enter_context(pa.ipc.new_file(tokens_file, batch.schema))
                tokens_writer.write_batch(batch)


def _load_run(path: Path) -> Run:
    keys = np.memmap(f"{path}.keys", dtype=np.uint64, mode="r")
    counts = np.memmap(f"{path}.counts", dtype=np.int64, mode="r")
    tokens_path = Path(f"{path}.tokens")
    tokens = None
    if tokens_path.exists():
        with pa.memory_map(str(tokens_path)) as source:
            tokens = pa.ipc.open_file(source).read_all().column("token")
    return Run(keys, counts, tokens)


def _delete_run(path: Path) -> None:
    for suffix in ("keys", "counts", "tokens"):
        Path(f"{path}.{suffix}").unlink(missing_ok=True)


def _combined(tokens: pa.Array | pa.ChunkedArray) -> pa.Array:
    if not isinstance(tokens, pa.ChunkedArray):
        return tokens
    combined = tokens.combine_chunks()
    return pa.concat_arrays(combined.chunks) if isinstance(combined, pa.ChunkedArray) else combined


def _release_pages(runs: list[Run]) -> None:
    """Lets the kernel drop mapped pages of runs on disk: else they count as resident memory."""
    for run in runs:
        for array in (run.keys, run.counts):
            if isinstance(array, np.memmap):
                with contextlib.suppress(OSError):  # Optional: it only saves memory.
                    array._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]
