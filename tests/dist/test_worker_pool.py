"""`WorkerPool`: results by rank, collectives, and that every kind of failure is told and ends."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dist.worker_pool import CHECKOUT, WorkerFailed, WorkerPool, Workers


@dataclass
class Pair:
    """A type of this module: workers must import it under the same name."""

    left: int
    right: torch.Tensor


def is_running(pid: int) -> bool:
    """Whether the process exists and isn't a zombie that nobody has collected yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# ------------------------------------------------------------------------------ what workers run


def identity(rank: int, world_size: int, *args: Any) -> tuple[Any, ...]:
    return (rank, world_size, os.getpid(), *args)


def swap(rank: int, world_size: int, pair: Pair) -> Pair:
    return Pair(rank, pair.right * pair.left)


def ragged_bytes(rank: int, world_size: int) -> list[int]:
    """Rank r sends r + peer bytes of value 10 r + peer to each peer."""
    send_splits = [rank + peer for peer in range(world_size)]
    sent = torch.cat([torch.full((n,), 10 * rank + p) for p, n in enumerate(send_splits)])
    received = torch.empty(sum(send_splits), dtype=torch.uint8)
    dist.all_to_all_single(received, sent.to(torch.uint8), send_splits, send_splits)
    return received.tolist()


def sum_of_ranks(rank: int, world_size: int, start: float) -> tuple[float, torch.dtype]:
    total = torch.tensor(start + rank, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item(), total.dtype


def raise_in(failing_rank: int, rank: int) -> None:
    if rank == failing_rank:
        raise ValueError(f"row 7 is bad\nat rank {rank}")


def raise_while_others_wait(rank: int, world_size: int) -> None:
    raise_in(1, rank)
    dist.barrier()


def end_while_others_wait(rank: int, world_size: int, how: str) -> None:
    if rank == 1 and how == "exit":
        os._exit(3)
    if rank == 1 and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def wait_for_ever(rank: int, world_size: int, waiting_rank: int) -> None:
    if rank == waiting_rank:
        threading.Event().wait()


def one_more_operation(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(1), async_op=True)


def fail_aside(rank: int, world_size: int) -> None:
    """Failures that Python itself would only print."""
    thread = threading.Thread(target=raise_in, args=(rank, rank))
    thread.start()
    thread.join()
    Path(os.devnull).open()  # noqa: SIM115  (its finalizer warns: never closed)
    gc.collect()
    warnings.warn("this is old", DeprecationWarning, stacklevel=1)


def change_state(rank: int, world_size: int) -> list[Any]:
    """What a call sees at first; it leaves all of it changed."""
    seen = [torch.get_default_dtype(), torch.get_num_threads(), os.environ.get("POOL"), Path.cwd()]
    seen.append(torch.rand(1).item())
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    os.environ["POOL"] = "changed"
    os.chdir("/")
    return seen


_children: list[subprocess.Popen[bytes]] = []


def start_child(rank: int, world_size: int) -> int:
    _children.append(subprocess.Popen(["sleep", "600"]))
    return _children[-1].pid


def expect_failure(pool: WorkerPool, function: Any, *args: Any) -> WorkerFailed:
    """Runs what fails; afterwards no worker runs, and the pool serves the next test."""
    pool.run(identity)
    pids = pool.pids
    assert all(map(is_running, pids))
    with pytest.raises(WorkerFailed) as caught:
        pool.run(function, *args)
    assert not any(map(is_running, pids)), "workers out of step may not serve another test"
    assert pool.pids == []
    return caught.value


# ---------------------------------------------------------------------------------------- results


def test_results_come_by_rank_from_workers_that_stay(workers: Workers) -> None:
    pool = workers(2)
    first = pool.run(identity, "a", {"b": 1})
    assert [result[:2] + result[3:] for result in first] == [
        (0, 2, "a", {"b": 1}),
        (1, 2, "a", {"b": 1}),
    ]
    assert [result[2] for result in first] == pool.pids
    assert workers(2).run(identity, "a", {"b": 1}) == first, "the same processes serve every test"
    by_rank = pool.run_by_rank(identity, [("zero",), ("one", 1)])
    assert [result[3:] for result in by_rank] == [("zero",), ("one", 1)]


def test_arguments_and_results_may_be_of_the_tests_own_types(workers: Workers) -> None:
    pairs = workers(2).run(swap, Pair(3, torch.tensor([1.0, 2.0])))
    assert [pair.left for pair in pairs] == [0, 1]
    assert [pair.right.tolist() for pair in pairs] == [[3.0, 6.0]] * 2


def test_ragged_all_to_all_of_bytes(workers: Workers) -> None:
    assert workers(3).run(ragged_bytes) == [
        [10, 20, 20],
        [1, 11, 11, 21, 21, 21],
        [2, 2, 12, 12, 12, 22, 22, 22, 22],
    ]


def test_all_reduce_in_double_precision(workers: Workers) -> None:
    start = 2.0**-40  # lost beside 1 in fp32
    for world_size in (2, 3):
        total = world_size * start + sum(range(world_size))
        expected = [(total, torch.float64)] * world_size
        assert workers(world_size).run(sum_of_ranks, start) == expected


def test_every_call_starts_in_the_same_state(workers: Workers) -> None:
    first, second = workers(2).run(change_state), workers(2).run(change_state)
    assert first == second
    assert first[0][:3] == [torch.float32, 1, None]
    assert not any(seen[3].is_relative_to(CHECKOUT) for seen in first), (
        "a test's files go elsewhere"
    )


def test_a_module_is_found_by_its_file(workers: Workers, tmp_path: Path) -> None:
    """pytest's import mode gives names that don't lead to the file."""
    for number in (1, 2):
        file = tmp_path / f"{number}" / "nowhere.py"
        file.parent.mkdir()
        file.write_text(f"def answer(rank, world_size):\n    return {number}, __name__\n")
        module = load("no.such.package", file)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "no.such.package", module)
            assert workers(2).run(module.answer) == [(number, "no.such.package")] * 2


def load(name: str, file: Path) -> Any:
    """A module loaded under a name as pytest's importlib mode does."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_function_that_workers_cannot_import_is_refused(workers: Workers) -> None:
    with pytest.raises(ValueError, match=r"<lambda> isn't a module-level function"):
        workers(2).run(lambda rank, world_size: rank)
    with pytest.raises(ValueError, match="3 ranks' arguments for 2 workers"):
        workers(2).run_by_rank(identity, [(), (), ()])


# --------------------------------------------------------------------------------------- failures


def test_an_exception_is_told_with_its_traceback(workers: Workers) -> None:
    failure = expect_failure(workers(2), raise_while_others_wait)
    assert failure.rank == 1
    text = str(failure)
    assert "test_worker_pool.raise_while_others_wait" in text
    assert "rank 1 of 2 raised ValueError: row 7 is bad\n" in text
    assert "in raise_in\n" in text, "the traceback leads to the line"
    assert "row 7 is bad\nat rank 1\n" in text, "the message is whole"
    assert "rank 0 of 2 had not returned and was killed" in text
    assert workers(2).run(sum_of_ranks, 0.0) == [(1.0, torch.float64)] * 2


@pytest.mark.parametrize(
    ("how", "expected"), [("exit", "exited with status 3"), ("kill", "was killed by SIGKILL")]
)
def test_a_dead_worker_is_noticed_and_named(workers: Workers, how: str, expected: str) -> None:
    """Its peer raises at once, maybe before the end is seen: the dead one is to blame."""
    failure = expect_failure(workers(2), end_while_others_wait, how)
    assert failure.rank == 1
    assert f"rank 1 of 2 {expected}" in str(failure)


def test_a_hung_worker_is_killed_and_its_place_is_told(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers(2).run(identity)  # within the usual limit: it may have to import this file
    monkeypatch.setattr(workers(2), "timeout_s", 1.0)
    failure = expect_failure(workers(2), wait_for_ever, 1)
    assert failure.rank == 1
    assert "no answer within 1 s from ranks [1]" in str(failure)
    assert "in wait_for_ever\n" in str(failure), "the stack shows where it stood"


def test_an_operation_left_over_fails_its_own_test_and_not_the_next(workers: Workers) -> None:
    failure = expect_failure(workers(2), one_more_operation)
    assert "unequal numbers of operations" in str(failure)
    assert failure.rank == 1


def test_what_python_would_only_print_is_a_failure() -> None:
    with WorkerPool(1) as pool:
        text = str(expect_failure(pool, fail_aside))
    assert "rank 0 of 1 raised DeprecationWarning: this is old\n" in text
    assert "ValueError: row 7 is bad" in text, "of the thread"
    assert "ResourceWarning: unclosed file" in text, "of the finalizer"


# -------------------------------------------------------------------------------------- processes


def test_nothing_is_left_after_close() -> None:
    with WorkerPool(1) as pool:
        children = pool.run(start_child)
        seen = pool.run(change_state)[0]
        pids = [*pool.pids, *children]
        assert all(map(is_running, pids))
    assert not any(map(is_running, pool.pids))
    assert wait_until_gone(pids), "also what a worker started"
    assert not seen[3].parent.exists(), "the folder of the workers is removed"
    pool.close()  # once more is no error


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
def test_workers_die_with_the_process_that_started_them(tmp_path: Path) -> None:
    """Even one that is stuck: nobody reads its connection's end."""
    script = (
        "import os, threading\n"
        "from tests.dist import test_worker_pool as tests\n"
        "pool = tests.WorkerPool(1)\n"
        "pool.run(tests.identity)\n"
        "print(*pool.pids, flush=True)\n"
        "threading.Timer(0.2, os._exit, [0]).start()\n"
        "pool.run(tests.wait_for_ever, 0)\n"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}  # nobody is left to remove the folder
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert wait_until_gone([int(done.stdout)])


def wait_until_gone(pids: list[int]) -> bool:
    """Whether all processes end within 10 s; they aren't children of this one."""
    deadline_s = time.monotonic() + 10
    while any(map(is_running, pids)) and time.monotonic() < deadline_s:
        threading.Event().wait(0.01)
    return not any(map(is_running, pids))
