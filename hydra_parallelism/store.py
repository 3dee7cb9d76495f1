"""Schemas and presets in Hydra's ConfigStore.

Group ``parallelism``: presets for whole layouts, each on top of ``schema``. Its sub-groups compose with any of them:
``parallelism/context_parallel=ring|ulysses|usp``, ``parallelism/fsdp=bf16|offload``,
``parallelism/pipeline=1f1b|interleaved_1f1b|gpipe|zero_bubble``. Choosing a preset attaches the callback
and makes torchrun the launcher (``hydra/parallelism=runtime``); the user's own callbacks stay, and a launcher chosen on the
command line or in the primary config wins.

Every Hydra app in the environment pays for what happens here at discovery, and nearly all of a plugin's cost is turning
dataclasses into nodes (12 ms for these). So the entries are :class:`_LazyNode`: made when a config is first asked for.
"""

import copy
from collections.abc import Callable
from typing import Any

from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import DictConfig, OmegaConf

from . import resolvers

__all__ = ["PRESETS", "SUB_GROUPS", "put", "register"]

PROVIDER = "hydra-parallelism"

PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "single": {"world_size": 1},
    "ddp": {"dp_replicate": -1},
    "fsdp": {"dp_shard": -1},
    "hsdp": {"dp_replicate": "${parallelism:nnodes}", "dp_shard": -1},
    "tp": {"tp_size": -1, "tp_plan": "auto"},
    "fsdp_tp": {"dp_shard": -1, "tp_size": 2, "tp_plan": "auto"},
    "pp": {"pp_size": -1},
    "pp_fsdp": {"pp_size": 2, "dp_shard": -1},
    "fsdp_pp_tp": {"pp_size": 2, "dp_shard": -1, "tp_size": 2, "tp_plan": "auto"},
    "ring": {"context_parallel": {"ring_degree": -1}},
    "ulysses": {"context_parallel": {"ulysses_degree": -1}},
    "usp": {"context_parallel": {"ring_degree": -1, "ulysses_degree": 2}},
    "ep": {"dp_shard": -1, "ep_size": -1, "ep_plan": "auto"},
    "cfg": {"dp_replicate": -1, "cfg_parallel": 2, "inference": True},
}
"""Preset -> what it sets on top of ``schema``. At most one ``-1``, so that each fits many world sizes."""

SUB_GROUPS: dict[str, dict[str, dict[str, Any]]] = {
    "context_parallel": {
        "ring": {"ring_degree": 2},
        "ulysses": {"ulysses_degree": 2},
        "usp": {"ring_degree": 2, "ulysses_degree": 2},
    },
    "fsdp": {"bf16": {"mixed_precision": "bf16"}, "offload": {"cpu_offload": True}},
    "pipeline": {
        "1f1b": {"schedule": "1F1B"},
        "interleaved_1f1b": {"schedule": "Interleaved1F1B"},
        "gpipe": {"schedule": "GPipe"},
        "zero_bubble": {"schedule": "InterleavedZeroBubble"},
    },
}
"""Sub-group -> option -> what it sets; OmegaConf turns the names into enums when they meet the schema."""

_PRESET_DEFAULTS: list[Any] = [
    "schema",
    {"/hydra/parallelism@_global_": "runtime"},
    "_self_",
    *({group: None} for group in SUB_GROUPS),  # after the preset's own values: a sub-group is the more explicit choice
]
_RUNTIME = {
    "defaults": [{"override /hydra/launcher": "torchrun"}, "_self_"],
    "hydra": {"callbacks": {"parallelism": {"_target_": "hydra_parallelism.callback.ParallelismCallback"}}},
}


class _LazyNode(ConfigNode):
    """An entry of the ConfigStore whose ``node`` is made when it is first read."""

    def __init__(self, name: str, group: str | None, make: Callable[..., DictConfig], *args: Any) -> None:
        # Not the dataclass's own __init__: it would set ``node``, and __getattr__ only answers for what is missing.
        self.name, self.group, self.package, self.provider = name, group, None, PROVIDER
        self._make, self._args = make, args

    def __getattr__(self, attribute: str) -> Any:
        if attribute != "node":
            raise AttributeError(attribute)
        self.node = self._make(*self._args)
        return self.node

    def __deepcopy__(self, memo: dict[int, Any]) -> ConfigNode:
        """What Hydra asks for at each composition. The node is made once, and not by each copy anew."""
        return ConfigNode(self.name, copy.deepcopy(self.node, memo), self.group, self.package, self.provider)


def register() -> None:
    """Put everything into the ConfigStore and register the resolvers. Harmless when done twice."""
    resolvers.register()
    put("parallelism", "schema", _make_schema)
    for name in PRESETS:
        put("parallelism", name, _make_preset, name)
    for group, options in SUB_GROUPS.items():
        for name in options:
            put(f"parallelism/{group}", name, _make_option, group, name)
    put("hydra/parallelism", "runtime", _make_runtime)
    put("hydra/launcher", "torchrun", _make_launcher)
    put("hydra/sweeper", "layouts", _make_sweeper)


def put(group: str | None, name: str, make: Callable[..., DictConfig], *args: Any) -> None:
    """Put a config into the ConfigStore, made by ``make(*args)`` when it is first read, in place of what has its name.

    Args:
        group: Its config group; ``None`` for a primary config.
        name: Its name in the group.
        make: Makes it.
        *args: For ``make``.
    """
    folder = ConfigStore.instance().repo
    for part in group.split("/") if group else ():
        folder = folder.setdefault(part, {})
    folder[f"{name}.yaml"] = _LazyNode(f"{name}.yaml", group, make, *args)


def _make_schema() -> DictConfig:
    from .config import ParallelismConfig  # here, because making the dataclasses costs more than all the rest

    schema: DictConfig = OmegaConf.structured(ParallelismConfig)
    return schema


def _make_preset(name: str) -> DictConfig:
    return OmegaConf.create({"defaults": _PRESET_DEFAULTS, **PRESETS[name]})


def _make_option(group: str, name: str) -> DictConfig:
    return OmegaConf.create(SUB_GROUPS[group][name])


def _make_launcher() -> DictConfig:
    from .launcher_config import TorchrunConfig

    launcher: DictConfig = OmegaConf.structured(TorchrunConfig)
    return launcher


def _make_sweeper() -> DictConfig:
    from .sweeper_config import LayoutsConfig

    sweeper: DictConfig = OmegaConf.structured(LayoutsConfig)
    return sweeper


def _make_runtime() -> DictConfig:
    return OmegaConf.create(_RUNTIME)
