"""Forward passes without training: evaluation, and the teacher's figures where one is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from data.batch import Batch
from data.lanes import LABEL_COLUMN
from data.loader import Prefetcher
from data.parquet import PreparedDataset
from data.synthetic import TEACHER_COLUMN
from dlrm.config import LaunchConfig
from dlrm.merge_metrics import merge_on_first
from dlrm.metrics import BinaryMetrics, EvalResult
from dlrm.model import DLRM
from embeddings.communicator import Communicator
from embeddings.sharded import ShardedEmbeddings


def autocast(precision: str) -> AbstractContextManager[None]:
    """bf16 autocast of the dense network for `train.precision=bf16`, else nothing."""
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")


def dense_input(model: DLRM, batch: Batch) -> Tensor:
    """The dense features in the dtype of the model's parameters."""
    return batch.dense_BN.to(model.head.weight.dtype)


def loader_timeout(launch: LaunchConfig, comm: Communicator) -> float | None:
    """Longest wait for a batch in one process; over several ranks the launcher sees to hangs, and
    names the rank."""
    return launch.timeout_s if comm.world_size == 1 else None


@torch.no_grad()
def score_batches(
    model: DLRM,
    embeddings: ShardedEmbeddings,
    batches: Iterable[Batch],
    precision: str,
    beat: Callable[[], None] = lambda: None,
    timeout_s: float | None = None,
) -> Iterator[tuple[Batch, Tensor]]:
    """Each of this rank's batches with its logits; as many batches on every rank."""
    with Prefetcher(batches, timeout_s=timeout_s) as loaded:
        for batch in loaded:
            beat()
            plan = embeddings.plan_batch(batch.ids, training=False)
            pooled_BS = embeddings.lookup(plan, training=False)
            with autocast(precision):
                logits_B = model(dense_input(model, batch), pooled_BS)
            yield batch, logits_B


def evaluate(
    model: DLRM,
    embeddings: ShardedEmbeddings,
    batches: Iterable[Batch],
    precision: str,
    beat: Callable[[], None] = lambda: None,
    timeout_s: float | None = None,
) -> BinaryMetrics:
    """Metrics over all samples of all ranks, which must be labelled. The figures are the same on
    every rank; curves are the first rank's alone (`merge_on_first`).

    Args:
        model: the dense network.
        embeddings: the tables.
        batches: this rank's share of each.
        precision: `train.precision`.
        beat: called for every batch.
        timeout_s: longest wait for a batch; None: without end.
    """
    metrics = BinaryMetrics()
    for batch, logits_B in score_batches(model, embeddings, batches, precision, beat, timeout_s):
        assert batch.label_B is not None
        metrics.update(logits_B, batch.label_B, batch.weight_B)
    comm = embeddings.comm
    if comm.world_size == 1:
        return metrics
    return merge_on_first(metrics, comm)


def teacher_result(dataset: PreparedDataset, part: str) -> EvalResult | None:
    """What the teacher of synthetic data reaches on a part: nobody can do better; else None."""
    if TEACHER_COLUMN not in dataset.manifest.extra_columns or not dataset.num_rows(part):
        return None
    metrics = BinaryMetrics()
    labels = torch.from_numpy(dataset.column(part, LABEL_COLUMN)).float()
    metrics.update(torch.from_numpy(dataset.column(part, TEACHER_COLUMN)), labels)
    return metrics.result()
