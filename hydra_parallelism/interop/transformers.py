"""Transformers' ``DistributedConfig``."""

from typing import Any

from ..config import ParallelismConfig
from .fields import Field, Target, give, read_theirs, take
from .ours import build, read_ours

__all__ = ["TARGET", "from_transformers", "to_transformers"]

TARGET = Target(
    name="DistributedConfig",
    library="transformers",
    version="5.24.0",
    fields=(
        Field("tp_size", "tp_size"),
        Field("fsdp_size", "dp_shard"),
        Field("dp_replicate_size", "dp_replicate", default=1),
        Field("pp_size", "pp_size"),
        Field("ep_size", "ep_size"),
    ),
)


def to_transformers(config: Any, *, world_size: int | None = None) -> dict[str, Any]:
    """A layout as keyword arguments of ``DistributedConfig``."""
    return give(TARGET, read_ours(config, world_size=world_size))


def from_transformers(source: Any) -> ParallelismConfig:
    """A ``DistributedConfig`` as ours."""
    return build(take(TARGET, read_theirs(TARGET, source)))
