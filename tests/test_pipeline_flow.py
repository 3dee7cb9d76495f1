"""Cutting models and following what flows between the parts, in one process and without communication."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent / "apps"))

import tiny

from hydra_parallelism import ConfigurationError, Topology
from hydra_parallelism.config import ParallelismConfig, PipelineConfig, PipelineSchedule
from hydra_parallelism.parallelize.flow import Flow
from hydra_parallelism.parallelize.pipeline import plan_pipeline
from hydra_parallelism.parallelize.stand_ins import StandIn, meta_copy, sources, trace
from hydra_parallelism.parallelize.steps import accumulate, forward_backward
from hydra_parallelism.parallelize.units import cut_out, find_units, furnish, take_shapes

CPU = torch.device("cpu")


def flow_of(model: nn.Module, division: Sequence[Sequence[str]]) -> Flow:
    units = find_units(model, division, "parallelism")
    skeleton = cut_out(model, units, ())
    stand_ins = furnish(skeleton, units, take_shapes(model, units), CPU)
    return Flow(skeleton, stand_ins, [unit.name for unit in units if unit.is_bare], division, "parallelism")


def plan(model: nn.Module, pp: int = 2, **pipeline: Any) -> Any:
    config = ParallelismConfig(pp_size=pp, pipeline=PipelineConfig(**pipeline))
    return plan_pipeline(model, config, Topology(pp=pp))


class Skips(nn.Module):
    """Every block reads the embedding again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(4))
        self.head = nn.Linear(4, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        start = x = self.embed(tokens)
        for block in self.blocks:
            x = block(x + start)
        return self.head(x)


class ReadsWeight(Skips):
    """The head is the embedding's weight, read as an attribute."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) @ self.embed.weight


class WritesInPlace(Skips):
    """The embedding reaches the head through a buffer."""

    def forward(self, tokens: Tensor) -> Tensor:
        kept = torch.zeros(*tokens.shape, 4)
        x = self.embed(tokens)
        kept[:] = x
        for block in self.blocks:
            x = block(x)
        return self.head(x + kept)


class Decides(Skips):
    """What runs depends on values."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x) if x.sum() > 0 else -block(x)
        return self.head(x)


class Conditioned(Skips):
    """Every block is told what a module before the blocks made of the tokens."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, condition: Tensor) -> Tensor:
            return self.linear(x) * condition

    def __init__(self) -> None:
        super().__init__()
        self.condition = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(Conditioned.Block() for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x, condition = self.embed(tokens), self.condition(tokens)
        for block in self.blocks:
            x = block(x, condition)
        return self.head(x)


class Looped(Skips):
    """Runs its blocks twice."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return self.head(x)


TOKENS = torch.arange(6).view(2, 3)
HALVES = [["embed", "blocks.0", "blocks.1"], ["blocks.2", "blocks.3", "head"]]


def test_units_of_models() -> None:
    gpt = tiny.make("gpt", layers=2)
    assert [unit.name for unit in find_units(gpt, "auto", "parallelism")] == [
        "token_embedding", "position_embedding", "layers.0", "layers.1", "norm", "head",
    ]  # fmt: skip
    units = find_units(tiny.make("llama", layers=2), "auto", "parallelism")
    assert [unit.name for unit in units] == [
        "model.offset", "model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "head",
    ]  # fmt: skip
    assert [unit.is_bare for unit in units] == [True] + [False] * 5
    assert [unit.is_block for unit in units] == [False, False, True, True, False, False]


def test_parts_keep_names_and_share_nothing_but_modules() -> None:
    model = tiny.make("llama", layers=4)
    whole = dict(model.named_parameters())
    plan_ = plan(model)
    parts = [cut_out(model, plan_.units, names) for names in plan_.division]
    held = [dict(part.named_parameters()) for part in parts]
    assert set(held[0]) | set(held[1]) == set(whole)
    assert not set(held[0]) & set(held[1])
    assert all(parameter is whole[name] for names in held for name, parameter in names.items())
    assert parts[0].model.rotary is not parts[1].model.rotary
    assert all(torch.equal(part.model.rotary.frequencies, model.model.rotary.frequencies) for part in parts)


@pytest.mark.parametrize("name", ["gpt", "llama", "two"])
def test_what_travels(name: str) -> None:
    model = tiny.make(name)
    flow = flow_of(model, plan(model).division)
    tokens = tiny.batch(0, 2).inputs
    args, kwargs = ((), {"tokens": tokens}) if name == "llama" else ((tokens,), {})
    state = torch.random.get_rng_state()
    assert flow.trace(args, kwargs, training=True) == {1: (0, 1) if name == "two" else (0,)}
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    ("model", "division", "text"),
    [
        (Skips, HALVES, "blocks.3 (stage 1) reads what embed (stage 0) computes, and a pipeline hands on only what the first "
         "module of the next stage is called with (stage 1: blocks.2)\n  try: parallelism.pipeline.split with both in"),
        (Conditioned, [["embed", "condition", "blocks.0", "blocks.1"], HALVES[1]],
         "blocks.3 (stage 1) reads what condition (stage 0) computes"),
        (Conditioned, [["embed", "condition", "blocks.0"], ["blocks.1"], ["blocks.2", "blocks.3", "head"]],
         "blocks.2 (stage 2) reads what condition (stage 0) computes"),
        (Looped, HALVES, "blocks.0 runs more than once in one forward, which a pipeline cannot do: its stage runs once"),
        (Looped, [["embed"], ["blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]],
         "blocks.0 runs more than once in one forward, which a pipeline cannot do"),
        (Skips, [["embed", "head", "blocks.0", "blocks.1"], ["blocks.2", "blocks.3"]], "reads what"),
        (ReadsWeight, HALVES, "the forward of ReadsWeight cannot be run in stages: it reads embed.weight itself"),
        (WritesInPlace, HALVES, "it writes what embed computes into a tensor in place, which hides where that goes"),
        (Decides, HALVES, "it decides by the values of what embed computes, which the other stages do not have"),
        (tiny.GPT,
         [["token_embedding", "layers.0"], ["position_embedding", *(f"layers.{n}" for n in (1, 2, 3)), "norm", "head"]],
         "position_embedding, with which stage 1 begins, reads nothing from stage 0"),
    ],
)  # fmt: skip
def test_flow_that_no_pipeline_can_carry(model: Any, division: Any, text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        flow_of(model(), division).trace((TOKENS,), {}, training=True)
    assert text in str(caught.value), str(caught.value)
    assert "\n  try: " in str(caught.value)


def test_a_stage_that_begins_with_what_is_not_called() -> None:
    model = Skips()
    model.unused = nn.Linear(4, 4)
    model.forward = lambda tokens: model.head(model.embed(tokens))  # type: ignore[method-assign]
    division = [["embed", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"], ["unused"]]
    with pytest.raises(ConfigurationError, match=r"unused, with which stage 1 begins, is not called"):
        flow_of(model, division).trace((TOKENS,), {}, training=True)


def test_a_shared_parameter_is_refused() -> None:
    model = tiny.make("gpt")
    model.head.weight = model.token_embedding.weight
    with pytest.raises(ConfigurationError) as caught:
        plan(model)
    assert str(caught.value) == (
        "token_embedding.weight (stage 0) and head.weight (stage 1) are one parameter: each stage would train its own copy, "
        "and the two would part\n  try: give head.weight a parameter of its own before parallelize (Transformers: "
        "tie_word_embeddings=False), or parallelism.pp_size=1"
    )
    model.head.weight.requires_grad_(False)
    plan(model)


def test_a_model_without_blocks_needs_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(
        ConfigurationError, match="split=auto cuts a model along its list of repeated blocks, and Sequential has"
    ):
        plan(model)
    assert plan(model, split=[["0"], ["1"]]).division == (("0",), ("1",))


def test_plans_name_the_keys() -> None:
    with pytest.raises(ConfigurationError, match="makes 4 \\* 2 = 8 stages, but the model has 4 repeated blocks"):
        plan(tiny.make("gpt"), 4, schedule=PipelineSchedule.ZBVZeroBubble)


def test_traces_follow_values_and_not_shapes() -> None:
    x = trace(torch.ones(2, 3), "a")
    y = trace(torch.ones(2, 3), "b")
    assert sources([x * 2 + y, 3]) == {"a", "b"}
    assert sources([torch.cat([x, torch.ones(1, 3)]).sum(0)[1]]) == {"a"}
    assert sources(list(torch.split(x, 1))) == {"a"}
    assert sources([torch.zeros_like(x), x.new_zeros(3), torch.arange(x.shape[1])]) == set()


def test_a_stand_in_answers_as_the_original() -> None:
    block = tiny.Block(16, 2)
    stand_in = StandIn("block", meta_copy(block), CPU)
    assert (list(stand_in.parameters()), stand_in.state_dict()) == ([], {})
    assert stand_in.kind == "full"
    with pytest.raises(AttributeError):
        _ = stand_in.nothing
    out = stand_in(torch.ones(2, 5, 16))
    assert (tuple(out.shape), out.dtype, out.abs().sum()) == ((2, 5, 16), torch.float32, 0)
    assert next(block.parameters()).device == CPU


def test_a_module_that_cannot_run_without_values_is_named() -> None:
    class Peeks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum().item() > 0 else x

    with pytest.raises(
        RuntimeError, match="needs the output shape of head where another stage holds it, but Peeks does not run on"
    ):
        StandIn("head", meta_copy(Peeks(4, 4)), CPU)(torch.ones(2, 4))


def test_accumulated_gradients_are_a_mean() -> None:
    whole, parts = tiny.make("gpt"), tiny.make("gpt")
    data = tiny.batch(0, 6)
    loss = forward_backward(whole, data.inputs, data.targets, tiny.cross_entropy)
    losses = [
        forward_backward(parts, (data.inputs[2 * n : 2 * n + 2],), data.targets[2 * n : 2 * n + 2], tiny.cross_entropy)
        for n in accumulate(parts, 3)
    ]
    assert not loss.requires_grad
    torch.testing.assert_close(sum(losses) / 3, loss)
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    for _ in accumulate(parts, 2):
        break  # left early: the next call stands alone again
    parts.zero_grad()
    forward_backward(parts, {"tokens": data.inputs}, data.targets, tiny.cross_entropy)
    torch.testing.assert_close(parts.head.weight.grad, whole.head.weight.grad)


def test_accumulating_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"accumulate\(model, steps=0\)"):
        accumulate(nn.Linear(1, 1), 0)
