"""Executors: what waits for what, what a failure reaches, and what a simulated link takes."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embeddings.host.cuda_executor import CudaExecutor
from embeddings.host.executor import (
    LINK_QUEUES,
    QUEUES,
    Event,
    Executor,
    HostEvent,
    LinkRates,
    Queue,
    SimulatedRates,
    ThreadExecutor,
    Timeline,
)
from tests.stepped_executor import SteppedExecutor

PATIENCE_S = 30.0
FAST = LinkRates(bytes_per_s=1e15)


class FakeClock:
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept_s: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.slept_s.append(duration_s)
        self.now_s += duration_s


@pytest.fixture
def make() -> Iterator[Callable[..., ThreadExecutor]]:
    """Makes executors that are closed after the test."""
    made: list[ThreadExecutor] = []

    def build(link: LinkRates | None = None, **more: float | FakeClock | None) -> ThreadExecutor:
        clock = more.pop("clock", None)
        rates = {"gather_bytes_per_s": None, "scatter_bytes_per_s": None, **more}
        simulated = SimulatedRates(link=link, **rates)  # type: ignore[arg-type]
        times = {"clock": clock, "sleep": clock.sleep} if isinstance(clock, FakeClock) else {}
        made.append(ThreadExecutor(simulated, **times))  # type: ignore[arg-type]
        return made[-1]

    yield build
    for executor in made:
        executor.close()


def test_a_queue_runs_its_work_in_order_and_one_at_a_time(
    make: Callable[..., ThreadExecutor],
) -> None:
    executor = make()
    is_open = threading.Event()
    ran: list[int] = []
    events = [
        executor.submit("gather", _gated(is_open, lambda: ran.append(0)), num_bytes=0),
        *(executor.submit("gather", lambda n=n: ran.append(n), num_bytes=0) for n in range(1, 9)),
    ]
    assert ran == []
    assert not any(event.is_done() for event in events)
    is_open.set()
    executor.wait(events[-1])
    assert ran == list(range(9))
    assert all(event.is_done() for event in events)


def test_queues_run_at_once(make: Callable[..., ThreadExecutor]) -> None:
    executor = make(link=FAST)
    meet = threading.Barrier(len(QUEUES))
    events = [executor.submit(queue, lambda: _meet(meet), num_bytes=0) for queue in QUEUES]
    for event in events:
        event.wait()  # A broken barrier raises: one of them waited in vain.


def test_work_waits_for_what_comes_before(make: Callable[..., ThreadExecutor]) -> None:
    executor = make()
    is_open = threading.Event()
    ran: list[str] = []
    first = executor.submit("scatter", _gated(is_open, lambda: ran.append("a")), num_bytes=0)
    second = executor.submit("gather", lambda: ran.append("b"), num_bytes=0, after=[first])
    assert not second.is_done()
    is_open.set()
    second.wait()
    assert ran == ["a", "b"]


@pytest.mark.parametrize("is_duplex", [True, False])
def test_a_half_duplex_link_carries_one_transfer_at_a_time(
    make: Callable[..., ThreadExecutor], is_duplex: bool
) -> None:
    executor = make(link=LinkRates(1e15, is_duplex=is_duplex))
    is_open = threading.Event()
    ran: list[str] = []
    up = executor.submit("to_device", _gated(is_open, lambda: ran.append("up")), num_bytes=0)
    down = executor.submit("to_host", lambda: ran.append("down"), num_bytes=0)
    if is_duplex:
        down.wait()
        assert ran == ["down"], "full duplex: the other direction is free"
    is_open.set()
    up.wait()
    down.wait()
    assert ran == (["down", "up"] if is_duplex else ["up", "down"])


@pytest.mark.parametrize("error", [ValueError("rows lost"), SystemExit(3), KeyboardInterrupt()])
def test_a_failure_reaches_all_that_depends_on_it_and_nothing_else(
    make: Callable[..., ThreadExecutor], error: BaseException
) -> None:
    executor = make()
    ran: list[str] = []
    failed = executor.submit("gather", _raiser(error), num_bytes=0)
    child = executor.submit("scatter", lambda: ran.append("child"), num_bytes=0, after=[failed])
    grandchild = executor.submit(
        "gather", lambda: ran.append("grandchild"), num_bytes=0, after=[child]
    )
    other = executor.submit("gather", lambda: ran.append("other"), num_bytes=0)
    other.wait()
    assert ran == ["other"]
    for event in (failed, child, grandchild):
        for wait in (event.wait, lambda event=event: executor.wait(event), event.wait):
            with pytest.raises(type(error)) as raised:
                wait()
            assert raised.value is error
        assert event.is_done()


def test_without_a_link_nothing_is_moved() -> None:
    executors: list[Executor] = [ThreadExecutor(), SteppedExecutor(0, has_link=False)]
    for executor in executors:
        assert not executor.has_link
        for queue in LINK_QUEUES:
            with pytest.raises(AssertionError, match="there is no link"):
                executor.submit(queue, lambda: None, num_bytes=0)


@pytest.mark.parametrize(
    ("queue", "num_bytes", "work_s", "slept_s"),
    [
        ("to_device", 4_000, 0.0, [4.5]),
        ("to_host", 0, 0.0, [0.5]),
        ("gather", 4_000, 0.0, [2.0]),
        ("gather", 0, 0.0, []),
        ("scatter", 4_000, 0.0, [8.0]),
        ("scatter", 4_000, 3.0, [5.0]),
        ("scatter", 4_000, 9.0, []),
    ],
)
def test_work_lasts_as_long_as_the_simulated_rates_say(
    make: Callable[..., ThreadExecutor],
    queue: Queue,
    num_bytes: int,
    work_s: float,
    slept_s: list[float],
) -> None:
    clock = FakeClock()
    link = LinkRates(bytes_per_s=1e3, latency_s=0.5)
    executor = make(link=link, gather_bytes_per_s=2e3, scatter_bytes_per_s=5e2, clock=clock)
    executor.timeline.is_recording = True

    def work() -> None:
        clock.now_s += work_s

    executor.submit(queue, work, num_bytes=num_bytes, label="rows", step=7).wait()
    assert clock.slept_s == pytest.approx(slept_s)
    (span,) = executor.timeline.spans()
    assert (span.queue, span.label, span.step, span.begin_s) == (queue, "rows", 7, 100.0)
    assert span.end_s - span.begin_s == pytest.approx(work_s + sum(slept_s))
    assert executor.timeline.busy_s()[queue] == pytest.approx(work_s + sum(slept_s))


def test_a_wait_returns_how_long_it_blocked(make: Callable[..., ThreadExecutor]) -> None:
    clock = FakeClock()
    executor = make(clock=clock)

    class Slow(HostEvent):
        def wait(self) -> None:
            clock.now_s += 2.5

    assert executor.wait(executor.compute_event()) == 0.0
    assert executor.wait(Slow()) == 2.5


def test_close_finishes_what_is_pending_and_ends_the_threads() -> None:
    executor = ThreadExecutor()
    before = set(threading.enumerate())
    is_open = threading.Event()
    ran: list[int] = []
    executor.submit("gather", _gated(is_open, lambda: ran.append(0)), num_bytes=0)
    executor.submit("scatter", _raiser(ValueError("nobody asks")), num_bytes=0)
    executor.submit("gather", lambda: ran.append(1), num_bytes=0)
    threads = set(threading.enumerate()) - before
    assert len(threads) == 2, "threads start with their queue's first work"
    assert all(thread.daemon for thread in threads)
    is_open.set()
    executor.close()
    assert ran == [0, 1]
    assert not any(thread.is_alive() for thread in threads)
    executor.close()
    with pytest.raises(AssertionError, match="after close"):
        executor.submit("gather", lambda: None, num_bytes=0)


def test_work_that_never_ends_does_not_keep_the_interpreter() -> None:
    code = (
        "import threading\n"
        "from embeddings.host.executor import ThreadExecutor\n"
        "executor, begun = ThreadExecutor(), threading.Event()\n"
        "def work():\n"
        "    begun.set()\n"
        "    threading.Event().wait()\n"
        "executor.submit('gather', work, num_bytes=0)\n"
        "begun.wait()\n"
        "print('over')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (result.returncode, result.stdout) == (0, "over\n"), result.stderr


def test_finished_work_keeps_nothing_alive(make: Callable[..., ThreadExecutor]) -> None:
    class Buffer:
        pass

    executor = make()
    buffer, is_gone = Buffer(), threading.Event()
    weakref.finalize(buffer, is_gone.set)
    event = executor.submit("gather", lambda buffer=buffer: None, num_bytes=0)
    del buffer
    assert is_gone.wait(PATIENCE_S), "an event, or an idle thread, mustn't keep a buffer"
    assert event.is_done()


def test_the_timeline_is_bounded_and_off_by_default() -> None:
    clock = FakeClock()
    timeline = Timeline(capacity=3, clock=clock)
    timeline.add("gather", "a", 0, 1.0, 2.0)
    assert timeline.spans() == []
    timeline.is_recording = True
    for step in (5, 4, 3, 2):
        timeline.add("scatter", "b", step, float(step), step + 0.5)
    timeline.add("compute", "forward", 9, clock.now_s, clock.now_s + 4.0)
    assert [(span.queue, span.step) for span in timeline.spans()] == [
        ("scatter", 2),
        ("scatter", 3),
        ("compute", 9),
    ]
    busy_s = {"gather": 1.0, "to_device": 0.0, "to_host": 0.0, "scatter": 2.0, "compute": 4.0}
    assert timeline.busy_s() == busy_s, "sums hold dropped spans and those before recording too"


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_rates_that_make_no_sense_are_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="bytes_per_s"):
        LinkRates(bytes_per_s=rate)
    with pytest.raises(ValueError, match="gather_bytes_per_s"):
        SimulatedRates(link=None, gather_bytes_per_s=rate, scatter_bytes_per_s=None)
    with pytest.raises(ValueError, match="scatter_bytes_per_s"):
        SimulatedRates(link=None, gather_bytes_per_s=None, scatter_bytes_per_s=rate)
    if rate:
        with pytest.raises(ValueError, match="latency_s"):
            LinkRates(bytes_per_s=1.0, latency_s=rate)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_copy_is_equal_to_the_bit(dtype: torch.dtype) -> None:
    executor = ThreadExecutor(SimulatedRates(FAST, None, None))
    source = executor.host_empty(5, 3, dtype).copy_(torch.arange(15.0).view(5, 3) / 7)
    source[0, 0] = float("nan")
    target = executor.device_empty(8, 3, dtype).zero_()
    executor.copy(target[2:7], source)
    assert torch.equal(target[2:7].view(torch.uint8), source.view(torch.uint8))
    assert not target[[0, 1, 7]].any(), "nothing beside the target is written"
    executor.copy(target[:0], source[:0])


def test_cuda_streams_need_a_gpu() -> None:
    with pytest.raises(ValueError, match="device cpu: a CUDA device is needed"):
        CudaExecutor(torch.device("cpu"))


# ---------------------------------------------------------------- seeded order


def _independent_chains(executor: Executor) -> None:
    first = executor.submit("gather", lambda: None, num_bytes=0, label="a")
    second = executor.submit("scatter", lambda: None, num_bytes=0, label="b")
    executor.submit("to_device", lambda: None, num_bytes=0, after=[first], label="c")
    executor.submit("to_host", lambda: None, num_bytes=0, after=[second], label="d")
    executor.close()


def _labels(seed: int) -> str:
    executor = SteppedExecutor(seed, has_link=True)
    _independent_chains(executor)
    return "".join(label for _, label, _ in executor.ran)


def test_every_legal_order_comes_up_and_a_seed_is_an_order() -> None:
    seen = {_labels(seed) for seed in range(200)}
    assert seen == {"abcd", "abdc", "acbd", "bacd", "badc", "bdac"}
    assert [_labels(seed) for seed in range(20)] == [_labels(seed) for seed in range(20)]


def test_a_seed_may_leave_all_work_until_it_is_waited_for_or_do_it_at_once() -> None:
    num_left = set()
    for seed in range(50):
        executor = SteppedExecutor(seed, has_link=False)
        events = [executor.submit("gather", lambda: None, num_bytes=0) for _ in range(10)]
        executor.compute_event()
        num_left.add(executor.num_pending)
        assert executor.wait(events[4]) == 0.0
        assert events[4].is_done()
    assert {0, 10} <= num_left


def test_a_wait_that_nothing_can_end_is_told() -> None:
    executor = SteppedExecutor(0, has_link=False)
    never = HostEvent()
    stuck = executor.submit("gather", lambda: None, num_bytes=0, after=[never], label="rows")
    for event in (never, stuck):
        with pytest.raises(AssertionError, match="deadlock"):
            executor.wait(event)
    with pytest.raises(AssertionError, match="gather 'rows' 0"):
        executor.close()


def test_a_failure_in_seeded_order_reaches_what_depends_on_it() -> None:
    error = ValueError("rows lost")
    for seed in range(20):
        executor = SteppedExecutor(seed, has_link=False)
        ran: list[str] = []
        failed = executor.submit("gather", _raiser(error), num_bytes=0)
        child = executor.submit("scatter", lambda: ran.append("no"), num_bytes=0, after=[failed])  # noqa: B023
        other = executor.submit("gather", lambda: ran.append("yes"), num_bytes=0)  # noqa: B023
        executor.wait(other)
        with pytest.raises(ValueError, match="rows lost"):
            executor.wait(child)
        assert ran == ["yes"]


OPS = st.lists(
    st.tuples(st.sampled_from(QUEUES), st.lists(st.integers(0, 30), max_size=3)), max_size=25
)


@settings(max_examples=60, deadline=None)
@given(ops=OPS, seed=st.integers(0, 10_000), is_duplex=st.booleans())
def test_no_executor_runs_work_before_its_turn(
    ops: list[tuple[Queue, list[int]]], seed: int, is_duplex: bool
) -> None:
    executors: list[Executor] = [
        SteppedExecutor(seed, has_link=True, is_duplex=is_duplex),
        ThreadExecutor(SimulatedRates(LinkRates(1e15, is_duplex=is_duplex), None, None)),
    ]
    for executor in executors:
        ran: list[int] = []
        events: list[Event] = []
        for number, (queue, befores) in enumerate(ops):
            after = [events[before % number] for before in befores if number]
            work = lambda number=number, ran=ran: ran.append(number)  # noqa: E731
            events.append(executor.submit(queue, work, num_bytes=8, after=after))
        if events:
            executor.wait(events[seed % len(events)])
            assert seed % len(events) in ran
        executor.close()
        assert sorted(ran) == list(range(len(ops))), "all work runs, once"
        place = {number: index for index, number in enumerate(ran)}
        for number, (_, befores) in enumerate(ops):
            assert all(place[before % number] < place[number] for before in befores if number)
        shared: list[tuple[Queue, ...]] = [("gather",), ("scatter",)]
        shared += [("to_device",), ("to_host",)] if is_duplex else [LINK_QUEUES]
        for queues in shared:
            of_queue = [number for number in ran if ops[number][0] in queues]
            assert of_queue == sorted(of_queue), f"{queues} ran out of order"


def _gated(gate: threading.Event, work: Callable[[], None]) -> Callable[[], None]:
    """Work that begins by waiting until the test opens the gate."""

    def wait_and_work() -> None:
        assert gate.wait(PATIENCE_S), "the test never opened the gate"
        work()

    return wait_and_work


def _meet(barrier: threading.Barrier) -> None:
    barrier.wait(PATIENCE_S)


def _raiser(error: BaseException) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work
