"""What a trace of some training steps says: times of phases, operators and collectives.

Works on the trace that `torch.profiler` exports (Chrome's trace event format), within which
`dlrm.profile` has set named ranges: `step N`, the phases by their names, `wait KIND` around
blocking waits, and an empty `issue KIND, NUMBER bytes` right before each collective is issued.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from dlrm.phases import PHASES

PYTHON = "(Python, between operators)"
WAITING = "(waiting for other ranks)"
NUM_SHOWN_OPERATORS = 6
"""So many operators have their place in the timeline."""

_STEP = re.compile(r"step (\d+)")
_ISSUE = re.compile(r"issue (\w+), (\d+) bytes")
_WAIT = "wait "
_C10D, _GLOO = "c10d::", "gloo:"
_OBJECTS = "allgather"
"""What objects travel by, whatever values travel by."""


def step_range(step: int) -> str:
    """Name of a step's range."""
    return f"step {step}"


def issue_range(kind: str, num_bytes: int) -> str:
    """Name of the mark before a collective."""
    return f"issue {kind}, {num_bytes} bytes"


def wait_range(kind: str) -> str:
    """Name of the range of a blocking wait."""
    return f"{_WAIT}{kind}"


@dataclass(frozen=True)
class Span:
    """Something that took time.

    Attributes:
        thread: of the operating system.
        start_ms: on the trace's clock.
        is_operator: an operator of torch; else a named range.
    """

    name: str
    thread: int
    start_ms: float
    ms: float
    is_operator: bool

    @property
    def end_ms(self) -> float:
        """Its end."""
        return self.start_ms + self.ms


@dataclass(frozen=True)
class Collective:
    """A collective from its issue to its end.

    Attributes:
        kind: see `embeddings.communicator.KINDS`.
        sent_bytes: to other ranks.
        issued_ms: on the trace's clock.
        flight: from when gloo takes it up (else, from its issue) to its end.
    """

    kind: str
    sent_bytes: int
    issued_ms: float
    flight: Span


@dataclass(frozen=True)
class OperatorTime:
    """An operator, all its calls together, per step.

    Attributes:
        self_ms: without the operators that it calls.
        share: of the step's time.
    """

    name: str
    self_ms: float
    calls: float
    share: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name,
            "self_ms": round(self.self_ms, 4),
            "calls": round(self.calls, 2),
            "share": round(self.share, 5),
        }


@dataclass(frozen=True)
class TraceFigures:
    """Means over the profiled steps, and one of them in detail.

    Attributes:
        steps: their numbers.
        step_ms: time of a step.
        phase_ms: of each phase that occurred; what is left of `step_ms` belongs to none.
        operators: by falling self time; their shares add up to 1.
        timeline: of the step with the median time: `step`, `step_ms`, and rows of
            `[name, start_ms, ms]` from the step's start: `phases`, `operators` (those with the
            longest self time), `waits`, `collectives` (which may begin before and end after it).
    """

    steps: list[int]
    step_ms: float
    phase_ms: dict[str, float]
    operators: list[OperatorTime]
    timeline: dict[str, Any]


def figures_of(events: Sequence[dict[str, Any]]) -> TraceFigures:
    """The figures of a trace.

    Args:
        events: its `traceEvents`, with at least one step.
    """
    spans = _spans(events)
    steps = {int(found[1]): s for s in spans if (found := _STEP.fullmatch(s.name))}
    assert steps, "a profile has steps"
    main_thread = next(iter(steps.values())).thread
    starts_ms = sorted(step.start_ms for step in steps.values())
    ends_ms = sorted(step.end_ms for step in steps.values())
    # Steps don't overlap: within one, one more has started than has ended.
    inside = [
        span
        for span in spans
        if span.thread == main_thread
        and bisect_right(starts_ms, span.start_ms) > bisect_right(ends_ms, span.start_ms)
    ]
    step_ms = fmean(step.ms for step in steps.values())
    phases = [span for span in inside if span.name in PHASES and not span.is_operator]
    phase_ms = {name: sum(s.ms for s in phases if s.name == name) / len(steps) for name in PHASES}
    operators = _operators(inside, len(steps), step_ms)
    number, median = sorted(steps.items(), key=lambda item: item[1].ms)[len(steps) // 2]
    named = [o.name for o in operators if o.name not in (PYTHON, WAITING)]
    shown = named[:NUM_SHOWN_OPERATORS]
    under_way = [
        (c.kind, replace(c.flight, start_ms=c.issued_ms, ms=c.flight.end_ms - c.issued_ms))
        for c in collectives_of(spans)
    ]
    timeline = {
        "step": number,
        "step_ms": round(median.ms, 4),
        "phases": _row(median, ((s.name, s) for s in phases)),
        "operators": _row(median, ((s.name, s) for s in inside if s.name in shown)),
        "waits": _row(
            median,
            ((s.name.removeprefix(_WAIT), s) for s in inside if s.name.startswith(_WAIT)),
        ),
        "collectives": _row(median, under_way),
    }
    return TraceFigures(sorted(steps), step_ms, phase_ms, operators, timeline)


def collectives_of(spans: Iterable[Span]) -> list[Collective]:
    """The collectives in the order of their issue.

    A mark says what the next call of `c10d` carries. gloo takes that up when one of its threads is
    free, perhaps after later calls of another type, but those of one type in their order. Where no
    such call follows, in shared memory and over sockets, nothing tells of it until it is waited
    for.
    """
    in_order = sorted(spans, key=lambda s: s.start_ms)
    flights: dict[str, deque[Span]] = defaultdict(deque)
    for span in in_order:
        if span.name.startswith(_GLOO):
            flights[_letters(span.name.removeprefix(_GLOO))].append(span)
    found_all = _until_waited_for(in_order)
    mark: tuple[str, int, float] | None = None
    for span in in_order:
        if found := _ISSUE.fullmatch(span.name):
            mark = found[1], int(found[2]), span.start_ms
        elif _is_call(span) and mark is not None:
            called = _letters(span.name.removeprefix(_C10D))
            for waiting in (w for name, w in flights.items() if called.startswith(name)):
                while waiting and waiting[0].start_ms < span.start_ms:  # Issued before the trace.
                    waiting.popleft()
                if waiting:
                    found_all.append(Collective(*mark, waiting.popleft()))
            mark = None
    return sorted(found_all, key=lambda collective: collective.issued_ms)


def _until_waited_for(in_order: Sequence[Span]) -> list[Collective]:
    """Those that `c10d` isn't called for; of one kind they are waited for in the order of their
    issue."""
    found_all: list[Collective] = []
    issued: dict[str, deque[tuple[str, int, float]]] = defaultdict(deque)
    last: re.Match[str] | None = None
    for span in in_order:
        if found := _ISSUE.fullmatch(span.name):
            issued[found[1]].append((found[1], int(found[2]), span.start_ms))
            last = found
        elif _is_call(span) and last is not None:
            issued[last[1]].pop()
            last = None
        elif span.name.startswith(_WAIT) and issued[span.name.removeprefix(_WAIT)]:
            last = None
            mark = issued[span.name.removeprefix(_WAIT)].popleft()
            flight = replace(span, start_ms=mark[2], ms=span.end_ms - mark[2])
            found_all.append(Collective(*mark, flight))
    return found_all


def _is_call(span: Span) -> bool:
    """Whether a collective is called for; objects are none that was marked."""
    return span.name.startswith(_C10D) and not span.name.startswith(_C10D + _OBJECTS)


def name_trace(trace: dict[str, Any], rank: int) -> None:
    """Names the rank and, of each collective, what it carries, in a trace; in place."""
    events = trace["traceEvents"]
    kinds = {
        (c.flight.name, c.flight.start_ms): (c.kind, c.sent_bytes)
        for c in collectives_of(_spans(events))
    }
    for event in events:
        if event.get("ph") == "M" and event.get("name") == "process_name":
            event["args"] = {"name": f"rank {rank}"}
        known = kinds.get((event["name"], float(event.get("ts", 0)) / 1e3))
        if known is not None and event.get("ph") == "X":
            event["name"] = f"{known[0]} ({event['name']})"
            event["args"] = {**event.get("args", {}), "sent bytes": known[1]}


def _letters(name: str) -> str:
    """`alltoallbase` of `alltoall_base_`."""
    return name.replace("_", "")


def _spans(events: Iterable[dict[str, Any]]) -> list[Span]:
    """All operators and named ranges; the format counts microseconds."""
    return [
        Span(
            event["name"],
            event["tid"],
            float(event["ts"]) / 1e3,
            float(event["dur"]) / 1e3,
            event["cat"] == "cpu_op",
        )
        for event in events
        if event.get("ph") == "X" and event.get("cat") in ("cpu_op", "user_annotation")
    ]


def _operators(inside: list[Span], num_steps: int, step_ms: float) -> list[OperatorTime]:
    """Self times within the steps, of one thread; a range's own time is Python's, or waiting."""
    self_ms: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    stack: list[tuple[Span, str]] = []
    of_step = [s for s in inside if not s.name.startswith((_GLOO, "ProfilerStep"))]
    for span in sorted(of_step, key=lambda s: (s.start_ms, -s.ms)):
        name = span.name
        if not span.is_operator:
            name = WAITING if span.name.startswith(_WAIT) else PYTHON
        while stack and stack[-1][0].end_ms <= span.start_ms:
            stack.pop()
        if stack:
            caller, caller_name = stack[-1]
            self_ms[caller_name] -= min(span.end_ms, caller.end_ms) - span.start_ms
        self_ms[name] += span.ms
        calls[name] += 1
        stack.append((span, name))
    found = [
        OperatorTime(name, ms / num_steps, calls[name] / num_steps, ms / num_steps / step_ms)
        for name, ms in self_ms.items()
    ]
    return sorted(found, key=lambda o: (-o.self_ms, o.name))


def _row(step: Span, named: Iterable[tuple[str, Span]]) -> list[list[Any]]:
    """Those that overlap the step, from its start on."""
    return [
        [name, round(span.start_ms - step.start_ms, 4), round(span.ms, 4)]
        for name, span in named
        if span.start_ms < step.end_ms and span.end_ms > step.start_ms
    ]
