"""How often the keys of a key space were looked up in the last steps: for hot rows that follow."""

from __future__ import annotations

import warnings
from collections import deque

import numpy as np
import numpy.typing as npt

from embeddings.keys import sum_counts
from embeddings.plan_words import counted, shown_bytes

Int64Array = npt.NDArray[np.int64]


class RecentCounts:
    """How often the keys of one key space were looked up in the last steps.

    The counts of each step are kept as they come, so that the window moves by whole steps and what
    `merged` gives is exact. Its memory is bounded by both arguments: beyond `limit_bytes` the
    oldest steps are dropped, with one warning. The newest step always stays.

    Args:
        num_steps: length of the window.
        limit_bytes: of the keys and counts held.

    Raises:
        ValueError: where `num_steps` is below 1.
    """

    def __init__(self, num_steps: int, *, limit_bytes: int = 1 << 28) -> None:
        if num_steps < 1:
            raise ValueError(f"num_steps is {num_steps}, must be at least 1")
        self._num_steps = num_steps
        self._limit_bytes = limit_bytes
        self._steps: deque[tuple[Int64Array, Int64Array]] = deque()
        self._warned = False
        self.num_bytes = 0
        """Bytes of the keys and counts held."""

    @property
    def num_steps(self) -> int:
        """Steps that the counts are of: `num_steps` once the window is full, if memory allows."""
        return len(self._steps)

    def add(self, keys_K: Int64Array, counts_K: Int64Array) -> None:
        """One step's keys and how often each was looked up; both are copied.

        Raises:
            ValueError: where the arrays don't fit together or a key is negative.
        """
        if keys_K.shape != counts_K.shape or keys_K.ndim != 1:
            raise ValueError(
                f"counts_K has shape {counts_K.shape}, keys_K {keys_K.shape}: one count per key "
                f"is needed"
            )
        if keys_K.size and int(keys_K.min()) < 0:
            raise ValueError(f"key {int(keys_K.min())} is negative")
        step = np.array(keys_K, dtype=np.int64), np.array(counts_K, dtype=np.int64)
        self._steps.append(step)
        self.num_bytes += _nbytes(step)
        if len(self._steps) > self._num_steps:
            self._drop_oldest()
        while self.num_bytes > self._limit_bytes and len(self._steps) > 1:
            self._drop_oldest()
            self._warn()

    def merged(self) -> tuple[Int64Array, Int64Array]:
        """The distinct keys of the window in rising order, and their counts summed; both int64."""
        return sum_counts(tuple(self._steps))

    def clear(self) -> None:
        """Forgets all steps."""
        self._steps.clear()
        self.num_bytes = 0

    def _drop_oldest(self) -> None:
        self.num_bytes -= _nbytes(self._steps.popleft())

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"counts of recent look-ups cover {counted(len(self._steps), 'step')} instead of "
                f"{self._num_steps:,}: more don't fit into {shown_bytes(self._limit_bytes)}",
                stacklevel=3,
            )


def _nbytes(step: tuple[Int64Array, Int64Array]) -> int:
    return step[0].nbytes + step[1].nbytes
