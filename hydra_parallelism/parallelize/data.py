"""The data axes: DDP, FSDP and HSDP are one path, ``fully_shard`` over ``("dp_replicate", "fsdp")``.

Parameters are sharded over the second axis and replicated over the first, so DDP is ``(N, 1)``, FSDP ``(1, N)`` and one process
``(1, 1)``. Whatever the degrees, torch's FSDP2 reduces the gradients over both axes, keeps the mixed-precision policy and works
on parameters that are split over ``tp`` already, which ``DistributedDataParallel`` cannot.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from .. import _compat
from ..config import FSDPConfig, ParallelismConfig
from ..errors import ConfigurationError
from ..runtime import ParallelContext
from ..topology import Topology
from . import blocks, styles
from .recipe import Recipe

__all__ = ["choose_units", "compute_dtype", "policy", "precision", "shard"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def compute_dtype(config: ParallelismConfig) -> torch.dtype | None:
    """The dtype in which FSDP computes and all-gathers; ``None`` is that of the parameters."""
    chosen = config.fsdp.mixed_precision
    return None if chosen is None else _DTYPES[chosen.name]


def shard(module: nn.Module, recipe: Recipe, context: ParallelContext) -> None:
    """Shard a model or a stage in place: its units from the inside out, then the root.

    The root takes the parameters that no unit has taken. It alone returns float32 under mixed precision, for the loss.

    Collective: call on all ranks.

    Args:
        module: The whole model or one stage, tensor plan and checkpointing applied.
        recipe: Which modules are units, and the policy.
        context: The context whose meshes and device to use.
    """
    options = policy(recipe.config.fsdp, context)
    inner = precision(recipe.config)
    units = [unit for _, unit in recipe.present(recipe.units, module) if unit is not module]
    for unit in (*units, module):
        unit.register_forward_hook(_own_views)
    for unit in units:
        fully_shard(unit, mp_policy=inner, **options)
    # Backward begins with what the root holds (norm, head): freed after forward, it would be gathered again at once.
    # ``None`` is torch's word for "unless this is the root of all".
    if recipe.config.fsdp.reshard_after_forward:
        options["reshard_after_forward"] = None
    fully_shard(module, mp_policy=replace(inner, output_dtype=inner.reduce_dtype), **options)


def choose_units(model: nn.Module, config: ParallelismConfig, topology: Topology, key: str) -> tuple[str, ...]:
    """Names of the modules that ``fsdp.wrap`` makes FSDP units, inner ones first. Pure.

    Raises:
        ConfigurationError: An entry matches nothing, only the root would be wrapped although parameters are sharded, or a
            parameter would belong to two units.
    """
    wrap = config.fsdp.wrap
    if wrap == "auto":
        found = [name for name, _ in blocks.find_blocks(model)]
        why = f"{type(model).__name__} has no list of repeated blocks"
    else:
        found = _named_units(model, list(wrap), key)
        why = f"{key}.fsdp.wrap={_show(wrap)} names nothing below the root"
    if not found and topology.is_sharded:
        candidates = ", ".join(_candidates(model)) or "module class names of its layers"
        raise ConfigurationError(
            f"{key}.fsdp.wrap={_show(wrap)} would shard {type(model).__name__} as one unit over {topology.fsdp} ranks:\n"
            f"  {why}, and one unit gathers all parameters at once, so nothing of the memory is saved\n"
            f"  try: {key}.fsdp.wrap=[{candidates}], or {key}.dp_shard=1 {key}.dp_replicate={topology.dp}"
        )
    units = tuple(sorted(found, key=lambda name: -name.count(".")))
    _refuse_shared(model, units, key, wrap)
    return units


def _own_views(module: nn.Module, inputs: Any, output: Any) -> Any:
    """Give FSDP no views to hang its backward hook on, which it warns of (a ``Linear`` with a bias returns one)."""
    leaves, spec = _compat.flatten(output)
    if not any(isinstance(leaf, Tensor) and _compat.is_view(leaf) for leaf in leaves):
        return output
    return _compat.unflatten([styles.own(leaf) for leaf in leaves], spec)


def precision(config: ParallelismConfig) -> MixedPrecisionPolicy:
    """In which dtypes a unit computes and reduces."""
    dtype = compute_dtype(config)
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32)


def policy(fsdp: FSDPConfig, context: ParallelContext) -> dict[str, Any]:
    """How the parameters of a unit are kept: over which mesh, for how long whole, and where."""
    # Pinned memory makes the copies to an accelerator asynchronous; without one there is nothing to pin for.
    offload = CPUOffloadPolicy(pin_memory=context.device.type == "cuda") if fsdp.cpu_offload else OffloadPolicy()
    return {
        "mesh": _mesh(context),
        "reshard_after_forward": fsdp.reshard_after_forward,
        "offload_policy": offload,
    }


def _mesh(context: ParallelContext) -> DeviceMesh:
    """The one place where a degree of 1 is looked at: torch all-reduces over the replicas even if there is only one.

    That is a collective per unit and step for nothing; with the root gathered twice it was 10% of a small step.
    """
    return context.mesh["dp_replicate", "fsdp"] if context.topology.dp_replicate > 1 else context.mesh["fsdp"]


def _named_units(model: nn.Module, entries: list[str], key: str) -> list[str]:
    """What a list of class names and module patterns means."""
    modules = {name: module for name, module in model.named_modules() if name}
    classes = {type(module).__name__ for module in modules.values()}
    found: dict[str, None] = {}
    for entry in entries:
        of_class = [name for name, module in modules.items() if type(module).__name__ == entry]
        hits = of_class or blocks.match(entry, modules)
        if not hits and entry != type(model).__name__:
            close = blocks.near(entry, [*classes, *modules]) or sorted(_candidates(model))
            raise ConfigurationError(
                f"{key}.fsdp.wrap: {entry!r} is no module class and no module name pattern of {type(model).__name__}\n"
                f"  try: {key}.fsdp.wrap=auto, or one of {', '.join(close)}"
            )
        found |= dict.fromkeys(hits)
    return list(found)


def _candidates(model: nn.Module) -> list[str]:
    """Classes that appear below the root and hold parameters in children of their own."""
    return list(
        dict.fromkeys(
            type(module).__name__
            for name, module in model.named_modules()
            if name and any(True for _ in module.children()) and not isinstance(module, nn.ModuleList | nn.ModuleDict)
        )
    )


def _refuse_shared(model: nn.Module, units: tuple[str, ...], key: str, wrap: Any) -> None:
    """A parameter used in two units would be freed by one while the other still needs it; in one unit sharing is fine."""
    owners: dict[nn.Parameter, tuple[str, nn.Module]] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        name = max((u for u in units if f"{module_name}.".startswith(f"{u}.")), key=len, default="")
        unit = model.get_submodule(name)  # one block that comes several times is one unit
        for own, parameter in module.named_parameters(recurse=False):
            path = f"{module_name}.{own}".lstrip(".")
            first, where = owners.setdefault(parameter, (path, unit))
            if where is not unit:
                inside = next((u for u in units if model.get_submodule(u) is where), "")
                raise ConfigurationError(
                    f"{key}.fsdp.wrap={_show(wrap)} puts one parameter into two FSDP units: {first} (in "
                    f"{inside or 'the root'}) is also {path} (in {name or 'the root'})\n"
                    f"  try: {key}.fsdp.wrap=auto, or leave out what holds {first if inside else path}"
                )


def _show(wrap: Any) -> str:
    return str(wrap) if isinstance(wrap, str) else f"[{', '.join(map(str, wrap))}]"
