"""Runs the tests as two halves of about equal length, side by side; called by scripts/test.

    python scripts/run_halves.py [--limit-s S]

The first half's output is shown as it comes, the second's after it. A half that isn't done after
the limit is made to write where each of its threads stands, and killed: the suite ends, whatever
hangs. Each half writes to a file and is a session of its own, so nothing that a test leaves behind
holds this command's output open or gets its signals.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

SECOND = ["tests/dist", "tests/recipes", "tests/host"]
LIMIT_S = 2_400
_TELL_S = 10.0
_POLL_S = 0.1


@dataclass
class Half:
    """A pytest process and the file that it writes to."""

    name: str
    process: subprocess.Popen[bytes]
    output: BinaryIO

    def show_new(self) -> None:
        """Prints what has been written since the last call."""
        sys.stdout.buffer.write(self.output.read())
        sys.stdout.flush()

    def stop(self, limit_s: float) -> None:
        """Kills it, with what it has started in its session, after it has told where it stands."""
        self.process.send_signal(signal.SIGABRT)  # pytest has faulthandler on.
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_TELL_S)
        self.kill()
        self.name += f" (not done after {limit_s:g} s: killed)"

    def kill(self) -> None:
        """Kills the session, whatever of it is left."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 where both halves passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="for each half")
    limit_s = parser.parse_args(arguments).limit_s
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as folder:
        first = _start("all others", [f"--ignore={path}" for path in SECOND], Path(folder) / "1")
        second = _start(" and ".join(SECOND), SECOND, Path(folder) / "2")
        halves = [first, second]
        try:
            _wait(halves, limit_s)
        finally:
            for half in halves:
                half.kill()
        first.show_new()
        print(f"{second.name}:")
        second.show_new()
    for half in halves:
        status = half.process.returncode
        verdict = f"failed (exit status {status})" if status else "passed"
        print(f"{half.name}: {verdict}")
    return int(any(half.process.returncode for half in halves))


def _start(name: str, arguments: Sequence[str], path: Path) -> Half:
    command = [sys.executable, "-m", "pytest", *arguments]
    with path.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Half(name, process, path.open("rb"))


def _wait(halves: Sequence[Half], limit_s: float) -> None:
    end_s = time.monotonic() + limit_s
    while any(half.process.poll() is None for half in halves):
        halves[0].show_new()
        if time.monotonic() > end_s:
            for half in halves:
                if half.process.poll() is None:
                    half.stop(limit_s)
        time.sleep(_POLL_S)


if __name__ == "__main__":
    sys.exit(main())
