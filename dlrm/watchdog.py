"""Watches the workers of a run from the launcher, and ends all of them once one hangs or fails."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

from dlrm.blame import Evidence, Verdict, describe, find_failed, find_hanging
from dlrm.heartbeat import NO_STEP, START, Beat, Heartbeat, read_heartbeats
from dlrm.worker import Failure, end_file, failure_file
from embeddings.awake_clock import LONGEST_S, AwakeClock

GRACE_S = 5.0
"""So long may a worker that is told to end close its files; then it is killed."""
_POLL_S = 0.2


class Watchdog:
    """A thread that lives inside `with`.

    Args:
        folder: of the workers' heartbeats and failures.
        world_size: number of workers.
        timeout_s: a rank whose beat stands for longer hangs.
    """

    def __init__(self, folder: Path, world_size: int, timeout_s: float) -> None:
        self._folder, self._world_size, self._timeout_s = folder, world_size, timeout_s
        self._start_s = time.monotonic()
        self._hanging: Verdict | None = None
        self._killed: frozenset[int] = frozenset()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        # All have ended by now, unless the launcher was interrupted while it ended them.
        self._signal(signal.SIGKILL)

    def verdict(self, exit_statuses: dict[int, int]) -> Verdict | None:
        """The rank to blame after the end; None where all have done their work.

        Args:
            exit_statuses: as `Evidence` has them.
        """
        if self._hanging is not None:
            return self._hanging
        evidence = Evidence(self.beats(), self.told(), exit_statuses, self._killed)
        return find_failed(evidence, self._timeout_s)

    def beats(self) -> list[Beat]:
        """The last sign of life of every rank; of one that hasn't begun, the launcher's start."""
        found = {beat.rank: beat for beat in read_heartbeats(self._folder)}
        return [
            found.get(rank) or Beat(rank, 0, NO_STEP, START, "", self._start_s)
            for rank in range(self._world_size)
        ]

    def told(self) -> list[Failure]:
        """What workers have told of their failures, the first one first."""
        paths = (failure_file(self._folder, rank) for rank in range(self._world_size))
        told = [
            Failure(**json.loads(path.read_text(encoding="utf-8")))
            for path in paths
            if path.exists()
        ]
        return sorted(told, key=lambda failure: failure.time_s)

    def end(self) -> None:
        """Workers that get a signal from now on are to end at once."""
        end_file(self._folder).touch()

    def _watch(self) -> None:
        ends_s: float | None = None
        silence = Silence()
        while not self._done.wait(_POLL_S):
            now_s = time.monotonic()
            if ends_s is not None:
                if now_s > ends_s:
                    self._killed |= self._signal(signal.SIGKILL)
            elif self._has_failed():
                ends_s = now_s + GRACE_S  # The launcher has sent SIGTERM to the others.
            else:
                beats = silence.adjusted(self.beats(), now_s)
                running = {beat.rank for beat in beats if not beat.pid or _is_running(beat.pid)}
                self._hanging = find_hanging(beats, running, now_s, self._timeout_s)
                if self._hanging is not None:
                    ends_s = now_s + GRACE_S
                    self.end()
                    self._signal(signal.SIGTERM)

    def _has_failed(self) -> bool:
        # In this order: a rank that has ended can't finish in between.
        ended = {beat.rank for beat in self.beats() if beat.pid and not _is_running(beat.pid)}
        unfinished = {beat.rank for beat in self.beats() if not beat.is_finished}
        return bool(self.told()) or bool(ended & unfinished)

    def _signal(self, number: signal.Signals) -> frozenset[int]:
        """Sends a signal to all that run, with their children; returns their ranks."""
        reached = set()
        for beat in self.beats():
            if beat.pid and _is_running(beat.pid):
                with contextlib.suppress(ProcessLookupError):  # It has just ended.
                    os.killpg(beat.pid, number)  # The launcher makes each worker lead a group.
                    reached.add(beat.rank)
        return frozenset(reached)


class Silence:
    """How long ranks have been silent, without the time in which whoever watches was stopped too.

    A job that was suspended as a whole is no job that hangs. To be asked several times a second.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._clock = AwakeClock(lambda: self._now_s)
        self._last: dict[int, tuple[float, float]] = {}

    def adjusted(self, beats: list[Beat], now_s: float) -> list[Beat]:
        """The beats, each as if it had come later by the time that its rank couldn't use.

        Args:
            beats: the last ones, by `time.monotonic()`.
            now_s: of the same clock.
        """
        self._now_s = now_s
        awake_s = self._clock()
        found = []
        for beat in beats:
            time_s, since_s = self._last.get(beat.rank, (math.nan, 0.0))
            if time_s != beat.time_s:  # A new one.
                since_s = awake_s - min(now_s - beat.time_s, LONGEST_S)
                self._last[beat.rank] = beat.time_s, since_s
            found.append(replace(beat, time_s=max(beat.time_s, now_s - (awake_s - since_s))))
        return found


def watch_self(heartbeat: Heartbeat, rank: int, world_size: int, timeout_s: float) -> None:
    """Starts a thread that ends this process, a rank without a launcher of ours, once it hangs.

    Args:
        heartbeat: of this rank; the thread ends when it has finished.
        rank: of this process.
        world_size: number of ranks.
        timeout_s: as of `Watchdog`.
    """

    def watch() -> None:
        silence = Silence()
        while not (beat := heartbeat.last(rank)).is_finished:
            now_s = time.monotonic()
            beats = silence.adjusted([beat], now_s)
            verdict = find_hanging(beats, {rank}, now_s, timeout_s)
            if verdict is not None:
                reason = describe(verdict.beat, world_size, verdict.reason)
                print(f"dlrm: {reason}; where it was:", file=sys.stderr, flush=True)
                faulthandler.dump_traceback(all_threads=True)
                os._exit(1)
            time.sleep(_POLL_S)

    threading.Thread(target=watch, name="watchdog", daemon=True).start()


def _is_running(pid: int) -> bool:
    """Whether a worker runs: a child of this process, so that no stranger has its number now."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False
