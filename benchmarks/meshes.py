"""All views of one rank of a huge world on the fake backend: ours against torch's own way, interleaved in one process.

Torch's way is ``init_device_mesh`` for the dense and for the sparse axes and ``_flatten`` for dp, cp, fsdp and dp_cp. Ours are
the five views of ``hydra_parallelism.mesh`` that hold the same axes. Usage: ``python benchmarks/meshes.py [ROUNDS]``.
"""

import gc
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from hydra_parallelism import Topology, resolve
from hydra_parallelism.mesh import _VIEWS, Meshes, build_groups
from hydra_parallelism.topology import AXES, BASE_AXES, DERIVED_AXES

LAYOUT = {"pp_size": 8, "dp_replicate": 16, "dp_shard": 32, "context_parallel": {"ring_degree": 2}, "tp_size": 8}


def ours(topology: Topology, rank: int) -> object:
    """Groups and the five whole-world views."""
    meshes = Meshes(topology, rank, build_groups(topology, rank, timeout=timedelta(seconds=60)), "cpu")
    return [meshes[view] for view in _VIEWS]


def ours_and_every_axis(topology: Topology, rank: int) -> object:
    """The same and a mesh for every single axis."""
    meshes = Meshes(topology, rank, build_groups(topology, rank, timeout=timedelta(seconds=60)), "cpu")
    return [meshes[view] for view in _VIEWS] + [meshes[axis] for axis in AXES]


def torchs(topology: Topology, rank: int) -> object:
    """The same axes from torch."""
    dense = init_device_mesh("cpu", tuple(topology.size(a) for a in BASE_AXES), mesh_dim_names=BASE_AXES)
    sparse = ("pp", "dp_replicate", "efsdp", "ep")
    experts = init_device_mesh("cpu", tuple(topology.size(a) for a in sparse), mesh_dim_names=sparse)
    return dense, experts, [dense[parts]._flatten(name) for name, parts in DERIVED_AXES.items()]


def measure(build: Callable[[Topology, int], object], topology: Topology, rank: int) -> float:
    """Seconds of one build in a fresh fake world."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=topology.world_size)
    began = time.perf_counter()
    kept = build(topology, rank)
    seconds = time.perf_counter() - began
    del kept
    dist.destroy_process_group()
    gc.collect()
    return seconds


def main() -> None:
    """Print medians and the ratio."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    print(f"{rounds} interleaved rounds, {os.cpu_count()} cores, torch {torch.__version__}")
    topology = resolve(LAYOUT, 65_536)
    builds = (ours, ours_and_every_axis, torchs)
    taken = {build.__name__: [] for build in builds}
    for _ in range(rounds):
        for build in builds:
            taken[build.__name__].append(measure(build, topology, 39_324))
    median = {name: statistics.median(seconds) for name, seconds in taken.items()}
    for name, seconds in median.items():
        print(f"65,536 ranks  {name:>20}: {seconds:.4f} s")
    print(f"65,536 ranks  torchs / ours: {median['torchs'] / median['ours']:.0f} (goal 50)")
    million = resolve({**LAYOUT, "dp_shard": 512}, 1 << 20)
    for build in builds[:2]:
        seconds = statistics.median(measure(build, million, 777_777) for _ in range(rounds))
        print(f"1,048,576 ranks  {build.__name__:>20}: {seconds:.3f} s (goal 1 s)")


if __name__ == "__main__":
    main()
