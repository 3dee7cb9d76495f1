"""Train two steps and save, or load and train two more, under one layout after another; report how far off one process it is.

Jobs are ``[action, folder, config, options]``. ``config`` may be ``None``: rank 0 alone without a process group.
"""

import logging
import os
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import by_hand
import torch
from torch import nn

from hydra_parallelism import (
    ParallelContext,
    ParallelismError,
    average_loss,
    clip_grad_norm_,
    export,
    forward_backward,
    load,
    parallel_context,
    parallelize,
    save,
)

_STEPS, LIMIT = 4, 0.5


class Alone:
    """The job of one process without a context."""

    def __init__(self, seed: int = 0, **sizes: int) -> None:
        self.model: nn.Module = by_hand.make(seed, **sizes)
        self.optimizer = by_hand.adamw(self.model)

    def backward(self, step: int) -> torch.Tensor:
        tokens, targets = by_hand.batch(step)
        self.optimizer.zero_grad()
        loss = by_hand.loss_of(self.model(tokens), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), LIMIT)
        return loss.detach()


class Together:
    """The job of a rank under a context."""

    def __init__(self, context: ParallelContext, seed: int = 0, **sizes: int) -> None:
        self.context = context
        self.model = parallelize(by_hand.make(seed, **sizes), context)
        self.optimizer = by_hand.adamw(self.model)

    def backward(self, step: int) -> torch.Tensor:
        tokens, targets = (part.chunk(self.context.dp_world_size)[self.context.dp_rank] for part in by_hand.batch(step))
        self.optimizer.zero_grad()
        loss = forward_backward(self.model, tokens, targets, by_hand.loss_of)
        clip_grad_norm_(self.model, LIMIT)
        return loss

    def evaluate(self) -> None:
        """Leaves gathered what the policy does not free after a forward, the root's parameters at least."""
        with torch.no_grad():
            self.model(by_hand.batch(0)[0])


class ByHand(by_hand.Job):
    """Plain tensors on every rank, which ``parallelize`` makes none of."""

    def backward(self, step: int) -> torch.Tensor:
        loss = super().backward(step)
        clip_grad_norm_(self.model, LIMIT)
        return loss


def job_of(context: ParallelContext | None, seed: int, options: dict[str, Any]) -> Any:
    """A model and its optimizer."""
    if context is None:
        return Alone(seed, **options)
    return ByHand(context, seed=seed, **options) if "shard" in options else Together(context, seed, **options)


def sizes_of(experts: int) -> dict[str, int]:
    """Options of a model with so many experts, or of one without."""
    return {"experts": experts} if experts else {}


@cache
def uninterrupted(experts: int = 0) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Losses of four steps of one process, the weights after them, and those after two."""
    job, losses, middle = Alone(**sizes_of(experts)), [], {}
    for step in range(_STEPS):
        losses.append(job.backward(step).item())
        job.optimizer.step()
        if step == 1:
            middle = {name: value.clone() for name, value in job.model.state_dict().items()}
    return losses, job.model.state_dict(), middle


def train(job: Any, steps: range, context: Any) -> list[float]:
    """Losses of some steps."""
    losses = []
    for step in steps:
        loss = job.backward(step)
        losses.append(average_loss(loss, context=context).item() if context else loss.item())
        job.optimizer.step()
    return losses


def off(model: nn.Module, weights: dict[str, torch.Tensor]) -> float:
    """Largest difference of a weight."""
    return max((by_hand.full(value) - weights[name]).abs().max().item() for name, value in model.state_dict().items())


def work(action: str, folder: str, context: Any, options: dict[str, Any]) -> dict[str, Any]:
    """One job."""
    experts = options.get("experts", 0)
    losses, last, middle = uninterrupted(experts)
    seed = 0 if action.startswith("save") else 7
    job = job_of(context, seed, options)
    if action == "save untouched":
        save(folder, job.model, job.optimizer, extra={"step": 0})
        return {"loss_off": max(abs(a - b) for a, b in zip(train(job, range(_STEPS), context), losses))}
    if action == "save":
        train(job, range(2), context)
        for group in job.optimizer.param_groups:
            group["lr"] = 2e-2  # as a scheduler would: it must come back, and go again
        if isinstance(job, Together):
            job.evaluate()
        save(folder, job.model, job.optimizer, extra={"step": 2, "who": context and context.rank})
        if isinstance(job, Together):
            job.evaluate()
        export(f"{folder}.pt", job.model)
        for group in job.optimizer.param_groups:
            group["lr"] = 1e-2
        saved = {"loss_off": max(abs(a - b) for a, b in zip(train(job, range(2, _STEPS), context), losses[2:]))}
        whole = torch.load(f"{folder}.pt", weights_only=True)
        by_hand.make(5, **sizes_of(experts)).load_state_dict(whole)
        return saved | {"export_off": max((whole[name] - middle[name]).abs().max().item() for name in middle | whole)}
    if action == "refused":
        try:
            load(folder, job.model, job.optimizer)
        except ParallelismError as error:
            return {"text": str(error), "kind": type(error).__name__, "kept": not job.optimizer.state}
    if isinstance(job, Together):
        job.evaluate()
    extra = load(folder, job.model, job.optimizer)
    rates = {group["lr"] for group in job.optimizer.param_groups}
    for group in job.optimizer.param_groups:
        group["lr"] = 1e-2
    after = train(job, range(extra["step"], _STEPS), context)
    return {
        "extra": extra,
        "rates": sorted(rates),
        "loss_off": max(abs(a - b) for a, b in zip(after, losses[extra["step"] :])),
        "weights_off": off(job.model, last),
    }


def report(jobs: list[Any]) -> list[dict[str, Any]]:
    """Do the jobs, one after the other."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda entry: lines.append(entry.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hydra_parallelism.checkpoint").addHandler(handler)
    logging.getLogger("hydra_parallelism.checkpoint").setLevel(logging.INFO)
    found: list[dict[str, Any]] = []
    for action, folder, config, options in jobs:
        lines.clear()
        if config is None and int(os.environ.get("RANK", "0")):
            found.append({})
            continue
        with nullcontext() if config is None else parallel_context(config) as context:
            result = work(action, folder, context, options)
        found.append(result | {"log": [line.replace(f"{Path.cwd()}/", "") for line in lines]})
    return found
