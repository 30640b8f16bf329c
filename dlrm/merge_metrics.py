"""The metrics of all ranks as one: histograms travel to the first rank, figures to all."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dlrm.metrics import BinaryMetrics, EvalResult
from embeddings.communicator import Communicator

_ROUND_BYTES = 16 << 20


class FiguresOnly(BinaryMetrics):
    """The figures of samples that another rank has; more can't be added, and there are no curves.

    Args:
        figures: of all samples.
    """

    def __init__(self, figures: EvalResult) -> None:
        super().__init__()
        self._figures = figures

    def result(self) -> EvalResult:
        """The figures."""
        return self._figures


def merge_on_first(metrics: BinaryMetrics, comm: Communicator) -> BinaryMetrics:
    """The metrics of all ranks' samples; on all but the first rank their figures alone. Called by
    all ranks.

    Memory: on the first rank what all have together, once more while it is merged; on the others
    16 MiB beside their own. The figures have the same bits everywhere.
    """
    own = metrics.to_arrays()
    heads = comm.all_gather_object((own["score_K"].dtype.str, own["counts"]))
    gathered = {
        name: _gather(comm, torch.from_numpy(own[name].view(np.uint8)))
        for name in ("score_K", "positive_K", "negative_K")
    }
    figures: EvalResult | None = None
    merged = BinaryMetrics()
    if comm.rank == 0:
        for rank, (score_dtype, counts) in enumerate(heads):
            arrays = {name: of_rank[rank].numpy() for name, of_rank in gathered.items()}
            merged.merge(
                BinaryMetrics.from_arrays(
                    {
                        "score_K": arrays["score_K"].view(score_dtype),
                        "positive_K": arrays["positive_K"].view(np.float64),
                        "negative_K": arrays["negative_K"].view(np.float64),
                        "counts": counts,
                    }
                )
            )
        del gathered
        figures = merged.result()
    figures = comm.all_gather_object(figures)[0]
    assert figures is not None
    return merged if comm.rank == 0 else FiguresOnly(figures)


def _gather(comm: Communicator, own: Tensor) -> list[Tensor]:
    """Every rank's bytes, in rounds, on the first rank; nothing on the others."""
    sizes: list[int] = comm.all_gather_object(own.numel())
    of_rank: list[Tensor] = []
    if comm.rank == 0:
        of_rank = [own, *(torch.empty(size, dtype=torch.uint8) for size in sizes[1:])]
    for start in range(0, max(sizes[1:]), _ROUND_BYTES):
        here = [min(max(size - start, 0), _ROUND_BYTES) for size in sizes]
        here[0] = 0
        nothing = [0] * comm.world_size
        if comm.rank == 0:
            received = torch.empty(sum(here), dtype=torch.uint8)
            comm.all_to_all("other", received[:0], nothing, received, here).wait()
            for target, part in zip(of_rank, received.split(here), strict=True):
                target[start : start + part.numel()] = part
        else:
            sent = own[start : start + _ROUND_BYTES]
            comm.all_to_all("other", sent, [sent.numel(), *nothing[1:]], sent[:0], nothing).wait()
    return of_rank
