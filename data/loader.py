"""`Prefetcher`: an iterator read ahead in a background thread, with the waiting time measured."""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Generator, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

READER_THREAD = "lane-reader"
_END = object()
# How often a thread that waits for room sees whether it is still wanted; longest wait for one that
# reads, at the end of the process.
_LOOK_UP_S = 0.1
_EXIT_WAIT_S = 5.0


class Prefetcher(Generic[T]):
    """Runs `source` in a thread, up to `depth` items ahead.

    The consumer's time in `next` is added to `wait_s`: with a loader that keeps up it stays near 0.
    An exception of the source is raised in the consumer, at its place in the order. Used as a
    context manager it ends its thread however the consumer leaves; dropped, or at the end of the
    process, the thread ends by itself.

    Args:
        source: iterated in the thread only.
        depth: items kept ready.
        timeout_s: longest wait for one item; None: without end.
    """

    def __init__(self, source: Iterable[T], depth: int = 4, timeout_s: float | None = None) -> None:
        self.wait_s = 0.0
        self._timeout_s = timeout_s
        self._has_timed_out = False
        self._filler = _Filler(source, depth)
        self._queue = self._filler.queue
        self._thread = self._filler.thread
        # Takes no lock and waits for nothing: the garbage collector may call it anywhere.
        weakref.finalize(self, self._filler.ask_to_stop)
        self._filler.start()

    def __enter__(self) -> Prefetcher[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        start = time.perf_counter()
        try:
            item = self._queue.get(timeout=self._timeout_s)
        except queue.Empty:
            self._has_timed_out = True
            raise LoaderTimeout(
                f"no batch came within launch.timeout_s={self._timeout_s:g} s: the disk or network "
                "that the data are on hangs, or is too slow; set launch.timeout_s higher if so"
            ) from None
        self.wait_s += time.perf_counter() - start
        if item is _END:
            self._queue.put(_END)
            raise StopIteration
        if isinstance(item, _Failure):
            self._queue.put(_END)
            raise item.error
        return item  # type: ignore[return-value]

    def close(self) -> None:
        """Stops the thread and waits for it; what was read ahead is dropped.

        After a timeout it isn't waited for: it may never end.
        """
        self._filler.ask_to_stop()
        while self._thread.is_alive() and not self._has_timed_out:
            # The thread may be blocked on a full queue: make room until it sees the flag.
            try:
                self._queue.get_nowait()
            except queue.Empty:
                self._thread.join(0.01)
        # Whoever asks for more finds the end and doesn't wait for a thread that is gone.
        with self._queue.mutex:
            self._queue.queue.clear()
        self._queue.put(_END)


def hanging_readers() -> list[threading.Thread]:
    """Threads that still read, which the end of the process would wait for."""
    return [t for t in threading.enumerate() if t.name.startswith(READER_THREAD)]


class LoaderTimeout(RuntimeError):
    """The next batch didn't come in time."""


class _Filler:
    """The thread of a `Prefetcher`, which it doesn't keep alive.

    A thread that still runs while the interpreter is taken down may free a tensor then, which ends
    the process with an abort. So it is stopped and waited for before.
    """

    def __init__(self, source: Iterable[object], depth: int) -> None:
        self.queue: queue.Queue[object] = queue.Queue(depth)
        self.thread = threading.Thread(target=self._fill, args=(source,), daemon=True)
        self._is_stopped = False

    def start(self) -> None:
        """Starts the thread."""
        atexit.register(self._end_with_process)
        self.thread.start()

    def ask_to_stop(self) -> None:
        """The thread ends after the item it works at."""
        self._is_stopped = True

    def _end_with_process(self) -> None:
        self.ask_to_stop()
        self.thread.join(_EXIT_WAIT_S)

    def _put(self, item: object) -> None:
        while not self._is_stopped:
            try:
                self.queue.put(item, timeout=_LOOK_UP_S)
            except queue.Full:
                continue
            return

    def _fill(self, source: Iterable[object]) -> None:
        try:
            for item in source:
                self._put(item)
                if self._is_stopped:
                    return
            self._put(_END)
        except BaseException as error:
            self._put(_Failure(error))
        finally:
            if isinstance(source, Generator):
                source.close()  # Here, and not when the garbage collector finds it.
            atexit.unregister(self._end_with_process)


class _Failure:
    """An exception on its way to the consumer."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
