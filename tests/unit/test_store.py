"""`RowStore`: reading, writing and updating rows and their state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from embeddings.plan import Plan, Shard, single_process_plan
from embeddings.row_optim import RowOptimizerConfig
from embeddings.store import RowStore
from embeddings.table import TableConfig, fill_uniform
from embeddings.table_group import local_groups

TABLES = [
    TableConfig("user", rows=10, dim=4),
    TableConfig("shop", rows=7, dim=6),
    TableConfig("item", rows=5, dim=4),
]


def store(name: Any = "adagrad", *, dtype: torch.dtype = torch.float32) -> RowStore:
    groups = local_groups(single_process_plan(TABLES), rank=0, dtype=dtype, optimizer=name)
    return RowStore(TABLES, groups, RowOptimizerConfig(name=name, eps=1e-3), seed=3)


def whole(rows: RowStore, table: TableConfig) -> dict[str, Tensor]:
    return rows.read(table.name, 0, table.rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_start_at_the_tables_start_values_and_state_at_zero(dtype: torch.dtype) -> None:
    rows = store(dtype=dtype)
    for table in TABLES:
        expected = torch.empty(table.rows, table.dim, dtype=dtype)
        fill_uniform(
            expected,
            seed=3,
            table_name=table.name,
            row_start=0,
            col_start=0,
            dim=table.dim,
            bound=table.rows**-0.5,
        )
        values = whole(rows, table)
        assert torch.equal(values["weight"], expected)
        assert torch.equal(values["sum"], torch.zeros_like(expected))
    assert rows.tables == tuple(TABLES)


def test_a_shard_starts_at_its_rectangle_of_the_table() -> None:
    """Rank 1 of a plan that cuts rows and columns holds the values one process would hold."""
    table = TABLES[0]
    plan = Plan(
        2,
        (
            Shard("user", 0, 4, 0, 4, rank=0),
            Shard("user", 4, 10, 0, 2, rank=1),
            Shard("user", 4, 10, 2, 4, rank=0),
        ),
        {"user": "kv"},
    )
    plan.validate([table])
    groups = local_groups(plan, rank=1, dtype=torch.float32, optimizer="sgd")
    shard = RowStore([table], groups, RowOptimizerConfig(name="sgd"), seed=3)
    (part,) = shard.read_parts("user", 5, 9)
    assert (part.row_start, part.row_stop, part.piece.columns) == (5, 9, ((0, 2),))
    assert torch.equal(part.values["weight"], whole(store(), table)["weight"][5:9, :2])
    assert shard.read_parts("user", 0, 4) == []
    with pytest.raises(
        ValueError, match=r"'user': rows 5:9 are not held whole here, but rows 4:10"
    ):
        shard.read("user", 5, 9)


@pytest.mark.parametrize(
    ("name", "widths"),
    [
        ("sgd", {}),
        ("adagrad", {"sum": 4}),
        ("rowwise_adagrad", {"sum": 1}),
        ("adam", {"exp_avg": 4, "exp_avg_sq": 4}),
    ],
)
def test_state_is_declared_and_counted(name: Any, widths: dict[str, int]) -> None:
    rows = store(name)
    assert rows.state_widths("user") == widths
    num_weights = 10 * 4 + 7 * 6 + 5 * 4
    assert rows.table_bytes() == num_weights * 4
    per_table = {"sgd": 0, "adagrad": num_weights, "rowwise_adagrad": 22, "adam": 2 * num_weights}
    assert rows.state_bytes() == per_table[name] * 4


def test_read_and_write_in_blocks_move_a_store_to_another() -> None:
    source, target = store("adam"), store("adam")
    generator = torch.Generator().manual_seed(0)
    for table in TABLES:
        values = {
            n: torch.randn(v.shape, generator=generator) for n, v in whole(source, table).items()
        }
        source.write(table.name, 0, values)
        for start in range(0, table.rows, 3):
            stop = min(start + 3, table.rows)
            target.write(table.name, start, source.read(table.name, start, stop))
        moved = whole(target, table)
        assert all(torch.equal(moved[name], values[name]) for name in values)


def test_what_is_read_is_a_copy() -> None:
    rows = store()
    values = whole(rows, TABLES[0])
    values["weight"].fill_(99)
    assert float(whole(rows, TABLES[0])["weight"].max()) < 1


def test_a_write_changes_only_what_it_names() -> None:
    rows, before = store(), store()
    rows.write("item", 1, {"sum": torch.full((2, 4), 5.0)})
    for table in TABLES:
        assert torch.equal(whole(rows, table)["weight"], whole(before, table)["weight"])
    assert whole(rows, TABLES[2])["sum"][:, 0].tolist() == [0, 5, 5, 0, 0]
    assert float(whole(rows, TABLES[0])["sum"].sum()) == 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"momentum": torch.zeros(2, 4)}, "'item' has no 'momentum'.*optim.sparse.name=adagrad"),
        ({"sum": torch.zeros(2, 1)}, "'item': 'sum' of shape"),
        ({"weight": torch.zeros(3, 4)}, "'item': rows 3:6 are not within its 5 rows"),
        ({"sum": torch.zeros(2, 4, dtype=torch.float64)}, "float64.*float32.*train.precision"),
    ],
)
def test_a_wrong_write_is_refused_whole(values: dict[str, Tensor], message: str) -> None:
    rows = store()
    with pytest.raises(ValueError, match=message):
        rows.write("item", 3, {"weight": torch.ones(2, 4), **values})
    assert torch.equal(whole(rows, TABLES[2])["weight"], whole(store(), TABLES[2])["weight"])


def test_unknown_tables_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no table 'itme' here"):
        store().read("itme", 0, 1)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
def test_an_update_touches_its_rows_only(name: Any) -> None:
    rows, before = store(name), store(name)
    # The keys of dim 4: user 0 to 9, item 10 to 14. Key 9 is user's last row, 10 item's first.
    keys_K, grads_KD = torch.tensor([2, 9, 11]), torch.ones(3, 4)
    rows.begin_step()
    rows.apply(0, keys_K, grads_KD, lr=0.1)
    for table, touched in ((TABLES[0], [2, 9]), (TABLES[1], []), (TABLES[2], [1])):
        now, then = whole(rows, table), whole(before, table)
        for key in now:
            changed = (now[key] != then[key]).any(dim=1).nonzero().flatten().tolist()
            assert changed == touched, (table.name, key)
    assert torch.equal(rows.gather(0, keys_K)[2], rows.read("item", 1, 2)["weight"][0])


def test_an_update_of_no_rows_is_fine() -> None:
    rows = store("adam")
    rows.begin_step()
    rows.apply(0, torch.empty(0, dtype=torch.int64), torch.empty(0, 4), lr=0.1)
    assert rows.num_steps == 1
    assert float(whole(rows, TABLES[0])["exp_avg"].abs().sum()) == 0
