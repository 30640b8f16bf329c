"""Training runs with tables in host memory: they end as runs with tables in device memory do, also
when they are stopped with rows in flight, evaluated on the way, or when other rows become popular.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from data.batch import Batch, JaggedIds
from data.errors import UserError
from data.parquet import Order, PreparedDataset
from dlrm import trainer as trainer_module
from dlrm.build import build_model
from dlrm.pipeline import Pipeline
from dlrm.trainer import Trainer
from embeddings import RowOptimizerConfig, SingleProcess
from embeddings.host.host_tables import HostSettings
from tests.commands import arrays_of, dlrm, latest, read_result, tiny, without_plots
from tests.host_cases import host_plan, train_host
from tests.host_run_cases import HOT_MB, HostRanks, counters_of, in_host, write_baskets
from tests.sharding_cases import FEATURES, TABLES, Model, train
from tests.stepped_executor import SteppedExecutor
from tests.trainer_ranks import (
    Outcome,
    assert_close,
    assert_equal_bits,
    assert_same_on_all_ranks,
    fit,
    rules,
)

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]

NUM_ROWS = 193
STEPS_PER_EPOCH = 20
TRAIN = {"epochs": 2, "max_steps": 29, "log_every": 1}
ON_DEVICE: dict[str, Any] = {"sharding": {"memory": "device"}}
OnDevice = Callable[[PreparedDataset, dict[str, Any]], Outcome]


@pytest.fixture(scope="module")
def on_device(
    tmp_path_factory: pytest.TempPathFactory,
) -> OnDevice:
    """The run of one process with its tables in device memory and the same settings, once for all
    tests that ask for it."""
    known: dict[str, Outcome] = {}

    def run(dataset: PreparedDataset, settings: dict[str, Any]) -> Outcome:
        key = f"{dataset.root} {json.dumps(settings)}"
        if key not in known:
            folder = tmp_path_factory.mktemp("on_device") / "run"
            known[key] = HostRanks(dataset, folder, 1, {**ON_DEVICE, **settings}).fit()[0]
        return known[key]

    return run


@pytest.fixture(scope="module")
def baskets(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    """193 rows: 20 batches of 10 an epoch, the last of 3."""
    return write_baskets(tmp_path_factory.mktemp("baskets"), NUM_ROWS)


def with_layout(layout: str, *overrides: dict[str, Any]) -> list[dict[str, Any]]:
    """The same settings under another layout."""
    return [{"sharding": {**o["sharding"], "layout": layout}} for o in overrides]


def assert_equal_ends(found: Sequence[Outcome], expected: Sequence[Outcome]) -> None:
    for outcome, other in zip(found, expected, strict=True):
        assert (outcome.digest, outcome.loss_last) == (other.digest, other.loss_last)
        assert (outcome.history, outcome.evaluated) == (other.history, other.evaluated)
        assert_equal_bits(outcome.tables, other.tables)
        assert_equal_bits(outcome.dense, other.dense)


def fit_and_count(trainer: Trainer) -> tuple[Outcome, Counter[str], int]:
    """(what it came to, host counters, steps that are staged when training is over)."""
    host = trainer.embeddings.host
    outcome = fit(trainer)
    if host is None:
        return outcome, Counter(), 0
    staged = host.num_staged
    numbers = {n: v for n, v in vars(host.counters).items() if n.startswith("num_")}
    assert trainer.hot_set is not None
    numbers["num_hot_choices"] = trainer.hot_set.figures()["num_hot_choices"]
    return outcome, Counter(numbers), staged


def run_parts(
    dataset: PreparedDataset,
    folder: Path,
    world_size: int,
    parts: Sequence[tuple[int, dict[str, Any]]],
    **overrides: Any,
) -> tuple[list[Outcome], list[Counter[str]]]:
    """A run in one folder whose parts, up to the step given, have trainers and settings of their
    own; the outcomes of the last, and of each part the counters of all ranks."""
    counted = []
    steps = [0, *(stop for stop, _ in parts)]
    for (start, stop), (_, settings) in zip(pairwise(steps), parts, strict=True):
        is_last = stop == parts[-1][0]
        ranks = HostRanks(
            dataset,
            folder,
            world_size,
            {**settings, **overrides},
            resume="latest" if start else None,
            stop_after=None if is_last else stop,
            stopping_rank=world_size - 1,
        )
        found = ranks.run(fit_and_count)
        counted.append(sum((counters for _, counters, _ in found), Counter[str]()))
        if not is_last:
            assert latest(folder).name == f"step-{stop:06d}"
            # So many steps were in flight, or the test says less than it seems to.
            left_of_epoch = STEPS_PER_EPOCH - stop % STEPS_PER_EPOCH
            in_flight = min(_window(settings), left_of_epoch)
            assert {staged for _, _, staged in found} == {in_flight}
        else:
            assert {staged for _, _, staged in found} == {0}
    return [outcome for outcome, _, _ in found], counted


def _window(settings: dict[str, Any]) -> int:
    host = settings["sharding"].get("host", {})
    return host["lookahead"] if host.get("mode") == "lookahead" else 0


# ------------------------------------------------------------------------- stopped and going on


@pytest.mark.parametrize("rule", [("sgd", "sgd"), ("rowwise_adagrad", "adagrad"), ("adam", "adam")])
@pytest.mark.parametrize(
    ("first", "second", "third"),
    [
        # Another window, other hot rows, another mode; from host memory to the device and back.
        (in_host("lookahead", 2), in_host("lookahead", 8, hot_mb=HOT_MB / 4), in_host("gather")),
        (in_host("gather"), in_host("lookahead", 3, hot_mb=0), ON_DEVICE),
        (ON_DEVICE, in_host("lookahead", 1, hot_mb=HOT_MB / 4), in_host("lookahead", 4, hot_mb=1)),
    ],
)
def test_a_run_goes_on_with_its_rows_brought_in_another_way(
    first: dict[str, Any],
    second: dict[str, Any],
    third: dict[str, Any],
    rule: tuple[str, str],
    baskets: PreparedDataset,
    on_device: OnDevice,
    tmp_path: Path,
) -> None:
    """To the bit, whatever was staged when it was stopped: within an epoch, and near its end, where
    fewer steps are left than the window has."""
    same = {"train": TRAIN, "optim": rules(*rule, schedule={"warmup_steps": 8})}
    expected = [on_device(baskets, same)]
    parts = [(7, first), (16, second), (29, third)]
    found, counted = run_parts(baskets, tmp_path / "parts", 1, parts, **same)
    assert_equal_ends(found, expected)
    assert counted[1]["num_forwarded"] > 0
    assert counted[1]["num_flushed"] > 0, "the checkpoint found every row in the store"


@pytest.mark.parametrize(
    ("world_size", "layout", "rule", "train"),
    [
        (2, "row_wise", ("adam", "adam"), {}),
        (2, "table_wise", ("rowwise_adagrad", "adagrad"), {"accumulate": 2}),
        (3, "row_wise", ("sgd", "sgd"), {"overlap": False}),
    ],
)
def test_ranks_go_on_with_their_rows_brought_in_another_way(
    world_size: int,
    layout: str,
    rule: tuple[str, str],
    train: dict[str, Any],
    baskets: PreparedDataset,
    tmp_path: Path,
) -> None:
    """Only the last rank is told to stop. In fp64: which rows are hot may change the order of a sum
    over ranks."""
    same = {
        "train": {**TRAIN, **train, "precision": "fp64"},
        "optim": rules(*rule, clip_norm=0.3, schedule={"warmup_steps": 8}),
    }
    ways = with_layout(
        layout, in_host("lookahead", 2), in_host("gather", hot_mb=3 * HOT_MB), ON_DEVICE
    )
    stops = (9, 18, 29)
    whole = HostRanks(baskets, tmp_path / "whole", world_size, {**ways[-1], **same}).fit()
    parts = list(zip(stops, ways, strict=True))
    found, counted = run_parts(baskets, tmp_path / "parts", world_size, parts, **same)
    assert counted[0]["num_forwarded"] > 0
    assert_same_on_all_ranks(found)
    assert_close(found[0].tables, whole[0].tables)
    assert_close(found[0].dense, whole[0].dense)
    # And with the same settings to the bit. The norm adds hot and cold rows apart, and what was
    # looked up lately isn't kept: with `drift` a resumed run might choose other hot rows.
    (way,) = with_layout(layout, in_host("lookahead", 2, drift=None))
    always = [(stop, way) for stop in stops]
    found, _ = run_parts(baskets, tmp_path / "always", world_size, always, **same)
    expected, _ = run_parts(baskets, tmp_path / "never", world_size, [(29, way)], **same)
    assert_equal_ends(found, expected)


@pytest.mark.parametrize("mode", ["lookahead", "hotline"])
def test_a_run_goes_on_with_another_number_of_ranks(
    mode: str, baskets: PreparedDataset, tmp_path: Path
) -> None:
    """From two ranks to one and to three, whose tables lie elsewhere: equal right after loading,
    and in the end what the two ranks come to."""
    same = {"train": {**TRAIN, "precision": "fp64"}, "optim": rules("adam", "adam")}
    two = {**in_host(mode, 3, layout="row_wise"), **same}
    expected = HostRanks(baskets, tmp_path / "whole", 2, two).fit()
    digest = HostRanks(baskets, tmp_path / "two", 2, two, stop_after=9).fit()[0].digest
    others = {1: in_host("gather"), 3: in_host(mode, 1, hot_mb=2 * HOT_MB, layout="table_wise")}
    for world_size, settings in others.items():
        folder = tmp_path / str(world_size)
        shutil.copytree(tmp_path / "two", folder)
        more = HostRanks(baskets, folder, world_size, {**settings, **same}, resume="latest")
        found = more.run(lambda trainer: (trainer.digest(), fit(trainer)))
        assert [of_rank for of_rank, _ in found] == [digest] * world_size
        outcomes = [outcome for _, outcome in found]
        assert_same_on_all_ranks(outcomes)
        assert_close(outcomes[0].tables, expected[0].tables)
        assert_close(outcomes[0].dense, expected[0].dense)


@pytest.mark.parametrize("rule", [("rowwise_adagrad", "adagrad"), ("adam", "adam")])
def test_a_run_in_parts_goes_on_in_another_way(
    rule: tuple[str, str], baskets: PreparedDataset, tmp_path: Path
) -> None:
    """`hotline` adds the samples in another order: equal to rounding."""
    same = {"train": {**TRAIN, "precision": "fp64"}, "optim": rules(*rule)}
    expected = HostRanks(baskets, tmp_path / "whole", 1, {**ON_DEVICE, **same}).fit()
    parts = [(8, in_host("hotline")), (21, in_host("lookahead", 3)), (29, in_host("hotline"))]
    found, counted = run_parts(baskets, tmp_path / "parts", 1, parts, **same)
    assert_close(found[0].tables, expected[0].tables)
    assert_close(found[0].dense, expected[0].dense)
    for counters in (counted[0], counted[2]):
        assert 0 < counters["num_hot_samples"] < counters["num_samples"]
        assert counters["num_written"] > 0


@pytest.mark.parametrize("is_async", [False, True])
def test_checkpoints_with_rows_in_flight_hold_every_rows_newest_values(
    is_async: bool, baskets: PreparedDataset, tmp_path: Path
) -> None:
    """Each is that of a run whose tables are in device memory, and making them changes nothing."""
    train = {**TRAIN, "checkpoint_every": 6, "checkpoint_keep": 10, "checkpoint_async": is_async}
    same = {"train": train, "optim": rules("adam", "adam")}
    ends = {}
    for name, settings in (("device", ON_DEVICE), ("host", in_host("lookahead", 4))):
        ranks = HostRanks(baskets, tmp_path / name, 1, {**settings, **same})
        ends[name] = ranks.run(fit_and_count)[0]
    assert_equal_ends([ends["host"][0]], [ends["device"][0]])
    assert ends["host"][1]["num_flushed"] > 0
    steps = sorted(p.name for p in (tmp_path / "device" / "checkpoints").glob("step-*"))
    assert {"step-000006", "step-000012", "step-000018", "step-000024"} <= set(steps)
    for step in steps:
        expected = arrays_of(tmp_path / "device" / "checkpoints" / step)
        found = arrays_of(tmp_path / "host" / "checkpoints" / step)
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_array_equal(found[name], values, err_msg=f"{step}: {name}")


def test_a_run_that_was_killed_goes_on_from_its_latest_checkpoint(
    baskets: PreparedDataset, tmp_path: Path
) -> None:
    """Killed in step 18 with rows in flight, resumed at 14 with another window."""
    same = {"train": {**TRAIN, "checkpoint_every": 7}, "optim": rules("adam", "adam")}
    whole = HostRanks(baskets, tmp_path / "whole", 1, {**ON_DEVICE, **same}).fit()
    killed = HostRanks(baskets, tmp_path / "killed", 1, {**in_host("lookahead", 3), **same})

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
    other = {**in_host("lookahead", 1, hot_mb=2 * HOT_MB), **same}
    again = HostRanks(baskets, tmp_path / "killed", 1, other, resume="latest").fit()
    assert_equal_ends(again, whole)
    assert len(again[0].rows) == 15


# -------------------------------------------------------------------- evaluated on the way (I10)


# Only `lookahead` has something staged when one process evaluates.
@pytest.mark.parametrize(
    ("world_size", "layout", "mode"),
    [
        (1, "auto", "lookahead"),
        (2, "row_wise", "gather"),
        (2, "row_wise", "lookahead"),
        (2, "row_wise", "hotline"),
    ],
)
def test_i10_evaluations_change_nothing_and_leave_nothing_staged(
    world_size: int,
    layout: str,
    mode: str,
    baskets: PreparedDataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Trainer, "eval_part", lambda self: "train")
    evaluate = Trainer.evaluate
    staged: list[tuple[int, int]] = []

    def watched(self: Trainer, part: str) -> Any:
        host = self.embeddings.host
        assert host is not None
        before = host.num_staged
        result = evaluate(self, part)
        staged.append((before, host.num_staged))
        return result

    monkeypatch.setattr(Trainer, "evaluate", watched)
    settings = in_host(mode, 3, layout=layout, drift=None)
    ends = {}
    for name, every in (("often", 4), ("seldom", 29)):
        train = {**TRAIN, "eval_every": every}
        overrides = {**settings, "train": train, "optim": rules("adam", "adam")}
        ranks = HostRanks(baskets, tmp_path / name, world_size, overrides)
        ends[name] = ranks.run(fit_and_count)
    for (often, often_counted, num), (seldom, seldom_counted, _) in zip(
        ends["often"], ends["seldom"], strict=True
    ):
        assert often.digest == seldom.digest
        assert_equal_bits(often.tables, seldom.tables)
        assert num == 0
        assert len(often.history) > len(seldom.history) == 1
        # What was looked up without training is counted nowhere, and brought nothing.
        for counters in (often_counted, seldom_counted):
            del counters["num_flushed"]
        assert often_counted == seldom_counted
    assert all(before == after for before, after in staged)
    assert any(before for before, _ in staged) == (mode == "lookahead")


# ------------------------------------------------------------------------------- edge cases (I9)


def ids_of(bags: Sequence[Sequence[Sequence[int]]]) -> JaggedIds:
    """From the ids of each sample's bag, feature by feature."""
    lengths = [len(bag) for feature in bags for bag in feature]
    values = [row for feature in bags for bag in feature for row in bag]
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(torch.tensor(lengths, dtype=torch.int64), 0, out=offsets[1:])
    return JaggedIds(torch.tensor(values, dtype=torch.int64), offsets, len(bags))


ROWS = {table.name: table.rows for table in TABLES}


def same_bag(num_samples: int, share: float, length: int = 1) -> JaggedIds:
    """One bag in every sample: the row at this share of each table, again and again."""
    rows = [int((ROWS[f.table] - 1) * share) for f in FEATURES]
    return ids_of([[[row] * length] * num_samples for row in rows])


def no_ids(num_samples: int) -> JaggedIds:
    return ids_of([[[]] * num_samples for _ in FEATURES])


CASES: dict[str, list[JaggedIds]] = {
    "empty bags": [
        ids_of([[[], [ROWS[f.table] - 1], []] for f in FEATURES]),
        ids_of([[[0], [], [ROWS[f.table] - 1]] for f in FEATURES]),
    ],
    "a feature without ids": [
        ids_of([[[]] * 3 if n == 0 else [[0], [1 % ROWS[f.table]], []]
                for n, f in enumerate(FEATURES)]),
        same_bag(3, 1.0),
    ],
    "batches without ids": [no_ids(3), same_bag(2, 1.0), no_ids(1), no_ids(4), same_bag(2, 1.0)],
    "empty batches": [no_ids(0), same_bag(2, 1.0), no_ids(0), no_ids(0), same_bag(2, 0.0)],
    "all hot, then all cold": [same_bag(5, 0.0), same_bag(5, 1.0), same_bag(3, 0.0)],
    "all cold": [same_bag(4, 1.0), same_bag(4, 0.9), same_bag(4, 1.0), same_bag(4, 0.9)],
    "one id repeated in every sample": [same_bag(6, 1.0, length=4)] * 4,
    "one id repeated in a bag": [same_bag(1, 1.0, length=9), same_bag(1, 0.0, length=9)] * 3,
    "a last batch of one": [same_bag(5, 1.0), same_bag(5, 0.7), same_bag(1, 1.0)],
    "one batch": [same_bag(3, 1.0)],
}  # fmt: skip


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize("lookahead", [0, 1, 2, 8])
@pytest.mark.parametrize("case", CASES)
def test_i9_edge_cases_equal_device_tables_to_the_bit(
    case: str, lookahead: int, optimizer: Any
) -> None:
    """Also a table of one row, and a window longer than the run. The first fifth of each table is
    hot, the one row is cold."""
    model = Model(RowOptimizerConfig(name=optimizer, weight_decay=0.01))
    batches = CASES[case]
    expected = train(
        SingleProcess(), model, host_plan("table_wise", 1, TABLES, list(ROWS)), batches
    )
    hot = {name: np.arange(rows // 5, dtype=np.int64) for name, rows in ROWS.items()}
    found, embeddings = train_host(
        SingleProcess(),
        model,
        host_plan("table_wise", 1, TABLES),
        batches,
        HostSettings(
            mode="lookahead" if lookahead else "gather",
            lookahead=max(1, lookahead),
            batch_rows=4,
        ),
        hot,
        executor=SteppedExecutor(lookahead, has_link=bool(lookahead % 2)),
    )
    for mine, theirs in zip(found.pooled, expected.pooled, strict=True):
        assert torch.equal(mine[2], theirs[2])
    for table, values in expected.tables.items():
        for name, array in values.items():
            assert torch.equal(found.tables[table][name], array), f"{table}.{name} differs"
    assert embeddings.host is not None
    assert embeddings.host.num_staged == 0
    counters = embeddings.host.counters
    assert counters.num_cold == counters.num_written + counters.num_kept
    assert counters.num_fetched > 0


@pytest.mark.parametrize("mode", ["gather", "lookahead", "hotline"])
def test_a_window_longer_than_the_epoch(
    mode: str, baskets: PreparedDataset, on_device: OnDevice, tmp_path: Path
) -> None:
    """Two batches an epoch, the last a part of one, and four epochs; eight steps ahead."""
    same = {
        "data": {"batch_size": 100, "eval_batch_size": 100},
        "train": {"epochs": 4, "log_every": 1, "precision": "fp64"},
        "optim": rules("adam", "adam"),
    }
    expected = on_device(baskets, same)
    ranks = HostRanks(baskets, tmp_path / "host", 1, {**in_host(mode, 8), **same})
    ((found, counters, staged),) = ranks.run(fit_and_count)
    assert len(found.rows) == 8
    assert staged == 0
    assert_close(found.tables, expected.tables)
    assert_close(found.dense, expected.dense)
    if mode != "hotline":
        assert found.digest == expected.digest
    assert (counters["num_forwarded"] > 0) == (mode == "lookahead")


@pytest.mark.parametrize("mode", ["gather", "lookahead", "hotline"])
def test_ranks_without_samples(
    mode: str, baskets: PreparedDataset, on_device: OnDevice, tmp_path: Path
) -> None:
    """Batches of two on three ranks: in each step one has no samples at least."""
    same = {
        "data": {"batch_size": 2, "eval_batch_size": 2},
        "train": {"max_steps": 25, "log_every": 1, "precision": "fp64"},
        "optim": rules("adam", "adam"),
    }
    expected = on_device(baskets, same)
    host = in_host(mode, 2, layout="row_wise")
    found = HostRanks(baskets, tmp_path / "host", 3, {**host, **same}).fit()
    assert_same_on_all_ranks(found)
    assert_close(found[0].tables, expected.tables)
    assert all(0 in sizes for sizes in zip(*(outcome.sizes for outcome in found), strict=True))


# ------------------------------------------------------------------------------------- drift


@pytest.fixture(scope="module")
def changing(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    """320 rows; in the second half nobody looks up what was popular in the first."""
    return write_baskets(tmp_path_factory.mktemp("changing"), 320, changes_at=160)


DRIFTING = {"data": {"shuffle": False}, "train": {"epochs": 1, "eval_every": 4, "log_every": 1}}


@pytest.mark.parametrize("mode", ["gather", "lookahead", "hotline"])
@pytest.mark.parametrize(("world_size", "layout"), [(1, "auto"), (2, "row_wise")])
def test_hot_rows_are_chosen_anew_where_the_ids_change(
    world_size: int,
    layout: str,
    mode: str,
    changing: PreparedDataset,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Chosen by the first tenth of the batches, which know nothing of the second half. The model is
    that of a run that never chooses anew: of one process to the bit, where no sum is split."""
    ends = {}
    for name, drift in (("follow", 0.1), ("never", None)):
        host = in_host(mode, 3, layout=layout, drift=drift, hot_from="sample", sample_share=0.1)
        same = {
            "data": DRIFTING["data"],
            "train": {**DRIFTING["train"], "precision": "fp64"},
            "optim": rules("adam", "adam"),
        }
        ranks = HostRanks(changing, tmp_path / name, world_size, {**host, **same})
        ends[name] = ranks.run(lambda trainer: (fit(trainer), trainer.host_figures()))
    figures = {name: end[0][1] for name, end in ends.items()}
    assert figures["follow"]["num_hot_choices"] >= 1
    assert figures["follow"]["num_hot_loads"] == figures["follow"]["num_hot_choices"] + 1
    assert figures["never"]["num_hot_choices"] == 0
    assert figures["follow"]["row_hit_share"] > figures["never"]["row_hit_share"] + 0.05
    assert "chosen anew by the latest steps" in capsys.readouterr().out
    follow, never = ([outcome for outcome, _ in ends[name]] for name in ("follow", "never"))
    assert_same_on_all_ranks(follow)
    assert_close(follow[0].tables, never[0].tables)
    assert_close(follow[0].dense, never[0].dense)
    if world_size == 1 and mode != "hotline":
        assert follow[0].digest == never[0].digest


def test_batches_that_were_planned_are_planned_anew_once_each(
    changing: PreparedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the data, every row of the epoch once."""
    replan = Pipeline.replan
    replanned: list[int] = []

    def noted(self: Pipeline) -> None:
        replan(self)
        replanned.append(len(self._staged))

    monkeypatch.setattr(Pipeline, "replan", noted)
    host = in_host("lookahead", 3, drift=0.1, hot_from="sample", sample_share=0.1)
    ranks = HostRanks(changing, tmp_path / "run", 1, {**host, **DRIFTING})
    ((outcome, counters, staged),) = ranks.run(fit_and_count)
    rows = [row for of_step in outcome.rows for row in of_step]
    assert sorted(rows) == list(range(320))
    plain = HostRanks(changing, tmp_path / "plain", 1, {**ON_DEVICE, **DRIFTING}).fit()[0]
    assert outcome.rows == plain.rows
    # The steps of the window, and the one that was begun besides.
    assert replanned
    assert max(replanned) >= 3
    assert staged == 0
    assert counters["num_hot_choices"] == len(replanned)


# ------------------------------------------------------------------------------- what is refused


def test_parts_are_refused_where_samples_depend_on_each_other(
    baskets: PreparedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*arguments: Any) -> nn.Module:
        model = build_model(*arguments)
        model.add_module("norm", nn.BatchNorm1d(3))
        return model

    monkeypatch.setattr(trainer_module, "build_model", build)
    ranks = HostRanks(baskets, tmp_path / "run", 1, in_host("hotline"))
    with pytest.raises(UserError, match=r"hotline .*norm \(BatchNorm1d\).*mode=lookahead"):
        ranks.trainer()
    HostRanks(baskets, tmp_path / "other", 1, in_host("lookahead")).trainer().close()


def test_parts_are_refused_with_micro_batches(baskets: PreparedDataset, tmp_path: Path) -> None:
    overrides = {**in_host("hotline"), "train": {"accumulate": 2}}
    ranks = HostRanks(baskets, tmp_path / "run", 1, overrides)
    with pytest.raises(UserError, match=r"sharding.host.mode=hotline .*train.accumulate=2"):
        ranks.trainer()


# ------------------------------------------------------------------------------- the command


def test_the_command_tells_what_its_host_tables_did(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Equal digests whatever the mode, and in result.json rows of every kind."""
    without_plots(monkeypatch)
    monkeypatch.chdir(tmp_path)
    host = ("sharding.memory=host", "sharding.host.hot_mb=0.05", "sharding.host.whole_rows=0")
    ways = {
        "device": (),
        "gather": (*host, "sharding.host.mode=gather"),
        "lookahead": (*host, "sharding.host.mode=lookahead", "sharding.host.lookahead=3"),
    }
    digests = {}
    for name, arguments in ways.items():
        assert dlrm("train", *tiny(tmp_path_factory), f"hydra.run.dir={name}", *arguments) == 0
        result = read_result(tmp_path / name)
        digests[name] = result["model_digest"]
        assert ("host" in result) == (name != "device")
        if name == "device":
            continue
        figures = result["host"]
        assert figures["mode"] == name
        assert figures["num_hot_choices"] == 0
        per_step = figures["per_step"]
        assert per_step["fetched"] > 0
        assert per_step["written"] > 0
        assert (per_step["forwarded"] > 0) == (name == "lookahead")
        assert per_step["to_device_bytes"] > 0
        assert per_step["to_host_bytes"] > 0
        assert 0 < figures["row_hit_share"] < 1
        assert figures["hot_bytes"] <= figures["budget_bytes"]
    assert len(set(digests.values())) == 1, digests
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("sharding.host.mode=hotline", "train.accumulate=2"), "leave out train.accumulate=2"),
        (("sharding.host.mode=fast",), "must be one of auto, gather, lookahead, hotline"),
        (("sharding.host.mode=lookahead", "sharding.host.lookahead=9"), "must be 1 to 8"),
        (
            ("sharding.host.mode=gather", "sharding.host.staging_mb=0.0001"),
            "raise sharding.host.staging_mb",
        ),
    ],
)
def test_mistakes_end_the_command_with_2(
    arguments: tuple[str, ...],
    says: str,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    without_plots(monkeypatch)
    monkeypatch.chdir(tmp_path)
    host = ("hydra.run.dir=run", "sharding.memory=host", "sharding.host.hot_mb=0.01")
    assert dlrm("train", *tiny(tmp_path_factory), *host, *arguments) == 2
    err = capfd.readouterr().err
    assert says in err
    assert "Traceback" not in err


def test_counters_are_those_of_the_trainer(baskets: PreparedDataset, tmp_path: Path) -> None:
    """A run of an epoch: its samples, its steps, its lookups; hot or cold, fetched or forwarded."""
    overrides = {**in_host("lookahead", 2), "train": {"epochs": 1, "log_every": 1}}
    ranks = HostRanks(baskets, tmp_path / "run", 1, overrides)

    def run(trainer: Trainer) -> tuple[Any, dict[str, Any] | None]:
        trainer.fit()
        return counters_of(trainer), trainer.host_figures()

    ((counters, figures),) = ranks.run(run)
    assert counters.num_samples == NUM_ROWS
    assert counters.num_steps == 20
    values = [batch.ids.values_L.numel() for batch in _epoch(baskets)]
    assert counters.num_lookups == sum(values)
    assert counters.num_unique == counters.num_hot_unique + counters.num_cold
    assert counters.num_cold == counters.num_fetched + counters.num_forwarded
    assert figures is not None
    assert figures["row_hit_share"] == counters.num_hot_lookups / counters.num_lookups
    assert figures["expected_row_hit_share"] == pytest.approx(figures["row_hit_share"], abs=1e-12)


def _epoch(dataset: PreparedDataset) -> list[Batch]:
    return list(dataset.batches("train", Order(10, seed=0, epoch=0, shuffle=True)))
