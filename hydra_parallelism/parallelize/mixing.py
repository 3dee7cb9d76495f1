"""Calls of torch that look along the sequence, and so take a piece of it for the whole.

They are told by the length of the piece, so a width or a number of heads that happens to be equal may be taken for it: then a
harmless call is refused, which is better than a wrong one let through.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _compat
from ..context_parallel import attention as attending

__all__ = ["find_mixing"]

_SEQUENCE = 1

Found = tuple[str, str] | None
"""What a call does, and what to do instead; nothing when it is harmless."""

_POSITIONS = (
    "counts positions",
    "positions as an argument of the model, cut with the tokens: hydra_parallelism.shard_sequence(tokens, positions)",
)
_ATTENTION = ("writes attention out", "F.scaled_dot_product_attention or hydra_parallelism.attention in its place")
_ALONG = ("looks along the sequence", "that step outside the model, on what hydra_parallelism.unshard_sequence gives back")


def _counts(length: int, args: Any, kwargs: Mapping[str, Any]) -> Found:
    bounds = [bound for bound in (*args, kwargs.get("end")) if isinstance(bound, int) and not isinstance(bound, bool)]
    is_count = bounds in ([length], [0, length], [0, length, 1]) or (len(bounds) == 2 and bounds[1] - bounds[0] == length)
    return _POSITIONS if is_count else None


def _squares(length: int, args: Any, kwargs: Mapping[str, Any]) -> Found:
    scores = args[0] if args else kwargs.get("input")
    is_square = isinstance(scores, Tensor) and scores.ndim > 2 and tuple(scores.shape[-2:]) == (length, length)
    return _ATTENTION if is_square else None


def _packs(length: int, args: Any, kwargs: Mapping[str, Any]) -> Found:
    return _ATTENTION


def _reduces(length: int, args: Any, kwargs: Mapping[str, Any]) -> Found:
    """Along dim 1 of (batch, sequence, ...) or of (batch, sequence); the last dim of anything wider is its features."""
    tensor = args[0] if args else kwargs.get("input")
    named = kwargs.get("dim", kwargs.get("dims", args[1] if len(args) > 1 else None))
    if not isinstance(tensor, Tensor) or tensor.ndim <= _SEQUENCE or tensor.shape[_SEQUENCE] != length:
        return None
    dims = (named,) if isinstance(named, int) else named if isinstance(named, tuple | list) else ()
    return _ALONG if any(isinstance(dim, int) and dim % tensor.ndim == _SEQUENCE for dim in dims) else None


def _shifts(length: int, args: Any, kwargs: Mapping[str, Any]) -> Found:
    """``roll`` has the shifts before the dims."""
    return _reduces(length, (args[0], *args[2:]) if args else (), kwargs)


def _convolves(length: int, args: Any, kwargs: Mapping[str, Any]) -> Found:
    tensor, weight = (*args, *(kwargs.get(name) for name in ("input", "weight")))[:2]
    is_wide = isinstance(tensor, Tensor) and isinstance(weight, Tensor) and tensor.shape[-1] == length and weight.shape[-1] > 1
    return _ALONG if is_wide else None


def _picks(length: int, args: Any, kwargs: Mapping[str, Any]) -> Found:
    """``x[:, 0]``, ``x[:, 1:]``, ``table[:length]``: the first position of a piece is not the first of the sequence."""
    tensor, index = args
    parts = index if isinstance(index, tuple) else (index,)
    if any(_is_head(tensor, dim, part, length) for dim, part in enumerate(parts)):
        return _POSITIONS
    if tensor.ndim <= _SEQUENCE or tensor.shape[_SEQUENCE] != length or len(parts) < 2 or parts[0] != slice(None):
        return None
    part = parts[_SEQUENCE]
    if isinstance(part, slice):
        return None if attending.is_of_pieces(len(range(*part.indices(length)))) else _ALONG
    return _ALONG if isinstance(part, int) and not isinstance(part, bool) else None


def _is_head(tensor: Tensor, dim: int, part: Any, length: int) -> bool:
    """Whether a slice takes as many entries of a longer table as a piece has positions. The last dim of numbers is features."""
    if not isinstance(part, slice) or part.stop != length or part.start not in (None, 0) or dim >= tensor.ndim:
        return False
    may_be_features = dim == tensor.ndim - 1 and tensor.ndim > 1 and tensor.is_floating_point()
    is_joint = attending.is_of_pieces(tensor.shape[dim])
    return tensor.shape[dim] > length and not may_be_features and not is_joint


def _narrows(length: int, args: Any, kwargs: Mapping[str, Any]) -> Found:
    given = dict(zip(("input", "dim", "start", "length"), args)) | dict(kwargs)
    tensor, dim = given["input"], given["dim"] % given["input"].ndim
    return _POSITIONS if _is_head(tensor, dim, slice(given["start"], given["length"]), length) else None


_KNOWN: dict[Any, Callable[[int, Any, Mapping[str, Any]], Found]] = {
    torch.arange: _counts,
    **dict.fromkeys((torch.softmax, F.softmax, Tensor.softmax), _squares),
    # nn.MultiheadAttention: torch runs such a function of functions without the modes around it.
    **dict.fromkeys((F.multi_head_attention_forward, _compat.packed_attention()), _packs),
    **dict.fromkeys((torch.mean, torch.sum, torch.amax, torch.cumsum, torch.cumprod, torch.flip, torch.sort), _reduces),
    **dict.fromkeys((Tensor.mean, Tensor.sum, Tensor.amax, Tensor.cumsum, Tensor.cumprod, Tensor.flip, Tensor.sort), _reduces),
    **dict.fromkeys((torch.max, Tensor.max, torch.diff, Tensor.diff), _reduces),
    **dict.fromkeys((torch.roll, Tensor.roll), _shifts),
    torch.conv1d: _convolves,
    Tensor.__getitem__: _picks,
    **dict.fromkeys((torch.narrow, Tensor.narrow), _narrows),
}
"""Functions that mix positions, and how to tell."""


def find_mixing(func: Any, args: Any, kwargs: Mapping[str, Any], length: int) -> Found:
    """What a call of torch does that is wrong on a piece of a sequence, and what to do instead; ``None`` if nothing is known.

    Args:
        func: The function or method, as ``__torch_function__`` is told it.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        length: Positions in the piece.
    """
    judge = _KNOWN.get(func)
    return judge(length, args, kwargs) if judge is not None and length > 1 else None
