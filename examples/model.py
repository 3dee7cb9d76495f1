"""A small GPT in plain torch: what the training example trains.

Nothing here computes with ranks. Four choices leave room for those who split the model: the query, key and value projections
are separate ``Linear`` layers; attention takes its number of heads from the width that the projections produce, so a rank
that holds half of ``q_proj`` computes half of the heads; ``tp_plan`` says which modules may be split how; and positions may be
given, since a rank that holds a piece of the sequence cannot count them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GPT", "Block"]

_INIT_STD = 0.02


class Attention(nn.Module):
    """Causal self-attention over however many heads the local projections produce."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"model.dim={dim} does not divide into model.heads={heads} heads")
        self.heads, self.head_dim = heads, dim // heads
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim, bias=False)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Mix each position with those before it; ``x`` is (batch, sequence, dim)."""
        q, k, v = (self._split_heads(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _split_heads(self, x: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        # -1, not the configured number of heads: see the module docstring.
        return x.view(batch, sequence, -1, self.head_dim).transpose(1, 2)


class MLP(nn.Module):
    """Widen, bend, narrow."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Each position on its own."""
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """One pre-norm transformer layer: the unit that FSDP gathers and frees."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = MLP(dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Add attention, then the MLP, to the residual stream."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Tokens in, logits of each next token out.

    Args:
        vocab: Number of different tokens; 256 when tokens are bytes.
        dim: Width of the residual stream.
        num_layers: Number of blocks.
        heads: Attention heads of one block; must divide ``dim``.
        hidden: Width inside the MLP.
        seq_len: Longest sequence, in tokens.
    """

    tp_plan = {  # noqa: RUF012 - read, never changed
        "token_embedding": "embedding_rowwise",
        "layers.*.attention.[qkv]_proj": "colwise",
        "layers.*.attention.o_proj": "rowwise",
        "layers.*.mlp.up": "colwise",
        "layers.*.mlp.down": "rowwise",
        "head": "colwise_gather_output",
    }
    """What ``parallelism.tp_plan=auto`` reads: module name pattern -> style."""

    def __init__(self, vocab: int, dim: int, num_layers: int, heads: int, hidden: int, seq_len: int) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocab, dim)
        self.position_embedding = nn.Embedding(seq_len, dim)
        self.layers = nn.ModuleList(Block(dim, heads, hidden) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.apply(_init_weights)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """(batch, sequence) of token numbers to (batch, sequence, vocab) of logits.

        ``positions`` is (1, sequence): where in the sequence the tokens stand, for a rank that has a piece of it.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def _init_weights(module: nn.Module) -> None:
    # Small weights make the first guess uniform over the vocabulary: the loss starts at log(vocab).
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=_INIT_STD)
