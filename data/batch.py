"""`Batch`: what a training step is fed with. The jagged layout of its ids is drawn once, here.

Shape letters, the same in the whole project (suffixes of names):

    B samples of this rank    N dense features    F sparse features    L ids in a jagged tensor
    W ranks                   D dim of a table    S sum of the features' dims
    K unique keys             R rows of a table
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_MAX_FEATURES = 2**31


@dataclass(frozen=True)
class JaggedIds:
    """The ids of `F` features for `B` samples: bags of any length, *feature-major*.

    For two features and three samples, `F = 2`, `B = 3`:

        feature 0:   sample 0 → [7, 2]   sample 1 → []      sample 2 → [9]
        feature 1:   sample 0 → [4]      sample 1 → [4]     sample 2 → [1, 1, 3]

        values_L   = [ 7  2 | | 9 |   4 | 4 | 1  1  3 ]          L = 8
        offsets    = [ 0    2 2   3     4   5         8 ]        F·B + 1 entries

    Bag `(f, b)` is `values_L[offsets[f·B + b] : offsets[f·B + b + 1]]`.

    Attributes:
        values_L: int64 row ids, each an index into the table of its feature.
        offsets: int64, `F·B + 1`; starts at 0, never decreases, ends at `L`.
        num_features: `F`.
        weights_L: fp32 factor of each id in its bag, or None where every factor is 1.
        num_samples: `B` of data without sparse features, which no offset tells (F = 0); None where
            there are features.

    Raises:
        ValueError: at construction, where one of the invariants above doesn't hold, or a field is
            of another type: bag weights of another would be rounded or not by who computes.
    """

    values_L: Tensor
    offsets: Tensor
    num_features: int
    weights_L: Tensor | None = None
    num_samples: int | None = None

    def __post_init__(self) -> None:
        for name in ("values_L", "offsets", "weights_L"):
            value = getattr(self, name)
            if not isinstance(value, Tensor) and (value is not None or name != "weights_L"):
                raise ValueError(f"{name} is {type(value).__name__}, must be a tensor")
        if isinstance(self.num_features, bool) or not isinstance(
            self.num_features, int | np.integer
        ):
            raise ValueError(f"num_features is {self.num_features!r}, must be a whole number")
        if not 0 <= self.num_features <= _MAX_FEATURES:
            what = self.num_features if self.num_features < 0 else f"above {_MAX_FEATURES:,}"
            raise ValueError(f"num_features is {what}, must be 0 to {_MAX_FEATURES:,}")
        object.__setattr__(self, "num_features", int(self.num_features))
        num_bags = self.offsets.numel() - 1
        if self.values_L.dtype != torch.int64 or self.offsets.dtype != torch.int64:
            raise ValueError(
                f"ids and offsets must be int64, not {self.values_L.dtype} and {self.offsets.dtype}"
            )
        if self.values_L.dim() != 1 or self.offsets.dim() != 1 or num_bags < 0:
            raise ValueError(
                f"ids and offsets must be flat, offsets with at least one entry; "
                f"shapes are {tuple(self.values_L.shape)} and {tuple(self.offsets.shape)}"
            )
        if num_bags % self.num_features if self.num_features else num_bags:
            raise ValueError(
                f"{num_bags} bags can't be cut into {self.num_features} features of equal size"
            )
        if self.num_samples is not None and self.num_features:
            raise ValueError(
                f"num_samples={self.num_samples} is for ids without features; here offsets tell it"
            )
        if self.num_samples is not None and self.num_samples < 0:
            raise ValueError(f"num_samples={self.num_samples}: must be at least 0")
        first, last = int(self.offsets[0]), int(self.offsets[-1])
        if first != 0 or last != self.values_L.numel():
            raise ValueError(
                f"offsets run from {first} to {last}, but must run from 0 to the number of ids, "
                f"{self.values_L.numel()}"
            )
        # numpy, not torch: batches are built in a background thread, where torch's own threads
        # would compete with the training step's.
        steps = np.diff(self.offsets.cpu().numpy())
        if num_bags and int(steps.min()) < 0:
            bag = int(np.flatnonzero(steps < 0)[0])
            raise ValueError(
                f"offsets decrease at bag {bag}: {int(self.offsets[bag])} to "
                f"{int(self.offsets[bag + 1])}"
            )
        if self.weights_L is None:
            return
        if self.weights_L.dtype != torch.float32:
            raise ValueError(f"bag weights must be float32, not {self.weights_L.dtype}")
        if self.weights_L.shape != self.values_L.shape:
            raise ValueError(
                f"{self.weights_L.numel()} bag weights for {self.values_L.numel()} ids"
            )

    @property
    def batch_size(self) -> int:
        """`B`; without features `num_samples`, and 0 where that isn't given."""
        if not self.num_features:
            return self.num_samples or 0
        return (self.offsets.numel() - 1) // self.num_features

    @property
    def is_one_hot(self) -> bool:
        """Whether every bag holds exactly one id."""
        return self.values_L.numel() == self.offsets.numel() - 1 and bool(
            (self.offsets.diff() == 1).all()
        )

    def lengths_FB(self) -> Tensor:
        """Ids per bag, int64, `(F, B)`."""
        return self.offsets.diff().view(self.num_features, self.batch_size)

    def narrow(self, start: int, stop: int) -> JaggedIds:
        """The bags of samples `start … stop-1`; used to cut micro-batches."""
        return self.take(slice(start, stop))

    def take(self, samples: slice | Tensor) -> JaggedIds:
        """The bags of some samples, in the order given."""
        if not self.num_features:
            count = torch.empty(self.batch_size, 0)[samples].shape[0]
            return JaggedIds(self.values_L, self.offsets, 0, self.weights_L, num_samples=count)
        starts_FB = self.offsets[:-1].view(self.num_features, self.batch_size)[:, samples]
        kept = self.lengths_FB()[:, samples].reshape(-1)
        offsets = torch.zeros(kept.numel() + 1, dtype=torch.int64)
        torch.cumsum(kept, 0, out=offsets[1:])
        shift = starts_FB.reshape(-1) - offsets[:-1]
        index_L = torch.arange(int(offsets[-1])) + torch.repeat_interleave(shift, kept)
        weights_L = None if self.weights_L is None else self.weights_L[index_L]
        return JaggedIds(self.values_L[index_L], offsets, self.num_features, weights_L)

    def to(self, device: torch.device) -> JaggedIds:
        """The same ids on `device`."""
        # A plain copy: the invariants were checked, and checking again would wait for the device.
        moved = copy.copy(self)
        for name in ("values_L", "offsets", "weights_L"):
            values = getattr(self, name)
            if values is not None:
                object.__setattr__(moved, name, values.to(device, non_blocking=True))
        return moved


@dataclass(frozen=True)
class Batch:
    """One (micro-)batch of this rank.

    Attributes:
        dense_BN: fp32 dense features after their transform, never missing, never non-finite.
        ids: the sparse features; where there are none, their `num_samples` is filled in here.
        label_B: fp32 0 or 1; None for data without labels.
        weight_B: fp32 example weights (a factor of the sample's loss); None where all are 1.
        row_B: int64 position of each sample in its split, in the order of the raw input.

    Raises:
        ValueError: where the parts disagree on `B`, or one is of another type.
    """

    dense_BN: Tensor
    ids: JaggedIds
    label_B: Tensor | None
    weight_B: Tensor | None
    row_B: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.ids, JaggedIds):
            raise ValueError(f"ids is {type(self.ids).__name__}, must be JaggedIds")
        _check_tensor("dense_BN", self.dense_BN, 2, torch.float32)
        _check_tensor("row_B", self.row_B, 1, torch.int64)
        for name in ("label_B", "weight_B"):
            if getattr(self, name) is not None:
                _check_tensor(name, getattr(self, name), 1, torch.float32)
        if not self.ids.num_features and self.ids.num_samples is None:
            ids = dataclasses.replace(self.ids, num_samples=int(self.dense_BN.shape[0]))
            object.__setattr__(self, "ids", ids)
        sizes = {
            "dense_BN": self.dense_BN.shape[0],
            "row_B": self.row_B.shape[0],
            "ids": self.ids.batch_size,
        }
        if self.label_B is not None:
            sizes["label_B"] = self.label_B.shape[0]
        if self.weight_B is not None:
            sizes["weight_B"] = self.weight_B.shape[0]
        if len(set(sizes.values())) > 1:
            raise ValueError(f"the parts of a batch disagree on its size: {sizes}")

    @property
    def batch_size(self) -> int:
        """`B`."""
        return int(self.dense_BN.shape[0])

    def narrow(self, start: int, stop: int) -> Batch:
        """Samples `start … stop-1` as a batch of their own."""
        return self.take(slice(start, stop))

    def take(self, samples: slice | Tensor) -> Batch:
        """Some samples, in the order given, as a batch of their own."""
        return Batch(
            dense_BN=self.dense_BN[samples],
            ids=self.ids.take(samples),
            label_B=None if self.label_B is None else self.label_B[samples],
            weight_B=None if self.weight_B is None else self.weight_B[samples],
            row_B=self.row_B[samples],
        )

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`."""
        if device.type == "cpu":
            return self
        return Batch(
            dense_BN=self.dense_BN.to(device, non_blocking=True),
            ids=self.ids.to(device),
            label_B=None if self.label_B is None else self.label_B.to(device, non_blocking=True),
            weight_B=None if self.weight_B is None else self.weight_B.to(device, non_blocking=True),
            row_B=self.row_B,
        )


def _check_tensor(name: str, value: Tensor, num_dims: int, dtype: torch.dtype) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is {type(value).__name__}, must be a tensor")
    if value.dim() != num_dims or value.dtype != dtype:
        raise ValueError(
            f"{name} is of shape {tuple(value.shape)} and {value.dtype}, must have {num_dims} "
            f"dimensions of {dtype}"
        )
