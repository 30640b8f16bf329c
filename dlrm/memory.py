"""How much memory this machine can still give."""

from __future__ import annotations

from pathlib import Path


def available_bytes() -> int | None:
    """Free memory and what the kernel would give back; None where the system doesn't tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
