"""Transformers' own models, tiny and random, trained under many layouts of 4 processes.

Like parity.py, with what a fine-tuning script calls: ``forward_backward`` and ``clip_grad_norm_``. The reference is plain torch
and Transformers in every process.
"""

from functools import cache, partial
from itertools import groupby
from typing import Any

import steps
import torch
import torch.distributed as dist
import torch.nn.functional as F
from layouts import LLAMAS, llama_runs
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from hydra_parallelism import (
    ConfigurationError,
    ParallelContext,
    average_loss,
    clip_grad_norm_,
    forward_backward,
    parallel_context,
    parallelize,
    shard_sequence,
)

for _config in LLAMAS.values():  # Transformers imports a model's module when it is first made
    AutoModelForCausalLM._model_mapping[type(AutoConfig.for_model(**_config))]

STEPS, BATCH, LENGTH, CLIP = 3, 8, 12, 0.5
Numbers = tuple[list[float], list[float], dict[str, Tensor]]


def make(kind: str) -> nn.Module:
    """The same weights each time."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 32, "use_cache": False}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMAS[kind], **sizes, **heads), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.data.mul_(50)  # a router near ties would choose other experts when rounding is different
    return model


def batch(step: int, padded: bool) -> tuple[dict[str, Tensor], Tensor]:
    """The global batch: some of its sequences begin with padding, unless they will be cut into pieces."""
    tokens = torch.randint(64, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    if padded:
        mask[1, :3] = mask[6, :2] = 0
    return {"input_ids": tokens[:, :-1], "attention_mask": mask}, tokens[:, 1:]


def optimizer_of(kind: str, parameters: Any) -> torch.optim.Optimizer:
    """As in parity.py."""
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=3e-3, eps=1e-4)


def loss_of(output: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a parameter. Collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


@cache
def reference(kind: str, optimizer_kind: str, padded: bool) -> Numbers:
    """One process."""
    model, losses, norms = make(kind), [], []
    optimizer = optimizer_of(optimizer_kind, model.parameters())
    for step in range(STEPS):
        inputs, targets = batch(step, padded)
        optimizer.zero_grad()
        loss = loss_of(model(**inputs), targets)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, dict(model.named_parameters())


def train(kind: str, optimizer_kind: str, context: ParallelContext) -> Numbers:
    """Under the context's layout."""
    model, losses, norms = parallelize(make(kind)), [], []
    as_users, shares = context.topology.tp > 1 and context.topology.fsdp > 1, context.dp_world_size
    optimizer = steps.optimizer(partial(optimizer_of, optimizer_kind), model.parameters(), as_users)
    for step in range(STEPS):
        inputs, targets = batch(step, padded=context.topology.cp == 1)
        mine = [tensor.chunk(shares)[context.dp_rank] for tensor in (*inputs.values(), targets)]
        tokens, mask, targets = shard_sequence(*mine)
        optimizer.zero_grad()
        loss = forward_backward(model, {"input_ids": tokens, "attention_mask": mask}, targets, loss_of)
        norms.append(clip_grad_norm_(model, CLIP).item())
        optimizer.step()
        losses.append(average_loss(loss).item())
    return losses, norms, {name: whole(parameter) for name, parameter in model.named_parameters()}


def compare(found: Numbers, wanted: Numbers, context: ParallelContext) -> dict[str, Any]:
    """Largest deviations on any rank, and whether the stages together hold each parameter once. Collective."""
    apart = torch.tensor(
        [
            max(abs(a - b) for a, b in zip(found[0], wanted[0], strict=True)),
            max(abs(a - b) / b for a, b in zip(found[1], wanted[1], strict=True)),
            max((value - wanted[2][name]).abs().max().item() for name, value in found[2].items()),
        ],
        dtype=torch.float64,
    )
    dist.all_reduce(apart, op=dist.ReduceOp.MAX)
    held: list[Any] = [None] * context.topology.pp
    dist.all_gather_object(held, sorted(found[2]), group=context.mesh["pp"].get_group())
    loss, norm, weights = apart.tolist()
    together = sorted(name for names in held for name in names)
    return {
        "loss": loss,
        "norm": norm,
        "weights": weights,
        "clipped": min(wanted[1]) > CLIP,
        "all": together == sorted(wanted[2]),
    }


def report(only: str = "") -> list[dict[str, Any]]:
    """Every model under every layout, or the layouts whose names contain a word. Collective."""
    found = []
    chosen = (run for run in llama_runs() if only in run[0])
    for config, runs in groupby(chosen, key=lambda run: run[1]):
        with parallel_context({**config, "runtime": {"timeout_s": 240}}) as context:
            for layout, _, kind, optimizer in runs:
                try:
                    result = compare(
                        train(kind, optimizer, context), reference(kind, optimizer, context.topology.cp == 1), context
                    )
                except ConfigurationError as error:  # the same on every rank
                    result = {"refused": str(error)}
                found.append({"case": [layout, kind, optimizer], **result})
    return found
