"""One tree of modules out of the stages of a rank, with the names of the whole model."""

from collections.abc import Iterable

from torch import nn

from .stages import Unit
from .stand_ins import StandIn

__all__ = ["adopt"]


def adopt(tree: nn.Module, part: nn.Module, mine: Iterable[Unit], units: Iterable[Unit]) -> None:
    """Hang the units of a stage into a tree, and what belongs to no unit: buffers and modules without parameters.

    The modules are shared with the stage, not copied, so the tree sees whatever training does to them.
    """
    kept = {unit.name for unit in mine}
    others = {unit.name for unit in units} - kept
    persistent = set(part.state_dict())
    _adopt(tree, part, "", kept, others, persistent)


def _adopt(tree: nn.Module, part: nn.Module, prefix: str, kept: set[str], others: set[str], persistent: set[str]) -> None:
    for name, parameter in part.named_parameters(recurse=False):
        tree.register_parameter(name, parameter)
    for name, buffer in part.named_buffers(recurse=False):
        if not hasattr(tree, name):
            tree.register_buffer(name, buffer, persistent=f"{prefix}{name}" in persistent)
    for name, child in part.named_children():
        path = f"{prefix}{name}"
        if path in kept:
            tree.register_module(name, child)
        elif any(unit.startswith(f"{path}.") for unit in kept | others):
            if name not in tree._modules:
                tree.register_module(name, nn.Module())
            _adopt(tree.get_submodule(name), child, f"{path}.", kept, others, persistent)
        elif not isinstance(child, StandIn) and name not in tree._modules:
            tree.register_module(name, child)
