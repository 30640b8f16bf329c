"""Measures `dlrm prepare` against pyarrow's CSV reader on one file, in turns, and the loader.

    .venv/bin/python scripts/bench_data.py [--rows 2000000] [--repeats 3] [--folder DIR]

Prints one JSON line per measurement and a summary. Each measurement is a fresh process, so peak
memory is its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from data.lanes import NUM_LANES
from data.synthetic import SyntheticConfig, write_raw_tsv


def measure_reader(raw: Path) -> dict[str, Any]:
    """pyarrow's reader alone: parses the file into a table with all cores."""
    import pyarrow as pa
    import pyarrow.csv as pa_csv

    names = ["label", *(f"I{n}" for n in range(1, 14)), *(f"C{n}" for n in range(1, 27))]
    types = {name: pa.string() if name[0] == "C" else pa.int64() for name in names}
    start = time.perf_counter()
    table = pa_csv.read_csv(
        raw,
        read_options=pa_csv.ReadOptions(column_names=names, block_size=4 << 20),
        parse_options=pa_csv.ParseOptions(delimiter="\t", quote_char=False),
        convert_options=pa_csv.ConvertOptions(column_types=types),
    )
    return {"rows": table.num_rows, "seconds": time.perf_counter() - start}


def measure_prepare(raw: Path, root: Path) -> dict[str, Any]:
    """The whole of prepare, with the schema of conf/data/criteo_kaggle.yaml."""
    from hydra import compose, initialize_config_module

    from data.prepare import RawInputs, prepare
    from dlrm.config import register, to_config

    register()
    with initialize_config_module("conf", version_base="1.3"):
        config = to_config(compose("prepare", overrides=["data=criteo_kaggle"]))
    shutil.rmtree(root, ignore_errors=True)
    start = time.perf_counter()
    manifest = prepare(config.data.schema, RawInputs([raw]), root)
    seconds = time.perf_counter() - start
    return {"rows": sum(part.rows for part in manifest.parts.values()), "seconds": seconds}


def measure_loader(root: Path) -> dict[str, Any]:
    """One shuffled epoch of batches of 2,048, prefetched, nothing else running."""
    from data.loader import Prefetcher
    from data.parquet import Order, PreparedDataset

    dataset = PreparedDataset(root)
    start, rows = time.perf_counter(), 0
    with Prefetcher(dataset.batches("train", Order(2048, shuffle=True))) as batches:
        for batch in batches:
            rows += batch.batch_size
    return {"rows": rows, "seconds": time.perf_counter() - start}


def main() -> None:
    """Runs the measurements in turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="keeps the raw file for a rerun")
    parser.add_argument("--only", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        kind, *paths = options.only
        measure = {"reader": measure_reader, "prepare": measure_prepare, "loader": measure_loader}
        figures = measure[kind](*map(Path, paths))
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(json.dumps({"what": kind, **figures, "peak_rss_bytes": peak_kib * 1024}))
        return
    folder = options.folder or Path(tempfile.mkdtemp(prefix="dlrm-bench-"))
    folder.mkdir(parents=True, exist_ok=True)
    raw = folder / f"rows-{options.rows}.tsv"
    if not raw.exists():
        config = SyntheticConfig(
            num_train=options.rows, num_valid=0, num_test=0, cardinality_scale=1.0
        )
        write_raw_tsv(config, raw)
    root = folder / "prepared"
    rates: dict[str, list[float]] = {"reader": [], "prepare": [], "loader": []}
    arguments = {"reader": [raw], "prepare": [raw, root], "loader": [root]}
    for _ in range(options.repeats):
        for kind, paths in arguments.items():
            command = [sys.executable, __file__, "--only", kind, *map(str, paths)]
            line = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            print(line, end="", flush=True)
            figures = json.loads(line)
            rates[kind].append(figures["rows"] / figures["seconds"])
    medians = {kind: statistics.median(values) for kind, values in rates.items()}
    ratios = [p / r for p, r in zip(rates["prepare"], rates["reader"], strict=True)]
    summary = {
        "raw_bytes": raw.stat().st_size,
        "rows_per_s": {kind: round(value) for kind, value in medians.items()},
        "prepare_over_reader": [round(ratio, 3) for ratio in ratios],
        "num_lanes": NUM_LANES,
    }
    print(json.dumps(summary))
    if options.folder is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
