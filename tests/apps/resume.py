"""Train two steps and save, or load and train two more, under each layout given as JSON; report how far off one process it is.

Jobs are ``[action, folder, config, options]``. ``config`` may be ``null``: one process without a process group.
"""

import json
import logging
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import by_hand
import torch
from torch import nn

from hydra_parallelism import ParallelismError, average_loss, export, load, parallel_context, save

_STEPS = 4


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
        return loss.detach()


def uninterrupted() -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Losses of four steps of one process, the weights after them, and those after two."""
    job, losses, middle = Alone(), [], {}
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
    losses, last, middle = REFERENCE
    seed = 0 if action.startswith("save") else 7
    job = by_hand.Job(context, seed=seed, **options) if context else Alone(seed, **options)
    if action == "save untouched":
        save(folder, job.model, job.optimizer, extra={"step": 0})
        return {"loss_off": max(abs(a - b) for a, b in zip(train(job, range(_STEPS), context), losses))}
    if action == "save":
        train(job, range(2), context)
        for group in job.optimizer.param_groups:
            group["lr"] = 2e-2  # as a scheduler would: it must come back, and go again
        save(folder, job.model, job.optimizer, extra={"step": 2, "who": context and context.rank})
        export(f"{folder}.pt", job.model)
        for group in job.optimizer.param_groups:
            group["lr"] = 1e-2
        saved = {"loss_off": max(abs(a - b) for a, b in zip(train(job, range(2, _STEPS), context), losses[2:]))}
        whole = torch.load(f"{folder}.pt", weights_only=True)
        by_hand.make(5).load_state_dict(whole)
        return saved | {"export_off": max((whole[name] - middle[name]).abs().max().item() for name in middle | whole)}
    if action == "refused":
        try:
            load(folder, job.model, job.optimizer)
        except ParallelismError as error:
            return {"text": str(error), "kind": type(error).__name__, "kept": not job.optimizer.state}
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


def main() -> None:
    """Do the jobs, one after the other."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda entry: lines.append(entry.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hydra_parallelism.checkpoint").addHandler(handler)
    logging.getLogger("hydra_parallelism.checkpoint").setLevel(logging.INFO)
    report = []
    for action, folder, config, options in json.loads(sys.argv[1]):
        lines.clear()
        with nullcontext() if config is None else parallel_context(config) as context:
            report.append(
                work(action, folder, context, options) | {"log": [line.replace(f"{Path.cwd()}/", "") for line in lines]}
            )
    by_hand.tell(report)


REFERENCE = uninterrupted()

if __name__ == "__main__":
    main()
