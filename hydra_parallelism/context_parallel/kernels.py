"""One block of attention on one device: forward with its log-sum-exp, backward from the log-sum-exp of the whole row.

A kernel never holds the scores of a block at once, so memory is linear in the sequence; only :class:`Plain`, for devices and
dtypes that no such kernel takes, is quadratic in the block. Queries are ``(batch, heads, queries, width)``, keys and values
``(batch, key heads, keys, width)`` with key heads dividing heads; causal blocks are square.

==========  ==========================  ===================================================
device      dtype                       kernel
==========  ==========================  ===================================================
CPU         float64, float32, 16 bits   :class:`FlashCPU`
CUDA        16 bits                     :class:`Flash` where torch can use it
CUDA        16 bits, float32            :class:`Efficient` where torch can use it
any         anything else               :class:`Plain`
==========  ==========================  ===================================================
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _compat

__all__ = ["Efficient", "Flash", "FlashCPU", "Kernel", "Plain", "choose"]


class Kernel(Protocol):
    """What a ring does with each block."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """Softmax over this block's keys only, and the log-sum-exp ``(batch, heads, queries)`` in at least float32."""

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What a block adds to the gradients of query, key and value; ``out`` and ``lse`` are those of whole rows."""


class FlashCPU:
    """Torch's flash attention for CPU, which takes fewer key heads as they are."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        return _compat.cpu_flash_forward(query, key, value, causal, scale)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _compat.cpu_flash_backward(grad, query, key, value, out, lse, causal, scale)


class Flash:
    """Torch's flash attention for CUDA, which takes fewer key heads as they are."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        return _compat.cuda_flash_forward(query, key, value, causal, scale)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _compat.cuda_flash_backward(grad, query, key, value, out, lse.contiguous(), causal, scale)


class Efficient:
    """Torch's memory-efficient attention for CUDA: as many key heads as heads, rows of the log-sum-exp in whole 32s."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        heads, length = query.size(1), query.size(2)
        out, lse = _compat.efficient_forward(query, _repeated(key, heads), _repeated(value, heads), causal, scale)
        return out, lse[:, :, :length]

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads, missing = query.size(1), -lse.size(2) % 32
        lse = F.pad(lse, (0, missing), value=torch.inf).contiguous()  # exp(score - inf) is the 0 that a row past the end is due
        repeated = _repeated(key, heads), _repeated(value, heads)
        grads = _compat.efficient_backward(grad, query, *repeated, out, lse, causal, scale)
        return grads[0], _summed(grads[1], key.size(1)), _summed(grads[2], key.size(1))


class Plain:
    """Matrix products. The formulas are those of FlashAttention (arXiv 2205.14135, appendix B), for one block."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        heads = query.size(1)
        scores = _scores(query, _repeated(key, heads), causal, scale)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.unsqueeze(-1)).exp()
        return (weights @ _repeated(value, heads).to(weights.dtype)).to(query.dtype), lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads, dtype = query.size(1), lse.dtype
        keys, values = _repeated(key, heads).to(dtype), _repeated(value, heads).to(dtype)
        grad, weights = grad.to(dtype), (_scores(query, keys, causal, scale) - lse.unsqueeze(-1)).exp()
        along = (grad * out).sum(-1, keepdim=True)
        of_scores = weights * (grad @ values.mT - along) * scale
        of_key = _summed(of_scores.mT @ query.to(dtype), key.size(1))
        of_value = _summed(weights.mT @ grad, key.size(1))
        return (of_scores @ keys).to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)


def choose(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Kernel:
    """The kernel for blocks like these. All ranks choose alike, as their blocks have one shape, and it would not matter."""
    kind, dtype = query.device.type, query.dtype
    if kind == "cpu" and dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        return FlashCPU()
    if kind == "cuda":
        gqa = key.size(1) != query.size(1)
        if _compat.can_use_cuda_flash(query, key, value, causal, gqa):
            return Flash()
        heads = query.size(1)
        if _compat.can_use_efficient(query, _repeated(key, heads), _repeated(value, heads), causal):
            return Efficient()
    return Plain()


def _scores(query: Tensor, key: Tensor, causal: bool, scale: float) -> Tensor:
    exact = torch.promote_types(query.dtype, torch.float32)
    scores = (query.to(exact) @ key.to(exact).mT) * scale
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    return scores


def _repeated(tensor: Tensor, heads: int) -> Tensor:
    """Each key head next to itself, once for each of its query heads."""
    batch, fewer, length, width = tensor.shape
    if fewer == heads:
        return tensor
    return tensor.unsqueeze(2).expand(-1, -1, heads // fewer, -1, -1).reshape(batch, heads, length, width)


def _summed(grad: Tensor, heads: int) -> Tensor:
    """The gradient of what :func:`_repeated` was given."""
    batch, more, length, width = grad.shape
    return grad if more == heads else grad.reshape(batch, heads, more // heads, length, width).sum(2)
