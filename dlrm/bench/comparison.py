"""From measurements taken in turns to one comparison: ratios, claims, and what is wrong."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dlrm.bench.ratios import Spread, ratios
from dlrm.bench.sides import FLOOR, OWN, TORCHREC

BF16_FACTOR = 3
"""Log losses of a variant in bf16 may lie so many times as far from those in fp32."""


@dataclass(frozen=True)
class Variant:
    """A side in one precision."""

    side: str
    precision: str

    @property
    def name(self) -> str:
        """`dlrm fp32`."""
        return f"{self.side} {self.precision}"


@dataclass(frozen=True)
class Measurement:
    """What one variant came to in one turn.

    Attributes:
        figures: as `measure_rank` returns them; empty where it failed.
        failure: why it failed.
    """

    variant: Variant
    repeat: int
    figures: dict[str, Any] = field(default_factory=dict)
    failure: str | None = None


@dataclass(frozen=True)
class VariantSummary:
    """One row of the table.

    Attributes:
        side: the side.
        precision: its precision.
        step_ms: of each turn's median step; None where it failed.
        ratio_to: its time over that of each variant of this system, turn by turn.
        torchrec: the fastest variant of TorchRec in the same precision, by name.
        torchrec_ratio: the time of that variant over its own, turn by turn: how many times as fast
            as TorchRec it is.
        logloss: after training, median over the turns; None of what has no model.
        logloss_start: before training.
        sent_bytes: per step and rank, median over the turns.
        note: what exactly it was.
    """

    side: str
    precision: str
    step_ms: Spread | None
    ratio_to: dict[str, Spread] = field(default_factory=dict)
    torchrec: str | None = None
    torchrec_ratio: Spread | None = None
    logloss: float | None = None
    logloss_start: float | None = None
    sent_bytes: float | None = None
    note: str = ""

    @property
    def name(self) -> str:
        """`dlrm fp32`."""
        return Variant(self.side, self.precision).name

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name,
            "side": self.side,
            "precision": self.precision,
            "step_ms": None if self.step_ms is None else self.step_ms.as_dict(),
            "ratio_to": {name: ratio.as_dict() for name, ratio in self.ratio_to.items()},
            "torchrec": self.torchrec,
            "torchrec_ratio": (
                None if self.torchrec_ratio is None else self.torchrec_ratio.as_dict()
            ),
            "logloss": self.logloss,
            "logloss_start": self.logloss_start,
            "bytes_sent_per_step_and_rank": self.sent_bytes,
            "note": self.note,
        }


@dataclass(frozen=True)
class Comparison:
    """All rows.

    Attributes:
        problems: why the benchmark fails: sides that failed, log losses that disagree.
        logloss_tolerance: of `compare`.
    """

    world_size: int
    variants: list[VariantSummary]
    problems: list[str]
    logloss_tolerance: float

    def own(self) -> list[VariantSummary]:
        """The variants of this system that were measured."""
        return [v for v in self.variants if v.side == OWN and v.step_ms is not None]

    def claims(self) -> list[str]:
        """One line for each variant of this system against the floor and the best TorchRec."""
        lines = []
        for own in self.own():
            parts = []
            for variant in self._best_of_each():
                # bf16 is compared with TorchRec's fp32 too: what a user would come from.
                known_to_all = own.precision == "bf16" and variant.side in TORCHREC
                ratio = variant.ratio_to.get(own.name)
                if ratio is None or not (variant.precision == own.precision or known_to_all):
                    continue
                if variant.side == FLOOR:
                    inverse = Spread(1 / ratio.median, 1 / ratio.greatest, 1 / ratio.least)
                    parts.append(f"{inverse.text(2)} times as long as {variant.name}")
                else:
                    parts.append(f"{ratio.text(2)} times as fast as {variant.name}")
            if parts:
                lines.append(f"{own.name} is " + ";\n    ".join(parts))
        return lines

    def notes(self) -> list[str]:
        """What a reader of the table should know."""
        known = next((v for v in self.variants if v.logloss is not None), None)
        if known is None or known.logloss is None or known.logloss_start is None:
            return []
        lines = [
            f"log loss: before training {known.logloss_start:.5f}; all sides within "
            f"{self.logloss_tolerance:g} of each other (bf16: {BF16_FACTOR} times that), or it is "
            "an error"
        ]
        if abs(known.logloss - known.logloss_start) < 10 * self.logloss_tolerance:
            lines.append(
                "note: training has hardly moved the log loss, so that it agrees says little; "
                "raise bench.steps"
            )
        return lines

    def _best_of_each(self) -> list[VariantSummary]:
        """TorchRec's fastest plan in each precision, and every other peer."""
        others = [
            v for v in self.variants if v.step_ms is not None and v.side not in (OWN, *TORCHREC)
        ]
        return [*_best_torchrec(self.variants).values(), *others]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "variants": [variant.as_dict() for variant in self.variants],
            "claims": [line.replace("\n    ", " ") for line in self.claims()],
            "notes": self.notes(),
            "problems": self.problems,
        }


def compare(
    variants: Sequence[Variant],
    measurements: Sequence[Measurement],
    *,
    world_size: int,
    logloss_tolerance: float,
) -> Comparison:
    """Ratios turn by turn, and whether all sides have trained the same model.

    Args:
        variants: what was to be measured, in the order of the table.
        measurements: in any order; a variant that failed in any turn has failed.
        world_size: number of ranks.
        logloss_tolerance: how far the log losses of one turn may lie apart, in fp32.
    """
    failed = {m.variant: m.failure for m in measurements if m.failure is not None}
    turns: dict[Variant, list[Measurement]] = {variant: [] for variant in variants}
    for measurement in sorted(measurements, key=lambda m: m.repeat):
        if measurement.variant not in failed:
            turns[measurement.variant].append(measurement)
    step_ms = {v: [float(m.figures["step_ms_p50"]) for m in turns[v]] for v in variants}
    own = [v for v in variants if v.side == OWN and step_ms[v]]
    summaries = []
    for variant in variants:
        if not step_ms[variant]:
            summaries.append(VariantSummary(variant.side, variant.precision, None))
            continue
        losses = [m.figures["logloss"] for m in turns[variant]]
        summaries.append(
            VariantSummary(
                variant.side,
                variant.precision,
                Spread.of(step_ms[variant]),
                {o.name: Spread.of(ratios(step_ms[variant], step_ms[o])) for o in own},
                logloss=None if None in losses else statistics.median(losses),
                logloss_start=turns[variant][0].figures["logloss_start"],
                sent_bytes=statistics.median(
                    m.figures["bytes_sent_per_step_and_rank"] for m in turns[variant]
                ),
                note=turns[variant][0].figures["note"],
            )
        )
    summaries = _beside_torchrec(summaries, step_ms)
    problems = [f"{variant.name} failed: {reason}" for variant, reason in failed.items()]
    problems += _unequal_threads(turns)
    problems += _disagreements(turns, logloss_tolerance)
    return Comparison(world_size, summaries, problems, logloss_tolerance)


def _best_torchrec(variants: Iterable[VariantSummary]) -> dict[str, VariantSummary]:
    """TorchRec's fastest plan in each precision that it was measured in."""
    best: dict[str, VariantSummary] = {}
    for variant in variants:
        if variant.side not in TORCHREC or variant.step_ms is None:
            continue
        known = best.get(variant.precision)
        if known is None or variant.step_ms.median < _median(known):
            best[variant.precision] = variant
    return best


def _beside_torchrec(
    summaries: list[VariantSummary], step_ms: dict[Variant, list[float]]
) -> list[VariantSummary]:
    """The same rows with their ratio to the best of TorchRec."""
    best = _best_torchrec(summaries)
    found = []
    for summary in summaries:
        peer = best.get(summary.precision)
        if peer is not None and summary.step_ms is not None:
            of_both = (step_ms[Variant(s.side, s.precision)] for s in (peer, summary))
            ratio = Spread.of(ratios(*of_both))
            summary = replace(summary, torchrec=peer.name, torchrec_ratio=ratio)
        found.append(summary)
    return found


def _unequal_threads(turns: dict[Variant, list[Measurement]]) -> list[str]:
    """Sides that ran with other threads than the first: their times mean nothing together."""
    threads = {v: m.figures["num_threads"] for v, found in turns.items() for m in found}
    if len(set(threads.values())) < 2:
        return []
    each = ", ".join(f"{variant.name} {number}" for variant, number in threads.items())
    return [f"the sides ran with different numbers of threads: {each}"]


def _disagreements(turns: dict[Variant, list[Measurement]], tolerance: float) -> list[str]:
    """Log losses too far from those of the first variant that has any, which is ours by default."""
    with_model = {
        variant: found
        for variant, found in turns.items()
        if found and all(m.figures["logloss"] is not None for m in found)
    }
    if not with_model:
        return []
    first, *others = with_model
    problems = []
    for variant in others:
        allowed = tolerance * (BF16_FACTOR if "bf16" in (variant.precision, first.precision) else 1)
        for key, when in (("logloss_start", "before training"), ("logloss", "after training")):
            pairs = zip(with_model[variant], with_model[first], strict=True)
            apart = [abs(float(a.figures[key]) - float(b.figures[key])) for a, b in pairs]
            if not all(distance <= allowed for distance in apart):  # NaN is beyond every limit.
                problems.append(
                    f"{variant.name} is another model than {first.name} {when}: their log losses "
                    f"are {max(apart):.5f} apart, allowed are {allowed:g} (bench.logloss_tolerance)"
                )
                break
    return problems


def _median(variant: VariantSummary) -> float:
    assert variant.step_ms is not None
    return variant.step_ms.median
