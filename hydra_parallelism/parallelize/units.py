"""The units of a model, and the part of a model that one stage holds.

A stage is the model itself, copied around its units: its own units are the original modules under their original names, and
where another stage has a unit there is nothing, until :func:`furnish` puts stand-ins there. What holds no parameters (rotary
positions, dropout) is on every stage.
"""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..errors import ConfigurationError
from . import blocks
from .stages import Unit, arrange
from .stand_ins import StandIn, meta_copy

__all__ = ["cut_out", "find_units", "furnish", "refuse_shared", "take_shapes"]


def find_units(model: nn.Module, split: Any, key: str) -> list[Unit]:
    """The units of a model in the order in which they run: registration order, or that of the model's own pipeline plan.

    Raises:
        ConfigurationError: ``auto``, and the model has no repeated block list.
    """
    block_list = blocks.find_block_list(model)
    if block_list is None and split == "auto":
        raise ConfigurationError(
            f"{key}.pipeline.split=auto cuts a model along its list of repeated blocks, and {type(model).__name__} has none\n"
            f"  try: {key}.pipeline.split=[[first, modules], [last, modules]]"
        )
    units: list[Unit] = []
    _collect(model, "", block_list, units)
    plan = getattr(model, "pp_plan", None) or getattr(model, "_pp_plan", None)  # Transformers 5 and 4
    if isinstance(plan, Mapping) and plan:
        units = arrange(units, {name: (tuple(reads), tuple(writes)) for name, (reads, writes) in plan.items()})
    bare = [unit for unit in units if unit.is_bare]
    return bare + [unit for unit in units if not unit.is_bare]


def _collect(module: nn.Module, prefix: str, block_list: str | None, found: list[Unit]) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        found.append(Unit(f"{prefix}{name}", parameter.numel(), is_bare=True))
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if block_list is not None and f"{block_list}.".startswith(f"{path}."):
            _collect(child, f"{path}.", block_list, found)
        elif size := sum(parameter.numel() for parameter in child.parameters()):
            found.append(Unit(path, size, is_block=prefix == f"{block_list}." or (block_list == "" and not prefix)))


def refuse_shared(model: nn.Module, division: Iterable[Iterable[str]], key: str) -> None:
    """Refuse a parameter that two stages would hold, such as an embedding that is the head's weight too.

    Each stage would train a copy of its own, and the copies would part.

    Raises:
        ConfigurationError: Names the parameter and both stages.
    """
    stage_of = {unit: stage for stage, names in enumerate(division) for unit in names}
    seen: dict[nn.Parameter, tuple[str, int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            continue  # copies that nobody trains stay alike
        unit = max((unit for unit in stage_of if f"{name}.".startswith(f"{unit}.")), key=len)
        first, stage = seen.setdefault(parameter, (name, stage_of[unit]))
        if stage != stage_of[unit]:
            raise ConfigurationError(
                f"{first} (stage {stage}) and {name} (stage {stage_of[unit]}) are one parameter: "
                f"each stage would train its own copy, and the two would part\n"
                f"  try: give {name} a parameter of its own before parallelize (Transformers: tie_word_embeddings=False), "
                f"or {key}.pp_size=1"
            )


def take_shapes(model: nn.Module, units: Iterable[Unit]) -> dict[str, nn.Module | torch.Tensor]:
    """Unit -> its copy without storage, of which stand-ins are made. Taken while the model is whole."""
    shapes: dict[str, nn.Module | torch.Tensor] = {}
    for unit in units:
        original = _get(model, unit.name)
        is_module = isinstance(original, nn.Module)
        shapes[unit.name] = meta_copy(original) if is_module else torch.empty_like(original, device="meta")
    return shapes


def _get(model: nn.Module, name: str) -> Any:
    owner, _, last = name.rpartition(".")
    return getattr(model.get_submodule(owner), last)


class _Gap(nn.Module):
    """Marks where a unit of another stage was, while the model is copied."""


def cut_out(model: nn.Module, units: Iterable[Unit], mine: Iterable[str]) -> nn.Module:
    """The part of a model that holds some of its units. The units are the model's own modules, the rest is a copy."""
    kept, gaps = set(mine), []
    memo: dict[int, Any] = {}
    for unit in units:
        original = _get(model, unit.name)
        memo[id(original)] = original
        if unit.name not in kept:
            memo[id(original)] = nn.Parameter(torch.empty(0), requires_grad=False) if unit.is_bare else _Gap()
            gaps.append(unit)
    part = copy.deepcopy(model, memo)
    for unit in gaps:
        owner, _, name = unit.name.rpartition(".")
        holder = part.get_submodule(owner)
        if unit.is_bare:
            delattr(holder, name)
        else:
            setattr(holder, name, None)
    return part


def furnish(
    part: nn.Module, gaps: Iterable[Unit], shapes: Mapping[str, nn.Module | torch.Tensor], device: torch.device
) -> dict[str, StandIn]:
    """Put stand-ins where a part lacks units; returns those by name. A bare parameter becomes a tensor of zeros."""
    placed: dict[str, StandIn] = {}
    for unit in gaps:
        owner, _, name = unit.name.rpartition(".")
        holder, shape = part.get_submodule(owner), shapes[unit.name]
        if isinstance(shape, nn.Module):
            placed[unit.name] = StandIn(unit.name, shape, device)
            setattr(holder, name, placed[unit.name])
        else:
            setattr(holder, name, torch.zeros((), dtype=shape.dtype, device=device).expand(shape.shape))
    return placed
