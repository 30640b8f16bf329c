"""`dlrm bench`: chooses what is measured and writes down whatever comes of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dlrm.bench.machine import provenance
from dlrm.bench.train_bench import MEASUREMENTS, bench_train
from dlrm.config import BenchRun
from dlrm.run_folder import NOT_FINISHED, RunFolder


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
    folder = RunFolder(run_dir, overwrite=config.train.overwrite)
    # Of a run that was here before, where the folder may be used again.
    (folder.path / MEASUREMENTS).unlink(missing_ok=True)
    folder.write_text("config.yaml", config_yaml)
    result: dict[str, Any] = {
        "status": NOT_FINISHED,
        "kind": config.kind,
        "command": command,
        "world_size": config.launch.nproc,
        "seed": config.seed,
        "config_digest": hashlib.sha256(config_yaml.encode()).hexdigest(),
        **provenance(),
    }
    folder.write_json("result.json", result)
    status = "completed"
    try:
        problems = bench_train(config, folder, result, say)
        if problems:
            raise BenchFailed("; ".join(problems))
    except BaseException as error:
        status = f"failed: {type(error).__name__}: {error}"
        raise
    finally:
        result["status"] = status
        folder.write_json("result.json", result)
        say(f"result  {run_dir / 'result.json'}")
    return result
