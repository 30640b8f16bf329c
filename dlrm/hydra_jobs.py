"""The jobs of one command as Hydra runs them: one, or with `-m` the many of a sweep.

Hydra's own sweeper runs nothing where one job can't be composed, and tells of one failure only. The
one below gives every job a folder and a status, and none hides another.
"""

from __future__ import annotations

import copy
import itertools
import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import run_job
from hydra.errors import HydraException
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from data.errors import UserError
from dlrm.config import to_config
from dlrm.run_folder import remove_if_empty
from dlrm.stored_data import fill_in_stored_data
from dlrm.sweep import Sweep, check_unused
from dlrm.sweep_table import print_table, write_page
from dlrm.torchrun import under_torchrun

# Hydra takes plugins of the package `hydra_plugins` only, by their registered names. A folder of
# that name would be imported at every start of every program that uses Hydra; a name does as well.
_PLUGIN_NAME = "hydra_plugins.dlrm.JobSweeper"

MAX_JOBS = 10_000
"""Of a sweep: more are a slip of the pen."""

RunJob = Callable[[Any, str, Path, bool], Any]
"""`(config, config as text, run folder, is part of a sweep)` runs a verb."""


class Jobs:
    """What Hydra calls for every job.

    Attributes:
        status: the exit status so far: that of the worst job.
        sweep: the sweep that the jobs belong to; None for a job alone.

    Args:
        run_job: runs the verb.
        report: prints an error, with the job's name in front, and returns the exit status for it.
    """

    def __init__(self, run_job: RunJob, report: Callable[[Exception, str], int]) -> None:
        self.status = 0
        self.sweep: Sweep | None = None
        self._run_job = run_job
        self._report = report

    def __call__(self, composed: DictConfig) -> None:
        """Runs one job; what it raises is reported, and the next job of a sweep runs all the same.

        KeyboardInterrupt and SystemExit end the sweep.
        """
        hydra = HydraConfig.get()
        run_dir = Path(hydra.runtime.output_dir)
        is_sweep = hydra.mode == RunMode.MULTIRUN
        if self.sweep is not None:
            self.sweep.enter(hydra.job.num, run_dir)
        try:
            fill_in_stored_data(composed, hydra.overrides.task)
            config = to_config(composed)
            text = OmegaConf.to_yaml(composed, resolve=True)
            self._run_job(config, text, run_dir, is_sweep)
        except Exception as error:
            self.failed(error, hydra.job.num if is_sweep else None)
            if self.sweep is not None:
                self.sweep.fail(hydra.job.num, error)
            else:
                remove_if_empty(run_dir)

    def failed(self, error: Exception, number: int | None) -> None:
        """Reports an error and keeps the exit status that it means."""
        sys.stdout.flush()
        name = "" if number is None else f"job {number}: "
        self.status = max(self.status, self._report(error, name))


def register_sweeper() -> None:
    """Makes `JobSweeper` known to Hydra, as `hydra/sweeper=dlrm`."""
    Plugins.instance().class_name_to_class[_PLUGIN_NAME] = JobSweeper
    node = {"_target_": _PLUGIN_NAME, "params": None}
    ConfigStore.instance().store(group="hydra/sweeper", name="dlrm", node=node)


class JobSweeper(Sweeper):
    """Runs every combination of comma-separated values, one job after the other.

    The configuration of every job is checked before the first one starts.

    Args:
        params: further overrides, `hydra.sweeper.params` of a file.
    """

    def __init__(self, params: Mapping[str, Any] | None) -> None:
        self._params = params or {}

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Called by Hydra before `sweep`."""
        assert isinstance(task_function, Jobs)
        self.hydra_context, self.config = hydra_context, config
        self._context, self._master, self._jobs = hydra_context, config, task_function

    def sweep(self, arguments: list[str]) -> None:
        """Runs the sweep, and shows and writes what came of it, however it ended.

        Raises:
            UserError: for a folder that holds a sweep, under torchrun, or for another launcher.
            HydraException: where no job can be composed.
        """
        hydra = self._master.hydra
        _check_place(hydra)
        folder = Path(hydra.sweep.dir)
        check_unused(folder, overwrite=bool(OmegaConf.select(self._master, "train.overwrite")))
        params = [f"{key}={value}" for key, value in self._params.items()]
        parser = OverridesParser.create(config_loader=self._context.config_loader)
        jobs = combinations(parser.parse_overrides([*params, *arguments]))
        composed, problems = self._compose_all(jobs)
        sweep = self._jobs.sweep = Sweep(folder, jobs, lambda line: print(line, flush=True))
        try:
            for number, (error, job_folder) in problems.items():
                self._jobs.failed(error, number)
                sweep.refuse(number, job_folder, error)
            for number, config in composed.items():
                self._run(number, config, sweep)
        finally:
            print_table(sweep)
            self._write(sweep)

    def _write(self, sweep: Sweep) -> None:
        """Reports where that fails, instead of raising: that would hide what ended the sweep."""
        try:
            sweep.write()
            print(f"sweep   {write_page(sweep)}", flush=True)
        except OSError as error:
            self._jobs.failed(error, None)

    def _run(self, number: int, config: DictConfig, sweep: Sweep) -> None:
        sweep.start(number)
        has_returned = False
        try:
            run_job(
                hydra_context=self._context,
                task_function=self._jobs,
                config=config,
                job_dir_key="hydra.sweep.dir",
                job_subdir_key="hydra.sweep.subdir",
            )
            has_returned = True
        except OSError as error:  # Hydra's own files in the job's folder.
            self._jobs.failed(error, number)
            sweep.fail(number, error)
        finally:
            sweep.end(number, has_returned=has_returned)

    def _compose(self, number: int, overrides: list[str]) -> DictConfig:
        config = self._context.config_loader.load_sweep_config(self._master, overrides)
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = number
        return config

    def _compose_all(
        self, jobs: list[list[str]]
    ) -> tuple[dict[int, DictConfig], dict[int, tuple[Exception, Path]]]:
        """The configurations of the jobs that can start; of the others why not, and their folders.

        Raises:
            HydraException: where no job can be composed: a typo in a key that all set, most likely.
        """
        composed: dict[int, DictConfig] = {}
        problems: dict[int, tuple[Exception, Path]] = {}
        errors: list[Exception] = []
        for number, overrides in enumerate(jobs):
            folder = Path(self._master.hydra.sweep.dir) / str(number)
            try:
                config = self._compose(number, overrides)
            except (HydraException, OmegaConfBaseException) as error:
                errors.append(error)
                problems[number] = error, folder
                continue
            problem = _config_problem(config)
            if problem is None:
                composed[number] = config
            else:
                problems[number] = problem, folder.parent / str(config.hydra.sweep.subdir)
        if len(errors) == len(jobs):
            raise errors[0]
        return composed, problems


def combinations(overrides: Sequence[Override]) -> list[list[str]]:
    """The overrides of every job: the product of the values of each key, the last one fastest.

    A later override of a key replaces an earlier one.

    Raises:
        UserError: for a range of numbers that can't be counted up, or has no numbers; for more jobs
            than `MAX_JOBS`.
    """
    values: dict[str, list[str]] = {}
    for override in overrides:
        key = override.get_key_element()
        if not override.is_sweep_override():
            values[key] = [f"{key}={override.get_value_element_as_str()}"]
        elif override.is_discrete_sweep():
            values[key] = [f"{key}={value}" for value in _values_to_try(override)]
        else:
            raise UserError(f"{override.input_line}: name the values to try, {key}=VALUE,VALUE")
    num_jobs = math.prod(len(tried) for tried in values.values())
    if num_jobs > MAX_JOBS:
        raise UserError(
            f"the sweep has {num_jobs:,} jobs, more than {MAX_JOBS:,}: try fewer values"
        )
    return [list(job) for job in itertools.product(*values.values())]


def _values_to_try(override: Override) -> list[str]:
    """The values of one key.

    Raises:
        UserError: where there are none, or too many.
    """
    try:
        found = list(itertools.islice(override.sweep_string_iterator(), MAX_JOBS + 1))
    except ValueError as error:  # A range with step 0.
        raise UserError(f"{override.input_line}: {error}") from error
    if not found:
        raise UserError(
            f"{override.input_line}: no values to try; a range goes from its start up to, without, "
            "its stop: range(0,5) is 0,1,2,3,4"
        )
    if len(found) > MAX_JOBS:
        raise UserError(f"{override.input_line}: more than {MAX_JOBS:,} values to try")
    return found


def _check_place(hydra: DictConfig) -> None:
    if under_torchrun():
        raise UserError(
            "hydra.mode=MULTIRUN: torchrun would run the whole sweep in every rank; start one "
            "torchrun per job, or sweep without torchrun"
        )
    launcher = hydra.launcher._target_
    if not launcher.startswith("hydra._internal."):
        raise UserError(
            f"hydra.launcher={launcher}: the jobs of a sweep run one after the other here; leave "
            "hydra/launcher out, or choose hydra/sweeper=basic too"
        )


def _config_problem(config: DictConfig) -> Exception | None:
    """What is wrong with a composed job; None for what only the job itself can find out."""
    composed = copy.deepcopy(config)
    with open_dict(composed):
        del composed["hydra"]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The job gives them.
            to_config(composed)
    except UserError as error:
        return error
    except OmegaConfBaseException:
        return None  # It may refer to `hydra.…`, which only the job itself has.
    return None
