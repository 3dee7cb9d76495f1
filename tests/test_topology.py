"""The rules of ``resolve()`` and the methods of ``Topology``, one by one, with the exact text of every refusal."""

import dataclasses
import warnings
from typing import Any

import pytest
from omegaconf import OmegaConf

from hydra_parallelism import ConfigurationError, ContextParallelConfig, ParallelismConfig, Topology, resolve
from hydra_parallelism.topology import AXES, BASE_AXES

FACTORS = ("pp_size", "dp_replicate", "dp_shard", "ring_degree", "ulysses_degree", "tp_size")


def _refusal(config: Any, world_size: Any, **options: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        resolve(config, world_size, **options)
    return str(caught.value)


def _with(factor: str, value: Any, **others: Any) -> dict[str, Any]:
    if factor in ("ring_degree", "ulysses_degree"):
        return {**others, "context_parallel": {factor: value}}
    return {**others, factor: value}


# --- what a config may be


@pytest.mark.parametrize(
    "config",
    [
        {"dp_shard": 2, "tp_size": 2, "context_parallel": {"ring_degree": 2}},
        ParallelismConfig(dp_shard=2, tp_size=2, context_parallel=ContextParallelConfig(ring_degree=2)),
        OmegaConf.create({"dp_shard": 2, "tp_size": 2, "context_parallel": {"ring_degree": 2}}),
        OmegaConf.structured(ParallelismConfig(dp_shard=2, tp_size=2, context_parallel=ContextParallelConfig(ring_degree=2))),
        ParallelismConfig(dp_shard=2, tp_size=2, context_parallel={"ring_degree": 2}),  # type: ignore[arg-type]
    ],
    ids=["mapping", "dataclass", "DictConfig", "typed DictConfig", "mixed"],
)
def test_every_form_of_config_means_the_same(config: Any) -> None:
    assert resolve(config, 8) == Topology(dp_shard=2, ring=2, tp=2)


def test_missing_keys_take_their_defaults() -> None:
    assert resolve({}, 1) == resolve(ParallelismConfig(), 1) == Topology()


@pytest.mark.parametrize(
    ("config", "kind"), [(None, "NoneType"), ("fsdp", "str"), ([1], "list"), (ParallelismConfig, "type"), (3, "int")]
)
def test_what_is_no_config_is_refused(config: Any, kind: str) -> None:
    assert _refusal(config, 1) == f"parallelism must be a mapping or a ParallelismConfig, not {kind}"


def test_the_config_is_never_rewritten() -> None:
    config = ParallelismConfig(dp_shard=-1)
    assert resolve(config, 8) == resolve(config, 8) == Topology(dp_shard=8)
    assert config == ParallelismConfig(dp_shard=-1)


def test_an_interpolation_is_followed() -> None:
    config = OmegaConf.create({"gpus": 4, "parallelism": {"tp_size": "${gpus}"}})
    assert resolve(config.parallelism, 4) == Topology(tp=4)


def test_an_interpolation_that_leads_nowhere_is_refused() -> None:
    text = _refusal(OmegaConf.create({"tp_size": "${gpus}"}), 4)
    assert text.startswith("parallelism cannot be read: Interpolation key 'gpus' not found")


def test_a_degree_that_refers_to_itself_is_refused() -> None:
    assert "Recursive interpolation detected" in _refusal(OmegaConf.create({"dp_shard": "${dp_shard}"}), 2)


def test_an_interpolation_inside_a_nested_node_is_followed_or_refused() -> None:
    nested = OmegaConf.create({"ring_degree": "${nowhere}"})
    assert "nowhere" in _refusal({"context_parallel": nested}, 2)


def test_a_mandatory_value_that_is_missing_is_named() -> None:
    assert "parallelism.dp_shard=???" in _refusal(OmegaConf.create({"dp_shard": "???"}), 2)


# --- what the degrees mean


@pytest.mark.parametrize("world_size", [1, 2, 7, 8])
def test_an_untouched_config_means_ddp_over_all_processes(world_size: int) -> None:
    assert resolve({}, world_size) == Topology(dp_replicate=world_size)
    assert resolve(ParallelismConfig(), world_size).is_replicated_only is (world_size > 1)


def test_any_degree_that_is_set_makes_the_config_touched() -> None:
    assert "= 1, but world_size=8" in _refusal({"ep_size": -1}, 8)


@pytest.mark.parametrize("factor", FACTORS)
def test_minus_one_takes_what_is_left(factor: str) -> None:
    other = "tp_size" if factor != "tp_size" else "dp_shard"
    topology = resolve(_with(factor, -1, **{other: 2}), 12)
    axis = dict(zip(FACTORS, (axis for axis in BASE_AXES if axis != "cfg"), strict=True))
    assert topology == dataclasses.replace(Topology(), **{axis[factor]: 6, axis[other]: 2})


def test_minus_one_may_come_to_one() -> None:
    assert resolve({"dp_shard": -1, "tp_size": 8}, 8) == Topology(tp=8)


def test_cfg_parallel_cannot_be_minus_one() -> None:
    assert _refusal({"cfg_parallel": -1}, 2) == "parallelism is not valid:\n  parallelism.cfg_parallel=-1: must be 1 or 2"


def test_only_one_degree_may_be_minus_one() -> None:
    assert _refusal({"dp_shard": -1, "context_parallel": {"ring_degree": -1}}, 8) == (
        "parallelism is not valid:\n"
        "  parallelism.dp_shard=-1 and parallelism.context_parallel.ring_degree=-1: only one degree may take what is left; "
        "try parallelism.context_parallel.ring_degree=1"
    )


@pytest.mark.parametrize(
    ("config", "sharded", "replicated_only"),
    [
        ({}, False, True),
        ({"dp_replicate": 4}, False, True),
        ({"dp_shard": 4}, True, False),
        ({"dp_replicate": 2, "dp_shard": 2}, True, False),
        ({"context_parallel": {"ring_degree": 4}}, True, False),
        ({"dp_replicate": 2, "context_parallel": {"ulysses_degree": 2}}, True, False),
        ({"tp_size": 4}, False, False),
        ({"dp_replicate": 2, "tp_size": 2}, False, True),
    ],
)
def test_sharded_and_replicated_only_follow_from_the_degrees(
    config: dict[str, Any], sharded: bool, replicated_only: bool
) -> None:
    topology = resolve(config, 4)
    assert (topology.is_sharded, topology.is_replicated_only) == (sharded, replicated_only)


def test_derived_sizes_are_products() -> None:
    config = {
        "pp_size": 2,
        "dp_replicate": 3,
        "dp_shard": 5,
        "context_parallel": {"ring_degree": 7, "ulysses_degree": 11},
        "tp_size": 13,
        "ep_size": 65,
    }
    topology = resolve(config, 2 * 3 * 5 * 7 * 11 * 13)
    assert topology.world_size == 30030
    assert (topology.dp, topology.dp_world_size, topology.cp) == (15, 15, 77)
    assert (topology.fsdp, topology.dp_cp, topology.ep, topology.efsdp) == (385, 1155, 65, 77)
    assert topology.degrees() == {
        "pp": 2, "dp_replicate": 3, "dp_shard": 5, "cfg": 1, "ring": 7, "ulysses": 11, "tp": 13, "ep": 65
    }  # fmt: skip
    assert all(topology.size(axis) == getattr(topology, axis) for axis in AXES)


def test_context_peers_share_a_dp_rank() -> None:
    topology = resolve({"dp_shard": 2, "context_parallel": {"ring_degree": 2, "ulysses_degree": 2}}, 8)
    assert [topology.dp_rank(rank) for rank in range(8)] == [rank // topology.cp for rank in range(8)]


# --- guidance branches


def test_two_guidance_branches_need_inference() -> None:
    expected = (
        "parallelism is not valid:\n"
        "  parallelism.cfg_parallel=2 is for inference only; if nothing is trained: parallelism.inference=true"
    )
    assert _refusal({"cfg_parallel": 2}, 2) == expected
    assert _refusal({"cfg_parallel": 2, "inference": True}, 2, inference=False) == expected
    assert resolve({"cfg_parallel": 2, "inference": True}, 2) == Topology(cfg=2)
    assert resolve({"cfg_parallel": 2}, 2, inference=True) == Topology(cfg=2)


def test_a_text_is_no_yes_to_inference() -> None:
    assert "parallelism.inference" in _refusal({"cfg_parallel": 2, "inference": "false"}, 2)


def test_more_than_two_guidance_branches_do_not_exist() -> None:
    assert _refusal({"cfg_parallel": 3}, 3, inference=True) == (
        "parallelism is not valid:\n  parallelism.cfg_parallel=3: must be 1 or 2 (a conditional and an unconditional branch)"
    )


def test_guidance_branches_never_shard_weights() -> None:
    topology = resolve({"cfg_parallel": 2, "dp_shard": 4}, 8, inference=True)
    assert topology.fsdp == 4
    assert list(topology.groups("fsdp")) == [(0, 2, 4, 6), (1, 3, 5, 7)]


# --- experts


@pytest.mark.parametrize(
    ("ep_size", "efsdp"),
    [(1, 16), (2, 8), (4, 4), (8, 2), (16, 1)],
)
def test_efsdp_is_fsdp_times_tp_over_ep(ep_size: int, efsdp: int) -> None:
    topology = resolve({"dp_shard": 8, "tp_size": 2, "ep_size": ep_size}, 16)
    assert (topology.ep, topology.efsdp) == (ep_size, efsdp)


def test_ep_of_minus_one_is_as_many_as_fit() -> None:
    assert resolve({"dp_replicate": 2, "dp_shard": 4, "tp_size": 2, "ep_size": -1}, 16).ep == 8
    assert resolve({"dp_replicate": 2, "dp_shard": -1, "ep_size": -1}, 16).ep == 8
    assert resolve({"dp_replicate": 8, "ep_size": -1}, 8).ep == 1


def test_sixteen_ranks_with_eight_experts() -> None:
    topology = resolve({"dp_shard": 8, "tp_size": 2, "ep_size": 8}, 16)
    assert list(topology.groups("ep")) == [tuple(range(8)), tuple(range(8, 16))]
    assert list(topology.groups("efsdp")) == [(rank, rank + 8) for rank in range(8)]


def test_expert_groups_stay_inside_one_guidance_branch() -> None:
    topology = resolve({"dp_shard": 2, "cfg_parallel": 2, "tp_size": 2, "ep_size": 4}, 8, inference=True)
    assert list(topology.groups("ep")) == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert {topology.coordinate(rank)["cfg"] for rank in topology.group("ep", 2)} == {1}


def test_ep_must_divide_fsdp_times_tp() -> None:
    assert _refusal({"dp_shard": 4, "context_parallel": {"ring_degree": 2}, "ep_size": 3}, 8) == (
        "expert parallelism does not fit:\n"
        "  parallelism.ep_size=3 must divide dp_shard=4 * ring_degree=2 * ulysses_degree=1 * tp_size=1 = 8 and be a multiple "
        "of tp_size=1 (experts re-use the ranks of fsdp x tp, ep_size is not a factor of the world)\n"
        "  8 % 3 = 2, 3 % 1 = 0\n"
        "  try: parallelism.ep_size=2"
    )


def test_ep_must_be_a_multiple_of_tp() -> None:
    assert _refusal({"dp_shard": 2, "tp_size": 4, "ep_size": 2}, 8) == (
        "expert parallelism does not fit:\n"
        "  parallelism.ep_size=2 must divide dp_shard=2 * ring_degree=1 * ulysses_degree=1 * tp_size=4 = 8 and be a multiple "
        "of tp_size=4 (experts re-use the ranks of fsdp x tp, ep_size is not a factor of the world)\n"
        "  8 % 2 = 0, 2 % 4 = 2\n"
        "  try: parallelism.ep_size=4"
    )


def test_the_expert_alias_means_as_many_as_tp() -> None:
    plain = resolve({"dp_shard": 4, "tp_size": 2}, 8)
    assert resolve({"dp_shard": 4, "tp_size": 2, "enable_expert_parallel": True}, 8) == dataclasses.replace(plain, ep=2)
    assert resolve({"dp_shard": 2, "tp_size": -1, "enable_expert_parallel": True}, 8) == Topology(dp_shard=2, tp=4, ep=4)
    assert resolve({"dp_shard": 4, "tp_size": 2, "enable_expert_parallel": False}, 8).ep == 1


def test_an_explicit_ep_wins_over_the_alias() -> None:
    assert resolve({"dp_shard": 4, "tp_size": 2, "enable_expert_parallel": True, "ep_size": 8}, 8).ep == 8


def test_the_expert_alias_leaves_an_untouched_config_ddp() -> None:
    assert resolve({"enable_expert_parallel": True}, 4) == Topology(dp_replicate=4)


# --- the equation and its messages


def test_degrees_that_do_not_multiply_to_the_world() -> None:
    config = {"dp_replicate": 2, "dp_shard": 2, "tp_size": 3}
    assert _refusal(config, 8, source="WORLD_SIZE=8 (torchrun)") == (
        "parallelism does not fit the world:\n"
        "  pp_size=1 * dp_replicate=2 * dp_shard=2 * cfg_parallel=1 * ring_degree=1 * ulysses_degree=1 * tp_size=3 = 12, "
        "but WORLD_SIZE=8 (torchrun)\n"
        "  try: parallelism.tp_size=2, or start 12 processes"
    )


def test_the_world_is_quoted_as_a_number_when_nobody_says_where_it_comes_from() -> None:
    assert "tp_size=1 = 4, but world_size=8\n" in _refusal({"dp_replicate": 4}, 8)


def test_what_is_left_must_be_whole() -> None:
    assert _refusal({"dp_shard": -1, "tp_size": 4}, 6) == (
        "parallelism does not fit the world:\n"
        "  pp_size=1 * dp_replicate=1 * dp_shard=-1 * cfg_parallel=1 * ring_degree=1 * ulysses_degree=1 * tp_size=4: "
        "dp_shard takes what is left, but the others multiply to 4 and world_size=6: 6 % 4 = 2\n"
        "  try: parallelism.tp_size=3, or start 4 or 8 processes"
    )


def test_what_is_left_must_be_at_least_one() -> None:
    text = _refusal({"dp_replicate": -1, "tp_size": 4}, 2)
    assert "dp_replicate takes what is left, but the others multiply to 4 and world_size=2: 2 % 4 = 2\n" in text
    assert text.endswith("\n  try: parallelism.tp_size=2, or start 4 processes")


def test_one_missing_process_is_singular() -> None:
    assert _refusal({"ep_size": -1}, 8).endswith("or start 1 process")


def test_the_node_is_quoted_by_its_own_path() -> None:
    text = _refusal({"tp_size": 3}, 8, key="model.parallelism")
    assert text.startswith("model.parallelism does not fit the world:")
    assert "try: model.parallelism.tp_size=8, or" in text
    assert "model.parallelism.tp_size=0: must be" in _refusal({"tp_size": 0}, 8, key="model.parallelism")


@pytest.mark.parametrize("value", [0, -2, 2.0, 1.5, True, False, None, [2], {}])
@pytest.mark.parametrize("factor", [*FACTORS, "ep_size"])
def test_a_degree_is_a_whole_number_of_at_least_one(factor: str, value: Any) -> None:
    path = f"context_parallel.{factor}" if factor in ("ring_degree", "ulysses_degree") else factor
    assert _refusal(_with(factor, value), 2) == (
        f"parallelism is not valid:\n  parallelism.{path}={value}: must be a whole number of at least 1, or -1 for what is left"
    )


def test_a_number_in_quotes_is_shown_in_quotes() -> None:
    assert "parallelism.tp_size='2': must be a whole number" in _refusal({"tp_size": "2"}, 2)


@pytest.mark.parametrize("value", [0, -1, -2, True, None, "2", 2.0])
def test_cfg_parallel_is_one_or_two(value: Any) -> None:
    text = _refusal({"cfg_parallel": value}, 2, inference=True)
    assert "parallelism.cfg_parallel=" in text
    assert text.endswith(": must be 1 or 2")


def test_all_field_errors_are_told_at_once() -> None:
    config = {
        "dp_shard": 0,
        "tp_size": -1,
        "pp_size": -1,
        "cfg_parallel": 2,
        "ep_size": None,
        "fsdp_size": 1,
        "context_parallel": {"ring_degree": 1.5, "ulises_degree": 2},
    }
    assert _refusal(config, 8) == (
        "parallelism is not valid:\n"
        "  parallelism.fsdp_size: no such key\n"
        "  parallelism.context_parallel.ulises_degree: no such key\n"
        "  parallelism.dp_shard=0: must be a whole number of at least 1, or -1 for what is left\n"
        "  parallelism.context_parallel.ring_degree=1.5: must be a whole number of at least 1, or -1 for what is left\n"
        "  parallelism.ep_size=None: must be a whole number of at least 1, or -1 for what is left\n"
        "  parallelism.cfg_parallel=2 is for inference only; if nothing is trained: parallelism.inference=true\n"
        "  parallelism.pp_size=-1 and parallelism.tp_size=-1: only one degree may take what is left; try parallelism.tp_size=1"
    )


def test_a_nested_key_at_the_top_is_no_key() -> None:
    assert _refusal({"ring_degree": 2}, 2) == "parallelism is not valid:\n  parallelism.ring_degree: no such key"


@pytest.mark.parametrize("value", [None, 2, "ring", [1, 2]])
def test_context_parallel_is_a_mapping(value: Any) -> None:
    expected = f"parallelism is not valid:\n  parallelism.context_parallel={value!r}: must be a mapping"
    assert _refusal({"context_parallel": value}, 2) == expected


def test_a_whole_config_in_place_of_its_node_is_recognized() -> None:
    assert _refusal({"lr": 0.1, "parallelism": {"dp_shard": 2}}, 2) == (
        "parallelism is not valid:\n"
        "  parallelism.lr: no such key\n"
        "  parallelism.parallelism: no such key\n"
        "  this looks like a whole config: pass its parallelism node"
    )


@pytest.mark.parametrize("world_size", [0, -1, True, 2.0, "2", None])
def test_the_world_size_is_a_whole_number_of_at_least_one(world_size: Any) -> None:
    assert _refusal({}, world_size) == f"the world size must be a whole number of at least 1, not {world_size!r}"


def test_a_config_may_say_which_world_it_is_for() -> None:
    assert resolve({"world_size": 8, "dp_shard": -1}, 8) == Topology(dp_shard=8)
    assert resolve({"world_size": None, "dp_shard": -1}, 8) == Topology(dp_shard=8)
    assert _refusal({"world_size": 4, "dp_shard": -1}, 8, source="WORLD_SIZE=8 (torchrun)") == (
        "parallelism.world_size=4, but WORLD_SIZE=8 (torchrun)\n  try: start 4 process(es), or parallelism.world_size=8"
    )
    assert "parallelism.world_size=4, but the world size is 8\n" in _refusal({"world_size": 4}, 8)


@pytest.mark.parametrize("value", [0, -1, True, "1", 1.0])
def test_the_world_that_a_config_is_for_is_a_whole_number_of_at_least_one(value: Any) -> None:
    text = _refusal({"world_size": value}, 1)
    assert text.startswith("parallelism is not valid:\n  parallelism.world_size=")
    assert "at least 1" in text


def test_resolving_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resolve({"tp_size": 2, "enable_expert_parallel": True}, 2)


def test_all_axes_at_once_are_refused_where_they_do_not_fit() -> None:
    all_two = {"pp_size": 2, "dp_replicate": 2, "dp_shard": 2, "cfg_parallel": 2, "inference": True, "tp_size": 2, "ep_size": 2}
    with pytest.raises(ConfigurationError) as caught:
        resolve({**all_two, "context_parallel": {"ring_degree": 2, "ulysses_degree": 2}}, 8)
    assert (
        "pp_size=2 * dp_replicate=2 * dp_shard=2 * cfg_parallel=2 * ring_degree=2 * ulysses_degree=2 * tp_size=2 = 128, but "
        in str(caught.value)
    )


def test_experts_beside_replicas_are_told_to_share() -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve({"dp_replicate": 4, "ep_size": 2}, 4)
    assert str(caught.value).endswith("  try: parallelism.ep_size=1, or parallelism.dp_shard=2 parallelism.dp_replicate=2")
