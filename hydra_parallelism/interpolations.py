"""What can be known of a config's interpolations before the task asks for them."""

from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from .errors import ConfigurationError

__all__ = ["check", "resolve_cached"]


def check(config: DictConfig) -> None:
    """Find out now what our resolvers would refuse in the middle of the task, such as a batch that does not divide.

    Raises:
        ConfigurationError: Names the key, and says what the resolver says.
    """
    for key in config:
        if key == "hydra" or OmegaConf.is_missing(config, key):
            continue
        try:
            _resolve(config, key)
        except InterpolationResolutionError as error:
            refusal: BaseException | None = error
            while refusal is not None and not isinstance(refusal, ConfigurationError):
                refusal = refusal.__cause__ or refusal.__context__
            if refusal is not None:
                raise ConfigurationError(f"{error.full_key}: {refusal}") from error
        except (OmegaConfBaseException, ValueError, TypeError):
            continue  # not ours: told when the task asks for it


def resolve_cached(config: DictConfig) -> dict[str, dict[object, object]]:
    """Resolve everything that resolves, so that cached resolvers (``now``, and the app's own) have their values.

    Returns:
        Those values, by resolver. They belong to the config and are pickled with it.
    """
    for key in config:
        try:
            _resolve(config, key)
        except (OmegaConfBaseException, ValueError, TypeError):
            continue  # what cannot be resolved is told when the task asks for it
    return OmegaConf.get_cache(config)


def _resolve(config: DictConfig, key: Any) -> None:
    node = config._get_node(key)
    if OmegaConf.is_config(node):
        OmegaConf.to_container(node, resolve=True)
    else:
        _ = config[key]  # a leaf at the top
