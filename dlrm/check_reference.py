"""The plain model that `dlrm check` holds the sharded run against: one process, autograd, torch's
optimizers.

`PlainRun` shares with the trainer the configuration, the start values and the dense network's
forward; the loss, accumulation, clipping, schedule and updates are written here once more, as
anyone would.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from data.batch import Batch, JaggedIds
from data.manifest import Manifest
from dlrm.build import PRECISION_DTYPES, build_model, build_tables
from dlrm.check_compare import SQUARES, comparable_state
from dlrm.check_rules import Ends, UpdateRule
from dlrm.config import TrainRun
from dlrm.optim import OptimConfig, Schedule
from dlrm.scoring import autocast
from embeddings.reference import ReferenceEmbeddings
from embeddings.row_optim import RowOptimizerConfig, RowOptimizerName, state_widths
from embeddings.table import FeatureConfig

# Up to so many terms, rounding in fp32 stays well below the limits of `check_compare`.
FEW_ROWS = 16
_FEW_GRADIENTS = 1024


class RowGradients(NamedTuple):
    """A table's gradient.

    Attributes:
        rows_K: distinct rows, ascending.
        grads_KD: the gradient of each.
        magnitudes: `(K, 1)` or `(K, D)`: sum of the magnitudes of the terms that it is a sum of.
        num_lookups_K: how many terms these are.
    """

    rows_K: Tensor
    grads_KD: Tensor
    magnitudes: Tensor
    num_lookups_K: Tensor


class CapturedPart(NamedTuple):
    """A micro-batch of a rank, with what the sharded run made of it.

    Attributes:
        batch: its samples.
        pooled_BS: the pooled vectors.
        grad_BS: the gradient by them of the rank's share of the loss.
    """

    batch: Batch
    pooled_BS: Tensor
    grad_BS: Tensor


@dataclass
class PartFigures:
    """What the reference has for a `CapturedPart`, with the scales of differences.

    Attributes:
        pooled: per feature: table, its columns of `pooled_BS`, and Σ |factor · element|.
    """

    pooled: list[tuple[str, slice, Tensor, Tensor]]
    grad_BS: Tensor
    grad_scale_B1: Tensor


class EvaluatedPart(NamedTuple):
    """A micro-batch of the reference's own step.

    Attributes:
        batch: its samples.
        shares_B: of each sample's loss in that of the global batch.
        logits_B: of the samples.
        pooled_BS: the pooled vectors.
        grad_BS: the gradient by them.
        slopes_B1: the largest derivative of each logit by its pooled vectors, times the share.
    """

    batch: Batch
    shares_B: Tensor
    logits_B: Tensor
    pooled_BS: Tensor
    grad_BS: Tensor
    slopes_B1: Tensor


@dataclass
class PlainStep:
    """A step up to its gradients, which are clipped already.

    Attributes:
        loss: of the global batch.
        row_gradients: by table.
        dense_gradients: by parameter.
        clip_factor: what clipping has multiplied all gradients by.
        gradient_norm: of all gradients, before that; 0 where nothing is clipped.
        parts: of `gradients_of`: the stages.
        evaluated: of `gradients`: the micro-batches.
    """

    loss: float
    row_gradients: dict[str, RowGradients]
    dense_gradients: list[Tensor]
    clip_factor: float = 1.0
    gradient_norm: float = 0.0
    parts: list[PartFigures] = field(default_factory=list)
    evaluated: list[EvaluatedPart] = field(default_factory=list)


class _Forward(NamedTuple):
    """What a micro-batch's forward pass came to; see `EvaluatedPart`."""

    loss: Tensor
    logits_B: Tensor
    shares_B: Tensor
    slopes_B1: Tensor


class Occurrences(NamedTuple):
    """The ids of one feature: row, sample and factor of each."""

    feature: int
    table: str
    rows_L: Tensor
    samples_L: Tensor
    factors_L1: Tensor


class PlainTables(ReferenceEmbeddings):
    """`ReferenceEmbeddings` whose gradients can be seen and replaced, and whose rows written."""

    def gradient(self, table: str) -> tuple[Tensor, Tensor]:
        """Touched rows, ascending, and their gradients."""
        weight_RD = self._bags[table].weight
        if weight_RD.grad is None:
            return torch.empty(0, dtype=torch.int64), weight_RD.new_empty(0, weight_RD.shape[1])
        grad = weight_RD.grad.coalesce()
        return grad.indices()[0], grad.values()

    def set_gradient(self, table: str, rows_K: Tensor, grads_KD: Tensor) -> None:
        """Replaces the gradient; `rows_K` distinct and ascending."""
        weight_RD = self._bags[table].weight
        weight_RD.grad = torch.sparse_coo_tensor(
            rows_K[None], grads_KD, weight_RD.shape, is_coalesced=True, check_invariants=True
        )

    def drop_gradients(self) -> None:
        """Forgets what autograd left."""
        self._optimizer.zero_grad(set_to_none=True)

    def weight(self, table: str) -> Tensor:
        """The rows: the table's own memory."""
        return self._bags[table].weight.detach()

    def states(self, table: str) -> dict[str, Tensor]:
        """The states by name: the optimizer's own memory; of a table that had no gradient yet,
        zeros."""
        weight_RD = self._bags[table].weight
        found = self._optimizer.state.get(weight_RD, {})
        widths = state_widths(self._config, weight_RD.shape[1])
        return {
            name: found[name]
            if name in found
            else torch.zeros(weight_RD.shape[0], width, dtype=weight_RD.dtype)
            for name, width in widths.items()
        }

    def take(self, table: str, rows_K: Tensor) -> dict[str, Tensor]:
        """Copies of rows (`weight`) and their state."""
        whole = {"weight": self.weight(table), **self.states(table)}
        return {name: values.index_select(0, rows_K) for name, values in whole.items()}

    def put(self, table: str, rows_K: Tensor, values: Mapping[str, Tensor]) -> None:
        """Overwrites rows and their state."""
        whole = {"weight": self.weight(table), **self.states(table)}
        for name, rows in values.items():
            whole[name].index_copy_(0, rows_K, rows)


class PlainRun:
    """One process that trains the configured model on global batches.

    Args:
        config: the configuration; its precision is that of the run.
        manifest: the data's.
        total_steps: length of the run, which the schedule may depend on.
        wire_floor: values below this lose relative precision on the wire; 0 but for fp16.

    Attributes:
        has_weight: whether the batch that the gradients are of has any: without, nothing is
            updated.
        num_updates: updates so far, which Adam's bias correction counts: fewer than steps where
            batches had no weight.
    """

    def __init__(
        self, config: TrainRun, manifest: Manifest, total_steps: int, wire_floor: float = 0.0
    ) -> None:
        self._config = config
        self._wire_floor = wire_floor
        self._dtype = PRECISION_DTYPES[config.train.precision]
        self.table_configs, self.features = build_tables(config, manifest)
        sparse = config.optim.sparse
        self.rule = RowOptimizerConfig(
            name=cast(RowOptimizerName, sparse.name),
            eps=config.optim.effective_eps(sparse),
            weight_decay=sparse.weight_decay,
            beta1=sparse.beta1,
            beta2=sparse.beta2,
        )
        self.tables = PlainTables(
            self.table_configs, self.features, self.rule, dtype=self._dtype, seed=config.seed
        )
        self.model = build_model(config, manifest)
        self.dense_optimizer = _dense_optimizer(self.model, config.optim)
        self._schedule = Schedule(config.optim.schedule, total_steps)
        self._total_steps = total_steps
        self.has_weight = True
        self.num_updates = 0
        dims = {table.name: table.dim for table in self.table_configs}
        self.columns: list[slice] = []  # Of each feature, in `pooled_BS`.
        start = 0
        for feature in self.features:
            self.columns.append(slice(start, start + dims[feature.table]))
            start += dims[feature.table]

    # ------------------------------------------------------------------------------ gradients

    def gradients(self, batch: Batch) -> PlainStep:
        """Forward and backward over a whole global batch, in `train.accumulate` parts."""
        total_weight = _total_weight(batch)
        self.has_weight = total_weight > 0
        num_parts = max(1, min(self._config.train.accumulate, batch.batch_size))
        cuts = [batch.batch_size * part // num_parts for part in range(num_parts + 1)]
        loss_sum = 0.0
        evaluated: list[EvaluatedPart] = []
        for start, stop in pairwise(cuts):
            part = batch.narrow(start, stop)
            pooled_BS = self._lookup(part)
            forward = self._forward(part, pooled_BS, total_weight)
            if pooled_BS.requires_grad:  # Not without sparse features.
                pooled_BS.retain_grad()  # After `_forward`, whose derivatives would be in it too.
            forward.loss.backward()
            loss_sum += float(forward.loss.detach())
            evaluated.append(
                EvaluatedPart(
                    part,
                    forward.shares_B,
                    forward.logits_B.detach(),
                    pooled_BS.detach(),
                    _gradient_or_0(pooled_BS),
                    forward.slopes_B1,
                )
            )
        terms = [(part.batch.ids, part.slopes_B1) for part in evaluated]
        step = self._clipped(loss_sum, self._row_gradients(terms))
        return replace(step, evaluated=evaluated)

    def gradients_of(self, parts: Sequence[CapturedPart]) -> PlainStep:
        """The same for the parts of a sharded run's step, each stage from that run's own values:
        the dense network from its pooled vectors, the rows' gradients from those of its pooled
        vectors."""
        total_weight = sum(_total_weight(part.batch) for part in parts)
        self.has_weight = total_weight > 0
        loss_sum = 0.0
        figures: list[PartFigures] = []
        terms: list[tuple[JaggedIds, Tensor]] = []
        for part in parts:
            pooled_BS = self._lookup(part.batch)
            leaf_BS = part.pooled_BS.clone().requires_grad_()
            forward = self._forward(part.batch, leaf_BS, total_weight)
            forward.loss.backward()
            if pooled_BS.requires_grad:
                pooled_BS.backward(part.grad_BS)
            loss_sum += float(forward.loss.detach())
            figures.append(
                PartFigures(
                    self._pooled_by_feature(part.batch.ids, pooled_BS.detach()),
                    _gradient_or_0(leaf_BS),
                    forward.slopes_B1,
                )
            )
            terms.append((part.batch.ids, part.grad_BS.abs()))
        # Gradients travel multiplied by a power of two near the batch's weight (fp16).
        floor = self._wire_floor / max(total_weight, 1.0)
        row_gradients = self._row_gradients(terms, floor)
        return replace(self._clipped(loss_sum, row_gradients), parts=figures)

    def _lookup(self, batch: Batch) -> Tensor:
        """`pooled_BS`; without features the ids don't know how many samples there are."""
        if not self.features:
            return torch.zeros(batch.batch_size, 0, dtype=self._dtype)
        return self.tables.lookup(batch.ids)

    def _forward(self, batch: Batch, pooled_BS: Tensor, total_weight: float) -> _Forward:
        """A micro-batch's share of the mean over the global batch."""
        with autocast(self._config.train.precision):
            logits_B = self.model(batch.dense_BN.to(self._dtype), pooled_BS)
        assert batch.label_B is not None
        weight_B = torch.ones(batch.batch_size, dtype=self._dtype)
        if batch.weight_B is not None:
            weight_B = batch.weight_B.to(self._dtype)
        slopes_B1 = logits_B.new_zeros(batch.batch_size, 1)
        if pooled_BS.numel():
            (slopes_BS,) = torch.autograd.grad(logits_B.sum(), pooled_BS, retain_graph=True)
            slopes_B1 = slopes_BS.abs().amax(dim=1, keepdim=True)
        total_weight = total_weight or 1.0  # Where it is 0 all weights are, and so is the loss.
        loss = (weight_B * sample_losses(logits_B, batch.label_B)).sum() / total_weight
        shares_B = weight_B / total_weight
        slopes_B1 = slopes_B1 * weight_B.abs()[:, None] / total_weight
        return _Forward(loss, logits_B, shares_B, slopes_B1)

    # --------------------------------------------------------------------------------- update

    def set_gradients(
        self, row_gradients: Mapping[str, tuple[Tensor, Tensor]], dense: Sequence[Tensor]
    ) -> None:
        """Replaces all gradients."""
        for table, (rows_K, grads_KD) in row_gradients.items():
            self.tables.set_gradient(table, rows_K, grads_KD)
        for parameter, gradient in zip(self.model.parameters(), dense, strict=True):
            parameter.grad = gradient.clone()

    def learning_rates(self, step: int) -> tuple[float, float]:
        """(dense, sparse) of a step, counted from 0; after its end the run begins anew."""
        factor = self._schedule.factor(step % self._total_steps)
        return self._config.optim.dense.lr * factor, self._config.optim.sparse.lr * factor

    def apply(self, step: int) -> None:
        """Updates everything from the gradients, which are dropped; nothing at all after a batch
        whose example weights sum to 0."""
        if not self.has_weight:
            self.dense_optimizer.zero_grad()
            self.tables.drop_gradients()
            return
        lr_dense, lr_sparse = self.learning_rates(step)
        self.tables.apply(lr_sparse)
        self.dense_optimizer.param_groups[0]["lr"] = lr_dense
        self.dense_optimizer.step()
        self.dense_optimizer.zero_grad()
        self.num_updates += 1

    def dense_state(self) -> list[dict[str, Tensor]]:
        """Per parameter its state by name: the optimizer's own memory."""
        return optimizer_state(self.model, self.dense_optimizer)

    def update_rules(self) -> tuple[UpdateRule, UpdateRule]:
        """Those of rows and of dense weights."""
        optim = self._config.optim
        dense = UpdateRule.of_dense(optim.dense, optim.effective_eps(optim.dense))
        return UpdateRule.of_rows(self.rule), dense

    def update_spread(
        self, step: int, before: Mapping[str, Tensor], grads_KD: Tensor, margin: Tensor
    ) -> dict[str, Tensor]:
        """By how much rows and state may differ after a step whose gradients differ by up to
        `margin`, by name: the largest less the smallest of what the rule may come to. Called before
        `apply`; by nothing where that updates nothing."""
        if not self.has_weight:
            return {}
        rule, (_, lr) = UpdateRule.of_rows(self.rule), self.learning_rates(step)
        state = {}
        for name in rule.states:
            values = comparable_state(name, before[name].double())
            state[name] = Ends(values, values)
        grads = Ends.around(grads_KD.double(), margin.double())
        ends = rule.ends(lr, self.num_updates + 1, grads, state)
        for name in SQUARES & ends.keys():
            ends[name] = ends[name].squares()
        return {name: high - low for name, (low, high) in ends.items()}

    # -------------------------------------------------------------------------------- private

    def _clipped(self, loss: float, row_gradients: dict[str, RowGradients]) -> PlainStep:
        """Scales all gradients together where `optim.clip_norm` says so."""
        dense = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.model.parameters()]
        clip_norm = self._config.optim.clip_norm
        if clip_norm is None:
            return PlainStep(loss, row_gradients, dense)
        everything = [*dense, *(g.grads_KD for g in row_gradients.values())]
        norm = sum(float(g.double().square().sum()) for g in everything) ** 0.5
        factor = min(1.0, clip_norm / (norm + 1e-6))
        dense = [gradient * factor for gradient in dense]
        row_gradients = {
            table: g._replace(grads_KD=g.grads_KD * factor, magnitudes=g.magnitudes * factor)
            for table, g in row_gradients.items()
        }
        own = {table: (g.rows_K, g.grads_KD) for table, g in row_gradients.items()}
        self.set_gradients(own, dense)
        return PlainStep(loss, row_gradients, dense, factor, norm)

    def _row_gradients(
        self, terms: Sequence[tuple[JaggedIds, Tensor]], floor: float = 0.0
    ) -> dict[str, RowGradients]:
        """What autograd left, with magnitudes.

        Args:
            terms: per part its ids and the magnitude of a term with the factor 1: `(B, 1)`, or by
                column of `pooled_BS`.
            floor: least magnitude of a term.
        """
        rows: dict[str, list[Tensor]] = {}
        magnitudes: dict[str, list[Tensor]] = {}
        for ids, size_BS in terms:
            for found in self.occurrences(ids):
                columns = self.columns[found.feature] if size_BS.shape[1] > 1 else slice(0, 1)
                sizes_LD = size_BS[:, columns].index_select(0, found.samples_L)
                factors_L1 = found.factors_L1.abs()
                sizes_LD = sizes_LD * factors_L1 + floor * factors_L1.clamp(min=1)
                rows.setdefault(found.table, []).append(found.rows_L)
                magnitudes.setdefault(found.table, []).append(sizes_LD)
        gradients: dict[str, RowGradients] = {}
        for table in self.table_configs:
            rows_K, grads_KD = self.tables.gradient(table.name)
            if table.name not in rows:
                continue
            positions_L = torch.searchsorted(rows_K, torch.cat(rows[table.name]))
            sizes_LD = torch.cat(magnitudes[table.name])
            sums = sizes_LD.new_zeros(rows_K.numel(), sizes_LD.shape[1])
            sums.index_add_(0, positions_L, sizes_LD)
            counts_K = torch.bincount(positions_L, minlength=rows_K.numel())
            if self._dtype == torch.float32:
                sums *= rounding_growth(counts_K, _FEW_GRADIENTS)[:, None]
            gradients[table.name] = RowGradients(rows_K, grads_KD, sums, counts_K)
        return gradients

    def _pooled_by_feature(
        self, ids: JaggedIds, pooled_BS: Tensor
    ) -> list[tuple[str, slice, Tensor, Tensor]]:
        """Per feature: table, columns, pooled vectors, and the sums of the magnitudes."""
        result = []
        for found in self.occurrences(ids):
            columns = self.columns[found.feature]
            rows_LD = self.tables.weight(found.table).index_select(0, found.rows_L).abs()
            terms_LD = (rows_LD + self._wire_floor) * found.factors_L1.abs()
            sizes_BD = torch.zeros_like(pooled_BS[:, columns])
            sizes_BD.index_add_(0, found.samples_L, terms_LD)
            counts_B = torch.bincount(found.samples_L, minlength=ids.batch_size)
            sizes_BD *= rounding_growth(counts_B, FEW_ROWS)[:, None]
            result.append((found.table, columns, pooled_BS[:, columns], sizes_BD))
        return result

    def occurrences(self, ids: JaggedIds) -> Iterator[Occurrences]:
        """Every lookup, feature by feature."""
        lengths_FB = ids.lengths_FB()
        starts = ids.offsets[:: ids.batch_size] if ids.batch_size else ids.offsets.new_zeros(1)
        for index, feature in enumerate(self.features):
            if not ids.batch_size:
                continue
            start, stop = int(starts[index]), int(starts[index + 1])
            lengths_B = lengths_FB[index]
            factors_L = torch.ones(stop - start, dtype=self._dtype)
            if ids.weights_L is not None:
                factors_L = ids.weights_L[start:stop].to(self._dtype)
            samples_L = torch.repeat_interleave(torch.arange(ids.batch_size), lengths_B)
            if feature.pooling == "mean":
                factors_L = factors_L / lengths_B[samples_L]
            yield Occurrences(
                index, feature.table, ids.values_L[start:stop], samples_L, factors_L[:, None]
            )


def sample_losses(logits_B: Tensor, label_B: Tensor) -> Tensor:
    """Binary cross-entropy of each sample, in nats."""
    return functional.binary_cross_entropy_with_logits(
        logits_B, label_B.to(logits_B.dtype), reduction="none"
    )


def _gradient_or_0(values: Tensor) -> Tensor:
    """What autograd left; zeros where nothing depends on the values."""
    return torch.zeros_like(values) if values.grad is None else values.grad


def rounding_growth(counts: Tensor, few: int) -> Tensor:
    """How much more the rounding of a long sum may come to than that of `few` terms.

    In all likelihood it grows as the root of the sum's length (Higham and Mary, "A new approach to
    probabilistic rounding error analysis", 2019).
    """
    return (counts / few).clamp(min=1).sqrt()


def touched_rows(features: Sequence[FeatureConfig], ids: JaggedIds) -> dict[str, Tensor]:
    """Per table the distinct rows that a batch looks up, ascending."""
    rows: dict[str, list[Tensor]] = {}
    for index, feature in enumerate(features):
        start = int(ids.offsets[index * ids.batch_size])
        stop = int(ids.offsets[(index + 1) * ids.batch_size])
        rows.setdefault(feature.table, []).append(ids.values_L[start:stop])
    return {table: torch.cat(parts).unique() for table, parts in rows.items()}


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
    """Per parameter the state that has a value for each weight."""
    return [
        {
            name: value
            for name, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor) and value.shape == parameter.shape and name != "step"
        }
        for parameter in model.parameters()
    ]


def _dense_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """torch's own, with the kernel of training: which of torch's kernels isn't in question."""
    dense = config.dense
    more: dict[str, Any] = {"weight_decay": dense.weight_decay, "fused": True}
    if dense.name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=dense.lr, **more)
    more["eps"] = config.effective_eps(dense)
    if dense.name == "adagrad":
        return torch.optim.Adagrad(model.parameters(), lr=dense.lr, **more)
    more["betas"] = (dense.beta1, dense.beta2)
    rule = torch.optim.Adam if dense.name == "adam" else torch.optim.AdamW
    return rule(model.parameters(), lr=dense.lr, **more)


def _total_weight(batch: Batch) -> float:
    if batch.weight_B is None:
        return float(batch.batch_size)
    return float(batch.weight_B.double().sum())
