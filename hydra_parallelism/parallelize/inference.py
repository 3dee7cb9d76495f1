"""Models that only predict: with two branches over ``cfg`` nothing reduces gradients over them, so training is refused.

The weights are frozen. What is computed from the output of a frozen model has no gradient, and torch says so without saying
why; so as long as gradients are enabled the output carries a step whose backward raises our error. A gradient with respect to
an *input* passes: it is no training.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .. import _compat
from ..errors import ConfigurationError

__all__ = ["close", "refuse_training"]

_closed: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""Model -> dotted path of the config that closed it."""


def close(model: nn.Module, key: str) -> None:
    """Freeze a model, in place, and have every way to train it raise."""
    model.requires_grad_(False)
    model.register_forward_hook(_arm)
    _closed[model] = key


def refuse_training(model: nn.Module) -> None:
    """Pure.

    Raises:
        ConfigurationError: The model was parallelized for two branches.
    """
    if model in _closed:
        raise ConfigurationError(_text(_closed[model]))


def _text(key: str) -> str:
    return (
        f"{key}.cfg_parallel=2 is for inference only: nothing reduces gradients over the two branches, so each would train "
        f"weights of its own\n  try: {key}.cfg_parallel=1 {key}.inference=false to train"
    )


def _arm(model: nn.Module, inputs: Any, output: Any) -> Any:
    if not torch.is_grad_enabled():
        return output
    thawed = any(parameter.requires_grad for parameter in model.parameters())
    leaves, spec = _compat.flatten(output)
    return _compat.unflatten([_refusing(leaf, _closed[model], thawed) for leaf in leaves], spec)


def _refusing(leaf: Any, key: str, thawed: bool) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or (leaf.requires_grad and not thawed):
        return leaf
    anchor = torch.empty(0, device=leaf.device, requires_grad=True)  # without it nothing here would want a gradient
    return _Refusal.apply(leaf, anchor, key)  # type: ignore[no-untyped-call]


class _Refusal(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, anchor: Tensor, key: str) -> Tensor:
        ctx.key = key
        return leaf.clone()  # not a view: those of a function cannot be changed in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ConfigurationError(_text(ctx.key))
