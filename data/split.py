"""Which part of a raw dataset a row belongs to: a function of the schema's split rule alone."""

from __future__ import annotations

import numpy as np

from data.errors import UserError
from data.hashing import mix
from data.schema import Split

PARTS = ("train", "valid", "test")
TRAIN, VALID, TEST = 0, 1, 2


class SplitRule:
    """Assigns rows to parts once the number of rows of every file is known.

    Args:
        split: the schema's rule.
        file_rows: rows of every raw file, in order.
        file_parts: the part of every file where the rule is `given`, else None.

    Raises:
        UserError: where the rule leaves nothing to train on.
    """

    def __init__(self, split: Split, file_rows: list[int], file_parts: list[int] | None) -> None:
        self._split = split
        self._file_parts = file_parts
        self._starts = np.concatenate([[0], np.cumsum(file_rows)]).astype(np.int64)
        num_rows = int(self._starts[-1])
        # Rows before the first bound train, rows before the second validate, the rest test.
        self._bounds = (num_rows, num_rows)
        if split.kind == "in_order":
            num_valid, num_test = round(num_rows * split.valid), round(num_rows * split.test)
            self._bounds = (num_rows - num_valid - num_test, num_rows - num_test)
        elif split.kind == "by_file":
            self._bounds = self._by_file(split, len(file_rows))
        if split.kind in ("in_order", "by_file") and self._bounds[0] <= 0:
            raise UserError(
                f"data.schema.split leaves no training row: {num_rows:,} rows in all, "
                f"{num_rows - self._bounds[0]:,} held out"
            )

    def _by_file(self, split: Split, num_files: int) -> tuple[int, int]:
        if num_files <= split.eval_files:
            raise UserError(
                f"data.schema.split.kind=by_file holds out the last {split.eval_files} file(s), "
                f"but data.raw names {num_files}; name more files or use split.kind=in_order"
            )
        first_held_out = int(self._starts[num_files - split.eval_files])
        held_out = int(self._starts[-1]) - first_held_out
        if split.valid + split.test <= 0:
            raise UserError(
                "data.schema.split.kind=by_file needs valid or test above 0: they share the "
                f"{split.eval_files} held-out file(s)"
            )
        share = split.valid / (split.valid + split.test)
        return first_held_out, first_held_out + round(held_out * share)

    def parts_of(self, file_index: int, start: int, stop: int) -> np.ndarray:
        """uint8 part (`TRAIN`, `VALID`, `TEST`) of rows `start … stop-1` of a file."""
        if self._file_parts is not None:
            return np.full(stop - start, self._file_parts[file_index], dtype=np.uint8)
        first = int(self._starts[file_index])
        rows = np.arange(first + start, first + stop, dtype=np.int64)
        if self._split.kind == "random":
            uniform = _uniform_hash(rows, self._split.seed)
            train_share = 1 - self._split.valid - self._split.test
            return np.where(
                uniform < train_share,
                TRAIN,
                np.where(uniform < train_share + self._split.valid, VALID, TEST),
            ).astype(np.uint8)
        return np.searchsorted(np.array(self._bounds), rows, side="right").astype(np.uint8)


def _uniform_hash(rows: np.ndarray, seed: int) -> np.ndarray:
    """A number in [0, 1) for each row."""
    u = np.uint64
    offset = (seed * 0xD1342543DE82EF95 + 0x632BE59BD9B4E019) % 2**64
    mixed = mix((rows.astype(np.uint64) + u(1)) * u(0x9E3779B97F4A7C15) + u(offset))
    return (mixed >> u(11)).astype(np.float64) * 2.0**-53
