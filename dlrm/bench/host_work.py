"""What `dlrm bench host` works on: tables, ids and hot rows, and what a step has to do with them.

Everything here follows from the configuration alone, so each process makes the same of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from data.batch import Batch, JaggedIds
from data.errors import UserError
from data.synthetic import CHUNK_ROWS, SyntheticConfig, Teacher
from dlrm.build import row_optimizer
from dlrm.config import BenchRun
from embeddings.host.cost import DenseTime, HostRates, LinkRates, StepWork
from embeddings.host.hotness import HotSet, TableCounts, choose_hot
from embeddings.plan import Plan
from embeddings.plan_builders import build_plan
from embeddings.plan_choice import LayoutChoice
from embeddings.row_optim import state_widths
from embeddings.table import FeatureConfig, TableConfig

Int64Array = npt.NDArray[np.int64]

# Samples that the hot rows are chosen by; others than those of the steps.
_NUM_COUNTED_CHUNKS = 4
# Of the host's stages in mode gather; the link's directions have the same rate.
_STAGE_PARTS = {"gather": 0.3, "to_device": 0.2, "to_host": 0.2, "scatter": 0.3}
_VALUE_BYTES = 4
MIB = 1 << 20


def host_tables(config: BenchRun) -> list[TableConfig]:
    """Tables in the proportions of Criteo Kaggle's; row 0 is that of a missing value."""
    dim = config.model.embedding_dim
    sizes = _synthetic(config).cardinalities()
    return [TableConfig(f"C{number}", size + 1, dim) for number, size in enumerate(sizes, 1)]


def host_features(tables: Sequence[TableConfig]) -> list[FeatureConfig]:
    """One for each table."""
    return [FeatureConfig(table.name, table.name) for table in tables]


def host_plan(config: BenchRun) -> Plan:
    """One process, every table whole and in host memory."""
    tables = host_tables(config)
    choice = LayoutChoice(layout="table_wise", exchange="kv", memory="host")
    layout = build_plan(tables, host_features(tables), {}, choice, 1, 1, config.data.batch_size)
    return layout.plan


def num_batches(config: BenchRun) -> int:
    """Steps to warm up, those that are measured, and as many more as rows are staged ahead: in the
    last measured step, too, a later one sets out."""
    bench = config.bench
    return bench.warmup_steps + bench.steps + config.sharding.host.lookahead


@dataclass(frozen=True, eq=False)
class HostWorkload:
    """Ids of all steps, and ids counted before.

    Attributes:
        ids_TFB: int64 row of each feature's own table, `(steps, F, B)`.
        counts: how often the rows were looked up in samples before these.
    """

    ids_TFB: Int64Array
    counts: tuple[TableCounts, ...]

    @classmethod
    def draw(cls, config: BenchRun) -> HostWorkload:
        """Ids by a Zipf law, missing ones as often as in Criteo's data."""
        tables = host_tables(config)
        teacher = Teacher(_synthetic(config))
        batch_size, num_steps = config.data.batch_size, num_batches(config)

        def rows(first: int, count: int) -> Int64Array:
            chunks = [teacher.chunk(number).ranks_FB + 1 for number in range(first, first + count)]
            return np.concatenate(chunks, axis=1)

        counted_FB = rows(0, _NUM_COUNTED_CHUNKS)
        num_chunks = -(-batch_size * num_steps // CHUNK_ROWS)
        ids_FL = rows(_NUM_COUNTED_CHUNKS, num_chunks)[:, : batch_size * num_steps]
        ids_TFB = ids_FL.reshape(len(tables), num_steps, batch_size).swapaxes(0, 1)
        counts = []
        for table, ids_B in zip(tables, counted_FB, strict=True):
            width = table.dim + sum(state_widths(row_optimizer(config), table.dim).values())
            found = np.unique(ids_B, return_counts=True)
            entry = TableCounts(table.name, table.rows, width * _VALUE_BYTES, *found, (1.0,))
            counts.append(entry)
        return cls(np.ascontiguousarray(ids_TFB), tuple(counts))

    @property
    def num_steps(self) -> int:
        """Batches."""
        return int(self.ids_TFB.shape[0])

    @property
    def record_bytes(self) -> int:
        """Of a row with its state: all tables have one dim."""
        return self.counts[0].record_bytes

    @property
    def table_bytes(self) -> int:
        """Of all rows with their state."""
        return sum(table.num_bytes for table in self.counts)

    def hot_set(self, budget_bytes: int, whole_rows: int) -> HotSet:
        """The hot rows of a budget, by the counted samples."""
        return choose_hot(self.counts, budget_bytes=budget_bytes, whole_rows=whole_rows)

    def batches(self) -> list[Batch]:
        """All steps' batches; `row_B` is a sample's place in its batch."""
        _, num_features, batch_size = self.ids_TFB.shape
        offsets = torch.arange(num_features * batch_size + 1)
        return [
            Batch(
                dense_BN=torch.empty(batch_size, 0),
                ids=JaggedIds(torch.from_numpy(ids_FB.reshape(-1)), offsets, num_features),
                label_B=None,
                weight_B=None,
                row_B=torch.arange(batch_size),
            )
            for ids_FB in self.ids_TFB
        ]

    @cached_property
    def _first_keys_F(self) -> Int64Array:
        return np.cumsum([0, *(table.rows for table in self.counts)])

    @cached_property
    def _keys_of_step(self) -> list[Int64Array]:
        """Distinct rows of each step, numbered over all tables."""
        first_F1 = self._first_keys_F[:-1, None]
        return [np.unique(ids_FB + first_F1) for ids_FB in self.ids_TFB]

    def count(self, hot: HotSet, lookahead: int) -> StepCounts:
        """What every step has to do, when these rows are hot and steps are staged ahead."""
        is_hot = np.zeros(int(self._first_keys_F[-1]), dtype=bool)
        for table, first in zip(self.counts, self._first_keys_F[:-1].tolist(), strict=True):
            is_hot[hot.ids[table.name] + first] = True
        num = self.num_steps
        counts = StepCounts(*(np.zeros(num, dtype=np.int64) for _ in range(5)))
        never = -(lookahead + 1)
        last_step = np.full(is_hot.size, never, dtype=np.int64)
        for step, keys_K in enumerate(self._keys_of_step):
            cold_K = keys_K[~is_hot[keys_K]]
            last_K = last_step[cold_K]
            # Held by a step that is staged still: its record is forwarded, not written back.
            is_held_K = step - last_K <= lookahead
            counts.unique_T[step] = keys_K.size
            counts.cold_T[step] = cold_K.size
            counts.fetched_T[step] = cold_K.size - int(is_held_K.sum())
            counts.written_T[step] += cold_K.size
            np.subtract.at(counts.written_T, last_K[is_held_K], 1)
            last_step[cold_K] = step
            is_hot_FB = is_hot[self.ids_TFB[step] + self._first_keys_F[:-1, None]]
            counts.hot_samples_T[step] = int(is_hot_FB.all(axis=0).sum())
        return counts


@dataclass(frozen=True, eq=False)
class StepCounts:
    """Per step, all int64 `(T,)`.

    Attributes:
        unique_T: distinct rows.
        cold_T: of these, cold ones.
        fetched_T: of these, read from the store; the others are forwarded by an earlier step.
        written_T: of the cold ones, written back; the others are forwarded to a later step.
        hot_samples_T: samples whose every id is hot.
    """

    unique_T: Int64Array
    cold_T: Int64Array
    fetched_T: Int64Array
    written_T: Int64Array
    hot_samples_T: Int64Array

    def work(self, config: BenchRun, workload: HostWorkload) -> StepWork:
        """The mean over the measured steps."""
        bench = config.bench
        measured = slice(bench.warmup_steps, bench.warmup_steps + bench.steps)
        dim, batch_size = config.model.embedding_dim, config.data.batch_size
        num_features = workload.ids_TFB.shape[1]
        num_cold = float(self.cold_T[measured].mean())
        num_written = float(self.written_T[measured].mean())
        return StepWork(
            num_samples=batch_size,
            record_bytes=workload.record_bytes,
            num_cold=num_cold,
            num_fetched=float(self.fetched_T[measured].mean()),
            num_forwarded=num_cold - num_written,
            num_written=num_written,
            all_hot_share=float(self.hot_samples_T[measured].mean()) / batch_size,
            num_unique=float(self.unique_T[measured].mean()),
            pooled_bytes=batch_size * num_features * dim * _VALUE_BYTES,
            row_bytes=dim * _VALUE_BYTES,
        )


def choose_rates(config: BenchRun, work: StepWork) -> tuple[HostRates, DenseTime]:
    """Rates at which the host's stages of mode `gather` sum to `bench.host.stage_share` of the
    dense time.

    Raises:
        UserError: where no row is cold, so that nothing moves at any rate.
    """
    if work.num_cold < 1:
        raise UserError(
            f"sharding.host.hot_mb={config.sharding.host.hot_mb:g}: every row that is looked up is "
            "hot, so nothing moves; lower it, or raise bench.host.table_scale"
        )
    host = config.bench.host
    stages_s = host.stage_share * host.dense_ms / 1e3
    num_bytes = work.num_cold * work.record_bytes
    per_s = {name: num_bytes / (part * stages_s) for name, part in _STAGE_PARTS.items()}
    rates = HostRates(per_s["gather"], per_s["scatter"], LinkRates(per_s["to_device"]))
    return rates, dense_time(host.dense_ms, host.fixed_share, work.num_samples)


def dense_time(dense_ms: float, fixed_share: float, num_samples: int) -> DenseTime:
    """So that a whole batch takes `dense_ms`."""
    dense_s = dense_ms / 1e3
    return DenseTime(fixed_share * dense_s, (1 - fixed_share) * dense_s / num_samples)


def hot_bytes(hot_mb: float) -> int:
    """Bytes of a budget."""
    return int(hot_mb * MIB)


def _synthetic(config: BenchRun) -> SyntheticConfig:
    host = config.bench.host
    return replace(
        SyntheticConfig(), cardinality_scale=host.table_scale, zipf=host.zipf, seed=config.seed
    )
