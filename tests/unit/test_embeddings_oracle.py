"""`ShardedEmbeddings` against the boring oracle, and the cases users have been bitten by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from data.batch import JaggedIds
from embeddings import (
    FeatureConfig,
    IdOutOfRange,
    KVGradients,
    ReferenceEmbeddings,
    RowOptimizerConfig,
    ShardedEmbeddings,
    TableConfig,
    sum_kv,
)

RULES: tuple[Any, ...] = ("sgd", "adagrad", "rowwise_adagrad", "adam")
TABLES = [
    TableConfig("user", rows=40, dim=4),
    TableConfig("item", rows=25, dim=3),
    TableConfig("shop", rows=6, dim=4),
    TableConfig("idle", rows=3, dim=5),
]
FEATURES = [
    FeatureConfig("viewer", "user"),
    FeatureConfig("clicked", "item", pooling="mean"),
    FeatureConfig("friends", "user", pooling="mean"),
    FeatureConfig("shop", "shop"),
    FeatureConfig("bought", "item"),
]


def random_ids(
    tables: Sequence[TableConfig],
    features: Sequence[FeatureConfig],
    batch_size: int,
    generator: torch.Generator,
    *,
    weighted: bool,
    max_length: int = 3,
) -> JaggedIds:
    """Bags of 0 to `max_length` ids, skewed so that rows repeat within bags and batches."""
    rows = {table.name: table.rows for table in tables}
    lengths = torch.randint(0, max_length + 1, (len(features) * batch_size,), generator=generator)
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
    offsets[1:] = lengths.cumsum(0)
    values = []
    for index, feature in enumerate(features):
        num_ids = int(lengths[index * batch_size : (index + 1) * batch_size].sum())
        uniform = torch.rand(num_ids, generator=generator, dtype=torch.float64)
        values.append((uniform.square() * rows[feature.table]).long())
    values_L = torch.cat(values) if values else torch.empty(0, dtype=torch.int64)
    weights_L = torch.rand(values_L.numel(), generator=generator) * 2 if weighted else None
    return JaggedIds(values_L, offsets, len(features), weights_L)


def loss_of(pooled_BS: Tensor) -> Tensor:
    """A loss whose gradient depends on the pooled values, of every column differently."""
    columns_S = torch.linspace(0.5, 1.5, pooled_BS.shape[1], dtype=pooled_BS.dtype)
    return ((pooled_BS * columns_S - 0.3).tanh().square() * 3).sum() / max(1, pooled_BS.shape[0])


def train_step(embeddings: ShardedEmbeddings, ids: JaggedIds, lr: float) -> float:
    plan = embeddings.plan_batch(ids)
    pooled_BS = embeddings.lookup(plan)
    loss = loss_of(pooled_BS)
    loss.backward()
    assert pooled_BS.grad is not None
    embeddings.apply(embeddings.backward(plan, pooled_BS.grad, lr), lr)
    return float(loss.detach())


def reference_step(reference: ReferenceEmbeddings, ids: JaggedIds, lr: float) -> float:
    loss = loss_of(reference.lookup(ids))
    loss.backward()
    reference.apply(lr)
    return float(loss.detach())


def assert_same_tables(embeddings: ShardedEmbeddings, reference: ReferenceEmbeddings) -> None:
    for table in embeddings.store.tables:
        values = embeddings.store.read(table.name, 0, table.rows)
        for name, expected in reference.read(table.name).items():
            tolerance = 1e-10 * float(expected.abs().max()) if expected.numel() else 0.0
            torch.testing.assert_close(
                values[name],
                expected,
                rtol=1e-10,
                atol=tolerance * 1e-3,
                msg=lambda text, at=f"{table.name}.{name}": f"{at}: {text}",
            )


@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.02])
@pytest.mark.parametrize("name", RULES)
def test_50_steps_in_fp64_equal_the_oracle(name: Any, weight_decay: float, weighted: bool) -> None:
    config = RowOptimizerConfig(name=name, eps=1e-6, weight_decay=weight_decay)
    options = {"dtype": torch.float64, "seed": 5}
    embeddings = ShardedEmbeddings(TABLES, FEATURES, config, backend="torch", **options)
    reference = ReferenceEmbeddings(TABLES, FEATURES, config, **options)
    start = embeddings.store.read("user", 0, 40)["weight"]
    generator = torch.Generator().manual_seed(17)
    for step in range(50):
        ids = random_ids(TABLES, FEATURES, 6, generator, weighted=weighted)
        lr = 0.05 / (1 + step / 20)
        loss = train_step(embeddings, ids, lr)
        assert loss == pytest.approx(reference_step(reference, ids, lr), rel=1e-10)
    assert_same_tables(embeddings, reference)
    moved = (embeddings.store.read("user", 0, 40)["weight"] - start).abs().max()
    assert float(moved) > 1e-2, "the tables hardly moved: the comparison shows nothing"


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(RULES),
    shapes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5)), min_size=1, max_size=3),
    data=st.data(),
)
def test_any_tables_features_and_batches_equal_the_oracle(
    name: Any, shapes: list[tuple[int, int]], data: st.DataObject
) -> None:
    tables = [TableConfig(f"t{i}", rows, dim) for i, (rows, dim) in enumerate(shapes)]
    wiring = st.tuples(st.sampled_from(tables), st.sampled_from(["sum", "mean"]))
    features = [
        FeatureConfig(f"f{i}", table.name, pooling=pooling)  # type: ignore[arg-type]
        for i, (table, pooling) in enumerate(data.draw(st.lists(wiring, min_size=1, max_size=4)))
    ]
    config = RowOptimizerConfig(
        name=name, eps=1e-3, weight_decay=data.draw(st.sampled_from([0, 0.1]))
    )
    options = {"dtype": torch.float64, "seed": data.draw(st.integers(0, 99))}
    embeddings = ShardedEmbeddings(tables, features, config, backend="torch", **options)
    reference = ReferenceEmbeddings(tables, features, config, **options)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    for _ in range(3):
        ids = random_ids(
            tables,
            features,
            data.draw(st.integers(0, 4)),
            generator,
            weighted=data.draw(st.booleans()),
            max_length=data.draw(st.integers(0, 4)),
        )
        loss = train_step(embeddings, ids, 0.05)
        assert loss == pytest.approx(reference_step(reference, ids, 0.05), rel=1e-10, abs=1e-12)
        assert_same_tables(embeddings, reference)


@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
def test_gradients_of_micro_batches_sum_to_those_of_the_batch(weighted: bool) -> None:
    config = RowOptimizerConfig(name="adagrad", weight_decay=0.1)
    embeddings = ShardedEmbeddings(
        TABLES, FEATURES, config, dtype=torch.float64, seed=5, accumulate=3
    )
    assert embeddings.backend == "torch"
    generator = torch.Generator().manual_seed(2)
    ids = random_ids(TABLES, FEATURES, 7, generator, weighted=weighted)
    grad_BS = torch.randn(7, embeddings.feature_offsets[-1], generator=generator).double()
    whole = embeddings.backward(embeddings.plan_batch(ids), grad_BS, 0.1)
    parts = [
        embeddings.backward(embeddings.plan_batch(ids.narrow(a, b)), grad_BS[a:b], 0.1)
        for a, b in ((0, 3), (3, 3), (3, 7))
    ]
    summed = sum_kv(parts)
    assert [gradients.group for gradients in summed] == [0, 1]
    for found, expected in zip(summed, whole, strict=True):
        assert torch.equal(found.keys_K, expected.keys_K)
        torch.testing.assert_close(found.grads_KD, expected.grads_KD, rtol=1e-12, atol=1e-14)


def test_micro_batches_that_were_not_summed_are_noticed() -> None:
    """Their common rows would be updated twice; parts without a common key are one update."""
    embeddings = one_table(rows=9, dim=2, name="sgd", features=2)

    def gradients(*keys: int) -> KVGradients:
        return KVGradients(0, torch.tensor(keys), torch.ones(len(keys), 2))

    with pytest.raises(ValueError, match="sum_kv"):
        embeddings.apply([gradients(1, 4), gradients(2, 4)], 0.1)
    before = embeddings.store.read(embeddings.tables[0].name, 0, 9)["weight"]
    embeddings.apply([gradients(1, 4), gradients(2, 5)], 0.5)
    after = embeddings.store.read(embeddings.tables[0].name, 0, 9)["weight"]
    assert torch.nonzero((after != before).any(dim=1))[:, 0].tolist() == [1, 2, 4, 5]


def test_gradients_are_unique_sorted_and_summed() -> None:
    embeddings = one_table(rows=9, dim=2, name="sgd", features=2)
    ids = JaggedIds(torch.tensor([7, 1, 1, 7]), torch.tensor([0, 1, 2, 4, 4]), 2)
    grad_BS = torch.tensor([[1.0, 2.0, 10.0, 20.0], [3.0, 4.0, 30.0, 40.0]])
    (gradients,) = embeddings.backward(embeddings.plan_batch(ids), grad_BS, lr=1.0)
    assert gradients.keys_K.tolist() == [1, 7]
    assert gradients.grads_KD.tolist() == [[13.0, 24.0], [11.0, 22.0]]


def test_two_runs_are_equal_to_the_bit() -> None:
    def run() -> list[Tensor]:
        config = RowOptimizerConfig(name="adagrad")
        embeddings = ShardedEmbeddings(
            TABLES, FEATURES, config, dtype=torch.float32, seed=5, backend="torch"
        )
        generator = torch.Generator().manual_seed(3)
        for _ in range(10):
            train_step(embeddings, random_ids(TABLES, FEATURES, 32, generator, weighted=True), 0.1)
        return [v for t in TABLES for v in embeddings.store.read(t.name, 0, t.rows).values()]

    assert all(torch.equal(one, two) for one, two in zip(run(), run(), strict=True))


@pytest.mark.parametrize("backend", ["torch", "fbgemm"])
def test_a_plan_may_be_made_steps_ahead(backend: Any) -> None:
    tables = [table for table in TABLES if table.dim == 4]
    features = [f for f in FEATURES if f.table in ("user", "shop")]
    config = RowOptimizerConfig(name="rowwise_adagrad")

    def run(ahead: bool) -> dict[str, Tensor]:
        embeddings = ShardedEmbeddings(
            tables, features, config, dtype=torch.float32, seed=5, backend=backend
        )
        generator = torch.Generator().manual_seed(3)
        batches = [random_ids(tables, features, 8, generator, weighted=True) for _ in range(4)]
        plans = [embeddings.plan_batch(ids) for ids in batches] if ahead else []
        for step, ids in enumerate(batches):
            plan = plans[step] if ahead else embeddings.plan_batch(ids)
            pooled_BS = embeddings.lookup(plan)
            loss_of(pooled_BS).backward()
            assert pooled_BS.grad is not None
            embeddings.apply(embeddings.backward(plan, pooled_BS.grad, 0.1), 0.1)
        return embeddings.store.read("user", 0, 40)

    ahead, in_step = run(True), run(False)
    assert all(torch.equal(ahead[name], in_step[name]) for name in ahead)


@pytest.mark.parametrize("backend", ["torch", "fbgemm"])
def test_a_lookup_for_evaluation_has_the_values_and_no_gradient(backend: Any) -> None:
    embeddings = one_table(rows=9, dim=4, name="sgd", backend=backend)
    ids = JaggedIds(torch.tensor([7, 1, 1]), torch.tensor([0, 1, 3]), 1)
    training = embeddings.lookup(embeddings.plan_batch(ids))
    evaluation = embeddings.lookup(embeddings.plan_batch(ids, training=False), training=False)
    assert training.requires_grad
    assert training.is_leaf
    assert not evaluation.requires_grad
    assert torch.equal(training.detach(), evaluation)


def test_feature_offsets_give_each_features_columns() -> None:
    config = RowOptimizerConfig(name="sgd")
    embeddings = ShardedEmbeddings(
        TABLES, FEATURES, config, dtype=torch.float64, seed=5, backend="torch"
    )
    assert embeddings.feature_offsets == (0, 4, 7, 11, 15, 18)
    ids = JaggedIds(torch.arange(5), torch.arange(6), 5)
    pooled_BS = embeddings.lookup(embeddings.plan_batch(ids), training=False)
    assert pooled_BS.is_contiguous()
    for index, feature in enumerate(FEATURES):
        start, stop = embeddings.feature_offsets[index : index + 2]
        row = embeddings.store.read(feature.table, index, index + 1)["weight"]
        assert torch.equal(pooled_BS[:, start:stop], row)


# The cases that users of other systems have been bitten by. ---------------------------------------


def one_table(
    *,
    rows: int,
    dim: int,
    name: Any,
    backend: Any = "torch",
    dtype: torch.dtype = torch.float32,
    pooling: Any = "sum",
    features: int = 1,
    start: float | None = None,
    **constants: float,
) -> ShardedEmbeddings:
    embeddings = ShardedEmbeddings(
        [TableConfig("t", rows, dim)],
        [FeatureConfig(f"f{i}", "t", pooling=pooling) for i in range(features)],
        RowOptimizerConfig(name=name, **constants),
        dtype=dtype,
        seed=1,
        backend=backend,
    )
    if start is not None:
        embeddings.store.write("t", 0, {"weight": torch.full((rows, dim), start, dtype=dtype)})
    return embeddings


@pytest.mark.parametrize("wrong", [10, -1, -11])
@pytest.mark.parametrize("backend", ["torch", "fbgemm"])
def test_an_id_past_a_table_never_reaches_its_neighbour(backend: Any, wrong: int) -> None:
    """B10: two tables of 10 rows lie side by side; row 10 of the first is row 0 of the second."""
    tables = [TableConfig("first", 10, 4), TableConfig("second", 10, 4)]
    features = [FeatureConfig("f", "first"), FeatureConfig("g", "second")]
    embeddings = ShardedEmbeddings(
        tables,
        features,
        RowOptimizerConfig(name="sgd"),
        dtype=torch.float32,
        seed=1,
        backend=backend,
    )
    assert embeddings.backend == backend
    before = {t.name: embeddings.store.read(t.name, 0, 10)["weight"] for t in tables}

    ids = JaggedIds(torch.tensor([9]), torch.tensor([0, 1, 1]), 2)
    plan = embeddings.plan_batch(ids)
    pooled_BS = embeddings.lookup(plan)
    assert torch.equal(pooled_BS.detach()[0, :4], before["first"][9])
    embeddings.apply(embeddings.backward(plan, torch.ones(1, 8), 1.0), 1.0)
    before["first"][9] -= 1.0

    with pytest.raises(IdOutOfRange, match=rf"'f'.*'first'.*id {wrong} of sample 0"):
        embeddings.plan_batch(JaggedIds(torch.tensor([wrong]), torch.tensor([0, 1, 1]), 2))
    for table in tables:
        assert torch.equal(embeddings.store.read(table.name, 0, 10)["weight"], before[table.name])


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("torch", torch.float32), ("torch", torch.float64), ("fbgemm", torch.float32)],
)
def test_empty_bags_pool_to_zero_and_have_no_gradient(
    backend: Any, dtype: torch.dtype, pooling: Any
) -> None:
    """B13: bag starts [0, 1, 1, 3, 3] of 5 ids: bags 1 and 3 are empty."""
    embeddings = one_table(
        rows=6, dim=4, name="sgd", backend=backend, dtype=dtype, pooling=pooling, start=1.0
    )
    offsets = torch.tensor([0, 1, 1, 3, 3, 5])
    plan = embeddings.plan_batch(JaggedIds(torch.arange(5), offsets, 1))
    pooled_BS = embeddings.lookup(plan)
    per_bag = [1.0, 0.0, 1.0, 0.0, 1.0] if pooling == "mean" else [1.0, 0.0, 2.0, 0.0, 2.0]
    assert pooled_BS[:, 0].tolist() == per_bag
    # Were an empty bag's gradient to land on a row, the row would move by 1000.
    grad_BS = torch.ones(5, 4, dtype=dtype)
    grad_BS[[1, 3]] = 1000.0
    embeddings.apply(embeddings.backward(plan, grad_BS, 1.0), 1.0)
    moved = 1.0 - embeddings.store.read("t", 0, 6)["weight"][:, 0]
    share = 0.5 if pooling == "mean" else 1.0
    assert moved.tolist() == [1.0, share, share, share, share, 0.0]


@pytest.mark.parametrize("batch_size", [0, 3])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("backend", ["torch", "fbgemm"])
def test_batches_without_any_id(backend: Any, name: Any, batch_size: int) -> None:
    """B13: all bags empty, and a batch of 0 samples (a rank at the end of the data)."""
    if backend == "fbgemm" and name == "adam":
        pytest.skip("no fused Adam on CPU")
    embeddings = one_table(rows=6, dim=4, name=name, backend=backend, features=2, start=1.0)
    offsets = torch.zeros(2 * batch_size + 1, dtype=torch.int64)
    for weights in (None, torch.empty(0)):
        ids = JaggedIds(torch.empty(0, dtype=torch.int64), offsets, 2, weights)
        plan = embeddings.plan_batch(ids)
        pooled_BS = embeddings.lookup(plan)
        assert pooled_BS.tolist() == [[0.0] * 8] * batch_size
        assert pooled_BS.shape == (batch_size, 8)
        embeddings.apply(embeddings.backward(plan, torch.ones(batch_size, 8), 1.0), 1.0)
    values = embeddings.store.read("t", 0, 6)
    assert bool((values.pop("weight") == 1.0).all())
    assert all(float(state.abs().sum()) == 0 for state in values.values())
    assert embeddings.store.num_steps == 2, "an empty batch is a step: Adam's count is global"


@pytest.mark.parametrize("name", ["adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("backend", ["torch", "fbgemm"])
def test_duplicates_are_summed_before_adagrad(backend: Any, name: Any) -> None:
    """B20: id 7 three times with gradient 1: state 3² = 9 and change -3 / sqrt(9) = -1."""
    embeddings = one_table(rows=9, dim=4, name=name, backend=backend, start=0.0, eps=0.0)
    step_with(embeddings, [7, 7, 7], torch.ones(3, 4), lr=1.0)
    values = embeddings.store.read("t", 7, 8)
    assert set(values["sum"].flatten().tolist()) == {9.0}
    assert values["weight"].tolist() == [[-1.0] * 4]


def test_duplicates_are_summed_before_adam() -> None:
    """B20: moments of the sum 3, and one step of it, not of three gradients of 1."""
    embeddings = one_table(
        rows=9, dim=4, name="adam", dtype=torch.float64, start=0.0, beta1=0.9, beta2=0.99, eps=0.0
    )
    step_with(embeddings, [7, 7, 7], torch.ones(3, 4, dtype=torch.float64), lr=0.5)
    values = embeddings.store.read("t", 7, 8)
    assert values["exp_avg"][0, 0].item() == pytest.approx(0.1 * 3)
    assert values["exp_avg_sq"][0, 0].item() == pytest.approx(0.01 * 9)
    assert values["weight"][0, 0].item() == pytest.approx(-0.5), "the first step is lr · sign"


def test_adam_counts_the_steps_of_the_run_not_of_the_row() -> None:
    embeddings = one_table(rows=9, dim=4, name="adam", dtype=torch.float64, start=0.0, eps=0.0)
    one = torch.ones(1, 4, dtype=torch.float64)
    for id in (1, 2, 3):
        step_with(embeddings, [id], one, lr=1.0)
    row = embeddings.store.read("t", 3, 4)["weight"][0, 0].item()
    expected = -((1 - 0.999**3) ** 0.5 / (1 - 0.9**3)) * 0.1 / 0.001**0.5
    assert row == pytest.approx(expected)
    assert row != pytest.approx(-1.0)


def test_weight_decay_acts_on_the_rows_of_the_batch() -> None:
    """B22: SGD, lr 0.1, decay 0.1, no gradient from the loss: (1 - 0.01)^10 on row 0 alone."""
    embeddings = one_table(
        rows=2, dim=4, name="sgd", dtype=torch.float64, start=1.0, weight_decay=0.1
    )
    for _ in range(10):
        step_with(embeddings, [0], torch.zeros(1, 4, dtype=torch.float64), lr=0.1)
    rows = embeddings.store.read("t", 0, 2)["weight"][:, 0].tolist()
    assert rows[0] == pytest.approx(0.99**10, rel=1e-12)
    assert round(rows[0], 4) == 0.9044
    assert rows[1] == 1.0


@pytest.mark.parametrize("name", ["adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("backend", ["torch", "fbgemm"])
def test_eps_means_the_same_for_every_backend(backend: Any, name: Any) -> None:
    """B24: gradient 1e-3, state 0, eps 1e-3, lr 1: the row moves by -0.5."""
    embeddings = one_table(rows=3, dim=4, name=name, backend=backend, start=0.0, eps=1e-3)
    step_with(embeddings, [1], torch.full((1, 4), 1e-3), lr=1.0)
    row = embeddings.store.read("t", 1, 2)["weight"][0]
    assert row.tolist() == pytest.approx([-0.5] * 4, rel=1e-6)


def step_with(embeddings: ShardedEmbeddings, ids: list[int], grad_BS: Tensor, lr: float) -> None:
    """One step with one id per sample and a given gradient."""
    plan = embeddings.plan_batch(JaggedIds(torch.tensor(ids), torch.arange(len(ids) + 1), 1))
    embeddings.lookup(plan)
    embeddings.apply(embeddings.backward(plan, grad_BS, lr), lr)
