"""`dlrm bench exchange`: the tables alone, of all sides, in turns."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from data.errors import UserError
from data.parquet import PreparedDataset
from dlrm.bench.comparison import BYTES_SENT, Figure, Measurement, Turns, Variant, Yardstick
from dlrm.bench.exchange_steps import ExchangeTask, measure_exchange
from dlrm.bench.sides import (
    ALL_TO_ALL_FLOOR,
    EMBEDDING_BAG,
    OWN,
    TORCHREC,
    check_data,
    check_memory,
    check_names,
    check_row_updates,
)
from dlrm.bench.train_bench import STEP_MS, describe_steps, open_for_steps, plan_of
from dlrm.bench.turns import Bench, Session, Work, measure_network, take_turns
from dlrm.build import build_tables
from dlrm.config import BenchRun
from dlrm.sharding import FILE_LAYOUT

READS = {
    "data": True,
    "data.shuffle": False,
    "data.eval_batch_size": False,
    "model": False,
    "model.embedding_dim": True,
    "model.table_dims": True,
    "optim": True,
    "optim.dense": False,
    "optim.schedule": False,
    "optim.clip_norm": False,
    "sharding": True,
    "train.backend": True,
    "bench.steps": True,
    "bench.warmup_steps": True,
    "bench.bag_size": True,
    "bench.pooled_tolerance": True,
}
"""See `warn_of_ignored`."""

OF_EXCHANGE = {f"{OWN}_{exchange}": exchange for exchange in ("auto", "kv", "pooled")}
"""Sides that are this system, with the exchange of each; `dlrm`: as the configuration says."""
OWN_SIDES = (OWN, *OF_EXCHANGE)
_TORCHREC = tuple(side for side in TORCHREC if not side.endswith("pipelined"))
SIDES = (*OWN_SIDES, *_TORCHREC, EMBEDDING_BAG, ALL_TO_ALL_FLOOR)
_ALL_TO_ALL_KINDS = ("counts", "ids", "rows", "grads")


def bench_exchange(session: Session) -> list[str]:
    """Measures, prints the table and adds it to the result; returns what makes the benchmark fail.

    Raises:
        UserError: for what can't be compared; nothing has been measured then.
    """
    # In fp32, one update per step: autocast, accumulation and clipping are the dense network's.
    config = replace(
        session.config,
        train=replace(session.config.train, precision="fp32", accumulate=1),
        optim=replace(session.config.optim, clip_norm=None),
    )
    sides = config.bench.sides or default_sides(config)
    _check_sides(config, sides)
    dataset = open_for_steps(session, "train", "valid")
    check_data(dataset.manifest, sides)
    tables, _ = build_tables(config, dataset.manifest)
    check_memory(config, sides, tables)
    configs = {side: _config_of(config, side) for side in sides}
    plans = {side: plan_of(configs[side], dataset) for side in sides if side in OWN_SIDES}
    session.result["plan_digest"] = {side: plan.digest() for side, plan in plans.items()}
    for side, plan in plans.items():
        name = "plan.json" if len(plans) == 1 else f"plan.{side}.json"
        session.folder.write_text(name, plan.to_json())
    with tempfile.TemporaryDirectory(prefix="dlrm-bench-") as folder:

        def work(variant: Variant, measurements: Sequence[Measurement]) -> Work:
            side = variant.side
            task = ExchangeTask(configs[side], dataset.root, plans.get(side), side, Path(folder))
            if side == ALL_TO_ALL_FLOOR:
                task = replace(task, sent_bytes=_bytes_to_send(sides, measurements))
            return measure_exchange, (task,)

        turns = Bench(
            [Variant(side, "") for side in sides],
            work,
            exchange_yardstick(config.launch.nproc, config.bench.pooled_tolerance),
            _describe(config, dataset) | measure_network(session),
        )
        return take_turns(turns, session)


def default_sides(config: BenchRun) -> list[str]:
    """All, where each means something of its own."""
    if config.launch.nproc == 1:
        return [OWN, _TORCHREC[0], EMBEDDING_BAG]
    is_chosen = config.sharding.layout == FILE_LAYOUT or config.sharding.exchange != "auto"
    own = [OWN] if is_chosen else list(OF_EXCHANGE)
    return [*own, *_TORCHREC, ALL_TO_ALL_FLOOR]


def exchange_yardstick(world_size: int, tolerance: float) -> Yardstick:
    """Step times; whether all sides' rows are the same after them, by their pooled vectors."""
    columns = [
        Figure("pooled_difference", "pooled_difference", "max |Δ|", 5),
        Figure("pooled_start_difference", "pooled_start_difference", None),
        Figure("pooled_moved", "pooled_moved", None),
        replace(BYTES_SENT, header=BYTES_SENT.header if world_size > 1 else None),
    ]
    return Yardstick(
        STEP_MS,
        is_rate=False,
        columns=columns,
        own=OWN_SIDES,
        torchrec=_TORCHREC,
        floors=(ALL_TO_ALL_FLOOR,),
        disagreements=lambda turns: _disagreements(turns, tolerance),
        notes=lambda turns: _notes(turns, tolerance),
    )


def _check_sides(config: BenchRun, sides: Sequence[str]) -> None:
    check_names(sides, SIDES)
    num_ranks, sharding = config.launch.nproc, config.sharding
    alone = [side for side in sides if side in (*OF_EXCHANGE, ALL_TO_ALL_FLOOR)]
    if num_ranks == 1 and alone:
        raise UserError(
            f"bench.sides: {alone[0]} has no meaning in one process, which sends nothing; set "
            f"launch.nproc=2, or name {OWN}"
        )
    if num_ranks > 1 and EMBEDDING_BAG in sides:
        raise UserError(
            f"bench.sides: {EMBEDDING_BAG} sends nothing and is measured in one process; leave it "
            "out, or set launch.nproc=1"
        )
    fixed = [side for side in sides if side in OF_EXCHANGE]
    if fixed and sharding.layout == FILE_LAYOUT:
        raise UserError(
            f"bench.sides: with sharding=file the plan says the exchange; name {OWN} instead of "
            f"{fixed[0]}"
        )
    if ALL_TO_ALL_FLOOR in sides and not any(
        side in OWN_SIDES for side in sides[: sides.index(ALL_TO_ALL_FLOOR)]
    ):
        raise UserError(
            f"bench.sides: {ALL_TO_ALL_FLOOR} sends as many bytes as this system's first side; "
            f"name one before it, such as {OWN}"
        )
    if sharding.wire != "fp32":
        raise UserError(
            f"sharding.wire={sharding.wire}: rounds by more than what the sides may differ by; set "
            "sharding.wire=fp32 (`dlrm bench train` compares with it)"
        )
    check_row_updates(config, sides)


def _config_of(config: BenchRun, side: str) -> BenchRun:
    exchange = OF_EXCHANGE.get(side)
    if exchange is None:
        return config
    return replace(config, sharding=replace(config.sharding, exchange=exchange))


def _bytes_to_send(sides: Sequence[str], measurements: Sequence[Measurement]) -> dict[str, float]:
    """What this system's first side has sent in the latest turn by all-to-all, by kind."""
    first = next(side for side in sides if side in OWN_SIDES)
    found = [m for m in measurements if m.variant.side == first and m.failure is None]
    if not found:
        raise UserError(f"{first} failed, whose bytes it is to send")
    sent: dict[str, float] = found[-1].figures["sent_bytes"]
    return {kind: sent[kind] for kind in _ALL_TO_ALL_KINDS if sent[kind] > 0}


def _describe(config: BenchRun, dataset: PreparedDataset) -> dict[str, str]:
    steps, sparse = describe_steps(config), config.optim.sparse
    rows = sum(dataset.manifest.table_rows.values())
    return {
        "bench": steps["bench"],
        "model": f"{len(dataset.manifest.table_rows)} tables with {rows:,} rows, dim "
        f"{config.model.embedding_dim}; {sparse.name}, lr {sparse.lr:g}; no dense network: the "
        "gradient is given",
        "steps": steps["steps"],
    }


def _with_tables(turns: Turns) -> dict[Variant, Sequence[Measurement]]:
    return {v: found for v, found in turns.items() if found and _has_tables(found)}


def _has_tables(found: Sequence[Measurement]) -> bool:
    return all("pooled_difference" in m.figures for m in found)


def _disagreements(turns: Turns, tolerance: float) -> list[str]:
    """Pooled vectors too far from those of the first side."""
    problems = []
    known = _with_tables(turns)
    first = next(iter(known), None)
    for variant, found in known.items():
        for key, when in (
            ("pooled_start_difference", "before the steps"),
            ("pooled_difference", "after the steps"),
        ):
            apart = max(float(m.figures[key]) for m in found)
            if apart > tolerance:
                assert first is not None
                problems.append(
                    f"{variant.name} has other rows than {first.name} {when}: their pooled vectors "
                    f"are up to {apart:.1e} apart, allowed are {tolerance:g} "
                    "(bench.pooled_tolerance)"
                )
                break
    return problems


def _notes(turns: Turns, tolerance: float) -> list[str]:
    known = _with_tables(turns)
    if not known:
        return []
    first, found = next(iter(known.items()))
    moved = max(float(m.figures["pooled_moved"]) for m in found)
    lines = [
        f"max |Δ|: pooled vectors of held-out batches after all steps, against {first.name}'s of "
        f"the first turn, on any rank; more than {tolerance:g} is an error. The steps moved them "
        f"by up to {moved:.2g}"
    ]
    if moved < 10 * tolerance:
        lines.append(
            "note: the steps have hardly moved the rows, so that they agree says little; raise "
            "bench.steps or optim.sparse.lr"
        )
    for variant, measured in turns.items():
        sent = _mean_bytes(measured)
        if sent:
            kinds = ", ".join(f"{kind} {num / 1e6:.3g}" for kind, num in sent.items())
            lines.append(f"{variant.name} sends, MB per step and rank: {kinds}")
        if variant.side == ALL_TO_ALL_FLOOR and measured:
            lines.append(f"{variant.name}: {measured[0].figures['note']}")
    return lines


def _mean_bytes(measured: Sequence[Measurement]) -> dict[str, Any]:
    """By kind, of the kinds that were sent."""
    of_turns = [m.figures.get("sent_bytes", {}) for m in measured]
    if not of_turns:
        return {}
    return {
        kind: statistics.fmean(sent[kind] for sent in of_turns)
        for kind, num in of_turns[0].items()
        if num
    }
