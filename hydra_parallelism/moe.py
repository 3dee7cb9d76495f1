"""A mixture of experts in plain torch, for models that have none: a router, and SwiGLU experts stacked in two tensors.

Nothing here computes with ranks. The experts are called as those of Transformers are, so that ``ep_plan`` can put them on
different ranks, and so that theirs may take the place of these.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import ConfigurationError

__all__ = ["MoE"]


class Router(nn.Module):
    """Scores every expert for every token and takes the best."""

    def __init__(self, dim: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.weight = nn.Parameter(torch.empty(experts, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights as ``nn.Linear`` does."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(T, dim) to logits (T, experts), and weights and numbers of the chosen experts, both (T, top_k).

        The softmax is in float32: rounded weights would favour some experts, and then train them more.
        """
        logits = F.linear(hidden, self.weight)
        weights, index = logits.softmax(-1, dtype=torch.float32).topk(self.top_k, dim=-1)
        return logits, weights / weights.sum(-1, keepdim=True), index


class Experts(nn.Module):
    """SwiGLU layers (Shazeer 2020, arXiv 2002.05202), each applied to the tokens that chose it."""

    def __init__(self, dim: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * hidden, dim))
        self.down_proj = nn.Parameter(torch.empty(experts, dim, hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights as each expert's ``nn.Linear`` would."""
        for weight in (self.gate_up_proj, self.down_proj):
            bound = 1 / math.sqrt(weight.shape[-1])
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Tokens (T, dim), and the numbers of their experts and their weights, both (T, k), to (T, dim)."""
        output = torch.zeros_like(hidden)
        for expert in torch.unique(index).tolist():
            token, place = torch.where(index == expert)
            gate, up = F.linear(hidden[token], self.gate_up_proj[expert]).chunk(2, -1)
            made = F.linear(F.silu(gate) * up, self.down_proj[expert])
            output = output.index_add(0, token, (made * weights[token, place, None]).to(output.dtype))
        return output


class MoE(nn.Module):
    """A feed-forward layer of which each token uses ``top_k`` of the experts, weighted by a softmax over those.

    (Shazeer et al. 2017, arXiv 1701.06538; the softmax after the choice as in Mixtral, arXiv 2401.04088.) No token is dropped.
    What the router says, for a loss that balances the experts, is seen by a forward hook on ``moe.router``.

    Args:
        dim: Width of the tokens.
        hidden: Width inside one expert.
        experts: Number of experts.
        top_k: Experts that one token uses.

    Raises:
        ConfigurationError: ``top_k`` is not from 1 to ``experts``.

    Example:
        >>> class Block(nn.Module):
        ...     def __init__(self):
        ...         self.moe = hydra_parallelism.MoE(64, 128, experts=8)
        >>> class Model(nn.Module):
        ...     ep_plan = {"layers.*.moe.experts": "ep_dispatch_experts"}  # parallelism.ep_plan=auto reads it
    """

    def __init__(self, dim: int, hidden: int, experts: int, top_k: int = 2) -> None:
        super().__init__()
        if not 1 <= top_k <= experts:
            raise ConfigurationError(f"MoE(top_k={top_k}, experts={experts}): a token uses at least one expert and at most all")
        self.router = Router(dim, experts, top_k)
        self.experts = Experts(dim, hidden, experts)

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) to (..., dim); each token alone."""
        tokens = x.flatten(0, -2)
        _, weights, index = self.router(tokens)
        output: Tensor = self.experts(tokens, index, weights)
        return output.view_as(x)
