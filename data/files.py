"""Files that are whole or absent, and their digests; errors that name the file."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Of an OSError that names no file, makes one that names `path`."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


class WholeFile(io.RawIOBase):
    """A file to write to that appears under its name only when it is closed without an error.

    Attributes:
        num_bytes: written so far.
        sha256: hex digest of what was written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(path.name + ".partial")
        self._file = open_new(self._temporary)
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
        with naming(self._path):
            count = self._file.write(data)
        self.num_bytes += count
        return count

    def __exit__(self, error: Any, *_: Any) -> None:
        try:
            with naming(self._path):
                try:
                    self._file.flush()
                    if error is None:
                        os.fsync(self._file.fileno())
                finally:
                    self._file.close()
            if error is None:
                os.replace(self._temporary, self._path)
        except OSError:
            if error is None:  # Else the one under way tells more.
                raise
        super().close()


def write_whole(path: Path, payload: Any) -> None:
    """Writes a file so that it is whole or absent: temporary name, flush to disk, rename.

    Raises:
        OSError: naming the file; nothing is left of it.
    """
    temporary = path.with_name(path.name + ".partial")
    try:
        with naming(path), open_new(temporary) as opened:
            opened.write(payload)
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def flush_folder(folder: Path) -> None:
    """Flushes a folder's entries to disk, so that what comes after can't reach it before them."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with naming(folder):
            os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # A file system that can't, and so promises nothing.
            raise
    finally:
        os.close(descriptor)


def open_new(path: Path) -> BinaryIO:
    """A new file to write to, in place of what a killed process has left there. A link isn't
    followed: it may lead to somebody's file."""
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
