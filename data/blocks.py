"""Parsed blocks as named arrays: how they are spooled between the passes of `prepare`.

label, weight                 one value per row
dense.NAME                    fp64 per row, NaN = missing
sparse.NAME.codes             int32 per row (or per id of a list column), -1 = missing
sparse.NAME.keys              uint64: the block's local dictionary
sparse.NAME.lengths .tokens .weights    list columns; text columns; bag weights
"""

from __future__ import annotations

import numpy as np

from data.arrays import Arrays
from data.raw import RawBlock
from data.schema import Feature, Schema


def block_arrays(block: RawBlock) -> Arrays:
    """The arrays of a parsed block, under the names above."""
    arrays: Arrays = {f"dense.{name}": values for name, values in block.dense.items()}
    if block.label_B is not None:
        arrays["label"] = block.label_B
    if block.weight_B is not None:
        arrays["weight"] = block.weight_B
    for name, column in block.sparse.items():
        parts = {
            "codes": column.codes,
            "keys": column.keys,
            "lengths": column.lengths,
            "tokens": column.tokens,
            "weights": column.weights,
        }
        arrays |= {f"sparse.{name}.{kind}": v for kind, v in parts.items() if v is not None}
    return arrays


def counting_names(feature: Feature) -> list[str]:
    """The arrays that counting a feature's tokens needs."""
    kinds = ["codes", "keys"]
    kinds += ["lengths"] if feature.is_list else []
    kinds += ["tokens"] if feature.token == "text" else []
    return [f"sparse.{feature.name}.{kind}" for kind in kinds]


def select_rows(
    arrays: Arrays, is_chosen: np.ndarray, schema: Schema, features: tuple[Feature, ...]
) -> Arrays:
    """The arrays of a block's chosen rows; local dictionaries stay as they are."""
    chosen: Arrays = dict(arrays)
    for name in ("label", "weight", *(f"dense.{name}" for name in schema.dense)):
        if name in arrays:
            chosen[name] = arrays[name][is_chosen]
    for feature in features:
        head = f"sparse.{feature.name}"
        is_kept = is_chosen
        if feature.is_list:
            lengths = arrays[f"{head}.lengths"]
            chosen[f"{head}.lengths"] = lengths[is_chosen]
            is_kept = np.repeat(is_chosen, lengths)
        chosen[f"{head}.codes"] = arrays[f"{head}.codes"][is_kept]
        if f"{head}.weights" in arrays:
            chosen[f"{head}.weights"] = arrays[f"{head}.weights"][is_kept]
    return chosen
