"""What a benchmark was to reach, and what it did: printed and kept, but no goal fails it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Goal:
    """What was to be reached, and what was.

    Attributes:
        name: of what.
        value: median over the turns of a ratio; of memory, the greatest, in bytes.
        limit: at least that of a ratio, at most that of memory.
        text: for people.
    """

    name: str
    value: float
    limit: float
    is_reached: bool
    text: str


def said(is_reached: bool) -> str:
    """For the end of a goal's text."""
    return "reached" if is_reached else "MISSED"
