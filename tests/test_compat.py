"""Canaries: private names of others that this library touches. One fails here before something subtle fails elsewhere."""

import inspect
import multiprocessing
import sys
from multiprocessing import forkserver, process
from typing import Any

import hydra.main  # noqa: F401 - the module, which the function of the same name hides
import pytest
import torch
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.core.utils import JobReturn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor, _redistribute
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from hydra_parallelism import _compat, local_rendezvous, parallel_context
from hydra_parallelism.store import register


def test_process_groups() -> None:
    assert callable(c10d._get_default_store)
    assert hasattr(c10d._world, "pg_map")
    assert _compat.registered_groups() == 0


def test_caches_of_dtensor() -> None:
    assert callable(_clear_sharding_prop_cache)
    assert callable(_redistribute.clear_redistribute_planner_cache)
    for cached in (
        _redistribute._gen_transform_infos,
        type(DTensor._op_dispatcher.sharding_propagator)._propagate_tensor_meta_cached,
        MeshTopoInfo.build_from_mesh,
    ):
        assert callable(cached.cache_clear)
    _compat.release_meshes()


def test_containers_come_apart_and_together() -> None:
    value = ({"b": 1, "a": [2, None]}, "x")
    leaves, spec = _compat.flatten(value)
    assert leaves == [1, 2, None, "x"]
    assert _compat.unflatten([4, 3, 2, 1], spec) == ({"b": 4, "a": [3, 2]}, 1)
    one = torch.ones(2, requires_grad=True) * 2
    assert (_compat.is_view(one), _compat.is_view(one[1:])) == (False, True)


def test_every_schedule_reduces_gradients_through_its_stages() -> None:
    single = (schedules.ScheduleGPipe._step_microbatches, schedules.Schedule1F1B._step_microbatches)
    for function in (*single, schedules._PipelineScheduleRuntime._step_microbatches):
        assert "perform_reduce_grad(" in inspect.getsource(function)
    for name in ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
        kind = schedules.get_schedule_class(name)
        assert kind.__name__ in ("ScheduleGPipe", "Schedule1F1B") or issubclass(kind, schedules._PipelineScheduleRuntime)


def test_a_module_computes_with_what_is_put_among_its_parameters() -> None:
    module = torch.nn.Linear(2, 2, bias=False)
    kept = module.weight
    _compat.registered_parameters(module)["weight"] = kept * 0 + 3
    module(torch.ones(1, 2)).sum().backward()
    assert kept.grad is not None
    assert module(torch.ones(1, 2)).tolist() == [[6.0, 6.0]]


def test_fsdp_of_one_rank_divides_twice_what_it_sums_by_itself() -> None:
    """Torch's mistake, around which parallelize/experts.py goes: when it is mended, drop the conditions there."""
    found = {}
    with parallel_context({}) as context:
        for dtype, forced in ((torch.float32, False), (torch.float32, True), (torch.float64, False)):
            module: Any = fully_shard(torch.nn.Linear(2, 1, bias=False, dtype=dtype), mesh=context.mesh["efsdp"])
            module.set_gradient_divide_factor(4.0)
            module.set_force_sum_reduction_for_comms(forced)
            module(torch.ones(1, 2, dtype=dtype)).sum().backward()
            found[dtype, forced] = module.weight.grad.to_local().tolist()
            del module
    assert found == {
        (torch.float32, False): [[0.25, 0.25]],
        (torch.float32, True): [[0.0625, 0.0625]],
        (torch.float64, False): [[0.0625, 0.0625]],
    }


def test_lists_of_tensors() -> None:
    tensors = [torch.tensor([3.0, 4.0], dtype=torch.bfloat16), torch.tensor([-2.0], dtype=torch.bfloat16)]
    norms = _compat.norms(tensors, 2.0, torch.float32)
    assert [(norm.item(), norm.dtype) for norm in norms] == [(5.0, torch.float32), (2.0, torch.float32)]
    assert [norm.item() for norm in _compat.norms(tensors, float("inf"), torch.float32)] == [4.0, 2.0]
    _compat.scale_(tensors, torch.tensor(0.5, dtype=torch.float64))
    assert [(tensor.tolist(), tensor.dtype) for tensor in tensors] == [([1.5, 2.0], torch.bfloat16), ([-1.0], torch.bfloat16)]


def test_flash_attention_for_cpu_takes_fewer_key_heads_and_the_log_sum_exp_of_whole_rows() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    for tensor in (query, key, value):
        tensor.requires_grad_()
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=0.3, enable_gqa=True)
    grads = torch.autograd.grad(wanted.sum(), (query, key, value))
    with torch.no_grad():
        out, lse = _compat.cpu_flash_forward(query, key, value, False, 0.3)
        torch.testing.assert_close(out, wanted)
        scores = query @ key.repeat_interleave(2, 1).mT * 0.3
        torch.testing.assert_close(lse, scores.logsumexp(-1))
        # As if the keys were two blocks: gradients of the halves, from what the whole rows came to.
        halves = [_compat.cpu_flash_backward(torch.ones_like(out), query, k, v, out, lse, False, 0.3)
                  for k, v in zip(key.split(3, 2), value.split(3, 2), strict=True)]  # fmt: skip
    torch.testing.assert_close(halves[0][0] + halves[1][0], grads[0])
    torch.testing.assert_close(torch.cat([halves[0][1], halves[1][1]], 2), grads[1])
    torch.testing.assert_close(torch.cat([halves[0][2], halves[1][2]], 2), grads[2])


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("_scaled_dot_product_flash_attention", "query key value dropout_p is_causal return_debug_mask scale"),
        (
            "_scaled_dot_product_flash_attention_backward",
            "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal philox_seed "
            "philox_offset scale",
        ),
        (
            "_scaled_dot_product_efficient_attention",
            "query key value attn_bias compute_log_sumexp dropout_p is_causal scale",
        ),
        (
            "_scaled_dot_product_efficient_attention_backward",
            "grad_out_ query key value attn_bias out logsumexp philox_seed philox_offset dropout_p grad_input_mask is_causal "
            "scale",
        ),
    ],
)
def test_attention_for_cuda_takes_its_arguments_in_this_order(name: str, arguments: str) -> None:
    """There is no device here to run them on."""
    schema = getattr(torch.ops.aten, name).default._schema
    assert [argument.name for argument in schema.arguments] == arguments.split()
    assert [result.name for result in schema.returns][:2] in (["output", "logsumexp"], ["output", "log_sumexp"], ["", ""],
                                                             ["grad_query", "grad_key"])  # fmt: skip
    assert hasattr(torch.backends.cuda, "SDPAParams")


def test_children_of_multiprocessing() -> None:
    assert isinstance(process._children, set)  # type: ignore[attr-defined]
    assert callable(forkserver.ensure_running)
    child = multiprocessing.get_context("spawn").Process(target=int)
    child.start()
    assert child in _compat.child_processes()
    child.join(30)


def test_the_agent_takes_our_rendezvous() -> None:
    local_rendezvous.register()
    local_rendezvous.register()
    assert local_rendezvous.BACKEND in rendezvous_handler_registry._registry
    handler = local_rendezvous.LocalRendezvous("job")
    first, second = handler.next_rendezvous(), handler.next_rendezvous()
    assert (first.rank, first.world_size, handler.num_nodes_waiting(), handler.is_closed()) == (0, 1, 0, False)
    assert first.bootstrap_store_info is not None
    assert second.bootstrap_store_info is not None
    assert first.bootstrap_store_info.master_port != second.bootstrap_store_info.master_port
    handler.shutdown()


def test_hydra_main_calls_a_module_level_function() -> None:
    assert callable(sys.modules["hydra.main"]._run_hydra)  # type: ignore[attr-defined]
    source = inspect.getsource(sys.modules["hydra.main"])
    assert "_run_hydra(" in source
    assert "task_function=task_function" in source


def test_entries_of_the_config_store_are_read_through_node() -> None:
    register()
    store = ConfigStore.instance()
    entry = store.repo["parallelism"]["hsdp.yaml"]
    assert isinstance(entry, ConfigNode)
    assert store.load("parallelism/hsdp.yaml").node.dp_shard == -1
    assert store.load("parallelism/hsdp.yaml").node.dp_shard == -1
    assert store.list("parallelism/fsdp") == ["bf16.yaml", "offload.yaml"]


def test_results_hold_what_the_task_returned_or_raised() -> None:
    result = JobReturn()
    result.return_value = ValueError("x")
    assert isinstance(result._return_value, ValueError)
    with pytest.raises(AssertionError):
        _ = result.return_value


def test_axes_of_a_mesh_are_named_together_over_a_group_that_is_there() -> None:
    with parallel_context({}) as context:
        group = context.mesh["dp"].get_group()
        before = _compat.registered_groups()
        mesh = DeviceMesh.from_group([group, group], "cpu", mesh=[[0]], mesh_dim_names=("a", "b"))
        _compat.name_together(mesh, ("a", "b"), "ab", group)
        assert mesh.get_group("ab") is group
        assert mesh["a", "b"]._flatten("ab").get_group() is group
        assert _compat.registered_groups() == before


def test_a_pipeline_stage_asks_the_stages_around_it_for_metadata() -> None:
    """A simulated rank answers in their stead, see test_simulate.py."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining import stage as pipelining

    for asks in (PipelineStage._forward_metadata_inference, PipelineStage._backward_metadata_inference):
        assert "self._recv_meta(" in inspect.getsource(asks)
    assert list(inspect.signature(PipelineStage._recv_meta).parameters) == ["self", "src_stage"]
    [meta] = pipelining.extract_tensor_metas((torch.ones(2, 3, requires_grad=True),))
    assert pipelining._StageForwardMeta(forward_metas=(meta,)).forward_metas == (meta,)
    assert pipelining._derive_grad_metas((meta,))[0].shape == (2, 3)


def test_the_fake_backend() -> None:
    from torch.testing._internal.distributed import fake_pg

    assert "fake" in torch.distributed.Backend.backend_list
    assert callable(fake_pg._create_fake_pg)
