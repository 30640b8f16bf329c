"""`dlrm bench`: chooses what is measured and writes down whatever comes of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dlrm.bench.machine import provenance
from dlrm.bench.train_bench import MEASUREMENTS, bench_train
from dlrm.config import BenchRun
from dlrm.run_record import RunRecord


class BenchFailed(RuntimeError):
    """A side couldn't run, or the sides haven't trained the same model."""


def run_bench(
    config: BenchRun,
    config_yaml: str,
    run_dir: Path,
    command: str,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measures what `kind` says; returns what result.json holds.

    Args:
        config: the checked configuration.
        config_yaml: the same as text, for the run folder.
        run_dir: the output folder.
        command: what the user typed, for result.json.
        say: prints for the user.

    Raises:
        BenchFailed: naming the side.
        UserError: for what can't be measured.
    """
    record = RunRecord(
        config,
        config_yaml,
        run_dir,
        config.launch.nproc,
        kind=config.kind,
        command=command,
        **provenance(),
    )
    # Of a run that was here before, where the folder may be used again.
    (record.folder.path / MEASUREMENTS).unlink(missing_ok=True)
    try:
        with record:
            problems = bench_train(config, record.folder, record.result, say)
            if problems:
                raise BenchFailed("; ".join(problems))
    finally:
        say(f"result  {run_dir / 'result.json'}")
    return record.result
