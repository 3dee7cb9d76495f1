"""What a rank really sends and holds: every collective of a step with its group, and the bytes of what is kept.

A :class:`Counted` sees the operations that torch dispatches, those of DTensor and of FSDP alike, and turns each into the bytes
that one rank sends under the algorithms of ``hydra_parallelism/plan/collectives.py``.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Counted", "Kept", "held"]

_KINDS = {
    "_allgather_base_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "all_gather_into_tensor_out": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "alltoall_base_": "all-to-all",
    "all_to_all_single": "all-to-all",
    "send": "send",
    "broadcast_": "broadcast",
}
"""Operation, as torch or its functional collectives call it -> what the plan calls it."""
_SILENT = ("recv_", "wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_")


class Counted(TorchDispatchMode):
    """While entered: (operation, ranks of the group) -> bytes sent by this rank, and how many there were."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self.calls: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again as the collectives and local operations that it is made of
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            self._count(func._opname, args, result)
        return result

    def _count(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        if name in _SILENT:
            return
        kind = _KINDS[name]  # one that is not known here must not go uncounted
        ranks = _ranks(args)
        self.calls[kind, ranks] += 1
        self.sent[kind, ranks] += _wire(kind, name, args, result, len(ranks), ranks.index(dist.get_rank()))


def _ranks(args: tuple[Any, ...]) -> tuple[int, ...]:
    for value in args:
        if isinstance(value, torch.ScriptObject):
            group = _unboxed(value)
            if group is not None:
                return tuple(dist.get_process_group_ranks(group))
    names = [value for value in args if isinstance(value, str)]
    return tuple(dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(names[-1])))


def _unboxed(value: torch.ScriptObject) -> dist.ProcessGroup | None:
    try:
        return dist.ProcessGroup.unbox(value)
    except RuntimeError:  # the object that says how to reduce
        return None


def _wire(kind: str, name: str, args: tuple[Any, ...], result: Any, size: int, rank: int) -> float:
    """Bytes that leave this rank."""
    functional = not name.endswith("_") and name != "send"
    if kind == "all-gather":
        return (size - 1) * (args[0] if functional else args[1]).nbytes
    if kind == "reduce-scatter":
        return (size - 1) * (result if functional else args[0]).nbytes
    if kind == "all-to-all":
        return _exchanged(args[0 if functional else 1], args[2 if functional else 4], size, rank)
    tensors = [args[0]] if isinstance(args[0], Tensor) else list(args[0])
    whole = sum(tensor.nbytes for tensor in tensors)
    return 2 * (size - 1) / size * whole if kind == "all-reduce" else whole


def _exchanged(leaving: Tensor, splits: list[int], size: int, rank: int) -> float:
    """All but what a rank sends to itself; ``splits`` are rows for each rank, empty when they are equal."""
    if not splits:
        return leaving.nbytes * (size - 1) / size
    row = leaving.nbytes / max(leaving.shape[0], 1)
    return row * (sum(splits) - splits[rank])


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer state that this rank holds: local shards."""
    parameters = list(model.parameters())
    state = [value for of in optimizer.state.values() for value in of.values() if isinstance(value, Tensor)]
    return {
        "parameters": _bytes(parameters),
        "gradients": _bytes(parameter.grad for parameter in parameters if parameter.grad is not None),
        "optimizer": _bytes(value for value in state if value.dim()),  # Adam counts its steps in a number for each tensor
    }


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum((tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes for tensor in tensors)


class Kept:
    """Bytes that autograd keeps for backward, each storage once, parameters excepted."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.storages: dict[int, int] = {}
        self._alive: list[Tensor] = []

    def __enter__(self) -> "Kept":
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, tensor: Tensor) -> Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        self._alive.append(local)  # or its address would be another's
        own = {p.untyped_storage().data_ptr() for p in self.model.parameters() if not isinstance(p, DTensor)}
        if storage.data_ptr() not in own:
            self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def bytes(self) -> int:
        """So far."""
        return sum(self.storages.values())
