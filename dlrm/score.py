"""`dlrm evaluate` and `dlrm predict`: apply a run's model to a prepared part or to raw files."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from omegaconf import OmegaConf

from data.batch import Batch
from data.errors import RawDataError, UserError
from data.parquet import Order, PreparedDataset
from data.raw_batches import load_row_mapper, raw_batches
from data.raw_files import expand_inputs, has_labels
from data.write_pass import PartTally
from dlrm.build import build_embeddings, build_model, set_threads
from dlrm.checkpoint import Checkpoints, load_model
from dlrm.config import ScoreRun, TrainRun, to_config
from dlrm.model import DLRM
from dlrm.run_folder import RunFolder
from dlrm.scoring import evaluate, score_batches
from dlrm.train import NO_BEST, describe_eval, versions, write_evaluation
from embeddings.sharded import ShardedEmbeddings


class TrainedModel:
    """The model of a run folder, ready to score; optimizer state is not loaded.

    Args:
        config: which run and which of its models.

    Raises:
        UserError: where the run, its model or its dataset is missing, or the dataset has changed.
    """

    def __init__(self, config: ScoreRun) -> None:
        assert config.run is not None
        self.run_path = Path.cwd() / Path(config.run).expanduser()
        stored = self.run_path / "config.yaml"
        if not stored.is_file():
            raise UserError(f"run={config.run}: no run folder (no config.yaml in {self.run_path})")
        self.config = _stored_config(stored)
        self._wanted = config.checkpoint
        self.info = Checkpoints(self.run_path).find(config.checkpoint)
        self.dataset = PreparedDataset(self._dataset_root(config))
        set_threads(config.launch)
        self.embeddings: ShardedEmbeddings = build_embeddings(
            self.config, self.dataset.manifest, for_training=False
        )
        self.model: DLRM = build_model(self.config, self.dataset.manifest)
        load_model(self.info, self.model, self.embeddings.store)
        # What is scored: of raw files counted on the way, of a prepared part known.
        self.tally = PartTally([f.name for f in self.dataset.features])

    def unknown_id_share(self, config: ScoreRun) -> dict[str, float]:
        """Share of ids without a row of their own in what was scored, by feature."""
        if config.data.raw is None:
            return self.dataset.manifest.unknown_id_share(config.part)
        return self.tally.info([], 0).unknown_id_share()

    @property
    def has_no_best(self) -> bool:
        """Whether the best model was asked for and the latest had to do."""
        return self.info.which != self._wanted

    def _dataset_root(self, config: ScoreRun) -> Path:
        path = self.run_path / "dataset.json"
        if not path.is_file():
            raise UserError(
                f"run={config.run}: the run ended before it opened its data (no {path})"
            )
        result = json.loads(path.read_text())
        root = Path(result["root"])
        if config.data.root is not None:
            root = Path.cwd() / Path(config.data.root).expanduser()
        found = PreparedDataset(root).manifest.digest()
        if found != result["digest"]:
            raise UserError(
                f"the dataset in {root} isn't the one that the run was trained on (its digest "
                "differs): vocabularies may differ too. Name the right one with data.root="
            )
        return root


def run_evaluate(
    config: ScoreRun, run_dir: Path, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """Prints and writes the metrics of a trained model."""
    if config.out is not None:
        warnings.warn(f"out={config.out} is ignored: `evaluate` writes no rows", stacklevel=2)
    folder = RunFolder(run_dir)
    trained = TrainedModel(config)
    if trained.has_no_best:
        say(NO_BEST)
    precision = trained.config.train.precision
    part = config.part if config.data.raw is None else "raw"
    batches = _batches(trained, config, need_labels=True)
    metrics = evaluate(trained.model, trained.embeddings, batches, precision)
    result = metrics.result()
    write_evaluation(folder, part, metrics, [])
    values = {
        "status": "completed",
        "run": str(trained.run_path),
        "model": trained.info.which,
        "step": trained.info.step,
        "split": part,
        "versions": versions(),
        "eval": result.as_dict(),
        "unknown_id_share": trained.unknown_id_share(config),
    }
    folder.write_json("result.json", values)
    _warn_of_unknown_ids(trained.unknown_id_share(config), say)
    say(f"{part:<7} {describe_eval(result)}  (model of step {trained.info.step:,})")
    return values


def run_predict(config: ScoreRun, run_dir: Path, say: Callable[[str], None] = print) -> Path:
    """Writes `row`, `probability`, `logit` and, where there are labels, `label`, in row order."""
    folder = RunFolder(run_dir)
    trained = TrainedModel(config)
    if trained.has_no_best:
        say(NO_BEST)
    out = folder.path / "predictions.parquet"
    if config.out is not None:
        out = Path.cwd() / Path(config.out).expanduser()
        if out.exists():
            raise UserError(f"out={out} exists; name another file or remove it")
        out.parent.mkdir(parents=True, exist_ok=True)
    batches = _batches(trained, config, need_labels=False)
    temporary = out.with_name(out.name + ".partial")
    try:
        num_rows = _write_predictions(trained, batches, temporary)
        os.replace(temporary, out)
    finally:
        temporary.unlink(missing_ok=True)
    values = {
        "status": "completed",
        "run": str(trained.run_path),
        "model": trained.info.which,
        "step": trained.info.step,
        "versions": versions(),
        "predictions": {"file": str(out), "rows": num_rows},
        "unknown_id_share": trained.unknown_id_share(config),
    }
    folder.write_json("result.json", values)
    _warn_of_unknown_ids(trained.unknown_id_share(config), say)
    say(f"predict {num_rows:,} rows: {out}  (model of step {trained.info.step:,})")
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


def _write_predictions(trained: TrainedModel, batches: Iterator[Batch], path: Path) -> int:
    writer: pq.ParquetWriter | None = None
    num_rows = 0
    try:
        scored = score_batches(
            trained.model, trained.embeddings, batches, trained.config.train.precision
        )
        for batch, logits_B in scored:
            order = np.argsort(batch.row_B.numpy())
            logits = logits_B.double().numpy()[order]
            columns = {
                "row": pa.array(batch.row_B.numpy()[order]),
                "probability": pa.array(1 / (1 + np.exp(-logits))),
                "logit": pa.array(logits),
            }
            if batch.label_B is not None:
                columns["label"] = pa.array(batch.label_B.numpy()[order].astype(np.int8))
            table = pa.table(columns)
            if writer is None:
                writer = pq.ParquetWriter(path, table.schema, compression="zstd")
            writer.write_table(table)
            num_rows += table.num_rows
    finally:
        if writer is not None:
            writer.close()
    if writer is None:
        raise UserError("there are no rows to predict")
    return num_rows


def _batches(trained: TrainedModel, config: ScoreRun, *, need_labels: bool) -> Iterator[Batch]:
    """What is to be scored: a prepared part, or raw files through the stored vocabulary."""
    if config.data.raw is None:
        trained.dataset.check(config.part)
        return trained.dataset.batches(config.part, Order(config.data.batch_size))
    files = expand_inputs(config.data.raw, Path.cwd(), "data.raw")
    manifest = trained.dataset.manifest
    labelled = [has_labels(path, manifest.schema) for path in files]
    if need_labels and not all(labelled):
        unlabelled = files[labelled.index(False)]
        label = manifest.schema.label.column
        raise RawDataError(
            str(unlabelled), 1, f"there is no label column ({label}); use `dlrm predict`"
        )
    if any(labelled) != all(labelled):
        raise UserError("data.raw mixes files with and without labels; predict them apart")
    mapper = load_row_mapper(trained.dataset.root, manifest)
    return raw_batches(
        manifest, mapper, files, all(labelled), config.data.batch_size, trained.tally
    )


def _stored_config(path: Path) -> TrainRun:
    schema = OmegaConf.structured(TrainRun)
    config: TrainRun = to_config(OmegaConf.merge(schema, OmegaConf.load(path)))  # type: ignore[arg-type]
    return config
