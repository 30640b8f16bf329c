"""Versions of what the figures of a run depend on."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import torch


def versions() -> dict[str, str]:
    """By package, those that are installed."""
    found = {"torch": str(torch.__version__)}
    for name in (
        "fbgemm-gpu-cpu",
        "fbgemm-gpu",
        "numpy",
        "numba",
        "pyarrow",
        "hydra-core",
        "dlrm-system",
    ):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
