"""DeepSpeed Ulysses (arXiv 2309.14509): trade heads for sequence, attend, trade back.

Between the two trades a rank has all of the sequence (of its ring piece) and ``heads / ulysses`` of the heads. Query, key,
value and output take one all-to-all each, and their gradients one each on the way back: eight per attention and step. Each
sends ``(U - 1) / U`` of a local tensor.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["gather_heads", "gather_sequence", "spread"]


def gather_sequence(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``(batch, heads, local, width)`` to ``(batch, heads / U, local * U, width)``. Collective, in backward as well."""
    gathered: Tensor = _Trade.apply(tensor, group, True)  # type: ignore[no-untyped-call]
    return gathered


def gather_heads(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``(batch, heads / U, local * U, width)`` to ``(batch, heads, local, width)``. Collective, in backward as well."""
    gathered: Tensor = _Trade.apply(tensor, group, False)  # type: ignore[no-untyped-call]
    return gathered


def spread(tensor: Tensor, ulysses: int) -> Tensor:
    """Keys or values with as many heads as ``ulysses`` can share: each repeated, up to lcm(key heads, ulysses).

    A query head finds its key head where it would without: heads are a multiple of both numbers, so of the lcm as well.
    """
    batch, heads, length, width = tensor.shape
    times = math.lcm(heads, ulysses) // heads
    if times == 1:
        return tensor
    return tensor.unsqueeze(2).expand(-1, -1, times, -1, -1).reshape(batch, heads * times, length, width)


class _Trade(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup, to_sequence: bool) -> Tensor:
        ctx.group, ctx.to_sequence = group, to_sequence
        return _trade(tensor, group, to_sequence)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _trade(grad, ctx.group, not ctx.to_sequence), None, None


def _trade(tensor: Tensor, group: dist.ProcessGroup, to_sequence: bool) -> Tensor:
    """One all-to-all. What goes to a rank, and what comes from it, is one row of ``(U, batch, heads, sequence, width)``."""
    size = dist.get_world_size(group)
    batch, heads, length, width = tensor.shape
    if to_sequence:
        leaving = tensor.reshape(batch, size, heads // size, length, width).transpose(0, 1).contiguous()
    else:
        leaving = tensor.reshape(batch, heads, size, length // size, width).permute(2, 0, 1, 3, 4).contiguous()
    arriving = torch.empty_like(leaving)
    dist.all_to_all_single(arriving, leaving, group=group)
    if to_sequence:
        return arriving.permute(1, 2, 0, 3, 4).flatten(2, 3)
    return arriving.transpose(0, 1).flatten(1, 2)
