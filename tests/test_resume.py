"""Runs that are saved under one layout and go on under another, on other numbers of processes too."""

from typing import Any

import pytest

import worlds
from apps import jobs

pytestmark = worlds.MARKS
ALL = [
    pytest.param(size, number, id=f"{size}-{number}-{job[0]}-{job[1]}")
    for size, all_ in jobs.RESUME.items()
    for number, job in enumerate(all_)
    if job[0] != "refused"
]


def reports(size: int) -> list[tuple[dict[str, Any], ...]]:
    """By job, then by rank."""
    return list(zip(*(rank["resume"] for rank in worlds.reports(size)), strict=True))


@pytest.mark.parametrize(("size", "number"), ALL)
def test_a_resumed_run_goes_on_as_the_uninterrupted_one(size: int, number: int) -> None:
    action, folder, config, _ = jobs.RESUME[size][number]
    for report in reports(size)[number][: 1 if config is None else size]:
        assert report["loss_off"] < 1e-5
        assert report.get("weights_off", 0.0) < 1e-5
        assert report.get("export_off", 0.0) < 1e-5
        if action == "load":
            fresh = folder.startswith("new")
            assert report["extra"]["step"] == (0 if fresh else 2)
            assert report["extra"].get("who") in (None, 0)
            assert report["rates"] == [0.01 if fresh else 0.02]


def test_a_change_of_layout_is_told_once() -> None:
    told = [[report["log"] for report in ranks] for ranks in reports(4)]
    assert all(lines == [] for ranks in told for lines in ranks[1:])
    assert told[0][0] == [
        "one: saved under one process, loading under dp_shard=4; dp_world_size was 1 and is 4: samples go to other ranks"
    ]
    assert told[4][0] == ["fsdp4: saved under dp_shard=4, loading under dp_replicate=2 * dp_shard=2"]
    assert [ranks[0]["log"] for ranks in reports(1)] == [[], [], [], []]


def test_another_model_is_refused_by_every_rank_with_the_same_words() -> None:
    refused = reports(4)[12]
    assert {(report["text"], report["kind"], report["kept"]) for report in refused} == {
        (refused[0]["text"], "ConfigurationError", True)
    }
    first, lacks, shapes, advice = refused[0]["text"].splitlines()
    assert first.startswith("the checkpoint is not one of this model and optimizer; the layout may differ")
    assert lacks.startswith("  the checkpoint lacks: model.layers.4.attention.k_proj.weight, model.layers.4.attention.o_proj")
    assert lacks.endswith(" and 15 more")
    assert "model.layers.0.mlp.down.weight is (32, 48) in the checkpoint and (32, 40) here" in shapes
    assert advice == "  try: the model config and the optimizer that it was saved with"
    assert {report["text"].partition(" at ")[0] for report in reports(4)[13]} == {"there is no checkpoint"}


def test_nothing_is_left_beside_a_checkpoint() -> None:
    reports(8)
    assert not [path.name for path in worlds.folder().iterdir() if path.name.startswith(".")]
