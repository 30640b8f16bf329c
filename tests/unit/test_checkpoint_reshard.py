"""A checkpoint of any plan, loaded under any other: the same model, row by row, state by state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from dlrm.checkpoint import CheckpointInfo, Checkpoints
from dlrm.checkpoint_load import load_model, load_training
from embeddings import (
    FeatureConfig,
    Plan,
    RowOptimizerConfig,
    ShardedEmbeddings,
    TableConfig,
    sum_kv,
)
from embeddings.communicator import SingleProcess
from embeddings.fused import load_fbgemm
from tests.checkpoint_cases import Part, dense_model, make_part
from tests.sharding_cases import (
    LAYOUTS,
    TABLES,
    Model,
    bounds_of_rank,
    build,
    draw_batches,
    gradient_of,
    learning_rate,
    part_of,
    plan_of,
    read_tables,
    tilings,
    train_reference,
)
from tests.thread_ranks import ThreadRank, run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

RULES = ("sgd", "rowwise_adagrad", "adagrad", "adam")
SEED = 7


def save(folder: Path, plan: Plan, rule: Any, dtype: torch.dtype, **more: Any) -> tuple[Any, str]:
    """Saves a filled model from all ranks of a plan; the checkpoint and the model's digest."""

    def work(comm: ThreadRank) -> str:
        part = make_part(comm, plan, rule, dtype, **more)
        fresh = part.digest()
        part.fill(SEED)
        part.save(Checkpoints(folder), SEED)
        digest = part.digest()
        assert digest != fresh
        return digest

    digests = run_ranks(plan.world_size, work)
    assert len(set(digests)) == 1, "every rank is told the same"
    return Checkpoints(folder).find("latest"), digests[0]


def load(info: CheckpointInfo, plan: Plan, rule: Any, dtype: torch.dtype, **more: Any) -> set[str]:
    """Loads all of it on all ranks of a plan; the digests that they then give."""

    def work(comm: ThreadRank) -> str:
        part = make_part(comm, plan, rule, dtype, **more)
        load_training(info, part.model, part.embeddings, part.optimizer)
        assert part.embeddings.store.num_steps == SEED
        return part.digest()

    return set(run_ranks(plan.world_size, work))


@pytest.mark.parametrize(
    ("rule", "dtype"),
    [(rule, (torch.float32, torch.float64)[i % 2]) for i, rule in enumerate(RULES)],
)
def test_saved_row_wise_by_two_ranks_it_loads_under_every_layout(
    rule: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """On 1 to 4 ranks, of which some hold nothing, and tables have fewer rows than there are."""
    info, digest = save(tmp_path, plan_of("row_wise", 2), rule, dtype)
    for world_size in (1, 2, 3, 4):
        for layout in LAYOUTS:
            found = load(info, plan_of(layout, world_size), rule, dtype)
            assert found == {digest}, (layout, world_size)


@pytest.mark.parametrize("rule", ["rowwise_adagrad", "adam"])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "row_wise"])
def test_saved_under_any_layout_it_loads_under_others(
    layout: str, rule: str, tmp_path: Path
) -> None:
    """Columns apart, copies, rectangles that are no grid, and ranks that have nothing to save."""
    dtype = torch.float64 if rule == "adam" else torch.float32
    info, digest = save(tmp_path, plan_of(layout, 3), rule, dtype)
    for other, world_size in (("row_wise", 2), ("mixed", 4), ("table_wise", 1), (layout, 3)):
        assert load(info, plan_of(other, world_size), rule, dtype) == {digest}, (other, world_size)


@settings(max_examples=25, deadline=None)
@given(data=st.data(), rule=st.sampled_from(RULES), rows=st.integers(1, 12), dim=st.integers(1, 6))
def test_any_tiling_loads_as_any_other(
    data: st.DataObject,
    rule: str,
    rows: int,
    dim: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    tables = (TableConfig("user", rows, dim),)
    plans = []
    for _ in range(2):
        world_size = data.draw(st.integers(1, 4))
        shards = data.draw(tilings(tables[0], world_size))
        plans.append(Plan(world_size, tuple(shards), {"user": "kv"}))
    folder = tmp_path_factory.mktemp("tilings")
    info, digest = save(folder, plans[0], rule, torch.float32, tables=tables)
    assert load(info, plans[1], rule, torch.float32, tables=tables) == {digest}


def test_each_number_is_written_once(tmp_path: Path) -> None:
    """Of copies too, of which each rank writes a share."""
    total = sum(table.rows * table.dim * 3 for table in TABLES)
    for layout in LAYOUTS:
        info, _ = save(tmp_path / layout, plan_of(layout, 3), "adam", torch.float32)
        of_rank = [
            sum(values.numel() for values in load_file(path).values())
            for path in info.folder.glob("rows-*.safetensors")
        ]
        assert (len(of_rank), sum(of_rank)) == (3, total), layout
        if layout == "replicated":
            assert max(of_rank) < 0.5 * total


def test_dense_weights_and_optimizer_are_those_of_every_rank(tmp_path: Path) -> None:
    """Both moments, the count of steps with its type, buffers; and the next step is the same."""
    info, _ = save(tmp_path, plan_of("mixed", 2), "adam", torch.float32)

    def dense_of(part: Part) -> dict[str, Any]:
        def all_of_it() -> dict[str, Any]:
            values = dict(part.model.state_dict())
            for parameter, state in part.optimizer.state_dict()["state"].items():
                assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
                values |= {f"{parameter}/{name}": value for name, value in state.items()}
            return {name: value.clone() for name, value in values.items()}

        before = all_of_it()
        part.dense_step(torch.Generator().manual_seed(3))
        return {"before": before, "after": all_of_it()}

    def work(comm: ThreadRank) -> dict[str, Any]:
        part = make_part(comm, plan_of("lone", 3), "adam")
        load_training(info, part.model, part.embeddings, part.optimizer)
        return dense_of(part)

    uninterrupted = make_part(SingleProcess(), plan_of("lone", 1), "adam")
    uninterrupted.fill(SEED)
    expected = dense_of(uninterrupted)
    for found in run_ranks(3, work):
        for when, values in expected.items():
            assert found[when].keys() == values.keys()
            for name, value in values.items():
                assert (found[when][name].dtype, found[when][name].shape) == (
                    value.dtype,
                    value.shape,
                ), name
                assert torch.equal(found[when][name], value), (when, name)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("layout", "world_size"), [("mixed", 3), ("column_wise", 4), ("lone", 1)])
def test_training_goes_on_as_if_it_had_not_stopped(
    layout: str, world_size: int, rule: str, tmp_path: Path
) -> None:
    """Also Adam's count of steps, which no row shows: fp64, against the reference."""
    model = Model(RowOptimizerConfig(rule))  # type: ignore[arg-type]
    batches = draw_batches(model, "multi_hot", 6)

    def train(embeddings: ShardedEmbeddings, first: int, last: int) -> None:
        comm = embeddings.comm
        for step in range(first, last):
            ids = batches[step]
            start, stop = bounds_of_rank(ids.batch_size, step, comm.rank, comm.world_size)
            batch = embeddings.plan_batch(part_of(ids, start, stop))
            gradient = gradient_of(embeddings.lookup(batch), batch.global_batch_size)
            gradients = embeddings.backward(batch, gradient, learning_rate(step))
            embeddings.apply(sum_kv([gradients]), learning_rate(step))

    def before(comm: ThreadRank) -> None:
        network = dense_model()
        embeddings = build(comm, model, plan_of("row_wise", 2))
        train(embeddings, 0, 3)
        part = Part(embeddings, network, torch.optim.SGD(network.parameters(), lr=0.1))
        part.save(Checkpoints(tmp_path), 3)

    def after(comm: ThreadRank) -> Any:
        network = dense_model()
        embeddings = build(comm, model, plan_of(layout, world_size))
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        load_training(Checkpoints(tmp_path).find("latest"), network, embeddings, optimizer)
        train(embeddings, 3, 6)
        return read_tables(embeddings, model)

    run_ranks(2, before)
    found = run_ranks(world_size, after)[0]
    for table, values in train_reference(model, batches).tables.items():
        for name, expected in values.items():
            torch.testing.assert_close(
                found[table][name], expected, rtol=1e-10, atol=1e-13, msg=f"{table}.{name}"
            )


def test_weights_alone_load_into_tables_of_another_optimizer(tmp_path: Path) -> None:
    """As scoring does: no state is read, and none is touched."""
    info, _ = save(tmp_path, plan_of("pinwheel", 3), "adam", torch.float32)

    def work(comm: ThreadRank) -> Any:
        part = make_part(comm, plan_of("mixed", 2), "sgd")
        load_model(info, part.model, part.embeddings)
        assert part.embeddings.store.num_steps == 0
        return read_tables(part.embeddings, Model(RowOptimizerConfig("sgd")))

    expected = make_part(SingleProcess(), plan_of("lone", 1), "adam")
    expected.fill(SEED)
    for table, values in run_ranks(2, work)[0].items():
        whole = expected.embeddings.store.read(table, 0, values["weight"].shape[0])
        assert values.keys() == {"weight"}
        assert torch.equal(values["weight"], whole["weight"]), table


@pytest.mark.parametrize("rule", ["sgd", "rowwise_adagrad", "adagrad"])
@pytest.mark.parametrize(("saver", "loader"), [("fbgemm", "torch"), ("torch", "fbgemm")])
def test_the_backend_may_change(rule: str, saver: Any, loader: Any, tmp_path: Path) -> None:
    """What the fused kernel has updated is saved, and what is loaded is what it looks up."""
    status = load_fbgemm()
    if not status.available:
        pytest.skip(status.message)
    tables = [TableConfig("user", 37, 8), TableConfig("shop", 5, 4)]
    features = [FeatureConfig("viewer", "user"), FeatureConfig("shop", "shop", "mean")]
    model = Model(RowOptimizerConfig(rule), tuple(tables), tuple(features))  # type: ignore[arg-type]
    ids = draw_batches(model, "multi_hot", 3)

    def make(backend: Any, seed: int) -> Part:
        embeddings = ShardedEmbeddings(
            tables, features, model.optimizer, dtype=torch.float32, seed=seed, backend=backend
        )
        assert embeddings.backend == backend
        network = dense_model()
        return Part(embeddings, network, torch.optim.SGD(network.parameters(), lr=0.1))

    def pooled_of(part: Part, batch: int) -> torch.Tensor:
        plan = part.embeddings.plan_batch(ids[batch])
        pooled = part.embeddings.lookup(plan)
        gradients = part.embeddings.backward(plan, torch.ones_like(pooled), 0.1)
        part.embeddings.apply(gradients, 0.1)
        return pooled.detach()

    saved, loaded = make(saver, 1), make(loader, 2)
    for part in (saved, loaded):
        pooled_of(part, 0)
    saved.save(Checkpoints(tmp_path), 1)
    assert saved.digest() != loaded.digest()
    load_training(
        Checkpoints(tmp_path).find("latest"), loaded.model, loaded.embeddings, loaded.optimizer
    )
    assert saved.digest() == loaded.digest()
    for batch in (1, 0):
        torch.testing.assert_close(pooled_of(saved, batch), pooled_of(loaded, batch))
