"""`dlrm bench checkpoint`: tables saved and loaded by all sides in turns, and a storm of kills."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from data.errors import UserError
from dlrm.bench.checkpoint_sides import (
    ASYNC_SAVE,
    COLD_LOAD,
    COPYING_SIDES,
    DCP_SAFETENSORS,
    OPERATIONS,
    PLAIN,
    SAVE,
    SIDES,
    WARM_LOAD,
    CheckpointTask,
    bench_features,
    bench_tables,
    measure_checkpoint,
)
from dlrm.bench.comparison import Figure, Turns, Variant, Yardstick
from dlrm.bench.goals import Goal, said
from dlrm.bench.ratios import Spread, ratios
from dlrm.bench.sides import OWN, check_names
from dlrm.bench.storm import run_storm
from dlrm.bench.turns import Bench, Session, take_turns
from dlrm.config import BenchRun
from dlrm.sharding import FILE_LAYOUT
from embeddings.machine import available_bytes
from embeddings.plan import Plan
from embeddings.plan_builders import build_plan

READS = {
    "model": False,
    "model.embedding_dim": True,
    "optim.sparse.name": True,
    "sharding": True,
    "bench.table_mib": True,
    "bench.storm_kills": True,
}
"""See `warn_of_ignored`."""

GOALS = {SAVE: 0.7, COLD_LOAD: 0.7, WARM_LOAD: 0.4, ASYNC_SAVE: 0.8}
"""Speed of this system over that of the plain write, read or copy, at least."""
EXTRA_SHARE = 0.1
STRETCH_BYTES = 8 << 20
"""Extra memory of a rank: at most that share of its tables, and one stretch."""
_MOST_CACHED_SHARE = 0.01
_MIB = 2**-20


def bench_checkpoint(session: Session) -> list[str]:
    """Measures, prints the table, kills and resumes a tiny run, and adds all to the result; returns
    what makes the benchmark fail. Goals of speed that are missed don't.

    Raises:
        UserError: for what can't be compared; nothing has been measured then.
    """
    config = session.config
    sides = _chosen_sides(config)
    _check_room(config, session.folder.path, sides)
    plan = _make_plan(config)
    session.result["plan_digest"] = plan.digest()
    session.folder.write_text("plan.json", plan.to_json())
    # One folder for all: which blocks of the disk its files get depends on the folder, and on a
    # virtual disk some are several times as fast as others.
    scratch = session.folder.path / "saved"
    found: list[Turns] = []

    def work(variant: Variant) -> CheckpointTask:
        return CheckpointTask(config, plan, variant.side, variant.precision, scratch)

    turns = Bench(
        [
            Variant(side, operation)
            for operation in OPERATIONS
            for side in sides
            if operation != ASYNC_SAVE or side in COPYING_SIDES
        ],
        lambda variant, _: (measure_checkpoint, (work(variant),)),
        checkpoint_yardstick(found.append),
        _describe(config, plan),
        rotates=True,
    )
    try:
        problems = take_turns(turns, session)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    goals = reached_goals(found[0])
    session.result["goals"] = [asdict(goal) for goal in goals]
    for goal in goals:
        session.say(goal.text)
    if config.bench.storm_kills:
        problems += _storm(session)
    return problems


def checkpoint_yardstick(keep_turns: Callable[[Turns], None] = lambda turns: None) -> Yardstick:
    """Bytes of rows and state per second; whether what is loaded is what was saved.

    Args:
        keep_turns: gets the measurements when they are compared.
    """

    def notes(turns: Turns) -> list[str]:
        keep_turns(turns)
        return _notes(turns)

    return Yardstick(
        Figure("bytes_per_s", "bytes_per_s", "MB/s", 0, 1e-6),
        is_rate=True,
        columns=[
            Figure("seconds", "seconds", "s", 2),
            Figure("extra_bytes", "extra_bytes", "extra MiB", 1, _MIB),
            Figure("extra_share", "extra_share", "extra %", 1, 100),
            Figure("cached_bytes", "cached_bytes", None),
        ],
        own=(OWN,),
        torchrec=(),
        floors=(PLAIN,),
        disagreements=_disagreements,
        notes=notes,
        grouped_by="operation",
    )


def reached_goals(turns: Turns) -> list[Goal]:
    """What the measurements say of the goals; nothing of what wasn't measured."""
    goals = []
    for operation, limit in GOALS.items():
        own, plain = (turns.get(Variant(side, operation)) for side in (OWN, PLAIN))
        if own and plain:
            speeds = ([m.figures["bytes_per_s"] for m in found] for found in (own, plain))
            ratio = Spread.of(ratios(*speeds))
            is_reached = ratio.median >= limit
            text = (
                f"goal {operation}: {ratio.text(2)} of the speed of {PLAIN}, at least {limit} "
                f"wanted: {said(is_reached)}"
            )
            goals.append(Goal(operation, ratio.median, limit, is_reached, text))
    for operation in OPERATIONS:
        if operation == ASYNC_SAVE:
            continue  # Its copy is all of the tables, which is what it is for.
        own = turns.get(Variant(OWN, operation))
        if own:
            extra_bytes = max(m.figures["extra_bytes"] for m in own)
            most_bytes = EXTRA_SHARE * min(own[0].figures["rank_bytes"]) + STRETCH_BYTES
            is_reached = extra_bytes <= most_bytes
            text = (
                f"goal memory, {operation}: {extra_bytes * _MIB:.1f} MiB more at most, "
                f"{most_bytes * _MIB:.1f} MiB allowed: {said(is_reached)}"
            )
            goals.append(Goal(f"memory, {operation}", extra_bytes, most_bytes, is_reached, text))
    return goals


def _chosen_sides(config: BenchRun) -> list[str]:
    sides = config.bench.sides
    has_safetensors = find_spec("safetensors") is not None
    if sides is None:
        return [side for side in SIDES if has_safetensors or side != DCP_SAFETENSORS]
    check_names(sides, SIDES)
    if DCP_SAFETENSORS in sides and not has_safetensors:
        others = ",".join(side for side in sides if side != DCP_SAFETENSORS)
        raise UserError(
            f"bench.sides: {DCP_SAFETENSORS} needs the package safetensors, which isn't installed; "
            f"leave it out: bench.sides=[{others}]"
        )
    return sides


def _check_room(config: BenchRun, folder: Path, sides: Sequence[str]) -> None:
    """Refuses tables that the disk or the memory can't hold as often as they are there at once."""
    num_bytes = config.bench.table_mib << 20
    # The safetensors storage of torch.distributed.checkpoint holds three copies besides.
    copies = 4 if DCP_SAFETENSORS in sides else 2
    free_bytes, available = shutil.disk_usage(folder).free, available_bytes()
    for what, needed, there in (
        ("on disk", num_bytes, free_bytes),
        ("of memory", copies * num_bytes, available),
    ):
        if there is not None and needed > there:
            raise UserError(
                f"bench.table_mib={config.bench.table_mib}: {needed * _MIB:,.0f} MiB {what} are "
                f"needed, {there * _MIB:,.0f} MiB are free; lower it, or leave sides out of "
                "bench.sides"
            )


def _make_plan(config: BenchRun) -> Plan:
    sharding, world_size = config.sharding, config.launch.nproc
    if sharding.layout == FILE_LAYOUT or sharding.tables:
        raise UserError(
            "sharding=file and sharding.tables are for a dataset's tables; `dlrm bench checkpoint` "
            "has tables of its own: set sharding=row_wise, or another layout"
        )
    tables = bench_tables(config)
    ranks_per_host = config.launch.ranks_per_host or world_size
    features, choice = bench_features(tables), sharding.choice()
    layout = build_plan(
        tables, features, {}, choice, world_size, ranks_per_host, config.data.batch_size
    )
    return layout.plan


def _describe(config: BenchRun, plan: Plan) -> dict[str, str]:
    tables = bench_tables(config)
    rows, dim = sum(table.rows for table in tables), config.model.embedding_dim
    return {
        "bench": f"checkpoint, {config.launch.nproc} process(es), {config.bench.table_mib:,} MiB "
        f"of rows and state, sharding={config.sharding.layout}",
        "model": f"{len(tables)} tables with {rows:,} rows of {dim}, {len(plan.shards)} shards; "
        f"{config.optim.sparse.name}",
        "steps": f"{config.num_turns} turns; all operations in fresh processes, into tables that "
        "are built",
    }


def _storm(session: Session) -> list[str]:
    """The storm, in result.json and for people; what makes the benchmark fail."""
    config = session.config
    storm = run_storm(
        session.folder.path / "storm", config.bench.storm_kills, config.seed, session.say
    )
    session.result["storm"] = storm.as_dict()
    session.say(storm.text())
    if not storm.problems:
        shutil.rmtree(session.folder.path / "storm")
    return storm.problems


# ------------------------------------------------------------------------------ what must agree


def _disagreements(turns: Turns) -> list[str]:
    """Sides that wrote or read fewer bytes, loaded other values, or found warm what was to be
    cold."""
    problems = []
    known = [(variant, m.figures) for variant, found in turns.items() for m in found]
    sizes = {variant.name: figures["num_bytes"] for variant, figures in known}
    if len(set(sizes.values())) > 1:
        each = ", ".join(f"{name} {size:,}" for name, size in sizes.items())
        problems.append(f"the sides have different numbers of bytes: {each}")
    digests = {
        variant.name: figures["values_digest"]
        for variant, figures in known
        if figures["values_digest"] is not None
    }
    if len(set(digests.values())) > 1:
        each = ", ".join(f"{name} {digest}" for name, digest in digests.items())
        problems.append(f"what was loaded isn't what was saved, by digests: {each}")
    for variant, figures in known:
        share = figures["cached_bytes"] / figures["num_bytes"]
        if variant.precision == COLD_LOAD and share > _MOST_CACHED_SHARE:
            problems.append(
                f"{variant.name} isn't cold: {share:.0%} of the files stayed in the page cache; "
                "choose a folder on a disk with hydra.run.dir="
            )
    return list(dict.fromkeys(problems))


def _notes(turns: Turns) -> list[str]:
    cold = [
        m.figures["cached_bytes"] for v, f in turns.items() for m in f if v.precision == COLD_LOAD
    ]
    lines = [
        "extra: what the memory of the rank with the most has grown by at its peak (VmHWM), in MiB "
        "and in percent of its rows and state; median over the turns",
    ]
    if cold:
        lines.append(
            "save: the second of a process; of the first, some may be waiting for the memory of a "
            "virtual machine's host"
        )
        lines.append(
            "async save: how long training waits, for a copy into memory that the save before "
            "has taken; plain: that copy alone"
        )
        lines.append(
            "cold: after fsync and posix_fadvise(DONTNEED); then at most "
            f"{max(cold):,} bytes were in the page cache (mincore). What a virtual machine's host "
            "keeps stays; warm: after the files were read once"
        )
    said: set[str] = set()
    for variant, found in turns.items():
        if found and variant.side not in said:
            said.add(variant.side)
            lines.append(f"{variant.side}: {found[0].figures['note']}")
    return lines
