"""A command that names a dataset's folder and no data: the folder's manifest says which data it is.

`data=synthetic` is the default, so that `dlrm train` works with nothing given. It isn't meant where
`data.root=` alone is given: neither for a folder that holds other data, nor for a misspelt one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from data.errors import UserError
from data.manifest import MANIFEST, load_manifest
from data.synthetic import SyntheticConfig

# Whoever gives one of these has named the data.
_NAMING = ("data=", "data.synthetic.", "data.synthetic=", "data.name=")


def fill_in_stored_data(composed: DictConfig, overrides: Sequence[str]) -> None:
    """Replaces the default data of a composed configuration by what lies in `data.root`.

    Args:
        composed: changed in place, so that the run's config.yaml tells what was used.
        overrides: of the command line.

    Raises:
        UserError: where nothing is prepared there, or a key of the default schema is overridden.
    """
    given = [text.lstrip("+~") for text in overrides]
    data: Any = composed.get("data")
    if data is None or data.get("root") is None or data.get("synthetic") is None:
        return
    if any(text.startswith(_NAMING) for text in given):
        return
    root = Path.cwd() / Path(data.root).expanduser()
    is_there = (root / MANIFEST).is_file()
    # An experiment may say what to generate; a folder of data that is named beside it comes first.
    is_named_beside = is_there and any(text.startswith("data.root=") for text in given)
    if any(text.startswith("experiment=") for text in given) and not is_named_beside:
        return
    if not is_there:
        raise UserError(
            f"data.root={data.root}: no prepared dataset there ({root}), and no data= says what to "
            "prepare in it; name the folder of one, or data= with raw files, or data=synthetic to "
            "generate rows there"
        )
    of_schema = [text for text in given if text.startswith("data.schema")]
    if of_schema:
        raise UserError(
            f"{of_schema[0]}: the schema is that of the dataset in data.root={data.root}; name "
            "data= to ask for another"
        )
    manifest = load_manifest(root)
    synthetic = None
    if manifest.synthetic is not None:
        settings = {k: v for k, v in manifest.synthetic.items() if k != "generator"}
        synthetic = OmegaConf.structured(SyntheticConfig(**settings))
    with open_dict(composed):
        data.name = manifest.schema.name
        data.synthetic = synthetic
        if synthetic is None:
            data.schema = OmegaConf.structured(manifest.schema)
