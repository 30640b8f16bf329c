"""Tables in host memory at their edges: a step that doesn't fit, rows that are overwritten while
copies are staged, and ends without `close`."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch

from embeddings import RowOptimizerConfig, ShardedEmbeddings, SingleProcess
from embeddings.host.executor import QueueThreads, ThreadExecutor
from embeddings.host.host_tables import HostSettings
from embeddings.host.staging import StagingOverflow
from tests.host_cases import build_host, first_rows, host_plan, train_host
from tests.sharding_cases import TABLES, History, Model, draw_batches, gradient_of
from tests.stepped_executor import SteppedExecutor
from tests.thread_ranks import run_ranks

MODEL = Model(RowOptimizerConfig("adam", weight_decay=0.01))


def assert_same_tables(found: History, expected: History) -> None:
    for table, values in expected.tables.items():
        for name, array in values.items():
            assert torch.equal(found.tables[table][name], array), f"{table}.{name}"


# ------------------------------------------------------------------------------- what doesn't fit


def test_f24_a_step_too_large_for_one_group_is_staged_in_none() -> None:
    """And the next step, which fits, trains as if there had been no other."""
    batches = draw_batches(MODEL, "one_hot", 12)
    plan = host_plan("table_wise", 1, TABLES)

    def build() -> ShardedEmbeddings:
        return build_host(SingleProcess(), MODEL, plan, HostSettings(), None)

    def step(embeddings: ShardedEmbeddings, number: int) -> None:
        batch = embeddings.plan_batch(batches[number])
        gradient = gradient_of(embeddings.lookup(batch), batch.global_batch_size)
        embeddings.apply(embeddings.backward(batch, gradient, 0.1), 0.1)

    tables: list[dict[str, Any]] = []
    for overflows in (False, True):
        embeddings = build()
        assert embeddings.host is not None
        rings = embeddings.host._rings
        assert len(rings) > 2
        if overflows:
            # The last group's buffers hold one row: batch 0 doesn't fit, after others did.
            rings[-1]._limit_rows = 0
            with pytest.raises(StagingOverflow):
                embeddings.stage([embeddings.plan_batch(batches[0])])
            assert embeddings.host.num_staged == 0
            assert all(ring.num_in_use == 0 for ring in rings)
            rings[-1]._limit_rows = None
        for number in (1, 3, 4):
            step(embeddings, number)
        tables.append({t.name: embeddings.read(t.name, 0, t.rows) for t in TABLES})
        embeddings.close()
    for table, values in tables[0].items():
        for name, array in values.items():
            assert torch.equal(tables[1][table][name], array), f"{table}.{name}"


def test_f24_memory_that_can_not_be_had_leaves_nothing_staged() -> None:
    """A buffer of the last group has to grow, and can't."""

    class Exhausted(ThreadExecutor):
        rows_left = 10**9

        def host_empty(self, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
            if num_rows > self.rows_left:
                raise MemoryError("no memory for a buffer")
            return super().host_empty(num_rows, width, dtype)

    executor = Exhausted()
    plan = host_plan("table_wise", 1, TABLES)
    settings = HostSettings(batch_rows=1)
    embeddings = build_host(SingleProcess(), MODEL, plan, settings, executor)
    assert embeddings.host is not None
    batch = embeddings.plan_batch(draw_batches(MODEL, "one_hot", 1)[0])
    executor.rows_left = 4
    with pytest.raises(MemoryError):
        embeddings.stage([batch])
    assert embeddings.host.num_staged == 0
    executor.rows_left = 10**9
    embeddings.lookup(batch)
    assert embeddings.host.num_staged == 1
    embeddings.close()


# ------------------------------------------------------------------------------- overwritten rows


def overwrite(step: int, embeddings: ShardedEmbeddings) -> None:
    """Some rows of every table, weights or state, as a load does."""
    if step not in (3, 4, 9):
        return
    generator = torch.Generator().manual_seed(step)
    for table in embeddings.tables:
        stop = min(table.rows, 4 + step)
        name = ("weight", "exp_avg")[step % 2]
        rows = torch.rand(stop, table.dim, generator=generator, dtype=torch.float64)
        embeddings.store.write(table.name, 0, {name: rows})
    embeddings.rows_changed()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("lookahead", [1, 4])
@pytest.mark.parametrize("has_link", [False, True])
def test_f26_rows_written_while_others_are_staged_are_kept(
    lookahead: int, has_link: bool, world_size: int
) -> None:
    """To the bit as with nothing staged and nothing hot; rows that weren't written keep what was
    trained, also where the newest copy was hot or staged."""
    batches = draw_batches(MODEL, "multi_hot", 14)
    plan = host_plan("row_wise", world_size, TABLES)
    cases = [
        (HostSettings("gather", 1, 4), 0.0),
        (HostSettings("lookahead", lookahead, 4), 0.3),
    ]
    runs = []
    for settings, hot_share in cases:

        def work(comm: Any, settings: Any = settings, hot_share: float = hot_share) -> History:
            return train_host(
                comm, MODEL, plan, batches, settings, first_rows(TABLES, hot_share),
                executor=SteppedExecutor(comm.rank, has_link=has_link), between=overwrite,
            )[0]  # fmt: skip

        runs.append(run_ranks(world_size, work)[0])
    assert_same_tables(runs[1], runs[0])
    plain = train_host(SingleProcess(), MODEL, host_plan("row_wise", 1, TABLES), batches,
                       HostSettings(), first_rows(TABLES, 0.0))[0]  # fmt: skip
    assert not torch.equal(plain.tables["user"]["weight"], runs[0].tables["user"]["weight"])


def test_f26_hot_rows_may_be_chosen_anew_after_rows_were_written() -> None:
    """What was updated before isn't taken for newer than what was written."""
    plan = host_plan("table_wise", 1, TABLES)
    embeddings = build_host(SingleProcess(), MODEL, plan, HostSettings(), None)
    assert embeddings.host is not None
    embeddings.host.choose_rows(first_rows(TABLES, 1.0))
    batch = embeddings.plan_batch(draw_batches(MODEL, "one_hot", 1)[0])
    gradient = gradient_of(embeddings.lookup(batch), batch.global_batch_size)
    embeddings.apply(embeddings.backward(batch, gradient, 0.1), 0.1)
    rows = torch.full((37, 8), 2.0, dtype=torch.float64)
    embeddings.store.write("user", 0, {"weight": rows})
    embeddings.rows_changed()
    embeddings.host.choose_rows({"user": np.arange(3)})
    found = embeddings.read("user", 0, 37)
    assert found is not None
    assert torch.equal(found["weight"], rows)
    embeddings.close()


# ------------------------------------------------------------------------------------------ ends


def host_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("host-")}


def test_f25_dropped_tables_leave_no_thread() -> None:
    before = host_threads()
    plan = host_plan("table_wise", 1, TABLES)
    embeddings = build_host(SingleProcess(), MODEL, plan, HostSettings("lookahead", 2), None)
    embeddings.lookup(embeddings.plan_batch(draw_batches(MODEL, "one_hot", 1)[0]))
    assert host_threads() > before
    del embeddings
    gc.collect()
    assert host_threads() <= before


def test_f25_the_last_reference_may_be_dropped_by_a_queue() -> None:
    """The thread that finds its queues unused ends them, itself among them."""
    threads = QueueThreads()
    done = threading.Event()
    held = [threads]

    def drop() -> None:
        held.clear()
        done.set()

    threads.put("gather", drop)
    thread = threads._threads["gather"]._thread
    assert thread is not None
    threads._threads["gather"].put(lambda: None)
    del threads
    assert done.wait(30)
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.slow
@pytest.mark.processes
def test_f25_a_process_that_ends_without_close_has_no_thread_left() -> None:
    """A thread that runs while Python ends frees tensors then, and aborts the process."""
    program = """
import atexit, threading

@atexit.register  # Before all others are registered: runs after them.
def tell():
    print("left", [t.name for t in threading.enumerate() if t.name.startswith("host-")])

from embeddings import SingleProcess
from embeddings.host.host_tables import HostSettings
from tests.host_cases import build_host, host_plan
from tests.sharding_cases import TABLES, draw_batches
from tests.unit.test_host_ends import MODEL

plan = host_plan("table_wise", 1, TABLES)
embeddings = build_host(SingleProcess(), MODEL, plan, HostSettings("lookahead", 2), None)
embeddings.lookup(embeddings.plan_batch(draw_batches(MODEL, "one_hot", 1)[0]))
print("begun", any(t.name.startswith("host-") for t in threading.enumerate()))
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == ["begun True", "left []"]
