"""The update rules of `row_optim`, row by row in the arrays themselves: each row and its state are
read once and written once (with weight decay, rows are read once more before).

Of `rows_K[first:stop]`, distinct and there; gradients hold their weight decay already. An array is
given as a flat one and the distance between the starts of its rows, so that a row may be a part of
a longer record. All numbers are of the arrays' type.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from embeddings.compiled import compiled

Array = npt.NDArray[Any]
Int64Array = npt.NDArray[np.int64]


@compiled
def _part(array: Array, start: int, size: int) -> Array:
    # Indices into a part are known to be positive; only so the loops become vector instructions.
    return array[start : start + size]


@compiled
def sgd(
    first: int,
    stop: int,
    rows_K: Int64Array,
    grads_KD: Array,
    weights: Array,
    weights_stride: int,
    lr: float,
) -> None:
    """`w -= lr g`."""
    dim = grads_KD.shape[1]
    for k in range(first, stop):
        row = _part(weights, rows_K[k] * weights_stride, dim)
        for d in range(dim):
            row[d] -= lr * grads_KD[k, d]


@compiled
def adagrad(
    first: int,
    stop: int,
    rows_K: Int64Array,
    grads_KD: Array,
    weights: Array,
    weights_stride: int,
    sums: Array,
    sums_stride: int,
    lr: float,
    eps: float,
) -> None:
    """`s += g²; w -= lr g / (√s + eps)`."""
    dim = grads_KD.shape[1]
    for k in range(first, stop):
        row = _part(weights, rows_K[k] * weights_stride, dim)
        row_sums = _part(sums, rows_K[k] * sums_stride, dim)
        for d in range(dim):
            grad = grads_KD[k, d]
            squares = row_sums[d] + grad * grad
            row_sums[d] = squares
            row[d] -= lr * grad / (np.sqrt(squares) + eps)


@compiled
def rowwise_adagrad(
    first: int,
    stop: int,
    rows_K: Int64Array,
    grads_KD: Array,
    weights: Array,
    weights_stride: int,
    sums: Array,
    sums_stride: int,
    squares_K1: Array,
    lr: float,
    eps: float,
) -> None:
    """`s += squares; w -= lr g / (√s + eps)`; `squares_K1` is each gradient's mean of squares."""
    dim = grads_KD.shape[1]
    for k in range(first, stop):
        row = _part(weights, rows_K[k] * weights_stride, dim)
        row_sum = sums[rows_K[k] * sums_stride] + squares_K1[k, 0]
        sums[rows_K[k] * sums_stride] = row_sum
        denominator = np.sqrt(row_sum) + eps
        for d in range(dim):
            row[d] -= lr * grads_KD[k, d] / denominator


@compiled
def adam(
    first: int,
    stop: int,
    rows_K: Int64Array,
    grads_KD: Array,
    weights: Array,
    weights_stride: int,
    exp_avgs: Array,
    exp_avgs_stride: int,
    exp_avg_sqs: Array,
    exp_avg_sqs_stride: int,
    step_size: float,
    eps: float,
    new_share: float,
    beta2: float,
    new_share_sq: float,
) -> None:
    """`m += (1-β₁)(g-m); v = β₂v + (1-β₂)g²; w -= step_size m / (√v + eps)`; `new_share` is 1-β₁,
    `new_share_sq` 1-β₂."""
    dim = grads_KD.shape[1]
    for k in range(first, stop):
        row = _part(weights, rows_K[k] * weights_stride, dim)
        means = _part(exp_avgs, rows_K[k] * exp_avgs_stride, dim)
        squares = _part(exp_avg_sqs, rows_K[k] * exp_avg_sqs_stride, dim)
        for d in range(dim):
            grad = grads_KD[k, d]
            mean = means[d] + new_share * (grad - means[d])
            square = squares[d] * beta2 + new_share_sq * grad * grad
            means[d] = mean
            squares[d] = square
            row[d] -= step_size * mean / (np.sqrt(square) + eps)
