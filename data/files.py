"""Files that are whole or absent, and their digests."""

from __future__ import annotations

import hashlib
import io
import os
import urllib.parse
from pathlib import Path
from typing import Any, BinaryIO


class WholeFile(io.RawIOBase):
    """A file to write to that appears under its name only when it is closed without an error.

    Attributes:
        num_bytes: written so far.
        sha256: hex digest of what was written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(path.name + ".partial")
        self._file = _open_new(self._temporary)
        self._digest = hashlib.sha256()
        self.num_bytes = 0

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Appends `data`."""
        self._digest.update(data)
        count = self._file.write(data)
        self.num_bytes += count
        return count

    def __exit__(self, error: Any, *_: Any) -> None:
        self._file.flush()
        if error is None:
            os.fsync(self._file.fileno())
        self._file.close()
        if error is None:
            os.replace(self._temporary, self._path)
        super().close()


def write_whole(path: Path, payload: Any) -> None:
    """Writes a file so that it is whole or absent: temporary name, flush to disk, rename."""
    temporary = path.with_name(path.name + ".partial")
    with _open_new(temporary) as opened:
        opened.write(payload)
        opened.flush()
        os.fsync(opened.fileno())
    os.replace(temporary, path)


def _open_new(path: Path) -> BinaryIO:
    """A new file in place of what a killed process has left there. A link isn't followed: it may
    lead to somebody's file."""
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    return open(path, "wb", opener=lambda name, _: os.open(name, flags, 0o666))


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file's bytes (`sha256sum` prints the same)."""
    with open(path, "rb") as opened:
        return (
            hashlib.file_digest(opened, "sha256").hexdigest()
            if hasattr(hashlib, "file_digest")
            else _sha256_by_pieces(opened)
        )


def _sha256_by_pieces(opened: Any) -> str:
    digest = hashlib.sha256()
    while piece := opened.read(1 << 20):
        digest.update(piece)
    return digest.hexdigest()


def file_name(name: str) -> str:
    """A column's or table's name as a file name: characters with a meaning in paths as %XX."""
    quoted = urllib.parse.quote(name, safe=" ()+,=@")
    return quoted if quoted.strip(".") else quoted.replace(".", "%2E")
