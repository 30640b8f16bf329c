"""Memory and cores that may be used: of control groups of both versions, nested, in containers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from embeddings.machine import available_bytes, available_cpus

MIB = 1 << 20
V2 = "31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
V1 = "\n".join(
    f"3{number} 31 0:3{number} {{mounted}} /sys/fs/cgroup/{name} rw - cgroup cgroup rw,{name}"
    for number, name in enumerate(["cpu,cpuacct", "memory"])
)


class Machine:
    """The kernel's files of a machine with 1,000 MiB free, in a folder."""

    def __init__(self, root: Path, mounts: str, groups: str) -> None:
        self.root = root
        self.write("proc/meminfo", "MemTotal: 9999999 kB\nMemAvailable: 1024000 kB\n")
        self.write("proc/self/mountinfo", f"23 1 0:1 / / rw - ext4 /dev/sda rw\n{mounts}\n")
        self.write("proc/self/cgroup", groups + "\n")

    def write(self, path: str, text: str) -> None:
        """Writes one of them."""
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def group(self, path: str, **files: str | int) -> None:
        """The files of a control group; `__` in a name stands for a dot."""
        for name, text in files.items():
            self.write(f"sys/fs/cgroup/{path}/{name.replace('__', '.')}", f"{text}\n")

    def mib(self) -> float | None:
        """`available_bytes`."""
        found = available_bytes(self.root)
        return None if found is None else found / MIB


@pytest.fixture
def v2(tmp_path: Path) -> Machine:
    """Group /job/step of version 2."""
    return Machine(tmp_path, V2, "0::/job/step")


def test_f27_the_tightest_group_counts_however_it_is_nested(v2: Machine) -> None:
    assert v2.mib() == 1000
    v2.group("job/step", memory__max="max", memory__current=5 * MIB)
    assert v2.mib() == 1000
    v2.group("job", memory__max=300 * MIB, memory__current=100 * MIB)
    assert v2.mib() == 200
    v2.group("job/step", memory__max=150 * MIB, memory__current=50 * MIB)
    assert v2.mib() == 100
    v2.group("job/step", memory__high=80 * MIB)
    assert v2.mib() == 30
    v2.group("job/step", memory__current=90 * MIB)
    assert v2.mib() == 0


def test_f27_page_cache_that_can_be_given_back_is_free(v2: Machine) -> None:
    """A copy that fits is refused otherwise, right after data were read."""
    v2.group("job", memory__max=300 * MIB, memory__current=290 * MIB)
    assert v2.mib() == 10
    stat = f"anon {40 * MIB}\nfile {250 * MIB}\nshmem {10 * MIB}\n"
    stat += f"inactive_file {200 * MIB}\nactive_file {30 * MIB}\nslab_reclaimable {5 * MIB}"
    v2.group("job", memory__stat=stat)
    assert v2.mib() == 245


def test_f27_version_1_with_its_own_names(tmp_path: Path) -> None:
    machine = Machine(tmp_path, V1.format(mounted="/"), "2:memory:/a/b\n1:cpu,cpuacct:/c\n0::/")
    no_limit = 9223372036854771712
    machine.group("memory/a/b", memory__limit_in_bytes=no_limit, memory__usage_in_bytes=500 * MIB)
    assert machine.mib() == 1000
    machine.group("memory/a", memory__limit_in_bytes=400 * MIB, memory__usage_in_bytes=390 * MIB)
    machine.group("memory/a", memory__stat=f"cache 1\ntotal_inactive_file {50 * MIB}")
    assert machine.mib() == 60


def test_f27_a_container_sees_its_own_group_as_the_top(tmp_path: Path) -> None:
    """Version 1 mounts the group's folder, but names its path from outside."""
    mounts = V1.format(mounted="/docker/4711")
    machine = Machine(tmp_path, mounts, "2:memory:/docker/4711/job\n1:cpu,cpuacct:/docker/4711")
    machine.group("memory", memory__limit_in_bytes=50 * MIB, memory__usage_in_bytes=10 * MIB)
    assert machine.mib() == 40
    machine.group("memory/job", memory__limit_in_bytes=30 * MIB, memory__usage_in_bytes=10 * MIB)
    assert machine.mib() == 20
    # Nor is anything outside the mount looked at: a path that leads out means the top.
    outside = Machine(tmp_path, mounts, "2:memory:/elsewhere\n1:cpu,cpuacct:/")
    assert outside.mib() == 40


def test_f27_what_can_not_be_read_limits_nothing(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None
    machine = Machine(tmp_path, V2, "0::/job\nnonsense")
    machine.group("job", memory__max="many", memory__current="few", cpu__max="max 100000")
    assert machine.mib() == 1000
    assert available_cpus(tmp_path) >= 1


def test_this_host_tells_its_free_memory() -> None:
    """Linux does; the checks would never refuse anything otherwise."""
    found = available_bytes()
    assert found is not None
    assert found > 1 << 20
    assert available_cpus() >= 1


def test_f36_a_quota_of_cpu_time_limits_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    machine = Machine(tmp_path, V2, "0::/job/step")
    assert available_cpus(tmp_path) == 16
    machine.group("job/step", cpu__max="350000 100000")
    assert available_cpus(tmp_path) == 3
    machine.group("job", cpu__max="200000 100000")
    assert available_cpus(tmp_path) == 2
    machine.group("job/step", cpu__max="10000 100000")
    assert available_cpus(tmp_path) == 1
    old = Machine(tmp_path / "old", V1.format(mounted="/"), "2:memory:/\n1:cpu,cpuacct:/c")
    old.group("cpu,cpuacct/c", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100_000)
    assert available_cpus(old.root) == 16
    old.group("cpu,cpuacct/c", cpu__cfs_quota_us=500_000)
    assert available_cpus(old.root) == 5
