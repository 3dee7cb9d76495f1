"""Every private name of torch and multiprocessing that this library touches, each with a canary in the tests."""

import gc
import sys
from contextlib import AbstractContextManager
from multiprocessing import process
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree

__all__ = [
    "can_use_cuda_flash",
    "can_use_efficient",
    "child_processes",
    "cpu_flash_backward",
    "cpu_flash_forward",
    "cuda_flash_backward",
    "cuda_flash_forward",
    "default_store",
    "efficient_backward",
    "efficient_forward",
    "flatten",
    "forget_unreduced",
    "is_view",
    "name_together",
    "norms",
    "packed_attention",
    "registered_groups",
    "registered_parameters",
    "release_meshes",
    "scale_",
    "tell_metadata",
    "unflatten",
    "without_modes",
]


def default_store() -> dist.Store:
    """The store of the default process group, for a group that the user made."""
    return c10d._get_default_store()


def registered_groups() -> int:
    """How many process groups this rank holds, the default group included."""
    return len(c10d._world.pg_map)


def registered_parameters(module: nn.Module) -> dict[str, Tensor | None]:
    """The parameters that a module holds itself, live: what is put here is what its forward finds, a Parameter or not."""
    return module._parameters  # type: ignore[return-value]


def child_processes() -> list[BaseProcess]:
    """Processes that multiprocessing has started here. Its public list polls them, which another thread must not do."""
    return list(process._children)  # type: ignore[attr-defined]


def flatten(value: Any) -> tuple[list[Any], Any]:
    """The leaves of nested containers in a fixed order, and what :func:`unflatten` needs to put them back."""
    return _pytree.tree_flatten(value)


def unflatten(leaves: list[Any], spec: Any) -> Any:
    """The containers of :func:`flatten` around other leaves."""
    return _pytree.tree_unflatten(leaves, spec)


def is_view(tensor: Tensor) -> bool:
    """Whether a tensor shares the memory of another one as autograd sees it."""
    return tensor._is_view()


def forget_unreduced(module: Any) -> None:
    """Drop the gradients that an FSDP module has not reduced yet, which belong to its gathered parameters."""
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def name_together(mesh: DeviceMesh, axes: tuple[str, ...], name: str, group: dist.ProcessGroup) -> None:
    """Name some axes of a root mesh together, as ``mesh[axes]._flatten(name)`` does, over a group that is there already."""
    layout = mesh[axes]._layout
    joined = DeviceMesh(
        mesh.device_type,
        _layout=type(layout)([layout.collapse()]),
        _rank_map=mesh._rank_map,
        mesh_dim_names=(name,),
        _root_mesh=mesh,
        _init_backend=False,
    )
    joined._dim_group_names = [group.group_name]
    mesh._pg_registry[group.group_name] = group
    mesh._flatten_mapping[name] = joined


def norms(tensors: list[Tensor], order: float, dtype: torch.dtype) -> list[Tensor]:
    """Norm of each of some tensors of one device and dtype, in few kernels."""
    return list(torch._foreach_norm(tensors, order, dtype=dtype))


def packed_attention() -> Any:
    """What ``nn.MultiheadAttention`` calls in evaluation instead of scaled_dot_product_attention."""
    return torch._native_multi_head_attention


def without_modes() -> AbstractContextManager[Any]:
    """Run functions of torch as they are, whatever modes are entered around."""
    manager: AbstractContextManager[Any] = torch._C.DisableTorchFunction()
    return manager


def scale_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors of one device and dtype in place by a number on that device, in few kernels and without a wait."""
    torch._foreach_mul_(tensors, factor)


def release_meshes() -> None:
    """Forget the meshes of an ended job.

    DTensor caches sharding decisions by mesh equality, which leaves out the names of the groups: a later job with an
    equal-looking mesh would be handed groups that are gone, and sockets and threads of dead groups would stay. Collecting then
    breaks the reference cycles, without which interpreter exit aborts now and then ("terminate called without an active
    exception").
    """
    if "torch.distributed.tensor" in sys.modules:
        _clear_dtensor_caches()
    gc.collect()


def _clear_dtensor_caches() -> None:
    from torch.distributed.tensor import DTensor, _redistribute
    from torch.distributed.tensor._collective_utils import MeshTopoInfo
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
    type(DTensor._op_dispatcher.sharding_propagator)._propagate_tensor_meta_cached.cache_clear()
    MeshTopoInfo.build_from_mesh.cache_clear()


def tell_metadata(stage: Any, received: tuple[Tensor, ...]) -> None:
    """Tell a pipeline stage, in the first step of a schedule, what it would be told by the stages around it.

    Args:
        stage: A ``PipelineStage``.
        received: Likenesses of what the stage before sends. The gradients that come back are like what is sent on.
    """
    from torch.distributed.pipelining import _utils
    from torch.distributed.pipelining import stage as pipelining

    def recall(source: int) -> Any:
        if source < stage.stage_index:
            floating = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in received]
            metas = _utils.extract_tensor_metas(tuple(floating))
            return pipelining._StageForwardMeta(forward_metas=metas)  # type: ignore[arg-type]
        return pipelining._StageBackwardMeta(backward_metas=pipelining._derive_grad_metas(stage._stage_meta.outputs))

    stage._recv_meta = recall


_Gradients = tuple[Tensor, Tensor, Tensor]
_aten = torch.ops.aten


def cpu_flash_forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of torch's flash attention for CPU."""
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, scale=scale)
    return out, lse


def cpu_flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> _Gradients:
    """Gradients of query, key and value for :func:`cpu_flash_forward`."""
    backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
    gradients: _Gradients = backward(grad, query, key, value, out, lse, 0.0, causal, scale=scale)
    return gradients


def can_use_cuda_flash(query: Tensor, key: Tensor, value: Tensor, causal: bool, gqa: bool) -> bool:
    """Whether torch would choose flash attention for these CUDA tensors, widths in whole 8s as the bare operator needs."""
    params = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, causal, gqa)
    return query.size(-1) % 8 == 0 and torch.backends.cuda.can_use_flash_attention(params)


def cuda_flash_forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of torch's flash attention for CUDA."""
    found = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scale)
    return found[0], found[1]


def cuda_flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> _Gradients:
    """Gradients of query, key and value for :func:`cuda_flash_forward`."""
    unread = torch.zeros(2, dtype=torch.uint64, device=query.device)  # seed and offset, of dropout
    lengths = query.size(2), key.size(2)
    gradients: _Gradients = _aten._scaled_dot_product_flash_attention_backward(
        grad, query, key, value, out, lse, None, None, *lengths, 0.0, causal, unread, unread, scale=scale
    )
    return gradients


def can_use_efficient(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> bool:
    """Whether torch would choose memory-efficient attention for these CUDA tensors."""
    params = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, causal, False)
    return torch.backends.cuda.can_use_efficient_attention(params)


def efficient_forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of torch's memory-efficient attention, the latter with rows in whole 32s."""
    found = _aten._scaled_dot_product_efficient_attention(query, key, value, None, True, 0.0, causal, scale=scale)
    return found[0], found[1]


def efficient_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> _Gradients:
    """Gradients of query, key and value for :func:`efficient_forward`."""
    unread = torch.zeros((), dtype=torch.long, device=query.device)  # seed and offset, of dropout
    wanted = [True, True, True, False]
    found = _aten._scaled_dot_product_efficient_attention_backward(
        grad, query, key, value, None, out, lse, unread, unread, 0.0, wanted, causal, scale=scale
    )
    return found[0], found[1], found[2]
