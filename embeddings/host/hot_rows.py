"""The hot rows of one key space: a replica on every rank's device, updated there.

Every rank applies the same gradients, summed over ranks, so the replicas stay equal to the bit. The
store's copy of a hot row is older while `is_loaded`; `settle` brings it up to date.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from embeddings.communicator import Communicator
from embeddings.host.cold_rows import RecordLayout, index_on_device
from embeddings.host.executor import Executor
from embeddings.layout import KeySpace
from embeddings.row_update import update_in_place
from embeddings.store import RowStore

Int64Array = npt.NDArray[np.int64]
COLD = -1
_BLOCK_BYTES = 8 << 20


class HotRows:
    """Which rows of a key space are hot, and their records on this rank's device.

    Slots are in the order of the keys, so the rows of a rank have neighbouring slots.

    Collectives: `load` only, one all-to-all for every 8 MiB of records: each rank sends the rows
    that it owns to all.

    Attributes:
        slot_of: int32 per key of the space: its slot, or `COLD`. 4 bytes for each row of all ranks.
        keys_H: int64, ascending, the key of each slot.
        is_loaded: whether the records here are the newest copies of the rows.

    Args:
        space: the key space.
        store: this rank's rows.
        comm: the ranks.
        executor: whose device the records lie on.
        dtype: type of rows and state.
    """

    def __init__(
        self,
        space: KeySpace,
        store: RowStore,
        comm: Communicator,
        executor: Executor,
        dtype: torch.dtype,
    ) -> None:
        self._space, self._store, self._comm, self._executor = space, store, comm, executor
        self._layout, self._dtype = RecordLayout.of(store.optimizer, space.dim), dtype
        self.slot_of = np.full(int(space.bases[-1]), COLD, dtype=np.int32)
        self.keys_H = np.empty(0, dtype=np.int64)
        self.is_loaded = False
        self._records = executor.device_empty(0, self._layout.width, dtype)
        self._is_newer_H = np.empty(0, dtype=bool)

    @property
    def record_bytes(self) -> int:
        """Bytes of a row with its state."""
        return self._layout.width * self._dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of the records on the device."""
        return self.keys_H.size * self.record_bytes

    @property
    def _block_rows(self) -> int:
        return max(1, _BLOCK_BYTES // self.record_bytes)

    def choose(self, keys_H: Int64Array) -> None:
        """Makes these keys the hot ones, after `settle`; ascending and distinct. They are to be
        loaded."""
        assert not self._is_newer_H.any(), "settle comes first"
        self.is_loaded = False
        self.slot_of[self.keys_H] = COLD
        self.keys_H = keys_H
        self.slot_of[keys_H] = np.arange(keys_H.size, dtype=np.int32)
        self._is_newer_H = np.zeros(keys_H.size, dtype=bool)
        if self._records.shape[0] < keys_H.size:
            self._records = self._executor.device_empty(
                keys_H.size, self._layout.width, self._dtype
            )

    def gather(self, slots_K: Tensor) -> Tensor:
        """A copy of weights, `(K, D)`."""
        assert self.is_loaded
        slots_K = index_on_device(slots_K, self._executor.device)
        return self._records[:, : self._layout.dim].index_select(0, slots_K)

    def update(
        self,
        slots_K: Tensor,
        grads_KD: Tensor,
        lr: float,
        row_state_K1: Tensor | None = None,
        first_K: Tensor | None = None,
    ) -> None:
        """Updates records, as `RowStore.apply` does rows: on every rank alike.

        Args:
            slots_K: distinct slots.
            grads_KD: one gradient per slot.
            lr: learning rate.
            row_state_K1: see `RowStore.apply`.
            first_K: positions of the slots that keep it, where it is given.
        """
        weights, state = self._layout.views(self._records)
        update_in_place(
            self._store.optimizer,
            weights,
            state,
            index_on_device(slots_K, self._executor.device),
            grads_KD,
            lr=lr,
            num_steps=self._store.num_steps,
            row_state_K1=row_state_K1,
        )
        if row_state_K1 is not None:
            (whole,) = state.values()
            at = index_on_device(slots_K[first_K], self._executor.device)
            whole.index_copy_(0, at, row_state_K1[first_K])
        self._is_newer_H[slots_K.cpu().numpy()] = True

    def state(self, slots_K: Tensor) -> Tensor:
        """A copy of the one state of row-wise Adagrad, `(K, 1)`."""
        _, state = self._layout.views(self._records)
        (whole,) = state.values()
        return whole.index_select(0, index_on_device(slots_K, self._executor.device))

    def forget(self) -> None:
        """The store's rows are the newest: the records are to be loaded anew."""
        self.is_loaded = False
        self._is_newer_H[:] = False

    def load(self) -> None:
        """Reads the hot rows from the stores of their owners; called by all ranks."""
        bounds = self._slot_bounds()
        for start in range(0, self.keys_H.size, self._block_rows):
            stop = min(start + self._block_rows, self.keys_H.size)
            self._load_block(start, stop, np.clip(bounds, start, stop))
        self.is_loaded = True

    def _load_block(self, start: int, stop: int, bounds: Int64Array) -> None:
        rank, width = self._comm.rank, self._layout.width
        sizes = (np.diff(bounds) * width).tolist()
        own = torch.empty(int(np.diff(bounds)[rank]), width, dtype=self._dtype)
        group = self._space.group_of_rank[rank]
        if group is not None and own.numel():
            keys_M = torch.from_numpy(
                self.keys_H[bounds[rank] : bounds[rank + 1]] - self._space.bases[rank]
            )
            for array, columns in zip(self._store.arrays(group), self._layout.columns, strict=True):
                own[:, columns] = array.index_select(0, keys_M)
        received = torch.empty((stop - start) * width, dtype=self._dtype)
        world_size = self._comm.world_size
        self._comm.all_to_all(
            "other",
            own.reshape(-1).repeat(world_size),
            [own.numel()] * world_size,
            received,
            sizes,
        ).wait()
        self._records[start:stop].copy_(received.view(-1, width))

    def settle(self) -> None:
        """Writes the updated rows that this rank owns to its store. The records stay the newest
        copies; the store's are as new."""
        rank = self._comm.rank
        group = self._space.group_of_rank[rank]
        low, high = self._slot_bounds()[rank : rank + 2]
        slots = low + np.flatnonzero(self._is_newer_H[low:high])
        self._is_newer_H[:] = False
        if group is None or not slots.size:
            return
        keys_M = torch.from_numpy(self.keys_H[slots] - self._space.bases[rank])
        for start in range(0, slots.size, self._block_rows):
            part = slice(start, start + self._block_rows)
            index = index_on_device(torch.from_numpy(slots[part]), self._executor.device)
            records = self._records.index_select(0, index).cpu()
            for array, columns in zip(self._store.arrays(group), self._layout.columns, strict=True):
                array.index_copy_(0, keys_M[part], records[:, columns].contiguous())

    def _slot_bounds(self) -> Int64Array:
        """`W + 1` slots: those of rank r's rows are `bounds[r] … bounds[r+1]-1`."""
        return np.searchsorted(self.keys_H, self._space.bases).astype(np.int64)
