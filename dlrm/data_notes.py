"""What is worth telling of a dataset when it was prepared: what is missing, what was replaced."""

from __future__ import annotations

from data.manifest import Manifest


def data_notes(manifest: Manifest) -> list[str]:
    """A line for each kind of thing that was skipped, missing or replaced; most have none."""
    notes = []
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
