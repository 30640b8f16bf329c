"""The slow, plain reading of a slice of a csv file, to say which line is wrong and why."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator

from data.errors import RawDataError
from data.raw_types import BadColumn
from data.schema import Feature, Schema, resolve_features, used_columns
from data.tokens import BadToken, key_of_text

# What the fast parser takes for a number: float() alone would take '1_000' and other scripts too.
_NUMBER = re.compile(
    r"[+-]?(([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|inf|infinity|nan)", re.IGNORECASE
)
# From here on a number rounds to infinity in fp32.
_LARGEST_FP32 = 3.4028235677973366e38
_DELIMITERS = {"\t": "tab", ",": "comma", ";": "semicolon", "|": "vertical bar"}


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
        if b"\r" in raw:
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
        if problem := _quote_problem(line, schema):
            raise RawDataError(file, number, problem)
        fields = split_fields(line, schema)
        if len(fields) != len(columns):
            raise RawDataError(file, number, _wrong_count(line, fields, columns, schema, labelled))
        problem = _problem_of(dict(zip(columns, fields, strict=True)), schema, features, labelled)
        if problem:
            if number == 1 and not schema.format.header:
                problem += _header_hint(fields, columns, schema)
            raise RawDataError(file, number, problem)


def _header_hint(fields: list[str], columns: list[str], schema: Schema) -> str:
    """What to do where the first line of a file is a header, by its words or perhaps."""
    names = {name.strip().strip(schema.format.quote or None) for name in fields}
    if len(names & set(columns)) <= len(columns) // 2:
        return "; if line 1 is a header, set data.schema.format.header=true"
    return (
        "; this file seems to have a header, and format.header=false holds for all files: set "
        "data.schema.format.header=true if each has one, or take the line out"
    )


def split_fields(line: str, schema: Schema) -> list[str]:
    """The fields of one line of a csv file."""
    form = schema.format
    if form.quote and form.quote in line:
        fields = [text + rest for text, rest in _quoted_fields(line, form.delimiter, form.quote)]
    else:
        fields = line.split(form.delimiter)
    return [field.strip() for field in fields] if form.trim else fields


def check_closing_quotes(payload: bytes, schema: Schema) -> None:
    """Refuses a quoted field that goes on after its closing quote, in lines with a backslash before
    a quote: there the backslash was meant to keep the field open.

    Raises:
        BadColumn: without the line, which `explain_bad_slice` finds.
    """
    escaped = b"\\" + schema.format.quote.encode()
    at = payload.find(escaped)
    while at >= 0:
        start = payload.rfind(b"\n", 0, at) + 1
        end = payload.find(b"\n", at)
        end = len(payload) if end < 0 else end
        line = payload[start:end].removesuffix(b"\r").decode("utf-8", errors="replace")
        if problem := _quote_problem(line, schema):
            raise BadColumn(problem)
        at = payload.find(escaped, end)


def _quote_problem(line: str, schema: Schema) -> str | None:
    quote = schema.format.quote
    if not quote or f"\\{quote}" not in line:
        return None
    for text, rest in _quoted_fields(line, schema.format.delimiter, quote):
        if rest and text.endswith("\\"):
            return (
                f"{rest[:20]!r} follows a closing quote; a backslash doesn't escape a quote here: "
                f"write {quote}{quote} for a quote inside a quoted field"
            )
    return None


def _quoted_fields(line: str, delimiter: str, quote: str) -> Iterator[tuple[str, str]]:
    """Of each field, the text in its quotes and what follows them (all of it without quotes)."""
    at = 0
    while True:
        text = ""
        if line.startswith(quote, at):
            text, at = _quoted(line, at + 1, quote)
        end = line.find(delimiter, at)
        if end < 0:
            yield text, line[at:]
            return
        yield text, line[at:end]
        at = end + 1


def _quoted(line: str, at: int, quote: str) -> tuple[str, int]:
    """The text from `at` to its closing quote, doubled quotes as one, and the place behind."""
    pieces: list[str] = []
    while True:
        end = line.find(quote, at)
        if end < 0:
            return "".join([*pieces, line[at:]]), len(line)
        pieces.append(line[at:end])
        if not line.startswith(quote, end + 1):
            return "".join(pieces), end + 1
        pieces.append(quote)
        at = end + 2


def delimiter_hint(line: str, schema: Schema) -> str:
    """Asks after the delimiter of a line that seems to be one field, and says what it holds."""
    delimiter = schema.format.delimiter
    if delimiter in line:
        return ""
    question = f"; is the delimiter {delimiter!r} (data.schema.format.delimiter)?"
    counts = {name: line.count(mark) for mark, name in _DELIMITERS.items()}
    name = max(counts, key=lambda name: counts[name])
    if not counts[name]:
        return question
    return f"{question} The line holds {name}s: set data.schema.format.delimiter to a {name}"


def header_problem(names: list[str], absent: list[str], line: bytes, schema: Schema) -> str:
    """Why a header line isn't one of this schema."""
    text = line.decode("utf-8", errors="replace").rstrip("\r")
    shown = ", ".join(name if name.isprintable() else repr(name) for name in names)
    shown = shown if len(shown) <= 300 else f"{shown[:300]}…"
    message = f"the header has no column {', '.join(absent)}; it names {shown}"
    if len(names) == 1:
        return message + delimiter_hint(text, schema)
    known = used_columns(schema, with_label=True)
    if not any(name in known for name in names):
        message += (
            "; this file seems to have no header: data.schema.format.header=true holds for all "
            "files"
        )
    printable = [name for name in names if name.isprintable()]
    near = [difflib.get_close_matches(name, printable, n=1) for name in absent]
    return message + (f"; did you mean {near[0][0]}?" if near[0] else "")


def _wrong_count(
    line: str, fields: list[str], columns: list[str], schema: Schema, labelled: bool
) -> str:
    found, expected = len(fields), len(columns)
    text = f"{found} fields found, {expected} expected"
    if found == 1:
        return text + delimiter_hint(line, schema)
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
