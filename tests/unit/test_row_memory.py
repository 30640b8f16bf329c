"""Memory of large tables comes in pages of its own, and is like any other."""

from __future__ import annotations

import gc
import mmap
import pickle
from typing import NoReturn

import pytest
import torch

from embeddings.row_memory import rows_to_fill


@pytest.mark.parametrize("num_rows", [0, 3, 70_000], ids=["none", "few", "large"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_are_written_and_read(num_rows: int, dtype: torch.dtype) -> None:
    rows_RD = rows_to_fill(num_rows, 16, dtype)
    assert (rows_RD.shape, rows_RD.dtype) == ((num_rows, 16), dtype)
    assert rows_RD.is_contiguous()
    assert rows_RD.data_ptr() % 64 == 0, "a row of 64 bytes is to lie in one cache line"
    rows_RD.fill_(2.0)
    # A view keeps the memory alive by itself.
    view = rows_RD[num_rows // 2 :]
    del rows_RD
    gc.collect()
    assert bool((view == 2).all())
    assert torch.equal(pickle.loads(pickle.dumps(view)), view)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="Linux only")
def test_f23_a_kernel_without_huge_pages_gives_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, *_: int) -> NoReturn:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Refusing)
    rows_RD = rows_to_fill(70_000, 16, torch.float32)
    rows_RD.fill_(2.0)
    assert float(rows_RD.sum()) == 2.0 * 70_000 * 16
