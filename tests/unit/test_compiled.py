"""Compiled loops: cut into parts among threads, kept on disk , safe after a fork."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import pytest
import torch

from embeddings import compiled as module
from embeddings.compiled import compiled, in_parts
from tests.failing_files import fail_at

Int64Array = npt.NDArray[np.int64]


@compiled
def count(first: int, stop: int, times_N: Int64Array) -> None:
    for n in range(first, stop):
        times_N[n] += 1


@pytest.fixture
def set_threads() -> Iterator[Any]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("num_items", [0, 1, 511, 512, 5000])
def test_every_item_is_in_one_part(set_threads: Any, num_threads: int, num_items: int) -> None:
    set_threads(num_threads)
    times_N = np.zeros(num_items, dtype=np.int64)
    in_parts(count, num_items, times_N)
    assert (times_N == 1).all()


def test_a_part_s_error_is_raised(set_threads: Any) -> None:
    set_threads(2)

    def fail_late(first: int, stop: int) -> None:
        if first:
            raise ArithmeticError("in the second part")

    with pytest.raises(ArithmeticError, match="in the second part"):
        in_parts(fail_late, 1000)


def test_a_forked_process_has_threads_of_its_own(set_threads: Any) -> None:
    """It has none of its parent's: waiting for those would last for ever."""
    set_threads(2)
    in_parts(count, 1000, np.zeros(1000, dtype=np.int64))
    child = os.fork()
    if child == 0:
        times_N = np.zeros(1000, dtype=np.int64)
        in_parts(count, 1000, times_N)
        os._exit(0 if (times_N == 1).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_without_a_folder_for_it_a_loop_is_compiled_in_each_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_folder(function: Any) -> Any:
        raise RuntimeError("cannot cache function: no locator available for file")

    monkeypatch.setattr(module, "_ForgivingCache", no_folder)
    assert doubled(freshly_compiled()) == [0, 2, 4]


# ------------------------------------------------------------- F21: what is wrong with the cache


def freshly_compiled() -> Any:
    """The same function each time, as another process would meet it."""

    @compiled
    def double(values_N: Int64Array) -> None:
        for n in range(values_N.shape[0]):
            values_N[n] *= 2

    return double


def doubled(double: Any) -> list[int]:
    values_N = np.arange(3)
    double(values_N)
    found: list[int] = values_N.tolist()
    return found


def is_from_disk(double: Any) -> bool:
    return bool(double.stats.cache_hits)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own, with nothing in it."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_compiled_loop_is_kept_on_disk(cache: Path) -> None:
    first = freshly_compiled()
    assert doubled(first) == [0, 2, 4]
    assert not is_from_disk(first)
    second = freshly_compiled()
    assert doubled(second) == [0, 2, 4]
    assert is_from_disk(second)


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
@pytest.mark.parametrize("damage", ["empty", "cut", "other bytes", "no file", "a folder"])
def test_f21_a_damaged_cache_is_made_anew(cache: Path, suffix: str, damage: str) -> None:
    doubled(freshly_compiled())
    (path,) = cache.rglob(f"*{suffix}")
    content = path.read_bytes()
    path.unlink()
    if damage == "a folder":
        path.mkdir()
    elif damage != "no file":
        kept = {"empty": b"", "cut": content[: len(content) // 2], "other bytes": b"\x80\x07x"}
        path.write_bytes(kept[damage])
    assert doubled(freshly_compiled()) == [0, 2, 4]
    again = freshly_compiled()
    assert doubled(again) == [0, 2, 4]
    assert is_from_disk(again) == (damage != "a folder")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS])
@pytest.mark.parametrize("operation", ["open", "write", "rename", "mkdir"])
def test_f21_a_cache_that_can_t_be_written_ends_nothing(
    cache: Path, operation: str, number: int
) -> None:
    def error() -> OSError:
        return OSError(number, os.strerror(number))

    with fail_at(0, within=cache, operations=(operation,), error=error, stays=True) as calls:
        assert doubled(freshly_compiled()) == [0, 2, 4]
    assert calls.failed
    assert doubled(freshly_compiled()) == [0, 2, 4]
