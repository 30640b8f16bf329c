"""What this process may use of the machine: memory and cores, where the kernel limits them too.

A container or batch job is a control group. Its limits stand in files of the kernel's, of version 1
or 2, in the group itself and in each group around it; `/proc/meminfo` and the number of cores know
nothing of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_NO_LIMIT = 1 << 62  # Version 1 writes "none" as the largest number of whole pages.


class _Files(NamedTuple):
    """Names of a version's files: limits, what is used, and the prefix of lines in memory.stat."""

    limits: tuple[str, ...]
    used: str
    stat_prefix: str


# `memory.high` isn't a wall, but a process above it hardly moves.
_MEMORY = {
    2: _Files(("memory.max", "memory.high"), "memory.current", ""),
    1: _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_"),
}
_RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")


def available_bytes(root: Path = Path("/")) -> int | None:
    """Memory that can still be had: of this host, as the kernel estimates it, or of the control
    group, or one around it, that has the least left. Page cache counts as free, as the kernel gives
    it back. None where nothing can be read.

    Args:
        root: where the kernel's files are found.
    """
    found = []
    try:
        text = (root / "proc/meminfo").read_text()
        found.append(int(text.split("MemAvailable:")[1].split()[0]) * 1024)
    except (OSError, IndexError, ValueError):
        pass
    for version, group in _groups("memory", root):
        files = _MEMORY[version]
        limits = [limit for name in files.limits if (limit := _number(group / name)) is not None]
        used = _number(group / files.used)
        if limits and used is not None and min(limits) < _NO_LIMIT:
            used -= min(used, _reclaimable(group, files.stat_prefix))
            found.append(max(0, min(limits) - used))
    return min(found) if found else None


def available_cpus(root: Path = Path("/")) -> int:
    """Cores that this process may keep busy: those that it may run on, or as many as its control
    group's quota of time pays for (whole ones, at least 1).

    Args:
        root: where the kernel's files are found.
    """
    cpus = usable_cpus()
    for version, group in _groups("cpu", root):
        quota, period = _quota(version, group)
        if quota > 0 and period > 0:
            cpus = min(cpus, max(1, quota // period))
    return cpus


def usable_cpus() -> int:
    """Cores that this process may run on, whatever share of their time it gets."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _groups(controller: str, root: Path) -> Iterator[tuple[int, Path]]:
    """Version and folder of this process's group for a controller, and of each one around it."""
    paths = _paths_of_groups(controller, root)
    for version, mounted, mount_point in _mounts(controller, root):
        if version not in paths:
            continue
        top = root / mount_point.lstrip("/")
        # In a container the folder that is mounted may be that of its own group.
        inside = os.path.relpath(paths[version], mounted)
        group = top if inside.startswith("..") else top / inside
        while True:
            yield version, group
            if group == top or top not in group.parents:
                break
            group = group.parent


def _paths_of_groups(controller: str, root: Path) -> dict[int, str]:
    """By version, the path of this process's group."""
    paths = {}
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            paths[2] = path
        elif controller in controllers.split(","):
            paths[1] = path
    return paths


def _mounts(controller: str, root: Path) -> Iterator[tuple[int, str, str]]:
    """Version, mounted path and mount point of each hierarchy that may have the controller."""
    for line in _lines(root / "proc/self/mountinfo"):
        fields, _, rest = line.partition(" - ")
        places, kind = fields.split(), rest.split()
        if len(places) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            yield 2, places[3], places[4]
        elif kind[0] == "cgroup" and controller in kind[2].split(","):
            yield 1, places[3], places[4]


def _quota(version: int, group: Path) -> tuple[int, int]:
    """Time that the group may use in a period, and the period; (0, 0) where there is no limit."""
    if version == 2:
        words = " ".join(_lines(group / "cpu.max")).split()
        if len(words) == 2 and all(word.isdigit() for word in words):
            return int(words[0]), int(words[1])
        return 0, 0
    quota, period = (_number(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return (quota or 0, period or 0)


def _reclaimable(group: Path, prefix: str) -> int:
    sizes = dict(line.split()[:2] for line in _lines(group / "memory.stat") if " " in line)
    values = (sizes.get(f"{prefix}{name}", "0") for name in _RECLAIMABLE)
    return sum(int(value) for value in values if value.isdigit())


def _number(path: Path) -> int | None:
    """The number in a file; None for `max`, or where it can't be read."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
