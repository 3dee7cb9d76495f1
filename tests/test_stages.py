"""Which stage holds what: tables, brute force, and the text of every refusal."""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_parallelism import ConfigurationError
from hydra_parallelism.parallelize.stages import (
    Unit,
    arrange,
    balance,
    choose_microbatches,
    divide,
    rank_of,
    splits_backward,
    stages_of,
    stages_per_rank,
)

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
UNITS = [
    Unit("embed", 40),
    *(Unit(f"layers.{n}", 10, is_block=True) for n in range(6)),
    Unit("norm", 1),
    Unit("head", 40),
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_every_stage_is_on_the_rank_where_torch_looks_for_it(schedule: str, pp: int) -> None:
    from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

    stages = pp * stages_per_rank(schedule)
    style = "v" if schedule in ("ZBVZeroBubble", "DualPipeV") else "loop"
    assert {stage: rank_of(stage, schedule, pp) for stage in range(stages)} == generate_stage_to_rank_mapping(pp, stages, style)
    held = [stages_of(rank, schedule, pp) for rank in range(pp)]
    assert sorted(itertools.chain(*held)) == list(range(stages))
    assert all(list(of) == sorted(of) for of in held)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_number_of_stages_is_what_torch_wants(schedule: str) -> None:
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

    kind = get_schedule_class(schedule)
    assert issubclass(kind, PipelineScheduleMulti) == (stages_per_rank(schedule) == 2)
    assert splits_backward(schedule) == any(word in kind.__name__ for word in ("ZeroBubble", "DualPipe"))


def _largest(sizes: list[int], counts: list[int], before: int, after: int) -> int:
    held, start = [], 0
    for count in counts:
        held.append(sum(sizes[start : start + count]))
        start += count
    held[0] += before
    held[-1] += after
    return max(held)


@settings(max_examples=300, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=8),
    parts=st.integers(1, 8),
    before=st.integers(0, 100),
    after=st.integers(0, 100),
)
def test_balance_is_as_good_as_brute_force(sizes: list[int], parts: int, before: int, after: int) -> None:
    parts = min(parts, len(sizes))
    counts = balance(sizes, parts, before=before, after=after)
    assert (len(counts), sum(counts), min(counts) >= 1) == (parts, len(sizes), True)
    cuts = itertools.combinations(range(1, len(sizes)), parts - 1)
    options = [[b - a for a, b in itertools.pairwise([0, *cut, len(sizes)])] for cut in cuts]
    best = min(_largest(sizes, option, before, after) for option in options)
    assert _largest(sizes, counts, before, after) == best


def test_of_equally_good_cuts_the_most_even_one() -> None:
    assert balance([1] * 8, 4) == [2, 2, 2, 2]
    assert balance([10] * 6, 3, before=40) == [1, 2, 3] or balance([10] * 6, 3, before=40) == [1, 3, 2]
    assert balance([1] * 5, 2) in ([2, 3], [3, 2])


def test_auto_gives_the_embedding_to_the_first_stage_and_the_head_to_the_last() -> None:
    found = divide(UNITS, "auto", "1F1B", 3, "parallelism")
    assert found == (
        ("embed", "layers.0"),
        ("layers.1", "layers.2", "layers.3", "layers.4"),
        ("layers.5", "norm", "head"),
    )
    assert len(divide(UNITS, "auto", "Interleaved1F1B", 3, "parallelism")) == 6


def test_named_stages() -> None:
    split = [["embed"], ["layers.[0-3]"], ["layers.[45]", "norm", "head"]]
    found = divide(UNITS, split, "1F1B", 3, "parallelism")
    assert found == (
        ("embed",),
        ("layers.0", "layers.1", "layers.2", "layers.3"),
        ("layers.4", "layers.5", "norm", "head"),
    )


def test_a_pipeline_plan_of_transformers_orders_units() -> None:
    plan = {
        "lm_head": (["hidden_states"], ["logits"]),
        "model.embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "model.layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "model.norm": (["hidden_states"], ["hidden_states"]),
    }
    names = ["lm_head", "model.extra", "model.layers.0", "model.layers.1", "model.embed_tokens", "model.norm"]
    units = [Unit(name, 1) for name in names]
    assert [unit.name for unit in arrange(units, plan)] == [
        "model.embed_tokens", "model.extra", "model.layers.0", "model.layers.1", "model.norm", "lm_head",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("split", "schedule", "pp", "text"),
    [
        ("auto", "1F1B", 8, "parallelism.pp_size=8 with parallelism.pipeline.schedule=1F1B makes 8 * 1 = 8 stages, but the "
         "model has 6 repeated blocks\n  try: parallelism.pp_size=6, or"),
        ("auto", "ZBVZeroBubble", 4, "makes 4 * 2 = 8 stages, but the model has 6 repeated blocks\n  try: "
         "parallelism.pp_size=3"),
        ("even", "1F1B", 2, "parallelism.pipeline.split=even is neither auto nor a list with one list of module names per"),
        (["embed"], "1F1B", 1, "is neither auto nor a list"),
        ([["embed"], ["layers.*", "norm", "head"]], "1F1B", 3, "parallelism.pipeline.split names 2 stages, but "
         "parallelism.pp_size=3 with parallelism.pipeline.schedule=1F1B has 3 * 1 = 3"),
        ([["embed", "layers.0"], ["layers.*", "norm", "head"]], "1F1B", 2,
         "parallelism.pipeline.split puts layers.0 into two stages, 0 and 1"),
        ([["embed"], ["layers.*", "norm"]], "1F1B", 2, "parallelism.pipeline.split leaves out head; each of the 9 modules"),
        ([[], ["embed", "layers.*", "norm", "head"]], "1F1B", 2, "parallelism.pipeline.split names nothing for stage 0"),
        ([["embed", "layer.*"], ["norm", "head"]], "1F1B", 2,
         "parallelism.pipeline.split: 'layer.*' of stage 0 names no module of the model\n  try: one of layers."),
        ([["embed", "layers.0.attention"], ["norm", "head"]], "1F1B", 2,
         "'layers.0.attention' of stage 0 is a part of layers.0, which goes to one stage as a whole\n  try: name layers.0"),
    ],
)  # fmt: skip
def test_refused_splits(split: Any, schedule: str, pp: int, text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        divide(UNITS, split, schedule, pp, "parallelism")
    assert text in str(caught.value)
    assert "\n  try: " in str(caught.value)


@pytest.mark.parametrize(
    ("given_", "schedule", "pp", "expected"),
    [
        (None, "1F1B", 4, 8),
        (None, "ZBVZeroBubble", 2, 8),
        (3, "GPipe", 4, 3),
        (6, "Interleaved1F1B", 3, 6),
        (1, "LoopedBFS", 2, 1),
    ],
)
def test_micro_batches(given_: int | None, schedule: str, pp: int, expected: int) -> None:
    assert choose_microbatches(given_, schedule, pp, "parallelism") == expected


@pytest.mark.parametrize(
    ("count", "schedule", "pp", "text"),
    [
        (0, "GPipe", 2, "a step needs at least one\n  try: parallelism.pipeline.microbatches=4"),
        (3, "1F1B", 4, "parallelism.pipeline.microbatches=3 does not suit parallelism.pipeline.schedule=1F1B at "
         "parallelism.pp_size=4:\n  it has 4 stages and needs at least as many"),
        (4, "DualPipeV", 4, "it has 8 stages and needs at least as many"),
        (5, "Interleaved1F1B", 2, "5 // 2 = 2 rounds, which does not divide 5\n  try: parallelism.pipeline.microbatches=4"),
    ],
)  # fmt: skip
def test_refused_micro_batches(count: int, schedule: str, pp: int, text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        choose_microbatches(count, schedule, pp, "parallelism")
    assert text in str(caught.value)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_torch_takes_the_micro_batches_that_are_not_refused(schedule: str, pp: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=pp)
    try:
        total = pp * stages_per_rank(schedule)
        for count in range(1, 13):
            try:
                choose_microbatches(count, schedule, pp, "parallelism")
            except ConfigurationError:
                continue
            stages = [PipelineStage(torch.nn.Linear(1, 1), n, total, torch.device("cpu")) for n in stages_of(0, schedule, pp)]
            get_schedule_class(schedule)(stages if len(stages) > 1 else stages[0], count, loss_fn=torch.nn.functional.mse_loss)
    finally:
        dist.destroy_process_group()
