"""What a step costs in each mode of host-resident tables, and so which mode to take.

Each mode is written as the operations of its schedule, and the simulator says how they overlap.
For a link that carries both directions at once, the steady state has a closed form; `gather`,
`to_device`, `to_host`, `scatter` are the durations of a step's stages, `L` the lookahead:

    gather     dense + gather + to_device + to_host + scatter
    hotline    part 2 + max(part 1, to_host + scatter + gather + to_device)
    lookahead  max(dense, gather, to_device, to_host, scatter), if L is deep enough for
               (gather + to_device) / L and (the sum of all five) / (L + 1) to be below that

`hotline` is the schedule of Hotline (ISCA 2024, arXiv 2204.05436) without its accelerator;
`lookahead` fetches ahead as BagPipe (SOSP 2023) does. The forms were derived for this program's
schedules, not taken from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from embeddings.host.executor import COMPUTE, LinkRates
from embeddings.host.step_ops import (
    LOOKAHEAD_KEY,
    DenseTime,
    HostRates,
    Mode,
    StepWork,
    step_ops,
)
from embeddings.planner.simulate import step_time_s

__all__ = [
    "STAGED_MODES",
    "DenseTime",
    "HostRates",
    "LinkRates",
    "Mode",
    "ModeChoice",
    "StepWork",
    "SweepCell",
    "choose_mode",
    "predict_step_s",
    "step_ops",
    "sweep",
    "why_plain",
]

# From the simplest: where two take equally long, the earlier is taken.
STAGED_MODES: tuple[Mode, ...] = ("gather", "lookahead", "hotline")
# Times this close, relatively, are taken as equal: rounding doesn't choose a mode.
_EQUAL = 1e-6


@dataclass(frozen=True)
class ModeChoice:
    """The mode to take.

    Attributes:
        mode: `device` is the plain path, where rows are used where they lie.
        predicted_s: seconds of a step in each mode that was weighed; with a link also in
            `classic`, the baseline, which is never chosen.
        reason: one sentence for people.
    """

    mode: Literal["gather", "lookahead", "hotline", "device"]
    predicted_s: Mapping[str, float]
    reason: str


@dataclass(frozen=True)
class SweepCell:
    """One hot budget over one link.

    Attributes:
        budget_bytes: of hot rows.
        link: between host and device.
        predicted_s: seconds of a step in each mode.
        speed_up: of each mode over `classic`.
        winner: the fastest mode; `classic` where none is faster.
    """

    budget_bytes: int
    link: LinkRates
    predicted_s: Mapping[Mode, float]
    speed_up: Mapping[Mode, float]
    winner: Mode


def predict_step_s(
    mode: Mode,
    work: StepWork,
    rates: HostRates,
    dense: DenseTime,
    *,
    lookahead: int = 0,
    num_steps: int | None = None,
) -> float:
    """Seconds of a step in the steady state.

    Args:
        mode, work, rates, dense, lookahead: as of `step_ops`.
        num_steps: how many steps are simulated, the second half of which counts; None: as many as
            the lookahead needs.

    Raises:
        ValueError: as of `step_ops`, or fewer than 2 steps.
    """
    if num_steps is None:
        num_steps = _num_steps(lookahead if mode == "lookahead" else 0)
    ops = step_ops(mode, work, rates, dense, lookahead=lookahead, num_steps=num_steps)
    return step_time_s(ops, resource=COMPUTE)


def choose_mode(work: StepWork, rates: HostRates, dense: DenseTime, lookahead: int) -> ModeChoice:
    """The mode with the shortest step; of equal ones the simplest.

    Args:
        work: of a step, under this lookahead.
        rates: of the host's memory and the link.
        dense: what is computed on the device.
        lookahead: how many steps ahead ids are known; 0 leaves mode `lookahead` out.

    Raises:
        ValueError: a negative lookahead.
    """
    _check_known_ahead(lookahead)
    plain = why_plain(rates.link)
    if plain is not None:
        # The classic path without a link: rows are read and updated where they lie.
        predicted_s = {"device": predict_step_s("classic", work, rates, dense)}
        return ModeChoice("device", predicted_s, plain)
    modes = _predict_all(work, rates, dense, lookahead)
    mode = _fastest(modes, [name for name in STAGED_MODES if name in modes])
    assert mode != "classic"
    reason = _reason(mode, modes, work, rates, dense, lookahead)
    return ModeChoice(mode, {str(name): seconds for name, seconds in modes.items()}, reason)


def why_plain(link: LinkRates | None) -> str | None:
    """Why tables are best left on the device whatever a step does, in a sentence; None where that
    is a matter of rates."""
    if link is not None:
        return None
    return (
        "device: host memory is the device's own, so that staging would only copy rows that can "
        "be used where they lie."
    )


def sweep(
    work_of_budget: Callable[[int], StepWork],
    budgets_bytes: Sequence[int],
    links: Sequence[LinkRates],
    rates: HostRates,
    dense: DenseTime,
    *,
    lookahead: int,
) -> list[SweepCell]:
    """All modes for each hot budget over each link, budget by budget.

    Args:
        work_of_budget: the work of a step where so many bytes of rows are hot.
        budgets_bytes: hot budgets.
        links: links, in place of that of `rates`.
        rates: of the host's memory.
        dense: what is computed on the device.
        lookahead: as of `choose_mode`.

    Raises:
        ValueError: a negative lookahead.
    """
    _check_known_ahead(lookahead)
    cells = []
    for budget_bytes in budgets_bytes:
        work = work_of_budget(budget_bytes)
        for link in links:
            modes = _predict_all(work, replace(rates, link=link), dense, lookahead)
            speed_up = {mode: _ratio(modes["classic"], seconds) for mode, seconds in modes.items()}
            order: list[Mode] = ["classic", *(name for name in STAGED_MODES if name in modes)]
            cells.append(SweepCell(budget_bytes, link, modes, speed_up, _fastest(modes, order)))
    return cells


def _num_steps(lookahead: int) -> int:
    """Steps to simulate, so that their second half is the steady state, and whole periods of it.

    A pipeline of depth L forgets its start only after some multiples of L, and may then run in
    bursts of L or L + 1 steps: the measured half is a multiple of both.
    """
    if not lookahead:
        return 60
    period = 2 * lookahead * (lookahead + 1)
    return period * math.ceil(max(60, 40 * (lookahead + 1)) / period)


def _predict_all(
    work: StepWork, rates: HostRates, dense: DenseTime, lookahead: int
) -> dict[Mode, float]:
    modes: list[Mode] = [mode for mode in STAGED_MODES if mode != "lookahead" or lookahead]
    modes.append("classic")
    return {mode: predict_step_s(mode, work, rates, dense, lookahead=lookahead) for mode in modes}


def _fastest(predicted_s: Mapping[Mode, float], order: Sequence[Mode]) -> Mode:
    """The first of `order` that takes as long as the fastest of it."""
    best_s = min(predicted_s[mode] for mode in order)
    return next(mode for mode in order if predicted_s[mode] <= best_s * (1 + _EQUAL))


def _reason(
    mode: Mode,
    predicted_s: Mapping[Mode, float],
    work: StepWork,
    rates: HostRates,
    dense: DenseTime,
    lookahead: int,
) -> str:
    busy_s: dict[str, float] = {}
    for op in step_ops(mode, work, rates, dense, lookahead=lookahead):
        busy_s[op.resource] = busy_s.get(op.resource, 0.0) + op.duration_s
    busiest = max(busy_s, key=lambda resource: busy_s[resource])
    others = ", ".join(
        f"{name} {_ms(seconds)}" for name, seconds in predicted_s.items() if name != mode
    )
    left_out = "" if lookahead else f" ({LOOKAHEAD_KEY} is 0, so lookahead isn't weighed)"
    return (
        f"{mode}: {_ms(predicted_s[mode])} ms a step expected, with {busiest} the busiest, against "
        f"{others} ms, where {work.all_hot_share:.1%} of the samples are all hot{left_out}."
    )


def _ms(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:.3g}" if ms < 1000 else f"{ms:,.0f}"


def _ratio(baseline_s: float, seconds: float) -> float:
    """How often faster than the baseline; steps without any work are equally fast."""
    if seconds:
        return baseline_s / seconds
    return math.inf if baseline_s else 1.0


def _check_known_ahead(lookahead: int) -> None:
    if lookahead < 0:
        raise ValueError(f"{LOOKAHEAD_KEY} is {lookahead}, but must be at least 0")
