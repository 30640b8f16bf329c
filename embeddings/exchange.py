"""The exchange: counts and ids out, rows back, gradients out.

One packed buffer per phase carries every table, whatever its layout and exchange:

    phase     collective   a rank sends to each other rank
    counts    all-to-all   what all must know (a bad id, the sum of example weights), and sizes
    ids       all-to-all   `kv`: distinct keys, of tables in host memory the cold ones. `pooled`:
                           keys, bag lengths, bag weights.
                           Replicas: the distinct rows that this rank's batch touches
    rows      all-to-all   a row for each key asked for, a pooled vector for each bag asked for
    grads     all-to-all   the reverse: a gradient for each of these; of replicas, for each touched
                           row. Where most rows of a replica are touched, its gradient is
                           all-reduced as a whole matrix instead, together with those like it

`id_wire.py` and `value_wire.py` have the formats and sizes. What a `Pending…` or `Deferred` object
stands for travels between its making and its `finish`; counts and ids need nothing of the model and
may travel during the previous step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from data.batch import JaggedIds
from embeddings.bag_sum import bag_sum
from embeddings.communicator import Buffers, Communicator, Deferred, Pending
from embeddings.host.host_tables import HostTables, StagedPlan
from embeddings.id_wire import IdWire
from embeddings.kv_gradients import KVGradients
from embeddings.layout import KeySpace
from embeddings.replicas import ReplicaCounts, Replicas
from embeddings.requests import Request, Service, plan_request
from embeddings.router import BagRows, GroupPlan, IdOutOfRange, Router
from embeddings.store import RowStore
from embeddings.table import FeatureConfig
from embeddings.value_wire import ValueWire


@dataclass(frozen=True, eq=False)
class ExchangePlan:
    """One batch's part of the exchange on one rank. Holds ids and positions, no rows.

    Attributes:
        requests: per key space what this rank asks.
        services: per key space what it is asked; None where it has no group there.
        replicas: the rows of replicas that the ranks touch.
        total_weight: sum of the example weights (or of the samples) over all ranks.
        batch_sizes: `B` of every rank.
        staged: where the cold rows of tables in host memory lie, once their step is staged; None
            where they are read from the store: nothing is trained.
    """

    requests: tuple[Request, ...]
    services: tuple[Service | None, ...]
    replicas: ReplicaCounts
    total_weight: float
    batch_sizes: tuple[int, ...]
    staged: StagedPlan | None


class Exchange:
    """Moves ids, rows and gradients between the ranks.

    Owns the packed buffers, reused from step to step. Borrows the store's rows to send them; the
    update is the caller's. Every method is called by all ranks in the same order.

    Args:
        spaces: the key spaces, equal on all ranks.
        replicas: the tables that every rank holds.
        router: words the error about a bad id of any rank.
        features: every sparse feature.
        comm: the ranks.
        dtype: type of rows and gradients.
        wire: `fp32`: values travel as they are; `bf16`, `fp16`: rounded.
        host: the tables in host memory, where there are any.
        grad_rows: per key space where the gradients of its bags lie; None: in a matrix of their
            own, the result of `pool`'s.
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
        host: HostTables | None = None,
        grad_rows: Sequence[BagRows | None] | None = None,
    ) -> None:
        self._spaces, self._replicas, self._host = tuple(spaces), replicas, host
        self._grad_rows = list(grad_rows) if grad_rows is not None else [None for _ in spaces]
        self._router, self._features, self._comm, self._dtype = router, features, comm, dtype
        self._id_wire = IdWire(self._spaces, replicas, comm.rank, dtype)
        self._value_wire = ValueWire(self._spaces, comm, dtype, wire)
        self._buffers = Buffers()

    # ------------------------------------------------------------------------------ counts, ids

    def begin_plan(
        self,
        ids: JaggedIds,
        local: Sequence[GroupPlan],
        weight_sum: float,
        bad_id: IdOutOfRange | None,
        *,
        training: bool,
    ) -> PendingPlan:
        """Works out this rank's requests and issues the counts.

        Args:
            ids: this rank's batch.
            local: the plans of the groups that are everywhere; none where nothing is trained.
            weight_sum: sum of this rank's example weights.
            bad_id: what is wrong with `ids`; not raised here but with all ranks, in
                `PendingPlan.send_ids`.
            training: whether hot and cold rows are told apart; else all are read from the store.
        """
        world_size = self._comm.world_size
        requests: tuple[Request, ...] = ()
        if bad_id is None:
            requests = tuple(
                plan_request(
                    space,
                    self._features,
                    ids,
                    self._dtype,
                    self._host.split_of(index) if self._host and training else None,
                    self._grad_rows[index],
                )
                for index, space in enumerate(self._spaces)
            )
        keys_of_group = {index: group.unique.keys_K for index, group in enumerate(local)}
        for index, request in enumerate(requests):
            if request.hot is not None:
                assert self._host is not None
                keys_of_group[self._host.hot_group[index]] = request.hot.slots_K
        touched = self._replicas.touched(keys_of_group)
        counts = self._id_wire.write_counts(
            world_size, requests, touched, ids.batch_size, weight_sum, bad_id
        )
        send = torch.from_numpy(counts.reshape(-1))
        splits = [self._id_wire.num_counts] * world_size
        pending = self._comm.all_to_all("counts", send, splits, torch.empty_like(send), splits)
        staged = StagedPlan() if self._host and training else None
        return PendingPlan(self, requests, touched, pending, staged)

    def issue_ids(
        self, requests: Sequence[Request], touched: Sequence[npt.NDArray[np.int64]], counts: Tensor
    ) -> IdsUnderWay:
        """Issues the ids, now that the counts of all ranks are there.

        Raises:
            IdOutOfRange: on every rank alike, for the bad id of the first rank that has one.
        """
        counts_of_rank = counts.numpy().reshape(self._comm.world_size, -1)
        bad = self._id_wire.bad_id(counts_of_rank)
        if bad is not None:
            rank, feature, bad_id, sample = bad
            raise self._router.id_error(feature, bad_id, sample, rank)
        replica_counts = self._replicas.choose(self._id_wire.touched_rows(counts_of_rank))
        ranks = range(self._comm.world_size)
        parts = [self._id_wire.parts_for(r, requests, touched, replica_counts) for r in ranks]
        num_out = [sum(part.nbytes for part in of_rank) for of_rank in parts]
        num_in = [self._id_wire.num_bytes_from(r, counts_of_rank[r], replica_counts) for r in ranks]
        # Leased: during a step, the next batch's ids are under way, perhaps beside an evaluation's.
        buffers = self._buffers.lease(sum(num_out)), self._buffers.lease(sum(num_in))
        send, recv = buffers[0][: sum(num_out)], buffers[1][: sum(num_in)]
        target, position = send.numpy(), 0
        for part in (part for of_rank in parts for part in of_rank):
            target[position : position + part.nbytes] = part.view(np.uint8)
            position += part.nbytes
        pending = self._comm.all_to_all("ids", send, num_out, recv, num_in)
        return IdsUnderWay(counts_of_rank, replica_counts, pending, num_in, buffers)

    def read_ids(
        self,
        requests: tuple[Request, ...],
        touched: Sequence[npt.NDArray[np.int64]],
        ids: IdsUnderWay,
        staged: StagedPlan | None,
    ) -> ExchangePlan:
        """Waits for what the other ranks ask of this one."""
        services = self._id_wire.read(
            ids.pending.wait().numpy(), ids.num_in, ids.counts, touched, ids.replica_counts
        )
        for buffer in ids.buffers:
            self._buffers.release(buffer)
        return ExchangePlan(
            requests=requests,
            services=services,
            replicas=ids.replica_counts,
            total_weight=self._id_wire.total_weight(ids.counts),
            batch_sizes=self._id_wire.batch_sizes(ids.counts),
            staged=staged,
        )

    # ------------------------------------------------------------------------------------ rows

    def begin_rows(self, plan: ExchangePlan, store: RowStore) -> Deferred[list[Tensor]]:
        """Issues what was asked of this rank: `D` values for each vector of each service.

        Returns:
            Finishes with the received vectors per key space, `(M, D)`; valid until the next rows
            are sent.
        """
        matrices = [
            None if service is None else self._serve(index, service, store, plan.staged)
            for index, service in enumerate(plan.services)
        ]
        sizes_in = self._value_wire.sizes(plan.requests)
        pending = self._value_wire.begin(
            "rows", matrices, self._value_wire.sizes(plan.services), sizes_in
        )
        return Deferred(lambda: self._value_wire.unpack(pending.wait(), sizes_in)[0])

    def _serve(
        self, index: int, service: Service, store: RowStore, staged: StagedPlan | None
    ) -> Tensor:
        group = self._spaces[index].group_of_rank[self._comm.rank]
        assert group is not None
        if staged is not None and self._spaces[index].memory == "host":
            assert self._host is not None
            return self._host.rows(index, staged)
        if service.offsets is None:
            return store.gather(group, service.keys_L)
        return bag_sum(store.weights(group), service.keys_L, service.offsets, service.weights_L)

    def pool(self, index: int, plan: ExchangePlan, vectors_MD: Tensor) -> Tensor:
        """`(B, slices · D)` pooled columns of key space `index` from the received vectors."""
        request, space = plan.requests[index], self._spaces[index]
        bags, hot = request.bags, request.hot
        if hot is not None:
            assert self._host is not None
            # One matrix of all distinct rows, wherever they came from: which rows are hot doesn't
            # change the order of any sum.
            received_MD = vectors_MD
            num_keys = received_MD.shape[0] + hot.hot_K.numel()
            vectors_MD = received_MD.new_empty(num_keys, space.dim)
            vectors_MD.index_copy_(0, hot.cold_K, received_MD)
            vectors_MD.index_copy_(0, hot.hot_K, self._host.hot_rows(index, hot.slots_K))
        pooled = bag_sum(vectors_MD, bags.keys_L, bags.offsets, bags.weights_L)
        return pooled.view(-1, len(space.slices) * space.dim)

    # ------------------------------------------------------------------------------- gradients

    def begin_grads(
        self,
        plan: ExchangePlan,
        space_grads: Sequence[Tensor],
        replica_grads: Sequence[KVGradients],
    ) -> Deferred[list[KVGradients]]:
        """Issues the gradients of what was received: `D` values for each vector of each request,
        and for each touched row of a replica to every other rank.

        Args:
            plan: the batch.
            space_grads: per key space the gradient of `pool`'s result, or the matrix that its
                `grad_rows` speak of.
            replica_grads: this rank's gradients of replicas, one per group of them.

        Returns:
            Finishes with the sums over all ranks for the rows that this rank holds. A group may
            have several, of disjoint keys: for each exchange of its tables, and as
            `Replicas.sum_ranks` returns them.
        """
        matrices = [
            bag_sum(grad.reshape(-1, space.dim), *request.vectors)
            for space, request, grad in zip(self._spaces, plan.requests, space_grads, strict=True)
        ]
        hot_grads: list[KVGradients] = []
        for index, request in enumerate(plan.requests):
            if request.hot is not None:
                assert self._host is not None
                grads_KD = matrices[index]
                matrices[index] = grads_KD.index_select(0, request.hot.cold_K)
                hot_KD = grads_KD.index_select(0, request.hot.hot_K)
                group = self._host.hot_group[index]
                hot_grads.append(KVGradients(group, request.hot.slots_K, hot_KD))
        if self._comm.world_size > 1:
            replica_grads, hot_grads = [*replica_grads, *hot_grads], []
        own = self._replicas.split(replica_grads, plan.replicas)
        extra = [part.reshape(-1) for part in own]
        num_out, num_in = self._replica_sizes(plan, sum(part.numel() for part in extra))
        sizes_in = self._value_wire.sizes(plan.services, num_in)
        scale = self._gradient_scale(plan)
        pending = self._value_wire.begin(
            "grads",
            matrices,
            self._value_wire.sizes(plan.requests, num_out),
            sizes_in,
            extra,
            scale,
        )
        dense = self._replicas.begin_dense(replica_grads, plan.replicas)

        def finish() -> list[KVGradients]:
            vectors, received = self._value_wire.unpack(pending.wait(), sizes_in, scale)
            gradients = [
                self._sum_by_key(space, service, vectors_MD)
                for space, service, vectors_MD in zip(
                    self._spaces, plan.services, vectors, strict=True
                )
                if service is not None
            ]
            # As the other ranks got them, so that replicas stay equal to the bit.
            own_rounded = [self._value_wire.rounded(part, scale) for part in own]
            summed = self._replicas.sum_ranks(plan.replicas, own_rounded, received, dense)
            return gradients + summed + hot_grads

        return Deferred(finish)

    def _replica_sizes(self, plan: ExchangePlan, num_own: int) -> tuple[list[int], list[int]]:
        """Gradient values of replicas, per rank: sent to it, received from it."""
        others = [rank != self._comm.rank for rank in range(self._comm.world_size)]
        num_out = [num_own if other else 0 for other in others]
        num_in = [
            self._replicas.num_values(rank, plan.replicas) if other else 0
            for rank, other in enumerate(others)
        ]
        return num_out, num_in

    def _sum_by_key(self, space: KeySpace, service: Service, vectors_MD: Tensor) -> KVGradients:
        """Sums what the ranks sent for each key, in the order of the ranks."""
        group = space.group_of_rank[self._comm.rank]
        assert group is not None
        keys_K, vectors = service.by_key
        return KVGradients(group, keys_K, bag_sum(vectors_MD, *vectors))

    def _gradient_scale(self, plan: ExchangePlan) -> float:
        """A power of two that fp16 gradients of a mean over the batch are multiplied by: of a
        batch of 8,192, many would else fall below fp16's smallest normal number, 6e-5."""
        if self._value_wire.wire_dtype != torch.float16:
            return 1.0
        return float(2.0 ** round(np.log2(max(sum(plan.batch_sizes), 1))))


class IdsUnderWay(NamedTuple):
    """Ids that travel.

    Attributes:
        counts: `(W, num_counts)` of all ranks.
        replica_counts: what the ranks touch of replicas; `rows` not yet filled.
        pending: the received bytes.
        num_in: bytes from each rank.
        buffers: to give back when they are read.
    """

    counts: npt.NDArray[np.int64]
    replica_counts: ReplicaCounts
    pending: Pending
    num_in: list[int]
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
        staged: StagedPlan | None,
    ) -> None:
        self._exchange, self._requests, self._touched = exchange, requests, touched
        self._counts, self._staged = counts, staged
        self._ids: IdsUnderWay | None = None

    def send_ids(self) -> None:
        """Waits for the counts and issues the ids.

        Raises:
            IdOutOfRange: on every rank alike, for the bad id of the first rank that has one.
        """
        self._ids = self._exchange.issue_ids(self._requests, self._touched, self._counts.wait())

    def finish(self) -> ExchangePlan:
        """Waits for the ids that the other ranks sent."""
        assert self._ids is not None, "send_ids comes first"
        return self._exchange.read_ids(self._requests, self._touched, self._ids, self._staged)
