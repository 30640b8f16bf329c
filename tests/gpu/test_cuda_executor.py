"""`CudaExecutor` on a GPU: rows arrive whole, streams wait for each other, failures are told."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from embeddings.host.cuda_executor import CudaExecutor
from embeddings.host.executor import Event
from embeddings.host.staging import StagingRing


@pytest.fixture
def executor(device: torch.device) -> Iterator[CudaExecutor]:
    executor = CudaExecutor(device)
    yield executor
    executor.close()


def test_memory_is_where_it_should_be(executor: CudaExecutor, device: torch.device) -> None:
    assert executor.has_link
    host = executor.host_empty(5, 3, torch.float32)
    assert host.is_pinned()
    assert host.shape == (5, 3)
    assert executor.device_empty(5, 3, torch.float32).device == device


def test_a_failed_gather_fails_the_copy_and_the_wait(executor: CudaExecutor) -> None:
    error = ValueError("rows lost")

    def fail() -> None:
        raise error

    ran: list[str] = []
    gathered = executor.submit("gather", fail, num_bytes=0)
    copied = executor.submit("to_device", lambda: ran.append("no"), num_bytes=0, after=[gathered])
    for wait in (copied.wait, lambda: executor.wait(copied)):
        with pytest.raises(ValueError, match="rows lost") as raised:
            wait()
        assert raised.value is error
    assert copied.is_done()
    assert ran == []


@pytest.mark.parametrize("num_buffers", [1, 3])
def test_rows_survive_many_steps_under_a_busy_gpu(
    executor: CudaExecutor, device: torch.device, num_buffers: int
) -> None:
    """Each step adds 1 to its rows on the GPU, behind work that keeps the stream busy, so that a
    copy or a kernel that doesn't wait for its turn reads or writes the wrong values."""
    num_rows, width, num_steps = 50_000, 16, 60
    rng = np.random.default_rng(0)
    store = np.zeros((num_rows, width), dtype=np.float32)
    ring = StagingRing(executor, num_buffers, width, torch.float32, capacity_rows=1_000)
    executor.timeline.is_recording = True
    ballast = torch.randn(2_048, 2_048, device=device)
    counts = np.zeros(num_rows, dtype=np.int64)
    last: Event | None = None
    for step in range(num_steps):
        keys_K = np.sort(rng.choice(num_rows, 4_000 + 100 * step, replace=False))
        counts[keys_K] += 1
        buffer = ring.acquire(keys_K.size)
        host, rows, packed = buffer.host_KR, buffer.device_KR, buffer.packed_KR
        gathered = executor.submit(
            "gather",
            lambda host=host, keys_K=keys_K: np.take(
                store, keys_K, axis=0, out=host.numpy(), mode="clip"
            ),
            num_bytes=host.nbytes,
            # Also when the buffer was another's: that step's last event came earlier.
            after=[last] if last else [],
            step=step,
        )
        arrived = executor.submit(
            "to_device",
            lambda host=host, rows=rows: executor.copy(rows, host),
            num_bytes=host.nbytes,
            after=[gathered],
            step=step,
        )
        buffer.filled_by(arrived)
        for _ in range(4):
            ballast = torch.tanh(ballast @ ballast)
        executor.wait(arrived)
        buffer.ready()
        buffer.use()
        rows.add_(1.0)
        for _ in range(4):
            ballast = torch.tanh(ballast @ ballast)
        packed.copy_(rows)
        # The copy back waits for the kernels before this line, and for none after it.
        left = executor.submit(
            "to_host",
            lambda host=host, packed=packed: executor.copy(host, packed),
            num_bytes=host.nbytes,
            after=[executor.compute_event()],
            step=step,
        )

        def scatter(host=host, keys_K=keys_K) -> None:  # type: ignore[no-untyped-def]
            store[keys_K] = host.numpy()

        last = executor.submit("scatter", scatter, num_bytes=host.nbytes, after=[left], step=step)
        buffer.dirty(last)
    executor.close()
    assert ring.num_grown > 0, "growing is a part of what is tried here"
    assert np.array_equal(store, np.repeat(counts[:, None], width, axis=1).astype(np.float32))
    spans = executor.timeline.spans()
    assert len(spans) == 4 * num_steps
    assert all(span.end_s >= span.begin_s for span in spans)
