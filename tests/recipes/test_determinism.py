"""Equal runs are equal to the bit (docs/architecture.md, "The same model")."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.commands import (
    TINY_DATA,
    TINY_MODEL,
    dlrm,
    eval_lines,
    read_result,
    tiny,
    train_lines,
    without_plots,
    write_adult_csv,
)


@pytest.fixture(autouse=True)
def start_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands start in an empty folder and skip the plots."""
    monkeypatch.chdir(tmp_path)
    without_plots(monkeypatch)


def outcome(run_dir: str) -> dict[str, Any]:
    """All figures of a run that don't measure time or memory."""
    run = Path(run_dir)
    result = read_result(run)
    return {
        "model_digest": result["model_digest"],
        "plan_digest": result["plan_digest"],
        "data": result["data"]["digest"],
        "eval": result["eval"],
        "losses": [line["loss"] for line in train_lines(run)],
        "evaluations": [line["eval"] for line in eval_lines(run)],
    }


def train(name: str, *overrides: str) -> dict[str, Any]:
    """A run of two epochs, the second one short."""
    more = ["train.epochs=2", "train.max_steps=20", "train.log_every=1", "train.eval_every=9"]
    more.append(f"hydra.run.dir={name}")
    assert dlrm("train", *more, *overrides) == 0
    return outcome(name)


@pytest.mark.parametrize(
    "more",
    [
        ["train.backend=fbgemm"],
        ["train.backend=torch", "optim=rowwise_adagrad"],
        ["train.backend=torch", "optim=adam", "train.precision=bf16", "train.accumulate=3"],
    ],
)
def test_two_runs_are_equal(more: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    shared = [*tiny(tmp_path_factory), *more]
    first = train("first", *shared)
    assert train("second", *shared) == first
    assert len(first["losses"]) == 20


def test_another_seed_is_another_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Of the same data: rows, dense weights and the order of samples differ."""
    shared = tiny(tmp_path_factory)
    first = train("first", *shared)
    other = train("other", *shared, "seed=1")
    assert other["model_digest"] != first["model_digest"]
    assert other["losses"] != first["losses"]
    assert other["data"] == first["data"]


def test_what_only_watches_changes_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Evaluating, logging and keeping more often, or in larger batches, trains the same model."""
    shared = tiny(tmp_path_factory)
    base = train("base", *shared, "train.max_steps=8")
    for number, more in enumerate(
        (["train.eval_every=4"], ["train.checkpoint_every=1"], ["data.eval_batch_size=100"])
    ):
        plain = ["train.max_steps=8", "train.log_every=1", f"hydra.run.dir=run{number}"]
        assert dlrm("train", *shared, *plain, *more) == 0
        result = read_result(Path(f"run{number}"))
        assert result["model_digest"] == base["model_digest"], more
        assert [line["loss"] for line in train_lines(Path(f"run{number}"))] == base["losses"]


def test_the_folder_of_a_generated_dataset_doesn_t_matter(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    first = train("first", *tiny(tmp_path_factory))
    elsewhere = [*TINY_DATA, *TINY_MODEL, "data.root=deep/er/elsewhere"]
    assert train("second", *elsewhere) == first


def test_a_dataset_prepared_twice_from_files_of_other_places(tmp_path: Path) -> None:
    """Neither the folder of the raw files nor when they were prepared is part of the result."""
    outcomes = []
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        for seed, part in enumerate(("train", "test")):
            write_adult_csv(tmp_path / place / f"{part}.csv", 400, seed=seed)
        files = [f"data.raw_{part}={place}/{part}.csv" for part in ("train", "test")]
        root = f"data.root={place}/prepared"
        outcomes.append(train(f"run_{place}", "data=adult", *files, root, *TINY_MODEL))
    assert outcomes[0] == outcomes[1]


def test_without_shuffling_epochs_have_one_order(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The order is part of what a seed decides only where rows are shuffled."""
    shared = tiny(tmp_path_factory)
    shuffled, raw_order = (
        train(name, *shared, "optim.sparse.lr=0", "optim.dense.lr=0", f"data.shuffle={name}")
        for name in ("true", "false")
    )
    # Nothing is learnt here: an epoch's losses are those of its batches.
    losses = raw_order["losses"]
    assert losses[16:] == losses[:4]
    assert shuffled["losses"][16:] != shuffled["losses"][:4]
    assert shuffled["losses"] != losses
