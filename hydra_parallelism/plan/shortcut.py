"""Composing plain words without Hydra's loader: the same config, in a tenth of the time.

Hydra's ``compose`` scans the environment for plugins, copies the whole ConfigStore, builds its own config and loads a grammar:
0.3 s of CPU time that do nothing for ``parallelism=hsdp world.nodes=16``. What is taken on here is what needs none of that:
``group=option`` for our own groups and options, and ``path.to.key=value`` for keys of our own schemas and values that every
grammar reads alike. Anything else is Hydra's, and so is every error: a word that does not fit is left to Hydra to refuse.
"""

import re
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..config import ParallelismConfig
from ..store import PRESETS, SUB_GROUPS
from .machine import MACHINES, MachineConfig
from .model import ModelConfig

__all__ = ["DEFAULTS", "compose_plain"]

DEFAULTS = {"parallelism": "default", "world": "dgx_h100"}
"""Group -> the option that is chosen when nobody chooses."""

_OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "parallelism": PRESETS,
    **{f"parallelism/{group}": options for group, options in SUB_GROUPS.items()},
    "world": {name: numbers for name, (numbers, _) in MACHINES.items()},
}
"""Group -> option -> what it sets, in the order in which Hydra merges them."""
_LAUNCHER = ("hydra.launcher.nproc_per_node", "hydra.launcher.nnodes")
_WHOLE = re.compile(r"-?(0|[1-9][0-9]*)")
_DECIMAL = re.compile(r"-?(0|[1-9][0-9]*)\.[0-9]+")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NOT_NAMES = ("true", "false", "null", "nan", "inf")
"""What Hydra's grammar reads as something else, in whatever case."""
_FIXED = {"true": True, "false": False, "null": None}


def compose_plain(overrides: Sequence[str]) -> DictConfig | None:
    """Compose ``parallelism``, ``world`` and ``model``.

    Returns:
        What Hydra would compose, of its own node only what the launcher is told; ``None`` when it is Hydra's turn.
    """
    split = [word.partition("=") for word in overrides]
    if len({key for key, _, _ in split}) < len(split):
        return None
    chosen, values = dict(DEFAULTS), dict[str, Any]()
    for key, equals, value in split:
        if key in _OPTIONS and value in _OPTIONS[key]:
            chosen[key] = value
        elif not equals or "." not in key or not _read(value, key, values):
            return None
    try:
        return _build(chosen, values)
    except OmegaConfBaseException:
        return None


def _read(value: str, key: str, values: dict[str, Any]) -> bool:
    """Read a value as any grammar would; no when it takes Hydra's."""
    if value in _FIXED:
        values[key] = _FIXED[value]
    elif _WHOLE.fullmatch(value):
        values[key] = int(value)
    elif _DECIMAL.fullmatch(value):
        values[key] = float(value)
    elif _NAME.fullmatch(value) and value.lower() not in _NOT_NAMES:
        values[key] = value
    else:
        return False
    return True


def _build(chosen: dict[str, str], values: dict[str, Any]) -> DictConfig | None:
    launcher = {key.rpartition(".")[2]: values.pop(key) for key in _LAUNCHER if key in values}
    if not all(type(value) is int or value == "auto" for value in launcher.values()):  # Hydra knows what else it takes
        return None
    schemas = {"parallelism": ParallelismConfig, "world": MachineConfig, "model": ModelConfig}
    config = OmegaConf.create({name: OmegaConf.structured(schema) for name, schema in schemas.items()})
    for group, options in _OPTIONS.items():
        if group in chosen:
            OmegaConf.update(config, group.replace("/", "."), options[chosen[group]], merge=True)
    OmegaConf.set_struct(config, True)
    for key, value in values.items():
        if OmegaConf.is_config(OmegaConf.select(config, key)):
            return None
        OmegaConf.update(config, key, value, merge=True)
    if launcher:
        OmegaConf.update(config, "hydra", {"launcher": launcher}, force_add=True)
    return config
