"""`manifest.json`: what a prepared dataset holds. It is written last, so a folder that has one is
complete; everything that reads a dataset starts here."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.errors import SchemaMismatch, UserError
from data.files import write_whole
from data.lanes import PartFile
from data.schema import (
    Feature,
    Schema,
    resolve_features,
    schema_differences,
    schema_from_dict,
    schema_to_dict,
)
from data.split import PARTS
from data.transform import Moments

FORMAT_VERSION = 2
"""With hashed tables whose keys are mixed; all else is still written as the oldest."""
OLDEST_FORMAT_VERSION = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class InputFile:
    """A raw file: its name (without folder), size, digest and rows."""

    file: str
    num_bytes: int
    sha256: str
    rows: int
    blank_lines: int


@dataclass(frozen=True)
class PartInfo:
    """One of train, valid, test.

    Attributes:
        rows: number of rows.
        files: in order.
        lane_group_rows: rows of a full row group.
        label_rate: share of positive labels, or None without rows.
        unknown: ids replaced by the unknown row (or last row), or dropped, by feature.
        missing: missing values by feature.
        ids: ids in all, by feature.
        missing_dense: missing values by dense column; None where it was prepared by a version that
            didn't count them.
    """

    rows: int
    files: list[PartFile]
    lane_group_rows: int
    label_rate: float | None
    unknown: dict[str, int]
    missing: dict[str, int]
    ids: dict[str, int]
    missing_dense: dict[str, int] | None = None

    def missing_dense_share(self) -> dict[str, float]:
        """Share of the rows that lack a value, by dense column; columns with none are left out."""
        missing = self.missing_dense or {}
        return {name: round(n / self.rows, 6) for name, n in missing.items() if n}

    def unknown_id_share(self) -> dict[str, float]:
        """Share of the ids that were unknown, by feature; features with none are left out."""
        return {
            name: round(self.unknown[name] / self.ids[name], 6)
            for name in self.ids
            if self.ids[name] and self.unknown[name]
        }


@dataclass(frozen=True)
class Manifest:
    """Everything known about a prepared dataset.

    Attributes:
        schema: as used.
        table_rows: rows of each table.
        inputs: raw files.
        parts: by name.
        moments: of `standardise` columns, training part.
        counts: by feature: `file`, `distinct`, `total`, `share_of_top` (share of the training
            part's look-ups that go to the 1, 10, 100, … most frequent ids), and of hashed ones
            `distinct_tokens`, the tokens that share the `distinct` rows.
        outputs: SHA-256 of every other output file, by path.
        extra_columns: further fp32 columns of the parts.
        synthetic: the generator's settings, or None for real data.
        hash_rule: how hashed tables make rows of keys, one of `HASH_RULES`.
    """

    schema: Schema
    table_rows: dict[str, int]
    inputs: list[InputFile]
    parts: dict[str, PartInfo]
    moments: dict[str, Moments]
    counts: dict[str, dict[str, Any]]
    outputs: dict[str, str]
    extra_columns: list[str] = field(default_factory=list)
    synthetic: dict[str, Any] | None = None
    hash_rule: str = "modulo"

    @property
    def features(self) -> tuple[Feature, ...]:
        """The sparse features in order."""
        return resolve_features(self.schema, self.hash_rule)

    @property
    def dense_columns(self) -> list[str]:
        """The dense features in order."""
        return list(self.schema.dense)

    def unknown_id_share(self, part: str) -> dict[str, float]:
        """Share of a part's ids that were unknown, by feature; features with none are left out."""
        return self.parts[part].unknown_id_share()

    def has_file_parts(self, file_parts: list[int] | None) -> bool:
        """Whether each part holds the rows of the input files given for it (None: by the rule)."""
        if file_parts is None:
            return True
        rows = dict.fromkeys(PARTS, 0)
        for entry, part in zip(self.inputs, file_parts, strict=True):
            rows[PARTS[part]] += entry.rows
        return all(rows[name] == self.parts[name].rows for name in PARTS)

    def to_json(self) -> str:
        """Canonical text: equal datasets have equal manifests."""
        values = {
            "format_version": OLDEST_FORMAT_VERSION,
            "schema": schema_to_dict(self.schema),
            "tables": self.table_rows,
            "inputs": [
                {
                    "file": i.file,
                    "bytes": i.num_bytes,
                    "sha256": i.sha256,
                    "rows": i.rows,
                    "blank_lines": i.blank_lines,
                }
                for i in self.inputs
            ],
            "parts": {
                name: {
                    "rows": part.rows,
                    "lane_group_rows": part.lane_group_rows,
                    "label_rate": part.label_rate,
                    "files": [f.to_dict() for f in part.files],
                    "ids": part.ids,
                    "unknown": part.unknown,
                    "missing": part.missing,
                    # Left out, the digest of an older dataset stays what it was.
                    **({} if part.missing_dense is None else {"missing_dense": part.missing_dense}),
                }
                for name, part in self.parts.items()
            },
            "moments": {
                name: {"count": m.count, "mean": m.mean, "squares": m.squares}
                for name, m in self.moments.items()
            },
            "counts": self.counts,
            "outputs": self.outputs,
            "extra_columns": self.extra_columns,
            "synthetic": self.synthetic,
        }
        if self.hash_rule != "modulo":
            # A format of its own: a program that doesn't know the rule must not read it. Older
            # datasets keep their text, and with it the digest that runs know them by.
            values |= {"format_version": FORMAT_VERSION, "hash_rule": self.hash_rule}
        return json.dumps(values, indent=1) + "\n"

    def save(self, root: Path) -> None:
        """Makes the dataset complete."""
        write_whole(root / MANIFEST, self.to_json().encode())

    def digest(self) -> str:
        """SHA-256 of the manifest, which holds the digests of all else."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def load_manifest(root: Path) -> Manifest:
    """Reads a dataset's manifest.

    Raises:
        UserError: where there is none (not prepared, or not to the end) or it is of another format.
    """
    path = root / MANIFEST
    if not path.is_file():
        raise UserError(
            f"data.root={root}: no prepared dataset there (no {MANIFEST}); run `dlrm prepare` "
            "with the same data= and data.root="
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return _from_json(values, root)
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error})") from error


def _from_json(values: dict[str, Any], root: Path) -> Manifest:
    if values.get("format_version") not in (OLDEST_FORMAT_VERSION, FORMAT_VERSION):
        raise UserError(
            f"data.root={root}: prepared in format {values.get('format_version')}, this version "
            f"reads {OLDEST_FORMAT_VERSION} and {FORMAT_VERSION}; prepare it again with "
            "data.overwrite=true"
        )
    parts = {}
    for name, part in values["parts"].items():
        files = [PartFile(f["file"], f["rows"], f["bytes"], f["sha256"]) for f in part["files"]]
        parts[name] = PartInfo(
            part["rows"],
            files,
            part["lane_group_rows"],
            part["label_rate"],
            part["unknown"],
            part["missing"],
            part["ids"],
            part.get("missing_dense"),
        )
    return Manifest(
        schema=schema_from_dict(values["schema"]),
        table_rows=values["tables"],
        inputs=[
            InputFile(i["file"], i["bytes"], i["sha256"], i["rows"], i["blank_lines"])
            for i in values["inputs"]
        ],
        parts=parts,
        moments={name: Moments(**m) for name, m in values["moments"].items()},
        counts=values["counts"],
        outputs=values["outputs"],
        extra_columns=values["extra_columns"],
        synthetic=values["synthetic"],
        hash_rule=values.get("hash_rule", "modulo"),
    )


def check_same_schema(manifest: Manifest, schema: Schema, root: Path) -> None:
    """Refuses a dataset that was prepared under another schema.

    Raises:
        SchemaMismatch: listing what differs.
    """
    lines = schema_differences(manifest.schema, schema)
    if lines:
        shown = "\n  ".join(lines[:20]) + (f"\n  and {len(lines) - 20} more" if lines[20:] else "")
        raise SchemaMismatch(
            f"data.root={root} was prepared under another schema:\n  {shown}\n"
            "choose another data.root, or prepare it again with data.overwrite=true"
        )
