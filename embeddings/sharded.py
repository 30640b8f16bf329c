"""`ShardedEmbeddings`: the four calls through which the trainer sees every table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from data.batch import JaggedIds
from embeddings.fused import FusedGroup, load_fbgemm, why_not_fused
from embeddings.plan import Plan, local_groups, single_process_plan
from embeddings.router import BatchPlan, GroupPlan, Router, sort_keys
from embeddings.row_optim import RowOptimizerConfig
from embeddings.store import RowStore
from embeddings.table import FeatureConfig, TableConfig, validate_tables

Backend = Literal["auto", "torch", "fbgemm"]


@dataclass(frozen=True, eq=False)
class KVGradients:
    """Gradients of one table group's rows: the only form they exist in outside a fused kernel.

    Attributes:
        group: index of the table group.
        keys_K: int64 keys, sorted and distinct.
        grads_KD: the gradient of each key's row, duplicates summed.
    """

    group: int
    keys_K: Tensor
    grads_KD: Tensor


class ShardedEmbeddings:
    """Every table of the model behind four calls; the only class the trainer sees.

    Who owns what: the `plan` says which rank holds which rectangle, the `store` holds this rank's
    weights and optimizer state, the router is stateless, and a `BatchPlan` holds a batch's ids.
    The pooled vectors and their gradient belong to the caller.

    Phases of a step, in order:

        plan_batch(ids)            ids only; may run any number of steps ahead
        lookup(plan)               → pooled_BS, a leaf that the dense network differentiates
        backward(plan, grad, lr)   → KV gradients (torch), or the update itself (fbgemm)
        apply(gradients, lr)       rows and state updated; once per optimizer step, on every step

    With one process no call communicates: there are no collectives.

    Backends. `torch`: a lookup is an embedding bag over a group's flat array; its backward is the
    transposed lookup, again an embedding bag, over the gradient seen as one row per bag: the sum
    for each key is made by one thread in a fixed order, so equal runs are equal to the bit. Any
    dim, fp32 or fp64. `fbgemm`: see `embeddings.fused`; `backward` updates at once and returns no
    gradients. Bag weights are not trained.

    Attributes:
        plan: who owns what; here `single_process_plan`.
        store: the rows and their state.
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
        backend: `auto` takes fbgemm where it is legal and loads, else torch.
        accumulate: micro-batches per optimizer step (`train.accumulate`); only tells whether a
            fused update is legal, the caller sums with `sum_kv`.
        clip_norm: bound of the global gradient norm or None; likewise.
        world_size: number of ranks; only 1 so far.

    Raises:
        ValueError: naming the config key, for a type, backend or world size that can't be had.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        features: Sequence[FeatureConfig],
        optimizer: RowOptimizerConfig,
        *,
        dtype: torch.dtype,
        seed: int,
        backend: Backend = "auto",
        accumulate: int = 1,
        clip_norm: float | None = None,
        world_size: int = 1,
    ) -> None:
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"tables are fp32 or fp64, not {dtype} (train.precision)")
        if world_size != 1:
            raise ValueError(f"tables are not yet sharded: launch.nproc is {world_size}, must be 1")
        validate_tables(tables, features)
        self.plan: Plan = single_process_plan(tables)
        self.plan.validate(tables)
        groups = local_groups(self.plan, rank=0, dtype=dtype, optimizer=optimizer.name)
        illegal = why_not_fused(groups, optimizer, accumulate=accumulate, clip_norm=clip_norm)
        self.backend, self.backend_message = _choose_backend(backend, illegal)
        self.store = RowStore(tables, groups, optimizer, seed=seed)
        self._dtype = dtype
        self._router = Router(tables, features, groups)

        dims = {table.name: table.dim for table in tables}
        offsets = [0]
        for feature in features:
            offsets.append(offsets[-1] + dims[feature.table])
        self.feature_offsets: tuple[int, ...] = tuple(offsets)
        # Per group the columns of pooled_BS that its features fill, as runs of adjacent features.
        self._column_runs = [
            _column_runs(features, self.feature_offsets)
            for features in self._router.features_of_group
        ]
        self._fused: dict[int, FusedGroup] = {}
        if self.backend == "fbgemm":
            for group, group_features in enumerate(self._router.features_of_group):
                if group_features:
                    self._fused[group] = FusedGroup(self.store, group, len(group_features))

    def plan_batch(self, ids: JaggedIds, *, training: bool = True) -> BatchPlan:
        """Check and route the ids of a batch. Reads and changes no row.

        Args:
            ids: `F` features, `B` samples, on the CPU.
            training: prepare for `backward` too; without, it would be prepared there when needed.

        Raises:
            IdOutOfRange: for the first id that is not a row of its table.
        """
        plan = self._router.plan_batch(ids)
        if self.backend == "torch":
            for group in plan.groups:
                # Both are computed at their first use and kept in the plan: use them here, ahead
                # of the step.
                _ = group.sample_major
                if training:
                    _ = group.unique
        return plan

    def lookup(self, plan: BatchPlan, *, training: bool = True) -> Tensor:
        """Pooled vectors of a batch.

        Args:
            plan: from `plan_batch`.
            training: whether the result is a leaf that requires a gradient.

        Returns:
            `pooled_BS`, contiguous; an empty bag's columns are 0.
        """
        num_columns = self.feature_offsets[-1]
        used = [group for group, runs in enumerate(self._column_runs) if runs]
        if len(used) == 1:
            pooled_BS = self._lookup_group(used[0], plan.groups[used[0]])
        else:
            pooled_BS = torch.empty(plan.batch_size, num_columns, dtype=self._dtype)
            for group in used:
                self._scatter_columns(
                    group, self._lookup_group(group, plan.groups[group]), pooled_BS
                )
        return pooled_BS.requires_grad_(training)

    def backward(self, plan: BatchPlan, grad_BS: Tensor, lr: float) -> list[KVGradients]:
        """From the gradient of the pooled vectors to those of the rows.

        Args:
            plan: the batch that was looked up.
            grad_BS: gradient of the loss by `lookup`'s result, of its shape and type.
            lr: learning rate of this step; the fused update takes place here.

        Returns:
            One `KVGradients` per group (torch), or an empty list (fbgemm: rows are updated).
        """
        expected = (plan.batch_size, self.feature_offsets[-1])
        assert grad_BS.shape == expected, f"gradient {tuple(grad_BS.shape)}, pooled {expected}"
        assert grad_BS.dtype == self._dtype, f"gradient {grad_BS.dtype}, tables {self._dtype}"
        gradients: list[KVGradients] = []
        for index, group in enumerate(plan.groups):
            if not group.features:
                continue
            group_grad_BS = self._gather_columns(index, grad_BS)
            if self.backend == "fbgemm":
                self._fused[index].backward_and_update(group, group_grad_BS, lr)
            else:
                gradients.append(self._backward_group(index, group, group_grad_BS))
        return gradients

    def apply(self, kv_gradients: Sequence[KVGradients], lr: float) -> None:
        """Update rows and their state; called once per optimizer step, whatever the backend.

        Args:
            kv_gradients: at most one per group, from `backward` or `sum_kv`; empty for fbgemm.
            lr: learning rate of this step.
        """
        groups = [gradients.group for gradients in kv_gradients]
        assert len(set(groups)) == len(groups), f"one gradient per group, not {groups}: use sum_kv"
        self.store.begin_step()
        for gradients in kv_gradients:
            self.store.apply(gradients.group, gradients.keys_K, gradients.grads_KD, lr)

    def _lookup_group(self, index: int, group: GroupPlan) -> Tensor:
        """`(B, F·D)` of a group's features."""
        if self.backend == "fbgemm":
            return self._fused[index].lookup(group)
        bags = group.sample_major
        pooled = _embedding_bag(
            self.store.weights(index), bags.keys_L, bags.offsets, bags.weights_L
        )
        return pooled.view(group.batch_size, len(group.features) * self.store.groups[index].dim)

    def _backward_group(self, index: int, group: GroupPlan, grad_BS: Tensor) -> KVGradients:
        unique = group.unique
        bag_grads = grad_BS.reshape(-1, self.store.groups[index].dim)
        grads_KD = _embedding_bag(bag_grads, unique.bags_L, unique.starts, unique.weights_L)
        return KVGradients(index, unique.keys_K, grads_KD)

    def _scatter_columns(self, group: int, group_BS: Tensor, pooled_BS: Tensor) -> None:
        """Copy a group's columns to their places in the pooled vectors of all groups."""
        position = 0
        for start, stop in self._column_runs[group]:
            pooled_BS[:, start:stop] = group_BS[:, position : position + stop - start]
            position += stop - start

    def _gather_columns(self, group: int, grad_BS: Tensor) -> Tensor:
        """A group's columns of the gradient; the gradient itself where the group has them all."""
        runs = self._column_runs[group]
        if runs == [(0, self.feature_offsets[-1])]:
            return grad_BS
        return torch.cat([grad_BS[:, start:stop] for start, stop in runs], dim=1)


def sum_kv(micro_batches: Sequence[Sequence[KVGradients]]) -> list[KVGradients]:
    """Sum the gradients of several micro-batches, key by key.

    Args:
        micro_batches: results of `ShardedEmbeddings.backward`, in the order of the samples.

    Returns:
        One `KVGradients` per group that occurs, keys sorted and distinct. Equal keys are summed in
        the order of the micro-batches.
    """
    by_group: dict[int, list[KVGradients]] = {}
    for micro_batch in micro_batches:
        for gradients in micro_batch:
            by_group.setdefault(gradients.group, []).append(gradients)
    summed: list[KVGradients] = []
    for group, parts in sorted(by_group.items()):
        if len(parts) == 1:
            summed.append(parts[0])
            continue
        keys_K, order_L, starts = sort_keys(torch.cat([part.keys_K for part in parts]))
        grads_LD = torch.cat([part.grads_KD for part in parts])
        summed.append(KVGradients(group, keys_K, _embedding_bag(grads_LD, order_L, starts, None)))
    return summed


def _embedding_bag(
    rows_RD: Tensor, index_L: Tensor, offsets: Tensor, weights_L: Tensor | None
) -> Tensor:
    """(Weighted) sum of `rows_RD[index_L]` per bag; an empty bag gives 0."""
    if not index_L.numel():
        return torch.zeros(offsets.numel() - 1, rows_RD.shape[1], dtype=rows_RD.dtype)
    with torch.no_grad():
        return F.embedding_bag(
            index_L,
            rows_RD,
            offsets,
            mode="sum",
            per_sample_weights=weights_L,
            include_last_offset=True,
        )


def _choose_backend(requested: Backend, illegal: str | None) -> tuple[str, str]:
    """The backend to use and one line on why.

    Raises:
        ValueError: where fbgemm is asked for by name and can't be had, or the name is unknown.
    """
    if requested not in ("auto", "torch", "fbgemm"):
        raise ValueError(f"train.backend is {requested!r}, must be 'auto', 'torch' or 'fbgemm'")
    if requested == "torch":
        return "torch", "torch: as train.backend says"
    reason = illegal
    if reason is None:
        status = load_fbgemm()
        if status.available:
            return "fbgemm", f"fbgemm: fused updates with {status.message}"
        reason = status.message
    if requested == "fbgemm":
        raise ValueError(f"train.backend=fbgemm can't be used: {reason}; set train.backend=torch")
    return "torch", f"torch: {reason}"


def _column_runs(features: Sequence[int], feature_offsets: Sequence[int]) -> list[tuple[int, int]]:
    """Columns of the features as half-open ranges, adjacent ones merged."""
    runs: list[tuple[int, int]] = []
    for feature in features:
        start, stop = feature_offsets[feature], feature_offsets[feature + 1]
        if runs and runs[-1][1] == start:
            start = runs.pop()[0]
        runs.append((start, stop))
    return runs
