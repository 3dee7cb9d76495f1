"""Our side of a conversion: a config, a config node, a topology or a running context, read by dotted key or by axis."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .._equation import FACTORS, read_degrees
from ..config import ParallelismConfig
from ..errors import ConfigurationError
from ..topology import AXES, BASE_AXES, Topology, resolve

__all__ = ["AXIS_OF", "OWNERS", "Ours", "build", "default", "leaves", "read_ours"]

OWNERS = {
    "tp_plan": "tp",
    "ep_plan": "ep",
    "enable_sequence_parallel": "tp",
    "context_parallel.load_balance": "ring",
    "fsdp.wrap": "dp_cp",
    "fsdp.reshard_after_forward": "dp_cp",
    "fsdp.cpu_offload": "dp_cp",
    "pipeline.": "pp",
}
"""Policy (with a dot at the end: all below) -> the axis without which it does nothing."""

AXIS_OF = {**dict(zip(FACTORS.values(), BASE_AXES, strict=True)), "ep_size": "ep"}
"""Dotted key of a degree -> its mesh axis."""


@dataclass(frozen=True)
class Ours:
    """A config and what it means, where that is known."""

    config: ParallelismConfig
    topology: Topology | None
    """``None`` only where the target knows open degrees itself."""
    key: str = "parallelism"

    def __getitem__(self, path: str) -> Any:
        """A degree as resolved, the size of an axis, or a policy as written."""
        axis = AXIS_OF.get(path, path)
        if self.topology is not None and axis in AXES:
            return self.topology.size(axis)
        return _get(self.config, path)

    def is_set(self, path: str) -> bool:
        """Whether a key asks for something: not its default, and not a policy of an axis that has one rank."""
        if self[path] == default(path):
            return False
        owner = next((axis for key, axis in OWNERS.items() if path == key or (key[-1] == "." and path.startswith(key))), None)
        return owner is None or self.topology is None or self.topology.size(owner) > 1


def read_ours(source: Any, *, world_size: int | None = None, may_be_open: tuple[str, ...] = ()) -> Ours:
    """Read our side. Pure: the environment is not asked; a running context knows its world.

    Args:
        source: A ``ParallelismConfig``, a ``DictConfig`` or mapping with its keys, a ``Topology``, or a ``ParallelContext``.
        world_size: How many processes; needed for a ``-1`` and for a config without any degree, unless the config says it.
        may_be_open: Our keys that the target itself can leave at ``-1``; a config without degrees then stays as it is, too.

    Raises:
        ConfigurationError: The config is not valid, does not fit the world, or a degree is open.
    """
    if isinstance(source, Topology):
        return Ours(_config_of(source), source)
    if isinstance(getattr(source, "topology", None), Topology):
        return Ours(source.config, source.topology, source.key)
    key = "parallelism"
    degrees = read_degrees(source, key)
    size = world_size if world_size is not None else degrees.world_size
    config = _read(source, key)
    if size is None and not degrees.untouched and -1 not in degrees.factors.values():
        size = 1
        for value in degrees.factors.values():
            size *= value
    if size is not None:
        return Ours(config, resolve(source, size, key=key), key)
    still_open = [FACTORS[name] for name, value in degrees.factors.items() if value == -1]
    if may_be_open and set(still_open) <= set(may_be_open):
        return Ours(config, None, key)
    what = f"{key}.{still_open[0]}=-1" if still_open else f"{key} has no degree, which means replicas over all processes"
    raise ConfigurationError(f"{what}: how many processes there are is not said\n  try: {key}.world_size=8, or world_size=8")


def build(values: Mapping[str, Any], *, counts_processes: bool = False) -> ParallelismConfig:
    """A config from dotted keys and values; the rest are defaults.

    Args:
        values: Dotted key -> value.
        counts_processes: Whether all degrees 1 mean one process. To us they mean a replica on each process, however many there
            are, so ``world_size=1`` says it then.

    Raises:
        ConfigurationError: A value has the wrong type or is out of range.
    """
    node = OmegaConf.create()
    for path, value in values.items():
        OmegaConf.update(node, path, value, merge=False)
    if read_degrees(node, "parallelism").untouched and counts_processes:
        node.world_size = 1
    return _read(node, "parallelism")


def leaves() -> Iterator[str]:
    """Dotted path of every key of ours that holds a value."""
    return _leaves(ParallelismConfig(), "")


def default(path: str) -> Any:
    """The value of a key that nobody set."""
    return _get(ParallelismConfig(), path)


def _config_of(topology: Topology) -> ParallelismConfig:
    """A topology says nothing of plans: they are the model's own."""
    plans = {f"{axis}_plan": "auto" for axis in ("tp", "ep") if topology.size(axis) > 1}
    degrees = {path: topology.size(axis) for path, axis in AXIS_OF.items()}
    return build({**degrees, **plans, "inference": topology.cfg > 1})


def _read(source: Any, key: str) -> ParallelismConfig:
    try:
        plain = OmegaConf.to_container(source, resolve=True) if isinstance(source, DictConfig) else source
        merged = OmegaConf.merge(_schema(), plain)
        read: ParallelismConfig = OmegaConf.to_object(merged)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        raise ConfigurationError(f"{key}.{error.full_key}: {error.msg or error}" if error.full_key else str(error)) from error
    return read


@cache
def _schema() -> DictConfig:
    """Merging copies it; making it costs more than all else here."""
    schema: DictConfig = OmegaConf.structured(ParallelismConfig)
    return schema


def _leaves(node: Any, prefix: str) -> Iterator[str]:
    for entry in fields(node):
        value = getattr(node, entry.name)
        if is_dataclass(value):
            yield from _leaves(value, f"{prefix}{entry.name}.")
        else:
            yield f"{prefix}{entry.name}"


def _get(config: ParallelismConfig, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value
