"""Forward passes without training: evaluation, and the teacher's figures where one is known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from data.batch import Batch
from data.lanes import LABEL_COLUMN
from data.loader import Prefetcher
from data.parquet import PreparedDataset
from data.synthetic import TEACHER_COLUMN
from dlrm.metrics import BinaryMetrics, EvalResult
from dlrm.model import DLRM
from embeddings.sharded import ShardedEmbeddings


def autocast(precision: str) -> AbstractContextManager[None]:
    """bf16 autocast of the dense network for `train.precision=bf16`, else nothing."""
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")


def dense_input(model: DLRM, batch: Batch) -> Tensor:
    """The dense features in the dtype of the model's parameters."""
    return batch.dense_BN.to(model.head.weight.dtype)


@torch.no_grad()
def score_batches(
    model: DLRM, embeddings: ShardedEmbeddings, batches: Iterable[Batch], precision: str
) -> Iterator[tuple[Batch, Tensor]]:
    """Each batch with its logits."""
    with Prefetcher(batches) as loaded:
        for batch in loaded:
            plan = embeddings.plan_batch(batch.ids, training=False)
            pooled_BS = embeddings.lookup(plan, training=False)
            with autocast(precision):
                logits_B = model(dense_input(model, batch), pooled_BS)
            yield batch, logits_B


def evaluate(
    model: DLRM, embeddings: ShardedEmbeddings, batches: Iterable[Batch], precision: str
) -> BinaryMetrics:
    """Metrics over all of `batches`, which must be labelled."""
    metrics = BinaryMetrics()
    for batch, logits_B in score_batches(model, embeddings, batches, precision):
        assert batch.label_B is not None
        metrics.update(logits_B, batch.label_B, batch.weight_B)
    return metrics


def teacher_result(dataset: PreparedDataset, part: str) -> EvalResult | None:
    """What the teacher of synthetic data reaches on a part: nobody can do better; else None."""
    if TEACHER_COLUMN not in dataset.manifest.extra_columns or not dataset.num_rows(part):
        return None
    metrics = BinaryMetrics()
    labels = torch.from_numpy(dataset.column(part, LABEL_COLUMN)).float()
    metrics.update(torch.from_numpy(dataset.column(part, TEACHER_COLUMN)), labels)
    return metrics.result()
