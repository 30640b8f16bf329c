"""How far each phase of this system's step is from what the machine allows.

A phase can't be faster than the slowest of what it can't do without: floating-point operations at
the measured GEMM peak, memory traffic at the measured bandwidth, bytes sent at the measured rate of
the link. That is its *least time* (the roofline model: Williams, Waterman and Patterson 2009,
CACM 52(4)); what it is bound by is the one that takes longest, as the others can go on meanwhile.

All per rank and step, with B samples on the rank, L ids, K distinct rows asked for by the rank's
samples, H distinct rows of the global batch held by the rank (all of them, of a table that every
rank holds), values of e bytes (4, under bf16 2) in the dense network, P dense weights, and
linear layers with `in` and `out` features. *Stream* is at the bandwidth of large arrays, *gather*
at that of rows in random places; both take turns on one memory, so their times add up.

    plan          stream 16·L + 8·K: ids read, a position for each id and the keys written;
                  sent: counts and ids
    lookup        gather the K rows; stream 4·B·S: pooled vectors written;  sent: rows
    forward       flops 2·B·Σ in·out;  stream e·Σ (B·(in + out) + in·out): each layer's input and
                  weights read, its output written
    backward      flops 4·B·Σ in·out, less 2·B·in·out of the first layer, whose input needs no
                  gradient;  stream twice forward's, and 4·B·S and K rows: the pooled vectors'
                  gradient read, one per row written;  sent: grads and replicas
    dense_reduce  sent: 2 (W-1)/W of the dense gradients
    apply         gather H rows and their state, twice: read and written; stream their gradients;
                  sent: squares and norm. With a fused kernel all of it happens in backward
    dense_update  stream 4·P times 3 (SGD: weight and gradient read, weight written), 5 (Adagrad:
                  and state read and written) or 7 (Adam: two states)

What is sent is what the communicator counted, plus half a round trip for each collective. Biases,
activations, the interaction, the loss and all waiting for others are left out, and each phase has
the whole link and all threads of its rank to itself: a bound, not a forecast. Two things can make a
phase faster than it: rows that many samples ask for lie in the cache, and with `train.overlap` what
a phase sends travels during another. The whole step can't be faster than its phases' flops and
memory traffic one after the other, nor than all that it sends.
"""

from __future__ import annotations

import io
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from data.parquet import PreparedDataset
from dlrm.bench.batches import memory_batches
from dlrm.bench.machine_limits import MachineLimits, measure_limits
from dlrm.bench.sides import OWN
from dlrm.bench.turns import MEASUREMENTS, Session
from dlrm.build import build_model, build_tables
from dlrm.config import BenchRun
from dlrm.launch import WorkerContext
from dlrm.phases import with_other
from embeddings.plan import Plan
from embeddings.row_optim import RowOptimizerConfig, RowOptimizerName, state_widths
from embeddings.table_group import tables_everywhere

TABLE_WIDTH = 100
_BELOW = "a ratio below 1: its rows lie in the cache, or what it sends travels during another phase"
_NUM_COUNTED_BATCHES = 8
_SENT_IN = {
    "plan": ("counts", "ids"),
    "lookup": ("rows",),
    "backward": ("grads", "replicas"),
    "dense_reduce": ("dense",),
    "apply": ("squares", "norm"),
}
_DENSE_UPDATE_ACCESSES = {"sgd": 3, "adagrad": 5, "adam": 7, "adamw": 7}


@dataclass(frozen=True)
class StepCounts:
    """What a step has to do, per rank: see the module for the letters.

    Attributes:
        num_samples: `B`.
        num_ids: `L`.
        pooled_width: `S`.
        requested_rows: `K`.
        requested_bytes: of these rows.
        held_bytes: of the `H` rows.
        held_state_bytes: of their optimizer state.
        layers: `(in, out)` of each linear layer, in order.
        num_dense_weights: `P`.
        dense_optimizer: rule of the dense weights.
    """

    num_samples: float
    num_ids: float
    pooled_width: int
    requested_rows: float
    requested_bytes: float
    held_bytes: float
    held_state_bytes: float
    layers: Sequence[tuple[int, int]]
    num_dense_weights: int
    dense_optimizer: str


@dataclass(frozen=True)
class PhaseWork:
    """What a phase can't do without."""

    flops: float = 0.0
    stream_bytes: float = 0.0
    gather_bytes: float = 0.0
    sent_bytes: float = 0.0
    num_collectives: float = 0.0

    def times_ms(self, limits: MachineLimits, precision: str) -> dict[str, float]:
        """What its `flops`, its `memory` traffic and its `link` take each."""
        link_s = 0.0
        if limits.link_bytes_per_s is not None and limits.latency_us is not None:
            link_s = self.sent_bytes / limits.link_bytes_per_s
            link_s += self.num_collectives * limits.latency_us / 1e6
        memory_s = self.stream_bytes / limits.stream_bytes_per_s
        memory_s += self.gather_bytes / limits.gather_bytes_per_s
        flops_s = self.flops / limits.gemm_flops_per_s[precision]
        return {"flops": flops_s * 1e3, "memory": memory_s * 1e3, "link": link_s * 1e3}

    def least(self, limits: MachineLimits, precision: str) -> tuple[str, float]:
        """What bounds it, and its least time in ms."""
        times = self.times_ms(limits, precision)
        bound = max(times, key=lambda name: times[name])
        return bound, times[bound]

    def text(self, bound: str) -> str:
        """What there is to do of what bounds it."""
        if bound == "flops":
            return f"{self.flops / 1e9:,.2f} GFLOP"
        if bound == "link":
            return f"{self.sent_bytes / 1e6:,.2f} MB, {self.num_collectives:.3g} collective(s)"
        parts = {"stream": self.stream_bytes, "gather": self.gather_bytes}
        return ", ".join(f"{name} {b / 1e6:,.2f} MB" for name, b in parts.items() if b) or "nothing"


@dataclass(frozen=True)
class PhaseDistance:
    """How far a phase, or the whole step, is from its least time.

    Attributes:
        phase: its name; `other` and `step` aren't phases.
        bound: `flops`, `memory` or `link`, of the step `cores` or `link`; None of what has no least
            time.
        work: how much of that there is to do, for people.
        ratio: measured over least.
    """

    phase: str
    bound: str | None
    work: str
    least_ms: float
    measured_ms: float
    ratio: float | None


@dataclass(frozen=True)
class RooflineTask:
    """What every rank gets: see `SideTask`."""

    config: BenchRun
    dataset_root: Path
    plan: Plan


def measure_roofline(context: WorkerContext, task: RooflineTask) -> dict[str, Any]:
    """One rank: this machine's limits, and on rank 0 what a step has to do."""
    limits = measure_limits(context, task.config.model.embedding_dim)
    if context.rank:
        return {}
    dataset = PreparedDataset(task.dataset_root)
    counts = count_step(task.config, dataset, task.plan)
    return {
        "limits": asdict(limits),
        "counts": asdict(counts),
        "num_threads": torch.get_num_threads(),
    }


def count_step(config: BenchRun, dataset: PreparedDataset, plan: Plan) -> StepCounts:
    """What a step has to do, as a mean over some batches of the benchmark; one rank can tell."""
    world_size = plan.world_size
    tables, features = build_tables(config, dataset.manifest)
    dims = {table.name: table.dim for table in tables}
    optimizer = RowOptimizerConfig(cast(RowOptimizerName, config.optim.sparse.name))
    everywhere = tables_everywhere(plan)
    num_batches = min(config.bench.steps, _NUM_COUNTED_BATCHES)
    distinct = {}
    num_ids = 0
    for ranks in {1, world_size}:
        batches = memory_batches(
            dataset,
            "train",
            batch_size=config.data.batch_size,
            num_batches=num_batches,
            bag_size=config.bench.bag_size,
            seed=config.seed,
            rank=0,
            world_size=ranks,
        )
        distinct[ranks] = dict.fromkeys(dims, 0)
        for batch in batches:
            ends = batch.ids.offsets[:: batch.batch_size].tolist()
            by_table: dict[str, list[torch.Tensor]] = {}
            for number, feature in enumerate(features):
                ids = batch.ids.values_L[ends[number] : ends[number + 1]]
                by_table.setdefault(feature.table, []).append(ids)
            for name, parts in by_table.items():
                distinct[ranks][name] += torch.cat(parts).unique().numel()
        if ranks == 1:
            num_ids = sum(batch.ids.values_L.numel() for batch in batches)
    asked = {name: count / num_batches for name, count in distinct[world_size].items()}
    held = {
        name: count / num_batches / (1 if name in everywhere else world_size)
        for name, count in distinct[1].items()
    }
    model = build_model(config, dataset.manifest)
    shapes = [m.weight.shape for m in model.modules() if isinstance(m, nn.Linear)]
    return StepCounts(
        num_samples=config.data.batch_size / world_size,
        num_ids=num_ids / num_batches / world_size,
        pooled_width=sum(dims[feature.table] for feature in features),
        requested_rows=sum(asked.values()),
        requested_bytes=sum(4 * dims[name] * rows for name, rows in asked.items()),
        held_bytes=sum(4 * dims[name] * rows for name, rows in held.items()),
        held_state_bytes=sum(
            4 * sum(state_widths(optimizer, dims[name]).values()) * rows
            for name, rows in held.items()
        ),
        layers=[(num_in, num_out) for num_out, num_in in shapes],
        num_dense_weights=sum(p.numel() for p in model.parameters()),
        dense_optimizer=config.optim.dense.name,
    )


def phase_works(
    counts: StepCounts,
    sent_bytes: Mapping[str, float],
    collectives: Mapping[str, float],
    *,
    precision: str,
    is_fused: bool,
) -> dict[str, PhaseWork]:
    """What each phase can't do without, as the module says.

    Args:
        counts: of a step.
        sent_bytes: per step and rank, by kind (`embeddings.communicator.KINDS`).
        collectives: likewise.
        precision: `fp32` or `bf16`.
        is_fused: whether backward updates the rows.
    """
    value_bytes = 2 if precision == "bf16" else 4
    samples = counts.num_samples
    products = [samples * num_in * num_out for num_in, num_out in counts.layers]
    layer_bytes = value_bytes * sum(
        samples * (num_in + num_out) + num_in * num_out for num_in, num_out in counts.layers
    )
    pooled_bytes = 4 * samples * counts.pooled_width
    update_gather = 2 * (counts.held_bytes + counts.held_state_bytes)
    accesses = _DENSE_UPDATE_ACCESSES[counts.dense_optimizer]
    found = {
        "plan": PhaseWork(stream_bytes=16 * counts.num_ids + 8 * counts.requested_rows),
        "lookup": PhaseWork(stream_bytes=pooled_bytes, gather_bytes=counts.requested_bytes),
        "forward": PhaseWork(flops=2 * sum(products), stream_bytes=layer_bytes),
        "backward": PhaseWork(
            flops=4 * sum(products) - 2 * products[0],
            stream_bytes=2 * layer_bytes + pooled_bytes + counts.requested_bytes,
            gather_bytes=update_gather if is_fused else 0.0,
        ),
        "dense_reduce": PhaseWork(),
        "apply": PhaseWork()
        if is_fused
        else PhaseWork(stream_bytes=counts.held_bytes, gather_bytes=update_gather),
        "dense_update": PhaseWork(stream_bytes=4 * counts.num_dense_weights * accesses),
    }
    for phase, kinds in _SENT_IN.items():
        sent = sum(sent_bytes.get(kind, 0.0) for kind in kinds)
        number = sum(collectives.get(kind, 0.0) for kind in kinds)
        found[phase] = PhaseWork(
            **asdict(found[phase]) | {"sent_bytes": sent, "num_collectives": number}
        )
    return found


def bench_roofline(session: Session, dataset_root: Path, plan: Plan) -> None:
    """Measures the limits, prints the phases' distance to them and adds it to the result.

    Of a benchmark whose turns are done, and for several processes whose link is measured. Where
    this system isn't among the sides, the limits alone.
    """
    task = RooflineTask(session.config, dataset_root, plan)
    found = roofline(
        session.launch((measure_roofline, (task,))),
        _own_figures(session.folder.path / MEASUREMENTS),
        session.result["network"] if session.config.launch.nproc > 1 else None,
    )
    session.result["roofline"] = found
    session.say("\n".join(roofline_table(found)))


def roofline(
    measured: Mapping[str, Any],
    figures: Mapping[str, Sequence[Mapping[str, Any]]],
    network: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The `roofline` part of result.json.

    Args:
        measured: what `measure_roofline` returned.
        figures: by precision, this system's figures of each turn; the turn with the median step
            counts.
        network: `network_figures` of the link; None for one process.

    Returns:
        `limits`, `counts`, `num_threads`, and `phases`: by precision, a `PhaseDistance` for each
        phase, and one for the whole step.
    """
    limits = MachineLimits(**measured["limits"])
    if network is not None:
        # Of two ways to exchange the better one: that is what a limit is.
        best = max(network["measured_bytes_per_s"], network["all_to_all_bytes_per_s"])
        limits = replace(limits, link_bytes_per_s=best, latency_us=network["round_trip_us"] / 2)
    counts = StepCounts(**measured["counts"])
    found = {}
    for precision, turns in figures.items():
        turn = sorted(turns, key=lambda t: t["step_ms_p50"])[len(turns) // 2]
        step_ms = statistics.fmean(turn["step_ms"])
        works = phase_works(
            counts,
            turn["sent_bytes"],
            turn["collectives"],
            precision=precision,
            is_fused=turn["note"].startswith("backend fbgemm"),
        )
        rows = []
        for name, measured_ms in with_other(turn["phase_ms"], step_ms).items():
            work = works.get(name, PhaseWork())
            bound, least_ms = work.least(limits, precision)
            if least_ms:
                ratio = measured_ms / least_ms
                row = PhaseDistance(name, bound, work.text(bound), least_ms, measured_ms, ratio)
            else:
                row = PhaseDistance(name, None, "", 0.0, measured_ms, None)
            rows.append(row)
        rows.append(_step_distance(works, limits, precision, step_ms))
        found[precision] = [asdict(row) for row in rows]
    return {**measured, "limits": asdict(limits), "phases": found}


def _step_distance(
    works: Mapping[str, PhaseWork], limits: MachineLimits, precision: str, step_ms: float
) -> PhaseDistance:
    """Of the whole step: phases follow each other, but what they send may travel all the time."""
    times = [work.times_ms(limits, precision) for work in works.values()]
    cores_ms = sum(max(of_phase["flops"], of_phase["memory"]) for of_phase in times)
    link_ms = sum(of_phase["link"] for of_phase in times)
    bound, work, least_ms = "cores", "flops or memory of all phases", cores_ms
    if link_ms > cores_ms:
        bound, work, least_ms = "link", "all that is sent", link_ms
    return PhaseDistance("step", bound, work, least_ms, step_ms, step_ms / least_ms)


def describe_limits(found: Mapping[str, Any]) -> str:
    """One line of a `roofline`'s limits."""
    limits = MachineLimits(**found["limits"])
    gemm = ", ".join(
        f"{name} {rate / 1e9:,.0f} GFLOP/s" for name, rate in limits.gemm_flops_per_s.items()
    )
    parts = [
        f"matrix products {gemm}",
        f"memory {limits.stream_bytes_per_s / 1e9:,.1f} GB/s",
        f"random rows of {limits.row_bytes} bytes {limits.gather_bytes_per_s / 1e9:,.2f} GB/s",
    ]
    if limits.link_bytes_per_s is not None:
        parts.append(
            f"link {limits.link_bytes_per_s / 1e6:,.0f} MB/s each way, {limits.latency_us:,.0f} µs"
        )
    return "; ".join(parts)


def roofline_table(found: Mapping[str, Any]) -> list[str]:
    """What is printed of a `roofline`, at most 100 columns wide."""
    console = Console(file=io.StringIO(), width=TABLE_WIDTH, color_system=None)
    console.print()
    console.print(
        f"limits of a rank with {found['num_threads']} thread(s): {describe_limits(found)}",
        highlight=False,
    )
    for precision, rows in found["phases"].items():
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        table.add_column(f"dlrm {precision}", no_wrap=True)
        for header in ("least ms", "measured ms", "ratio"):
            table.add_column(header, justify="right", no_wrap=True)
        table.add_column("bound by", no_wrap=True, overflow="ellipsis")
        for row in rows:
            table.add_row(*_cells(row))
        console.print()
        console.print(table)
    if _is_any_below(found):
        console.print(_BELOW, highlight=False)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def roofline_lines(found: Mapping[str, Any]) -> list[str]:
    """A `roofline` as lines of markdown: a sentence, and a table for each precision."""
    lines = [
        f"Limits of a rank with {found['num_threads']} thread(s), all ranks at once: "
        f"{describe_limits(found)}. A phase's least time is that of the work that it can't do "
        "without (`dlrm/bench/roofline.py`).",
    ]
    for precision, rows in found["phases"].items():
        lines += [
            "",
            f"| dlrm {precision} | least, ms | measured, ms | ratio | bound by |",
            "|---|---|---|---|---|",
            *(f"| {' | '.join(_cells(row))} |" for row in rows),
        ]
    return [*lines, "", f"- {_BELOW}"] if _is_any_below(found) else lines


def _is_any_below(found: Mapping[str, Any]) -> bool:
    rows = (row for rows in found["phases"].values() for row in rows)
    return any(row["ratio"] is not None and row["ratio"] < 1 for row in rows)


def _own_figures(measurements_file: Path) -> dict[str, list[dict[str, Any]]]:
    """This system's figures that a benchmark wrote down, by precision, turn by turn."""
    found: dict[str, list[dict[str, Any]]] = {}
    for text in measurements_file.read_text().splitlines():
        line = json.loads(text)
        if line["side"] == OWN and line["failure"] is None:
            found.setdefault(line["precision"], []).append(line)
    return found


def _cells(row: Mapping[str, Any]) -> list[str]:
    found = PhaseDistance(**row)
    return [
        found.phase.replace("_", " "),
        f"{found.least_ms:,.2f}" if found.least_ms else "",
        f"{found.measured_ms:,.2f}",
        "" if found.ratio is None else f"{found.ratio:,.1f}",
        "" if found.bound is None else f"{found.bound}: {found.work}",
    ]
