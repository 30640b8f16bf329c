"""The sides of `dlrm bench`: their batches, the same model in each, and the floor's products."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from data.batch import Batch, JaggedIds
from data.errors import UserError
from data.parquet import PreparedDataset
from dlrm.bench.batches import memory_batches
from dlrm.bench.measure import SideTask
from dlrm.bench.side_gemm import GemmSide
from dlrm.bench.sides import TORCHREC, builder
from dlrm.bench.start_values import fill_table
from dlrm.bench.train_bench import plan_of
from dlrm.build import build_model, build_tables
from dlrm.config import BenchRun
from dlrm.launch import single_process
from embeddings.table import TableConfig
from tests.commands import compose_config, one_hot_dataset, write_visits

SMALL = (
    "data.batch_size=64",
    "model.bottom_mlp=[8]",
    "model.top_mlp=[9,7]",
    "launch.num_threads=1",
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> PreparedDataset:
    return one_hot_dataset(tmp_path_factory.mktemp("bench") / "d")


@pytest.fixture
def config() -> BenchRun:
    composed: BenchRun = compose_config("bench", *SMALL)
    return composed


# -------------------------------------------------------------------------------------- batches


def batches_of(dataset: PreparedDataset, **more: Any) -> list[Batch]:
    """Of the training part, batches of 64; one process and bags of one unless said otherwise."""
    values = {
        "batch_size": 64, "num_batches": 5, "bag_size": 1, "seed": 3, "rank": 0, "world_size": 1,
    } | more  # fmt: skip
    return memory_batches(dataset, "train", **values)


def test_batches_are_full_and_go_on_where_the_part_ends(dataset: PreparedDataset) -> None:
    """300 rows hold four full batches of 64; the fifth is of the next epoch, in another order."""
    batches = batches_of(dataset)
    assert [batch.batch_size for batch in batches] == [64] * 5
    rows = [set(batch.row_B.tolist()) for batch in batches if batch.row_B is not None]
    assert len(set.union(*rows[:4])) == 256
    assert batches[4].row_B is not None
    assert batches[0].row_B is not None
    assert batches[4].row_B.tolist() != batches[0].row_B.tolist()


def test_the_ranks_shares_are_the_global_batch(dataset: PreparedDataset) -> None:
    whole = batches_of(dataset)
    shares = [batches_of(dataset, rank=rank, world_size=2) for rank in range(2)]
    for number, batch in enumerate(whole):
        parts = [share[number] for share in shares]
        assert [part.batch_size for part in parts] == [32, 32]
        rows = [row for part in parts for row in part.row_B.tolist()]  # type: ignore[union-attr]
        assert batch.row_B is not None
        assert sorted(rows) == sorted(batch.row_B.tolist())


def bag(ids: JaggedIds, feature: int, sample: int, batch_size: int) -> list[int]:
    index = feature * batch_size + sample
    start, stop = ids.offsets[index : index + 2].tolist()
    return ids.values_L[start:stop].tolist()


def test_joined_bags_have_the_ids_of_the_batches_that_follow(dataset: PreparedDataset) -> None:
    single = batches_of(dataset, num_batches=6)
    joined = batches_of(dataset, num_batches=2, bag_size=3)
    for number, batch in enumerate(joined):
        sources = single[3 * number : 3 * number + 3]
        assert torch.equal(batch.dense_BN, sources[0].dense_BN)
        assert batch.label_B is not None
        assert sources[0].label_B is not None
        assert torch.equal(batch.label_B, sources[0].label_B)
        assert batch.ids.num_features == 26
        for feature in range(26):
            for sample in (0, 1, 63):
                expected = [bag(s.ids, feature, sample, 64)[0] for s in sources]
                assert bag(batch.ids, feature, sample, 64) == expected


def test_bags_of_many_ids_are_not_joined(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"set bench\.bag_size=1"):
        memory_batches(
            write_visits(tmp_path, 60), "train", batch_size=10, num_batches=1, bag_size=2, seed=0,
            rank=0, world_size=1,
        )  # fmt: skip


def test_a_part_without_a_full_batch_is_refused(dataset: PreparedDataset) -> None:
    with pytest.raises(UserError, match=r"data\.batch_size=301: the train part .* has only 300"):
        batches_of(dataset, batch_size=301)


# ------------------------------------------------------------------- the sides' models and floor


def logits_of(
    side_name: str, config: BenchRun, dataset: PreparedDataset, batches: list[Batch]
) -> list[torch.Tensor]:
    """Logits of a side before training, and after two steps."""
    task = SideTask(config, dataset.root, plan_of(config, dataset), side_name)
    with builder(side_name)(single_process(), task, dataset, batches[:2]) as side:
        found = []
        for num_steps in (0, 2):
            for _ in range(num_steps):
                side.step()
            if num_steps:
                side.end_training()
            with torch.no_grad():
                logits_B = side.logits(batches[2])
            assert logits_B is not None
            found.append(logits_B.clone())
    return found


@pytest.mark.parametrize("bag_size", [1, 3])
def test_the_plain_peer_is_the_same_model_before_and_after_training(
    bag_size: int, config: BenchRun, dataset: PreparedDataset
) -> None:
    batches = batches_of(dataset, num_batches=3, bag_size=bag_size)
    config.optim.sparse.name, config.optim.dense.name = "sgd", "sgd"  # No division: no noise.
    config.optim.sparse.lr = config.optim.dense.lr = 0.5
    ours = logits_of("dlrm", config, dataset, batches)
    theirs = logits_of("embedding_bag", config, dataset, batches)
    for own_B, peer_B in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own_B, peer_B, rtol=1e-4, atol=1e-5)
    assert float((ours[0] - ours[1]).abs().max()) > 0.01, "nothing was learnt"


def start_of(side_name: str, config: BenchRun, dataset: PreparedDataset) -> dict[str, torch.Tensor]:
    """Each table of a side as it starts, whole."""
    batches = batches_of(dataset, num_batches=1)
    task = SideTask(config, dataset.root, plan_of(config, dataset), side_name)
    tables, _ = build_tables(config, dataset.manifest)
    found = {}
    with builder(side_name)(single_process(), task, dataset, batches) as side:
        for table in tables:
            if side_name == "dlrm":
                store = side._trainer.embeddings.store  # type: ignore[attr-defined]
                values = store.read(table.name, 0, table.rows)["weight"]
            elif side_name == "embedding_bag":
                values = side._model.tables.bags[table.name].weight  # type: ignore[attr-defined]
            else:
                path = f"model.sparse_arch.embedding_bag_collection.embedding_bags.{table.name}"
                held = side._model.state_dict()[f"{path}.weight"]  # type: ignore[attr-defined]
                (shard,) = held.local_shards()
                values = shard.tensor
            found[table.name] = values.detach().clone()
    return found


@pytest.mark.parametrize("peer", ["embedding_bag", "torchrec_table_wise"])
def test_tables_start_equal_to_the_bit(
    peer: str, config: BenchRun, dataset: PreparedDataset
) -> None:
    if peer in TORCHREC:
        import_torchrec()
    ours, theirs = (start_of(side, config, dataset) for side in ("dlrm", peer))
    assert list(ours) == list(theirs)
    for name, values_RD in ours.items():
        assert torch.equal(values_RD, theirs[name]), name
        assert float(values_RD.abs().max()) > 0


def test_a_part_of_a_table_starts_as_the_whole_does() -> None:
    """What a TorchRec rank fills of a table that is cut."""
    table = TableConfig("t", 20, 8)
    whole_RD, part_RD = torch.empty(20, 8), torch.empty(5, 4)
    fill_table(whole_RD, table, seed=3)
    fill_table(part_RD, table, seed=3, row_start=7, col_start=4)
    assert torch.equal(part_RD, whole_RD[7:12, 4:])


def import_torchrec() -> None:
    """Skips where it isn't installed; its import warns of what torch has deprecated."""
    if find_spec("torchrec") is None:
        pytest.skip("torchrec isn't installed (DLRM_EXTRAS=peers)")
    warnings.simplefilter("ignore")
    __import__("dlrm.bench.side_torchrec")


@pytest.mark.parametrize("side_name", ["torchrec_table_wise", "torchrec_row_wise_pipelined"])
def test_torchrec_is_the_same_model_before_and_after_training(
    side_name: str, config: BenchRun, dataset: PreparedDataset
) -> None:
    import_torchrec()
    batches = batches_of(dataset, num_batches=3, bag_size=2)
    config.optim.sparse.name, config.optim.dense.name = "sgd", "sgd"
    config.optim.sparse.lr = config.optim.dense.lr = 0.5
    ours = logits_of("dlrm", config, dataset, batches)
    theirs = logits_of(side_name, config, dataset, batches)
    for own_B, peer_B in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own_B, peer_B, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_floor_multiplies_what_the_dense_network_multiplies(
    precision: str, config: BenchRun, dataset: PreparedDataset
) -> None:
    """13-8-16, 367-9-7-1 for 26 tables of dim 16: three products per layer, two for the first."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    side = GemmSide(build_model(config, dataset.manifest), 64, dtype)
    num_pairs = 27 * 26 // 2
    layers = [(13, 8), (8, 16), (16 + num_pairs, 9), (9, 7), (7, 1)]
    assert len(side.layers) == len(layers)
    for number, (layer, (num_in, num_out)) in enumerate(zip(side.layers, layers, strict=True)):
        assert layer._output.shape == (64, num_out)
        assert layer._weight_grad.shape == (num_out, num_in)
        assert layer._output.dtype == layer._weight_grad.dtype == dtype
        if number:
            assert layer._input_grad is not None
            assert layer._input_grad.shape == (64, num_in)
        else:
            assert layer._input_grad is None
    flops = 2 * 64 * (2 * 13 * 8 + 3 * sum(i * o for i, o in layers[1:]))
    assert side.figures() == {"flops": flops}
    assert side.logits(batches_of(dataset, num_batches=1)[0]) is None


def test_the_floor_s_products_are_those_of_a_linear_layer() -> None:
    side = GemmSide(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), 5, torch.float32)
    side.step()
    layer = side.layers[1]
    assert layer._input_grad is not None
    input_BI = layer._input.clone().requires_grad_()
    weight_OI = layer._weight.clone().requires_grad_()
    output_BO = nn.functional.linear(input_BI, weight_OI)
    output_BO.backward(layer._output_grad)
    torch.testing.assert_close(layer._output, output_BO.detach())
    torch.testing.assert_close(layer._weight_grad, weight_OI.grad)
    torch.testing.assert_close(layer._input_grad, input_BI.grad)
