"""`prepare` killed, failed, run again, run twice: nothing half-made passes for a whole dataset.

Kills are exact, not timed: a process ends itself with SIGKILL at a chosen one of its own file
operations (Python reports each to an audit hook before it happens).
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data import raw
from data.errors import RawDataError, SchemaMismatch, UserError
from data.files import WholeFile, write_whole
from data.manifest import MANIFEST, Manifest, load_manifest
from data.prepare import RawInputs, prepare
from data.progress import SilentListener
from data.schema import Schema, SparseColumn, Split, schema_to_dict
from data.split import TEST, TRAIN, VALID
from data.work_folder import locked

Lines = Callable[..., list[bytes]]
Schemas = Callable[..., Schema]
Prepare = Callable[..., Manifest]
Digests = Callable[[Path], dict[str, str]]

CHECKOUT = Path(__file__).parents[2]
SLICE_BYTES = 700

KILLER = """
import hashlib, json, os, random, signal, sys
from pathlib import Path
from data import raw
from data.prepare import RawInputs, prepare
from data.schema import schema_from_dict

task = json.loads(sys.argv[1])
schema = schema_from_dict(task["schema"])
inputs = RawInputs([Path(name) for name in task["files"]])
raw.SLICE_BYTES = task["slice_bytes"]
EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree"}

def in_child(root, kill_at):
    # Runs prepare in a forked process, which ends itself at operation number `kill_at`, or at the
    # first that names `kill_at`; returns whether it was killed, and else its operations.
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        seen = 0
        def hook(event, args):
            nonlocal seen
            # Removals name files relative to an open folder.
            is_ours = event in ("os.remove", "os.rmdir") or str(root) in str(args[0])
            if event in EVENTS and is_ours:
                seen += 1
                named = isinstance(kill_at, str) and kill_at in str(args)
                if seen == kill_at or named:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        prepare(schema, inputs, Path(root))
        os.write(theirs, str(seen).encode())
        os._exit(0)
    os.close(theirs)
    _, status = os.waitpid(child, 0)
    with open(ours, "rb") as answer:
        operations = answer.read()
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        return True, 0
    assert status == 0, status
    return False, int(operations)

def digests(root):
    return {
        str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(Path(root).rglob("*"))
        if p.is_file() and ".work" not in p.parts
    }
"""

MANY_KILLS = (
    KILLER
    + """
base = Path(task["roots"])
_, total = in_child(base / "clean", None)
clean = digests(base / "clean")
rng = random.Random(task["seed"])
# The last operations are the manifest's and the removal of the work folder.
chains = [[at] for at in rng.sample(range(1, total), task["kills"]) + [total - 1, total - 4]]
chains += [[".work/input-00000/finished.json"], ["manifest.json"]]
chains.append([rng.randrange(1, total) for _ in range(4)])
answers = []
for number, chain in enumerate(chains):
    root = base / f"killed-{number}"
    for kill_at in chain:
        killed, _ = in_child(root, kill_at)
        looks_finished = (root / "manifest.json").exists()
        is_whole = digests(root) == clean
        answers.append([chain, kill_at, killed, looks_finished, is_whole])
    in_child(root, None)
print(json.dumps({"total": total, "chains": len(chains), "answers": answers}))
"""
)

ONE_KILL = (
    KILLER
    + """
killed, _ = in_child(task["root"], task["kill_at"])
print(json.dumps(killed))
"""
)


def run_python(code: str, task: dict[str, Any], **environment: str) -> Any:
    """Runs code in a fresh process from the checkout; returns what it printed last, from JSON."""
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(task)],
        cwd=CHECKOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks to a file."""
    monkeypatch.setattr(raw, "SLICE_BYTES", SLICE_BYTES)


@pytest.fixture
def schema(criteo_schema: Schemas) -> Schema:
    built = criteo_schema(2, 3, transform="standardise", min_count=2)
    built.sparse["C3"] = SparseColumn(token="text")
    return built


@pytest.fixture
def day_files(tmp_path: Path, criteo_lines: Lines) -> list[Path]:
    """Four day files of 50 rows; two are archives."""
    lines = criteo_lines(200, 2, 3)
    files = []
    for day in range(4):
        content = b"".join(lines[50 * day : 50 * day + 50])
        path = tmp_path / f"day_{day}{'.gz' if day % 2 else ''}"
        path.write_bytes(gzip.compress(content) if day % 2 else content)
        files.append(path)
    return files


def kill_task(schema: Schema, files: list[Path], **more: Any) -> dict[str, Any]:
    names = [str(path) for path in files]
    return {"schema": schema_to_dict(schema), "files": names, "slice_bytes": SLICE_BYTES, **more}


# ---- kills


def test_a_rerun_after_kills_at_any_moment_gives_the_bytes_of_a_clean_run(
    schema: Schema, day_files: list[Path], tmp_path: Path, tree_digests: Digests
) -> None:
    """B05, B42. Until it is whole, a dataset never has a manifest."""
    roots = tmp_path / "roots"
    roots.mkdir()
    answer = run_python(
        MANY_KILLS, kill_task(schema, day_files, roots=str(roots), seed=7, kills=12)
    )
    assert answer["total"] > 60, "there are that many moments to be killed at"
    killed = [killed for *_, killed, _, _ in answer["answers"]]
    assert sum(killed) >= 15, "the kills did happen"
    for chain, kill_at, _, looks_finished, is_whole in answer["answers"]:
        assert is_whole or not looks_finished, f"half a dataset after a kill at {kill_at} ({chain})"
    clean = tree_digests(roots / "clean")
    for number in range(answer["chains"]):
        assert tree_digests(roots / f"killed-{number}") == clean, answer["answers"]


class SpoolWatcher(SilentListener):
    """Notes inode and modification time of all spooled blocks when counting begins."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self.spooled: dict[str, tuple[int, int]] = {}

    def phase(self, name: str, total_bytes: int) -> None:
        if name == "count":
            self.spooled = spool_stats(self._work)


def spool_stats(work: Path) -> dict[str, tuple[int, int]]:
    stats = {}
    for path in sorted(work.glob("input-*/*")):
        stat = path.stat()
        stats[str(path.relative_to(work))] = (stat.st_ino, stat.st_mtime_ns)
    return stats


def of_inputs(stats: dict[str, tuple[int, int]], *numbers: int) -> dict[str, tuple[int, int]]:
    folders = tuple(f"input-{number:05d}/" for number in numbers)
    return {name: stat for name, stat in stats.items() if name.startswith(folders)}


@pytest.fixture
def killed_in_file_3(schema: Schema, day_files: list[Path], tmp_path: Path) -> Path:
    """The root of a run that was killed when it had written a block of its third file."""
    root = tmp_path / "prepared"
    kill_at = ".work/input-00002/block-000001"
    assert run_python(ONE_KILL, kill_task(schema, day_files, root=str(root), kill_at=kill_at))
    assert not (root / MANIFEST).exists()
    stats = spool_stats(root / ".work")
    assert "input-00001/finished.json" in stats
    assert of_inputs(stats, 2)
    assert "input-00002/finished.json" not in stats
    return root


def test_files_finished_before_a_kill_are_not_parsed_again(
    killed_in_file_3: Path,
    schema: Schema,
    day_files: list[Path],
    tmp_path: Path,
    tree_digests: Digests,
) -> None:
    before = spool_stats(killed_in_file_3 / ".work")
    watcher = SpoolWatcher(killed_in_file_3 / ".work")
    prepare(schema, RawInputs(day_files), killed_in_file_3, watcher)
    assert of_inputs(before, 0, 1) == of_inputs(watcher.spooled, 0, 1)
    assert len(of_inputs(watcher.spooled, 2, 3)) > 2
    prepare(schema, RawInputs(day_files), tmp_path / "clean")
    assert tree_digests(killed_in_file_3) == tree_digests(tmp_path / "clean")


def test_a_finished_file_whose_content_changed_is_parsed_again(
    killed_in_file_3: Path,
    schema: Schema,
    day_files: list[Path],
    tmp_path: Path,
    tree_digests: Digests,
) -> None:
    """Same name, same size, same modification time: only the content tells."""
    before = spool_stats(killed_in_file_3 / ".work")
    stat = day_files[0].stat()
    content = day_files[0].read_bytes()
    lines = content.splitlines(keepends=True)
    lines[3], lines[4] = lines[4], lines[3]
    day_files[0].write_bytes(b"".join(lines))
    os.utime(day_files[0], ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert day_files[0].read_bytes() != content
    watcher = SpoolWatcher(killed_in_file_3 / ".work")
    prepare(schema, RawInputs(day_files), killed_in_file_3, watcher)
    assert not set(of_inputs(before, 0).items()) & set(of_inputs(watcher.spooled, 0).items())
    assert of_inputs(before, 1) == of_inputs(watcher.spooled, 1)
    prepare(schema, RawInputs(day_files), tmp_path / "clean")
    assert tree_digests(killed_in_file_3) == tree_digests(tmp_path / "clean")


@pytest.mark.parametrize(
    ("change", "is_reused"),
    [
        (lambda schema: setattr(schema.sparse["C1"], "min_count", 1), True),
        (lambda schema: setattr(schema, "split", Split("random", 0.2, 0.2)), True),
        (lambda schema: setattr(schema.sparse["C1"], "token", "text"), False),
        (lambda schema: setattr(schema.sparse["C1"], "missing", "empty"), False),
        (lambda schema: schema.format.missing.append("0000000a"), False),
        (lambda schema: schema.dense.pop("I2"), False),
    ],
    ids=["min_count", "split", "token", "missing", "missing texts", "dense"],
)
def test_spooled_files_serve_another_schema_only_where_parsing_is_the_same(
    change: Callable[[Schema], Any],
    is_reused: bool,
    killed_in_file_3: Path,
    schema: Schema,
    day_files: list[Path],
    tmp_path: Path,
    tree_digests: Digests,
) -> None:
    before = spool_stats(killed_in_file_3 / ".work")
    change(schema)
    watcher = SpoolWatcher(killed_in_file_3 / ".work")
    prepare(schema, RawInputs(day_files), killed_in_file_3, watcher)
    assert (of_inputs(before, 0, 1) == of_inputs(watcher.spooled, 0, 1)) is is_reused
    prepare(schema, RawInputs(day_files), tmp_path / "clean")
    assert tree_digests(killed_in_file_3) == tree_digests(tmp_path / "clean")


def test_a_renamed_file_of_equal_content_is_named_as_it_is_now(
    killed_in_file_3: Path, schema: Schema, day_files: list[Path]
) -> None:
    renamed = day_files[0].with_name("renamed")
    day_files[0].rename(renamed)
    manifest = prepare(schema, RawInputs([renamed, *day_files[1:]]), killed_in_file_3)
    assert [i.file for i in manifest.inputs] == ["renamed", "day_1.gz", "day_2", "day_3.gz"]


# ---- failures


def test_a_cut_archive_fails_and_the_whole_one_then_gives_all_rows(
    schema: Schema,
    criteo_lines: Lines,
    prepare_files: Prepare,
    tmp_path: Path,
    tree_digests: Digests,
) -> None:
    """B05: gzip 1,000 rows, cut the last 200 bytes; later put the whole file in place."""
    packed = gzip.compress(b"".join(criteo_lines(1000, 2, 3)))
    first = b"".join(criteo_lines(10, 2, 3, seed=1))
    with pytest.raises(RawDataError, match=r"day_1\.gz: the archive is damaged or cut short"):
        prepare_files(schema, {"day_0": first, "day_1.gz": packed[:-200]})
    root = tmp_path / "prepared"
    assert not (root / MANIFEST).exists()
    with pytest.raises(UserError, match="no prepared dataset there"):
        load_manifest(root)
    assert not list(root.rglob("*.parquet")), "nothing in the output looks finished"
    assert not (root / ".work" / "input-00001" / "finished.json").exists()
    manifest = prepare_files(schema, {"day_0": first, "day_1.gz": packed})
    assert [i.rows for i in manifest.inputs] == [10, 1000]
    prepare_files(schema, {"day_0": first, "day_1.gz": packed}, tmp_path / "clean")
    assert tree_digests(root) == tree_digests(tmp_path / "clean")


def test_a_bad_line_leaves_nothing_finished_and_can_be_mended(
    schema: Schema,
    criteo_lines: Lines,
    prepare_files: Prepare,
    tmp_path: Path,
    tree_digests: Digests,
) -> None:
    lines = criteo_lines(60, 2, 3)
    good = {"day_0": b"".join(lines[:30]), "day_1": b"".join(lines[30:])}
    bad = {**good, "day_1": good["day_1"] + b"1\tx\t\t\t\t\n"}
    with pytest.raises(RawDataError) as error:
        prepare_files(schema, bad)
    assert error.value.line == 31
    root = tmp_path / "prepared"
    assert not (root / MANIFEST).exists()
    prepare_files(schema, good)
    prepare_files(schema, good, tmp_path / "clean")
    assert tree_digests(root) == tree_digests(tmp_path / "clean")
    assert not (root / ".work").exists()


def test_files_that_only_look_like_leftovers_are_left_alone(
    schema: Schema,
    criteo_lines: Lines,
    prepare_files: Prepare,
    tmp_path: Path,
    tree_digests: Digests,
) -> None:
    """They may be somebody's own: leftovers lie in the work folder (F50)."""
    files = {"day_0": b"".join(criteo_lines(60, 2, 3))}
    root = tmp_path / "prepared"
    for name in ("train/part-00000.parquet.partial", "train/part-00007.parquet",
                 "vocabulary/old.parquet", "counts/old.parquet"):  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"rubbish")
    before = tree_digests(root)
    with pytest.raises(UserError, match=r"counts/old\.parquet, train/part-00000\.parquet\.partial"):
        prepare_files(schema, files)
    assert tree_digests(root) == before


def test_a_file_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No kill between two of Python's file operations can show a file half-written."""
    path = tmp_path / "manifest.json"
    write_whole(path, b"old")

    def fail(*_: object) -> None:
        raise OSError("killed here")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="killed here"):
        write_whole(path, b"new and longer")
    assert path.read_bytes() == b"old"
    monkeypatch.undo()
    write_whole(path, b"new")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("manifest.json", b"new")]


def test_a_streamed_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "part-00000.parquet"
    with WholeFile(path) as sink:
        sink.write(b"some")
        sink.write(b"thing")
        assert not path.exists()
    assert path.read_bytes() == b"something"
    assert (sink.num_bytes, sink.sha256) == (9, hashlib.sha256(b"something").hexdigest())

    def interrupted() -> None:
        with WholeFile(path) as sink:
            sink.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"something"


# ---- a folder that holds a dataset already


@pytest.fixture
def finished(schema: Schema, day_files: list[Path], tmp_path: Path) -> Path:
    prepare(schema, RawInputs(day_files), tmp_path / "prepared")
    return tmp_path / "prepared"


def file_stats(root: Path) -> dict[str, tuple[int, int]]:
    stats = [(path, path.stat()) for path in sorted(root.rglob("*")) if path.is_file()]
    return {str(p.relative_to(root)): (s.st_ino, s.st_mtime_ns) for p, s in stats}


def test_the_same_again_touches_nothing(
    finished: Path, schema: Schema, day_files: list[Path]
) -> None:
    before, manifest = file_stats(finished), load_manifest(finished)
    assert prepare(schema, RawInputs(day_files), finished) == manifest
    assert file_stats(finished) == before


def test_another_schema_is_refused_naming_what_differs(
    finished: Path, schema: Schema, day_files: list[Path], tree_digests: Digests
) -> None:
    before = tree_digests(finished)
    schema.sparse["C2"].min_count = 9
    schema.split = Split("random", 0.2, 0.1)
    with pytest.raises(SchemaMismatch) as error:
        prepare(schema, RawInputs(day_files), finished)
    message = str(error.value)
    assert "data.schema.sparse.C2.min_count: prepared with None, asked for 9" in message
    assert "data.schema.split.kind: prepared with in_order, asked for random" in message
    assert "data.overwrite=true" in message
    assert tree_digests(finished) == before


@pytest.mark.parametrize(
    ("choose", "told"),
    [
        (lambda files: files[::-1], "other files, order or parts"),
        (lambda files: files[:3], "other files, order or parts"),
        (lambda files: [*files, files[0].with_name("new")], "changed or new: new"),
        (lambda files: [files[0].with_name("new"), *files[1:]], "changed or new: new"),
    ],
    ids=["order", "fewer", "more", "another"],
)
def test_other_raw_files_are_refused(
    choose: Callable[[list[Path]], list[Path]],
    told: str,
    finished: Path,
    schema: Schema,
    day_files: list[Path],
) -> None:
    day_files[0].with_name("new").write_bytes(day_files[0].read_bytes() * 2)
    with pytest.raises(UserError, match=told):
        prepare(schema, RawInputs(choose(day_files)), finished)


def test_a_raw_file_whose_content_changed_is_refused(
    finished: Path, schema: Schema, day_files: list[Path]
) -> None:
    content = day_files[2].read_bytes().splitlines(keepends=True)
    day_files[2].write_bytes(b"".join(content[::-1]))
    with pytest.raises(UserError, match="changed or new: day_2"):
        prepare(schema, RawInputs(day_files), finished)


def test_the_same_files_under_other_parts_are_refused(
    schema: Schema, day_files: list[Path], tmp_path: Path
) -> None:
    """data.raw_train and data.raw_valid may be moved against each other, file for file."""
    schema.split = Split("given")
    root = tmp_path / "prepared"
    prepare(schema, RawInputs(day_files, [TRAIN, TRAIN, VALID, TEST]), root)
    prepare(schema, RawInputs(day_files, [TRAIN, TRAIN, VALID, TEST]), root)
    with pytest.raises(UserError, match="prepared from other raw files"):
        prepare(schema, RawInputs(day_files, [TRAIN, VALID, VALID, TEST]), root)


def test_overwrite_gives_the_new_dataset_whole(
    finished: Path,
    schema: Schema,
    day_files: list[Path],
    tmp_path: Path,
    tree_digests: Digests,
) -> None:
    del schema.sparse["C2"]
    schema.sparse["C1"].table = "other"
    inputs = RawInputs(day_files[:3])
    prepare(schema, inputs, finished, overwrite=True)
    prepare(schema, inputs, tmp_path / "clean")
    assert tree_digests(finished) == tree_digests(tmp_path / "clean")


def test_a_failed_overwrite_leaves_the_old_dataset(
    finished: Path, schema: Schema, day_files: list[Path], tree_digests: Digests
) -> None:
    """Half of the old and half of the new must not pass for either (F51)."""
    before = tree_digests(finished)
    day_files[3].write_bytes(day_files[3].read_bytes()[:-200])
    with pytest.raises(RawDataError):
        prepare(schema, RawInputs(day_files), finished, overwrite=True)
    after = tree_digests(finished)
    assert {name: digest for name, digest in after.items() if ".work" not in name} == before


SECOND_PROCESS = """
import json, sys
from pathlib import Path
from data.errors import UserError
from data.prepare import RawInputs, prepare
from data.schema import schema_from_dict
task = json.loads(sys.argv[1])
try:
    prepare(schema_from_dict(task["schema"]), RawInputs([Path(f) for f in task["files"]]),
            Path(task["root"]))
    print(json.dumps("prepared"))
except UserError as error:
    print(json.dumps(str(error)))
"""


class SecondProcess(SilentListener):
    """Starts another process on the same root when counting begins."""

    def __init__(self, task: dict[str, Any]) -> None:
        self._task = task
        self.answer: Any = None

    def phase(self, name: str, total_bytes: int) -> None:
        if name == "count":
            self.answer = run_python(SECOND_PROCESS, self._task)


def test_a_second_process_on_the_same_root_is_refused(
    schema: Schema, day_files: list[Path], tmp_path: Path, tree_digests: Digests
) -> None:
    root = tmp_path / "prepared"
    second = SecondProcess(kill_task(schema, day_files, root=str(root)))
    prepare(schema, RawInputs(day_files), root, second)
    assert "is being prepared by another process" in second.answer
    assert str(root) in second.answer
    prepare(schema, RawInputs(day_files), tmp_path / "clean")
    assert tree_digests(root) == tree_digests(tmp_path / "clean")


def test_the_process_before_may_have_removed_the_work_folder(tmp_path: Path) -> None:
    """Two start at once; the first ends while the second waits at the lock."""
    with locked(tmp_path) as work:
        shutil.rmtree(work)
    assert not work.exists()


def test_a_refusal_leaves_no_work_folder_in_a_finished_dataset(
    finished: Path, schema: Schema, day_files: list[Path]
) -> None:
    with pytest.raises(UserError):
        prepare(schema, RawInputs(day_files[:1]), finished)
    assert not (finished / ".work").exists()


# ---- progress


class Recorder(SilentListener):
    """Adds up what each phase announces and does."""

    def __init__(self) -> None:
        self.phases: dict[str, list[int]] = {}

    def phase(self, name: str, total_bytes: int) -> None:
        self.phases[name] = [total_bytes, 0, 0]

    def advance(self, num_bytes: int, num_rows: int) -> None:
        current = list(self.phases.values())[-1]
        current[1] += num_bytes
        current[2] += num_rows


def test_progress_adds_up(schema: Schema, day_files: list[Path], tmp_path: Path) -> None:
    recorder = Recorder()
    prepare(schema, RawInputs(day_files), tmp_path / "prepared", recorder)
    total = sum(path.stat().st_size for path in day_files)
    assert list(recorder.phases) == ["parse", "count", "write"]
    for name, (announced, done, rows) in recorder.phases.items():
        assert announced == total, name
        # A block's share of its file's bytes is rounded down.
        assert total - 50 <= done <= total, name
        assert rows == 200, name
    again = Recorder()
    prepare(schema, RawInputs(day_files), tmp_path / "prepared", again)
    assert again.phases == {"check inputs": [total, total, 0]}


# ---- memory (B42)

PEAK = """
import json, sys
from pathlib import Path
from data import count_pass, counting, lanes, raw, vocabulary, write_pass
from data.prepare import RawInputs, prepare
from data.schema import schema_from_dict
task = json.loads(sys.argv[1])
# Every buffer that a constant sets is made small, so that what grows with the input shows.
for module, name, value in (
    (raw, "SLICE_BYTES", 1 << 20),
    (lanes, "LANE_GROUP_ROWS", 512),
    (count_pass, "_COUNTER_BYTES", 16 << 20),
    (count_pass, "_DICTIONARY_BYTES_IN_MEMORY", 1 << 20),
    (write_pass, "_COUNTER_BYTES", 8 << 20),
    (vocabulary, "_SEGMENT_KEYS", 1 << 16),
    (counting, "_SAMPLE_EVERY", 512),
):
    assert hasattr(module, name), (module, name)
    setattr(module, name, value)
counting.KeyCounter.merged.__defaults__ = (1 << 15,)
prepare(schema_from_dict(task["schema"]), RawInputs([Path(task["file"])]), Path(task["root"]))
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(json.dumps(int(status["VmHWM"].split()[0]) / 1024))
"""

# Allocators that keep freed blocks hide what is in use: peaks then differ by 30 MiB by chance.
EXACT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "131072", "ARROW_DEFAULT_MEMORY_POOL": "system"}


def write_many_rows(path: Path, num_rows: int) -> None:
    """Lines `label, 2 × 3 digits, 6 × 8 hex digits`, two thirds of the ids nearly all distinct."""
    rng = np.random.default_rng(0)
    digits = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)
    with open(path, "wb") as opened:
        for start in range(0, num_rows, 50_000):
            rows = min(50_000, num_rows - start)
            text = np.full((rows, 1 + 2 * 4 + 6 * 9 + 1), ord("\t"), dtype=np.uint8)
            text[:, 0] = digits[rng.integers(0, 2, rows)]
            for column in range(2):
                text[:, 2 + 4 * column : 5 + 4 * column] = digits[rng.integers(0, 10, (rows, 3))]
            for column in range(6):
                ids = digits[rng.integers(0, 16, (rows, 8))]
                ids[:, : 6 if column < 2 else 1] = ord("0")
                text[:, 10 + 9 * column : 18 + 9 * column] = ids
            text[:, -1] = ord("\n")
            opened.write(text.tobytes())


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_peak_memory_does_not_grow_with_the_input(tmp_path: Path, criteo_schema: Schemas) -> None:
    """0.2 M rows and 1 M rows of 64 bytes with up to 0.8 M distinct ids in each of four columns.

    Measured: 7 MiB more for the larger input; 90 MiB with counters that don't spill, 40 MiB with
    dictionaries in memory, 120 MiB with rows collected to the end.
    """
    schema = schema_to_dict(criteo_schema(2, 6))
    peaks = []
    for num_rows in (200_000, 1_000_000):
        path = tmp_path / f"{num_rows}.tsv"
        write_many_rows(path, num_rows)
        task = {"schema": schema, "file": str(path), "root": str(tmp_path / f"root-{num_rows}")}
        peaks.append(run_python(PEAK, task, **EXACT_MEMORY))
        path.unlink()
        shutil.rmtree(task["root"])
    assert peaks[1] < peaks[0] + 20, f"peaks of {peaks[0]:.0f} and {peaks[1]:.0f} MiB"
