"""`dlrm bench loader`: from a prepared dataset to batches, of all sides, in turns."""

from __future__ import annotations

import importlib
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from data.errors import UserError
from data.loader import Prefetcher
from data.manifest import Manifest
from data.parquet import Order, PreparedDataset
from data.synthetic import NUM_DENSE, NUM_SPARSE
from dlrm.bench.comparison import Figure, Turns, Variant, Yardstick
from dlrm.bench.measure import process_figures
from dlrm.bench.sides import OWN, TORCHREC_DATA, data_sides, hush_torchrec
from dlrm.bench.turns import Bench, Session, take_turns
from dlrm.config import BenchRun
from dlrm.datasets import open_dataset
from dlrm.display import PrepareDisplay
from dlrm.launch import WorkerContext
from embeddings.machine import available_bytes

READS = {"data": True, "data.shuffle": False, "data.eval_batch_size": False}
"""See `warn_of_ignored`."""

DATALOADER = "torch_dataloader"
SIDES = (OWN, TORCHREC_DATA, DATALOADER)
_FILES = ("dense", "sparse", "labels")
_ROW_BYTES = 4 * NUM_DENSE + 8 * NUM_SPARSE + 4


@dataclass(frozen=True)
class LoaderTask:
    """What a measurement gets.

    Attributes:
        side: its name.
        config: the configuration.
        dataset_root: the prepared data.
    """

    side: str
    config: BenchRun
    dataset_root: Path


@dataclass
class Epoch:
    """What came of an epoch: each sample once?"""

    samples: int = 0
    batches: int = 0
    label_sum: float = 0.0

    def add(self, label_B: Tensor) -> None:
        """Counts a batch."""
        self.samples += label_B.numel()
        self.batches += 1
        self.label_sum += float(label_B.sum())


def bench_loader(session: Session) -> list[str]:
    """Measures, prints the table and adds it to the result; returns what makes the benchmark fail.

    Raises:
        UserError: for what can't be compared; nothing has been measured then.
    """
    config = session.config
    sides = data_sides(config, SIDES)
    with PrepareDisplay() as display:
        dataset = open_dataset(config.data, Path.cwd(), display)
    dataset.check("train")
    num_rows = dataset.num_rows("train")
    _check_peers(dataset.manifest, num_rows, sides)
    session.result["data"] = {"name": config.data.name, "digest": dataset.manifest.digest()}
    turns = Bench(
        [Variant(side, "") for side in sides],
        lambda variant, _: (
            measure_loader,
            (LoaderTask(variant.side, config, dataset.root),),
        ),
        loader_yardstick(num_rows),
        {
            "bench": f"loader, {num_rows:,} rows, batches of {config.data.batch_size:,}, shuffled",
            "model": f"{len(dataset.manifest.dense_columns)} dense and "
            f"{len(dataset.features)} sparse features",
            "steps": f"{config.num_turns} turns, of which each measures a second epoch; "
            "nothing trains meanwhile",
        },
    )
    return take_turns(turns, session)


def loader_yardstick(num_rows: int) -> Yardstick:
    """Samples per second; whether all sides have yielded each of `num_rows` samples once."""
    return Yardstick(
        Figure("samples_per_s", "samples_per_s", "k samples/s", 1, 1e-3),
        is_rate=True,
        columns=[
            Figure("samples", "samples", "samples", 0),
            Figure("label_sum", "label_sum", "label sum", 0),
            Figure("first_epoch_s", "first_epoch_s", "1st epoch, s", 2),
            Figure("peak_rss_bytes", "peak_rss_bytes", "peak MiB", 0, 2**-20),
        ],
        own=(OWN,),
        torchrec=(TORCHREC_DATA,),
        floors=(),
        disagreements=lambda turns: _disagreements(turns, num_rows),
        notes=_notes,
    )


def _check_peers(manifest: Manifest, num_rows: int, sides: list[str]) -> None:
    peers = [side for side in sides if side != OWN]
    leave = f"leave it out: bench.sides=[{','.join(s for s in sides if s != TORCHREC_DATA)}]"
    if peers and any(f.is_list or f.bag_weights is not None for f in manifest.features):
        raise UserError(
            f"the data have features of several ids, which the peers {', '.join(peers)} aren't "
            f"built for here; choose other data (data=synthetic_full), or bench.sides=[{OWN}]"
        )
    if TORCHREC_DATA in sides and len(manifest.features) != NUM_SPARSE:
        raise UserError(
            f"the data have {len(manifest.features)} sparse features; TorchRec's loader is made "
            f"for Criteo's {NUM_SPARSE}: choose other data (data=synthetic_full), or {leave}"
        )
    available = available_bytes()
    needed = 3 * num_rows * _ROW_BYTES  # The arrays, TorchRec's shuffled copy, what is read first.
    if peers and available is not None and needed > available:
        raise UserError(
            f"the peers {', '.join(peers)} hold all rows in memory, {needed / 2**30:.1f} GiB at "
            f"first, but {available / 2**30:.1f} GiB are free here. Lower "
            f"data.synthetic.num_train, or set bench.sides=[{OWN}]"
        )


# ------------------------------------------------------------------------------ in the worker


def measure_loader(context: WorkerContext, task: LoaderTask) -> dict[str, Any]:
    """Two epochs of batches; the time of the second, and of the first with what precedes it."""
    dataset = PreparedDataset(task.dataset_root)
    context.heartbeat.beat(0, "write the peers' files")
    with tempfile.TemporaryDirectory(prefix="dlrm-bench-") as folder:
        files = {} if task.side == OWN else _write_arrays(dataset, Path(folder))
        if task.side == TORCHREC_DATA:
            hush_torchrec()
            importlib.import_module("torchrec.datasets.criteo")  # Seconds that aren't the loader's.
        start_s = time.perf_counter()
        if task.side == OWN:
            epochs, note = _own(task.config, dataset)
        else:
            open_peer = {TORCHREC_DATA: _torchrec, DATALOADER: _dataloader}[task.side]
            epochs, note = open_peer(task.config, files)
        _run_epoch(context, next(epochs))
        from_files_s = time.perf_counter() - start_s
        start_s = time.perf_counter()
        found = _run_epoch(context, next(epochs))
        seconds = time.perf_counter() - start_s
    return {
        "samples_per_s": found.samples / seconds,
        "seconds": seconds,
        "first_epoch_s": from_files_s,
        "samples": found.samples,
        "batches": found.batches,
        "label_sum": found.label_sum,
        "note": note,
        **process_figures(),
    }


def _run_epoch(context: WorkerContext, batches: Iterable[Tensor]) -> Epoch:
    found = Epoch()
    for label_B in batches:
        if not found.batches % 64:
            context.heartbeat.beat(found.batches, "epoch")
        found.add(label_B)
    return found


Epochs = Iterator[Iterable[Tensor]]
"""One after the other: the labels of each batch, whose other parts are there as well."""


def _own(config: BenchRun, dataset: PreparedDataset) -> tuple[Epochs, str]:
    def epoch(number: int) -> Iterator[Tensor]:
        order = Order(config.data.batch_size, seed=config.seed, epoch=number, shuffle=True)
        with Prefetcher(dataset.batches("train", order)) as batches:
            for batch in batches:
                assert batch.label_B is not None
                yield batch.label_B

    note = "parquet read by one thread ahead, in every epoch; shuffled anew; ids feature by feature"
    return (epoch(number) for number in count()), note


def _torchrec(config: BenchRun, files: dict[str, str]) -> tuple[Epochs, str]:
    from torchrec.datasets.criteo import InMemoryBinaryCriteoIterDataPipe

    pipe = InMemoryBinaryCriteoIterDataPipe(
        "train",
        *([files[name]] for name in _FILES),
        batch_size=config.data.batch_size,
        rank=0,
        world_size=1,
        shuffle_training_set=True,
        shuffle_training_set_random_seed=config.seed,
    )
    note = (
        "InMemoryBinaryCriteoIterDataPipe: all rows in memory, shuffled once when they are loaded: "
        "the same order in every epoch; ids feature by feature"
    )
    return ((batch.labels for batch in pipe) for _ in count()), note


def _dataloader(config: BenchRun, files: dict[str, str]) -> tuple[Epochs, str]:
    rows = TensorDataset(*(torch.from_numpy(np.load(files[name])) for name in _FILES))
    generator = torch.Generator().manual_seed(config.seed)
    sampler = BatchSampler(
        RandomSampler(rows, generator=generator), config.data.batch_size, drop_last=False
    )
    loader = DataLoader(rows, sampler=sampler, batch_size=None)
    note = (
        "DataLoader(TensorDataset, sampler=BatchSampler(RandomSampler), batch_size=None), in this "
        "process: all rows in memory, shuffled anew; ids sample by sample"
    )
    return ((labels_B1 for _, _, labels_B1 in loader) for _ in count()), note


def _write_arrays(dataset: PreparedDataset, folder: Path) -> dict[str, str]:
    """All rows in the raw order, as TorchRec's files have them; file names by `_FILES`."""
    num_rows, num_features = dataset.num_rows("train"), len(dataset.features)
    dense_BN = np.empty((num_rows, len(dataset.manifest.dense_columns)), dtype=np.float32)
    ids_BF = np.empty((num_rows, num_features), dtype=np.int64)
    labels_B1 = np.empty((num_rows, 1), dtype=np.int32)
    for batch in dataset.batches("train", Order(65_536)):
        rows = batch.row_B.numpy()
        dense_BN[rows] = batch.dense_BN.numpy()
        ids_BF[rows] = batch.ids.values_L.view(num_features, batch.batch_size).t().numpy()
        assert batch.label_B is not None
        labels_B1[rows, 0] = batch.label_B.numpy()
    found = {}
    arrays: list[np.ndarray] = [dense_BN, ids_BF, labels_B1]
    for name, array in zip(_FILES, arrays, strict=True):
        found[name] = str(folder / f"{name}.npy")
        np.save(found[name], array)
    return found


# ------------------------------------------------------------------------------ what must agree


def _disagreements(turns: Turns, num_rows: int) -> list[str]:
    problems = []
    known = [(variant, m.figures) for variant, found in turns.items() for m in found]
    for variant, figures in known:
        if figures["samples"] != num_rows:
            problems.append(
                f"{variant.name} has yielded {figures['samples']:,} samples in an epoch of "
                f"{num_rows:,}"
            )
    sums = {variant.name: figures["label_sum"] for variant, figures in known}
    if len(set(sums.values())) > 1:
        each = ", ".join(f"{name} {value:,.0f}" for name, value in sums.items())
        problems.append(f"the labels of an epoch have different sums: {each}")
    return list(dict.fromkeys(problems))


def _notes(turns: Turns) -> list[str]:
    lines = [
        "samples and label sum: of an epoch, each sample once; they must agree",
        "rates are of the second epoch; the first is counted from the files on, so with what is "
        "loaded into memory",
    ]
    for variant, found in turns.items():
        if found:
            lines.append(f"{variant.name}: {found[0].figures['note']}")
    return lines
