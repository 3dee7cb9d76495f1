"""Sequence parallelism: between the tensor-parallel zones each ``tp`` rank holds a slice of the sequence.

The region is the block list. The first block's hidden-state input, (batch, sequence, width), is cut along dim 1, the last
block's output is gathered. In between:

* a zone (a block's attention, its MLP) gathers the sequence at its entrance; its row-wise modules reduce-scatter at the exit;
* whatever else holds parameters (norms, scales, routers) computes on its slice, and the gradients of these parameters are
  summed over ``tp``. Experts that are split over ``ep`` are sent the tokens of a slice, as :mod:`.experts` has it.

What embeds the tokens before the region and the norm and head behind it see whole sequences. (Korthikanti et al. 2022,
"Reducing Activation Recomputation in Large Transformer Models", section 4.2.2.)
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from ..config import ParallelismConfig
from ..errors import ConfigurationError
from . import blocks
from .recipe import Recipe
from .styles import STYLES, build, own

__all__ = ["HEADS", "enclose", "judge", "judge_call", "placements"]

HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "heads")
"""Attributes in which models keep the number of query heads."""

_SEQUENCE = 1
_NAMES = ("hidden_states", "x", "input", "inputs")


def placements(name: str, recipe: Recipe) -> tuple[Placement, Placement]:
    """How whole inputs and outputs of a module in the plan are placed over ``tp``."""
    block = next((block for block in recipe.blocks if name.startswith(f"{block}.")), None)
    if not recipe.config.enable_sequence_parallel or block is None:
        return Replicate(), Replicate()
    if any(name.startswith(f"{zone}.") for zone in recipe.block_zones if zone not in recipe.blocks):
        # The zone has gathered; a row-wise module is its exit.
        return Replicate(), Shard(_SEQUENCE) if STYLES[recipe.rules[name]].dim == 1 else Replicate()
    return Shard(_SEQUENCE), Shard(_SEQUENCE)


def judge(
    model: nn.Module,
    config: ParallelismConfig,
    block_names: tuple[str, ...],
    zones: tuple[str, ...],
    rules: Mapping[str, str],
    key: str,
    apart: Collection[str] = (),
) -> None:
    """Refuse sequence parallelism where its region cannot be told. Pure.

    Raises:
        ConfigurationError: No plan, no block list, a module outside the zones that may look along the sequence, or a block that
            splits its heads itself, in a forward that takes the length of the sequence from what would be a slice of it.
    """
    if not config.enable_sequence_parallel:
        return
    switch = f"{key}.enable_sequence_parallel=true"
    if config.tp_plan is None:
        raise ConfigurationError(
            f"{switch}, but {key}.tp_plan=null: there is no zone to shard around\n  try: {key}.tp_plan=auto"
        )
    if not block_names:
        raise ConfigurationError(
            f"{switch}, but {type(model).__name__} has no list of repeated blocks to shard the sequence in\n"
            f"  try: {key}.enable_sequence_parallel=false"
        )
    for block_name in block_names:
        for inner, module in model.get_submodule(block_name).named_modules():
            path = f"{block_name}.{inner}".rstrip(".")
            zoned = path in rules or path in apart or any(f"{path}.".startswith(f"{zone}.") for zone in zones)
            if not zoned and next(module.parameters(recurse=False), None) is not None and not _is_pointwise(module):
                raise ConfigurationError(
                    f"{switch}, but {path} ({type(module).__name__}) may look along the sequence, of which it has a slice\n"
                    f"  try: {key}.tp_plan={{{blocks.starred(path)}: sequence_parallel}} if it treats each position alone, or "
                    f"{key}.enable_sequence_parallel=false"
                )
    for zone in zones:
        block = model.get_submodule(zone)
        if zone in block_names and any(isinstance(getattr(block, name, None), int) for name in HEADS):
            raise ConfigurationError(
                f"{switch}, but {zone} ({type(block).__name__}) splits heads in its own forward, where it would see a slice of "
                f"the sequence\n  try: attention in a module of its own, or {key}.enable_sequence_parallel=false"
            )


def _is_pointwise(module: nn.Module) -> bool:
    """Whether a module treats each position of a sequence alone, as far as its class tells; a block may hold scales itself."""
    return isinstance(module, nn.Linear) or "norm" in type(module).__name__.lower() or any(True for _ in module.children())


def enclose(module: nn.Module, recipe: Recipe, mesh: DeviceMesh) -> None:
    """Cut the sequence where the blocks of a model or stage begin, gather it where they end, and see to what is in between."""
    inside, zones = [block for _, block in recipe.present(recipe.blocks, module)], recipe.block_zones
    if not inside:
        return
    for name, block in recipe.present(recipe.blocks, module):
        for inner, owner in block.named_modules():
            path = f"{name}.{inner}".rstrip(".")
            zoned = any(path == zone or path.startswith(f"{zone}.") for zone in zones)
            told = path in recipe.rules or path in recipe.experts
            if not zoned and not told and next(owner.parameters(recurse=False), None) is not None:
                parallelize_module(owner, mesh, build("sequence_parallel"))
    for name, zone in recipe.present(zones, module):
        if name not in recipe.blocks:
            zone.register_forward_pre_hook(partial(_at_entrance, partial(_gather_for_zone, mesh)), with_kwargs=True)
    cut = partial(_cut, mesh, recipe.key)
    inside[0].register_forward_pre_hook(partial(_at_entrance, cut), with_kwargs=True, prepend=True)
    inside[-1].register_forward_hook(partial(_at_exit, partial(_gather, mesh)))


def _at_entrance(
    change: Callable[[Tensor], Tensor], module: nn.Module | None, inputs: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Change the hidden states among the arguments of a module: the first positional one, or the one called so."""
    if inputs:
        return (change(inputs[0]), *inputs[1:]), options
    name = next((name for name in (*_NAMES, *options) if isinstance(options.get(name), Tensor)), None)
    return inputs, options if name is None else {**options, name: change(options[name])}


def _at_exit(change: Callable[[Tensor], Tensor], module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)


def judge_call(tp: int, key: str, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Refuse a call of the first block whose sequence does not divide. Pure.

    For a pipeline, whose other stages would wait for what the first one refuses.

    Raises:
        ConfigurationError: Its text has the nearest lengths that do.
    """
    _at_entrance(partial(_judge_length, tp, key), None, inputs, options)


def _judge_length(tp: int, key: str, hidden: Tensor) -> Tensor:
    length = hidden.shape[_SEQUENCE]
    if length % tp:
        near = [f"{n}" for n in (length - length % tp, length + tp - length % tp) if n]
        raise ConfigurationError(
            f"{key}.enable_sequence_parallel: a sequence of {length} does not divide over {key}.tp_size={tp}: "
            f"{length} % {tp} = {length % tp}\n"
            f"  try: sequences of {' or '.join(near)}, or {key}.enable_sequence_parallel=false"
        )
    return hidden


def _cut(mesh: DeviceMesh, key: str, hidden: Tensor) -> Tensor:
    """The slice of this rank of (batch, sequence, width) along the sequence."""
    _judge_length(mesh.size(), key, hidden)
    return DTensor.from_local(hidden, mesh, [Replicate()]).redistribute(placements=[Shard(_SEQUENCE)]).to_local()


def _gather(mesh: DeviceMesh, hidden: Tensor) -> Tensor:
    whole = DTensor.from_local(hidden, mesh, [Shard(_SEQUENCE)]).redistribute(placements=[Replicate()]).to_local()
    gathered: Tensor = own(whole)
    return gathered


def _gather_for_zone(mesh: DeviceMesh, hidden: Tensor) -> Tensor:
    """The whole sequence as a DTensor: its gradient is a summand on each rank, reduce-scattered once for all that use it."""
    whole: Tensor = DTensor.from_local(hidden, mesh, [Shard(_SEQUENCE)]).redistribute(placements=[Replicate()])
    return whole
