"""Row-wise Adagrad's state of hot rows whose columns are cut: see `row_squares.py` for cold ones.

Every rank has all columns of a hot row, so nothing travels. The shares of a row are added in the
order of its columns, as there: hot or cold, a row's state has the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from embeddings.host.hot_rows import HotRows
from embeddings.layout import KeySpace, stretches_of
from embeddings.row_optim import RowOptimizerConfig, decayed, row_squares
from embeddings.table import FeatureConfig, TableConfig

Int64Array = npt.NDArray[np.int64]


class HotSquares:
    """Makes up the new state of whole hot rows.

    Args:
        spaces: the key spaces in host memory, by index.
        hot: their hot rows.
        features: every sparse feature.
        tables: every table.
        optimizer: the rule.
    """

    def __init__(
        self,
        spaces: Mapping[int, KeySpace],
        hot: Mapping[int, HotRows],
        features: Sequence[FeatureConfig],
        tables: Sequence[TableConfig],
        optimizer: RowOptimizerConfig,
    ) -> None:
        self._spaces, self._hot, self._features = spaces, hot, features
        self._dims = {table.name: table.dim for table in tables}
        self._optimizer = optimizer
        offsets = np.cumsum([0, *(table.rows for table in tables)])
        self._first_row = dict(zip((t.name for t in tables), offsets.tolist(), strict=False))
        self._num_rows = 0
        self._row_H: dict[int, Tensor] = {}
        self._column_H: dict[int, Int64Array] = {}
        self._dim_H: dict[int, Tensor] = {}

    def hot_rows_chosen(self) -> None:
        """Works out which slots of all spaces belong to one row."""
        rows: dict[int, Int64Array] = {}
        for index, hot in self._hot.items():
            row_H = np.zeros(hot.keys_H.size, dtype=np.int64)
            self._column_H[index] = np.zeros(hot.keys_H.size, dtype=np.int64)
            dim_H = np.ones(hot.keys_H.size)
            for part in self._spaces[index].slices:
                table = self._features[part.feature].table
                for low, high, shift in stretches_of(part, hot.keys_H):
                    row_H[low:high] = hot.keys_H[low:high] - shift + self._first_row[table]
                    self._column_H[index][low:high] = part.columns[0][0]
                    dim_H[low:high] = self._dims[table]
            rows[index] = row_H
            self._dim_H[index] = torch.from_numpy(dim_H)[:, None]
        distinct = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *rows.values()]))
        self._num_rows = distinct.size
        self._row_H = {
            index: torch.from_numpy(np.searchsorted(distinct, row_H))
            for index, row_H in rows.items()
        }

    def first_columns(self, index: int, slots_K: Tensor) -> Tensor:
        """Positions of those slots that have their row's first column, and keep its state."""
        return torch.from_numpy(np.flatnonzero(self._column_H[index][slots_K.numpy()] == 0))

    def new_state(self, touched: Mapping[int, tuple[Tensor, Tensor]]) -> dict[int, Tensor]:
        """By space, `(K, 1)`: the new state of the touched rows.

        Args:
            touched: per space its slots and a gradient for each; of a row, all columns.
        """
        shares: list[tuple[int, Tensor, Tensor]] = []
        for index, (slots_K, grads_KD) in touched.items():
            hot = self._hot[index]
            grads_KD = decayed(self._optimizer, hot.gather(slots_K), grads_KD)
            dims_K1 = self._dim_H[index][slots_K].to(grads_KD.dtype)
            values_K = (row_squares(grads_KD, 1) / dims_K1)[:, 0]
            first_K = self.first_columns(index, slots_K)
            values_K[first_K] = values_K[first_K] + hot.state(slots_K[first_K])[:, 0]
            columns_K = self._column_H[index][slots_K.numpy()]
            for column in np.unique(columns_K).tolist():
                at_K = torch.from_numpy(np.flatnonzero(columns_K == column))
                shares.append((column, self._row_H[index][slots_K[at_K]], values_K[at_K]))
        dtype = next((g.dtype for _, g in touched.values()), torch.float32)
        state = torch.zeros(self._num_rows, dtype=dtype)
        for _, rows_K, values_K in sorted(shares, key=lambda share: share[0]):
            state[rows_K] += values_K
        return {
            index: state[self._row_H[index][slots_K]][:, None]
            for index, (slots_K, _) in touched.items()
        }
