"""`train.profile` over gloo: each rank's trace names its collectives and its waits."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import torch

from dlrm.display import TrainDisplay
from dlrm.profile import StepProfiler
from dlrm.recorder import Recorder
from dlrm.run_folder import RunFolder
from embeddings.communicator import ProcessGroup
from embeddings.shared_memory import SharedMemory
from tests.dist.worker_pool import Workers

NUM_STEPS, PROFILED = 5, range(3, 5)


def profile_steps(
    rank: int, world_size: int, folder: str, shares_memory: bool = False
) -> dict[str, Any]:
    """Steps of two collectives each; figures of the profile, and what was counted in all."""
    comm = SharedMemory(timeout_s=20) if shares_memory else ProcessGroup()
    recorder = Recorder(
        RunFolder.of_this_run(Path(folder)),
        TrainDisplay(NUM_STEPS, enabled=False),
        log_every=1,
        writes=False,
    )
    waits: list[str | None] = []
    comm.on_wait = waits.append
    profiler = StepProfiler(PROFILED, recorder, comm, Path(folder), lambda step, phase: None)
    for step in range(1, NUM_STEPS + 1):
        with recorder.timer("lookup"):
            send = torch.full((world_size,), float(rank))
            ones = [1] * world_size
            pending = comm.all_to_all("rows", send, ones, torch.empty(world_size), ones)
        with recorder.timer("dense_reduce"):
            comm.all_reduce("dense", torch.ones(8)).wait()
            pending.wait()
        recorder.step(step, 0, 1, 0.5, 0.1, (0.1, 0.1))
    recorder.close()
    found = profiler.figures()
    assert found is not None
    return {"figures": found, "waits": waits, "collectives": comm.counters.num_collectives}


def test_traces_name_collectives(workers: Workers, tmp_path: Path) -> None:
    for found in workers(2).run(profile_steps, str(tmp_path)):
        assert found["figures"]["steps"] == list(PROFILED)
        assert found["collectives"]["rows"] == NUM_STEPS, "profiling lost or added a count"
        assert found["waits"] == ["dense", None, "rows", None] * NUM_STEPS
    traces = found["figures"]["traces"]
    assert traces == ["profile/trace.0.json.gz", "profile/trace.1.json.gz"]
    for rank, trace in enumerate(traces):
        with gzip.open(tmp_path / trace) as opened:
            events = json.load(opened)["traceEvents"]
        assert any(e.get("args", {}).get("name") == f"rank {rank}" for e in events)
        names = [e["name"] for e in events]
        for name in ("rows (gloo:all_to_all)", "dense (gloo:all_reduce)", "wait rows"):
            assert names.count(name) == len(PROFILED), name
        sent = {e["args"]["sent bytes"] for e in events if e["name"].startswith("rows (")}
        assert sent == {4}
    timeline = json.loads((tmp_path / "profile" / "timeline.json").read_text())
    assert {kind for kind, _, _ in timeline["collectives"]} == {"rows", "dense"}


def test_collectives_in_shared_memory_last_until_they_are_waited_for(
    workers: Workers, tmp_path: Path
) -> None:
    """Nothing takes them up in between; objects, which go through gloo, aren't taken for them."""
    found, _ = workers(2).run(profile_steps, str(tmp_path), True)
    assert found["figures"]["steps"] == list(PROFILED)
    assert found["waits"] == ["dense", None, "rows", None] * NUM_STEPS
    timeline = json.loads((tmp_path / "profile" / "timeline.json").read_text())
    waits = {kind: start_ms + ms for kind, start_ms, ms in timeline["waits"]}
    ends = {kind: start_ms + ms for kind, start_ms, ms in timeline["collectives"]}
    starts = [start_ms for _, start_ms, _ in timeline["collectives"]]
    assert list(ends) == ["rows", "dense"], "in the order of their issue"
    assert starts == sorted(starts)
    for kind, end_ms in ends.items():
        assert abs(end_ms - waits[kind]) < 1e-3, kind
