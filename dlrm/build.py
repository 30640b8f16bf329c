"""From configuration and manifest to model and tables; the same for training and for scoring."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.distributed as dist

from data.errors import UserError
from data.manifest import Manifest
from dlrm.config import LaunchConfig, TrainRun
from dlrm.launch import WorkerContext
from dlrm.model import DLRM, check_table_names, table_dim
from embeddings.communicator import Communicator, ProcessGroup, SingleProcess
from embeddings.host.host_tables import HostSettings, Mode
from embeddings.plan import Plan
from embeddings.row_optim import RowOptimizerConfig, RowOptimizerName
from embeddings.sharded import Backend, ShardedEmbeddings, Wire
from embeddings.shared_memory import SharedMemory, why_not_shared
from embeddings.sockets import connect_ranks
from embeddings.table import FeatureConfig, Pooling, TableConfig

_RECENT_STEPS = 256
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
    fill: bool = True,
    beat: Callable[[], None] = lambda: None,
) -> ShardedEmbeddings:
    """This rank's part of the tables, with start values unless `fill` is False; without optimizer
    state where nothing is trained. `beat` is called while they are filled.

    Raises:
        UserError: for a backend or a plan that can't be had, and tables that don't fit into memory.
    """
    tables, features = build_tables(config, manifest)
    optimizer = row_optimizer(config) if for_training else RowOptimizerConfig(name="sgd")
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
            host=_host_settings(config, tables, features, plan) if for_training else None,
            fill=fill,
            beat=beat,
        )
    except ValueError as error:
        # `embeddings` knows no UserError; what it refuses at construction is the user's to mend.
        raise UserError(str(error)) from error


def row_optimizer(config: TrainRun) -> RowOptimizerConfig:
    """Rule and constants of the rows' update."""
    sparse = config.optim.sparse
    return RowOptimizerConfig(
        name=cast(RowOptimizerName, sparse.name),
        eps=config.optim.effective_eps(sparse),
        weight_decay=sparse.weight_decay,
        beta1=sparse.beta1,
        beta2=sparse.beta2,
    )


def _host_settings(
    config: TrainRun,
    tables: Sequence[TableConfig],
    features: Sequence[FeatureConfig],
    plan: Plan | None,
) -> HostSettings | None:
    """How the rows of tables in host memory come; None where there are none."""
    in_host = {s.table for s in plan.shards if s.memory == "host"} if plan is not None else set()
    if not in_host:
        return None
    host = config.sharding.host
    # `auto` has put tables on the device; those that a plan file puts into host memory stay there.
    mode = "gather" if host.mode == "auto" else host.mode
    if mode == "hotline" and config.train.accumulate > 1:
        raise UserError(
            f"sharding.host.mode=hotline computes a batch in two parts of its own: leave out "
            f"train.accumulate={config.train.accumulate}, or set another mode"
        )
    num_features = sum(1 for feature in features if feature.table in in_host)
    return HostSettings(
        mode=cast(Mode, mode),
        lookahead=host.lookahead,
        batch_rows=config.data.batch_size * num_features,
        staging_bytes=host.staging_bytes,
        hot_bytes=host.hot_bytes,
        recent_steps=_RECENT_STEPS if host.drift is not None else 0,
    )


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


def communicator(context: WorkerContext, launch: LaunchConfig) -> Communicator:
    """The ranks of a run, as the tables and the dense network communicate with them.

    Raises:
        UserError: where the `launch.transport` that is asked for can't be had.
    """
    if context.world_size == 1:
        return SingleProcess()
    comm = _connected(launch)
    comm.on_wait = context.heartbeat.waiting
    return comm


def _connected(launch: LaunchConfig) -> Communicator:
    asked = launch.transport
    if asked in ("auto", "shared_memory"):
        reason = why_not_shared()
        if reason is None:
            return SharedMemory(timeout_s=launch.timeout_s)
        _refuse(asked, "shared_memory", reason)
    if asked in ("auto", "sockets"):
        found = connect_ranks(launch.timeout_s)
        if not isinstance(found, str):
            return found
        _refuse(asked, "sockets", found)
        if dist.get_backend() == "gloo" and dist.get_rank() == 0:
            warnings.warn(
                f"ranks exchange over gloo, which is slower than sockets of our own: {found} "
                "(launch.transport=gloo asks for it)",
                stacklevel=2,
            )
    return ProcessGroup()


def _refuse(asked: str, transport: str, reason: str) -> None:
    if asked == transport:
        raise UserError(
            f"launch.transport={transport} can't be had: {reason}; set launch.transport=auto"
        )
