"""The exchange: counts and ids out, rows back, gradients out. Nothing else here communicates.

One packed buffer per phase carries every table, whatever its layout and exchange:

    phase     collective   a rank sends to each other rank
    counts    all-to-all   a header (errors, sum of example weights) and the sizes of what follows
    ids       all-to-all   `kv`: distinct keys. `pooled`: keys, bag lengths, bag weights.
                           Replicas: the distinct rows that this rank's batch touches
    rows      all-to-all   a row for each key asked for, a pooled vector for each bag asked for
    grads     all-to-all   the reverse: a gradient for each of these; of replicas, for each touched
                           row. Where most rows of a replica are touched, its gradient is
                           all-reduced as a whole matrix instead, together with those like it
    squares   all-to-all   only under a row-wise optimizer with split columns, see `row_squares.py`

Sizes: see `Exchange.begin_plan` and the methods after it. Who may overlap what: everything that a
`Pending…` object stands for travels between its making and its `finish`; counts and ids need
nothing of the model and may travel during the previous step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from data.batch import JaggedIds
from embeddings.bag_sum import bag_sum
from embeddings.communicator import Buffers, Communicator, Pending
from embeddings.kv_gradients import KVGradients
from embeddings.layout import KeySpace
from embeddings.replicas import ReplicaCounts, Replicas
from embeddings.requests import Request, Service, plan_request
from embeddings.router import GroupPlan, IdOutOfRange, Router
from embeddings.store import RowStore
from embeddings.table import FeatureConfig

# Header of the counts: 0 or 1 (an id is out of range), its feature, id and sample; B; the sum of
# the example weights (the bits of an fp64).
_HEADER = 6
_WIRE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, eq=False)
class ExchangePlan:
    """One batch's part of the exchange on one rank. Holds ids and positions, no rows.

    Attributes:
        requests: per key space what this rank asks.
        services: per key space what it is asked; None where it has no group there.
        replicas: the rows of replicas that the ranks touch.
        total_weight: sum of the example weights (or of the samples) over all ranks.
        batch_sizes: `B` of every rank.
    """

    requests: tuple[Request, ...]
    services: tuple[Service | None, ...]
    replicas: ReplicaCounts
    total_weight: float
    batch_sizes: tuple[int, ...]


class Exchange:
    """Moves ids, rows and gradients between the ranks for all tables that aren't local.

    Owns: the packed buffers, reused from step to step. Borrows: the store's rows (reads them for
    `rows`; the update is the caller's). Every method is called by all ranks in the same order.

    Args:
        spaces: the key spaces, equal on all ranks.
        replicas: the tables that every rank holds.
        router: words the error about a bad id of any rank.
        features: every sparse feature.
        comm: the ranks.
        dtype: type of rows and gradients.
        wire: `fp32`: values travel as they are; `bf16`, `fp16`: rounded.
    """

    def __init__(
        self,
        spaces: Sequence[KeySpace],
        replicas: Replicas,
        router: Router,
        features: Sequence[FeatureConfig],
        comm: Communicator,
        *,
        dtype: torch.dtype,
        wire: str,
    ) -> None:
        self._spaces, self._replicas = tuple(spaces), replicas
        self._router, self._features, self._comm, self._dtype = router, features, comm, dtype
        self._wire = _WIRE_DTYPES.get(wire, dtype)
        self._buffers = Buffers()
        # Per key space: keys, and of pooled ones also bags and bag weights; then per replica rows.
        self._num_counts = _HEADER + replicas.num_tables
        self._num_counts += sum(1 if space.exchange == "kv" else 3 for space in spaces)

    # ------------------------------------------------------------------------------ counts and ids

    def begin_plan(
        self,
        ids: JaggedIds,
        local: Sequence[GroupPlan],
        weight_sum: float,
        bad_id: IdOutOfRange | None,
    ) -> PendingPlan:
        """Works out this rank's requests and issues the counts: `8 · num_counts` bytes per rank.

        Args:
            ids: this rank's batch.
            local: the plans of the groups that are everywhere.
            weight_sum: sum of this rank's example weights.
            bad_id: what is wrong with `ids`; not raised here but with all ranks, in
                `PendingPlan.send_ids`.
        """
        counts = np.zeros((self._comm.world_size, self._num_counts), dtype=np.int64)
        requests: tuple[Request, ...] = ()
        touched = self._replicas.touched(local)
        if bad_id is not None:
            counts[:, :4] = (1, bad_id.feature_index, bad_id.id, bad_id.sample)
        else:
            requests = tuple(
                plan_request(space, self._features, ids, self._dtype) for space in self._spaces
            )
        counts[:, 4] = ids.batch_size
        counts[:, 5] = np.float64(weight_sum).view(np.int64)
        column = _HEADER
        for request in requests:
            counts[:, column] = request.num_keys
            column += 1
            if request.bag_lengths is not None:
                counts[:, column] = request.num_vectors
                counts[:, column + 1] = 0 if request.bag_weights_L is None else request.num_keys
                column += 2
        if self._replicas.num_tables:
            counts[:, -self._replicas.num_tables :] = [keys_K.size for keys_K in touched]
        send = torch.from_numpy(counts.reshape(-1))
        splits = [self._num_counts] * self._comm.world_size
        pending = self._comm.all_to_all("counts", send, splits, torch.empty_like(send), splits)
        return PendingPlan(self, requests, touched, pending)

    def issue_ids(
        self,
        requests: Sequence[Request],
        touched: Sequence[npt.NDArray[np.int64]],
        counts: npt.NDArray[np.int64],
    ) -> IdsUnderWay:
        """Packs and issues the ids: 4 bytes per key (8 where a group has over 2³¹ rows), 4 per bag
        unless all have one key, 4 per bag weight, 4 per touched row of a replica."""
        self._raise_bad_ids(counts)
        replica_counts = self._replicas.choose(self._replica_columns(counts))
        parts = [
            self._ids_for(rank, requests, touched, replica_counts)
            for rank in range(self._comm.world_size)
        ]
        send_splits = [sum(piece.nbytes for piece in part) for part in parts]
        recv_splits = [
            self._num_id_bytes(rank, counts[rank], replica_counts)
            for rank in range(self._comm.world_size)
        ]
        # Leased: during a step, the next batch's ids are under way, perhaps beside an evaluation's.
        send_buffer = self._buffers.lease(sum(send_splits))
        recv_buffer = self._buffers.lease(sum(recv_splits))
        send, recv = send_buffer[: sum(send_splits)], recv_buffer[: sum(recv_splits)]
        position = 0
        target = send.numpy()
        for part in parts:
            for piece in part:
                target[position : position + piece.nbytes] = piece.view(np.uint8)
                position += piece.nbytes
        pending = self._comm.all_to_all("ids", send, send_splits, recv, recv_splits)
        return IdsUnderWay(replica_counts, pending, recv_splits, (send_buffer, recv_buffer))

    def _raise_bad_ids(self, counts: npt.NDArray[np.int64]) -> None:
        bad = np.flatnonzero(counts[:, 0])
        if bad.size:
            rank = int(bad[0])
            feature, bad_id, sample = (int(value) for value in counts[rank, 1:4])
            raise self._router.id_error(feature, bad_id, sample, rank)

    def _replica_columns(self, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return counts[:, counts.shape[1] - self._replicas.num_tables :]

    def _ids_for(
        self,
        rank: int,
        requests: Sequence[Request],
        touched: Sequence[npt.NDArray[np.int64]],
        replica_counts: ReplicaCounts,
    ) -> list[npt.NDArray[np.generic]]:
        """What `rank` is sent, in the order in which `_read_ids` reads it."""
        parts: list[npt.NDArray[np.generic]] = []
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
        if rank != self._comm.rank:
            for table, rows_K in enumerate(touched):
                if not replica_counts.is_dense[table] and rows_K.size:
                    parts.append(rows_K.astype(self._replicas.wire_ids[table]))
        return parts

    def _num_id_bytes(
        self, source: int, counts: npt.NDArray[np.int64], replica_counts: ReplicaCounts
    ) -> int:
        """Bytes that `source` sends, from the counts it sent."""
        own = self._comm.rank
        num_bytes, column = 0, _HEADER
        for space in self._spaces:
            num_keys = int(counts[column])
            num_bytes += num_keys * np.dtype(space.wire_ids[own]).itemsize
            column += 1
            if space.exchange == "pooled":
                num_bags, num_weights = int(counts[column]), int(counts[column + 1])
                num_bytes += 4 * num_weights + (4 * num_bags if num_bags != num_keys else 0)
                column += 2
        if source != own:
            num_bytes += self._replicas.num_id_bytes(source, replica_counts)
        return num_bytes

    def read_ids(
        self,
        counts: npt.NDArray[np.int64],
        ids: IdsUnderWay,
        touched: Sequence[npt.NDArray[np.int64]],
    ) -> tuple[tuple[Service | None, ...], ReplicaCounts]:
        """Waits for what the other ranks ask of this one, unpacks and copies it."""
        data, recv_splits, replica_counts = (
            ids.pending.wait().numpy(),
            ids.recv_splits,
            ids.replica_counts,
        )
        own = self._comm.rank
        asked: list[list[tuple[npt.NDArray[np.int64], ...]]] = [[] for _ in self._spaces]
        start = 0
        for rank, num_bytes in enumerate(recv_splits):
            reader = _Reader(data[start : start + num_bytes])
            start += num_bytes
            column = _HEADER
            for index, space in enumerate(self._spaces):
                num_keys = int(counts[rank, column])
                keys_L = reader.take(num_keys, space.wire_ids[own]).astype(np.int64)
                column += 1
                if space.exchange == "kv":
                    asked[index].append((keys_L,))
                    continue
                num_bags, num_weights = counts[rank, column : column + 2].tolist()
                lengths = np.ones(num_bags, dtype=np.int64)
                if num_bags != num_keys:
                    lengths = reader.take(num_bags, np.int32).astype(np.int64)
                weights_L = reader.take(num_weights, np.float32)
                if not num_weights:
                    weights_L = np.ones(0, dtype=np.float32)
                asked[index].append((keys_L, lengths, weights_L))
                column += 2
            if rank == own:
                replica_counts.rows.append(list(touched))
            else:
                replica_counts.rows.append(
                    self._replicas.read_rows(rank, replica_counts, reader.take)
                )
            assert reader.is_at_end, f"rank {rank} sent more ids than it announced"
        for buffer in ids.buffers:
            self._buffers.release(buffer)
        services = tuple(
            None if space.group_of_rank[own] is None else _service(space, parts, self._dtype)
            for space, parts in zip(self._spaces, asked, strict=True)
        )
        return services, replica_counts

    # ------------------------------------------------------------------------------------ rows

    def begin_rows(self, plan: ExchangePlan, store: RowStore) -> PendingVectors:
        """Issues what was asked of this rank: `D` values for each vector of each service."""
        matrices = [
            None if service is None else self._serve(space, service, store)
            for space, service in zip(self._spaces, plan.services, strict=True)
        ]
        sizes_out = self._sizes(plan.services)
        sizes_in = self._sizes(plan.requests)
        flat = self._pack("rows", matrices, sizes_out, [])
        pending = self._send("rows", flat, sizes_out, sizes_in)
        return PendingVectors(lambda: self._unpack(pending.wait(), sizes_in)[0])

    def _serve(self, space: KeySpace, service: Service, store: RowStore) -> Tensor:
        group = space.group_of_rank[self._comm.rank]
        assert group is not None
        if service.offsets is None:
            return store.gather(group, service.keys_L)
        return bag_sum(store.weights(group), service.keys_L, service.offsets, service.weights_L)

    def pool(self, index: int, plan: ExchangePlan, vectors_MD: Tensor) -> Tensor:
        """`(B, slices · D)` pooled columns of key space `index` from the received vectors."""
        bags, space = plan.requests[index].bags, self._spaces[index]
        pooled = bag_sum(vectors_MD, bags.keys_L, bags.offsets, bags.weights_L)
        return pooled.view(-1, len(space.slices) * space.dim)

    # ------------------------------------------------------------------------------- gradients

    def begin_grads(
        self,
        plan: ExchangePlan,
        space_grads: Sequence[Tensor],
        replica_grads: Sequence[KVGradients],
    ) -> PendingGradients:
        """Issues the gradients of what was received: `D` values for each vector of each request,
        and for each touched row of a replica to every other rank.

        Args:
            plan: the batch.
            space_grads: per key space the gradient of `pool`'s result.
            replica_grads: this rank's gradients of replicas, one per group of them.
        """
        matrices = [
            bag_sum(
                grad.reshape(-1, space.dim),
                request.vectors.bags_L,
                request.vectors.starts,
                request.vectors.weights_L,
            )
            for space, request, grad in zip(self._spaces, plan.requests, space_grads, strict=True)
        ]
        scale = self._gradient_scale(plan)
        own_parts = self._replicas.split(replica_grads, plan.replicas)
        extra = [part.reshape(-1) for part in own_parts if part is not None]
        sizes_out = self._sizes(plan.requests)
        sizes_in = self._sizes(plan.services)
        num_extra = sum(part.numel() for part in extra)
        for rank in range(self._comm.world_size):
            if rank != self._comm.rank:
                sizes_out[rank].append(num_extra)
                sizes_in[rank].append(self._replicas.num_values(rank, plan.replicas))
            else:
                sizes_out[rank].append(0)
                sizes_in[rank].append(0)
        flat = self._pack("grads", matrices, sizes_out, extra)
        pending = self._send("grads", flat, sizes_out, sizes_in, scale)
        dense = self._replicas.begin_dense(replica_grads, plan.replicas, self._comm)

        def finish() -> list[KVGradients]:
            values, extras = self._unpack(pending.wait(), sizes_in, scale)
            gradients = [
                self._sum_by_key(space, service, vectors)
                for space, service, vectors in zip(self._spaces, plan.services, values, strict=True)
                if service is not None
            ]
            own = [None if part is None else self._rounded(part, scale) for part in own_parts]
            summed = self._replicas.sum_ranks(plan.replicas, own, extras, dense)
            return gradients + [KVGradients(*entry) for entry in summed]

        return PendingGradients(finish)

    def _sum_by_key(self, space: KeySpace, service: Service, vectors_MD: Tensor) -> KVGradients:
        """Sums what the ranks sent for each key, in the order of the ranks."""
        group = space.group_of_rank[self._comm.rank]
        assert group is not None
        keys_K, vectors = service.by_key
        grads_KD = bag_sum(vectors_MD, vectors.bags_L, vectors.starts, vectors.weights_L)
        return KVGradients(group, keys_K, grads_KD)

    def _gradient_scale(self, plan: ExchangePlan) -> float:
        """A power of two that fp16 gradients of a mean over the batch are multiplied by: of a
        batch of 8,192, a third would else fall below fp16's smallest normal number, 6e-5."""
        if self._wire != torch.float16:
            return 1.0
        return float(2.0 ** round(np.log2(max(plan.total_weight, 1.0))))

    # ------------------------------------------------------------------------- packed values

    def _sizes(self, asked: Sequence[Request | Service | None]) -> list[list[int]]:
        """Per rank and key space the number of values."""
        return [
            [
                0 if entry is None else entry.num_vectors[rank] * space.dim
                for space, entry in zip(self._spaces, asked, strict=True)
            ]
            for rank in range(self._comm.world_size)
        ]

    def _pack(
        self,
        name: str,
        matrices: Sequence[Tensor | None],
        sizes: Sequence[Sequence[int]],
        extra: Sequence[Tensor],
    ) -> Tensor:
        """One flat tensor: for each rank its part of every matrix, then `extra` (not to itself)."""
        if len(matrices) == 1 and matrices[0] is not None and not extra:
            return matrices[0].reshape(-1)
        flat = self._buffers.get(f"{name} packed", sum(map(sum, sizes)), self._dtype)
        positions = [0] * len(matrices)
        target = 0
        for rank, of_rank in enumerate(sizes):
            for index, matrix in enumerate(matrices):
                size = of_rank[index]
                if matrix is not None and size:
                    start = positions[index]
                    flat[target : target + size] = matrix.reshape(-1)[start : start + size]
                    positions[index] += size
                    target += size
            if rank != self._comm.rank:
                for part in extra:
                    flat[target : target + part.numel()] = part
                    target += part.numel()
        return flat

    def _unpack(
        self, flat: Tensor, sizes: Sequence[Sequence[int]], scale: float = 1.0
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The received matrices per key space, and per rank what came after them."""
        if flat.dtype != self._dtype:
            _check_finite(flat)
            flat = flat.to(self._dtype)
        if scale != 1.0:
            flat = flat / scale
        num_spaces = len(self._spaces)
        if num_spaces == 1 and not any(sum(of_rank[1:]) for of_rank in sizes):
            return [flat.view(-1, self._spaces[0].dim)], [flat[:0] for _ in sizes]
        parts: list[list[Tensor]] = [[] for _ in self._spaces]
        extras: list[Tensor] = []
        position = 0
        for of_rank in sizes:
            for index in range(num_spaces):
                parts[index].append(flat[position : position + of_rank[index]])
                position += of_rank[index]
            rest = sum(of_rank[num_spaces:])
            extras.append(flat[position : position + rest])
            position += rest
        matrices = [
            torch.cat(of_space).view(-1, space.dim)
            for space, of_space in zip(self._spaces, parts, strict=True)
        ]
        return matrices, extras

    def _send(
        self,
        kind: str,
        flat: Tensor,
        sizes_out: Sequence[Sequence[int]],
        sizes_in: Sequence[Sequence[int]],
        scale: float = 1.0,
    ) -> Pending:
        if scale != 1.0:
            flat = flat * scale
        if flat.dtype != self._wire:
            flat = flat.to(self._wire)
        splits_out, splits_in = [sum(s) for s in sizes_out], [sum(s) for s in sizes_in]
        recv = self._buffers.get(f"{kind} in", sum(splits_in), self._wire)
        return self._comm.all_to_all(kind, flat, splits_out, recv, splits_in)

    def _rounded(self, values: Tensor, scale: float) -> Tensor:
        """Values as the other ranks receive them: replicas stay equal to the bit."""
        if self._wire == self._dtype:
            return values
        return (values * scale).to(self._wire).to(self._dtype) / scale


class IdsUnderWay(NamedTuple):
    """Ids that travel, with the buffers to give back when they are read."""

    replica_counts: ReplicaCounts
    pending: Pending
    recv_splits: list[int]
    buffers: tuple[Tensor, Tensor]


class PendingPlan:
    """A batch whose counts, and then ids, are under way.

    `send_ids` and `finish` are called once each, in this order, by all ranks.
    """

    def __init__(
        self,
        exchange: Exchange,
        requests: tuple[Request, ...],
        touched: list[npt.NDArray[np.int64]],
        counts: Pending,
    ) -> None:
        self._exchange, self._requests, self._touched = exchange, requests, touched
        self._counts_pending = counts
        self._counts: npt.NDArray[np.int64] | None = None
        self._ids: IdsUnderWay | None = None

    def send_ids(self) -> None:
        """Waits for the counts and issues the ids.

        Raises:
            IdOutOfRange: on every rank alike, for the bad id of the first rank that has one.
        """
        exchange = self._exchange
        counts = self._counts_pending.wait().numpy().reshape(exchange._comm.world_size, -1)
        self._counts = counts
        self._ids = exchange.issue_ids(self._requests, self._touched, counts)

    def finish(self) -> ExchangePlan:
        """Waits for the ids that the other ranks sent."""
        assert self._counts is not None, "send_ids comes first"
        assert self._ids is not None
        services, replica_counts = self._exchange.read_ids(self._counts, self._ids, self._touched)
        weights = np.ascontiguousarray(self._counts[:, 5]).view(np.float64)
        return ExchangePlan(
            requests=self._requests,
            services=services,
            replicas=replica_counts,
            total_weight=float(weights.sum()),
            batch_sizes=tuple(self._counts[:, 4].tolist()),
        )


class PendingVectors:
    """Rows and pooled vectors under way."""

    def __init__(self, finish: Callable[[], list[Tensor]]) -> None:
        self._finish = finish

    def finish(self) -> list[Tensor]:
        """Per key space the received vectors, `(M, D)`; valid until the next rows are sent."""
        return self._finish()


class PendingGradients:
    """Gradients under way."""

    def __init__(self, finish: Callable[[], list[KVGradients]]) -> None:
        self._finish = finish

    def finish(self) -> list[KVGradients]:
        """The sums over all ranks for the rows that this rank holds; several per group at most
        where its tables have different exchanges."""
        return self._finish()


class _Reader:
    """Takes arrays from a received buffer, one after the other; they need no alignment."""

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


def _service(
    space: KeySpace, parts: Sequence[tuple[npt.NDArray[np.int64], ...]], dtype: torch.dtype
) -> Service:
    keys_L = torch.from_numpy(np.concatenate([part[0] for part in parts]))
    if space.exchange == "kv":
        return Service(keys_L, None, None, tuple(part[0].size for part in parts))
    lengths = np.concatenate([part[1] for part in parts])
    offsets = np.zeros(lengths.size + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    weights_L = None
    if any(part[2].size for part in parts):
        # A rank without bag weights in this batch sent none: its factors are 1.
        filled = [
            part[2] if part[2].size else np.ones(part[0].size, dtype=np.float32) for part in parts
        ]
        weights_L = torch.from_numpy(np.concatenate(filled)).to(dtype)
    return Service(
        keys_L, torch.from_numpy(offsets), weights_L, tuple(part[1].size for part in parts)
    )


def _bounds(counts: Sequence[int], rank: int) -> tuple[int, int]:
    first = sum(counts[:rank])
    return first, first + counts[rank]


def _check_finite(values: Tensor) -> None:
    if values.dtype == torch.float16 and not bool(torch.isfinite(values).all()):
        raise ValueError(
            "sharding.wire=fp16: a value on the wire exceeds fp16's range of ±65,504 or isn't "
            "finite; set sharding.wire=bf16 or fp32"
        )
