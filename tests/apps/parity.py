"""Train under many layouts in one start of processes, each compared with one process that trains on the same global batch.

The reference is computed in every process, without the library. Reported is how far losses, gradient
norms and final weights are from it, or the error.
"""

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from itertools import groupby
from typing import Any

import models
import steps
import torch
import torch.distributed as dist
import torch.nn.functional as F
from layouts import AS_USERS, Case, cases
from steps import local
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from hydra_parallelism import (
    ParallelContext,
    average_loss,
    clip_grad_norm_,
    forward_backward,
    parallel_context,
    parallelize,
    shard_sequence,
)

STEPS, BATCH, LIMIT = 3, 24, 0.5
StepFunction = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass
class Numbers:
    """What three steps came to."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def batch(model: str, step: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step: (batch, sequence) of tokens, and of the tokens to predict."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, models.VOCAB[model], (BATCH, models.length(model) + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def optimizer_of(kind: str, parameters: Any) -> torch.optim.Optimizer:
    """SGD, or AdamW with an epsilon above rounding errors: an entry whose gradient is rounding error alone would otherwise be
    stepped by the whole learning rate, in a direction that differs from layout to layout.

    Fused, because torch works out a placement for each kind of call on each shape of DTensor: that takes longer than the steps.
    """
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.3)
    return torch.optim.AdamW(parameters, lr=3e-3, eps=1e-4, fused=True)


def train(model: nn.Module, case: Case, kind: str, shares: int, rank: int, step_of: StepFunction) -> Numbers:
    """Three steps on this rank's share of each global batch."""
    as_users = step_of is plain_step or dist.get_world_size() <= 2 or case.name in AS_USERS
    optimizer, numbers = steps.optimizer(partial(optimizer_of, kind), model.parameters(), as_users), Numbers()
    share = BATCH // shares
    for step in range(STEPS):
        inputs, targets = (part[rank * share : (rank + 1) * share] for part in batch(case.model, step))
        optimizer.zero_grad()
        loss, norm = step_of(model, inputs, targets)
        numbers.losses.append(loss.item())
        numbers.norms.append(norm.item())
        optimizer.step()
    numbers.weights = {name: whole(value).clone() for name, value in model.state_dict().items()}
    return numbers


def whole(tensor: Any) -> Tensor:
    """The full tensor of a parameter or buffer. Collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def plain_step(model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and gradient norm of one process, by torch alone."""
    loss = loss_of(model(inputs), targets)
    loss.backward()
    return loss.detach(), nn.utils.clip_grad_norm_(model.parameters(), LIMIT)


def parallel_step(model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The same under a layout, by the library: on this rank's piece of the sequences, which may be all of them."""
    inputs, targets, positions = shard_sequence(inputs, targets, torch.arange(inputs.shape[1])[None])
    loss = forward_backward(model, (inputs, positions), targets, loss_of)
    return average_loss(loss), clip_grad_norm_(model, LIMIT)


def vocabulary_step(model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The same on logits that are split over the vocabulary."""
    with loss_parallel():
        loss = forward_backward(model, inputs, targets, loss_of)
    return average_loss(loss), clip_grad_norm_(model, LIMIT)


@cache
def reference(model: str, kind: str) -> Numbers:
    """One process."""
    torch.manual_seed(0)
    return train(models.make(model), Case("reference", {}, model), kind, 1, 0, plain_step)


def run(case: Case, context: ParallelContext) -> dict[str, float | str]:
    """Train under a layout and compare. Collective."""
    model = split(case, context)
    step_of = vocabulary_step if case.trick == "vocabulary" else parallel_step
    first = [local(parameter).clone() for parameter in model.parameters()]
    worst: dict[str, float | str] = {}
    for kind in case.optimizers:
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), first, strict=True):
                local(parameter).copy_(value)
        found = train(model, case, kind, context.dp_world_size, context.dp_rank, step_of)
        apart = compare(found, reference(case.model, kind), context.topology.pp)
        worst |= {f"{kind} {name}": value for name, value in apart.items()}
    return worst


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
    model = parallelize(models.make(case.model))
    if case.trick == "summed":
        for module in model.modules():
            if isinstance(module, FSDPModule) and hasattr(module, "gate_up_proj"):
                module.set_gradient_divide_factor(1.0)
    return model


def compare(found: Numbers, wanted: Numbers, stages: int) -> dict[str, Any]:
    """Largest deviations; weights by name, so that a name that differs is an error. Collective if there are stages."""
    assert found.weights.keys() <= wanted.weights.keys(), found.weights.keys() - wanted.weights.keys()
    assert stages > 1 or found.weights.keys() == wanted.weights.keys(), wanted.weights.keys() - found.weights.keys()
    apart = {name: (value - wanted.weights[name]).abs().max().item() for name, value in found.weights.items()}
    if stages > 1:  # each rank has those of its own
        held: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(held, apart)
        apart = {name: max(part.get(name, 0.0) for part in held) for name in {name for part in held for name in part}}
        assert apart.keys() == wanted.weights.keys(), wanted.weights.keys() - apart.keys()
    worst = max(apart, key=apart.__getitem__)
    return {
        "loss": max(abs(a - b) for a, b in zip(found.losses, wanted.losses, strict=True)),
        "norm": max(abs(a - b) / b for a, b in zip(found.norms, wanted.norms, strict=True)),
        "weights": apart[worst],
        "worst": worst,
    }


def report(size: int, wanted: str = "") -> list[dict[str, Any]]:
    """Run the cases of a world size, or those whose names contain a word; one context for each layout."""
    found = []
    for config, group in groupby((case for case in cases(size) if wanted in case.name), key=lambda case: case.config):
        with parallel_context({**config, "runtime": {"timeout_s": 240}}) as context:
            for case in group:
                try:
                    with warnings.catch_warnings():
                        warnings.filterwarnings("error", message=".*returned a view tensor")  # FSDP: its hook may be lost
                        result: dict[str, Any] = run(case, context)
                except Exception as error:  # told as the result of this case; the others go on
                    result = {"error": f"{type(error).__name__}: {error}"}
                found.append({"case": asdict(case), **result})
    return found
