"""The staging ring: whose turn a buffer is, what it costs, and that rows survive the way."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from embeddings.host.executor import (
    Event,
    Executor,
    HostEvent,
    LinkRates,
    SimulatedRates,
    ThreadExecutor,
)
from embeddings.host.staging import BufferState, StagingBuffer, StagingOverflow, StagingRing
from tests.stepped_executor import SteppedExecutor

WIDTH = 3


def make_ring(
    *,
    num_buffers: int = 2,
    capacity_rows: int = 4,
    limit_rows: int | None = None,
    link: bool = True,
) -> StagingRing:
    return StagingRing(
        SteppedExecutor(0, has_link=link),
        num_buffers,
        WIDTH,
        torch.float32,
        capacity_rows=capacity_rows,
        limit_rows=limit_rows,
    )


def done() -> HostEvent:
    event = HostEvent()
    event.finish()
    return event


def pass_through(buffer: StagingBuffer, emptied: Event | None = None) -> None:
    """Moves a buffer from FILLING to DIRTY."""
    buffer.filled_by(done())
    buffer.ready()
    buffer.use()
    buffer.dirty(emptied or done())


MOVES: dict[str, Callable[[StagingBuffer], None]] = {
    "filled_by": lambda buffer: buffer.filled_by(done()),
    "ready": lambda buffer: buffer.ready(),
    "use": lambda buffer: buffer.use(),
    "dirty": lambda buffer: buffer.dirty(done()),
    "free": lambda buffer: buffer.free(),
    "discard": lambda buffer: buffer.discard(),
}
# The moves that lead to a situation, the state there, and the moves that are legal in it.
SITUATIONS: list[tuple[list[str], BufferState, set[str]]] = [
    ([], BufferState.FILLING, {"filled_by", "discard"}),
    (["filled_by"], BufferState.FILLING, {"ready", "discard"}),
    (["filled_by", "ready"], BufferState.READY, {"use", "discard"}),
    (["filled_by", "ready", "use"], BufferState.IN_USE, {"dirty"}),
    (["filled_by", "ready", "use", "dirty"], BufferState.DIRTY, {"free"}),
    (["filled_by", "ready", "use", "dirty", "free"], BufferState.FREE, set()),
    (["discard"], BufferState.FREE, set()),
]


@pytest.mark.parametrize(("way", "state", "legal"), SITUATIONS)
@pytest.mark.parametrize("move", MOVES)
def test_a_buffer_goes_one_way_round(
    way: list[str], state: BufferState, legal: set[str], move: str
) -> None:
    buffer = make_ring().acquire(1)
    for name in way:
        MOVES[name](buffer)
    assert buffer.state is state
    if move in legal:
        MOVES[move](buffer)
    else:
        with pytest.raises(AssertionError):
            MOVES[move](buffer)
        assert buffer.state is state, "a refused move changes nothing"


def test_a_buffer_that_is_still_read_or_written_is_not_freed() -> None:
    ring = make_ring()
    buffer = ring.acquire(1)
    pass_through(buffer, emptied=HostEvent())
    with pytest.raises(AssertionError, match="still read"):
        buffer.free()
    other = ring.acquire(1)
    other.filled_by(HostEvent())
    with pytest.raises(AssertionError, match="still written"):
        other.discard()


def test_a_handle_of_an_earlier_step_reaches_nothing() -> None:
    ring = make_ring(num_buffers=1)
    old = ring.acquire(2)
    pass_through(old)
    new = ring.acquire(3)
    assert (old.generation, new.generation) == (1, 2)
    reads: list[Callable[[], object]] = [
        lambda: old.host_KR,
        lambda: old.device_KR,
        lambda: old.packed_KR,
        lambda: old.state,
        lambda: old.filled,
    ]
    for use in [*reads, *(lambda move=move: move(old) for move in MOVES.values())]:
        with pytest.raises(AssertionError, match="another step's"):
            use()
    assert new.state is BufferState.FILLING


def test_buffers_are_lent_in_turn_and_counted() -> None:
    ring = make_ring(num_buffers=3)
    first, second, third = (ring.acquire(2) for _ in range(3))
    assert len({buffer.host_KR.data_ptr() for buffer in (first, second, third)}) == 3
    assert ring.num_in_use == 3
    with pytest.raises(AssertionError, match="all 3 buffers are lent"):
        ring.acquire(1)
    # In turn: a free buffer further on isn't lent before its time.
    pass_through(second)
    assert ring.num_in_use == 2
    with pytest.raises(AssertionError, match="all 3 buffers are lent"):
        ring.acquire(1)
    memory = [first.host_KR.data_ptr(), second.host_KR.data_ptr()]
    pass_through(first)
    assert [ring.acquire(1).host_KR.data_ptr() for _ in range(2)] == memory


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("num_rows", [1, 5])
def test_who_gets_a_buffer_knows_when_the_step_before_has_done_with_it(
    seed: int, num_rows: int
) -> None:
    executor = SteppedExecutor(seed, has_link=False)
    ring = StagingRing(executor, 1, WIDTH, torch.float32, capacity_rows=4)
    ran: list[str] = []
    buffer = ring.acquire(1)
    assert buffer.emptied is None, "nobody had it before"
    pass_through(buffer, executor.submit("scatter", lambda: ran.append("rows"), num_bytes=0))
    assert ring.num_in_use == (0 if ran else 1)
    emptied = ring.acquire(num_rows).emptied
    if num_rows > 4:
        assert ran == ["rows"], "memory that is still read isn't replaced"
    if emptied is not None:
        executor.wait(emptied)
    assert ran == ["rows"], "`emptied` is the last event of the step before, or that is done"


def test_a_failed_write_back_is_raised_by_whoever_wants_the_buffer() -> None:
    error = OSError("no store")
    failed = HostEvent()
    failed.finish(error)
    ring = make_ring(num_buffers=1)
    buffer = ring.acquire(1)
    pass_through(buffer, failed)
    for use in (buffer.free, lambda: ring.acquire(1)):
        with pytest.raises(OSError, match="no store"):
            use()
        assert buffer.state is BufferState.DIRTY, "a failure isn't forgotten"


@pytest.mark.parametrize("link", [True, False])
def test_views_are_the_rows_in_use_of_memory_that_stays(link: bool) -> None:
    ring = make_ring(num_buffers=1, capacity_rows=8, link=link)
    buffer = ring.acquire(5)
    assert buffer.host_KR.shape == buffer.device_KR.shape == (5, WIDTH)
    buffer.host_KR.fill_(7.0)
    assert bool((buffer.device_KR == 7.0).all()) is not link
    assert (buffer.host_KR.data_ptr() == buffer.device_KR.data_ptr()) is not link
    if link:
        places = {buffer.host_KR.data_ptr(), buffer.device_KR.data_ptr()}
        assert buffer.packed_KR.shape == (5, WIDTH)
        assert buffer.packed_KR.data_ptr() not in places
    else:
        with pytest.raises(AssertionError, match="no link"):
            _ = buffer.packed_KR
    assert ring.num_bytes == (8 * WIDTH * 4, 2 * 8 * WIDTH * 4 if link else 0)
    pass_through(buffer)
    again = ring.acquire(0)
    assert again.host_KR.shape == (0, WIDTH)
    assert ring.num_grown == 0


@pytest.mark.parametrize(
    ("capacity_rows", "limit_rows", "num_rows", "grown_rows"),
    [
        (4, None, 4, None),
        (4, None, 5, 8),
        (4, None, 8, 8),
        (4, None, 1025, 2048),
        (0, None, 1, 1),
        (4, 12, 5, 8),
        (4, 12, 9, 12),
        (4, 12, 12, 12),
        (12, 12, 12, None),
    ],
)
def test_a_buffer_grows_to_a_power_of_two_within_the_limit(
    capacity_rows: int, limit_rows: int | None, num_rows: int, grown_rows: int | None
) -> None:
    ring = make_ring(num_buffers=2, capacity_rows=capacity_rows, limit_rows=limit_rows, link=False)
    buffer = ring.acquire(num_rows)
    assert buffer.host_KR.shape == buffer.device_KR.shape == (num_rows, WIDTH)
    total_rows = capacity_rows + (capacity_rows if grown_rows is None else grown_rows)
    assert ring.num_bytes == (total_rows * WIDTH * 4, 0)
    assert ring.num_grown == (grown_rows is not None)
    pass_through(buffer)
    pass_through(ring.acquire(0))
    ring.acquire(num_rows)
    assert ring.num_grown == (grown_rows is not None), "it keeps the size it has grown to"


def test_more_rows_than_the_users_limit_name_sizes_and_keys() -> None:
    ring = make_ring(num_buffers=2, capacity_rows=4, limit_rows=2_000)
    before = ring.num_bytes
    with pytest.raises(StagingOverflow) as raised:
        ring.acquire(3_000)
    told = str(raised.value)
    for part in ("3,000 cold rows (36,000 bytes", "2,000 rows (24,000 bytes)", "2 staging buffers"):
        assert part in told
    for key in ("sharding.host.staging_mb", "sharding.host.hot_mb", "sharding.host.lookahead"):
        assert key in told
    assert isinstance(raised.value, ValueError)
    assert (raised.value.num_rows, raised.value.limit_rows) == (3_000, 2_000)
    assert (ring.num_bytes, ring.num_in_use, ring.num_grown) == (before, 0, 0)
    assert ring.acquire(1).generation == 1, "the ring is as it was"


# ---------------------------------------------------------------- rows on their way


def add_one_to_rows(
    executor: Executor, steps: list[list[int]], num_rows: int, *, ahead: int, is_safe: bool = True
) -> list[float]:
    """Adds 1 to the rows of every step, staged `ahead` steps early where no step between them
    holds one of these rows. Returns the store's rows at the end.

    Args:
        executor: closed at the end.
        steps: row numbers of each step.
        num_rows: of the store.
        ahead: steps that may be staged before their turn.
        is_safe: gathers wait for the scatters of their rows.
    """
    store_R1 = np.zeros((num_rows, 1), dtype=np.float64)
    ring = StagingRing(executor, ahead + 1, 1, torch.float64, capacity_rows=2)
    scatters: list[Event] = []
    staged: list[tuple[StagingBuffer, list[int]]] = []

    def stage(keys: list[int], step: int) -> None:
        buffer, keys_K = ring.acquire(len(keys)), np.array(keys, dtype=np.int64)
        # Views taken now: when the work runs, the buffer may be lent to the next step.
        host_KR, device_KR = buffer.host_KR, buffer.device_KR
        host = host_KR.numpy()

        def gather() -> None:
            np.take(store_R1, keys_K, axis=0, out=host, mode="clip")

        after = [buffer.emptied] if buffer.emptied is not None else []
        if is_safe:
            after += scatters
        event = executor.submit("gather", gather, num_bytes=8, after=after, step=step)
        if executor.has_link:
            event = executor.submit(
                "to_device",
                lambda: executor.copy(device_KR, host_KR),
                num_bytes=8,
                after=[event],
            )
        buffer.filled_by(event)
        staged.append((buffer, keys))

    def compute(step: int) -> None:
        buffer, keys = staged.pop(0)
        keys_K = np.array(keys, dtype=np.int64)
        executor.wait(buffer.filled)
        buffer.ready()
        buffer.use()
        host_KR, device_KR = buffer.host_KR, buffer.device_KR
        device_KR.add_(1.0)
        event = executor.compute_event()
        if executor.has_link:
            event = executor.submit(
                "to_host",
                lambda: executor.copy(host_KR, device_KR),
                num_bytes=8,
                after=[event],
            )

        def scatter() -> None:
            store_R1[keys_K] = host_KR.numpy()

        event = executor.submit("scatter", scatter, num_bytes=8, after=[event], step=step)
        scatters.append(event)
        buffer.dirty(event)

    num_staged = 0
    for step in range(len(steps)):
        # Rows that a step between holds would have to be forwarded, which isn't the ring's job.
        while num_staged < min(len(steps), step + ahead + 1) and (
            num_staged == step
            or not set(steps[num_staged]) & {key for _, keys in staged for key in keys}
        ):
            stage(steps[num_staged], num_staged)
            num_staged += 1
        compute(step)
    executor.close()
    assert ring.num_in_use == 0, "every buffer comes back"
    return store_R1[:, 0].tolist()


STEPS = st.lists(st.lists(st.integers(0, 9), max_size=6, unique=True), max_size=12)


@settings(max_examples=100, deadline=None)
@given(steps=STEPS, seed=st.integers(0, 10_000), ahead=st.integers(0, 3), link=st.booleans())
def test_every_row_arrives_in_every_order(
    steps: list[list[int]], seed: int, ahead: int, link: bool
) -> None:
    expected = np.bincount([key for keys in steps for key in keys], minlength=10).tolist()
    rates = SimulatedRates(LinkRates(1e15, is_duplex=seed % 2 == 0), None, None)
    executors: list[Executor] = [
        SteppedExecutor(seed, link, is_duplex=seed % 3 > 0),
        ThreadExecutor(rates if link else None),
    ]
    for executor in executors:
        assert add_one_to_rows(executor, steps, 10, ahead=ahead) == expected


def test_seeded_orders_find_a_gather_that_does_not_wait() -> None:
    steps = [[0, 1], [1, 2], [0, 2], [1, 2], [0, 1]]
    rows = [
        add_one_to_rows(SteppedExecutor(seed, True), steps, 3, ahead=1, is_safe=False)
        for seed in range(30)
    ]
    assert any(found != [3.0, 4.0, 3.0] for found in rows)
