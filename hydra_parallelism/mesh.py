"""Topology -> process groups -> device meshes.

Two steps with different rules. :func:`build_groups` is collective: it makes one communicator for every distinct set of more
than one rank along any axis, all up front and in one fixed order. ``Meshes`` only combines these groups into ``DeviceMesh``
objects; no look-up makes a group, and asking twice gives the same object.

* The group that spans the world is the default group. Axes of size 1 share one self group.
* A rank makes only the groups it belongs to (``new_group(..., use_local_synchronization=True)``), so the cost does not grow
  with the number of groups in the world. Torch names such a group by its ranks and by how many groups exist so far, so every
  rank must make equally many in the same order. It does: the axes cut the world into translates of one set, so whether two
  axes share a set does not depend on the rank.
* Every mesh is a slice of a mesh over the whole world, as FSDP and tensor parallelism need to be combined. The views:

=======================================================  ==================================
view                                                     answers for
=======================================================  ==================================
``(pp, dp_replicate, fsdp, cfg, tp)``                    parameters
``(pp, dp_replicate, cfg, efsdp, ep)``                   experts
``(pp, dp_replicate, dp_shard, cfg, ring, ulysses, tp)``  single base axes
``(pp, dp, cfg, cp, tp)``                                batches and sequences
``(pp, dp_cp, cfg, tp)``                                 losses
=======================================================  ==================================
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .errors import ConfigurationError, LaunchError
from .topology import AXES, BASE_AXES, DERIVED_AXES, EXPERT_RANKS, SPARSE_AXES, Topology, unknown_axis

__all__ = ["AxisGroups", "Meshes", "build_groups"]

_VIEWS: tuple[tuple[str, ...], ...] = (
    ("pp", "dp_replicate", "fsdp", "cfg", "tp"),
    ("pp", "dp_replicate", "cfg", "efsdp", "ep"),
    BASE_AXES,
    ("pp", "dp", "cfg", "cp", "tp"),
    ("pp", "dp_cp", "cfg", "tp"),
)


@dataclass(frozen=True)
class AxisGroups:
    """The process groups of one rank."""

    of_axis: dict[str, dist.ProcessGroup]
    """Axis -> the group along it that holds this rank."""
    made: list[dist.ProcessGroup] = field(default_factory=list)
    """The groups made here, in order: everything but the default group."""


def build_groups(topology: Topology, rank: int, *, timeout: timedelta, local: bool = True) -> AxisGroups:
    """Make the process groups of this rank. Collective: call on all ranks, after the default group is there.

    Args:
        topology: The layout; its world is the default group's.
        rank: This process.
        timeout: For every group made.
        local: Each rank makes its own groups only. ``False`` is torch's ordinary way, where every rank takes part in making
            every group; taken by itself where a backend cannot do the other.

    Raises:
        LaunchError: The default group has another size than the topology.
    """
    if dist.get_world_size() != topology.world_size:
        raise LaunchError(f"the default process group has {dist.get_world_size()} ranks, the topology {topology.world_size}")
    found: dict[tuple[int, ...], dist.ProcessGroup] = {}
    made: list[dist.ProcessGroup] = []
    of_axis: dict[str, dist.ProcessGroup] = {}
    for axis in AXES:
        ranks = topology.group(axis, rank)
        if len(ranks) == topology.world_size:
            of_axis[axis] = _default_group()
            continue
        if ranks not in found:
            found[ranks], local = _make_group(topology, axis, ranks, timeout, local)
            made.append(found[ranks])
        of_axis[axis] = found[ranks]
        _verify(axis, of_axis[axis], ranks)
    return AxisGroups(of_axis, made)


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _make_group(
    topology: Topology, axis: str, ranks: tuple[int, ...], timeout: timedelta, local: bool
) -> tuple[dist.ProcessGroup, bool]:
    """Make the group along an axis, and say whether the local way still works."""
    name = "self" if len(ranks) == 1 else axis
    if local:
        try:
            # Raised before anything is sent, on every rank alike: MPI (ValueError) and TorchComms (NotImplementedError).
            group = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True, group_desc=name)
            return group, True
        except (NotImplementedError, ValueError):
            local = False
    everyone = ((r,) for r in range(topology.world_size)) if len(ranks) == 1 else topology.groups(axis)
    mine: dist.ProcessGroup | None = None
    for members in everyone:
        group = dist.new_group(list(members), timeout=timeout, group_desc=name)
        mine = group if members == ranks else mine
    assert mine is not None
    return mine, local


def _verify(axis: str, group: dist.ProcessGroup, ranks: tuple[int, ...]) -> None:
    built = tuple(dist.get_process_group_ranks(group))
    if built != ranks:
        raise LaunchError(f"the process group along {axis} holds ranks {built}, but the topology says {ranks}")


class Meshes:
    """Named device meshes of one rank: ``meshes["tp"]``, ``meshes["dp_replicate", "fsdp"]``.

    Every axis is there, size 1 included. A tuple names axes outermost first that share no base axis; its mesh has them as
    dimensions, in that order, and holds the ranks that agree with this one on all other axes.
    """

    def __init__(self, topology: Topology, rank: int, groups: AxisGroups, device_type: str) -> None:
        self._topology, self._rank = topology, rank
        self._groups, self._device_type = groups, device_type
        self._views: dict[tuple[str, ...], DeviceMesh] = {}
        self._found: dict[tuple[str, ...], DeviceMesh] = {}

    def __getitem__(self, axes: str | tuple[str, ...]) -> DeviceMesh:
        """The mesh over one axis or several.

        Raises:
            ConfigurationError: An unknown name, or a tuple that is no view: the message says which names there are, or in
                which order they go.
        """
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        if names not in self._found:
            self._found[names] = self._slice(names)
        return self._found[names]

    def __iter__(self) -> Iterator[str]:
        return iter(AXES)

    def __len__(self) -> int:
        return len(AXES)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}={self._topology.size(axis)}" for axis in AXES)
        return f"Meshes({sizes})"

    def __contains__(self, axis: object) -> bool:
        return axis in AXES

    def _slice(self, names: tuple[str, ...]) -> DeviceMesh:
        _check_names(names)
        axes = _view_for(names)
        if axes not in self._views:
            self._views[axes] = self._make_view(axes)
        view = self._views[axes]
        return view if names == axes else view[names[0] if len(names) == 1 else names]

    def _make_view(self, axes: tuple[str, ...]) -> DeviceMesh:
        ranks = _arrange(self._topology, axes)
        groups = [self._groups.of_axis[axis] for axis in axes]
        view = DeviceMesh.from_group(groups, self._device_type, mesh=ranks, mesh_dim_names=axes)
        built = tuple(view.shape), tuple(view.get_coordinate() or ())
        wanted = (
            tuple(self._topology.size(axis) for axis in axes),
            tuple(self._topology.index(axis, self._rank) for axis in axes),
        )
        if built != wanted:
            raise LaunchError(f"the mesh {axes} came out as (shape, coordinate) {built}, but the topology says {wanted}")
        return view


def _arrange(topology: Topology, axes: tuple[str, ...]) -> torch.Tensor:
    """All ranks as an int tensor with one dim per axis of a view, row-major."""
    ranks = torch.arange(topology.world_size, dtype=torch.int).view([topology.size(axis) for axis in BASE_AXES])
    order = [BASE_AXES.index(part) for axis in axes for part in _parts(axis)]
    return ranks.permute(order).reshape([topology.size(axis) for axis in axes]).contiguous()


def _parts(axis: str) -> tuple[str, ...]:
    """Base axes of an axis. The two expert axes share theirs: together they are the ranks that hold one copy."""
    if axis in SPARSE_AXES:
        return EXPERT_RANKS if axis == "efsdp" else ()
    return DERIVED_AXES.get(axis, (axis,))


def _view_for(names: tuple[str, ...]) -> tuple[str, ...]:
    for axes in _VIEWS:
        if set(names) <= set(axes):
            return axes
    taken = [part for name in names for part in _parts(name)]
    rest = [axis for axis in BASE_AXES if axis not in taken]
    return tuple(sorted([*names, *rest], key=_outermost))


def _check_names(names: tuple[str, ...]) -> None:
    for name in names:
        if name not in AXES:
            raise ConfigurationError(unknown_axis(name))
    if not names:
        raise ConfigurationError(f"name at least one axis: {', '.join(AXES)}")
    sparse = any(name in SPARSE_AXES for name in names)
    if sparse and not set(names) <= set(_VIEWS[1]):
        raise ConfigurationError(f"{names} mixes the expert axes with dense ones; beside them are {', '.join(_VIEWS[1])}")
    if not sparse:
        parts = [part for name in names for part in _parts(name)]
        shared = sorted({part for part in parts if parts.count(part) > 1}, key=BASE_AXES.index)
        if shared:
            raise ConfigurationError(f"{names} counts {', '.join(shared)} twice, so it is not a mesh")
    ordered = tuple(sorted(names, key=_VIEWS[1].index if sparse else _outermost))
    if ordered != names:
        raise ConfigurationError(f"{names} is not outermost first; ask for {ordered}")


def _outermost(axis: str) -> int:
    return BASE_AXES.index(_parts(axis)[0])
