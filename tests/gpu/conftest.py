"""Tests of this folder need a GPU, and say so where there is none."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _needs_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU: torch.cuda isn't available")


@pytest.fixture
def device() -> torch.device:
    """The first GPU."""
    return torch.device("cuda", 0)
