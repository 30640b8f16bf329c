"""Host tables on CUDA streams: rows and states are those of plain updates, whichever side is late.

To the bit against whole tables in the GPU's memory, which the same operators update; against
`RowStore.apply` on the CPU to 1e-12, since a GPU may round a product and a sum once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal

import pytest
import torch
from torch import Tensor

from embeddings import RowStore
from embeddings.host.cuda_executor import CudaExecutor
from embeddings.host.host_tables import HostSettings, HostTables
from tests.host_driver import (
    Outcome,
    arrays_of,
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

HOT_SHARE = 0.15
NUM_STEPS = 40
TOLERANCE = 1e-12
OPTIMIZERS = ("sgd", "rowwise_adagrad", "adam")
WINDOWS = (0, 1, 2, 4)
Late = Literal["nothing", "link", "compute"]
_DELAY_CYCLES = 1_000_000  # Half a millisecond or more: longer than any step's other work.


class LateExecutor(CudaExecutor):
    """A `CudaExecutor` whose copies begin late on their streams, so that who doesn't wait for one
    finds what was there before: NaN at first, an older row later.

    Args:
        device: the GPU.
        late: whether the copies are.
    """

    def __init__(self, device: torch.device, late: Late) -> None:
        super().__init__(device)
        self._is_late = late == "link"

    def copy(self, target: Tensor, source: Tensor) -> None:
        if self._is_late:
            torch.cuda._sleep(_DELAY_CYCLES)
        super().copy(target, source)

    def host_empty(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        return super().host_empty(num_rows, width, dtype).fill_(float("nan"))

    def device_empty(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        rows = super().device_empty(num_rows, width, dtype).fill_(float("nan"))
        torch.cuda.current_stream(self.device).synchronize()
        return rows


def _run(
    device: torch.device,
    optimizer: str,
    settings: HostSettings,
    late: Late,
    between: Callable[[int, HostTables, RowStore], None] = lambda step, tables, store: None,
    drop_before: Collection[int] = (),
    dtype: torch.dtype = torch.float64,
) -> Outcome:
    store, spaces, features = build_store(optimizer_of(optimizer), dtype)
    executor = LateExecutor(device, late)
    tables = build_tables(store, spaces, features, executor, settings, HOT_SHARE)
    delay = (lambda: torch.cuda._sleep(_DELAY_CYCLES)) if late == "compute" else (lambda: None)
    found = drive(
        tables,
        store,
        draw_keys(spaces, NUM_STEPS),
        before_compute=delay,
        between=lambda step: between(step, tables, store),
        drop_before=drop_before,
    )
    assert tables.counters.num_fetched > 0
    assert tables.counters.num_written > 0
    assert (tables.counters.num_forwarded > 0) == (settings.window > 0), "nothing to forward"
    return found


def _assert_exact(
    found: Outcome, device: torch.device, optimizer: str, dtype: torch.dtype = torch.float64
) -> None:
    store, spaces, _ = build_store(optimizer_of(optimizer), dtype)
    steps = draw_keys(spaces, NUM_STEPS)
    assert differences(found, expected_on_device(store, spaces, steps, HOT_SHARE, device)) == []
    if dtype == torch.float64:
        store, spaces, _ = build_store(optimizer_of(optimizer))
        expected = expected_by_store(store, spaces, steps, HOT_SHARE)
        assert differences(found, expected, TOLERANCE) == []


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("late", ["nothing", "link", "compute"])
def test_rows_and_states_are_those_of_plain_updates(
    device: torch.device, optimizer: str, window: int, late: Late
) -> None:
    # Buffers of 4 rows, which grow while others are in use.
    found = _run(device, optimizer, settings_of(window), late)
    _assert_exact(found, device, optimizer)


@pytest.mark.parametrize("late", ["link", "compute"])
@pytest.mark.parametrize("window", WINDOWS)
def test_buffers_used_again_without_growing(device: torch.device, window: int, late: Late) -> None:
    # Growing waits for the host; buffers large enough from the start leave all to the events.
    found = _run(device, "adam", settings_of(window, batch_rows=512), late)
    _assert_exact(found, device, "adam")


def test_fp32_equals_device_tables_to_the_bit(device: torch.device) -> None:
    found = _run(device, "rowwise_adagrad", settings_of(2), "nothing", dtype=torch.float32)
    _assert_exact(found, device, "rowwise_adagrad", torch.float32)


@pytest.mark.parametrize("late", ["link", "compute"])
def test_rows_read_while_others_are_staged(device: torch.device, late: Late) -> None:
    # As a checkpoint does: the store must hold every row's newest value, and nothing be lost.
    read: dict[int, dict[str, Tensor]] = {}

    def settle(step: int, tables: HostTables, store: RowStore) -> None:
        if step % 7 == 5:
            assert tables.num_staged > 0
            tables.settle()
            read[step] = {name: array.clone() for name, array in arrays_of(store).items()}

    found = _run(device, "adam", settings_of(3, batch_rows=512), late, settle)
    _assert_exact(found, device, "adam")
    for step, arrays in read.items():
        store, spaces, _ = build_store(optimizer_of("adam"))
        steps = draw_keys(spaces, NUM_STEPS)[:step]
        expected = expected_on_device(store, spaces, steps, HOT_SHARE, device)
        assert differences(Outcome(arrays, expected.looked_up), expected) == [], f"step {step}"


@pytest.mark.parametrize("late", ["link", "compute"])
def test_staged_rows_that_are_dropped_and_staged_anew(device: torch.device, late: Late) -> None:
    found = _run(device, "adam", settings_of(3, batch_rows=512), late, drop_before=(7, 8, 20))
    _assert_exact(found, device, "adam")


def test_compute_on_another_stream_than_the_default_one(device: torch.device) -> None:
    # Events are recorded on the current stream, whichever that is.
    with torch.cuda.stream(torch.cuda.Stream(device)):
        found = _run(device, "adam", settings_of(2), "compute")
    _assert_exact(found, device, "adam")
