"""What a step came to on every rank, brought to rank 0: losses, gradients, rows and their state.

`StepTap` watches a trainer from outside; it changes nothing. What it saw, and the rows that the
step touched, travel as `RankStep` in one `all_gather_object`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dlrm.trainer import Trainer
from embeddings.communicator import Deferred
from embeddings.kv_gradients import KVGradients
from embeddings.sharded import BatchPlan, ShardedEmbeddings
from embeddings.table_group import ColumnRange


class TablePart(NamedTuple):
    """What a rank has of some rows of a table.

    Attributes:
        table: name of the table.
        columns: column ranges, ascending.
        rows_K: row numbers, ascending.
        values: `(K, width)` by name, the columns side by side.
    """

    table: str
    columns: tuple[ColumnRange, ...]
    rows_K: Tensor
    values: Mapping[str, Tensor]


@dataclass
class RankStep:
    """One rank's part of a step.

    Attributes:
        row_B: the samples, as `Batch.row_B`.
        part_sizes: samples of each micro-batch.
        pooled: pooled vectors of each micro-batch.
        pooled_grads: the gradients by them.
        gradients: gradients of the rows held here, summed over ranks, as they were applied.
        rows: the touched rows held here, after the step.
    """

    row_B: Tensor
    part_sizes: list[int]
    pooled: list[Tensor]
    pooled_grads: list[Tensor]
    gradients: list[TablePart]
    rows: list[TablePart]


@dataclass
class StepTap:
    """What passes through a trainer during a step.

    Attributes:
        pooled: result of each lookup.
        pooled_grads: gradient that each backward begins from.
        kv_gradients: what was applied; empty for a fused kernel.
        dense_gradients: what the dense optimizer stepped with.
    """

    pooled: list[Tensor] = field(default_factory=list)
    pooled_grads: list[Tensor] = field(default_factory=list)
    kv_gradients: list[KVGradients] = field(default_factory=list)
    dense_gradients: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, trainer: Trainer) -> StepTap:
        """Watches a trainer from now on."""
        tap = cls()
        replace_method(trainer.embeddings, "begin_lookup", tap._watch_lookup)
        replace_method(trainer.embeddings, "begin_backward", tap._watch_backward)
        replace_method(trainer.embeddings, "apply", tap._watch_apply)
        trainer.dense_optimizer.register_step_pre_hook(
            lambda optimizer, args, kwargs: tap._see_dense(optimizer)
        )
        return tap

    def clear(self) -> None:
        """Forgets the last step."""
        self.pooled, self.pooled_grads = [], []
        self.kv_gradients, self.dense_gradients = [], []

    def _watch_lookup(self, original: Callable[..., Deferred[Tensor]]) -> Callable[..., Any]:
        def begin_lookup(plan: BatchPlan, **options: Any) -> Deferred[Tensor]:
            pending = original(plan, **options)

            def finish() -> Tensor:
                pooled_BS = pending.finish()
                self.pooled.append(pooled_BS.detach().clone())
                return pooled_BS

            return Deferred(finish)

        return begin_lookup

    def _watch_backward(
        self, original: Callable[..., Deferred[list[KVGradients]]]
    ) -> Callable[..., Any]:
        def begin_backward(
            plan: BatchPlan, grad_BS: Tensor, lr: float
        ) -> Deferred[list[KVGradients]]:
            self.pooled_grads.append(grad_BS.detach().clone())
            return original(plan, grad_BS, lr)

        return begin_backward

    def _watch_apply(self, original: Callable[..., None]) -> Callable[..., Any]:
        def apply(kv_gradients: Sequence[KVGradients], lr: float) -> None:
            self.kv_gradients = [
                KVGradients(entry.group, entry.keys_K, entry.grads_KD.clone())
                for entry in kv_gradients
            ]
            original(kv_gradients, lr)

        return apply

    def _see_dense(self, optimizer: torch.optim.Optimizer) -> None:
        self.dense_gradients = [
            torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
            for group in optimizer.param_groups
            for p in group["params"]
        ]


def replace_method(
    owner: object, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Puts `wrapper(method)` in place of one object's method; the class stays as it is."""
    setattr(owner, name, wrapper(getattr(owner, name)))


def gradient_parts(
    embeddings: ShardedEmbeddings, kv_gradients: Sequence[KVGradients]
) -> list[TablePart]:
    """Gradients by key as gradients by row."""
    parts = []
    num_groups = len(embeddings.store.groups)
    for group_index, keys_K, grads_KD in kv_gradients:
        if group_index >= num_groups:
            assert embeddings.host is not None
            parts += [
                TablePart(table, columns, rows_K, {"gradient": grads_KD[position_K]})
                for table, columns, rows_K, position_K in embeddings.host.own_hot_rows(
                    group_index, keys_K
                )
            ]
            continue
        group = embeddings.store.groups[group_index]
        for piece, first_key in zip(group.pieces, group.first_keys, strict=True):
            is_here = (keys_K >= first_key) & (keys_K < first_key + piece.num_rows)
            rows_K = keys_K[is_here] - first_key + piece.row_start
            values = {"gradient": grads_KD[is_here]}
            parts.append(TablePart(piece.table, piece.columns, rows_K, values))
    return parts


def row_parts(embeddings: ShardedEmbeddings, rows: Mapping[str, Tensor]) -> list[TablePart]:
    """Copies of what this rank holds of some rows, also of replicas.

    Args:
        embeddings: the tables.
        rows: by table row numbers, ascending.
    """
    embeddings.settle()
    num_rows = {table.name: table.rows for table in embeddings.tables}
    parts = []
    for table, rows_K in rows.items():
        for part in embeddings.store.read_parts(table, 0, num_rows[table]):
            is_here = (rows_K >= part.row_start) & (rows_K < part.row_stop)
            here_K = rows_K[is_here]
            values = {
                name: view.index_select(0, here_K - part.row_start)
                for name, view in part.values.items()
            }
            parts.append(TablePart(table, part.piece.columns, here_K, values))
    return parts


def assemble(
    parts: Iterable[TablePart], name: str, rows_K: Tensor, width: int, dtype: torch.dtype
) -> Tensor:
    """Whole rows from parts, `(K, width)`; 0 where no part has any.

    Args:
        parts: of one table; rows that `rows_K` lacks are an error.
        name: which of their values.
        rows_K: row numbers, ascending.
        width: columns of the result; 1 for a state that belongs to whole rows.
        dtype: of the values.
    """
    whole = torch.zeros(rows_K.numel(), width, dtype=dtype)
    for part in parts:
        if name not in part.values or not part.rows_K.numel():
            continue
        positions_K = torch.searchsorted(rows_K, part.rows_K)
        assert torch.equal(rows_K[positions_K], part.rows_K), f"table {part.table}: other rows"
        columns = torch.cat([torch.arange(start, stop) for start, stop in part.columns])
        if part.values[name].shape[1] != columns.numel():
            columns = torch.zeros(1, dtype=torch.int64)
        whole[positions_K[:, None], columns] = part.values[name]
    return whole
