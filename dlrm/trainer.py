"""`Trainer`: build, fit, step, evaluate. `step` is the data-flow sentence of the README.

The same code on every rank of a run: each trains on its share of a batch and calls everything that
communicates in the same order. Rank 0 alone prints and writes.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from data.batch import Batch
from data.loader import Prefetcher
from data.parquet import Order, PreparedDataset
from dlrm.async_save import AsyncSaver, bytes_to_copy
from dlrm.build import build_embeddings, build_model
from dlrm.checkpoint import CheckpointInfo, Checkpoints, Contents, Progress, on_first_rank
from dlrm.checkpoint_load import load_model, load_training
from dlrm.comm_figures import comm_figures
from dlrm.config import TrainRun
from dlrm.dense_reducer import DenseReducer
from dlrm.display import TrainDisplay
from dlrm.host_timeline import HostTimeline
from dlrm.hot_set import RunHotSet, host_figures
from dlrm.metrics import BestTracker, BinaryMetrics, EvalResult
from dlrm.model import bce_loss, check_may_split
from dlrm.model_digest import model_digest
from dlrm.optim import Schedule, build_dense_optimizer, clip_factor
from dlrm.pipeline import Pipeline, PlannedBatch
from dlrm.recorder import Recorder
from dlrm.resume import about_run, check_fits, is_of_run, next_batch
from dlrm.run_folder import RunFolder
from dlrm.scoring import autocast, dense_input, evaluate, loader_timeout
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
        working: what runs around evaluating and keeping the model, which may take long.
        is_stop_asked: whether this rank was told to end the run; asked once a step.
        fills_tables: False: without start values, since the run is to be resumed.

    Attributes:
        is_stopped: the run ended early, in order, since a rank was told to.
        warm_started: what a warm start has loaded, also of a run that was resumed since.
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
        working: Callable[[], AbstractContextManager[None]] = nullcontext,
        is_stop_asked: Callable[[], bool] = lambda: False,
        fills_tables: bool = True,
    ) -> None:
        self.config, self.dataset, self.folder = config, dataset, folder
        self.comm = comm if comm is not None else SingleProcess()
        self.is_first = self.comm.rank == 0
        self.say = say if self.is_first else lambda line: None
        self.embeddings = build_embeddings(
            config,
            dataset.manifest,
            plan=plan,
            comm=self.comm,
            fill=fills_tables,
            beat=lambda: beat(0, "build"),
        )
        self.embeddings.compile_loops()
        self.model = build_model(config, dataset.manifest)
        self.hot_set: RunHotSet | None = None
        if self.embeddings.host is not None:
            if self.embeddings.splits_hot:
                check_may_split(self.model)
            self.hot_set = RunHotSet(config, dataset, self.embeddings, self.say)
        self.dense_optimizer = build_dense_optimizer(self.model, config.optim)
        self.batches_per_epoch = dataset.num_batches("train", config.data.batch_size)
        self.total_steps = self.batches_per_epoch * config.train.epochs
        if config.train.max_steps is not None:
            self.total_steps = min(self.total_steps, config.train.max_steps)
        self.schedule = Schedule(config.optim.schedule, self.total_steps)
        self.checkpoints = Checkpoints(folder.path, config.train.checkpoint_keep)
        self._plan = plan
        self._saver: AsyncSaver | None = None
        self.reducer = DenseReducer(
            list(self.model.parameters()), self.comm, overlap=config.train.overlap
        )
        self.best = BestTracker()
        self.steps_done = 0
        self.is_stopped = False
        self.warm_started: dict[str, Any] | None = None
        self._is_stop_asked = is_stop_asked
        self._epoch, self._batch = 0, 0  # Of the next batch.
        self._evaluated_step = -1
        self._is_evaluation_owed = False  # The run was told to stop before it.
        self._steps_before = 0  # Done before this run was resumed.
        self._display = TrainDisplay(self.total_steps, enabled=self.is_first)
        self.recorder = Recorder(
            folder, self._display, config.train.log_every, writes=self.is_first
        )
        self._timer = self.recorder.timer
        self._timer.on_phase = lambda phase: beat(self.steps_done + 1, phase)
        self._beat, self._working = beat, working
        self._pipeline: Pipeline | None = None
        self._host_timeline: HostTimeline | None = None
        self._not_finite: str | None = None

    # fit

    def fit(self) -> None:
        """Trains to the end, or until a rank is told to stop; the last and the best model are kept.

        Raises:
            NonFiniteError: naming step and tensor; the model before that step is kept.
        """
        if self.config.train.checkpoint_async:
            num_bytes = bytes_to_copy(self._contents())
            with self.comm.uncounted():
                self._saver = AsyncSaver(self.checkpoints, self.comm, num_bytes, self._beat_save)
        if self.embeddings.host is not None and self.is_first:
            self._host_timeline = HostTimeline(
                self.embeddings.host.executor.timeline,
                self._timer,
                self.total_steps,
                self.steps_done,
            )
        with self._display:
            try:
                if self._is_evaluation_owed:
                    self._evaluate_and_save()
                while self.steps_done < self.total_steps and not self.is_stopped:
                    self._fit_epoch(self._epoch)
                if not self.is_stopped:
                    self._evaluate_and_save()
                self._finish_saving()
            except NonFiniteError:
                if self._is_finite():
                    self._save(is_best=False)
                self._finish_saving()
                raise
            finally:
                self.recorder.close()

    def _fit_epoch(self, epoch: int) -> None:
        order = Order(
            self.config.data.batch_size,
            seed=self.config.seed,
            epoch=epoch,
            shuffle=self.config.data.shuffle,
            rank=self.comm.rank,
            world_size=self.comm.world_size,
            start_batch=self._batch,
        )
        timeout_s = loader_timeout(self.config.launch, self.comm)
        with Prefetcher(self.dataset.batches("train", order), timeout_s=timeout_s) as batches:
            self._pipeline = self.pipeline(batches, self.total_steps - self.steps_done)
            while not self.is_stopped:
                start = time.perf_counter()
                planned = self._pipeline.take()
                if planned is None:
                    break
                loss = self.step(planned)
                seconds = time.perf_counter() - start
                lrs = self._learning_rates()
                self.steps_done += 1
                self._batch += 1
                if self._host_timeline is not None:
                    self._host_timeline.step_done(self.steps_done)
                num_samples = planned.global_batch_size
                self.recorder.step(
                    self.steps_done,
                    epoch,
                    num_samples,
                    loss if planned.has_weight else None,
                    seconds,
                    lrs,
                )
                is_epoch_done = self._batch == self.batches_per_epoch
                is_evaluation_due = self._is_evaluation_due(self._batch)
                if is_epoch_done:
                    self._epoch, self._batch = epoch + 1, 0
                # Before an evaluation, which may take longer than whoever tells to stop waits.
                self.is_stopped = self.reducer.is_stopping and self.steps_done < self.total_steps
                if is_evaluation_due and not self.is_stopped:
                    self._evaluate_and_save()
                    if self.hot_set is not None:
                        self.hot_set.follow_drift(self._pipeline)
                elif self.is_stopped or self._is_checkpoint_due():
                    with self._working():
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

    def _is_checkpoint_due(self) -> bool:
        every = self.config.train.checkpoint_every
        return every is not None and self.steps_done % every == 0

    def _is_evaluation_due(self, batch: int) -> bool:
        """Whether one is due after `batch` batches of an epoch, the last step's among them."""
        train = self.config.train
        if train.eval_every is not None:
            return self.steps_done % train.eval_every == 0
        per_epoch = min(train.evals_per_epoch, self.batches_per_epoch)
        due = [self.batches_per_epoch * n // per_epoch for n in range(1, per_epoch + 1)]
        return batch in due

    # step

    def step(self, planned: PlannedBatch) -> float:
        """One optimizer step; returns the loss, the (weighted) mean over the global batch.

        ids → plan → rows → interaction, MLP, loss → backward → KV gradients → row update;
        dense gradients → sum over ranks → dense update.

        Where the example weights of the global batch sum to 0 the loss is 0 and nothing is updated:
        no row, no dense weight, no optimizer state, no count of Adam's. All ranks know of it from
        the plan, and issue the same collectives as otherwise up to the update.
        """
        lr_dense, lr_sparse = self._learning_rates()
        loss_sum = 0.0
        gradients: list[list[KVGradients]] = []
        last = len(planned.micro_batches) - 1
        # The next batch is planned behind what is longest under way: rows of the last part, but in
        # a split batch those that come while its first part is computed.
        planning = 0 if self.embeddings.splits_hot else last
        for position, (micro, plan) in enumerate(planned.micro_batches):
            is_last, plans_next = position == last, position == planning
            with self._timer("lookup"):
                rows = self.embeddings.begin_lookup(plan)
            if plans_next and self._pipeline is not None:
                self._pipeline.begin_next()
            with self._timer("forward"), autocast(self.config.train.precision):
                bottom_BD = self.model.forward_dense(dense_input(self.model, micro))
            with self._timer("lookup"):
                pooled_BS = rows.finish()
            if plans_next and self._pipeline is not None:
                self._pipeline.send_next_ids()
            with self._timer("forward"):
                loss = self._loss(micro, bottom_BD, pooled_BS, plan.total_weight)
                loss_sum += float(loss.detach())
            with self._timer("backward"):
                if is_last:
                    self.reducer.begin(loss_sum, self._is_stop_asked())
                gradients.append(self._backward(loss, pooled_BS, plan, lr_sparse))
        with self._timer("dense_reduce"):
            loss_sum = self.reducer.loss()
        self._raise_if_not_finite(loss_sum)
        if not planned.has_weight:
            self._skip_update()
            return loss_sum
        with self._timer("apply"):
            summed = gradients[0] if len(gradients) == 1 else sum_kv(gradients)
            self.embeddings.apply(self._clipped(summed), lr_sparse)
        with self._timer("dense_reduce"):
            self.reducer.finish()  # Its last sums have travelled while rows were updated.
        with self._timer("dense_update"):
            for group in self.dense_optimizer.param_groups:
                group["lr"] = lr_dense
            self.dense_optimizer.step()
            self.dense_optimizer.zero_grad()
        return loss_sum

    def _skip_update(self) -> None:
        """Ends a step that changes nothing."""
        with self._timer("apply"):
            self.embeddings.skip_update()
        with self._timer("dense_reduce"):
            self.reducer.finish()
        self.dense_optimizer.zero_grad()

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
        self.reducer.finish()
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
                loader_timeout(self.config.launch, self.comm),
            )

    def _evaluate_and_save(self) -> None:
        with self._working():
            self._evaluate_and_save_once()

    def _evaluate_and_save_once(self) -> None:
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
        self._beat_save()
        contents = self._contents()
        with self.comm.uncounted():
            if self._saver is not None:
                self._saver.save(contents, is_best=is_best)
            else:
                self.checkpoints.save(contents, self.comm, is_best=is_best, beat=self._beat_save)

    def _beat_save(self) -> None:
        self._beat(self.steps_done, "save")

    def _finish_saving(self) -> None:
        """Waits for a checkpoint that is being written."""
        if self._saver is not None:
            self._saver.wait()

    def _contents(self) -> Contents:
        """What this rank keeps, as views."""
        recorder = self.recorder
        progress = Progress(
            self.steps_done,
            self._epoch,
            self._batch,
            recorder.samples,
            recorder.loss_last,
            self.best.best_value,
            tuple(recorder.history),
        )
        about = about_run(self.config, self.dataset, self._plan)
        about["run_id"] = self.folder.run_id
        about["warm_start"] = self.warm_started
        about["steps_without_weight"] = recorder.steps_without_weight
        about["torch_rng_state"] = bytes(torch.get_rng_state().tolist()).hex()
        files = {
            name: (self.folder.path / name).read_text(encoding="utf-8")
            for name in ("config.yaml", "plan.json")
            if (self.folder.path / name).is_file()
        }
        return Contents.of(
            progress, self.model, self.embeddings, self.dense_optimizer, about, files
        )

    def resume(self, info: CheckpointInfo) -> None:
        """Goes on from a checkpoint: called by all ranks, before `fit`.

        Raises:
            UserError: on all ranks alike, where it doesn't fit this run (before anything is
                loaded); DamagedError where a file isn't what was written.
        """
        check_fits(info, self.config, self.dataset)
        with self.comm.uncounted():
            load_training(
                info,
                self.model,
                self.embeddings,
                self.dense_optimizer,
                lambda: self._beat(info.step, "load"),
            )
            progress = info.progress
            self.steps_done = self._steps_before = progress.step
            self._epoch, self._batch = next_batch(info, self.config, self.dataset)
            self._count_steps()
            is_own, history = is_of_run(info, self.folder.path), progress.history
            if not is_own and self.steps_done >= self.total_steps and history:
                # With nothing left to train: a folder of its own gets the model all the same,
                # evaluated and kept.
                history = tuple(entry for entry in history if entry["step"] < progress.step)
            if history and history[-1]["step"] == progress.step:
                self._evaluated_step = progress.step
            elif progress.step > 0:
                done = self._batch or self.batches_per_epoch
                self._is_evaluation_owed = self._is_evaluation_due(done)
            self.warm_started = info.values.get("warm_start")
            rng_state = list(bytes.fromhex(info.values["torch_rng_state"]))
            torch.set_rng_state(torch.tensor(rng_state, dtype=torch.uint8))
            self.recorder.resume(progress.step, progress.samples, progress.loss_last, history)
            self.recorder.steps_without_weight = info.values.get("steps_without_weight", 0)
            if is_own:
                on_first_rank(self.comm, lambda: self.checkpoints.drop_after(info))
            best_value = on_first_rank(self.comm, lambda: self.checkpoints.best_value(progress))
            self.best = BestTracker(best_value=best_value)

    def _count_steps(self) -> None:
        """The steps of a resumed run: those that are done, and as many as there are batches left,
        which may be of another size."""
        train = self.config.train
        left = self.batches_per_epoch * (train.epochs - self._epoch) - self._batch
        self.total_steps = self.steps_done + max(left, 0)
        if train.max_steps is not None:
            self.total_steps = min(self.total_steps, train.max_steps)
        self.schedule = Schedule(self.config.optim.schedule, self.total_steps)
        self._display.resume(self.steps_done, self.total_steps)

    @property
    def epochs_done(self) -> float:
        """Passes over the training part, also of a run whose `data.batch_size` has changed."""
        return self._epoch + self._batch / self.batches_per_epoch

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

    def host_timeline(self) -> dict[str, Any] | None:
        """Some steps as spans, on rank 0; None without tables in host memory."""
        return self._host_timeline.figures() if self._host_timeline is not None else None

    def close(self) -> None:
        """Ends what runs beside the trainer."""
        self.embeddings.close()

    def host_figures(self) -> dict[str, Any] | None:
        """The `host` part of result.json; None without tables in host memory; called by all."""
        if self.hot_set is None or self.embeddings.host is None:
            return None
        return {**host_figures(self.embeddings.host, self.embeddings), **self.hot_set.figures()}

    def comm_figures(self) -> dict[str, Any]:
        """The `comm` part of result.json, of the steps since the run was resumed; called by all."""
        return comm_figures(self.comm, max(self.steps_done - self._steps_before, 1))

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
        self.embeddings.settle()
        here = here and self.embeddings.store.is_finite()
        return all(self.comm.all_gather_object(here))


def eval_figures(result: EvalResult | None) -> dict[str, Any]:
    """The `eval` part of result.json; all null where nothing was evaluated."""
    if result is None:
        return dict.fromkeys(("auc", "logloss", "ne", "calibration"), None) | {"num_samples": 0}
    return result.as_dict()
