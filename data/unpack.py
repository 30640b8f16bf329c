"""Raw text files of any packing: known by their first bytes, unpacked while they are read."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from data.errors import RawDataError

_SUFFIXES = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstandard"}
_PACKINGS = {
    b"\x1f\x8b": "gzip",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstandard",
}
_BZIP2_BLOCKS = (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90")
_FOREIGN = {
    b"PK\x03\x04": "a zip archive (or a spreadsheet); unpack it, or save it as csv",
    b"PK\x05\x06": "an empty zip archive",
    b"7z\xbc\xaf\x27\x1c": "a 7-Zip archive; unpack it",
    b"\x04\x22\x4d\x18": "an lz4 archive; unpack it, or pack it as gz, bz2, xz or zst",
    b"\xff\xfe": "UTF-16 text; convert it to UTF-8",
    b"\xfe\xff": "UTF-16 text; convert it to UTF-8",
    b"ARROW1\x00\x00": "an Arrow (Feather) file; write it as parquet",
    b"Obj\x01": "an Avro file; write it as parquet",
    b"SQLite format 3\x00": "an SQLite database; write its table as csv or parquet",
    b"\x89HDF\r\n\x1a\n": "an HDF5 file; write it as parquet",
}


def packing_of(path: Path) -> str | None:
    """`gzip`, `bzip2`, `xz`, `zstandard`, or None for plain text; by content, not by name.

    Raises:
        RawDataError: for a file that is no text by its first bytes, or no archive although its
            name says so.
    """
    with open(path, "rb") as opened:
        head = opened.read(16)
        opened.seek(max(path.stat().st_size - 4, 0))
        tail = opened.read(4)
    if head[:4] == tail == b"PAR1":
        raise RawDataError(
            str(path), None, "it is a parquet file; set data.schema.format.kind=parquet"
        )
    for magic, what in _FOREIGN.items():
        if head.startswith(magic):
            raise RawDataError(str(path), None, f"it is {what}")
    for magic, packing in _PACKINGS.items():
        if head.startswith(magic):
            return packing
    if head.startswith(b"BZh") and head[4:10] in _BZIP2_BLOCKS:
        return "bzip2"
    named = _SUFFIXES.get(path.suffix.lower())
    if named:
        raise bad_archive(path, f"no {named} data" if head else "it is empty")
    return None


def unpacked(packing: str | None, source: io.RawIOBase) -> Any:
    """A stream of the text behind `source`; `read` raises what `archive_errors` turns plain."""
    if packing is None:
        return source
    buffered: Any = io.BufferedReader(source, 1 << 20)
    if packing == "gzip":
        return gzip.GzipFile(fileobj=buffered)
    if packing == "bzip2":
        return bz2.BZ2File(buffered)
    if packing == "xz":
        return lzma.LZMAFile(buffered)
    return pa.CompressedInputStream(pa.PythonFile(buffered, "r"), "zstd")


@contextmanager
def archive_errors(path: Path) -> Iterator[None]:
    """Names the file where an archive turns out to be damaged.

    Raises:
        RawDataError: for damage. Errors of the disk go on as they are.
    """
    try:
        yield
    except (EOFError, zlib.error, lzma.LZMAError, pa.ArrowInvalid) as error:
        raise bad_archive(path, error) from None
    except OSError as error:
        if error.errno is not None:
            raise
        raise bad_archive(path, error) from None


def bad_archive(path: Path, error: object) -> RawDataError:
    """Of an archive that can't be unpacked to its end."""
    return RawDataError(
        str(path), None, f"the archive is damaged or cut short ({error}); fetch it again"
    )
