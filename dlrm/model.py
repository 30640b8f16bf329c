"""The model: dense features and pooled embeddings to one logit per sample. Knows no ranks."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn import functional

from data.errors import UserError
from dlrm.interaction import (
    CatInteraction,
    DotInteraction,
    FeatureProjection,
    LowRankCrossInteraction,
)
from dlrm.mlp import PAD_TO, mlp

INTERACTIONS = ("dot", "cat", "dcnv2")


@dataclass
class ModelConfig:
    """The dense network and the dims of the tables (`model.…`).

    Raises:
        UserError: (a `ValueError`) for a value out of its limits; the message names the key.
    """

    name: str = "dlrm"
    """A name for reports; the fields below decide what is built."""
    embedding_dim: int = 16
    """Dim of every table and of the bottom MLP's output."""
    table_dims: dict[str, int] = field(default_factory=dict)
    """Dim of single tables, by name, where it differs from `embedding_dim`. Under `dot` the pooled
    embeddings of such a table go through a linear map without bias to `embedding_dim` first."""
    bottom_mlp: list[int] = field(default_factory=lambda: [512, 256])
    """Hidden widths of the MLP over the dense features; a last layer to `embedding_dim` is added.
    Not built where the data have no dense features."""
    top_mlp: list[int] = field(default_factory=lambda: [512, 256])
    """Hidden widths of the MLP over the interaction's output; a last layer to 1 is added."""
    interaction: str = "dot"
    """`dot`: products of all pairs of features (DLRM), and the bottom MLP's output beside them or,
    where the data have no dense features, all features. `cat`: features side by side. `dcnv2`:
    low-rank cross layers (MLPerf's DLRM-DCNv2)."""
    dot_diagonal: bool = False
    """`dot`: whether each vector's product with itself is kept too."""
    dcn_layers: int = 3
    """`dcnv2`: number of cross layers."""
    dcn_rank: int = 512
    """`dcnv2`: rank of each cross layer."""

    def __post_init__(self) -> None:
        if self.interaction not in INTERACTIONS:
            raise UserError(
                f"model.interaction={self.interaction}: must be one of {', '.join(INTERACTIONS)}"
            )
        sizes = {
            "embedding_dim": self.embedding_dim,
            "dcn_layers": self.dcn_layers,
            "dcn_rank": self.dcn_rank,
        }
        sizes |= {f"table_dims.{table}": dim for table, dim in self.table_dims.items()}
        sizes |= {f"bottom_mlp[{i}]": width for i, width in enumerate(self.bottom_mlp)}
        sizes |= {f"top_mlp[{i}]": width for i, width in enumerate(self.top_mlp)}
        for key, size in sizes.items():
            if size < 1:
                raise UserError(f"model.{key}={size}: must be at least 1")
        ignored = []
        if self.interaction != "dot" and self.dot_diagonal:
            ignored.append("dot_diagonal")
        if self.interaction != "dcnv2":
            fields = type(self).__dataclass_fields__
            ignored += [
                key
                for key in ("dcn_layers", "dcn_rank")
                if getattr(self, key) != fields[key].default
            ]
        for key in ignored:
            warnings.warn(
                f"model.{key}={getattr(self, key)} is ignored: "
                f"model.interaction={self.interaction} has no such option",
                stacklevel=3,
            )


def table_dim(config: ModelConfig, table: str) -> int:
    """Dim of a table: its entry in `model.table_dims`, else `model.embedding_dim`."""
    return config.table_dims.get(table, config.embedding_dim)


def check_table_names(config: ModelConfig, tables: Collection[str]) -> None:
    """Refuses entries of `model.table_dims` that name no table of the data.

    Raises:
        UserError: naming the unknown tables and the known ones.
    """
    unknown = sorted(set(config.table_dims) - set(tables))
    if unknown:
        keys = ", ".join(f"model.table_dims.{table}" for table in unknown)
        raise UserError(f"{keys}: no such table; the data's tables are {', '.join(sorted(tables))}")


class DLRM(nn.Module):
    """Deep learning recommendation model (Naumov et al. 2019, arXiv 1906.00091).

    Bottom MLP over the dense features (ReLU after every layer, the last too), interaction with the
    pooled embeddings, top MLP (ReLU after every layer but the last), one raw logit per sample.
    Without dense features there is no bottom MLP and the interaction works on the embeddings alone.

    Parameters start as in facebookresearch/dlrm: with m outputs and n inputs, W ~ N(0, √(2/(m+n)))
    and b ~ N(0, √(1/m)) (deviations, not variances); cross layers as in MLPerf's reference, W and V
    as above (Xavier's normal), b = 0. Each parameter is drawn in fp32 from a generator of its own,
    seeded by (seed, parameter name): a further layer re-seeds nothing else, the global generator
    stays untouched, and `model.double()` has the same values widened.

    Under bf16 autocast the last layer still runs in fp32: bf16 logits would tie many samples.

    Args:
        config: widths and interaction.
        num_dense: `N`, may be 0.
        feature_dims: dim of each sparse feature's pooled embedding, in the order of `pooled_BS`.
        feature_tables: table of each sparse feature.
        seed: seed of all parameters.

    Attributes:
        feature_offsets: `F + 1` column offsets of the features in `pooled_BS`; the last is `S`.

    Raises:
        UserError: where there are no features.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_dense: int,
        feature_dims: Sequence[int],
        feature_tables: Sequence[str],
        seed: int,
    ) -> None:
        super().__init__()
        if num_dense == 0 and not feature_dims:
            raise UserError("the data have neither dense nor sparse features: nothing to train on")
        self.num_dense = num_dense
        self.feature_offsets = [0, *accumulate(feature_dims)]
        # torch draws its layers' first values from the global generator: leave that as it was.
        with torch.random.fork_rng(devices=()):
            self.bottom: nn.Sequential | None = None
            if num_dense:
                self.bottom = mlp([num_dense, *config.bottom_mlp, config.embedding_dim])
            self.interaction = _build_interaction(config, num_dense, feature_dims, feature_tables)
            top_widths = [self.interaction.out_features, *config.top_mlp]
            self.top = mlp(top_widths)
            self.head = nn.Linear(top_widths[-1], 1)
        _initialise_parameters(self, seed)

    def forward(self, dense_BN: Tensor, pooled_BS: Tensor) -> Tensor:
        """`(B, N)` dense features and `(B, S)` pooled embeddings → `(B,)` logits; B may be 0.

        The logits have the parameters' dtype, under autocast too.
        """
        return self.forward_pooled(self.forward_dense(dense_BN), pooled_BS)

    def forward_dense(self, dense_BN: Tensor) -> Tensor | None:
        """The part that needs no embeddings: `(B, D)`, or None without dense features."""
        assert dense_BN.shape[1] == self.num_dense, dense_BN.shape
        return None if self.bottom is None else self.bottom(dense_BN)

    def forward_pooled(self, bottom_BD: Tensor | None, pooled_BS: Tensor) -> Tensor:
        """The part from the pooled embeddings on: `(B,)` logits."""
        assert pooled_BS.shape[1] == self.feature_offsets[-1], pooled_BS.shape
        # Without hidden layers, the interaction's columns of zeros are still there.
        hidden_B = self.top(self.interaction(bottom_BD, pooled_BS))[:, : self.head.in_features]
        with torch.autocast(hidden_B.device.type, enabled=False):
            logits_B1 = self.head(hidden_B.to(self.head.weight.dtype))
        return logits_B1.squeeze(1)


def bce_loss(
    logits_B: Tensor, label_B: Tensor, weight_B: Tensor | None, total_weight: float | Tensor
) -> Tensor:
    """This (micro-)batch's share of the global batch's mean binary cross-entropy, in nats.

    Σ_b w_b · BCE(logit_b, label_b) / total_weight, from logits, so never infinite for finite ones.
    The shares of all micro-batches and ranks sum to the (example-weighted) mean, and so do their
    gradients.

    Args:
        logits_B: raw logits; lower precision than fp32 is cast up first.
        label_B: 0 or 1.
        weight_B: example weights; None where all are 1.
        total_weight: sum of the example weights of the *global* batch (its size, without weights).
            Where it is 0, every weight is: the share is 0, and so are its gradients.

    Returns:
        A scalar in the (cast up) dtype of the logits; 0 for an empty batch.

    Raises:
        UserError: (a `ValueError`) where `total_weight` is a number and negative or NaN.
    """
    if not isinstance(total_weight, Tensor) and not total_weight >= 0:
        raise UserError(
            f"the example weights of a global batch sum to {total_weight}, but can't be negative: "
            "look at the data's column of example weights"
        )
    dtype = torch.promote_types(logits_B.dtype, torch.float32)
    with torch.autocast(logits_B.device.type, enabled=False):
        loss = functional.binary_cross_entropy_with_logits(
            logits_B.to(dtype),
            label_B.to(dtype),
            weight=None if weight_B is None else weight_B.to(dtype),
            reduction="sum",
        )
    return loss / (1.0 if total_weight == 0 else total_weight)


def check_may_split(model: nn.Module) -> None:
    """Refuses to compute a batch in two parts where that isn't the same model.

    The loss is a sum over samples, so parts add up, unless a sample's result depends on which
    others are in its part (batch norm), or on how many came before (dropout's random numbers).

    Raises:
        UserError: naming the module.
    """
    for name, module in model.named_modules():
        is_norm = isinstance(module, nn.modules.batchnorm._NormBase) and module.training
        is_dropout = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
        if is_norm or is_dropout:
            raise UserError(
                f"sharding.host.mode=hotline computes a batch in two parts, which changes what "
                f"{name} ({type(module).__name__}) does; set sharding.host.mode=lookahead"
            )


def _build_interaction(
    config: ModelConfig,
    num_dense: int,
    feature_dims: Sequence[int],
    feature_tables: Sequence[str],
) -> DotInteraction | CatInteraction | LowRankCrossInteraction:
    dim = config.embedding_dim
    bottom_dim = dim if num_dense else 0
    if config.interaction == "cat":
        return CatInteraction(bottom_dim, sum(feature_dims))
    if config.interaction == "dcnv2":
        return LowRankCrossInteraction(
            bottom_dim, sum(feature_dims), config.dcn_layers, config.dcn_rank
        )
    assert config.interaction == "dot"
    project = None
    if any(feature_dim != dim for feature_dim in feature_dims):
        project = FeatureProjection(dim, feature_dims, feature_tables)
    return DotInteraction(
        dim,
        len(feature_dims),
        config.dot_diagonal,
        has_bottom=bottom_dim > 0,
        project=project,
        pad_to=PAD_TO,
    )


@torch.no_grad()
def _initialise_parameters(model: nn.Module, seed: int) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            num_outputs, num_inputs = module.weight.shape
            deviation = math.sqrt(2 / (num_outputs + num_inputs))
            _fill_normal(module.weight, deviation, seed, f"{name}.weight")
            if module.bias is not None:
                _fill_normal(module.bias, math.sqrt(1 / num_outputs), seed, f"{name}.bias")
    for module in model.modules():
        if isinstance(module, LowRankCrossInteraction):
            for name, parameter in module.W.named_parameters():
                if name.endswith("bias"):
                    parameter.zero_()


def _fill_normal(parameter: Tensor, deviation: float, seed: int, name: str) -> None:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    values = torch.empty(parameter.shape, dtype=torch.float32)
    parameter.copy_(values.normal_(0.0, deviation, generator=generator))
