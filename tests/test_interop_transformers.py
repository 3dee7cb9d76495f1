"""Transformers' ``DistributedConfig``, the installed class: both directions, refusals, and its engine under our layouts."""

import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra import compose, initialize
from omegaconf import OmegaConf

import worlds
from apps.foreign import NATIVE
from hydra_parallelism import ConfigurationError, ParallelismConfig, Topology, resolve
from hydra_parallelism.interop import from_transformers, to_transformers
from hydra_parallelism.interop.transformers import TARGET
from interop_rows import changes
from processes import ROOT

SEEDS = {
    "tp_size", "tp_plan", "enable_sequence_parallel", "enable_expert_parallel", "fsdp_size", "fsdp_cpu_offload",
    "fsdp_mixed_precision", "pp_size", "ep_size", "ep_plan",
}  # fmt: skip
DISPATCH = {"layers.*.mlp.experts": "ep_dispatch_experts"}


def theirs(**fields: Any) -> Any:
    from transformers.distributed import DistributedConfig

    return DistributedConfig(**fields)


def config(**values: Any) -> ParallelismConfig:
    made: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ParallelismConfig), values))
    return made


def refusal(convert: Any, *args: Any, **more: Any) -> str:
    with pytest.raises(ConfigurationError) as error:
        convert(*args, **more)
    return str(error.value)


def test_the_rows_are_the_fields_of_this_release() -> None:
    names = [field.name for field in dataclasses.fields(theirs())]
    rows = list(dict.fromkeys(row.theirs for row in TARGET.fields))
    assert rows == names
    assert set(rows) > SEEDS
    assert set(rows) - SEEDS == {"dp_replicate_size", "fsdp_plan", "ep_implementation"}


def test_only_the_names_of_the_seeds_are_used_unless_a_newer_one_is_needed() -> None:
    assert set(to_transformers({"dp_shard": 4, "tp_size": 2, "tp_plan": "auto", "ep_size": 8, "ep_plan": "auto"})) < SEEDS


ROUND = [
    config(dp_shard=4),
    config(dp_replicate=2, dp_shard=4, fsdp={"cpu_offload": True, "mixed_precision": "bf16"}),
    config(dp_shard=2, tp_size=2, tp_plan="auto"),
    config(tp_size=4, tp_plan={"model.layers.*.self_attn.q_proj": "colwise", "lm_head": "replicate"}),
    config(dp_shard=4, tp_size=2, tp_plan="auto", ep_size=8, ep_plan="auto"),
    config(dp_shard=4, ep_size=2, ep_plan={"model.layers.*.mlp.experts": "ep_dispatch_experts"}),
    config(tp_size=2, tp_plan="auto", ep_size=2, ep_plan={"layers.*.mlp.experts": "moe_tp_experts"}),
    config(dp_shard=2, fsdp={"wrap": ["model.layers.*", "lm_head"], "reshard_after_forward": False}),
    config(pp_size=2, tp_size=2, tp_plan="auto", inference=True),
    config(world_size=1),
]


@pytest.mark.parametrize("ours", ROUND, ids=range(len(ROUND)))
def test_round_trip_through_their_class_and_their_json(ours: ParallelismConfig, tmp_path: Path) -> None:
    made = theirs(**to_transformers(ours))
    assert from_transformers(made) == ours
    path = tmp_path / "distributed_config.json"
    made.to_json_file(path)
    assert from_transformers(path) == from_transformers(str(path)) == ours
    assert from_transformers(made.to_dict()) == from_transformers(json.loads(made.to_json_string())) == ours
    assert type(made).from_dict(json.loads(path.read_text())) == made
    assert theirs(**to_transformers(from_transformers(path))) == made


def test_sizes_and_refusals_are_the_same_over_a_grid() -> None:
    """Where their class takes sizes, ours come to the same ones; where it refuses, so do we, here or on the way there."""
    taken = refused = 0
    for tp, fsdp, replicas, pp, ep in itertools.product((1, 2), (1, 2, 4), (1, 2), (1, 2), (1, 2, 3, 4, 8)):
        sizes = {"tp_size": tp, "fsdp_size": fsdp, "dp_replicate_size": replicas, "pp_size": pp, "ep_size": ep}
        world = tp * fsdp * replicas * pp
        try:
            made = theirs(**sizes)
        except ValueError:
            refused += 1
            with pytest.raises(ConfigurationError):
                to_transformers(from_transformers(sizes), world_size=world)
            continue
        taken += 1
        found = resolve(from_transformers(made), world)
        assert (found.tp, found.dp_shard, found.dp_replicate, found.pp, found.ep) == (tp, fsdp, replicas, pp, ep)
        assert (found.efsdp, found.dp_world_size) == (made.efsdp_size, made.dp_size)
    assert (taken, refused) == (33, 87)


def test_sixteen_ranks_and_eight_experts_are_grouped_as_they_say() -> None:
    layout = resolve(from_transformers(theirs(fsdp_size=8, tp_size=2, ep_size=8)), 16)
    assert list(layout.groups("ep")) == [tuple(range(8)), tuple(range(8, 16))]
    assert list(layout.groups("efsdp")) == [(rank, rank + 8) for rank in range(8)]


def test_a_tensor_plan_without_a_size_takes_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    fields = {"tp_plan": "auto", "fsdp_size": 2}
    ours = from_transformers(fields)
    assert ours.tp_size == -1
    assert resolve(ours, 8).tp == theirs(**fields).tp_size == 4
    with pytest.raises(ConfigurationError, match="9 % 2 = 1"):
        resolve(ours, 9)


def test_all_sizes_one_is_one_process() -> None:
    assert from_transformers(theirs()) == from_transformers({}) == config(world_size=1)
    assert to_transformers({}, world_size=4) == {
        "tp_size": 1, "fsdp_size": 1, "dp_replicate_size": 4, "pp_size": 1, "ep_size": 1,
    }  # fmt: skip


def test_the_deprecated_alias_means_the_size_of_the_tensor_axis() -> None:
    assert from_transformers({"tp_size": 2, "tp_plan": "auto", "enable_expert_parallel": True}).ep_size == 2
    explicit = {"tp_size": 2, "tp_plan": "auto", "fsdp_size": 2, "ep_size": 4, "enable_expert_parallel": True}
    assert from_transformers(explicit).ep_size == 4
    ours = {"tp_size": 2, "tp_plan": "auto", "ep_plan": "auto", "enable_expert_parallel": True}
    assert to_transformers(ours)["ep_size"] == 2
    with pytest.warns(FutureWarning, match="without `ep_size` is deprecated"):
        alone = theirs(tp_size=2, enable_expert_parallel=True)
    assert refusal(from_transformers, alone) == (
        "transformers DistributedConfig cannot be taken over:\n"
        "  tp_plan={} at tp_size=2, which enable_expert_parallel means too: ranks that compute the same\n"
        "    try: tp_plan='auto', or fsdp_size=2 in place of tp_size"
    )


def test_a_topology_and_a_composed_config_can_be_told() -> None:
    assert to_transformers(Topology(dp_shard=2, tp=2, ep=4)) == {
        "tp_size": 2, "tp_plan": "auto", "fsdp_size": 2, "pp_size": 1, "ep_size": 4,
    }  # fmt: skip
    version: dict[str, Any] = {"version_base": None} if hydra.__version__.startswith("1.3") else {}
    with initialize(config_path=None, **version):
        composed = compose(overrides=["+parallelism=fsdp_tp", "parallelism.fsdp.mixed_precision=bf16"])
    assert to_transformers(composed.parallelism, world_size=8) == {
        "tp_size": 2, "tp_plan": "auto", "fsdp_size": 4, "fsdp_mixed_precision": True, "pp_size": 1, "ep_size": 1,
    }  # fmt: skip
    assert refusal(to_transformers, composed.parallelism) == (
        "parallelism.dp_shard=-1: how many processes there are is not said\n  try: parallelism.world_size=8, or world_size=8"
    )
    assert refusal(to_transformers, composed).endswith("this looks like a whole config: pass its parallelism node")
    assert refusal(to_transformers, {}) == (
        "parallelism has no degree, which means replicas over all processes: how many processes there are is not said\n"
        "  try: parallelism.world_size=8, or world_size=8"
    )


TENSOR = {"tp_size": 2, "tp_plan": "auto"}
BOTH = {"a": "ep_dispatch_experts", "b": "moe_tp_experts"}
CANNOT: list[tuple[dict[str, Any], str, str]] = [
    ({"cfg_parallel": 2, "inference": True}, "cfg_parallel=2: Transformers has no axis for guidance", "cfg_parallel=1"),
    (
        {"context_parallel": {"ring_degree": 2}},
        "context_parallel.ring_degree=2: Transformers has no context parallelism there",
        "context_parallel.ring_degree=1",
    ),
    (
        {**TENSOR, "enable_sequence_parallel": True},
        "enable_sequence_parallel=true: Transformers has the field and does nothing with it",
        "enable_sequence_parallel=false",
    ),
    (
        {"dp_shard": 2, "activation_checkpointing": 2},
        "activation_checkpointing=2: that is a method of the model there, gradient_checkpointing_enable()",
        "activation_checkpointing=none",
    ),
    (
        {"dp_shard": 2, "fsdp": {"mixed_precision": "fp16"}},
        "fsdp.mixed_precision=fp16: theirs is a switch, and means bf16",
        "fsdp.mixed_precision=bf16",
    ),
    (
        {**TENSOR, "fsdp": {"mixed_precision": "bf16"}},
        "fsdp.mixed_precision=bf16: they apply it at dp_replicate * dp_shard > 1 only",
        "fsdp.mixed_precision=null, and from_pretrained(dtype=...)",
    ),
    (
        {"dp_shard": 2, "fsdp": {"wrap": ["Block"]}},
        "fsdp.wrap=['Block']: they know names of modules, and no classes such as Block",
        "fsdp.wrap=[model.layers.*]",
    ),
    (
        {"dp_shard": 2, "fsdp": {"reshard_after_forward": False}},
        "fsdp.reshard_after_forward=false: they say it of module names",
        "fsdp.wrap=[model.layers.*] beside it",
    ),
    (
        {"pp_size": 2, "inference": True, "pipeline": {"microbatches": 4}},
        "pipeline.microbatches=4: their pipeline has no schedule and divides by number of layers",
        "pipeline.microbatches=null",
    ),
    ({"pp_size": 2}, "pp_size=2: their pipeline computes forward only", "inference=true, or parallelism.pp_size=1"),
    (
        {"pp_size": 2, "dp_shard": 2, "inference": True},
        "pp_size=2 beside dp_replicate=1 * dp_shard=2, ep_size=1: Transformers has a pipeline beside tp alone",
        "pp_size=1",
    ),
    ({"tp_size": 2}, "tp_plan=null at tp_size=2", "tp_plan=auto"),
    ({"dp_shard": 2, "ep_size": 2}, "ep_plan=null at ep_size=2", "ep_plan=auto"),
    (
        {"dp_shard": 2, "ep_size": 2, "ep_plan": BOTH},
        "ep_plan has ep_dispatch_experts and moe_tp_experts: they have one of them for all",
        "ep_plan=auto",
    ),
]


@pytest.mark.parametrize(("ours", "what", "instead"), CANNOT)
def test_what_transformers_cannot_express_is_refused_by_name(ours: dict[str, Any], what: str, instead: str) -> None:
    head = "transformers DistributedConfig cannot express this layout:"
    assert refusal(to_transformers, ours) == f"{head}\n  parallelism.{what}\n    try: parallelism.{instead}"


def test_policies_that_do_nothing_at_these_degrees_are_nothing_to_refuse() -> None:
    idle = {"enable_sequence_parallel": True, "context_parallel": {"load_balance": False}, "pipeline": {"microbatches": 4}}
    ours = {"dp_shard": 2, **idle}
    assert to_transformers(ours) == {"tp_size": 1, "fsdp_size": 2, "pp_size": 1, "ep_size": 1}
    assert to_transformers({"tp_size": 2, "tp_plan": "auto", "fsdp": {"wrap": ["Block"], "reshard_after_forward": False}})


WHOLE = "must be a whole number of at least 1"
MIXED = {"a": "free_full_weight", "b": "keep_full_weight"}
NOT_OURS: list[tuple[dict[str, Any], str]] = [
    ({"tp_sise": 2, "fsdp_size": 2}, "tp_sise: DistributedConfig has no such field; did you mean tp_size?"),
    ({"fsdp_size": -1, "pp_size": 0}, f"fsdp_size=-1: {WHOLE}\n  pp_size=0: {WHOLE}"),
    ({"fsdp_cpu_offload": "yes"}, "fsdp_cpu_offload='yes': must be true or false"),
    (
        {"fsdp_plan": MIXED},
        f"fsdp_plan={MIXED}: ours frees all units after forward or none\n"
        "    try: 'free_full_weight' for each pattern, or 'keep_full_weight' for each",
    ),
    ({"ep_plan": "auto"}, "ep_plan='auto': must be a mapping of name patterns to styles"),
    (
        {"ep_implementation": "deepgemm_megamoe"},
        "ep_implementation='deepgemm_megamoe': ours are all_to_all and all_reduce\n    try: ep_implementation='auto'",
    ),
    (
        {"fsdp_size": 2, "ep_size": 2, "ep_implementation": "all_reduce"},
        "ep_implementation='all_reduce': ours is a style of modules, so name them\n"
        "    try: ep_plan={'layers.*.mlp.experts': 'ep_dispatch_experts'} beside it",
    ),
]


@pytest.mark.parametrize(("fields", "message"), NOT_OURS)
def test_what_we_have_nothing_for_is_refused_by_name(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    expected = f"transformers DistributedConfig cannot be taken over:\n  {message}"
    assert refusal(from_transformers, fields) == expected
    (tmp_path / "theirs.json").write_text(json.dumps(fields))
    assert refusal(from_transformers, tmp_path / "theirs.json") == expected


def test_routers_need_no_rule_there() -> None:
    ours = config(tp_size=2, tp_plan="auto", ep_size=2, ep_plan={"experts": "moe_tp_experts", "router": "ep_router"})
    found = to_transformers(ours)
    assert (found["ep_plan"], found["ep_implementation"]) == ({"experts": "ep_dispatch_experts"}, "all_reduce")
    assert set(changes(ours, from_transformers(found))) == {"ep_plan"}
    assert from_transformers({"fsdp_size": 2, "ep_size": 2, "ep_plan": DISPATCH, "ep_implementation": "all_to_all"}) == config(
        dp_shard=2, ep_size=2, ep_plan=DISPATCH
    )


CASES = [(size, index) for size in NATIVE for index in range(len(NATIVE[size]))]


@pytest.mark.processes
@pytest.mark.engines
@pytest.mark.timeout(worlds.DEADLINE)
@pytest.mark.xdist_group("worlds")
@pytest.mark.parametrize(
    ("size", "index"), CASES, ids=["-".join([NATIVE[s][i][0], *map(str, NATIVE[s][i][1])]) for s, i in CASES]
)
def test_their_engine_has_the_losses_of_one_process_under_our_layout(size: int, index: int) -> None:
    for report in worlds.reports(size):
        result = report["native"][index]
        wanted = result["wanted"][: len(result["found"])]
        assert result["found"] == pytest.approx(wanted, abs=1e-5)
        assert wanted[0] == pytest.approx(4.16, abs=0.05)  # about log(64): the first guess is uniform
        assert result["groups"], "their meshes hold other ranks than ours"


def test_the_example_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    page = (ROOT / "docs/interop.md").read_text()
    code = re.search(r"## Transformers\n\n```python\n(.*?)```", page, re.S)
    assert code is not None
    monkeypatch.chdir(tmp_path)
    tiny = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(tiny).save_pretrained("saved")
    theirs(fsdp_size=4).to_json_file("distributed_config.json")
    names: dict[str, Any] = {"config": OmegaConf.create({"parallelism": {}}), "folder": "saved"}
    exec(f"import hydra_parallelism\n{code[1]}", names)
    assert names["config"] == config(dp_shard=4)
    assert type(names["model"]) is LlamaForCausalLM


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        ({"tp_plan": 3}, "tp_plan=3: must be a mapping of name patterns to styles"),
        ({"tp_plan": {"a": 1}, "tp_size": 2}, "tp_plan={'a': 1}: must be a mapping"),
        ({"fsdp_size": 2, "fsdp_plan": {3: "free_full_weight"}}, "fsdp_plan={3: 'free_full_weight'}: must be a mapping"),
        ({"fsdp_plan": {"a": [1]}}, "fsdp_plan={'a': [1]}: must be a mapping"),
        ({"ep_plan": {"a": [1]}, "ep_size": 2}, "ep_plan={'a': [1]}: must be a mapping"),
    ],
)
def test_plans_that_are_none(theirs: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        from_transformers(theirs)
    assert told in str(error.value)


def test_a_key_that_comes_twice_in_json(tmp_path: Path) -> None:
    (tmp_path / "twice.json").write_text('{"tp_size": 2, "tp_size": 4}')
    with pytest.raises(ConfigurationError, match="a key comes twice in tp_size, tp_size"):
        from_transformers(tmp_path / "twice.json")
