"""Hashed tables: rows by chance for any ids, how many tokens share them, older datasets."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from data.errors import UserError
from data.hashing import DistinctKeys, expected_rows, mix
from data.manifest import Manifest, load_manifest
from data.raw_batches import load_row_mapper, raw_batches
from data.schema import RawFormat, Schema, SparseColumn, Split
from data.write_pass import PartTally
from dlrm.config import WarmStartConfig
from dlrm.data_notes import hashed_tables
from dlrm.warm_start_rows import RowMatcher

Prepare = Callable[..., Manifest]
Digests = Callable[[Path], dict[str, str]]


def schema(rows: int, token: str = "int") -> Schema:
    return Schema(
        format=RawFormat(columns=["label", "item"]),
        sparse={"item": SparseColumn(token=token, vocabulary="hash", rows=rows)},
        split=Split(valid=0, test=0),
    )


def lines(ids: list[int], token: str = "int") -> bytes:
    texts = [f"{i:x}" if token == "hex" else str(i) for i in ids]
    return b"".join(f"{n % 2}\t{text}\n".encode() for n, text in enumerate(texts))


def scored_rows(root: Path, path: Path) -> list[int]:
    manifest = load_manifest(root)
    mapper, tally = load_row_mapper(root, manifest), PartTally(["item"])
    batches = raw_batches(manifest, mapper, [path], True, 1000, tally)
    return [i for batch in batches for i in batch.ids.values_L.tolist()]


@pytest.mark.parametrize("rows", [1001, 10_001, 1000, 4097])
@pytest.mark.parametrize("token", ["int", "hex", "text"])
@pytest.mark.parametrize("step", [1, 1000, 4096, 10_000, -(2**40)])
def test_c04_f05_ids_in_round_steps_use_as_many_rows_as_chance_says(
    step: int, token: str, rows: int, prepare_files: Prepare
) -> None:
    ids = [7 + abs(step) * k if token == "hex" else 7 + step * k for k in range(200)]
    manifest = prepare_files(schema(rows, token), {"raw": lines(ids, token)})
    counts = manifest.counts["item"]
    assert counts["distinct_tokens"] == 200
    # Never more than six standard errors away (the variance is below n²/2m).
    expected = expected_rows(200, rows - 1)
    assert abs(counts["distinct"] - expected) < 6 * (200**2 / 2 / rows) ** 0.5 + 1


def test_c04_f05_forty_ids_in_steps_of_1000_use_forty_rows(prepare_files: Prepare) -> None:
    manifest = prepare_files(schema(10_001), {"raw": lines([1000 * k for k in range(40)])})
    assert manifest.counts["item"]["distinct"] >= 38, "ten without mixing"
    (line,) = hashed_tables(manifest)
    assert line.startswith("hash    item: 40 tokens on ")
    assert "of 10,000 rows" in line


def test_f05_tokens_of_the_training_part_are_counted_once(prepare_files: Prepare) -> None:
    """The tokens of held-out rows have no part in what is reported."""
    held_out = schema(100)
    held_out.split = Split(valid=0.25, test=0.25)
    manifest = prepare_files(held_out, {"raw": lines([5, 6, 5, 6, 7, 8, 9, 10])})
    assert manifest.counts["item"]["distinct_tokens"] == 2


def test_f05_far_fewer_rows_than_chance_says_are_warned_of(prepare_files: Prepare) -> None:
    manifest = prepare_files(schema(10_001), {"raw": lines(list(range(2000)))})
    assert not any(line.startswith("warning") for line in hashed_tables(manifest))
    manifest.counts["item"]["distinct"] = 10
    _, warning = hashed_tables(manifest)
    assert warning.startswith("warning item: by chance 2,000 tokens would use about 1,813 rows")


def as_prepared_before(root: Path, rows: int) -> None:
    """Rewrites a manifest as it was before keys were mixed."""
    path = root / "manifest.json"
    values: dict[str, Any] = json.loads(path.read_text())
    assert (values.pop("hash_rule"), values["format_version"]) == ("mixed", 2)
    values["format_version"] = 1
    del values["counts"]["item"]["distinct_tokens"]
    path.write_text(json.dumps(values, indent=1) + "\n")


def test_f05_an_older_dataset_keeps_its_rule_and_its_digest(
    prepare_files: Prepare, tmp_path: Path
) -> None:
    """A model trained on it scores raw files by the rows that it learnt."""
    ids = [1000 * k for k in range(40)]
    new = prepare_files(schema(10_001), {"raw": lines(ids)})
    root, raw = tmp_path / "prepared", tmp_path / "raw" / "raw"
    mixed = (1 + mix(np.array(ids, np.uint64)) % np.uint64(10_000)).tolist()
    assert scored_rows(root, raw) == mixed
    assert load_manifest(root).digest() == new.digest()
    as_prepared_before(root, 10_001)
    old = load_manifest(root)
    assert scored_rows(root, raw) == [1 + i % 10_000 for i in ids]
    assert old.to_json() == (root / "manifest.json").read_text(), "so its digest stays"
    assert hashed_tables(old) == []


def test_f05_a_dataset_of_a_later_format_is_refused(prepare_files: Prepare, tmp_path: Path) -> None:
    prepare_files(schema(11), {"raw": lines([1, 2])})
    path = tmp_path / "prepared" / "manifest.json"
    path.write_text(path.read_text().replace('"format_version": 2', '"format_version": 3'))
    with pytest.raises(UserError, match=r"format 3, this version reads 1 and 2"):
        load_manifest(tmp_path / "prepared")


@pytest.mark.parametrize("num_keys", [0, 1, 16_383, 16_384, 200_000])
def test_f05_distinct_keys_are_counted_in_any_order(num_keys: int) -> None:
    hashes = mix(np.arange(num_keys, dtype=np.uint64) * np.uint64(1000))
    one, other = DistinctKeys(), DistinctKeys()
    for piece in np.array_split(hashes, 7):
        one.add(piece)
        one.add(piece[::2])
    other.add(hashes[::-1])
    assert one.estimate() == other.estimate()
    exact = num_keys < 1 << 14
    assert abs(one.estimate() - num_keys) <= (0 if exact else 0.04 * num_keys)


@pytest.mark.parametrize("fields", [("hash_rule",), ()], ids=["older checkpoint", "same rule"])
def test_f05_a_warm_start_across_the_rules_is_refused(
    fields: tuple[str, ...], prepare_files: Prepare
) -> None:
    """A checkpoint from before keys were mixed has its ids on other rows."""
    manifest = prepare_files(schema(11), {"raw": lines(list(range(20)))})
    stored = asdict(manifest.features[0])
    for name in fields:
        del stored[name]
    info: Any = SimpleNamespace(
        values={"features": [stored], "data_digest": "another"},
        tables={"item": SimpleNamespace(rows=11)},
    )
    dataset: Any = SimpleNamespace(manifest=manifest)
    found = RowMatcher(info, dataset, WarmStartConfig()).rule_differences(["item"])
    assert bool(found) is bool(fields)
    if fields:
        assert "hash_rule is mixed, stored modulo" in found["item"]
