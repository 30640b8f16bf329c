"""Pass 2 of `prepare`: tokens and moments of the training part → vocabularies."""

from __future__ import annotations

import math
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from data.arrays import Arrays, load_arrays
from data.blocks import counting_names
from data.counting import KeyCounter
from data.errors import UserError
from data.files import file_name
from data.parse_pass import NUM_THREADS, SpooledFile, spooled_blocks
from data.progress import ProgressListener
from data.schema import Feature, Schema
from data.split import TRAIN, SplitRule
from data.tokens import MISSING
from data.transform import Moments
from data.vocabulary import Vocabulary, build_dictionary, map_dictionary

_COUNTER_BYTES = 128 << 20
_DICTIONARY_BYTES_IN_MEMORY = 256 << 20


class CountPass:
    """Counts once over the spool, tables divided among threads.

    Args:
        schema: names the standardised columns.
        features: the sparse features.
        root: the folder that the dataset is built in; dictionaries go to `root/vocabulary`.
        work: folder for spilled counts.
        listener: follows the progress.
    """

    def __init__(
        self,
        schema: Schema,
        features: tuple[Feature, ...],
        root: Path,
        work: Path,
        listener: ProgressListener,
    ) -> None:
        self._features, self._root, self._work = features, root, work
        self._listener = listener
        self._counted = [f for f in features if f.vocabulary == "dictionary"]
        tables = {f.table: f for f in reversed(self._counted)}
        share = _COUNTER_BYTES // max(len(tables), 1)
        self._dictionaries = tables
        self._counters = {
            table: KeyCounter(work / "tokens" / file_name(table), share) for table in tables
        }
        standardised = [n for n, c in schema.dense.items() if c.transform == "standardise"]
        self._moments = {name: Moments() for name in standardised}

    def run(
        self, spooled: list[SpooledFile], rule: SplitRule
    ) -> tuple[dict[str, Vocabulary], dict[str, Moments]]:
        """Vocabularies by table, and the moments of standardised columns."""
        self._listener.phase("count", sum(entry.info.num_bytes for entry in spooled))
        tables = list(self._dictionaries)
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            jobs = [
                pool.submit(self._count, spooled, rule, set(tables[n::NUM_THREADS]), n == 0)
                for n in range(NUM_THREADS)
            ]
            for job in jobs:
                job.result()
            for name, moments in self._moments.items():
                if not math.isfinite(moments.squares) or not math.isfinite(moments.mean):
                    raise UserError(
                        f"column {name}: its values are too large to take a deviation of; choose "
                        f"another data.schema.dense.{name}.transform"
                    )
            return self._build_vocabularies(pool), self._moments

    def _count(
        self, spooled: list[SpooledFile], rule: SplitRule, tables: set[str], is_first: bool
    ) -> None:
        """One thread's share: some tables, over all blocks; the first also takes the moments."""
        mine = [f for f in self._counted if f.table in tables]
        names = [name for f in mine for name in counting_names(f)]
        names += [f"dense.{name}" for name in self._moments] if is_first else []
        for block in spooled_blocks(spooled):
            is_train = rule.parts_of(block.file_index, block.start, block.stop) == TRAIN
            if names and is_train.any():
                arrays = load_arrays(block.path, names)
                for feature in mine:
                    _count_block(self._counters[feature.table], feature, arrays, is_train)
                for name, moments in self._moments.items() if is_first else ():
                    self._moments[name] = moments.plus(arrays[f"dense.{name}"][is_train])
            if is_first:
                self._listener.advance(block.num_raw_bytes, block.stop - block.start)

    def _build_vocabularies(self, pool: ThreadPoolExecutor) -> dict[str, Vocabulary]:
        folder, mapped = self._root / "vocabulary", self._work / "dictionaries"
        folder.mkdir()
        mapped.mkdir(exist_ok=True)
        jobs = {
            table: pool.submit(
                build_dictionary,
                self._counters[table],
                feature,
                folder / f"{file_name(table)}.parquet",
                mapped,
            )
            for table, feature in self._dictionaries.items()
        }
        built = {table: job.result() for table, job in jobs.items()}
        if (self._work / "tokens").exists():
            shutil.rmtree(self._work / "tokens")
        # A key and its row take 16 bytes.
        total_bytes = sum(16 * num_tokens for _, num_tokens in built.values())
        in_memory = total_bytes <= _DICTIONARY_BYTES_IN_MEMORY
        vocabularies: dict[str, Vocabulary] = {}
        for feature in self._features:
            dictionary = None
            if feature.table in built:
                num_rows = built[feature.table][0]
                name = file_name(feature.table)
                dictionary = map_dictionary(mapped, name, num_rows, in_memory=in_memory)
            vocabularies.setdefault(feature.table, Vocabulary(feature, dictionary))
        return vocabularies


def _count_block(
    counter: KeyCounter, feature: Feature, arrays: Arrays, is_train: np.ndarray
) -> None:
    head = f"sparse.{feature.name}"
    codes, keys = arrays[f"{head}.codes"], arrays[f"{head}.keys"]
    if not is_train.all():
        is_counted = np.repeat(is_train, arrays[f"{head}.lengths"]) if feature.is_list else is_train
        codes = codes[is_counted]
    counts = np.bincount(codes[codes != MISSING], minlength=len(keys))
    counter.add(keys, counts, arrays.get(f"{head}.tokens"))
