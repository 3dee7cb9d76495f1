"""What a pipeline refuses while it runs: a JSON line for each rank, name -> message, and that it trains on afterwards."""

import json

import _app
import tiny
import torch
from torch import Tensor, nn

from hydra_parallelism import ConfigurationError, parallel_context, parallelize
from hydra_parallelism.parallelize.pipeline import PipelinedModel
from hydra_parallelism.parallelize.steps import forward_backward


class Skips(nn.Module):
    """Every block reads the embedding again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(tiny.VOCAB, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(4))
        self.head = nn.Linear(4, tiny.VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        start = x = self.embed(tokens)
        for block in self.blocks:
            x = block(x + start)
        return self.head(x)


def main() -> None:
    """Collect the messages."""
    told: dict[str, str] = {}
    with parallel_context({"pp_size": 2, "pipeline": {"microbatches": 4}}) as context:
        model, data = parallelize(tiny.make("gpt")), tiny.batch(0, 6)
        assert isinstance(model, PipelinedModel)
        skips = parallelize(Skips())
        tied = tiny.make("gpt")
        tied.head.weight = tied.token_embedding.weight
        attempts = {
            "call": lambda: model(data.inputs),
            "batch": lambda: forward_backward(model, data.inputs, data.targets, tiny.cross_entropy),
            "evaluation": lambda: torch.no_grad()(model)(data.inputs),
            "flow": lambda: forward_backward(skips, data.inputs[:4], data.targets[:4], tiny.cross_entropy),
            "tied": lambda: parallelize(tied),
        }
        for name, attempt in attempts.items():
            try:
                attempt()
            except ConfigurationError as error:
                told[name] = str(error)
        loss = forward_backward(model, data.inputs[:4], data.targets[:4], tiny.cross_entropy)
        plain = forward_backward(tiny.make("gpt"), data.inputs[:4], data.targets[:4], tiny.cross_entropy)
        told["apart"] = f"{abs(loss - plain).item():.0e}"
        del model, skips, attempts, attempt
    _app.say(f"BODY {json.dumps({'rank': context.rank, **told})}")


if __name__ == "__main__":
    main()
