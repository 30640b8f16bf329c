"""Checks without the command around them: tasks of `dlrm.check`, run on ranks that are threads."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf

from data.parquet import PreparedDataset
from dlrm.build import build_tables
from dlrm.check import CheckTask, check_with, prepare_check
from dlrm.check_pass import PassResult
from dlrm.config import CheckRun, to_config
from dlrm.planning import make_plan
from embeddings.communicator import SingleProcess
from tests.sharding_cases import plan_of
from tests.thread_ranks import run_ranks

LR = {"sgd": 0.5, "adagrad": 0.1, "rowwise_adagrad": 0.1, "adam": 0.02}


def optimizers(name: str, **more: Any) -> dict[str, Any]:
    """Overrides: a row optimizer, and a dense one of the same kind."""
    dense = "adagrad" if name == "rowwise_adagrad" else name
    sparse = {"name": name, "lr": LR[name], **more.pop("sparse", {})}
    return {"optim": {"sparse": sparse, "dense": {"name": dense, "lr": LR[dense]}, **more}}


def check_task(
    dataset: PreparedDataset,
    world_size: int,
    layout: str,
    exchange: str,
    *overrides: dict[str, Any],
) -> CheckTask:
    """A check of the dataset of `write_visits`, whose tables get unequal dims.

    Args:
        layout: see `sharding_cases.LAYOUTS`.
        exchange: `kv`, `pooled` or `mixed`.
        overrides: nested dictionaries, merged from the left.
    """
    base = {
        "data": {"name": "visits", "cache": "", "batch_size": 24},
        "model": {
            "embedding_dim": 4,
            "bottom_mlp": [6],
            "top_mlp": [5],
            "table_dims": {"words": 7, "many": 6},
        },
        "check": {"steps": 6},
    }
    merged = OmegaConf.merge(OmegaConf.structured(CheckRun), base, *overrides)
    config: CheckRun = to_config(merged)  # type: ignore[arg-type]
    tables, _ = build_tables(config, dataset.manifest)
    plan = make_plan(config, dataset, world_size).plan
    if world_size > 1:
        plan = plan_of(layout, world_size, exchange, tables)
    prepare_check(config, dataset, plan)
    return CheckTask(config, dataset.root, plan)


def run_on_threads(task: CheckTask) -> list[PassResult]:
    """Both passes."""
    if task.plan.world_size == 1:
        return check_with(SingleProcess(), task)
    return run_ranks(task.plan.world_size, lambda comm: check_with(comm, task))[0]
