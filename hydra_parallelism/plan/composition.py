"""What a composed config comes to on its machine: the :class:`~.case.Case` that all the rest describes and prices."""

import math
from dataclasses import replace

from omegaconf import DictConfig, OmegaConf

from .. import _answers, interpolations
from .._equation import read_degrees
from ..constraints import CONSTRAINTS_KEY, ModelConstraints, is_positive, read_constraints
from ..errors import ConfigurationError
from ..topology import resolve
from ..world import World
from .case import Case, case_of
from .machine import MachineConfig, read_machine
from .model import Model, ModelConfig, read_model
from .overrides import Composed, compose

__all__ = ["Case", "compose", "model_of", "resolve_case"]


def resolve_case(composed: Composed) -> Case:
    """Resolve a composed config on its machine. Pure: neither the environment nor this machine's accelerators are asked.

    Raises:
        ConfigurationError: The degrees do not fit, a value is out of range, or an interpolation of ours refuses.
    """
    machine: MachineConfig = OmegaConf.to_object(composed.world)  # type: ignore[assignment]
    read_machine(machine, 1)  # refuses before anything is divided by it
    machine, launched = _follow_launcher(machine, composed.config)
    with _answers.planned(_world(machine, (machine.nodes or 1) * machine.per_node)):
        world = _world(machine, *_world_size(composed, machine, launched))
    with _answers.planned(world):
        if OmegaConf.select(composed.config, "hydra.job") is not None:  # composed by Hydra, perhaps an app's own
            interpolations.check(composed.config)
        case = case_of(composed.parallelism, world, machine, key=composed.key)
        return replace(case, constraints=_constraints(composed.config))


def _follow_launcher(machine: MachineConfig, config: DictConfig) -> tuple[MachineConfig, str]:
    """The nodes that the launcher starts processes on, and the number of processes in its words if it says one.

    Each node has as many places as the launcher starts processes there: ranks fill nodes in this order, too.

    Raises:
        ConfigurationError: An option is no number, or the machine has another number of nodes.
    """
    launcher = OmegaConf.select(config, "hydra.launcher")
    if not isinstance(launcher, DictConfig):
        return machine, ""
    is_submitit = "submitit" in str(launcher.get("_target_"))
    inner, outer = ("tasks_per_node", "nodes") if is_submitit else ("nproc_per_node", "nnodes")
    per_node, nodes = launcher.get(inner, "auto"), launcher.get(outer) or 1
    said = {inner: 1 if per_node == "auto" else per_node, outer: nodes}
    problems = [f"hydra.launcher.{name}={launcher.get(name)}" for name, value in said.items() if not is_positive(value)]
    if problems:
        raise ConfigurationError(f"{' and '.join(problems)}: must be a whole number of at least 1")
    if nodes > 1 and machine.nodes not in (None, nodes):
        raise ConfigurationError(
            f"world.nodes={machine.nodes}, but hydra.launcher.{outer}={nodes}\n  try: world.nodes={nodes}, or leave it out"
        )
    if isinstance(per_node, int):
        machine = replace(machine, per_node=per_node, nodes=machine.nodes or nodes)
        return machine, f"hydra.launcher.{inner}={per_node} on {machine.nodes} node(s)"
    return (replace(machine, nodes=nodes) if nodes > 1 else machine), ""


def _constraints(config: DictConfig) -> ModelConstraints:
    """What the sweeper of an app is told about its model."""
    return read_constraints(OmegaConf.select(config, CONSTRAINTS_KEY))


def model_of(composed: Composed) -> Model | int | None:
    """The model of a composed config, see :func:`~hydra_parallelism.plan.model.read_model`.

    Raises:
        ConfigurationError: The node does not describe a model.
    """
    read: ModelConfig = OmegaConf.to_object(composed.model)  # type: ignore[assignment]
    return read_model(read)


def _world(machine: MachineConfig, size: int, source: str = "") -> World:
    nodes = machine.nodes or max(1, -(-size // machine.per_node))
    return World(size, local_size=min(size, machine.per_node), nnodes=nodes, sources={"size": source})


def _world_size(composed: Composed, machine: MachineConfig, launched: str) -> tuple[int, str]:
    """How many ranks there are, and why: what the launcher starts; what the degrees multiply to; else all places there are."""
    degrees = read_degrees(composed.parallelism, composed.key)
    places = (machine.nodes or 1) * machine.per_node
    source = launched or f"world.nodes={machine.nodes or 1} * world.per_node={machine.per_node} = {places}"
    if degrees.world_size is not None:
        wanted, why = degrees.world_size, f"{composed.key}.world_size={degrees.world_size}"
    elif launched or degrees.untouched or -1 in degrees.factors.values():
        return places, source
    else:
        wanted = math.prod(degrees.factors.values())
        why = f"world_size={wanted} (product of the degrees)"
    if machine.nodes is not None and wanted > places:
        if degrees.world_size is None:
            resolve(composed.parallelism, places, source=source, key=composed.key)  # refuses, with the equation
        needed = -(-wanted // machine.per_node)
        instead = f"hydra.launcher.nnodes={needed}" if launched else f"world.nodes={needed}"
        raise ConfigurationError(f"{why}, but {source}\n  try: {instead}, or {composed.key}.world_size={places}")
    return wanted, why
