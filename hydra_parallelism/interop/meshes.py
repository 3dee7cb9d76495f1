"""A running job's meshes as other libraries name them. Nothing here makes a process group: ours are handed over.

The only module of the package that imports torch, and it does so when one of its functions is called.
"""

from typing import TYPE_CHECKING

from ..errors import ConfigurationError
from .accelerate import to_accelerate
from .diffusers import to_diffusers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ..runtime import ParallelContext

__all__ = ["accelerate_mesh", "diffusers_mesh"]

_AXES = (("dp_replicate", "dp_replicate"), ("dp_shard", "dp_shard"), ("cp", "ring"), ("tp", "tp"))
"""accelerate's axes, outermost first, and ours."""
_JOINT = (
    ("dp", ("dp_replicate", "dp_shard"), "dp"),
    ("dp_shard_cp", ("dp_shard", "cp"), "fsdp"),
    ("dp_cp", ("dp_replicate", "dp_shard", "cp"), "dp_cp"),
)
"""accelerate's joint name, what it is made of, and our axis over the same ranks."""


def accelerate_mesh(context: "ParallelContext") -> "DeviceMesh":
    """The mesh that accelerate would build, over the process groups that are there.

    It has the axes of more than one rank out of ``(dp_replicate, dp_shard, cp, tp)``, and the joint names ``dp``,
    ``dp_shard_cp`` and ``dp_cp``. Hand it over before the ``Accelerator`` is made::

        theirs = accelerate.ParallelismConfig(**to_accelerate(context))
        theirs.device_mesh = accelerate_mesh(context)
        accelerator = accelerate.Accelerator(parallelism_config=theirs, ...)

    Raises:
        ConfigurationError: accelerate has no such layout, or has no mesh for it (one process, or Ulysses in DeepSpeed).
    """
    from torch.distributed.device_mesh import DeviceMesh

    from .._compat import name_together

    to_accelerate(context)
    topology = context.topology
    present = {name: axis for name, axis in _AXES if topology.size(axis) > 1}
    if topology.ulysses > 1 or not present:
        deepspeed = (
            f"{context.key}.context_parallel.ulysses_degree={topology.ulysses} is DeepSpeed's, which makes its own groups"
        )
        why = deepspeed if topology.ulysses > 1 else "there is one process"
        raise ConfigurationError(f"accelerate has no mesh for this layout: {why}")
    mesh = DeviceMesh.from_group(
        [context.mesh[axis].get_group() for axis in present.values()],
        context.device.type,
        mesh=context.mesh[tuple(present.values())].mesh,
        mesh_dim_names=tuple(present),
    )
    for joint, parts, axis in _JOINT:
        axes = tuple(name for name in parts if name in present)
        if axes:
            name_together(mesh, axes, joint, context.mesh[axis].get_group())
    return mesh


def diffusers_mesh(context: "ParallelContext") -> "DeviceMesh":
    """The mesh ``("ring", "ulysses")`` of this rank's sequence, for ``ContextParallelConfig(mesh=...)``.

    Raises:
        ConfigurationError: As :func:`~.diffusers.to_diffusers`.
    """
    to_diffusers(context)
    return context.mesh["ring", "ulysses"]
