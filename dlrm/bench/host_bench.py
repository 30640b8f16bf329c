"""`dlrm bench host`: the modes of tables in host memory, measured against the simulator."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

from data.errors import UserError
from dlrm.bench.comparison import Figure, Turns, Variant, Yardstick
from dlrm.bench.goals import Goal, said
from dlrm.bench.host_sides import HostTask, measure_host
from dlrm.bench.host_sweep import PICTURE, host_sweep, picture, print_sweep
from dlrm.bench.host_work import HostWorkload, StepCounts, choose_rates
from dlrm.bench.ratios import Spread, ratios
from dlrm.bench.sides import check_names
from dlrm.bench.table import wrapped
from dlrm.bench.train_bench import STEP_MS
from dlrm.bench.turns import Bench, Session, take_turns
from dlrm.config import BenchRun
from embeddings.host.cost import (
    STAGED_MODES,
    DenseTime,
    HostRates,
    StepWork,
    choose_mode,
    predict_step_s,
)
from embeddings.host.host_tables import Mode
from embeddings.machine import available_bytes

READS = {
    "data": False,
    "data.batch_size": True,
    "model": False,
    "model.embedding_dim": True,
    "optim": True,
    "optim.dense": False,
    "optim.schedule": False,
    "optim.clip_norm": False,
    "sharding": False,
    "sharding.memory": True,
    "sharding.host.lookahead": True,
    "sharding.host.hot_mb": True,
    "sharding.host.whole_rows": True,
    "sharding.host.staging_mb": True,
    "bench.steps": True,
    "bench.warmup_steps": True,
    "bench.host": True,
}
"""See `warn_of_ignored`."""

GATHER, LOOKAHEAD, HOTLINE = SIDES = STAGED_MODES
EXACT = (GATHER, LOOKAHEAD)
"""The modes that sum in the same order: their rows are equal to the bit."""
MOST_ERROR = 0.1
LEAST_OF_SPEED_UP = 0.9
"""Goals: how far a measurement may lie from its prediction, and how much of the predicted speed-up
of `lookahead` over `gather` is reached at least."""
_MANY_LATE = 0.02
_COPIES = 5
"""Of the tables in memory at once: themselves, as they were, the first side's, and what comparing
them takes."""


def bench_host(session: Session) -> list[str]:
    """Measures, prints the table and the sweep and adds both to the result; returns what makes the
    benchmark fail. Goals that are missed don't.

    Raises:
        UserError: for what can't be measured; nothing has been then.
    """
    config = _in_one_thread(session.config)
    session = replace(session, config=config)
    sides = _chosen_sides(config)
    workload = HostWorkload.draw(config)
    _check_memory(config, workload.table_bytes)
    host = config.sharding.host
    hot = workload.hot_set(host.hot_bytes, host.whole_rows)
    counts: dict[str, StepCounts] = {
        mode: workload.count(hot, _window(config, mode)) for mode in SIDES
    }
    work = counts[LOOKAHEAD].work(config, workload)
    rates, dense = choose_rates(config, work)
    predicted_s: dict[str, float] = {
        mode: predict_step_s(mode, work, rates, dense, lookahead=host.lookahead) for mode in SIDES
    }
    choice = choose_mode(work, rates, dense, host.lookahead)
    session.result["host"] = {
        "auto": asdict(choice),
        "work": asdict(work),
        "rates": asdict(rates),
        "dense": asdict(dense),
        "predicted_s": predicted_s,
    }
    found: list[Turns] = []
    with tempfile.TemporaryDirectory(prefix="dlrm-bench-") as folder:

        def task(variant: Variant) -> HostTask:
            mode = cast(Mode, variant.side)
            return HostTask(config, mode, rates, dense, predicted_s[mode], Path(folder))

        turns = Bench(
            [Variant(side, "") for side in sides],
            lambda variant, _: (measure_host, (task(variant),)),
            host_yardstick(
                config.bench.host.row_tolerance, _expected(counts), keep_turns=found.append
            ),
            _describe(config, workload, work, rates, dense),
        )
        problems = take_turns(turns, session)
    goals = reached_goals(found[0], predicted_s)
    session.result["goals"] = [asdict(goal) for goal in goals]
    for goal in goals:
        session.say(wrapped(goal.text, "    "))
    session.say(wrapped(f"auto {choice.reason}", "    "))
    swept = host_sweep(config, workload)
    session.result["sweep"] = swept
    session.folder.write_text(PICTURE, picture(swept))
    print_sweep(swept)
    session.say(f"picture {session.folder.path / PICTURE}")
    return problems


def host_yardstick(
    row_tolerance: float,
    expected: Mapping[str, Mapping[str, int]],
    keep_turns: Callable[[Turns], None] = lambda turns: None,
) -> Yardstick:
    """Step times beside their prediction; whether all modes have the same rows in the end and have
    moved what was counted.

    Args:
        row_tolerance: `bench.host.row_tolerance`.
        expected: what each mode has to count over all steps.
        keep_turns: gets the measurements when they are compared.
    """

    def notes(turns: Turns) -> list[str]:
        keep_turns(turns)
        return _notes(turns)

    return Yardstick(
        STEP_MS,
        is_rate=False,
        columns=[
            Figure("predicted_ms", "predicted_ms", "predicted"),
            Figure("error", "error", "error %", 1, 100),
            Figure("stall_ms", "stall_ms", "stall ms"),
            Figure("busy_ms", "busy_ms", "real ms"),
            Figure("late_share", "late_share", "late %", 1, 100),
            Figure("moved_bytes", "moved_bytes", "MB/step", 3, 1e-6),
            Figure("step_ms_mean", "step_ms_mean", None),
        ],
        own=(LOOKAHEAD,),
        torchrec=(),
        floors=(),
        disagreements=lambda turns: _disagreements(turns, row_tolerance, expected),
        notes=notes,
    )


def reached_goals(turns: Turns, predicted_s: Mapping[str, float]) -> list[Goal]:
    """What the measurements say of the goals; nothing of what wasn't measured."""
    goals = []
    for variant, measured in turns.items():
        if not measured:
            continue
        error = statistics.median(m.figures["error"] for m in measured)
        is_reached = abs(error) <= MOST_ERROR
        text = (
            f"goal {variant.name}: {abs(error):.1%} {'above' if error > 0 else 'below'} the "
            f"prediction, at most {MOST_ERROR:.0%} wanted: {said(is_reached)}"
        )
        goals.append(Goal(variant.name, abs(error), MOST_ERROR, is_reached, text))
    gather, lookahead = (turns.get(Variant(side, "")) for side in (GATHER, LOOKAHEAD))
    if gather and lookahead:
        times = [[m.figures["step_ms_p50"] for m in found] for found in (gather, lookahead)]
        speed_up = Spread.of(ratios(*times))
        predicted = predicted_s[GATHER] / predicted_s[LOOKAHEAD]
        share = speed_up.median / predicted
        is_reached = share >= LEAST_OF_SPEED_UP
        text = (
            f"goal speed-up: lookahead is {speed_up.text(2)} times as fast as gather, "
            f"{predicted:.2f} predicted; {share:.2f} of it, at least {LEAST_OF_SPEED_UP} wanted: "
            f"{said(is_reached)}"
        )
        goals.append(Goal("speed-up", share, LEAST_OF_SPEED_UP, is_reached, text))
    return goals


def _chosen_sides(config: BenchRun) -> Sequence[str]:
    if config.launch.nproc > 1:
        raise UserError(
            f"launch.nproc={config.launch.nproc}: `dlrm bench host` measures one process; set "
            "launch.nproc=1"
        )
    if config.bench.sides is None:
        return SIDES
    check_names(config.bench.sides, SIDES)
    return config.bench.sides


def _check_memory(config: BenchRun, table_bytes: int) -> None:
    needed, available = _COPIES * table_bytes, available_bytes()
    if available is not None and needed > available:
        raise UserError(
            f"bench.host.table_scale={config.bench.host.table_scale:g}: {needed / 2**20:,.0f} MiB "
            f"of memory are needed, {available / 2**20:,.0f} MiB are free; lower it"
        )


def _in_one_thread(config: BenchRun) -> BenchRun:
    """The queues need cores too: unless the user says otherwise, torch has one thread."""
    num_threads = config.launch.num_threads or 1
    return replace(config, launch=replace(config.launch, num_threads=num_threads))


def _window(config: BenchRun, mode: str) -> int:
    return config.sharding.host.lookahead if mode == LOOKAHEAD else 0


def _expected(counts: Mapping[str, StepCounts]) -> dict[str, dict[str, int]]:
    return {
        mode: {
            "cold": int(of_mode.cold_T.sum()),
            "fetched": int(of_mode.fetched_T.sum()),
            "written": int(of_mode.written_T.sum()),
            "hot_samples": int(of_mode.hot_samples_T.sum()),
        }
        for mode, of_mode in counts.items()
    }


def _describe(
    config: BenchRun, workload: HostWorkload, work: StepWork, rates: HostRates, dense: DenseTime
) -> dict[str, str]:
    bench, host, sparse = config.bench, config.sharding.host, config.optim.sparse
    rows = sum(table.rows for table in workload.counts)
    assert rates.link is not None
    return {
        "bench": f"host, 1 process, batch {config.data.batch_size:,}, hot rows "
        f"{host.hot_mb:g} of {workload.table_bytes / 2**20:,.0f} MiB, {host.lookahead} step(s) "
        "ahead",
        "model": f"{len(workload.counts)} tables with {rows:,} rows of "
        f"{config.model.embedding_dim}, ids by a Zipf law of exponent {bench.host.zipf:g}; "
        f"{sparse.name}, lr {sparse.lr:g}; the gradient is given",
        "work": f"Of a step: {work.num_unique:,.0f} distinct rows, {work.num_cold:,.0f} cold, "
        f"{work.num_forwarded:,.1f} forwarded, {work.all_hot_share:.1%} of the samples all hot",
        "rates": f"Simulated: gather {_mb_s(rates.gather_bytes_per_s)}, link "
        f"{_mb_s(rates.link.bytes_per_s)} each way, scatter {_mb_s(rates.scatter_bytes_per_s)}, "
        f"so that all stages of gather take {bench.host.stage_share:g} times the dense time; "
        f"dense {1e3 * dense.of_s(work.num_samples):g} ms, of which {1e3 * dense.fixed_s:g} fixed",
        "steps": f"{bench.warmup_steps} to warm up, {bench.steps} measured, {config.num_turns} "
        "turns; each in a fresh process",
    }


def _mb_s(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:,.1f} MB/s"


# ------------------------------------------------------------------------------ what must agree


def _disagreements(
    turns: Turns, tolerance: float, expected: Mapping[str, Mapping[str, int]]
) -> list[str]:
    """Modes that end with other rows, or that haven't moved what was counted."""
    known = [(variant.side, m.figures) for variant, found in turns.items() for m in found]
    problems = []
    for key, sides, when in (
        ("start_digest", SIDES, "start with"),
        ("rows_digest", EXACT, "end with"),
        *(("rows_digest", (side,), "end in every turn with") for side in SIDES),
    ):
        digests = {(side, figures[key]): None for side, figures in known if side in sides}
        if len({digest for _, digest in digests}) > 1:
            each = ", ".join(f"{side} {digest}" for side, digest in digests)
            problems.append(f"not all {when} the same rows, by digests: {each}")
    for side, figures in known:
        problems += _wrong_work(side, figures, tolerance, expected[side])
    return list(dict.fromkeys(problems))


def _wrong_work(
    side: str, figures: Mapping[str, Any], tolerance: float, expected: Mapping[str, int]
) -> list[str]:
    problems = []
    apart, counted = figures["rows_difference"], figures["counted"]
    if not apart <= tolerance:
        problems.append(
            f"{side} ends with other rows than the first side: up to {apart:.1e} apart, allowed "
            f"are {tolerance:g} (bench.host.row_tolerance)"
        )
    if not figures["rows_moved"] > 0:
        problems.append(f"{side} has updated no row")
    for what, value in (
        ("moved no byte", figures["moved_bytes"]),
        ("written no row back", counted["written"]),
        ("forwarded no row", figures["num_forwarded"] if side == LOOKAHEAD else 1),
    ):
        if not value > 0:
            problems.append(
                f"{side} has {what}, so that it shows nothing; lower sharding.host.hot_mb, or "
                "raise bench.steps"
            )
    if counted != expected:
        pairs = ", ".join(
            f"{name} {counted[name]:,} of {number:,}"
            for name, number in expected.items()
            if counted[name] != number
        )
        problems.append(f"{side} hasn't done what was counted before: {pairs}")
    return problems


def _notes(turns: Turns) -> list[str]:
    known = {variant.side: found for variant, found in turns.items() if found}
    lines = [
        "predicted: a step by the simulator, from counted rows and the simulated rates; stall: the "
        "compute waits for rows; real: what the compute really did, the rest is slept; late: "
        "passes whose real work took longer than given",
    ]
    apart = {s: max(m.figures["rows_difference"] for m in f) for s, f in known.items()}
    if len(known) > 1:
        each = ", ".join(f"{side} {value:.1e}" for side, value in apart.items())
        lines.append(
            f"rows and state in the end, relative difference to {next(iter(known))}'s of the first "
            f"turn: {each} (must be 0 among {' and '.join(EXACT)})"
        )
    late = {s: max(m.figures["late_share"] for m in f) for s, f in known.items()}
    if any(share > _MANY_LATE for share in late.values()):
        lines.append(
            "note: the machine was at times too slow or too busy for the dense time given, which "
            "makes steps longer than predicted; raise bench.host.dense_ms"
        )
    lines += [f"{side}: {found[0].figures['note']}" for side, found in known.items()]
    return lines
