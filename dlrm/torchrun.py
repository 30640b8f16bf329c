"""What an outer `torchrun` means for the command: its ranks are this run's ranks."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from data.errors import UserError

_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def under_torchrun() -> bool:
    """Whether this process is a rank that `torchrun` has started."""
    return all(name in os.environ for name in _TORCHRUN)


def launch_id() -> str:
    """Names the launch of `torchrun` that this rank belongs to: groups of ranks that it starts
    again have the same, any other launch another."""
    agent = os.getppid()
    try:
        # Field 22, of which the second may hold spaces: when it started, in ticks since boot.
        started = Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        started = ""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return f"{name} {socket.gethostname()} {agent} {started}"


def check_torchrun_arguments(arguments: list[str]) -> None:
    """Checks the command line of a rank that `torchrun` has started, before Hydra reads it.

    Raises:
        UserError: for what would differ between ranks.
    """
    if {"-m", "--multirun"} & set(arguments) or "hydra.mode=MULTIRUN" in arguments:
        raise UserError(
            "-m: torchrun would run the whole sweep in every rank; start one torchrun per job, or "
            "sweep without torchrun"
        )
    if not any(a.lstrip("+").startswith("hydra.run.dir=") for a in arguments):
        raise UserError(
            "hydra.run.dir= is missing: under torchrun every rank would make a folder of its own; "
            "name one that all ranks share"
        )
