"""Transformers' ``DistributedConfig``: what ``from_pretrained(folder, distributed_config=...)`` takes.

Their ranks lie as ours do, outermost first ``(pp, dp_replicate, fsdp, tp)`` and ``(pp, dp_replicate, efsdp, ep)``, and they
make their meshes over the process group that is there: so in a job that our runtime has started, a model that Transformers
divides has the same groups of ranks as one that ``parallelize`` does.

``None`` is their own plan of a model, ``auto`` here; where both have a degree of 1 a plan does nothing on either side.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from ..config import ParallelismConfig
from ..errors import ConfigurationError
from .fields import Field, Target, give, read_theirs, refuse_theirs, switch, take, whole
from .ours import Ours, build, read_ours

__all__ = ["TARGET", "from_transformers", "to_transformers"]

_DISPATCH, _SUMMED, _ROUTER = "ep_dispatch_experts", "moe_tp_experts", "ep_router"
_FREE, _KEEP = "free_full_weight", "keep_full_weight"


def _is_bf16(value: Any) -> bool:
    if getattr(value, "name", None) == "fp16":
        raise ConfigurationError("theirs is a switch, and means bf16\n    try: parallelism.fsdp.mixed_precision=bf16")
    return value is not None


def _as_precision(value: Any) -> str | None:
    return "bf16" if switch(value) else None


TARGET = Target(
    name="DistributedConfig",
    library="transformers",
    version="5.24.0",
    fields=(
        Field("tp_size", "tp_size", "unset beside a `tp_plan`: what is left, `-1`", back=whole),
        Field("tp_plan", "tp_plan", "unset: the model's own, `auto`; `{}` at a size above 1 is refused: no rule at all"),
        Field(
            "enable_sequence_parallel",
            "enable_sequence_parallel",
            "only from theirs, where it is reserved",
            default=False,
            out=lambda _: False,
            back=switch,
        ),
        Field("enable_expert_parallel", "ep_size", "only from theirs: `ep_size=tp_size`, deprecated", by_hand=True),
        Field("fsdp_size", "dp_shard", back=whole),
        Field("dp_replicate_size", "dp_replicate", "newer releases; left out at 1", 1, back=whole),
        Field("fsdp_plan", "fsdp.wrap", "name patterns only; theirs is merged over the model's own, ours is all", by_hand=True),
        Field("fsdp_plan", "fsdp.reshard_after_forward", f"`{_FREE}` or `{_KEEP}`, one for all patterns", by_hand=True),
        Field("fsdp_cpu_offload", "fsdp.cpu_offload", "", False, back=switch),
        Field("fsdp_mixed_precision", "fsdp.mixed_precision", "`bf16` or nothing", False, _is_bf16, _as_precision),
        Field("pp_size", "pp_size", "forward only (`inference=true`), and not beside data parallelism", back=whole),
        Field("ep_size", "ep_size", back=whole),
        Field("ep_plan", "ep_plan", f"unset: the model's own, `auto`; without `{_ROUTER}`", by_hand=True),
        Field("ep_implementation", "ep_plan", f"`all_reduce` where ours says `{_SUMMED}`, else left out", by_hand=True),
    ),
    cannot={
        "enable_sequence_parallel": "Transformers has the field and does nothing with it",
        "cfg_parallel": "Transformers has no axis for guidance",
        "context_parallel.": "Transformers has no context parallelism there",
        "activation_checkpointing": "that is a method of the model there, gradient_checkpointing_enable()",
        "pipeline.": "their pipeline has no schedule and divides by number of layers",
    },
)


def to_transformers(config: Any, *, world_size: int | None = None) -> dict[str, Any]:
    """A layout as keyword arguments of ``DistributedConfig``. Pure.

    Args:
        config: A ``ParallelismConfig``, a mapping or ``DictConfig`` with its keys, a ``Topology`` or a ``ParallelContext``.
        world_size: How many processes, where neither the degrees nor the config nor the context say it.

    Raises:
        ConfigurationError: Transformers cannot express something that is set; all such keys at once.
    """
    ours = read_ours(config, world_size=world_size)
    return {**give(TARGET, ours, also=_judge(ours)), **_give_units(ours), **_give_experts(ours)}


def from_transformers(source: Any) -> ParallelismConfig:
    """A ``DistributedConfig``, a mapping of its fields, or the path of its JSON file, as our config.

    All sizes 1 means one process there and as many replicas as there are processes here: ``world_size=1`` is set then.

    Raises:
        ConfigurationError: A field that Transformers does not have, or a value that we have nothing for.
    """
    theirs = read_theirs(TARGET, source)
    if theirs.get("tp_plan") != "auto":
        _read_plan("tp_plan", theirs.get("tp_plan"))
    values = take(TARGET, theirs) | _take_alias(theirs) | _take_units(theirs)
    if values.get("tp_plan") is not None:
        values.setdefault("tp_size", -1)
    _judge_no_rules(values)
    for kind in ("tp", "ep"):
        if values.get(f"{kind}_size", 1) != 1:
            values.setdefault(f"{kind}_plan", "auto")
    values |= _take_experts(theirs, values.get("ep_size", 1))
    return build(values | {"inference": values.get("pp_size", 1) > 1}, counts_processes=True)


def _judge(ours: Ours) -> Iterator[str]:
    """What they cannot express because of something else that is set."""
    key, dp, pp = ours.key, ours["dp"], ours["pp_size"]
    for kind in ("tp", "ep"):
        if ours[f"{kind}_size"] > 1 and not ours[f"{kind}_plan"]:
            yield f"{key}.{kind}_plan=null at {kind}_size={ours[f'{kind}_size']}\n    try: {key}.{kind}_plan=auto"
    if pp > 1 and (dp > 1 or ours["ep_size"] > 1):
        beside = f"dp_replicate={ours['dp_replicate']} * dp_shard={ours['dp_shard']}, ep_size={ours['ep_size']}"
        yield f"{key}.pp_size={pp} beside {beside}: Transformers has a pipeline beside tp alone\n    try: {key}.pp_size=1"
    if pp > 1 and not ours["inference"]:
        yield f"{key}.pp_size={pp}: their pipeline computes forward only\n    try: {key}.inference=true, or {key}.pp_size=1"
    if ours["fsdp.mixed_precision"] is not None and dp == 1:
        yield (
            f"{key}.fsdp.mixed_precision={ours['fsdp.mixed_precision'].name}: they apply it at dp_replicate * dp_shard > 1 only"
            f"\n    try: {key}.fsdp.mixed_precision=null, and from_pretrained(dtype=...)"
        )
    yield from _judge_units(ours)
    styles = _styles(ours)
    if _DISPATCH in styles and _SUMMED in styles:
        yield f"{key}.ep_plan has {_DISPATCH} and {_SUMMED}: they have one of them for all\n    try: {key}.ep_plan=auto"


def _judge_units(ours: Ours) -> Iterator[str]:
    wrap = ours["fsdp.wrap"]
    if not isinstance(wrap, list):
        if ours.is_set("fsdp.reshard_after_forward"):
            yield (
                f"{ours.key}.fsdp.reshard_after_forward=false: they say it of module names\n"
                f"    try: {ours.key}.fsdp.wrap=[model.layers.*] beside it"
            )
        return
    classes = [entry for entry in wrap if entry.isidentifier() and entry[0].isupper()]
    if classes and ours.is_set("fsdp.wrap"):
        yield (
            f"{ours.key}.fsdp.wrap={wrap}: they know names of modules, and no classes such as {classes[0]}\n"
            f"    try: {ours.key}.fsdp.wrap=[model.layers.*]"
        )


def _give_units(ours: Ours) -> dict[str, Any]:
    if not isinstance(ours["fsdp.wrap"], list) or not ours.is_set("fsdp.wrap"):
        return {}
    return {"fsdp_plan": dict.fromkeys(ours["fsdp.wrap"], _FREE if ours["fsdp.reshard_after_forward"] else _KEEP)}


def _take_units(theirs: Mapping[str, Any]) -> dict[str, Any]:
    plan = _read_plan("fsdp_plan", theirs.get("fsdp_plan"))
    if not plan:
        return {}
    styles = set(plan.values())
    if len(styles) != 1 or not styles <= {_FREE, _KEEP}:
        problem = f"fsdp_plan={plan!r}: ours frees all units after forward or none"
        refuse_theirs(TARGET, [f"{problem}\n    try: {_FREE!r} for each pattern, or {_KEEP!r} for each"])
    return {"fsdp.wrap": list(plan), "fsdp.reshard_after_forward": styles == {_FREE}}


def _read_plan(name: str, plan: Any) -> Mapping[str, str] | None:
    """A mapping of name patterns to styles, if there is one.

    Raises:
        ConfigurationError: It is something else.
    """
    if plan is None or (isinstance(plan, Mapping) and all(isinstance(word, str) for item in plan.items() for word in item)):
        return plan
    refuse_theirs(TARGET, [f"{name}={plan!r}: must be a mapping of name patterns to styles"])
    return None


def _styles(ours: Ours) -> set[str]:
    return set(ours["ep_plan"].values()) if isinstance(ours["ep_plan"], Mapping) else set()


def _give_experts(ours: Ours) -> dict[str, Any]:
    if not _styles(ours):
        return {}
    instead = {_SUMMED: _DISPATCH}
    rules = {name: instead.get(style, style) for name, style in ours["ep_plan"].items() if style != _ROUTER}
    return {"ep_plan": rules} | ({"ep_implementation": "all_reduce"} if _SUMMED in _styles(ours) else {})


def _take_experts(theirs: Mapping[str, Any], size: int) -> dict[str, Any]:
    plan, how = _read_plan("ep_plan", theirs.get("ep_plan")), theirs.get("ep_implementation") or "auto"
    problems = []
    if how not in ("auto", "all_to_all", "all_reduce"):
        problems.append(f"ep_implementation={how!r}: ours are all_to_all and all_reduce\n    try: ep_implementation='auto'")
    elif how == "all_reduce" and not plan and size > 1:
        problems.append(
            "ep_implementation='all_reduce': ours is a style of modules, so name them\n"
            f"    try: ep_plan={{'layers.*.mlp.experts': '{_DISPATCH}'}} beside it"
        )
    refuse_theirs(TARGET, problems)
    if not plan:
        return {}
    instead = {_DISPATCH: _SUMMED} if how == "all_reduce" else {}
    return {"ep_plan": {name: instead.get(style, style) for name, style in plan.items()}}


def _take_alias(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The deprecated switch, where nothing has made it ``ep_size`` yet."""
    if not theirs.get("enable_expert_parallel") or theirs.get("ep_size") is not None:
        return {}
    plan = theirs.get("tp_plan")
    return {"ep_size": theirs.get("tp_size") or 1, "tp_plan": {} if plan is None else plan}


def _judge_no_rules(values: dict[str, Any]) -> None:
    """``{}`` is no rule there, and here nothing over the model's own; at a size of 1 it is the same."""
    if values.get("tp_plan") != {}:
        return
    size = values["tp_size"]
    if size != 1:
        problem = f"tp_plan={{}} at tp_size={size}, which enable_expert_parallel means too: ranks that compute the same"
        refuse_theirs(TARGET, [f"{problem}\n    try: tp_plan='auto', or fsdp_size={max(size, 2)} in place of tp_size"])
    del values["tp_plan"]
