"""Splits: every row in one part, by the rule alone, whatever the blocks it comes in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.errors import UserError
from data.schema import Split
from data.split import TEST, TRAIN, VALID, SplitRule


def all_parts(rule: SplitRule, file_rows: list[int], block: int = 7) -> list[int]:
    parts: list[int] = []
    for number, rows in enumerate(file_rows):
        for start in range(0, rows, block):
            parts += rule.parts_of(number, start, min(start + block, rows)).tolist()
    return parts


SHARES = st.integers(0, 4).map(lambda tenths: tenths / 10)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=4), SHARES, SHARES)
def test_in_order_the_last_rows_validate_then_test(
    file_rows: list[int], valid: float, test: float
) -> None:
    total = sum(file_rows)
    num_valid, num_test = round(total * valid), round(total * test)
    num_train = total - num_valid - num_test
    split = Split("in_order", valid, test)
    if num_train <= 0:
        with pytest.raises(UserError, match="leaves no training row"):
            SplitRule(split, file_rows, None)
        return
    expected = [TRAIN] * num_train + [VALID] * num_valid + [TEST] * num_test
    assert all_parts(SplitRule(split, file_rows, None), file_rows) == expected


def test_by_file_the_last_files_are_shared_in_order() -> None:
    """Criteo's custom: the last day's first half validates, its second half tests."""
    rule = SplitRule(Split("by_file", 0.5, 0.5), [3, 4, 6], None)
    assert all_parts(rule, [3, 4, 6]) == [TRAIN] * 7 + [VALID] * 3 + [TEST] * 3
    rule = SplitRule(Split("by_file", 0.25, 0.75, eval_files=2), [3, 4, 4], None)
    assert all_parts(rule, [3, 4, 4]) == [TRAIN] * 3 + [VALID] * 2 + [TEST] * 6


def test_by_file_needs_a_file_to_train_on() -> None:
    with pytest.raises(UserError, match=r"data\.raw names 1"):
        SplitRule(Split("by_file"), [5], None)
    with pytest.raises(UserError, match="leaves no training row"):
        SplitRule(Split("by_file"), [0, 5], None)


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=4), st.integers(0, 2**40), st.integers(1, 9)
)
def test_random_depends_on_row_and_seed_only(file_rows: list[int], seed: int, block: int) -> None:
    """Not on the blocks, nor on how the rows lie in files."""
    split = Split("random", 0.3, 0.3, seed=seed)
    one_file = all_parts(SplitRule(split, [sum(file_rows)], None), [sum(file_rows)])
    assert all_parts(SplitRule(split, file_rows, None), file_rows, block) == one_file


def test_random_shares_and_seeds() -> None:
    rows = 50_000
    parts = {
        seed: SplitRule(Split("random", 0.2, 0.1, seed), [rows], None).parts_of(0, 0, rows)
        for seed in (0, 1)
    }
    for part, share in ((TRAIN, 0.7), (VALID, 0.2), (TEST, 0.1)):
        # Five standard errors of a share of independent draws.
        margin = 5 * (share * (1 - share) / rows) ** 0.5
        assert abs(float((parts[0] == part).mean()) - share) < margin
        both = float(((parts[0] == part) & (parts[1] == part)).mean())
        assert abs(both - share**2) < margin, "two seeds split independently"
    lag = float(((parts[0][1:] == VALID) & (parts[0][:-1] == VALID)).mean())
    assert abs(lag - 0.04) < 5 * (0.04 * 0.96 / rows) ** 0.5, "neighbours are independent"


def test_given_parts_follow_the_files() -> None:
    rule = SplitRule(Split("given"), [2, 0, 3, 1], [TRAIN, TRAIN, VALID, TEST])
    assert all_parts(rule, [2, 0, 3, 1]) == [TRAIN] * 2 + [VALID] * 3 + [TEST]
    assert rule.parts_of(0, 0, 2).dtype == np.uint8
