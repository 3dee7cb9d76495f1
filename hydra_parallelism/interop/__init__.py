"""A layout in the words of other libraries, and theirs in ours.

``to_X(config)`` gives the keyword arguments of their class, ``from_X(object, mapping or path of a JSON file)`` gives a
:class:`~hydra_parallelism.ParallelismConfig`. What the other side cannot express is refused by name, never dropped. Neither
direction needs their library: only plain data passes, so importing this package imports neither torch nor any of them.
``accelerate_mesh`` and ``diffusers_mesh`` give them a running job's meshes, and those need torch.

The names below load on first use (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .accelerate import from_accelerate, to_accelerate
    from .diffusers import from_diffusers, to_diffusers
    from .lerobot import from_lerobot, to_lerobot
    from .lightning import from_lightning, to_lightning, trainer_arguments
    from .meshes import accelerate_mesh, diffusers_mesh
    from .nemo import from_nemo, to_nemo
    from .torchtitan import from_torchtitan, to_torchtitan
    from .transformers import from_transformers, to_transformers

__all__ = [
    "accelerate_mesh",
    "diffusers_mesh",
    "from_accelerate",
    "from_diffusers",
    "from_lerobot",
    "from_lightning",
    "from_nemo",
    "from_torchtitan",
    "from_transformers",
    "to_accelerate",
    "to_diffusers",
    "to_lerobot",
    "to_lightning",
    "to_nemo",
    "to_torchtitan",
    "to_transformers",
    "trainer_arguments",
]

_HOMES = {
    "accelerate": ("from_accelerate", "to_accelerate"),
    "diffusers": ("from_diffusers", "to_diffusers"),
    "lerobot": ("from_lerobot", "to_lerobot"),
    "lightning": ("from_lightning", "to_lightning", "trainer_arguments"),
    "meshes": ("accelerate_mesh", "diffusers_mesh"),
    "nemo": ("from_nemo", "to_nemo"),
    "torchtitan": ("from_torchtitan", "to_torchtitan"),
    "transformers": ("from_transformers", "to_transformers"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
