"""Feature interactions: what the top MLP sees of the bottom MLP's output and the embeddings.

Every interaction is called as `interaction(bottom_BD, pooled_BS)` and returns a `(B, out_features)`
tensor. `pooled_BS` holds the pooled embeddings of all features side by side, in the order of the
features, each as wide as its table. `bottom_BD` is None where the data have no dense features: the
interaction then works on the embeddings alone, and has to be built so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dlrm.mlp import padded


class FeatureProjection(nn.Module):
    """Brings pooled embeddings of unequal dims to one dim, by a linear map without bias per table.

    Features whose dim is `dim` already pass unchanged; features that share a table share its map,
    as they share the meaning of its columns.

    Args:
        dim: `D`, the dim of every feature afterwards.
        feature_dims: dim of each feature before.
        feature_tables: table of each feature.
    """

    def __init__(
        self, dim: int, feature_dims: Sequence[int], feature_tables: Sequence[str]
    ) -> None:
        super().__init__()
        assert len(feature_dims) == len(feature_tables)
        self.table_maps = nn.ModuleDict()
        self._widths: list[int] = []
        self._keys: list[str | None] = []
        for feature_dim, table in zip(feature_dims, feature_tables, strict=True):
            key = None if feature_dim == dim else _module_key(table)
            if key is not None and key not in self.table_maps:
                self.table_maps[key] = nn.Linear(feature_dim, dim, bias=False)
            if key is None and self._keys and self._keys[-1] is None:
                self._widths[-1] += feature_dim  # a run of unchanged features stays one piece
            else:
                self._widths.append(feature_dim)
                self._keys.append(key)

    def forward(self, pooled_BS: Tensor) -> Tensor:
        """`(B, S)` → `(B, F·D)`."""
        # split, not slices: the backward of each slice would fill a whole (B, S) with zeros.
        pieces = pooled_BS.split(self._widths, dim=1)
        mapped = [
            piece if key is None else self.table_maps[key](piece)
            for key, piece in zip(self._keys, pieces, strict=True)
        ]
        return torch.cat(mapped, dim=1)


class DotInteraction(nn.Module):
    """Dot products of all pairs of features (DLRM, Naumov et al. 2019, arXiv 1906.00091).

    With `T = [x; e_1; …; e_F]`, `(B, F+1, D)`, and `Z = T Tᵗ`, the output is `[x, Z_flat]`, where
    `Z_flat` is the strictly lower triangle of `Z` row by row,

        Z[1,0], Z[2,0], Z[2,1], Z[3,0], …, Z[F,F-1]

    (facebookresearch/dlrm's order; TorchRec takes the upper triangle row by row), and with
    `diagonal` each row goes up to its diagonal: `Z[0,0], Z[1,0], Z[1,1], …`.
    `out_features` is `D + F(F+1)/2`, with `diagonal` `D + (F+1)(F+2)/2`.

    Without a bottom vector `T = [e_1; …; e_F]` and the output is `[e_1, …, e_F, Z_flat]`, of
    `F·D + F(F-1)/2` columns (`diagonal`: `F·D + F(F+1)/2`): products of pairs alone say nothing of
    a single feature (beside `x` they do: its products are learned linear functions of each).

    On CPU the products are taken in fp32 at least, also under autocast: small batched products and
    gathers took about 1.5 times as long in bf16 there (2,048 samples, 27 vectors of 16, forward
    and backward). On other devices autocast's dtype holds.

    Args:
        dim: `D`, the dim of all vectors.
        num_features: `F`.
        diagonal: whether the products of each vector with itself are kept.
        has_bottom: whether there is a bottom vector `x`.
        project: brings the features to `dim` first, where their dims differ.
        pad_to: the output gets columns of zeros up to a multiple of this; `out_features` counts
            them not.
    """

    triangle_index: Tensor
    mirror_index: Tensor

    def __init__(
        self,
        dim: int,
        num_features: int,
        diagonal: bool = False,
        *,
        has_bottom: bool = True,
        project: FeatureProjection | None = None,
        pad_to: int = 1,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.num_vectors = num_features + int(has_bottom)
        self.diagonal = diagonal
        self.has_bottom = has_bottom
        self.project = project
        rows_P, cols_P = torch.tril_indices(
            self.num_vectors, self.num_vectors, 0 if diagonal else -1
        )
        num_pairs = self.num_pairs = rows_P.numel()
        self.num_kept = 1 if has_bottom else num_features
        first_column = self.num_kept * dim
        self.out_features = first_column + num_pairs
        self.num_zero_columns = padded(self.out_features, pad_to) - self.out_features
        # For the backward: the column of the output that holds Z[i, j] = Z[j, i]. Column 0 stands
        # in for a diagonal that isn't there; what it brings is set to zero.
        mirror_index = torch.zeros(self.num_vectors, self.num_vectors, dtype=torch.int64)
        mirror_index[rows_P, cols_P] = mirror_index[cols_P, rows_P] = first_column + torch.arange(
            num_pairs
        )
        self.register_buffer("triangle_index", rows_P * self.num_vectors + cols_P, persistent=False)
        self.register_buffer("mirror_index", mirror_index.view(-1), persistent=False)

    def forward(self, bottom_BD: Tensor | None, pooled_BS: Tensor) -> Tensor:
        """`(B, D)` and `(B, S)` → `(B, out_features)`, and the zeros that `pad_to` adds."""
        assert (bottom_BD is not None) == self.has_bottom
        features_B = pooled_BS if self.project is None else self.project(pooled_BS)
        flat_B = features_B if bottom_BD is None else torch.cat([bottom_BD, features_B], dim=1)
        vectors_BMD = flat_B.reshape(flat_B.shape[0], self.num_vectors, self.dim)
        vectors_BMD = vectors_BMD.to(_dot_dtype(vectors_BMD))
        return _PairwiseDot.apply(
            vectors_BMD,
            self.triangle_index,
            self.mirror_index,
            self.diagonal,
            self.num_kept,
            self.num_zero_columns,
        )


class CatInteraction(nn.Module):
    """No interaction: `[x, e_1, …, e_F]` side by side.

    Args:
        bottom_dim: width of the bottom vector; 0 where there is none.
        pooled_dim: `S`, sum of the features' dims.
    """

    def __init__(self, bottom_dim: int, pooled_dim: int) -> None:
        super().__init__()
        self.out_features = bottom_dim + pooled_dim

    def forward(self, bottom_BD: Tensor | None, pooled_BS: Tensor) -> Tensor:
        """`(B, D)` and `(B, S)` → `(B, D + S)`."""
        return _side_by_side(bottom_BD, pooled_BS)


class LowRankCrossInteraction(nn.Module):
    """Low-rank cross layers over the flat vector `x_0 = [x, e_1, …, e_F]` of width `n = D + S`:

        x_{l+1} = x_0 ⊙ (W_l (V_l x_l) + b_l) + x_l        V_l: n → rank,  W_l: rank → n

    DCN V2 (Wang et al. 2021, arXiv 2008.13535, section 3.4, one expert and no gate), as in MLPerf
    Training's DLRM-DCNv2 reference (mlcommons/training, recommendation_v2/torchrec_dlrm), which
    starts W and V from Xavier's normal distribution and b from 0 (`dlrm.model` does so here).
    Dims may differ between features. Under autocast the two products run in its dtype, the sum in
    that of `pooled_BS`.

    Args:
        bottom_dim: width of the bottom vector; 0 where there is none.
        pooled_dim: `S`, sum of the features' dims.
        num_layers: number of cross layers.
        rank: rank of each layer.
    """

    def __init__(self, bottom_dim: int, pooled_dim: int, num_layers: int, rank: int) -> None:
        super().__init__()
        width = self.out_features = bottom_dim + pooled_dim
        self.V = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(num_layers))
        self.W = nn.ModuleList(nn.Linear(rank, width) for _ in range(num_layers))

    def forward(self, bottom_BD: Tensor | None, pooled_BS: Tensor) -> Tensor:
        """`(B, D)` and `(B, S)` → `(B, D + S)`."""
        x_0 = x = _side_by_side(bottom_BD, pooled_BS)
        for V, W in zip(self.V, self.W, strict=True):
            x = torch.addcmul(x, x_0, W(V(x)))
        return x


class _PairwiseDot(torch.autograd.Function):
    """`[first rows of T, triangle of T Tᵗ, zeros]` with a backward of one product instead of two.

    With G the symmetric matrix of the pairs' gradients (its diagonal counted twice), the gradient
    of T is `G T`. Autograd's own way, `dZ T + dZᵗ T` after a scatter into zeros and with a
    concatenation on top, takes 1.3 to 1.5 times as long (2,048 samples, 27 vectors of 16, CPU).
    `index_select` is the fastest of the gathers there: advanced indexing takes twice its time.
    """

    @staticmethod
    def forward(
        ctx: Any,
        vectors_BMD: Tensor,
        triangle_index: Tensor,
        mirror_index: Tensor,
        diagonal: bool,
        num_kept: int,
        num_zero_columns: int,
    ) -> Tensor:
        ctx.save_for_backward(vectors_BMD, mirror_index)
        ctx.diagonal, ctx.num_kept = diagonal, num_kept
        # The dtype is chosen by the caller; autocast would change it underneath.
        with torch.autocast(vectors_BMD.device.type, enabled=False):
            products_BMM = torch.bmm(vectors_BMD, vectors_BMD.transpose(1, 2))
        pairs_BP = products_BMM.flatten(1).index_select(1, triangle_index)
        columns = [vectors_BMD[:, :num_kept].flatten(1), pairs_BP]
        if num_zero_columns:
            zeros = vectors_BMD.new_zeros(1, num_zero_columns)
            columns.append(zeros.expand(vectors_BMD.shape[0], -1))
        return torch.cat(columns, dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_B,) = grads
        vectors_BMD, mirror_index = ctx.saved_tensors
        batch_size, num_vectors, dim = vectors_BMD.shape
        grad_BMM = grad_B.index_select(1, mirror_index).view(batch_size, num_vectors, num_vectors)
        squares_BM = grad_BMM.diagonal(dim1=1, dim2=2)
        if ctx.diagonal:
            squares_BM.mul_(2)
        else:
            squares_BM.zero_()
        with torch.autocast(vectors_BMD.device.type, enabled=False):
            grad_BMD = torch.bmm(grad_BMM, vectors_BMD)
        kept_BKD = grad_B[:, : ctx.num_kept * dim].view(batch_size, ctx.num_kept, dim)
        grad_BMD[:, : ctx.num_kept] += kept_BKD
        return grad_BMD, None, None, None, None, None


def _dot_dtype(vectors: Tensor) -> torch.dtype:
    device = vectors.device.type
    if device == "cpu":
        return torch.promote_types(vectors.dtype, torch.float32)
    if torch.is_autocast_enabled(device) and vectors.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return vectors.dtype


def _side_by_side(bottom_BD: Tensor | None, pooled_BS: Tensor) -> Tensor:
    return pooled_BS if bottom_BD is None else torch.cat([bottom_BD, pooled_BS], dim=1)


def _module_key(table: str) -> str:
    """A name for `nn.ModuleDict`, which takes no dots and no names of its own methods."""
    return "table_" + table.replace("%", "%25").replace(".", "%2E")
