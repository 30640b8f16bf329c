"""One worker process of a run: what it does between the launcher's start and its own end.

Nothing here imports torch before the worker is known to its launcher: a worker that fails or
hangs in an import is told like any other.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import os
import pickle
import signal
import sys
import time
import traceback
import uuid
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from dlrm.heap import keep_heap
from dlrm.heartbeat import (
    NO_STEP,
    START,
    Heartbeat,
    NoHeartbeat,
    heartbeat_file,
    read_heartbeats,
)
from dlrm.streams import ready_streams

if TYPE_CHECKING:
    from torch.distributed import Store

START_TIMEOUT_S = 60.0
"""Ranks may be that far apart until all are up, whatever `launch.timeout_s`: a cold import."""

# Errors of these packages that are ValueErrors are the user's to mend (as in dlrm/__main__.py).
_OUR_PACKAGES = ("data", "embeddings", "dlrm")
_END_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
# gloo's own limit would end a run that was suspended as soon as it goes on. The watchdog, which
# knows of that, finds who hangs.
_GROUP_TIMEOUT = timedelta(days=7)
_POLL_S = 0.02
_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class WorkerContext:
    """One process of a run: which one it is, and where it tells how far it has come."""

    rank: int
    world_size: int
    local_rank: int
    heartbeat: Heartbeat | NoHeartbeat
    stop_file: Path | None = None
    """Where the launcher says that the run is to end in order; None: no launcher of ours."""


@dataclass(frozen=True)
class RankNetwork:
    """Where a worker meets the others, if not where its launcher is.

    Attributes:
        namespace: file of a network namespace.
        interface: the network interface in it that joins the workers.
    """

    namespace: str
    interface: str

    def enter(self) -> None:
        """Takes the calling thread, and all that it starts from now on, into the namespace.

        Sockets that are open stay where they are.

        Raises:
            OSError: naming the namespace.
        """
        libc = ctypes.CDLL(None, use_errno=True)  # os.setns is Python 3.12's.
        with open(self.namespace, "rb") as opened:
            if libc.setns(opened.fileno(), _CLONE_NEWNET) != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), self.namespace)
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface


@dataclass(frozen=True)
class Task:
    """What every worker of a run does."""

    entry: Callable[..., Any]
    args: tuple[Any, ...]
    device: str
    num_threads: int | None
    timeout_s: float
    networks: tuple[RankNetwork, ...] | None = None
    """By local rank; None: all stay where the launcher is."""


@dataclass(frozen=True)
class Failure:
    """How a worker failed.

    Attributes:
        kind: `error`; `user`: a mistake of the user; `os`: a file or disk; `secondary`: another
            rank was lost; `stopped`: told to end.
        time_s: of `time.monotonic()`.
        message: the exception's.
        traceback: whole; empty for an error that our own code raises on purpose.
        os_error: errno, text and file name of kind `os`.
        signal: of kind `stopped`, the one that told it.
    """

    rank: int
    kind: str
    time_s: float
    message: str
    traceback: str
    os_error: tuple[int, str, str] | None = None
    signal: int = 0


class Stopped(BaseException):
    """This worker is told to end: another one has failed, or the run was ended."""

    def __init__(self, time_s: float, number: int) -> None:
        super().__init__("told to end")
        self.time_s, self.number = time_s, number


def main(folder: Path, launcher_pid: int, *, stops_in_order: bool = False) -> None:
    """Runs the task in `folder` as the rank that the environment says, then ends the process.

    Args:
        folder: shared with the launcher.
        launcher_pid: its process.
        stops_in_order: see `launch`.
    """
    _die_with(launcher_pid)
    ready_streams()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    heartbeat = Heartbeat(heartbeat_file(folder, rank))
    _handle_signals(folder, rank, stops_in_order=stops_in_order)
    brief_warnings(shown=rank == 0)
    try:
        task: Task = pickle.loads((folder / "task").read_bytes())
        local_rank = int(os.environ["LOCAL_RANK"])
        context = WorkerContext(rank, world_size, local_rank, heartbeat, stop_file(folder))
        value = run_as_rank(task, context)
        if rank == 0:
            (folder / "value").write_bytes(pickle.dumps(value))
        heartbeat.finished()
    except BaseException as error:
        for number in _END_SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # Being told to end isn't why it failed.
        failure = _describe(error, rank)
        partial = failure_file(folder, rank).with_suffix(".partial")
        partial.write_text(json.dumps(asdict(failure)), encoding="utf-8")
        os.replace(partial, failure_file(folder, rank))
        _end(1)


def run_as_rank(task: Task, context: WorkerContext) -> Any:
    """Runs the task's entry as one rank, within a process group where there are several."""
    keep_heap()
    import torch
    import torch.distributed as dist

    if task.num_threads is not None:
        torch.set_num_threads(task.num_threads)
    if context.world_size == 1:
        return task.entry(context, *task.args)
    # The first optimizer would import it, a second of work that `timeout_s` would count.
    importlib.import_module("torch._dynamo")
    context.heartbeat.beat(NO_STEP, START)
    start_timeout = timedelta(seconds=max(task.timeout_s, START_TIMEOUT_S))
    store, rank, world_size = next(dist.rendezvous("env://", timeout=start_timeout))
    store = _store_of_group(store, rank, world_size, start_timeout)
    # Only once all are up does `timeout_s` count: ranks may differ by seconds in their imports.
    store.set(f"up/{rank}", "")
    store.wait([f"up/{other}" for other in range(world_size)], start_timeout)
    context.heartbeat.beat(NO_STEP, START)
    if task.networks is not None:
        # The store's connection stays; gloo's threads and connections come after, and follow.
        task.networks[context.local_rank].enter()
    dist.init_process_group(
        "nccl" if task.device == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=_GROUP_TIMEOUT,
    )
    value = task.entry(context, *task.args)
    # Not after a failure: it can wait for ranks that are gone.
    dist.destroy_process_group()
    return value


def _store_of_group(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """A part of the store that only these processes share.

    torchrun keeps one store for all groups of workers that it starts, with what those before have
    left: addresses of ranks that are gone (pytorch/pytorch#135712), which gloo would connect to.
    Nor is the number of restarts the same on all hosts. So each rank says who it is, and the first
    one answers with a name for the group, until all have it; what it tells those of before, nobody
    reads.
    """
    from torch.distributed import PrefixStore

    own = uuid.uuid4().hex
    if rank != 0:
        store.set(f"hello/{rank}", own)
        group = PrefixStore(store.get(f"group/{own}").decode(), store)
        group.set(f"named/{rank}", "")
        return group
    group = PrefixStore(own, store)
    others = range(1, world_size)
    until_s = time.monotonic() + timeout.total_seconds()
    # After that, the caller's wait tells who is missing.
    while not group.check([f"named/{r}" for r in others]) and time.monotonic() < until_s:
        for other in others:
            if store.check([f"hello/{other}"]):
                store.set(f"group/{store.get(f'hello/{other}').decode()}", own)
        time.sleep(_POLL_S)
    return group


def brief_warnings(*, shown: bool) -> None:
    """Warnings as one line each; of ranks that say the same as another, none."""
    warnings.formatwarning = lambda message, *_: f"dlrm: warning: {message}\n"
    if not shown:
        warnings.showwarning = lambda *_: None


def is_user_error(error: BaseException) -> bool:
    """Whether an error is the user's to mend."""
    return isinstance(error, ValueError) and (type(error).__module__.split(".")[0] in _OUR_PACKAGES)


def is_secondary(error: BaseException) -> bool:
    """Whether an error, or one that it followed from, only says that another rank is lost."""
    seen: BaseException | None = error
    while seen is not None:
        # By name: torch may be what couldn't be imported.
        if {kind.__name__ for kind in type(seen).__mro__} & {"PeerLost", "DistError"}:
            return True
        # gloo's own errors have no type.
        if type(seen) is RuntimeError and "gloo/" in str(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def failure_file(folder: Path, rank: int) -> Path:
    """Where a worker says how it failed, whole or not at all."""
    return folder / f"{rank}.failure"


def stop_file(folder: Path) -> Path:
    """Where whoever gets it writes the number of a signal that is to end the run in order."""
    return folder / "stop"


def end_file(folder: Path) -> Path:
    """What the launcher makes before it tells workers to end at once."""
    return folder / "end"


def stack_file(folder: Path, rank: int) -> Path:
    """Where a worker's stack goes when it is told to end or crashes."""
    return folder / f"{rank}.stack"


def _die_with(launcher_pid: int) -> None:
    """The kernel ends this process when its launcher is gone, even if that was SIGKILLed."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher_pid:  # It was gone before the line above.
        os._exit(1)


def _handle_signals(folder: Path, rank: int, *, stops_in_order: bool) -> None:
    """On a signal the stack is written, even by a thread that hangs in C, then `Stopped` raised.

    A batch system may send its signal to workers, too, or to them alone. Of a run that stops in
    order, a first one that isn't the launcher's goes into the stop file.
    """
    file = open(stack_file(folder, rank), "w", encoding="utf-8")  # noqa: SIM115  (lives as long as the process)
    may_go_on = stops_in_order

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal may_go_on
        if may_go_on and not _is_ending(folder):
            may_go_on = False
            with suppress(OSError):
                stop_file(folder).write_text(str(number), encoding="utf-8")
                os.ftruncate(file.fileno(), 0)  # The stack: nothing has failed.
                os.lseek(file.fileno(), 0, os.SEEK_SET)
                return
        signal.signal(number, signal.SIG_IGN)  # What cleans up now isn't to be stopped again.
        raise Stopped(time.monotonic(), number)

    faulthandler.enable(file)
    for number in _END_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # As SIGHUP is under nohup.
            signal.signal(number, stop)
            faulthandler.register(number, file, chain=True)


def _is_ending(folder: Path) -> bool:
    """Whether the launcher has a reason to end the workers: else a signal is from elsewhere."""
    if end_file(folder).exists() or any(folder.glob("*.failure")):
        return True
    return any(not beat.is_finished and _is_gone(beat.pid) for beat in read_heartbeats(folder))


def _is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in ("Z", "X")


def _describe(error: BaseException, rank: int) -> Failure:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))
    message = f"{type(error).__name__}: {error}"
    time_s = time.monotonic()
    if isinstance(error, Stopped):
        return Failure(rank, "stopped", error.time_s, message, text, signal=error.number)
    if is_secondary(error):
        return Failure(rank, "secondary", time_s, message, text)
    if is_user_error(error):
        return Failure(rank, "user", time_s, str(error), text)
    if isinstance(error, OSError) and error.filename and error.errno is not None:
        about = (error.errno, str(error.strerror), str(error.filename))
        return Failure(rank, "os", time_s, message, text, about)
    # Errors that our code raises on purpose say all there is to say, as in dlrm/__main__.py.
    is_ours = type(error).__module__.split(".")[0] in _OUR_PACKAGES
    return Failure(
        rank, "error", time_s, str(error) if is_ours else message, "" if is_ours else text
    )


def _end(status: int) -> None:
    """Ends the process without waiting for threads or groups, which may hang now."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # A closed pipe: nobody reads it.
    os._exit(status)
