"""Memory of a step follows the batch, and filling a table needs the table and little more.

Measured in processes of their own, as the peak of a process only ever grows: those of the steps
are forks of one that has imported everything, whose own peak they don't inherit.
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

STEPS_PROGRAM = """
import json, os, sys
import torch
from data.batch import JaggedIds
from embeddings import FeatureConfig, RowOptimizerConfig, ShardedEmbeddings, TableConfig

ROWS, DIM, B = 2_000_000, 64, 2048

def status_bytes(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

def measure(backend, name):
    embeddings = ShardedEmbeddings(
        [TableConfig("t", ROWS, DIM)],
        [FeatureConfig("f", "t"), FeatureConfig("g", "t", pooling="mean")],
        RowOptimizerConfig(name=name),
        dtype=torch.float32, seed=1, backend=backend,
    )
    assert embeddings.backend == backend
    # State takes memory once a step touches it, which is the table's due and not the step's.
    for state in embeddings.store.state(0).values():
        state.zero_()

    def step(batch_size):
        ids = JaggedIds(
            torch.randint(ROWS, (2 * 2 * batch_size,)), torch.arange(0, 4 * batch_size + 1, 2), 2
        )
        plan = embeddings.plan_batch(ids)
        pooled = embeddings.lookup(plan)
        pooled.square().mean().backward()
        embeddings.apply(embeddings.backward(plan, pooled.grad, 0.1), 0.1)
        embeddings.lookup(embeddings.plan_batch(ids, training=False), training=False)

    step(2)  # loads what a first step loads, with next to no data
    before = status_bytes("VmRSS")  # by a little below the peak so far, which errs to the safe side
    for _ in range(5):
        step(B)
    return {
        "table_bytes": embeddings.store.table_bytes(),
        "extra_bytes": status_bytes("VmHWM") - before,
    }

found = {}
for backend, name in json.loads(sys.argv[1]):
    readable, writable = os.pipe()
    if os.fork() == 0:
        with open(writable, "w") as out:
            json.dump(measure(backend, name), out)
        os._exit(0)
    os.close(writable)
    with open(readable) as result:
        found[f"{backend} {name}"] = json.load(result)
    os.wait()
print(json.dumps(found))
"""

FILL_PROGRAM = """
import json
import torch
from embeddings.table import fill_uniform

def status_bytes(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

def fill(rows):
    out = torch.empty(rows, 64)
    fill_uniform(out, seed=1, table_name="t", row_start=0, col_start=0, dim=64, bound=0.1)
    return out

fill(1)
before = status_bytes("VmRSS")
out = fill(1_000_000)
print(json.dumps({"table_bytes": out.nbytes, "extra_bytes": status_bytes("VmHWM") - before}))
"""


CASES = [
    ("torch", "sgd"),
    ("torch", "rowwise_adagrad"),
    ("torch", "adagrad"),
    ("torch", "adam"),
    ("fbgemm", "sgd"),
    ("fbgemm", "rowwise_adagrad"),
    ("fbgemm", "adagrad"),
]


@pytest.fixture(scope="module")
def memory_of_steps() -> dict[str, Any]:
    """What `STEPS_PROGRAM` measures, by case."""
    return run_python(STEPS_PROGRAM, json.dumps(CASES))


@pytest.mark.parametrize(("backend", "name"), CASES)
def test_a_steps_memory_follows_the_batch(
    backend: str, name: str, memory_of_steps: dict[str, Any]
) -> None:
    """B39: 2,000,000 rows of 64 (512 MB), 2,048 samples of 4 ids (2 MB of rows)."""
    measured = memory_of_steps[f"{backend} {name}"]
    assert measured["table_bytes"] == 512_000_000
    assert measured["extra_bytes"] < 0.05 * measured["table_bytes"], measured


def test_filling_a_table_needs_little_beside_it() -> None:
    measured = run_python(FILL_PROGRAM)
    assert measured["table_bytes"] == 256_000_000
    assert measured["table_bytes"] <= measured["extra_bytes"] <= 1.3 * measured["table_bytes"]
