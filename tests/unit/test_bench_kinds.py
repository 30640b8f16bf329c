"""`dlrm bench exchange`, `prepare` and `loader`: what they measure, and that the sides agree."""

from __future__ import annotations

import io
import json
import warnings
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from data.parquet import PreparedDataset
from data.synthetic import SyntheticConfig
from dlrm.bench.batches import memory_batches
from dlrm.bench.comparison import Comparison, Measurement, Variant, Yardstick, compare
from dlrm.bench.exchange_bench import SIDES, default_sides, exchange_yardstick
from dlrm.bench.exchange_steps import ExchangeTask, given_gradient, measure_exchange
from dlrm.bench.ignored_keys import warn_of_ignored
from dlrm.bench.loader_bench import LoaderTask, loader_yardstick, measure_loader
from dlrm.bench.network import LinkFigures
from dlrm.bench.prepare_bench import (
    PrepareTask,
    criteo_schema,
    first_rows,
    measure_prepare,
    prepare_yardstick,
    raw_rows,
)
from dlrm.bench.ratios import Spread
from dlrm.bench.table import MAX_WIDTH, print_comparison
from dlrm.build import build_tables
from dlrm.config import BenchRun
from dlrm.launch import single_process
from tests.commands import TINY_DATA, compose_config, dlrm, one_hot_dataset, read_result

SMALL = ("data.batch_size=64", "launch.num_threads=1", "bench.steps=3", "bench.warmup_steps=1")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    return one_hot_dataset(tmp_path_factory.mktemp("bench") / "d")


@pytest.fixture
def config() -> BenchRun:
    composed: BenchRun = compose_config("bench", "kind=exchange", *SMALL)
    return composed


@pytest.fixture
def start_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def compared(yardstick: Yardstick, turns: dict[str, list[dict[str, Any]]]) -> Comparison:
    """A comparison of figures by side and turn."""
    common = {"num_threads": 1, "note": "a note"}
    return compare(
        [Variant(side, "") for side in turns],
        [
            Measurement(Variant(side, ""), repeat, common | figures)
            for side, found in turns.items()
            for repeat, figures in enumerate(found)
        ],
        yardstick,
    )


def printed(comparison: Comparison) -> list[str]:
    text = io.StringIO()
    print_comparison(comparison, Console(file=text, width=MAX_WIDTH, no_color=True))
    return text.getvalue().splitlines()


# ------------------------------------------------------------------------------------- exchange


def measured(side: str, config: BenchRun, dataset: PreparedDataset, folder: Path) -> dict[str, Any]:
    """One process; the first side measured into a folder is what others are compared with."""
    return measure_exchange(
        single_process(), ExchangeTask(config, dataset.root, None, side, folder)
    )


@pytest.mark.parametrize("bag_size", [1, 3])
@pytest.mark.parametrize("peer", ["embedding_bag", "torchrec_table_wise"])
def test_the_sides_have_the_same_rows_before_and_after_the_steps(
    peer: str, bag_size: int, config: BenchRun, dataset: PreparedDataset, tmp_path: Path
) -> None:
    if peer.startswith("torchrec"):
        if find_spec("torchrec") is None:
            pytest.skip("torchrec isn't installed (DLRM_EXTRAS=peers)")
        warnings.simplefilter("ignore")
    config.bench.bag_size = bag_size
    ours = measured("dlrm", config, dataset, tmp_path)
    assert ours["pooled_difference"] == 0.0
    assert ours["pooled_moved"] > 0.005
    assert len(ours["step_ms"]) == 3
    theirs = measured(peer, config, dataset, tmp_path)
    assert theirs["pooled_start_difference"] < 1e-6
    assert theirs["pooled_difference"] < 1e-5
    assert theirs["pooled_moved"] == pytest.approx(ours["pooled_moved"], abs=1e-5)


def test_other_rows_are_found(config: BenchRun, dataset: PreparedDataset, tmp_path: Path) -> None:
    """A peer that starts with other rows, and one that takes other steps."""
    ours = measured("dlrm", config, dataset, tmp_path)
    seeds = measured("embedding_bag", replace(config, seed=5), dataset, tmp_path)
    config.optim.sparse.lr *= 1.1
    steps = measured("embedding_bag", config, dataset, tmp_path)
    yardstick = exchange_yardstick(1, 1e-4)
    (problem,) = compared(yardstick, {"dlrm": [ours], "embedding_bag": [seeds]}).problems
    assert problem.startswith("embedding_bag has other rows than dlrm before the steps")
    (problem,) = compared(yardstick, {"dlrm": [ours], "embedding_bag": [steps]}).problems
    assert problem.startswith("embedding_bag has other rows than dlrm after the steps")
    assert "bench.pooled_tolerance" in problem


def test_the_given_gradient_is_that_of_a_mean_and_never_cancels(
    config: BenchRun, dataset: PreparedDataset
) -> None:
    tables, features = build_tables(config, dataset.manifest)
    dims = {table.name: table.dim for table in tables}
    shares = [
        memory_batches(
            dataset, "train", batch_size=64, num_batches=1, bag_size=1, seed=0, rank=rank,
            world_size=2,
        )[0]
        for rank in range(2)
    ]  # fmt: skip
    grads = [given_gradient(config, dims, features, batch) for batch in shares]
    assert torch.equal(grads[0], given_gradient(config, dims, features, shares[0]))
    assert not torch.equal(grads[0], grads[1])
    grad_BS = torch.cat(grads)
    assert grad_BS.shape == (64, 26 * config.model.embedding_dim)
    assert ((grad_BS * 64).abs() - 1).abs().max() <= 0.5
    assert torch.equal(grad_BS.sign(), grad_BS[:1].sign().expand_as(grad_BS))


def test_the_floor_sends_what_the_first_side_has_sent_in_the_same_turn(
    start_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    turns: dict[str, int] = {}
    sent_by_floor = []

    def launch(entry: Any, args: tuple[ExchangeTask, ...], *_: Any, **__: Any) -> Any:
        if not args:
            return LinkFigures(1e9, 1e9, 50.0)
        (task,) = args
        turn = turns[task.side] = turns.get(task.side, 0) + 1
        found = {
            "step_ms_p50": 123.4 if task.side.startswith("torchrec") else 8.0,
            "bytes_sent_per_step_and_rank": 2.5e6,
            "num_threads": 1,
            "note": "a note",
        }
        if task.side == "all_to_all_floor":
            sent_by_floor.append(task.sent_bytes)
            return found
        if task.plan is not None:
            assert task.side.removeprefix("dlrm_") == task.config.sharding.exchange
            rows = turn if task.side == "dlrm_auto" else 1000.0
            found["sent_bytes"] = {"counts": 8.0, "ids": 0, "rows": rows, "grads": 2, "dense": 9.0}
        return found | {
            "pooled_difference": 0.0, "pooled_start_difference": 0.0, "pooled_moved": 0.1,
        }  # fmt: skip

    monkeypatch.setattr("dlrm.bench.turns.launch", launch)
    monkeypatch.setattr("dlrm.bench.sides.version", lambda name: "1.8.0")
    root = tmp_path_factory.getbasetemp() / "tiny"
    status = dlrm(
        *("bench", "exchange", *TINY_DATA, *SMALL, f"data.root={root}", "hydra.run.dir=run"),
        *("launch.nproc=2", "bench.repeats=2"),
    )
    captured = capfd.readouterr()
    assert status == 0, captured.err
    assert sent_by_floor == [
        {"counts": 8.0, "rows": 1, "grads": 2}, {"counts": 8.0, "rows": 2, "grads": 2},
    ]  # fmt: skip
    assert max(map(len, captured.out.splitlines())) <= 100
    assert "dlrm_kv is 15.43 (15.43-15.43) times as fast as torchrec_table_wise" in captured.out
    assert "1.00 (1.00-1.00) times as long as all_to_all_floor" in captured.out
    result = read_result(Path("run"))
    assert list(result["plan_digest"]) == ["dlrm_auto", "dlrm_kv", "dlrm_pooled"]
    rows = result["comparison"]["variants"]
    assert [row["name"] for row in rows] == default_sides(compose_config("bench", "launch.nproc=2"))
    assert rows[-1]["pooled_difference"] is None
    assert len(Path("run/measurements.jsonl").read_text().splitlines()) == 14


def test_sides_of_the_exchange_by_default(config: BenchRun) -> None:
    assert default_sides(config) == ["dlrm", "torchrec_table_wise", "embedding_bag"]
    config.launch.nproc = 2
    assert set(default_sides(config)) == set(SIDES) - {"dlrm", "embedding_bag"}
    config.sharding.exchange = "kv"
    assert [s for s in default_sides(config) if s.startswith("dlrm")] == ["dlrm"]


# -------------------------------------------------------------------------------------- prepare


def test_the_schema_is_that_of_criteo_kaggle() -> None:
    assert criteo_schema() == compose_config("prepare", "data=criteo_kaggle").data.schema


def test_prepare_reads_all_rows_and_the_first_ones_are_the_same(tmp_path: Path) -> None:
    settings = SyntheticConfig(cardinality_scale=1e-5)
    raw = raw_rows(settings, 500, tmp_path)
    assert raw_rows(settings, 500, tmp_path) == raw
    assert raw_rows(settings, 400, tmp_path) != raw
    lines = raw.read_text().splitlines()
    assert len(lines) == 500
    first = first_rows(raw, 120)
    assert first.read_text().splitlines() == lines[:120]
    label_sum = sum(int(line.split("\t")[0]) for line in lines[:120])
    for side in ("dlrm", "pyarrow_csv"):
        found = measure_prepare(single_process(), PrepareTask(side, raw, 120, tmp_path))
        assert (found["rows"], found["common_label_sum"]) == (500, label_sum), side
        assert found["rows_per_s"] == pytest.approx(500 / found["seconds"])
    assert {path.suffix for path in tmp_path.iterdir()} == {".tsv"}, "what was prepared is left"


@pytest.mark.skipif(find_spec("iopath") is None, reason="no iopath here (DLRM_EXTRAS=peers)")
def test_torchrec_prepares_the_first_rows(tmp_path: Path) -> None:
    pytest.importorskip("torchrec.datasets.criteo")
    raw = first_rows(raw_rows(SyntheticConfig(cardinality_scale=1e-5), 200, tmp_path), 80)
    task = PrepareTask("torchrec", raw, 80, tmp_path)
    with warnings.catch_warnings():
        found = measure_prepare(single_process(), task)
    labels = [int(line.split("\t")[0]) for line in raw.read_text().splitlines()]
    assert (found["rows"], found["common_label_sum"]) == (80, sum(labels))


def prepared(rows_per_s: float, rows: int, label_sum: int) -> dict[str, Any]:
    return {
        "rows_per_s": rows_per_s, "rows": rows, "common_label_sum": label_sum,
        "peak_rss_bytes": 2**29,
    }  # fmt: skip


def test_rates_are_compared_by_the_time_per_row() -> None:
    comparison = compared(
        prepare_yardstick(2_000_000, 200_000),
        {
            "dlrm": [prepared(200_000, 2_000_000, 9), prepared(400_000, 2_000_000, 9)],
            "torchrec": [prepared(20_000, 200_000, 9), prepared(20_000, 200_000, 9)],
            "pyarrow_csv": [prepared(500_000, 2_000_000, 9), prepared(1_000_000, 2_000_000, 9)],
        },
    )
    assert comparison.problems == []
    rows = {row.side: row for row in comparison.variants}
    assert rows["torchrec"].ratio_to["dlrm"] == Spread(15, 10, 20)
    assert rows["dlrm"].torchrec_ratio == Spread(15, 10, 20)
    (claim,) = comparison.claims()
    assert claim.startswith("dlrm is 15.00 (10.00-20.00) times as fast as torchrec")
    assert "2.50 (2.50-2.50) times as long as pyarrow_csv" in claim
    lines = printed(comparison)
    assert max(map(len, lines)) <= 100
    cells = next(line for line in lines if line.startswith("torchrec ")).split()
    assert cells[1:] == ["20.0", "(20.0-20.0)", "15.0", "(10.0-20.0)", "200,000", "9", "512"]


def test_missing_rows_and_other_labels_are_problems() -> None:
    turns = {"dlrm": [prepared(9, 100, 5)], "torchrec": [prepared(9, 10, 5)]}
    yardstick = prepare_yardstick(100, 10)
    assert compared(yardstick, turns).problems == []
    (problem,) = compared(yardstick, turns | {"torchrec": [prepared(9, 9, 5)]}).problems
    assert problem == "torchrec has made 9 rows of 10"
    (problem,) = compared(yardstick, turns | {"torchrec": [prepared(9, 10, 6)]}).problems
    assert problem.endswith("the first 10 rows have different sums: dlrm 5, torchrec 6")


# --------------------------------------------------------------------------------------- loader


@pytest.mark.parametrize("side", ["dlrm", "torch_dataloader", "torchrec"])
def test_loaders_yield_every_sample_once(
    side: str, config: BenchRun, dataset: PreparedDataset
) -> None:
    if side == "torchrec":
        if find_spec("torchrec") is None or find_spec("iopath") is None:
            pytest.skip("torchrec or iopath isn't installed (DLRM_EXTRAS=peers)")
        warnings.simplefilter("ignore")
    found = measure_loader(single_process(), LoaderTask(side, config, dataset.root))
    assert (found["samples"], found["batches"]) == (300, 5)
    assert found["label_sum"] == dataset.column("train", "__label").sum()


def test_samples_that_are_lost_are_problems() -> None:
    def epoch(samples: int, label_sum: float) -> dict[str, Any]:
        return {"samples_per_s": 9.0, "samples": samples, "label_sum": label_sum,
                "first_epoch_s": 1.0, "peak_rss_bytes": 1}  # fmt: skip

    yardstick = loader_yardstick(300)
    ours = {"dlrm": [epoch(300, 70)]}
    (problem,) = compared(yardstick, ours | {"torchrec": [epoch(256, 70)]}).problems
    assert problem == "torchrec has yielded 256 samples in an epoch of 300"
    (problem,) = compared(yardstick, ours | {"torchrec": [epoch(300, 71)]}).problems
    assert problem == "the labels of an epoch have different sums: dlrm 70, torchrec 71"


# ------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["exchange", "bench.sides=[dlrm_kv]"], "dlrm_kv has no meaning in one process"),
        (["exchange", "bench.sides=[all_to_all_floor]"], "has no meaning in one process"),
        (["exchange", "bench.sides=[gemm_floor]"], "no side gemm_floor; there are dlrm, dlrm_auto"),
        (
            ["exchange", "launch.nproc=2", "bench.sides=[dlrm,embedding_bag]"],
            "embedding_bag sends nothing and is measured in one process",
        ),
        (
            ["exchange", "launch.nproc=2", "bench.sides=[all_to_all_floor,dlrm]"],
            "name one before it, such as dlrm",
        ),
        (
            ["exchange", "bench.sides=[dlrm]", "sharding.wire=bf16"],
            "sharding.wire=bf16: rounds by more than what the sides may differ by",
        ),
        (["exchange", "bench.sides=[embedding_bag]", "optim.sparse.name=adam"], "name=adam: torch"),
        (["train", "bench.sides=[torchrec_mixed]"], "torchrec_mixed divides the tables"),
        (["prepare", "launch.nproc=2"], "launch.nproc=2: `dlrm bench prepare` measures one"),
        (["loader", "launch.nproc=2"], "launch.nproc=2: `dlrm bench loader` measures one"),
        (
            ["prepare", "bench.sides=[spark]"],
            "no side spark; there are dlrm, torchrec, pyarrow_csv",
        ),
        (["loader", "bench.sides=[dali]"], "no side dali; there are dlrm, torchrec, torch_data"),
        (
            ["prepare", "bench.rows=9", "bench.peer_rows=10"],
            "bench.peer_rows=10 exceeds bench.rows",
        ),
        (["prepare", "bench.rows=0"], "bench.rows=0: must be at least 1"),
        (["exchange", "bench.pooled_tolerance=0"], "bench.pooled_tolerance=0.0: must be above 0"),
        (["prepare", "bench.sides=[dlrm]", "data=adult"], "data=adult: the raw rows of"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    arguments: list[str],
    message: str,
    start_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dlrm.bench.sides.version", lambda name: "1.8.0")
    data = (*TINY_DATA, f"data.root={tmp_path_factory.getbasetemp() / 'tiny'}")
    status = dlrm(
        "bench", *arguments, *(data if arguments[0] != "prepare" else ()), "hydra.run.dir=run"
    )
    error = capfd.readouterr().err
    assert status == 2, error
    assert message in error
    assert error.count("dlrm: ") - error.count("dlrm: warning") == 1, error
    assert not Path("run/measurements.jsonl").exists()


@pytest.mark.parametrize("kind", ["prepare", "loader"])
def test_what_torchrec_s_data_tools_need_is_named(
    kind: str,
    start_folder: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version(name: str) -> str:
        if name == "iopath":
            raise PackageNotFoundError(name)
        return "1.8.0"

    monkeypatch.setattr("dlrm.bench.sides.version", version)
    assert dlrm("bench", kind, "hydra.run.dir=run") == 2
    error = capfd.readouterr().err
    assert "iopath isn't installed. Run `DLRM_EXTRAS=peers scripts/dlrm bench" in error
    assert "bench.sides=[dlrm," in error


def test_keys_that_a_kind_does_not_read_are_warned_of() -> None:
    read = {"data": True, "data.shuffle": False, "model.embedding_dim": True}
    command = (
        "dlrm bench loader data=synthetic data.synthetic.num_train=5 model.embedding_dim=8 seed=1 "
        "++sharding.tables.C1.layout=row_wise 'data.shuffle=false' model=dlrm_dcnv2"
    )
    said = r"`dlrm bench loader` .* of sharding\.tables\.C1\.layout, data\.shuffle, model: it is"
    with pytest.warns(UserWarning, match=said):
        warn_of_ignored("loader", read, command)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_ignored("loader", read, "dlrm bench loader bench.repeats=2 launch.num_threads=1")


def test_results_can_be_written_as_json(config: BenchRun) -> None:
    found = compared(loader_yardstick(3), {"dlrm": []})
    assert json.loads(json.dumps(found.as_dict()))["variants"][0]["samples_per_s"] is None
