"""Tables that every rank holds: their gradients are summed over ranks, so that they stay equal.

Two ways, chosen for each table and batch from figures that all ranks have. Both sum in the order
of the ranks, as an owner does: equal to the bit (but `sharding.wire` rounds what is gathered):

    gather   every rank sends the gradient of each row it touched to every other: in all ranks
             together (W-1) · Σ_r K_r · (D · wire bytes + id bytes)
    dense    the whole gradient matrix, with a column that counts the ranks that touched a row, is
             all-reduced in the tables' own type: 2 · (W-1) · R · (D+1) · bytes of a value

so dense is cheaper where Σ_r K_r · (D · wire + id) > 2 · R · (D+1) · value. Of two ranks in fp32 it
never is: each may touch every row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from embeddings.bag_sum import bag_sum
from embeddings.communicator import Communicator, Pending
from embeddings.keys import sort_keys, sorted_stretch
from embeddings.kv_gradients import KVGradients
from embeddings.table_group import TableGroup

Int64Array = npt.NDArray[np.int64]


@dataclass(eq=False)
class ReplicaCounts:
    """What the ranks touch of the replicas in one batch.

    Attributes:
        num_rows: `(W, tables)` distinct rows touched.
        is_dense: per table whether its gradient is all-reduced as a matrix.
        rows: per rank and table the touched rows, ascending; empty where the table goes dense
            (but for this rank's own).
    """

    num_rows: Int64Array
    is_dense: tuple[bool, ...]
    rows: list[list[Int64Array]] = field(default_factory=list)


class ReplicaRows(NamedTuple):
    """Rows that every rank holds: a replicated table, or the hot rows of tables in host memory.

    Attributes:
        group: the group in which they lie.
        first_key: the key of the first.
        num_rows: how many.
        dim: columns.
    """

    group: int
    first_key: int
    num_rows: int
    dim: int

    @classmethod
    def of_groups(cls, groups: Sequence[TableGroup]) -> list[ReplicaRows]:
        """One for each table of the groups that are everywhere."""
        return [
            cls(index, key, piece.num_rows, piece.dim)
            for index, group in enumerate(groups)
            for piece, key in zip(group.pieces, group.first_keys, strict=True)
        ]


class Replicas:
    """The rows that every rank holds, in a run of several ranks.

    Args:
        rows: which these are.
        comm: the ranks.
        wire_bytes: bytes of a gathered value on the wire.
        dense_bytes: bytes of a value in a matrix, which is summed in the tables' own type.
    """

    def __init__(
        self,
        rows: Sequence[ReplicaRows],
        comm: Communicator,
        *,
        wire_bytes: int,
        dense_bytes: int,
    ) -> None:
        self._comm = comm
        self._tables = tuple(rows)
        self.num_tables = len(self._tables)
        self.wire_ids: tuple[npt.DTypeLike, ...] = tuple(
            np.int32 if table.num_rows <= 2**31 else np.int64 for table in self._tables
        )
        self._wire_bytes, self._dense_bytes = wire_bytes, dense_bytes

    def touched(self, keys_of_group: Mapping[int, Tensor]) -> list[Int64Array]:
        """Per table the distinct rows of this rank's batch, ascending.

        Args:
            keys_of_group: the batch's distinct keys, ascending; of a group that isn't there: none.
        """
        rows: list[Int64Array] = []
        for table in self._tables:
            keys_K = keys_of_group.get(table.group)
            if keys_K is None:
                rows.append(np.empty(0, dtype=np.int64))
                continue
            low, high = sorted_stretch(keys_K, table.first_key, table.first_key + table.num_rows)
            rows.append(keys_K[low:high].numpy() - table.first_key)
        return rows

    def choose(self, num_rows: Int64Array) -> ReplicaCounts:
        """Gather or dense, per table, from `(W, tables)` counts."""
        dense = []
        for index, table in enumerate(self._tables):
            id_bytes = np.dtype(self.wire_ids[index]).itemsize
            gathered = int(num_rows[:, index].sum()) * (table.dim * self._wire_bytes + id_bytes)
            dense.append(gathered > 2 * table.num_rows * (table.dim + 1) * self._dense_bytes)
        return ReplicaCounts(num_rows.copy(), tuple(dense))

    def _runs(self, counts: ReplicaCounts) -> Iterator[range]:
        """The tables that are gathered, as stretches of neighbours in a group, which are sorted and
        summed together."""
        kinds = [
            (is_dense, table.group)
            for is_dense, table in zip(counts.is_dense, self._tables, strict=True)
        ]
        for (is_dense, _), run in groupby(range(self.num_tables), kinds.__getitem__):
            if not is_dense:
                tables = list(run)
                yield range(tables[0], tables[-1] + 1)

    def num_id_bytes(self, rank: int, counts: ReplicaCounts) -> int:
        """Bytes of ids that `rank` sends to each other rank."""
        return sum(
            int(counts.num_rows[rank, table]) * np.dtype(self.wire_ids[table]).itemsize
            for table in range(self.num_tables)
            if not counts.is_dense[table]
        )

    def num_values(self, rank: int, counts: ReplicaCounts) -> int:
        """Gradient values that `rank` sends to each other rank."""
        return sum(
            int(counts.num_rows[rank, index]) * table.dim
            for index, table in enumerate(self._tables)
            if not counts.is_dense[index]
        )

    def read_rows(
        self, rank: int, counts: ReplicaCounts, take: Callable[[int, Any], Int64Array]
    ) -> list[Int64Array]:
        """The rows that `rank` touched, taken from its ids."""
        return [
            np.empty(0, dtype=np.int64)
            if counts.is_dense[table]
            else take(int(counts.num_rows[rank, table]), self.wire_ids[table]).astype(np.int64)
            for table in range(self.num_tables)
        ]

    def split(self, gradients: Sequence[KVGradients], counts: ReplicaCounts) -> list[Tensor]:
        """Per run this rank's gradients of its touched rows, `(K, D)`."""
        return [self._of_tables(run, gradients) for run in self._runs(counts)]

    def _of_tables(self, run: range, gradients: Sequence[KVGradients]) -> Tensor:
        """This rank's gradients of neighbouring tables of one group."""
        first, last = self._tables[run[0]], self._tables[run[-1]]
        _, keys_K, grads_KD = next(entry for entry in gradients if entry[0] == first.group)
        low, high = sorted_stretch(keys_K, first.first_key, last.first_key + last.num_rows)
        return grads_KD[low:high]

    def begin_dense(
        self,
        gradients: Sequence[KVGradients],
        counts: ReplicaCounts,
    ) -> Pending | None:
        """Issues one all-reduce of all gradients that go as matrices, in the order of the ranks;
        None where none does."""
        chosen = [table for table in range(self.num_tables) if counts.is_dense[table]]
        if not chosen:
            return None
        matrices = []
        for table in chosen:
            _, _, num_rows, dim = self._tables[table]
            grads_KD = self._of_tables(range(table, table + 1), gradients)
            matrix = grads_KD.new_zeros(num_rows, dim + 1)
            # Its own rows are known here, though no ids travelled.
            rows_K = torch.from_numpy(counts.rows[self._comm.rank][table])
            matrix[rows_K, :dim] = grads_KD
            matrix[rows_K, dim] = 1
            matrices.append(matrix.reshape(-1))
        return self._comm.all_reduce_in_order("replicas", torch.cat(matrices))

    def sum_ranks(
        self,
        counts: ReplicaCounts,
        own: Sequence[Tensor],
        received: Sequence[Tensor],
        dense: Pending | None,
    ) -> list[KVGradients]:
        """The touched rows as keys of their group, and the sums over all ranks: of each run, and of
        each table that went as a matrix.

        The sums of gathered gradients are made in the order of the ranks, on every rank alike: the
        replicas stay equal to the bit.

        Args:
            counts: the batch.
            own: result of `split`, as the other ranks received it.
            received: per rank its gradients, table after table.
            dense: result of `begin_dense`.
        """
        positions = [0] * self._comm.world_size
        sums: list[KVGradients] = []
        for run, own_KD in zip(self._runs(counts), own, strict=True):
            group, _, _, dim = self._tables[run[0]]
            parts: list[Tensor] = []
            for rank, start in enumerate(positions):
                if rank == self._comm.rank:
                    parts.append(own_KD)
                    continue
                size = int(counts.num_rows[rank, run.start : run.stop].sum()) * dim
                parts.append(received[rank][start : start + size].view(-1, dim))
                positions[rank] += size
            keys_L = np.concatenate(
                [
                    rows[table] + self._tables[table].first_key
                    for rows in counts.rows
                    for table in run
                ]
            )
            ordered = sort_keys(torch.from_numpy(keys_L))
            grads_KD = bag_sum(torch.cat(parts), ordered.order_L, ordered.starts, None)
            sums.append(KVGradients(group, ordered.keys_K, grads_KD))
        return sums + self._read_dense(counts, dense)

    def _read_dense(self, counts: ReplicaCounts, dense: Pending | None) -> list[KVGradients]:
        """The touched rows of the tables whose gradients went as matrices."""
        if dense is None:
            return []
        matrices, start = dense.wait(), 0
        sums: list[KVGradients] = []
        for (group, key, num_rows, dim), is_dense in zip(
            self._tables, counts.is_dense, strict=True
        ):
            if is_dense:
                size = num_rows * (dim + 1)
                matrix = matrices[start : start + size].view(num_rows, -1)
                start += size
                rows_K = torch.nonzero(matrix[:, dim])[:, 0]
                sums.append(KVGradients(group, rows_K + key, matrix[rows_K, :dim].contiguous()))
        return sums
