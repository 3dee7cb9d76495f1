"""``.hydra/parallelism.yaml``: what a run really used, next to the config that asked for it."""

import logging
import platform
import socket
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from .runtime import ParallelContext

__all__ = ["versions", "write"]

_log = logging.getLogger(__name__)
_AT_ONCE = 1024
_PACKAGES = ("hydra-parallelism", "torch", "hydra-core", "omegaconf")


def write(context: "ParallelContext", folder: Path) -> None:
    """Write the record on rank 0; the other ranks have told their host names when the job started.

    The file holds no ``-1`` and no interpolation: degrees as resolved, the world with the origin of its size, the rank ->
    coordinate -> host table and the versions. A simulated rank writes of itself alone, and that it is one.
    """
    if context.rank != 0 and not context.world.simulated:
        return
    # Flow style for the innermost level: one line for each rank.
    hosts = {context.rank: socket.gethostname()} if context.world.simulated else dict(enumerate(_hosts(context)))
    text = yaml.safe_dump(_describe(context, hosts), sort_keys=False, default_flow_style=None, width=1000)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "parallelism.yaml").write_text(text)
    except OSError as error:  # no reason to stop one rank of a job that runs
        _log.warning("%s/parallelism.yaml was not written: %s", folder, error)


def _hosts(context: "ParallelContext") -> list[str]:
    keys = [f"host/{rank}" for rank in range(context.world.size)]
    if len(keys) == 1:
        return [context.store.get(keys[0]).decode()]
    hosts: list[str] = []
    for first in range(0, len(keys), _AT_ONCE):
        hosts += [host.decode() for host in context.store.multi_get(keys[first : first + _AT_ONCE])]
    return hosts


def _describe(context: "ParallelContext", hosts: dict[int, str]) -> dict[str, Any]:
    topology, world = context.topology, context.world
    derived = ("dp", "cp", "fsdp", "dp_cp", "efsdp")
    simulated = {"simulated": {"rank": context.rank, "of": world.size}} if world.simulated else {}
    return {
        **simulated,
        "degrees": topology.degrees(),
        "derived": {axis: topology.size(axis) for axis in derived},
        "world": {
            "size": world.size,
            "nnodes": world.nnodes,
            "launcher": world.launcher.value,
            "source": world.source(),
        },
        "device_type": context.device.type,
        "backend": context.backend,
        "ranks": [
            {"rank": rank, "host": host, **topology.coordinate(rank), "dp_rank": topology.dp_rank(rank)}
            for rank, host in hosts.items()
        ],
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Versions of what a run depends on most."""
    return {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
