"""What is worth telling of a dataset when it was prepared: what is missing, what was replaced."""

from __future__ import annotations

from data.hashing import expected_rows
from data.manifest import Manifest


def data_notes(manifest: Manifest) -> list[str]:
    """A line for each kind of thing that was skipped, missing, replaced or is worth a look."""
    notes = [*hashed_tables(manifest), *single_id_bags(manifest)]
    blank_lines = sum(i.blank_lines for i in manifest.inputs)
    if blank_lines:
        notes.append(f"note    {blank_lines:,} empty lines were skipped")
    for name, part in manifest.parts.items():
        if missing := part.missing_dense_share():
            notes.append(f"note    {name}: missing values, most in {_worst(missing)}")
        if replaced := part.unknown_id_share():
            notes.append(
                f"note    {name}: ids without a row of their own, most in {_worst(replaced)}"
            )
    return notes


def _worst(shares: dict[str, float]) -> str:
    worst = sorted(shares.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} {share:.1%}" for name, share in worst)


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
