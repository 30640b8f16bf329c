"""Differences between what a sharded run and the plain reference came to, and what is allowed.

A difference is always relative: `|found - expected| / scale`, where the scale says how large the
numbers are that the value was made of. What the scale of each quantity is, and why the tolerances
are what they are:

Pass 1, fp64, end to end. Everything to 1e-10, or, where that is more, to what rounding may do to
the element in a run of its own: `check_bounds`.
    losses            the loss.
    gradients         (of a row) the sum over its lookups of factor · weight share · largest
                      derivative of the sample's logit by its pooled vectors: what the terms of the
                      sum can be at most. Not the gradient itself, which may cancel to nothing.
    rows, dense       the value, or the root mean square of its table (tensor) where that is larger.
    state             the same; sums of squares are compared by their roots, which is how they act.

Pass 2, the configured precision, one step and one stage at a time. Each stage starts from the
sharded run's own values, so nothing that an optimizer amplifies is carried over.
    pooled            Σ |factor · element of the row|: 1e-6. Rows or partial sums that travel as
                      bf16 (fp16) are rounded once, by up to 2⁻⁸ (2⁻¹¹): twice that.
    losses            the loss: 1e-5; under bf16 1e-3.
    pooled gradients  as the gradients of pass 1, for one sample: 1e-5. Under bf16 2⁻⁶: a chain of
                      layers whose values are rounded by 2⁻⁸ each, mostly alike in both.
    gradients         Σ |factor · gradient of the pooled vector|: 1e-5, and as `pooled` on the way.
    dense gradients   the largest dense gradient: 1e-5, under bf16 2⁻⁶.
    rows, state,      the value before or after the step, whichever is larger, and for an adaptive
    dense             rule's weights the learning rate, its natural step: 1e-6. The reference's own
                      optimizer is given the sharded run's gradients here. A fused kernel shows
                      none: its rows may also differ by what gradients at their limit would make;
                      and with weight decay, which may cancel a gradient, any by what its rounding
                      makes.
Rounding of fp32 sums grows as the root of their length: scales of `pooled` grow so beyond 16 ids in
a bag, those of `gradients` beyond 1,024 lookups of a row, and that of rows under fbgemm's SGD,
which updates a row once for every lookup, beyond 16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

LOSSES = "losses"
POOLED = "pooled"
POOLED_GRADIENTS = "pooled_gradients"
GRADIENTS = "gradients"
ROWS = "rows"
STATE = "state"
DENSE_GRADIENTS = "dense_gradients"
DENSE_WEIGHTS = "dense_weights"
DENSE_STATE = "dense_state"

# These belong to a table; the rest to the model as a whole.
TABLE_QUANTITIES = (POOLED, GRADIENTS, ROWS, STATE)
MODEL_QUANTITIES = (LOSSES, POOLED_GRADIENTS, DENSE_GRADIENTS, DENSE_WEIGHTS, DENSE_STATE)
SQUARES = frozenset(("sum", "exp_avg_sq"))
# Below this a scale counts as this: fp32's smallest normal number is 1.2e-38.
_TINY = 1e-30
# Differences where the reference has next to nothing; more says no more.
_LARGEST = 1e6
_WIRE_LIMIT = {"fp32": 0.0, "bf16": 2.0**-7, "fp16": 2.0**-10}
FP16_SMALLEST_NORMAL = 2.0**-14

Tolerances = Mapping[str, float]

FP64_TOLERANCES: Tolerances = dict.fromkeys(
    (LOSSES, GRADIENTS, ROWS, STATE, DENSE_GRADIENTS, DENSE_WEIGHTS, DENSE_STATE), 1e-10
)


def step_tolerances(precision: str, wire: str) -> Tolerances:
    """Of pass 2, by quantity; see the module.

    Args:
        precision: `train.precision`.
        wire: `sharding.wire`; `fp32` where nothing travels.
    """
    is_bf16 = precision == "bf16"
    return {
        POOLED: max(1e-6, _WIRE_LIMIT[wire]),
        LOSSES: 1e-3 if is_bf16 else 1e-5,
        POOLED_GRADIENTS: 2.0**-6 if is_bf16 else 1e-5,
        GRADIENTS: max(1e-5, _WIRE_LIMIT[wire]),
        DENSE_GRADIENTS: 2.0**-6 if is_bf16 else 1e-5,
        ROWS: 1e-6,
        STATE: 1e-6,
        DENSE_WEIGHTS: 1e-6,
        DENSE_STATE: 1e-6,
    }


@dataclass
class Largest:
    """The largest differences of one quantity.

    Attributes:
        difference: the largest, relative; infinite where a value isn't finite.
        num_values: numbers compared.
        share: of its own limit, the largest; what is above 1 is beyond.
        share_difference: the difference of which that is.
        where: row, column, step and batch of `share`.
        num_widened: numbers whose conditioning allows them more than the tolerance.
        widest: largest limit, relative.
    """

    difference: float = 0.0
    num_values: int = 0
    share: float = 0.0
    share_difference: float = 0.0
    where: str = ""
    num_widened: int = 0
    widest: float = 0.0


@dataclass
class Differences:
    """Of one pass.

    Attributes:
        tolerances: by quantity.
        largest: by quantity and table (or parameter).
        at: where the run is: step and batch.
        num_rows: rows compared, whole tables and single rows, each time they were.
        num_steps: steps compared.
        first_beyond: what was beyond its limit first; empty: nothing was.
    """

    tolerances: Tolerances
    largest: dict[tuple[str, str], Largest] = field(default_factory=dict)
    at: str = ""
    num_rows: int = 0
    num_steps: int = 0
    first_beyond: str = ""

    def compare(
        self,
        quantity: str,
        name: str,
        found: Tensor,
        expected: Tensor,
        scale: Tensor | float,
        *,
        allowed: Tensor | None = None,
        bound: Tensor | float | None = None,
        rows_K: Tensor | None = None,
    ) -> None:
        """Adds values to a quantity.

        Args:
            quantity: one of this module's.
            name: table or parameter.
            found: of the sharded run.
            expected: of the reference.
            scale: what a difference is relative to; broadcast.
            allowed: by how much values may differ before it counts.
            bound: a difference up to it is within its limit, whatever the tolerance; broadcast.
            rows_K: row numbers of `found`, for the message.
        """
        assert found.shape == expected.shape, (quantity, name, found.shape, expected.shape)
        entry = self.largest.setdefault((quantity, name), Largest())
        if not found.numel():
            return
        is_first = entry.num_values == 0
        entry.num_values += found.numel()
        tolerance = self.tolerances[quantity]
        ratios = relative_differences(found, expected, scale, allowed)
        entry.difference = max(entry.difference, float(ratios.max()))
        shares = ratios / tolerance
        if bound is not None:
            limits = _relative_limits(bound, scale, tolerance, ratios)
            is_widened = limits > tolerance
            entry.num_widened += int(is_widened.sum())
            entry.widest = max(entry.widest, float(limits.max()))
            shares = torch.where(is_widened, ratios / limits, shares)
        worst = int(shares.argmax())
        share = float(shares.flatten()[worst])
        if share > entry.share or is_first:
            entry.share = share
            entry.share_difference = float(ratios.flatten()[worst])
            entry.where = f"{_place(found, worst, rows_K)}{self.at}"
        if not self.first_beyond and not share <= 1:
            self.first_beyond = f"{_words(quantity, name)}, {self.at}"

    def worst(self, quantity: str, name: str | None = None) -> float | None:
        """The largest difference of a quantity (of a table); None where nothing was compared."""
        entries = self._entries(quantity, name)
        return max((entry.difference for entry in entries), default=None)

    def worst_share(self, quantity: str | None = None, name: str | None = None) -> float:
        """The largest share of a limit, of everything or a quantity (of a table)."""
        return max((entry.share for entry in self._entries(quantity, name)), default=0.0)

    def nearest(self) -> tuple[float, str] | None:
        """What is nearest to its limit (or farthest beyond): its share, and in words."""
        found = [(entry.share, key) for key, entry in self.largest.items() if entry.num_values]
        if not found:
            return None
        share, (quantity, name) = max(found)
        return share, self._told(quantity, name)

    def num_values(self, quantity: str) -> int:
        """Numbers of a quantity that were compared."""
        return sum(entry.num_values for entry in self._entries(quantity))

    def num_widened(self) -> int:
        """Numbers that were allowed more than their tolerance."""
        return sum(entry.num_widened for entry in self.largest.values())

    def widest(self) -> float:
        """The largest limit of these, relative; 0 where there are none."""
        return max((e.widest for e in self.largest.values() if e.num_widened), default=0.0)

    def beyond(self) -> list[tuple[float, str]]:
        """What is beyond its limit, worst first: by how many times, and in words."""
        found = [
            (entry.share, self._told(quantity, name))
            for (quantity, name), entry in self.largest.items()
            if not entry.share <= 1
        ]
        return sorted(found, key=lambda item: -item[0])

    def to_json(self) -> dict[str, Any]:
        """Figures of result.json; a difference that isn't finite is null."""
        tables: dict[str, dict[str, Any]] = {}
        model: dict[str, Any] = {}
        for (quantity, name), entry in self.largest.items():
            if quantity in TABLE_QUANTITIES:
                tables.setdefault(name, {})[quantity] = _finite(entry.difference)
        for quantity in MODEL_QUANTITIES:
            difference = self.worst(quantity)
            if difference is not None:
                model[quantity] = _finite(difference)
        nearest = self.nearest()
        return {
            "tolerances": dict(self.tolerances),
            "compared": {
                "steps": self.num_steps,
                "rows": self.num_rows,
                "values": {quantity: self.num_values(quantity) for quantity in self.tolerances},
            },
            "limits": {
                "largest_share": None if nearest is None else _finite(nearest[0]),
                "where": None if nearest is None else nearest[1],
                "shares": {q: _finite(self.worst_share(q)) for q in self.tolerances},
                "widened_values": self.num_widened(),
                "widest": _finite(self.widest()),
            },
            "tables": tables,
            **model,
        }

    def _entries(self, quantity: str | None, name: str | None = None) -> list[Largest]:
        return [
            entry
            for (of, table), entry in self.largest.items()
            if quantity in (None, of) and name in (None, table) and entry.num_values
        ]

    def _told(self, quantity: str, name: str) -> str:
        entry, tolerance = self.largest[quantity, name], self.tolerances[quantity]
        limit = entry.share_difference / entry.share if 0 < entry.share < math.inf else tolerance
        return (
            f"{_words(quantity, name)} differ by {entry.share_difference:.2g} (allowed: "
            f"{limit:.2g}), {entry.where}"
        )


def _relative_limits(
    bound: Tensor | float, scale: Tensor | float, tolerance: float, ratios: Tensor
) -> Tensor:
    """What each element is allowed: the tolerance, or the bound where that is more. A bound that
    isn't finite allows nothing."""
    bound = torch.as_tensor(bound, dtype=torch.float64)
    scale = torch.as_tensor(scale, dtype=torch.float64).clamp(min=_TINY)
    limits = (bound / scale).nan_to_num(nan=0.0, posinf=0.0).clamp(min=tolerance)
    return limits.expand_as(ratios)


def relative_differences(
    found: Tensor, expected: Tensor, scale: Tensor | float, allowed: Tensor | None = None
) -> Tensor:
    """`|found - expected| / scale` in fp64, at most 1e6; infinite where either isn't a number."""
    differences = (found.double() - expected.double()).abs()
    if allowed is not None:
        differences = (differences - allowed.double()).clamp(min=0)
    scale = torch.as_tensor(scale, dtype=torch.float64).expand_as(differences)
    ratios = (differences / scale.clamp(min=_TINY)).clamp(max=_LARGEST)
    return torch.nan_to_num(ratios, nan=math.inf, posinf=math.inf)


def size_or_rms(expected: Tensor, rms: float | None = None) -> Tensor:
    """Scale of a value among others of its kind: its size, or their root mean square."""
    return expected.abs().double().clamp(min=root_mean_square(expected) if rms is None else rms)


def root_mean_square(values: Tensor) -> float:
    """0 where there are no values."""
    if not values.numel():
        return 0.0
    return float(torch.linalg.vector_norm(values)) / math.sqrt(values.numel())


def comparable_state(name: str, values: Tensor) -> Tensor:
    """A state as it is compared end to end: of a sum of squares the root."""
    return values.sqrt() if name in SQUARES else values


def _place(values: Tensor, position: int, rows_K: Tensor | None) -> str:
    if values.dim() != 2:
        return ""
    row, column = divmod(position, values.shape[1])
    if rows_K is None:
        return ""
    return f"row {int(rows_K[row]):,}, column {column}, "


def _words(quantity: str, name: str) -> str:
    words = "gradients of pooled vectors" if quantity == POOLED_GRADIENTS else quantity
    words = "pooled vectors" if quantity == POOLED else words
    return words.replace("_", " ") + (f" of {name}" if name else "")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
