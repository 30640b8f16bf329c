"""What a benchmark's figures depend on: machine, versions, date and commit."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from dlrm.versions import versions

_VARIABLES = (
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT",
    "MKL_NUM_THREADS",
    "MALLOC_MMAP_THRESHOLD_",
    "LD_PRELOAD",
    "GLOO_SOCKET_IFNAME",
)
"""Environment variables that change how fast all sides are."""


def describe_machine() -> dict[str, Any]:
    """Processor, cores and memory that this process may use."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "isa": torch.backends.cpu.get_cpu_capability(),
    }


def provenance() -> dict[str, Any]:
    """Machine, environment, versions, time and commit."""
    found = versions() | {"python": platform.python_version()}
    with contextlib.suppress(PackageNotFoundError):
        found["torchrec"] = version("torchrec")
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": describe_machine(),
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "versions": found,
    }


def commit() -> str | None:
    """The checkout's commit, with a mark where files differ from it; None outside of one."""
    root = Path(__file__).resolve().parents[2]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        changed = bool(git("status", "--porcelain", "--untracked-files=no"))
        return git("rev-parse", "--short=12", "HEAD") + (" with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"model name\s*:\s*(.+)", text)
    return found[1].strip() if found else platform.machine()
