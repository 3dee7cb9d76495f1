"""From the words of a command line to a composed config: by the short way where they are plain, else by Hydra.

Without an app the config has three nodes: ``parallelism`` as in every app, ``world`` (the machine, presets as
``world=dgx_h100``) and ``model``. With an app's own config the first is the app's; words about ``world`` and ``model`` are the
app's where it has a node of that name, and the plan's where it has not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from .. import store
from ..errors import ConfigurationError
from .machine import MACHINES, MachineConfig
from .model import ModelConfig
from .shortcut import DEFAULTS, compose_plain

__all__ = ["Composed", "compose"]

_ROOT = "hydra_parallelism_plan"
_OWN = ("world", "model")


@dataclass(frozen=True)
class Composed:
    """A composed config and where in it the plan finds what it needs."""

    config: DictConfig
    """All of it, Hydra's node included: interpolations are resolved in it."""
    key: str
    """Dotted path of the parallelism node."""
    world: DictConfig
    """The machine: keys of :class:`~.machine.MachineConfig`."""
    model: DictConfig
    """The model: keys of :class:`~.model.ModelConfig`."""

    @property
    def parallelism(self) -> DictConfig:
        """The parallelism node."""
        node: DictConfig = OmegaConf.select(self.config, self.key)
        return node


def compose(overrides: Sequence[str], config_dir: str | None = None, config_name: str | None = None) -> Composed:
    """Compose with Hydra's own grammar of overrides.

    Args:
        overrides: As on an app's command line, e.g. ``["parallelism=hsdp", "world.nodes=16"]``.
        config_dir: A folder with more config groups, e.g. the app's own ``conf``.
        config_name: The app's primary config in that folder; ``None`` takes only groups from there.

    Raises:
        HydraException: What Hydra has to say about an override.
        ConfigurationError: ``config_dir`` is no folder, or the app's config has no parallelism node.
    """
    if config_name is not None and config_dir is None:
        raise ConfigurationError(f"--config-name {config_name} is in no folder\n  try: --config-dir conf")
    if config_dir is not None and not Path(config_dir).is_dir():
        raise ConfigurationError(f"--config-dir {config_dir}: no such folder")
    if config_dir is not None and config_name is not None:
        return _compose_app(list(overrides), config_dir, config_name)
    config = compose_plain(overrides) if config_dir is None else None
    if config is None:
        _refuse_nothing(overrides)
        config = _compose_with_hydra(_ROOT, list(overrides), config_dir)
    return Composed(config, "parallelism", config.world, config.model)


def _compose_app(overrides: list[str], config_dir: str, config_name: str) -> Composed:
    """Compose the app, then what it has no nodes for. Twice where it has: whose words are whose is known only then."""
    words: dict[str, list[str]] = {node: [word for word in overrides if _is_about(word, node)] for node in _OWN}
    theirs = [word for word in overrides if not any(word in of_node for of_node in words.values())]
    try:
        config = _compose_with_hydra(config_name, theirs, config_dir)
        claimed = [node for node in _OWN if words[node] and node in config]
    except HydraException:  # perhaps for want of the words that were held back
        claimed = [node for node in _OWN if words[node]]
        if not claimed:
            raise
    if claimed:
        theirs = [word for word in overrides if word in theirs or any(word in words[node] for node in claimed)]
        config = _compose_with_hydra(config_name, theirs, config_dir)
    ours = compose([word for node in _OWN if node not in claimed for word in words[node]])
    key = str(OmegaConf.select(config, "hydra.callbacks.parallelism.node") or "parallelism")
    if OmegaConf.select(config, key) is None:
        raise ConfigurationError(
            f"{Path(config_dir) / config_name} has no node {key!r}: choose a preset in its defaults list (parallelism: default)"
        )
    return Composed(config, key, ours.world, ours.model)


def _refuse_nothing(overrides: Sequence[str]) -> None:
    """Refuse to leave out a node that a plan needs, which Hydra would do or fail at without a word to type."""
    for word in overrides:
        group, _, option = word.lstrip("~").partition("=")
        if group in ("parallelism", *_OWN) and (word.startswith("~") or option in ("null", "")):
            instead = {"parallelism": "parallelism=default", "world": "world=dgx_h100"}.get(group, "leave it out")
            raise ConfigurationError(f"{word}: a plan needs the node {group}\n  try: {instead}")


def _is_about(word: str, node: str) -> bool:
    return word.startswith((f"{node}=", f"{node}."))


def _compose_with_hydra(config_name: str, overrides: list[str], config_dir: str | None) -> DictConfig:
    from hydra import __version__, initialize, initialize_config_dir
    from hydra import compose as compose_with_hydra

    store.register()
    if config_name == _ROOT:
        _register()
    # 1.3 warns when the version is left out, 1.4 when it is given.
    version: dict[str, Any] = {"version_base": None} if __version__.startswith("1.3") else {}
    place = (
        initialize(config_path=None, **version)
        if config_dir is None
        else initialize_config_dir(str(Path(config_dir).resolve()), **version)
    )
    with place:
        return compose_with_hydra(config_name, overrides, return_hydra_config=True)


def _register() -> None:
    """The groups ``world`` and ``model``, and the primary config that has them next to ``parallelism``."""
    store.put("world", "schema", _structured, MachineConfig)
    store.put("model", "schema", _structured, ModelConfig)
    for name, (numbers, _) in MACHINES.items():
        store.put("world", name, _create, {"defaults": ["schema", "_self_"], **numbers})
    defaults: list[Any] = [{"model": "schema"}, *({group: option} for group, option in DEFAULTS.items()), "_self_"]
    store.put(None, _ROOT, _create, {"defaults": defaults})


def _structured(schema: type) -> DictConfig:
    node: DictConfig = OmegaConf.structured(schema)
    return node


def _create(content: dict[str, Any]) -> DictConfig:
    return OmegaConf.create(content)
