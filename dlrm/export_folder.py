"""The folder of an export: files that are whole or absent, and none of them if one fails."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from data.errors import UserError
from data.files import WholeFile, file_sha256, naming


class ExportFolder:
    """Collects the files of an export; a context around it that removes them where it fails.

    Args:
        path: the folder, new or empty; made where it is missing.

    Attributes:
        files: `file` (its name), `bytes` and `sha256` of each file, in the order of writing.

    Raises:
        UserError: for a folder that holds files.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: list[dict[str, Any]] = []
        self._is_new = not path.exists()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise UserError(f"export.out={path} is a file; name a folder") from None
        used = sorted(entry.name for entry in path.iterdir())
        if used:
            raise UserError(
                f"export.out={path} is used (it holds {', '.join(used[:4])}); name a new folder"
            )

    @contextmanager
    def open(self, name: str) -> Iterator[WholeFile]:
        """A new file to write to, which has its name only when all went well."""
        path = self.path / name
        try:
            with naming(path), WholeFile(path) as sink:
                yield sink
        except BaseException:
            with suppress(OSError):
                path.with_name(name + ".partial").unlink(missing_ok=True)
            raise
        self.files.append({"file": name, "bytes": sink.num_bytes, "sha256": sink.sha256})

    def take(self, written: Path, name: str) -> None:
        """Makes a file that a library has written one of the export's, flushed to disk."""
        with open(written, "rb") as opened, naming(written):
            os.fsync(opened.fileno())
        digest = file_sha256(written)
        os.replace(written, self.path / name)
        size = (self.path / name).stat().st_size
        self.files.append({"file": name, "bytes": size, "sha256": digest})

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(entry["bytes"] for entry in self.files)

    def __enter__(self) -> ExportFolder:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        for entry in self.files:
            with suppress(OSError):  # What failed is told; the others are to go all the same.
                (self.path / entry["file"]).unlink(missing_ok=True)
        # Temporary folders whose removal is what failed: once more.
        for left in (*self.path.glob(".tokens-*"), *self.path.glob(".model-*")):
            shutil.rmtree(left, ignore_errors=True)
        if self._is_new:
            with suppress(OSError):
                self.path.rmdir()
