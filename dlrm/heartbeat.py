"""Signs of life: each rank keeps its step and phase in a small file that the launcher reads.

The file is mapped into memory, so a beat is a store and not a system call, and what was stored
last can still be read when the process is dead.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

START = "start"
"""Phase before the work of a rank begins: imports, and waiting for the other ranks to be up."""
FINISHED = "finished"
"""Phase of a rank whose work is done."""
NO_STEP = -1
"""Step of a rank that hasn't begun its first."""

# Count of beats, pid, step, time_s, phase, what is waited for, count of beats again: a copy whose
# two counts differ was taken while the rank was writing.
_RECORD = struct.Struct("<Qqqd32s64sQ")
_NUM_TRIES = 100
_KEEP_BEATING_S = 0.5
_IDLE_SHARE = 0.01
_IDLE_BYTES = 4096


@dataclass(frozen=True)
class Beat:
    """The last sign of life of a rank."""

    rank: int
    pid: int
    step: int
    phase: str
    waits_for: str
    """The collective that the rank waits in, or empty."""
    time_s: float
    """Of `time.monotonic()`, which all processes of a host share."""

    @property
    def is_finished(self) -> bool:
        """Whether the rank's work is done."""
        return self.phase == FINISHED

    @property
    def place(self) -> str:
        """Step and phase for people: `step 3, phase backward, waiting in all_reduce`."""
        step = f"step {self.step:,}" if self.step != NO_STEP else "before the first step"
        waiting = f", waiting in {self.waits_for}" if self.waits_for else ""
        return f"{step}, phase {self.phase or 'unknown'}{waiting}"


@contextmanager
def keep_beating(heartbeat: Heartbeat | NoHeartbeat, phase: str) -> Iterator[None]:
    """Beats from a thread, for work that may rightly take long and can't beat itself."""
    heartbeat.beat(NO_STEP, phase)
    with _repeated(lambda: heartbeat.beat(NO_STEP, phase), "keep-beating"):
        yield


@contextmanager
def still_working(heartbeat: Heartbeat | NoHeartbeat) -> Iterator[None]:
    """Renews the last beat from a thread as long as the process computes, reads or writes: for work
    of any length that beats seldom or not at all. A process that hangs, or a rank that waits for
    others, does none of these."""
    if isinstance(heartbeat, NoHeartbeat):
        yield
        return
    before = Work.so_far()

    def renew() -> None:
        nonlocal before
        now = Work.so_far()
        if now.is_more_than(before):
            heartbeat.renew()
        before = now

    with _repeated(renew, "still-working"):
        yield


@contextmanager
def _repeated(call: Callable[[], None], name: str) -> Iterator[None]:
    """Within, a thread of that name calls it again and again."""
    done = threading.Event()

    def repeat() -> None:
        while not done.wait(_KEEP_BEATING_S):
            call()

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class Work(NamedTuple):
    """What this process has done since it began.

    Attributes:
        at_s: when it was asked.
        cpu_s: time of cores, of all threads.
        io_bytes: read and written, 0 where the kernel doesn't tell.
    """

    at_s: float
    cpu_s: float
    io_bytes: int

    @classmethod
    def so_far(cls) -> Work:
        """As of now."""
        io_bytes = 0
        try:
            lines = Path("/proc/self/io").read_text().splitlines()
            io_bytes = sum(int(line.split()[1]) for line in lines if line[1:6] == "char:")
        except (OSError, ValueError, IndexError):
            pass
        return cls(time.monotonic(), time.process_time(), io_bytes)

    def is_more_than(self, before: Work) -> bool:
        """Whether something was done: more than asking takes."""
        cpu_share = (self.cpu_s - before.cpu_s) / max(self.at_s - before.at_s, 1e-9)
        return cpu_share > _IDLE_SHARE or self.io_bytes - before.io_bytes > _IDLE_BYTES


class Heartbeat:
    """Writes the signs of life of this process.

    Args:
        path: the file; see `heartbeat_file`.
    """

    def __init__(self, path: Path) -> None:
        with open(path, "w+b") as opened:
            opened.truncate(_RECORD.size)
            self._map = mmap.mmap(opened.fileno(), _RECORD.size)
        self._pid = os.getpid()
        self._count = 0
        self._step, self._phase, self._waits_for = NO_STEP, START.encode(), b""
        self._store(b"")

    def beat(self, step: int, phase: str) -> None:
        """The rank has come to this phase of this step (and waits for nobody)."""
        self._step, self._phase = step, phase.encode()
        self._store(b"")

    def waiting(self, what: str | None) -> None:
        """The rank enters the collective `what`; None: it has come out."""
        self._store(b"" if what is None else what.encode())

    def renew(self) -> None:
        """The rank is still at what it told last; one that waits for others isn't."""
        if not self._waits_for:
            self._store(b"")

    def finished(self) -> None:
        """The rank's work is done."""
        self.beat(self._step, FINISHED)

    def last(self, rank: int) -> Beat:
        """The last sign of life, for whoever watches within this process."""
        beat = _to_beat(self._map[:], rank)
        assert beat is not None
        return beat

    def _store(self, waits_for: bytes) -> None:
        self._waits_for = waits_for
        self._count = count = self._count + 1
        place = (self._pid, self._step, time.monotonic(), self._phase, waits_for)
        # In one copy: `pack_into` sets everything to zero first, and a rank that loses its core in
        # between would seem silent since the machine's start.
        self._map[:] = _RECORD.pack(count, *place, count)


class NoHeartbeat:
    """The same for a run that nobody watches."""

    def beat(self, step: int, phase: str) -> None:
        """Does nothing."""

    def waiting(self, what: str | None) -> None:
        """Does nothing."""

    def finished(self) -> None:
        """Does nothing."""


def heartbeat_file(folder: Path, rank: int) -> Path:
    """The file of one rank."""
    return folder / f"{rank}.beat"


def read_heartbeats(folder: Path) -> list[Beat]:
    """The last beat of each rank that has a file, in the order of ranks."""
    ranks = sorted(int(path.stem) for path in folder.glob("*.beat"))
    beats = (_read(heartbeat_file(folder, rank), rank) for rank in ranks)
    return [beat for beat in beats if beat is not None]


def _read(path: Path, rank: int) -> Beat | None:
    """A whole beat; None for a file without one."""
    # Two equal copies with equal counts: the first alone could have begun before a beat and ended
    # within it, with both counts still old. A rank that is stopped within a beat leaves its counts
    # unequal for ever: then what there is must do.
    earlier = b""
    for _ in range(_NUM_TRIES):
        try:
            copy = path.read_bytes()
        except FileNotFoundError:
            return None
        if copy == earlier and copy[:8] == copy[-8:]:
            break
        earlier = copy
    return _to_beat(copy, rank)


def _to_beat(copy: bytes, rank: int) -> Beat | None:
    if len(copy) != _RECORD.size or not any(copy[:8]):
        return None
    _, pid, step, time_s, phase, waits_for, _ = _RECORD.unpack(copy)

    def text(field: bytes) -> str:
        return field.rstrip(b"\0").decode(errors="replace")

    return Beat(rank, pid, step, text(phase), text(waits_for), time_s)
