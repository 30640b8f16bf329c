"""What the rows of a table stand for: tokens, unknown, missing …, from a dataset's vocabulary.

A dictionary is stored by key, a table by row. It is dealt out over windows of rows on disk, in one
pass, and read window by window, so that memory is bounded however large it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data.commit import dataset_file
from data.errors import UserError
from data.files import file_name
from data.manifest import Manifest
from data.schema import Feature
from data.vocabulary import UNKNOWN_ROW, missing_row

KINDS = ("token", "unknown", "missing", "out_of_range", "hash", "unused")
"""What a row can stand for; docs/formats.md explains each."""

WINDOW_ROWS = 1 << 20
"""Rows that are held at a time, or a 256th of the table where that is more."""
_MOST_WINDOWS = 256  # As many files are open at a time.
_READ_ROWS = 1 << 18

_TOKEN, _UNKNOWN, _MISSING, _OUT_OF_RANGE, _HASH, _UNUSED = range(len(KINDS))


@dataclass(frozen=True)
class RowMeanings:
    """Of rows `start … start + len - 1`.

    Attributes:
        start: the first of them.
        kinds: dictionary-encoded text, one of `KINDS` each.
        tokens: text, null but for the kind `token`.
    """

    start: int
    kinds: pa.DictionaryArray
    tokens: pa.Array

    def __len__(self) -> int:
        return len(self.kinds)

    def slice(self, start: int, stop: int) -> RowMeanings:
        """Those of rows `start … stop-1`, counted within these."""
        size = stop - start
        kinds, tokens = self.kinds.slice(start, size), self.tokens.slice(start, size)
        return RowMeanings(self.start + start, kinds, tokens)


def row_meanings(root: Path, manifest: Manifest, table: str, work: Path) -> Iterator[RowMeanings]:
    """What the rows of a table stand for, in rising order, each row once.

    Args:
        root: the dataset's folder.
        manifest: of the dataset.
        table: name of the table.
        work: an empty folder, for the windows of a dictionary.

    Raises:
        UserError: for a dictionary that is missing or damaged.
    """
    features = [feature for feature in manifest.features if feature.table == table]
    num_rows = manifest.table_rows[table]
    window = max(WINDOW_ROWS, -(-num_rows // _MOST_WINDOWS))
    is_dictionary = features[0].vocabulary == "dictionary"
    if is_dictionary:
        path = dataset_file(root, manifest, f"vocabulary/{file_name(table)}.parquet")
        try:
            _deal_out(path, window, num_rows, work)
        except (pa.ArrowException, OSError, KeyError) as error:
            raise UserError(
                f"{path} can't be read ({error}): prepare the dataset again, or name its folder "
                "with data.root="
            ) from error
    for start in range(0, num_rows, window):
        stop = min(start + window, num_rows)
        if is_dictionary:
            yield _of_dictionary(features[0], _window_path(work, start // window), start, stop)
        else:
            yield _of_rule(features, num_rows, start, stop)


def _of_dictionary(feature: Feature, path: Path, start: int, stop: int) -> RowMeanings:
    codes = np.full(stop - start, _UNUSED, dtype=np.int8)
    tokens = pa.nulls(stop - start, pa.string())
    if path.exists():  # A window without a token has no file.
        with pa.ipc.open_stream(path) as reader:
            found = reader.read_all().combine_chunks()
        at = found["row"].to_numpy() - start
        codes[at] = _TOKEN
        place = np.full(stop - start, -1, dtype=np.int64)
        place[at] = np.arange(len(at))
        # `name` is the token, or the key that it is made from.
        names = found["name"].combine_chunks().take(pa.array(place, mask=place < 0))
        tokens = _tokens(names, feature.token)
    for row, code in ((UNKNOWN_ROW, _UNKNOWN), (missing_row(feature), _MISSING)):
        if start <= row < stop:
            codes[row - start] = code
    return RowMeanings(start, _kinds(codes), tokens)


def _of_rule(features: Sequence[Feature], num_rows: int, start: int, stop: int) -> RowMeanings:
    """Of tables without a dictionary: the rows of an identity table are its tokens."""
    codes = np.full(stop - start, _TOKEN, dtype=np.int8)
    tokens = pa.array(np.arange(start, stop)).cast(pa.string())
    special: tuple[int, int] | None = None
    if features[0].vocabulary == "hash":
        codes[:] = _HASH
        tokens = pa.nulls(stop - start, pa.string())
        special = (missing_row(features[0]), _MISSING)
    elif any(feature.out_of_range == "last_row" for feature in features):
        special = (num_rows - 1, _OUT_OF_RANGE)
    if special is not None and start <= special[0] < stop:
        codes[special[0] - start] = special[1]
        tokens = pc.if_else(pa.array(codes == special[1]), None, tokens)
    return RowMeanings(start, _kinds(codes), tokens)


def _deal_out(path: Path, window: int, num_rows: int, work: Path) -> None:
    """Writes each window's entries of a dictionary to a file of its own."""
    writers: dict[int, pa.ipc.RecordBatchStreamWriter] = {}
    with pq.ParquetFile(path) as file:
        name = "token" if "token" in file.schema_arrow.names else "key"
        for batch in file.iter_batches(_READ_ROWS, columns=["row", name]):
            rows = batch.column("row").to_numpy()
            if len(rows) and not 0 <= rows.min() <= rows.max() < num_rows:
                raise UserError(f"{path} is damaged: it has rows outside its table of {num_rows:,}")
            order = np.argsort(rows, kind="stable")
            windows = rows[order] // window
            ordered = pa.record_batch([batch.column("row"), batch.column(name)], ["row", "name"])
            ordered = ordered.take(pa.array(order))
            firsts = np.flatnonzero(np.append(True, windows[1:] != windows[:-1])[: len(windows)])
            for first, last in zip(firsts, np.append(firsts[1:], len(rows)), strict=True):
                number = int(windows[first])
                if number not in writers:
                    target = str(_window_path(work, number))
                    writers[number] = pa.ipc.new_stream(target, ordered.schema)
                writers[number].write_batch(ordered.slice(first, last - first))
    for writer in writers.values():
        writer.close()


def _window_path(work: Path, number: int) -> Path:
    return work / f"{number:05d}.arrow"


def _kinds(codes: np.ndarray) -> pa.DictionaryArray:
    return pa.DictionaryArray.from_arrays(pa.array(codes), pa.array(KINDS))


def _tokens(names: pa.Array, token: str) -> pa.Array:
    """Text of tokens from what the dictionary stores (see `data.tokens`): text as it was, numbers
    in decimal, and hexadecimal ids in lower case, filled up to 8 digits."""
    if token == "text":
        return names
    if token == "int":
        return names.view(pa.int64()).cast(pa.string())
    texts = [None if key is None else f"{key:08x}" for key in names.to_pylist()]
    return pa.array(texts, pa.string())
