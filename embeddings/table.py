"""What a table and a feature are, and the counter-based values a table starts from.

The start value of element `(row, col)` depends on `(seed, table name, row · dim + col)` only. Any
rectangle of a table can therefore be filled directly, by any rank, in any order and in blocks of
any size, and adding a table changes no other.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from embeddings.field_checks import option, shown, text, whole_number

Pooling = Literal["sum", "mean"]

# splitmix64: the increment between two states and the two factors of its finaliser.
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MAX_ELEMENTS = 1 << 62
_MASK_64 = (1 << 64) - 1
# Scratch of 64 k counters (1.8 MB with the ramp) stays in a core's second-level cache.
_CHUNK_ELEMENTS = 1 << 16


@dataclass(frozen=True)
class TableConfig:
    """A matrix of `rows × dim` trainable numbers.

    Attributes:
        name: unique among the tables; part of the key of the start values.
        rows: number of rows; ids run from 0 to `rows - 1`.
        dim: number of columns, the width of one embedding vector.

    Raises:
        ValueError: where the name is no text or empty, `rows` or `dim` is no whole number or
            below 1, or there are more elements than int64 counts.
    """

    name: str
    rows: int
    dim: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", text("a table's name", self.name))
        for field, value in (("rows", self.rows), ("dim", self.dim)):
            number = whole_number(f"table {self.name!r}: {field}", value, least=1)
            object.__setattr__(self, field, number)
        if self.rows * self.dim > _MAX_ELEMENTS:
            raise ValueError(
                f"table {self.name!r}: {shown(self.rows)} rows × {shown(self.dim)} columns are "
                f"more than 2^62 elements"
            )

    @property
    def default_bound(self) -> float:
        """Bound of the uniform start values, `1 / sqrt(rows)`.

        Source: the reference DLRM (facebookresearch/dlrm, `create_emb`).
        """
        return 1.0 / math.sqrt(self.rows)


@dataclass(frozen=True)
class FeatureConfig:
    """A sparse feature: a column of ids, one bag of them per sample, looked up in one table.

    Attributes:
        name: unique among the features.
        table: name of the table its ids are rows of; several features may share a table.
        pooling: how the rows of a bag become one vector. `sum`: `Σ weight · row`. `mean`: the same
            sum divided by the *number* of ids of the bag (not by the sum of the weights). A bag
            without weights has weight 1 for each id; an empty bag gives a zero vector.

    Raises:
        ValueError: where a name is no text or empty, or the pooling is unknown.
    """

    name: str
    table: str
    pooling: Pooling = "sum"

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", text("a feature's name", self.name))
        object.__setattr__(self, "table", text(f"feature {self.name!r}: table", self.table))
        where = f"feature {self.name!r} of table {self.table!r}: pooling"
        object.__setattr__(self, "pooling", option(where, self.pooling, get_args(Pooling)))


def validate_tables(tables: Sequence[TableConfig], features: Sequence[FeatureConfig]) -> None:
    """Check that the names are unique and that every feature's table exists.

    Raises:
        ValueError: naming the table or feature.
    """
    for kind, entries in ((TableConfig, tables), (FeatureConfig, features)):
        what = "tables" if kind is TableConfig else "features"
        if not isinstance(entries, Sequence) or isinstance(entries, str):
            raise ValueError(f"{what} are {shown(entries)}, must be a sequence of {kind.__name__}")
        for entry in entries:
            if not isinstance(entry, kind):
                raise ValueError(f"{what} hold {shown(entry)}, which is no {kind.__name__}")
    table_names: set[str] = set()
    for table in tables:
        if table.name in table_names:
            raise ValueError(f"table {table.name!r} is defined twice")
        table_names.add(table.name)
    feature_names: set[str] = set()
    for feature in features:
        if feature.name in feature_names:
            raise ValueError(f"feature {feature.name!r} is defined twice")
        feature_names.add(feature.name)
        if feature.table not in table_names:
            raise ValueError(
                f"feature {feature.name!r} looks up table {feature.table!r}, which is not defined; "
                f"the tables are {sorted(table_names)}"
            )


def fill_uniform(
    out_RD: Tensor,
    *,
    seed: int,
    table_name: str,
    row_start: int,
    col_start: int,
    dim: int,
    bound: float,
) -> None:
    """Fill a rectangle of a table with its start values, uniform in the open (-bound, bound).

    Element `i = row · dim + col` takes the `i`-th output of the splitmix64 generator seeded with a
    key of the table (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA
    2014; constants as in Vigna's public-domain `splitmix64.c`). Its top 24 bits `k` become the fp32
    value `(2k + 1 - 2^24) · (bound / 2^24)`: symmetric about 0, and never ±bound. An fp64 table
    gets the same fp32 values, widened, so that a proof in fp64 starts from the fp32 model.

    Args:
        out_RD: fp32 or fp64 CPU tensor, `(number of rows, number of columns)` of the rectangle;
            may be a strided view.
        seed: the run's seed, any integer.
        table_name: name of the table the rectangle is a part of.
        row_start: the rectangle's first row in the table.
        col_start: its first column.
        dim: number of columns of the *whole* table.
        bound: half width of the distribution.

    Raises:
        ValueError: where the type isn't fp32 or fp64, or the rectangle leaves the table's columns.
    """
    num_rows, num_cols = out_RD.shape
    if out_RD.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"table {table_name!r}: start values are fp32 or fp64, not {out_RD.dtype}")
    if row_start < 0 or col_start < 0 or col_start + num_cols > dim:
        raise ValueError(
            f"table {table_name!r}: rows from {row_start}, columns {col_start} to "
            f"{col_start + num_cols} are not a rectangle of a table with dim {dim}"
        )
    if not num_rows or not num_cols:
        return
    _fill(
        out_RD.detach().numpy(),
        first=row_start * dim + col_start,
        dim=dim,
        key=_table_key(seed, table_name),
        scale=np.float32(bound / (1 << 24)),
    )


def _table_key(seed: int, table_name: str) -> int:
    """64-bit key of a table: unlike the name's hash of Python, the same in every process."""
    digest = hashlib.sha256(f"{seed}:{table_name}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def _fill(
    out: npt.NDArray[np.floating], *, first: int, dim: int, key: int, scale: np.float32
) -> None:
    """Fill `out` whose first element has counter `first` and whose rows lie `dim` apart."""
    num_rows, num_cols = out.shape
    block_cols = min(num_cols, _CHUNK_ELEMENTS)
    block_rows = min(num_rows, max(1, _CHUNK_ELEMENTS // block_cols))
    # (r · dim + c) · gamma for every element of a block; a block's place adds one scalar to it.
    row_ramp = np.arange(block_rows, dtype=np.uint64) * np.uint64(dim * _GAMMA & _MASK_64)
    col_ramp = np.arange(block_cols, dtype=np.uint64) * np.uint64(_GAMMA)
    ramp = row_ramp[:, None] + col_ramp
    state_scratch = np.empty_like(ramp)
    shift_scratch = np.empty_like(ramp)
    value_scratch = np.empty(ramp.shape, dtype=np.float32)
    for row in range(0, num_rows, block_rows):
        for col in range(0, num_cols, block_cols):
            target = out[row : row + block_rows, col : col + block_cols]
            part = np.s_[: target.shape[0], : target.shape[1]]
            state, shift, value = state_scratch[part], shift_scratch[part], value_scratch[part]
            counter = first + row * dim + col
            np.add(ramp[part], np.uint64((key + (counter + 1) * _GAMMA) & _MASK_64), out=state)
            np.right_shift(state, np.uint64(30), out=shift)
            np.bitwise_xor(state, shift, out=state)
            np.multiply(state, _MIX_1, out=state)
            np.right_shift(state, np.uint64(27), out=shift)
            np.bitwise_xor(state, shift, out=state)
            np.multiply(state, _MIX_2, out=state)
            # The finaliser's last `state ^= state >> 31` leaves the top 31 bits as they are, and
            # only 24 are used. An arithmetic shift and a set lowest bit make 2k + 1 - 2^24, up to
            # the order of k: the top bit counts as the sign.
            signed = state.view(np.int64)
            np.right_shift(signed, np.int64(39), out=signed)
            np.bitwise_or(signed, np.int64(1), out=signed)
            np.multiply(signed, scale, out=value, casting="unsafe", dtype=np.float32)
            np.copyto(target, value)
