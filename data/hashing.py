"""Hashes of whole numbers: rows of hashed tables, random splits, and how many keys there are."""

from __future__ import annotations

import numpy as np

_KEPT = 1 << 14


def mix(keys: np.ndarray) -> np.ndarray:
    """uint64 → uint64, one to one: splitmix64's finaliser (Steele et al., 2014).

    Every bit of the result depends on every bit of the key, so that keys in steps of a round number
    don't share their remainders.
    """
    u = np.uint64
    mixed = (keys ^ (keys >> u(30))) * u(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> u(27)
    mixed *= u(0x94D049BB133111EB)
    mixed ^= mixed >> u(31)
    return mixed


class DistinctKeys:
    """How many distinct keys were seen, in 128 KiB: the smallest mixed keys are kept.

    Exact up to 16,384 keys; beyond that the largest one kept tells how densely keys lie, with a
    standard error of 0.8 % (Bar-Yossef et al., 2002). Independent of the order of additions.
    """

    def __init__(self) -> None:
        self._kept = np.empty(0, dtype=np.uint64)

    def add(self, mixed: np.ndarray) -> None:
        """Adds keys after `mix`, in any order."""
        if len(self._kept) == _KEPT:
            mixed = mixed[mixed < self._kept[-1]]
        if len(mixed):
            self._kept = np.union1d(self._kept, mixed)[:_KEPT]

    def estimate(self) -> int:
        """The number of distinct keys."""
        if len(self._kept) < _KEPT:
            return len(self._kept)
        return round((_KEPT - 1) * 2**64 / (int(self._kept[-1]) + 1))


def expected_rows(num_keys: int, num_rows: int) -> float:
    """How many of `num_rows` rows that many keys use, each put on a row by chance."""
    return float(num_rows * -np.expm1(num_keys * np.log1p(-1 / num_rows))) if num_rows > 1 else 1.0
