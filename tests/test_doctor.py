"""hydra-parallelism doctor: real environments, real processes, and an end that is certain."""

import os
import resource
import socket
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest

from hydra_parallelism.doctor import rehearsal, software, surroundings
from hydra_parallelism.doctor.findings import Finding, Level, bad, collect, ok, within
from processes import Outcome, clean_environment, run

DOCTOR = [sys.executable, "-m", "hydra_parallelism.plan", "doctor"]


def lines(*checks: object) -> list[str]:
    return [str(finding) for finding in collect(*checks)]  # type: ignore[arg-type]


def of_level(outcome: Outcome, level: str) -> list[str]:
    return [line for line in outcome.text.splitlines() if line.startswith(level)]


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_sound_machine(tmp_path: Path) -> None:
    outcome = run([*DOCTOR, "--processes", "3"], tmp_path, deadline=280, env=clean_environment(RANK="0", WORLD_SIZE="1"))
    assert outcome.code == 0, outcome.text
    assert of_level(outcome, "bad") == []
    found = outcome.text.splitlines()
    for begin in ("python ", "hydra-core ", "omegaconf ", "torch ", "Hydra finds the plugin", "backends: gloo"):
        assert any(line.startswith(f"ok    {begin}") for line in found), begin
    assert "ok    variables of torch (set by hand or left over): RANK=0 WORLD_SIZE=1" in found
    assert any(line.startswith("ok    an all-reduce over 3 local process(es) works (gloo, ") for line in found)
    assert found[-1].startswith("0 bad, ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_an_interface_that_is_not_there(tmp_path: Path) -> None:
    outcome = run(DOCTOR, tmp_path, deadline=280, env=clean_environment(GLOO_SOCKET_IFNAME="nope0"))
    assert outcome.code == 1
    first, second = of_level(outcome, "bad")
    assert first.startswith("bad   GLOO_SOCKET_IFNAME=nope0: there is no such interface, but ")
    assert second.startswith("bad   an all-reduce over 2 local process(es) failed with status 1: ")
    assert "nope0" in second


def test_what_does_not_end_is_ended(tmp_path: Path) -> None:
    began = time.monotonic()
    [finding] = rehearsal.all_reduce(2, 0.5)
    assert time.monotonic() - began < 10
    assert str(finding) == (
        "bad   an all-reduce over 2 local process(es) did not end within 0.5 s; try: what is bad above, or --deadline 1"
    )


def test_a_left_over_rank_and_a_step_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}.items():
        monkeypatch.setenv(name, value)
    assert lines(surroundings.launchers) == [
        "ok    variables of torch (set by hand or left over): RANK=1 WORLD_SIZE=4",
        "ok    variables of srun: SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_PROCID=0",
        "ok    this is rank 1 of 4, as torch (set by hand or left over) has it",
        "warn  torch (set by hand or left over) wins over srun, whose variables are set as well; "
        "try: unset RANK WORLD_SIZE if they are left over",
        "warn  RANK and WORLD_SIZE are set and not by torchrun: python train.py here waits for 3 other rank(s); "
        "try: unset RANK WORLD_SIZE",
    ]


def test_an_allocation_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert lines(surroundings.launchers) == [
        "ok    SLURM_JOB_ID=7, but no step: one process of an allocation; srun starts the tasks",
        "ok    nobody has launched this process: python train.py starts the processes that the degrees ask for",
    ]


def test_variables_that_contradict_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert lines(surroundings.launchers) == [
        "bad   WORLD_SIZE=4 is set but RANK is not, so the place of this process is unknown; "
        "try: unset WORLD_SIZE, or start with torchrun"
    ]


def test_where_processes_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surroundings, "_LOOK_UP_S", 20.0)
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    monkeypatch.setenv("MASTER_PORT", "port")
    assert lines(surroundings.meeting_place) == [
        "bad   MASTER_ADDR=no-such-host.invalid does not resolve (within 20 s); try: unset MASTER_ADDR, or the host of rank 0",
        "bad   MASTER_PORT=port is not a port; try: unset MASTER_PORT",
    ]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        port = server.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        assert lines(surroundings.meeting_place) == [
            f"warn  MASTER_PORT={port} is taken on this machine, by a job that runs or is left over; "
            "try: another port, or unset MASTER_PORT"
        ]
    assert lines(surroundings.meeting_place) == []


def test_limits_of_a_small_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(surroundings, "_CORES", 1)
    stat = namedtuple("stat", "f_bavail f_frsize")
    monkeypatch.setattr(os, "statvfs", lambda path: stat(1 << 14, 1 << 12))  # 64 MiB, as Docker gives
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        threads, memory, files = lines(surroundings.limits)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert threads.startswith("warn  OMP_NUM_THREADS is not set: under srun or mpirun each process uses all ")
    assert memory.startswith(
        "warn  /dev/shm has 0.1 GiB free: workers of data loaders and NCCL pass data through it; try: docker"
    )
    assert files.startswith("warn  ulimit -n is 256: ")


def test_accelerate_behind_the_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert lines(surroundings.strangers) == [
        "warn  accelerate is configured behind the config's back: ACCELERATE_USE_FSDP=true FSDP_VERSION=2; "
        "try: unset ACCELERATE_USE_FSDP FSDP_VERSION"
    ]


@pytest.mark.parametrize(("address", "says"), [(None, "does not resolve"), ("127.0.1.1", "is the loopback address 127.0.1.1")])
def test_the_name_of_the_machine(monkeypatch: pytest.MonkeyPatch, address: str | None, says: str) -> None:
    def look_up(name: str, port: None) -> list[tuple[object, ...]]:
        if address is None:
            raise socket.gaierror
        return [(None, None, None, "", (address, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    [line] = lines(surroundings.names)
    assert line.startswith(f"warn  the host name {socket.gethostname()} {says}")


def test_a_version_that_is_too_old() -> None:
    from packaging.specifiers import SpecifierSet

    assert str(software._judge("torch", "2.4.0", SpecifierSet(">=2.13"))) == (
        "bad   torch 2.4.0 is not >=2.13; try: pip install 'torch>=2.13'"
    )
    assert software._judge("hydra-core", "1.4.0rc3", SpecifierSet(">=1.3.2,<1.5")).level is Level.ok


def test_a_check_that_breaks_is_a_finding() -> None:
    def lungs() -> Iterator[Finding]:
        yield ok("left")
        raise ValueError("right\nmore")

    assert lines(lungs) == ["ok    left", "bad   lungs could not be looked at: ValueError: right; try: repair that first"]
    assert bad("a", "b").level is Level.bad
    assert within(0.05, lambda: time.sleep(1)) is None
