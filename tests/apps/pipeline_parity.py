"""Train under one layout after another, in one start of the processes, and compare each with one process: a line per rank."""

import json
import os
import sys
import traceback
from typing import Any

import _app
import tiny
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hydra_parallelism import accumulate, forward_backward, parallel_context, parallelize

STEPS = 3
PLAN = {
    "layers.*.attention.[qkv]_proj": "colwise", "layers.*.attention.o_proj": "rowwise",
    "layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise",
}  # fmt: skip


def optimizer_of(name: str, parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1) if name == "sgd" else torch.optim.AdamW(parameters, lr=1e-2, eps=1e-5)


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


def reference(case: dict[str, Any]) -> tuple[list[float], list[float], dict[str, Tensor], Any]:
    """One process, plain torch."""
    model = tiny.make(case["model"], **case.get("sizes", {}))
    optimizer = optimizer_of(case["optimizer"], model.parameters())
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        calls = calls_of(case, step)
        loss = sum(tiny.cross_entropy(call(model, case, x), y) for x, y in calls) / len(calls)
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.stack([p.grad.norm() for p in model.parameters()]).norm().item())
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


def norm_of(model: nn.Module, context: Any) -> float:
    squares = torch.stack([full(p.grad).norm() ** 2 for p in model.parameters() if p.grad is not None]).sum()
    dist.all_reduce(squares, group=context.mesh["pp"].get_group())
    return squares.sqrt().item()


def relative(a: float, b: float) -> float:
    return abs(a - b) / abs(b)


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Train under the layout and compare."""
    prefix = "model." if case["model"] == "llama" else ""
    config = {"tp_plan": {f"{prefix}{name}": style for name, style in PLAN.items()}, **case["config"]}
    if config.get("tp_size", 1) == 1:
        del config["tp_plan"]
    losses, norms, weights, output = reference(case)
    report: dict[str, Any] = {"loss": 0.0, "norm": 0.0, "weight": 0.0}
    with parallel_context(config) as context:
        model = build(case)
        optimizer = optimizer_of(case["optimizer"], model.parameters())
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = train_step(model, case, step, context)
            report["loss"] = max(report["loss"], abs(loss - losses[step]))
            report["norm"] = max(report["norm"], relative(norm_of(model, context), norms[step]))
            optimizer.step()
        for name, parameter in model.named_parameters():
            report["weight"] = max(report["weight"], (full(parameter) - weights[name]).abs().max().item())
        tokens = share_of(tiny.batch(0, case["batch"]).inputs, context)
        with torch.no_grad():
            found = call(model, case, tokens)
        if isinstance(output, dict):
            assert found["loss"] is None
            output, found = output["logits"], found["logits"]
        report["output"] = (found - share_of(output, context)).abs().max().item()
        report["covers"] = covers(model, weights, context)
        del model, optimizer, parameter
    return report


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
    dist.all_reduce(total, group=context.mesh["dp"].get_group())
    return total.item() / context.dp_world_size


def share_of(tensor: Tensor, context: Any) -> Tensor:
    return tensor.chunk(context.dp_world_size)[context.dp_rank]


def covers(model: nn.Module, weights: dict[str, Tensor], context: Any) -> bool:
    """Whether the stages together hold each parameter once, under its name in the whole model."""
    held = sorted(dict(model.named_parameters()))
    everything: list[Any] = [None] * context.topology.pp
    dist.all_gather_object(everything, held, group=context.mesh["pp"].get_group())
    return held == sorted(model.state_dict()) and sorted(name for names in everything for name in names) == sorted(weights)


def main() -> None:
    """Run the cases given as a JSON object in the first argument: name -> case."""
    rank = int(os.environ["RANK"])
    only = sys.argv[2:]
    for name, case in json.loads(sys.argv[1]).items():
        if only and name not in only:
            continue
        try:
            report = run(case)
        except Exception:
            _app.say(f"FAILED {name} on rank {rank}\n{traceback.format_exc()}")
            os._exit(1)  # peers wait in collectives: end them through the agent
        _app.say(f"BODY {json.dumps({'name': name, 'rank': rank, **report})}")


if __name__ == "__main__":
    main()
