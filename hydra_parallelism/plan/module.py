"""What each rank holds of a real module: the model of a plan as the app builds it, on ``meta``, counted parameter by parameter.

The layout is judged by ``parallelize`` itself, so what that refuses is refused here, and the shapes are those that its tensor
plan, its experts, its stages and FSDP leave on a rank. Only here a plan imports torch, and only when it is asked for a module.
"""

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import ParallelismConfig
from ..errors import ConfigurationError
from ..topology import Topology
from .memory import Memory

__all__ = ["Held", "ModuleShare", "build", "of_module"]


@dataclass(frozen=True)
class Held:
    """What a rank has of one parameter."""

    name: str
    """Fully qualified, in the whole model."""
    shape: tuple[int, ...]
    """Of the shard."""
    bytes: int
    trained: bool


@dataclass(frozen=True)
class ModuleShare:
    """A module under a layout."""

    params: int
    """Of the whole module, shared ones once."""
    ranks: Mapping[int, tuple[Held, ...]]
    """Rank -> what it holds, for one rank of each stage and shard; all others hold as much as one of them."""
    topology: Topology

    def of(self, rank: int) -> tuple[Held, ...]:
        """What a rank holds."""
        return self.ranks[_twin(self.topology, rank)]

    def memory(self, config: ParallelismConfig) -> Memory:
        """Bytes of the fullest rank; gradients and Adam's two moments are of the parameters' dtype. Activations are unknown.

        What FSDP gathers is not counted either.
        """
        parameters = max(sum(each.bytes for each in held) for held in self.ranks.values())
        trained = max(sum(each.bytes for each in held if each.trained) for held in self.ranks.values())
        trained = 0 if config.inference else trained
        return Memory(parameters, trained, 2 * trained, 0.0, None, on_host=config.fsdp.cpu_offload)

    def rows(self, rank: int) -> list[dict[str, Any]]:
        """What a rank holds as plain data; what differs in the numbers of its name only, such as blocks, is one row."""
        from ..parallelize.blocks import starred

        found: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for each in self.of(rank):
            found.setdefault((starred(each.name), each.shape), []).append(each.bytes)
        return [
            {"name": name, "shape": list(shape), "count": len(sizes), "bytes": sum(sizes)}
            for (name, shape), sizes in found.items()
        ]


def build(path: str) -> Any:
    """Call ``package.module:function`` without arguments under ``torch.device("meta")``. The folder one is in comes first.

    Returns:
        The ``torch.nn.Module``.

    Raises:
        ConfigurationError: There is no such function, it fails, or it returns something else.
    """
    import torch

    name, _, function = path.partition(":")
    example = "try: model.module=package.module:function, which takes no arguments and returns a torch.nn.Module"
    sys.path.insert(0, str(Path.cwd()))
    try:
        made = getattr(importlib.import_module(name), function)
        with torch.device("meta"):
            module = made()
    except Exception as error:  # whatever the app's code raises
        raise ConfigurationError(f"model.module={path}: {type(error).__name__}: {error}\n  {example}") from error
    finally:
        sys.path.pop(0)
    if not isinstance(module, torch.nn.Module):
        raise ConfigurationError(f"model.module={path} returned {type(module).__name__}, no torch.nn.Module\n  {example}")
    return module


def of_module(module: Any, topology: Topology, config: ParallelismConfig) -> ModuleShare:
    """Say what each rank would hold of a module after ``parallelize``. Pure; the module stays as it is.

    Args:
        module: A ``torch.nn.Module`` on any device, ``meta`` included.
        topology: The layout.
        config: The policies: tensor and expert plans, what FSDP wraps, the pipeline.

    Raises:
        ConfigurationError: ``parallelize`` would refuse the module.
    """
    from ..parallelize.order import judge
    from ..parallelize.pipeline import plan_pipeline

    recipe = judge(module, config, topology)
    stages: dict[str, int] = {}
    if topology.pp > 1:
        division = plan_pipeline(module, config, topology).division
        stages = {unit: stage for stage, units in enumerate(division) for unit in units}
    ranks = sorted({_twin(topology, rank) for rank in range(topology.world_size)})
    parameters = dict(module.named_parameters())
    held = {rank: tuple(_held(parameters, recipe, stages, topology, config, rank)) for rank in ranks}
    return ModuleShare(sum(parameter.numel() for parameter in parameters.values()), held, topology)


def _twin(at: Topology, rank: int) -> int:
    """The lowest rank that holds shards of the same sizes: the same stage, the same index along ``fsdp`` and ``efsdp``."""
    mine = at.coordinate(rank)
    return at.rank(**{axis: index for axis, index in mine.items() if axis in ("pp", "dp_shard", "ring", "ulysses", "tp")})


def _held(
    parameters: Mapping[str, Any], recipe: Any, stages: Mapping[str, int], at: Topology, config: ParallelismConfig, rank: int
) -> list[Held]:
    from ..parallelize.stages import stages_of

    mine = stages_of(at.index("pp", rank), config.pipeline.schedule.name, at.pp)
    found = []
    for name, parameter in parameters.items():
        unit = max((unit for unit in stages if f"{name}.".startswith(f"{unit}.")), key=len, default=None)
        if unit is not None and stages[unit] not in mine:
            continue
        shape = _shape(name, tuple(parameter.shape), recipe, at, rank)
        size = parameter.element_size()
        for length in shape:
            size *= length
        found.append(Held(name, shape, size, parameter.requires_grad))
    return found


def _shape(name: str, shape: tuple[int, ...], recipe: Any, at: Topology, rank: int) -> tuple[int, ...]:
    """What the tensor plan or the experts, and then FSDP, leave of a parameter on a rank."""
    from ..parallelize.styles import STYLES

    owner, _, own = name.rpartition(".")
    if owner in recipe.experts:
        shape = (shape[0] // at.ep, *shape[1:])
        # Along the first dim that divides, else unevenly along the first.
        dim = next((dim for dim, length in enumerate(shape) if length % at.efsdp == 0), 0)
        return _chunk(shape, dim, at.efsdp, at.index("efsdp", rank))
    split = STYLES[recipe.rules[owner]].dim if owner in recipe.rules else None
    if split is not None and (own == "weight" or split == 0):  # the bias of a row-wise layer is whole
        shape = tuple(length // at.tp if dim == split else length for dim, length in enumerate(shape))
    return _chunk(shape, 0, at.fsdp, at.index("fsdp", rank))


def _chunk(shape: tuple[int, ...], dim: int, count: int, index: int) -> tuple[int, ...]:
    """One of the pieces that ``torch.chunk`` makes: larger ones as long as they last, then what is left, then nothing."""
    size = -(-shape[dim] // count)
    mine = max(0, min(size, shape[dim] - index * size))
    return (*shape[:dim], mine, *shape[dim + 1 :])
