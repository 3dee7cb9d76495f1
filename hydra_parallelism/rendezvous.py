"""Where the ranks of a job first meet: one key-value store for each job.

Under torchrun the agent serves it. Under srun, submitit and mpirun rank 0 serves it, at an address that every rank can work
out alone. One process needs no network: its store is in memory. Every job in a process gets its own key prefix, because a
second ``init_process_group`` meets the keys of the first one otherwise.
"""

import os
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import cache

import torch.distributed as dist

from .errors import LaunchError
from .world import Launcher, World

__all__ = ["connect", "loopback_only", "master_address", "serves_store"]

_FIRST_PORT, _PORTS = 20000, 20000


def connect(world: World, job: int | str, *, timeout: timedelta) -> dist.Store:
    """The store of a job. Collective when the world has more than one rank.

    Args:
        world: Who takes part.
        job: Number of the job in this process, from 0, or another name for what it is about; equal on all ranks.
        timeout: How long to wait for the store.

    Raises:
        LaunchError: No address can be worked out, or the store cannot be reached.
    """
    if world.size == 1:
        return dist.PrefixStore(f"hydra_parallelism/{job}", dist.HashStore())
    host, port = master_address(world)
    try:
        store = _shared_store(host, port, world.size, serves_store(world), timeout)
    except (RuntimeError, ValueError, OSError) as error:
        raise LaunchError(
            f"rank {world.rank} of {world.size} cannot reach the rendezvous store at {host}:{port} ({world.source()}): {error}"
        ) from error
    return dist.PrefixStore(f"hydra_parallelism/{job}", store)


@cache
def _shared_store(host: str, port: int, size: int, serve: bool, timeout: timedelta) -> dist.Store:
    """One connection for all jobs of this process."""
    return dist.TCPStore(host, port, size, is_master=serve, timeout=timeout, wait_for_workers=False, multi_tenant=serve)


def serves_store(world: World) -> bool:
    """Whether this process serves the store, so that the others need it to stay until they are done."""
    return world.size > 1 and world.rank == 0 and not _agent_serves()


def _agent_serves() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def master_address(world: World, environ: Mapping[str, str] | None = None) -> tuple[str, int]:
    """Host and port at which rank 0 serves the store, the same on every rank.

    ``MASTER_ADDR`` and ``MASTER_PORT`` win. Otherwise the host is the first of the Slurm step's nodes, or this machine when it
    is the only one, and the port is derived from what names the job.

    Raises:
        LaunchError: Several nodes, and nothing says which one is first.
    """
    env = os.environ if environ is None else environ
    host = env.get("MASTER_ADDR") or _first_host(world, env)
    port = env.get("MASTER_PORT") or str(_FIRST_PORT + zlib.crc32(_job_name(world, env).encode()) % _PORTS)
    if not port.isdigit():
        raise LaunchError(f"MASTER_PORT={port!r} is not a port number")
    return host, int(port)


def _first_host(world: World, env: Mapping[str, str]) -> str:
    if world.nnodes == 1:
        return "127.0.0.1"
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    if world.launcher is Launcher.slurm and nodes:
        return _first_of(nodes)
    raise LaunchError(
        f"{world.source()} are on {world.nnodes} nodes, and nothing says where rank 0 is\n"
        "  try: set MASTER_ADDR to the host of rank 0 (and MASTER_PORT), or start with torchrun"
    )


def _first_of(nodes: str) -> str:
    """First host of a Slurm node list: ``n[03-05,9],m1`` starts with ``n03``."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\](.*?)(?:,|$))?", nodes)
    if not match:
        raise LaunchError(f"SLURM_STEP_NODELIST={nodes!r} is not a list of hosts")
    suffix = match[3] if match[2] is not None else ""
    return f"{match[1]}{match[2] or ''}{suffix or ''}"


def _job_name(world: World, env: Mapping[str, str]) -> str:
    names = (
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
        "SUBMITIT_LOCAL_JOB_ID",
        "PMIX_NAMESPACE",
        "OMPI_MCA_ess_base_jobid",
        "PMI_ID",
    )
    return "/".join([world.launcher.value, *(f"{name}={env[name]}" for name in names if name in env)])


@contextmanager
def loopback_only(world: World) -> Iterator[None]:
    """Let gloo listen on the loopback interface alone while groups are made, when the launcher says all ranks are here.

    A job on one machine then opens no port that another machine could reach, and needs no host name that resolves.
    """
    alone = world.size == 1 or (world.nnodes == 1 and "local_size" in world.sources)
    if not alone or "GLOO_SOCKET_IFNAME" in os.environ or not os.path.isdir("/sys/class/net/lo"):
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        yield
    finally:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
