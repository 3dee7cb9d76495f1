"""Attention over shared sequences against one process: errors, what is sent, and what is refused or must not matter."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from hydra_parallelism import (
    ConfigurationError,
    ContextParallelConfig,
    ParallelContext,
    ParallelismConfig,
    attention,
    parallel_context,
    shard_sequence,
    unshard_sequence,
)
from hydra_parallelism.context_parallel.layout import Layout

LAYOUTS = {
    2: [(2, 1), (1, 2)],
    4: [(4, 1), (1, 4), (2, 2)],
    8: [(8, 1), (1, 8), (2, 4), (4, 2)],
}
"""World size -> ring and Ulysses degrees."""
HEADS = (4, 8, 12)
GROUPS = (1, 2, 4)
"""Query heads for each key head."""
WIDTH = 6


@dataclass(frozen=True)
class Case:
    """One attention."""

    heads: int
    group: int
    causal: bool
    balance: bool
    double: bool

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.double else torch.float32

    def __str__(self) -> str:
        order = "balanced" if self.balance else "contiguous"
        kind = "causal" if self.causal else "full"
        return f"{self.heads} heads, {self.group}:1, {kind}, {order}, {str(self.dtype)[6:]}"


def cases(ulysses: int) -> Iterator[Case]:
    """All that the heads can be shared for."""
    for heads, group, causal, balance, double in itertools.product(HEADS, GROUPS, *[(True, False)] * 3):
        if heads % ulysses == 0:
            yield Case(heads, group, causal, balance, double)


def report(size: int) -> dict[str, Any]:
    """Layout -> what came of it."""
    return {f"{ring}x{ulysses}": _layout(ring, ulysses) for ring, ulysses in LAYOUTS[size]}


def _layout(ring: int, ulysses: int) -> dict[str, Any]:
    degrees = ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses)
    with parallel_context(ParallelismConfig(context_parallel=degrees)) as context:
        return {
            "errors": {str(case): _errors(case, context) for case in cases(ulysses)},
            "sent": {kind: _sent(kind == "causal", context) for kind in ("causal", "full")},
            "round trip": _round_trip(context),
            "uses": _uses(context),
            "refusals": _refusals(context),
        }


def _with_balance(context: ParallelContext, balance: bool) -> ParallelContext:
    degrees = replace(context.config.context_parallel, load_balance=balance)
    return replace(context, config=replace(context.config, context_parallel=degrees))


def _tensors(heads: int, group: int, length: int, dtype: torch.dtype, width: int = WIDTH) -> list[Tensor]:
    """Whole query, key, value, and gradient of the output, alike on all ranks."""
    torch.manual_seed(heads * 100 + group)
    return [torch.randn(2, n, length, width, dtype=dtype) for n in (heads, heads // group, heads // group, heads)]


def _length(context: ParallelContext, blocks: int = 3) -> int:
    """A whole sequence of odd blocks that every order can cut."""
    topology = context.topology
    return Layout(topology.ring, topology.ulysses).multiple * blocks


def _errors(case: Case, context: ParallelContext) -> list[float]:
    """Largest differences of output and of the three gradients from one process."""
    context = _with_balance(context, case.balance)
    *inputs, grad = _tensors(case.heads, case.group, _length(context), case.dtype)
    expected = _run(F.scaled_dot_product_attention, inputs, grad, is_causal=case.causal, enable_gqa=True)
    local = [shard_sequence(tensor, dim=2, context=context) for tensor in (*inputs, grad)]
    found = _run(attention, local[:3], local[3], is_causal=case.causal, enable_gqa=True, context=context)
    cut = [shard_sequence(tensor, dim=2, context=context) for tensor in expected]
    return [(a - b).abs().max().item() for a, b in zip(found, cut, strict=True)]


def _run(function: Any, inputs: list[Tensor], grad: Tensor, **options: Any) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    out = function(*leaves, **options)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


class Sent(TorchDispatchMode):
    """Every call of a collective or of a send in this thread, with the bytes that leave."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and not func._opname.startswith("recv"):
            tensor = args[1] if func._opname.startswith("alltoall") else args[0][0]
            self.calls.append((func._opname, tensor.nbytes))
        return func(*args, **(kwargs or {}))


def _sent(causal: bool, context: ParallelContext) -> dict[str, Any]:
    *inputs, grad = (shard_sequence(t, dim=2, context=context) for t in _tensors(8, 2, _length(context), torch.float32))
    leaves = [tensor.requires_grad_() for tensor in inputs]
    with Sent() as forward:
        out = attention(*leaves, is_causal=causal, enable_gqa=True, context=context)
    with Sent() as backward:
        out.backward(grad)
    return {"forward": forward.calls, "backward": backward.calls, "q": leaves[0].nbytes, "kv": 2 * leaves[1].nbytes}


def _round_trip(context: ParallelContext) -> dict[str, bool]:
    """Whether whole sequences come back, whatever the dtype and the order."""
    length = _length(context)
    found = {}
    for balance in (True, False):
        at = _with_balance(context, balance)
        ids, flags = torch.arange(2 * length).view(2, length), torch.arange(2 * length).view(2, length) % 3 == 0
        halves = torch.randn(2, length, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
        whole = (ids, flags, halves)
        local = shard_sequence(*whole, context=at)
        back = unshard_sequence(*local, context=at)
        found[f"balance={balance}"] = all(map(torch.equal, whole, back)) and not any(t.requires_grad for t in back)
        leaf = halves.float().requires_grad_()
        mine = shard_sequence(leaf.transpose(0, 1), dim=-3, context=at)
        mine.sum().backward()
        count = leaf.grad.clone() if leaf.grad is not None else torch.zeros_like(leaf)
        dist.all_reduce(count)
        found[f"balance={balance}, gradient"] = bool((count == 1).all()) and mine.is_contiguous()
    return found


def _uses(context: ParallelContext) -> dict[str, float]:
    """Ways to call it that must change nothing: largest difference from one process."""
    *inputs, grad = _tensors(8, 2, _length(context), torch.float32)
    local = [shard_sequence(tensor, dim=2, context=context) for tensor in inputs]
    mine = shard_sequence(grad, dim=2, context=context)
    options: dict[str, Any] = {"is_causal": True, "enable_gqa": True}
    expected = [
        shard_sequence(t, dim=2, context=context) for t in _run(F.scaled_dot_product_attention, inputs, grad, **options)
    ]

    def differs(found: list[Tensor], wanted: list[Tensor] = expected) -> float:
        return max((a.float() - b.float()).abs().max().item() for a, b in zip(found, wanted, strict=True))

    def again(*tensors: Tensor, **more: Any) -> Tensor:
        out: Tensor = checkpoint(lambda *t: attention(*t, **options, **more), *tensors, use_reentrant=False)
        return out

    found = {"checkpointed": differs(_run(again, local, mine))}
    strided = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in local]
    found["strided"] = differs(_run(attention, strided, mine.transpose(-1, -2).contiguous().transpose(-1, -2), **options))
    with torch.no_grad():
        found["no_grad"] = differs([attention(*local, **options)], expected[:1])
    value = local[2].clone().requires_grad_()
    out = attention(local[0], local[1], value, **options)
    out.backward(mine)
    assert value.grad is not None
    found["one gradient"] = differs([out.detach(), value.grad], [expected[0], expected[3]])
    found["scale"] = _scaled(context)
    found["one tensor thrice"] = _thrice(context)
    found["wide values"] = _wide(context)
    found["bfloat16"] = differs(_run(attention, [t.bfloat16() for t in local], mine.bfloat16(), **options))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(*local, **options)
    found["autocast"] = differs([out], expected[:1]) + (out.dtype != torch.bfloat16)
    return found


def _scaled(context: ParallelContext) -> float:
    inputs = _tensors(8, 1, _length(context), torch.float32)[:3]
    local = [shard_sequence(tensor, dim=2, context=context) for tensor in inputs]
    expected = shard_sequence(F.scaled_dot_product_attention(*inputs, scale=0.3), dim=2, context=context)
    return (attention(*local, scale=0.3, context=context) - expected).abs().max().item()


def _thrice(context: ParallelContext) -> float:
    whole = _tensors(8, 1, _length(context), torch.float32)[0]
    one, all_of_it = shard_sequence(whole, dim=2, context=context).requires_grad_(), whole.clone().requires_grad_()
    attention(one, one, one, is_causal=True, context=context).square().sum().backward()
    F.scaled_dot_product_attention(all_of_it, all_of_it, all_of_it, is_causal=True).square().sum().backward()
    assert one.grad is not None
    assert all_of_it.grad is not None
    return (one.grad - shard_sequence(all_of_it.grad, dim=2, context=context)).abs().max().item()


def _wide(context: ParallelContext) -> float:
    """Values wider and narrower than keys."""
    worst = 0.0
    for width in (WIDTH - 2, WIDTH + 3):
        query, key = _tensors(8, 1, _length(context), torch.float32)[:2]
        value, _, _, grad = _tensors(8, 1, _length(context), torch.float32, width)
        inputs = [query, key, value]
        expected = _run(F.scaled_dot_product_attention, inputs, grad, is_causal=True)
        local = [shard_sequence(tensor, dim=2, context=context) for tensor in (*inputs, grad)]
        found = _run(attention, local[:3], local[3], is_causal=True)
        cut = [shard_sequence(tensor, dim=2, context=context) for tensor in expected]
        worst = max(worst, *((a - b).abs().max().item() for a, b in zip(found, cut, strict=True)))
    return worst


def _refusals(context: ParallelContext) -> dict[str, str]:
    """What is said to arguments that cannot be."""
    shard_sequence(torch.zeros(1, 6 * context.topology.cp))  # pieces of any other length are refused
    q = torch.zeros(2, 8, 6, 4)
    mask = torch.ones(6, 6, dtype=torch.bool)
    tries: dict[str, Any] = {
        "mask": lambda: attention(q, q, q, mask),
        "dropout": lambda: attention(q, q, q, dropout_p=0.1),
        "cross": lambda: attention(q, q[:, :, :4], q[:, :, :4]),
        "heads": lambda: attention(q[:, :7], q[:, :7], q[:, :7]),
        "key heads": lambda: attention(q, q[:, :3], q[:, :3], enable_gqa=True),
        "no gqa": lambda: attention(q, q[:, :4], q[:, :4]),
        "three dims": lambda: attention(q[0], q[0], q[0]),
        "dtypes": lambda: attention(q, q.double(), q),
        "integers": lambda: attention(q.long(), q.long(), q.long()),
        "batches": lambda: attention(q, q[:1], q[:1]),
        "length": lambda: attention(q[:, :, :5], q[:, :, :5], q[:, :, :5]),
        "empty": lambda: attention(q[:, :, :0], q[:, :, :0], q[:, :, :0]),
        "shard": lambda: shard_sequence(torch.zeros(2, 29)),
        "lengths": lambda: shard_sequence(torch.zeros(2, 16), torch.zeros(2, 32)),
        "dim": lambda: shard_sequence(torch.zeros(2, 16), dim=2),
        "nothing": lambda: unshard_sequence(),
        "unshard": lambda: unshard_sequence(torch.zeros(2, 0)),
        "uncut": lambda: attention(q[:, :, :4], q[:, :, :4], q[:, :, :4]),
        "meta": lambda: attention(*[torch.empty(2, 8, 6, 4, device="meta")] * 3),
    }
    found = {}
    for name, attempt in tries.items():
        try:
            out = attempt()
            found[name] = f"no refusal: {tuple(out.shape)} on {out.device}"
        except ConfigurationError as error:
            found[name] = str(error)
    return found
