"""Applying what a config declares to a model, on torch's own engines: one module per axis.

``hydra_parallelism.parallelize`` is the function. Importing anything from this package makes Python put the package itself
under that name, so the package is callable too and does the same.
"""

import sys
from types import ModuleType
from typing import Any

from torch import nn

from .order import parallelize

__all__ = ["parallelize"]


class _Package(ModuleType):
    """A package that can be called like the function it is named after."""

    def __call__(self, *args: Any, **options: Any) -> nn.Module:
        return parallelize(*args, **options)


sys.modules[__name__].__class__ = _Package
