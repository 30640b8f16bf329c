"""Checkpoints on disk: whole or absent, refused when damaged, plain data, and lean."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from data.errors import UserError
from dlrm import checkpoint, checkpoint_rows, tensor_file
from dlrm.checkpoint import (
    FORMAT_VERSION,
    CheckpointInfo,
    Checkpoints,
    Progress,
    find_checkpoint,
    open_checkpoint,
)
from dlrm.checkpoint_load import load_model, load_training
from dlrm.tensor_file import DamagedError
from embeddings import TableConfig
from embeddings.communicator import SingleProcess
from tests.checkpoint_cases import Part, make_part
from tests.programs import run_python
from tests.sharding_cases import TABLES, plan_of
from tests.thread_ranks import ThreadRank, run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")


def one_part(rule: str = "adam", seed: int = 7, **more: Any) -> Part:
    """A model in one process, filled; with `seed` 0 as it starts."""
    part = make_part(
        SingleProcess(), plan_of("lone", 1, tables=more.get("tables", TABLES)), rule, **more
    )
    if seed:
        part.fill(seed)
    return part


def save_steps(folder: Path, *steps: int, world_size: int = 2) -> dict[int, str]:
    """Checkpoints of several steps, by several ranks; the models' digests."""

    def work(comm: ThreadRank) -> dict[int, str]:
        part = make_part(comm, plan_of("mixed", world_size))
        digests = {}
        for step in steps:
            part.fill(step)
            part.save(Checkpoints(folder, keep=len(steps)), step)
            digests[step] = part.digest()
        return digests

    return run_ranks(world_size, work)[0]


def digest_of(info: CheckpointInfo) -> str:
    """What the whole checkpoint holds, read by one process."""
    part = one_part(seed=0)
    load_training(info, part.model, part.embeddings, part.optimizer)
    return part.digest()


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --------------------------------------------------------------------------------- save and load


@pytest.mark.parametrize("rule", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_what_is_loaded_equals_what_was_saved(rule: str, tmp_path: Path) -> None:
    saved, loaded = one_part(rule), one_part(rule, seed=8)
    saved.save(Checkpoints(tmp_path), 3)
    info = Checkpoints(tmp_path).find("latest")
    assert loaded.digest() != saved.digest()
    load_training(info, loaded.model, loaded.embeddings, loaded.optimizer)
    assert loaded.digest() == saved.digest()
    assert loaded.embeddings.store.num_steps == saved.embeddings.store.num_steps == 7
    for parameter, other in zip(saved.model.parameters(), loaded.model.parameters(), strict=True):
        state, found = saved.optimizer.state[parameter], loaded.optimizer.state[other]
        assert state.keys() == found.keys()
        assert all(torch.equal(state[name], found[name]) for name in state)


def test_dense_state_of_some_weights_only_is_refused(tmp_path: Path) -> None:
    """Else the others would begin anew without a word (Adam's bias correction too)."""
    part = one_part()
    contents = part.contents(1)
    kept = {k: v for k, v in contents.dense_state.items() if not k.startswith("0.weight/")}
    assert len(kept) < len(contents.dense_state)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(replace(contents, dense_state=kept), part.comm, is_best=False)
    with pytest.raises(DamagedError, match=r"no optimizer state .*0\.weight"):
        load_training(checkpoints.find("latest"), part.model, part.embeddings, part.optimizer)


def test_state_that_was_not_there_when_saved_is_not_there_when_loaded(tmp_path: Path) -> None:
    """Adam makes its state at the first step; one that has stepped forgets it."""
    one_part(seed=0).save(Checkpoints(tmp_path), 0)
    part = one_part()
    load_training(Checkpoints(tmp_path).find("latest"), part.model, part.embeddings, part.optimizer)
    assert not any(part.optimizer.state.values())
    assert part.embeddings.store.num_steps == 0


def test_what_is_known_of_the_run_comes_back(tmp_path: Path) -> None:
    part = one_part()
    progress = Progress(
        12,
        epoch=1,
        batch=5,
        samples=1234,
        loss_last=0.1 + 0.2,
        best_value=None,
        history=({"step": 4, "auc": 0.75}, {"step": 8, "auc": None}),
    )
    contents = part.contents(
        12, progress=progress, about={"seed": 3, "list": (1, 2)}, files={"config.yaml": "a: ü\n"}
    )
    Checkpoints(tmp_path).save(contents, part.comm, is_best=False)
    info = Checkpoints(tmp_path).find("latest")
    assert info.progress == progress
    assert (info.step, info.which) == (12, "latest")
    assert (info.values["seed"], info.values["list"]) == (3, [1, 2])
    assert info.text("config.yaml") == "a: ü\n"
    assert (info.folder / "config.yaml").read_text() == "a: ü\n"


@pytest.mark.parametrize(
    ("rule", "states"),
    [
        ("sgd", {}),
        ("rowwise_adagrad", {"sum": 1}),
        ("adagrad", {"sum": 8}),
        ("adam", {"exp_avg": 8, "exp_avg_sq": 8}),
    ],
)
def test_other_programs_read_the_files(rule: str, states: dict[str, int], tmp_path: Path) -> None:
    """The safetensors library, by names that say what is what."""
    part = one_part(rule)
    part.save(Checkpoints(tmp_path), 3)
    folder = tmp_path / "checkpoints" / "step-000003"
    rows = load_file(folder / "rows-00000.safetensors")
    whole = part.embeddings.store.read("user", 0, 37)
    assert whole.keys() == {"weight", *states}
    for name, values in whole.items():
        assert values.shape == (37, {"weight": 8, **states}[name])
        assert torch.equal(rows[f"user.{name}[0:37,0:8]"], values)
    dense = load_file(folder / "dense.safetensors")
    assert dense.keys() == part.model.state_dict().keys()
    for name, values in part.model.state_dict().items():
        assert torch.equal(dense[name], values), name
    dense_state = load_file(folder / "dense_state.safetensors")
    assert ("0.weight/step" in dense_state) == (rule != "sgd")


def test_tables_of_several_stretches_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows, of blocks with a digest, and of what is written at once; none fits another."""
    monkeypatch.setattr(checkpoint_rows, "PIECE_BYTES", 100)
    monkeypatch.setattr(tensor_file, "BLOCK_BYTES", 72)
    digests = save_steps(tmp_path, 1, world_size=3)
    info = Checkpoints(tmp_path).find("latest")
    assert len(list(info.tables["user"].blocks())) > 10
    assert digest_of(info) == digests[1]


def test_stretches_of_rows_are_read_in_any_order(tmp_path: Path) -> None:
    part = one_part()
    part.save(Checkpoints(tmp_path), 1)
    reader = Checkpoints(tmp_path).find("latest").rows()
    for table, start, stop in (
        ("user", 20, 37),
        ("user", 0, 37),
        ("user", 0, 5),
        ("flag", 0, 1),
        ("user", 4, 4),
        ("user", 5, 37),
    ):
        for state in (False, True):
            expected = part.embeddings.store.read(table, start, stop)
            found = reader.read(table, start, stop, state=state)
            assert found.keys() == (expected.keys() if state else {"weight"})
            assert all(torch.equal(found[name], expected[name]) for name in found)
    reader.close()


def test_saving_says_that_it_lives(tmp_path: Path) -> None:
    """Else a watchdog would take a long save for a rank that hangs."""
    part = one_part()
    beats: list[str] = []
    Checkpoints(tmp_path).save(
        part.contents(1), part.comm, is_best=False, beat=lambda: beats.append("save")
    )
    assert len(beats) >= 3 * len(TABLES), "for each tensor at least"
    info = Checkpoints(tmp_path).find("latest")
    arguments = info, part.model, part.embeddings
    load_model(*arguments, lambda: beats.append("load"))
    assert beats.count("load") >= len(TABLES)


# ------------------------------------------------------------------------------- which are there


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    part, root = one_part("sgd"), tmp_path / "checkpoints"
    checkpoints = Checkpoints(tmp_path, keep=2)
    kept = []
    for step in range(1, 7):
        part.save(checkpoints, step, is_best=step == 2)
        kept.append([int(name[5:]) for name in names_in(root) if name.startswith("step-")])
        assert checkpoints.find("latest").step == step
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5], [2, 5, 6]]
    best = checkpoints.find("best")
    assert (best.step, best.which) == (2, "best")
    assert [info.step for info in checkpoints.candidates("best")] == [2, 6, 5]
    assert [info.step for info in checkpoints.candidates("latest")] == [6, 5, 2]


def test_what_others_put_beside_the_checkpoints_stays(tmp_path: Path) -> None:
    """A copy under another name is neither removed nor taken for a checkpoint of the run."""
    part, root = one_part("sgd"), tmp_path / "checkpoints"
    part.save(Checkpoints(tmp_path, keep=1), 1)
    shutil.copytree(root / "step-000001", root / "step-000001-good")
    (root / "step-notes").mkdir()
    part.save(Checkpoints(tmp_path, keep=1), 2)
    assert names_in(root) == ["latest", "step-000001-good", "step-000002", "step-notes"]
    assert [info.step for info in Checkpoints(tmp_path).candidates("latest")] == [2]
    assert open_checkpoint(root / "step-000001-good").step == 1


def test_without_a_best_the_latest_is_found_and_named(tmp_path: Path) -> None:
    one_part("sgd").save(Checkpoints(tmp_path), 1)
    assert Checkpoints(tmp_path).find("best").which == "latest"
    with pytest.raises(UserError, match="holds no model"):
        Checkpoints(tmp_path / "nothing").find("best")


def test_a_step_that_is_there_is_only_named_again(tmp_path: Path) -> None:
    """Saved at a set interval and then, evaluated, found to be the best."""
    part = one_part("sgd")
    checkpoints = Checkpoints(tmp_path)
    part.save(checkpoints, 1)
    before = checkpoints.find("latest").folder.stat().st_ino
    part.save(checkpoints, 1, is_best=True)
    assert checkpoints.find("best").which == "best"
    assert checkpoints.find("best").folder.stat().st_ino == before


def test_a_step_that_is_there_but_damaged_is_written_anew(tmp_path: Path) -> None:
    """By a run that went on from an older one and has come to that step again."""
    digests = save_steps(tmp_path, 1, 2)
    (tmp_path / "checkpoints" / "step-000002" / "rows-00001.safetensors").unlink()
    assert save_steps(tmp_path, 2) == {2: digests[2]}
    assert digest_of(Checkpoints(tmp_path).find("latest")) == digests[2]


def test_going_on_from_an_older_one_drops_the_later(tmp_path: Path) -> None:
    part = one_part("sgd")
    checkpoints = Checkpoints(tmp_path, keep=9)
    for step in (1, 2, 3, 4):
        part.save(checkpoints, step, is_best=step in (1, 4))
    checkpoints.drop_after(checkpoints.candidates("latest")[2])
    assert [info.step for info in checkpoints.candidates("latest")] == [2, 1]
    assert checkpoints.find("best").which == "latest", "the best was a later one"


def test_a_checkpoint_is_named_by_a_word_or_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = one_part("sgd")
    for step in (1, 2):
        part.save(Checkpoints(tmp_path / "run"), step, is_best=step == 1)
    monkeypatch.chdir(tmp_path)
    for given, step in (
        ("latest", 2),
        ("best", 1),
        (str(tmp_path / "run"), 2),
        ("run", 2),
        ("run/checkpoints/step-000001", 1),
    ):
        assert find_checkpoint(given, tmp_path / "run", "train.resume").step == step
    for given in ("nowhere", "run/checkpoints"):
        with pytest.raises(UserError, match=rf"^train.resume={given}: .* neither a checkpoint"):
            find_checkpoint(given, tmp_path / "run", "train.resume")


# ---------------------------------------------------------------------------------------- digest


def test_the_digest_is_of_rows_states_and_dense_weights() -> None:
    """Each of them, changed in one place, changes it; so does nothing else."""
    part = one_part()
    model, store = part.model, part.embeddings.store
    digest = part.digest()
    assert part.digest() == digest
    for name in ("weight", "exp_avg", "exp_avg_sq"):
        values = store.read("word", 30, 31)[name]
        store.write("word", 30, {name: values + 1})
        assert part.digest() != digest, name
        store.write("word", 30, {name: values})
    for tensor in model.state_dict().values():  # Parameters and buffers.
        before = tensor.clone()
        tensor += 1
        assert part.digest() != digest
        tensor.copy_(before)
    assert part.digest() == digest


# --------------------------------------------------------------------------------------- refused


def test_other_tables_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    one_part().save(Checkpoints(tmp_path), 1)
    info = Checkpoints(tmp_path).find("latest")
    tables = (TableConfig("user", 37, 16), TableConfig("shop", 6, 4), TableConfig("new", 3, 4))
    other = one_part(tables=tables, seed=9)
    before = other.digest()
    arguments = info, other.model, other.embeddings
    with pytest.raises(UserError, match=r"tables of .*step-000001 differ") as caught:
        load_model(*arguments)
    lines = str(caught.value).splitlines()[1:]
    assert "  user: stored 37 rows of 8, float32, wanted 37 rows of 16, float32" in lines
    assert "  shop: stored 5 rows of 4, float32, wanted 6 rows of 4, float32" in lines
    assert "  new: stored not at all, wanted 3 rows of 4, float32" in lines
    assert "  item: stored 50 rows of 7, float32, wanted not at all" in lines
    with pytest.raises(UserError, match=r"user: .*exp_avg \(8\)"):
        load_training(*arguments, other.optimizer)
    assert other.digest() == before, "a partial load"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"rule": "adagrad"}, r"user: .*float32, state exp_avg .*, wanted .* state sum \(8\)"),
        ({"rule": "sgd"}, r"state exp_avg \(8\), exp_avg_sq \(8\), wanted .*state none"),
        ({"dtype": torch.float64}, r"float32, .*wanted .* float64"),
        ({"width": 5}, r"0.weight: stored \(4, 3\) float32, wanted \(5, 3\) float32"),
    ],
)
def test_another_optimizer_type_or_network_is_refused(
    more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    one_part().save(Checkpoints(tmp_path), 1)
    other = one_part(**more, seed=9)
    before = other.digest()
    info = Checkpoints(tmp_path).find("latest")
    with pytest.raises(UserError, match=message):
        load_training(info, other.model, other.embeddings, other.optimizer)
    if "rule" not in more:  # Which doesn't matter to the weights alone.
        with pytest.raises(UserError, match="float32, wanted"):
            load_model(info, other.model, other.embeddings)
    assert other.digest() == before, "a partial load"


# ----------------------------------------------------------------------------------------- damage


def flip(path: Path, position: int | None = None) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if position is None else position] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


FILES = (
    "rows-00000.safetensors",
    "rows-00001.safetensors",
    "rows-00001.json",
    "dense.safetensors",
    "dense_state.safetensors",
)


@pytest.mark.parametrize("damage", [cut, empty, Path.unlink])
@pytest.mark.parametrize("name", [*FILES, "checkpoint.json"])
def test_one_that_is_not_whole_is_named_and_an_older_one_found(
    name: str, damage: Callable[[Path], None], tmp_path: Path
) -> None:
    digests = save_steps(tmp_path, 1, 2)
    path = tmp_path / "checkpoints" / "step-000002" / name
    damage(path)
    with pytest.warns(UserWarning, match=f"{path} .*another checkpoint is looked for") as caught:
        info = Checkpoints(tmp_path).find("latest")
    assert len(caught) == 1
    assert info.step == 1
    assert digest_of(info) == digests[1]
    with pytest.raises(DamagedError, match=str(path)):
        open_checkpoint(path.parent)


def test_a_damaged_best_is_named_and_the_latest_found(tmp_path: Path) -> None:
    part = one_part("sgd")
    for step in (1, 2):
        part.save(Checkpoints(tmp_path), step, is_best=step == 1)
    (tmp_path / "checkpoints" / "step-000001" / "dense.safetensors").unlink()
    with pytest.warns(UserWarning, match="step-000001"):
        info = Checkpoints(tmp_path).find("best")
    assert (info.step, info.which) == (2, "latest")
    # Of what wasn't asked for, nothing is said.
    assert Checkpoints(tmp_path).find("latest").step == 2


def test_where_all_are_damaged_all_are_named(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    for step in (1, 2):
        cut(tmp_path / "checkpoints" / f"step-00000{step}" / "rows-00001.json")
    with (
        pytest.warns(UserWarning, match="rows-00001.json has") as caught,
        pytest.raises(UserError, match="no whole checkpoint: step-000001, step-000002"),
    ):
        Checkpoints(tmp_path).find("latest")
    assert len(caught) == 2


@pytest.mark.parametrize("content", [b"", b"step-\xff\xfe", b"step-0\0", b"step-000009", b"latest"])
def test_a_name_that_points_to_nothing_is_passed_over(content: bytes, tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    (tmp_path / "checkpoints" / "latest").write_bytes(content)
    with pytest.warns(UserWarning, match=r"(checkpoint.json|latest) is damaged"):
        info = Checkpoints(tmp_path).find("latest")
    assert info.step == 2
    save_steps(tmp_path, 3)
    assert Checkpoints(tmp_path).find("latest").step == 3


def test_every_flipped_byte_of_the_description_is_found(tmp_path: Path) -> None:
    """As damage, for which an older one is taken: `format 3` instead of 2 is no other format."""
    part = one_part("sgd", tables=TABLES[:1])
    part.save(Checkpoints(tmp_path), 1)
    path = tmp_path / "checkpoints" / "step-000001" / "checkpoint.json"
    content, values = path.read_bytes(), json.loads(path.read_bytes())
    num_found = 0
    for position in range(len(content)):
        flip(path, position)
        try:
            open_checkpoint(path.parent)
        except DamagedError as error:
            num_found += str(path) in str(error)
        else:  # Another space between the values.
            assert json.loads(path.read_bytes()) == values, position
        path.write_bytes(content)
    assert num_found > 0.5 * len(content)


@pytest.mark.parametrize("name", FILES)
def test_flipped_bytes_are_found_by_all_ranks_alike(name: str, tmp_path: Path) -> None:
    """When they are read: sizes are as they were. Nobody waits for a rank that has raised."""
    with patch.object(tensor_file, "BLOCK_BYTES", 64):
        digests = save_steps(tmp_path, 1, 2)
        path = tmp_path / "checkpoints" / "step-000002" / name
        # The last tensor's last number, which not every rank reads.
        flip(path, -1 if "rows" in name and name.endswith("safetensors") else None)
        info, older = Checkpoints(tmp_path).candidates("latest")

        def work(comm: ThreadRank) -> str:
            part = make_part(comm, plan_of("table_wise", 3))
            with pytest.raises(DamagedError) as caught:
                load_training(info, part.model, part.embeddings, part.optimizer)
            load_training(older, part.model, part.embeddings, part.optimizer)
            assert part.digest() == digests[1], "what was loaded of the damaged one is gone"
            return str(caught.value)

        messages = run_ranks(3, work)
    assert len(set(messages)) == 1
    assert str(path) in messages[0]


def test_a_further_file_that_is_damaged_is_named(tmp_path: Path) -> None:
    part = one_part("sgd")
    Checkpoints(tmp_path).save(
        part.contents(1, files={"plan.json": "{...}"}), part.comm, is_best=False
    )
    info = Checkpoints(tmp_path).find("latest")
    flip(info.folder / "plan.json")
    with pytest.raises(DamagedError, match=r"plan.json is damaged"):
        info.text("plan.json")


def test_a_checkpoint_that_lacks_rows_is_refused(tmp_path: Path) -> None:
    """Whatever the digests say: no row is made up."""
    save_steps(tmp_path, 1)
    info = Checkpoints(tmp_path).find("latest")
    files = {name: entry for name, entry in info.values["files"].items() if "00001" not in name}
    reader = checkpoint_rows.RowsReader(info.folder, files, info.tables)
    with pytest.raises(DamagedError, match="values of weight for rows 0:37 of table user, not 296"):
        reader.read("user", 0, 37)
    reader.close()


@pytest.mark.parametrize("version", [1, FORMAT_VERSION + 1])
def test_another_format_is_not_taken_for_damage(version: int, tmp_path: Path) -> None:
    one_part("sgd").save(Checkpoints(tmp_path), 1)
    path = tmp_path / "checkpoints" / "step-000001" / "checkpoint.json"
    values = json.loads(path.read_text())["checkpoint"] | {"format_version": version}
    digest = xxhash.xxh3_64_hexdigest(json.dumps(values, sort_keys=True).encode())
    # The first format had no digest of its own.
    content = values if version == 1 else {"xxh3": digest, "checkpoint": values}
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=rf"step-000001 is of format {version}, not 2") as caught:
        Checkpoints(tmp_path).find("latest")
    assert not isinstance(caught.value, DamagedError)


class Planted:
    """What a hostile file would hold: unpickling it runs code."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (Path.touch, (self.marker,))


@pytest.mark.parametrize("form", [pickle.dumps, "torch", b"[" * 100_000])
@pytest.mark.parametrize("name", [*FILES, "checkpoint.json"])
def test_nothing_in_a_checkpoint_is_run(name: str, form: Any, tmp_path: Path) -> None:
    """Even where sizes and digests were made to fit."""
    marker = tmp_path / "code-was-run"
    pickle.loads(pickle.dumps(Planted(marker)))
    assert marker.exists(), "the plant works"
    marker.unlink()

    def work(comm: ThreadRank) -> None:
        part = make_part(comm, plan_of("mixed", 2))
        part.save(Checkpoints(tmp_path), 1)

    run_ranks(2, work)
    folder = tmp_path / "checkpoints" / "step-000001"
    path = folder / name
    if form == "torch":
        torch.save({"0.weight": Planted(marker)}, path)
    else:
        path.write_bytes(form if isinstance(form, bytes) else form(Planted(marker)))
    if name != "checkpoint.json":
        make_fit(folder, path)

    part = one_part(seed=0)

    def read() -> None:
        load_training(open_checkpoint(folder), part.model, part.embeddings, part.optimizer)

    with pytest.raises(DamagedError, match=str(path)):
        read()
    assert not marker.exists()


def make_fit(folder: Path, path: Path) -> None:
    """Writes sizes and digests into the descriptions, as whoever changed a file could."""
    described = folder / "checkpoint.json"
    values = json.loads(described.read_text())["checkpoint"]
    content = path.read_bytes()
    digest = xxhash.xxh3_64_hexdigest(content)
    entry = values["files"][path.name]
    entry["bytes"] = len(content)
    if "xxh3" in entry:
        entry["xxh3"] = digest
    elif "blocks" in entry:
        entry["blocks"] = [digest]
    else:
        index = path.with_suffix(".json")
        changed = json.loads(index.read_text()) | {"bytes": len(content), "blocks": [digest]}
        index.write_text(json.dumps(changed))
        values["files"][index.name] = {
            "bytes": index.stat().st_size,
            "xxh3": xxhash.xxh3_64_hexdigest(index.read_bytes()),
        }
    whole = xxhash.xxh3_64_hexdigest(json.dumps(values, sort_keys=True).encode())
    described.write_text(json.dumps({"xxh3": whole, "checkpoint": values}))


# -------------------------------------------------------------------------------------- full disk


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """From the call on, the named file or folder can't be written."""
    full: list[str] = []
    allocate, write_whole, mkdir = tensor_file.allocate, checkpoint.write_whole, Path.mkdir

    def check(name: str) -> None:
        if name in full:
            raise OSError(errno.ENOSPC, "No space left on device")

    def allocate_or_not(descriptor: int, size: int) -> None:
        check(Path(f"/proc/self/fd/{descriptor}").resolve().name)
        allocate(descriptor, size)

    def write_whole_or_not(path: Path, payload: Any) -> None:
        check(path.name)
        write_whole(path, payload)

    def mkdir_or_not(path: Path, *arguments: Any, **more: Any) -> None:
        if path.name in full:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        mkdir(path, *arguments, **more)

    monkeypatch.setattr(tensor_file, "allocate", allocate_or_not)
    monkeypatch.setattr(checkpoint, "write_whole", write_whole_or_not)
    monkeypatch.setattr(checkpoint_rows, "write_whole", write_whole_or_not)
    monkeypatch.setattr(Path, "mkdir", mkdir_or_not)
    return full.append


@pytest.mark.parametrize("name", [".partial-step-000002", *FILES, "checkpoint.json", "latest"])
def test_a_full_disk_is_told_by_all_ranks_and_earlier_checkpoints_stay(
    name: str, full_disk: Callable[[str], None], tmp_path: Path
) -> None:
    def work(comm: ThreadRank) -> tuple[str, str]:
        part = make_part(comm, plan_of("mixed", 2))
        part.fill(1)
        part.save(Checkpoints(tmp_path), 1)
        digest = part.digest()  # And all have saved.
        full_disk(name)
        comm.barrier()
        part.fill(2)
        with pytest.raises(OSError, match="No space left") as caught:
            part.save(Checkpoints(tmp_path), 2)
        return digest, str(caught.value.filename)

    digest, where = (set(values) for values in zip(*run_ranks(2, work), strict=True))
    assert len(where) == 1
    assert where.pop().endswith(f"/{name}")
    info = Checkpoints(tmp_path).find("latest")
    assert info.step == 1
    assert {digest_of(info)} == digest
    # Of one that only couldn't be named, nothing is lost.
    whole = ["step-000002"] if name == "latest" else []
    assert names_in(tmp_path / "checkpoints") == ["latest", "step-000001", *whole]


# ------------------------------------------------------------------------------------------ flush


def test_everything_is_flushed_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut forgets what isn't: files and their folder before the name, then the name."""
    flushed: set[int] = set()
    fsync, replace = os.fsync, os.replace
    root = tmp_path / "checkpoints"

    def note(descriptor: int) -> None:
        fsync(descriptor)
        flushed.add(os.fstat(descriptor).st_ino)

    def check(source: Path, target: Path) -> None:
        if target.name == "step-000001":
            inside = [source, *source.iterdir()]
            assert len(inside) == 9
            assert all(path.stat().st_ino in flushed for path in inside)
        elif target.name == "latest":
            assert {source.stat().st_ino, root.stat().st_ino} <= flushed
        elif target.name == "best":
            assert source.stat().st_ino in flushed
        if target.parent == root:
            flushed.discard(root.stat().st_ino)
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "replace", check)

    def work(comm: ThreadRank) -> None:
        part = make_part(comm, plan_of("mixed", 2))
        contents = part.contents(1, files={"config.yaml": "seed: 3"})
        Checkpoints(tmp_path).save(contents, comm, is_best=True)

    run_ranks(2, work)
    assert root.stat().st_ino in flushed, "the names"


# ------------------------------------------------------------------------------------------- kill

_KILLED = """
import json, os, shutil, signal, sys, threading, warnings
from pathlib import Path
import torch
from dlrm import checkpoint, tensor_file
from dlrm.checkpoint import Checkpoints
from dlrm.checkpoint_load import load_training
from embeddings.communicator import SingleProcess
from tests.checkpoint_cases import make_part
from tests.sharding_cases import TABLES, plan_of
from tests.thread_ranks import run_ranks

torch.set_num_threads(1)
warnings.simplefilter("error")
root = Path(sys.argv[1])
tables = TABLES[:3]
made = {}

def save(run, step):
    def work(comm):
        part = make_part(comm, plan_of("mixed", 2, tables=tables), "rowwise_adagrad", tables=tables)
        part.fill(step)
        part.save(Checkpoints(run, keep=2), step, is_best=step == 3)
        return part.digest()
    return run_ranks(2, work)[0]

for step in (1, 2):
    made[step] = save(root / "start", step)
made[3] = save(root / "whole", 3)

class Countdown:
    '''Kills the process at the n-th thing that it does to the disk.'''
    def __init__(self, left):
        self.left, self.lock = left, threading.Lock()

    def __call__(self):
        with self.lock:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

def before(function, countdown):
    def counted(*arguments, **more):
        countdown()
        return function(*arguments, **more)
    return counted

def die_at(number):
    countdown = Countdown(number)
    for name in ("fsync", "replace", "mkdir", "unlink", "rmdir"):
        setattr(os, name, before(getattr(os, name), countdown))
    tensor_file.allocate = before(tensor_file.allocate, countdown)
    writer = tensor_file.TensorFileWriter
    writer._put = before(writer._put, countdown)
    def audit(event, arguments):
        if event == "open" and arguments[1] in ("w", "wb", "r+b"):
            countdown()

    sys.addaudithook(audit)

outcomes = []
number = 0
while True:
    number += 1
    run = root / f"kill-{number}"
    shutil.copytree(root / "start", run)
    child = os.fork()
    if child == 0:
        die_at(number)
        save(run, 3)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status)
    assert killed or os.WEXITSTATUS(status) == 0, status
    info = Checkpoints(run).find("latest")
    part = make_part(SingleProcess(), plan_of("lone", 1, tables=tables), "rowwise_adagrad",
                     tables=tables)
    load_training(info, part.model, part.embeddings, part.optimizer)
    is_whole = part.digest() == made[info.step]
    best = Checkpoints(run).find("best")
    outcomes.append([killed, info.step, is_whole, best.which, best.step])
    save(run, 4)
    left = sorted(path.name for path in (run / "checkpoints").iterdir())
    outcomes[-1].append(left)
    shutil.rmtree(run)
    if not killed:
        break
print(json.dumps(outcomes))
"""


def test_a_kill_at_any_moment_of_a_save_leaves_a_whole_model(tmp_path: Path) -> None:
    """At every write, flush and rename in turn, of two ranks; two checkpoints were there before."""
    outcomes = run_python(_KILLED, tmp_path)
    *killed, (was_killed, *last) = outcomes
    assert len(killed) > 40
    assert not was_killed, "the last one lived"
    assert last[:4] == [3, True, "best", 3]
    for number, (_, step, is_whole, which, best_step, left) in enumerate(killed):
        assert step in (2, 3), number
        assert is_whole, number
        assert (which, best_step) in (("latest", step), ("best", 3)), number
        # The next save works, and clears away what the kill left behind.
        steps = [name for name in left if name not in ("latest", "best")]
        assert steps in (["step-000002", "step-000004"], ["step-000003", "step-000004"]), left
    found = [step for _, step, *_ in killed]
    assert found == sorted(found), "the new one counts from one moment on"
    assert set(found) == {2, 3}


# ----------------------------------------------------------------------------------------- memory

_MEMORY = """
import json, os, sys
from pathlib import Path
import torch
from dlrm.checkpoint import Checkpoints
from dlrm.checkpoint_load import load_training
from embeddings import TableConfig
from embeddings.communicator import SingleProcess
from tests.checkpoint_cases import make_part
from tests.sharding_cases import plan_of

run = Path(sys.argv[1])

def status_bytes(field):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

def make(rows):
    tables = (TableConfig("user", rows, 64),)
    plan = plan_of("lone", 1, tables=tables)
    part = make_part(SingleProcess(), plan, "rowwise_adagrad", tables=tables)
    for values in part.embeddings.store.state(0).values():
        values.zero_()  # Takes its memory now.
    return part

def save(part, folder):
    part.save(Checkpoints(folder), 1)

def load(part, folder):
    info = Checkpoints(folder).find("latest")
    load_training(info, part.model, part.embeddings, part.optimizer)

def extra_bytes(act):
    # What a first call loads, with next to no data.
    for warm_up in (save, load):
        warm_up(few, run / f"few-{act.__name__}")
    before = status_bytes("VmRSS")
    act(many, run / "many")
    return status_bytes("VmHWM") - before

torch.set_num_threads(1)
few, many = make(3), make(800_000)
found = {"table_bytes": many.embeddings.store.table_bytes()}
for name, act in (("save", save), ("load", load)):
    # A fork's peak begins anew, at what it holds.
    readable, writable = os.pipe()
    if os.fork() == 0:
        with open(writable, "w") as out:
            json.dump(extra_bytes(act), out)
        os._exit(0)
    os.close(writable)
    with open(readable) as result:
        found[name] = json.load(result)
    os.wait()
print(json.dumps(found))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc/self")
def test_saving_and_loading_need_little_beside_the_tables(tmp_path: Path) -> None:
    """800,000 rows of 64 (205 MB) with their state."""
    measured = run_python(_MEMORY, tmp_path)
    assert measured["table_bytes"] == 204_800_000
    for act in ("save", "load"):
        assert measured[act] <= 0.1 * measured["table_bytes"], measured
