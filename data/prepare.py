"""`prepare`: raw files → a prepared dataset folder, streaming, in bounded memory.

Three passes, of which only the first touches raw text:

1. *parse*: each raw file becomes blocks of encoded columns, spooled under `root/.work`. A file
   whose blocks are complete is kept for a rerun; it is recognised by its content's digest.
2. *count*: tokens of the training part are counted (dictionaries), moments are taken.
3. *write*: blocks are mapped to rows of their tables, transformed, and written in lanes.

The dataset is built in the work folder and takes its place when it is whole (`data/commit.py`).
Whatever stops the process before leaves what was there before, and nothing that looks finished.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from data.commit import build_folder, commit
from data.count_pass import CountPass
from data.errors import UserError
from data.files import file_sha256
from data.making import check_same_kind, making, tidy
from data.manifest import MANIFEST, Manifest, check_same_schema, load_manifest
from data.parse_pass import ParsePass
from data.progress import ProgressListener, SilentListener
from data.raw import RawReader
from data.row_mapper import RowMapper
from data.schema import Schema, check_schema
from data.split import SplitRule
from data.write_pass import WritePass


@dataclass(frozen=True)
class RawInputs:
    """Raw files in order and, where the user gave the split, the part of each file."""

    files: list[Path]
    file_parts: list[int] | None = None


def prepare(
    schema: Schema,
    inputs: RawInputs,
    root: Path,
    listener: ProgressListener | None = None,
    *,
    overwrite: bool = False,
) -> Manifest:
    """Prepares a dataset; returns at once where `root` already holds the same.

    Raises:
        UserError: for a schema that can't be used, or a `root` that holds another dataset, files
            that aren't ours, or the raw files themselves.
        RawDataError: for a raw file that breaks the schema, naming file and line.
    """
    check_schema(schema)
    listener = listener or SilentListener()
    # A finished dataset is only read: no lock, no trace, and it may lie on a read-only disk.
    if (root / MANIFEST).exists() and not overwrite:
        manifest = _reuse(schema, inputs, root, listener)
        tidy(root, manifest)
        return manifest
    with making(root, inputs.files) as work:
        if (root / MANIFEST).exists() and not overwrite:  # Another process was faster.
            return _reuse(schema, inputs, root, listener)
        check_same_kind(root, schema.name, is_synthetic=False)
        manifest = _run_passes(schema, inputs, root, work, listener)
        commit(root, work, manifest)
        return manifest


def _reuse(schema: Schema, inputs: RawInputs, root: Path, listener: ProgressListener) -> Manifest:
    """The finished dataset in `root`, if it is the one asked for.

    Raises:
        SchemaMismatch: see `check_same_schema`.
        UserError: where the raw files are others.
    """
    manifest = load_manifest(root)
    if manifest.synthetic is not None:
        raise UserError(
            f"data.root={root} holds generated data (data=synthetic); choose another data.root"
        )
    check_same_schema(manifest, schema, root)
    listener.phase("check inputs", sum(path.stat().st_size for path in inputs.files))
    found = []
    for path in inputs.files:
        found.append(file_sha256(path))
        listener.advance(path.stat().st_size, 0)
    stored = [i.sha256 for i in manifest.inputs]
    if found != stored or not manifest.has_file_parts(inputs.file_parts):
        names = [
            p.name for p, digest in zip(inputs.files, found, strict=True) if digest not in stored
        ]
        what = f"changed or new: {', '.join(names)}" if names else "other files, order or parts"
        raise UserError(
            f"data.root={root} was prepared from other raw files ({what}); choose another "
            "data.root, or prepare it again with data.overwrite=true"
        )
    return manifest


def _run_passes(
    schema: Schema, inputs: RawInputs, root: Path, work: Path, listener: ProgressListener
) -> Manifest:
    """Parse, count, write; the dataset lies whole in the build folder, without its manifest."""
    built = build_folder(work)
    reader = RawReader(schema)
    spooled = ParsePass(reader, work, listener).run(inputs.files)
    rule = SplitRule(schema.split, [f.info.rows for f in spooled], inputs.file_parts)
    counting = CountPass(schema, reader.features, built, work, listener)
    vocabularies, moments = counting.run(spooled, rule)
    mapper = RowMapper(schema, reader.features, vocabularies, moments)
    parts, counts = WritePass(mapper, built, work, listener).run(spooled, rule)
    if parts["train"].rows == 0:
        raise UserError("no row is left to train on; see data.schema.split and data.raw_train")
    outputs = {
        f"{folder}/{path.name}": file_sha256(path)
        for folder in ("vocabulary", "counts")
        for path in sorted((built / folder).glob("*.parquet"))
    }
    return Manifest(
        schema=schema,
        table_rows={name: vocabulary.rows for name, vocabulary in vocabularies.items()},
        inputs=[f.info for f in spooled],
        parts=parts,
        moments=moments,
        counts=counts,
        outputs=outputs,
        hash_rule="mixed" if any(f.vocabulary == "hash" for f in reader.features) else "modulo",
    )
