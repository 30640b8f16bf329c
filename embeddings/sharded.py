"""`ShardedEmbeddings`: the four calls through which the trainer sees every table."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from data.batch import JaggedIds
from embeddings.bag_sum import bag_sum
from embeddings.communicator import Communicator, Deferred, SingleProcess
from embeddings.exchange import Exchange, ExchangePlan, PendingPlan
from embeddings.field_checks import option, real_number, shown, table_dtype, whole_number
from embeddings.fused import FusedGroup, load_fbgemm, why_not_fused
from embeddings.host.executor import Executor, ThreadExecutor
from embeddings.host.host_tables import HostSettings, HostTables
from embeddings.kv_gradients import KVGradients, are_disjoint, sum_kv
from embeddings.layout import KeySpace, build_key_spaces, split_row_stretches
from embeddings.plan import Plan, single_process_plan
from embeddings.replicas import ReplicaRows, Replicas
from embeddings.router import BagRows, GroupPlan, IdOutOfRange, Router
from embeddings.row_optim import ROW_STATE, RowOptimizerConfig
from embeddings.row_squares import RowSquares
from embeddings.row_update import compile_rule
from embeddings.store import RowsPart, RowStore
from embeddings.table import FeatureConfig, TableConfig, validate_tables
from embeddings.table_group import ColumnRange, local_groups, tables_everywhere
from embeddings.table_reader import TableReader

Backend = Literal["auto", "torch", "fbgemm"]
Wire = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """What a batch needs from the tables. Holds ids and positions, no rows.

    Attributes:
        batch_size: `B`.
        groups: one `GroupPlan` per table group that every rank holds.
        exchange: what travels between ranks; None in one process.
        total_weight: sum of the example weights of the *global* batch.
        global_batch_size: its samples.
        training: whether it may be used for `backward`.
    """

    batch_size: int
    groups: tuple[GroupPlan, ...]
    exchange: ExchangePlan | None
    total_weight: float
    global_batch_size: int
    training: bool


class ShardedEmbeddings:
    """Every table of the model behind four calls; the only class the trainer sees.

    Who owns what: the `plan` says which rank holds which rectangle, the `store` holds this rank's
    weights and optimizer state, the exchange holds buffers, and a `BatchPlan` holds a batch's ids.
    The pooled vectors and their gradient belong to the caller.

    Phases of a step, in order; each is called by all ranks, with an empty batch too:

        plan_batch(ids)            ids only; may run any number of steps ahead
        stage(plans)               tables in host memory: their cold rows set out
        lookup(plan)               → pooled_BS, a leaf that the dense network differentiates
        backward(plan, grad, lr)   → KV gradients, summed over ranks, of the rows held here
        apply(gradients, lr)       rows and state updated; once per optimizer step, on every step,
                                   or `skip_update()` where no sample has a weight

    Collectives of a step, whatever the plan (`exchange.py` has their sizes): counts and ids in
    `plan_batch`, rows in `lookup`, gradients in `backward`, and in `apply` one more where columns
    are split under a row-wise optimizer, two where they are split between host and device memory
    and rows of them are hot. With one process there are none. `plan_batch`, `lookup`
    and `backward` each have a `begin_…` that issues and returns, so that what travels may be hidden
    behind other work; begun and finished in the same order they give the same bits.

    Backends. `torch`: a lookup is a sum over a group's flat array; its backward is the transposed
    sum, over the gradient seen as one row per bag: the sum for each key is made by one thread in a
    fixed order, so equal runs are equal to the bit. Any dim, fp32 or fp64, any number of ranks.
    `fbgemm`: see `embeddings.fused`; one process; `backward` updates at once and returns no
    gradients. Bag weights are not trained.

    Attributes:
        tables: every table, held here or not.
        dtype: type of weights and state.
        comm: the ranks.
        plan: who owns what.
        store: the rows that this rank holds, and their state; of tables in host memory the newest
            values only after `settle`.
        host: the tables in host memory, where there are any.
        backend: the backend in use, `torch` or `fbgemm`.
        backend_message: one line on why it is that one.
        feature_offsets: `F + 1` columns; feature `f` has the columns
            `feature_offsets[f]:feature_offsets[f+1]` of `pooled_BS`.

    Args:
        tables: every table.
        features: every sparse feature, in the order of the batches' ids.
        optimizer: update rule of the rows and its constants.
        dtype: fp32 or fp64.
        seed: the run's seed, which the start values depend on.
        plan: who owns what; None: every table whole, in one process.
        comm: the ranks; None: one process.
        wire: type of values on the wire; `fp32` leaves them as they are.
        backend: `auto` is torch, which is faster on CPU; fbgemm only where it is asked for.
        accumulate: micro-batches per optimizer step (`train.accumulate`); only tells whether a
            fused update is legal, the caller sums with `sum_kv`.
        clip_norm: bound of the global gradient norm or None; likewise.
        host: how the rows of tables in host memory are brought; None: each step's at once.
        executor: moves them; None: CPU threads.
        fill: False: without start values, since every row is to be loaded.
        beat: called while the tables are filled.

    Raises:
        ValueError: naming the config key, for a type, plan or backend that can't be had, and for
            tables that don't fit into memory.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        features: Sequence[FeatureConfig],
        optimizer: RowOptimizerConfig,
        *,
        dtype: torch.dtype,
        seed: int,
        plan: Plan | None = None,
        comm: Communicator | None = None,
        wire: Wire = "fp32",
        backend: Backend = "auto",
        accumulate: int = 1,
        clip_norm: float | None = None,
        host: HostSettings | None = None,
        executor: Executor | None = None,
        fill: bool = True,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        table_dtype(dtype)
        seed = whole_number("seed", seed)
        option("sharding.wire", wire, get_args(Wire))
        option("train.backend", backend, get_args(Backend))
        accumulate = whole_number("train.accumulate", accumulate, least=1)
        if clip_norm is not None:
            clip_norm = real_number("optim.clip_norm", clip_norm, least=0.0)
        for what, value, kind in (
            ("optimizer", optimizer, RowOptimizerConfig),
            ("plan", plan, Plan),
            ("comm", comm, Communicator),
            ("host", host, HostSettings),
            ("executor", executor, Executor),
        ):
            if not isinstance(value, kind) and (value is not None or what == "optimizer"):
                raise ValueError(f"{what} is {shown(value)}, must be a {kind.__name__}")
        validate_tables(tables, features)
        self.comm = comm if comm is not None else SingleProcess()
        self.plan: Plan = plan if plan is not None else single_process_plan(tables)
        self.plan.validate(tables)
        if self.plan.world_size != self.comm.world_size:
            raise ValueError(
                f"the plan is for {self.plan.world_size} ranks, the run has "
                f"{self.comm.world_size} (launch.nproc)"
            )
        groups_of_rank = [
            local_groups(self.plan, rank=rank, dtype=dtype, optimizer=optimizer.name)
            for rank in range(self.comm.world_size)
        ]
        groups = groups_of_rank[self.comm.rank]
        illegal = why_not_fused(
            groups,
            optimizer,
            accumulate=accumulate,
            clip_norm=clip_norm,
            world_size=self.comm.world_size,
        )
        self.backend, self.backend_message = _choose_backend(backend, illegal)
        self.store = RowStore(
            tables, groups, optimizer, seed=seed, dtype=dtype, fill=fill, beat=beat
        )
        self.tables = tuple(tables)
        self.dtype = dtype
        self._local = [group for group in groups if group.everywhere]
        # Gradients of rows are summed from where they lie in that of `pooled_BS`, not from copies.
        sums_gradients = self.backend == "torch"
        self._router = Router(tables, features, self._local, reads_whole_gradient=sums_gradients)
        self._spaces = build_key_spaces(self.plan, tables, features, groups_of_rank)
        dims = {table.name: table.dim for table in tables}
        offsets = [0, *itertools.accumulate(dims[feature.table] for feature in features)]
        self.feature_offsets: tuple[int, ...] = tuple(offsets)
        # Where in the gradient of `pooled_BS` the bags of each key space are.
        self._space_rows = [_grad_rows(space, offsets) for space in self._spaces]
        self._everywhere = tables_everywhere(self.plan)
        self.host: HostTables | None = None
        if any(space.memory == "host" for space in self._spaces):
            self.host = HostTables(
                self._spaces,
                features,
                self.store,
                self.comm,
                executor or ThreadExecutor(),
                host or HostSettings(),
                dtype,
            )
        self._exchange: Exchange | None = None
        if self._spaces or self.comm.world_size > 1:
            # One process sums nothing: its gradients are the sums.
            replicated: list[ReplicaRows] = []
            if self.comm.world_size > 1:
                replicated = ReplicaRows.of_groups(self._local)
                replicated += self.host.replicas() if self.host is not None else []
            replicas = Replicas(
                replicated,
                self.comm,
                wire_bytes=2 if wire in ("bf16", "fp16") else dtype.itemsize,
                dense_bytes=dtype.itemsize,
            )
            self._exchange = Exchange(
                self._spaces,
                replicas,
                self._router,
                features,
                self.comm,
                dtype=dtype,
                # One process sends nothing: what it has isn't rounded.
                wire=wire if self.comm.world_size > 1 else "fp32",
                host=self.host,
                grad_rows=self._space_rows,
            )
        self._row_squares: RowSquares | None = None
        if optimizer.name in ROW_STATE:
            stretches = split_row_stretches(self.plan, tables, groups_of_rank)
            if stretches:
                read = None if self.host is None else self.host.read
                self._row_squares = RowSquares(
                    stretches, tables, self.store, self.comm, dtype, read
                )
            if self.host is not None and any(s.source.memory == "host" for s in stretches):
                self.host.keep_row_state(tables, groups_of_rank)
        self._reader = TableReader(tables, groups_of_rank, self._everywhere, self.store, self.comm)

        # Columns of pooled_BS that each local group and each key space fills.
        self._local_columns = [
            merge_in_order([(offsets[f], offsets[f + 1]) for f in group_features])
            for group_features in self._router.features_of_group
        ]
        self._space_columns = [
            merge_in_order(
                [
                    (offsets[part.feature] + start, offsets[part.feature] + stop)
                    for part in space.slices
                    for start, stop in part.columns
                ]
            )
            for space in self._spaces
        ]
        # Where every slice covers its table, each column is filled once; else several add up.
        self._adds_up = not all(part.covers_table for sp in self._spaces for part in sp.slices)
        self._fused: dict[int, FusedGroup] = {}
        if self.backend == "fbgemm":
            for group, group_features in enumerate(self._router.features_of_group):
                if group_features:
                    self._fused[group] = FusedGroup(self.store, group, len(group_features))

    def compile_loops(self) -> None:
        """Compiles what `apply` runs, where that wasn't done before: not within the first step, for
        which other ranks wait."""
        if self.backend == "torch":
            compile_rule(self.store.optimizer, self.dtype)
            one = KVGradients(0, torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1))
            are_disjoint([one, one])

    # ------------------------------------------------------------------------------------ plan

    def plan_batch(
        self, ids: JaggedIds, *, training: bool = True, weight_sum: float | None = None
    ) -> BatchPlan:
        """Check and route the ids of a batch, and tell the other ranks. Reads and changes no row.

        Args:
            ids: `F` features, `B` samples of this rank, on the CPU.
            training: whether `backward` is to follow.
            weight_sum: sum of this rank's example weights in the optimizer step, of which the plan
                holds the total; None: its number of samples.

        Raises:
            IdOutOfRange: on all ranks alike, for an id of any rank that is not a row of its table.
        """
        pending = self.begin_plan(ids, training=training, weight_sum=weight_sum)
        pending.send_ids()
        return pending.finish()

    def begin_plan(
        self,
        ids: JaggedIds,
        *,
        training: bool = True,
        weight_sum: float | None = None,
        first_sample: int = 0,
    ) -> PendingBatchPlan:
        """As `plan_batch`, but returns with the counts under way.

        Args:
            ids: see `plan_batch`.
            training: see `plan_batch`.
            weight_sum: see `plan_batch`.
            first_sample: position of the first sample in the rank's batch, of which `ids` may be a
                part; for messages.
        """
        weight = float(ids.batch_size) if weight_sum is None else weight_sum
        bad_id: IdOutOfRange | None = None
        groups: tuple[GroupPlan, ...] = ()
        try:
            groups = self._router.plan_groups(ids)
        except IdOutOfRange as error:
            sample = error.sample + first_sample
            bad_id = self._router.id_error(error.feature_index, error.id, sample)
            if self.comm.world_size == 1:
                raise bad_id from None
        if self.backend == "torch":
            for group in groups:
                # Both are computed at their first use and kept in the plan: use them here, ahead
                # of the step.
                _ = group.sample_major
                if training:
                    _ = group.unique
        pending = None
        if self._exchange is not None:
            # Which rows of replicas are touched matters to their gradients only.
            local = groups if training and self.comm.world_size > 1 else ()
            pending = self._exchange.begin_plan(ids, local, weight, bad_id, training=training)
        if self.host is not None and training and bad_id is None and not self.splits_hot:
            self.host.count_samples(self.host.all_hot(ids))  # Else `hot_first` has.
        return PendingBatchPlan(ids.batch_size, groups, weight, pending, training)

    @property
    def splits_hot(self) -> bool:
        """Whether a step is to be computed in two parts (`sharding.host.mode=hotline`)."""
        return self.host is not None and self.host.settings.mode == "hotline"

    def hot_first(self, ids: JaggedIds) -> tuple[Tensor, int]:
        """The samples whose every id is hot, then the others, both in their order; and how many are
        hot. Where an id is bad none is: planning the batch as it is tells which."""
        assert self.host is not None
        try:
            self._router.check(ids)
        except IdOutOfRange:
            return torch.arange(ids.batch_size), 0
        all_hot_B = self.host.all_hot(ids)
        self.host.count_samples(all_hot_B)
        is_hot_B = torch.from_numpy(all_hot_B)
        order_B = torch.argsort(is_hot_B.logical_not(), stable=True)
        return order_B, int(is_hot_B.sum())

    def stage(self, plans: Sequence[BatchPlan]) -> None:
        """Sets out for the cold rows of a step's micro-batches, in host memory; returns at once.

        Called once for every step, in their order, by all ranks, at most as many steps ahead as
        `sharding.host.lookahead` says; left out, `lookup` does it for a step of one micro-batch.

        Raises:
            StagingOverflow: (a ValueError) where the staging buffers can't hold them.
        """
        if self.host is None:
            return
        asked = []
        for plan in plans:
            assert plan.exchange is not None
            assert plan.exchange.staged is not None
            keys = [
                service.keys_L.numpy() if service is not None else None
                for service in plan.exchange.services
            ]
            asked.append((plan.exchange.staged, keys))
        self.host.stage(asked)

    # ---------------------------------------------------------------------------------- lookup

    def lookup(self, plan: BatchPlan, *, training: bool = True) -> Tensor:
        """Pooled vectors of a batch.

        Args:
            plan: from `plan_batch`.
            training: whether the result is a leaf that requires a gradient.

        Returns:
            `pooled_BS`, contiguous; an empty bag's columns are 0.
        """
        return self.begin_lookup(plan, training=training).finish()

    def begin_lookup(self, plan: BatchPlan, *, training: bool = True) -> Deferred[Tensor]:
        """As `lookup`, but returns with the rows under way."""
        if self.host is not None:
            assert plan.exchange is not None
            staged = plan.exchange.staged
            if staged is None:
                self.host.settle()  # Nothing is trained: all rows are read from the store.
            elif staged.step is None:
                self.stage([plan])
            else:
                self.host.load_hot()
        pending = None
        if self._exchange is not None:
            assert plan.exchange is not None
            pending = self._exchange.begin_rows(plan.exchange, self.store)

        def finish() -> Tensor:
            parts = [
                (columns, self._lookup_group(index, plan.groups[index]))
                for index, columns in enumerate(self._local_columns)
                if columns
            ]
            if pending is not None:
                assert plan.exchange is not None
                assert self._exchange is not None
                for index, vectors_MD in enumerate(pending.finish()):
                    pooled = self._exchange.pool(index, plan.exchange, vectors_MD)
                    parts.append((self._space_columns[index], pooled))
            return self._join_columns(plan.batch_size, parts).requires_grad_(training)

        return Deferred(finish)

    def _lookup_group(self, index: int, group: GroupPlan) -> Tensor:
        """`(B, F·D)` of a local group's features."""
        if self.backend == "fbgemm":
            return self._fused[index].lookup(group)
        bags = group.sample_major
        pooled = bag_sum(self.store.weights(index), bags.keys_L, bags.offsets, bags.weights_L)
        return pooled.view(group.batch_size, len(group.features) * self.store.groups[index].dim)

    def _join_columns(
        self, batch_size: int, parts: Sequence[tuple[list[ColumnRange], Tensor]]
    ) -> Tensor:
        """The parts' columns at their places in `pooled_BS`; the part itself where it is alone."""
        num_columns = self.feature_offsets[-1]
        if len(parts) == 1 and parts[0][0] == [(0, num_columns)]:
            return parts[0][1]
        make = torch.zeros if self._adds_up else torch.empty
        pooled_BS = make(batch_size, num_columns, dtype=self.dtype)
        for columns, part_BS in parts:
            position = 0
            for start, stop in columns:
                values = part_BS[:, position : position + stop - start]
                if self._adds_up:
                    pooled_BS[:, start:stop] += values
                else:
                    pooled_BS[:, start:stop] = values
                position += stop - start
        return pooled_BS

    def _take_columns(self, columns: list[ColumnRange], grad_BS: Tensor) -> Tensor:
        """Some columns of the gradient; the gradient itself where they are all."""
        if columns == [(0, self.feature_offsets[-1])]:
            return grad_BS
        return torch.cat([grad_BS[:, start:stop] for start, stop in columns], dim=1)

    # -------------------------------------------------------------------------------- backward

    def backward(self, plan: BatchPlan, grad_BS: Tensor, lr: float) -> list[KVGradients]:
        """From the gradient of the pooled vectors to those of the rows held here.

        Args:
            plan: the batch that was looked up.
            grad_BS: gradient of the loss by `lookup`'s result, of its shape and type; the loss is
                this rank's share of the global mean.
            lr: learning rate of this step; the fused update takes place here.

        Returns:
            Gradients by group (torch), summed over the samples of all ranks; of a group there may
            be several, of disjoint keys; or an empty list (fbgemm: rows are updated).
        """
        return self.begin_backward(plan, grad_BS, lr).finish()

    def begin_backward(
        self, plan: BatchPlan, grad_BS: Tensor, lr: float
    ) -> Deferred[list[KVGradients]]:
        """As `backward`, but returns with the gradients under way."""
        expected = (plan.batch_size, self.feature_offsets[-1])
        if grad_BS.shape != expected or grad_BS.dtype != self.dtype:
            raise ValueError(
                f"the gradient is {tuple(grad_BS.shape)} of {grad_BS.dtype}, the pooled vectors "
                f"are {expected} of {self.dtype}"
            )
        if not plan.training:
            raise ValueError("this batch was planned without training")
        gradients: list[KVGradients] = []
        for index, columns in enumerate(self._local_columns):
            group_grad_BS = grad_BS
            if self._router.grad_rows[index] is None:
                group_grad_BS = self._take_columns(columns, grad_BS) if columns else grad_BS[:, :0]
            if self.backend == "fbgemm":
                # Of samples without any weight nothing is updated, not even by a gradient of 0.
                if columns and plan.total_weight:
                    self._fused[index].backward_and_update(plan.groups[index], group_grad_BS, lr)
            elif columns or self.comm.world_size > 1:
                gradients.append(self._backward_group(index, plan.groups[index], group_grad_BS))
        if self._exchange is None:
            return Deferred(lambda: gradients)
        assert plan.exchange is not None
        space_grads = [
            grad_BS if rows is not None else self._take_columns(columns, grad_BS)
            for columns, rows in zip(self._space_columns, self._space_rows, strict=True)
        ]
        if self.comm.world_size > 1:
            return self._exchange.begin_grads(plan.exchange, space_grads, gradients)
        of_spaces = self._exchange.begin_grads(plan.exchange, space_grads, [])
        return Deferred(lambda: gradients + of_spaces.finish())

    def _backward_group(self, index: int, group: GroupPlan, grad_BS: Tensor) -> KVGradients:
        unique = group.unique
        bag_grads = grad_BS.reshape(-1, self.store.groups[index].dim)
        grads_KD = bag_sum(bag_grads, unique.bags_L, unique.starts, unique.weights_L)
        return KVGradients(index, unique.keys_K, grads_KD)

    # ----------------------------------------------------------------------------------- apply

    def apply(self, kv_gradients: Sequence[KVGradients], lr: float) -> None:
        """Update rows and their state; called once per optimizer step, whatever the backend.

        Args:
            kv_gradients: of all micro-batches together, each key of a group once: what `backward`
                returned of the only one, or `sum_kv` of several; empty for fbgemm.
            lr: learning rate of this step.
        """
        if not are_disjoint(kv_gradients):
            raise ValueError("a key of two gradients: sum micro-batches with sum_kv")
        if self.host is not None or self._row_squares is not None:
            kv_gradients = sum_kv([kv_gradients])  # One per group, by ascending key.
        self.store.begin_step()
        if self.host is not None:
            self.host.begin_update()
        row_state: dict[int, Tensor] = {}
        if self._row_squares is not None:
            row_state = (
                self._row_squares.new_state(kv_gradients)
                if self.host is None
                else self.host.new_row_state(kv_gradients, self._row_squares.new_state)
            )
        for group, keys_K, grads_KD in kv_gradients:
            if self.host is not None and self.host.holds(group):
                self.host.update(group, keys_K, grads_KD, lr, row_state.get(group))
            else:
                self.store.apply(group, keys_K, grads_KD, lr, row_state.get(group))
        if self.host is not None:
            self.host.retire()

    def skip_update(self) -> None:
        """Ends a step that updates nothing, in place of `apply` and like it on all ranks: rows,
        state and Adam's count of steps stay as they are, cold rows go back unchanged."""
        if self.host is not None:
            self.host.begin_update()
            self.host.retire()

    def counted_once(self, kv_gradients: Sequence[KVGradients]) -> list[Tensor]:
        """Those gradients of this rank that, over all ranks, are the gradients of all rows, each
        once: replicas count on rank 0 only. For the global norm."""
        return [
            grads_KD
            for group, _, grads_KD in kv_gradients
            if self.comm.rank == 0 or not self._is_everywhere(group)
        ]

    def _is_everywhere(self, group: int) -> bool:
        num_groups = len(self.store.groups)  # Those that follow are of hot rows.
        return group >= num_groups or self.store.groups[group].everywhere

    # ------------------------------------------------------------------------------ whole rows

    def own_parts(self, table: str, row_start: int, row_stop: int) -> list[RowsPart]:
        """What this rank is to write down of some rows, so that all ranks together write each
        number once: the rows it holds; of a replica, an equal share of them."""
        self.settle()
        if table in self._everywhere:
            size, start = row_stop - row_start, row_start
            row_start = start + size * self.comm.rank // self.comm.world_size
            row_stop = start + size * (self.comm.rank + 1) // self.comm.world_size
        return self.store.read_parts(table, row_start, row_stop)

    def read(self, table: str, row_start: int, row_stop: int) -> dict[str, Tensor] | None:
        """Whole rows and their state, from the ranks that hold them: called by all ranks.

        Args:
            table: name of the table.
            row_start: first row.
            row_stop: one past the last row.

        Returns:
            As `RowStore.read`, on rank 0; None on the others.
        """
        self.settle()
        return self._reader.read(table, row_start, row_stop)

    def settle(self) -> None:
        """Makes `store` hold the newest values of every row of this rank, wherever they are."""
        if self.host is not None:
            self.host.settle()

    def rows_changed(self) -> None:
        """To be told, on all ranks, by whoever has written to `store`, between two steps: copies of
        its rows are read anew, hot and staged ones too."""
        if self.host is not None:
            self.host.rows_changed()

    def close(self) -> None:
        """Ends what runs beside the caller."""
        if self.host is not None:
            self.host.close()


class PendingBatchPlan:
    """A batch whose counts, and then ids, are under way; see `ShardedEmbeddings.begin_plan`.

    `send_ids` and `finish` are called once each, in this order.
    """

    def __init__(
        self,
        batch_size: int,
        groups: tuple[GroupPlan, ...],
        weight_sum: float,
        pending: PendingPlan | None,
        training: bool,
    ) -> None:
        self._batch_size, self._groups, self._weight_sum = batch_size, groups, weight_sum
        self._pending, self._training = pending, training

    def send_ids(self) -> None:
        """Waits for the counts and issues the ids.

        Raises:
            IdOutOfRange: see `ShardedEmbeddings.plan_batch`.
        """
        if self._pending is not None:
            self._pending.send_ids()

    def finish(self) -> BatchPlan:
        """Waits for the ids; the plan is complete."""
        if self._pending is None:
            return BatchPlan(
                self._batch_size,
                self._groups,
                None,
                self._weight_sum,
                self._batch_size,
                self._training,
            )
        exchange = self._pending.finish()
        if self._training:
            for service in exchange.services:
                if service is not None:
                    _ = service.by_key  # Ahead of the step, like the local groups' keys.
        return BatchPlan(
            self._batch_size,
            self._groups,
            exchange,
            exchange.total_weight,
            sum(exchange.batch_sizes),
            self._training,
        )


def _grad_rows(space: KeySpace, offsets: Sequence[int]) -> BagRows | None:
    """See `Exchange`; None where a slice's columns aren't side by side, or not at a multiple."""
    if any(len(part.columns) > 1 for part in space.slices):
        return None
    starts = [offsets[part.feature] + part.columns[0][0] for part in space.slices]
    return BagRows.within(starts, space.dim, offsets[-1])


def merge_in_order(ranges: Sequence[ColumnRange]) -> list[ColumnRange]:
    """Half-open ranges as they come, neighbours that touch merged."""
    merged: list[ColumnRange] = []
    for start, stop in ranges:
        if merged and merged[-1][1] == start:
            start = merged.pop()[0]
        merged.append((start, stop))
    return merged


def _choose_backend(requested: Backend, illegal: str | None) -> tuple[str, str]:
    """The backend to use and one line on why.

    Raises:
        ValueError: where fbgemm is asked for by name and can't be had, or the name is unknown.
    """
    if requested not in ("auto", "torch", "fbgemm"):
        raise ValueError(f"train.backend is {requested!r}, must be 'auto', 'torch' or 'fbgemm'")
    if requested == "auto":
        return "torch", "torch: faster than fbgemm's fused update on CPU (docs/benchmarks.md)"
    if requested == "torch":
        return "torch", "torch: as train.backend says"
    reason = illegal
    if reason is None:
        status = load_fbgemm()
        if status.available:
            return "fbgemm", f"fbgemm: fused updates with {status.message}"
        reason = status.message
    raise ValueError(f"train.backend=fbgemm can't be used: {reason}; set train.backend=torch")
