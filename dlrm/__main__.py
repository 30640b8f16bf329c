"""The command: `dlrm VERB [overrides]`. Parses the verb, lets Hydra compose, runs it, and turns
errors into exit statuses: 2 for the user's mistakes (one message, no traceback), 1 for the rest."""

from __future__ import annotations

import argparse
import errno
import os
import re
import shlex
import sys
import traceback
import warnings
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from dlrm.overrides import for_shell, text_override
from dlrm.stop import RunStopped
from dlrm.streams import ready_streams

VERBS = {
    "prepare": "raw files → a prepared dataset folder",
    "train": "train a model (with no argument: on built-in synthetic data) and report",
    "evaluate": "metrics of a trained model on a prepared part or on raw files",
    "predict": "probabilities of a trained model for raw files, labelled or not, as parquet",
    "export": "a trained model's tables (parquet, npy, int8), or the whole model (torch.export)",
    "check": "whether a sharded configuration trains the same model as one plain process",
    "bench": "this system and its peers measured side by side",
}

_EXAMPLES = {
    "prepare": """\
dlrm prepare data=criteo_kaggle data.raw=train.txt data.root=prepared/kaggle
dlrm prepare data=adult data.raw_train=adult.data data.raw_test=adult.test data.root=prepared/adult
dlrm prepare data=synthetic data.synthetic.raw_out=synthetic.tsv    # raw Criteo rows""",
    "train": """\
dlrm train                                                # synthetic data, about a minute
dlrm train data=criteo_kaggle data.raw=train.txt          # prepares first, then trains
dlrm train data=criteo_kaggle data.root=prepared/kaggle optim=adam train.precision=bf16
dlrm train experiment=adult hydra.run.dir=outputs/adult
dlrm train -m sharding=row_wise,column_wise data.batch_size=2048,8192 launch.nproc=2
dlrm train experiment=sweep_sharding                      # a whole sweep in a file
dlrm train … hydra.run.dir=RUN train.resume=latest        # goes on after a stop or a kill""",
    "evaluate": """\
dlrm evaluate run=outputs/train/20260101-120000-000000
dlrm evaluate run=outputs/adult checkpoint=latest part=valid
dlrm evaluate run=outputs/adult data.raw=more.csv         # raw rows, the run's own vocabulary""",
    "predict": """\
dlrm predict run=outputs/adult data.raw=new.csv out=predictions.parquet""",
    "export": """\
dlrm export run=outputs/adult                             # every table: row, token, vector
dlrm export run=outputs/adult export.tables=[education] export.format=npy export.out=tables
dlrm export run=outputs/adult export.what=model checkpoint=latest
dlrm export run=outputs/adult export.what=quantized part=valid""",
    "check": """\
dlrm check launch.nproc=2 sharding=row_wise               # any keys of `dlrm train`
dlrm check experiment=adult launch.nproc=3 check.steps=20
dlrm check launch.nproc=2 check.mutate=mean_of_means      # a planted fault: must exit with 1""",
    "bench": """\
dlrm bench train                                          # one process, full Kaggle-shaped tables
dlrm bench train launch.nproc=2 data.batch_size=8192
dlrm bench train bench.precisions=[fp32,bf16] bench.repeats=5
dlrm bench train bench.sides=[dlrm,gemm_floor]            # without what isn't installed
dlrm bench exchange launch.nproc=2 bench.network=1gbit    # the tables alone; a network of that rate
dlrm bench prepare bench.rows=2000000
dlrm bench loader
dlrm bench checkpoint launch.nproc=2 sharding=row_wise    # save, load, and a storm of kills
dlrm bench host sharding.host.lookahead=4                 # host memory over a simulated link""",
}

# Errors of the system that say nothing against what the user asked for.
_ENVIRONMENT = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
}
_RUN_DIR = "hydra.run.dir= names another place"
_PLACES = {
    "prepare": "data.root= names another place for the dataset",
    "train": "hydra.run.dir= names another place, data.root= or data.cache= one for the data",
    "evaluate": _RUN_DIR,
    "predict": "out= and hydra.run.dir= name other places",
    "export": "export.out= and hydra.run.dir= name other places",
    "check": "hydra.run.dir= names another place, data.root= or data.cache= one for the data",
    "bench": "hydra.run.dir= names another place, data.cache= one for the data",
}
# A reader that was told to stop ends with the row group that it is at, unless it hangs.
_READER_WAIT_S = 5.0
# Keys of Hydra's own that hold text.
_HYDRA_TEXT_KEYS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.job.name")
# Dictionaries whose entries users name; what may be new in them needs no `+`.
_ENTRIES_BY_NAME = ("sharding.tables.", "model.table_dims.")
_PLAIN_NAME = re.compile(r"[\w./\-+$%*@?|]+", re.ASCII)
_NUMBER_OR_BOOL = re.compile(
    r"[+-]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(e[+-]?\d+)?|[+-]?(inf|nan)|true|false", re.IGNORECASE
)


def main() -> None:
    """Runs the command and exits."""
    ready_streams()
    # Read once, when torch loads. Threads that spin long at OpenMP's barriers make steps several
    # times slower when another program needs a core; threads that never spin wake up late. A short
    # spin costs little either way (docs/benchmarks.md, "Waiting threads").
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    warnings.formatwarning = lambda message, *_: f"dlrm: warning: {message}\n"
    status = run(sys.argv[1:])
    if status == 1 and "data.loader" in sys.modules:
        _leave_hanging_readers(status)
    sys.exit(status)


def _leave_hanging_readers(status: int) -> None:
    """Ends the process now if a thread of it hangs at reading: Python would wait for it."""
    from data.loader import hanging_readers

    for thread in hanging_readers():
        thread.join(_READER_WAIT_S)
    if hanging_readers():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run(arguments: list[str]) -> int:
    """Runs one command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="dlrm",
        usage="dlrm VERB [key=value …]",
        description="Trains deep learning recommendation models.",
        epilog="verbs:\n"
        + "\n".join(f"  {verb:<9} {text}" for verb, text in VERBS.items())
        + "\n\n`dlrm VERB --help` shows examples, `dlrm VERB --cfg job` the effective values.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("verb", choices=VERBS, metavar="VERB", help="what to do, see below")
    if not arguments:
        parser.print_help()
        return 2
    for argument in arguments:
        if not _is_text_of_utf8(argument):
            shown = os.fsencode(argument).decode(errors="backslashreplace")
            return _fail(f"the argument {shown} is not UTF-8: rename what it names", 2)
    try:
        verb: str = parser.parse_args(arguments[:1]).verb
    except SystemExit as stop:
        return int(stop.code or 0)
    rest = _with_kind(verb, arguments[1:])
    if "--help" in rest or "-h" in rest:
        _print_help(verb)
        return 0
    return _run_verb(verb, rest)


def _is_text_of_utf8(argument: str) -> bool:
    try:
        argument.encode()
    except UnicodeEncodeError:
        return False
    return True


def _with_kind(verb: str, arguments: list[str]) -> list[str]:
    """`bench train …` as `bench kind=train …`."""
    if verb != "bench" or not arguments or "=" in arguments[0] or arguments[0].startswith("-"):
        return arguments
    return [f"kind={arguments[0]}", *arguments[1:]]


def _print_help(verb: str) -> None:
    print(f"dlrm {verb} [key=value …]: {VERBS[verb]}\n\nexamples:")
    for line in _EXAMPLES[verb].splitlines():
        print(f"  {line}")
    print(
        "\nkeys: `--cfg job` prints all with their values; `group=option` picks a file of conf/, "
        "\n`a.b=value` sets a value, `-m` runs every combination of comma-separated values."
    )


def _run_verb(verb: str, arguments: list[str]) -> int:
    problem = _foreign_packages()
    if problem:
        print(f"dlrm: {problem}", file=sys.stderr)
        return 1
    try:
        _check_torchrun(verb, arguments)
        return _compose_and_run(verb, arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    except KeyboardInterrupt:
        print("dlrm: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        return _report(verb, error)
    except RunStopped as stopped:
        return _stopped(verb, arguments, stopped)


def _stopped(verb: str, arguments: list[str], error: RunStopped) -> int:
    """Tells how a run that was ended in order goes on; returns the exit status of its signal."""
    from dlrm.torchrun import under_torchrun

    replaced = ("hydra.run.dir=", "train.resume=", "train.overwrite=", "train.warm_start.")
    others = [a for a in arguments if not a.lstrip("+").startswith((*replaced, "-m", "--multirun"))]
    folder = for_shell(text_override("hydra.run.dir", str(error.run_dir)))
    more = f"train.resume=latest {folder}"
    print(f"dlrm: {error}; go on with:", file=sys.stderr)
    if {"-m", "--multirun"} & set(arguments):
        print(f"  the job's overrides and {more}", file=sys.stderr)
    elif under_torchrun():
        print(f"  the same torchrun command and {more}", file=sys.stderr)
    else:
        print(f"  {shlex.join(['dlrm', verb, *others])} {more}", file=sys.stderr)
    return 128 + error.number


def _check_torchrun(verb: str, arguments: list[str]) -> None:
    """Of the verbs, `train` alone joins an outer torchrun, as one of its ranks."""
    from data.errors import UserError
    from dlrm.torchrun import check_torchrun_arguments, under_torchrun

    if not under_torchrun():
        return
    if verb != "train":
        raise UserError(f"`dlrm {verb}` doesn't run under torchrun, only `dlrm train` does")
    check_torchrun_arguments(arguments)


def _report(verb: str, error: Exception, job: str = "") -> int:
    """Prints an error as its kind deserves, after the name of its job in a sweep; returns the exit
    status that goes with it."""
    import hydra.errors
    import omegaconf.errors
    import yaml

    from dlrm.config_errors import explain, explain_yaml

    if isinstance(error, yaml.YAMLError):
        return _fail(job + explain_yaml(error), 2)
    if isinstance(error, (hydra.errors.HydraException, omegaconf.errors.OmegaConfBaseException)):
        return _fail(job + explain(verb, error), 2)
    if type(error).__module__.split(".")[0] in ("data", "embeddings", "dlrm"):
        return _fail(job + str(error), 2 if isinstance(error, ValueError) else 1)
    if isinstance(error, RuntimeError) and str(error).startswith("Could not determine home"):
        # `~` of a user without an entry, as in a container; `data.cache` begins with it.
        return _fail(
            f"{job}a path begins with ~, but no home directory is known here: set HOME, or name "
            "places in full (data.root=, data.cache=)",
            2,
        )
    if isinstance(error, OSError) and (error.filename or error.errno in _ENVIRONMENT):
        from dlrm.side_output import describe_os_error

        status = 1 if error.errno in _ENVIRONMENT else 2
        return _fail(f"{job}{describe_os_error(error)} ({_PLACES[verb]})", status)
    if job:
        _fail(f"{job}failed", 1)
    traceback.print_exception(error)
    return 1


def _compose_and_run(verb: str, arguments: list[str]) -> int:
    """Hydra parses `arguments` and composes `conf/VERB.yaml`; then the verb runs, once per job.

    Returns:
        The exit status of the job, or of the worst one.
    """
    # Hydra would print errors itself and always exit with 1; with this it lets them through.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    import hydra

    from dlrm.config import register
    from dlrm.config_errors import check_groups
    from dlrm.hydra_jobs import Jobs, register_sweeper

    register()
    register_sweeper()
    jobs = Jobs(partial(_dispatch, verb), partial(_report, verb))
    # Hydra's parser wants all overrides side by side: `a=1 -m b=2,3` as `-m a=1 b=2,3`.
    arguments = sorted(arguments, key=lambda text: text not in ("-m", "--multirun"))
    check_groups(arguments)
    prepared = [_keep_text(verb, add_entry(argument)) for argument in arguments]
    saved, sys.argv = sys.argv, [f"dlrm {verb}", *prepared]
    try:
        hydra.main(version_base="1.3", config_path="pkg://conf", config_name=verb)(jobs)()
    finally:
        sys.argv = saved
    return jobs.status


def _dispatch(verb: str, config: Any, text: str, run_dir: Path, is_sweep: bool) -> Any:
    if verb == "prepare":
        from dlrm.prepare import run_prepare

        return run_prepare(config, run_dir)
    if verb == "train":
        from dlrm.train import run_train

        # The jobs of a sweep share nothing: none inherits another's memory, threads or caches.
        return run_train(config, text, run_dir, fresh_processes=is_sweep)
    if verb == "check":
        from dlrm.check import run_check

        return run_check(config, text, run_dir, fresh_processes=is_sweep)
    if verb == "bench":
        from dlrm.bench.run import run_bench

        return run_bench(config, text, run_dir, _command_of_job())
    if verb == "export":
        from dlrm.export import run_export

        return run_export(config, run_dir)
    from dlrm.score import run_evaluate, run_predict

    return (run_evaluate if verb == "evaluate" else run_predict)(config, run_dir)


def _command_of_job() -> str:
    """`dlrm bench train …` as one would type it for this job alone; without its folder."""
    from hydra.core.hydra_config import HydraConfig

    overrides = HydraConfig.get().overrides.task
    kinds = [text.removeprefix("kind=") for text in overrides if text.startswith("kind=")]
    others = [text for text in overrides if not text.startswith("kind=")]
    return shlex.join(["dlrm", "bench", *kinds, *others])


def _fail(message: str, status: int) -> int:
    print(f"dlrm: {message}", file=sys.stderr)
    return status


def add_entry(argument: str) -> str:
    """An override of an entry by name, such as `sharding.tables.C1.layout=…`, in Hydra's form for
    entries that may be new: without it every user would have to know when to write a `+`.

    A name that Hydra takes in no key, such as one with a colon, becomes a key of a dictionary.
    """
    bare = argument.lstrip("+")
    key, equals, value = bare.partition("=")
    group = next((g for g in _ENTRIES_BY_NAME if f"{key}.".startswith(g)), None)
    if group is None or not equals:
        return argument
    name = key.removeprefix(group)
    if f"{key}." == group or _PLAIN_NAME.fullmatch(name):
        return argument if argument != bare else f"++{argument}"
    if group == "sharding.tables.":
        name, _, setting = name.rpartition(".")
        value = f"{{{setting}:{value}}}"
    escaped = re.sub(r"([\\()\[\]{}:=, \t])", r"\\\1", name)
    return f"++{group[:-1]}={{{escaped}:{value}}}"


def _keep_text(verb: str, argument: str) -> str:
    """An override whose value is text, quoted where Hydra would read a number or a truth value.

    Without it `hydra.run.dir=1_1` would become 11, `run=1e3` 1000.0 and `data.root=true` True.
    """
    key, equals, value = argument.partition("=")
    if not equals or set(value) & set("'\"(){}$\\") or not _is_text(verb, key.lstrip("+")):
        return argument
    # Each of several values too: `[a,b]`, and `a,b` of a sweep.
    pieces = [
        f"'{piece.strip()}'" if _NUMBER_OR_BOOL.fullmatch(piece.strip()) else piece
        for piece in re.split(r"([\[\],])", value)
    ]
    return f"{key}={''.join(pieces)}"


def _is_text(verb: str, key: str) -> bool:
    from dlrm.config import RUN_CONFIGS

    if key in _HYDRA_TEXT_KEYS:
        return True
    kind: Any = RUN_CONFIGS[verb]
    for name in key.split("."):
        if is_dataclass(kind):
            kind = get_type_hints(kind).get(name)
        elif get_origin(kind) is dict:
            kind = get_args(kind)[1]
        else:
            return False
        if type(None) in get_args(kind):
            kind = next(k for k in get_args(kind) if k is not type(None))
    return kind in (str, Any, list[str])


def _foreign_packages() -> str | None:
    """Whether `data`, `embeddings` or `conf` is somebody else's package that shadows ours."""
    import importlib

    ours = Path(__file__).resolve().parents[1]
    for name in ("data", "embeddings", "conf"):
        found = getattr(importlib.import_module(name), "__file__", None)
        if found is None or Path(found).resolve().parents[1] != ours:
            return (
                f"the package '{name}' comes from {found}, not from {ours}: another package of "
                "that name comes first on the path. Start `dlrm` elsewhere, or uninstall it"
            )
    return None


if __name__ == "__main__":
    main()
