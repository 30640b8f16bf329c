"""An event simulator: when operations begin and end that share first-in-first-out resources.

It knows nothing of tables: who builds the operations says what they stand for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Op:
    """One operation.

    Attributes:
        resource: what it occupies, alone, while it runs.
        duration_s: seconds it runs; 0 is allowed.
        after: positions, in the list of operations, of those that must have ended before.
        label: for people.
        step: the step it belongs to.
    """

    resource: str
    duration_s: float
    after: tuple[int, ...] = ()
    label: str = ""
    step: int = 0


@dataclass(frozen=True)
class Span:
    """When an operation ran, in seconds from the start of the first."""

    begin_s: float
    end_s: float


def simulate(ops: Sequence[Op]) -> list[Span]:
    """Runs operations in order of issue.

    A resource takes its operations one at a time, in the order in which they were issued: one that
    waits for another resource holds up those behind it. Each begins as soon as the one before it on
    its resource and all in its `after` have ended. No resource but these limits anything, so that
    what shares memory bandwidth, say, has to share a resource or have a longer duration.

    Args:
        ops: in the order of issue.

    Returns:
        The span of each operation.

    Raises:
        ValueError: a duration that is negative or not finite; an operation that waits for itself,
            for a later one, or for one that doesn't exist.
    """
    free_s: dict[str, float] = {}
    spans: list[Span] = []
    for index, op in enumerate(ops):
        if not (math.isfinite(op.duration_s) and op.duration_s >= 0):
            raise ValueError(
                f"{_name(index, op)} lasts {op.duration_s} s, but a duration must be finite and "
                f"at least 0"
            )
        begin_s = free_s.get(op.resource, 0.0)
        for before in op.after:
            if not 0 <= before < index:
                raise ValueError(
                    f"{_name(index, op)} waits for operation {before}, but can only wait for one "
                    f"that was issued before it"
                )
            begin_s = max(begin_s, spans[before].end_s)
        span = Span(begin_s, begin_s + op.duration_s)
        free_s[op.resource] = span.end_s
        spans.append(span)
    return spans


def step_time_s(
    ops: Sequence[Op], *, resource: str | None = None, spans: Sequence[Span] | None = None
) -> float:
    """The mean seconds from the end of one step to the end of the next, once a pipeline is filled.

    A step ends with the last of its operations. The mean is over the second half of the steps: a
    pipeline fills in the first.

    Args:
        ops: in the order of issue.
        resource: only operations on it end a step. Work for later steps that the last steps have
            nothing to give to (their staging, their writing back) then doesn't count; None: all do.
        spans: what `simulate(ops)` returned, if it is known already.

    Raises:
        ValueError: fewer than two steps, or what `simulate` raises.
    """
    spans = simulate(ops) if spans is None else spans
    end_s: dict[int, float] = {}
    for op, span in zip(ops, spans, strict=True):
        if resource is None or op.resource == resource:
            end_s[op.step] = max(end_s.get(op.step, 0.0), span.end_s)
    steps = sorted(end_s)
    if len(steps) < 2:
        where = "" if resource is None else f" on the resource {resource!r}"
        raise ValueError(f"{len(steps)} steps{where}, but a time per step needs at least 2")
    num_measured = len(steps) // 2
    return (end_s[steps[-1]] - end_s[steps[-1 - num_measured]]) / num_measured


def _name(index: int, op: Op) -> str:
    label = f" {op.label}" if op.label else ""
    return f"operation {index}{label} (step {op.step}, on {op.resource})"
