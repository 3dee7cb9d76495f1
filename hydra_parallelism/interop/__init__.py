"""A layout in the words of other libraries, and theirs in ours.

``to_X(config)`` gives the keyword arguments of their class, ``from_X(object, mapping or path of a JSON file)`` gives a
:class:`~hydra_parallelism.ParallelismConfig`. What the other side cannot express is refused by name, never dropped. Neither
direction needs their library: only plain data passes, so importing this package imports neither torch nor any of them.

The names below load on first use (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .lerobot import from_lerobot, to_lerobot
    from .transformers import from_transformers, to_transformers

__all__ = [
    "from_lerobot",
    "from_transformers",
    "to_lerobot",
    "to_transformers",
]

_HOMES = {
    "lerobot": ("from_lerobot", "to_lerobot"),
    "transformers": ("from_transformers", "to_transformers"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
