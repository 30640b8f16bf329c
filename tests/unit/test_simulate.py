"""The simulator: operations wait for what they name and for their turn, and for nothing else."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embeddings.planner.simulate import Op, Span, simulate, step_time_s


@st.composite
def op_lists(draw: st.DrawFn) -> list[Op]:
    ops: list[Op] = []
    for index in range(draw(st.integers(1, 25))):
        after = draw(st.lists(st.integers(0, index - 1), max_size=3)) if index else []
        # Whole numbers: their sums are exact, so that the properties below are equalities.
        duration_s = float(draw(st.integers(0, 9)))
        ops.append(Op(draw(st.sampled_from("abc")), duration_s, tuple(after), step=index // 3))
    return ops


def test_by_hand() -> None:
    """Two resources: the second operation on each waits for its turn, the last also for both."""
    ops = [
        Op("a", 2.0),
        Op("b", 1.0, after=(0,)),
        Op("a", 5.0),
        Op("b", 3.0),
        Op("a", 1.0, after=(1, 3)),
    ]
    assert simulate(ops) == [Span(0, 2), Span(2, 3), Span(2, 7), Span(3, 6), Span(7, 8)]


def test_a_waiting_operation_holds_up_its_queue() -> None:
    """First in, first out: the third needs nothing, but stands behind the second."""
    ops = [Op("a", 4.0), Op("b", 1.0, after=(0,)), Op("b", 1.0)]
    assert simulate(ops)[2] == Span(5, 6)


def test_nothing_to_do() -> None:
    assert simulate([]) == []
    assert simulate([Op("a", 0.0)]) == [Span(0, 0)]


@given(op_lists())
def test_each_begins_as_soon_as_it_may_and_no_sooner(ops: list[Op]) -> None:
    """The begin is the latest end among those it waits for and the one before it in its queue."""
    spans = simulate(ops)
    for index, (op, span) in enumerate(zip(ops, spans, strict=True)):
        before = [spans[i].end_s for i in op.after]
        queue = [i for i in range(index) if ops[i].resource == op.resource]
        if queue:
            before.append(spans[queue[-1]].end_s)
        assert span.begin_s == max(before, default=0.0)
        assert span.end_s - span.begin_s == op.duration_s


@given(op_lists())
def test_all_takes_at_least_the_busiest_resource_and_at_most_the_sum(ops: list[Op]) -> None:
    busy_s = {op.resource: 0.0 for op in ops}
    for op in ops:
        busy_s[op.resource] += op.duration_s
    end_s = max(span.end_s for span in simulate(ops))
    assert max(busy_s.values()) <= end_s <= sum(busy_s.values())


@given(op_lists(), st.data())
def test_a_longer_operation_makes_nothing_end_sooner(ops: list[Op], data: st.DataObject) -> None:
    """Without this, choosing by prediction could reward a slower link."""
    index = data.draw(st.integers(0, len(ops) - 1))
    op = ops[index]
    longer = [*ops[:index], Op(op.resource, op.duration_s + 1, op.after), *ops[index + 1 :]]
    for before, after in zip(simulate(ops), simulate(longer), strict=True):
        assert after.end_s >= before.end_s


@pytest.mark.parametrize("before", [1, 2, 5, -1])
def test_waiting_for_what_was_not_issued_before_is_refused(before: int) -> None:
    ops = [Op("a", 1.0), Op("a", 1.0, after=(before,), label="copy", step=7), Op("a", 1.0)]
    with pytest.raises(ValueError, match=rf"operation 1 copy \(step 7, on a\).*{before}"):
        simulate(ops)


@pytest.mark.parametrize("duration_s", [-1e-9, math.nan, math.inf])
def test_a_duration_that_is_none_is_refused(duration_s: float) -> None:
    with pytest.raises(ValueError, match="finite and at least 0"):
        simulate([Op("a", duration_s)])


def test_step_time_leaves_the_filling_out() -> None:
    """Two slow steps at the start, then 2 s each: only the second half counts."""
    ops = [Op("a", duration_s, step=s) for s, duration_s in enumerate([50.0, 50.0, 2.0, 2.0])]
    assert step_time_s(ops) == 2.0


def test_step_time_is_the_mean_of_bursts() -> None:
    ops = [Op("a", float(1 + 2 * (step % 2)), step=step) for step in range(8)]
    assert step_time_s(ops) == 2.0


def test_step_time_of_one_resource() -> None:
    """Work that trails behind doesn't lengthen a step that ends without it."""
    ops = []
    for step in range(6):
        ops.append(Op("compute", 1.0, step=step))
        ops.append(Op("trailing", 3.0, step=step))
    assert step_time_s(ops, resource="compute") == 1.0
    assert step_time_s(ops) == 3.0


def test_step_time_takes_known_spans() -> None:
    ops = [Op("a", 1.0, step=step) for step in range(4)]
    spans = [Span(5.0 * step, 5.0 * step + 1) for step in range(4)]
    assert step_time_s(ops, spans=spans) == 5.0


def test_one_step_has_no_step_time() -> None:
    ops = [Op("a", 1.0), Op("a", 1.0), Op("b", 1.0, step=1)]
    with pytest.raises(ValueError, match="1 steps on the resource 'a'"):
        step_time_s(ops, resource="a")
    with pytest.raises(ValueError, match="0 steps"):
        step_time_s([])
