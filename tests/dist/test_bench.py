"""`dlrm bench train` on real processes: every side trains the same model, and says how fast."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.commands import TINY_DATA, dlrm, read_result

SMALL = (
    "data.batch_size=256",
    "model.bottom_mlp=[16]",
    "model.top_mlp=[16]",
    "launch.num_threads=1",
)


class Bench:
    """Runs tiny benchmarks of one turn."""

    def __init__(self, folder: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._folder, self._root, self._capsys = folder, root, capsys

    def __call__(self, *arguments: str) -> tuple[str, dict[str, Any], list[dict[str, Any]]]:
        """What it prints, its result and its lines."""
        status = dlrm(
            *("bench", "train", *TINY_DATA, *SMALL, f"data.root={self._root}"),
            *("bench.steps=3", "bench.warmup_steps=1", "bench.repeats=1", "bench.eval_samples=512"),
            f"hydra.run.dir={self._folder}",
            *arguments,
        )
        captured = self._capsys.readouterr()
        assert status == 0, captured
        lines = (self._folder / "measurements.jsonl").read_text().splitlines()
        return captured.out, read_result(self._folder), [json.loads(line) for line in lines]


@pytest.fixture
def bench(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> Bench:
    return Bench(tmp_path / "run", tmp_path_factory.getbasetemp() / "tiny", capsys)


def test_one_process(bench: Bench, forked: None) -> None:
    sides = ["dlrm", "embedding_bag", "gemm_floor"]
    out, result, lines = bench(f"bench.sides=[{','.join(sides)}]")
    assert result["status"] == "completed"
    assert [line["side"] for line in lines] == sides
    assert all(len(line["step_ms"]) == 3 and min(line["step_ms"]) > 0 for line in lines)
    ours, theirs, floor = lines
    assert ours["logloss_start"] == pytest.approx(theirs["logloss_start"], abs=1e-6)
    assert ours["logloss"] == pytest.approx(theirs["logloss"], abs=1e-3)
    assert ours["logloss"] != ours["logloss_start"], "nothing was trained"
    assert ours["eval_samples"] == theirs["eval_samples"] == 512
    assert ours["phase_ms"]["forward"] > 0
    assert floor["logloss"] is None
    assert {line["num_threads"] for line in lines} == {1}
    assert {line["bytes_sent_per_step_and_rank"] for line in lines} == {0.0}
    rows = {row["side"]: row for row in result["comparison"]["variants"]}
    assert rows["dlrm"]["step_ms"]["median"] == ours["step_ms_p50"]
    assert "times as fast as embedding_bag fp32" in out
    assert "times as long as gemm_floor fp32" in out
    assert max(map(len, out[out.index("\nside") :].split("\nresult")[0].splitlines())) <= 100


def test_two_processes(bench: Bench, forked: None) -> None:
    _, result, lines = bench(
        # What the network carries is counted: values are to go through it.
        *("launch.nproc=2", "launch.transport=gloo"),
        *("bench.roofline=false", "bench.sides=[dlrm,embedding_bag]"),
    )
    assert (result["status"], result["world_size"]) == ("completed", 2)
    ours, theirs = lines
    assert ours["logloss_start"] == pytest.approx(theirs["logloss_start"], abs=1e-6)
    # Of all ranks' samples, not of one's.
    assert ours["eval_samples"] == theirs["eval_samples"] == 512
    assert all(line["bytes_sent_per_step_and_rank"] > 10_000 for line in lines)
    assert sum(ours["sent_bytes"].values()) > 0


@pytest.mark.skipif(find_spec("torchrec") is None, reason="no torchrec here (DLRM_EXTRAS=peers)")
@pytest.mark.parametrize("nproc", [1, 2])
def test_torchrec_trains_the_same_model(nproc: int, bench: Bench, forked: None) -> None:
    sides = ["dlrm", "torchrec_table_wise", "torchrec_row_wise_pipelined"]
    if nproc == 1:
        sides.pop()
    _, result, lines = bench(f"launch.nproc={nproc}", f"bench.sides=[{','.join(sides)}]")
    assert [line["side"] for line in lines] == sides
    for line in lines:
        assert line["logloss_start"] == pytest.approx(lines[0]["logloss_start"], abs=1e-6)
    rows = result["comparison"]["variants"]
    assert rows[0]["torchrec"] in {f"{side} fp32" for side in sides[1:]}
    assert rows[0]["torchrec_ratio"]["median"] > 0
