"""Starts the workers of a run through torch's elastic launcher, and tells how they ended.

Each worker is a fresh Python that runs dlrm/worker.py in a session of its own: Ctrl-C reaches only
the launcher, which ends the workers in order. Launcher and workers share a temporary folder: the
task, the value of rank 0, and each rank's heartbeat, failure and stack.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from data.errors import UserError
from data.files import naming
from dlrm.blame import Verdict, WorkersFailed, describe
from dlrm.heap import keep_heap
from dlrm.heartbeat import Heartbeat, NoHeartbeat, heartbeat_file
from dlrm.stop import announce, handlers_restored, stop_on_signal
from dlrm.watchdog import GRACE_S, Watchdog, watch_self
from dlrm.worker import (
    RankNetwork,
    Task,
    WorkerContext,
    brief_warnings,
    is_secondary,
    run_as_rank,
    stack_file,
    stop_file,
)
from embeddings.machine import available_cpus, usable_cpus

if TYPE_CHECKING:
    from dlrm.config import LaunchConfig

_MONITOR_S = 0.1
_UNUSED = (signal.SIGQUIT,)
# torchrun ends all ranks when the first ends: the one to blame is to have told why by then.
_LET_SPEAK_S = 2.0
# What the environment of workers holds unless the user has set it. OpenMP's barriers spin and
# steal the cores from the other workers; gloo would ask DNS for an interface; C++ warnings of a
# lost peer say less than the launcher does. (MALLOC_MMAP_THRESHOLD_, for truer memory figures, made
# steps half as slow again: docs/benchmarks.md, "Log of what was tried".)
_DEFAULTS = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


def launch(
    entry: Callable[..., Any],
    args: tuple[Any, ...],
    config: LaunchConfig,
    run_dir: Path,
    *,
    networks: tuple[RankNetwork, ...] | None = None,
    stops_in_order: bool = False,
) -> Any:
    """Runs `entry(context, *args)` in `config.nproc` fresh processes.

    Args:
        entry: a function at the top of a module that workers can import.
        args: can be pickled.
        config: processes, threads and timeout.
        run_dir: where the tracebacks and stacks of all ranks go if the run fails
            (`failures.txt`); not made.
        networks: where each worker, by its rank, meets the others; None: over loopback, or the
            interface that GLOO_SOCKET_IFNAME names.
        stops_in_order: the entry looks at `WorkerContext.stop_file` and ends by itself after a
            first signal; a second one ends the workers as without this.

    Returns:
        What rank 0 returned.

    Raises:
        UserError: for a mistake of the user that a worker met, and on other systems than Linux.
        OSError: for a file or disk that failed a worker, with its name.
        WorkersFailed: for anything else that ended or hung a worker.
        KeyboardInterrupt: on Ctrl-C.
        SystemExit: on SIGTERM or SIGHUP, to this process or to a worker.
    """
    if sys.platform != "linux":
        raise UserError(f"launch.nproc={config.nproc}: workers are only built for Linux so far")
    assert entry.__module__ != "__main__", "workers can't import the entry from __main__"
    with tempfile.TemporaryDirectory(prefix="dlrm-workers-") as name:
        folder = Path(name)
        num_threads = threads_per_worker(config)
        task = Task(entry, args, config.device, num_threads, config.timeout_s, networks)
        with naming(folder / "task"):
            (folder / "task").write_bytes(pickle.dumps(task))
        watchdog = Watchdog(folder, config.nproc, config.timeout_s)
        signals = _first_signal_told(folder, watchdog.end) if stops_in_order else nullcontext()
        with watchdog, signals:
            exit_statuses = _run_elastic(
                folder, config.nproc, num_threads, stops_in_order=stops_in_order
            )
        verdict = watchdog.verdict(exit_statuses)
        if verdict is None:
            return pickle.loads((folder / "value").read_bytes())
        _show_cursor()
        if verdict.signal:
            text = describe(verdict.beat, config.nproc, verdict.reason)
            print(f"dlrm: {text}", file=sys.stderr, flush=True)
            _raise_signal(verdict.signal)
        error = _to_error(verdict, config.nproc, folder)
        if isinstance(error, WorkersFailed) and run_dir.is_dir():
            _keep_failures(folder, run_dir, watchdog)
        raise error


def start(
    entry: Callable[..., Any],
    args: tuple[Any, ...],
    config: LaunchConfig,
    run_dir: Path,
    *,
    fresh_processes: bool = False,
    here_only: tuple[Any, ...] = (),
    stops_in_order: bool = False,
) -> Any:
    """Runs `entry(context, *args)` in as many processes as `launch.nproc` says: one is this one.

    Args:
        entry: see `launch`.
        args: see `launch`.
        config: processes, threads and timeout.
        run_dir: see `launch`.
        fresh_processes: start a worker even for one process.
        here_only: further arguments for this process, which workers do without (a printer, which
            can't be pickled).
        stops_in_order: see `launch`; in this process the entry sees to its signals itself.

    Returns:
        What rank 0 returned.
    """
    if config.nproc > 1 or fresh_processes:
        return launch(entry, args, config, run_dir, stops_in_order=stops_in_order)
    keep_heap()
    if (num_threads := threads_per_worker(config)) is not None:
        import torch

        torch.set_num_threads(num_threads)
    return entry(single_process(), *args, *here_only)


def single_process() -> WorkerContext:
    """The context of a run without a launcher: no port, no group, nobody who watches."""
    return WorkerContext(rank=0, world_size=1, local_rank=0, heartbeat=NoHeartbeat())


def threads_per_worker(config: LaunchConfig) -> int | None:
    """`launch.num_threads`, or an equal share of the cores; None: as torch has it.

    A worker gets no more than OMP_NUM_THREADS, which the user may have set. One process is told a
    number only where a quota leaves it fewer cores than torch sees.
    """
    cpus = available_cpus()
    if config.num_threads is not None or (config.nproc == 1 and cpus >= usable_cpus()):
        return config.num_threads
    share = max(1, cpus // config.nproc)
    most = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return min(share, max(1, int(most))) if most.isdigit() else share


# ---------------------------------------------------------------------------- an outer torchrun


def join(entry: Callable[..., Any], args: tuple[Any, ...], config: LaunchConfig) -> Any:
    """Runs `entry(context, *args)` in this process, as the rank that `torchrun` has made it.

    Returns:
        What the entry returned.

    Raises:
        UserError: for a `launch.nproc` that torchrun contradicts.
    """
    rank, world_size, local_rank, local_world_size = (
        int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    if config.nproc not in (1, local_world_size):
        raise UserError(
            f"launch.nproc={config.nproc}: torchrun has started {local_world_size} processes on "
            "this host; leave launch.nproc out"
        )
    brief_warnings(shown=rank == 0)
    # Threads are torchrun's affair, which sets OMP_NUM_THREADS: null leaves them.
    task = Task(entry, args, config.device, config.num_threads, config.timeout_s)
    with tempfile.TemporaryDirectory(prefix="dlrm-rank-") as name:
        heartbeat = Heartbeat(heartbeat_file(Path(name), rank))  # Stays, mapped, when it is gone.
    watch_self(heartbeat, rank, world_size, config.timeout_s)
    try:
        return run_as_rank(task, WorkerContext(rank, world_size, local_rank, heartbeat))
    except Exception as error:
        if is_secondary(error):
            time.sleep(_LET_SPEAK_S)
        raise
    finally:
        heartbeat.finished()


# ------------------------------------------------------------------------------- the launcher


@contextlib.contextmanager
def _first_signal_told(folder: Path, end: Callable[[], None]) -> Iterator[None]:
    """Has the workers end in order on a first signal; a second one goes to the elastic launcher,
    after `end` was called."""
    from torch.distributed.elastic.multiprocessing import SignalException

    def first(number: int) -> None:
        stop_file(folder).write_text(str(number), encoding="utf-8")
        announce(number)

    def second(number: int) -> None:
        end()
        raise SignalException("a second signal", signal.Signals(number))

    with stop_on_signal(first, second):
        yield


def _run_elastic(
    folder: Path, nproc: int, num_threads: int | None, *, stops_in_order: bool
) -> dict[int, int]:
    """Runs the workers to their end; returns exit statuses as `blame.Evidence` has them."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig as ElasticConfig
    from torch.distributed.launcher.api import elastic_launch

    from dlrm import loopback

    loopback.register()
    program = folder / "worker.py"
    program.write_text(
        f"import sys\nfrom pathlib import Path\nsys.path[:] = {sys.path!r}\n"
        "from dlrm.worker import main\n"
        f"main(Path({str(folder)!r}), {os.getpid()}, stops_in_order={stops_in_order})\n",
        encoding="utf-8",
    )
    # A signal that is ignored, as SIGHUP is under nohup, stays ignored.
    handled = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    config = ElasticConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend=loopback.BACKEND,
        local_addr=loopback.HOST,
        max_restarts=0,
        monitor_interval=_MONITOR_S,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        # It wants one at least; SIGQUIT is nobody's here.
        signals_to_handle=",".join(n.name for n in (_UNUSED if stops_in_order else handled)),
        shutdown_timeout=int(GRACE_S),
    )
    try:
        # The elastic launcher replaces handlers.
        with _quiet(), _environment(num_threads), handlers_restored():
            elastic_launch(config, sys.executable)(str(program))
    except ChildFailedError as error:
        return {rank: failure.exitcode for rank, failure in error.failures.items()}
    except SignalException as error:
        _show_cursor()
        _raise_signal(error.sigval)
    return {}


def _raise_signal(number: int) -> NoReturn:
    """Ends this process as the signal would."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt from None
    raise SystemExit(128 + number) from None


@contextlib.contextmanager
def _environment(num_threads: int | None) -> Iterator[None]:
    """The environment that workers are to inherit; afterwards it is as it was."""
    saved = dict(os.environ)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    if num_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
    try:
        yield
    finally:
        for name in set(os.environ) - set(saved):
            del os.environ[name]
        os.environ.update(saved)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps the elastic launcher's log lines from the user; what matters is told by `launch`."""
    loggers = [logging.getLogger(f"torch.distributed.{part}") for part in ("elastic", "launcher")]
    saved = [logger.propagate for logger in loggers]
    handler = logging.NullHandler()
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, saved, strict=True):
            logger.removeHandler(handler)
            logger.propagate = propagate


def _show_cursor() -> None:
    """Shows the terminal's cursor: a live display that was killed has left it hidden."""
    if sys.stdout.isatty():
        print("\x1b[?25h", end="", flush=True)


# ------------------------------------------------------------------------------------ failures


def _to_error(verdict: Verdict, world_size: int, folder: Path) -> Exception:
    """The exception that tells the user."""
    rank, told = verdict.beat.rank, verdict.told
    if told is not None and told.kind == "user":
        return UserError(told.message)
    if told is not None and told.os_error is not None:
        return OSError(*told.os_error)
    text = describe(verdict.beat, world_size, verdict.reason)
    if told is not None and told.rank == rank:
        return WorkersFailed(f"{text}: {told.message}\n{told.traceback}".rstrip())
    if told is not None:
        text += f"\nrank {told.rank} told: {told.message}"
    stack = _read_stack(folder, rank)
    return WorkersFailed(f"{text}\nwhere rank {rank} was:\n{stack}" if stack else text)


def _read_stack(folder: Path, rank: int) -> str:
    path = stack_file(folder, rank)
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return text.partition("\nExtension modules:")[0].strip()


def _keep_failures(folder: Path, run_dir: Path, watchdog: Watchdog) -> None:
    """Writes down what every rank told, for those who look closer than the message does."""
    told = {failure.rank: failure for failure in watchdog.told()}
    parts = []
    for beat in watchdog.beats():
        parts.append(f"rank {beat.rank}: {beat.place}")
        if beat.rank in told:
            parts.append(told[beat.rank].traceback)
        parts.append(_read_stack(folder, beat.rank))
    text = "\n".join(part for part in parts if part) + "\n"
    (run_dir / "failures.txt").write_text(text, encoding="utf-8", errors="replace")
