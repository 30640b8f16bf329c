"""Plans of every layout, batches, and one way to train on them: for tests of the sharded setting.

`train` runs on one rank, a thread or a process; `train_reference` is what it must come to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from data.batch import JaggedIds
from embeddings import (
    Communicator,
    FeatureConfig,
    Plan,
    ReferenceEmbeddings,
    RowOptimizerConfig,
    Shard,
    ShardedEmbeddings,
    TableConfig,
    sum_kv,
)

SEED = 5

# Unequal dims, odd ones and 1; fewer rows than ranks; tables with several features and with none.
TABLES = (
    TableConfig("user", 37, 8),
    TableConfig("shop", 5, 4),
    TableConfig("item", 50, 7),
    TableConfig("size", 3, 6),
    TableConfig("word", 40, 4),
    TableConfig("flag", 1, 5),
    TableConfig("age", 23, 1),
    TableConfig("idle", 6, 4),
)
FEATURES = (
    FeatureConfig("viewer", "user"),
    FeatureConfig("shop", "shop", "mean"),
    FeatureConfig("friends", "user", "mean"),
    FeatureConfig("item", "item"),
    FeatureConfig("size", "size"),
    FeatureConfig("title", "word"),
    FeatureConfig("query", "word", "mean"),
    FeatureConfig("flag", "flag"),
    FeatureConfig("age", "age", "mean"),
    FeatureConfig("bought", "item", "mean"),
)


@dataclass(frozen=True)
class Model:
    """Tables, features and the rule by which rows are updated."""

    optimizer: RowOptimizerConfig
    tables: tuple[TableConfig, ...] = TABLES
    features: tuple[FeatureConfig, ...] = FEATURES


# ----------------------------------------------------------------------------------------- layouts

LayoutFunction = Callable[[TableConfig, int, int], list[Shard]]


def cut_rows(table: TableConfig, cuts: Sequence[int], ranks: Sequence[int]) -> list[Shard]:
    """Rows `cuts[i]:cuts[i+1]` on `ranks[i]`, unless there are none."""
    return [
        Shard(table.name, start, stop, 0, table.dim, rank)
        for (start, stop), rank in zip(pairwise(cuts), ranks, strict=True)
        if start < stop
    ]


def cut_columns(table: TableConfig, cuts: Sequence[int], ranks: Sequence[int]) -> list[Shard]:
    """Columns `cuts[i]:cuts[i+1]` on `ranks[i]`, unless there are none."""
    return [
        Shard(table.name, 0, table.rows, start, stop, rank)
        for (start, stop), rank in zip(pairwise(cuts), ranks, strict=True)
        if start < stop
    ]


def even_cuts(size: int, parts: int) -> list[int]:
    """`parts + 1` bounds of nearly equal parts; empty ones where `size` is below `parts`."""
    return [size * i // parts for i in range(parts + 1)]


def table_wise(table: TableConfig, position: int, world_size: int) -> list[Shard]:
    """Whole tables, in turn."""
    return [Shard(table.name, 0, table.rows, 0, table.dim, position % world_size)]


def lone(table: TableConfig, position: int, world_size: int) -> list[Shard]:
    """Everything on the last rank: the others have nothing."""
    return [Shard(table.name, 0, table.rows, 0, table.dim, world_size - 1)]


def row_wise(table: TableConfig, position: int, world_size: int) -> list[Shard]:
    """Uneven contiguous cuts: later ranks have more rows."""
    whole = world_size * (world_size + 1)
    cuts = [table.rows * i * (i + 1) // whole for i in range(world_size + 1)]
    return cut_rows(table, cuts, range(world_size))


def column_wise(table: TableConfig, position: int, world_size: int) -> list[Shard]:
    """Columns over all ranks; fewer columns than ranks leave some without."""
    return cut_columns(table, even_cuts(table.dim, world_size), range(world_size))


def table_row_wise(table: TableConfig, position: int, world_size: int) -> list[Shard]:
    """Rows over the ranks of one host of two ranks, hosts in turn."""
    first = 2 * (position % ((world_size + 1) // 2))
    ranks = range(first, min(first + 2, world_size))
    return cut_rows(table, even_cuts(table.rows, len(ranks)), ranks)


def replicated(table: TableConfig, position: int, world_size: int) -> list[Shard]:
    """A copy on every rank."""
    return [Shard(table.name, 0, table.rows, 0, table.dim, rank) for rank in range(world_size)]


def stripes(table: TableConfig, position: int, world_size: int) -> list[Shard]:
    """Single columns in turn: several shards of the same rows on a rank, not side by side."""
    ranks = [column % world_size for column in range(table.dim)]
    return cut_columns(table, range(table.dim + 1), ranks)


def blocks(table: TableConfig, position: int, world_size: int) -> list[Shard]:
    """More bands of rows than ranks, of which a rank has several, in halves that may meet again."""
    cuts = even_cuts(table.rows, 2 * world_size + 1)
    half = table.dim // 2
    return [
        Shard(table.name, start, stop, left, right, rank % world_size)
        for band, (start, stop) in enumerate(pairwise(cuts))
        for left, right, rank in ((0, half, band), (half, table.dim, band // 2))
        if start < stop and left < right
    ]


def pinwheel(table: TableConfig, position: int, world_size: int) -> list[Shard]:
    """Four rectangles round a fifth: no cut goes through the table, so this is no grid."""
    if table.rows < 3 or table.dim < 3:
        return row_wise(table, position, world_size)
    up, down = table.rows // 3, table.rows - 1
    left, right = table.dim // 3, table.dim - 1
    rectangles = [
        (0, up, 0, right),
        (0, down, right, table.dim),
        (down, table.rows, left, table.dim),
        (up, table.rows, 0, left),
        (up, down, left, right),
    ]
    return [
        Shard(table.name, *rectangle, (position + i) % world_size)
        for i, rectangle in enumerate(rectangles)
    ]


_MIXTURE = (
    row_wise,
    replicated,
    pinwheel,
    column_wise,
    stripes,
    table_wise,
    replicated,
    table_row_wise,
)


def mixed(table: TableConfig, position: int, world_size: int) -> list[Shard]:
    """Another layout for every table."""
    return _MIXTURE[position % len(_MIXTURE)](table, position, world_size)


LAYOUTS: dict[str, LayoutFunction] = {
    layout.__name__: layout
    for layout in (
        table_wise,
        row_wise,
        column_wise,
        table_row_wise,
        replicated,
        mixed,
        stripes,
        blocks,
        pinwheel,
        lone,
    )
}
EXCHANGES = ("kv", "pooled", "mixed")


def plan_of(
    layout: str, world_size: int, exchange: str = "kv", tables: Sequence[TableConfig] = TABLES
) -> Plan:
    """A plan of one layout (see `LAYOUTS`); `mixed` exchange: kv and pooled in turn."""
    function = LAYOUTS[layout]
    shards = [shard for i, table in enumerate(tables) for shard in function(table, i, world_size)]
    chosen: dict[str, Any] = {
        table.name: (("kv", "pooled")[i % 2] if exchange == "mixed" else exchange)
        for i, table in enumerate(tables)
    }
    plan = Plan(world_size, tuple(shards), chosen)
    plan.validate(tables)
    return plan


@st.composite
def tilings(draw: st.DrawFn, table: TableConfig, world_size: int) -> list[Shard]:
    """Any tiling of a table by rectangles on any ranks, or a copy on every rank."""
    if world_size > 1 and draw(st.integers(0, 5)) == 0:
        return replicated(table, 0, world_size)
    row_cuts = _cuts(draw, table.rows)
    col_cuts = _cuts(draw, table.dim)
    free = {(i, j) for i in range(len(row_cuts) - 1) for j in range(len(col_cuts) - 1)}
    shards: list[Shard] = []
    while free:
        # The first free cell grows to the right, then downwards, as far as drawn and free.
        i, j = min(free)
        j_stop, i_stop = j + 1, i + 1
        while (i, j_stop) in free and draw(st.booleans()):
            j_stop += 1
        while all((i_stop, column) in free for column in range(j, j_stop)) and draw(st.booleans()):
            i_stop += 1
        free -= {(row, column) for row in range(i, i_stop) for column in range(j, j_stop)}
        rank = draw(st.integers(0, world_size - 1))
        rectangle = (row_cuts[i], row_cuts[i_stop], col_cuts[j], col_cuts[j_stop])
        shards.append(Shard(table.name, *rectangle, rank))
    return draw(st.permutations(shards))


def _cuts(draw: st.DrawFn, size: int) -> list[int]:
    inner = draw(st.sets(st.integers(1, size - 1), max_size=3)) if size > 1 else set()
    return [0, *sorted(inner), size]


# ----------------------------------------------------------------------------------------- batches


def draw_ids(
    model: Model, batch_size: int, kind: str, generator: torch.Generator, max_length: int = 4
) -> JaggedIds:
    """A global batch, skewed so that rows repeat within bags, features and batches.

    Args:
        model: its tables and features.
        batch_size: `B` of all ranks together.
        kind: `one_hot`; `multi_hot`: bags of 0 to `max_length` ids; `weighted`: these with bag
            weights, some of them 0, and all 1 in the first half of the samples.
        generator: of the ids.
        max_length: of a bag.
    """
    rows = {table.name: table.rows for table in model.tables}
    num_bags = len(model.features) * batch_size
    if kind == "one_hot" and max_length:
        lengths = torch.ones(num_bags, dtype=torch.int64)
    else:
        lengths = torch.randint(0, max_length + 1, (num_bags,), generator=generator)
    offsets = torch.zeros(num_bags + 1, dtype=torch.int64)
    offsets[1:] = lengths.cumsum(0)
    uniform = torch.rand(int(offsets[-1]), generator=generator, dtype=torch.float64)
    rows_F = torch.tensor([rows[feature.table] for feature in model.features])
    rows_L = torch.repeat_interleave(torch.repeat_interleave(rows_F, batch_size), lengths)
    values_L = (uniform.square() * rows_L).long()
    weights_L = None
    if kind == "weighted":
        weights_L = torch.randint(0, 5, values_L.shape, generator=generator) * 0.375
        sample_L = torch.repeat_interleave(torch.arange(num_bags), lengths) % max(1, batch_size)
        weights_L[sample_L < batch_size // 2] = 1.0
    return JaggedIds(values_L, offsets, len(model.features), weights_L)


def draw_batches(model: Model, kind: str, num_steps: int, seed: int = 0) -> list[JaggedIds]:
    """Global batches of many sizes, among them empty ones and one that has samples but no ids."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (9, 4, 0, 13, 1, 7, 2)
    return [
        draw_ids(model, sizes[step % 7], kind, generator, max_length=0 if step == 5 else 4)
        for step in range(num_steps)
    ]


def bounds_of_rank(batch_size: int, step: int, rank: int, world_size: int) -> tuple[int, int]:
    """Samples `start:stop` of a rank: by turns evenly, ever more for later ranks, all for one."""
    if step % 3 == 0:
        cuts = even_cuts(batch_size, world_size)
    elif step % 3 == 1:
        cuts = [batch_size * i * i // world_size**2 for i in range(world_size + 1)]
    else:
        lucky = step // 3 % world_size
        cuts = [0] * (lucky + 1) + [batch_size] * (world_size - lucky)
    return cuts[rank], cuts[rank + 1]


def part_of(ids: JaggedIds, start: int, stop: int) -> JaggedIds:
    """Samples of a batch; where their bag weights are all 1, there are none."""
    part = ids.narrow(start, stop)
    if part.weights_L is not None and bool((part.weights_L == 1).all()):
        return JaggedIds(part.values_L, part.offsets, part.num_features)
    return part


# ---------------------------------------------------------------------------------------- training


@dataclass
class History:
    """What a run came to, on one rank or as a whole.

    Attributes:
        pooled: by step the samples `(start, stop)` and their pooled vectors.
        tables: whole tables and their state, by table and name (rank 0 or the reference).
        kinds: the collectives in their order, where the communicator keeps them.
        num_collectives: by kind.
        sent_bytes: by kind.
    """

    pooled: list[tuple[int, int, Tensor]] = field(default_factory=list)
    tables: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    kinds: list[str] = field(default_factory=list)
    num_collectives: dict[str, int] = field(default_factory=dict)
    sent_bytes: dict[str, int] = field(default_factory=dict)


def learning_rate(step: int) -> float:
    """Another one every step."""
    return 0.05 / (1 + step / 20)


def gradient_of(pooled_BS: Tensor, global_batch_size: int) -> Tensor:
    """Gradient, by the pooled vectors, of a mean over the global batch that depends on them."""
    pooled_BS = pooled_BS.detach().requires_grad_()
    columns_S = torch.linspace(0.5, 1.5, pooled_BS.shape[1], dtype=pooled_BS.dtype)
    loss = ((pooled_BS * columns_S - 0.3).tanh().square() * 3).sum() / max(1, global_batch_size)
    (gradient,) = torch.autograd.grad(loss, pooled_BS)
    return gradient


def build(
    comm: Communicator,
    model: Model,
    plan: Plan,
    dtype: torch.dtype = torch.float64,
    wire: Any = "fp32",
) -> ShardedEmbeddings:
    """This rank's `ShardedEmbeddings` of a model, torch backend."""
    return ShardedEmbeddings(
        model.tables,
        model.features,
        model.optimizer,
        dtype=dtype,
        seed=SEED,
        plan=plan,
        comm=comm,
        wire=wire,
        backend="torch",
    )


def train(
    comm: Communicator,
    model: Model,
    plan: Plan,
    batches: Sequence[JaggedIds],
    dtype: torch.dtype = torch.float64,
    wire: Any = "fp32",
) -> History:
    """One rank's part of a run: every phase in turn, then all tables read on rank 0."""
    embeddings = build(comm, model, plan, dtype, wire)
    history = History()
    for step, ids in enumerate(batches):
        start, stop = bounds_of_rank(ids.batch_size, step, comm.rank, comm.world_size)
        batch = embeddings.plan_batch(part_of(ids, start, stop))
        pooled_BS = embeddings.lookup(batch)
        history.pooled.append((start, stop, pooled_BS.detach().clone()))
        gradient_BS = gradient_of(pooled_BS, batch.global_batch_size)
        gradients = sum_kv([embeddings.backward(batch, gradient_BS, learning_rate(step))])
        embeddings.apply(gradients, learning_rate(step))
    history.kinds = list(getattr(comm, "kinds", []))
    history.num_collectives = dict(comm.counters.num_collectives)
    history.sent_bytes = dict(comm.counters.sent_bytes)
    history.tables = read_tables(embeddings, model)
    return history


def read_tables(embeddings: ShardedEmbeddings, model: Model) -> dict[str, dict[str, Tensor]]:
    """All tables and their state, on rank 0; called by all ranks."""
    whole = {table.name: embeddings.read(table.name, 0, table.rows) for table in model.tables}
    return {name: values for name, values in whole.items() if values is not None}


def train_reference(model: Model, batches: Sequence[JaggedIds]) -> History:
    """The same run by the oracle, in fp64."""
    reference = ReferenceEmbeddings(
        model.tables, model.features, model.optimizer, dtype=torch.float64, seed=SEED
    )
    history = History()
    for step, ids in enumerate(batches):
        pooled_BS = reference.lookup(ids)
        history.pooled.append((0, ids.batch_size, pooled_BS.detach().clone()))
        pooled_BS.backward(gradient_of(pooled_BS, ids.batch_size))
        reference.apply(learning_rate(step))
    history.tables = {table.name: reference.read(table.name) for table in model.tables}
    return history


def assert_equal_runs(ranks: Sequence[History], reference: History) -> None:
    """Every rank's pooled vectors at every step, and every row and its state at the end."""
    for rank, history in enumerate(ranks):
        for step, (start, stop, pooled_BS) in enumerate(history.pooled):
            expected_BS = reference.pooled[step][2][start:stop]
            _assert_close(f"step {step}, rank {rank}, pooled", pooled_BS, expected_BS)
    assert sum(stop - start for h in ranks for start, stop, _ in h.pooled) == sum(
        stop for _, stop, _ in reference.pooled
    ), "the ranks' samples aren't those of the global batches"
    for table, values in reference.tables.items():
        for name, expected in values.items():
            _assert_close(f"{table}.{name}", ranks[0].tables[table][name], expected)


def _assert_close(what: str, found: Tensor, expected: Tensor) -> None:
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(
        found, expected, rtol=1e-10, atol=1e-13 * scale, msg=lambda text: f"{what}: {text}"
    )
