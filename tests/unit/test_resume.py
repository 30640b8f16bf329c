"""Resuming: what a run that was stopped, killed or finished comes to when it goes on.

First the real `Trainer`, on ranks that are threads; then the command, in this process. Signals and
processes are those of tests/dist/test_resume.py.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboardX.proto.event_pb2 import Event, SessionLog
from torch import Tensor

from data.errors import UserError
from data.parquet import PreparedDataset
from dlrm.checkpoint import Checkpoints, open_checkpoint
from dlrm.metrics import BinaryMetrics
from dlrm.resume import find_resume_point, is_restarted, with_restarts
from dlrm.torchrun import launch_id
from dlrm.trainer import Trainer
from tests.commands import (
    arrays_of,
    compose_config,
    dlrm,
    eval_lines,
    latest,
    one_hot_dataset,
    read_json,
    read_metrics,
    read_result,
    table_values,
    tiny,
    train_lines,
    without_plots,
    write_visits,
)
from tests.thread_ranks import run_ranks
from tests.trainer_ranks import (
    Outcome,
    Ranks,
    assert_close,
    assert_equal_bits,
    assert_same_on_all_ranks,
    fit,
    rules,
)

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]

NUM_ROWS = 193
STEPS_PER_EPOCH = 20  # Of 10 samples, the last one of 3.
TRAIN = {"epochs": 2, "max_steps": 29, "log_every": 1}
WARMUP = {"warmup_steps": 8}


@pytest.fixture(scope="module")
def visits(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    return write_visits(tmp_path_factory.mktemp("visits"), NUM_ROWS)


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    """With a valid part of 130 rows: 6 steps of 50 samples an epoch."""
    return one_hot_dataset(tmp_path_factory.mktemp("clicks"))


def assert_equal_runs(found: Path, expected: Path) -> None:
    """What two runs of the same length wrote down and kept, times aside."""
    for line, other in zip(read_metrics(found), read_metrics(expected), strict=True):
        for key in ("step", "samples", "epoch", "loss", "lr_dense", "lr_sparse", "eval"):
            assert line.get(key) == other.get(key), (line, other)
    for which in ("latest", "best"):
        assert (found / "checkpoints" / which).exists() == (
            expected / "checkpoints" / which
        ).exists()
        if (found / "checkpoints" / which).exists():
            assert_equal_checkpoints(latest(found, which), latest(expected, which))
    of_both = [open_checkpoint(latest(folder)).progress for folder in (found, expected)]
    assert of_both[0] == of_both[1]


def assert_equal_checkpoints(found: Path, expected: Path) -> None:
    assert found.name == expected.name
    arrays, others = arrays_of(found), arrays_of(expected)
    assert arrays.keys() == others.keys()
    for name, values in others.items():
        np.testing.assert_array_equal(arrays[name], values, err_msg=name)


def assert_equal_ends(found: list[Outcome], expected: list[Outcome]) -> None:
    """What the ranks hold in the end."""
    for outcome, other in zip(found, expected, strict=True):
        assert (outcome.digest, outcome.loss_last) == (other.digest, other.loss_last)
        assert (outcome.history, outcome.evaluated) == (other.history, other.evaluated)
        assert_equal_bits(outcome.tables, other.tables)
        assert_equal_bits(outcome.dense, other.dense)


def rows_of_steps(ranks: list[Outcome]) -> list[list[int]]:
    """Rows of each global batch."""
    of_steps = zip(*(outcome.rows for outcome in ranks), strict=True)
    return [[row for rows in step for row in rows] for step in of_steps]


# ------------------------------------------------------------------------- stopped and going on


@pytest.mark.parametrize(
    ("world_size", "layout", "train", "optim", "stops"),
    [
        (1, "table_wise", {}, rules("adam", "adam", schedule=WARMUP), (5, 20, 27)),
        (1, "table_wise", {"accumulate": 3}, rules("rowwise_adagrad", "adagrad"), (19,)),
        (1, "table_wise", {"overlap": False}, rules("sgd", "sgd", schedule=WARMUP), (1,)),
        (2, "row_wise", {}, rules("adam", "adam", schedule=WARMUP), (5, 20)),
        (2, "column_wise", {"accumulate": 2}, rules("rowwise_adagrad", "adagrad"), (7,)),
        (3, "mixed", {"overlap": False}, rules("adam", "adam", clip_norm=0.3), (6, 19)),
        (3, "pinwheel", {"precision": "bf16"}, rules("rowwise_adagrad", "adamw"), (21,)),
        (3, "replicated", {"accumulate": 2, "overlap": False}, rules("sgd", "sgd"), (14,)),
    ],
)
def test_b34_a_run_that_was_stopped_ends_as_one_that_was_not(
    world_size: int,
    layout: str,
    train: dict[str, Any],
    optim: dict[str, Any],
    stops: tuple[int, ...],
    visits: PreparedDataset,
    tmp_path: Path,
) -> None:
    """To the bit: every row and its state, dense weights and theirs, the loss and the learning rate
    of each step. Each part of the run has a trainer of its own. Only the last rank is told to stop.

    Within the warm-up and after it; within an epoch, at its last step but one, at its end, in the
    next. The rows of all steps are the same, in the same order: none twice, none left out.
    """
    overrides = {"train": {**TRAIN, **train}, "optim": optim}
    whole = Ranks(visits, tmp_path / "whole", world_size, layout, overrides)
    expected = whole.fit()
    seen: list[list[list[int]]] = [[] for _ in range(world_size)]
    for start, stop in pairwise((0, *stops, TRAIN["max_steps"])):
        part = Ranks(
            visits,
            tmp_path / "parts",
            world_size,
            layout,
            overrides,
            resume="latest" if start else None,
            stop_after=stop,
            stopping_rank=world_size - 1,
        )
        found = part.run(lambda trainer: (fit(trainer), trainer.is_stopped, trainer.steps_done))
        for of_rank, (outcome, *end) in zip(seen, found, strict=True):
            assert end == [stop != TRAIN["max_steps"], stop]
            of_rank += outcome.rows
        if stop != TRAIN["max_steps"]:
            assert latest(tmp_path / "parts").name == f"step-{stop:06d}"
    assert_equal_ends([outcome for outcome, *_ in found], expected)
    assert seen == [outcome.rows for outcome in expected]
    assert_equal_runs(tmp_path / "parts", tmp_path / "whole")
    assert [line["step"] for line in train_lines(tmp_path / "parts")] == list(range(1, 30))
    # What the above compares is worth it: all rows of an epoch, and rates that change.
    first_epoch = rows_of_steps(expected)[:STEPS_PER_EPOCH]
    assert sorted(row for rows in first_epoch for row in rows) == list(range(NUM_ROWS))
    if "schedule" in optim:
        rates = [line["lr_sparse"] for line in train_lines(tmp_path / "parts")]
        assert rates[:9] == pytest.approx([rates[8] * (t + 1) / 8 for t in range(8)] + [rates[8]])


@pytest.mark.parametrize(("world_size", "layout"), [(1, "table_wise"), (2, "mixed")])
def test_a_run_that_was_killed_goes_on_from_its_latest_checkpoint(
    world_size: int, layout: str, visits: PreparedDataset, tmp_path: Path
) -> None:
    """Killed in step 18, resumed at 14; what it had written down since is replaced."""
    overrides = {"train": {**TRAIN, "checkpoint_every": 7}, "optim": rules("adam", "adam")}
    whole = Ranks(visits, tmp_path / "whole", world_size, layout, overrides)
    expected = whole.fit()
    killed = Ranks(visits, tmp_path / "killed", world_size, layout, overrides)

    def kill(trainer: Trainer) -> None:
        step = trainer.step

        def dying(planned: Any) -> float:
            if trainer.steps_done == 17:
                raise SystemError("killed")
            return step(planned)

        trainer.step = dying  # type: ignore[method-assign]
        trainer.fit()

    with pytest.raises(SystemError):
        killed.run(kill)
    assert train_lines(tmp_path / "killed")[-1]["step"] == 17
    with open(tmp_path / "killed" / "metrics.jsonl", "a") as opened:
        opened.write('{"step": 18, "los')  # A line that was cut short.
    again = Ranks(visits, tmp_path / "killed", world_size, layout, overrides, resume="latest").fit()
    assert_equal_ends(again, expected)
    assert [len(outcome.rows) for outcome in again] == [15] * world_size
    assert_equal_runs(tmp_path / "killed", tmp_path / "whole")


def test_b18_replicas_are_equal_after_going_on(visits: PreparedDataset, tmp_path: Path) -> None:
    overrides = {"train": {**TRAIN, "max_steps": 6}, "optim": rules("adam", "adam")}
    Ranks(visits, tmp_path / "run", 3, "replicated", overrides, stop_after=4).fit()
    more = Ranks(visits, tmp_path / "run", 3, "replicated", overrides, resume="latest")

    def copies(trainer: Trainer) -> list[dict[str, Tensor]]:
        loaded = table_values(trainer)
        trainer.fit()
        return [loaded, table_values(trainer)]

    first, *others = more.run(copies)
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            assert_equal_bits(theirs, mine)
    assert not torch.equal(first[0]["many.weight"], first[1]["many.weight"])


@pytest.mark.parametrize(("first", "second"), [("torch", "fbgemm"), ("fbgemm", "torch")])
@pytest.mark.parametrize("rule", ["rowwise_adagrad", "adagrad"])
def test_another_kernel_goes_on(
    first: str, second: str, rule: str, visits: PreparedDataset, tmp_path: Path
) -> None:
    """One process; fp32, in which the two kernels round differently."""
    optim = rules(rule, "adam", schedule=WARMUP)
    sides = {
        name: {
            "model": {"embedding_dim": 4, "table_dims": {"many": 8, "words": 4}},
            "train": {**TRAIN, "max_steps": 12, "backend": name},
            "optim": optim,
        }
        for name in (first, second)
    }
    whole = Ranks(visits, tmp_path / "whole", 1, overrides=sides[first])
    expected = whole.fit()[0]
    at_five = Ranks(visits, tmp_path / "run", 1, overrides=sides[first], stop_after=5).fit()[0]
    more = Ranks(visits, tmp_path / "run", 1, overrides=sides[second], resume="latest")

    def run(trainer: Trainer) -> tuple[str, Outcome]:
        return trainer.digest(), fit(trainer)

    ((digest, found),) = more.run(run)
    assert digest == at_five.digest
    np.testing.assert_allclose(more.losses(), whole.losses(), rtol=1e-4)
    for name, values in expected.tables.items():
        torch.testing.assert_close(found.tables[name], values, rtol=1e-3, atol=1e-5)


# --------------------------------------------------------------------------- on other ranks


# All plans under Adam, whose state is the most. tests/unit/test_checkpoint_reshard.py loads what
# two ranks have saved row-wise under every layout and every rule.
@pytest.mark.parametrize(
    ("rule", "plans"),
    [
        (("sgd", "sgd"), [(1, "table_wise"), (2, "lone")]),
        (("rowwise_adagrad", "adagrad"), [(3, "column_wise"), (4, "mixed")]),
        (("adam", "adam"), [(1, "table_wise"), (3, "column_wise"), (4, "mixed"), (2, "lone")]),
    ],
)
def test_b32_a_run_goes_on_under_any_other_plan(
    rule: tuple[str, str],
    plans: list[tuple[int, str]],
    visits: PreparedDataset,
    tmp_path: Path,
) -> None:
    """In fp64, from two ranks to others: equal right after loading, and after 12 more
    steps over the end of an epoch what the two ranks come to."""
    train = {**TRAIN, "precision": "fp64"}
    overrides = {"train": train, "optim": rules(*rule, schedule=WARMUP)}
    stopped = Ranks(visits, tmp_path / "two", 2, "row_wise", overrides, stop_after=17)
    digest = stopped.fit()[0].digest
    shutil.copytree(tmp_path / "two", tmp_path / "kept")
    resumed = Ranks(visits, tmp_path / "two", 2, "row_wise", overrides, resume="latest")
    expected = resumed.fit()
    for world_size, layout in plans:
        folder = tmp_path / f"{world_size}"
        shutil.copytree(tmp_path / "kept", folder)
        others = Ranks(visits, folder, world_size, layout, overrides, resume="latest")
        found = others.run(lambda trainer: (trainer.digest(), fit(trainer)))
        assert [of_rank for of_rank, _ in found] == [digest] * world_size
        outcomes = [outcome for _, outcome in found]
        assert_same_on_all_ranks(outcomes)
        np.testing.assert_allclose(others.losses(), resumed.losses(), rtol=1e-10)
        assert_close(outcomes[0].tables, expected[0].tables)
        assert_close(outcomes[0].dense, expected[0].dense)
        assert [sorted(rows) for rows in rows_of_steps(outcomes)] == [
            sorted(rows) for rows in rows_of_steps(expected)
        ]


# ----------------------------------------------------------------- another size of the batches


@pytest.mark.parametrize(("size", "steps_left"), [(5, 23), (20, 6), (40, 3)])
def test_another_batch_size_leaves_no_sample_out(
    size: int, steps_left: int, visits: PreparedDataset, tmp_path: Path
) -> None:
    """8 steps of 10 are 80 samples into the epoch: 113 are left of it."""
    overrides: dict[str, Any] = {"train": {"epochs": 1, "log_every": 1}}
    first = Ranks(visits, tmp_path / "run", 2, "row_wise", overrides, stop_after=8).fit()
    overrides["data"] = {"batch_size": size}
    more = Ranks(visits, tmp_path / "run", 2, "row_wise", overrides, resume="latest")

    def run(trainer: Trainer) -> tuple[Outcome, int, int, float]:
        total_steps = trainer.total_steps
        return fit(trainer), total_steps, trainer.steps_done, trainer.epochs_done

    found = more.run(run)
    assert [end for _, *end in found] == [[8 + steps_left, 8 + steps_left, 1.0]] * 2
    steps = rows_of_steps(first) + rows_of_steps([outcome for outcome, *_ in found])
    assert sorted(row for rows in steps for row in rows) == list(range(NUM_ROWS))
    lines = train_lines(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, 9 + steps_left))
    assert lines[-1]["samples"] == NUM_ROWS


def test_another_batch_size_is_refused_where_none_of_its_batches_begins(
    visits: PreparedDataset, tmp_path: Path
) -> None:
    overrides: dict[str, Any] = {"train": {"epochs": 2, "log_every": 1}}
    Ranks(visits, tmp_path / "run", 1, overrides=overrides, stop_after=8).fit()
    overrides["data"] = {"batch_size": 15}
    with pytest.raises(UserError, match=r"data.batch_size=15: .* is 80 samples into an epoch"):
        Ranks(visits, tmp_path / "run", 1, overrides=overrides, resume="latest").trainer()
    # At an epoch's end any size will do.
    overrides["data"] = {"batch_size": 10}
    Ranks(visits, tmp_path / "run", 1, overrides=overrides, resume="latest", stop_after=20).fit()
    overrides["data"] = {"batch_size": 15}
    found = Ranks(visits, tmp_path / "run", 1, overrides=overrides, resume="latest").fit()
    assert sorted(row for rows in rows_of_steps(found) for row in rows) == list(range(NUM_ROWS))
    assert len(found[0].rows) == 13


# -------------------------------------------------------------------- evaluations and the best


class StubbedAuc:
    """Has evaluations come to given AUCs, by step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, aucs: dict[int, float]) -> None:
        self.asked: list[int] = []
        evaluate = Trainer.evaluate

        def stubbed(trainer: Trainer, part: str) -> BinaryMetrics:
            metrics = evaluate(trainer, part)
            result = metrics.result()
            if part == "valid":
                if trainer.is_first:
                    self.asked.append(trainer.steps_done)
                result = replace(result, auc=aucs[trainer.steps_done])
            metrics.result = lambda: result  # type: ignore[method-assign]
            return metrics

        monkeypatch.setattr(Trainer, "evaluate", stubbed)


CLICKS_AUCS = {3: 0.8, 6: 0.7, 9: 0.75, 12: 0.8}
CLICKS_RUN = {
    "data": {"batch_size": 50},
    "model": {"table_dims": {}},
    "train": {"epochs": 2, "eval_every": 3, "checkpoint_every": 1, "log_every": 1},
    "optim": rules("adagrad", "adagrad"),
}


@pytest.fixture(scope="module")
def whole_clicks_run(
    clicks: PreparedDataset, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], tuple[list[Outcome], Path]]:
    """A run that nobody stops, by the number of ranks, and its folder; once for all tests."""

    @cache
    def of(world_size: int) -> tuple[list[Outcome], Path]:
        folder = tmp_path_factory.mktemp("whole") / "run"
        with pytest.MonkeyPatch.context() as patched:
            stub = StubbedAuc(patched, CLICKS_AUCS)
            found = Ranks(clicks, folder, world_size, "row_wise", CLICKS_RUN).fit()
        assert stub.asked == [3, 6, 9, 12]
        return found, folder

    return of


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stops", [(4,), (5,), (6, 7), (3,)])
def test_the_best_model_and_the_evaluations_outlive_a_stop(
    stops: tuple[int, ...],
    world_size: int,
    clicks: PreparedDataset,
    whole_clicks_run: Callable[[int], tuple[list[Outcome], Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The best is of step 3, before the stop; two steps may be kept besides it. A run that is told
    to stop after a step that an evaluation follows makes up for it when it goes on."""
    expected, whole = whole_clicks_run(world_size)
    stub = StubbedAuc(monkeypatch, CLICKS_AUCS)
    for start, stop in pairwise((0, *stops, None)):
        found = Ranks(
            clicks,
            tmp_path / "parts",
            world_size,
            "row_wise",
            CLICKS_RUN,
            resume="latest" if start else None,
            stop_after=stop,
        ).run(lambda trainer: (fit(trainer), trainer.load_best().step))
    assert stub.asked == [3, 6, 9, 12]
    assert [best for _, best in found] == [3] * world_size
    assert_equal_ends([outcome for outcome, _ in found], expected)
    assert [h["step"] for h in found[0][0].history] == [3, 6, 9, 12]
    assert_equal_runs(tmp_path / "parts", whole)


def test_an_evaluation_that_was_made_up_for_is_written_once(
    clicks: PreparedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told to stop before the evaluation of step 3, then killed after it, before another step."""
    stub = StubbedAuc(monkeypatch, {3: 0.8, 6: 0.7})
    overrides = {
        "data": {"batch_size": 50},
        "model": {"table_dims": {}},
        "train": {"eval_every": 3, "log_every": 1},
    }
    run = Ranks(clicks, tmp_path / "run", 1, overrides=overrides, stop_after=3)
    run.fit()
    assert stub.asked == []

    def die(trainer: Trainer) -> None:
        trainer.step = None  # type: ignore[assignment,method-assign]
        trainer.fit()

    with pytest.raises(TypeError):
        Ranks(clicks, tmp_path / "run", 1, overrides=overrides, resume="latest").run(die)
    assert [line["step"] for line in eval_lines(tmp_path / "run")] == [3]
    Ranks(clicks, tmp_path / "run", 1, overrides=overrides, resume="latest").fit()
    assert [line["step"] for line in eval_lines(tmp_path / "run")] == [3, 6]
    assert latest(tmp_path / "run", "best").name == "step-000003"


def test_going_on_from_the_best_drops_what_came_after(
    clicks: PreparedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AUCs after it that are worse than those before: the best stays."""
    aucs = {2: 0.6, 4: 0.8, 6: 0.7}
    StubbedAuc(monkeypatch, aucs)
    overrides = {
        "data": {"batch_size": 50},
        "model": {"table_dims": {}},
        "train": {"eval_every": 2, "log_every": 1},
    }
    expected = Ranks(clicks, tmp_path / "run", 1, overrides=overrides).fit()
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    aucs[6] = 0.75
    again = Ranks(clicks, tmp_path / "run", 1, overrides=overrides, resume="best")
    trainer = again.trainer()
    assert [f.name for f in sorted((tmp_path / "run" / "checkpoints").glob("step-*"))] == [
        "step-000004"
    ]
    assert latest(tmp_path / "run").name == latest(tmp_path / "run", "best").name == "step-000004"
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1, 2, 2, 3, 4, 4]
    found = fit(trainer)
    assert found.digest == expected[0].digest
    assert [h["auc"] for h in found.history] == [0.6, 0.8, 0.75]
    assert latest(tmp_path / "run", "best").name == "step-000004"


def test_a_best_model_that_is_gone_is_not_waited_for(
    clicks: PreparedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder without it, the best is that of the evaluations that follow; else no model but
    the last would be tested. Where a run goes back before it, the best of before is one again."""
    aucs = {2: 0.8, 4: 0.6, 6: 0.7}
    StubbedAuc(monkeypatch, aucs)
    overrides = {
        "data": {"batch_size": 50},
        "model": {"table_dims": {}},
        "train": {"eval_every": 2, "log_every": 1, "checkpoint_keep": 9},
    }
    Ranks(clicks, tmp_path / "run", 1, overrides=overrides).fit()
    kept = tmp_path / "run" / "checkpoints"
    given = str(kept / "step-000004")
    other = Ranks(clicks, tmp_path / "other", 1, overrides=overrides, resume=given)
    assert [h["auc"] for h in other.fit()[0].history] == [0.8, 0.6, 0.7]
    assert latest(tmp_path / "other", "best").name == "step-000006"
    assert latest(tmp_path / "run").name == "step-000006", "another run's folder was changed"
    # Now the last one is the best, and the run goes back before it.
    (kept / "best").write_text("step-000006")
    aucs[6] = 0.5
    Ranks(clicks, tmp_path / "run", 1, overrides=overrides, resume=given).fit()
    assert latest(tmp_path / "run", "best").name == "step-000002"


# ---------------------------------------------------------------------------- finished runs


def test_a_finished_run_goes_on_for_more_epochs(visits: PreparedDataset, tmp_path: Path) -> None:
    """As a run of two epochs, whose schedule doesn't depend on its length."""
    overrides: dict[str, Any] = {
        "train": {"epochs": 2, "log_every": 1},
        "optim": rules("adam", "adam", schedule=WARMUP),
    }
    expected = Ranks(visits, tmp_path / "two", 2, "mixed", overrides).fit()
    overrides["train"]["epochs"] = 1
    Ranks(visits, tmp_path / "one", 2, "mixed", overrides).fit()
    overrides["train"]["epochs"] = 2
    found = Ranks(visits, tmp_path / "one", 2, "mixed", overrides, resume="latest").fit()
    assert_equal_ends(found, expected)
    assert_equal_runs(tmp_path / "one", tmp_path / "two")


# ------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"seed": 7}, ["seed: stored 0, wanted 7"]),
        ({"data": {"shuffle": False}}, ["data.shuffle: stored True, wanted False"]),
        (
            {"seed": 7, "optim": rules("sgd", "adagrad")},
            [
                "seed: stored 0, wanted 7",
                "optim.sparse.name: stored adam, wanted sgd",
                "optim.dense.name: stored adam, wanted adagrad",
            ],
        ),
        (
            {"model": {"table_dims": {"many": 6, "words": 5}}},
            ["words: stored 31 rows of 3, float32, state ", "wanted 31 rows of 5, float32"],
        ),
        ({"model": {"top_mlp": [4]}}, ["dense weights", "stored (5, ", "wanted (4, "]),
        ({"train": {"precision": "fp64"}}, ["stored 31 rows of 6, float32", "rows of 6, float64"]),
        ({"data": {"batch_size": 7}}, ["data.batch_size=7"]),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_loaded(
    changed: dict[str, Any],
    named: list[str],
    visits: PreparedDataset,
    tmp_path: Path,
    tree_digests: Callable[[Path], dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On both ranks alike; all that differs is listed, and nothing in the folder is changed."""
    base = {"optim": rules("adam", "adam"), "train": {"log_every": 1}}
    Ranks(visits, tmp_path / "run", 2, "row_wise", base, stop_after=4).fit()
    before = tree_digests(tmp_path / "run")
    merged = {**base, **changed}
    merged["train"] = {**base["train"], **changed.get("train", {})}
    loaded: list[str] = []
    monkeypatch.setattr(
        "embeddings.store.RowStore.write", lambda self, table, *_: loaded.append(table)
    )
    ranks = Ranks(visits, tmp_path / "run", 2, "row_wise", merged, resume="latest")

    def refused(comm: Any) -> str:
        with pytest.raises(UserError) as caught:
            ranks.trainer(comm)
        return str(caught.value)

    messages = run_ranks(2, refused)
    assert messages[0] == messages[1]
    for text in named:
        assert text in messages[0]
    assert loaded == []
    after = {n: d for n, d in tree_digests(tmp_path / "run").items() if "tensorboard" not in n}
    assert after == {n: d for n, d in before.items() if "tensorboard" not in n}


def test_other_data_are_refused(visits: PreparedDataset, tmp_path: Path) -> None:
    Ranks(visits, tmp_path / "run", 1, stop_after=4).fit()
    others = write_visits(tmp_path / "others", NUM_ROWS, seed=1)
    with pytest.raises(UserError, match=r"is of another run:\n  data: stored \w+, wanted \w+"):
        Ranks(others, tmp_path / "run", 1, resume="latest").trainer()


# ------------------------------------------------------------------------------ the command


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """16 steps; a checkpoint after each four, all of which are kept; an evaluation at the end."""
    return [*tiny(tmp_path_factory), "train.checkpoint_every=4", "train.checkpoint_keep=9",
            "train.log_every=4", "optim.sparse.name=adam", "optim.dense.name=adam"]  # fmt: skip


@pytest.fixture(scope="module")
def finished(overrides: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has ended; not to be changed."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patched:
        without_plots(patched)
        assert dlrm("train", *overrides, f"hydra.run.dir={folder}") == 0
    return folder


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it."""
    without_plots(monkeypatch)
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def spoil(path: Path) -> None:
    """Changes a byte in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def drop_after(run_dir: Path, step: int) -> None:
    """Leaves what a run that was killed soon after a checkpoint leaves."""
    for folder in (run_dir / "checkpoints").glob("step-*"):
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)
    (run_dir / "checkpoints" / "best").unlink()
    (run_dir / "checkpoints" / "latest").write_text(f"step-{step:06d}")


def assert_ends_as(run_dir: Path, expected: Path) -> None:
    for key in ("status", "model_digest", "plan_digest", "eval"):
        assert read_result(run_dir)[key] == read_result(expected)[key], key
    assert_equal_runs(run_dir, expected)


def test_the_command_goes_on(overrides: list[str], run_dir: Path, finished: Path) -> None:
    """What the first part wrote is replaced or continued; figures are of the whole run, where they
    are no times."""
    drop_after(run_dir, 8)
    assert dlrm("train", *overrides, f"hydra.run.dir={run_dir}", "train.resume=latest") == 0
    assert_ends_as(run_dir, finished)
    found, expected = (read_result(folder)["train"] for folder in (run_dir, finished))
    for key in ("steps", "samples", "epochs", "loss_last"):
        assert found[key] == expected[key], key
    assert read_result(run_dir)["comm"] == read_result(finished)["comm"]
    history = read_json(run_dir / "evaluation.json")["history"]
    assert history == read_json(finished / "evaluation.json")["history"]


@pytest.mark.parametrize(
    ("file", "cut"),
    [
        ("rows-00000.safetensors", False),
        ("rows-00000.safetensors", True),
        ("dense.safetensors", False),
        ("dense_state.safetensors", False),
        ("checkpoint.json", False),
        ("checkpoint.json", True),
        ("plan.json", False),
    ],
)
def test_a_damaged_checkpoint_is_named_and_an_older_one_taken(
    file: str,
    cut: bool,
    overrides: list[str],
    run_dir: Path,
    finished: Path,
    capfd: pytest.CaptureFixture[str],
    recwarn: pytest.WarningsRecorder,
) -> None:
    """Of a damaged plan.json alone, nothing that is needed is lost."""
    drop_after(run_dir, 12)
    path = run_dir / "checkpoints" / "step-000012" / file
    if cut:
        os.truncate(path, path.stat().st_size // 2)
    else:
        spoil(path)
    assert dlrm("train", *overrides, f"hydra.run.dir={run_dir}", "train.resume=latest") == 0
    told = capfd.readouterr().out + "".join(str(warning.message) for warning in recwarn.list)
    assert told.count(f"{path}") == 1, told
    if file != "plan.json":
        assert "step-000008" in told
    assert_ends_as(run_dir, finished)


def test_a_checkpoint_named_by_its_path_has_no_substitute(
    overrides: list[str], run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = run_dir / "checkpoints" / "step-000008"
    spoil(path / "rows-00000.safetensors")
    more = [f"train.resume={path}", f"hydra.run.dir={tmp_path / 'new'}"]
    assert dlrm("train", *overrides, *more) == 2
    assert str(path / "rows-00000.safetensors") in capfd.readouterr().err


def test_a_new_folder_goes_on_from_another_run_s(
    overrides: list[str],
    run_dir: Path,
    finished: Path,
    tmp_path: Path,
    tree_digests: Callable[[Path], dict[str, str]],
) -> None:
    """The other run's folder stays as it was."""
    before = tree_digests(run_dir)
    new = tmp_path / "new"
    given = f"train.resume={run_dir / 'checkpoints' / 'step-000008'}"
    assert dlrm("train", *overrides, given, f"hydra.run.dir={new}") == 0
    assert tree_digests(run_dir) == before
    assert read_result(new)["model_digest"] == read_result(finished)["model_digest"]
    assert [line["step"] for line in train_lines(new)] == [12, 16]
    # A folder that is in use is no new one.
    assert dlrm("train", *overrides, given, f"hydra.run.dir={new}") == 2


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ("seed=1", "seed: stored 0, wanted 1"),
        ("optim.sparse.name=sgd", "optim.sparse.name: stored adam, wanted sgd"),
        ("model.embedding_dim=4", "wanted "),
        ("model.top_mlp=[3]", "dense weights"),
        ("data.batch_size=100", "data.batch_size=100"),
        ("train.resume=nowhere", "train.resume=nowhere"),
        ("data.synthetic.num_train=100", "data"),
    ],
)
def test_a_run_that_is_refused_to_go_on_stays_as_it_was(
    changed: str,
    named: str,
    overrides: list[str],
    run_dir: Path,
    tree_digests: Callable[[Path], dict[str, str]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Its configuration, too, by which its model is evaluated: exit status 2, one message."""
    drop_after(run_dir, 12)
    before = tree_digests(run_dir)
    more = [f"hydra.run.dir={run_dir}", "train.resume=latest", changed]
    assert dlrm("train", *overrides, *more) == 2
    err = capfd.readouterr().err
    assert named in err
    assert "Traceback" not in err
    assert tree_digests(run_dir) == before


def test_a_finished_run_that_goes_on_for_nothing_stays_the_same(
    overrides: list[str], run_dir: Path, finished: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Twice: no line, evaluation or model comes twice, and what isn't left to do is told."""
    for _ in range(2):
        assert dlrm("train", *overrides, f"hydra.run.dir={run_dir}", "train.resume=latest") == 0
        assert "nothing is left to train after step 16" in capfd.readouterr().out
        assert_ends_as(run_dir, finished)
    kept = [sorted(f.name for f in (d / "checkpoints").iterdir()) for d in (run_dir, finished)]
    assert kept[0] == kept[1]
    assert [line["eval"]["split"] for line in eval_lines(run_dir)] == ["valid", "test"]


def test_a_finished_run_goes_on_with_more_epochs(overrides: list[str], run_dir: Path) -> None:
    more = [f"hydra.run.dir={run_dir}", "train.resume=latest", "train.epochs=2"]
    assert dlrm("train", *overrides, *more) == 0
    assert [line["step"] for line in train_lines(run_dir)] == list(range(4, 33, 4))
    splits = [(line["step"], line["eval"]["split"]) for line in eval_lines(run_dir)]
    assert splits[:2] == [(16, "valid"), (32, "valid")]
    assert [split for _, split in splits[2:]] == ["test"]
    train = read_result(run_dir)["train"]
    assert (train["steps"], train["epochs"], train["samples"]) == (32, 2.0, 2 * 4096)


def test_there_is_nothing_to_go_on_from(
    overrides: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "none"
    assert dlrm("train", *overrides, f"hydra.run.dir={folder}", "train.resume=latest") == 2
    err = capfd.readouterr().err
    assert f"train.resume=latest: {folder} holds no checkpoints" in err
    assert not folder.exists()


def test_a_profile_of_steps_that_are_done_is_told_to_be_ignored(
    overrides: list[str], run_dir: Path
) -> None:
    drop_after(run_dir, 12)
    more = [f"hydra.run.dir={run_dir}", "train.resume=latest", "train.profile=true"]
    with pytest.warns(UserWarning, match="train.profile=true is ignored: .* after step 12"):
        assert dlrm("train", *overrides, *more, "train.profile_steps=2") == 0
    assert not (run_dir / "profile").exists()
    assert dlrm("train", *overrides, *more, "train.profile_steps=2", "train.epochs=2",
                "train.profile_start=18") == 0  # fmt: skip
    assert read_result(run_dir)["profile"]["steps"] == [18, 19]


# -------------------------------------------------------------------- restarts under torchrun


@pytest.fixture
def restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is of a group of ranks that torchrun has started again."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")


def claim(run_dir: Path, launch: str) -> None:
    """What the group before wrote when it began."""
    run_dir.mkdir(exist_ok=True)
    (run_dir / "result.json").write_text(json.dumps({"status": "failed: …", "torchrun": launch}))


@pytest.mark.usefixtures("restarted")
@pytest.mark.parametrize("given", ["train.overwrite=true", "train.resume=best", "seed=0"])
def test_a_restarted_group_goes_on_from_its_own_latest_checkpoint(
    given: str, run_dir: Path
) -> None:
    claim(run_dir, launch_id())
    config = compose_config("train", given)
    found = with_restarts(config, run_dir)
    assert (found.train.resume, found.train.overwrite) == ("latest", False)
    point = find_resume_point(found, run_dir)
    assert point is not None
    assert point.continues_folder
    assert [c.step for c in point.candidates] == [16, 12, 8, 4]


@pytest.mark.usefixtures("restarted")
@pytest.mark.parametrize("given", ["train.overwrite=true", "train.resume=elsewhere", "seed=0"])
def test_a_group_restarted_before_its_first_checkpoint_starts_anew(
    given: str, tmp_path: Path
) -> None:
    """From where it started the first time, in the folder that it holds already."""
    config = compose_config("train", given)
    claim(tmp_path / "run", launch_id())
    assert with_restarts(config, tmp_path / "run") == config
    assert is_restarted(tmp_path / "run")


@pytest.mark.usefixtures("restarted")
@pytest.mark.parametrize("launch", [None, "none elsewhere 1 2"])
def test_a_restarted_group_takes_no_other_run_for_its_own(
    launch: str | None, run_dir: Path
) -> None:
    """torchrun starts a group again that was refused a used folder: it is refused once more."""
    if launch is not None:
        claim(run_dir, launch)
    config = compose_config("train")
    assert with_restarts(config, run_dir) == config
    assert not is_restarted(run_dir)
    assert Checkpoints(run_dir).candidates("latest")


def test_the_first_group_goes_on_from_nothing_by_itself(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    claim(run_dir, launch_id())
    config = compose_config("train")
    assert with_restarts(config, run_dir) == config
    assert not is_restarted(run_dir)


# ----------------------------------------------------------- nothing left, and no step twice


@pytest.mark.parametrize("given", ["run", "checkpoints/step-000016", "checkpoints/step-000012"])
def test_f18_a_finished_run_in_a_new_folder_is_evaluated_and_kept(
    given: str, overrides: list[str], run_dir: Path, finished: Path, tmp_path: Path
) -> None:
    """With nothing left to train, by the run's own end or since `train.max_steps` says so."""
    path = run_dir if given == "run" else run_dir / given
    new = tmp_path / "new"
    more = [f"train.resume={path}", f"hydra.run.dir={new}"]
    step = 12 if given.endswith("12") else 16
    if step == 12:
        more.append("train.max_steps=8")
    assert dlrm("train", *overrides, *more) == 0
    result = read_result(new)
    assert result["status"] == "completed"
    assert result["train"]["steps"] == step
    assert [line["eval"]["split"] for line in eval_lines(new)] == ["valid", "test"]
    assert_equal_checkpoints(latest(new), run_dir / "checkpoints" / f"step-{step:06d}")
    assert latest(new, "best").name == f"step-{step:06d}"
    history = open_checkpoint(latest(new)).progress.history
    assert [entry["step"] for entry in history] == [step]
    if step == 16:
        assert result["eval"] == read_result(finished)["eval"]


def test_f35_tensorboard_shows_each_step_once(
    overrides: list[str], finished: Path, run_dir: Path
) -> None:
    """A kill after step 12, gone on with from step 8: the event files of before are still read."""
    drop_after(run_dir, 8)
    (before,) = (run_dir / "tensorboard").iterdir()
    before.rename(before.with_name("events.out.tfevents.0000000001.first"))
    assert dlrm("train", *overrides, f"hydra.run.dir={run_dir}", "train.resume=latest") == 0
    assert len(list((run_dir / "tensorboard").iterdir())) == 2
    shown = steps_on_board(run_dir, "train/loss")
    assert shown == steps_on_board(finished, "train/loss") == [4, 8, 12, 16]
    assert steps_on_board(run_dir, "valid/auc") == [16]


def steps_on_board(run_dir: Path, tag: str) -> list[int]:
    """As TensorBoard reads a folder: file by file, and a restart drops what it comes before."""
    steps: list[int] = []
    for path in sorted((run_dir / "tensorboard").iterdir()):
        content, position = path.read_bytes(), 0
        while position < len(content):
            length = int.from_bytes(content[position : position + 8], "little")
            event = Event.FromString(content[position + 12 : position + 12 + length])
            position += 8 + 4 + length + 4
            if event.session_log.status == SessionLog.START:
                steps = [step for step in steps if step < event.step]
            steps += [event.step for value in event.summary.value if value.tag == tag]
    return steps
