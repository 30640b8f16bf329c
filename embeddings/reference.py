"""The boring oracle: one `nn.EmbeddingBag` per table, autograd, and torch's own optimizers.

Slow and obvious on purpose. Tests and `dlrm check` hold `ShardedEmbeddings` against it; it shares
with it only the start values and the meaning of the configs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from data.batch import JaggedIds
from embeddings.field_checks import shown, table_dtype, whole_number
from embeddings.row_optim import RowOptimizerConfig
from embeddings.table import FeatureConfig, TableConfig, fill_uniform, validate_tables


class ReferenceEmbeddings:
    """Tables as autograd parameters with sparse gradients.

    A step is `pooled_BS = lookup(ids)`, the caller's `backward()`, then `apply(lr)`. Several
    lookups and backwards before one `apply` accumulate.

    Args:
        tables: every table.
        features: every sparse feature, in the order of the batches' ids.
        optimizer: update rule of the rows and its constants.
        dtype: fp32 or fp64.
        seed: the run's seed; the start values are those of `ShardedEmbeddings`.

    Raises:
        ValueError: where names repeat, a feature's table is unknown, or an argument is of another
            type.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        features: Sequence[FeatureConfig],
        optimizer: RowOptimizerConfig,
        *,
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        self._dtype = table_dtype(dtype)
        seed = whole_number("seed", seed)
        if not isinstance(optimizer, RowOptimizerConfig):
            raise ValueError(f"optimizer is {shown(optimizer)}, must be a RowOptimizerConfig")
        validate_tables(tables, features)
        self._features = tuple(features)
        self._config = optimizer
        self._bags: dict[str, nn.EmbeddingBag] = {}
        for table in tables:
            weight_RD = torch.empty(table.rows, table.dim, dtype=dtype)
            fill_uniform(
                weight_RD,
                seed=seed,
                table_name=table.name,
                row_start=0,
                col_start=0,
                dim=table.dim,
                bound=table.default_bound,
            )
            self._bags[table.name] = nn.EmbeddingBag(
                table.rows,
                table.dim,
                mode="sum",
                sparse=True,
                include_last_offset=True,
                _weight=weight_RD,
            )
        params = [param for bag in self._bags.values() for param in bag.parameters()]
        # torch refuses an optimizer of nothing; without tables this parameter never has a gradient.
        self._optimizer = _build_optimizer(optimizer, params or [nn.Parameter(torch.empty(0, 0))])

    def lookup(self, ids: JaggedIds) -> Tensor:
        """Pooled vectors `pooled_BS`, connected to the tables by autograd."""
        pooled: list[Tensor] = []
        offsets, batch_size = ids.offsets, ids.batch_size
        for index, feature in enumerate(self._features):
            bag = self._bags[feature.table]
            bounds = offsets[index * batch_size : (index + 1) * batch_size + 1]
            start, stop = int(bounds[0]), int(bounds[-1])
            weights_L = None
            if ids.weights_L is not None:
                weights_L = ids.weights_L[start:stop].to(bag.weight.dtype)
            pooled_BD = bag(ids.values_L[start:stop], bounds - start, per_sample_weights=weights_L)
            if feature.pooling == "mean":
                pooled_BD = pooled_BD / bounds.diff().clamp(min=1).unsqueeze(1)
            pooled.append(pooled_BD)
        if not pooled:
            return torch.zeros(ids.batch_size, 0, dtype=self._dtype)
        return torch.cat(pooled, dim=1)

    def apply(self, lr: float) -> None:
        """Update every table from the gradients that autograd left, and drop these."""
        # torch warns where nobody has said whether to check its sparse tensors; here they may be.
        with torch.sparse.check_sparse_tensor_invariants(True):
            if self._config.weight_decay:
                self._add_weight_decay()
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _add_weight_decay(self) -> None:
        """Add the decay to the gradients of the touched rows."""
        for bag in self._bags.values():
            weight_RD = bag.weight
            if weight_RD.grad is None:
                continue
            grad = weight_RD.grad.coalesce()
            rows_K = grad.indices()[0]
            decayed_KD = grad.values() + self._config.weight_decay * weight_RD.detach()[rows_K]
            weight_RD.grad = torch.sparse_coo_tensor(
                grad.indices(), decayed_KD, grad.shape, is_coalesced=True
            )

    def read(self, table: str) -> dict[str, Tensor]:
        """Copies of a table's weights and state, under the names that `RowStore.read` uses."""
        weight_RD = self._bags[table].weight
        values = {"weight": weight_RD.detach().clone()}
        for name, value in self._optimizer.state[weight_RD].items():
            if name != "step":
                values[name] = value.detach().clone()
        return values


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one number of state per row: the sum over steps of the row's mean square.

    As in FBGEMM's and facebookresearch/dlrm's row-wise Adagrad. Takes sparse gradients.

    Args:
        params: 2-D parameters.
        lr: learning rate.
        eps: added to the square root in the denominator.
    """

    def __init__(self, params: list[nn.Parameter], lr: float, eps: float) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the touched rows."""
        for group in self.param_groups:
            for weight_RD in group["params"]:
                if weight_RD.grad is None:
                    continue
                state = self.state[weight_RD]
                if not state:
                    state["sum"] = weight_RD.new_zeros(weight_RD.shape[0], 1)
                grad = weight_RD.grad.coalesce()  # Each touched row once, its duplicates summed.
                rows_K, grads_KD = grad.indices()[0], grad.values()
                state["sum"][rows_K] += (grads_KD * grads_KD).mean(dim=1, keepdim=True)
                step_size_K1 = group["lr"] / (state["sum"][rows_K].sqrt() + group["eps"])
                weight_RD[rows_K] -= step_size_K1 * grads_KD


def _build_optimizer(
    config: RowOptimizerConfig, params: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """The optimizer of the rule. Weight decay isn't given to it: torch's acts on every row."""
    if config.name == "sgd":
        return torch.optim.SGD(params, lr=1.0)
    if config.name == "adagrad":
        return torch.optim.Adagrad(params, lr=1.0, eps=config.eps)
    if config.name == "adam":
        return torch.optim.SparseAdam(
            params, lr=1.0, betas=(config.beta1, config.beta2), eps=config.eps
        )
    return RowWiseAdagrad(params, lr=1.0, eps=config.eps)
