"""Train under one layout after another, in one start of the processes, and compare each with one process."""

import os
import traceback
from functools import partial
from typing import Any

import _app
import steps
import tiny
import torch
import torch.distributed as dist
from pipelines import AS_USERS
from steps import local
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hydra_parallelism import accumulate, average_loss, clip_grad_norm_, forward_backward, parallel_context, parallelize

STEPS, LIMIT = 3, 0.5
PLAN = {
    "layers.*.attention.[qkv]_proj": "colwise", "layers.*.attention.o_proj": "rowwise",
    "layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise",
}  # fmt: skip


def optimizer_of(name: str, parameters: Any) -> torch.optim.Optimizer:
    return (
        torch.optim.SGD(parameters, lr=0.1) if name == "sgd" else torch.optim.AdamW(parameters, lr=1e-2, eps=1e-5, fused=True)
    )


def full(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def inputs_of(case: dict[str, Any], tokens: Tensor) -> Any:
    return {"tokens": tokens, "scale": 0.5} if case["model"] == "llama" else tokens


def calls_of(case: dict[str, Any], step: int) -> list[tuple[Tensor, Tensor]]:
    """The global batches whose gradients make one step; of different lengths if the case is ragged."""
    data, count = tiny.batch(step, case["batch"]), case.get("accumulate", 1)
    pairs = zip(data.inputs.chunk(count), data.targets.chunk(count), strict=True)
    lengths = [tiny.SEQ - 2 * n if case.get("ragged") else tiny.SEQ for n in range(count)]
    return [(x[:, :length], y[:, :length]) for (x, y), length in zip(pairs, lengths, strict=True)]


def reference(case: dict[str, Any], kind: str) -> tuple[list[float], list[float], dict[str, Tensor], Any]:
    """One process, plain torch."""
    model = tiny.make(case["model"], **case.get("sizes", {}))
    optimizer = optimizer_of(kind, model.parameters())
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        calls = calls_of(case, step)
        loss = sum(tiny.cross_entropy(call(model, case, x), y) for x, y in calls) / len(calls)
        loss.backward()
        losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), LIMIT).item())
        optimizer.step()
    with torch.no_grad():
        output = call(model, case, tiny.batch(0, case["batch"]).inputs)
    return losses, norms, dict(model.state_dict()), output


def call(model: nn.Module, case: dict[str, Any], tokens: Tensor) -> Any:
    inputs = inputs_of(case, tokens)
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def build(case: dict[str, Any]) -> nn.Module:
    if not case.get("meta"):
        return parallelize(tiny.make(case["model"], **case.get("sizes", {})))
    weights = tiny.make(case["model"], **case.get("sizes", {})).state_dict()
    with torch.device("meta"):
        model = tiny.make(case["model"], **case.get("sizes", {}))
    return parallelize(model, state_dict=weights if int(os.environ["RANK"]) == 0 else {})


def relative(a: float, b: float) -> float:
    return abs(a - b) / abs(b)


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Train under the layout, with one optimizer after the other from the same weights, and compare."""
    prefix = "model." if case["model"] == "llama" else ""
    config = {"tp_plan": {f"{prefix}{name}": style for name, style in PLAN.items()}, **case["config"]}
    if config.get("tp_size", 1) == 1:
        del config["tp_plan"]
    report: dict[str, Any] = {}
    with parallel_context({**config, "runtime": {"timeout_s": 240}}) as context:
        model = build(case)
        parameters = dict(model.named_parameters())
        first = {name: local(parameter).clone() for name, parameter in parameters.items()}
        for kind in case["optimizers"]:
            model.reshard()  # an evaluation leaves gathered parameters in place, and uses them again
            for name, value in first.items():
                local(parameters[name]).copy_(value)
            report |= {f"{kind} {what}": value for what, value in train(model, parameters, case, kind, context).items()}
        report["covers"] = covers(model, reference(case, kind)[2], context)
        del model, parameters
    return report


def train(model: nn.Module, parameters: dict[str, Any], case: dict[str, Any], kind: str, context: Any) -> dict[str, float]:
    """How far three steps and an evaluation are from one process."""
    losses, norms, weights, output = reference(case, kind)
    report = {"loss": 0.0, "norm": 0.0, "weight": 0.0}
    optimizer = steps.optimizer(partial(optimizer_of, kind), parameters.values(), case["as_users"])
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = train_step(model, case, step, context)
        report["loss"] = max(report["loss"], abs(loss - losses[step]))
        report["norm"] = max(report["norm"], relative(clip_grad_norm_(model, LIMIT).item(), norms[step]))
        optimizer.step()
    for name, parameter in parameters.items():
        report["weight"] = max(report["weight"], (full(parameter) - weights[name]).abs().max().item())
    with torch.no_grad():
        found = call(model, case, share_of(tiny.batch(0, case["batch"]).inputs, context))
    if isinstance(output, dict):
        assert found["loss"] is None
        output, found = output["logits"], found["logits"]
    return report | {"output": (found - share_of(output, context)).abs().max().item()}


def train_step(model: nn.Module, case: dict[str, Any], step: int, context: Any) -> float:
    """Gradients of one step; returns the mean loss over the data ranks."""
    calls = calls_of(case, step)
    total = torch.zeros(())
    for n in accumulate(model, len(calls)):
        if case.get("interrupt") and n == 1:  # an evaluation between two calls that accumulate
            with torch.no_grad():
                call(model, case, share_of(tiny.batch(0, case["batch"]).inputs, context))
        inputs, targets = (share_of(tensor, context) for tensor in calls[n])
        total += forward_backward(model, inputs_of(case, inputs), targets, tiny.cross_entropy) / len(calls)
    return average_loss(total).item()


def share_of(tensor: Tensor, context: Any) -> Tensor:
    return tensor.chunk(context.dp_world_size)[context.dp_rank]


def covers(model: nn.Module, weights: dict[str, Tensor], context: Any) -> bool:
    """Whether the stages together hold each parameter once, under its name in the whole model."""
    held = sorted(dict(model.named_parameters()))
    everything: list[Any] = [None] * context.topology.pp
    dist.all_gather_object(everything, held, group=context.mesh["pp"].get_group())
    return held == sorted(model.state_dict()) and sorted(name for names in everything for name in names) == sorted(weights)


def report(cases: dict[str, Any]) -> dict[str, Any]:
    """Run some cases: name -> case."""
    found = {}
    for name, case in cases.items():
        try:
            found[name] = run({"as_users": int(os.environ["WORLD_SIZE"]) <= 2 or name in AS_USERS, **case})
        except Exception:
            _app.say(f"FAILED {name} on rank {os.environ['RANK']}\n{traceback.format_exc()}")
            os._exit(1)  # peers wait in collectives: end them through the agent
    return found
