"""One stage as torch's schedules call it: the model's own forward, entered and left in the middle.

Torch calls a stage with what the previous stage sent, and with keyword arguments that every stage is given. The inputs of the
model travel as the latter, so each stage can run the forward from its beginning; the received tensors replace arguments of
the stage's first module, and what the next stage's first module would be called with is what the stage returns.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .. import _compat
from .stand_ins import StandIn

__all__ = ["Call", "Part"]


_TENSOR = object()
_SIMPLE = (bool, int, float, str)


@dataclass(frozen=True)
class Call:
    """How to call the model, taken apart: what is cut into micro-batches, and all the rest."""

    spec: Any
    """How the arguments nest."""
    leaves: list[Any]
    """The flat arguments; those in ``cut`` are replaced for each micro-batch."""
    cut: tuple[int, ...]
    """Positions of the tensors whose dim 0 is the batch."""
    batch: int
    """Samples in the batch."""

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Call":
        """Take the arguments of a model apart; the first tensor among them says how large the batch is."""
        leaves, spec = _compat.flatten((args, kwargs))
        batch = next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim), 0)
        cut = tuple(n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == batch)
        return cls(spec, leaves, cut, batch)

    @property
    def whole(self) -> dict[str, Tensor]:
        """Keyword arguments for a schedule, which cuts them along dim 0."""
        return {f"leaf_{n}": self.leaves[n] for n in self.cut}

    @property
    def signature(self) -> Any:
        """Equal for calls that flow alike: a flag among the arguments may send them another way."""
        return (str(self.spec), *map(_describe, self.leaves))

    def rebuild(self, pieces: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments for one micro-batch."""
        leaves = [pieces.get(f"leaf_{n}", leaf) for n, leaf in enumerate(self.leaves)]
        args, kwargs = _compat.unflatten(leaves, self.spec)
        return args, kwargs

    def first(self, count: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of the first of some micro-batches."""
        return self.rebuild({f"leaf_{n}": self.leaves[n][: self.batch // count] for n in self.cut})


def _describe(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype
    return leaf if isinstance(leaf, _SIMPLE) else type(leaf)


@dataclass
class Part:
    """A stage on this rank."""

    index: int
    module: nn.Module
    entry: nn.Module | None
    """The module at which the stage begins; none for the first stage."""
    exit: StandIn | None
    """In place of the module at which the next stage begins; none for the last stage."""
    call: Call | None = None
    """The call that is being run."""
    entry_slots: tuple[int, ...] = ()
    exit_slots: tuple[int, ...] = ()
    output: tuple[Any, list[Any]] | None = None
    """Of the last stage: how its output nests, and its flat values with a mark where tensors were."""
    _inbox: tuple[Tensor, ...] = field(default=())

    def hook(self) -> None:
        """Enter and leave the forward in the middle.

        FSDP and tensor parallelism have put their hooks on already. Those on the whole stage must see what is received and
        sent, not the inputs of the model and an output that nobody reads.
        """
        self.module.register_forward_pre_hook(self._receive, with_kwargs=True)
        self.module.register_forward_hook(self._send, prepend=True)
        if self.entry is not None:
            self.entry.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
        if self.exit is not None:
            self.exit.keeps = True

    def _receive(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        assert self.call is not None
        self._inbox = tuple(_watched(tensor) for tensor in args)
        return self.call.rebuild(kwargs)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = _compat.flatten((args, kwargs))
        for slot, tensor in zip(self.entry_slots, self._inbox, strict=True):
            leaves[slot] = tensor
        self._inbox = ()
        return _compat.unflatten(leaves, spec)

    def _send(self, module: nn.Module, args: Any, output: Any) -> tuple[Tensor, ...]:
        if self.exit is None:
            leaves, spec = _compat.flatten(output)
            self.output = spec, [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        received, self.exit.received = self.exit.received, None
        assert received is not None
        return tuple(_sendable(received[slot]) for slot in self.exit_slots)

    def rebuild_output(self, tensors: Any) -> Any:
        """The model's output around the tensors that a schedule handles."""
        assert self.output is not None
        spec, rest = self.output
        found = iter((tensors,) if isinstance(tensors, Tensor) else tensors)
        return _compat.unflatten([next(found) if leaf is _TENSOR else leaf for leaf in rest], spec)


def _watched(tensor: Tensor) -> Tensor:
    """A received tensor whose gradient can be sent back, which takes contiguous memory."""
    if tensor.requires_grad:
        tensor = tensor.view_as(tensor)  # the buffer is used again and again, and would collect hooks
        tensor.register_hook(torch.Tensor.contiguous)  # type: ignore[no-untyped-call]
    return tensor


def _sendable(tensor: Tensor) -> Tensor:
    """Contiguous, and no view: zero-bubble schedules detach what they have sent in place."""
    tensor = tensor.contiguous()
    return tensor.clone() if _compat.is_view(tensor) else tensor
