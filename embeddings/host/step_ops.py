"""A step of host-resident tables as operations of each mode's schedule, for the simulator."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

from embeddings.host.executor import COMPUTE, LinkRates
from embeddings.planner.simulate import Op

Mode = Literal["gather", "lookahead", "hotline", "classic"]
LOOKAHEAD_KEY = "sharding.host.lookahead"


@dataclass(frozen=True)
class HostRates:
    """How fast rows move.

    Attributes:
        gather_bytes_per_s: of scattered rows read from host memory.
        scatter_bytes_per_s: of scattered rows written to host memory.
        link: between host and device; None where both are one memory.
        forward_bytes_per_s: of updated records copied between staged steps on the device; None
            where these copies take no time worth counting, as in a GPU's own memory.

    Raises:
        ValueError: a rate that isn't finite and above 0.
    """

    gather_bytes_per_s: float
    scatter_bytes_per_s: float
    link: LinkRates | None
    forward_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        rates = {
            "gather_bytes_per_s": self.gather_bytes_per_s,
            "scatter_bytes_per_s": self.scatter_bytes_per_s,
            "forward_bytes_per_s": self.forward_bytes_per_s,
        }
        for name, rate in rates.items():
            if rate is not None and not (math.isfinite(rate) and rate > 0):
                raise ValueError(f"{name} is {rate}, but a rate must be finite and above 0")


@dataclass(frozen=True)
class DenseTime:
    """What the device computes in a step: the dense network, hot rows, updates, all-reduces.

    Attributes:
        fixed_s: seconds of a pass that don't depend on its samples, launches above all. A mode
            that computes a step in two passes pays it twice.
        per_sample_s: seconds that each sample adds.

    Raises:
        ValueError: a time that is negative or not finite.
    """

    fixed_s: float
    per_sample_s: float

    def __post_init__(self) -> None:
        _check_at_least_0(self)

    def of_s(self, num_samples: float) -> float:
        """Seconds, on average, of a pass over `num_samples` samples on average.

        A pass without samples isn't made. So one of less than a sample on average is made in at
        most that share of the steps.
        """
        return self.fixed_s * min(1.0, num_samples) + self.per_sample_s * num_samples


@dataclass(frozen=True)
class StepWork:
    """What a rank's step has to do, on average (so that numbers of rows may be fractions).

    Attributes:
        num_samples: `B`.
        record_bytes: of a row with its optimizer state.
        num_cold: distinct cold rows of a step.
        num_fetched: of these, read from the store under the lookahead; the others come from an
            earlier step that is still staged.
        num_forwarded: records that a step gives to later staged steps under the lookahead.
        num_written: records written back to the store in a step under the lookahead. The modes
            without lookahead read and write all `num_cold`.
        all_hot_share: of the samples, those whose ids are all hot.
        num_unique: distinct rows of a step, hot and cold.
        pooled_bytes: of the pooled vectors of a step, `B · S` values, in one direction.
        row_bytes: of a row without its state.

    Raises:
        ValueError: a number below 0 or not finite, or more of a part than of the whole.
    """

    num_samples: int
    record_bytes: int
    num_cold: float
    num_fetched: float
    num_forwarded: float
    num_written: float
    all_hot_share: float
    num_unique: float
    pooled_bytes: int
    row_bytes: int

    def __post_init__(self) -> None:
        _check_at_least_0(self)
        limits = {
            "num_cold": ("num_unique", self.num_unique),
            "num_fetched": ("num_cold", self.num_cold),
            "num_forwarded": ("num_cold", self.num_cold),
            "num_written": ("num_cold", self.num_cold),
            "row_bytes": ("record_bytes", self.record_bytes),
            "all_hot_share": ("the whole", 1.0),
        }
        for name, (limit_name, limit) in limits.items():
            if getattr(self, name) > limit:
                raise ValueError(
                    f"{name} is {getattr(self, name):,}, but can't be above {limit_name}, {limit:,}"
                )


def step_ops(
    mode: Mode,
    work: StepWork,
    rates: HostRates,
    dense: DenseTime,
    *,
    lookahead: int = 0,
    num_steps: int = 60,
) -> list[Op]:
    """The operations of `num_steps` steps, in the order in which the schedule issues them.

    Their resources are `compute`, `gather`, `scatter`, and for the link `to_device` and `to_host`,
    or one `link` for both where it is half duplex. Operations that move nothing are left out, as
    are both directions where there is no link.

    Args:
        mode: `gather`, `lookahead`, `hotline`, or `classic`: all rows are read and pooled on the
            host, pooled vectors cross the link, their gradients cross it back, and the host
            updates the rows; one after another.
        work: of a step.
        rates: of the host's memory and the link.
        dense: what is computed on the device.
        lookahead: how many steps ahead rows are staged; read by mode `lookahead` only.
        num_steps: how many steps.

    Raises:
        ValueError: mode `lookahead` with a lookahead below 1, or fewer than 1 step.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps is {num_steps}, but must be at least 1")
    if mode == "gather":
        every_row = _Stages.of_records(rates, work, work.num_cold, work.num_cold)
        return _serial_ops(every_row, dense.of_s(work.num_samples), num_steps)
    if mode == "classic":
        return _serial_ops(_Stages.pooled(rates, work), dense.of_s(work.num_samples), num_steps)
    if mode == "hotline":
        return _hotline_ops(work, rates, dense, num_steps)
    assert mode == "lookahead", mode
    if lookahead < 1:
        raise ValueError(
            f"mode lookahead stages rows ahead, but {LOOKAHEAD_KEY} is {lookahead}; set 1 or more"
        )
    return _lookahead_ops(work, rates, dense, lookahead, num_steps)


# ------------------------------------------------------------------------------------ schedules


@dataclass(frozen=True)
class _Stages:
    """Seconds of the stages between store and device; and which resource is either direction."""

    gather_s: float
    to_device_s: float
    to_host_s: float
    scatter_s: float
    is_duplex: bool

    @classmethod
    def of_records(
        cls, rates: HostRates, work: StepWork, num_fetched: float, num_written: float
    ) -> _Stages:
        fetched_bytes = num_fetched * work.record_bytes
        written_bytes = num_written * work.record_bytes
        return cls(
            fetched_bytes / rates.gather_bytes_per_s,
            _link_s(rates.link, fetched_bytes),
            _link_s(rates.link, written_bytes),
            written_bytes / rates.scatter_bytes_per_s,
            rates.link is None or rates.link.is_duplex,
        )

    @classmethod
    def pooled(cls, rates: HostRates, work: StepWork) -> _Stages:
        link_s = _link_s(rates.link, work.pooled_bytes)
        return cls(
            work.num_unique * work.row_bytes / rates.gather_bytes_per_s,
            link_s,
            link_s,
            work.num_unique * work.record_bytes / rates.scatter_bytes_per_s,
            rates.link is None or rates.link.is_duplex,
        )


class _Issue:
    """Collects operations in the order of issue."""

    def __init__(self, stages: _Stages) -> None:
        self.ops: list[Op] = []
        self._stages = stages

    def add(
        self, resource: str, duration_s: float, after: tuple[int, ...], label: str, step: int
    ) -> int:
        """Issues one operation; returns its position."""
        self.ops.append(Op(resource, duration_s, after, label, step))
        return len(self.ops) - 1

    def stage(self, step: int, after: tuple[int, ...]) -> tuple[int, ...]:
        """Rows to the device; returns what waits for them has to wait for."""
        after = self._move("gather", "gather", self._stages.gather_s, after, step)
        return self._move(
            self._link("to_device"), "to device", self._stages.to_device_s, after, step
        )

    def write_back(self, step: int, after: tuple[int, ...]) -> tuple[int, ...]:
        """Rows to the store; returns what reads them again has to wait for."""
        after = self._move(self._link("to_host"), "to host", self._stages.to_host_s, after, step)
        return self._move("scatter", "scatter", self._stages.scatter_s, after, step)

    def _link(self, direction: str) -> str:
        return direction if self._stages.is_duplex else "link"

    def _move(
        self, resource: str, label: str, duration_s: float, after: tuple[int, ...], step: int
    ) -> tuple[int, ...]:
        # What moves nothing isn't issued: it would still take its turn in a queue.
        return (self.add(resource, duration_s, after, label, step),) if duration_s else after


def _serial_ops(stages: _Stages, dense_s: float, num_steps: int) -> list[Op]:
    """One stage after another, one step after another."""
    issue = _Issue(stages)
    written: tuple[int, ...] = ()
    for step in range(num_steps):
        staged = issue.stage(step, written)
        computed = issue.add(COMPUTE, dense_s, staged, "dense", step)
        written = issue.write_back(step, (computed,))
    return issue.ops


def _hotline_ops(work: StepWork, rates: HostRates, dense: DenseTime, num_steps: int) -> list[Op]:
    """The all-hot samples are computed while the rows of the others come."""
    num_hot = work.num_samples * work.all_hot_share
    issue = _Issue(_Stages.of_records(rates, work, work.num_cold, work.num_cold))
    computed: tuple[int, ...] = ()
    written: tuple[int, ...] = ()
    for step in range(num_steps):
        # Submitted when the step before is computed, and run when all of it is written.
        staged = issue.stage(step, computed + written)
        issue.add(COMPUTE, dense.of_s(num_hot), (), "part 1", step)
        part_2_s = dense.of_s(work.num_samples - num_hot)
        computed = (issue.add(COMPUTE, part_2_s, staged, "part 2", step),)
        written = issue.write_back(step, computed)
    return issue.ops


def _lookahead_ops(
    work: StepWork, rates: HostRates, dense: DenseTime, lookahead: int, num_steps: int
) -> list[Op]:
    """During step t the rows of step t + lookahead come, and those of t - 1 leave.

    A read of the store waits for the writes before it, as if they always had a row in common:
    under a skew they nearly always do. So a ring of `lookahead + 2` buffers never makes a read wait
    longer; that taking a buffer might block the compute isn't modelled. Records are forwarded into
    places of a later step that nothing else is brought to, and so don't wait for that step's rows.
    """
    forward_s = 0.0
    if rates.forward_bytes_per_s is not None:
        forward_s = work.num_forwarded * work.record_bytes / rates.forward_bytes_per_s
    dense_s = dense.of_s(work.num_samples)
    issue = _Issue(_Stages.of_records(rates, work, work.num_fetched, work.num_written))
    staged = {step: issue.stage(step, ()) for step in range(min(lookahead, num_steps))}
    written: tuple[int, ...] = ()
    for step in range(num_steps):
        looked_up = issue.add(COMPUTE, 0.0, staged.pop(step), "look up", step)
        if step + lookahead < num_steps:
            staged[step + lookahead] = issue.stage(step + lookahead, (looked_up, *written))
        issue.add(COMPUTE, dense_s, (), "dense", step)
        forwarded = issue.add(COMPUTE, forward_s, (), "forward", step)
        written = issue.write_back(step, (forwarded,))
    return issue.ops


def _link_s(link: LinkRates | None, num_bytes: float) -> float:
    """Seconds of one transfer; there is none where nothing has to cross."""
    if link is None or not num_bytes:
        return 0.0
    return link.duration_s(num_bytes)


def _check_at_least_0(values: DenseTime | StepWork) -> None:
    for field in fields(values):
        value = getattr(values, field.name)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{field.name} is {value}, but must be finite and at least 0")
