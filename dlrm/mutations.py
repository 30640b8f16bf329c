"""Known faults for `check.mutate=NAME`: each planted into the sharded run only, each to be found.

A mutation replaces methods of one trainer's live objects, so production code knows nothing of it.
Called on every rank alike; none changes which collectives are issued, in which order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from data.batch import JaggedIds
from data.errors import UserError
from dlrm.check_gather import replace_method
from dlrm.host_mutations import HOST_FAULTS, on_device_only
from dlrm.pipeline import PlannedBatch, weight_sum
from embeddings.communicator import Deferred, Pending
from embeddings.kv_gradients import KVGradients, sum_kv
from embeddings.layout import FeatureSlice, KeySpace, build_key_spaces, split_row_stretches
from embeddings.plan import Plan
from embeddings.replicas import ReplicaCounts
from embeddings.requests import Service
from embeddings.row_optim import ROW_STATE, RowOptimizerName
from embeddings.table import FeatureConfig, TableConfig
from embeddings.table_group import TableGroup, local_groups

if TYPE_CHECKING:
    from dlrm.config import TrainRun
    from dlrm.trainer import Trainer


@dataclass(frozen=True)
class Situation:
    """What a check runs on; decides whether a fault can show."""

    config: TrainRun
    plan: Plan
    tables: Sequence[TableConfig]
    features: Sequence[FeatureConfig]

    @property
    def used_tables(self) -> set[str]:
        """Tables that a feature looks up in."""
        return {feature.table for feature in self.features}

    def groups_of_rank(self) -> list[tuple[TableGroup, ...]]:
        """Every rank's table groups."""
        name: RowOptimizerName = self.config.optim.sparse.name  # type: ignore[assignment]
        return [
            local_groups(self.plan, rank=rank, dtype=torch.float64, optimizer=name)
            for rank in range(self.plan.world_size)
        ]


Plant = Callable[["Trainer"], None]
Unmet = Callable[[Situation], "str | None"]


# ------------------------------------------------------------------------------------------ sums


def drop_duplicate_sum(trainer: Trainer) -> None:
    """Of the gradients that several ranks send for one row, only the last is kept."""

    def wrapper(original: Callable[..., KVGradients]) -> Callable[..., KVGradients]:
        def sum_by_key(space: KeySpace, service: Service, vectors_MD: Tensor) -> KVGradients:
            whole = original(space, service, vectors_MD)
            _, vectors = service.by_key
            last_K = vectors.starts[1:] - 1
            grads_KD = vectors_MD[vectors.bags_L[last_K]]
            if vectors.weights_L is not None:
                grads_KD = grads_KD * vectors.weights_L[last_K, None]
            return KVGradients(whole.group, whole.keys_K, grads_KD)

        return sum_by_key

    replace_method(trainer.embeddings._exchange, "_sum_by_key", wrapper)


def mean_of_means(trainer: Trainer) -> None:
    """Every rank divides its loss by its own batch, and the ranks' means are averaged."""

    def wrapper(original: Callable[[PlannedBatch], float]) -> Callable[[PlannedBatch], float]:
        def step(planned: PlannedBatch) -> float:
            own = weight_sum(planned.batch)
            if own == 0:
                return original(planned)
            total = own * trainer.comm.world_size
            micro = [(b, dataclasses.replace(p, total_weight=total)) for b, p in
                     planned.micro_batches]  # fmt: skip
            return original(PlannedBatch(planned.batch, micro))

        return step

    replace_method(trainer, "step", wrapper)


def forget_replicas(trainer: Trainer) -> None:
    """Every rank updates its copy of a replicated table with its own gradients only."""
    exchange = trainer.embeddings._exchange
    assert exchange is not None
    replicas = exchange._replicas
    own: list[Sequence[KVGradients]] = []

    def watch(original: Callable[..., Pending | None]) -> Callable[..., Pending | None]:
        def begin_dense(gradients: Sequence[KVGradients], *more: Any) -> Pending | None:
            own.append(gradients)
            return original(gradients, *more)

        return begin_dense

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        def sum_ranks(
            counts: ReplicaCounts, parts: Any, received: Any, dense: Pending | None
        ) -> list[KVGradients]:
            original(counts, parts, received, dense)
            gradients = own.pop(0)
            rows = counts.rows[trainer.comm.rank]
            return [
                KVGradients(
                    index,
                    torch.from_numpy(rows[table]) + key,
                    replicas._of_tables(range(table, table + 1), gradients),
                )
                for table, (index, key, _, _) in enumerate(replicas._tables)
            ]

        return sum_ranks

    replace_method(replicas, "begin_dense", watch)
    replace_method(replicas, "sum_ranks", wrapper)


def dense_not_summed(trainer: Trainer) -> None:
    """Every rank steps its dense weights with its own gradients only."""

    parameters = list(trainer.model.parameters())
    own: list[Tensor] = []

    def keep_own(original: Callable[[], float]) -> Callable[[], float]:
        def loss() -> float:
            own[:] = [p.grad.clone() for p in parameters if p.grad is not None]
            return original()

        return loss

    def put_back(original: Callable[[], None]) -> Callable[[], None]:
        def finish() -> None:
            original()
            for parameter, grad in zip(parameters, own, strict=True):
                assert parameter.grad is not None
                parameter.grad.copy_(grad)

        return finish

    replace_method(trainer.reducer, "loss", keep_own)
    replace_method(trainer.reducer, "finish", put_back)


# ---------------------------------------------------------------------------------- the optimizer


def skip_state(trainer: Trainer) -> None:
    """Rows are updated, their optimizer state is not."""
    store = trainer.embeddings.store

    def wrapper(original: Callable[..., None]) -> Callable[..., None]:
        def apply(group: int, keys_K: Tensor, *more: Any) -> None:
            before = {n: s.index_select(0, keys_K) for n, s in store.state(group).items()}
            original(group, keys_K, *more)
            for name, values in before.items():
                store.state(group)[name].index_copy_(0, keys_K, values)

        return apply

    replace_method(store, "apply", wrapper)


def local_row_state(trainer: Trainer) -> None:
    """Under column splits each rank's row-wise state is the mean square of its own columns."""
    replace_method(
        trainer.embeddings._row_squares, "new_state", lambda original: lambda gradients: {}
    )


def decay_twice(trainer: Trainer) -> None:
    """The weight decay of rows is added to their gradients twice."""
    store = trainer.embeddings.store

    def wrapper(original: Callable[..., None]) -> Callable[..., None]:
        def apply(kv_gradients: Sequence[KVGradients], lr: float) -> None:
            decay = store.optimizer.weight_decay
            decayed = [
                KVGradients(g, keys_K, grads_KD + decay * store.gather(g, keys_K))
                for g, keys_K, grads_KD in kv_gradients
            ]
            original(decayed, lr)

        return apply

    replace_method(trainer.embeddings, "apply", wrapper)


def update_per_micro_batch(trainer: Trainer) -> None:
    """Rows are updated after every micro-batch instead of once with the sum of its gradients."""
    parts: list[list[KVGradients]] = []

    def watch(
        original: Callable[..., Deferred[list[KVGradients]]],
    ) -> Callable[..., Deferred[list[KVGradients]]]:
        def begin_backward(*arguments: Any) -> Deferred[list[KVGradients]]:
            pending = original(*arguments)

            def finish() -> list[KVGradients]:
                parts.append(pending.finish())
                return parts[-1]

            return Deferred(finish)

        return begin_backward

    def wrapper(original: Callable[..., None]) -> Callable[..., None]:
        def apply(kv_gradients: Sequence[KVGradients], lr: float) -> None:
            for part in parts:
                original(sum_kv([part]), lr)
            parts.clear()

        return apply

    replace_method(trainer.embeddings, "begin_backward", watch)
    replace_method(trainer.embeddings, "apply", wrapper)


def clip_local_norm(trainer: Trainer) -> None:
    """Every rank clips by the norm of the rows it holds instead of that of all rows."""

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        def clipped(gradients: list[KVGradients]) -> list[KVGradients]:
            comm = trainer.comm
            comm.sum_scalar = lambda kind, value: value  # type: ignore[method-assign]
            try:
                result: list[KVGradients] = original(gradients)
                return result
            finally:
                del comm.sum_scalar

        return clipped

    replace_method(trainer, "_clipped", wrapper)


def ignore_schedule(trainer: Trainer) -> None:
    """Rows are updated with the learning rate before the schedule's factor."""

    def wrapper(original: Callable[[], tuple[float, float]]) -> Callable[..., Any]:
        return lambda: (original()[0], trainer.config.optim.sparse.lr)

    replace_method(trainer, "_learning_rates", wrapper)


# ---------------------------------------------------------------------------------------- lookups


def stale_rows(trainer: Trainer) -> None:
    """A lookup serves rows as they were one step ago."""
    embeddings = trainer.embeddings
    store = embeddings.store
    stale = [weights.clone() for weights in store._weights]

    def with_stale(call: Callable[[], Any]) -> Any:
        current, store._weights = store._weights, stale
        try:
            return call()
        finally:
            store._weights = current

    def watch(original: Callable[..., Deferred[Tensor]]) -> Callable[..., Deferred[Tensor]]:
        def begin_lookup(*arguments: Any, **options: Any) -> Deferred[Tensor]:
            pending: Deferred[Tensor] = with_stale(lambda: original(*arguments, **options))
            return Deferred(lambda: with_stale(pending.finish))

        return begin_lookup

    def wrapper(original: Callable[..., None]) -> Callable[..., None]:
        def apply(*arguments: Any) -> None:
            for old, new in zip(stale, store._weights, strict=True):
                old.copy_(new)
            original(*arguments)

        return apply

    replace_method(embeddings, "begin_lookup", watch)
    replace_method(embeddings, "apply", wrapper)


def wrong_owner_row(trainer: Trainer) -> None:
    """At a border between two shards of rows, the key of the last row before it is off by one."""
    border = _border(trainer.embeddings._spaces)
    assert border is not None
    part, piece = border
    # The row becomes a piece of its own, whose keys are those of the rows before them.
    stop = part.row_stops[piece]
    arrays = {
        "row_starts": np.insert(part.row_starts, piece + 1, stop - 1),
        "row_stops": np.insert(part.row_stops, piece, stop - 1),
        "key_shifts": np.insert(part.key_shifts, piece + 1, part.key_shifts[piece] - 1),
    }
    for name, values in arrays.items():
        object.__setattr__(part, name, values)


def ignore_bag_weights(trainer: Trainer) -> None:
    """The weights of ids within their bags are lost."""

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        def begin_plan(ids: JaggedIds, **options: Any) -> Any:
            return original(JaggedIds(ids.values_L, ids.offsets, ids.num_features), **options)

        return begin_plan

    replace_method(trainer.embeddings, "begin_plan", wrapper)


def sum_for_mean(trainer: Trainer) -> None:
    """Bags that are to be averaged are summed."""
    router, exchange = trainer.embeddings._router, trainer.embeddings._exchange
    sums = tuple(dataclasses.replace(f, pooling="sum") for f in router._features)
    router._features = sums
    if exchange is not None:
        exchange._features = sums


# --------------------------------------------------------------------------- what each one needs


def _nothing(situation: Situation) -> str | None:
    return None


def _ranks(situation: Situation) -> str | None:
    return None if situation.plan.world_size > 1 else "several ranks (launch.nproc=2)"


def _exchanged_table(situation: Situation) -> str | None:
    plan = situation.plan
    if plan.world_size > 1 and not all(plan.is_replicated(t) for t in situation.used_tables):
        return None
    return "several ranks and a table that isn't replicated (launch.nproc=2 sharding=row_wise)"


def _replicated_table(situation: Situation) -> str | None:
    if any(situation.plan.is_replicated(table) for table in situation.used_tables):
        return None
    return "several ranks and a replicated table (launch.nproc=2 sharding=replicated)"


def _optimizer_state(situation: Situation) -> str | None:
    if situation.config.optim.sparse.name != "sgd":
        return None
    return "a row optimizer with state (optim=adagrad); sgd has none"


def _split_row_state(situation: Situation) -> str | None:
    groups = situation.groups_of_rank()
    stretches = split_row_stretches(situation.plan, situation.tables, groups)
    is_row_wise = situation.config.optim.sparse.name in ROW_STATE
    if is_row_wise and any(s.table in situation.used_tables for s in stretches):
        return None
    return (
        "a row-wise optimizer and a table whose columns lie on several ranks "
        "(optim=rowwise_adagrad launch.nproc=2 sharding=column_wise)"
    )


def _row_border(situation: Situation) -> str | None:
    spaces = build_key_spaces(
        situation.plan, situation.tables, situation.features, situation.groups_of_rank()
    )
    if _border(spaces) is not None:
        return None
    return "a table whose rows lie on several ranks (launch.nproc=2 sharding=row_wise)"


def _mean_feature(situation: Situation) -> str | None:
    if any(feature.pooling == "mean" for feature in situation.features):
        return None
    return "a feature with pooling mean (data.schema.sparse.NAME.pooling=mean)"


def _weight_decay(situation: Situation) -> str | None:
    if situation.config.optim.sparse.weight_decay:
        return None
    return "weight decay of rows (optim.sparse.weight_decay=0.01)"


def _micro_batches(situation: Situation) -> str | None:
    if situation.config.train.accumulate > 1 and situation.config.optim.sparse.name != "sgd":
        return None
    return "micro-batches and a row optimizer with state (train.accumulate=2 optim=adagrad)"


def _clipping(situation: Situation) -> str | None:
    if situation.config.optim.clip_norm is not None and situation.plan.world_size > 1:
        return None
    return "several ranks and clipping (launch.nproc=2 optim.clip_norm=…)"


def _schedule(situation: Situation) -> str | None:
    schedule = situation.config.optim.schedule
    if schedule.warmup_steps > 1 or schedule.decay_steps:
        return None
    return "a schedule (optim.schedule.warmup_steps=10)"


_ALL: dict[Plant, Unmet] = {
    drop_duplicate_sum: _exchanged_table,
    mean_of_means: _ranks,
    forget_replicas: _replicated_table,
    dense_not_summed: _ranks,
    skip_state: on_device_only(_optimizer_state),
    local_row_state: _split_row_state,
    decay_twice: on_device_only(_weight_decay),
    update_per_micro_batch: on_device_only(_micro_batches),
    clip_local_norm: _clipping,
    ignore_schedule: _schedule,
    stale_rows: on_device_only(_nothing),
    wrong_owner_row: _row_border,
    ignore_bag_weights: _nothing,
    sum_for_mean: _mean_feature,
    **HOST_FAULTS,
}
MUTATIONS: dict[str, Plant] = {plant.__name__: plant for plant in _ALL}
"""By name, as `check.mutate` has it."""


def check_name(name: str) -> None:
    """Refuses an unknown mutation.

    Raises:
        UserError: with all that there are.
    """
    if name not in MUTATIONS:
        known = "\n".join(f"  {n:<23} {_summary(plant)}" for n, plant in MUTATIONS.items())
        raise UserError(f"check.mutate={name}: there is no such fault; the faults are\n{known}")


def check_can_show(name: str, situation: Situation) -> None:
    """Refuses a mutation that changes nothing here.

    Raises:
        UserError: with what it needs.
    """
    needed = _ALL[MUTATIONS[name]](situation)
    if needed is not None:
        raise UserError(f"check.mutate={name} can't show here: it needs {needed}")


def plant(name: str, trainer: Trainer) -> None:
    """Plants a fault into a trainer that has trained nothing yet."""
    MUTATIONS[name](trainer)


def _summary(plant: Plant) -> str:
    return (plant.__doc__ or "").strip().splitlines()[0]


def _border(spaces: Sequence[KeySpace]) -> tuple[FeatureSlice, int] | None:
    """A slice of a table that is cut into rows, and a piece of it with two rows at least."""
    for space in spaces:
        for part in space.slices:
            for piece in range(len(part.row_stops) - 1):
                if part.row_stops[piece] - part.row_starts[piece] > 1:
                    return part, piece
    return None
