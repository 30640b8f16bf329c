"""Interactions against loops over the definition, and their gradients against differences."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlrm.interaction import (
    CatInteraction,
    DotInteraction,
    FeatureProjection,
    LowRankCrossInteraction,
)


def naive_dot(vectors_MD: list[Tensor], x_D: Tensor | None, diagonal: bool) -> Tensor:
    """The definition for one sample: the bottom vector, or without one all features, then pairs
    (i, j), i > j, row by row."""
    pairs = [
        (vectors_MD[i] * vectors_MD[j]).sum()
        for i in range(len(vectors_MD))
        for j in range(i + 1 if diagonal else i)
    ]
    parts = vectors_MD if x_D is None else [x_D]
    return torch.cat([*parts, torch.stack(pairs)] if pairs else parts)


@settings(max_examples=40, deadline=None)
@given(
    batch_size=st.integers(0, 4),
    dim=st.integers(1, 5),
    num_features=st.integers(0, 6),
    diagonal=st.booleans(),
    has_bottom=st.booleans(),
)
@example(batch_size=2, dim=3, num_features=1, diagonal=False, has_bottom=False)
def test_dot_is_the_definition_in_its_documented_order(
    batch_size: int, dim: int, num_features: int, diagonal: bool, has_bottom: bool
) -> None:
    if not has_bottom and num_features == 0:
        return  # `DLRM` refuses data without any feature.
    dot = DotInteraction(dim, num_features, diagonal, has_bottom=has_bottom)
    x_BD = torch.randn(batch_size, dim, dtype=torch.float64) if has_bottom else None
    pooled_BS = torch.randn(batch_size, num_features * dim, dtype=torch.float64)
    out = dot(x_BD, pooled_BS)
    assert out.shape == (batch_size, dot.out_features)
    for b in range(batch_size):
        x_D = None if x_BD is None else x_BD[b]
        vectors = [] if x_D is None else [x_D]
        vectors += list(pooled_BS[b].view(num_features, dim))
        torch.testing.assert_close(out[b], naive_dot(vectors, x_D, diagonal))


@pytest.mark.parametrize(("dim", "width"), [(16, 367), (64, 415), (128, 479)])
def test_dot_width_on_criteo_is_the_reference_s(dim: int, width: int) -> None:
    assert DotInteraction(dim, 26).out_features == width
    assert DotInteraction(dim, 26, diagonal=True).out_features == width + 27


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("has_bottom", [False, True])
def test_dot_gradients(diagonal: bool, has_bottom: bool) -> None:
    dot = DotInteraction(3, 4, diagonal, has_bottom=has_bottom)
    pooled = torch.randn(2, 12, dtype=torch.float64, requires_grad=True)
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    # The backward is written by hand, so both its values and its own derivative are checked.
    function, inputs = (dot, (x, pooled)) if has_bottom else (partial(dot, None), (pooled,))
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


def test_dot_backward_inside_and_outside_autocast_agrees() -> None:
    dot = DotInteraction(4, 3)
    grads = []
    for backward_inside in (False, True):
        x, pooled = (torch.linspace(-1, 1, n).view(2, -1).requires_grad_() for n in (8, 24))
        with torch.autocast("cpu", torch.bfloat16):
            loss = dot(x, pooled).square().sum()
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
        grads.append(pooled.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)


def test_dot_keeps_fp32_products_under_bf16_autocast_on_cpu() -> None:
    dot = DotInteraction(16, 5)
    x, pooled = torch.linspace(-2, 2, 128).view(8, 16), torch.linspace(1, -1, 640).view(8, 80)
    expected = dot(x, pooled)
    with torch.autocast("cpu", torch.bfloat16):
        out = dot(x, pooled)
        from_bf16 = dot(x.bfloat16(), pooled)  # what a bottom MLP gives under autocast
    assert out.dtype == from_bf16.dtype == torch.float32
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    torch.testing.assert_close(from_bf16, expected, rtol=1e-2, atol=1e-1)


def test_projection_maps_only_what_differs_and_shares_by_table() -> None:
    dims, tables = [2, 4, 3, 4, 4, 3], ["a", "b", "c.x", "b", "d", "c.x"]
    project = FeatureProjection(4, dims, tables)
    # Tables b and d have the dim already; a and c.x (twice, a name with a dot) get one map each.
    assert sorted(tuple(p.shape) for p in project.parameters()) == [(4, 2), (4, 3)]
    map_a, map_c = (p.detach() for p in project.parameters())
    pooled = torch.randn(5, sum(dims))
    e = pooled.split(dims, dim=1)
    expected = torch.cat([e[0] @ map_a.T, e[1], e[2] @ map_c.T, e[3], e[4], e[5] @ map_c.T], 1)
    torch.testing.assert_close(project(pooled), expected)


@pytest.mark.parametrize("table", ["items", "type", "a.b", "training", "forward", "C%2E1", ""])
def test_projection_takes_any_table_name(table: str) -> None:
    project = FeatureProjection(4, [3, 2], [table, "other"])
    assert project(torch.zeros(1, 5)).shape == (1, 8)


def test_projection_does_not_mix_up_names_that_escape_alike() -> None:
    assert len(list(FeatureProjection(4, [3, 3], ["a.b", "a%2Eb"]).parameters())) == 2


def test_dot_with_projection_equals_dot_of_projected() -> None:
    dims = [2, 3, 3]
    project = FeatureProjection(3, dims, ["a", "b", "c"]).double()
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    pooled = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    dot = DotInteraction(3, 3, project=project)
    torch.testing.assert_close(dot(x, pooled), DotInteraction(3, 3)(x, project(pooled)))
    assert torch.autograd.gradcheck(dot, (x, pooled))


def test_cat_is_side_by_side() -> None:
    x, pooled = torch.randn(3, 2), torch.randn(3, 5)
    assert CatInteraction(2, 5).out_features == 7
    torch.testing.assert_close(CatInteraction(2, 5)(x, pooled), torch.cat([x, pooled], dim=1))
    torch.testing.assert_close(CatInteraction(0, 5)(None, pooled), pooled)


def test_cross_is_the_formula() -> None:
    cross = LowRankCrossInteraction(2, 5, num_layers=3, rank=2).double()
    p = dict(cross.named_parameters())
    x = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    pooled = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    out = cross(x, pooled)
    assert out.shape == (4, cross.out_features) == (4, 7)
    for b in range(4):
        x_0 = x_l = torch.cat([x[b], pooled[b]])
        for i in range(3):
            V, W, bias = p[f"V.{i}.weight"], p[f"W.{i}.weight"], p[f"W.{i}.bias"]
            low_rank = [(V[r] * x_l).sum() for r in range(2)]
            product = [sum(W[n, r] * low_rank[r] for r in range(2)) + bias[n] for n in range(7)]
            x_l = torch.stack([x_0[n] * product[n] + x_l[n] for n in range(7)])
        torch.testing.assert_close(out[b], x_l)
    assert torch.autograd.gradcheck(cross, (x, pooled))


def test_cross_without_a_bottom_vector_crosses_the_embeddings() -> None:
    cross = LowRankCrossInteraction(0, 7, num_layers=2, rank=2)
    flat = torch.randn(4, 7)
    with_bottom = LowRankCrossInteraction(2, 5, num_layers=2, rank=2)
    with_bottom.load_state_dict(cross.state_dict())
    torch.testing.assert_close(cross(None, flat), with_bottom(flat[:, :2], flat[:, 2:]))


def test_cross_under_autocast_keeps_its_sum_in_fp32() -> None:
    cross = LowRankCrossInteraction(2, 6, num_layers=2, rank=3)
    with torch.autocast("cpu", torch.bfloat16):
        out = cross(torch.randn(4, 2).bfloat16(), torch.randn(4, 6))
    assert out.dtype == torch.float32
