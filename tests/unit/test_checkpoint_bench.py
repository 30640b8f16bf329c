"""`dlrm bench checkpoint`: every side saves and loads the same values, and the goals are judged by
the ratios of a turn."""

from __future__ import annotations

import json
import mmap
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from dlrm.bench.checkpoint_bench import checkpoint_yardstick, reached_goals
from dlrm.bench.checkpoint_sides import (
    COPYING_SIDES,
    OPERATIONS,
    SIDES,
    CheckpointTask,
    PeakMemory,
    bench_tables,
    cached_bytes,
    drop_cache,
    measure_checkpoint,
)
from dlrm.bench.comparison import Comparison, Measurement, Variant, compare
from dlrm.bench.storm import Kill, Storm
from dlrm.bench.turns import Bench
from dlrm.config import BenchRun
from dlrm.launch import single_process
from embeddings.plan import single_process_plan
from tests.commands import compose_config, dlrm, read_result

MIB = 1 << 20


@pytest.fixture
def config() -> BenchRun:
    composed: BenchRun = compose_config("bench", "kind=checkpoint", "bench.table_mib=2")
    return composed


def measured(config: BenchRun, side: str, operation: str, folder: Path) -> dict[str, Any]:
    plan = single_process_plan(bench_tables(config))
    task = CheckpointTask(config, plan, side, operation, folder)
    return measure_checkpoint(single_process(), task)


# ------------------------------------------------------------------------------- measurements


@pytest.mark.parametrize("rule", ["adagrad", "rowwise_adagrad", "adam"])
def test_tables_have_the_size_that_was_asked_for(rule: str, config: BenchRun) -> None:
    config.optim.sparse.name = rule
    row_bytes = {"adagrad": 128, "rowwise_adagrad": 68, "adam": 192}[rule]
    tables = bench_tables(config)
    assert len(tables) == 26
    num_bytes = sum(table.rows for table in tables) * row_bytes
    assert num_bytes == pytest.approx(2 * MIB, rel=0.01)
    assert min(table.rows for table in tables) >= 1


@pytest.mark.parametrize("side", SIDES)
def test_a_side_loads_what_it_has_saved(side: str, config: BenchRun, tmp_path: Path) -> None:
    """Into tables that hold other values; of each side the same number of bytes."""
    if side == "dcp_safetensors" and find_spec("safetensors") is None:
        pytest.skip("safetensors isn't installed")
    own = measured(config, "dlrm", "save", tmp_path / "dlrm")
    operations = [op for op in OPERATIONS if op != "async save" or side in COPYING_SIDES]
    found = {op: measured(config, side, op, tmp_path / side) for op in operations}
    for operation, figures in found.items():
        assert figures["num_bytes"] == own["num_bytes"], operation
        assert figures["bytes_per_s"] * figures["seconds"] == pytest.approx(own["num_bytes"])
        if side != "plain":
            assert figures["values_digest"] == own["values_digest"], operation
    assert found["warm load"]["cached_bytes"] >= own["num_bytes"], "it wasn't warm"


def test_a_load_that_reads_nothing_is_found(
    config: BenchRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables are built with other values than those that are saved."""
    saved = measured(config, "dlrm", "save", tmp_path)
    monkeypatch.setattr("dlrm.bench.checkpoint_sides.load_training", lambda *_: None)
    assert (
        measured(config, "dlrm", "warm load", tmp_path)["values_digest"] != (saved["values_digest"])
    )


def test_the_cache_of_a_file_is_counted_and_dropped(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(3 * MIB + 5))
    assert cached_bytes(path) == 3 * MIB + 5
    drop_cache(path)
    if cached_bytes(path):
        pytest.skip("the folder for temporary files isn't on a disk")
    with open(path, "rb") as opened:
        opened.read(1)
    assert cached_bytes(path) > 0
    (tmp_path / "empty").touch()
    assert cached_bytes(tmp_path / "empty") == 0


def test_peak_memory_counts_what_is_gone_again() -> None:
    """Pages of their own, not of the heap, which may have kept what other tests have freed."""
    peak = PeakMemory()
    with mmap.mmap(-1, 64 * MIB) as pages:
        for start in range(0, len(pages), mmap.PAGESIZE):
            pages[start] = 1
    assert 60 * MIB < peak.extra_bytes() < 80 * MIB
    assert PeakMemory().extra_bytes() < 8 * MIB, "an earlier peak isn't forgotten"


# ---------------------------------------------------------------------------------- comparison


def figures(mb_per_s: float, **more: Any) -> dict[str, Any]:
    return {
        "bytes_per_s": mb_per_s * 1e6,
        "seconds": 1 / mb_per_s,
        "num_bytes": 100,
        "rank_bytes": [400 * MIB, 200 * MIB],
        "extra_bytes": 1 * MIB,
        "extra_share": 0.005,
        "cached_bytes": 0,
        "values_digest": "abc",
        "num_threads": 1,
        "note": "a note",
        **more,
    }


def compared(turns: dict[tuple[str, str], list[dict[str, Any]]]) -> Comparison:
    return compare(
        [Variant(*key) for key in turns],
        [
            Measurement(Variant(*key), repeat, found)
            for key, all_found in turns.items()
            for repeat, found in enumerate(all_found)
        ],
        checkpoint_yardstick(),
    )


def test_operations_are_compared_with_the_same_operation_only() -> None:
    comparison = compared(
        {
            ("dlrm", "save"): [figures(80)],
            ("plain", "save"): [figures(100)],
            ("dcp", "save"): [figures(40)],
            ("dlrm", "warm load"): [figures(300)],
            ("plain", "warm load"): [figures(900)],
        }
    )
    assert comparison.problems == []
    ratios = {row.name: list(row.ratio_to) for row in comparison.variants}
    assert ratios["plain save"] == ["dlrm save"]
    assert ratios["plain warm load"] == ["dlrm warm load"]
    save, load = comparison.claims()
    assert save.startswith("dlrm save is 1.25 (1.25-1.25) times as long as plain save")
    assert "2.00 (2.00-2.00) times as fast as dcp save" in save
    assert load == "dlrm warm load is 3.00 (3.00-3.00) times as long as plain warm load"
    assert json.loads(json.dumps(comparison.as_dict()))["grouped_by"] == "operation"


def test_goals_are_judged_by_the_median_of_the_turns_ratios() -> None:
    """The disk may be twice as slow in one turn as in another: not the medians' ratio."""
    turns = {
        Variant("dlrm", "save"): [(70, 1), (300, 2), (30, 3)],
        Variant("plain", "save"): [(100, 0), (100, 0), (50, 0)],
    }
    goals = reached_goals(
        {
            variant: [
                Measurement(variant, repeat, figures(rate, extra_bytes=extra * MIB))
                for repeat, (rate, extra) in enumerate(found)
            ]
            for variant, found in turns.items()
        }
    )
    save, memory = goals
    assert (save.name, save.value, save.is_reached) == ("save", pytest.approx(0.7), True)
    assert memory.value == 3 * MIB, "the greatest of the turns"
    assert memory.limit == pytest.approx(20 * MIB + 8 * MIB), "of the rank that has the least"
    assert memory.is_reached


@pytest.mark.parametrize(
    ("rate", "extra_mib", "missed"), [(0.69, 0, "save"), (0.9, 29, "memory, save")]
)
def test_a_goal_that_is_missed_is_said(rate: float, extra_mib: int, missed: str) -> None:
    own, plain = Variant("dlrm", "save"), Variant("plain", "save")
    found = reached_goals(
        {
            own: [Measurement(own, 0, figures(100 * rate, extra_bytes=extra_mib * MIB))],
            plain: [Measurement(plain, 0, figures(100))],
        }
    )
    assert [goal.name for goal in found if not goal.is_reached] == [missed]
    assert [goal.name for goal in found if "MISSED" in goal.text] == [missed]


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"num_bytes": 99}, "the sides have different numbers of bytes: dlrm cold load 100"),
        ({"values_digest": "abd"}, "what was loaded isn't what was saved, by digests: dlrm cold"),
        ({"cached_bytes": 50}, "dcp cold load isn't cold: 50% of the files stayed"),
    ],
)
def test_other_work_is_a_problem(wrong: dict[str, Any], problem: str) -> None:
    found = {("dlrm", "cold load"): [figures(9)], ("dcp", "cold load"): [figures(9, **wrong)]}
    (said,) = compared(found).problems
    assert said.startswith(problem)


# ----------------------------------------------------------------------------------- the command


def test_the_command_measures_and_a_storm_that_fails_fails_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    kill = Kill("within a save", "all", 0.01, None, 8, True)

    def storm(folder: Path, num_kills: int, seed: int, say: Any) -> Storm:
        folder.mkdir()
        problems = [] if num_kills == 1 else ["model_digest is a after 2 kills, b without"]
        return Storm(80, [kill] * num_kills, "b", "b" if num_kills == 1 else "a", problems)

    def launch(entry: Any, args: Any, *_: Any, **__: Any) -> Any:
        return entry(single_process(), *args)

    monkeypatch.setattr("dlrm.bench.turns.launch", launch)
    monkeypatch.setattr("dlrm.bench.checkpoint_bench.run_storm", storm)
    monkeypatch.chdir(tmp_path)
    arguments = ("bench", "checkpoint", "bench.table_mib=1", "bench.repeats=1")
    arguments += ("bench.sides=[dlrm,plain]",)
    assert dlrm(*arguments, "bench.storm_kills=1", "hydra.run.dir=calm") == 0
    out = capfd.readouterr().out
    assert max(map(len, out.splitlines())) <= 120
    assert "goal warm load: " in out
    assert "storm: 1 kills in 80 steps, 1 of all processes, 1 within a save" in out
    result = read_result(Path("calm"))
    assert [goal["name"] for goal in result["goals"]][:4] == list(OPERATIONS)
    assert result["storm"]["kills"][0]["victim"] == "all"
    assert not Path("calm/saved").exists(), "what was saved is left on the disk"
    assert dlrm(*arguments, "bench.storm_kills=2", "hydra.run.dir=bad") == 1
    assert "model_digest is a after 2 kills" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench.sides=[tar]"], "no side tar; there are dlrm, plain, dcp, dcp_safetensors"),
        (["bench.table_mib=0"], "bench.table_mib=0: must be at least 1"),
        (["bench.storm_kills=-1"], "bench.storm_kills=-1: must be at least 0"),
        (["bench.table_mib=100000000"], "MiB on disk are needed"),
        (["sharding.tables.C1.layout=row_wise"], "sharding=file and sharding.tables are for a"),
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
    assert dlrm("bench", "checkpoint", *arguments, "hydra.run.dir=run") == 2
    assert message in capfd.readouterr().err


def test_five_turns_by_default_and_three_of_other_kinds(config: BenchRun) -> None:
    assert config.num_turns == 5
    assert compose_config("bench", "kind=loader").num_turns == 3
    assert compose_config("bench", "kind=checkpoint", "bench.repeats=2").num_turns == 2


def test_each_turn_begins_with_another_side() -> None:
    """A disk that is still busy with the last save mustn't always slow the same side, and a side
    loads what it has just saved: all save to one folder."""
    variants = [Variant(side, operation) for operation in ("save", "load") for side in ("a", "b")]
    bench = Bench(variants, lambda *_: (print, ()), checkpoint_yardstick(), {}, rotates=True)
    names = [[(v.precision, v.side) for v in bench.of_turn(turn)] for turn in range(3)]
    first = [("save", "a"), ("load", "a"), ("save", "b"), ("load", "b")]
    second = [("save", "b"), ("load", "b"), ("save", "a"), ("load", "a")]
    assert names == [first, second, first]
