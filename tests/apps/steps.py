"""Optimizers that step what a rank holds of each parameter.

SGD and AdamW treat every entry by itself, so a step on each rank's shards is the step on the whole. Over DTensors torch first
works out a placement for each kind of call on each shape, in Python: that was half of the time of a world of processes. A few
layouts of every kind still use torch's optimizers as users do.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Make = Callable[[Any], torch.optim.Optimizer]


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of it."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


class Shards:
    """``make`` over this rank's shards of the parameters, used like an optimizer over the parameters themselves."""

    def __init__(self, make: Make, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.pieces = [nn.Parameter(local(parameter)) for parameter in self.parameters]
        self.optimizer = make(self.pieces)

    def zero_grad(self) -> None:
        """Forget the gradients of the parameters."""
        for parameter in self.parameters:
            parameter.grad = None

    def step(self) -> None:
        """Step each shard by the shard of the gradient, which must be placed like the parameter."""
        for parameter, piece in zip(self.parameters, self.pieces, strict=True):
            grad = parameter.grad
            placed = [getattr(tensor, "placements", None) for tensor in (parameter, grad)]
            assert grad is None or placed[0] == placed[1], f"a parameter placed {placed[0]} has a gradient placed {placed[1]}"
            piece.data = local(parameter)  # in the memory of the parameter, wherever that is by now
            piece.grad = None if grad is None else local(grad)
        self.optimizer.step()


def optimizer(make: Make, parameters: Iterable[nn.Parameter], as_users: bool) -> Any:
    """torch's own over the parameters, or over what this rank holds of them."""
    return make(parameters) if as_users else Shards(make, parameters)
