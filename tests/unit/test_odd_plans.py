"""Plan files with anything in them: refused in words, or they train what the oracle trains."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embeddings import Plan, Shard, TableConfig
from tests.unit.test_mixed_memory import RULES, TABLES, check_plan, halved, placed_plans

HUGE = 10**400
ODD: list[Any] = [
    None, True, False, -1, 0, 1, 2, 3, 2**31, 2**63, 2**64, HUGE, 0.0, 1.0, 2.5, 1e308,
    float("nan"), float("inf"), "", "0", "user", "item", "flag", "nobody", "host", "device", "kv",
    "pooled", "\ud800", "x" * 5_000, [], [0], {}, {"user": "kv"}, [[[]]],
]  # fmt: skip
SHARD_FIELDS = ("table", "row_start", "row_stop", "col_start", "col_stop", "rank", "memory")


def refused(text: str) -> Plan | None:
    """A plan that validates, or None where it was refused by a ValueError that says why."""
    caught: ValueError | None = None
    try:
        plan = Plan.from_json(text)
        plan.validate(TABLES)
    except ValueError as error:
        caught = error
    if caught is None:
        return plan
    assert type(caught) is ValueError, f"{type(caught).__name__}: {caught}"
    assert any(word in str(caught) for word in ("plan", "shard", "table")), str(caught)
    return None


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """The JSON of a valid plan, with one to three things changed."""
    plan = draw(placed_plans(draw(st.integers(1, 3))))
    fields = json.loads(plan.to_json())
    for _ in range(draw(st.integers(1, 3))):
        _mutate(draw, fields)
    return json.dumps(fields)


def _mutate(draw: st.DrawFn, fields: dict[str, Any]) -> None:
    shards, exchange = fields.get("shards"), fields.get("exchange")
    has_shards = isinstance(shards, list) and bool(shards) and isinstance(shards[0], dict)
    how = draw(st.sampled_from(["shard", "shard", "shift", "shift", "list", "exchange", "top"]))
    if how in ("shard", "shift", "list") and has_shards:
        number = draw(st.integers(0, len(shards) - 1))
        shard, name = shards[number], draw(st.sampled_from(SHARD_FIELDS))
        if not isinstance(shard, dict):
            return
        if how == "shard":
            shard[name] = draw(st.sampled_from(ODD))
        elif how == "shift" and type(shard.get(name)) is int:
            shard[name] += draw(st.sampled_from([-1, 1, -2, 2]))
        elif how == "list":
            what = draw(st.sampled_from(["drop", "double", "forget", "add", "odd"]))
            if what == "drop":
                del shards[number]
            elif what == "double":
                shards.append(copy.deepcopy(shard))
            elif what == "forget":
                shard.pop(name, None)
            elif what == "add":
                shard["colour"] = 1
            else:
                shards[number] = draw(st.sampled_from(ODD))
    elif how == "exchange" and isinstance(exchange, dict):
        name = draw(st.sampled_from(["user", "item", "flag", "nobody"]))
        if draw(st.booleans()):
            exchange.pop(name, None)
        else:
            exchange[name] = draw(st.sampled_from(ODD))
    else:
        name = draw(st.sampled_from(["format_version", "world_size", "shards", "exchange", "more"]))
        if draw(st.booleans()):
            fields.pop(name, None)
        else:
            fields[name] = draw(st.sampled_from(ODD))


def check_text(text: str, rule: str) -> None:
    """Refused, or it trains right, half of the rows hot."""
    plan = refused(text)
    if plan is not None and plan.world_size <= 3:
        hot = {table.name: np.arange(0, table.rows, 2) for table in TABLES}
        check_plan(plan, rule, "lookahead", hot)


def test_f33_some_mutated_plans_are_refused_or_train_right() -> None:
    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(mutated(), st.sampled_from(RULES))
    def check(text: str, rule: str) -> None:
        check_text(text, rule)

    check()


@pytest.mark.slow
def test_f33_any_mutated_plan_is_refused_or_trains_right() -> None:
    @settings(max_examples=600, deadline=None, derandomize=True, database=None)
    @given(mutated(), st.sampled_from(RULES))
    def check(text: str, rule: str) -> None:
        check_text(text, rule)

    check()


def test_f33_each_field_of_each_odd_value() -> None:
    """One at a time, so that no other fault hides it; what validates has a meaning."""
    for name in SHARD_FIELDS:
        for value in ODD:
            fields = json.loads(halved(2).to_json())
            fields["shards"][1][name] = value
            plan = refused(json.dumps(fields))
            if plan is not None:
                assert plan.shards[1] == replace(halved(2).shards[1], **{name: value})
    for name in ("format_version", "world_size", "shards", "exchange"):
        for value in ODD:
            fields = json.loads(halved(2).to_json()) | {name: value}
            plan = refused(json.dumps(fields))
            if plan is not None:
                assert name in ("format_version", "world_size")
                assert type(value) is int
                assert value >= 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"format_version": ' + "9" * 5_000 + "}", "number of 5,000 digits"),
        ("9" * 5_000, "number of 5,000 digits"),
        ("NaN", "format_version"),
        ("[" * 100_000, "not JSON"),
        ('"plan"', "format_version"),
    ],
)
def test_f33_text_that_json_or_python_can_not_take(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Plan.from_json(text)


@pytest.mark.parametrize("world_size", [2**31, 10**18, HUGE])
def test_f33_a_plan_for_any_number_of_ranks_is_checked_at_once(world_size: int) -> None:
    """Also where a table looks as if it were replicated."""
    table = TableConfig("t", 4, 2)
    whole = [Shard("t", 0, 4, 0, 2, rank) for rank in range(3)]
    with pytest.raises(ValueError, match="rank 3"):
        Plan(world_size, tuple(whole), {"t": "kv"}).validate([table])
    Plan(world_size, (whole[0],), {"t": "kv"}).validate([table])
