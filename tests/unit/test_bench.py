"""`dlrm bench`: statistics, the table, refusals, and that all sides begin as the same model."""

from __future__ import annotations

import io
import json
import warnings
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from data.errors import UserError
from data.parquet import PreparedDataset
from dlrm.bench.comparison import Comparison, Measurement, Variant, compare
from dlrm.bench.machine import provenance
from dlrm.bench.measure import SideTask
from dlrm.bench.ratios import Spread, ratios
from dlrm.bench.sides import SIDES, TORCHREC, check_data, check_memory, default_sides
from dlrm.bench.table import MAX_WIDTH, print_comparison
from dlrm.bench.train_bench import train_yardstick
from dlrm.bench.turns import MEASUREMENTS
from dlrm.blame import WorkersFailed
from dlrm.build import build_tables
from dlrm.config import BenchConfig, BenchRun
from tests.commands import (
    TINY_DATA,
    compose_config,
    dlrm,
    one_hot_dataset,
    read_json,
    read_result,
    write_visits,
)
from tests.failing_files import fail_at

SMALL = (
    "data.batch_size=64",
    "model.bottom_mlp=[8]",
    "model.top_mlp=[9,7]",
    "launch.num_threads=1",
)
BAG = Variant("embedding_bag", "fp32")
FLOOR = Variant("gemm_floor", "fp32")
OURS = Variant("dlrm", "fp32")
TABLE_WISE = Variant("torchrec_table_wise", "fp32")
ROW_WISE = Variant("torchrec_row_wise", "fp32")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    return one_hot_dataset(tmp_path_factory.mktemp("bench") / "d")


@pytest.fixture
def config() -> BenchRun:
    composed: BenchRun = compose_config("bench", *SMALL)
    return composed


# ------------------------------------------------------------------------- statistics and ratios


def test_a_spread_is_median_least_and_greatest() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of([4.0, 1.0, 2.0, 3.0]).median == 2.5
    assert Spread.of([1.314, 1.25, 1.4]).text(2) == "1.31 (1.25-1.40)"
    assert Spread.of([5.0]).as_dict() == {"median": 5.0, "min": 5.0, "max": 5.0}


def test_ratios_are_of_the_same_turn() -> None:
    """Twice as fast in every turn, while the machine's own speed changes fourfold."""
    assert ratios([20.0, 80.0, 40.0], [10.0, 40.0, 20.0]) == [2.0, 2.0, 2.0]
    with pytest.raises(ValueError, match="zip"):
        ratios([1.0, 2.0], [1.0])


def figures(step_ms: float, logloss: float | None = 0.5, **more: Any) -> dict[str, Any]:
    """What a measurement returns, as far as a comparison reads it."""
    return {
        "step_ms_p50": step_ms,
        "logloss": logloss,
        "logloss_start": None if logloss is None else 0.6,
        "bytes_sent_per_step_and_rank": 2e6,
        "num_threads": 1,
        "note": "a note",
        **more,
    }


def compared(
    turns: dict[Variant, list[dict[str, Any] | str]], *, world_size: int = 1
) -> Comparison:
    """A comparison of figures by turn; text instead of figures is a failure."""
    measurements = [
        Measurement(variant, repeat, failure=found)
        if isinstance(found, str)
        else Measurement(variant, repeat, found)
        # Backwards: the order of measurements must not matter.
        for variant, all_found in reversed(turns.items())
        for repeat, found in reversed(list(enumerate(all_found)))
    ]
    return compare(list(turns), measurements, train_yardstick(world_size, 0.001))


def test_every_row_has_its_ratio_to_ours_and_to_the_best_of_torchrec() -> None:
    comparison = compared(
        {
            OURS: [figures(10), figures(20), figures(10)],
            TABLE_WISE: [figures(30), figures(60), figures(20)],
            ROW_WISE: [figures(15), figures(50), figures(12)],
            BAG: [figures(40), figures(80), figures(60)],
            FLOOR: [figures(5, None), figures(10, None), figures(8, None)],
        }
    )
    assert comparison.problems == []
    rows = {row.side: row for row in comparison.variants}
    assert list(rows) == ["dlrm", TABLE_WISE.side, ROW_WISE.side, "embedding_bag", "gemm_floor"]
    assert rows["dlrm"].main == Spread(10, 10, 20)
    assert rows["dlrm"].ratio_to == {"dlrm fp32": Spread(1, 1, 1)}
    assert rows[TABLE_WISE.side].ratio_to == {"dlrm fp32": Spread(3, 2, 3)}
    # Row-wise is the faster plan by its median, 15 against 30, though not in every turn.
    assert {row.torchrec for row in rows.values()} == {"torchrec_row_wise fp32"}
    assert rows["dlrm"].torchrec_ratio == Spread(1.5, 1.2, 2.5)
    assert rows[ROW_WISE.side].torchrec_ratio == Spread(1, 1, 1)
    assert rows["embedding_bag"].torchrec_ratio == Spread(0.375, 0.2, 0.625)
    assert rows["gemm_floor"].columns["logloss"] is None
    claim = comparison.claims()[0]
    assert claim.startswith("dlrm fp32 is 1.50 (1.20-2.50) times as fast as torchrec_row_wise fp32")
    assert "4.00 (4.00-6.00) times as fast as embedding_bag fp32" in claim
    assert "2.00 (1.25-2.00) times as long as gemm_floor fp32" in claim
    assert TABLE_WISE.side not in claim


def test_bf16_is_claimed_against_torchrec_in_both_precisions() -> None:
    ours, peer = Variant("dlrm", "bf16"), Variant("torchrec_table_wise", "bf16")
    comparison = compared(
        {
            OURS: [figures(20)],
            TABLE_WISE: [figures(30)],
            BAG: [figures(50)],
            ours: [figures(10, 0.5025)],
            peer: [figures(25, 0.5025)],
        }
    )
    assert comparison.problems == []
    in_fp32, in_bf16 = comparison.claims()
    assert "bf16" not in in_fp32
    assert "3.00 (3.00-3.00) times as fast as torchrec_table_wise fp32" in in_bf16
    assert "2.50 (2.50-2.50) times as fast as torchrec_table_wise bf16" in in_bf16
    assert "embedding_bag" not in in_bf16
    assert {row.name: row.torchrec for row in comparison.variants}[ours.name] == peer.name


# ----------------------------------------------------------------------- is it the same model?


@pytest.mark.parametrize(
    ("key", "value", "when"),
    [
        ("logloss", 0.5011, "after training"),
        ("logloss", float("nan"), "after training"),
        ("logloss_start", 0.5989, "before training"),
    ],
)
def test_log_losses_apart_in_one_turn_are_a_problem(key: str, value: float, when: str) -> None:
    wrong = figures(40) | {key: value}
    for turn in range(3):
        others = [figures(40), figures(40), figures(40)]
        comparison = compared(
            {OURS: [figures(10)] * 3, BAG: [*others[:turn], wrong, *others[turn + 1 :]]}
        )
        (problem,) = comparison.problems
        assert problem.startswith(f"embedding_bag fp32 is another model than dlrm fp32 {when}")
        assert "bench.logloss_tolerance" in problem


def test_log_losses_within_the_tolerance_agree_and_bf16_has_three_times_as_much() -> None:
    bf16 = Variant("dlrm", "bf16")
    near = {OURS: [figures(10)], BAG: [figures(9, 0.5009)], bf16: [figures(5, 0.5029)]}
    assert compared(near).problems == []
    (problem,) = compared(near | {bf16: [figures(5, 0.5031)]}).problems
    assert problem.startswith("dlrm bf16 is another model than dlrm fp32")


def test_log_losses_that_training_has_not_moved_are_said_to_tell_little() -> None:
    moved = compared({OURS: [figures(10, 0.55)]}).notes
    unmoved = compared({OURS: [figures(10, 0.595)]}).notes
    assert moved[1:] == ["dlrm fp32: a note"], "how each side was run"
    assert "raise bench.steps" in unmoved[2]
    assert compared({FLOOR: [figures(10, None)]}).notes == []


def test_a_side_that_failed_once_is_a_problem_and_has_no_figures() -> None:
    comparison = compared(
        {OURS: [figures(10), figures(10)], BAG: [figures(20), "rank 0 of 2 was killed"]}
    )
    assert comparison.problems == ["embedding_bag fp32 failed: rank 0 of 2 was killed"]
    row = comparison.variants[1]
    assert (row.main, row.columns, row.torchrec_ratio, row.ratio_to) == (None, {}, None, {})
    assert "embedding_bag" not in "".join(comparison.claims())


def test_unequal_threads_are_a_problem() -> None:
    (problem,) = compared({OURS: [figures(10)], BAG: [figures(20, num_threads=2)]}).problems
    assert "dlrm fp32 1, embedding_bag fp32 2" in problem


# ------------------------------------------------------------------------------------ the table


def printed(comparison: Comparison) -> list[str]:
    text = io.StringIO()
    print_comparison(comparison, Console(file=text, width=MAX_WIDTH, no_color=True))
    return text.getvalue().splitlines()


def all_sides(scale: float) -> Comparison:
    """All sides in both precisions, in three turns with ratios of up to `scale`."""
    return compared(
        {
            Variant(side, precision): [
                figures(
                    1.004 * turn * (10.04 if side == "dlrm" else 10.04 * scale),
                    None if side == "gemm_floor" else 0.50012,
                    bytes_sent_per_step_and_rank=1.2345e9,
                )
                for turn in (1.0, 1.2, 2.3)
            ]
            for precision in ("fp32", "bf16")
            for side in SIDES
        },
        world_size=4,
    )


@pytest.mark.parametrize("scale", [0.4, 1.0, 4.0, 13.6, 85.0])
def test_the_table_is_at_most_100_columns_wide_and_nothing_is_cut(scale: float) -> None:
    lines = printed(all_sides(scale))
    assert max(map(len, lines)) <= 100
    text = "\n".join(lines)
    assert "…" not in text
    for side in SIDES:
        assert text.count(f"  {side} ") >= 2, side
    header = next(line for line in lines if line.startswith("side"))
    assert header.split("  ")[0].strip() == "side"
    for column in ("step ms", "/ dlrm fp32", "/ dlrm bf16", "log loss", "MB/step"):
        assert column in header
    row = next(line for line in lines if line.startswith("  embedding_bag "))
    assert "0.50012" in row
    assert row.endswith("1,234.50")


def test_the_table_s_rows_say_what_they_are() -> None:
    lines = printed(
        compared(
            {
                OURS: [figures(10), figures(11)],
                BAG: [figures(20), figures(22)],
                FLOOR: [figures(5, None), figures(6, None)],
                ROW_WISE: ["it broke", "it broke"],
            }
        )
    )
    cells = {line.split()[0]: line.split()[1:] for line in lines if line.startswith("  ")}
    assert cells["dlrm"] == ["10.5", "(10.0-11.0)", "1.00", "(1.00-1.00)", "0.50000"]
    assert cells["embedding_bag"][2:4] == ["2.00", "(2.00-2.00)"]
    assert cells["gemm_floor"][-1].endswith(")"), "no log loss of what has no model"
    assert cells["torchrec_row_wise"] == ["failed"]
    text = "\n".join(lines)
    assert "torchrec_row_wise fp32 failed: it broke" in text
    assert "all sides within 0.001 of each other" in text
    assert "MB/step" not in text, "one process sends nothing"


# ------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"network": "fast"}, "bench.network=fast: must be loopback, or a rate from 1mbit"),
        ({"network": ""}, "bench.network="),
        ({"precisions": ["fp32", "fp16"]}, "bench.precisions: fp16"),
        ({"precisions": []}, "bench.precisions="),
        ({"precisions": ["bf16", "bf16"]}, "each once"),
        ({"sides": []}, "bench.sides="),
        ({"sides": ["dlrm", "dlrm"]}, "each once"),
        ({"steps": 0}, "bench.steps=0"),
        ({"repeats": 0}, "bench.repeats=0"),
        ({"bag_size": 0}, "bench.bag_size=0"),
        ({"eval_samples": 0}, "bench.eval_samples=0"),
        ({"warmup_steps": -1}, "bench.warmup_steps=-1"),
        ({"logloss_tolerance": 0.0}, "bench.logloss_tolerance=0"),
        ({"logloss_tolerance": float("nan")}, "bench.logloss_tolerance=nan"),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        BenchConfig(**values)
    assert message in str(caught.value)


@pytest.fixture
def start_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def bench(tmp_path_factory: pytest.TempPathFactory, *arguments: str) -> int:
    root = tmp_path_factory.getbasetemp() / "tiny"
    return dlrm(
        "bench", "train", *TINY_DATA, *SMALL, f"data.root={root}", "hydra.run.dir=run", *arguments
    )


def refusal(
    capfd: pytest.CaptureFixture[str], factory: pytest.TempPathFactory, *arguments: str
) -> str:
    """The one message of a benchmark that is refused with status 2; nothing was measured."""
    assert bench(factory, *arguments) == 2
    error = capfd.readouterr().err
    assert error.count("dlrm: ") == 1, error
    assert "Traceback" not in error
    assert not Path("run/measurements.jsonl").exists()
    return error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench.network=10gbit"], "bench.network=10gbit: one process sends nothing"),
        (["bench.sides=[dlrm,monolith]"], "no side monolith; there are dlrm, torchrec_table_wise"),
        (["bench.precisions=[fp8]"], "bench.precisions: fp8"),
        (["train.precision=fp64"], "only fp32 and bf16 are compared"),
        (["bench.sides=[embedding_bag]", "optim.sparse.name=adam"], "optim.sparse.name=adam"),
        (["bench.sides=[embedding_bag]", "model=dlrm_dcnv2"], "model.interaction=dcnv2"),
        (["bench.sides=[embedding_bag]", "train.accumulate=2"], "train.accumulate=2"),
        (["bench.sides=[dlrm]", "data.batch_size=600"], "data.batch_size=600: the valid part"),
        (["kind=plan"], "kind=plan: must be one of train, exchange, prepare, loader"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    arguments: list[str],
    message: str,
    start_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert message in refusal(capfd, tmp_path_factory, *arguments)


def test_torchrec_missing_is_refused_with_the_way_to_install_it(
    start_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("dlrm.bench.sides.version", version)
    error = refusal(capfd, tmp_path_factory)
    assert "torchrec isn't installed. Run `DLRM_EXTRAS=peers scripts/dlrm bench" in error
    assert "bench.sides=[dlrm,embedding_bag,gemm_floor]" in error
    monkeypatch.setattr("dlrm.bench.sides.version", lambda name: "1.1.0")
    assert "torchrec 1.1.0 is installed; compared is 1.8.0" in refusal(capfd, tmp_path_factory)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["optim.sparse.name=adam"], "optim.sparse.name=adam: TorchRec has it on GPUs only"),
        (["model.embedding_dim=6"], "model.embedding_dim=6: TorchRec wants a multiple of 4"),
    ],
)
def test_what_torchrec_cannot_do_is_refused(
    arguments: list[str],
    message: str,
    start_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dlrm.bench.sides.version", lambda name: "1.8.0")
    sides = "bench.sides=[dlrm,torchrec_row_wise]"
    assert message in refusal(capfd, tmp_path_factory, sides, *arguments)


def test_tables_that_do_not_fit_are_refused(
    config: BenchRun, dataset: PreparedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adagrad's state counts, and every process's copy of the tables under DDP."""
    tables, _ = build_tables(config, dataset.manifest)
    num_bytes = 2 * 4 * sum(table.rows * table.dim for table in tables)
    config.launch.nproc = 3
    monkeypatch.setattr("dlrm.bench.sides.available_bytes", lambda: num_bytes)
    check_memory(config, ["dlrm", "torchrec_row_wise"], tables)
    with pytest.raises(UserError, match=r"embedding_bag: .*leave it out: bench\.sides=\[dlrm\]"):
        check_memory(config, ["dlrm", "embedding_bag"], tables)
    monkeypatch.setattr("dlrm.bench.sides.available_bytes", lambda: num_bytes - 1)
    with pytest.raises(UserError, match=r"dlrm: .*data\.synthetic\.cardinality_scale"):
        check_memory(config, ["dlrm"], tables)
    check_memory(config, ["gemm_floor"], tables)
    monkeypatch.setattr("dlrm.bench.sides.available_bytes", lambda: None)
    check_memory(config, ["dlrm", "embedding_bag"], tables)


def test_data_that_the_peers_would_train_otherwise_are_refused(tmp_path: Path) -> None:
    manifest = write_visits(tmp_path, 20).manifest
    check_data(manifest, ["dlrm", "gemm_floor"])
    with pytest.raises(UserError, match="example weights, which the peers embedding_bag aren't"):
        check_data(manifest, ["dlrm", "embedding_bag"])


def test_default_sides_mean_something_of_their_own() -> None:
    assert default_sides(2) == list(SIDES)
    one = default_sides(1)
    assert [side for side in one if side in TORCHREC] == ["torchrec_table_wise"]
    assert set(one) < set(SIDES)


# --------------------------------------------------------------- the command, without processes


@pytest.fixture
def canned(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Figures by side instead of processes; an exception is raised."""
    found: dict[str, Any] = {}

    def launch(entry: Any, args: tuple[SideTask], *_: Any, **__: Any) -> dict[str, Any]:
        value = found[args[0].side]
        if isinstance(value, Exception):
            raise value
        return dict(value)

    monkeypatch.setattr("dlrm.bench.turns.launch", launch)
    monkeypatch.setattr("dlrm.bench.train_bench.bench_roofline", lambda *_: None)
    return found


SIDES_OF_TWO = ("bench.sides=[dlrm,embedding_bag]", "bench.repeats=2")


def test_a_run_writes_a_line_per_measurement_and_result_json(
    start_folder: Path, tmp_path_factory: pytest.TempPathFactory, canned: dict[str, Any]
) -> None:
    canned |= {"dlrm": figures(10), "embedding_bag": figures(25)}
    assert bench(tmp_path_factory, *SIDES_OF_TWO) == 0
    lines = [json.loads(line) for line in Path("run/measurements.jsonl").read_text().splitlines()]
    turns = [(line["repeat"], line["side"]) for line in lines]
    assert turns == [(0, "dlrm"), (0, "embedding_bag"), (1, "dlrm"), (1, "embedding_bag")]
    assert all(line["precision"] == "fp32" and line["failure"] is None for line in lines)
    assert [line["step_ms_p50"] for line in lines] == [10, 25, 10, 25]
    result = read_result(Path("run"))
    assert (result["status"], result["kind"], result["num_threads"]) == ("completed", "train", 1)
    command = result["command"]
    assert command.startswith("dlrm bench train ")
    assert command.endswith("'bench.sides=[dlrm,embedding_bag]' bench.repeats=2")
    assert "global batch 64" in result["description"]["bench"]
    assert result["comparison"]["problems"] == []
    assert [row["name"] for row in result["comparison"]["variants"]] == [OURS.name, BAG.name]


def test_a_folder_used_again_has_the_new_measurements_only(
    start_folder: Path, tmp_path_factory: pytest.TempPathFactory, canned: dict[str, Any]
) -> None:
    canned |= {"dlrm": figures(10), "embedding_bag": figures(25)}
    for _ in range(2):
        assert bench(tmp_path_factory, *SIDES_OF_TWO, "train.overwrite=true") == 0
    assert len(Path("run/measurements.jsonl").read_text().splitlines()) == 4


def test_sides_that_disagree_end_with_1_and_their_names(
    start_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    canned: dict[str, Any],
    capfd: pytest.CaptureFixture[str],
) -> None:
    canned |= {"dlrm": figures(10), "embedding_bag": figures(25, 0.52)}
    assert bench(tmp_path_factory, *SIDES_OF_TWO) == 1
    error = capfd.readouterr().err
    assert "dlrm: embedding_bag fp32 is another model than dlrm fp32 after training" in error
    assert "0.02000 apart, allowed are 0.001" in error
    assert "Traceback" not in error
    result = read_result(Path("run"))
    assert result["status"].startswith("failed: BenchFailed: embedding_bag fp32 is another model")
    assert result["comparison"]["variants"][1]["step_ms"]["median"] == 25


def test_a_side_that_cannot_run_ends_with_1_after_all_others(
    start_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    canned: dict[str, Any],
    capfd: pytest.CaptureFixture[str],
) -> None:
    canned |= {"dlrm": figures(10), "embedding_bag": WorkersFailed("rank 0 of 1 ran out of luck")}
    assert bench(tmp_path_factory, *SIDES_OF_TWO) == 1
    captured = capfd.readouterr()
    assert "dlrm: embedding_bag fp32 failed: rank 0 of 1 ran out of luck" in captured.err
    assert "failed" in captured.out
    lines = [json.loads(line) for line in Path("run/measurements.jsonl").read_text().splitlines()]
    # Not tried again: it takes long, and its row is lost anyway.
    assert [line["side"] for line in lines] == ["dlrm", "embedding_bag", "dlrm"]
    assert lines[1]["failure"] == "rank 0 of 1 ran out of luck"


def test_keys_without_a_meaning_here_are_warned_of(
    start_folder: Path, tmp_path_factory: pytest.TempPathFactory, canned: dict[str, Any]
) -> None:
    canned |= {"dlrm": figures(10), "embedding_bag": figures(25)}
    keys = ("train.max_steps=3", "data.shuffle=false")
    with pytest.warns(UserWarning, match=r"no notice of train\.max_steps, data\.shuffle: it is"):
        assert bench(tmp_path_factory, *SIDES_OF_TWO, *keys) == 0


def test_the_default_configuration_has_no_key_without_a_meaning(
    start_folder: Path, tmp_path_factory: pytest.TempPathFactory, canned: dict[str, Any]
) -> None:
    canned["dlrm"] = figures(10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert bench(tmp_path_factory, "bench.sides=[dlrm]") == 0


@pytest.mark.parametrize("file", [MEASUREMENTS, "result.json.partial"])
@pytest.mark.parametrize("operation", ["open", "write"])
def test_f30_c18_a_full_disk_ends_a_benchmark_in_one_line(
    file: str,
    operation: str,
    start_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    canned: dict[str, Any],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """While a measurement is added, or at the end."""
    canned |= {"dlrm": figures(10), "embedding_bag": figures(25)}
    n = 0 if file == MEASUREMENTS else 1  # The first result.json says that the run has begun.
    with fail_at(n, within=Path("run", file), operations=(operation,), stays=True) as calls:
        assert bench(tmp_path_factory, *SIDES_OF_TWO) == 1
    assert calls.failed
    err = capfd.readouterr().err
    assert "Traceback" not in err
    (line,) = [line for line in err.splitlines() if line.startswith("dlrm: ")]
    assert file.removesuffix(".partial") in line
    assert "No space left on device" in line
    assert "hydra.run.dir=" in line
    assert read_json(Path("run", "result.json"))["status"] != "completed"


def test_a_run_states_what_its_figures_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "77")
    found = provenance()
    assert found["environment"]["GOMP_SPINCOUNT"] == "77"
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["memory_bytes"] > 2**20
    assert found["versions"]["torch"] == torch.__version__
    assert ("torchrec" in found["versions"]) == (find_spec("torchrec") is not None)
