"""A rendezvous for the processes of one node, registered with torch's elastic agent.

The agent's own ``c10d`` rendezvous is made for nodes that find each other: it waits a random part of a second before the first
round and keeps one store over all restarts. A node that is alone has nobody to wait for, and here each round gets a store of
its own on a port that the kernel chooses, on the loopback interface.
"""

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

__all__ = ["BACKEND", "LocalRendezvous", "register"]

BACKEND = "hydra_parallelism_local"
_HOST = "127.0.0.1"


class LocalRendezvous(RendezvousHandler):
    """Always complete: one node, rank 0 of 1.

    Args:
        run_id: Name of the job.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store: dist.TCPStore | None = None

    @property
    def use_agent_store(self) -> bool:
        """The ranks use the agent's store."""
        return True

    def get_backend(self) -> str:
        """Name under which the agent knows this rendezvous."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Open a new store for the next start of the ranks."""
        self._store = dist.TCPStore(_HOST, 0, None, True, timedelta(minutes=10), wait_for_workers=False)
        address = RendezvousStoreInfo(_HOST, self._store.port)
        return RendezvousInfo(dist.PrefixStore(self._run_id, self._store), 0, 1, address)

    def is_closed(self) -> bool:
        """A node that is alone is never shut out."""
        return False

    def set_closed(self) -> None:
        """Nobody else would hear of it."""

    def num_nodes_waiting(self) -> int:
        """Nobody joins later."""
        return 0

    def get_run_id(self) -> str:
        """Name of the job."""
        return self._run_id

    def shutdown(self) -> bool:
        """Close the store."""
        self._store = None
        return True


def register() -> None:
    """Make the rendezvous known to torch. Harmless when done twice."""
    rendezvous_handler_registry.register(BACKEND, _create)


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return LocalRendezvous(parameters.run_id)
