"""One pass of a check: the same batches through the sharded trainer and the plain reference.

Every rank trains with the real `Trainer.step` and the real `Pipeline`; rank 0 trains the reference
too and compares (`check_comparison`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from data.batch import Batch
from data.parquet import PreparedDataset
from dlrm import mutations
from dlrm.check_batches import MadeBatch, interleave, own_batches
from dlrm.check_compare import Differences
from dlrm.check_comparison import Comparison
from dlrm.check_gather import RankStep, StepTap, gradient_parts, row_parts
from dlrm.config import CheckRun
from dlrm.pipeline import PlannedBatch
from dlrm.run_folder import RunFolder
from dlrm.trainer import Trainer
from embeddings.communicator import Communicator
from embeddings.plan import Plan

_BLOCK_ROWS = 65_536


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
        has_tables: whether the data have sparse features.
    """

    title: str
    is_end_to_end: bool
    precision: str
    backend: str
    wire: str
    differences: Differences
    has_tables: bool = True


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
            trainer.close()


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
        self._comm = trainer.comm
        self._order = interleave(config.check.steps, made)
        if config.check.mutate is not None:
            mutations.plant(config.check.mutate, trainer)
        self._tap = StepTap.of(trainer)
        self._comparison: Comparison | None = None
        if self._comm.rank == 0:
            self._comparison = Comparison(trainer, self._tap, config, end_to_end=end_to_end)

    def run(self) -> PassResult | None:
        """All steps, then all rows."""
        trainer, comparison = self._trainer, self._comparison
        with (
            closing(self._local_batches()) as local,
            closing(self._global_batches()) as whole,
        ):
            pipeline = trainer.pipeline(local, len(self._order))
            # As `fit` does: a step begins to plan the next batch.
            trainer._pipeline = pipeline
            for step, made in enumerate(self._order):
                # A run that is over begins anew: a schedule may end with the learning rate 0.
                trainer.steps_done = step % trainer.total_steps
                self._tap.clear()
                planned = pipeline.take()
                assert planned is not None
                loss = trainer.step(planned)
                self._beat(step + 1, "compare")
                batch = None
                if comparison is not None:
                    batch = next(whole)
                    kind = "" if made is None else f" ({made.name})"
                    comparison.differences.at = f"step {step + 1}{kind}"
                self._compare_step(step, planned, loss, batch)
        self._beat(len(self._order), "compare rows")
        if comparison is not None:
            comparison.differences.at = f"at the end, after {len(self._order)} steps"
        with self._comm.uncounted():
            self._compare_all_rows()
            self._compare_dense()
        if comparison is None:
            return None
        precision = self._config.train.precision
        how = "end to end" if self._end_to_end else "one step at a time"
        return PassResult(
            title=f"{precision}, {how}",
            is_end_to_end=self._end_to_end,
            precision=precision,
            backend=trainer.embeddings.backend,
            wire=self._config.sharding.wire,
            differences=comparison.differences,
            has_tables=bool(trainer.embeddings.tables),
        )

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

    def _compare_step(
        self, step: int, planned: PlannedBatch, loss: float, batch: Batch | None
    ) -> None:
        """Brings the step to rank 0, which has the global batch and compares."""
        comm, embeddings, tap = self._comm, self._trainer.embeddings, self._tap
        with comm.uncounted():
            touched: dict[str, Tensor] | None = None
            if self._comparison is not None and batch is not None:
                touched = self._comparison.touched_rows(batch)
            touched = comm.all_gather_object(touched)[0]
            assert touched is not None
            own = RankStep(
                row_B=planned.batch.row_B,
                part_sizes=[micro.batch_size for micro, _ in planned.micro_batches],
                pooled=[] if self._end_to_end else tap.pooled,
                pooled_grads=[] if self._end_to_end else tap.pooled_grads,
                gradients=gradient_parts(embeddings, tap.kv_gradients),
                rows=row_parts(embeddings, touched),
            )
            ranks: list[RankStep] = comm.all_gather_object(own)
        if self._comparison is not None and batch is not None:
            self._comparison.compare_step(step, batch, loss, touched, ranks)

    def _compare_all_rows(self) -> None:
        """Every row of every table, block by block, also those that were never touched; of a
        replicated table every copy."""
        comm, embeddings = self._comm, self._trainer.embeddings
        for table in embeddings.tables:
            for start in range(0, table.rows, _BLOCK_ROWS):
                stop = min(start + _BLOCK_ROWS, table.rows)
                copies = [embeddings.read(table.name, start, stop)]
                if embeddings.plan.is_replicated(table.name):
                    copies = comm.all_gather_object(embeddings.store.read(table.name, start, stop))
                if self._comparison is not None:
                    found = [copy for copy in copies if copy is not None]
                    self._comparison.compare_table(table.name, start, found)

    def _compare_dense(self) -> None:
        own = [parameter.detach().clone() for parameter in self._trainer.model.parameters()]
        of_ranks = self._comm.all_gather_object(own)
        if self._comparison is not None:
            self._comparison.compare_dense(of_ranks)
