"""Tables' memory: filled by all threads with beats, not filled before a load, and refused in one
line where there isn't enough."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from data.errors import UserError
from data.parquet import PreparedDataset
from dlrm.config import TrainRun
from dlrm.planning import check_tables_fit, make_plan
from embeddings import store as store_module
from embeddings.row_memory import TablesDontFit
from embeddings.row_optim import RowOptimizerConfig
from embeddings.store import RowStore
from embeddings.table import TableConfig, fill_uniform
from embeddings.table_group import Piece, TableGroup
from tests.commands import compose_config, dlrm, read_result, tiny, without_plots

FP32 = torch.float32


@pytest.fixture
def set_threads() -> Iterator[Any]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def store_of(piece: Piece, table: TableConfig, **more: Any) -> RowStore:
    group = TableGroup((piece,), piece.dim, FP32, "adagrad")
    return RowStore([table], [group], RowOptimizerConfig(name="adagrad"), seed=3, **more)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_f39_start_values_are_the_same_by_any_number_of_threads(
    num_threads: int, set_threads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a piece with columns apart, in blocks whose borders fall anywhere."""
    table = TableConfig("t", 5000, 7)
    expected = torch.empty(5000, 7)
    fill_uniform(
        expected, seed=3, table_name="t", row_start=0, col_start=0, dim=7, bound=5000**-0.5
    )
    set_threads(num_threads)
    monkeypatch.setattr(store_module, "_FILL_ELEMENTS", 4 * 1111)
    beats: list[None] = []
    piece = Piece("t", 0, 100, 4900, ((0, 1), (3, 6)))
    store = store_of(piece, table, beat=lambda: beats.append(None))
    assert torch.equal(store.weights(0), expected[100:4900][:, [0, 3, 4, 5]])
    assert len(beats) == 5  # Every 1,111 of 4,800 rows.


def test_f39_tables_that_are_to_be_loaded_are_not_filled(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither by evaluate nor by a resumed run, which gives the same model nonetheless."""
    monkeypatch.chdir(tmp_path)
    without_plots(monkeypatch)
    arguments = [*tiny(tmp_path_factory), "train.checkpoint_every=8"]
    assert dlrm("train", *arguments, "hydra.run.dir=whole") == 0
    assert dlrm("train", *arguments, "train.max_steps=8", "hydra.run.dir=half") == 0

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("filled, and then loaded")

    monkeypatch.setattr(store_module, "fill_uniform", refuse)
    resumed = ["train.resume=half/checkpoints/step-000008", "hydra.run.dir=resumed"]
    assert dlrm("train", *arguments, *resumed) == 0
    assert (
        read_result(tmp_path / "resumed")["model_digest"]
        == (read_result(tmp_path / "whole")["model_digest"])
    )
    assert dlrm("evaluate", "run=whole", "hydra.run.dir=scored") == 0


@pytest.mark.parametrize("rows", [2**40, 2**50, 2**56])
def test_f40_a_table_that_can_t_be_had_is_named(rows: int) -> None:
    """Whatever the system says: no memory, too large a number, or nothing of a size."""
    piece = Piece("clicks", 0, 0, rows, ((0, 64),))
    with pytest.raises(TablesDontFit, match=r"table clicks: [\d,.]+ GiB .* model.embedding_dim"):
        store_of(piece, TableConfig("clicks", rows, 64), fill=False)


@pytest.mark.parametrize("verb", ["train", "evaluate"])
def test_f40_f53_tables_beyond_memory_are_refused_before_they_are_filled(
    verb: str,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Else the system ends the process, some way into filling them."""
    monkeypatch.chdir(tmp_path)
    without_plots(monkeypatch)
    arguments = ["train", *tiny(tmp_path_factory)]
    if verb == "evaluate":
        assert dlrm(*arguments, "train.max_steps=1", "hydra.run.dir=run") == 0
        arguments = ["evaluate", "run=run"]
    monkeypatch.setattr("dlrm.planning.available_bytes", lambda: 1000)
    capfd.readouterr()
    assert dlrm(*arguments, "hydra.run.dir=small") == 2
    err = capfd.readouterr().err
    assert err.startswith("dlrm: tables C")
    assert "GiB are free" in err
    assert "model.embedding_dim" in err
    assert err.count("\n") == 1


def test_f40_ranks_of_other_hosts_count_there(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = tiny(tmp_path_factory)
    assert dlrm("prepare", *(text for text in arguments if text.startswith("data."))) == 0
    config: TrainRun = compose_config("train", *arguments, "sharding=row_wise")
    root = next(t for t in arguments if t.startswith("data.root=")).removeprefix("data.root=")
    dataset = PreparedDataset(Path(root))
    plan = make_plan(config, dataset, 2).plan
    num_bytes = 4 * config.model.embedding_dim * sum(dataset.manifest.table_rows.values())
    monkeypatch.setattr("dlrm.planning.available_bytes", lambda: num_bytes * 3 // 4)
    check_tables_fit(config, dataset, plan, ranks_here=1)
    with pytest.raises(UserError, match="GiB are free"):
        check_tables_fit(config, dataset, plan, ranks_here=2)
