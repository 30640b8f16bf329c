"""Which files of a dataset folder this program wrote: it replaces and deletes no others.

Known are the files that the manifest in the folder lists, with the size or digest that it records,
and those that a finished dataset brought there on its way (see `data/commit.py`). Links are never
followed: a link in the folder is somebody else's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from data.errors import UserError
from data.files import file_sha256
from data.manifest import MANIFEST
from data.work_folder import LOCK, STAGED, WORK, check_work_folder

REPLACED = "replaced.json"
# Of each file of a dataset its size in bytes or its SHA-256.
Listing = Mapping[str, int | str]


def check_root(root: Path, inputs: Sequence[Path]) -> None:
    """Refuses to prepare in a folder that holds anything which isn't a dataset's own.

    Args:
        root: where a dataset is to be written; it needn't exist.
        inputs: the raw files.

    Raises:
        UserError: naming what is in the way. Nothing has been touched.
    """
    if not os.path.lexists(root):
        return
    if not root.is_dir():
        raise UserError(f"data.root={root} is no folder; choose another data.root")
    _check_inputs(root, inputs)
    check_work_folder(root)
    owned = owned_files(root)
    foreign = [name for name in _files_below(root) if not _is_owned(root / name, owned.get(name))]
    if foreign:
        more = f" and {len(foreign) - 5} more" if foreign[5:] else ""
        raise UserError(
            f"data.root={root} holds files that `dlrm prepare` didn't write: "
            f"{', '.join(foreign[:5])}{more}. Nothing was touched; choose another data.root, or "
            "move them away"
        )


def listing_of(manifest_path: Path) -> Listing:
    """The files that a manifest lists, that of any format.

    Raises:
        UserError: where it is no manifest of a dataset.
    """
    try:
        values = json.loads(manifest_path.read_text(encoding="utf-8"))
        int(values["format_version"])
        files: dict[str, Any] = {
            entry["file"]: int(entry["bytes"])
            for part in values["parts"].values()
            for entry in part["files"]
        }
        return files | {str(name): str(digest) for name, digest in values["outputs"].items()}
    except (IsADirectoryError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{manifest_path} isn't the manifest of a dataset, or is damaged: what it lists can't "
            "be told from other files. Nothing was touched; choose another data.root, or move the "
            "folder away"
        ) from error


def owned_files(root: Path) -> dict[str, tuple[int | str, ...]]:
    """By path below `root` what a file of ours may be there: sizes or digests."""
    listings: list[Listing] = []
    if os.path.lexists(root / MANIFEST):
        listings.append(listing_of(root / MANIFEST))
    for staged in (root / WORK).glob(f"{STAGED}*"):
        if (staged / MANIFEST).is_file():
            listing = listing_of(staged / MANIFEST)
            listings.append({n: v for n, v in listing.items() if not (staged / n).exists()})
        if (staged / REPLACED).is_file():
            listings.append(json.loads((staged / REPLACED).read_text(encoding="utf-8")))
    owned: dict[str, tuple[int | str, ...]] = {}
    for listing in listings:
        for name, value in listing.items():
            owned[name] = (*owned.get(name, ()), value)
    return owned


def _is_owned(path: Path, expected: tuple[int | str, ...] | None) -> bool:
    if expected is None or path.is_symlink() or not path.is_file():
        return False
    size = path.stat().st_size
    texts = [value for value in expected if isinstance(value, str)]
    return size in expected or (bool(texts) and file_sha256(path) in texts)


def _check_inputs(root: Path, inputs: Sequence[Path]) -> None:
    """By real path and, for links of either kind, by the file itself."""
    real = root.resolve()
    identities = {(stat.st_dev, stat.st_ino) for stat in (path.stat() for path in inputs)}
    below = [path for path in inputs if path.resolve().is_relative_to(real)]
    if not below and identities:
        for name in _files_below(root):
            stat = os.lstat(root / name)
            if (stat.st_dev, stat.st_ino) in identities:
                below.append(root / name)
    if below:
        shown = ", ".join(str(path) for path in below[:5])
        raise UserError(
            f"data.root={root} holds raw files that it is to be prepared from: {shown}. Nothing "
            "was touched; choose a data.root apart from them"
        )


def _files_below(root: Path) -> Iterator[str]:
    """Paths of all but folders, the lock, the manifest and the work folder, relative to `root`."""
    for folder, folders, files in os.walk(root):
        below = Path(folder).relative_to(root)
        is_top = folder == str(root)
        links = [n for n in [*folders, *files] if os.path.islink(os.path.join(folder, n))]
        folders[:] = sorted(n for n in folders if n not in links and not (is_top and n == WORK))
        for name in sorted({*files, *links}):
            # The lock is looked at by `check_work_folder`, the manifest by `listing_of`.
            is_known = is_top and (name == LOCK or (name == MANIFEST and name not in links))
            if not is_known:
                yield str(below / name)
