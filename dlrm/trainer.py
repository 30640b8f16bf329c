"""`Trainer`: build, fit, step, evaluate. `step` is the data-flow sentence of the README."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from data.batch import Batch
from data.loader import Prefetcher
from data.parquet import Order, PreparedDataset
from dlrm.build import build_embeddings, build_model, set_threads
from dlrm.checkpoint import CheckpointInfo, Checkpoints, blocks, load_model, model_digest
from dlrm.config import TrainRun
from dlrm.display import TrainDisplay
from dlrm.metrics import BestTracker, BinaryMetrics, EvalResult
from dlrm.model import bce_loss
from dlrm.optim import Schedule, build_dense_optimizer, clip_factor
from dlrm.recorder import Recorder
from dlrm.run_folder import RunFolder
from dlrm.scoring import autocast, dense_input, evaluate
from embeddings.sharded import KVGradients, sum_kv


class NonFiniteError(RuntimeError):
    """A loss, gradient norm or weight isn't finite; no such model is kept."""


class Trainer:
    """One training run in one process.

    Owns the dense model and its optimizer; the tables and theirs belong to `embeddings`.

    Args:
        config: the whole configuration.
        dataset: what to train on.
        folder: the run's output folder.
        say: prints one line for the user.
    """

    def __init__(
        self,
        config: TrainRun,
        dataset: PreparedDataset,
        folder: RunFolder,
        say: Callable[[str], None] = print,
    ) -> None:
        set_threads(config.launch)
        self.config, self.dataset, self.folder, self.say = config, dataset, folder, say
        self.embeddings = build_embeddings(config, dataset.manifest)
        self.model = build_model(config, dataset.manifest)
        self.dense_optimizer = build_dense_optimizer(self.model, config.optim)
        self.batches_per_epoch = dataset.num_batches("train", config.data.batch_size)
        self.total_steps = self.batches_per_epoch * config.train.epochs
        if config.train.max_steps is not None:
            self.total_steps = min(self.total_steps, config.train.max_steps)
        self.schedule = Schedule(config.optim.schedule, self.total_steps)
        self.checkpoints = Checkpoints(folder.path)
        self.best = BestTracker()
        self.steps_done = 0
        self._evaluated_step = -1
        self._display = TrainDisplay(self.total_steps)
        self.recorder = Recorder(folder, self._display, config.train.log_every)
        self._timer = self.recorder.timer

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
        )
        with Prefetcher(self.dataset.batches("train", order)) as batches:
            while self.steps_done < self.total_steps:
                start = time.perf_counter()
                with self._timer("data_wait"):
                    batch = next(batches, None)
                if batch is None:
                    break
                loss = self.step(batch)
                seconds = time.perf_counter() - start
                lrs = self._learning_rates()
                self.steps_done += 1
                self.recorder.step(self.steps_done, epoch, batch.batch_size, loss, seconds, lrs)
                if self._is_evaluation_due(epoch):
                    self._evaluate_and_save()
                elif train.checkpoint_every and self.steps_done % train.checkpoint_every == 0:
                    self._check_finite()
                    self._save(is_best=False)

    def _is_evaluation_due(self, epoch: int) -> bool:
        train = self.config.train
        if train.eval_every is not None:
            return self.steps_done % train.eval_every == 0
        in_epoch = self.steps_done - epoch * self.batches_per_epoch
        per_epoch = min(train.evals_per_epoch, self.batches_per_epoch)
        due = [self.batches_per_epoch * n // per_epoch for n in range(1, per_epoch + 1)]
        return in_epoch in due

    # step

    def step(self, batch: Batch) -> float:
        """One optimizer step; returns the loss, the (weighted) mean over the batch.

        ids → plan → rows → interaction, MLP, loss → backward → KV gradients → row update;
        dense gradients → dense update.
        """
        lr_dense, lr_sparse = self._learning_rates()
        total_weight = _total_weight(batch)
        loss_sum = 0.0
        gradients: list[list[KVGradients]] = []
        for micro in self._micro_batches(batch):
            with self._timer("plan"):
                plan = self.embeddings.plan_batch(micro.ids)
            with self._timer("lookup"):
                pooled_BS = self.embeddings.lookup(plan)
            with self._timer("forward"):
                loss = self._loss(micro, pooled_BS, total_weight)
                loss_sum += float(loss.detach())
            with self._timer("backward"):
                loss.backward()
                assert pooled_BS.grad is not None
                gradients.append(self.embeddings.backward(plan, pooled_BS.grad, lr_sparse))
        with self._timer("apply"):
            self.embeddings.apply(self._clipped(sum_kv(gradients)), lr_sparse)
        with self._timer("dense_update"):
            for group in self.dense_optimizer.param_groups:
                group["lr"] = lr_dense
            self.dense_optimizer.step()
            self.dense_optimizer.zero_grad()
        return loss_sum

    def _loss(self, micro: Batch, pooled_BS: Tensor, total_weight: float) -> Tensor:
        assert micro.label_B is not None
        dense_BN = dense_input(self.model, micro)
        with autocast(self.config.train.precision):
            logits_B = self.model(dense_BN, pooled_BS)
        loss = bce_loss(logits_B, micro.label_B, micro.weight_B, total_weight)
        if not math.isfinite(float(loss.detach())):
            raise NonFiniteError(self._where_not_finite(micro, pooled_BS, logits_B))
        return loss

    def _micro_batches(self, batch: Batch) -> Iterator[Batch]:
        parts = min(self.config.train.accumulate, batch.batch_size)
        if parts == 1:
            yield batch
            return
        for part in range(parts):
            start = batch.batch_size * part // parts
            yield batch.narrow(start, batch.batch_size * (part + 1) // parts)

    def _clipped(self, gradients: list[KVGradients]) -> list[KVGradients]:
        """Scales dense and row gradients together where `optim.clip_norm` says so."""
        if self.config.optim.clip_norm is None:
            return gradients
        dense = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm, factor = clip_factor(
            dense, [g.grads_KD for g in gradients], self.config.optim.clip_norm
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
        batches = self.dataset.batches(part, Order(self.config.data.eval_batch_size))
        return evaluate(self.model, self.embeddings, batches, self.config.train.precision)

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
        self.checkpoints.save(
            self.steps_done,
            self.model,
            self.embeddings.store,
            self.dense_optimizer,
            is_best=is_best,
        )

    def load_best(self) -> CheckpointInfo:
        """Puts the best model (the latest, where there is no best) in place of the last."""
        info = self.checkpoints.find("best")
        if info.step != self.steps_done:
            load_model(info, self.model, self.embeddings.store)
        return info

    def digest(self) -> str:
        """`model_digest` of the model as it is now."""
        return model_digest(self.model, self.embeddings.store)

    def memory(self) -> dict[str, int]:
        """The `memory` part of result.json."""
        return {
            "peak_rss_bytes_max_rank": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "table_bytes_max_rank": self.embeddings.store.table_bytes(),
            "state_bytes_max_rank": self.embeddings.store.state_bytes(),
        }

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
        if not all(bool(torch.isfinite(p).all()) for p in self.model.parameters()):
            return False
        store = self.embeddings.store
        return all(
            bool(torch.isfinite(values).all())
            for table in store.tables
            for start, stop in blocks(table.rows)
            for values in store.read(table.name, start, stop).values()
        )


def _total_weight(batch: Batch) -> float:
    """Sum of the example weights of the global batch."""
    if batch.weight_B is None:
        return float(batch.batch_size)
    return float(batch.weight_B.sum(dtype=torch.float64))


def eval_figures(result: EvalResult | None) -> dict[str, Any]:
    """The `eval` part of result.json; all null where nothing was evaluated."""
    if result is None:
        return dict.fromkeys(("auc", "logloss", "ne", "calibration"), None) | {"num_samples": 0}
    return result.as_dict()
