"""The whole model through `torch.export`: ids in, logits out, compared with our own scoring.

The tables become `nn.EmbeddingBag`s: torch.export takes those, and a server needs none of ours. A
bag's mean is its (weighted) sum over its number of ids, as everywhere here.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from data.batch import Batch
from data.errors import UserError
from data.files import naming
from data.manifest import Manifest
from data.parquet import Order, PreparedDataset
from data.schema import Feature
from data.vocabulary import missing_row
from dlrm.checkpoint import CheckpointInfo
from dlrm.export_folder import ExportFolder
from dlrm.model import DLRM
from dlrm.score import TrainedModel
from dlrm.scoring import score_batches
from embeddings.store import WEIGHT

MODEL_FILE = "model.pt2"
INPUTS_FILE = "inputs.json"
TOLERANCE = 1e-6
"""How far a probability of the exported model may lie from that of `dlrm predict`."""
_EXAMPLE_SAMPLES = 5

Bag = Tensor | tuple[Tensor, ...]
"""The ids of a feature, see `ExportableModel.forward`."""


class ExportableModel(nn.Module):
    """A trained model as one module of torch's own parts.

    Args:
        features: the sparse features, in order.
        tables: every table's rows, `(R, D)`.
        model: the dense network.
    """

    def __init__(self, features: Sequence[Feature], tables: dict[str, Tensor], model: DLRM) -> None:
        super().__init__()
        self._features = tuple(features)
        # By number: ModuleDict takes no dots in names, and no names of its own methods.
        self._numbers = {name: number for number, name in enumerate(tables)}
        self.tables = nn.ModuleList(
            nn.EmbeddingBag.from_pretrained(rows_RD, mode="sum", include_last_offset=True)
            for rows_RD in tables.values()
        )
        self.model = model
        self.eval().requires_grad_(False)

    def forward(self, dense_BN: Tensor, ids: list[Bag]) -> Tensor:
        """`(B,)` logits.

        Args:
            dense_BN: fp32 dense features after their transform; `(B, 0)` where there are none.
            ids: of each sparse feature in order: `(B,)` int64 rows of its table; of a feature
                whose bags are lists `(values_L, offsets)`, where bag b is
                `values_L[offsets[b] : offsets[b + 1]]` (`offsets` has B + 1 entries, the first 0
                and the last L), and of one with bag weights `(values_L, offsets, weights_L)`.
        """
        dtype = self.model.head.weight.dtype
        pooled = [
            self._pooled(feature, bag) for feature, bag in zip(self._features, ids, strict=True)
        ]
        pooled_BS = torch.cat(pooled, dim=1) if pooled else dense_BN.new_zeros(dense_BN.shape[0], 0)
        logits_B: Tensor = self.model(dense_BN.to(dtype), pooled_BS.to(dtype))
        return logits_B

    def _pooled(self, feature: Feature, bag: Bag) -> Tensor:
        table = self.tables[self._numbers[feature.table]]
        if isinstance(bag, Tensor):
            single: Tensor = table(bag.unsqueeze(1))
            return single
        values_L, offsets = bag[:2]
        # Weights of a bag come in fp32, whatever the tables are.
        weights_L = bag[2].to(self.model.head.weight.dtype) if len(bag) > 2 else None
        pooled_BD: Tensor = table(values_L, offsets, weights_L)
        if feature.pooling == "mean":
            lengths_B1 = offsets.diff().clamp(min=1).unsqueeze(1)
            pooled_BD = pooled_BD / lengths_B1.to(pooled_BD.dtype)
        return pooled_BD


def model_inputs(batch: Batch, features: Sequence[Feature]) -> tuple[Tensor, list[Bag]]:
    """What `ExportableModel.forward` takes for a batch of this system.

    A batch of one sample is given twice, since an exported model takes two at least: the logits
    have one more than the batch then.
    """
    dense_BN, size = batch.dense_BN, batch.batch_size
    times = 2 if size == 1 else 1
    ids: list[Bag] = []
    for feature in features:
        first = feature.position * size
        offsets = batch.ids.offsets[first : first + size + 1]
        begin, end = int(offsets[0]), int(offsets[-1])
        values_L = batch.ids.values_L[begin:end].repeat(times)
        if not feature.is_list:
            ids.append(values_L)
            continue
        offsets = offsets - begin
        if times == 2:
            offsets = torch.cat([offsets, offsets[1:] + offsets[-1]])
        if not feature.bag_weights:
            ids.append((values_L, offsets))
            continue
        weights_L = batch.ids.weights_L
        assert weights_L is not None
        ids.append((values_L, offsets, weights_L[begin:end].repeat(times)))
    return dense_BN.repeat(times, 1), ids


def export_model(
    trained: TrainedModel, part: str, num_samples: int, folder: ExportFolder
) -> dict[str, Any]:
    """Writes `model.pt2` and `inputs.json`; returns what result.json says of them.

    The file is read back before it gets its name, and scores the first rows of a part; so does the
    model as it was before. Memory: about three times the tables' size, all of it torch's own.

    Args:
        trained: the model; its tables are dropped on the way.
        part: of the prepared dataset.
        num_samples: rows to compare.
        folder: of the export.

    Raises:
        UserError: where a probability differs by more than `TOLERANCE`.
    """
    info, dataset = trained.task.info, trained.dataset
    # Under bf16 autocast a last bit is worth 1e-3: the weights, which are fp32, are compared in it.
    expected = list(_own_logits(trained, part, num_samples, "fp32"))
    as_trained = expected
    if trained.precision == "bf16":
        as_trained = list(_own_logits(trained, part, num_samples, "bf16"))
    model = trained.model
    del trained.embeddings
    exportable = ExportableModel(dataset.features, _read_tables(info), model)
    program = _export(exportable, dataset)
    del exportable
    with TemporaryDirectory(prefix=".model-", dir=folder.path) as work:
        path = Path(work) / MODEL_FILE
        _save(program, path)
        del program
        logits = list(_exported_logits(path, dataset, part, num_samples, trained))
        difference = _largest_difference(logits, expected)
        if not difference <= TOLERANCE:
            raise UserError(
                f"probabilities of the exported model differ by up to {difference:g} from those of "
                f"this system on the {part} part, more than {TOLERANCE:g}: nothing was written. "
                "Values that aren't finite, of a run that diverged, differ always: choose another "
                "checkpoint="
            )
        folder.take(path, MODEL_FILE)
    with folder.open(INPUTS_FILE) as sink:
        sink.write((json.dumps(describe_inputs(dataset.manifest), indent=1) + "\n").encode())
    compared: dict[str, Any] = {
        "part": part,
        "samples": sum(len(logits_B) for logits_B in logits),
        "tolerance": TOLERANCE,
        "largest_difference": difference,
    }
    if as_trained is not expected:
        compared["largest_difference_from_bf16"] = _largest_difference(logits, as_trained)
    return {"file": MODEL_FILE, "inputs_file": INPUTS_FILE, "compared": compared}


def describe_inputs(manifest: Manifest) -> dict[str, Any]:
    """What an exported model takes, and how raw values become it; the content of `inputs.json`."""
    ids = []
    for feature in manifest.features:
        rule = asdict(feature)
        form = ("bags" if not feature.bag_weights else "weighted_bags") if feature.is_list else "id"
        sizes = {"form": form, "num_rows": manifest.table_rows[feature.table]}
        ids.append(
            {key: rule[key] for key in ("name", "table", "pooling", "token", "vocabulary")}
            | {key: rule[key] for key in ("missing", "out_of_range")}
            | ({"hash_rule": rule["hash_rule"]} if feature.vocabulary == "hash" else {})
            | {"missing_row": missing_row(feature), **sizes}
        )
    dense = []
    for name, column in manifest.schema.dense.items():
        entry: dict[str, Any] = {"name": name, "transform": column.transform}
        if name in manifest.moments:
            moments = manifest.moments[name]
            entry |= {"mean": moments.mean, "deviation": moments.deviation}
        dense.append(entry)
    return {"format_version": 1, "dense": dense, "ids": ids, "output": "logit", "min_batch": 2}


def _read_tables(info: CheckpointInfo) -> dict[str, Tensor]:
    tables: dict[str, Tensor] = {}
    reader = info.rows()
    try:
        for name, stored in info.tables.items():
            tables[name] = torch.empty(stored.rows, stored.dim, dtype=stored.dtype)
            for start, stop in stored.blocks():
                tables[name][start:stop] = reader.read(name, start, stop)[WEIGHT]
    finally:
        reader.close()
    return tables


def _export(model: ExportableModel, dataset: PreparedDataset) -> torch.export.ExportedProgram:
    """The program for any batch of two samples or more, and any number of ids in a bag."""
    batch = Dim("batch", min=2)
    inputs: list[Bag] = []
    shapes: list[Any] = []
    for feature in dataset.features:
        if not feature.is_list:
            inputs.append(torch.zeros(_EXAMPLE_SAMPLES, dtype=torch.int64))
            shapes.append({0: batch})
            continue
        # Sizes that are equal by chance would be taken for equal always.
        num_ids = 2 * _EXAMPLE_SAMPLES + 1 + feature.position
        offsets = torch.arange(_EXAMPLE_SAMPLES + 1)
        offsets[-1] = num_ids
        ids = Dim(f"ids_{feature.position}")
        bag: tuple[Tensor, ...] = (torch.zeros(num_ids, dtype=torch.int64), offsets)
        shape: tuple[Any, ...] = ({0: ids}, {0: batch + 1})
        if feature.bag_weights:
            bag, shape = (*bag, torch.ones(num_ids)), (*shape, {0: ids})
        inputs.append(bag)
        shapes.append(shape)
    dense_BN = torch.zeros(_EXAMPLE_SAMPLES, len(dataset.manifest.dense_columns))
    with torch.no_grad():
        return torch.export.export(
            model, (dense_BN, inputs), dynamic_shapes=({0: batch}, shapes), strict=False
        )


def _save(program: torch.export.ExportedProgram, path: Path) -> None:
    """Writes the program's file.

    Raises:
        OSError: naming the file, where it can't be written.
    """
    with naming(path), open(path, "wb", buffering=0) as opened:
        sink: Any = _PatientSink(opened)
        torch.export.save(program, sink)
        sink.raise_if_failed()


class _PatientSink(io.RawIOBase):
    """A file for torch to write to: where that fails, it is told afterwards. (torch's writer ends
    the process when a write fails while it is being destroyed.)"""

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self._error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Appends `data`, unless something failed before."""
        view = memoryview(data).cast("B")
        written = 0
        while self._error is None and written < len(view):
            try:
                written += self._file.write(view[written:])
            except OSError as error:
                self._error = error
        return len(view)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """torch goes back to the start when it is done."""
        return self._file.seek(offset, whence)

    def raise_if_failed(self) -> None:
        """Raises what the first failed write met."""
        if self._error is not None:
            raise self._error


def _batches(trained: TrainedModel, part: str, num_samples: int) -> Iterator[Batch]:
    """The first rows of a part, in batches."""
    left = num_samples
    batches: Any = trained.dataset.batches(part, Order(trained.task.config.data.batch_size))
    with closing(batches):  # It reads ahead in a thread.
        for batch in batches:
            yield batch if batch.batch_size <= left else batch.narrow(0, left)
            left -= batch.batch_size
            if left <= 0:
                return


def _own_logits(
    trained: TrainedModel, part: str, num_samples: int, precision: str
) -> Iterator[Tensor]:
    batches = _batches(trained, part, num_samples)
    scored = score_batches(trained.model, trained.embeddings, batches, precision)
    for _, logits_B in scored:
        yield logits_B


@torch.no_grad()
def _exported_logits(
    path: Path, dataset: PreparedDataset, part: str, num_samples: int, trained: TrainedModel
) -> Iterator[Tensor]:
    module = torch.export.load(path).module()
    for batch in _batches(trained, part, num_samples):
        logits_B = module(*model_inputs(batch, dataset.features))
        yield logits_B[: batch.batch_size]


def _largest_difference(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """Between the probabilities, in fp64; NaN where one of them is."""
    ours, theirs = torch.cat(list(left)), torch.cat(list(right))
    return float((ours.double().sigmoid() - theirs.double().sigmoid()).abs().max())
