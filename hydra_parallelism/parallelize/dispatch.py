"""What happens to tokens whose experts are on other ranks. Both ways leave the module's own forward to compute.

Each of the ``ep`` ranks holds ``E / ep`` experts, in order. The module's forward is called with the tokens for its own experts
alone: one expert each, counted from 0, with a weight of one. Its activation functions, biases and kernels stay what they are.

* **Dispatch**: each rank has tokens of its own. They are sorted by expert, sent to where it is by one all-to-all, and what
  comes out is sent back by another; the weights stay with the sender. How many go where is told by one all-gather of E numbers
  a rank. (Lepikhin et al. 2020, "GShard", arXiv 2006.16668, section 3.2, without its capacities: no token is dropped.)
* **Summed**: all ranks have the same tokens. Each computes what its experts make of them, and the parts are added up by one
  all-reduce. In backward the gradients of tokens and weights are, likewise.

A rank to whose experts no token goes calls no forward. Its parameters get gradients of zero all the same: FSDP reduces those
that have one, and its peers wait for it.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from .. import _compat, fake_groups
from ..errors import ConfigurationError
from .packed import COUNTS
from .styles import StyleOfParameters, own

__all__ = ["Dispatch", "Summed"]

Compute = Callable[[Tensor, Tensor], Tensor]
"""What this rank's experts make of tokens (N, D), given for each the number of its expert, (N,)."""


class _Experts(StyleOfParameters):
    """The experts of a module over the ranks of a mesh."""

    def placement(self, name: str) -> Placement:
        """Whole experts."""
        return Shard(0)

    def use(self, name: str, parameter: DTensor, mesh: DeviceMesh) -> Tensor:
        """Those of this rank."""
        return parameter.to_local()

    def _run(self, module: nn.Module, forward: Callable[..., Any], mesh: DeviceMesh, *inputs: Any, **options: Any) -> Any:
        hidden, index, weights = signature(forward).bind(*inputs, **options).arguments.values()
        if index.shape != weights.shape:
            raise ConfigurationError(
                f"{type(module).__name__} was called with experts {tuple(index.shape)} and weights {tuple(weights.shape)}\n"
                f"  try: a router that returns one weight for each chosen expert, (tokens, k) both"
            )
        experts = next(iter(module.parameters(recurse=False))).shape[0]

        def compute(tokens: Tensor, numbers: Tensor) -> Tensor:
            held = partial(_compute, module, forward, experts // mesh.size())
            output: Tensor = super(_Experts, self)._run(module, held, mesh, tokens, numbers)
            return output

        flat = (hidden.reshape(-1, hidden.shape[-1]), index.reshape(-1, index.shape[-1]), weights.reshape(-1, index.shape[-1]))
        return own(self.route(compute, mesh, experts, *flat).reshape(hidden.shape))

    @abstractmethod
    def route(self, compute: Compute, mesh: DeviceMesh, experts: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The weighted outputs for tokens (T, D), with experts and weights (T, k). Collective over the mesh."""


class Dispatch(_Experts):
    """Tokens travel to their experts and back."""

    def route(self, compute: Compute, mesh: DeviceMesh, experts: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """See the module docstring."""
        ranks, group = mesh.size(), mesh.get_group()
        chosen = index.flatten()
        order = chosen.argsort(stable=True)  # by expert, so by rank
        counts = torch.bincount(chosen, minlength=experts)
        if len(counts) > experts:
            raise ConfigurationError(
                f"the router sends a token to expert {len(counts) - 1}, but there are {experts}, counted from 0\n"
                f"  try: a router that returns numbers below {experts}"
            )
        everyones = counts.new_empty(ranks * experts)
        dist.all_gather_single(everyones, counts, group=group)
        to_me = everyones.view(ranks, ranks, -1)[:, mesh.get_local_rank()]  # sender, expert of mine
        sent, received = torch.stack([counts.view(ranks, -1).sum(1), to_me.sum(1)]).tolist()
        tokens = _Exchange.apply(hidden[order // index.shape[1]], group, received, sent)  # type: ignore[no-untyped-call]
        numbers = torch.arange(to_me.shape[1], device=index.device).repeat(ranks)
        outputs = compute(tokens, numbers.repeat_interleave(to_me.flatten()))
        outputs = _Exchange.apply(outputs, group, sent, received)  # type: ignore[no-untyped-call]
        return _combine(outputs, weights.flatten()[order], order // index.shape[1], hidden)


class Summed(_Experts):
    """Each rank computes the part of its own experts; the parts are summed."""

    def route(self, compute: Compute, mesh: DeviceMesh, experts: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """See the module docstring."""
        group, held = mesh.get_group(), experts // mesh.size()
        hidden, weights = _Enter.apply(group, hidden, weights)  # type: ignore[no-untyped-call]
        numbers = index - held * mesh.get_local_rank()
        token, place = ((numbers >= 0) & (numbers < held)).nonzero(as_tuple=True)
        outputs = compute(hidden[token], numbers[token, place])
        part = _combine(outputs, weights[token, place], token, hidden)
        total: Tensor = _Sum.apply(part, group)  # type: ignore[no-untyped-call]
        return total


def _compute(module: nn.Module, forward: Callable[..., Tensor], held: int, tokens: Tensor, numbers: Tensor) -> Tensor:
    """The module's own forward, as if the experts that this rank holds were all there are."""
    if not len(tokens):
        nothing = [p.flatten()[:0].sum() for p in _compat.registered_parameters(module).values() if p is not None]
        return tokens + torch.stack(nothing).sum()
    with _counting(module, held):
        return forward(tokens, numbers.unsqueeze(-1), tokens.new_ones(len(tokens), 1))


@contextmanager
def _counting(module: nn.Module, held: int) -> Iterator[None]:
    """Have a module say that it holds so many experts."""
    said = {name: getattr(module, name) for name in COUNTS if isinstance(getattr(module, name, None), int)}
    try:
        for name in said:
            setattr(module, name, held)
        yield
    finally:
        for name, number in said.items():
            setattr(module, name, number)


def _combine(outputs: Tensor, weights: Tensor, token: Tensor, hidden: Tensor) -> Tensor:
    """Add weighted outputs (N, D) to the tokens that they belong to, in the dtype of the tokens."""
    weighted = outputs * weights.unsqueeze(-1)
    return torch.zeros_like(hidden).index_add(0, token, weighted.to(hidden.dtype))


class _Exchange(torch.autograd.Function):
    """All-to-all of rows: so many from each rank, so many to each."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup, received: list[int], sent: list[int]) -> Tensor:
        ctx.group, ctx.received, ctx.sent = group, received, sent
        output = rows.new_empty(sum(received), *rows.shape[1:])
        if fake_groups.is_fake(group):  # torch's own makes what arrives of what leaves, which may be nothing
            return fake_groups.pretend_to_receive(output)
        dist.all_to_all_single(output, rows.contiguous(), received, sent, group=group)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _Exchange.apply(gradients[0], ctx.group, ctx.sent, ctx.received), None, None, None  # type: ignore[no-untyped-call]


class _Enter(torch.autograd.Function):
    """The same on all ranks; each of them sees a summand of the gradients."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(_all_reduced(gradient, ctx.group) for gradient in gradients))


class _Sum(torch.autograd.Function):
    """A sum over the ranks, whose gradient is the same on all of them."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _all_reduced(part, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def _all_reduced(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total
