"""Constructors refuse arguments of another type or value by a ValueError that names the field."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.batch import Batch, JaggedIds
from embeddings import (
    FeatureConfig,
    Plan,
    ReferenceEmbeddings,
    RowOptimizerConfig,
    Shard,
    ShardedEmbeddings,
    SingleProcess,
    TableConfig,
)
from embeddings.host.executor import LinkRates, SimulatedRates
from embeddings.host.host_tables import HostSettings
from embeddings.row_update import update_in_place

NAN = float("nan")
ODD: list[Any] = [
    None, True, False, np.True_, -1, 0, 1, 3, 2**63, 10**400, np.int32(3), np.int64(-2),
    np.uint8(4), 0.5, 1.0, -0.5, 1e308, NAN, float("inf"), np.float32(0.5), np.float64(NAN), 1j,
    "", "0", "3", "sum", "mean", "adam", "sgd", "host", "kv", "\ud800", b"sum", [], [1], (), (0, 1),
    {}, set(), object(), int, np.zeros(3), np.zeros((), dtype=np.int64), torch.tensor(3),
    torch.zeros(3), torch.float32, torch.float16, torch.float64, Ellipsis,
]  # fmt: skip

IDS = JaggedIds(torch.tensor([0, 1]), torch.tensor([0, 1, 2]), 1)
TABLES = [TableConfig("t", 4, 2)]
FEATURES = [FeatureConfig("f", "t")]


def make_sharded(**arguments: Any) -> ShardedEmbeddings:
    given_ = {"tables": TABLES, "features": FEATURES, "optimizer": RowOptimizerConfig()}
    given_ |= {"dtype": torch.float32, "seed": 0} | arguments
    return ShardedEmbeddings(**given_)  # type: ignore[arg-type]


def make_reference(**arguments: Any) -> ReferenceEmbeddings:
    given_ = {"tables": TABLES, "features": FEATURES, "optimizer": RowOptimizerConfig()}
    given_ |= {"dtype": torch.float32, "seed": 0} | arguments
    return ReferenceEmbeddings(**given_)  # type: ignore[arg-type]


# Per constructor good arguments, and what a message calls each field.
CONSTRUCTORS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "TableConfig": (TableConfig, {"name": "t", "rows": 4, "dim": 2}),
    "FeatureConfig": (FeatureConfig, {"name": "f", "table": "t", "pooling": "sum"}),
    "RowOptimizerConfig": (
        RowOptimizerConfig,
        {"name": "adam", "eps": 1e-8, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.99},
    ),
    "Shard": (
        Shard,
        {"table": "t", "row_start": 0, "row_stop": 4, "col_start": 0, "col_stop": 2, "rank": 0},
    ),
    "Plan": (
        Plan,
        {"world_size": 1, "shards": (Shard("t", 0, 4, 0, 2, 0),), "exchange": {"t": "kv"}},
    ),
    "HostSettings": (
        HostSettings,
        {
            "mode": "gather", "lookahead": 1, "batch_rows": 8, "staging_bytes": None,
            "hot_bytes": 0, "recent_steps": 0,
        },
    ),
    "LinkRates": (LinkRates, {"bytes_per_s": 1e9, "latency_s": 0.0}),
    "SimulatedRates": (
        SimulatedRates, {"link": None, "gather_bytes_per_s": 1e9, "scatter_bytes_per_s": 1e9},
    ),
    "JaggedIds": (
        JaggedIds,
        {
            "values_L": torch.tensor([0, 1]), "offsets": torch.tensor([0, 1, 2]),
            "num_features": 1, "weights_L": None,
        },
    ),
    "Batch": (
        Batch,
        {
            "dense_BN": torch.zeros(2, 3), "ids": IDS, "label_B": torch.zeros(2),
            "weight_B": torch.ones(2), "row_B": torch.arange(2),
        },
    ),
    "ShardedEmbeddings": (
        make_sharded,
        {
            "tables": TABLES, "features": FEATURES, "optimizer": RowOptimizerConfig(),
            "dtype": torch.float32, "seed": 0, "plan": None, "comm": None, "wire": "fp32",
            "backend": "torch", "accumulate": 1, "clip_norm": None, "host": None, "executor": None,
        },
    ),
    "ReferenceEmbeddings": (
        make_reference,
        {
            "tables": TABLES, "features": FEATURES, "optimizer": RowOptimizerConfig(),
            "dtype": torch.float32, "seed": 0,
        },
    ),
}  # fmt: skip

# What messages call a field where they don't use its own name.
WORDS = {
    "values_L": ("values_L", "ids"),
    "weights_L": ("weights_L", "bag weights", "seed"),
    "num_features": ("num_features", "features"),
    "dtype": ("tables are fp32",),
    "ids": ("ids", "parts of a batch"),
    "dense_BN": ("dense_BN", "parts of a batch"),
    "label_B": ("label_B", "parts of a batch"),
    "weight_B": ("weight_B", "parts of a batch"),
    "row_B": ("row_B", "parts of a batch"),
    "rows": ("rows",),
    "dim": ("dim", "columns"),
    "features": ("features", "feature"),
    "tables": ("tables", "table"),
}


def check(constructor: str, changes: dict[str, Any]) -> None:
    """Refused by a message with a changed field in it, or what is made can be used."""
    make, good = CONSTRUCTORS[constructor]
    message = ""
    try:
        made = make(**(good | changes))
    except ValueError as error:
        message = str(error)
    if message:
        words = [word for name in changes for word in WORDS.get(name, (name,))]
        assert any(word in message for word in words), f"{changes}: {message}"
        assert len(message) < 400
        return
    if constructor in ("Shard", "Plan"):
        with suppress(ValueError):  # Values are `Plan.validate`'s to refuse.
            use(made)
        return
    use(made)
    if isinstance(made, ShardedEmbeddings):
        made.close()


def use(made: Any) -> None:
    """What each is made for."""
    if isinstance(made, TableConfig):
        assert (type(made.rows), type(made.dim)) == (int, int)
        assert made.default_bound > 0
    elif isinstance(made, Shard):
        assert str(made)
        assert made.num_rows * made.num_cols >= -(2**2000)
        Plan(1, (made,), {"t": "kv"}).validate(TABLES)
    elif isinstance(made, Plan):
        made.validate(TABLES)
        assert Plan.from_json(made.to_json()) == made
        assert made.describe()
        assert made.digest()
    elif isinstance(made, HostSettings):
        assert made.window >= 0
    elif isinstance(made, RowOptimizerConfig):
        weights, state = torch.zeros(1, 1), {"exp_avg": torch.zeros(1, 1)}
        state = {"adam": {**state, "exp_avg_sq": torch.zeros(1, 1)}, "sgd": {}}[made.name]
        gradient, row = torch.ones(1, 1), torch.zeros(1, dtype=torch.int64)
        update_in_place(made, weights, state, row, gradient, lr=0.1, num_steps=1)
    elif isinstance(made, LinkRates):
        assert made.duration_s(10) >= 0
    elif isinstance(made, SimulatedRates):
        assert made.duration_s("gather", 10) >= 0
    elif isinstance(made, JaggedIds):
        assert made.take(slice(0, made.batch_size)).values_L.dtype == torch.int64
        assert made.lengths_FB().shape == (made.num_features, made.batch_size)
    elif isinstance(made, Batch):
        assert made.narrow(0, made.batch_size).batch_size == made.batch_size
    elif isinstance(made, ShardedEmbeddings):
        made.lookup(made.plan_batch(JaggedIds(torch.tensor([0]), torch.tensor([0, 1]), 1)))


CASES = [(name, field) for name, (_, good) in CONSTRUCTORS.items() for field in good]


@pytest.mark.parametrize(("constructor", "field"), CASES)
def test_f33_one_odd_argument(constructor: str, field: str) -> None:
    for value in ODD:
        is_empty = isinstance(value, list | tuple) and not value
        if field in ("tables", "features") and is_empty:
            continue  # Fewer features than the batch has; see below.
        check(constructor, {field: value})


@pytest.mark.slow
@pytest.mark.parametrize("constructor", [name for name in CONSTRUCTORS if "Emb" not in name])
def test_f33_several_odd_arguments(constructor: str) -> None:
    fields = list(CONSTRUCTORS[constructor][1])
    strategy = st.dictionaries(st.sampled_from(fields), st.sampled_from(ODD), min_size=2)

    @settings(max_examples=300, deadline=None, derandomize=True, database=None)
    @given(strategy)
    def check_all(changes: dict[str, Any]) -> None:
        check(constructor, changes)

    check_all()


def test_f33_numbers_of_numpy_are_taken() -> None:
    """They come from counts; a plan with them is written as JSON."""
    table = TableConfig("t", np.int64(4), np.int32(2))  # type: ignore[arg-type]
    assert table == TABLES[0]
    shard = Shard("t", *(np.int64(n) for n in (0, 4, 0, 2, 0)))  # type: ignore[arg-type]
    plan = Plan(np.int64(1), [shard], {"t": "kv"})  # type: ignore[arg-type]
    plan.validate([table])
    assert Plan.from_json(plan.to_json()) == plan


def test_f33_tables_without_features_and_no_features_at_all() -> None:
    empty = JaggedIds(torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 0)
    embeddings = make_sharded(features=[])
    batch = embeddings.plan_batch(empty)
    pooled = embeddings.lookup(batch)
    assert pooled.shape == (0, 0)
    embeddings.apply(embeddings.backward(batch, torch.zeros(0, 0), 0.1), 0.1)
    found = embeddings.read("t", 0, 4)
    assert found is not None
    assert found["weight"].shape == (4, 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64])
def test_f33_bag_weights_of_another_type_are_refused(dtype: torch.dtype) -> None:
    """Which part of the program rounds them would depend on the plan."""
    with pytest.raises(ValueError, match="bag weights must be float32"):
        JaggedIds(IDS.values_L, IDS.offsets, 1, torch.ones(2).to(dtype))


def test_f33_a_negative_number_of_features_is_refused() -> None:
    with pytest.raises(ValueError, match="num_features is -1"):
        JaggedIds(IDS.values_L, IDS.offsets, -1)


def test_f33_splits_that_do_not_add_up_are_refused() -> None:
    """A transport would write beyond what it was given."""
    comm = SingleProcess()
    with pytest.raises(ValueError, match="ids"):
        comm.all_to_all("ids", torch.zeros(3), [3], torch.zeros(2), [3])


@pytest.mark.slow
@pytest.mark.processes
def test_f33_kernels_are_guarded_without_asserts_too() -> None:
    """Under `python -O`: rows that aren't there, and arrays of other shapes and types."""
    program = """
import torch
from embeddings.row_optim import RowOptimizerConfig
from embeddings.row_update import update_in_place
assert False, "asserts are off here"
W = torch.zeros(4, 2)
I = lambda *rows: torch.tensor(rows)
cases = [
    ("sgd", {}, I(4), torch.ones(1, 2)), ("sgd", {}, I(-1), torch.ones(1, 2)),
    ("sgd", {}, I(1), torch.ones(1, 4)), ("sgd", {}, I(1), torch.ones(3, 2)),
    ("sgd", {}, I(1), torch.ones(1, 2).double()), ("sgd", {}, I(1).int(), torch.ones(1, 2)),
    ("sgd", {}, I(1)[None], torch.ones(1, 2)), ("adagrad", {}, I(1), torch.ones(1, 2)),
    ("adagrad", {"sum": torch.zeros(2, 2)}, I(3), torch.ones(1, 2)),
    ("adagrad", {"sum": torch.zeros(4, 1)}, I(1), torch.ones(1, 2)),
    ("adam", {n: torch.zeros(4, 2) for n in ("exp_avg", "exp_avg_sq")}, I(1), torch.ones(1, 2)),
]
for name, states, rows, grads in cases:
    try:
        update_in_place(RowOptimizerConfig(name), W, states, rows, grads, lr=1.0, num_steps=0)
    except (ValueError, IndexError):
        continue
    raise SystemExit(f"{name} {rows} {grads} was accepted")
"""
    ended = subprocess.run(
        [sys.executable, "-O", "-c", program],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
