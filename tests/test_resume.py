"""Runs that are saved under one layout and go on under another, on other numbers of processes too."""

import json
from pathlib import Path
from typing import Any

import pytest

from processes import python, run, torchrun

pytestmark = pytest.mark.timeout(300)  # one start serves many tests

FSDP4, HSDP, TP_FSDP = {"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 2, "tp_size": 2}
PP_FSDP, PP_TP = {"pp_size": 2, "dp_shard": 2}, {"pp_size": 2, "tp_size": 2}
ALL_OF_THEM = {"pp_size": 2, "dp_shard": 2, "tp_size": 2}
PLAIN = {"shard": False}
Jobs = list[tuple[str, str, Any, dict[str, Any]]]

# What each start of processes does, in this order: later ones read what earlier ones wrote.
STARTS: dict[str, tuple[int, Jobs]] = {
    "one": (1, [
        ("save", "one", None, {}),
        ("save untouched", "new", None, {}),
        ("load", "one", None, {}),
        ("load", "one", {}, {}),
    ]),
    "four": (4, [
        ("load", "one", FSDP4, {}),
        ("load", "new", TP_FSDP, {}),
        ("save", "fsdp4", FSDP4, {}),
        ("load", "fsdp4", TP_FSDP, {}),
        ("load", "fsdp4", HSDP, {}),
        ("load", "fsdp4", PP_FSDP, {}),
        ("save", "pp_fsdp", PP_FSDP, {}),
        ("load", "pp_fsdp", FSDP4, {}),
        ("save", "pp_tp", PP_TP, PLAIN),
        ("refused", "fsdp4", PP_FSDP, {"num_layers": 6, "hidden": 40}),
        ("refused", "new folder", FSDP4, {}),
    ]),
    "two": (2, [
        ("load", "fsdp4", {"dp_shard": 2}, {}),
        ("load", "pp_tp", {"pp_size": 2}, PLAIN),
        ("save", "tp2", {"tp_size": 2}, {}),
        ("save untouched", "new2", {"pp_size": 2}, {}),
    ]),
    "eight": (8, [
        ("load", "tp2", ALL_OF_THEM, {}),
        ("load", "new2", {"dp_replicate": 2, "dp_shard": 4}, {}),
    ]),
    "one again": (1, [
        ("load", "fsdp4", None, {}),
        ("load", "pp_fsdp", None, {}),
        ("load", "pp_tp", {}, {}),
        ("load", "tp2", None, {}),
        ("load", "new2", None, {}),
    ]),
}  # fmt: skip
Reports = list[list[dict[str, Any]]]
"""By job, then by rank."""


def start(name: str, folder: Path) -> Reports:
    size, jobs = STARTS[name]
    app = "resume.py"
    command = python(app, json.dumps(jobs)) if size == 1 else torchrun(size, app, json.dumps(jobs))
    outcome = run(command, folder, deadline=280)
    assert outcome.code == 0, outcome.text
    return list(zip(*(json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(size))))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def one(folder: Path) -> Reports:
    return start("one", folder)


@pytest.fixture(scope="module")
def four(folder: Path, one: Reports) -> Reports:
    return start("four", folder)


@pytest.fixture(scope="module")
def two(folder: Path, four: Reports) -> Reports:
    return start("two", folder)


@pytest.fixture(scope="module")
def eight(folder: Path, two: Reports) -> Reports:
    return start("eight", folder)


@pytest.fixture(scope="module")
def one_again(folder: Path, two: Reports) -> Reports:
    return start("one again", folder)


def check(name: str, reports: Reports) -> None:
    """Every job went on as if nothing had happened."""
    for (action, folder, _, _), ranks in zip(STARTS[name][1], reports):
        for report in ranks:
            if action == "refused":
                continue
            assert report["loss_off"] < 1e-5
            assert report.get("weights_off", 0.0) < 1e-5
            assert report.get("export_off", 0.0) < 1e-5
            if action == "load":
                fresh = folder.startswith("new")
                assert report["extra"]["step"] == (0 if fresh else 2)
                assert report["extra"].get("who") in (None, 0)
                assert report["rates"] == [0.01 if fresh else 0.02]


@pytest.mark.processes
@pytest.mark.parametrize("name", STARTS)
def test_a_resumed_run_goes_on_as_the_uninterrupted_one(name: str, request: pytest.FixtureRequest) -> None:
    check(name, request.getfixturevalue(name.replace(" ", "_")))


@pytest.mark.processes
def test_a_change_of_layout_is_told_once(four: Reports, one: Reports) -> None:
    told = [[report["log"] for report in ranks] for ranks in four]
    assert all(lines == [] for ranks in told for lines in ranks[1:])
    assert told[0][0] == [
        "one: saved under one process, loading under dp_shard=4; dp_world_size was 1 and is 4: samples go to other ranks"
    ]
    assert told[4][0] == ["fsdp4: saved under dp_shard=4, loading under dp_replicate=2 * dp_shard=2"]
    assert [ranks[0]["log"] for ranks in one] == [[], [], [], []]


@pytest.mark.processes
def test_another_model_is_refused_by_every_rank_with_the_same_words(four: Reports) -> None:
    refused = four[9]
    assert {(report["text"], report["kind"], report["kept"]) for report in refused} == {
        (refused[0]["text"], "ConfigurationError", True)
    }
    first, lacks, shapes, advice = refused[0]["text"].splitlines()
    assert first.startswith("the checkpoint is not one of this model and optimizer; the layout may differ")
    assert lacks.startswith("  the checkpoint lacks: model.layers.4.attention.k_proj.weight, model.layers.4.attention.o_proj")
    assert lacks.endswith(" and 15 more")
    assert "model.layers.0.mlp.down.weight is (32, 48) in the checkpoint and (32, 40) here" in shapes
    assert advice == "  try: the model config and the optimizer that it was saved with"
    assert {report["text"].partition(" at ")[0] for report in four[10]} == {"there is no checkpoint"}


@pytest.mark.processes
def test_nothing_is_left_beside_a_checkpoint(one_again: Reports, folder: Path) -> None:
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
