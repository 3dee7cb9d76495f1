"""Seeds and samplers: pure functions of a layout and a rank."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from hydra_parallelism import ConfigurationError, ParallelContext, distributed_sampler, resolve, seed_for
from hydra_parallelism.topology import Topology
from hydra_parallelism.world import World


def context(topology: Topology, rank: int) -> ParallelContext:
    """A context that nobody has built: what is tested here asks its layout only."""
    nothing: Any = None
    return ParallelContext(topology, World(topology.world_size, rank), torch.device("cpu"), nothing, "gloo", nothing)


def seeds(config: dict[str, Any], size: int, seed: int = 7, **options: Any) -> list[int]:
    topology = resolve(config, size)
    return [seed_for(seed, context=context(topology, rank), **options) for rank in range(size)]


def test_peers_inside_tp_cp_cfg_and_pp_share_a_seed() -> None:
    for config in (
        {"dp_replicate": 2, "dp_shard": 2, "tp_size": 2},
        {"dp_shard": 2, "context_parallel": {"ring_degree": 2, "ulysses_degree": 2}},
        {"dp_shard": 4, "cfg_parallel": 2, "inference": True},
        {"pp_size": 2, "dp_shard": 4},
    ):
        topology, found = resolve(config, 8), seeds(config, 8)
        by_dp_rank = {topology.dp_rank(rank): found[rank] for rank in range(8)}
        assert found == [by_dp_rank[topology.dp_rank(rank)] for rank in range(8)]
        assert len(set(found)) == topology.dp_world_size


def test_the_axes_along_which_seeds_differ_can_be_named() -> None:
    config = {"pp_size": 2, "dp_shard": 2, "tp_size": 2}
    assert len(set(seeds(config, 8, across=("dp", "pp")))) == 4
    assert seeds(config, 8, across=("dp", "pp")) == seeds(config, 8, across=("pp", "dp"))
    assert seeds(config, 8, across="dp") == seeds(config, 8, across=("dp",)) == seeds(config, 8)
    assert len(set(seeds(config, 8, across=()))) == 1
    assert len(set(seeds(config, 8, across=("pp", "dp", "tp")))) == 8


def test_a_seed_does_not_depend_on_other_axes() -> None:
    fsdp, hsdp = seeds({"dp_shard": 4}, 4), seeds({"dp_replicate": 2, "dp_shard": 2, "tp_size": 2}, 8)
    assert hsdp[::2] == fsdp
    assert seeds({}, 1) == fsdp[:1]


def test_the_numbers_are_these_in_every_process_and_release() -> None:
    assert seeds({"dp_shard": 4}, 4) == [6785712579837726446, 2784061560877341975, 6099166886055121796, 2081138292901603687]
    assert seeds({}, 1, seed=-(2**70), purpose="dropout") == [8377135658262978531]


def test_neighbours_do_not_meet() -> None:
    found = Counter(seed for number in range(64) for seed in seeds({"dp_shard": 64}, 64, seed=number))
    assert set(found.values()) == {1}
    assert len({seed & 0xFFFFFFFF for seed in found}) == len(found)  # all that torch's CPU generator reads
    assert set(seeds({"dp_shard": 4}, 4)) & set(seeds({"dp_shard": 4}, 4, purpose="dropout")) == set()
    assert all(0 <= seed < 2**63 for seed in found)
    draws = [torch.rand((), generator=torch.Generator().manual_seed(seed)).item() for seed in found]
    assert abs(np.mean(draws) - 0.5) < 0.02
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.06


def test_whole_numbers_of_any_kind() -> None:
    assert seeds({}, 1, seed=np.int64(7)) == seeds({}, 1, seed=7)
    with pytest.raises(ConfigurationError, match=r"a seed is a whole number, not 0\.5\n  try: seed_for\(0\)"):
        seeds({}, 1, seed=0.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="no axis 'dps'; did you mean 'dp"):
        seeds({}, 1, across="dps")


@pytest.mark.parametrize(("length", "drop_last", "each"), [(10, False, 3), (10, True, 2), (12, False, 3), (1, False, 1)])
def test_each_share_is_read_once(length: int, drop_last: bool, each: int) -> None:
    topology = resolve({"dp_replicate": 2, "dp_shard": 2, "tp_size": 2}, 8)
    samplers = [
        distributed_sampler(range(length), seed=3, drop_last=drop_last, context=context(topology, rank)) for rank in range(8)
    ]
    shares = [list(sampler) for sampler in samplers]
    assert {len(share) for share in shares} == {each}
    assert shares[::2] == shares[1::2]
    read = Counter(sample for share in shares[::2] for sample in share)
    assert len(read) == (each * 4 if drop_last else length)
    assert max(read.values()) <= -(-each * 4 // length)
    samplers[0].set_epoch(1)
    assert length == 1 or list(samplers[0]) != shares[0]


def test_in_order() -> None:
    topology = resolve({"dp_shard": 4}, 4)
    shares = [list(distributed_sampler(range(12), shuffle=False, context=context(topology, rank))) for rank in range(4)]
    assert shares == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "options", "text"),
    [
        (Stream(), {}, "a sampler needs a dataset with a length, and Stream has none\n  try: read every 4th sample"),
        ([], {}, "0 sample(s) do not give each of the dp_world_size=4 = dp_replicate * dp_shard ranks one"),
        ([1, 2, 3], {"drop_last": True}, "try: drop_last=False with at least 1 sample, or at most 3 data-parallel rank(s)"),
    ],
)
def test_what_cannot_be_shared_out(dataset: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        distributed_sampler(dataset, context=context(resolve({"dp_shard": 4}, 4), 0), **options)
    assert text in str(caught.value)
