"""The data-parallel half: dense gradients summed over ranks in buckets, while backward goes on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from embeddings.communicator import Communicator, Pending

BUCKET_BYTES = 1 << 19
_NUM_EXTRA = 2
"""Values of the first bucket besides gradients: the loss, and whether a rank is to stop."""


class DenseReducer:
    """Sums the dense gradients (and the loss) over the ranks.

    Every rank holds the whole dense network and computes its samples' share of the global mean, so
    gradients are *summed*. They are copied into flat buckets of about 512 KiB in the order in which
    backward makes them, the last layer's first; the loss is one more value of the first bucket, and
    so is whether a rank was told to stop: all ranks then know of it after the same step, and before
    the last bucket has come.

    Collectives: one all-reduce per bucket and step, `2 (W-1)/W` of its bytes per rank. With
    `overlap` a bucket is issued within backward, as soon as it and all buckets before it are
    filled; without, after backward. The sums are the same to the bit, and so is the order among
    the buckets on every rank.

    A step: `begin(loss, is_stopping)`, then `loss.backward()` of the last micro-batch, then
    `loss()`, and then `finish()`: what needs no dense gradient may be done between the two.

    Args:
        parameters: those of the dense network, in the order of the forward pass.
        comm: the ranks; with one, nothing is copied or sent.
        overlap: `train.overlap`.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], comm: Communicator, *, overlap: bool
    ) -> None:
        self._comm, self._overlap = comm, overlap
        self._loss = torch.zeros((), dtype=torch.float64)
        self.is_stopping = False
        self._is_filling = False
        self._buckets: list[_Bucket] = []
        if comm.world_size == 1:
            return
        backwards = list(reversed(parameters))
        members: list[nn.Parameter] = []
        for parameter in backwards:
            members.append(parameter)
            if sum(p.nbytes for p in members) >= BUCKET_BYTES or parameter is backwards[-1]:
                self._buckets.append(_Bucket(members, is_first=not self._buckets))
                members = []
        for index, bucket in enumerate(self._buckets):
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(
                    lambda filled, index=index: self._fill(index, filled)
                )
        self._num_issued = 0

    @property
    def num_buckets(self) -> int:
        """Collectives of a step."""
        return len(self._buckets)

    def begin(self, loss: float, is_stopping: bool = False) -> None:
        """The next backward is the step's last: its gradients are complete when they are made.

        Args:
            loss: this rank's share of the step's loss.
            is_stopping: this rank was told to stop; after `finish`, the attribute says so on all.
        """
        self._loss.fill_(loss)
        self.is_stopping = is_stopping
        self._is_filling = True
        self._num_issued = 0
        for bucket in self._buckets:
            bucket.begin()
        if self._buckets:
            self._buckets[0].flat[-2] = self._loss
            self._buckets[0].flat[-1] = float(is_stopping)

    def loss(self) -> float:
        """Waits for the first sums; returns the summed loss. `is_stopping` is known then."""
        assert self._is_filling, "`begin` comes before the last backward of a step"
        self._is_filling = False
        if not self._buckets:
            return float(self._loss)
        for bucket in self._buckets:
            assert bucket.is_full, "a dense parameter got no gradient"
        self._issue()
        self._buckets[0].finish()
        self.is_stopping = bool(self._buckets[0].flat[-1] > 0)
        return float(self._buckets[0].flat[-2])

    def finish(self) -> None:
        """Waits for the other sums; all are in the parameters' `grad` then. May be called again."""
        assert not self._is_filling, "`loss` comes before `finish`"
        for bucket in self._buckets:
            bucket.finish()

    def _fill(self, index: int, parameter: nn.Parameter) -> None:
        if not self._is_filling:
            return
        self._buckets[index].fill(parameter)
        if self._overlap:
            self._issue()

    def _issue(self) -> None:
        """Issues the next buckets, in order, as far as they are full."""
        while self._num_issued < len(self._buckets) and self._buckets[self._num_issued].is_full:
            self._buckets[self._num_issued].issue(self._comm)
            self._num_issued += 1


class _Bucket:
    """A flat copy of some gradients."""

    def __init__(self, parameters: Sequence[nn.Parameter], *, is_first: bool) -> None:
        self.parameters = list(parameters)
        size = sum(p.numel() for p in parameters) + (_NUM_EXTRA if is_first else 0)
        self.flat = torch.zeros(size, dtype=parameters[0].dtype, device=parameters[0].device)
        self._views: dict[nn.Parameter, Tensor] = {}
        position = 0
        for parameter in parameters:
            view = self.flat[position : position + parameter.numel()]
            self._views[parameter] = view.view_as(parameter)
            position += parameter.numel()
        self._num_missing = 0
        self._pending: Pending | None = None

    @property
    def is_full(self) -> bool:
        return self._num_missing == 0

    def begin(self) -> None:
        self._num_missing = len(self.parameters)

    def fill(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        self._views[parameter].copy_(parameter.grad)
        self._num_missing -= 1

    def issue(self, comm: Communicator) -> None:
        self._pending = comm.all_reduce("dense", self.flat)

    def finish(self) -> None:
        if self._pending is None:
            return
        self._pending.wait()
        self._pending = None
        for parameter in self.parameters:
            # The optimizer reads the sums where they are; until the next step's backward has made
            # new gradients, nothing writes here.
            parameter.grad = self._views[parameter]
