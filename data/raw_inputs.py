"""Which files a path, a pattern or a folder names."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from data.errors import UserError

_MARKS = (".", "_")


def expand_inputs(spec: str | list[str], base: Path, key: str) -> list[Path]:
    """The files that paths, folders or patterns name, numbers in names sorted as numbers.

    A folder, named or matched, stands for all files in it and below it. In a pattern `**` stands
    for any number of folders. Files and folders whose names begin with `.` or `_` (markers such as
    `_SUCCESS`, hidden and unfinished files) are left out unless the pattern itself begins so.

    Raises:
        UserError: where a path or pattern names no file, naming `key`.
    """
    patterns = [spec] if isinstance(spec, str) else list(spec)
    files: list[Path] = []
    for pattern in patterns:
        files += _files_of(pattern, base, key)
    counts = Counter(path.resolve() for path in files)
    twice = sorted(str(path) for path, times in counts.items() if times > 1)
    if twice:
        raise UserError(f"{key}: named twice: {', '.join(twice)}")
    return files


def _files_of(pattern: str, base: Path, key: str) -> list[Path]:
    named = Path(pattern).expanduser()
    full = base / named
    if full.is_file():
        return [full]
    if full.is_dir():
        found = _in_folder(full, key)
        if not found:
            raise UserError(
                f"{key}={pattern}: the folder holds no file (files that begin with . or _ don't "
                f"count; looked in {full})"
            )
        return found
    in_base = str(Path(glob.escape(str(base))) / named)
    marked = any(part.startswith(_MARKS) for part in named.parts if part not in (".", ".."))
    matches = [Path(name) for name in glob.glob(in_base, recursive=True)]
    matched: set[Path] = set()
    for path in matches:
        if not marked and _is_marked(path, base, named):
            continue
        if path.is_dir():
            # `**` matches the folders above the files as well as the files.
            matched.update([] if named.name == "**" else _in_folder(path, key))
        elif path.is_file():
            matched.add(path)
    if not matched:
        left_out = f"; it matches {matches[0]} and no file beside it" if matches else ""
        raise UserError(f"{key}={pattern}: no such file (looked for {full}{left_out})")
    return sorted(matched, key=lambda path: _natural_order(str(path)))


def _is_marked(path: Path, base: Path, named: Path) -> bool:
    """Whether the part of a path that its pattern left open holds a marker or a hidden file."""
    fixed = list((base / named).parts)
    first_open = next((n for n, part in enumerate(fixed) if glob.has_magic(part)), len(fixed))
    return any(part.startswith(_MARKS) for part in path.parts[first_open:])


def _in_folder(folder: Path, key: str) -> list[Path]:
    files = [path for path in _walk(folder, key) if path.is_file()]
    return sorted(files, key=lambda path: _natural_order(str(path)))


def _walk(folder: Path, key: str) -> Iterator[Path]:
    seen = set()
    for place, folders, names in os.walk(folder, followlinks=True):
        if "manifest.json" in names and "train" in folders:
            raise UserError(
                f"{key}: {place} holds a prepared dataset, no raw files; train on it with "
                "data.root=, or name the raw files"
            )
        seen.add(os.path.realpath(place))
        folders[:] = [
            name
            for name in folders
            if not name.startswith(_MARKS)
            and os.path.realpath(os.path.join(place, name)) not in seen
        ]
        yield from (Path(place, name) for name in names if not name.startswith(_MARKS))


def _natural_order(name: str) -> list[int | str]:
    parts = re.split(r"([0-9]+)", name)
    return [int(part) if n % 2 else part for n, part in enumerate(parts)]
