"""What ``parallelize`` finds in a model, and what it refuses, before anything is sent. No processes are started here."""

import importlib
import sys
from typing import Any

import pytest
import torch
from torch import nn

import hydra_parallelism
from hydra_parallelism import ConfigurationError, ParallelismConfig, parallel_context, resolve
from hydra_parallelism.options import read_config
from hydra_parallelism.parallelize import blocks, order, plans, styles, weights
from hydra_parallelism.parallelize.recipe import Recipe

sys.path.insert(0, str(importlib.import_module("processes").APPS))

import models


def judge(model: nn.Module, world: int = 1, **config: Any) -> Recipe:
    """The recipe of a config on a number of processes."""
    return order.judge(model, read_config(config, "parallelism"), resolve(config, world))


def refusal(model: nn.Module, world: int = 1, **config: Any) -> str:
    """The text with which a config is refused."""
    with pytest.raises(ConfigurationError) as caught:
        judge(model, world, **config)
    return str(caught.value)


class Layer(nn.Module):
    """A block of its own make; ``heads`` and ``norm`` are there to be missed by a plan."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.up, self.inner_norm, self.down = nn.Linear(dim, 2 * dim), nn.LayerNorm(2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.inner_norm(self.up(x)))


class Net(nn.Module):
    """Layers somewhere below, in a list beside a larger number of small members."""

    def __init__(self, container: type[nn.Module] = nn.ModuleList, count: int = 3) -> None:
        super().__init__()
        layers = [Layer() for _ in range(count)]
        self.heads = nn.ModuleList(nn.Linear(2, 2) for _ in range(9))
        self.body = nn.Module()
        if container is nn.ModuleDict:
            self.body.stack = nn.ModuleDict({f"at{i}": layer for i, layer in enumerate(layers)})
        elif container is nn.Sequential:
            self.body.stack = nn.Sequential(*layers)
        else:
            self.body.stack = nn.ModuleList(layers)


FLAT = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


# Finding blocks and names


@pytest.mark.parametrize("container", [nn.ModuleList, nn.ModuleDict, nn.Sequential])
def test_the_repeated_block_list_is_found(container: type[nn.Module]) -> None:
    found = [name for name, _ in blocks.find_blocks(Net(container))]
    assert found == [f"body.stack.{'at' if container is nn.ModuleDict else ''}{i}" for i in range(3)]


def test_a_list_of_one_is_found_unless_it_wraps_a_longer_one() -> None:
    assert [name for name, _ in blocks.find_blocks(Net(count=1))] == ["body.stack.0"]
    wrapped = nn.ModuleList([Net()])
    assert blocks.find_block_list(wrapped) == "0.body.stack"


def test_a_bare_list_of_blocks_is_its_own_and_leaves_make_none() -> None:
    assert [name for name, _ in blocks.find_blocks(nn.Sequential(Layer(), Layer()))] == ["0", "1"]
    assert blocks.find_block_list(FLAT) is None
    assert blocks.find_blocks(nn.Linear(2, 2)) == []


@pytest.mark.parametrize(
    ("pattern", "name", "verdict"),
    [
        ("layers.*.q", "layers.11.q", True),
        ("layers.*", "layers.1.q", False),
        ("*.q", "layers.1.q", False),
        ("layers.[01].[qk]", "layers.1.k", True),
        ("layers.[01].[qk]", "layers.2.k", False),
        ("head", "head", True),
        ("head", "heads", False),
    ],
)
def test_a_star_is_one_part(pattern: str, name: str, verdict: bool) -> None:
    assert blocks.matches(pattern, name) is verdict


# FSDP units


def test_units_are_the_blocks_or_what_is_named_inner_ones_first() -> None:
    model = models.make("gpt")
    assert judge(model, 2, dp_shard=2).units == ("layers.0", "layers.1")
    named = judge(model, 2, dp_shard=2, fsdp={"wrap": ["Block", "layers.*.mlp"]}).units
    assert named == ("layers.0.mlp", "layers.1.mlp", "layers.0", "layers.1")


def test_a_name_that_matches_nothing_is_refused() -> None:
    text = refusal(models.make("gpt"), 2, dp_shard=2, fsdp={"wrap": ["Blok"]})
    assert text == (
        "parallelism.fsdp.wrap: 'Blok' is no module class and no module name pattern of GPT\n"
        "  try: parallelism.fsdp.wrap=auto, or one of Block"
    )
    assert "one of layers.*.attention" in refusal(models.make("gpt"), fsdp={"wrap": ["layer.*.attention"]})


@pytest.mark.parametrize("wrap", ["auto", [], ["Sequential"]])
def test_wrapping_the_root_alone_is_refused_when_sharded(wrap: Any) -> None:
    text = refusal(FLAT, 4, dp_shard=2, dp_replicate=2, fsdp={"wrap": wrap})
    assert "would shard Sequential as one unit over 2 ranks" in text
    assert "one unit gathers all parameters at once, so nothing of the memory is saved" in text
    assert text.endswith("or parallelism.dp_shard=1 parallelism.dp_replicate=4")
    assert judge(FLAT, 4, fsdp={"wrap": wrap}).units == ()


def test_a_parameter_in_two_units_is_refused() -> None:
    text = refusal(models.make("llama"), 2, dp_shard=2, fsdp={"wrap": ["LlamaBlock", "Embedding"]})
    assert "puts one parameter into two FSDP units: embed.weight (in embed) is also head.weight (in the root)" in text
    assert judge(models.make("llama"), 2, dp_shard=2).units == ("layers.0", "layers.1")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"fsdp": {"wrap": "Block"}}, "parallelism.fsdp.wrap='Block': must be auto, or a list"),
        ({"fsdp": {"wrap": [1]}}, "parallelism.fsdp.wrap=[1]: must be auto, or a list"),
        ({"tp_plan": "own"}, "parallelism.tp_plan='own': must be null, auto, or a mapping"),
        ({"ep_plan": 3}, "parallelism.ep_plan=3: must be null, auto, or a mapping"),
        ({"fsdp": {"mixed_precision": "bf8"}}, "parallelism.fsdp.mixed_precision: Invalid value 'bf8'"),
    ],
)
def test_policies_are_judged_at_job_start(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError) as caught, parallel_context(config):
        pass
    assert said in str(caught.value)


# Checkpointing


@pytest.mark.parametrize(
    ("policy", "chosen"),
    [("none", ()), ("full", ("body.stack.0", "body.stack.1", "body.stack.2")), (2, ("body.stack.0", "body.stack.2"))],
)
def test_every_nth_block_is_recomputed(policy: Any, chosen: tuple[str, ...]) -> None:
    assert judge(Net(), activation_checkpointing=policy).recomputed == chosen


@pytest.mark.parametrize("value", ["some", 0, -1, True, None, 1.5])
def test_other_policies_of_checkpointing_are_refused_by_resolve(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"activation_checkpointing=.*must be none, full, or a whole number n"):
        resolve({"activation_checkpointing": value}, 1)


def test_checkpointing_without_blocks_is_refused() -> None:
    assert "Sequential has no list of repeated blocks" in refusal(FLAT, activation_checkpointing="full")


# Tensor plans


class Family(nn.Module):
    """As Transformers builds them: a base model below, the plan in its config and at the head."""

    base_model_prefix = "model"

    def __init__(self, **plans_: Any) -> None:
        super().__init__()
        self.model = Net()
        self.lm_head = nn.Linear(8, 8)
        self.config = type("Config", (), {"base_model_tp_plan": {"body.stack.*.up": "colwise", "absent": "rowwise"}})()
        for name, plan in plans_.items():
            setattr(self, name, plan)


def test_the_models_own_plan_is_found_where_transformers_keeps_it() -> None:
    assert plans.own_plan(Family()) == {"model.body.stack.*.up": "colwise", "model.absent": "rowwise"}
    assert plans.own_plan(Family(_tp_plan={"lm_head": "colwise_rep"})) == {"lm_head": "colwise_rep"}
    assert plans.own_plan(Family(_tp_plan={"a": "b"}, tp_plan={"c": "d"})) == {"c": "d"}
    assert plans.own_plan(Net()) == {}


def test_the_users_rules_go_over_the_models_module_by_module() -> None:
    config = ParallelismConfig(tp_plan={"body.stack.1.up": "replicate", "lm_head": "colwise_rep"})
    assert plans.resolve(Family(), config, "parallelism") == {
        "model.body.stack.0.up": "colwise",
        "model.body.stack.1.up": "replicate",
        "model.body.stack.2.up": "colwise",
        "lm_head": "colwise_gather_output",
    }


def test_a_shared_weight_is_split_in_all_its_modules() -> None:
    model = models.Llama(60, 16, 1, 4, 2, 8)
    model.tp_plan = {"head": "colwise_rep"}
    rules = judge(model, 2, tp_size=2, tp_plan="auto").rules
    assert rules == {"head": "colwise_gather_output", "embed": "embedding_rowwise"}
    text = refusal(model, 2, tp_size=2, tp_plan={"embed": "embedding_colwise"})
    assert "splits one shared parameter in different ways: embed: embedding_colwise, head: colwise_gather_output" in text


GPT_TP = {"tp_size": 2, "tp_plan": "auto"}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"tp_plan": None},
            "parallelism.tp_size=2, but parallelism.tp_plan=null: 2 ranks would compute the whole model each, "
            "2 times the same\n"
            "  try: parallelism.tp_plan=auto",
        ),
        (
            {"tp_plan": {"layers.*.attention.q_pro": "colwise"}},
            "parallelism.tp_plan: no module is called 'layers.*.attention.q_pro'\n  try: layers.*.attention.q_proj",
        ),
        ({"tp_plan": {"head": "colwize"}}, "parallelism.tp_plan: no style 'colwize' for 'head'\n  try: one of colwise,"),
        ({"tp_plan": {"head": "gather"}}, "style 'gather' of 'head' is not applied by this release"),
        ({"tp_plan": {"head": "ep_router"}}, "style 'ep_router' of 'head' is for experts, which parallelism.ep_plan speaks of"),
        (
            {"tp_plan": {"norm": "colwise"}},
            "parallelism.tp_plan: style colwise is for Linear, but norm is LayerNorm\n"
            "  try: one of replicate, replicated_with_grad_allreduce, sequence_parallel",
        ),
        ({"tp_plan": {"norm": "sequence_parallel"}}, "but parallelism.enable_sequence_parallel=false"),
    ],
)
def test_refusals_of_a_plan(config: dict[str, Any], said: str) -> None:
    assert said in refusal(models.make("gpt"), 2, **{**GPT_TP, **config})


def test_a_model_without_a_plan_refuses_auto() -> None:
    assert "parallelism.tp_plan=auto, but Net has no plan of its own" in refusal(Net(), 2, tp_size=2, tp_plan="auto")


def test_a_dim_that_does_not_divide_is_refused_with_the_numbers() -> None:
    assert refusal(models.make("gpt"), 8, tp_size=8, tp_plan="auto") == (
        "parallelism.tp_size=8 does not divide token_embedding (embedding_rowwise): its weight (60, 48) has 60 along dim 0, "
        "60 % 8 = 4\n  try: parallelism.tp_size=6, or another size of the model"
    )
    text = refusal(Net(), 3, tp_size=3, tp_plan={"body.stack.*.up": "packed_colwise"})
    assert "body.stack.0.up (packed_colwise): its weight (16, 8) has 16 along dim 0 in 2 equal pieces of 8, 8 % 3 = 2" in text


def test_heads_that_do_not_divide_are_refused() -> None:
    model = models.Llama(60, 48, 1, 12, 3, 60)
    model.tp_plan = {"layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.[kv]_proj": "replicate"}
    silent = {"layers.*.self_attn.[qk]_norm": "replicate", "layers.*.self_attn.o_proj": "rowwise"}
    assert refusal(model, 2, tp_size=2, tp_plan=silent) == (
        "parallelism.tp_size=2 does not divide the heads of layers.0.self_attn: num_key_value_heads=3, 3 % 2 = 1\n"
        "  try: parallelism.tp_size=1, or another number of heads"
    )
    assert "the heads of layers.0.attention: heads=2, 2 % 4 = 2" in refusal(
        models.GPT(64, dim=16, num_layers=1, heads=2, hidden=16, seq_len=4), 4, tp_size=4, tp_plan="auto"
    )


def test_a_module_between_split_ones_must_be_in_the_plan() -> None:
    plan = {"body.stack.*.up": "colwise", "body.stack.*.down": "rowwise"}
    text = refusal(Net(), 2, tp_size=2, tp_plan=plan)
    assert "body.stack.0.inner_norm has parameters and is not in the plan, while body.stack.0.up, " in text
    assert "{body.stack.*.inner_norm: replicated_with_grad_allreduce} if it sees its rank's heads or features only" in text
    judge(Net(), 2, tp_size=2, tp_plan={**plan, "body.stack.*.inner_norm": "replicate"})
    model = models.GPT(64, dim=16, num_layers=1, heads=2, hidden=16, seq_len=4)
    model.tp_plan = {}
    text = refusal(model, 2, tp_size=2, tp_plan={"layers.*.attention.q_proj": "colwise"})
    assert (
        "layers.0.attention.k_proj has parameters and is not in the plan, while layers.0.attention.q_proj beside it is" in text
    )
    assert text.endswith("try: {layers.*.attention.k_proj: colwise} if it makes slices, "
                         "{layers.*.attention.k_proj: rowwise} if it takes them")  # fmt: skip


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"layers.*.mlp.up": "replicate"}, "layers.0.mlp.down is rowwise, but it takes a slice, and no module of layers.0.mlp"),
        ({"layers.*.mlp.down": "rowwise_rep"}, "layers.0.mlp.up is colwise, but no module of layers.0.mlp takes slices"),
        (
            {"layers.*.attention.k_proj": "replicate"},
            "k_proj is replicate, but it returns all features, while layers.0.attention.",
        ),
        ({"layers.*.attention.v_proj": "colwise_rep"}, "v_proj is colwise_gather_output, but it returns all features, while"),
        ({"head": "colwise"}, "head is colwise, but the output of the model would be a slice"),
    ],
)
def test_slices_that_meet_whole_activations_are_refused(rules: dict[str, str], said: str) -> None:
    text = refusal(models.make("gpt"), 2, tp_size=2, tp_plan=rules)
    assert said in text
    assert "\n  try: {" in text
    assert text.endswith("or parallelism.tp_plan=auto")


# Sequence parallelism


def test_refusals_of_sequence_parallelism() -> None:
    switch = {"enable_sequence_parallel": True}
    assert "parallelism.tp_plan=null: there is no zone" in refusal(models.make("gpt"), 1, **switch)
    text = refusal(FLAT, 2, tp_size=2, tp_plan={"0": "colwise", "2": "rowwise"}, **switch)
    assert "Sequential has no list of repeated blocks to shard the sequence in" in text
    model = Net()
    for block in model.body.stack:
        block.num_heads = 2
    plan = {"body.stack.*.up": "colwise", "body.stack.*.down": "rowwise", "body.stack.*.inner_norm": "replicate"}
    assert "body.stack.0 (Layer) splits heads in its own forward" in refusal(model, 2, tp_size=2, tp_plan=plan, **switch)


# Axes, weights, names


class Secret(nn.Module):
    """Nobody but its author knows how to fill it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2))
        self.register_buffer("angles", torch.empty(2), persistent=False)


def test_a_meta_model_that_nobody_can_fill_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), Secret())
    with pytest.raises(ConfigurationError) as caught, parallel_context({}):
        hydra_parallelism.parallelize(model)
    assert str(caught.value) == (
        "parallelism: 1 (Secret) is on the meta device with weight, angles, and has no reset_parameters()\n"
        "  try: parallelize(model, init_weights=...), a function that fills one module as model.apply wants it, "
        "or parallelize(model, state_dict=...)"
    )
    with pytest.raises(ConfigurationError, match=r"with angles, and is not in a state dict"):
        weights.judge(model, None, {}, "parallelism")
    weights.judge(model, lambda module: None, None, "parallelism")


def test_every_style_of_the_table_is_built() -> None:
    assert all(styles.build(name) for name in styles.STYLES)
    assert set(styles.STYLES) <= set((styles.__doc__ or "").replace("``", " ").split())


def test_the_function_and_the_package_of_its_name_do_the_same() -> None:
    package = importlib.import_module("hydra_parallelism.parallelize")
    with parallel_context({}) as context:
        for call in (package, package.parallelize, hydra_parallelism.parallelize):
            model = nn.Linear(2, 2)
            assert call(model, context) is model


def test_a_context_knows_what_it_was_made_with() -> None:
    with parallel_context({"fsdp": {"wrap": ["Block"]}, "dp_shard": -1}, key="train.parallelism") as context:
        assert context.config.fsdp.wrap == ["Block"]
        assert context.config.dp_shard == -1
        assert context.key == "train.parallelism"


# What would be wrong without a word


class Odd(nn.Module):
    """Two layers and something between them, without blocks."""

    def __init__(self, between: nn.Module, width: int = 16) -> None:
        super().__init__()
        self.fc1, self.between, self.fc2 = nn.Linear(8, width), between, nn.Linear(16, 8)


def with_conv() -> nn.Module:
    model = Net()
    model.body.stack[0].conv, model.head = nn.Conv1d(8, 8, 3), nn.Linear(8, 8)
    return model


def with_scalar() -> nn.Module:
    model = Net()
    model.gain = nn.Parameter(torch.ones(()))
    return model


TWO_LAYERS = {"fc1": "colwise", "fc2": "rowwise"}


@pytest.mark.parametrize(
    ("model", "config", "said"),
    [
        (with_scalar(), {}, "parallelism: gain is a parameter of no dimension, which FSDP cannot shard\n  try: one of"),
        (nn.Sequential(nn.Embedding(4, 2, max_norm=1.0)), {}, "parallelism: 0 has max_norm=1 and scales its weight down"),
        (Net(), {"tp_size": 2, "tp_plan": {}}, "parallelism.tp_size=2, but parallelism.tp_plan={}: 2 ranks would compute the"),
        (Net(), {"activation_checkpointing": 4}, "parallelism.activation_checkpointing=4, but Net has 3 blocks, and no 4th"),
        (Odd(nn.PReLU()), {"tp_size": 2, "tp_plan": TWO_LAYERS}, "between has parameters and is not in the plan"),
        (
            Odd(nn.ReLU(), 32),
            {"tp_size": 2, "tp_plan": TWO_LAYERS},
            "fc1 is colwise and returns 32 features, but what takes slices beside it takes at most 16: is it several matrices "
            "in one?\n  try: {fc1: packed_colwise}",
        ),
        (
            Odd(nn.ReLU()),
            {"tp_size": 2, "tp_plan": {"fc1": "packed_colwise", "fc2": "rowwise"}},
            "fc1 is packed_colwise, but half of its 16 features is what nothing beside it takes\n  try: {fc1: colwise}",
        ),
        (
            with_conv(),
            {"tp_size": 2, "tp_plan": {"head": "replicate"}, "enable_sequence_parallel": True},
            "parallelism.enable_sequence_parallel=true, but body.stack.0.conv (Conv1d) may look along the sequence",
        ),
        (
            Net(),
            {"pp_size": 2, "pipeline": {"split": 5}},
            "parallelism.pipeline.split=5 is neither auto nor a list with one list of module names per stage",
        ),
    ],
)  # fmt: skip
def test_what_would_be_wrong_is_refused(model: nn.Module, config: dict[str, Any], said: str) -> None:
    assert said in refusal(model, config.get("tp_size", config.get("pp_size", 1)), **config)
