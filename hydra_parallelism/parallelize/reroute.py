"""The context axes inside a model: each rank runs it on its piece of the sequence, and its attention still sees the whole.

While the model's forward runs, a call of ``F.scaled_dot_product_attention`` goes to :func:`hydra_parallelism.attention`, so a
model that calls it needs no change. Everything else in a transformer treats each position alone and is right on a piece; what
looks along the sequence by other means would be wrong without a word. Calls that do are known by the length of the piece and
refused: positions counted from 0, attention written out, sums and shifts along the sequence.

Under activation checkpointing backward runs a block again, outside the model's forward; so its own forward is rerouted too.
(Entered around a whole step, torch 2.13 finds other tensors in the second run than in the first.)
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .. import _compat
from ..context_parallel import attention as attending
from ..errors import ConfigurationError
from ..runtime import ParallelContext
from . import pretrained
from .mixing import find_mixing
from .recipe import Recipe

__all__ = ["Reroute", "reroute"]

_SEQUENCE = 1


def reroute(module: nn.Module, recipe: Recipe, context: ParallelContext, *, attends: bool = True) -> None:
    """Make the attention of a model or stage exact over the ranks that share its sequence, in place.

    Args:
        module: The whole model or one stage. Comes before activation checkpointing wraps its blocks.
        recipe: Which blocks will be computed again.
        context: The context with the ``ring`` and ``ulysses`` meshes.
        attends: Whether a forward without attention is a mistake. A stage may hold none.
    """
    if context.topology.cp == 1:
        return
    for _, block in recipe.present(recipe.recomputed, module):
        if block is not module:
            block.forward = partial(_run, block.forward, Reroute(type(block).__name__, recipe.key, context), False)
    for model in pretrained.find(module):
        pretrained.attach(model, context, recipe.key)
    module.forward = partial(_run, module.forward, Reroute(type(module).__name__, recipe.key, context), attends)


def _run(forward: Callable[..., Any], mode: "Reroute", attends: bool, *args: Any, **kwargs: Any) -> Any:
    before = attending.count_calls()
    mode.length = _length((args, kwargs))
    with mode:
        output = forward(*args, **kwargs)
    mode.attended |= attending.count_calls() > before
    if attends and not mode.attended:
        raise ConfigurationError(
            f"{mode.asked}, but the forward of {mode.owner} calls no attention, so each rank would see its own piece of the "
            f"sequence only\n"
            f"  try: F.scaled_dot_product_attention or hydra_parallelism.attention in the model, or {mode.remedy}"
        )
    return output


def _length(call: Any) -> int:
    """Positions in this rank's piece: dim 1 of the first tensor that has one; 0 when there is none."""
    leaves, _ = _compat.flatten(call)
    return next((leaf.shape[_SEQUENCE] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim > _SEQUENCE), 0)


class Reroute(TorchFunctionMode):
    """Hands attention on, and refuses what would mix the positions of a piece as if it were the sequence."""

    def __init__(self, owner: str, key: str, context: ParallelContext) -> None:
        super().__init__()
        degrees = {"ring_degree": context.topology.ring, "ulysses_degree": context.topology.ulysses}
        asked = {f"{key}.context_parallel.{name}": degree for name, degree in degrees.items() if degree > 1}
        self.owner, self.context, self.length, self.attended = owner, context, 0, False
        self.asked = " ".join(f"{name}={degree}" for name, degree in asked.items())
        self.remedy = " ".join(f"{name}=1" for name in asked)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch, or ours in its place."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return attending.attention(*args, **kwargs, context=self.context)
        found = find_mixing(func, args, kwargs, self.length)
        if found:
            self._refuse(func, *found)
        return func(*args, **kwargs)

    def _refuse(self, func: Any, what: str, remedy: str) -> None:
        raise ConfigurationError(
            f"{self.asked}, but the forward of {self.owner} {what} ({getattr(func, '__name__', func)}) over the "
            f"{self.length} positions of this rank's piece, which are not the first {self.length} of the sequence nor all of "
            f"it\n"
            f"  try: {remedy}, or {self.remedy}"
        )
