"""From overrides to a :class:`Case`: composed by Hydra, resolved for the machine that the overrides describe.

The config has three nodes: ``parallelism`` as in every app, ``world`` (the machine, presets as ``world=dgx_h100``), ``model``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from .. import _answers, store
from .._equation import read_degrees
from ..config import ParallelismConfig
from ..errors import ConfigurationError
from ..topology import Topology, resolve
from ..world import World
from .machine import MACHINES, Machine, MachineConfig, read_machine
from .model import Model, ModelConfig, read_model

__all__ = ["Case", "compose", "model_of", "read_policies", "resolve_case"]

_ROOT = "hydra_parallelism_plan"


@dataclass(frozen=True)
class Case:
    """A layout on a machine."""

    topology: Topology
    machine: Machine
    config: ParallelismConfig
    """The ``parallelism`` node, interpolations resolved."""
    states_nodes: bool
    """Whether the user said how many nodes there are, so that empty places on them are worth a word."""


def compose(overrides: Sequence[str], config_dir: str | None = None) -> DictConfig:
    """Compose ``parallelism``, ``world`` and ``model`` with Hydra's own grammar of overrides.

    Args:
        overrides: As on an app's command line, e.g. ``["parallelism=hsdp", "world.nodes=16"]``.
        config_dir: A folder with more config groups, e.g. the app's own ``conf``.

    Raises:
        HydraException: What Hydra has to say about an override.
        ConfigurationError: ``config_dir`` is no folder.
    """
    from hydra import compose as compose_with_hydra
    from hydra import initialize, initialize_config_dir

    _register()
    if config_dir is not None and not Path(config_dir).is_dir():
        raise ConfigurationError(f"--config-dir {config_dir}: no such folder")
    place = (
        initialize(version_base=None, config_path=None)
        if config_dir is None
        else initialize_config_dir(str(Path(config_dir).resolve()), version_base=None)
    )
    with place:
        return compose_with_hydra(_ROOT, list(overrides))


def _register() -> None:
    from hydra.core.config_store import ConfigStore

    store.register()
    keep = ConfigStore.instance().store
    keep(group="world", name="schema", node=MachineConfig, provider=store.PROVIDER)
    for name, (numbers, _) in MACHINES.items():
        node = {"defaults": ["schema", "_self_"], **numbers}
        keep(group="world", name=name, node=node, provider=store.PROVIDER)
    # The launcher starts nothing here; the basic one is the cheapest to compose.
    defaults: list[Any] = [{"parallelism": "default"}, {"world": "dgx_h100"}, {"override hydra/launcher": "basic"}, "_self_"]
    keep(group="model", name="schema", node=ModelConfig, provider=store.PROVIDER)
    keep(name=_ROOT, node={"defaults": [{"model": "schema"}, *defaults]}, provider=store.PROVIDER)


def resolve_case(config: DictConfig) -> Case:
    """Resolve a composed config on its machine. Pure: neither the environment nor this machine's accelerators are asked.

    Raises:
        ConfigurationError: The degrees do not fit, or a value is out of range.
    """
    machine: MachineConfig = OmegaConf.to_object(config.world)  # type: ignore[assignment]
    read_machine(machine, 1)  # refuses before anything is divided by it
    with _answers.planned(_world(machine, (machine.nodes or 1) * machine.per_node)):
        size, source = _world_size(config, machine)
    with _answers.planned(_world(machine, size)):
        topology = resolve(config.parallelism, size, source=source)
        plain = OmegaConf.to_container(config.parallelism, resolve=True)
        merged = OmegaConf.merge(OmegaConf.structured(ParallelismConfig), plain)
    read: ParallelismConfig = OmegaConf.to_object(merged)  # type: ignore[assignment]
    return Case(topology, read_machine(machine, size), read, machine.nodes is not None)


def read_policies(config: DictConfig) -> tuple[Machine, ParallelismConfig]:
    """The machine, all of it used, and the ``parallelism`` node with its interpolations resolved there; degrees unresolved.

    Raises:
        ConfigurationError: A value of ``world`` is out of range.
    """
    written: MachineConfig = OmegaConf.to_object(config.world)  # type: ignore[assignment]
    read_machine(written, 1)
    size = config.parallelism.world_size or (written.nodes or 1) * written.per_node
    with _answers.planned(_world(written, size)):
        plain = OmegaConf.to_container(config.parallelism, resolve=True)
    read: ParallelismConfig = OmegaConf.to_object(  # type: ignore[assignment]
        OmegaConf.merge(OmegaConf.structured(ParallelismConfig), plain)
    )
    return read_machine(written, size), read


def model_of(config: DictConfig) -> Model | int | None:
    """The model of a composed config, see :func:`~hydra_parallelism.plan.model.read_model`.

    Raises:
        ConfigurationError: The node does not describe a model.
    """
    read: ModelConfig = OmegaConf.to_object(config.model)  # type: ignore[assignment]
    return read_model(read)


def _world(machine: MachineConfig, size: int) -> World:
    nodes = machine.nodes or max(1, -(-size // machine.per_node))
    return World(size, local_size=min(size, machine.per_node), nnodes=nodes)


def _world_size(config: DictConfig, machine: MachineConfig) -> tuple[int, str]:
    """How many ranks the degrees ask for, and why; all places of the machine when a degree takes what is left."""
    degrees = read_degrees(config.parallelism, "parallelism")
    places = (machine.nodes or 1) * machine.per_node
    source = f"world.nodes={machine.nodes or 1} * world.per_node={machine.per_node} = {places}"
    if degrees.world_size is not None:
        wanted, why = degrees.world_size, f"parallelism.world_size={degrees.world_size}"
    elif degrees.untouched or -1 in degrees.factors.values():
        return places, source
    else:
        wanted = 1
        for value in degrees.factors.values():
            wanted *= value
        why = f"world_size={wanted} (product of the degrees)"
    if machine.nodes is not None and wanted > places:
        if degrees.world_size is None:
            resolve(config.parallelism, places, source=source)  # refuses, with the equation
        needed = -(-wanted // machine.per_node)
        raise ConfigurationError(f"{why}, but {source}\n  try: world.nodes={needed}, or parallelism.world_size={places}")
    return wanted, why
