"""Whole rows of a table on rank 0, from wherever the plan has put them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

import torch
from torch import Tensor

from embeddings.communicator import Communicator
from embeddings.store import WEIGHT, RowsPart, RowStore, assemble_rows
from embeddings.table import TableConfig
from embeddings.table_group import Piece, TableGroup


class TableReader:
    """Gathers rows and their state. One all-to-all a call, in which only rank 0 receives: each
    rank's part of the rows, weights and state; of a replica, nothing travels.

    Args:
        tables: every table.
        groups_of_rank: every rank's groups.
        everywhere: tables that every rank holds.
        store: this rank's rows.
        comm: the ranks.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        groups_of_rank: Sequence[Sequence[TableGroup]],
        everywhere: Set[str],
        store: RowStore,
        comm: Communicator,
    ) -> None:
        self._store, self._comm = store, comm
        self._tables = {table.name: table for table in tables}
        self._pieces: dict[str, list[tuple[int, Piece]]] = {table.name: [] for table in tables}
        self._everywhere = everywhere
        for rank, groups in enumerate(groups_of_rank):
            for group in groups:
                for piece in group.pieces:
                    self._pieces[piece.table].append((rank, piece))
        self._dtype = next(
            (group.dtype for groups in groups_of_rank for group in groups), torch.float32
        )

    def read(self, table: str, row_start: int, row_stop: int) -> dict[str, Tensor] | None:
        """See `ShardedEmbeddings.read`.

        Raises:
            ValueError: on all ranks alike, for an unknown table or rows that it doesn't have.
        """
        rank = self._comm.rank
        self._store.state_widths(table)
        num_rows = self._tables[table].rows
        if not 0 <= row_start <= row_stop <= num_rows:
            raise ValueError(
                f"table {table!r}: rows {row_start}:{row_stop} are not within its {num_rows} rows"
            )
        if table in self._everywhere:
            return self._store.read(table, row_start, row_stop) if rank == 0 else None
        parts = self._store.read_parts(table, row_start, row_stop)
        send = torch.cat(
            [
                torch.empty(0, dtype=self._dtype),
                *(part.values[name].reshape(-1) for part in parts for name in _names(part.values)),
            ]
        )
        send_splits = [0] * self._comm.world_size
        send_splits[0] = send.numel()
        expected = [
            (owner, piece, first, stop)
            for owner, piece in self._pieces[table]
            if (first := max(row_start, piece.row_start)) < (stop := min(row_stop, piece.row_stop))
        ]
        recv_splits = [0] * self._comm.world_size
        if rank == 0:
            for owner, piece, first, stop in expected:
                recv_splits[owner] += (stop - first) * sum(self._widths(piece).values())
        recv = torch.empty(sum(recv_splits), dtype=self._dtype)
        received = self._comm.all_to_all("other", send, send_splits, recv, recv_splits).wait()
        if rank != 0:
            return None
        whole: list[RowsPart] = []
        position = 0
        for _, piece, first, stop in expected:
            values: dict[str, Tensor] = {}
            for name, width in self._widths(piece).items():
                size = (stop - first) * width
                values[name] = received[position : position + size].view(stop - first, width)
                position += size
            whole.append(RowsPart(piece, first, stop, values))
        widths = self._store.state_widths(table)
        dim = self._tables[table].dim
        return assemble_rows(dim, widths, row_start, row_stop, whole, self._dtype)

    def _widths(self, piece: Piece) -> dict[str, int]:
        """Numbers that the piece holds of a row, by name, in the order in which they travel."""
        widths = {WEIGHT: piece.dim, **self._store.piece_state_widths(piece)}
        return {name: widths[name] for name in _names(widths)}


def _names(values: Iterable[str]) -> list[str]:
    """In the order in which they travel."""
    return sorted(values)
