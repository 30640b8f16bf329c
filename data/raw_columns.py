"""Arrow columns of one block → numpy values and encoded ids."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data.raw_types import BadColumn, as_lists, id_values, number_values
from data.schema import Feature
from data.tokens import MISSING, BadToken, EncodedColumn, encode


def is_plain_int(feature: Feature) -> bool:
    return feature.token == "int" and not feature.separator


def combine(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    if isinstance(combined, pa.ChunkedArray):
        return combined.chunk(0) if combined.num_chunks else pa.array([], column.type)
    return combined


def dense_values(name: str, values: pa.Array) -> np.ndarray:
    numbers = number_values(name, values)
    array = numbers.to_numpy(zero_copy_only=False)
    is_finite = np.isfinite(array)
    if int(is_finite.sum()) + numbers.null_count != len(array):
        raise BadColumn(f"column {name}: a value isn't finite (a missing one is null)")
    return array


def as_fp32(name: str, values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    if np.isinf(narrow).any():
        raise BadColumn(f"column {name}: a value is too large for fp32")
    return narrow


def sparse_values(
    feature: Feature, arrays: dict[str, pa.Array], missing: list[str]
) -> EncodedColumn:
    values = arrays[feature.name]
    if feature.many:
        return _bags(feature, values, arrays, missing)
    encoded = _encoded(feature, values)
    if not feature.is_list:
        return encoded
    is_present = encoded.codes != MISSING
    return EncodedColumn(
        encoded.codes[is_present], is_present.astype(np.int32), encoded.keys, encoded.tokens
    )


def _encoded(feature: Feature, values: pa.Array) -> EncodedColumn:
    try:
        return encode(id_values(feature.name, values, feature.token), feature.token)
    except BadToken as error:
        raise BadColumn(f"column {feature.name}: {error}") from None


def _bags(
    feature: Feature, values: pa.Array, arrays: dict[str, pa.Array], missing: list[str]
) -> EncodedColumn:
    """List columns, or texts cut at the separator, to codes and lengths."""
    lengths, flat = _split_bags(feature.name, values, feature.separator)
    if feature.separator == "":
        flat = id_values(feature.name, flat, feature.token)
    is_missing = pc.is_in(flat, value_set=pa.array(missing, pa.string())) if missing else None
    if flat.null_count or (is_missing is not None and pc.any(is_missing).as_py()):
        raise BadColumn(f"column {feature.name}: a missing id inside a bag")
    weights = None
    if feature.bag_weights:
        weight_lengths, flat_weights = _split_bags(
            feature.bag_weights, arrays[feature.bag_weights], feature.separator
        )
        if not np.array_equal(lengths, weight_lengths):
            raise BadColumn(
                f"column {feature.bag_weights}: a row's number of weights isn't the number of ids "
                f"in {feature.name}"
            )
        weights = as_fp32(feature.bag_weights, dense_values(feature.bag_weights, flat_weights))
        if np.isnan(weights).any():
            raise BadColumn(f"column {feature.bag_weights}: a weight is missing")
    encoded = _encoded(feature, flat)
    codes = encoded.codes
    if feature.missing == "row":
        codes, lengths, weights = _fill_empty_bags(codes, lengths, weights)
    return EncodedColumn(codes, lengths, encoded.keys, encoded.tokens, weights)


def _split_bags(name: str, values: pa.Array, separator: str) -> tuple[np.ndarray, pa.Array]:
    lists = pc.split_pattern(values, separator) if separator else as_lists(name, values)
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    return lengths.astype(np.int32), lists.flatten()


def _fill_empty_bags(
    codes: np.ndarray, lengths: np.ndarray, weights: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    is_empty = lengths == 0
    if not is_empty.any():
        return codes, lengths, weights
    starts = np.cumsum(lengths) - lengths
    codes = np.insert(codes, starts[is_empty], MISSING)
    if weights is not None:
        weights = np.insert(weights, starts[is_empty], np.float32(1))
    return codes, np.where(is_empty, 1, lengths).astype(np.int32), weights
