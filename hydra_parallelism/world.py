"""Who launched this process, and into how many: the environment read as a table, with provenance.

``read`` answers what a launcher said through environment variables; each number remembers its variable, because messages
quote it. Nobody having launched the process is a state and not an error: ``read`` then returns ``None`` and ``plan`` says how
many processes the config asks for, so that ``--cfg job --resolve`` works on a login node.

Precedence: torch's own variables (torchrun, or set by hand), a Slurm *step*, submitit's local executor, Open MPI, PMI. An
sbatch script shows Slurm's task variables too and is one process; only a step has ``SLURM_STEP_ID``.
"""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import takewhile
from pathlib import Path

from ._equation import Degrees
from .errors import LaunchError

__all__ = ["Launcher", "World", "count_accelerators", "plan", "read", "seen"]


class Launcher(Enum):
    """Who started the processes."""

    torchrun = "torchrun"
    environment = "environment variables"
    slurm = "srun"
    submitit = "submitit"
    open_mpi = "mpirun"
    pmi = "PMI"
    simulation = "simulation"
    nobody = "nobody"


@dataclass(frozen=True)
class World:
    """The processes of a job and the place of this one among them."""

    size: int = 1
    rank: int = 0
    local_rank: int = 0
    local_size: int = 1
    nnodes: int = 1
    node_rank: int = 0
    launcher: Launcher = Launcher.nobody
    sources: Mapping[str, str] = field(default_factory=dict)
    """Field name -> where its value comes from, e.g. ``"WORLD_SIZE=8"``."""

    @property
    def launched(self) -> bool:
        """Whether a launcher started this process; otherwise ``size`` is only planned."""
        return self.launcher not in (Launcher.nobody, Launcher.simulation)

    @property
    def simulated(self) -> bool:
        """Whether this process is one rank of a world that is only thought of."""
        return self.launcher is Launcher.simulation

    @property
    def processes(self) -> int:
        """How many processes there are to wait for, or to start: ``size``, and 1 where the other ranks are only thought of."""
        return 1 if self.simulated else self.size

    def source(self, name: str = "size") -> str:
        """Where a number comes from, for messages: ``"WORLD_SIZE=8 (torchrun)"``."""
        said = self.sources.get(name, f"{name}={getattr(self, name)}")
        return f"{said} ({self.launcher.value})" if self.launched else said


@dataclass(frozen=True)
class _Variables:
    """The environment variables of one launcher; several names for one number are alternatives, best first."""

    launcher: Launcher
    marker: str
    size: tuple[str, ...]
    rank: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    nnodes: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()


_TORCH = _Variables(
    Launcher.torchrun,
    "RANK",
    size=("WORLD_SIZE",),
    rank=("RANK",),
    local_rank=("LOCAL_RANK",),
    local_size=("LOCAL_WORLD_SIZE",),
    nnodes=("GROUP_WORLD_SIZE",),
    node_rank=("GROUP_RANK",),
)
_TABLE = (
    _TORCH,
    _Variables(
        Launcher.slurm,
        "SLURM_STEP_ID",
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        rank=("SLURM_PROCID",),
        local_rank=("SLURM_LOCALID",),
        local_size=("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
        nnodes=("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
        node_rank=("SLURM_NODEID",),
    ),
    _Variables(
        Launcher.submitit,
        "SUBMITIT_LOCAL_NTASKS",
        size=("SUBMITIT_LOCAL_NTASKS",),
        rank=("SUBMITIT_LOCAL_GLOBALID",),
        local_rank=("SUBMITIT_LOCAL_LOCALID",),
        nnodes=("SUBMITIT_LOCAL_JOB_NUM_NODES",),
        node_rank=("SUBMITIT_LOCAL_NODEID",),
    ),
    _Variables(
        Launcher.open_mpi,
        "OMPI_COMM_WORLD_SIZE",
        size=("OMPI_COMM_WORLD_SIZE",),
        rank=("OMPI_COMM_WORLD_RANK",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Variables(
        Launcher.pmi,
        "PMI_SIZE",
        size=("PMI_SIZE",),
        rank=("PMI_RANK",),
        local_rank=("MPI_LOCALRANKID",),
        local_size=("MPI_LOCALNRANKS",),
    ),
)


def read(environ: Mapping[str, str] | None = None) -> World | None:
    """Read what the launcher said.

    Args:
        environ: Environment variables; ``None`` is the process's own.

    Returns:
        The world, or ``None`` when nobody launched this process.

    Raises:
        LaunchError: The variables are incomplete, are no numbers, or contradict each other.
    """
    given = os.environ if environ is None else environ
    env = {name: value for name, value in given.items() if value}  # an empty variable is an unset one
    if "WORLD_SIZE" in env and "RANK" not in env:
        raise LaunchError(
            f"WORLD_SIZE={env['WORLD_SIZE']} is set but RANK is not, so the place of this process is unknown\n"
            "  try: unset WORLD_SIZE, or start with torchrun"
        )
    for variables in _TABLE:
        if variables.marker in env:
            return _check(_read_with(variables, env))
    return None


def seen(environ: Mapping[str, str] | None = None) -> dict[Launcher, dict[str, str]]:
    """Each launcher that has left its marker, best first, and all the variables that it has left."""
    env = os.environ if environ is None else environ
    found: dict[Launcher, dict[str, str]] = {}
    for of in _TABLE:
        names = (of.marker, *of.size, *of.rank, *of.local_rank, *of.local_size, *of.nnodes, *of.node_rank)
        if env.get(of.marker):
            is_by_hand = of is _TORCH and "TORCHELASTIC_RUN_ID" not in env
            launcher = Launcher.environment if is_by_hand else of.launcher
            found[launcher] = {name: env[name] for name in dict.fromkeys(names) if env.get(name)}
    return found


def plan(
    degrees: Degrees, *, nproc_per_node: int | None = None, nnodes: int = 1, environ: Mapping[str, str] | None = None
) -> World:
    """Say how many processes a config asks for when nobody has launched any.

    That is ``world_size`` if the config names it, ``nproc_per_node * nnodes`` if set, the product of the degrees when none is
    ``-1``, the number of visible accelerators when the rest of the degrees divides it, and the product of the rest otherwise.
    An untouched config is one process: it means DDP over what was launched, and nothing was.
    """
    factors = degrees.factors
    fixed = math.prod(value for value in factors.values() if value != -1)
    found = count_accelerators(environ)
    if degrees.world_size is not None:
        size, said = degrees.world_size, f"{degrees.key}.world_size={degrees.world_size}"
    elif nproc_per_node is not None:
        times = f" * hydra.launcher.nnodes={nnodes}" if nnodes > 1 else ""
        size, said = nproc_per_node * nnodes, f"hydra.launcher.nproc_per_node={nproc_per_node}{times}"
    elif -1 not in factors.values():
        size, said = fixed, f"world_size={fixed} (product of the degrees)"
    elif found and found % fixed == 0:
        size, said = found, f"world_size={found} (visible accelerators)"
    else:
        size, said = fixed, f"world_size={fixed} (product of the degrees that are not -1)"
    return World(size, local_size=max(size // nnodes, 1), nnodes=nnodes, sources={"size": said})


def count_accelerators(environ: Mapping[str, str] | None = None) -> int:
    """Visible CUDA devices, without importing torch: the driver's list, narrowed by ``CUDA_VISIBLE_DEVICES``."""
    env = os.environ if environ is None else environ
    listed = Path("/proc/driver/nvidia/gpus")
    present = len(list(listed.iterdir())) if listed.is_dir() else 0
    chosen = env.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return present
    # As CUDA reads it: what follows the first -1 is invisible.
    names = list(takewhile(lambda name: name and name != "-1", (name.strip() for name in chosen.split(","))))
    if names and all(name.startswith("MIG-") for name in names):
        return len(names) if present else 0
    return min(len(names), present)


def _read_with(variables: _Variables, env: Mapping[str, str]) -> World:
    launcher = variables.launcher
    if variables is _TORCH and "TORCHELASTIC_RUN_ID" not in env:
        launcher = Launcher.environment
    said: dict[str, str] = {}

    def number(name: str, default: int | None) -> int:
        for variable in getattr(variables, name):
            if variable in env:
                said[name] = f"{variable}={env[variable]}"
                return _number(variable, env[variable], launcher)
        if default is None:
            names = " or ".join(getattr(variables, name))
            raise LaunchError(f"{names} is not set, although {variables.marker} is ({launcher.value})")
        return default

    size, rank = number("size", None), number("rank", None)
    nnodes, node_rank, local_rank = number("nnodes", 0), number("node_rank", 0), number("local_rank", 0)
    local_size = _stated_local_size(variables, env, launcher, said, node_rank)
    if local_size is None and "nnodes" in said:
        local_size = max(1, size // max(1, nnodes))
    elif local_size is None:
        # One process per machine sets no local rank (a pod per rank); a local rank alone means one machine.
        local_size = max(1, size) if "local_rank" in said else 1
    if "nnodes" not in said:
        nnodes = max(1, size // max(1, local_size))
    if "node_rank" not in said:
        node_rank = rank // max(1, local_size)
    return World(size, rank, local_rank, local_size, nnodes, node_rank, launcher, said)


def _stated_local_size(
    variables: _Variables, env: Mapping[str, str], launcher: Launcher, said: dict[str, str], node_rank: int
) -> int | None:
    for variable in variables.local_size:
        if variable in env:
            said["local_size"] = f"{variable}={env[variable]}"
            per_node = _expand_tasks_per_node(variable, env[variable], launcher)
            return per_node[node_rank] if 0 <= node_rank < len(per_node) else per_node[-1]
    return None


def _expand_tasks_per_node(variable: str, text: str, launcher: Launcher) -> list[int]:
    """Slurm writes tasks per node as ``2(x2),1``: two nodes with two tasks, one with one."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not match:
            return [_number(variable, text, launcher)]
        counts += [int(match[1])] * int(match[2] or 1)
    return counts or [0]


def _number(variable: str, text: str, launcher: Launcher) -> int:
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f"{variable}={text!r} is not a number ({launcher.value})") from None


_LEAST = {"size": 1, "rank": 0, "local_rank": 0, "local_size": 1, "nnodes": 1, "node_rank": 0}


def _check(world: World) -> World:
    problems = [
        f"{world.source(name)} must be at least {least}" for name, least in _LEAST.items() if getattr(world, name) < least
    ]
    if not problems:
        for inner, outer in (("rank", "size"), ("local_rank", "local_size"), ("node_rank", "nnodes")):
            if getattr(world, inner) >= getattr(world, outer) and (inner != "node_rank" or inner in world.sources):
                problems.append(f"{world.source(inner)} must be less than {world.source(outer)}")
        if world.local_size > world.size:
            problems.append(f"{world.source('local_size')} must not be more than {world.source('size')}")
    if problems:
        raise LaunchError("\n  ".join(["the launcher's variables contradict each other:", *problems]))
    return world
