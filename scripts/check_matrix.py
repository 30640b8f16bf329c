"""Runs `dlrm check` over ranks, layouts, memory, rules, threads, seeds and instruction sets.

    .venv/bin/python scripts/check_matrix.py [--cases 40] [--seed 0] [KEY=VALUE …]

Each case is a command of its own, as a user would type it, with the settings that it names, and
all others at their defaults. Of the full product `--cases` are drawn, in which each value of each
axis occurs about equally often. Instruction sets are asked for through the variables that MKL,
oneDNN and torch read; those that this processor lacks are left out and named.

Prints a line per case and a summary; exits with 1 where a case fails. (`check_all.py` plants the
faults, on every number of ranks.)
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LAYOUTS = ("table_wise", "row_wise", "column_wise", "table_row_wise", "replicated", "auto")
MEMORY = ("device", "gather", "lookahead", "hotline")
RULES = ("sgd", "adagrad", "rowwise_adagrad", "adam")
RANKS, THREADS, SEEDS = (1, 2, 4), (1, 2), range(10)
# Name, what /proc/cpuinfo must tell, and the variables that ask for it.
INSTRUCTIONS: dict[str, tuple[str, dict[str, str]]] = {
    "own choice": ("", {}),
    "plain": ("", {"ATEN_CPU_CAPABILITY": "default"}),
    "sse4": ("sse4_2", {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"}),
    "avx2": ("avx2", {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}),
    "avx512": (
        "avx512f",
        {"MKL_ENABLE_INSTRUCTIONS": "AVX512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    ),
    "amx": ("amx_tile", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"}),
}


def draw(num_cases: int, seed: int) -> list[tuple[list[str], str]]:
    """(overrides, instruction set) of each case."""
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    known = [name for name, (flag, _) in INSTRUCTIONS.items() if not flag or flag in flags]
    if missing := sorted(INSTRUCTIONS.keys() - set(known)):
        print(f"left out, since this processor lacks them: {', '.join(missing)}", flush=True)
    rng = random.Random(seed)

    def deal(values: Sequence[Any]) -> list[Any]:
        """The values again and again, each round in another order."""
        num_rounds = -(-num_cases // len(values))
        dealt = [value for _ in range(num_rounds) for value in rng.sample(values, len(values))]
        return dealt[:num_cases]

    axes = [deal(axis) for axis in (RANKS, LAYOUTS, MEMORY, RULES, THREADS, SEEDS, known)]
    return [_case(*values) for values in zip(*axes, strict=True)]


def _case(
    ranks: int, layout: str, memory: str, rule: str, threads: int, seed: int, instructions: str
) -> tuple[list[str], str]:
    overrides = [f"launch.nproc={ranks}", f"launch.num_threads={threads}", f"seed={seed}"]
    overrides += [f"optim.sparse.name={rule}"]
    if memory != "device":
        overrides += ["sharding.memory=host", f"sharding.host.mode={memory}"]
        # A replica lies on every device: it has no place in host memory.
        layout = "auto" if layout == "replicated" else layout
    return [*overrides, f"sharding={layout}"], instructions


def check(overrides: list[str], instructions: str, folder: Path) -> tuple[int, dict[str, Any], str]:
    """(exit status, result.json, last words) of one command."""
    done = subprocess.run(
        [sys.executable, "-m", "dlrm", "check", *overrides, f"hydra.run.dir={folder}"],
        env=os.environ | INSTRUCTIONS[instructions][1],
        capture_output=True,
        text=True,
        check=False,
    )
    path = folder / "result.json"
    result = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return done.returncode, result, (done.stderr.strip() or "no message").splitlines()[-1]


def main() -> int:
    """Exit status: 0 where every case came out as it should."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("overrides", nargs="*", help="further keys of every case")
    options = parser.parse_args()
    cases = draw(options.cases, options.seed)
    num_wrong, largest = 0, (0.0, "")
    for overrides, instructions in cases:
        with tempfile.TemporaryDirectory() as folder:
            status, result, words = check(
                [*overrides, *options.overrides], instructions, Path(folder) / "run"
            )
        share = max((p["limits"]["largest_share"] for p in result.get("passes", [])), default=0.0)
        name = f"{' '.join(overrides)} [{instructions}]"
        num_wrong += status != 0
        largest = max(largest, (share, name))
        told = f"{share:9.3g} of its limit" if result else words
        print(f"{'PASS' if status == 0 else 'FAIL'}  {told}  {name}", flush=True)
    print(f"{len(cases)} cases, {num_wrong} failed; largest share {largest[0]:.3g}: {largest[1]}")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
