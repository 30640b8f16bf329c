"""Checks of what constructors are given: type as well as value, and a message that names the field.

Numbers of NumPy are taken and made Python's, so that what holds them can be printed, compared and
written as JSON. A bool is no number here, nor is a float that happens to be whole.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch

_Option = TypeVar("_Option")
_MAX_SHOWN = 40


def whole_number(what: str, value: Any, *, least: int | None = None) -> int:
    """A whole number.

    Args:
        what: names the field.
        value: of Python or NumPy.
        least: the smallest that is allowed; None: any.

    Raises:
        ValueError: naming the field.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(f"{what} is {shown(value)}, must be a whole number")
    if least is not None and value < least:
        raise ValueError(f"{what} is {shown(value)}, must be at least {least}")
    return int(value)


def real_number(
    what: str, value: Any, *, least: float = -math.inf, most: float = sys.float_info.max
) -> float:
    """A finite number from `least` to `most`.

    Raises:
        ValueError: naming the field.
    """
    if not is_number(value):
        raise ValueError(f"{what} is {shown(value)}, must be a number")
    # Of NumPy's narrow types comparisons would round the bounds.
    number = int(value) if isinstance(value, int | np.integer) else float(value)
    if not (abs(number) <= most and number >= least):
        bound = "" if least == -math.inf else f" and at least {least:g}"
        bound += "" if most == sys.float_info.max else f" and at most {most:.4g}"
        raise ValueError(f"{what} is {shown(value)}, must be finite{bound}")
    return number


def is_number(value: Any) -> bool:
    """Whether it is a whole or real number of Python or NumPy; NaN and infinity are."""
    is_one = isinstance(value, int | float | np.integer | np.floating)
    return is_one and not isinstance(value, bool)


def text(what: str, value: Any) -> str:
    """A text that isn't empty and can be written.

    Raises:
        ValueError: naming the field.
    """
    if not isinstance(value, str) or not value:
        raise ValueError(f"{what} is {shown(value)}, must be a text that isn't empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{what} is {value!a}, which can't be written as UTF-8") from error
    return str(value)


def option(what: str, value: Any, options: Sequence[_Option]) -> _Option:
    """One of several words.

    Raises:
        ValueError: naming the field and the words.
    """
    if not isinstance(value, str) or value not in options:
        words = " or ".join(repr(word) for word in options)
        raise ValueError(f"{what} is {shown(value)}, must be {words}")
    return next(word for word in options if word == value)


def table_dtype(value: Any) -> torch.dtype:
    """The type of tables.

    Raises:
        ValueError: naming the key.
    """
    if isinstance(value, torch.dtype) and value in (torch.float32, torch.float64):
        return value
    raise ValueError(f"tables are fp32 or fp64, not {shown(value)} (train.precision)")


def shown(value: Any) -> str:
    """A value for a message, in at most 40 characters."""
    if isinstance(value, int) and value.bit_length() > 4_000:
        return f"a number of {value.bit_length():,} bits"  # Python writes no longer ones.
    words = repr(value)
    return words if len(words) <= _MAX_SHOWN else words[: _MAX_SHOWN - 3] + "..."
