"""`Trainer`: build, fit, step, evaluate. `step` is the data-flow sentence of the README.

The same code on every rank of a run: each trains on its share of a batch and calls everything that
communicates in the same order. Rank 0 alone prints and writes.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from data.batch import Batch
from data.loader import Prefetcher
from data.parquet import Order, PreparedDataset
from dlrm.build import build_embeddings, build_model
from dlrm.checkpoint import CheckpointInfo, Checkpoints, load_model, model_digest
from dlrm.comm_figures import comm_figures
from dlrm.config import TrainRun
from dlrm.dense_reducer import DenseReducer
from dlrm.display import TrainDisplay
from dlrm.metrics import BestTracker, BinaryMetrics, EvalResult
from dlrm.model import bce_loss
from dlrm.optim import Schedule, build_dense_optimizer, clip_factor
from dlrm.pipeline import Pipeline, PlannedBatch
from dlrm.recorder import Recorder
from dlrm.run_folder import RunFolder
from dlrm.scoring import autocast, dense_input, evaluate
from embeddings.communicator import Communicator, Deferred, SingleProcess
from embeddings.kv_gradients import KVGradients, sum_kv
from embeddings.plan import Plan
from embeddings.sharded import BatchPlan


class NonFiniteError(RuntimeError):
    """A loss, gradient norm or weight isn't finite; no such model is kept."""


class Trainer:
    """One rank of a training run.

    Owns the dense model and its optimizer, equal on all ranks; the tables and theirs belong to
    `embeddings`.

    Collectives of a step: those of `ShardedEmbeddings`, once for each micro-batch; the dense
    gradients' buckets (`DenseReducer`), once; one number for the global norm under
    `optim.clip_norm`. With `train.overlap` the rows travel during the bottom MLP, the next batch's
    ids during the step, row gradients and dense buckets during the rest of backward. On and off are
    equal to the bit.

    Args:
        config: the whole configuration.
        dataset: what to train on.
        folder: the run's output folder; only rank 0 writes to it.
        say: prints one line for the user, on rank 0.
        comm: the ranks; None: one process.
        plan: who owns which rows; None: one process owns all.
        beat: told step and phase whenever a phase begins (the heartbeat).
    """

    def __init__(
        self,
        config: TrainRun,
        dataset: PreparedDataset,
        folder: RunFolder,
        say: Callable[[str], None] = print,
        *,
        comm: Communicator | None = None,
        plan: Plan | None = None,
        beat: Callable[[int, str], None] = lambda step, phase: None,
    ) -> None:
        self.config, self.dataset, self.folder = config, dataset, folder
        self.comm = comm if comm is not None else SingleProcess()
        self.is_first = self.comm.rank == 0
        self.say = say if self.is_first else lambda line: None
        self.embeddings = build_embeddings(config, dataset.manifest, plan=plan, comm=self.comm)
        self.model = build_model(config, dataset.manifest)
        self.dense_optimizer = build_dense_optimizer(self.model, config.optim)
        self.batches_per_epoch = dataset.num_batches("train", config.data.batch_size)
        self.total_steps = self.batches_per_epoch * config.train.epochs
        if config.train.max_steps is not None:
            self.total_steps = min(self.total_steps, config.train.max_steps)
        self.schedule = Schedule(config.optim.schedule, self.total_steps)
        self.checkpoints = Checkpoints(folder.path)
        self.reducer = DenseReducer(
            list(self.model.parameters()), self.comm, overlap=config.train.overlap
        )
        self.best = BestTracker()
        self.steps_done = 0
        self._evaluated_step = -1
        self._display = TrainDisplay(self.total_steps, enabled=self.is_first)
        self.recorder = Recorder(
            folder, self._display, config.train.log_every, writes=self.is_first
        )
        self._timer = self.recorder.timer
        self._timer.on_phase = lambda phase: beat(self.steps_done + 1, phase)
        self._beat = beat
        self._pipeline: Pipeline | None = None
        self._not_finite: str | None = None

    # fit

    def fit(self) -> None:
        """Trains to the end; the last and the best model are kept.

        Raises:
            NonFiniteError: naming step and tensor; the model before that step is kept.
        """
        with self._display:
            try:
                for epoch in range(self.config.train.epochs):
                    self._fit_epoch(epoch)
                    if self.steps_done >= self.total_steps:
                        break
                self._evaluate_and_save()
            except NonFiniteError:
                if self._is_finite():
                    self._save(is_best=False)
                raise
            finally:
                self.recorder.close()

    def _fit_epoch(self, epoch: int) -> None:
        train = self.config.train
        order = Order(
            self.config.data.batch_size,
            seed=self.config.seed,
            epoch=epoch,
            shuffle=self.config.data.shuffle,
            rank=self.comm.rank,
            world_size=self.comm.world_size,
        )
        with Prefetcher(self.dataset.batches("train", order)) as batches:
            self._pipeline = self.pipeline(batches, self.total_steps - self.steps_done)
            while True:
                start = time.perf_counter()
                planned = self._pipeline.take()
                if planned is None:
                    break
                loss = self.step(planned)
                seconds = time.perf_counter() - start
                lrs = self._learning_rates()
                self.steps_done += 1
                num_samples = planned.global_batch_size
                self.recorder.step(self.steps_done, epoch, num_samples, loss, seconds, lrs)
                if self._is_evaluation_due(epoch):
                    self._evaluate_and_save()
                elif train.checkpoint_every and self.steps_done % train.checkpoint_every == 0:
                    self._check_finite()
                    self._save(is_best=False)

    def pipeline(self, batches: Iterable[Batch], num_batches: int) -> Pipeline:
        """The batches with their plans, as `step` wants them."""
        return Pipeline(
            batches,
            num_batches,
            self.embeddings,
            accumulate=self.config.train.accumulate,
            overlap=self.config.train.overlap,
            timer=self._timer,
        )

    def _is_evaluation_due(self, epoch: int) -> bool:
        train = self.config.train
        if train.eval_every is not None:
            return self.steps_done % train.eval_every == 0
        in_epoch = self.steps_done - epoch * self.batches_per_epoch
        per_epoch = min(train.evals_per_epoch, self.batches_per_epoch)
        due = [self.batches_per_epoch * n // per_epoch for n in range(1, per_epoch + 1)]
        return in_epoch in due

    # step

    def step(self, planned: PlannedBatch) -> float:
        """One optimizer step; returns the loss, the (weighted) mean over the global batch.

        ids → plan → rows → interaction, MLP, loss → backward → KV gradients → row update;
        dense gradients → sum over ranks → dense update.
        """
        lr_dense, lr_sparse = self._learning_rates()
        loss_sum = 0.0
        gradients: list[list[KVGradients]] = []
        for position, (micro, plan) in enumerate(planned.micro_batches):
            is_last = position == len(planned.micro_batches) - 1
            with self._timer("lookup"):
                rows = self.embeddings.begin_lookup(plan)
            if is_last and self._pipeline is not None:
                self._pipeline.begin_next()
            with self._timer("forward"), autocast(self.config.train.precision):
                bottom_BD = self.model.forward_dense(dense_input(self.model, micro))
            with self._timer("lookup"):
                pooled_BS = rows.finish()
            if is_last and self._pipeline is not None:
                self._pipeline.send_next_ids()
            with self._timer("forward"):
                loss = self._loss(micro, bottom_BD, pooled_BS, plan.total_weight)
                loss_sum += float(loss.detach())
            with self._timer("backward"):
                if is_last:
                    self.reducer.begin(loss_sum)
                gradients.append(self._backward(loss, pooled_BS, plan, lr_sparse))
        with self._timer("dense_reduce"):
            loss_sum = self.reducer.finish()
        self._raise_if_not_finite(loss_sum)
        with self._timer("apply"):
            self.embeddings.apply(self._clipped(sum_kv(gradients)), lr_sparse)
        with self._timer("dense_update"):
            for group in self.dense_optimizer.param_groups:
                group["lr"] = lr_dense
            self.dense_optimizer.step()
            self.dense_optimizer.zero_grad()
        return loss_sum

    def _loss(
        self, micro: Batch, bottom_BD: Tensor | None, pooled_BS: Tensor, total_weight: float
    ) -> Tensor:
        assert micro.label_B is not None
        with autocast(self.config.train.precision):
            logits_B = self.model.forward_pooled(bottom_BD, pooled_BS)
        loss = bce_loss(logits_B, micro.label_B, micro.weight_B, total_weight)
        if self._not_finite is None and not math.isfinite(float(loss.detach())):
            # One process stops here. One of several goes on, to tell the others with the sum of the
            # losses, which then isn't finite either.
            self._not_finite = self._where_not_finite(micro, pooled_BS, logits_B)
            if self.comm.world_size == 1:
                raise NonFiniteError(self._not_finite)
        return loss

    def _backward(
        self, loss: Tensor, pooled_BS: Tensor, plan: BatchPlan, lr: float
    ) -> list[KVGradients]:
        """Backward through the dense network and on to the rows' owners."""
        if not self.config.train.overlap:
            loss.backward()
            assert pooled_BS.grad is not None
            return self.embeddings.backward(plan, pooled_BS.grad, lr)
        pending: list[Deferred[list[KVGradients]]] = []

        def send_row_gradients(leaf: Tensor) -> None:
            # Within backward: what is left of it, the bottom MLP's, hides their way.
            assert leaf.grad is not None
            pending.append(self.embeddings.begin_backward(plan, leaf.grad, lr))

        pooled_BS.register_post_accumulate_grad_hook(send_row_gradients)
        loss.backward()
        return pending[0].finish()

    def _raise_if_not_finite(self, loss_sum: float) -> None:
        """Before anything is updated, on every rank alike.

        Raises:
            NonFiniteError: naming step and tensor, in the words of the first rank that has one.
        """
        if math.isfinite(loss_sum):
            return
        found = [text for text in self.comm.all_gather_object(self._not_finite) if text]
        reason = found[0] if found else "the sum of the ranks' losses overflows"
        raise NonFiniteError(reason)

    def _clipped(self, gradients: list[KVGradients]) -> list[KVGradients]:
        """Scales dense and row gradients together where `optim.clip_norm` says so."""
        if self.config.optim.clip_norm is None:
            return gradients
        dense = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm, factor = clip_factor(
            dense,
            self.embeddings.counted_once(gradients),
            self.config.optim.clip_norm,
            lambda squares: self.comm.sum_scalar("norm", squares),
        )
        if not math.isfinite(float(norm)):
            self.dense_optimizer.zero_grad()
            raise NonFiniteError(f"step {self.steps_done + 1}: the gradient norm is {float(norm)}")
        if float(factor) < 1:
            for grad in (*dense, *(g.grads_KD for g in gradients)):
                grad.mul_(factor)
        return gradients

    def _learning_rates(self) -> tuple[float, float]:
        """(dense, sparse) of the step that comes next."""
        factor = self.schedule.factor(self.steps_done)
        return self.config.optim.dense.lr * factor, self.config.optim.sparse.lr * factor

    # evaluation and keeping

    def eval_part(self) -> str:
        """The part that is evaluated in training: valid, or test where there is no valid part."""
        return "valid" if self.dataset.num_rows("valid") else "test"

    def evaluate(self, part: str) -> BinaryMetrics:
        """Metrics of the model as it is now, over a whole part."""
        order = Order(
            self.config.data.eval_batch_size,
            rank=self.comm.rank,
            world_size=self.comm.world_size,
        )
        batches = self.dataset.batches(part, order)
        with self.comm.uncounted():
            return evaluate(
                self.model,
                self.embeddings,
                batches,
                self.config.train.precision,
                lambda: self._beat(self.steps_done, "evaluate"),
            )

    def _evaluate_and_save(self) -> None:
        if self._evaluated_step == self.steps_done:
            return
        self._evaluated_step = self.steps_done
        if self.steps_done % self.batches_per_epoch == 0 or self.steps_done == self.total_steps:
            self.recorder.flush()  # The last steps' line comes before the evaluation after them.
        self._check_finite()
        part = self.eval_part()
        is_best = False
        if self.dataset.num_rows(part):
            self._display.status("evaluate")
            result = self.evaluate(part).result()
            self.recorder.evaluation(self.steps_done, part, result)
            # The test part chooses nothing: its figures would then flatter the chosen model.
            is_best = part == "valid" and self.best.update(result)
            self._display.status()
        self._save(is_best=is_best)

    def _save(self, *, is_best: bool) -> None:
        self._beat(self.steps_done, "save")
        with self.comm.uncounted():
            self.checkpoints.save(
                self.steps_done,
                self.model,
                self.embeddings,
                self.dense_optimizer,
                is_best=is_best,
                beat=lambda: self._beat(self.steps_done, "save"),
            )

    def load_best(self) -> CheckpointInfo:
        """Puts the best model (the latest, where there is no best) in place of the last."""
        info = self.checkpoints.find("best")
        if info.step != self.steps_done:
            with self.comm.uncounted():
                load_model(
                    info,
                    self.model,
                    self.embeddings,
                    lambda: self._beat(self.steps_done, "load"),
                )
        return info

    def digest(self) -> str:
        """`model_digest` of the model as it is now."""
        with self.comm.uncounted():
            return model_digest(
                self.model, self.embeddings, lambda: self._beat(self.steps_done, "digest")
            )

    def memory(self) -> dict[str, int]:
        """The `memory` part of result.json: the largest over the ranks; called by all."""
        own = {
            "peak_rss_bytes_max_rank": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "table_bytes_max_rank": self.embeddings.store.table_bytes(),
            "state_bytes_max_rank": self.embeddings.store.state_bytes(),
        }
        of_ranks = self.comm.all_gather_object(own)
        return {name: max(rank[name] for rank in of_ranks) for name in own}

    def comm_figures(self) -> dict[str, Any]:
        """The `comm` part of result.json; called by all ranks."""
        return comm_figures(self.comm, max(self.steps_done, 1))

    # non-finite values

    def _where_not_finite(self, micro: Batch, pooled_BS: Tensor, logits_B: Tensor) -> str:
        """Names the step and the first tensor on the way that holds a value that isn't finite."""
        head = f"step {self.steps_done + 1}: the loss isn't finite; "
        manifest = self.dataset.manifest
        bad = torch.nonzero(~torch.isfinite(micro.dense_BN))
        if len(bad):
            sample, column = bad[0].tolist()
            name = manifest.dense_columns[column]
            value = float(micro.dense_BN[sample, column])
            return f"{head}dense_BN column {name} is {value} in row {int(micro.row_B[sample]):,}"
        bad = torch.nonzero(~torch.isfinite(pooled_BS.detach()))
        if len(bad):
            column = int(bad[0, 1])
            offsets = self.embeddings.feature_offsets
            feature = next(f for f in range(len(offsets) - 1) if column < offsets[f + 1])
            name = manifest.features[feature].name
            return (
                f"{head}pooled_BS of feature {name} isn't finite in row "
                f"{int(micro.row_B[int(bad[0, 0])]):,}; lower optim.sparse.lr"
            )
        for name, parameter in self.model.named_parameters():
            if not torch.isfinite(parameter).all():
                return f"{head}dense weight {name} isn't finite; lower optim.dense.lr"
        # Finite logits can overflow the sum: then the largest is to blame.
        logits_B = logits_B.detach()
        sample = int(torch.nan_to_num(logits_B.abs(), nan=math.inf).argmax())
        return f"{head}logits_B is {float(logits_B[sample])} in row {int(micro.row_B[sample]):,}"

    def _check_finite(self) -> None:
        """Refuses to evaluate or keep a model that the last step broke (a loss would tell later).

        Raises:
            NonFiniteError: naming the step.
        """
        if not self._is_finite():
            raise NonFiniteError(
                f"step {self.steps_done}: a weight or its optimizer state isn't finite after the "
                "update; lower optim.dense.lr and optim.sparse.lr, or raise optim.eps if it is 0"
            )

    def _is_finite(self) -> bool:
        here = all(bool(torch.isfinite(p).all()) for p in self.model.parameters())
        here = here and self.embeddings.store.is_finite()
        return all(self.comm.all_gather_object(here))


def eval_figures(result: EvalResult | None) -> dict[str, Any]:
    """The `eval` part of result.json; all null where nothing was evaluated."""
    if result is None:
        return dict.fromkeys(("auc", "logloss", "ne", "calibration"), None) | {"num_samples": 0}
    return result.as_dict()
