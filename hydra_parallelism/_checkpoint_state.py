"""What is in a checkpoint: one flat table of names, the same whatever the layout.

=====================================  ========================================================================
key                                    value
=====================================  ========================================================================
``model.NAME``                         a parameter or buffer, by its name in the whole model
``optimizer.state.NAME.KEY``           what the optimizer keeps for a parameter, e.g. ``exp_avg``
``optimizer.settings.NAME``            its param group's settings (``lr``, ``betas``, ...), as one dict
=====================================  ========================================================================

Settings are kept by parameter and not by group, because a pipeline stage has other parameters in its group 0 than the next. A
rank brings the names it holds; the table is the union of all ranks'. Of a plain tensor that many ranks hold, one rank writes.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule

from ._checkpoint_files import unite
from .errors import ConfigurationError
from .parallelize.pipeline import PipelinedModel

__all__ = ["apply", "check", "collect", "settle", "target"]

_MODEL, _STATE, _SETTINGS = "model.", "optimizer.state.", "optimizer.settings."
_SHOWN = 5

State = dict[str, Any]
_Shape = tuple[int, ...] | None


def collect(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> State:
    """The table of what this rank holds now. Tensors are the live ones, not copies."""
    state = _of_model(model)
    if optimizer is None:
        return state
    fresh = not optimizer.state
    held = _flatten(_of_optimizer(model, optimizer))
    return state | {key: value for key, value in held.items() if not (fresh and key.startswith(_STATE))}


def target(model: nn.Module, optimizer: torch.optim.Optimizer | None, metadata: Metadata) -> State:
    """The table that a checkpoint is read into: what this rank holds, for those parameters that have state in the checkpoint.

    A parameter that never got a gradient has none, and an optimizer without a step behind it has none at all.
    """
    state = _of_model(model)
    if optimizer is None:
        return state
    has_state = {_owner(key) for key in metadata.state_dict_metadata if key.startswith(_STATE)}
    held = _flatten(_of_optimizer(model, optimizer))
    return state | {key: value for key, value in held.items() if not key.startswith(_STATE) or _owner(key) in has_state}


def check(state: State, metadata: Metadata, *, with_optimizer: bool) -> None:
    """Compare what all ranks hold with what the checkpoint holds. Collective over the world.

    Raises:
        ConfigurationError: Names that only one of the two has, or tensors of other shapes; the same text on every rank.
    """
    saved = metadata.state_dict_metadata
    wanted = {key: tuple(value.shape) if isinstance(value, torch.Tensor) else None for key, value in state.items()}
    everyone: dict[str, Any] = {}
    for held in unite(wanted):
        everyone |= held
    shapes = {key: tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None for key, entry in saved.items()}
    if with_optimizer and not any(key.startswith(_SETTINGS) for key in saved):
        raise ConfigurationError(
            "the checkpoint was saved without an optimizer\n  try: load(folder, model), and start with a new optimizer"
        )
    found = {key: shape for key, shape in shapes.items() if with_optimizer or key.startswith(_MODEL)}
    _compare(found, everyone)


def apply(model: nn.Module, optimizer: torch.optim.Optimizer | None, state: State) -> None:
    """Give a table that was read to the model and the optimizer.

    Raises:
        ConfigurationError: Parameters of one param group were saved with different settings.
    """
    groups = _groups(_of_optimizer(model, optimizer), state) if optimizer is not None else []
    set_model_state_dict(model, {key[len(_MODEL) :]: value for key, value in state.items() if key.startswith(_MODEL)})
    if optimizer is None:
        return
    by_name: dict[str, dict[str, Any]] = {}
    for key, value in state.items():
        if key.startswith(_STATE):
            by_name.setdefault(_owner(key), {})[key.rpartition(".")[2]] = value
    if not by_name:
        _set_settings(optimizer, groups)
        return
    # Not strict, because of parameters that never got a gradient; check() has compared all names already.
    options = StateDictOptions(strict=False)
    loaded: Any = {"state": by_name, "param_groups": groups}
    set_optimizer_state_dict(model, optimizer, loaded, options=options)


def _compare(saved: Mapping[str, _Shape], held: Mapping[str, _Shape]) -> None:
    differing = [
        key for key in sorted(saved.keys() | held.keys()) if key not in saved or key not in held or saved[key] != held[key]
    ]
    # What the optimizer keeps for a parameter differs because the parameter does: that need not be told again.
    told = [key for key in differing if key.startswith(_MODEL)] or differing
    problems = {
        "the checkpoint lacks": [key for key in told if key not in saved],
        "only the checkpoint has": [key for key in told if key not in held],
        "other shapes": [
            f"{key} is {_told(saved[key])} in the checkpoint and {_told(held[key])} here"
            for key in told
            if key in saved and key in held
        ],
    }
    lines = [f"  {title}: {_some(keys)}" for title, keys in problems.items() if keys]
    if lines:
        first, last = (
            "the checkpoint is not one of this model and optimizer; the layout may differ, names and shapes may not:",
            "  try: the model config and the optimizer that it was saved with",
        )
        raise ConfigurationError("\n".join([first, *lines, last]))


def _of_model(model: nn.Module) -> State:
    settle(model)
    return {_MODEL + name: value for name, value in get_model_state_dict(model).items()}


def settle(model: nn.Module) -> None:
    """Put the sharded parameters back in place, which the optimizer has and a checkpoint names.

    A forward without a backward leaves gathered ones there: of FSDP's root always, of the others as the policy says.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule | PipelinedModel):
            module.reshard()


def _of_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """State by parameter name, and param groups with names for parameters. The optimizer and its gradients stay as they are.

    For an optimizer that has no state yet, torch takes a step with zero gradients and a learning rate of 0, to have tensors
    that a checkpoint can be read into. Left there, it would count as the first step of the run.
    """
    if optimizer.state:
        return get_optimizer_state_dict(model, optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None  # torch takes no such step when there is a gradient
    try:
        return get_optimizer_state_dict(model, optimizer)
    finally:
        optimizer.state.clear()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def _flatten(held: Any) -> State:
    state: State = {}
    for name, parts in held["state"].items():
        state |= {f"{_STATE}{name}.{part}": value for part, value in parts.items()}
    for group in held["param_groups"]:
        settings = {key: value for key, value in group.items() if key != "params"}
        state |= {_SETTINGS + name: settings for name in group["params"]}
    return state


def _owner(key: str) -> str:
    """The parameter that a key of optimizer state belongs to."""
    return key[len(_STATE) :].rpartition(".")[0]


def _groups(held: Any, state: State) -> list[dict[str, Any]]:
    """Param groups with the saved settings of their parameters."""
    groups = []
    for index, group in enumerate(held["param_groups"]):
        names = group["params"]
        settings = [state[_SETTINGS + name] for name in names] or [{}]
        for name, other in zip(names, settings):
            differing = [key for key in {**settings[0], **other} if repr(settings[0].get(key)) != repr(other.get(key))]
            if differing:
                key = differing[0]
                raise ConfigurationError(
                    f"param group {index} of the optimizer holds parameters that were saved with different settings: "
                    f"{key}={settings[0].get(key)} for {names[0]}, {key}={other.get(key)} for {name}\n"
                    "  try: the param groups that it was saved with"
                )
        groups.append({**group, **settings[0], "params": names})
    return groups


def _set_settings(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """The optimizer of a run that has taken no step: settings only, and no state of its own or of torch's making."""
    optimizer.state.clear()
    for own, saved in zip(optimizer.param_groups, groups, strict=True):
        own.update({key: value for key, value in saved.items() if key != "params"})


def _told(shape: _Shape) -> str:
    return "no tensor" if shape is None else str(shape)


def _some(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
