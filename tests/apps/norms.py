"""Clip gradients and average losses under each of some layouts, and report how far off one process they are."""

import math
from typing import Any

import by_hand
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from hydra_parallelism import average_loss, clip_grad_norm_, distributed_sampler, parallel_context, seed_for

ORDERS = (1.0, 2.0, 3.0, math.inf)


def reference(order: float, limit: float) -> tuple[float, dict[str, torch.Tensor]]:
    """Norm and clipped gradients of one process, by torch."""
    model = by_hand.make()
    tokens, targets = by_hand.batch(0)
    by_hand.loss_of(model(tokens), targets).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit, order)
    return norm.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def clip(job: by_hand.Job) -> dict[str, Any]:
    """Clip the gradients of a first batch, for several orders."""
    job.backward(0)
    kept = {name: parameter.grad.clone() for name, parameter in job.model.named_parameters()}
    result: dict[str, Any] = {"norms": {}, "off": {}, "scaled_off": {}}
    for order in ORDERS:
        limit = 0.5 * reference(order, math.inf)[0]
        wanted, gradients = reference(order, limit)
        for name, parameter in job.model.named_parameters():
            parameter.grad = kept[name].clone()
        norm = clip_grad_norm_(job.model if order == 2.0 else job.model.parameters(), limit, order)
        scaled = [(by_hand.full(p.grad) - gradients[name]).abs().max().item() for name, p in job.model.named_parameters()]
        result["norms"][str(order)] = norm.item().hex()
        result["off"][str(order)] = abs(norm.item() / wanted - 1)
        result["scaled_off"][str(order)] = max(scaled)
    result["partial"] = sum(any(p.is_partial() for p in getattr(g, "placements", ())) for g in kept.values())
    return result


def made_up(context: Any) -> dict[str, Any]:
    """Gradients over many meshes on 2 replicas * 2 shards * 2 tp ranks; uneven and empty shards, dtypes of 16 and 64 bits."""
    torch.manual_seed(0)
    mesh = context.mesh
    meshes = {
        "plain": None,
        "fsdp": (mesh["dp_replicate", "fsdp"], [Replicate(), Shard(0)]),
        "fsdp_tp": (mesh["dp_replicate", "fsdp", "tp"], [Replicate(), Shard(0), Shard(1)]),
        "fsdp_tp_replicated": (mesh["dp_replicate", "fsdp", "tp"], [Replicate(), Shard(0), Replicate()]),
        "tp": (mesh["tp"], [Shard(1)]),
        "tp_replicated": (mesh["tp"], [Replicate()]),
        "ep": (mesh["ep"], [Shard(0)]),
        "experts": (mesh["dp_replicate", "efsdp", "ep"], [Replicate(), Shard(1), Shard(0)]),
    }
    ours, theirs = [], []
    for rows, dtype in ((5, torch.float32), (1, torch.float32), (4, torch.bfloat16), (3, torch.float64)):
        for place in meshes.values():
            whole = torch.randn(rows, 3).to(dtype)
            theirs.append(nn.Parameter(torch.zeros(rows, 3)))
            theirs[-1].grad = whole.float().clone()  # a replicated DTensor may share its memory
            ours.append(nn.Parameter(distribute_tensor(torch.zeros_like(whole), *place) if place else torch.zeros_like(whole)))
            ours[-1].grad = distribute_tensor(whole, *place) if place else whole.clone()
    whole = torch.randn(4, 3)
    theirs.append(nn.Parameter(torch.zeros(4, 3)))
    theirs[-1].grad = whole
    summed = nn.Parameter(distribute_tensor(torch.zeros(4, 3), mesh["tp"], [Replicate()]))
    summed.grad = DTensor.from_local(whole * (0.25, 0.75)[context.coordinate["tp"]], mesh["tp"], [Partial()])
    ours += [summed, nn.Parameter(torch.ones(2)), ours[0]]  # one without a gradient, one that comes twice
    result = {}
    for order in ORDERS:
        wanted = torch.nn.utils.clip_grad_norm_(theirs, math.inf, order).item()
        result[str(order)] = abs(clip_grad_norm_(iter(ours), math.inf, order).item() / wanted - 1)
    wanted = torch.nn.utils.clip_grad_norm_(theirs, 1.0).item()
    clip_grad_norm_(ours, 1.0)
    off = {torch.bfloat16: [0.0], torch.float32: [0.0], torch.float64: [0.0]}
    for our, their in zip(ours, theirs):
        off[our.dtype].append((by_hand.full(our.grad).float() - their.grad).abs().max().item())
    result["scaled_off"] = max(off[torch.float32] + off[torch.float64])
    result["scaled_off_16"] = max(off[torch.bfloat16]) * 2**-12  # an element of 1 is rounded to 8 bits there
    return result


def odd_ones(context: Any) -> dict[str, Any]:
    """Ranks without parameters, and one whose gradient is not finite."""
    parameter = nn.Parameter(torch.zeros(2))
    result: dict[str, Any] = {"nothing": clip_grad_norm_([], 1.0).item(), "no_gradient": clip_grad_norm_(parameter, 1.0).item()}
    last_stage = context.coordinate["pp"] == context.topology.pp - 1
    parameter.grad = torch.tensor([3.0, 4.0])
    result["one_stage"] = clip_grad_norm_([parameter] if last_stage else [], 1.0).item()
    for order in (2.0, math.inf):
        for bad in (math.nan, math.inf):
            parameter.grad = torch.tensor([1.0, bad])
            mine = [parameter] if last_stage else []
            result[f"{bad} {order}"] = str(clip_grad_norm_(mine, math.inf, order).item())
            parameter.grad = torch.tensor([1.0, bad])
            try:
                clip_grad_norm_(mine, 1.0, order, error_if_nonfinite=True)
            except RuntimeError as error:
                result[f"{bad} {order} told"] = str(error)
            result[f"{bad} {order} kept"] = parameter.grad[0].item() == 1.0
    return result


def losses(context: Any) -> dict[str, Any]:
    """Means over what the ranks of ``dp_cp`` say."""
    at = context.topology.index("dp_cp", context.rank)
    half = torch.tensor(float(at), dtype=torch.bfloat16, requires_grad=True)
    return {
        "index": at,
        "mean": average_loss(torch.tensor(float(at))).item(),
        "half": [average_loss(half).item(), str(average_loss(half).dtype), average_loss(half).requires_grad],
        "number": average_loss(float(at)).item(),
        "weighted": average_loss(torch.tensor(float(at)), weight=at).item(),
        "left_out": average_loss(torch.tensor(math.nan if at == 0 else 1.0), weight=torch.tensor(min(at, 1))).item(),
        "all_left_out": str(average_loss(1.0, weight=0).item()),
    }


def report(layouts: dict[str, Any]) -> dict[str, Any]:
    """On each layout given as ``{name: [config, options of the job]}``."""
    found: dict[str, Any] = {}
    for name, (config, options) in layouts.items():
        with parallel_context(config) as context:
            if options.pop("made_up", False):
                found[name] = made_up(context)
                continue
            job = by_hand.Job(context, **options)
            loss = average_loss(job.backward(0)).item()
            model = by_hand.make()
            tokens, targets = by_hand.batch(0)
            found[name] = clip(job) | {"loss_off": abs(loss - by_hand.loss_of(model(tokens), targets).item())}
            found[name] |= {"odd": odd_ones(context), "losses": losses(context), "dp_rank": context.dp_rank}
            found[name] |= {"seed": seed_for(7), "samples": list(distributed_sampler(range(10), seed=3))}
            del job, model
    return found
