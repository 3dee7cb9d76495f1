"""The MoE block alone, what counts as experts, and what ``parallelize`` refuses of an ``ep_plan``. No processes are started."""

import importlib
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hydra_parallelism import ConfigurationError, MoE, parallel_context, parallelize, resolve
from hydra_parallelism.options import read_config
from hydra_parallelism.parallelize import order, packed
from hydra_parallelism.parallelize.recipe import Recipe
from hydra_parallelism.parallelize.stand_ins import meta_copy

sys.path.insert(0, str(importlib.import_module("processes").APPS))

import models
import tiny

DISPATCH = {"layers.*.mlp.experts": "ep_dispatch_experts"}
SUMMED = {"layers.*.mlp.experts": "moe_tp_experts"}


def judge(model: nn.Module, world: int, **config: Any) -> Recipe:
    """The recipe of a config on a number of processes."""
    return order.judge(model, read_config(config, "parallelism"), resolve(config, world))


def refusal(model: nn.Module, world: int, **config: Any) -> str:
    """The text with which a config is refused."""
    with pytest.raises(ConfigurationError) as caught:
        judge(model, world, **config)
    return str(caught.value)


# The block


def by_definition(moe: MoE, x: Tensor) -> Tensor:
    """Every expert on every token, in float64."""
    experts = moe.experts
    chances = torch.einsum("...d,ed->...e", x, moe.router.weight).softmax(-1)
    kept, index = chances.topk(moe.router.top_k)
    gate, up = torch.einsum("...d,eid->...ei", x, experts.gate_up_proj).chunk(2, -1)
    outputs = torch.einsum("...ei,edi->...ed", nn.functional.silu(gate) * up, experts.down_proj)
    weights = torch.zeros_like(chances).scatter(-1, index, kept / kept.sum(-1, keepdim=True))
    return (outputs * weights.unsqueeze(-1)).sum(-2)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_the_block_computes_a_mixture(top_k: int) -> None:
    torch.manual_seed(0)
    moe = MoE(6, 10, experts=4, top_k=top_k).double()
    x = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    made, wanted = moe(x), by_definition(moe, x)
    assert made.shape == x.shape
    assert (made - wanted).abs().max() < 1e-6  # weights are float32 on purpose
    direction = torch.randn_like(made)
    inputs = [x, *moe.parameters()]
    ours, theirs = (torch.autograd.grad((y * direction).sum(), inputs) for y in (made, wanted))
    assert max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True)) < 1e-6


def test_the_block_draws_its_weights_again_and_refuses_an_impossible_choice() -> None:
    moe = MoE(6, 10, experts=4)
    before = [parameter.clone() for parameter in moe.parameters()]
    for part in (moe.router, moe.experts):
        part.reset_parameters()
    assert not any(torch.equal(a, b) for a, b in zip(before, moe.parameters(), strict=True))
    for top_k in (0, 5):
        with pytest.raises(ConfigurationError, match=rf"MoE\(top_k={top_k}, experts=4\): a token uses at least one"):
            MoE(6, 10, experts=4, top_k=top_k)


def test_the_skewed_model_is_skewed() -> None:
    model, seen = models.make("skewed"), []
    for layer in model.layers:
        layer.mlp.router.register_forward_hook(lambda _module, _inputs, output: seen.append(output[2].unique().tolist()))
    model(torch.arange(2 * models.SEQUENCE).view(2, -1))
    assert seen == [[0], [0, 3]]


# What counts as experts


class Other(nn.Module):
    """Almost."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return hidden


class Two(Other):
    """Called otherwise."""

    def forward(self, hidden: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
        return hidden


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (nn.ModuleList(nn.Linear(2, 2) for _ in range(4)), "its parameters are in modules of their own (0, ...), not stacked"),
        (nn.Linear(4, 4), "it holds no parameter with one matrix per expert, (experts, ., .)"),
        (Other(up=(4, 2, 3), scale=(3,)), "dim 0 of scale (3,) is not the number of its experts, 4"),
        (Other(up=(4, 2, 3), down=(2, 3, 4)), "dim 0 of down (2, 3, 4) is not the number of its experts, 4"),
        (Two(up=(4, 2, 3)), "its forward does not take (hidden, index, weights)"),
    ],
)
def test_what_is_no_module_of_stacked_experts(module: nn.Module, said: str) -> None:
    assert packed.why_not(module).startswith(said)
    assert packed.count(module) == 0


def test_experts_with_biases_are_counted_and_need_no_values_for_their_shapes() -> None:
    assert packed.count(Other(up=(4, 2, 3), up_bias=(4, 2), down=(4, 3, 2))) == 4
    copied = meta_copy(models.make("moe").layers[0])
    assert copied(torch.empty(2, 3, 32, device="meta")).shape == (2, 3, 32)


# The plan


def test_the_plan_of_the_model_is_taken_and_the_users_merged_over_it() -> None:
    model = models.make("moe")
    names = ("layers.0.mlp.experts", "layers.1.mlp.experts")
    assert judge(model, 2, dp_shard=2, ep_size=2, ep_plan="auto").experts == dict.fromkeys(names, "ep_dispatch_experts")
    summed = judge(model, 2, tp_size=2, ep_size=2, tp_plan="auto", ep_plan={"layers.*.mlp.experts": "moe_tp_experts"})
    assert summed.experts == dict.fromkeys(names, "moe_tp_experts")
    named = {**SUMMED, "layers.*.mlp.experts.down_proj": "grouped_gemm", "layers.*.mlp.router": "ep_router"}
    assert judge(model, 2, tp_size=2, ep_size=2, tp_plan="auto", ep_plan=named).experts == summed.experts
    assert judge(model, 1, ep_plan="auto").experts.keys() == summed.experts.keys()
    assert judge(models.make("gpt"), 1, ep_plan="auto").experts == {}, "one config for models with experts and without"
    assert judge(model, 2, tp_size=2, tp_plan="auto", ep_plan="auto").experts == {}
    wrapped = judge(model, 2, dp_shard=2, ep_size=2, ep_plan="auto", fsdp={"wrap": ["Block", "Experts"]})
    assert wrapped.units == ("layers.0", "layers.1")


TWO = {"dp_shard": 2, "ep_size": 2}
BOTH = {"tp_size": 2, "ep_size": 2, "tp_plan": "auto"}


@pytest.mark.parametrize(
    ("world", "config", "said"),
    [
        (
            2,
            TWO,
            "parallelism.ep_size=2, but parallelism.ep_plan=null: 2 ranks would hold all experts each\n"
            "  try: parallelism.ep_plan=auto (the model's own plan), or "
            "parallelism.ep_plan={layers.*.mlp.experts: ep_dispatch_experts}",
        ),
        (
            2,
            {**TWO, "ep_plan": {"layers.*.mlp.expert": "ep_dispatch_experts"}},
            "parallelism.ep_plan: no module is called 'layers.*.mlp.expert'\n"
            "  try: layers.*.mlp.experts, layers.*.mlp.router, layers.*.mlp.experts.down_proj",
        ),
        (
            2,
            {**TWO, "ep_plan": {"layers.*.mlp.experts": "colwise"}},
            "parallelism.ep_plan: no style 'colwise' for 'layers.*.mlp.experts'; 'colwise' belongs into parallelism.tp_plan\n"
            "  try: one of ep_dispatch_experts, moe_tp_experts, ep_router, grouped_gemm",
        ),
        (
            2,
            {**TWO, "ep_plan": {"layers.*.mlp": "ep_dispatch_experts"}},
            "parallelism.ep_plan: layers.0.mlp (MoE) is no module of stacked experts: its parameters are in modules of their "
            "own (router, ...), not stacked along dim 0\n  try: experts as hydra_parallelism.MoE or Transformers keep them, or "
            "parallelism.ep_plan=null with parallelism.ep_size=1",
        ),
        (
            3,
            {"dp_shard": 3, "ep_size": 3, "ep_plan": "auto"},
            "parallelism.ep_size=3 does not divide the 8 experts of layers.0.mlp.experts: 8 % 3 = 2\n"
            "  try: parallelism.ep_size=1, or another number of experts",
        ),
        (
            16,
            {"dp_shard": 16, "ep_size": 16, "ep_plan": "auto"},
            "parallelism.ep_size=16 does not divide the 8 experts of layers.0.mlp.experts: 16 ranks are more than its "
            "8 experts\n  try: parallelism.ep_size=8, or another number of experts",
        ),
        (
            4,
            {"dp_shard": 2, "tp_size": 2, "tp_plan": "auto", "ep_size": 4, "ep_plan": SUMMED},
            "parallelism.ep_plan: layers.0.mlp.experts is moe_tp_experts, a sum over ranks that have the same tokens, which "
            "takes ep_size == tp_size: parallelism.ep_size=4, parallelism.tp_size=2\n"
            "  try: parallelism.ep_plan={layers.*.mlp.experts: ep_dispatch_experts} parallelism.enable_sequence_parallel=true",
        ),
        (
            2,
            {**TWO, "ep_plan": SUMMED},
            "parallelism.ep_plan: layers.0.mlp.experts is moe_tp_experts, a sum over ranks that have the same tokens, which "
            "takes ep_size == tp_size: parallelism.ep_size=2, parallelism.tp_size=1\n"
            "  try: parallelism.ep_plan={layers.*.mlp.experts: ep_dispatch_experts}",
        ),
        (
            2,
            {**BOTH, "enable_sequence_parallel": True, "ep_plan": SUMMED},
            "parallelism.ep_plan: layers.0.mlp.experts is moe_tp_experts, a sum over ranks that have the same tokens, but with "
            "parallelism.enable_sequence_parallel=true the 2 tp ranks have different ones\n"
            "  try: parallelism.ep_plan={layers.*.mlp.experts: ep_dispatch_experts}",
        ),
        (
            2,
            {**BOTH, "ep_plan": "auto"},
            "parallelism.ep_plan: layers.0.mlp.experts is ep_dispatch_experts, but without "
            "parallelism.enable_sequence_parallel the parallelism.tp_size=2 tp ranks have the same tokens, and each would send "
            "all of them\n"
            "  try: parallelism.enable_sequence_parallel=true, or parallelism.ep_plan={layers.*.mlp.experts: moe_tp_experts}",
        ),
        (
            2,
            {**BOTH, "ep_plan": SUMMED, "tp_plan": {"layers.*.mlp.experts": "replicate"}},
            "parallelism.tp_plan: 'layers.*.mlp.experts' is replicate, but layers.0.mlp.experts holds experts that "
            "parallelism.ep_plan has\n  try: without 'layers.*.mlp.experts', or parallelism.ep_plan=null with "
            "parallelism.ep_size=1",
        ),
    ],
)
def test_refusals_of_a_plan(world: int, config: dict[str, Any], said: str) -> None:
    assert refusal(models.make("moe"), world, **config) == said


def test_a_weight_whose_tokens_have_no_way_is_refused() -> None:
    model = models.make("moe")
    model.ep_plan = {}
    assert refusal(model, 2, **TWO, ep_plan={"layers.*.mlp.experts.down_proj": "grouped_gemm"}) == (
        "parallelism.ep_size=2, but parallelism.ep_plan=... names no module of experts: 2 ranks would hold all experts each\n"
        "  try: parallelism.ep_plan={layers.*.mlp.experts: ep_dispatch_experts}"
    )
    some = {"layers.0.mlp.experts": "ep_dispatch_experts", "layers.1.mlp.experts.down_proj": "grouped_gemm"}
    assert refusal(model, 2, **TWO, ep_plan=some) == (
        "parallelism.ep_plan: layers.1.mlp.experts.down_proj is grouped_gemm, but nothing says how tokens get to its experts\n"
        "  try: {layers.*.mlp.experts: ep_dispatch_experts}"
    )


def test_a_model_without_experts_is_refused() -> None:
    said = "parallelism.ep_size=2, but parallelism.ep_plan=null: 2 ranks would hold all experts each\n"
    assert refusal(models.make("gpt"), 2, **TWO) == said + "  try: parallelism.ep_size=1: GPT has no module of stacked experts"
    assert refusal(models.make("gpt"), 2, **TWO, ep_plan="auto") == (
        "parallelism.ep_plan=auto, but GPT has no plan of its own that names its modules\n"
        "  try: parallelism.ep_plan={layers.*.experts: ep_dispatch_experts}, or give the model an attribute ep_plan"
    )


def test_experts_beside_a_split_layer() -> None:
    assert judge(models.make("shared"), 2, **BOTH, ep_plan=SUMMED).experts
    sequence = {**BOTH, "enable_sequence_parallel": True, "ep_plan": "auto"}
    beside = [f"layers.0.mlp.shared.{name}_proj" for name in ("gate", "up", "down")]
    rules = {name.replace("0", "*"): "sequence_parallel" for name in beside}
    assert refusal(models.make("shared"), 2, **sequence) == (
        f"parallelism.ep_plan: layers.0.mlp.experts stands in layers.0.mlp, where parallelism.tp_plan splits "
        f"{', '.join(beside)}: there the sequence is whole on every tp rank, and each would send the same tokens\n"
        f"  try: parallelism.tp_plan={{{', '.join(f'{name}: {style}' for name, style in rules.items())}}}"
    )
    assert judge(models.make("shared"), 2, **{**sequence, "tp_plan": rules}).experts


def test_a_router_that_gives_every_expert_a_weight_is_refused_when_it_runs() -> None:
    class Dense(MoE):
        def forward(self, x: Tensor) -> Tensor:
            logits, _, index = self.router(x.flatten(0, -2))
            return self.experts(x.flatten(0, -2), index, logits).view_as(x)

    model = tiny.make("moe", layers=1)
    model.layers[0].mlp = Dense(tiny.DIM, tiny.DIM, experts=4)
    with parallel_context({"ep_plan": "auto"}):
        applied = parallelize(model)
        with pytest.raises(ConfigurationError) as caught:
            applied(tiny.batch(0, 2).inputs)
    assert str(caught.value) == (
        "FSDPExperts was called with experts (12, 2) and weights (12, 4)\n"
        "  try: a router that returns one weight for each chosen expert, (tokens, k) both"
    )
