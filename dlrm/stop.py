"""Ends a run in order: a first signal has it keep its state after the step at hand, a second ends
it at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

_STDERR = 2
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class RunStopped(BaseException):
    """A run that was told to end has kept its state. As KeyboardInterrupt is none, no Exception: it
    ends a sweep, too.

    Attributes:
        run_dir: the run's folder.
        number: of the signal.

    Args:
        step: optimizer steps done and kept.
    """

    def __init__(self, step: int, number: int, run_dir: Path) -> None:
        name = signal.Signals(number).name
        super().__init__(f"stopped by {name} after step {step:,}, which is kept")
        self.number, self.run_dir = number, run_dir


class StopRequest:
    """Whether the run is to end, as far as this process has heard.

    Args:
        file: where the launcher writes the signal's number, for processes that it doesn't reach.
    """

    def __init__(self, file: Path | None = None) -> None:
        self.number = 0
        self._file = file

    def asked(self) -> bool:
        """Looks, once a step."""
        if not self.number and self._file is not None and self._file.exists():
            with suppress(ValueError):  # Not yet written: the next step sees it.
                self.number = int(self._file.read_text(encoding="utf-8"))
        return bool(self.number)


@contextmanager
def stop_on_signal(
    first: Callable[[int], None], second: Callable[[int], None] | None = None
) -> Iterator[None]:
    """Within, `first(number)` is called on the first signal, and `second(number)` on another.

    Signals that are ignored, as SIGHUP is under nohup, stay ignored. Only the main thread gets
    signals: in others nothing changes.

    Args:
        first: remembers that the run is to end.
        second: None: as the process would have done without this.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    has_come = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal has_come
        if not has_come:
            has_come = True
            first(number)
        elif second is not None:
            second(number)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise SystemExit(128 + number)

    with handlers_restored() as saved:
        for number, handler in saved.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, handle)
        yield


@contextmanager
def handlers_restored() -> Iterator[dict[signal.Signals, Any]]:
    """At the end the handlers of `SIGNALS` are those of the beginning, which it yields."""
    saved = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield saved
    finally:
        for number, handler in saved.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def announce(number: int) -> None:
    """Tells a person at the terminal what happens now."""
    text = (
        f"dlrm: {signal.Signals(number).name}: the run keeps its state after this step and ends; "
        "once more ends it at once\n"
    )
    # Not `print`: the signal may have come within one. Nor an error: the terminal may be gone.
    with suppress(OSError):
        os.write(_STDERR, text.encode())
