"""diffusers' ``ContextParallelConfig``, which has the names of our two context axes.

The mesh that goes with it is :func:`~.meshes.diffusers_mesh`.
"""

from typing import Any

from ..config import ParallelismConfig
from ..errors import ConfigurationError
from .fields import Field, Target, give, read_theirs, take
from .ours import build, read_ours

__all__ = ["TARGET", "from_diffusers", "to_diffusers"]

_NO_AXIS = "diffusers has no such axis beside context parallelism"
_NOT_THERE = "ContextParallelConfig does not say how weights are held"
_TUNING = "a choice inside diffusers, which is no key here"
_OUTSIDE = "outside: diffusers is given the mesh of one sequence"

TARGET = Target(
    name="ContextParallelConfig",
    library="diffusers",
    version="0.42.1",
    fields=(
        Field("ring_degree", "context_parallel.ring_degree"),
        Field("ulysses_degree", "context_parallel.ulysses_degree"),
        Field("convert_to_fp32", None, _TUNING, default=True),
        Field("rotate_method", None, _TUNING, default="allgather"),
        Field("mesh", None, "diffusers_mesh(context) gives it", by_hand=True),
        Field("ulysses_anything", None, _TUNING, default=False),
        Field("ring_anything", None, _TUNING, default=False),
        Field(None, "dp_replicate", _OUTSIDE),
        Field(None, "cfg_parallel", _OUTSIDE),
        Field(None, "context_parallel.load_balance", "diffusers cuts in order; without a causal mask the work is equal anyway"),
    ),
    cannot={
        "pp_size": _NO_AXIS,
        "dp_shard": _NOT_THERE,
        "tp_size": _NO_AXIS,
        "ep_size": _NO_AXIS,
        "tp_plan": _NO_AXIS,
        "ep_plan": _NO_AXIS,
        "enable_sequence_parallel": _NO_AXIS,
        "pipeline.": _NO_AXIS,
        "activation_checkpointing": _NOT_THERE,
        "fsdp.": _NOT_THERE,
    },
)


def to_diffusers(config: Any, *, world_size: int | None = None) -> dict[str, Any]:
    """A layout as keyword arguments of diffusers' ``ContextParallelConfig``.

    Without a mesh diffusers makes one over ``ring_degree * ulysses_degree`` ranks that are all there are. With replicas or
    guidance branches around it, it needs :func:`~.meshes.diffusers_mesh`.

    Raises:
        ConfigurationError: diffusers cannot express something that is set, or there is no context parallelism.
    """
    ours = read_ours(config, world_size=world_size)
    given = give(TARGET, ours)
    if ours["cp"] == 1:
        raise ConfigurationError(
            f"diffusers {TARGET.name} needs a ring_degree or ulysses_degree above 1, but {ours.key}.context_parallel has none\n"
            f"  try: {ours.key}.context_parallel.ulysses_degree=2, or load the model without {TARGET.name}"
        )
    return given


def from_diffusers(source: Any) -> ParallelismConfig:
    """diffusers' ``ContextParallelConfig``, or a mapping or JSON file with its fields, as ours. Its mesh is not read.

    Raises:
        ConfigurationError: Not such a thing, or something that we cannot express.
    """
    return build(take(TARGET, read_theirs(TARGET, source)))
