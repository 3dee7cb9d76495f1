"""LeRobot's ``ParallelismConfig``: the node ``parallelism`` of its ``train_config.json``.

No release has the class yet (0.4.4 does not); this follows ``lerobot/configs/parallelism.py`` of its main branch. Degrees and
layout are ours, also what a ``-1`` and a config without degrees mean. Two things differ: LeRobot refuses context degrees above
1, having no engine for them yet, and ours work; and its ``cfg_parallel`` is no factor of the world: nothing uses it there.
"""

from typing import Any

from ..config import ParallelismConfig
from ..errors import ConfigurationError
from .fields import Field, Target, give, read_theirs, take, whole
from .ours import build, read_ours

__all__ = ["TARGET", "from_lerobot", "to_lerobot"]

_NO_MODEL_AXES = "LeRobot has data, context and guidance axes only"


def _shards(value: Any) -> Any:
    if value == -1:
        return value
    try:
        return whole(value)
    except ConfigurationError as error:
        raise ConfigurationError(f"{error}, or -1 for what is left") from None


def _branches(value: Any) -> Any:
    if whole(value) > 2:
        raise ConfigurationError("must be 1 or 2")
    return value


TARGET = Target(
    name="ParallelismConfig",
    library="lerobot",
    version="main of 2026",
    fields=(
        Field("dp_replicate", "dp_replicate", back=whole),
        Field("dp_shard", "dp_shard", "`-1` takes what is left, on both sides", back=_shards),
        Field("context_parallel.ring_degree", "context_parallel.ring_degree", back=whole),
        Field("context_parallel.ulysses_degree", "context_parallel.ulysses_degree", back=whole),
        Field("cfg_parallel", "cfg_parallel", "2 sets `inference=true`", back=_branches),
    ),
    cannot={
        **dict.fromkeys(("pp_size", "tp_size", "ep_size", "tp_plan", "ep_plan", "pipeline."), _NO_MODEL_AXES),
        "enable_sequence_parallel": _NO_MODEL_AXES,
        "context_parallel.load_balance": "LeRobot has no such choice",
        "activation_checkpointing": "LeRobot has it in another node, accelerator.activation_checkpointing.mode",
        "fsdp.mixed_precision": "LeRobot has it in another node, accelerator.mixed_precision",
        "fsdp.wrap": "LeRobot has it in another node, accelerator.fsdp.wrap_modules",
        "fsdp.": "LeRobot has it in another node, accelerator.fsdp",
    },
)


def to_lerobot(config: Any, *, world_size: int | None = None) -> dict[str, Any]:
    """A layout as the fields of LeRobot's class, plain and nested as its JSON is. Pure.

    Args:
        config: A ``ParallelismConfig``, a mapping or ``DictConfig`` with its keys, a ``Topology`` or a ``ParallelContext``.
        world_size: How many processes; without it a ``dp_shard`` of ``-1`` and a config without degrees stay as they are.

    Raises:
        ConfigurationError: LeRobot cannot express something that is set; all such keys at once.
    """
    return give(TARGET, read_ours(config, world_size=world_size, may_be_open=("dp_shard",)))


def from_lerobot(source: Any) -> ParallelismConfig:
    """LeRobot's layout as our config; fields that are missing have their defaults.

    Args:
        source: An instance of its class, a mapping, or the path of a JSON file; of the layout or of a whole train config.

    Raises:
        ConfigurationError: A field that LeRobot does not have, or a value that it refuses.
    """
    source = getattr(source, "parallelism", source)
    theirs = read_theirs(TARGET, source, under="parallelism")
    if "dataset" in theirs and "parallelism" not in theirs:
        theirs = {}  # a train config from before there was such a node
    values = take(TARGET, theirs)
    return build(values | {"inference": values.get("cfg_parallel") == 2})
