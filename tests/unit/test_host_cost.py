"""Predicted step times of host-resident tables: the closed forms, their order, and the choice."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embeddings.host.cost import (
    DenseTime,
    HostRates,
    LinkRates,
    Mode,
    StepWork,
    choose_mode,
    predict_step_s,
    step_ops,
    sweep,
)
from embeddings.planner.simulate import simulate

WORK = StepWork(
    num_samples=1000,
    record_bytes=100,
    num_cold=1000.0,
    num_fetched=1000.0,
    num_forwarded=0.0,
    num_written=1000.0,
    all_hot_share=0.6,
    num_unique=4000.0,
    pooled_bytes=800_000,
    row_bytes=80,
)
# 100,000 bytes of records: 1 ms to read, 2 ms to write, 0.5 + 0.25 ms over the link.
RATES = HostRates(1e8, 5e7, LinkRates(4e8, 0.5e-3))
# 1 ms and 4 ms per 1000 samples.
DENSE = DenseTime(1e-3, 4e-6)
DUPLEX = LinkRates(4e8, 0.5e-3)
HALF_DUPLEX = LinkRates(4e8, 0.5e-3, is_duplex=False)


@st.composite
def works(draw: st.DrawFn) -> StepWork:
    """Steps whose cold rows all come from somewhere and all go somewhere."""
    num_unique = draw(st.integers(0, 5000))
    num_cold = draw(st.integers(0, num_unique))
    num_forwarded = draw(st.integers(0, num_cold))
    row_bytes = draw(st.sampled_from([4, 64, 512]))
    return StepWork(
        num_samples=draw(st.integers(1, 5000)),
        record_bytes=row_bytes * draw(st.sampled_from([1, 2, 3])),
        num_cold=num_cold,
        num_fetched=num_cold - num_forwarded,
        num_forwarded=num_forwarded,
        num_written=num_cold - num_forwarded,
        all_hot_share=draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])),
        num_unique=num_unique,
        pooled_bytes=draw(st.integers(0, 10_000_000)),
        row_bytes=row_bytes,
    )


rates_per_s = st.floats(1e7, 1e10)
links = st.builds(LinkRates, rates_per_s, st.sampled_from([0.0, 1e-5, 1e-3]), st.booleans())
host_rates = st.builds(HostRates, rates_per_s, rates_per_s, links)
dense_times = st.builds(DenseTime, st.floats(0, 5e-3), st.floats(0, 1e-5))
depths = st.integers(1, 8)


def stages_s(work: StepWork, rates: HostRates, num_in: float, num_out: float) -> list[float]:
    """Read, to the device, to the host, write, by the formulas of the design."""
    bytes_in, bytes_out = num_in * work.record_bytes, num_out * work.record_bytes
    link = rates.link
    return [
        bytes_in / rates.gather_bytes_per_s,
        link.latency_s + bytes_in / link.bytes_per_s if link and bytes_in else 0.0,
        link.latency_s + bytes_out / link.bytes_per_s if link and bytes_out else 0.0,
        bytes_out / rates.scatter_bytes_per_s,
    ]


def every_row_s(work: StepWork, rates: HostRates) -> float:
    """Seconds of the whole way of all cold rows, there and back."""
    return sum(stages_s(work, rates, work.num_cold, work.num_cold))


# ------------------------------------------------------------------------------ closed forms


def test_gather_is_the_sum_of_all_stages() -> None:
    """In ms: 1 read + 0.75 to the device + 5 dense + 0.75 to the host + 2 write."""
    assert predict_step_s("gather", WORK, RATES, DENSE) == pytest.approx(9.5e-3)


@given(works(), host_rates, dense_times)
def test_gather_is_the_sum_of_all_stages_whatever_they_are(
    work: StepWork, rates: HostRates, dense: DenseTime
) -> None:
    expected = dense.of_s(work.num_samples) + every_row_s(work, rates)
    assert predict_step_s("gather", work, rates, dense) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("fixed_s", "expected_s"),
    [
        # In ms: part 1 (1 + 2.4) is shorter than the way of the rows (4.5); part 2 is 1 + 1.6.
        (1e-3, 2.6e-3 + 4.5e-3),
        # Part 1 (6 + 2.4) hides it.
        (6e-3, 7.6e-3 + 8.4e-3),
    ],
)
def test_hotline_hides_the_way_of_the_rows_behind_part_1(fixed_s: float, expected_s: float) -> None:
    dense = DenseTime(fixed_s, 4e-6)
    assert predict_step_s("hotline", WORK, RATES, dense) == pytest.approx(expected_s)


@given(works(), host_rates, dense_times)
def test_hotline_is_part_2_and_the_longer_of_part_1_and_the_way_of_the_rows(
    work: StepWork, rates: HostRates, dense: DenseTime
) -> None:
    num_hot = work.num_samples * work.all_hot_share
    part_1_s, part_2_s = dense.of_s(num_hot), dense.of_s(work.num_samples - num_hot)
    expected = part_2_s + max(part_1_s, every_row_s(work, rates))
    assert predict_step_s("hotline", work, rates, dense) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("longest", "work", "rates", "dense"),
    [
        ("dense", WORK, RATES, DENSE),
        ("gather", WORK, replace(RATES, gather_bytes_per_s=1e7), DENSE),
        ("scatter", WORK, replace(RATES, scatter_bytes_per_s=1e7), DENSE),
        ("to_device", WORK, replace(RATES, link=LinkRates(1e7)), DENSE),
        ("to_host", replace(WORK, num_fetched=500), replace(RATES, link=LinkRates(1e7)), DENSE),
    ],
)
def test_deep_lookahead_takes_as_long_as_its_longest_stage(
    longest: str, work: StepWork, rates: HostRates, dense: DenseTime
) -> None:
    stages = stages_s(work, rates, work.num_fetched, work.num_written)
    names = ("gather", "to_device", "to_host", "scatter")
    named = {"dense": dense.of_s(work.num_samples), **dict(zip(names, stages, strict=True))}
    assert max(named.values()) == named[longest], "the case isn't what it is called"
    step_s = predict_step_s("lookahead", work, rates, dense, lookahead=6)
    assert step_s == pytest.approx(named[longest])


def test_shallow_lookahead_waits_for_its_rows() -> None:
    """A step's rows may set out no sooner than L steps before: then depth is what is missing.

    In ms: dense 5, read 8, to the device 4.5, to the host 1, write 2. From the start of a step to
    the rows of the next 12.5, which all around in two steps, 20.5 / 2, is below.
    """
    work = replace(WORK, num_cold=8000.0, num_fetched=8000.0, num_unique=9000.0)
    work = replace(work, record_bytes=100, num_written=1000.0)
    rates = replace(RATES, link=LinkRates(2e8, 0.5e-3))
    times = [predict_step_s("lookahead", work, rates, DENSE, lookahead=n) for n in (1, 2, 4)]
    assert times == [pytest.approx(12.5e-3), pytest.approx(8e-3), pytest.approx(8e-3)]


def test_lookahead_of_1_can_wait_for_the_rows_that_left() -> None:
    """A read waits for the write of the step before last: dense and the whole way in two steps.

    In ms: dense 5 + read 1 + to the device 0.75 + to the host 0.75 + write 5 = 12.5.
    """
    rates = replace(RATES, scatter_bytes_per_s=2e7)
    assert predict_step_s("lookahead", WORK, rates, DENSE, lookahead=1) == pytest.approx(6.25e-3)
    assert predict_step_s("lookahead", WORK, rates, DENSE, lookahead=2) == pytest.approx(5e-3)


@given(works(), host_rates, dense_times, depths)
def test_lookahead_in_full(
    work: StepWork, rates: HostRates, dense: DenseTime, lookahead: int
) -> None:
    """The closed form with its two conditions: the longest of the schedule's cycles.

    A cycle is a way through the schedule that returns to the same operation of a later step; its
    duration over the number of steps that it spans is a time below which no step can go.
    """
    assert rates.link is not None
    rates = replace(rates, link=replace(rates.link, is_duplex=True), forward_bytes_per_s=1e9)
    read, to_device, to_host, write = stages_s(work, rates, work.num_fetched, work.num_written)
    compute = dense.of_s(work.num_samples) + work.num_forwarded * work.record_bytes / 1e9
    expected = max(
        compute,
        read,
        to_device,
        to_host,
        write,
        (read + to_device) / lookahead,
        (compute + read + to_device + to_host + write) / (lookahead + 1),
    )
    step_s = predict_step_s("lookahead", work, rates, dense, lookahead=lookahead)
    # What a pipeline still forgets of its start after half of the steps.
    assert step_s <= expected * (1 + 1e-9) + 1e-12
    assert step_s >= expected * 0.95


def test_half_duplex_link_carries_one_direction_at_a_time() -> None:
    """The link as the longest stage: twice as long where it can't carry both at once."""
    dense = DenseTime(0.0, 1e-9)
    rates = HostRates(1e12, 1e12, LinkRates(1e7))
    one_way_s = 1e5 / 1e7
    both = predict_step_s("lookahead", WORK, rates, dense, lookahead=4)
    assert both == pytest.approx(one_way_s, rel=1e-3)
    rates = replace(rates, link=LinkRates(1e7, is_duplex=False))
    in_turn = predict_step_s("lookahead", WORK, rates, dense, lookahead=4)
    assert in_turn == pytest.approx(2 * one_way_s, rel=1e-3)


def test_classic_pools_on_the_host() -> None:
    """In ms: read 3.2 (rows without state) + 2.5 over the link + 5 dense + 2.5 back + 8 write."""
    assert predict_step_s("classic", WORK, RATES, DENSE) == pytest.approx(21.2e-3)


def test_what_is_forwarded_is_copied_by_the_device() -> None:
    """100 records of 100 bytes at 10 MB/s add 1 ms to a step that its dense part bounds."""
    work = replace(WORK, num_forwarded=100.0, num_fetched=900.0, num_written=900.0)
    slow = replace(RATES, forward_bytes_per_s=1e7)
    free = predict_step_s("lookahead", work, RATES, DENSE, lookahead=4)
    copied = predict_step_s("lookahead", work, slow, DENSE, lookahead=4)
    assert (free, copied) == (pytest.approx(5e-3), pytest.approx(6e-3))
    for mode in ("gather", "hotline"):
        assert predict_step_s(mode, work, slow, DENSE) == predict_step_s(mode, WORK, RATES, DENSE)


# -------------------------------------------------------------------------------- order of modes


@given(works(), host_rates, dense_times, depths)
def test_lookahead_is_never_slower_than_gather(
    work: StepWork, rates: HostRates, dense: DenseTime, lookahead: int
) -> None:
    """Whatever the link, also half duplex, and however shallow the lookahead."""
    ahead = predict_step_s("lookahead", work, rates, dense, lookahead=lookahead)
    assert ahead <= predict_step_s("gather", work, rates, dense) * (1 + 1e-9) + 1e-12


@given(works(), host_rates, dense_times, depths)
def test_no_step_is_shorter_than_its_dense_part(
    work: StepWork, rates: HostRates, dense: DenseTime, lookahead: int
) -> None:
    dense_s = dense.of_s(work.num_samples)
    for mode in ("gather", "lookahead", "hotline", "classic"):
        step_s = predict_step_s(mode, work, rates, dense, lookahead=lookahead)
        assert step_s >= dense_s * (1 - 1e-9) - 1e-12, mode


def test_hotline_can_lose_to_gather() -> None:
    """Where a pass has a high fixed cost and the rows a short way, two passes cost more than one.

    In ms: gather 3 + 0.4 + 0.1 = 3.5; hotline (3 + 0.24) + (3 + 0.16), which hides the 0.1.
    """
    dense = DenseTime(3e-3, 4e-7)
    rates = HostRates(4e9, 4e9, LinkRates(4e9))
    gather = predict_step_s("gather", WORK, rates, dense)
    hotline = predict_step_s("hotline", WORK, rates, dense)
    assert (gather, hotline) == (pytest.approx(3.5e-3), pytest.approx(6.4e-3))
    assert choose_mode(WORK, rates, dense, lookahead=0).mode == "gather"


@given(works(), host_rates, st.floats(0, 1e-5))
def test_hotline_never_loses_where_a_pass_costs_nothing_but_its_samples(
    work: StepWork, rates: HostRates, per_sample_s: float
) -> None:
    dense = DenseTime(0.0, per_sample_s)
    hotline = predict_step_s("hotline", work, rates, dense)
    assert hotline <= predict_step_s("gather", work, rates, dense) * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_hotline_without_a_second_part_is_gather(share: float) -> None:
    """Nothing to hide behind, or nothing to hide: one pass, the same step."""
    work = replace(WORK, all_hot_share=share)
    if share == 1.0:
        work = replace(work, num_cold=0.0, num_fetched=0.0, num_written=0.0)
    hotline = predict_step_s("hotline", work, RATES, DENSE)
    assert hotline == pytest.approx(predict_step_s("gather", work, RATES, DENSE))


def test_hotline_has_no_jump_where_all_hot_samples_become_rare() -> None:
    """With long bags the share is tiny, not 0: nearly all steps then have no part 1 to pay for."""
    rates = HostRates(1e12, 1e12, LinkRates(1e12))  # No way of rows to hide part 1.
    rare = predict_step_s("hotline", replace(WORK, all_hot_share=1e-9), rates, DENSE)
    none = predict_step_s("hotline", replace(WORK, all_hot_share=0.0), rates, DENSE)
    assert rare == pytest.approx(none, rel=1e-3)


@given(works(), host_rates, dense_times, depths)
def test_a_faster_link_never_makes_a_step_longer(
    work: StepWork, rates: HostRates, dense: DenseTime, lookahead: int
) -> None:
    assert rates.link is not None
    faster = replace(rates.link, bytes_per_s=rates.link.bytes_per_s * 2)
    for mode in ("gather", "lookahead", "hotline", "classic"):
        before = predict_step_s(mode, work, rates, dense, lookahead=lookahead)
        after = predict_step_s(mode, work, replace(rates, link=faster), dense, lookahead=lookahead)
        # Of a pipeline the mean is measured; it is exact to what it still forgets of its start.
        slack = 0.05 if mode == "lookahead" else 1e-9
        assert after <= before * (1 + slack) + 1e-12, mode


# ----------------------------------------------------------------------------------- operations


@pytest.mark.parametrize("mode", ["gather", "lookahead", "hotline", "classic"])
@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_every_step_does_all_of_its_work_once(mode: Mode, num_steps: int) -> None:
    """Also where the lookahead reaches beyond the last step."""
    ops = step_ops(mode, WORK, RATES, DENSE, lookahead=3, num_steps=num_steps)
    for resource in ("gather", "to_device", "to_host", "scatter"):
        assert [op.step for op in ops if op.resource == resource] == list(range(num_steps))
    assert {op.step for op in ops if op.resource == "compute"} == set(range(num_steps))


@pytest.mark.parametrize("mode", ["gather", "lookahead", "hotline"])
def test_rows_are_there_before_use_and_updated_before_they_leave(mode: Mode) -> None:
    ops = step_ops(mode, WORK, RATES, DENSE, lookahead=2, num_steps=8)
    spans = simulate(ops)
    at = {(op.step, op.label): span for op, span in zip(ops, spans, strict=True)}
    first, last = {
        "gather": ("dense", "dense"),
        "lookahead": ("look up", "forward"),
        "hotline": ("part 2", "part 2"),
    }[mode]
    for step in range(8):
        assert at[step, "gather"].end_s <= at[step, "to device"].begin_s
        assert at[step, "to device"].end_s <= at[step, first].begin_s
        assert at[step, last].end_s <= at[step, "to host"].begin_s
        assert at[step, "to host"].end_s <= at[step, "scatter"].begin_s


@pytest.mark.parametrize(("mode", "distance"), [("gather", 1), ("hotline", 1), ("lookahead", 3)])
def test_rows_are_read_after_earlier_writes(mode: Mode, distance: int) -> None:
    """Or the read would be stale: those of the lookahead's window are forwarded, older ones not."""
    ops = step_ops(mode, WORK, RATES, DENSE, lookahead=2, num_steps=8)
    at = {(op.step, op.label): span for op, span in zip(ops, simulate(ops), strict=True)}
    for step in range(distance, 8):
        assert at[step - distance, "scatter"].end_s <= at[step, "gather"].begin_s


def test_half_duplex_is_one_resource() -> None:
    rates = replace(RATES, link=HALF_DUPLEX)
    ops = step_ops("lookahead", WORK, rates, DENSE, lookahead=2)
    assert {op.resource for op in ops} == {"compute", "gather", "scatter", "link"}


def test_without_a_link_nothing_crosses_it() -> None:
    rates = replace(RATES, link=None)
    for mode in ("gather", "lookahead", "hotline", "classic"):
        ops = step_ops(mode, WORK, rates, DENSE, lookahead=2)
        assert {op.resource for op in ops} == {"compute", "gather", "scatter"}
    assert predict_step_s("gather", WORK, rates, DENSE) == pytest.approx(8e-3)


def test_nothing_cold_costs_nothing() -> None:
    """Not even the link's latency, and no turn in a queue."""
    work = replace(WORK, num_cold=0.0, num_fetched=0.0, num_written=0.0)
    for link in (DUPLEX, HALF_DUPLEX):
        rates = replace(RATES, link=link)
        for mode in ("gather", "lookahead"):
            ops = step_ops(mode, work, rates, DENSE, lookahead=2)
            assert {op.resource for op in ops} == {"compute"}
            step_s = predict_step_s(mode, work, rates, DENSE, lookahead=2)
            assert step_s == pytest.approx(5e-3)


# --------------------------------------------------------------------------------------- choice


def test_lookahead_is_chosen_where_ids_are_known_ahead() -> None:
    """In ms: 5 against 9.5 gather and 2.6 + 4.5 hotline."""
    choice = choose_mode(WORK, RATES, DENSE, lookahead=4)
    assert choice.mode == "lookahead"
    assert choice.predicted_s == {
        "gather": pytest.approx(9.5e-3),
        "lookahead": pytest.approx(5e-3),
        "hotline": pytest.approx(7.1e-3),
        "classic": pytest.approx(21.2e-3),
    }
    assert choice.reason == (
        "lookahead: 5 ms a step expected, with compute the busiest, against gather 9.5, "
        "hotline 7.1, classic 21.2 ms, where 60.0% of the samples are all hot."
    )


def test_hotline_is_chosen_where_they_are_not_and_it_is_faster() -> None:
    choice = choose_mode(WORK, RATES, DENSE, lookahead=0)
    assert choice.mode == "hotline"
    assert "lookahead" not in choice.predicted_s
    assert "sharding.host.lookahead is 0, so lookahead isn't weighed" in choice.reason


def test_of_equal_modes_the_simplest_is_chosen() -> None:
    """All rows are hot: no schedule has anything to hide."""
    work = replace(WORK, num_cold=0.0, num_fetched=0.0, num_written=0.0, all_hot_share=1.0)
    choice = choose_mode(work, RATES, DENSE, lookahead=4)
    assert choice.mode == "gather"
    assert choice.predicted_s["hotline"] == pytest.approx(choice.predicted_s["gather"])


def test_the_plain_path_is_chosen_where_there_is_no_link() -> None:
    """In ms: 3.2 to read, 5 dense, 8 to write, in place."""
    choice = choose_mode(WORK, replace(RATES, link=None), DENSE, lookahead=4)
    assert choice.mode == "device"
    assert choice.predicted_s == {"device": pytest.approx(16.2e-3)}
    assert choice.reason.startswith("device: ")


@given(works(), host_rates, dense_times, st.integers(0, 4))
def test_the_chosen_mode_is_the_fastest(
    work: StepWork, rates: HostRates, dense: DenseTime, lookahead: int
) -> None:
    choice = choose_mode(work, rates, dense, lookahead)
    weighed = {name: s for name, s in choice.predicted_s.items() if name != "classic"}
    assert choice.predicted_s[choice.mode] <= min(weighed.values()) * (1 + 1e-5)
    assert choice == choose_mode(work, rates, dense, lookahead)


# ---------------------------------------------------------------------------------------- sweep


def work_of_budget(budget_bytes: int) -> StepWork:
    """1000 cold rows fewer for each 100 kB, all samples hot at 400 kB."""
    share = budget_bytes / 400_000
    num_cold = 4000.0 * (1 - share)
    return replace(
        WORK, num_cold=num_cold, num_fetched=num_cold, num_written=num_cold, all_hot_share=share
    )


def test_sweep_has_a_cell_for_each_budget_and_link() -> None:
    budgets, over = [0, 200_000, 400_000], [LinkRates(1e8), LinkRates(1e10)]
    cells = sweep(work_of_budget, budgets, over, replace(RATES, link=None), DENSE, lookahead=4)
    expected = [(budget, link) for budget in budgets for link in over]
    assert [(cell.budget_bytes, cell.link) for cell in cells] == expected
    for cell in cells:
        rates = replace(RATES, link=cell.link)
        work = work_of_budget(cell.budget_bytes)
        for mode, seconds in cell.predicted_s.items():
            assert seconds == predict_step_s(mode, work, rates, DENSE, lookahead=4)
            assert cell.speed_up[mode] == cell.predicted_s["classic"] / seconds
        assert cell.speed_up[cell.winner] >= max(cell.speed_up.values()) * (1 - 1e-5)


def test_sweep_admits_where_classic_wins() -> None:
    """Long bags: the pooled vectors are far fewer bytes than the rows, and the link is slow."""
    work = replace(WORK, pooled_bytes=100, num_cold=4000.0, num_fetched=4000.0, num_written=4000.0)
    cells = sweep(lambda _: work, [0], [LinkRates(1e6)], RATES, DENSE, lookahead=2)
    assert cells[0].winner == "classic"
    assert cells[0].speed_up["classic"] == 1.0
    assert cells[0].speed_up["lookahead"] < 1.0


def test_sweep_of_steps_without_any_work() -> None:
    """Equally fast, not a division by 0."""
    work = StepWork(0, 4, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 4)
    cells = sweep(lambda _: work, [0], [DUPLEX], RATES, DENSE, lookahead=1)
    assert set(cells[0].speed_up.values()) == {1.0}


# -------------------------------------------------------------------------------------- refusals


def test_mode_lookahead_needs_a_depth() -> None:
    with pytest.raises(ValueError, match=r"sharding\.host\.lookahead is 0"):
        step_ops("lookahead", WORK, RATES, DENSE)


def test_a_negative_depth_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sharding\.host\.lookahead is -1"):
        choose_mode(WORK, RATES, DENSE, lookahead=-1)
    with pytest.raises(ValueError, match=r"sharding\.host\.lookahead is -1"):
        sweep(work_of_budget, [0], [DUPLEX], RATES, DENSE, lookahead=-1)


def test_steps_are_needed() -> None:
    with pytest.raises(ValueError, match="num_steps is 0"):
        step_ops("gather", WORK, RATES, DENSE, num_steps=0)
    with pytest.raises(ValueError, match="1 steps"):
        predict_step_s("gather", WORK, RATES, DENSE, num_steps=1)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize(
    "name", ["gather_bytes_per_s", "scatter_bytes_per_s", "forward_bytes_per_s"]
)
def test_rates_are_above_0(name: str, rate: float) -> None:
    changed: dict[str, Any] = {name: rate}
    with pytest.raises(ValueError, match=name):
        replace(RATES, **changed)


@pytest.mark.parametrize("name", ["fixed_s", "per_sample_s"])
@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf])
def test_times_are_at_least_0(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        replace(DENSE, **{name: value})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_cold": 4001.0}, "num_cold is 4,001.0, but can't be above num_unique, 4,000.0"),
        ({"num_fetched": 1001.0}, "num_fetched .* above num_cold"),
        ({"num_forwarded": 1001.0}, "num_forwarded .* above num_cold"),
        ({"num_written": 1001.0}, "num_written .* above num_cold"),
        ({"row_bytes": 101}, "row_bytes .* above record_bytes"),
        ({"all_hot_share": 1.01}, "all_hot_share"),
        ({"all_hot_share": math.nan}, "all_hot_share"),
        ({"num_cold": -1.0}, "num_cold"),
        ({"pooled_bytes": -1}, "pooled_bytes"),
    ],
)
def test_a_part_is_no_more_than_its_whole(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(WORK, **changed)
