"""`dlrm bench exchange` over two ranks: whatever the exchange, the same rows after equal steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data.parquet import PreparedDataset
from data.synthetic import SyntheticConfig, synthesise
from dlrm.bench.exchange_steps import ExchangeTask, measure_exchange
from dlrm.bench.train_bench import plan_of
from dlrm.heartbeat import NoHeartbeat
from dlrm.worker import WorkerContext
from tests.commands import compose_config
from tests.dist.worker_pool import Workers

SMALL = (
    "data.batch_size=64",
    "bench.steps=3",
    "bench.warmup_steps=1",
    "launch.nproc=2",
    "launch.transport=gloo",  # The bytes that the network carries are compared.
)


def measure_rank(rank: int, world_size: int, tasks: list[ExchangeTask]) -> list[dict[str, Any]]:
    context = WorkerContext(rank, world_size, rank, NoHeartbeat())
    found: list[dict[str, Any]] = []
    for task in tasks:
        if task.side == "all_to_all_floor":
            task = replace(task, sent_bytes=found[0]["sent_bytes"])
        found.append(measure_exchange(context, task))
    return found


@pytest.mark.parametrize("layout", ["row_wise", "table_wise"])
def test_exchanges_leave_the_same_rows_and_the_floor_sends_as_much(
    layout: str, workers: Workers, tmp_path: Path
) -> None:
    settings = SyntheticConfig(num_train=300, num_valid=130, num_test=0, cardinality_scale=1e-5)
    synthesise(settings, tmp_path / "d")
    dataset = PreparedDataset(tmp_path / "d")
    config = compose_config("bench", "kind=exchange", f"sharding={layout}", *SMALL)
    tasks = []
    for exchange in ("kv", "pooled"):
        own = replace(config, sharding=replace(config.sharding, exchange=exchange))
        plan = plan_of(own, dataset)
        tasks.append(ExchangeTask(own, dataset.root, plan, f"dlrm_{exchange}", tmp_path))
    tasks.append(ExchangeTask(config, dataset.root, None, "all_to_all_floor", tmp_path))
    for kv, pooled, floor in workers(2).run(measure_rank, tasks):
        assert kv["pooled_difference"] == 0
        assert pooled["pooled_start_difference"] < 1e-6
        assert 0 < pooled["pooled_difference"] < 1e-5, "0: is it the same exchange?"
        assert len(pooled["pooled_difference_by_rank"]) == 2
        assert kv["pooled_moved"] > 0.005
        assert kv["sent_bytes"]["rows"] > 0
        assert kv["sent_bytes"]["rows"] != pooled["sent_bytes"]["rows"]
        assert kv["bytes_sent_per_step_and_rank"] > sum(kv["sent_bytes"].values())
        assert "pooled_difference" not in floor
        assert floor["all_to_all_bytes"] == pytest.approx(sum(kv["sent_bytes"].values()), abs=4)
