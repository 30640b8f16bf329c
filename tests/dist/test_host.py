"""Tables in host memory on real processes: checks pass and find faults; runs end as others do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from data.parquet import PreparedDataset
from dlrm.check import CheckFailed, CheckTask, check_with, verdict
from dlrm.check_pass import PassResult
from dlrm.config import TrainRun
from dlrm.planning import make_plan
from dlrm.run_folder import RunFolder
from dlrm.trainer import Trainer
from embeddings import Plan
from embeddings.communicator import ProcessGroup
from embeddings.shared_memory import SharedMemory
from embeddings.sockets import Sockets, connect_ranks
from tests.check_cases import optimizers
from tests.commands import dlrm, read_result, tiny, without_plots
from tests.dist.worker_pool import Workers
from tests.host_cases import HOT_SHARES_AND_DEPTHS, train_much_touched
from tests.host_run_cases import host_check_task, in_host, write_baskets
from tests.trainer_ranks import make_config, rules


@pytest.fixture(scope="module")
def baskets(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    """70 rows: nine batches of 8 an epoch, the last of 6."""
    return write_baskets(tmp_path_factory.mktemp("baskets"), 70)


def check(rank: int, world_size: int, task: CheckTask) -> list[PassResult]:
    """Runs in every worker."""
    torch.set_num_threads(1)
    return check_with(ProcessGroup(), task)


@pytest.mark.parametrize(
    ("layout", "mode", "lookahead", "rule", "more"),
    [
        ("row_wise", "lookahead", 2, "adam", {"train": {"accumulate": 2}}),
        ("table_wise", "hotline", 1, "rowwise_adagrad", {}),
    ],
)
def test_a_right_run_passes(
    layout: str,
    mode: str,
    lookahead: int,
    rule: str,
    more: dict[str, Any],
    workers: Workers,
    baskets: PreparedDataset,
) -> None:
    host = in_host(mode, lookahead, layout=layout)
    optim = optimizers(rule, clip_norm=0.2)
    task = host_check_task(baskets, 2, host, optim, more, {"check": {"steps": 4}})
    results = workers(2).run(check, task)
    verdict(task.config, results[0])
    assert len(results[0]) == 2
    assert results[1:] == [[]]


@pytest.mark.parametrize(
    ("name", "mode"), [("drop_forwarded_state", "lookahead"), ("update_per_part", "hotline")]
)
def test_a_planted_fault_is_found(
    name: str, mode: str, workers: Workers, baskets: PreparedDataset
) -> None:
    mutate = {"check": {"steps": 4, "mutate": name}}
    host = in_host(mode, layout="row_wise")
    task = host_check_task(baskets, 2, host, optimizers("adagrad"), mutate)
    passes = workers(2).run(check, task)[0]
    with pytest.raises(CheckFailed, match=f"{name} was planted"):
        verdict(task.config, passes)
    assert all(result.differences.beyond() for result in passes)


def train(
    rank: int, world_size: int, config: TrainRun, root: Path, run_dir: Path, plan: Plan
) -> tuple[str, dict[str, Any] | None]:
    """(digest of the model, the host part of result.json); runs in every worker."""
    torch.set_num_threads(1)
    folder = RunFolder.of_this_run(run_dir)
    trainer = Trainer(config, PreparedDataset(root), folder, str, comm=ProcessGroup(), plan=plan)
    try:
        trainer.fit()
        return trainer.digest(), trainer.host_figures()
    finally:
        trainer.close()


def test_every_way_of_bringing_rows_comes_to_the_same_model(
    workers: Workers, baskets: PreparedDataset, tmp_path: Path
) -> None:
    """To the bit on both ranks, with the same hot rows: in series, two steps ahead, and eight."""
    found = {}
    for mode, lookahead in (("gather", 1), ("lookahead", 2), ("lookahead", 8)):
        overrides = {
            **in_host(mode, lookahead, layout="row_wise"),
            "train": {"epochs": 3, "eval_every": 5},
            "optim": rules("adam", "adam"),
        }
        config = make_config(overrides)
        plan = make_plan(config, baskets, 2).plan
        run_dir = tmp_path / f"{mode}-{lookahead}"
        run_dir.mkdir()
        ranks = workers(2).run(train, config, baskets.root, run_dir, plan)
        assert ranks[0] == ranks[1]
        digest, figures = ranks[0]
        assert figures is not None
        per_step = figures["per_step"]
        assert per_step["fetched"] > 0
        assert per_step["written"] > 0
        assert (per_step["forwarded"] > 0) == (mode == "lookahead")
        assert 0 < figures["row_hit_share"] < 1
        found[mode, lookahead] = digest
    assert len(set(found.values())) == 1, found


def test_the_command_checks_two_processes(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    forked: None,
) -> None:
    """And `dlrm train` on two processes that it starts has host figures of both."""
    without_plots(monkeypatch)
    monkeypatch.chdir(tmp_path)
    arguments = (
        *tiny(tmp_path_factory),
        *("launch.nproc=2", "sharding=row_wise", "sharding.memory=host"),
        *(
            "sharding.host.mode=lookahead",
            "sharding.host.hot_mb=0.05",
            "sharding.host.whole_rows=0",
        ),
    )
    assert dlrm("check", *arguments, "check.steps=3", "hydra.run.dir=check") == 0
    assert "PASS" in capfd.readouterr().out
    assert dlrm("train", *arguments, "train.max_steps=6", "hydra.run.dir=train") == 0
    host = read_result(tmp_path / "train")["host"]
    assert host["per_step"]["fetched"] > 0
    assert host["per_step"]["forwarded"] > 0


def train_over(rank: int, world_size: int, transport: str) -> list[dict[str, Any]]:
    """Tables at the end of each of `HOT_SHARES_AND_DEPTHS`; on rank 0."""
    comm: ProcessGroup = ProcessGroup()
    if transport == "shared memory":
        comm = SharedMemory(timeout_s=20.0)
    if transport == "sockets":
        sockets = connect_ranks(20.0)
        assert isinstance(sockets, Sockets), sockets
        comm = sockets
    return [train_much_touched(comm, *case).tables for case in HOT_SHARES_AND_DEPTHS]


@pytest.mark.processes
def test_f09_hot_rows_and_lookahead_change_no_bit_on_any_transport(workers: Workers) -> None:
    """Three ranks in fp32: a ring would add another way than an owner does."""
    transports = ("gloo", "shared memory", "sockets")
    runs = {name: workers(3).run(train_over, name)[0] for name in transports}
    expected = runs["gloo"][0]
    for transport, of_cases in runs.items():
        for case, tables in zip(HOT_SHARES_AND_DEPTHS, of_cases, strict=True):
            for table, values in expected.items():
                for name, array in values.items():
                    assert torch.equal(tables[table][name], array), (transport, case, table, name)
