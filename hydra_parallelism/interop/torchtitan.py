"""torchtitan's ``ParallelDims``: sizes, and nothing else."""

from typing import Any

from ..config import ParallelismConfig
from ..errors import ConfigurationError
from .fields import Field, Target, give, own_plan, read_theirs, take
from .ours import build, read_ours

__all__ = ["TARGET", "from_torchtitan", "to_torchtitan"]

_SIZES_ONLY = "ParallelDims holds sizes only; torchtitan has its own options for this"

TARGET = Target(
    name="ParallelDims",
    library="torchtitan",
    version="0.3.0",
    fields=(
        Field("dp_replicate", "dp_replicate"),
        Field("dp_shard", "dp_shard", "-1 takes what is left, there too"),
        Field("cp", "context_parallel.ring_degree"),
        Field("tp", "tp_size"),
        Field("pp", "pp_size"),
        Field("ep", "ep_size"),
        Field("world_size", None, "the launcher says it; kept as world_size, to be checked against it", by_hand=True),
        Field("spmd_backend", None, "how torchtitan annotates tensors", default="spmd_types"),
        Field(None, "tp_plan", "the model's own", out=own_plan),
        Field(None, "ep_plan", "the model's own", out=own_plan),
    ),
    cannot={
        "cfg_parallel": "torchtitan has no such axis",
        "context_parallel.ulysses_degree": "torchtitan's cp passes keys and values round a ring",
        "context_parallel.load_balance": _SIZES_ONLY,
        "enable_sequence_parallel": _SIZES_ONLY,
        "activation_checkpointing": _SIZES_ONLY,
        "fsdp.": _SIZES_ONLY,
        "pipeline.": _SIZES_ONLY,
    },
)


def to_torchtitan(config: Any, *, world_size: int | None = None) -> dict[str, Any]:
    """A layout as keyword arguments of torchtitan's ``ParallelDims``, ``world_size`` included.

    Raises:
        ConfigurationError: torchtitan cannot express something that is set; all such keys at once.
    """
    ours = read_ours(config, world_size=world_size)
    assert ours.topology is not None
    return give(TARGET, ours) | {"world_size": ours.topology.world_size}


def from_torchtitan(source: Any) -> ParallelismConfig:
    """torchtitan's ``ParallelDims``, or a mapping or JSON file with its fields, as ours.

    Raises:
        ConfigurationError: Not such a thing, or something that we cannot express.
    """
    theirs = read_theirs(TARGET, source)
    values = take(TARGET, theirs)
    size = theirs.get("world_size")
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        raise ConfigurationError(f"world_size={size!r}: must be a whole number of at least 1")
    return build(values | ({} if size is None else {"world_size": size}))
