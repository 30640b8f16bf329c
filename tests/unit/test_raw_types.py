"""Types of raw columns: one id is one token whatever the file's type, or the column is refused."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.errors import RawDataError
from data.manifest import Manifest
from data.raw import RawReader
from data.raw_files import has_labels
from data.schema import DenseColumn, RawFormat, Schema, SparseColumn
from data.tokens import MISSING, key_of_text

Prepare = Callable[..., Manifest]
ReadPart = Callable[[Path, str], dict[str, list[Any]]]

INTEGERS = [getattr(pa, f"{sign}int{bits}")() for sign in ("", "u") for bits in (8, 16, 32, 64)]
FLOATS = {pa.float16(): 2**11, pa.float32(): 2**24, pa.float64(): 2**53}
TEXTS = [pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.string_view()]
DECIMALS = [pa.decimal128(38, 0), pa.decimal128(30, 2)]


def column_of(ids: list[int | None], kind: pa.DataType) -> pa.Array | None:
    """The ids under a type, or None where it can't hold them."""
    if pa.types.is_dictionary(kind):
        values = column_of(ids, kind.value_type)
        return None if values is None else values.dictionary_encode()
    try:
        if kind in FLOATS:
            if any(abs(i) >= FLOATS[kind] for i in ids if i is not None):
                return None
            numbers = [np.nan if i is None else float(i) for i in ids]
            return pa.array(np.array(numbers, kind.to_pandas_dtype()))
        if kind in DECIMALS:
            return pa.array([None if i is None else decimal.Decimal(i) for i in ids], kind)
        if kind in TEXTS:
            return pa.array([None if i is None else str(i) for i in ids]).cast(kind)
        return pa.array(ids, kind)
    except (pa.ArrowInvalid, OverflowError):
        return None


def schema_of(token: str = "int", kind: str = "parquet", **column: Any) -> Schema:
    form = RawFormat(kind=kind, columns=["label", "c"] if kind == "csv" else [])
    return Schema(format=form, sparse={"c": SparseColumn(token=token, **column)})


def write(path: Path, column: pa.Array, **more: pa.Array) -> Path:
    labels = pa.array([0] * len(column))
    pq.write_table(pa.table({"label": labels, "c": column, **more}), path)
    return path


def keys(path: Path, schema: Schema) -> list[int | None]:
    reader = RawReader(schema)
    columns = [reader.parse(piece).sparse["c"] for piece in reader.slices(path)]
    return [None if n == MISSING else int(c.keys[n]) for c in columns for n in c.codes]


ALL_TYPES = [*INTEGERS, *FLOATS, *TEXTS, *DECIMALS]
ALL_TYPES += [pa.dictionary(pa.int32(), kind) for kind in (pa.int64(), pa.string(), pa.float64())]


IDS: dict[str, list[int | None]] = {
    "small": [5, None, 0, 5, 100],
    "negative": [-7, 3],
    "large": [2**31, 2**40],
    "beyond 2^53": [2**53 + 1, -(2**63), 2**63 - 1],
    "none": [None, None],
}
HELD = [
    (name, kind) for name in IDS for kind in ALL_TYPES if column_of(IDS[name], kind) is not None
]


@pytest.mark.parametrize(("name", "kind"), HELD, ids=str)
@pytest.mark.parametrize("token", ["int", "text"])
def test_f06_an_id_is_one_token_under_every_type(
    name: str, kind: pa.DataType, token: str, tmp_path: Path
) -> None:
    expected = [None if i is None else key_of_text(str(i), token) for i in IDS[name]]
    path = write(tmp_path / "a.parquet", column_of(IDS[name], kind))
    assert keys(path, schema_of(token)) == expected


@pytest.mark.parametrize("token", ["int", "text"])
def test_f06_files_of_several_types_share_one_dictionary(
    token: str, prepare_files: Prepare, read_part: ReadPart, tmp_path: Path
) -> None:
    ids: list[int | None] = [1, 2, 3, None]
    files = {}
    for kind in [*ALL_TYPES, pa.null()]:
        column = pa.nulls(4) if kind == pa.null() else column_of(ids, kind)
        assert column is not None
        path = write(tmp_path / "column.parquet", column)
        files[f"{kind}.parquet".replace("/", "")] = path.read_bytes()
    schema = schema_of(token)
    schema.split.valid = schema.split.test = 0
    manifest = prepare_files(schema, files)
    assert manifest.table_rows == {"c": 5}, "unknown, missing and three ids"
    rows = read_part(tmp_path / "prepared", "train")["c"]
    assert rows == rows[:4] * len(ALL_TYPES) + [1] * 4


@pytest.mark.parametrize("token", ["int", "text"])
@pytest.mark.parametrize(
    ("column", "told"),
    [
        (pa.array([1.0, 2.0**53]), "9007199254740992 stands for several ids in a column of type"),
        (pa.array([2.0**24], pa.float32()), "type float, exact below 16,777,216 only"),
        (pa.array([1.5, 2.0]), "1.5 is no whole number (double)"),
        (pa.array([np.inf]), "column c: inf stands for several ids"),
        (pa.array([decimal.Decimal("1.50")]), "column c (decimal128(3, 2))"),
        (pa.array([b"\xff\xfe"]), "column c (binary)"),
    ],
    ids=["2^53", "2^24", "1.5", "inf", "decimal", "bytes"],
)
def test_f06_what_a_type_cannot_tell_exactly_is_refused_by_column(
    column: pa.Array, told: str, token: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.parquet", column)
    with pytest.raises(RawDataError) as error:
        keys(path, schema_of(token))
    assert str(path) in str(error.value)
    assert told in str(error.value)


@pytest.mark.parametrize("text", ["0x1f", "+5", "5.0", " 5", "", "1_000", "٣"])
def test_f06_f55_text_in_parquet_is_an_integer_by_the_rule_of_csv(
    text: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.parquet", pa.array([text]))
    with pytest.raises(RawDataError, match=r"column c: .*isn't a whole number"):
        keys(path, schema_of("int"))


def test_f06_an_unsigned_id_above_signed_64_bits_is_refused_as_in_csv(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", pa.array([2**63], pa.uint64()))
    with pytest.raises(RawDataError, match=r"column c \(uint64\)"):
        keys(path, schema_of("int"))
    assert keys(path, schema_of("text")) == [key_of_text(str(2**63), "text")]


NOON = datetime.datetime(2026, 1, 2, 12)
OTHER_TYPES = {
    "timestamp": pa.array([NOON]),
    "date32": pa.array([NOON.date()]),
    "time": pa.array([NOON.time()]),
    "duration": pa.array([datetime.timedelta(1)]),
    "struct": pa.array([{"a": 1}]),
    "map": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())),
}


@pytest.mark.parametrize("kind", OTHER_TYPES)
@pytest.mark.parametrize("role", ["int", "text", "hex", "dense", "label", "many"])
def test_f37_types_without_a_rule_are_refused_by_column_and_type(
    role: str, kind: str, tmp_path: Path
) -> None:
    column, one = OTHER_TYPES[kind], pa.array([1])
    schema = Schema(format=RawFormat(kind="parquet"))
    table = {"label": one, "c": column}
    if role == "dense":
        schema.dense["c"] = DenseColumn()
    elif role == "label":
        schema.dense["c"], table = DenseColumn(), {"label": column, "c": one}
    elif role == "many":
        schema.sparse["c"] = SparseColumn(many=True)
    else:
        schema.sparse["c"] = SparseColumn(token=role)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(table), path)
    reader = RawReader(schema)
    name = "label" if role == "label" else "c"
    with pytest.raises(RawDataError) as error:
        list(reader.slices(path))
    assert str(error.value).startswith(f"{path}: column {name} is {str(column.type)[:12]}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", [pa.int64(), pa.float64(), pa.decimal128(38, 0)], ids=str)
def test_f37_numbers_are_no_hex_ids(kind: pa.DataType, tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", pa.array([10, 11]).cast(kind, safe=False))
    with pytest.raises(RawDataError, match=r"column c is .*decimal.*sparse\.c\.token=int"):
        keys(path, schema_of("hex"))


def test_f37_a_list_without_many_and_many_without_a_list_name_the_key(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", pa.array([[1], [2]]))
    with pytest.raises(RawDataError, match=r"set data\.schema\.sparse\.c\.many=true"):
        keys(path, schema_of())
    path = write(tmp_path / "b.parquet", pa.array([1, 2]))
    with pytest.raises(RawDataError, match=r"set data\.schema\.sparse\.c\.many=false"):
        keys(path, schema_of(many=True))
    path = write(tmp_path / "c.parquet", pa.array([[[1]]]))
    with pytest.raises(RawDataError, match=r"lists of lists"):
        keys(path, schema_of(many=True))


@pytest.mark.parametrize("element", [pa.int64(), pa.uint8(), pa.float64(), pa.string()], ids=str)
@pytest.mark.parametrize("form", ["list", "large list", "fixed list"])
def test_f37_lists_of_every_kind_are_bags(form: str, element: pa.DataType, tmp_path: Path) -> None:
    kinds = {
        "list": pa.list_(element), "large list": pa.large_list(element),
        "fixed list": pa.list_(element, 2),
    }  # fmt: skip
    values = pa.array([1, 2, 3, 1]).cast(element)
    lists: list[Any] = [values[:2].to_pylist(), None, values[2:].to_pylist()]
    path = write(tmp_path / "a.parquet", pa.array(lists, kinds[form]))
    reader = RawReader(schema_of("int", many=True, missing="empty"))
    column = reader.parse(next(reader.slices(path))).sparse["c"]
    assert column.lengths is not None
    assert column.lengths.tolist() == [2, 0, 2]
    assert column.keys[column.codes].tolist() == [1, 2, 3, 1]


def test_f37_a_list_column_of_nulls_is_empty_bags(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", pa.nulls(3))
    assert keys(path, schema_of("int", many=True)) == [None] * 3


def test_f37_nan_inside_a_bag_is_a_missing_id(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", pa.array([[1.0, float("nan")]]))
    with pytest.raises(RawDataError, match="column c: a missing id inside a bag"):
        keys(path, schema_of("int", many=True))


def test_f37_a_column_name_twice_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    one = pa.array([1])
    pq.write_table(pa.table([one, one, one], names=["label", "c", "c"]), path)
    with pytest.raises(RawDataError, match="names a column twice: c"):
        keys(path, schema_of())
    pq.write_table(pa.table([one, one, one, one], names=["label", "c", "d", "d"]), path)
    assert keys(path, schema_of()) == [1], "a column that isn't used may stand twice"
    pq.write_table(pa.table([one, one, one], names=["label", "c", "label"]), path)
    assert has_labels(path, schema_of(), with_value=True)
    with pytest.raises(RawDataError, match="names a column twice: label"):
        keys(path, schema_of())


def test_f37_a_partition_folder_is_no_column_and_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "c=5"
    folder.mkdir()
    pq.write_table(pa.table({"label": [1]}), folder / "a.parquet")
    with pytest.raises(RawDataError, match=r"has no column c \(c=5 in the path is no column"):
        keys(folder / "a.parquet", schema_of())


@pytest.mark.parametrize(
    "column",
    [
        pa.array([3, 2**60], pa.int64()),
        pa.array([3, 2**63], pa.uint64()),
        pa.array([3, 4], pa.float16()),
        pa.array([True, False]),
        pa.array([decimal.Decimal("3.50")] * 2),
        pa.array(["3", "1e3"]),
        pa.array([3, 4]).dictionary_encode(),
        pa.nulls(2),
    ],
    ids=lambda column: str(column.type),
)
def test_f37_dense_columns_of_every_number_type(column: pa.Array, tmp_path: Path) -> None:
    schema = Schema(format=RawFormat(kind="parquet"), dense={"c": DenseColumn()})
    reader = RawReader(schema)
    block = reader.parse(next(reader.slices(write(tmp_path / "a.parquet", column))))
    expected = [np.nan if v is None else float(v) for v in column.to_pylist()]
    np.testing.assert_array_equal(block.dense["c"], expected)


@pytest.mark.parametrize(
    "labels",
    [
        pa.array([0, 1], pa.int8()),
        pa.array([0.0, 1.0]),
        pa.array([b"0", b"1"]),
        pa.array([decimal.Decimal(0), decimal.Decimal(1)]),
        pa.array([False, True]),
        pa.array(["0", "1"]).dictionary_encode(),
    ],
    ids=lambda labels: str(labels.type),
)
def test_f37_labels_of_every_type(labels: pa.Array, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"label": labels, "c": [1, 2]}), path)
    schema = schema_of()
    schema.label.positive, schema.label.negative = ["1", "true"], ["0", "false"]
    reader = RawReader(schema)
    block = reader.parse(next(reader.slices(path)))
    assert block.label_B is not None
    assert block.label_B.tolist() == [0, 1]


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=300)
@given(
    ids=st.lists(st.none() | st.integers(-(2**63), 2**64 - 1) | st.integers(0, 99), min_size=1),
    kind=st.sampled_from(ALL_TYPES),
    token=st.sampled_from(["int", "text", "hex"]),
)
def test_f06_any_ids_under_any_type_are_the_tokens_of_csv_or_refused(
    ids: list[int | None], kind: pa.DataType, token: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As csv: the same keys; else one message that names file and column."""
    column = column_of(ids, kind)
    if column is None:
        return
    folder = tmp_path_factory.mktemp("types")
    path = write(folder / "a.parquet", column)
    csv = folder / "a.tsv"
    csv.write_text("".join(f"0\t{'' if i is None else i}\n" for i in ids))
    try:
        found = keys(path, schema_of(token))
    except RawDataError as error:
        assert f"{path}: " in str(error)  # noqa: PT017
        assert "column c" in str(error)  # noqa: PT017
        return
    assert found == keys(csv, schema_of(token, "csv"))


def test_f06_a_few_random_ids_under_every_type(tmp_path: Path) -> None:
    """The fast part of the search above, one draw for each type."""
    random = np.random.default_rng(7)
    for number, kind in enumerate(ALL_TYPES):
        ids = random.integers(0, 128, 50).tolist()
        column = column_of(ids, kind)
        assert column is not None
        path = write(tmp_path / f"{number}.parquet", column)
        assert keys(path, schema_of()) == ids
