"""Which row of a table another run's row becomes: the one of the same token."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa

from data.commit import dataset_file
from data.errors import UserError
from data.files import file_name, file_sha256
from data.manifest import Manifest, load_manifest
from data.parquet import PreparedDataset
from data.schema import Feature
from data.vocabulary import UNKNOWN_ROW, Dictionary, load_dictionary, missing_row
from dlrm.checkpoint import CheckpointInfo
from dlrm.config import WarmStartConfig
from dlrm.tensor_file import names_of

START_ANEW = (
    "start it anew, in both train.warm_start.new_tables and train.warm_start.dropped_tables"
)
_INDEX_INSTEAD = "or take row n for row n with train.warm_start.rows=index"


class RowMatcher:
    """The rows of a checkpoint's tables among those of this run's, by `train.warm_start.rows`.

    Tokens are compared where a table has a dictionary in both datasets. The rows of an identity
    table are its tokens, and where the datasets are the same, or a hash table has as many rows in
    both, row n is row n.

    Args:
        info: the checkpoint.
        dataset: what this run trains on.
        config: says how rows are matched.
    """

    def __init__(
        self, info: CheckpointInfo, dataset: PreparedDataset, config: WarmStartConfig
    ) -> None:
        self._info, self._dataset, self._config = info, dataset, config
        stored = [Feature(**values) for values in info.values["features"]]
        self._old = _by_table(stored)
        self._new = _by_table(dataset.manifest.features)
        is_same = info.values["data_digest"] == dataset.manifest.digest()
        self._by_index = config.rows == "index" or is_same

    def rule_differences(self, tables: Iterable[str]) -> dict[str, str]:
        """By table, why its rows can't be matched."""
        if self._by_index:
            return {}
        found = {table: self._rule_difference(table) for table in tables}
        return {table: text for table, text in found.items() if text is not None}

    def missing_dictionaries(self, tables: Iterable[str]) -> str | None:
        """Why the other dataset's dictionaries can't be had, where some of these tables need them;
        reads its manifest."""
        needing = [t for t in tables if self._new[t][0].vocabulary == "dictionary"]
        if self._by_index or not needing:
            return None
        try:
            root, _ = self._find_old_data()
            for table in needing:
                if not (root / _vocabulary_file(table)).is_file():
                    raise UserError(f"{root / _vocabulary_file(table)} is missing")
        except UserError as error:
            return (
                f"train.warm_start.rows=token needs the dictionaries of the dataset that the "
                f"checkpoint was trained on (tables {names_of(needing)}), and {error}; name its "
                f"folder with train.warm_start.data_root=, {_INDEX_INSTEAD}"
            )
        return None

    def match(self, table: str) -> np.ndarray | None:
        """int64 by row of the checkpoint: this run's row, or -1; None: row n is row n, as far as
        both tables go.

        Memory: both dictionaries of the table, 16 bytes for each token, and 8 for each row.

        Raises:
            UserError: for a dictionary that is missing or damaged.
        """
        if self._by_index:
            return None
        old, new = self._old[table], self._new[table]
        old_rows = self._info.tables[table].rows
        new_rows = self._dataset.manifest.table_rows[table]
        if new[0].vocabulary == "identity":
            return _match_identity(_num_tokens(old, old_rows), old_rows, new, new_rows)
        if new[0].vocabulary == "hash":
            return None
        root, manifest = self._find_old_data()
        old_dictionary = _read_dictionary(root, manifest, table)
        new_dictionary = _read_dictionary(self._dataset.root, self._dataset.manifest, table)
        new_of_old = np.full(old_rows, -1, dtype=np.int64)
        found = new_dictionary.lookup(old_dictionary.keys)
        is_known = found != UNKNOWN_ROW
        new_of_old[old_dictionary.rows[is_known]] = found[is_known]
        new_of_old[UNKNOWN_ROW] = UNKNOWN_ROW
        if missing_row(old[0]) >= 0:
            new_of_old[missing_row(old[0])] = missing_row(new[0])  # -1 where it has none.
        return new_of_old

    def _rule_difference(self, table: str) -> str | None:
        old, new = self._old[table][0], self._new[table][0]
        names = ["vocabulary", "token"]
        if old.vocabulary == new.vocabulary == "hash":
            # Ids begin a row later where there is one for missing values.
            names += ["missing", "hash_rule"]
        for name in names:
            if getattr(old, name) != getattr(new, name):
                return (
                    f"{name} is {getattr(new, name)}, stored {getattr(old, name)}, so tokens can't "
                    f"be compared; {START_ANEW}, {_INDEX_INSTEAD}"
                )
        old_rows = self._info.tables[table].rows
        new_rows = self._dataset.manifest.table_rows[table]
        if new.vocabulary == "hash" and old_rows != new_rows:
            return (
                f"hash table of {new_rows:,} rows, stored {old_rows:,}: every id falls on another "
                f"row; keep data.schema.sparse.{new.name}.rows={old_rows}, {START_ANEW}, "
                f"{_INDEX_INSTEAD}"
            )
        return None

    def _find_old_data(self) -> tuple[Path, Manifest]:
        given = self._config.data_root
        root = Path.cwd() / Path(given or self._info.values["data_root"]).expanduser()
        try:
            manifest = load_manifest(root)
        except UserError as error:
            # Its message is about this run's data.root.
            raise UserError(f"{root} holds no dataset that can be read") from error
        if manifest.digest() != self._info.values["data_digest"]:
            raise UserError(f"{root} holds another dataset")
        return root, manifest


def _by_table(features: Iterable[Feature]) -> dict[str, list[Feature]]:
    tables: dict[str, list[Feature]] = {}
    for feature in features:
        tables.setdefault(feature.table, []).append(feature)
    return tables


def _num_tokens(features: list[Feature], num_rows: int) -> int:
    """Rows of an identity table that are ids: not the one of those outside it."""
    return num_rows - any(feature.out_of_range == "last_row" for feature in features)


def _match_identity(
    old_tokens: int, old_rows: int, new: list[Feature], new_rows: int
) -> np.ndarray | None:
    new_tokens = _num_tokens(new, new_rows)
    if old_tokens == old_rows and new_tokens == new_rows:
        return None
    new_of_old = np.full(old_rows, -1, dtype=np.int64)
    shared = min(old_tokens, new_tokens)
    new_of_old[:shared] = np.arange(shared)
    if old_tokens < old_rows and new_tokens < new_rows:
        new_of_old[old_tokens] = new_tokens
    return new_of_old


def _vocabulary_file(table: str) -> str:
    return f"vocabulary/{file_name(table)}.parquet"


def _read_dictionary(root: Path, manifest: Manifest, table: str) -> Dictionary:
    name = _vocabulary_file(table)
    path = dataset_file(root, manifest, name)
    try:
        if file_sha256(path) != manifest.outputs[name]:
            raise UserError(f"{path} is damaged: its digest isn't the recorded one")
        return load_dictionary(path, manifest.table_rows[table])
    except (OSError, KeyError, pa.ArrowException) as error:
        raise UserError(
            f"{path} can't be read ({error}): train.warm_start.rows=token needs it; prepare the "
            f"dataset again, {_INDEX_INSTEAD}"
        ) from error
