"""``${parallelism:...}`` in real configs, launched and not."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError

from hydra_parallelism import ParallelismConfig, resolve

TWO_NODES = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "none",
}


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchrun with four processes on each of two nodes; this one is rank 5."""
    for name, value in TWO_NODES.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(autouse=True)
def no_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def _app(node: Any, **rest: Any) -> DictConfig:
    return OmegaConf.create({"parallelism": node, **rest})


def _ask(name: str, node: Any, **rest: Any) -> Any:
    return _app(node, **rest, answer=f"${{parallelism:{name}}}").answer


def _refusal(interpolation: str, node: Any, **rest: Any) -> str:
    config = _app(node, **rest, answer=interpolation)
    with pytest.raises(InterpolationResolutionError) as caught:
        _ = config.answer
    return str(caught.value)


HSDP = {"dp_replicate": 2, "dp_shard": -1, "tp_size": 2, "ep_size": 4}
ANSWERS = {
    "pp": 1, "dp_replicate": 2, "dp_shard": 2, "cfg": 1, "ring": 1, "ulysses": 1, "tp": 2, "ep": 4,
    "pp_size": 1, "cfg_parallel": 1, "ring_degree": 1, "ulysses_degree": 1, "tp_size": 2, "ep_size": 4,
    "dp": 4, "cp": 1, "fsdp": 2, "dp_cp": 4, "efsdp": 1,
    "world_size": 8, "dp_world_size": 4, "dp_rank": 2,
    "nnodes": 2, "local_world_size": 4, "rank": 5, "local_rank": 1, "node_rank": 1,
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), ANSWERS.items())
@pytest.mark.usefixtures("two_nodes")
def test_every_number_on_two_nodes(name: str, value: int) -> None:
    answer = _ask(name, HSDP)
    assert answer == value
    assert type(answer) is int


@pytest.mark.parametrize(("rank", "is_main"), [("0", True), ("5", False)])
def test_is_main_is_true_on_rank_zero_alone(rank: str, is_main: bool, two_nodes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("GROUP_RANK", "0" if rank == "0" else "1")
    assert _ask("is_main", {}) is is_main


@pytest.mark.parametrize(
    ("name", "value"),
    [("world_size", 8), ("dp_shard", 4), ("tp", 2), ("rank", 0), ("dp_rank", 0), ("nnodes", 1), ("is_main", True)],
)
def test_without_a_launcher_the_numbers_are_those_of_the_planned_world(name: str, value: int) -> None:
    assert _ask(name, {"dp_shard": 4, "tp_size": 2}) == value


def test_a_config_may_say_for_which_world_to_plan() -> None:
    node = {"dp_shard": -1, "tp_size": 2, "world_size": 16}
    assert (_ask("dp_shard", node), _ask("world_size", node), _ask("local_world_size", node)) == (8, 16, 16)


def test_the_launcher_in_the_config_is_part_of_the_plan() -> None:
    hydra = {"launcher": {"nproc_per_node": 4, "nnodes": 2}}
    assert _ask("dp_shard", {"dp_shard": -1}, hydra=hydra) == 8
    assert [_ask(name, {}, hydra=hydra) for name in ("nnodes", "local_world_size")] == [2, 4]


def test_a_launcher_of_another_kind_has_no_part_in_the_plan() -> None:
    for launcher in ({"nproc_per_node": None}, {"n_jobs": 4}, None):
        assert _ask("dp_shard", {"dp_shard": -1, "tp_size": 2}, hydra={"launcher": launcher}) == 1


def test_a_typed_node_is_read_too(two_nodes: None) -> None:
    assert _ask("dp_shard", OmegaConf.structured(ParallelismConfig(dp_shard=-1, tp_size=2))) == 4


@pytest.mark.parametrize("typed", [False, True])
def test_a_degree_may_be_the_number_of_nodes(typed: bool, two_nodes: None) -> None:
    node = {"dp_replicate": "${parallelism:nnodes}", "dp_shard": -1}
    config = _app(OmegaConf.merge(ParallelismConfig, node) if typed else node, shards="${parallelism:dp_shard}")
    assert (config.parallelism.dp_replicate, config.shards) == (2, 4)
    assert resolve(config.parallelism, 8).degrees()["dp_replicate"] == 2


@pytest.mark.parametrize(("name", "value"), [("local_world_size", 4), ("nnodes", 2), ("rank", 5)])
def test_a_degree_may_be_any_number_that_needs_no_degrees(name: str, value: int, two_nodes: None) -> None:
    assert _app({"tp_size": f"${{parallelism:{name}}}"}).parallelism.tp_size == value


def test_a_degree_that_asks_for_degrees_is_refused_on_one_screen() -> None:
    with pytest.raises(InterpolationResolutionError) as caught:
        _ = _app({"dp_shard": "${parallelism:tp}"}).parallelism.dp_shard
    assert "parallelism.dp_shard" in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_what_is_no_degree_may_ask_for_degrees_inside_the_node() -> None:
    config = _app({"pp_size": 2, "pipeline": {"microbatches": "${parallelism:pp}"}})
    assert config.parallelism.pipeline.microbatches == 2
    assert resolve(config.parallelism, 2).pp == 2


def test_a_number_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    config = _app({"dp_shard": -1}, shards="${parallelism:dp_shard}")
    assert config.shards == 1
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert config.shards == 4


# --- the node


def test_the_node_may_be_elsewhere(two_nodes: None) -> None:
    config = OmegaConf.create(
        {
            "model": {"layout": {"dp_shard": -1, "tp_size": 4}},
            "shards": "${parallelism:dp_shard,model.layout}",
            "batch": "${parallelism.per_dp_rank:64,model.layout}",
        }
    )
    assert (config.shards, config.batch) == (2, 32)


def test_a_node_elsewhere_is_quoted_by_its_path(two_nodes: None) -> None:
    config = OmegaConf.create({"model": {"layout": {"tp_size": 3}}, "tp": "${parallelism:tp,model.layout}"})
    with pytest.raises(InterpolationResolutionError) as caught:
        _ = config.tp
    assert "model.layout does not fit the world:\n" in str(caught.value)
    assert "tp_size=3 = 3, but WORLD_SIZE=8 (torchrun)\n" in str(caught.value)
    assert "try: model.layout.tp_size=8, or start 3 processes" in str(caught.value)


def test_a_missing_node_is_named() -> None:
    config = OmegaConf.create({"shards": "${parallelism:dp_shard}", "other": "${parallelism:tp,model.layout}"})
    for key, node in (("shards", "parallelism"), ("other", "model.layout")):
        with pytest.raises(InterpolationResolutionError) as caught:
            _ = config[key]
        assert (
            f"the config has no node {node!r}: choose a preset (parallelism=default), "
            "or name the node: ${parallelism:NAME,path.to.node}"
        ) in str(caught.value)


def test_numbers_of_the_process_need_no_node(two_nodes: None) -> None:
    assert OmegaConf.create({"rank": "${parallelism:rank}"}).rank == 5


def test_an_unknown_name_lists_the_known_ones() -> None:
    text = _refusal("${parallelism:gpus}", {})
    assert (
        "${parallelism:gpus}: no such number; known are nnodes, local_world_size, rank, local_rank, node_rank, is_main, "
        "world_size, dp_world_size, dp_rank, pp, dp_replicate, dp_shard, cfg, ring, ulysses, tp, dp, cp, fsdp, dp_cp, efsdp, "
        "ep, pp_size, cfg_parallel, ring_degree, ulysses_degree, tp_size, ep_size"
    ) in text


def test_an_invalid_config_says_so_through_an_interpolation() -> None:
    text = _refusal("${parallelism:tp}", {"tp_size": 0, "dp_shard": -2})
    assert "parallelism.tp_size=0: must be a whole number" in text
    assert "parallelism.dp_shard=-2: must be a whole number" in text


def test_a_world_in_quotes_is_refused_as_a_config_error() -> None:
    text = _refusal("${parallelism:world_size}", {"world_size": "4"})
    assert "ConfigurationError" in text
    assert "parallelism.world_size=" in text


def test_a_contradiction_of_the_launcher_says_so_through_an_interpolation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "WORLD_SIZE=4 is set but RANK is not" in _refusal("${parallelism:nnodes}", {})


# --- the batch of one data-parallel rank


@pytest.mark.parametrize(("batch", "share"), [(64, 16), (4, 1), (0, 0)])
def test_a_batch_is_divided_over_data_parallel_ranks(batch: int, share: int, two_nodes: None) -> None:
    config = _app(
        HSDP, batch=batch, share="${parallelism.per_dp_rank:${batch}}", literal=f"${{parallelism.per_dp_rank:{batch}}}"
    )
    assert config.share == config.literal == share
    assert type(config.share) is int


def test_an_indivisible_batch_is_refused_with_the_nearest_that_fit(two_nodes: None) -> None:
    assert (
        "${parallelism.per_dp_rank:30}: 30 does not divide over dp_replicate=2 * dp_shard=2 = 4 data-parallel ranks: "
        "30 % 4 = 2; try 28 or 32\n"
    ) in _refusal("${parallelism.per_dp_rank:${batch}}", HSDP, batch=30)


def test_a_batch_smaller_than_the_ranks_can_only_grow(two_nodes: None) -> None:
    assert "3 % 4 = 3; try 4\n" in _refusal("${parallelism.per_dp_rank:3}", HSDP)


@pytest.mark.parametrize("batch", [-4, 6.5, True, "many", None])
def test_a_batch_is_a_whole_number(batch: Any) -> None:
    text = _refusal("${parallelism.per_dp_rank:${batch}}", {}, batch=batch)
    assert f"${{parallelism.per_dp_rank:{batch}}}: must be a whole number" in text


# --- another process


def test_a_child_process_that_unpickles_a_config_can_answer(tmp_path: Path) -> None:
    node = OmegaConf.structured(ParallelismConfig(dp_shard=-1))
    path = tmp_path / "config.pickle"
    path.write_bytes(pickle.dumps(_app(node, shards="${parallelism:dp_shard}")))
    code = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb')).shards, 'torch' in sys.modules)"
    environ = {**os.environ, "RANK": "1", "WORLD_SIZE": "6"}
    child = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning", "-c", code, str(path)],
        env=environ, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (child.stdout, child.stderr) == ("6 False\n", "")
