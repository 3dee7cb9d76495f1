"""What a composed config comes to on its machine: the :class:`~.case.Case` that all the rest describes and prices."""

import math
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from .. import _answers, interpolations
from .._equation import read_degrees
from ..config import ParallelismConfig
from ..constraints import CONSTRAINTS_KEY, ModelConstraints, is_positive, read_constraints
from ..errors import ConfigurationError
from ..topology import resolve
from ..world import World
from .case import Case, case_of
from .machine import Machine, MachineConfig, read_machine
from .model import Model, ModelConfig, read_model
from .overrides import Composed, compose

__all__ = ["Case", "compose", "model_of", "read_policies", "resolve_case"]

_MOST_RANKS = 1 << 20


def resolve_case(composed: Composed) -> Case:
    """Resolve a composed config on its machine. Pure: neither the environment nor this machine's accelerators are asked.

    Raises:
        ConfigurationError: The degrees do not fit, a value is out of range, or an interpolation of ours refuses.
    """
    machine, launched = _machine_of(composed)
    with _answers.planned(_world(machine, (machine.nodes or 1) * machine.per_node)):
        size, why = _world_size(composed, machine, launched)
    _check_size(size, why)
    world = _world(machine, size, why)
    with _answers.planned(world):
        if OmegaConf.select(composed.config, "hydra.job") is not None:  # composed by Hydra, perhaps an app's own
            interpolations.check(composed.config)
        case = case_of(composed.parallelism, world, machine, key=composed.key)
        return replace(case, constraints=_constraints(composed.config))


def _machine_of(composed: Composed) -> tuple[MachineConfig, str]:
    """The machine that the config describes, judged, and what the launcher says of it, see :func:`_follow_launcher`."""
    _refuse_strangers(composed.world, MachineConfig, "world")
    machine: MachineConfig = OmegaConf.to_object(composed.world)  # type: ignore[assignment]
    read_machine(machine, 1)  # refuses before anything is divided by it
    simulated = OmegaConf.select(composed.parallelism, "simulate.world_size")
    if simulated is not None:
        key = composed.key
        raise ConfigurationError(
            f"{key}.simulate.world_size={simulated} makes a job one rank of a world; a plan is of all of them\n"
            f"  try: {key}.simulate.world_size=null {key}.world_size={simulated}"
        )
    return _follow_launcher(machine, composed.config)


def _check_size(size: int, why: str) -> None:
    """Refuse worlds whose groups would take minutes to write down."""
    if size > _MOST_RANKS:
        raise ConfigurationError(
            f"{why}: plans are of at most {_MOST_RANKS:,} ranks\n  try: a smaller layout of the same pattern"
        )


def _refuse_strangers(node: Any, schema: type, name: str) -> None:
    """Keys that were added by force (``++model.foo=1``): they would say nothing."""
    if not isinstance(node, DictConfig):
        raise ConfigurationError(f"{name}={node}: a plan needs it\n  try: leave it as it is, or {name}.KEY=VALUE")
    strangers = sorted(set(map(str, node)) - set(vars(schema())))
    if strangers:
        raise ConfigurationError("\n  ".join([f"{name} is not valid:", *(f"{name}.{key}: no such key" for key in strangers)]))


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
    per_node, nodes = launcher.get(inner, "auto"), launcher.get(outer)
    nodes = 1 if nodes is None else nodes
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


def read_policies(composed: Composed) -> tuple[Machine, ParallelismConfig]:
    """The machine, all of it used, and the ``parallelism`` node with its interpolations resolved there; degrees unresolved.

    Raises:
        ConfigurationError: A value of ``world`` is out of range, or the launcher starts processes on another number of nodes.
    """
    written, _ = _machine_of(composed)
    size = composed.parallelism.world_size or (written.nodes or 1) * written.per_node
    _check_size(size, f"world_size={size}")
    with _answers.planned(_world(written, size)):
        plain = OmegaConf.to_container(composed.parallelism, resolve=True)
    read: ParallelismConfig = OmegaConf.to_object(  # type: ignore[assignment]
        OmegaConf.merge(OmegaConf.structured(ParallelismConfig), plain)
    )
    return read_machine(written, size), read


def model_of(composed: Composed) -> Model | int | None:
    """The model of a composed config, see :func:`~hydra_parallelism.plan.model.read_model`.

    Raises:
        ConfigurationError: The node does not describe a model.
    """
    _refuse_strangers(composed.model, ModelConfig, "model")
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
