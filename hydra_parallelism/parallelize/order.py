"""``parallelize``: judge everything, then apply it in the one order that works.

Stage split, tensor plan (sequence parallelism with it), experts, attention over the context axes, activation checkpointing,
FSDP from the experts and blocks to the root, then weights for what was on ``meta``. Degrees of 1 take the same way as all
others: a mesh axis of one rank is a mesh axis.

What is judged depends on the config and the model alone, which are the same on every rank. Should they not be, one all-reduce
of five numbers, the first collective of all, has every rank refuse when one does.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from ..config import ParallelismConfig
from ..options import read_config
from ..runtime import ParallelContext, current
from ..topology import Topology
from . import blocks, data, experts, inference, recompute, sequence, tensor, weights
from .pipeline import PipelinedModel, cut, plan_pipeline
from .recipe import Recipe
from .reroute import reroute

__all__ = ["apply", "judge", "parallelize", "prepare"]


def parallelize(
    model: nn.Module,
    context: ParallelContext | None = None,
    *,
    config: Any = None,
    init_weights: weights.Initialize | None = None,
    state_dict: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Apply what the config declares to a model. Collective: call on all ranks.

    Args:
        model: A model in float32 on any device, the same on every rank; on ``meta`` its weights are made after sharding. Ranks
            that drew different weights all take rank 0's.
        context: Whose meshes to use; the :func:`~hydra_parallelism.current` one by default.
        config: Parallelism node to read policies from; by default the one the context was made with. Degrees are the
            context's in any case.
        init_weights: For a model on ``meta``: fills the tensors that one module holds itself, as ``model.apply`` wants it. The
            default is each module's ``reset_parameters``. Runs on rank 0.
        state_dict: Whole state dict to start from; needed on rank 0 only.

    Returns:
        The model, changed in place; at ``pp_size > 1`` a :class:`~.pipeline.PipelinedModel` of this rank's stages, which is
        trained through :func:`~hydra_parallelism.forward_backward`.

    Raises:
        ConfigurationError: Something declared cannot be done to this model. On every rank, before anything is done to it.

    Example:
        >>> model = parallelize(GPT(...))
        >>> optimizer = torch.optim.AdamW(model.parameters())
    """
    context = context or current()
    recipe, error = Recipe(context.config, context.key), None
    try:
        recipe = prepare(model, context, config=config)
        weights.judge(model, init_weights, state_dict, recipe.key)
    except Exception as caught:  # noqa: BLE001 - whatever it is, the other ranks must not wait for this one
        error = caught
    weights.agree(model, context, recipe.key, error)
    plan = weights.blueprint(model)
    if context.topology.pp == 1:
        apply(model, recipe, context)
    else:  # another type: its stages run in a schedule, so it is not called as the model was
        model = _pipeline(model, recipe, context)
    offload = recipe.config.fsdp.cpu_offload
    weights.fill(model, plan, context, init_weights=init_weights, state_dict=state_dict, offload=offload)
    if context.topology.cfg > 1:
        inference.close(model, recipe.key)
    if context.holdings is not None:
        context.holdings.add(model)
    return model


def _pipeline(model: nn.Module, recipe: Recipe, context: ParallelContext) -> PipelinedModel:
    """Cut a model into stages, do to each of this rank's what the recipe says, and make them run."""
    pieces = cut(model, plan_pipeline(model, recipe.config, context.topology, recipe.key), context)
    for part in pieces.parts.values():
        apply(part, recipe, context, whole=False)
    # The skeleton is run before a batch of a new shape: what the stages would refuse half-way, it refuses on every rank.
    reroute(pieces.skeleton, replace(recipe, recomputed=()), context, whole=False)
    judge_length = partial(sequence.judge_call, context.topology.tp, recipe.key)
    return PipelinedModel(pieces, context, judge_length if recipe.config.enable_sequence_parallel else None)


def prepare(model: nn.Module, context: ParallelContext, *, config: Any = None) -> Recipe:
    """Judge a config against a whole model, and say what will be done to it. Pure.

    Raises:
        ConfigurationError: See :func:`parallelize`.
    """
    read = context.config if config is None else read_config(config, context.key)
    return judge(model, read, context.topology, context.key)


def judge(model: nn.Module, config: ParallelismConfig, topology: Topology, key: str = "parallelism") -> Recipe:
    """The same from its parts: policies from the config, degrees from the topology.

    Raises:
        ConfigurationError: See :func:`parallelize`.
    """
    weights.refuse_unfit(model, key)
    block_names = tuple(name for name, _ in blocks.find_blocks(model))
    expert_plan = experts.choose(model, config, topology, block_names, key)
    rules = tensor.choose_rules(model, config, topology.tp, key, expert_plan.styles)
    zones = tensor.find_zones(model, rules, block_names, topology.tp, key, expert_plan.apart)
    experts.judge_zones(expert_plan, config, zones, rules, key)
    sequence.judge(model, config, block_names, zones, rules, key, expert_plan.apart)
    if topology.pp > 1:
        plan_pipeline(model, config, topology, key)
    return Recipe(
        config=config,
        key=key,
        blocks=block_names,
        units=tuple(name for name in data.choose_units(model, config, topology, key) if name not in expert_plan.split),
        rules=rules,
        zones=zones,
        experts=expert_plan.split,
        recomputed=recompute.choose_blocks(model, config, block_names, key),
    )


def apply(module: nn.Module, recipe: Recipe, context: ParallelContext, *, whole: bool = True) -> None:
    """Do to a whole model, or to one stage of it, what a recipe says, in place. Collective: call on all ranks.

    Args:
        module: The model or stage.
        recipe: What to do.
        context: Whose meshes to use.
        whole: Whether this is a whole model, and no stage.
    """
    tensor.split_tensors(module, recipe, context)
    experts.split(module, recipe, context)
    reroute(module, recipe, context, whole=whole)
    recompute.wrap(module, recipe)
    experts.shard(module, recipe, context)
    data.shard(module, recipe, context)
