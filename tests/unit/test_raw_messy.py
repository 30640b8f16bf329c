"""Messy text files and schemas: read by a stated rule, or refused by file, line and key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.errors import RawDataError, UserError
from data.manifest import Manifest
from data.raw import RawReader
from data.raw_files import has_labels
from data.schema import DenseColumn, LabelColumn, RawFormat, Schema, SparseColumn, Split
from data.tokens import key_of_text
from dlrm.data_notes import describe_inputs, single_id_bags
from tests.commands import dlrm

Prepare = Callable[..., Manifest]


def schema_of(token: str = "text", **form: Any) -> Schema:
    form = {"delimiter": ",", "quote": '"', **form}
    columns = [] if form.get("header") else ["label", "x", "c"]
    return Schema(
        format=RawFormat(columns=columns, **form),
        dense={"x": DenseColumn()},
        sparse={"c": SparseColumn(token=token)},
    )


def rows_of(path: Path, schema: Schema, *, labelled: bool = True) -> tuple[list[int], int]:
    """The keys of column c, and the number of blank lines."""
    reader = RawReader(schema, labelled=labelled)
    blocks = [reader.parse(piece) for piece in reader.slices(path)]
    keys = [int(b.sparse["c"].keys[n]) for b in blocks for n in b.sparse["c"].codes]
    return keys, sum(block.num_blank_lines for block in blocks)


@pytest.fixture
def refused(tmp_path: Path) -> Callable[[bytes, Schema], str]:
    """Reads text that must be refused; returns the message, after checking that it is one line that
    names the file."""

    def message_of(content: bytes, schema: Schema) -> str:
        path = tmp_path / "raw.csv"
        path.write_bytes(content)
        with pytest.raises(RawDataError) as error:
            rows_of(path, schema)
        assert str(error.value).startswith(str(path))
        assert len(str(error.value).splitlines()) == 1
        return str(error.value).removeprefix(str(path))

    return message_of


Refused = Callable[[bytes, Schema], str]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b'1,2,"a"\n0,b\rc,"d"\n', ", line 2: a carriage return inside the line"),
        (b'1,2,"a"\n0,1,"c\rd"\n', ", line 2: a carriage return inside the line"),
        (b'1,2,"a"\n0,no,"' + b"z" * 200_000 + b'"\n', ", line 2: column x: 'no' is no number"),
        (b'1,2,"a"\n0,"' + b"z" * 200_000 + b'"\n', ", line 2: 2 fields found, 3 expected"),
        (b'1,2,"a\n', ", line 1: a line break inside quotes isn't supported"),
    ],
    ids=["bare CR", "quoted CR", "long quoted bad line", "long quoted field", "open quote"],
)
def test_f53_odd_csv_lines_are_told_with_their_line(
    content: bytes, told: str, refused: Refused
) -> None:
    assert refused(content, schema_of()).startswith(told)


def test_f53_a_header_with_a_carriage_return_and_quotes(refused: Refused) -> None:
    message = refused(b'"label",x\rc,"d"\n1,2,3\n', schema_of(header=True))
    assert message.startswith(", line 1: the header has no column x, c; it names label, 'x\\rc', d")


@pytest.mark.parametrize("key", ["delimiter", "quote"])
@pytest.mark.parametrize("text", ["§", "é", "\n", "\r", "\0", "\\", "，"])
def test_f53_a_delimiter_or_quote_that_cannot_be_used_is_refused_by_key(
    text: str, key: str
) -> None:
    with pytest.raises(UserError, match=rf"data\.schema\.format\.{key}=.*ASCII"):
        RawFormat(**{key: text})


def test_f53_one_character_cannot_be_both_delimiter_and_quote() -> None:
    with pytest.raises(UserError, match=r"data\.schema\.format\.quote=','"):
        RawFormat(delimiter=",", quote=",")


@pytest.mark.parametrize("files", [-1, 0])
def test_f53_held_out_files_are_one_or_more(files: int) -> None:
    with pytest.raises(UserError, match=rf"data\.schema\.split\.eval_files={files}: .* at least 1"):
        Split(eval_files=files)


def test_f53_data_with_dense_columns_only_is_prepared(prepare_files: Prepare) -> None:
    schema = schema_of()
    schema.sparse = {}
    content = b"".join(b"%d,%d,%d\n" % (n % 2, n, n) for n in range(50))
    manifest = prepare_files(schema, {"raw": content})
    assert manifest.parts["train"].rows == 40
    assert manifest.table_rows == {}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a:\n\tb: 1\n", "bad.yaml, line 5: a tab; indent with spaces"),
        ("a: 1\na: 2\n", "bad.yaml, line 5: found duplicate key a"),
        ("a: [1\n", "bad.yaml, line 5: "),
    ],
    ids=["tab", "doubled key", "open bracket"],
)
def test_f53_a_file_that_is_no_yaml_is_told_with_its_line(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "bad.yaml").write_text("defaults:\n  - base\n  - _self_\n" + text)
    assert dlrm("prepare", "--config-dir", tmp_path, "data=bad", "data.raw=x") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


# ---- labels, numbers, quotes


def test_f55_a_label_text_has_one_meaning() -> None:
    with pytest.raises(UserError, match=r"data\.schema\.label: '1' stands in positive and in neg"):
        LabelColumn(positive=["1", "2"], negative=["0", "1"])


@pytest.mark.parametrize("text", ["0x1f", "0X1F", "-0x1"])
@pytest.mark.parametrize("trim", [False, True])
def test_f55_hexadecimal_is_no_whole_number(text: str, trim: bool, refused: Refused) -> None:
    message = refused(b"1,2,7\n0,1," + text.encode() + b"\n", schema_of("int", trim=trim))
    assert message == (
        f", line 2: column c: {text!r} isn't a whole number (data.schema.sparse.c.token)"
    )


def test_f55_integers_beside_text_with_0x_are_read_as_ever(tmp_path: Path) -> None:
    """The careful reading of a slice that holds 0x somewhere gives the same ids."""
    schema = schema_of("int", header=True)
    schema.sparse["t"] = SparseColumn()
    path = tmp_path / "raw.csv"
    path.write_text('label,x,c,t\n1,2, 7,0x1f\n0,1,-3 ,"a"\n0,1,"12",b\n')
    assert rows_of(path, schema)[0] == [7, 2**64 - 3, 12]


def test_f55_a_backslash_does_not_escape_a_quote(refused: Refused, tmp_path: Path) -> None:
    message = refused(b'1,2,"a"\n0,1,"say \\"hi\\""\n', schema_of())
    assert message.startswith(", line 2: ")
    assert "a backslash doesn't escape a quote" in message
    path = tmp_path / "right.csv"
    path.write_bytes(b'1,2,"C:\\"\n0,1,"say ""hi"""\n0,1,"a\\b"\n')
    texts = ["C:\\", 'say "hi"', "a\\b"]
    assert rows_of(path, schema_of())[0] == [key_of_text(text, "text") for text in texts]


@pytest.mark.parametrize("header", [False, True])
def test_f55_empty_labels_are_no_labels_where_none_are_needed(header: bool, tmp_path: Path) -> None:
    """`predict` reads a file with empty labels as it reads one without the column."""
    schema = schema_of(header=header)
    path = tmp_path / "raw.csv"
    path.write_text(("label,x,c\n" if header else "") + ",2,a\n,3,b\n")
    assert has_labels(path, schema)
    assert not has_labels(path, schema, with_value=True)
    expected = [key_of_text(text, "text") for text in "ab"]
    assert rows_of(path, schema, labelled=False)[0] == expected
    path.write_text(("x,c\n" if header else "") + "2,a\n3,b\n")
    assert not has_labels(path, schema, with_value=True)
    assert rows_of(path, schema, labelled=False)[0] == expected
    path.write_text(("label,x,c\n" if header else "") + "1,2,a\n,3,b\n")
    assert has_labels(path, schema, with_value=True)
    with pytest.raises(RawDataError, match="column label: the label is missing"):
        rows_of(path, schema)


@pytest.mark.parametrize("start", [b"\n", b"\r\n\n", b"\xef\xbb\xbf\n"])
def test_f55_blank_lines_before_a_header_are_skipped_and_counted(
    start: bytes, refused: Refused, tmp_path: Path
) -> None:
    path = tmp_path / "good.csv"
    path.write_bytes(start + b"label,x,c\n1,2,a\n\n0,3,b\n")
    num_blank = start.count(b"\n")
    assert rows_of(path, schema_of(header=True))[1] == num_blank + 1
    assert has_labels(path, schema_of(header=True))
    message = refused(start + b"label,x,c\n1,2,a\n0,no,b\n", schema_of(header=True))
    assert message.startswith(f", line {num_blank + 3}: column x: 'no'"), "lines as in the file"
    message = refused(start + b"label,x\n1,2\n", schema_of(header=True))
    assert message.startswith(f", line {num_blank + 1}: the header has no column c")


# ---- messages that lead on


def test_f45_a_file_without_a_header_among_those_with_one(refused: Refused) -> None:
    message = refused(b"1,2,a\n0,3,b\n", schema_of(header=True))
    assert "this file seems to have no header" in message
    assert "header=true holds for all files" in message


def test_f45_a_file_with_a_header_among_those_without(refused: Refused) -> None:
    message = refused(b"label,x,c\n0,3,b\n", schema_of())
    assert "this file seems to have a header" in message
    assert "holds for all files" in message


def test_f45_a_misspelt_column_gets_a_suggestion(refused: Refused) -> None:
    message = refused(b"lable,x,c\n0,3,b\n", schema_of(header=True))
    assert message.endswith(
        "the header has no column label; it names lable, x, c; did you mean lable?"
    )


@pytest.mark.parametrize(
    ("mark", "name"), [("\t", "tab"), (";", "semicolon"), ("|", "vertical bar")]
)
@pytest.mark.parametrize("header", [False, True])
def test_f45_a_wrong_delimiter_is_named(
    header: bool, mark: str, name: str, refused: Refused, tmp_path: Path
) -> None:
    content = f"label{mark}x{mark}c\n0{mark}1{mark}a\n".encode()
    message = refused(content, schema_of(header=header))
    told = f"The line holds {name}s: set data.schema.format.delimiter to a {name}"
    assert message.endswith(told)
    if not header:
        with pytest.raises(RawDataError, match="1 fields found") as error:
            has_labels(tmp_path / "raw.csv", schema_of())
        assert str(error.value).endswith(told)


def test_f45_a_separator_that_stands_in_no_field_is_noted(prepare_files: Prepare) -> None:
    schema = schema_of()
    schema.sparse["c"] = SparseColumn(separator="|")
    content = "".join(f"{n % 2},1,{n};{n + 1}\n" for n in range(20)).encode()
    (note,) = single_id_bags(prepare_files(schema, {"raw": content}))
    assert note.endswith("is data.schema.sparse.c.separator='|' right?")


def test_f45_right_separators_are_not_noted(prepare_files: Prepare) -> None:
    schema = schema_of()
    schema.sparse["c"] = SparseColumn(separator="|")
    content = "".join(f"{n % 2},1,{n}|{n + 1}\n" for n in range(20)).encode()
    assert single_id_bags(prepare_files(schema, {"raw": content})) == []


def test_f07_f45_prepare_tells_files_rows_and_their_order(prepare_files: Prepare) -> None:
    content = b"".join(b"%d,%d,a\n" % (n % 2, n) for n in range(10))
    manifest = prepare_files(schema_of(), {"a.csv": content, "b.csv": content})
    assert describe_inputs(manifest) == (
        "files   2 with 20 rows: a.csv to b.csv; split in_order: the last rows of the last files "
        "validate and test"
    )


BASE = "defaults:\n  - base\n  - _self_\nname: mine\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"{BASE}schema:\n  sparse:\n    Month:\n", "write `Month: {}`"),
        (f"{BASE}schema:\n  dense:\n    x:\n", "write `x: {}`"),
        ("name: mine\n", "defaults: [base, _self_"),
        (f"{BASE}schema:\n  fromat: {{}}\n", "did you mean data.schema.format"),
        (
            f"{BASE}schema:\n  dense:\n    x: {{transfrom: log1p}}\n",
            "data.schema.dense.x.transform",
        ),
        (f"{BASE}schema:\n  sparse:\n    c: {{mincount: 2}}\n", "data.schema.sparse.c.min_count"),
        (f"{BASE}schema:\n  split: {{evalfiles: 2}}\n", "data.schema.split.eval_files"),
    ],
    ids=["sparse", "dense", "base", "schema", "transform", "min_count", "eval_files"],
)
def test_f45_a_mistake_in_a_data_file_is_told_with_its_repair(
    text: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.yaml").write_text(text)
    assert dlrm("prepare", "--config-dir", tmp_path, "data=mine", "data.raw=x") == 2
    assert told in capsys.readouterr().err
