"""On a real Slurm of four nodes (tests/clusters/slurm): srun, sbatch, salloc, and submitit's Slurm executor."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from console import blocks, console, copy_of_the_app, missing
from processes import APPS, body_lines, clean_environment, run

CLUSTERS = Path(__file__).parent / "clusters"
MISSING = [
    name for name in ("slurmctld", "slurmd", "munged") if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None
]

pytestmark = [
    pytest.mark.processes,
    pytest.mark.xdist_group("slurm"),  # one cluster, whose four nodes are taken by one test at a time
    pytest.mark.skipif(os.geteuid() != 0 or bool(MISSING), reason=f"needs root and slurm-wlm, munge: no {MISSING}"),
]
SRUN, SBATCH, SUBMITIT = console("howto/slurm.md")
"""What docs/howto/slurm.md types."""
SAY = APPS / "say.py"
FEW = ("train.steps=3", "train.log_every=1")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder = tmp_path_factory.mktemp("slurm")
    said = subprocess.run([CLUSTERS / "slurm", "up", folder], check=True, timeout=60, capture_output=True, text=True)
    stand_ins = folder / "bin"
    stand_ins.mkdir()
    shutil.copy(CLUSTERS / "sacct", stand_ins / "sacct")
    env = clean_environment(SLURM_CONF=said.stdout.split()[-1])
    try:
        yield {**env, "PATH": f"{stand_ins}:{env['PATH']}"}
    finally:
        subprocess.run([CLUSTERS / "slurm", "down", folder], check=True, timeout=60)


def the_record(cwd: Path, pattern: str = "outputs/*/*") -> dict:
    folders = list(cwd.glob(pattern))
    assert len(folders) == 1, folders
    assert len(list(folders[0].glob("ranks/*.log"))) == 4
    return yaml.safe_load((folders[0] / ".hydra/parallelism.yaml").read_text())


def wait_for(path: Path, deadline: float) -> None:
    began = time.monotonic()
    while not path.exists():
        assert time.monotonic() - began < deadline, f"no {path.name} after {deadline:g} s"
        time.sleep(0.2)


def test_srun_is_hsdp_with_replicas_across_nodes(cluster: dict[str, str], tmp_path: Path) -> None:
    outcome = run([*SRUN.to_run(), *FEW], copy_of_the_app(tmp_path), env=cluster, deadline=120)
    assert outcome.code == 0, outcome.text
    assert not missing(SRUN.shown, outcome.text), outcome.text
    assert "dp_replicate=2 * dp_shard=2 = 4 process(es) on 2 nodes (SLURM_STEP_NUM_TASKS=4 (srun))" in outcome.text
    assert outcome.text.count("step 3/3 loss") == 1
    record = the_record(tmp_path)
    assert [(row["dp_replicate"], row["dp_shard"]) for row in record["ranks"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert record["world"]["nnodes"] == 2


def test_the_batch_script_of_the_page(cluster: dict[str, str], tmp_path: Path) -> None:
    (script,) = (text for language, text in blocks("howto/slurm.md") if language == "bash")
    few = f"{sys.executable} examples/train.py {' '.join(FEW)} hydra.run.dir=out"
    job = copy_of_the_app(tmp_path) / SBATCH.words[-1]
    job.write_text(f"{script.replace('python examples/train.py', few).rstrip()}\necho $? > code && mv code done\n")
    outcome = run(SBATCH.to_run(), tmp_path, env=cluster)
    assert outcome.code == 0, outcome.text
    wait_for(tmp_path / "done", deadline=120)
    text = (tmp_path / "log.txt").read_text()
    assert (tmp_path / "done").read_text() == "0\n", text
    assert "dp_replicate=2 * dp_shard=2 = 4 process(es) on 2 nodes (SLURM_STEP_NUM_TASKS=4 (srun))" in text
    assert text.count("step 3/3 loss") == 1


def test_a_failure_under_srun_is_told_once_by_its_rank(cluster: dict[str, str], tmp_path: Path) -> None:
    command = ["srun", "-n", "4", "--kill-on-bad-exit=1", sys.executable, APPS / "fate.py", "parallelism=fsdp", "fate=raise"]
    outcome = run(command, tmp_path, env=cluster, deadline=90)
    assert outcome.code != 0
    assert outcome.text.count("ValueError: boom-2") == 1
    assert "rank 2 failed (dp_shard=2), its log:" in outcome.text


def test_degrees_that_do_not_fit_a_step(cluster: dict[str, str], tmp_path: Path) -> None:
    command = ["srun", "-N", "2", "-n", "4", sys.executable, SAY, "parallelism.dp_shard=3"]
    outcome = run(command, tmp_path, env=cluster, deadline=90)
    assert outcome.code != 0
    assert outcome.text.count("= 3, but SLURM_STEP_NUM_TASKS=4 (srun)") == 1
    assert not body_lines(outcome)


def test_a_step_of_one_task_may_start_its_own(cluster: dict[str, str], tmp_path: Path) -> None:
    outcome = run(["srun", "-n", "1", sys.executable, SAY, "parallelism.dp_shard=2"], tmp_path, env=cluster)
    assert outcome.code == 0, outcome.text
    assert "starting 2 processes" in outcome.text


@pytest.mark.parametrize("shell", ["sbatch", "salloc"])
def test_without_srun_an_allocation_is_no_launch(shell: str, cluster: dict[str, str], tmp_path: Path) -> None:
    alone = f"{sys.executable} {SAY} parallelism=fsdp hydra.run.dir=alone"
    four = f"{sys.executable} {SAY} parallelism=fsdp parallelism.dp_shard=4 hydra.run.dir=four"
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\ncd {tmp_path}\n{alone} && {four}\necho $? > code && mv code done\n")
    script.chmod(0o755)
    if shell == "sbatch":  # its own --wait asks every 40 s
        outcome = run(["sbatch", "-n", "4", "--output=log.txt", script], tmp_path, env=cluster)
        wait_for(tmp_path / "done", deadline=120)
        text = (tmp_path / "log.txt").read_text()
    else:
        outcome = run(["salloc", "-n", "4", script], tmp_path, env=cluster)
        text = outcome.text
    assert outcome.code == 0, text
    assert (tmp_path / "done").read_text() == "0\n", text
    assert "starting 4 processes" in text
    assert text.count("starting") == 1
    assert not (tmp_path / "alone/ranks").exists()
    assert len(list((tmp_path / "four/ranks").iterdir())) == 4


@pytest.mark.skipif(find_spec("submitit") is None, reason="hydra-submitit-launcher is not installed (no release for Hydra 1.4)")
def test_submitit_slurm_from_a_login_shell(cluster: dict[str, str], tmp_path: Path) -> None:
    """Nodes and tasks come from the topology: 4 processes at 2 on a node."""
    command = [*SUBMITIT.to_run(), *FEW, "hydra.launcher.mem_gb=null", "hydra.sweep.dir=sweep"]
    began = time.monotonic()
    outcome = run(command, copy_of_the_app(tmp_path), env=cluster, deadline=170)
    assert outcome.code == 0, outcome.text
    record = the_record(tmp_path, "sweep/0")
    assert (record["world"]["nnodes"], record["world"]["launcher"]) == (2, "srun")
    assert (record["degrees"]["dp_replicate"], record["degrees"]["dp_shard"]) == (2, 2)
    assert time.monotonic() - began < 170
