"""From measurements taken in turns to one comparison: ratios, claims, and what is wrong."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dlrm.bench.ratios import Spread, ratios


@dataclass(frozen=True)
class Variant:
    """A side in one precision, or in one operation (see `Yardstick.grouped_by`); empty where a kind
    of benchmark has neither."""

    side: str
    precision: str

    @property
    def name(self) -> str:
        """`dlrm fp32`."""
        return f"{self.side} {self.precision}".rstrip()


@dataclass(frozen=True)
class Measurement:
    """What one variant came to in one turn.

    Attributes:
        figures: as the measurement returns them; empty where it failed.
        failure: why it failed.
    """

    variant: Variant
    repeat: int
    figures: dict[str, Any] = field(default_factory=dict)
    failure: str | None = None


Turns = Mapping[Variant, Sequence[Measurement]]
"""The measurements of each variant by turn; none of what failed."""


@dataclass(frozen=True)
class Figure:
    """One figure of a measurement.

    Attributes:
        key: its name in a measurement's figures.
        name: its name in result.json.
        header: of its column; None: only result.json has it.
        decimals: digits after the point; of a spread, none from 100 on.
        scale: the column shows the figure times this.
    """

    key: str
    name: str
    header: str | None
    decimals: int = 1
    scale: float = 1.0

    def text(self, value: float) -> str:
        """As a cell shows it; what is tiny, as a power of ten."""
        shown = value * self.scale
        if not shown:
            return "0"
        if abs(shown) < 10**-self.decimals:
            return f"{shown:.1e}"
        return f"{shown:,.{self.decimals}f}"

    def spread_text(self, spread: Spread) -> str:
        """`51.3 (49.8-60.2)`."""
        values = (spread.median * self.scale, spread.least * self.scale)
        shown = Spread(*values, spread.greatest * self.scale)
        return shown.text(self.decimals if shown.greatest < 100 else 0)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; `Figure(key, **…)` has it back."""
        return {
            "name": self.name,
            "header": self.header,
            "decimals": self.decimals,
            "scale": self.scale,
        }


BYTES_SENT = Figure(
    "bytes_sent_per_step_and_rank", "bytes_sent_per_step_and_rank", "MB/step", 2, 1e-6
)


@dataclass(frozen=True)
class Yardstick:
    """What one kind of benchmark compares its sides by.

    Attributes:
        main: what is compared.
        is_rate: whether more of it is better; else it is a time.
        columns: what else the table shows.
        own: the sides that are this system.
        torchrec: the sides that are TorchRec, of which the fastest counts.
        floors: the sides that do less than there is to do.
        disagreements: what shows that the sides haven't done the same work.
        notes: what a reader of the table should know.
        grouped_by: what `Variant.precision` is: `precision`, or `operation`: other work, which
            isn't compared.
    """

    main: Figure
    is_rate: bool
    columns: Sequence[Figure]
    own: Sequence[str]
    torchrec: Sequence[str]
    floors: Sequence[str]
    disagreements: Callable[[Turns], list[str]]
    notes: Callable[[Turns], list[str]]
    grouped_by: str = "precision"

    def compares(self, variant: Variant, own: Variant) -> bool:
        """Whether the table has the ratio of the two."""
        return self.grouped_by == "precision" or variant.precision == own.precision

    def cost(self, figures: Mapping[str, Any]) -> float:
        """The main figure as a time; of a rate, the time per unit."""
        value = float(figures[self.main.key])
        return 1 / value if self.is_rate else value


@dataclass(frozen=True)
class VariantSummary:
    """One row of the table.

    Attributes:
        side: the side.
        precision: its precision.
        main: the main figure over the turns; None where it failed.
        ratio_to: its time over that of each variant of this system that it is compared with, turn
            by turn.
        torchrec: the fastest variant of TorchRec in the same precision, by name.
        torchrec_ratio: the time of that variant over its own, turn by turn: how many times as fast
            as TorchRec it is.
        columns: the other figures by name, median over the turns; None of what has no such figure.
        note: what exactly it was.
    """

    side: str
    precision: str
    main: Spread | None
    ratio_to: dict[str, Spread] = field(default_factory=dict)
    torchrec: str | None = None
    torchrec_ratio: Spread | None = None
    columns: dict[str, float | None] = field(default_factory=dict)
    note: str = ""

    @property
    def name(self) -> str:
        """`dlrm fp32`."""
        return Variant(self.side, self.precision).name

    def as_dict(self, main_name: str) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name,
            "side": self.side,
            "precision": self.precision,
            main_name: None if self.main is None else self.main.as_dict(),
            "ratio_to": {name: ratio.as_dict() for name, ratio in self.ratio_to.items()},
            "torchrec": self.torchrec,
            "torchrec_ratio": (
                None if self.torchrec_ratio is None else self.torchrec_ratio.as_dict()
            ),
            **self.columns,
            "note": self.note,
        }


@dataclass(frozen=True)
class Comparison:
    """All rows.

    Attributes:
        notes: what a reader of the table should know.
        problems: why the benchmark fails: sides that failed or disagree.
    """

    yardstick: Yardstick
    variants: list[VariantSummary]
    notes: list[str]
    problems: list[str]

    def own(self) -> list[VariantSummary]:
        """The variants of this system that were measured."""
        return [v for v in self.variants if v.side in self.yardstick.own and v.main is not None]

    def claims(self) -> list[str]:
        """One line for each variant of this system against the floors and the best of each peer."""
        lines = []
        for own in self.own():
            parts = []
            for variant in self._best_of_each():
                # bf16 is compared with TorchRec's fp32 too: what a user would come from.
                known_to_all = own.precision == "bf16" and variant.side in self.yardstick.torchrec
                ratio = variant.ratio_to.get(own.name)
                if ratio is None or not (variant.precision == own.precision or known_to_all):
                    continue
                if variant.side in self.yardstick.floors:
                    inverse = Spread(1 / ratio.median, 1 / ratio.greatest, 1 / ratio.least)
                    parts.append(f"{inverse.text(2)} times as long as {variant.name}")
                else:
                    parts.append(f"{ratio.text(2)} times as fast as {variant.name}")
            if parts:
                lines.append(f"{own.name} is " + ";\n    ".join(parts))
        return lines

    def _best_of_each(self) -> list[VariantSummary]:
        """TorchRec's fastest plan in each precision, and every other peer."""
        sides = self.yardstick
        others = [
            v
            for v in self.variants
            if v.main is not None and v.side not in (*sides.own, *sides.torchrec)
        ]
        return [*_best_torchrec(self.variants, sides).values(), *others]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        main = self.yardstick.main
        return {
            "main": main.as_dict(),
            "columns": [column.as_dict() for column in self.yardstick.columns],
            "grouped_by": self.yardstick.grouped_by,
            "variants": [variant.as_dict(main.name) for variant in self.variants],
            "claims": [line.replace("\n    ", " ") for line in self.claims()],
            "notes": self.notes,
            "problems": self.problems,
        }


def compare(
    variants: Sequence[Variant], measurements: Sequence[Measurement], yardstick: Yardstick
) -> Comparison:
    """Ratios turn by turn, and whether all sides have done the same work.

    Args:
        variants: what was to be measured, in the order of the table.
        measurements: in any order; a variant that failed in any turn has failed.
        yardstick: what they are compared by.
    """
    failed = {m.variant: m.failure or "no reason" for m in measurements if m.failure is not None}
    turns: dict[Variant, list[Measurement]] = {variant: [] for variant in variants}
    for measurement in sorted(measurements, key=lambda m: m.repeat):
        if measurement.variant not in failed:
            turns[measurement.variant].append(measurement)
    costs = {v: [yardstick.cost(m.figures) for m in turns[v]] for v in variants}
    own = [v for v in variants if v.side in yardstick.own and costs[v]]
    summaries = [_summary(variant, turns[variant], costs, own, yardstick) for variant in variants]
    summaries = _beside_torchrec(summaries, costs, yardstick)
    problems = [
        # The rest, a traceback, was shown when it happened.
        f"{variant.name} failed: {reason.splitlines()[0]}"
        for variant, reason in failed.items()
    ]
    problems += _unequal_threads(turns)
    problems += yardstick.disagreements(turns)
    return Comparison(yardstick, summaries, yardstick.notes(turns), problems)


def _summary(
    variant: Variant,
    turns: Sequence[Measurement],
    costs: Mapping[Variant, list[float]],
    own: Sequence[Variant],
    yardstick: Yardstick,
) -> VariantSummary:
    if not turns:
        return VariantSummary(variant.side, variant.precision, None)
    columns: dict[str, float | None] = {}
    for column in yardstick.columns:
        values = [m.figures.get(column.key) for m in turns]
        known = [value for value in values if value is not None]
        columns[column.name] = statistics.median(known) if len(known) == len(turns) else None
    return VariantSummary(
        variant.side,
        variant.precision,
        Spread.of([float(m.figures[yardstick.main.key]) for m in turns]),
        {
            o.name: Spread.of(ratios(costs[variant], costs[o]))
            for o in own
            if yardstick.compares(variant, o)
        },
        columns=columns,
        note=turns[0].figures["note"],
    )


def _best_torchrec(
    variants: Iterable[VariantSummary], yardstick: Yardstick
) -> dict[str, VariantSummary]:
    """TorchRec's fastest plan in each precision that it was measured in."""
    best: dict[str, VariantSummary] = {}
    for variant in variants:
        if variant.side not in yardstick.torchrec or variant.main is None:
            continue
        known = best.get(variant.precision)
        if known is None or _is_faster(variant, known, yardstick):
            best[variant.precision] = variant
    return best


def _is_faster(one: VariantSummary, other: VariantSummary, yardstick: Yardstick) -> bool:
    assert one.main is not None
    assert other.main is not None
    if yardstick.is_rate:
        return one.main.median > other.main.median
    return one.main.median < other.main.median


def _beside_torchrec(
    summaries: list[VariantSummary], costs: Mapping[Variant, list[float]], yardstick: Yardstick
) -> list[VariantSummary]:
    """The same rows with their ratio to the best of TorchRec."""
    best = _best_torchrec(summaries, yardstick)
    found = []
    for summary in summaries:
        peer = best.get(summary.precision)
        if peer is not None and summary.main is not None:
            of_both = (costs[Variant(s.side, s.precision)] for s in (peer, summary))
            ratio = Spread.of(ratios(*of_both))
            summary = replace(summary, torchrec=peer.name, torchrec_ratio=ratio)
        found.append(summary)
    return found


def _unequal_threads(turns: Turns) -> list[str]:
    """Sides that ran with other threads than the first: their times mean nothing together."""
    threads = {v: m.figures["num_threads"] for v, found in turns.items() for m in found}
    if len(set(threads.values())) < 2:
        return []
    each = ", ".join(f"{variant.name} {number}" for variant, number in threads.items())
    return [f"the sides ran with different numbers of threads: {each}"]
