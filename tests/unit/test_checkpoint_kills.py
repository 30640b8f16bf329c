"""Checkpoints on a disk that fails, or whose process is gone, at any moment of a save or a resume.

A small run is played: its models get an AUC each, the best is remembered, two are kept. What is
left must be whole, of this run, and never worse than before; and the run goes on to the same end.
"""

from __future__ import annotations

import errno
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dlrm.async_save import AsyncSaver, bytes_to_copy
from dlrm.checkpoint import CheckpointInfo, Checkpoints, Progress
from dlrm.checkpoint_load import load_training
from dlrm.metrics import BestTracker, EvalResult
from embeddings.communicator import SingleProcess
from tests.checkpoint_cases import Part, make_part
from tests.failing_files import Crashed, crash_at, fail_at
from tests.sharding_cases import TABLES, plan_of

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(600)]

SMALL = TABLES[:1]
AUCS = {
    "rising": (0.6, 0.7, 0.8, 0.9),
    "falling": (0.9, 0.8, 0.7, 0.6),
    "mixed": (0.7, None, 0.9, 0.8),
}


def small_part() -> Part:
    return make_part(SingleProcess(), plan_of("lone", 1, tables=SMALL), "sgd", tables=SMALL)


@dataclass
class PlayedRun:
    """Trains nothing: each step's model is filled by its number."""

    folder: Path
    aucs: tuple[float | None, ...]
    part: Part
    is_async: bool = False
    history: list[dict[str, Any]] = field(default_factory=list)
    best: BestTracker = field(default_factory=BestTracker)
    done: int = 0

    def go_on(self) -> None:
        """From the latest checkpoint, as `Trainer.resume` does."""
        checkpoints = Checkpoints(self.folder, keep=2)
        infos = checkpoints.candidates("latest")
        if not infos:
            return
        checkpoints.drop_after(infos[0])
        progress = infos[0].progress
        self.done, self.history = progress.step, list(progress.history)
        self.best = BestTracker(best_value=checkpoints.best_value(progress))

    def play(self) -> None:
        checkpoints = Checkpoints(self.folder, keep=2)
        saver = None
        if self.is_async:
            saver = AsyncSaver(checkpoints, self.part.comm, bytes_to_copy(self.part.contents(1)))
        while self.done < len(self.aucs):
            auc = self.aucs[self.done]
            self.done += 1
            self.part.fill(self.done)
            self.history.append({"step": self.done, "auc": auc})
            is_best = self.best.update(result_of(auc))
            progress = Progress(
                self.done, best_value=self.best.best_value, history=tuple(self.history)
            )
            contents = self.part.contents(self.done, progress=progress)
            if saver is None:
                checkpoints.save(contents, self.part.comm, is_best=is_best)
            else:
                saver.save(contents, is_best=is_best)
        if saver is not None:
            saver.wait()

    def kept(self) -> tuple[int, int, float]:
        """(latest step, best step, its AUC), all of it read; (0, 0, 0) where nothing is kept."""
        checkpoints = Checkpoints(self.folder)
        if not checkpoints.candidates("latest"):
            return 0, 0, 0.0
        latest, best = checkpoints.find("latest"), checkpoints.find("best")
        for info in (latest, best):
            assert_is_model(info)
        return latest.step, best.step, self.aucs[best.step - 1] or 0.0


def result_of(auc: float | None) -> EvalResult:
    return EvalResult(auc, 0.5, 0.9, 1.0, 10, 5, 10.0)


_DIGESTS: dict[int, str] = {}


def digest_of_step(step: int) -> str:
    if step not in _DIGESTS:
        part = small_part()
        part.fill(step)
        _DIGESTS[step] = part.digest()
    return _DIGESTS[step]


def assert_is_model(info: CheckpointInfo) -> None:
    part = small_part()
    load_training(info, part.model, part.embeddings, part.optimizer)
    assert part.digest() == digest_of_step(info.step)


@contextmanager
def no_warnings_wanted() -> Iterator[None]:
    """What a kill has left half removed is named; that isn't what is tested here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def play_with_crashes(make: Callable[[], PlayedRun], numbers: range) -> int:
    """Crashes a run at each of these operations; returns how many of them it had."""
    expected = None
    tried = 0
    for number in numbers:
        run = make()
        before = run.kept()
        with crash_at(number) as calls, suppress(Crashed):
            run.play()
        found = run.kept()
        assert found[0] >= before[0]
        assert found[2] >= before[2], (number, before, found)
        # Of what is named, the best is the best: also that of a step whose pointers were cut apart.
        again = PlayedRun(run.folder, run.aucs, run.part, run.is_async)
        again.go_on()
        resumed = again.kept()
        assert resumed[0] == found[0] or found[0] == 0, (number, found, resumed)
        so_far = [auc for auc in run.aucs[: resumed[0]] if auc is not None]
        if so_far:
            assert resumed[2] == max(so_far), (number, found, resumed)
        again.play()
        end = again.kept()
        expected = expected or whole_end(run.aucs)
        assert end == expected, (number, end)
        names = {path.name for path in (run.folder / "checkpoints").iterdir()}
        steps = {f"step-{step:06d}" for step in (len(run.aucs) - 1, len(run.aucs), end[1])}
        # One more where the crash came after all was named: the next save would remove it.
        more = names - {"latest", "best", *steps}
        assert {"latest", "best", *steps} <= names
        assert len(more) <= (found[0] == len(run.aucs)), (number, more)
        if not calls.failed:
            return tried
        tried += 1
    return tried


def whole_end(aucs: tuple[float | None, ...]) -> tuple[int, int, float]:
    best = max(auc for auc in aucs if auc is not None)
    return len(aucs), aucs.index(best) + 1, best


@pytest.mark.parametrize(
    ("aucs", "stride"),
    [
        pytest.param("rising", 31, id="some"),
        pytest.param("mixed", 1, id="mixed", marks=pytest.mark.slow),
        pytest.param("rising", 9, id="rising", marks=pytest.mark.slow),
        pytest.param("falling", 9, id="falling", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_f03_latest_and_best_are_whole_after_a_crash_at_any_operation(
    aucs: str, stride: int, is_async: bool, tmp_path: Path
) -> None:
    """Of every write, flush, rename and removal of four saves, and of the rotation between them."""
    part = small_part()
    made = iter(range(10_000))

    def make() -> PlayedRun:
        return PlayedRun(tmp_path / str(next(made)), AUCS[aucs], part, is_async)

    with no_warnings_wanted():
        tried = play_with_crashes(make, range(0, 10_000, stride * (4 if is_async else 1)))
    assert tried >= 100 // stride // 4


@pytest.mark.slow
@pytest.mark.parametrize("aucs", ["falling", "mixed"])
def test_f03_a_crash_while_a_run_is_resumed_costs_nothing(aucs: str, tmp_path: Path) -> None:
    """The latest is damaged, so an older one is gone on from, and the best may be a later one."""
    part = small_part()
    made = iter(range(10_000))

    def make() -> PlayedRun:
        run = PlayedRun(tmp_path / str(next(made)), AUCS[aucs], part)
        run.aucs = AUCS[aucs][:3]
        run.play()
        run.aucs = AUCS[aucs]
        return run

    def lose_latest_and_go_on(run: PlayedRun) -> None:
        checkpoints = Checkpoints(run.folder)
        checkpoints.drop_after(checkpoints.candidates("latest")[1])

    with no_warnings_wanted():
        for number in itertools.count():
            run = make()
            with crash_at(number) as calls, suppress(Crashed):
                lose_latest_and_go_on(run)
            again = PlayedRun(run.folder, run.aucs, part)
            again.go_on()
            again.play()
            assert again.kept() == whole_end(run.aucs), number
            if not calls.failed:
                break
    assert number > 5


def test_f03_best_is_found_again_where_a_kill_came_between_the_pointers(tmp_path: Path) -> None:
    """As runs of before have left it: `latest` names the new best step, `best` the one before."""
    run = PlayedRun(tmp_path, (0.6, 0.7), small_part())
    run.play()
    root = tmp_path / "checkpoints"
    (root / "best").write_text("step-000001")
    again = PlayedRun(tmp_path, (0.6, 0.7, 0.65), run.part)
    again.go_on()
    assert (root / "best").read_text() == "step-000002"
    again.play()
    assert again.kept() == (3, 2, 0.7)


def test_f03_the_value_to_beat_is_that_of_the_model_which_best_names(tmp_path: Path) -> None:
    """The model with the best value is gone: the next best counts again, not none."""
    run = PlayedRun(tmp_path, (0.6, 0.9), small_part())
    run.play()
    checkpoints = Checkpoints(tmp_path)
    progress = checkpoints.find("latest").progress
    (tmp_path / "checkpoints" / "best").write_text("step-000001")
    assert checkpoints.best_value(progress) == 0.6
    (tmp_path / "checkpoints" / "best").unlink()
    assert checkpoints.best_value(progress) is None


@pytest.mark.parametrize("stride", [37, pytest.param(7, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stays", [False, True], ids=["once", "from then on"])
def test_a_full_disk_at_any_operation_leaves_whole_models(
    stride: int, stays: bool, tmp_path: Path
) -> None:
    part = small_part()
    number = 0
    with no_warnings_wanted():
        while True:
            run = PlayedRun(tmp_path / str(number), AUCS["mixed"], part)
            met: list[OSError] = []
            with fail_at(number, stays=stays, spared=()) as calls:
                try:
                    run.play()
                except OSError as error:
                    met.append(error)
            assert all(error.errno == errno.ENOSPC and error.filename for error in met)
            assert run.kept()[0] >= run.done - 1
            again = PlayedRun(run.folder, run.aucs, part)
            again.go_on()
            again.play()
            assert again.kept() == whole_end(run.aucs), number
            if not calls.failed:
                break
            number += stride
    assert number > 100
