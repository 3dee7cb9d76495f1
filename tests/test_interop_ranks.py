"""accelerate and diffusers on our meshes, on four real ranks."""

from typing import Any

import pytest

import worlds
from apps.others import LAYOUTS

pytestmark = worlds.MARKS


@pytest.fixture
def four() -> list[dict[str, Any]]:
    return [rank["others"] for rank in worlds.reports(4)]


@pytest.mark.parametrize(("layout", "duplicates"), [("hsdp", 3), ("ring", 3), ("tp", 5)])
def test_the_mesh_for_accelerate_is_the_one_that_it_builds_without_its_groups(
    four: list[dict[str, Any]], layout: str, duplicates: int
) -> None:
    assert layout in LAYOUTS
    for rank in four:
        mesh = rank["meshes"][layout]
        assert mesh["ours"] == mesh["theirs"]
        assert {"dp", "dp_shard_cp", "dp_cp"} < set(mesh["ours"]["ranks"])
        assert mesh["made"] == [0, duplicates]


def test_fsdp_trains_on_the_mesh_that_accelerate_looks_up(four: list[dict[str, Any]]) -> None:
    for rank in four:
        trained = rank["trained"]
        assert trained["losses"] == pytest.approx(trained["alone"], rel=1e-6)
        assert trained["parameter"] == ["(Replicate(), Shard(dim=0))", ["dp_replicate", "dp_shard_cp"]]
        assert trained["made"] == 0


def test_an_accelerator_takes_the_mesh_and_then_wants_accelerators(four: list[dict[str, Any]]) -> None:
    for rank in four:
        assert rank["trained"]["is_ours"]
        assert rank["trained"]["refused"].endswith("but got DistributedType.MULTI_CPU.")


def test_diffusers_finds_each_rank_where_we_put_it(four: list[dict[str, Any]]) -> None:
    places = [rank["sequence"]["theirs"] for rank in four]
    assert places == [[0, 0], [0, 1], [1, 0], [1, 1]] == [rank["sequence"]["ours"] for rank in four]
    assert all(rank["sequence"]["flattened"] == [0, 1, 2, 3] for rank in four)


def test_a_tiny_flux_on_our_mesh_predicts_what_one_process_does(four: list[dict[str, Any]]) -> None:
    for rank in four:
        assert rank["flux"]["off"] < 1e-5
        assert rank["flux"]["shape"] == [1, 16, 4]
        # Why its engine is put on by hand: enable_parallelism divides by the number of accelerators.
        assert rank["flux"]["refused"] == "ZeroDivisionError: integer modulo by zero"
