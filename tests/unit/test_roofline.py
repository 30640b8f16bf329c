"""The roofline: its arithmetic with given limits, what a step has to do, and what is shown."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from data.parquet import PreparedDataset
from data.synthetic import SyntheticConfig, synthesise
from dlrm.bench import machine_limits
from dlrm.bench.batches import memory_batches
from dlrm.bench.machine_limits import MachineLimits
from dlrm.bench.network import Network
from dlrm.bench.roofline import (
    PhaseWork,
    RooflineTask,
    StepCounts,
    bench_roofline,
    count_step,
    measure_roofline,
    phase_works,
    roofline,
    roofline_lines,
    roofline_table,
)
from dlrm.bench.train_bench import plan_of
from dlrm.bench.turns import MEASUREMENTS, Session
from dlrm.config import BenchRun
from dlrm.launch import single_process
from dlrm.run_folder import RunFolder
from tests.commands import compose_config

# 1 GFLOP, 1 MB of a stream, 0.1 MB of rows, 0.1 MB sent: each takes 1 ms, a collective 0.1 ms.
LIMITS = MachineLimits({"fp32": 1e12, "bf16": 2e12}, 1e9, 1e8, 64, 2**28, 1e8, 100.0)
ONE_PROCESS = replace(LIMITS, link_bytes_per_s=None, latency_us=None)
COUNTS = StepCounts(
    num_samples=1000,
    num_ids=5000,
    pooled_width=20,
    requested_rows=300,
    requested_bytes=9000,
    held_bytes=8000,
    held_state_bytes=4000,
    layers=[(10, 100), (100, 10)],
    num_dense_weights=2110,
    dense_optimizer="adagrad",
)
SENT = {"counts": 1.0, "ids": 2.0, "rows": 30.0, "grads": 400.0, "replicas": 50.0, "dense": 6000.0}
ISSUED = {"counts": 1.0, "ids": 1.0, "rows": 1.0, "grads": 1.0, "replicas": 1.0, "dense": 2.0}


def figures(step_ms: float, **changes: Any) -> dict[str, Any]:
    """A measurement of this system, as far as the roofline reads it."""
    phase_ms = {"data_wait": 0.1, "plan": 1.0, "lookup": 2.0, "forward": 10.0, "backward": 20.0}
    return {
        "step_ms_p50": step_ms,
        "step_ms": [step_ms] * 3,
        "phase_ms": phase_ms | {"dense_reduce": 1.0, "apply": 2.0, "dense_update": 1.0},
        "sent_bytes": SENT,
        "collectives": ISSUED,
        "note": "backend torch, sharding auto",
        **changes,
    }


# -------------------------------------------------------------------------------------- arithmetic


def test_a_phase_is_bound_by_what_takes_longest() -> None:
    both = PhaseWork(flops=3e9, stream_bytes=2e6)
    assert both.least(LIMITS, "fp32") == ("flops", pytest.approx(3.0))
    assert both.least(LIMITS, "bf16") == ("memory", pytest.approx(2.0))
    # One memory: rows and streams take turns.
    bound, least_ms = PhaseWork(stream_bytes=1e6, gather_bytes=3e5).least(LIMITS, "fp32")
    assert (bound, least_ms) == ("memory", pytest.approx(4.0))
    bound, least_ms = PhaseWork(sent_bytes=2e5, num_collectives=3).least(LIMITS, "fp32")
    assert (bound, least_ms) == ("link", pytest.approx(2.3))
    assert PhaseWork(sent_bytes=2e5).least(ONE_PROCESS, "fp32")[1] == 0.0


def test_the_work_of_each_phase() -> None:
    works = phase_works(COUNTS, SENT, ISSUED, precision="fp32", is_fused=False)
    products = 2 * 1000 * 10 * 100
    layer_bytes = 2 * 4 * (1000 * 110 + 1000)
    assert works["plan"] == PhaseWork(
        stream_bytes=16 * 5000 + 8 * 300, sent_bytes=3, num_collectives=2
    )
    assert works["lookup"] == PhaseWork(
        stream_bytes=4 * 1000 * 20, gather_bytes=9000, sent_bytes=30, num_collectives=1
    )
    assert works["forward"] == PhaseWork(flops=2 * products, stream_bytes=layer_bytes)
    # The first layer's input needs no gradient: three products instead of four.
    assert works["backward"] == PhaseWork(
        flops=3 * products,
        stream_bytes=2 * layer_bytes + 4 * 1000 * 20 + 9000,
        sent_bytes=450,
        num_collectives=2,
    )
    assert works["dense_reduce"] == PhaseWork(sent_bytes=6000, num_collectives=2)
    assert works["apply"] == PhaseWork(stream_bytes=8000, gather_bytes=2 * 12_000)
    assert works["dense_update"] == PhaseWork(stream_bytes=4 * 2110 * 5)


def test_a_fused_kernel_updates_within_backward() -> None:
    works = phase_works(COUNTS, {}, {}, precision="bf16", is_fused=True)
    assert works["apply"] == PhaseWork()
    assert works["backward"].gather_bytes == 2 * 12_000
    assert works["forward"].stream_bytes == 2 * 2 * (1000 * 110 + 1000), "bf16 has two bytes"


def measured() -> dict[str, Any]:
    return {"limits": asdict(ONE_PROCESS), "counts": asdict(COUNTS), "num_threads": 1}


NETWORK = {
    "measured_bytes_per_s": 1e8,
    "all_to_all_bytes_per_s": 5e7,
    "round_trip_us": 200.0,
}


def test_each_phase_is_compared_with_its_least_time() -> None:
    """Of three turns the one with the median step; sums and the rest are shown."""
    turns = [figures(60.0), figures(40.0), figures(50.0, note="backend fbgemm, one process")]
    found = roofline(measured(), {"fp32": turns}, NETWORK)
    assert found["limits"] == asdict(LIMITS), "the link's rate is the better of both ways"
    rows = {row["phase"]: row for row in found["phases"]["fp32"]}
    assert rows["step"]["measured_ms"] == 50.0
    assert rows["other"]["measured_ms"] == pytest.approx(50.0 - 37.1)
    assert rows["apply"]["least_ms"] == 0.0, "of a turn with a fused kernel"
    assert rows["apply"]["ratio"] is None
    assert rows["dense_reduce"]["least_ms"] == pytest.approx(0.06 + 0.2)
    assert rows["dense_reduce"]["ratio"] == pytest.approx(1.0 / 0.26)
    assert rows["dense_reduce"]["bound"] == "link"
    # In backward alone memory takes longer than the link; of the whole step the cores do.
    works = phase_works(COUNTS, SENT, ISSUED, precision="fp32", is_fused=True).values()
    times = [work.times_ms(LIMITS, "fp32") for work in works]
    assert rows["step"]["least_ms"] == pytest.approx(sum(max(list(t.values())[:2]) for t in times))
    assert rows["step"]["bound"] == "cores"
    json.dumps(found, allow_nan=False)


def test_the_step_is_bound_by_a_slow_link() -> None:
    slow = NETWORK | {"measured_bytes_per_s": 1e5, "all_to_all_bytes_per_s": 1e5}
    step = roofline(measured(), {"fp32": [figures(900.0)]}, slow)["phases"]["fp32"][-1]
    assert step["bound"] == "link"
    # 6,483 bytes and 7 collectives; each phase alone has less of them.
    assert step["least_ms"] == pytest.approx(64.83 + 0.7)
    assert step["ratio"] == pytest.approx(900 / 65.53)


def test_a_ratio_below_one_is_explained() -> None:
    assert "a ratio below 1" not in "\n".join(roofline_table(roofline(measured(), {})))
    phase_ms = figures(50.0)["phase_ms"] | {"dense_reduce": 0.01}
    found = roofline(measured(), {"fp32": [figures(50.0, phase_ms=phase_ms)]}, NETWORK)
    assert "a ratio below 1" in "\n".join(roofline_table(found))
    assert "a ratio below 1" in roofline_lines(found)[-1]


def test_what_is_shown_fits_a_terminal_and_a_document() -> None:
    turns = [figures(50.0)]
    found = roofline(measured(), {"fp32": turns, "bf16": turns}, NETWORK)
    lines = roofline_table(found)
    assert max(map(len, lines)) <= 100
    text = "\n".join(lines)
    for expected in ("dlrm fp32", "dlrm bf16", "dense reduce", "link: 0.01 MB, 2 collective(s)"):
        assert expected in text
    markdown = roofline_lines(found)
    assert "| dlrm fp32 | least, ms | measured, ms | ratio | bound by |" in markdown
    assert any(line.startswith("| step |") for line in markdown)
    assert all(line.count("|") == 6 for line in markdown if line.startswith("|"))


def test_limits_are_shown_without_this_system() -> None:
    found = roofline(measured(), {})
    assert found["phases"] == {}
    assert "memory 1.0 GB/s" in "\n".join(roofline_table(found)).replace("\n", " ")


# ------------------------------------------------------------------------- what a step has to do


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    root = tmp_path_factory.mktemp("roofline") / "d"
    synthesise(
        SyntheticConfig(num_train=600, num_valid=0, num_test=0, cardinality_scale=1e-5), root
    )
    return PreparedDataset(root)


@pytest.fixture
def config() -> BenchRun:
    composed: BenchRun = compose_config(
        "bench",
        *("data.batch_size=128", "model.embedding_dim=4", "bench.steps=2"),
        *("model.bottom_mlp=[8]", "model.top_mlp=[7]", "optim=rowwise_adagrad"),
    )
    return composed


@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_are_counted_once(config: BenchRun, dataset: PreparedDataset, world_size: int) -> None:
    """Against sets of (feature, id), where every feature has a table of its own."""
    config = replace(
        config,
        launch=replace(config.launch, nproc=world_size),
        sharding=replace(config.sharding, layout="table_wise"),
    )
    counts = count_step(config, dataset, plan_of(config, dataset))

    def distinct(ranks: int) -> float:
        batches = memory_batches(
            dataset,
            "train",
            batch_size=128,
            num_batches=2,
            bag_size=1,
            seed=config.seed,
            rank=0,
            world_size=ranks,
        )
        found = 0
        for batch in batches:
            values = batch.ids.values_L.tolist()
            size = batch.batch_size
            found += len({(place // size, row) for place, row in enumerate(values)})
        return found / 2

    assert counts.num_samples == 128 / world_size
    assert counts.num_ids == 26 * 128 / world_size
    assert counts.requested_rows == distinct(world_size)
    assert counts.requested_bytes == 4 * 4 * distinct(world_size)
    assert counts.held_bytes == 4 * 4 * distinct(1) / world_size
    assert counts.held_state_bytes == 4 * distinct(1) / world_size
    assert counts.pooled_width == 26 * 4
    assert counts.layers[0] == (13, 8)
    assert counts.layers[-1] == (7, 1)


def test_a_benchmark_writes_it_down(
    config: BenchRun, dataset: PreparedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With small arrays and few tries, in this process."""
    monkeypatch.setattr(machine_limits, "last_cache_bytes", lambda: 0)
    monkeypatch.setattr(machine_limits, "_LEAST_ARRAYS_BYTES", 2**20)
    monkeypatch.setattr(machine_limits, "_TRY_S", 0.0)

    class Here(Session):
        def launch(self, work: Any) -> Any:
            entry, arguments = work
            assert entry is measure_roofline
            assert isinstance(arguments[0], RooflineTask)
            return entry(single_process(), *arguments)

    folder = RunFolder(tmp_path / "run")
    lines = [
        {"side": "dlrm", "precision": "fp32", "repeat": 0, "failure": None, **figures(50.0)},
        {"side": "dlrm", "precision": "bf16", "repeat": 0, "failure": "no"},
        {"side": "gemm_floor", "precision": "fp32", "repeat": 0, "failure": None},
    ]
    (folder.path / MEASUREMENTS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    said: list[str] = []
    session = Here(config, folder, {}, said.append, Network("loopback"))
    bench_roofline(session, dataset.root, plan_of(config, dataset))
    found = session.result["roofline"]
    limits = MachineLimits(**found["limits"])
    assert min(limits.gemm_flops_per_s.values()) > 0
    assert min(limits.stream_bytes_per_s, limits.gather_bytes_per_s) > 0
    assert limits.row_bytes == 16
    assert list(found["phases"]) == ["fp32"], "only what was measured"
    assert all(row["measured_ms"] >= 0 for row in found["phases"]["fp32"])
    assert "dlrm fp32" in said[0]


def test_the_last_cache_is_the_largest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_limits, "_CACHE", tmp_path)
    assert machine_limits.last_cache_bytes() == 0
    for number, size in enumerate(("48K", "32K", "2048K", "260M")):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}" / "size").write_text(f"{size}\n")
    assert machine_limits.last_cache_bytes() == 260 * 2**20
