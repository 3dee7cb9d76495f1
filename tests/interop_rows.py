"""A proof for each row of each target: change our key, and exactly their field changes; read it back, and exactly ours does.

``CLASSES`` makes an instance of their real class where there is one, so that what is compared is what their library made of it.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
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

PROOFS: dict[str, tuple[Proof, ...]] = {
    "transformers": (
        Proof("tp_size", "tp_size", {**_FSDP, "tp_plan": "auto"}, {"tp_size": 2}, 2),
        Proof("tp_plan", "tp_plan", _TENSOR, {"tp_plan": {"lm_head": "replicate"}}, {"lm_head": "replicate"}),
        Proof(
            "enable_sequence_parallel", "enable_sequence_parallel", {"fsdp_size": 2}, {"enable_sequence_parallel": True}, True,
            reads=True,
        ),
        Proof(
            "enable_expert_parallel", "ep_size", _TENSOR, {"enable_expert_parallel": True}, 2, frozenset({"ep_plan"}), reads=True
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
}  # fmt: skip
"""Module of ``interop`` -> its proofs, in the order of its rows."""


def _transformers(fields: Mapping[str, Any]) -> Any:
    from transformers.distributed import DistributedConfig

    return DistributedConfig(**fields)


CLASSES: dict[str, Callable[[Mapping[str, Any]], Any]] = {"transformers": _transformers, "lerobot": dict}
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
    return getattr(interop, f"to_{module}"), getattr(interop, f"from_{module}")
