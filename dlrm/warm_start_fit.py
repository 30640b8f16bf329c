"""Whether another run's checkpoint fits a new run, by what `train.warm_start` permits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from torch import Tensor, nn

from data.errors import UserError
from data.parquet import PreparedDataset
from dlrm.checkpoint import CheckpointInfo
from dlrm.config import TrainRun
from dlrm.dense_moments import FIRST_BIAS, FIRST_WEIGHT, MovedColumn, moved_columns
from dlrm.tensor_file import names_of
from dlrm.warm_start_rows import START_ANEW, RowMatcher
from embeddings.table import TableConfig


class Fit:
    """What a new run takes of a checkpoint. Nothing here communicates, and no row is read.

    Args:
        info: the checkpoint.
        config: of the new run.
        dataset: what it trains on.
        tables: its tables.
        model: its dense network.

    Attributes:
        kept: the tables that the checkpoint has too, without those that start anew nonetheless.
        matcher: of their rows.
    """

    def __init__(
        self,
        info: CheckpointInfo,
        config: TrainRun,
        dataset: PreparedDataset,
        tables: Sequence[TableConfig],
        model: nn.Module,
    ) -> None:
        self._info, self._dataset, self._model = info, dataset, model
        self._rule = config.optim.sparse.name
        self._wanted = config.train.warm_start
        self._own = {table.name: table for table in tables}
        fresh = set(self._wanted.new_tables) & set(self._wanted.dropped_tables)
        self.kept = [t for t in tables if t.name in info.tables and t.name not in fresh]
        self.matcher = RowMatcher(info, dataset, self._wanted)

    @cached_property
    def dense(self) -> dict[str, Tensor]:
        """The checkpoint's dense weights."""
        return self._info.dense()

    @cached_property
    def dense_taken(self) -> list[str]:
        """Names of those that are taken, in the model's order."""
        if self._wanted.dense == "none":
            return []
        return [
            name
            for name, tensor in self._model.state_dict().items()
            if name in self.dense and self.dense[name].shape == tensor.shape
        ]

    @cached_property
    def moved_columns(self) -> tuple[list[MovedColumn], list[str]]:
        """Of `dense_moments`, where the first dense layer is taken; else none."""
        if not {FIRST_WEIGHT, FIRST_BIAS} <= set(self.dense_taken):
            return [], []
        given = self._wanted.data_root
        root = None if given is None else Path.cwd() / Path(given).expanduser()
        return moved_columns(self._info, self._dataset.manifest, root)

    def check(self) -> None:
        """Refuses what doesn't fit, all of it in one message.

        Raises:
            UserError: what it is, a line each, with the key that permits it or mends it;
                DamagedError where the dense weights aren't what was written.
        """
        lines = [*self._listing_differences(), *self._table_differences()]
        lines += [*self._state_differences(), *self._dense_differences()]
        if lines:
            raise UserError(
                f"train.warm_start: {self._info.folder} doesn't fit this run:\n  "
                + "\n  ".join(lines)
            )

    def input_differences(self) -> list[str]:
        """How the inputs of the dense network differ: columns of its first layers may be as many,
        and yet others."""
        values, manifest = self._info.values, self._dataset.manifest
        inputs = (
            ("dense features", values["dense_columns"], manifest.dense_columns),
            (
                "sparse features",
                [feature["name"] for feature in values["features"]],
                [feature.name for feature in manifest.features],
            ),
        )
        differing = [
            f"the dense network's {what} differ: {_list_difference(old, new)}"
            for what, old, new in inputs
            if old != new
        ]
        # Checkpoints of before this was recorded don't say.
        transforms = values.get("dense_transforms", {})
        differing += [
            f"dense feature {name}: stored transform {transforms[name]}, wanted {column.transform}"
            for name, column in manifest.schema.dense.items()
            if transforms.get(name, column.transform) != column.transform
        ]
        stored = {feature["name"]: feature for feature in values["features"]}
        differing += [
            f"sparse feature {feature.name}: stored pooling {old}, wanted {feature.pooling}"
            for feature in manifest.features
            if (old := stored.get(feature.name, {}).get("pooling", feature.pooling))
            != feature.pooling
        ]
        return differing

    def _listing_differences(self) -> list[str]:
        old, new = self._info.tables, self._own
        lists = (
            ("new_tables", self._wanted.new_tables, new, "the data", old, "the checkpoint"),
            ("dropped_tables", self._wanted.dropped_tables, old, "the checkpoint", new, "the data"),
        )
        lines = []
        for key, listed, has, has_it, lacks, lacks_it in lists:
            lines += [
                f"table {name}: not in {lacks_it}; permit it with train.warm_start.{key}=[{name}]"
                for name in has
                if name not in lacks and name not in listed
            ]
            lines += [
                f"train.warm_start.{key}=[{name}]: {has_it} has no such table"
                for name in listed
                if name not in has
            ]
        one_list = set(self._wanted.new_tables) ^ set(self._wanted.dropped_tables)
        lines += [
            f"table {name}: both the checkpoint and the data have it, so take it out of "
            f"train.warm_start.{'new' if name in self._wanted.new_tables else 'dropped'}_tables, "
            f"or {START_ANEW}"
            for name in sorted(one_list & old.keys() & new.keys())
        ]
        return lines

    def _table_differences(self) -> list[str]:
        names = [table.name for table in self.kept]
        by_rule = self.matcher.rule_differences(names)
        lines = []
        for table in self.kept:
            stored = self._info.tables[table.name]
            if stored.dim != table.dim:
                lines.append(
                    f"table {table.name}: dim {table.dim}, stored {stored.dim}; set "
                    f"model.table_dims.{table.name}={stored.dim}, or {START_ANEW}"
                )
            if table.name in by_rule:
                lines.append(f"table {table.name}: {by_rule[table.name]}")
            elif stored.rows != table.rows and not self._wanted.grow:
                lines.append(
                    f"table {table.name}: {table.rows:,} rows, stored {stored.rows:,}; permit it "
                    "with train.warm_start.grow=true"
                )
        missing = self.matcher.missing_dictionaries([n for n in names if n not in by_rule])
        return lines if missing is None else [*lines, missing]

    def _state_differences(self) -> list[str]:
        old = self._info.values["optim"]["sparse"]["name"]
        if not self._wanted.state or not self.kept or old == self._rule:
            return []
        return [
            f"optim.sparse.name={self._rule}, stored {old}: the rows' state is another; "
            "train.warm_start.state=false starts it anew"
        ]

    def _dense_differences(self) -> list[str]:
        if self._wanted.dense != "all":
            return []
        old, new = _shapes(self.dense), _shapes(self._model.state_dict())
        lines = [
            f"dense weight {name}: {new.get(name, 'not there')}, "
            f"stored {old.get(name, 'not at all')}"
            for name in dict.fromkeys([*new, *old])
            if old.get(name) != new.get(name)
        ]
        lines += self.input_differences()
        if lines:
            lines.append(
                "train.warm_start.dense=matching takes the dense weights of equal name and shape, "
                "train.warm_start.dense=none takes none"
            )
        return lines


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: " x ".join(map(str, t.shape)) or "one number" for name, t in tensors.items()}


def _list_difference(old: list[str], new: list[str]) -> str:
    added, removed = [n for n in new if n not in old], [n for n in old if n not in new]
    parts = [
        f"{names_of(names)} {what}"
        for what, names in (("added", added), ("removed", removed))
        if names
    ]
    return ", ".join(parts) or "another order"
