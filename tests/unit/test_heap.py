"""Freed memory is kept, unless the user has set the allocator."""

from __future__ import annotations

import platform
from typing import Any

import pytest

from dlrm import heap


class _Libc:
    """Stands in for glibc: the real one's settings would stay for the whole test process."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def mallopt(self, parameter: int, value: int) -> int:
        self.calls.append((parameter, value))
        return 1


@pytest.fixture
def libc(monkeypatch: pytest.MonkeyPatch) -> _Libc:
    found = _Libc()
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: found)
    for name in heap._SET_BY_USER:
        monkeypatch.delenv(name, raising=False)
    return found


def test_both_thresholds_are_raised(libc: _Libc) -> None:
    assert heap.keep_heap()
    assert dict(libc.calls) == {-3: 1 << 30, -1: 2**31 - 1}


@pytest.mark.parametrize("name", heap._SET_BY_USER)
def test_what_the_user_set_stays(libc: _Libc, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    assert not heap.keep_heap()
    assert not libc.calls


def test_another_libc_is_left_alone(libc: _Libc, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(name: Any) -> Any:
        return object()

    monkeypatch.setattr(heap.ctypes, "CDLL", without)
    assert not heap.keep_heap()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_glibc_takes_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """glibc once refused thresholds above 32 MiB; it would say so. (They stay raised in
    this process, as after any run in it.)"""
    for name in heap._SET_BY_USER:
        monkeypatch.delenv(name, raising=False)
    assert heap.keep_heap()
