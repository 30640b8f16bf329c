"""`dlrm bench`: chooses what is measured and writes down whatever comes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dlrm.bench import (
    checkpoint_bench,
    exchange_bench,
    host_bench,
    loader_bench,
    prepare_bench,
    train_bench,
)
from dlrm.bench.ignored_keys import warn_of_ignored
from dlrm.bench.machine import provenance
from dlrm.bench.network import open_network
from dlrm.bench.turns import MEASUREMENTS, Session
from dlrm.config import BenchRun
from dlrm.run_record import RunRecord

_KINDS: dict[str, tuple[Callable[[Session], list[str]], Mapping[str, bool]]] = {
    "train": (train_bench.bench_train, train_bench.READS),
    "exchange": (exchange_bench.bench_exchange, exchange_bench.READS),
    "prepare": (prepare_bench.bench_prepare, prepare_bench.READS),
    "loader": (loader_bench.bench_loader, loader_bench.READS),
    "checkpoint": (checkpoint_bench.bench_checkpoint, checkpoint_bench.READS),
    "host": (host_bench.bench_host, host_bench.READS),
}


class BenchFailed(RuntimeError):
    """A side couldn't run, or the sides haven't done the same work."""


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
    measure, reads = _KINDS[config.kind]
    try:
        with record, open_network(config.bench.network, config.launch.nproc) as network:
            warn_of_ignored(config.kind, reads, command)
            problems = measure(Session(config, record.folder, record.result, say, network))
            if problems:
                raise BenchFailed("; ".join(problems))
    finally:
        say(f"result  {run_dir / 'result.json'}")
    return record.result
