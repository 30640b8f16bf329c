"""What a table's rows stand for, of every vocabulary rule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.errors import UserError
from data.manifest import Manifest
from data.schema import RawFormat, Schema, SparseColumn, Split
from dlrm.export_rows import row_meanings

LINES = (
    b"1\t0A\t-5\tred\t7\t2\n"
    b"0\tff\t-5\tred\t8\t0\n"
    b"1\t123456789abc\t12\t\t7\t9\n"
    b"0\t0a\t12\tblue\t9\t1\n"
    b"0\t\t-5\tgreen\t9\t1\n"
)


@pytest.fixture
def prepared(tmp_path: Path, prepare_files: Callable[..., Manifest]) -> tuple[Path, Manifest]:
    schema = Schema(
        name="kinds",
        format=RawFormat(columns=["label", "hex", "int", "text", "hash", "identity"]),
        sparse={
            "hex": SparseColumn(token="hex"),
            "int": SparseColumn(token="int", missing="empty"),
            "text": SparseColumn(token="text", min_count=2),
            "hash": SparseColumn(token="int", vocabulary="hash", rows=4),
            "identity": SparseColumn(
                token="int",
                vocabulary="identity",
                rows=5,
                missing="empty",
                out_of_range="last_row",
            ),
        },
        split=Split(valid=0.0, test=0.0),
    )
    root = tmp_path / "prepared"
    return root, prepare_files(schema, {"raw.tsv": LINES}, root)


def meanings(prepared: tuple[Path, Manifest], table: str, work: Path) -> list[tuple[Any, ...]]:
    root, manifest = prepared
    work.mkdir()
    found: list[tuple[Any, ...]] = []
    for window in row_meanings(root, manifest, table, work):
        assert window.start == len(found)
        found += zip(window.kinds.to_pylist(), window.tokens.to_pylist(), strict=True)
    return found


@pytest.mark.parametrize("window", [1, 2, 100])
@pytest.mark.parametrize(
    ("table", "expected"),
    [
        # By falling count, equal counts by rising key; the case of hexadecimal digits is lost.
        (
            "hex",
            [
                ("unknown", None),
                ("missing", None),
                ("token", "0000000a"),
                ("token", "000000ff"),
                ("token", "123456789abc"),
            ],
        ),
        ("int", [("unknown", None), ("token", "-5"), ("token", "12")]),
        # Seen once: blue and green have no row.
        ("text", [("unknown", None), ("missing", None), ("token", "red")]),
        ("hash", [("missing", None), ("hash", None), ("hash", None), ("hash", None)]),
        ("identity", [*(("token", str(row)) for row in range(4)), ("out_of_range", None)]),
    ],
)
def test_every_row_is_told(
    table: str,
    expected: list[tuple[str, str | None]],
    window: int,
    prepared: tuple[Path, Manifest],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dlrm.export_rows.WINDOW_ROWS", window)
    monkeypatch.setattr("dlrm.export_rows._READ_ROWS", 2)
    assert meanings(prepared, table, tmp_path / "work") == expected


def test_a_dictionary_without_a_kept_token_has_an_unused_row(
    tmp_path: Path, prepare_files: Callable[..., Manifest]
) -> None:
    schema = Schema(
        format=RawFormat(columns=["label", "c"]),
        sparse={"c": SparseColumn(min_count=9)},
        split=Split(valid=0.0, test=0.0),
    )
    root = tmp_path / "prepared"
    manifest = prepare_files(schema, {"raw.tsv": b"1\tx\n0\ty\n"}, root)
    found = meanings((root, manifest), "c", tmp_path / "work")
    assert found == [("unknown", None), ("missing", None), ("unused", None)]


def test_a_missing_dictionary_is_named(prepared: tuple[Path, Manifest], tmp_path: Path) -> None:
    path = prepared[0] / "vocabulary" / "hex.parquet"
    path.unlink()
    with pytest.raises(UserError, match=r"hex\.parquet can't be read"):
        meanings(prepared, "hex", tmp_path / "work")
