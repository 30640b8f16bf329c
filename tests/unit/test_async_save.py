"""Checkpoints written beside training: the copy is kept, errors come back, memory is checked."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

from data.errors import UserError
from dlrm import async_save
from dlrm.async_save import AsyncSaver, bytes_to_copy
from dlrm.checkpoint import Checkpoints, Contents
from dlrm.checkpoint_load import load_training
from embeddings.communicator import Communicator
from tests.checkpoint_cases import Part, make_part
from tests.commands import start_python
from tests.sharding_cases import TABLES, plan_of
from tests.thread_ranks import ThreadRank, run_ranks

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("one_thread")]
PLAN = plan_of("mixed", 2, "mixed", TABLES)


class GatedCheckpoints(Checkpoints):
    """Begins to write only once the test says so."""

    def __init__(self, run_path: Path, gate: threading.Event) -> None:
        super().__init__(run_path, keep=9)
        self._gate = gate

    def save(
        self, contents: Contents, comm: Communicator, *, is_best: bool, **more: object
    ) -> None:
        assert self._gate.wait(30)
        super().save(contents, comm, is_best=is_best)


def saver_of(part: Part, checkpoints: Checkpoints) -> AsyncSaver:
    return AsyncSaver(checkpoints, part.comm, bytes_to_copy(part.contents(1)))


def test_what_is_kept_is_the_model_as_it_was(tmp_path: Path) -> None:
    """Rows, state and dense weights change before the first byte is written; a second save goes
    into the same copies."""
    gate = threading.Event()
    changed = threading.Barrier(2, action=gate.set)

    def run(comm: ThreadRank) -> list[str]:
        part = make_part(comm, PLAN)
        saver = saver_of(part, GatedCheckpoints(tmp_path, gate))
        part.fill(seed=3)
        digests = [part.digest()]
        saver.save(part.contents(1), is_best=True)
        part.fill(seed=4)
        digests.append(part.digest())
        assert digests[0] != digests[1]
        changed.wait(30)
        saver.save(part.contents(2), is_best=False)
        part.fill(seed=5)
        saver.wait()
        saver.wait()  # Nothing is left to wait for.
        found = []
        for which in ("best", "latest"):
            info = Checkpoints(tmp_path).find(which)
            load_training(info, part.model, part.embeddings, part.optimizer)
            found.append(part.digest())
        assert found == digests
        return found

    run_ranks(2, run)


def test_an_error_comes_back_on_all_ranks_at_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And only once: the next save is tried again."""
    original = async_save.Checkpoints.save
    has_failed = {0: False, 1: False}

    def failing(self: Checkpoints, contents: Contents, comm: Communicator, **more: object) -> None:
        if not has_failed[comm.rank]:
            has_failed[comm.rank] = True
            raise OSError(28, "No space left on device", "rows-00000.safetensors")
        original(self, contents, comm, is_best=False)

    monkeypatch.setattr(Checkpoints, "save", failing)

    def run(comm: ThreadRank) -> None:
        part = make_part(comm, PLAN)
        saver = saver_of(part, Checkpoints(tmp_path))
        saver.save(part.contents(1), is_best=False)
        with pytest.raises(OSError, match="No space left"):
            saver.wait()
        saver.save(part.contents(2), is_best=False)
        saver.wait()

    run_ranks(2, run)
    assert Checkpoints(tmp_path).find("latest").step == 2


def test_too_little_memory_is_refused_on_all_ranks_with_the_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two copies of 60 MiB on a host with 100 MiB free; alone, each would fit."""
    monkeypatch.setattr(async_save, "available_bytes", lambda: 100 << 20)

    def run(comm: ThreadRank) -> str:
        with pytest.raises(UserError) as caught:
            AsyncSaver(Checkpoints(tmp_path), comm, 60 << 20)
        return str(caught.value)

    first, second = run_ranks(2, run)
    assert first == second
    assert re.search(r"train\.checkpoint_async=true copies 120 MiB .* has 100 MiB", first)


_ENDS_AT_ONCE = """
import sys
import threading
from pathlib import Path

from dlrm.async_save import AsyncSaver, bytes_to_copy
from dlrm.checkpoint import Checkpoints
from embeddings.communicator import SingleProcess
from tests.checkpoint_cases import make_part
from tests.sharding_cases import TABLES, plan_of


class Late(Checkpoints):
    def save(self, *args, **more):
        threading.main_thread().join()
        super().save(*args, **more)


part = make_part(SingleProcess(), plan_of("mixed", 1, "mixed", TABLES))
saver = AsyncSaver(Late(Path(sys.argv[1])), part.comm, bytes_to_copy(part.contents(1)))
saver.save(part.contents(1), is_best=True)
if sys.argv[2] == "dropped":
    del saver
if sys.argv[2] == "raises":
    raise SystemExit(3)
"""


@pytest.mark.processes
@pytest.mark.parametrize(("way", "status"), [("kept", 0), ("dropped", 0), ("raises", 3)])
def test_f25_a_process_that_ends_at_once_ends_in_order_with_its_checkpoint(
    way: str, status: int, tmp_path: Path
) -> None:
    """The save begins when the main thread has ended; Python then took the thread down with it."""
    root = Path(__file__).resolve().parents[2]
    process = start_python("-c", _ENDS_AT_ONCE, tmp_path, way, cwd=root)
    _, err = process.communicate(timeout=50)
    assert (process.returncode, err) == (status, "")
    assert Checkpoints(tmp_path).find("latest").step == 1
