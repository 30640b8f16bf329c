"""`RowMapper`: parsed blocks → rows of tables and transformed numbers.

The same object serves `prepare` and, built from a dataset's folder, prediction on raw files.
"""

from __future__ import annotations

from data.arrays import Arrays
from data.blocks import block_arrays
from data.lanes import Rows
from data.raw import RawBlock
from data.schema import Feature, Schema
from data.transform import Moments, count_missing, transform_dense
from data.vocabulary import MappedIds, Vocabulary


class RowMapper:
    """Applies vocabularies and dense transforms.

    Args:
        schema: names the transforms.
        features: the sparse features in order.
        vocabularies: by table.
        moments: of `standardise` columns.
    """

    def __init__(
        self,
        schema: Schema,
        features: tuple[Feature, ...],
        vocabularies: dict[str, Vocabulary],
        moments: dict[str, Moments],
    ) -> None:
        self.schema, self.features = schema, features
        self.vocabularies, self.moments = vocabularies, moments

    def map_block(self, block: RawBlock) -> Rows:
        """All columns of a parsed block."""
        return self.map_arrays(block_arrays(block), block.num_rows)

    def map_arrays(self, arrays: Arrays, num_rows: int) -> Rows:
        """The same from a block's arrays (see `data.blocks`)."""
        dense = {name: arrays[f"dense.{name}"] for name in self.schema.dense}
        return Rows(
            num_rows=num_rows,
            label_B=arrays.get("label"),
            weight_B=arrays.get("weight"),
            dense=transform_dense(self.schema, dense, self.moments),
            ids={feature.name: self._map_ids(feature, arrays) for feature in self.features},
            extra={},
            missing_dense=count_missing(dense),
        )

    def _map_ids(self, feature: Feature, arrays: Arrays) -> MappedIds:
        head = f"sparse.{feature.name}"
        return self.vocabularies[feature.table].map_codes(
            feature,
            arrays[f"{head}.keys"],
            arrays[f"{head}.codes"],
            arrays.get(f"{head}.lengths"),
            arrays.get(f"{head}.weights"),
        )
