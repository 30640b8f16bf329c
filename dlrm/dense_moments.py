"""Means and deviations of standardised columns belong to the dense weights that were trained with
them; a run that starts from these on other data has others.

An input is `(x - mean) / deviation` of its data's moments. What the stored weights expect of it is
an affine function of that, so the first layer takes it up: the model gives each raw value what it
gave before. A missing value is an input of 0: the mean of the data that it is missing in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from data.errors import UserError
from data.manifest import Manifest, load_manifest
from dlrm.checkpoint import CheckpointInfo

FIRST_WEIGHT, FIRST_BIAS = "bottom.0.weight", "bottom.0.bias"


@dataclass(frozen=True)
class MovedColumn:
    """A standardised column whose moments differ.

    Attributes:
        name: of the column.
        position: among the dense columns.
        old: (mean, deviation) of the checkpoint's run.
        new: of the data of this one.
    """

    name: str
    position: int
    old: tuple[float, float]
    new: tuple[float, float]

    def describe(self) -> str:
        """For the user."""
        old, new = (f"mean {mean:g}, deviation {dev:g}" for mean, dev in (self.old, self.new))
        return f"dense feature {self.name}: stored {old}, here {new}"


def moved_columns(
    info: CheckpointInfo, manifest: Manifest, data_root: Path | None = None
) -> tuple[list[MovedColumn], list[str]]:
    """The columns whose moments differ, and the names of those whose stored ones aren't known.

    Only columns that both have in the same place are compared: others are differences of another
    kind.

    Args:
        info: the checkpoint.
        manifest: of the data of this run.
        data_root: where the checkpoint's data are now; None: where they were.
    """
    values, new = info.values, _moments_of(manifest)
    old, places = _stored_moments(info, data_root), values["dense_columns"]
    moved, unknown = [], []
    for position, name in enumerate(manifest.dense_columns):
        # Checkpoints of before transforms were recorded don't say.
        transform = values.get("dense_transforms", {}).get(name, "standardise")
        is_common = position < len(places) and places[position] == name
        if name not in new or not is_common or transform != "standardise":
            continue
        if old is None or name not in old:
            unknown.append(name)
        elif old[name] != new[name]:
            of_both = ((m[name][0], m[name][1]) for m in (old, new))
            moved.append(MovedColumn(name, position, *of_both))
    return moved, unknown


def rescale_first_layer(model: Mapping[str, Tensor], moved: list[MovedColumn]) -> None:
    """Has the first layer take what `moved` columns are now, in place; computed in fp64.

    `(x - m) / d` was expected, `(x - m') / d'` comes: its weight becomes `w · d' / d`, and the bias
    gains `w · (m' - m) / d`.
    """
    weight, bias = model[FIRST_WEIGHT], model[FIRST_BIAS]
    wide, offset = weight.to(torch.float64), bias.to(torch.float64)
    for column in moved:
        (old_mean, old_dev), (new_mean, new_dev) = column.old, column.new
        offset += wide[:, column.position] * ((new_mean - old_mean) / old_dev)
        wide[:, column.position] *= new_dev / old_dev
    weight.copy_(wide)
    bias.copy_(offset)


def _stored_moments(
    info: CheckpointInfo, data_root: Path | None
) -> Mapping[str, list[float]] | None:
    """Those of the checkpoint; of one that doesn't record them, its data's, where they are still
    there."""
    found: Mapping[str, list[float]] | None = info.values.get("dense_moments")
    if found is not None:
        return found
    try:
        manifest = load_manifest(data_root or Path(info.values["data_root"]))
    except (UserError, OSError, KeyError):
        return None
    if manifest.digest() != info.values["data_digest"]:
        return None
    return _moments_of(manifest)


def _moments_of(manifest: Manifest) -> dict[str, list[float]]:
    return {name: [m.mean, m.deviation] for name, m in manifest.moments.items()}
