"""Expected rows touched and bytes moved: against counting, and where each exchange wins."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embeddings.table import FeatureConfig, TableConfig
from embeddings.traffic import TableStats, TableTraffic, table_traffic, touch_probability


def zipf_stats(rows: int, lookups_per_sample: float, *, seed: int | None = None) -> TableStats:
    """Counts ~ 1 / rank, by falling count, or in random order with a seed."""
    counts = (1e9 / np.arange(1, rows + 1)).astype(np.int64)
    if seed is not None:
        np.random.default_rng(seed).shuffle(counts)
    return TableStats(lookups_per_sample, counts, np.arange(rows))


def traffic_of(
    table: TableConfig, stats: TableStats | None, *, samples: float = 512.0, features: int = 1
) -> TableTraffic:
    return TableTraffic(table, features, stats, samples_per_rank=samples)


def test_expected_distinct_rows_are_those_that_draws_find() -> None:
    counts = (1000 / np.arange(1, 401) ** 1.1).astype(np.int64)
    expected = touch_probability(counts, 300.0)
    rng = np.random.default_rng(0)
    drawn = rng.choice(400, (2000, 300), p=counts / counts.sum())
    found = np.zeros(400)
    for draw in drawn:
        found[np.unique(draw)] += 1
    # Four standard errors of 2,000 draws of a probability.
    assert np.abs(found / 2000 - expected).max() < 4 * np.sqrt(0.25 / 2000)
    assert expected.sum() == pytest.approx(found.sum() / 2000, rel=0.01)


def test_expected_distinct_rows_at_the_ends() -> None:
    assert touch_probability(np.array([5]), 3.0) == 1.0, "the only row is touched for certain"
    assert touch_probability(np.array([5]), 0.0) == 0.0
    np.testing.assert_allclose(touch_probability(np.array([3, 1, 0]), 1.0), [0.75, 0.25, 0.0])
    np.testing.assert_allclose(touch_probability(np.array([1, 1]), 2.0), [0.75, 0.75])


@given(
    st.lists(st.integers(0, 10**12), min_size=1, max_size=50).filter(any),
    st.floats(0, 1e7),
)
def test_distinct_rows_never_exceed_lookups_or_rows(counts: list[int], lookups: float) -> None:
    touched = touch_probability(np.array(counts), lookups)
    assert np.all((touched >= 0) & (touched <= 1))
    used = sum(count > 0 for count in counts)
    # Below one lookup the formula interpolates between none and one.
    assert touched.sum() <= max(lookups, 1.0) * (1 + 1e-9)
    assert touched.sum() <= used * (1 + 1e-9)


def test_without_counts_every_lookup_is_distinct() -> None:
    assert traffic_of(TableConfig("t", 10_000, 16), None).num_distinct == 512
    assert traffic_of(TableConfig("t", 100, 16), None).num_distinct == 100, "or every row"
    empty = TableStats(3.0, np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert traffic_of(TableConfig("t", 10_000, 16), empty).num_distinct == 3 * 512
    assert traffic_of(TableConfig("t", 10_000, 16), empty).load() is None


def test_load_sums_up_to_a_row() -> None:
    stats = TableStats(1.0, np.array([4, 4, 8]), np.array([2, 5, 9]))
    load = traffic_of(TableConfig("t", 20, 4), stats, samples=1.0).load()
    assert load is not None
    before = [load.before(row) for row in (0, 2, 3, 9, 10, 20)]
    np.testing.assert_allclose(before, [0, 0, 0.25, 0.5, 1, 1])
    assert [load.row_at(x) for x in (0.0, 0.1, 0.2, 0.5, 0.7, 0.8, 1.0)] == [0, 0, 3, 6, 6, 10, 10]


def test_bytes_of_one_step_by_hand() -> None:
    """2 samples, 1 feature, bags of 3 ids, dim 8: vectors of 32 bytes."""
    stats = TableStats(3.0, np.array([1] * 1000), np.arange(1000))
    traffic = traffic_of(TableConfig("t", 1000, 8), stats, samples=2.0)
    distinct = 1000 * (1 - 0.999**6)
    assert traffic.kv_bytes() == pytest.approx(distinct * (4 + 2 * 32))
    assert traffic.kv_bytes(col_parts=2) == pytest.approx(distinct * (2 * 4 + 2 * 32))
    # 6 ids and 2 lengths; 2 bags there and back.
    assert traffic.pooled_bytes() == pytest.approx((6 + 2) * 4 + 2 * 2 * 32)
    # 4 owners of rows: a bag of 3 ids reaches 4 · (1 - (3/4)³) of them.
    owners = 4 * (1 - 0.75**3)
    assert traffic.pooled_bytes(row_parts=4) == pytest.approx((6 + 8) * 4 + 2 * owners * 2 * 32)
    # Either the distinct keys' gradients to 3 others, or a ring over 1,000 rows.
    assert traffic.replicated_bytes(4) == pytest.approx(3 * distinct * (4 + 32))
    small = traffic_of(TableConfig("t", 2, 8), None, samples=512.0)
    assert small.replicated_bytes(4) == pytest.approx(2 * 3 / 4 * 2 * 32)


def test_kv_wins_for_one_id_under_skew_and_pooled_for_long_bags() -> None:
    table = TableConfig("t", 100_000, 16)
    one_hot = traffic_of(table, zipf_stats(100_000, 1.0))
    assert one_hot.kv_bytes() < 0.8 * one_hot.pooled_bytes()
    long_bags = traffic_of(table, zipf_stats(100_000, 50.0))
    assert long_bags.pooled_bytes() < 0.5 * long_bags.kv_bytes()


def test_features_of_one_table_have_a_bag_each() -> None:
    tables = [TableConfig("a", 10, 4), TableConfig("b", 10, 4)]
    features = [FeatureConfig(name, table) for name, table in (("x", "a"), ("y", "a"), ("z", "b"))]
    traffic = table_traffic(tables, features, {}, samples_per_rank=5.0)
    assert [traffic[name].num_bags for name in ("a", "b")] == [10, 5]


def test_counts_of_another_table_are_refused() -> None:
    stats = TableStats(1.0, np.array([1]), np.array([10]))
    with pytest.raises(ValueError, match=r"table 't': the id counts name row 10, .* has 10 rows"):
        traffic_of(TableConfig("t", 10, 4), stats)


@pytest.mark.parametrize(
    ("counts", "ids", "message"),
    [
        ([1, 2], [0], "one count per id"),
        ([1, 2], [1, 0], "rising order"),
        ([1, 2], [1, 1], "rising order"),
        ([1], [-1], "at least 0"),
        ([-1], [1], "counts_K must be at least 0"),
    ],
)
def test_stats_that_are_none(counts: list[int], ids: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TableStats(1.0, np.array(counts), np.array(ids))
