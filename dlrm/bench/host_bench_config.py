"""`bench.host.…`: what `dlrm bench host` measures, and what its sweep supposes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from data.errors import UserError


@dataclass
class HostBenchConfig:
    """Modes of tables in host memory, measured over simulated rates (`kind=host`).

    `sharding.host.lookahead`, `hot_mb`, `whole_rows` and `staging_mb` hold as in a training run.

    Raises:
        UserError: (a `ValueError`) for a value out of its limits; the message names the key.
    """

    table_scale: float = 0.05
    """Criteo Kaggle's cardinalities times this, at least 3 each (1.0: 33.8 M rows)."""
    zipf: float = 1.05
    """Exponent of the ids' distribution; must exceed 1."""
    dense_ms: float = 75.0
    """What the device is to compute for a whole batch, in ms; real work of the tables counts as
    part of it, the rest is slept."""
    fixed_share: float = 0.1
    """Share of that which doesn't depend on the samples: paid twice where a step has two parts."""
    stage_share: float = 1.5
    """Gather, both directions of the link and scatter of mode `gather` together, as a multiple of
    `dense_ms`: the simulated rates follow from it."""
    row_tolerance: float = 1e-4
    """How far the rows of a mode that sums in another order (`hotline`) may lie apart in the end;
    those of the others must be equal."""
    sweep_hot_mb: list[float] = field(default_factory=lambda: [0.0, 2.0, 8.0, 32.0, 64.0, 128.0])
    """Budgets of hot rows, in MiB, that the sweep goes through."""
    sweep_link_gb_s: list[float] = field(default_factory=lambda: [1.5, 6.0, 12.0, 25.0, 50.0])
    """Links, in 10^9 bytes/s and direction: 12, 25 and 50 are about PCIe 3, 4 and 5 with 16
    lanes."""
    sweep_latency_us: float = 10.0
    """Latency of a transfer; an assumption."""
    sweep_gather_gb_s: float = 6.0
    """Scattered rows read from host memory, 10^9 bytes/s; an assumption."""
    sweep_scatter_gb_s: float = 2.0
    """Scattered rows written to host memory, 10^9 bytes/s; an assumption."""
    sweep_dense_ms: float = 0.5
    """What the device computes for a whole batch, in ms; an assumption."""

    def __post_init__(self) -> None:
        if not self.zipf > 1 or not math.isfinite(self.zipf):
            raise UserError(f"bench.host.zipf={self.zipf:g}: must exceed 1")
        for name in (
            "table_scale",
            "dense_ms",
            "stage_share",
            "row_tolerance",
            "sweep_gather_gb_s",
            "sweep_scatter_gb_s",
            "sweep_dense_ms",
        ):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise UserError(f"bench.host.{name}={value:g}: must be a number above 0")
        if not 0 <= self.fixed_share <= 1:
            raise UserError(f"bench.host.fixed_share={self.fixed_share:g}: must be 0 to 1")
        if not 0 <= self.sweep_latency_us < math.inf:
            raise UserError(
                f"bench.host.sweep_latency_us={self.sweep_latency_us:g}: must be at least 0"
            )
        self._check_axis("sweep_hot_mb", may_be_0=True)
        self._check_axis("sweep_link_gb_s", may_be_0=False)

    def _check_axis(self, name: str, *, may_be_0: bool) -> None:
        values = getattr(self, name)
        lowest = "at least 0" if may_be_0 else "above 0"
        if not values or any(
            not math.isfinite(value) or value < 0 or (value == 0 and not may_be_0)
            for value in values
        ):
            raise UserError(f"bench.host.{name}={values}: name at least one number, each {lowest}")
        if values != sorted(set(values)):
            raise UserError(f"bench.host.{name}={values}: must rise, each number once")
