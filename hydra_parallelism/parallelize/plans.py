"""Which module gets which style: the model's own plan, the user's rules over it. Pure.

``tp_plan`` and ``ep_plan`` are read alike. The model's own plan is, first come first served: an attribute of that name of the
model (Transformers' models have it as a property), the same with an underscore, or Transformers' ``config.base_model_tp_plan``
(``..._ep_plan``), whose patterns are relative to the base model. It may speak of modules that this instance lacks, since it is
written for a family of models. The user's rules may not: a pattern that matches nothing is a mistake. Rules are merged module
by module, the user's over the model's.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from torch import nn

from ..config import ParallelismConfig
from ..errors import ConfigurationError
from . import blocks
from .styles import EXPERT_STYLES, OTHER_STYLES, STYLES, canonical

__all__ = ["own_plan", "resolve", "resolve_experts"]


class _Rule(NamedTuple):
    """What one pattern says, and who says it."""

    style: str
    pattern: str
    where: str


_JudgeStyle = Callable[[_Rule, str], str]


def resolve(model: nn.Module, config: ParallelismConfig, key: str, apart: Collection[str] = ()) -> dict[str, str]:
    """Module name -> style, for every module that ``tp_plan`` concerns, in the model's order.

    Args:
        model: The model.
        config: Has the plan.
        key: Dotted path of the config, for messages.
        apart: Modules that ``ep_plan`` has: what the model's own ``tp_plan`` says of them does not count.

    Raises:
        ConfigurationError: ``auto`` for a model without a plan, a pattern that matches nothing, an unknown style, or a rule of
            the user's for a module that ``ep_plan`` has.
    """
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    example = "{layers.*.q_proj: colwise, ...}"
    return _resolve(model, "tp_plan", config.tp_plan, names, _judge_style, key, example=example, apart=apart)


def resolve_experts(model: nn.Module, config: ParallelismConfig, key: str) -> dict[str, str]:
    """Name -> style, for every module and parameter that ``ep_plan`` concerns, in the model's order.

    Raises:
        ConfigurationError: As :func:`resolve` does.
    """
    modules = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    names = [*modules, *(name for name, _ in model.named_parameters(remove_duplicate=False))]
    example = "{layers.*.experts: ep_dispatch_experts}"
    return _resolve(model, "ep_plan", config.ep_plan, names, _judge_expert_style, key, example=example)


def own_plan(model: nn.Module, kind: str = "tp_plan") -> dict[str, str]:
    """The plan that a model brings along, as full patterns; empty when it brings none."""
    for attribute in (kind, f"_{kind}"):
        plan = getattr(model, attribute, None)
        if isinstance(plan, Mapping) and plan:
            return dict(plan)
    plan = getattr(getattr(model, "config", None), f"base_model_{kind}", None)
    prefix = _base_prefix(model)
    return {f"{prefix}{pattern}": style for pattern, style in plan.items()} if isinstance(plan, Mapping) else {}


def _resolve(
    model: nn.Module,
    kind: str,
    given: Any,
    names: list[str],
    judge: _JudgeStyle,
    key: str,
    *,
    example: str,
    apart: Collection[str] = (),
) -> dict[str, str]:
    if given is None:
        return {}
    own = _place(own_plan(model, kind), names, "", key, kind, owner=type(model).__name__)
    rules = {name: rule for name, rule in own.items() if name not in apart}
    if isinstance(given, Mapping):
        users = _place(dict(given), names, _base_prefix(model), key, kind, owner="")
        _refuse_twice([name for name in users if name in apart], users, key)
        rules |= users
    if not own and given == "auto":
        raise ConfigurationError(
            f"{key}.{kind}=auto, but {type(model).__name__} has no plan of its own that names its modules\n"
            f"  try: {key}.{kind}={example}, or give the model an attribute {kind}"
        )
    return {name: judge(rules[name], key) for name in names if name in rules}


def _base_prefix(model: nn.Module) -> str:
    """Where a Transformers model keeps its base model, with the dot, or nothing."""
    name = getattr(model, "base_model_prefix", "")
    return f"{name}." if name and isinstance(getattr(model, name, None), nn.Module) else ""


def _place(plan: Mapping[str, Any], names: list[str], prefix: str, key: str, kind: str, *, owner: str) -> dict[str, _Rule]:
    """Turn patterns into names. ``owner`` is the model whose own plan it is, or nothing for the user's."""
    found: dict[str, _Rule] = {}
    where = f"the {kind} of {owner}" if owner else f"{key}.{kind}"
    for pattern, style in plan.items():
        hits = blocks.match(pattern, names) or (blocks.match(f"{prefix}{pattern}", names) if prefix else [])
        if not hits and not owner:
            close = ", ".join(blocks.near(pattern, names)) or "patterns over: " + ", ".join(names[:5])
            raise ConfigurationError(f"{where}: no module is called {pattern!r}\n  try: {close}")
        found |= dict.fromkeys(hits, _Rule(canonical(str(style)), pattern, where))
    return found


def _refuse_twice(names: list[str], rules: Mapping[str, _Rule], key: str) -> None:
    if names:
        rule = rules[names[0]]
        raise ConfigurationError(
            f"{rule.where}: {rule.pattern!r} is {rule.style}, but {names[0]} holds experts that {key}.ep_plan has\n"
            f"  try: without {rule.pattern!r}, or {key}.ep_plan=null with {key}.ep_size=1"
        )


def _judge_style(rule: _Rule, key: str) -> str:
    style, pattern, where = rule
    if style in STYLES:
        return style
    known = ", ".join(STYLES)
    if style in EXPERT_STYLES:
        raise ConfigurationError(
            f"{where}: style {style!r} of {pattern!r} is for experts, which {key}.ep_plan speaks of\n"
            f"  try: {key}.ep_plan=auto, which takes experts out of the tensor plan (they stay whole at ep_size=1), or leave "
            f"them whole, {key}.tp_plan={{{pattern}: replicate}}"
        )
    if style in OTHER_STYLES:
        raise ConfigurationError(
            f"{where}: style {style!r} of {pattern!r} is not applied by this release\n"
            f"  try: leave these modules whole, {{{pattern}: replicate}}; applied are {known}"
        )
    raise ConfigurationError(f"{where}: no style {style!r} for {pattern!r}\n  try: one of {known}")


def _judge_expert_style(rule: _Rule, key: str) -> str:
    style, pattern, where = rule
    if style in EXPERT_STYLES:
        return style
    belongs = f"; {style!r} belongs into {key}.tp_plan" if style in STYLES else ""
    raise ConfigurationError(f"{where}: no style {style!r} for {pattern!r}{belongs}\n  try: one of {', '.join(EXPERT_STYLES)}")
