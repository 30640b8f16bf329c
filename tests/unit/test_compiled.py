"""Compiled loops: cut into parts among threads, kept on disk , safe after a fork."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import pytest
import torch

from embeddings import compiled as module
from embeddings.compiled import compiled, in_parts

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
    njit, asked = numba.njit, []

    def without_folder(function: Any, **options: Any) -> Any:
        asked.append(options.get("cache", False))
        if asked[-1]:
            raise RuntimeError("cannot cache function: no locator available for file")
        return njit(function, **options)

    monkeypatch.setattr(module.numba, "njit", without_folder)

    @compiled
    def double(values_N: Int64Array) -> None:
        for n in range(values_N.shape[0]):
            values_N[n] *= 2

    values_N = np.arange(3)
    double(values_N)
    assert values_N.tolist() == [0, 2, 4]
    assert asked == [True, False]
