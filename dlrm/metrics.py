"""Quality of binary predictions: exact AUC, log loss, normalised entropy and calibration.

The one state is a weighted histogram over *distinct* logits: for each, the weight of the positive
and of the negative samples. Every figure is a function of that histogram, sorted by logit, so a
whole evaluation set gives the same value however it is cut into batches or spread over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

FloatArray = npt.NDArray[np.floating[Any]]

# The samples held unmerged before they are sorted into the histogram.
COMPACT_AT_SAMPLES = 4_000_000

_LOWER_IS_BETTER = {"auc": False, "logloss": True, "ne": True}


class _Histogram(NamedTuple):
    """Weights by score; sorted and distinct after `_merged`, one entry a sample before."""

    score_K: FloatArray
    positive_K: FloatArray
    negative_K: FloatArray


@dataclass(frozen=True)
class EvalResult:
    """The figures of one evaluation; None where a figure isn't defined for these samples.

    Attributes:
        auc: area under the ROC curve: the chance that a positive scores above a negative, ties
            counted half. None unless both classes have weight.
        logloss: weighted mean of the binary cross-entropy, in nats. None without weight. Infinite
            where an infinite logit is wrong.
        ne: normalised entropy, `logloss` over the entropy of the base rate of the same samples
            (He et al., "Practical Lessons from Predicting Clicks on Ads at Facebook", 2014, §3);
            below 1 is better than always predicting the base rate. None where `auc` is.
        calibration: sum of the predictions over sum of the labels, both weighted; 1 is right,
            above 1 predicts too much. None without positive weight.
        num_samples: samples seen, those of weight 0 too.
        num_positive: samples with label 1, those of weight 0 too.
        sum_weight: sum of the example weights; `num_samples` where none are given.
    """

    auc: float | None
    logloss: float | None
    ne: float | None
    calibration: float | None
    num_samples: int
    num_positive: int
    sum_weight: float

    def as_dict(self) -> dict[str, Any]:
        """The figures as result.json and metrics.jsonl hold them. JSON has no infinity: such a
        figure is null, and `not_finite` says what it was."""
        figures = {
            "auc": self.auc,
            "logloss": self.logloss,
            "ne": self.ne,
            "calibration": self.calibration,
        }
        bad = {n: str(v) for n, v in figures.items() if v is not None and not math.isfinite(v)}
        finite = {name: None if name in bad else value for name, value in figures.items()}
        more = {"not_finite": bad} if bad else {}
        return {**finite, "num_samples": self.num_samples, **more}


class BinaryMetrics:
    """Streaming evaluation of logits against 0/1 labels, mergeable over ranks.

    Memory: 20 bytes for each distinct logit (fp32 logit, fp64 positive and negative weight), 24
    where some batch came in fp64. New samples wait unmerged, at the same size, until they outnumber
    both `COMPACT_AT_SAMPLES` and the distinct logits; sorting takes about twice that again for a
    moment. bf16 logits have at most 65,536 distinct values.

    What is promised, on one machine: with unit weights (or any whose sums are exact in fp64, such
    as integers) the result is equal to the bit for every cut into batches, every order of samples
    and every order of merging. With other weights only the sums over tied logits may round
    differently: the figures agree to about 1e-12 relative. Logits given in fp32 or bf16 are widened
    without loss, and all sums are in fp64.
    """

    def __init__(self) -> None:
        self._histogram = _Histogram(np.empty(0, np.float32), np.empty(0), np.empty(0))
        self._pending: list[_Histogram] = []
        self._num_pending = 0
        self._num_samples = 0
        self._num_positive = 0

    def update(self, logits_B: Tensor, label_B: Tensor, weight_B: Tensor | None = None) -> None:
        """Adds samples.

        Args:
            logits_B: fp64, fp32, bf16 or fp16 logits (not probabilities), on any device.
            label_B: 0 or 1, any dtype.
            weight_B: example weights, finite and at least 0; None where all are 1.

        Raises:
            ValueError: where a logit is NaN, a label isn't 0 or 1, a weight is negative or not
                finite, or the shapes differ. Nothing of the call is counted then.
        """
        score_B, label_np_B, weight_np_B = self._checked(logits_B, label_B, weight_B)
        positive_B = weight_np_B * label_np_B
        self._add(_Histogram(score_B, positive_B, weight_np_B - positive_B))
        self._num_samples += score_B.size
        self._num_positive += int(np.count_nonzero(label_np_B))

    def merge(self, other: BinaryMetrics) -> None:
        """Adds all samples of `other`, which stays as it is."""
        for part in [other._histogram, *other._pending]:
            self._add(part)
        self._num_samples += other._num_samples
        self._num_positive += other._num_positive

    def to_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The whole state as plain arrays, for an exchange between ranks or a file.

        Returns:
            `score_K` (fp32 or fp64, sorted, distinct), `positive_K` and `negative_K` (fp64
            weights), and `counts` (int64: samples, positive samples).
        """
        self._compact()
        score_K, positive_K, negative_K = self._histogram
        counts = np.array([self._num_samples, self._num_positive], dtype=np.int64)
        return {
            "score_K": score_K,
            "positive_K": positive_K,
            "negative_K": negative_K,
            "counts": counts,
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> BinaryMetrics:
        """The metrics whose `to_arrays` gave `arrays`."""
        metrics = cls()
        metrics._add(_Histogram(arrays["score_K"], arrays["positive_K"], arrays["negative_K"]))
        metrics._num_samples, metrics._num_positive = (int(count) for count in arrays["counts"])
        return metrics

    def result(self) -> EvalResult:
        """The figures of all samples so far; more may be added afterwards."""
        self._compact()
        score_K, positive_K, negative_K = self._histogram
        sum_positive, sum_negative = float(positive_K.sum()), float(negative_K.sum())
        sum_weight = sum_positive + sum_negative
        auc = logloss = ne = calibration = None
        if sum_weight > 0:
            logloss = _sum_cross_entropy(score_K, positive_K, negative_K) / sum_weight
        if sum_positive > 0:
            sum_predicted = ((positive_K + negative_K) * _sigmoid(score_K)).sum()
            calibration = float(sum_predicted) / sum_positive
        if sum_positive > 0 and sum_negative > 0 and logloss is not None:
            auc = _auc(positive_K, negative_K)
            entropy = _entropy(sum_positive, sum_negative)
            # Weights so unequal that their share underflows leave no entropy to compare with.
            ne = logloss / entropy if entropy > 0 else None
        return EvalResult(
            auc, logloss, ne, calibration, self._num_samples, self._num_positive, sum_weight
        )

    def calibration_curve(self, num_bins: int = 20) -> list[tuple[float, float, float]]:
        """Predicted against observed rate, over bins of about equal weight in order of prediction.

        Equal logits are never split over two bins, so with heavy ties the weights differ and some
        bins vanish.

        Returns:
            `(mean prediction, share of positives, weight)` of every bin that has weight, at most
            `num_bins`, by rising prediction; empty without weight.

        Raises:
            ValueError: where `num_bins` is below 1.
        """
        if num_bins < 1:
            raise ValueError(f"num_bins is {num_bins}, but must be at least 1")
        self._compact()
        score_K, positive_K, negative_K = self._histogram
        weight_K = positive_K + negative_K
        cumulative_K = np.cumsum(weight_K)
        if not cumulative_K.size or cumulative_K[-1] == 0:
            return []
        # A logit belongs to the bin that holds the middle of its own weight.
        middle_K = (cumulative_K - weight_K / 2) / cumulative_K[-1]
        bin_K = np.minimum((middle_K * num_bins).astype(np.int64), num_bins - 1)
        weight, positive, predicted = (
            np.bincount(bin_K, values, num_bins)
            for values in (weight_K, positive_K, weight_K * _sigmoid(score_K))
        )
        return [
            (float(predicted[i] / weight[i]), float(positive[i] / weight[i]), float(weight[i]))
            for i in np.flatnonzero(weight)
        ]

    def roc_curve(self, max_points: int = 200) -> list[tuple[float, float]]:
        """The ROC curve, thinned to points evenly spread along it.

        Returns:
            `(false positive rate, true positive rate)` from (0, 0) to (1, 1), neither ever falling;
            empty where `auc` is undefined. Not for computing an area: use `result().auc`.

        Raises:
            ValueError: where `max_points` is below 2.
        """
        if max_points < 2:
            raise ValueError(f"max_points is {max_points}, but must be at least 2")
        self._compact()
        _, positive_K, negative_K = self._histogram
        # From the highest logit down: what is above a threshold is predicted positive.
        true_positive = np.concatenate([[0.0], np.cumsum(positive_K[::-1])])
        false_positive = np.concatenate([[0.0], np.cumsum(negative_K[::-1])])
        if true_positive[-1] == 0 or false_positive[-1] == 0:
            return []
        tpr, fpr = true_positive / true_positive[-1], false_positive / false_positive[-1]
        if tpr.size <= max_points:
            keep = np.arange(tpr.size)
        else:
            keep = np.searchsorted(tpr + fpr, np.linspace(0.0, 2.0, max_points))
            keep = np.unique(np.minimum(keep, tpr.size - 1))
        return list(zip(fpr[keep].tolist(), tpr[keep].tolist(), strict=True))

    def _checked(
        self, logits_B: Tensor, label_B: Tensor, weight_B: Tensor | None
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """The inputs as arrays: scores in fp32 or fp64, labels and weights in fp64."""
        shapes = {"logits_B": tuple(logits_B.shape), "label_B": tuple(label_B.shape)}
        if weight_B is not None:
            shapes["weight_B"] = tuple(weight_B.shape)
        if logits_B.dim() != 1 or len(set(shapes.values())) > 1:
            raise ValueError(f"logits, labels and weights must be flat and of one size: {shapes}")
        if not logits_B.is_floating_point():
            raise ValueError(f"logits must be floating point, not {logits_B.dtype}")
        score_dtype = torch.float64 if logits_B.dtype == torch.float64 else torch.float32
        score_B = logits_B.detach().to("cpu", score_dtype).numpy()
        label_np_B = label_B.detach().to("cpu", torch.float64).numpy()
        if weight_B is None:
            weight_np_B = np.ones(score_B.size)
        else:
            weight_np_B = weight_B.detach().to("cpu", torch.float64).numpy()
        self._refuse(np.isnan(score_B), "logit", score_B, "must be a number")
        self._refuse((label_np_B != 0) & (label_np_B != 1), "label", label_np_B, "must be 0 or 1")
        bad_weight_B = ~(np.isfinite(weight_np_B) & (weight_np_B >= 0))
        self._refuse(bad_weight_B, "weight", weight_np_B, "must be finite and at least 0")
        # Adding 0 copies (the tensor may be reused) and turns -0.0, equal to 0.0, into it.
        return score_B + score_B.dtype.type(0), label_np_B, weight_np_B

    def _refuse(
        self, bad_B: npt.NDArray[np.bool_], what: str, values_B: FloatArray, rule: str
    ) -> None:
        if bad_B.any():
            index = int(bad_B.argmax())
            raise ValueError(
                f"the {what} of sample {index} of this batch (sample {self._num_samples + index} "
                f"of this evaluation on this rank) is {values_B[index]}, but {rule}; "
                f"{int(bad_B.sum())} of the batch's {bad_B.size} samples are like that"
            )

    def _add(self, part: _Histogram) -> None:
        self._pending.append(part)
        self._num_pending += part.score_K.size
        # Waiting for as many new samples as there are distinct logits keeps the total cost of the
        # sorting proportional to n log n.
        if self._num_pending > max(COMPACT_AT_SAMPLES, self._histogram.score_K.size):
            self._compact()

    def _compact(self) -> None:
        if self._pending:
            self._histogram = _merged([self._histogram, *self._pending])
            self._pending, self._num_pending = [], 0


class BestTracker:
    """Tells whether an evaluation is the best so far.

    An evaluation whose metric is undefined (None), NaN or infinite is never the best, whatever came
    before: AUCs of .70, .80, NaN, .75 leave the second as the best. Nor does another metric step
    in: a comparison of AUC with log loss means nothing. Where *no* evaluation has a defined value
    (say, an evaluation set of one class) there is no best: `best_value` stays None, and the
    caller uses the last model and says so. Taking an undefined one for want of better would either
    freeze the least trained model (the first such) or let a diverged one count (the latest such).
    Of equal values the first stays the best.

    Args:
        metric: `auc` (higher is better), `logloss` or `ne` (lower is better).
        best_value: the best value of the run that is resumed.

    Raises:
        ValueError: where `metric` is another name.
    """

    def __init__(self, metric: str = "auc", best_value: float | None = None) -> None:
        if metric not in _LOWER_IS_BETTER:
            raise ValueError(
                f"the best model can't be chosen by {metric!r}: must be one of "
                f"{', '.join(_LOWER_IS_BETTER)}"
            )
        self.metric = metric
        self.best_value = best_value

    def is_better(self, result: EvalResult) -> bool:
        """Whether `result` beats every evaluation given to `update`. Changes nothing."""
        value: float | None = getattr(result, self.metric)
        if value is None or not math.isfinite(value):
            return False
        if self.best_value is None:
            return True
        if _LOWER_IS_BETTER[self.metric]:
            return value < self.best_value
        return value > self.best_value

    def update(self, result: EvalResult) -> bool:
        """Takes `result` into account; returns whether it is the best so far."""
        better = self.is_better(result)
        if better:
            self.best_value = getattr(result, self.metric)
        return better


def _merged(parts: list[_Histogram]) -> _Histogram:
    """One histogram of all `parts`, its scores sorted and distinct."""
    score_L = np.concatenate([part.score_K for part in parts])
    if not score_L.size:
        return parts[0]
    order_L = np.argsort(score_L, kind="stable")
    score_L = score_L[order_L]
    starts_K = np.flatnonzero(np.concatenate([[True], score_L[1:] != score_L[:-1]]))

    def summed(weights: list[FloatArray]) -> FloatArray:
        return np.add.reduceat(np.concatenate(weights)[order_L], starts_K)

    return _Histogram(
        score_L[starts_K],
        summed([part.positive_K for part in parts]),
        summed([part.negative_K for part in parts]),
    )


def _auc(positive_K: FloatArray, negative_K: FloatArray) -> float:
    """The Mann-Whitney statistic over its maximum; both classes must have weight.

    Dividing before summing keeps the value within [0, 1] by the monotony of rounding, and makes a
    perfect order exactly 1.
    """
    cumulative_K = np.cumsum(negative_K)
    below_K = np.concatenate([[0.0], cumulative_K[:-1]])
    share_below_K = (below_K + negative_K / 2) / cumulative_K[-1]
    return float((positive_K * share_below_K).sum() / positive_K.sum())


def _sum_cross_entropy(
    score_K: FloatArray, positive_K: FloatArray, negative_K: FloatArray
) -> float:
    """Sum of `weight * -log p(label)` in nats, from logits: nothing is clamped."""
    total = 0.0
    for weight_K, sign in ((positive_K, -1.0), (negative_K, 1.0)):
        # Scores of the other class alone are left out: an infinite one would add 0 * inf.
        held = weight_K > 0
        total += float((weight_K[held] * np.logaddexp(0.0, sign * _wide(score_K[held]))).sum())
    return total


def _sigmoid(score_K: FloatArray) -> FloatArray:
    """Probabilities in fp64, without overflow for any logit."""
    return np.exp(-np.logaddexp(0.0, -_wide(score_K)))


def _wide(score_K: FloatArray) -> FloatArray:
    return score_K.astype(np.float64, copy=False)


def _entropy(sum_positive: float, sum_negative: float) -> float:
    """Entropy in nats of a label drawn with these weights; 0 where one of them vanishes."""
    total = sum_positive + sum_negative
    shares = [sum_positive / total, sum_negative / total]
    return -sum(share * math.log(share) for share in shares if share > 0)
