"""The config of ``hydra/sweeper=layouts``."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from .constraints import ModelConstraints

__all__ = ["Direction", "EstimatesConfig", "LayoutsConfig", "OnInvalid"]


class OnInvalid(Enum):
    """What to do about a layout that does not fit the processes or the model."""

    skip = "skip"
    fail = "fail"


class Direction(Enum):
    """Which objective is better."""

    minimize = "minimize"
    maximize = "maximize"


@dataclass
class EstimatesConfig:
    """What ``top`` estimates with, in the words of ``hydra-parallelism plan``."""

    model: dict[str, Any] = field(default_factory=dict)
    """The shape of the model and ``batch``, e.g. ``{hidden: 4096, layers: 32, ...}``; interpolations read the app's config."""
    world: dict[str, Any] = field(default_factory=dict)
    """The machine: ``per_node``, ``memory_gb``, ``tflops``, ...; what is not said is a DGX H100's."""


@dataclass
class LayoutsConfig:
    """A sweep over layouts: those that exist, each once, and a ranked answer at the end."""

    _target_: str = "hydra_plugins.hydra_parallelism.layouts_sweeper.LayoutsSweeper"
    params: dict[str, str] = field(default_factory=dict)
    """Swept parameters by key, as for Hydra's basic sweeper; the command line overrides them."""
    axes: Any = None
    """Axes over which to try every layout of the world, e.g. ``[dp_replicate,dp_shard,'tp_size<=8']``. ``null``: none."""
    constraints: ModelConstraints = field(default_factory=ModelConstraints)
    """Numbers of the model and its data that degrees must divide; a layout that does not is not run."""
    on_invalid: OnInvalid = OnInvalid.skip
    """``skip`` leaves out what does not fit and says why; ``fail`` starts nothing then."""
    max_jobs: int | None = None
    """Run the first so many layouts that fit. ``null``: all of them, but an enumeration of more than 1000 is refused."""
    top: int | None = None
    """Run only the best so many by estimate, best first, of those that fit into memory by estimate. ``null``: all of them."""
    plan: EstimatesConfig = field(default_factory=EstimatesConfig)
    """The model and the machine that ``top`` needs."""
    objective: str | None = None
    """Which of the numbers that the task returns to rank by; ``null`` when it returns one."""
    direction: Direction = Direction.minimize
    """``minimize`` or ``maximize`` it."""
