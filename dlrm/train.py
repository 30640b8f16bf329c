"""`dlrm train`: from configuration to result.json and report.html."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from data.parquet import PreparedDataset
from dlrm.build import set_threads
from dlrm.config import TrainRun
from dlrm.datasets import open_dataset
from dlrm.display import PrepareDisplay
from dlrm.metrics import BinaryMetrics, EvalResult
from dlrm.optim import describe_semantics
from dlrm.report import write_report
from dlrm.run_folder import NOT_FINISHED, RunFolder
from dlrm.scoring import teacher_result
from dlrm.trainer import Trainer, eval_figures

NO_BEST = (
    "note    no evaluation on a valid part had an AUC, so no model is the best: this is the latest"
)


def run_train(
    config: TrainRun, config_yaml: str, run_dir: Path, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Prepares what is missing, trains, tests the best model, and writes everything down.

    Args:
        config: the checked configuration.
        config_yaml: the same as text, for the run folder.
        run_dir: the output folder.
        say: prints one line for the user.

    Returns:
        What result.json holds.
    """
    set_threads(config.launch)
    folder = RunFolder(run_dir, overwrite=config.train.overwrite)
    folder.write_text("config.yaml", config_yaml)
    result: dict[str, Any] = {
        "status": NOT_FINISHED,
        "world_size": 1,
        "seed": config.seed,
        "versions": versions(),
        "num_threads": torch.get_num_threads(),
        "config_digest": hashlib.sha256(config_yaml.encode()).hexdigest(),
    }
    folder.write_json("result.json", result)
    try:
        with PrepareDisplay() as display:
            dataset = open_dataset(config.data, Path.cwd(), display)
        dataset.check("train")
        manifest = dataset.manifest
        recorded = {"root": str(dataset.root.resolve()), "digest": manifest.digest()}
        folder.write_json("dataset.json", recorded)
        result["data"] = {
            "name": config.data.name,
            "synthetic": manifest.synthetic is not None,
            **recorded,
        }
        _announce_data(config, dataset, say)
        trainer = Trainer(config, dataset, folder, say)
        _announce_model(config, trainer, say)
        folder.write_text("plan.json", trainer.embeddings.plan.to_json())
        result["plan_digest"] = trainer.embeddings.plan.digest()
        try:
            trainer.fit()
            result["model_digest"] = trainer.digest()
        finally:
            result["train"] = trainer.recorder.figures(
                trainer.steps_done / trainer.batches_per_epoch
            )
            result["memory"] = trainer.memory()
        result |= _test_best(trainer, folder, result["data"], say)
        result["status"] = "completed"
    except BaseException as error:
        result["status"] = f"failed: {type(error).__name__}: {error}"
        raise
    finally:
        folder.write_json("result.json", result)
        report = write_report(run_dir)
    say(f"report  {report}")
    return result


def versions() -> dict[str, str]:
    """Versions of what the figures depend on."""
    found = {"torch": str(torch.__version__)}
    for name in ("fbgemm-gpu-cpu", "fbgemm-gpu", "numpy", "pyarrow", "hydra-core", "dlrm-system"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _announce_data(config: TrainRun, dataset: PreparedDataset, say: Callable[[str], None]) -> None:
    manifest = dataset.manifest
    sizes = ", ".join(f"{name} {part.rows:,}" for name, part in manifest.parts.items())
    if manifest.synthetic is not None:
        say("data    SYNTHETIC, drawn from a known teacher: results say nothing about real clicks")
    say(f"data    {config.data.name}: {sizes} rows; {dataset.root}")


def _announce_model(config: TrainRun, trainer: Trainer, say: Callable[[str], None]) -> None:
    num_dense = sum(p.numel() for p in trainer.model.parameters())
    store = trainer.embeddings.store
    rows = sum(table.rows for table in store.tables)
    say(
        f"model   {config.model.name}: {num_dense:,} dense weights; {len(store.tables)} tables, "
        f"{rows:,} rows, {store.table_bytes() / 2**20:,.0f} MiB + "
        f"{store.state_bytes() / 2**20:,.0f} MiB of optimizer state"
    )
    say(f"tables  {trainer.embeddings.backend_message}")
    for line in describe_semantics(config.optim):
        say(f"optim   {line.removeprefix('optimizers: ')}")
    say(
        f"run     {trainer.total_steps:,} steps of global batch {config.data.batch_size:,} "
        f"(one process: local batch the same); {trainer.folder.path}"
    )


def _test_best(
    trainer: Trainer, folder: RunFolder, data: dict[str, Any], say: Callable[[str], None]
) -> dict[str, Any]:
    """Tests the best model; returns the `data`, `eval` and `comm` parts of result.json."""
    dataset = trainer.dataset
    part = "test" if dataset.num_rows("test") else "valid"
    tested: EvalResult | None = None
    teacher: EvalResult | None = None
    if dataset.num_rows(part):
        kept = trainer.load_best()
        metrics = trainer.evaluate(part)
        tested, teacher = metrics.result(), teacher_result(dataset, part)
        folder.append_metrics(
            {
                "step": kept.step,
                "samples": trainer.recorder.samples_at(kept.step),
                "eval": {"split": part, "model": kept.which, **tested.as_dict()},
            }
        )
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
        "comm": {
            "collectives_per_step": 0,
            "dense_collectives_per_step": 0,
            "bytes_sent_per_step": {"ids": 0, "rows": 0, "grads": 0, "dense": 0},
            "imbalance": 1.0,
        },
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
