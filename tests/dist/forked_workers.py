"""Workers of the real launcher as forks of the test session's fork server, which has imported torch
once for all: a fresh Python spends four seconds of a core on that.

For tests of what workers do once they run, and of how their ends are told: launcher, elastic agent,
rendezvous, signals, sessions, files and streams are the real ones, and the workers are children of
the launcher. What only a fresh Python shows (its imports, what OpenMP and Python itself take from
the environment) is tested without: see the tests of test_launch.py that don't ask for `forked`.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from typing import Any
from unittest.mock import patch

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from tests.dist.worker_pool import fork_server

_START_S = 30.0
_POLL_S = 0.01
_PR_SET_CHILD_SUBREAPER = 36


@contextmanager
def forked_workers() -> Iterator[None]:
    """Has `dlrm.launch` start forks instead of fresh processes."""

    def popen(handler: Any, args: tuple[str, ...], env: dict[str, str]) -> ForkedWorker:
        executable, program = args
        assert executable == sys.executable
        return ForkedWorker(program, env)

    with patch.object(SubprocessHandler, "_popen", popen):
        yield


class ForkedWorker:
    """What the elastic agent uses of a `subprocess.Popen` of Python and a program."""

    def __init__(self, program: str, environment: dict[str, str]) -> None:
        context = fork_server()
        ours, theirs = context.Pipe()
        args = (program, environment, os.getcwd(), _Streams(), theirs)
        # The fork server's child ends at once, and its own child, the worker, becomes ours.
        between = context.Process(target=_fork_worker, args=args, daemon=True)
        _become_subreaper(True)
        try:
            between.start()
            theirs.close()
            assert ours.poll(_START_S), "no worker has started"
            self.pid: int = ours.recv()
            between.join()
        finally:
            _become_subreaper(False)
            ours.close()
        self._status: int | None = None

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end; raises `subprocess.TimeoutExpired`."""
        until_s = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if until_s is not None and time.monotonic() > until_s:
                raise subprocess.TimeoutExpired("worker", timeout or 0.0)
            time.sleep(_POLL_S)
        return status


class _Streams:
    """Standard output and error of the process that pickles it, for the one that is started."""

    def __init__(self, fds: tuple[Any, ...] = (1, 2)) -> None:
        self._fds = fds

    def __reduce__(self) -> tuple[Any, ...]:
        return _Streams, (tuple(DupFd(fd) for fd in self._fds),)

    def take(self) -> None:
        """Makes them this process's own."""
        for target, given in zip((1, 2), self._fds, strict=True):
            fd = given.detach()
            os.dup2(fd, target)
            os.close(fd)


def _become_subreaper(is_one: bool) -> None:
    """Whether processes below this one whose parent ends become its children."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(is_one), 0, 0, 0)


def _fork_worker(
    program: str, environment: dict[str, str], cwd: str, streams: _Streams, started: Connection
) -> None:
    """Runs in a child of the fork server, which has no threads."""
    streams.take()
    pid = os.getpid()
    if os.fork() != 0:
        os._exit(0)
    os.setsid()
    while os.getppid() == pid:
        time.sleep(_POLL_S)
    started.send(os.getpid())
    started.close()
    os._exit(_run_program(program, environment, cwd))


def _run_program(program: str, environment: dict[str, str], cwd: str) -> int:
    """As a fresh Python would; the exit status."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.argv = [program]
    status = 0
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status
