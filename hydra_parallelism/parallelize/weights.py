"""The weights a model starts with: the same on every rank, whatever each rank drew, and made real when they are on ``meta``.

Every rank cuts its slices out of its own copy of the model, so copies that differ would be stitched together into a model that
nobody made. Digests are compared first (four numbers); only when they differ are rank 0's weights and buffers sent to all, as
``DistributedDataParallel`` always does.
"""

import copy
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from .. import fake_groups
from ..errors import ConfigurationError
from ..runtime import ParallelContext

__all__ = ["Initialize", "agree", "blueprint", "fill", "judge", "refuse_unfit"]

_log = logging.getLogger(__name__)

Initialize = Callable[[nn.Module], None]
"""Fills the parameters and buffers that a module holds itself, as what one passes to ``nn.Module.apply``."""


def judge(model: nn.Module, init_weights: Initialize | None, state_dict: Mapping[str, Any] | None, key: str) -> None:
    """Refuse a model on ``meta`` that nobody can fill. Pure.

    Raises:
        ConfigurationError: Names the first module for which there is neither a value nor a way to make one.
    """
    if init_weights is not None:
        return
    for name, module in model.named_modules():
        persistent = () if state_dict is None else set(module.state_dict(keep_vars=True))
        lacking = [own for own, tensor in _own(module) if tensor.is_meta and own not in persistent]
        if lacking and not _can_reset(module):
            kind = "has no reset_parameters()" if state_dict is None else "is not in a state dict"
            raise ConfigurationError(
                f"{key}: {name or type(model).__name__} ({type(module).__name__}) is on the meta device with "
                f"{', '.join(lacking)}, and {kind}\n"
                f"  try: parallelize(model, init_weights=...), a function that fills one module as model.apply wants it"
                + ("" if state_dict is not None else ", or parallelize(model, state_dict=...)")
            )


def refuse_unfit(model: nn.Module, key: str) -> None:
    """Refuse parameters that no layout can be right for. Pure.

    Raises:
        ConfigurationError: The model has been parallelized already, holds a parameter of no dimension, or an embedding that
            changes its weight in its forward.
    """
    if any(isinstance(module, FSDPModule) for module in model.modules()) or any(
        isinstance(parameter, DTensor) for parameter in model.parameters()
    ):
        raise ConfigurationError(
            f"{key}: {type(model).__name__} has been parallelized already\n  try: parallelize(model) once, on the plain model"
        )
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            raise ConfigurationError(
                f"{key}: {name} is a parameter of no dimension, which FSDP cannot shard\n"
                f"  try: one of shape (1,), as nn.Parameter(torch.ones(1))"
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ConfigurationError(
                f"{key}: {name} has max_norm={module.max_norm:g} and scales its weight down in its forward, where there is "
                f"only a gathered copy of it\n  try: max_norm=None"
            )


def agree(model: nn.Module, context: ParallelContext, key: str, error: Exception | None = None) -> None:
    """Go on together, or refuse together; give every rank rank 0's weights if they differ.

    Collective: call on all ranks, with the whole model and with whatever keeps this rank from going on.

    Raises:
        ConfigurationError: The ranks hold models of different parameters, or another rank cannot go on; on every rank.
        Exception: ``error``, on the ranks that came with one.
    """
    made, filled = _digest_names(model), _digest_values(model) if error is None else 0
    seen = torch.tensor([made, -made, filled, -filled, error is not None], dtype=torch.int64, device=context.device)
    dist.all_reduce(seen, dist.ReduceOp.MAX)
    highest, lowest, values, low_values, failed = seen.tolist()
    if error is not None:
        raise error
    if highest != -lowest:
        raise ConfigurationError(
            f"{key}: the ranks built different models: names, shapes, dtypes or requires_grad of their parameters differ"
            f"{', and some rank refused its own' if failed else ''}\n"
            "  try: build the model from the config alone, which is the same on every rank"
        )
    if failed:
        raise ConfigurationError(f"{key}: another rank refused the model, see its message; nothing was done to it on any rank")
    if values == -low_values:
        return
    if context.rank == 0:
        _log.info("the ranks built the model with different weights (no common seed?): all take rank 0's")
    with torch.no_grad():
        for _, tensor in _tensors(model):
            if not tensor.is_meta:
                sent = tensor.detach().to(context.device)
                dist.broadcast(sent, 0)
                tensor.copy_(sent)


def blueprint(model: nn.Module) -> nn.Module | None:
    """A copy, still on ``meta``, of a model of which something is on ``meta``: what :func:`fill` makes the weights from."""
    return copy.deepcopy(model) if any(tensor.is_meta for _, tensor in _tensors(model)) else None


def fill(
    module: nn.Module,
    plan: nn.Module | None,
    context: ParallelContext,
    *,
    init_weights: Initialize | None,
    state_dict: Mapping[str, Any] | None,
    offload: bool,
) -> None:
    """Make the weights of a sharded model or stage real. Collective: call on all ranks.

    Rank 0 has or makes the whole state dict in host memory; every other rank is sent its shards of it, so the result is that of
    one process that starts from the same seed.

    Args:
        module: What was sharded, in place.
        plan: The :func:`blueprint` of the whole model; ``None`` when nothing was on ``meta``.
        context: The context.
        init_weights: Fills a module; by default its ``reset_parameters``.
        state_dict: The whole state dict; read on rank 0, may be empty elsewhere.
        offload: Whether parameters live in host memory.
    """
    if plan is None and state_dict is None:
        return
    if context.world.simulated:
        _imagine(module, context, offload)
        return
    if plan is not None:
        module.to_empty(device="cpu" if offload else context.device)
    passing: dict[str, Tensor] = {}
    values = dict(state_dict or {})
    if context.rank == 0 and plan is not None:
        made = plan.to_empty(device="cpu")
        _initialize(made, init_weights)
        if state_dict is None:
            values = made.state_dict()
        passing = {name: buffer for name, buffer in made.named_buffers() if name not in made.state_dict()}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=context.topology.pp == 1)
    set_model_state_dict(module, values if context.rank == 0 else {}, options=options)
    if plan is not None:
        _send_passing(module, plan, passing, context)


def _imagine(module: nn.Module, context: ParallelContext, offload: bool) -> None:
    """Give the parts of a simulated rank memory and some numbers: whole weights, which rank 0 would send, exist nowhere."""
    if any(tensor.is_meta for _, tensor in _tensors(module)):
        module.to_empty(device="cpu" if offload else context.device)
        for _, tensor in _tensors(module):
            fake_groups.pretend_to_receive(tensor.to_local() if isinstance(tensor, DTensor) else tensor)


def _send_passing(module: nn.Module, plan: nn.Module, passing: Mapping[str, Tensor], context: ParallelContext) -> None:
    """Buffers that no state dict holds, such as rotary frequencies, from rank 0."""
    kept = set(plan.state_dict(keep_vars=True))
    held = dict(module.named_buffers())
    for name, buffer in plan.named_buffers():
        if name not in kept:
            sent = passing[name].to(context.device) if context.rank == 0 else torch.empty_like(buffer, device=context.device)
            dist.broadcast(sent, 0)
            if name in held:
                held[name].copy_(sent)


def _initialize(model: nn.Module, init_weights: Initialize | None) -> None:
    """Fill every module, children first, as ``model.apply`` goes."""
    with torch.no_grad():
        model.apply(init_weights if init_weights is not None else _reset)


def _reset(module: nn.Module) -> None:
    if _can_reset(module):
        module.reset_parameters()  # type: ignore[operator]


def _can_reset(module: nn.Module) -> bool:
    return callable(getattr(module, "reset_parameters", None))


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _digest_names(model: nn.Module) -> int:
    said = [
        f"{name} {tuple(tensor.shape)} {tensor.dtype} {tensor.is_meta} {tensor.requires_grad}"
        for name, tensor in _tensors(model)
    ]
    return _number("\n".join(said).encode())


def _digest_values(model: nn.Module) -> int:
    """Of two sums over each tensor: cheap on any device, and as good as certain to differ for two draws of a generator."""
    sums = [torch.zeros(2, dtype=torch.float64)]
    with torch.no_grad():
        for _, tensor in _tensors(model):
            if not tensor.is_meta and tensor.numel():
                flat = tensor.detach().flatten()
                ramp = torch.linspace(1, 2, flat.numel(), device=flat.device, dtype=torch.float32)
                sums.append(torch.stack([flat.sum(dtype=torch.float64), (flat * ramp).sum(dtype=torch.float64)]).cpu())
    return _number(torch.stack(sums).numpy().tobytes())


def _number(data: bytes) -> int:
    """A digest that fits an int64 and its negative."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "big")
