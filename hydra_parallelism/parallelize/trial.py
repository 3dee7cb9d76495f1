"""Whether a model treats each position alone, attention apart: found by running it twice on a piece.

For both runs attention is replaced by something that mixes no positions. In the second one the positions of the piece are
dealt anew, some of them twice: what a position comes to must go with it. It does not if the model counts positions, sums or
shifts along the sequence, convolves, recurs, or attends by means of its own, whatever the calls are that do it.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .. import _compat
from ..context_parallel import attention as attending
from .stand_ins import SIMPLE

__all__ = ["as_dealt", "keeps_positions_apart"]

_TOLERANCE, _TOLERANCE_16 = 2e-5, 2e-2
"""Of the largest output: several times what rounding is for rows that are dealt to other places."""


class _Trial:
    dealt = False


def as_dealt(positions: Tensor) -> Tensor:
    """What is put in for a model, (1, positions), as the run of a trial needs it."""
    return _deal(positions, 1) if _Trial.dealt else positions


@torch.no_grad()
def keeps_positions_apart(
    module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, lengths: Collection[int], narrow: bool
) -> bool | None:
    """Try a model on the arguments of a call. Collective if the forward is: call on all ranks.

    Args:
        module: Whose forward it is; in evaluation mode meanwhile, so that dropout is off.
        forward: What to run.
        args: Positional arguments of the call.
        kwargs: Keyword arguments.
        lengths: How many positions a piece of a sequence may have.
        narrow: Whether it computes in 16 bits.

    Returns:
        ``None`` where the arguments or the output hide where the sequence is, or the output is nothing but zeros.
    """
    leaves, spec = _compat.flatten((args, kwargs))
    if not all(isinstance(leaf, (Tensor, *SIMPLE)) for leaf in leaves):
        return None  # a cache, say, that a trial would fill
    batch = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim > 1), 0)
    dims = [_sequence_dim(leaf, lengths, batch) if isinstance(leaf, Tensor) else None for leaf in leaves]
    if all(dim is None for dim in dims):
        return None
    dealt = [leaf if dim is None else _deal(leaf, dim) for leaf, dim in zip(leaves, dims, strict=True)]
    devices = list({leaf.device for leaf in leaves if isinstance(leaf, Tensor) and leaf.device.type != "cpu"})
    with _evaluating(module), torch.random.fork_rng(devices), attending.without_mixing():
        plain = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        before = _outputs(forward, plain, spec)
        with _dealing():
            after = _outputs(forward, dealt, spec)
    return _agree(before, after, lengths, _TOLERANCE_16 if narrow else _TOLERANCE)


@contextmanager
def _dealing() -> Iterator[None]:
    _Trial.dealt = True
    try:
        yield
    finally:
        _Trial.dealt = False


def _sequence_dim(tensor: Tensor, lengths: Collection[int], batch: int) -> int | None:
    """Where a tensor has positions: dim 1, or dim 0 of what has no batch. The last dim of (batch, numbers) is features."""
    if tensor.ndim > 1 and tensor.shape[1] in lengths and not (tensor.ndim == 2 and tensor.is_floating_point()):
        return 1
    if tensor.ndim and tensor.ndim < 3 and tensor.shape[0] in lengths and tensor.shape[0] != batch:
        return 0
    return None


def _deal(tensor: Tensor, dim: int) -> Tensor:
    return tensor.index_select(dim, _order(tensor.shape[dim], tensor.device))


def _order(length: int, device: torch.device) -> Tensor:
    """The first half backwards, then the first position again and again."""
    half = length // 2
    backwards = torch.arange(half - 1, -1, -1, device=device)
    return torch.cat([backwards, backwards.new_zeros(length - half)])


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    modes = {inner: inner.training for inner in module.modules()}
    try:
        module.eval()
        yield
    finally:
        for inner, mode in modes.items():
            inner.training = mode


def _outputs(forward: Callable[..., Any], leaves: list[Any], spec: Any) -> list[Tensor]:
    args, kwargs = _compat.unflatten(leaves, spec)
    found, _ = _compat.flatten(forward(*args, **kwargs))
    tensors = [leaf for leaf in found if isinstance(leaf, Tensor)]
    return [leaf.to_local() if isinstance(leaf, DTensor) else leaf for leaf in tensors]


def _agree(plain: list[Tensor], dealt: list[Tensor], lengths: Collection[int], tolerance: float) -> bool | None:
    found: bool | None = None
    for one, other in zip(plain, dealt, strict=True):
        if one.ndim < 2 or one.shape[1] not in lengths or not one.is_floating_point():
            continue
        scale = one.abs().amax() if one.numel() else 0.0
        if scale > 0:
            apart = (_deal(one, 1) - other).abs().amax()
            found = (found is not False) and bool(apart <= tolerance * scale)
    return found
