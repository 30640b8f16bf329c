"""A storm: a tiny run is killed at random moments and resumed, and must end as if nothing had been.

Two processes train with `dlrm train`; one of them, or all with their launcher, get SIGKILL: while
they start or load, between steps, or within a save. Then the same command goes on with
`train.resume=latest`.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data.errors import UserError
from dlrm.checkpoint import Checkpoints
from dlrm.run_folder import RunFolder

WORLD_SIZE = 2
STEPS_PER_KILL = 24
_CHECKPOINT_EVERY = 3
_BATCH_SIZE = 64
_RUN = (
    "data.synthetic.num_valid=256",
    "data.synthetic.num_test=256",
    "data.synthetic.cardinality_scale=0.0001",
    f"data.batch_size={_BATCH_SIZE}",
    "model.bottom_mlp=[16]",
    "model.top_mlp=[16]",
    "optim=adam",
    "sharding=row_wise",
    f"train.checkpoint_every={_CHECKPOINT_EVERY}",
    "train.epochs=2",
    "train.evals_per_epoch=1",
    f"launch.nproc={WORLD_SIZE}",
    "launch.num_threads=1",
)
_START, _STEP, _SAVE = "while it starts", "between saves", "within a save"
_VICTIMS: tuple[str | int, ...] = ("all", *range(WORLD_SIZE))
_MOST_DELAY_S = {_START: 2.0, _STEP: 0.05, _SAVE: 0.02}
_POLL_S = 0.001
_LIMIT_S = 240.0
"""A run that takes longer hangs."""


@dataclass(frozen=True)
class Kill:
    """One of the storm.

    Attributes:
        moment: what was waited for.
        victim: `all`, or the rank.
        delay_s: how long after that.
        resumed_from: step of the checkpoint that the killed run had begun with; None: from nothing.
        kept: step of its latest checkpoint after the kill.
        was_saving: whether it has left a checkpoint that it was writing.
    """

    moment: str
    victim: str
    delay_s: float
    resumed_from: int | None
    kept: int | None
    was_saving: bool


@dataclass(frozen=True)
class Storm:
    """What came of it.

    Attributes:
        steps: of the run.
        kills: in order.
        expected_digest: `model_digest` of the run that nobody killed.
        digest: of the one that was killed; None where it didn't end.
        problems: what is wrong.
    """

    steps: int
    kills: list[Kill]
    expected_digest: str | None
    digest: str | None
    problems: list[str]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "text": self.text()}

    def text(self) -> str:
        """One line for people."""
        if self.problems:
            return f"storm: FAILED: {'; '.join(self.problems)}"
        in_save = sum(kill.was_saving for kill in self.kills)
        of_all = sum(kill.victim == "all" for kill in self.kills)
        return (
            f"storm: {len(self.kills)} kills in {self.steps} steps, {of_all} of all processes, "
            f"{in_save} within a save: the model is that of an uninterrupted run "
            f"({str(self.digest)[:12]})"
        )


def run_storm(
    folder: Path, num_kills: int, seed: int, say: Callable[[str], None] = lambda line: None
) -> Storm:
    """Trains twice, once undisturbed and once in a storm.

    Args:
        folder: for data, both runs and their output; made.
        num_kills: at least 1.
        seed: of moments and victims; of the run, too.
        say: prints a line for each kill.
    """
    folder.mkdir(parents=True)
    steps = STEPS_PER_KILL * (num_kills + 1)
    # Two epochs, of which the second ends with the run.
    num_train = steps // 2 * _BATCH_SIZE
    arguments = [*_RUN, f"data.synthetic.num_train={num_train}", f"seed={seed}"]
    arguments.append(f"data.root={folder / 'data'}")
    calm = _Run(folder / "calm", arguments)
    problems = calm.finish()
    expected = None if problems else calm.digest()
    if problems:
        return Storm(steps, [], None, None, problems)
    rng = random.Random(seed)
    kills: list[Kill] = []
    victims: list[str | int] = []
    for number in range(num_kills):
        run = _Run(folder / "storm", arguments)
        moment = _SAVE if number % 2 == 0 else rng.choice((_START, _STEP))
        if not victims:  # Each once before one comes again.
            victims = rng.sample(_VICTIMS, len(_VICTIMS))
        victim = victims.pop()
        # However far earlier ones have come, enough steps are left for those to come.
        first, last = STEPS_PER_KILL * number // 2, STEPS_PER_KILL * (number + 1)
        target = rng.randrange(first, last)
        delay_s = rng.uniform(0, _MOST_DELAY_S[moment])
        if moment == _SAVE and not any(kill.was_saving for kill in kills):
            delay_s = 0.0  # On a fast disk a save may be over sooner than any delay.
        problem = run.kill(moment, target, delay_s, victim)
        if problem is not None:
            return Storm(steps, kills, expected, None, [f"kill {number + 1}: {problem}"])
        kept = run.kept()
        kills.append(
            Kill(moment, str(victim), delay_s, run.resumed_from, kept, run.has_left_partial())
        )
        who = "all processes" if victim == "all" else f"rank {victim}"
        say(f"[{number + 1}/{num_kills}] {who} killed {moment}; kept: step {kept or 'none'}")
    run = _Run(folder / "storm", arguments)
    problems = run.finish()
    if problems:
        return Storm(steps, kills, expected, None, problems)
    found = run.digest()
    if found != expected:
        problems = [f"model_digest is {found} after {num_kills} kills, {expected} without"]
    return Storm(steps, kills, expected, found, problems)


class _Run:
    """One start of the run, in a process group of its own.

    Goes on from the folder's latest checkpoint, where there is one.
    """

    def __init__(self, run_dir: Path, arguments: Sequence[str]) -> None:
        self._run_dir = run_dir
        self.resumed_from = self.kept()
        self._known_partials = self._partials()
        how = "train.overwrite=true" if self.resumed_from is None else "train.resume=latest"
        command = [sys.executable, "-m", "dlrm", "train", *arguments, how]
        self._output = run_dir.with_suffix(".txt")
        with open(self._output, "w") as output:
            self._process = subprocess.Popen(
                [*command, f"hydra.run.dir={run_dir}"],
                cwd=run_dir.parent,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._until_s = time.monotonic() + _LIMIT_S

    def finish(self) -> list[str]:
        """Waits for its end; what is wrong with it."""
        status = self._wait()
        return [] if status == 0 else [self._ended(status)]

    def kill(self, moment: str, target: int, delay_s: float, victim: str | int) -> str | None:
        """Waits for the moment, kills, and waits for the end; returns what is wrong.

        Args:
            moment: what is waited for.
            target: no moment but the start comes before the checkpoint of that step.
            delay_s: from then on.
            victim: `all`, or the rank.
        """
        arrived = {
            _START: lambda: True,
            _STEP: lambda: (self._newest() or -1) >= target,
            _SAVE: lambda: (self._newest() or 0) >= target and self.has_left_partial(),
        }[moment]
        workers: dict[int, int] = {}
        while not (len(workers) == WORLD_SIZE and arrived()):
            if self._process.poll() is not None:
                return f"before it came, {self._ended(self._process.returncode)}"
            if time.monotonic() > self._until_s:
                return self._ended(self._wait())
            if len(workers) < WORLD_SIZE:
                workers = workers_of(self._process.pid)
            time.sleep(_POLL_S)
        time.sleep(delay_s)
        victims = [self._process.pid, *workers.values()]
        for pid in victims if victim == "all" else [workers[int(victim)]]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        status = self._wait()
        wanted = -signal.SIGKILL if victim == "all" else 1
        if status == 0:
            return "the run had ended before it"
        return None if status == wanted else f"of {victim}: {self._ended(status)}"

    def digest(self) -> str:
        """`model_digest` of result.json."""
        found = RunFolder.of_this_run(self._run_dir).read_json("result.json")["model_digest"]
        return str(found)

    def kept(self) -> int | None:
        """Step of the latest whole checkpoint."""
        checkpoints = Checkpoints(self._run_dir)
        try:
            return checkpoints.find("latest").step
        except UserError:
            return None

    def has_left_partial(self) -> bool:
        """Whether a checkpoint of this start is there that isn't complete."""
        return bool(self._partials() - self._known_partials)

    def _partials(self) -> set[tuple[str, int]]:
        """Those that aren't complete, and when they last changed: equal steps have equal names."""
        found = set()
        for path in Checkpoints(self._run_dir).root.glob(".partial-*"):
            with suppress(FileNotFoundError):  # Complete by now.
                found.add((path.name, path.stat().st_mtime_ns))
        return found

    def _newest(self) -> int | None:
        try:
            name = (Checkpoints(self._run_dir).root / "latest").read_text()
        except FileNotFoundError:
            return None
        return int(name.removeprefix("step-"))

    def _wait(self) -> int | None:
        """The exit status; None of one that had to be ended."""
        try:
            return self._process.wait(max(0.0, self._until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            for pid in (self._process.pid, *workers_of(self._process.pid).values()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.wait()
            return None

    def _ended(self, status: int | None) -> str:
        how = f"hangs: {_LIMIT_S:g} s" if status is None else f"ended with status {status}"
        lines = self._output.read_text().strip().splitlines()
        return f"the run {how}; its last lines ({self._output}): {' | '.join(lines[-3:])}"


def workers_of(launcher_pid: int) -> dict[int, int]:
    """Process numbers of a launcher's workers, by rank."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent != launcher_pid:
                continue
            environment = (entry / "environ").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # It has ended, or isn't ours.
        ranks = [text.partition(b"=")[2] for text in environment if text.startswith(b"RANK=")]
        if ranks:
            found[int(ranks[0])] = int(entry.name)
    return found
