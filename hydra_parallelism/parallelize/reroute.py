"""The context axes inside a model: each rank runs it on its piece of the sequence, and its attention still sees the whole.

While the model's forward runs, a call of ``F.scaled_dot_product_attention`` goes to :func:`hydra_parallelism.attention`, so a
model that calls it needs no change. Everything else in a transformer treats each position alone and is right on a piece; what
looks along the sequence by other means would be wrong without a word: positions counted from 0, attention written out, sums
and shifts along the sequence. So calls that are known to do it are refused as they come (:mod:`.mixing`), and the first and the
16th call of a whole model are preceded by a trial (:mod:`.trial`). A pipeline's stages cannot be tried alone.

Under activation checkpointing backward runs a block again, outside the model's forward; so its own forward is rerouted too.
(Entered around a whole step, torch 2.13 finds other tensors in the second run than in the first.)
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from ..context_parallel import attention as attending
from ..errors import ConfigurationError
from ..runtime import ParallelContext, current
from . import pretrained
from .mixing import find_mixing
from .recipe import Recipe
from .trial import keeps_positions_apart

__all__ = ["Reroute", "reroute"]

_TRIALS = (1, 16)
"""Calls of a model before which it is tried: what is zero at first (a table, a gate) hides what comes after it."""


def reroute(module: nn.Module, recipe: Recipe, context: ParallelContext, *, whole: bool = True) -> None:
    """Make the attention of a model or stage exact over the ranks that share its sequence, in place.

    Args:
        module: The whole model or one stage. Comes before activation checkpointing wraps its blocks.
        recipe: Which blocks will be computed again.
        context: The context with the ``ring`` and ``ulysses`` meshes.
        whole: Whether this is a whole model, which can be tried alone and without attention is a mistake.
    """
    if context.topology.cp == 1:
        return
    for _, block in recipe.present(recipe.recomputed, module):
        if block is not module:
            block.forward = partial(_rerouted, block.forward, Reroute(block, recipe, context, watches=False))
    for model in pretrained.find(module):
        pretrained.attach(model, context, recipe.key)
    mode = Reroute(module, recipe, context)
    module.forward = partial(_tried if whole else _rerouted, module.forward, mode)


def _rerouted(forward: Callable[..., Any], mode: "Reroute", *args: Any, **kwargs: Any) -> Any:
    with mode:
        return forward(*args, **kwargs)


def _tried(forward: Callable[..., Any], mode: "Reroute", *args: Any, **kwargs: Any) -> Any:
    """The same, judged now and then. Collective over the world in these calls: one all-reduce of a number."""
    mode.refuse_stranger()
    mode.calls += 1
    if mode.calls not in _TRIALS:
        return _rerouted(forward, mode, *args, **kwargs)
    before = attending.count_calls()
    run = partial(_rerouted, forward, mode)
    if not mode.context.world.simulated:  # there gathers repeat this rank's own piece, which moves positions
        apart = keeps_positions_apart(mode.module, run, args, kwargs, attending.piece_lengths(), mode.is_narrow)
        wrong = torch.tensor([apart is False], dtype=torch.int, device=mode.context.device)
        dist.all_reduce(wrong, dist.ReduceOp.MAX)
        if wrong.item():
            mode.refuse()
    output = run(*args, **kwargs)
    if attending.count_calls() == before:
        raise ConfigurationError(
            f"{mode.asked}, but the forward of {mode.owner} calls no attention, so each rank would see its own piece of the "
            f"sequence only\n"
            f"  try: F.scaled_dot_product_attention or hydra_parallelism.attention in the model, or {mode.remedy}"
        )
    return output


class Reroute(TorchFunctionMode):
    """Hands attention on, and finds what would mix the positions of a piece as if it were the sequence."""

    def __init__(self, module: nn.Module, recipe: Recipe, context: ParallelContext, *, watches: bool = True) -> None:
        super().__init__()
        degrees = {"ring_degree": context.topology.ring, "ulysses_degree": context.topology.ulysses}
        asked = {f"{recipe.key}.context_parallel.{name}": degree for name, degree in degrees.items() if degree > 1}
        self.module, self.context = module, context
        self.owner = type(module).__name__
        self.asked = " ".join(f"{name}={degree}" for name, degree in asked.items())
        self.remedy = " ".join(f"{name}=1" for name in asked)
        self.is_narrow = recipe.config.fsdp.mixed_precision is not None or any(
            p.dtype.itemsize < 4 for p in module.parameters()
        )
        self.calls = 0
        self._watches = watches

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch, or ours in its place."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return attending.attention(*args, **kwargs, context=self.context)
        if self._watches:
            self._watch(func, args, kwargs)
        return func(*args, **kwargs)

    def _watch(self, func: Any, args: Any, kwargs: Any) -> None:
        for length in attending.piece_lengths():
            found = find_mixing(func, args, kwargs, length)
            if found and not _is_internal():
                what, remedy = found
                raise ConfigurationError(
                    f"{self.asked}, but the forward of {self.owner} {what} ({getattr(func, '__name__', func)}) over the "
                    f"{length} positions of this rank's piece, which are not the first {length} of the sequence nor all of it\n"
                    f"  at {_place()}\n"
                    f"  try: {remedy}, or {self.remedy}; if that is a width which happens to be {length}, another length"
                )

    def refuse(self) -> None:
        """Say what a trial has shown."""
        raise ConfigurationError(
            f"{self.asked}, but what the forward of {self.owner} makes of a position depends on others, or on where in this "
            f"rank's piece it stands, by other means than attention\n"
            f"  try: positions cut with the tokens (hydra_parallelism.shard_sequence), what mixes positions outside the model, "
            f"or {self.remedy}"
        )

    def refuse_stranger(self) -> None:
        """A model keeps the ranks that it was made for."""
        if current() is not self.context:
            raise ConfigurationError(
                f"{self.asked}: {self.owner} was parallelized in a context that has ended\n"
                f"  try: parallelize(model) again, on a new model, in each context"
            )


def _callers() -> Iterator[FrameType]:
    """Frames around a call of torch, innermost first, without those of this module."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _name(frame) != __name__:
            yield frame
        frame = frame.f_back


def _name(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_internal() -> bool:
    """Whether this library, FSDP or a tensor-parallel style has called, whose slices are not the model's."""
    inside = takewhile(lambda frame: _name(frame).partition(".")[0] in ("torch", "hydra_parallelism"), _callers())
    first = next(inside, None)
    if first is None:
        return False
    return _name(first).startswith("hydra_parallelism") or any(
        _name(frame).startswith("torch.distributed") for frame in (first, *inside)
    )


def _place() -> str:
    """File and line of the model that called torch."""
    outside = (frame for frame in _callers() if _name(frame).partition(".")[0] not in ("torch", "hydra_parallelism"))
    frame = next(outside, None)
    return "a line of torch" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
