"""Ratios of what was measured in turns, and their spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest of some figures."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one figure."""
        assert values
        return cls(statistics.median(values), min(values), max(values))

    def text(self, decimals: int) -> str:
        """`1.31 (1.25-1.40)`."""
        median, least, greatest = (
            f"{value:.{decimals}f}" for value in (self.median, self.least, self.greatest)
        )
        return f"{median} ({least}-{greatest})"

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return {"median": self.median, "min": self.least, "max": self.greatest}


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Ratio of each turn: the machine was as fast for the one as for the other, as far as it can be
    told. Both have a figure for every turn."""
    return [top / bottom for top, bottom in zip(numerators, denominators, strict=True)]
