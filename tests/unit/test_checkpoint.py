"""Models on disk: equal when read back, refused when damaged, whole after a kill."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.errors import UserError
from data.parquet import PreparedDataset
from dlrm.checkpoint import BLOCK_ROWS, Checkpoints, blocks, load_model, model_digest
from dlrm.trainer import Trainer
from embeddings.row_optim import RowOptimizerConfig
from embeddings.sharded import ShardedEmbeddings
from embeddings.table import FeatureConfig, TableConfig
from tests.commands import (
    arrays_of,
    build_trainer,
    dense_values,
    dlrm,
    finish,
    latest,
    start_python,
    table_values,
    tiny,
    without_plots,
    write_visits,
)

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """`launch.num_threads` is set for the whole process: put it back."""
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def visits(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    return write_visits(tmp_path_factory.mktemp("visits"), 60)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the command, long enough to overfit: its best model isn't its latest."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patched:
        without_plots(patched)
        more = ["train.epochs=6", f"hydra.run.dir={run_dir}"]
        assert dlrm("train", *tiny(tmp_path_factory), *more) == 0
    assert latest(run_dir, "best") != latest(run_dir)
    return run_dir


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """The same run, to be damaged."""
    return Path(shutil.copytree(finished, tmp_path / "copied"))


def trained(dataset: PreparedDataset, folder: Path, sparse: str = "adam", seed: int = 0) -> Trainer:
    optim = {"sparse": {"name": sparse, "lr": 0.1}, "dense": {"name": "adam", "lr": 0.1}}
    trainer = build_trainer(dataset, folder, {"optim": optim, "seed": seed}).trainer
    trainer.fit()
    return trainer


# --------------------------------------------------------------------------------- save and load


@pytest.mark.parametrize("sparse", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_what_is_loaded_equals_what_was_saved(
    sparse: str, visits: PreparedDataset, tmp_path: Path
) -> None:
    trainer = trained(visits, tmp_path / "run", sparse)
    other = build_trainer(visits, tmp_path / "other", {"seed": 9}).trainer
    assert dense_values(other)["head.weight"].ne(dense_values(trainer)["head.weight"]).all()
    load_model(Checkpoints(tmp_path / "run").find("latest"), other.model, other.embeddings)
    for name, values in dense_values(trainer).items():
        assert torch.equal(dense_values(other)[name], values), name
    rows = table_values(other)
    for name, values in table_values(trainer).items():
        if name.endswith(".weight"):
            assert torch.equal(rows[name], values), name


@pytest.mark.parametrize(
    ("sparse", "states"),
    [
        ("sgd", {}),
        ("rowwise_adagrad", {"sum": 1}),
        ("adam", {"exp_avg": 4, "exp_avg_sq": 4}),
    ],
)
def test_the_files_hold_rows_states_and_dense_weights(
    sparse: str, states: dict[str, int], visits: PreparedDataset, tmp_path: Path
) -> None:
    """Plain arrays, one for the weights of a table and one for each state of its optimizer."""
    trainer = trained(visits, tmp_path / "run", sparse)
    stored = arrays_of(latest(tmp_path / "run"))
    for name, values in table_values(trainer).items():
        np.testing.assert_array_equal(stored[f"{name}.npy"], values.numpy(), err_msg=name)
    for state, width in states.items():
        assert stored[f"many.{state}.npy"].shape == (31, width)
        assert np.abs(stored[f"many.{state}.npy"]).sum() > 0
    for name, values in dense_values(trainer).items():
        np.testing.assert_array_equal(stored[f"dense.npz/{name}"], values.numpy())
    # Dense Adam: both moments of every weight, and the step count.
    assert stored["dense_state.npz/head.weight/step"] == 6
    assert stored["dense_state.npz/head.weight/exp_avg_sq"].shape == (1, 5)
    info = json.loads((latest(tmp_path / "run") / "checkpoint.json").read_text())
    assert info["step"] == 6
    assert info["tables"]["shared"] == {"rows": 13, "dim": 4}


def test_tables_of_several_blocks_are_written_whole(tmp_path: Path) -> None:
    """One more row than a block holds."""
    rows = BLOCK_ROWS + 1
    assert list(blocks(rows)) == [(0, BLOCK_ROWS), (BLOCK_ROWS, rows)]
    embeddings = ShardedEmbeddings(
        [TableConfig("t", rows, 2)],
        [FeatureConfig("f", "t", "sum")],
        RowOptimizerConfig("adagrad"),
        dtype=torch.float64,
        seed=0,
        backend="torch",
    )
    model = torch.nn.Linear(2, 1)
    tmp_path.joinpath("run").mkdir()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Checkpoints(tmp_path / "run").save(1, model, embeddings, optimizer, is_best=False)
    stored = np.load(latest(tmp_path / "run") / "tables" / "t.weight.npy")
    np.testing.assert_array_equal(stored, embeddings.store.read("t", 0, rows)["weight"].numpy())


def test_only_latest_and_best_are_kept(visits: PreparedDataset, tmp_path: Path) -> None:
    trainer = build_trainer(visits, tmp_path / "run", {}).trainer
    checkpoints = trainer.checkpoints
    for step, is_best in ((1, False), (2, True), (3, False), (4, False)):
        checkpoints.save(
            step,
            trainer.model,
            trainer.embeddings,
            trainer.dense_optimizer,
            is_best=is_best,
        )
        folders = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("*step*"))
        best = {1: 1, 2: 2, 3: 2, 4: 2}[step]
        assert folders == sorted({f"step-{best:06d}", f"step-{step:06d}"})
        assert checkpoints.find("latest").step == step
        assert checkpoints.find("best").step == best
    assert checkpoints.find("best").which == "best"


def test_without_a_best_the_latest_is_found_and_named(
    visits: PreparedDataset, tmp_path: Path
) -> None:
    trainer = trained(visits, tmp_path / "run")
    assert trainer.checkpoints.find("best").which == "latest"
    with pytest.raises(UserError, match="holds no model"):
        Checkpoints(tmp_path / "nothing").find("best")


# ---------------------------------------------------------------------------------------- digest


def test_the_digest_is_of_rows_states_and_dense_weights(
    visits: PreparedDataset, tmp_path: Path
) -> None:
    """Each of them, changed in one place, changes it; so does nothing else."""
    trainer = trained(visits, tmp_path / "run")
    model, store = trainer.model, trainer.embeddings.store
    digest = model_digest(model, trainer.embeddings)
    assert model_digest(model, trainer.embeddings) == digest
    for name in ("weight", "exp_avg"):
        values = store.read("words", 30, 31)[name]
        store.write("words", 30, {name: values + 1})
        assert model_digest(model, trainer.embeddings) != digest, name
        store.write("words", 30, {name: values})
    with torch.no_grad():
        bias = model.head.bias.clone()
        model.head.bias += 1
        assert model_digest(model, trainer.embeddings) != digest
        model.head.bias.copy_(bias)
    assert model_digest(model, trainer.embeddings) == digest


# --------------------------------------------------------------------------------------- damage


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (flip, "tables/C7.weight.npy"),
        (Path.unlink, "tables/C26.weight.npy"),
        (flip, "dense.npz"),
        (cut, "dense.npz"),
    ],
)
def test_a_damaged_file_is_named(
    damage: Callable[[Path], None], name: str, copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    damage(latest(copied, "best") / name)
    out = copied.parent / "eval"
    assert dlrm("evaluate", f"run={copied}", f"hydra.run.dir={out}") == 2
    err = capfd.readouterr().err
    assert str(latest(copied, "best") / name) in err
    assert "Traceback" not in err
    assert not (out / "result.json").exists()
    if damage is cut:  # The other model is whole.
        more = ["checkpoint=latest", f"hydra.run.dir={copied.parent / 'latest'}"]
        assert dlrm("evaluate", f"run={copied}", *more) == 0


@pytest.mark.parametrize("damage", [cut, Path.unlink])
def test_a_damaged_description_is_named(
    damage: Callable[[Path], None], copied: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    damage(latest(copied, "best") / "checkpoint.json")
    assert dlrm("evaluate", f"run={copied}", f"hydra.run.dir={copied.parent / 'eval'}") == 2
    err = capfd.readouterr().err
    assert str(latest(copied, "best") / "checkpoint.json") in err
    assert "Traceback" not in err


def test_tables_of_another_dataset_are_refused(visits: PreparedDataset, tmp_path: Path) -> None:
    trained(visits, tmp_path / "run")
    info = Checkpoints(tmp_path / "run").find("latest")
    wider = build_trainer(visits, tmp_path / "wider", {"model": {"embedding_dim": 8}}).trainer
    before = table_values(wider)
    with pytest.raises(UserError, match=r"many: stored .*'dim': 4.*, wanted .*'dim': 8"):
        load_model(info, wider.model, wider.embeddings)
    for name, values in table_values(wider).items():
        assert torch.equal(values, before[name]), "a partial load"


class Planted:
    """What a hostile file would hold: unpickling it runs code."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (Path.touch, (self.marker,))


@pytest.mark.parametrize("name", ["dense.npz", "tables/C1.weight.npy"])
def test_no_pickle_is_ever_loaded(
    name: str, copied: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Even where the digests were made to fit."""
    marker = tmp_path / "code-was-run"
    pickle.loads(pickle.dumps(Planted(marker)))
    assert marker.exists(), "the plant works"
    marker.unlink()
    folder = latest(copied, "best")
    planted = np.array([Planted(marker)], dtype=object)
    with open(folder / name, "wb") as opened:
        if name.endswith(".npz"):
            np.savez(opened, **{"head.weight": planted})  # type: ignore[arg-type]
        else:
            np.save(opened, planted, allow_pickle=True)
    info = json.loads((folder / "checkpoint.json").read_text())
    info["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / "checkpoint.json").write_text(json.dumps(info))
    assert dlrm("evaluate", f"run={copied}", f"hydra.run.dir={tmp_path / 'eval'}") != 0
    assert not marker.exists()
    assert "pickle" in capfd.readouterr().err


# ------------------------------------------------------------------------------------------- kill

_KILLED = """
import os, signal, sys
from pathlib import Path
import torch
import dlrm.checkpoint
from data.parquet import PreparedDataset
from tests.commands import build_trainer

root, run_dir, place = sys.argv[1:]
trainer = build_trainer(
    PreparedDataset(Path(root)),
    Path(run_dir),
    {"train": {"backend": "torch", "checkpoint_every": 3}},
).trainer


def die(*_):
    if trainer.steps_done == 6:
        os.kill(os.getpid(), signal.SIGKILL)


if place == "before the rename":
    replace = dlrm.checkpoint.os.replace
    dlrm.checkpoint.os.replace = lambda source, target: (
        die() if Path(source).name.startswith(".partial") else None, replace(source, target)
    )
elif place == "before the pointer":
    write_whole = dlrm.checkpoint.write_whole
    dlrm.checkpoint.write_whole = lambda path, payload: (
        die() if path.name == "latest" else None, write_whole(path, payload)
    )
trainer.fit()
"""


@pytest.mark.parametrize(("place", "kept"), [("before the rename", 3), ("before the pointer", 3)])
def test_a_kill_while_saving_leaves_a_whole_model(
    place: str, kept: int, visits: PreparedDataset, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    process = start_python(
        "-c", _KILLED, visits.root, run_dir, place, cwd=tmp_path, PYTHONPATH=str(CHECKOUT)
    )
    status, _, err = finish(process)
    assert status == -signal.SIGKILL, err
    info = Checkpoints(run_dir).find("latest")
    assert info.step == kept
    # Loading checks every file's digest; the model is that of an undisturbed run.
    overrides = {"train": {"backend": "torch", "max_steps": kept}}
    whole = build_trainer(visits, tmp_path / "whole", overrides).trainer
    whole.fit()
    loaded = build_trainer(visits, tmp_path / "loaded", {"seed": 5}).trainer
    load_model(info, loaded.model, loaded.embeddings)
    for name, values in dense_values(whole).items():
        assert torch.equal(dense_values(loaded)[name], values), name
    # What the kill left behind is gone after the next save.
    Checkpoints(run_dir).save(
        7, loaded.model, loaded.embeddings, loaded.dense_optimizer, is_best=True
    )
    left = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert left == ["best", "latest", "step-000007"]
