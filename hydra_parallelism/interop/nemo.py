"""NeMo's sizes, as Megatron-Core's ``TransformerConfig`` has them (the names of ``MegatronStrategy`` and of its recipes).

Two things differ. There is no data-parallel size: it is what the others leave of the world, and whether those ranks replicate
or shard is said elsewhere (``DistributedDataParallelConfig``); the argument ``data`` says it here. And experts have a tensor
size of their own, where here a rank of ``ep`` holds whole experts: ``expert_tensor_parallel_size=1``.
"""

from typing import Any

from ..config import ParallelismConfig
from ..errors import ConfigurationError
from .fields import Field, Target, give, own_plan, read_theirs, take
from .ours import Ours, build, read_ours

__all__ = ["TARGET", "from_nemo", "to_nemo"]

_ELSEWHERE = "Megatron has its own options for this, outside these sizes"
_REST = "what the other sizes leave of the world"

TARGET = Target(
    name="TransformerConfig",
    library="megatron-core",
    version="0.16.1",
    fields=(
        Field("tensor_model_parallel_size", "tp_size"),
        Field("pipeline_model_parallel_size", "pp_size", "above 1, Megatron wants pipeline_dtype too"),
        Field("virtual_pipeline_model_parallel_size", None, "here the schedule and the split say it"),
        Field("context_parallel_size", None, "ring_degree * ulysses_degree; cp_comm_type tells them apart", by_hand=True),
        Field("cp_comm_type", "context_parallel.ulysses_degree", '"p2p" ring, "a2a" Ulysses, "a2a+p2p" both', by_hand=True),
        Field("hierarchical_context_parallel_sizes", "context_parallel.ring_degree", "[ulysses, ring]", by_hand=True),
        Field("expert_model_parallel_size", "ep_size"),
        Field("expert_tensor_parallel_size", None, "1 where there is ep_size", by_hand=True),
        Field("sequence_parallel", "enable_sequence_parallel", by_hand=True),
        Field(None, "dp_replicate", f"{_REST}: data=dp_replicate", by_hand=True),
        Field(None, "dp_shard", f"{_REST}: data=dp_shard", by_hand=True),
        Field(None, "tp_plan", "the layers' own", out=own_plan),
        Field(None, "ep_plan", "the layers' own", out=own_plan),
    ),
    cannot={
        "cfg_parallel": "Megatron has no such axis",
        "context_parallel.load_balance": "Megatron always cuts its batches zig-zag",
        "activation_checkpointing": _ELSEWHERE,
        "fsdp.": _ELSEWHERE,
        "pipeline.": _ELSEWHERE,
    },
)


def to_nemo(config: Any, *, world_size: int | None = None, data: str = "dp_replicate") -> dict[str, Any]:
    """A layout as keyword arguments of Megatron-Core's ``TransformerConfig``.

    Args:
        config: A config, a topology or a running context.
        world_size: How many processes, where the config leaves a degree open.
        data: What Megatron does with the ranks of the data axis: ``dp_replicate``, or ``dp_shard`` where it is told so by
            ``DistributedDataParallelConfig(use_megatron_fsdp=True, ...)``.

    Raises:
        ConfigurationError: Megatron cannot express something that is set.
    """
    _check_data(data)
    ours = read_ours(config, world_size=world_size)
    given = give(TARGET, ours)
    _refuse_other_data(ours, data)
    return given | _context_to(ours) | _experts_to(ours) | {"sequence_parallel": _is_sequence_parallel(ours)}


def from_nemo(source: Any, *, data: str = "dp_replicate") -> ParallelismConfig:
    """Megatron-Core's ``TransformerConfig`` or ``ModelParallelConfig``, or a mapping or JSON file of sizes, as ours.

    Of an object only the sizes are read; in a mapping or file anything else is refused. The data axis is ``-1``: it takes what
    is left of the world, as it does there.

    Args:
        source: The object, mapping or path.
        data: What the data axis is, ``dp_replicate`` or ``dp_shard``; experts spread over it need ``dp_shard``.

    Raises:
        ConfigurationError: Not such a thing, or something that we cannot express.
    """
    _check_data(data)
    if hasattr(source, "tensor_model_parallel_size"):
        names = [row.theirs for row in TARGET.fields if row.theirs is not None]
        source = {name: getattr(source, name) for name in names if hasattr(source, name)}
    theirs = read_theirs(TARGET, source)
    values = take(TARGET, theirs) | _context_from(theirs)
    _check_experts(theirs)
    if theirs.get("sequence_parallel"):
        values["enable_sequence_parallel"] = True
    return build(values | {data: -1})


def _check_data(data: str) -> None:
    if data not in ("dp_replicate", "dp_shard"):
        raise ConfigurationError(f"data={data!r}: dp_replicate or dp_shard")


def _refuse_other_data(ours: Ours, data: str) -> None:
    other = "dp_shard" if data == "dp_replicate" else "dp_replicate"
    if ours[other] > 1:
        raise ConfigurationError(
            f"megatron-core {TARGET.name} cannot express {ours.key}.{other}={ours[other]}: its data axis is {_REST}, "
            f"read as {data}\n"
            f"  try: {ours.key}.{other}=1" + (f", or data={other!r}" if ours[data] == 1 else "")
        )


def _is_sequence_parallel(ours: Ours) -> bool:
    """Megatron refuses it without a tensor axis, where it does nothing here."""
    return bool(ours["enable_sequence_parallel"]) and ours["tp"] > 1


def _context_to(ours: Ours) -> dict[str, Any]:
    ring, ulysses = ours["ring"], ours["ulysses"]
    size = {"context_parallel_size": ring * ulysses}
    if ulysses == 1:
        return size | ({"cp_comm_type": "p2p"} if ring > 1 else {})
    if ring == 1:
        return size | {"cp_comm_type": "a2a"}
    return size | {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": [ulysses, ring]}


def _context_from(theirs: dict[str, Any]) -> dict[str, Any]:
    size, kind = theirs.get("context_parallel_size") or 1, theirs.get("cp_comm_type") or "p2p"
    levels = theirs.get("hierarchical_context_parallel_sizes")
    if size == 1:
        return {}
    if kind in ("p2p", "a2a") and not levels:
        return {f"context_parallel.{'ring' if kind == 'p2p' else 'ulysses'}_degree": size}
    if kind == "a2a+p2p" and levels and len(levels) == 2 and levels[0] * levels[1] == size:
        return {"context_parallel.ulysses_degree": levels[0], "context_parallel.ring_degree": levels[1]}
    raise ConfigurationError(
        f"megatron-core {TARGET.name} is not one that we can read:\n"
        f"  context_parallel_size={size!r}, cp_comm_type={kind!r}, hierarchical_context_parallel_sizes={levels!r}: here it is "
        '"p2p" (a ring), "a2a" (Ulysses), or "a2a+p2p" with two sizes [ulysses, ring] of that product'
    )


def _experts_to(ours: Ours) -> dict[str, Any]:
    # Left alone, Megatron would split experts over its tensor axis as well.
    return {"expert_tensor_parallel_size": 1} if ours["ep"] > 1 else {}


def _check_experts(theirs: dict[str, Any]) -> None:
    tp, ep = theirs.get("tensor_model_parallel_size") or 1, theirs.get("expert_model_parallel_size") or 1
    etp = theirs.get("expert_tensor_parallel_size") or tp
    wanted, why = (1, "a rank of ep holds whole experts") if ep > 1 else (tp, "experts follow tp_size")
    if etp != wanted:
        raise ConfigurationError(
            f"megatron-core {TARGET.name} is not one that we can read:\n"
            f"  expert_tensor_parallel_size={etp} (tensor_model_parallel_size={tp} unless it is said) with "
            f"expert_model_parallel_size={ep}: here {why}\n"
            f"    try: expert_tensor_parallel_size={wanted}"
        )
