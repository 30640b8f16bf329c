"""The model's shapes, initial values, edge cases and loss."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torch.nn import functional

from dlrm.model import DLRM, ModelConfig, bce_loss, check_table_names, table_dim

TABLES = ["a", "b", "b"]


def small_config(**overrides: Any) -> ModelConfig:
    widths: dict[str, Any] = {"embedding_dim": 4, "bottom_mlp": [6], "top_mlp": [5, 3]}
    return ModelConfig(**(widths | overrides))


def small_model(num_dense: int = 3, seed: int = 7, **overrides: Any) -> DLRM:
    config = small_config(**overrides)
    return DLRM(config, num_dense, [table_dim(config, t) for t in TABLES], TABLES, seed)


def inputs(model: DLRM, batch_size: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    dense_BN = torch.randn(batch_size, model.num_dense, generator=generator)
    pooled_BS = torch.randn(batch_size, model.feature_offsets[-1], generator=generator)
    return dense_BN, pooled_BS.requires_grad_()


CROSS = {"interaction": "dcnv2", "dcn_layers": 2, "dcn_rank": 2}


@pytest.mark.parametrize("batch_size", [0, 1, 5])
@pytest.mark.parametrize("num_dense", [0, 3])
@pytest.mark.parametrize(
    "overrides",
    [{}, {"dot_diagonal": True}, {"interaction": "cat"}, CROSS, {"bottom_mlp": [], "top_mlp": []}],
    ids=["dot", "diagonal", "cat", "dcnv2", "no hidden layers"],
)
@pytest.mark.parametrize("table_dims", [{}, {"b": 3}], ids=["equal", "unequal"])
def test_forward_and_backward(
    batch_size: int, num_dense: int, overrides: dict[str, Any], table_dims: dict[str, int]
) -> None:
    model = small_model(num_dense, table_dims=table_dims, **overrides)
    dense_BN, pooled_BS = inputs(model, batch_size)
    logits_B = model(dense_BN, pooled_BS)
    assert logits_B.shape == (batch_size,)
    logits_B.sum().backward()
    assert pooled_BS.grad is not None
    assert pooled_BS.grad.shape == pooled_BS.shape
    # An empty batch gives every parameter a zero gradient, not none: the all-reduce needs one.
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert batch_size or not parameter.grad.any(), name


def test_activations_are_the_reference_s() -> None:
    """ReLU after every bottom layer, the last too, and after every top layer but the last."""
    model = small_model()
    dense_BN, pooled_BS = inputs(model)
    p = dict(model.named_parameters())
    x = torch.relu(dense_BN @ p["bottom.0.weight"].T + p["bottom.0.bias"])
    x = torch.relu(x @ p["bottom.2.weight"].T + p["bottom.2.bias"])
    h = model.interaction(x, pooled_BS)[:, : model.interaction.out_features]
    h = torch.relu(h @ p["top.0.weight"].T + p["top.0.bias"])
    h = torch.relu(h @ p["top.2.weight"].T + p["top.2.bias"])
    expected = (h @ p["head.weight"].T + p["head.bias"])[:, 0]
    torch.testing.assert_close(model(dense_BN, pooled_BS), expected)


def test_parameter_count_of_the_kaggle_reference() -> None:
    config = ModelConfig(embedding_dim=16, bottom_mlp=[512, 256, 64], top_mlp=[512, 256])
    model = DLRM(config, 13, [16] * 26, [f"C{i}" for i in range(26)], seed=0)
    # facts: 13-512-256-64-16 and 367-512-256-1.
    assert sum(p.numel() for p in model.parameters()) == 475_985


def test_initial_values_depend_on_seed_and_name_only() -> None:
    global_state = torch.get_rng_state()
    first = small_model()
    assert torch.equal(torch.get_rng_state(), global_state)
    torch.randn(3)  # another state of the global generator changes nothing
    again, other_seed = small_model(), small_model(seed=8)
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name
        assert not torch.equal(parameter, other_seed.get_parameter(name)), name


def test_layers_of_one_shape_start_apart() -> None:
    model = small_model(bottom_mlp=[4, 4])
    first, second = (model.get_parameter(f"bottom.{i}.weight") for i in (2, 4))
    assert first.shape == second.shape
    assert not torch.equal(first, second)


def test_a_further_layer_reseeds_nothing_else() -> None:
    first = small_model()
    deeper = small_model(bottom_mlp=[6, 4], top_mlp=[5, 3, 3], table_dims={"a": 2})
    equal = {
        name
        for name, parameter in first.named_parameters()
        if torch.equal(parameter, deeper.get_parameter(name))
    }
    # bottom.2 has the same shape in both and so the same values; all else keeps name and shape.
    assert equal == {name for name, _ in first.named_parameters()}


def test_initial_distribution_is_the_reference_s() -> None:
    config = ModelConfig(bottom_mlp=[400, 300], interaction="dcnv2", dcn_rank=64, dcn_layers=2)
    model = DLRM(config, 200, [16] * 26, ["t"] * 26, seed=1)
    for name, parameter in model.named_parameters():
        if name.startswith("interaction.W") and name.endswith("bias"):
            assert not parameter.any(), name
            continue
        size = parameter.shape[0] + (parameter.shape[1] if parameter.dim() == 2 else 0)
        deviation = math.sqrt((2 if parameter.dim() == 2 else 1) / size)
        if parameter.numel() > 1000:
            assert parameter.std().item() == pytest.approx(deviation, rel=0.05), name
            assert abs(parameter.mean().item()) < 5 * deviation / math.sqrt(parameter.numel()), name
        elif parameter.numel() >= 200:
            assert parameter.std().item() == pytest.approx(deviation, rel=0.25), name


def test_projections_are_initialised_from_the_seed() -> None:
    first, again = (small_model(table_dims={"b": 3}) for _ in range(2))
    names = [name for name, _ in first.named_parameters() if "table_b" in name]
    assert names == ["interaction.project.table_maps.table_b.weight"]
    assert torch.equal(first.get_parameter(names[0]), again.get_parameter(names[0]))


def test_double_has_the_fp32_values_widened() -> None:
    wide = small_model().double()
    for name, parameter in small_model().named_parameters():
        assert torch.equal(parameter.double(), wide.get_parameter(name)), name
    dense_BN, pooled_BS = inputs(wide)
    assert wide(dense_BN.double(), pooled_BS.double()).dtype == torch.float64


@pytest.mark.parametrize("overrides", [{}, CROSS, {"table_dims": {"b": 3}}])
def test_autocast_gives_fp32_logits_close_to_fp32_s(overrides: dict[str, Any]) -> None:
    model = small_model(**overrides)
    dense_BN, pooled_BS = inputs(model, 64)
    with torch.autocast("cpu", torch.bfloat16):
        logits_B = model(dense_BN, pooled_BS)
    assert logits_B.dtype == torch.float32
    torch.testing.assert_close(logits_B, model(dense_BN, pooled_BS), rtol=0.05, atol=0.2)
    logits_B.sum().backward()
    assert pooled_BS.grad is not None
    assert pooled_BS.grad.dtype == torch.float32


def test_export_takes_the_model() -> None:
    """Serving needs torch.export; the interaction's hand-written gradient must not stop it."""
    model = small_model().eval().requires_grad_(False)
    dense_BN, pooled_BS = (t.detach() for t in inputs(model))
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(
        model, (dense_BN, pooled_BS), dynamic_shapes=({0: batch}, {0: batch})
    )
    dense_BN, pooled_BS = (t.detach() for t in inputs(model, 9))
    torch.testing.assert_close(program.module()(dense_BN, pooled_BS), model(dense_BN, pooled_BS))


def test_no_features_are_refused() -> None:
    with pytest.raises(ValueError, match="neither dense nor sparse"):
        DLRM(small_config(), 0, [], [], seed=0)


@pytest.mark.parametrize("dims", [[4], [4, 4], [4, 6, 3]])
def test_f41_dot_without_dense_features_hands_on_each_feature(dims: list[int]) -> None:
    """Also of unequal dims, then projected: the logit depends on every feature by itself, though
    all others are 0 and with them all products."""
    config = small_config(top_mlp=[32])
    model = DLRM(config, 0, dims, [f"t{n}" for n in range(len(dims))], seed=0)
    width = len(dims) * config.embedding_dim
    assert model.interaction.out_features == width + len(dims) * (len(dims) - 1) // 2
    start = 0
    for dim in dims:
        pooled_BS = torch.zeros(2, sum(dims))
        pooled_BS[1, start : start + dim] = 1.0
        none, one = model(torch.zeros(2, 0), pooled_BS).tolist()
        assert none != one
        start += dim


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"interaction": "sum"}, r"model\.interaction=sum.*dot, cat, dcnv2"),
        ({"embedding_dim": 0}, r"model\.embedding_dim=0: must be at least 1"),
        ({"table_dims": {"C3": -1}}, r"model\.table_dims\.C3=-1: must be at least 1"),
        ({"bottom_mlp": [8, 0]}, r"model\.bottom_mlp\[1\]=0: must be at least 1"),
        ({"top_mlp": [0]}, r"model\.top_mlp\[0\]=0: must be at least 1"),
        ({"dcn_layers": 0, "interaction": "dcnv2"}, r"model\.dcn_layers=0: must be at least 1"),
        ({"dcn_rank": 0, "interaction": "dcnv2"}, r"model\.dcn_rank=0: must be at least 1"),
    ],
)
def test_refused_settings_name_their_key(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**overrides)
    # The same through Hydra's way: schema, override, objects.
    merged = OmegaConf.merge(OmegaConf.structured(ModelConfig), overrides)
    with pytest.raises(ValueError, match=message):
        OmegaConf.to_object(merged)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"interaction": "cat", "dot_diagonal": True}, r"model\.dot_diagonal=True is ignored"),
        ({"dcn_layers": 2}, r"model\.dcn_layers=2 is ignored"),
        ({"dcn_rank": 64}, r"model\.dcn_rank=64 is ignored"),
    ],
)
def test_ignored_settings_are_told(overrides: dict[str, Any], message: str) -> None:
    with pytest.warns(UserWarning, match=message):
        ModelConfig(**overrides)


def test_config_is_a_structured_config() -> None:
    config = small_config(table_dims={"b": 3}, interaction="cat")
    assert OmegaConf.to_object(OmegaConf.structured(config)) == config
    read_back = OmegaConf.merge(
        OmegaConf.structured(ModelConfig), OmegaConf.create(dataclasses.asdict(config))
    )
    assert OmegaConf.to_object(read_back) == config


def test_table_dims_and_unknown_tables() -> None:
    config = small_config(table_dims={"b": 3, "zz": 2, "yy": 2})
    assert [table_dim(config, t) for t in ("a", "b")] == [4, 3]
    with pytest.raises(ValueError, match=r"model\.table_dims\.yy, model\.table_dims\.zz.*a, b"):
        check_table_names(config, {"b", "a"})
    check_table_names(small_config(table_dims={"b": 3}), ["a", "b"])


@settings(max_examples=30, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 12), max_size=4),
    weighted=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_shares_of_the_loss_sum_to_the_global_mean(
    cuts: list[int], weighted: bool, seed: int
) -> None:
    """Accumulation and ranks: shares, and gradients, of any cut sum to those of the whole batch."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(12, generator=generator, dtype=torch.float64, requires_grad=True)
    label = torch.randint(0, 2, (12,), generator=generator).float()
    weight = torch.rand(12, generator=generator) + 0.1 if weighted else None
    total = 12.0 if weight is None else weight.double().sum()
    p = torch.sigmoid(logits)
    per_sample = -(label * p.log() + (1 - label) * (1 - p).log())
    w = torch.ones(12) if weight is None else weight
    expected = (w * per_sample).sum() / w.double().sum()
    edges = [0, *sorted(cuts), 12]
    shares = [
        bce_loss(logits[i:j], label[i:j], None if weight is None else weight[i:j], total)
        for i, j in pairwise(edges)
    ]
    loss = torch.stack(shares).sum()
    torch.testing.assert_close(loss, expected)
    (grad,) = torch.autograd.grad(loss, logits)
    (expected_grad,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(grad, expected_grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("logit", "label"), [(200.0, 0.0), (-200.0, 1.0)])
def test_saturated_logits_give_their_loss(dtype: torch.dtype, logit: float, label: float) -> None:
    """User case B27: neither inf nor NaN, nor a clamp at 100."""
    logits_B = torch.tensor([logit], dtype=dtype, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss = bce_loss(logits_B, torch.tensor([label]), None, 1)
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    assert loss.item() == 200.0
    loss.backward()
    assert logits_B.grad is not None
    assert logits_B.grad.item() == math.copysign(1.0, logit)


def test_bf16_logits_lose_nothing_beyond_their_own_rounding() -> None:
    logits_B = torch.linspace(-8, 8, 1000).bfloat16()
    label_B = (torch.arange(1000) % 3 == 0).float()
    expected = functional.binary_cross_entropy_with_logits(logits_B.float(), label_B)
    with torch.autocast("cpu", torch.bfloat16):
        loss = bce_loss(logits_B, label_B, None, 1000)
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("total_weight", [-1.0, float("nan")])
def test_a_negative_weight_of_a_global_batch_is_refused(total_weight: float) -> None:
    with pytest.raises(ValueError, match="can't be negative"):
        bce_loss(torch.zeros(2), torch.zeros(2), torch.zeros(2), total_weight)


@pytest.mark.parametrize("total_weight", [0, 0.0, torch.tensor(0.0)])
def test_f13_a_global_batch_without_weight_has_the_loss_0(total_weight: Any) -> None:
    logits_B = torch.tensor([3.0, -200.0], requires_grad=True)
    loss = bce_loss(logits_B, torch.tensor([0.0, 1.0]), torch.zeros(2), total_weight)
    loss.backward()
    assert loss.item() == 0.0
    assert logits_B.grad is not None
    assert logits_B.grad.tolist() == [0.0, 0.0]
