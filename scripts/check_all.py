"""Runs `dlrm check` over every layout, exchange and optimizer, and every planted fault.

    .venv/bin/python scripts/check_all.py [--ranks 2 3 4] [--steps 12] [--optimizers sgd adam …]

The data are generated: bags of many ids, bag weights, means, a shared table, empty bags, example
weights; the tables' dims differ. `mixed` is one plan with every layout in it. Each number of ranks
is one launch of real processes, in which check follows check. Prints by layout and exchange the
worst difference as a share of what is allowed, then the faults. Exits with 1 where a check fails or
a fault isn't found.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.errors import UserError
from data.parquet import PreparedDataset
from data.prepare import RawInputs, prepare
from data.schema import DenseColumn, RawFormat, Schema, SparseColumn, Split
from dlrm.build import communicator
from dlrm.check import CheckFailed, CheckTask, check_with, prepare_check, verdict
from dlrm.check_pass import PassResult
from dlrm.config import CheckRun, LaunchConfig, to_config
from dlrm.launch import WorkerContext, launch
from dlrm.mutations import MUTATIONS
from dlrm.planning import make_plan

TABLE_DIMS = {"place": 4, "many": 6, "words": 7, "tags": 8, "city": 3, "item": 12}
OPTIMIZERS = {"sgd": 0.3, "adagrad": 0.1, "rowwise_adagrad": 0.1, "adam": 0.02}
LAYOUTS = ("table_wise", "row_wise", "column_wise", "table_row_wise", "replicated", "auto")
MIXED = {
    "place": {"layout": "replicated"},
    "many": {"layout": "row_wise", "exchange": "kv"},
    "words": {"layout": "column_wise", "exchange": "pooled"},
    "tags": {"layout": "table_row_wise", "exchange": "pooled"},
    "city": {"layout": "table_wise", "exchange": "kv"},
    "item": {"layout": "column_wise", "exchange": "kv"},
}
# What a fault needs beside the mixed plan under Adagrad.
NEEDED: dict[str, dict[str, Any]] = {
    "local_row_state": {"optim": {"sparse": {"name": "rowwise_adagrad"}}},
    "decay_twice": {"optim": {"sparse": {"weight_decay": 0.01}}},
    "update_per_micro_batch": {"train": {"accumulate": 2}},
    "clip_local_norm": {"optim": {"clip_norm": 0.05}},
    "ignore_schedule": {"optim": {"schedule": {"warmup_steps": 10}}},
}
# Of faults of tables in host memory: the mode that shows them.
HOST_MODES = {
    "drop_forwarding": "lookahead",
    "drop_forwarded_state": "lookahead",
    "drop_flush": "gather",
    "read_before_write": "lookahead",
    "mean_of_parts": "hotline",
    "update_per_part": "hotline",
}
HOT_MB = 0.006  # A part of these tables' rows.


@dataclass
class Case:
    """One check: its place in the tables, and what every rank gets."""

    row: str
    column: str
    task: CheckTask


def write_data(folder: Path, num_rows: int = 400) -> PreparedDataset:
    """A small prepared dataset with everything that a lookup can meet."""
    rng = np.random.default_rng(0)

    def bag(rows: int, most: int) -> str:
        return "|".join(str(int(rows * u**2)) for u in rng.random(rng.integers(0, most + 1)))

    lines = []
    for _ in range(num_rows):
        words = bag(40, 4)
        factors = "|".join(f"{rng.random():.3f}" for _ in words.split("|")) if words else ""
        fields = [rng.integers(0, 2), f"{rng.uniform(0.2, 3.0):.3f}"]
        fields += [f"{rng.normal():.4f}", f"{rng.normal(0, 3):.4f}"]
        fields += [rng.integers(0, 12), rng.integers(0, 12), bag(30, 5), words, factors]
        fields += [bag(60, 6), rng.integers(0, 5), int(500 * rng.random() ** 3)]
        lines.append("\t".join(str(field) for field in fields))
    raw = folder / "visits.tsv"
    raw.write_text("\n".join(lines) + "\n")
    small: dict[str, Any] = {"token": "int", "vocabulary": "hash", "missing": "empty"}
    bags: dict[str, Any] = {"separator": "|", **small}
    columns = ["label", "weight", "x", "y", "from", "to", "many", "words", "factor", "tags"]
    schema = Schema(
        name="visits",
        format=RawFormat(columns=[*columns, "city", "item"]),
        example_weight="weight",
        dense={"x": DenseColumn("identity"), "y": DenseColumn("identity")},
        sparse={
            "from": SparseColumn(rows=13, table="place", **small),
            "to": SparseColumn(rows=13, table="place", **small),
            "many": SparseColumn(rows=31, pooling="mean", **bags),
            "words": SparseColumn(rows=41, bag_weights="factor", **bags),
            "tags": SparseColumn(rows=61, **bags),
            "city": SparseColumn(rows=6, **small),
            "item": SparseColumn(rows=501, **small),
        },
        split=Split(kind="in_order", valid=0.0, test=0.0),
    )
    prepare(schema, RawInputs([raw]), folder / "prepared")
    return PreparedDataset(folder / "prepared")


def make_case(
    dataset: PreparedDataset,
    row: str,
    column: str,
    world_size: int,
    *overrides: dict[str, Any],
) -> Case:
    """A case from overrides as nested dictionaries, merged from the left."""
    base = {
        "data": {"name": "visits", "cache": "", "batch_size": 40},
        "model": {"embedding_dim": 4, "bottom_mlp": [6], "top_mlp": [5], "table_dims": TABLE_DIMS},
        "launch": {"nproc": world_size, "ranks_per_host": 2 if world_size == 4 else None},
    }
    merged = OmegaConf.merge(OmegaConf.structured(CheckRun), base, *overrides)
    config: CheckRun = to_config(merged)  # type: ignore[arg-type]
    plan = make_plan(config, dataset, world_size).plan
    prepare_check(config, dataset, plan)
    return Case(row, column, CheckTask(config, dataset.root, plan))


def optimizer(name: str) -> dict[str, Any]:
    """The keys of a row optimizer, and a dense one of the same kind."""
    dense = "adagrad" if name == "rowwise_adagrad" else name
    lr = OPTIMIZERS[name]
    return {"optim": {"sparse": {"name": name, "lr": lr}, "dense": {"name": dense, "lr": lr}}}


def layout_cases(dataset: PreparedDataset, world_size: int, options: Any) -> list[Case]:
    """Every layout with both exchanges, and the mixed plan, for every optimizer."""
    plans = {
        f"{layout}, {exchange}": {"layout": layout, "exchange": exchange}
        for layout in LAYOUTS
        for exchange in ("kv", "pooled")
        if layout != "replicated" or exchange == "kv"
    }
    plans["mixed, both"] = {"tables": MIXED}
    return [
        make_case(
            dataset,
            row.replace("replicated, kv", "replicated"),
            name,
            world_size,
            {"check": {"steps": options.steps}, "sharding": sharding},
            optimizer(name),
        )
        for row, sharding in plans.items()
        for name in options.optimizers
    ]


def fault_cases(dataset: PreparedDataset, world_size: int, options: Any) -> list[Case]:
    """Every planted fault, on the mixed plan, or on rows in host memory where it is of these."""
    return [
        make_case(
            dataset,
            name,
            "",
            world_size,
            {"check": {"steps": 6, "mutate": name}, "sharding": _sharding_of_fault(name)},
            optimizer("adagrad"),
            NEEDED.get(name, {}),
        )
        for name in MUTATIONS
    ]


def _sharding_of_fault(name: str) -> dict[str, Any]:
    if name not in HOST_MODES:
        return {"tables": MIXED}
    host = {"mode": HOST_MODES[name], "lookahead": 2, "hot_mb": HOT_MB, "whole_rows": 0}
    return {"layout": "row_wise", "memory": "host", "host": host}


def check_each(context: WorkerContext, tasks: list[CheckTask]) -> list[list[PassResult]]:
    """One rank of all checks of a launch."""
    comm = communicator(context, tasks[0].config.launch)
    warnings.simplefilter("ignore")
    return [check_with(comm, task, context.heartbeat.beat) for task in tasks]


def told(case: Case, passes: list[PassResult]) -> tuple[bool, str]:
    """Whether all is well, and a cell of the table."""
    is_fault = case.task.config.check.mutate is not None
    try:
        verdict(case.task.config, passes)
    except CheckFailed as error:
        if not is_fault:
            print(f"{case.row}, {case.column}: {error}", flush=True)
            return False, "FAIL"
        caught = [p.precision for p in passes if p.differences.beyond()]
        return True, " ".join(caught)
    except UserError as error:
        print(f"{case.row}: {error}", flush=True)
        return False, "NOT FOUND"
    share = max(result.differences.worst_share() for result in passes)
    return True, f"{share:.2f}"


def show(
    title: str, cells: dict[tuple[str, str], str], rows: list[str], columns: list[str]
) -> None:
    """Prints a table."""
    grid = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for head in ("", *columns):
        grid.add_column(head, no_wrap=True)
    for row in rows:
        grid.add_row(row, *(cells.get((row, column), "") for column in columns))
    Console(width=100).print(grid)


def main() -> None:
    """Runs everything."""
    import check_all  # Workers import the entry by this name, not from __main__.

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument(
        "--optimizers", nargs="+", default=list(OPTIMIZERS), choices=list(OPTIMIZERS)
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    is_well = True
    layouts: dict[tuple[str, str], str] = {}
    faults: dict[tuple[str, str], str] = {}
    with tempfile.TemporaryDirectory() as name:
        dataset = write_data(Path(name))
        for world_size in options.ranks:
            start = time.perf_counter()
            cases = layout_cases(dataset, world_size, options)
            cases += fault_cases(dataset, world_size, options)
            tasks = [case.task for case in cases]
            config = LaunchConfig(nproc=world_size, num_threads=1)
            results = launch(check_all.check_each, (tasks,), config, Path(name))
            for case, passes in zip(cases, results, strict=True):
                good, cell = told(case, passes)
                is_well = is_well and good
                column = f"{world_size} {case.column}".strip()
                (faults if case.task.config.check.mutate else layouts)[case.row, column] = cell
            seconds = time.perf_counter() - start
            print(f"{world_size} ranks: {len(cases)} checks in {seconds:.0f} s", flush=True)
    rows = list(dict.fromkeys(row for row, _ in layouts))
    for ranks in options.ranks:
        title = f"{ranks} ranks: worst difference, as a share of what is allowed"
        show(title, layouts, rows, [f"{ranks} {name}" for name in options.optimizers])
        print()
    show(
        "planted faults: the passes that find them",
        faults,
        list(MUTATIONS),
        [str(ranks) for ranks in options.ranks],
    )
    print("PASS" if is_well else "FAIL")
    sys.exit(0 if is_well else 1)


if __name__ == "__main__":
    main()
