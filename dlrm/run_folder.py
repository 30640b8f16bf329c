"""The output folder of one run: refused when used, filled file by file, each whole or absent."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from data.errors import UserError
from data.files import naming, write_whole

NOT_FINISHED = "failed: not finished"
_FILES = (
    "config.yaml",
    "dataset.json",
    "plan.json",
    "metrics.jsonl",
    "evaluation.json",
    "result.json",
    "report.html",
    "failures.txt",
)


class RunFolder:
    """Writes `config.yaml`, `plan.json`, `metrics.jsonl`, `evaluation.json` and `result.json`.

    Args:
        path: the folder; made where it is missing.
        overwrite: use it although it holds files; those of an earlier run are removed. A run that
            failed before it kept a model may always be overwritten.
        resume: the run in it goes on: its checkpoints and metrics stay.

    Raises:
        UserError: for a folder that holds files.
    """

    def __init__(self, path: Path, *, overwrite: bool = False, resume: bool = False) -> None:
        self.path = path
        if resume:
            for name in _FILES:
                if name != "metrics.jsonl":
                    (path / name).unlink(missing_ok=True)
        else:
            self._claim(overwrite=overwrite)

    @classmethod
    def of_this_run(cls, path: Path) -> RunFolder:
        """The folder that another process of this run has claimed; nothing in it is touched."""
        folder = cls.__new__(cls)
        folder.path = path
        return folder

    def _claim(self, *, overwrite: bool) -> None:
        path = self.path
        path.mkdir(parents=True, exist_ok=True)
        used = sorted(entry.name for entry in path.iterdir())
        if used and not overwrite and not _failed_before_a_model(path):
            raise UserError(
                f"hydra.run.dir={path} is used (it holds {', '.join(used[:4])}); choose another "
                "folder (of `dlrm train`: or set train.overwrite=true)"
            )
        for name in _FILES:
            (path / name).unlink(missing_ok=True)
        for event_file in path.glob("tensorboard/events.out.tfevents.*"):
            event_file.unlink()
        # A model of the earlier run would be taken for this run's, above all at the same step.
        shutil.rmtree(path / "checkpoints", ignore_errors=True)

    def write_text(self, name: str, text: str) -> None:
        """Writes a text file."""
        write_whole(self.path / name, text.encode())

    def write_json(self, name: str, values: Any) -> None:
        """Writes a JSON file; NaN and infinity are refused, as JSON has none."""
        self.write_text(name, json.dumps(values, indent=1, allow_nan=False) + "\n")

    def read_json(self, name: str) -> Any:
        """Reads what `write_json` wrote."""
        return json.loads((self.path / name).read_text())

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
        for line in path.read_text().splitlines(keepends=True):
            with contextlib.suppress(ValueError):
                values = json.loads(line)
                evaluation = values.get("eval")
                if values["step"] <= step and (
                    evaluation is None
                    or ("model" not in evaluation and values["step"] in evaluated)
                ):
                    kept.append(line)
        write_whole(path, "".join(kept).encode())


def _failed_before_a_model(path: Path) -> bool:
    """Whether the folder holds nothing but a run that failed at its start: nothing to lose."""
    try:
        status = json.loads((path / "result.json").read_text())["status"]
    except (OSError, ValueError, KeyError):
        return False
    # "not finished" is what a run says while it goes.
    has_failed = str(status).startswith("failed") and status != NOT_FINISHED
    return has_failed and not (path / "checkpoints").exists()


def remove_if_empty(folder: Path) -> None:
    """Removes the output folder that Hydra made for a run that wrote nothing, and empty parents."""
    # Hydra's own layout is outputs/VERB/TIME; of a folder that the user named, only itself goes.
    is_default = folder.parent.parent.name == "outputs"
    with contextlib.suppress(OSError):  # Not empty, not ours to remove: then it stays.
        for empty in (folder, folder.parent, folder.parent.parent) if is_default else (folder,):
            empty.rmdir()
