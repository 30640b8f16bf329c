"""Processes, threads and an outer torchrun: what is refused, and what is derived."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from data.errors import UserError
from dlrm.config import LaunchConfig
from dlrm.launch import (
    join,
    launch,
    single_process,
    threads_per_worker,
)
from dlrm.torchrun import check_torchrun_arguments, launch_id, under_torchrun
from tests.commands import compose_config

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "1",
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a launcher nor thread settings around the tests."""
    for name in (*TORCHRUN, "OMP_NUM_THREADS", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a rank that torchrun has started."""
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"nproc": 0}, "launch.nproc=0"),
        ({"ranks_per_host": 0}, "launch.ranks_per_host=0"),
        (
            {"nproc": 4, "ranks_per_host": 3},
            "launch.ranks_per_host=3 doesn't divide launch.nproc=4",
        ),
        ({"nproc": 2, "ranks_per_host": 4}, "launch.ranks_per_host=4"),
        ({"num_threads": 0}, "launch.num_threads=0"),
        ({"timeout_s": 0.0}, "launch.timeout_s=0"),
        ({"timeout_s": -1.0}, "launch.timeout_s=-1"),
        ({"timeout_s": float("nan")}, "launch.timeout_s=nan"),
        ({"timeout_s": float("inf")}, "launch.timeout_s=inf"),
        ({"timeout_s": 1e15}, "launch.timeout_s=1e+15: must be at most 1,728,000 (20 days)"),
        ({"device": "tpu"}, "launch.device=tpu"),
        (
            {"nproc": 2, "transport": "nccl"},
            "launch.transport=nccl: must be one of auto, shared_memory, sockets, gloo",
        ),
    ],
)
def test_refusals_name_the_key(values: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as caught:
        LaunchConfig(**values)
    assert named in str(caught.value)


def test_cuda_is_refused_where_it_can_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"launch\.device=cuda: torch finds no GPU"):
        LaunchConfig(device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match=r"launch\.nproc=3 exceeds the 2 GPUs"):
        LaunchConfig(device="cuda", nproc=3)
    with pytest.raises(UserError, match="only the CPU is built so far"):
        LaunchConfig(device="cuda", nproc=2)


def test_the_command_line_reaches_it() -> None:
    launch = compose_config("train", "launch.nproc=4", "launch.ranks_per_host=2").launch
    assert launch == LaunchConfig(nproc=4, ranks_per_host=2)
    assert compose_config("train", "launch.timeout_s=5").launch.timeout_s == 5.0


@pytest.mark.parametrize("transport", ["shared_memory", "sockets", "gloo"])
def test_one_process_has_no_transport(transport: str) -> None:
    with pytest.warns(UserWarning, match=f"^launch.transport={transport} is ignored: there is one"):
        LaunchConfig(transport=transport)
    assert LaunchConfig(nproc=2, transport=transport).transport == transport
    assert compose_config("train").launch.transport == "auto"


@pytest.mark.usefixtures("torchrun")
def test_one_process_here_may_be_one_of_several_of_torchrun() -> None:
    assert LaunchConfig(transport="gloo").transport == "gloo"


def test_cores_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr("dlrm.launch.available_cpus", lambda: 8)
    assert threads_per_worker(LaunchConfig(nproc=1)) is None
    assert threads_per_worker(LaunchConfig(nproc=3)) == 2
    assert threads_per_worker(LaunchConfig(nproc=9)) == 1
    assert threads_per_worker(LaunchConfig(nproc=2, num_threads=16)) == 16
    for value, threads in (("3", 3), ("64", 4), ("2,1", 2), ("many", 4)):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert threads_per_worker(LaunchConfig(nproc=2)) == threads


def test_f36_threads_fit_a_quota_of_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """More threads than a container's quota pays for wait for each other, stopped."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr("dlrm.launch.available_cpus", lambda: 4)
    assert threads_per_worker(LaunchConfig(nproc=1)) == 4
    assert threads_per_worker(LaunchConfig(nproc=2)) == 2
    assert threads_per_worker(LaunchConfig(nproc=2, num_threads=16)) == 16
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_per_worker(LaunchConfig(nproc=1)) == 3


def test_a_single_process_is_rank_0() -> None:
    context = single_process()
    assert (context.rank, context.world_size, context.local_rank) == (0, 1, 0)
    context.heartbeat.beat(1, "forward")
    context.heartbeat.waiting("nothing")


def test_workers_need_linux(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(UserError, match=r"launch\.nproc=2"):
        launch(print, (), LaunchConfig(nproc=2), tmp_path)


# ----------------------------------------------------------------------------- an outer torchrun


def test_torchrun_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not under_torchrun()
    monkeypatch.setenv("WORLD_SIZE", "2")  # Left over from something else.
    assert not under_torchrun()
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert under_torchrun()


@pytest.mark.usefixtures("torchrun")
def test_hosts_of_torchrun_are_torchruns() -> None:
    assert LaunchConfig(ranks_per_host=2).ranks_per_host == 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "hydra.run.dir= is missing"),
        (["hydra.run.dirs=a"], "hydra.run.dir= is missing"),
        (["-m", "hydra.run.dir=a"], "-m"),
        (["--multirun", "hydra.run.dir=a"], "-m"),
        (["hydra.mode=MULTIRUN", "hydra.run.dir=a"], "-m"),
    ],
)
def test_what_would_differ_between_ranks_is_refused(arguments: list[str], named: str) -> None:
    with pytest.raises(UserError) as caught:
        check_torchrun_arguments(arguments)
    assert named in str(caught.value)


def test_a_named_folder_is_enough() -> None:
    check_torchrun_arguments(["data.batch_size=4", "hydra.run.dir=a"])
    check_torchrun_arguments(["++hydra.run.dir=a"])


@pytest.mark.usefixtures("torchrun")
def test_join_refuses_what_torchrun_contradicts() -> None:
    with pytest.raises(UserError, match=r"launch\.nproc=3: torchrun has started 2"):
        join(print, (), LaunchConfig(nproc=3))


def test_a_launch_of_torchrun_is_told_from_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name and its agent, the parent of all its ranks, which outlives those it restarts."""
    first = launch_id()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("MASTER_PORT", "2")
    assert launch_id() == first
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    assert launch_id() != first
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    monkeypatch.setattr(os, "getppid", os.getpid)
    assert launch_id() != first
