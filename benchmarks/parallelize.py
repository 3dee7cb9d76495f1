"""Step time under ``parallelize`` against hand-written torch calls for the same layout, accelerate and Transformers.

``gpt``: the training example's GPT (conf/model/tiny.yaml), fsdp 4 and fsdp 2 x tp 2. By hand is what one writes with torch
alone: ``parallelize_module`` with a plan, ``fully_shard`` on every block and on the root, ``loss.backward()``. ``titan`` is
torchtitan's choice of units: the embeddings and ``[norm, head]`` apart.
``llama``: a tiny ``LlamaForCausalLM``, fsdp 4, by hand and as accelerate (FSDP2) and Transformers (``DistributedConfig``) shard
it, where they can be imported; a peer that cannot run says why.

Blocks of steps alternate in one start of 4 gloo processes and a new order each round. A ratio is that of one round, wall time
of the slowest rank, ``parallelize`` / other; ``cpu`` is that of the processor time of all ranks, which other programs on the
machine disturb less. The first losses of all ways must agree. Usage: ``python benchmarks/parallelize.py [ROUNDS] [STEPS]``.
"""

import copy
import os
import platform
import random
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hydra_parallelism import forward_backward, parallel_context, parallelize

_HERE = Path(__file__).resolve().parent
RANKS, BATCH, SEQ, VOCAB = 4, 4, 64, 256
GPT_SIZES = {"dim": 64, "num_layers": 2, "heads": 4, "hidden": 256, "seq_len": SEQ}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt, fsdp 4": ("gpt", {"dp_shard": 4}),
    "gpt, fsdp 2 x tp 2": ("gpt", {"dp_shard": 2, "tp_size": 2, "tp_plan": "auto"}),
    "llama, fsdp 4": ("llama", {"dp_shard": 4}),
}


@dataclass
class Way:
    """One way to train, and what its blocks took."""

    name: str
    model: nn.Module
    optimizer: Any
    run: Callable[[nn.Module, Tensor], Tensor]
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def step(self, tokens: Tensor) -> Tensor:
        """One optimizer step on (batch, sequence + 1) of tokens."""
        self.optimizer.zero_grad()
        loss = self.run(self.model, tokens)
        self.optimizer.step()
        return loss


def loss_of(output: Any, targets: Tensor) -> Tensor:
    """Mean cross entropy of logits, or of an output that holds them."""
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def ours(model: nn.Module, tokens: Tensor) -> Tensor:
    """Forward and backward by the library."""
    return forward_backward(model, tokens[:, :-1], tokens[:, 1:], loss_of)


def by_hand(model: nn.Module, tokens: Tensor) -> Tensor:
    """Forward and backward in torch."""
    loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
    loss.backward()
    return loss.detach()


def way(name: str, model: nn.Module, run: Callable[[nn.Module, Tensor], Tensor] = by_hand) -> Way:
    """With the same optimizer as all others."""
    return Way(name, model, torch.optim.AdamW(model.parameters(), lr=1e-3), run)


def gpt_by_hand(model: nn.Module, mesh: DeviceMesh, *, titan: bool = False) -> nn.Module:
    """A GPT over a mesh of ``fsdp`` and perhaps ``tp``."""
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        whole = ColwiseParallel(output_layouts=Replicate())
        plan = {"token_embedding": RowwiseParallel(input_layouts=Replicate()), "head": whole}
        for at in range(len(model.layers)):
            plan |= {f"layers.{at}.attention.{name}_proj": ColwiseParallel() for name in "qkv"}
            plan |= {f"layers.{at}.attention.o_proj": RowwiseParallel(), f"layers.{at}.mlp.down": RowwiseParallel()}
            plan[f"layers.{at}.mlp.up"] = ColwiseParallel()
        parallelize_module(model, mesh["tp"], plan)
    over = mesh["fsdp"] if "tp" in names else mesh
    if titan:
        fully_shard([model.token_embedding, model.position_embedding], mesh=over)
    for block in model.layers:
        fully_shard(block, mesh=over)
    if titan:
        fully_shard([model.norm, model.head], mesh=over, reshard_after_forward=False)
    return fully_shard(model, mesh=over)


def gpt_ways(config: dict[str, Any]) -> list[Way]:
    """The GPT of the training example."""
    sys.path.insert(0, str(_HERE.parent / "examples"))
    from model import GPT

    torch.manual_seed(0)
    model, tp = GPT(VOCAB, **GPT_SIZES), config.get("tp_size", 1)
    mesh = init_device_mesh("cpu", (RANKS // tp, tp)[: min(tp, 2)], mesh_dim_names=("fsdp", "tp")[: min(tp, 2)])
    return [
        way("parallelize", parallelize(copy.deepcopy(model)), ours),
        way("by hand", gpt_by_hand(copy.deepcopy(model), mesh)),
        way("by hand, titan", gpt_by_hand(copy.deepcopy(model), mesh, titan=True)),
    ]


def llama_ways(_: dict[str, Any]) -> list[Way]:
    """Transformers' Llama, and whoever shards it."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        say(f"llama: not run, {type(error).__name__}: {error}")
        return []
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, use_cache=False, tie_word_embeddings=False, **sizes)
    model, mesh = LlamaForCausalLM(config), init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",))
    hand = copy.deepcopy(model)
    for block in hand.model.layers:
        fully_shard(block, mesh=mesh)
    found = [way("parallelize", parallelize(copy.deepcopy(model)), ours), way("by hand", fully_shard(hand, mesh=mesh))]
    for peer in (accelerate_way, transformers_way):
        try:
            found.append(peer(copy.deepcopy(model)))
        except Exception as error:  # what a peer cannot do is part of the result
            say(f"{peer.__name__}: not run, {type(error).__name__}: {error}")
    return found


def accelerate_way(model: nn.Module) -> Way:
    """Accelerate's FSDP2. Its state knows FSDP on accelerators only (DDP on a CPU), so it is told afterwards."""
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False, reshard_after_forward=True
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    if not hasattr(model, "unshard"):
        raise RuntimeError(f"Accelerator(cpu=True) left it {type(model).__name__}: {accelerator.distributed_type}")

    def run(model: nn.Module, tokens: Tensor) -> Tensor:
        loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
        accelerator.backward(loss)
        return loss.detach()

    return Way("accelerate FSDP2", model, optimizer, run)


def transformers_way(model: nn.Module) -> Way:
    """Transformers' own FSDP: what ``from_pretrained(..., distributed_config=...)`` does to a model that is built."""
    from transformers.distributed import DistributedConfig
    from transformers.distributed.utils import initialize_distributed_mesh

    config = DistributedConfig(fsdp_size=RANKS, tp_size=1)
    _, manager = initialize_distributed_mesh(config)
    return way("transformers FSDP", type(model).maybe_distribute_model(model, config, manager))


def say(text: str) -> None:
    """On rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def measure(ways: list[Way], rounds: int, steps: int) -> None:
    """Interleave blocks of steps, the order drawn anew each round, the same on all ranks."""
    draw, data = random.Random(0), torch.Generator().manual_seed(dist.get_rank())
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=data)
    first = [way.step(tokens).item() for way in ways]
    assert max(first) - min(first) < 1e-4, first
    for number in range(rounds + 1):
        for way in draw.sample(ways, len(ways)):
            dist.barrier()
            began, used = time.perf_counter(), time.process_time()
            for _ in range(steps):
                way.step(tokens)
            taken = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
            cpu = torch.tensor([time.process_time() - used], dtype=torch.float64)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            dist.all_reduce(cpu)
            if number:  # the first round warms up
                way.wall.append(taken.item())
                way.cpu.append(cpu.item())


def tell(ways: list[Way], steps: int) -> None:
    """Medians, and ratios of the first way to the others with their quartiles."""
    for other in ways:
        said = f"  {other.name:>18}: {statistics.median(other.wall) / steps * 1000:7.2f} ms a step"
        for kind in ("wall", "cpu") if other is not ways[0] else ():
            pairs = zip(getattr(ways[0], kind), getattr(other, kind), strict=True)
            low, middle, high = statistics.quantiles([mine / its for mine, its in pairs], n=4)
            said += f"; parallelize / this: {kind} {middle:.3f} ({low:.3f} .. {high:.3f})"
        say(said)


def work(layout: str, rounds: int, steps: int) -> None:
    """One layout, on one of the ranks."""
    kind, config = LAYOUTS[layout]
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "FSDP-managed module .* returned a view")  # that of the model by hand
    with parallel_context({**config, "runtime": {"timeout_s": 120}}):
        ways = gpt_ways(config) if kind == "gpt" else llama_ways(config)
        if ways:
            measure(ways, rounds, steps)
            say(f"{layout}: {rounds} rounds of {steps} steps")
            tell(ways, steps)


def main() -> None:
    """Start the ranks of each layout."""
    rounds, steps = (int(argument) for argument in (sys.argv[1:] + ["40", "5"][len(sys.argv) - 1 :])[:2])
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {platform.processor() or platform.machine()}, "
          f"Python {platform.python_version()}, torch {torch.__version__}, {RANKS} gloo ranks", flush=True)  # fmt: skip
    front = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", __file__]
    for layout in LAYOUTS:
        subprocess.run(
            [*front, "--layout", layout, str(rounds), str(steps)], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--layout"]:
        work(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
