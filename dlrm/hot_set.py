"""The hot rows of a run: chosen before training, followed when the ids drift."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from data.errors import UserError
from data.parquet import Order, PreparedDataset
from dlrm.build import build_tables
from dlrm.config import TrainRun
from dlrm.pipeline import Pipeline
from dlrm.planning import load_table_stats
from embeddings.host.executor import QUEUES
from embeddings.host.host_tables import HostTables
from embeddings.host.hot_ranking import TableCounts
from embeddings.host.hotness import (
    HotPrediction,
    HotSet,
    budget_curve,
    choose_hot,
    hit_curve,
    lines,
    predict,
)
from embeddings.keys import sum_counts
from embeddings.sharded import ShardedEmbeddings
from embeddings.traffic import TableStats

Int64Array = npt.NDArray[np.int64]
Counts = Mapping[str, tuple[Int64Array, Int64Array]]
"""Per table the rows that were looked up, ascending, and how often each."""

_MIB = 1 << 20
_RECENT_WEIGHT = 1000
_CURVE_POINTS = 12


class RunHotSet:
    """Chooses the hot rows of a run's host tables, the same on every rank, and compares what they
    were expected to give with what they gave.

    Args:
        config: the run's configuration.
        dataset: its data.
        embeddings: its tables, some of them in host memory.
        say: prints one line for the user, on rank 0.
    """

    def __init__(
        self,
        config: TrainRun,
        dataset: PreparedDataset,
        embeddings: ShardedEmbeddings,
        say: Callable[[str], None],
    ) -> None:
        assert embeddings.host is not None
        self._config, self._dataset, self._say = config, dataset, say
        self._embeddings, self._host = embeddings, embeddings.host
        self._comm = embeddings.comm
        self._in_host = {s.table for s in embeddings.plan.shards if s.memory == "host"}
        # What the features look up per sample; of later counts only the rows are taken.
        self._bags: dict[str, tuple[float, ...]] = {}
        self._seen = (0, 0)
        self._num_choices = 0  # After the first.
        source = config.sharding.host.hot_from
        counts = self._of_dataset() if source == "counts" else self._of_sample()
        self._counts = counts
        tables = self._table_counts(counts)
        self._curves = {table.name: hit_curve(table, _CURVE_POINTS) for table in tables}
        whole_bytes = sum(table.num_bytes for table in tables)
        budgets = [whole_bytes >> shift for shift in range(_CURVE_POINTS, -1, -1)]
        whole_rows = config.sharding.host.whole_rows
        self._budget_curve = budget_curve(tables, budgets, whole_rows)
        self._hot = self._choose(tables)
        self.prediction: HotPrediction = predict(tables, self._hot)
        self._host.choose_rows(self._hot.ids)

    def describe(self) -> list[str]:
        """What was chosen, for people."""
        config = self._config.sharding.host
        settings = self._host.settings
        ahead = f", {settings.lookahead} steps ahead" if settings.mode == "lookahead" else ""
        head = (
            f"{settings.mode}{ahead}: {self._hot.num_rows:,} hot rows, "
            f"{self._hot.num_bytes / _MIB:,.1f} of {config.hot_mb:g} MiB, by {config.hot_from}"
        )
        return [head, *lines(self.prediction)]

    def follow_drift(self, pipeline: Pipeline | None) -> None:
        """Chooses anew where the hot rows are found less often than expected; called by all ranks,
        between two steps. Weights and state move along; the model isn't changed."""
        drift = self._config.sharding.host.drift
        if drift is None:
            return
        hot_share = self._share_since_last_asked()
        if hot_share is None or hot_share >= self.prediction.row_hit_share - drift:
            return
        expected = self.prediction.row_hit_share
        recent = self._of_recent_steps()
        self._hot = self._choose(self._table_counts(self._recent_first(recent)))
        self.prediction = predict(self._table_counts(recent), self._hot)
        self._host.drop_staged()
        self._host.choose_rows(self._hot.ids)
        self._num_choices += 1
        if pipeline is not None:
            pipeline.replan()
        self._say(
            f"host    hot rows found in {hot_share:.1%} of the lookups, {expected:.1%} were "
            f"expected: chosen anew by the latest steps, {self.prediction.row_hit_share:.1%} "
            "expected"
        )

    def figures(self) -> dict[str, Any]:
        """What was chosen and expected, for result.json."""
        return {
            "hot_rows": self._hot.num_rows,
            "hot_bytes": self._hot.num_bytes,
            "budget_bytes": self._hot.budget_bytes,
            "num_hot_choices": self._num_choices,
            "expected_row_hit_share": self.prediction.row_hit_share,
            "expected_all_hot_share": self.prediction.all_hot_share,
            "budget_curve": self._budget_curve,
            "tables": {
                name: {
                    "hot_rows": table.hot_rows,
                    "rows": table.rows,
                    "expected_hit_share": table.hit_share,
                    "hit_curve": self._curves[name],
                }
                for name, table in self.prediction.per_table.items()
            },
        }

    # --------------------------------------------------------------------------------- choosing

    def _choose(self, tables: list[TableCounts]) -> HotSet:
        budget_bytes = self._host.settings.hot_bytes
        whole_rows = self._config.sharding.host.whole_rows
        return choose_hot(tables, budget_bytes=budget_bytes, whole_rows=whole_rows)

    def _table_counts(self, counts: Counts) -> list[TableCounts]:
        row_bytes = self._host.hot_row_bytes()
        empty = np.empty(0, dtype=np.int64)
        found = []
        for table in self._embeddings.tables:
            if table.name not in self._in_host:
                continue
            ids_K, counts_K = counts.get(table.name, (empty, empty))
            if table.name not in row_bytes:
                continue  # No feature looks it up.
            record_bytes = row_bytes[table.name]
            bags = self._bags.get(table.name, ())
            found.append(TableCounts(table.name, table.rows, record_bytes, ids_K, counts_K, bags))
        return found

    def _keep_bags(self, lookups_per_sample: Mapping[str, float]) -> None:
        """Features of one table are taken to look up equally many ids."""
        _, features = build_tables(self._config, self._dataset.manifest)
        for table, lookups in lookups_per_sample.items():
            num_features = sum(1 for feature in features if feature.table == table)
            self._bags[table] = (lookups / num_features,) * num_features if num_features else ()

    def _of_dataset(self) -> Counts:
        stats: dict[str, TableStats] = load_table_stats(self._dataset)
        missing = sorted(self._in_host - set(stats))
        if missing:
            raise UserError(
                f"sharding.host.hot_from=counts: the dataset has no id counts of "
                f"{', '.join(missing[:4])}; prepare it again with data.overwrite=true, or set "
                "sharding.host.hot_from=sample"
            )
        self._keep_bags({name: entry.lookups_per_sample for name, entry in stats.items()})
        return {name: (entry.ids_K, entry.counts_K) for name, entry in stats.items()}

    def _of_sample(self) -> Counts:
        """The learning phase: counts of the first batches of the first epoch, as trained on."""
        config, comm = self._config, self._comm
        order = Order(
            config.data.batch_size,
            seed=config.seed,
            epoch=0,
            shuffle=config.data.shuffle,
            rank=comm.rank,
            world_size=comm.world_size,
        )
        num_batches = self._dataset.num_batches("train", config.data.batch_size)
        num_read = math.ceil(num_batches * config.sharding.host.sample_share)
        _, features = build_tables(config, self._dataset.manifest)
        rows = {table.name: table.rows for table in self._embeddings.tables}
        seen: dict[str, list[Int64Array]] = {name: [] for name in self._in_host}
        num_samples = 0
        for _, batch in zip(range(num_read), self._dataset.batches("train", order), strict=False):
            num_samples += batch.batch_size
            values_L, offsets = batch.ids.values_L.numpy(), batch.ids.offsets.numpy()
            for number, feature in enumerate(features):
                if feature.table in seen:
                    first = number * batch.batch_size
                    stop = offsets[first + batch.batch_size]
                    ids_L = values_L[offsets[first] : stop]
                    # What isn't a row is an error of the step that looks it up.
                    seen[feature.table].append(ids_L[(ids_L >= 0) & (ids_L < rows[feature.table])])
        own = {
            name: np.unique(np.concatenate(parts), return_counts=True)
            for name, parts in seen.items()
            if parts
        }
        counts = self._sum_ranks(own)
        total = max(1, sum(self._comm.all_gather_object(num_samples)))
        self._keep_bags({name: int(c.sum()) / total for name, (_, c) in counts.items()})
        return counts

    def _of_recent_steps(self) -> Counts:
        return self._sum_ranks(self._host.recent_rows())

    def _recent_first(self, recent: Counts) -> Counts:
        """Counts that rank rows by the latest steps, and those that these leave equal, above all
        the rows that they never saw, by the counts of before."""
        ranked: dict[str, tuple[Int64Array, Int64Array]] = {}
        empty = np.empty(0, dtype=np.int64)
        most = max((int(c.max()) for _, c in self._counts.values() if c.size), default=1)
        for name in self._in_host:
            old_ids, old_counts = self._counts.get(name, (empty, empty))
            new_ids, new_counts = recent.get(name, (empty, empty))
            scaled = old_counts * (_RECENT_WEIGHT - 1) // most
            ranked[name] = sum_counts([(old_ids, scaled), (new_ids, new_counts * _RECENT_WEIGHT)])
        return ranked

    def _sum_ranks(self, own: Counts) -> Counts:
        with self._comm.uncounted():
            of_ranks = self._comm.all_gather_object(dict(own))
        summed: dict[str, tuple[Int64Array, Int64Array]] = {}
        for name in sorted({name for counts in of_ranks for name in counts}):
            summed[name] = sum_counts([counts[name] for counts in of_ranks if name in counts])
        return summed

    def _share_since_last_asked(self) -> float | None:
        """Hot lookups over all lookups of all ranks since the last call, one evaluation ago."""
        counters = self._host.counters
        own = (counters.num_lookups - self._seen[0], counters.num_hot_lookups - self._seen[1])
        self._seen = (counters.num_lookups, counters.num_hot_lookups)
        with self._comm.uncounted():
            of_ranks = self._comm.all_gather_object(own)
        num_lookups = sum(lookups for lookups, _ in of_ranks)
        return sum(hot for _, hot in of_ranks) / num_lookups if num_lookups else None


def describe_outcome(figures: Mapping[str, Any]) -> list[str]:
    """What was expected and what came, for people; `figures`: `host` of result.json."""

    def share(name: str) -> str:
        value = figures[name]
        return "-" if value is None else f"{value:.1%}"

    step = figures["per_step"]
    return [
        f"hot rows found in {share('row_hit_share')} of the lookups "
        f"({share('expected_row_hit_share')} expected), {share('all_hot_share')} of the samples "
        f"wholly hot ({share('expected_all_hot_share')})",
        f"a step: {step['cold']:,.0f} cold rows, {step['forwarded']:,.0f} of them forwarded, "
        f"{step['written']:,.0f} written back; waited {step['stall_ms']:.2f} ms for rows",
    ]


def host_figures(host: HostTables, embeddings: ShardedEmbeddings) -> dict[str, Any]:
    """The measured part of `host` in result.json: sums over ranks; called by all."""
    counters = host.counters
    own = dict(vars(counters))
    busy_s = host.executor.timeline.busy_s()
    own["queue_s"] = {queue: busy_s[queue] for queue in QUEUES}
    own["staging_bytes"] = host.staging_bytes
    own["slot_map_bytes"] = host.slot_map_bytes
    with embeddings.comm.uncounted():
        of_ranks = embeddings.comm.all_gather_object(own)

    def total(name: str) -> float:
        return sum(rank[name] for rank in of_ranks)

    def share(part: str, whole: str) -> float | None:
        return total(part) / total(whole) if total(whole) else None

    num_steps = max(1, max(rank["num_steps"] for rank in of_ranks))
    num_ranks = len(of_ranks)
    queue_s = sum(sum(rank["queue_s"].values()) for rank in of_ranks)
    return {
        "mode": host.settings.mode,
        "lookahead": host.settings.window,
        "row_hit_share": share("num_hot_lookups", "num_lookups"),
        "unique_row_hit_share": share("num_hot_unique", "num_unique"),
        "all_hot_share": share("num_hot_samples", "num_samples"),
        "per_step": {
            name: total(f"num_{name}") / num_steps
            for name in ("cold", "fetched", "forwarded", "written", "kept")
        }
        | {
            "to_device_bytes": total("to_device_bytes") / num_steps,
            "to_host_bytes": total("to_host_bytes") / num_steps,
            "stall_ms": 1000 * total("stall_s") / num_steps / num_ranks,
            "queue_ms": {
                queue: 1000 * sum(rank["queue_s"][queue] for rank in of_ranks) / num_steps
                for queue in own["queue_s"]
            },
        },
        "hidden_share": max(0.0, 1 - total("stall_s") / queue_s) if queue_s else None,
        "num_flushed": total("num_flushed"),
        "num_hot_loads": max(rank["num_hot_loads"] for rank in of_ranks),
        "slot_map_bytes": total("slot_map_bytes"),
        "staging_bytes": {
            "host": max(rank["staging_bytes"][0] for rank in of_ranks),
            "device": max(rank["staging_bytes"][1] for rank in of_ranks),
        },
    }
