"""Dense columns: raw numbers → model inputs, the same in training, evaluation and prediction."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from data.errors import UserError
from data.schema import Schema


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations of a column's present values; mergeable."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def plus(self, values: np.ndarray) -> Moments:
        """With `values` (fp64, NaN = missing) added: Chan, Golub & LeVeque 1979."""
        present = values[~np.isnan(values)]
        if len(present) == 0:
            return self
        # Taken from the first value, so that the moments of a constant column are exact.
        offsets = present - present[0]
        mean = float(present[0]) + float(offsets.mean())
        with np.errstate(over="ignore"):
            squares = float(((offsets - offsets.mean()) ** 2).sum())
        count = self.count + len(present)
        shift = mean - self.mean
        return Moments(
            count,
            self.mean + shift * len(present) / count,
            self.squares + squares + shift**2 * self.count * len(present) / count,
        )

    @property
    def deviation(self) -> float:
        """Standard deviation; 1 for a constant or absent column, so that it becomes 0."""
        value = (self.squares / self.count) ** 0.5 if self.count else 0.0
        return value if value > 0 else 1.0


def count_missing(dense: dict[str, np.ndarray]) -> dict[str, int]:
    """By column, how many raw values are missing (NaN)."""
    return {name: int(np.count_nonzero(np.isnan(values))) for name, values in dense.items()}


def transform_dense(
    schema: Schema, dense: dict[str, np.ndarray], moments: dict[str, Moments]
) -> dict[str, np.ndarray]:
    """Applies each column's transform; computed in fp64, returned as fp32, never missing.

    Args:
        schema: names the transform of each column.
        dense: fp64 raw values by column; NaN = missing.
        moments: of the training part, for `standardise`.

    Raises:
        UserError: for a result that fp32 can't hold, naming the column.
    """
    result = {}
    for name, column in schema.dense.items():
        values = dense[name]
        if column.transform == "log1p":
            # fmax drops NaN: a missing value becomes 0, as a negative one does.
            values = np.log1p(np.fmax(values, 0.0))
        elif column.transform == "standardise":
            values = (values - moments[name].mean) / moments[name].deviation
            values = np.where(np.isnan(values), 0.0, values)
        else:
            values = np.where(np.isnan(values), 0.0, values)
        with np.errstate(over="ignore"):
            result[name] = values.astype(np.float32)
        if not np.isfinite(result[name]).all():
            raise UserError(
                f"column {name}: a value is too large for fp32 after its transform; use "
                f"data.schema.dense.{name}.transform=log1p"
            )
    return result
