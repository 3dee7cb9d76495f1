"""Models to be split, beside the example's GPT: a Llama in miniature, called with keyword arguments as Transformers does."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from mixture import MixtureGPT
from model import GPT

SEQUENCE = 12


class RMSNorm(nn.Module):
    """Written out, because models bring their own."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Attention(nn.Module):
    """Grouped queries, rotary positions, a norm on the heads of queries and keys."""

    def __init__(self, dim: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = heads, kv_heads, dim // heads
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, kv_heads * self.head_dim, bias=True)
        self.v_proj = nn.Linear(dim, kv_heads * self.head_dim, bias=True)
        self.o_proj = nn.Linear(dim, dim, bias=True)
        self.q_norm, self.k_norm = RMSNorm(self.head_dim), RMSNorm(self.head_dim)

    def forward(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(rotate(q, positions), rotate(k, positions), v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """Gate, up, down."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class PackedSwiGLU(nn.Module):
    """Gate and up in one matrix, and both used again by a projection over the two side by side."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(dim, 2 * hidden)
        self.down_proj = nn.Linear(2 * hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(torch.cat([F.silu(gate) * up, gate + up], -1))


class LlamaBlock(nn.Module):
    """Pre-norm, with a scale of its own on the residual: a parameter that no leaf module holds."""

    def __init__(self, dim: int, heads: int, kv_heads: int, hidden: int, packed: bool) -> None:
        super().__init__()
        self.input_norm, self.post_norm = RMSNorm(dim), RMSNorm(dim)
        self.self_attn = Attention(dim, heads, kv_heads)
        self.mlp = (PackedSwiGLU if packed else SwiGLU)(dim, hidden)
        self.scale = nn.Parameter(torch.full((dim,), 0.9))

    def forward(self, hidden_states: Tensor, positions: Tensor) -> Tensor:
        x = hidden_states
        x = x + self.scale * self.self_attn(hidden_states=self.input_norm(x), positions=positions)
        return x + self.mlp(self.post_norm(x))


class Llama(nn.Module):
    """Tokens to logits; the head is the embedding."""

    tp_plan = {  # noqa: RUF012
        "embed": "embedding_rowwise",
        "layers.*.self_attn.[qkv]_proj": "colwise",
        "layers.*.self_attn.[qk]_norm": "replicated_with_grad_allreduce",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.gate_up_proj": "packed_colwise",
        "layers.*.mlp.down_proj": "rowwise",
        "head": "colwise_rep",
    }

    def __init__(
        self, vocab: int, dim: int, num_layers: int, heads: int, kv_heads: int, hidden: int, *, packed: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(LlamaBlock(dim, heads, kv_heads, hidden, packed) for _ in range(num_layers))
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.05)
        if packed:
            self.tp_plan = {**self.tp_plan, "layers.*.mlp.down_proj": "packed_rowwise"}

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(hidden_states=x, positions=positions)
        return self.head(self.norm(x))


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of (batch, heads, sequence, head width)."""
    half = x.shape[-1] // 2
    frequencies = 1.0 / 100.0 ** (torch.arange(half, device=x.device) / half)
    angles = positions[..., None] * frequencies
    one, two = x[..., :half], x[..., half:]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


def mixture(vocab: int, experts: int = 8) -> MixtureGPT:
    """The example's. The router is scaled up: near a tie, rounding would choose another expert than one process does."""
    model = MixtureGPT(vocab, dim=32, num_layers=2, heads=4, hidden=24, seq_len=SEQUENCE, experts=experts, top_k=2)
    for layer in model.layers:
        layer.mlp.router.weight.data.mul_(20)
    return model


def share(model: MixtureGPT) -> nn.Module:
    """A layer that every token uses beside the experts, as DeepSeek's and Qwen's have it."""
    for layer in model.layers:
        layer.mlp = Shared(layer.mlp)
    shared = {f"layers.*.mlp.shared.{name}_proj": "rowwise" if name == "down" else "colwise" for name in ("gate", "up", "down")}
    model.tp_plan = {**model.tp_plan, **shared}
    return model


class Shared(nn.Module):
    """Experts that are chosen, and one that always is."""

    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.router, self.experts, self.shared = moe.router, moe.experts, SwiGLU(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        _, weights, index = self.router(tokens)
        return self.experts(tokens, index, weights).view_as(x) + self.shared(x)


def skew(model: MixtureGPT) -> nn.Module:
    """All tokens to expert 0 in the first block, and all to experts 0 and 3 in the second."""
    for layer, chosen in zip(model.layers, ([0], [0, 3]), strict=True):
        router = layer.mlp.router
        router.top_k = len(chosen)
        layer.mlp_norm.bias.data.fill_(3.0)
        router.weight.data.mul_(0.01)
        router.weight.data[chosen] += 0.2
    return model


VOCAB = {
    "moe": 60,
    "skewed": 60,
    "few": 60,
    "shared": 60,
    "gpt": 60,
    "odd": 30,
    "llama": 60,
    "packed": 48,
    "gpt_long": 60,
    "llama_long": 60,
}
"""Model -> size of its vocabulary."""

LONG = 24
"""Tokens of a sequence that is cut into up to 8 pieces, and those into slices."""


def length(name: str) -> int:
    """Tokens of the sequences that a model is trained on."""
    return LONG if name.endswith("_long") else SEQUENCE


def make(name: str) -> nn.Module:
    """A model by name. ``gpt`` and ``llama`` divide by 2, 3 and 4; ``odd`` by 2 alone, and its halves by nothing.

    The head of ``odd`` has a bias, which makes its output a view.
    """
    vocab = VOCAB[name]
    if name.startswith("gpt"):
        return GPT(vocab, dim=48, num_layers=2, heads=12, hidden=96, seq_len=length(name))
    if name == "odd":
        model = GPT(vocab, dim=20, num_layers=3, heads=2, hidden=30, seq_len=SEQUENCE + 1)
        model.head = nn.Linear(20, vocab)
        return model
    if name in ("moe", "few"):
        return mixture(vocab, 8 if name == "moe" else 4)
    if name == "shared":
        return share(mixture(vocab))
    if name == "skewed":
        return skew(mixture(vocab))
    if name.startswith("llama"):
        return Llama(vocab, dim=96, num_layers=2, heads=24, kv_heads=12, hidden=60)
    return Llama(vocab, dim=32, num_layers=2, heads=8, kv_heads=4, hidden=40, packed=True)
