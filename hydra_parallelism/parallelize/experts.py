"""The expert axis: whole experts on the ranks of ``context.mesh["ep"]``, their weights sharded over ``efsdp`` beside it.

Styles are those of Transformers' ``ep_plan``. One of the first two is said of the module that holds the experts (see
:mod:`.packed`), and settles how tokens get to them (see :mod:`.dispatch`):

=======================  ===================================================================================================
style                    what it says
=======================  ===================================================================================================
``ep_dispatch_experts``  the ``ep`` ranks have different tokens, which travel by all-to-all. With ``tp_size > 1`` that takes
                         sequence parallelism, under which the ``tp`` ranks have different tokens too
``moe_tp_experts``       the ``ep`` ranks are the ``tp`` ranks, ``ep_size == tp_size``, and have the same tokens: each computes
                         the part of its experts, and the parts are summed
``grouped_gemm``         of a parameter of such a module: its dim 0 is split. All of them are, whether they are named or not
``ep_router``            of the router: it stays whole, on every rank
=======================  ===================================================================================================

Example, 8 ranks with ``dp_shard=4, tp_size=2, ep_size=4`` and 8 experts, ``efsdp = 4 * 2 / 4 = 2``:

==========  ===  =======  =====================
rank        ep   efsdp    experts
==========  ===  =======  =====================
0, 4        0    0, 1     0, 1: a half of each
1, 5        1    0, 1     2, 3
2, 6        2    0, 1     4, 5
3, 7        3    0, 1     6, 7
==========  ===  =======  =====================

An expert sees tokens of all ranks of its ``ep`` group. The mean over the data ranks is therefore the sum of its gradients over
``dp_replicate * efsdp`` ranks, divided by ``dp_replicate * fsdp``, not by their number.

At ``ep_size=1`` experts take the same way, a group of one; beside ``tp_size > 1`` they are left whole on every ``tp`` rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

from ..config import ParallelismConfig
from ..errors import ConfigurationError
from ..runtime import ParallelContext
from ..topology import Topology
from . import blocks, data, packed, plans
from .dispatch import Dispatch, Summed
from .recipe import Recipe

__all__ = ["ExpertPlan", "choose", "judge_zones", "shard", "split"]

DISPATCH, SUMMED = "ep_dispatch_experts", "moe_tp_experts"


@dataclass(frozen=True)
class ExpertPlan:
    """What ``ep_plan`` says of a model."""

    styles: Mapping[str, str] = field(default_factory=dict)
    """Module that holds experts -> how tokens get to them."""
    routers: frozenset[str] = frozenset()
    """What stands beside such a module and treats each token alone."""
    is_applied: bool = False
    """Whether experts are split; beside ``tp`` ranks at ``ep_size=1`` they are not."""

    @property
    def split(self) -> Mapping[str, str]:
        """Those whose experts are split."""
        return self.styles if self.is_applied else {}

    @property
    def apart(self) -> frozenset[str]:
        """Modules that the other axes need not be told of."""
        return self.routers | self.styles.keys()


def split(module: nn.Module, recipe: Recipe, context: ParallelContext) -> None:
    """Keep of each layer's experts those of this rank, and have tokens find the others, in a model or a stage in place.

    Collective: call on all ranks. Nothing is sent here, as in :func:`.tensor.split_tensors`.
    """
    mesh = context.mesh["ep"]
    for name, experts in recipe.present(tuple(recipe.experts), module):
        style = Dispatch() if recipe.experts[name] == DISPATCH else Summed()
        parallelize_module(experts, mesh, style, src_data_rank=None)


def shard(module: nn.Module, recipe: Recipe, context: ParallelContext) -> None:
    """Make the experts of each layer an FSDP unit over ``efsdp``. Collective: call on all ranks, before the units around it."""
    at = context.topology
    mesh = context.mesh["dp_replicate", "efsdp"] if at.dp_replicate > 1 else context.mesh["efsdp"]
    policy = {**data.policy(recipe.config.fsdp, context), "mesh": mesh}
    for _, experts in recipe.present(tuple(recipe.experts), module):
        precision = _precision(recipe.config, next(experts.parameters()).dtype)
        unit: Any = fully_shard(
            experts, mp_policy=precision, shard_placement_fn=lambda weight: _placement(weight, at.ep, at.efsdp), **policy
        )
        # With nothing to sum torch 2.13 divides twice by it what is not float32 or bfloat16: tests/test_compat.py.
        divides_twice = at.efsdp == 1 and next(experts.parameters()).dtype == torch.float64
        unit.set_gradient_divide_factor(float(at.dp_replicate * at.fsdp) ** (0.5 if divides_twice else 1.0))
        # Gloo cannot multiply while it sums. Forced with nothing to sum, torch divides twice there, too.
        unit.set_force_sum_reduction_for_comms(at.efsdp > 1)


def _precision(config: ParallelismConfig, dtype: torch.dtype) -> MixedPrecisionPolicy:
    """As for the units around it, but inputs stay as the block gives them: the router's weights may be wider on purpose."""
    precision = replace(data.precision(config), cast_forward_inputs=False)
    # Torch splits the division of 16-bit gradients in two, of which only one can be told.
    return replace(precision, reduce_dtype=torch.float32) if dtype.itemsize < 4 else precision


def _placement(weight: nn.Parameter, ep: int, efsdp: int) -> Shard:
    """Along which dim FSDP shards: the experts of a rank, or if they do not divide, another dim that does."""
    sizes = (weight.shape[0] // ep, *weight.shape[1:])
    return Shard(next((dim for dim, size in enumerate(sizes) if size % efsdp == 0), 0))


def choose(
    model: nn.Module, config: ParallelismConfig, topology: Topology, block_names: tuple[str, ...], key: str
) -> ExpertPlan:
    """Which modules hold experts and how tokens get to them, judged against the model and the degrees. Pure.

    Raises:
        ConfigurationError: No plan at ``ep_size > 1``, a module whose experts are kept otherwise, experts that ``ep_size`` does
            not divide, or a style that does not fit the degrees.
    """
    if topology.ep == 1 and config.ep_plan == "auto" and not plans.own_plan(model, "ep_plan"):
        return ExpertPlan()  # one config serves models with experts and without
    rules = plans.resolve_experts(model, config, key)
    styles = {name: style for name, style in rules.items() if style in (DISPATCH, SUMMED)}
    if topology.ep > 1 and not styles:
        _refuse_without(model, config, topology, key)
    for name, style in rules.items():
        if style == "grouped_gemm" and name.rpartition(".")[0] not in styles:
            raise ConfigurationError(
                f"{key}.ep_plan: {name} is {style}, but nothing says how tokens get to its experts\n"
                f"  try: {{{_experts_around(model, name)}: {DISPATCH}}}"
            )
    for name in styles:
        _judge_module(model.get_submodule(name), name, key)
        _judge_count(packed.count(model.get_submodule(name)), name, topology, key)
    if topology.ep > 1:
        _judge_styles(styles, config, topology, key)
    routers = {name for name, style in rules.items() if style == "ep_router"} | _leaves_beside(model, styles, block_names)
    return ExpertPlan(styles, frozenset(routers - styles.keys()), topology.ep > 1 or topology.tp == 1)


def judge_zones(
    plan: ExpertPlan, config: ParallelismConfig, zones: tuple[str, ...], rules: Mapping[str, str], key: str
) -> None:
    """Refuse experts in a zone that gathers the sequence, where every ``tp`` rank would have the same tokens. Pure.

    Raises:
        ConfigurationError: Names what the tensor plan splits beside the experts.
    """
    if not config.enable_sequence_parallel:
        return
    for name in plan.styles:
        zone = next((zone for zone in zones if name.startswith(f"{zone}.")), None)
        if zone is not None:
            beside = [rule for rule in rules if rule.startswith(f"{zone}.")]
            remedy = ", ".join(f"{blocks.starred(rule)}: sequence_parallel" for rule in beside)
            raise ConfigurationError(
                f"{key}.ep_plan: {name} stands in {zone}, where {key}.tp_plan splits {', '.join(beside)}: there the "
                f"sequence is whole on every tp rank, and each would send the same tokens\n  try: {key}.tp_plan={{{remedy}}}"
            )


def _refuse_without(model: nn.Module, config: ParallelismConfig, topology: Topology, key: str) -> None:
    found = dict.fromkeys(blocks.starred(name) for name, module in model.named_modules() if name and packed.count(module))
    style = SUMMED if topology.ep == topology.tp and not config.enable_sequence_parallel else DISPATCH
    mapping = ", ".join(f"{pattern}: {style}" for pattern in found)
    given = "null" if config.ep_plan is None else "{}" if not config.ep_plan else "... names no module of experts"
    remedies = [f"{key}.ep_plan=auto (the model's own plan)"] if plans.own_plan(model, "ep_plan") else []
    remedies += [f"{key}.ep_plan={{{mapping}}}"] if found else []
    nothing = f"{key}.ep_size=1: {type(model).__name__} has no module of stacked experts"
    raise ConfigurationError(
        f"{key}.ep_size={topology.ep}, but {key}.ep_plan={given}: {topology.ep} ranks would hold all experts each\n"
        f"  try: {', or '.join(remedies) or nothing}"
    )


def _experts_around(model: nn.Module, name: str) -> str:
    """The pattern of the module that a rule for a parameter, or for something else, should have named."""
    owner = name.rpartition(".")[0]
    return blocks.starred(owner if name in dict(model.named_parameters()) else name)


def _judge_module(module: nn.Module, name: str, key: str) -> None:
    why = packed.why_not(module)
    if why:
        raise ConfigurationError(
            f"{key}.ep_plan: {name} ({type(module).__name__}) is no module of stacked experts: {why}\n"
            f"  try: experts as hydra_parallelism.MoE or Transformers keep them, or {key}.ep_plan=null with {key}.ep_size=1"
        )


def _judge_count(experts: int, name: str, at: Topology, key: str) -> None:
    if experts % at.ep == 0:
        return
    ranks = at.fsdp * at.tp
    fits = [n for n in range(1, ranks + 1) if ranks % n == 0 and experts % n == 0 and (n == 1 or n % at.tp == 0)]
    nearest = min(fits, key=lambda n: (abs(n - at.ep), n))
    why = (
        f"{at.ep} ranks are more than its {experts} experts" if at.ep > experts else f"{experts} % {at.ep} = {experts % at.ep}"
    )
    raise ConfigurationError(
        f"{key}.ep_size={at.ep} does not divide the {experts} experts of {name}: {why}\n"
        f"  try: {key}.ep_size={nearest}, or another number of experts"
    )


def _judge_styles(styles: Mapping[str, str], config: ParallelismConfig, at: Topology, key: str) -> None:
    """Whether the ranks along ``ep`` have the same tokens is settled by the degrees; a style must say the same."""
    sequence = config.enable_sequence_parallel
    for name, style in styles.items():
        pattern = blocks.starred(name)
        said = f"{key}.ep_plan: {name} is {style}"
        needs = f" {key}.enable_sequence_parallel=true" if at.tp > 1 and not sequence else ""
        dispatch = f"{key}.ep_plan={{{pattern}: {DISPATCH}}}{needs}"
        if style == SUMMED and at.ep != at.tp:
            raise ConfigurationError(
                f"{said}, a sum over ranks that have the same tokens, which takes ep_size == tp_size: "
                f"{key}.ep_size={at.ep}, {key}.tp_size={at.tp}\n  try: {dispatch}"
            )
        if style == SUMMED and sequence:
            raise ConfigurationError(
                f"{said}, a sum over ranks that have the same tokens, but with {key}.enable_sequence_parallel=true the "
                f"{at.tp} tp ranks have different ones\n  try: {dispatch}"
            )
        if style == DISPATCH and at.tp > 1 and not sequence:
            instead = "" if at.ep != at.tp else f", or {key}.ep_plan={{{pattern}: {SUMMED}}}"
            raise ConfigurationError(
                f"{said}, but without {key}.enable_sequence_parallel the {key}.tp_size={at.tp} tp ranks have the same "
                f"tokens, and each would send all of them\n  try: {key}.enable_sequence_parallel=true{instead}"
            )


def _leaves_beside(model: nn.Module, styles: Mapping[str, str], block_names: tuple[str, ...]) -> set[str]:
    """Routers, whatever they are called: modules without children in a mixture, which holds the experts too and is no block."""
    mixtures = {name.rpartition(".")[0] for name in styles} - {"", *block_names}
    return {
        f"{mixture}.{child}"
        for mixture in mixtures
        for child, module in model.get_submodule(mixture).named_children()
        if not any(True for _ in module.children())
    }
