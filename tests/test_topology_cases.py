"""Layouts and refusals listed in ``cases/topology.json``, made by an independent enumeration."""

import json
from pathlib import Path
from typing import Any

import pytest

from hydra_parallelism import ConfigurationError, resolve
from hydra_parallelism.topology import AXES, BASE_AXES, DERIVED_AXES

CASES = json.loads((Path(__file__).parent / "cases" / "topology.json").read_text())


def _name(case: dict[str, Any]) -> str:
    return f"{json.dumps(case['config'])} on {case['world_size']}"


def test_the_cases_and_the_library_agree_on_the_axes() -> None:
    assert tuple(CASES["axes"]) == BASE_AXES
    for case in CASES["valid"]:
        assert {*BASE_AXES, *DERIVED_AXES} <= set(case["expect"]["groups"]) <= set(AXES)


@pytest.mark.parametrize("case", CASES["valid"], ids=_name)
def test_valid_layout(case: dict[str, Any]) -> None:
    world, expect = case["world_size"], case["expect"]
    topology = resolve(case["config"], world, inference=case["inference"])
    assert {axis: topology.size(axis) for axis in expect["degrees"]} == expect["degrees"]
    for axis, groups in expect["groups"].items():
        assert [list(group) for group in topology.groups(axis)] == groups, axis
        assert all(list(topology.group(axis, rank)) == group for group in groups for rank in group), axis
        assert topology.size(axis) == len(groups[0]), axis
    assert topology.dp_world_size == expect["dp_world_size"]
    assert [topology.dp_rank(rank) for rank in range(world)] == expect["dp_rank"]


@pytest.mark.parametrize("case", CASES["invalid"], ids=_name)
def test_refused_config(case: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve(case["config"], case["world_size"], inference=case.get("inference"))
    for mention in case["error_mentions"]:
        assert mention in str(caught.value)
