"""The slow, plain reading of a slice of a csv file, to say which line is wrong and why."""

from __future__ import annotations

import csv
import math

from data.errors import RawDataError
from data.schema import Feature, Schema, resolve_features
from data.tokens import BadToken, key_of_text


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
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise RawDataError(
                file,
                number,
                f"not UTF-8 text (byte {error.start + 1} of the line); convert the file",
            ) from None
        fields = _split(line, schema)
        if len(fields) != len(columns):
            raise RawDataError(file, number, _wrong_count(len(fields), columns, schema, labelled))
        problem = _problem_of(dict(zip(columns, fields, strict=True)), schema, features, labelled)
        if problem:
            if number == 1 and not schema.format.header:
                problem += "; if line 1 is a header, set data.schema.format.header=true"
            raise RawDataError(file, number, problem)


def _split(line: str, schema: Schema) -> list[str]:
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
    if labelled and found == expected - 1:
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
        if value in missing or _number_problem("", value, missing) or float(value) < 0:
            return f"column {schema.example_weight}: example weight {value!r} must be 0 or more"
    for feature in features:
        if problem := _ids_problem(feature, row, missing):
            return problem
    return None


def _number_problem(name: str, value: str, missing: list[str]) -> str | None:
    if value in missing:
        return None
    try:
        number = float(value)
    except ValueError:
        return f"column {name}: {value!r} is no number"
    return None if math.isfinite(number) else f"column {name}: {value!r} isn't finite"


def _ids_problem(feature: Feature, row: dict[str, str], missing: list[str]) -> str | None:
    value = row[feature.name]
    if value in missing:
        return None
    tokens = value.split(feature.separator) if feature.separator else [value]
    for token in tokens:
        try:
            key_of_text(token, feature.token)
        except BadToken as error:
            return f"column {feature.name}: {error} (data.schema.sparse.{feature.name}.token)"
    if feature.bag_weights:
        weights = row[feature.bag_weights].split(feature.separator)
        if len(weights) != len(tokens):
            return (
                f"column {feature.bag_weights}: {len(weights)} weights for {len(tokens)} ids in "
                f"column {feature.name}"
            )
        for weight in weights:
            if weight in missing or (
                problem := _number_problem(feature.bag_weights, weight, missing)
            ):
                return (
                    problem
                    if weight not in missing
                    else (f"column {feature.bag_weights}: a weight is missing")
                )
    return None
