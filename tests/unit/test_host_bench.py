"""`dlrm bench host`: rates follow from what was counted, modes that differ are found, and a tiny
run ends with the same rows in every mode."""

from __future__ import annotations

import importlib.util
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from dlrm.bench.comparison import Comparison, Measurement, Variant, compare
from dlrm.bench.host_bench import host_yardstick, reached_goals
from dlrm.bench.host_sides import Compute, HostTask, measure_host, typical
from dlrm.bench.host_sweep import host_sweep, markdown_lines, picture, print_sweep
from dlrm.bench.host_work import HostWorkload, StepCounts, choose_rates, hot_bytes
from dlrm.bench.table import MAX_WIDTH, print_comparison
from dlrm.config import BenchRun
from dlrm.launch import single_process
from embeddings.host.cost import Mode, StepWork, predict_step_s
from tests.commands import compose_config, dlrm, read_result

TINY = (
    "kind=host",
    "data.batch_size=64",
    "model.embedding_dim=4",
    "launch.num_threads=1",
    "sharding.memory=host",
    "sharding.host.hot_mb=0.02",
    "sharding.host.whole_rows=20",
    "bench.steps=6",
    "bench.warmup_steps=2",
    "bench.host.table_scale=0.0001",
    "bench.host.dense_ms=1",
    "bench.host.stage_share=1",
    "bench.host.sweep_hot_mb=[0,0.02,1]",
    "bench.host.sweep_link_gb_s=[1.5,25]",
)
MODES: tuple[Mode, ...] = ("gather", "lookahead", "hotline")


@pytest.fixture
def config() -> BenchRun:
    composed: BenchRun = compose_config("bench", *TINY)
    return composed


def counted(config: BenchRun, workload: HostWorkload, lookahead: int) -> StepCounts:
    host = config.sharding.host
    return workload.count(workload.hot_set(hot_bytes(host.hot_mb), host.whole_rows), lookahead)


@pytest.fixture(scope="module")
def workload() -> HostWorkload:
    """That of the tiny configuration; nothing changes it."""
    return HostWorkload.draw(compose_config("bench", *TINY))


# ---------------------------------------------------------------------------------------- counts


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_counts_are_those_of_sets(lookahead: int, config: BenchRun, workload: HostWorkload) -> None:
    """Of every step with plain sets: what is held by the steps staged before and after."""
    host = config.sharding.host
    hot = workload.hot_set(hot_bytes(host.hot_mb), host.whole_rows)
    found = workload.count(hot, lookahead)
    names = [table.name for table in workload.counts]
    hot_rows = {(name, row) for name in names for row in hot.ids[name].tolist()}
    rows = [
        {(name, row) for name, ids_B in zip(names, ids_FB, strict=True) for row in ids_B.tolist()}
        for ids_FB in workload.ids_TFB
    ]
    cold = [of_step - hot_rows for of_step in rows]
    for step, of_step in enumerate(cold):
        before = set().union(*cold[max(0, step - lookahead) : step])
        after = set().union(*cold[step + 1 : step + 1 + lookahead])
        assert found.unique_T[step] == len(rows[step])
        assert found.cold_T[step] == len(of_step)
        assert found.fetched_T[step] == len(of_step - before)
        assert found.written_T[step] == len(of_step - after)
        samples = workload.ids_TFB[step].T.tolist()
        all_hot = [set(zip(names, sample, strict=True)) <= hot_rows for sample in samples]
        assert found.hot_samples_T[step] == sum(all_hot)
    assert 0 < sum(found.hot_samples_T) < workload.num_steps * config.data.batch_size
    assert (sum(found.written_T) < sum(found.cold_T)) == (lookahead > 0)


def test_hot_rows_are_chosen_by_other_samples_than_those_of_the_steps(
    config: BenchRun, workload: HostWorkload
) -> None:
    again = HostWorkload.draw(config)
    assert np.array_equal(workload.ids_TFB, again.ids_TFB)
    later = HostWorkload.draw(replace(config, seed=1))
    assert not np.array_equal(workload.ids_TFB, later.ids_TFB)
    lookups = {table.num_lookups for table in workload.counts}
    assert len(lookups) == 1
    assert lookups.pop() > workload.ids_TFB[:, 0].size
    for table, ids_TB in zip(workload.counts, workload.ids_TFB.swapaxes(0, 1), strict=True):
        assert 0 <= ids_TB.min() <= ids_TB.max() < table.rows
        assert table.record_bytes == 2 * 4 * config.model.embedding_dim  # adagrad


def test_work_is_the_mean_over_the_measured_steps(config: BenchRun, workload: HostWorkload) -> None:
    counts = counted(config, workload, 2)
    work = counts.work(config, workload)
    assert workload.num_steps == 2 + 6 + config.sharding.host.lookahead
    assert work.num_cold == pytest.approx(counts.cold_T[2:8].mean())
    assert work.num_fetched == pytest.approx(counts.fetched_T[2:8].mean())
    assert work.num_forwarded + work.num_written == pytest.approx(work.num_cold)
    assert work.pooled_bytes == 64 * 26 * 4 * 4
    assert (work.row_bytes, work.record_bytes) == (16, 32)


# ----------------------------------------------------------------------------------------- rates


@pytest.mark.parametrize("share", [0.5, 1.5, 4.0])
def test_the_stages_of_gather_are_the_given_share_of_the_dense_time(
    share: float, config: BenchRun, workload: HostWorkload
) -> None:
    config.bench.host.stage_share, config.bench.host.dense_ms = share, 20.0
    work = counted(config, workload, 2).work(config, workload)
    rates, dense = choose_rates(config, work)
    assert dense.of_s(work.num_samples) == pytest.approx(0.020)
    assert dense.fixed_s == pytest.approx(0.1 * 0.020)
    assert predict_step_s("gather", work, rates, dense) == pytest.approx(0.020 * (1 + share))


def test_rates_of_nothing_are_refused(config: BenchRun, workload: HostWorkload) -> None:
    everything = workload.hot_set(workload.table_bytes, 0)
    work = workload.count(everything, 1).work(config, workload)
    assert work.all_hot_share == 1.0
    with pytest.raises(ValueError, match=r"sharding\.host\.hot_mb=0\.02: every row .* is hot"):
        choose_rates(config, work)


def test_tables_that_do_not_fit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dlrm.bench.host_bench.available_bytes", lambda: 1 << 10)
    assert dlrm("bench", "host", *TINY[1:], "hydra.run.dir=run") == 2
    assert "bench.host.table_scale=0.0001: 1 MiB of memory are needed" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("dense_ms", "0", "must be a number above 0"),
        ("stage_share", "-1", "must be a number above 0"),
        ("stage_share", "inf", "must be a number above 0"),
        ("table_scale", "0", "must be a number above 0"),
        ("row_tolerance", "nan", "must be a number above 0"),
        ("fixed_share", "1.5", "must be 0 to 1"),
        ("zipf", "1.0", "must exceed 1"),
        ("sweep_latency_us", "-1", "must be at least 0"),
        ("sweep_hot_mb", "[]", "name at least one number, each at least 0"),
        ("sweep_hot_mb", "[8,8]", "must rise, each number once"),
        ("sweep_link_gb_s", "[0,12]", "name at least one number, each above 0"),
        ("sweep_link_gb_s", "[25,12]", "must rise, each number once"),
    ],
)
def test_bad_keys_are_refused_by_name(key: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"bench\.host\.{key}=.*{message}"):
        compose_config("bench", *TINY, f"bench.host.{key}={value}")


# --------------------------------------------------------------------------------------- compute


class FakeClock:
    """A clock that only sleeping and working move."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def pass_s(self, seconds: float) -> None:
        """Time passes."""
        self.now_s += seconds


def test_a_pass_takes_what_it_is_given_beside_its_stalls() -> None:
    clock, stalled_s = FakeClock(), [0.0]
    compute = Compute(lambda: stalled_s[0], clock=clock, sleep=clock.pass_s)
    compute.begin()
    clock.pass_s(3.0)  # Of which two were waited for rows.
    stalled_s[0] += 2.0
    compute.expect(10.0)
    compute.end()
    assert clock.now_s == pytest.approx(100 + 2 + 10)
    compute.end()
    assert clock.now_s == pytest.approx(112), "a pass ends once"
    assert (compute.num_passes, compute.num_late) == (1, 0)
    compute.begin()
    clock.pass_s(12.0)
    compute.expect(10.0)
    compute.end()
    assert clock.now_s == pytest.approx(124), "what took longer isn't slept"
    assert (compute.num_passes, compute.num_late) == (2, 1)
    assert compute.busy_s == pytest.approx(1 + 12)


def test_bursts_even_out_and_hiccups_are_passed_over() -> None:
    assert typical([10, 10, 70] * 4, 3) == pytest.approx(30)
    assert typical([30] * 11 + [500], 3) == pytest.approx(30)
    assert typical([4, 8], 3) == pytest.approx(6)
    assert typical([5, 7, 9, 11], 3) == pytest.approx(8), "what is left over belongs to the last"


# ------------------------------------------------------------------------------------ comparison


def figures(step_ms: float, predicted_ms: float, **more: Any) -> dict[str, Any]:
    return {
        "step_ms_p50": step_ms,
        "predicted_ms": predicted_ms,
        "error": step_ms / predicted_ms - 1,
        "step_ms_mean": step_ms,
        "stall_ms": 1.0,
        "busy_ms": 14.0,
        "late_share": 0.0,
        "moved_bytes": 3e5,
        "counted": {"cold": 9, "fetched": 9, "written": 9, "hot_samples": 5},
        "num_forwarded": 0,
        "start_digest": "start",
        "rows_digest": "end",
        "rows_moved": 0.5,
        "rows_difference": 0.0,
        "num_threads": 1,
        "note": "a note",
    } | more


SAME = {"cold": 9, "fetched": 9, "written": 9, "hot_samples": 5}
AHEAD = {"cold": 9, "fetched": 7, "written": 7, "hot_samples": 5}
EXPECTED = {"gather": SAME, "lookahead": AHEAD, "hotline": SAME}
GOOD: dict[str, dict[str, Any]] = {
    "gather": figures(102, 100),
    "lookahead": figures(41, 40, counted=AHEAD, num_forwarded=2),
    "hotline": figures(82, 80, rows_digest="else", rows_difference=2e-6),
}


def compared(
    changes: dict[str, dict[str, Any]] | None = None, num_turns: int = 2, only_last: bool = False
) -> Comparison:
    """A comparison where some sides have other figures, in all turns or only in the last."""
    measurements = []
    for turn in range(num_turns):
        for side, good in GOOD.items():
            change = (changes or {}).get(side, {})
            applies = not only_last or turn == num_turns - 1
            measurements.append(
                Measurement(Variant(side, ""), turn, good | (change if applies else {}))
            )
    yardstick = host_yardstick(1e-4, EXPECTED)
    return compare([Variant(side, "") for side in GOOD], measurements, yardstick)


def test_equal_rows_are_no_problem_and_the_table_fits() -> None:
    comparison = compared()
    assert comparison.problems == []
    text = io.StringIO()
    print_comparison(comparison, Console(file=text, width=MAX_WIDTH, no_color=True))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= MAX_WIDTH
    cells = next(line for line in lines if line.startswith("hotline ")).split()
    assert cells[-6:] == ["80.0", "2.5", "1.0", "14.0", "0", "0.300"]
    assert json.loads(json.dumps(comparison.as_dict()))["problems"] == []


@pytest.mark.parametrize(
    ("side", "change", "message"),
    [
        ("lookahead", {"rows_digest": "other"}, "not all end with the same rows"),
        ("hotline", {"start_digest": "other"}, "not all start with the same rows"),
        ("hotline", {"rows_difference": 2e-4}, "hotline ends with other rows than the first"),
        ("hotline", {"rows_difference": float("inf")}, "hotline ends with other rows"),
        ("gather", {"rows_difference": float("nan")}, "gather ends with other rows"),
        ("gather", {"rows_moved": 0.0}, "gather has updated no row"),
        ("gather", {"moved_bytes": 0.0}, "gather has moved no byte"),
        ("lookahead", {"num_forwarded": 0}, "lookahead has forwarded no row"),
        ("lookahead", {"counted": SAME}, "what was counted before: fetched 9 of 7, written 9 of 7"),
    ],
)
def test_what_must_agree_makes_the_benchmark_fail(
    side: str, change: dict[str, Any], message: str
) -> None:
    problems = compared({side: change}).problems
    assert any(message in problem for problem in problems), problems


def test_no_row_written_back_is_a_problem() -> None:
    nothing = AHEAD | {"written": 0}
    problems = compared({"lookahead": {"counted": nothing}}).problems
    assert any("lookahead has written no row back" in problem for problem in problems)


def test_a_mode_that_ends_otherwise_in_another_turn_is_a_problem() -> None:
    (problem,) = compared({"hotline": {"rows_digest": "third"}}, only_last=True).problems
    assert problem.startswith("not all end in every turn with the same rows")
    assert "hotline else, hotline third" in problem


def test_late_passes_are_told() -> None:
    def told(share: float) -> bool:
        notes = compared({"gather": {"late_share": share}}).notes
        return any("raise bench.host.dense_ms" in line for line in notes)

    assert told(0.05)
    assert not told(0.0)


def goals_of(**step_ms: float) -> dict[str, tuple[bool, float]]:
    predicted = {"gather": 100.0, "lookahead": 40.0, "hotline": 80.0}
    turns = {
        Variant(side, ""): [Measurement(Variant(side, ""), 0, figures(ms, predicted[side]))]
        for side, ms in step_ms.items()
    }
    goals = reached_goals(turns, {side: ms / 1e3 for side, ms in predicted.items()})
    return {goal.name: (goal.is_reached, round(goal.value, 3)) for goal in goals}


def test_goals_are_errors_of_ten_percent_and_nine_tenths_of_the_speed_up() -> None:
    assert goals_of(gather=105, lookahead=40, hotline=73) == {
        "gather": (True, 0.05),
        "lookahead": (True, 0.0),
        "hotline": (True, 0.088),
        "speed-up": (True, 1.05),
    }
    assert goals_of(gather=100, lookahead=45) == {
        "gather": (True, 0.0),
        "lookahead": (False, 0.125),
        "speed-up": (False, 0.889),
    }
    assert goals_of(hotline=71.2) == {"hotline": (False, 0.11)}


# ----------------------------------------------------------------------------------------- sides


def test_every_mode_ends_with_the_same_rows(
    config: BenchRun, workload: HostWorkload, tmp_path: Path
) -> None:
    work = counted(config, workload, config.sharding.host.lookahead).work(config, workload)
    rates, dense = choose_rates(config, work)
    found = {
        mode: measure_host(single_process(), HostTask(config, mode, rates, dense, 0.002, tmp_path))
        for mode in MODES
    }
    gather, lookahead, hotline = (found[mode] for mode in MODES)
    assert gather["rows_difference"] == 0.0
    assert gather["rows_digest"] == lookahead["rows_digest"]
    assert gather["start_digest"] == lookahead["start_digest"] == hotline["start_digest"]
    assert 0.0 < hotline["rows_difference"] < 1e-5, "hotline sums in another order"
    for mode, figures_of_mode in found.items():
        counts = counted(
            config, workload, config.sharding.host.lookahead if mode == "lookahead" else 0
        )
        assert figures_of_mode["counted"]["cold"] == counts.cold_T.sum(), mode
        assert figures_of_mode["counted"]["written"] == counts.written_T.sum(), mode
        assert figures_of_mode["rows_moved"] > 0.01, mode
        assert len(figures_of_mode["step_ms"]) == 6, mode
    assert lookahead["num_forwarded"] > 0
    assert lookahead["moved_bytes"] < gather["moved_bytes"]


def test_other_rows_are_found(
    config: BenchRun, workload: HostWorkload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mode whose forwarded records don't arrive."""
    work = counted(config, workload, config.sharding.host.lookahead).work(config, workload)
    rates, dense = choose_rates(config, work)

    def measured(mode: Mode) -> dict[str, Any]:
        return measure_host(single_process(), HostTask(config, mode, rates, dense, 0.002, tmp_path))

    gather = measured("gather")
    monkeypatch.setattr(
        "embeddings.host.cold_rows.ColdRows._forward",
        lambda self, records, forward: forward.target.buffer.device_KR.index_fill_(
            0, torch.from_numpy(forward.target_M), 0.5
        ),
    )
    lookahead = measured("lookahead")
    assert lookahead["rows_digest"] != gather["rows_digest"]
    assert lookahead["rows_difference"] > config.bench.host.row_tolerance


# ----------------------------------------------------------------------------------------- sweep


def test_the_sweep_has_a_cell_for_each_budget_and_link(
    config: BenchRun, workload: HostWorkload
) -> None:
    found = host_sweep(config, workload)
    places = [(cell["hot_mb"], cell["link_gb_s"]) for cell in found["cells"]]
    assert places == [(mb, link) for mb in (0, 0.02, 1) for link in (1.5, 25)]
    for cell in found["cells"]:
        assert set(cell["speed_up"]) == {*MODES, "classic"}
        assert cell["speed_up"]["classic"] == 1.0
        assert cell["speed_up"][cell["winner"]] == pytest.approx(max(cell["speed_up"].values()))
    shares = [budget["all_hot_share"] for budget in found["budgets"]]
    assert shares[0] == 0.0
    assert shares == sorted(shares)
    assert json.loads(json.dumps(found)) == found
    assert "assumptions, not measured" in found["text"]
    for name, value in (("gather 6 GB/s", 6.0), ("scatter 2 GB/s", 2.0), ("dense 0.5 ms", 0.5)):
        assert name in found["text"]
        assert value in found["assumptions"].values()


@pytest.mark.parametrize("num_links", [1, 5, 7])
def test_the_sweep_is_shown_in_a_hundred_columns(
    num_links: int, config: BenchRun, workload: HostWorkload
) -> None:
    config.bench.host.sweep_link_gb_s = [1.5 * 2**number for number in range(num_links)]
    found = host_sweep(config, workload)
    for cell in found["cells"]:
        cell["speed_up"] |= {"gather": 123.456, "lookahead": 234.567, "hotline": 9.87}
        cell["winner"] = "lookahead"
    text = io.StringIO()
    print_sweep(found, Console(file=text, width=MAX_WIDTH, no_color=True))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= MAX_WIDTH
    assert sum(line.count("/234.6*/") for line in lines) == 3 * num_links
    assert not any("…/" in line for line in lines)
    markdown = markdown_lines(found)
    assert markdown[-1].count("|") == num_links + 3
    assert markdown[2].count("|") == markdown[3].count("|") == num_links + 3


def test_the_picture_names_the_winner_of_each_cell(
    config: BenchRun, workload: HostWorkload
) -> None:
    found = host_sweep(config, workload)
    found["cells"][0]["winner"] = "classic"
    svg = picture(found)
    assert svg == picture(found), "the same numbers give the same bytes"
    assert svg.startswith("<?xml")
    for cell in found["cells"]:
        assert f"{cell['winner']} {cell['speed_up'][cell['winner']]:.2f} ×" in svg


# -------------------------------------------------------------------------------------- the verb


def test_the_command_measures_compares_and_sweeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "dlrm.bench.turns.launch",
        lambda entry, args, *_, **__: entry(single_process(), *args),
    )
    assert dlrm("bench", "host", *TINY[1:], "bench.repeats=1", "hydra.run.dir=run") == 0
    result = read_result(tmp_path / "run")
    assert result["status"] == "completed"
    assert [v["side"] for v in result["comparison"]["variants"]] == list(MODES)
    assert {goal["name"] for goal in result["goals"]} == {*MODES, "speed-up"}
    assert set(result["host"]["predicted_s"]) == set(MODES)
    assert len(result["sweep"]["cells"]) == 6
    assert (tmp_path / "run" / "host_sweep.svg").is_file()
    out = capfd.readouterr().out
    assert "goal lookahead: " in out
    assert "hot MiB" in out
    text = rendered(tmp_path / "run")
    assert "### host, 1 process, batch 64" in text
    assert "Simulated: gather" in text
    assert "| side | step ms | predicted | error % |" in text
    assert "goal speed-up: lookahead is" in text
    assert "| hot MiB | all hot | 1.5 GB/s | 25 GB/s |" in text


def rendered(run_dir: Path) -> str:
    """What scripts/bench_docs.py makes of a run."""
    path = Path(__file__).parents[2] / "scripts" / "bench_docs.py"
    spec = importlib.util.spec_from_file_location("bench_docs", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text: str = script.render([script.read_run(run_dir)])
    return text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench.sides=[cached]"], "no side cached; there are gather, lookahead, hotline"),
        (["launch.nproc=2"], "launch.nproc=2: `dlrm bench host` measures one process"),
        (["sharding.host.hot_mb=64"], "every row that is looked up is hot"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert dlrm("bench", "host", *TINY[1:], *arguments, "hydra.run.dir=run") == 2
    assert message in capfd.readouterr().err


def test_a_part_of_a_batch_pays_the_whole_fixed_time(config: BenchRun) -> None:
    """What the prediction of hotline rests on: two parts of 4 + 18 ms, the first of which is hidden
    by stages of 60 ms together."""
    config.bench.host.dense_ms, config.bench.host.stage_share = 40.0, 1.5
    work = StepWork(2048, 128, 1000.0, 1000.0, 0.0, 1000.0, 0.5, 9000.0, 1, 64)
    rates, dense = choose_rates(config, work)
    assert dense.of_s(1024) == pytest.approx(0.004 + 0.018)
    assert predict_step_s("hotline", work, rates, dense) == pytest.approx(0.022 + 0.060)
