"""``.hydra/parallelism.yaml`` and ``.txt``: what a run really used, next to the config that asked for it.

The first is for programs: no ``-1`` and no interpolation, degrees as resolved, the world with the origin of its size, the rank
-> coordinate -> host table and the versions. The second is for people: the report of ``hydra-parallelism plan`` for rank 0.
"""

import logging
import platform
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
    """Write both files on rank 0; the other ranks have told their host names when the job started."""
    if context.rank != 0:
        return
    hosts = _hosts(context)
    # Flow style for the innermost level: one line for each rank.
    table = yaml.safe_dump(_describe(context, hosts), sort_keys=False, default_flow_style=None, width=1000)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "parallelism.yaml").write_text(table)
        (folder / "parallelism.txt").write_text(_tell(context, hosts))
    except OSError as error:  # no reason to stop one rank of a job that runs
        _log.warning("%s/parallelism.yaml was not written: %s", folder, error)


def _tell(context: "ParallelContext", hosts: list[str]) -> str:
    # Here, because the other ranks need none of it.
    from .plan import text
    from .plan.case import Case
    from .plan.machine import MachineConfig, read_machine
    from .plan.report import report

    world = context.world
    machine = read_machine(MachineConfig(nodes=world.nnodes, per_node=world.local_size), world.size)
    said = text.show(report(Case(context.topology, machine, context.config, False, context.key), rank=0))
    return f"{said}\n{_judge_placement(hosts, world.local_size)}"


def _judge_placement(hosts: list[str], per_node: int) -> str:
    """A warning when ranks are not on hosts as the report takes them to be: in blocks, node after node."""
    strays = [rank for rank, host in enumerate(hosts) if host != hosts[rank - rank % per_node]]
    if not strays:
        return ""
    rank = strays[0]
    return (
        f"warning: ranks are not on nodes in blocks of {per_node}, as this report takes them to be: rank {rank} is on "
        f"{hosts[rank]}, rank {rank - rank % per_node} on {hosts[rank - rank % per_node]}; see parallelism.yaml\n"
    )


def _hosts(context: "ParallelContext") -> list[str]:
    keys = [f"host/{rank}" for rank in range(context.world.size)]
    if len(keys) == 1:
        return [context.store.get(keys[0]).decode()]
    hosts: list[str] = []
    for first in range(0, len(keys), _AT_ONCE):
        hosts += [host.decode() for host in context.store.multi_get(keys[first : first + _AT_ONCE])]
    return hosts


def _describe(context: "ParallelContext", hosts: list[str]) -> dict[str, Any]:
    topology, world = context.topology, context.world
    derived = ("dp", "cp", "fsdp", "dp_cp", "efsdp")
    return {
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
            for rank, host in enumerate(hosts)
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
