"""TorchRec 1.8 as a side, set up as its documentation says for speed.

`EmbeddingBagCollection` in its own `DLRM` and `DLRMTrain`, tables fused with their optimizer
(fbgemm), `DistributedModelParallel` with an explicit plan, the dense network in DDP (in one process
without), batches as `KeyedJaggedTensor` with 32-bit ids made before the clock starts, and, where
the side's name says so, `TrainPipelineSparseDist`. bf16 is autocast around the model's forward.

Of the exchange alone, `DistributedModelParallel` of the `EmbeddingBagCollection`, as its tutorial
has it: forward, and backward from a given gradient with the update fused into it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec.datasets.utils import Batch as PeerBatch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    ParameterShardingGenerator,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from data.batch import Batch
from data.parquet import PreparedDataset
from dlrm.bench.exchange_steps import ExchangeTask, given_gradient
from dlrm.bench.measure import SideTask
from dlrm.bench.side_embedding_bag import row_optimizer
from dlrm.bench.start_values import dense_start_values, fill_table
from dlrm.build import build_tables
from dlrm.config import BenchRun
from dlrm.launch import WorkerContext
from dlrm.optim import build_dense_optimizer
from embeddings.table import FeatureConfig, TableConfig

_EBC_PATH = "model.sparse_arch.embedding_bag_collection"
_REPLICATED_ROWS = 2_000
"""`mixed`: tables of at most so many rows are replicated, as their planner does with small ones."""
_OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}


@contextmanager
def build(
    context: WorkerContext, task: SideTask, dataset: PreparedDataset, batches: list[Batch]
) -> Iterator[TorchRecSide]:
    """See `measure.BuildSide`."""
    with _group():
        yield TorchRecSide(context, task, dataset, batches)


@contextmanager
def build_exchange(
    context: WorkerContext, task: ExchangeTask, dataset: PreparedDataset, batches: list[Batch]
) -> Iterator[TorchRecExchange]:
    """See `exchange_steps.BuildExchange`."""
    with _group():
        yield TorchRecExchange(context, task, dataset, batches)


@contextmanager
def _group() -> Iterator[None]:
    """TorchRec wants a process group for one process too."""
    # Of names that torch has deprecated: not ours to mend.
    warnings.simplefilter("ignore")
    alone = not dist.is_initialized()
    if alone:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        if alone:
            dist.destroy_process_group()


class TorchRecSide:
    """See `measure.Side`."""

    def __init__(
        self, context: WorkerContext, task: SideTask, dataset: PreparedDataset, batches: list[Batch]
    ) -> None:
        config, self._precision = task.config, task.config.train.precision
        tables, features = build_tables(config, dataset.manifest)
        self._keys = [feature.name for feature in features]
        pipelined = task.side.endswith("pipelined")
        self._model = _distributed(
            _build_model(config, len(dataset.manifest.dense_columns), tables, features),
            _EBC_PATH,
            task.side,
            config,
            tables,
            context.world_size,
        )
        _fill_tables(self._model, _EBC_PATH, config, tables)
        _fill_dense(self._model, config, tables, features, dataset)
        self._optimizer = _optimizer(self._model, config)
        self._batches = iter([self._peer_batch(batch) for batch in batches])
        self._pipeline: TrainPipelineSparseDist | None = None
        if pipelined:
            self._pipeline = TrainPipelineSparseDist(
                self._model,
                self._optimizer,
                torch.device("cpu"),
                execute_all_batches=True,
                custom_model_fwd=self._forward,
            )
        pipeline = "TrainPipelineSparseDist" if pipelined else "no pipeline"
        self.note = f"TorchRec, fused tables, {_describe_plan(task.side)}, {pipeline}"

    def step(self) -> None:
        """See `measure.Side`."""
        if self._pipeline is not None:
            self._pipeline.progress(self._batches)
            return
        self._optimizer.zero_grad()
        loss, _ = self._forward(next(self._batches))
        loss.backward()
        self._optimizer.step()

    def begin_window(self) -> None:
        """See `measure.Side`."""

    def figures(self) -> dict[str, Any]:
        """None of its own."""
        return {}

    def end_training(self) -> None:
        """See `measure.Side`."""
        if self._pipeline is not None:
            self._pipeline.detach()

    def logits(self, batch: Batch) -> Tensor:
        """See `measure.Side`."""
        _, (_, logits_B, _) = self._forward(self._peer_batch(batch))
        return logits_B

    def _forward(self, batch: PeerBatch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        with torch.autocast("cpu", torch.bfloat16, enabled=self._precision == "bf16"):
            found: tuple[Tensor, tuple[Tensor, Tensor, Tensor]] = self._model(batch)
        return found

    def _peer_batch(self, batch: Batch) -> PeerBatch:
        return PeerBatch(batch.dense_BN, _keyed_ids(batch, self._keys), batch.label_B)


class TorchRecExchange:
    """See `exchange_steps.ExchangeSide`."""

    def __init__(
        self,
        context: WorkerContext,
        task: ExchangeTask,
        dataset: PreparedDataset,
        batches: list[Batch],
    ) -> None:
        config = task.config
        tables, features = build_tables(config, dataset.manifest)
        self._keys = [feature.name for feature in features]
        collection = _collection(tables, features)
        self._model = _distributed(collection, "", task.side, config, tables, context.world_size)
        _fill_tables(self._model, "", config, tables)
        self._optimizer = _optimizer(self._model, config)
        self._ids = iter([_keyed_ids(batch, self._keys) for batch in batches])
        dims = {table.name: table.dim for table in tables}
        # They divide by the number of ranks, for losses that are means over a rank's samples.
        grad_BS = given_gradient(config, dims, features, batches[0]) * context.world_size
        widths = [dims[feature.table] for feature in features]
        self._grads = dict(zip(self._keys, grad_BS.split(widths, 1), strict=True))
        self._grad_BS: Tensor | None = None
        self.note = f"TorchRec, fused tables, {_describe_plan(task.side)}"

    def step(self) -> None:
        """See `measure.Steps`."""
        self._optimizer.zero_grad()
        pooled = self._lookup(next(self._ids))
        if self._grad_BS is None:  # In the first step, to warm up: the order of their columns.
            columns = pooled.keys()
            self._grad_BS = torch.cat([self._grads[key] for key in columns], dim=1)
        pooled.values().backward(self._grad_BS)
        self._optimizer.step()

    def begin_window(self) -> None:
        """See `measure.Steps`."""

    def figures(self) -> dict[str, Any]:
        """None of its own."""
        return {}

    def pooled(self, batch: Batch) -> Tensor:
        """See `exchange_steps.ExchangeSide`."""
        found = self._lookup(_keyed_ids(batch, self._keys)).to_dict()
        return torch.cat([found[key] for key in self._keys], dim=1)

    def _lookup(self, ids: KeyedJaggedTensor) -> KeyedTensor:
        return self._model(ids).wait()


def _keyed_ids(batch: Batch, keys: list[str]) -> KeyedJaggedTensor:
    ids = batch.ids
    return KeyedJaggedTensor(
        keys=keys,
        values=ids.values_L.int(),
        lengths=ids.offsets.diff().int(),
        stride=batch.batch_size,
    )


def _distributed(
    model: nn.Module,
    path: str,
    side: str,
    config: BenchRun,
    tables: list[TableConfig],
    num_ranks: int,
) -> DistributedModelParallel:
    """The model under the plan that the side's name says; `path` is that of its tables in it."""
    sharder = _sharder(config)
    plan = construct_module_sharding_plan(
        model.get_submodule(path),
        _shardings(side, tables, num_ranks),
        sharder=sharder,
        local_size=num_ranks,
        world_size=num_ranks,
        device_type="cpu",
    )
    world = dist.group.WORLD
    assert world is not None
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(world),
        device=torch.device("cpu"),
        plan=ShardingPlan({path: plan}),
        sharders=[sharder],
        init_data_parallel=num_ranks > 1,
    )


def _shardings(
    side: str, tables: list[TableConfig], num_ranks: int
) -> dict[str, ParameterShardingGenerator]:
    """Each table's place."""
    if "row_wise" in side:
        return {table.name: row_wise(compute_kernel="fused") for table in tables}
    whole = tables
    if "mixed" in side:
        whole = [table for table in tables if table.rows > _REPLICATED_ROWS]
    owners = _deal_out(whole, num_ranks)
    return {
        table.name: (
            table_wise(rank=owners[table.name], compute_kernel="fused")
            if table.name in owners
            else data_parallel()
        )
        for table in tables
    }


def _describe_plan(side: str) -> str:
    if "row_wise" in side:
        return "every table cut into equal row ranges"
    if "mixed" in side:
        return f"tables up to {_REPLICATED_ROWS:,} rows replicated, the others whole dealt out"
    return "whole tables dealt out"


def _optimizer(model: DistributedModelParallel, config: BenchRun) -> CombinedOptimizer:
    """What is fused; torch's own for replicated tables, with the rows' rule, and for the rest."""
    left = dict(in_backward_optimizer_filter(model.named_parameters()))
    tables = {name: values for name, values in left.items() if "embedding_bags." in name}
    dense = {name: values for name, values in left.items() if name not in tables}
    parts = [model.fused_optimizer]
    if tables:
        parts.append(KeyedOptimizerWrapper(tables, lambda values: row_optimizer(values, config)))
    if dense:
        parts.append(KeyedOptimizerWrapper(dense, lambda values: _dense_optimizer(values, config)))
    return CombinedOptimizer(parts)


def _build_model(
    config: BenchRun, num_dense: int, tables: list[TableConfig], features: list[FeatureConfig]
) -> DLRMTrain:
    """Their model of this configuration's widths."""
    return DLRMTrain(
        DLRM(
            embedding_bag_collection=_collection(tables, features),
            dense_in_features=num_dense,
            dense_arch_layer_sizes=[*config.model.bottom_mlp, config.model.embedding_dim],
            over_arch_layer_sizes=[*config.model.top_mlp, 1],
        )
    )


def _collection(tables: list[TableConfig], features: list[FeatureConfig]) -> EmbeddingBagCollection:
    """The tables without memory, which DMP gives them."""
    pooling = {feature.table: feature.pooling for feature in features}
    return EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name=table.name,
                embedding_dim=table.dim,
                num_embeddings=table.rows,
                feature_names=[f.name for f in features if f.table == table.name],
                pooling=PoolingType.SUM if pooling[table.name] == "sum" else PoolingType.MEAN,
            )
            for table in tables
        ],
    )


def _sharder(config: BenchRun) -> EmbeddingBagCollectionSharder:
    sparse = config.optim.sparse
    fused: dict[str, Any] = {"optimizer": _OPTIMIZERS[sparse.name], "learning_rate": sparse.lr}
    if sparse.name != "sgd":
        fused["eps"] = config.optim.effective_eps(sparse)
    return EmbeddingBagCollectionSharder(fused_params=fused)


def _dense_optimizer(parameters: Any, config: BenchRun) -> torch.optim.Optimizer:
    return build_dense_optimizer(torch.nn.ParameterList(parameters), config.optim)


def _deal_out(tables: list[TableConfig], num_ranks: int) -> dict[str, int]:
    """Table → rank: by falling size to and fro (0, 1, 1, 0, …), so that every rank has as many
    lookups, and about as many rows."""
    order = sorted(range(len(tables)), key=lambda index: -tables[index].rows)
    turns = [*range(num_ranks), *reversed(range(num_ranks))]
    return {
        tables[index].name: turns[position % len(turns)] for position, index in enumerate(order)
    }


@torch.no_grad()
def _fill_tables(
    model: DistributedModelParallel, path: str, config: BenchRun, tables: list[TableConfig]
) -> None:
    """This system's start values, at the places that this model has for them."""
    state = model.state_dict()
    for table in tables:
        held = state[f"{path}.embedding_bags.{table.name}.weight".removeprefix(".")]
        if not hasattr(held, "local_shards"):  # Replicated.
            fill_table(held, table, config.seed)
            continue
        for shard in held.local_shards():
            row_start, col_start = shard.metadata.shard_offsets
            fill_table(shard.tensor, table, config.seed, row_start=row_start, col_start=col_start)


@torch.no_grad()
def _fill_dense(
    model: DistributedModelParallel,
    config: BenchRun,
    tables: list[TableConfig],
    features: list[FeatureConfig],
    dataset: PreparedDataset,
) -> None:
    """The same for the dense network."""
    dlrm = model.module.model
    own = dense_start_values(config, dataset.manifest)
    theirs = [*dlrm.dense_arch.parameters(), *dlrm.over_arch.parameters()]
    first_top = 2 * (len(config.model.bottom_mlp) + 1)
    for number, (parameter, values) in enumerate(zip(theirs, own, strict=True)):
        if number == first_top:
            values = values[:, _column_order(config.model.embedding_dim, tables, features)]
        parameter.copy_(values)


def _column_order(dim: int, tables: list[TableConfig], features: list[FeatureConfig]) -> Tensor:
    """Of the top MLP's input: for each column of theirs, the one of ours with the same meaning.

    They take the features table by table, and the upper triangle row by row, where ours is the
    lower one.
    """
    positions = [i for t in tables for i, f in enumerate(features) if f.table == t.name]
    vectors = [0, *(position + 1 for position in positions)]
    size = len(vectors)
    ours = {
        pair: number for number, pair in enumerate((i, j) for i in range(size) for j in range(i))
    }
    order = list(range(dim))
    for i in range(size):
        for j in range(i + 1, size):
            first, second = vectors[i], vectors[j]
            order.append(dim + ours[max(first, second), min(first, second)])
    return torch.tensor(order)
