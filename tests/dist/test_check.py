"""`dlrm check` on real processes: right runs pass under plans of every kind; faults are found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from data.parquet import PreparedDataset
from dlrm.check import CheckFailed, CheckTask, check_with, verdict
from dlrm.check_pass import PassResult
from embeddings.communicator import ProcessGroup
from tests.check_cases import check_task, optimizers
from tests.commands import dlrm, read_result, tiny, write_visits
from tests.dist.worker_pool import Workers


@pytest.fixture(scope="module")
def visits(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    """70 rows: three batches of 24 an epoch, the last of 22."""
    return write_visits(tmp_path_factory.mktemp("visits"), 70)


def check(rank: int, world_size: int, task: CheckTask) -> list[PassResult]:
    """Runs in every worker."""
    torch.set_num_threads(1)
    return check_with(ProcessGroup(), task)


# Every world size, exchange and rule over a network; tests/unit/test_check.py has more pairs.
@pytest.mark.parametrize(
    ("world_size", "layout", "exchange", "optimizer"),
    [
        (2, "row_wise", "pooled", "sgd"),
        (3, "column_wise", "kv", "rowwise_adagrad"),
        (4, "mixed", "mixed", "adagrad"),
        (4, "blocks", "pooled", "adam"),
    ],
)
def test_a_right_run_passes(
    world_size: int,
    layout: str,
    exchange: str,
    optimizer: str,
    workers: Workers,
    visits: PreparedDataset,
) -> None:
    more = {"train": {"accumulate": 2}, "check": {"steps": 4}}
    optim = optimizers(optimizer, clip_norm=0.2)
    task = check_task(visits, world_size, layout, exchange, optim, more)
    results = workers(world_size).run(check, task)
    verdict(task.config, results[0])
    assert len(results[0]) == 2
    # Only rank 0 has the reference.
    assert results[1:] == [[]] * (world_size - 1)


@pytest.mark.parametrize("name", ["drop_duplicate_sum", "forget_replicas", "dense_not_summed"])
def test_a_planted_fault_is_found(name: str, workers: Workers, visits: PreparedDataset) -> None:
    """Those of the collectives; the others need no processes (tests/unit/test_check.py)."""
    more = {"check": {"steps": 2, "mutate": name}}
    layout = "replicated" if name == "forget_replicas" else "row_wise"
    task = check_task(visits, 2, layout, "kv", optimizers("adagrad"), more)
    passes = workers(2).run(check, task)[0]
    with pytest.raises(CheckFailed, match=f"{name} was planted"):
        verdict(task.config, passes)
    assert all(result.differences.beyond() for result in passes)


@pytest.fixture
def command(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Callable[..., tuple[int, str, str]]:
    """Runs `dlrm check`: (exit status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        status = dlrm("check", *tiny(tmp_path_factory), "hydra.run.dir=run", *arguments)
        return status, *capfd.readouterr()

    return run


@pytest.mark.smoke
def test_the_command_checks_two_processes(
    command: Callable[..., tuple[int, str, str]], tmp_path: Path, forked: None
) -> None:
    status, out, err = command("launch.nproc=2", "sharding=row_wise", "check.steps=3")
    assert status == 0, err
    assert "PASS" in out
    result = read_result(tmp_path / "run")
    assert (result["status"], result["world_size"]) == ("completed", 2)
    for part in result["passes"]:
        assert part["compared"]["values"]["gradients"] > 0
        assert len(part["tables"]) == 26


def test_the_command_ends_with_1_where_a_fault_is_planted(
    command: Callable[..., tuple[int, str, str]], tmp_path: Path, forked: None
) -> None:
    status, out, err = command(
        *("launch.nproc=2", "sharding=column_wise", "sharding.exchange=pooled", "check.steps=1"),
        "check.mutate=mean_of_means",
    )
    assert status == 1, out
    message = [line for line in err.splitlines() if line.startswith("dlrm: ")]
    assert len(message) == 1, err
    assert message[0].startswith("dlrm: FAIL (mean_of_means was planted): ")
    assert "Traceback" not in err
    assert "!" in out
    assert read_result(tmp_path / "run")["status"].startswith("failed: CheckFailed: FAIL")
