"""Groups and meshes against the topology: every rank of every preset on the fake backend, then real gloo ranks."""

import gc
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from hydra_parallelism import ConfigurationError, LaunchError, resolve
from hydra_parallelism._compat import registered_groups
from hydra_parallelism.mesh import Meshes, build_groups
from hydra_parallelism.topology import AXES, BASE_AXES, DERIVED_AXES
from processes import body_lines, run, torchrun

TIMEOUT = timedelta(seconds=77)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "ddp": (4, {"dp_replicate": -1}),
    "hsdp_tp": (8, {"dp_replicate": 2, "dp_shard": 2, "tp_size": 2}),
    "usp": (8, {"dp_shard": 2, "context_parallel": {"ring_degree": 2, "ulysses_degree": 2}}),
    "guidance": (8, {"cfg_parallel": 2, "dp_shard": 2, "tp_size": 2, "ep_size": 4, "inference": True}),
    "experts": (16, {"dp_shard": 8, "tp_size": 2, "ep_size": 8}),
    "odd": (18, {"pp_size": 3, "dp_shard": 3, "tp_size": 2, "ep_size": 2}),
    "everything": (128, {"pp_size": 2, "dp_replicate": 2, "dp_shard": 2, "cfg_parallel": 2, "inference": True,
                         "context_parallel": {"ring_degree": 2, "ulysses_degree": 2}, "tp_size": 2, "ep_size": 8}),
}  # fmt: skip
VIEWS = [
    ("dp_replicate", "fsdp"), ("ring", "ulysses"), ("pp", "dp", "tp"), ("dp_replicate", "dp_shard"), ("dp", "cp"),
    ("dp_shard", "cp", "tp"), ("pp", "dp_cp", "tp"), BASE_AXES,
]  # fmt: skip


@contextmanager
def fake_world(size: int, rank: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        gc.collect()


def enumerate_view(topology: Any, axes: tuple[str, ...], rank: int) -> list[int]:
    """Ranks of a dense view, row-major, by brute force over all coordinates."""
    sizes = [range(getattr(topology, axis)) for axis in BASE_AXES]
    everyone = {number: dict(zip(BASE_AXES, at, strict=True)) for number, at in enumerate(itertools.product(*sizes))}
    free = [part for axis in axes for part in DERIVED_AXES.get(axis, (axis,))]
    fixed = [axis for axis in BASE_AXES if axis not in free]
    peers = [n for n, at in everyone.items() if all(at[axis] == everyone[rank][axis] for axis in fixed)]
    return sorted(peers, key=lambda n: [everyone[n][axis] for axis in free])


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_gets_the_meshes_the_topology_says(name: str) -> None:
    size, config = LAYOUTS[name]
    topology = resolve(config, size)
    for rank in range(0, size, max(1, size // 16)):
        with fake_world(size, rank):
            groups = build_groups(topology, rank, timeout=TIMEOUT)
            meshes = Meshes(topology, rank, groups, "cpu")
            sets = {topology.group(axis, rank) for axis in AXES}
            assert registered_groups() == len(groups.made) + 1 == len({*sets, tuple(range(size))})
            for axis in meshes:
                assert meshes[axis].mesh.tolist() == list(topology.group(axis, rank))
                assert meshes[axis].get_local_rank() == topology.index(axis, rank)
                assert meshes[axis].get_group() is groups.of_axis[axis]
                assert (groups.of_axis[axis] is dist.group.WORLD) == (topology.size(axis) == size)
            for view in VIEWS:
                assert meshes[view].mesh.flatten().tolist() == enumerate_view(topology, view, rank)
                assert tuple(meshes[view].shape) == tuple(topology.size(axis) for axis in view)
                assert meshes[view] is meshes[view]
            experts = meshes["efsdp", "ep"]
            assert tuple(experts.shape) == (topology.efsdp, topology.ep)
            assert experts.mesh[:, topology.index("ep", rank)].tolist() == list(topology.group("efsdp", rank))
            assert registered_groups() == len(groups.made) + 1


def test_the_ordinary_way_makes_the_same_groups() -> None:
    topology = resolve({"dp_replicate": 2, "dp_shard": 2, "tp_size": 2}, 8)
    with fake_world(8, 5):
        groups = build_groups(topology, 5, timeout=TIMEOUT, local=False)
        assert {a: tuple(dist.get_process_group_ranks(g)) for a, g in groups.of_axis.items()} == {
            axis: topology.group(axis, 5) for axis in AXES
        }


def test_a_topology_of_another_size_is_refused() -> None:
    with fake_world(4, 0), pytest.raises(LaunchError, match="the default process group has 4 ranks, the topology 8"):
        build_groups(resolve({"dp_shard": 8}, 8), 0, timeout=TIMEOUT)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ("dpshard", "no axis 'dpshard'; did you mean 'dp_shard'?"),
        ("x", "the axes are pp, dp_replicate, dp_shard, cfg, ring, ulysses, tp, dp, cp, fsdp, dp_cp, efsdp, ep"),
        (("tp", "fsdp"), "is not outermost first; ask for ('fsdp', 'tp')"),
        (("dp", "fsdp"), "counts dp_shard twice"),
        (("ep", "tp"), "mixes the expert axes with dense ones"),
        ((), "name at least one axis"),
    ],
)
def test_what_is_no_mesh_is_said(names: Any, text: str) -> None:
    topology = resolve({"dp_shard": 2, "tp_size": 2}, 4)
    with fake_world(4, 0):
        meshes = Meshes(topology, 0, build_groups(topology, 0, timeout=TIMEOUT), "cpu")
        with pytest.raises(ConfigurationError) as caught:
            meshes[names]
        assert text in str(caught.value)
        assert ("tp" in meshes, "nope" in meshes, len(meshes)) == (True, False, len(AXES))


def test_a_rank_of_a_million_builds_only_its_own_groups() -> None:
    config = {"pp_size": 8, "dp_replicate": 16, "dp_shard": 512, "context_parallel": {"ring_degree": 2}, "tp_size": 8}
    topology = resolve(config, 1 << 20)
    with fake_world(1 << 20, 777_777):
        groups = build_groups(topology, 777_777, timeout=TIMEOUT)
        assert registered_groups() == len({topology.group(axis, 777_777) for axis in AXES}) + 1
        mesh = Meshes(topology, 777_777, groups, "cpu")["dp_replicate", "fsdp"]
        assert torch.equal(mesh.mesh[:, 3], torch.tensor([topology.rank(
            **{**topology.coordinate(777_777), "dp_replicate": r, "dp_shard": 1, "ring": 1}) for r in range(16)
        ], dtype=torch.int))  # fmt: skip


@pytest.mark.processes
@pytest.mark.parametrize("name", ["hsdp_tp", "usp"])
def test_eight_gloo_ranks(name: str, tmp_path: Path) -> None:
    size, config = LAYOUTS[name]
    topology = resolve(config, size)
    outcome = run(torchrun(8, "groups.py", json.dumps(config)), tmp_path, deadline=120)
    assert outcome.code == 0, outcome.text
    reports = [json.loads(line.removeprefix("BODY ")) for line in body_lines(outcome)]
    assert sorted(report["rank"] for report in reports) == list(range(8))
    for report in reports:
        rank = report["rank"]
        assert report["members"] == {axis: list(topology.group(axis, rank)) for axis in AXES}
        assert report["sums"] == {axis: sum(topology.group(axis, rank)) for axis in AXES}
        assert report["timeouts"] == [77.0]
        needed = {topology.group(axis, rank) for axis in AXES if topology.size(axis) > 1} | {tuple(range(8))}
        assert report["self_groups"] == 1
        assert report["registered"] == report["registered_after_asking_again"] == len(needed) + 1
        assert report["same_objects"]
        assert report["world_is_default"] == {axis: topology.size(axis) == 8 for axis in AXES}
        assert report["registered_after_shutdown"] == 0
