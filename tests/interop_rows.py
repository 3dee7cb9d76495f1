"""A proof for each row of each target: change our key, and exactly their field changes; read it back, and exactly ours does.

``CLASSES`` makes an instance of their real class where there is one, so that what is compared is what their library made of it.
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from hydra_parallelism import interop

Flat = dict[str, Any]


class Proof(NamedTuple):
    """One row, and what shows it."""

    theirs: str
    ours: str
    base: Mapping[str, Any]
    """Our config before; where only theirs is read (``reads``), their fields."""
    change: Mapping[str, Any]
    """What is set on top."""
    value: Any
    """What their field is then; for ``reads``, what ours is."""
    also: frozenset[str] = frozenset()
    """What goes along: fields that their class sets by this one, keys of ours that ``from_X`` does."""
    reads: bool = False


_FSDP = {"dp_shard": 2}
_UNITS = {**_FSDP, "fsdp": {"wrap": ["model.layers.*"]}}
_TENSOR = {"tp_size": 2, "tp_plan": "auto"}
_DISPATCH = {"model.layers.*.mlp.experts": "ep_dispatch_experts"}
_SUMMED = {"model.layers.*.mlp.experts": "moe_tp_experts"}
_SERVES = frozenset({"inference"})
_RING, _ULYSSES = "context_parallel.ring_degree", "context_parallel.ulysses_degree"

_TWO = {"dp_shard": 2, "world_size": 2}
_PIPE = {"pp_size": 2}
_WORLD = frozenset({"world_size"})
_CP = frozenset({"context_parallel_size"})


def _sequences(ring: int = 1, ulysses: int = 1) -> Flat:
    return {"context_parallel": {"ring_degree": ring, "ulysses_degree": ulysses}}


def _handler(axis: str, *names: str) -> frozenset[str]:
    """The handler that accelerate makes for an axis, in place of none."""
    return frozenset({f"{axis}_handler", *(f"{axis}_handler.{name}" for name in names)})


PROOFS: dict[str, tuple[Proof, ...]] = {
    "transformers": (
        Proof("tp_size", "tp_size", {**_FSDP, "tp_plan": "auto"}, {"tp_size": 2}, 2),
        Proof("tp_plan", "tp_plan", _TENSOR, {"tp_plan": {"lm_head": "replicate"}}, {"lm_head": "replicate"}),
        Proof(
            "enable_sequence_parallel", "enable_sequence_parallel", {"fsdp_size": 2}, {"enable_sequence_parallel": True}, True,
            reads=True,
        ),
        Proof(
            "enable_expert_parallel", "ep_size", _TENSOR, {"enable_expert_parallel": True}, 2, frozenset({"ep_plan"}),
            reads=True,
        ),
        Proof("fsdp_size", "dp_shard", {"dp_replicate": 2}, {"dp_shard": 4}, 4),
        Proof("dp_replicate_size", "dp_replicate", _FSDP, {"dp_replicate": 4}, 4),
        Proof("fsdp_plan", "fsdp.wrap", _FSDP, {"fsdp": {"wrap": ["lm_head"]}}, {"lm_head": "free_full_weight"}),
        Proof(
            "fsdp_plan", "fsdp.reshard_after_forward", _UNITS,
            {"fsdp": {"wrap": ["model.layers.*"], "reshard_after_forward": False}}, {"model.layers.*": "keep_full_weight"},
        ),
        Proof("fsdp_cpu_offload", "fsdp.cpu_offload", _FSDP, {"fsdp": {"cpu_offload": True}}, True),
        Proof("fsdp_mixed_precision", "fsdp.mixed_precision", _FSDP, {"fsdp": {"mixed_precision": "bf16"}}, True),
        Proof("pp_size", "pp_size", {**_TENSOR, "pp_size": 2, "inference": True}, {"pp_size": 4}, 4),
        Proof("ep_size", "ep_size", {"dp_shard": 4, "ep_size": 2, "ep_plan": "auto"}, {"ep_size": 4}, 4),
        Proof("ep_plan", "ep_plan", {**_FSDP, "ep_size": 2, "ep_plan": "auto"}, {"ep_plan": _DISPATCH}, _DISPATCH),
        Proof(
            "ep_implementation", "ep_plan", {**_TENSOR, "ep_size": 2, "ep_plan": _DISPATCH}, {"ep_plan": _SUMMED}, "all_reduce"
        ),
    ),
    "lerobot": (
        Proof("dp_replicate", "dp_replicate", _FSDP, {"dp_replicate": 4}, 4),
        Proof("dp_shard", "dp_shard", {"dp_replicate": 2}, {"dp_shard": -1}, -1),
        Proof(_RING, _RING, _FSDP, {"context_parallel": {"ring_degree": 2}}, 2),
        Proof(_ULYSSES, _ULYSSES, _FSDP, {"context_parallel": {"ulysses_degree": 4}}, 4),
        Proof("cfg_parallel", "cfg_parallel", {**_FSDP, "inference": True}, {"cfg_parallel": 2}, 2, _SERVES),
    ),
    "accelerate": (
        Proof("dp_replicate_size", "dp_replicate", _FSDP, {"dp_replicate": 4}, 4),
        Proof("dp_shard_size", "dp_shard", {"dp_replicate": 2}, {"dp_shard": 4}, 4),
        Proof("tp_size", "tp_size", _FSDP, {"tp_size": 2}, 2, _handler("tp", "enable_async_tp")),
        Proof("cp_size", _RING, _FSDP, _sequences(ring=2), 2, _handler("cp", "cp_comm_strategy")),
        Proof(
            "sp_size", _ULYSSES, _FSDP, _sequences(ulysses=4), 4,
            _handler("sp", "sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation"),
        ),
    ),
    "torchtitan": (
        Proof("dp_replicate", "dp_replicate", _TWO, {"dp_replicate": 2, "world_size": 4}, 2, _WORLD),
        Proof("dp_shard", "dp_shard", _TWO, {"dp_shard": 4, "world_size": 4}, 4, _WORLD),
        Proof("cp", _RING, _TWO, _sequences(ring=2) | {"world_size": 4}, 2, _WORLD),
        Proof("tp", "tp_size", _TWO, {"tp_size": 2, "world_size": 4}, 2, _WORLD),
        Proof("pp", "pp_size", _TWO, {"pp_size": 2, "world_size": 4}, 2, _WORLD),
        Proof("ep", "ep_size", _TWO, {"ep_size": 2}, 2),
    ),
    "diffusers": (
        Proof("ring_degree", _RING, _sequences(ulysses=2), _sequences(ring=4, ulysses=2), 4),
        Proof("ulysses_degree", _ULYSSES, _sequences(ring=2), _sequences(ring=2, ulysses=4), 4),
    ),
    "lightning": (
        Proof("data_parallel_size", "dp_shard", {"tp_size": 2}, {"dp_shard": 4}, 4),
        Proof("tensor_parallel_size", "tp_size", _FSDP, {"tp_size": 4}, 4),
    ),
    "nemo": (
        Proof("tensor_model_parallel_size", "tp_size", _PIPE, {"tp_size": 2}, 2, frozenset({"expert_tensor_parallel_size"})),
        Proof(
            "pipeline_model_parallel_size", "pp_size", {"tp_size": 2}, {"pp_size": 2}, 2,
            frozenset({"microbatch_group_size_per_vp_stage"}),
        ),
        Proof("cp_comm_type", _ULYSSES, _PIPE, _sequences(ulysses=2), "a2a", _CP),
        Proof(
            "hierarchical_context_parallel_sizes", _RING, _sequences(ulysses=4), _sequences(ring=2, ulysses=4), [4, 2],
            _CP | {"cp_comm_type"},
        ),
        Proof("expert_model_parallel_size", "ep_size", _sequences(ring=2), {**_sequences(ring=2), "ep_size": 2}, 2),
        Proof("sequence_parallel", "enable_sequence_parallel", {"tp_size": 2}, {"enable_sequence_parallel": True}, True),
    ),
}  # fmt: skip
"""Module of ``interop`` -> its proofs, in the order of its rows."""


def _transformers(fields: Mapping[str, Any]) -> Any:
    from transformers.distributed import DistributedConfig

    return DistributedConfig(**fields)


def _accelerate(fields: Mapping[str, Any]) -> Any:
    from accelerate import ParallelismConfig

    return ParallelismConfig(**fields)


def _torchtitan(fields: Mapping[str, Any]) -> Any:
    from torchtitan.distributed import ParallelDims

    return ParallelDims(**fields)


def _diffusers(fields: Mapping[str, Any]) -> Any:
    from diffusers import ContextParallelConfig

    return ContextParallelConfig(**fields)


def _lightning(fields: Mapping[str, Any]) -> Any:
    from lightning.pytorch.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(**fields)  # no dataclass
    return {name: getattr(strategy, f"_{name}") for name in ("data_parallel_size", "tensor_parallel_size")}


@cache
def megatron() -> Any:
    """Megatron-Core's ``TransformerConfig`` and what lists the groups of its ranks."""
    with warnings.catch_warnings():
        # On import it says which of its optional kernels are missing, and uses names that torch and itself have deprecated.
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.transformer import TransformerConfig

        return TransformerConfig, parallel_state.RankGenerator


def megatron_config(fields: Mapping[str, Any]) -> Any:
    """A small model with experts."""
    import torch

    rest: Flat = {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 8, "pipeline_dtype": torch.float32}
    # It would make one of each for every instance.
    rest |= dict.fromkeys(("init_method", "output_layer_init_method", "embedding_init_method"), torch.nn.init.normal_)
    experts = {"num_moe_experts": 8, "moe_ffn_hidden_size": 16, "add_bias_linear": False}
    with warnings.catch_warnings():
        # It advises on what we leave alone, and deprecates one of its own defaults.
        warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
        return megatron()[0](**rest, **experts, **fields)


CLASSES: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "transformers": _transformers,
    "lerobot": dict,
    "accelerate": _accelerate,
    "torchtitan": _torchtitan,
    "diffusers": _diffusers,
    "lightning": _lightning,
    "nemo": megatron_config,
}
"""Module of ``interop`` -> their fields as an instance of their class."""


def flat(node: Any) -> Flat:
    """Dotted path -> value of a dataclass or mapping, plans left whole."""
    return dict(_walk(dataclasses.asdict(node) if dataclasses.is_dataclass(node) else node, ""))


def _walk(node: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        if isinstance(value, Mapping) and not name.endswith("_plan"):
            yield from _walk(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def changes(before: Any, after: Any) -> Flat:
    """What is different in ``after``."""
    old, new = flat(before), flat(after)
    return {path: new.get(path) for path in {**old, **new} if old.get(path) != new.get(path)}


def convert(module: str) -> tuple[Callable[..., Flat], Callable[[Any], Any]]:
    """The two directions of a target."""
    to, back = getattr(interop, f"to_{module}"), getattr(interop, f"from_{module}")
    if module == "nemo":  # its data axis is what is left, and in the proofs nothing is
        return to, lambda source: dataclasses.replace(back(source), dp_replicate=1)
    return to, back
