"""``parallelism.dry_run=true``: the report in place of the job, for a plain run, under torchrun and in sweeps."""

import sys
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra import compose, initialize
from omegaconf import DictConfig

import hydra_parallelism as hp
from hydra_parallelism import ConfigurationError, Topology, dry_run, record
from processes import ROOT, Outcome, python, run, torchrun

VERSION: dict[str, Any] = {"version_base": None} if hydra.__version__.startswith("1.3") else {}
DRY = "parallelism.dry_run=true"


def config(*words: str) -> DictConfig:
    with initialize(config_path="apps/conf", **VERSION):
        return compose("say", overrides=[DRY, *words], return_hydra_config=True)


@pytest.mark.parametrize(
    ("words", "topology", "nodes", "per_node", "source"),
    [
        (["parallelism=fsdp", "hydra.launcher.nproc_per_node=4"], Topology(dp_shard=4), 1, 4,
         "hydra.launcher.nproc_per_node=4"),
        (["parallelism.tp_size=2", "parallelism.dp_shard=3"], Topology(tp=2, dp_shard=3), 1, 6,
         "world_size=6 (product of the degrees)"),
        (["parallelism=hsdp", "parallelism.world_size=512", "hydra.launcher.nproc_per_node=8"],
         Topology(dp_replicate=64, dp_shard=8), 64, 8, "parallelism.world_size=512"),
        (["parallelism=hsdp", "hydra.launcher.nnodes=2", "hydra.launcher.nproc_per_node=4"],
         Topology(dp_replicate=2, dp_shard=4), 2, 4, "hydra.launcher.nproc_per_node=4 * hydra.launcher.nnodes=2"),
        (["parallelism=fsdp", "parallelism.world_size=4", "hydra/launcher=basic"], Topology(dp_shard=4), 1, 4,
         "parallelism.world_size=4"),
    ],
)  # fmt: skip
def test_the_processes_that_would_be_started(
    words: list[str], topology: Topology, nodes: int, per_node: int, source: str
) -> None:
    case, said = dry_run.describe(config(*words))
    assert (case.topology, case.machine.nodes, case.machine.per_node) == (topology, nodes, per_node)
    assert said == f"dry run, nothing is started: {source}"


def test_the_processes_that_were_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 1, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4, "GROUP_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    case, said = dry_run.describe(config("parallelism=hsdp"))
    assert (case.topology, said) == (
        Topology(dp_replicate=2, dp_shard=4),
        "dry run, nothing is started: WORLD_SIZE=8 (environment variables)",
    )
    case, said = dry_run.describe(config("parallelism=hsdp", "parallelism.world_size=32"))  # counts, whoever launched
    assert (case.topology, case.machine.nodes) == (Topology(dp_replicate=8, dp_shard=4), 8)
    assert said == "dry run, nothing is started: parallelism.world_size=32"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["hydra/launcher=basic"], "BasicLauncher would start the jobs of the sweep\n  try: hydra/launcher=torchrun"),
        (["hydra.sweeper._target_=other.Sweeper"],
         "parallelism.dry_run=true: other.Sweeper chooses jobs by what others return, and a dry run returns nothing\n"
         "  try: one of its jobs, without -m"),
    ],
)  # fmt: skip
def test_sweeps_that_somebody_else_runs(words: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        dry_run.refuse_sweep(config(*words))
    assert message in str(error.value)
    dry_run.refuse_sweep(config("hydra/launcher=basic", "hydra/sweeper=layouts"))  # ours starts nothing


def test_a_job_that_has_started_is_not_dry() -> None:
    with pytest.raises(ConfigurationError, match=r"parallelism\.dry_run=true: this job has started already"):
        hp.init({"dry_run": True})
    hp.shutdown()


@pytest.mark.processes
def test_a_plain_run(tmp_path: Path) -> None:
    outcome = run(
        [sys.executable, "-W", "error", ROOT / "examples/train.py", "parallelism=hsdp", DRY, "parallelism.world_size=8",
         "hydra.launcher.nproc_per_node=4"],
        tmp_path,
    )  # fmt: skip
    assert outcome.code == 0, outcome.text
    assert outcome.text.startswith(
        "dry run, nothing is started: parallelism.world_size=8\ndp_replicate=2 * dp_shard=4 = 8 ranks on 2 nodes of 4\n"
    )
    assert outcome.text.endswith("no warnings\n")
    assert list(tmp_path.iterdir()) == []  # no folder either


@pytest.mark.processes
def test_a_refusal(tmp_path: Path) -> None:
    outcome = run(python("say.py", "parallelism.tp_size=3", DRY, "parallelism.world_size=8"), tmp_path)
    assert outcome.code == 1
    assert "tp_size=3 = 3, but parallelism.world_size=8\n  try: parallelism.tp_size=8, or start 3 processes" in outcome.text
    assert "BODY" not in outcome.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
def test_one_report_under_torchrun(tmp_path: Path) -> None:
    outcome = run(torchrun(2, "say.py", "parallelism=fsdp", DRY), tmp_path)
    assert outcome.code == 0, outcome.text
    assert outcome.text.count("dp_shard=2 = 2 ranks on 1 node of 2\n") == 1
    assert "BODY" not in outcome.text
    assert list(tmp_path.iterdir()) == []


def reports(outcome: Outcome) -> list[str]:
    return [line for line in outcome.text.splitlines() if " = " in line and " on 1 node of " in line]


@pytest.mark.processes
def test_each_job_of_a_sweep_reports(tmp_path: Path) -> None:
    words = ["-m", "parallelism=fsdp,tp", DRY, "hydra.launcher.nproc_per_node=4", "hydra.sweep.dir=swept"]
    outcome = run(python("say.py", *words), tmp_path)
    assert outcome.code == 0, outcome.text
    assert reports(outcome) == ["dp_shard=4 = 4 ranks on 1 node of 4", "tp=4 = 4 ranks on 1 node of 4"]
    assert "BODY" not in outcome.text
    assert "Launching" not in outcome.text
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert files == ["swept/0/parallelism.txt", "swept/1/parallelism.txt", "swept/multirun.yaml"]
    assert (tmp_path / "swept/1/parallelism.txt").read_text().startswith("tp=4 = 4 ranks")


@pytest.mark.processes
def test_a_sweep_over_layouts_leaves_nothing(tmp_path: Path) -> None:
    words = [
        "-m",
        DRY,
        "hydra/sweeper=layouts",
        "hydra.sweeper.axes=[dp_replicate,dp_shard]",
        "hydra.launcher.nproc_per_node=2",
    ]
    outcome = run(python("say.py", *words), tmp_path)
    assert outcome.code == 0, outcome.text
    assert outcome.text.startswith("layouts: 2 to run\n")
    assert reports(outcome) == ["dp_replicate=2 = 2 ranks on 1 node of 2", "dp_shard=2 = 2 ranks on 1 node of 2"]
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_is_dry_as_a_whole() -> None:
    dry_run.check_sweep(config(), "parallelism")
    with pytest.raises(ConfigurationError, match=r"not for some of its jobs\n  try: parallelism\.dry_run=true"):
        dry_run.check_sweep(config("parallelism.dry_run=false"), "parallelism")


def test_a_simulated_world_is_reported(tmp_path: Path) -> None:
    words = (
        "parallelism=hsdp",
        "parallelism.simulate.world_size=64",
        "parallelism.simulate.rank=9",
        "parallelism.dry_run=true",
    )
    outcome = run(python("say.py", *words), tmp_path)
    assert outcome.code == 0, outcome.text
    assert "dry run, nothing is started: parallelism.simulate.world_size=64\n" in outcome.text
    assert "dp_replicate=8 * dp_shard=8 = 64 ranks on 8 nodes of 8" in outcome.text
    assert "groups of rank 9" in outcome.text


def test_the_record_says_when_ranks_are_placed_otherwise() -> None:
    assert record._judge_placement(dict(enumerate("aabb")), 2) == ""
    assert record._judge_placement({0: "a"}, 1) == ""
    assert record._judge_placement(dict(enumerate("abab")), 2) == (
        "warning: ranks are not on nodes in blocks of 2, as this report takes them to be: rank 1 is on b, rank 0 on a; "
        "see parallelism.yaml\n"
    )
