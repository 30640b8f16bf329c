"""`dlrm check`: whether the sharded run, on the user's own configuration, trains the same model as
one plain process.

Two passes over the same batches, of which `check_compare` says what is compared and what is
allowed:

    1  fp64, end to end: the configuration with torch's backend and lossless values on the wire.
       Both runs go their own way; rounding stays far below what an optimizer amplifies.
    2  the configured precision, backend and wire, one step at a time: the reference begins every
       step where the sharded run does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data.errors import UserError
from data.parquet import PreparedDataset
from dlrm import mutations
from dlrm.build import build_tables, communicator
from dlrm.check_batches import lookups_of_pass, make_batches
from dlrm.check_bounds import bytes_of_bounds
from dlrm.check_pass import PassResult, run_pass
from dlrm.check_report import describe, to_json, vacuous
from dlrm.config import CheckRun
from dlrm.datasets import open_dataset
from dlrm.display import PrepareDisplay
from dlrm.heartbeat import still_working
from dlrm.launch import WorkerContext, start
from dlrm.planning import make_plan
from dlrm.run_record import RunRecord
from embeddings.communicator import Communicator
from embeddings.machine import available_bytes
from embeddings.plan import Plan
from embeddings.row_optim import RowOptimizerConfig, state_widths

_FP64_BYTES = 8


class CheckFailed(RuntimeError):
    """The sharded run and the reference differ by more than is allowed, or nothing was compared."""


@dataclass
class CheckTask:
    """What every rank gets.

    Attributes:
        config: the configuration.
        dataset_root: the prepared dataset.
        plan: who owns what.
    """

    config: CheckRun
    dataset_root: Path
    plan: Plan


def run_check(
    config: CheckRun,
    config_yaml: str,
    run_dir: Path,
    say: Callable[[str], None] = print,
    *,
    fresh_processes: bool = False,
) -> dict[str, Any]:
    """Trains both, compares, prints the differences and writes them to result.json.

    Args:
        config: the checked configuration.
        config_yaml: the same as text, for the run folder.
        run_dir: the output folder.
        say: prints for the user.
        fresh_processes: start a worker even for one process.

    Returns:
        What result.json holds.

    Raises:
        CheckFailed: naming the worst quantity.
        UserError: for a mutation that can't show, or tables that don't fit into memory twice.
    """
    world_size, mutate = config.launch.nproc, config.check.mutate
    with RunRecord(config, config_yaml, run_dir, world_size, mutate=mutate) as record:
        task = _make_task(config, record, world_size, say)
        passes = start(check_rank, (task,), config.launch, run_dir, fresh_processes=fresh_processes)
        _conclude(task, passes, record, say)
    return record.result


def _make_task(
    config: CheckRun, record: RunRecord, world_size: int, say: Callable[[str], None]
) -> CheckTask:
    with PrepareDisplay() as display:
        dataset = open_dataset(config.data, Path.cwd(), display)
    dataset.check("train")
    plan = make_plan(config, dataset, world_size).plan
    record.folder.write_text("plan.json", plan.to_json())
    record.result |= {
        "plan_digest": plan.digest(),
        "data": {"name": config.data.name, "digest": dataset.manifest.digest()},
    }
    prepare_check(config, dataset, plan)
    say(
        f"check   {config.data.name}, {config.optim.sparse.name}: {config.check.steps:,} steps of "
        f"global batch {config.data.batch_size:,}, and hand-made batches"
    )
    ranks = "1 process" if world_size == 1 else f"{world_size} processes"
    say(f"run     {ranks} against a plain one; {record.folder.path}")
    if world_size > 1:
        for line in plan.describe():
            say(f"plan    {line}")
    if config.check.mutate is not None:
        say(f"mutate  {config.check.mutate}: a fault is planted, which the check must find")
    return CheckTask(config, dataset.root, plan)


def prepare_check(config: CheckRun, dataset: PreparedDataset, plan: Plan) -> None:
    """Refuses what can't be checked.

    Raises:
        UserError: for eps=0, a mutation that can't show, or tables that don't fit into memory
            twice, with the limits of the rows that are looked up.
    """
    _refuse_eps_0(config)
    tables, features = build_tables(config, dataset.manifest)
    if config.check.mutate is not None:
        situation = mutations.Situation(config, plan, tables, features)
        mutations.check_can_show(config.check.mutate, situation)
    optimizer = RowOptimizerConfig(config.optim.sparse.name)  # type: ignore[arg-type]
    lookups = lookups_of_pass(config, dataset.manifest, features)
    reference_bytes = sharded_bytes = bounds_bytes = 0
    for table in tables:
        width = table.dim + sum(state_widths(optimizer, table.dim).values())
        table_bytes = table.rows * width * _FP64_BYTES
        reference_bytes += table_bytes
        bounds_bytes += bytes_of_bounds(table.rows, width, lookups[table.name])
        sharded_bytes += table_bytes * (plan.world_size if plan.is_replicated(table.name) else 1)
    available = available_bytes()
    needed = reference_bytes + sharded_bytes + bounds_bytes
    if available is not None and needed > available:
        gib = 2**30
        raise UserError(
            f"the check keeps all rows and their state twice, in fp64: {sharded_bytes / gib:.1f} "
            f"GiB for the ranks and {reference_bytes / gib:.1f} GiB for the reference, and "
            f"{bounds_bytes / gib:.1f} GiB of limits of the rows that are looked up, but "
            f"{available / gib:.1f} GiB are free here. Lower model.embedding_dim, or check on data "
            "with fewer rows (data.synthetic.cardinality_scale=…, data.schema.sparse.NAME.rows=…)"
        )


def _refuse_eps_0(config: CheckRun) -> None:
    """Refuses what makes 0/0 of a gradient that is 0 from the start."""
    optim = config.optim
    for name, part in (("dense", optim.dense), ("sparse", optim.sparse)):
        if part.name != "sgd" and optim.effective_eps(part) == 0:
            key = "optim.eps" if part.eps is None else f"optim.{name}.eps"
            raise UserError(
                f"{key}=0: the check can't use it. Its hand-made batches have samples without "
                f"weight, whose gradients are 0, and with eps=0 {part.name} makes 0/0 of these. "
                f"Set {key}=1e-8"
            )


def check_rank(context: WorkerContext, task: CheckTask) -> list[PassResult]:
    """One rank of a check; the results are rank 0's, the others have none."""
    comm = communicator(context, task.config.launch)
    with still_working(context.heartbeat):
        return check_with(comm, task, context.heartbeat.beat)


def check_with(
    comm: Communicator,
    task: CheckTask,
    beat: Callable[[int, str], None] = lambda step, phase: None,
) -> list[PassResult]:
    """Both passes; called by all ranks, rank 0 gets the results."""
    config, plan = task.config, task.plan
    dataset = PreparedDataset(task.dataset_root)
    made = None
    if comm.rank == 0:
        tables, features = build_tables(config, dataset.manifest)
        made = make_batches(dataset, config, plan, tables, features)
    made = comm.all_gather_object(made)[0]
    assert made is not None
    results = [
        run_pass(comm, part, dataset, plan, made, end_to_end=end_to_end, beat=beat)
        for part, end_to_end in _configs(config)
    ]
    return [result for result in results if result is not None]


def _configs(config: CheckRun) -> list[tuple[CheckRun, bool]]:
    """The configuration of each pass, and whether it goes end to end."""
    exact = replace(
        config,
        train=replace(config.train, precision="fp64", backend="torch"),
        sharding=replace(config.sharding, wire="fp32"),
    )
    if exact == config:
        return [(exact, True)]
    return [(exact, True), (config, False)]


def _conclude(
    task: CheckTask, passes: list[PassResult], record: RunRecord, say: Callable[[str], None]
) -> None:
    """Prints, writes down, and raises where something is wrong.

    Raises:
        CheckFailed: naming the worst quantity.
        UserError: for a planted fault that nothing shows of.
    """
    config = task.config
    dataset = PreparedDataset(task.dataset_root)
    tables, _ = build_tables(config, dataset.manifest)
    record.result |= {"steps": config.check.steps, **to_json(passes)}
    say(describe(passes, tables))
    verdict(config, passes)
    say("PASS    every value is within its limit")


def verdict(config: CheckRun, passes: list[PassResult]) -> None:
    """Raises where a check doesn't pass.

    Raises:
        CheckFailed: naming the worst quantity, or what was not compared.
        UserError: for a planted fault that nothing shows of.
    """
    beyond = [
        (times, text, result) for result in passes for times, text in result.differences.beyond()
    ]
    if beyond:
        _, text, result = max(beyond, key=lambda entry: entry[0])
        planted = "" if config.check.mutate is None else f" ({config.check.mutate} was planted)"
        raise CheckFailed(
            f"FAIL{planted}: {result.title}: {text}. Beyond their limits: {len(beyond):,} of all "
            f"figures; the first was {result.differences.first_beyond}"
        )
    for result in passes:
        missing = vacuous(result)
        if missing:
            raise CheckFailed(f"FAIL: {result.title}: nothing was compared of {', '.join(missing)}")
    if config.check.mutate is not None:
        raise UserError(
            f"check.mutate={config.check.mutate} was planted, and nothing shows of it in "
            f"{config.check.steps} steps: raise check.steps, or choose a configuration in which "
            "the fault has an effect"
        )
