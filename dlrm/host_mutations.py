"""Known faults of tables in host memory for `check.mutate=NAME`; see `dlrm.mutations`.

Each is planted into one trainer's `HostTables` or steps, from outside, and none changes what is
communicated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dlrm.check_gather import replace_method
from dlrm.pipeline import PlannedBatch, weight_sum
from embeddings.communicator import Deferred
from embeddings.host.cold_rows import ColdRows, Forward, StagedRows
from embeddings.host.host_tables import HostTables
from embeddings.kv_gradients import KVGradients, sum_kv

if TYPE_CHECKING:
    from dlrm.mutations import Situation
    from dlrm.trainer import Trainer

Int64Array = npt.NDArray[np.int64]


# ------------------------------------------------------------------------------------ on the way


def drop_forwarding(trainer: Trainer) -> None:
    """A staged row that a step before it updates isn't forwarded: it stays as it was at staging."""
    for cold in _cold_rows(trainer):
        _read_all_at_staging(cold)
        replace_method(cold, "_forward", lambda original: lambda records, forward: None)


def drop_forwarded_state(trainer: Trainer) -> None:
    """Of a row that is forwarded the weights come, its optimizer state stays as at staging."""

    def plant(cold: ColdRows) -> None:
        def wrapper(original: Callable[..., None]) -> Callable[..., None]:
            def forward_weights(records: Tensor, forward: Forward) -> None:
                target = forward.target.buffer.device_KR
                rows_M = torch.from_numpy(forward.target_M).to(target.device)
                state = slice(cold._layout.dim, None)
                before = target.index_select(0, rows_M)[:, state]
                original(records, forward)
                target[rows_M, state] = before

            return forward_weights

        _read_all_at_staging(cold)
        replace_method(cold, "_forward", wrapper)

    for cold in _cold_rows(trainer):
        plant(cold)


def drop_flush(trainer: Trainer) -> None:
    """What is to be brought back where all rows have to be in the store is dropped."""
    host = _host(trainer)

    def forget_hot(hot: Any) -> None:
        hot._is_newer_H[:] = False

    def forget_staged(cold: ColdRows) -> None:
        for staged in cold._window:
            staged.newer = []

    # Writes that are under way still end before the rows are read.
    def before(forget: Callable[[Any], None], rows: Any) -> None:
        def wrapper(original: Callable[[], None]) -> Callable[[], None]:
            def settle() -> None:
                forget(rows)
                original()

            return settle

        replace_method(rows, "settle", wrapper)

    for hot in host.hot.values():
        before(forget_hot, hot)
    for cold in _cold_rows(trainer):
        before(forget_staged, cold)


def read_before_write(trainer: Trainer) -> None:
    """A gather doesn't wait for the writes of the step before: it gets their rows as they were."""
    for cold in _cold_rows(trainer):
        _serve_what_was_before(cold)


def _serve_what_was_before(cold: ColdRows) -> None:
    """By hand, since how far a write has come when it is overtaken is nobody's to say."""
    overtaken: list[tuple[Int64Array, list[npt.NDArray[Any]]]] = []

    def watch(original: Callable[..., None]) -> Callable[..., None]:
        def retire(*, waits: bool) -> None:
            staged = cold._window[0]
            keys_M = staged.keys_K[~staged.is_held_later_K[staged.position_K]]
            overtaken[:] = [(keys_M, [array[keys_M] for array in cold._arrays])]
            original(waits=waits)

        return retire

    def wrapper(original: Callable[..., StagedRows]) -> Callable[..., StagedRows]:
        def stage(*arguments: Any, **options: Any) -> StagedRows:
            staged = original(*arguments, **options)
            if overtaken:
                keys_M, before = overtaken.pop()
                is_held_M, position_M = staged.find(keys_M)
                is_read_M = is_held_M & (position_M < staged.num_fetched)
                _put(cold, staged, position_M[is_read_M], [a[is_read_M] for a in before])
            return staged

        return stage

    replace_method(cold, "retire", watch)
    replace_method(cold, "stage", wrapper)


def _read_all_at_staging(cold: ColdRows) -> None:
    """Has records that are to be forwarded hold what the store has of them when they are staged."""

    def wrapper(original: Callable[..., StagedRows]) -> Callable[..., StagedRows]:
        def stage(keys_K: Int64Array, *arguments: Any, **options: Any) -> StagedRows:
            staged = original(keys_K, *arguments, **options)
            is_forwarded_K = staged.position_K >= staged.num_fetched
            keys_M = keys_K[is_forwarded_K]
            rows = [array[keys_M] for array in cold._arrays]
            _put(cold, staged, staged.position_K[is_forwarded_K], rows)
            return staged

        return stage

    replace_method(cold, "stage", wrapper)


def _put(
    cold: ColdRows, staged: StagedRows, position_M: Int64Array, rows: list[npt.NDArray[Any]]
) -> None:
    """Puts weights and states into records, when nobody else reads or writes the buffer."""
    if not position_M.size:
        return
    if staged.buffer.emptied is not None:
        staged.buffer.emptied.wait()
    assert staged.ready is not None
    staged.ready.wait()
    records = staged.buffer.device_KR
    rows_M = torch.from_numpy(position_M).to(records.device)
    for values, columns in zip(rows, cold._layout.columns, strict=True):
        records[rows_M, columns] = torch.from_numpy(values).to(records.device)


# --------------------------------------------------------------------------------------- in parts


def mean_of_parts(trainer: Trainer) -> None:
    """The loss of each part of a batch is divided by its own samples; the parts are averaged."""

    def wrapper(original: Callable[[PlannedBatch], float]) -> Callable[[PlannedBatch], float]:
        def step(planned: PlannedBatch) -> float:
            weights = [weight_sum(micro) for micro, _ in planned.micro_batches]
            num_parts, own = sum(1 for weight in weights if weight), sum(weights)
            # A rank's share of the loss is its share of the weight, as it should be.
            micro = [
                (batch, dataclasses.replace(plan, total_weight=plan.total_weight * factor))
                for (batch, plan), factor in zip(
                    planned.micro_batches,
                    (weight * num_parts / own if weight else 1.0 for weight in weights),
                    strict=True,
                )
            ]
            return original(PlannedBatch(planned.batch, micro))

        return step

    replace_method(trainer, "step", wrapper)


def update_per_part(trainer: Trainer) -> None:
    """Rows and their state are updated after each part of a batch instead of once with the sum."""
    embeddings, host = trainer.embeddings, _host(trainer)
    update = embeddings.apply
    parts_left = 0

    def count(original: Callable[[PlannedBatch], float]) -> Callable[[PlannedBatch], float]:
        def step(planned: PlannedBatch) -> float:
            nonlocal parts_left
            parts_left = len(planned.micro_batches)
            return original(planned)

        return step

    def wrapper(
        original: Callable[..., Deferred[list[KVGradients]]],
    ) -> Callable[..., Deferred[list[KVGradients]]]:
        def begin_backward(plan: Any, grad_BS: Tensor, lr: float) -> Deferred[list[KVGradients]]:
            pending = original(plan, grad_BS, lr)

            def finish() -> list[KVGradients]:
                nonlocal parts_left
                gradients = pending.finish()
                parts_left -= 1
                if not parts_left:
                    return gradients
                host.retire = lambda: None  # type: ignore[method-assign]  # More is to come.
                try:
                    update(sum_kv([gradients]), lr)
                finally:
                    del host.retire
                return []

            return Deferred(finish)

        return begin_backward

    replace_method(trainer, "step", count)
    replace_method(embeddings, "begin_backward", wrapper)


def _host(trainer: Trainer) -> HostTables:
    host = trainer.embeddings.host
    assert host is not None
    return host


def _cold_rows(trainer: Trainer) -> Iterator[ColdRows]:
    yield from _host(trainer)._cold.values()


# --------------------------------------------------------------------------- what each one needs


def _uses_host(situation: Situation) -> bool:
    in_host = {shard.table for shard in situation.plan.shards if shard.memory == "host"}
    return bool(in_host & situation.used_tables)


def _staged_ahead(situation: Situation) -> str | None:
    if _uses_host(situation) and situation.config.sharding.host.mode == "lookahead":
        return None
    return "rows staged ahead (sharding.memory=host sharding.host.mode=lookahead)"


def _state_staged_ahead(situation: Situation) -> str | None:
    if _staged_ahead(situation) is None and situation.config.optim.sparse.name != "sgd":
        return None
    return (
        "a row optimizer with state (sgd has none) and rows staged ahead (optim=adagrad "
        "sharding.memory=host sharding.host.mode=lookahead)"
    )


def _newer_than_the_store(situation: Situation) -> str | None:
    host = situation.config.sharding.host
    if _uses_host(situation) and (host.hot_mb > 0 or host.mode == "lookahead"):
        return None
    return (
        "tables in host memory, and rows that are newer on the device (sharding.memory=host "
        "sharding.host.mode=gather sharding.host.hot_mb=64)"
    )


def _written_behind(situation: Situation) -> str | None:
    mode = situation.config.sharding.host.mode
    if _uses_host(situation) and mode in ("lookahead", "hotline"):
        return None
    return (
        "rows that are written back while others are read (sharding.memory=host "
        "sharding.host.mode=lookahead)"
    )


def _parts(situation: Situation) -> str | None:
    host = situation.config.sharding.host
    if _uses_host(situation) and host.mode == "hotline" and host.hot_mb > 0:
        return None
    return (
        "batches computed in two parts (sharding.memory=host sharding.host.mode=hotline "
        "sharding.host.hot_mb=64)"
    )


def on_device_only(
    unmet: Callable[[Situation], str | None],
) -> Callable[[Situation], str | None]:
    """For a fault that is planted into rows which are always in the store."""

    def also(situation: Situation) -> str | None:
        if _uses_host(situation):
            return "tables in device memory (sharding.memory=device)"
        return unmet(situation)

    return also


HOST_FAULTS: dict[Callable[[Trainer], None], Callable[[Situation], str | None]] = {
    drop_forwarding: _staged_ahead,
    drop_forwarded_state: _state_staged_ahead,
    drop_flush: _newer_than_the_store,
    read_before_write: _written_behind,
    mean_of_parts: _parts,
    update_per_part: _parts,
}
"""Each fault and what it needs to show."""
