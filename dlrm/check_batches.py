"""The batches of a check: the run's own, and hand-made ones in which sharding could go wrong.

Hand-made batches are made on rank 0 from the run's own samples, with the shares of the ranks given
explicitly; each kind is met once in a pass.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice

import torch
from torch import Tensor

from data.batch import Batch, JaggedIds
from data.manifest import Manifest
from data.parquet import Order, PreparedDataset
from dlrm.config import CheckRun, TrainRun
from embeddings.plan import Plan
from embeddings.table import FeatureConfig, TableConfig

_MAX_BAG = 5
_NUM_SOURCES = 4


@dataclass(frozen=True)
class MadeBatch:
    """A hand-made global batch.

    Attributes:
        name: what is special about it.
        batch: its samples.
        cuts: `W + 1` bounds: rank r's samples are `cuts[r] … cuts[r+1]-1`.
    """

    name: str
    batch: Batch
    cuts: tuple[int, ...]

    def of_rank(self, rank: int) -> Batch:
        """A rank's share; where all its bag weights are 1, it has none."""
        part = self.batch.narrow(self.cuts[rank], self.cuts[rank + 1])
        weights_L = part.ids.weights_L
        if weights_L is not None and bool((weights_L == 1).all()):
            ids = JaggedIds(part.ids.values_L, part.ids.offsets, part.ids.num_features)
            part = replace(part, ids=ids)
        return part


@dataclass(frozen=True)
class _Material:
    """What batches are made from."""

    tables: dict[str, TableConfig]
    features: Sequence[FeatureConfig]
    plan: Plan
    world_size: int
    generator: torch.Generator

    def rows(self, feature: FeatureConfig) -> int:
        return self.tables[feature.table].rows

    def draw(self, low: int, high: int, size: int) -> Tensor:
        """Integers from `low` to `high - 1`."""
        return torch.randint(low, high, (size,), generator=self.generator)

    def uniform(self, size: int) -> Tensor:
        return torch.rand(size, generator=self.generator)


def own_batches(
    dataset: PreparedDataset, config: TrainRun, rank: int = 0, world_size: int = 1
) -> Generator[Batch, None, None]:
    """The run's batches (a rank's shares of them), epoch after epoch without end."""
    for epoch in count():
        order = Order(
            config.data.batch_size,
            seed=config.seed,
            epoch=epoch,
            shuffle=config.data.shuffle,
            rank=rank,
            world_size=world_size,
        )
        yield from dataset.batches("train", order)


def make_batches(
    dataset: PreparedDataset,
    config: TrainRun,
    plan: Plan,
    tables: Sequence[TableConfig],
    features: Sequence[FeatureConfig],
) -> list[MadeBatch]:
    """One hand-made batch of each kind."""
    sources = list(islice(own_batches(dataset, config), _NUM_SOURCES))
    material = _Material(
        {table.name: table for table in tables},
        features,
        plan,
        plan.world_size,
        torch.Generator().manual_seed(config.seed),
    )
    return [
        MadeBatch(name, *make(sources[position % len(sources)], material))
        for position, (name, make) in enumerate(_KINDS.items())
        if features or make in _WITHOUT_IDS
    ]


def lookups_of_pass(
    config: CheckRun, manifest: Manifest, features: Sequence[FeatureConfig]
) -> Counter[str]:
    """About how many ids all batches of a pass look up, by table."""
    part = manifest.parts["train"]
    lookups: Counter[str] = Counter()
    for feature in features:
        of_sample = part.ids[feature.name] / max(part.rows, 1)
        of_made = max(of_sample, _MAX_BAG) * len(_KINDS)
        samples = config.data.batch_size
        lookups[feature.table] += math.ceil(samples * (config.check.steps * of_sample + of_made))
    return lookups


def interleave(num_own: int, made: Sequence[MadeBatch]) -> list[MadeBatch | None]:
    """The order of a pass: `num_own` batches of the run (None), the others spread among them."""
    order: list[MadeBatch | None] = []
    for step in range(num_own):
        first, stop = (len(made) * n // num_own for n in (step, step + 1))
        order += [None, *made[first:stop]]
    return order


# ----------------------------------------------------------------------------------------- kinds

Cuts = tuple[int, ...]
_Made = tuple[Batch, Cuts]


def _ragged(batch: Batch, material: _Material) -> _Made:
    """Bags of 0 to 5 ids from anywhere in the tables, repeated ones too."""
    return replace(batch, ids=_draw_bags(batch, material)), _even(batch, material)


def _weighted_bags(batch: Batch, material: _Material) -> _Made:
    """The same with bag weights, some 0, some negative; on the first of several ranks all are 1."""
    ids = _draw_bags(batch, material)
    weights_L = (material.uniform(ids.values_L.numel()) * 2.5 - 0.5).float()
    weights_L[material.uniform(weights_L.numel()) < 0.1] = 0
    cuts = _even(batch, material)
    if material.world_size > 1:
        samples_L = torch.repeat_interleave(
            torch.arange(batch.batch_size).repeat(ids.num_features), ids.offsets.diff()
        )
        weights_L[samples_L < cuts[1]] = 1
    weighted = JaggedIds(ids.values_L, ids.offsets, ids.num_features, weights_L)
    return replace(batch, ids=weighted), cuts


def _a_feature_empty(batch: Batch, material: _Material) -> _Made:
    """The first feature has no ids, nor has the first sample of each rank."""
    lengths_FB = batch.ids.lengths_FB().clone()
    lengths_FB[:1] = 0
    cuts = _even(batch, material)
    lengths_FB[:, [cut for cut in cuts if cut < batch.batch_size]] = 0
    return replace(batch, ids=_kept(batch.ids, lengths_FB)), cuts


def _no_ids(batch: Batch, material: _Material) -> _Made:
    """Samples without any id."""
    lengths_FB = torch.zeros_like(batch.ids.lengths_FB())
    return replace(batch, ids=_kept(batch.ids, lengths_FB)), _even(batch, material)


def _all_on_the_last_rank(batch: Batch, material: _Material) -> _Made:
    """Every other rank has an empty batch."""
    return batch, (0,) * material.world_size + (batch.batch_size,)


def _first_rank_empty(batch: Batch, material: _Material) -> _Made:
    """One rank has an empty batch, the others ever more."""
    ranks = max(material.world_size - 1, 1)
    inner = [batch.batch_size * n * n // ranks**2 for n in range(ranks + 1)]
    return batch, (0,) * (material.world_size + 1 - len(inner)) + tuple(inner)


def _one_sample(batch: Batch, material: _Material) -> _Made:
    """A global batch of one sample."""
    return batch.narrow(0, 1), (0,) * material.world_size + (1,)


def _fewer_samples_than_ranks(batch: Batch, material: _Material) -> _Made:
    """So some rank has none; and fewer than micro-batches, where there are any."""
    size = min(max(material.world_size - 1, 1), batch.batch_size)
    batch = batch.narrow(0, size)
    return batch, _even(batch, material)


def _uneven(batch: Batch, material: _Material) -> _Made:
    """Ever more samples on later ranks."""
    whole = material.world_size * (material.world_size + 1)
    bounds = range(material.world_size + 1)
    return batch, tuple(batch.batch_size * n * (n + 1) // whole for n in bounds)


def _one_id_everywhere(batch: Batch, material: _Material) -> _Made:
    """Every sample of every rank looks up the same row, three times, and a row of its own."""
    values = []
    for feature in material.features:
        row = material.draw(0, material.rows(feature), 1).expand(batch.batch_size, 3)
        others = material.draw(0, material.rows(feature), batch.batch_size)[:, None]
        values.append(torch.cat([row, others], dim=1).flatten())
    lengths_FB = torch.full_like(batch.ids.lengths_FB(), 4)
    return replace(batch, ids=_jagged(torch.cat(values), lengths_FB)), _even(batch, material)


def _rows_at_borders(batch: Batch, material: _Material) -> _Made:
    """Bags of two: the first and last rows of every shard, and the rows beside them."""
    values = []
    for feature in material.features:
        borders = {0, material.rows(feature) - 1}
        for shard in material.plan.shards:
            if shard.table == feature.table:
                for row in (shard.row_start, shard.row_stop):
                    borders |= {row - 1, row}
        known = torch.tensor(sorted(r for r in borders if 0 <= r < material.rows(feature)))
        positions_L = torch.arange(2 * batch.batch_size) + int(material.draw(0, known.numel(), 1))
        values.append(known[positions_L % known.numel()])
    lengths_FB = torch.full_like(batch.ids.lengths_FB(), 2)
    return replace(batch, ids=_jagged(torch.cat(values), lengths_FB)), _even(batch, material)


def _weighted_samples(batch: Batch, material: _Material) -> _Made:
    """Example weights, some 0; on the first of several ranks all are 0."""
    weight_B = (material.uniform(batch.batch_size) * 3).float()
    weight_B[material.uniform(batch.batch_size) < 0.1] = 0
    weight_B[-1] = 2.0  # `_no_weight` is the batch without any.
    cuts = _even(batch, material)
    if material.world_size > 1:
        weight_B[: min(cuts[1], batch.batch_size - 1)] = 0
    return replace(batch, weight_B=weight_B), cuts


def _no_weight(batch: Batch, material: _Material) -> _Made:
    """Example weights that are all 0: the step must change nothing."""
    return replace(batch, weight_B=torch.zeros(batch.batch_size)), _even(batch, material)


_KINDS: dict[str, Callable[[Batch, _Material], _Made]] = {
    "ragged bags": _ragged,
    "uneven shares": _uneven,
    "weighted bags": _weighted_bags,
    "one id everywhere": _one_id_everywhere,
    "rows at borders": _rows_at_borders,
    "weighted samples": _weighted_samples,
    "no weight at all": _no_weight,
    "all on the last rank": _all_on_the_last_rank,
    "first rank empty": _first_rank_empty,
    "a feature empty": _a_feature_empty,
    "no ids": _no_ids,
    "one sample": _one_sample,
    "fewer samples than ranks": _fewer_samples_than_ranks,
}
# Those that data without sparse features have too.
_WITHOUT_IDS = (
    _weighted_samples,
    _all_on_the_last_rank,
    _first_rank_empty,
    _one_sample,
    _fewer_samples_than_ranks,
)


def _even(batch: Batch, material: _Material) -> Cuts:
    bounds = range(material.world_size + 1)
    return tuple(batch.batch_size * n // material.world_size for n in bounds)


def _draw_bags(batch: Batch, material: _Material) -> JaggedIds:
    """Bags of 0 to 5 ids, half of them among a table's first rows."""
    num_features, batch_size = len(material.features), batch.batch_size
    lengths_FB = material.draw(0, _MAX_BAG + 1, num_features * batch_size).view(num_features, -1)
    values = []
    for feature, lengths_B in zip(material.features, lengths_FB, strict=True):
        size = int(lengths_B.sum())
        uniform_L = material.uniform(size).double()
        is_skewed_L = material.uniform(size) < 0.5
        uniform_L = torch.where(is_skewed_L, uniform_L**4, uniform_L)
        values.append((uniform_L * material.rows(feature)).long())
    return _jagged(torch.cat(values), lengths_FB)


def _kept(ids: JaggedIds, lengths_FB: Tensor) -> JaggedIds:
    """The bags that keep their length; where it is 0 now, without their ids."""
    keeps_bag = lengths_FB.flatten() > 0
    kept_L = torch.repeat_interleave(keeps_bag, ids.offsets.diff())
    weights_L = None if ids.weights_L is None else ids.weights_L[kept_L]
    return _jagged(ids.values_L[kept_L], lengths_FB, weights_L)


def _jagged(values_L: Tensor, lengths_FB: Tensor, weights_L: Tensor | None = None) -> JaggedIds:
    offsets = torch.zeros(lengths_FB.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths_FB.flatten(), 0, out=offsets[1:])
    return JaggedIds(values_L, offsets, lengths_FB.shape[0], weights_L)
