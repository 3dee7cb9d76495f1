"""Pipelines of real processes train as one process does, under every schedule and together with the other axes."""

import pytest

import worlds
from apps import pipelines

pytestmark = worlds.MARKS
LIMIT = 1e-5
ALL = [(size, name) for size, cases in pipelines.CASES.items() for name in cases]


@pytest.mark.parametrize(("size", "name"), [pytest.param(size, name, id=f"{size}-{name}") for size, name in ALL])
def test_a_pipeline_trains_as_one_process(size: int, name: str) -> None:
    for rank in worlds.reports(size):
        report = dict(rank["pipelines"][name])
        assert report.pop("covers")
        assert len(report) == 4 * len(pipelines.CASES[size][name]["optimizers"])
        assert {what: value for what, value in report.items() if not value <= LIMIT} == {}


def test_refusals_are_the_same_on_every_rank_and_leave_the_pipeline_whole() -> None:
    first, second = (dict(rank["refusals"]) for rank in worlds.reports(2))
    assert first == second
    assert float(first.pop("apart")) <= LIMIT
    assert first["call"] == (
        "a model in 2 pipeline stages has no output to call backward() on: each stage runs its own backward as the schedule "
        "says\n  try: loss = hydra_parallelism.forward_backward(model, inputs, targets, loss_fn), or torch.no_grad() around "
        "the call"
    )
    assert first["batch"] == first["evaluation"]
    assert first["batch"] == (
        "parallelism.pipeline.microbatches=4 does not divide the batch of 6 samples that this data rank has in one call, and "
        "the parts must be equal\n  try: parallelism.pipeline.microbatches=3, or 8 samples a call"
    )
    assert first["cache"] == (
        "the output of the model holds something of type object, and each of the 4 micro-batches makes one of its own\n"
        "  try: an output of tensors (Transformers: use_cache=False)"
    )
    assert " (stage 1) reads what embed (stage 0) computes, and a pipeline hands on only" in first["flow"]
    assert first["tied"].startswith("token_embedding.weight (stage 0) and head.weight (stage 1) are one parameter")
