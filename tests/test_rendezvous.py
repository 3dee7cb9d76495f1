"""Where ranks meet without torchrun: addresses, ports that are taken, jobs that must not meet each other."""

import socket
import subprocess
import time
import zlib
from pathlib import Path

import pytest

from hydra_parallelism import LaunchError
from hydra_parallelism.rendezvous import master_address
from hydra_parallelism.world import read
from processes import clean_environment, python, start

SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}


def address(**changes: str) -> tuple[str, list[int]]:
    env = {**SLURM, **changes}
    world = read(env)
    assert world is not None
    return master_address(world, env)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("n[1-2]", "n1"), ("n[03,07-09]", "n03"), ("a,b", "a"), ("gpu-1.cluster,gpu-2.cluster", "gpu-1.cluster"), ("x7", "x7")],
)
def test_the_first_host_of_a_slurm_node_list(nodes: str, host: str) -> None:
    assert address(SLURM_STEP_NODELIST=nodes)[0] == host


def test_ports_are_derived_from_the_job_alone() -> None:
    _, ports = address(SLURM_STEP_NODELIST="n[1-2]")
    assert ports == address(SLURM_STEP_NODELIST="n[1-2]", SLURM_PROCID="3", SLURM_LOCALID="1")[1]
    assert ports != address(SLURM_STEP_NODELIST="n[1-2]", SLURM_STEP_ID="1")[1]
    assert len(set(ports)) == len(ports) > 1
    assert all(20000 <= port < 40000 for port in ports)


def test_what_the_user_says_wins() -> None:
    assert address(MASTER_ADDR="head", MASTER_PORT="1234") == ("head", [1234])
    for wrong in ("abc", "99999", "-1", "²"):
        with pytest.raises(LaunchError, match="is not a port number"):
            address(MASTER_ADDR="head", MASTER_PORT=wrong)


def test_several_nodes_without_an_address_are_refused() -> None:
    env = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    world = read(env)
    assert world is not None
    with pytest.raises(LaunchError, match=r"on 2 nodes, and nothing says where rank 0 is\n  try: set MASTER_ADDR"):
        master_address(world, env)


def first_port(job: int) -> int:
    return 20000 + zlib.crc32(f"SLURM_JOB_ID={job}/SLURM_STEP_ID=0".encode()) % 20000


def start_step(job: int, rank: int, cwd: Path, *arguments: str) -> "subprocess.Popen[str]":
    env = clean_environment(
        SLURM_STEP_ID="0", SLURM_JOB_ID=str(job), SLURM_STEP_NUM_TASKS="2", SLURM_STEP_NUM_NODES="1",
        SLURM_STEP_TASKS_PER_NODE="2", SLURM_NODEID="0", SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank),
    )  # fmt: skip
    return start(python("say.py", "parallelism=fsdp", *arguments), cwd, env=env)


def finish(processes: list["subprocess.Popen[str]"]) -> list[str]:
    try:
        texts = [process.communicate(timeout=90)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(texts)
    return texts


@pytest.mark.processes
def test_a_port_held_by_a_silent_server_is_passed_over(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", first_port(9001))):  # accepts, and never says a word
        texts = finish([start_step(9001, rank, tmp_path, "hydra.run.dir=out") for rank in (0, 1)])
    assert sorted(line.split(" lr")[0] for text in texts for line in text.splitlines() if line.startswith("BODY")) == [
        "BODY rank 0 dp_rank 0 sum 1 [dp_shard=2]",
        "BODY rank 1 dp_rank 1 sum 1 [dp_shard=2]",
    ]


@pytest.mark.processes
def test_two_jobs_with_one_first_port_do_not_meet(tmp_path: Path) -> None:
    other = next(job for job in range(9003, 99999) if first_port(job) == first_port(9002))
    first = start_step(9002, 0, tmp_path, "hydra.run.dir=a", "lr=0.1")
    time.sleep(4)  # its rank 0 serves and waits when the other job comes
    rest = [start_step(other, rank, tmp_path, "hydra.run.dir=b", "lr=0.9") for rank in (0, 1)]
    rest.append(start_step(9002, 1, tmp_path, "hydra.run.dir=a", "lr=0.1"))
    texts = finish([first, *rest])
    assert [text.count("lr 0.1") for text in texts] == [1, 0, 0, 1]
    assert [text.count("lr 0.9") for text in texts] == [0, 1, 1, 0]
    assert len(list(tmp_path.glob("a/ranks/*.log"))) == len(list(tmp_path.glob("b/ranks/*.log"))) == 2
