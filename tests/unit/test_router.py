"""Routing: ids → keys, the checks on ids, and the transposed lookup."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.batch import JaggedIds
from embeddings.keys import sort_keys
from embeddings.plan import single_process_plan
from embeddings.router import BagRows, IdOutOfRange, Router, row_of_id
from embeddings.table import FeatureConfig, TableConfig
from embeddings.table_group import local_groups

TABLES = [
    TableConfig("user", rows=10, dim=4),
    TableConfig("item", rows=5, dim=4),
    TableConfig("shop", rows=7, dim=6),
    TableConfig("idle", rows=3, dim=2),
]
FEATURES = [
    FeatureConfig("viewer", "user"),
    FeatureConfig("shop", "shop", pooling="mean"),
    FeatureConfig("clicked", "item", pooling="mean"),
    FeatureConfig("friend", "user"),
]
ROWS = {table.name: table.rows for table in TABLES}
# Of the tables of dim 4: user has the keys 0 to 9, item 10 to 14.
KEY_OFFSETS = {"user": 0, "item": 10, "shop": 0}


def router() -> Router:
    groups = local_groups(single_process_plan(TABLES), rank=0, dtype=torch.float64, optimizer="sgd")
    return Router(TABLES, FEATURES, groups)


def jagged(bags_FB: list[list[list[int]]], weights: list[float] | None = None) -> JaggedIds:
    bags = [bag for bags_B in bags_FB for bag in bags_B]
    offsets = torch.zeros(len(bags) + 1, dtype=torch.int64)
    offsets[1:] = torch.tensor([len(bag) for bag in bags], dtype=torch.int64).cumsum(0)
    return JaggedIds(
        torch.tensor([id for bag in bags for id in bag], dtype=torch.int64),
        offsets,
        len(bags_FB),
        None if weights is None else torch.tensor(weights),
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[list[int]]], list[float] | None]:
    batch_size = draw(st.integers(0, 4))
    bags_FB = [
        [
            draw(st.lists(st.integers(0, ROWS[feature.table] - 1), max_size=4))
            for _ in range(batch_size)
        ]
        for feature in FEATURES
    ]
    num_ids = sum(len(bag) for bags_B in bags_FB for bag in bags_B)
    weights = st.lists(st.floats(0, 2, width=32), min_size=num_ids, max_size=num_ids)
    return bags_FB, draw(st.none() | weights)


@given(batches())
def test_plans_equal_the_ones_made_bag_by_bag(
    batch: tuple[list[list[list[int]]], list[float] | None],
) -> None:
    bags_FB, weights = batch
    groups = router().plan_groups(jagged(bags_FB, weights))
    batch_size = len(bags_FB[0])
    assert [group.batch_size for group in groups] == [batch_size] * 3
    assert [group.features for group in groups] == [(0, 2, 3), (1,), ()]

    remaining = iter(weights) if weights is not None else iter(lambda: 1.0, None)
    factors_FB = [
        [
            [next(remaining) / (len(bag) if feature.pooling == "mean" else 1) for _ in bag]
            for bag in bags_B
        ]
        for feature, bags_B in zip(FEATURES, bags_FB, strict=True)
    ]
    for group in groups:
        # Every occurrence: (key, sample-major bag, factor), feature-major.
        expected = [
            (id + KEY_OFFSETS[FEATURES[f].table], b * len(group.features) + i, factor)
            for i, f in enumerate(group.features)
            for b in range(batch_size)
            for id, factor in zip(bags_FB[f][b], factors_FB[f][b], strict=True)
        ]
        assert group.keys_L.tolist() == [key for key, _, _ in expected]
        lengths = [len(bags_FB[f][b]) for f in group.features for b in range(batch_size)]
        assert group.offsets.diff().tolist() == lengths
        assert int(group.offsets[0]) == 0
        assert weights_of(group.weights_L, len(expected)) == pytest.approx(
            [factor for _, _, factor in expected]
        )

        by_sample = sorted(expected, key=lambda occurrence: occurrence[1])
        keys_L, offsets, weights_L = group.sample_major
        assert keys_L.tolist() == [key for key, _, _ in by_sample]
        assert offsets.diff().tolist() == [
            len(bags_FB[f][b]) for b in range(batch_size) for f in group.features
        ]
        assert weights_of(weights_L, len(expected)) == pytest.approx([w for _, _, w in by_sample])

        by_key = sorted(expected, key=lambda occurrence: occurrence[0])
        keys_K, bags_L, starts, weights_L = group.unique
        assert keys_K.tolist() == sorted({key for key, _, _ in expected})
        assert torch.repeat_interleave(keys_K, starts.diff()).tolist() == [k for k, _, _ in by_key]
        assert bags_L.tolist() == [bag for _, bag, _ in by_key]
        assert weights_of(weights_L, len(expected)) == pytest.approx([w for _, _, w in by_key])


def weights_of(weights_L: torch.Tensor | None, num_ids: int) -> list[float]:
    return [1.0] * num_ids if weights_L is None else weights_L.tolist()


def test_no_weights_where_every_factor_is_1() -> None:
    one_hot = jagged([[[1], [2]], [[3], []], [[0], [4]], [[5], [6]]])
    assert all(group.weights_L is None for group in router().plan_groups(one_hot))


@given(
    batches(),
    st.integers(0, 3),
    st.data(),
)
def test_ids_outside_a_table_are_named_before_anything_else_happens(
    batch: tuple[list[list[list[int]]], list[float] | None], feature: int, data: st.DataObject
) -> None:
    bags_FB, _ = batch
    rows = ROWS[FEATURES[feature].table]
    sample = len(bags_FB[feature]) // 2
    for bags_B in bags_FB:
        bags_B.insert(sample, [])
    wrong = data.draw(st.sampled_from([-1, -11, rows, rows + 1, -(2**63), 2**63 - 1]))
    bags_FB[feature][sample] = [0, wrong, 0]
    with pytest.raises(IdOutOfRange) as caught:
        router().plan_groups(jagged(bags_FB))
    error = caught.value
    assert (error.feature, error.table) == (FEATURES[feature].name, FEATURES[feature].table)
    assert (error.id, error.rows, error.sample) == (wrong, rows, sample)
    for part in (error.feature, error.table, str(wrong), f"sample {sample}", f"0 to {rows - 1}"):
        assert part in str(error)


def test_the_first_offender_is_named() -> None:
    bags_FB = [[[1], [2]], [[0], []], [[4, 3], [9, -1]], [[99], [98]]]
    with pytest.raises(IdOutOfRange, match=r"'clicked'.*'item'.*id 9 of sample 1"):
        router().plan_groups(jagged(bags_FB))


def test_the_number_of_features_is_checked() -> None:
    with pytest.raises(ValueError, match=r"3 sparse features, the model 4"):
        router().plan_groups(jagged([[[1]], [[1]], [[1]]]))


def test_a_plan_keeps_no_reference_to_the_batch() -> None:
    """Batches may be read into reused buffers while a plan waits for its turn."""
    ids = jagged([[[1], [2]], [[3], []], [[0], [4]], [[5], [6]]])
    groups = router().plan_groups(ids)
    ids.values_L.zero_()
    ids.offsets.zero_()
    assert groups[0].keys_L.tolist() == [1, 2, 10, 14, 5, 6]
    assert groups[0].offsets.tolist() == [0, 1, 2, 3, 4, 5, 6]


@given(st.lists(st.integers(0, 20) | st.integers(0, 2**62), max_size=50))
def test_sorted_keys(keys: list[int]) -> None:
    """Also keys too large to be packed with their position, which take another way."""
    keys_L = torch.tensor(keys, dtype=torch.int64)
    keys_K, order_L, starts = sort_keys(keys_L)
    assert keys_K.tolist() == sorted(set(keys))
    assert order_L.tolist() == sorted(range(len(keys)), key=lambda i: keys[i])
    assert torch.repeat_interleave(keys_K, starts.diff()).tolist() == sorted(keys)
    assert int(starts[-1]) == len(keys)


# ------------------------------------------------------------------------------------ gradient rows


@given(
    batch_size=st.integers(0, 5),
    dim=st.sampled_from([1, 3, 4]),
    places=st.lists(st.integers(0, 6), min_size=1, max_size=4, unique=True),
    seed=st.integers(0, 1000),
)
def test_bags_are_found_in_the_gradient_of_all_features(
    batch_size: int, dim: int, places: list[int], seed: int
) -> None:
    """Row `row_of_id` of the whole gradient is what its own columns hold of that sample."""
    generator = np.random.default_rng(seed)
    num_columns = 7 * dim
    rows = BagRows.within([place * dim for place in places], dim, num_columns)
    assert rows is not None
    lengths_FB = generator.integers(0, 3, (len(places), batch_size))
    grad_BS = generator.standard_normal((batch_size, num_columns))
    found_LD = grad_BS.reshape(-1, dim)[row_of_id(lengths_FB, rows)]
    own_BS = np.concatenate([grad_BS[:, p * dim : (p + 1) * dim] for p in places], axis=1)
    alone_L = row_of_id(lengths_FB)
    np.testing.assert_array_equal(found_LD, own_BS.reshape(-1, dim)[alone_L])
    np.testing.assert_array_equal(rows.of_bags(alone_L), row_of_id(lengths_FB, rows))


@pytest.mark.parametrize(
    ("starts", "num_columns"), [([0, 6], 12), ([0, 4], 10)], ids=["a start", "the width"]
)
def test_columns_that_are_no_rows_have_none(starts: list[int], num_columns: int) -> None:
    """Else bags would be read across features."""
    assert BagRows.within(starts, 4, num_columns) is None
