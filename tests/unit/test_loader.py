"""`Prefetcher`: order, errors at their place, an end to its thread, and the time spent waiting."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import loader
from data.loader import LoaderTimeout, Prefetcher

CHECKOUT = Path(__file__).parents[2]
PATIENCE_S = 20
"""Only a broken prefetcher waits as long."""


@given(st.lists(st.integers()), st.integers(1, 5))
@settings(deadline=None, max_examples=50)
def test_items_come_in_order_and_once(items: list[int], depth: int) -> None:
    with Prefetcher(items, depth) as prefetcher:
        assert list(prefetcher) == items
        assert list(prefetcher) == [], "the end stays the end"


@pytest.mark.parametrize("depth", [1, 4])
def test_an_error_comes_at_its_place_and_then_the_end(depth: int) -> None:
    def source() -> Iterator[int]:
        yield 1
        yield 2
        raise OSError("disk is gone")

    with Prefetcher(source(), depth) as prefetcher:
        assert next(prefetcher) == 1
        assert next(prefetcher) == 2
        with pytest.raises(OSError, match="disk is gone"):
            next(prefetcher)
        with pytest.raises(StopIteration):
            next(prefetcher)


def test_it_reads_ahead_no_further_than_its_depth() -> None:
    produced: list[int] = []
    reached = threading.Event()

    def source() -> Iterator[int]:
        for number in range(100):
            produced.append(number)
            if number == 3:
                reached.set()
            yield number

    with Prefetcher(source(), depth=3):
        assert reached.wait(PATIENCE_S), "three are kept ready and a fourth is in hand"
        # Blocked on the full queue: a fifth can't be asked for.
        assert produced == [0, 1, 2, 3]


class Blocking:
    """A source that waits for a permit before each item, and says when it is closed."""

    def __init__(self) -> None:
        self.permits = threading.Semaphore(0)
        self.waiting, self.closed = threading.Event(), threading.Event()

    def items(self) -> Iterator[int]:
        try:
            for number in range(1000):
                self.waiting.set()
                self.permits.acquire(timeout=PATIENCE_S)
                yield number
        finally:
            self.closed.set()


def test_close_while_the_source_is_blocked_on_a_full_queue() -> None:
    source = Blocking()
    before = threading.active_count()
    prefetcher = Prefetcher(source.items(), depth=2)
    source.permits.release(1000)
    assert next(prefetcher) == 0
    prefetcher.close()
    assert threading.active_count() == before
    assert source.closed.is_set(), "the source may hold files and threads of its own"
    assert list(prefetcher) == [], "whoever asks for more isn't left waiting"


def test_close_while_the_source_is_at_work() -> None:
    """It ends as soon as the source has given what it is at."""
    source = Blocking()
    before = threading.active_count()
    prefetcher = Prefetcher(source.items(), depth=2)
    assert source.waiting.wait(PATIENCE_S)
    closer = threading.Thread(target=prefetcher.close)
    closer.start()
    source.permits.release()
    closer.join(PATIENCE_S)
    assert not closer.is_alive()
    assert threading.active_count() == before


def test_leaving_early_ends_the_thread_too() -> None:
    source = Blocking()
    source.permits.release(1000)
    before = threading.active_count()

    def consume() -> None:
        with Prefetcher(source.items(), depth=1) as prefetcher:
            next(prefetcher)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        consume()
    assert threading.active_count() == before


def test_closing_twice_and_after_the_end() -> None:
    prefetcher = Prefetcher([1])
    assert list(prefetcher) == [1]
    prefetcher.close()
    prefetcher.close()
    assert list(prefetcher) == []


class Clock:
    """A clock that moves only when told to; says when the consumer has begun to wait."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked = threading.Event()

    def perf_counter(self) -> float:
        now = self.now
        self.asked.set()
        return now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(loader, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    return clock


def test_waiting_for_a_slow_source_is_counted(clock: Clock) -> None:
    def source() -> Iterator[int]:
        for number in range(3):
            assert clock.asked.wait(PATIENCE_S)
            clock.now += 5.0
            clock.asked.clear()
            yield number

    with Prefetcher(source(), depth=1) as prefetcher:
        assert next(prefetcher) == 0
        assert prefetcher.wait_s >= 5.0


def test_a_slow_consumer_does_not_wait(clock: Clock) -> None:
    with Prefetcher(range(5), depth=2) as prefetcher:
        for _ in prefetcher:
            clock.now += 1000.0
        assert prefetcher.wait_s == 0.0


def test_f44_a_source_that_hangs_is_waited_for_so_long() -> None:
    """In one process no launcher sees to it; the thread at the source is left alone."""
    source = Blocking()
    prefetcher = Prefetcher(source.items(), depth=2, timeout_s=0.05)
    with pytest.raises(LoaderTimeout, match=r"launch\.timeout_s=0\.05 s"):
        next(prefetcher)
    prefetcher.close()
    assert not source.closed.is_set()
    source.permits.release(1000)
    assert source.closed.wait(PATIENCE_S)


def test_f25_a_dropped_prefetcher_ends_its_thread() -> None:
    """It was kept alive by its own thread, blocked on the full queue for good."""
    source = Blocking()
    source.permits.release(1000)
    prefetcher = Prefetcher(source.items(), depth=1)
    next(prefetcher)
    assert not source.closed.is_set()
    del prefetcher
    gc.collect()
    assert source.closed.wait(PATIENCE_S)


@pytest.mark.processes
def test_f25_a_process_that_never_closes_its_loader_ends_in_order() -> None:
    """The thread is told, and waited for, before the interpreter is taken down under it."""
    code = """
import torch
from data.loader import LoaderTimeout, Prefetcher

def source():
    try:
        while True:
            yield torch.zeros(1000)
    finally:
        print("closed", flush=True)

prefetcher = Prefetcher(source(), depth=2)
next(prefetcher)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "closed\n"
