"""Takes turns: every variant once per turn, each in fresh processes, written down at once.

What is measured, by what, and what must agree is each kind's own affair (`…_bench.py`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from data.errors import UserError
from data.files import naming
from dlrm.bench.comparison import Measurement, Variant, Yardstick, compare
from dlrm.bench.network import Network, describe_network, measure_link, network_figures
from dlrm.bench.table import print_comparison, wrapped
from dlrm.blame import WorkersFailed
from dlrm.config import BenchRun
from dlrm.launch import launch
from dlrm.run_folder import RunFolder

MEASUREMENTS = "measurements.jsonl"
"""A line for each measurement, as soon as it is taken."""

Work = tuple[Callable[..., Any], tuple[Any, ...]]
"""What `launch` runs in fresh processes: entry and arguments."""


@dataclass(frozen=True)
class Session:
    """One run of `dlrm bench`.

    Attributes:
        config: the checked configuration.
        folder: the run folder.
        result: what result.json is to hold.
        say: prints for the user.
        network: what joins the workers.
    """

    config: BenchRun
    folder: RunFolder
    result: dict[str, Any]
    say: Callable[[str], None]
    network: Network

    def launch(self, work: Work) -> Any:
        """Runs something in fresh processes, joined by the network; returns what rank 0 did.

        Raises:
            WorkersFailed, UserError, OSError: as `dlrm.launch.launch` does.
        """
        entry, arguments = work
        ranks = self.network.ranks
        return launch(entry, arguments, self.config.launch, self.folder.path, networks=ranks)


@dataclass(frozen=True)
class Bench:
    """A benchmark that is ready to be measured.

    Attributes:
        variants: what is measured, in the order of the first turn.
        work: what measures a variant, given all earlier measurements; it returns figures, among
            them the yardstick's, `note` and `num_threads`.
        yardstick: what they are compared by.
        description: what the user is to know of the conditions, by a word of at most 7 letters.
        rotates: each turn begins with another side, all variants of which stay together: where what
            went before, such as a disk that is still busy, would always fall on the same one.
    """

    variants: Sequence[Variant]
    work: Callable[[Variant, Sequence[Measurement]], Work]
    yardstick: Yardstick
    description: dict[str, str]
    rotates: bool = False

    def of_turn(self, repeat: int) -> list[Variant]:
        """The variants in the order of that turn."""
        if not self.rotates:
            return list(self.variants)
        sides = list(dict.fromkeys(variant.side for variant in self.variants))
        first = repeat % len(sides)
        return [
            variant
            for side in sides[first:] + sides[:first]
            for variant in self.variants
            if variant.side == side
        ]


def take_turns(bench: Bench, session: Session) -> list[str]:
    """Measures, prints the table and adds it to the result; returns what makes the benchmark fail.

    A variant that failed isn't tried again: it takes long, and its row is lost anyway.
    """
    result, say, repeats = session.result, session.say, session.config.num_turns
    result["description"] = bench.description
    described = bench.description.items()
    say("\n".join(wrapped(f"{name:<8}{text}", 8 * " ") for name, text in described))
    measurements: list[Measurement] = []
    num_all = repeats * len(bench.variants)
    for repeat in range(repeats):
        for variant in bench.of_turn(repeat):
            if any(m.variant == variant and m.failure is not None for m in measurements):
                continue
            found = _measure(bench, variant, repeat, measurements, session)
            measurements.append(found)
            _append(session.folder, found)
            say(f"[{len(measurements)}/{num_all}] {_describe(found, bench.yardstick)}")
    comparison = compare(bench.variants, measurements, bench.yardstick)
    threads = (m.figures["num_threads"] for m in measurements if m.figures)
    result["num_threads"] = next(threads, None)
    result["comparison"] = comparison.as_dict()
    print_comparison(comparison)
    return comparison.problems


def measure_network(session: Session) -> dict[str, str]:
    """Measures what joins the workers, for result.json; a line of the description.

    Nothing where there is one process.
    """
    if session.config.launch.nproc == 1:
        return {}
    figures = network_figures(session.network, session.launch((measure_link, ())))
    session.result["network"] = figures
    return {"network": describe_network(figures)}


def _measure(
    bench: Bench,
    variant: Variant,
    repeat: int,
    measurements: Sequence[Measurement],
    session: Session,
) -> Measurement:
    started_s = time.perf_counter()
    try:
        figures = session.launch(bench.work(variant, measurements))
    except (WorkersFailed, UserError) as error:
        return Measurement(variant, repeat, failure=str(error))
    figures["whole_s"] = round(time.perf_counter() - started_s, 1)
    return Measurement(variant, repeat, figures)


def _append(folder: RunFolder, found: Measurement) -> None:
    line = {
        "side": found.variant.side,
        "precision": found.variant.precision,
        "repeat": found.repeat,
        **found.figures,
        "failure": found.failure,
    }
    path = folder.path / MEASUREMENTS
    with naming(path), open(path, "a") as opened:
        opened.write(json.dumps(line) + "\n")


def _describe(found: Measurement, yardstick: Yardstick) -> str:
    """`dlrm fp32: step ms 45.5, log loss 0.49663  (12 s)`."""
    if found.failure is not None:
        return f"{found.variant.name} FAILED: {found.failure}"
    shown = [
        f"{figure.header} {figure.text(found.figures[figure.key])}"
        for figure in (yardstick.main, *yardstick.columns)
        if figure.header is not None and found.figures.get(figure.key) is not None
    ]
    return f"{found.variant.name}: {', '.join(shown)}  ({found.figures['whole_s']:.0f} s)"
