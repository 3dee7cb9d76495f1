"""What will be done to a model, settled before anything is done to it.

A recipe names modules by their fully qualified names in the whole model. A pipeline stage keeps these names, so one recipe
serves the whole model and each of its stages: a name that a stage does not hold is not its business.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn

from ..config import ParallelismConfig

__all__ = ["Recipe"]


@dataclass(frozen=True)
class Recipe:
    """The judged plan of one ``parallelize`` call."""

    config: ParallelismConfig
    """The config it was made from."""
    key: str
    """Dotted path of that config, for messages."""
    blocks: tuple[str, ...] = ()
    """The members of the repeated block list, in order."""
    units: tuple[str, ...] = ()
    """What becomes one FSDP unit beside the root, inner ones before those around them."""
    rules: Mapping[str, str] = field(default_factory=dict)
    """Module -> tensor-parallel style."""
    zones: tuple[str, ...] = ()
    """The modules that hold split weights, inside which activations may be slices: a block's attention, a block's MLP."""
    experts: Mapping[str, str] = field(default_factory=dict)
    """Module whose experts are split over ``ep`` -> how tokens get to them."""
    recomputed: tuple[str, ...] = ()
    """The blocks whose activations are computed again in backward."""

    @property
    def block_zones(self) -> tuple[str, ...]:
        """The zones that are a block or lie in one."""
        return tuple(zone for zone in self.zones if f"{zone}.".startswith(tuple(f"{block}." for block in self.blocks)))

    def present(self, names: tuple[str, ...], module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Those of some names that a model or stage holds, each module once, in the order of the names."""
        held = dict(module.named_modules(remove_duplicate=False))
        first = {id(held[name]): name for name in reversed(names) if name in held}
        return ((name, held[name]) for name in names if name in held and first[id(held[name])] == name)
