"""The real `Trainer` on 1 to 4 ranks, as threads: the same model, the same errors, the same files.

The data have everything that a step sees (`write_visits`); batches of 10 of 193 rows leave ranks
with uneven shares and with none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from data.batch import Batch, JaggedIds
from data.parquet import Order, PreparedDataset
from dlrm.checkpoint import Checkpoints, Contents, Progress
from dlrm.checkpoint_load import load_model
from dlrm.metrics import EvalResult
from dlrm.optim import clip_factor
from dlrm.scoring import evaluate
from dlrm.trainer import NonFiniteError, Trainer
from embeddings import IdOutOfRange
from tests.commands import (
    arrays_of,
    dense_values,
    eval_lines,
    latest,
    table_values,
    write_visits,
)
from tests.thread_ranks import ThreadRank, run_ranks
from tests.trainer_ranks import (
    FP64,
    Outcome,
    Ranks,
    assert_close,
    assert_equal_bits,
    assert_same_on_all_ranks,
    fit,
    read_tables,
    rules,
)

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def visits(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    """193 rows: batches of 10 leave a last one of 3."""
    return write_visits(tmp_path_factory.mktemp("visits"), 193)


# ------------------------------------------------------------------ the same model on any ranks


@pytest.fixture(scope="module")
def alone(
    visits: PreparedDataset, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Outcome, list[float]]]:
    """The run of one process with the same overrides, once for all tests that ask for it."""
    known: dict[str, tuple[Outcome, list[float]]] = {}

    def run(overrides: dict[str, Any]) -> tuple[Outcome, list[float]]:
        key = json.dumps(overrides)
        if key not in known:
            ranks = Ranks(visits, tmp_path_factory.mktemp("alone") / "run", 1, overrides=overrides)
            known[key] = (ranks.fit()[0], ranks.losses())
        return known[key]

    return run


# Every layout, every rule and every world size occur, and each rule for 50 steps under a table cut
# anyhow ("mixed"), where a row-wise state is of columns on several ranks; the others go one epoch
# and a part of the next.
CASES = [
    ("sgd", "sgd", 2, "row_wise", "kv", 25),
    ("sgd", "sgd", 4, "mixed", "mixed", 50),
    ("adagrad", "adagrad", 3, "column_wise", "pooled", 25),
    ("adagrad", "adagrad", 4, "row_wise", "pooled", 25),
    ("adagrad", "adagrad", 3, "mixed", "kv", 50),
    ("rowwise_adagrad", "adagrad", 2, "column_wise", "kv", 25),
    ("rowwise_adagrad", "adagrad", 3, "pinwheel", "mixed", 25),
    ("rowwise_adagrad", "adagrad", 4, "mixed", "pooled", 50),
    ("adam", "adam", 3, "replicated", "kv", 25),
    ("adam", "adam", 4, "table_row_wise", "mixed", 25),
    ("adam", "adam", 2, "mixed", "mixed", 50),
    ("adam", "adam", 4, "lone", "pooled", 25),
]


@pytest.mark.parametrize(("sparse", "dense", "world_size", "layout", "exchange", "steps"), CASES)
def test_steps_in_fp64_come_to_the_model_of_one_process(
    sparse: str,
    dense: str,
    world_size: int,
    layout: str,
    exchange: str,
    steps: int,
    visits: PreparedDataset,
    tmp_path: Path,
    alone: Callable[..., tuple[Outcome, list[float]]],
) -> None:
    optim = rules(sparse, dense, schedule={"warmup_steps": 8})
    overrides = {"train": {**FP64, "max_steps": steps}, "optim": optim}
    expected, losses = alone(overrides)
    ranks = Ranks(visits, tmp_path / "run", world_size, layout, overrides, exchange)
    found = ranks.fit()
    np.testing.assert_allclose(ranks.losses(), losses, rtol=1e-10)
    assert len(losses) == steps
    assert_close(found[0].tables, expected.tables)
    for outcome in found:
        assert_close(outcome.dense, expected.dense)
    assert_same_on_all_ranks(found)
    # The shares differ, or the test says nothing of them.
    sizes = [set(of_step) for of_step in zip(*(outcome.sizes for outcome in found), strict=True)]
    assert sum(len(of_step) > 1 for of_step in sizes) > steps // 2
    if world_size == 4:
        assert any(0 in of_step for of_step in sizes)
    # And so do the figures of the rows that they evaluate.
    for name, value in expected.evaluated.as_dict().items():
        assert found[0].evaluated.as_dict()[name] == pytest.approx(value, rel=1e-9), name


@pytest.mark.parametrize(
    ("sparse", "dense", "world_size", "layout"),
    [
        ("sgd", "sgd", 3, "column_wise"),
        ("rowwise_adagrad", "adagrad", 2, "mixed"),
        ("adam", "adam", 4, "mixed"),
    ],
)
def test_micro_batches_and_clipping_on_ranks(
    sparse: str,
    dense: str,
    world_size: int,
    layout: str,
    visits: PreparedDataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    alone: Callable[..., tuple[Outcome, list[float]]],
) -> None:
    """A share of two or none samples is cut into three micro-batches all the same; the norm is that
    of every row once, replicas too."""
    optim = rules(sparse, dense, clip_norm=0.3)
    overrides = {"train": {**FP64, "accumulate": 3, "max_steps": 20}, "optim": optim}
    expected, losses = alone(overrides)
    factors: list[float] = []

    def noting(*args: Any) -> tuple[Tensor, Tensor]:
        norm, factor = clip_factor(*args)
        factors.append(float(factor))
        return norm, factor

    monkeypatch.setattr("dlrm.trainer.clip_factor", noting)
    ranks = Ranks(visits, tmp_path / "run", world_size, layout, overrides)
    found = ranks.fit()
    # Both kinds of step occur, or the test says nothing.
    assert min(factors) < 0.9 < max(factors) == 1.0
    np.testing.assert_allclose(ranks.losses(), losses, rtol=1e-10)
    assert_close(found[0].tables, expected.tables)
    assert_close(found[-1].dense, expected.dense)
    assert_same_on_all_ranks(found)


@pytest.mark.parametrize(
    ("world_size", "layout", "train", "optim"),
    [
        (2, "row_wise", {}, rules("adagrad", "adagrad")),
        (3, "mixed", {"accumulate": 2}, rules("rowwise_adagrad", "adagrad", clip_norm=0.3)),
        (4, "mixed", {"precision": "bf16"}, rules("adam", "adam")),
    ],
)
def test_overlap_changes_no_bit(
    world_size: int,
    layout: str,
    train: dict[str, Any],
    optim: dict[str, Any],
    visits: PreparedDataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With evaluations in between, during which the next batch's ids are under way."""
    monkeypatch.setattr(Trainer, "eval_part", lambda self: "train")
    found = {}
    for overlap in (True, False):
        more = {"overlap": overlap, "max_steps": 24, "epochs": 2, "eval_every": 7, "log_every": 1}
        overrides = {"train": {**train, **more}, "optim": optim}
        ranks = Ranks(visits, tmp_path / str(overlap), world_size, layout, overrides)
        found[overlap] = (ranks.fit(), ranks.losses(), eval_lines(ranks.folder.path))
    (on, *on_lines), (off, *off_lines) = found[True], found[False]
    assert on_lines == off_lines
    assert [line["step"] for line in on_lines[1]] == [7, 14, 21, 24]
    for outcome, other in zip(on, off, strict=True):
        assert (outcome.digest, outcome.evaluated) == (other.digest, other.evaluated)
        assert_equal_bits(outcome.tables, other.tables)
        assert_equal_bits(outcome.dense, other.dense)
    # The same collectives, but in another order: the next batch's before the end of this one's.
    assert sorted(on[0].kinds) == sorted(off[0].kinds)
    assert on[0].kinds != off[0].kinds
    num_parts = train.get("accumulate", 1)
    assert plans_before_grads(on[0].kinds, num_parts) == 2 * num_parts
    assert plans_before_grads(off[0].kinds, num_parts) == num_parts


def plans_before_grads(kinds: list[str], number: int) -> int:
    """Batches whose counts and ids are under way when gradients are sent for the n-th time."""
    position = [i for i, kind in enumerate(kinds) if kind == "grads"][number - 1]
    assert kinds[:position].count("counts") == kinds[:position].count("ids")
    return kinds[:position].count("ids")


def test_evaluations_leave_the_training_alone(
    visits: PreparedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch whose plan is under way during an evaluation is trained on as if there were none."""
    overrides = {"train": {"epochs": 2, "max_steps": 25}, "optim": rules("adagrad", "adagrad")}
    without = Ranks(visits, tmp_path / "without", 3, "mixed", overrides).fit()
    monkeypatch.setattr(Trainer, "eval_part", lambda self: "train")
    overrides["train"] |= {"eval_every": 4}
    evaluated = Ranks(visits, tmp_path / "with", 3, "mixed", overrides).fit()
    assert evaluated[0].digest == without[0].digest
    assert len(evaluated[0].history) == 7
    assert without[0].history == []


# ------------------------------------------------------------------------------- shares and batches


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_b48_every_row_is_used_once_in_an_epoch(
    world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """37 rows in global batches of 10: four steps, the last of 7 rows, on every rank."""
    dataset = write_visits(tmp_path, 37)
    monkeypatch.setattr(Trainer, "eval_part", lambda self: "train")
    ranks = Ranks(dataset, tmp_path / "run", world_size, "row_wise", {"train": {"epochs": 2}})

    def rows_of_steps(trainer: Trainer) -> list[tuple[int, list[int]]]:
        seen: list[tuple[int, list[int]]] = []
        step = trainer.step

        def record(planned: Any) -> float:
            seen.append((planned.global_batch_size, planned.batch.row_B.tolist()))
            return step(planned)

        trainer.step = record  # type: ignore[method-assign]
        trainer.fit()
        assert trainer.recorder.samples == 2 * 37
        return seen

    seen = ranks.run(rows_of_steps)
    for of_rank in seen:
        assert [size for size, _ in of_rank] == [10, 10, 10, 7] * 2
    rows_of_step = [
        [row for _, rows in of_step for row in rows] for of_step in zip(*seen, strict=True)
    ]
    assert [len(rows) for rows in rows_of_step] == [10, 10, 10, 7] * 2
    for epoch in (rows_of_step[:4], rows_of_step[4:]):
        assert sorted(row for rows in epoch for row in rows) == list(range(37))
    # What was evaluated is every row once, too, in batches of 17.
    assert eval_lines(ranks.folder.path)[-1]["eval"]["num_samples"] == 37


def test_fewer_rows_than_ranks(tmp_path: Path) -> None:
    """3 rows on 4 ranks, batches of 1: three ranks have no sample in any step."""
    dataset = write_visits(tmp_path, 3)
    overrides = {
        "data": {"batch_size": 1},
        "train": {"precision": "fp64", "epochs": 4, "log_every": 1},
        "optim": rules("adam", "adam"),
    }
    alone = Ranks(dataset, tmp_path / "alone", 1, overrides=overrides)
    four = Ranks(dataset, tmp_path / "four", 4, "mixed", overrides)
    expected, found = alone.fit()[0], four.fit()
    np.testing.assert_allclose(four.losses(), alone.losses(), rtol=1e-10)
    assert_close(found[0].tables, expected.tables)
    assert_same_on_all_ranks(found)
    assert [sum(of_step) for of_step in zip(*(o.sizes for o in found), strict=True)] == [1] * 12


def test_b18_replicas_stay_equal_to_the_bit(visits: PreparedDataset, tmp_path: Path) -> None:
    """fp32: after the start, after 10 steps, and after another model was put in place."""
    overrides = {"train": {"max_steps": 10}, "optim": rules("adagrad", "adagrad")}
    ranks = Ranks(visits, tmp_path / "run", 3, "replicated", overrides)

    def copies(trainer: Trainer) -> list[dict[str, Tensor]]:
        found = [table_values(trainer)]
        trainer.fit()
        found.append(table_values(trainer))
        load_model(trainer.checkpoints.find("latest"), trainer.model, trainer.embeddings)
        found.append(table_values(trainer))
        return found

    first, *others = ranks.run(copies)
    assert set(first[0]) >= {"shared.weight", "many.weight", "words.weight"}
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            assert_equal_bits(theirs, mine)
    assert not torch.equal(first[0]["shared.weight"], first[1]["shared.weight"])


# --------------------------------------------------------------------------------------- evaluation


class FirstPooled(nn.Module):
    """A model whose logit is its one pooled value."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, 1)

    def forward(self, dense_BN: Tensor, pooled_BS: Tensor) -> Tensor:
        return pooled_BS[:, 0]


def evaluate_predictions(comm: ThreadRank, of_rank: list[list[tuple[float, float]]]) -> EvalResult:
    """Metrics of `(label, probability)` pairs, each rank with its own."""
    embeddings = SimpleNamespace(
        comm=comm,
        plan_batch=lambda ids, training: None,
        lookup=lambda plan, training: pairs[:, 1:].logit(),
    )
    pairs = torch.tensor(of_rank[comm.rank], dtype=torch.float64).view(-1, 2)
    ids = JaggedIds(torch.empty(0, dtype=torch.int64), torch.zeros(len(pairs) + 1).long(), 1)
    batch = Batch(pairs[:, 1:].float(), ids, pairs[:, 0].float(), None, torch.arange(len(pairs)))
    model: Any = FirstPooled().double()
    return evaluate(model, embeddings, [batch], "fp64").result()  # type: ignore[arg-type]


def test_b30_auc_and_log_loss_are_over_all_ranks() -> None:
    of_rank = [[(0, 0.9), (1, 0.95)], [(0, 0.1), (1, 0.2)]]
    results = run_ranks(2, lambda comm: evaluate_predictions(comm, of_rank))
    # Either rank by itself has an AUC of 1.
    assert [result.auc for result in results] == [0.75, 0.75]
    of_rank = [[(1, 0.9), (0, 0.8), (1, 0.4)], [(0, 0.1)], []]
    results = run_ranks(3, lambda comm: evaluate_predictions(comm, of_rank))
    expected = -float(np.log([0.9, 0.2, 0.4, 0.9]).mean())
    for result in results:
        assert result.logloss == pytest.approx(expected, rel=1e-12)
        assert result.num_samples == 4


def test_b28_one_class_over_all_ranks_leaves_the_auc_undefined() -> None:
    of_rank = [[(0, 0.9), (0, 0.95)], [], [(0, 0.1)]]
    results = run_ranks(3, lambda comm: evaluate_predictions(comm, of_rank))
    for result in results:
        assert (result.auc, result.ne, result.num_samples) == (None, None, 3)
        assert result.logloss == pytest.approx(-float(np.log([0.1, 0.05, 0.9]).mean()), rel=1e-12)


@pytest.mark.parametrize(
    ("world_size", "layout"), [(2, "column_wise"), (3, "row_wise"), (4, "mixed")]
)
def test_figures_of_one_model_are_the_same_on_any_ranks(
    world_size: int, layout: str, visits: PreparedDataset, tmp_path: Path
) -> None:
    """Example weights count; the rows come in other batches, in other shares."""
    overrides = {"train": {"precision": "fp64"}}
    expected = Ranks(visits, tmp_path / "alone", 1, overrides=overrides).run(
        lambda trainer: trainer.evaluate("train").result()
    )[0]
    overrides["data"] = {"eval_batch_size": 5}
    found = Ranks(visits, tmp_path / "ranks", world_size, layout, overrides).run(
        lambda trainer: trainer.evaluate("train").result()
    )
    assert expected.sum_weight != expected.num_samples == 193
    for result in found:
        assert result == found[0]
        for name, value in vars(expected).items():
            assert getattr(result, name) == pytest.approx(value, rel=1e-12), name


# ------------------------------------------------------------------------- errors, on all alike


def on_rank(
    monkeypatch: pytest.MonkeyPatch, rank: int, number: int, change: Callable[[Batch], Batch]
) -> None:
    """Changes one training batch of one rank; the others read what they would."""
    batches = PreparedDataset.batches

    def changed(self: PreparedDataset, part: str, order: Order) -> Iterator[Batch]:
        for position, batch in enumerate(batches(self, part, order)):
            is_it = part == "train" and (order.rank, position) == (rank, number)
            yield change(batch) if is_it else batch

    monkeypatch.setattr(PreparedDataset, "batches", changed)


def infinite(batch: Batch) -> Batch:
    """The first sample's `y` is infinite."""
    assert batch.batch_size
    dense_BN = batch.dense_BN.clone()
    dense_BN[0, 1] = float("inf")
    return replace(batch, dense_BN=dense_BN)


def error_of(kind: type[Exception]) -> Callable[[Trainer], str]:
    """Trains; the error that must come, as text."""

    def run(trainer: Trainer) -> str:
        with pytest.raises(kind) as caught:
            trainer.fit()
        return str(caught.value)

    return run


@pytest.mark.parametrize("train", [{}, {"overlap": False}, {"accumulate": 3}])
def test_b27_an_infinite_value_on_one_rank_stops_all(
    train: dict[str, Any], visits: PreparedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All say the same: step, column, row. What is kept is the model after step 4."""
    clean = Ranks(visits, tmp_path / "clean", 3, "mixed", {"train": {**train, "max_steps": 4}})
    clean.fit()
    on_rank(monkeypatch, 2, 4, infinite)
    broken = Ranks(visits, tmp_path / "broken", 3, "mixed", {"train": train})
    messages = broken.run(error_of(NonFiniteError))
    assert len(set(messages)) == 1
    assert messages[0].startswith("step 5: the loss isn't finite; dense_BN column y is inf in row ")
    kept = latest(broken.folder.path)
    assert kept.name == "step-000004"
    expected = arrays_of(latest(clean.folder.path))
    for name, values in arrays_of(kept).items():
        np.testing.assert_array_equal(values, expected[name], err_msg=name)
        assert np.isfinite(values).all(), name


def test_a_row_that_is_not_finite_is_told_by_all(visits: PreparedDataset, tmp_path: Path) -> None:
    """The row is on one rank, the sample that looks it up on another."""
    ranks = Ranks(visits, tmp_path / "run", 3, "lone", {"train": {"evals_per_epoch": 1}})

    def run(trainer: Trainer) -> str:
        if trainer.comm.rank == 2:
            rows_RD = torch.full((31, 3), torch.nan)
            trainer.embeddings.store.write("words", 0, {"weight": rows_RD})
        return error_of(NonFiniteError)(trainer)

    messages = ranks.run(run)
    assert len(set(messages)) == 1
    assert messages[0].startswith("step 1: ")
    assert "feature words" in messages[0]
    # No model was ever finite: none is kept.
    assert not list(ranks.folder.path.glob("checkpoints/step-*"))


def test_a_gradient_norm_that_overflows_stops_all_ranks(
    visits: PreparedDataset, tmp_path: Path
) -> None:
    ranks = Ranks(visits, tmp_path / "run", 3, "row_wise", {"optim": {"clip_norm": 1.0}})

    def run(trainer: Trainer) -> str:
        with torch.no_grad():
            trainer.model.head.weight.fill_(1e25)  # Finite logits, but squares beyond fp32.
        return error_of(NonFiniteError)(trainer)

    assert ranks.run(run) == ["step 1: the gradient norm is inf"] * 3


def test_a_model_that_an_update_broke_on_one_rank_is_not_kept(
    visits: PreparedDataset, tmp_path: Path
) -> None:
    """The broken row's rank alone can see it; all refuse to keep the model."""
    ranks = Ranks(visits, tmp_path / "run", 3, "lone", {"train": {"checkpoint_every": 3}})

    def run(trainer: Trainer) -> str:
        step = trainer.step

        def breaking(planned: Any) -> float:
            loss = step(planned)
            if trainer.comm.rank == 2 and trainer.steps_done == 5:
                trainer.embeddings.store.write("many", 0, {"weight": torch.full((1, 6), torch.inf)})
            return loss

        trainer.step = breaking  # type: ignore[method-assign]
        return error_of(NonFiniteError)(trainer)

    messages = ranks.run(run)
    assert len(set(messages)) == 1
    assert messages[0].startswith("step 6: a weight or its optimizer state isn't finite")
    assert latest(ranks.folder.path).name == "step-000003"


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_b10_an_id_out_of_range_on_one_rank_is_one_error_for_all(
    overlap: bool,
    accumulate: int,
    visits: PreparedDataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Feature `many`'s table has 31 rows; the error says whose batch it was."""

    def spoil(batch: Batch) -> Batch:
        first = int(batch.ids.offsets[2 * batch.batch_size])
        assert first < int(batch.ids.offsets[3 * batch.batch_size]), "no id of `many` to spoil"
        values_L = batch.ids.values_L.clone()
        values_L[first] = 31
        return replace(batch, ids=replace(batch.ids, values_L=values_L))

    on_rank(monkeypatch, 1, 9, spoil)
    train = {"overlap": overlap, "accumulate": accumulate}
    ranks = Ranks(visits, tmp_path / "run", 3, "mixed", {"train": train})
    messages = ranks.run(error_of(IdOutOfRange))
    assert len(set(messages)) == 1
    for part in ("many", "31", "rank 1"):
        assert part in messages[0]


# ------------------------------------------------------------------------------------- the models


@pytest.mark.parametrize(
    ("layout", "sparse", "others"),
    [
        ("column_wise", "rowwise_adagrad", [(1, "table_wise"), (4, "mixed")]),
        ("row_wise", "adagrad", [(2, "row_wise"), (3, "row_wise")]),
        ("replicated", "adam", [(2, "row_wise"), (4, "mixed")]),
        ("mixed", "rowwise_adagrad", [(1, "table_wise"), (3, "mixed")]),
    ],
)
def test_a_kept_model_does_not_tell_where_its_rows_were(
    layout: str,
    sparse: str,
    others: list[tuple[int, str]],
    visits: PreparedDataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kept on 3 ranks, it has to the bit the values that one process keeps of the same rows, state
    and dense weights, and other ranks can load it."""
    monkeypatch.setattr("dlrm.checkpoint_rows.PIECE_BYTES", 100)
    dense = "adam" if sparse == "adam" else "adagrad"
    overrides = {"train": {"max_steps": 6}, "optim": rules(sparse, dense)}
    three = Ranks(visits, tmp_path / "three", 3, layout, overrides)

    def train(trainer: Trainer) -> tuple[Outcome, dict[str, Any]]:
        return fit(trainer), trainer.dense_optimizer.state_dict()

    kept, optimizer_state = three.run(train)[0]

    alone = Ranks(visits, tmp_path / "alone", 1, overrides=overrides)
    copy = alone.trainer()
    copy.model.load_state_dict(kept.dense)
    copy.dense_optimizer.load_state_dict(optimizer_state)
    for table in copy.embeddings.tables:
        values = {
            name.removeprefix(f"{table.name}."): tensor
            for name, tensor in kept.tables.items()
            if name.startswith(f"{table.name}.")
        }
        assert "weight" in values
        assert len(values) > 1
        copy.embeddings.store.write(table.name, 0, values)
    assert copy.digest() == kept.digest
    contents = Contents.of(Progress(6), copy.model, copy.embeddings, copy.dense_optimizer)
    copy.checkpoints.save(contents, copy.comm, is_best=False)
    expected = arrays_of(latest(alone.folder.path))
    found = arrays_of(latest(three.folder.path))
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)

    weights = {name: t for name, t in kept.tables.items() if name.endswith(".weight")}
    for world_size, other in others:
        folder = tmp_path / f"on {world_size}"
        ranks = Ranks(visits, folder, world_size, other, {**overrides, "seed": 7})
        for rank, (tables, dense_weights, result) in enumerate(ranks.run(load(three.folder.path))):
            assert_equal_bits(dense_weights, kept.dense)
            if rank == 0:
                assert_equal_bits({n: t for n, t in tables.items() if n in weights}, weights)
            assert result.auc == pytest.approx(kept.evaluated.auc, rel=1e-6)


def load(run_dir: Path) -> Callable[[Trainer], tuple[dict[str, Tensor], dict[str, Tensor], Any]]:
    def run(trainer: Trainer) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
        load_model(Checkpoints(run_dir).find("latest"), trainer.model, trainer.embeddings)
        result = trainer.evaluate("train").result()
        return read_tables(trainer), dense_values(trainer), result

    return run


def test_the_best_model_comes_back_on_all_ranks(
    visits: PreparedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`load_best` puts the kept model in place of one that was trained further."""
    monkeypatch.setattr(Trainer, "eval_part", lambda self: "train")
    overrides = {"train": {"max_steps": 6}, "optim": rules("adagrad", "adagrad")}
    ranks = Ranks(visits, tmp_path / "run", 3, "mixed", overrides)

    def run(trainer: Trainer) -> tuple[EvalResult, EvalResult, EvalResult, list[int]]:
        trainer.fit()
        before = trainer.evaluate("train").result()
        planned = trainer.pipeline(trainer.dataset.batches("train", order_of(trainer)), 1).take()
        assert planned is not None
        trainer.step(planned)
        trainer.steps_done += 1
        changed = trainer.evaluate("train").result()
        info = trainer.load_best()
        return before, changed, trainer.evaluate("train").result(), [info.step]

    for before, changed, after, step in ranks.run(run):
        assert before == after != changed
        assert step == [6]


def order_of(trainer: Trainer) -> Order:
    return Order(10, rank=trainer.comm.rank, world_size=trainer.comm.world_size)


# ------------------------------------------------------------------------------------------ figures


@pytest.mark.parametrize(
    ("layout", "sparse", "clip_norm", "per_step"),
    [
        ("mixed", "adagrad", None, 4),
        ("row_wise", "rowwise_adagrad", None, 4),
        ("column_wise", "rowwise_adagrad", None, 5),
        ("mixed", "rowwise_adagrad", 0.5, 6),
        ("replicated", "adagrad", 0.5, 5),
    ],
)
def test_collectives_per_step_are_as_budgeted(
    layout: str,
    sparse: str,
    clip_norm: float | None,
    per_step: int,
    visits: PreparedDataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the plan, and although evaluations, digests and saving communicate too: one more for
    row-wise state under split columns, and one for clipping."""
    monkeypatch.setattr(Trainer, "eval_part", lambda self: "train")
    monkeypatch.setattr("dlrm.dense_reducer.BUCKET_BYTES", 200)
    optim = rules(sparse, "adagrad", clip_norm=clip_norm)
    overrides = {"train": {"eval_every": 4, "max_steps": 9}, "optim": optim}
    ranks = Ranks(visits, tmp_path / "run", 3, layout, overrides)

    def figures(trainer: Trainer) -> tuple[dict[str, Any], int]:
        fit(trainer)
        return trainer.comm_figures(), trainer.reducer.num_buckets

    (first, num_buckets), *others = ranks.run(figures)
    assert [found for found, _ in others] == [first, first]
    assert first["collectives_per_step"] == per_step
    # Gradients of replicas go as one more, where that is less than to gather them.
    assert num_buckets > 1
    has_replicas = layout in ("mixed", "replicated")
    assert num_buckets <= first["dense_collectives_per_step"] <= num_buckets + has_replicas
    assert min(first["bytes_sent_per_step"].values()) > 0 or layout == "replicated"
