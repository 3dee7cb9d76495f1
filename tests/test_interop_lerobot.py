"""LeRobot's ``ParallelismConfig``. No release has it, so the reference here is its rules, written down as a function."""

import itertools
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from hydra_parallelism import ConfigurationError, ParallelismConfig, Topology, resolve
from hydra_parallelism.interop import from_lerobot, to_lerobot
from processes import ROOT


@dataclass
class Context:
    """Its fields."""

    ring_degree: int = 1
    ulysses_degree: int = 1


@dataclass
class Layout:
    """Its fields."""

    dp_replicate: int = 1
    dp_shard: int = 1
    context_parallel: Context = field(default_factory=Context)
    cfg_parallel: int = 1


@dataclass
class TrainConfig:
    """A part of what is around it."""

    dataset: str
    parallelism: Layout = field(default_factory=Layout)


def resolved(layout: Layout, world: int) -> tuple[int, int] | None:
    """What LeRobot makes of a layout: dp_replicate and dp_shard, or a refusal. Its refusal of context degrees is left out."""
    replicate, shard, cp = layout.dp_replicate, layout.dp_shard, layout.context_parallel
    degrees = (replicate, cp.ring_degree, cp.ulysses_degree)
    if min(degrees) < 1 or (shard < 1 and shard != -1) or layout.cfg_parallel not in (1, 2):
        return None
    rest = replicate * cp.ring_degree * cp.ulysses_degree
    if shard == -1:
        return (replicate, world // rest) if world % rest == 0 else None
    if (shard, rest) == (1, 1):
        return world, 1
    return (replicate, shard) if rest * shard == world else None


GRID = list(itertools.product((0, 1, 2, 3), (-2, -1, 0, 1, 2, 4), (1, 2), (1, 2), (1, 3, 4, 8)))


def test_degrees_and_refusals_are_the_same_over_a_grid() -> None:
    seen = {"same": 0, "refused": 0}
    for replicate, shard, ring, ulysses, world in GRID:
        theirs = Layout(replicate, shard, Context(ring, ulysses))
        wanted = resolved(theirs, world)
        if wanted is None:
            with pytest.raises(ConfigurationError):
                resolve(from_lerobot(theirs), world)
            seen["refused"] += 1
            continue
        found = resolve(from_lerobot(theirs), world)
        assert (found.dp_replicate, found.dp_shard, found.ring, found.ulysses) == (*wanted, ring, ulysses)
        seen["same"] += 1
    assert seen == {"same": 37, "refused": 347}


@pytest.mark.parametrize(
    ("theirs", "world", "wanted"),
    [
        ({}, 1, Topology()),
        ({}, 4, Topology(dp_replicate=4)),  # untouched: replicas over what was launched
        ({"dp_shard": 4}, 4, Topology(dp_shard=4)),
        ({"dp_shard": -1}, 8, Topology(dp_shard=8)),
        ({"dp_shard": -1}, 1, Topology()),
        ({"dp_replicate": 2, "dp_shard": -1}, 8, Topology(dp_replicate=2, dp_shard=4)),
        ({"dp_shard": -1, "context_parallel": {"ring_degree": 2}}, 8, Topology(dp_shard=4, ring=2)),
        ({"context_parallel": {"ring_degree": 2, "ulysses_degree": 2}}, 4, Topology(ring=2, ulysses=2)),
        ({"dp_replicate": 4}, 4, Topology(dp_replicate=4)),
    ],
)
def test_what_a_layout_comes_to(theirs: dict[str, Any], world: int, wanted: Topology) -> None:
    found = resolve(from_lerobot(theirs), world)
    assert found == wanted
    again = from_lerobot(to_lerobot(found))  # resolving is idempotent
    assert resolve(again, world) == wanted


def test_what_is_asked_of_a_layout_is_the_same() -> None:
    layout = resolve(from_lerobot({"dp_replicate": 2, "dp_shard": -1, "context_parallel": {"ring_degree": 2}}), 8)
    assert (layout.cp, layout.dp_world_size, layout.is_sharded, layout.is_replicated_only) == (2, 4, True, False)
    assert layout.fsdp == 4  # FSDP's group is dp_shard x ring x ulysses
    assert [layout.dp_rank(rank) for rank in range(8)] == [rank // layout.cp for rank in range(8)]
    replicated = resolve(from_lerobot({}), 4)
    assert (replicated.is_sharded, replicated.is_replicated_only) == (False, True)


WHOLE = "must be a whole number of at least 1"
UNKNOWN = "ParallelismConfig has no such field; did you mean"


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"dp_replicate": 0, "dp_shard": 0}, f"dp_replicate=0: {WHOLE}\n  dp_shard=0: {WHOLE}, or -1 for what is left"),
        ({"dp_replicate": -1}, f"dp_replicate=-1: {WHOLE}"),
        ({"cfg_parallel": 3}, "cfg_parallel=3: must be 1 or 2"),
        ({"context_parallel": {"ring_degree": -1}}, f"context_parallel.ring_degree=-1: {WHOLE}"),
        ({"dp_shards": 2}, f"dp_shards: {UNKNOWN} dp_shard?"),
        ({"context_parallel": {"ring": 2}}, f"context_parallel.ring: {UNKNOWN} context_parallel.ring_degree?"),
        ({"context_parallel": 2}, f"context_parallel: {UNKNOWN} context_parallel.ring_degree?"),
    ],
)
def test_what_lerobot_refuses_is_refused(theirs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        from_lerobot(theirs)
    assert str(refusal.value) == f"lerobot ParallelismConfig cannot be taken over:\n  {message}"


@pytest.mark.parametrize(("world", "text"), [(6, "6 % 4 = 2"), (2, "2 % 4 = 2")])
def test_what_does_not_divide_is_refused_with_the_numbers(world: int, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        resolve(from_lerobot({"dp_replicate": 4, "dp_shard": -1}), world)


def test_guidance_is_for_serving_on_both_sides() -> None:
    config = from_lerobot({"dp_replicate": 2, "cfg_parallel": 2})
    assert (config.cfg_parallel, config.inference) == (2, True)
    with pytest.raises(ConfigurationError, match="cfg_parallel=2 is for inference only"):
        to_lerobot({"cfg_parallel": 2})


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"dp_shard": -1},
        {"dp_replicate": 2, "dp_shard": -1},
        {"dp_shard": 2, "context_parallel": {"ring_degree": 2, "ulysses_degree": 4}},
        {"cfg_parallel": 2, "inference": True},
    ],
)
def test_round_trip_through_a_mapping_and_a_train_config(config: dict[str, Any], tmp_path: Path) -> None:
    wanted: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ParallelismConfig), config))
    node = to_lerobot(OmegaConf.create(config))
    assert from_lerobot(node) == wanted
    path = tmp_path / "train_config.json"
    path.write_text(json.dumps({"dataset": {"repo_id": "a/b"}, "steps": 10, "parallelism": node}))
    assert from_lerobot(path) == from_lerobot(str(path)) == from_lerobot(json.loads(path.read_text())) == wanted
    layout = Layout(**{**node, "context_parallel": Context(**node["context_parallel"])})
    assert from_lerobot(layout) == from_lerobot(TrainConfig("a/b", layout)) == wanted


def test_missing_fields_have_their_defaults() -> None:
    assert from_lerobot({"context_parallel": {"ring_degree": 2}}).context_parallel.ulysses_degree == 1
    assert from_lerobot({"dp_shard": 2, "context_parallel": None}).context_parallel.ring_degree == 1
    assert from_lerobot({"dataset": {}, "steps": 10}) == ParallelismConfig()  # a train config from before there was the node


def test_what_lerobot_cannot_express_is_refused_by_name() -> None:
    config = {
        "tp_size": 2,
        "fsdp": {"mixed_precision": "bf16"},
        "activation_checkpointing": "full",
        "pipeline": {"microbatches": 4},
    }
    with pytest.raises(ConfigurationError) as refusal:
        to_lerobot(config)
    assert str(refusal.value) == (
        "lerobot ParallelismConfig cannot express this layout:\n"
        "  parallelism.tp_size=2: LeRobot has data, context and guidance axes only\n"
        "    try: parallelism.tp_size=1\n"
        "  parallelism.activation_checkpointing=full: LeRobot has it in another node, "
        "accelerator.activation_checkpointing.mode\n"
        "    try: parallelism.activation_checkpointing=none\n"
        "  parallelism.fsdp.mixed_precision=bf16: LeRobot has it in another node, accelerator.mixed_precision\n"
        "    try: parallelism.fsdp.mixed_precision=null"
    )


def test_an_open_degree_that_lerobot_does_not_know_needs_a_world() -> None:
    with pytest.raises(ConfigurationError) as refusal:
        to_lerobot({"context_parallel": {"ring_degree": -1}})
    assert str(refusal.value) == (
        "parallelism.context_parallel.ring_degree=-1: how many processes there are is not said\n"
        "  try: parallelism.world_size=8, or world_size=8"
    )
    assert to_lerobot({"context_parallel": {"ring_degree": -1}}, world_size=4)["context_parallel"]["ring_degree"] == 4
    assert to_lerobot({"dp_replicate": -1, "world_size": 4})["dp_replicate"] == 4


@pytest.mark.parametrize("source", [3, [1], None])
def test_what_is_no_description_is_refused(source: Any) -> None:
    with pytest.raises(
        ConfigurationError, match="can be read from an instance, a mapping, or the path of a JSON file, not from"
    ):
        from_lerobot(source)


def test_a_file_that_is_not_there_or_not_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"absent\.json is not a JSON file of ParallelismConfig: .*No such file"):
        from_lerobot(tmp_path / "absent.json")
    (tmp_path / "half.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"half\.json is not a JSON file of ParallelismConfig: Expecting"):
        from_lerobot(tmp_path / "half.json")


def test_the_example_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = re.search(r"## LeRobot\n\n```python\n(.*?)```", (ROOT / "docs/interop.md").read_text(), re.S)
    assert code is not None
    written, read = code[1].split("config = ")
    names: dict[str, Any] = {"train_config": {"dataset": {}}}
    exec(written, names)
    path = tmp_path / re.findall(r'"(.*?)"', read)[0]
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(names["train_config"]))
    monkeypatch.chdir(tmp_path)
    exec(f"config = {read}", names)
    assert (names["config"].dp_replicate, names["config"].dp_shard) == (2, -1)
