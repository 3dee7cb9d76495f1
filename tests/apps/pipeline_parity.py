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

from hydra_parallelism import parallel_context, parallelize
from hydra_parallelism.parallelize.steps import accumulate, forward_backward

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


def reference(case: dict[str, Any]) -> tuple[list[float], list[float], dict[str, Tensor], Any]:
    model = tiny.make(case["model"], **case.get("sizes", {}))
    optimizer = optimizer_of(case["optimizer"], model.parameters())
    losses, norms = [], []
    for step in range(STEPS):
        data = tiny.batch(step, case["batch"])
        optimizer.zero_grad()
        losses.append(forward_backward(model, inputs_of(case, data.inputs), data.targets, tiny.cross_entropy).item())
        norms.append(torch.stack([p.grad.norm() for p in model.parameters()]).norm().item())
        optimizer.step()
    with torch.no_grad():
        output = model(tokens=data.inputs, scale=0.5) if case["model"] == "llama" else model(data.inputs)
    return losses, norms, dict(model.state_dict()), output


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
    prefix = "model." if case["model"] == "llama" else ""
    config = {"tp_plan": {f"{prefix}{name}": style for name, style in PLAN.items()}, **case["config"]}
    if config.get("tp_size", 1) == 1:
        del config["tp_plan"]
    losses, norms, weights, output = reference(case)
    report: dict[str, float] = {"loss": 0.0, "norm": 0.0, "weight": 0.0, "output": 0.0}
    with parallel_context(config) as context:
        model = build(case)
        optimizer = optimizer_of(case["optimizer"], model.parameters())
        share = case["batch"] // context.dp_world_size
        calls = case.get("accumulate", 1)
        mine = slice(context.dp_rank * share, (context.dp_rank + 1) * share)
        for step in range(STEPS):
            data = tiny.batch(step, case["batch"])
            inputs, targets = data.inputs[mine].chunk(calls), data.targets[mine].chunk(calls)
            optimizer.zero_grad()
            total = torch.zeros(())
            for n in accumulate(model, calls):
                if case.get("interrupt") and n == 1:  # an evaluation between two calls that accumulate
                    with torch.no_grad():
                        model(data.inputs[mine])
                total += forward_backward(model, inputs_of(case, inputs[n]), targets[n], tiny.cross_entropy) / calls
            dist.all_reduce(total, group=context.mesh["dp"].get_group())
            report["loss"] = max(report["loss"], abs(total.item() / context.dp_world_size - losses[step]))
            report["norm"] = max(report["norm"], relative(norm_of(model, context), norms[step]))
            optimizer.step()
        for name, parameter in model.named_parameters():
            report["weight"] = max(report["weight"], (full(parameter) - weights[name]).abs().max().item())
        report["names"] = sorted(set(dict(model.named_parameters())) ^ set(model.state_dict()))
        with torch.no_grad():
            tokens = data.inputs[mine]
            mine_out = model(tokens=tokens, scale=0.5) if case["model"] == "llama" else model(tokens)
        if isinstance(output, dict):
            assert mine_out["loss"] is None
            output, mine_out = output["logits"], mine_out["logits"]
        report["output"] = (mine_out - output[mine]).abs().max().item()
        held = [sorted(dict(model.named_parameters()))] * 1
        everything: list[Any] = [None] * context.topology.pp
        dist.all_gather_object(everything, held[0], group=context.mesh["pp"].get_group())
        report["covered"] = sorted(name for names in everything for name in names) == sorted(weights)
        del model, optimizer, parameter
    return report


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
