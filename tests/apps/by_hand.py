"""A GPT under a layout, with torch's own calls and nothing of ``parallelize``: what gradients and checkpoints are tried on."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from mixture import MixtureGPT
from model import GPT

SIZES = {"vocab": 64, "dim": 32, "num_layers": 4, "heads": 4, "hidden": 48, "seq_len": 16}


def make(seed: int = 0, **sizes: int) -> GPT:
    """The same weights everywhere. With ``experts`` a mixture, its router away from ties, which rounding would break."""
    torch.manual_seed(seed)
    if "experts" not in sizes:
        return GPT(**{**SIZES, **sizes})
    model = MixtureGPT(**{**SIZES, "top_k": 2, **sizes})
    for layer in model.layers:
        layer.mlp.router.weight.data.mul_(20)
    return model


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The whole batch of a step: 8 windows."""
    tokens = torch.randint(0, SIZES["vocab"], (8, 17), generator=torch.Generator().manual_seed(100 + step))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """With an epsilon that does not blow up the rounding of tiny gradients."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-5)


class Stage(nn.Module):
    """A share of a GPT's layers, under the names they have there."""

    def __init__(self, whole: GPT, index: int, stages: int) -> None:
        super().__init__()
        first, last = index == 0, index == stages - 1
        per = len(whole.layers) // stages
        self.token_embedding = whole.token_embedding if first else None
        self.position_embedding = whole.position_embedding if first else None
        self.layers = nn.ModuleDict({str(i): whole.layers[i] for i in range(index * per, (index + 1) * per)})
        self.norm, self.head = (whole.norm, whole.head) if last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.token_embedding is not None:
            x = self.token_embedding(x) + self.position_embedding(torch.arange(x.shape[1]))
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))


def split_tensors(model: nn.Module, mesh: Any, *, sequence: bool = False) -> None:
    """Tensor parallelism, with the blocks' norms on pieces of the sequence if asked to."""
    inside = {f"attention.{name}_proj": ColwiseParallel() for name in "qkv"} | {"mlp.up": ColwiseParallel()}
    inside |= {"attention.o_proj": RowwiseParallel(), "mlp.down": RowwiseParallel()}
    if sequence:
        whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        pieces = RowwiseParallel(output_layouts=Shard(1))
        inside |= {"attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel(), "attention": whole, "mlp": whole}
        inside |= {"attention.o_proj": pieces, "mlp.down": pieces}
    for layer in layers_of(model):
        parallelize_module(layer, mesh, inside)
    outside = {"head": ColwiseParallel(output_layouts=Replicate())}
    if sequence:
        cut = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True)
        parallelize_module(layers_of(model)[0], mesh, cut)
        outside |= {"norm": SequenceParallel(), "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())}
    parallelize_module(model, mesh, {name: style for name, style in outside.items() if getattr(model, name) is not None})


def layers_of(model: Any) -> list[nn.Module]:
    """The blocks of a GPT or a stage."""
    return list(model.layers.values() if isinstance(model.layers, nn.ModuleDict) else model.layers)


class Job:
    """A model under the context's layout, and how to train it."""

    def __init__(self, context: Any, *, seed: int = 0, shard: bool = True, sequence: bool = False, **sizes: int) -> None:
        self.context, self.stages, self.at = context, context.topology.pp, context.coordinate["pp"]
        whole = make(seed, **sizes)
        self.model: nn.Module = Stage(whole, self.at, self.stages) if self.stages > 1 else whole
        if context.topology.tp > 1:
            split_tensors(self.model, context.mesh["tp"], sequence=sequence)
        if shard:
            mesh = context.mesh["dp_replicate", "fsdp"]
            for layer in layers_of(self.model):
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = adamw(self.model)
        if self.stages > 1:
            group = context.mesh["pp"].get_group()
            stage = PipelineStage(self.model, self.at, self.stages, context.device, group=group)
            self.schedule = Schedule1F1B(stage, self.stages, loss_fn=loss_of)

    def backward(self, step: int) -> Tensor:
        """Gradients of this rank's share of a batch; the mean loss of the share, on every stage."""
        share = 8 // self.context.dp_world_size
        mine = slice(self.context.dp_rank * share, (self.context.dp_rank + 1) * share)
        tokens, targets = (part[mine] for part in batch(step))
        self.optimizer.zero_grad()
        if self.stages == 1:
            loss = loss_of(self.model(tokens), targets)
            loss.backward()
            return loss.detach()
        losses: list[Tensor] = []
        last = {"target": targets, "losses": losses} if self.at == self.stages - 1 else {}
        self.schedule.step(*((tokens,) if self.at == 0 else ()), **last)
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.all_reduce(loss, group=self.context.mesh["pp"].get_group())
        return loss


def full(tensor: Tensor) -> Tensor:
    """The whole of a DTensor."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
