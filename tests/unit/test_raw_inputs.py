"""Which files a path, a pattern or a folder names; what a file is by its first bytes."""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data import raw
from data.errors import RawDataError, UserError
from data.raw import RawReader
from data.raw_files import has_labels
from data.raw_inputs import expand_inputs
from data.schema import DenseColumn, RawFormat, Schema, SparseColumn

TREE = [
    "a/day=2/part-0.csv",
    "a/day=10/part-0.csv",
    "a/day=10/sub/part-1.csv",
    "a/day=2/_SUCCESS",
    "a/day=2/.part-0.csv.crc",
    "a/_temporary/part-9.csv",
    "a/.hidden/part-8.csv",
    "top.csv",
    "_own.csv",
]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in TREE:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1\t2\n")
    (tmp_path / "empty").mkdir()
    return tmp_path


ALL = ["a/day=2/part-0.csv", "a/day=10/part-0.csv", "a/day=10/sub/part-1.csv"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("a", ALL),
        ("a/", ALL),
        ("a/day=*", ALL),
        ("a/*", ALL),
        ("a/**", ALL),
        ("a/**/*.csv", ALL),
        ("**/part-*.csv", ALL),
        ("a/*/*.csv", ALL[:2]),
        ("a/day=10", ALL[1:]),
        ("a/day=2/*", ALL[:1]),
        ("*.csv", ["top.csv"]),
        ("_own.csv", ["_own.csv"]),
        ("_*.csv", ["_own.csv"]),
        ("a/_temporary/*.csv", ["a/_temporary/part-9.csv"]),
        ("a/day=2/_SUCCESS", ["a/day=2/_SUCCESS"]),
    ],
)
def test_f07_a_pattern_or_folder_means_all_files_below(
    pattern: str, expected: list[str], tree: Path
) -> None:
    found = expand_inputs(pattern, tree, "data.raw")
    order = sorted(expected, key=lambda name: (int("day=10" in name), name))
    assert [str(path.relative_to(tree)) for path in found] == order


def test_f07_an_empty_folder_and_a_folder_of_markers_are_told_as_folders(tree: Path) -> None:
    with pytest.raises(UserError, match=r"^data\.raw=empty: the folder holds no file"):
        expand_inputs("empty", tree, "data.raw")
    (tree / "empty" / "_SUCCESS").touch()
    with pytest.raises(UserError, match="the folder holds no file"):
        expand_inputs("empty", tree, "data.raw")
    with pytest.raises(UserError, match=r"no such file .*_SUCCESS and no file beside it"):
        expand_inputs("empty/*", tree, "data.raw")


def test_f07_a_prepared_dataset_is_no_folder_of_raw_files(tree: Path) -> None:
    (tree / "a" / "prepared" / "train").mkdir(parents=True)
    (tree / "a" / "prepared" / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match=r"data\.raw: .*prepared holds a prepared dataset"):
        expand_inputs("a", tree, "data.raw")


def test_f07_links_to_folders_are_followed_once(tree: Path) -> None:
    (tree / "a" / "day=2" / "round").symlink_to(tree / "a")
    (tree / "links").mkdir()
    (tree / "links" / "day").symlink_to(tree / "a" / "day=10")
    assert len(expand_inputs("a", tree, "data.raw")) == 3
    assert len(expand_inputs("links", tree, "data.raw")) == 2


def test_f53_digits_of_other_kinds_in_names(tmp_path: Path) -> None:
    """A superscript two is a digit to `isdigit` but no number to `int`."""
    for name in ("x².csv", "x2.csv", "x10.csv", "x٣.csv"):
        (tmp_path / name).touch()
    names = [path.name for path in expand_inputs("*.csv", tmp_path, "data.raw")]
    assert names[:2] == ["x2.csv", "x10.csv"]
    assert len(names) == 4


# ---- what a file is


def packed(packing: str, text: bytes) -> bytes:
    if packing == "zst":
        return pa.compress(text, "zstd", asbytes=True)
    pack: dict[str, Callable[[bytes], bytes]] = {
        "gz": gzip.compress,
        "bz2": bz2.compress,
        "xz": lzma.compress,
        "none": lambda data: data,
    }
    return pack[packing](text)


def schema_of(**form: object) -> Schema:
    columns = [] if form.get("header") else ["label", "x", "c"]
    return Schema(
        format=RawFormat(columns=columns, **form),  # type: ignore[arg-type]
        dense={"x": DenseColumn()},
        sparse={"c": SparseColumn(token="int")},
    )


def num_rows(path: Path, schema: Schema) -> int:
    reader = RawReader(schema)
    return sum(reader.parse(piece).num_rows for piece in reader.slices(path))


TEXT = b"".join(b"%d\t%d\t%d\n" % (n % 2, n, n * 7) for n in range(3000))
PACKINGS = ["gz", "bz2", "xz", "zst"]


@pytest.mark.parametrize("packing", ["none", *PACKINGS])
@pytest.mark.parametrize("name", ["raw", "RAW.GZ", "raw.csv.zst", "raw.bz2", "raw.xz"])
def test_f53_f54_a_file_is_unpacked_by_its_content_whatever_its_name(
    name: str, packing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw, "SLICE_BYTES", 1000)
    path = tmp_path / name
    path.write_bytes(packed(packing, TEXT))
    if packing == "none" and name != "raw":
        with pytest.raises(RawDataError, match="damaged or cut short"):
            num_rows(path, schema_of())
        return
    assert num_rows(path, schema_of()) == 3000
    assert has_labels(path, schema_of())


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_f54_damage_is_told_with_the_file(packing: str, damage: str, tmp_path: Path) -> None:
    content = packed(packing, TEXT)
    path = tmp_path / f"raw.{packing}"
    middle = len(content) // 2
    changed = {
        "cut": content[:middle],
        "flipped": content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :],
        "empty": b"",
    }
    path.write_bytes(changed[damage])
    with pytest.raises(RawDataError, match=rf"raw\.{packing}") as error:
        num_rows(path, schema_of())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"PK\x03\x04rest", "a zip archive"),
        ("1\t2\t3\n".encode("utf-16"), "UTF-16 text; convert it to UTF-8"),
        (b"7z\xbc\xaf\x27\x1crest", "a 7-Zip archive"),
        (b"SQLite format 3\x00", "an SQLite database"),
    ],
)
def test_f54_other_kinds_of_files_are_named(content: bytes, told: str, tmp_path: Path) -> None:
    path = tmp_path / "raw.csv"
    path.write_bytes(content)
    with pytest.raises(RawDataError, match=f"it is {told}"):
        num_rows(path, schema_of())
    with pytest.raises(RawDataError, match=f"it is {told}"):
        has_labels(path, schema_of(header=True))


def test_f54_parquet_under_kind_csv_and_the_reverse(tmp_path: Path) -> None:
    path = tmp_path / "raw"
    pq.write_table(pa.table({"label": [0]}), path)
    with pytest.raises(RawDataError, match=r"set data\.schema\.format\.kind=parquet"):
        num_rows(path, schema_of())
    path.write_bytes(TEXT)
    with pytest.raises(RawDataError, match="not a readable parquet file"):
        num_rows(path, schema_of(kind="parquet"))


# ---- any bytes


def check_any_bytes(path: Path, content: bytes, schema: Schema) -> None:
    """Reads as rows, or is refused in one line that names the file."""
    path.write_bytes(content)
    for read in (lambda: num_rows(path, schema), lambda: has_labels(path, schema, with_value=True)):
        try:
            read()
        except RawDataError as error:
            assert str(error).startswith(str(path))  # noqa: PT017
            assert len(str(error).splitlines()) == 1, str(error)  # noqa: PT017


FORMS = [
    {"header": True, "delimiter": ",", "quote": '"'},
    {"delimiter": "\t"},
    {"delimiter": ",", "quote": '"', "trim": True, "missing": ["", "?"]},
    {"kind": "parquet"},
]
ROWS = [b"label,x,c\n", b"1,2,3\n", b'0,"1",4\r\n', b"0\t1\t2\n", b"\n", b"1,0x1f,0x1f\n"]
PIECES = st.sampled_from([*ROWS, b"\r", b'"', b'\\"', b"\x00", b"\xef\xbb\xbf", b"\xff", b"\t"])


@st.composite
def contents(draw: st.DrawFn) -> bytes:
    """Rows with odd bytes between them, perhaps packed, perhaps cut or changed."""
    content = b"".join(draw(st.lists(PIECES | st.binary(max_size=5), max_size=12)))
    content = packed(draw(st.sampled_from(["none", "none", "gz", "bz2", "xz"])), content)
    if draw(st.booleans()) and content:
        at = draw(st.integers(0, len(content) - 1))
        content = (
            content[:at] + draw(st.binary(max_size=3)) + content[at + draw(st.integers(0, 2)) :]
        )
    return content


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=str)
@settings(
    derandomize=True,
    deadline=None,
    max_examples=400,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(content=contents())
def test_f53_f54_any_bytes_are_read_or_refused_in_one_line(
    form: dict[str, object], content: bytes, tmp_path: Path
) -> None:
    check_any_bytes(tmp_path / "raw", content, schema_of(**form))


@pytest.mark.parametrize("form", FORMS, ids=str)
@settings(
    derandomize=True,
    deadline=None,
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(content=contents())
def test_f53_f54_some_bytes_are_read_or_refused_in_one_line(
    form: dict[str, object], content: bytes, tmp_path: Path
) -> None:
    check_any_bytes(tmp_path / "raw", content, schema_of(**form))
