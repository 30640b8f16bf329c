"""Columns of any type that a raw file may give them → ids, numbers and labels.

One id is one token, whatever the type of the file that holds it: 5 is the same as an int8, an
unsigned int, a whole float, a decimal and the text "5". What a type can't tell exactly is refused.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data.errors import RawDataError
from data.schema import Schema, resolve_features, used_columns
from data.tokens import BadToken, key_of_text

_WHOLE_NUMBER = "^-?[0-9]+$"
_CONVERSIONS = (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError)


class BadColumn(ValueError):
    """A value that the schema doesn't admit; turned into a RawDataError that names the line."""


def check_types(path: Path, found: pa.Schema, schema: Schema, *, labelled: bool) -> None:
    """Refuses a parquet file with a column that can't be what the schema says.

    Raises:
        RawDataError: naming file, column and type, and the key to change.
    """
    used = used_columns(schema, with_label=labelled)
    absent = [name for name in used if name not in found.names]
    if absent:
        parts = [part for part in path.parts if part.partition("=")[0] in absent]
        hint = f" ({parts[0]} in the path is no column: write it into the file)" if parts else ""
        raise RawDataError(str(path), None, f"has no column {', '.join(absent)}{hint}")
    twice = sorted({name for name in used if found.names.count(name) > 1})
    if twice:
        raise RawDataError(str(path), None, f"names a column twice: {', '.join(twice)}")
    problems: dict[str, str | None] = {}
    if labelled:
        label = schema.label.column
        problems[label] = _scalar_problem(found.field(label).type, "text", "data.schema.label")
    numbers = [*schema.dense, *([schema.example_weight] if labelled else [])]
    for name in filter(None, numbers):
        problems[name] = _scalar_problem(found.field(name).type, "number", f"data.schema ({name})")
    for feature in resolve_features(schema):
        key = f"data.schema.sparse.{feature.name}"
        name, weights = feature.name, feature.bag_weights
        if feature.many:
            problems[name] = _list_problem(found.field(name).type, feature.token, key)
        else:
            problems[name] = _scalar_problem(found.field(name).type, feature.token, key)
        if weights:
            problems[weights] = _list_problem(found.field(weights).type, "number", key)
    for name, problem in problems.items():
        if problem:
            kind = found.field(name).type
            raise RawDataError(str(path), None, f"column {name} is {kind}: {problem}")


def id_values(name: str, values: pa.Array, token: str) -> pa.Array:
    """Ids as int64 (`token='int'`) or text (`text`, `hex`); a float's NaN is a missing id.

    Raises:
        BadColumn, BadToken: for what is no such id or can't be told exactly, naming the column.
    """
    values = decoded(values)
    wanted = pa.int64() if token == "int" else pa.string()
    if values.type == wanted:
        return values
    if pa.types.is_floating(values.type):
        values = _whole_floats(name, values)
    elif pa.types.is_decimal(values.type):
        values = _cast(name, values, pa.decimal128(38, 0))
    elif is_text(values.type):
        values = _cast(name, values, pa.string())
        if token == "int":
            is_whole = pc.match_substring_regex(values, _WHOLE_NUMBER)
            if pc.any(pc.invert(is_whole)).as_py():
                bad = values.filter(pc.invert(is_whole))[0].as_py()
                raise BadColumn(f"column {name}: {_token_problem(bad)}")
    return _cast(name, values, wanted)


def number_values(name: str, values: pa.Array) -> pa.Array:
    """Numbers as fp64, rounded where they have more digits.

    Raises:
        BadColumn: for a value that is no number, naming the column.
    """
    values = decoded(values)
    if values.type == pa.float64():
        return values
    if is_text(values.type):
        values = _cast(name, values, pa.string())
    return _cast(name, values, pa.float64(), safe=not pa.types.is_integer(values.type))


def as_lists(name: str, values: pa.Array) -> pa.Array:
    """A list column of any kind as one whose values can be flattened.

    Raises:
        BadColumn: where it is none, naming the column.
    """
    if pa.types.is_null(values.type):
        return values.cast(pa.list_(pa.null()))
    if not _is_list(values.type):
        raise BadColumn(f"column {name}: is no list column but {values.type}; set many=false")
    return values


def decoded(values: pa.Array) -> pa.Array:
    """The values of a dictionary-encoded array; another one as it is."""
    return values.dictionary_decode() if pa.types.is_dictionary(values.type) else values


def is_text(kind: pa.DataType) -> bool:
    """Whether values of this type are read as UTF-8 text."""
    tests = (
        pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view,
        pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view,
        pa.types.is_fixed_size_binary,
    )  # fmt: skip
    return any(test(kind) for test in tests)


def _is_list(kind: pa.DataType) -> bool:
    tests = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(test(kind) for test in tests)


def _scalar_problem(kind: pa.DataType, role: str, key: str) -> str | None:
    """Why a column of this type can't be an id of `int`, `hex` or `text`, or a `number`."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_null(kind) or is_text(kind):
        return None
    if _is_list(kind):
        if key.startswith("data.schema.sparse"):
            return f"set {key}.many=true"
        return "one value a row is needed, no list"
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    if role == "hex" and is_number:
        return (
            f"its decimal digits would be read as hex digits; set {key}.token=int, or write the "
            "column as text"
        )
    if is_number or (pa.types.is_boolean(kind) and role in ("text", "number")):
        return None
    if pa.types.is_boolean(kind):
        return f"set {key}.token=text"
    if pa.types.is_struct(kind) or pa.types.is_map(kind):
        return "make columns of its fields"
    wanted = "numbers" if role == "number" else "whole numbers or text"
    return f"write the column as {wanted} (such as the hour, the day or the year of a time)"


def _list_problem(kind: pa.DataType, role: str, key: str) -> str | None:
    if pa.types.is_null(kind):
        return None
    if not _is_list(kind):
        return _scalar_problem(kind, role, key) or f"it is no list column; set {key}.many=false"
    if _is_list(kind.value_type):
        return "lists of lists can't be read; write one list a row"
    return _scalar_problem(kind.value_type, role, key)


def _whole_floats(name: str, values: pa.Array) -> pa.Array:
    """Floats that are whole numbers as int64, NaN as null.

    Raises:
        BadColumn: for others, and from where on a float can't tell neighbours apart.
    """
    limit = 2 ** {16: 11, 32: 24, 64: 53}[values.type.bit_width]
    numbers = values.to_numpy(zero_copy_only=False).astype(np.float64)
    is_missing = np.isnan(numbers)
    with np.errstate(invalid="ignore"):
        is_bad = ~is_missing & (numbers != np.floor(numbers))
    if is_bad.any():
        raise BadColumn(f"column {name}: {numbers[is_bad][0]} is no whole number ({values.type})")
    is_bad = ~is_missing & (np.abs(numbers) >= limit)
    if is_bad.any():
        raise BadColumn(
            f"column {name}: {numbers[is_bad][0]:.17g} stands for several ids in a column of type "
            f"{values.type}, exact below {limit:,} only; write the column as int64 or text"
        )
    return pa.array(np.where(is_missing, 0, numbers).astype(np.int64), mask=is_missing)


def _token_problem(text: str) -> str:
    try:
        key_of_text(text, "int")
    except BadToken as error:
        return str(error)
    return f"{text!r} isn't a whole number"


def _cast(name: str, values: pa.Array, wanted: pa.DataType, *, safe: bool = True) -> pa.Array:
    try:
        return values.cast(wanted, safe=safe)
    except _CONVERSIONS as error:
        raise BadColumn(f"column {name} ({values.type}): {error}") from None
