"""What a plain run (no ``-m``) does before Hydra starts its job: start the processes, or meet those that were started."""

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from . import launch
from . import world as world_module
from ._equation import read_degrees
from .constraints import read_switch
from .errors import ConfigurationError, LaunchError
from .failures import tell
from .launcher_config import TorchrunConfig
from .logs import console_ranks, flush
from .topology import Topology, resolve
from .worker import RUN_DIR
from .world import Launcher, World

__all__ = [
    "enter",
    "is_cluster",
    "is_dry",
    "is_ours",
    "may_start",
    "node_of",
    "options_of",
    "place",
    "planned",
    "planned_on_cluster",
    "refuse_sweep",
]


def enter(config: DictConfig, node: Any, key: str) -> None:
    """Start the processes that the config asks for and leave with their status, or agree with them on the output folder.

    Raises:
        SystemExit: The processes were started here and have ended.
        ConfigurationError, LaunchError: They cannot be started.
    """
    world = world_module.read()
    if may_start(world):
        if is_ours(config):
            target = planned(config, node, key)
            if target.size > 1:
                raise SystemExit(_start(config, node, key, target))
        return
    assert world is not None
    from . import rendezvous, run_folder

    if world.size == 1:
        run_folder.stay(config)
    else:
        timeout = timedelta(seconds=float(node.runtime.start_timeout_s))
        store = rendezvous.connect(world, "run", timeout=timeout)
        run_folder.agree(config, world, store, timeout)


def may_start(world: World | None) -> bool:
    """Nobody launched this process, or Slurm launched it alone: ``srun -n 1 --gpus 8`` leaves the rest to the task."""
    return world is None or (world.launcher is Launcher.slurm and world.size == 1)


def is_ours(config: DictConfig) -> bool:
    """Whether ``hydra/launcher=torchrun`` is chosen; an explicit other launcher turns self-launch off."""
    return str(OmegaConf.select(config, "hydra.launcher._target_")).startswith("hydra_plugins.hydra_parallelism.")


def node_of(config: DictConfig) -> tuple[Any, str]:
    """The parallelism node of an app's config, ``None`` where there is none, and its dotted path."""
    key = str(OmegaConf.select(config, "hydra.callbacks.parallelism.node") or "parallelism")
    return OmegaConf.select(config, key), key


def is_dry(config: DictConfig) -> bool:
    """Whether a config asks for a report in place of the job (``dry_run``)."""
    node, _ = node_of(config)
    return node is not None and read_switch(node, "dry_run")


def is_cluster(config: DictConfig) -> bool:
    """Whether submitit runs the jobs, each on the nodes and tasks that the launcher's own config names."""
    return "submitit" in str(OmegaConf.select(config, "hydra.launcher._target_"))


def planned_on_cluster(config: DictConfig) -> World:
    """The processes of each job of a sweep through submitit, which gives all of them the same."""
    nodes, tasks = (int(OmegaConf.select(config, f"hydra.launcher.{name}") or 1) for name in ("nodes", "tasks_per_node"))
    said = f"hydra.launcher.nodes={nodes} * hydra.launcher.tasks_per_node={tasks}"
    return World(nodes * tasks, local_size=tasks, nnodes=nodes, sources={"size": said})


def options_of(config: DictConfig) -> TorchrunConfig:
    """The launcher's options.

    Raises:
        ConfigurationError: An option has another type than it must.
    """
    options: TorchrunConfig = OmegaConf.to_object(  # type: ignore[assignment]
        OmegaConf.merge(OmegaConf.structured(TorchrunConfig), config.hydra.launcher)
    )
    return options


def planned(config: DictConfig, node: Any, key: str) -> World:
    """The processes that a config asks for, from its own degrees and its launcher's options.

    Raises:
        ConfigurationError: An option is not valid.
    """
    options = options_of(config)
    launch.check(options, options.nnodes)
    per_node = None if options.nproc_per_node == "auto" else options.nproc_per_node
    found = world_module.plan(read_degrees(node, key), nproc_per_node=per_node, nnodes=options.nnodes)
    launch.check(options, found.size)
    return found


def _start(config: DictConfig, node: Any, key: str, target: World) -> int:
    topology = resolve(node, target.size, source=target.source(), key=key)
    command = _command()
    options = options_of(config)
    folder = Path(os.path.abspath(str(config.hydra.run.dir)))
    os.environ[RUN_DIR] = str(folder)
    _say(f"starting {target.size} processes ({target.source()}), as would: "
         f"{launch.describe_command(options, target.size, sys.orig_argv)}")  # fmt: skip
    try:
        console = console_ranks(node.runtime.log_ranks, target.size, key)
        launch.run_script(options, target.size, command, console)
    except launch.WorkersFailed as error:
        _say(tell(error.cause, target.size, place(topology, error.cause.rank), folder / f"ranks/{error.cause.rank}.log"))
        return error.cause.exitcode if 0 < error.cause.exitcode < 128 else 1
    except (launch.Interrupted, KeyboardInterrupt) as interruption:
        signal = interruption if isinstance(interruption, launch.Interrupted) else launch.Interrupted(2)
        _say(f"{target.size} processes {signal}")
        return 128 + signal.number
    return 0


def place(topology: Topology, rank: int) -> dict[str, int]:
    """Coordinate of a rank over the axes that have more than one."""
    return {axis: index for axis, index in topology.coordinate(rank).items() if topology.size(axis) > 1}


def _command() -> list[str]:
    """The command of this process: interpreter flags, ``-m``, console scripts and all.

    Raises:
        LaunchError: The program came through standard input, or is typed at a prompt.
    """
    rest = sys.orig_argv[1:]
    script = getattr(sys.modules["__main__"], "__file__", None)
    if not rest or not ("-c" in rest or (script and os.path.exists(script))):
        raise LaunchError(
            "this program cannot be started again for each rank: it is no script or module\n"
            "  try: save it as a file, or hydra_parallelism.parallel_context(config) under torchrun"
        )
    return [sys.executable, *rest]


def refuse_sweep() -> None:
    """Refuse ``torchrun ... train.py -m``: every rank would run the sweep on its own.

    Raises:
        ConfigurationError: On every rank.
    """
    world = world_module.read()
    if world is None or world.size == 1:
        return
    raise ConfigurationError(
        f"a sweep starts the processes of its jobs itself, but {world.source()} started {world.size} sweeps\n"
        f"  try: python {' '.join(sys.argv)} hydra/launcher=torchrun hydra.launcher.nproc_per_node={world.local_size}"
    )


def _say(text: str) -> None:
    flush()
    if sys.stderr is not None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
