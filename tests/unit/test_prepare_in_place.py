"""What `prepare` may touch in `data.root`, and what is whole whatever interrupts it (F50, F51).

In every test the raw files must come out as they went in.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import raw
from data.commit import dataset_file
from data.errors import RawDataError, UserError
from data.files import file_sha256
from data.manifest import MANIFEST, Manifest, load_manifest
from data.parquet import Order, PreparedDataset
from data.prepare import RawInputs, prepare
from data.progress import SilentListener
from data.schema import DenseColumn, RawFormat, Schema, SparseColumn, Split
from data.split import PARTS
from data.synthetic import SyntheticConfig, synthesise
from data.work_folder import locked
from tests.failing_files import fail_at

Digests = Callable[[Path], dict[str, str]]
LAST_POINTS = 30
TINY = SyntheticConfig(num_train=70, num_valid=20, num_test=10, cardinality_scale=1e-6)


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks to a file, and no more synthetic rows drawn than are wanted."""
    monkeypatch.setattr(raw, "SLICE_BYTES", 200)
    monkeypatch.setattr("data.synthetic.CHUNK_ROWS", 128)


def clicks(kind: str = "csv", split: str = "in_order") -> Schema:
    columns = ["label", "x", "c"] if kind == "csv" else []
    return Schema(
        name="clicks",
        format=RawFormat(kind=kind, columns=columns),
        dense={"x": DenseColumn("standardise")},
        sparse={"c": SparseColumn(token="text", vocabulary="dictionary", min_count=1)},
        split=Split(kind=split, valid=0.2, test=0.1),
    )


def write_tsv(path: Path, num_rows: int, first: int = 0) -> Path:
    rows = range(first, first + num_rows)
    path.write_text("".join(f"{n % 2}\t{n}\tt{n % 7}\n" for n in rows), encoding="utf-8")
    return path


def write_parquet(path: Path, num_rows: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = range(num_rows)
    columns = {
        "label": pa.array([n % 2 for n in rows], pa.int64()),
        "x": pa.array([float(n) for n in rows]),
        "c": pa.array([f"t{n % 7}" for n in rows]),
    }
    pq.write_table(pa.table(columns), path)
    return path


def is_whole(root: Path) -> bool:
    """Whether a dataset opens and all its files are those that its manifest records."""
    try:
        dataset = PreparedDataset(root)
    except UserError:
        return False
    manifest = dataset.manifest
    digests = dict(manifest.outputs)
    digests |= {entry.file: entry.sha256 for p in manifest.parts.values() for entry in p.files}
    for name, digest in digests.items():
        assert file_sha256(dataset_file(root, manifest, name)) == digest, name
    for part in PARTS:
        read = sum(batch.batch_size for batch in dataset.batches(part, Order(16)))
        assert read == dataset.num_rows(part)
    return True


# ---- F50: what isn't ours


def test_f50_raw_files_in_the_root_are_refused_and_stay(
    tmp_path: Path, tree_digests: Digests
) -> None:
    """clicks/train/*.parquet prepared into clicks: they were deleted, with exit status 0."""
    root = tmp_path / "clicks"
    files = [write_parquet(root / part / "part-00000.parquet", 40) for part in PARTS]
    for other in ("counts/mine.parquet", "vocabulary/notes.txt"):
        (root / other).parent.mkdir()
        (root / other).write_text("mine", encoding="utf-8")
    before = tree_digests(tmp_path)
    for overwrite in (False, True):
        with pytest.raises(UserError, match=r"holds raw files .*train/part-00000\.parquet"):
            prepare(
                clicks("parquet", "given"), RawInputs(files, [0, 1, 2]), root, overwrite=overwrite
            )
    assert tree_digests(tmp_path) == before
    assert not (root / ".lock").exists()


@pytest.mark.parametrize("link", ["symbolic", "hard", "folder"])
def test_f50_raw_files_in_the_root_are_known_through_links(
    link: str, tmp_path: Path, tree_digests: Digests
) -> None:
    root = tmp_path / "clicks"
    inside = write_parquet(root / "train" / "part-00000.parquet", 40)
    named = tmp_path / "named.parquet"
    if link == "hard":
        os.link(inside, named)
    elif link == "symbolic":
        named.symlink_to(inside)
    else:
        (tmp_path / "also").symlink_to(root, target_is_directory=True)
        named = tmp_path / "also" / "train" / "part-00000.parquet"
    before = tree_digests(tmp_path)
    with pytest.raises(UserError, match="holds raw files"):
        prepare(clicks("parquet"), RawInputs([named]), root)
    assert tree_digests(tmp_path) == before


@pytest.mark.parametrize(
    "name",
    [
        "notes.txt",
        "train/part-00000.parquet",
        "vocabulary/old.parquet",
        "counts/mine.csv",
        ".work/mine.txt",
        ".work",
        ".lock",
        "manifest.json",
    ],
)
@pytest.mark.parametrize("overwrite", [False, True])
def test_f50_files_of_others_are_refused_by_name(
    name: str, overwrite: bool, tmp_path: Path, tree_digests: Digests
) -> None:
    """Among them a manifest.json of a web application: it lists nothing that were ours."""
    root = tmp_path / "root"
    (root / name).parent.mkdir(parents=True)
    (root / name).write_text('{"name": "My app"}', encoding="utf-8")
    source = write_tsv(tmp_path / "raw.tsv", 50)
    with pytest.raises(UserError, match=str(root)) as refusal:
        prepare(clicks(), RawInputs([source]), root, overwrite=overwrite)
    if not (name == "manifest.json" and not overwrite):
        assert name.split("/mine.txt")[0] in str(refusal.value)
    assert [str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()] == [name]
    assert (root / name).read_text(encoding="utf-8") == '{"name": "My app"}'
    if name not in ("manifest.json", ".work"):
        with pytest.raises(UserError, match=str(root)):
            synthesise(TINY, root, overwrite=overwrite)


@pytest.mark.parametrize("name", ["train", ".work", ".lock", "train/part-00000.parquet"])
def test_f50_links_are_not_followed(name: str, tmp_path: Path, tree_digests: Digests) -> None:
    """A link called `train` to somebody's folder had the files in it deleted."""
    target = tmp_path / "precious"
    write_parquet(target / "part-00000.parquet", 10)
    (target / "empty").touch()
    root = tmp_path / "root"
    (root / name).parent.mkdir(parents=True)
    if name in ("train", ".work"):
        (root / name).symlink_to(target, target_is_directory=True)
    else:
        (root / name).symlink_to(target / ("empty" if name == ".lock" else "part-00000.parquet"))
    before = tree_digests(target)
    with pytest.raises(UserError, match=name):
        prepare(clicks(), RawInputs([write_tsv(tmp_path / "raw.tsv", 50)]), root)
    assert tree_digests(target) == before
    assert [p for p in root.rglob("*") if not p.is_symlink() and p.is_file()] == []


def test_f50_what_users_put_beside_a_dataset_is_no_part_of_an_overwrite(tmp_path: Path) -> None:
    """But it may be read: only who replaces must know all that is there."""
    source, root = write_tsv(tmp_path / "raw.tsv", 50), tmp_path / "root"
    prepare(clicks(), RawInputs([source]), root)
    (root / "train" / "mine.parquet").write_bytes(b"mine")
    prepare(clicks(), RawInputs([source]), root)
    with pytest.raises(UserError, match=r"train/mine\.parquet"):
        prepare(clicks(), RawInputs([source]), root, overwrite=True)
    assert (root / "train" / "mine.parquet").read_bytes() == b"mine"
    (root / "train" / "mine.parquet").unlink()
    # A file of that name with other content isn't the one that was written here.
    (root / "train" / "part-00000.parquet").write_bytes(b"mine")
    with pytest.raises(UserError, match=r"train/part-00000\.parquet"):
        prepare(clicks(), RawInputs([source]), root, overwrite=True)
    assert (root / "train" / "part-00000.parquet").read_bytes() == b"mine"


def test_f50_a_root_beside_its_raw_files_is_fine(tmp_path: Path, tree_digests: Digests) -> None:
    source = write_tsv(tmp_path / "raw.tsv", 50)
    before = source.read_bytes()
    prepare(clicks(), RawInputs([source]), tmp_path / "prepared")
    assert is_whole(tmp_path / "prepared")
    with pytest.raises(UserError, match=r"holds raw files .*raw\.tsv"):
        prepare(clicks(), RawInputs([source]), tmp_path)
    with pytest.raises(UserError, match="is no folder"):
        prepare(clicks(), RawInputs([source]), source)
    assert source.read_bytes() == before


# ---- F51: the old one stays until the new one is whole


def test_f51_a_failed_overwrite_leaves_the_old_dataset(
    tmp_path: Path, tree_digests: Digests
) -> None:
    """A bad line in the new raw file cost the old dataset."""
    root = tmp_path / "root"
    good = write_tsv(tmp_path / "good.tsv", 90)
    prepare(clicks(), RawInputs([good]), root)
    before = tree_digests(root)
    bad = write_tsv(tmp_path / "bad.tsv", 60)
    bad.write_text(bad.read_text(encoding="utf-8") + "1\tx\tt0\n", encoding="utf-8")
    with pytest.raises(RawDataError, match="line 61"):
        prepare(clicks(), RawInputs([bad]), root, overwrite=True)
    assert {n: d for n, d in tree_digests(root).items() if ".work" not in n} == before
    assert is_whole(root)
    write_tsv(bad, 60)
    manifest = prepare(clicks(), RawInputs([bad]), root, overwrite=True)
    assert [entry.rows for entry in manifest.inputs] == [60]
    prepare(clicks(), RawInputs([bad]), tmp_path / "clean")
    assert tree_digests(root) == tree_digests(tmp_path / "clean")


def test_f51_an_interrupted_generator_leaves_the_old_dataset(tmp_path: Path) -> None:
    root = tmp_path / "root"
    synthesise(TINY, root)
    before = load_manifest(root)

    class Full(SilentListener):
        def advance(self, num_bytes: int, num_rows: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device", "somewhere")

    changed = SyntheticConfig(num_train=80, cardinality_scale=1e-6)
    with pytest.raises(OSError, match="No space"):
        synthesise(changed, root, Full(), overwrite=True)
    assert load_manifest(root) == before
    assert is_whole(root)


@pytest.mark.parametrize("overwrite", [False, True])
def test_f51_data_of_another_kind_are_never_overwritten(
    overwrite: bool, tmp_path: Path, tree_digests: Digests
) -> None:
    source, prepared = write_tsv(tmp_path / "raw.tsv", 50), tmp_path / "prepared"
    generated = tmp_path / "generated"
    prepare(clicks(), RawInputs([source]), prepared)
    synthesise(TINY, generated)
    before = tree_digests(tmp_path)
    with pytest.raises(UserError, match=r"holds .*clicks, prepared from raw") as refusal:
        synthesise(TINY, prepared, overwrite=overwrite)
    assert overwrite or "overwrite" not in str(refusal.value)
    with pytest.raises(UserError, match=r"holds (generated|another kind of)"):
        prepare(clicks(), RawInputs([source]), generated, overwrite=overwrite)
    assert {n: d for n, d in tree_digests(tmp_path).items() if ".work" not in n} == before


def make(root: Path, source: Path, kind: str, *, overwrite: bool) -> Manifest:
    if kind == "raw":
        return prepare(clicks(), RawInputs([source]), root, overwrite=overwrite)
    rows = source.stat().st_size
    settings = SyntheticConfig(num_train=rows, num_valid=5, num_test=0, cardinality_scale=1e-6)
    return synthesise(settings, root, overwrite=overwrite)


def kill_points(
    root: Path, act: Callable[[], Any], reset: Callable[[], None], stride: int
) -> Iterator[int]:
    """Runs `act` again and again; each time another of its file operations fails, and all after it
    but removals: each `stride`-th of the last, in which the dataset takes its place, and some
    before."""
    reset()
    with fail_at(None, within=root) as calls:
        act()
    first_of_last = calls.count - LAST_POINTS
    for number in [
        *range(0, first_of_last, stride * first_of_last // 12),
        *range(first_of_last, calls.count, stride),
    ]:
        reset()
        with fail_at(number, within=root, stays=True), pytest.raises(OSError, match="No space"):
            act()
        yield number


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "overwrite", "stride"),
    [("raw", False, 1), ("raw", True, 1), ("synthetic", True, 3)],
)
def test_f51_a_failure_at_any_file_operation_leaves_the_old_or_the_new_whole(
    kind: str, overwrite: bool, stride: int, tmp_path: Path, tree_digests: Digests
) -> None:
    """Writes, flushes, renames, removals and new folders fail, as they do on a full disk."""
    old = write_tsv(tmp_path / "old.tsv", 70)
    new = write_tsv(tmp_path / "new.tsv", 110, first=3)
    inputs = {path: path.read_bytes() for path in (old, new)}
    expected = {path: make(tmp_path / path.stem, path, kind, overwrite=False) for path in inputs}
    clean = tree_digests(tmp_path / "new")
    roots = iter(range(10_000))
    root = tmp_path / "roots"
    root.mkdir()
    current = root

    def reset() -> None:
        nonlocal current
        current = root / str(next(roots))
        if overwrite:
            make(current, old, kind, overwrite=False)

    def act() -> None:
        make(current, new, kind, overwrite=overwrite)

    outcomes = set()
    for _ in kill_points(root, act, reset, stride):
        assert {path: path.read_bytes() for path in inputs} == inputs
        if (current / MANIFEST).exists():
            found = load_manifest(current)
            assert is_whole(current)
            outcomes.add("new" if found == expected[new] else "old")
            assert found == expected[new] or (overwrite and found == expected[old])
        else:
            assert not overwrite
            outcomes.add("none")
        make(current, new, kind, overwrite=overwrite)
        assert tree_digests(current) == clean
    assert outcomes == ({"old", "new"} if overwrite else {"none", "new"})


@pytest.mark.parametrize("number", range(5))
def test_f51_what_a_crash_leaves_of_the_work_folder_is_not_taken_for_all_of_it(
    number: int, tmp_path: Path, tree_digests: Digests
) -> None:
    """The blocks of a raw file were removed before the mark that says that they are there."""
    source, root = write_tsv(tmp_path / "raw.tsv", 90), tmp_path / "root"
    blocks = root / ".work" / "input-00000"
    with (
        fail_at(number, within=blocks, operations=("unlink",)),
        pytest.raises(OSError, match="No space"),
    ):
        prepare(clicks(), RawInputs([source]), root)
    prepare(clicks(), RawInputs([source]), root, overwrite=True)
    prepare(clicks(), RawInputs([source]), tmp_path / "clean")
    assert is_whole(root)
    assert tree_digests(root) == tree_digests(tmp_path / "clean")


# ---- the lock


def test_f50_the_second_of_two_is_refused_by_process_and_host(tmp_path: Path) -> None:
    source, root = write_tsv(tmp_path / "raw.tsv", 50), tmp_path / "root"
    with locked(root), pytest.raises(UserError) as refusal:
        prepare(clicks(), RawInputs([source]), root)
    assert f"process {os.getpid()} on {os.uname().nodename}" in str(refusal.value)
    prepare(clicks(), RawInputs([source]), root)


def test_f50_two_runs_generate_the_same_data_at_once(tmp_path: Path) -> None:
    """The second waits for the first, and then takes what it finds."""
    root = tmp_path / "root"
    waits = threading.Event()
    phases: list[str] = []

    class Waiting(SilentListener):
        def phase(self, name: str, total_bytes: int) -> None:
            phases.append(name)
            waits.set()

    second = threading.Thread(target=synthesise, args=(TINY, root, Waiting()))

    class First(SilentListener):
        def phase(self, name: str, total_bytes: int) -> None:
            second.start()
            assert waits.wait(60)

    synthesise(TINY, root, First())
    second.join(60)
    assert not second.is_alive()
    assert phases == [f"wait for process {os.getpid()} on {os.uname().nodename}"]
    assert is_whole(root)


def test_f50_a_lock_ends_with_its_holder(tmp_path: Path) -> None:
    source, root = write_tsv(tmp_path / "raw.tsv", 50), tmp_path / "root"
    root.mkdir()
    with open(root / ".lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process"):
            prepare(clicks(), RawInputs([source]), root)
    prepare(clicks(), RawInputs([source]), root)
    assert json.loads((root / MANIFEST).read_text(encoding="utf-8"))["format_version"] == 1
