"""`HostTables` alone, under every executor; and on a pretended GPU that finds what a real one only
might: tensors of two memories mixed, and accesses that nothing puts in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from embeddings import row_update
from embeddings.host.executor import (
    LINK_QUEUES,
    Event,
    Executor,
    LinkRates,
    Queue,
    SimulatedRates,
    ThreadExecutor,
)
from embeddings.host.host_tables import HostSettings
from tests.host_driver import (
    build_store,
    build_tables,
    differences,
    draw_keys,
    drive,
    expected_by_store,
    expected_on_device,
    optimizer_of,
    settings_of,
)
from tests.stepped_executor import SteppedExecutor

HOT_SHARE = 0.15
NUM_STEPS = 25
DEVICE = torch.device("meta")  # The pretended GPU's name; its tensors have values.


def assert_exact(executor: Executor, optimizer: str, settings: HostSettings) -> None:
    store, spaces, features = build_store(optimizer_of(optimizer))
    steps = draw_keys(spaces, NUM_STEPS)
    tables = build_tables(store, spaces, features, executor, settings, HOT_SHARE)
    found = drive(tables, store, steps)
    plain, _, _ = build_store(optimizer_of(optimizer))
    assert differences(found, expected_by_store(plain, spaces, steps, HOT_SHARE)) == []
    counters = tables.counters
    assert min(counters.num_fetched, counters.num_written) > 0, "the case moves nothing"
    assert (counters.num_forwarded > 0) == (settings.window > 0), "nothing to forward"


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize("window", [0, 1, 2, 4])
@pytest.mark.parametrize("kind", ["thread", "thread_link", "stepped", "stepped_link"])
def test_rows_and_states_equal_plain_updates_to_the_bit(
    optimizer: str, window: int, kind: str
) -> None:
    executor: Executor
    if kind.startswith("thread"):
        simulated = SimulatedRates(LinkRates(1e9, 1e-5), None, None)
        executor = ThreadExecutor(simulated if kind == "thread_link" else None)
    else:
        executor = SteppedExecutor(window, has_link=kind == "stepped_link")
    assert_exact(executor, optimizer, settings_of(window))


def test_whole_tables_on_a_device_are_the_same_reference() -> None:
    # The reference that the GPU's bits are compared with.
    store, spaces, _ = build_store(optimizer_of("adam"))
    steps = draw_keys(spaces, NUM_STEPS)
    found = expected_on_device(store, spaces, steps, HOT_SHARE, torch.device("cpu"))
    plain, _, _ = build_store(optimizer_of("adam"))
    assert differences(found, expected_by_store(plain, spaces, steps, HOT_SHARE)) == []


def test_a_wrong_row_is_told() -> None:
    store, spaces, features = build_store(optimizer_of("sgd"))
    steps = draw_keys(spaces, 3)
    tables = build_tables(store, spaces, features, ThreadExecutor(), settings_of(1), HOT_SHARE)
    found = drive(tables, store, steps)
    found.arrays["group 0 weight"][7, 2] += 1e-9
    plain, _, _ = build_store(optimizer_of("sgd"))
    expected = expected_by_store(plain, spaces, steps, HOT_SHARE)
    assert differences(found, expected) == ["group 0 weight: 1 of 490 rows differ"]
    assert differences(found, expected, 1e-12) == ["group 0 weight: off by up to 1e-09"]


# ------------------------------------------------------------------------------ the pretended GPU


@pytest.fixture
def operators_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's rows are updated by torch's operators, so those that its bits are compared with are
    too."""
    monkeypatch.setattr(row_update, "_has_kernel", lambda *_: False)


@pytest.mark.usefixtures("operators_everywhere")
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("window", [0, 1, 2, 4])
def test_a_gpu_mixes_no_memories_and_has_no_races(seed: int, window: int) -> None:
    # Compute counts as unfinished until somebody has waited for it, however late that is.
    executor = PretendedGpu(seed)
    settings = settings_of(window, batch_rows=4 if seed % 2 else 512)
    with _Moves():
        assert_exact(executor, ("sgd", "rowwise_adagrad", "adam")[seed % 3], settings)
    assert executor.num_checked > 1_000


@pytest.mark.usefixtures("operators_everywhere")
@pytest.mark.parametrize("seed", range(4))
def test_reading_and_dropping_rows_in_flight_races_with_nothing(seed: int) -> None:
    # As a checkpoint and a new choice of hot rows do.
    executor = PretendedGpu(seed)
    store, spaces, features = build_store(optimizer_of("adam"))
    steps = draw_keys(spaces, NUM_STEPS)
    with _Moves():
        tables = build_tables(store, spaces, features, executor, settings_of(3), HOT_SHARE)
        found = drive(
            tables,
            store,
            steps,
            between=lambda step: tables.settle() if step % 3 == 2 else None,
            drop_before=(7, 8, 20),
        )
    plain, _, _ = build_store(optimizer_of("adam"))
    assert differences(found, expected_by_store(plain, spaces, steps, HOT_SHARE)) == []


Forget = Callable[[Sequence[Event], str], Sequence[Event]]


def _forget_compute(after: Sequence[Event], waiter: str) -> Sequence[Event]:
    """Rows leave the device before they are updated."""
    return [event for event in after if not (waiter == "to_host" and _actor(event) == "compute")]


def _forget_gather(after: Sequence[Event], waiter: str) -> Sequence[Event]:
    """Rows cross the link before they are read from the store."""
    return [event for event in after if not (waiter == "to_device" and _actor(event) == "gather")]


def _forget_emptied(after: Sequence[Event], waiter: str) -> Sequence[Event]:
    """A buffer is filled again while the last step's rows are taken from it."""
    return [] if waiter == "gather" else after


def _forget_arrival(after: Sequence[Event], waiter: str) -> Sequence[Event]:
    """The compute doesn't wait for rows under way."""
    return [] if waiter == "compute" else after


@pytest.mark.parametrize(
    "forget", [_forget_compute, _forget_gather, _forget_emptied, _forget_arrival]
)
def test_a_missing_order_is_found(forget: Forget) -> None:
    # By its clocks, whatever came of it this time; of a run where all work is done at once, the
    # host knows so much that nothing need be told, so one of several must find it.
    def run(seed: int) -> str:
        with _Moves():
            try:
                assert_exact(PretendedGpu(seed, forget), "sgd", settings_of(2, batch_rows=512))
            except AssertionError as error:
                return str(error)
        return ""

    assert any("nothing puts in order" in run(seed) for seed in range(6))


def test_mixed_memories_are_found() -> None:
    with _Moves():
        rows = PretendedGpu(0).device_empty(4, 2, torch.float32)
        index = torch.tensor([1])
        with pytest.raises(RuntimeError, match="same device"):
            rows.index_select(0, index)
        with pytest.raises(TypeError, match="cpu"):
            rows.numpy()
        assert rows.index_select(0, index.to(rows.device)).device == DEVICE


Clock = dict[str, int]


def _join(*clocks: Mapping[str, int]) -> Clock:
    actors = {actor for clock in clocks for actor in clock}
    return {actor: max(clock.get(actor, 0) for clock in clocks) for actor in actors}


def _actor(event: Event) -> str:
    assert isinstance(event, _ClockEvent)
    return event.actor


class _Memory:
    """A buffer's rows: who wrote each last, and who read it since, as (actor, tick)."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor  # Kept, so that its address names nothing else.
        self.base, self.row_bytes = tensor.data_ptr(), tensor.shape[1] * tensor.element_size()
        self.written: list[tuple[str, int]] = [("host", 0)] * tensor.shape[0]
        self.read: list[Clock] = [{} for _ in range(tensor.shape[0])]


class PretendedGpu(SteppedExecutor):
    """A GPU, but for the values being made at once: what happens before what is kept by clocks.

    An actor is the host's thread, the compute or a queue. Each access of a buffer's row asserts
    that the accesses it conflicts with happened before by what was waited for, whichever order they
    took place in.

    Args:
        seed: of the order in which work runs; with an even one, work never seems done before
            somebody waits for it.
        forget: from what a queue's work or the compute has to wait for to what it does wait for.
    """

    def __init__(
        self,
        seed: int,
        forget: Forget = lambda after, waiter: after,
    ) -> None:
        super().__init__(seed, has_link=True)
        self.device = DEVICE
        self.num_checked = 0
        self.sees_late = seed % 2 == 0
        self.clocks: dict[str, Clock] = {}
        self._forget = forget
        self._memories: list[_Memory] = []
        self._running: tuple[str, Clock] | None = None

    def submit(
        self,
        queue: Queue,
        work: Callable[[], None],
        *,
        num_bytes: int,
        after: Sequence[Event] = (),
        label: str = "",
        step: int = 0,
    ) -> Event:
        ordered = [e for e in self._forget(after, queue) if isinstance(e, _ClockEvent)]
        known = [event.clock for event in ordered]
        clock = self.tick(queue, *known)

        def run() -> None:
            self._running = (queue, clock)
            try:
                work()
            finally:
                self._running = None

        # The work itself waits for all it was told to, so that only the clocks are short of it.
        told = [e.inner for e in after if isinstance(e, _ClockEvent)]
        inner = super().submit(queue, run, num_bytes=num_bytes, after=told, label=label, step=step)
        return _ClockEvent(self, queue, clock, inner)

    def compute_event(self) -> Event:
        clock = self.tick("compute")
        return _ClockEvent(self, "compute", clock, super().compute_event())

    def wait(self, event: Event) -> float:
        assert isinstance(event, _ClockEvent)
        self.run_until(event.inner)
        event.inner.wait()
        if self._forget([event], "compute"):
            # A stream waits for work on streams; for a thread's work the host does.
            is_stream = event.actor in ("compute", *LINK_QUEUES)
            self.learn("compute" if is_stream else "host", event.clock)
        return 0.0

    def host_empty(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        return self._remember(super().host_empty(num_rows, width, dtype)).as_subclass(_Pinned)

    def device_empty(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        rows = SteppedExecutor.host_empty(self, num_rows, width, dtype)
        return self._remember(rows).as_subclass(_OnDevice)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target, source = _plain(target), _plain(source)
        self.access(source, None, is_write=False)
        self.access(target, None, is_write=True)
        super().copy(target, source)

    def tick(self, actor: str, *known: Mapping[str, int]) -> Clock:
        """A new moment of an actor, which knows what its last one did, what the host knows that
        gives it the work, and what it waited for."""
        before = self.clocks.get(actor, {})
        clock = _join(before, self.clocks.get("host", {}), *known)
        clock[actor] = before.get(actor, 0) + 1
        self.clocks[actor] = clock
        return clock

    def learn(self, actor: str, clock: Mapping[str, int]) -> None:
        """What an actor does from here on happens after a moment."""
        self.clocks[actor] = _join(self.clocks.get(actor, {}), clock)

    @property
    def is_host(self) -> bool:
        """Whether the calling thread itself is at work, and not a queue's."""
        return not self._is_running

    def access(self, tensor: Tensor, rows: Tensor | None, *, is_write: bool) -> None:
        """An access of some rows of a tensor, None: all; nothing where it is no buffer's."""
        address = tensor.data_ptr()
        memory = next(
            (m for m in self._memories if m.base <= address < m.base + m.tensor.nbytes), None
        )
        if memory is None or not tensor.numel():
            return
        actor, clock = self._running or ("compute", self.tick("compute"))
        first = (address - memory.base) // memory.row_bytes
        numbers = range(tensor.shape[0]) if rows is None else _plain(rows).tolist()
        for number in numbers:
            row = first + number
            writer, tick = memory.written[row]
            earlier = {writer: tick} if tick else {}
            if is_write:
                earlier = _join(earlier, memory.read[row])
            for other, moment in earlier.items():
                assert clock.get(other, 0) >= moment, (
                    f"{actor} {'writes' if is_write else 'reads'} row {row} of a buffer, and "
                    f"{other} had it: nothing puts in order what they do"
                )
            if is_write:
                memory.written[row], memory.read[row] = (actor, clock[actor]), {}
            else:
                memory.read[row][actor] = clock[actor]
        self.num_checked += len(numbers)

    def _remember(self, tensor: Tensor) -> Tensor:
        if tensor.numel():
            self._memories.append(_Memory(tensor))
        _Moves.executor = self
        return tensor


class _ClockEvent(Event):
    """An event and the moment it stands for."""

    def __init__(self, executor: PretendedGpu, actor: str, clock: Clock, inner: Event) -> None:
        self.actor, self.clock, self.inner = actor, clock, inner
        self._executor = executor

    def is_done(self) -> bool:
        """Of compute, and where nothing is seen early, only once the host knows for certain."""
        if self.actor == "compute" or self._executor.sees_late:
            host = self._executor.clocks.get("host", {})
            return all(host.get(actor, 0) >= tick for actor, tick in self.clock.items())
        is_done = self.inner.is_done()
        if is_done and self._executor.is_host:
            self._executor.learn("host", self.clock)
        return is_done

    def wait(self) -> None:
        self.inner.wait()
        if self._executor.is_host:
            self._executor.learn("host", self.clock)


class _Moves(TorchFunctionMode):
    """What brings tensors to the pretended GPU: `to`. The last executor made has its memory."""

    executor: PretendedGpu

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.to and DEVICE in args[1:] and not isinstance(args[0], _OnDevice):
            with torch._C.DisableTorchFunction():
                return args[0].clone().as_subclass(_OnDevice)
        return func(*args, **(kwargs or {}))


def _plain(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        return tensor.as_subclass(Tensor)


# Neither read nor write values.
_VIEWS = {"__get__", "__getitem__", "view", "reshape", "dim", "numel", "element_size", "data_ptr",
          "as_subclass", "size", "stride", "to", "__repr__", "detach"}  # fmt: skip


class _OnDevice(Tensor):
    """A tensor of the pretended GPU: as one of CUDA, it mixes with no other but by copying."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), func.__name__
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        with torch._C.DisableTorchFunction():
            if func == Tensor.device.__get__:  # type: ignore[attr-defined]
                return DEVICE
            if name == "numpy":
                raise TypeError("can't convert a device tensor to numpy: use .cpu()")
            alone = [t for t in tensors if not isinstance(t, _OnDevice) and t.dim() > 0]
            if alone and name != "copy_":
                raise RuntimeError(f"{name}: expected all tensors to be on the same device")
            _note_access(name, tensors, kwargs)
            if name == "cpu":
                executor = _Moves.executor
                executor.learn("host", executor.clocks.get("compute", {}))
                return args[0].as_subclass(Tensor).clone()
            result = func(*args, **kwargs)
            return result.as_subclass(cls) if isinstance(result, Tensor) else result


def _note_access(name: str, tensors: Sequence[Tensor], kwargs: Mapping[str, Any]) -> None:
    if name in _VIEWS:
        return
    executor, out = _Moves.executor, kwargs.get("out")
    if name == "index_select":
        executor.access(tensors[0], tensors[1], is_write=False)
    elif name == "index_copy_":
        executor.access(tensors[2], None, is_write=False)
        executor.access(tensors[0], tensors[1], is_write=True)
    else:
        changes = name.endswith("_") and not name.endswith("__")
        for number, tensor in enumerate(tensors):
            if tensor is not out and isinstance(tensor, _OnDevice):
                executor.access(tensor, None, is_write=changes and number == 0)
    if out is not None:
        executor.access(out, None, is_write=True)


class _Pinned(Tensor):
    """A host buffer, whose array tells when a queue reads or writes it."""

    def numpy(self, *, force: bool = False) -> Any:
        with torch._C.DisableTorchFunction():
            return Tensor.numpy(self.as_subclass(Tensor)).view(_TrackedArray)


class _TrackedArray(np.ndarray):
    def __setitem__(self, key: Any, value: Any) -> None:
        _Moves.executor.access(torch.from_numpy(self.view(np.ndarray)), None, is_write=True)
        super().__setitem__(key, value)

    def __getitem__(self, key: Any) -> Any:
        if not _Moves.executor.is_host:  # The host only makes views.
            _Moves.executor.access(torch.from_numpy(self.view(np.ndarray)), None, is_write=False)
        return super().__getitem__(key)
