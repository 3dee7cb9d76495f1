"""LeRobot's ``ParallelismConfig``, the node ``parallelism`` of its ``train_config.json``."""

from typing import Any

from ..config import ParallelismConfig
from .fields import Field, Target, give, read_theirs, take
from .ours import build, read_ours

__all__ = ["TARGET", "from_lerobot", "to_lerobot"]

_NO_MODEL_AXES = "LeRobot has data, context and guidance axes only"
_ELSEWHERE = "LeRobot keeps sharding policy in its accelerator config, not here"

TARGET = Target(
    name="ParallelismConfig",
    library="lerobot",
    version="main, 2026",
    fields=(
        Field("dp_replicate", "dp_replicate"),
        Field("dp_shard", "dp_shard", "-1 takes what is left, there too"),
        Field("context_parallel.ring_degree", "context_parallel.ring_degree"),
        Field("context_parallel.ulysses_degree", "context_parallel.ulysses_degree"),
        Field("cfg_parallel", "cfg_parallel"),
    ),
    cannot={
        "pp_size": _NO_MODEL_AXES,
        "tp_size": _NO_MODEL_AXES,
        "ep_size": _NO_MODEL_AXES,
        "tp_plan": _NO_MODEL_AXES,
        "ep_plan": _NO_MODEL_AXES,
        "enable_sequence_parallel": _NO_MODEL_AXES,
        "pipeline.": _NO_MODEL_AXES,
        "context_parallel.load_balance": "LeRobot has no such choice",
        "activation_checkpointing": _ELSEWHERE,
        "fsdp.": _ELSEWHERE,
    },
)


def to_lerobot(config: Any, *, world_size: int | None = None) -> dict[str, Any]:
    """A layout as keyword arguments of LeRobot's class, ``context_parallel`` a mapping, as its JSON has it."""
    return give(TARGET, read_ours(config, world_size=world_size, may_be_open=("dp_shard",)))


def from_lerobot(source: Any) -> ParallelismConfig:
    """LeRobot's layout as ours."""
    values = take(TARGET, read_theirs(TARGET, source, under="parallelism"))
    return build(values | {"inference": values.get("cfg_parallel") == 2})
