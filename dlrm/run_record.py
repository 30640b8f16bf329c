"""`result.json` of a run: begun as unfinished, and told how the run ended, however it ends."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from data.errors import UserError
from dlrm.config import TrainRun
from dlrm.own_files import has_model
from dlrm.run_folder import NOT_FINISHED, RunFolder
from dlrm.stop import RunStopped
from dlrm.versions import versions


class RunRecord:
    """The run folder, claimed, and what its result.json holds; a context around the run.

    Attributes:
        folder: the run folder, with `config.yaml`.
        result: what result.json is to hold; `write` writes it.

    Args:
        config: the checked configuration.
        config_yaml: the same as text.
        run_dir: the output folder.
        world_size: number of ranks.
        resume: the run in the folder goes on.
        overwrite: use the folder although it holds files, as under `train.overwrite`.
        settles: the end of the context also ends the time in which an overwritten run waits: it
            comes back after a mistake of the user, or where a file failed.
        more: further fields that are known at the start.

    Raises:
        UserError: for a folder that is in use.
    """

    def __init__(
        self,
        config: TrainRun,
        config_yaml: str,
        run_dir: Path,
        world_size: int,
        *,
        resume: bool = False,
        overwrite: bool = False,
        settles: bool = True,
        **more: Any,
    ) -> None:
        overwrite, self._settles = overwrite or config.train.overwrite, settles
        self.folder = RunFolder(run_dir, overwrite=overwrite, resume=resume)
        self.result: dict[str, Any] = {
            "status": NOT_FINISHED,
            "world_size": world_size,
            "seed": config.seed,
            "versions": versions(),
            "config_digest": hashlib.sha256(config_yaml.encode()).hexdigest(),
            **more,
        }
        try:
            self.folder.write_text("config.yaml", config_yaml)
            self.write()
        except BaseException:
            self.folder.settle(is_kept=has_model(run_dir))
            raise

    def write(self) -> None:
        """Writes result.json as it stands."""
        self.folder.write_json("result.json", self.result)

    def __enter__(self) -> RunRecord:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.result["status"] = "completed"
        if error is not None:
            # Not a fault, but not completed either.
            kind = "" if isinstance(error, RunStopped) else f"{type(error).__name__}: "
            self.result["status"] = f"failed: {kind}{error}"
        try:
            self.write()
        except OSError:
            if error is None:  # Else what ended the run is told, not what came of it.
                raise
        if self._settles:
            is_lost = isinstance(error, (UserError, OSError, KeyboardInterrupt))
            self.folder.settle(is_kept=not is_lost)
