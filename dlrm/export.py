"""`dlrm export`: a trained model as files that need nothing of ours, tables or the whole."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from data.errors import UserError
from data.parquet import Order, PreparedDataset
from dlrm.checkpoint import CheckpointInfo
from dlrm.config import ExportRun, ScoreDataConfig, ScoreRun
from dlrm.export_folder import ExportFolder
from dlrm.export_model import export_model
from dlrm.export_tables import RowQuantizer, write_npy, write_parquet, write_quantized
from dlrm.run_folder import RunFolder
from dlrm.score import ScoreTask, TrainedModel, make_task, on_kept_model
from dlrm.scoring import evaluate
from dlrm.versions import versions
from embeddings.communicator import SingleProcess
from embeddings.sharded import ShardedEmbeddings
from embeddings.store import WEIGHT


def run_export(
    config: ExportRun, run_dir: Path, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Writes what `export.what` says and result.json, which it returns.

    Raises:
        UserError: naming the key, where the run, its checkpoint, its dataset or a table is missing,
            the folder is used, or the exported model predicts otherwise.
    """
    own_folder = RunFolder(run_dir)
    # One process, whatever the run was trained with.
    data = ScoreDataConfig(root=config.data.root, batch_size=config.data.batch_size)
    score = ScoreRun(run=config.run, checkpoint=config.checkpoint, part=config.part, data=data)
    return on_kept_model(
        lambda: make_task(score, run_dir, say),
        lambda task: _export(config, task, own_folder, say),
        say,
    )


def _export(
    config: ExportRun, task: ScoreTask, own_folder: RunFolder, say: Callable[[str], None]
) -> dict[str, Any]:
    run_dir = own_folder.path
    dataset = PreparedDataset(task.dataset_root, parts=())
    tables = _table_names(config, task.info, dataset)
    out = run_dir
    if config.export.out is not None:
        out = Path.cwd() / Path(config.export.out).expanduser()
    with ExportFolder(out) as folder:
        if config.export.what == "model":
            more = _export_model(config, task, folder, say)
        elif config.export.what == "quantized":
            more = _export_quantized(config, task, tables, folder, say)
        else:
            write = write_npy if config.export.format == "npy" else write_parquet
            entries = {name: write(task.info, dataset, name, folder) for name in tables}
            more = {"tables": entries}
        values: dict[str, Any] = {
            "status": "completed",
            "run": str(task.run_path),
            "checkpoint": str(task.info.folder),
            "step": task.info.step,
            "dataset": {"root": str(dataset.root), "digest": dataset.manifest.digest()},
            "versions": versions(),
            "what": config.export.what,
            "out": str(out),
            **more,
            "files": folder.files,
        }
        own_folder.write_json("result.json", values)
    say(
        f"export  {len(folder.files)} file(s), {folder.num_bytes / 1e6:,.1f} MB: {out}  (model of "
        f"step {task.info.step:,})"
    )
    return values


def _table_names(config: ExportRun, info: CheckpointInfo, dataset: PreparedDataset) -> list[str]:
    """The tables to write, checked against checkpoint and dataset."""
    names = config.export.tables or list(info.tables)
    unknown = [name for name in names if name not in info.tables]
    if unknown:
        raise UserError(
            f"export.tables: no such table: {', '.join(unknown)}; the tables are "
            + ", ".join(sorted(info.tables))
        )
    for name in names:
        rows = dataset.manifest.table_rows.get(name)
        if rows != info.tables[name].rows:
            raise UserError(
                f"checkpoint={config.checkpoint}: table {name} has {info.tables[name].rows:,} rows "
                f"there, but {'none' if rows is None else f'{rows:,}'} in {dataset.root}: they "
                "don't belong together"
            )
    return names


def _check_part(config: ExportRun, dataset: PreparedDataset) -> None:
    if not dataset.num_rows(config.part):
        sizes = ", ".join(f"{name} {part.rows:,}" for name, part in dataset.manifest.parts.items())
        raise UserError(
            f"part={config.part}: the part is empty, so there is nothing to compare predictions on "
            f"(rows: {sizes}); name another"
        )


def _export_model(
    config: ExportRun, task: ScoreTask, folder: ExportFolder, say: Callable[[str], None]
) -> dict[str, Any]:
    _check_part(config, PreparedDataset(task.dataset_root, parts=()))
    trained = TrainedModel(task, SingleProcess())
    entry = export_model(trained, config.part, config.export.samples, folder)
    compared = entry["compared"]
    say(
        f"compare {compared['samples']:,} rows of the {config.part} part: probabilities differ by "
        f"up to {compared['largest_difference']:.2g}"
    )
    if "largest_difference_from_bf16" in compared:
        say(
            "note    the run's train.precision is bf16; the exported model computes in fp32: up to "
            f"{compared['largest_difference_from_bf16']:.2g} from what `dlrm predict` gives"
        )
    return {"model": entry}


def _export_quantized(
    config: ExportRun,
    task: ScoreTask,
    tables: list[str],
    folder: ExportFolder,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Evaluates with the tables as they are, and again with the written ones in their place."""
    quantizer = RowQuantizer()
    dataset = PreparedDataset(task.dataset_root, parts=())
    _check_part(config, dataset)
    trained = TrainedModel(task, SingleProcess())
    before = _evaluate(trained, config)
    entries = {}
    for name in tables:
        put = partial(_replace_rows, trained.embeddings, name)
        entries[name] = write_quantized(task.info, name, folder, quantizer, put)
    after = _evaluate(trained, config)
    loss = None
    if before["auc"] is not None and after["auc"] is not None:
        loss = before["auc"] - after["auc"]
        say(
            f"auc     {before['auc']:.6f} on the {config.part} part, {after['auc']:.6f} with "
            f"{len(tables)} of {len(task.info.tables)} tables in int8: a loss of {loss:.6f}"
        )
    else:
        say(f"auc     undefined on the {config.part} part: it has one class")
    compared = {"part": config.part, "eval": before, "eval_int8": after, "auc_loss": loss}
    return {"tables": entries, "compared": compared}


def _evaluate(trained: TrainedModel, config: ExportRun) -> dict[str, Any]:
    batches = trained.dataset.batches(config.part, Order(config.data.batch_size))
    metrics = evaluate(trained.model, trained.embeddings, batches, trained.precision)
    return metrics.result().as_dict()


def _replace_rows(embeddings: ShardedEmbeddings, table: str, start: int, rows_RD: Tensor) -> None:
    embeddings.store.write(table, start, {WEIGHT: rows_RD})
