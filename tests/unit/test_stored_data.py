"""The prepared folder as the verbs see it: which data it is (F38), notes on the data (F44), what is
needed to score (F28, C17), and a disk that fills (F30, C18)."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from data.arrays import save_arrays
from data.counting import KeyCounter
from data.manifest import load_manifest
from tests.commands import TINY_DATA, TINY_MODEL, dlrm, read_result, without_plots, write_adult_csv
from tests.failing_files import fail_at, no_space

Digests = Callable[[Path], dict[str, str]]
QUICK = (*TINY_MODEL, "train.max_steps=2")


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    without_plots(monkeypatch)


@pytest.fixture
def adult_root(tmp_path: Path) -> Path:
    """A dataset that was prepared from raw files."""
    for seed, part in enumerate(("train", "test")):
        write_adult_csv(tmp_path / f"{part}.csv", 300, seed=seed)
    files = ["data.raw_train=train.csv", "data.raw_test=test.csv"]
    assert dlrm("prepare", "data=adult", *files, "data.root=prepared") == 0
    return tmp_path / "prepared"


@pytest.mark.parametrize("verb", ["train", "prepare"])
def test_f38_a_misspelt_root_is_refused(
    verb: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It was filled with synthetic data, which then was trained on."""
    assert dlrm(verb, "data.root=typo", "hydra.run.dir=run") == 2
    err = capfd.readouterr().err
    assert "data.root=typo: no prepared dataset there" in err
    assert "data=synthetic" in err
    assert not (tmp_path / "typo").exists()


def test_f38_a_prepared_folder_says_which_data_it_is(
    adult_root: Path, tmp_path: Path, tree_digests: Digests, capfd: pytest.CaptureFixture[str]
) -> None:
    """It was refused, with the advice to overwrite it with synthetic rows."""
    before = tree_digests(adult_root)
    assert dlrm("train", "data.root=prepared", *QUICK, "hydra.run.dir=run") == 0
    data = read_result(tmp_path / "run")["data"]
    assert (data["name"], data["synthetic"]) == ("adult", False)
    stored = OmegaConf.load(tmp_path / "run" / "config.yaml")
    assert stored.data.name == "adult"
    assert stored.data.synthetic is None
    assert stored.data.schema.dense.age.transform == "standardise"
    # Named as well it is the same data; what the run recorded can be gone on with.
    assert dlrm("train", "data=adult", "data.root=prepared", *QUICK, "hydra.run.dir=named") == 0
    assert read_result(tmp_path / "named")["data"]["digest"] == data["digest"]
    assert dlrm("evaluate", "run=run", "hydra.run.dir=e") == 0
    assert tree_digests(adult_root) == before
    capfd.readouterr()
    overridden = "data.schema.split.kind=random"
    assert dlrm("train", "data.root=prepared", overridden, "hydra.run.dir=other") == 2
    assert overridden in capfd.readouterr().err


def test_f38_a_generated_folder_says_its_settings(tmp_path: Path) -> None:
    assert dlrm("prepare", "data=synthetic", *TINY_DATA, "data.root=made") == 0
    assert dlrm("train", "data.root=made", *QUICK, "hydra.run.dir=run") == 0
    assert read_result(tmp_path / "run")["data"]["synthetic"] is True
    stored = OmegaConf.load(tmp_path / "run" / "config.yaml")
    assert stored.data.synthetic.num_train == 4096


@pytest.mark.parametrize(
    ("verb", "more"),
    [
        pytest.param("check", ["check.steps=1"], marks=pytest.mark.slow),
        ("train", ["experiment=sweep_sharding", "hydra.mode=RUN", "launch.nproc=1"]),
    ],
)
def test_f38_a_generated_folder_is_used_by_other_verbs_and_experiments(
    verb: str, more: list[str], tmp_path: Path, tree_digests: Digests
) -> None:
    """It was refused for its settings, with the advice to overwrite it; an experiment that says
    what to generate gives way to the folder that is named."""
    assert dlrm("prepare", "data=synthetic", *TINY_DATA, "data.root=made") == 0
    before = tree_digests(tmp_path / "made")
    assert dlrm(verb, "data.root=made", *QUICK, *more, "hydra.run.dir=run") == 0
    assert read_result(tmp_path / "run")["data"]["digest"] == load_manifest(Path("made")).digest()
    assert OmegaConf.load("run/config.yaml").data.synthetic.num_train == 4096
    assert tree_digests(tmp_path / "made") == before


def test_f38_other_settings_of_generated_rows_are_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Which ones differ, and how the folder is used as it is; overwriting is the last advice."""
    assert dlrm("prepare", "data=synthetic", *TINY_DATA, "data.root=made") == 0
    more = ["data=synthetic", *TINY_DATA[1:], "data.synthetic.num_train=640"]
    assert dlrm("check", *more, "data.root=made", *QUICK, "hydra.run.dir=run") == 2
    err = capfd.readouterr().err
    assert "(num_train=4096, not 640); leave out data= and data.synthetic. to use it" in err


@pytest.mark.parametrize("more", [[], ["data.overwrite=true"]])
def test_f38_nothing_prepared_is_overwritten_by_synthetic_data(
    more: list[str],
    adult_root: Path,
    tree_digests: Digests,
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = tree_digests(adult_root)
    named = ["data=synthetic", *TINY_DATA, "data.root=prepared"]
    assert dlrm("train", *named, *more, "hydra.run.dir=run") == 2
    err = capfd.readouterr().err
    assert "choose another data.root" in err
    assert "data.overwrite=true\n" not in err
    after = {n: d for n, d in tree_digests(adult_root).items() if ".work" not in n}
    assert after == before
    assert json.loads((adult_root / "manifest.json").read_text(encoding="utf-8"))["inputs"]


# ---- F44


def test_f44_missing_dense_values_are_counted_and_told(
    adult_root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Per column and part, by `prepare` and by a training that prepares; dropped ids too."""
    lines = Path("train.csv").read_text(encoding="utf-8").splitlines()
    names = lines[0].split(",")
    age = [name.strip() for name in names].index("age")
    for number in range(1, 31):
        fields = lines[number].split(",")
        fields[age] = "?"
        lines[number] = ",".join(fields)
    Path("holes.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    ages = [line.split(",")[age].strip() for line in lines[1:]]
    num_missing = sum(value in ("", "?") for value in ages)
    told = f"note    train: missing values, most in age {num_missing / 300:.1%}"
    files = ["data=adult", "data.raw_train=holes.csv", "data.raw_test=test.csv"]
    capfd.readouterr()
    assert dlrm("train", *files, "data.root=holes", *QUICK, "hydra.run.dir=run") == 0
    out = capfd.readouterr().out
    assert told in out
    assert "note    train: ids without a row of their own, most in" in out
    assert dlrm("prepare", *files, "data.root=holes") == 0
    assert told in capfd.readouterr().out
    parts = json.loads(Path("holes/manifest.json").read_text(encoding="utf-8"))["parts"]
    assert parts["train"]["missing_dense"]["age"] == num_missing
    assert parts["test"]["missing_dense"]["age"] < num_missing


def test_f44_a_dataset_from_before_keeps_its_digest(adult_root: Path) -> None:
    """Runs know their dataset by it."""
    values = json.loads((adult_root / "manifest.json").read_text(encoding="utf-8"))
    for part in values["parts"].values():
        del part["missing_dense"]
    text = json.dumps(values, indent=1) + "\n"
    (adult_root / "manifest.json").write_text(text, encoding="utf-8")
    manifest = load_manifest(adult_root)
    assert manifest.digest() == hashlib.sha256(text.encode()).hexdigest()
    assert manifest.parts["train"].missing_dense_share() == {}


# ---- F28, C17


def test_f28_c17_prediction_needs_model_manifest_and_vocabulary_only(
    adult_root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """On another machine, without the rows that the model was trained on."""
    assert dlrm("train", "data.root=prepared", *QUICK, "hydra.run.dir=run") == 0
    write_adult_csv(tmp_path / "new.csv", 50, seed=7, labelled=False)
    assert dlrm("predict", "run=run", "data.raw=new.csv", "out=before.parquet") == 0
    server = tmp_path / "server"
    shutil.copytree(adult_root / "vocabulary", server / "vocabulary")
    shutil.copy(adult_root / "manifest.json", server)
    shutil.rmtree(adult_root)
    more = ["data.raw=new.csv", "data.root=server"]
    assert dlrm("predict", "run=run", *more, "out=after.parquet") == 0
    assert pq.read_table("after.parquet").equals(pq.read_table("before.parquet"))
    # A part is asked for where it is read.
    capfd.readouterr()
    assert dlrm("predict", "run=run", "data.root=server", "out=part.parquet") == 2
    assert "test/part-00000.parquet is missing" in capfd.readouterr().err
    assert dlrm("train", "data.root=server", *QUICK, "hydra.run.dir=again") == 2


@pytest.mark.parametrize("header", [True, False])
def test_f28_a_labelled_file_without_the_weights_of_training_is_predicted(
    header: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where the columns are known by name; an evaluation weights its samples, and so asks."""
    rows = [(n % 2, n, f"t{n % 5}", 1 + n % 3) for n in range(200)]
    names = ["y", "x", "c", "w"]
    write_rows(Path("weighted.csv"), names if header else None, rows)
    shorter = [row[:3] for row in rows] if header else rows
    write_rows(Path("plain.csv"), names[:3] if header else None, shorter)
    columns = "[]" if header else "[y,x,c,w]"
    schema = [
        f"data.schema.format={{kind: csv, delimiter: ',', header: {header}, columns: {columns}}}",
        "data.schema.label.column=y",
        "data.schema.example_weight=w",
        "++data.schema.dense={x: {transform: log1p}}",
        "++data.schema.sparse={c: {}}",
        "data.schema.sparse_default={token: text, vocabulary: dictionary}",
        "data.schema.name=weighted",
    ]
    base = ["data=base", "data.name=weighted", "data.raw=weighted.csv", "data.root=d"]
    assert dlrm("train", *base, *schema, *QUICK, "hydra.run.dir=run") == 0
    assert dlrm("predict", "run=run", "data.raw=plain.csv", "out=p.parquet") == 0
    table = pq.read_table("p.parquet")
    assert table["label"].to_pylist() == [row[0] for row in rows]
    if header:
        capfd.readouterr()
        assert dlrm("evaluate", "run=run", "data.raw=plain.csv", "hydra.run.dir=e") == 2
        assert "no column w" in capfd.readouterr().err


def write_rows(path: Path, names: list[str] | None, rows: Sequence[Sequence[object]]) -> None:
    lines = [",".join(str(value) for value in row) for row in rows]
    path.write_text(
        "\n".join([*([",".join(names)] if names else []), *lines, ""]), encoding="utf-8"
    )


# ---- F30, C18


@pytest.mark.parametrize("operation", ["write", "fsync", "rename", "mkdir"])
def test_f30_c18_a_full_disk_is_one_line_in_prepare(
    operation: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the file, the reason and the key; exit status 1; then it goes on where it was."""
    for seed, part in enumerate(("train", "test")):
        write_adult_csv(tmp_path / f"{part}.csv", 300, seed=seed)
    files = ["data=adult", "data.raw_train=train.csv", "data.raw_test=test.csv", "data.root=full"]
    capfd.readouterr()
    with fail_at(3, within=tmp_path / "full", operations=[operation], stays=True) as calls:
        assert dlrm("prepare", *files) == 1
    assert calls.failed
    (line,) = [text for text in capfd.readouterr().err.splitlines() if text.startswith("dlrm:")]
    assert str(tmp_path / "full") in line
    assert "No space left on device" in line
    assert "data.root=" in line
    assert not (tmp_path / "full" / "manifest.json").exists()
    assert dlrm("prepare", *files) == 0


def test_f30_c18_a_full_disk_in_arrow_s_own_writes_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They happen in C++, and their error names no file."""

    def full(*_: object) -> None:
        raise no_space()

    monkeypatch.setattr("pyarrow.ipc.new_file", full)
    with pytest.raises(OSError, match="No space left") as error:
        save_arrays(tmp_path / "block.arrow", {"a": np.zeros(10)})
    assert error.value.filename == str(tmp_path / "block.arrow")
    counter = KeyCounter(tmp_path, 1)
    ones = np.ones(10, dtype=np.int64)
    with (
        fail_at(0, within=tmp_path, operations=["write"]),
        pytest.raises(OSError, match="No space left") as error,
    ):
        counter.add(np.arange(10, dtype=np.uint64), ones)
    assert "run-000000" in str(error.value.filename)


@pytest.mark.parametrize("operation", ["open", "rename"])
def test_f30_c18_a_full_disk_is_one_line_in_predict(
    operation: str, adult_root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert dlrm("train", "data.root=prepared", *QUICK, "hydra.run.dir=run") == 0
    out = tmp_path / "there"
    out.mkdir()
    capfd.readouterr()
    with fail_at(0, within=out, operations=[operation]) as calls:
        assert dlrm("predict", "run=run", "out=there/p.parquet") == 1
    assert calls.failed
    (line,) = [text for text in capfd.readouterr().err.splitlines() if text.startswith("dlrm:")]
    assert str(out) in line
    assert "p.parquet" in line
    assert "No space left on device" in line
    assert "out=" in line
    assert not list(out.iterdir())


# ---- F34: planted links and others' files


@pytest.mark.parametrize("verb", ["predict", "prepare"])
def test_f34_a_partial_file_follows_no_link_and_replaces_nobody_s(
    verb: str, adult_root: Path, tmp_path: Path
) -> None:
    """Beside the file that is named: a link to somebody's file, and files that end alike."""
    out = tmp_path / "there"
    out.mkdir()
    (tmp_path / "precious").write_text("mine")
    (out / "p.out.partial").write_text("mine too")
    (out / f".p.out.{os.getpid()}.partial").symlink_to(tmp_path / "precious")
    if verb == "predict":
        assert dlrm("train", "data.root=prepared", *QUICK, "hydra.run.dir=run") == 0
        assert dlrm("predict", "run=run", "out=there/p.out") == 0
    else:
        rows = ["data.synthetic.num_train=30", "data.synthetic.num_valid=0"]
        rows += ["data.synthetic.num_test=0", "data.synthetic.raw_out=there/p.out"]
        assert dlrm("prepare", "data=synthetic", *rows) == 0
    assert (tmp_path / "precious").read_text() == "mine"
    assert (out / "p.out.partial").read_text() == "mine too"
    assert {path.name for path in out.iterdir()} == {"p.out", "p.out.partial"}
    assert not (out / "p.out").is_symlink()


def test_f30_c18_a_full_disk_while_raw_rows_are_written_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = ["data.synthetic.num_train=30", "data.synthetic.num_valid=0"]
    rows += ["data.synthetic.num_test=0", "data.synthetic.raw_out=out.tsv"]
    with fail_at(0, within=tmp_path, operations=["write"], stays=True) as calls:
        assert dlrm("prepare", "data=synthetic", *rows) == 1
    assert calls.failed
    (line,) = [text for text in capfd.readouterr().err.splitlines() if text.startswith("dlrm:")]
    assert "out.tsv" in line
    assert "No space left on device" in line
    assert not list(tmp_path.glob("*.tsv*"))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_f30_c18_what_is_wrong_with_the_disk_ends_with_1(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whether or not the error names a file; a file that isn't there is the user's: 2."""
    monkeypatch.chdir(tmp_path)
    for names in ((), ("some/file",)):
        error = OSError(number, os.strerror(number), *names)
        monkeypatch.setattr("dlrm.prepare.run_prepare", lambda *_, error=error: raise_it(error))
        assert dlrm("prepare", "data=synthetic", "data.root=d") == 1
        err = capfd.readouterr().err
        assert "Traceback" not in err
        assert os.strerror(number) in err
    missing = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "some/file")
    monkeypatch.setattr("dlrm.prepare.run_prepare", lambda *_: raise_it(missing))
    assert dlrm("prepare", "data=synthetic", "data.root=d") == 2


def raise_it(error: OSError) -> None:
    raise error
