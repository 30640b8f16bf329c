"""The phases of a training step: their names and their clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

PHASES = (
    "data_wait",
    "plan",
    "lookup",
    "forward",
    "backward",
    "dense_reduce",
    "apply",
    "dense_update",
)


OTHER = "other"
"""The time of a step that belongs to none of its phases."""
OTHER_SHARE = 0.03
"""From this share of a step on, it is shown."""


def with_other(phase_ms: Mapping[str, float], step_ms: float) -> dict[str, float]:
    """A step's phases, and `other` where they leave more than `OTHER_SHARE` of it unexplained.

    Args:
        phase_ms: the time of each phase.
        step_ms: that of the whole step.
    """
    rest_ms = step_ms - sum(phase_ms.values())
    return {**phase_ms, OTHER: rest_ms} if rest_ms > OTHER_SHARE * step_ms else dict(phase_ms)


class PhaseTimer:
    """Adds up the wall time of a step's phases.

    Attributes:
        total_s: by phase.
        on_phase: told whenever one begins.
        around: makes what each phase runs within (the profiler's named ranges).
        on_span: told of each phase when it began and ended, in seconds of `time.perf_counter`.
    """

    def __init__(self) -> None:
        self.total_s = dict.fromkeys(PHASES, 0.0)
        self.on_phase: Callable[[str], None] = lambda phase: None
        self.around: Callable[[str], AbstractContextManager[None]] = lambda phase: nullcontext()
        self.on_span: Callable[[str, float, float], None] | None = None

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self.on_phase(phase)
        start = time.perf_counter()
        try:
            with self.around(phase):
                yield
        finally:
            end = time.perf_counter()
            self.total_s[phase] += end - start
            if self.on_span is not None:
                self.on_span(phase, start, end)
