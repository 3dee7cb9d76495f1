"""Attention over a sequence that the ranks of ``cp`` share: what a model calls in place of torch's.

Ulysses is outside and the ring inside (USP, arXiv 2405.07719): the Ulysses ranks of a ring rank first give each other their
part of its piece and take a share of the heads, then these go around the ring.
"""

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .. import _compat
from ..errors import ConfigurationError
from ..runtime import ParallelContext, current
from .layout import Layout
from .ring import Ring, ring_attention
from .ulysses import gather_heads, gather_sequence, spread

__all__ = [
    "Groups",
    "attend",
    "attention",
    "count_calls",
    "is_of_pieces",
    "layout_of",
    "note_piece",
    "piece_lengths",
    "without_mixing",
]


@dataclass(frozen=True)
class Groups:
    """The processes that share a sequence, without a context around them."""

    ring: dist.ProcessGroup
    """Outer axis; a group of one rank means no ring."""
    ulysses: dist.ProcessGroup
    """Inner axis, likewise."""
    load_balance: bool = True
    """The order of the sequence, see ``layout``."""


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    context: ParallelContext | None = None,
) -> Tensor:
    """Exact attention over whole sequences of which each rank of ``cp`` holds its part. Collective over ``cp``, both ways.

    Takes what :func:`torch.nn.functional.scaled_dot_product_attention` takes, and is that function at
    ``ring_degree=ulysses_degree=1``. Otherwise the local sequences must lie as :func:`shard_sequence` cuts them.

    Args:
        query: ``(batch, heads, local sequence, width)``; with tensor parallelism, this rank's heads. At ``cp > 1`` the heads
            must be a multiple of ``ulysses_degree``.
        key: ``(batch, key heads, local sequence, width)``.
        value: Like ``key``, of any width.
        attn_mask: Only at ``cp=1``.
        dropout_p: Only at ``cp=1``.
        is_causal: A token sees itself and what is before it in the whole sequence.
        scale: Factor of the scores, 1/sqrt(width) unless given.
        enable_gqa: Key heads may be fewer: each serves ``heads / key heads`` query heads.
        context: Whose ``cp`` ranks; the running job's unless given.

    Returns:
        ``(batch, heads, local sequence, width of value)``. Differentiable once. On ``meta`` tensors the shape without any
        communication.

    Raises:
        ConfigurationError: At ``cp > 1``, before anything is sent: a mask, dropout, cross attention, heads or lengths that do
            not divide.
        ParallelismError: No context was given and none is alive.
    """
    context = context or current()
    if context.topology.cp == 1:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    layout = layout_of(context)
    query, key, value = _as_autocast(query, key, value)
    _check_extras(attn_mask, dropout_p, context)
    _check_shapes(query, key, value, enable_gqa)
    _check_heads(query.size(1), layout, context)
    _check_length(query.size(2), layout, context)
    _check_piece(query.size(2), context)
    _Seen.calls += 1
    with _compat.without_modes():  # parallelize enters one that sends torch's attention here: what is called below is torch's
        if query.device.type == "meta":
            return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
        if not _Seen.mixes:
            return _alone(query, key, value)
        groups = Groups(context.mesh["ring"].get_group(), context.mesh["ulysses"].get_group(), layout.load_balance)
        return attend(query, key, value, groups, is_causal=is_causal, scale=scale)


class _Seen:
    calls = 0
    pieces: ClassVar[set[int]] = set()
    cut_in: "weakref.ref[ParallelContext] | None" = None
    mixes = True


def count_calls() -> int:
    """How often sequences were attended to in pieces in this process so far, by which one tells whether a forward did."""
    return _Seen.calls


def note_piece(length: int, context: ParallelContext) -> None:
    """Say that a piece of so many positions was cut in a context; those of an earlier one are forgotten."""
    if _Seen.cut_in is None or _Seen.cut_in() is not context:
        _Seen.pieces.clear()
        _Seen.cut_in = weakref.ref(context)
    _Seen.pieces.add(length)


def piece_lengths() -> frozenset[int]:
    """How many positions the pieces have that were cut in the present context so far."""
    return frozenset(_Seen.pieces)


def is_of_pieces(length: int) -> bool:
    """Whether so many positions are those of a piece, or of several different ones side by side: text and image, say."""
    sums = {0}
    for piece in _Seen.pieces:
        sums |= {total + piece for total in sums}
    return length in sums


@contextmanager
def without_mixing() -> Iterator[None]:
    """Make attention at ``cp > 1`` a function of each position alone, to see whether the rest of a model is one."""
    _Seen.mixes = False
    try:
        yield
    finally:
        _Seen.mixes = True


def _alone(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Something of query, key and value of each position, in the shape of attention."""
    heads, width = query.size(1), value.size(-1)
    parts = (F.pad(part, (0, max(0, width - part.size(-1))))[..., :width] for part in (query, key))
    asked, told = (part.repeat_interleave(heads // part.size(1), 1) for part in parts)
    return value.repeat_interleave(heads // value.size(1), 1) + 0.5 * asked + 0.25 * told


def layout_of(context: ParallelContext) -> Layout:
    """How sequences lie in a job."""
    topology = context.topology
    return Layout(topology.ring, topology.ulysses, context.config.context_parallel.load_balance)


def attend(
    query: Tensor, key: Tensor, value: Tensor, groups: Groups, *, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """:func:`attention` over explicit process groups, arguments unjudged. Collective over both of them.

    Args:
        query: ``(batch, heads, local sequence, width)``.
        key: ``(batch, key heads, local sequence, width)``, key heads dividing heads.
        value: Like ``key``, of any width.
        groups: Who shares the sequence.
        is_causal: As the order of ``groups`` has it.
        scale: Factor of the scores, 1/sqrt(width) unless given.
    """
    ulysses = dist.get_world_size(groups.ulysses)
    if ulysses > 1:
        query = gather_sequence(query, groups.ulysses)
        key = gather_sequence(spread(key, ulysses), groups.ulysses)
        value = gather_sequence(spread(value, ulysses), groups.ulysses)
    if dist.get_world_size(groups.ring) > 1:
        out = _around(query, key, value, groups, is_causal, scale)
    else:
        gqa = key.size(1) != query.size(1)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=gqa)
    return gather_heads(out, groups.ulysses) if ulysses > 1 else out


def _around(query: Tensor, key: Tensor, value: Tensor, groups: Groups, is_causal: bool, scale: float | None) -> Tensor:
    """Ring attention, with query, key and value of one width: zeros at the end of a row change neither scores nor sums."""
    width = value.size(-1)
    ring = Ring(groups.ring, groups.load_balance, is_causal, query.size(-1) ** -0.5 if scale is None else scale)
    common = max(query.size(-1), width)
    common += -common % 8 if query.is_cuda else 0  # what CUDA kernels take
    query, key, value = (_widened(tensor, common) for tensor in (query, key, value))
    out = ring_attention(query, key, value, ring)
    return out[..., :width] if width != common else out


def _widened(tensor: Tensor, width: int) -> Tensor:
    return tensor if tensor.size(-1) == width else F.pad(tensor, (0, width - tensor.size(-1)))


def _as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What autocast, where it is on, would hand to torch's attention: its dtype for all but float64."""
    kind = tensors[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors)


def _cp(context: ParallelContext) -> str:
    topology = context.topology
    return f"ring_degree={topology.ring} * ulysses_degree={topology.ulysses} = {topology.cp} ranks share each sequence"


def _check_extras(attn_mask: Tensor | None, dropout_p: float, context: ParallelContext) -> None:
    key = f"{context.key}.context_parallel"
    off = f"{key}.ring_degree=1 {key}.ulysses_degree=1"
    if attn_mask is not None:
        raise ConfigurationError(
            f"attention() takes no attn_mask where {_cp(context)}: it would have to be cut for every block\n"
            f"  try: is_causal=True for a causal mask, and padding at the end of a causal sequence, or {off}"
        )
    if dropout_p > 0:
        raise ConfigurationError(
            f"attention() takes no dropout where {_cp(context)}: dropout_p={dropout_p} would not be drawn as on one process\n"
            f"  try: dropout_p=0.0, or {off}"
        )


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if any(hasattr(tensor, "to_local") for tensor in (query, key, value)):
        raise ConfigurationError(
            "attention() takes plain tensors, not DTensors\n  try: query.to_local(), and so for key and value"
        )
    if len({(tensor.dtype, tensor.device) for tensor in (query, key, value)}) > 1:
        kinds = ", ".join(f"{tensor.dtype} on {tensor.device}" for tensor in (query, key, value))
        raise ConfigurationError(f"attention() needs query, key and value of one dtype on one device, not {kinds}")
    if not query.is_floating_point():
        raise ConfigurationError(f"attention() needs floating point numbers, not {query.dtype}")
    if any(tensor.dim() != 4 for tensor in (query, key, value)):
        raise ConfigurationError(
            f"attention() needs (batch, heads, local sequence, width) where sequences are shared, not {shapes}\n"
            f"  try: query.unsqueeze(1) for one head, and so for key and value, then squeeze(1) of the result"
        )
    if query.size(2) != key.size(2):
        raise ConfigurationError(
            f"attention() shares query, key and value alike, so cross attention is refused: "
            f"{query.size(2)} local queries, {key.size(2)} local keys\n"
            f"  try: self-attention over both in one sequence, each cut by shard_sequence, or degrees of 1"
        )
    if (query.size(0), query.size(3)) != (key.size(0), key.size(3)) or key.shape[:3] != value.shape[:3]:
        raise ConfigurationError(f"attention() needs shapes that agree (nothing is broadcast), not {shapes}")
    _check_key_heads(query.size(1), key.size(1), enable_gqa)


def _check_key_heads(heads: int, key_heads: int, enable_gqa: bool) -> None:
    if key_heads == heads:
        return
    if not key_heads or heads % key_heads:
        remainder = f" = {heads % key_heads}, not 0" if key_heads else ""
        raise ConfigurationError(
            f"attention() needs query heads in whole groups for each key head: heads={heads} % key heads={key_heads}{remainder}"
        )
    if not enable_gqa:
        raise ConfigurationError(f"attention() got {heads} query heads and {key_heads} key heads\n  try: enable_gqa=True")


def _check_heads(heads: int, layout: Layout, context: ParallelContext) -> None:
    if heads and heads % layout.ulysses == 0:
        return
    tp, ulysses, path = context.topology.tp, layout.ulysses, f"{context.key}.context_parallel"
    name = f"(heads={heads * tp} / tp_size={tp})" if tp > 1 else f"heads={heads}"
    degree = math.gcd(heads, ulysses) or 1
    ring = layout.ring * ulysses // degree
    raise ConfigurationError(
        f"{path}.ulysses_degree={ulysses} cannot share the heads evenly: {name} % {ulysses} = {heads % ulysses}, not 0\n"
        f"  try: {path}.ulysses_degree={degree} {path}.ring_degree={ring}"
    )


def _check_length(local: int, layout: Layout, context: ParallelContext) -> None:
    length = local * layout.cp
    if layout.fits(length):
        return
    raise ConfigurationError(
        f"{context.key}.context_parallel cannot share {length} tokens ({layout.cp} ranks with {local} each): "
        f"{layout.misfit(length)}"
    )


def _check_piece(local: int, context: ParallelContext) -> None:
    """What is attended to must be pieces that were cut."""
    if is_of_pieces(local):
        return
    cut = ", ".join(map(str, sorted(_Seen.pieces)))
    cut = f"the pieces that shard_sequence has cut have {cut}" if cut else "shard_sequence has cut nothing"
    raise ConfigurationError(
        f"attention() got {local} positions where {_cp(context)}, but {cut}\n"
        f"  try: tokens = hydra_parallelism.shard_sequence(tokens), and so for all that has a sequence, before the model"
    )
