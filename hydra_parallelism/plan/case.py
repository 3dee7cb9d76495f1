"""A layout on a machine: what all the rest describes and prices. Pure."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ..config import ParallelismConfig
from ..constraints import ModelConstraints
from ..topology import Topology, resolve
from ..world import World
from .machine import Machine, MachineConfig, read_machine

__all__ = ["Case", "case_of"]


@dataclass(frozen=True)
class Case:
    """A layout on a machine."""

    topology: Topology
    machine: Machine
    config: ParallelismConfig
    """The parallelism node, interpolations resolved."""
    states_nodes: bool
    """Whether the user said how many nodes there are, so that empty places on them are worth a word."""
    key: str = "parallelism"
    """Dotted path of that node, for messages."""
    constraints: ModelConstraints = field(default_factory=ModelConstraints)
    """What the app's own config says about its model, for its sweeps."""


def case_of(node: Any, world: World, machine: MachineConfig, *, key: str = "parallelism") -> Case:
    """Resolve a parallelism node on a world.

    Args:
        node: The node: a :class:`~hydra_parallelism.config.ParallelismConfig` or a ``DictConfig``.
        world: How many ranks there are, and says who.
        machine: What the nodes are. How many there are follows from the ranks if it does not say.
        key: Dotted path of the node, for messages.

    Raises:
        ConfigurationError: The degrees do not fit.
    """
    topology = resolve(node, world.size, source=world.source(), key=key)
    plain = OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig) else node
    merged = OmegaConf.merge(OmegaConf.structured(ParallelismConfig), plain)
    read: ParallelismConfig = OmegaConf.to_object(merged)  # type: ignore[assignment]
    return Case(topology, read_machine(machine, world.size), read, machine.nodes is not None, key)
