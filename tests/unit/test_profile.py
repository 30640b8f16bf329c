"""`train.profile`: which steps, what a trace comes to, what a run leaves; that no bit changes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from data.errors import UserError
from dlrm.config import TrainConfig
from dlrm.display import TrainDisplay
from dlrm.phases import PHASES, PhaseTimer, with_other
from dlrm.profile import describe_profile, profiled_steps
from dlrm.profile_trace import PYTHON, WAITING, figures_of, name_trace
from dlrm.recorder import Recorder
from dlrm.run_folder import RunFolder
from tests.commands import dlrm, read_json, read_result, tiny, train_lines, without_plots

# ------------------------------------------------------------------------------------ which steps


@pytest.mark.parametrize(
    ("num_steps", "count", "start", "expected"),
    [
        (1000, 5, None, range(10, 15)),
        (30, 5, None, range(10, 15)),
        (9, 5, None, range(3, 8)),
        (6, 5, None, range(2, 7)),
        (30, 3, 28, range(28, 31)),
    ],
)
def test_the_profiled_steps(num_steps: int, count: int, start: int | None, expected: range) -> None:
    config = TrainConfig(profile=True, profile_steps=count, profile_start=start)
    assert profiled_steps(config, num_steps) == expected


@pytest.mark.parametrize(("num_steps", "start"), [(5, None), (1, None), (12, 9)])
def test_a_run_too_short_is_refused(num_steps: int, start: int | None) -> None:
    config = TrainConfig(profile=True, profile_start=start)
    with pytest.raises(UserError, match=r"train\.profile_steps=5, .*train\.profile_start"):
        profiled_steps(config, num_steps)


def test_impossible_values_are_refused_and_ignored_ones_named() -> None:
    with pytest.raises(UserError, match=r"train\.profile_start=1: must be at least 2"):
        TrainConfig(profile=True, profile_start=1)
    with pytest.raises(UserError, match=r"train\.profile_steps=0: must be at least 1"):
        TrainConfig(profile=True, profile_steps=0)
    with pytest.warns(UserWarning, match=r"train\.profile_steps=3 is ignored: train\.profile is"):
        TrainConfig(profile_steps=3)


# ------------------------------------------------------------------------------- what is recorded


def test_what_the_phases_leave_is_shown_if_it_matters() -> None:
    assert with_other({"forward": 9.0}, 10.0) == {"forward": 9.0, "other": 1.0}
    assert with_other({"forward": 9.8}, 10.0) == {"forward": 9.8}


def test_profiled_steps_are_in_no_figure_of_speed(tmp_path: Path) -> None:
    recorder = Recorder(RunFolder(tmp_path), TrainDisplay(6, enabled=False), log_every=2)
    recorder.slowed_steps = range(3, 6)
    seconds = {1: 0.1, 2: 0.3, 3: 7.0, 4: 9.0, 5: 8.0, 6: 0.2}
    for step, step_s in seconds.items():
        recorder.timer.total_s["forward"] += step_s / 2
        recorder.timer.total_s["data_wait"] += step_s / 4
        recorder.step(step, 0, 100, 0.5, step_s, (0.1, 0.1))
    recorder.close()
    figures = recorder.figures(1.0)
    assert figures["steps"] == 6
    assert figures["samples"] == 600
    assert figures["step_ms_p50"] == pytest.approx(200)
    assert figures["samples_per_s"] == pytest.approx(300 / 0.6, abs=0.1)
    assert figures["data_wait_share"] == pytest.approx(0.25)
    first, profiled, mixed = train_lines(tmp_path)
    assert first["step_ms"] == pytest.approx(200)
    assert "profiled_steps" not in first
    # A line that has no other steps is made of these, and says so.
    assert profiled["step_ms"] == pytest.approx(8000)
    assert profiled["profiled_steps"] == 2
    assert mixed["step_ms"] == pytest.approx(200)
    assert mixed["phase_ms"]["forward"] == pytest.approx(100)
    assert mixed["profiled_steps"] == 1


def test_a_phase_runs_within_what_is_set_around_it() -> None:
    timer = PhaseTimer()
    with timer("forward"):
        pass
    assert timer.total_s["forward"] > 0


# ---------------------------------------------------------------------------- what a trace comes to


def event(name: str, start_us: float, us: float, *, thread: int = 1, op: bool = False) -> Any:
    category = "cpu_op" if op else "user_annotation"
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 7,
        "tid": thread,
        "ts": start_us,
        "dur": us,
        "args": {},
    }


def trace_events() -> list[dict[str, Any]]:
    """Two steps of 10 and 20 ms; an evaluation between them; two collectives of one kind."""
    return [
        {"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "args": {"name": "python"}},
        event("ProfilerStep#1", 0, 12_000),
        event("step 4", 1000, 10_000),
        event("forward", 1000, 6000),
        event("aten::linear", 2000, 4000, op=True),
        event("aten::addmm", 3000, 2500, op=True),
        event("issue rows, 640 bytes", 7000, 0),
        event("c10d::alltoall_base_", 7100, 100, op=True),
        event("gloo:all_to_all", 7500, 3000, thread=2),
        event("wait rows", 8000, 2000),
        event("aten::mm", 12_000, 900, op=True),
        event("step 5", 20_000, 20_000),
        event("backward", 20_000, 18_000),
        event("aten::mm", 21_000, 9000, op=True),
        # Taken up in the other order, as two threads may.
        event("issue rows, 320 bytes", 31_000, 0),
        event("c10d::alltoall_base_", 31_100, 100, op=True),
        event("issue dense, 80 bytes", 33_000, 0),
        event("c10d::allreduce_", 33_100, 100, op=True),
        event("gloo:all_reduce", 33_500, 9000, thread=3),
        event("gloo:all_to_all", 34_000, 1000, thread=2),
    ]


def test_self_times_add_up_to_the_step() -> None:
    figures = figures_of(trace_events())
    assert figures.steps == [4, 5]
    assert figures.step_ms == pytest.approx(15)
    assert set(figures.phase_ms) == set(PHASES)
    assert figures.phase_ms["forward"] == pytest.approx(3)
    assert figures.phase_ms["backward"] == pytest.approx(9)
    found = {o.name: (o.self_ms, o.calls) for o in figures.operators}
    assert found["aten::mm"] == (pytest.approx(4.5), 0.5), "what lies between steps was counted"
    assert found["aten::linear"] == (pytest.approx(0.75), 0.5)
    assert found["aten::addmm"] == (pytest.approx(1.25), 0.5)
    assert found[WAITING][0] == pytest.approx(1)
    assert found[PYTHON][0] == pytest.approx(7.35)
    assert sum(o.share for o in figures.operators) == pytest.approx(1)
    times = [o.self_ms for o in figures.operators]
    assert times == sorted(times, reverse=True)


def test_the_timeline_shows_what_travels() -> None:
    timeline = figures_of(trace_events()).timeline
    assert timeline["step"] == 5
    assert timeline["phases"] == [["backward", 0.0, 18.0]]
    assert ["aten::mm", 1.0, 9.0] in timeline["operators"]
    # The last one ends after the step.
    assert timeline["collectives"] == [["rows", 11.0, 4.0], ["dense", 13.0, 9.5]]


def test_collectives_and_ranks_are_named() -> None:
    trace = {"traceEvents": trace_events()}
    name_trace(trace, 3)
    events = trace["traceEvents"]
    assert events[0]["args"] == {"name": "rank 3"}
    named = [e for e in events if "gloo" in e["name"]]
    assert [e["name"] for e in named] == [
        "rows (gloo:all_to_all)",
        "dense (gloo:all_reduce)",
        "rows (gloo:all_to_all)",
    ]
    assert [e["args"]["sent bytes"] for e in named] == [640, 80, 320]


# ------------------------------------------------------------------------------------ a whole run


def test_a_profiled_run_trains_the_same_model_to_the_bit(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    without_plots(monkeypatch)
    command = ["train", *tiny(tmp_path_factory), "train.max_steps=6", "train.eval_every=2"]
    profiling = ["train.profile=true", "train.profile_steps=2", "train.profile_start=3"]
    plain, profiled = tmp_path / "plain", tmp_path / "profiled"
    assert dlrm(*command, f"hydra.run.dir={plain}") == 0
    capfd.readouterr()
    assert dlrm(*command, *profiling, f"hydra.run.dir={profiled}") == 0
    captured = capfd.readouterr()

    assert not (plain / "profile").exists()
    assert "profile" not in read_result(plain)
    result = read_result(profiled)
    assert result["model_digest"] == read_result(plain)["model_digest"]
    assert result["eval"] == read_result(plain)["eval"]
    profile = result["profile"]
    assert profile["steps"] == [3, 4]
    assert profile["traces"] == ["profile/trace.0.json.gz"]
    # Within the step, the phases leave little; the evaluation after step 4 is in no step.
    assert 0.5 * profile["step_ms"] < sum(profile["phase_ms"].values()) <= profile["step_ms"]
    assert sorted(p.name for p in (profiled / "profile").iterdir()) == [
        "operators.json",
        "timeline.json",
        "trace.0.json.gz",
    ]
    with gzip.open(profiled / profile["traces"][0]) as opened:
        names = [e["name"] for e in json.load(opened)["traceEvents"]]
    expected = {"step 3", "step 4", "plan", "lookup", "forward", "backward", "dense_update"}
    assert expected <= set(names)
    assert "step 2" not in names
    operators = read_json(profiled / "profile" / "operators.json")["operators"]
    assert sum(o["share"] for o in operators) == pytest.approx(1, abs=0.01)

    assert "profile steps 3 to 4 of rank 0" in captured.out
    assert "aten::addmm" in {o["name"] for o in operators}
    # Which operators take longest is a matter of time; that they are told isn't.
    assert profile["operators_top"]
    assert "\n".join(describe_profile(profile)) in captured.out
    assert captured.err == "", "the profiler's own words reached the terminal"
    assert max(len(line) for line in describe_profile(profile)) <= 100


def test_the_command_refuses_what_is_too_short(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    without_plots(monkeypatch)
    run_dir = tmp_path / "run"
    short = ("train.max_steps=3", "train.profile=true", f"hydra.run.dir={run_dir}")
    assert dlrm("train", *tiny(tmp_path_factory), *short) == 2
    error = capsys.readouterr().err
    assert (
        "train.profile_steps=5, from step 2 on, end with step 6, but the run has 3 steps" in error
    )


def test_a_run_that_fails_meanwhile_ends_quietly(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    without_plots(monkeypatch)
    rates = ("optim.sparse.lr=1e30", "optim.dense.lr=1e30")
    profiling = ("train.profile=true", "train.profile_start=2")
    run_dir = tmp_path / "run"
    command = ["train", *tiny(tmp_path_factory), *rates, *profiling, f"hydra.run.dir={run_dir}"]
    assert dlrm(*command) == 1
    error = capfd.readouterr().err
    assert "isn't finite" in error
    assert len(error.splitlines()) == 1, "the profiler, left running, complains"
    assert "profile" not in read_result(run_dir)
