"""Raw tokens → 64-bit keys, deduplicated per block: what is counted and mapped later.

The key of a `hex` token is its value, of an `int` token its value as an unsigned 64-bit number, of
a `text` token xxh64 (seed 0) of its UTF-8 bytes. A block of a column is kept as a small dictionary
of sorted unique keys and one code per value, so the expensive work (counting, vocabulary look-up)
is done once per distinct token of a block and not once per row.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from data.errors import UserError

MISSING = -1
"""Code of a missing value."""

_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
_WHOLE_NUMBER = re.compile(r"-?[0-9]+")


class BadToken(ValueError):
    """A token that its column's `token=` rule can't read. The caller adds file and line."""


@dataclass(frozen=True)
class EncodedColumn:
    """One sparse column of one block of `B` rows.

    Attributes:
        codes: int32 index into `keys`, or `MISSING`; one per row, or one per id where `lengths` is
            given.
        lengths: int32 ids per row, for columns whose bags are lists; else None.
        keys: uint64, sorted, unique.
        tokens: the text behind each key, for `text` columns; else None.
        weights: fp32 bag weight of each code, or None.
    """

    codes: np.ndarray
    lengths: np.ndarray | None
    keys: np.ndarray
    tokens: pa.Array | None = None
    weights: np.ndarray | None = None


def encode(values: pa.Array, token: str) -> EncodedColumn:
    """Encodes flat `values` (string, or int64 for `token='int'`); nulls become `MISSING`.

    Raises:
        BadToken: for a value that isn't of the column's kind.
    """
    if token == "text":
        return _encode_text(values)
    numbers = values if token == "int" else None
    valid = None if values.null_count == 0 else pc.is_valid(values).to_numpy(zero_copy_only=False)
    present = values if valid is None else values.drop_null()
    if numbers is not None:
        keys_of_values = present.to_numpy(zero_copy_only=False).astype(np.int64).view(np.uint64)
    else:
        keys_of_values = _hex_values(present)
    keys, codes_present = deduplicate(keys_of_values)
    if valid is None:
        return EncodedColumn(codes_present, None, keys)
    codes = np.full(len(values), MISSING, dtype=np.int32)
    codes[valid] = codes_present
    return EncodedColumn(codes, None, keys)


def deduplicate(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sorted unique uint64 `keys` and int32 `codes` with `keys[codes] == values`."""
    if len(values) == 0:
        return np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int32)
    if int(values.max()) >> 32:
        keys, inverse = np.unique(values, return_inverse=True)
        return keys, inverse.astype(np.int32)
    # Value and position packed in one word: numpy sorts words with SIMD, several times faster
    # than an argsort of the values.
    packed = (values << np.uint64(32)) | np.arange(len(values), dtype=np.uint64)
    packed.sort()
    in_order = packed >> np.uint64(32)
    is_first = np.empty(len(values), dtype=bool)
    is_first[0] = True
    np.not_equal(in_order[1:], in_order[:-1], out=is_first[1:])
    codes = np.empty(len(values), dtype=np.int32)
    positions = (packed & np.uint64(0xFFFFFFFF)).astype(np.int64)
    codes[positions] = np.cumsum(is_first, dtype=np.int32) - 1
    return in_order[is_first], codes


def text_keys(texts: pa.Array) -> np.ndarray:
    """xxh64 (seed 0) of the UTF-8 bytes of each text, uint64."""
    raw = texts.cast(pa.binary()).to_pylist()
    return np.fromiter((xxhash.xxh64_intdigest(t) for t in raw), dtype=np.uint64, count=len(raw))


def key_of_text(token: str, kind: str) -> int:
    """The key of one token, for error messages and tests."""
    if kind == "hex":
        if not token or len(token) > 16 or not _HEX_DIGITS.issuperset(token):
            raise BadToken(f"{token!r} isn't a hexadecimal id of at most 16 digits")
        return int(token, 16)
    if kind == "int":
        # int() alone would take '1_000' and digits of other scripts, which the fast parser refuses.
        if not _WHOLE_NUMBER.fullmatch(token):
            raise BadToken(f"{token!r} isn't a whole number")
        value = int(token)
        if not -(2**63) <= value < 2**63:
            raise BadToken(f"{token!r} doesn't fit into 64 bits")
        return value % 2**64
    return xxhash.xxh64_intdigest(token.encode())


def _encode_text(values: pa.Array) -> EncodedColumn:
    encoded = values.dictionary_encode()
    texts = encoded.dictionary
    keys, first, inverse = np.unique(text_keys(texts), return_index=True, return_inverse=True)
    if len(keys) < len(texts):
        raise collision_error()
    indices = encoded.indices
    if indices.null_count:
        indices = pc.fill_null(indices, MISSING)
    # One more entry at the end: code -1 (missing) picks it and stays -1.
    to_code = np.append(inverse.astype(np.int32), np.int32(MISSING))
    codes = to_code[indices.to_numpy(zero_copy_only=False)]
    return EncodedColumn(codes, None, keys, texts.take(pa.array(first)))


def collision_error() -> UserError:
    """Two texts with one 64-bit hash: about 3 in 10,000 for a column of 100 M tokens."""
    return UserError(
        "two different tokens of one column share their 64-bit hash, so they can't be told apart; "
        "give the column numeric tokens (token=hex or token=int)"
    )


def _hex_values(values: pa.Array) -> np.ndarray:
    num_values = len(values)
    if num_values == 0:
        return np.empty(0, dtype=np.uint64)
    offsets = np.frombuffer(values.buffers()[1], np.int32, num_values + 1, values.offset * 4)
    lengths = np.diff(offsets)
    if (lengths == 8).all():
        words = np.frombuffer(values.buffers()[2], ">u8", num_values, int(offsets[0]))
        numbers, is_hex = _eight_hex_digits(words.astype(np.uint64))
        if is_hex:
            return numbers
    encoded = values.dictionary_encode()
    distinct = [key_of_text(text, "hex") for text in encoded.dictionary.to_pylist()]
    return np.array(distinct, dtype=np.uint64)[encoded.indices.to_numpy()]


def _eight_hex_digits(words: np.ndarray) -> tuple[np.ndarray, bool]:
    """Eight ASCII hex digits in one big-endian word → value, all values of a column at once.

    Arithmetic on the eight bytes of a word side by side ("SWAR"); the second result tells whether
    every digit was one of 0-9a-f: the digits written back give the text, and none is above 15 (`g`
    to `o` survive the writing back, as 16 to 24).
    """
    u = np.uint64
    digits = words & u(0x0F0F0F0F0F0F0F0F)
    digits += ((words >> u(6)) & u(0x0101010101010101)) * u(9)
    above_nine = ((digits + u(0x7676767676767676)) >> u(7)) & u(0x0101010101010101)
    is_hex = bool((digits + u(0x3030303030303030) + above_nine * u(0x27) == words).all())
    is_hex = is_hex and not (digits & u(0x1010101010101010)).any()
    digits = (digits | (digits >> u(4))) & u(0x00FF00FF00FF00FF)
    digits = (digits | (digits >> u(8))) & u(0x0000FFFF0000FFFF)
    digits = (digits | (digits >> u(16))) & u(0x00000000FFFFFFFF)
    return digits, is_hex
