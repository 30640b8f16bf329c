"""`Prefetcher`: an iterator read ahead in a background thread, with the waiting time measured."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

_END = object()


class Prefetcher(Generic[T]):
    """Runs `source` in a thread, up to `depth` items ahead.

    The consumer's time in `next` is added to `wait_s`: with a loader that keeps up it stays near 0.
    An exception of the source is raised in the consumer, at its place in the order. Used as a
    context manager it ends its thread however the consumer leaves.

    Args:
        source: iterated in the thread only.
        depth: items kept ready.
    """

    def __init__(self, source: Iterable[T], depth: int = 4) -> None:
        self.wait_s = 0.0
        self._queue: queue.Queue[object] = queue.Queue(depth)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._fill, args=(source,), daemon=True)
        self._thread.start()

    def __enter__(self) -> Prefetcher[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        start = time.perf_counter()
        item = self._queue.get()
        self.wait_s += time.perf_counter() - start
        if item is _END:
            self._queue.put(_END)
            raise StopIteration
        if isinstance(item, _Failure):
            self._queue.put(_END)
            raise item.error
        return item  # type: ignore[return-value]

    def close(self) -> None:
        """Stops the thread and waits for it; what was read ahead is dropped."""
        self._stopped.set()
        while self._thread.is_alive():
            # The thread may be blocked on a full queue: make room until it sees the flag.
            try:
                self._queue.get_nowait()
            except queue.Empty:
                self._thread.join(0.01)
        # Whoever asks for more finds the end and doesn't wait for a thread that is gone.
        with self._queue.mutex:
            self._queue.queue.clear()
        self._queue.put(_END)

    def _fill(self, source: Iterable[T]) -> None:
        try:
            for item in source:
                self._queue.put(item)
                if self._stopped.is_set():
                    return
            self._queue.put(_END)
        except BaseException as error:
            self._queue.put(_Failure(error))
        finally:
            if isinstance(source, Generator):
                source.close()  # Here, and not when the garbage collector finds it.


class _Failure:
    """An exception on its way to the consumer."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
