"""Between the square of all products of a sample's vectors and the row of those that are kept:
compiled loops of the dot interaction, where torch would go over memory several times."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from embeddings.compiled import compiled

Array = npt.NDArray[Any]


@compiled
def keep_pairs(
    first: int, stop: int, products_BMM: Array, num_kept: int, first_column: int, out_BC: Array
) -> None:
    """Of each sample `first … stop`, the lower triangle row by row, then zeros.

    Args:
        first: first sample.
        stop: one past the last.
        products_BMM: all products.
        num_kept: of row 0: 0 without the diagonal, 1 with it; of each further row one more.
        first_column: where in `out_BC` they begin.
        out_BC: written from there on.
    """
    num_vectors, num_columns = products_BMM.shape[1], out_BC.shape[1]
    for b in range(first, stop):
        column = first_column
        for i in range(num_vectors):
            row, kept = products_BMM[b, i], out_BC[b, column : column + i + num_kept]
            for j in range(i + num_kept):
                kept[j] = row[j]
            column += i + num_kept
        for c in range(column, num_columns):
            out_BC[b, c] = 0


@compiled
def spread_pairs(
    first: int, stop: int, grad_BC: Array, num_kept: int, first_column: int, grad_BMM: Array
) -> None:
    """The reverse: each pair's gradient at both its places, the diagonal's twice its own, or 0.

    Args:
        first: first sample.
        stop: one past the last.
        grad_BC: gradient of `out_BC` of `keep_pairs`.
        num_kept: see there.
        first_column: see there.
        grad_BMM: written: all of the samples' squares.
    """
    num_vectors = grad_BMM.shape[1]
    for b in range(first, stop):
        column = first_column
        square = grad_BMM[b]
        for i in range(num_vectors):
            row, kept = square[i], grad_BC[b, column : column + i + num_kept]
            row[i] = 0
            for j in range(i + num_kept):
                row[j] = kept[j]
            for j in range(i):
                square[j, i] = kept[j]
            row[i] *= 2
            column += i + num_kept
