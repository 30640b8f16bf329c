"""One pass of a check: the same batches through the sharded trainer and the plain reference.

Every rank trains with the real `Trainer.step` and the real `Pipeline`; rank 0 trains the reference
too and compares.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.batch import Batch
from data.parquet import PreparedDataset
from dlrm import mutations
from dlrm.check_batches import MadeBatch, interleave, own_batches
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
from dlrm.check_gather import (
    RankStep,
    StepTap,
    TablePart,
    assemble,
    gradient_parts,
    row_parts,
)
from dlrm.check_reference import (
    CapturedPart,
    PlainRun,
    PlainStep,
    RowGradients,
    optimizer_state,
    touched_rows,
)
from dlrm.config import CheckRun
from dlrm.run_folder import RunFolder
from dlrm.trainer import Trainer
from embeddings.communicator import Communicator
from embeddings.plan import Plan
from embeddings.row_optim import state_widths

_BLOCK_ROWS = 65_536
# Of a gradient plus weight decay, relative to its two terms, in fp32: two roundings in each run.
_DECAY_ROUNDING = 2.0**-22
_WEIGHT = "weight"
_ADAPTIVE = ("adagrad", "rowwise_adagrad", "adam", "adamw")


class SamplesDiffer(RuntimeError):
    """The ranks' samples are not those of the global batch, each once."""


@dataclass(frozen=True)
class PassResult:
    """What a pass came to.

    Attributes:
        title: what was compared with what.
        is_end_to_end: False: one step at a time.
        precision: of both runs.
        backend: of the sharded run.
        wire: of the sharded run.
        differences: the figures.
    """

    title: str
    is_end_to_end: bool
    precision: str
    backend: str
    wire: str
    differences: Differences


def run_pass(
    comm: Communicator,
    config: CheckRun,
    dataset: PreparedDataset,
    plan: Plan,
    made: Sequence[MadeBatch],
    *,
    end_to_end: bool,
    beat: Callable[[int, str], None],
) -> PassResult | None:
    """Trains and compares; called by all ranks.

    Args:
        comm: the ranks.
        config: precision, backend and wire are those of this pass.
        dataset: what to train on.
        plan: who owns what.
        made: the hand-made batches.
        end_to_end: whether the reference goes its own way from beginning to end, or begins every
            step where the sharded run does.
        beat: the heartbeat.

    Returns:
        The figures, on rank 0; None on the others.
    """
    with tempfile.TemporaryDirectory(prefix="dlrm-check-") as folder:
        trainer = Trainer(
            config,
            dataset,
            RunFolder.of_this_run(Path(folder)),
            say=lambda line: None,
            comm=comm,
            plan=plan,
            beat=beat,
        )
        try:
            return _Pass(trainer, config, dataset, made, end_to_end, beat).run()
        finally:
            trainer.recorder.close()


class _Pass:
    """The state of `run_pass`."""

    def __init__(
        self,
        trainer: Trainer,
        config: CheckRun,
        dataset: PreparedDataset,
        made: Sequence[MadeBatch],
        end_to_end: bool,
        beat: Callable[[int, str], None],
    ) -> None:
        self._trainer, self._config, self._dataset, self._beat = trainer, config, dataset, beat
        self._end_to_end = end_to_end
        self._comm, self._plan = trainer.comm, trainer.embeddings.plan
        self._order = interleave(config.check.steps, made)
        if config.check.mutate is not None:
            mutations.plant(config.check.mutate, trainer)
        self._tap = StepTap.of(trainer)
        self._dims = {table.name: table.dim for table in trainer.embeddings.tables}
        self._wire = config.sharding.wire if self._comm.world_size > 1 else "fp32"
        tolerances = FP64_TOLERANCES
        if not end_to_end:
            tolerances = step_tolerances(config.train.precision, self._wire)
        self._differences = Differences(tolerances)
        self._reference: PlainRun | None = None
        if self._comm.rank == 0:
            floor = FP16_SMALLEST_NORMAL if self._wire == "fp16" else 0.0
            manifest = dataset.manifest
            self._reference = PlainRun(config, manifest, trainer.total_steps, floor)

    def run(self) -> PassResult | None:
        """All steps, then all rows."""
        trainer, comm = self._trainer, self._comm
        with (
            closing(self._local_batches()) as local,
            closing(self._global_batches()) as whole,
        ):
            pipeline = trainer.pipeline(local, len(self._order))
            # As `fit` does: a step begins to plan the next batch.
            trainer._pipeline = pipeline
            for step, made in enumerate(self._order):
                trainer.steps_done = step % trainer.total_steps
                self._tap.clear()
                planned = pipeline.take()
                assert planned is not None
                loss = trainer.step(planned)
                self._beat(step + 1, "compare")
                batch = next(whole) if comm.rank == 0 else None
                kind = "" if made is None else f" ({made.name})"
                self._differences.at = f"step {step + 1}{kind}"
                sizes = [micro.batch_size for micro, _ in planned.micro_batches]
                self._compare_step(step, loss, planned.batch.row_B, sizes, batch)
        self._beat(len(self._order), "compare rows")
        self._differences.at = f"at the end, after {len(self._order)} steps"
        with comm.uncounted():
            self._compare_all_rows()
            self._compare_dense_of_ranks()
        if comm.rank != 0:
            return None
        precision = self._config.train.precision
        how = "end to end" if self._end_to_end else "one step at a time"
        return PassResult(
            title=f"{precision}, {how}",
            is_end_to_end=self._end_to_end,
            precision=precision,
            backend=trainer.embeddings.backend,
            wire=self._config.sharding.wire,
            differences=self._differences,
        )

    # -------------------------------------------------------------------------------- batches

    def _local_batches(self) -> Generator[Batch, None, None]:
        """This rank's share of each batch, the run's own ones as training reads them."""
        comm = self._comm
        own = own_batches(self._dataset, self._config, comm.rank, comm.world_size)
        with closing(own):
            for made in self._order:
                yield next(own) if made is None else made.of_rank(comm.rank)

    def _global_batches(self) -> Generator[Batch, None, None]:
        with closing(own_batches(self._dataset, self._config)) as own:
            for made in self._order:
                yield next(own) if made is None else made.batch

    # ----------------------------------------------------------------------------------- steps

    def _compare_step(
        self, step: int, loss: float, row_B: Tensor, part_sizes: list[int], batch: Batch | None
    ) -> None:
        comm, embeddings, tap = self._comm, self._trainer.embeddings, self._tap
        touched = None
        if batch is not None:
            assert self._reference is not None
            touched = touched_rows(self._reference.features, batch.ids)
        with comm.uncounted():
            touched = comm.all_gather_object(touched)[0]
            assert touched is not None
            own = RankStep(
                row_B=row_B,
                part_sizes=part_sizes,
                pooled=[] if self._end_to_end else tap.pooled,
                pooled_grads=[] if self._end_to_end else tap.pooled_grads,
                gradients=gradient_parts(embeddings, tap.kv_gradients),
                rows=row_parts(embeddings, touched),
            )
            ranks: list[RankStep] = comm.all_gather_object(own)
        if batch is None:
            return
        reference = self._reference
        assert reference is not None
        if not torch.equal(torch.cat([rank.row_B for rank in ranks]), batch.row_B):
            raise SamplesDiffer(
                f"{self._differences.at}: the ranks' samples aren't those of the global batch in "
                "its order, each once"
            )
        self._differences.num_steps += 1
        if self._end_to_end:
            plain = reference.gradients(batch)
        else:
            plain = reference.gradients_of(_captured_parts(ranks, batch))
            self._compare_stages(plain, ranks)
        losses = [torch.tensor([value], dtype=torch.float64) for value in (loss, plain.loss)]
        self._compare(LOSSES, "", *losses, abs(plain.loss))
        gradients = self._compare_gradients(plain, ranks)
        if self._end_to_end:
            reference.apply(step)
            self._compare_rows(touched, ranks)
            return
        self._update_and_compare(step, plain, gradients, touched, ranks)

    def _compare(self, quantity: str, name: str, *values: Any, **more: Any) -> None:
        self._differences.compare(quantity, name, *values, **more)

    def _compare_stages(self, plain: PlainStep, ranks: Sequence[RankStep]) -> None:
        """Pooled vectors, and the gradients by them, of every rank's micro-batches."""
        pooled = [part for rank in ranks for part in rank.pooled]
        grads = [part for rank in ranks for part in rank.pooled_grads]
        for figures, pooled_BS, grad_BS in zip(plain.parts, pooled, grads, strict=True):
            for table, columns, expected_BD, scale_BD in figures.pooled:
                self._compare(POOLED, table, pooled_BS[:, columns], expected_BD, scale_BD)
            self._compare(POOLED_GRADIENTS, "", grad_BS, figures.grad_BS, figures.grad_scale_B1)

    def _compare_gradients(
        self, plain: PlainStep, ranks: Sequence[RankStep]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Gradients of rows and dense weights; returns the sharded run's of rows."""
        scale = max((float(g.abs().max()) for g in plain.dense_gradients if g.numel()), default=0.0)
        names = [name for name, _ in self._trainer.model.named_parameters()]
        found = self._tap.dense_gradients
        for name, ours, theirs in zip(names, found, plain.dense_gradients, strict=True):
            self._compare(DENSE_GRADIENTS, name, ours, theirs, scale)
        gradients: dict[str, tuple[Tensor, Tensor]] = {}
        if self._trainer.embeddings.backend == "fbgemm":
            return gradients
        for table, expected in plain.row_gradients.items():
            for parts in self._copies(table, [rank.gradients for rank in ranks]):
                gradients[table] = self._compare_row_gradients(table, expected, parts)
        return gradients

    def _compare_row_gradients(
        self, table: str, expected: RowGradients, parts: Sequence[TablePart]
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
        self._compare(GRADIENTS, table, grads_KD, expected_KD, scale, rows_K=rows_K)
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
        assert reference is not None
        tables = reference.tables
        before = {table: tables.take(table, rows_K) for table, rows_K in touched.items()}
        dense_before = _dense_values(reference.model, reference.dense_optimizer)
        reference.set_gradients(gradients, self._tap.dense_gradients)
        reference.apply(step)
        lr_dense, lr_sparse = reference.learning_rates(step)
        floor = lr_sparse if reference.rule.name in _ADAPTIVE else 0.0
        for table, rows_K in touched.items():
            expected = tables.take(table, rows_K)
            spread = self._update_spread(step, table, rows_K, before[table], plain, gradients)
            for parts in self._copies(table, [rank.rows for rank in ranks]):
                found = self._assembled(table, parts, rows_K)
                for name, values in found.items():
                    scale = _larger(before[table][name], expected[name])
                    if name == _WEIGHT:
                        scale = scale + floor
                    self._compare(
                        ROWS if name == _WEIGHT else STATE,
                        table,
                        values,
                        expected[name],
                        scale,
                        allowed=spread.get(name),
                        rows_K=rows_K,
                    )
            self._differences.num_rows += rows_K.numel()
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
        assert reference is not None
        own = plain.row_gradients[table]
        if table not in gradients:
            margin = self._differences.tolerances[GRADIENTS] * own.magnitudes
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
        assert reference is not None
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
        assert reference is not None
        for table, rows_K in touched.items():
            expected = reference.tables.take(table, rows_K)
            for parts in self._copies(table, [rank.rows for rank in ranks]):
                found = self._assembled(table, parts, rows_K)
                self._compare_values(table, found, expected, rows_K)
            self._differences.num_rows += rows_K.numel()

    def _compare_values(
        self,
        table: str,
        found: Mapping[str, Tensor],
        expected: Mapping[str, Tensor],
        rows_K: Tensor,
        rms: Mapping[str, float] | None = None,
    ) -> None:
        for name, values in found.items():
            ours, theirs = comparable_state(name, values), comparable_state(name, expected[name])
            scale = size_or_rms(theirs, None if rms is None else rms[name])
            quantity = ROWS if name == _WEIGHT else STATE
            self._compare(quantity, table, ours, theirs, scale, rows_K=rows_K)

    # ---------------------------------------------------------------------------------- the end

    def _compare_all_rows(self) -> None:
        """Every row of every table, block by block, also those that were never touched; of a
        replicated table every copy."""
        embeddings = self._trainer.embeddings
        for table in embeddings.tables:
            rms: dict[str, float] = {}
            whole: dict[str, Tensor] = {}
            if self._reference is not None:
                tables = self._reference.tables
                whole = {_WEIGHT: tables.weight(table.name), **tables.states(table.name)}
                rms = {n: root_mean_square(comparable_state(n, v)) for n, v in whole.items()}
            for start in range(0, table.rows, _BLOCK_ROWS):
                stop = min(start + _BLOCK_ROWS, table.rows)
                rows_K = torch.arange(start, stop)
                block = {name: values[start:stop] for name, values in whole.items()}
                for found in self._read(table.name, start, stop):
                    self._compare_values(table.name, found, block, rows_K, rms)
                self._differences.num_rows += stop - start

    def _read(self, table: str, start: int, stop: int) -> list[dict[str, Tensor]]:
        """Whole rows on rank 0, of every copy; nothing on the others."""
        embeddings, comm = self._trainer.embeddings, self._comm
        copies: list[dict[str, Tensor] | None] = [embeddings.read(table, start, stop)]
        if self._plan.is_replicated(table):
            copies = comm.all_gather_object(embeddings.store.read(table, start, stop))
        if comm.rank != 0:
            return []
        return [copy for copy in copies if copy is not None]

    def _compare_dense_of_ranks(self) -> None:
        """The dense weights of every rank, which must be equal."""
        trainer = self._trainer
        own = [parameter.detach().clone() for parameter in trainer.model.parameters()]
        for weights in self._comm.all_gather_object(own):
            if self._reference is None:
                return
            for (name, theirs), ours in zip(
                self._reference.model.named_parameters(), weights, strict=True
            ):
                expected = theirs.detach()
                self._compare(DENSE_WEIGHTS, name, ours, expected, size_or_rms(expected))
        if not self._end_to_end or self._reference is None:
            return
        states = zip(
            optimizer_state(trainer.model, trainer.dense_optimizer),
            self._reference.dense_state(),
            trainer.model.named_parameters(),
            strict=True,
        )
        for found, wanted, (parameter, _) in states:
            for state, values in found.items():
                sharded, plain = (comparable_state(state, v) for v in (values, wanted[state]))
                self._compare(DENSE_STATE, parameter, sharded, plain, size_or_rms(plain))

    # ---------------------------------------------------------------------------------- helpers

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
        assert self._reference is not None
        dim, rule = self._dims[table], self._reference.rule
        widths = {_WEIGHT: dim, **state_widths(rule, dim)}
        dtype = self._trainer.embeddings.dtype
        return {name: assemble(parts, name, rows_K, width, dtype) for name, width in widths.items()}


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
