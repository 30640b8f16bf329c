"""`ShardedEmbeddings` over several ranks (threads) against the oracle, and what travels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import embeddings.layout
from data.batch import JaggedIds
from embeddings import (
    FeatureConfig,
    IdOutOfRange,
    KVGradients,
    Plan,
    RowOptimizerConfig,
    Shard,
    ShardedEmbeddings,
    TableConfig,
    sum_kv,
)
from embeddings.replicas import ReplicaCounts, ReplicaRows, Replicas
from embeddings.table_group import local_groups
from tests.sharding_cases import (
    FEATURES,
    LAYOUTS,
    TABLES,
    History,
    Model,
    assert_equal_runs,
    bounds_of_rank,
    build,
    cut_rows,
    draw_batches,
    draw_ids,
    gradient_of,
    part_of,
    plan_of,
    read_tables,
    replicated,
    tilings,
    train,
    train_reference,
)
from tests.thread_ranks import ThreadRank, run_ranks

RULES: tuple[Any, ...] = ("sgd", "adagrad", "rowwise_adagrad", "adam")
KINDS = ("one_hot", "multi_hot", "weighted")
EXCHANGES = ("kv", "pooled", "mixed")
WIRE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@pytest.fixture(autouse=True)
def _one_thread_per_rank() -> Iterator[None]:
    """Ranks are threads here: they don't want threads of their own."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def model_with(name: Any, weight_decay: float = 0.0) -> Model:
    return Model(RowOptimizerConfig(name=name, eps=1e-6, weight_decay=weight_decay))


@cache
def reference_run(
    name: Any, weight_decay: float, kind: str, num_steps: int
) -> tuple[list[JaggedIds], History]:
    """Batches and what they come to; the same for every plan."""
    model = model_with(name, weight_decay)
    batches = draw_batches(model, kind, num_steps)
    return batches, train_reference(model, batches)


# ------------------------------------------------------------------------ equal to the oracle


def orthogonal_cases() -> list[tuple[str, Any, str, int, str, float]]:
    """Every layout with every rule; the other choices so that every *pair* of choices occurs.

    Written to the base 3, the layout is (.., a, b) and the rule j; each further choice is another
    sum of these modulo 3, so any two of them take all nine pairs of values.
    """
    cases = []
    for i, layout in enumerate(LAYOUTS):
        a, b = divmod(i, 3)
        for j, name in enumerate(RULES):
            exchange, world_size = EXCHANGES[(b + j) % 3], (2, 3, 4)[(b + 2 * j) % 3]
            kind, weight_decay = KINDS[(a + j) % 3], (0.0, 0.02, 0.02)[(a + b + j) % 3]
            cases.append((layout, name, exchange, world_size, kind, weight_decay))
    return cases


def test_the_cases_hold_every_pair_of_choices() -> None:
    columns = list(zip(*orthogonal_cases(), strict=True))
    for i, one in enumerate(columns):
        for two in columns[:i]:
            assert len(set(zip(one, two, strict=True))) == len(set(one)) * len(set(two))


@pytest.mark.parametrize(
    ("layout", "name", "exchange", "world_size", "kind", "weight_decay"), orthogonal_cases()
)
def test_21_steps_in_fp64_equal_the_oracle(
    layout: str, name: Any, exchange: str, world_size: int, kind: str, weight_decay: float
) -> None:
    """Rows and state, with shared tables, unequal dims, batches that are uneven, empty, or at one
    rank only."""
    batches, reference = reference_run(name, weight_decay, kind, 21)
    plan = plan_of(layout, world_size, exchange)
    ranks = run_ranks(
        world_size, lambda comm: train(comm, model_with(name, weight_decay), plan, batches)
    )
    assert_equal_runs(ranks, reference)


@pytest.mark.parametrize("layout", ["blocks", "pinwheel", "stripes"])
def test_one_rank_joins_the_rectangles_of_any_plan(layout: str) -> None:
    batches, reference = reference_run("rowwise_adagrad", 0.02, "weighted", 21)
    plan = plan_of(layout, 1)
    (history,) = run_ranks(
        1, lambda comm: train(comm, model_with("rowwise_adagrad", 0.02), plan, batches)
    )
    assert_equal_runs([history], reference)
    assert sum(history.num_collectives.values()) == 0, "nothing travels in one process"


def test_the_runs_compared_move_every_table() -> None:
    """Else the comparisons above would show little."""
    for name in RULES:
        batches, reference = reference_run(name, 0.0, "multi_hot", 21)
        start = train_reference(model_with(name), batches[:0])
        for table in TABLES[:-1]:
            moved = reference.tables[table.name]["weight"] - start.tables[table.name]["weight"]
            assert float(moved.abs().max()) > 1e-3, (name, table.name)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), world_size=st.integers(1, 4), name=st.sampled_from(RULES))
def test_any_tiling_equals_the_oracle(data: st.DataObject, world_size: int, name: Any) -> None:
    shapes = data.draw(
        st.lists(st.tuples(st.integers(1, 7), st.integers(1, 6)), min_size=1, max_size=3)
    )
    tables = tuple(TableConfig(f"t{i}", rows, dim) for i, (rows, dim) in enumerate(shapes))
    wiring = st.tuples(st.sampled_from(tables), st.sampled_from(["sum", "mean"]))
    features = tuple(
        FeatureConfig(f"f{i}", table.name, pooling=pooling)  # type: ignore[arg-type]
        for i, (table, pooling) in enumerate(data.draw(st.lists(wiring, min_size=1, max_size=4)))
    )
    decay = data.draw(st.sampled_from([0.0, 0.1]))
    model = Model(RowOptimizerConfig(name=name, eps=1e-3, weight_decay=decay), tables, features)
    shards = [shard for table in tables for shard in data.draw(tilings(table, world_size))]
    exchange: Any = {t.name: data.draw(st.sampled_from(["kv", "pooled"])) for t in tables}
    plan = Plan(world_size, tuple(shards), exchange)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    batches = [
        draw_ids(
            model,
            data.draw(st.integers(0, 6)),
            data.draw(st.sampled_from(KINDS)),
            generator,
            max_length=data.draw(st.integers(0, 4)),
        )
        for _ in range(3)
    ]
    ranks = run_ranks(world_size, lambda comm: train(comm, model, plan, batches))
    assert_equal_runs(ranks, train_reference(model, batches))


@pytest.mark.parametrize("exchange", ["kv", "pooled"])
def test_ids_of_8_bytes_give_the_same_as_of_4(
    exchange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where some ranks' groups are too large for int32, here above 16 rows."""
    batches, reference = reference_run("adagrad", 0.0, "weighted", 7)
    plan = plan_of("blocks", 3, exchange)
    short = run_ranks(3, lambda comm: train(comm, model_with("adagrad"), plan, batches))
    monkeypatch.setattr(embeddings.layout, "_MAX_INT32", 15)
    long = run_ranks(3, lambda comm: train(comm, model_with("adagrad"), plan, batches))
    assert_equal_runs(long, reference)
    for one, other in zip(short, long, strict=True):
        assert one.sent_bytes["rows"] == other.sent_bytes["rows"]
        assert one.sent_bytes["ids"] < other.sent_bytes["ids"] < 2 * one.sent_bytes["ids"]


# ---------------------------------------------------------------- collectives, and what they carry


@pytest.mark.parametrize("name", ["adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_collectives_of_a_step_are_as_budgeted(layout: str, name: Any) -> None:
    model, plan = model_with(name), plan_of(layout, 3, "mixed")
    batches = draw_batches(model, "multi_hot", 7)
    ranks = run_ranks(3, lambda comm: train(comm, model, plan, batches))
    splits_columns = any(
        shard.num_cols < table.dim
        for table in TABLES
        for shard in plan.shards
        if shard.table == table.name
    )
    for history in ranks:
        found = dict(history.num_collectives)
        dense = found.pop("replicas")
        squares = 7 if splits_columns and name == "rowwise_adagrad" else 0
        phases = {"counts": 7, "ids": 7, "rows": 7, "grads": 7, "squares": squares}
        assert {kind: count for kind, count in found.items() if count} == {
            kind: count for kind, count in phases.items() if count
        }
        assert dense <= 7
        assert layout in ("replicated", "mixed") or not dense
        assert history.kinds == ranks[0].kinds, "all ranks issue the same, in the same order"


def bags_of(ids: JaggedIds) -> Iterator[tuple[str, list[int]]]:
    """Table and rows of each bag, in plain Python."""
    for position, feature in enumerate(FEATURES):
        for sample in range(ids.batch_size):
            bag = position * ids.batch_size + sample
            start, stop = int(ids.offsets[bag]), int(ids.offsets[bag + 1])
            yield feature.table, ids.values_L[start:stop].tolist()


def columns_held(plan: Plan, table: str, row: int, rank: int) -> int:
    """How many columns of a row lie on a rank."""
    return sum(
        shard.num_cols
        for shard in plan.shards
        if shard.table == table and shard.rank == rank and shard.row_start <= row < shard.row_stop
    )


def one_step(
    comm: ThreadRank,
    model: Model,
    plan: Plan,
    parts: Sequence[JaggedIds],
    wire: Any = "fp32",
) -> dict[str, int]:
    """Bytes sent in an fp32 step in which rank r has `parts[r]`."""
    embeddings = build(comm, model, plan, torch.float32, wire)
    batch = embeddings.plan_batch(parts[comm.rank])
    pooled_BS = embeddings.lookup(batch)
    gradients = embeddings.backward(batch, gradient_of(pooled_BS, batch.global_batch_size), 0.1)
    embeddings.apply(sum_kv([gradients]), 0.1)
    return dict(comm.counters.sent_bytes)


def parts_of(ids: JaggedIds, world_size: int, step: int = 1) -> list[JaggedIds]:
    return [
        part_of(ids, *bounds_of_rank(ids.batch_size, step, rank, world_size))
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "layout", [name for name in LAYOUTS if name not in ("replicated", "mixed")]
)
def test_kv_sends_each_distinct_row_once_to_each_rank_that_holds_some_of_it(
    layout: str, kind: str, wire: str
) -> None:
    """4 bytes an id, however many of the row's shards the rank has; then the columns it holds, each
    way. Nothing for rows of one's own."""
    model, plan = model_with("adagrad"), plan_of(layout, 3)
    parts = parts_of(draw_ids(model, 20, kind, torch.Generator().manual_seed(1)), 3)
    sent = run_ranks(3, lambda comm: one_step(comm, model, plan, parts, wire))
    wanted = [{(table, row) for table, bag in bags_of(part) for row in bag} for part in parts]

    def held(asker: int, owner: int) -> list[int]:
        columns = [columns_held(plan, table, row, owner) for table, row in wanted[asker]]
        return [number for number in columns if number]

    for rank in range(3):
        others = [other for other in range(3) if other != rank]
        num_ids = sum(len(held(rank, owner)) for owner in others)
        num_grads = sum(sum(held(rank, owner)) for owner in others)
        num_values = sum(sum(held(asker, rank)) for asker in others)
        assert sent[rank]["ids"] == 4 * num_ids
        assert sent[rank]["grads"] == WIRE_BYTES[wire] * num_grads
        assert sent[rank]["rows"] == WIRE_BYTES[wire] * num_values
    assert sum(part["ids"] for part in sent) > 0


@pytest.mark.parametrize("wire", ["fp32", "fp16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["table_wise", "row_wise", "column_wise", "stripes"])
def test_pooled_sends_the_bags_that_have_ids_at_a_rank_and_one_vector_for_each(
    layout: str, kind: str, wire: str
) -> None:
    """4 bytes a key, repeated or not; 4 a bag, but none where all have one key; 4 a bag weight."""
    model, plan = model_with("adagrad"), plan_of(layout, 3, "pooled")
    ids = draw_ids(model, 20, kind, torch.Generator().manual_seed(1))
    # Unequal weights at every rank: none is left out for being all 1.
    parts = [ids.narrow(*bounds_of_rank(20, 1, rank, 3)) for rank in range(3)]
    for part in parts:
        if part.weights_L is not None:
            part.weights_L[::2] = 0.5
    sent = run_ranks(3, lambda comm: one_step(comm, model, plan, parts, wire))

    def bags_at(asker: int, owner: int) -> list[tuple[int, int]]:
        """Per bag with keys at the owner their number, and the columns held there."""
        bags = []
        for table, rows in bags_of(parts[asker]):
            columns = [columns_held(plan, table, row, owner) for row in rows]
            if any(columns):
                bags.append((sum(number > 0 for number in columns), max(columns)))
        return bags

    def id_bytes(asker: int, owner: int) -> int:
        # Tables of one local dim share an order of bags: lengths are left out for all or none.
        total = 0
        bags = bags_at(asker, owner)
        for dim in {columns for _, columns in bags}:
            lengths = [length for length, columns in bags if columns == dim]
            total += 4 * sum(lengths) * (2 if kind == "weighted" else 1)
            total += 0 if set(lengths) == {1} else 4 * len(lengths)
        return total

    for rank in range(3):
        others = [other for other in range(3) if other != rank]
        assert sent[rank]["ids"] == sum(id_bytes(rank, owner) for owner in others)
        num_grads = sum(columns for owner in others for _, columns in bags_at(rank, owner))
        num_values = sum(columns for asker in others for _, columns in bags_at(asker, rank))
        assert sent[rank]["grads"] == WIRE_BYTES[wire] * num_grads
        assert sent[rank]["rows"] == WIRE_BYTES[wire] * num_values
    assert sum(part["ids"] for part in sent) > 0


def test_bytes_of_a_step_worked_out_by_hand() -> None:
    """A table of 10 × 4, rows 0-4 on rank 0 and 5-9 on rank 1; rank 0 has the bags [7, 7, 8, 1] and
    [2], rank 1 [9] and nothing."""
    model = Model(
        RowOptimizerConfig("adagrad"), (TableConfig("t", 10, 4),), (FeatureConfig("f", "t"),)
    )
    shards = cut_rows(model.tables[0], (0, 5, 10), (0, 1))
    parts = [
        JaggedIds(torch.tensor([7, 7, 8, 1, 2]), torch.tensor([0, 4, 5]), 1),
        JaggedIds(torch.tensor([9]), torch.tensor([0, 1, 1]), 1),
    ]
    # Rank 1 asks nothing of rank 0: its 9 is its own.
    for exchange, id_bytes, value_bytes in (("kv", 2 * 4, 2 * 16), ("pooled", (3 + 1) * 4, 16)):
        plan = Plan(2, tuple(shards), {"t": exchange})  # type: ignore[dict-item]
        sent = run_ranks(2, partial(one_step, model=model, plan=plan, parts=parts))
        assert [part["ids"] for part in sent] == [id_bytes, 0], exchange
        assert [part["rows"] for part in sent] == [0, value_bytes], exchange
        assert [part["grads"] for part in sent] == [value_bytes, 0], exchange


# ----------------------------------------------------------------------------------------- replicas


def replicas_of(comm: ThreadRank, tables: Sequence[TableConfig], value_bytes: int) -> Replicas:
    shards = [shard for t in tables for shard in replicated(t, 0, comm.world_size)]
    plan = Plan(comm.world_size, tuple(shards), {t.name: "kv" for t in tables})
    groups = local_groups(plan, rank=comm.rank, dtype=torch.float32, optimizer="sgd")
    rows = ReplicaRows.of_groups(groups)
    return Replicas(rows, comm, wire_bytes=value_bytes, dense_bytes=4)


def test_replicas_go_dense_from_the_point_where_that_sends_less() -> None:
    """20 rows of 8: as a matrix 2·20·9·4 = 1,440 bytes, a touched row (8·4 + 4) = 36: 40 rows."""
    tables = [TableConfig("t", 20, 8), TableConfig("u", 20, 8)]

    def choose(comm: ThreadRank) -> list[tuple[bool, ...]]:
        replicas = replicas_of(comm, tables, 4)
        counts = ([[20, 1], [20, 1], [0, 1]], [[20, 1], [20, 1], [1, 1]], [[0, 20]] * 3)
        return [replicas.choose(np.array(rows)).is_dense for rows in counts]

    assert run_ranks(3, choose)[0] == [(False, False), (True, False), (False, True)]


def force(monkeypatch: pytest.MonkeyPatch, is_dense: bool | None) -> None:
    """Replicas' gradients all go one way; None: as computed."""
    if is_dense is not None:
        monkeypatch.setattr(
            Replicas,
            "choose",
            lambda self, rows: ReplicaCounts(rows.copy(), (is_dense,) * self.num_tables),
        )


@pytest.mark.parametrize("wire", ["fp32", "bf16", "fp16"])
def test_the_way_that_replicas_take_is_the_one_that_sends_less(
    wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the counters, for batches from few to many touched rows."""
    model = Model(RowOptimizerConfig("sgd"), (TableConfig("t", 30, 6),), (FeatureConfig("f", "t"),))
    plan = plan_of("replicated", 5, "kv", model.tables)
    taken = set()
    for num_ids in range(2, 31, 2):
        part = JaggedIds(torch.arange(num_ids), torch.arange(num_ids + 1), 1)
        totals: dict[bool | None, int] = {}
        for is_dense in (True, False, None):
            with monkeypatch.context() as patch:
                force(patch, is_dense)
                step = partial(one_step, model=model, plan=plan, parts=[part] * 5, wire=wire)
                sent = run_ranks(5, step)
            kinds = ("ids", "rows", "grads", "replicas")
            totals[is_dense] = sum(rank[kind] for rank in sent for kind in kinds)
            if is_dense is None:
                taken.add(sent[0]["replicas"] > 0)
        assert totals[None] == min(totals[True], totals[False]), (num_ids, totals)
    assert taken == {True, False}, "the batches lie on both sides of the crossover"


def test_gathered_gradients_of_replicas_go_to_every_rank() -> None:
    """Each rank sends its distinct rows and their gradients to both others, and rows to none."""
    model, plan = model_with("adagrad"), plan_of("replicated", 3)
    parts = parts_of(draw_ids(model, 4, "one_hot", torch.Generator().manual_seed(1)), 3)
    sent = run_ranks(3, lambda comm: one_step(comm, model, plan, parts))
    dims = {table.name: table.dim for table in TABLES}
    wanted = [{(table, row) for table, bag in bags_of(part) for row in bag} for part in parts]
    # The tables of few rows go dense: the count of the others is worked out.
    num_rows = {t.name: sum(name == t.name for w in wanted for name, _ in w) for t in TABLES}
    gathered = {
        t.name for t in TABLES if num_rows[t.name] * (4 * t.dim + 4) <= 2 * t.rows * (t.dim + 1) * 4
    }
    assert "user" in gathered
    for rank in range(3):
        rows = [(name, row) for name, row in wanted[rank] if name in gathered]
        assert sent[rank]["ids"] == 2 * 4 * len(rows)
        assert sent[rank]["grads"] == 2 * 4 * sum(dims[name] for name, _ in rows)
        assert sent[rank]["rows"] == 0
        matrices = sum(t.rows * (t.dim + 1) * 4 for t in TABLES if t.name not in gathered)
        assert sent[rank]["replicas"] == 2 * 2 * matrices // 3


@pytest.mark.parametrize("is_dense", [True, False])
@pytest.mark.parametrize("name", RULES)
def test_both_ways_of_summing_replicas_equal_the_oracle(
    name: Any, is_dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adam and decay tell a row with a zero gradient from one that wasn't looked up."""
    force(monkeypatch, is_dense)
    batches, reference = reference_run(name, 0.02, "weighted", 14)
    plan = plan_of("mixed", 3, "mixed")
    ranks = run_ranks(3, lambda comm: train(comm, model_with(name, 0.02), plan, batches))
    assert_equal_runs(ranks, reference)
    assert ranks[0].num_collectives["replicas"] == (14 if is_dense else 0)


@pytest.mark.parametrize("is_dense", [True, False, None])
@pytest.mark.parametrize("wire", ["fp32", "bf16", "fp16"])
def test_replicas_stay_equal_to_the_bit_on_all_ranks(
    wire: str, is_dense: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B18: from the start on, whatever each rank's own random state, also with rounded values."""
    force(monkeypatch, is_dense)
    model, plan = model_with("adagrad", 0.02), plan_of("mixed", 3)
    batches = draw_batches(model, "weighted", 10)

    def run(comm: ThreadRank) -> list[list[Tensor]]:
        embeddings = build(comm, model, plan, torch.float32, wire)
        snapshots = []
        for step in range(len(batches) + 1):
            snapshots.append(
                [
                    values.clone()
                    for table in TABLES
                    if plan.is_replicated(table.name)
                    for values in embeddings.store.read(table.name, 0, table.rows).values()
                ]
            )
            if step < len(batches):
                ids = batches[step]
                part = part_of(ids, *bounds_of_rank(ids.batch_size, step, comm.rank, 3))
                train_step(embeddings, part)
        return snapshots

    first, *others = run_ranks(3, run)
    assert len(first[0]) == 4, "two tables and their state"
    assert not torch.equal(first[0][0], first[-1][0])
    for other in others:
        for step, (one, two) in enumerate(zip(first, other, strict=True)):
            assert all(map(torch.equal, one, two)), step


def train_step(
    embeddings: ShardedEmbeddings, part: JaggedIds, lr: float = 0.05, grad_BS: Tensor | None = None
) -> Tensor:
    """One step, of a given gradient or of one that depends on the pooled vectors; these."""
    batch = embeddings.plan_batch(part)
    pooled_BS = embeddings.lookup(batch)
    if grad_BS is None:
        grad_BS = gradient_of(pooled_BS, batch.global_batch_size)
    embeddings.apply(sum_kv([embeddings.backward(batch, grad_BS, lr)]), lr)
    return pooled_BS.detach().clone()


# ---------------------------------------------------------------------------------- rounded values

# Largest relative error of rounding to the nearest.
ROUNDING = {"fp32": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11}


@pytest.mark.parametrize("exchange", ["kv", "pooled"])
@pytest.mark.parametrize("wire", ["bf16", "fp16"])
def test_a_step_with_rounded_values_stays_within_one_rounding(wire: str, exchange: str) -> None:
    """One id per bag: each pooled value was rounded once, and so was each rank's gradient of a
    row. Half the bytes. Gradients are as small as in a batch of 8,192: of fp16's subnormals."""
    model = Model(RowOptimizerConfig("sgd"))
    plan = plan_of("row_wise", 3, exchange)
    generator = torch.Generator().manual_seed(1)
    ids = draw_ids(model, 12, "one_hot", generator)
    parts = parts_of(ids, 3)
    width = sum(t.dim for f in FEATURES for t in TABLES if t.name == f.table)
    grads = [(torch.rand(part.batch_size, width, generator=generator) + 0.5) for part in parts]

    def run(comm: ThreadRank, wire: str) -> tuple[Tensor, Any, dict[str, int]]:
        embeddings = build(comm, model, plan, torch.float32, wire)
        batch = embeddings.plan_batch(parts[comm.rank], weight_sum=8192 / 3)
        assert batch.total_weight == pytest.approx(8192)
        pooled_BS = embeddings.lookup(batch).detach().clone()
        # lr makes up for the mean.
        gradients = embeddings.backward(batch, grads[comm.rank] / 8192, 1.0)
        embeddings.apply(sum_kv([gradients]), 8192.0)
        return pooled_BS, read_tables(embeddings, model), dict(comm.counters.sent_bytes)

    start = run_ranks(3, lambda comm: read_tables(build(comm, model, plan, torch.float32), model))
    exact = run_ranks(3, lambda comm: run(comm, "fp32"))
    rounded = run_ranks(3, lambda comm: run(comm, wire))
    for (pooled_BS, _, sent), (expected_BS, _, exact_sent) in zip(rounded, exact, strict=True):
        torch.testing.assert_close(pooled_BS, expected_BS, rtol=ROUNDING[wire], atol=2.0**-25)
        assert sent["rows"] * 2 == exact_sent["rows"] > 0
        assert sent["grads"] * 2 == exact_sent["grads"] > 0
        assert sent["ids"] == exact_sent["ids"]
    for table in TABLES:
        before = start[0][table.name]["weight"]
        moved, expected = (run[0][1][table.name]["weight"] - before for run in (rounded, exact))
        torch.testing.assert_close(moved, expected, rtol=ROUNDING[wire], atol=1e-6)
    assert not torch.equal(rounded[0][1]["user"]["weight"], exact[0][1]["user"]["weight"])


@pytest.mark.parametrize(
    ("what", "layout", "exchange"),
    [
        ("rows", "row_wise", "kv"),
        ("rows", "row_wise", "pooled"),
        ("gradients", "row_wise", "kv"),
        ("gradients", "row_wise", "pooled"),
        ("gradients", "replicated", "kv"),
    ],
)
def test_a_value_beyond_fp16_is_an_error_that_names_the_key(
    what: str, layout: str, exchange: str
) -> None:
    tables, features = (TableConfig("t", 4, 2),), (FeatureConfig("f", "t"),)
    model = Model(RowOptimizerConfig("sgd"), tables, features)
    plan = plan_of(layout, 2, exchange, tables)

    def run(comm: ThreadRank, value: float) -> None:
        embeddings = build(comm, model, plan, torch.float32, "fp16")
        part = JaggedIds(torch.tensor([3]), torch.tensor([0, 1]), 1)
        gradient = torch.ones(1, 2)
        if what == "rows":
            embeddings.store.write("t", 0, {"weight": torch.full((4, 2), value)})
        else:
            gradient *= value / 2  # the mean over two samples
        train_step(embeddings, part, grad_BS=gradient)

    run_ranks(2, lambda comm: run(comm, 65_504.0))
    with pytest.raises(ValueError, match=r"sharding\.wire=fp16.*65,504"):
        run_ranks(2, lambda comm: run(comm, 65_536.0))


@pytest.mark.parametrize("what", ["rows", "gradients"])
@pytest.mark.parametrize(
    ("wire", "dtype", "value", "words"),
    [
        (
            "bf16",
            torch.float32,
            3.4e38,
            r"sharding\.wire=bf16: 3\.4e\+38 .*set sharding\.wire=fp32",
        ),
        ("bf16", torch.float64, 1e300, r"sharding\.wire=bf16: 1e\+300 .*set sharding\.wire=fp32"),
        ("fp16", torch.float32, 3e38, r"sharding\.wire=fp16: .*set sharding\.wire=bf16 or fp32"),
    ],
)
@pytest.mark.parametrize("layout", ["row_wise", "replicated"])
def test_f08_a_value_beyond_the_wire_is_refused(
    layout: str, wire: str, dtype: torch.dtype, value: float, words: str, what: str
) -> None:
    """It would arrive as inf. fp16's gradients are scaled by the batch before they are rounded,
    which may be what makes them infinite."""
    if what == "rows" and layout == "replicated":
        return  # No rows travel.
    tables, features = (TableConfig("t", 4, 2),), (FeatureConfig("f", "t"),)
    model = Model(RowOptimizerConfig("sgd"), tables, features)
    plan = plan_of(layout, 2, "kv", tables)

    def run(comm: ThreadRank, value: float) -> None:
        embeddings = build(comm, model, plan, dtype, wire)
        part = JaggedIds(torch.tensor([3]), torch.tensor([0, 1]), 1)
        gradient = torch.ones(1, 2, dtype=dtype)
        if what == "rows":
            embeddings.store.write("t", 0, {"weight": torch.full((4, 2), value, dtype=dtype)})
        else:
            gradient *= value
        train_step(embeddings, part, grad_BS=gradient)

    run_ranks(2, lambda comm: run(comm, 1e3))
    with pytest.raises(ValueError, match=words):
        run_ranks(2, lambda comm: run(comm, value))


# --------------------------------------------------------------------------------- order of phases


@pytest.mark.parametrize("layout", ["mixed", "pinwheel"])
def test_phases_begun_early_give_the_same_bits(layout: str) -> None:
    """`train.overlap`: the next batch's counts before this one's rows are here, its ids before this
    one's gradients are."""
    model, plan = model_with("adagrad"), plan_of(layout, 3, "mixed")
    batches = draw_batches(model, "weighted", 8)

    def part(comm: ThreadRank, step: int) -> JaggedIds:
        ids = batches[step]
        return part_of(ids, *bounds_of_rank(ids.batch_size, step, comm.rank, 3))

    def in_turn(comm: ThreadRank) -> tuple[list[Tensor], Any, Any]:
        embeddings = build(comm, model, plan, torch.float32)
        pooled = [train_step(embeddings, part(comm, step)) for step in range(8)]
        return pooled, comm.counters, read_tables(embeddings, model)

    def overlapped(comm: ThreadRank) -> tuple[list[Tensor], Any, Any]:
        embeddings = build(comm, model, plan, torch.float32)
        pooled = []
        batch = embeddings.plan_batch(part(comm, 0))
        for step in range(8):
            lookup = embeddings.begin_lookup(batch)
            following = embeddings.begin_plan(part(comm, step + 1)) if step < 7 else None
            pooled_BS = lookup.finish()
            pooled.append(pooled_BS.detach().clone())
            gradient_BS = gradient_of(pooled_BS, batch.global_batch_size)
            backward = embeddings.begin_backward(batch, gradient_BS, 0.05)
            if following is not None:
                following.send_ids()
            embeddings.apply(sum_kv([backward.finish()]), 0.05)
            if following is not None:
                batch = following.finish()
        return pooled, comm.counters, read_tables(embeddings, model)

    for one, two in zip(run_ranks(3, in_turn), run_ranks(3, overlapped), strict=True):
        assert all(map(torch.equal, one[0], two[0]))
        assert one[1] == two[1], "the same collectives and bytes"
        for table, values in one[2].items():
            assert all(torch.equal(values[name], two[2][table][name]) for name in values), table


def test_plans_may_be_made_any_number_of_steps_ahead() -> None:
    batches, reference = reference_run("adagrad", 0.0, "weighted", 7)
    plan = plan_of("mixed", 3, "mixed")

    def run(comm: ThreadRank) -> Any:
        embeddings = build(comm, model_with("adagrad"), plan)
        planned = [
            embeddings.plan_batch(part_of(ids, *bounds_of_rank(ids.batch_size, step, comm.rank, 3)))
            for step, ids in enumerate(batches)
        ]
        for step, batch in enumerate(planned):
            lr = 0.05 / (1 + step / 20)
            gradient_BS = gradient_of(embeddings.lookup(batch), batch.global_batch_size)
            embeddings.apply(sum_kv([embeddings.backward(batch, gradient_BS, lr)]), lr)
        return History(tables=read_tables(embeddings, model_with("adagrad")))

    assert_equal_runs(run_ranks(3, run)[:1], History(tables=reference.tables))


def test_two_runs_are_equal_to_the_bit() -> None:
    model, plan = model_with("rowwise_adagrad"), plan_of("mixed", 3, "mixed")
    batches = draw_batches(model, "weighted", 14)
    one, two = (
        run_ranks(3, lambda comm: train(comm, model, plan, batches, torch.float32))
        for _ in range(2)
    )
    for table, values in one[0].tables.items():
        assert all(torch.equal(values[name], two[0].tables[table][name]) for name in values), table
    for first, second in zip(one, two, strict=True):
        for (*_, pooled_BS), (*_, again_BS) in zip(first.pooled, second.pooled, strict=True):
            assert torch.equal(pooled_BS, again_BS)


@pytest.mark.parametrize("layout", ["mixed", "pinwheel", "replicated"])
def test_micro_batches_sum_to_the_whole_batch(layout: str) -> None:
    model, plan = model_with("rowwise_adagrad", 0.1), plan_of(layout, 3, "mixed")
    ids = draw_ids(model, 17, "weighted", torch.Generator().manual_seed(2))

    def run(comm: ThreadRank) -> tuple[list[KVGradients], list[KVGradients]]:
        embeddings = build(comm, model, plan)
        part = ids.narrow(*bounds_of_rank(17, 1, comm.rank, 3))
        size = part.batch_size
        generator = torch.Generator().manual_seed(comm.rank)
        grad_BS = torch.randn(size, embeddings.feature_offsets[-1], generator=generator).double()
        whole = sum_kv([embeddings.backward(embeddings.plan_batch(part), grad_BS, 0.1)])
        # The ranks' cuts differ, and each has an empty micro-batch.
        cuts = sorted([0, size // 3, size // 2 + comm.rank % 2, size // 3, size])
        pieces = [
            embeddings.backward(embeddings.plan_batch(part.narrow(a, b)), grad_BS[a:b], 0.1)
            for a, b in pairwise(cuts)
        ]
        return whole, sum_kv(pieces)

    for whole, summed in run_ranks(3, run):
        assert [g.group for g in summed] == [g.group for g in whole]
        for found, expected in zip(summed, whole, strict=True):
            assert torch.equal(found.keys_K, expected.keys_K)
            torch.testing.assert_close(found.grads_KD, expected.grads_KD, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("layout", ["mixed", "pinwheel", "replicated"])
def test_gradients_counted_once_have_the_norm_of_the_references(layout: str) -> None:
    """For clipping: over all ranks, each row's gradient once, replicas too."""
    model = Model(RowOptimizerConfig("sgd"))
    plan = plan_of(layout, 3, "mixed")
    batches = draw_batches(model, "multi_hot", 1)
    start, end = (train_reference(model, batches[:steps]).tables for steps in (0, 1))
    # The first step of SGD moves by 0.05 times the gradient.
    expected = sum(
        float(((end[t.name]["weight"] - start[t.name]["weight"]) / 0.05).square().sum())
        for t in TABLES
    )

    def run(comm: ThreadRank) -> float:
        embeddings = build(comm, model, plan)
        batch = embeddings.plan_batch(part_of(batches[0], *bounds_of_rank(9, 0, comm.rank, 3)))
        gradient_BS = gradient_of(embeddings.lookup(batch), batch.global_batch_size)
        gradients = sum_kv([embeddings.backward(batch, gradient_BS, 0.1)])
        return sum(float(g.square().sum()) for g in embeddings.counted_once(gradients))

    assert sum(run_ranks(3, run)) == pytest.approx(expected, rel=1e-10)


def test_a_plan_tells_the_global_batch_and_the_sum_of_its_weights() -> None:
    model, plan = model_with("sgd"), plan_of("row_wise", 3)
    ids = draw_ids(model, 9, "one_hot", torch.Generator().manual_seed(0))

    def run(comm: ThreadRank) -> list[tuple[int, int, float]]:
        embeddings = build(comm, model, plan)
        part = ids.narrow(*bounds_of_rank(9, 1, comm.rank, 3))
        plans = [embeddings.plan_batch(part), embeddings.plan_batch(part, weight_sum=0.1)]
        return [(p.batch_size, p.global_batch_size, p.total_weight) for p in plans]

    sizes = [1, 3, 5]
    for rank, found in enumerate(run_ranks(3, run)):
        assert found == [(sizes[rank], 9, 9.0), (sizes[rank], 9, pytest.approx(0.3))]


# ------------------------------------------------------------------------------------- whole rows


@pytest.mark.parametrize("name", ["rowwise_adagrad", "adam"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_rows_are_read_whole_with_their_state(layout: str, name: Any) -> None:
    batches, reference = reference_run(name, 0.0, "multi_hot", 7)
    model, plan = model_with(name), plan_of(layout, 3)

    def run(comm: ThreadRank) -> list[tuple[str, int, int, Any]]:
        embeddings = build(comm, model, plan)
        for step, ids in enumerate(batches):
            part = part_of(ids, *bounds_of_rank(ids.batch_size, step, comm.rank, 3))
            train_step(embeddings, part, 0.05 / (1 + step / 20))
        blocks = [
            (table.name, start, min(start + 11, table.rows))
            for table in TABLES
            for start in range(0, table.rows, 11)
        ]
        return [(*block, embeddings.read(*block)) for block in blocks]

    found, *others = run_ranks(3, run)
    assert all(values is None for other in others for *_, values in other)
    for table, start, stop, values in found:
        expected = reference.tables[table]
        assert set(values) >= set(expected)
        for state, whole in expected.items():
            torch.testing.assert_close(values[state], whole[start:stop], rtol=1e-10, atol=1e-15)


@pytest.mark.parametrize("start", [0, 4, 37])
@pytest.mark.parametrize("layout", ["row_wise", "column_wise", "lone", "replicated"])
def test_no_rows_are_read_as_empty_tensors_of_the_tables_type(layout: str, start: int) -> None:
    model, plan = model_with("adagrad"), plan_of(layout, 2)
    values, _ = run_ranks(2, lambda comm: build(comm, model, plan).read("user", start, start))
    assert values is not None
    for rows in values.values():
        assert (rows.shape, rows.dtype) == ((0, 8), torch.float64)


@pytest.mark.parametrize(("start", "stop"), [(30, 38), (-1, 3), (5, 4), (37, 40)])
@pytest.mark.parametrize("layout", ["row_wise", "column_wise", "lone", "replicated"])
def test_rows_that_a_table_doesnt_have_arent_read(layout: str, start: int, stop: int) -> None:
    """An error, as with one process; never memory that nobody has filled."""
    model, plan = model_with("adagrad"), plan_of(layout, 2)

    def run(comm: ThreadRank) -> None:
        embeddings = build(comm, model, plan)
        raises: Any = pytest.raises(ValueError, match="'user'")
        with raises if comm.rank == 0 else suppress(ValueError):
            embeddings.read("user", start, stop)

    run_ranks(2, run)


def test_reading_an_unknown_table_names_it() -> None:
    model, plan = model_with("adagrad"), plan_of("row_wise", 2)

    def run(comm: ThreadRank) -> None:
        with pytest.raises(ValueError, match="'nobody'"):
            build(comm, model, plan).read("nobody", 0, 1)

    run_ranks(2, run)


@pytest.mark.parametrize("layout", ["column_wise", "stripes", "pinwheel", "mixed"])
def test_state_of_whole_rows_exists_once(layout: str) -> None:
    """Beside a row's first column; that of other pieces is never touched."""
    batches, _ = reference_run("rowwise_adagrad", 0.0, "multi_hot", 7)
    model, plan = model_with("rowwise_adagrad"), plan_of(layout, 3)

    def run(comm: ThreadRank) -> list[tuple[str, Tensor]]:
        embeddings = build(comm, model, plan)
        for step, ids in enumerate(batches):
            part = part_of(ids, *bounds_of_rank(ids.batch_size, step, comm.rank, 3))
            train_step(embeddings, part)
        store = embeddings.store
        return [
            (piece.table, store.state(index)["sum"][key : key + piece.num_rows])
            for index, group in enumerate(store.groups)
            for piece, key in zip(group.pieces, group.first_keys, strict=True)
            if not piece.has_first_column
        ]

    others = [entry for of_rank in run_ranks(3, run) for entry in of_rank]
    assert others, "the layout has pieces without the first column"
    assert [table for table, state_R1 in others if bool(state_R1.any())] == []


# The cases that users of other systems have been bitten by. ---------------------------------------

SMALL_LAYOUTS = ("table_wise", "row_wise", "column_wise", "stripes", "replicated", "pinwheel")


@pytest.mark.parametrize(
    ("wrong", "exchange"), [(10, "kv"), (-1, "pooled"), (-11, "kv"), (2**40, "pooled")]
)
@pytest.mark.parametrize("layout", SMALL_LAYOUTS)
def test_a_bad_id_of_one_rank_is_the_same_error_on_all(
    layout: str, exchange: str, wrong: int
) -> None:
    """B10: two tables of 10 rows side by side; no row of either is read or changed, and the ranks
    can go on together."""
    tables = (TableConfig("first", 10, 4), TableConfig("second", 10, 4))
    features = (FeatureConfig("f", "first"), FeatureConfig("g", "second"))
    model = Model(RowOptimizerConfig("sgd"), tables, features)
    plan = plan_of(layout, 3, exchange, tables)

    def run(comm: ThreadRank) -> tuple[Any, ...]:
        embeddings = build(comm, model, plan)
        before = read_tables(embeddings, model)
        good = JaggedIds(torch.tensor([9, 0]), torch.arange(3), 2)
        bad = JaggedIds(torch.tensor([9, 2, wrong]), torch.tensor([0, 1, 1, 2, 3]), 2)
        with pytest.raises(IdOutOfRange) as info:
            embeddings.plan_batch(bad if comm.rank == 1 else good)
        after = read_tables(embeddings, model)
        train_step(embeddings, good, 1.0, torch.ones(1, 8, dtype=torch.float64))
        return info.value, before, after, read_tables(embeddings, model)

    results = run_ranks(3, run)
    assert len({str(error) for error, *_ in results}) == 1
    for error, *_ in results:
        assert (error.feature, error.table, error.id) == ("g", "second", wrong)
        assert (error.sample, error.rank, error.rows) == (1, 1, 10)
        assert all(word in str(error) for word in ("'g'", "'second'", str(wrong), "rank 1"))
    _, before, after, trained = results[0]
    for table, row in (("first", 9), ("second", 0)):
        assert torch.equal(before[table]["weight"], after[table]["weight"])
        expected = before[table]["weight"].clone()
        expected[row] -= 3.0
        torch.testing.assert_close(trained[table]["weight"], expected)


def test_of_several_bad_ids_the_first_ranks_is_told() -> None:
    model, plan = model_with("sgd"), plan_of("mixed", 3)

    def run(comm: ThreadRank) -> str:
        values_L = torch.zeros(len(FEATURES), dtype=torch.int64)
        if comm.rank > 0:
            values_L[3 - comm.rank] = 1000 + comm.rank
        ids = JaggedIds(values_L, torch.arange(len(FEATURES) + 1), len(FEATURES))
        with pytest.raises(IdOutOfRange) as info:
            build(comm, model, plan).plan_batch(ids)
        return str(info.value)

    texts = run_ranks(3, run)
    assert len(set(texts)) == 1
    assert "id 1001" in texts[0]
    assert "rank 1" in texts[0]


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("exchange", ["kv", "pooled"])
@pytest.mark.parametrize("layout", SMALL_LAYOUTS)
def test_empty_bags_pool_to_zero_and_have_no_gradient(
    layout: str, exchange: str, pooling: Any
) -> None:
    """B13: bag starts [0, 1, 1, 3, 3] of 5 ids; bags 1 and 3 are empty. Rank 0 has bags 0 and 1,
    rank 1 none, rank 2 the rest."""
    tables, features = (TableConfig("t", 6, 4),), (FeatureConfig("f", "t", pooling),)
    model = Model(RowOptimizerConfig("sgd"), tables, features)
    plan = plan_of(layout, 3, exchange, tables)
    ids = JaggedIds(torch.arange(5), torch.tensor([0, 1, 1, 3, 3, 5]), 1)
    bounds = ((0, 2), (2, 2), (2, 5))

    def run(comm: ThreadRank) -> tuple[list[float], Any]:
        embeddings = build(comm, model, plan, torch.float32)
        embeddings.store.write("t", 0, {"weight": torch.ones(6, 4)})
        # Were an empty bag's gradient to land on a row, the row would move by 1000.
        grad_BS = torch.ones(5, 4)
        grad_BS[[1, 3]] = 1000.0
        start, stop = bounds[comm.rank]
        pooled_BS = train_step(embeddings, ids.narrow(start, stop), 1.0, grad_BS[start:stop])
        assert pooled_BS.shape == (stop - start, 4)
        return pooled_BS[:, 3].tolist(), read_tables(embeddings, model)

    results = run_ranks(3, run)
    per_bag = [value for values, _ in results for value in values]
    assert per_bag == (
        [1.0, 0.0, 1.0, 0.0, 1.0] if pooling == "mean" else [1.0, 0.0, 2.0, 0.0, 2.0]
    )
    moved_R4 = 1.0 - results[0][1]["t"]["weight"]
    share = 0.5 if pooling == "mean" else 1.0
    assert moved_R4.tolist() == [[value] * 4 for value in (1.0, share, share, share, share, 0.0)]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("exchange", ["kv", "pooled"])
@pytest.mark.parametrize("batch_size", [0, 3])
def test_batches_without_any_id_on_any_rank_are_steps(
    batch_size: int, exchange: str, name: Any
) -> None:
    """B13: all bags empty; no sample at all. Adam's count goes on, and nothing else changes."""
    model, plan = model_with(name, 0.1), plan_of("mixed", 3, exchange)
    offsets = torch.zeros(len(FEATURES) * batch_size + 1, dtype=torch.int64)

    def run(comm: ThreadRank) -> tuple[Any, Any, int]:
        embeddings = build(comm, model, plan)
        before = read_tables(embeddings, model)
        for weights_L in (None, torch.empty(0)):
            ids = JaggedIds(torch.empty(0, dtype=torch.int64), offsets, len(FEATURES), weights_L)
            width = embeddings.feature_offsets[-1]
            gradient_BS = torch.ones(batch_size, width, dtype=torch.float64)
            pooled_BS = train_step(embeddings, ids, 1.0, gradient_BS)
            assert pooled_BS.tolist() == [[0.0] * width] * batch_size
        return before, read_tables(embeddings, model), embeddings.store.num_steps

    for before, after, num_steps in run_ranks(3, run):
        assert num_steps == 2
        for table, values in before.items():
            assert all(torch.equal(values[state], after[table][state]) for state in values)


@pytest.mark.parametrize("exchange", ["kv", "pooled"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_rows_that_dont_divide_by_the_ranks(world_size: int, exchange: str) -> None:
    """B15: 3, 5 and 4,091 rows by ceiling, so that 5 on 4 ranks are 2, 2, 1 and none."""
    tables = (TableConfig("a", 3, 4), TableConfig("b", 5, 4), TableConfig("c", 4091, 4))
    features = tuple(FeatureConfig(f"f_{t.name}", t.name) for t in tables)
    model = Model(RowOptimizerConfig("adagrad"), tables, features)
    shards: list[Shard] = []
    for table in tables:
        chunk = -(-table.rows // world_size)
        cuts = [min(table.rows, i * chunk) for i in range(world_size + 1)]
        shards += cut_rows(table, cuts, range(world_size))
    of_b = [(s.row_start, s.row_stop) for s in shards if s.table == "b"]
    assert of_b == ([(0, 3), (3, 5)] if world_size == 2 else [(0, 2), (2, 4), (4, 5)])
    plan = Plan(world_size, tuple(shards), {t.name: exchange for t in tables})  # type: ignore[misc]
    batches = draw_batches(model, "multi_hot", 8)
    ranks = run_ranks(world_size, lambda comm: train(comm, model, plan, batches))
    assert_equal_runs(ranks, train_reference(model, batches))
    sizes = [len(ranks[0].tables[table.name]["weight"]) for table in tables]
    assert sizes == [3, 5, 4091]


@pytest.mark.parametrize("where", [(3, 0), (1, 2)])
@pytest.mark.parametrize("exchange", ["kv", "pooled"])
@pytest.mark.parametrize("layout", SMALL_LAYOUTS)
@pytest.mark.parametrize("name", ["adagrad", "rowwise_adagrad"])
def test_duplicates_are_summed_over_ranks_before_adagrad(
    name: Any, layout: str, exchange: str, where: tuple[int, int]
) -> None:
    """B20: id 7 three times with gradient 1: state 3² = 9 and change -3 / sqrt(9) = -1."""
    table = TableConfig("t", 9, 4)
    config = RowOptimizerConfig(name=name, eps=0.0)
    model = Model(config, (table,), (FeatureConfig("f", "t"),))
    plan = plan_of(layout, 2, exchange, model.tables)

    def run(comm: ThreadRank) -> Any:
        embeddings = build(comm, model, plan, torch.float32)
        embeddings.store.write("t", 0, {"weight": torch.zeros(9, 4)})
        copies = where[comm.rank]
        ids = JaggedIds(torch.full((copies,), 7), torch.arange(copies + 1), 1)
        train_step(embeddings, ids, 1.0, torch.ones(copies, 4))
        return read_tables(embeddings, model)

    values = run_ranks(2, run)[0]["t"]
    assert set(values["sum"][7].tolist()) == {9.0}
    assert values["weight"][7].tolist() == [-1.0] * 4
    others = [row for row in range(9) if row != 7]
    assert not bool(values["weight"][others].any())
    assert not bool(values["sum"][others].any())


@pytest.mark.parametrize("layout", SMALL_LAYOUTS)
def test_duplicates_are_summed_over_ranks_before_adam(layout: str) -> None:
    """B20: moments of the sum 3, and one step of it."""
    table = TableConfig("t", 9, 4)
    config = RowOptimizerConfig("adam", eps=0.0, beta1=0.9, beta2=0.99)
    model = Model(config, (table,), (FeatureConfig("f", "t"),))
    plan = plan_of(layout, 3, "kv", model.tables)

    def run(comm: ThreadRank) -> Any:
        embeddings = build(comm, model, plan)
        embeddings.store.write("t", 0, {"weight": torch.zeros(9, 4, dtype=torch.float64)})
        ids = JaggedIds(torch.tensor([7]), torch.arange(2), 1)
        train_step(embeddings, ids, 0.5, torch.ones(1, 4, dtype=torch.float64))
        return read_tables(embeddings, model)

    values = run_ranks(3, run)[0]["t"]
    assert values["exp_avg"][7].tolist() == pytest.approx([0.1 * 3] * 4)
    assert values["exp_avg_sq"][7].tolist() == pytest.approx([0.01 * 9] * 4)
    assert values["weight"][7].tolist() == pytest.approx([-0.5] * 4), "the first step is lr · sign"


def test_a_plan_for_another_number_of_ranks_is_refused() -> None:
    def run(comm: ThreadRank) -> None:
        with pytest.raises(ValueError, match=r"3 ranks.*2 \(launch\.nproc\)"):
            build(comm, model_with("sgd"), plan_of("row_wise", 3))

    run_ranks(2, run)
