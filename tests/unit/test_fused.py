"""The fused backend: it borrows the store's memory, agrees with torch, and knows its limits."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from data.batch import JaggedIds
from embeddings.fused import FusedGroup, load_fbgemm, why_not_fused
from embeddings.row_optim import RowOptimizerConfig
from embeddings.sharded import ShardedEmbeddings
from embeddings.table import FeatureConfig, TableConfig
from embeddings.table_group import Piece, TableGroup

# Elsewhere the CPU wheel doesn't exist. On Linux it is a dependency, and its absence a failure.
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="fbgemm has wheels for Linux only")

RULES: tuple[Any, ...] = ("sgd", "adagrad", "rowwise_adagrad")
REPOSITORY = Path(__file__).resolve().parents[2]
TABLES = [
    TableConfig("user", rows=40, dim=8),
    TableConfig("item", rows=25, dim=4),
    TableConfig("idle", rows=3, dim=8),
    TableConfig("shop", rows=6, dim=8),
    TableConfig("lonely", rows=3, dim=12),
]
FEATURES = [
    FeatureConfig("viewer", "user"),
    FeatureConfig("clicked", "item", pooling="mean"),
    FeatureConfig("friends", "user", pooling="mean"),
    FeatureConfig("shop", "shop"),
]


def embeddings_of(
    backend: Any, name: Any, features: list[FeatureConfig] = FEATURES, **constants: float
) -> ShardedEmbeddings:
    config = RowOptimizerConfig(name=name, **constants)
    return ShardedEmbeddings(TABLES, features, config, dtype=torch.float32, seed=5, backend=backend)


def random_ids(
    features: list[FeatureConfig],
    lengths: Tensor,
    generator: torch.Generator,
    *,
    weighted: bool,
) -> JaggedIds:
    """Ids for `F·B` bags of the given lengths, skewed so that rows repeat."""
    rows = {table.name: table.rows for table in TABLES}
    offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
    offsets[1:] = lengths.cumsum(0)
    bag_rows = torch.tensor([rows[f.table] for f in features]).repeat_interleave(
        lengths.numel() // len(features)
    )
    uniform = torch.rand(int(offsets[-1]), generator=generator, dtype=torch.float64)
    values_L = (uniform.square() * bag_rows.repeat_interleave(lengths)).long()
    weights_L = torch.rand(values_L.numel(), generator=generator) * 2 if weighted else None
    return JaggedIds(values_L, offsets, len(features), weights_L)


def step(embeddings: ShardedEmbeddings, ids: JaggedIds, grad_BS: Tensor, lr: float) -> Tensor:
    plan = embeddings.plan_batch(ids)
    pooled_BS = embeddings.lookup(plan)
    embeddings.apply(embeddings.backward(plan, grad_BS, lr), lr)
    return pooled_BS.detach()


def assert_close(found: Tensor, expected: Tensor, relative: float) -> None:
    """To `relative` of each value, or of the largest one where a value lies near zero."""
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(found, expected, rtol=relative, atol=relative * scale)


def assert_one_step_agrees(
    fused: ShardedEmbeddings, plain: ShardedEmbeddings, ids: JaggedIds, grad_BS: Tensor, lr: float
) -> None:
    """One step from equal state, after which `fused` is set back to `plain`."""
    assert_close(step(fused, ids, grad_BS, lr), step(plain, ids, grad_BS, lr), 1e-6)
    assert fused.store.num_steps == plain.store.num_steps
    for table in TABLES:
        expected = plain.store.read(table.name, 0, table.rows)
        for name, found in fused.store.read(table.name, 0, table.rows).items():
            assert_close(found, expected[name], 1e-6)
        fused.store.write(table.name, 0, expected)


@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("shape", ["one-hot", "multi-hot"])
@pytest.mark.parametrize("name", RULES)
def test_every_step_from_equal_state_agrees_with_torch(
    name: Any, shape: str, weighted: bool
) -> None:
    """Shared tables, two dims, sum and mean, empty bags, duplicates, a falling learning rate."""
    fused, plain = embeddings_of("fbgemm", name, eps=1e-4), embeddings_of("torch", name, eps=1e-4)
    assert (fused.backend, plain.backend) == ("fbgemm", "torch")
    start = fused.store.read("user", 0, 40)["weight"]
    generator = torch.Generator().manual_seed(11)
    for number in range(20):
        lengths = torch.randint(0, 4, (4 * 16,), generator=generator)
        if shape == "one-hot":
            lengths = torch.ones_like(lengths)
        ids = random_ids(FEATURES, lengths, generator, weighted=weighted)
        grad_BS = torch.randn(16, 28, generator=generator)
        assert_one_step_agrees(fused, plain, ids, grad_BS, lr=0.1 / (1 + number))
    assert float((fused.store.read("user", 0, 40)["weight"] - start).abs().max()) > 0.1


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(RULES),
    wiring=st.lists(
        st.tuples(st.sampled_from(TABLES), st.sampled_from(["sum", "mean"])), min_size=1, max_size=4
    ),
    batch_size=st.integers(0, 5),
    max_length=st.integers(0, 4),
    weighted=st.booleans(),
    seed=st.integers(0, 999),
)
def test_any_features_and_bags_agree_with_torch(
    name: Any,
    wiring: list[tuple[TableConfig, Any]],
    batch_size: int,
    max_length: int,
    weighted: bool,
    seed: int,
) -> None:
    """A single feature of a group takes another kernel inside fbgemm than several do."""
    features = [FeatureConfig(f"f{i}", t.name, pooling=p) for i, (t, p) in enumerate(wiring)]
    fused = embeddings_of("fbgemm", name, features, eps=1e-3)
    plain = embeddings_of("torch", name, features, eps=1e-3)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2):
        lengths = torch.randint(
            0, max_length + 1, (len(features) * batch_size,), generator=generator
        )
        ids = random_ids(features, lengths, generator, weighted=weighted)
        grad_BS = torch.randn(batch_size, plain.feature_offsets[-1], generator=generator)
        assert_one_step_agrees(fused, plain, ids, grad_BS, lr=0.1)


def test_the_stores_memory_is_borrowed_not_copied() -> None:
    store = embeddings_of("torch", "adagrad").store
    kernel = FusedGroup(store, 0, num_features=3).kernel
    assert kernel.weights_host.data_ptr() == store.weights(0).data_ptr()
    assert kernel.momentum1_host.data_ptr() == store.state(0)["sum"].data_ptr()


def test_kernel_and_store_see_each_others_writes() -> None:
    embeddings = embeddings_of("fbgemm", "adagrad", [FeatureConfig("f", "user")], eps=0.0)
    embeddings.store.write("user", 7, {"weight": torch.full((1, 8), 2.0)})
    embeddings.store.write("user", 7, {"sum": torch.full((1, 8), 12.0)})
    ids = JaggedIds(torch.tensor([7]), torch.tensor([0, 1]), 1)
    pooled_BS = step(embeddings, ids, torch.full((1, 8), 2.0), lr=1.0)
    assert pooled_BS.tolist() == [[2.0] * 8]
    values = embeddings.store.read("user", 7, 8)
    assert values["sum"].tolist() == [[16.0] * 8]
    assert values["weight"].tolist() == [[1.5] * 8]


def test_the_learning_rate_is_the_one_given_to_backward() -> None:
    """fbgemm's own autograd node would use the one in force at lookup."""
    embeddings = embeddings_of("fbgemm", "sgd", [FeatureConfig("f", "user")])
    ids = JaggedIds(torch.tensor([7]), torch.tensor([0, 1]), 1)
    for lr in (0.5, 0.25):
        before = embeddings.store.read("user", 7, 8)["weight"]
        step(embeddings, ids, torch.ones(1, 8), lr)
        after = embeddings.store.read("user", 7, 8)["weight"]
        torch.testing.assert_close(before - after, torch.full((1, 8), lr))


def test_two_lookups_may_be_in_flight() -> None:
    embeddings = embeddings_of("fbgemm", "sgd", [FeatureConfig("f", "user")])
    embeddings.store.write("user", 0, {"weight": torch.zeros(40, 8)})
    plans = [
        embeddings.plan_batch(JaggedIds(torch.tensor([row, 5]), torch.tensor([0, 1, 2]), 1))
        for row in (3, 4)
    ]
    pooled = [embeddings.lookup(plan) for plan in plans]
    for plan, pooled_BS in zip(plans, pooled, strict=True):
        pooled_BS.sum().backward()
        assert pooled_BS.grad is not None
        assert embeddings.backward(plan, pooled_BS.grad, 1.0) == []
    rows = embeddings.store.read("user", 0, 40)["weight"][:, 0].tolist()
    assert rows[3:6] == [-1.0, -1.0, -2.0]
    assert sum(rows) == -4.0


def test_two_runs_are_equal_to_the_bit() -> None:
    def run() -> list[Tensor]:
        embeddings = embeddings_of("fbgemm", "adagrad")
        generator = torch.Generator().manual_seed(3)
        for _ in range(10):
            lengths = torch.randint(0, 4, (4 * 64,), generator=generator)
            ids = random_ids(FEATURES, lengths, generator, weighted=True)
            step(embeddings, ids, torch.randn(64, 28, generator=generator), 0.1)
        return [v for t in TABLES for v in embeddings.store.read(t.name, 0, t.rows).values()]

    assert all(torch.equal(one, two) for one, two in zip(run(), run(), strict=True))


GROUP = TableGroup((Piece("user", 0, 0, 40, ((0, 8),)),), 8, torch.float32, "adagrad")
ADAGRAD = RowOptimizerConfig(name="adagrad")


@pytest.mark.parametrize("name", RULES)
def test_nothing_speaks_against_the_legal_cases(name: Any) -> None:
    assert why_not_fused([GROUP], RowOptimizerConfig(name=name)) is None


@pytest.mark.parametrize(
    ("group", "config", "flags", "reason"),
    [
        (GROUP, RowOptimizerConfig(name="adam"), {}, "optim.sparse.name=adam"),
        (GROUP, replace(ADAGRAD, weight_decay=0.1), {}, "optim.sparse.weight_decay=0.1"),
        (GROUP, ADAGRAD, {"accumulate": 2}, "train.accumulate=2"),
        (GROUP, ADAGRAD, {"clip_norm": 1.0}, "norm of 1.0"),
        (replace(GROUP, dtype=torch.float64), ADAGRAD, {}, "'user' is torch.float64"),
        (replace(GROUP, dim=6), ADAGRAD, {}, "'user' has dim 6"),
        (
            replace(GROUP, pieces=(Piece("user", 0, 0, 2**31, ((0, 8),)),)),
            ADAGRAD,
            {},
            "2147483648 rows",
        ),
    ],
)
def test_each_limit_is_named(
    group: TableGroup, config: RowOptimizerConfig, flags: dict[str, Any], reason: str
) -> None:
    message = why_not_fused([GROUP, group], config, **flags)
    assert message is not None
    assert reason in message
    assert "\n" not in message


def test_auto_takes_torch_and_says_why() -> None:
    """Measured faster wherever both are legal; fbgemm is there for who asks."""
    auto = embeddings_of("auto", "adagrad")
    assert auto.backend == "torch"
    assert "faster" in auto.backend_message
    assert embeddings_of("torch", "adagrad").backend_message.startswith("torch: ")
    assert embeddings_of("fbgemm", "adagrad").backend_message.startswith("fbgemm: ")


def test_an_illegal_wish_is_refused_with_its_reason_and_key() -> None:
    with pytest.raises(ValueError, match=r"train\.backend=fbgemm.*optim\.sparse\.name=adam"):
        embeddings_of("fbgemm", "adam")
    with pytest.raises(ValueError, match=r"train\.backend is 'tbe'"):
        embeddings_of("tbe", "sgd")


def test_the_loaded_versions_are_named() -> None:
    status = load_fbgemm()
    assert status.available, status.message
    assert "torch 2." in status.message
    assert "fbgemm-gpu-cpu 1." in status.message


BROKEN_LIBRARY_PROGRAM = """
import os, sys
import torch
from data.batch import JaggedIds
from embeddings import FeatureConfig, RowOptimizerConfig, ShardedEmbeddings, TableConfig
from embeddings.fused import load_fbgemm

# One process for each library, all of which have found the same torch.
for folder in sys.argv[1:]:
    if os.fork() == 0:
        sys.path.insert(0, folder)
        for number, name in ((1, "out"), (2, "err")):
            with open(f"{folder}/{name}", "w") as opened:
                os.dup2(opened.fileno(), number)
        break
    assert os.wait()[1] == 0, folder
else:
    sys.exit()
assert "fbgemm_gpu" not in sys.modules

status = load_fbgemm()
assert not status.available
print(status.message)

def build(backend):
    return ShardedEmbeddings(
        [TableConfig("t", 9, 4)], [FeatureConfig("f", "t")], RowOptimizerConfig(name="sgd"),
        dtype=torch.float32, seed=1, backend=backend,
    )

try:
    build("fbgemm")
except ValueError as error:
    print(error)
embeddings = build("auto")
assert embeddings.backend == "torch"
print(embeddings.backend_message)
plan = embeddings.plan_batch(JaggedIds(torch.tensor([3]), torch.tensor([0, 1]), 1))
before = embeddings.lookup(plan).detach().clone()
embeddings.apply(embeddings.backward(plan, torch.ones(1, 4), 0.5), 0.5)
assert torch.allclose(before - 0.5, embeddings.lookup(plan, training=False))
"""


FAILURES = [
    "raise OSError('fbgemm_gpu_config.so: undefined symbol: _ZN3c10\\nmore\\nlines')",
    "raise ImportError('no such thing')",
    "raise RuntimeError",
    "",  # imports, but has none of the modules
]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """What the program says with a library that fails so: (stdout, stderr)."""
    folders = {failure: tmp_path_factory.mktemp("library") for failure in FAILURES}
    for failure, folder in folders.items():
        (folder / "fbgemm_gpu").mkdir()
        (folder / "fbgemm_gpu" / "__init__.py").write_text(failure)
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", BROKEN_LIBRARY_PROGRAM, *folders.values()],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = {
        failure: ((folder / "out").read_text(), (folder / "err").read_text())
        for failure, folder in folders.items()
    }
    assert (result.returncode, result.stdout, result.stderr) == (0, "", ""), said
    return said


@pytest.mark.parametrize("failure", FAILURES)
def test_a_library_that_does_not_load_costs_one_line(
    failure: str, said: dict[str, tuple[str, str]]
) -> None:
    """B52: another fbgemm than torch's partner fails at import; training doesn't need it."""
    out, err = said[failure]
    assert err == ""
    lines = out.splitlines()
    assert len(lines) == 3, "one line each: the status, the refusal, auto's choice"
    for line in lines[:2]:
        assert "torch==2.13.0 with fbgemm-gpu-cpu==1.8.0" in line
        assert f"torch {torch.__version__}" in line
    if "OSError" in failure:
        assert "undefined symbol" in lines[0]
    assert "train.backend" in lines[1]
