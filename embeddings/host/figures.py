"""What the host path did: counted as it goes, told in result.json under `host`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class HostCounters:
    """Sums over training steps, of this rank.

    Attributes:
        num_lookups: ids looked up in host tables by this rank's samples.
        num_hot_lookups: of these, ids of hot rows.
        num_unique: distinct rows per step, added up.
        num_hot_unique: of these, hot ones.
        num_samples: samples.
        num_hot_samples: samples whose every id is hot or of a device table.
        num_cold: records that were staged.
        num_fetched: of these, read from the store.
        num_forwarded: of these, taken from an earlier staged step.
        num_written: records written back to the store.
        num_kept: write-backs that forwarding made unnecessary.
        num_flushed: records written because all rows had to be in the store.
        to_device_bytes: read from the store.
        to_host_bytes: written back.
        stall_s: time that the computation waited for records.
        num_steps: steps retired.
        num_hot_loads: times that the hot rows were read from the store.
    """

    num_lookups: int = 0
    num_hot_lookups: int = 0
    num_unique: int = 0
    num_hot_unique: int = 0
    num_samples: int = 0
    num_hot_samples: int = 0
    num_cold: int = 0
    num_fetched: int = 0
    num_forwarded: int = 0
    num_written: int = 0
    num_kept: int = 0
    num_flushed: int = 0
    to_device_bytes: int = 0
    to_host_bytes: int = 0
    stall_s: float = 0.0
    num_steps: int = 0
    num_hot_loads: int = 0

    def count_staged(self, num_rows: int, num_fetched: int, row_bytes: int) -> None:
        """A step's records of one group, `num_fetched` of them from the store."""
        self.num_cold += num_rows
        self.num_fetched += num_fetched
        self.num_forwarded += num_rows - num_fetched
        self.to_device_bytes += num_fetched * row_bytes

    def count_retired(self, num_rows: int, num_written: int, row_bytes: int) -> None:
        """A step's records of one group, `num_written` of them back to the store."""
        self.num_written += num_written
        self.num_kept += num_rows - num_written
        self.to_host_bytes += num_written * row_bytes
