"""What the workers of test_launch.py and test_bench_network.py run, which import it by its name."""

from __future__ import annotations

import _multiprocessing
import contextlib
import itertools
import os
import re
import signal
import socket
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from data.errors import UserError
from dlrm.bench.network import measure_link, read_sent_bytes
from dlrm.build import communicator
from dlrm.config import LaunchConfig
from dlrm.launch import WorkerContext
from dlrm.stop import StopRequest

FOR_EVER_S = 10_000.0


class PeerLost(RuntimeError):
    """Stands for the error of a collective whose peer is gone."""


def sum_of_ranks(context: WorkerContext) -> int:
    """One all-reduce: the ranks of all."""
    ranks = torch.tensor([context.rank])
    if context.world_size > 1:
        context.heartbeat.waiting("all_reduce")
        try:
            dist.all_reduce(ranks)
        except RuntimeError as error:
            raise PeerLost(f"rank {context.rank}, waiting in all_reduce: {error}") from error
        context.heartbeat.waiting(None)
    return int(ranks)


def describe(context: WorkerContext, extra: Any) -> dict[str, Any]:
    """Who the worker is and what it finds."""
    total = sum_of_ranks(context)
    names = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MALLOC_MMAP_THRESHOLD_", "MASTER_PORT")
    return {
        "rank": context.rank,
        "world_size": context.world_size,
        "local_rank": context.local_rank,
        "sum": total,
        "extra": extra,
        "environment": {name: os.environ.get(name) for name in names},
        "num_threads": torch.get_num_threads(),
        "pid": os.getpid(),
    }


def three_steps(context: WorkerContext, how: str, who: int, pids: str) -> int:
    """Steps of an all-reduce each; at step 3 rank `who` does `how` (see `misbehave`)."""
    (Path(pids) / str(context.rank)).write_text(str(os.getpid()))
    for step in range(1, 6):
        context.heartbeat.beat(step, "forward")
        if step == 3 and who in (context.rank, -1):
            context.heartbeat.beat(step, "backward")
            misbehave(how)
        sum_of_ranks(context)
    return context.rank


def misbehave(how: str) -> None:
    """Fails in one way of many."""
    if how == "raise":
        raise ArithmeticError("rows don't add up")
    if how == "user error":
        raise UserError("data.root=nowhere: no such folder")
    if how == "no file":
        open("/nowhere/at-all")  # noqa: SIM115
    if how == "sys.exit":
        sys.exit("enough")
    if how.startswith("exit "):
        os._exit(int(how.split()[1]))
    if how.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, how))
    if how == "sleep":
        time.sleep(FOR_EVER_S)


def warn(context: WorkerContext) -> None:
    """Every rank warns, and says which it is."""
    warnings.warn("train.nothing is ignored", stacklevel=2)
    sys.stdout.write(f"rank {context.rank} here\n")


def step_until_told(context: WorkerContext, pids: str, rank: int, signal_name: str) -> int:
    """Steps until a rank is told to stop; `rank` sends itself a signal in step 3, as a batch system
    may. Returns the signal's number."""
    (Path(pids) / str(context.rank)).write_text(str(os.getpid()))
    stop = StopRequest(context.stop_file)
    for step in itertools.count(1):
        context.heartbeat.beat(step, "forward")
        if step == 3 and context.rank == rank:
            misbehave(signal_name)
        asked = torch.tensor([int(stop.asked() and stop.number)])
        dist.all_reduce(asked, dist.ReduceOp.MAX)
        if asked:
            return int(asked)
        time.sleep(0.01)
    raise AssertionError("unreachable")


def open_ports(context: WorkerContext) -> list[str]:
    """Local addresses, in hexadecimal, that this rank or its launcher listens on."""
    sum_of_ranks(context)
    sockets = set()
    for pid in (os.getpid(), os.getppid()):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets.add(re.sub(r"\D", "", os.readlink(file)))
    lines = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    rows = [line.split() for line in lines.splitlines()]
    found = [r[1].split(":")[0] for r in rows if len(r) > 9 and r[3] == "0A" and r[9] in sockets]
    sum_of_ranks(context)
    return found


def print_to_nobody(context: WorkerContext) -> str:
    """Every rank prints, rank 0 long after whoever read its lines has gone."""
    sys.stdout.write(f"rank {context.rank} … here\n")
    sys.stdout.flush()
    sum_of_ranks(context)
    for _ in range(1000):
        sys.stdout.write("more and more\n" * 100)
        sys.stdout.flush()
    sum_of_ranks(context)
    return "done"


def without_semaphores(context: WorkerContext) -> list[str]:
    """Collectives of each transport in a process that can't have a POSIX semaphore; returns the
    transports."""
    _multiprocessing.SemLock = no_semaphore  # type: ignore[attr-defined]
    found = []
    for transport in ("shared_memory", "sockets", "gloo"):
        comm = communicator(context, LaunchConfig(nproc=2, transport=transport, timeout_s=20.0))
        total = comm.all_reduce("dense", torch.ones(1)).wait()
        assert comm.all_gather_object(int(total)) == [2, 2]
        found.append(comm.transport)
    return found


def no_semaphore(*args: Any) -> None:
    """What `SemLock` does where /dev/shm is read-only."""
    raise OSError(30, "Read-only file system")


def leave(context: WorkerContext) -> None:
    """Rank 1 is done while rank 0 still waits for it."""
    if context.rank == 0:
        context.heartbeat.beat(1, "forward")
        sum_of_ranks(context)


def beat_slowly(context: WorkerContext, seconds: float) -> int:
    """A phase far longer than the timeout, which beats, and no collective."""
    until = time.monotonic() + seconds
    step = 0
    while time.monotonic() < until:
        step += 1
        context.heartbeat.beat(step, "evaluate")
        time.sleep(0.1)
    return step


def send_bytes(context: WorkerContext, num_bytes: int) -> dict[str, Any]:
    """Three times rank 0 sends `num_bytes` to rank 1, which sends twice as many; what each rank's
    interface counts, each time."""
    sizes = [num_bytes * (rank + 1) for rank in range(2)]
    sent, received = (
        torch.zeros(sizes[r], dtype=torch.uint8) for r in (context.rank, 1 - context.rank)
    )
    counts = []
    for _ in range(3):
        dist.barrier()
        start = read_sent_bytes(os.environ["GLOO_SOCKET_IFNAME"])
        works = [dist.irecv(received, 1 - context.rank), dist.isend(sent, 1 - context.rank)]
        for work in works:
            assert work is not None
            work.wait()
        dist.barrier()  # What the other hasn't got yet may not have left here.
        counts.append(read_sent_bytes(os.environ["GLOO_SOCKET_IFNAME"]) - start)
    interfaces = sorted(name for _, name in socket.if_nameindex())
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, (interfaces, counts))
    return {
        "interfaces": [names for names, _ in gathered],
        "sent_bytes": [counts for _, counts in gathered],
        "link": measure_link(context),
    }
