"""What a pipeline refuses while it runs: name -> message, and that it trains on afterwards."""

from collections.abc import Callable
from typing import Any

import tiny
import torch
from torch import Tensor, nn

from hydra_parallelism import ConfigurationError, forward_backward, parallel_context, parallelize
from hydra_parallelism.parallelize.pipeline import PipelinedModel


class Skips(nn.Module):
    """Every block reads the embedding again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(tiny.VOCAB, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(8))
        self.head = nn.Linear(4, tiny.VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        start = x = self.embed(tokens)
        for block in self.blocks:
            x = block(x + start)
        return self.head(x)


class Remembers(tiny.GPT):
    """Returns what no one can put together out of micro-batches."""

    def forward(self, tokens: Tensor) -> Any:
        return {"logits": super().forward(tokens), "cache": object()}


def attempts() -> dict[str, str]:
    """Try what is refused, and then what is not."""
    model, skips, data = parallelize(tiny.make("gpt")), parallelize(Skips()), tiny.batch(0, 6)
    assert isinstance(model, PipelinedModel)
    tied = tiny.make("gpt")
    tied.head.weight = tied.token_embedding.weight
    few = data.inputs[:4], data.targets[:4], tiny.cross_entropy
    told = {
        "call": refusal(lambda: model(data.inputs)),
        "batch": refusal(lambda: forward_backward(model, data.inputs, data.targets, tiny.cross_entropy)),
        "evaluation": refusal(lambda: torch.no_grad()(model)(data.inputs)),
        "flow": refusal(lambda: forward_backward(skips, *few)),
        "cache": refusal(lambda: torch.no_grad()(parallelize(Remembers()))(data.inputs[:4])),
        "tied": refusal(lambda: parallelize(tied)),
    }
    apart = forward_backward(model, *few) - forward_backward(tiny.make("gpt"), *few)
    return {**told, "apart": f"{apart.abs().item():.0e}"}


def refusal(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except ConfigurationError as error:
        return str(error)
    return "not refused"


def report() -> dict[str, str]:
    """Collect the messages."""
    with parallel_context({"pp_size": 2, "pipeline": {"microbatches": 4}}):
        return attempts()
