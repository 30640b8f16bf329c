"""From `data.*` keys to a dataset: which folder, which files, and what is refused."""

from __future__ import annotations

import fcntl
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data.errors import UserError
from data.progress import SilentListener
from data.schema import DenseColumn, RawFormat, Schema, SparseColumn, Split
from data.synthetic import SyntheticConfig
from dlrm.config import DataConfig
from dlrm.datasets import dataset_root, make_dataset, open_dataset

TINY = SyntheticConfig(num_train=70, num_valid=20, num_test=10, cardinality_scale=1e-6)


def schema(kind: str = "in_order") -> Schema:
    return Schema(
        name="clicks",
        format=RawFormat(columns=["label", "x", "c"]),
        dense={"x": DenseColumn()},
        sparse={"c": SparseColumn(token="text")},
        split=Split(kind=kind, valid=0.2, test=0.1),
    )


def data_config(tmp_path: Path, **values: Any) -> DataConfig:
    return DataConfig(**{"name": "clicks", "cache": str(tmp_path / "cache"), **values})


def write(path: Path, labels: str) -> None:
    path.write_text("".join(f"{label}\t{n}\tt{n % 3}\n" for n, label in enumerate(labels)))


def rows(data: DataConfig, base: Path) -> list[int]:
    dataset = open_dataset(data, base, SilentListener())
    return [dataset.num_rows(part) for part in ("train", "valid", "test")]


def test_one_file_is_split_by_the_schema(tmp_path: Path) -> None:
    write(tmp_path / "raw.tsv", "10" * 50)
    data = data_config(tmp_path, raw="raw.tsv", schema=schema())
    assert rows(data, tmp_path) == [70, 20, 10]
    # Without data.root it lies in the cache, and is found there again.
    (found,) = (tmp_path / "cache").iterdir()
    assert found == dataset_root(data, tmp_path)
    (tmp_path / "raw.tsv").touch()
    assert rows(data, tmp_path) == [70, 20, 10]


def test_a_glob_and_a_list_are_several_files(tmp_path: Path) -> None:
    for number in (1, 2, 10):
        write(tmp_path / f"day_{number}.tsv", "10" * number)
    both = data_config(tmp_path, raw="day_*.tsv", schema=schema())
    listed = data_config(tmp_path, raw=["day_1.tsv", "day_2.tsv", "day_10.tsv"], schema=schema())
    inputs = [i.file for i in make_dataset(both, tmp_path, SilentListener()).inputs]
    assert inputs == ["day_1.tsv", "day_2.tsv", "day_10.tsv"]  # Numbers sorted as numbers.
    assert inputs == [i.file for i in make_dataset(listed, tmp_path, SilentListener()).inputs]


def test_given_parts_are_used_as_given(tmp_path: Path) -> None:
    for number, part in enumerate(("train", "valid", "test")):
        write(tmp_path / f"{part}.tsv", "10" * (9 - number))
    data = data_config(
        tmp_path,
        raw_train="train.tsv",
        raw_valid="valid.tsv",
        raw_test="test.tsv",
        schema=schema("given"),
    )
    assert rows(data, tmp_path) == [18, 16, 14]
    assert rows(replace(data, raw_valid=None, root="other"), tmp_path) == [18, 0, 14]


def test_the_cache_tells_datasets_apart(tmp_path: Path) -> None:
    """Another schema, other files, another start folder or other settings: another dataset."""
    data = data_config(tmp_path, raw="raw.tsv", schema=schema())
    other_schema = replace(data, schema=replace(schema(), name="other"))
    folders = [
        dataset_root(data, tmp_path),
        dataset_root(other_schema, tmp_path),
        dataset_root(replace(data, raw="raw2.tsv"), tmp_path),
        dataset_root(data, tmp_path / "elsewhere"),
        dataset_root(data_config(tmp_path, synthetic=TINY), tmp_path),
        dataset_root(data_config(tmp_path, synthetic=replace(TINY, seed=1)), tmp_path),
        dataset_root(data_config(tmp_path, synthetic=replace(TINY, num_test=11)), tmp_path),
    ]
    assert len(set(folders)) == len(folders)
    assert {folder.parent for folder in folders} == {tmp_path / "cache"}
    # What is no part of the data changes nothing.
    same = replace(data, batch_size=3, shuffle=False)
    assert dataset_root(same, tmp_path) == folders[0]
    raw_out = replace(TINY, raw_out="x.tsv")
    assert dataset_root(data_config(tmp_path, synthetic=raw_out), tmp_path) == folders[4]


def test_a_root_is_relative_to_the_start_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for root, folder in (
        ("d", tmp_path / "base" / "d"),
        ("/abs/d", Path("/abs/d")),
        ("~/d", tmp_path / "home" / "d"),
    ):
        data = data_config(tmp_path, raw="raw.tsv", root=root)
        assert dataset_root(data, tmp_path / "base") == folder


def test_a_prepared_root_needs_no_raw_files(tmp_path: Path) -> None:
    write(tmp_path / "raw.tsv", "10" * 50)
    rows(data_config(tmp_path, raw="raw.tsv", root="d", schema=schema()), tmp_path)
    (tmp_path / "raw.tsv").unlink()
    alone = data_config(tmp_path, root="d", schema=schema())
    assert rows(alone, tmp_path) == [70, 20, 10]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, r"data=clicks needs raw files .*data\.raw=.*data\.root="),
        ({"raw": "no.tsv"}, r"data\.raw=no\.tsv"),
        ({"raw": "*.none"}, r"data\.raw=\*\.none"),
        ({"raw": ["raw.tsv", "no.tsv"]}, r"data\.raw=no\.tsv"),
        ({"raw": ["raw.tsv", "raw.tsv"]}, r"data\.raw: named twice"),
        ({"raw_train": "raw.tsv"}, r"data\.raw_train is set, but data\.schema\.split\.kind=in_"),
        ({"raw": "raw.tsv", "schema": schema("given")}, r"data\.raw is set, but .*kind=given"),
        (
            {"raw_train": "raw.tsv", "raw_test": "no.tsv", "schema": schema("given")},
            r"data\.raw_test=no\.tsv",
        ),
        ({"root": "nothing"}, r"data\.root=.*nothing: no prepared dataset there"),
    ],
)
def test_what_names_no_data_is_refused(
    values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path / "raw.tsv", "10" * 50)
    data = data_config(tmp_path, **{"schema": schema(), **values})
    with pytest.raises(UserError, match=message):
        open_dataset(data, tmp_path, SilentListener())
    # Nothing that looks like a dataset is left.
    assert not list(tmp_path.rglob("manifest.json"))


def test_another_schema_is_refused_naming_the_difference(tmp_path: Path) -> None:
    write(tmp_path / "raw.tsv", "10" * 50)
    rows(data_config(tmp_path, raw="raw.tsv", root="d", schema=schema()), tmp_path)
    other = schema()
    other.sparse["c"].min_count = 5
    with pytest.raises(UserError, match=r"data\.schema\.sparse\.c\.min_count: .* asked for 5"):
        open_dataset(data_config(tmp_path, root="d", schema=other), tmp_path, SilentListener())


def test_changed_raw_files_are_refused_and_prepared_again_on_demand(tmp_path: Path) -> None:
    """The same name, other rows: neither the old dataset nor a new one without being asked."""
    write(tmp_path / "raw.tsv", "10" * 50)
    data = data_config(tmp_path, raw="raw.tsv", schema=schema())
    rows(data, tmp_path)
    write(tmp_path / "raw.tsv", "10" * 60)
    with pytest.raises(UserError, match=r"data\.overwrite=true"):
        rows(data, tmp_path)
    assert rows(replace(data, overwrite=True), tmp_path) == [84, 24, 12]


def test_generated_data(tmp_path: Path) -> None:
    data = data_config(tmp_path, synthetic=TINY)
    assert rows(data, tmp_path) == [70, 20, 10]
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.parquet")}
    assert rows(data, tmp_path) == [70, 20, 10]
    assert {path: path.stat().st_mtime_ns for path in files} == files
    other = data_config(
        tmp_path, synthetic=replace(TINY, seed=1), root=str(next(iter(files)).parents[1])
    )
    with pytest.raises(UserError, match=r"data\.root=.* holds another dataset"):
        rows(other, tmp_path)
    assert rows(replace(other, overwrite=True), tmp_path) == [70, 20, 10]


@pytest.mark.parametrize("kind", ["raw", "synthetic"])
def test_b45_a_finished_dataset_serves_several_runs_at_once(kind: str, tmp_path: Path) -> None:
    """Runs started together all check the same finished dataset: none needs the writer's lock."""
    write(tmp_path / "raw.tsv", "10" * 50)
    values = {"raw": "raw.tsv", "schema": schema()} if kind == "raw" else {"synthetic": TINY}
    data = data_config(tmp_path, root="d", **values)
    assert rows(data, tmp_path) == [70, 20, 10]
    with open(tmp_path / "d" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert rows(data, tmp_path) == [70, 20, 10]
