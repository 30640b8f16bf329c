"""`Schema`: what the columns of a raw file mean and what becomes of them.

A schema is the part `data.schema` of a file in `conf/data/`. It is stored whole in the manifest of
every dataset prepared with it, so evaluation and prediction read raw files exactly as training
did. `docs/formats.md` tells the same for users.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from data.errors import UserError

TRANSFORMS = ("log1p", "standardise", "identity")
VOCABULARIES = ("dictionary", "hash", "identity")
TOKENS = ("text", "hex", "int")
POOLINGS = ("sum", "mean")
HASH_RULES = ("mixed", "modulo")
"""How `hash` makes a row of a key: by its remainder after mixing its bits, or as it is (datasets
prepared before keys were mixed, and synthetic ones, whose ids lie side by side)."""
SPLITS = ("in_order", "by_file", "random", "given")


@dataclass
class RawFormat:
    """How a raw file is written."""

    kind: str = "csv"
    """`csv` (any one-character delimiter, so TSV too; also packed as gz, bz2, xz or zst) or
    `parquet`."""
    delimiter: str = "\t"
    """One character between fields (csv)."""
    header: bool = False
    """Whether the first line holds column names (csv)."""
    columns: list[str] = field(default_factory=list)
    """Names of all fields in order, where there is no header. Every line must have as many."""
    missing: list[str] = field(default_factory=lambda: [""])
    """Texts that mean 'no value' (csv)."""
    quote: str = ""
    """Quote character, or empty where fields are never quoted (csv)."""
    trim: bool = False
    """Whether blanks around a field are dropped (csv files written with ', ')."""

    def __post_init__(self) -> None:
        if self.kind not in ("csv", "parquet"):
            raise UserError(f"data.schema.format.kind={self.kind}: must be csv or parquet")
        if len(self.delimiter) != 1:
            raise UserError(
                f"data.schema.format.delimiter={self.delimiter!r}: must be one character"
            )
        for key, text in (("delimiter", self.delimiter), ("quote", self.quote)):
            if not text.isascii() or text in ("\n", "\r", "\0") or text == "\\":
                raise UserError(
                    f"data.schema.format.{key}={text!r}: must be an ASCII character, no line end, "
                    "zero byte or backslash"
                )
        if self.delimiter == self.quote:
            raise UserError(
                f"data.schema.format.quote={self.quote!r}: must be another character than delimiter"
            )
        if len(self.quote) > 1:
            raise UserError(
                f"data.schema.format.quote={self.quote!r}: must be one character or empty"
            )


@dataclass
class LabelColumn:
    """The column that says whether the event happened."""

    column: str = "label"
    positive: list[str] = field(default_factory=lambda: ["1"])
    """Texts that mean 1."""
    negative: list[str] = field(default_factory=lambda: ["0"])
    """Texts that mean 0; anything else is an error that names the line."""

    def __post_init__(self) -> None:
        both = [text for text in self.positive if text in self.negative]
        if both:
            raise UserError(
                f"data.schema.label: {both[0]!r} stands in positive and in negative; leave it in "
                "one of them"
            )


@dataclass
class DenseColumn:
    """A column of numbers."""

    transform: str = "log1p"
    """`log1p`: log(1 + max(x, 0)), missing → 0. `standardise`: (x - mean) / deviation with the
    moments of the training part, missing → 0 (the mean). `identity`: x, missing → 0."""

    def __post_init__(self) -> None:
        if self.transform not in TRANSFORMS:
            raise UserError(
                f"data.schema.dense.*.transform={self.transform}: must be one of "
                + ", ".join(TRANSFORMS)
            )


@dataclass
class SparseColumn:
    """A column of categorical ids. What is null is taken from `data.schema.sparse_default`."""

    token: str | None = None
    """How the raw value is read: `text`, `hex` (up to 16 hex digits) or `int`."""
    vocabulary: str | None = None
    """`dictionary` (tokens counted in the training part), `hash` (each token on one of `rows` rows)
    or `identity` (the token is the row)."""
    rows: int | None = None
    """`hash`, `identity`: rows of the table. `dictionary`: the most rows it may have (rarest
    tokens become unknown), or null for no limit."""
    min_count: int | None = None
    """`dictionary`: a token seen less often in the training part becomes the unknown row."""
    missing: str | None = None
    """`row`: a missing value has a row of its own; `empty`: its bag is empty (zero vector)."""
    out_of_range: str | None = None
    """`identity`: an id outside the table is an `error`, is `drop`ped (and counted), or goes to
    the `last_row` (and is counted)."""
    pooling: str | None = None
    """`sum` or `mean` of a bag's rows."""
    table: str | None = None
    """Table (and vocabulary) of this column; null: one of its own, under the column's name."""
    separator: str | None = None
    """csv: the text that separates the ids of one bag; null or empty: one id per field."""
    many: bool | None = None
    """parquet: whether the column is a list column, many ids to a bag."""
    bag_weights: str | None = None
    """Column with one weight per id (a list column, or text with the same separator)."""


def _sparse_default() -> SparseColumn:
    return SparseColumn(
        token="text",
        vocabulary="dictionary",
        min_count=1,
        missing="row",
        out_of_range="error",
        pooling="sum",
    )


@dataclass
class Split:
    """Which rows train, validate and test."""

    kind: str = "in_order"
    """`in_order`: the last rows validate, then test. `by_file`: the last `eval_files` files do, in
    order. `random`: each row by a hash of its number and `seed`. `given`: as in `data.raw_train`,
    `data.raw_valid`, `data.raw_test`."""
    valid: float = 0.1
    """Share of the rows that validate; `by_file`: weight of valid in the held-out files."""
    test: float = 0.1
    """Share of the rows that test; `by_file`: weight of test in the held-out files."""
    seed: int = 0
    """`random`: another seed, another split."""
    eval_files: int = 1
    """`by_file`: how many of the last files are held out."""

    def __post_init__(self) -> None:
        if self.kind not in SPLITS:
            raise UserError(
                f"data.schema.split.kind={self.kind}: must be one of " + ", ".join(SPLITS)
            )
        if self.eval_files < 1:
            raise UserError(f"data.schema.split.eval_files={self.eval_files}: must be at least 1")
        for name, share in (("valid", self.valid), ("test", self.test)):
            if not 0 <= share <= 1:
                raise UserError(f"data.schema.split.{name}={share}: must lie between 0 and 1")
        if self.kind in ("in_order", "random") and self.valid + self.test >= 1:
            raise UserError(
                f"data.schema.split: valid={self.valid} and test={self.test} leave nothing to "
                "train on; their sum must be below 1"
            )


@dataclass
class Schema:
    """Columns of a raw file, their vocabulary rules and transforms, and the split."""

    name: str = "unnamed"
    format: RawFormat = field(default_factory=RawFormat)
    label: LabelColumn = field(default_factory=LabelColumn)
    example_weight: str | None = None
    """Column of a factor of each sample's loss, or null."""
    dense: dict[str, DenseColumn] = field(default_factory=dict)
    sparse: dict[str, SparseColumn] = field(default_factory=dict)
    sparse_default: SparseColumn = field(default_factory=_sparse_default)
    split: Split = field(default_factory=Split)


@dataclass(frozen=True)
class Feature:
    """A sparse column with nothing left to default. `position` is its index among the features."""

    name: str
    position: int
    table: str
    token: str
    vocabulary: str
    rows: int | None
    min_count: int
    missing: str
    out_of_range: str
    pooling: str
    separator: str
    many: bool
    bag_weights: str | None
    is_list: bool
    """Whether a bag can hold other than exactly one id; such features are stored as lists."""
    hash_rule: str = "modulo"
    """`hash`: one of `HASH_RULES`. A checkpoint from before there were two has none: `modulo`."""


def resolve_features(schema: Schema, hash_rule: str = "mixed") -> tuple[Feature, ...]:
    """The sparse columns with `sparse_default` filled in, in the schema's order.

    Args:
        schema: what the columns mean.
        hash_rule: that of the dataset's hashed tables, one of `HASH_RULES`.

    Raises:
        UserError: for a value that isn't allowed, naming its key, or features of one table whose
            vocabulary rules differ.
    """
    features = []
    for position, (name, column) in enumerate(schema.sparse.items()):
        values = _with_defaults(column, schema.sparse_default)
        key = f"data.schema.sparse.{name}"
        _check_choice(f"{key}.token", values["token"], TOKENS)
        _check_choice(f"{key}.vocabulary", values["vocabulary"], VOCABULARIES)
        _check_choice(f"{key}.pooling", values["pooling"], POOLINGS)
        _check_choice(f"{key}.missing", values["missing"], ("row", "empty"))
        _check_choice(f"{key}.out_of_range", values["out_of_range"], ("error", "drop", "last_row"))
        rule, rows = values["vocabulary"], values["rows"]
        if rule == "identity":
            # Every row of an identity table belongs to an id: none is left for 'missing'.
            if column.missing == "row":
                raise UserError(
                    f"{key}.missing=row: an identity table has no row to spare; use empty"
                )
            values["missing"] = "empty"
            if values["token"] != "int":
                raise UserError(
                    f"{key}.token={values['token']}: vocabulary=identity needs token=int"
                )
        least = 3 if rule == "dictionary" else 2 if values["missing"] == "row" else 1
        if rule != "dictionary" and rows is None:
            raise UserError(f"{key}.rows is missing: vocabulary={rule} needs the table's rows")
        if rows is not None and rows < least:
            raise UserError(f"{key}.rows={rows}: must be at least {least} for vocabulary={rule}")
        if values["min_count"] < 1:
            raise UserError(f"{key}.min_count={values['min_count']}: must be at least 1")
        separator = values["separator"] or ""
        many = bool(separator or values["many"])
        if schema.format.kind == "csv" and many and not separator:
            raise UserError(f"{key}.many=true: in csv, name the text between ids with separator=")
        if schema.format.kind == "parquet" and separator:
            raise UserError(
                f"{key}.separator={separator!r}: parquet has list columns; use many=true"
            )
        if values["bag_weights"] and not many:
            raise UserError(f"{key}.bag_weights={values['bag_weights']}: needs many ids in a bag")
        values.update(
            table=values["table"] or name,
            separator=separator,
            many=many,
            # An identity table has no row for 'missing', and drops may empty a bag.
            is_list=many or values["missing"] == "empty",
            hash_rule=hash_rule if rule == "hash" else "modulo",
        )
        features.append(Feature(name=name, position=position, **values))
    _check_shared_tables(features)
    return tuple(features)


def check_schema(schema: Schema) -> None:
    """Refuses a schema that can't be used, naming the key.

    Raises:
        UserError: see `resolve_features`; and for columns that are named twice or not at all.
    """
    features = resolve_features(schema)
    _check_names(schema)
    if not features and not schema.dense:
        raise UserError("data.schema has neither dense nor sparse columns")
    used = used_columns(schema, with_label=True)
    twice = sorted({name for name in used if used.count(name) > 1})
    if twice:
        raise UserError(f"data.schema uses a column for two things: {', '.join(twice)}")
    known = schema.format.columns
    if schema.format.header and known:
        raise UserError("data.schema.format.columns has no use with header=true: leave it empty")
    if schema.format.kind == "csv" and not schema.format.header:
        if not known:
            raise UserError(
                "data.schema.format.columns is empty, and header=false: name the fields"
            )
        twice = sorted({name for name in known if known.count(name) > 1})
        if twice:
            raise UserError(f"data.schema.format.columns names twice: {', '.join(twice)}")
        unknown = [name for name in used if name not in known]
        if unknown:
            raise UserError(
                f"data.schema.format.columns doesn't list {', '.join(unknown)}, "
                "which the schema uses"
            )


def used_columns(schema: Schema, *, with_label: bool) -> list[str]:
    """The raw columns a schema reads, label first."""
    columns = [schema.label.column] if with_label else []
    if schema.example_weight and with_label:
        columns.append(schema.example_weight)
    columns += list(schema.dense) + list(schema.sparse)
    columns += [column.bag_weights for column in schema.sparse.values() if column.bag_weights]
    return columns


def schema_to_dict(schema: Schema) -> dict[str, Any]:
    """Plain data for the manifest."""
    return dataclasses.asdict(schema)


def schema_from_dict(values: dict[str, Any]) -> Schema:
    """The reverse of `schema_to_dict`."""
    return Schema(
        name=values["name"],
        format=RawFormat(**values["format"]),
        label=LabelColumn(**values["label"]),
        example_weight=values["example_weight"],
        dense={name: DenseColumn(**column) for name, column in values["dense"].items()},
        sparse={name: SparseColumn(**column) for name, column in values["sparse"].items()},
        sparse_default=SparseColumn(**values["sparse_default"]),
        split=Split(**values["split"]),
    )


def schema_differences(stored: Schema, wanted: Schema) -> list[str]:
    """What differs, a line each: `sparse.C1.min_count: prepared with 1, asked for 10`."""
    left, right = _flatten(schema_to_dict(stored)), _flatten(schema_to_dict(wanted))
    lines = []
    for key in sorted(left.keys() | right.keys()):
        if left.get(key, "absent") != right.get(key, "absent"):
            have, want = left.get(key, "absent"), right.get(key, "absent")
            lines.append(f"data.schema.{key}: prepared with {have}, asked for {want}")
    return lines


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat.update(_flatten(inner, f"{prefix}.{key}" if prefix else key))
    return flat


def _with_defaults(column: SparseColumn, default: SparseColumn) -> dict[str, Any]:
    last = dataclasses.asdict(_sparse_default())
    given, fallback = dataclasses.asdict(column), dataclasses.asdict(default)
    return {
        key: next((v for v in (given[key], fallback[key], last[key]) if v is not None), None)
        for key in given
    }


def _check_choice(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f"{key}={value}: must be one of {', '.join(allowed)}")


def _check_names(schema: Schema) -> None:
    for name in [*schema.dense, *schema.sparse]:
        if name.startswith("__") or name.endswith("__weights"):
            raise UserError(
                f"data.schema: the column name {name!r} is kept for prepared data (no '__' in "
                "front, no '__weights' at the end); rename the column"
            )


def _check_shared_tables(features: list[Feature]) -> None:
    first: dict[str, Feature] = {}
    for feature in features:
        owner = first.setdefault(feature.table, feature)
        for name in ("vocabulary", "rows", "token", "min_count", "missing"):
            mine, theirs = getattr(feature, name), getattr(owner, name)
            if mine != theirs:
                raise UserError(
                    f"data.schema.sparse.{feature.name}.{name}={mine}, but "
                    f"data.schema.sparse.{owner.name}.{name}={theirs}: features of one table "
                    f"({feature.table}) need one vocabulary rule"
                )
