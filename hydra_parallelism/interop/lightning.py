"""Lightning's ``ModelParallelStrategy``, and the ``Trainer`` arguments under which it does not launch again.

Processes started by us look like torchrun's to Lightning, so its ``Trainer`` takes them as they are, and takes the process
group that is there. It makes a mesh ``("data_parallel", "tensor_parallel")`` of its own; its ``configure_model`` hook may
use that one or ours.
"""

from typing import Any

from .. import world as world_module
from ..config import ParallelismConfig
from ..errors import ConfigurationError
from ..world import World
from .fields import Field, Target, give, read_theirs, take
from .ours import build, read_ours

__all__ = ["TARGET", "from_lightning", "to_lightning", "trainer_arguments"]

_NO_AXIS = "ModelParallelStrategy has a data axis and a tensor axis only"
_HOOK = "with Lightning this is code in configure_model, e.g. hydra_parallelism.parallelize(model)"
_ITS_OWN = "a choice of Lightning's, which is no key here"


def _size(value: Any) -> Any:
    if value == "auto":
        raise ConfigurationError('how many that is, Lightning says when it starts ("auto")\n    try: a number')
    return value


TARGET = Target(
    name="ModelParallelStrategy",
    library="lightning",
    version="2.6.6",
    fields=(
        Field("data_parallel_size", "dp_shard", '"auto" is refused', back=_size),
        Field("tensor_parallel_size", "tp_size", '"auto" is refused', back=_size),
        Field("save_distributed_checkpoint", None, _ITS_OWN, default=True),
        Field("process_group_backend", None, "runtime.backend says it: Lightning takes the group that is there"),
        Field("timeout", None, "runtime.timeout_s says it: Lightning takes the group that is there", by_hand=True),
        Field(None, "tp_plan", _HOOK),
        Field(None, "enable_sequence_parallel", _HOOK),
        Field(None, "activation_checkpointing", _HOOK),
        Field(None, "fsdp.cpu_offload", _HOOK),
        Field(None, "fsdp.mixed_precision", _HOOK),
        Field(None, "fsdp.reshard_after_forward", _HOOK),
        Field(None, "fsdp.wrap", _HOOK),
    ),
    cannot={
        "pp_size": _NO_AXIS,
        "dp_replicate": f"{_NO_AXIS}, and shards over all of the data axis",
        "cfg_parallel": _NO_AXIS,
        "context_parallel.": _NO_AXIS,
        "ep_size": _NO_AXIS,
        "ep_plan": _NO_AXIS,
        "pipeline.": _NO_AXIS,
    },
)


def to_lightning(config: Any, *, world_size: int | None = None) -> dict[str, Any]:
    """A layout as keyword arguments of Lightning's ``ModelParallelStrategy``: both sizes.

    Raises:
        ConfigurationError: It cannot express something that is set; all such keys at once.
    """
    return give(TARGET, read_ours(config, world_size=world_size))


def from_lightning(source: Any) -> ParallelismConfig:
    """Lightning's ``ModelParallelStrategy``, or a mapping or JSON file with its arguments, as ours.

    Raises:
        ConfigurationError: Not such a thing, or something that we cannot express.
    """
    if type(source).__name__ == TARGET.name:  # no dataclass: its arguments are attributes with an underscore in front
        names = [row.theirs for row in TARGET.fields if row.theirs is not None]
        source = {name: getattr(source, f"_{name}") for name in names}
    return build(take(TARGET, read_theirs(TARGET, source)))


def trainer_arguments(world: World | None = None) -> dict[str, int]:
    """``devices`` and ``num_nodes`` for a ``Trainer`` in the processes that are there, so that it starts none.

    Args:
        world: The processes, e.g. ``context.world``; ``None`` asks the launcher.

    Raises:
        ConfigurationError: Nodes with different numbers of processes, which Lightning has no words for.
    """
    world = world or world_module.read() or World()
    if world.local_size * world.nnodes != world.size:
        raise ConfigurationError(
            f"Lightning needs equally many processes on each node: devices={world.local_size} * num_nodes={world.nnodes} = "
            f"{world.local_size * world.nnodes}, but {world.source()}\n"
            "  try: start as many processes on each node"
        )
    return {"devices": world.local_size, "num_nodes": world.nnodes}
