"""The output folder of one run: refused when used, filled file by file, each whole or absent."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import warnings
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any

from data.errors import UserError
from data.files import naming, write_whole
from dlrm.own_files import (
    CHECKPOINTS,
    EARLIER_RUN,
    check_own,
    finish_moving,
    has_model,
    own_entries,
    remove_profile,
    remove_run,
    remove_run_files,
    restore,
    set_aside,
)
from dlrm.run_lock import LOCK

NOT_FINISHED = "failed: not finished"
_STALE_WHEN_RESUMED = ("evaluation.json", "report.html", "failures.txt")


class RunFolder:
    """Writes `config.yaml`, `plan.json`, `metrics.jsonl`, `evaluation.json` and `result.json`.

    Args:
        path: the folder; made where it is missing.
        overwrite: use it although it holds files. An earlier run waits in `earlier-run/` until
            `settle`; a run that failed before it kept a model is removed, and may always be.
        resume: the run in it goes on: its checkpoints and metrics stay, and each other file until
            it is replaced.

    Raises:
        UserError: for a folder that holds files, or files of others among those of a run.
    """

    def __init__(self, path: Path, *, overwrite: bool = False, resume: bool = False) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        finish_moving(path)
        if resume:
            for name in _STALE_WHEN_RESUMED:
                (path / name).unlink(missing_ok=True)
            remove_profile(path)
            if has_model(path):
                forget_earlier_run(path)
        else:
            self.check_free(path, overwrite=overwrite)
            _make_room(path)

    @staticmethod
    def check_free(path: Path, *, overwrite: bool = False) -> None:
        """What a new run refuses, before anything is touched.

        Raises:
            UserError: see the class.
        """
        used = sorted(e.name for e in path.iterdir() if e.name != LOCK) if path.is_dir() else []
        if used and not overwrite and not _failed_before_a_model(path):
            raise UserError(
                f"hydra.run.dir={path} is used (it holds {', '.join(used[:4])}); choose another "
                "folder (of `dlrm train`: or set train.overwrite=true)"
            )
        check_own(path)

    def settle(self, *, is_kept: bool) -> bool:
        """Ends the time in which an overwritten run waits: it is removed, or comes back where the
        new one `is_kept` not. Returns whether it came back."""
        if is_kept:
            forget_earlier_run(self.path)
            return False
        return restore(self.path)

    @cached_property
    def run_id(self) -> str | None:
        """Names the run; its checkpoints have the same. None for a folder of before there were."""
        return read_run_id(self.path)

    @classmethod
    def of_this_run(cls, path: Path) -> RunFolder:
        """The folder that another process of this run has claimed; nothing in it is touched."""
        folder = cls.__new__(cls)
        folder.path = path
        return folder

    def write_text(self, name: str, text: str) -> None:
        """Writes a text file."""
        write_whole(self.path / name, text.encode())

    def write_json(self, name: str, values: Any) -> None:
        """Writes a JSON file; NaN and infinity are refused, as JSON has none."""
        self.write_text(name, json.dumps(values, indent=1, allow_nan=False) + "\n")

    def read_json(self, name: str) -> Any:
        """Reads what `write_json` wrote."""
        return read_json(self.path / name)

    def append_metrics(self, line: dict[str, Any]) -> None:
        """Adds a line to metrics.jsonl, whole or not at all.

        Raises:
            OSError: naming the file.
        """
        path = self.path / "metrics.jsonl"
        with naming(path), open(path, "ab", buffering=0) as opened:
            size = opened.tell()
            text = json.dumps(line).encode() + b"\n"
            try:
                if opened.write(text) != len(text):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                opened.truncate(size)
                raise

    def drop_metrics_after(self, step: int, evaluated: Collection[int]) -> None:
        """Removes the lines of metrics.jsonl that a run which goes on after `step` steps writes
        again: those of later steps, of the final test, of evaluations after other steps than
        `evaluated`, and one that was cut short."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return
        kept = []
        for line in path.read_text("utf-8", "replace").splitlines(keepends=True):
            with contextlib.suppress(ValueError):
                values = json.loads(line)
                evaluation = values.get("eval")
                if values["step"] <= step and (
                    evaluation is None
                    or ("model" not in evaluation and values["step"] in evaluated)
                ):
                    kept.append(line)
        write_whole(path, "".join(kept).encode())


def read_json(path: Path) -> Any:
    """Reads a JSON file that a run has written.

    Raises:
        UserError: naming it, where it was cut or changed.
        OSError: where it can't be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path} is damaged: it isn't the JSON that the run wrote ({error})"
        ) from error


def read_run_id(run_path: Path) -> str | None:
    """The id of the run in a folder, of its result.json; None where that has none.

    Raises:
        UserError: where result.json is damaged.
    """
    path = run_path / "result.json"
    if not path.is_file():
        return None
    result = read_json(path)
    if not isinstance(result, dict):
        raise UserError(f"{path} is damaged: it isn't what the run wrote")
    found = result.get("run_id")
    return None if found is None else str(found)


def forget_earlier_run(path: Path) -> None:
    """Removes the run that a new one has replaced; says so where it can't be removed."""
    try:
        remove_run(path / EARLIER_RUN)
    except OSError as error:
        warnings.warn(
            f"the earlier run in {path / EARLIER_RUN} can't be removed "
            f"({error.filename}: {error.strerror}); nothing uses it any more",
            stacklevel=2,
        )


def _make_room(path: Path) -> None:
    """Takes away the files of the run that is to be overwritten, if there is one."""
    has_come_to_nothing = _failed_before_a_model(path) or (
        (path / EARLIER_RUN).is_dir() and not has_model(path)
    )
    if has_come_to_nothing:
        remove_run_files(path)
    elif own_entries(path):
        set_aside(path)


def _failed_before_a_model(path: Path) -> bool:
    """Whether the folder holds nothing but a run that failed at its start: nothing to lose."""
    try:
        status = read_json(path / "result.json")["status"]
    except (OSError, UserError, KeyError, TypeError):
        return False
    # "not finished" is what a run says while it goes.
    has_failed = str(status).startswith("failed") and status != NOT_FINISHED
    return has_failed and not (path / CHECKPOINTS).exists()


def remove_if_empty(folder: Path) -> None:
    """Removes the output folder that Hydra made for a run that wrote nothing, and empty parents."""
    # Hydra's own layout is outputs/VERB/TIME; of a folder that the user named, only itself goes.
    is_default = folder.parent.parent.name == "outputs"
    with contextlib.suppress(OSError):  # Not empty, not ours to remove: then it stays.
        for empty in (folder, folder.parent, folder.parent.parent) if is_default else (folder,):
            empty.rmdir()
