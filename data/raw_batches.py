"""Raw files → batches, through the vocabularies and moments of a prepared dataset.

For evaluation and prediction on files that were never prepared: nothing is written, rows keep
their order.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data.batch import Batch
from data.columns import Bags, Columns, assemble_batch
from data.commit import dataset_file
from data.errors import RawDataError, UserError
from data.files import file_name
from data.lanes import Rows
from data.manifest import Manifest
from data.raw import RawReader
from data.row_mapper import RowMapper
from data.schema import Feature
from data.vocabulary import MappedIds, Vocabulary, load_dictionary
from data.write_pass import PartTally


def load_row_mapper(root: Path, manifest: Manifest) -> RowMapper:
    """The mapping that a dataset was prepared with, from its folder."""
    vocabularies = {}
    for feature in manifest.features:
        if feature.table in vocabularies:
            continue
        dictionary = None
        if feature.vocabulary == "dictionary":
            path = dataset_file(root, manifest, f"vocabulary/{file_name(feature.table)}.parquet")
            dictionary = load_dictionary(path, manifest.table_rows[feature.table])
        vocabularies[feature.table] = Vocabulary(feature, dictionary)
    return RowMapper(manifest.schema, manifest.features, vocabularies, manifest.moments)


def raw_batches(
    manifest: Manifest,
    mapper: RowMapper,
    files: list[Path],
    labelled: bool,
    batch_size: int,
    tally: PartTally,
) -> Iterator[Batch]:
    """Batches of up to `batch_size` rows; `row_B` counts on over all files.

    `tally` counts rows and ids, among them those without a row of their own.

    Raises:
        RawDataError: naming file and line.
    """
    reader = RawReader(manifest.schema, labelled=labelled)
    first_row = 0
    for path in files:
        for piece in reader.slices(path):
            try:
                rows = mapper.map_block(reader.parse(piece))
            except RawDataError:
                raise
            except UserError as error:
                raise RawDataError(
                    str(path), None, f"line {piece.first_line:,} or later: {error}"
                ) from None
            tally.add_rows(rows)
            columns = _columns_of(rows, manifest.features, first_row)
            for start in range(0, rows.num_rows, batch_size):
                stop = min(start + batch_size, rows.num_rows)
                yield assemble_batch(
                    [(columns, start, stop)],
                    num_features=len(manifest.features),
                    single_positions=[f.position for f in manifest.features if not f.is_list],
                    num_dense=len(manifest.dense_columns),
                )
            first_row += rows.num_rows


def _columns_of(rows: Rows, features: tuple[Feature, ...], first_row: int) -> Columns:
    dense_BN = np.empty((rows.num_rows, len(rows.dense)), dtype=np.float32)
    for position, values in enumerate(rows.dense.values()):
        dense_BN[:, position] = values
    singles = [rows.ids[f.name].ids for f in features if not f.is_list]
    single_FB = np.stack(singles) if singles else np.empty((0, rows.num_rows), dtype=np.int64)
    label_B = None if rows.label_B is None else rows.label_B.astype(np.float32)
    return Columns(
        dense_BN=dense_BN,
        label_B=label_B,
        weight_B=rows.weight_B,
        row_B=first_row + np.arange(rows.num_rows),
        single_FB=single_FB,
        bags={f.position: _bags_of(rows.ids[f.name]) for f in features if f.is_list},
    )


def _bags_of(mapped: MappedIds) -> Bags:
    assert mapped.lengths is not None
    offsets = np.zeros(len(mapped.lengths) + 1, dtype=np.int64)
    np.cumsum(mapped.lengths, out=offsets[1:])
    return Bags(offsets, mapped.ids, mapped.weights)
