"""A rank's memory that others map: blocks of a few files, taken and given back."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import weakref
from bisect import insort
from dataclasses import dataclass

import torch
from torch import Tensor

_ALIGN_BYTES = 64
_PAGE_BYTES = mmap.PAGESIZE
_LEAST_BYTES = 1 << 18


class FileLimitError(OSError):
    """This process may have no more open files."""

    def __init__(self) -> None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        super().__init__(
            errno.EMFILE,
            f"{os.strerror(errno.EMFILE)} in this process: raise its limit "
            f"(ulimit -n, now {limit})",
        )


@dataclass
class Block:
    """A part of a segment.

    Attributes:
        segment: where it lies.
        start: its first byte there.
        size: bytes.
        num_readers: ranks that have yet to read it.
    """

    segment: Segment
    start: int
    size: int
    num_readers: int = 0

    def bytes(self, start: int, size: int) -> Tensor:
        """A part of it, uint8."""
        return self.segment.bytes[self.start + start : self.start + start + size]


class Segment:
    """A file in memory without a name (memfd): it goes with the last process that has it.

    Attributes:
        number: the place in the other ranks' lists.
        file: what they map.
        bytes: the memory, uint8.
        known_to: ranks that have its file.
    """

    def __init__(self, number: int, num_bytes: int) -> None:
        self.number = number
        self.known_to: set[int] = set()
        try:
            self.file = os.memfd_create(f"dlrm-{number}", os.MFD_CLOEXEC)
        except OSError as error:
            raise _told(error) from error
        weakref.finalize(self, os.close, self.file)
        os.ftruncate(self.file, num_bytes)
        self.bytes = map_file(self.file)
        self._free = [(0, num_bytes)]  # (start, size), sorted, no two that touch.

    def take(self, size: int) -> int | None:
        """The lowest place that has that many bytes left: memory that was used lately."""
        for index, (start, free) in enumerate(self._free):
            if free >= size:
                rest = [(start + size, free - size)] if free > size else []
                self._free[index : index + 1] = rest
                return start
        return None

    def give_back(self, start: int, size: int) -> None:
        """The opposite of `take`."""
        insort(self._free, (start, size))
        at = self._free.index((start, size))
        for left in (at, at - 1):  # What touches becomes one.
            if 0 <= left < len(self._free) - 1:
                (start, size), (next_start, next_size) = self._free[left : left + 2]
                if start + size == next_start:
                    self._free[left : left + 2] = [(start, size + next_size)]


class SharedPool:
    """Blocks for what may be under way at once, however much that is, in few files: each new one
    is as large as all before it together."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []

    def take(self, num_bytes: int) -> Block:
        """A block of at least that many bytes.

        Raises:
            FileLimitError: where a further file is needed and can't be had.
        """
        size = max(1, -(-num_bytes // _ALIGN_BYTES)) * _ALIGN_BYTES
        for segment in self._segments:
            start = segment.take(size)
            if start is not None:
                return Block(segment, start, size)
        # A fifth more than asked for: batches vary in size.
        held = sum(segment.bytes.numel() for segment in self._segments)
        wanted = max(size + size // 5, held, _LEAST_BYTES)
        segment = Segment(len(self._segments), -(-wanted // _PAGE_BYTES) * _PAGE_BYTES)
        self._segments.append(segment)
        start = segment.take(size)
        assert start is not None
        return Block(segment, start, size)

    def read_by_one(self, block: Block) -> None:
        """One more of a block's readers has read it; the last one gives it back."""
        block.num_readers -= 1
        if block.num_readers == 0:
            block.segment.give_back(block.start, block.size)


def map_file(file: int) -> Tensor:
    """The whole of a file in memory, uint8, shared with whoever else maps it.

    Raises:
        FileLimitError: Python's mmap keeps a file of its own.
    """
    try:
        return torch.frombuffer(mmap.mmap(file, os.fstat(file).st_size), dtype=torch.uint8)
    except OSError as error:
        raise _told(error) from error


def _told(error: OSError) -> OSError:
    return FileLimitError() if error.errno == errno.EMFILE else error
