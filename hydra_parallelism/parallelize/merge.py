"""One tree of modules out of the stages of a rank, with the names of the whole model."""

from collections.abc import Iterable

from torch import nn

from .stages import Unit
from .stand_ins import StandIn

__all__ = ["adopt"]


def adopt(tree: nn.Module, part: nn.Module, mine: Iterable[str], units: Iterable[Unit]) -> None:
    """Hang the units of a stage into a tree, and what belongs to no unit: buffers and modules without parameters.

    The modules are shared with the stage, not copied, so the tree sees whatever training does to them. What is on every stage
    is one object for all stages of a rank afterwards.
    """
    _adopt(tree, part, "", set(mine), {unit.name for unit in units}, set(part.state_dict()))


def _adopt(tree: nn.Module, part: nn.Module, prefix: str, mine: set[str], units: set[str], persistent: set[str]) -> None:
    for name, parameter in part.named_parameters(recurse=False):
        tree.register_parameter(name, parameter)
    for name, buffer in part.named_buffers(recurse=False):
        if not hasattr(tree, name):
            tree.register_buffer(name, buffer, persistent=f"{prefix}{name}" in persistent)
        setattr(part, name, getattr(tree, name))
    for name, child in part.named_children():
        path = f"{prefix}{name}"
        if path in mine:
            tree.register_module(name, child)
        elif any(unit.startswith(f"{path}.") for unit in units):
            if not hasattr(tree, name):
                tree.register_module(name, nn.Module())
            _adopt(tree.get_submodule(name), child, f"{path}.", mine, units, persistent)
        elif not isinstance(child, StandIn):
            if not hasattr(tree, name):
                tree.register_module(name, child)
            setattr(part, name, getattr(tree, name))
