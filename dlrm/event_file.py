"""TensorBoard's event file, written by the thread that calls: no queue, no thread, no semaphore.

(tensorboardX's `SummaryWriter` hands events to a thread through a queue of `multiprocessing`, which
needs /dev/shm; when the disk is full the thread dies and the queue fills up, and then whoever adds
an event waits for ever.)
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import RecordWriter

from data.files import naming


class EventFile:
    """An event file of scalars; made when the first of them comes.

    Args:
        folder: where it lies, beside those of earlier parts of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: RecordWriter | None = None
        self._first_step = 0

    def begin_after(self, step: int) -> None:
        """Has a reader forget what earlier files say of later steps; before the first scalar."""
        self._first_step = step + 1

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        """Writes scalars by name, and gives them to the system at once.

        Raises:
            OSError: naming the file; nothing may be added to it any more.
        """
        if self._writer is None:
            self._open()
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self) -> None:
        """Closes the file; what couldn't be written was told before."""
        if self._writer is not None:
            with suppress(OSError):
                self._writer.close()
            self._writer = None

    def _open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names.
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
        self._path = self._folder / name
        self._writer = RecordWriter(str(self._path))
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if self._first_step:
            restart = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=time.time(), step=self._first_step, session_log=restart))

    def _write(self, event: Event) -> None:
        assert self._writer is not None
        with naming(self._path):
            self._writer.write(event.SerializeToString())
            self._writer._writer.flush()  # Its own `flush` waits for the disk.
