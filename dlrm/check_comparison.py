"""What rank 0 of a check does: it trains the plain reference too, and compares.

`check_compare` says what is compared with what, and what is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from data.batch import Batch
from dlrm.check_bounds import ErrorBounds, GradientErrors
from dlrm.check_compare import (
    DENSE_GRADIENTS,
    DENSE_STATE,
    DENSE_WEIGHTS,
    FP16_SMALLEST_NORMAL,
    FP64_TOLERANCES,
    GRADIENTS,
    LOSSES,
    POOLED,
    POOLED_GRADIENTS,
    ROWS,
    STATE,
    Differences,
    comparable_state,
    root_mean_square,
    size_or_rms,
    step_tolerances,
)
from dlrm.check_gather import RankStep, StepTap, TablePart, assemble
from dlrm.check_reference import (
    FEW_ROWS,
    CapturedPart,
    PlainRun,
    PlainStep,
    RowGradients,
    optimizer_state,
    rounding_growth,
    touched_rows,
)
from dlrm.config import CheckRun
from dlrm.trainer import Trainer
from embeddings.row_optim import state_widths

_WEIGHT = "weight"
_ADAPTIVE = ("adagrad", "rowwise_adagrad", "adam", "adamw")
# Of a gradient plus weight decay, relative to its two terms, in fp32: two roundings in each run.
_DECAY_ROUNDING = 2.0**-22


class SamplesDiffer(RuntimeError):
    """The ranks' samples are not those of the global batch, each once."""


class Comparison:
    """The reference beside a sharded run, on rank 0.

    A step: `touched_rows(batch)` before the ranks tell of it, then `compare_step`.

    Args:
        trainer: rank 0's.
        tap: what is seen of its steps.
        config: precision, backend and wire are those of this pass.
        end_to_end: whether the reference goes its own way from beginning to end, or begins every
            step where the sharded run does.

    Attributes:
        differences: the figures so far.
    """

    def __init__(
        self, trainer: Trainer, tap: StepTap, config: CheckRun, *, end_to_end: bool
    ) -> None:
        self._trainer, self._tap, self._config = trainer, tap, config
        self._end_to_end = end_to_end
        self._may_reorder = trainer.embeddings.splits_hot
        self._plan = trainer.embeddings.plan
        self._dims = {table.name: table.dim for table in trainer.embeddings.tables}
        wire = config.sharding.wire if trainer.comm.world_size > 1 else "fp32"
        self.differences = Differences(
            FP64_TOLERANCES if end_to_end else step_tolerances(config.train.precision, wire)
        )
        floor = FP16_SMALLEST_NORMAL if wire == "fp16" else 0.0
        manifest = trainer.dataset.manifest
        self._reference = PlainRun(config, manifest, trainer.total_steps, floor)
        self._bounds = ErrorBounds(self._reference, config.seed) if end_to_end else None
        # The table that is compared as a whole: its name, values and their root mean squares.
        self._whole: tuple[str, dict[str, Tensor], dict[str, float]] | None = None

    def touched_rows(self, batch: Batch) -> dict[str, Tensor]:
        """Per table the distinct rows that a batch looks up, ascending."""
        return touched_rows(self._reference.features, batch.ids)

    def compare_step(
        self,
        step: int,
        batch: Batch,
        loss: float,
        touched: Mapping[str, Tensor],
        ranks: Sequence[RankStep],
    ) -> None:
        """The reference's step on the same global batch, and the differences.

        Args:
            step: counted from 0.
            batch: the global batch.
            loss: of the sharded run.
            touched: see `touched_rows`.
            ranks: what every rank has.

        Raises:
            SamplesDiffer: where the ranks' samples aren't the batch's.
        """
        reference = self._reference
        ordered = _as_computed(batch, [rank.row_B for rank in ranks], self._may_reorder)
        if ordered is None:
            raise SamplesDiffer(
                f"{self.differences.at}: the ranks' samples aren't those of the global batch in "
                "its order, each once"
            )
        batch = ordered
        self.differences.num_steps += 1
        if self._end_to_end:
            plain = reference.gradients(batch)
        else:
            plain = reference.gradients_of(_captured_parts(ranks, batch))
            self._compare_stages(plain, ranks)
        errors = None if self._bounds is None else self._bounds.measure(plain)
        losses = [torch.tensor([value], dtype=torch.float64) for value in (loss, plain.loss)]
        bound = None if errors is None else errors.loss
        self._compare(LOSSES, "", *losses, abs(plain.loss), bound=bound)
        gradients = self._compare_gradients(plain, ranks, errors)
        if self._bounds is not None and errors is not None:
            self._bounds.advance(step, plain, errors)
            reference.apply(step)
            self._compare_rows(touched, ranks)
        else:
            self._update_and_compare(step, plain, gradients, touched, ranks)

    def compare_table(self, table: str, start: int, copies: Sequence[Mapping[str, Tensor]]) -> None:
        """Whole rows from `start` on, of one copy or of every copy."""
        if self._whole is None or self._whole[0] != table:
            tables = self._reference.tables
            values = {_WEIGHT: tables.weight(table), **tables.states(table)}
            sizes = {n: root_mean_square(comparable_state(n, v)) for n, v in values.items()}
            self._whole = (table, values, sizes)
        _, whole, rms = self._whole
        for found in copies:
            stop = start + found[_WEIGHT].shape[0]
            block = {name: of_table[start:stop] for name, of_table in whole.items()}
            self._compare_values(table, found, block, torch.arange(start, stop), rms)
        self.differences.num_rows += copies[0][_WEIGHT].shape[0]

    def compare_dense(self, of_ranks: Sequence[Sequence[Tensor]]) -> None:
        """The dense weights of every rank, and end to end the optimizer state of rank 0."""
        trainer, reference = self._trainer, self._reference
        named = [(name, p.detach()) for name, p in reference.model.named_parameters()]
        bounds: list[dict[str, Tensor]] = [{} for _ in named]
        if self._bounds is not None:
            bounds = [self._bounds.of_dense(number) for number in range(len(named))]
        for weights in of_ranks:
            for (name, expected), ours, bound in zip(named, weights, bounds, strict=True):
                scale = size_or_rms(expected)
                more = {"bound": bound.get(_WEIGHT)}
                self._compare(DENSE_WEIGHTS, name, ours, expected, scale, **more)
        if not self._end_to_end:
            return
        found = optimizer_state(trainer.model, trainer.dense_optimizer)
        for (name, _), ours_of, theirs_of, bound in zip(
            named, found, reference.dense_state(), bounds, strict=True
        ):
            for state, values in ours_of.items():
                sharded, plain = (comparable_state(state, v) for v in (values, theirs_of[state]))
                more = {"bound": bound.get(state)}
                self._compare(DENSE_STATE, name, sharded, plain, size_or_rms(plain), **more)

    # ---------------------------------------------------------------------------------- a step

    def _compare(self, quantity: str, name: str, *values: Any, **more: Any) -> None:
        self.differences.compare(quantity, name, *values, **more)

    def _compare_stages(self, plain: PlainStep, ranks: Sequence[RankStep]) -> None:
        """Pooled vectors, and the gradients by them, of every rank's micro-batches."""
        pooled = [part for rank in ranks for part in rank.pooled]
        grads = [part for rank in ranks for part in rank.pooled_grads]
        for figures, pooled_BS, grad_BS in zip(plain.parts, pooled, grads, strict=True):
            for table, columns, expected_BD, scale_BD in figures.pooled:
                self._compare(POOLED, table, pooled_BS[:, columns], expected_BD, scale_BD)
            self._compare(POOLED_GRADIENTS, "", grad_BS, figures.grad_BS, figures.grad_scale_B1)

    def _compare_gradients(
        self, plain: PlainStep, ranks: Sequence[RankStep], errors: GradientErrors | None
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Gradients of rows and dense weights; returns the sharded run's of rows."""
        scale = max((float(g.abs().max()) for g in plain.dense_gradients if g.numel()), default=0.0)
        names = [name for name, _ in self._trainer.model.named_parameters()]
        found = self._dense_gradients(plain)
        bounds = [None] * len(names) if errors is None else errors.dense
        for name, ours, theirs, bound in zip(
            names, found, plain.dense_gradients, bounds, strict=True
        ):
            self._compare(DENSE_GRADIENTS, name, ours, theirs, scale, bound=bound)
        gradients: dict[str, tuple[Tensor, Tensor]] = {}
        if self._trainer.embeddings.backend == "fbgemm":
            return gradients
        for table, expected in plain.row_gradients.items():
            for parts in self._copies(table, [rank.gradients for rank in ranks]):
                margin = None if errors is None else errors.rows[table]
                gradients[table] = self._compare_row_gradients(table, expected, parts, margin)
        return gradients

    def _dense_gradients(self, plain: PlainStep) -> list[Tensor]:
        """The sharded run's; zeros after a step that updated nothing."""
        return self._tap.dense_gradients or [torch.zeros_like(g) for g in plain.dense_gradients]

    def _compare_row_gradients(
        self,
        table: str,
        expected: RowGradients,
        parts: Sequence[TablePart],
        margin_KD: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        rows_K = torch.cat([expected.rows_K, *(part.rows_K for part in parts)]).unique()
        grads_KD = assemble(
            parts, "gradient", rows_K, self._dims[table], self._trainer.embeddings.dtype
        )
        positions_K = torch.searchsorted(rows_K, expected.rows_K)
        expected_KD = torch.zeros_like(grads_KD)
        expected_KD[positions_K] = expected.grads_KD
        # A row that only the sharded run has a gradient for is measured by the table's largest.
        largest = float(expected.magnitudes.max()) if expected.magnitudes.numel() else 0.0
        scale = torch.full((rows_K.numel(), expected.magnitudes.shape[1]), largest).double()
        scale[positions_K] = expected.magnitudes.double()
        bound = None
        if margin_KD is not None:
            bound = torch.zeros(rows_K.numel(), margin_KD.shape[1], dtype=torch.float64)
            bound[positions_K] = margin_KD
        self._compare(GRADIENTS, table, grads_KD, expected_KD, scale, bound=bound, rows_K=rows_K)
        return rows_K, grads_KD

    def _update_and_compare(
        self,
        step: int,
        plain: PlainStep,
        gradients: Mapping[str, tuple[Tensor, Tensor]],
        touched: Mapping[str, Tensor],
        ranks: Sequence[RankStep],
    ) -> None:
        """The reference's optimizers take the sharded run's gradients; rows, state and dense
        weights afterwards are compared; then the reference takes the sharded run's."""
        reference = self._reference
        tables = reference.tables
        before = {table: tables.take(table, rows_K) for table, rows_K in touched.items()}
        dense_before = _dense_values(reference.model, reference.dense_optimizer)
        spreads = {
            table: self._update_spread(step, table, rows_K, before[table], plain, gradients)
            for table, rows_K in touched.items()
        }
        reference.set_gradients(gradients, self._dense_gradients(plain))
        reference.apply(step)
        lr_dense, lr_sparse = reference.learning_rates(step)
        floor = lr_sparse if reference.rule.name in _ADAPTIVE else 0.0
        for table, rows_K in touched.items():
            expected = tables.take(table, rows_K)
            growth: Tensor | float = 1.0
            if table not in gradients and reference.rule.name == "sgd":
                # fbgemm's SGD changes a row once for every lookup, rounding it each time.
                num_lookups_K = plain.row_gradients[table].num_lookups_K
                growth = rounding_growth(num_lookups_K, FEW_ROWS)[:, None]
            for parts in self._copies(table, [rank.rows for rank in ranks]):
                found = self._assembled(table, parts, rows_K)
                for name, values in found.items():
                    scale = _larger(before[table][name], expected[name])
                    if name == _WEIGHT:
                        scale = scale * growth + floor
                    self._compare(
                        ROWS if name == _WEIGHT else STATE,
                        table,
                        values,
                        expected[name],
                        scale,
                        allowed=spreads[table].get(name),
                        rows_K=rows_K,
                    )
            self.differences.num_rows += rows_K.numel()
            # The first copy is rank 0's.
            first = self._copies(table, [rank.rows for rank in ranks])[0]
            tables.put(table, rows_K, self._assembled(table, first, rows_K))
        self._compare_dense_update(dense_before, lr_dense)

    def _update_spread(
        self,
        step: int,
        table: str,
        rows_K: Tensor,
        before: Mapping[str, Tensor],
        plain: PlainStep,
        gradients: Mapping[str, tuple[Tensor, Tensor]],
    ) -> dict[str, Tensor]:
        """By how much rows and state may differ beside their tolerance."""
        reference = self._reference
        own = plain.row_gradients[table]
        if table not in gradients:
            margin = self.differences.tolerances[GRADIENTS] * own.magnitudes
            return reference.update_spread(step, before, own.grads_KD, margin)
        decay = reference.rule.weight_decay
        if not decay:
            return {}
        all_rows_K, all_grads_KD = gradients[table]
        grads_KD = all_grads_KD[torch.searchsorted(all_rows_K, rows_K)]
        terms = grads_KD.abs() + decay * before[_WEIGHT].abs()
        decayed = grads_KD + decay * before[_WEIGHT]
        return reference.update_spread(step, before, decayed, _DECAY_ROUNDING * terms)

    def _compare_dense_update(
        self, before: Sequence[tuple[str, Mapping[str, Tensor]]], lr: float
    ) -> None:
        reference, trainer = self._reference, self._trainer
        floor = lr if self._config.optim.dense.name in _ADAPTIVE else 0.0
        ours = _dense_values(trainer.model, trainer.dense_optimizer)
        theirs = _dense_values(reference.model, reference.dense_optimizer, copy=False)
        for (parameter, found), (_, expected), (_, old) in zip(ours, theirs, before, strict=True):
            for name, values in found.items():
                scale = _larger(old.get(name, torch.zeros_like(values)), expected[name])
                if name == _WEIGHT:
                    scale = scale + floor
                quantity = DENSE_WEIGHTS if name == _WEIGHT else DENSE_STATE
                self._compare(quantity, parameter, values, expected[name], scale)
                expected[name].copy_(values)

    def _compare_rows(self, touched: Mapping[str, Tensor], ranks: Sequence[RankStep]) -> None:
        """End to end: the touched rows after a step."""
        reference = self._reference
        for table, rows_K in touched.items():
            expected = reference.tables.take(table, rows_K)
            for parts in self._copies(table, [rank.rows for rank in ranks]):
                found = self._assembled(table, parts, rows_K)
                self._compare_values(table, found, expected, rows_K)
            self.differences.num_rows += rows_K.numel()

    def _compare_values(
        self,
        table: str,
        found: Mapping[str, Tensor],
        expected: Mapping[str, Tensor],
        rows_K: Tensor,
        rms: Mapping[str, float] | None = None,
    ) -> None:
        bounds = {} if self._bounds is None else self._bounds.of_rows(table, rows_K)
        for name, values in found.items():
            ours, theirs = comparable_state(name, values), comparable_state(name, expected[name])
            scale = size_or_rms(theirs, None if rms is None else rms[name])
            quantity = ROWS if name == _WEIGHT else STATE
            bound = bounds.get(name)
            self._compare(quantity, table, ours, theirs, scale, bound=bound, rows_K=rows_K)

    def _copies(
        self, table: str, parts_of_rank: Sequence[Sequence[TablePart]]
    ) -> list[list[TablePart]]:
        """The parts of a table: together one copy, or of a replicated table one for every rank."""
        of_rank = [[part for part in parts if part.table == table] for parts in parts_of_rank]
        if self._plan.is_replicated(table):
            return of_rank
        return [[part for parts in of_rank for part in parts]]

    def _assembled(
        self, table: str, parts: Sequence[TablePart], rows_K: Tensor
    ) -> dict[str, Tensor]:
        dim, rule = self._dims[table], self._reference.rule
        widths = {_WEIGHT: dim, **state_widths(rule, dim)}
        dtype = self._trainer.embeddings.dtype
        return {name: assemble(parts, name, rows_K, width, dtype) for name, width in widths.items()}


def _as_computed(batch: Batch, rows_of_rank: Sequence[Tensor], may_reorder: bool) -> Batch | None:
    """The global batch in the order in which the ranks computed its samples.

    Args:
        batch: in the order of the data.
        rows_of_rank: per rank its samples' `row_B`.
        may_reorder: whether a rank may have changed the order of its own samples.

    Returns:
        None where these aren't the samples.
    """
    if torch.equal(torch.cat(list(rows_of_rank)), batch.row_B):
        return batch
    sizes = [rows_B.numel() for rows_B in rows_of_rank]
    if not may_reorder or sum(sizes) != batch.batch_size:
        return None
    order: list[Tensor] = []
    start = 0
    for rows_B, size in zip(rows_of_rank, sizes, strict=True):
        given_B = batch.row_B[start : start + size]
        by_row_B, given_by_row_B = rows_B.argsort(stable=True), given_B.argsort(stable=True)
        if not torch.equal(rows_B[by_row_B], given_B[given_by_row_B]):
            return None
        order_B = torch.empty(size, dtype=torch.int64)
        order_B[by_row_B] = given_by_row_B + start
        order.append(order_B)
        start += size
    return batch.take(torch.cat(order))


def _captured_parts(ranks: Sequence[RankStep], batch: Batch) -> list[CapturedPart]:
    """The micro-batches of all ranks, cut from the global batch."""
    parts: list[CapturedPart] = []
    start = 0
    for rank in ranks:
        for size, pooled, grad in zip(rank.part_sizes, rank.pooled, rank.pooled_grads, strict=True):
            part = batch.narrow(start, start + size)
            parts.append(CapturedPart(part, pooled, grad))
            start += size
    return parts


def _dense_values(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, copy: bool = True
) -> list[tuple[str, dict[str, Tensor]]]:
    """Per parameter its weight and state by name."""
    states = optimizer_state(model, optimizer)
    named = list(model.named_parameters())
    values = [
        (name, {_WEIGHT: parameter.detach(), **state})
        for (name, parameter), state in zip(named, states, strict=True)
    ]
    if not copy:
        return values
    return [(name, {n: v.clone() for n, v in of.items()}) for name, of in values]


def _larger(before: Tensor, after: Tensor) -> Tensor:
    return torch.maximum(before.abs(), after.abs()).double()
