"""The frame of all that makes a dataset: what is refused, the lock, what a crash has left."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from data.commit import is_cut_short, recover
from data.errors import UserError
from data.manifest import MANIFEST, Manifest
from data.ownership import check_root
from data.work_folder import LOCK, MARKER, WORK, locked


@contextmanager
def making(
    root: Path, inputs: Sequence[Path], wait: Callable[[str], None] | None = None
) -> Iterator[Path]:
    """Within, this process alone makes a dataset in `root`; gives the work folder (see `locked`).

    Args:
        root: the dataset folder.
        inputs: the raw files.
        wait: see `locked`.

    Raises:
        UserError: where another process is making one, or `root` holds what isn't ours.
    """
    if not os.path.lexists(root / LOCK):  # Else another process may be about to change it.
        check_root(root, inputs)
    with locked(root, wait) as work:
        check_root(root, inputs)
        recover(root, work)
        yield work


def tidy(root: Path, manifest: Manifest) -> None:
    """Ends what a process began that was killed after the dataset in `root` had become whole.

    Does nothing where another process is at it, or on a disk that is only read: the dataset is
    usable as it is. What an interrupted `data.overwrite=true` has parsed is kept.
    """
    if not (root / WORK).is_dir():
        return
    is_signed_only = not {entry.name for entry in os.scandir(root / WORK)} - {MARKER}
    if not is_signed_only and not is_cut_short(root, manifest):
        return
    try:
        with locked(root) as work:
            recover(root, work)
    except UserError:
        return
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise


def check_same_kind(root: Path, name: str, *, is_synthetic: bool) -> None:
    """Refuses to replace a dataset by one of another kind: that was hardly meant.

    Args:
        root: a folder that holds a dataset, or none.
        name: of the schema of the new one.
        is_synthetic: whether the new one is generated.

    Raises:
        UserError: naming what is there.
    """
    if not (root / MANIFEST).exists():
        return
    values = json.loads((root / MANIFEST).read_text(encoding="utf-8"))
    found = values.get("schema", {}).get("name")
    was_synthetic = values.get("synthetic") is not None
    if (found, was_synthetic) != (name, is_synthetic):
        how = "generated" if was_synthetic else "prepared from raw files"
        raise UserError(
            f"data.root={root} holds another kind of data ({found}, {how}), which "
            "data.overwrite=true doesn't replace; choose another data.root, or remove the folder"
        )
