"""The trainer against plain torch, and what it does with values that aren't finite."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from data.batch import Batch
from data.parquet import Order, PreparedDataset
from dlrm.build import build_model, build_tables
from dlrm.optim import build_dense_optimizer
from dlrm.run_folder import RunFolder
from dlrm.trainer import NonFiniteError, Trainer
from embeddings.reference import ReferenceEmbeddings
from embeddings.row_optim import RowOptimizerConfig
from tests.commands import (
    Parts,
    arrays_of,
    build_trainer,
    compose_config,
    dense_values,
    dlrm,
    latest,
    read_result,
    table_values,
    tiny,
    train_lines,
    without_plots,
    write_visits,
)

# (sparse rule, dense rule of the same kind)
RULES = [("sgd", "sgd"), ("adagrad", "adagrad"), ("rowwise_adagrad", "adagrad"), ("adam", "adam")]
LR = {"sgd": 0.5, "adagrad": 0.1, "rowwise_adagrad": 0.1, "adam": 0.02}


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """`launch.num_threads` is set for the whole process: put it back."""
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def visits(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    """193 rows: batches of 10 leave a last one of 3."""
    return write_visits(tmp_path_factory.mktemp("visits"), 193)


def take_step(trainer: Trainer, batch: Batch) -> float:
    planned = trainer.pipeline([batch], 1).take()
    assert planned is not None
    return trainer.step(planned)


def optimizers(sparse: str, dense: str, **more: Any) -> dict[str, Any]:
    return {
        "sparse": {"name": sparse, "lr": LR[sparse]},
        "dense": {"name": dense, "lr": LR[dense]},
        **more,
    }


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], what: str) -> None:
    assert ours.keys() == theirs.keys(), what
    for name, values in ours.items():
        torch.testing.assert_close(
            values, theirs[name], rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{what} {n}: {m}"
        )


# ----------------------------------------------------------------------- the same as plain torch


def train_plainly(parts: Parts, num_steps: int) -> tuple[list[float], nn.Module, Any]:
    """A training loop as anyone would write it, over the same batches."""
    config, dataset = parts.config, parts.dataset
    tables, features = build_tables(config, dataset.manifest)
    sparse, dense = config.optim.sparse, config.optim.dense
    embeddings = ReferenceEmbeddings(
        tables,
        features,
        RowOptimizerConfig(sparse.name, eps=1e-8),  # type: ignore[arg-type]
        dtype=torch.float64,
        seed=config.seed,
    )
    model = build_model(config, dataset.manifest)
    rule: Any = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}
    more = {} if dense.name == "sgd" else {"eps": 1e-8}
    optimizer = rule[dense.name](model.parameters(), lr=dense.lr, foreach=False, **more)
    losses: list[float] = []
    for epoch in range(config.train.epochs):
        order = Order(config.data.batch_size, seed=config.seed, epoch=epoch, shuffle=True)
        for batch in dataset.batches("train", order):
            if len(losses) == num_steps:
                break
            assert batch.label_B is not None
            assert batch.weight_B is not None
            logits_B = model(batch.dense_BN.double(), embeddings.lookup(batch.ids))
            weight_B = batch.weight_B.double()
            loss_B = functional.binary_cross_entropy_with_logits(
                logits_B, batch.label_B.double(), reduction="none"
            )
            loss = (weight_B * loss_B).sum() / weight_B.sum()
            loss.backward()
            factor = min(1.0, (len(losses) + 1) / 8)  # optim.schedule.warmup_steps
            embeddings.apply(sparse.lr * factor)
            optimizer.param_groups[0]["lr"] = dense.lr * factor
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return losses, model, embeddings


@pytest.mark.parametrize(("sparse", "dense"), RULES)
def test_50_steps_in_fp64_equal_a_plain_training_loop(
    sparse: str, dense: str, visits: PreparedDataset, tmp_path: Path
) -> None:
    """Losses, rows, their state and dense weights, over three epochs with a smaller last batch,
    example weights, shared tables, bags with weights and means, empty bags and a warm-up."""
    parts = build_trainer(
        visits,
        tmp_path / "run",
        {
            "train": {"precision": "fp64", "epochs": 3, "max_steps": 50, "log_every": 1},
            "optim": optimizers(sparse, dense, schedule={"warmup_steps": 8}),
            "seed": 3,
        },
    )
    parts.trainer.fit()
    losses, model, embeddings = train_plainly(parts, 50)
    logged = [line["loss"] for line in train_lines(tmp_path / "run")]
    np.testing.assert_allclose(logged, losses, rtol=1e-10)
    assert len(losses) == 50
    theirs = {
        f"{table}.{name}": values
        for table in ("shared", "many", "words")
        for name, values in embeddings.read(table).items()
    }
    assert_same(table_values(parts.trainer), theirs, "rows")
    assert_same(dense_values(parts.trainer), dict(model.state_dict()), "dense")


@pytest.mark.parametrize(("sparse", "dense"), RULES)
def test_micro_batches_train_the_same_model(
    sparse: str, dense: str, visits: PreparedDataset, tmp_path: Path
) -> None:
    """20 steps; the last batch has 3 samples, fewer than the 4 micro-batches asked for."""
    values = []
    for accumulate in (1, 4):
        parts = build_trainer(
            visits,
            tmp_path / str(accumulate),
            {
                "train": {"precision": "fp64", "accumulate": accumulate, "log_every": 1},
                "optim": optimizers(sparse, dense),
            },
        )
        parts.trainer.fit()
        assert parts.trainer.steps_done == 20
        losses = torch.tensor([line["loss"] for line in train_lines(tmp_path / str(accumulate))])
        values.append((table_values(parts.trainer), dense_values(parts.trainer), losses))
    for whole, cut, what in zip(*values, ("rows", "dense", "losses"), strict=True):
        if what == "losses":
            torch.testing.assert_close(cut, whole, rtol=1e-10, atol=0)
        else:
            assert_same(cut, whole, what)


def pooled_plainly(batch: Batch, tables: dict[str, Tensor], dataset: PreparedDataset) -> Tensor:
    """Every bag by itself, over dense parameters."""
    ids, columns = batch.ids, []
    for index, feature in enumerate(dataset.features):
        rows = []
        for sample in range(batch.batch_size):
            start, stop = ids.offsets[index * batch.batch_size + sample :][:2].tolist()
            bag_LD = tables[feature.table][ids.values_L[start:stop]]
            if ids.weights_L is not None:
                bag_LD = bag_LD * ids.weights_L[start:stop, None].double()
            divisor = max(stop - start, 1) if feature.pooling == "mean" else 1
            rows.append(bag_LD.sum(0) / divisor)
        columns.append(torch.stack(rows))
    return torch.cat(columns, dim=1)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_clipping_is_torch_s_over_all_parameters(
    accumulate: int, visits: PreparedDataset, tmp_path: Path
) -> None:
    """The norm is that of one model: `clip_grad_norm_` over dense weights and whole tables."""
    clip_norm = 0.35
    train = {"precision": "fp64", "accumulate": accumulate, "max_steps": 15}
    optim = optimizers("sgd", "sgd", clip_norm=clip_norm)
    parts = build_trainer(visits, tmp_path / "run", {"train": train, "optim": optim})
    tables = {
        name.removesuffix(".weight"): values.clone().requires_grad_()
        for name, values in table_values(parts.trainer).items()
    }
    parts.trainer.fit()
    model = build_model(parts.config, visits.manifest)
    parameters = [*model.parameters(), *tables.values()]
    optimizer = torch.optim.SGD(parameters, lr=LR["sgd"])
    norms = []
    for number, batch in enumerate(visits.batches("train", Order(10, shuffle=True))):
        if number == 15:
            break
        assert batch.label_B is not None
        assert batch.weight_B is not None
        logits_B = model(batch.dense_BN.double(), pooled_plainly(batch, tables, visits))
        loss = functional.binary_cross_entropy_with_logits(
            logits_B, batch.label_B.double(), weight=batch.weight_B.double(), reduction="sum"
        )
        (loss / batch.weight_B.double().sum()).backward()
        norms.append(float(nn.utils.clip_grad_norm_(parameters, clip_norm)))
        optimizer.step()
        optimizer.zero_grad()
    # Both kinds of step occur, or the test says nothing.
    assert min(norms) < clip_norm < max(norms), norms
    theirs = {f"{name}.weight": values.detach() for name, values in tables.items()}
    assert_same(table_values(parts.trainer), theirs, "rows")
    assert_same(dense_values(parts.trainer), dict(model.state_dict()), "dense")


class SumModel(nn.Module):
    """The sum of one dense weight and every pooled element: each has the derivative 1."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, 1, bias=False, dtype=torch.float64)

    def forward_dense(self, dense_BN: Tensor) -> Tensor:
        return torch.ones(len(dense_BN), 1, dtype=torch.float64)

    def forward_pooled(self, ones_B1: Tensor, pooled_BS: Tensor) -> Tensor:
        return self.head(ones_B1)[:, 0] + pooled_BS.sum(1)


def test_b24_eps_set_once_reaches_both_parts(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the overrides to one step: gradient 1e-3, lr 1, state 0, eps 1e-3 move by -0.5."""
    shared = tiny(tmp_path_factory)
    assert dlrm("prepare", *[o for o in shared if o.startswith("data.")]) == 0
    both = ["optim=adagrad", "optim.eps=1e-3", "optim.sparse.lr=1", "optim.dense.lr=1"]
    config = compose_config("train", *shared, *both, "train.precision=fp64")
    dataset = PreparedDataset(Path(config.data.root))
    trainer = Trainer(config, dataset, RunFolder(tmp_path / "run"), print)
    trainer.model = SumModel()  # type: ignore[assignment]
    trainer.dense_optimizer = build_dense_optimizer(trainer.model, config.optim)
    monkeypatch.setattr("dlrm.trainer.bce_loss", lambda logits_B, *_: 1e-3 * logits_B.sum())
    rows_before, dense_before = table_values(trainer), dense_values(trainer)

    sample = next(dataset.batches("train", Order(1)))
    take_step(trainer, sample)

    moved = dense_values(trainer)["head.weight"] - dense_before["head.weight"]
    assert moved.item() == pytest.approx(-0.5, abs=1e-12)
    rows_after = table_values(trainer)
    for feature, row in zip(dataset.features, sample.ids.values_L, strict=True):
        name = f"{feature.table}.weight"
        moved_D = rows_after[name][row] - rows_before[name][row]
        torch.testing.assert_close(moved_D, torch.full_like(moved_D, -0.5), rtol=0, atol=1e-12)


# ----------------------------------------------------------------------------- precision, schedule


def test_bf16_trains_and_keeps_fp32_weights(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_plots(monkeypatch)
    shared = [*tiny(tmp_path_factory), "train.epochs=2", "train.log_every=4", "optim.dense.lr=0.02"]
    losses = {}
    for precision in ("fp32", "bf16"):
        run_dir = tmp_path / precision
        more = [f"train.precision={precision}", f"hydra.run.dir={run_dir}"]
        assert dlrm("train", *shared, *more) == 0
        losses[precision] = [line["loss"] for line in train_lines(run_dir)]
    assert losses["bf16"][-1] < losses["bf16"][0] - 0.05
    # bf16 was really used, and went the same way up to its rounding.
    assert losses["bf16"] != losses["fp32"]
    np.testing.assert_allclose(losses["bf16"], losses["fp32"], atol=0.03)
    kept = arrays_of(latest(tmp_path / "bf16"))
    assert "C1.weight" in kept
    assert {values.dtype for values in kept.values()} == {np.dtype(np.float32)}


def test_schedule_is_that_of_the_steps_in_the_log(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warm-up over 4 steps, then a square decay over the last 4 of 12."""
    without_plots(monkeypatch)
    schedule = ["optim.schedule.warmup_steps=4", "optim.schedule.decay_steps=4"]
    shared = [*tiny(tmp_path_factory), *schedule, "train.max_steps=12"]
    expected = [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 0.75**2, 0.5**2, 0.25**2]
    for log_every in (1, 5):
        run_dir = tmp_path / str(log_every)
        more = [f"train.log_every={log_every}", f"hydra.run.dir={run_dir}"]
        assert dlrm("train", *shared, *more, "optim.dense.lr=0.03", "optim.sparse.lr=0.02") == 0
        # A line of several steps, the shorter last one too, has the rates of its last step.
        for line in train_lines(run_dir):
            factor = expected[line["step"] - 1]
            assert line["lr_dense"] == pytest.approx(0.03 * factor)
            assert line["lr_sparse"] == pytest.approx(0.02 * factor)
        steps = {1: list(range(1, 13)), 5: [5, 10, 12]}[log_every]
        assert [line["step"] for line in train_lines(run_dir)] == steps


# ------------------------------------------------------------------------------- non-finite values


@pytest.mark.parametrize("more", [[], ["train.backend=torch", "train.accumulate=4"]])
def test_b27_an_infinite_value_at_step_5(
    more: list[str],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The run stops there and says where; what is kept is the model after step 4, and it works."""
    without_plots(monkeypatch)
    shared = [*tiny(tmp_path_factory), *more]
    clean, broken = tmp_path / "clean", tmp_path / "broken"
    assert dlrm("train", *shared, "train.max_steps=4", f"hydra.run.dir={clean}") == 0
    batches = PreparedDataset.batches

    def poisoned(self: PreparedDataset, part: str, order: Order) -> Iterator[Batch]:
        for number, batch in enumerate(batches(self, part, order)):
            if part == "train" and number == 4:
                dense_BN = batch.dense_BN.clone()
                dense_BN[7, 2] = float("inf")
                batch = replace(batch, dense_BN=dense_BN)
            yield batch

    with monkeypatch.context() as patched:
        patched.setattr(PreparedDataset, "batches", poisoned)
        capfd.readouterr()
        assert dlrm("train", *shared, f"hydra.run.dir={broken}") == 1
    err = capfd.readouterr().err
    assert "step 5" in err
    assert "column I3 is inf" in err
    assert "Traceback" not in err
    assert read_result(broken)["status"].startswith("failed: NonFiniteError: step 5")
    # What came before is in the log, though the run failed before the first 50 steps.
    assert train_lines(broken)[-1]["step"] == 4
    kept = arrays_of(latest(broken))
    assert latest(broken).name == "step-000004"
    for name, values in kept.items():
        assert np.isfinite(values).all(), name
        np.testing.assert_array_equal(values, arrays_of(latest(clean))[name], err_msg=name)
    assert dlrm("evaluate", f"run={broken}", f"hydra.run.dir={tmp_path / 'eval'}") == 0
    assert read_result(tmp_path / "eval")["eval"]["auc"] == pytest.approx(
        read_result(clean)["eval"]["auc"], abs=1e-6
    )


@pytest.mark.parametrize(
    "more", [["train.checkpoint_every=1"], ["train.max_steps=1"], ["train.eval_every=1"]]
)
def test_a_model_that_an_update_broke_is_not_kept(
    more: list[str],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """eps 0 makes 0/0 of a unit without gradient: the loss tells only at the next step."""
    without_plots(monkeypatch)
    run_dir = tmp_path / "run"
    more = [*more, "optim.eps=0", "optim.sparse.eps=1e-8", "model.bottom_mlp=[64]"]
    assert dlrm("train", *tiny(tmp_path_factory), *more, f"hydra.run.dir={run_dir}") == 1
    err = capfd.readouterr().err
    assert "step 1: a weight" in err
    assert "optim.eps" in err
    assert "Traceback" not in err
    assert not list(run_dir.glob("checkpoints/step-*"))
    capfd.readouterr()
    assert dlrm("evaluate", f"run={run_dir}", f"hydra.run.dir={tmp_path / 'eval'}") == 2
    assert "holds no model" in capfd.readouterr().err


def test_an_overflowing_gradient_norm_stops_the_run(
    visits: PreparedDataset, tmp_path: Path
) -> None:
    parts = build_trainer(visits, tmp_path / "run", {"optim": {"clip_norm": 1.0}})
    before = dense_values(parts.trainer)
    trainer = parts.trainer
    with torch.no_grad():
        trainer.model.head.weight.fill_(1e25)  # Finite logits, but squares beyond fp32.
    batch = next(visits.batches("train", Order(10)))
    with pytest.raises(NonFiniteError, match="step 1: the gradient norm is inf"):
        take_step(trainer, batch)
    after = dense_values(trainer)
    for name in before.keys() - {"head.weight"}:
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=0)


def test_infinite_logits_of_finite_weights_are_told(
    visits: PreparedDataset, tmp_path: Path
) -> None:
    trainer = build_trainer(visits, tmp_path / "run", {}).trainer
    with torch.no_grad():
        trainer.model.head.weight.fill_(3e38)
    batch = next(visits.batches("train", Order(10)))
    with pytest.raises(NonFiniteError, match=r"step 1: .* logits_B is -?inf in row [0-9]$"):
        take_step(trainer, batch)


def test_f13_example_weights_of_zero_change_nothing(
    visits: PreparedDataset, tmp_path: Path
) -> None:
    parts = build_trainer(visits, tmp_path / "run", {})
    batch = next(visits.batches("train", Order(10)))
    assert batch.weight_B is not None
    before = {n: v.clone() for n, v in table_values(parts.trainer).items()}
    dense_before = dense_values(parts.trainer)
    weightless = replace(batch, weight_B=torch.zeros_like(batch.weight_B))
    assert take_step(parts.trainer, weightless) == 0.0
    rows, dense = table_values(parts.trainer), dense_values(parts.trainer)
    assert all(torch.equal(rows[name], before[name]) for name in rows)
    assert all(torch.equal(dense[name], dense_before[name]) for name in dense)
