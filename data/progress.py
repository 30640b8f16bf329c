"""How long work on data tells a display where it stands (`data` knows no display)."""

from __future__ import annotations

from typing import Protocol


class ProgressListener(Protocol):
    """What a display needs to implement to follow `prepare`."""

    def phase(self, name: str, total_bytes: int) -> None:
        """A phase begins; `advance` will add up to `total_bytes`."""

    def advance(self, num_bytes: int, num_rows: int) -> None:
        """Some bytes and rows of the phase are done."""


class SilentListener:
    """Follows nothing."""

    def phase(self, name: str, total_bytes: int) -> None:
        """Ignored."""

    def advance(self, num_bytes: int, num_rows: int) -> None:
        """Ignored."""
