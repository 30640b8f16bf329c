"""`prepare`: what the prepared dataset holds, against plain recounts of the same rows."""

from __future__ import annotations

import gzip
import hashlib
import math
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from data import count_pass, parse_pass, raw, vocabulary, write_pass
from data.errors import RawDataError, UserError
from data.hashing import mix
from data.manifest import Manifest, load_manifest
from data.parquet import Order, PreparedDataset
from data.prepare import RawInputs, prepare
from data.raw_batches import load_row_mapper, raw_batches
from data.raw_inputs import expand_inputs
from data.schema import DenseColumn, RawFormat, Schema, SparseColumn, Split
from data.split import PARTS, TEST, TRAIN, VALID, SplitRule
from data.tokens import key_of_text
from data.write_pass import PartTally

# Each example writes or reads files: shrinking a failure would take minutes.
NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)

Lines = Callable[..., list[bytes]]
Schemas = Callable[..., Schema]
Prepare = Callable[..., Manifest]
ReadPart = Callable[[Path, str], dict[str, list[Any]]]
Digests = Callable[[Path], dict[str, str]]

UNKNOWN, MISSING = 0, 1


# ---- dictionaries against a plain recount


def plain_dictionary(
    tokens: list[str], min_count: int, cap: int | None, first_row: int
) -> dict[str, int]:
    """Rows by falling count, equal counts by rising key, rare ones and those beyond the cap out."""
    counts = Counter(tokens)
    kept = sorted(
        (token for token in counts if counts[token] >= min_count),
        key=lambda token: (-counts[token], key_of_text(token, "text")),
    )
    if cap is not None:
        kept = kept[: cap - first_row]
    return {token: first_row + place for place, token in enumerate(kept)}


def share_of_top(counts: Counter[int]) -> dict[str, float]:
    ordered = sorted(counts.values(), reverse=True)
    tops = [10**n for n in range(10) if 10**n <= len(ordered)]
    return {str(top): round(sum(ordered[:top]) / sum(ordered), 6) for top in tops}


def check_id_counts(root: Path, manifest: Manifest, name: str, train_ids: list[int]) -> None:
    """The counts file and the manifest's summary of it are those of the training part's ids."""
    summary = manifest.counts[name]
    table = pq.read_table(root / summary["file"]).to_pydict()
    counts = Counter(train_ids)
    assert dict(zip(table["id"], table["count"], strict=True)) == counts
    assert table["id"] == sorted(table["id"])
    assert (summary["distinct"], summary["total"]) == (len(counts), len(train_ids))
    assert summary["share_of_top"] == pytest.approx(share_of_top(counts), abs=2e-6)


TOKEN = st.sampled_from("pqrstuvw")
ROW = st.tuples(st.none() | TOKEN, st.lists(TOKEN, max_size=3), st.none() | TOKEN)


@given(
    rows=st.lists(ROW, min_size=3, max_size=40),
    min_count=st.integers(1, 3),
    cap=st.none() | st.integers(3, 7),
    missing=st.sampled_from(["row", "empty"]),
    cut=st.integers(0, 40),
    slice_bytes=st.sampled_from([8 << 20, 30]),
)
@settings(max_examples=40, deadline=None, phases=NO_SHRINKING)
def test_ids_equal_a_plain_recount(
    read_part: ReadPart,
    rows: list[tuple[str | None, list[str], str | None]],
    min_count: int,
    cap: int | None,
    missing: str,
    cut: int,
    slice_bytes: int,
) -> None:
    """`a` and `c` share a table; `b` holds bags; tokens not seen in training become unknown."""
    own = SparseColumn(min_count=min_count, rows=cap, missing="row", table="shared")
    schema = Schema(
        format=RawFormat(columns=["label", "a", "b", "c"]),
        sparse={
            "a": own,
            "b": SparseColumn(min_count=min_count, rows=cap, missing=missing, separator="|"),
            "c": own,
        },
        split=Split("in_order", 0.2, 0.2),
    )
    lines = [f"{n % 2}\t{a or ''}\t{'|'.join(b)}\t{c or ''}\n" for n, (a, b, c) in enumerate(rows)]
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(raw, "SLICE_BYTES", slice_bytes)
        folder, root = Path(name), Path(name) / "prepared"
        files = [folder / "day_0", folder / "day_1"]
        files[0].write_text("".join(lines[:cut]))
        files[1].write_text("".join(lines[cut:]))
        manifest = prepare(schema, RawInputs(files), root)

        num_valid = num_test = round(0.2 * len(rows))
        num_train = len(rows) - num_valid - num_test
        train = rows[:num_train]
        shared = plain_dictionary(
            [token for a, _, c in train for token in (a, c) if token], min_count, cap, 2
        )
        first_row = 2 if missing == "row" else 1
        bags = plain_dictionary([t for _, b, _ in train for t in b], min_count, cap, first_row)
        sizes = {"shared": 2 + len(shared), "b": first_row + len(bags)}
        least = {"shared": 3, "b": first_row + 1}
        assert manifest.table_rows == {t: max(sizes[t], least[t]) for t in ("shared", "b")}

        def bag_ids(bag: list[str]) -> list[int]:
            filled = [MISSING] if missing == "row" and not bag else []
            return filled or [bags.get(token, UNKNOWN) for token in bag]

        def single(token: str | None) -> int:
            return MISSING if token is None else shared.get(token, UNKNOWN)

        start = 0
        for part, size in zip(PARTS, (num_train, num_valid, num_test), strict=True):
            expected = rows[start : start + size]
            found = read_part(root, part)
            info = manifest.parts[part]
            assert info.rows == size
            labels = [n % 2 for n in range(start, start + size)]
            assert info.label_rate == (sum(labels) / size if size else None)
            if size:
                assert found["__label"] == labels
                assert found["a"] == [single(a) for a, _, _ in expected]
                assert found["b"] == [bag_ids(b) for _, b, _ in expected]
                assert found["c"] == [single(c) for _, _, c in expected]
                assert info.unknown["a"] == found["a"].count(UNKNOWN)
                assert info.missing["a"] == found["a"].count(MISSING)
                flat = [id for bag in found["b"] for id in bag]
                assert info.unknown["b"] == flat.count(UNKNOWN)
                assert info.missing["b"] == sum(
                    bag_ids(b) == [MISSING] and not b for _, b, _ in expected
                )
                assert (info.ids["a"], info.ids["b"]) == (size, len(flat))
            start += size
        ids = {"a": [single(a) for a, _, _ in train], "c": [single(c) for _, _, c in train]}
        ids["b"] = [id for _, b, _ in train for id in bag_ids(b)]
        for feature, train_ids in ids.items():
            check_id_counts(root, manifest, feature, train_ids)


def test_a_token_seen_after_training_only_is_unknown(
    prepare_files: Prepare, tmp_path: Path
) -> None:
    schema = Schema(
        format=RawFormat(columns=["label", "a"]),
        sparse={"a": SparseColumn(token="hex")},
        split=Split("given"),
    )
    files = {"train": b"1\t0a\n0\t0a\n0\t\n", "valid": b"1\t0b\n1\t0a\n0\t\n", "test": b"1\t0c\n"}
    manifest = prepare_files(schema, files, file_parts=[TRAIN, VALID, TEST])
    dataset = PreparedDataset(tmp_path / "prepared")
    assert dataset.column("train", "a").tolist() == [2, 2, MISSING]
    assert dataset.column("valid", "a").tolist() == [UNKNOWN, 2, MISSING]
    assert dataset.column("test", "a").tolist() == [UNKNOWN]
    assert manifest.table_rows == {"a": 3}
    assert manifest.unknown_id_share("valid") == {"a": round(1 / 3, 6)}
    assert manifest.unknown_id_share("train") == {}


# ---- the other rules


def rule_schema() -> Schema:
    columns = ["label", "hashed", "dropped", "last", "big", "plain"]
    identity = {"token": "int", "vocabulary": "identity", "separator": "|"}
    return Schema(
        format=RawFormat(columns=columns),
        sparse={
            "hashed": SparseColumn("text", "hash", rows=5),
            "dropped": SparseColumn(**identity, rows=4, out_of_range="drop"),
            "last": SparseColumn(**identity, rows=4, out_of_range="last_row"),
            "big": SparseColumn(**identity, rows=2**40),
            "plain": SparseColumn(min_count=2),
        },
        split=Split("in_order", 0.25, 0.25),
    )


def rule_lines(num_rows: int) -> list[str]:
    lines = []
    for n in range(num_rows):
        word = f"w{n % 7}" if n % 5 else ""
        fields = [n % 2, word, f"{n % 6}|{n % 3}", f"{n % 6}|-1", 2**33 + n % 9, n % 11]
        if n % 13 == 0:
            fields = [0, "", "", "", "", ""]
        lines.append("\t".join(map(str, fields)) + "\n")
    return lines


def test_hash_and_identity_rules_and_their_id_counts(
    prepare_files: Prepare, read_part: ReadPart, tmp_path: Path
) -> None:
    lines = rule_lines(200)
    manifest = prepare_files(rule_schema(), {"raw": "".join(lines).encode()})
    root = tmp_path / "prepared"
    fields = [line.rstrip("\n").split("\t") for line in lines]
    train = read_part(root, "train")
    num_train = len(train["hashed"])
    assert num_train == 100
    assert train["hashed"] == [
        1 + int(mix(np.array([key_of_text(f[1], "text")], np.uint64))[0]) % 4 if f[1] else 0
        for f in fields[:num_train]
    ]
    bags = [[[int(i) for i in f[c].split("|") if i] for f in fields] for c in (2, 3, 4)]
    assert train["dropped"] == [[i for i in bag if 0 <= i < 4] for bag in bags[0][:num_train]]
    assert train["last"] == [[i if 0 <= i < 3 else 3 for i in bag] for bag in bags[1][:num_train]]
    assert train["big"] == bags[2][:num_train], "ids beyond 32 bits"
    info = manifest.parts["train"]
    assert info.unknown["dropped"] == sum(i > 3 for bag in bags[0][:num_train] for i in bag)
    assert info.ids["dropped"] == sum(len(bag) for bag in bags[0][:num_train])
    assert (info.missing["dropped"], info.missing["last"]) == (0, 0)
    assert info.missing["hashed"] == sum(not f[1] for f in fields[:num_train])
    assert manifest.table_rows == {
        "hashed": 5, "dropped": 4, "last": 4, "big": 2**40, "plain": 13,
    }  # fmt: skip
    for name, ids in train.items():
        if name != "__label":
            flat = [i for entry in ids for i in (entry if isinstance(entry, list) else [entry])]
            check_id_counts(root, manifest, name, flat)


def test_an_id_outside_an_identity_table_stops_prepare(
    prepare_files: Prepare, tmp_path: Path
) -> None:
    schema = rule_schema()
    schema.sparse["dropped"].out_of_range = "error"
    with pytest.raises(UserError, match="feature dropped: id 4 lies outside its table dropped"):
        prepare_files(schema, {"raw": "".join(rule_lines(200)).encode()})
    assert not (tmp_path / "prepared" / "manifest.json").exists()


def test_columns_and_tables_may_be_named_like_paths(
    prepare_files: Prepare, read_part: ReadPart, tmp_path: Path, tree_digests: Digests
) -> None:
    """Their vocabularies and id counts are files; nothing may be written elsewhere."""
    names = ["user/id", "..", ".hidden", "a b"]
    schema = Schema(
        format=RawFormat(columns=["label", *names]),
        sparse={name: SparseColumn() for name in names},
        split=Split("in_order", 0, 0),
    )
    schema.sparse["a b"].table = "../../table"
    content = "".join(f"{n % 2}\tu{n}\tv\tw\tx\n" for n in range(3)).encode()
    manifest = prepare_files(schema, {"raw": content})
    root = tmp_path / "prepared"
    assert sorted(read_part(root, "train")["user/id"]) == [2, 3, 4]
    assert len(manifest.outputs) == 8
    found = tree_digests(root)
    assert {name: found[name] for name in manifest.outputs} == manifest.outputs
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prepared", "raw"]
    assert load_row_mapper(root, manifest).vocabularies["../../table"].rows == 3


def test_dense_columns_may_be_named_like_anything(
    prepare_files: Prepare, read_part: ReadPart, tmp_path: Path
) -> None:
    schema = Schema(
        format=RawFormat(columns=["label", "a.keys", "b.tokens", "codes", "a"]),
        dense={name: DenseColumn("identity") for name in ("a.keys", "b.tokens", "codes")},
        sparse={"a": SparseColumn(missing="empty")},
    )
    content = "".join(f"{n % 2}\t{n}\t{-n}\t{2 * n}\tt{n}\n" for n in range(20)).encode()
    prepare_files(schema, {"raw": content})
    train = read_part(tmp_path / "prepared", "train")
    assert train["a.keys"] == list(range(16))
    assert train["b.tokens"] == [-n for n in range(16)]
    assert train["codes"] == [2 * n for n in range(16)]


# ---- dense values


def test_negative_and_missing_counts_under_every_transform(
    prepare_files: Prepare, read_part: ReadPart, tmp_path: Path, criteo_schema: Schemas
) -> None:
    """B01: 64 rows of a column that cycles through -3, -2, -1, 0, 5 and empty."""
    cycle = ["-3", "-2", "-1", "0", "5", ""]
    schema = criteo_schema(3, 1, split=Split("in_order", 0.25, 0.25))
    for name, transform in zip(
        ("I1", "I2", "I3"), ("log1p", "standardise", "identity"), strict=True
    ):
        schema.dense[name] = DenseColumn(transform)
    values = [cycle[n % 6] for n in range(64)]
    lines = [f"{n % 2}\t{v}\t{v}\t{v}\t0000000a\n" for n, v in enumerate(values)]
    manifest = prepare_files(schema, {"raw": "".join(lines).encode()})
    known = [float(v) for v in values[:32] if v]
    mean, deviation = np.mean(known), np.std(known)
    start = 0
    for part, size in (("train", 32), ("valid", 16), ("test", 16)):
        found = read_part(tmp_path / "prepared", part)
        part_values = [float(v) if v else None for v in values[start : start + size]]
        expected = {
            "I1": [math.log1p(max(v or 0, 0)) for v in part_values],
            "I2": [0 if v is None else (v - mean) / deviation for v in part_values],
            "I3": [v or 0 for v in part_values],
        }
        for name in expected:
            assert found[name] == pytest.approx(expected[name], rel=1e-6, abs=1e-6)
        start += size
    assert manifest.moments["I2"].count == len(known)
    assert manifest.moments["I2"].mean == pytest.approx(mean)
    assert set(manifest.moments) == {"I2"}


def test_moments_are_of_the_training_part_only(
    prepare_files: Prepare, criteo_schema: Schemas
) -> None:
    schema = criteo_schema(1, 0, transform="standardise", split=Split("given"))
    files = {"train": b"1\t1\n0\t3\n", "valid": b"1\t1000\n", "test": b"1\t-9999\n"}
    moments = prepare_files(schema, files, file_parts=[TRAIN, VALID, TEST]).moments["I1"]
    assert (moments.count, moments.mean, moments.deviation) == (2, 2.0, 1.0)


# ---- splits


def test_the_last_file_by_number_is_held_out(
    criteo_lines: Lines, criteo_schema: Schemas, tmp_path: Path
) -> None:
    """day_10 comes after day_2, which sorting as text gets wrong."""
    lines = criteo_lines(60, 1, 1)
    for day, start in ((0, 0), (2, 20), (10, 40)):
        content = b"".join(lines[start : start + 20])
        (tmp_path / f"day_{day}.gz").write_bytes(gzip.compress(content))
    files = expand_inputs("day_*.gz", tmp_path, "data.raw")
    schema = criteo_schema(1, 1, transform="identity", split=Split("by_file", 0.5, 0.5))
    manifest = prepare(schema, RawInputs(files), tmp_path / "prepared")
    assert [i.file for i in manifest.inputs] == ["day_0.gz", "day_2.gz", "day_10.gz"]
    dataset = PreparedDataset(tmp_path / "prepared")
    counts = [float(line.split(b"\t")[1] or 0) for line in lines]
    assert dataset.column("train", "I1").tolist() == counts[:40]
    assert dataset.column("valid", "I1").tolist() == counts[40:50]
    assert dataset.column("test", "I1").tolist() == counts[50:]


@pytest.mark.parametrize("slice_bytes", [8 << 20, 100])
def test_a_random_split_sends_each_row_where_the_rule_says(
    slice_bytes: int,
    criteo_schema: Schemas,
    prepare_files: Prepare,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(raw, "SLICE_BYTES", slice_bytes)
    split = Split("random", 0.3, 0.2, seed=4)
    schema = criteo_schema(1, 1, transform="identity", split=split)
    lines = [f"1\t{n}\t0000000a\n".encode() for n in range(200)]
    prepare_files(schema, {"a": b"".join(lines[:70]), "b": b"".join(lines[70:])})
    parts = SplitRule(split, [200], None).parts_of(0, 0, 200)
    dataset = PreparedDataset(tmp_path / "prepared")
    for part, name in enumerate(PARTS):
        expected = np.flatnonzero(parts == part).tolist()
        assert dataset.column(name, "I1").tolist() == expected
        assert 0 < len(expected) < 150


def test_a_split_that_leaves_nothing_to_train_on(
    prepare_files: Prepare, criteo_lines: Lines, criteo_schema: Schemas, tmp_path: Path
) -> None:
    schema = criteo_schema(1, 1, split=Split("by_file", 0.5, 0.5))
    with pytest.raises(UserError, match="name more files or use"):
        prepare_files(schema, {"only": b"".join(criteo_lines(9, 1, 1))})
    assert not (tmp_path / "prepared" / "manifest.json").exists()


# ---- the manifest


def test_the_manifest_tells_the_truth_about_inputs_and_outputs(
    criteo_lines: Lines,
    criteo_schema: Schemas,
    prepare_files: Prepare,
    tree_digests: Digests,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(raw, "SLICE_BYTES", 200)
    lines = criteo_lines(90, 2, 3)
    files = {
        "day_0.tsv": b"\n" + b"".join(lines[:15]) + b"\r\n" + b"".join(lines[15:30]) + b"\n\n",
        "day_1.tsv.gz": gzip.compress(b"".join(lines[30:])),
    }
    manifest = prepare_files(criteo_schema(2, 3), files)
    root = tmp_path / "prepared"
    for info, (name, content), rows, blank in zip(
        manifest.inputs, files.items(), (30, 60), (4, 0), strict=True
    ):
        assert (info.file, info.num_bytes, info.rows) == (name, len(content), rows)
        assert info.sha256 == hashlib.sha256(content).hexdigest()
        assert info.blank_lines == blank
    listed = dict(manifest.outputs)
    for part in manifest.parts.values():
        assert sum(f.rows for f in part.files) == part.rows
        for file in part.files:
            listed[file.file] = file.sha256
            assert (root / file.file).stat().st_size == file.num_bytes
    found = tree_digests(root)
    del found["manifest.json"]
    assert found == listed, "every file is listed with its digest, and nothing else lies there"
    assert {p: i.rows for p, i in manifest.parts.items()} == {"train": 72, "valid": 9, "test": 9}
    labels = [int(line[:1]) for line in lines]
    assert manifest.parts["train"].label_rate == sum(labels[:72]) / 72
    assert load_manifest(root) == manifest
    assert load_manifest(root).digest() == manifest.digest()


def test_a_manifest_of_another_format_is_refused(
    criteo_lines: Lines, criteo_schema: Schemas, prepare_files: Prepare, tmp_path: Path
) -> None:
    prepare_files(criteo_schema(1, 1), {"raw": b"".join(criteo_lines(9, 1, 1))})
    path = tmp_path / "prepared" / "manifest.json"
    path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 99'))
    with pytest.raises(UserError, match=r"format 99.*data\.overwrite=true"):
        load_manifest(tmp_path / "prepared")


# ---- the same bytes, however the work is cut


def test_slices_buffers_and_mapped_dictionaries_change_no_byte(
    criteo_lines: Lines,
    criteo_schema: Schemas,
    prepare_files: Prepare,
    tree_digests: Digests,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = criteo_lines(1500, 3, 4)
    files = {"a": b"".join(lines[:700]), "b.gz": gzip.compress(b"".join(lines[700:]))}
    schema = criteo_schema(3, 4, min_count=2, rows=200)
    schema.sparse["C2"] = SparseColumn(token="text", table="text")
    schema.sparse["C3"] = SparseColumn(token="text", table="text")
    schema.sparse["C4"] = SparseColumn("hex", "hash", rows=50)
    prepare_files(schema, files, tmp_path / "clean")
    clean = tree_digests(tmp_path / "clean")
    monkeypatch.setattr(raw, "SLICE_BYTES", 2000)
    prepare_files(schema, files, tmp_path / "slices")
    assert tree_digests(tmp_path / "slices") == clean
    # Every addition to a counter is spilled; dictionaries are mapped, 10 keys at a time.
    monkeypatch.setattr(count_pass, "_COUNTER_BYTES", 1)
    monkeypatch.setattr(write_pass, "_COUNTER_BYTES", 1)
    monkeypatch.setattr(count_pass, "_DICTIONARY_BYTES_IN_MEMORY", 0)
    monkeypatch.setattr(vocabulary, "_SEGMENT_KEYS", 10)
    prepare_files(schema, files, tmp_path / "spilled")
    assert tree_digests(tmp_path / "spilled") == clean
    for module in (parse_pass, count_pass, write_pass):
        monkeypatch.setattr(module, "NUM_THREADS", 5)
    prepare_files(schema, files, tmp_path / "threads")
    assert tree_digests(tmp_path / "threads") == clean


def test_moments_do_not_depend_on_slices_beyond_rounding(
    criteo_lines: Lines,
    criteo_schema: Schemas,
    prepare_files: Prepare,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The slice size is fixed in the code, so a rerun gives the same bits all the same."""
    schema = criteo_schema(2, 1, transform="standardise")
    files = {"raw": b"".join(criteo_lines(300, 2, 1))}
    whole = prepare_files(schema, files, tmp_path / "whole").moments
    monkeypatch.setattr(raw, "SLICE_BYTES", 500)
    cut = prepare_files(schema, files, tmp_path / "cut").moments
    for name, moments in whole.items():
        assert cut[name].count == moments.count
        assert cut[name].mean == pytest.approx(moments.mean, rel=1e-12)
        assert cut[name].deviation == pytest.approx(moments.deviation, rel=1e-12)


# ---- files that must not pass


@pytest.mark.parametrize("first", [b"", b"12345678"])
def test_an_unlabelled_file_stops_at_line_1(
    first: bytes,
    criteo_lines: Lines,
    criteo_schema: Schemas,
    prepare_files: Prepare,
    tmp_path: Path,
) -> None:
    """B03: with an empty or all-digit first category the shift raises no parse error by itself."""
    lines = [line.split(b"\t") for line in criteo_lines(5)]
    unlabelled = b"".join(b"\t".join([*f[1:14], first, *f[15:]]) for f in lines)
    with pytest.raises(RawDataError) as error:
        prepare_files(criteo_schema(), {"test.txt": unlabelled})
    assert error.value.line == 1
    assert "test.txt, line 1: 39 fields found, 40 expected" in str(error.value)
    assert not (tmp_path / "prepared" / "manifest.json").exists()


def test_a_file_without_rows_among_three_does_no_harm(
    criteo_lines: Lines, criteo_schema: Schemas, prepare_files: Prepare, tmp_path: Path
) -> None:
    lines = criteo_lines(40, 1, 1)
    files = {"day_0": b"".join(lines[:20]), "day_1": b"", "day_2": b"".join(lines[20:])}
    schema = criteo_schema(1, 1, transform="identity", split=Split("in_order", 0, 0))
    manifest = prepare_files(schema, files)
    assert [i.rows for i in manifest.inputs] == [20, 0, 20]
    counts = [float(line.split(b"\t")[1] or 0) for line in lines]
    assert PreparedDataset(tmp_path / "prepared").column("train", "I1").tolist() == counts


def test_no_rows_at_all_is_an_error(criteo_schema: Schemas, prepare_files: Prepare) -> None:
    with pytest.raises(RawDataError, match="no rows in any input file"):
        prepare_files(criteo_schema(1, 1), {"a": b"", "b": b"\n\n"})


@pytest.mark.parametrize("groups", [(1000,), (1, 7, 992)])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_row_of_parquet_files_once_over_all_ranks(
    groups: tuple[int, ...], world_size: int, tmp_path: Path
) -> None:
    """B09: odd row groups, and a file without rows."""
    table = pa.table({"label": np.arange(1000) % 2, "x": np.arange(1000.0), "c": np.arange(1000)})
    schema = Schema(
        format=RawFormat(kind="parquet"),
        dense={"x": DenseColumn("identity")},
        sparse={"c": SparseColumn("int", "identity", rows=1000)},
        split=Split("in_order", 0, 0),
    )
    paths = [tmp_path / f"part_{n}.parquet" for n in range(2)]
    pq.write_table(table.slice(0, 0), paths[0])
    with pq.ParquetWriter(paths[1], table.schema) as writer:
        start = 0
        for size in groups:
            writer.write_table(table.slice(start, size), row_group_size=size)
            start += size
    prepare(schema, RawInputs(paths), tmp_path / "prepared")
    dataset = PreparedDataset(tmp_path / "prepared")
    rows = []
    for rank in range(world_size):
        order = Order(64, shuffle=True, rank=rank, world_size=world_size)
        for batch in dataset.batches("train", order):
            assert batch.dense_BN[:, 0].tolist() == batch.row_B.tolist()
            assert batch.ids.values_L.tolist() == batch.row_B.tolist()
            rows += batch.row_B.tolist()
    assert sorted(rows) == list(range(1000))


# ---- the same mapping in training and prediction


@pytest.mark.parametrize("labelled", [True, False])
def test_raw_files_read_through_the_manifest_equal_the_prepared_part(
    labelled: bool,
    criteo_lines: Lines,
    criteo_schema: Schemas,
    prepare_files: Prepare,
    tmp_path: Path,
) -> None:
    """B01, B03: prediction sees the transforms and ids that training saw."""
    lines = criteo_lines(300, 3, 4)
    schema = criteo_schema(3, 4, transform="standardise", min_count=2, split=Split("given"))
    schema.dense["I1"] = DenseColumn("log1p")
    schema.sparse["C1"] = SparseColumn(missing="empty")
    schema.sparse["C2"] = SparseColumn("hex", "hash", rows=9)
    files = {"train": b"".join(lines[:200]), "test": b"".join(lines[200:])}
    prepare_files(schema, files, file_parts=[TRAIN, TEST])
    root = tmp_path / "prepared"
    manifest = load_manifest(root)
    new = [line if labelled else line.split(b"\t", 1)[1] for line in lines[200:]]
    path = tmp_path / "new.tsv"
    path.write_bytes(b"".join(new))
    mapper = load_row_mapper(root, manifest)
    tally = PartTally([f.name for f in manifest.features])
    found = list(raw_batches(manifest, mapper, [path], labelled, 100, tally))
    (expected,) = PreparedDataset(root).batches("test", Order(100))
    assert len(found) == 1
    order = np.argsort(expected.row_B.numpy())
    assert found[0].row_B.tolist() == list(range(100))
    assert found[0].dense_BN.tolist() == expected.dense_BN[order].tolist()
    for n in range(100):
        ours, theirs = found[0].narrow(n, n + 1), expected.narrow(int(order[n]), int(order[n]) + 1)
        assert ours.ids.values_L.tolist() == theirs.ids.values_L.tolist()
        assert ours.ids.offsets.tolist() == theirs.ids.offsets.tolist()
    assert (found[0].label_B is not None) is labelled


# ---- real files


def test_real_criteo_rows(shared_data: Path, criteo_schema: Schemas, tmp_path: Path) -> None:
    files = [shared_data / "criteo_kaggle_8k" / f"{n}.tsv" for n in ("train", "dev", "test")]
    schema = criteo_schema(min_count=4, split=Split("given"))
    manifest = prepare(schema, RawInputs(files, [TRAIN, VALID, TEST]), tmp_path)
    assert [manifest.parts[part].rows for part in PARTS] == [7200, 409, 391]
    rows = [line.rstrip("\n").split("\t") for line in files[0].read_text().splitlines(True)]
    positives = sum(row[0] == "1" for row in rows)
    assert manifest.parts["train"].label_rate == positives / 7200
    for position in (0, 2, 8, 21):
        tokens = [row[14 + position] for row in rows]
        counts = Counter(token for token in tokens if token)
        kept = sum(count >= 4 for count in counts.values())
        name = f"C{position + 1}"
        assert manifest.table_rows[name] == 2 + kept
        assert manifest.parts["train"].missing[name] == tokens.count("")
        rare = sum(count for count in counts.values() if count < 4)
        assert manifest.parts["train"].unknown[name] == rare
