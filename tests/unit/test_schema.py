"""Schemas: defaults, refusals that name the key, the round trip and the list of differences."""

from __future__ import annotations

import json
from typing import Any

import pytest

from data.errors import UserError
from data.schema import (
    DenseColumn,
    LabelColumn,
    RawFormat,
    Schema,
    SparseColumn,
    Split,
    check_schema,
    resolve_features,
    schema_differences,
    schema_from_dict,
    schema_to_dict,
    used_columns,
)


def schema_of(sparse: dict[str, SparseColumn] | None = None, **more: Any) -> Schema:
    values: dict[str, Any] = {
        "format": RawFormat(columns=["label", "x", "a", "b", "w"]),
        "dense": {"x": DenseColumn()},
        "sparse": {"a": SparseColumn(), "b": SparseColumn()} if sparse is None else sparse,
    }
    return Schema(**{**values, **more})


def test_a_column_takes_what_it_leaves_open_from_sparse_default() -> None:
    schema = schema_of(
        {"a": SparseColumn(min_count=7), "b": SparseColumn(token="int", pooling="mean")},
        sparse_default=SparseColumn(token="hex", min_count=3, rows=100),
    )
    a, b = resolve_features(schema)
    assert (a.name, a.position, a.table, a.token, a.min_count, a.rows) == (
        "a", 0, "a", "hex", 7, 100,
    )  # fmt: skip
    assert (b.position, b.token, b.min_count, b.pooling) == (1, "int", 3, "mean")
    assert (a.vocabulary, a.missing, a.pooling) == ("dictionary", "row", "sum"), (
        "what sparse_default leaves open too has a stated last default"
    )


@pytest.mark.parametrize(
    ("column", "is_list"),
    [
        (SparseColumn(), False),
        (SparseColumn(missing="empty"), True),
        (SparseColumn(separator="|"), True),
        (SparseColumn(token="int", vocabulary="identity", rows=5), True),
        (SparseColumn(vocabulary="hash", rows=5), False),
    ],
)
def test_list_storage_exactly_where_a_bag_may_hold_other_than_one_id(
    column: SparseColumn, is_list: bool
) -> None:
    assert resolve_features(schema_of({"a": column}))[0].is_list is is_list


def test_an_identity_table_takes_an_empty_bag_for_missing() -> None:
    """Every one of its rows belongs to an id, so there is none for 'missing'."""
    identity = SparseColumn(token="int", vocabulary="identity", rows=5)
    schema = schema_of({"a": identity}, sparse_default=SparseColumn(missing="row"))
    assert resolve_features(schema)[0].missing == "empty"


REFUSED = [
    (schema_of({"a": SparseColumn(token="utf8")}), "data.schema.sparse.a.token=utf8"),
    (schema_of({"a": SparseColumn(vocabulary="dict")}), "data.schema.sparse.a.vocabulary=dict"),
    (schema_of({"a": SparseColumn(pooling="max")}), "data.schema.sparse.a.pooling=max"),
    (schema_of({"a": SparseColumn(missing="zero")}), "data.schema.sparse.a.missing=zero"),
    (schema_of({"a": SparseColumn(out_of_range="wrap")}), "sparse.a.out_of_range=wrap"),
    (schema_of({"a": SparseColumn(vocabulary="hash")}), "data.schema.sparse.a.rows is missing"),
    (schema_of({"a": SparseColumn(vocabulary="hash", rows=1)}), "data.schema.sparse.a.rows=1"),
    (schema_of({"a": SparseColumn(rows=2)}), "data.schema.sparse.a.rows=2: must be at least 3"),
    (schema_of({"a": SparseColumn(min_count=0)}), "data.schema.sparse.a.min_count=0"),
    (schema_of({"a": SparseColumn(vocabulary="identity", rows=5)}), "sparse.a.token=text"),
    (
        schema_of({"a": SparseColumn("int", "identity", rows=5, missing="row")}),
        "data.schema.sparse.a.missing=row",
    ),
    (schema_of({"a": SparseColumn(many=True)}), "data.schema.sparse.a.many=true"),
    (schema_of({"a": SparseColumn(bag_weights="w")}), "data.schema.sparse.a.bag_weights=w"),
    (
        schema_of({"a": SparseColumn(separator="|")}, format=RawFormat(kind="parquet")),
        "data.schema.sparse.a.separator",
    ),
    (
        schema_of({"a": SparseColumn(table="t"), "b": SparseColumn(table="t", min_count=2)}),
        "data.schema.sparse.b.min_count=2, but data.schema.sparse.a.min_count=1",
    ),
    (
        schema_of({"a": SparseColumn(table="t"), "b": SparseColumn(table="t", token="hex")}),
        "data.schema.sparse.b.token=hex",
    ),
    (schema_of({}, dense={}), "neither dense nor sparse"),
    (schema_of({"x": SparseColumn()}), "two things: x"),
    (schema_of({"label": SparseColumn()}), "two things: label"),
    (schema_of({"zip": SparseColumn()}), "data.schema.format.columns doesn't list zip"),
    (schema_of(example_weight="v"), "data.schema.format.columns doesn't list v"),
    (schema_of(format=RawFormat()), "data.schema.format.columns is empty"),
    (schema_of(format=RawFormat(columns=["label", "x", "a", "b", "a"])), "names twice: a"),
    (schema_of(dense={"__label": DenseColumn()}, format=RawFormat(header=True)), "__label"),
    (schema_of({"a__weights": SparseColumn()}, format=RawFormat(header=True)), "a__weights"),
]


@pytest.mark.parametrize(("schema", "named"), REFUSED, ids=[named for _, named in REFUSED])
def test_a_schema_that_cannot_be_used_is_refused_naming_the_key(schema: Schema, named: str) -> None:
    with pytest.raises(UserError) as error:
        check_schema(schema)
    assert named in str(error.value)


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: RawFormat(kind="json"), "data.schema.format.kind=json"),
        (lambda: RawFormat(delimiter=", "), "data.schema.format.delimiter=', '"),
        (lambda: RawFormat(quote='""'), "data.schema.format.quote"),
        (lambda: DenseColumn("sqrt"), "transform=sqrt"),
        (lambda: Split("by_day"), "data.schema.split.kind=by_day"),
        (lambda: Split(valid=-0.1), "data.schema.split.valid=-0.1"),
        (lambda: Split("random", valid=0.5, test=0.5), "leave nothing to train on"),
    ],
)
def test_a_value_that_is_wrong_on_its_own_is_refused_at_once(build: Any, named: str) -> None:
    with pytest.raises(UserError) as error:
        build()
    assert named in str(error.value)


def test_a_usable_schema_passes() -> None:
    check_schema(schema_of({"a": SparseColumn(separator="|", bag_weights="b")}, example_weight="w"))
    check_schema(schema_of({}))
    check_schema(schema_of(dense={}))


def test_used_columns_are_the_ones_read() -> None:
    schema = schema_of({"a": SparseColumn(separator="|", bag_weights="b")}, example_weight="w")
    assert used_columns(schema, with_label=True) == ["label", "w", "x", "a", "b"]
    assert used_columns(schema, with_label=False) == ["x", "a", "b"], (
        "an unlabelled file has no example weights either"
    )


def full_schema() -> Schema:
    return Schema(
        name="full",
        format=RawFormat(delimiter=",", header=True, missing=["", "?"], quote='"', trim=True),
        label=LabelColumn("y", positive=["yes"], negative=["no"]),
        example_weight="w",
        dense={"x": DenseColumn("standardise"), "z": DenseColumn("identity")},
        sparse={"a": SparseColumn(separator="|", bag_weights="aw"), "b": SparseColumn(rows=9)},
        sparse_default=SparseColumn(token="text", min_count=2),
        split=Split("random", 0.2, 0.3, seed=5),
    )


def test_a_schema_comes_back_whole_from_the_manifests_json() -> None:
    stored = json.loads(json.dumps(schema_to_dict(full_schema())))
    assert schema_from_dict(stored) == full_schema()


def test_differences_name_every_key_with_both_values() -> None:
    other = full_schema()
    assert schema_differences(full_schema(), other) == []
    other.sparse["b"].rows = 10
    other.sparse["c"] = SparseColumn()
    other.dense["x"] = DenseColumn("log1p")
    other.split.seed = 6
    del other.dense["z"]
    lines = schema_differences(full_schema(), other)
    assert "data.schema.sparse.b.rows: prepared with 9, asked for 10" in lines
    assert "data.schema.dense.x.transform: prepared with standardise, asked for log1p" in lines
    assert "data.schema.split.seed: prepared with 5, asked for 6" in lines
    assert "data.schema.dense.z.transform: prepared with identity, asked for absent" in lines
    assert any(line.startswith("data.schema.sparse.c.") for line in lines)
