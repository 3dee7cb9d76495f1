"""What ``parallelize`` leaves behind, seen from inside: dtypes, names, units, ties, and refusals that several ranks share."""

import warnings
from collections import Counter
from typing import Any

import models
import torch
from attend import Sent
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from hydra_parallelism import (
    ConfigurationError,
    ParallelContext,
    forward_backward,
    parallel_context,
    parallelize,
    shard_sequence,
)

BF16 = {"fsdp": {"mixed_precision": "bf16"}}
TP = {"tp_size": 2, "tp_plan": "auto"}
TOKENS = torch.arange(2 * models.SEQUENCE).view(2, -1) % 30


def dtypes(context: ParallelContext, kind: str = "gpt") -> dict[str, str]:
    """In which dtypes a block computes, and everything around it."""
    model = parallelize(models.make(kind), context)
    seen: dict[str, torch.Tensor] = {}
    attention = next(module for name, module in model.named_modules() if name.endswith("q_proj"))
    attention.register_forward_hook(lambda _module, inputs, output: seen.update(input=inputs[0], inside=output))
    model.layers[0].register_forward_hook(lambda _module, _inputs, output: seen.update(block=output))
    output = model(TOKENS)
    output.sum().backward()
    weight = next(model.parameters())
    seen |= {"output": output, "weight": weight, "gradient": weight.grad}
    return {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in seen.items()}


def structure(context: ParallelContext) -> dict[str, Any]:
    """Names, units, ties and devices after everything at once."""
    config = {"activation_checkpointing": "full", "tp_plan": context.config.tp_plan, "enable_sequence_parallel": True}
    model = parallelize(models.make("llama"), context, config=config)
    plain = models.make("llama")
    return {
        "same_names": [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()],
        "same_keys": list(model.state_dict()) == list(plain.state_dict()),
        "units": [name for name, module in model.named_modules() if isinstance(module, FSDPModule)],
        "tied": model.head.weight is model.embed.weight,
        "sharded": all(isinstance(parameter, DTensor) for parameter in model.parameters()),
        "gradients": gradients(model),
    }


def gradients(model: nn.Module) -> bool:
    """Whether every parameter gets a gradient."""
    model(TOKENS).sum().backward()
    return all(parameter.grad is not None for parameter in model.parameters())


def communication(context: ParallelContext) -> dict[str, dict[str, int]]:
    """How often a forward and a backward of a mixture of experts call each collective."""
    model = parallelize(models.make("moe"), context)
    with CommDebugMode() as forward:
        loss = model(TOKENS).mean()
    with CommDebugMode() as backward, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook is firing")  # of the mode's own hooks
        loss.backward()
    modes = {"forward": forward, "backward": backward}
    return {name: {str(op): number for op, number in mode.get_comm_counts().items()} for name, mode in modes.items()}


def pieces(context: ParallelContext) -> dict[str, dict[str, int]]:
    """The same of a model on pieces of its sequences, sends counted too."""
    model = parallelize(models.make("gpt_long"), context)
    tokens = torch.arange(2 * models.LONG).view(2, -1) % 60
    tokens, positions = shard_sequence(tokens, torch.arange(models.LONG)[None])
    torch.no_grad()(model)(tokens, positions)  # the first call is tried before
    model.reshard()
    with Sent() as forward:
        loss = model(tokens, positions).mean()
    with Sent() as backward:
        loss.backward()
    modes = {"forward": forward, "backward": backward}
    return {name: dict(Counter(call for call, _ in mode.calls)) for name, mode in modes.items()}


class Rotary(nn.Module):
    """A buffer that no state dict holds, and weights that only it knows to draw."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 6))
        self.register_buffer("angles", torch.empty(6), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        self.angles.copy_(torch.arange(6.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.angles


def build_meta() -> nn.Module:
    """Blocks of a linear layer and the module above."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), Rotary()) for _ in range(2)))


def meta(context: ParallelContext) -> dict[str, bool]:
    """A model on meta gets the weights that one process would draw from the same seed, or what it is told."""
    wanted = build_meta()
    torch.manual_seed(3)
    wanted.apply(lambda module: module.reset_parameters() if hasattr(module, "reset_parameters") else None)
    found: dict[str, bool] = {}
    for name, init_weights in {"reset": None, "init": fill}.items():
        with torch.device("meta"):
            model = build_meta()
        torch.manual_seed(3 + context.rank)  # rank 0's counts
        model = parallelize(model, context, init_weights=init_weights)
        state = {key: value.full_tensor() for key, value in model.state_dict().items()}
        if init_weights is None:
            found[name] = all(torch.equal(state[key], value) for key, value in wanted.state_dict().items())
        else:
            found[name] = all(bool((value == 0.5).all()) for value in state.values())
        found[f"{name}_buffers"] = torch.equal(model[0][1].angles, torch.arange(6.0))
    return found


def fill(module: nn.Module) -> None:
    """Everything one half, except what positions need."""
    for parameter in module.parameters(recurse=False):
        nn.init.constant_(parameter, 0.5)
    if isinstance(module, Rotary):
        module.angles.copy_(torch.arange(6.0))


def refusal(call: Any) -> str:
    """The text of a ConfigurationError."""
    try:
        call()
    except ConfigurationError as error:
        return str(error)
    return "not refused"


def different_models(context: ParallelContext) -> str:
    """Rank 1 built another model."""
    return refusal(lambda: parallelize(nn.Linear(4, 4 + context.rank), context))


def one_refuses(context: ParallelContext) -> str:
    """Only rank 1's model cannot be wrapped."""
    model = models.make("gpt") if context.rank == 0 else nn.Linear(4, 4)
    return refusal(lambda: parallelize(model, context))


def odd_sequence(context: ParallelContext) -> str:
    """A sequence of 11 over two ranks."""
    model = parallelize(models.make("gpt"), context)
    return refusal(lambda: model(TOKENS[:, :11]))


def odd_pipeline(context: ParallelContext) -> str:
    """The same in a pipeline, whose later stages would wait for what the first one refuses."""
    model = parallelize(models.make("gpt"), context)
    tokens = TOKENS[:, :11]
    return refusal(lambda: forward_backward(model, tokens, tokens, lambda logits, _: logits.mean()))


def everything(size: int) -> dict[str, tuple[dict[str, Any], Any]]:
    """Observation -> config and function, by world size."""
    if size == 1:
        return {"bf16": (BF16, dtypes), "plain": ({}, dtypes), "meta": ({}, meta)}
    if size == 4:
        return {
            "bf16": ({"dp_shard": 4, **BF16}, dtypes),
            "odd_pipeline": (
                {"pp_size": 2, **TP, "enable_sequence_parallel": True, "pipeline": {"schedule": "GPipe", "microbatches": 1}},
                odd_pipeline,
            ),
            "dispatch": ({"dp_shard": 4, "ep_size": 2, "ep_plan": "auto"}, communication),
            "structure": ({"dp_shard": 2, **TP}, structure),
        }
    return {
        "bf16": ({"dp_shard": 2, **BF16}, dtypes),
        "bf16_ddp": ({"dp_replicate": 2, **BF16}, dtypes),
        "bf16_tp": ({**TP, **BF16}, dtypes),
        "bf16_sp": ({**TP, **BF16, "enable_sequence_parallel": True}, lambda context: dtypes(context, "llama")),
        "bf16_ep": ({"dp_shard": 2, "ep_size": 2, "ep_plan": "auto", **BF16}, lambda context: dtypes(context, "moe")),
        "meta": ({"dp_shard": 2}, meta),
        "different_models": ({"dp_replicate": 2}, different_models),
        "one_refuses": ({"dp_shard": 2}, one_refuses),
        "ring": ({"context_parallel": {"ring_degree": 2}}, pieces),
        "ulysses": ({"context_parallel": {"ulysses_degree": 2}}, pieces),
        "odd_sequence": ({**TP, "enable_sequence_parallel": True}, odd_sequence),
    }


def report(size: int) -> dict[str, Any]:
    """Every observation of a world size."""
    found: dict[str, Any] = {}
    for name, (config, look) in everything(size).items():
        with parallel_context({**config, "runtime": {"timeout_s": 240}}) as context:
            found[name] = look(context)
    return found
