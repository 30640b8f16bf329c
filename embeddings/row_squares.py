"""One state per row although its columns lie on several ranks: row-wise Adagrad, columns split.

The state is the sum over steps of the mean square over the *whole* row. It is stored once, beside
the row's first column. In a step, the rank with the first column puts the old state into its share,
every rank sends its share of a touched row to every other rank that holds columns of it, and each
adds the shares up in the order of the columns: all get the new state, one of them keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from embeddings.communicator import Communicator
from embeddings.keys import sorted_stretch
from embeddings.kv_gradients import KVGradients
from embeddings.layout import PeerStretch
from embeddings.row_optim import ROW_STATE, decayed, row_squares
from embeddings.store import RowStore
from embeddings.table import TableConfig
from embeddings.table_group import Piece


class _Share(NamedTuple):
    """Positions `low:high` among a group's touched keys, and what is to be added there."""

    column: int
    group: int
    low: int
    high: int
    values_K: Tensor


class RowSquares:
    """Makes up the new state of whole rows.

    Owns nothing but the map. One all-to-all a step: one value for each touched row and pair of
    pieces that hold columns of it. A row's pieces are all touched in the same step, so both ends
    know which rows these are, and no sizes travel.

    Args:
        stretches: see `layout.split_row_stretches`.
        tables: every table.
        store: this rank's rows.
        comm: the ranks.
        dtype: type of the state.
        read: copies of rows of a group and of their states, by keys; None: those of the store.
    """

    def __init__(
        self,
        stretches: Sequence[PeerStretch],
        tables: Sequence[TableConfig],
        store: RowStore,
        comm: Communicator,
        dtype: torch.dtype,
        read: Callable[[int, Tensor], tuple[Tensor, Mapping[str, Tensor]]] | None = None,
    ) -> None:
        self._read = read or store.gather_all
        self._stretches, self._store, self._comm, self._dtype = stretches, store, comm, dtype
        self._dims = {table.name: table.dim for table in tables}
        self._state_name = ROW_STATE[store.optimizer.name]
        self._keys = {
            piece: (index, key)
            for index, group in enumerate(store.groups)
            for piece, key in zip(group.pieces, group.first_keys, strict=True)
        }
        split = {s.target for s in stretches if s.target.rank == comm.rank}
        self._groups = sorted({self._keys[piece][0] for piece in split})

    def new_state(self, gradients: Sequence[KVGradients]) -> dict[int, Tensor]:
        """By group, `(K, 1)`: the new state of the rows of its gradient.

        Args:
            gradients: one per touched group; called by all ranks, with or without any.
        """
        by_group = {entry.group: entry for entry in gradients}
        own_shares = [
            share
            for group in self._groups
            if group in by_group
            for share in self._own_shares(by_group[group])
        ]
        shares = own_shares + self._exchange(own_shares, by_group)
        state = {
            group: torch.zeros(by_group[group].keys_K.numel(), 1, dtype=self._dtype)
            for group in self._groups
            if group in by_group
        }
        # In the order of the columns on every rank: all get the same bits for the same row.
        for share in sorted(shares, key=lambda share: share.column):
            state[share.group][share.low : share.high, 0] += share.values_K
        return state

    def _own_shares(self, gradients: KVGradients) -> list[_Share]:
        group, grads_KD = self._store.groups[gradients.group], gradients.grads_KD
        rows_KD, states = self._read(gradients.group, gradients.keys_K)
        grads_KD = decayed(self._store.optimizer, rows_KD, grads_KD)
        state_K1 = states[self._state_name]
        shares: list[_Share] = []
        for piece, key in zip(group.pieces, group.first_keys, strict=True):
            low, high = sorted_stretch(gradients.keys_K, key, key + piece.num_rows)
            values_K = row_squares(grads_KD[low:high], self._dims[piece.table])[:, 0]
            if piece.has_first_column:
                values_K = values_K + state_K1[low:high, 0]
            shares.append(_Share(piece.columns[0][0], gradients.group, low, high, values_K))
        return shares

    def _exchange(
        self, own_shares: Sequence[_Share], by_group: dict[int, KVGradients]
    ) -> list[_Share]:
        """The shares of the other pieces, sent by their ranks."""
        rank, world_size = self._comm.rank, self._comm.world_size
        outgoing: list[list[Tensor]] = [[] for _ in range(world_size)]
        incoming: list[list[tuple[int, int, int, int]]] = [[] for _ in range(world_size)]
        for stretch in self._stretches:
            if stretch.source.rank == rank:
                group, low, high = self._touched(stretch.source, stretch, by_group)
                outgoing[stretch.target.rank] += [
                    share.values_K[low - share.low : high - share.low]
                    for share in own_shares
                    if share.group == group and share.low <= low < high <= share.high
                ]
            if stretch.target.rank == rank:
                column = stretch.source.columns[0][0]
                entry = (column, *self._touched(stretch.target, stretch, by_group))
                incoming[stretch.source.rank].append(entry)
        send_splits = [sum(values.numel() for values in part) for part in outgoing]
        recv_splits = [sum(high - low for *_, low, high in part) for part in incoming]
        empty = torch.empty(0, dtype=self._dtype)
        send = torch.cat([empty, *(values for part in outgoing for values in part)])
        recv = torch.empty(sum(recv_splits), dtype=self._dtype)
        received = self._comm.all_to_all("squares", send, send_splits, recv, recv_splits).wait()
        shares: list[_Share] = []
        position = 0
        for column, group, low, high in (entry for part in incoming for entry in part):
            if high > low:
                values_K = received[position : position + high - low]
                shares.append(_Share(column, group, low, high, values_K))
            position += high - low
        return shares

    def _touched(
        self, piece: Piece, stretch: PeerStretch, by_group: dict[int, KVGradients]
    ) -> tuple[int, int, int]:
        """Group and positions of the touched rows of a stretch in one of this rank's pieces."""
        group, first_key = self._keys[piece]
        if group not in by_group:
            return group, 0, 0
        key = first_key + stretch.row_start - piece.row_start
        stop = key + stretch.row_stop - stretch.row_start
        return group, *sorted_stretch(by_group[group].keys_K, key, stop)
