"""`dlrm prepare`: prepares a dataset and says what is in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from data.errors import UserError
from data.synthetic import write_raw_tsv
from dlrm.config import PrepareRun
from dlrm.data_notes import data_notes, describe_inputs
from dlrm.datasets import dataset_root, make_dataset
from dlrm.display import PrepareDisplay
from dlrm.run_folder import remove_if_empty


def run_prepare(config: PrepareRun, run_dir: Path, say: Callable[[str], None] = print) -> None:
    """Prepares `data.root`, or writes raw synthetic rows to `data.synthetic.raw_out`."""
    remove_if_empty(run_dir)
    data = config.data
    if data.synthetic is not None and data.synthetic.raw_out is not None:
        path = Path.cwd() / Path(data.synthetic.raw_out).expanduser()
        if path.exists() and not data.overwrite:
            raise UserError(f"data.synthetic.raw_out={path} exists; set data.overwrite=true")
        path.parent.mkdir(parents=True, exist_ok=True)
        with PrepareDisplay() as display:
            num_rows = write_raw_tsv(data.synthetic, path, display)
        say(f"raw     {num_rows:,} rows in Criteo's format: {path}")
        return
    with PrepareDisplay() as display:
        manifest = make_dataset(data, Path.cwd(), display)
    root = dataset_root(data, Path.cwd())
    if manifest.inputs:
        say(describe_inputs(manifest))
    for name, part in manifest.parts.items():
        rate = "no rows" if part.label_rate is None else f"label rate {part.label_rate:.4f}"
        say(f"{name:<7} {part.rows:>13,} rows  {rate}")
    rows = sum(manifest.table_rows.values())
    say(f"tables  {len(manifest.table_rows)} with {rows:,} rows")
    for note in data_notes(manifest):
        say(note)
    say(f"dataset {root}  (digest {manifest.digest()[:12]})")
