"""`dlrm prepare`: prepares a dataset and says what is in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from data.errors import UserError
from data.hashing import expected_rows
from data.manifest import Manifest
from data.synthetic import write_raw_tsv
from dlrm.config import PrepareRun
from dlrm.data_notes import data_notes
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
    for line in [*hashed_tables(manifest), *single_id_bags(manifest), *data_notes(manifest)]:
        say(line)
    say(f"dataset {root}  (digest {manifest.digest()[:12]})")


def describe_inputs(manifest: Manifest) -> str:
    """How many files and rows were read, and how they were divided."""
    rows = sum(i.rows for i in manifest.inputs)
    orders = {
        "in_order": "the last rows of the last files validate and test",
        "by_file": "the last files validate and test",
        "random": "each row by chance",
        "given": "as given",
    }
    kind = manifest.schema.split.kind
    names = [i.file for i in manifest.inputs]
    shown = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    return f"files   {len(names):,} with {rows:,} rows: {shown}; split {kind}: {orders[kind]}"


def single_id_bags(manifest: Manifest) -> list[str]:
    """A note for each column with a separator that seems to stand in no field, a line each."""
    rows = sum(part.rows for part in manifest.parts.values())
    return [
        f"note    {f.name}: {ids:,} ids in {rows:,} rows, so hardly a bag holds two; is "
        f"data.schema.sparse.{f.name}.separator={f.separator!r} right?"
        for f in manifest.features
        if f.separator and (ids := sum(p.ids[f.name] for p in manifest.parts.values())) <= rows
    ]


def hashed_tables(manifest: Manifest) -> list[str]:
    """How many tokens of each hashed feature share how many rows, a line each; a warning where far
    fewer rows are used than chance says."""
    lines = []
    for feature in manifest.features:
        num_tokens = manifest.counts[feature.name].get("distinct_tokens")
        if num_tokens is None:
            continue  # No hashed feature, or a dataset from before tokens were counted.
        rows = manifest.table_rows[feature.table] - (feature.missing == "row")
        used = manifest.counts[feature.name]["distinct"]
        expected = expected_rows(num_tokens, rows)
        lines.append(
            f"hash    {feature.name}: {num_tokens:,} tokens on {used:,} of {rows:,} rows "
            f"(data.schema.sparse.{feature.name}.rows)"
        )
        # Ten standard errors, and what the estimate of the number of tokens may be off by.
        if used < 0.95 * expected - 10 * expected**0.5:
            lines.append(
                f"warning {feature.name}: by chance {num_tokens:,} tokens would use about "
                f"{expected:,.0f} rows; prepare it again (data.overwrite=true), or use "
                "vocabulary=dictionary"
            )
    return lines
