"""What accelerate and diffusers make of our meshes, on four real ranks: see tests/test_interop_ranks.py."""

import warnings
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin
from diffusers import ContextParallelConfig, FluxTransformer2DModel, ParallelConfig
from diffusers.hooks.context_parallel import apply_context_parallel
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from hydra_parallelism import ParallelContext, parallel_context
from hydra_parallelism._compat import registered_groups
from hydra_parallelism.interop import accelerate_mesh, diffusers_mesh, to_accelerate, to_diffusers

LAYOUTS: dict[str, dict[str, Any]] = {
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "ring": {"dp_shard": 2, "context_parallel": {"ring_degree": 2}},
    "tp": {"dp_shard": 2, "tp_size": 2},
}
STEPS, BATCH = 3, 8
FLUX = {
    "patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 8,
    "num_attention_heads": 2, "joint_attention_dim": 8, "pooled_projection_dim": 8, "axes_dims_rope": (2, 2, 4),
}  # fmt: skip


def report() -> dict[str, Any]:
    """All of it, for this rank."""
    with warnings.catch_warnings():
        # accelerate asks torch for names of joint axes, which torch wants to take back some day.
        warnings.filterwarnings("ignore", message="Slicing a flattened dim from root mesh")
        found: dict[str, Any] = {"meshes": {name: compare(config) for name, config in LAYOUTS.items()}}
        found["trained"] = train()
        found["sequence"] = sequence()
        found["flux"] = flux()
    return found


def compare(config: dict[str, Any]) -> dict[str, Any]:
    """Our mesh for accelerate beside the one that accelerate builds."""
    with parallel_context(config) as context:
        theirs = accelerate.ParallelismConfig(**to_accelerate(context))
        before = registered_groups()
        ours = describe(accelerate_mesh(context))
        handed = registered_groups() - before
        built = describe(theirs.build_device_mesh("cpu"))
        return {"ours": ours, "theirs": built, "made": [handed, registered_groups() - before]}


def describe(mesh: DeviceMesh | None) -> dict[str, Any]:
    """Names, shape, and who is in the group of each name, joint ones included."""
    assert mesh is not None
    names = [*(mesh.mesh_dim_names or ()), *sorted(mesh._flatten_mapping)]
    return {
        "names": list(mesh.mesh_dim_names or ()),
        "shape": list(mesh.shape),
        "ranks": {name: dist.get_process_group_ranks(mesh[name].get_group()) for name in names},
        "index": {name: mesh[name].get_local_rank() for name in names},
    }


def model_and_data() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """The same on every rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    return model, torch.randn(STEPS, BATCH, 8), torch.randn(STEPS, BATCH, 4)


def alone() -> list[float]:
    """Losses of one process."""
    model, inputs, targets = model_and_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for x, y in zip(inputs, targets, strict=True):
        loss = nn.functional.mse_loss(model(x), y)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train() -> dict[str, Any]:
    """HSDP over the mesh that accelerate's FSDP looks up in ours. Its ``Accelerator`` wants accelerators, and says so."""
    with parallel_context(LAYOUTS["hsdp"]) as context:
        theirs = accelerate.ParallelismConfig(**to_accelerate(context))
        theirs.device_mesh = mesh = accelerate_mesh(context)
        before = registered_groups()
        refused = start_accelerator(theirs)
        is_ours = AcceleratorState._shared_state["device_mesh"] is mesh
        AcceleratorState._reset_state(reset_partial_state=True)
        model, inputs, targets = model_and_data()
        fully_shard(model, mesh=mesh[tuple(theirs.fsdp_dim_names)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        share = BATCH // mesh["dp"].size()
        mine = slice(mesh["dp"].get_local_rank() * share, (mesh["dp"].get_local_rank() + 1) * share)
        losses = []
        for x, y in zip(inputs, targets, strict=True):
            loss = nn.functional.mse_loss(model(x[mine]), y[mine])
            total = loss.detach().clone()
            dist.all_reduce(total, group=mesh["dp_cp"].get_group())
            losses.append(total.item() / mesh["dp_cp"].size())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        placed = next(model.parameters())
        return {
            "losses": losses,
            "alone": alone(),
            "refused": refused,
            "is_ours": is_ours,
            "made": registered_groups() - before,
            "parameter": [str(placed.placements), list(placed.device_mesh.mesh_dim_names or ())],
        }


def start_accelerator(theirs: accelerate.ParallelismConfig) -> str:
    """What an ``Accelerator`` on CPU says once it has the mesh."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    try:
        accelerate.Accelerator(cpu=True, parallelism_config=theirs, fsdp_plugin=plugin)
    except ValueError as error:
        return str(error)
    return ""


def sequence() -> dict[str, Any]:
    """Ring and Ulysses as diffusers sets them up on our mesh."""
    with parallel_context({"context_parallel": {"ring_degree": 2, "ulysses_degree": 2}}) as context:
        theirs = ContextParallelConfig(**to_diffusers(context), mesh=diffusers_mesh(context))
        theirs.setup(context.rank, context.world_size, context.device, theirs.mesh)
        coordinate = context.coordinate
        return {
            "theirs": [theirs._ring_local_rank, theirs._ulysses_local_rank],
            "ours": [coordinate["ring"], coordinate["ulysses"]],
            "flattened": dist.get_process_group_ranks(theirs._flattened_mesh.get_group()),
        }


def flux() -> dict[str, Any]:
    """A tiny Flux on two replicas of two Ulysses ranks, by diffusers' own engine."""
    torch.manual_seed(0)
    model = FluxTransformer2DModel(**FLUX).eval()
    inputs = flux_inputs()
    with torch.no_grad():
        wanted = model(**inputs, return_dict=False)[0]
    with parallel_context({"dp_replicate": 2, "context_parallel": {"ulysses_degree": 2}}) as context:
        theirs = ContextParallelConfig(**to_diffusers(context), mesh=diffusers_mesh(context))
        refused = apply(model, theirs, context)
        with torch.no_grad():
            got = model(**inputs, return_dict=False)[0]
        return {"off": (got - wanted).abs().max().item(), "shape": list(got.shape), "refused": refused}


def flux_inputs() -> dict[str, torch.Tensor]:
    """A picture of 4 x 4 patches and a text of 6 tokens."""
    return {
        "hidden_states": torch.randn(1, 16, 4),
        "encoder_hidden_states": torch.randn(1, 6, 8),
        "pooled_projections": torch.randn(1, 8),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.randint(0, 4, (16, 3)).float(),
        "txt_ids": torch.zeros(6, 3),
    }


def apply(model: FluxTransformer2DModel, theirs: ContextParallelConfig, context: ParallelContext) -> str:
    """What ``enable_parallelism`` does, which itself counts accelerators first: without any, it says what is returned."""
    try:
        model.enable_parallelism(config=theirs)
    except Exception as error:
        refused = f"{type(error).__name__}: {error}"
    else:
        return ""
    config = ParallelConfig(context_parallel_config=theirs)
    config.setup(context.rank, context.world_size, context.device, mesh=theirs.mesh)
    for module in model.modules():
        if hasattr(module, "processor") and hasattr(module.processor, "_parallel_config"):
            module.processor._parallel_config = config
    apply_context_parallel(model, theirs, model._cp_plan)
    return refused
