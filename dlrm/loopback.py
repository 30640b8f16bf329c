"""Where the workers of one host meet: a store that listens on the loopback interface only.

The rendezvous that torch's elastic launcher brings along opens two stores, which take keys from
whoever reaches the host, on every interface.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "dlrm-loopback"
HOST = "127.0.0.1"
_BACKLOG = 128
_TIMEOUT = timedelta(seconds=60)


def register() -> None:
    """Makes `BACKEND` known to the elastic launcher."""
    rendezvous_handler_registry.register(BACKEND, _create)


class LoopbackRendezvous(RendezvousHandler):
    """The rendezvous of one launcher, which has nobody to wait for; its workers share its store.

    Args:
        run_id: names the run's part of the store.

    Raises:
        OSError: where the loopback interface can't be listened on.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        with socket.create_server((HOST, 0), backlog=_BACKLOG) as listener:
            self.port: int = listener.getsockname()[1]
            self._store: TCPStore | None = TCPStore(
                HOST,
                self.port,
                is_master=True,
                timeout=_TIMEOUT,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),  # The store closes it.
            )

    def get_backend(self) -> str:
        """`BACKEND`."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Workers connect to this store and open none."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """The one launcher."""
        assert self._store is not None, "after shutdown"
        place = RendezvousStoreInfo(HOST, self.port)
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, place)

    def is_closed(self) -> bool:
        """Whether `shutdown` was called."""
        return self._store is None

    def set_closed(self) -> None:
        """Nobody else asks."""

    def num_nodes_waiting(self) -> int:
        """None ever."""
        return 0

    def get_run_id(self) -> str:
        """Of the run."""
        return self._run_id

    def shutdown(self) -> bool:
        """Closes the store."""
        self._store = None
        return True


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return LoopbackRendezvous(parameters.run_id)
