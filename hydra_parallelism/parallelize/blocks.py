"""Finding things in a model by name: its repeated block list, and the modules that a pattern means.

A pattern is a dotted module name in which ``*`` stands for exactly one part, and other wildcards of ``fnmatch`` work within
a part: ``layers.*.attn.[qkv]_proj``. Everything here looks and changes nothing.
"""

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

__all__ = ["find_block_list", "find_blocks", "match", "matches", "near", "starred"]

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def find_block_list(model: nn.Module) -> str | None:
    """Name of the model's repeated block list, or ``None`` when it has none.

    That is the ``ModuleList``, ``ModuleDict`` or ``Sequential`` whose members are all of one class that is no leaf, and hold
    the most parameters together; of two that hold equally many, the outer one. Lists of several members go before those of
    one, which may be mere wrappers. A model that is such a list itself has the name ``""``.
    """
    best, most = None, (False, 0)
    for name, module in model.named_modules():
        if isinstance(module, _LISTS) and _is_repeated(module):
            held = (len(module) > 1, sum(parameter.numel() for parameter in module.parameters()))
            if held > most:
                best, most = name, held
    return best


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Name and module of every block of the repeated block list, in order; empty when the model has none."""
    name = find_block_list(model)
    if name is None:
        return []
    prefix = f"{name}." if name else ""
    return [(f"{prefix}{child}", block) for child, block in model.get_submodule(name).named_children()]


def matches(pattern: str, name: str) -> bool:
    """Whether a module name is one that a pattern means."""
    wanted, parts = pattern.split("."), name.split(".")
    return len(wanted) == len(parts) and all(map(fnmatchcase, parts, wanted))


def match(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a pattern means, in the order given."""
    return [name for name in names if matches(pattern, name)]


def near(pattern: str, names: Iterable[str], limit: int = 3) -> list[str]:
    """Names that somebody may have meant who wrote a pattern that matches nothing, numbers written as ``*``."""
    seen = list(dict.fromkeys(starred(name) for name in names if name))
    return difflib.get_close_matches(starred(pattern), seen, n=limit, cutoff=0.5)


def _is_repeated(container: nn.Module) -> bool:
    members = list(container.children())
    same = len({type(member) for member in members}) == 1 and len(members) >= (2 if isinstance(container, nn.Sequential) else 1)
    return same and any(True for _ in members[0].children()) and all(_has_parameters(member) for member in members)


def _has_parameters(module: nn.Module) -> bool:
    return next(iter(module.parameters()), None) is not None


def starred(name: str) -> str:
    """The pattern for a module and its like in the other blocks: numbers become ``*``."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
