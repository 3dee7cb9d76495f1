"""Which module gets which tensor-parallel style: the model's own plan, the user's rules over it. Pure.

The model's own plan is, first come first served: an attribute ``tp_plan`` of the model (Transformers' models have it as a
property), ``_tp_plan``, or Transformers' ``config.base_model_tp_plan``, whose patterns are relative to the base model. It may
speak of modules that this instance lacks, since it is written for a family of models. The user's rules may not: a pattern that
matches nothing is a mistake. Rules are merged module by module, the user's over the model's.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..config import ParallelismConfig
from ..errors import ConfigurationError
from . import blocks
from .styles import EXPERT_STYLES, STYLES, canonical

__all__ = ["own_plan", "resolve"]


def resolve(model: nn.Module, config: ParallelismConfig, key: str) -> dict[str, str]:
    """Module name -> style, for every module that ``tp_plan`` concerns, in the model's order.

    Raises:
        ConfigurationError: ``auto`` for a model without a plan, a pattern that matches nothing, an unknown style.
    """
    given = config.tp_plan
    if given is None:
        return {}
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    rules = _place(own_plan(model), names, "", key, owner=type(model).__name__)
    if isinstance(given, Mapping):
        rules |= _place(dict(given), names, _base_prefix(model), key, owner="")
    if not rules and given == "auto":
        raise ConfigurationError(
            f"{key}.tp_plan=auto, but {type(model).__name__} has no plan of its own that names its modules\n"
            f"  try: {key}.tp_plan={{layers.*.q_proj: colwise, ...}}, or give the model an attribute tp_plan"
        )
    return {name: rules[name] for name in names if name in rules}


def own_plan(model: nn.Module) -> dict[str, str]:
    """The plan that a model brings along, as full patterns; empty when it brings none."""
    for attribute in ("tp_plan", "_tp_plan"):
        plan = getattr(model, attribute, None)
        if isinstance(plan, Mapping) and plan:
            return dict(plan)
    plan = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    prefix = _base_prefix(model)
    return {f"{prefix}{pattern}": style for pattern, style in plan.items()} if isinstance(plan, Mapping) else {}


def _base_prefix(model: nn.Module) -> str:
    """Where a Transformers model keeps its base model, with the dot, or nothing."""
    name = getattr(model, "base_model_prefix", "")
    return f"{name}." if name and isinstance(getattr(model, name, None), nn.Module) else ""


def _place(plan: Mapping[str, Any], names: list[str], prefix: str, key: str, *, owner: str) -> dict[str, str]:
    """Turn patterns into module names. ``owner`` is the model whose own plan it is, or nothing for the user's."""
    found: dict[str, str] = {}
    for pattern, style in plan.items():
        hits = blocks.match(pattern, names) or (blocks.match(f"{prefix}{pattern}", names) if prefix else [])
        if not hits and owner:
            continue
        where = f"the tp_plan of {owner}" if owner else f"{key}.tp_plan"
        if not hits:
            close = ", ".join(blocks.near(pattern, names)) or "patterns over: " + ", ".join(names[:5])
            raise ConfigurationError(f"{where}: no module is called {pattern!r}\n  try: {close}")
        found |= dict.fromkeys(hits, _judge_style(style, pattern, where))
    return found


def _judge_style(style: Any, pattern: str, where: str) -> str:
    name = canonical(str(style))
    if name in STYLES:
        return name
    known = ", ".join(STYLES)
    if name in EXPERT_STYLES:
        raise ConfigurationError(
            f"{where}: style {name!r} of {pattern!r} is not applied by this release\n"
            f"  try: leave these modules whole, {{{pattern}: replicate}}; applied are {known}"
        )
    raise ConfigurationError(f"{where}: no style {name!r} for {pattern!r}\n  try: one of {known}")
