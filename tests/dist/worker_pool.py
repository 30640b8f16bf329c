"""A pool of worker processes joined in one gloo group and reused between tests.

A distributed test in five lines, in a file of `tests/dist/`:

    def sum_of_ranks(rank: int, world_size: int, start: float) -> float:    # runs in every worker
        total = torch.tensor(start + rank)
        dist.all_reduce(total)
        return total.item()

    def test_sum_of_ranks(workers: Workers) -> None:
        assert workers(3).run(sum_of_ranks, 0.5) == [4.5, 4.5, 4.5]         # results by rank

(with `from tests.dist.worker_pool import Workers`; `workers` is a fixture of conftest.py.)

Rules:
- The function is at module level: workers import its file by themselves (pytest doesn't rewrite
  asserts there: return values and compare them in the test, or use `torch.testing`). Arguments and
  results are pickled, and the result is a copy. `run_by_rank` gives each rank its own arguments.
- Test for an expected exception within the function (`pytest.raises`). One that leaves it fails the
  test as `WorkerFailed`, with its traceback, and costs a new start of the workers: seconds.
- Warnings are errors, and so is an exception in a thread or a finalizer, as under pytest.
- All ranks issue the same number of operations on the default group, for the next test uses it
  too; point-to-point messages go over a group of the test's own (`dist.new_group`), which the
  function destroys. The function doesn't destroy the default group.
- Every call starts with seed 0, fp32 as the default type, one thread, and in its worker's own
  folder, outside the checkout.

Waits have limits: `timeout_s` for a call (then the report shows where every rank stood), and the
group's own for one collective. Workers die with the process that started them.

Workers are forks of a process that has imported torch once for all and done nothing else
(multiprocessing's fork server): an import of their own would take each of them seconds.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar, cast
from unittest.mock import patch

CHECKOUT = Path(__file__).parents[2]
T = TypeVar("T")

# After the first failure the others get this long to report theirs: the first by time is named.
_GRACE_S = 0.5
# A message that has begun and doesn't end within this time is taken for a dead worker's.
_STALL_S = 10.0
# A process that has got SIGKILL is gone within this time.
_KILL_S = 10.0
# Imported before the fork; a module that isn't there is passed over (ours, where pytest wasn't
# started in the checkout). torch._dynamo: the first optimizer would import it.
_PRELOADED = ["torch", "torch._dynamo", "torch.distributed", "tests.commands"]
_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class WorkerFailed(RuntimeError):
    """A worker raised, died or didn't answer.

    Attributes:
        rank: the rank to blame: one that died, else the first that raised, else the lowest of
            those that didn't answer.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


@dataclass
class _Worker:
    rank: int
    process: ForkServerProcess
    connection: Connection


@dataclass
class _Reply:
    rank: int
    kind: Literal["returned", "raised", "died", "silent"]
    when_s: float  # of the monotonic clock, which all processes of a machine share
    body: bytes | str = ""  # the pickled result, or a summary line and the traceback
    num_operations: int = 0  # on the default group, since its start


class WorkerPool:
    """W processes in one gloo group that run functions for tests; started by the first `run`.

    After a failure or a timeout all workers are killed, and the next `run` starts new ones.
    """

    def __init__(
        self,
        world_size: int,
        timeout_s: float = 60.0,
        *,
        start_timeout_s: float = 120.0,
        group_timeout_s: float = 30.0,
    ) -> None:
        """
        Args:
            timeout_s: limit of one `run`, not counting a start.
            start_timeout_s: limit of a start; importing torch takes seconds on a busy machine.
            group_timeout_s: limit of one collective.
        """
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.start_timeout_s = start_timeout_s
        self.group_timeout_s = group_timeout_s
        self._workers: list[_Worker] = []
        self._folder: Path | None = None

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids by rank; empty while no workers run."""
        return [_pid(worker.process) for worker in self._workers]

    def run(self, function: Callable[..., T], *args: Any) -> list[T]:
        """`function(rank, world_size, *args)` in every worker: results by rank.

        Raises:
            ValueError: workers can't import the function.
            WorkerFailed: a worker raised, died, or didn't answer within `timeout_s`.
        """
        __tracebackhide__ = True
        return self.run_by_rank(function, [args] * self.world_size)

    def run_by_rank(
        self, function: Callable[..., T], args_by_rank: Sequence[tuple[Any, ...]]
    ) -> list[T]:
        """`function(rank, world_size, *args_by_rank[rank])` in every worker; raises as `run`."""
        __tracebackhide__ = True
        if len(args_by_rank) != self.world_size:
            raise ValueError(f"{len(args_by_rank)} ranks' arguments for {self.world_size} workers")
        address = _address(function)
        # Arguments are pickled by themselves: they may need the function's module to be loaded.
        requests = [pickle.dumps((*address, pickle.dumps(args))) for args in args_by_rank]
        try:
            if not self._workers:
                self._start()
            for worker, request in zip(self._workers, requests, strict=True):
                with suppress(OSError):  # it died while idle: its reply will tell
                    worker.connection.send_bytes(request)
            where = f"{address[0]}.{address[2]}"
            replies = self._await_replies(self.timeout_s, where)
            num_operations = [reply.num_operations for reply in replies]
            if len(set(num_operations)) > 1:
                raise WorkerFailed(
                    f"ranks issued unequal numbers of operations on the default group by the end "
                    f"of {where}: {num_operations} by rank; those left over would meet the next "
                    "test's (use a group of the test's own for point-to-point messages)",
                    num_operations.index(min(num_operations)),
                )
        except BaseException:  # pytest-timeout's and Ctrl-C as well: the workers aren't in step
            self.close()
            raise
        return [pickle.loads(cast(bytes, reply.body)) for reply in replies]

    def close(self) -> None:
        """Kills the workers and what they started, and removes their folder."""
        for worker in self._workers:
            with suppress(ProcessLookupError, PermissionError):  # gone, or about to be
                os.killpg(_pid(worker.process), signal.SIGKILL)
            worker.process.kill()  # One that hasn't got to its session yet.
        for worker in self._workers:
            worker.process.join(_KILL_S)
            assert worker.process.exitcode is not None, f"not gone within {_KILL_S} s"
            worker.connection.close()
        self._workers = []
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="worker_pool_"))
        environment = _environment()
        context = fork_server()
        with patch.dict(os.environ, environment, clear=True):
            for rank in range(self.world_size):
                connection, theirs = _connect()
                with theirs:
                    numbers = (rank, self.world_size, self.group_timeout_s)
                    args = (*numbers, theirs, environment, self._folder)
                    process = context.Process(target=_main, args=args, daemon=True)
                    process.start()
                self._workers.append(_Worker(rank, process, connection))
        self._await_replies(self.start_timeout_s, "the start of the workers")

    def _await_replies(self, timeout_s: float, where: str) -> list[_Reply]:
        """One reply per rank; raises `WorkerFailed` if one isn't `returned`."""
        __tracebackhide__ = True
        replies: dict[int, _Reply] = {}
        pending = {worker.connection: worker for worker in self._workers}
        deadline_s = time.monotonic() + timeout_s
        has_failed = False
        while pending:
            ready = wait(list(pending), max(0.0, deadline_s - time.monotonic()))
            if not ready:
                break
            for connection in cast("list[Connection]", ready):
                reply = _receive(pending.pop(connection))
                replies[reply.rank] = reply
                if reply.kind != "returned" and not has_failed:
                    has_failed = True
                    deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
        for worker in pending.values():
            replies[worker.rank] = _Reply(worker.rank, "silent", time.monotonic())
        if has_failed:
            raise self._failure(list(replies.values()), where)
        if pending:
            raise self._hang([worker.rank for worker in pending.values()], where, timeout_s)
        return [replies[rank] for rank in range(self.world_size)]

    def _failure(self, replies: list[_Reply], where: str) -> WorkerFailed:
        # The exit statuses; those of the dead are set, so that a signal to them changes nothing.
        processes = [worker.process for worker in self._workers]
        self.close()
        # Peers of a dead rank may raise before its end is noticed here.
        order = {"died": 0, "raised": 1, "silent": 2, "returned": 3}
        first, *others = sorted(replies, key=lambda reply: (order[reply.kind], reply.when_s))
        lines = [f"in {where}:"]
        for reply in (first, *others):
            name = f"rank {reply.rank} of {self.world_size}"
            if reply.kind == "died":
                lines.append(f"{name} {_how_it_ended(processes[reply.rank].exitcode)}")
            elif reply.kind == "raised":
                summary, text = cast(str, reply.body).split("\n", 1)
                lines.append(f"{name} raised {summary}")
                if reply is first:
                    lines.append(text.rstrip())
            elif reply.kind == "silent":
                lines.append(f"{name} had not returned and was killed")
        return WorkerFailed("\n".join(lines), first.rank)

    def _hang(self, ranks: list[int], where: str, timeout_s: float) -> WorkerFailed:
        # The signal makes a worker write where its threads stand, and die of it.
        for rank in ranks:
            os.kill(_pid(self._workers[rank].process), signal.SIGUSR1)
        lines = [f"in {where}: no answer within {timeout_s:g} s from ranks {ranks}"]
        for rank in ranks:
            self._workers[rank].process.join(_GRACE_S)
            assert self._folder is not None
            path = _stack_path(self._folder, rank)
            stack = path.read_text() if path.exists() else ""
            lines.append(f"rank {rank} of {self.world_size} stood at")
            lines.append(stack.rstrip() or "  (unknown: it didn't tell)")
        return WorkerFailed("\n".join(lines), ranks[0])


def fork_server() -> ForkServerContext:
    """The context whose processes are forks of one that has imported torch once for all.

    That one is started by the first call, in the checkout, where it finds our modules, and with the
    environment of workers.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    folder = Path.cwd()
    os.chdir(CHECKOUT)
    try:
        with patch.dict(os.environ, _environment(), clear=True):
            forkserver.ensure_running()
    finally:
        os.chdir(folder)
    return context


def _environment() -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if k not in _LAUNCHER_VARIABLES}
    loopback = "lo" if sys.platform == "linux" else "lo0"
    return inherited | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback}


# The type of the fixture `workers`: world size → its pool.
Workers = Callable[[int], WorkerPool]


def _address(function: Callable[..., Any]) -> tuple[str, str, str]:
    """(module name, file, qualified name), by which a worker finds the function."""
    module = sys.modules.get(function.__module__)
    file = getattr(module, "__file__", None)
    found: Any = module
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    if module is None or file is None or module.__name__ == "__main__" or found is not function:
        raise ValueError(
            f"{function.__module__}.{function.__qualname__} isn't a module-level function of an "
            "importable file: workers can't find it"
        )
    return module.__name__, str(Path(file).resolve()), function.__qualname__


def _connect() -> tuple[Connection, Connection]:
    """Our end, whose reads and writes can't block for ever, and the worker's."""
    ours, theirs = socket.socketpair()
    limit = struct.pack("ll", int(_STALL_S), 0)  # a struct timeval
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        ours.setsockopt(socket.SOL_SOCKET, option, limit)
    return Connection(ours.detach()), Connection(theirs.detach())


def _receive(worker: _Worker) -> _Reply:
    try:
        return _Reply(worker.rank, *pickle.loads(worker.connection.recv_bytes()))
    except (EOFError, OSError):
        # The connection closes before the process has ended: its status follows at once.
        worker.process.join(_GRACE_S)
        return _Reply(worker.rank, "died", time.monotonic())


def _pid(process: ForkServerProcess) -> int:
    assert process.pid is not None
    return process.pid


def _how_it_ended(status: int | None) -> str:
    assert status is not None
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"exited with status {status}"


def _stack_path(folder: Path, rank: int) -> Path:
    return folder / f"stack_{rank}.txt"


# -------------------------------------------------------------------------- in a worker's process


def _main(
    rank: int,
    world_size: int,
    group_timeout_s: float,
    connection: Connection,
    environment: dict[str, str],
    folder: Path,
) -> None:
    # A session of its own: Ctrl-C reaches pytest alone, and `close` kills the group.
    os.setsid()
    # A thread: what the fork server starts keeps it alive, so its end can't be the sign.
    threading.Thread(target=_die_with_starter, daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
    warnings.simplefilter("error")
    # Stays open as long as the process. `chain`: then the signal's default, the end.
    stacks = _stack_path(folder, rank).open("w")
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True, chain=True)
    faulthandler.enable()
    stray: list[str] = []
    _collect_stray_exceptions(stray)
    own_folder = folder / f"rank_{rank}"
    own_folder.mkdir()
    os.chdir(own_folder)
    join = partial(_join, rank, world_size, folder, group_timeout_s)
    connection.send_bytes(_reply(stray, join))
    while True:
        try:
            request = connection.recv_bytes()
        except (EOFError, OSError):  # the pool is gone
            return
        connection.send_bytes(_reply(stray, partial(_call, rank, world_size, request)))


def _call(rank: int, world_size: int, request: bytes) -> Any:
    module_name, file, qualified_name, args = pickle.loads(request)
    with _fresh_state():
        function = _import_function(module_name, file, qualified_name)
        return function(rank, world_size, *pickle.loads(args))


def _die_with_starter() -> None:
    """Ends this process, and what it has started, when the process of the pool is gone."""
    starter = multiprocessing.parent_process()
    assert starter is not None
    starter.join()
    os.killpg(0, signal.SIGKILL)


def _join(rank: int, world_size: int, folder: Path, timeout_s: float) -> None:
    # Not at the top: the process of the pool itself doesn't need it.
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def _reply(stray: list[str], call: Callable[[], Any]) -> bytes:
    """The fields of a `_Reply` but the rank, pickled."""
    num_operations = 0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            body: bytes | str = pickle.dumps(call())
        num_operations = _num_operations()
        if stray:
            raise RuntimeError("a thread or a finalizer raised")
        kind = "returned"
    except BaseException as error:  # SystemExit and pytest's outcomes too: all belong in the report
        kind = "raised"
        summary = traceback.format_exception_only(type(error), error)[-1].split("\n", 1)[0]
        asides = [f"\nin a thread or a finalizer:\n{text}" for text in stray]
        body = "".join([f"{summary}\n{traceback.format_exc()}", *asides])
        stray.clear()
    return pickle.dumps((kind, time.monotonic(), body, num_operations))


def _num_operations() -> int:
    import torch.distributed as dist

    group: Any = dist.group.WORLD
    if group is None:
        raise RuntimeError("the function destroyed the default process group")
    count: int = group._get_sequence_number_for_group()
    return count


def _collect_stray_exceptions(stray: list[str]) -> None:
    """Gathers what Python would only print: exceptions that end a thread or leave a finalizer."""

    def keep(args: Any) -> None:
        if args.exc_type is not SystemExit:
            lines = traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback)
            stray.append("".join(lines))

    sys.unraisablehook = keep
    threading.excepthook = keep


def _import_function(module_name: str, file: str, qualified_name: str) -> Callable[..., Any]:
    module = sys.modules.get(module_name)
    loaded_from = getattr(module, "__file__", None)
    if module is None or loaded_from is None or str(Path(loaded_from).resolve()) != file:
        module = _import_module(module_name, file)
    found: Any = module
    for name in qualified_name.split("."):
        found = getattr(found, name)
    function: Callable[..., Any] = found
    return function


def _import_module(name: str, file: str) -> ModuleType:
    """The module by its name where that leads to the file, else by the file, under that name."""
    spec = None
    with suppress(ModuleNotFoundError, ValueError):
        spec = importlib.util.find_spec(name)
    if spec is not None and spec.origin is not None and str(Path(spec.origin).resolve()) == file:
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def _fresh_state() -> Iterator[None]:
    """Seeds, and undoes what a function commonly sets, so that the order of tests is free."""
    import numpy as np
    import torch

    folder = Path.cwd()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    try:
        with patch.dict(os.environ):
            yield
    finally:
        os.chdir(folder)
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(1)
        if torch.are_deterministic_algorithms_enabled():  # the call imports the compiler: seconds
            torch.use_deterministic_algorithms(False)
