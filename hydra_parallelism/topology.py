"""What a config means on a number of processes: ``resolve()`` and the frozen ``Topology`` it returns.

``resolve`` is pure and the only home of the world-size equation. Ranks are laid out row-major over the base axes, outermost
first: ``(pp, dp_replicate, dp_shard, cfg, ring, ulysses, tp)``. A derived axis is a set of base axes with all others fixed;
its members are in row-major order too:

===========  =====================================  ==============================================================
axis         made of                                what it is for
===========  =====================================  ==============================================================
``dp``       dp_replicate, dp_shard                 who reads different batches
``cp``       ring, ulysses                          who holds pieces of one sequence
``fsdp``     dp_shard, ring, ulysses                who shards parameters
``dp_cp``    dp_replicate, dp_shard, ring, ulysses  over whom a loss is averaged
===========  =====================================  ==============================================================

Experts see the same ranks through a sparse view ``(pp, dp_replicate, cfg, efsdp, ep)``: the ranks of ``fsdp * tp``, in
row-major order, cut into blocks of ``ep`` neighbours. ``efsdp = fsdp * tp / ep``.

Example, 8 ranks with ``dp_replicate=2, dp_shard=2, tp_size=2``:

====  ============  ========  ==  =======
rank  dp_replicate  dp_shard  tp  dp_rank
====  ============  ========  ==  =======
0, 1  0             0         0,1  0
2, 3  0             1         0,1  1
4, 5  1             0         0,1  2
6, 7  1             1         0,1  3
====  ============  ========  ==  =======

Nothing here imports torch. Looking a rank up takes constant time, listing one group takes time proportional to its size.
"""

import difflib
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from ._equation import FACTORS, Degrees, read_degrees, solve
from .errors import ConfigurationError

__all__ = ["AXES", "BASE_AXES", "DERIVED_AXES", "EXPERT_RANKS", "SPARSE_AXES", "Topology", "resolve"]

BASE_AXES = ("pp", "dp_replicate", "dp_shard", "cfg", "ring", "ulysses", "tp")
"""The factors of the world size, outermost first."""

DERIVED_AXES: dict[str, tuple[str, ...]] = {
    "dp": ("dp_replicate", "dp_shard"),
    "cp": ("ring", "ulysses"),
    "fsdp": ("dp_shard", "ring", "ulysses"),
    "dp_cp": ("dp_replicate", "dp_shard", "ring", "ulysses"),
}
"""Derived axis -> the base axes it is made of."""

SPARSE_AXES = ("efsdp", "ep")
"""The two axes that experts see in place of ``fsdp`` and ``tp``."""

AXES = (*BASE_AXES, *DERIVED_AXES, *SPARSE_AXES)
"""Every axis name, in the one order in which process groups are made."""

EXPERT_RANKS = ("dp_shard", "ring", "ulysses", "tp")
"""The base axes whose ranks share one copy of the experts: what ``efsdp`` and ``ep`` cut anew."""


@dataclass(frozen=True)
class Topology:
    """A resolved layout: integers only, product equal to the world size.

    Made by :func:`resolve`; the constructor checks nothing that ``resolve`` has checked already.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cfg: int = 1
    ring: int = 1
    ulysses: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def world_size(self) -> int:
        """pp * dp_replicate * dp_shard * cfg * ring * ulysses * tp."""
        return math.prod(getattr(self, axis) for axis in BASE_AXES)

    @property
    def dp(self) -> int:
        """dp_replicate * dp_shard."""
        return self.dp_replicate * self.dp_shard

    @property
    def cp(self) -> int:
        """ring * ulysses."""
        return self.ring * self.ulysses

    @property
    def fsdp(self) -> int:
        """dp_shard * ring * ulysses."""
        return self.dp_shard * self.cp

    @property
    def dp_cp(self) -> int:
        """dp_replicate * dp_shard * ring * ulysses."""
        return self.dp * self.cp

    @property
    def efsdp(self) -> int:
        """fsdp * tp / ep."""
        return self.fsdp * self.tp // self.ep

    @property
    def dp_world_size(self) -> int:
        """How many ranks read different batches: dp_replicate * dp_shard."""
        return self.dp

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are sharded over ranks: dp_shard > 1 or cp > 1."""
        return self.fsdp > 1

    @property
    def is_replicated_only(self) -> bool:
        """Whether this is plain DDP: dp_replicate > 1 and nothing sharded."""
        return self.dp_replicate > 1 and not self.is_sharded

    def degrees(self) -> dict[str, int]:
        """Base degrees and ``ep``, outermost first."""
        return asdict(self)

    def size(self, axis: str) -> int:
        """Ranks along an axis.

        Raises:
            ConfigurationError: No axis has that name.
        """
        _check_axis(axis)
        return int(getattr(self, axis))

    def coordinate(self, rank: int) -> dict[str, int]:
        """Base axis -> index of a rank along it. Constant time.

        Raises:
            ConfigurationError: The rank is not in the world.
        """
        self._check_rank(rank)
        found: dict[str, int] = {}
        for axis in reversed(BASE_AXES):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return {axis: found[axis] for axis in BASE_AXES}

    def rank(self, **coordinate: int) -> int:
        """The rank at a coordinate over base axes; axes left out are 0. Constant time.

        Raises:
            ConfigurationError: Not a base axis, or an index outside it.
        """
        number = 0
        for axis in BASE_AXES:
            size, index = getattr(self, axis), coordinate.pop(axis, 0)
            if not 0 <= index < size:
                raise ConfigurationError(f"{axis}={index} is outside the axis, which has {size} rank(s)")
            number = number * size + index
        if coordinate:
            raise ConfigurationError(f"not base axes: {', '.join(coordinate)}; a coordinate is over {', '.join(BASE_AXES)}")
        return number

    def index(self, axis: str, rank: int) -> int:
        """Position of a rank in its own group along any axis. Constant time."""
        _check_axis(axis)
        at = self.coordinate(rank)
        if axis in SPARSE_AXES:
            block, inside = divmod(self._expert_index(at), self.ep)
            return block if axis == "efsdp" else inside
        return self._position(_parts(axis), at)

    def dp_rank(self, rank: int) -> int:
        """Which share of the batches a rank reads: its index along ``dp``, equal for its cfg, cp, pp and tp peers."""
        return self.index("dp", rank)

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """Ranks of the group along an axis that holds ``rank``, in order. Time proportional to the group.

        Raises:
            ConfigurationError: No such axis, or the rank is not in the world.
        """
        _check_axis(axis)
        at = self.coordinate(rank)
        if axis not in SPARSE_AXES:
            return self._members(_parts(axis), at)
        return self._expert_group(axis, at)

    def groups(self, axis: str) -> Iterator[tuple[int, ...]]:
        """Every group along an axis, by lowest rank, one at a time. Together they partition the world."""
        _check_axis(axis)
        return (self.group(axis, rank) for rank in range(self.world_size) if self.index(axis, rank) == 0)

    def _members(self, parts: tuple[str, ...], at: dict[str, int]) -> tuple[int, ...]:
        first = self.rank(**{axis: index for axis, index in at.items() if axis not in parts})
        ranks = [first]
        for size, stride in self._runs(parts):
            steps = range(0, size * stride, stride)
            ranks = [rank + step for rank in ranks for step in steps]
        return tuple(ranks)

    def _runs(self, parts: tuple[str, ...]) -> list[tuple[int, int]]:
        """(size, stride) of each axis, outermost first; axes that follow each other without a gap are merged into one."""
        runs: list[tuple[int, int]] = []
        stride = 1
        for axis in reversed(BASE_AXES):
            size = int(getattr(self, axis))
            if axis in parts and size > 1:
                inner = runs[-1] if runs else (0, 0)
                if inner[0] * inner[1] == stride:
                    runs[-1] = (inner[0] * size, inner[1])
                else:
                    runs.append((size, stride))
            stride *= size
        return runs[::-1]

    def _position(self, parts: tuple[str, ...], at: dict[str, int]) -> int:
        index = 0
        for axis in parts:
            index = index * int(getattr(self, axis)) + at[axis]
        return index

    def _expert_index(self, at: dict[str, int]) -> int:
        """Position among the ranks that share one copy of the experts, (dp_shard, ring, ulysses, tp) row-major."""
        return self._position(EXPERT_RANKS, at)

    def _expert_group(self, axis: str, at: dict[str, int]) -> tuple[int, ...]:
        mine, copy = self._expert_index(at), self.fsdp * self.tp
        block = mine - mine % self.ep
        members = range(block, block + self.ep) if axis == "ep" else range(mine % self.ep, copy, self.ep)
        # dp_shard is the only expert axis outside cfg: each step along it passes over the other branches.
        inner, first = self.cp * self.tp, self.rank(**{axis: i for axis, i in at.items() if axis not in EXPERT_RANKS})
        gap = inner * (self.cfg - 1)
        if not gap:
            return tuple(range(first + members.start, first + members.stop, members.step))
        return tuple([first + index + index // inner * gap for index in members])

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ConfigurationError(f"rank {rank} is outside the world of {self.world_size} rank(s)")


def resolve(
    config: Any, world_size: int, *, inference: bool | None = None, source: str = "", key: str = "parallelism"
) -> Topology:
    """Say what a config means on ``world_size`` processes. Pure: reads nothing but its arguments.

    Args:
        config: A :class:`~hydra_parallelism.config.ParallelismConfig`, or a mapping or ``DictConfig`` with its keys.
        world_size: Number of processes.
        inference: Whether nothing is trained; ``None`` takes ``config.inference``.
        source: Where ``world_size`` comes from, for messages, e.g. ``"WORLD_SIZE=8 (torchrun)"``.
        key: Dotted path of the config node, for messages.

    Returns:
        The layout. Every degree is at least 1 and their product is ``world_size``.

    Raises:
        ConfigurationError: The config cannot be read, a value is out of range, or the equation does not hold. All offending
            keys are named at once.
    """
    degrees = read_degrees(config, key, inference=inference)
    check_world_size(world_size, degrees, source)
    factors = solve(degrees, world_size, source)
    dense = Topology(**dict(zip(BASE_AXES, factors.values(), strict=True)))
    return replace(dense, ep=_resolve_experts(degrees, dense))


def check_world_size(world_size: int, degrees: Degrees, source: str) -> None:
    """Refuse a world that is not a positive number, or not the one that the config says it is for."""
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ConfigurationError(f"the world size must be a whole number of at least 1, not {world_size!r}")
    wanted = degrees.world_size
    if wanted is not None and wanted != world_size:
        raise ConfigurationError(
            f"{degrees.key}.world_size={wanted}, but {source or f'the world size is {world_size}'}\n"
            f"  try: start {wanted} process(es), or {degrees.key}.world_size={world_size}"
        )


def _resolve_experts(degrees: Degrees, dense: Topology) -> int:
    ranks, ep = dense.fsdp * dense.tp, degrees.ep_size
    if degrees.experts_follow_tp:
        return dense.tp
    if ep == -1:
        return ranks
    if ep == 1 or (ranks % ep == 0 and ep % dense.tp == 0):
        return ep
    key = degrees.key
    fits = [n for n in range(dense.tp, ranks + 1, dense.tp) if ranks % n == 0]
    nearest = min(fits, key=lambda n: (abs(n - ep), n))
    # Replicas have copies of all experts: what they need is to share them.
    is_replicated = nearest == 1 and dense.dp_replicate % ep == 0
    instead = (
        f", or {key}.dp_shard={ep * dense.dp_shard} {key}.dp_replicate={dense.dp_replicate // ep}" if is_replicated else ""
    )
    raise ConfigurationError(
        "expert parallelism does not fit:\n"
        f"  {key}.ep_size={ep} must divide dp_shard={dense.dp_shard} * ring_degree={dense.ring} * "
        f"ulysses_degree={dense.ulysses} * tp_size={dense.tp} = {ranks} and be a multiple of tp_size={dense.tp} "
        "(experts re-use the ranks of fsdp x tp, ep_size is not a factor of the world)\n"
        f"  {ranks} % {ep} = {ranks % ep}, {ep} % {dense.tp} = {ep % dense.tp}\n"
        f"  try: {key}.ep_size={nearest}{instead}"
    )


def _parts(axis: str) -> tuple[str, ...]:
    return DERIVED_AXES.get(axis, (axis,))


def _check_axis(axis: str) -> None:
    if axis not in AXES:
        raise ConfigurationError(unknown_axis(axis))


def unknown_axis(name: object) -> str:
    """The message for a name that is no axis: the known names and the nearest one."""
    of_key = dict(zip(FACTORS, BASE_AXES, strict=True)) | {"ep_size": "ep"}
    near = [of_key[str(name)]] if str(name) in of_key else difflib.get_close_matches(str(name), AXES, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"no axis {name!r}{hint or ';'} the axes are {', '.join(AXES)}"
