"""Vocabularies: rows by a plain recount, mapped and in-memory look-ups alike, what is replaced."""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import vocabulary
from data.counting import KeyCounter
from data.errors import UserError
from data.schema import Feature, RawFormat, Schema, SparseColumn, resolve_features
from data.tokens import encode
from data.vocabulary import (
    Dictionary,
    MappedIds,
    Vocabulary,
    build_dictionary,
    load_dictionary,
    map_dictionary,
)

UNKNOWN, MISSING = 0, 1


def feature_of(**column: object) -> Feature:
    form = RawFormat(columns=["label", "a"])
    schema = Schema(format=form, sparse={"a": SparseColumn(**column)})  # type: ignore[arg-type]
    return resolve_features(schema)[0]


def plain_rows(counts: dict[int, int], feature: Feature) -> dict[int, int]:
    """The rule in words: rows by falling count, equal counts by rising key, at most `rows`."""
    assert feature.min_count is not None
    first = 2 if feature.missing == "row" else 1
    kept = sorted(
        (key for key, count in counts.items() if count >= feature.min_count),
        key=lambda key: (-counts[key], key),
    )
    if feature.rows is not None:
        kept = kept[: feature.rows - first]
    return {key: first + place for place, key in enumerate(kept)}


COUNTS = st.dictionaries(
    st.integers(0, 40) | st.integers(0, 2**64 - 1), st.integers(1, 6), max_size=30
)


@given(
    COUNTS,
    st.integers(1, 4),
    st.none() | st.integers(3, 12),
    st.sampled_from(["row", "empty"]),
    st.sampled_from([1, 1 << 20]),
)
@settings(max_examples=60, deadline=None)
def test_a_dictionary_equals_a_plain_recount(
    counts: dict[int, int], min_count: int, cap: int | None, missing: str, buffer_bytes: int
) -> None:
    feature = feature_of(token="int", min_count=min_count, rows=cap, missing=missing)
    expected = plain_rows(counts, feature)
    first = 2 if missing == "row" else 1
    asked = sorted({*counts, 0, 5, 2**63, 2**64 - 1})
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "_SEGMENT_KEYS", 3)
        work = Path(name)
        counter = KeyCounter(work / "runs", buffer_bytes)
        for key in counts:
            counter.add(np.array([key], np.uint64), np.array([counts[key]]))
        num_rows, kept = build_dictionary(counter, feature, work / "t.parquet", work)
        assert kept == len(expected)
        assert num_rows == max(first + len(expected), first + 1)
        assert cap is None or num_rows <= cap
        wanted = [expected.get(key, UNKNOWN) for key in asked]
        keys = np.array(asked, dtype=np.uint64)
        for dictionary in (
            map_dictionary(work, "t", num_rows, in_memory=True),
            map_dictionary(work, "t", num_rows, in_memory=False),
            load_dictionary(work / "t.parquet", num_rows),
        ):
            assert dictionary.lookup(keys).tolist() == wanted
        table = pq.read_table(work / "t.parquet").to_pydict()
        assert table["count"] == [counts[key] for key in table["key"]]
        assert table["key"] == sorted(expected)


def test_the_dictionary_file_holds_the_texts(tmp_path: Path) -> None:
    column = encode(pa.array(["pear", "fig", "pear", "kiwi"]), "text")
    counter = KeyCounter(tmp_path / "runs", 1)
    counts = np.bincount(column.codes)
    counter.add(column.keys, counts, column.tokens)
    build_dictionary(counter, feature_of(min_count=2), tmp_path / "t.parquet", tmp_path)
    table = pq.read_table(tmp_path / "t.parquet").to_pydict()
    assert (table["token"], table["row"], table["count"]) == (["pear"], [2], [2])


@pytest.mark.parametrize("in_memory", [True, False])
def test_mapped_lookup_of_many_segments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: bool
) -> None:
    """A mapped dictionary gives the same as one in memory, keys before, between and behind."""
    rng = np.random.default_rng(0)
    known = np.unique(rng.integers(0, 2**63, 1000).astype(np.uint64))
    known.tofile(tmp_path / "t.keys")
    (np.arange(len(known)) + 2).tofile(tmp_path / "t.rows")
    monkeypatch.setattr(vocabulary, "_SEGMENT_KEYS", 64)
    dictionary = map_dictionary(tmp_path, "t", len(known) + 2, in_memory=in_memory)
    asked = np.unique(np.concatenate([known[::3], known[::3] + np.uint64(1)]))
    expected = {int(key): row + 2 for row, key in enumerate(known)}
    assert dictionary.lookup(asked).tolist() == [expected.get(int(key), 0) for key in asked]
    assert dictionary.lookup(np.array([], np.uint64)).tolist() == []


def words(vocabulary: Vocabulary, feature: Feature, values: list[int | None]) -> list[int]:
    """Maps plain whole numbers of a column that isn't a list."""
    column = encode(pa.array(values, pa.int64()), "int")
    mapped = vocabulary.map_codes(feature, column.keys, column.codes, None, None)
    return mapped.ids.tolist()


def test_unknown_and_missing_have_rows_of_their_own() -> None:
    feature = feature_of(token="int")
    dictionary = Dictionary(np.array([5, 7], np.uint64), np.array([3, 2]), 4)
    vocabulary = Vocabulary(feature, dictionary)
    assert vocabulary.rows == 4
    column = encode(pa.array([5, None, 7, 8, 0, None, 5], pa.int64()), "int")
    mapped = vocabulary.map_codes(feature, column.keys, column.codes, None, None)
    assert mapped.ids.tolist() == [3, MISSING, 2, UNKNOWN, UNKNOWN, MISSING, 3]
    assert (mapped.num_unknown, mapped.num_missing) == (2, 2)
    assert used_rows(mapped) == Counter(mapped.ids.tolist())


def plain_mix(key: int) -> int:
    """splitmix64's finaliser in plain Python."""
    key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    key = (key ^ key >> 27) * 0x94D049BB133111EB % 2**64
    return key ^ key >> 31


@given(
    st.lists(st.none() | st.integers(-(2**63), 2**63 - 1)),
    st.integers(2, 50),
    st.sampled_from(["mixed", "modulo"]),
)
def test_hash_rule(values: list[int | None], rows: int, rule: str) -> None:
    feature = replace(feature_of(token="int", vocabulary="hash", rows=rows), hash_rule=rule)
    keys = [None if v is None else v % 2**64 for v in values]
    if rule == "mixed":
        keys = [None if key is None else plain_mix(key) for key in keys]
    expected = [0 if key is None else 1 + key % (rows - 1) for key in keys]
    assert words(Vocabulary(feature), feature, values) == expected


def test_hash_rule_without_a_missing_row_uses_every_row() -> None:
    feature = feature_of(token="int", vocabulary="hash", rows=3, missing="empty")
    vocabulary = Vocabulary(feature)
    rows, replaced = vocabulary.rows_of_keys(np.arange(6, dtype=np.uint64), feature)
    assert rows.tolist() == [plain_mix(key) % 3 for key in range(6)]
    assert not replaced.any()


def used_rows(mapped: MappedIds) -> Counter[int]:
    used: Counter[int] = Counter()
    for row, count in zip(mapped.used_rows.tolist(), mapped.used_counts.tolist(), strict=True):
        used[row] += count
    return used


def bags(feature: Feature, lists: list[list[int]]) -> tuple[list[list[int]], int]:
    """Maps bags; returns them and the number of replaced or dropped ids."""
    flat = encode(pa.array([i for bag in lists for i in bag], pa.int64()), "int")
    lengths = np.array([len(bag) for bag in lists], np.int32)
    weights = np.arange(len(flat.codes), dtype=np.float32)
    mapped = Vocabulary(feature).map_codes(feature, flat.keys, flat.codes, lengths, weights)
    assert mapped.lengths is not None
    assert mapped.weights is not None
    assert mapped.weights.shape == mapped.ids.shape, "a weight goes with its id"
    ends = np.cumsum(mapped.lengths)
    assert used_rows(mapped) == Counter(mapped.ids.tolist())
    assert mapped.num_ids == sum(len(bag) for bag in lists), "dropped ones are counted too"
    return [
        mapped.ids[end - n : end].tolist() for n, end in zip(mapped.lengths, ends, strict=True)
    ], mapped.num_unknown


def identity(out_of_range: str) -> Feature:
    return feature_of(
        token="int", vocabulary="identity", rows=10, many=True, separator="|",
        out_of_range=out_of_range,
    )  # fmt: skip


def test_identity_takes_every_id_of_the_table() -> None:
    assert bags(identity("error"), [[0, 9], [], [3]]) == ([[0, 9], [], [3]], 0)


@pytest.mark.parametrize("bad", [10, -1, -11, 2**31, 2**62])
def test_identity_refuses_an_id_outside_the_table(bad: int) -> None:
    """B10: the id just behind the table read the next table's first row."""
    with pytest.raises(UserError) as error:
        bags(identity("error"), [[1, bad]])
    for told in ("feature a", str(bad), "10 rows", "data.schema.sparse.a.rows", "drop"):
        assert told in str(error.value)


def test_identity_drops_or_gathers_ids_outside_the_table_and_counts_them() -> None:
    lists = [[0, 10, 8], [-1], [5, 11, 11]]
    assert bags(identity("drop"), lists) == ([[0, 8], [], [5]], 4)
    assert bags(identity("last_row"), lists) == ([[0, 9, 8], [9], [5, 9, 9]], 4)


def test_weights_of_dropped_ids_are_dropped_with_them() -> None:
    feature = identity("drop")
    column = encode(pa.array([10, 4, 10, 6], pa.int64()), "int")
    mapped = Vocabulary(feature).map_codes(
        feature,
        column.keys,
        column.codes,
        np.array([2, 2], np.int32),
        np.array([0.5, 1.5, 2.5, 3.5], np.float32),
    )
    assert mapped.weights is not None
    assert (mapped.ids.tolist(), mapped.weights.tolist()) == ([4, 6], [1.5, 3.5])
