"""`prepare`: raw files → a prepared dataset folder, streaming, in bounded memory.

Three passes, of which only the first touches raw text:

1. *parse*: each raw file becomes blocks of encoded columns, spooled under `root/.work`. A file
   whose blocks are complete is kept for a rerun; it is recognised by its content's digest.
2. *count*: tokens of the training part are counted (dictionaries), moments are taken.
3. *write*: blocks are mapped to rows of their tables, transformed, and written in lanes.

`manifest.json` comes last. Whatever stops the process before leaves nothing that looks finished.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data.arrays import Arrays, load_arrays, save_arrays
from data.counting import KeyCounter
from data.errors import RawDataError, UserError
from data.files import file_sha256, write_whole
from data.id_counts import write_id_counts
from data.lanes import PartWriter, Rows
from data.manifest import MANIFEST, InputFile, Manifest, PartInfo, check_same_schema, load_manifest
from data.progress import ProgressListener, SilentListener
from data.raw import RawBlock, RawReader, RawSlice
from data.schema import Feature, Schema, check_schema, schema_to_dict
from data.split import PARTS, TRAIN, SplitRule
from data.tokens import MISSING
from data.transform import Moments, transform_dense
from data.vocabulary import MappedIds, Vocabulary, build_dictionary, map_dictionary
from data.work_folder import locked

_PARSE_THREADS = 2
_COUNTER_BYTES = 192 << 20
_DICTIONARY_BYTES_IN_MEMORY = 448 << 20


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
        UserError: for a schema that can't be used, or a `root` that holds another dataset.
        RawDataError: for a raw file that breaks the schema, naming file and line.
    """
    check_schema(schema)
    listener = listener or SilentListener()
    root.mkdir(parents=True, exist_ok=True)
    with locked(root) as work:
        if overwrite:
            (root / MANIFEST).unlink(missing_ok=True)
        elif (root / MANIFEST).exists():
            return _reuse(schema, inputs, root, listener)
        return _Preparation(schema, inputs, root, work, listener).run()


def _reuse(schema: Schema, inputs: RawInputs, root: Path, listener: ProgressListener) -> Manifest:
    """The finished dataset in `root`, if it is the one asked for.

    Raises:
        SchemaMismatch: see `check_same_schema`.
        UserError: where the raw files are others.
    """
    manifest = load_manifest(root)
    check_same_schema(manifest, schema, root)
    listener.phase("check inputs", sum(path.stat().st_size for path in inputs.files))
    found = []
    for path in inputs.files:
        found.append(file_sha256(path))
        listener.advance(path.stat().st_size, 0)
    stored = [i.sha256 for i in manifest.inputs]
    if found != stored:
        names = [
            p.name for p, digest in zip(inputs.files, found, strict=True) if digest not in stored
        ]
        what = f"changed or new: {', '.join(names)}" if names else "other files or another order"
        raise UserError(
            f"data.root={root} was prepared from other raw files ({what}); choose another "
            "data.root, or prepare it again with data.overwrite=true"
        )
    return manifest


@dataclass
class _SpooledFile:
    """A raw file whose blocks lie in `folder`."""

    info: InputFile
    folder: Path
    block_rows: list[int]

    def block(self, number: int) -> Path:
        return self.folder / f"block-{number:06d}.arrow"


class _Preparation:
    """One run of `prepare` over a folder that holds no finished dataset."""

    def __init__(
        self,
        schema: Schema,
        inputs: RawInputs,
        root: Path,
        work: Path,
        listener: ProgressListener,
    ) -> None:
        self.schema, self.inputs, self.root, self.work = schema, inputs, root, work
        self.listener = listener
        self.reader = RawReader(schema)
        self.features = self.reader.features
        self.table_features: dict[str, Feature] = {}
        for feature in self.features:
            self.table_features.setdefault(feature.table, feature)

    def run(self) -> Manifest:
        """Parse, count, write, and the manifest last."""
        spooled = self._parse_all()
        rule = SplitRule(self.schema.split, [f.info.rows for f in spooled], self.inputs.file_parts)
        vocabularies, moments = self._count(spooled, rule)
        parts, counts = self._write(spooled, rule, vocabularies, moments)
        outputs = {}
        for folder in ("vocabulary", "counts"):
            for path in sorted((self.root / folder).glob("*.parquet")):
                outputs[f"{folder}/{path.name}"] = file_sha256(path)
        manifest = Manifest(
            schema=self.schema,
            table_rows={name: v.rows for name, v in vocabularies.items()},
            inputs=[f.info for f in spooled],
            parts=parts,
            moments=moments,
            counts=counts,
            outputs=outputs,
        )
        manifest.save(self.root)
        return manifest

    # pass 1

    def _parse_all(self) -> list[_SpooledFile]:
        self.listener.phase("parse", sum(path.stat().st_size for path in self.inputs.files))
        spooled = []
        with ThreadPoolExecutor(_PARSE_THREADS) as pool:
            for number, path in enumerate(self.inputs.files):
                spooled.append(self._parse_file(number, path, pool))
        if sum(f.info.rows for f in spooled) == 0:
            raise RawDataError(str(self.inputs.files[0]), None, "no rows in any input file")
        return spooled

    def _parse_file(self, number: int, path: Path, pool: ThreadPoolExecutor) -> _SpooledFile:
        folder = self.work / f"input-{number:05d}"
        if finished := self._finished_before(folder, path):
            self.listener.advance(path.stat().st_size, finished.info.rows)
            return finished
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        hasher = hashlib.sha256()
        block_rows: list[int] = []
        blank_lines = 0
        # A few slices in flight: enough to keep the threads busy, few enough to bound memory.
        flying: deque[tuple[Future[tuple[int, int]], int]] = deque()
        for piece in self.reader.slices(path, hasher):
            target = folder / f"block-{len(block_rows) + len(flying):06d}.arrow"
            flying.append((pool.submit(self._parse_slice, piece, target), piece.num_file_bytes))
            if len(flying) > _PARSE_THREADS + 1:
                blank_lines += self._landed(flying, block_rows)
        while flying:
            blank_lines += self._landed(flying, block_rows)
        info = InputFile(
            path.name, path.stat().st_size, hasher.hexdigest(), sum(block_rows), blank_lines
        )
        finished = _SpooledFile(info, folder, block_rows)
        marker = {"parse_key": self._parse_key(), "block_rows": block_rows, "info": vars(info)}
        write_whole(folder / "finished.json", json.dumps(marker).encode())
        return finished

    def _landed(
        self, flying: deque[tuple[Future[tuple[int, int]], int]], block_rows: list[int]
    ) -> int:
        """Waits for the oldest slice; returns its blank lines."""
        future, num_bytes = flying.popleft()
        num_rows, num_blank = future.result()
        block_rows.append(num_rows)
        self.listener.advance(num_bytes, num_rows)
        return num_blank

    def _parse_slice(self, piece: RawSlice, target: Path) -> tuple[int, int]:
        block = self.reader.parse(piece)
        save_arrays(target, _block_to_arrays(block))
        return block.num_rows, block.num_blank_lines

    def _finished_before(self, folder: Path, path: Path) -> _SpooledFile | None:
        """The spooled blocks of an interrupted run, if they are of this very file and schema."""
        marker = folder / "finished.json"
        if not marker.exists():
            return None
        values = json.loads(marker.read_text())
        info = InputFile(**values["info"])
        if values["parse_key"] != self._parse_key() or info.sha256 != file_sha256(path):
            return None
        return _SpooledFile(info, folder, values["block_rows"])

    def _parse_key(self) -> str:
        """Digest of what parsing depends on: vocabulary rules and split may change without it."""
        schema = schema_to_dict(self.schema)
        parsed = {key: schema[key] for key in ("format", "label", "example_weight")}
        parsed["dense"] = list(self.schema.dense)
        parsed["sparse"] = [
            (f.name, f.token, f.separator, f.many, f.missing, f.bag_weights) for f in self.features
        ]
        return hashlib.sha256(json.dumps(parsed).encode()).hexdigest()

    # pass 2

    def _count(
        self, spooled: list[_SpooledFile], rule: SplitRule
    ) -> tuple[dict[str, Vocabulary], dict[str, Moments]]:
        counted = [f for f in self.features if f.vocabulary == "dictionary"]
        dictionaries = {f.table: self.table_features[f.table] for f in counted}
        share = _COUNTER_BYTES // max(len(dictionaries), 1)
        counters = {t: KeyCounter(self.work / "tokens" / t, share) for t in dictionaries}
        standardised = [n for n, c in self.schema.dense.items() if c.transform == "standardise"]
        moments = {name: Moments() for name in standardised}
        self.listener.phase("count", sum(f.info.num_bytes for f in spooled))

        def count_tables(tables: list[str], *, is_first: bool) -> None:
            """One thread's share: some tables, over all blocks; the first also takes moments."""
            mine = [f for f in counted if f.table in tables]
            names = [name for f in mine for name in _array_names(f)]
            names += [f"dense.{n}" for n in standardised] if is_first else []
            for file_index, start, stop, path, num_bytes in _blocks(spooled):
                is_train = rule.parts_of(file_index, start, stop) == TRAIN
                if names and is_train.any():
                    arrays = load_arrays(path, names)
                    for feature in mine:
                        _count_block(counters[feature.table], feature, arrays, is_train)
                    if is_first:
                        for name in standardised:
                            values = arrays[f"dense.{name}"][is_train]
                            moments[name] = moments[name].plus(values)
                if is_first:
                    self.listener.advance(num_bytes, stop - start)

        names = list(dictionaries)
        with ThreadPoolExecutor(_PARSE_THREADS) as pool:
            shares = [names[n::_PARSE_THREADS] for n in range(_PARSE_THREADS)]
            jobs = [
                pool.submit(count_tables, share, is_first=n == 0) for n, share in enumerate(shares)
            ]
            for job in jobs:
                job.result()
        return self._build_vocabularies(counters, dictionaries), moments

    def _build_vocabularies(
        self, counters: dict[str, KeyCounter], dictionaries: dict[str, Feature]
    ) -> dict[str, Vocabulary]:
        folder, mapped = self.root / "vocabulary", self.work / "dictionaries"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        mapped.mkdir(exist_ok=True)
        with ThreadPoolExecutor(_PARSE_THREADS) as pool:
            jobs = {
                table: pool.submit(
                    build_dictionary, counters[table], feature, folder / f"{table}.parquet", mapped
                )
                for table, feature in dictionaries.items()
            }
            built = {table: job.result() for table, job in jobs.items()}
        shutil.rmtree(self.work / "tokens", ignore_errors=True)
        total_bytes = sum(16 * num_tokens for _, num_tokens in built.values())
        in_memory = total_bytes <= _DICTIONARY_BYTES_IN_MEMORY
        vocabularies = {}
        for table, feature in self.table_features.items():
            dictionary = None
            if table in built:
                dictionary = map_dictionary(mapped, table, built[table][0], in_memory=in_memory)
            vocabularies[table] = Vocabulary(feature, dictionary)
        return vocabularies

    # pass 3

    def _write(
        self,
        spooled: list[_SpooledFile],
        rule: SplitRule,
        vocabularies: dict[str, Vocabulary],
        moments: dict[str, Moments],
    ) -> tuple[dict[str, PartInfo], dict[str, dict[str, Any]]]:
        tallies = [_Tally(self.features) for _ in PARTS]
        share = _COUNTER_BYTES // 2 // max(len(self.features), 1)
        id_counters = {f.name: KeyCounter(self.work / "ids" / f.name, share) for f in self.features}
        mapper = RowMapper(self.schema, self.features, vocabularies, moments)
        self.listener.phase("write", sum(f.info.num_bytes for f in spooled))
        with ThreadPoolExecutor(_PARSE_THREADS) as pool:
            writers = [PartWriter(self.root, part, pool) for part in PARTS]
            jobs: deque[Future[_MappedBlock]] = deque()

            def finish_oldest() -> None:
                block = jobs.popleft().result()
                for part, table in block.tables.items():
                    writers[part].append(table)
                    tallies[part].add(block, part)
                for name, (ids, counts) in block.train_counts.items():
                    id_counters[name].add(ids, counts)
                self.listener.advance(block.num_bytes, block.num_rows)

            for file_index, start, stop, path, num_bytes in _blocks(spooled):
                parts = rule.parts_of(file_index, start, stop)
                jobs.append(pool.submit(_map_block, mapper, path, parts, num_bytes))
                if len(jobs) > _PARSE_THREADS:
                    finish_oldest()
            while jobs:
                finish_oldest()
            files = [writer.close() for writer in writers]
        infos = {}
        for name, part_files, tally in zip(PARTS, files, tallies, strict=True):
            infos[name] = tally.info(part_files)
        counts = {}
        folder = self.root / "counts"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for feature in self.features:
            path = folder / f"{feature.name}.parquet"
            counts[feature.name] = write_id_counts(id_counters[feature.name], path, self.root)
        return infos, counts


class RowMapper:
    """Encoded blocks → rows ready to write or batch: vocabularies and transforms applied.

    The same object serves `prepare` and, built from a manifest, prediction on raw files.
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

    def map_ids(self, feature: Feature, arrays: Arrays) -> MappedIds:
        """Rows of one feature for a block's arrays (see `_block_to_arrays`)."""
        name = feature.name
        lengths, weights = arrays.get(f"{name}.lengths"), arrays.get(f"{name}.weights")
        return self.vocabularies[feature.table].map_codes(
            feature, arrays[f"{name}.keys"], arrays[f"{name}.codes"], lengths, weights
        )

    def map_block(self, block: RawBlock) -> Rows:
        """All columns of a parsed block."""
        arrays = _block_to_arrays(block)
        return Rows(
            num_rows=block.num_rows,
            label_B=block.label_B,
            weight_B=block.weight_B,
            dense=transform_dense(self.schema, block.dense, self.moments),
            ids={f.name: self.map_ids(f, arrays) for f in self.features},
            extra={},
        )


@dataclass
class _MappedBlock:
    num_rows: int
    num_bytes: int
    tables: dict[int, pa.Table]
    labels: dict[int, int]
    ids: dict[int, dict[str, tuple[int, int, int]]]
    """By part and feature: ids, unknown, missing."""
    train_counts: dict[str, tuple[np.ndarray, np.ndarray]]


class _Tally:
    """Row, label and id counts of one part."""

    def __init__(self, features: tuple[Feature, ...]) -> None:
        self.rows = self.positives = 0
        self.ids = dict.fromkeys((f.name for f in features), 0)
        self.unknown, self.missing = dict(self.ids), dict(self.ids)

    def add(self, block: _MappedBlock, part: int) -> None:
        self.rows += block.tables[part].num_rows
        self.positives += block.labels[part]
        for name, (ids, unknown, missing) in block.ids[part].items():
            self.ids[name] += ids
            self.unknown[name] += unknown
            self.missing[name] += missing

    def info(self, files: list[Any]) -> PartInfo:
        rate = self.positives / self.rows if self.rows else None
        return PartInfo(self.rows, files, rate, self.unknown, self.missing, self.ids)


def _map_block(mapper: RowMapper, path: Path, parts: np.ndarray, num_bytes: int) -> _MappedBlock:
    arrays = load_arrays(path)
    block = _MappedBlock(len(parts), num_bytes, {}, {}, {}, {})
    present = np.unique(parts).tolist()
    for part in present:
        chosen = arrays
        if len(present) > 1:
            chosen = _select_rows(arrays, parts == part, mapper.features)
        ids = {f.name: mapper.map_ids(f, chosen) for f in mapper.features}
        dense = {name: chosen[f"dense.{name}"] for name in mapper.schema.dense}
        label_B = chosen["label"]
        rows = Rows(
            num_rows=len(label_B),
            label_B=label_B,
            weight_B=chosen.get("weight"),
            dense=transform_dense(mapper.schema, dense, mapper.moments),
            ids=ids,
            extra={},
        )
        block.tables[part] = rows.to_table(mapper.features)
        block.labels[part] = int(label_B.sum())
        block.ids[part] = {
            name: (len(m.ids), m.num_unknown, m.num_missing) for name, m in ids.items()
        }
        if part == TRAIN:
            block.train_counts = {name: (m.used_rows, m.used_counts) for name, m in ids.items()}
    return block


def _select_rows(arrays: Arrays, is_chosen: np.ndarray, features: tuple[Feature, ...]) -> Arrays:
    """The arrays of a block's chosen rows; local dictionaries stay as they are."""
    chosen: Arrays = {}
    per_id = {f.name: f for f in features if f.is_list}
    for name, values in arrays.items():
        column, _, kind = name.rpartition(".")
        if kind in ("keys", "tokens"):
            chosen[name] = values
        elif column in per_id and kind in ("codes", "weights"):
            chosen[name] = values[np.repeat(is_chosen, arrays[f"{column}.lengths"])]
        else:
            chosen[name] = values[is_chosen]
    return chosen


def _blocks(spooled: list[_SpooledFile]) -> Iterator[tuple[int, int, int, Path, int]]:
    """(file index, first row, row after the last, spool file, share of the raw bytes)."""
    for file_index, entry in enumerate(spooled):
        start = 0
        for number, num_rows in enumerate(entry.block_rows):
            num_bytes = entry.info.num_bytes * num_rows // max(entry.info.rows, 1)
            yield file_index, start, start + num_rows, entry.block(number), num_bytes
            start += num_rows


def _block_to_arrays(block: RawBlock) -> Arrays:
    arrays: Arrays = {f"dense.{name}": values for name, values in block.dense.items()}
    if block.label_B is not None:
        arrays["label"] = block.label_B
    if block.weight_B is not None:
        arrays["weight"] = block.weight_B
    for name, column in block.sparse.items():
        arrays[f"{name}.codes"], arrays[f"{name}.keys"] = column.codes, column.keys
        if column.lengths is not None:
            arrays[f"{name}.lengths"] = column.lengths
        if column.tokens is not None:
            arrays[f"{name}.tokens"] = column.tokens
        if column.weights is not None:
            arrays[f"{name}.weights"] = column.weights
    return arrays


def _array_names(feature: Feature) -> list[str]:
    names = [f"{feature.name}.codes", f"{feature.name}.keys"]
    if feature.is_list:
        names.append(f"{feature.name}.lengths")
    if feature.token == "text":
        names.append(f"{feature.name}.tokens")
    return names


def _count_block(
    counter: KeyCounter, feature: Feature, arrays: Arrays, is_train: np.ndarray
) -> None:
    codes, keys = arrays[f"{feature.name}.codes"], arrays[f"{feature.name}.keys"]
    if not is_train.all():
        lengths = arrays.get(f"{feature.name}.lengths")
        codes = codes[is_train if lengths is None else np.repeat(is_train, lengths)]
    counts = np.bincount(codes[codes != MISSING], minlength=len(keys))
    counter.add(keys, counts, arrays.get(f"{feature.name}.tokens"))
