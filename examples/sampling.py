"""Flow matching on the digits of scikit-learn, sampled with classifier-free guidance: what ``guided_sampling.py`` runs.

The model learns the velocity ``image - noise`` along straight lines from noise to images (Lipman et al. 2022,
https://arxiv.org/abs/2210.02747), with the class hidden from it now and then (Ho & Salimans 2022,
https://arxiv.org/abs/2207.12598). Sampling follows the guided velocity from noise to an image.
"""

import hashlib
import logging
import math
import time
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from sklearn.datasets import load_digits
from torch import Tensor, nn

import hydra_parallelism

__all__ = ["CLASSES", "Velocity", "run"]

logger = logging.getLogger(__name__)

SIDE, CLASSES = 8, 10
NO_CLASS = CLASSES
"""The number that stands for a hidden class."""


def run(cfg: DictConfig) -> dict[str, float]:
    """Train, sample, draw; returns how many samples look like their class (0 to 1), and samples per second on all ranks."""
    context = hydra_parallelism.current()
    # Products of other shapes are split over threads in other ways; with one thread a row of a batch is always the same sum.
    torch.set_num_threads(1)
    images, labels = load()
    # Training comes before parallelize: two branches are for inference. Every rank trains the same plain model on the same
    # batches, so all have the same weights without a word between them; should they not, parallelize gives all rank 0's.
    model = train(Velocity(**cfg.model).to(context.device), images.to(context.device), labels.to(context.device), cfg)
    model = hydra_parallelism.parallelize(model).eval()
    began = time.perf_counter()
    wanted = torch.arange(CLASSES, device=context.device).repeat_interleave(cfg.sample.per_class)
    # Each data rank draws samples of its own; the two ranks of a branch pair must start from the same noise.
    generator = torch.Generator().manual_seed(hydra_parallelism.seed_for(cfg.train.seed, purpose="noise"))
    noise = torch.randn(len(wanted), SIDE * SIDE, generator=generator).to(context.device)
    samples = sample(model, noise, wanted, cfg).cpu()
    seconds = time.perf_counter() - began
    agreement = hydra_parallelism.average_loss((nearest(samples, images, labels) == wanted.cpu()).float().mean()).item()
    if context.rank == 0:
        draw(samples, Path(HydraConfig.get().runtime.output_dir) / cfg.sample.picture)
        digest = hashlib.sha256(samples.numpy().tobytes()).hexdigest()[:16]
        logger.info("agreement with the wanted classes %.3f, bits of the samples %s", agreement, digest)
    return {"agreement": agreement, "samples_per_s": len(samples) * context.dp_world_size / seconds}


def load() -> tuple[Tensor, Tensor]:
    """1797 images of shape ``(64,)`` with values from -1 to 1, and their classes."""
    digits = load_digits()
    return torch.tensor(digits.data, dtype=torch.float32) / 8 - 1, torch.tensor(digits.target)


class Velocity(nn.Module):
    """A residual network: noisy images, times and classes to velocities.

    Args:
        width: Of the residual stream.
        num_blocks: How many blocks.
    """

    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", math.pi * 2.0 ** torch.arange(6), persistent=False)
        self.pixels, self.time = nn.Linear(SIDE * SIDE, width), nn.Linear(12, width)
        self.classes = nn.Embedding(CLASSES + 1, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, SIDE * SIDE)

    def forward(self, x: Tensor, time: Tensor, classes: Tensor) -> Tensor:
        """(batch, 64) of pixels at times (batch,) in classes (batch,) to (batch, 64) of velocities."""
        angles = time[:, None] * self.frequencies
        told = self.time(torch.cat([angles.sin(), angles.cos()], 1)) + self.classes(classes)
        hidden = self.pixels(x)
        for block in self.blocks:
            hidden = block(hidden, told)
        return self.head(self.norm(hidden))


class Block(nn.Module):
    """Adds to the residual stream what it makes of it and of time and class."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.told = nn.LayerNorm(width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, told: Tensor) -> Tensor:
        """All of shape (batch, width)."""
        mixed = self.norm(x) + self.told(nn.functional.silu(told))
        return x + self.down(nn.functional.silu(self.up(mixed)))


def train(model: Velocity, images: Tensor, labels: Tensor, cfg: DictConfig) -> Velocity:
    """Train in place, from the seed alone; returns the model."""
    torch.manual_seed(cfg.train.seed)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    generator = torch.Generator().manual_seed(cfg.train.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.train.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, cfg.train.steps)
    for _ in range(cfg.train.steps):
        rows = torch.randint(len(images), (cfg.train.batch_size,), generator=generator)
        noise = torch.randn(len(rows), SIDE * SIDE, generator=generator).to(images.device)
        time_ = torch.rand(len(rows), generator=generator).to(images.device)
        hidden = (torch.rand(len(rows), generator=generator) < cfg.train.drop_class).to(images.device)
        image, label = images[rows], labels[rows].masked_fill(hidden, NO_CLASS)
        predicted = model(noise + time_[:, None] * (image - noise), time_, label)
        loss = (predicted - (image - noise)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    logger.info("loss of the last of %d steps: %.4f", cfg.train.steps, loss.item())
    return model


def sample(model: nn.Module, x: Tensor, classes: Tensor, cfg: DictConfig) -> Tensor:
    """Follow the guided velocity from noise to images by Heun's method: ``(batch, 64)`` to the same."""

    def velocity(x: Tensor, at: float) -> Tensor:
        time_ = x.new_full((len(x),), at)
        unconditional = (x, time_, torch.full_like(classes, NO_CLASS))
        return hydra_parallelism.guided(model, (x, time_, classes), unconditional, cfg.sample.scale)

    step = 1 / cfg.sample.steps
    for i in range(cfg.sample.steps):
        first = velocity(x, i * step)
        x = x + step / 2 * (first + velocity(x + step * first, (i + 1) * step))
    return x


def nearest(samples: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    """The class whose mean image is nearest to each sample."""
    centers = torch.stack([images[labels == digit].mean(0) for digit in range(CLASSES)])
    return torch.cdist(samples, centers).argmin(1)


def draw(samples: Tensor, file: Path) -> None:
    """One row of images a class."""
    from matplotlib.figure import Figure  # a figure of its own needs no display

    per_class, cell = len(samples) // CLASSES, SIDE + 2
    framed = nn.functional.pad(samples.view(CLASSES, per_class, SIDE, SIDE), (1, 1, 1, 1), value=-1)
    figure = Figure(figsize=(0.6 * per_class, 0.6 * CLASSES), layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(framed.permute(0, 2, 1, 3).reshape(CLASSES * cell, per_class * cell), cmap="gray_r", vmin=-1, vmax=1)
    axes.set_yticks([cell * (i + 0.5) - 0.5 for i in range(CLASSES)], [str(i) for i in range(CLASSES)])
    axes.set_xticks([])
    figure.savefig(file, dpi=120)
