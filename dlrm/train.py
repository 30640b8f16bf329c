"""`dlrm train`: from configuration to result.json and report.html."""

from __future__ import annotations

import json
import os
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch

from data.lanes import NUM_LANES
from data.parquet import PreparedDataset
from dlrm.build import communicator
from dlrm.config import TrainRun
from dlrm.data_notes import data_notes, describe_inputs
from dlrm.datasets import open_dataset
from dlrm.display import PrepareDisplay
from dlrm.heartbeat import keep_beating, still_working
from dlrm.host_timeline import HOST_TIMELINE
from dlrm.hot_set import describe_outcome
from dlrm.launch import WorkerContext, join, start
from dlrm.metrics import BinaryMetrics, EvalResult
from dlrm.optim import describe_semantics
from dlrm.own_files import finish_moving, has_model, own_entries
from dlrm.planning import check_tables_fit, make_plan, why_on_device
from dlrm.profile import StepProfiler, describe_profile, profiled_steps
from dlrm.resume import is_restarted, with_restarts
from dlrm.run_folder import RunFolder
from dlrm.run_lock import locked_run
from dlrm.run_record import RunRecord
from dlrm.scoring import teacher_result
from dlrm.side_output import side_output
from dlrm.starting_point import StartingPoint
from dlrm.stop import RunStopped, StopRequest, announce, stop_on_signal
from dlrm.torchrun import launch_id, under_torchrun
from dlrm.trainer import Trainer, eval_figures
from dlrm.worker import is_user_error
from embeddings.communicator import Communicator, ProcessGroup, SingleProcess
from embeddings.plan_choice import PlannedLayout

_PREPARE_TIMEOUT = timedelta(days=7)
_VANISH_S = 30.0
NO_BEST = (
    "note    no evaluation on a valid part had an AUC, so no model is the best: this is the latest"
)


@dataclass
class TrainTask:
    """What every rank of a run gets.

    Attributes:
        config: the checked configuration.
        run_dir: the run folder, claimed.
        result: result.json as far as it is known.
        layout: who owns which rows, and why.
        start: what the model begins with.
    """

    config: TrainRun
    run_dir: Path
    result: dict[str, Any]
    layout: PlannedLayout
    start: StartingPoint


def run_train(
    config: TrainRun,
    config_yaml: str,
    run_dir: Path,
    say: Callable[[str], None] = print,
    *,
    fresh_processes: bool = False,
) -> dict[str, Any]:
    """Prepares what is missing, trains, tests the best model, and writes everything down.

    Data are prepared and the plan is made here, once; `launch.nproc` ranks then train. Under an
    outer torchrun this process is one of the ranks, and rank 0 does both.

    Args:
        config: the checked configuration.
        config_yaml: the same as text, for the run folder.
        run_dir: the output folder.
        say: prints one line for the user.
        fresh_processes: start a worker even for one process (jobs of a sweep share nothing).

    Returns:
        What result.json holds; under torchrun on rank 0, elsewhere an empty dictionary.

    Raises:
        RunStopped: where a signal ended the run; its state is kept.
    """
    if under_torchrun():
        joined: dict[str, Any] = join(_train_joined, (config, config_yaml, run_dir), config.launch)
        return joined
    with locked_run(run_dir):
        return _train_here(config, config_yaml, run_dir, say, fresh_processes=fresh_processes)


def _train_here(
    config: TrainRun,
    config_yaml: str,
    run_dir: Path,
    say: Callable[[str], None],
    *,
    fresh_processes: bool,
) -> dict[str, Any]:
    begin, dataset = _starting_point(config, run_dir)
    with _recorded(config, config_yaml, run_dir, config.launch.nproc, say, begin) as record:
        task = _make_task(config, record, say, begin, dataset)
        if not fresh_processes:  # A sweep's jobs would repeat 26 lines; plan.json has them.
            _announce_plan(task, say)
        start(
            train_rank,
            (task,),
            config.launch,
            run_dir,
            fresh_processes=fresh_processes,
            here_only=(say,),
            stops_in_order=True,
        )
        _raise_if_stopped(record.folder)
    return record.result


def _raise_if_stopped(folder: RunFolder) -> None:
    stopped = folder.read_json("result.json").get("stopped")
    if stopped is not None:
        raise RunStopped(stopped["step"], stopped["signal"], folder.path)


def _train_joined(
    context: WorkerContext, config: TrainRun, config_yaml: str, run_dir: Path
) -> dict[str, Any]:
    """A rank under torchrun: rank 0 claims the folder and prepares, the others wait for it."""
    # Preparing data may take hours, whatever `launch.timeout_s`; if rank 0 ends, torchrun ends all.
    patient: Communicator = SingleProcess()
    if context.world_size > 1:
        patient = ProcessGroup(torch.distributed.new_group(timeout=_PREPARE_TIMEOUT))
    if context.rank != 0:
        with keep_beating(context.heartbeat, "wait for the data"):
            task = patient.all_gather_object(None)[0]
        if isinstance(task, Exception):
            raise task
        if task is None:
            raise SystemExit(1)  # Rank 0 tells why.
        train_rank(context, task)
        return {}
    is_told = False
    try:
        # Of a group that torchrun has ended, this rank's predecessor may take a moment to vanish.
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        with ExitStack() as held:
            with keep_beating(context.heartbeat, "prepare the data"):
                held.enter_context(locked_run(run_dir, _VANISH_S if restarts else 0.0))
                config = with_restarts(config, run_dir)
                begin, dataset = _starting_point(config, run_dir)
            record = held.enter_context(
                _recorded(config, config_yaml, run_dir, context.world_size, print, begin)
            )
            with keep_beating(context.heartbeat, "prepare the data"):
                local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
                task = _make_task(
                    config, record, print, begin, dataset, ranks_per_host=local_world_size
                )
            patient.all_gather_object(task)
            is_told = True
            _announce_plan(task, print)
            train_rank(context, task)
            _raise_if_stopped(record.folder)
    except BaseException as error:
        if not is_told:
            # A mistake of the user ends every rank with exit status 2.
            patient.all_gather_object(error if is_user_error(error) else None)
        raise
    return record.result


def _starting_point(
    config: TrainRun, run_dir: Path
) -> tuple[StartingPoint, PreparedDataset | None]:
    """Found and checked, before anything in the run's folder is replaced. Where a checkpoint is to
    fit the data or an earlier run is to make room, the data are opened for it."""
    finish_moving(run_dir)
    begin = StartingPoint.find(config, run_dir)
    overwrite = config.train.overwrite or is_restarted(run_dir)
    if not begin.continues_folder:
        RunFolder.check_free(run_dir, overwrite=overwrite)
    if not begin.is_given and not (config.train.overwrite and own_entries(run_dir)):
        return begin, None
    dataset = _open_data(config)
    begin.check(config, dataset)
    return begin, dataset


def _open_data(config: TrainRun) -> PreparedDataset:
    with PrepareDisplay() as display:
        dataset = open_dataset(config.data, Path.cwd(), display)
    dataset.check("train")
    return dataset


@contextmanager
def _recorded(
    config: TrainRun,
    config_yaml: str,
    run_dir: Path,
    world_size: int,
    say: Callable[[str], None],
    begin: StartingPoint,
) -> Iterator[RunRecord]:
    """Whatever happens within, result.json and report.html tell of it."""
    # Here: matplotlib takes a second to import, and workers have no use for it.
    from dlrm.report import write_report

    record = RunRecord(
        config,
        config_yaml,
        run_dir,
        world_size,
        resume=begin.continues_folder,
        overwrite=is_restarted(run_dir),
        settles=False,
        run_id=begin.run_id or uuid.uuid4().hex,
        **({"torchrun": launch_id()} if under_torchrun() else {}),
    )
    try:
        with record:
            try:
                yield record
            finally:
                # Rank 0, perhaps another process, has added its figures, also if it failed.
                record.result |= record.folder.read_json("result.json")
    except BaseException:
        with side_output("there is no report"):
            write_report(record.folder.path)
        if record.folder.settle(is_kept=has_model(run_dir)):
            say(f"run     it ended before it kept a model: {run_dir} holds the earlier run again")
        raise
    with side_output("there is no report"):
        report = write_report(record.folder.path)
        say(f"report  {report}")
    record.folder.settle(is_kept=True)


def _make_task(
    config: TrainRun,
    record: RunRecord,
    say: Callable[[str], None],
    begin: StartingPoint,
    dataset: PreparedDataset | None,
    *,
    ranks_per_host: int | None = None,
) -> TrainTask:
    folder, result, world_size = record.folder, record.result, record.result["world_size"]
    dataset = dataset or _open_data(config)
    manifest = dataset.manifest
    recorded = {"root": str(dataset.root.resolve()), "digest": manifest.digest()}
    folder.write_json("dataset.json", recorded)
    result["data"] = {
        "name": config.data.name,
        "synthetic": manifest.synthetic is not None,
        **recorded,
    }
    _announce_data(config, dataset, say)
    if (config.data.batch_size < NUM_LANES and world_size > 1) or world_size > NUM_LANES:
        say(
            f"note    data.batch_size={config.data.batch_size} on {world_size} ranks: ranks share "
            f"{NUM_LANES} lanes of samples, so in many steps some of them get no samples"
        )
    if (note := overfitting_note(config, dataset)) is not None:
        say(note)
    layout = make_plan(config, dataset, world_size, ranks_per_host=ranks_per_host)
    layout = begin.layout(config, layout, say)
    check_tables_fit(config, dataset, layout.plan, ranks_per_host or world_size)
    folder.write_text("plan.json", layout.plan.to_json())
    result["plan_digest"] = layout.plan.digest()
    result["plan_reasons"] = layout.reasons
    record.write()
    return TrainTask(config, folder.path, result, layout, begin)


def train_rank(context: WorkerContext, task: TrainTask, say: Callable[[str], None] = print) -> None:
    """One rank of a run, from its part of the tables to the test of the best model.

    Rank 0 adds its figures to result.json, those of a failed run too.
    """
    config = task.config
    folder = RunFolder.of_this_run(task.run_dir)
    comm = communicator(context, task.config.launch)
    result = task.result
    result["num_threads"] = torch.get_num_threads()
    context.heartbeat.beat(0, "build")
    stop = StopRequest(context.stop_file)
    dataset = PreparedDataset(Path(result["data"]["root"]))
    working = partial(still_working, context.heartbeat)
    with working():
        trainer = Trainer(
            config,
            dataset,
            folder,
            say,
            comm=comm,
            plan=task.layout.plan,
            beat=context.heartbeat.beat,
            working=working,
            is_stop_asked=stop.asked,
            fills_tables=task.start.resume is None,
        )
        result |= task.start.load(trainer, lambda: context.heartbeat.beat(0, "load"))
    profiler: StepProfiler | None = None
    if config.train.profile:
        steps = profiled_steps(config.train, trainer.total_steps)
        if steps.start - 2 < trainer.steps_done:
            warnings.warn(
                f"train.profile=true is ignored: the run goes on after step {trainer.steps_done:,},"
                f" too late for step {steps.start:,}; set train.profile_start",
                stacklevel=2,
            )
        else:
            profiler = StepProfiler(
                steps,
                trainer.recorder,
                comm,
                folder.path,
                context.heartbeat.beat,
                steps_done=trainer.steps_done,
            )
    _announce_model(config, trainer, trainer.say)
    with _figures_kept(trainer, result):
        try:
            with _stopping_on_signals(context, stop):
                trainer.fit()
        finally:
            if profiler is not None:
                profiler.close()
                if (profile := profiler.figures()) is not None:
                    result["profile"] = profile
                    trainer.say("\n".join(describe_profile(profile)))
            result["train"] = trainer.recorder.figures(trainer.epochs_done)
            _announce_steps_without_weight(trainer)
            if comm.world_size == 1:
                result["memory"] = trainer.memory()
        # What follows communicates: not after a failure.
        if trainer.is_stopped:
            # Perhaps the signal, or the launcher's word of it, came to another rank only.
            number = max(comm.all_gather_object(stop.number))
            result["stopped"] = {"step": trainer.steps_done, "signal": number}
            return
        result["model_digest"] = trainer.digest()
        result["memory"] = trainer.memory()
        result["comm"] = trainer.comm_figures()
        if (host := trainer.host_figures()) is not None:
            result["host"] = host
            for line in describe_outcome(host):
                trainer.say(f"host    {line}")
            if (timeline := trainer.host_timeline()) is not None:
                with side_output("the report has no picture of the host's steps"):
                    folder.write_json(HOST_TIMELINE, timeline)
        with working():
            result |= _test_best(trainer, folder, result["data"], trainer.say)


@contextmanager
def _figures_kept(trainer: Trainer, result: dict[str, Any]) -> Iterator[None]:
    """However it ends within, the ranks' trainers are closed, and rank 0 writes result.json."""
    try:
        yield
    except BaseException:
        trainer.close()
        if trainer.is_first:
            with suppress(OSError):  # What ended the run is told, not what came of it.
                trainer.folder.write_json("result.json", result)
        raise
    trainer.close()
    if trainer.is_first:
        trainer.folder.write_json("result.json", result)


@contextmanager
def _stopping_on_signals(context: WorkerContext, stop: StopRequest) -> Iterator[None]:
    """Within, a signal ends the training in order, where no launcher of ours sees to it."""
    if context.stop_file is not None:
        yield
        return

    def first(number: int) -> None:
        stop.number = number
        if context.rank == 0:
            announce(number)

    with stop_on_signal(first):
        yield


def _announce_data(config: TrainRun, dataset: PreparedDataset, say: Callable[[str], None]) -> None:
    manifest = dataset.manifest
    sizes = ", ".join(f"{name} {part.rows:,}" for name, part in manifest.parts.items())
    if manifest.synthetic is not None:
        say("data    SYNTHETIC, drawn from a known teacher: results say nothing about real clicks")
    say(f"data    {config.data.name}: {sizes} rows; {dataset.root}")
    if config.data.raw or config.data.raw_train:
        for note in [describe_inputs(manifest), *data_notes(manifest)]:
            say(note)


def overfitting_note(config: TrainRun, dataset: PreparedDataset) -> str | None:
    """What to know before several epochs without a valid part: nothing tells when the model has
    learnt the training rows by heart. None where there is nothing to say."""
    if config.train.epochs == 1 or dataset.num_rows("valid"):
        return None
    kind = dataset.manifest.schema.split.kind
    how = "set data.schema.split.valid=0.1 and prepare again"
    if kind == "given":
        how = "name its files with data.raw_valid="
    elif kind == "by_file":
        how = "set data.schema.split.valid=0.5 and prepare again"
    return (
        f"note    train.epochs={config.train.epochs} and no valid part: the model after the last "
        "epoch is the one that is tested, also where it fits new rows worse than an earlier one; "
        f"to keep the best one, {how}"
    )


def _announce_plan(task: TrainTask, say: Callable[[str], None]) -> None:
    if (reason := why_on_device(task.config)) is not None:
        say(f"host    auto: {reason}")
    if task.layout.plan.world_size > 1:
        for line in task.layout.plan.describe():
            say(f"plan    {line}")


def _announce_model(config: TrainRun, trainer: Trainer, say: Callable[[str], None]) -> None:
    """Called by all ranks; the first one prints."""
    num_dense = sum(p.numel() for p in trainer.model.parameters())
    embeddings, num_ranks = trainer.embeddings, trainer.comm.world_size
    store = embeddings.store
    rows = sum(table.rows for table in embeddings.tables)
    sizes = trainer.comm.all_gather_object((store.table_bytes(), store.state_bytes()))
    table_mib, state_mib = (sum(size) / 2**20 for size in zip(*sizes, strict=True))
    say(
        f"model   {config.model.name}: {num_dense:,} dense weights; {len(embeddings.tables)} "
        f"tables, {rows:,} rows, {table_mib:,.0f} MiB + {state_mib:,.0f} MiB of optimizer state"
    )
    if num_ranks > 1:
        held = ", ".join(f"{(table + state) / 2**20:,.0f}" for table, state in sizes)
        say(f"memory  {held} MiB of rows and state on ranks 0 to {num_ranks - 1}")
    say(f"tables  {embeddings.backend_message}")
    if trainer.hot_set is not None:
        for line in trainer.hot_set.describe():
            say(f"host    {line}")
    for line in describe_semantics(config.optim):
        say(f"optim   {line.removeprefix('optimizers: ')}")
    local = "one process: local batch the same"
    if num_ranks > 1:
        local = (
            f"{num_ranks} processes: local batch about {config.data.batch_size / num_ranks:,.0f}"
        )
    say(
        f"run     {trainer.total_steps:,} steps of global batch {config.data.batch_size:,} "
        f"({local}); {trainer.folder.path}"
    )


def _announce_steps_without_weight(trainer: Trainer) -> None:
    if number := trainer.recorder.steps_without_weight:
        trainer.say(
            f"note    {number:,} of {trainer.steps_done:,} steps had only samples of the example "
            "weight 0: they changed nothing (data.schema.example_weight names the column)"
        )


def _test_best(
    trainer: Trainer, folder: RunFolder, data: dict[str, Any], say: Callable[[str], None]
) -> dict[str, Any]:
    """Tests the best model; returns the `data` and `eval` parts of result.json."""
    dataset = trainer.dataset
    part = "test" if dataset.num_rows("test") else "valid"
    tested: EvalResult | None = None
    teacher: EvalResult | None = None
    if dataset.num_rows(part):
        kept = trainer.load_best()
        metrics = trainer.evaluate(part)
        tested = metrics.result()
        if not trainer.is_first:
            return {}
        teacher = teacher_result(dataset, part)
        with side_output("the test's line is missing there"):
            folder.append_metrics(
                {
                    "step": kept.step,
                    "samples": trainer.recorder.samples_at(kept.step),
                    "eval": {"split": part, "model": kept.which, **tested.as_dict()},
                }
            )
        with side_output("the report has no curves"):
            write_evaluation(folder, part, metrics, trainer.recorder.history)
        if kept.which != "best":
            say(NO_BEST)
        say(f"{part:<7} {describe_eval(tested)}  (model of step {kept.step:,})")
        if teacher is not None:
            say(f"teacher {describe_eval(teacher)}  (the best anyone can reach on these rows)")
    else:
        say("test    no rows to evaluate on; see data.schema.split")
    return {
        "data": data
        | {
            "best_auc": teacher.auc if teacher else None,
            "best_logloss": teacher.logloss if teacher else None,
            "unknown_id_share": dataset.manifest.unknown_id_share(part),
        },
        "eval": eval_figures(tested),
    }


def write_evaluation(
    folder: RunFolder, part: str, metrics: BinaryMetrics, history: list[dict[str, Any]]
) -> None:
    """Writes the curves that the report draws."""
    values = {
        "split": part,
        "calibration_curve": metrics.calibration_curve(),
        "roc_curve": metrics.roc_curve(),
        "history": history,
    }
    folder.write_text("evaluation.json", json.dumps(values) + "\n")


def describe_eval(result: EvalResult) -> str:
    """One line: `AUC 0.7912  log loss 0.4561  NE 0.8012  calibration 1.003  samples 100,000`."""

    def shown(value: float | None, decimals: int = 4) -> str:
        return "undefined" if value is None else f"{value:.{decimals}f}"

    return (
        f"AUC {shown(result.auc)}  log loss {shown(result.logloss)}  NE {shown(result.ne)}  "
        f"calibration {shown(result.calibration, 3)}  samples {result.num_samples:,}"
    )
