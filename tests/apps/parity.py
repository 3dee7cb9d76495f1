"""Train under many layouts in one start of processes, each compared with one process that trains on the same global batch.

The reference is computed in every process, without the library. Rank 0 reports one JSON line per case: how far losses, gradient
norms and final weights are from the reference, or the error.
"""

import json
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import groupby
from typing import Any

import _app
import models
import torch
import torch.distributed as dist
import torch.nn.functional as F
from layouts import Case, cases
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from hydra_parallelism import ParallelContext, parallel_context, parallelize

STEPS, BATCH = 3, 24


@dataclass
class Numbers:
    """What three steps came to."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def batch(model: str, step: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step: (batch, sequence) of tokens, and of the tokens to predict."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, models.VOCAB[model], (BATCH, models.SEQUENCE + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """SGD, or AdamW with an epsilon above rounding errors: an entry whose gradient is rounding error alone would otherwise be
    stepped by the whole learning rate, in a direction that differs from layout to layout."""
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)


def train(
    model: nn.Module,
    case: Case,
    rank: int,
    shares: int,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    mean: Callable[[Tensor], float],
) -> Numbers:
    """Three steps on this rank's share of each global batch."""
    optimizer, numbers = optimizer_of(case.optimizer, model), Numbers()
    share = BATCH // shares
    for step in range(STEPS):
        inputs, targets = (part[rank * share : (rank + 1) * share] for part in batch(case.model, step))
        optimizer.zero_grad()
        numbers.losses.append(mean(loss_of(model(inputs), targets)))
        squares = [whole(parameter.grad).double().square().sum() for parameter in model.parameters()]
        numbers.norms.append(torch.stack(squares).sum().sqrt().item())
        optimizer.step()
    numbers.weights = {name: whole(value).clone() for name, value in model.state_dict().items()}
    return numbers


def whole(tensor: Any) -> Tensor:
    """The full tensor of a parameter, gradient or buffer. Collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def plain_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy, and its gradients."""
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    return loss.detach()


def vocabulary_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The same on logits that are split over the vocabulary."""
    with loss_parallel():
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
    return whole(loss)


@cache
def reference(model: str, optimizer: str) -> Numbers:
    """One process."""
    torch.manual_seed(0)
    return train(models.make(model), Case("reference", {}, model, optimizer), 0, 1, plain_loss, Tensor.item)


def run(case: Case, context: ParallelContext) -> dict[str, Any]:
    """Train under a layout and compare. Collective."""
    model = split(case, context)
    group, shares = context.mesh["dp"].get_group(), context.dp_world_size

    def mean(loss: Tensor) -> float:
        total = loss.clone()
        dist.all_reduce(total, group=group)
        return total.item() / shares

    loss_of = vocabulary_loss if case.trick == "vocabulary" else plain_loss
    found = train(model, case, context.dp_rank, shares, loss_of, mean)
    return compare(found, reference(case.model, case.optimizer))


def split(case: Case, context: ParallelContext) -> nn.Module:
    """The model of a case under its layout."""
    torch.manual_seed(context.rank if case.trick == "seeds" else 0)
    if case.trick == "unreduced":
        return models.make(case.model)
    if case.trick == "meta":
        weights = models.make(case.model).state_dict() if context.rank == 0 else {}
        with torch.device("meta"):
            model = models.make(case.model)
        return parallelize(model, state_dict=weights)
    return parallelize(models.make(case.model))


def compare(found: Numbers, wanted: Numbers) -> dict[str, Any]:
    """Largest deviations; weights by name, so that a name that differs is an error."""
    assert found.weights.keys() == wanted.weights.keys(), found.weights.keys() ^ wanted.weights.keys()
    apart = {name: (value - wanted.weights[name]).abs().max().item() for name, value in found.weights.items()}
    worst = max(apart, key=apart.__getitem__)
    return {
        "loss": max(abs(a - b) for a, b in zip(found.losses, wanted.losses, strict=True)),
        "norm": max(abs(a - b) / b for a, b in zip(found.norms, wanted.norms, strict=True)),
        "weights": apart[worst],
        "worst": worst,
    }


def main() -> None:
    """Run the cases of this world size, or those whose names contain the first argument; one context for each layout."""
    wanted, rank, size = "".join(sys.argv[1:2]), int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    for config, group in groupby((case for case in cases(size) if wanted in case.name), key=lambda case: case.config):
        with parallel_context({**config, "runtime": {"timeout_s": 60}}) as context:
            for case in group:
                try:
                    result = run(case, context)
                except Exception as error:  # told as the result of this case; the others go on
                    result = {"error": f"{type(error).__name__}: {error}"}
                if rank == 0:
                    _app.say(f"BODY {json.dumps({'case': asdict(case), **result})}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    main()
