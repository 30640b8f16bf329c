"""`KeyCounter` counts exactly, whatever it spills and merges."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from data import counting
from data.counting import KeyCounter
from data.errors import UserError

ADDITIONS = st.lists(
    st.dictionaries(st.integers(0, 30) | st.integers(0, 2**64 - 1), st.integers(0, 5), max_size=12),
    max_size=12,
)
TEXT_ADDITIONS = st.lists(
    st.dictionaries(st.text("abc", max_size=3), st.integers(0, 5), max_size=8), max_size=12
)


def add_all(counter: KeyCounter, additions: list[dict[int, int]]) -> Counter[int]:
    expected: Counter[int] = Counter()
    for addition in additions:
        keys = np.array(list(addition), dtype=np.uint64)
        counter.add(keys, np.array(list(addition.values()), dtype=np.int64))
        expected.update({key: count for key, count in addition.items() if count})
    return expected


def hash_of(text: str) -> int:
    return xxhash.xxh64_intdigest(text.encode())


def add_texts(counter: KeyCounter, additions: list[dict[str, int]]) -> Counter[str]:
    expected: Counter[str] = Counter()
    for addition in additions:
        texts = sorted(addition, key=hash_of)
        keys = np.array([hash_of(text) for text in texts], dtype=np.uint64)
        counts = np.array([addition[text] for text in texts], dtype=np.int64)
        counter.add(keys, counts, pa.array(texts, pa.string()))
        expected.update({text: count for text, count in addition.items() if count})
    return expected


def totals(counter: KeyCounter, chunk_keys: int) -> dict[int, int]:
    """All keys and counts, after checking that the runs are in one rising order."""
    found: dict[int, int] = {}
    last = -1
    for run in counter.merged(chunk_keys):
        keys = run.keys.tolist()
        assert keys, "a run holds something"
        assert keys == sorted(set(keys))
        assert keys[0] > last, "no key comes twice, over all runs"
        last = keys[-1]
        found.update(zip(keys, run.counts.tolist(), strict=True))
    return found


@given(ADDITIONS, st.sampled_from([1, 100, 1 << 20]), st.integers(2, 4), st.sampled_from([1, 5]))
@settings(max_examples=60, deadline=None)
def test_counts_equal_a_plain_recount(
    additions: list[dict[int, int]], buffer_bytes: int, runs_per_level: int, sample_every: int
) -> None:
    """With a buffer of 1 byte every addition is spilled and runs are merged over several levels."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(counting, "_RUNS_PER_LEVEL", runs_per_level)
        patch.setattr(counting, "_SAMPLE_EVERY", sample_every)
        counter = KeyCounter(Path(folder) / "runs", buffer_bytes)
        expected = add_all(counter, additions)
        assert totals(counter, chunk_keys=1) == expected
        assert totals(counter, chunk_keys=1 << 20) == expected, "and it may be read again"


@given(TEXT_ADDITIONS, st.sampled_from([1, 200, 1 << 20]))
@settings(max_examples=40, deadline=None)
def test_texts_stay_with_their_keys(additions: list[dict[str, int]], buffer_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setattr(counting, "_RUNS_PER_LEVEL", 3)
        patch.setattr(counting, "_SAMPLE_EVERY", 2)
        counter = KeyCounter(Path(folder) / "runs", buffer_bytes)
        expected = add_texts(counter, additions)
        found: dict[str, int] = {}
        for run in counter.merged(chunk_keys=2):
            assert run.tokens is not None
            texts = run.tokens.to_pylist()
            assert [hash_of(text) for text in texts] == run.keys.tolist()
            found.update(zip(texts, run.counts.tolist(), strict=True))
        assert found == expected


@pytest.mark.parametrize("buffer_bytes", [1, 1 << 20], ids=["spilled", "in memory"])
def test_a_key_may_come_several_times_and_unsorted(tmp_path: Path, buffer_bytes: int) -> None:
    counter = KeyCounter(tmp_path, buffer_bytes)
    counter.add(np.array([7, 3, 7, 5]), np.array([1, 2, 4, 0]))
    assert totals(counter, 10) == {3: 2, 7: 5}


def test_additions_after_reading_are_counted(tmp_path: Path) -> None:
    counter = KeyCounter(tmp_path, 1 << 20)
    add_all(counter, [{1: 1, 2: 2}])
    assert totals(counter, 10) == {1: 1, 2: 2}
    add_all(counter, [{2: 5, 9: 1}])
    assert totals(counter, 10) == {1: 1, 2: 7, 9: 1}


def test_a_small_buffer_spills_and_keeps_few_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "_RUNS_PER_LEVEL", 4)
    counter = KeyCounter(tmp_path / "runs", 1)
    additions = [{n: 1, n + 1: 1} for n in range(100)]
    expected = add_all(counter, additions)
    runs = list((tmp_path / "runs").glob("*.keys"))
    assert 0 < len(runs) < 4 * 4, "100 runs of 4 per level fit into log4(100) levels"
    assert totals(counter, 10) == expected


def test_a_large_buffer_spills_nothing(tmp_path: Path) -> None:
    counter = KeyCounter(tmp_path / "runs", 1 << 20)
    add_all(counter, [{n: 1} for n in range(100)])
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("buffer_bytes", [1, 1 << 20], ids=["spilled", "in memory"])
def test_two_texts_with_one_hash_are_refused(tmp_path: Path, buffer_bytes: int) -> None:
    """Also where they never meet in one block."""
    counter = KeyCounter(tmp_path, buffer_bytes)
    for text in ("a", "b"):
        counter.add(np.array([7], np.uint64), np.array([1]), pa.array([text]))
    with pytest.raises(UserError, match="64-bit hash"):
        list(counter.merged())
