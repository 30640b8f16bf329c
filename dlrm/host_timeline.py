"""A few steps of a run with tables in host memory: what was computed while rows were on their way.

Recorded on rank 0, in the middle of a short run or from step 10 on, and written to
host_timeline.json, from which the report draws its picture.
"""

from __future__ import annotations

from typing import Any

from dlrm.phases import PhaseTimer
from embeddings.host.executor import COMPUTE, Timeline

HOST_TIMELINE = "host_timeline.json"
_FIRST_STEP = 10
_NUM_STEPS = 4


class HostTimeline:
    """Records the phases of some steps beside what the queues do.

    Args:
        timeline: of the queues.
        timer: of the phases.
        total_steps: of the run.
        steps_done: steps before it was resumed.
    """

    def __init__(
        self, timeline: Timeline, timer: PhaseTimer, total_steps: int, steps_done: int = 0
    ) -> None:
        self._timeline, self._timer = timeline, timer
        left = total_steps - steps_done
        self._first = steps_done + min(_FIRST_STEP, max(1, left // 2))
        self._last = min(self._first + _NUM_STEPS - 1, total_steps)
        self._step = steps_done + 1
        self._follow()

    def step_done(self, step: int) -> None:
        """Tells the number of a step that is done."""
        self._step = step + 1
        self._follow()

    def _follow(self) -> None:
        is_on = self._first <= self._step <= self._last
        self._timeline.is_recording = is_on
        self._timer.on_span = self._add if is_on else None

    def _add(self, phase: str, begin_s: float, end_s: float) -> None:
        self._timeline.add(COMPUTE, phase, self._step, begin_s, end_s)

    def figures(self) -> dict[str, Any] | None:
        """What host_timeline.json has: `spans` as [row, name, start, length] in ms; None where no
        step was recorded."""
        spans = self._timeline.spans()
        phases = [span for span in spans if span.queue == COMPUTE]
        if not phases:
            return None
        start_s, end_s = phases[0].begin_s, max(span.end_s for span in phases)
        return {
            "first_step": self._first,
            "num_steps": self._last - self._first + 1,
            "length_ms": 1000 * (end_s - start_s),
            "spans": [
                [
                    span.queue,
                    span.label,
                    1000 * (span.begin_s - start_s),
                    1000 * (span.end_s - span.begin_s),
                ]
                for span in spans
            ],
        }
