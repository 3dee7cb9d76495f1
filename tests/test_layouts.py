"""Layouts of a world against a brute-force enumeration, and the exact text of every refusal."""

import itertools
import math
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from hydra_parallelism import ConfigurationError, ContextParallelConfig, ParallelismConfig, Topology, resolve
from hydra_parallelism.layouts import (
    ModelConstraints,
    SweptAxis,
    count,
    enumerate_layouts,
    feasible,
    judge,
    overrides_of,
    parse_axes,
    parse_limit,
)

FACTORS = ("pp", "dp_replicate", "dp_shard", "cfg", "ring", "ulysses", "tp")
KEYS = ("pp_size", "dp_replicate", "dp_shard", "cfg_parallel", "ring_degree", "ulysses_degree", "tp_size", "ep_size")
SIX = ("pp", "dp_replicate", "dp_shard", "ring", "ulysses", "tp")
KNOWN = "the axes are pp_size, dp_replicate, dp_shard, cfg_parallel, ring_degree, ulysses_degree, tp_size, ep_size"
quick = settings(max_examples=120, deadline=None, derandomize=True)


def _refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        call()
    return str(caught.value)


def _node(degrees: dict[str, Any], **others: Any) -> dict[str, Any]:
    """The parallelism node with some degrees, by axis."""
    keys = dict(zip((*FACTORS, "ep"), KEYS, strict=True))
    nested = {keys[axis]: degrees[axis] for axis in ("ring", "ulysses") if axis in degrees}
    flat = {keys[axis]: size for axis, size in degrees.items() if keys[axis] not in nested}
    return {**flat, "context_parallel": nested, **others}


def _resolves(degrees: dict[str, int], world: int) -> bool:
    try:
        return resolve(_node(degrees, inference=True), world).degrees() == {**dict.fromkeys((*FACTORS, "ep"), 1), **degrees}
    except ConfigurationError:
        return False


def _listed(axes: list[str], limits: dict[str, int]) -> list[str]:
    return [f"{axis}<={limits[axis]}" if axis in limits else axis for axis in axes]


def _brute(world: int, axes: list[str], fixed: dict[str, int], limits: dict[str, int]) -> set[Topology]:
    """Every degree of every axis tried, ``resolve`` as the judge."""
    factors = [axis for axis in axes if axis != "ep"]
    ranges = [range(1, min(limits.get(axis, world), world) + 1) for axis in factors]
    experts = range(1, min(limits.get("ep", world), world) + 1) if "ep" in axes else [fixed.get("ep", 1)]
    rest = math.prod(size for axis, size in fixed.items() if axis != "ep")
    fits = [sizes for sizes in itertools.product(*ranges) if math.prod(sizes) * rest == world]
    every = [{**fixed, **dict(zip(factors, sizes)), "ep": ep} for sizes in fits for ep in experts]
    return {Topology(**degrees) for degrees in every if _resolves(degrees, world)}


def _place(at: Topology) -> tuple[int, ...]:
    """The order that the module promises."""
    return (at.pp * at.cfg * at.ring * at.ulysses * at.tp, at.dp_shard, at.pp, at.cfg, at.ring, at.ulysses, at.tp, at.ep)


@st.composite
def spaces(draw: st.DrawFn) -> tuple[int, list[str], dict[str, int], dict[str, int]]:
    """World, axes, degrees that are set and limits; most have a layout, some have not."""
    axes = draw(st.lists(st.sampled_from([*FACTORS, "ep"]), min_size=1, max_size=4, unique=True))
    others = st.sampled_from([axis for axis in FACTORS if axis not in axes])
    fixed = draw(st.dictionaries(others, st.integers(1, 3), max_size=2))
    if "cfg" in fixed:
        fixed["cfg"] = min(fixed["cfg"], 2)
    if "ep" not in axes and draw(st.booleans()):
        fixed["ep"] = draw(st.integers(1, 6))
    limits = draw(st.dictionaries(st.sampled_from(axes), st.integers(1, 8), max_size=2))
    world = math.prod(size for axis, size in fixed.items() if axis != "ep") * draw(st.integers(1, 12))
    return draw(st.sampled_from([world, world, world, world + 1])), axes, fixed, limits


# --- every layout, once, in order


@quick
@given(spaces())
def test_layouts_are_those_of_a_brute_force_enumeration(space: tuple[int, list[str], dict[str, int], dict[str, int]]) -> None:
    world, axes, fixed, limits = space
    listed = _listed(axes, limits)
    expected = _brute(world, axes, fixed, limits)
    arguments: dict[str, Any] = {"fixed": _node(fixed, inference=True)}
    if not expected:
        event("refused")
        for call in (enumerate_layouts, count):
            assert "has no layout for" in _refusal(lambda call=call: call(world, listed, **arguments))
        return
    event("ep listed" if "ep" in axes else "ep set" if "ep" in fixed else "dense")
    found = list(enumerate_layouts(world, listed, **arguments))
    assert len(found) == len(set(found)) == count(world, listed, **arguments)
    assert set(found) == expected
    assert found == sorted(found, key=_place)
    assert {layout.world_size for layout in found} == {world}


@quick
@given(spaces())
def test_the_overrides_of_a_layout_resolve_to_it(space: tuple[int, list[str], dict[str, int], dict[str, int]]) -> None:
    world, axes, fixed, limits = space
    listed = _listed(axes, limits)
    node = _node(fixed, inference=True)
    try:
        found = list(itertools.islice(enumerate_layouts(world, listed, fixed=node), 8))
    except ConfigurationError:
        return
    for layout in found:
        config = OmegaConf.merge({"parallelism": node}, OmegaConf.from_dotlist(overrides_of(layout, axes)))
        assert resolve(config.parallelism, world) == layout


@quick
@given(spaces())
def test_every_offer_in_a_refusal_makes_a_layout(space: tuple[int, list[str], dict[str, int], dict[str, int]]) -> None:
    world, axes, fixed, limits = space
    listed = _listed(axes, limits)
    fixed.pop("ep", None)
    try:
        count(world, listed, fixed=_node(fixed, inference=True))
    except ConfigurationError as error:
        offers = str(error).splitlines()[-1]
    else:
        return
    event("refused")
    of_key = dict(zip(KEYS, FACTORS))
    processes = re.search(r"start (\d+) process", offers)
    assert processes
    assert count(int(processes[1]), listed, fixed=_node(fixed, inference=True))
    for name, value in re.findall(r"parallelism\.(?:context_parallel\.)?(\w+)=(\d+)", offers):
        assert count(world, listed, fixed=_node({**fixed, of_key[name]: int(value)}, inference=True))
    for offered in re.findall(r"hydra\.sweeper\.axes=\[(.*)\]", offers):
        assert count(world, offered.replace("'", "").split(","), fixed=_node(fixed, inference=True))


def test_eight_processes_over_three_axes_make_ten_layouts() -> None:
    found = [(at.dp_replicate, at.dp_shard, at.tp) for at in enumerate_layouts(8, ["tp_size", "dp_replicate", "dp_shard"])]
    assert found == [
        (8, 1, 1), (4, 2, 1), (2, 4, 1), (1, 8, 1), (4, 1, 2), (2, 2, 2), (1, 4, 2), (2, 1, 4), (1, 2, 4), (1, 1, 8),
    ]  # fmt: skip


def test_what_is_left_may_be_listed() -> None:
    assert list(enumerate_layouts(8, ["dp_shard", "tp"], fixed={"dp_shard": -1})) == list(
        enumerate_layouts(8, ["dp_shard", "tp"])
    )


def test_inner_axes_come_first_among_equals() -> None:
    found = [(at.pp, at.ring, at.ulysses, at.tp) for at in enumerate_layouts(2, ["pp", "ring", "ulysses", "tp"])]
    assert found == [(1, 1, 1, 2), (1, 1, 2, 1), (1, 2, 1, 1), (2, 1, 1, 1)]


def test_the_order_of_the_list_changes_nothing() -> None:
    first, *others = (list(enumerate_layouts(24, axes)) for axes in itertools.permutations(["dp_replicate", "ring", "tp"]))
    assert all(other == first for other in others)


def test_degrees_that_are_set_stay() -> None:
    found = list(enumerate_layouts(16, ["dp_shard", "tp"], fixed={"pp_size": 2, "context_parallel": {"ulysses_degree": 2}}))
    assert [(at.dp_shard, at.tp) for at in found] == [(4, 1), (2, 2), (1, 4)]
    assert {(at.pp, at.ulysses) for at in found} == {(2, 2)}


@pytest.mark.parametrize(
    "fixed",
    [
        ParallelismConfig(context_parallel=ContextParallelConfig(ring_degree=2)),
        OmegaConf.structured(ParallelismConfig(context_parallel=ContextParallelConfig(ring_degree=2))),
        OmegaConf.create({"n": 2, "node": {"context_parallel": {"ring_degree": "${n}"}}}).node,
    ],
    ids=["dataclass", "typed DictConfig", "interpolation"],
)
def test_the_node_may_have_any_form(fixed: Any) -> None:
    assert list(enumerate_layouts(4, ["tp"], fixed=fixed)) == [Topology(ring=2, tp=2)]


def test_expert_sizes_are_tried_for_each_layout() -> None:
    found = [(at.dp_shard, at.tp, at.ep) for at in enumerate_layouts(4, ["dp_shard", "tp_size", "ep_size"])]
    assert found == [(4, 1, 1), (4, 1, 2), (4, 1, 4), (2, 2, 1), (2, 2, 2), (2, 2, 4), (1, 4, 1), (1, 4, 4)]


def test_a_set_expert_size_drops_the_layouts_that_it_does_not_fit() -> None:
    axes = ["dp_replicate", "dp_shard", "tp"]
    assert [at.ep for at in enumerate_layouts(8, axes, fixed={"ep_size": 4})] == [4] * 6
    assert [at.ep for at in enumerate_layouts(4, axes, fixed={"ep_size": -1})] == [1, 2, 4, 2, 4, 4]
    assert [at.ep for at in enumerate_layouts(4, axes, fixed={"enable_expert_parallel": True})] == [1, 1, 1, 2, 2, 4]


def test_guidance_branches_are_at_most_two() -> None:
    found = list(enumerate_layouts(8, ["dp_replicate", "cfg_parallel"], fixed={"inference": True}))
    assert found == [Topology(dp_replicate=8), Topology(dp_replicate=4, cfg=2)]


def test_a_model_leaves_layouts_out() -> None:
    constraints = {"num_heads": 12, "num_layers": 6}
    found = list(enumerate_layouts(8, ["dp_shard", "pp", "tp"], constraints=constraints))
    assert found == [at for at in enumerate_layouts(8, ["dp_shard", "pp", "tp"]) if not judge(at, constraints)]
    assert {(at.pp, at.tp) for at in found} == {(1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (2, 4)}


def test_sequence_parallelism_is_read_from_the_node() -> None:
    def tried(**node: Any) -> list[int]:
        return [at.tp for at in enumerate_layouts(4, ["dp_shard", "tp"], fixed=node, constraints={"seq_len": 6})]

    assert tried() == [1, 2, 4]
    assert tried(enable_sequence_parallel=True) == [1, 2]


def test_a_model_that_fits_nowhere_leaves_nothing() -> None:
    assert list(enumerate_layouts(8, ["tp"], constraints={"num_heads": 3})) == []


# --- cost: bounds far above what is measured (see benchmarks), so that only another kind of algorithm fails them


def _seconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def test_a_million_processes_over_six_axes_are_listed_in_seconds() -> None:
    assert count(2**20, SIX) == math.comb(25, 5) == 53130
    assert _seconds(lambda: list(enumerate_layouts(2**20, SIX))) < 3
    found = list(enumerate_layouts(2**20, SIX))
    assert len(set(found)) == 53130
    assert {at.world_size for at in found} == {2**20}


def test_the_first_layout_and_the_number_need_no_listing() -> None:
    world = 720_720  # 2**4 * 3**2 * 5 * 7 * 11 * 13: more layouts than anyone lists
    assert count(world, SIX) == math.comb(9, 5) * math.comb(7, 5) * 6**4 == 3_429_216
    assert _seconds(lambda: next(enumerate_layouts(world, [*SIX, "ep"]))) < 1
    assert _seconds(lambda: count(world, [*SIX, "ep"])) < 1


# --- the axes of a sweep


@pytest.mark.parametrize(
    ("names", "axis"),
    [
        (["pp", "pp_size"], "pp"),
        (["dp_replicate"], "dp_replicate"),
        (["dp_shard"], "dp_shard"),
        (["cfg", "cfg_parallel"], "cfg"),
        (["ring", "ring_degree", "context_parallel.ring_degree"], "ring"),
        (["ulysses", "ulysses_degree", "context_parallel.ulysses_degree"], "ulysses"),
        (["tp", "tp_size"], "tp"),
        (["ep", "ep_size"], "ep"),
    ],
)
def test_an_axis_goes_by_its_key_or_its_own_name(names: list[str], axis: str) -> None:
    assert [parse_axes([name]) for name in names] == [(SweptAxis(axis),)] * len(names)


@pytest.mark.parametrize("text", ["tp_size<=8", "tp <= 8", " tp_size<=8 "])
def test_an_axis_may_carry_a_limit(text: str) -> None:
    assert parse_limit(text) == SweptAxis("tp", 8)
    assert (
        parse_axes([text, "dp_shard"])
        == parse_axes(parse_axes([text, "dp_shard"]))
        == (SweptAxis("tp", 8), SweptAxis("dp_shard"))
    )


def test_one_axis_need_not_be_a_list() -> None:
    assert parse_axes("tp_size") == (SweptAxis("tp"),)
    assert parse_axes(OmegaConf.create(["tp_size"])) == (SweptAxis("tp"),)


@pytest.mark.parametrize(
    ("values", "shown", "problems"),
    [
        (["tp_sise"], "[tp_sise]", [f"no axis 'tp_sise'; did you mean 'tp_size'? {KNOWN}"]),
        (["batch"], "[batch]", [f"no axis 'batch'; {KNOWN}"]),
        (["fsdp"], "[fsdp]", ["'fsdp' is made of other axes; list dp_shard and ring_degree and ulysses_degree"]),
        (["tp", "tp_size<=2"], "[tp,'tp_size<=2']", ["tp_size is listed twice"]),
        (["tp<=0"], "['tp<=0']", ["'tp<=0': the limit must be a whole number of at least 1"]),
        (["tp<=x", 3], "['tp<=x',3]", ["'tp<=x': the limit must be a whole number of at least 1", f"no axis '3'; {KNOWN}"]),
        ([], "[]", ["lists no axis; try [dp_replicate,dp_shard]"]),
    ],
)  # fmt: skip
def test_what_is_no_axis_is_refused(values: list[Any], shown: str, problems: list[str]) -> None:
    expected = "\n  ".join([f"hydra.sweeper.axes={shown} is not valid:", *problems])
    assert _refusal(lambda: parse_axes(values)) == expected
    assert _refusal(lambda: parse_axes(values, key="my.axes")) == expected.replace("hydra.sweeper.axes", "my.axes")


def test_overrides_are_for_the_listed_axes() -> None:
    layout = Topology(dp_shard=4, ring=2, tp=2, ep=2)
    assert overrides_of(layout, ["tp", "ring_degree", "ep_size"]) == [
        "parallelism.tp_size=2",
        "parallelism.context_parallel.ring_degree=2",
        "parallelism.ep_size=2",
    ]
    assert overrides_of({"cfg": 2, "ulysses": 4}, parse_axes(["ulysses", "cfg<=2"]), "model.mesh") == [
        "model.mesh.context_parallel.ulysses_degree=4",
        "model.mesh.cfg_parallel=2",
    ]


# --- refusals of an enumeration


def _no_layout(world: int, axes: list[str], **arguments: Any) -> str:
    text = _refusal(lambda: count(world, axes, **arguments))
    assert text == _refusal(lambda: enumerate_layouts(world, axes, **arguments))
    return text


def test_an_axis_is_either_listed_or_set() -> None:
    fixed = {"tp_size": 4, "dp_shard": -1, "ep_size": 2}
    assert _no_layout(8, ["tp", "dp_shard", "ep"], fixed=fixed) == (
        "hydra.sweeper.axes does not go with parallelism:\n"
        "  hydra.sweeper.axes lists tp_size, but parallelism.tp_size=4 is set; try parallelism.tp_size=1, "
        "or leave tp_size out\n"
        "  hydra.sweeper.axes lists ep_size, but parallelism.ep_size=2 is set; try parallelism.ep_size=1, or leave ep_size out"
    )
    assert _no_layout(8, ["ep", "tp"], fixed={"enable_expert_parallel": True}, key="model.mesh") == (
        "hydra.sweeper.axes does not go with model.mesh:\n"
        "  hydra.sweeper.axes lists ep_size, but model.mesh.enable_expert_parallel=true sets it; "
        "try model.mesh.enable_expert_parallel=false"
    )


def test_nothing_else_may_take_what_is_left() -> None:
    assert _no_layout(8, ["tp"], fixed={"context_parallel": {"ring_degree": -1}}) == (
        "hydra.sweeper.axes does not go with parallelism:\n"
        "  parallelism.context_parallel.ring_degree=-1 takes what is left, and so do the axes of hydra.sweeper.axes; "
        "try parallelism.context_parallel.ring_degree=1"
    )


def test_guidance_branches_are_listed_for_inference_only() -> None:
    assert _no_layout(8, ["dp_shard", "cfg"]) == (
        "hydra.sweeper.axes does not go with parallelism:\n"
        "  hydra.sweeper.axes lists cfg_parallel, which is for inference only; "
        "if nothing is trained: parallelism.inference=true"
    )


def test_what_is_set_must_divide_the_world() -> None:
    assert _no_layout(8, ["dp_shard", "tp"], fixed={"pp_size": 3}, source="WORLD_SIZE=8 (torchrun)") == (
        "hydra.sweeper.axes has no layout for the world:\n"
        "  pp_size=3 * dp_shard * tp_size: the axes take what is left, but the others multiply to 3 and "
        "WORLD_SIZE=8 (torchrun): 8 % 3 = 2\n"
        "  try: parallelism.pp_size=2, or start 6 processes"
    )


def test_the_listed_axes_must_make_what_is_left() -> None:
    assert _no_layout(8, ["tp<=2"], fixed={"dp_shard": 2}) == (
        "hydra.sweeper.axes has no layout for the world:\n"
        "  dp_shard=2 * tp_size<=2: the axes take what is left, but the others multiply to 2 and world_size=8: "
        "no degrees within the limits make 4\n"
        "  try: parallelism.dp_shard=4, or hydra.sweeper.axes=['tp_size<=2',dp_replicate], or start 4 processes"
    )
    assert _no_layout(2, ["ep"]) == (
        "hydra.sweeper.axes has no layout for the world:\n"
        "  1: the axes take what is left, but the others multiply to 1 and world_size=2: no degrees within the limits make 2\n"
        "  try: hydra.sweeper.axes=[ep_size,dp_replicate], or start 1 process"
    )


def test_a_set_expert_size_must_fit_somewhere() -> None:
    assert _no_layout(8, ["dp_shard", "tp"], fixed={"ep_size": 3}) == (
        "hydra.sweeper.axes has no layout for parallelism.ep_size=3:\n"
        "  it must be a multiple of tp_size and divide dp_shard * ring_degree * ulysses_degree * tp_size, "
        "and in none of the 4 layout(s) of world_size=8 it does\n"
        "  try: parallelism.ep_size=1"
    )


def test_the_node_and_the_world_are_checked_as_ever() -> None:
    assert _no_layout(8, ["tp"], fixed={"dp_shard": 0}).startswith(
        "parallelism is not valid:\n  parallelism.dp_shard=0: must be"
    )
    assert _no_layout(0, ["tp"]) == "the world size must be a whole number of at least 1, not 0"
    assert _no_layout(8, ["tp"], fixed={"world_size": 4}).startswith("parallelism.world_size=4, but the world size is 8\n")


# --- whether one config is possible


def test_a_config_that_fits_is_feasible() -> None:
    answer = feasible({"dp_shard": -1, "tp_size": 2}, 8, {"num_heads": 8})
    assert answer
    assert (answer.reasons, answer.topology) == ((), Topology(dp_shard=4, tp=2))
    assert feasible(ParallelismConfig(dp_shard=8), 8)
    assert feasible(OmegaConf.structured(ParallelismConfig(dp_shard=8)), 8, ModelConstraints(seq_len=7))


def test_degrees_that_do_not_fit_the_world_are_not_feasible() -> None:
    answer = feasible({"tp_size": 3}, 8, key="model.mesh", source="WORLD_SIZE=8 (torchrun)")
    assert not answer
    assert answer.topology is None
    expected = _refusal(lambda: resolve({"tp_size": 3}, 8, key="model.mesh", source="WORLD_SIZE=8 (torchrun)"))
    assert answer.reasons == (expected,)
    assert "ep_size=3 must divide" in feasible({"dp_shard": 8, "ep_size": 3}, 8).reasons[0]


def test_a_model_that_cannot_be_split_so_is_not_feasible() -> None:
    answer = feasible({"tp_size": 8}, 8, {"num_heads": 12, "num_kv_heads": 4})
    assert not answer
    assert (answer.reasons, answer.topology) == (("num_heads=12 does not divide by tp_size=8",), Topology(tp=8))


@pytest.mark.parametrize(
    "config",
    [
        ParallelismConfig(tp_size=8, enable_sequence_parallel=True),
        {"tp_size": 8, "enable_sequence_parallel": True},
    ],
    ids=["dataclass", "mapping"],
)
def test_feasible_reads_sequence_parallelism_from_the_config(config: Any) -> None:
    assert feasible(config, 8, {"seq_len": 12}).reasons == ("seq_len=12 does not divide by tp_size=8",)
    assert feasible({"tp_size": 8}, 8, {"seq_len": 12})


def test_a_mistake_is_raised_and_not_taken_for_a_misfit() -> None:
    assert _refusal(lambda: feasible({"tp_sise": 2}, 8)) == "parallelism is not valid:\n  parallelism.tp_sise: no such key"
    assert "parallelism.tp_size=0: must be" in _refusal(lambda: feasible({"tp_size": 0}, 8))
