"""How a finished dataset takes its place: at every moment the old one or the new one is whole.

A dataset is built in `root/.work/new`. When all of it is on disk, that folder is renamed to
`root/.work/whole-DIGEST`, after the manifest's digest, and then

- where `root` held no dataset, its files are moved to their places, and the manifest last;
- where it held one, the manifest is replaced first, which is one rename. From then on whoever reads
  `root` finds the new files in `whole-DIGEST` (`dataset_file`), until each has been moved to its
  place. `replaced.json` lists the files of the old dataset.

`recover` ends what a crash interrupted: forwards once the manifest is in its place, else backwards.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from data.errors import UserError
from data.files import file_sha256, flush_folder, write_whole
from data.manifest import MANIFEST, Manifest
from data.ownership import REPLACED, Listing, listing_of, owned_files
from data.work_folder import STAGED, WORK

_BUILT = "new"


def build_folder(work: Path) -> Path:
    """An empty folder to build a dataset in. Call `recover` before."""
    folder = _emptied(work)
    for moved in work.glob(f"{STAGED}*"):
        shutil.rmtree(moved)
    folder.mkdir()
    return folder


def commit(root: Path, work: Path, manifest: Manifest) -> None:
    """Puts the dataset that was built in `build_folder(work)` in its place.

    Its files must be on disk, their folders needn't.

    Raises:
        UserError: where a file that isn't ours has come to lie in the way meanwhile.
    """
    built = work / _BUILT
    is_overwritten = (root / MANIFEST).exists()
    if is_overwritten:
        replaced = json.dumps(listing_of(root / MANIFEST))
        write_whole(built / REPLACED, replaced.encode())
    manifest.save(built)
    for folder in (*(path for path in built.iterdir() if path.is_dir()), built):
        flush_folder(folder)
    staged = work / f"{STAGED}{_short(manifest.digest())}"
    built.rename(staged)
    flush_folder(work)
    listing = listing_of(staged / MANIFEST)
    if not is_overwritten:
        _move(staged, root, listing)
    os.replace(staged / MANIFEST, root / MANIFEST)
    flush_folder(root)
    if is_overwritten:
        _move(staged, root, listing)
    # Who removes the work folder removes this part of it last: until then it tells what is done.


def recover(root: Path, work: Path) -> None:
    """Ends what a process that is gone has begun. Call it under the lock.

    Raises:
        UserError: where a file that isn't ours lies in the way.
    """
    is_finished = (root / MANIFEST).is_file()
    # A manifest's bytes are what its digest is taken of.
    committed = f"{STAGED}{_short(file_sha256(root / MANIFEST))}" if is_finished else ""
    for staged in work.glob(f"{STAGED}*"):
        if staged.name == committed and not (staged / MANIFEST).exists():
            _move(staged, root, listing_of(root / MANIFEST))
            continue
        if not is_finished and (staged / MANIFEST).exists():
            _move_back(staged, root, listing_of(staged / MANIFEST))
        # Under this name, half removed, it can't be mistaken for one whose manifest is in place.
        staged.rename(_emptied(work))


def is_cut_short(root: Path, manifest: Manifest) -> bool:
    """Whether files of the dataset in `root` still wait to be moved to their places."""
    return _staged_folder(root, manifest) is not None


def dataset_file(root: Path, manifest: Manifest, name: str) -> Path:
    """Where a file lies that the manifest of the dataset in `root` lists as `name`."""
    staged = _staged_folder(root, manifest)
    if staged is not None and (staged / name).is_file():
        return staged / name
    return root / name


def _staged_folder(root: Path, manifest: Manifest) -> Path | None:
    if not (root / WORK).is_dir():  # As almost always: a digest takes its time.
        return None
    staged = root / WORK / f"{STAGED}{_short(manifest.digest())}"
    return staged if staged.is_dir() else None


def _move(staged: Path, root: Path, listing: Listing) -> None:
    """Moves all files that are still in `staged`; removes those of the dataset before."""
    replaced: Listing = {}
    if (staged / REPLACED).is_file():
        replaced = json.loads((staged / REPLACED).read_text(encoding="utf-8"))
    waiting = [name for name in listing if (staged / name).is_file()]
    foreign = [name for name in waiting if os.path.lexists(root / name) and name not in replaced]
    if foreign:
        raise UserError(
            f"data.root={root}: {', '.join(foreign[:5])} came to lie in the way of the new dataset "
            "while it was prepared; move it away, and prepare once more"
        )
    for name in waiting:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(staged / name, root / name)
    for name in sorted(set(replaced) - set(listing)):
        (root / name).unlink(missing_ok=True)
    folders = {(root / name).parent for name in [*replaced, *listing]}
    for folder in sorted(folders):
        if folder.is_dir():
            flush_folder(folder)
    flush_folder(root)


def _move_back(staged: Path, root: Path, listing: Listing) -> None:
    """Removes files that a process moved to `root` before it could write the manifest there."""
    owned = owned_files(root)
    for name in listing:
        if name in owned and not (staged / name).exists():
            (root / name).unlink(missing_ok=True)


def _emptied(work: Path) -> Path:
    """The build folder's path, where there is nothing any more."""
    folder = work / _BUILT
    if folder.exists():
        shutil.rmtree(folder)
    return folder


def _short(digest: str) -> str:
    return digest[:12]
