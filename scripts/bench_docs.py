"""Writes runs of `dlrm bench train` into docs/benchmarks.md, between its two markers.

    .venv/bin/python scripts/bench_docs.py RUN [RUN …] [--document docs/benchmarks.md]

RUN is the output folder of a run that completed. What stands between the markers is replaced, so
name all runs that shall be shown. Everything comes from the runs' result.json: the same runs give
the same text.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.errors import UserError
from data.files import write_whole
from dlrm.bench.ratios import Spread
from dlrm.bench.table import ratio_text, step_ms_text

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
WIDTH = 120
HEADER = (
    "Written by `scripts/bench_docs.py` from the runs' files. In each cell: the median over "
    "the turns, with the least and the greatest. A turn's time is its median training step. "
    "× TorchRec: how many times as fast as the fastest TorchRec plan of the same precision, turn "
    "by turn. All sides start from the same values and get the same batches."
)
NOT_MEASURED = (
    "Not measured here: reading and preparing data (batches are in memory before the clock "
    "starts), evaluation, checkpoints, other networks than the one named, GPUs, other machines. "
    "Absolute times hold for this machine in that hour; ratios are of measurements taken in turns."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the section; returns the exit status."""
    parser = argparse.ArgumentParser(description="Writes benchmark runs into docs/benchmarks.md.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's output folder")
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    parsed = parser.parse_args(arguments)
    try:
        section = render([read_run(folder) for folder in parsed.runs])
        document = replace_section(parsed.document.read_text(), section, parsed.document)
    except UserError as error:
        print(f"bench_docs: {error}", file=sys.stderr)
        return 2
    write_whole(parsed.document, document.encode())
    return 0


def read_run(folder: Path) -> dict[str, Any]:
    """result.json of a run that may be shown.

    Raises:
        UserError: for a run that isn't there, isn't one of `dlrm bench train`, or failed: of sides
            that can't run or don't agree no figure is shown.
    """
    path = folder / "result.json"
    try:
        result: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: can't be read ({error}); name output folders of runs") from None
    if result.get("kind") != "train" or "command" not in result:
        raise UserError(f"{path}: isn't a run of `dlrm bench train`")
    if result["status"] != "completed":
        raise UserError(
            f"{path}: the run isn't complete, nothing of it is shown: {result['status']}"
        )
    return result


def render(results: Sequence[dict[str, Any]]) -> str:
    """The section's text, without its markers."""
    parts = [_wrapped(HEADER)]
    previous = ""
    for result in results:
        machine = _machine(result)
        if machine != previous:
            parts.append(machine)
        previous = machine
        parts.append(_run(result))
    return "\n".join([*parts, _wrapped(NOT_MEASURED)])


def replace_section(text: str, section: str, document: Path) -> str:
    """A document with `section` between its markers.

    Raises:
        UserError: where it doesn't have each marker once, in this order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise UserError(f"{document}: must have one {BEGIN}, and one {END} below it")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return f"{before}{BEGIN}\n\n{section}\n{END}{after}"


def _machine(result: dict[str, Any]) -> str:
    machine = result["machine"]
    versions = ", ".join(f"{name} {found}" for name, found in result["versions"].items())
    return _wrapped(
        f"Machine: {machine['processor']}, {machine['cores']} cores, {machine['isa']}, "
        f"{machine['memory_bytes'] / 2**30:.1f} GiB, {machine['system']}. Versions: {versions}."
    )


def _run(result: dict[str, Any]) -> str:
    described = result["description"]
    variables = " ".join(f"{name}={value}" for name, value in result["environment"].items())
    conditions = (
        f"Date {result['date']}, commit {result['commit'] or 'unknown'}. "
        f"{described['model']}. {described['steps']}. Threads per process: "
        f"{result['num_threads']}{f', {variables}' if variables else ''}."
    )
    comparison = result["comparison"]
    lines = [
        f"### {described['bench']}\n",
        f"```bash\n{result['command']}\n```\n",
        _wrapped(conditions),
        "| side | precision | step, ms | × TorchRec | log loss |"
        + (" MB sent per step and rank |" if result["world_size"] > 1 else ""),
        "|---|---|---|---|---|" + ("---|" if result["world_size"] > 1 else ""),
        *(_row(variant, result["world_size"]) for variant in comparison["variants"]),
        "",
        *(f"- {line}" for line in (*comparison["claims"], *comparison["notes"])),
    ]
    return "\n".join(lines) + "\n"


def _row(variant: dict[str, Any], world_size: int) -> str:
    ratio, logloss = variant["torchrec_ratio"], variant["logloss"]
    cells = [
        variant["side"],
        variant["precision"],
        step_ms_text(_spread(variant["step_ms"])),
        "" if ratio is None else ratio_text(_spread(ratio)),
        "" if logloss is None else f"{logloss:.5f}",
    ]
    if world_size > 1:
        cells.append(f"{variant['bytes_sent_per_step_and_rank'] / 1e6:.2f}")
    return f"| {' | '.join(cells)} |"


def _spread(values: dict[str, float]) -> Spread:
    return Spread(values["median"], values["min"], values["max"])


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False) + "\n"


if __name__ == "__main__":
    sys.exit(main())
