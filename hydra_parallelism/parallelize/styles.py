"""The tensor-parallel styles by name, and what each does to a module.

The names are those of Transformers' plans, old spellings included. ``tp`` ranks hold the slices that the table says; ``out``
and ``in`` are the dims of a ``Linear``'s output and input features.

=================================  ================  ===================  =====================================================
style                              weight split      input                output
=================================  ================  ===================  =====================================================
``colwise``                        out               whole                slice of the last dim
``colwise_gather_output``          out               whole                whole (all-gather); old name ``colwise_rep``
``colwise_vocab``                  out               whole                a DTensor split along the last dim, for a loss under
                                                                          ``torch.distributed.tensor.parallel.loss_parallel``
``packed_colwise``                 out, both halves  whole                slice of both halves, side by side
``rowwise``                        in                slice, last dim      whole (all-reduce)
``rowwise_split_input``            in                whole, sliced here   whole (all-reduce); old name ``rowwise_rep``
``packed_rowwise``                 in, both halves   slice, both halves   whole (all-reduce)
``embedding_rowwise``              vocabulary        whole                whole (all-reduce)
``embedding_colwise``              width             whole                whole (all-gather)
``replicate``                      not               whole                whole: said on purpose of a module between split ones
``replicated_with_grad_allreduce`` not               a slice              a slice; gradients of the weights summed over ``tp``
``sequence_parallel``              not               positions' slice     positions' slice; gradients summed likewise
=================================  ================  ===================  =====================================================

With ``enable_sequence_parallel`` whole outputs of row-wise modules inside blocks are reduce-scattered along the sequence
instead of all-reduced; :mod:`.sequence` says where.

A packed weight is two matrices stacked, gate and up for instance. It is stored split like any other, so that checkpoints do not
depend on ``tp``; each use gathers it over ``tp`` and takes this rank's rows of both halves. Two separate ``Linear`` layers are
cheaper.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from .. import _compat

__all__ = ["EXPERT_STYLES", "OTHER_STYLES", "STYLES", "Style", "StyleOfParameters", "build", "canonical", "own"]

_ALIASES = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}

EXPERT_STYLES = ("ep_dispatch_experts", "moe_tp_experts", "ep_router", "grouped_gemm")
"""Styles of an ``ep_plan``: see :mod:`.experts`."""

OTHER_STYLES = frozenset(
    [
        "moe_identity_expert",
        "gather",
        "local",
        "local_colwise",
        "local_rowwise",
        "local_packed_rowwise",
        "mla_kv_a_proj",
        "all_reduce",
    ]
)
"""Styles of Transformers' plans for modules of a special make."""


@dataclass(frozen=True)
class Style:
    """What must hold of a module for a style to fit it, and how the style is made."""

    make: Callable[[Placement, Placement], ParallelStyle]
    """From the placements of a whole input and a whole output: ``Replicate()``, or ``Shard(1)`` under sequence parallelism."""
    fits: tuple[type[nn.Module], ...]
    """Module classes."""
    dim: int | None = None
    """Dim of the weight that is split; ``None`` when the module is replicated."""
    pieces: int = 1
    """Matrices stacked along that dim, each of which must divide."""
    splits: Literal["", "in", "out"] = ""
    """Whether activations are slices before the module (``in``) or after it (``out``)."""


def canonical(style: str) -> str:
    """A style under its present name."""
    return _ALIASES.get(style, style)


def build(style: str, whole_in: Placement | None = None, whole_out: Placement | None = None) -> ParallelStyle:
    """The torch style of a name.

    Args:
        style: A name in :data:`STYLES`.
        whole_in: How an input that the table calls whole is placed; by default every rank has all of it.
        whole_out: The same of an output.
    """
    return STYLES[style].make(whole_in or Replicate(), whole_out or Replicate())


def own(output: Any) -> Any:
    """The same tensor, not a view of another to autograd; anything but a plain tensor as it is.

    What ``DTensor.to_local`` returns is a view. FSDP hangs its backward hook on what a unit returns, warns when that is a view,
    and would lose the hook when somebody adds to it in place.
    """
    return _Own.apply(output) if isinstance(output, Tensor) and not isinstance(output, DTensor) else output  # type: ignore[no-untyped-call]


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class StyleOfParameters(ParallelStyle):
    """A style whose module computes on plain tensors that are made of its parameters anew in each forward.

    FSDP puts the gathered parameters into the module before its forward, so they must be taken from it then. Only parameters
    that the module holds itself are concerned, those of its children are not.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            split = distribute_tensor(parameter, device_mesh, [self.placement(name)], src_data_rank=None)
            setattr(module, name, nn.Parameter(split, requires_grad=parameter.requires_grad))
        module.forward = partial(self._run, module, module.forward, device_mesh)
        return module

    def _run(self, module: nn.Module, forward: Callable[..., Any], mesh: DeviceMesh, *inputs: Any, **options: Any) -> Any:
        registered = _compat.registered_parameters(module)
        kept = dict(registered)
        try:
            for name, parameter in kept.items():
                if isinstance(parameter, DTensor):
                    # A plain tensor and no Parameter: it must stay connected with the one that FSDP reduces.
                    registered[name] = self.use(name, parameter, mesh)
            return self.finish(forward(*inputs, **options), kept, mesh)
        finally:
            registered.update(kept)

    def placement(self, name: str) -> Placement:
        """How a parameter is kept over ``tp``."""
        return Replicate()

    @abstractmethod
    def use(self, name: str, parameter: DTensor, mesh: DeviceMesh) -> Tensor:
        """What the forward computes with."""

    def finish(self, output: Any, parameters: Mapping[str, Any], mesh: DeviceMesh) -> Any:
        """What becomes of the output."""
        return output


class GradientsSummed(StyleOfParameters):
    """Replicated parameters that meet another slice of the activations on each rank: heads, or positions of the sequence.

    A rank's gradient is then one summand. Declared ``Partial``, it is summed over ``tp`` when FSDP takes it.
    """

    def use(self, name: str, parameter: DTensor, mesh: DeviceMesh) -> Tensor:
        """The whole parameter, its gradient a summand."""
        return parameter.to_local(grad_placements=[Partial()])


class Replicated(StyleOfParameters):
    """Replicated parameters that meet whole activations, plain or as the DTensor that a sequence-parallel region gathers."""

    def _run(self, module: nn.Module, forward: Callable[..., Any], mesh: DeviceMesh, *inputs: Any, **options: Any) -> Any:
        if not any(isinstance(value, DTensor) for value in (*inputs, *options.values())):
            return super()._run(module, forward, mesh, *inputs, **options)
        return forward(*inputs, **options)

    def use(self, name: str, parameter: DTensor, mesh: DeviceMesh) -> Tensor:
        """The whole parameter; its gradient is the same on all ranks already."""
        return parameter.to_local()


class _Packed(StyleOfParameters):
    """Two equal matrices stacked along the split dim. See the module docstring."""

    dim: int

    def placement(self, name: str) -> Placement:
        """Split like any other weight; a row-wise bias belongs to no slice."""
        return Shard(self.dim) if name == "weight" or self.dim == 0 else Replicate()

    def use(self, name: str, parameter: DTensor, mesh: DeviceMesh) -> Tensor:
        """Slices of both halves. The others' are used on the other ranks, so the gradient is a summand."""
        whole = parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        halves = whole.chunk(2, self.dim)
        return torch.cat([half.chunk(mesh.size(), self.dim)[mesh.get_local_rank()] for half in halves], self.dim)


class PackedColwise(_Packed):
    """Column-wise on two matrices stacked along the output features."""

    dim = 0

    def __init__(self, whole_in: Placement, _: Placement) -> None:
        self.whole = whole_in

    def _run(self, module: nn.Module, forward: Callable[..., Any], mesh: DeviceMesh, *inputs: Any, **options: Any) -> Any:
        x = inputs[0] if isinstance(inputs[0], DTensor) else DTensor.from_local(inputs[0], mesh, [self.whole])
        # Each rank's slice of the outputs contributes a summand to the gradient of the input.
        local = x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return super()._run(module, forward, mesh, local, *inputs[1:], **options)


class PackedRowwise(_Packed):
    """Row-wise on two matrices stacked along the input features."""

    dim = 1

    def __init__(self, _: Placement, whole_out: Placement) -> None:
        self.whole = whole_out

    def use(self, name: str, parameter: DTensor, mesh: DeviceMesh) -> Tensor:
        """The bias is added once, after the sum over the ranks."""
        if name == "bias":
            return torch.zeros_like(parameter.to_local())
        return super().use(name, parameter, mesh)

    def finish(self, output: Any, parameters: Mapping[str, Any], mesh: DeviceMesh) -> Any:
        """Sum over the ranks, then the bias."""
        total = DTensor.from_local(output, mesh, [Partial()]).redistribute(placements=[self.whole]).to_local()
        bias = parameters.get("bias")
        if bias is None:
            return total
        # A rank that has a slice of the sequence sees a summand of the bias's gradient, one with all of it sees the whole.
        placement = Replicate() if self.whole.is_replicate() else Partial()
        return total + bias.to_local(grad_placements=[placement])


def _colwise(whole_in: Placement, _: Placement) -> ParallelStyle:
    return ColwiseParallel(input_layouts=whole_in)


def _gathered(whole_in: Placement, whole_out: Placement) -> ParallelStyle:
    return ColwiseParallel(input_layouts=whole_in, output_layouts=whole_out)


def _vocabulary(whole_in: Placement, _: Placement) -> ParallelStyle:
    return ColwiseParallel(input_layouts=whole_in, use_local_output=False)


def _rowwise(_: Placement, whole_out: Placement) -> ParallelStyle:
    return RowwiseParallel(output_layouts=whole_out)


def _split_input(whole_in: Placement, whole_out: Placement) -> ParallelStyle:
    return RowwiseParallel(input_layouts=whole_in, output_layouts=whole_out)


def _replicated(_: Placement, __: Placement) -> ParallelStyle:
    return Replicated()


def _summed(_: Placement, __: Placement) -> ParallelStyle:
    return GradientsSummed()


_LINEAR, _EMBEDDING, _ANY = (nn.Linear,), (nn.Embedding,), (nn.Module,)

STYLES: Mapping[str, Style] = {
    "colwise": Style(_colwise, _LINEAR, dim=0, splits="out"),
    "colwise_gather_output": Style(_gathered, _LINEAR, dim=0),
    "colwise_vocab": Style(_vocabulary, _LINEAR, dim=0),
    "packed_colwise": Style(PackedColwise, _LINEAR, dim=0, pieces=2, splits="out"),
    "rowwise": Style(_rowwise, _LINEAR, dim=1, splits="in"),
    "rowwise_split_input": Style(_split_input, _LINEAR, dim=1),
    "packed_rowwise": Style(PackedRowwise, _LINEAR, dim=1, pieces=2, splits="in"),
    "embedding_rowwise": Style(_split_input, _EMBEDDING, dim=0),
    "embedding_colwise": Style(_gathered, _EMBEDDING, dim=1),
    "replicate": Style(_replicated, _ANY),
    "replicated_with_grad_allreduce": Style(_summed, _ANY),
    "sequence_parallel": Style(_summed, _ANY),
}
"""Style name -> what it is."""
