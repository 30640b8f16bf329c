"""The command with several processes: the same model as one process has, one folder, and no failure
of a rank that hangs the others or goes without its name.

tests/unit/test_trainer_ranks.py has the many cases, on ranks that are threads; here are real
processes and the command that starts them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from data.parquet import PreparedDataset
from dlrm.checkpoint import open_checkpoint
from dlrm.planning import make_plan
from embeddings import Plan, TableConfig
from tests.commands import (
    arrays_of,
    compose_config,
    dlrm,
    eval_lines,
    finish,
    latest,
    read_result,
    start_python,
    train_lines,
    without_plots,
    write_adult_csv,
)
from tests.dist import train_entries
from tests.dist.forked_workers import forked_workers
from tests.dist.test_launch import is_alive, pids_in
from tests.dist.worker_pool import Workers

pytestmark = pytest.mark.timeout(120)

CHECKOUT = Path(__file__).parents[2]
NUM_TRAIN, NUM_VALID, NUM_TEST = 1003, 203, 301  # Divided by neither the ranks nor the batch.
BATCH_SIZE = 21
DIM = 12  # Three slices of columns.
TINY = (
    "data=adult",
    "data.root=prepared",
    f"data.batch_size={BATCH_SIZE}",
    "data.eval_batch_size=64",
    f"model.embedding_dim={DIM}",
    "model.bottom_mlp=[16]",
    "model.top_mlp=[16]",
    "train.evals_per_epoch=1",
    "train.epochs=2",
    "launch.num_threads=1",
)
FP64 = ("train.precision=fp64", "train.backend=torch", "train.max_steps=50")
# Of a run in which a rank hangs; where one ends, nobody has to wait for a timeout.
HANG_TIMEOUT_S, LONG_TIMEOUT_S = 6.0, 100.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all commands are started: raw files and the prepared dataset."""
    found = tmp_path_factory.mktemp("train")
    sizes = {"train": NUM_TRAIN, "valid": NUM_VALID, "test": NUM_TEST}
    for seed, (name, rows) in enumerate(sizes.items()):
        write_adult_csv(found / f"{name}.csv", rows, seed=seed)
    write_adult_csv(found / "unlabelled.csv", NUM_TEST, seed=2, labelled=False)
    files = [f"data.raw_{part}={found / f'{part}.csv'}" for part in sizes]
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(found)
        assert dlrm("prepare", "data=adult", "data.root=prepared", *files) == 0
    return found


@pytest.fixture(autouse=True)
def started_in_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_plots(monkeypatch)
    monkeypatch.chdir(folder)


@pytest.fixture(scope="module")
def trained(folder: Path) -> Callable[..., Path]:
    """Trains with some overrides, once for all tests that ask for it; returns the run's folder."""
    known: dict[tuple[str, ...], Path] = {}

    def run(*overrides: str) -> Path:
        if overrides not in known:
            run_dir = folder / f"run-{len(known)}"
            with forked_workers():
                assert dlrm("train", *TINY, *overrides, f"hydra.run.dir={run_dir}") == 0
            known[overrides] = run_dir
        return known[overrides]

    return run


@pytest.fixture(scope="module")
def default_run(folder: Path) -> Path:
    """Two fresh processes, fp32, two epochs; where Hydra puts it."""
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        without_plots(patched)
        assert dlrm("train", *TINY, "launch.nproc=2") == 0
    runs = list((folder / "outputs" / "train").iterdir())
    assert len(runs) == 1, "one folder for all ranks"
    return runs[0]


def table_configs(folder: Path) -> list[TableConfig]:
    rows = PreparedDataset(folder / "prepared").manifest.table_rows
    return [TableConfig(name, size, DIM) for name, size in rows.items()]


# ------------------------------------------------------------------- the model of one process


@pytest.mark.parametrize(
    ("world_size", "layout", "optimizer", "collectives_per_step"),
    [
        (2, "row_wise", "adagrad", 4),
        (3, "column_wise", "rowwise_adagrad", 5),
        (4, "row_wise", "adagrad", 4),
    ],
)
def test_fp64_comes_to_the_model_of_one_process(
    world_size: int,
    layout: str,
    optimizer: str,
    collectives_per_step: int,
    trained: Callable[..., Path],
    workers: Workers,
    folder: Path,
) -> None:
    """50 steps, over the end of an epoch; the test part's figures, the losses, the kept model. Two
    ranks are started by the command, more are there already."""
    alone = trained(f"optim={optimizer}", *FP64)
    more = (f"optim={optimizer}", *FP64, f"sharding={layout}")
    if world_size == 2:
        ranks = trained(*more, "launch.nproc=2")
    else:
        ranks = folder / f"joined-{world_size}"
        config = compose_config("train", *TINY, *more, f"data.root={folder / 'prepared'}")
        workers(world_size).run(train_entries.train_joined, config, ranks)
    expected, found = read_result(alone), read_result(ranks)
    assert (found["status"], found["world_size"]) == ("completed", world_size)
    assert found["train"]["steps"] == expected["train"]["steps"] == 50
    assert found["eval"]["logloss"] == pytest.approx(expected["eval"]["logloss"], abs=1e-9)
    for name, value in expected["eval"].items():
        assert found["eval"][name] == pytest.approx(value, rel=1e-9), name
    assert found["train"]["loss_last"] == pytest.approx(expected["train"]["loss_last"], rel=1e-10)
    for line, other in zip(eval_lines(ranks), eval_lines(alone), strict=True):
        assert (line["step"], line["samples"]) == (other["step"], other["samples"])
        assert line["eval"]["logloss"] == pytest.approx(other["eval"]["logloss"], abs=1e-9)
    arrays, others = arrays_of(latest(ranks)), arrays_of(latest(alone))
    assert arrays.keys() == others.keys()
    for name, values in others.items():
        np.testing.assert_allclose(arrays[name], values, rtol=1e-10, atol=1e-12, err_msg=name)
    assert found["comm"]["collectives_per_step"] == collectives_per_step
    assert found["plan_digest"] != expected["plan_digest"]


def test_scoring_by_two_processes_is_that_of_one(
    trained: Callable[..., Path], folder: Path, forked: None
) -> None:
    """Of a model that two trained; a prepared part, and raw rows without labels."""
    run = trained("optim=adagrad", *FP64, "sharding=row_wise", "launch.nproc=2")
    results, predictions = [], []
    for nproc in (1, 2):
        more = [f"run={run}", f"launch.nproc={nproc}", "launch.num_threads=1"]
        target = folder / f"evaluated-{nproc}"
        layout = ["sharding=column_wise", "data.batch_size=64", f"hydra.run.dir={target}"]
        assert dlrm("evaluate", *more, *layout) == 0
        results.append(read_result(target))
        target, out = folder / f"predicted-{nproc}", folder / f"predictions-{nproc}.parquet"
        raw = ["data.raw=unlabelled.csv", "data.batch_size=50", f"out={out}"]
        assert dlrm("predict", *more, *raw, f"hydra.run.dir={target}") == 0
        assert read_result(target)["predictions"]["rows"] == NUM_TEST
        predictions.append(pq.read_table(out))
        results.append(read_result(target))
    assert [result["world_size"] for result in results] == [1, 1, 2, 2]
    for name, value in read_result(run)["eval"].items():
        assert results[0]["eval"][name] == pytest.approx(value, rel=1e-9), name
        assert results[2]["eval"][name] == pytest.approx(value, rel=1e-9), name
    assert results[2]["unknown_id_share"] == results[0]["unknown_id_share"]
    one, two = predictions
    assert two.schema == one.schema
    assert two["row"].to_pylist() == one["row"].to_pylist() == list(range(NUM_TEST))
    np.testing.assert_allclose(two["logit"].to_numpy(), one["logit"].to_numpy(), rtol=1e-10)
    # Each rank counts the ids of its own share of raw rows.
    assert results[3]["unknown_id_share"] == results[1]["unknown_id_share"]


@pytest.mark.parametrize("layout", ["row_wise", "replicated"])
def test_neither_overlap_nor_evaluations_change_a_bit(
    layout: str, workers: Workers, folder: Path, tmp_path: Path
) -> None:
    """fp32, over the network, which fills buffers whenever it likes: also those of a batch whose
    ids are under way during an evaluation."""
    digests = []
    for overlap, eval_every, num_evaluations in ((True, 3, 14), (False, 40, 1)):
        more = [f"train.overlap={overlap}", f"train.eval_every={eval_every}", "train.max_steps=40"]
        config = compose_config("train", *TINY, *more, f"sharding={layout}", "launch.nproc=2")
        plan = make_plan(config, PreparedDataset(folder / "prepared"), 2).plan
        run_dir = tmp_path / str(overlap)
        run_dir.mkdir()
        args = (config, folder / "prepared", run_dir, plan)
        for digest, found in workers(2).run(train_entries.train_and_digest, *args):
            assert found == num_evaluations
            digests.append(digest)
    assert len(set(digests)) == 1


# ---------------------------------------------------------------------------- folder and figures


@pytest.mark.smoke
def test_b45_one_folder_holds_what_one_process_would_write(
    default_run: Path, trained: Callable[..., Path], folder: Path
) -> None:
    """Paths are relative to where the command was started; every line is written once."""
    alone = trained("optim=adagrad", *FP64)
    files = {path.relative_to(alone) for path in alone.rglob("*") if "events.out" not in path.name}
    ours = {
        path.relative_to(default_run)
        for path in default_run.rglob("*")
        if "events.out" not in path.name
    }
    is_model = "checkpoints/step-"
    assert {f for f in ours if not str(f).startswith(is_model)} == {
        f for f in files if not str(f).startswith(is_model)
    }
    assert len(list(default_run.glob("tensorboard/events.out.*"))) == 1
    steps = [line["step"] for line in train_lines(default_run)]
    assert steps == sorted(set(steps))
    assert {path.name for path in (folder / "outputs").iterdir()} == {"train"}


def test_b46_b48_every_row_of_both_epochs_counts_once(default_run: Path) -> None:
    """48 steps an epoch, the last of 16 rows; an evaluation after each, of uneven shares."""
    result = read_result(default_run)
    train = result["train"]
    assert (train["steps"], train["samples"], train["epochs"]) == (96, 2 * NUM_TRAIN, 2.0)
    evaluations = [(line["step"], line["eval"]["num_samples"]) for line in eval_lines(default_run)]
    assert evaluations[:2] == [(48, NUM_VALID), (96, NUM_VALID)]
    assert [size for _, size in evaluations[2:]] == [NUM_TEST]
    assert result["eval"]["num_samples"] == NUM_TEST
    assert result["eval"]["auc"] > 0.65, "learnt nothing"


def test_the_result_of_two_processes(default_run: Path, folder: Path) -> None:
    result = read_result(default_run)
    assert (result["status"], result["world_size"]) == ("completed", 2)
    assert len(result["model_digest"]) == 64
    comm = result["comm"]
    assert comm["collectives_per_step"] == 4
    assert comm["dense_collectives_per_step"] >= 1
    for key in ("bytes_sent_per_step", "bytes_sent_per_step_max_rank"):
        assert set(comm[key]) == {"ids", "rows", "grads", "dense"}
    # A ring sends 2 (W-1)/W of the dense gradients' bytes, and of the loss's.
    dense = open_checkpoint(latest(default_run)).dense()
    num_weights = sum(values.numel() for values in dense.values())
    assert comm["bytes_sent_per_step"]["dense"] >= 4 * (num_weights + 1)
    assert comm["imbalance"] >= 1
    memory = result["memory"]
    tables = table_configs(folder)
    whole_bytes = sum(4 * table.rows * DIM for table in tables)
    assert whole_bytes / 2 <= memory["table_bytes_max_rank"] <= whole_bytes
    assert memory["state_bytes_max_rank"] > 0
    assert memory["peak_rss_bytes_max_rank"] > 50 << 20
    plan = Plan.from_json((default_run / "plan.json").read_text())
    plan.validate(tables)
    assert (plan.world_size, plan.digest()) == (2, result["plan_digest"])


def test_an_equal_run_on_the_same_plan_is_equal_to_the_bit(
    default_run: Path, folder: Path, forked: None
) -> None:
    """plan.json of one run is the plan of another; fp32."""
    run_dir = folder / "again"
    plan = ["sharding=file", f"sharding.plan={default_run / 'plan.json'}"]
    assert dlrm("train", *TINY, "launch.nproc=2", *plan, f"hydra.run.dir={run_dir}") == 0
    assert_equal_runs(run_dir, default_run)


def assert_equal_runs(found: Path, expected: Path) -> None:
    ours, theirs = read_result(found), read_result(expected)
    for key in ("model_digest", "plan_digest", "world_size", "eval", "comm", "status"):
        assert ours[key] == theirs[key], key
    assert [line["loss"] for line in train_lines(found)] == [
        line["loss"] for line in train_lines(expected)
    ]
    arrays, others = arrays_of(latest(found)), arrays_of(latest(expected))
    assert arrays.keys() == others.keys()
    for name, values in others.items():
        np.testing.assert_array_equal(arrays[name], values, err_msg=name)


# ----------------------------------------------------------------------------- an outer torchrun

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "dlrm")


def test_torchrun_trains_the_same_model(default_run: Path, folder: Path) -> None:
    """To the bit; and the log states the global and the local batch, once."""
    process = start_python(
        *TORCHRUN, "train", *TINY, "hydra.run.dir=torchrun", cwd=folder, PYTHONPATH=str(CHECKOUT)
    )
    status, out, err = finish(process)
    assert status == 0, err
    assert_equal_runs(folder / "torchrun", default_run)
    told = [line for line in out.splitlines() if line.startswith("run ")]
    assert len(told) == 1
    assert "96 steps of global batch 21 (2 processes: local batch about 10)" in told[0]


def test_what_the_first_rank_of_torchrun_finds_wrong_all_tell(
    workers: Workers, tmp_path: Path
) -> None:
    """It alone prepares the data, and sends the others its error, with file and line."""
    raw = tmp_path / "raw.csv"
    raw.write_text("age, workclass, Y\n1, 2\n")
    files = [f"data.raw_train={raw}", f"data.root={tmp_path / 'prepared'}"]
    config = compose_config("train", "data=adult", *files)
    told = workers(2).run(train_entries.join_with_a_bad_file, config, tmp_path / "run")
    assert told[0] == told[1]
    assert told[0].startswith(f"{raw}, line ")
    assert read_result(tmp_path / "run")["status"] == f"failed: RawDataError: {told[0]}"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "hydra.run.dir= is missing"),
        (("-m", "seed=0,1", "hydra.run.dir=refused"), "-m: torchrun would run the whole sweep"),
    ],
)
def test_torchrun_is_refused_what_would_differ_between_ranks(
    arguments: tuple[str, ...],
    named: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = set(folder.rglob("*"))
    for name, value in {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert dlrm("train", *TINY, *arguments) == 2
    err = capfd.readouterr().err
    assert named in err
    assert "Traceback" not in err
    assert set(folder.rglob("*")) == before


# ------------------------------------------------------------------------------------ failures


@pytest.fixture
def train_with_fault(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    forked: None,
) -> Callable[..., tuple[str, dict[str, Any]]]:
    """Trains on two ranks, of which one fails at step 3: (stderr, result.json). The command has
    ended with the given status in time, and so has every process."""

    def run(
        how: str, who: int, status: int = 1, timeout_s: float = LONG_TIMEOUT_S
    ) -> tuple[str, dict[str, Any]]:
        pids, run_dir = tmp_path / "pids", tmp_path / "run"
        pids.mkdir()
        faulty = partial(train_entries.train_with_fault, how, who, str(pids))
        monkeypatch.setattr("dlrm.train.train_rank", faulty)
        capfd.readouterr()
        start_s = time.monotonic()
        more = [f"launch.timeout_s={timeout_s}", "launch.nproc=2", f"hydra.run.dir={run_dir}"]
        assert dlrm("train", *TINY, *more) == status
        # The start takes a while, too, on a busy machine.
        assert time.monotonic() - start_s < HANG_TIMEOUT_S + 15 + 30
        assert len(pids_in(pids)) == 2
        assert not any(map(is_alive, pids_in(pids)))
        result = read_result(run_dir)
        assert result["status"].startswith("failed: ")
        # No half-written model, and none that could be taken for one.
        assert not list(run_dir.glob("checkpoints/*"))
        return capfd.readouterr().err, result

    return run


@pytest.mark.parametrize(
    ("how", "who", "reason"),
    [
        ("raise", 1, "failed: ArithmeticError: rows don't add up"),
        ("SIGKILL", 0, "was killed by SIGKILL"),
    ],
)
def test_a_rank_that_fails_is_named(
    how: str, who: int, reason: str, train_with_fault: Callable[..., tuple[str, dict[str, Any]]]
) -> None:
    err, result = train_with_fault(how, who)
    place = f"rank {who} of 2 (step 3, phase backward) {reason}"
    assert f"dlrm: {place}" in err
    assert place in result["status"]
    assert "PeerLost" not in err.splitlines()[0]
    assert err.count("Traceback (most recent call last)") == (1 if how == "raise" else 0)


def test_a_rank_that_sleeps_for_ever_is_named(
    train_with_fault: Callable[..., tuple[str, dict[str, Any]]],
) -> None:
    err, result = train_with_fault("sleep", 1, timeout_s=HANG_TIMEOUT_S)
    place = "rank 1 of 2 (step 3, phase backward) "
    assert f"dlrm: {place}" in err
    assert "gave no sign of life for" in err or "didn't answer rank 0" in err
    assert place in result["status"]
    # Where it hangs is told, too.
    assert "in misbehave" in err


def test_an_id_that_is_no_row_is_the_user_s_to_mend(
    train_with_fault: Callable[..., tuple[str, dict[str, Any]]],
) -> None:
    """A `ValueError` of ours in the workers, on all of them alike: exit status 2, one message."""
    err, result = train_with_fault("bad id", 1, status=2)
    assert f"{train_entries.BAD_ID}" in err
    assert "workclass" in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1
    assert result["status"].startswith("failed: UserError: ")
    assert f"{train_entries.BAD_ID}" in result["status"]
