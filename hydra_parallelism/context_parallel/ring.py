"""Ring attention (arXiv 2310.01889): every rank keeps its queries, keys and values go around.

At step ``i`` ring rank ``r`` has the keys and values of rank ``r - i``, and while it computes with them the next ones arrive.
Blocks are merged by their log-sum-exp in float32 (float64 for float64), which is exact: with ``w = sigmoid(new_lse - lse)`` the
output becomes ``out + w * (new_out - out)`` and the log-sum-exp ``logaddexp(lse, new_lse)``, as in torch's ``_SDPAMerger``.

Which part of a step counts when attention is causal (``head`` and ``tail``: the two halves of a local sequence):

=====================  ======================  ==================================================
keys from              contiguous              balanced (zig-zag, see ``layout``)
=====================  ======================  ==================================================
this rank              causal                  causal: a rank's chunks are in order
an earlier rank        all                     all queries with the head of the keys
a later rank           nothing                 the tail of the queries with all keys
=====================  ======================  ==================================================

Per rank and with ``R`` ranks, forward sends ``R - 1`` blocks of keys and values. Backward sends as many again, and ``R - 1``
blocks of their gradients in the accumulator's dtype: those of a block set off at the first foreign rank, follow the block, and
their last hop is the one home, where the owner's own share waits for them.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import fake_groups
from .kernels import Kernel, choose

__all__ = ["Ring", "ring_attention"]

_ALL = slice(None)


@dataclass(frozen=True)
class Ring:
    """The ranks that pass blocks on, and how their sequences lie."""

    group: dist.ProcessGroup
    """In the order of the ring."""
    balanced: bool
    """Zig-zag order instead of contiguous."""
    causal: bool
    """Whether a query sees only what is not after it."""
    scale: float
    """Factor of the scores."""

    @property
    def size(self) -> int:
        """Ranks in the ring."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """Index of this one."""
        return dist.get_rank(self.group)

    def counts(self, step: int, length: int) -> tuple[slice, slice] | None:
        """Queries and keys of a step that count, as slices of local sequences of some length; ``None`` if none do."""
        if step == 0 or not self.causal:
            return _ALL, _ALL
        earlier = step <= self.rank
        if not self.balanced:
            return (_ALL, _ALL) if earlier else None
        half = length // 2
        return (_ALL, slice(0, half)) if earlier else (slice(half, length), _ALL)


def ring_attention(query: Tensor, key: Tensor, value: Tensor, ring: Ring) -> Tensor:
    """Exact attention over sequences that lie around a ring. Collective over the ring, in forward and in backward.

    Args:
        query: ``(batch, heads, local sequence, width)``.
        key: ``(batch, key heads, local sequence, width)``, key heads dividing heads; sent as few as they are.
        value: Like ``key``.
        ring: Who takes part. The local length is the same everywhere, and even if causal and balanced.

    Returns:
        Like ``query``. Differentiable once, with respect to all three.
    """
    out: Tensor = _RingAttention.apply(query, key, value, ring)  # type: ignore[no-untyped-call]
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: Ring) -> Tensor:
        query, block = _rows(query), _packed(key, value)
        kernel = choose(query, block[0], block[1], ring.causal)
        out, lse = _forward(query, block, ring, kernel)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, block, out, lse)
        ctx.ring, ctx.kernel = ring, kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, block, out, lse = ctx.saved_tensors
        of_query, of_block = _backward(_rows(grad), query, block, out, lse, ctx.ring, ctx.kernel)
        return of_query.to(query.dtype), of_block[0].to(block.dtype), of_block[1].to(block.dtype), None


def _forward(query: Tensor, block: Tensor, ring: Ring, kernel: Kernel) -> tuple[Tensor, Tensor]:
    out, lse = query, query  # replaced by step 0, which counts everywhere
    for step in range(ring.size):
        arriving = _pass_on(block, ring) if step + 1 < ring.size else None
        part = ring.counts(step, query.size(2))
        if part is not None:
            queries, keys = part
            key, value = block[..., keys, :]
            new_out, new_lse = kernel.forward(query[:, :, queries], key, value, step == 0 and ring.causal, ring.scale)
            if step == 0:
                out, lse = new_out.to(new_lse.dtype), new_lse
            else:
                _merge(out[:, :, queries], lse[:, :, queries], new_out, new_lse)
        if arriving is not None:
            block = arriving.wait()
    return out, lse


def _merge(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Take a block into what has been merged so far, in place."""
    out.lerp_(new_out.to(out.dtype), torch.sigmoid(new_lse - lse).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, new_lse))


def _backward(
    grad: Tensor, query: Tensor, block: Tensor, out: Tensor, lse: Tensor, ring: Ring, kernel: Kernel
) -> tuple[Tensor, Tensor]:
    """Gradients of the local queries, and of the local keys and values, in the dtype of the log-sum-exp."""
    of_query = of_block = torch.empty(0)  # replaced by step 0
    travelling: _Transfer | None = None
    for step in range(ring.size):
        arriving = _pass_on(block, ring) if step + 1 < ring.size else None
        part = ring.counts(step, query.size(2))
        grads = None
        if part is not None:
            queries, keys = part
            rows = _Rows(*(tensor[:, :, queries] for tensor in (grad, query, out, lse)))
            key, value = block[..., keys, :]
            grads = kernel.backward(
                rows.grad, rows.query, key, value, rows.out, rows.lse, step == 0 and ring.causal, ring.scale
            )
        share = travelling.wait() if travelling is not None else None  # none with the own block, nor at its first foreign rank
        if grads is not None and part is not None:
            share = _added(share, grads[1], grads[2], part[1], block, lse.dtype)
        elif share is None:
            share = torch.zeros_like(block, dtype=lse.dtype)
        if step == 0:
            assert grads is not None
            of_query, of_block = grads[0].to(lse.dtype), share
        else:
            if grads is not None and part is not None:
                of_query[:, :, part[0]] += grads[0]
            travelling = _pass_on(share, ring)
        if arriving is not None:
            block = arriving.wait()
    if travelling is not None:
        of_block += travelling.wait()
    return of_query, of_block


def _added(share: Tensor | None, of_key: Tensor, of_value: Tensor, keys: slice, block: Tensor, dtype: torch.dtype) -> Tensor:
    """Gradients of a block with those of some of its keys taken in; ``None`` is nothing so far."""
    if share is None and keys == _ALL:
        return torch.stack([of_key, of_value]).to(dtype)
    total = torch.zeros_like(block, dtype=dtype) if share is None else share
    total[0][:, :, keys] += of_key
    total[1][:, :, keys] += of_value
    return total


class _Rows(NamedTuple):
    """The queries that count at a step, and what goes with them."""

    grad: Tensor
    query: Tensor
    out: Tensor
    lse: Tensor


@dataclass
class _Transfer:
    """A block on its way here, and the one that leaves, which must stay as it is until then."""

    arriving: Tensor
    leaving: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.arriving


def _pass_on(tensor: Tensor, ring: Ring) -> _Transfer:
    """Start to send a tensor to the next rank and to receive its like from the one before."""
    size, rank = ring.size, ring.rank
    arriving = torch.empty_like(tensor)
    if fake_groups.is_fake(ring.group):
        fake_groups.pretend_to_receive(arriving)
    operations = [
        dist.P2POp(dist.isend, tensor, group=ring.group, group_peer=(rank + 1) % size),
        dist.P2POp(dist.irecv, arriving, group=ring.group, group_peer=(rank - 1) % size),
    ]
    return _Transfer(arriving, tensor, dist.batch_isend_irecv(operations))


def _packed(key: Tensor, value: Tensor) -> Tensor:
    """Keys and values in one buffer, ``(2, batch, key heads, sequence, width)``: one message a step."""
    return torch.stack([key, value])


def _rows(tensor: Tensor) -> Tensor:
    """What the kernels ask for: the numbers of one row next to each other."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
