"""scripts/bench_docs.py: from runs to the section of docs/benchmarks.md."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dlrm.bench.comparison import Measurement, Variant, compare
from dlrm.bench.prepare_bench import prepare_yardstick
from dlrm.bench.train_bench import train_yardstick

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = ROOT / "scripts" / "bench_docs.py"
    spec = importlib.util.spec_from_file_location("bench_docs", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def result(world_size: int = 1, **more: Any) -> dict[str, Any]:
    """result.json of a run of three sides in two turns."""
    step_ms = {
        "dlrm": (40.0, 44.0),
        "torchrec_table_wise": (60.0, 55.0),
        "gemm_floor": (30.0, 33.0),
    }
    measurements = [
        Measurement(
            Variant(side, "fp32"),
            repeat,
            {
                "step_ms_p50": ms,
                "logloss": None if side == "gemm_floor" else 0.48125,
                "logloss_start": None if side == "gemm_floor" else 0.58,
                "bytes_sent_per_step_and_rank": 3_834_742.0,
                "num_threads": 2,
                "note": "",
            },
        )
        for side, turns in step_ms.items()
        for repeat, ms in enumerate(turns)
    ]
    variants = [Variant(side, "fp32") for side in step_ms]
    comparison = compare(variants, measurements, train_yardstick(world_size, 0.001))
    return {
        "status": "completed",
        "kind": "train",
        "command": f"dlrm bench train launch.nproc={world_size}",
        "world_size": world_size,
        "date": "2026-11-30T00:02:34+00:00",
        "commit": "14956760f5b0",
        "machine": {
            "processor": "Some CPU", "cores": 2, "memory_bytes": 24 * 2**30, "system": "Linux 6.1",
            "isa": "AVX512",
        },
        "environment": {"GOMP_SPINCOUNT": "10000"},
        "versions": {"torch": "2.13.0+cpu", "torchrec": "1.8.0"},
        "num_threads": 2,
        "description": {
            "bench": f"{world_size} process(es), global batch 2,048, 1 id(s) per bag, loopback",
            "model": "13-512-256-16, 26 tables with 33,762,577 rows, 512-256-1; adagrad, lr 0.005",
            "steps": "10 to warm up, 40 measured, 2 turns",
        },
        "comparison": comparison.as_dict(),
    } | more  # fmt: skip


def prepare_result() -> dict[str, Any]:
    """result.json of `dlrm bench prepare`, of one turn."""
    rates = {"dlrm": 240_000.0, "torchrec": 16_000.0, "pyarrow_csv": 600_000.0}
    measurements = [
        Measurement(
            Variant(side, ""),
            0,
            {
                "rows_per_s": rate,
                "rows": 20_000 if side == "torchrec" else 60_000,
                "common_label_sum": 5_056,
                "peak_rss_bytes": 2**29,
                "num_threads": 2,
                "note": "how it was done",
            },
        )
        for side, rate in rates.items()
    ]
    variants = [Variant(side, "") for side in rates]
    comparison = compare(variants, measurements, prepare_yardstick(60_000, 20_000))
    return result() | {
        "kind": "prepare",
        "command": "dlrm bench prepare",
        "description": {"bench": "prepare, 60,000 raw rows", "steps": "1 turns"},
        "comparison": comparison.as_dict(),
    }


def write_run(folder: Path, values: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "result.json").write_text(json.dumps(values))
    return folder


def test_the_section_holds_what_a_figure_needs(script: ModuleType) -> None:
    text = script.render([result()])
    for needed in (
        "Some CPU, 2 cores, AVX512, 24.0 GiB",
        "torch 2.13.0+cpu, torchrec 1.8.0",
        "2026-11-30T00:02:34+00:00",
        "14956760f5b0",
        "```bash\ndlrm bench train launch.nproc=1\n```",
        "Threads per process: 2, GOMP_SPINCOUNT=10000",
        "33,762,577 rows",
    ):
        assert needed in " ".join(text.split()) or needed in text, needed
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    # 60/40 and 55/44: ours is 1.5 and 1.25 times as fast.
    assert rows[1] == "| dlrm | fp32 | 42.0 (40.0-44.0) | 1.38 (1.25-1.50) | 0.48125 |"
    assert rows[2].startswith("| torchrec_table_wise | fp32 | 57.5 (55.0-60.0) | 1.00 (1.00-1.00)")
    assert rows[3].endswith("|  |"), "no log loss of what has no model"
    assert "Not measured here" in text
    assert "dlrm fp32 is 1.38 (1.25-1.50) times as fast as torchrec_table_wise fp32" in text


def test_tables_are_well_formed_and_bytes_are_shown_of_several_processes(
    script: ModuleType,
) -> None:
    for world_size in (1, 2):
        text = script.render([result(world_size)])
        table = [line for line in text.splitlines() if line.startswith("|")]
        assert len(table) == 5
        assert len({line.count("|") for line in table}) == 1, table
        assert ("MB/step" in text) == (world_size == 2)
        assert ("3.83" in text) == (world_size == 2)


def test_a_kind_has_its_own_columns_and_is_explained_once(script: ModuleType) -> None:
    text = script.render([result(), result(2), prepare_result(), prepare_result()])
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert "| side | k rows/s | × TorchRec | rows | label sum | peak MiB |" in rows
    assert "| dlrm | 240 (240-240) | 15.0 (15.0-15.0) | 60,000 | 5,056 | 512 |" in rows, (
        "rates: the ratio is of times"
    )
    assert "- dlrm is 15.00 (15.00-15.00) times as fast as torchrec; 2.50" in text
    assert "- torchrec: how it was done" in text
    for explained in ("From raw rows to what training reads", "its median training step"):
        assert text.count(explained) == 1


def test_the_machine_is_said_once_where_runs_share_it(script: ModuleType) -> None:
    assert script.render([result(), result(2)]).count("Machine:") == 1
    other = result(2, versions={"torch": "2.14.0"})
    assert script.render([result(), other]).count("Machine:") == 2


def test_only_what_is_between_the_markers_changes(script: ModuleType, tmp_path: Path) -> None:
    document = tmp_path / "d.md"
    document.write_text(f"# Before\n\n{script.BEGIN}\n\nold text\n\n{script.END}\n\nAfter.\n")
    runs = [write_run(tmp_path / f"run{n}", result(n)) for n in (1, 2)]
    arguments = [*map(str, runs), "--document", str(document)]
    assert script.main(arguments) == 0
    text = document.read_text()
    assert text.startswith(f"# Before\n\n{script.BEGIN}\n")
    assert text.endswith(f"{script.END}\n\nAfter.\n")
    assert "old text" not in text
    assert text.index("1 process(es)") < text.index("2 process(es)")
    assert script.main(arguments) == 0
    assert document.read_text() == text, "the same runs give the same text"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"status": "failed: BenchFailed: embedding_bag is another model"}, "isn't complete"),
        ({"status": "failed: not finished"}, "isn't complete"),
        ({"kind": "plan"}, "isn't a run of `dlrm bench`"),
    ],
)
def test_runs_that_may_not_be_shown_are_refused(
    values: dict[str, Any],
    message: str,
    script: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = tmp_path / "d.md"
    document.write_text(f"{script.BEGIN}\n{script.END}\n")
    good = write_run(tmp_path / "good", result())
    bad = write_run(tmp_path / "bad", result() | values)
    assert script.main([str(good), str(bad), "--document", str(document)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert str(bad) in error
    assert document.read_text() == f"{script.BEGIN}\n{script.END}\n"


def test_a_folder_without_a_run_and_a_document_without_markers_are_refused(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "d.md"
    document.write_text(f"{script.END} {script.BEGIN}")
    good = write_run(tmp_path / "good", result())
    assert script.main([str(good), "--document", str(document)]) == 2
    assert "must have one" in capsys.readouterr().err
    assert script.main([str(tmp_path / "nothing"), "--document", str(document)]) == 2
    assert "can't be read" in capsys.readouterr().err


def test_the_project_s_document_has_the_markers(script: ModuleType) -> None:
    text = script.DOCUMENT.read_text()
    replaced = script.replace_section(text, "new", script.DOCUMENT)
    assert "## Training step against other systems" in replaced.split(script.BEGIN)[0]
    assert f"{script.BEGIN}\n\nnew\n{script.END}" in replaced
