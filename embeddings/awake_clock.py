"""A clock for time limits that doesn't run while the process itself is stopped."""

from __future__ import annotations

import time
from collections.abc import Callable

LOOK_S = 0.5
"""Whoever waits looks at the clock at least this often."""
LONGEST_S = 1.0
"""What counts between two looks at most."""


class AwakeClock:
    """Seconds since it was made, of which at most one counts between two looks.

    A job that is suspended (SIGSTOP, a frozen container, a paused virtual machine) finds on waking
    that hours have gone by in which nobody could have answered. Its time limits count looks: who
    waits must look every `LOOK_S`.

    Args:
        now: seconds of a clock that goes on meanwhile.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._last_s = now()
        self._sum_s = 0.0

    def __call__(self) -> float:
        """Looks."""
        now_s = self._now()
        self._sum_s += min(max(0.0, now_s - self._last_s), LONGEST_S)
        self._last_s = now_s
        return self._sum_s
