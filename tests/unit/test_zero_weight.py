"""Global batches whose example weights sum to 0: they add nothing, and the run goes on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from data.parquet import Order, PreparedDataset
from dlrm.build import build_model, build_tables, row_optimizer
from dlrm.optim import Schedule, build_dense_optimizer
from embeddings.reference import ReferenceEmbeddings
from tests.commands import build_trainer, dense_values, dlrm, table_values, train_lines
from tests.commands import write_visits as write_rows
from tests.host_run_cases import HostRanks, in_host, write_baskets
from tests.trainer_ranks import (
    Ranks,
    assert_close,
    assert_equal_bits,
    assert_same_on_all_ranks,
    make_config,
    rules,
)

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]

RULES = [("sgd", "sgd"), ("adagrad", "adagrad"), ("rowwise_adagrad", "adagrad"), ("adam", "adamw")]
Plain = tuple[list[float], dict[str, Tensor], dict[str, Tensor], int]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    """61 rows, three of five with the weight 0: of batches of 3 about one of five has none."""
    return write_rows(tmp_path_factory.mktemp("visits"), 61, weightless=0.6)


@pytest.fixture(scope="module")
def baskets(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    return write_baskets(tmp_path_factory.mktemp("baskets"), 61, weightless=0.6)


def overrides_of(sparse: str, dense: str, **train: Any) -> dict[str, Any]:
    """Two epochs in fp64, with all that an update without a gradient would move: decay, warm-up."""
    optim = rules(sparse, dense, schedule={"warmup_steps": 8})
    optim["sparse"] |= {"weight_decay": 0.02}
    optim["dense"] |= {"weight_decay": 0.01}
    loop = {"precision": "fp64", "epochs": 2, "log_every": 1, **train}
    return {"data": {"batch_size": 3}, "train": loop, "optim": optim}


def train_plainly(dataset: PreparedDataset, overrides: dict[str, Any]) -> Plain:
    """A loop as anyone would write it: a batch without weight is counted and nothing else.

    Returns:
        Losses, rows and their state, dense weights, and batches without weight.
    """
    config = make_config(overrides)
    tables, features = build_tables(config, dataset.manifest)
    embeddings = ReferenceEmbeddings(
        tables, features, row_optimizer(config), dtype=torch.float64, seed=config.seed
    )
    model = build_model(config, dataset.manifest)
    optimizer = build_dense_optimizer(model, config.optim)
    per_epoch = dataset.num_batches("train", config.data.batch_size)
    schedule = Schedule(config.optim.schedule, per_epoch * config.train.epochs)
    losses: list[float] = []
    num_weightless = 0
    for epoch in range(config.train.epochs):
        order = Order(config.data.batch_size, seed=config.seed, epoch=epoch, shuffle=True)
        for batch in dataset.batches("train", order):
            factor = schedule.factor(len(losses))
            assert batch.label_B is not None
            assert batch.weight_B is not None
            if not batch.weight_B.any():
                num_weightless += 1
                losses.append(0.0)
                continue
            logits_B = model(batch.dense_BN.double(), embeddings.lookup(batch.ids))
            weight_B = batch.weight_B.double()
            loss_B = functional.binary_cross_entropy_with_logits(
                logits_B, batch.label_B.double(), reduction="none"
            )
            loss = (weight_B * loss_B).sum() / weight_B.sum()
            loss.backward()
            embeddings.apply(config.optim.sparse.lr * factor)
            optimizer.param_groups[0]["lr"] = config.optim.dense.lr * factor
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    values = {
        f"{table.name}.{name}": values
        for table in tables
        for name, values in embeddings.read(table.name).items()
    }
    return losses, values, dict(model.state_dict()), num_weightless


def assert_as_plain(ranks: Ranks, dataset: PreparedDataset, overrides: dict[str, Any]) -> None:
    losses, values, dense, num_weightless = train_plainly(dataset, overrides)
    assert num_weightless > 3
    found = ranks.fit()
    np.testing.assert_allclose(ranks.losses(), losses, rtol=1e-10)
    assert_close(found[0].tables, values)
    for outcome in found:
        assert_close(outcome.dense, dense)
    assert_same_on_all_ranks(found)
    lines = train_lines(ranks.folder.path)
    assert sum(line.get("steps_without_weight", 0) for line in lines) == num_weightless


@pytest.mark.parametrize(("sparse", "dense"), RULES)
def test_f13_zero_weight_batch_adds_nothing(
    sparse: str, dense: str, rows: PreparedDataset, tmp_path: Path
) -> None:
    """Not to rows, state, dense weights or Adam's count of steps; the schedule goes on."""
    overrides = overrides_of(sparse, dense)
    assert_as_plain(Ranks(rows, tmp_path / "run", 1, overrides=overrides), rows, overrides)


@pytest.mark.parametrize(
    ("rule", "world_size", "layout", "train"),
    [
        (0, 3, "mixed", {"accumulate": 2}),
        (1, 2, "row_wise", {"overlap": False}),
        (2, 4, "column_wise", {}),
        (3, 2, "mixed", {"accumulate": 3}),
        (3, 3, "replicated", {}),
    ],
)
def test_f13_ranks_agree_on_zero_weight_batches(
    rule: int,
    world_size: int,
    layout: str,
    train: dict[str, Any],
    rows: PreparedDataset,
    tmp_path: Path,
) -> None:
    overrides = overrides_of(*RULES[rule], **train)
    ranks = Ranks(rows, tmp_path / "run", world_size, layout, overrides)
    assert_as_plain(ranks, rows, overrides)


@pytest.mark.slow
@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    rule=st.sampled_from(RULES),
    world_size=st.integers(1, 4),
    layout=st.sampled_from(["mixed", "row_wise", "column_wise", "table_wise", "replicated"]),
    accumulate=st.integers(1, 3),
    overlap=st.booleans(),
    batch_size=st.integers(1, 4),
    clip_norm=st.sampled_from([None, 0.1]),
)
def test_f13_any_run_with_zero_weight_batches_is_the_plain_one(
    rule: tuple[str, str],
    world_size: int,
    layout: str,
    accumulate: int,
    overlap: bool,
    batch_size: int,
    clip_norm: float | None,
    rows: PreparedDataset,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    train = {"accumulate": min(accumulate, batch_size), "overlap": overlap, "max_steps": 40}
    overrides = overrides_of(*rule, **train)
    overrides["data"]["batch_size"] = batch_size
    overrides["optim"]["clip_norm"] = clip_norm
    alone = Ranks(rows, tmp_path_factory.mktemp("one") / "run", 1, overrides=overrides).fit()
    if clip_norm is None and batch_size == 3:
        del overrides["train"]["max_steps"]
        ranks = Ranks(rows, tmp_path_factory.mktemp("many") / "run", world_size, layout, overrides)
        assert_as_plain(ranks, rows, overrides)
        return
    ranks = Ranks(rows, tmp_path_factory.mktemp("many") / "run", world_size, layout, overrides)
    found = ranks.fit()
    assert_close(found[0].tables, alone[0].tables)
    assert_close(found[0].dense, alone[0].dense)


@pytest.mark.parametrize("mode", ["gather", "lookahead", "hotline"])
@pytest.mark.parametrize("rule", [2, 3])
def test_f13_zero_weight_batches_leave_rows_in_host_memory_alone(
    mode: str, rule: int, baskets: PreparedDataset, tmp_path: Path
) -> None:
    """Their cold rows are staged and go back, or on to the next step, unchanged."""
    overrides = {**overrides_of(*RULES[rule]), **in_host(mode)}
    for world_size in (1, 2):
        ranks = HostRanks(baskets, tmp_path / f"{mode}-{world_size}", world_size, overrides)
        assert_as_plain(ranks, baskets, overrides)


def test_f13_a_fused_update_is_left_out_too(rows: PreparedDataset, tmp_path: Path) -> None:
    """With eps 0 an update by a gradient of 0 would give 0/0."""
    pytest.importorskip("fbgemm_gpu")
    outcomes = []
    for backend in ("torch", "fbgemm"):
        optim = rules("adagrad", "adagrad", eps=0.0)
        optim["dense"]["eps"] = 1e-8
        loop = {"backend": backend, "max_steps": 8, "log_every": 1}
        parts = build_trainer(
            rows,
            tmp_path / backend,
            {"data": {"batch_size": 1, "shuffle": False}, "train": loop, "optim": optim},
        )
        parts.trainer.fit()
        assert parts.trainer.recorder.steps_without_weight > 0
        outcomes.append((table_values(parts.trainer), dense_values(parts.trainer)))
    for ours, theirs in zip(*outcomes, strict=True):
        for name, values in ours.items():
            torch.testing.assert_close(values, theirs[name], rtol=1e-4, atol=1e-6)


def test_f13_a_run_stopped_at_a_zero_weight_batch_goes_on(
    rows: PreparedDataset, tmp_path: Path
) -> None:
    overrides = overrides_of("adam", "adam")
    whole = Ranks(rows, tmp_path / "whole", 1, overrides=overrides)
    expected = whole.fit()[0]
    weightless = [
        line["step"] for line in train_lines(tmp_path / "whole") if "steps_without_weight" in line
    ]
    stop_after = weightless[len(weightless) // 2]
    parts = tmp_path / "parts"
    Ranks(rows, parts, 1, overrides=overrides, stop_after=stop_after).fit()
    resumed = Ranks(rows, parts, 1, overrides=overrides, resume="latest").trainer()
    resumed.fit()
    assert resumed.digest() == expected.digest
    assert resumed.recorder.steps_without_weight == len(weightless)
    assert_equal_bits(dense_values(resumed), expected.dense)


def test_c09_a_weightless_row_alone_in_the_last_batch_ends_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """513 rows, weight 1 but 0 in the last, batches of 256: the steps without weight are told."""
    raw = tmp_path / "clicks.csv"
    rng = np.random.default_rng(0)
    lines = [f"{rng.integers(0, 2)},{rng.normal():.3f},{rng.integers(0, 9)},1" for _ in range(513)]
    lines[-1] = lines[-1][:-1] + "0"
    for path in (raw, tmp_path / "later.csv"):
        path.write_text("label,x,item,w\n" + "\n".join(lines) + "\n")
    (tmp_path / "conf" / "data").mkdir(parents=True)
    (tmp_path / "conf" / "data" / "clicks.yaml").write_text(
        "defaults: [base, _self_]\nname: clicks\nschema:\n  name: clicks\n"
        "  format: {kind: csv, delimiter: ',', header: true}\n"
        "  label: {column: label, positive: ['1'], negative: ['0']}\n  example_weight: w\n"
        "  dense: {x: {transform: identity}}\n"
        "  sparse: {item: {token: int, vocabulary: dictionary, missing: row}}\n"
        "  split: {kind: given}\n"
    )
    status = dlrm(
        "train",
        f"--config-dir={tmp_path / 'conf'}",
        "data=clicks",
        f"data.raw_train={raw}",
        f"data.raw_test={tmp_path / 'later.csv'}",
        f"data.root={tmp_path / 'prepared'}",
        "data.batch_size=256",
        "data.shuffle=false",
        "model.bottom_mlp=[8]",
        "model.top_mlp=[8]",
        "train.epochs=2",
        f"hydra.run.dir={tmp_path / 'run'}",
    )
    assert status == 0
    assert "2 of 6 steps" in capsys.readouterr().out
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["train"]["steps"], result["train"]["steps_without_weight"]) == (6, 2)
    assert result["train"]["loss_last"] > 0.1
    assert math.isfinite(result["eval"]["auc"])
