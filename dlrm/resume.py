"""`train.resume`: which checkpoint a run goes on from, and whether it fits the run."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from data.errors import UserError
from data.parquet import PreparedDataset
from dlrm.checkpoint import CheckpointInfo, Checkpoints, find_checkpoint
from dlrm.config import TrainRun, WarmStartConfig
from dlrm.own_files import CHECKPOINTS, EARLIER_RUN
from dlrm.run_folder import read_run_id
from dlrm.torchrun import launch_id
from embeddings.plan import Plan


@dataclass(frozen=True)
class ResumePoint:
    """Where a run goes on.

    Attributes:
        candidates: the checkpoint, and older ones of its run for the case that it is damaged.
        continues_folder: it is one of the run's own folder, which then goes on being filled.
    """

    candidates: list[CheckpointInfo]
    continues_folder: bool

    @property
    def info(self) -> CheckpointInfo:
        return self.candidates[0]


def is_restarted(run_dir: Path) -> bool:
    """Whether this is a group of workers that `torchrun` has restarted, and the folder is that of
    the group before it. It isn't where that group was refused the folder, or ended before it."""
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0:
        return False
    try:
        result = json.loads((run_dir / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(result.get("torchrun") == launch_id())


def with_restarts(config: TrainRun, run_dir: Path) -> TrainRun:
    """What a group of workers that `torchrun` has restarted does: it goes on from its own latest
    checkpoint or, where it had none yet, starts as it did the first time."""
    if not is_restarted(run_dir) or not _candidates(Checkpoints(run_dir)):
        return config
    train = replace(config.train, resume="latest", overwrite=False, warm_start=WarmStartConfig())
    return replace(config, train=train)


def find_resume_point(config: TrainRun, run_dir: Path) -> ResumePoint | None:
    """The checkpoint that `train.resume` names; None where it is null.

    Raises:
        UserError: where there is none.
    """
    given = config.train.resume
    if given is None:
        return None
    if given in ("latest", "best") and not (run_dir / "checkpoints").is_dir():
        waiting = run_dir / EARLIER_RUN
        raise UserError(
            f"train.resume={given}: {run_dir} holds no checkpoints; name the run's folder with "
            "hydra.run.dir=, or a checkpoint with train.resume=PATH"
            + (f". {waiting} holds the run that was to be replaced" if waiting.is_dir() else "")
        )
    info = find_checkpoint(given, run_dir, "train.resume")
    is_own = is_of_run(info, run_dir)
    # Of a checkpoint of another run, which was named by its path, another isn't meant.
    others = _candidates(Checkpoints(run_dir)) if is_own else []
    return ResumePoint([info, *(other for other in others if other.step < info.step)], is_own)


def _candidates(checkpoints: Checkpoints) -> list[CheckpointInfo]:
    """The whole ones, the latest first; `Checkpoints.find` names those that are damaged."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return checkpoints.candidates("latest")


def is_of_run(info: CheckpointInfo, run_path: Path) -> bool:
    """Whether a checkpoint lies in a run's folder, if only as a link, and is the run's own."""
    if info.folder.parent.resolve() != (run_path / CHECKPOINTS).resolve():
        return False
    own_id = read_run_id(run_path)
    return None in (own_id, info.run_id) or own_id == info.run_id


def about_run(config: TrainRun, dataset: PreparedDataset, plan: Plan | None) -> dict[str, Any]:
    """What a checkpoint says of its run, for `check_fits` and for people."""
    return {
        "seed": config.seed,
        "batch_size": config.data.batch_size,
        "shuffle": config.data.shuffle,
        "num_train_rows": dataset.num_rows("train"),
        "data_digest": dataset.manifest.digest(),
        "data_root": str(dataset.root.resolve()),
        "dense_columns": dataset.manifest.dense_columns,
        "dense_transforms": {
            name: column.transform for name, column in dataset.manifest.schema.dense.items()
        },
        "dense_moments": {
            name: [moments.mean, moments.deviation]
            for name, moments in dataset.manifest.moments.items()
        },
        "features": [asdict(feature) for feature in dataset.manifest.features],
        "model": asdict(config.model),
        "optim": {"sparse": asdict(config.optim.sparse), "dense": asdict(config.optim.dense)},
        "sharding": asdict(config.sharding),
        "world_size": 1 if plan is None else plan.world_size,
        "plan_digest": None if plan is None else plan.digest(),
    }


def check_fits(info: CheckpointInfo, config: TrainRun, dataset: PreparedDataset) -> None:
    """Refuses to go on with other data, another order of samples, or another kind of optimizer.

    Raises:
        UserError: listing what differs, and the keys.
    """
    stored, wanted = info.values, about_run(config, dataset, None)
    differing = [
        f"{key}: stored {stored[name]}, wanted {wanted[name]}"
        for name, key in (("data_digest", "data"), ("seed", "seed"), ("shuffle", "data.shuffle"))
        if stored[name] != wanted[name]
    ]
    for part in ("sparse", "dense"):
        old, new = (values["optim"][part]["name"] for values in (stored, wanted))
        if old != new:
            differing.append(f"optim.{part}.name: stored {old}, wanted {new}")
    if differing:
        raise UserError(
            f"train.resume: {info.folder} is of another run:\n  "
            + "\n  ".join(differing)
            + "\n(to start anew from its model, use train.warm_start.path=)"
        )
    next_batch(info, config, dataset)


def next_batch(info: CheckpointInfo, config: TrainRun, dataset: PreparedDataset) -> tuple[int, int]:
    """(epoch, batch) at which the run goes on: each sample that is left in the epoch, once.

    Raises:
        UserError: for another `data.batch_size`, at a place where none of its batches begins.
    """
    progress, size = info.progress, config.data.batch_size
    samples = progress.batch * info.values["batch_size"]
    if samples % size:
        raise UserError(
            f"data.batch_size={size}: {info.folder} is {samples:,} samples into an epoch, which "
            f"isn't a multiple; go on with data.batch_size={info.values['batch_size']}, or from a "
            "checkpoint at an epoch's end"
        )
    epoch, batch = progress.epoch, samples // size
    if batch >= dataset.num_batches("train", size):
        return epoch + 1, 0
    return epoch, batch


def stored_plan(info: CheckpointInfo, config: TrainRun, world_size: int) -> Plan | None:
    """The checkpoint's plan, where the run's settings still ask for it; so bits stay equal."""
    values = info.values
    if values["world_size"] != world_size or "plan.json" not in values["files"]:
        return None
    if values["sharding"] != asdict(config.sharding):
        return None
    return Plan.from_json(info.text("plan.json"))
