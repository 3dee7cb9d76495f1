"""Numbers that belong to the whole model while a rank holds a part of it: the gradient norm, and the mean loss.

Torch's own ``clip_grad_norm_`` refuses parameters on more than one mesh and does not look beyond its pipeline stage. Here each
rank adds up what it holds, every gradient divided by how many ranks hold the same numbers, and one sum over the world gives the
norm, whatever the layout. Worked example, ``pp=2, dp_replicate=2, dp_shard=2, tp=2``, so 8 ranks to a stage:

=============================  =====================================  ==============
gradient                       placements                             counted as
=============================  =====================================  ==============
weight, sharded by FSDP, TP    (Replicate, Shard | Shard)             1/2 on 8 ranks
norm, sharded by FSDP          (Replicate, Shard | Replicate)         1/4 on 8 ranks
plain tensor                   none: whole on every rank of a stage   1/8 on 8 ranks
=============================  =====================================  ==============
"""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from . import _compat
from .errors import ConfigurationError
from .runtime import ParallelContext, current

__all__ = ["average_loss", "clip_grad_norm_"]

_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    context: ParallelContext | None = None,
) -> Tensor:
    """Scale gradients down so that the norm of all of them, over all ranks, is at most ``max_norm``.

    Collective: call on all ranks, those without a parameter too. One all-reduce of two numbers over the world; a gradient that
    is not summed yet (a ``Partial`` DTensor) costs one more each.

    Args:
        parameters: The model, or this rank's parameters: plain tensors and DTensors over any meshes. A parameter that comes
            twice counts once, one without a gradient not at all. A plain tensor is taken for whole on every rank of the stage.
        max_norm: Largest norm allowed. ``inf`` only measures.
        norm_type: Order of the norm, above 0; ``inf`` for the largest absolute value.
        error_if_nonfinite: Raise when the norm is infinite or not a number, before anything is scaled.
        context: The layout; ``None`` takes the running job's.

    Returns:
        The norm before scaling: float32, shape ``()``, on the context's device, the same number on every rank.

    Raises:
        ConfigurationError: ``norm_type`` is not above 0.
        RuntimeError: The norm is not finite and ``error_if_nonfinite`` is set, on every rank.
    """
    if not norm_type > 0:
        raise ConfigurationError(f"norm_type={norm_type} must be above 0\n  try: norm_type=2.0, or norm_type=float('inf')")
    context = context or current()
    gradients = _gradients(parameters)
    total = _total_norm(gradients, float(norm_type), context)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"The total norm of order {norm_type} of the gradients is non-finite ({total.item()}), so it cannot be clipped; "
            "error_if_nonfinite=False scales by it anyway"
        )
    factor = torch.clamp(max_norm / (total + _EPSILON), max=1.0)
    for tensors in _alike(_local(gradient) for gradient in gradients).values():
        _compat.scale_(tensors, factor.to(tensors[0].device))
    return total.float()


@torch.no_grad()
def average_loss(
    loss: Tensor | float, *, weight: Tensor | float | None = None, context: ParallelContext | None = None
) -> Tensor:
    """Mean of the ranks' losses over ``dp_cp``, the ranks that saw different tokens. Collective over ``dp_cp``.

    Args:
        loss: This rank's mean loss, shape ``()``.
        weight: Over how many tokens (or samples) this rank took its mean; ``None`` when it is the same number everywhere. A
            rank with weight 0 is left out, whatever its loss is.
        context: The layout; ``None`` takes the running job's.

    Returns:
        ``sum(loss * weight) / sum(weight)``: float32, shape ``()``, detached, on the context's device, the same number on every
        rank of the group. Not a number if all weights are 0.
    """
    context = context or current()
    whole = loss.full_tensor() if isinstance(loss, DTensor) else loss
    mine, count = (
        torch.as_tensor(value, dtype=torch.float64, device=context.device)
        for value in (whole, 1.0 if weight is None else weight)
    )
    sums = torch.stack([torch.where(count > 0, mine * count, 0.0), count])
    dist.all_reduce(sums, group=context.mesh["dp_cp"].get_group())
    return (sums[0] / sums[1]).float()


def _gradients(parameters: nn.Module | Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Each gradient once, summed over the ranks that still hold terms of it only where its placement says so."""
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    elif isinstance(parameters, Tensor):
        parameters = [parameters]
    unique = {id(parameter): parameter for parameter in parameters}
    return [parameter.grad for parameter in unique.values() if parameter.grad is not None]


def _total_norm(gradients: list[Tensor], order: float, context: ParallelContext) -> Tensor:
    """The norm over all ranks, float64. Collective over the world."""
    # float64: powers of single norms are summed here, and a stage without gradients must bring the same dtype.
    found = torch.zeros(2, dtype=torch.float64, device=context.device)
    for copies, tensors in _by_copies(gradients, context).items():
        norms = torch.stack([norm.to(found) for norm in _norms(tensors, order)])
        if math.isinf(order):
            found[0] = torch.maximum(found[0], norms.max())
        else:
            found[0] += norms.pow(order).sum() / copies
    if not math.isinf(order):
        dist.all_reduce(found)
        return found[0].pow(1 / order)
    # Whether a maximum keeps "not a number" is up to the backend, so that is told in a number of its own.
    found[1] = found[0].isnan()
    found[0] = found[0].nan_to_num(0.0, posinf=math.inf)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return torch.where(found[1] > 0, math.nan, found[0])


def _by_copies(gradients: list[Tensor], context: ParallelContext) -> dict[int, list[Tensor]]:
    """Number of ranks that hold the same numbers -> what this rank holds of such gradients, empty shards left out."""
    stage = context.world_size // context.topology.pp
    found: dict[int, list[Tensor]] = {}
    for gradient in gradients:
        shards = 1
        if isinstance(gradient, DTensor):
            gradient = _summed(gradient)
            mesh, placements = gradient.device_mesh, gradient.placements
            # Not is_shard(): FSDP over TP makes a kind of shard that answers False there.
            shards = math.prod(mesh.size(axis) for axis, place in enumerate(placements) if not place.is_replicate())
        held = _local(gradient)
        if held.numel():
            found.setdefault(stage // shards, []).append(held)
    return found


def _summed(gradient: DTensor) -> DTensor:
    """The gradient without placements that leave a sum to be done, as SequenceParallel alone leaves on a norm's weight."""
    if not any(place.is_partial() for place in gradient.placements):
        return gradient
    return gradient.redistribute(placements=[Replicate() if p.is_partial() else p for p in gradient.placements])


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _norms(tensors: list[Tensor], order: float) -> list[Tensor]:
    """Norm of each tensor; those of 16-bit tensors in float32, which torch would round to 16 bits again."""
    found: list[Tensor] = []
    for (_, dtype), same in _alike(tensors).items():
        found += _compat.norms(same, order, torch.float32 if dtype.itemsize < 4 else dtype)
    return found


def _alike(tensors: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Tensors by device and dtype: torch works on a list of such at once."""
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return found
