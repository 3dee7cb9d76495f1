"""OmegaConf resolvers: the numbers of the topology, anywhere in an app's config.

* ``${parallelism:NAME}`` - any degree (``dp_shard``, ``tp``, ``tp_size``, ``ring_degree``, ...), derived size (``dp``, ``fsdp``,
  ``dp_world_size``, ...), or number of this process and its world (``world_size``, ``nnodes``, ``local_world_size``, ``rank``,
  ``local_rank``, ``node_rank``, ``dp_rank``, ``is_main``).
* ``${parallelism:NAME,path.to.node}`` - the same when the node is not at ``parallelism``.
* ``${parallelism.per_dp_rank:VALUE}`` - ``VALUE`` divided by ``dp_world_size``, exactly or not at all.

A resolver that needs no degrees (``nnodes``, ``local_world_size``, ``rank``, ...) reads none, so that a degree may itself be
``${parallelism:nnodes}``. Without a launcher the numbers are those of the planned world. Imports no torch.
"""

import math
from collections.abc import Callable
from typing import Any

import omegaconf
from omegaconf import DictConfig, OmegaConf

from . import world as world_module
from ._equation import FACTORS, Degrees, read_degrees
from .errors import ConfigurationError
from .topology import AXES, BASE_AXES, Topology, resolve
from .world import World

__all__ = ["register"]

NODE = "parallelism"
"""Where the node is unless a resolver is told otherwise."""

_OF_PROCESS: dict[str, Callable[[World], int | bool]] = {
    "nnodes": lambda world: world.nnodes,
    "local_world_size": lambda world: world.local_size,
    "rank": lambda world: world.rank,
    "local_rank": lambda world: world.local_rank,
    "node_rank": lambda world: world.node_rank,
    "is_main": lambda world: world.rank == 0,
}
_OF_TOPOLOGY: dict[str, Callable[[Topology, World], int]] = {
    "world_size": lambda topology, world: topology.world_size,
    "dp_world_size": lambda topology, world: topology.dp_world_size,
    "dp_rank": lambda topology, world: topology.dp_rank(world.rank),
}
_ALIASES = {**dict(zip(FACTORS, BASE_AXES, strict=True)), "ep_size": "ep"}


def register() -> None:
    """Make the resolvers known to OmegaConf. Harmless when done twice."""
    # OmegaConf 2.4 renamed the function; on 2.3 the new name exists and is the old string-only API, so choose by version.
    newer = tuple(int(part) for part in omegaconf.__version__.split(".")[:2]) >= (2, 4)
    put = OmegaConf.register_resolver if newer else OmegaConf.register_new_resolver
    for name, function in (("parallelism", _answer), ("parallelism.per_dp_rank", _per_dp_rank)):
        if not OmegaConf.has_resolver(name):
            put(name, function)


def _answer(name: Any, node: Any = NODE, *, _root_: Any) -> Any:
    name = _ALIASES.get(str(name), str(name))
    if name in _OF_PROCESS:
        return _OF_PROCESS[name](_process_world(_root_, node))
    if name not in _OF_TOPOLOGY and name not in AXES:
        known = ", ".join(dict.fromkeys([*_OF_PROCESS, *_OF_TOPOLOGY, *AXES, *_ALIASES]))
        raise ConfigurationError(f"${{parallelism:{name}}}: no such number; known are {known}")
    topology, world = _resolve(_root_, node)
    return _OF_TOPOLOGY[name](topology, world) if name in _OF_TOPOLOGY else topology.size(name)


def _per_dp_rank(value: Any, node: Any = NODE, *, _root_: Any) -> int:
    topology, _ = _resolve(_root_, node)
    ranks = topology.dp_world_size
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigurationError(f"${{parallelism.per_dp_rank:{value}}}: must be a whole number")
    if value % ranks:
        below, above = value // ranks * ranks, math.ceil(value / ranks) * ranks
        nearest = " or ".join(str(n) for n in (below, above) if n)
        raise ConfigurationError(
            f"${{parallelism.per_dp_rank:{value}}}: {value} does not divide over dp_replicate={topology.dp_replicate} * "
            f"dp_shard={topology.dp_shard} = {ranks} data-parallel ranks: {value} % {ranks} = {value % ranks}; "
            f"try {nearest}"
        )
    return value // ranks


def _resolve(root: DictConfig, node: str) -> tuple[Topology, World]:
    config = _select(root, node)
    degrees = read_degrees(config, node)
    world = world_module.read() or _plan(root, degrees)
    return resolve(config, world.size, source=world.source(), key=node), world


def _process_world(root: DictConfig, node: str) -> World:
    """The world for numbers that a degree may depend on: when nobody launched, one node, and only explicit counts."""
    world = world_module.read()
    if world is not None:
        return world
    stated = OmegaConf.select(root, f"{node}.world_size") if OmegaConf.select(root, node) is not None else None
    return _plan(root, Degrees(node, {}, 1, False, stated))


def _plan(root: DictConfig, degrees: Degrees) -> World:
    launcher = OmegaConf.select(root, "hydra.launcher")
    per_node, nnodes = _stated(launcher, "nproc_per_node"), _stated(launcher, "nnodes")
    return world_module.plan(degrees, nproc_per_node=per_node, nnodes=nnodes or 1)


def _stated(launcher: Any, name: str) -> int | None:
    value = OmegaConf.select(launcher, name) if isinstance(launcher, DictConfig) and name in launcher else None
    return value if isinstance(value, int) else None


def _select(root: DictConfig, node: str) -> Any:
    config = OmegaConf.select(root, str(node))
    if config is None:
        raise ConfigurationError(
            f"the config has no node {node!r}: choose a preset (parallelism=default), "
            "or name the node: ${parallelism:NAME,path.to.node}"
        )
    return config
