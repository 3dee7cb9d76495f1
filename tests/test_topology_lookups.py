"""Looking ranks up in a resolved layout: coordinates, groups, and what that costs on a million ranks."""

import dataclasses
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest

from hydra_parallelism import ConfigurationError, Topology, resolve
from hydra_parallelism.topology import AXES, BASE_AXES, DERIVED_AXES

FULL = resolve(
    {
        "pp_size": 2,
        "dp_replicate": 3,
        "dp_shard": 2,
        "cfg_parallel": 2,
        "context_parallel": {"ring_degree": 2, "ulysses_degree": 2},
        "tp_size": 3,
        "ep_size": 6,
    },
    288,
    inference=True,
)


def test_rank_and_coordinate_are_inverse() -> None:
    coordinates = [FULL.coordinate(rank) for rank in range(FULL.world_size)]
    assert [FULL.rank(**at) for at in coordinates] == list(range(288))
    assert all(tuple(at) == BASE_AXES for at in coordinates)
    assert len({tuple(at.values()) for at in coordinates}) == 288


def test_ranks_are_row_major() -> None:
    assert FULL.coordinate(0) == dict.fromkeys(BASE_AXES, 0)
    assert FULL.coordinate(1) == {**dict.fromkeys(BASE_AXES, 0), "tp": 1}
    assert FULL.coordinate(144) == {**dict.fromkeys(BASE_AXES, 0), "pp": 1}
    assert FULL.rank(pp=1, dp_replicate=2, dp_shard=1, cfg=1, ring=1, ulysses=1, tp=2) == 287


def test_axes_left_out_of_a_coordinate_are_zero() -> None:
    assert FULL.rank() == 0
    assert FULL.rank(ulysses=1) == 3


@pytest.mark.parametrize("axis", AXES)
def test_index_is_the_position_in_the_group(axis: str) -> None:
    for rank in range(FULL.world_size):
        assert FULL.group(axis, rank)[FULL.index(axis, rank)] == rank


@pytest.mark.parametrize("axis", AXES)
def test_groups_partition_the_world_by_lowest_rank(axis: str) -> None:
    groups = list(FULL.groups(axis))
    assert sorted(rank for group in groups for rank in group) == list(range(288))
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    assert {len(group) for group in groups} == {FULL.size(axis)}


@pytest.mark.parametrize("axis", DERIVED_AXES)
def test_members_of_a_derived_axis_are_in_row_major_order(axis: str) -> None:
    for group in FULL.groups(axis):
        at = [FULL.coordinate(rank) for rank in group]
        assert list(group) == sorted(group)
        assert len({tuple(c[a] for a in BASE_AXES if a not in DERIVED_AXES[axis]) for c in at}) == 1


def test_axes_of_degree_one_exist() -> None:
    topology = Topology()
    assert all(topology.size(axis) == 1 and list(topology.groups(axis)) == [(0,)] for axis in AXES)


KNOWN = "the axes are pp, dp_replicate, dp_shard, cfg, ring, ulysses, tp, dp, cp, fsdp, dp_cp, efsdp, ep"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ulises", f"no axis 'ulises'; did you mean 'ulysses'? {KNOWN}"),
        ("tp_size", f"no axis 'tp_size'; did you mean 'tp'? {KNOWN}"),
        ("dp_shards", f"no axis 'dp_shards'; did you mean 'dp_shard'? {KNOWN}"),
        ("world_size", f"no axis 'world_size'; {KNOWN}"),
    ],
)
def test_an_unknown_axis_lists_the_known_ones_and_the_nearest(name: str, text: str) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: FULL.size(name),
        lambda: FULL.index(name, 0),
        lambda: FULL.group(name, 0),
        lambda: FULL.groups(name),
    ]
    for call in calls:
        with pytest.raises(ConfigurationError) as caught:
            call()
        assert str(caught.value) == text


@pytest.mark.parametrize("rank", [-1, 288])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: FULL.coordinate(rank),
        lambda: FULL.dp_rank(rank),
        *(lambda axis=axis: FULL.group(axis, rank) for axis in AXES),
        *(lambda axis=axis: FULL.index(axis, rank) for axis in AXES),
    ]
    for call in calls:
        with pytest.raises(ConfigurationError) as caught:
            call()
        assert str(caught.value) == f"rank {rank} is outside the world of 288 rank(s)"


def test_a_coordinate_outside_the_world_is_refused() -> None:
    with pytest.raises(ConfigurationError) as caught:
        FULL.rank(tp=3)
    assert str(caught.value) == "tp=3 is outside the axis, which has 3 rank(s)"
    with pytest.raises(ConfigurationError) as caught:
        FULL.rank(dp=0)
    assert str(caught.value) == f"not base axes: dp; a coordinate is over {', '.join(BASE_AXES)}"


def test_a_topology_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FULL.tp = 1  # type: ignore[misc]


def test_equal_layouts_are_equal_and_hash_alike() -> None:
    same = dataclasses.replace(FULL)
    assert same == FULL
    assert hash(same) == hash(FULL)
    assert dataclasses.replace(FULL, ep=3) != FULL


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_topology_survives_pickling(protocol: int) -> None:
    assert pickle.loads(pickle.dumps(FULL, protocol)) == FULL


# --- cost


MILLION = {
    "pp_size": 4,
    "dp_replicate": 256,
    "dp_shard": 64,
    "cfg_parallel": 2,
    "context_parallel": {"ring_degree": 2, "ulysses_degree": 2},
    "tp_size": 2,
    "ep_size": 16,
    "inference": True,
}
WORLD = 1_048_576
AT_SCALE = resolve({**MILLION, "pp_size": -1}, WORLD)


def _least_seconds(call: Callable[[], Any]) -> float:
    """The least of 20 times: noise only ever adds."""
    times = []
    for _ in range(20):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def test_the_large_layout_is_the_one_meant() -> None:
    assert AT_SCALE.world_size == WORLD
    assert AT_SCALE.pp == 4


@pytest.mark.parametrize(
    "call",
    [
        lambda: resolve({**MILLION, "pp_size": -1}, WORLD),
        lambda: AT_SCALE.coordinate(WORLD - 1),
        lambda: AT_SCALE.rank(pp=3, dp_replicate=255, tp=1),
        lambda: AT_SCALE.dp_rank(WORLD - 1),
    ],
    ids=["resolve", "coordinate", "rank", "dp_rank"],
)
def test_a_look_up_takes_under_a_millisecond_on_a_million_ranks(call: Callable[[], Any]) -> None:
    assert _least_seconds(call) < 1e-3


@pytest.mark.parametrize("axis", [axis for axis in AXES if AT_SCALE.size(axis) <= 4096])
def test_a_group_takes_under_a_millisecond_on_a_million_ranks(axis: str) -> None:
    assert _least_seconds(lambda: AT_SCALE.group(axis, WORLD - 1)) < 1e-3
    assert AT_SCALE.group(axis, WORLD - 1)[AT_SCALE.index(axis, WORLD - 1)] == WORLD - 1


def test_a_group_of_4096_takes_under_a_millisecond() -> None:
    replicated = Topology(pp=16, dp_replicate=4096, tp=16)
    guided = Topology(pp=32, dp_shard=2048, cfg=2, tp=8, ep=4)
    assert (replicated.world_size, guided.world_size, guided.efsdp) == (WORLD, WORLD, 4096)
    assert _least_seconds(lambda: replicated.group("dp_replicate", WORLD - 1)) < 1e-3
    assert _least_seconds(lambda: guided.group("efsdp", WORLD - 1)) < 1e-3
