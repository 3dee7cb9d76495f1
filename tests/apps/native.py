"""Transformers' own parallelism, told of our layouts by ``to_transformers``, over our processes, beside one process.

Transformers takes a ``DistributedConfig`` where it loads weights and not in ``from_config``: so a tiny random model is made
from its config, saved, and loaded by each rank of a layout.
"""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from foreign import NATIVE
from omegaconf import OmegaConf
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.utils.logging import disable_progress_bar

from hydra_parallelism import ParallelContext, parallel_context
from hydra_parallelism.interop import to_transformers

BATCH, LENGTH, STEPS = 8, 12, 2
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "use_cache": False, "tie_word_embeddings": False,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {"llama": {}, "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2}}
AXES = {"pp": "pp", "dp_replicate": "dp_replicate", "fsdp": "dp_shard", "tp": "tp", "efsdp": "efsdp", "ep": "ep"}
"""Their axis -> ours."""


def save(kind: str, folder: Path) -> None:
    """A random model, from a config as Hydra gives one."""
    config = OmegaConf.create({"model_type": kind, **SIZES, **MODELS[kind]})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**OmegaConf.to_container(config)), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.data.mul_(50)  # a router near ties would choose other experts when rounding is different
    model.save_pretrained(folder)


def losses(model: nn.Module, share: int, shares: int, trains: bool) -> list[float]:
    """Loss of this share of the batch: of each step of training, or just the first. Collective, where the model is."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(STEPS if trains else 1):
        tokens = torch.randint(64, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(step)).chunk(shares)[share]
        with torch.set_grad_enabled(trains):
            logits = model(input_ids=tokens[:, :-1]).logits
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        if trains:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        found.append(loss.item())
    return found


def run(folder: Path, context: ParallelContext) -> dict[str, Any]:
    """Losses of all shares together, and whether their groups of ranks are ours. Collective."""
    config = DistributedConfig(**to_transformers(context))
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
    at, meshes = context.topology, model._mesh_manager
    same = [meshes.get_mesh(theirs).mesh.tolist() == list(at.group(ours, context.rank)) for theirs, ours in AXES.items()]
    mine = losses(model, context.dp_rank, at.dp_world_size, trains=at.pp == 1)
    mean = torch.tensor(mine, dtype=torch.float64) / at.world_size
    dist.all_reduce(mean)
    return {"found": mean.tolist(), "groups": all(same)}


def report(size: int) -> list[dict[str, Any]]:
    """Every case of this world size. Collective."""
    disable_progress_bar()
    wanted: dict[str, list[float]] = {}
    found = []
    for kind, config in NATIVE[size]:
        folder = Path(f"native-{kind}-{size}-{os.environ['RANK']}")  # its own: no rank waits for another to write
        if kind not in wanted:  # and before there are process groups, where rank 0 alone writes
            save(kind, folder)
            wanted[kind] = losses(AutoModelForCausalLM.from_pretrained(folder), 0, 1, trains=True)
        with parallel_context({**config, "runtime": {"timeout_s": 240}}) as context:
            found.append({"wanted": wanted[kind], **run(folder, context)})
    return found
