"""Optimizer settings, schedule, clipping, and what is told about them."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torch import nn

from dlrm.optim import (
    DenseOptimConfig,
    OptimConfig,
    Schedule,
    ScheduleConfig,
    SparseOptimConfig,
    build_dense_optimizer,
    clip_factor,
    describe_semantics,
)


def one_weight(value: float, grad: float, dtype: torch.dtype = torch.float32) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False, dtype=dtype)
    nn.init.constant_(model.weight, value)
    model.weight.grad = torch.full_like(model.weight, grad)
    return model


def config_of(**overrides: Any) -> OptimConfig:
    merged = OmegaConf.merge(OmegaConf.structured(OptimConfig), overrides)
    config = OmegaConf.to_object(merged)
    assert isinstance(config, OptimConfig)
    return config


# ------------------------------------------------------------------------------------- settings


def test_eps_set_once_holds_for_both_parts() -> None:
    """User case B24: eps 1e-3, gradient 1e-3, lr 1, state 0 moves a weight by -0.5."""
    config = config_of(
        eps=1e-3,
        dense={"name": "adagrad", "lr": 1.0},
        sparse={"name": "rowwise_adagrad", "lr": 1.0},
    )
    assert config.effective_eps(config.dense) == config.effective_eps(config.sparse) == 1e-3
    model = one_weight(1.0, 1e-3)
    build_dense_optimizer(model, config).step()
    assert model.weight.item() == pytest.approx(0.5, abs=1e-6)
    (line,) = [line for line in describe_semantics(config) if "optimizers:" in line]
    assert line.count("eps 0.001") == 2


def test_eps_of_one_part_overrides_the_common_one() -> None:
    config = config_of(eps=1e-3, sparse={"eps": 1e-6})
    assert config.effective_eps(config.sparse) == 1e-6
    assert config.effective_eps(config.dense) == 1e-3
    assert config_of(sparse={"eps": 0.0}).effective_eps(config_of(sparse={"eps": 0.0}).sparse) == 0


def test_configs_are_structured_configs() -> None:
    config = OptimConfig(
        eps=1e-6,
        sparse=SparseOptimConfig(name="adam", lr=0.1, beta2=0.99),
        dense=DenseOptimConfig(name="adamw", weight_decay=0.01),
        schedule=ScheduleConfig(warmup_steps=3, hold_steps=4, decay_steps=5),
        clip_norm=1.0,
    )
    assert OmegaConf.to_object(OmegaConf.structured(config)) == config
    assert config_of(**dataclasses.asdict(config)) == config
    assert config_of() == OptimConfig()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"eps": -1e-8}, r"optim\.eps=-1e-08: must be at least 0"),
        ({"eps": math.nan}, r"optim\.eps=nan"),
        ({"clip_norm": 0.0}, r"optim\.clip_norm=0\.0: must be above 0"),
        ({"clip_norm": math.inf}, r"optim\.clip_norm=inf"),
        ({"dense": {"name": "lamb"}}, r"optim\.dense\.name=lamb.*sgd, adagrad, adam, adamw"),
        ({"dense": {"name": "rowwise_adagrad"}}, r"optim\.dense\.name=rowwise_adagrad"),
        ({"sparse": {"name": "adamw"}}, r"optim\.sparse\.name=adamw.*rowwise_adagrad, adam"),
        ({"dense": {"lr": -1.0}}, r"optim\.dense\.lr=-1\.0"),
        ({"sparse": {"lr": math.inf}}, r"optim\.sparse\.lr=inf"),
        ({"sparse": {"eps": -1.0}}, r"optim\.sparse\.eps=-1\.0"),
        ({"dense": {"weight_decay": -0.1}}, r"optim\.dense\.weight_decay=-0\.1"),
        ({"dense": {"name": "adam", "beta1": 1.0}}, r"optim\.dense\.beta1=1\.0.*below 1"),
        ({"sparse": {"name": "adam", "beta2": -0.1}}, r"optim\.sparse\.beta2=-0\.1"),
        ({"schedule": {"warmup_steps": -1}}, r"optim\.schedule\.warmup_steps=-1"),
        ({"schedule": {"hold_steps": -1}}, r"optim\.schedule\.hold_steps=-1"),
        ({"schedule": {"decay_steps": -1}}, r"optim\.schedule\.decay_steps=-1"),
        ({"schedule": {"decay_power": 0.0}}, r"optim\.schedule\.decay_power=0\.0"),
        ({"schedule": {"end_factor": 1.5}}, r"optim\.schedule\.end_factor=1\.5"),
        ({"schedule": {"hold_steps": 5}}, r"optim\.schedule\.hold_steps=5.*decay_steps"),
    ],
)
def test_refused_settings_name_their_key(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(**overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"dense": {"name": "sgd", "eps": 1e-3}}, r"optim\.dense\.eps=0\.001 is ignored"),
        ({"sparse": {"name": "adagrad", "beta1": 0.8}}, r"optim\.sparse\.beta1=0\.8 is ignored"),
        ({"dense": {"name": "sgd", "beta2": 0.9}}, r"optim\.dense\.beta2=0\.9 is ignored"),
        (
            {"eps": 1e-3, "dense": {"name": "sgd"}, "sparse": {"name": "sgd"}},
            r"optim\.eps=0\.001 is ignored",
        ),
        ({"schedule": {"end_factor": 0.1}}, r"optim\.schedule\.end_factor=0\.1 is ignored"),
        ({"schedule": {"decay_power": 1.0}}, r"optim\.schedule\.decay_power=1\.0 is ignored"),
    ],
)
def test_ignored_settings_are_told(overrides: dict[str, Any], message: str) -> None:
    with pytest.warns(UserWarning, match=message):
        config_of(**overrides)


# --------------------------------------------------------------------------------- dense updates


def expected_weight(name: str, decay: float, num_steps: int) -> float:
    """The published rules on one weight: value 2, gradient 0.5 then -1, lr 0.1, eps 1e-3."""
    w, square_sum, m, v = 2.0, 0.0, 0.0, 0.0
    for t in range(1, num_steps + 1):
        g = 0.5 if t % 2 else -1.0
        if name == "adamw":
            w *= 1 - 0.1 * decay
        else:
            g += decay * w
        if name == "sgd":
            w -= 0.1 * g
        elif name == "adagrad":
            square_sum += g * g
            w -= 0.1 * g / (math.sqrt(square_sum) + 1e-3)
        else:
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            root = math.sqrt(v / (1 - 0.999**t))
            w -= 0.1 * m / (1 - 0.9**t) / (root + 1e-3)
    return w


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam", "adamw"])
def test_dense_rules(name: str, decay: float, dtype: torch.dtype) -> None:
    config = config_of(eps=1e-3, dense={"name": name, "lr": 0.1, "weight_decay": decay})
    model = one_weight(2.0, 0.5, dtype)
    optimizer = build_dense_optimizer(model, config)
    for step in range(1, 5):
        model.weight.grad = torch.full_like(model.weight, 0.5 if step % 2 else -1.0)
        optimizer.step()
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    assert model.weight.item() == pytest.approx(expected_weight(name, decay, 4), rel=tolerance)


def test_schedule_reaches_the_dense_optimizer_through_its_group() -> None:
    model = one_weight(1.0, 1.0)
    optimizer = build_dense_optimizer(model, config_of(dense={"name": "sgd", "lr": 0.5}))
    (group,) = optimizer.param_groups
    assert group["lr"] == 0.5
    group["lr"] = 0.5 * 0.25
    optimizer.step()
    assert model.weight.item() == 1 - 0.125


# -------------------------------------------------------------------------------------- schedule


def factors(config: ScheduleConfig, total_steps: int | None, num_steps: int) -> list[float]:
    schedule = Schedule(config, total_steps)
    return [schedule.factor(step) for step in range(num_steps)]


def test_schedule_points() -> None:
    config = ScheduleConfig(warmup_steps=4, hold_steps=2, decay_steps=4, decay_power=2.0)
    assert factors(config, None, 13) == [
        *(0.25, 0.5, 0.75, 1.0),
        *(1.0, 1.0),
        *(1.0, 0.5625, 0.25, 0.0625),
        *(0.0, 0.0, 0.0),
    ]


def test_schedule_stops_at_its_end_factor() -> None:
    config = ScheduleConfig(hold_steps=1, decay_steps=4, decay_power=1.0, end_factor=0.4)
    assert factors(config, 100, 8) == [1.0, 1.0, 0.75, 0.5, 0.4, 0.4, 0.4, 0.4]


def test_schedule_without_settings_is_constant() -> None:
    assert factors(ScheduleConfig(), None, 3) == [1.0, 1.0, 1.0]
    assert factors(ScheduleConfig(warmup_steps=2), 10, 4) == [0.5, 1.0, 1.0, 1.0]


def test_hold_to_the_end_lets_the_decay_end_with_the_run() -> None:
    config = ScheduleConfig(warmup_steps=1, decay_steps=2, decay_power=1.0)
    assert factors(config, 5, 6) == [1.0, 1.0, 1.0, 1.0, 0.5, 0.0]
    with pytest.raises(ValueError, match=r"optim\.schedule\.hold_steps or train\.max_steps"):
        Schedule(config, None)
    with pytest.raises(ValueError, match=r"optim\.schedule\.warmup_steps=1 .* 2 steps"):
        Schedule(config, 2)


@settings(max_examples=50, deadline=None)
@given(
    warmup=st.integers(0, 9),
    hold=st.integers(0, 9),
    decay=st.integers(1, 9),
    power=st.floats(0.1, 4),
    end=st.floats(0, 1),
)
def test_schedule_rises_holds_and_falls(
    warmup: int, hold: int, decay: int, power: float, end: float
) -> None:
    config = ScheduleConfig(warmup, hold, decay, power, end)
    values = factors(config, None, warmup + hold + decay + 3)
    assert all(0 <= value <= 1 for value in values)
    top = warmup + hold
    assert values[:warmup] == sorted(values[:warmup])
    assert values[warmup : top + 1] == [1.0] * (hold + 1)
    assert values[top:] == sorted(values[top:], reverse=True)
    assert values[-1] == end


def test_f45_shares_of_the_run_are_steps_of_it() -> None:
    config = ScheduleConfig(warmup_share=0.2, decay_share=0.5, decay_power=1.0)
    expected = ScheduleConfig(warmup_steps=2, decay_steps=5, decay_power=1.0)
    assert factors(config, 10, 12) == factors(expected, 10, 12)
    # A resumed run's whole length counts, not what is left of it; a run of one step has a rate.
    assert factors(config, 100, 100) == factors(ScheduleConfig(20, None, 50, 1.0), 100, 100)
    assert factors(ScheduleConfig(warmup_share=0.01), 1, 1) == [1.0]
    assert factors(ScheduleConfig(decay_share=0.0, warmup_share=0.0), 3, 3) == [1.0] * 3
    with pytest.raises(ValueError, match="isn't known"):
        Schedule(config, None)


@given(
    warmup=st.floats(0, 0.9),
    decay=st.floats(0.001, 1),
    total=st.integers(1, 300),
    power=st.floats(1, 3),
)
def test_f45_shares_fit_into_any_run(warmup: float, decay: float, total: int, power: float) -> None:
    decay = min(decay, 0.99 - warmup)
    config = ScheduleConfig(warmup_share=warmup, decay_share=decay, decay_power=power)
    values = factors(config, total, total)
    assert all(0 < value <= 1 for value in values)
    top = values.index(max(values))
    assert values[: top + 1] == sorted(values[: top + 1])
    assert values[top:] == sorted(values[top:], reverse=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup_share": 1.5}, r"warmup_share=1\.5: must be between 0 and 1"),
        ({"decay_share": 300.0}, r"decay_share=300\.0: .* \(optim\.schedule\.decay_steps is"),
        ({"decay_share": float("nan")}, r"decay_share=nan"),
        ({"warmup_steps": 3, "warmup_share": 0.1}, r"warmup_steps=3 and .*warmup_share=0\.1 say"),
        ({"decay_steps": 3, "decay_share": 0.1}, r"decay_steps=3 and .*decay_share=0\.1 say"),
        ({"warmup_share": 0.6, "decay_share": 0.6}, r"more than the whole run together"),
    ],
)
def test_f45_bad_shares_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScheduleConfig(**settings)


def test_c14_a_warm_up_longer_than_the_run_is_told() -> None:
    with pytest.warns(UserWarning, match=r"warmup_steps=2,000 exceeds the run's 100 .* than 5%"):
        Schedule(ScheduleConfig(warmup_steps=2000), 100)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Schedule(ScheduleConfig(warmup_steps=100), 100)
        Schedule(ScheduleConfig(warmup_steps=2000), None)


def test_c14_a_decay_that_never_begins_is_told() -> None:
    config = ScheduleConfig(warmup_steps=10, hold_steps=990, decay_steps=50)
    with pytest.warns(UserWarning, match=r"begin at step 1,000, after the run's 100 steps"):
        Schedule(config, 100)


# -------------------------------------------------------------------------------------- clipping


@pytest.mark.parametrize("max_norm", [0.1, 3.0, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clipping_is_torch_s_over_both_parts(max_norm: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    table = nn.Parameter(torch.zeros(10, 3, dtype=dtype))
    table.grad = torch.zeros_like(table)
    grads_KD = torch.randn(4, 3, dtype=dtype)
    table.grad[[1, 4, 5, 9]] = grads_KD
    dense = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n in (5, 2)]
    for parameter in dense:
        parameter.grad = torch.randn_like(parameter)
    dense_grads = [p.grad.clone() for p in dense if p.grad is not None]
    norm, factor = clip_factor(dense_grads, [grads_KD[:1], grads_KD[1:]], max_norm)
    expected = nn.utils.clip_grad_norm_([table, *dense], max_norm)
    torch.testing.assert_close(norm.to(dtype), expected)
    torch.testing.assert_close(grads_KD * factor, table.grad[[1, 4, 5, 9]])
    torch.testing.assert_close(dense_grads[0] * factor, dense[0].grad)
    assert (grads_KD * factor).dtype == dtype
    assert (factor.item() == 1) == (max_norm == 1e6)


def test_clipping_sums_only_rows_over_ranks() -> None:
    dense, rows = torch.tensor([3.0]), torch.tensor([[2.0, 2.0]])
    norm, _ = clip_factor([dense], [rows], 1.0, sum_over_ranks=lambda squares: 2 * squares)
    assert norm.item() == pytest.approx(5.0)


def test_clipping_of_nothing_and_of_bad_gradients() -> None:
    norm, factor = clip_factor([], [torch.zeros(0, 4)], 1.0)
    assert (norm.item(), factor.item()) == (0.0, 1.0)
    for bad in (math.nan, math.inf):
        norm, _ = clip_factor([torch.tensor([1.0, bad])], [torch.ones(1, 2)], 1.0)
        assert not math.isfinite(norm.item())  # what the trainer stops on


def test_clipping_of_bf16_gradients_sums_in_fp32() -> None:
    norm, _ = clip_factor([torch.ones(100_000, dtype=torch.bfloat16)], [], 1.0)
    assert norm.item() == pytest.approx(math.sqrt(100_000), rel=1e-6)


# --------------------------------------------------------------------------------------- wording


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({}, []),
        ({"sparse": {"name": "sgd"}, "dense": {"name": "sgd"}}, []),
        ({"dense": {"weight_decay": 0.1}}, []),
        ({"sparse": {"name": "adam"}}, ["one step count"]),
        ({"sparse": {"name": "rowwise_adagrad"}}, ["mean square"]),
        ({"sparse": {"weight_decay": 0.1}}, ["only on the rows of the batch"]),
        (
            {
                "sparse": {"name": "adam", "weight_decay": 0.1},
                "dense": {"name": "adamw", "weight_decay": 0.1},
            },
            ["one step count", "only on the rows of the batch", "shrinks the weight itself"],
        ),
    ],
)
def test_each_difference_from_dense_torch_is_told_once(
    overrides: dict[str, Any], told: list[str]
) -> None:
    first, *differences = describe_semantics(config_of(**overrides))
    assert first.startswith("optimizers: dense ")
    assert len(differences) == len(told)
    for line, words in zip(differences, told, strict=True):
        assert words in line


def test_effective_settings_are_one_line() -> None:
    config = config_of(
        eps=1e-6,
        dense={"name": "adamw", "lr": 0.001, "weight_decay": 0.01},
        sparse={"name": "rowwise_adagrad", "lr": 0.02, "eps": 1e-4},
    )
    assert describe_semantics(config)[0] == (
        "optimizers: dense adamw lr 0.001, eps 1e-06, betas 0.9 0.999, weight decay 0.01; "
        "sparse rowwise_adagrad lr 0.02, eps 0.0001, weight decay 0"
    )
