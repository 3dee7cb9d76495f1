"""Training a small GPT under DDP, FSDP or HSDP: what ``train.py`` runs.

The parallelism is applied by hand, to show how little the meshes leave to write. The global batch and the first weights depend
on ``train.seed`` alone, so the loss is the same under every layout up to float32 rounding.
"""

import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from hydra.utils import to_absolute_path
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import hydra_parallelism
import text
from model import GPT

try:
    from tqdm import tqdm
    from tqdm.contrib.logging import logging_redirect_tqdm
except ImportError:  # the log lines are enough
    tqdm = None

logger = logging.getLogger(__name__)

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NOT_APPLIED = {
    "pp": "pp_size",
    "cfg": "cfg_parallel",
    "ring": "context_parallel.ring_degree",
    "ulysses": "context_parallel.ulysses_degree",
    "ep": "ep_size",
}
"""Axis -> the key that sets it, for the axes that this example has no use for."""


def train(cfg: DictConfig) -> dict[str, float]:
    """Train, and return numbers for sweeps: the mean loss of the last step, and tokens per second, both over all ranks."""
    context = hydra_parallelism.current()
    check(cfg, context)
    source = text.load(cfg.data.path and to_absolute_path(cfg.data.path), cfg.model.seq_len)
    torch.manual_seed(cfg.train.seed)
    model = distribute(GPT(text.VOCAB, **cfg.model).to(context.device), cfg.parallelism.fsdp, context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.train.lr)
    # The gradients of float16 underflow unless the loss is scaled up; disabled, the scaler passes everything through.
    half = context.topology.is_sharded and _compute_dtype(cfg.parallelism.fsdp) is torch.float16
    scaler = torch.amp.GradScaler(context.device.type, enabled=half)
    share = {"local_batch": cfg.train.local_batch_size, "dp_rank": context.dp_rank, "dp_world_size": context.dp_world_size}
    last, steps = float("nan"), cfg.train.steps
    began = time.perf_counter()
    for step in progress(steps, context.rank):
        if step == 1:  # the first step pays for allocations and for connections between ranks
            began = time.perf_counter()
        windows = text.batch(source, seed=cfg.train.seed, step=step, seq_len=cfg.model.seq_len, **share).to(context.device)
        loss = update(model, optimizer, scaler, windows)
        if (step + 1) % cfg.train.log_every == 0 or step in (0, steps - 1):
            last = mean_over_dp(loss, context)
            if context.rank == 0:
                logger.info("step %d/%d loss %.4f", step + 1, steps, last)
    tokens = max(steps - 1, 1) * cfg.train.batch_size * cfg.model.seq_len
    return {"loss": last, "tokens_per_s": tokens / (time.perf_counter() - began)}


def check(cfg: DictConfig, context: Any) -> None:
    """Refuse what would otherwise be ignored, before anything is built.

    Raises:
        hydra_parallelism.ConfigurationError: An axis, or a wrapping policy, that this example does not apply.
        ValueError: A number of steps or windows below 1.
    """
    degrees, policy = context.topology.degrees(), cfg.parallelism.fsdp
    refused = ", ".join(f"{key}={degrees[axis]}" for axis, key in _NOT_APPLIED.items() if degrees[axis] > 1)
    if refused:
        raise hydra_parallelism.ConfigurationError(
            f"examples/train.py shards data axes only: {refused} is not applied here\n"
            "  try: parallelism=ddp, parallelism=fsdp or parallelism=hsdp"
        )
    if context.rank == 0 and degrees["tp"] > 1:
        logger.warning("the model is not split over tp: its %d ranks do the same work", degrees["tp"])
    if policy.wrap != "auto":
        raise hydra_parallelism.ConfigurationError(
            f"examples/train.py wraps each block: parallelism.fsdp.wrap={policy.wrap} is not applied here\n"
            "  try: parallelism.fsdp.wrap=auto"
        )
    if context.rank == 0 and not context.topology.is_sharded and _asks_for_fsdp(policy):
        logger.warning("parallelism.fsdp.* has no effect: dp_shard=1, nothing is sharded")
    for name in ("steps", "log_every", "batch_size", "local_batch_size"):  # the last one divides batch_size, or says why not
        if cfg.train[name] < 1:
            raise ValueError(f"train.{name}={cfg.train[name]} must be at least 1")


def _asks_for_fsdp(policy: DictConfig) -> bool:
    return policy.mixed_precision is not None or policy.cpu_offload or not policy.reshard_after_forward


def distribute(model: GPT, policy: DictConfig, context: Any) -> nn.Module:
    """Apply the data axes: FSDP or HSDP when parameters are sharded, DDP when they are only replicated.

    Collective: call on all ranks.
    """
    if context.topology.is_sharded:
        return _shard(model, policy, context)
    if context.topology.dp_replicate > 1:
        device_ids = [context.device.index] if context.device.type == "cuda" else None
        group = context.mesh["dp_replicate"].get_group()
        return DistributedDataParallel(model, device_ids=device_ids, process_group=group)
    return model


def _shard(model: GPT, policy: DictConfig, context: Any) -> nn.Module:
    options = {
        "mesh": context.mesh["dp_replicate", "fsdp"],  # sharded over the second axis, replicated over the first
        "reshard_after_forward": policy.reshard_after_forward,
        # Pinned memory makes the copies to an accelerator asynchronous; without one there is nothing to pin for.
        "offload_policy": CPUOffloadPolicy(pin_memory=context.device.type == "cuda") if policy.cpu_offload else OffloadPolicy(),
    }
    dtype = _compute_dtype(policy)
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=precision, **options)
    # The root last: it takes the parameters that no block has taken. It alone hands float32 on, to the loss.
    return fully_shard(model, mp_policy=replace(precision, output_dtype=torch.float32), **options)


def _compute_dtype(policy: DictConfig) -> torch.dtype:
    return torch.float32 if policy.mixed_precision is None else _DTYPES[policy.mixed_precision.name]


def update(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, windows: Tensor) -> Tensor:
    """One step of the optimizer; returns this rank's mean loss before it."""
    logits = model(windows[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.detach()


def mean_over_dp(loss: Tensor, context: Any) -> float:
    """Mean of the ranks' mean losses, which is that of the global batch: the shares are equal. Collective over ``dp``."""
    total = loss.clone()
    dist.all_reduce(total, group=context.mesh["dp"].get_group())
    return total.item() / context.dp_world_size


def progress(steps: int, rank: int) -> Iterator[int]:
    """Count the steps, with a bar on rank 0 when its stderr is a terminal."""
    if tqdm is None or rank != 0 or not sys.stderr.isatty():
        yield from range(steps)
        return
    with logging_redirect_tqdm():  # log lines go above the bar, not into it
        yield from tqdm(range(steps), unit="step")
