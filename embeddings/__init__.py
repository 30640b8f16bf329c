"""Tables and how their rows move: the four calls of `ShardedEmbeddings` and what lies beneath."""

from __future__ import annotations

from embeddings.plan import Plan, Shard, single_process_plan
from embeddings.reference import ReferenceEmbeddings
from embeddings.router import BatchPlan, IdOutOfRange
from embeddings.row_optim import RowOptimizerConfig
from embeddings.sharded import KVGradients, ShardedEmbeddings, sum_kv
from embeddings.store import RowStore
from embeddings.table import FeatureConfig, TableConfig

__all__ = [
    "BatchPlan",
    "FeatureConfig",
    "IdOutOfRange",
    "KVGradients",
    "Plan",
    "ReferenceEmbeddings",
    "RowOptimizerConfig",
    "RowStore",
    "Shard",
    "ShardedEmbeddings",
    "TableConfig",
    "single_process_plan",
    "sum_kv",
]
