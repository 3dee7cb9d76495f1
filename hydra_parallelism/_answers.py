"""Where the numbers that the resolvers give come from. Private half of ``resolvers``, loaded when one is first used."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from omegaconf import DictConfig, OmegaConf

from . import simulation
from . import world as world_module
from ._equation import FACTORS, Degrees, read_degrees
from .errors import ConfigurationError
from .topology import AXES, BASE_AXES, Topology, resolve
from .world import World

__all__ = ["answer", "nodes", "on_each_node", "per_dp_rank", "planned"]

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


def answer(name: Any, node: str, root: DictConfig) -> int | bool:
    """The number behind ``${parallelism:NAME,NODE}``.

    Raises:
        ConfigurationError: No such number or node, or the config does not fit the world.
    """
    name = _ALIASES.get(str(name), str(name))
    if name in _OF_PROCESS:
        return _OF_PROCESS[name](_process_world(root, node))
    if name not in _OF_TOPOLOGY and name not in AXES:
        known = ", ".join(dict.fromkeys([*_OF_PROCESS, *_OF_TOPOLOGY, *AXES, *_ALIASES]))
        raise ConfigurationError(f"${{parallelism:{name}}}: no such number; known are {known}")
    topology, world = _resolve(root, node)
    return _OF_TOPOLOGY[name](topology, world) if name in _OF_TOPOLOGY else topology.size(name)


def per_dp_rank(value: Any, node: str, root: DictConfig) -> int:
    """The share of one data-parallel rank.

    Raises:
        ConfigurationError: ``value`` does not divide over them.
    """
    topology, _ = _resolve(root, node)
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


_resolving: ContextVar[bool] = ContextVar("resolving", default=False)
_planned: ContextVar[World | None] = ContextVar("planned", default=None)


@contextmanager
def planned(world: World) -> Iterator[None]:
    """Answer for a machine that is only thought of, whoever launched this process."""
    token = _planned.set(world)
    try:
        yield
    finally:
        _planned.reset(token)


def nodes(per_node: Any, node: str, root: DictConfig) -> int:
    """How many nodes a job needs at ``per_node`` processes on each.

    Raises:
        ConfigurationError: The processes do not fill the nodes evenly.
    """
    world_size, limit = _count(per_node, node, root)
    return max(1, world_size // limit)


def on_each_node(per_node: Any, node: str, root: DictConfig) -> int:
    """How many processes of a job run on each node, at most ``per_node``.

    Raises:
        ConfigurationError: The processes do not fill the nodes evenly.
    """
    world_size, limit = _count(per_node, node, root)
    return min(world_size, limit)


def _count(per_node: Any, node: str, root: DictConfig) -> tuple[int, int]:
    if isinstance(per_node, bool) or not isinstance(per_node, int) or per_node < 1:
        raise ConfigurationError(f"processes on each node: {per_node} must be a whole number of at least 1")
    topology, world = _resolve(root, node)
    size = topology.world_size
    if size > per_node and size % per_node:
        below, above = size // per_node * per_node, math.ceil(size / per_node) * per_node
        raise ConfigurationError(
            f"{world.source()} do not fill nodes of {per_node} processes: {size} % {per_node} = {size % per_node}\n"
            f"  try: {node}.world_size={below} or {node}.world_size={above}"
        )
    return size, per_node


def _resolve(root: DictConfig, node: str) -> tuple[Topology, World]:
    if _resolving.get():
        raise ConfigurationError(f"a degree of {node} cannot be made of degrees; nnodes and local_world_size are fine")
    config = _select(root, node)
    token = _resolving.set(True)
    try:
        degrees = read_degrees(config, node)
        world = _planned.get() or simulation.read(config, node) or world_module.read() or _plan(root, degrees)
        return resolve(config, world.size, source=world.source(), key=node), world
    finally:
        _resolving.reset(token)


def _process_world(root: DictConfig, node: str) -> World:
    """The world for numbers that a degree may depend on: when nobody launched, one node, and only explicit counts."""
    config = OmegaConf.select(root, node)
    world = _planned.get() or (simulation.read(config, node) if config is not None else None) or world_module.read()
    if world is not None:
        return world
    stated = OmegaConf.select(root, f"{node}.world_size") if config is not None else None
    return _plan(root, Degrees(node, {}, 1, False, stated if isinstance(stated, int) else None))


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
