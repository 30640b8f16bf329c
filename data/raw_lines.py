"""The slow, plain reading of a slice of a csv file, to say which line is wrong and why."""

from __future__ import annotations

import csv
import math
import re

from data.errors import RawDataError
from data.schema import Feature, Schema, resolve_features
from data.tokens import BadToken, key_of_text

# What the fast parser takes for a number: float() alone would take '1_000' and other scripts too.
_NUMBER = re.compile(
    r"[+-]?(([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|inf|infinity|nan)", re.IGNORECASE
)
# From here on a number rounds to infinity in fp32.
_LARGEST_FP32 = 3.4028235677973366e38


def explain_bad_slice(
    file: str,
    payload: bytes,
    first_line: int,
    schema: Schema,
    columns: list[str],
    labelled: bool,
) -> None:
    """Goes through the lines of a slice that the fast parser refused.

    Raises:
        RawDataError: at the first line that breaks the schema, with its number. Returns where it
            finds none (then the caller reports the fast parser's own words).
    """
    features = resolve_features(schema)
    for number, raw in enumerate(payload.split(b"\n"), start=first_line):
        raw = raw.removesuffix(b"\r")
        if not raw:
            continue
        if b"\r" in raw and not schema.format.quote:
            raise RawDataError(
                file, number, "a carriage return inside the line; end lines with LF or CRLF"
            )
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise RawDataError(
                file,
                number,
                f"not UTF-8 text (byte {error.start + 1} of the line); convert the file",
            ) from None
        if schema.format.quote and line.count(schema.format.quote) % 2:
            raise RawDataError(file, number, "a line break inside quotes isn't supported")
        fields = split_fields(line, schema)
        if len(fields) != len(columns):
            raise RawDataError(file, number, _wrong_count(len(fields), columns, schema, labelled))
        problem = _problem_of(dict(zip(columns, fields, strict=True)), schema, features, labelled)
        if problem:
            if number == 1 and not schema.format.header:
                problem += "; if line 1 is a header, set data.schema.format.header=true"
            raise RawDataError(file, number, problem)


def split_fields(line: str, schema: Schema) -> list[str]:
    """The fields of one line of a csv file."""
    form = schema.format
    if form.quote and form.quote in line:
        fields = next(csv.reader([line], delimiter=form.delimiter, quotechar=form.quote))
    else:
        fields = line.split(form.delimiter)
    return [field.strip() for field in fields] if form.trim else fields


def _wrong_count(found: int, columns: list[str], schema: Schema, labelled: bool) -> str:
    expected = len(columns)
    text = f"{found} fields found, {expected} expected"
    if found == 1:
        return (
            f"{text}; is the delimiter {schema.format.delimiter!r} (data.schema.format.delimiter)?"
        )
    if labelled and found == expected - 1 and not schema.format.header:
        return (
            f"{text}; a file without the label column ({schema.label.column}) can be used with "
            "`dlrm predict` only"
        )
    return text


def _problem_of(
    row: dict[str, str], schema: Schema, features: tuple[Feature, ...], labelled: bool
) -> str | None:
    """What is wrong with one row, or None."""
    missing = schema.format.missing
    label = schema.label
    if labelled:
        value = row[label.column]
        if value in missing:
            return f"column {label.column}: the label is missing"
        if value not in label.positive and value not in label.negative:
            allowed = ", ".join(label.negative + label.positive)
            return f"column {label.column}: label {value!r} is none of {allowed}"
    for name in schema.dense:
        if problem := _number_problem(name, row[name], missing):
            return problem
    if labelled and schema.example_weight:
        value = row[schema.example_weight]
        if value in missing or _number_problem("", value, missing):
            return f"column {schema.example_weight}: example weight {value!r} is no number"
        if not 0 <= float(value) < _LARGEST_FP32:
            return f"column {schema.example_weight}: example weight {value!r} must be 0 or more"
    for feature in features:
        if problem := _ids_problem(feature, row, missing):
            return problem
    return None


def _number_problem(name: str, value: str, missing: list[str]) -> str | None:
    if value in missing:
        return None
    # Blanks around a number are no fault to the fast parser.
    text = value.strip(" \t")
    if not _NUMBER.fullmatch(text):
        return f"column {name}: {value!r} is no number"
    return None if math.isfinite(float(text)) else f"column {name}: {value!r} isn't finite"


def _ids_problem(feature: Feature, row: dict[str, str], missing: list[str]) -> str | None:
    name = feature.name
    tokens = _bag(row[name], feature, missing)
    if feature.token == "int" and not feature.separator:
        tokens = [token.strip(" \t") for token in tokens]
    for token in tokens:
        if feature.separator and token in missing:
            return f"column {name}: a missing id inside a bag"
        try:
            key_of_text(token, feature.token)
        except BadToken as error:
            return f"column {name}: {error} (data.schema.sparse.{name}.token)"
    return _bag_weights_problem(feature, row, missing, len(tokens))


def _bag_weights_problem(
    feature: Feature, row: dict[str, str], missing: list[str], num_ids: int
) -> str | None:
    column = feature.bag_weights
    if column is None:
        return None
    weights = _bag(row[column], feature, missing)
    if len(weights) != num_ids:
        return f"column {column}: {len(weights)} weights for {num_ids} ids in column {feature.name}"
    for weight in weights:
        if not _NUMBER.fullmatch(weight):
            return f"column {column}: weight {weight!r} is no number"
        if not abs(float(weight)) < _LARGEST_FP32:
            return f"column {column}: weight {weight!r} isn't finite in fp32"
    return None


def _bag(value: str, feature: Feature, missing: list[str]) -> list[str]:
    if value in missing:
        return []
    return value.split(feature.separator) if feature.separator else [value]
