"""The runtime half of a config: read, judged, flattened for comparison, and what it deserves a warning for."""

import warnings
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .config import ParallelismConfig, RuntimeConfig
from .errors import ConfigurationError
from .topology import Topology

__all__ = ["flatten", "read_config", "read_options", "warn"]

_LONGEST_S = 30 * 24 * 3600.0


def read_options(config: Any, key: str) -> RuntimeConfig:
    """The runtime half of a config, judged.

    Raises:
        ConfigurationError: Names every unknown key and every value that cannot work.
    """
    given = config.runtime if isinstance(config, ParallelismConfig) else config.get("runtime") or {}
    try:
        plain = OmegaConf.to_container(given, resolve=True) if isinstance(given, DictConfig) else given
        merged = OmegaConf.merge(OmegaConf.structured(RuntimeConfig), plain)
        options: RuntimeConfig = OmegaConf.to_object(merged)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        where = f"{key}.runtime.{error.key}" if error.key else f"{key}.runtime"
        raise ConfigurationError(f"{where}: {error.msg or error}") from error
    problems = [
        f"{key}.runtime.{name}={getattr(options, name)}: must be a number of seconds between 0 and {_LONGEST_S:g}"
        for name in ("timeout_s", "start_timeout_s")
        if not 0 < getattr(options, name) <= _LONGEST_S
    ]
    for part in (options.backend or "").split(",") if options.backend is not None else []:
        name = part.split(":")[-1]
        if name != "fake" and not (name in dist.Backend.backend_list and dist.is_backend_available(name)):
            known = ", ".join(b for b in dist.Backend.backend_list if dist.is_backend_available(b))
            problems.append(f"{key}.runtime.backend={options.backend}: torch has no backend {name!r} here, it has {known}")
    if problems:
        raise ConfigurationError("\n  ".join([f"{key} is not valid:", *problems]))
    return options


def read_config(config: Any, key: str) -> ParallelismConfig:
    """A whole config as plain data: interpolations resolved, names turned into enums, policies judged.

    Raises:
        ConfigurationError: Names every value that cannot be what it should.
    """
    try:
        plain = OmegaConf.to_container(config, resolve=True) if isinstance(config, DictConfig) else config
        merged = OmegaConf.merge(OmegaConf.structured(ParallelismConfig), plain)
        read: ParallelismConfig = OmegaConf.to_object(merged)  # type: ignore[assignment]
    except OmegaConfBaseException as error:
        where = f"{key}.{error.full_key}" if error.full_key else key
        raise ConfigurationError(f"{where}: {error.msg or error}") from error
    problems = list(_judge_policies(read, key))
    if problems:
        raise ConfigurationError("\n  ".join([f"{key} is not valid:", *problems]))
    return read


def _judge_policies(config: ParallelismConfig, key: str) -> Iterator[str]:
    wrap = config.fsdp.wrap
    if wrap != "auto" and not (isinstance(wrap, list) and all(isinstance(entry, str) for entry in wrap)):
        yield f"{key}.fsdp.wrap={wrap!r}: must be auto, or a list of class names and module name patterns, e.g. [Block]"
    if config.dry_run:
        yield f"{key}.dry_run=true: this job has started already; a dry run is what a command does before its job"
    for name in ("tp_plan", "ep_plan"):
        plan = getattr(config, name)
        if plan not in (None, "auto") and not isinstance(plan, dict):
            yield f"{key}.{name}={plan!r}: must be null, auto, or a mapping of module name patterns to styles"


def flatten(config: Any) -> Iterator[tuple[str, Any]]:
    """Dotted path and value of everything in a config, interpolations resolved, enums by name."""
    node = config
    if not isinstance(config, DictConfig):
        node = OmegaConf.structured(config) if is_dataclass(config) else OmegaConf.create(config)
    plain = OmegaConf.to_container(node, resolve=True, enum_to_str=True)
    pending: list[tuple[str, Any]] = list(plain.items())  # type: ignore[union-attr,arg-type]
    for path, value in pending:
        if isinstance(value, dict):
            pending += [(f"{path}.{name}", inner) for name, inner in value.items()]
        else:
            yield path, value


def warn(config: Any, key: str, topology: Topology) -> None:
    """Warn of keys that are deprecated, and of keys that do nothing at these degrees."""
    for text, category in _warnings(config, key, topology):
        warnings.warn(text, category, stacklevel=2)


def _warnings(config: Any, key: str, topology: Topology) -> Iterator[tuple[str, type[Warning]]]:
    def value(name: str) -> Any:
        return config.get(name) if hasattr(config, "get") else getattr(config, name)

    if value("enable_expert_parallel"):
        yield f"{key}.enable_expert_parallel is deprecated, write {key}.ep_size={topology.ep}", FutureWarning
    for plan, degree, size in (("tp_plan", "tp_size", topology.tp), ("ep_plan", "ep_size", topology.ep)):
        if value(plan) not in (None, "auto") and size == 1:  # presets say auto, whatever the size comes to
            yield f"{key}.{plan} is set but does nothing at {degree}=1; try {key}.{degree}=2", UserWarning
