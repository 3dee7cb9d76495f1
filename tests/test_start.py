"""Starting a Hydra app on real processes: torchrun, variables of other launchers, one process; and refusing to start."""

import shutil
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from hydra_parallelism import resolve
from processes import Outcome, body_lines, clean_environment, python, run, start, torchrun

pytestmark = pytest.mark.processes


def ranks(outcome: Outcome) -> list[str]:
    assert outcome.code == 0, outcome.text
    return body_lines(outcome)


def test_torchrun_builds_the_meshes_of_hsdp(tmp_path: Path) -> None:
    outcome = run(torchrun(4, "say.py", "parallelism=hsdp", "parallelism.dp_replicate=2"), tmp_path)
    assert ranks(outcome) == [f"BODY rank {r} dp_rank {r} sum 6 [dp_replicate=2 dp_shard=2] lr 0.1" for r in range(4)]
    assert outcome.text.count("topology: dp_replicate=2 * dp_shard=2 = 4 process(es) (WORLD_SIZE=4 (torchrun))") == 1


def test_an_untouched_config_is_ddp_over_all_processes(tmp_path: Path) -> None:
    outcome = run(torchrun(4, "say.py"), tmp_path)
    assert ranks(outcome) == [f"BODY rank {r} dp_rank {r} sum 6 [dp_replicate=4] lr 0.1" for r in range(4)]
    assert outcome.text.count("no degree is set, so DDP over all of them") == 1


def test_one_process_needs_no_launcher(tmp_path: Path) -> None:
    outcome = run(python("say.py", "parallelism=fsdp"), tmp_path)
    assert ranks(outcome) == ["BODY rank 0 dp_rank 0 sum 0 [] lr 0.1"]


def test_a_preset_of_the_users_own_starts_from_ours(tmp_path: Path) -> None:
    outcome = run(torchrun(2, "say.py", "parallelism=mine"), tmp_path)
    assert [line.split("[")[1] for line in ranks(outcome)] == ["dp_replicate=2] lr 0.1"] * 2


SLURM_STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4",
    "SLURM_NODEID": "0",
}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "prterun-vm-77@1"}


def by_hand(variables: dict[str, str], of_rank: dict[str, str], tmp_path: Path, *arguments: str) -> list[Outcome]:
    """Start four processes as a launcher would, with its variables, and wait for all."""
    began = time.monotonic()
    started: list[subprocess.Popen[str]] = []
    for rank in range(4):
        own = {name: text.format(rank=rank) for name, text in of_rank.items()}
        command = python("say.py", *arguments, f"hydra.run.dir={tmp_path}/out")
        started.append(start(command, tmp_path, env=clean_environment(**variables, **own)))
    try:
        texts = [process.communicate(timeout=90)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [Outcome(t, p.returncode, time.monotonic() - began) for t, p in zip(texts, started, strict=True)]


@pytest.mark.parametrize(
    ("variables", "of_rank", "source"),
    [
        (SLURM_STEP, {"SLURM_PROCID": "{rank}", "SLURM_LOCALID": "{rank}"}, "SLURM_STEP_NUM_TASKS=4 (srun)"),
        (
            OPEN_MPI,
            {"OMPI_COMM_WORLD_RANK": "{rank}", "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}"},
            "OMPI_COMM_WORLD_SIZE=4 (mpirun)",
        ),
        (
            {"SUBMITIT_LOCAL_NTASKS": "4", "SUBMITIT_LOCAL_JOB_NUM_NODES": "1", "SUBMITIT_LOCAL_JOB_ID": "5151"},
            {"SUBMITIT_LOCAL_GLOBALID": "{rank}", "SUBMITIT_LOCAL_LOCALID": "{rank}", "SUBMITIT_LOCAL_NODEID": "0"},
            "SUBMITIT_LOCAL_NTASKS=4 (submitit)",
        ),
    ],
    ids=["srun", "mpirun", "submitit"],
)
def test_other_launchers_variables(variables: dict[str, str], of_rank: dict[str, str], source: str, tmp_path: Path) -> None:
    outcomes = by_hand(variables, of_rank, tmp_path, "parallelism=fsdp", "parallelism.tp_size=2")
    assert [o.code for o in outcomes] == [0] * 4, "\n".join(o.text for o in outcomes)
    sums = [sorted(body_lines(o)) for o in outcomes]
    assert sums == [[f"BODY rank {r} dp_rank {r // 2} sum {2 + 2 * (r % 2)} [dp_shard=2 tp=2] lr 0.1"] for r in range(4)]
    assert source in outcomes[0].text


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs openmpi-bin")
def test_a_real_mpirun(tmp_path: Path) -> None:
    front = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "4"]
    outcome = run([*front, *python("say.py", "parallelism=fsdp", "parallelism.tp_size=2")], tmp_path)
    assert len(ranks(outcome)) == 4
    assert "dp_shard=2 * tp=2 = 4 process(es) (OMPI_COMM_WORLD_SIZE=4 (mpirun))" in outcome.text
    assert len(list(tmp_path.glob("outputs/*/*/ranks/*.log"))) == 4
    assert "frame #" not in outcome.text, "torch's C++ backtraces while ranks look for each other"


def test_a_refusal_of_srun_tasks_is_printed_once(tmp_path: Path) -> None:
    of_rank = {"SLURM_PROCID": "{rank}", "SLURM_LOCALID": "{rank}"}
    outcomes = by_hand({**SLURM_STEP, "SLURM_JOB_ID": "4712"}, of_rank, tmp_path, "parallelism.dp_shard=3")
    assert [o.code for o in outcomes] == [1] * 4
    everything = "\n".join(o.text for o in outcomes)
    assert everything.count("parallelism does not fit the world") == 1
    assert "but SLURM_STEP_NUM_TASKS=4 (srun)" in everything


def test_degrees_that_do_not_fit_stop_every_rank_with_one_message(tmp_path: Path) -> None:
    outcome = run(torchrun(4, "say.py", "parallelism.dp_shard=3"), tmp_path)
    assert outcome.code != 0
    assert not body_lines(outcome)
    assert outcome.text.count("parallelism does not fit the world") == 1
    assert (
        "  pp_size=1 * dp_replicate=1 * dp_shard=3 * cfg_parallel=1 * ring_degree=1 * ulysses_degree=1 * tp_size=1 = 3, "
        "but WORLD_SIZE=4 (torchrun)\n  try: parallelism.dp_shard=4, or start 3 processes"
    ) in outcome.text


@pytest.mark.parametrize(
    ("odd", "sides"),
    [
        # fits the world too: only the comparison can notice
        ("parallelism.context_parallel.ring_degree=2", ("context_parallel.ring_degree=1", "context_parallel.ring_degree=2")),
        # does not fit: the odd rank refuses by itself and takes the others along
        ("parallelism.tp_size=3", ("tp_size=3", "WORLD_SIZE=4")),
    ],
)
def test_ranks_that_disagree_are_told_both_sides(odd: str, sides: tuple[str, str], tmp_path: Path) -> None:
    env = clean_environment(ODD_RANK="2", ODD_OVERRIDE=odd)
    outcome = run(torchrun(4, "say.py", "parallelism=fsdp"), tmp_path, env=env)
    assert outcome.code != 0
    assert not body_lines(outcome)
    assert all(side in outcome.text for side in sides), outcome.text
    if "ring" in odd:
        assert outcome.text.count("ranks disagree:\n  rank 0 has parallelism.context_parallel.ring_degree=1") == 1
        assert "  rank 2 has parallelism.context_parallel.ring_degree=2" in outcome.text


def test_a_sweep_in_one_process_fails_only_the_job_that_does_not_fit(tmp_path: Path) -> None:
    outcome = run(python("say.py", "-m", "parallelism.dp_shard=1,0,-1", "hydra/launcher=basic"), tmp_path)
    assert outcome.code == 1
    assert len(body_lines(outcome)) == 2
    assert "parallelism.dp_shard=0: must be a whole number" in outcome.text
    assert sorted(p.parent.parent.name for p in tmp_path.glob("multirun/*/*/*/.hydra/parallelism.yaml")) == ["0", "2"]


def test_a_failing_task_is_still_torn_down(tmp_path: Path) -> None:
    outcome = run(torchrun(2, "say.py", "fail=boom"), tmp_path)
    assert outcome.code != 0
    assert outcome.seconds < 60
    assert "destroy_process_group() was not called" not in outcome.text
    assert "ValueError: boom" in outcome.text


def test_the_record_says_what_the_run_used(tmp_path: Path) -> None:
    ranks(run(torchrun(4, "say.py", "parallelism=hsdp", "parallelism.dp_replicate=2", "hydra.run.dir=out"), tmp_path))
    text = (tmp_path / "out/.hydra/parallelism.yaml").read_text()
    assert "${" not in text
    assert "-1" not in text
    report = (tmp_path / "out/.hydra/parallelism.txt").read_text()
    assert report.startswith("dp_replicate=2 * dp_shard=2 = 4 ranks on 1 node of 4\n")
    assert report.endswith("no warnings\n")
    record = yaml.safe_load(text)
    assert record["degrees"] == {
        "pp": 1, "dp_replicate": 2, "dp_shard": 2, "cfg": 1, "ring": 1, "ulysses": 1, "tp": 1, "ep": 1
    }  # fmt: skip
    assert [(row["rank"], row["dp_replicate"], row["dp_shard"], row["dp_rank"]) for row in record["ranks"]] == [
        (0, 0, 0, 0), (1, 0, 1, 1), (2, 1, 0, 2), (3, 1, 1, 3)
    ]  # fmt: skip
    again = resolve({"dp_replicate": 2, "dp_shard": 2}, record["world"]["size"])
    assert again.degrees() == record["degrees"]
    assert yaml.safe_load((tmp_path / "out/.hydra/config.yaml").read_text())["parallelism"]["dp_shard"] == -1


def test_login_node_answers_without_a_launcher(tmp_path: Path) -> None:
    command = python("say.py", "parallelism=fsdp", "parallelism.world_size=64", "+shards='${parallelism:dp_shard}'")
    outcome = run([*command, "--cfg", "job", "--resolve"], tmp_path)
    assert outcome.code == 0, outcome.text
    assert "shards: 64" in outcome.text
