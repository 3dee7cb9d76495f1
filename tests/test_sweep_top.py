"""``hydra.sweeper.top``: a sweep of the best layouts by estimate."""

import csv
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from hydra_parallelism import ConfigurationError
from hydra_parallelism.best import read_estimator
from hydra_parallelism.plan import cli
from hydra_parallelism.sweeper_config import EstimatesConfig, LayoutsConfig
from processes import ROOT, run

pytestmark = pytest.mark.processes

TRAIN = [sys.executable, str(ROOT / "examples/train.py"), "-m", "+sweep=layouts", "hydra.sweep.dir=sweep"]
TWO = ("hydra.launcher.nproc_per_node=2", "train.steps=1")
SHAPE = {"hidden": 64, "layers": 2, "heads": 4, "ffn": 256, "vocab": 256, "sequence": 64}
TINY = {**SHAPE, "gated": "false", "positions": "true", "batch": 16}


def test_only_the_best_are_run_and_a_second_time_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The order is that of ``plan --rank``."""
    words = [f"model.{name}={value}" for name, value in TINY.items()]
    others = [f"parallelism.{axis}=1" for axis in ("pp_size", "context_parallel.ring_degree")]
    assert cli.main(["plan", "--rank", "--format", "json", "parallelism.world_size=2", *words, *others]) == 0
    ranked = json.loads(capsys.readouterr().out)["layouts"]
    expected = [each["layout"] for each in ranked if re.match(r"dp_|tp_", each["layout"])][:2]
    assert len(expected) == 2

    outcome = run([*TRAIN, *TWO, "hydra.sweeper.top=2"], tmp_path)
    assert outcome.code == 0, outcome.text
    assert "layouts: 2 to run, 1 slower by estimate\n" in outcome.text
    with open(tmp_path / "sweep/results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    names = ("dp_replicate", "dp_shard", "tp_size")
    assert [" ".join(f"{name}={row[name]}" for name in names if row[name] != "1") for row in rows] == expected
    assert [row["status"] for row in rows] == ["ok", "ok"]

    again = run([*TRAIN, *TWO, "hydra.sweeper.top=2"], tmp_path)
    assert again.code == 0, again.text
    assert "layouts: 0 to run, 2 with a result already, 1 slower by estimate\n" in again.text


def test_what_does_not_fit_into_memory_is_not_run(tmp_path: Path) -> None:
    outcome = run([*TRAIN, *TWO, "hydra.sweeper.top=2", "+hydra.sweeper.plan.world.memory_gb=0.001"], tmp_path)
    assert outcome.code == 1
    assert "layouts: 0 to run, 3 too large or impossible by estimate\n" in outcome.text
    assert re.search(
        r"nothing to run: a rank needs \d\.\d GB by estimate, but hydra.sweeper.plan.world.memory_gb=0.001", outcome.text
    )


@pytest.mark.parametrize(
    ("options", "model", "world", "message"),
    [
        ({"top": 0}, {}, {}, "hydra.sweeper.top=0: must be at least 1, or null for all"),
        (
            {"top": 2, "max_jobs": 3}, {}, {},
            "hydra.sweeper.top=2 and hydra.sweeper.max_jobs=3: the best are not among the first\n"
            "  try: hydra.sweeper.max_jobs=null",
        ),
        (
            {"top": 2}, {}, {},
            "hydra.sweeper.top=2 needs the shape of the model: hydra.sweeper.plan.model.hidden, layers, heads, ffn, vocab, "
            "sequence\n  try: hydra.sweeper.plan.model.hidden=4096",
        ),
        (
            {"top": 2}, SHAPE, {},
            "hydra.sweeper.top=2 compares layouts at the same work, and hydra.sweeper.plan.model.batch is not set: the "
            "sequences of a step of the optimizer over all ranks\n  try: hydra.sweeper.plan.model.batch=1024",
        ),
        ({"top": 2}, {"width": 64}, {}, "hydra.sweeper.plan.model is not valid: Key 'width' not in 'ModelConfig'"),
        (
            {"top": 2}, {**SHAPE, "batch": 16}, {"tflops": 0},
            "hydra.sweeper.plan.world is not valid:\n  hydra.sweeper.plan.world.tflops=0.0: must be above 0",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_told(options: dict[str, Any], model: dict[str, Any], world: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        read_estimator(LayoutsConfig(**options, plan=EstimatesConfig(model, world)))
    assert str(error.value).startswith(message)
