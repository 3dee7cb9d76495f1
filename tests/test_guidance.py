"""Guided predictions: on the ranks of two branches against one batch in one process, and what is refused."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

import worlds
from apps import jobs
from hydra_parallelism import ConfigurationError, guided, parallel_context

pytestmark = worlds.MARKS

KEY = "parallelism.cfg_parallel=2"


@pytest.fixture
def two() -> list[dict[str, Any]]:
    return [rank["branches"] for rank in worlds.reports(2)]


def test_two_branches_are_one_batch_bit_for_bit(two: list[dict[str, Any]]) -> None:
    first, second = (report["cfg"] for report in two)
    assert first["equal"]
    assert first["bits"] == second["bits"]
    assert not first["requires_grad"]


def test_one_all_gather_and_nothing_else_is_sent(two: list[dict[str, Any]]) -> None:
    assert [report["cfg"]["sent"] for report in two] == [{"_allgather_base_": 1}] * 2


@pytest.mark.parametrize("name", jobs.GUIDED[4])
def test_with_other_axes(name: str) -> None:
    ranks = [rank["branches"][name] for rank in worlds.reports(4)]
    assert max(report["off"] for report in ranks) < 1e-6
    by_data_rank: dict[int, set[str]] = {}
    for report in ranks:
        by_data_rank.setdefault(report["dp_rank"], set()).add(report["bits"])
    assert [len(bits) for bits in by_data_rank.values()] == [1] * (1 if name == "pp" else 2)


def test_containers_are_combined_leaf_by_leaf(two: list[dict[str, Any]]) -> None:
    first, second = (report["containers"] for report in two)
    assert first == second
    assert first["out"]
    assert first["half"][0] == "torch.bfloat16"
    assert first["label"] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert first["rest"] == ["name", None]


def test_training_two_branches_is_refused(two: list[dict[str, Any]]) -> None:
    text = (
        f"{KEY} is for inference only: nothing reduces gradients over the two branches, so each would train "
        "weights of its own\n  try: parallelism.cfg_parallel=1 parallelism.inference=false to train"
    )
    for report in two:
        said = report["refusals"]
        assert [said[way] for way in ("training", "backward", "thawed")] == [text] * 3
        assert said["input_gradient"]


def test_refusals_of_both_ranks(two: list[dict[str, Any]]) -> None:
    first, second = (report["refusals"] for report in two)
    for attempt in ("different", "scales"):
        assert first[attempt] == second[attempt]
        assert first[attempt] == (
            f"{KEY}: the two ranks along cfg called guided() with different inputs or scales, and would combine predictions of "
            "different samples\n  try: noise from a generator seeded by hydra_parallelism.seed_for(seed), and batches read by "
            "context.dp_rank"
        )
    for said, width, name in ((first, 16, "conditional"), (second, 8, "unconditional")):
        assert said["shapes"] == (
            f"{KEY}: the model returns something else in each branch, a tensor of shape (8, {width}) and torch.float32 in the "
            f"{name} one of this rank, and only like can be combined\n"
            "  try: a model whose output has the same structure, the same shapes and no other values for both"
        )
    assert first["failing"] == f"{KEY}: the other branch of guided() failed, see the message of the other rank along cfg"
    assert second["failing"] == "division by zero"
    assert first["goes_on"]
    assert second["goes_on"]


class Echo(nn.Module):
    """Returns what a function makes of its input."""

    def __init__(self, make: Any = lambda x: x) -> None:
        super().__init__()
        self.make = make
        self.eval()

    def forward(self, x: Any, **_: Any) -> Any:
        return self.make(x)


@pytest.fixture
def alone() -> Iterator[None]:
    with parallel_context({}):
        yield


ONES, ZEROS = torch.ones(2, 3), torch.zeros(2, 3)


@pytest.mark.usefixtures("alone")
def test_the_formula_in_one_process() -> None:
    assert torch.equal(guided(Echo(), 3 * ONES, ONES, 2.0), 5 * ONES)
    assert torch.equal(guided(Echo(), (ONES,), (ZEROS,), torch.tensor([[1.0], [4.0]])), torch.tensor([[1.0], [4.0]]) * ONES)
    moment = torch.tensor(3.0)
    found = guided(Echo(), {"x": ONES, "time": moment, "n": 3}, {"n": 3, "time": moment, "x": ZEROS}, 1.5)
    assert torch.equal(found, 1.5 * ONES)


@pytest.mark.usefixtures("alone")
def test_an_output_of_transformers_stays_one() -> None:
    found = guided(Echo(lambda x: BaseModelOutput(last_hidden_state=x, hidden_states=(x, 2 * x))), ONES, ZEROS, 3.0)
    assert isinstance(found, BaseModelOutput)
    assert torch.equal(found.last_hidden_state, 3 * ONES)
    assert torch.equal(found.hidden_states[1], 6 * ONES)


SAID = "guided(model, cond, uncond): "


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("cond", "uncond", "text"),
    [
        (
            {"x": ONES, "label": ONES},
            {"x": ONES},
            f"{SAID}cond has label, x, and uncond has x\n"
            "  try: the same arguments in both, in uncond a null class or the embedding of an empty prompt",
        ),
        (
            ONES,
            ONES[:, :2],
            f"{SAID}argument 0 is a tensor of shape (2, 3) and torch.float32 in cond and a tensor of shape (2, 2) and "
            "torch.float32 in uncond, so that the two cannot be one batch\n"
            "  try: one shape and dtype in both, a null class or an empty prompt padded alike",
        ),
        (
            {"x": ONES, "label": 3},
            {"x": ONES, "label": 9},
            f"{SAID}label is 3 in cond and 9 in uncond, so that the two cannot be one batch\n"
            "  try: a tensor in both, dim 0 the batch",
        ),
        (
            {"x": ONES, "time": torch.tensor(1.0)},
            {"x": ONES, "time": torch.tensor(1.0)},
            f"{SAID}time is a tensor of shape () and torch.float32 in cond and a tensor of shape () and torch.float32 in "
            "uncond, so that the two cannot be one batch\n"
            "  try: a tensor with a value for each sample, value.expand(batch), or the same tensor in both",
        ),
        (
            (ONES, torch.ones(5)),
            (ONES, torch.ones(5)),
            f"{SAID}dim 0 of every tensor must be the batch, but argument 0 has 2, argument 1 has 5\n"
            "  try: tables that are no samples in the model, values for all samples expanded",
        ),
    ],
)
def test_branches_that_do_not_match_are_refused(cond: Any, uncond: Any, text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        guided(Echo(), cond, uncond, 2.0)
    assert str(caught.value) == text


@pytest.mark.usefixtures("alone")
def test_another_structure_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="argument 0 holds containers of another structure in cond than in uncond"):
        guided(Echo(), ([ONES],), ([ONES, ONES],), 2.0)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("output", "said"),
    [
        (lambda x: x.sum(), "for 4 samples holds a tensor of shape () and torch.float32, which cannot be divided"),
        (lambda x: (x, object()), "for 4 samples holds something of type object, which cannot be divided"),
        (lambda x: x.long(), "the output of the model holds no floating-point tensor, so there is nothing to combine"),
    ],
)
def test_outputs_that_cannot_be_combined_are_refused(output: Any, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        guided(Echo(output), ONES, ZEROS, 2.0)
    assert said in str(caught.value)


@pytest.mark.usefixtures("alone")
def test_a_model_in_training_mode_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"Echo is in training mode, .*\n  try: model.eval\(\)"):
        guided(Echo().train(), ONES, ZEROS, 2.0)
