"""The jobs of a sweep (`-m`): what differs, how each ended, and their figures side by side.

Knows nothing of how jobs are composed or run; it is told when one starts and ends, and reads the
job's result.json. The sweep's own files are written anew after every job, so a sweep that is
killed leaves the figures of all that ended. Where they can't be, the jobs go on, and `write` tells
of it at the end.
"""

from __future__ import annotations

import csv
import io
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.errors import UserError
from data.files import write_whole
from dlrm.run_folder import NOT_FINISHED

SWEEP_FILE = "sweep.json"
COMPLETED = "completed"
NOT_STARTED = "not started"


@dataclass(frozen=True)
class Figure:
    """A figure of a job.

    Attributes:
        name: in sweep.json and sweep.csv.
        heading: of the table's column, in lines.
        paths: where result.json has it; several are summed.
        show: the number as a cell.
    """

    name: str
    heading: str
    paths: tuple[str, ...]
    show: Callable[[float], str]

    def of(self, result: Mapping[str, Any]) -> float | None:
        """The figure of a result; None where a part of it is undefined or missing."""
        values = [_number_at(result, path) for path in self.paths]
        known = [value for value in values if value is not None]
        return sum(known) if len(known) == len(values) else None


def show_bytes(value: float) -> str:
    """`980`, `28.7K`, `1.23M`, `4.50G`: three digits, in units of 2^10, 2^20 and 2^30 bytes."""
    unit = ""
    for larger in ("K", "M", "G"):
        if value < 999.5:
            break
        value, unit = value / 1024, larger
    num_decimals = 0 if not unit or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{num_decimals}f}{unit}"


_SENT = "comm.bytes_sent_per_step"
FIGURES = (
    Figure("step_ms_p50", "step\nms", ("train.step_ms_p50",), "{:,.1f}".format),
    Figure("samples_per_s", "samples\n/s", ("train.samples_per_s",), "{:,.0f}".format),
    Figure(
        "table_bytes_sent_per_step",
        "sent:\ntables",
        (f"{_SENT}.ids", f"{_SENT}.rows", f"{_SENT}.grads"),
        show_bytes,
    ),
    Figure("dense_bytes_sent_per_step", "\ndense", (f"{_SENT}.dense",), show_bytes),
    Figure(
        "table_and_state_bytes_max_rank",
        "held:\ntables",
        ("memory.table_bytes_max_rank", "memory.state_bytes_max_rank"),
        show_bytes,
    ),
    Figure("peak_rss_bytes_max_rank", "\nall", ("memory.peak_rss_bytes_max_rank",), show_bytes),
    Figure("auc", "\nAUC", ("eval.auc",), "{:.4f}".format),
    Figure("logloss", "log\nloss", ("eval.logloss",), "{:.4f}".format),
)
_AT_THE_END = {
    "step_ms_p50": "step {:,.1f} ms",
    "samples_per_s": "{:,.0f} samples/s",
    "auc": "AUC {:.4f}",
}
NOTE = (
    "sent: bytes per step and rank, for the tables (ids, rows, gradients) and the dense network; "
    "held: bytes of the fullest rank, rows with their state, and in all. K, M, G: 2^10, 2^20, 2^30."
)


@dataclass
class SweepJob:
    """One job.

    Attributes:
        number: from 0; the name of its folder unless `hydra.sweep.subdir` says otherwise.
        overrides: `key=value`, those of all jobs and its own.
        folder: its run folder; None before it starts.
        status: as in result.json, or `not started`.
        wall_s: from its start to its end.
        figures: by `Figure.name`.
    """

    number: int
    overrides: list[str]
    folder: Path | None = None
    status: str = NOT_STARTED
    wall_s: float | None = None
    figures: dict[str, float | None] = field(default_factory=dict)

    @property
    def is_completed(self) -> bool:
        return self.status == COMPLETED

    @property
    def reason(self) -> str:
        """Why it failed, in one line."""
        lines = self.status.removeprefix("failed: ").splitlines()
        return lines[0].rstrip(" :") if lines else ""


class Sweep:
    """All jobs of a sweep, and the files that tell of them.

    Args:
        folder: the sweep's folder; the jobs' folders lie in it.
        overrides: `key=value` of each job.
        say: prints one line for the user.
        get_time: a clock in seconds.
    """

    def __init__(
        self,
        folder: Path,
        overrides: Sequence[Sequence[str]],
        say: Callable[[str], None],
        get_time: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        self.jobs = [
            SweepJob(number, [text for text in job if not _key(text).startswith("hydra.")])
            for number, job in enumerate(overrides)
        ]
        self._say = say
        self._get_time = get_time
        self._started_at_s = 0.0
        self.write()

    def differing(self) -> list[str]:
        """The keys whose values aren't the same in all jobs, in the order of the overrides."""
        keys = dict.fromkeys(_key(text) for job in self.jobs for text in job.overrides)
        values = [_values(job) for job in self.jobs]
        return [key for key in keys if len({of_job.get(key) for of_job in values}) > 1]

    def start(self, number: int) -> None:
        """A job starts."""
        job = self.jobs[number]
        job.status = NOT_FINISHED
        self._started_at_s = self._get_time()
        self._try_to_write()
        self._say(f"\n{self._title(job)}")

    def enter(self, number: int, folder: Path) -> None:
        """A job has a folder."""
        self.jobs[number].folder = folder
        self._try_to_write()

    def fail(self, number: int, error: Exception) -> None:
        """A job failed, perhaps before it wrote anything; its folder is to say so then."""
        job = self.jobs[number]
        job.status = f"failed: {type(error).__name__}: {error}"
        if job.folder is None:  # It couldn't be made.
            return
        result = job.folder / "result.json"
        # What is there is the job's own, or that of an earlier run whose folder it was refused.
        with suppress(OSError):  # Why it failed has been told, and stands in the sweep's files.
            if not result.exists():
                job.folder.mkdir(parents=True, exist_ok=True)
                write_whole(result, _to_json({"status": job.status}))

    def refuse(self, number: int, folder: Path, error: Exception) -> None:
        """A job can't start."""
        self.enter(number, folder)
        self.fail(number, error)
        self._try_to_write()

    def end(self, number: int, *, has_returned: bool) -> None:
        """A job has ended; False: it was interrupted."""
        job = self.jobs[number]
        job.wall_s = round(self._get_time() - self._started_at_s, 3)
        result = _read_result(job.folder)
        if job.status == NOT_FINISHED:
            job.status = str(result.get("status", COMPLETED if has_returned else NOT_FINISHED))
        # A used folder is refused: what it holds are another run's figures.
        if result.get("status") == job.status:
            job.figures = {figure.name: figure.of(result) for figure in FIGURES}
        self._try_to_write()
        self._say(self._ending(job))

    def fastest(self) -> SweepJob | None:
        """The completed job with the most samples per second; None unless several are compared."""
        speeds = [
            (job.figures.get("samples_per_s"), job)
            for job in self.jobs
            if job.is_completed and job.figures.get("samples_per_s") is not None
        ]
        return max(speeds, key=lambda pair: pair[0] or 0.0)[1] if len(speeds) > 1 else None

    def write(self) -> None:
        """Writes sweep.json and sweep.csv.

        Raises:
            OSError: naming the file.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / SWEEP_FILE, _to_json([self._entry(job) for job in self.jobs]))
        write_whole(self.folder / "sweep.csv", self._csv().encode())

    def _try_to_write(self) -> None:
        with suppress(OSError):
            self.write()

    def _name(self, job: SweepJob) -> str:
        return f"job {job.number} ({job.number + 1} of {len(self.jobs)})"

    def _title(self, job: SweepJob) -> str:
        values = _values(job)
        shown = " ".join(f"{key}={values[key]}" for key in self.differing() if key in values)
        return f"{self._name(job)}: {shown or 'as configured'}"

    def _ending(self, job: SweepJob) -> str:
        head = self._name(job)
        if not job.is_completed:
            return f"{head} failed after {job.wall_s:.0f} s: {job.reason}"
        shown = [f"{head} completed in {job.wall_s:.0f} s"]
        for name, text in _AT_THE_END.items():
            value = job.figures.get(name)
            if value is not None:
                shown.append(text.format(value))
        return ", ".join(shown)

    def _entry(self, job: SweepJob) -> dict[str, Any]:
        values = _values(job)
        return {
            "job": job.number,
            "folder": self._relative(job.folder),
            "status": job.status,
            "overrides": job.overrides,
            "differing": {key: values.get(key) for key in self.differing()},
            "wall_s": job.wall_s,
            **{figure.name: job.figures.get(figure.name) for figure in FIGURES},
        }

    def _csv(self) -> str:
        keys, names = self.differing(), [figure.name for figure in FIGURES]
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["job", "folder", "status", *keys, "wall_s", *names])
        for job in self.jobs:
            values = _values(job)
            own = [values.get(key) for key in keys]
            figures = [job.figures.get(name) for name in names]
            folder = self._relative(job.folder)
            status = " ".join(job.status.splitlines())
            writer.writerow([job.number, folder, status, *own, job.wall_s, *figures])
        return out.getvalue()

    def _relative(self, folder: Path | None) -> str | None:
        if folder is None:
            return None
        base, folder = self.folder.absolute(), folder.absolute()
        return str(folder.relative_to(base) if folder.is_relative_to(base) else folder)


def check_unused(folder: Path, *, overwrite: bool) -> None:
    """Refuses the folder of an earlier sweep, unless none of its jobs completed.

    Raises:
        UserError: naming the folder.
    """
    try:
        jobs = json.loads((folder / SWEEP_FILE).read_text(encoding="utf-8"))
        num_completed = sum(job["status"] == COMPLETED for job in jobs)
    except (OSError, ValueError, TypeError, KeyError):
        return
    if num_completed and not overwrite:
        raise UserError(
            f"hydra.sweep.dir={folder} is used (it holds a sweep, {num_completed} of its "
            f"{len(jobs)} jobs completed); choose another folder (of `dlrm train`: or set "
            "train.overwrite=true)"
        )


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """For each key its last part, or the whole key where two end alike."""
    last = [key.rsplit(".", 1)[-1] for key in keys]
    return {k: name if last.count(name) == 1 else k for k, name in zip(keys, last, strict=True)}


def describe(job: SweepJob, keys: Sequence[str]) -> list[str]:
    """What differs in a job, for a reader: `exchange=kv`, one for each of `keys` that it sets."""
    values = _values(job)
    return [f"{name}={values[key]}" for key, name in short_names(keys).items() if key in values]


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _values(job: SweepJob) -> dict[str, str]:
    return {_key(text): text.partition("=")[2] for text in job.overrides}


def _number_at(source: Any, path: str) -> float | None:
    for key in path.split("."):
        source = source.get(key) if isinstance(source, Mapping) else None
    if isinstance(source, bool) or not isinstance(source, (int, float)):
        return None
    return source if math.isfinite(source) else None


def _read_result(folder: Path | None) -> Mapping[str, Any]:
    try:
        result = json.loads((folder / "result.json").read_text(encoding="utf-8")) if folder else {}
    except (OSError, ValueError):
        return {}
    return result if isinstance(result, dict) else {}


def _to_json(values: Any) -> bytes:
    return (json.dumps(values, indent=1, allow_nan=False) + "\n").encode()
