"""The norm of gradients and the mean of losses against one process, on real gloo ranks and on one."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import worlds
from apps import jobs
from hydra_parallelism import ConfigurationError, ParallelismError, average_loss, clip_grad_norm_, parallel_context

pytestmark = worlds.MARKS

FOUR = jobs.NORMS[4]


@pytest.fixture
def four() -> list[dict[str, Any]]:
    return [rank["norms"] for rank in worlds.reports(4)]


@pytest.fixture
def eight() -> list[dict[str, Any]]:
    return [rank["norms"] for rank in worlds.reports(8)]


def check_model(ranks: list[dict[str, Any]]) -> None:
    for order in ("1.0", "2.0", "3.0", "inf"):
        assert len({report["norms"][order] for report in ranks}) == 1  # to the last bit
        assert max(report["off"][order] for report in ranks) < 1e-6
        assert max(report["scaled_off"][order] for report in ranks) < 1e-6
    assert max(report["loss_off"] for report in ranks) < 1e-6


@pytest.mark.parametrize("name", FOUR)
def test_the_norm_is_that_of_one_process(name: str, four: list[dict[str, Any]]) -> None:
    check_model([report[name] for report in four])


def test_the_norm_over_stages_shards_and_tensors(eight: list[dict[str, Any]]) -> None:
    check_model([report["pp_fsdp_tp"] for report in eight])


def test_the_norm_over_many_meshes(eight: list[dict[str, Any]]) -> None:
    for report in eight:
        assert max(report["made_up"].values()) < 1e-6


@pytest.mark.parametrize("name", FOUR)
def test_ranks_without_gradients_and_gradients_that_are_not_finite(name: str, four: list[dict[str, Any]]) -> None:
    for report in four:
        odd = report[name]["odd"]
        assert (odd["nothing"], odd["no_gradient"], odd["one_stage"]) == (0.0, 0.0, 5.0)
        for bad in ("nan", "inf"):
            for order in ("2.0", "inf"):
                assert odd[f"{bad} {order}"] == bad
                assert odd[f"{bad} {order} kept"]
                assert f"The total norm of order {order} of the gradients is non-finite ({bad})" in odd[f"{bad} {order} told"]


@pytest.mark.parametrize("name", FOUR)
def test_losses_are_averaged_over_the_ranks_that_saw_different_tokens(name: str, four: list[dict[str, Any]]) -> None:
    said = [report[name]["losses"] for report in four]
    indices = range(max(one["index"] for one in said) + 1)
    mean, squares, total = sum(indices) / len(indices), sum(i * i for i in indices), sum(indices)
    for one in said:
        assert one["mean"] == one["number"] == mean
        assert one["half"] == [mean, "torch.float32", False]
        assert one["all_left_out"] == "nan"
        if total:
            assert one["weighted"] == pytest.approx(squares / total, rel=1e-6)
            assert one["left_out"] == 1.0


@pytest.mark.parametrize("name", FOUR)
def test_data_peers_read_and_draw_alike(name: str, four: list[dict[str, Any]]) -> None:
    by_dp_rank: dict[int, set[Any]] = {}
    for report in four:
        by_dp_rank.setdefault(report[name]["dp_rank"], set()).add((report[name]["seed"], *report[name]["samples"]))
    assert [len(alike) for alike in by_dp_rank.values()] == [1] * len(by_dp_rank)
    assert len(set.union(*by_dp_rank.values())) == len(by_dp_rank)
    assert {sample for alike in by_dp_rank.values() for _, *samples in alike for sample in samples} == set(range(10))


@pytest.fixture
def alone() -> Iterator[None]:
    with parallel_context({}):
        yield


def gradients(*values: torch.Tensor) -> list[nn.Parameter]:
    found = [nn.Parameter(torch.zeros_like(value)) for value in values]
    for parameter, value in zip(found, values):
        parameter.grad = value.clone()
    return found


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("order", [0.5, 1, 2, 2.5, math.inf])
@pytest.mark.parametrize("limit", [0.1, 1e9])
def test_one_process_agrees_with_torch(order: float, limit: float) -> None:
    torch.manual_seed(0)
    values = [torch.randn(3, 4), torch.randn(5, dtype=torch.float64), torch.randn(()), torch.randn(2, 3).half()]
    ours, theirs = gradients(*values), gradients(*values)
    wanted = torch.nn.utils.clip_grad_norm_([p for p in theirs if p.dtype != torch.half], math.inf, order)
    halves = torch.linalg.vector_norm(values[3].float(), order).item()
    total = max(wanted.item(), halves) if math.isinf(order) else (wanted.item() ** order + halves**order) ** (1 / order)
    norm = clip_grad_norm_(ours, limit, order)
    assert norm.item() == pytest.approx(total, rel=1e-6)
    assert (norm.dtype, norm.shape, norm.requires_grad) == (torch.float32, (), False)
    scale = min(limit / (total + 1e-6), 1.0)
    for parameter, value in zip(ours, values):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, value * scale)


@pytest.mark.usefixtures("alone")
def test_a_tied_parameter_counts_once_and_a_module_is_its_parameters() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    model(torch.ones(2, 3)).sum().backward()
    norm = model[0].weight.grad.norm().item()
    listed = [model[0].weight, model[1].weight]
    for parameters in (model, model.parameters(), listed, model[0].weight):
        assert clip_grad_norm_(parameters, math.inf).item() == pytest.approx(norm)
    clip_grad_norm_(listed, 1.0)
    assert model[0].weight.grad.norm().item() == pytest.approx(1.0)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("order", [0.0, -1.0, math.nan, -math.inf])
def test_no_such_norm(order: float) -> None:
    with pytest.raises(ConfigurationError, match=r"norm_type=\S+ must be above 0\n  try: norm_type=2.0"):
        clip_grad_norm_([], 1.0, order)


def test_without_a_context_they_say_what_to_do() -> None:
    for use in (lambda: clip_grad_norm_([], 1.0), lambda: average_loss(1.0)):
        with pytest.raises(ParallelismError, match="no parallel context: choose a preset"):
            use()
