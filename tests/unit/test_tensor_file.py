"""Files of tensors: read by the library of their format, stretch by stretch, and never damaged."""

from __future__ import annotations

import errno
import json
import os
import pickle
import resource
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from data.errors import UserError
from dlrm import early_write, tensor_file
from dlrm.tensor_file import (
    BLOCK_BYTES,
    CheckedFile,
    DamagedError,
    FileDigest,
    TensorFile,
    TensorFileWriter,
    TensorInfo,
    pieces,
    write_tensors,
)

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Any bits, NaN's among them; of bool 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    highest = 2 if dtype == torch.bool else 256
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return (
        torch.randint(highest, (num_bytes,), dtype=torch.uint8, generator=generator)
        .view(dtype)
        .reshape(shape)
    )


def assert_same(found: Tensor, expected: Tensor, name: object = "") -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), name
    assert torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (found, expected))), name


@contextmanager
def small_blocks(num_bytes: int = 64) -> Iterator[None]:
    """Blocks so small that a file of a few hundred bytes has many."""
    with patch.object(tensor_file, "BLOCK_BYTES", num_bytes):
        yield


# ------------------------------------------------------------------------------------- round trip


def test_the_formats_own_library_reads_what_was_written(tmp_path: Path) -> None:
    """All types, of every shape that occurs: none, a number, empty ones, several dimensions."""
    tensors = {
        f"{dtype}{list(shape)}": random_tensor(shape, dtype, seed)
        for dtype in DTYPES
        for seed, shape in enumerate([(), (0,), (3, 0), (1,), (7, 5), (2, 3, 4)])
    }
    tensors['a "name" – ünusual/\\'] = torch.arange(3)
    # Neither is in memory as it is to be in the file.
    tensors["transposed"] = torch.arange(12.0).view(3, 4).T
    tensors["parameter"] = torch.nn.Parameter(torch.ones(2))
    path = tmp_path / "t.safetensors"
    digest = write_tensors(path, tensors)
    assert digest.num_bytes == path.stat().st_size
    theirs, ours = load_file(path), TensorFile(path, digest)
    assert theirs.keys() == ours.tensors.keys() == tensors.keys()
    for name, expected in tensors.items():
        assert_same(theirs[name], expected, name)
        assert_same(ours.read(name), expected, name)


def test_a_file_without_tensors_is_one(tmp_path: Path) -> None:
    digest = write_tensors(tmp_path / "none", {})
    assert load_file(tmp_path / "none") == {}
    assert TensorFile(tmp_path / "none", digest).tensors == {}


@pytest.mark.parametrize("num_blocks", [1, 2])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_sizes_around_a_blocks(num_blocks: int, more: int, tmp_path: Path) -> None:
    path = tmp_path / "t"
    header_bytes = write_tensors(path, {"t": torch.zeros(BLOCK_BYTES, dtype=torch.uint8)}).num_bytes
    header_bytes -= BLOCK_BYTES
    values = random_tensor((num_blocks * BLOCK_BYTES + more - header_bytes,), torch.uint8)
    digest = write_tensors(path, {"t": values})
    content = path.read_bytes()
    assert len(content) == digest.num_bytes == num_blocks * BLOCK_BYTES + more
    assert digest.blocks == tuple(
        xxhash.xxh3_64_hexdigest(content[start : start + BLOCK_BYTES])
        for start in range(0, len(content), BLOCK_BYTES)
    )
    assert_same(load_file(path)["t"], values)
    assert_same(TensorFile(path, digest).read("t"), values)


@settings(deadline=None)
@given(data=st.data())
def test_any_stretches_are_the_rows_whatever_stretches_they_were_written_in(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "stretches"
    dtype = data.draw(st.sampled_from(DTYPES))
    shapes = data.draw(
        st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=3)
    )
    tensors = {f"t{i}": random_tensor(shape, dtype, i) for i, shape in enumerate(shapes)}
    block_bytes = data.draw(st.sampled_from([7, 64, 4096]))
    steps = {name: data.draw(st.integers(1, 41)) for name in tensors}
    name = data.draw(st.sampled_from(sorted(tensors)))
    place = st.integers(0, len(tensors[name]))
    stretches = data.draw(st.lists(st.tuples(place, place).map(sorted), max_size=5))
    with small_blocks(block_bytes):
        infos = {name: TensorInfo(dtype, tuple(t.shape)) for name, t in tensors.items()}
        writer = TensorFileWriter(path, infos)
        for key, values in tensors.items():
            for start in range(0, len(values), steps[key]):
                writer.write(values[start : start + steps[key]])
        file = TensorFile(path, writer.close())
        with closing(file.open_rows(name)) as rows:
            for start, stop in stretches:
                assert_same(rows.read(start, stop), tensors[name][start:stop], (start, stop))
    with safe_open(path, "pt") as opened:
        assert_same(opened.get_tensor(name), tensors[name])


def test_what_is_read_is_the_callers_own(tmp_path: Path) -> None:
    """Of a part of a block that is kept for the next stretch."""
    digest = write_tensors(tmp_path / "t", {"t": torch.zeros(4, 2)})
    with closing(TensorFile(tmp_path / "t", digest).open_rows("t")) as rows:
        rows.read(0, 2).fill_(5)
        assert_same(rows.read(0, 4), torch.zeros(4, 2))


@given(rows=st.integers(0, 50), row_bytes=st.integers(1, 20), most=st.integers(1, 60))
def test_pieces_are_all_rows_in_order(rows: int, row_bytes: int, most: int) -> None:
    found = list(pieces(rows, row_bytes, most))
    assert [row for start, stop in found for row in range(start, stop)] == list(range(rows))
    for start, stop in found:
        assert stop - start == 1 or (stop - start) * row_bytes <= most


@pytest.mark.parametrize("num_rows", [1, 3])
def test_other_than_was_announced_is_a_mistake_of_ours(num_rows: int, tmp_path: Path) -> None:
    writer = TensorFileWriter(tmp_path / "t", {"t": TensorInfo(torch.float32, (2, 4))})

    def write() -> None:
        writer.write(torch.zeros(num_rows, 4))
        writer.close()

    with pytest.raises(AssertionError, match="announced"):
        write()
    writer.abandon()


# ----------------------------------------------------------------------------------------- damage


def read_all(path: Path, digest: FileDigest) -> None:
    file = TensorFile(path, digest)
    for name in file.tensors:
        file.read(name)


@pytest.fixture
def written(tmp_path: Path) -> Iterator[tuple[Path, FileDigest]]:
    """A file of more than ten blocks."""
    path = tmp_path / "rows-00000.safetensors"
    with small_blocks():
        yield path, write_tensors(path, {"a": torch.randn(9, 7), "b": torch.randn(70)})


def test_every_flipped_byte_is_found_and_the_file_named(written: tuple[Path, FileDigest]) -> None:
    path, digest = written
    content = path.read_bytes()
    assert len(digest.blocks) > 10
    for position in range(len(content)):
        flipped = bytearray(content)
        flipped[position] ^= 1 << position % 8
        path.write_bytes(flipped)
        with pytest.raises(DamagedError, match=str(path)):
            read_all(path, digest)
    path.write_bytes(content)
    read_all(path, digest)


def test_every_cut_is_found_and_the_file_named(written: tuple[Path, FileDigest]) -> None:
    path, digest = written
    content = path.read_bytes()
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(DamagedError) as caught:
            read_all(path, digest)
        assert f"{path} has {size} bytes" in str(caught.value)
    path.write_bytes(content + b"\0")
    with pytest.raises(DamagedError, match=f"{path} has"):
        read_all(path, digest)
    path.unlink()
    with pytest.raises(DamagedError, match=f"{path} is missing"):
        read_all(path, digest)
    path.mkdir()
    with pytest.raises(DamagedError, match=f"{path} is missing"):
        read_all(path, digest)


def test_a_file_cut_while_it_is_read_is_found(written: tuple[Path, FileDigest]) -> None:
    path, digest = written
    with CheckedFile(path, digest) as file:
        file.read(0, 10)
        os.truncate(path, 300)
        with pytest.raises(DamagedError, match=str(path)):
            file.read(290, 310)


def test_only_the_blocks_of_what_is_read_are_looked_at(written: tuple[Path, FileDigest]) -> None:
    """So a stretch costs what it holds; the message says which bytes are damaged."""
    path, digest = written
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    file = TensorFile(path, digest)
    file.read("a")
    last = (len(digest.blocks) - 1) * 64
    with pytest.raises(DamagedError, match=f"bytes {last:,} to {len(content) - 1:,}"):
        file.read("b")


class Planted:
    """What a hostile file would hold: unpickling it runs code."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (Path.touch, (self.marker,))


def header_of(entries: Any) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + bytes(64)


SENSELESS = {
    "empty": b"",
    "short": b"\1\0\0",
    "beyond the end": (1 << 62).to_bytes(8, "little") + bytes(64),
    "not JSON": (4).to_bytes(8, "little") + b"{{{{" + bytes(64),
    "a list": header_of([1, 2]),
    "no fields": header_of({"t": 3}),
    "unknown type": header_of({"t": {"dtype": "X9", "shape": [1], "data_offsets": [0, 4]}}),
    "too few bytes": header_of({"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}),
    "bytes beyond": header_of({"t": {"dtype": "F32", "shape": [99], "data_offsets": [0, 396]}}),
    "into the header": header_of({"t": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}),
    "negative shape": header_of({"t": {"dtype": "U8", "shape": [-1, -4], "data_offsets": [0, 4]}}),
    "fractions": header_of({"t": {"dtype": "U8", "shape": [4.0], "data_offsets": [0, 4.0]}}),
    "pickle": pickle.dumps(Planted(Path("never"))) + bytes(64),
}


@pytest.mark.parametrize("name", SENSELESS)
def test_content_that_makes_no_sense_is_refused_where_its_digest_fits(
    name: str, tmp_path: Path
) -> None:
    path, content = tmp_path / "t", SENSELESS[name]
    path.write_bytes(content)
    digest = FileDigest(len(content), (xxhash.xxh3_64_hexdigest(content),) if content else ())
    with pytest.raises(DamagedError, match=f"{path} is damaged"):
        read_all(path, digest)


def test_damage_is_the_users_to_mend_and_can_be_told_to_other_ranks() -> None:
    error = DamagedError("rows-00000.safetensors is missing")
    assert isinstance(error, UserError)
    copied = pickle.loads(pickle.dumps(error))
    assert (type(copied), str(copied)) == (DamagedError, str(error))


# -------------------------------------------------------------------------------------- full disk


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """The kernel refuses to let a file grow beyond that, as on a full disk but for the number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with largest_file(4096), pytest.raises(OSError, match="too large") as caught:
        TensorFileWriter(path, {"t": TensorInfo(torch.uint8, (5000,))})
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    assert path.stat().st_size == 0


@pytest.mark.parametrize("at", ["write", "fsync"])
def test_a_write_that_fails_names_the_file(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where space isn't reserved (some network file systems), or the disk fails at the flush."""
    path = tmp_path / "t"
    monkeypatch.setattr(tensor_file, "allocate", lambda *_: None)

    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    if at == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    limit = 4096 if at == "write" else 1 << 20
    with largest_file(limit), pytest.raises(OSError, match=r"error|too large") as caught:
        write_tensors(path, {"t": torch.zeros(5000, dtype=torch.uint8)})
    assert caught.value.filename == str(path)
    if at == "write":
        assert path.stat().st_size == 4096, "as much as fitted"


def test_f23_a_file_system_without_advice_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    expected = random_tensor((300, 7), torch.float32)
    with small_blocks():
        digest = write_tensors(tmp_path / "t", {"t": expected})
        assert_same(TensorFile(tmp_path / "t", digest).read("t"), expected)


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_f36_without_fallocate_a_file_gets_its_size_and_no_byte_is_written(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """glibc's posix_fallocate would write each block of it, unheard: hours for a large table."""

    class Libc:
        @staticmethod
        def fallocate(descriptor: int, mode: int, offset: int, size: int) -> int:
            return -1

    monkeypatch.setattr(early_write.ctypes, "CDLL", lambda *_, **__: Libc())
    monkeypatch.setattr(early_write.ctypes, "get_errno", lambda: number)
    with open(tmp_path / "f", "wb") as file:
        early_write.allocate(file.fileno(), 1 << 30)
        assert os.fstat(file.fileno()).st_size == 1 << 30
        assert os.fstat(file.fileno()).st_blocks == 0


def test_f36_room_is_taken_where_the_file_system_can(tmp_path: Path) -> None:
    with open(tmp_path / "f", "wb") as file:
        early_write.allocate(file.fileno(), 1 << 20)
        assert os.fstat(file.fileno()).st_size == 1 << 20
