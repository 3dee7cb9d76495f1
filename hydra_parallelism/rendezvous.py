"""Where the ranks of a job first meet: one key-value store for each job.

Under torchrun the agent serves it. Under srun, submitit and mpirun rank 0 serves it, at an address that every rank can work
out alone. One process needs no network: its store is in memory. Every job in a process gets its own key prefix, because a
second ``init_process_group`` meets the keys of the first one otherwise.
"""

import errno
import os
import re
import socket
import threading
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from .errors import LaunchError
from .world import Launcher, World

__all__ = ["connect", "loopback_only", "master_address", "serves_store"]

_FIRST_PORT, _PORTS, _TRIES = 20000, 20000, 8
_ONE_TRY = timedelta(seconds=5)


def connect(world: World, job: int | str, *, timeout: timedelta) -> dist.Store:
    """The store of a job. Collective when the world has more than one rank.

    Args:
        world: Who takes part.
        job: Number of the job in this process, from 0, or another name for what it is about; equal on all ranks.
        timeout: How long to wait for the store.

    Raises:
        LaunchError: No address can be worked out, or the store cannot be reached.
    """
    if world.processes == 1:
        return dist.PrefixStore(f"hydra_parallelism/{job}", dist.HashStore())
    store, generation = _meet(world, timeout)
    store.set_timeout(timeout)
    return dist.PrefixStore(f"hydra_parallelism/{generation}/{job}", store)


_met: dict[tuple[int, int], tuple[dist.Store, str]] = {}


def _meet(world: World, timeout: timedelta) -> tuple[dist.Store, str]:
    """One connection for all jobs of this process, and the name of this start of its ranks."""
    place = world.size, world.rank
    if place not in _met:
        host, ports = master_address(world)
        try:
            store = _open(world, host, ports, timeout)
        except (RuntimeError, ValueError, OSError) as error:
            tried = ports[0] if len(ports) == 1 else f"{ports[0]} and {len(ports) - 1} others"
            who = f"rank {world.rank} of {world.size}"
            raise LaunchError(
                f"{who} cannot reach the rendezvous store at {host}:{tried} ({world.source()}): {error}"
            ) from error
        may_restart = _agent_serves() and (world.nnodes > 1 or os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0")
        _met[place] = store, _agree_on_generation(store, world, timeout) if may_restart else "first"
    return _met[place]


def _open(world: World, host: str, ports: list[int], timeout: timedelta) -> dist.Store:
    if len(ports) == 1:
        serve = serves_store(world)
        return dist.TCPStore(host, ports[0], world.size, serve, timeout, wait_for_workers=False, multi_tenant=serve)
    identity = f"identity/{_job_name(os.environ)}"
    if world.rank == 0:
        return _serve_on_a_free_port(world, host, ports, identity, timeout)
    return _find_our_store(world, host, ports, identity, timeout)


def _serve_on_a_free_port(world: World, host: str, ports: list[int], identity: str, timeout: timedelta) -> dist.Store:
    for port in ports[:-1]:
        try:
            store = dist.TCPStore(host, port, world.size, True, timeout, wait_for_workers=False)
        except (dist.DistNetworkError, OSError) as error:
            if "EADDRINUSE" not in str(error) and getattr(error, "errno", None) != errno.EADDRINUSE:
                raise
            continue
        store.set(identity, "here")
        return store
    store = dist.TCPStore(host, ports[-1], world.size, True, timeout, wait_for_workers=False)
    store.set(identity, "here")
    return store


def _find_our_store(world: World, host: str, ports: list[int], identity: str, timeout: timedelta) -> dist.Store:
    """Try the ports in turn until one has a store of this job: another job, or another server, may hold some of them."""
    until = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < until:
        for port in ports:
            store = _try_port(world, host, port, identity)
            if store is not None:
                store.set_timeout(timeout)
                return store
        time.sleep(0.1)
    raise LaunchError(f"no store of this job within {timeout.total_seconds():g} s: rank 0 did not come")


def _try_port(world: World, host: str, port: int, identity: str) -> dist.Store | None:
    try:
        socket.create_connection((host, port), timeout=1).close()  # torch prints a C++ backtrace when nobody listens
    except OSError:
        return None
    found: list[dist.Store] = []

    def attempt() -> None:
        try:
            store = dist.TCPStore(host, port, world.size, False, timedelta(seconds=0.5), wait_for_workers=False)
            store.wait([identity], timedelta(seconds=0.3))
        except (dist.DistError, RuntimeError):
            return
        found.append(store)

    # In a thread, because connecting to a server that accepts and says nothing does not heed the timeout.
    thread = threading.Thread(target=attempt, daemon=True, name="hydra_parallelism rendezvous")
    thread.start()
    thread.join(_ONE_TRY.total_seconds())
    return found[0] if found else None


def _agree_on_generation(store: dist.Store, world: World, timeout: timedelta) -> str:
    """Name this start of the ranks, so that they do not read what an earlier start left in the agent's store.

    Torch's agent keeps its store when it starts the ranks again, and counts restarts for each node, so no variable names the
    start. Each rank says hello with a new word; rank 0 answers the word it finds, a stale one too, until all have joined.
    """
    if world.rank:
        word = uuid.uuid4().hex
        store.set(f"hello/{world.rank}", word)
        generation = store.get(f"answer/{world.rank}/{word}").decode()
        store.add(f"joined/{generation}", 1)
        return generation
    generation, answered = uuid.uuid4().hex, dict.fromkeys(range(1, world.size), "")
    until = time.monotonic() + timeout.total_seconds()
    while store.add(f"joined/{generation}", 0) < world.size - 1:
        for rank, before in answered.items():
            if store.check([f"hello/{rank}"]) and (word := store.get(f"hello/{rank}").decode()) != before:
                store.set(f"answer/{rank}/{word}", generation)
                answered[rank] = word
        if time.monotonic() > until:
            came = store.add(f"joined/{generation}", 0) + 1
            raise LaunchError(f"{came} of {world.size} ranks ({world.source()}) came within {timeout.total_seconds():g} s")
        time.sleep(0.01)
    return generation


def serves_store(world: World) -> bool:
    """Whether this process serves the store, so that the others need it to stay until they are done."""
    return world.processes > 1 and world.rank == 0 and not _agent_serves()


def _agent_serves() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def master_address(world: World, environ: Mapping[str, str] | None = None) -> tuple[str, list[int]]:
    """Host at which rank 0 serves the store, and the ports it may take, in order: the same on every rank.

    ``MASTER_ADDR`` and ``MASTER_PORT`` win. Otherwise the host is the first of the Slurm step's nodes, or this machine when it
    is the only one, and the ports are derived from what names the job.

    Raises:
        LaunchError: Several nodes, and nothing says which one is first; or ``MASTER_PORT`` is no port.
    """
    env = os.environ if environ is None else environ
    host = env.get("MASTER_ADDR") or _first_host(world, env)
    given = env.get("MASTER_PORT")
    if given is None:
        seed = zlib.crc32(_job_name(env).encode())
        return host, [_FIRST_PORT + (seed + 257 * n) % _PORTS for n in range(_TRIES)]
    if not (given.isascii() and given.isdigit() and int(given) < 1 << 16):
        raise LaunchError(f"MASTER_PORT={given!r} is not a port number")
    return host, [int(given)]


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


def _job_name(env: Mapping[str, str]) -> str:
    names = (
        "SLURM_JOB_ID",
        "SLURM_STEP_ID",
        "SUBMITIT_LOCAL_JOB_ID",
        "PMIX_NAMESPACE",
        "OMPI_MCA_ess_base_jobid",
        "PMI_ID",
    )
    return "/".join(f"{name}={env[name]}" for name in names if name in env)


@contextmanager
def loopback_only(world: World) -> Iterator[None]:
    """Let gloo listen on the loopback interface alone while groups are made, when the launcher says all ranks are here.

    A job on one machine then opens no port that another machine could reach, and needs no host name that resolves.
    """
    alone = world.processes == 1 or (world.nnodes == 1 and "local_size" in world.sources)
    if not alone or "GLOO_SOCKET_IFNAME" in os.environ or not os.path.isdir("/sys/class/net/lo"):
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        yield
    finally:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
