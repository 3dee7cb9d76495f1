"""The GPT of ``model.py`` with experts in place of each MLP: what ``moe.py`` trains."""

from torch import nn

from hydra_parallelism import MoE
from model import GPT

__all__ = ["MixtureGPT"]


class MixtureGPT(GPT):
    """Tokens in, logits of each next token out.

    Args:
        vocab: Number of different tokens.
        experts: Experts of one block.
        top_k: Experts that one token uses.
        hidden: Width inside one expert.
        sizes: The other sizes of a :class:`~model.GPT`.
    """

    ep_plan = {"layers.*.mlp.experts": "ep_dispatch_experts"}  # noqa: RUF012 - read, never changed
    """What ``parallelism.ep_plan=auto`` reads."""

    def __init__(self, vocab: int, *, experts: int, top_k: int, dim: int, hidden: int, **sizes: int) -> None:
        super().__init__(vocab, dim=dim, hidden=hidden, **sizes)
        for layer in self.layers:
            layer.mlp = MoE(dim, hidden, experts, top_k)
            nn.init.normal_(layer.mlp.router.weight, std=0.02)
