"""`sharding.host.…`: how rows of tables in host memory come to where they are computed with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from data.errors import UserError
from embeddings.host.host_tables import Mode

MODES = ("auto", *get_args(Mode))
MOST_LOOKAHEAD = 8


@dataclass
class HostConfig:
    """Tables in host memory; read with `sharding.memory=host` only.

    Raises:
        UserError: (a `ValueError`) for a value out of its limits; the message names the key.
    """

    mode: str = "auto"
    """`gather`: a step's cold rows are brought when it needs them. `lookahead`: some steps ahead.
    `hotline`: while the samples are computed whose every id is hot. `auto`: what the cost model
    expects to be fastest, also to leave the tables on the device; printed with its reason."""
    hot_mb: float = 64.0
    """MiB for hot rows with their optimizer state, on every rank's device."""
    lookahead: int = 2
    """Steps that `lookahead` brings rows ahead, 1 to 8."""
    staging_mb: float | None = None
    """Most MiB for the cold rows of all steps under way, on every rank; null: as many as come."""
    hot_from: str = "counts"
    """What hot rows are chosen by: `counts` of the prepared dataset, or a `sample` of batches that
    are read before training."""
    sample_share: float = 0.05
    """`hot_from=sample`: share of an epoch's batches that is read."""
    whole_rows: int = 1000
    """Tables of at most so many rows are wholly hot, where they fit: one cold table makes a sample
    cold."""
    drift: float | None = 0.05
    """Hot rows are chosen anew, after an evaluation, when their share of the lookups since the one
    before is this far below what was expected; null: never."""

    @property
    def hot_bytes(self) -> int:
        """`hot_mb`."""
        return int(self.hot_mb * 2**20)

    @property
    def staging_bytes(self) -> int | None:
        """`staging_mb`."""
        return None if self.staging_mb is None else int(self.staging_mb * 2**20)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UserError(f"sharding.host.mode={self.mode}: must be one of {', '.join(MODES)}")
        if self.hot_from not in ("counts", "sample"):
            raise UserError(f"sharding.host.hot_from={self.hot_from}: must be counts or sample")
        if self.hot_mb < 0:
            raise UserError(f"sharding.host.hot_mb={self.hot_mb:g}: must be at least 0")
        if self.staging_mb is not None and self.staging_mb <= 0:
            raise UserError(f"sharding.host.staging_mb={self.staging_mb:g}: must be above 0")
        if not 1 <= self.lookahead <= MOST_LOOKAHEAD:
            raise UserError(
                f"sharding.host.lookahead={self.lookahead}: must be 1 to {MOST_LOOKAHEAD}"
            )
        if not 0 < self.sample_share <= 1:
            raise UserError(
                f"sharding.host.sample_share={self.sample_share:g}: must be above 0, at most 1"
            )
        if self.whole_rows < 0:
            raise UserError(f"sharding.host.whole_rows={self.whole_rows}: must be at least 0")
        if self.drift is not None and not 0 < self.drift < 1:
            raise UserError(f"sharding.host.drift={self.drift:g}: must be between 0 and 1, or null")
