"""Criteo-shaped synthetic data with a known teacher, so that the best reachable AUC is known.

A row has 13 counts and 26 categorical ids with Criteo's missing rates; ids follow a Zipf law over
Criteo Kaggle's cardinalities times a factor. The teacher's logit is

    bias + Σ_f scale_f · effect_f(id_f) + Σ_pairs latent(id_f) · latent(id_g) + Σ_j slope_j · z_j

where effects shrink with an id's rank (a rare id says little: nobody could learn it) and z_j is a
standardised log count. Labels are drawn with probability sigmoid(logit): nobody can rank the test
rows better than by this logit, which is stored beside them (column `teacher_logit`).

Everything is a function of (settings, chunk of 65,536 rows), so it is the same on every machine up
to the last bits of `pow` and `log`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv

from data.commit import build_folder, commit
from data.counting import KeyCounter
from data.errors import UserError
from data.files import file_sha256, naming, open_new
from data.lanes import PartWriter, Rows
from data.making import check_same_kind, making, tidy
from data.manifest import FORMAT_VERSION, MANIFEST, Manifest, PartInfo, load_manifest
from data.progress import ProgressListener, SilentListener
from data.schema import (
    DenseColumn,
    Feature,
    RawFormat,
    Schema,
    SparseColumn,
    Split,
    resolve_features,
)
from data.split import PARTS, TRAIN
from data.transform import count_missing, transform_dense
from data.vocabulary import MappedIds
from data.write_pass import PartTally, write_all_id_counts

TEACHER_COLUMN = "teacher_logit"
GENERATOR_VERSION = 2  # Raised whenever equal settings come to mean other rows.
CHUNK_ROWS = 65_536

# Distinct values of Criteo Kaggle's C1 … C26 in the full train.txt, missing counted as one.
CRITEO_CARDINALITIES = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
# Percent missing in the first 8,000 rows of Criteo Kaggle's train.txt, rounded.
_DENSE_MISSING_PERCENT = (45, 0, 20, 20, 5, 25, 5, 0, 5, 45, 5, 78, 20)
_SPARSE_MISSING_PERCENT = (
    0, 0, 3, 3, 0, 13, 0, 0, 0, 0, 0, 3, 0, 0, 0, 3, 0, 0, 45, 45, 3, 82, 0, 3, 45, 45,
)  # fmt: skip
NUM_DENSE, NUM_SPARSE = 13, 26
_ROW_BYTES = 1 + 4 * (NUM_DENSE + NUM_SPARSE)
_NUM_PAIRS = 6
_PAIR_SCALE = 0.5
_EFFECT_HALF_RANK = 10.0
_LOGIT_DEVIATION = 1.35


@dataclass
class SyntheticConfig:
    """Settings of the generator."""

    num_train: int = 1_500_000
    """Rows to train on."""
    num_valid: int = 100_000
    """Rows to validate on."""
    num_test: int = 100_000
    """Rows to test on."""
    cardinality_scale: float = 0.01
    """Criteo Kaggle's cardinalities times this, at least 3 each (1.0: 33.8 M ids in all)."""
    zipf: float = 1.05
    """Exponent of the ids' distribution; must exceed 1."""
    label_rate: float = 0.256
    """Share of positive labels."""
    seed: int = 0
    """Another seed, another teacher and other rows."""
    raw_out: str | None = None
    """`dlrm prepare data=synthetic data.synthetic.raw_out=FILE`: write raw Criteo TSV instead."""

    def __post_init__(self) -> None:
        for name in ("num_train", "num_valid", "num_test"):
            value = getattr(self, name)
            if value < (1 if name == "num_train" else 0):
                raise UserError(f"data.synthetic.{name}={value}: must not be negative (train: 1)")
        if not self.cardinality_scale > 0:
            raise UserError(
                f"data.synthetic.cardinality_scale={self.cardinality_scale}: must be positive"
            )
        if not self.zipf > 1:
            raise UserError(f"data.synthetic.zipf={self.zipf}: must exceed 1")
        if not 0 < self.label_rate < 1:
            raise UserError(f"data.synthetic.label_rate={self.label_rate}: must lie in (0, 1)")

    def settings(self) -> dict[str, float]:
        """What the data depend on, for the manifest."""
        values = dataclasses.asdict(self)
        del values["raw_out"]
        return {**values, "generator": GENERATOR_VERSION}

    def digest(self) -> str:
        """Short name of the dataset that these settings give."""
        text = json.dumps([FORMAT_VERSION, self.settings()], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def cardinalities(self) -> list[int]:
        """Ids of each feature."""
        return [max(3, round(n * self.cardinality_scale)) for n in CRITEO_CARDINALITIES]


@dataclass(frozen=True)
class SyntheticChunk:
    """Raw values of some rows.

    Attributes:
        dense_NB: fp64 counts, NaN = missing.
        ranks_FB: int64 rank of each id in its feature's popularity, -1 = missing.
        logit_B: fp64, the teacher's.
        label_B: uint8.
    """

    dense_NB: np.ndarray
    ranks_FB: np.ndarray
    logit_B: np.ndarray
    label_B: np.ndarray


class Teacher:
    """The model that labels are drawn from; see the module's docstring."""

    def __init__(self, config: SyntheticConfig) -> None:
        self._config = config
        self._cardinalities = config.cardinalities()
        rng = np.random.Generator(np.random.Philox(key=[config.seed, 0xD17]))
        self._slopes = rng.normal(0.0, 0.25, NUM_DENSE)
        self._scales = rng.uniform(0.3, 1.0, NUM_SPARSE)
        # The entry after the last id is that of a missing value.
        shrink = [
            1 / np.sqrt(1 + np.arange(n + 1) / _EFFECT_HALF_RANK) for n in self._cardinalities
        ]
        self._effects = [
            rng.standard_normal(n + 1) * s for n, s in zip(self._cardinalities, shrink, strict=True)
        ]
        chosen = rng.choice(NUM_SPARSE, 2 * _NUM_PAIRS, replace=False)
        self._pairs = chosen.reshape(_NUM_PAIRS, 2).tolist()
        self._latents = {
            f: rng.standard_normal(self._cardinalities[f] + 1) * shrink[f] for f in chosen.tolist()
        }
        self._factor, self._bias = 1.0, 0.0
        self._calibrate()

    def chunk(self, number: int) -> SyntheticChunk:
        """Rows `number · 65,536 …` (always a full chunk)."""
        rng = np.random.Generator(np.random.Philox(key=[self._config.seed, (1 << 32) + number]))
        dense_NB = self._draw_dense(rng)
        ranks_FB = self._draw_ranks(rng)
        logit_B = self._factor * self._score(dense_NB, ranks_FB) + self._bias
        label_B = (rng.random(CHUNK_ROWS) < 1 / (1 + np.exp(-logit_B))).astype(np.uint8)
        return SyntheticChunk(dense_NB, ranks_FB, logit_B, label_B)

    def _draw_dense(self, rng: np.random.Generator) -> np.ndarray:
        dense_NB = np.floor(np.exp(rng.normal(1.5, 1.5, (NUM_DENSE, CHUNK_ROWS))))
        dense_NB[1] -= 3  # As in Criteo, the second count is sometimes negative.
        is_missing = rng.random((NUM_DENSE, CHUNK_ROWS)) * 100 < np.array(
            _DENSE_MISSING_PERCENT
        ).reshape(-1, 1)
        dense_NB[is_missing] = np.nan
        return dense_NB

    def _draw_ranks(self, rng: np.random.Generator) -> np.ndarray:
        ranks_FB = np.empty((NUM_SPARSE, CHUNK_ROWS), dtype=np.int64)
        power = 1 - self._config.zipf
        for feature, cardinality in enumerate(self._cardinalities):
            # Inverse of the distribution function of the continuous law x^-zipf on [1, n + 1].
            top = (cardinality + 1.0) ** power
            uniform = rng.random(CHUNK_ROWS)
            ranks = (1 - uniform * (1 - top)) ** (1 / power)
            ranks_FB[feature] = np.minimum(ranks.astype(np.int64) - 1, cardinality - 1)
            if percent := _SPARSE_MISSING_PERCENT[feature]:
                ranks_FB[feature][rng.random(CHUNK_ROWS) * 100 < percent] = -1
        return ranks_FB

    def _score(self, dense_NB: np.ndarray, ranks_FB: np.ndarray) -> np.ndarray:
        z_NB = np.log1p(np.fmax(dense_NB, 0.0)) - 1.5
        score_B = self._slopes @ z_NB
        for feature in range(NUM_SPARSE):
            score_B += self._scales[feature] * self._effects[feature][ranks_FB[feature]]
        for left, right in self._pairs:
            product_B = self._latents[left][ranks_FB[left]] * self._latents[right][ranks_FB[right]]
            score_B += _PAIR_SCALE * product_B
        return score_B

    def _calibrate(self) -> None:
        """Sets scale and bias so that logits spread as wanted and the label rate is as asked."""
        rng = np.random.Generator(np.random.Philox(key=[self._config.seed, 0xCA1]))
        scores = np.concatenate(
            [self._score(self._draw_dense(rng), self._draw_ranks(rng)) for _ in range(3)]
        )
        self._factor = _LOGIT_DEVIATION / float(scores.std())
        logits = self._factor * scores
        low, high = -30.0, 30.0
        for _ in range(60):
            middle = (low + high) / 2
            rate = float((1 / (1 + np.exp(-(logits + middle)))).mean())
            low, high = (middle, high) if rate < self._config.label_rate else (low, middle)
        self._bias = (low + high) / 2


def synthetic_schema(config: SyntheticConfig) -> Schema:
    """The schema under which the generator's ids are what `hash` makes of the rank."""
    dense = [f"I{n}" for n in range(1, NUM_DENSE + 1)]
    sparse = [f"C{n}" for n in range(1, NUM_SPARSE + 1)]
    return Schema(
        name="synthetic",
        format=RawFormat(columns=["label", *dense, *sparse]),
        dense={name: DenseColumn("log1p") for name in dense},
        sparse={
            name: SparseColumn(rows=n + 1)
            for name, n in zip(sparse, config.cardinalities(), strict=True)
        },
        sparse_default=SparseColumn(token="int", vocabulary="hash", missing="row"),
        split=Split(kind="given"),
    )


def synthesise(
    config: SyntheticConfig,
    root: Path,
    listener: ProgressListener | None = None,
    *,
    overwrite: bool = False,
) -> Manifest:
    """Makes the prepared dataset in `root`; returns at once where it is there already.

    Raises:
        UserError: where `root` holds another dataset.
    """
    listener = listener or SilentListener()
    if (root / MANIFEST).exists() and not overwrite:
        manifest = _reuse(config, root)
        tidy(root, manifest)
        return manifest
    # Runs that are started together want the same rows: one makes them, the others wait.
    wait = None if overwrite else lambda holder: listener.phase(f"wait for {holder}", 0)
    with making(root, [], wait) as work:
        if (root / MANIFEST).exists() and not overwrite:  # Another process was faster.
            return _reuse(config, root)
        check_same_kind(root, "synthetic", is_synthetic=True)
        manifest = _generate(config, build_folder(work), work, listener)
        commit(root, work, manifest)
        return manifest


def _reuse(config: SyntheticConfig, root: Path) -> Manifest:
    manifest = load_manifest(root)
    if manifest.synthetic is None:
        raise UserError(
            f"data.root={root} holds another dataset ({manifest.schema.name}, prepared from raw "
            "files), not data=synthetic; choose another data.root"
        )
    asked = config.settings()
    if manifest.synthetic != asked:
        held = manifest.synthetic
        others = ", ".join(
            f"{name}={held.get(name)}, not {asked.get(name)}"
            for name in sorted({*held, *asked})
            if held.get(name) != asked.get(name)
        )
        raise UserError(
            f"data.root={root} holds another dataset, synthetic rows of other settings ({others}); "
            "leave out data= and data.synthetic. to use it as it is, choose another data.root, or "
            "set data.overwrite=true to replace it"
        )
    return manifest


def write_raw_tsv(
    config: SyntheticConfig, path: Path, listener: ProgressListener | None = None
) -> int:
    """Writes the same rows (train, valid, test in order) as raw Criteo TSV; returns the rows.

    Ids become 8 hex digits: an odd multiple of the rank modulo 2^32, so distinct and scattered.
    """
    listener = listener or SilentListener()
    num_rows = config.num_train + config.num_valid + config.num_test
    listener.phase("generate", _ROW_BYTES * num_rows)
    # A name that nobody else's file has.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with naming(path), open_new(temporary) as sink:
            _write_raw_rows(config, num_rows, sink, listener)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return num_rows


def _write_raw_rows(
    config: SyntheticConfig, num_rows: int, sink: BinaryIO, listener: ProgressListener
) -> None:
    options = pa_csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    for start, stop, chunk in _chunks(Teacher(config), 0, num_rows):
        columns: dict[str, pa.Array] = {"label": pa.array(chunk.label_B[start:stop])}
        for n, values in enumerate(chunk.dense_NB[:, start:stop]):
            is_missing = np.isnan(values)
            whole = np.where(is_missing, 0, values).astype(np.int64)
            columns[f"I{n + 1}"] = pa.array(whole, mask=is_missing)
        for f, ranks in enumerate(chunk.ranks_FB[:, start:stop]):
            columns[f"C{f + 1}"] = _hex_tokens(f, ranks)
        pa_csv.write_csv(pa.table(columns), sink, options)
        listener.advance(_ROW_BYTES * (stop - start), stop - start)


def _hex_tokens(feature: int, ranks: np.ndarray) -> pa.Array:
    values = (ranks * 2654435761 + (feature + 1) * 40503) & 0xFFFFFFFF
    digits = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)
    text = np.empty((len(values), 8), dtype=np.uint8)
    for place in range(8):
        text[:, place] = digits[(values >> (28 - 4 * place)) & 15]
    tokens = pa.StringArray.from_buffers(
        len(values),
        pa.py_buffer(np.arange(0, 8 * len(values) + 1, 8, dtype=np.int32)),
        pa.py_buffer(text),
    )
    if (ranks < 0).any():
        present = np.where(ranks >= 0, np.arange(len(ranks)), -1)
        tokens = tokens.take(pa.array(present, mask=ranks < 0))
    return tokens


def _generate(
    config: SyntheticConfig, root: Path, work: Path, listener: ProgressListener
) -> Manifest:
    schema = synthetic_schema(config)
    features = resolve_features(schema, "modulo")
    counters = {f.name: KeyCounter(work / "ids" / f.name, 8 << 20) for f in features}
    num_rows = config.num_train + config.num_valid + config.num_test
    listener.phase("generate", _ROW_BYTES * num_rows)
    parts: dict[str, PartInfo] = {}
    teacher = Teacher(config)
    table_rows = {f.table: f.rows or 0 for f in features}
    with ThreadPoolExecutor(2) as pool:
        begin = 0
        for number, (part, size) in enumerate(
            zip(PARTS, (config.num_train, config.num_valid, config.num_test), strict=True)
        ):
            writer = PartWriter(root, part, pool)
            tally = PartTally(list(counters))
            for start, stop, chunk in _chunks(teacher, begin, size, pool):
                rows = _rows_of(schema, features, chunk, start, stop)
                writer.append(rows.to_table(features, table_rows))
                tally.add_rows(rows)
                for name, mapped in rows.ids.items() if number == TRAIN else ():
                    counters[name].add(mapped.used_rows, mapped.used_counts)
                listener.advance(_ROW_BYTES * (stop - start), stop - start)
            parts[part] = tally.info(writer.close(), writer.group_rows)
            begin += size
    counts = write_all_id_counts(counters, root)
    outputs = {entry["file"]: file_sha256(root / entry["file"]) for entry in counts.values()}
    return Manifest(
        schema=schema,
        table_rows=table_rows,
        inputs=[],
        parts=parts,
        moments={},
        counts=counts,
        outputs=outputs,
        extra_columns=[TEACHER_COLUMN],
        synthetic=config.settings(),
    )


def _chunks(
    teacher: Teacher, begin: int, size: int, pool: ThreadPoolExecutor | None = None
) -> Iterator[tuple[int, int, SyntheticChunk]]:
    """(first, last + 1, chunk) for rows `begin … begin + size - 1` of the stream."""
    end = begin + size
    numbers = range(begin // CHUNK_ROWS, -(-end // CHUNK_ROWS))
    flying: deque[Future[SyntheticChunk]] = deque()
    ahead = iter(numbers)
    for number in numbers:
        if pool is None:
            chunk = teacher.chunk(number)
        else:
            while len(flying) < 2 and (upcoming := next(ahead, None)) is not None:
                flying.append(pool.submit(teacher.chunk, upcoming))
            chunk = flying.popleft().result()
        first = number * CHUNK_ROWS
        yield max(begin - first, 0), min(end - first, CHUNK_ROWS), chunk


def _rows_of(
    schema: Schema, features: tuple[Feature, ...], chunk: SyntheticChunk, start: int, stop: int
) -> Rows:
    dense = {name: chunk.dense_NB[n, start:stop] for n, name in enumerate(schema.dense)}
    ids = {}
    for feature in features:
        ranks = chunk.ranks_FB[feature.position, start:stop]
        rows = ranks + 1  # Row 0: missing.
        used_rows, used_counts = np.unique(rows, return_counts=True)
        num_missing = int(np.count_nonzero(ranks < 0))
        ids[feature.name] = MappedIds(
            rows, None, None, len(rows), 0, num_missing, used_rows, used_counts
        )
    return Rows(
        num_rows=stop - start,
        label_B=chunk.label_B[start:stop],
        weight_B=None,
        dense=transform_dense(schema, dense, {}),
        ids=ids,
        extra={TEACHER_COLUMN: chunk.logit_B[start:stop].astype(np.float32)},
        missing_dense=count_missing(dense),
    )
