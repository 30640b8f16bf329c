"""What this project writes into a run folder. Nothing else in one is ever moved or deleted, and no
link is followed."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from data.errors import UserError

CHECKPOINTS = "checkpoints"
EARLIER_RUN = "earlier-run"
"""Where an overwritten run waits until the new one has a model of its own."""
_MOVING = f"{EARLIER_RUN}.moving"
RUN_FILES = (
    "config.yaml",
    "dataset.json",
    "plan.json",
    "metrics.jsonl",
    "evaluation.json",
    "result.json",
    "report.html",
    "failures.txt",
    "host_timeline.json",
)
_OF_PROFILE = ("trace.*.json.gz", "operators.json", "timeline.json")
_OF_ROOT = ("latest", "best")
_OF_CHECKPOINT = (
    "checkpoint.json",
    "config.yaml",
    "plan.json",
    "dense.safetensors",
    "dense_state.safetensors",
    "rows-*.safetensors",
    "rows-*.json",
)
_STEP = re.compile(r"(\.partial-)?step-\d+")
_EVENTS = "tensorboard/events.out.tfevents.*"


def own_entries(run_path: Path) -> list[Path]:
    """What of a run lies in its folder: files, and the folders that hold nothing but its files."""
    names = [CHECKPOINTS, "profile", *RUN_FILES]
    found = [run_path / name for name in names if os.path.lexists(run_path / name)]
    has_events = not (run_path / "tensorboard").is_symlink()
    return found + (sorted(run_path.glob(_EVENTS)) if has_events else [])


def check_own(run_path: Path) -> None:
    """Refuses to replace a run among whose files are others.

    Raises:
        UserError: naming them; nothing was touched.
    """
    if foreign := list(_foreign(run_path)):
        shown = ", ".join(_described(path, run_path) for path in foreign[:4])
        more = f" and {len(foreign) - 4} more" if len(foreign) > 4 else ""
        raise UserError(
            f"hydra.run.dir={run_path} can't be overwritten: {shown}{more} weren't written by a "
            "run; move them away, or choose another folder"
        )


def has_model(run_path: Path) -> bool:
    """Whether a run has kept a checkpoint, as far as its folder's names tell."""
    return any((run_path / CHECKPOINTS).glob("step-*/checkpoint.json"))


def set_aside(run_path: Path) -> None:
    """Moves a run into `earlier-run/`, in place of what is there; whole, or not at all.

    Raises:
        OSError: where something can't be moved; then all is where it was.
    """
    remove_run(run_path / EARLIER_RUN)
    moving = run_path / _MOVING
    moving.mkdir()
    try:
        for path in own_entries(run_path):
            target = moving / path.relative_to(run_path)
            target.parent.mkdir(exist_ok=True)
            os.rename(path, target)
    except OSError:
        _move_back(run_path)
        raise
    os.rename(moving, run_path / EARLIER_RUN)


def restore(run_path: Path) -> bool:
    """Puts the run in `earlier-run/` back, in place of a later one that has come to nothing; its
    `failures.txt` stays. False where there is none."""
    if not (run_path / EARLIER_RUN).is_dir():
        return False
    for path in own_entries(run_path):
        if path.name != "failures.txt":
            _remove(path)
    os.rename(run_path / EARLIER_RUN, run_path / _MOVING)
    _move_back(run_path)
    return True


def finish_moving(run_path: Path) -> None:
    """Brings back what was under way when a process was killed in `set_aside` or `restore`."""
    if (run_path / _MOVING).is_dir():
        _move_back(run_path)


def remove_run(run_path: Path) -> None:
    """Removes a run's files, and its folder unless it holds others.

    Raises:
        OSError: naming what can't be removed.
    """
    if not run_path.is_dir() or run_path.is_symlink():
        return
    remove_run_files(run_path)
    _rmdir(run_path)


def remove_run_files(run_path: Path) -> None:
    """Removes a run's files; the folder stays.

    Raises:
        OSError: naming what can't be removed.
    """
    for path in own_entries(run_path):
        _remove(path)
    _rmdir(run_path / "tensorboard")


def remove_checkpoint(folder: Path) -> None:
    """Removes a checkpoint's folder, and nothing else that lies in it. Of a link, only the link:
    what was moved away stays."""
    if folder.is_symlink():
        folder.unlink()
        return
    # In this order: it isn't whole from here on, whenever the removal is cut short.
    (folder / "checkpoint.json").unlink(missing_ok=True)
    _remove_matching(folder, _OF_CHECKPOINT)


def remove_profile(run_path: Path) -> None:
    """Removes the profile of an earlier part of a run."""
    folder = run_path / "profile"
    if folder.is_dir() and not folder.is_symlink():
        _remove_matching(folder, _OF_PROFILE)


def _remove(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    elif path.name == "profile":
        _remove_matching(path, _OF_PROFILE)
    elif path.name == CHECKPOINTS:
        for entry in path.iterdir():
            if _STEP.fullmatch(entry.name):
                remove_checkpoint(entry)
        _remove_matching(path, _OF_ROOT)


def _remove_matching(folder: Path, patterns: tuple[str, ...]) -> None:
    for entry in folder.iterdir():
        if _matches(entry, patterns):
            entry.unlink()
    _rmdir(folder)


def _rmdir(folder: Path) -> None:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # Others' files: they stay.
            raise


def _matches(path: Path, patterns: tuple[str, ...]) -> bool:
    name = path.name.removesuffix(".partial")
    return not path.is_dir() and any(fnmatchcase(name, pattern) for pattern in patterns)


def _foreign(run_path: Path) -> Iterator[Path]:
    """What has a name of a run's but isn't of it, and what lies among its files."""
    for name in RUN_FILES:
        if (run_path / name).is_dir():
            yield run_path / name
    if (run_path / "tensorboard").is_symlink():
        yield run_path / "tensorboard"
    for name, patterns in ((CHECKPOINTS, _OF_ROOT), ("profile", _OF_PROFILE)):
        folder = run_path / name
        if folder.is_symlink() or folder.is_file():
            yield folder
        elif folder.is_dir():
            for entry in sorted(folder.iterdir()):
                is_step = name == CHECKPOINTS and _STEP.fullmatch(entry.name)
                if is_step and entry.is_dir() and not entry.is_symlink():
                    yield from (e for e in entry.iterdir() if not _is_own(e, _OF_CHECKPOINT))
                elif not _is_own(entry, patterns):
                    yield entry


def _is_own(path: Path, patterns: tuple[str, ...]) -> bool:
    return not path.is_symlink() and _matches(path, patterns)


def _described(path: Path, run_path: Path) -> str:
    name = str(path.relative_to(run_path))
    return f"{name} (a link to {os.readlink(path)})" if path.is_symlink() else name


def _move_back(run_path: Path) -> None:
    moving = run_path / _MOVING
    for path in own_entries(moving):
        target = run_path / path.relative_to(moving)
        target.parent.mkdir(exist_ok=True)
        if path.name == "failures.txt" and target.exists():
            path.unlink()  # The later run's tells what has just failed.
        else:
            os.replace(path, target)
    for folder in (moving / "tensorboard", moving):
        with contextlib.suppress(FileNotFoundError):
            folder.rmdir()
