"""Which layouts exist on a number of processes, and which of them a model can live with.

Pure: a sweep lists layouts here before any process starts. ``enumerate_layouts`` gives every way to multiply the listed axes,
together with the degrees that are set, to the world size, lazily and in one order whatever the order of the list:

1. Fewest ranks that share one sample first: ``pp * cfg * ring * ulysses * tp`` ascending.
2. Then most replicas first: ``dp_shard`` ascending, since sharding parameters costs traffic that replicas do not have.
3. Then innermost axes first, whose ranks are neighbours: ``pp``, ``cfg``, ``ring``, ``ulysses``, ``tp`` ascending, by turns.
4. Then ``ep`` ascending. It is no factor of the world: each layout comes once for every valid size.

World 8 over ``dp_replicate``, ``dp_shard``, ``tp_size`` gives ten, here as ``dp_replicate x dp_shard x tp``::

    8x1x1 4x2x1 2x4x1 1x8x1   4x1x2 2x2x2 1x4x2   2x1x4 1x2x4   1x1x8

A model's numbers (:class:`~hydra_parallelism.constraints.ModelConstraints`) drop the layouts that it cannot be split into.
"""

import math
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from ._equation import divisors, read_degrees
from .constraints import (
    Feasible,
    ModelConstraints,
    feasible,
    judge,
    read_constraints,
    read_switch,
    splits_sequence,
    violations,
)
from .errors import ConfigurationError
from .swept_axes import AXES_KEY, NAMES, PATHS, SweptAxis, overrides_of, parse_axes, parse_limit, refuse, show
from .topology import BASE_AXES, DERIVED_AXES, Topology, check_world_size

__all__ = [
    "Feasible",
    "ModelConstraints",
    "SweptAxis",
    "count",
    "enumerate_layouts",
    "feasible",
    "judge",
    "overrides_of",
    "parse_axes",
    "parse_limit",
]


_SHARING_AXES = ("pp", "cfg", "ring", "ulysses", "tp")
_DATA_AXES = ("dp_shard", "dp_replicate")
_FSDP_AXES = DERIVED_AXES["fsdp"]
_OTHER_AXES = ("pp", "dp_replicate", "cfg")
_SPARE_AXES = ("dp_replicate", "dp_shard", "tp")
_GUIDANCE_BRANCHES = 2


def enumerate_layouts(
    world_size: int,
    axes: Any,
    *,
    fixed: Any = None,
    constraints: Any = None,
    key: str = "parallelism",
    source: str = "",
) -> Iterator[Topology]:
    """Every layout of a world over some axes, lazily, in the order that the module describes.

    Args:
        world_size: Number of processes.
        axes: What to try, as :func:`parse_axes` takes it.
        fixed: The config node that the layouts are for, as :func:`~hydra_parallelism.topology.resolve` takes it. Degrees that
            are not listed keep its values; a listed one must be 1 or -1 in it. A set ``ep_size`` drops the layouts that it
            does not fit; its ``-1`` is all that fit.
        constraints: As :func:`judge` takes them; layouts that violate one are left out.
        key: Dotted path of the config node, for messages.
        source: Where ``world_size`` comes from, for messages.

    Returns:
        An iterator. What is wrong with the arguments is raised by this call, not by the first ``next``.

    Raises:
        ConfigurationError: An argument cannot be read, an axis is both listed and set, or no layout multiplies to the world.
    """
    node = {} if fixed is None else fixed
    space = _Space(world_size, axes, node, key, source)
    model = read_constraints(constraints)
    if model == ModelConstraints():
        return space.layouts()
    over_tp = splits_sequence(node, model)
    return (layout for layout in space.layouts() if not violations(layout, model, over_tp))


def count(
    world_size: int,
    axes: Any,
    *,
    fixed: Any = None,
    key: str = "parallelism",
    source: str = "",
) -> int:
    """How many layouts ``enumerate_layouts`` gives with the same arguments, without listing them.

    Time grows with the number of divisors of the world, limits and ``ep_size`` included. Constraints alone need listing: they
    judge whole layouts, so count what the enumeration gives.

    Raises:
        ConfigurationError: As :func:`enumerate_layouts`.
    """
    return _Space(world_size, axes, {} if fixed is None else fixed, key, source).size()


class _Space:
    """The arguments of an enumeration, checked: which axes are open, up to which degree, and what they must multiply to."""

    def __init__(self, world_size: int, axes: Any, node: Any, key: str, source: str) -> None:
        self.degrees, self.swept = read_degrees(node, key), parse_axes(axes)
        check_world_size(world_size, self.degrees, source)
        self.world_size, self.source = world_size, source or f"world_size={world_size}"
        self.caps: dict[str, float] = {swept.axis: swept.limit or math.inf for swept in self.swept}
        self._refuse_set_axes(node)
        by_axis = dict(zip(BASE_AXES, self.degrees.factors.values(), strict=True))
        self.set = {axis: size for axis, size in by_axis.items() if axis not in self.caps}
        self.fixed = math.prod(self.set.values())
        self.room, rest = divmod(world_size, self.fixed)
        if rest or not self._makes(self.room):
            raise ConfigurationError(self._misfit(rest))
        if not self.size():
            raise ConfigurationError(self._misfit_experts())

    def layouts(self) -> Iterator[Topology]:
        """Every layout, in order."""
        sharing, data = self._open(_SHARING_AXES), self._open(_DATA_AXES)
        for shared in divisors(self.room):
            for outer in _factorizations(self.room // shared, tuple(data.values())):
                for inner in _factorizations(shared, tuple(sharing.values())):
                    sizes = {**self.set, **dict(zip(data, outer)), **dict(zip(sharing, inner))}
                    fsdp = sizes["dp_shard"] * sizes["ring"] * sizes["ulysses"]
                    for ep in self._expert_sizes(fsdp, sizes["tp"]):
                        yield Topology(**sizes, ep=ep)

    def size(self) -> int:
        """How many layouts there are: the ways to make each fsdp, each tp and the rest, times the expert sizes they allow."""
        fsdp_ways, tp_ways = self._ways(_FSDP_AXES, self.room), self._ways(("tp",), self.room)
        other_ways = self._ways(_OTHER_AXES, self.room)
        fsdp_set, tp_set = math.prod(self.set.get(axis, 1) for axis in _FSDP_AXES), self.set.get("tp", 1)
        return sum(
            ways * other_ways[self.room // (fsdp * tp)] * len(self._expert_sizes(fsdp_set * fsdp, tp_set * tp))
            for fsdp, ways in fsdp_ways.items()
            for tp in tp_ways
            if self.room % (fsdp * tp) == 0 and self.room // (fsdp * tp) in other_ways
        )

    def _open(self, axes: tuple[str, ...]) -> dict[str, float]:
        return {axis: self.caps[axis] for axis in axes if axis in self.caps}

    def _ways(self, axes: tuple[str, ...], room: int) -> Counter[int]:
        """Product -> in how many ways the open ones among some axes make it, for products that divide ``room``."""
        ways = Counter({1: 1})
        for cap in self._open(axes).values():
            longer: Counter[int] = Counter()
            for product, number in ways.items():
                for degree in _divisors(room // product):
                    if degree <= cap:
                        longer[product * degree] += number
            ways = longer
        return ways

    def _makes(self, room: int) -> bool:
        return self._ways(BASE_AXES, room)[room] > 0

    def _expert_sizes(self, fsdp: int, tp: int) -> tuple[int, ...]:
        """The sizes of ``ep`` that go with a layout, ascending."""
        fixed = self.degrees.ep_size
        if "ep" in self.caps:
            return tuple(ep for ep in _fitting_experts(fsdp, tp) if ep <= self.caps["ep"])
        if self.degrees.experts_follow_tp:
            return (tp,)
        if fixed == -1:
            return (fsdp * tp,)
        return (fixed,) if fixed == 1 or fixed in _fitting_experts(fsdp, tp) else ()

    def _refuse_set_axes(self, node: Any) -> None:
        """A degree is either tried or set, and what is left of the world is for those that are tried."""
        key, problems = self.degrees.key, []
        written = {**dict(zip(BASE_AXES, self.degrees.factors.values(), strict=True)), "ep": self.degrees.ep_size}
        for axis, value in written.items():
            name, path = NAMES[axis], f"{key}.{PATHS[axis]}"
            if axis in self.caps and value not in (1, -1):  # -1 says no more than being listed does: presets have it
                problems.append(f"{AXES_KEY} lists {name}, but {path}={value} is set; try {path}=1, or leave {name} out")
            elif axis not in self.caps and value == -1 and axis != "ep":
                problems.append(f"{path}=-1 takes what is left, and so do the axes of {AXES_KEY}; try {path}=1")
        if "ep" in self.caps and self.degrees.experts_follow_tp:
            path = f"{key}.enable_expert_parallel"
            problems.append(f"{AXES_KEY} lists ep_size, but {path}=true sets it; try {path}=false")
        if "cfg" in self.caps:
            self.caps["cfg"] = min(self.caps["cfg"], _GUIDANCE_BRANCHES)
            if not read_switch(node, "inference"):
                remedy = f"if nothing is trained: {key}.inference=true"
                problems.append(f"{AXES_KEY} lists cfg_parallel, which is for inference only; {remedy}")
        refuse(f"{AXES_KEY} does not go with {key}:", problems)

    def _misfit(self, rest: int) -> str:
        parts = [f"{NAMES[axis]}={size}" for axis, size in self.set.items() if size > 1]
        parts += [NAMES[axis] if cap == math.inf else f"{NAMES[axis]}<={cap}" for axis, cap in self._open(BASE_AXES).items()]
        verdict = f"the axes take what is left, but the others multiply to {self.fixed} and {self.source}: "
        verdict += f"{self.world_size} % {self.fixed} = {rest}" if rest else f"no degrees within the limits make {self.room}"
        processes = next(n * self.fixed for n in range(max(self._largest_room(), 1), 0, -1) if self._makes(n))
        remedy = [*self._changes()[:2], f"start {processes} process{'' if processes == 1 else 'es'}"]
        equation = " * ".join(parts) or "1"
        return f"{AXES_KEY} has no layout for the world:\n  {equation}: {verdict}\n  try: {', or '.join(remedy)}"

    def _largest_room(self) -> int:
        return int(min(self.room, math.prod(self._open(BASE_AXES).values())))

    def _changes(self) -> list[str]:
        """Single changes that would make it fit: of a degree that is set, else one more axis to try."""
        changes = []
        for axis, size in self.set.items():
            room, rest = divmod(self.world_size, self.fixed // size)
            if size == 1 or rest:
                continue
            fits = [n for n in _divisors(room) if self._makes(room // n) and not (axis == "cfg" and n > _GUIDANCE_BRANCHES)]
            if fits:
                best = min(fits, key=lambda n, size=size: (abs(n - size), n))  # type: ignore[misc]
                changes.append(f"{self.degrees.key}.{PATHS[axis]}={best}")
        if self.world_size % self.fixed == 0:
            spare = [axis for axis in _SPARE_AXES if self.set.get(axis) == 1]
            changes += [f"{AXES_KEY}={show([*self.swept, SweptAxis(axis)])}" for axis in spare[:1]]
        return changes

    def _misfit_experts(self) -> str:
        path, made = f"{self.degrees.key}.ep_size", self._ways(BASE_AXES, self.room)[self.room]
        return (
            f"{AXES_KEY} has no layout for {path}={self.degrees.ep_size}:\n"
            f"  it must be a multiple of tp_size and divide dp_shard * ring_degree * ulysses_degree * tp_size, and in none of "
            f"the {made} layout(s) of {self.source} it does\n"
            f"  try: {path}=1"
        )


def _factorizations(number: int, caps: tuple[float, ...]) -> Iterator[tuple[int, ...]]:
    """Every way to write a number as a product of one factor per cap, none above it, in lexicographic order."""
    if not caps:
        if number == 1:
            yield ()
    elif len(caps) == 1:
        if number <= caps[0]:
            yield (number,)
    elif number <= math.prod(caps):
        for first in _divisors(number):
            if first > caps[0]:
                return
            for others in _factorizations(number // first, caps[1:]):
                yield (first, *others)


@lru_cache(maxsize=4096)
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(divisors(number))


@lru_cache(maxsize=4096)
def _fitting_experts(fsdp: int, tp: int) -> tuple[int, ...]:
    """1 always fits, and so does a multiple of tp that divides fsdp * tp."""
    return tuple(sorted({1, *(tp * part for part in _divisors(fsdp))}))
