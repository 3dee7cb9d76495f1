"""Models small enough to train a few steps on a CPU in milliseconds, in the shapes that pipelines meet."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hydra_parallelism import MoE

VOCAB, DIM, SEQ = 32, 16, 6


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(dim, dim, bias=False))

    def forward(self, x: Tensor, rotation: Any = None) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        if rotation is not None:
            cos, sin = rotation
            q, k = (
                t * cos + torch.cat([-t[..., self.head_dim // 2 :], t[..., : self.head_dim // 2]], -1) * sin for t in (q, k)
            )
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.kind = "full"
        self.attention_norm, self.attention = nn.LayerNorm(dim), Attention(dim, heads)
        self.mlp_norm, self.mlp = nn.LayerNorm(dim), MLP(dim)

    def forward(self, x: Tensor, rotation: Any = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Two embeddings that are added, blocks, a norm, a head: ``examples/model.py`` in small."""

    def __init__(self, layers: int = 4, dim: int = DIM, heads: int = 2) -> None:
        super().__init__()
        self.token_embedding, self.position_embedding = nn.Embedding(VOCAB, dim), nn.Embedding(SEQ, dim)
        self.layers = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token_embedding(tokens) + self.position_embedding(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Mixture(GPT):
    """Experts in place of each MLP."""

    ep_plan = {"layers.*.mlp.experts": "ep_dispatch_experts"}  # noqa: RUF012

    def __init__(self, layers: int = 4, dim: int = DIM, heads: int = 2) -> None:
        super().__init__(layers, dim, heads)
        for layer in self.layers:
            layer.mlp = MoE(dim, dim, experts=4)
            layer.mlp.router.weight.data.mul_(4)  # away from ties, which rounding would break


class Rotary(nn.Module):
    """Works out cosines from positions, like Llama's: no parameters, one buffer."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.empty(dim // 2), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        steps = torch.arange(len(self.frequencies), device=self.frequencies.device)
        self.frequencies.copy_(1 / 100 ** (steps / len(self.frequencies)))

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = torch.outer(positions.float(), self.frequencies)
        both = torch.cat([angles, angles], -1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)


class Decoder(nn.Module):
    def __init__(self, layers: int, dim: int, heads: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.rotary = nn.LayerNorm(dim), Rotary(dim // heads)
        self.offset = nn.Parameter(torch.randn(dim) * 0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens) + self.offset
        rotation = self.rotary(x, torch.arange(tokens.shape[1], device=tokens.device))
        for n, layer in enumerate(self.layers):
            assert layer.kind == self.layers[n].kind == "full"
            x = layer(x, rotation=rotation)
        return self.norm(x)


class Llama(nn.Module):
    """A nested model with rotary positions, a bare parameter, keyword arguments and an output object."""

    def __init__(self, layers: int = 4, dim: int = DIM, heads: int = 2) -> None:
        super().__init__()
        self.head = nn.Linear(dim, VOCAB, bias=False)  # registered first, runs last: only the plan says so
        self.model = Decoder(layers, dim, heads)
        self.pp_plan = {
            "head": (["hidden"], ["logits"]),
            "model.embed_tokens": (["ids"], ["embeds"]),
            "model.layers": (["hidden", "mask"], ["hidden"]),
            "model.norm": (["hidden"], ["hidden"]),
        }

    def forward(self, *, tokens: Tensor, scale: float = 1.0) -> dict[str, Any]:
        return {"logits": self.head(self.model(tokens)) * scale, "loss": None}


class TwoStreams(nn.Module):
    """Blocks that pass on two tensors."""

    class Block(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(dim, dim), nn.Linear(dim, dim)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return x + torch.tanh(self.left(y)), y + torch.tanh(self.right(x))

    def __init__(self, layers: int = 4, dim: int = DIM) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(TwoStreams.Block(dim) for _ in range(layers))
        self.head = nn.Linear(dim, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        y = torch.zeros_like(x) + x.mean(1, keepdim=True)
        for block in self.blocks:
            x, y = block(x, y)
        return self.head(x + y)


def cross_entropy(output: Any, targets: Tensor) -> Tensor:
    logits = output["logits"] if isinstance(output, dict) else output
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make(name: str, **sizes: int) -> nn.Module:
    torch.manual_seed(1)
    return {"gpt": GPT, "llama": Llama, "two": TwoStreams, "moe": Mixture}[name](**sizes)


def batch(step: int, size: int) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(VOCAB, (size, SEQ + 1), generator=generator)
    return SimpleNamespace(inputs=tokens[:, :-1], targets=tokens[:, 1:])
