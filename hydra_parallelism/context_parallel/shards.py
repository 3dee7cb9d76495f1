"""Sequences cut for the ranks of ``cp``, and put together again, both in the order of ``layout``."""

from typing import overload

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ConfigurationError
from ..runtime import ParallelContext, current
from .attention import layout_of, note_piece
from .layout import Layout

__all__ = ["cut", "join", "shard_sequence", "unshard_sequence"]


@overload
def shard_sequence(tensor: Tensor, /, *, dim: int = 1, context: ParallelContext | None = None) -> Tensor: ...
@overload
def shard_sequence(*tensors: Tensor, dim: int = 1, context: ParallelContext | None = None) -> tuple[Tensor, ...]: ...
def shard_sequence(*tensors: Tensor, dim: int = 1, context: ParallelContext | None = None) -> Tensor | tuple[Tensor, ...]:
    """Cut whole sequences and keep the part of this rank, for :func:`attention`. Not collective: each rank cuts what it has.

    Whatever goes by position needs the same cut: token ids, labels (shifted before, not after), position ids. At ``cp=1``
    the tensors come back as they are.

    Args:
        tensors: Whole sequences, equally long, the same on all ranks of ``cp``.
        dim: The sequence.
        context: Whose ``cp`` ranks; the running job's unless given.

    Returns:
        One tensor for one, a tuple for several, contiguous and differentiable.

    Raises:
        ConfigurationError: Lengths that differ or cannot be cut: ring * lcm(2, ulysses) must divide them where the load is
            balanced over a ring, ring * ulysses otherwise.
        ParallelismError: No context was given and none is alive.
    """
    context = context or current()
    layout = layout_of(context)
    _check(tensors, dim, "shard_sequence")
    length = tensors[0].size(dim)
    if any(tensor.size(dim) != length for tensor in tensors):
        lengths = ", ".join(str(tensor.size(dim)) for tensor in tensors)
        raise ConfigurationError(f"shard_sequence() needs sequences of one length, not {lengths} (dim={dim})")
    if layout.cp > 1 and not layout.fits(length):
        raise ConfigurationError(f"{context.key}.context_parallel cannot share {length} tokens: {layout.misfit(length)}")
    rank = context.topology.index("cp", context.rank)
    note_piece(length // layout.cp, context)
    found = tuple(cut(tensor, layout, rank, dim) if layout.cp > 1 else tensor for tensor in tensors)
    return found[0] if len(found) == 1 else found


@overload
def unshard_sequence(tensor: Tensor, /, *, dim: int = 1, context: ParallelContext | None = None) -> Tensor: ...
@overload
def unshard_sequence(*tensors: Tensor, dim: int = 1, context: ParallelContext | None = None) -> tuple[Tensor, ...]: ...
def unshard_sequence(*tensors: Tensor, dim: int = 1, context: ParallelContext | None = None) -> Tensor | tuple[Tensor, ...]:
    """Whole sequences again, in the original order, on every rank. Collective over ``cp``: one all-gather for each tensor.

    For looking at results. No gradient flows back through it: what it returns is detached, at ``cp=1`` too, so a loss of it
    has nothing to call ``backward`` on and torch says so.

    Args:
        tensors: This rank's parts, of one shape on all ranks of ``cp``.
        dim: The sequence.
        context: Whose ``cp`` ranks; the running job's unless given.

    Returns:
        One tensor for one, a tuple for several.

    Raises:
        ConfigurationError: Local lengths that :func:`shard_sequence` cannot have cut.
        ParallelismError: No context was given and none is alive.
    """
    context = context or current()
    layout = layout_of(context)
    _check(tensors, dim, "unshard_sequence")
    for tensor in tensors:
        local = tensor.size(dim)
        if layout.cp > 1 and not layout.fits(local * layout.cp):
            raise ConfigurationError(
                f"{context.key}.context_parallel cannot have cut {local * layout.cp} tokens "
                f"({layout.cp} ranks with {local} each): "
                f"{layout.misfit(local * layout.cp)}"
            )
    if layout.cp == 1:
        found = tuple(tensor.detach() for tensor in tensors)
    else:
        group = context.mesh["cp"].get_group()
        found = tuple(join(_gathered(tensor, group), layout, dim) for tensor in tensors)
    return found[0] if len(found) == 1 else found


def cut(whole: Tensor, layout: Layout, rank: int, dim: int) -> Tensor:
    """The part of a rank of ``cp``, contiguous and with memory of its own."""
    parts = [whole.narrow(dim, start, stop - start) for start, stop in layout.runs(whole.size(dim), rank)]
    return torch.cat(parts, dim)


def join(parts: list[Tensor], layout: Layout, dim: int) -> Tensor:
    """The whole sequence from the parts of all ranks of ``cp``, in their order."""
    shape = list(parts[0].shape)
    shape[dim] *= layout.cp
    whole = parts[0].new_empty(shape)
    for rank, part in enumerate(parts):
        offset = 0
        for start, stop in layout.runs(shape[dim], rank):
            whole.narrow(dim, start, stop - start).copy_(part.narrow(dim, offset, stop - start))
            offset += stop - start
    return whole


def _gathered(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Every rank's tensor, sent as bytes: gloo knows fewer dtypes than torch."""
    local = tensor.detach().contiguous()
    size = dist.get_world_size(group)
    gathered = [torch.empty_like(local) for _ in range(size)]
    dist.all_gather([_as_bytes(tensor) for tensor in gathered], _as_bytes(local), group=group)
    return gathered


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _check(tensors: tuple[Tensor, ...], dim: int, name: str) -> None:
    if not tensors:
        raise ConfigurationError(f"{name}() was given no tensor")
    for tensor in tensors:
        if not -tensor.dim() <= dim < tensor.dim():
            raise ConfigurationError(f"{name}(dim={dim}): a tensor of shape {tuple(tensor.shape)} has no such dim")
