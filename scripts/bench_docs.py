"""Writes runs of `dlrm bench` into docs/benchmarks.md, between its two markers.

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
from dlrm.bench.comparison import Figure
from dlrm.bench.host_sweep import markdown_lines
from dlrm.bench.ratios import Spread
from dlrm.bench.roofline import roofline_lines
from dlrm.bench.table import ratio_text

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
WIDTH = 120
HEADER = (
    "Written by `scripts/bench_docs.py` from the runs' files. In each cell: the median over "
    "the turns, with the least and the greatest. × TorchRec: how many times as fast as the fastest "
    "TorchRec plan of the same precision, turn by turn."
)
KINDS = {
    "train": "A turn's time is its median training step. All sides start from the same values and "
    "get the same batches, which are in memory before the clock starts.",
    "exchange": "The tables alone: from ids to pooled vectors, and from a given gradient of these "
    "to updated rows. A turn's time is its median step; batches are in memory before the clock "
    "starts.",
    "prepare": "From raw rows to what training reads, on one machine.",
    "loader": "From what was prepared to batches, in one process; nothing trains meanwhile.",
    "checkpoint": "Rows and their optimizer state of all tables: written, with fsync, and read "
    "back into tables that are there, from disk (cold) and from the page cache (warm).",
    "host": "The modes of tables in host memory. Staging, forwarding, writing back and updating "
    "are real; the rates of the host's stages and the dense time are simulated. A turn's time is "
    "its typical step, beside what the simulator predicts of it.",
}
NOT_MEASURED = (
    "Not measured here: evaluation, other networks than those named, GPUs, other "
    "machines. Absolute times hold for this machine in that hour; ratios are of measurements taken "
    "in turns."
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
        UserError: for a run that isn't there, isn't one of `dlrm bench`, or failed: of sides that
            can't run or don't agree no figure is shown.
    """
    path = folder / "result.json"
    try:
        result: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: can't be read ({error}); name output folders of runs") from None
    if result.get("kind") not in KINDS or "command" not in result:
        raise UserError(f"{path}: isn't a run of `dlrm bench`")
    if result["status"] != "completed":
        raise UserError(
            f"{path}: the run isn't complete, nothing of it is shown: {result['status']}"
        )
    return result


def render(results: Sequence[dict[str, Any]]) -> str:
    """The section's text, without its markers."""
    parts = [_wrapped(HEADER)]
    said: set[str] = set()
    previous = ""
    for result in results:
        machine = _machine(result)
        if machine != previous:
            parts.append(machine)
        previous = machine
        parts.append(_run(result, explain=result["kind"] not in said))
        said.add(result["kind"])
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


def _run(result: dict[str, Any], *, explain: bool) -> str:
    described = dict(result["description"])
    title = described.pop("bench")
    variables = " ".join(f"{name}={value}" for name, value in result["environment"].items())
    conditions = (
        f"Date {result['date']}, commit {result['commit'] or 'unknown'}. "
        f"{'. '.join(_named(*item) for item in described.items())}. Threads per process: "
        f"{result['num_threads']}{f', {variables}' if variables else ''}."
    )
    comparison = result["comparison"]
    lines = [
        f"### {title}\n",
        *([_wrapped(KINDS[result["kind"]])] if explain else []),
        f"```bash\n{result['command']}\n```\n",
        _wrapped(conditions),
        *_table(comparison),
        "",
        *(f"- {line}" for line in (*comparison["claims"], *comparison["notes"])),
        *(f"- {goal['text']}" for goal in result.get("goals", [])),
    ]
    if "storm" in result:
        lines.append(f"- {result['storm']['text']}")
    if "sweep" in result:
        lines += ["", *markdown_lines(result["sweep"])]
    if "roofline" in result:
        lines += ["", *roofline_lines(result["roofline"])]
    return "\n".join(lines) + "\n"


def _named(name: str, text: str) -> str:
    """A line of the description; a network by its name, as its figures don't say what they are."""
    return f"Network {text}" if name == "network" else text


def _table(comparison: dict[str, Any]) -> list[str]:
    """The rows, with a column of precisions and one of TorchRec where there are any."""
    variants = comparison["variants"]
    main = Figure(key="", **comparison["main"])
    columns = [Figure(key="", **c) for c in comparison["columns"] if c["header"] is not None]
    has_precision = any(variant["precision"] for variant in variants)
    has_torchrec = any(variant["torchrec_ratio"] is not None for variant in variants)
    headers = ["side"]
    # Results of earlier versions have precisions only, and don't say so.
    headers += [comparison.get("grouped_by", "precision")] if has_precision else []
    headers += [str(main.header)]
    headers += ["× TorchRec"] if has_torchrec else []
    # A bar would end the cell.
    headers += [str(column.header).replace("|", "\\|") for column in columns]
    lines = [f"| {' | '.join(headers)} |", "|" + "---|" * len(headers)]
    for variant in variants:
        ratio = variant["torchrec_ratio"]
        cells = [variant["side"]]
        cells += [variant["precision"]] if has_precision else []
        cells += [main.spread_text(_spread(variant[main.name]))]
        if has_torchrec:
            cells.append("" if ratio is None else ratio_text(_spread(ratio)))
        for column in columns:
            value = variant[column.name]
            cells.append("" if value is None else column.text(value))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _spread(values: dict[str, float]) -> Spread:
    return Spread(values["median"], values["min"], values["max"])


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False) + "\n"


if __name__ == "__main__":
    sys.exit(main())
