"""Training a small GPT under any layout: what ``train.py``, ``long_context.py`` and ``moe.py`` run.

The global batch and the first weights depend on ``train.seed`` alone, so the loss is the same under every layout up to float32
rounding.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from hydra.utils import to_absolute_path
from omegaconf import DictConfig
from torch import Tensor, nn

import hydra_parallelism
import text
from model import GPT

try:
    from tqdm import tqdm
    from tqdm.contrib.logging import logging_redirect_tqdm
except ImportError:  # the log lines are enough
    tqdm = None

logger = logging.getLogger(__name__)


def train(cfg: DictConfig, make: Callable[..., nn.Module] = GPT) -> dict[str, float]:
    """Train, and return numbers for sweeps: the mean loss of the last step, and tokens per second, both over all ranks.

    ``make(vocab, **cfg.model)`` makes the model.
    """
    context = hydra_parallelism.current()
    check(cfg)
    source = text.load(cfg.data.path and to_absolute_path(cfg.data.path), cfg.model.seq_len)
    torch.manual_seed(cfg.train.seed)
    model = hydra_parallelism.parallelize(make(text.VOCAB, **cfg.model).to(context.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.train.lr)
    # The gradients of float16 underflow unless the loss is scaled up; disabled, the scaler passes everything through.
    half = context.config.fsdp.mixed_precision
    scaler = torch.amp.GradScaler(context.device.type, enabled=half is not None and half.name == "fp16")
    share = {"local_batch": cfg.train.local_batch_size, "dp_rank": context.dp_rank, "dp_world_size": context.dp_world_size}
    last, steps = float("nan"), cfg.train.steps
    began = time.perf_counter()
    for step in progress(steps, context.rank):
        if step == 1:  # the first step pays for allocations and for connections between ranks
            began = time.perf_counter()
        windows = text.batch(source, seed=cfg.train.seed, step=step, seq_len=cfg.model.seq_len, **share).to(context.device)
        loss = update(model, optimizer, scaler, windows)
        if (step + 1) % cfg.train.log_every == 0 or step in (0, steps - 1):
            last = hydra_parallelism.average_loss(loss).item()
            if context.rank == 0:
                logger.info("step %d/%d loss %.4f", step + 1, steps, last)
    tokens = max(steps - 1, 1) * cfg.train.batch_size * cfg.model.seq_len
    return {"loss": last, "tokens_per_s": tokens / (time.perf_counter() - began)}


def check(cfg: DictConfig) -> None:
    """Refuse numbers that make no run, before anything is built.

    Raises:
        ValueError: A number of steps or windows below 1.
    """
    for name in ("steps", "log_every", "batch_size", "local_batch_size"):  # the last one divides batch_size, or says why not
        if cfg.train[name] < 1:
            raise ValueError(f"train.{name}={cfg.train[name]} must be at least 1")


def update(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, windows: Tensor) -> Tensor:
    """One step of the optimizer; returns this rank's mean loss before it."""
    optimizer.zero_grad()
    positions = torch.arange(windows.shape[1] - 1, device=windows.device)[None]
    # This rank's piece of the sequences: all of them unless the layout has a ring or ulysses axis.
    inputs, targets, positions = hydra_parallelism.shard_sequence(windows[:, :-1], windows[:, 1:], positions)
    # The same call whether the model is cut into pipeline stages or not.
    scaled = hydra_parallelism.forward_backward(model, (inputs, positions), targets, lambda *pair: scaler.scale(loss_of(*pair)))
    loss = scaled / scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return loss


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def progress(steps: int, rank: int) -> Iterator[int]:
    """Count the steps, with a bar on rank 0 when its stderr is a terminal."""
    if tqdm is None or rank != 0 or not sys.stderr.isatty():
        yield from range(steps)
        return
    with logging_redirect_tqdm():  # log lines go above the bar, not into it
        yield from tqdm(range(steps), unit="step")
