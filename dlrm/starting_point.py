"""Where a run's model comes from: a checkpoint of its own, another run's, or start values."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.parquet import PreparedDataset
from dlrm.build import build_model, build_tables
from dlrm.checkpoint import CheckpointInfo
from dlrm.checkpoint_load import check_shapes
from dlrm.config import TrainRun
from dlrm.resume import ResumePoint, check_fits, find_resume_point, stored_plan
from dlrm.tensor_file import DamagedError
from dlrm.trainer import Trainer
from dlrm.warm_start import check_warm_start, find_warm_start, warm_start
from embeddings.plan_choice import PlannedLayout


@dataclass(frozen=True)
class StartingPoint:
    """What `train.resume` or `train.warm_start` names; with neither, the model's start values.

    In this order: `find` and `check` before anything in the run's folder is replaced, `layout` when
    the plan is made, `load` on every rank.

    Attributes:
        resume: where the run goes on.
        warm_start: the checkpoint of another run, whose model this one starts from.
    """

    resume: ResumePoint | None = None
    warm_start: CheckpointInfo | None = None

    @classmethod
    def find(cls, config: TrainRun, run_dir: Path) -> StartingPoint:
        """Looks for what the configuration names.

        Raises:
            UserError: where it isn't there.
        """
        return cls(find_resume_point(config, run_dir), find_warm_start(config, run_dir))

    @property
    def is_given(self) -> bool:
        """Whether there is a checkpoint to load."""
        return self.resume is not None or self.warm_start is not None

    @property
    def continues_folder(self) -> bool:
        """Whether the run's folder goes on being filled."""
        return self.resume is not None and self.resume.continues_folder

    @property
    def run_id(self) -> str | None:
        """The id of the run that goes on in its folder; None of another, or where it has none."""
        if self.resume is None or not self.continues_folder:
            return None
        return self.resume.info.run_id

    def check(self, config: TrainRun, dataset: PreparedDataset) -> None:
        """Refuses a checkpoint that doesn't fit the run.

        Raises:
            UserError: listing what differs.
        """
        if self.warm_start is not None:
            check_warm_start(self.warm_start, config, dataset)
        if self.resume is not None:
            info = self.resume.info
            check_fits(info, config, dataset)
            tables, _ = build_tables(config, dataset.manifest)
            with suppress(DamagedError):  # The ranks then look for an older one.
                check_shapes(info, tables, build_model(config, dataset.manifest))

    def layout(
        self, config: TrainRun, made: PlannedLayout, say: Callable[[str], None]
    ) -> PlannedLayout:
        """The checkpoint's plan, where a run goes on and nothing was asked for that differs; else
        the one that was made."""
        if self.resume is None:
            return made
        info = self.resume.info
        say(f"resume  step {info.step:,} of {info.folder}")
        try:
            plan = stored_plan(info, config, made.plan.world_size)
        except DamagedError as error:
            say(f"resume  {error}; rows go to a new plan")
            return made
        if plan is not None:
            return PlannedLayout(plan, dict.fromkeys(made.reasons, "the checkpoint's"))
        say(
            f"resume  rows go to a new plan: the checkpoint's is of {info.values['world_size']} "
            "rank(s) or other sharding settings"
        )
        return made

    def load(self, trainer: Trainer, beat: Callable[[], None]) -> dict[str, Any]:
        """Puts it in place, called by all ranks; returns what result.json is to have of it."""
        if self.resume is not None:
            _resume(trainer, self.resume.candidates)
        if self.warm_start is None:
            # A run that began with a warm start says so after it was resumed as well.
            began = trainer.warm_started
            return {} if began is None else {"warm_start": began}
        model, embeddings = trainer.model, trainer.embeddings
        started = warm_start(
            self.warm_start, trainer.config, trainer.dataset, model, embeddings, beat
        )
        for line in started.lines():
            trainer.say(line)
        trainer.warm_started = started.as_dict()
        return {"warm_start": trainer.warm_started}


def _resume(trainer: Trainer, candidates: list[CheckpointInfo]) -> None:
    """Goes on from the first checkpoint that isn't damaged."""
    for position, info in enumerate(candidates):
        try:
            trainer.resume(info)
            break
        except DamagedError as error:
            if position == len(candidates) - 1:
                raise
            trainer.say(f"resume  {error}")
            trainer.say(f"resume  going on from {candidates[position + 1].folder} instead")
    if trainer.steps_done >= trainer.total_steps:
        trainer.say(
            f"resume  nothing is left to train after step {trainer.steps_done:,}: raise "
            "train.epochs or train.max_steps to go on"
        )
