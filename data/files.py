"""Files that are whole or absent, and their digests."""

from __future__ import annotations

import hashlib
import os
import urllib.parse
from pathlib import Path
from typing import Any


def write_whole(path: Path, payload: Any) -> None:
    """Writes a file so that it is whole or absent: temporary name, flush to disk, rename."""
    temporary = path.with_name(path.name + ".partial")
    with open(temporary, "wb") as opened:
        opened.write(payload)
        opened.flush()
        os.fsync(opened.fileno())
    os.replace(temporary, path)


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
