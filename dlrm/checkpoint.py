"""Models on disk: `checkpoints/step-N/`, with `latest` and `best` naming complete ones.

    checkpoints/latest              text: the folder's name
    checkpoints/best                text: the folder's name (the same or an older one)
    checkpoints/step-000732/
        checkpoint.json             format, step, tables, digests of the files; written last
        dense.npz                   dense weights, by parameter name
        dense_state.npz             dense optimizer state, by parameter and state name
        tables/C1.weight.npy        rows; C1.sum.npy …: their optimizer state

Plain arrays: reading runs no code. A folder is written under another name and renamed when whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from data.errors import UserError
from data.files import file_name, file_sha256, write_whole
from embeddings.communicator import Communicator
from embeddings.sharded import ShardedEmbeddings
from embeddings.store import WEIGHT

FORMAT_VERSION = 1
BLOCK_ROWS = 65_536
_INFO = "checkpoint.json"


@dataclass(frozen=True)
class CheckpointInfo:
    """A complete model on disk.

    Attributes:
        folder: where it lies.
        which: `best` or `latest`; the second also where the first was asked for but there is none.
        step: optimizer steps done.
        values: the content of checkpoint.json.
    """

    folder: Path
    which: str
    step: int
    values: dict[str, Any]


class Checkpoints:
    """The models of one run: `latest` and `best`."""

    def __init__(self, run_path: Path) -> None:
        self._root = run_path / "checkpoints"

    def save(
        self,
        step: int,
        model: nn.Module,
        embeddings: ShardedEmbeddings,
        dense_optimizer: torch.optim.Optimizer,
        *,
        is_best: bool,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """Writes the model as it is now; it becomes `latest` and, where `is_best`, `best`.

        Called by all ranks, which share the folder: the first makes the files, each rank writes the
        rows it holds at their place (of tables with split columns, the first all rows, which travel
        to it), each takes the digests of its share of the files, and the first names the model.
        Extra memory: one block of 65,536 rows. Models that neither name points to are removed.

        Args:
            step: optimizer steps done.
            model: the dense network, equal on all ranks.
            embeddings: the tables.
            dense_optimizer: its state is kept too.
            is_best: whether it is the best so far.
            beat: called for every block.
        """
        comm = embeddings.comm
        is_first = comm.rank == 0
        folder = self._root / f"step-{step:06d}"
        partial = self._root / f".partial-step-{step:06d}"
        # The first rank looks: the others might see the folder that it is about to make.
        if comm.all_gather_object(not folder.exists())[0]:
            if is_first:
                shutil.rmtree(partial, ignore_errors=True)
                (partial / "tables").mkdir(parents=True)
                _save_npz(partial / "dense.npz", _named_arrays(model.state_dict()))
                _save_npz(partial / "dense_state.npz", _optimizer_arrays(model, dense_optimizer))
                _make_table_files(partial / "tables", embeddings)
            comm.barrier()
            for table in embeddings.tables:
                _write_rows(partial / "tables", embeddings, table.name, table.rows, beat)
            comm.barrier()
            digests = _digests(partial, comm, beat)
            if is_first:
                self._complete(partial, folder, step, embeddings, digests)
        if is_first:
            self._name(folder, is_best=is_best)
        comm.barrier()

    def _complete(
        self,
        partial: Path,
        folder: Path,
        step: int,
        embeddings: ShardedEmbeddings,
        digests: dict[str, str],
    ) -> None:
        info = {
            "format_version": FORMAT_VERSION,
            "step": step,
            "tables": {t.name: {"rows": t.rows, "dim": t.dim} for t in embeddings.tables},
            "files": digests,
        }
        write_whole(partial / _INFO, json.dumps(info, indent=1).encode())
        os.replace(partial, folder)

    def _name(self, folder: Path, *, is_best: bool) -> None:
        write_whole(self._root / "latest", folder.name.encode())
        if is_best:
            write_whole(self._root / "best", folder.name.encode())
        self._remove_others()

    def find(self, which: str) -> CheckpointInfo:
        """`best` or `latest`; `best` falls back to `latest` where no evaluation had an AUC.

        Raises:
            UserError: where the run kept no model, or its description is damaged or missing.
        """
        for name in dict.fromkeys((which, "latest")):
            pointer = self._root / name
            if pointer.is_file():
                folder = self._root / pointer.read_text()
                values = _read_info(folder / _INFO)
                if values["format_version"] != FORMAT_VERSION:
                    raise UserError(f"{folder} is of format {values['format_version']}, not 1")
                return CheckpointInfo(folder, name, values["step"], values)
        raise UserError(f"{self._root} holds no model: the run ended before it kept one")

    def _remove_others(self) -> None:
        kept = {
            (self._root / n).read_text() for n in ("latest", "best") if (self._root / n).exists()
        }
        # `.partial-…`: what a killed run was writing.
        for folder in [*self._root.glob("step-*"), *self._root.glob(".partial-*")]:
            if folder.name not in kept:
                shutil.rmtree(folder)


def load_model(
    info: CheckpointInfo,
    model: nn.Module,
    embeddings: ShardedEmbeddings,
    beat: Callable[[], None] = lambda: None,
) -> None:
    """Loads dense weights, and those rows that this rank holds; optimizer state is not read.

    Called by all ranks; each takes the digests of its share of the files, before any is loaded.

    Raises:
        UserError: on all ranks alike, where tables or shapes differ, or a file is damaged.
    """
    _check_tables(info, embeddings)
    names = ["dense.npz", *(f"tables/{_weight_file(t.name)}" for t in embeddings.tables)]
    _check_digests(info, names, embeddings.comm, beat)
    with np.load(info.folder / "dense.npz", allow_pickle=False) as arrays:
        state = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    model.load_state_dict(state)
    store = embeddings.store
    for table in store.tables:
        path = info.folder / "tables" / _weight_file(table.name)
        weights = np.load(path, mmap_mode="r", allow_pickle=False)
        for start, stop in blocks(table.rows):
            if store.read_parts(table.name, start, stop):
                beat()
                block = torch.from_numpy(np.array(weights[start:stop]))
                store.write(table.name, start, {WEIGHT: block})


def model_digest(
    model: nn.Module, embeddings: ShardedEmbeddings, beat: Callable[[], None] = lambda: None
) -> str:
    """SHA-256 of every row, its state and the dense weights, in canonical order.

    Tables by name; of each, blocks of 65,536 rows; of each block, the weights and then each state
    by name; last, the dense weights by name. So it doesn't depend on where rows live. Called by all
    ranks, returned on all; rows travel to the first rank block by block.
    """
    digest = hashlib.sha256()
    for table in sorted(embeddings.tables, key=lambda t: t.name):
        digest.update(f"{table.name} {table.rows} {table.dim}".encode())
        for start, stop in blocks(table.rows):
            beat()
            values = embeddings.read(table.name, start, stop)
            if values is None:
                continue
            for name in [WEIGHT, *sorted(set(values) - {WEIGHT})]:
                digest.update(values[name].contiguous().numpy().data)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return str(embeddings.comm.all_gather_object(digest.hexdigest())[0])


def blocks(rows: int) -> Iterator[tuple[int, int]]:
    """(first, last + 1) of blocks of `BLOCK_ROWS` rows."""
    for start in range(0, rows, BLOCK_ROWS):
        yield start, min(start + BLOCK_ROWS, rows)


def _make_table_files(folder: Path, embeddings: ShardedEmbeddings) -> None:
    """One npy file of its full size for the weights of each table and one for each state."""
    for table in embeddings.tables:
        widths = {WEIGHT: table.dim, **embeddings.store.state_widths(table.name)}
        for name, width in widths.items():
            path = folder / f"{file_name(table.name)}.{name}.npy"
            array = np.empty((0, width), dtype=_numpy_dtype(embeddings.dtype))
            header = np.lib.format.header_data_from_array_1_0(array)
            header["shape"] = (table.rows, width)
            with open(path, "wb") as opened:
                np.lib.format.write_array_header_1_0(opened, header)
                opened.flush()
                # Allocated, not only sparse: a full disk is told here, by the file's name.
                num_bytes = table.rows * width * array.itemsize
                try:
                    os.posix_fallocate(opened.fileno(), opened.tell(), num_bytes)
                except OSError as error:
                    raise OSError(error.errno, error.strerror, str(path)) from error


def _write_rows(
    folder: Path, embeddings: ShardedEmbeddings, table: str, rows: int, beat: Callable[[], None]
) -> None:
    """Writes this rank's part of a table, block by block; of a replica, the first rank does."""
    files = _RowFiles(folder, table)
    try:
        for start, stop in blocks(rows):
            beat()
            if embeddings.is_column_split(table):
                # Ranks on several hosts mustn't write parts of the same pages.
                whole = embeddings.read(table, start, stop)
                if whole is not None:
                    files.write(start, whole)
                continue
            for part in embeddings.own_parts(table, start, stop):
                files.write(part.row_start, part.values)
    finally:
        files.close()


class _RowFiles:
    """The npy files of a table, opened as they are needed, and written at any row."""

    def __init__(self, folder: Path, table: str) -> None:
        self._folder, self._table = folder, table
        self._opened: dict[str, tuple[Any, int]] = {}

    def write(self, row_start: int, values: Mapping[str, torch.Tensor]) -> None:
        """Writes whole rows, by name, from `row_start` on."""
        for name, tensor in values.items():
            if name not in self._opened:
                path = self._folder / f"{file_name(self._table)}.{name}.npy"
                file = open(path, "r+b")  # noqa: SIM115
                np.lib.format.read_magic(file)
                np.lib.format.read_array_header_1_0(file)
                self._opened[name] = file, file.tell()
            file, begin = self._opened[name]
            array = np.ascontiguousarray(tensor.numpy())
            file.seek(begin + row_start * array.shape[1] * array.itemsize)
            array.tofile(file)

    def close(self) -> None:
        """Closes what was opened."""
        for file, _ in self._opened.values():
            file.close()


def _digests(folder: Path, comm: Communicator, beat: Callable[[], None]) -> dict[str, str]:
    """SHA-256 of every file, each taken by one rank."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    own: dict[str, str] = {}
    for path in paths[comm.rank :: comm.world_size]:
        beat()
        own[str(path.relative_to(folder))] = file_sha256(path)
    of_ranks = comm.all_gather_object(own)
    return dict(sorted((name, value) for part in of_ranks for name, value in part.items()))


def _numpy_dtype(dtype: torch.dtype) -> Any:
    return torch.empty(0, dtype=dtype).numpy().dtype


def _weight_file(table: str) -> str:
    return f"{file_name(table)}.{WEIGHT}.npy"


def _save_npz(path: Path, arrays: dict[str, np.ndarray]) -> None:
    with open(path, "wb") as opened:
        # No `allow_pickle=False`: numpy 2.0 would store it as one more array.
        assert not any(array.dtype.hasobject for array in arrays.values())
        np.savez(opened, **arrays)  # type: ignore[arg-type]


def _named_arrays(state: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.detach().cpu().numpy() for name, tensor in state.items()}


def _optimizer_arrays(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, np.ndarray]:
    arrays = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            arrays[f"{name}/{key}"] = torch.as_tensor(value).detach().cpu().numpy()
    return arrays


def _read_info(path: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is damaged or missing ({error})") from error
    return values


def _check_tables(info: CheckpointInfo, embeddings: ShardedEmbeddings) -> None:
    stored = info.values["tables"]
    wanted = {t.name: {"rows": t.rows, "dim": t.dim} for t in embeddings.tables}
    differing = [
        f"{name}: stored {stored.get(name)}, wanted {wanted.get(name)}"
        for name in sorted(stored.keys() | wanted.keys())
        if stored.get(name) != wanted.get(name)
    ]
    if differing:
        raise UserError(f"the tables of {info.folder} differ:\n  " + "\n  ".join(differing))


def _check_digests(
    info: CheckpointInfo, names: Sequence[str], comm: Communicator, beat: Callable[[], None]
) -> None:
    damaged = None
    for name in names[comm.rank :: comm.world_size]:
        beat()
        path = info.folder / name
        if not path.is_file() or file_sha256(path) != info.values["files"][name]:
            damaged = damaged or path
    for path in comm.all_gather_object(damaged):
        if path is not None:
            raise UserError(f"{path} is damaged or missing (its digest isn't the recorded one)")
