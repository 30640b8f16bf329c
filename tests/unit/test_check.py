"""`dlrm check` on ranks that are threads: it passes what is right, and finds what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from data.errors import UserError
from data.parquet import PreparedDataset
from dlrm import mutations
from dlrm.build import build_tables
from dlrm.check import CheckFailed, CheckTask, verdict
from dlrm.check_compare import (
    DENSE_GRADIENTS,
    DENSE_STATE,
    DENSE_WEIGHTS,
    GRADIENTS,
    LOSSES,
    POOLED,
    POOLED_GRADIENTS,
    ROWS,
    STATE,
)
from dlrm.check_comparison import SamplesDiffer
from dlrm.check_pass import PassResult
from dlrm.check_report import WIDTH, describe, to_json, vacuous
from dlrm.config import CheckConfig
from dlrm.host_mutations import HOST_FAULTS
from dlrm.mutations import MUTATIONS
from dlrm.pipeline import PlannedBatch
from dlrm.trainer import Trainer
from tests.check_cases import check_task, optimizers, run_on_threads
from tests.commands import dlrm, read_json, read_result, tiny, write_visits

NUM_MADE = 13
HOST_NAMES = {plant.__name__ for plant in HOST_FAULTS}
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def visits(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    """70 rows: three batches of 24 an epoch, the last of 22."""
    return write_visits(tmp_path_factory.mktemp("visits"), 70)


# ------------------------------------------------------------------------------- what is right


# More layouts are those of VARIANTS.
@pytest.mark.parametrize(
    ("world_size", "layout", "exchange", "optimizer"),
    [
        (1, "table_wise", "kv", "adagrad"),
        (1, "table_wise", "kv", "adam"),
        (2, "mixed", "mixed", "adagrad"),
        (3, "pinwheel", "kv", "rowwise_adagrad"),
        (4, "mixed", "mixed", "sgd"),
    ],
)
def test_a_right_run_passes(
    world_size: int, layout: str, exchange: str, optimizer: str, visits: PreparedDataset
) -> None:
    task = check_task(visits, world_size, layout, exchange, optimizers(optimizer))
    passes = run_on_threads(task)
    verdict(task.config, passes)
    assert [(p.precision, p.is_end_to_end) for p in passes] == [("fp64", True), ("fp32", False)]
    assert_all_compared(task, passes, visits, optimizer)


def assert_all_compared(
    task: CheckTask, passes: list[PassResult], visits: PreparedDataset, optimizer: str
) -> None:
    tables, _ = build_tables(task.config, visits.manifest)
    for result in passes:
        differences = result.differences
        assert differences.num_steps == task.config.check.steps + NUM_MADE
        # All rows at the end, and before that those of every step.
        assert differences.num_rows > sum(table.rows for table in tables)
        for quantity in (LOSSES, ROWS, GRADIENTS, DENSE_GRADIENTS, DENSE_WEIGHTS):
            assert differences.num_values(quantity) > 0, quantity
        assert bool(differences.num_values(STATE)) == (optimizer != "sgd")
        compared = {name for (quantity, name) in differences.largest if quantity == ROWS}
        assert compared == {table.name for table in tables}


MIXED = (2, "mixed", "mixed")
VARIANTS: dict[str, tuple[tuple[int, str, str], str, dict[str, Any], dict[str, Any]]] = {
    "micro-batches": (MIXED, "adagrad", {}, {"train": {"accumulate": 3}}),
    "clipping": (
        (3, "row_wise", "pooled"),
        "adam",
        {"clip_norm": 0.05},
        {"train": {"accumulate": 2}},
    ),
    "schedule": (
        (2, "column_wise", "pooled"),
        "rowwise_adagrad",
        {"schedule": {"warmup_steps": 3, "decay_steps": 3}},
        {"train": {"epochs": 3, "max_steps": 9}},
    ),
    "weight decay": ((2, "replicated", "kv"), "adam", {"sparse": {"weight_decay": 0.01}}, {}),
    "no overlap": (MIXED, "adagrad", {}, {"train": {"overlap": False}}),
    "batches of one": (MIXED, "adagrad", {}, {"data": {"batch_size": 1}}),
    "dcnv2": (MIXED, "adam", {}, {"model": {"interaction": "dcnv2", "dcn_rank": 3}}),
    "bf16": (MIXED, "adagrad", {}, {"train": {"precision": "bf16"}}),
    "bf16 on the wire": (MIXED, "adagrad", {}, {"sharding": {"wire": "bf16"}}),
    "fp16 on the wire": (
        (4, "table_row_wise", "kv"),
        "rowwise_adagrad",
        {},
        {"sharding": {"wire": "fp16"}},
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_right_run_passes_whatever_its_settings(variant: str, visits: PreparedDataset) -> None:
    (world_size, layout, exchange), name, optim, overrides = VARIANTS[variant]
    task = check_task(visits, world_size, layout, exchange, optimizers(name, **optim), overrides)
    passes = run_on_threads(task)
    verdict(task.config, passes)
    assert_all_compared(task, passes, visits, name)
    if "wire" in variant:
        # Values were really rounded, and only in the second pass.
        assert (passes[0].differences.worst(GRADIENTS) or 0) < 1e-13
        assert (passes[1].differences.worst(POOLED) or 0) > 1e-5
        assert (passes[1].differences.worst(GRADIENTS) or 0) > 1e-5


def test_in_fp64_one_pass_is_the_configuration_itself(visits: PreparedDataset) -> None:
    exact = {"train": {"precision": "fp64", "backend": "torch"}}
    task = check_task(visits, 2, "row_wise", "kv", exact)
    passes = run_on_threads(task)
    assert [result.title for result in passes] == ["fp64, end to end"]
    verdict(task.config, passes)


def test_the_first_pass_is_exact_whatever_is_configured(visits: PreparedDataset) -> None:
    lossy = {"sharding": {"wire": "bf16"}, "train": {"precision": "bf16"}}
    passes = run_on_threads(check_task(visits, 2, "row_wise", "kv", lossy))
    assert [(p.precision, p.wire) for p in passes] == [("fp64", "fp32"), ("bf16", "bf16")]


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
def test_a_fused_kernel_is_checked_by_its_rows(optimizer: str, visits: PreparedDataset) -> None:
    fused = {"train": {"backend": "fbgemm"}, "model": {"table_dims": {"words": 8, "many": 12}}}
    task = check_task(visits, 1, "table_wise", "kv", fused, optimizers(optimizer))
    exact, by_step = run_on_threads(task)
    verdict(task.config, [exact, by_step])
    assert (exact.backend, by_step.backend) == ("torch", "fbgemm")
    assert by_step.differences.num_values(GRADIENTS) == 0
    assert by_step.differences.num_values(ROWS) > 0
    assert by_step.differences.num_values(POOLED_GRADIENTS) > 0


def test_a_fused_row_may_be_rounded_once_for_every_lookup(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """fbgemm's SGD sums nothing beforehand: 1,500 lookups of a row leave more than 1e-6."""
    many = write_visits(tmp_path_factory.mktemp("many"), 500)
    overrides = {
        "train": {"backend": "fbgemm"},
        "model": {"table_dims": {"words": 8, "many": 12}},
        "data": {"batch_size": 500},
        "check": {"steps": 3},
    }
    slow = optimizers("sgd", sparse={"lr": 0.01})
    task = check_task(many, 1, "table_wise", "kv", overrides, slow)
    verdict(task.config, run_on_threads(task))


def test_a_wrong_fused_kernel_is_found(
    visits: PreparedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    from embeddings.fused import FusedGroup

    update = FusedGroup.backward_and_update
    monkeypatch.setattr(
        FusedGroup,
        "backward_and_update",
        lambda self, plan, grad_BS, lr: update(self, plan, grad_BS, lr * 1.001),
    )
    fused = {"train": {"backend": "fbgemm"}, "model": {"table_dims": {"words": 8, "many": 12}}}
    task = check_task(visits, 1, "table_wise", "kv", fused, optimizers("adagrad"))
    with pytest.raises(CheckFailed, match="fp32, one step at a time: rows of"):
        verdict(task.config, run_on_threads(task))


# ------------------------------------------------------------------------------- what is wrong

# layout and overrides that a fault needs; else rows are cut, under Adagrad.
NEEDED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "forget_replicas": ("replicated", optimizers("adagrad"), {}),
    "local_row_state": ("column_wise", optimizers("rowwise_adagrad"), {}),
    "decay_twice": ("row_wise", optimizers("adagrad", sparse={"weight_decay": 0.01}), {}),
    "update_per_micro_batch": ("row_wise", optimizers("adam"), {"train": {"accumulate": 2}}),
    "clip_local_norm": ("row_wise", optimizers("sgd", clip_norm=0.05), {}),
    "ignore_schedule": (
        "row_wise",
        optimizers("sgd", schedule={"warmup_steps": 3}),
        {},
    ),
}


@pytest.fixture(scope="module")
def checked(visits: PreparedDataset) -> Callable[[str], tuple[CheckTask, list[PassResult]]]:
    """A check with a fault planted and its passes; run once for all tests that ask for it."""

    @cache
    def run(name: str) -> tuple[CheckTask, list[PassResult]]:
        layout, optim, more = NEEDED.get(name, ("row_wise", optimizers("adagrad"), {}))
        # 64 samples are one of every lane, so both ranks have half of them.
        size = {"data": {"batch_size": 64}} if name in SEEN_AT else {}
        mutate = {"check": {"steps": 2, "mutate": name}}
        task = check_task(visits, 2, layout, "mixed", optim, more, mutate, size)
        return task, run_on_threads(task)

    return run


# Those of tables in host memory are in tests/host/test_check.py.
@pytest.mark.parametrize("name", [name for name in MUTATIONS if name not in HOST_NAMES])
def test_every_planted_fault_is_found_by_both_passes(
    name: str, checked: Callable[[str], tuple[CheckTask, list[PassResult]]]
) -> None:
    task, passes = checked(name)
    assert len(passes) == 2
    with pytest.raises(CheckFailed, match=rf"FAIL \({name} was planted\).*the first was"):
        verdict(task.config, passes)
    for result in passes:
        assert result.differences.beyond(), result.title


# What a fault does is seen first where it happens.
SEEN_AT = {
    "drop_duplicate_sum": "gradients of",
    "mean_of_means": "gradients of pooled vectors",
    "dense_not_summed": "dense gradients of",
    "skip_state": "state of",
    "stale_rows": "pooled vectors of",
    "sum_for_mean": "pooled vectors of many",
}


@pytest.mark.parametrize("name", SEEN_AT)
def test_a_fault_is_seen_at_its_own_stage(
    name: str, checked: Callable[[str], tuple[CheckTask, list[PassResult]]]
) -> None:
    """Stages before the fault show nothing: the message leads to the place."""
    by_step = checked(name)[1][1]
    assert by_step.differences.first_beyond.startswith(SEEN_AT[name])


@pytest.mark.parametrize(
    ("name", "world_size", "layout", "needs"),
    [
        ("drop_duplicate_sum", 1, "table_wise", "several ranks and a table"),
        ("drop_duplicate_sum", 2, "replicated", "a table that isn't replicated"),
        ("mean_of_means", 1, "table_wise", "launch.nproc=2"),
        ("forget_replicas", 2, "row_wise", "sharding=replicated"),
        ("dense_not_summed", 1, "table_wise", "launch.nproc=2"),
        ("local_row_state", 2, "column_wise", "optim=rowwise_adagrad"),
        ("decay_twice", 2, "row_wise", "optim.sparse.weight_decay"),
        ("update_per_micro_batch", 2, "row_wise", "train.accumulate=2"),
        ("clip_local_norm", 2, "row_wise", "optim.clip_norm"),
        ("ignore_schedule", 2, "row_wise", "optim.schedule"),
        ("wrong_owner_row", 2, "table_wise", "sharding=row_wise"),
    ],
)
def test_a_fault_that_cannot_show_is_refused(
    name: str, world_size: int, layout: str, needs: str, visits: PreparedDataset
) -> None:
    with pytest.raises(UserError, match=f"check.mutate={name} can't show here: it needs") as error:
        check_task(visits, world_size, layout, "kv", {"check": {"mutate": name}})
    assert needs in str(error.value)


def test_row_wise_state_without_split_columns_cannot_be_local(visits: PreparedDataset) -> None:
    mutate = {"check": {"mutate": "local_row_state"}}
    with pytest.raises(UserError, match="sharding=column_wise"):
        check_task(visits, 2, "row_wise", "kv", optimizers("rowwise_adagrad"), mutate)


def test_sgd_has_no_state_to_skip(visits: PreparedDataset) -> None:
    mutate = {"check": {"mutate": "skip_state"}}
    with pytest.raises(UserError, match="sgd has none"):
        check_task(visits, 2, "row_wise", "kv", optimizers("sgd"), mutate)


def test_an_unknown_fault_lists_the_known_ones() -> None:
    with pytest.raises(UserError) as error:
        CheckConfig(mutate="nonsense")
    lines = str(error.value).splitlines()
    assert len(lines) == 1 + len(MUTATIONS)
    for name, line in zip(MUTATIONS, lines[1:], strict=True):
        assert line.split()[0] == name
        assert len(line.split()) > 5, "a fault without a description"


def plant_instead(monkeypatch: pytest.MonkeyPatch, plant: Any) -> dict[str, Any]:
    """Another fault under the name of one that can show anywhere; returns the overrides."""
    monkeypatch.setitem(mutations.MUTATIONS, "stale_rows", plant)
    monkeypatch.setitem(mutations._ALL, plant, lambda situation: None)
    return {"check": {"steps": 2, "mutate": "stale_rows"}}


def test_a_fault_that_does_not_show_is_said(
    visits: PreparedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = check_task(visits, 2, "row_wise", "kv", plant_instead(monkeypatch, lambda trainer: None))
    with pytest.raises(UserError, match="was planted, and nothing shows of it in 2 steps"):
        verdict(task.config, run_on_threads(task))


@pytest.mark.parametrize("layout", ["replicated", "row_wise"])
def test_a_row_that_no_step_touches_is_compared_on_every_rank(
    layout: str, visits: PreparedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the last step, rank 1's copy (or part) of a row that isn't in its batch changes."""

    def plant(trainer: Trainer) -> None:
        step, num_steps = trainer.step, 2 + NUM_MADE
        calls = []

        def disturbed(planned: PlannedBatch) -> float:
            loss = step(planned)
            calls.append(loss)
            if len(calls) == num_steps and trainer.comm.rank == 1:
                store = trainer.embeddings.store
                # The last batch has one sample, which is rank 1's.
                used = set(planned.batch.ids.values_L.tolist())
                place = store.places("many")[0]
                row = max(set(range(place.piece.row_start, place.piece.row_stop)) - used)
                key = place.key + row - place.piece.row_start
                store.weights(place.group)[key, 0] += 1e-6
            return loss

        trainer.step = disturbed  # type: ignore[method-assign]

    overrides = plant_instead(monkeypatch, plant)
    task = check_task(visits, 2, layout, "kv", overrides)
    passes = run_on_threads(task)
    for result in passes[:1]:
        assert result.differences.first_beyond == "rows of many, at the end, after 15 steps"
        assert [text.split(" differ")[0] for _, text in result.differences.beyond()] == [
            "rows of many"
        ]


def test_dense_weights_are_compared_on_every_rank(
    visits: PreparedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rank 1 only, after the last step."""

    def plant(trainer: Trainer) -> None:
        step = trainer.step
        calls = []

        def disturbed(planned: PlannedBatch) -> float:
            loss = step(planned)
            calls.append(loss)
            if len(calls) == 2 + NUM_MADE and trainer.comm.rank == 1:
                with torch.no_grad():
                    trainer.model.head.bias += 1e-6
            return loss

        trainer.step = disturbed  # type: ignore[method-assign]

    overrides = plant_instead(monkeypatch, plant)
    passes = run_on_threads(check_task(visits, 2, "row_wise", "kv", overrides))
    for result in passes[:1]:
        assert result.differences.first_beyond == (
            "dense weights of head.bias, at the end, after 15 steps"
        )


def test_a_sample_that_is_read_twice_is_found(
    visits: PreparedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plant(trainer: Trainer) -> None:
        pipeline = trainer.pipeline

        def doubled(batches: Any, num_batches: int) -> Any:
            twice = (replace(b, row_B=b.row_B * 0 + b.row_B[:1]) for b in batches)
            return pipeline(twice, num_batches)

        trainer.pipeline = doubled  # type: ignore[method-assign]

    overrides = plant_instead(monkeypatch, plant)
    with pytest.raises(SamplesDiffer, match=r"step 1.*aren't those of the global batch"):
        run_on_threads(check_task(visits, 1, "row_wise", "kv", overrides))


# --------------------------------------------------------------------------------- what is told


@pytest.fixture(scope="module")
def passes(visits: PreparedDataset) -> list[PassResult]:
    return run_on_threads(check_task(visits, 2, "mixed", "mixed", optimizers("adagrad")))


@pytest.mark.parametrize("quantity", [LOSSES, ROWS, GRADIENTS, DENSE_WEIGHTS])
def test_a_check_that_compared_nothing_fails(
    quantity: str, visits: PreparedDataset, passes: list[PassResult]
) -> None:
    config = check_task(visits, 2, "mixed", "mixed").config
    first = passes[0]
    kept = {key: value for key, value in first.differences.largest.items() if key[0] != quantity}
    without = replace(first, differences=replace(first.differences, largest=kept))
    assert vacuous(first) == []
    assert vacuous(without) == [quantity.replace("_", " ")]
    with pytest.raises(CheckFailed, match="nothing was compared of"):
        verdict(config, [without])


def test_no_steps_are_no_check(passes: list[PassResult]) -> None:
    first = passes[0]
    assert vacuous(replace(first, differences=replace(first.differences, num_steps=0))) == ["steps"]


def test_the_table_has_every_table_and_fits(
    visits: PreparedDataset, passes: list[PassResult]
) -> None:
    tables, _ = build_tables(check_task(visits, 1, "x", "kv").config, visits.manifest)
    long = [*tables, replace(tables[0], name="a_table_with_quite_a_long_name", rows=123_456_789)]
    text = describe(passes, long)
    lines = text.splitlines()
    assert max(map(len, lines)) <= WIDTH
    for name in ("shared", "many", "words", "a_table_with"):
        assert any(line.startswith(name) for line in lines), name
    assert "123,456,789×4" in text
    assert "1.0e-10" in text
    assert "19 steps" in text
    assert "!" not in text


def test_what_is_beyond_is_marked(
    visits: PreparedDataset, checked: Callable[[str], tuple[CheckTask, list[PassResult]]]
) -> None:
    task, passes = checked("skip_state")
    tables, _ = build_tables(task.config, visits.manifest)
    assert "!" in describe(passes, tables)


def test_of_many_tables_the_worst_are_shown(
    visits: PreparedDataset, passes: list[PassResult]
) -> None:
    tables, _ = build_tables(check_task(visits, 1, "x", "kv").config, visits.manifest)
    many = [replace(tables[0], name=f"t{i}") for i in range(60)] + list(tables)
    text = describe(passes, many)
    assert "The 40 worst of 63 tables" in text
    assert "shared" in text


def test_figures_are_json(passes: list[PassResult]) -> None:
    figures = json.loads(json.dumps(to_json(passes), allow_nan=False))
    assert [entry["title"] for entry in figures["passes"]] == [
        "fp64, end to end",
        "fp32, one step at a time",
    ]
    for entry in figures["passes"]:
        assert set(entry["tables"]) == {"shared", "many", "words"}
        assert entry["compared"]["steps"] == 19
        assert entry["compared"]["values"][DENSE_STATE] > 0


def test_tables_that_do_not_fit_twice_are_refused(
    visits: PreparedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message has the sizes and the keys; copies of a replicated table count each."""
    monkeypatch.setattr("dlrm.check.available_bytes", lambda: 30_000)
    check_task(visits, 1, "row_wise", "kv", optimizers("adagrad"))
    with pytest.raises(UserError, match=r"model\.embedding_dim"):
        check_task(visits, 3, "replicated", "kv", optimizers("adagrad"))
    monkeypatch.setattr("dlrm.check.available_bytes", lambda: None)
    check_task(visits, 3, "replicated", "kv", optimizers("adagrad"))


@pytest.mark.parametrize(
    ("optim", "key"),
    [
        ({"eps": 0.0}, "optim.eps"),
        ({"sparse": {"eps": 0.0}}, "optim.sparse.eps"),
        ({"dense": {"name": "adam", "eps": 0.0}}, "optim.dense.eps"),
    ],
)
def test_f10_eps_0_is_refused_with_its_key(
    optim: dict[str, Any], key: str, visits: PreparedDataset
) -> None:
    """No limit would say anything; rules without eps don't mind."""
    with pytest.raises(UserError, match=rf"^{key}=0: .* Set {key}=1e-8$"):
        check_task(visits, 1, "row_wise", "kv", {"optim": optim})
    mixed = {"eps": 0.0, "dense": {"name": "sgd"}, "sparse": {"name": "adagrad", "eps": 1e-8}}
    check_task(visits, 1, "row_wise", "kv", {"optim": mixed})


# ------------------------------------------------------------------------------- the command


@pytest.fixture
def start_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_passes_and_writes_everything(
    start_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run_dir = start_folder / "run"
    arguments = [*tiny(tmp_path_factory), "check.steps=3", f"hydra.run.dir={run_dir}"]
    assert dlrm("check", *arguments) == 0
    out = capfd.readouterr().out
    shown = [line for line in out.splitlines() if str(run_dir) not in line]
    assert max(map(len, shown)) <= 100, out
    assert "PASS" in out
    assert {path.name for path in run_dir.iterdir()} == {"config.yaml", "plan.json", "result.json"}
    result = read_result(run_dir)
    assert result["status"] == "completed"
    assert (result["world_size"], result["mutate"], result["steps"]) == (1, None, 3)
    assert len(result["plan_digest"]) == 64
    assert result["versions"]["torch"] == torch.__version__
    assert len(result["passes"][0]["tables"]) == 26
    assert result["passes"][0]["compared"]["steps"] == 3 + NUM_MADE
    assert read_json(run_dir / "plan.json")["world_size"] == 1


def test_a_planted_fault_ends_the_command_with_1(
    start_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run_dir = start_folder / "run"
    arguments = [*tiny(tmp_path_factory), "check.steps=1", "check.mutate=skip_state"]
    assert dlrm("check", *arguments, f"hydra.run.dir={run_dir}") == 1
    err = capfd.readouterr().err
    assert err.startswith("dlrm: FAIL (skip_state was planted): ")
    assert "Traceback" not in err
    result = read_result(run_dir)
    assert result["status"].startswith("failed: CheckFailed: FAIL (skip_state was planted)")
    assert result["mutate"] == "skip_state"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["check.mutate=nonsense"], "there is no such fault"),
        (["check.mutate=mean_of_means"], "it needs several ranks (launch.nproc=2)"),
        (["check.steps=0"], "check.steps=0: must be at least 1"),
    ],
)
def test_mistakes_end_the_command_with_2(
    arguments: list[str],
    says: str,
    start_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert dlrm("check", *tiny(tmp_path_factory), *arguments) == 2
    err = capfd.readouterr().err
    assert says in err
    assert "Traceback" not in err
