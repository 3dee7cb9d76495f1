"""Any config on any world is either a layout that an independent enumeration agrees with, or one ``ConfigurationError``."""

import itertools
import math
import re
from typing import Any

from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from hydra_parallelism import ConfigurationError, Topology, resolve
from hydra_parallelism.topology import AXES

SIZES = ("pp_size", "dp_replicate", "dp_shard", "cfg_parallel", "ring_degree", "ulysses_degree", "tp_size")
SHORT = ("pp", "dp_replicate", "dp_shard", "cfg", "ring", "ulysses", "tp")
DOTTED = {name: f"parallelism.{name}" for name in (*SIZES, "ep_size", "enable_expert_parallel")} | {
    name: f"parallelism.context_parallel.{name}" for name in ("ring_degree", "ulysses_degree")
}
MADE_OF = {
    **{axis: (axis,) for axis in SHORT},
    "dp": ("dp_replicate", "dp_shard"),
    "cp": ("ring", "ulysses"),
    "fsdp": ("dp_shard", "ring", "ulysses"),
    "dp_cp": ("dp_replicate", "dp_shard", "ring", "ulysses"),
}
quick = settings(max_examples=150, deadline=None, derandomize=True)

junk = st.one_of(st.none(), st.booleans(), st.sampled_from(["2", "", "auto", "-1", "???"]), st.floats(), st.just([2]))
wild = st.dictionaries(
    st.sampled_from([*SIZES, "ep_size", "enable_expert_parallel"]),
    st.one_of(st.integers(-3, 6), st.integers(-3, 6), junk),
)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """Degrees that fit the world of at most 64 ranks; one may be written as -1."""
    degrees, room = dict.fromkeys(SIZES, 1), 64
    for name in draw(st.permutations(SIZES)):
        degrees[name] = draw(st.integers(1, min(room, 2 if name == "cfg_parallel" else 6)))
        room //= degrees[name]
    world = math.prod(degrees.values())
    ranks = world // (degrees["pp_size"] * degrees["dp_replicate"] * degrees["cfg_parallel"])
    tp = degrees["tp_size"]
    degrees["ep_size"] = draw(st.sampled_from([-1, 1, *(n for n in range(tp, ranks + 1, tp) if ranks % n == 0)]))
    if draw(st.booleans()):
        degrees[draw(st.sampled_from([name for name in SIZES if name != "cfg_parallel"]))] = -1
    return {**degrees, "enable_expert_parallel": draw(st.booleans())}, world


@st.composite
def misfits(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """Degrees in range, on a world that they most often do not fit."""
    degrees, world = draw(layouts())
    degrees[draw(st.sampled_from(["dp_shard", "tp_size", "pp_size", "ring_degree"]))] = draw(st.integers(1, 6))
    return degrees, draw(st.one_of(st.just(world), st.integers(1, 64)))


@st.composite
def misfit_experts(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    degrees, world = draw(layouts())
    return {**degrees, "ep_size": draw(st.integers(2, 70))}, world


anything = st.one_of(layouts(), misfits(), misfit_experts(), st.tuples(wild, st.integers(1, 64)))


def _config(degrees: dict[str, Any]) -> dict[str, Any]:
    nested = {name: degrees[name] for name in ("ring_degree", "ulysses_degree") if name in degrees}
    flat = {name: value for name, value in degrees.items() if name not in nested}
    return {**flat, "context_parallel": nested} if nested else flat


def _offenders(degrees: dict[str, Any], inference: bool) -> list[str]:
    """Keys that are wrong whatever the world."""
    wrong = []
    for name in (*SIZES, "ep_size"):
        value = degrees.get(name, 1)
        bad_branches = name == "cfg_parallel" and value not in ((1, 2) if inference else (1,))
        if type(value) is not int or value < -1 or value == 0 or bad_branches:
            wrong.append(name)
    if not isinstance(degrees.get("enable_expert_parallel", False), bool):
        wrong.append("enable_expert_parallel")
    open_ones = [name for name in SIZES if name != "cfg_parallel" and type(degrees.get(name)) is int and degrees[name] == -1]
    return wrong + (open_ones if len(open_ones) > 1 else [])


def _expected(degrees: dict[str, Any], world: int) -> dict[str, int] | None:
    """The sizes by trial, ``None`` when nothing fits."""
    written = {name: degrees.get(name, 1) for name in SIZES}
    ep = degrees.get("ep_size", 1)
    if ep == 1 and set(written.values()) == {1}:
        written["dp_replicate"] = world
    fits = [sizes for n in range(1, world + 1) if math.prod(sizes := [n if v == -1 else v for v in written.values()]) == world]
    if not fits:
        return None
    found = dict(zip(SHORT, fits[0], strict=True))
    ranks = found["dp_shard"] * found["ring"] * found["ulysses"] * found["tp"]
    if ep == 1 and degrees.get("enable_expert_parallel") is True:
        ep = found["tp"]
    ep = ranks if ep == -1 else ep
    return {**found, "ep": ep} if ep == 1 or (ranks % ep == 0 and ep % found["tp"] == 0) else None


def _enumerate(sizes: dict[str, int]) -> dict[str, list[tuple[int, ...]]]:
    """Every group along every axis, from a plain list of coordinates."""
    coordinates = [dict(zip(SHORT, at)) for at in itertools.product(*(range(sizes[axis]) for axis in SHORT))]
    groups = {}
    for axis, parts in MADE_OF.items():
        together: dict[tuple[int, ...], list[int]] = {}
        for rank, at in enumerate(coordinates):
            together.setdefault(tuple(i for a, i in at.items() if a not in parts), []).append(rank)
        groups[axis] = [tuple(group) for group in together.values()]
    copies: dict[tuple[int, ...], list[int]] = {}
    for rank, at in enumerate(coordinates):  # ascending ranks are row-major over what is left: dp_shard, ring, ulysses, tp
        copies.setdefault((at["pp"], at["dp_replicate"], at["cfg"]), []).append(rank)
    ep = sizes["ep"]
    groups["ep"] = [tuple(copy[start : start + ep]) for copy in copies.values() for start in range(0, len(copy), ep)]
    groups["efsdp"] = [tuple(copy[start::ep]) for copy in copies.values() for start in range(ep)]
    return {axis: sorted(found) for axis, found in groups.items()}


def _resolved(case: tuple[dict[str, Any], int]) -> Topology:
    return resolve(_config(case[0]), case[1], inference=True)


def _attempt(degrees: dict[str, Any], world: int, inference: bool = True) -> Topology | str:
    """The layout, or the text of the refusal. Nothing else ever escapes."""
    try:
        return resolve(_config(degrees), world, inference=inference)
    except ConfigurationError as error:
        return str(error)


@quick
@given(anything, st.booleans())
def test_a_config_resolves_or_is_refused_by_name(case: tuple[dict[str, Any], int], inference: bool) -> None:
    degrees, world = case
    found = _attempt(degrees, world, inference)
    wrong = _offenders(degrees, inference)
    if wrong:
        event("refused: fields")
        assert isinstance(found, str)
        assert [name for name in wrong if DOTTED[name] not in found] == []
    elif expected := _expected(degrees, world):
        event("resolved")
        assert isinstance(found, Topology)
        assert (found.degrees(), found.world_size) == (expected, world)
    else:
        event("refused: does not fit")
        assert isinstance(found, str)
        assert f"world_size={world}" in found or f"parallelism.ep_size={degrees['ep_size']} must divide" in found


@quick
@given(layouts())
def test_groups_are_those_of_an_independent_enumeration(case: tuple[dict[str, Any], int]) -> None:
    topology = _resolved(case)
    expected = _enumerate(topology.degrees())
    assert set(expected) == set(AXES)
    for axis, groups in expected.items():
        assert list(topology.groups(axis)) == groups
        assert sorted(rank for group in groups for rank in group) == list(range(topology.world_size))
        for group in groups:
            assert len(group) == topology.size(axis)
            assert all(topology.group(axis, rank) == group for rank in group)
            assert [topology.index(axis, rank) for rank in group] == list(range(len(group)))


@quick
@given(layouts())
def test_rank_and_coordinate_are_inverse(case: tuple[dict[str, Any], int]) -> None:
    topology = _resolved(case)
    ranks = range(topology.world_size)
    coordinates = [topology.coordinate(rank) for rank in ranks]
    assert [topology.rank(**at) for at in coordinates] == list(ranks)
    assert [tuple(at.values()) for at in coordinates] == sorted(tuple(at.values()) for at in coordinates)


@quick
@given(layouts())
def test_every_rank_makes_the_same_number_of_groups_in_the_same_order(case: tuple[dict[str, Any], int]) -> None:
    """Whoever makes process groups walks AXES and skips sets seen before: unequal walks would hang."""
    topology = _resolved(case)
    walks = set()
    for rank in range(topology.world_size):
        sets = [frozenset(topology.group(axis, rank)) for axis in AXES]
        walks.add(tuple(sets.index(found) for found in sets))
        assert all(rank in found for found in sets)
    assert len(walks) == 1
    distinct = {
        len({found for axis in AXES if len(found := topology.group(axis, rank)) > 1}) for rank in range(topology.world_size)
    }
    assert len(distinct) == 1


@quick
@given(misfits())
def test_every_offer_in_a_refusal_fits(case: tuple[dict[str, Any], int]) -> None:
    degrees, world = {**case[0], "ep_size": 1, "enable_expert_parallel": False}, case[1]
    assume(not _offenders(degrees, True) and not _expected(degrees, world))
    offers = str(_attempt(degrees, world)).splitlines()[-1]
    overrides = re.findall(r"parallelism\.(?:context_parallel\.)?(\w+)=(\d+)", offers)
    worlds = re.findall(r"\d+", offers.partition("start ")[2])
    assert worlds
    for name, value in overrides:
        assert resolve(_config({**degrees, name: int(value)}), world, inference=True).world_size == world
    for processes in map(int, worlds):
        assert resolve(_config(degrees), processes, inference=True).world_size == processes


@quick
@given(misfit_experts())
def test_an_offered_ep_size_fits(case: tuple[dict[str, Any], int]) -> None:
    degrees, world = case
    assume(not _expected(degrees, world))
    lines = str(_attempt(degrees, world)).splitlines()
    assert lines[-1].startswith("  try: parallelism.ep_size=")
    for offer in lines[-1].split(", or "):
        overrides = {name: int(value) for name, value in re.findall(r"parallelism\.(\w+)=(\d+)", offer)}
        fits = resolve(_config({**degrees, **overrides}), world, inference=True)
        assert fits.ep == overrides.get("ep_size", degrees["ep_size"])
