"""Tables and how their rows move: the four calls of `ShardedEmbeddings` and what lies beneath."""

from __future__ import annotations

from embeddings.communicator import Communicator, PeerLost, ProcessGroup, SingleProcess
from embeddings.kv_gradients import KVGradients, sum_kv
from embeddings.plan import Plan, Shard, single_process_plan
from embeddings.reference import ReferenceEmbeddings
from embeddings.router import IdOutOfRange
from embeddings.row_optim import RowOptimizerConfig
from embeddings.sharded import BatchPlan, ShardedEmbeddings
from embeddings.store import RowStore
from embeddings.table import FeatureConfig, TableConfig

__all__ = [
    "BatchPlan",
    "Communicator",
    "FeatureConfig",
    "IdOutOfRange",
    "KVGradients",
    "PeerLost",
    "Plan",
    "ProcessGroup",
    "ReferenceEmbeddings",
    "RowOptimizerConfig",
    "RowStore",
    "Shard",
    "ShardedEmbeddings",
    "SingleProcess",
    "TableConfig",
    "single_process_plan",
    "sum_kv",
]
