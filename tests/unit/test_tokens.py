"""Tokens → keys: the fast paths against one plain rule, and what they must refuse."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data import tokens
from data.errors import UserError
from data.tokens import MISSING, BadToken, deduplicate, encode, key_of_text

HEX = "0123456789abcdefABCDEF"


def decoded(values: list[str | None] | list[int | None], kind: str) -> list[int | None]:
    """The key of every value as `encode` gives it."""
    array = pa.array(values, pa.int64() if kind == "int" else pa.string())
    column = encode(array, kind)
    assert column.codes.dtype == np.int32
    assert column.keys.dtype == np.uint64
    assert (np.diff(column.keys.astype(object)) > 0).all(), "keys are sorted and unique"
    return [None if code == MISSING else int(column.keys[code]) for code in column.codes]


@given(st.lists(st.none() | st.text(HEX, min_size=8, max_size=8)))
def test_eight_digit_hex_ids(values: list[str | None]) -> None:
    assert decoded(values, "hex") == [None if v is None else int(v, 16) for v in values]


@given(st.lists(st.none() | st.text(HEX, min_size=1, max_size=16)))
def test_hex_ids_of_any_length(values: list[str | None]) -> None:
    assert decoded(values, "hex") == [None if v is None else int(v, 16) for v in values]


@given(st.lists(st.none() | st.integers(-(2**63), 2**63 - 1)))
def test_whole_numbers_are_keys_modulo_two_to_the_64(values: list[int | None]) -> None:
    assert decoded(values, "int") == [None if v is None else v % 2**64 for v in values]


@given(st.lists(st.none() | st.text(max_size=5)))
def test_text_keys_are_xxh64_and_the_text_is_kept(values: list[str | None]) -> None:
    expected = [None if v is None else xxhash.xxh64_intdigest(v.encode()) for v in values]
    assert decoded(values, "text") == expected
    column = encode(pa.array(values, pa.string()), "text")
    assert column.tokens is not None
    texts = column.tokens.to_pylist()
    assert [xxhash.xxh64_intdigest(t.encode()) for t in texts] == column.keys.tolist()


def test_hex_ids_beyond_two_to_the_31_and_zero_apart_from_missing() -> None:
    """Fact sheet 1.2.1 and 1.2.2: wrapped int32 keys, and 00000000 merged with missing."""
    values = ["ffffffff", None, "00000000", "80000000", "FFFFFFFF"]
    assert decoded(values, "hex") == [2**32 - 1, None, 0, 2**31, 2**32 - 1]


@given(st.text(st.characters(max_codepoint=127), min_size=8, max_size=8))
@example("0000000g")
@example("ooooonml")
@example("0000000G")
@example("-0000001")
@example("0x000001")
@example("0000_001")
@settings(max_examples=300)
def test_the_word_at_a_time_path_takes_exactly_the_hex_digits(text: str) -> None:
    """`g` to `o` follow `f` in ASCII and once passed as digits of 16 and more."""
    if set(text) <= set(HEX):
        assert decoded([text], "hex") == [int(text, 16)]
    else:
        with pytest.raises(BadToken):
            decoded([text], "hex")
        with pytest.raises(BadToken):
            key_of_text(text, "hex")


@pytest.mark.parametrize("text", ["", "0" * 17, "12 4", "é1234567"])
def test_other_bad_hex_ids(text: str) -> None:
    with pytest.raises(BadToken, match="hexadecimal"):
        encode(pa.array(["00000001", text]), "hex")


@pytest.mark.parametrize("text", ["", "1.0", "1_0", " 1", "+1", "٣", str(2**63)])
def test_bad_whole_numbers(text: str) -> None:
    with pytest.raises(BadToken):
        key_of_text(text, "int")


def test_sliced_arrow_arrays_are_read_from_their_own_start() -> None:
    values = pa.array(["0000000a", "0000000b", None, "0000000c", "0000000d"])
    column = encode(values.slice(1, 3), "hex")
    assert column.keys.tolist() == [11, 12]
    assert column.codes.tolist() == [0, MISSING, 1]


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=40) | st.lists(st.integers(0, 2**64 - 1)),
)
@example([0, 2**32 - 1, 0])
@example([0, 2**32, 0])
def test_deduplicate(values: list[int]) -> None:
    array = np.array(values, dtype=np.uint64)
    keys, codes = deduplicate(array)
    assert keys.tolist() == sorted(set(values))
    assert keys[codes].tolist() == values if values else len(codes) == 0


def test_two_texts_with_one_hash_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merging them silently would train two ids as one."""
    monkeypatch.setattr(tokens, "text_keys", lambda texts: np.full(len(texts), 7, np.uint64))
    encode(pa.array(["a", "a"]), "text")
    with pytest.raises(UserError, match="64-bit hash"):
        encode(pa.array(["a", "b"]), "text")
