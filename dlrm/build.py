"""From configuration and manifest to model and tables; the same for training and for scoring."""

from __future__ import annotations

from typing import cast

import torch

from data.errors import UserError
from data.manifest import Manifest
from dlrm.config import TrainRun
from dlrm.launch import WorkerContext
from dlrm.model import DLRM, check_table_names, table_dim
from embeddings.communicator import Communicator, ProcessGroup, SingleProcess
from embeddings.plan import Plan
from embeddings.row_optim import RowOptimizerConfig, RowOptimizerName
from embeddings.sharded import Backend, ShardedEmbeddings, Wire
from embeddings.table import FeatureConfig, Pooling, TableConfig

PRECISION_DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}


def build_tables(
    config: TrainRun, manifest: Manifest
) -> tuple[list[TableConfig], list[FeatureConfig]]:
    """Tables (in order of first use) and features of a dataset, with dims from `model.*`.

    Raises:
        UserError: for a `model.table_dims` entry that names no table.
    """
    check_table_names(config.model, list(manifest.table_rows))
    tables = [
        TableConfig(name, rows, table_dim(config.model, name))
        for name, rows in manifest.table_rows.items()
    ]
    features = [FeatureConfig(f.name, f.table, cast(Pooling, f.pooling)) for f in manifest.features]
    return tables, features


def build_embeddings(
    config: TrainRun,
    manifest: Manifest,
    *,
    for_training: bool = True,
    plan: Plan | None = None,
    comm: Communicator | None = None,
) -> ShardedEmbeddings:
    """This rank's part of the tables, with start values; without optimizer state where nothing is
    trained.

    Raises:
        UserError: for a backend or a plan that can't be had.
    """
    tables, features = build_tables(config, manifest)
    sparse = config.optim.sparse
    optimizer = RowOptimizerConfig(
        name=cast(RowOptimizerName, sparse.name),
        eps=config.optim.effective_eps(sparse),
        weight_decay=sparse.weight_decay,
        beta1=sparse.beta1,
        beta2=sparse.beta2,
    )
    if not for_training:
        optimizer = RowOptimizerConfig(name="sgd")
    # Scoring takes what it can get: the trained model doesn't depend on the kernel.
    backend: Backend = "fbgemm" if config.train.backend == "fbgemm" and for_training else "auto"
    if config.train.backend == "torch":
        backend = "torch"
    try:
        return ShardedEmbeddings(
            tables,
            features,
            optimizer,
            dtype=PRECISION_DTYPES[config.train.precision],
            seed=config.seed,
            plan=plan,
            comm=comm,
            wire=cast(Wire, config.sharding.wire),
            backend=backend,
            accumulate=config.train.accumulate,
            clip_norm=config.optim.clip_norm,
        )
    except ValueError as error:
        # `embeddings` knows no UserError; what it refuses at construction is the user's to mend.
        raise UserError(str(error)) from error


def build_model(config: TrainRun, manifest: Manifest) -> DLRM:
    """The dense network."""
    tables, features = build_tables(config, manifest)
    dims = {table.name: table.dim for table in tables}
    model = DLRM(
        config.model,
        num_dense=len(manifest.dense_columns),
        feature_dims=[dims[f.table] for f in features],
        feature_tables=[f.table for f in features],
        seed=config.seed,
    )
    return model.to(PRECISION_DTYPES[config.train.precision])


def communicator(context: WorkerContext) -> Communicator:
    """The ranks of a run, as the tables and the dense network communicate with them."""
    if context.world_size == 1:
        return SingleProcess()
    comm = ProcessGroup()
    comm.on_wait = context.heartbeat.waiting
    return comm
