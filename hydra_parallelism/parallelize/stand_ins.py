"""Stand-ins for the modules that another stage holds, and following what flows between the units of a model.

Every stage runs the model's own ``forward``, so that masks, positions and whatever else it works out on the way are right on
every stage and no model has to be rewritten. The units of other stages are replaced by a :class:`StandIn`: it has no parameters
and returns zeros of the shapes that the real module would return, found once per signature on the meta device.

That is right only if nothing that such a unit really computes reaches this stage by another way than the pipeline. Whether it
does is checked before the first step, on every rank alike and without communication: the forward runs once with stand-ins
alone, each of whose outputs is a :class:`Traced` tensor that remembers where it came from.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import _compat
from . import packed

__all__ = ["Judge", "SIMPLE", "StandIn", "Traced", "Untraceable", "meta_copy", "sources", "trace"]

Visit = Callable[[str, list[Any]], None]
"""Told the name of a unit and the flat arguments of its call."""

Judge = Callable[[tuple[Any, ...], dict[str, Any]], None]
"""Told the arguments of a call."""

SIMPLE = (type(None), bool, int, float, str, torch.dtype, torch.device)
"""Types of values that a call may have beside tensors and that say all about themselves."""
_LIKE = {
    *(torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like, torch.rand_like, torch.randn_like),
    *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty, Tensor.new_tensor),
}
"""What takes a shape, dtype or device from a tensor and nothing of its values."""


_DECISIONS = {Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.item, Tensor.tolist}
"""What takes values out of a tensor, for the forward to decide by."""


class Untraceable(RuntimeError):
    """A forward does what cannot be followed from unit to unit."""


class Traced(Tensor):
    """A tensor that remembers from the outputs of which units it was computed."""

    origins: frozenset[str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and pass the origins of its operands on to its results."""
        origins = frozenset() if func in _LIKE else sources(_compat.flatten((args, kwargs))[0])
        if origins:
            _refuse_untraceable(func, args, origins)
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if origins and _writes(func):
            _mark(args[0], origins | sources([args[0]]))
        leaves, spec = _compat.flatten(result)
        marked = [_mark(leaf, origins) if isinstance(leaf, Traced) else leaf for leaf in leaves]
        return _compat.unflatten(marked, spec) if any(isinstance(leaf, Traced) for leaf in leaves) else result


def _refuse_untraceable(func: Any, args: Any, origins: frozenset[str]) -> None:
    made = ", ".join(sorted(origins)[:3])
    if func in _DECISIONS:
        raise Untraceable(f"it decides by the values of what {made} computes, which the other stages do not have")
    if _writes(func) and not isinstance(args[0], Traced):
        raise Untraceable(f"it writes what {made} computes into a tensor in place, which hides where that goes")


def _writes(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def trace(tensor: Tensor, origin: str) -> Traced:
    """Mark a tensor as the output of a unit."""
    traced: Traced = _mark(tensor.as_subclass(Traced), frozenset({origin}))
    return traced


def sources(leaves: list[Any]) -> frozenset[str]:
    """The units from whose outputs any of some values was computed."""
    return frozenset().union(*(getattr(leaf, "origins", ()) for leaf in leaves if isinstance(leaf, Traced)))


def _mark(tensor: Any, origins: frozenset[str]) -> Any:
    if not origins:
        return tensor.as_subclass(Tensor)
    tensor.origins = origins
    return tensor


def meta_copy(module: nn.Module) -> nn.Module:
    """A copy of a module without storage, which can still be asked what shapes it returns."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    copied = copy.deepcopy(module, memo)
    for inner in copied.modules():
        if packed.count(inner):
            inner.forward = partial(_mixed, inner.forward)
    return copied


def _mixed(forward: Callable[..., Tensor], hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """What a module of stacked experts returns on meta: most ask which experts have tokens, which is nowhere written there."""
    try:
        return forward(hidden, index, weights)
    except RuntimeError:  # torch's word for both: not on meta, and no values there
        return torch.empty_like(hidden)


class StandIn(nn.Module):
    """Takes the place of a unit that another stage holds: the same call, the same shapes, no parameters, zeros."""

    def __init__(self, name: str, original: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.name = name
        self.device = device
        self.visit: Visit | None = None
        """Set while the flow of the model is traced."""
        self.judge: Judge | None = None
        """Asked, while the flow is traced, whether it can be called so; raises if not."""
        self.received: list[Any] | None = None
        """Flat arguments of the last call, kept where the next stage begins."""
        self.keeps = False
        self._original = (original,)  # in a tuple, so that it is no submodule
        self._known: dict[Any, tuple[list[Any], Any]] = {}

    def __getattr__(self, name: str) -> Any:
        """What the model asks a block for, such as its ``attention_type``, the original answers."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_original" not in self.__dict__:
                raise
            value = getattr(self._original[0], name)
        if isinstance(value, Tensor):
            raise Untraceable(f"it reads {self.name}.{name} itself, which another stage holds")
        return value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Zeros in the shapes of what the original would return."""
        leaves, spec = _compat.flatten((args, kwargs))
        if self.visit is not None:
            self.visit(self.name, leaves)
            if self.judge is not None:
                self.judge(args, kwargs)
        if self.keeps:
            self.received = leaves
        shapes, out_spec = self._shapes(leaves, spec)
        return _compat.unflatten([self._zeros(shape) for shape in shapes], out_spec)

    def _shapes(self, leaves: list[Any], spec: Any) -> tuple[list[Any], Any]:
        simple = all(isinstance(leaf, (Tensor, *SIMPLE)) for leaf in leaves)
        if not simple:  # a cache, say: what comes out may depend on what is in it
            return self._ask(leaves, spec)
        key = (self.training, str(spec), *map(_describe, leaves))
        if key not in self._known:
            self._known[key] = self._ask(leaves, spec)
        return self._known[key]

    def _ask(self, leaves: list[Any], spec: Any) -> tuple[list[Any], Any]:
        """Run the original on the meta device."""
        args, kwargs = _compat.unflatten([_to_meta(leaf) for leaf in leaves], spec)
        try:
            with torch.no_grad():
                output = self._original[0].train(self.training)(*args, **kwargs)
        except Exception as error:
            raise RuntimeError(
                f"the pipeline needs the output shape of {self.name} where another stage holds it, but "
                f"{type(self._original[0]).__name__} does not run on the meta device: {error}"
            ) from error
        return _compat.flatten(output)

    def _zeros(self, shape: Any) -> Any:
        if not isinstance(shape, Tensor):
            return shape
        # One zero seen through strides of 0: logits of a large vocabulary cost nothing where nobody reads them.
        zeros = torch.zeros((), dtype=shape.dtype, device=self.device).expand(shape.shape)
        return trace(zeros, self.name) if self.visit is not None else zeros


def _describe(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf)


def _to_meta(leaf: Any) -> Any:
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, Tensor) else leaf
