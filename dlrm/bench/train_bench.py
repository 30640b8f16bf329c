"""`dlrm bench train`: training steps of all sides, in turns."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from data.errors import UserError
from data.parquet import PreparedDataset
from dlrm.bench.batches import check_batches
from dlrm.bench.comparison import Comparison, Measurement, Variant, compare
from dlrm.bench.measure import SideTask, measure_rank
from dlrm.bench.sides import check_data, check_memory, check_sides, default_sides
from dlrm.bench.table import print_comparison
from dlrm.blame import WorkersFailed
from dlrm.build import build_tables
from dlrm.config import BenchRun, DataConfig, TrainConfig
from dlrm.datasets import open_dataset
from dlrm.display import PrepareDisplay
from dlrm.launch import launch
from dlrm.planning import load_table_stats, make_plan
from dlrm.run_folder import RunFolder
from embeddings.plan import Plan

MEASUREMENTS = "measurements.jsonl"
"""A line for each measurement, as soon as it is taken."""


def bench_train(
    config: BenchRun, folder: RunFolder, result: dict[str, Any], say: Callable[[str], None]
) -> list[str]:
    """Measures, prints the table and adds it to `result`; returns what makes the benchmark fail.

    Raises:
        UserError: for what can't be compared; nothing has been measured then.
    """
    bench = config.bench
    _warn_of_ignored(config)
    variants = _variants(config)
    sides = list(dict.fromkeys(variant.side for variant in variants))
    check_sides(config, sides)
    with PrepareDisplay() as display:
        dataset = open_dataset(config.data, Path.cwd(), display)
    for part in ("train", "valid"):
        dataset.check(part)
        check_batches(dataset, part, batch_size=config.data.batch_size, bag_size=bench.bag_size)
    check_data(dataset.manifest, sides)
    check_memory(config, sides, build_tables(config, dataset.manifest)[0])
    plan = plan_of(config, dataset)
    result["plan_digest"] = plan.digest()
    result["data"] = {"name": config.data.name, "digest": dataset.manifest.digest()}
    folder.write_text("plan.json", plan.to_json())
    result["description"] = _describe(config, dataset)
    say("\n".join(f"{name:<8}{text}" for name, text in result["description"].items()))
    measurements: list[Measurement] = []
    num_all = bench.repeats * len(variants)
    for repeat in range(bench.repeats):
        for variant in variants:
            if any(m.variant == variant and m.failure is not None for m in measurements):
                continue
            found = _measure(config, variant, repeat, dataset.root, plan, folder)
            measurements.append(found)
            _append(folder, found)
            say(f"[{len(measurements)}/{num_all}] {_describe_measurement(found)}")
    comparison = compare(
        variants,
        measurements,
        world_size=config.launch.nproc,
        logloss_tolerance=bench.logloss_tolerance,
    )
    threads = (m.figures["num_threads"] for m in measurements if m.figures)
    result["num_threads"] = next(threads, None)
    result["comparison"] = comparison.as_dict()
    print_comparison(comparison)
    return comparison.problems


def plan_of(config: BenchRun, dataset: PreparedDataset) -> Plan:
    """This system's plan, made for the bags that are measured."""
    stats = load_table_stats(dataset) if config.launch.nproc > 1 else {}
    longer = {
        name: replace(found, lookups_per_sample=found.lookups_per_sample * config.bench.bag_size)
        for name, found in stats.items()
    }
    return make_plan(config, dataset, config.launch.nproc, stats=longer).plan


def _warn_of_ignored(config: BenchRun) -> None:
    """Warns of keys of `dlrm train` that have no meaning here, where they were changed: conf/ gives
    them the values of their classes."""
    names = "epochs", "max_steps", "eval_every", "evals_per_epoch", "checkpoint_every", "log_every"
    ignored = [f"train.{n}" for n in names if getattr(config.train, n) != getattr(TrainConfig, n)]
    ignored += [
        f"data.{n}"
        for n in ("shuffle", "eval_batch_size")
        if getattr(config.data, n) != getattr(DataConfig, n)
    ]
    if ignored:
        warnings.warn(
            f"`dlrm bench` takes no notice of {', '.join(ignored)}: bench.steps, "
            "bench.warmup_steps and bench.eval_samples say what is run, on shuffled data",
            stacklevel=2,
        )


def _variants(config: BenchRun) -> list[Variant]:
    sides = config.bench.sides or default_sides(config.launch.nproc)
    precisions = config.bench.precisions or [config.train.precision]
    if config.train.precision == "fp64" or "fp64" in precisions:
        raise UserError("train.precision=fp64: only fp32 and bf16 are compared")
    return [Variant(side, precision) for precision in precisions for side in sides]


def _measure(
    config: BenchRun,
    variant: Variant,
    repeat: int,
    dataset_root: Path,
    plan: Plan,
    folder: RunFolder,
) -> Measurement:
    own = replace(config, train=replace(config.train, precision=variant.precision))
    task = SideTask(own, dataset_root, plan, variant.side)
    started_s = time.perf_counter()
    try:
        figures = launch(measure_rank, (task,), config.launch, folder.path)
    except (WorkersFailed, UserError) as error:
        return Measurement(variant, repeat, failure=str(error))
    figures["whole_s"] = round(time.perf_counter() - started_s, 1)
    return Measurement(variant, repeat, figures)


def _append(folder: RunFolder, found: Measurement) -> None:
    line = {
        "side": found.variant.side,
        "precision": found.variant.precision,
        "repeat": found.repeat,
        **found.figures,
        "failure": found.failure,
    }
    with open(folder.path / MEASUREMENTS, "a") as opened:
        opened.write(json.dumps(line) + "\n")


def _describe(config: BenchRun, dataset: PreparedDataset) -> dict[str, str]:
    bench, model = config.bench, config.model
    rows = sum(dataset.manifest.table_rows.values())
    widths = "-".join(
        str(width)
        for width in (
            len(dataset.manifest.dense_columns),
            *model.bottom_mlp,
            model.embedding_dim,
        )
    )
    top = "-".join(str(width) for width in (*model.top_mlp, 1))
    return {
        "bench": f"{config.launch.nproc} process(es), global batch {config.data.batch_size:,}, "
        f"{bench.bag_size} id(s) per bag, {bench.network}",
        "model": f"{widths}, {len(dataset.manifest.table_rows)} tables with {rows:,} rows, {top}; "
        f"{config.optim.sparse.name}, lr {config.optim.sparse.lr:g}, dense "
        f"{config.optim.dense.name}, lr {config.optim.dense.lr:g}",
        "steps": f"{bench.warmup_steps} to warm up, {bench.steps} measured, {bench.repeats} turns; "
        "batches are in memory: the loader isn't measured",
    }


def _describe_measurement(found: Measurement) -> str:
    if found.failure is not None:
        return f"{found.variant.name} FAILED: {found.failure}"
    figures = found.figures
    loss = "" if figures["logloss"] is None else f", log loss {figures['logloss']:.5f}"
    return (
        f"{found.variant.name}: {figures['step_ms_p50']:.1f} ms{loss}  ({figures['whole_s']:.0f} s)"
    )


__all__ = ["Comparison", "bench_train", "plan_of"]
