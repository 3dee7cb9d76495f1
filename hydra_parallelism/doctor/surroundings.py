"""Variables that launchers and others have left, and the machine's own limits. Reads only; nothing here imports torch."""

import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

from .. import world
from ..errors import LaunchError
from ..world import Launcher
from .findings import Finding, bad, ok, warn, within

__all__ = ["launchers", "limits", "meeting_place", "names", "strangers"]

_LOOK_UP_S = 5.0
_INTERFACES = Path("/sys/class/net")
_SHARED_MEMORY = Path("/dev/shm")
_CORES = 8
"""From how many on it matters that every process takes all of them."""

# What `accelerate launch` sets for its processes, and what accelerate and Transformers read without being told.
_STRANGERS = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")


def launchers() -> Iterator[Finding]:
    """Which launchers' variables are set, which of them counts, and which look left over."""
    found = world.seen()
    for launcher, variables in found.items():
        said = " ".join(f"{name}={value}" for name, value in variables.items())
        yield ok(f"variables of {_called(launcher)}: {said}")
    if "SLURM_JOB_ID" in os.environ and Launcher.slurm not in found:
        yield ok(f"SLURM_JOB_ID={os.environ['SLURM_JOB_ID']}, but no step: one process of an allocation; srun starts the tasks")
    try:
        winner = world.read()
    except LaunchError as error:
        text, _, remedy = " ".join(str(error).split()).partition(" try: ")
        yield bad(text, remedy or "unset the variables of the launcher that is not in use")
        return
    if winner is None:
        yield ok("nobody has launched this process: python train.py starts the processes that the degrees ask for")
        return
    yield ok(f"this is rank {winner.rank} of {winner.size}, as {_called(winner.launcher)} has it")
    others = [_called(launcher) for launcher in found if launcher is not winner.launcher]
    if others:
        yield warn(
            f"{_called(winner.launcher)} wins over {', '.join(others)}, whose variables are set as well",
            f"unset {' '.join(found[winner.launcher])} if they are left over",
        )
    if winner.launcher is Launcher.environment and winner.size > 1:
        yield warn(
            f"RANK and WORLD_SIZE are set and not by torchrun: python train.py here waits for {winner.size - 1} other rank(s)",
            f"unset {' '.join(found[winner.launcher])}",
        )


def _called(launcher: Launcher) -> str:
    return "torch (set by hand or left over)" if launcher is Launcher.environment else launcher.value


def meeting_place() -> Iterator[Finding]:
    """``MASTER_ADDR`` and ``MASTER_PORT``, and the interfaces that backends are told to use."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if host and within(_LOOK_UP_S, lambda: socket.getaddrinfo(host, None)) is None:
        yield bad(f"MASTER_ADDR={host} does not resolve (within {_LOOK_UP_S:g} s)", "unset MASTER_ADDR, or the host of rank 0")
    if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        yield bad(f"MASTER_PORT={port} is not a port", "unset MASTER_PORT")
    elif port and _is_taken(int(port)):
        yield warn(
            f"MASTER_PORT={port} is taken on this machine, by a job that runs or is left over",
            "another port, or unset MASTER_PORT",
        )
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        # NCCL reads prefixes, and "^" and "=" before them.
        wanted = [part.lstrip("^=") for part in os.environ.get(name, "").split(",") if part]
        there = sorted(path.name for path in _INTERFACES.iterdir()) if _INTERFACES.is_dir() else []
        missing = [part for part in wanted if not any(have.startswith(part) for have in there)]
        if missing and there:
            yield bad(f"{name}={os.environ[name]}: there is no such interface, but {', '.join(there)}", f"unset {name}")


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False


def names() -> Iterator[Finding]:
    """Whether this machine's own name leads to an address that others can reach."""
    name = socket.gethostname()
    found = within(_LOOK_UP_S, lambda: socket.getaddrinfo(name, None))
    addresses = sorted({str(entry[4][0]) for entry in found or ()})
    if not addresses:
        yield warn(
            f"the host name {name} does not resolve: jobs on one machine do without, jobs over several do not",
            f"an entry for {name} in /etc/hosts, or MASTER_ADDR with an address",
        )
    elif all(address.startswith("127.") or address == "::1" for address in addresses):
        yield warn(
            f"the host name {name} is the loopback address {addresses[0]}: other machines cannot reach this one by it",
            "GLOO_SOCKET_IFNAME and MASTER_ADDR for jobs over several machines",
        )
    else:
        yield ok(f"host {name} is {', '.join(addresses[:3])}")


def limits() -> Iterator[Finding]:
    """Threads, shared memory and open files."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is None and cores >= _CORES:
        yield warn(
            f"OMP_NUM_THREADS is not set: under srun or mpirun each process uses all {cores} cores (1 under this library's "
            "launcher and torchrun)",
            "export OMP_NUM_THREADS=<cores / processes>",
        )
    else:
        yield ok(f"{cores} core(s), OMP_NUM_THREADS={threads or 'unset'}")
    if _SHARED_MEMORY.is_dir():
        stat = os.statvfs(_SHARED_MEMORY)
        free = stat.f_bavail * stat.f_frsize
        told = f"{_SHARED_MEMORY} has {free / (1 << 30):.1f} GiB free"
        few = f"{told}: workers of data loaders and NCCL pass data through it"
        yield ok(told) if free >= 1 << 30 else warn(few, "docker run --shm-size=8g, or --ipc=host")
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = files == resource.RLIM_INFINITY
    if unlimited or files >= 1024:
        yield ok(f"{'any number of' if unlimited else files} open files")
    else:
        yield warn(f"ulimit -n is {files}: each rank holds a socket to many others, and data loaders more", "ulimit -n 65536")


def strangers() -> Iterator[Finding]:
    """Variables that configure other libraries behind the config's back."""
    found = sorted(name for name in os.environ if name.startswith(_STRANGERS))
    if found:
        said = " ".join(f"{name}={os.environ[name]}" for name in found)
        yield warn(f"accelerate is configured behind the config's back: {said}", f"unset {' '.join(found)}")
