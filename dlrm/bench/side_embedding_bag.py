"""The plain peer: `nn.EmbeddingBag(sparse=True)` and torch's optimizers, under DDP.

With several processes every process holds every table whole, as DDP has it: sparse gradients of all
ranks are gathered on each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from data.batch import Batch
from data.parquet import PreparedDataset
from dlrm.bench.exchange_steps import ExchangeTask, given_gradient
from dlrm.bench.measure import SideTask
from dlrm.bench.start_values import dense_start_values, fill_table
from dlrm.build import build_tables
from dlrm.config import BenchRun
from dlrm.launch import WorkerContext
from dlrm.optim import OptimConfig
from embeddings.table import FeatureConfig, TableConfig


@contextmanager
def build(
    context: WorkerContext, task: SideTask, dataset: PreparedDataset, batches: list[Batch]
) -> Iterator[EmbeddingBagSide]:
    """See `measure.BuildSide`."""
    tables, features = build_tables(task.config, dataset.manifest)
    model = PlainDLRM(task.config, len(dataset.manifest.dense_columns), tables, features)
    with torch.no_grad():
        values = dense_start_values(task.config, dataset.manifest)
        for parameter, value in zip(model.dense_parameters(), values, strict=True):
            parameter.copy_(value)
    yield EmbeddingBagSide(model, task.config, features, batches, context.world_size)


@contextmanager
def build_exchange(
    context: WorkerContext, task: ExchangeTask, dataset: PreparedDataset, batches: list[Batch]
) -> Iterator[EmbeddingBagExchange]:
    """See `exchange_steps.BuildExchange`."""
    assert context.world_size == 1
    yield EmbeddingBagExchange(task, *build_tables(task.config, dataset.manifest), batches)


class PlainTables(nn.Module):
    """The tables with their start values, one `nn.EmbeddingBag` each."""

    def __init__(self, tables: list[TableConfig], features: list[FeatureConfig], seed: int) -> None:
        super().__init__()
        # As by default, but without a warning.
        torch.sparse.check_sparse_tensor_invariants.disable()
        pooling = {feature.table: feature.pooling for feature in features}
        self.bags = nn.ModuleDict()
        for table in tables:
            weight_RD = torch.empty(table.rows, table.dim)
            fill_table(weight_RD, table, seed)
            self.bags[table.name] = nn.EmbeddingBag(
                table.rows, table.dim, mode=pooling[table.name], sparse=True, _weight=weight_RD
            )
        self.feature_tables = [feature.table for feature in features]

    def forward(self, ids: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Each feature's pooled vectors; `ids` are each feature's ids and offsets."""
        return [
            self.bags[table](values_L, offsets_B)
            for table, (values_L, offsets_B) in zip(self.feature_tables, ids, strict=True)
        ]


class PlainDLRM(nn.Module):
    """DLRM as one would write it: products of all pairs by `bmm`, then their lower triangle."""

    pairs: Tensor

    def __init__(
        self,
        config: BenchRun,
        num_dense: int,
        tables: list[TableConfig],
        features: list[FeatureConfig],
    ) -> None:
        super().__init__()
        self.tables = PlainTables(tables, features, config.seed)
        dim = config.model.embedding_dim
        num_vectors = len(features) + 1
        self.register_buffer("pairs", torch.tril_indices(num_vectors, num_vectors, -1))
        self.bottom = _mlp([num_dense, *config.model.bottom_mlp, dim])
        self.top = _mlp([dim + self.pairs.shape[1], *config.model.top_mlp])
        self.head = nn.Linear(config.model.top_mlp[-1], 1)

    def dense_parameters(self) -> list[nn.Parameter]:
        """All but the tables, in the order of the forward pass."""
        parts = (self.bottom, self.top, self.head)
        return [parameter for part in parts for parameter in part.parameters()]

    def forward(self, dense_BN: Tensor, ids: list[tuple[Tensor, Tensor]]) -> Tensor:
        """`(B,)` logits; `ids` are each feature's ids and offsets."""
        bottom_BD = self.bottom(dense_BN)
        vectors_BMD = torch.stack([bottom_BD, *self.tables(ids)], dim=1)
        products_BMM = torch.bmm(vectors_BMD, vectors_BMD.transpose(1, 2))
        pairs_BP = products_BMM[:, self.pairs[0], self.pairs[1]]
        hidden_B = self.top(torch.cat([bottom_BD, pairs_BP], dim=1))
        logits_B1: Tensor = self.head(hidden_B)
        return logits_B1.squeeze(1)


class EmbeddingBagSide:
    """See `measure.Side`."""

    def __init__(
        self,
        model: PlainDLRM,
        config: BenchRun,
        features: list[FeatureConfig],
        batches: list[Batch],
        world_size: int,
    ) -> None:
        self._config, self._num_features = config, len(features)
        self.note = "tables whole, sparse gradients"
        self._model: nn.Module = model
        if world_size > 1:
            self.note = "tables whole on every rank, sparse gradients gathered by DDP"
            self._model = DistributedDataParallel(
                model, static_graph=True, gradient_as_bucket_view=True
            )
        self._optimizers = [
            _dense_optimizer(model.dense_parameters(), config.optim),
            row_optimizer(list(model.tables.parameters()), config),
        ]
        self._inputs = iter([(b.dense_BN, self._ids(b), b.label_B) for b in batches])
        self._loss = nn.BCEWithLogitsLoss()

    def step(self) -> None:
        """See `measure.Side`."""
        dense_BN, ids, label_B = next(self._inputs)
        logits_B = self._forward(dense_BN, ids)
        self._loss(logits_B.float(), label_B).backward()
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def begin_window(self) -> None:
        """See `measure.Side`."""

    def figures(self) -> dict[str, Any]:
        """None of its own."""
        return {}

    def end_training(self) -> None:
        """See `measure.Side`."""

    def logits(self, batch: Batch) -> Tensor:
        """See `measure.Side`."""
        return self._forward(batch.dense_BN, self._ids(batch))

    def _forward(self, dense_BN: Tensor, ids: list[tuple[Tensor, Tensor]]) -> Tensor:
        is_bf16 = self._config.train.precision == "bf16"
        with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
            logits_B: Tensor = self._model(dense_BN, ids)
        return logits_B

    def _ids(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        return ids_by_feature(batch, self._num_features)


class EmbeddingBagExchange:
    """See `exchange_steps.ExchangeSide`."""

    def __init__(
        self,
        task: ExchangeTask,
        tables: list[TableConfig],
        features: list[FeatureConfig],
        batches: list[Batch],
    ) -> None:
        self.note = "tables whole, sparse gradients"
        self._num_features = len(features)
        self._tables = PlainTables(tables, features, task.config.seed)
        self._optimizer = row_optimizer(list(self._tables.parameters()), task.config)
        self._inputs = iter([ids_by_feature(batch, len(features)) for batch in batches])
        dims = {table.name: table.dim for table in tables}
        grad_BS = given_gradient(task.config, dims, features, batches[0])
        self._grads = grad_BS.split([dims[f.table] for f in features], dim=1)

    def step(self) -> None:
        """See `measure.Steps`."""
        torch.autograd.backward(self._tables(next(self._inputs)), self._grads)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def begin_window(self) -> None:
        """See `measure.Steps`."""

    def figures(self) -> dict[str, Any]:
        """None of its own."""
        return {}

    def pooled(self, batch: Batch) -> Tensor:
        """See `exchange_steps.ExchangeSide`."""
        return torch.cat(self._tables(ids_by_feature(batch, self._num_features)), dim=1)


def ids_by_feature(batch: Batch, num_features: int) -> list[tuple[Tensor, Tensor]]:
    """Each feature's ids and the offsets of its bags."""
    size, offsets = batch.batch_size, batch.ids.offsets
    starts = offsets[:: size if size else 1][: num_features + 1].tolist()
    return [
        (batch.ids.values_L[start:stop].contiguous(), offsets[f * size : (f + 1) * size] - start)
        for f, (start, stop) in enumerate(pairwise(starts))
    ]


def _mlp(widths: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for num_inputs, num_outputs in pairwise(widths):
        layers += [nn.Linear(num_inputs, num_outputs), nn.ReLU()]
    return nn.Sequential(*layers)


def row_optimizer(parameters: list[nn.Parameter], config: BenchRun) -> torch.optim.Optimizer:
    """torch's rule for the rows of tables; a fused one doesn't exist."""
    optim = config.optim
    if optim.sparse.name == "sgd":
        return torch.optim.SGD(parameters, optim.sparse.lr)
    assert optim.sparse.name == "adagrad", optim.sparse.name
    return torch.optim.Adagrad(parameters, optim.sparse.lr, eps=optim.effective_eps(optim.sparse))


def _dense_optimizer(parameters: list[nn.Parameter], optim: OptimConfig) -> torch.optim.Optimizer:
    from dlrm.optim import build_dense_optimizer

    return build_dense_optimizer(nn.ParameterList(parameters), optim)
