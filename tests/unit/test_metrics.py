"""Evaluation figures against scikit-learn and hand-made cases; their independence of the cut."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score, roc_curve

import dlrm.metrics
from dlrm.metrics import BestTracker, BinaryMetrics, EvalResult

# Few distinct logits, so that ties are common; the large ones would overflow a naive sigmoid.
LOGITS = st.one_of(
    st.sampled_from([-800.0, -2.0, -0.5, -0.0, 0.0, 0.5, 1.0, 800.0]),
    st.floats(-10, 10, width=32),
)
SAMPLES = st.lists(st.tuples(LOGITS, st.sampled_from([0.0, 1.0])), min_size=1, max_size=60)
WEIGHTS = st.one_of(st.just(0.0), st.floats(0.125, 1024, width=32))
WEIGHTED_SAMPLES = st.lists(
    st.tuples(LOGITS, st.sampled_from([0.0, 1.0]), WEIGHTS), min_size=1, max_size=60
)


def metrics_of(
    logits: list[float],
    labels: list[float],
    weights: list[float] | None = None,
    dtype: torch.dtype = torch.float64,
) -> BinaryMetrics:
    metrics = BinaryMetrics()
    weight_B = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    metrics.update(torch.tensor(logits, dtype=dtype), torch.tensor(labels), weight_B)
    return metrics


def logit(probability: float) -> float:
    return math.log(probability / (1 - probability))


def result_with(
    auc: float | None = None, logloss: float | None = None, ne: float | None = None
) -> EvalResult:
    return EvalResult(auc, logloss, ne, 1.0, 10, 5, 10.0)


@given(WEIGHTED_SAMPLES)
def test_figures_equal_those_of_scikit_learn(samples: list[tuple[float, float, float]]) -> None:
    logits, labels, weights = (list(column) for column in zip(*samples, strict=True))
    result = metrics_of(logits, labels, weights).result()
    positive_weight = sum(w for y, w in zip(labels, weights, strict=True) if y == 1)
    total_weight = sum(weights)

    assert result.num_samples == len(samples)
    assert result.num_positive == sum(labels)
    assert result.sum_weight == pytest.approx(total_weight, rel=1e-12)
    if 0 < positive_weight < total_weight:
        expected = roc_auc_score(labels, logits, sample_weight=weights)
        assert result.auc == pytest.approx(expected, abs=1e-12)
        assert 0 <= result.auc <= 1
    if all(abs(x) <= 10 for x in logits) and total_weight > 0:
        # scikit-learn starts from probabilities, so it is an oracle for moderate logits only.
        p = 1 / (1 + np.exp(-np.array(logits)))
        expected = log_loss(labels, p, sample_weight=weights, labels=[0, 1])
        assert result.logloss == pytest.approx(expected, rel=1e-9, abs=1e-12)
        if positive_weight > 0:
            expected = np.average(p, weights=weights) * total_weight / positive_weight
            assert result.calibration == pytest.approx(expected, rel=1e-12)


@given(SAMPLES, st.data())
def test_cuts_orders_and_merges_give_the_same_bits(
    samples: list[tuple[float, float]], data: st.DataObject
) -> None:
    whole = metrics_of(*([s[i] for s in samples] for i in (0, 1)))
    shuffled = data.draw(st.permutations(samples))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(samples)), max_size=5)))
    parts = [
        metrics_of([x for x, _ in shuffled[a:b]], [y for _, y in shuffled[a:b]])
        for a, b in itertools.pairwise([0, *cuts, len(samples)])
    ]
    merged = BinaryMetrics()
    for part in data.draw(st.permutations(parts)):
        merged.merge(BinaryMetrics.from_arrays(part.to_arrays()))

    assert asdict(merged.result()) == asdict(whole.result())
    assert merged.calibration_curve(4) == whole.calibration_curve(4)
    assert merged.roc_curve() == whole.roc_curve()


def test_compacting_early_and_often_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    logits_B = torch.randn(5_000, generator=generator).to(torch.bfloat16)
    label_B = (torch.rand(5_000, generator=generator) < 0.3).float()
    whole = BinaryMetrics()
    whole.update(logits_B, label_B)

    monkeypatch.setattr(dlrm.metrics, "COMPACT_AT_SAMPLES", 64)
    pieces = BinaryMetrics()
    for start in range(0, 5_000, 7):
        pieces.update(logits_B[start : start + 7], label_B[start : start + 7])
    assert pieces.result() == whole.result()


def test_memory_follows_the_distinct_logits() -> None:
    # The docstring promises 20 bytes a distinct logit, and bf16 has few of them.
    logits_B = torch.linspace(-1, 1, 100_000).to(torch.bfloat16)
    metrics = BinaryMetrics()
    metrics.update(logits_B, torch.zeros(100_000))
    arrays = metrics.to_arrays()
    num_distinct = logits_B.unique().numel()
    assert num_distinct < 10_000
    assert sum(a.nbytes for name, a in arrays.items() if name != "counts") == 20 * num_distinct


def test_memory_stays_bounded_while_samples_stream_in(monkeypatch: pytest.MonkeyPatch) -> None:
    # 2 million samples of 3 distinct logits take 40 MB unmerged, and a few MB at most if merged.
    monkeypatch.setattr(dlrm.metrics, "COMPACT_AT_SAMPLES", 20_000)
    logits_B, label_B = torch.tensor([-1.0, 0.0, 1.0] * 3_334), torch.zeros(10_002)
    metrics = BinaryMetrics()
    tracemalloc.start()
    try:
        for _ in range(200):
            metrics.update(logits_B, label_B)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert metrics.result().num_samples == 200 * 10_002
    assert peak_bytes < 8_000_000


def test_bf16_fp32_and_fp64_logits_may_be_mixed() -> None:
    metrics = BinaryMetrics()
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        metrics.update(torch.tensor([-0.5, 0.5], dtype=dtype), torch.tensor([0, 1]))
    assert metrics.result().auc == 1.0
    assert metrics.to_arrays()["score_K"].tolist() == [-0.5, 0.5]


def test_a_reused_logit_tensor_does_not_rewrite_history() -> None:
    logits_B = torch.tensor([-1.0, 1.0])
    metrics = BinaryMetrics()
    metrics.update(logits_B, torch.tensor([0.0, 1.0]))
    logits_B.neg_()
    assert metrics.result().auc == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_b27_log_loss_of_a_very_wrong_logit_is_the_logit(dtype: torch.dtype) -> None:
    assert metrics_of([200.0], [0.0], dtype=dtype).result().logloss == 200.0
    assert metrics_of([-200.0], [1.0], dtype=dtype).result().logloss == 200.0
    assert metrics_of([200.0, -200.0], [0.0, 1.0], dtype=dtype).result().logloss == 200.0


def test_infinite_logits_are_counted_as_they_are() -> None:
    right = metrics_of([math.inf, -math.inf, 0.0], [1.0, 0.0, 1.0]).result()
    assert right.logloss == pytest.approx(math.log(2) / 3)
    assert right.auc == 1.0
    assert metrics_of([math.inf, 0.0], [0.0, 1.0]).result().logloss == math.inf


def test_b28_one_class_leaves_auc_and_ne_undefined() -> None:
    zeros = metrics_of([-1.0, 0.5], [0.0, 0.0]).result()
    assert (zeros.auc, zeros.ne, zeros.calibration) == (None, None, None)
    assert zeros.logloss == pytest.approx(
        (math.log1p(math.exp(-1)) + math.log1p(math.exp(0.5))) / 2
    )
    assert zeros.num_samples == 2
    assert not BestTracker().update(zeros)

    ones = metrics_of([-1.0, 0.5], [1.0, 1.0]).result()
    assert (ones.auc, ones.ne) == (None, None)
    assert ones.calibration is not None
    assert ones.logloss is not None


def test_b28_batches_of_one_class_do_not_matter() -> None:
    logits = torch.tensor([0.1, -0.3, 0.7, 0.2, -0.9, 0.4])
    labels = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    batched = BinaryMetrics()
    for start in (0, 2, 4):
        batched.update(logits[start : start + 2], labels[start : start + 2])
    assert batched.result().auc == pytest.approx(roc_auc_score(labels, logits), abs=1e-15)
    once = BinaryMetrics()
    once.update(logits, labels)
    assert batched.result() == once.result()


def test_b30_auc_and_log_loss_are_of_all_ranks_samples() -> None:
    rank_0 = metrics_of([logit(0.9), logit(0.95)], [0.0, 1.0])
    rank_1 = metrics_of([logit(0.1), logit(0.2)], [0.0, 1.0])
    assert (rank_0.result().auc, rank_1.result().auc) == (1.0, 1.0)
    rank_0.merge(rank_1)
    assert rank_0.result().auc == 0.75

    p, y = [0.9, 0.6, 0.2, 0.7], [1.0, 0.0, 0.0, 0.0]
    uneven = metrics_of([logit(v) for v in p[:3]], y[:3])
    uneven.merge(metrics_of([logit(p[3])], y[3:]))
    assert uneven.result().logloss == pytest.approx(log_loss(y, p), rel=1e-12)


def test_merging_leaves_the_other_alone_and_allows_oneself() -> None:
    metrics, other = metrics_of([0.0, 1.0], [0.0, 1.0]), metrics_of([2.0], [0.0])
    metrics.merge(other)
    assert (metrics.result().num_samples, other.result().num_samples) == (3, 1)
    metrics.merge(metrics)
    assert metrics.result().num_samples == 6
    assert metrics.result().auc == 0.5


def test_normalised_entropy_of_the_base_rate_is_one() -> None:
    # A model that always predicts the base rate is the yardstick.
    result = metrics_of([logit(0.25)] * 4, [1.0, 0.0, 0.0, 0.0]).result()
    assert result.ne == pytest.approx(1.0, rel=1e-12)
    assert result.calibration == pytest.approx(1.0, rel=1e-12)
    assert result.auc == 0.5


def test_empty_gives_no_figures() -> None:
    metrics = BinaryMetrics()
    metrics.update(torch.empty(0), torch.empty(0))
    assert metrics.result() == EvalResult(None, None, None, None, 0, 0, 0.0)
    assert metrics.calibration_curve() == []
    assert metrics.roc_curve() == []
    assert BinaryMetrics.from_arrays(metrics.to_arrays()).result() == metrics.result()


def test_samples_of_weight_zero_count_but_do_not_weigh() -> None:
    result = metrics_of([5.0, -1.0, 1.0], [0.0, 0.0, 1.0], [0.0, 1.0, 1.0]).result()
    assert (result.auc, result.num_samples, result.sum_weight) == (1.0, 3, 2.0)
    weightless = metrics_of([5.0, 1.0], [0.0, 1.0], [0.0, 0.0]).result()
    assert (weightless.auc, weightless.logloss, weightless.calibration) == (None, None, None)


def test_result_dict_has_the_keys_of_the_output_files() -> None:
    assert list(metrics_of([0.0], [1.0]).result().as_dict()) == [
        "auc",
        "logloss",
        "ne",
        "calibration",
        "num_samples",
    ]


def test_bad_samples_are_named_and_not_counted() -> None:
    metrics = metrics_of([0.0, 1.0], [0.0, 1.0])
    with pytest.raises(ValueError, match=r"logit of sample 1 of this batch \(sample 3 .*nan"):
        metrics.update(torch.tensor([0.0, math.nan, math.nan]), torch.zeros(3))
    with pytest.raises(ValueError, match=r"label of sample 2 .* is 0.5, but must be 0 or 1"):
        metrics.update(torch.zeros(3), torch.tensor([0.0, 1.0, 0.5]))
    with pytest.raises(ValueError, match=r"label of sample 0 .* is nan"):
        metrics.update(torch.zeros(1), torch.tensor([math.nan]))
    for weight in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"weight of sample 1 .* must be finite"):
            metrics.update(torch.zeros(2), torch.zeros(2), torch.tensor([1.0, weight]))
    with pytest.raises(ValueError, match=r"of one size.*\(3,\).*\(2,\)"):
        metrics.update(torch.zeros(3), torch.zeros(2))
    with pytest.raises(ValueError, match="flat"):
        metrics.update(torch.zeros(2, 1), torch.zeros(2, 1))
    with pytest.raises(ValueError, match="floating point"):
        metrics.update(torch.zeros(2, dtype=torch.int64), torch.zeros(2))
    assert metrics.result().num_samples == 2


@given(WEIGHTED_SAMPLES, st.integers(1, 8))
def test_calibration_bins_hold_all_weight_in_equal_parts(
    samples: list[tuple[float, float, float]], num_bins: int
) -> None:
    logits, labels, weights = (list(column) for column in zip(*samples, strict=True))
    curve = metrics_of(logits, labels, weights).calibration_curve(num_bins)
    predicted, observed, weight = np.array(curve).reshape(-1, 3).T
    p = np.exp(-np.logaddexp(0, -np.array(logits)))
    total = sum(weights)

    assert len(curve) <= num_bins
    assert weight.sum() == pytest.approx(total, rel=1e-12)
    assert (weight * predicted).sum() == pytest.approx(np.dot(weights, p), rel=1e-9)
    assert (weight * observed).sum() == pytest.approx(np.dot(weights, labels), rel=1e-9)
    assert (np.diff(predicted) >= 0).all()
    if total:
        heaviest = max(
            sum(w for x, w in zip(logits, weights, strict=True) if x == value) for value in logits
        )
        assert weight.max() <= total / num_bins + heaviest * (1 + 1e-9)


def test_calibration_bins_are_equal_without_ties() -> None:
    logits_B = torch.linspace(-3, 3, 1_000)
    metrics = BinaryMetrics()
    metrics.update(logits_B, (torch.arange(1_000) % 3 == 0).float())
    assert [weight for _, _, weight in metrics.calibration_curve(20)] == [50.0] * 20
    with pytest.raises(ValueError, match="num_bins is 0"):
        metrics.calibration_curve(0)


@given(SAMPLES)
def test_roc_curve_equals_scikit_learn(samples: list[tuple[float, float]]) -> None:
    logits, labels = [x for x, _ in samples], [y for _, y in samples]
    curve = metrics_of(logits, labels).roc_curve()
    if len(set(labels)) < 2:
        assert curve == []
        return
    fpr, tpr, _ = roc_curve(labels, logits, drop_intermediate=False)
    assert np.array(curve) == pytest.approx(np.column_stack([fpr, tpr]), abs=1e-12)


def test_thinned_roc_curve_keeps_ends_and_shape() -> None:
    generator = torch.Generator().manual_seed(2)
    label_B = (torch.rand(20_000, generator=generator) < 0.2).double()
    logits_B = torch.randn(20_000, generator=generator, dtype=torch.float64) + label_B
    metrics = BinaryMetrics()
    metrics.update(logits_B, label_B)
    curve = np.array(metrics.roc_curve(max_points=50))
    assert 40 <= len(curve) <= 50
    assert curve[0].tolist() == [0.0, 0.0]
    assert curve[-1].tolist() == [1.0, 1.0]
    assert (np.diff(curve, axis=0) >= 0).all()
    assert np.trapezoid(curve[:, 1], curve[:, 0]) == pytest.approx(metrics.result().auc, abs=1e-3)
    with pytest.raises(ValueError, match="max_points is 1"):
        metrics.roc_curve(1)


def test_b36_nan_is_never_the_best() -> None:
    tracker = BestTracker()
    results = [result_with(auc=auc) for auc in (0.70, 0.80, math.nan, 0.75)]
    assert [tracker.update(result) for result in results] == [True, True, False, False]
    assert tracker.best_value == 0.80


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("metric", ["auc", "logloss", "ne"])
def test_an_undefined_first_evaluation_is_not_the_best(metric: str, value: float | None) -> None:
    tracker = BestTracker(metric)
    assert not tracker.update(result_with(**{metric: value}))
    assert tracker.best_value is None
    assert tracker.update(result_with(**{metric: 0.6}))


def test_best_goes_up_for_auc_and_down_for_losses() -> None:
    for metric, values, expected in (
        ("auc", [0.6, 0.6, 0.5, 0.7], [True, False, False, True]),
        ("logloss", [0.6, 0.6, 0.5, 0.7], [True, False, True, False]),
        ("ne", [0.6, 0.6, 0.5, 0.7], [True, False, True, False]),
    ):
        tracker = BestTracker(metric)
        assert [tracker.update(result_with(**{metric: v})) for v in values] == expected


def test_asking_does_not_record_and_a_resumed_run_keeps_its_best() -> None:
    tracker = BestTracker("auc", best_value=0.8)
    assert tracker.is_better(result_with(auc=0.9))
    assert tracker.best_value == 0.8
    assert not tracker.update(result_with(auc=0.79))
    with pytest.raises(ValueError, match=r"'accuracy'.*auc, logloss, ne"):
        BestTracker("accuracy")
