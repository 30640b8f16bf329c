"""Measures tables in host memory on a GPU and compares with what the cost model expects.

    export PYTHONPATH=.                   in the checkout; scripts/gpu_check.sh does so
    python scripts/gpu_host_check.py [--json FILE] [--limit-s S]
    python scripts/gpu_host_check.py --exactness               instead of tests/gpu, without pytest
    python scripts/gpu_host_check.py --device cpu --quick      tries the script itself

Needs torch and NumPy alone. One table: the link, reads and writes of scattered rows, the dense
network at four batch sizes, then whole steps with the tables in the GPU's memory and staged from
the host's. Without a GPU it says so in one line and ends with 0.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from embeddings import RowOptimizerConfig, RowStore, SingleProcess, TableConfig
from embeddings.host.cold_rows import RecordLayout, index_on_device
from embeddings.host.cost import DenseTime, HostRates, LinkRates, StepWork, predict_step_s
from embeddings.host.cuda_executor import CudaExecutor
from embeddings.host.executor import Executor, SimulatedRates, ThreadExecutor
from embeddings.host.host_tables import HostSettings, HostTables, StagedPlan
from embeddings.row_update import update_in_place
from tests import host_driver as driver

Int64Array = npt.NDArray[np.int64]
DTYPE = torch.float32
OPTIMIZER = RowOptimizerConfig(name="rowwise_adagrad")
LEARNING_RATE = 0.05
DIM, NUM_TABLES, NUM_DENSE = 16, 26, 13
LOOKAHEADS = (1, 2, 4)
SIMULATED_LINK = LinkRates(4e9, 2e-5)  # What a CPU pretends.


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        rows: of each table.
        hot_rows: of each table, those looked up most.
        batch_sizes: of the dense network and of tables in the device's memory.
        batch_size: of staged steps.
        num_steps: that are timed; half as many go before.
        copy_bytes: of a large copy.
    """

    rows: int = 200_003
    hot_rows: int = 2_000
    batch_sizes: tuple[int, ...] = (1_024, 2_048, 4_096, 8_192)
    batch_size: int = 4_096
    num_steps: int = 40
    copy_bytes: int = 64 << 20


QUICK = Sizes(1_009, 50, (16, 32, 48, 64), 32, 4, 1 << 20)


@dataclass(frozen=True)
class Line:
    """A measured figure, and what was expected where anything was."""

    what: str
    memory: str
    batch_size: int | None
    measured: float
    unit: str
    expected: float | None = None

    def cells(self) -> tuple[str, ...]:
        """For the table."""
        expected = "" if self.expected is None else f"{self.expected:.3g}"
        ratio = f"{self.measured / self.expected:.2f}" if self.expected else ""
        batch = "" if self.batch_size is None else f"{self.batch_size:,}"
        return self.what, self.memory, batch, f"{self.measured:.3g}", self.unit, expected, ratio


# ------------------------------------------------------------------------------------ the machine


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def best_s(work: Callable[[], Any], device: torch.device, repeats: int = 7) -> float:
    """Seconds of the fastest of some calls, until the device has done."""
    times_s = []
    for _ in range(repeats + 1):
        synchronize(device)
        begin_s = time.perf_counter()
        work()
        synchronize(device)
        times_s.append(time.perf_counter() - begin_s)
    return min(times_s[1:])


def measure_link(device: torch.device, num_bytes: int) -> tuple[LinkRates, list[Line]]:
    """The link's rates by copies of one size and of next to nothing."""
    if device.type != "cuda":
        rate = SIMULATED_LINK.bytes_per_s
        return SIMULATED_LINK, [Line("link, simulated", "", None, rate / 1e9, "GB/s")]
    pinned = [torch.ones(num_bytes, dtype=torch.uint8).pin_memory() for _ in range(2)]
    on_device = [torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    pageable = torch.ones(num_bytes, dtype=torch.uint8)
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def copy(target: Tensor, source: Tensor, number: int) -> None:
        with torch.cuda.stream(streams[number]):
            target.copy_(source, non_blocking=True)

    def both() -> None:
        copy(on_device[0], pinned[0], 0)
        copy(pinned[1], on_device[1], 1)

    to_device_s = best_s(lambda: copy(on_device[0], pinned[0], 0), device)
    to_host_s = best_s(lambda: copy(pinned[1], on_device[1], 1), device)
    both_s = best_s(both, device)
    pageable_s = best_s(lambda: on_device[0].copy_(pageable), device)
    small_s = [
        best_s(lambda: copy(on_device[0][:64], pinned[0][:64], 0), device, 50),
        best_s(lambda: copy(pinned[1][:64], on_device[1][:64], 1), device, 50),
    ]
    latency_s = max(small_s)
    slower_s = max(to_device_s, to_host_s)
    gain = (to_device_s + to_host_s) / both_s
    rates = LinkRates(num_bytes / max(slower_s - latency_s, 1e-9), latency_s, gain > 1.5)
    return rates, [
        Line("host to device", "pinned", None, num_bytes / to_device_s / 1e9, "GB/s"),
        Line("device to host", "pinned", None, num_bytes / to_host_s / 1e9, "GB/s"),
        Line("host to device", "pageable", None, num_bytes / pageable_s / 1e9, "GB/s"),
        Line("host to device, 64 bytes", "pinned", None, small_s[0] * 1e6, "us"),
        Line("device to host, 64 bytes", "pinned", None, small_s[1] * 1e6, "us"),
        Line("both directions against one by one", "pinned", None, gain, "times as fast"),
    ]


@contextmanager
def registered(store: RowStore, is_pinned: bool) -> Iterator[None]:
    """Pins a store's arrays where they lie."""
    arrays = [store.weights(0), *store.state(0).values()] if is_pinned else []
    runtime = torch.cuda.cudart() if arrays else None
    for array in arrays:
        error = runtime.cudaHostRegister(array.data_ptr(), array.nbytes, 0)
        if int(error) != 0:
            raise RuntimeError(f"cudaHostRegister of {array.nbytes:,} bytes: error {error}")
    try:
        yield
    finally:
        for array in arrays:
            runtime.cudaHostUnregister(array.data_ptr())


def measure_rows(store: RowStore, executor: Executor, keys_K: Int64Array) -> tuple[float, float]:
    """Bytes of records per second: read from the store, and written, as `ColdRows` does."""
    layout = RecordLayout.of(store.optimizer, DIM)
    arrays = [a.numpy() for a in (store.weights(0), *store.state(0).values())]
    target = executor.host_empty(keys_K.size, layout.width, DTYPE).numpy()

    def read() -> None:
        for array, columns in zip(arrays, layout.columns, strict=True):
            target[:, columns] = np.take(array, keys_K, axis=0, mode="clip")

    def write() -> None:
        for array, columns in zip(arrays, layout.columns, strict=True):
            array[keys_K] = target[:, columns]

    cpu = torch.device("cpu")
    return target.nbytes / best_s(read, cpu), target.nbytes / best_s(write, cpu)


# -------------------------------------------------------------------------------------- the model


class Dense(nn.Module):
    """The dense network of the default model, 13-512-256-16, dot, 512-256-1, and its SGD."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        num_vectors = NUM_TABLES + 1
        self.bottom = _mlp((NUM_DENSE, 512, 256, DIM))
        self.top = _mlp((num_vectors * (num_vectors - 1) // 2 + DIM, 512, 256, 1))
        self.register_buffer("pairs", torch.tril_indices(num_vectors, num_vectors, -1))
        self.to(device)
        self.weights = list(self.parameters())

    def step(self, pooled_FBD: Tensor, dense_BN: Tensor, label_B: Tensor) -> Tensor:
        """One step of the dense weights; the gradient of the pooled vectors."""
        pooled_FBD.requires_grad_()
        bottom_BD = self.bottom(dense_BN)
        vectors = torch.cat([bottom_BD[None], pooled_FBD]).transpose(0, 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        pairs = products[:, self.pairs[0], self.pairs[1]]
        logits_B = self.top(torch.cat([bottom_BD, pairs], dim=1))[:, 0]
        loss = nn.functional.binary_cross_entropy_with_logits(logits_B, label_B)
        pooled_grad, *grads = torch.autograd.grad(loss, [pooled_FBD, *self.weights])
        with torch.no_grad():
            torch._foreach_add_(self.weights, grads, alpha=-LEARNING_RATE)
        return pooled_grad


def _mlp(widths: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for number, (num_in, num_out) in enumerate(pairwise(widths)):
        layers += [nn.ReLU()] if number else []
        layers.append(nn.Linear(num_in, num_out))
    return nn.Sequential(*layers)


@dataclass(frozen=True, eq=False)
class Batch:
    """What is planned ahead of a step: its distinct keys, cold ones first, and where each is used.

    Attributes:
        cold_K: keys of cold rows.
        hot_K: keys of hot rows.
        slots_K: of the hot rows.
        inverse_L: int32, the row of each lookup among cold and then hot ones.
    """

    cold_K: Int64Array
    hot_K: Int64Array
    slots_K: Tensor
    inverse_L: Tensor


def draw_batches(
    sizes: Sizes, batch_size: int, num_batches: int, hot_keys_H: Int64Array, seed: int
) -> list[Batch]:
    """Ids by a power law (of order 1), spread over each table's rows."""
    rng = np.random.default_rng(seed)
    first_FB = np.arange(NUM_TABLES, dtype=np.int64)[:, None] * sizes.rows
    batches = []
    for _ in range(num_batches):
        order_FB = np.exp(rng.random((NUM_TABLES, batch_size)) * np.log(sizes.rows)).astype(int) - 1
        keys_K, inverse_L = np.unique(first_FB + spread(order_FB, sizes), return_inverse=True)
        slot_K = np.minimum(np.searchsorted(hot_keys_H, keys_K), hot_keys_H.size - 1)
        is_hot_K = hot_keys_H[slot_K] == keys_K
        position_K = np.empty(keys_K.size, dtype=np.int32)
        num_cold = int((~is_hot_K).sum())
        position_K[~is_hot_K] = np.arange(num_cold)
        position_K[is_hot_K] = np.arange(num_cold, keys_K.size)
        batches.append(
            Batch(
                keys_K[~is_hot_K],
                keys_K[is_hot_K],
                torch.from_numpy(slot_K[is_hot_K]),
                torch.from_numpy(position_K[inverse_L.reshape(-1)]),
            )
        )
    return batches


def spread(order: Int64Array, sizes: Sizes) -> Int64Array:
    """From a row's place in the order of use to its number; `sizes.rows` is a prime."""
    return (order * 7_919) % sizes.rows


class Steps:
    """Whole steps of the model over one batch size; the host is waited for only by the staging."""

    def __init__(self, device: torch.device, batch_size: int) -> None:
        self.device, self.batch_size = device, batch_size
        self.dense = Dense(device)
        self.dense_BN = torch.rand(batch_size, NUM_DENSE, device=device)
        self.label_B = torch.randint(0, 2, (batch_size,), device=device).to(torch.float32)

    def gradients(self, vectors_KD: Tensor, batch: Batch) -> Tensor:
        """Those of the batch's rows, after a step of the dense network."""
        inverse_L = index_on_device(batch.inverse_L, self.device)
        pooled = vectors_KD.index_select(0, inverse_L).view(NUM_TABLES, self.batch_size, DIM)
        grad = self.dense.step(pooled, self.dense_BN, self.label_B)
        return torch.zeros_like(vectors_KD).index_add_(0, inverse_L, grad.reshape(-1, DIM))

    def dense_s(self, num_steps: int) -> float:
        """Seconds of the dense network's own step."""
        pooled = torch.rand(NUM_TABLES, self.batch_size, DIM, device=self.device)

        def run() -> None:
            for _ in range(num_steps):
                self.dense.step(pooled.detach().clone(), self.dense_BN, self.label_B)

        return best_s(run, self.device, repeats=2) / num_steps

    def on_device_s(self, store: RowStore, batches: Sequence[Batch], num_steps: int) -> float:
        """Seconds of a step with whole tables in the device's memory."""
        weights = store.weights(0).to(self.device, copy=True)
        states = {n: s.to(self.device, copy=True) for n, s in store.state(0).items()}

        def run(batch: Batch) -> None:
            keys_K = torch.from_numpy(np.concatenate([batch.cold_K, batch.hot_K]))
            keys_K = index_on_device(keys_K, self.device)
            grads_KD = self.gradients(weights.index_select(0, keys_K), batch)
            update_in_place(
                OPTIMIZER, weights, states, keys_K, grads_KD, lr=LEARNING_RATE, num_steps=1
            )

        return self._time_s(run, batches, num_steps)

    def staged_s(
        self, tables: HostTables, store: RowStore, batches: Sequence[Batch], num_steps: int
    ) -> float:
        """Seconds of a step with rows staged as the tables' settings say."""
        staged: deque[StagedPlan] = deque()
        upcoming = iter(batches)

        def stage() -> None:
            batch = next(upcoming, None)
            if batch is not None:
                staged.append(StagedPlan())
                tables.stage([(staged[-1], [batch.cold_K])])

        for _ in range(tables.settings.window):
            stage()

        def run(batch: Batch) -> None:
            if not tables.settings.window:
                stage()
            plan, num_cold = staged.popleft(), batch.cold_K.size
            rows = [tables.rows(0, plan), tables.hot_rows(0, batch.slots_K)]
            if tables.settings.window:
                stage()
            grads_KD = self.gradients(torch.cat(rows), batch)
            store.begin_step()
            tables.begin_update()
            cold = torch.from_numpy(batch.cold_K)
            tables.update(0, cold, grads_KD[:num_cold], LEARNING_RATE)
            hot_grads_KD = grads_KD[num_cold:]
            tables.update(tables.hot_group[0], batch.slots_K, hot_grads_KD, LEARNING_RATE)
            tables.retire()

        return self._time_s(run, batches, num_steps)

    def _time_s(
        self, run: Callable[[Batch], None], batches: Sequence[Batch], num_steps: int
    ) -> float:
        for batch in batches[:-num_steps]:
            run(batch)
        synchronize(self.device)
        begin_s = time.perf_counter()
        for batch in batches[-num_steps:]:
            run(batch)
        synchronize(self.device)
        return (time.perf_counter() - begin_s) / num_steps


# -------------------------------------------------------------------------------------- the check


class Check:
    """Measures one thing after another until the time is over.

    Attributes:
        lines: what was measured.
        figures: more of it, for the JSON file.
        left_out: what there was no time for.
    """

    def __init__(self, device: torch.device, sizes: Sizes, limit_s: float) -> None:
        self.device, self.sizes = device, sizes
        self.lines: list[Line] = []
        self.figures: dict[str, Any] = {"steps": {}}
        self.left_out: list[str] = []
        self._end_s = time.perf_counter() + limit_s
        tables = [TableConfig(f"t{n}", sizes.rows, DIM) for n in range(NUM_TABLES)]
        self.store, self.spaces, self.features = driver.build_store(OPTIMIZER, DTYPE, tables)
        first_F1 = np.arange(NUM_TABLES, dtype=np.int64)[:, None] * sizes.rows
        hot_H = spread(np.arange(sizes.hot_rows, dtype=np.int64), sizes)
        self.hot_keys_H = np.sort((first_F1 + hot_H).reshape(-1))

    def run(self) -> None:
        """Everything."""
        link, lines = measure_link(self.device, self.sizes.copy_bytes)
        self.lines += lines
        self.figures["link"] = vars(link)
        dense = self._dense_time()
        for memory in ("pageable", "pinned") if self.device.type == "cuda" else ("pageable",):
            with registered(self.store, memory == "pinned"):
                self._staged(memory, link, dense)

    def _has_time(self, what: str) -> bool:
        if time.perf_counter() < self._end_s:
            return True
        self.left_out.append(what)
        return False

    def _batches(self, batch_size: int, more: int = 0) -> list[Batch]:
        num_batches = self.sizes.num_steps * 3 // 2 + more
        return draw_batches(self.sizes, batch_size, num_batches, self.hot_keys_H, batch_size)

    def _dense_time(self) -> DenseTime:
        """The dense network's steps, and those with the tables on the device: `DenseTime` is of the
        latter, since updates and hot rows are a part of it."""
        sizes, times_s = self.sizes, []
        for batch_size in sizes.batch_sizes:
            steps = Steps(self.device, batch_size)
            dense_ms = steps.dense_s(sizes.num_steps) * 1e3
            self.lines.append(Line("dense network", "", batch_size, dense_ms, "ms"))
            batches = self._batches(batch_size)
            times_s.append(steps.on_device_s(self.store, batches, sizes.num_steps))
        fitted = fit_dense(sizes.batch_sizes, times_s)
        for batch_size, seconds in zip(sizes.batch_sizes, times_s, strict=True):
            expected_ms = fitted.of_s(batch_size) * 1e3
            line = Line("step, device tables", "device", batch_size, seconds * 1e3, "ms",
                        expected_ms)  # fmt: skip
            self.lines.append(line)
        self.figures["dense"] = vars(fitted)
        return fitted

    def _staged(self, memory: str, link: LinkRates, dense: DenseTime) -> None:
        sizes = self.sizes
        steps, batches = Steps(self.device, sizes.batch_size), self._batches(sizes.batch_size)
        executor = self._executor()
        gather, scatter = measure_rows(self.store, executor, batches[0].cold_K)
        executor.close()
        self.lines.append(Line("rows read", memory, None, gather / 1e9, "GB/s"))
        self.lines.append(Line("rows written", memory, None, scatter / 1e9, "GB/s"))
        for lookahead in (0, *LOOKAHEADS):
            what = f"step, lookahead {lookahead}" if lookahead else "step, gather"
            if not self._has_time(f"{what}, {memory}"):
                continue
            settings = HostSettings(
                mode="lookahead" if lookahead else "gather",
                lookahead=max(1, lookahead),
                batch_rows=max(batch.cold_K.size for batch in batches),
                hot_bytes=self.hot_keys_H.size * (DIM + 1) * DTYPE.itemsize,
            )
            tables = HostTables(
                self.spaces, self.features, self.store, SingleProcess(), self._executor(), settings,
                DTYPE,
            )  # fmt: skip
            tables.choose_hot({0: self.hot_keys_H})
            measured_s = steps.staged_s(tables, self.store, batches, sizes.num_steps)
            work = self._work(tables, batches)
            tables.settle()
            tables.close()
            rates = HostRates(gather, scatter, link)
            expected_s = predict_step_s(settings.mode, work, rates, dense, lookahead=lookahead)
            self.lines.append(
                Line(what, memory, sizes.batch_size, measured_s * 1e3, "ms", expected_s * 1e3)
            )
            busy_s = tables.executor.timeline.busy_s()
            self.figures["steps"][f"{what}, {memory}"] = {
                "work": vars(work),
                "busy_ms": {n: s * 1e3 / len(batches) for n, s in busy_s.items()},
                "stall_ms": tables.counters.stall_s * 1e3 / len(batches),
            }

    def _executor(self) -> Executor:
        if self.device.type == "cuda":
            return CudaExecutor(self.device)
        return ThreadExecutor(SimulatedRates(SIMULATED_LINK, None, None))

    def _work(self, tables: HostTables, batches: Sequence[Batch]) -> StepWork:
        counters, num = tables.counters, len(batches)
        return StepWork(
            num_samples=self.sizes.batch_size,
            record_bytes=(DIM + 1) * DTYPE.itemsize,
            num_cold=counters.num_cold / num,
            num_fetched=counters.num_fetched / num,
            num_forwarded=counters.num_forwarded / num,
            num_written=counters.num_written / num,
            all_hot_share=0.0,
            num_unique=sum(b.cold_K.size + b.hot_K.size for b in batches) / num,
            pooled_bytes=self.sizes.batch_size * NUM_TABLES * DIM * DTYPE.itemsize,
            row_bytes=DIM * DTYPE.itemsize,
        )


def fit_dense(batch_sizes: Sequence[int], times_s: Sequence[float]) -> DenseTime:
    """The line through the times by least squares; through the origin or level where it would have
    a negative part."""
    per_sample_s, fixed_s = np.polyfit(batch_sizes, times_s, 1)
    if fixed_s < 0:
        sizes = np.asarray(batch_sizes, dtype=np.float64)
        return DenseTime(0.0, float(sizes @ np.asarray(times_s) / (sizes @ sizes)))
    if per_sample_s < 0:
        return DenseTime(float(np.mean(times_s)), 0.0)
    return DenseTime(float(fixed_s), float(per_sample_s))


def table_of(lines: Sequence[Line]) -> list[str]:
    """At most 100 columns."""
    heading = ("what", "memory", "batch", "measured", "unit", "expected", "ratio")
    cells = [heading, *(line.cells() for line in lines)]
    widths = [max(len(row[n]) for row in cells) for n in range(len(heading))]
    texts = (0, 1, 4)
    return [
        "  ".join(
            cell.ljust(width) if n in texts else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def check_exactness(device: torch.device) -> int:
    """What tests/gpu/test_host_exactness.py asserts, in short; the number of wrong cases."""
    share, num_wrong, num_cases = 0.15, 0, 0
    for name in ("sgd", "rowwise_adagrad", "adam"):
        for window in (0, 1, 2, 4):
            store, spaces, features = driver.build_store(driver.optimizer_of(name))
            keys = driver.draw_keys(spaces, 40)
            executor = CudaExecutor(device) if device.type == "cuda" else ThreadExecutor()
            settings = driver.settings_of(window)
            tables = driver.build_tables(store, spaces, features, executor, settings, share)
            found = driver.drive(tables, store, keys)
            store, _, _ = driver.build_store(driver.optimizer_of(name))
            expected = driver.expected_on_device(store, spaces, keys, share, device)
            wrong = driver.differences(found, expected)
            store, _, _ = driver.build_store(driver.optimizer_of(name))
            plain = driver.expected_by_store(store, spaces, keys, share)
            wrong += driver.differences(found, plain, 1e-12)
            num_cases += 1
            num_wrong += bool(wrong)
            for line in wrong[:3]:
                print(f"exactness: {name}, window {window}: {line}")
    print(f"exactness on {device}: {num_cases - num_wrong} of {num_cases} cases are right")
    return num_wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 1 where a row is wrong; 0 otherwise, without a GPU too."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--limit-s", type=float, default=150.0, help="begin nothing after")
    parser.add_argument("--quick", action="store_true", help="sizes that tell nothing")
    parser.add_argument("--exactness", action="store_true", help="compare rows, measure nothing")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"gpu_host_check: skipped, nothing measured: no GPU for torch {torch.__version__}")
        return 0
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    if options.exactness:
        return int(check_exactness(device) > 0)
    check = Check(device, QUICK if options.quick else Sizes(), options.limit_s)
    check.run()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, simulated link"
    machine = {"device": name, "torch": torch.__version__, "cpus": os.cpu_count()}
    print(f"{name}, torch {torch.__version__}, {os.cpu_count()} CPUs")
    print("\n".join(table_of(check.lines)))
    for what in check.left_out:
        print(f"left out for want of time: {what}")
    if options.json:
        lines = [vars(line) for line in check.lines]
        content = {"machine": machine, "lines": lines, "left_out": check.left_out, **check.figures}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(content, indent=1) + "\n")
        print(f"figures: {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
