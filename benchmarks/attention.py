"""Attention over a shared sequence, forward and backward, against others on the same tensors, kernels and processes.

``torch public`` is ``torch.distributed.tensor.experimental.context_parallel``, which on CPU runs with the MATH backend and
without a causal mask only. ``torch template`` is torch's private ``_templated_ring_attention`` around its CPU flash kernel,
with the all-gather of keys and values that it does by default and with its all-to-all. ``yunchang`` (where it can be imported)
has no kernel that runs on CPU, so its ring functions are given torch's CPU flash kernel: what is compared is the ring.

Ways alternate in one start of gloo processes, in a new order each round. A ratio is that of one round, wall time of the slowest
rank, ours / other; below 1 ours is faster. All outputs and gradients are compared with ours first. ``alone`` is what
``attention()`` costs over ``F.scaled_dot_product_attention`` at cp=1.
Usage: ``python benchmarks/attention.py [RANKS] [ROUNDS] [LOCAL SEQUENCE]``.
"""

import os
import random
import socket
import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as private
from torch.nn.attention import SDPBackend, sdpa_kernel

from hydra_parallelism import ContextParallelConfig, ParallelismConfig, attention, parallel_context
from hydra_parallelism.context_parallel.attention import Groups, attend

HEADS, WIDTH = 8, 64
FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
CASES = (
    ("full", False, False, torch.float32),
    ("causal, contiguous", True, False, torch.float32),
    ("causal, balanced", True, True, torch.float32),
    ("causal, balanced, bf16", True, True, torch.bfloat16),  # yunchang's zig-zag overwrites its own sums in float32
)
Way = Callable[[], list[Tensor]]


def step(function: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    """Forward and backward; output and gradients."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    out = function(*leaves)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


class Template(torch.autograd.Function):
    """Torch's private ring, as its own operators call it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Any, causal: bool) -> Tensor:
        out, lse = private._templated_ring_attention(group, 2, FORWARD, q, k, v, is_causal=causal, dropout_p=0.0)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group, ctx.causal = group, causal
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        grads = private._templated_ring_attention_backward(
            ctx.group, 2, BACKWARD, grad, "grad_out", q, k, v, out, lse, ctx.causal, dropout_p=0.0
        )
        return *grads[:3], None, None


def template(group: Any, causal: bool, balance: bool, rotate: Any) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        private._cp_options.enable_load_balance = balance
        private._cp_options.rotate_method = rotate
        return Template.apply(q, k, v, group, causal)

    return run


def yunchang(group: Any, causal: bool, balance: bool) -> Callable[..., Tensor] | None:
    """Its contiguous or zig-zag ring, given a kernel for CPU. Its tensors are ``(batch, sequence, heads, width)``."""
    try:
        from yunchang.ring import ring_pytorch_attn, zigzag_ring_flash_attn
    except ImportError as error:
        return print(f"yunchang: {error}") if dist.get_rank() == 0 else None

    def forward(
        q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, softmax_scale: Any = None, causal: bool = True, **_: Any
    ):
        out, lse = FORWARD(*(t.transpose(1, 2) for t in (q, k, v)), 0.0, causal, scale=softmax_scale)
        return out.transpose(1, 2), lse

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor, **rest: Any):
        rows = [t.transpose(1, 2) for t in (dout, q, k, v, out, softmax_lse)]
        return [t.transpose(1, 2) for t in BACKWARD(*rows, 0.0, rest["causal"], scale=rest["softmax_scale"])]

    def into(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, **_: Any) -> None:
        dq, dk, dv, _, scale, causal = rest[:6]
        grads = backward(dout, q, k, v, out, lse.transpose(1, 2), causal=causal, softmax_scale=scale)
        for kept, grad in zip((dq, dk, dv), grads, strict=True):
            kept.copy_(grad)

    autograd = ring_pytorch_attn.RingAttentionFunc  # leaves out the gradient of its first argument
    if not hasattr(autograd, "forgetful"):
        autograd.forgetful = autograd.backward
        autograd.backward = staticmethod(lambda ctx, *grads: (None, *autograd.forgetful(ctx, *grads))[:6])
    ring_pytorch_attn.pytorch_attn_forward, ring_pytorch_attn.pytorch_attn_backward = forward, backward
    zigzag_ring_flash_attn.select_flash_attn_impl = lambda kind, stage, *rest: forward if stage == "fwd-only" else into
    zigzag, contiguous = zigzag_ring_flash_attn.zigzag_ring_flash_attn_func, ring_pytorch_attn.ring_pytorch_attn_func
    function = zigzag if balance else contiguous

    return lambda q, k, v: function(q, k, v, causal=causal, group=group)


def in_its_layout(way: Callable[..., Tensor], tensors: list[Tensor]) -> Way:
    its = [tensor.transpose(1, 2).contiguous() for tensor in tensors]
    return lambda: [tensor.transpose(1, 2) for tensor in step(way, its[:3], its[3])]


def ways(context: Any, causal: bool, balance: bool) -> dict[str, Callable[..., Tensor]]:
    group = context.mesh["ring"].get_group()
    groups = Groups(group, context.mesh["ulysses"].get_group(), balance)
    found: dict[str, Callable[..., Tensor] | None] = {
        "ours": lambda *qkv: attend(*qkv, groups, is_causal=causal),
        "torch template": template(group, causal, balance, private._RotateMethod.ALL_GATHER),
        "torch template, all-to-all": template(group, causal, balance, private._RotateMethod.ALL_TO_ALL),
        "yunchang": yunchang(group, causal, balance),
    }
    return {name: way for name, way in found.items() if way is not None}


def public(mesh: Any, whole: list[Tensor], grad: Tensor) -> Way:
    """Torch's public context manager, entered around each step as its documentation shows."""

    def run() -> list[Tensor]:
        leaves = [tensor.clone() for tensor in whole]
        private._cp_options.enable_load_balance = False
        with sdpa_kernel(SDPBackend.MATH), context_parallel(mesh, buffers=leaves, buffer_seq_dims=[2, 2, 2]):
            for leaf in leaves:
                leaf.requires_grad_()
            out = F.scaled_dot_product_attention(*leaves)
            out.backward(grad)
            found = [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
            for leaf in leaves:
                leaf.requires_grad_(False)
        return found

    return run


def measure(title: str, steps: dict[str, Way], rounds: int) -> None:
    wanted = steps["ours"]()
    for name in list(steps):
        try:
            found = steps[name]()
            worst = max((a - b).abs().max().item() for a, b in zip(found, wanted, strict=True))
            assert worst < (1e-4 if wanted[0].dtype == torch.float32 else 0.1), f"differs by {worst:g}"
        except Exception as error:  # whatever a peer cannot do is what is told
            if dist.get_rank() == 0:
                print(f"{title}: {name} cannot: {type(error).__name__} {str(error)[:200]}")
            del steps[name]
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(steps), len(steps)):
            dist.barrier()
            began = time.perf_counter()
            steps[name]()
            spent = torch.tensor(time.perf_counter() - began)
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            times[name].append(spent.item())
    if dist.get_rank() == 0:
        for name, spent in times.items():
            ratios = [mine / other for mine, other in zip(times["ours"], spent, strict=True)]
            low, mid, high = statistics.quantiles(ratios, n=4)
            print(f"{title:24} {name:28} {statistics.median(spent) * 1e3:8.1f} ms   ours / it {mid:.3f} ({low:.3f}-{high:.3f})")
        sys.stdout.flush()


def work(rank: int, ranks: int, rounds: int, local: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.manual_seed(0)
    whole = [torch.randn(1, HEADS, local * ranks, WIDTH) for _ in range(4)]
    with parallel_context(ParallelismConfig(context_parallel=ContextParallelConfig(ring_degree=ranks))) as context:
        for title, causal, balance, dtype in CASES:
            mine = [tensor.chunk(ranks, 2)[rank].to(dtype).contiguous() for tensor in whole]
            steps: dict[str, Way] = {
                name: lambda way=way, mine=mine: step(way, mine[:3], mine[3])
                for name, way in ways(context, causal, balance).items()
            }
            if "yunchang" in steps:
                steps["yunchang"] = in_its_layout(ways(context, causal, balance)["yunchang"], mine)
            if title == "full":
                steps["torch public"] = public(init_device_mesh("cpu", (ranks,)), whole[:3], mine[3])
            measure(title, steps, rounds)


def alone(rounds: int = 2000) -> None:
    """Microseconds of ``attention`` over torch's function at cp=1, on tensors so small that little else is measured."""
    with parallel_context(ParallelismConfig()):
        for shape in ((1, 2, 8, 8), (1, 8, 512, 64)):
            query = torch.randn(shape)
            ways_ = SimpleNamespace(
                ours=lambda q=query: attention(q, q, q), torch=lambda q=query: F.scaled_dot_product_attention(q, q, q)
            )
            times: dict[str, list[float]] = {"ours": [], "torch": []}
            for i in range(rounds if shape[2] == 8 else rounds // 10):
                for name in ("ours", "torch") if i % 2 else ("torch", "ours"):
                    began = time.perf_counter()
                    getattr(ways_, name)()
                    times[name].append((time.perf_counter() - began) * 1e6)
            ours, torch_ = (statistics.median(times[name]) for name in ("ours", "torch"))
            print(f"alone, {shape}: {ours:.1f} us, torch {torch_:.1f} us: {ours / torch_:.4f}", flush=True)


def main(ranks: int = 2, rounds: int = 20, local: int = 1024) -> None:
    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.start_processes(work, (ranks, rounds, local, port), nprocs=ranks, start_method="fork")
    alone()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
