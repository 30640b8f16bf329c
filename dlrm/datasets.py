"""From `data.*` keys to a prepared dataset: found, prepared or generated, and checked."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from data.errors import UserError
from data.manifest import MANIFEST, Manifest, check_same_schema, load_manifest
from data.parquet import PreparedDataset
from data.prepare import RawInputs, prepare
from data.progress import ProgressListener
from data.raw_inputs import expand_inputs
from data.schema import schema_to_dict
from data.split import PARTS
from data.synthetic import synthesise
from dlrm.config import DataConfig


def open_dataset(data: DataConfig, base: Path, listener: ProgressListener) -> PreparedDataset:
    """The dataset that a configuration names; raw files are prepared where they are not yet.

    Args:
        data: the `data.*` keys.
        base: folder that relative paths start from.
        listener: follows the preparation.

    Raises:
        UserError: where nothing names data, or `data.root` holds another dataset.
    """
    root = dataset_root(data, base)
    make_dataset(data, base, listener)
    return PreparedDataset(root)


def make_dataset(data: DataConfig, base: Path, listener: ProgressListener) -> Manifest:
    """Prepares or generates what `open_dataset` opens; returns its manifest.

    Raises:
        UserError: see `open_dataset`.
    """
    root = dataset_root(data, base)
    if data.synthetic is not None:
        return synthesise(data.synthetic, root, listener, overwrite=data.overwrite)
    if data.raw or data.raw_train:
        return prepare(
            data.schema, _raw_inputs(data, base), root, listener, overwrite=data.overwrite
        )
    if not (root / MANIFEST).is_file():
        raise UserError(
            f"data.root={root}: no prepared dataset there, and no raw files are named to prepare "
            "it from (data.raw=, or data.raw_train= and data.raw_test=)"
        )
    manifest = load_manifest(root)
    check_same_schema(manifest, data.schema, root)
    return manifest


def dataset_root(data: DataConfig, base: Path) -> Path:
    """The folder of the prepared dataset: `data.root`, or one under `data.cache`, named after
    schema, starting folder and the raw files' names.

    Raises:
        UserError: where neither a root nor raw files are given.
    """
    if data.root is not None:
        return base / Path(data.root).expanduser()
    cache = base / Path(data.cache).expanduser()
    if data.synthetic is not None:
        return cache / f"synthetic-{data.synthetic.digest()}"
    named = [data.raw, data.raw_train, data.raw_valid, data.raw_test]
    if not any(named):
        raise UserError(
            f"data={data.name} needs raw files (data.raw=FILE, or data.raw_train=FILE and "
            "data.raw_test=FILE) or a prepared dataset (data.root=FOLDER)"
        )
    text = json.dumps([schema_to_dict(data.schema), str(base), named], sort_keys=True)
    return cache / f"{data.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _raw_inputs(data: DataConfig, base: Path) -> RawInputs:
    if data.raw:
        if data.schema.split.kind == "given":
            raise UserError(
                "data.raw is set, but data.schema.split.kind=given; name data.raw_train and "
                "data.raw_test, or choose split.kind=in_order, by_file or random"
            )
        return RawInputs(expand_inputs(data.raw, base, "data.raw"))
    if data.schema.split.kind != "given":
        raise UserError(
            f"data.raw_train is set, but data.schema.split.kind={data.schema.split.kind}; set "
            "data.schema.split.kind=given, or name all files with data.raw"
        )
    files: list[Path] = []
    file_parts: list[int] = []
    for part, name in enumerate(PARTS):
        spec = getattr(data, f"raw_{name}")
        found = expand_inputs(spec, base, f"data.raw_{name}") if spec else []
        known = {path.resolve(): PARTS[p] for path, p in zip(files, file_parts, strict=True)}
        for path in found:
            if path.resolve() in known:
                raise UserError(
                    f"data.raw_{name}: {path} is named by data.raw_{known[path.resolve()]} too"
                )
        files += found
        file_parts += [part] * len(found)
    return RawInputs(files, file_parts)
