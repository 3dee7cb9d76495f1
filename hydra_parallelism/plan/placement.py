"""Where the groups of a layout lie on the nodes of a machine, and which communicators a rank gets. Pure."""

import math
from dataclasses import dataclass

from ..topology import AXES, BASE_AXES, DERIVED_AXES, EXPERT_RANKS, SPARSE_AXES, Topology
from .machine import Machine

__all__ = ["AxisPlacement", "Communicator", "communicators", "place", "stays_inside"]


@dataclass(frozen=True)
class AxisPlacement:
    """An axis as one rank sees it."""

    axis: str
    size: int
    ranks: tuple[int, ...]
    """The group of the chosen rank."""
    nodes: tuple[int, ...]
    """The nodes that this group is on, ascending."""
    inside: bool
    """Whether every group along the axis stays inside a node, not only this one."""


@dataclass(frozen=True)
class Communicator:
    """A process group that a rank has, and the axes that share it."""

    ranks: tuple[int, ...]
    axes: tuple[str, ...]
    kind: str
    """``default`` (the world's own), ``self`` (axes of size 1) or ``made``."""


def place(topology: Topology, machine: Machine, rank: int) -> list[AxisPlacement]:
    """Every axis of more than one rank, in the order of :data:`~hydra_parallelism.topology.AXES`.

    Raises:
        ConfigurationError: The rank is not in the world.
    """
    found: list[AxisPlacement] = []
    for axis in AXES:
        ranks = topology.group(axis, rank)
        if len(ranks) > 1:
            nodes = tuple(sorted({machine.node(member) for member in ranks}))
            found.append(AxisPlacement(axis, len(ranks), ranks, nodes, stays_inside(topology, axis, machine.per_node)))
    return found


def stays_inside(topology: Topology, axis: str, per_node: int) -> bool:
    """Whether no group along an axis has ranks on two nodes.

    The groups repeat with the stride at which the outermost axis in them ends; together with the node boundaries that is a
    period of ``lcm(stride, per_node)`` ranks, so no more than that are looked at.
    """
    first = topology.group(axis, 0)
    span = first[-1] - first[0]
    if span >= per_node:
        return False
    period = min(topology.world_size, math.lcm(_stride(topology, axis), per_node))
    groups = (topology.group(axis, rank) for rank in range(period) if topology.index(axis, rank) == 0)
    return all(group[0] // per_node == group[-1] // per_node for group in groups)


def _stride(topology: Topology, axis: str) -> int:
    """Ranks after which the groups along an axis lie as they did."""
    parts = EXPERT_RANKS if axis in SPARSE_AXES else DERIVED_AXES.get(axis, (axis,))
    sizes = [topology.size(base) for base in BASE_AXES]
    outermost = min((BASE_AXES.index(part) for part in parts if topology.size(part) > 1), default=len(BASE_AXES))
    return math.prod(sizes[outermost:])


def communicators(topology: Topology, rank: int) -> list[Communicator]:
    """The process groups of a rank: one for each distinct set of ranks, as ``mesh.build_groups`` makes them, in its order.

    Raises:
        ConfigurationError: The rank is not in the world.
    """
    axes_of: dict[tuple[int, ...], list[str]] = {}
    for axis in AXES:
        axes_of.setdefault(topology.group(axis, rank), []).append(axis)
    found = [Communicator(ranks, tuple(axes), _kind(ranks, topology.world_size)) for ranks, axes in axes_of.items()]
    if not any(each.kind == "default" for each in found):  # no axis has it, the job has
        found.insert(0, Communicator(tuple(range(topology.world_size)), (), "default"))
    return found


def _kind(ranks: tuple[int, ...], world_size: int) -> str:
    if len(ranks) == world_size:
        return "default"
    return "self" if len(ranks) == 1 else "made"
