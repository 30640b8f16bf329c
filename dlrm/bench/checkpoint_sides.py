"""One measurement of `dlrm bench checkpoint`: tables are saved or loaded once, by one side."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from data.synthetic import CRITEO_CARDINALITIES
from dlrm.async_save import AsyncSaver, bytes_to_copy
from dlrm.bench.measure import process_figures
from dlrm.bench.sides import OWN
from dlrm.build import communicator
from dlrm.checkpoint import Checkpoints, Contents, Progress
from dlrm.checkpoint_load import load_training
from dlrm.config import BenchRun
from dlrm.heartbeat import keep_beating
from dlrm.launch import WorkerContext
from embeddings.communicator import Communicator
from embeddings.plan import Plan
from embeddings.row_optim import RowOptimizerConfig, RowOptimizerName, state_widths
from embeddings.sharded import ShardedEmbeddings
from embeddings.table import FeatureConfig, TableConfig

PLAIN = "plain"
DCP = "dcp"
DCP_SAFETENSORS = "dcp_safetensors"
SAVE, COLD_LOAD, WARM_LOAD = "save", "cold load", "warm load"
ASYNC_SAVE = "async save"
OPERATIONS = (SAVE, COLD_LOAD, WARM_LOAD, ASYNC_SAVE)
"""In this order: each finds what those before it have left."""
_STRETCH_BYTES = 8 << 20
_WRITE_BYTES = 1 << 20
"""What is written at once: more was no faster here, and often slower."""
_PAGE_BYTES = mmap.PAGESIZE


@dataclass(frozen=True)
class CheckpointTask:
    """What every rank of a measurement gets.

    Attributes:
        config: the configuration.
        plan: who owns which rows.
        side: its name.
        operation: one of `OPERATIONS`.
        folder: of all sides, in turn; a load reads what the save before it has left there.
    """

    config: BenchRun
    plan: Plan
    side: str
    operation: str
    folder: Path


class CheckpointSide(Protocol):
    """One rank of what saves and loads.

    Attributes:
        note: one line on what exactly it is.
        is_checked: whether what is loaded is the tables' values.
    """

    note: str
    is_checked: bool

    def save(self) -> None:
        """Writes the tables of all ranks and flushes them to disk."""

    def load(self) -> None:
        """Reads what was saved into the tables."""


@runtime_checkable
class CopyingSide(Protocol):
    """A side that can save in the background, from a copy in memory that was made once before."""

    def prepare_copy(self) -> None:
        """Takes the memory of the copy."""

    def copy(self) -> None:
        """What training waits for."""

    def finish_copy(self) -> None:
        """Waits for what goes on in the background."""


def bench_tables(config: BenchRun) -> list[TableConfig]:
    """Tables in the proportions of Criteo Kaggle's, `bench.table_mib` with their state."""
    dim = config.model.embedding_dim
    row_bytes = 4 * (dim + sum(state_widths(_optimizer(config), dim).values()))
    scale = (config.bench.table_mib << 20) / row_bytes / sum(CRITEO_CARDINALITIES)
    return [
        TableConfig(f"C{number}", max(1, round(size * scale)), dim)
        for number, size in enumerate(CRITEO_CARDINALITIES, 1)
    ]


def bench_features(tables: Iterable[TableConfig]) -> list[FeatureConfig]:
    """One for each table."""
    return [FeatureConfig(table.name, table.name) for table in tables]


# ------------------------------------------------------------------------------ in the worker


def measure_checkpoint(context: WorkerContext, task: CheckpointTask) -> dict[str, Any]:
    """One rank of a measurement; the figures are of all ranks."""
    comm = communicator(context, task.config.launch)
    is_save = task.operation in (SAVE, ASYNC_SAVE)
    with keep_beating(context.heartbeat, task.operation):
        # Those that are loaded into hold other values.
        seed = task.config.seed + (0 if is_save else 1)
        embeddings = _build(task, comm, seed)
        tensors = own_tensors(embeddings)
        side = _SIDES[task.side](task, comm, embeddings, context)
        cached_bytes = _prepare(task, comm)
        peak = PeakMemory()
        if task.operation == SAVE:
            # A virtual machine may have to fetch memory for the page cache from its host first. The
            # second save gets that of the first, as in a run that saves again and again.
            side.save()
            cached_bytes = _prepare(task, comm)
        work = side.save if is_save else side.load
        if task.operation == ASYNC_SAVE:
            assert isinstance(side, CopyingSide)
            side.prepare_copy()
            work = side.copy
        comm.barrier()
        start_s = time.perf_counter()
        work()
        comm.barrier()
        seconds = time.perf_counter() - start_s
        if isinstance(side, CopyingSide):
            side.finish_copy()
        extra_bytes = peak.extra_bytes()
        digest = values_digest(tensors) if side.is_checked else None
    found = comm.all_gather_object((sum(t.nbytes for t in tensors), extra_bytes, digest))
    rank_bytes, extras, digests = zip(*found, strict=True)
    num_bytes = sum(rank_bytes)
    return {
        "bytes_per_s": num_bytes / seconds,
        "seconds": seconds,
        "num_bytes": num_bytes,
        "rank_bytes": list(rank_bytes),
        "extra_bytes_by_rank": list(extras),
        "extra_bytes": max(extras),
        "extra_share": max(e / max(1, b) for e, b in zip(extras, rank_bytes, strict=True)),
        "cached_bytes": cached_bytes,
        "values_digest": "".join(digests) if side.is_checked else None,
        "note": side.note,
        **process_figures(),
    }


def own_tensors(embeddings: ShardedEmbeddings) -> list[Tensor]:
    """What this rank writes down of the tables: views of their memory."""
    return [
        values
        for table in embeddings.tables
        for part in embeddings.own_parts(table.name, 0, table.rows)
        for values in part.values.values()
    ]


def values_digest(tensors: Iterable[Tensor]) -> str:
    """Of the values, in order."""
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        digest.update(_bytes_of(tensor))
    return str(digest.hexdigest())


class PeakMemory:
    """What a process's memory has grown by at most, counted from now on.

    From Linux's count of resident pages, of which the highest is forgotten here (proc(5),
    `clear_refs`).

    Raises:
        OSError: where the system has no such thing.
    """

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self._start_bytes = _status_bytes("VmRSS")

    def extra_bytes(self) -> int:
        """The highest so far, above that at the start."""
        return max(0, _status_bytes("VmHWM") - self._start_bytes)


def drop_cache(path: Path) -> None:
    """Has the kernel forget a file's pages, which must be on disk for it; see `cached_bytes`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def cached_bytes(path: Path) -> int:
    """How much of a file is in the page cache, by mincore(2).

    Raises:
        OSError: naming the file.
    """
    size = path.stat().st_size
    if not size:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    is_cached = np.zeros(-(-size // _PAGE_BYTES), dtype=np.uint8)
    with open(path, "rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        view = np.frombuffer(mapped, dtype=np.uint8)
        status = libc.mincore(
            ctypes.c_void_p(view.ctypes.data),
            ctypes.c_size_t(size),
            ctypes.c_void_p(is_cached.ctypes.data),
        )
        del view  # A map that is looked at can't be closed.
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
    return min(size, int((is_cached & 1).sum()) * _PAGE_BYTES)


def _optimizer(config: BenchRun) -> RowOptimizerConfig:
    return RowOptimizerConfig(cast(RowOptimizerName, config.optim.sparse.name))


def _build(task: CheckpointTask, comm: Communicator, seed: int) -> ShardedEmbeddings:
    """The tables, with state that is neither zero nor untouched."""
    tables = bench_tables(task.config)
    embeddings = ShardedEmbeddings(
        tables,
        bench_features(tables),
        _optimizer(task.config),
        dtype=torch.float32,
        seed=seed,
        plan=task.plan,
        comm=comm,
    )
    store = embeddings.store
    for group in range(len(store.groups)):
        for state in store.state(group).values():
            torch.abs(store.weights(group)[:, : state.shape[1]], out=state)
    return embeddings


def _prepare(task: CheckpointTask, comm: Communicator) -> int:
    """Brings disk and page cache into the state that the operation begins with; how many bytes of
    the files are in the cache then."""
    if comm.rank == 0:
        if task.operation == SAVE:
            shutil.rmtree(task.folder, ignore_errors=True)
            task.folder.mkdir(parents=True)
            os.sync()  # What others wrote is not to be written within.
        for path in _files(task.folder):
            if task.operation == COLD_LOAD:
                drop_cache(path)
            else:
                _read_through(path)
    comm.barrier()
    return sum(map(cached_bytes, _files(task.folder)))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _read_through(path: Path) -> None:
    """Reads a file in stretches, into the same memory."""
    buffer = bytearray(_STRETCH_BYTES)
    with open(path, "rb", buffering=0) as opened:
        while opened.readinto(buffer):
            pass


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class _OwnSide:
    """`Checkpoints.save` and `load_training`."""

    note = (
        "Checkpoints.save and load_training: a digest for each MiB written with it, checked "
        "when it is read; a dense network of 0.3 M weights besides, not counted"
    )
    is_checked = True

    def __init__(
        self,
        task: CheckpointTask,
        comm: Communicator,
        embeddings: ShardedEmbeddings,
        context: WorkerContext,
    ) -> None:
        self._comm, self._embeddings = comm, embeddings
        self._checkpoints = Checkpoints(task.folder)
        self._model = nn.Linear(512, 512)
        self._optimizer = torch.optim.Adam(self._model.parameters())
        self._beat = lambda: context.heartbeat.beat(0, task.operation)
        self._saver: AsyncSaver | None = None

    def save(self) -> None:
        self._checkpoints.save(self._contents(), self._comm, is_best=False, beat=self._beat)

    def prepare_copy(self) -> None:
        num_bytes = bytes_to_copy(self._contents())
        self._saver = AsyncSaver(self._checkpoints, self._comm, num_bytes, self._beat)
        self.copy()
        self.finish_copy()

    def copy(self) -> None:
        assert self._saver is not None
        self._saver.save(self._contents(), is_best=False)

    def finish_copy(self) -> None:
        if self._saver is not None:
            self._saver.wait()

    def _contents(self) -> Contents:
        return Contents.of(Progress(1), self._model, self._embeddings, self._optimizer)

    def load(self) -> None:
        info = self._checkpoints.find("latest")
        load_training(info, self._model, self._embeddings, self._optimizer, self._beat)


class _PlainSide:
    """As many bytes in a file for each rank."""

    note = (
        "each rank writes its tables' memory to one file, in order and 1 MiB at once, and fsyncs "
        "it; reads it in stretches of 8 MiB into the same 8 MiB, and nothing more; in place of the "
        "async save, one copy in memory"
    )
    is_checked = False

    def __init__(
        self,
        task: CheckpointTask,
        comm: Communicator,
        embeddings: ShardedEmbeddings,
        context: WorkerContext,
    ) -> None:
        self._path = task.folder / f"rank-{comm.rank}"
        self._tensors = own_tensors(embeddings)
        self._copies: list[Tensor] = []

    def save(self) -> None:
        with open(self._path, "wb", buffering=0) as opened:
            for tensor in self._tensors:
                view = _bytes_of(tensor)
                while view:
                    view = view[opened.write(view[:_WRITE_BYTES]) :]
            os.fsync(opened.fileno())

    def load(self) -> None:
        _read_through(self._path)

    def prepare_copy(self) -> None:
        self._copies = [tensor.clone() for tensor in self._tensors]

    def copy(self) -> None:
        for copy, tensor in zip(self._copies, self._tensors, strict=True):
            copy.copy_(tensor)

    def finish_copy(self) -> None:
        """Nothing goes on."""


class _DcpSide:
    """torch.distributed.checkpoint, of the same tensors."""

    note = (
        "torch.distributed.checkpoint with FileSystemWriter (one file per rank, sync_files) and "
        "FileSystemReader; no digests"
    )
    is_checked = True

    def __init__(
        self,
        task: CheckpointTask,
        comm: Communicator,
        embeddings: ShardedEmbeddings,
        context: WorkerContext,
    ) -> None:
        import torch.distributed.checkpoint as dcp

        warnings.simplefilter("ignore")  # It warns of a single process, and of what it deprecates.
        self._dcp, self._path, self._comm = dcp, task.folder / "dcp", comm
        # Of names that no other rank has: it would take equal ones for copies.
        self._state = {
            f"rank{comm.rank}.{number}": tensor
            for number, tensor in enumerate(own_tensors(embeddings))
        }

    def save(self) -> None:
        self._dcp.save(self._state, storage_writer=self._dcp.FileSystemWriter(self._path))

    def load(self) -> None:
        self._dcp.load(self._state, storage_reader=self._dcp.FileSystemReader(self._path))


class _DcpSafetensorsSide(_DcpSide):
    """The same with its safetensors storage."""

    note = (
        "the same with HuggingFaceStorageWriter(save_distributed=True), whose files are fsynced "
        "after it, and HuggingFaceStorageReader; no digests"
    )

    def save(self) -> None:
        writer = self._dcp.HuggingFaceStorageWriter(str(self._path), save_distributed=True)
        self._dcp.save(self._state, storage_writer=writer)
        if self._comm.rank == 0:
            for path in _files(self._path):
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)

    def load(self) -> None:
        reader = self._dcp.HuggingFaceStorageReader(str(self._path))
        self._dcp.load(self._state, storage_reader=reader)


_SIDES: dict[
    str,
    Callable[[CheckpointTask, Communicator, ShardedEmbeddings, WorkerContext], CheckpointSide],
] = {OWN: _OwnSide, PLAIN: _PlainSide, DCP: _DcpSide, DCP_SAFETENSORS: _DcpSafetensorsSide}
SIDES = tuple(_SIDES)
COPYING_SIDES = (OWN, PLAIN)
"""Those that have an async save; torch.distributed.checkpoint's isn't measured."""
