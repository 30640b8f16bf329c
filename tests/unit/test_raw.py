"""Raw files: what is read, and the exact line named where something is wrong."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data import raw
from data.errors import RawDataError, UserError
from data.raw import RawBlock, RawReader
from data.raw_files import has_labels
from data.raw_inputs import expand_inputs
from data.schema import DenseColumn, LabelColumn, RawFormat, Schema, SparseColumn, resolve_features
from data.tokens import MISSING, key_of_text

Lines = Callable[..., list[bytes]]
Schemas = Callable[..., Schema]


def read(path: Path, schema: Schema, *, labelled: bool = True) -> list[RawBlock]:
    reader = RawReader(schema, labelled=labelled)
    return [reader.parse(piece) for piece in reader.slices(path)]


def keys_of(blocks: list[RawBlock], name: str) -> list[int | None]:
    """One key per row (or id), None where missing."""
    columns = [block.sparse[name] for block in blocks]
    return [
        None if code == MISSING else int(column.keys[code])
        for column in columns
        for code in column.codes
    ]


def as_rows(blocks: list[RawBlock], schema: Schema) -> list[tuple[Any, ...]]:
    """Rows as plain tuples; a missing dense value is None."""
    columns: list[list[Any]] = []
    if blocks and blocks[0].label_B is not None:
        columns.append([int(v) for b in blocks for v in np.asarray(b.label_B)])
    for name in schema.dense:
        values = [float(v) for block in blocks for v in block.dense[name]]
        columns.append([None if np.isnan(v) else v for v in values])
    columns += [keys_of(blocks, name) for name in schema.sparse]
    return list(zip(*columns, strict=True))


def plain_rows(lines: list[bytes], schema: Schema, *, labelled: bool = True) -> list[Any]:
    """The same by a few lines of plain Python."""
    rows = []
    for line in lines:
        fields = line.decode().rstrip("\r\n").split("\t")
        row: list[Any] = [int(fields.pop(0))] if labelled else []
        for field, kind in zip(
            fields, ["dense"] * len(schema.dense) + ["hex"] * len(schema.sparse), strict=True
        ):
            if field == "":
                row.append(None)
            else:
                row.append(float(field) if kind == "dense" else key_of_text(field, kind))
        rows.append(tuple(row))
    return rows


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def to_file(content: bytes, name: str = "raw.tsv") -> Path:
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return to_file


@pytest.fixture
def broken(write: Callable[..., Path]) -> Callable[..., RawDataError]:
    """Reads a file that must be refused; returns the error."""

    def error_of(content: bytes, schema: Schema, name: str = "raw.tsv") -> RawDataError:
        with pytest.raises(RawDataError) as caught:
            read(write(content, name), schema)
        assert name in str(caught.value), "the file is named"
        return caught.value

    return error_of


# ---- the same rows written in other ways (B07)

VARIANTS: dict[str, Callable[[list[bytes]], bytes]] = {
    "LF": lambda lines: b"".join(lines),
    "CRLF": lambda lines: b"".join(line[:-1] + b"\r\n" for line in lines),
    "BOM": lambda lines: b"\xef\xbb\xbf" + b"".join(lines),
    "no last newline": lambda lines: b"".join(lines)[:-1],
    "CRLF, no last newline": lambda lines: b"".join(line[:-1] + b"\r\n" for line in lines)[:-2],
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("slice_bytes", [8 << 20, 100])
def test_line_ends_and_byte_order_mark_change_nothing(
    variant: str,
    slice_bytes: int,
    criteo_lines: Lines,
    criteo_schema: Schemas,
    write: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(raw, "SLICE_BYTES", slice_bytes)
    lines, schema = criteo_lines(10), criteo_schema()
    blocks = read(write(VARIANTS[variant](lines)), schema)
    assert as_rows(blocks, schema) == plain_rows(lines, schema)
    assert sum(block.num_blank_lines for block in blocks) == 0


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_blank_lines_are_skipped_and_counted(
    end: bytes, criteo_lines: Lines, criteo_schema: Schemas, write: Callable[..., Path]
) -> None:
    lines, schema = criteo_lines(4), criteo_schema()
    ended = [line[:-1] + end for line in lines]
    content = end + ended[0] + end + end + b"".join(ended[1:]) + end
    blocks = read(write(content), schema)
    assert as_rows(blocks, schema) == plain_rows(lines, schema)
    assert sum(block.num_blank_lines for block in blocks) == 4


def test_a_slice_of_blank_lines_only(
    criteo_lines: Lines,
    criteo_schema: Schemas,
    write: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(raw, "SLICE_BYTES", 64)
    lines, schema = criteo_lines(2), criteo_schema()
    blocks = read(write(lines[0] + b"\n" * 500 + lines[1]), schema)
    assert as_rows(blocks, schema) == plain_rows(lines, schema)
    assert sum(block.num_blank_lines for block in blocks) == 500


@given(
    st.lists(st.sampled_from(["row", "blank"]), max_size=25),
    st.integers(12, 400),
    st.booleans(),
    st.booleans(),
)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_slices_cut_a_file_anywhere_and_lose_nothing(
    tmp_path: Path,
    criteo_lines: Lines,
    criteo_schema: Schemas,
    kinds: list[str],
    slice_bytes: int,
    ends_with_newline: bool,
    is_gz: bool,
) -> None:
    rows = criteo_lines(kinds.count("row"), 2, 2)
    schema = criteo_schema(2, 2)
    remaining = iter(rows)
    content = b"".join(next(remaining) if kind == "row" else b"\n" for kind in kinds)
    if not ends_with_newline:
        content = content.removesuffix(b"\n")
    path = tmp_path / ("cut.tsv.gz" if is_gz else "cut.tsv")
    path.write_bytes(gzip.compress(content) if is_gz else content)
    hasher = hashlib.sha256()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(raw, "SLICE_BYTES", slice_bytes)
        reader = RawReader(schema)
        pieces = list(reader.slices(path, hasher))
        blocks = [reader.parse(piece) for piece in pieces]
    assert as_rows(blocks, schema) == plain_rows(rows, schema)
    num_lines = content.count(b"\n") + bool(content and not content.endswith(b"\n"))
    assert sum(block.num_blank_lines for block in blocks) == num_lines - len(rows)
    assert hasher.hexdigest() == hashlib.sha256(path.read_bytes()).hexdigest()
    assert sum(piece.num_file_bytes for piece in pieces) <= path.stat().st_size
    line = 1
    for piece in pieces:
        assert piece.first_line == line
        line += piece.num_lines


# ---- lines that must be refused, by number

LINE = 7


def with_bad_line(lines: list[bytes], bad: bytes) -> bytes:
    """A file whose line 7 is `bad`."""
    return b"".join([*lines[: LINE - 1], bad, *lines[LINE:]])


def replaced(line: bytes, field: int, value: bytes) -> bytes:
    fields = line.rstrip(b"\n").split(b"\t")
    fields[field] = value
    return b"\t".join(fields) + b"\n"


BAD_FIELDS = [
    (0, b"", "label is missing"),
    (0, b"2", "label '2' is none of 0, 1"),
    (0, b" 1", "label ' 1'"),
    (3, b"abc", "I3: 'abc' is no number"),
    (3, b"1_000", "I3: '1_000' is no number"),
    (3, "٣".encode(), "I3: '٣' is no number"),
    (3, b"1,5", "I3: '1,5' is no number"),
    (3, b"inf", "I3: 'inf' isn't finite"),
    (3, b"-Infinity", "I3: '-Infinity' isn't finite"),
    (3, b"nan", "I3: 'nan' isn't finite"),
    (3, b"1e999", "I3: '1e999' isn't finite"),
    (14, b"0000000g", "C1: '0000000g' isn't a hexadecimal id"),
    (39, b"0x12", "C26: '0x12' isn't a hexadecimal id"),
    (39, b"12345678901234567", "C26: '12345678901234567'"),
    (39, b"1234567\xff", "not UTF-8"),
]


@pytest.mark.parametrize(("field", "value", "told"), BAD_FIELDS)
@pytest.mark.parametrize("slice_bytes", [8 << 20, 300], ids=["one slice", "many slices"])
def test_a_bad_field_is_told_with_its_line(
    field: int,
    value: bytes,
    told: str,
    slice_bytes: int,
    criteo_lines: Lines,
    criteo_schema: Schemas,
    broken: Callable[..., RawDataError],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(raw, "SLICE_BYTES", slice_bytes)
    lines = criteo_lines(12)
    # A blank line in front counts as a line, though it is no row.
    lines[2] = b"\n"
    error = broken(with_bad_line(lines, replaced(lines[6], field, value)), criteo_schema())
    assert error.line == LINE
    assert told in str(error)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda line: line[:-1] + b"\tabcdef01\n", "41 fields found, 40 expected"),
        (lambda line: line.split(b"\t", 1)[1], "39 fields found, 40 expected"),
        (lambda line: line.replace(b"\t", b","), "1 fields found, 40 expected; is the delimiter"),
        (lambda line: b"   \n", "1 fields found, 40 expected"),
        (lambda line: line[:90] + b"\r" + line[90:], "carriage return inside the line"),
    ],
    ids=["41 fields", "39 fields", "comma", "blanks only", "bare CR"],
)
@pytest.mark.parametrize("slice_bytes", [8 << 20, 300], ids=["one slice", "many slices"])
def test_a_line_of_another_shape_is_told_with_its_number(
    change: Callable[[bytes], bytes],
    told: str,
    slice_bytes: int,
    criteo_lines: Lines,
    criteo_schema: Schemas,
    broken: Callable[..., RawDataError],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(raw, "SLICE_BYTES", slice_bytes)
    lines = criteo_lines(12)
    error = broken(with_bad_line(lines, change(lines[6])), criteo_schema())
    assert error.line == LINE
    assert told in str(error)


def test_two_rows_joined_by_a_bare_carriage_return(
    criteo_lines: Lines, criteo_schema: Schemas, broken: Callable[..., RawDataError]
) -> None:
    """pyarrow takes it for a line end; line numbers and blank-line counts would be wrong."""
    lines = criteo_lines(3)
    error = broken(lines[0] + lines[1][:-1] + b"\r" + lines[2], criteo_schema())
    assert error.line == 2
    assert "carriage return" in str(error)


def test_a_comma_file_says_that_the_delimiter_is_wrong(
    criteo_lines: Lines, criteo_schema: Schemas, broken: Callable[..., RawDataError]
) -> None:
    content = b"".join(criteo_lines(3)).replace(b"\t", b",")
    error = broken(content, criteo_schema())
    assert error.line == 1
    assert "data.schema.format.delimiter" in str(error)


def test_a_header_in_a_headless_file_says_so(
    criteo_lines: Lines, criteo_schema: Schemas, broken: Callable[..., RawDataError]
) -> None:
    schema = criteo_schema()
    header = "\t".join(schema.format.columns).encode() + b"\n"
    error = broken(header + b"".join(criteo_lines(3)), schema)
    assert error.line == 1
    assert "data.schema.format.header=true" in str(error)


def test_binary_rubbish_is_no_text_file(
    criteo_schema: Schemas, broken: Callable[..., RawDataError], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw, "SLICE_BYTES", 64)
    assert "no line end" in str(broken(b"\0" * 1000, criteo_schema()))


# ---- files without labels (B03)


@pytest.mark.parametrize("first", ["", "12345678", "deadbeef"])
def test_an_unlabelled_file_is_told_apart_and_read_right(
    first: str,
    criteo_lines: Lines,
    criteo_schema: Schemas,
    write: Callable[..., Path],
) -> None:
    """An empty or all-digit first category once let the shifted row pass without an error."""
    schema = criteo_schema()
    unlabelled = [replaced(line.split(b"\t", 1)[1], 13, first.encode()) for line in criteo_lines(5)]
    path = write(b"".join(unlabelled))
    assert has_labels(path, schema) is False
    blocks = read(path, schema, labelled=False)
    assert as_rows(blocks, schema) == plain_rows(unlabelled, schema, labelled=False)
    assert keys_of(blocks, "C1") == [int(first, 16) if first else None] * 5
    with pytest.raises(RawDataError) as error:
        read(path, schema)
    assert error.value.line == 1
    assert "39 fields found, 40 expected" in str(error.value)
    assert "dlrm predict" in str(error.value)


@pytest.mark.parametrize("name", ["raw.tsv", "raw.tsv.gz"])
@pytest.mark.parametrize("front", [b"", b"\xef\xbb\xbf", b"\r\n\n"])
def test_has_labels_of_headless_files(
    name: str, front: bytes, criteo_lines: Lines, criteo_schema: Schemas, write: Any
) -> None:
    content = front + b"".join(criteo_lines(2))
    path = write(gzip.compress(content) if name.endswith(".gz") else content, name)
    assert has_labels(path, criteo_schema()) is True


def test_has_labels_refuses_a_file_of_neither_kind(criteo_schema: Schemas, write: Any) -> None:
    with pytest.raises(RawDataError, match="40 expected with labels or 39 without"):
        has_labels(write(b"1\t2\t3\n"), criteo_schema())


def quoted_schema() -> Schema:
    return Schema(
        format=RawFormat(delimiter=",", header=True, quote='"'),
        label=LabelColumn("y", positive=["yes"], negative=["no"]),
        example_weight="w",
        dense={"age": DenseColumn("identity")},
        sparse={"job": SparseColumn()},
    )


def test_has_labels_by_the_name_in_the_header(write: Any) -> None:
    schema = quoted_schema()
    assert has_labels(write(b'"age","job","y","w"\n'), schema) is True
    assert has_labels(write(b'"age","job"\n1,x\n'), schema) is False


def test_has_labels_of_damaged_files(
    criteo_lines: Lines, criteo_schema: Schemas, write: Any
) -> None:
    packed = gzip.compress(b"".join(criteo_lines(50)))
    with pytest.raises(RawDataError, match="cut short"):
        has_labels(write(packed[:12], "raw.tsv.gz"), criteo_schema())
    parquet = Schema(format=RawFormat(kind="parquet"), sparse={"a": SparseColumn()})
    with pytest.raises(RawDataError, match="not a readable parquet file"):
        has_labels(write(b"PAR1 and no more", "raw.parquet"), parquet)


# ---- headers, quotes, blanks


def test_quotes_and_a_header_in_any_order(write: Any) -> None:
    content = b'"job","unused","w","y","age"\n"a, b",1,0.5,"yes",3\nc,2,2,no,\n"d",3,1,no,"-4"\n'
    (block,) = read(write(content), quoted_schema())
    assert block.label_B is not None
    assert block.weight_B is not None
    assert block.label_B.tolist() == [1, 0, 0]
    assert block.weight_B.tolist() == [0.5, 2, 1]
    assert [None if np.isnan(v) else v for v in block.dense["age"]] == [3, None, -4]
    assert keys_of([block], "job") == [key_of_text(t, "text") for t in ("a, b", "c", "d")]


def test_a_header_without_a_needed_column(write: Any) -> None:
    with pytest.raises(RawDataError) as error:
        read(write(b"age,y,w\n3,yes,1\n"), quoted_schema())
    assert error.value.line == 1
    assert "no column job; it names age, y, w" in str(error.value)


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_header_and_no_rows(end: bytes, write: Any) -> None:
    assert read(write(b'"age","job","y","w"' + end), quoted_schema()) == []
    with pytest.raises(RawDataError, match="has no column job"):
        read(write(b"age,y,w" + end), quoted_schema())


@pytest.mark.parametrize("weight", ["", "-1", "x", "inf", "1e39"])
def test_bad_example_weights(weight: str, write: Any) -> None:
    with pytest.raises(RawDataError) as error:
        read(write(f"age,job,y,w\n1,a,no,1\n2,b,no,{weight}\n".encode()), quoted_schema())
    assert error.value.line == 3
    assert "column w" in str(error.value)


def test_a_byte_order_mark_before_a_header(write: Any) -> None:
    content = b"\xef\xbb\xbfjob,w,y,age\nx,1,yes,3\n"
    schema = quoted_schema()
    assert has_labels(write(content.replace(b"job,w,y", b"y,w,job")), schema) is True
    (block,) = read(write(content), schema)
    assert keys_of([block], "job") == [key_of_text("x", "text")]


def test_other_texts_for_missing(write: Any) -> None:
    """They replace the empty text, which is then a token like any other."""
    schema = Schema(
        format=RawFormat(columns=["label", "x", "a", "n"], missing=["NA", "-"]),
        dense={"x": DenseColumn("identity")},
        sparse={"a": SparseColumn(), "n": SparseColumn(token="int")},
    )
    (block,) = read(write(b"1\tNA\t-\tNA\n0\t3\t\t4\n"), schema)
    assert np.isnan(block.dense["x"]).tolist() == [True, False]
    assert keys_of([block], "a") == [None, key_of_text("", "text")]
    assert keys_of([block], "n") == [None, 4]
    with pytest.raises(RawDataError, match="column x: '' is no number"):
        read(write(b"1\tNA\t-\tNA\n0\t\t-\t4\n"), schema)


def test_trimmed_fields_and_question_marks_for_missing(write: Any) -> None:
    schema = Schema(
        format=RawFormat(delimiter=",", header=True, trim=True, missing=["", "?"]),
        label=LabelColumn("Y", positive=[">50K", ">50K."], negative=["<=50K", "<=50K."]),
        dense={"age": DenseColumn("identity")},
        sparse={"job": SparseColumn(), "zone": SparseColumn(token="int")},
    )
    content = b"age, job, zone, Y\n39, State-gov, 7, <=50K\n ?, ?, ?, >50K.\n5 , x , -2 ,>50K\n"
    (block,) = read(write(content), schema)
    assert block.label_B is not None
    assert block.label_B.tolist() == [0, 1, 1]
    assert [None if np.isnan(v) else v for v in block.dense["age"]] == [39, None, 5]
    assert keys_of([block], "job") == [key_of_text("State-gov", "text"), None, key_of_text("x", "")]
    assert keys_of([block], "zone") == [7, None, 2**64 - 2]
    bad = content + b"4, x, 1.5, >50K\n"
    with pytest.raises(RawDataError) as error:
        read(write(bad), schema)
    assert error.value.line == 5
    assert "column zone: '1.5' isn't a whole number" in str(error.value)


def test_hex_upper_case_large_zero_and_missing(criteo_schema: Schemas, write: Any) -> None:
    content = b"1\t0\tFFFFFFFF\n0\t0\t00000000\n0\t0\t\n1\t0\t80000000\n1\t0\tdeadbeef\n"
    blocks = read(write(content), criteo_schema(1, 1))
    assert keys_of(blocks, "C1") == [2**32 - 1, 0, None, 2**31, 0xDEADBEEF]


@given(st.lists(st.text("0123456789abcdefg-+._e \t", max_size=4), min_size=1, max_size=5))
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_the_plain_reading_agrees_with_the_fast_one(tmp_path: Path, fields: list[str]) -> None:
    """Whatever the fast parser refuses, the plain one finds: a line is always named."""
    schema = Schema(
        format=RawFormat(columns=["label", "x", "n", "h"], delimiter=","),
        dense={"x": DenseColumn("identity")},
        sparse={"n": SparseColumn(token="int"), "h": SparseColumn(token="hex")},
    )
    path = tmp_path / "raw.csv"
    path.write_text("".join(f"1,{f},{f},{f}\n1,{f},,\n1,,{f},\n1,,,{f}\n" for f in fields))
    line: int | None = 0
    try:
        read(path, schema)
    except RawDataError as error:
        line = error.line
    assert line is not None, "refused, but no line was named"


# ---- bags


def bag_schema(**column: Any) -> Schema:
    values: dict[str, Any] = {"separator": "|", "bag_weights": "weights", **column}
    return Schema(
        format=RawFormat(columns=["label", "tags", "weights"]),
        sparse={"tags": SparseColumn(**values)},
    )


def bags_of(block: RawBlock, name: str = "tags") -> list[list[tuple[int | None, float]]]:
    column = block.sparse[name]
    assert column.lengths is not None
    weights = np.ones(len(column.codes)) if column.weights is None else column.weights
    keys = keys_of([block], name)
    ends = np.cumsum(column.lengths)
    return [
        list(zip(keys[e - n : e], weights[e - n : e].tolist(), strict=True))
        for n, e in zip(column.lengths, ends, strict=True)
    ]


def test_bags_and_their_weights(write: Any) -> None:
    content = b"1\t5|7|5\t1|0.5|-2\n0\t\t\n1\t9\t2.5\n"
    (block,) = read(write(content), bag_schema(token="int", missing="empty"))
    assert bags_of(block) == [[(5, 1), (7, 0.5), (5, -2)], [], [(9, 2.5)]]
    (block,) = read(write(content), bag_schema(token="int", missing="row"))
    assert bags_of(block)[1] == [(None, 1)], "a missing bag becomes one missing id of weight 1"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"1\ta|b\t1\n", "1 weights for 2 ids"),
        (b"1\t\t1|2\n", "2 weights for 0 ids"),
        (b"1\ta|b\t\n", "0 weights for 2 ids"),
        (b"1\ta|b\t1|\n", "weight '' is no number"),
        (b"1\ta|b\t1| 2\n", "weight ' 2' is no number"),
        (b"1\ta|b\t1|nan\n", "weight 'nan' isn't finite"),
        (b"1\ta|b\t1|1e39\n", "weight '1e39' isn't finite"),
        (b"1\ta||b\t1|2|3\n", "a missing id inside a bag"),
        (b"1\ta|b|\t1|2|3\n", "a missing id inside a bag"),
    ],
)
@pytest.mark.parametrize("missing", ["row", "empty"])
def test_bad_bags_are_told_with_their_line(
    line: bytes, told: str, missing: str, broken: Callable[..., RawDataError]
) -> None:
    error = broken(b"1\ta\t1\n" + line + b"0\tb\t1\n", bag_schema(missing=missing))
    assert error.line == 2
    assert told in str(error)


# ---- gzip (B05)


def test_gzip_whole_and_in_members(
    criteo_lines: Lines, criteo_schema: Schemas, write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, schema = criteo_lines(20), criteo_schema()
    expected = plain_rows(lines, schema)
    whole = gzip.compress(b"".join(lines))
    halves = gzip.compress(b"".join(lines)[:1000]) + gzip.compress(b"".join(lines)[1000:])
    for slice_bytes in (8 << 20, 700):
        monkeypatch.setattr(raw, "SLICE_BYTES", slice_bytes)
        assert as_rows(read(write(whole, "a.gz"), schema), schema) == expected
        assert as_rows(read(write(halves, "a.gz"), schema), schema) == expected


@pytest.mark.parametrize(
    "damage",
    [
        lambda packed: packed[:-200],
        lambda packed: packed[:-1],
        lambda packed: packed[:12],
        lambda packed: b"",
        lambda packed: b"not gzip at all\n" * 40,
        lambda packed: packed + b"rubbish",
        lambda packed: packed[:800] + bytes([packed[800] ^ 255]) + packed[801:],
    ],
    ids=["200 bytes short", "1 byte short", "header only", "empty", "no gzip", "tail", "bit rot"],
)
def test_a_damaged_archive_is_named(
    damage: Callable[[bytes], bytes],
    criteo_lines: Lines,
    criteo_schema: Schemas,
    broken: Callable[..., RawDataError],
) -> None:
    packed = gzip.compress(b"".join(criteo_lines(100)))
    error = broken(damage(packed), criteo_schema(), name="day_3.gz")
    assert "archive is damaged or cut short" in str(error)


def test_an_archive_of_no_rows_is_no_damage(criteo_schema: Schemas, write: Any) -> None:
    assert read(write(gzip.compress(b""), "a.gz"), criteo_schema()) == []


# ---- parquet (B09)


def parquet_schema(**sparse: SparseColumn) -> Schema:
    return Schema(
        format=RawFormat(kind="parquet"),
        dense={"x": DenseColumn("identity")},
        sparse=sparse or {"c": SparseColumn(token="int")},
    )


def parquet_table(num_rows: int) -> pa.Table:
    index = np.arange(num_rows)
    return pa.table({"label": index % 2, "x": index.astype(np.float64), "c": index * 3})


@pytest.fixture
def write_parquet(tmp_path: Path) -> Callable[..., Path]:
    def to_file(table: pa.Table, *group_rows: int) -> Path:
        path = tmp_path / "raw.parquet"
        with pq.ParquetWriter(path, table.schema) as writer:
            start = 0
            for size in group_rows or (table.num_rows,):
                writer.write_table(table.slice(start, size), row_group_size=max(size, 1))
                start += size
        return path

    return to_file


@pytest.mark.parametrize("groups", [(1000,), (1, 7, 992), (0, 1000)])
@pytest.mark.parametrize("block_rows", [65_536, 100])
def test_parquet_row_groups_of_any_size(
    groups: tuple[int, ...],
    block_rows: int,
    write_parquet: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(raw, "_PARQUET_BLOCK_ROWS", block_rows)
    path, hasher = write_parquet(parquet_table(1000), *groups), hashlib.sha256()
    reader = RawReader(parquet_schema())
    blocks = [reader.parse(piece) for piece in reader.slices(path, hasher)]
    rows = as_rows(blocks, parquet_schema())
    assert rows == [(n % 2, float(n), 3 * n) for n in range(1000)]
    assert hasher.hexdigest() == hashlib.sha256(path.read_bytes()).hexdigest()


def test_parquet_without_rows(write_parquet: Callable[..., Path]) -> None:
    assert read(write_parquet(parquet_table(0)), parquet_schema()) == []


def test_parquet_lists_nulls_and_dictionaries(write_parquet: Callable[..., Path]) -> None:
    schema = parquet_schema(
        tags=SparseColumn(token="int", many=True, missing="empty", bag_weights="w"),
        words=SparseColumn(token="text", many=True, missing="row"),
        city=SparseColumn(token="text"),
    )
    table = pa.table(
        {
            "label": pa.array([True, False, True, False]).cast(pa.int8()),
            "x": pa.array([1, None, 3, None], pa.int16()),
            "tags": pa.array([[4, 4, 6], None, [], [9]], pa.list_(pa.int32())),
            "w": pa.array([[0.5, 1, 2], None, [], [3]], pa.list_(pa.float32())),
            "words": pa.array([["a"], [], None, ["b", "a"]], pa.large_list(pa.string())),
            "city": pa.array(["x", None, "y", "x"]).dictionary_encode(),
        }
    )
    (block,) = read(write_parquet(table), schema)
    assert bags_of(block) == [[(4, 0.5), (4, 1), (6, 2)], [], [], [(9, 3)]]
    a, b = key_of_text("a", "text"), key_of_text("b", "text")
    assert bags_of(block, "words") == [[(a, 1)], [(None, 1)], [(None, 1)], [(b, 1), (a, 1)]]
    assert keys_of([block], "city") == [
        key_of_text(t, "text") if t else None for t in ("x", None, "y", "x")
    ]
    assert np.isnan(block.dense["x"]).tolist() == [False, True, False, True]


def with_column(name: str, values: Any) -> pa.Table:
    table = parquet_table(4)
    position = table.column_names.index(name)
    return table.set_column(position, name, pa.array(values))


@pytest.mark.parametrize(
    ("table", "told"),
    [
        (parquet_table(4).drop_columns(["c"]), "has no column c"),
        (with_column("label", [0, None, 1, 1]), "column label: a label is missing"),
        (with_column("label", [0, 1, 2, 1]), "column label: label '2'"),
        (with_column("label", [0, 0.5, 1, 1]), "0.5"),
        (with_column("x", [1.0, float("nan"), 2.0, 3.0]), "column x: a value isn't finite"),
        (with_column("x", ["a", "b", "c", "d"]), "rows 1 to 4"),
        (with_column("c", ["1", "b", "3", "4"]), "rows 1 to 4"),
        (with_column("c", [[1], [2], [3], [4]]), "column c is list<element: int64>: set"),
    ],
    ids=["no column", "null label", "label 2", "label .5", "nan", "text", "text id", "list"],
)
def test_bad_parquet_columns(
    table: pa.Table, told: str, write_parquet: Callable[..., Path]
) -> None:
    with pytest.raises(RawDataError) as error:
        read(write_parquet(table), parquet_schema())
    assert "raw.parquet" in str(error.value)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ([[1, None]], "a missing id inside a bag"),
        ([3], "is no list column"),
    ],
)
def test_bad_parquet_bags(values: Any, told: str, write_parquet: Callable[..., Path]) -> None:
    table = pa.table({"label": [1], "x": [1.0], "tags": values})
    schema = parquet_schema(tags=SparseColumn(token="int", many=True))
    with pytest.raises(RawDataError, match=told):
        read(write_parquet(table), schema)


def test_a_damaged_parquet_file_is_named(write_parquet: Callable[..., Path]) -> None:
    path = write_parquet(parquet_table(50_000))
    content = path.read_bytes()
    for damaged in (content[:-200], content[:100] + b"\xff" * 5000 + content[5100:], b""):
        path.write_bytes(damaged)
        with pytest.raises(RawDataError, match=r"raw\.parquet"):
            read(path, parquet_schema())


# ---- which files


def test_numbers_in_names_are_sorted_as_numbers(tmp_path: Path) -> None:
    for number in (10, 2, 1, 0, 23):
        (tmp_path / f"day_{number}.gz").touch()
    (tmp_path / "day_3.gz").mkdir()
    names = [path.name for path in expand_inputs("day_*.gz", tmp_path, "data.raw")]
    assert names == ["day_0.gz", "day_1.gz", "day_2.gz", "day_10.gz", "day_23.gz"]


def test_lists_keep_their_order_and_globs_expand_in_place(tmp_path: Path) -> None:
    for name in ("b", "a", "c1", "c2"):
        (tmp_path / name).touch()
    found = expand_inputs(["b", "c*", str(tmp_path / "a")], tmp_path, "data.raw")
    assert [path.name for path in found] == ["b", "c1", "c2", "a"]


def test_names_that_are_patterns_too(tmp_path: Path) -> None:
    (tmp_path / "day[1].tsv").touch()
    assert expand_inputs("day[1].tsv", tmp_path, "data.raw") == [tmp_path / "day[1].tsv"]


@pytest.mark.parametrize("spec", ["nothing*", "missing.tsv", ["here.tsv", "missing.tsv"]])
def test_no_such_file(spec: str | list[str], tmp_path: Path) -> None:
    (tmp_path / "here.tsv").touch()
    with pytest.raises(UserError, match=r"data\.raw_train=.*no such file"):
        expand_inputs(spec, tmp_path, "data.raw_train")


def test_a_file_named_twice(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").touch()
    with pytest.raises(UserError, match=r"named twice: .*a\.tsv"):
        expand_inputs(["a.tsv", "*.tsv"], tmp_path, "data.raw")


# ---- real files


def real_lines(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as opened:
        yield from opened


@pytest.mark.parametrize("name", ["criteo_kaggle_8k/train.tsv", "criteo_1tb_1k/day_0_head1000.tsv"])
def test_real_criteo_rows_equal_a_plain_reading(
    name: str, shared_data: Path, criteo_schema: Schemas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raw, "SLICE_BYTES", 100_000)
    schema = criteo_schema()
    expected = plain_rows(list(real_lines(shared_data / name)), schema)
    assert as_rows(read(shared_data / name, schema), schema) == expected
    features = resolve_features(schema)
    assert {f.token for f in features} == {"hex"}
