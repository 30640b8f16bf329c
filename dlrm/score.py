"""`dlrm evaluate` and `dlrm predict`: apply a run's model to a prepared part or to raw files."""

from __future__ import annotations

import functools
import hashlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data.batch import Batch
from data.errors import RawDataError, UserError
from data.files import naming, open_new
from data.manifest import load_manifest
from data.parquet import Order, PreparedDataset
from data.raw_batches import load_row_mapper, raw_batches
from data.raw_files import has_labels
from data.raw_inputs import expand_inputs
from data.write_pass import PartTally
from dlrm.build import build_embeddings, build_model, communicator
from dlrm.checkpoint import INFO_FILE, CheckpointInfo, find_checkpoint
from dlrm.checkpoint_load import load_model
from dlrm.config import ScoreRun, TrainRun, to_config
from dlrm.heartbeat import still_working
from dlrm.launch import WorkerContext, start
from dlrm.model import DLRM
from dlrm.planning import check_tables_fit, make_plan
from dlrm.run_folder import RunFolder, read_json
from dlrm.scoring import evaluate, loader_timeout, score_batches
from dlrm.train import NO_BEST, describe_eval, write_evaluation
from dlrm.versions import versions
from embeddings.communicator import Communicator
from embeddings.plan import Plan
from embeddings.sharded import ShardedEmbeddings

T = TypeVar("T")
_MOST_TRIES = 5


@dataclass(frozen=True)
class ScoreTask:
    """What every rank gets: a run, checked, and where its tables go now.

    Attributes:
        config: what is to be scored.
        run_path: the run's folder.
        stored: the run's own configuration.
        info: which of its models.
        dataset_root: the dataset that it was trained on.
        plan: who holds which rows; it needn't be the plan of the training.
        run_dir: the output folder, claimed.
    """

    config: ScoreRun
    run_path: Path
    stored: TrainRun
    info: CheckpointInfo
    dataset_root: Path
    plan: Plan
    run_dir: Path


def make_task(config: ScoreRun, run_dir: Path, say: Callable[[str], None]) -> ScoreTask:
    """Opens the run.

    Raises:
        UserError: where the run, its model or its dataset is missing, or the dataset has changed.
    """
    assert config.run is not None
    run_path = Path.cwd() / Path(config.run).expanduser()
    path = run_path / "config.yaml"
    if not path.is_file():
        raise UserError(f"run={config.run}: no run folder (no config.yaml in {run_path})")
    stored = stored_config(path)
    info = find_checkpoint(config.checkpoint, run_path, "checkpoint")
    if config.checkpoint == "best" and info.which != "best":
        say(NO_BEST)
    root = dataset_root_of(config, run_path)
    # Values travel as they did in training: rounding them otherwise would be another model.
    sharding = replace(config.sharding, wire=stored.sharding.wire)
    placed = replace(stored, sharding=sharding, launch=config.launch)
    dataset = PreparedDataset(root, parts=())
    layout = make_plan(placed, dataset, config.launch.nproc)
    check_tables_fit(placed, dataset, layout.plan, config.launch.nproc)
    return ScoreTask(config, run_path, stored, info, root, layout.plan, run_dir)


def parts_of(config: ScoreRun) -> list[str]:
    """The parts of the dataset that are read: none for raw files, whose server may lack them."""
    return [config.part] if config.data.raw is None else []


def dataset_root_of(config: ScoreRun, run_path: Path) -> Path:
    path = run_path / "dataset.json"
    if not path.is_file():
        raise UserError(f"run={config.run}: the run ended before it opened its data (no {path})")
    result = read_json(path)
    if not isinstance(result, dict) or not {"root", "digest"} <= result.keys():
        raise UserError(f"{path} is damaged: it isn't what the run wrote")
    root = Path(result["root"])
    if config.data.root is not None:
        root = Path.cwd() / Path(config.data.root).expanduser()
    found = load_manifest(root).digest()
    if found != result["digest"]:
        raise UserError(
            f"the dataset in {root} isn't the one that the run was trained on (its digest "
            "differs): vocabularies may differ too. Name the right one with data.root="
        )
    return root


class TrainedModel:
    """One rank's part of a run's model, ready to score; optimizer state is not loaded.

    Args:
        task: the opened run.
        comm: the ranks.
    """

    def __init__(self, task: ScoreTask, comm: Communicator) -> None:
        self.task, self.comm = task, comm
        self.precision = task.stored.train.precision
        self.dataset = PreparedDataset(task.dataset_root, parts_of(task.config))
        self.embeddings: ShardedEmbeddings = build_embeddings(
            task.stored,
            self.dataset.manifest,
            for_training=False,
            plan=task.plan,
            comm=comm,
            fill=False,  # All rows are loaded.
        )
        self.model: DLRM = build_model(task.stored, self.dataset.manifest)
        load_model(task.info, self.model, self.embeddings)
        # What is scored: of raw files counted on the way, of a prepared part known.
        self.tally = PartTally([f.name for f in self.dataset.features])

    def unknown_id_share(self) -> dict[str, float]:
        """Share of ids without a row of their own in what was scored, by feature."""
        config = self.task.config
        if config.data.raw is None:
            return self.dataset.manifest.unknown_id_share(config.part)
        return self.tally.info([], 0).unknown_id_share()

    def summary(self) -> dict[str, Any]:
        """The part of result.json that tells of the model."""
        return {
            "status": "completed",
            "run": str(self.task.run_path),
            "model": self.task.info.which,
            "step": self.task.info.step,
            "world_size": self.comm.world_size,
            "plan_digest": self.task.plan.digest(),
            "versions": versions(),
        }


def run_evaluate(
    config: ScoreRun, run_dir: Path, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Prints and writes the metrics of a trained model."""
    if config.out is not None:
        warnings.warn(f"out={config.out} is ignored: `evaluate` writes no rows", stacklevel=2)
    RunFolder(run_dir)

    def score(task: ScoreTask) -> dict[str, Any]:
        values: dict[str, Any] = start(
            evaluate_rank, (task,), config.launch, run_dir, here_only=(say,)
        )
        return values

    return on_kept_model(lambda: make_task(config, run_dir, say), score, say)


def on_kept_model(
    find: Callable[[], ScoreTask], use: Callable[[ScoreTask], T], say: Callable[[str], None]
) -> T:
    """`use(find())`; again with the newer model, where a run that goes on has removed the one that
    was found while it was read."""
    for _ in range(_MOST_TRIES):
        task = find()
        folder = task.info.folder
        try:
            return use(task)
        except UserError:  # The ranks' errors have no type of their own here.
            if (folder / INFO_FILE).is_file():
                raise
        if task.config.checkpoint not in ("best", "latest"):
            break
        say(f"note    {folder} is gone: the run that goes on has newer ones")
    raise UserError(
        f"{folder} was removed while it was read: the run that goes on there keeps no more than "
        "train.checkpoint_keep checkpoints, and the best"
    )


def evaluate_rank(
    context: WorkerContext, task: ScoreTask, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """One rank of an evaluation; the first prints and writes."""
    with still_working(context.heartbeat):
        return _evaluate_rank(context, task, say)


def _evaluate_rank(
    context: WorkerContext, task: ScoreTask, say: Callable[[str], None]
) -> dict[str, Any]:
    context.heartbeat.beat(0, "load")
    comm = communicator(context, task.config.launch)
    trained = TrainedModel(task, comm)
    part = task.config.part if task.config.data.raw is None else "raw"
    batches = _batches(trained, need_labels=True)
    metrics = evaluate(
        trained.model,
        trained.embeddings,
        batches,
        trained.precision,
        lambda: context.heartbeat.beat(0, "evaluate"),
        loader_timeout(task.config.launch, comm),
    )
    if comm.rank != 0:
        return {}
    folder = RunFolder.of_this_run(task.run_dir)
    result = metrics.result()
    write_evaluation(folder, part, metrics, [])
    shares = trained.unknown_id_share()
    values = trained.summary() | {
        "split": part,
        "eval": result.as_dict(),
        "unknown_id_share": shares,
    }
    folder.write_json("result.json", values)
    _warn_of_unknown_ids(shares, say)
    say(f"{part:<7} {describe_eval(result)}  (model of step {task.info.step:,})")
    return values


def run_predict(config: ScoreRun, run_dir: Path, say: Callable[[str], None] = print) -> Path:
    """Writes `row`, `probability`, `logit` and, where there are labels, `label`, in row order."""
    RunFolder(run_dir)
    if config.out is not None:
        out = Path.cwd() / Path(config.out).expanduser()
        if out.exists():
            raise UserError(f"out={out} exists; name another file or remove it")

    def score(task: ScoreTask) -> Path:
        written: Path = start(predict_rank, (task,), config.launch, run_dir, here_only=(say,))
        return written

    return on_kept_model(lambda: make_task(config, run_dir, say), score, say)


def predict_rank(
    context: WorkerContext, task: ScoreTask, say: Callable[[str], None] = print
) -> Path:
    """One rank of a prediction; the first collects and writes."""
    with still_working(context.heartbeat):
        return _predict_rank(context, task, say)


def _predict_rank(context: WorkerContext, task: ScoreTask, say: Callable[[str], None]) -> Path:
    context.heartbeat.beat(0, "load")
    comm = communicator(context, task.config.launch)
    trained = TrainedModel(task, comm)
    out = task.run_dir / "predictions.parquet"
    if task.config.out is not None:
        out = Path.cwd() / Path(task.config.out).expanduser()
    batches = _batches(trained, need_labels=False)
    # A name that nobody else's file has.
    temporary = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        if comm.rank == 0:
            out.parent.mkdir(parents=True, exist_ok=True)
        beat = functools.partial(context.heartbeat.beat, 0, "predict")
        with PredictionFile(temporary, out) as file:
            num_rows = _write_predictions(trained, batches, file, beat)
        if comm.rank != 0:
            return out
        with naming(out):
            os.replace(temporary, out)
    finally:
        if comm.rank == 0:
            temporary.unlink(missing_ok=True)
    shares = trained.unknown_id_share()
    values = trained.summary() | {
        "predictions": {"file": str(out), "rows": num_rows},
        "unknown_id_share": shares,
    }
    RunFolder.of_this_run(task.run_dir).write_json("result.json", values)
    _warn_of_unknown_ids(shares, say)
    say(f"predict {num_rows:,} rows: {out}  (model of step {task.info.step:,})")
    return out


def _warn_of_unknown_ids(shares: dict[str, float], say: Callable[[str], None]) -> None:
    mostly = {name: share for name, share in shares.items() if share > 0.5}
    if mostly:
        worst = sorted(mostly.items(), key=lambda item: -item[1])[:3]
        shown = ", ".join(f"{name} {share:.0%}" for name, share in worst)
        say(
            f"note    most ids of {len(mostly)} feature(s) are unknown to the model ({shown}): is "
            "this the data that it was trained for?"
        )


class PredictionFile:
    """A parquet file that is made when its first rows come, and on disk when it is closed.

    Args:
        path: where it is written.
        out: the name that it is to get; errors of the system name it.
    """

    def __init__(self, path: Path, out: Path) -> None:
        self._path, self._out = path, out
        self._sink: BinaryIO | None = None
        self._writer: pq.ParquetWriter | None = None

    def __enter__(self) -> PredictionFile:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self._writer is None or self._sink is None:
            return
        with suppress(*([OSError] if error else [])), naming(self._out), self._sink:
            self._writer.close()
            self._sink.flush()
            os.fsync(self._sink.fileno())

    def write(self, rows: pa.Table) -> None:
        """Appends rows."""
        with naming(self._out):
            if self._writer is None:
                self._sink = open_new(self._path)
                self._writer = pq.ParquetWriter(self._sink, rows.schema, compression="zstd")
            self._writer.write_table(rows)


def _write_predictions(
    trained: TrainedModel,
    batches: Iterator[Batch],
    file: PredictionFile,
    beat: Callable[[], None],
) -> int:
    """Writes each batch's rows as they come, collected by the first rank; returns their number."""
    comm = trained.comm
    num_rows = 0
    scored = score_batches(
        trained.model,
        trained.embeddings,
        batches,
        trained.precision,
        beat,
        loader_timeout(trained.task.config.launch, comm),
    )
    for batch, logits_B in scored:
        label_B = None if batch.label_B is None else batch.label_B.numpy()
        own = (batch.row_B.numpy(), logits_B.double().numpy(), label_B)
        of_ranks = comm.all_gather_object(own)
        num_rows += sum(len(rows) for rows, *_ in of_ranks)
        if comm.rank == 0:
            file.write(_prediction_rows(of_ranks))
    if not num_rows:
        raise UserError("there are no rows to predict")
    return num_rows


def _prediction_rows(of_ranks: list[tuple[Any, Any, Any]]) -> pa.Table:
    rows = np.concatenate([rows for rows, *_ in of_ranks])
    order = np.argsort(rows)
    logits = np.concatenate([logits for _, logits, _ in of_ranks])[order]
    columns = {
        "row": pa.array(rows[order]),
        "probability": pa.array(1 / (1 + np.exp(-logits))),
        "logit": pa.array(logits),
    }
    if all(labels is not None for *_, labels in of_ranks):
        labels = np.concatenate([labels for *_, labels in of_ranks])
        columns["label"] = pa.array(labels[order].astype(np.int8))
    return pa.table(columns)


def _batches(trained: TrainedModel, *, need_labels: bool) -> Iterator[Batch]:
    """This rank's share of what is to be scored: a prepared part, or raw files through the stored
    vocabulary. Raw files are read by every rank, which keeps its share of each batch."""
    config, comm = trained.task.config, trained.comm
    if config.data.raw is None:
        trained.dataset.check(config.part)
        order = Order(config.data.batch_size, rank=comm.rank, world_size=comm.world_size)
        return trained.dataset.batches(config.part, order)
    files = expand_inputs(config.data.raw, Path.cwd(), "data.raw")
    manifest = trained.dataset.manifest
    # Labels that aren't needed may be empty: such a file is one without labels.
    labelled = [has_labels(path, manifest.schema, with_value=not need_labels) for path in files]
    if need_labels and not all(labelled):
        unlabelled = files[labelled.index(False)]
        label = manifest.schema.label.column
        raise RawDataError(
            str(unlabelled), 1, f"there is no label column ({label}); use `dlrm predict`"
        )
    if any(labelled) != all(labelled):
        raise UserError("data.raw mixes files with and without labels; predict them apart")
    mapper = load_row_mapper(trained.dataset.root, manifest)
    if all(labelled) and not need_labels:
        # Nothing here asks for the weights of training.
        manifest = replace(manifest, schema=replace(manifest.schema, example_weight=None))
    batches = raw_batches(
        manifest, mapper, files, all(labelled), config.data.batch_size, trained.tally
    )
    if comm.world_size == 1:
        return batches
    return (
        batch.narrow(
            batch.batch_size * comm.rank // comm.world_size,
            batch.batch_size * (comm.rank + 1) // comm.world_size,
        )
        for batch in batches
    )


def stored_config(path: Path) -> TrainRun:
    """A run's configuration.

    Raises:
        UserError: naming the file, where it isn't what the run wrote.
    """
    text = path.read_bytes()
    result = path.with_name("result.json")
    written = read_json(result) if result.is_file() else {}
    digest = written.get("config_digest") if isinstance(written, dict) else None
    # What was cut at the end of a line is a configuration, too, but another one.
    if digest is not None and digest != hashlib.sha256(text).hexdigest():
        raise UserError(
            f"{path} is damaged: its digest isn't the one in {result.name}; the run's checkpoints "
            "have copies of it"
        )
    schema = OmegaConf.structured(TrainRun)
    try:
        loaded = OmegaConf.create(text.decode())
        config: TrainRun = to_config(OmegaConf.merge(schema, loaded))  # type: ignore[arg-type]
    except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, UserError) as error:
        raise UserError(f"{path} is damaged, or of another version: {error}") from error
    return config
