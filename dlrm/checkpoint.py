"""Checkpoints: everything that a run needs to go on, under any other plan, and its models.

    checkpoints/latest              text: the folder's name
    checkpoints/best                text: the folder's name (the same or an older one)
    checkpoints/step-000732/
        checkpoint.json             what it is, where the run was, all files' digests; written last
        config.yaml, plan.json      of the run
        dense.safetensors           dense weights, by parameter name
        dense_state.safetensors     dense optimizer state, as PARAMETER/STATE
        rows-00000.safetensors …    the rows that each rank held, with their state, and where they
        rows-00000.json …           belong (`checkpoint_rows`)

Reading runs no code: JSON and safetensors only. A folder has another name until every rank's part
is flushed to disk; the names `latest` and `best` come after it.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import xxhash
from torch import Tensor, nn

from data.errors import UserError
from data.files import flush_folder, naming, write_whole
from dlrm.checkpoint_rows import (
    RowsReader,
    StoredTable,
    read_described,
    write_described,
    write_rows,
)
from dlrm.own_files import EARLIER_RUN, remove_checkpoint
from dlrm.run_folder import forget_earlier_run, read_run_id
from dlrm.tensor_file import (
    MALFORMED,
    DamagedError,
    FileDigest,
    TensorFile,
    check_size,
    dtype_name,
    names_of,
    write_tensors,
)
from dlrm.versions import versions
from embeddings.communicator import Communicator
from embeddings.sharded import ShardedEmbeddings
from embeddings.store import RowsPart

T = TypeVar("T")
FORMAT_VERSION = 2
_LAST_VERSION_WITH = {1: "Commits up to a5227af (2026-11-30) read format 1"}
INFO_FILE = "checkpoint.json"
_NAMES = ("latest", "best")
_STEP = re.compile(r"step-[0-9]+")


@dataclass(frozen=True)
class Progress:
    """Where a run was.

    Attributes:
        step: optimizer steps done.
        epoch: the epoch of the next batch.
        batch: the next batch of that epoch: the position of every lane follows from it.
        samples: samples seen.
        loss_last: loss of the last step.
        best_value: the best AUC on the valid part so far.
        history: the evaluations so far.
    """

    step: int
    epoch: int = 0
    batch: int = 0
    samples: int = 0
    loss_last: float | None = None
    best_value: float | None = None
    history: tuple[dict[str, Any], ...] = ()

    @property
    def best_step(self) -> int | None:
        """The step of the best evaluation; of equal ones the first."""
        best = [entry["step"] for entry in self.history if entry["auc"] == self.best_value]
        return best[0] if best and self.best_value is not None else None


@dataclass(frozen=True)
class Contents:
    """What a rank gives to be kept; the ranks' parts make up the model.

    Attributes:
        progress: where the run is; the same on all ranks, as are `dense`, `dense_state`, `tables`
            and `about`.
        dense: dense weights.
        dense_state: dense optimizer state, as PARAMETER/STATE.
        tables: every table.
        num_row_steps: steps that the row optimizer has counted.
        parts: the rows to write here (`ShardedEmbeddings.own_parts`).
        about: what else is to be known of the run: JSON.
        files: further text files, by name.
    """

    progress: Progress
    dense: dict[str, Tensor]
    dense_state: dict[str, Tensor]
    tables: dict[str, StoredTable]
    num_row_steps: int
    parts: list[RowsPart]
    about: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        progress: Progress,
        model: nn.Module,
        embeddings: ShardedEmbeddings,
        dense_optimizer: torch.optim.Optimizer,
        about: Mapping[str, Any] | None = None,
        files: Mapping[str, str] | None = None,
    ) -> Contents:
        """What this rank holds, as views: nothing is copied."""
        store = embeddings.store
        tables = {
            t.name: StoredTable(t.rows, t.dim, embeddings.dtype, store.state_widths(t.name))
            for t in embeddings.tables
        }
        parts = [p for t in embeddings.tables for p in embeddings.own_parts(t.name, 0, t.rows)]
        return cls(
            progress,
            {name: tensor.detach() for name, tensor in model.state_dict().items()},
            _optimizer_tensors(model, dense_optimizer),
            tables,
            store.num_steps,
            parts,
            about or {},
            files or {},
        )


@dataclass(frozen=True)
class CheckpointInfo:
    """A complete checkpoint on disk.

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

    @property
    def run_id(self) -> str | None:
        """The run that has written it; None of a version that didn't record it."""
        found: str | None = self.values.get("run_id")
        return found

    @property
    def progress(self) -> Progress:
        """Where the run was."""
        values = self.values["progress"]
        return Progress(**{**values, "history": tuple(values["history"])})

    @cached_property
    def tables(self) -> dict[str, StoredTable]:
        """The tables that it holds."""
        return {
            name: StoredTable(
                table["rows"], table["dim"], getattr(torch, table["dtype"]), table["state"]
            )
            for name, table in self.values["tables"].items()
        }

    def rows(self) -> RowsReader:
        """Reads rows of the tables."""
        return RowsReader(self.folder, self.values["files"], self.tables)

    def dense(self) -> dict[str, Tensor]:
        """The dense weights."""
        return self._tensors("dense.safetensors")

    def dense_state(self) -> dict[str, Tensor]:
        """The dense optimizer's state, as PARAMETER/STATE."""
        return self._tensors("dense_state.safetensors")

    def text(self, name: str) -> str:
        """One of the further files."""
        return read_described(self.folder / name, self.values["files"][name]).decode()

    def _tensors(self, name: str) -> dict[str, Tensor]:
        entry = self.values["files"][name]
        digest = FileDigest(entry["bytes"], tuple(entry["blocks"]))
        file = TensorFile(self.folder / name, digest)
        return {tensor: file.read(tensor) for tensor in file.tensors}


class Checkpoints:
    """The checkpoints of one run.

    Args:
        run_path: the run's folder, shared by all ranks.
        keep: how many of the newest are kept, besides the best.
    """

    def __init__(self, run_path: Path, keep: int = 2) -> None:
        assert keep >= 1
        self.root = run_path / "checkpoints"
        self._keep = keep

    def save(
        self,
        contents: Contents,
        comm: Communicator,
        *,
        is_best: bool,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """Writes a checkpoint; it becomes `latest` and, where `is_best`, `best`.

        Called by all ranks, which share the folder. Each writes its rows and flushes them; when all
        have said so, the first names the whole. Collectives: four small ones. Nothing is copied.

        Raises:
            OSError: on all ranks alike, naming the first file that couldn't be written; earlier
                checkpoints stay.
        """
        folder = self.root / _name_of(contents.progress.step)
        partial = self.root / f".partial-{folder.name}"
        # The first rank looks: the others might see the folder that it is about to make.
        if on_first_rank(comm, lambda: self._prepare(folder, partial)):
            files: dict[str, Any] = {}
            failure: OSError | None = None
            try:
                files |= write_rows(partial, comm.rank, contents.parts, beat)
                if comm.rank == 0:
                    files |= _write_common(partial, contents)
            except OSError as error:
                failure = error
            of_ranks = comm.all_gather_object((files, failure))
            failed = [error for _, error in of_ranks if error is not None]
            if failed:
                if comm.rank == 0:
                    _clear(partial)
                raise failed[0]
            files = {name: entry for part, _ in of_ranks for name, entry in part.items()}
            on_first_rank(comm, lambda: _complete(partial, folder, contents, files))
        on_first_rank(comm, lambda: self._name(folder, contents.progress, is_best=is_best))

    def find(self, which: str) -> CheckpointInfo:
        """`best` or `latest`; `best` falls back to `latest` where no evaluation had an AUC.

        A checkpoint of which files are missing or cut, or that another run has written, is named in
        a warning, and the newest one before it is taken.

        Raises:
            UserError: where there is no whole one.
        """
        for info in self._candidates(which):
            return info
        waiting = self.root.parent / EARLIER_RUN
        more = f"; the run that it was to replace is in {waiting}" if waiting.is_dir() else ""
        if damaged := self._folders():
            raise UserError(
                f"{self.root} holds no whole checkpoint: {names_of([f.name for f in damaged])} "
                f"can't be used{more}"
            )
        raise UserError(f"{self.root} holds no model: the run ended before it kept one{more}")

    def candidates(self, which: str) -> list[CheckpointInfo]:
        """What `find` can choose from, the first choice first; digests aren't compared here."""
        return list(self._candidates(which))

    def _candidates(self, which: str) -> Iterator[CheckpointInfo]:
        """Opens none that isn't asked for: a damaged one is no news where a better one is whole."""
        tried: set[Path] = set()
        for name in dict.fromkeys((which, "latest")):
            info = self._open_named(name, tried)
            if info is not None:
                yield info
        for folder in reversed(self._folders()):
            if folder not in tried:
                tried.add(folder)
                info = self._try_open(folder, "latest")
                if info is not None:
                    yield info

    def _open_named(self, name: str, tried: set[Path]) -> CheckpointInfo | None:
        """What a pointer names, unless it was tried. A run that goes on may remove it and name a
        newer one meanwhile: then that."""
        folder = self._named(name)
        while folder is not None and folder not in tried:
            tried.add(folder)
            if not (folder / INFO_FILE).is_file() and (newer := self._named(name)) != folder:
                folder = newer
                continue
            return self._try_open(folder, name)
        return None

    def _folders(self) -> list[Path]:
        """The checkpoints' folders, whole or not, by step; not what else somebody put there."""
        return sorted((f for f in self.root.glob("step-*") if _step_of(f) >= 0), key=_step_of)

    @cached_property
    def _run_id(self) -> str | None:
        return read_run_id(self.root.parent)

    def _is_foreign(self, info: CheckpointInfo) -> bool:
        """Whether another run has written it. What carries no id is of an older version: taken."""
        return None not in (self._run_id, info.run_id) and self._run_id != info.run_id

    def _named(self, name: str) -> Path | None:
        """The folder that a pointer names; None where there is none, or it names nothing."""
        try:
            text = (self.root / name).read_text(encoding="utf-8", errors="replace").strip()
        except FileNotFoundError:
            return None
        if _STEP.fullmatch(text):
            return self.root / text
        warnings.warn(f"{self.root / name} is damaged: it names no checkpoint", stacklevel=4)
        return None

    def _try_open(self, folder: Path, which: str) -> CheckpointInfo | None:
        try:
            info = open_checkpoint(folder, which)
        except DamagedError as error:
            warnings.warn(f"{error}; another checkpoint is looked for", stacklevel=4)
            return None
        if not self._is_foreign(info):
            return info
        warnings.warn(
            f"{folder} was written by another run than the one in {self.root.parent}; another "
            "checkpoint is looked for",
            stacklevel=4,
        )
        return None

    def _prepare(self, folder: Path, partial: Path) -> bool:
        """Makes room; False where the step is there already, and whole."""
        if os.path.lexists(folder):
            try:
                info = open_checkpoint(folder)
                if not self._is_foreign(info):
                    return False
                os.rename(folder, folder.with_name(f"{folder.name}-of-run-{info.run_id}"))
            except DamagedError:
                remove_checkpoint(folder)
        self.root.mkdir(parents=True, exist_ok=True)
        # `.partial-…`: what a killed run was writing.
        for left in self.root.glob(".partial-*"):
            remove_checkpoint(left)
        for name in _NAMES:
            (self.root / f"{name}.partial").unlink(missing_ok=True)
        partial.mkdir()
        return True

    def _name(self, folder: Path, progress: Progress, *, is_best: bool) -> None:
        # In this order: killed in between, the run goes on from an older one, and comes to this
        # best again. The other way round it would go on with its value and without its model.
        for name in reversed(_NAMES) if is_best else _NAMES[:1]:
            self._point(name, folder)
        forget_earlier_run(self.root.parent)
        self._rotate(self._best_of(progress))

    def _point(self, name: str, folder: Path) -> None:
        with naming(self.root / name):
            write_whole(self.root / name, folder.name.encode())
        flush_folder(self.root)

    def _rotate(self, best: Path | None) -> None:
        """Removes this run's older ones; one that can't be removed is named, and stays."""
        kept = {best, *(self._named(name) for name in _NAMES)}
        for old in self._folders()[: -self._keep]:
            if old not in kept and not self._is_of_another_run(old):
                try:
                    remove_checkpoint(old)
                except OSError as error:
                    warnings.warn(
                        f"{old} can't be removed ({error.filename}: {error.strerror}) and takes "
                        "up space",
                        stacklevel=4,
                    )

    def _is_of_another_run(self, folder: Path) -> bool:
        try:
            return self._is_foreign(open_checkpoint(folder))
        except UserError:
            return False  # What a removal that was cut short has left.

    def drop_after(self, info: CheckpointInfo) -> None:
        """Makes one the latest, since the run goes on from it: those of later steps are removed,
        and the best one up to it is `best`, whatever a kill had left undone."""
        best, of_history = self._named("best"), self._best_of(info.progress)
        is_later = best is not None and _step_of(best) > info.step
        known = {entry["step"] for entry in info.progress.history}
        if of_history is not None and (best is None or is_later or _step_of(best) in known):
            if best != of_history:
                self._point("best", of_history)
        elif is_later:
            (self.root / "best").unlink()
        self._point("latest", info.folder)
        for folder in self._folders():
            if _step_of(folder) > info.step and not self._is_of_another_run(folder):
                remove_checkpoint(folder)

    def best_value(self, progress: Progress) -> float | None:
        """What an evaluation must beat to be the best: the AUC of the model that `best` names; None
        where there is none that could be tested."""
        best = self._named("best")
        if best is None or not best.exists():
            return None
        of_step = {entry["step"]: entry["auc"] for entry in progress.history}
        # One that is missing there was found to be the best after its checkpoint was written: it
        # is evaluated again.
        found: float | None = of_step.get(_step_of(best), progress.best_value)
        return found

    def _best_of(self, progress: Progress) -> Path | None:
        """The best one so far by its evaluations, where it is still there."""
        if progress.best_step is None:
            return None
        folder = self.root / _name_of(progress.best_step)
        return folder if (folder / INFO_FILE).is_file() else None


def open_checkpoint(folder: Path, which: str = "latest") -> CheckpointInfo:
    """Opens a checkpoint's folder; sizes of its files are compared, digests when they are read.

    Raises:
        DamagedError: where it isn't whole.
        UserError: for a format of another version.
    """
    path = folder / INFO_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        # Format 1 had neither this nesting nor a digest.
        values: dict[str, Any] = content.get("checkpoint", content)
        version = values["format_version"]
    except (OSError, *MALFORMED) as error:
        raise DamagedError(f"{path} is damaged or missing ({error})") from error
    if values is not content and content.get("xxh3") != _digest(values):
        raise DamagedError(f"{path} is damaged: its digest isn't the recorded one")
    if version != FORMAT_VERSION:
        raise UserError(_other_format(folder, version, values))
    for name, entry in values["files"].items():
        check_size(folder / name, entry["bytes"])
    return CheckpointInfo(folder, which, values["progress"]["step"], values)


def find_checkpoint(given: str, run_path: Path, key: str) -> CheckpointInfo:
    """The checkpoint that a key of the configuration names.

    Args:
        given: `latest` or `best` of the run, or a path: a checkpoint's folder, or another run's,
            whose latest is taken.
        run_path: the run's folder.
        key: for the message.

    Raises:
        UserError: where there is none.
    """
    if given in _NAMES:
        return Checkpoints(run_path).find(given)
    folder = Path.cwd() / Path(given).expanduser()
    if (folder / INFO_FILE).is_file():
        return open_checkpoint(folder)
    if (folder / "checkpoints").is_dir():
        return Checkpoints(folder).find("latest")
    raise UserError(
        f"{key}={given}: {folder} is neither a checkpoint (no {INFO_FILE}) nor a run folder (no "
        "checkpoints/)"
    )


def _write_common(folder: Path, contents: Contents) -> dict[str, Any]:
    """What one rank writes for all."""
    files: dict[str, Any] = {}
    for name, tensors in (("dense", contents.dense), ("dense_state", contents.dense_state)):
        path = folder / f"{name}.safetensors"
        digest = write_tensors(path, tensors)
        files[path.name] = {"bytes": digest.num_bytes, "blocks": list(digest.blocks)}
    for name, text in contents.files.items():
        files |= write_described(folder / name, text.encode())
    return files


def on_first_rank(comm: Communicator, action: Callable[[], T]) -> T:
    """Called by all ranks: what `action` returned, or raised of the user's, on the first one."""
    outcome: T | OSError | UserError | None = None
    if comm.rank == 0:
        try:
            outcome = action()
        except (OSError, UserError) as error:
            outcome = error
    outcome = comm.all_gather_object(outcome)[0]
    if isinstance(outcome, (OSError, UserError)):
        raise outcome
    return cast(T, outcome)


def _complete(partial: Path, folder: Path, contents: Contents, files: dict[str, Any]) -> None:
    values = {
        "format_version": FORMAT_VERSION,
        "program": f"dlrm-system {versions().get('dlrm-system', '(not installed)')}",
        "progress": asdict(contents.progress),
        "tables": {
            name: {
                "rows": table.rows,
                "dim": table.dim,
                "dtype": dtype_name(table.dtype),
                "state": table.state_widths,
            }
            for name, table in contents.tables.items()
        },
        "num_row_steps": contents.num_row_steps,
        **contents.about,
        "files": dict(sorted(files.items())),
    }
    values = json.loads(json.dumps(values))  # As it is read: tuples are lists.
    text = json.dumps({"xxh3": _digest(values), "checkpoint": values}, indent=1)
    try:
        with naming(partial / INFO_FILE):
            write_whole(partial / INFO_FILE, text.encode())
        flush_folder(partial)
        os.replace(partial, folder)
    except OSError:
        _clear(partial)
        raise
    flush_folder(folder.parent)


def _clear(partial: Path) -> None:
    """After an error, which is what is told: the next save clears away what stays here."""
    with suppress(OSError):
        remove_checkpoint(partial)


def _digest(values: Mapping[str, Any]) -> str:
    return str(xxhash.xxh3_64_hexdigest(json.dumps(values, sort_keys=True).encode()))


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}/{key}": torch.as_tensor(value).detach()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def _other_format(folder: Path, version: Any, values: Mapping[str, Any]) -> str:
    """What to do with a checkpoint of a format that isn't ours."""
    text = f"{folder} is of format {version}, not {FORMAT_VERSION}, which this version reads"
    if version in _LAST_VERSION_WITH:
        return f"{text}. {_LAST_VERSION_WITH[version]}"
    program = values.get("program")
    return f"{text}. Use the version that wrote it{'' if program is None else f': {program}'}"


def _name_of(step: int) -> str:
    return f"step-{step:06d}"


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-")) if _STEP.fullmatch(folder.name) else -1
