"""The form in which counts and ids travel: what is written, and how it is read again.

Counts, int64, the same length from every rank to every rank:

    is an id bad | its feature | the id | its sample | B | sum of example weights (an fp64's bits)
    per key space   kv: keys      pooled: keys, bags, bag weights (0 or one per key)
    per replica     distinct rows touched

Ids, for one other rank, without padding:

    per key space   keys (int32; int64 where that rank's group has more than 2³¹ rows)
                    pooled: bag lengths (int32; none where each bag has one key),
                            bag weights (fp32; none where all are 1)
    per replica     rows touched, unless its gradient goes as a matrix
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from embeddings.layout import KeySpace
from embeddings.replicas import ReplicaCounts, Replicas
from embeddings.requests import Request, Service
from embeddings.router import IdOutOfRange, offsets_of

Int64Array = npt.NDArray[np.int64]
AnyArray = npt.NDArray[np.generic]

_HEADER = 6


class IdWire:
    """Writes and reads counts and ids of one rank.

    Args:
        spaces: the key spaces.
        replicas: the tables that every rank holds.
        rank: this rank.
        dtype: type of bag weights when they are read.
    """

    def __init__(
        self, spaces: Sequence[KeySpace], replicas: Replicas, rank: int, dtype: torch.dtype
    ) -> None:
        self._spaces, self._replicas, self._rank, self._dtype = spaces, replicas, rank, dtype
        per_space = [1 if space.exchange == "kv" else 3 for space in spaces]
        self.num_counts = _HEADER + sum(per_space) + replicas.num_tables

    # ---------------------------------------------------------------------------------- counts

    def write_counts(
        self,
        world_size: int,
        requests: Sequence[Request],
        touched: Sequence[Int64Array],
        batch_size: int,
        weight_sum: float,
        bad_id: IdOutOfRange | None,
    ) -> Int64Array:
        """`(W, num_counts)`: what each rank is told; no requests where an id is bad."""
        counts = np.zeros((world_size, self.num_counts), dtype=np.int64)
        if bad_id is not None:
            counts[:, :4] = (1, bad_id.feature_index, bad_id.id, bad_id.sample)
        counts[:, 4] = batch_size
        counts[:, 5] = np.float64(weight_sum).view(np.int64)
        column = _HEADER
        for request in requests:
            counts[:, column] = request.num_keys
            column += 1
            if request.bag_lengths is not None:
                counts[:, column] = request.num_vectors
                counts[:, column + 1] = 0 if request.bag_weights_L is None else request.num_keys
                column += 2
        for table, rows_K in enumerate(touched):
            counts[:, self.num_counts - self._replicas.num_tables + table] = rows_K.size
        return counts

    @staticmethod
    def bad_id(counts: Int64Array) -> tuple[int, int, int, int] | None:
        """Rank, feature, id and sample of the first rank's bad id, from `(W, num_counts)`."""
        bad = np.flatnonzero(counts[:, 0])
        if not bad.size:
            return None
        feature, bad_id, sample = (int(value) for value in counts[bad[0], 1:4])
        return int(bad[0]), feature, bad_id, sample

    @staticmethod
    def batch_sizes(counts: Int64Array) -> tuple[int, ...]:
        """`B` of every rank."""
        return tuple(counts[:, 4].tolist())

    @staticmethod
    def total_weight(counts: Int64Array) -> float:
        """Sum of the ranks' sums of example weights, added in the order of the ranks."""
        return float(sum(np.ascontiguousarray(counts[:, 5]).view(np.float64).tolist()))

    def touched_rows(self, counts: Int64Array) -> Int64Array:
        """`(W, replicas)` rows that each rank touches."""
        return counts[:, self.num_counts - self._replicas.num_tables :]

    # ------------------------------------------------------------------------------------- ids

    def parts_for(
        self,
        rank: int,
        requests: Sequence[Request],
        touched: Sequence[Int64Array],
        replica_counts: ReplicaCounts,
    ) -> list[AnyArray]:
        """What `rank` is sent, array after array."""
        parts: list[AnyArray] = []
        for space, request in zip(self._spaces, requests, strict=True):
            first, stop = _bounds(request.num_keys, rank)
            if first == stop:
                continue
            parts.append(request.keys_L[first:stop].astype(space.wire_ids[rank]))
            if request.bag_lengths is not None:
                first_bag, stop_bag = _bounds(request.num_vectors, rank)
                if stop_bag - first_bag != stop - first:
                    parts.append(request.bag_lengths[first_bag:stop_bag].astype(np.int32))
                if request.bag_weights_L is not None:
                    parts.append(np.ascontiguousarray(request.bag_weights_L[first:stop]))
        if rank != self._rank:
            for table, rows_K in enumerate(touched):
                if not replica_counts.is_dense[table] and rows_K.size:
                    parts.append(rows_K.astype(self._replicas.wire_ids[table]))
        return parts

    def num_bytes_from(self, rank: int, counts: Int64Array, replica_counts: ReplicaCounts) -> int:
        """Bytes of ids that `rank` sends, from the counts it sent."""
        num_bytes, column = 0, _HEADER
        for space in self._spaces:
            num_keys = int(counts[column])
            num_bytes += num_keys * np.dtype(space.wire_ids[self._rank]).itemsize
            column += 1
            if space.exchange == "pooled":
                num_bags, num_weights = int(counts[column]), int(counts[column + 1])
                num_bytes += 4 * num_weights + (4 * num_bags if num_bags != num_keys else 0)
                column += 2
        if rank != self._rank:
            num_bytes += self._replicas.num_id_bytes(rank, replica_counts)
        return num_bytes

    def read(
        self,
        data: npt.NDArray[np.uint8],
        num_bytes: Sequence[int],
        counts: Int64Array,
        touched: Sequence[Int64Array],
        replica_counts: ReplicaCounts,
    ) -> tuple[Service | None, ...]:
        """What all ranks ask of this one, copied; the rows of replicas go into `replica_counts`.

        Args:
            data: the received bytes, rank after rank.
            num_bytes: of each rank.
            counts: `(W, num_counts)`, as received.
            touched: this rank's own rows of replicas.
            replica_counts: of the batch; its `rows` are filled.
        """
        asked: list[list[_Asked]] = [[] for _ in self._spaces]
        start = 0
        for rank, size in enumerate(num_bytes):
            reader = _Reader(data[start : start + size])
            start += size
            column = _HEADER
            for index, space in enumerate(self._spaces):
                width = 1 if space.exchange == "kv" else 3
                sizes = counts[rank, column : column + width].tolist()
                column += width
                asked[index].append(_Asked(reader, sizes, space.wire_ids[self._rank]))
            if rank == self._rank:
                replica_counts.rows.append(list(touched))
            else:
                rows = self._replicas.read_rows(rank, replica_counts, reader.take)
                replica_counts.rows.append(rows)
            if not reader.is_at_end:
                raise RuntimeError(f"rank {rank} sent more ids than it announced")
        return tuple(
            None if space.group_of_rank[self._rank] is None else self._service(space, parts)
            for space, parts in zip(self._spaces, asked, strict=True)
        )

    def _service(self, space: KeySpace, parts: Sequence[_Asked]) -> Service:
        keys_L = torch.from_numpy(np.concatenate([part.keys_L for part in parts]))
        if space.exchange == "kv":
            return Service(keys_L, None, None, tuple(part.keys_L.size for part in parts))
        offsets = offsets_of(np.concatenate([part.lengths for part in parts]))
        weights_L = None
        if any(part.weights_L is not None for part in parts):
            # A rank without bag weights in this batch sent none: its factors are 1.
            filled = [
                np.ones(part.keys_L.size, dtype=np.float32)
                if part.weights_L is None
                else part.weights_L
                for part in parts
            ]
            weights_L = torch.from_numpy(np.concatenate(filled)).to(self._dtype)
        num_bags = tuple(part.lengths.size for part in parts)
        return Service(keys_L, torch.from_numpy(offsets), weights_L, num_bags)


class _Reader:
    """Takes arrays from received bytes, one after the other; they needn't be aligned."""

    def __init__(self, data: npt.NDArray[np.uint8]) -> None:
        self._data, self._position = data, 0

    def take(self, count: int, dtype: npt.DTypeLike) -> npt.NDArray[np.int64]:
        """The next `count` numbers."""
        if not count:
            return np.empty(0, dtype=dtype)
        values = np.frombuffer(self._data, dtype=dtype, count=count, offset=self._position)
        self._position += values.nbytes
        return values

    @property
    def is_at_end(self) -> bool:
        return self._position == self._data.size


class _Asked:
    """What one rank asks in one key space, read from its bytes."""

    def __init__(self, reader: _Reader, sizes: Sequence[int], key_type: npt.DTypeLike) -> None:
        num_keys, num_bags, num_weights = (*sizes, 0, 0)[:3]
        self.keys_L = reader.take(num_keys, key_type).astype(np.int64)
        self.lengths = np.ones(num_bags, dtype=np.int64)
        self.weights_L: AnyArray | None = None
        if len(sizes) == 1:
            return
        if num_bags != num_keys:
            self.lengths = reader.take(num_bags, np.int32).astype(np.int64)
        if num_weights:
            self.weights_L = reader.take(num_weights, np.float32).copy()


def _bounds(counts: Sequence[int], rank: int) -> tuple[int, int]:
    first = sum(counts[:rank])
    return first, first + counts[rank]
