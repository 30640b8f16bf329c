"""`dlrm bench train`: training steps of all sides, in turns."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

from data.errors import UserError
from data.parquet import PreparedDataset
from dlrm.bench.batches import check_batches
from dlrm.bench.comparison import BYTES_SENT, Figure, Turns, Variant, Yardstick
from dlrm.bench.measure import SideTask, measure_rank
from dlrm.bench.roofline import bench_roofline
from dlrm.bench.sides import (
    FLOOR,
    OWN,
    TORCHREC,
    check_data,
    check_memory,
    check_sides,
    default_sides,
)
from dlrm.bench.turns import Bench, Session, measure_network, take_turns
from dlrm.build import build_tables
from dlrm.config import BenchRun
from dlrm.datasets import open_dataset
from dlrm.display import PrepareDisplay
from dlrm.planning import load_table_stats, make_plan
from embeddings.plan import Plan

READS = {
    "data": True,
    "data.shuffle": False,
    "data.eval_batch_size": False,
    "model": True,
    "optim": True,
    "sharding": True,
    "train": True,
    "train.epochs": False,
    "train.max_steps": False,
    "train.eval_every": False,
    "train.evals_per_epoch": False,
    "train.checkpoint_every": False,
    "train.log_every": False,
    "train.profile": False,
    "train.profile_steps": False,
    "train.profile_start": False,
    "bench": True,
    "bench.rows": False,
    "bench.peer_rows": False,
    "bench.pooled_tolerance": False,
}
"""See `warn_of_ignored`: bench.steps, bench.warmup_steps and bench.eval_samples say what is run."""

BF16_FACTOR = 3
"""Log losses of a variant in bf16 may lie so many times as far from those in fp32."""

STEP_MS = Figure("step_ms_p50", "step_ms", "step ms")


def bench_train(session: Session) -> list[str]:
    """Measures, prints the table and adds it to the result; returns what makes the benchmark fail.

    Raises:
        UserError: for what can't be compared; nothing has been measured then.
    """
    config, bench = session.config, session.config.bench
    variants = _variants(config)
    sides = list(dict.fromkeys(variant.side for variant in variants))
    check_sides(config, sides)
    dataset = open_for_steps(session, "train", "valid")
    check_data(dataset.manifest, sides)
    check_memory(config, sides, build_tables(config, dataset.manifest)[0])
    plan = plan_of(config, dataset)
    session.result["plan_digest"] = plan.digest()
    session.folder.write_text("plan.json", plan.to_json())

    def task(variant: Variant) -> SideTask:
        own = replace(config, train=replace(config.train, precision=variant.precision))
        return SideTask(own, dataset.root, plan, variant.side)

    turns = Bench(
        variants,
        lambda variant, _: (measure_rank, (task(variant),)),
        train_yardstick(config.launch.nproc, bench.logloss_tolerance),
        _describe(config, dataset) | measure_network(session),
    )
    problems = take_turns(turns, session)
    if bench.roofline:
        bench_roofline(session, dataset.root, plan)
    return problems


def open_for_steps(session: Session, *parts: str) -> PreparedDataset:
    """The data of a benchmark that takes steps; result.json names them.

    Raises:
        UserError: where a part has no full batch.
    """
    config = session.config
    with PrepareDisplay() as display:
        dataset = open_dataset(config.data, Path.cwd(), display)
    for part in parts:
        dataset.check(part)
        check_batches(
            dataset, part, batch_size=config.data.batch_size, bag_size=config.bench.bag_size
        )
    session.result["data"] = {"name": config.data.name, "digest": dataset.manifest.digest()}
    return dataset


def plan_of(config: BenchRun, dataset: PreparedDataset) -> Plan:
    """This system's plan, made for the bags that are measured."""
    stats = load_table_stats(dataset) if config.launch.nproc > 1 else {}
    longer = {
        name: replace(found, lookups_per_sample=found.lookups_per_sample * config.bench.bag_size)
        for name, found in stats.items()
    }
    return make_plan(config, dataset, config.launch.nproc, stats=longer).plan


def describe_steps(config: BenchRun) -> dict[str, str]:
    """What a benchmark that takes steps tells of its conditions."""
    bench = config.bench
    return {
        "bench": f"{config.kind}, {config.launch.nproc} process(es), global batch "
        f"{config.data.batch_size:,}, {bench.bag_size} id(s) per bag, {bench.network}",
        "steps": f"{bench.warmup_steps} to warm up, {bench.steps} measured, {config.num_turns} "
        "turns; batches are in memory: the loader isn't measured",
    }


def train_yardstick(world_size: int, logloss_tolerance: float) -> Yardstick:
    """Step times; whether all sides have trained the same model, by their log losses.

    Args:
        world_size: number of ranks; one sends nothing.
        logloss_tolerance: how far the log losses of one turn may lie apart, in fp32.
    """
    columns = [
        Figure("logloss", "logloss", "log loss", 5),
        Figure("logloss_start", "logloss_start", None, 5),
        replace(BYTES_SENT, header=BYTES_SENT.header if world_size > 1 else None),
    ]
    return Yardstick(
        STEP_MS,
        is_rate=False,
        columns=columns,
        own=(OWN,),
        torchrec=TORCHREC,
        floors=(FLOOR,),
        disagreements=lambda turns: _disagreements(turns, logloss_tolerance),
        notes=lambda turns: _notes(turns, logloss_tolerance),
    )


def _variants(config: BenchRun) -> list[Variant]:
    sides = config.bench.sides or default_sides(config.launch.nproc)
    precisions = config.bench.precisions or [config.train.precision]
    if config.train.precision == "fp64" or "fp64" in precisions:
        raise UserError("train.precision=fp64: only fp32 and bf16 are compared")
    return [Variant(side, precision) for precision in precisions for side in sides]


def _describe(config: BenchRun, dataset: PreparedDataset) -> dict[str, str]:
    model, num_dense = config.model, len(dataset.manifest.dense_columns)
    rows = sum(dataset.manifest.table_rows.values())
    widths = [num_dense, *model.bottom_mlp, model.embedding_dim]
    steps = describe_steps(config)
    return {
        "bench": steps["bench"],
        "model": f"{_dashes(widths)}, {len(dataset.manifest.table_rows)} tables with {rows:,} "
        f"rows, {_dashes([*model.top_mlp, 1])}; "
        f"{config.optim.sparse.name}, lr {config.optim.sparse.lr:g}, dense "
        f"{config.optim.dense.name}, lr {config.optim.dense.lr:g}",
        "steps": steps["steps"],
    }


def _dashes(widths: list[int]) -> str:
    return "-".join(str(width) for width in widths)


def _disagreements(turns: Turns, tolerance: float) -> list[str]:
    """Log losses too far from those of the first variant that has any, which is ours by default."""
    with_model = {
        variant: found
        for variant, found in turns.items()
        if found and all(m.figures["logloss"] is not None for m in found)
    }
    if not with_model:
        return []
    first, *others = with_model
    problems = []
    for variant in others:
        allowed = tolerance * (BF16_FACTOR if "bf16" in (variant.precision, first.precision) else 1)
        for key, when in (("logloss_start", "before training"), ("logloss", "after training")):
            pairs = zip(with_model[variant], with_model[first], strict=True)
            apart = [abs(float(a.figures[key]) - float(b.figures[key])) for a, b in pairs]
            if not all(distance <= allowed for distance in apart):  # NaN is beyond every limit.
                problems.append(
                    f"{variant.name} is another model than {first.name} {when}: their log losses "
                    f"are {max(apart):.5f} apart, allowed are {allowed:g} (bench.logloss_tolerance)"
                )
                break
    return problems


def _notes(turns: Turns, tolerance: float) -> list[str]:
    known = next((f for f in turns.values() if f and f[0].figures["logloss"] is not None), None)
    if known is None:
        return []
    start = float(known[0].figures["logloss_start"])
    lines = [
        f"log loss: before training {start:.5f}; all sides within {tolerance:g} of each other "
        f"(bf16: {BF16_FACTOR} times that), or it is an error"
    ]
    lines += [
        f"{variant.name}: {found[0].figures['note']}"
        for variant, found in turns.items()
        if found and found[0].figures.get("note")
    ]
    end = statistics.median(float(m.figures["logloss"]) for m in known)
    if abs(end - start) < 10 * tolerance:
        lines.append(
            "note: training has hardly moved the log loss, so that it agrees says little; "
            "raise bench.steps"
        )
    return lines
