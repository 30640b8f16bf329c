"""Tables in host memory: beside rows and state 4 bytes per row, and what the budgets say.

Measured in a process of its own, see test_embedding_memory.py.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from tests.programs import run_python

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="resident memory is read from /proc/self"
)

PROGRAM = """
import json
import numpy as np, torch
from collections import deque
from data.batch import JaggedIds
from embeddings import (
    FeatureConfig, Plan, RowOptimizerConfig, Shard, ShardedEmbeddings, TableConfig,
)
from embeddings.host.executor import LinkRates, SimulatedRates, ThreadExecutor
from embeddings.host.host_tables import HostSettings

ROWS, DIM, B, HOT_BYTES, STAGING_BYTES = 1_000_000, 32, 2048, 8 << 20, 32 << 20

def status_bytes(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

def make(rows):
    embeddings = ShardedEmbeddings(
        [TableConfig("t", rows, DIM)], [FeatureConfig("f", "t")],
        RowOptimizerConfig(name="adagrad"), dtype=torch.float32, seed=1,
        plan=Plan(1, (Shard("t", 0, rows, 0, DIM, 0, "host"),), {"t": "kv"}),
        host=HostSettings("lookahead", 2, B, STAGING_BYTES, HOT_BYTES),
        # A link, so that the device's part is counted apart.
        executor=ThreadExecutor(SimulatedRates(LinkRates(1e10), None, None)),
    )
    for state in embeddings.store.state(0).values():
        state.zero_()
    embeddings.host.choose_rows({"t": np.arange(min(rows, HOT_BYTES // (8 * DIM)))})
    return embeddings

def run(embeddings, rows, steps):
    staged = deque()
    for _ in range(steps):
        while len(staged) < 3:
            ids = JaggedIds(torch.randint(rows, (B,)), torch.arange(B + 1), 1)
            staged.append(embeddings.plan_batch(ids))
            embeddings.stage([staged[-1]])
        plan = staged.popleft()
        pooled = embeddings.lookup(plan)
        pooled.square().mean().backward()
        embeddings.apply(embeddings.backward(plan, pooled.grad, 0.1), 0.1)
    embeddings.settle()

small = make(5000)
run(small, 5000, 3)  # loads what first steps load
small.close()
del small
before = status_bytes("VmRSS")
embeddings = make(ROWS)
run(embeddings, ROWS, 6)
host = embeddings.host
print(json.dumps({
    "grown_bytes": status_bytes("VmHWM") - before,
    "store_bytes": embeddings.store.table_bytes() + embeddings.store.state_bytes(),
    "slot_map_bytes": host.slot_map_bytes,
    "staging": host.staging_bytes,
    "hot_bytes": sum(hot.num_bytes for hot in host.hot.values()),
    "moved_bytes": host.counters.to_device_bytes,
    "rows": ROWS, "hot_budget": HOT_BYTES, "staging_budget": STAGING_BYTES,
}))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What `PROGRAM` measures."""
    values = run_python(PROGRAM)
    assert values["moved_bytes"] > 0, json.dumps(values)
    return values


def test_host_memory_is_rows_state_and_four_bytes_a_row(found: dict[str, Any]) -> None:
    # Fails where the path keeps a copy of a table, or a map of eight bytes.
    assert found["slot_map_bytes"] == 4 * found["rows"]
    on_device = found["hot_bytes"] + found["staging"][1]
    host_bytes = found["grown_bytes"] - on_device
    allowed = 1.1 * found["store_bytes"] + 4 * found["rows"]
    assert host_bytes <= allowed, f"{host_bytes:,} bytes of host memory, {allowed:,.0f} allowed"


def test_device_memory_stays_within_the_budgets(found: dict[str, Any]) -> None:
    assert found["hot_bytes"] <= found["hot_budget"]
    # A buffer for each step under way and, packed, for its way back.
    assert found["staging"][1] <= found["staging_budget"]
