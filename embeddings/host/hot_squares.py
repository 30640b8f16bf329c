"""Row-wise Adagrad's state of hot rows whose columns are cut: see `row_squares.py` for cold ones.

Every rank has the hot columns of a row. Columns of it that lie in device memory are at their owner
only, which sends its share to all others: one all-to-all, one value for each touched hot row and
piece in device memory, where a plan has such pieces. All ranks know which hot rows were touched, so
no sizes travel. The shares of a row are added in the order of its columns, as there: hot or cold, a
row's state has the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from embeddings.communicator import Communicator
from embeddings.host.hot_rows import HotRows
from embeddings.kv_gradients import KVGradients
from embeddings.layout import KeySpace, stretches_of
from embeddings.row_optim import ROW_STATE, decayed, row_squares
from embeddings.store import RowStore
from embeddings.table import FeatureConfig, TableConfig
from embeddings.table_group import Piece, TableGroup

Int64Array = npt.NDArray[np.int64]


class _Share(NamedTuple):
    """What some columns, of which `column` is the first, add to the state of some hot rows."""

    column: int
    rows_K: Tensor
    values_K: Tensor


class _DevicePiece(NamedTuple):
    """A piece in device memory of a table that is partly in host memory.

    Attributes:
        piece: the piece.
        group: its group on its rank.
        first_key: the key of its first row there.
        low: first of its rows among the hot ones.
        high: one past the last.
    """

    piece: Piece
    group: int
    first_key: int
    low: int = 0
    high: int = 0


class NewHotState(NamedTuple):
    """The new state of the touched hot rows, `(K, 1)`.

    Attributes:
        of_space: by key space in host memory, for each of its touched slots.
        of_group: by group in device memory: positions of hot rows among its touched keys, and the
            new state of each.
    """

    of_space: dict[int, Tensor]
    of_group: dict[int, tuple[Tensor, Tensor]]

    def cold(self, gradients: Sequence[KVGradients]) -> list[KVGradients]:
        """The gradients without those of hot rows, whose state is known."""
        cold: list[KVGradients] = []
        for entry in gradients:
            is_cold_K = self._is_cold(entry.group, entry.keys_K)
            if is_cold_K is not None:
                keys_K, grads_KD = entry.keys_K[is_cold_K], entry.grads_KD[is_cold_K]
                entry = KVGradients(entry.group, keys_K, grads_KD)
            cold.append(entry)
        return cold

    def joined(
        self, cold_state: dict[int, Tensor], gradients: Sequence[KVGradients]
    ) -> dict[int, Tensor]:
        """By group the state of hot and cold rows, where `cold_state` is that of `cold`'s."""
        joined = dict(cold_state)
        for group, keys_K, _ in gradients:
            is_cold_K = self._is_cold(group, keys_K)
            if is_cold_K is None or group not in cold_state:
                continue
            hot_K, values_K1 = self.of_group[group]
            state_K1 = values_K1.new_empty(keys_K.numel(), 1)
            state_K1[is_cold_K] = cold_state[group]
            state_K1[hot_K] = values_K1
            joined[group] = state_K1
        return joined

    def _is_cold(self, group: int, keys_K: Tensor) -> Tensor | None:
        """Which touched rows of a group aren't hot; None: all."""
        if group not in self.of_group:
            return None
        is_cold_K = torch.ones(keys_K.numel(), dtype=torch.bool)
        is_cold_K[self.of_group[group][0]] = False
        return is_cold_K


class HotSquares:
    """Makes up the new state of whole hot rows.

    Args:
        spaces: the key spaces in host memory, by index.
        hot: their hot rows.
        features: every sparse feature.
        tables: every table.
        store: this rank's rows.
        comm: the ranks.
        groups_of_rank: the groups of every rank.
    """

    def __init__(
        self,
        spaces: Mapping[int, KeySpace],
        hot: Mapping[int, HotRows],
        features: Sequence[FeatureConfig],
        tables: Sequence[TableConfig],
        store: RowStore,
        comm: Communicator,
        groups_of_rank: Sequence[Sequence[TableGroup]],
    ) -> None:
        self._spaces, self._hot, self._features = spaces, hot, features
        self._dims = {table.name: table.dim for table in tables}
        self._store, self._comm, self._optimizer = store, comm, store.optimizer
        offsets = np.cumsum([0, *(table.rows for table in tables)])
        self._first_row = dict(zip((t.name for t in tables), offsets.tolist(), strict=False))
        in_host = {
            features[part.feature].table for space in spaces.values() for part in space.slices
        }
        self._all_in_device = [
            _DevicePiece(piece, index, key)
            for groups in groups_of_rank
            for index, group in enumerate(groups)
            if group.memory == "device" and not group.everywhere
            for piece, key in zip(group.pieces, group.first_keys, strict=True)
            if piece.table in in_host
        ]
        # Those of them that have hot rows; the same on every rank.
        self._in_device: list[_DevicePiece] = []
        self._distinct: Int64Array = np.empty(0, dtype=np.int64)
        self._row_H: dict[int, Tensor] = {}
        self._column_H: dict[int, Int64Array] = {}
        self._dim_H: dict[int, Tensor] = {}

    def hot_rows_chosen(self) -> None:
        """Works out which slots of all spaces, and which pieces, belong to one row."""
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
        self._distinct = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *rows.values()]))
        self._row_H = {
            index: torch.from_numpy(np.searchsorted(self._distinct, row_H))
            for index, row_H in rows.items()
        }
        self._in_device = []
        for entry in self._all_in_device:
            first = self._first_row[entry.piece.table]
            bounds = (first + entry.piece.row_start, first + entry.piece.row_stop)
            low, high = np.searchsorted(self._distinct, bounds).tolist()
            if low < high:
                self._in_device.append(entry._replace(low=low, high=high))

    def first_columns(self, index: int, slots_K: Tensor) -> Tensor:
        """Positions of those slots that have their row's first column, and keep its state."""
        return torch.from_numpy(np.flatnonzero(self._column_H[index][slots_K.numpy()] == 0))

    def new_state(
        self,
        touched: Mapping[int, tuple[Tensor, Tensor]],
        gradients: Sequence[KVGradients],
    ) -> NewHotState:
        """The new state of the touched rows; called by all ranks, with or without any.

        Args:
            touched: per space its slots and a gradient for each.
            gradients: of the rows of this rank's groups, one per group.
        """
        shares: list[_Share] = []
        for index, (slots_K, grads_KD) in touched.items():
            shares += self._hot_shares(index, slots_K, grads_KD)
        positions: dict[int, list[tuple[Tensor, Tensor]]] = {}
        if self._in_device:
            is_touched = np.zeros(self._distinct.size, dtype=bool)
            for share in shares:
                is_touched[share.rows_K.numpy()] = True
            shares += self._device_shares(is_touched, gradients, positions)
        state = torch.zeros(self._distinct.size, dtype=self._store.dtype)
        for share in sorted(shares, key=lambda share: share.column):
            state[share.rows_K] += share.values_K
        of_space = {
            index: state[self._row_H[index][slots_K]][:, None]
            for index, (slots_K, _) in touched.items()
        }
        of_group = {}
        for group, parts in positions.items():
            rows_K = torch.cat([rows for _, rows in parts])
            of_group[group] = torch.cat([at_K for at_K, _ in parts]), state[rows_K][:, None]
        return NewHotState(of_space, of_group)

    def _hot_shares(self, index: int, slots_K: Tensor, grads_KD: Tensor) -> list[_Share]:
        """Those of the columns in host memory, which every rank has."""
        hot = self._hot[index]
        grads_KD = decayed(self._optimizer, hot.gather(slots_K), grads_KD)
        dims_K1 = self._dim_H[index][slots_K].to(grads_KD.dtype)
        values_K = (row_squares(grads_KD, 1) / dims_K1)[:, 0]
        first_K = self.first_columns(index, slots_K)
        values_K[first_K] = values_K[first_K] + hot.state(slots_K[first_K])[:, 0]
        columns_K = self._column_H[index][slots_K.numpy()]
        shares = []
        for column in np.unique(columns_K).tolist():
            at_K = torch.from_numpy(np.flatnonzero(columns_K == column))
            shares.append(_Share(column, self._row_H[index][slots_K[at_K]], values_K[at_K]))
        return shares

    def _device_shares(
        self,
        is_touched: npt.NDArray[np.bool_],
        gradients: Sequence[KVGradients],
        positions: dict[int, list[tuple[Tensor, Tensor]]],
    ) -> list[_Share]:
        """Those of the columns in device memory, sent by their ranks; notes the positions of this
        rank's own touched rows, by group, and which hot rows they are."""
        rank, world_size = self._comm.rank, self._comm.world_size
        rows_of_piece = [
            torch.from_numpy(entry.low + np.flatnonzero(is_touched[entry.low : entry.high]))
            for entry in self._in_device
        ]
        by_group = {entry.group: entry for entry in gradients}
        shares: list[_Share] = []
        num_from = [0] * world_size
        for entry, rows_K in zip(self._in_device, rows_of_piece, strict=True):
            num_from[entry.piece.rank] += rows_K.numel()
            if entry.piece.rank == rank and rows_K.numel():
                at_K, share = self._own_share(entry, rows_K, by_group[entry.group])
                positions.setdefault(entry.group, []).append((at_K, rows_K))
                shares.append(share)
        if world_size == 1:
            return shares
        own = torch.cat([torch.empty(0, dtype=self._store.dtype), *(s.values_K for s in shares)])
        num_to = [0 if peer == rank else own.numel() for peer in range(world_size)]
        num_from[rank] = 0
        received = torch.empty(sum(num_from), dtype=self._store.dtype)
        send = own.repeat(world_size - 1)
        self._comm.all_to_all("squares", send, num_to, received, num_from).wait()
        start = 0
        # The pieces are in the order of their ranks.
        for entry, rows_K in zip(self._in_device, rows_of_piece, strict=True):
            if entry.piece.rank != rank:
                values_K = received[start : start + rows_K.numel()]
                shares.append(_Share(entry.piece.columns[0][0], rows_K, values_K))
                start += rows_K.numel()
        return shares

    def _own_share(
        self, entry: _DevicePiece, rows_K: Tensor, gradients: KVGradients
    ) -> tuple[Tensor, _Share]:
        """Positions of touched hot rows among a group's touched keys, and what they add."""
        shift = entry.first_key - entry.piece.row_start - self._first_row[entry.piece.table]
        keys_K = torch.from_numpy(self._distinct)[rows_K] + shift
        at_K = torch.searchsorted(gradients.keys_K, keys_K)
        weights_KD, states = self._store.gather_all(entry.group, keys_K)
        grads_KD = decayed(self._optimizer, weights_KD, gradients.grads_KD[at_K])
        values_K = row_squares(grads_KD, self._dims[entry.piece.table])[:, 0]
        if entry.piece.has_first_column:
            values_K = values_K + states[ROW_STATE[self._optimizer.name]][:, 0]
        return at_K, _Share(entry.piece.columns[0][0], rows_K, values_K)
