"""``parallelism.dry_run=true``: what a job would be, in place of the job. Starts nothing and imports no torch."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from . import _answers, interpolations, launch, run_mode, simulation
from . import world as world_module
from ._equation import read_degrees
from .errors import ConfigurationError
from .plan import text
from .plan.case import Case, case_of
from .plan.machine import MachineConfig
from .plan.report import report
from .world import World

__all__ = ["check_sweep", "describe", "refuse_sweep", "show", "tell", "write"]

_SWEEPERS = ("hydra._internal.core_plugins.basic_sweeper.", "hydra_plugins.hydra_parallelism.")
"""Sweepers that need no results: others choose the next job by those of the last."""


def tell(config: DictConfig) -> None:
    """Print what a plain run would be: on rank 0, if processes were launched already.

    Raises:
        ConfigurationError: The job would be refused. On every rank.
    """
    world = world_module.read()
    case, said = describe(config)
    if world is None or world.rank == 0:
        imagined = simulation.read(*run_mode.node_of(config))
        sys.stdout.write(f"{said}\n")
        text.write(report(case, 0 if imagined is None else imagined.rank))
        sys.stdout.flush()


def describe(config: DictConfig) -> tuple[Case, str]:
    """The case of a job's config on the processes that it would have, and a line that says where their number comes from.

    Raises:
        ConfigurationError: The job would be refused.
    """
    node, key = run_mode.node_of(config)
    world = _world(config, node, key)
    with _answers.planned(world):
        interpolations.check(config)
        case = case_of(node, world, MachineConfig(nodes=world.nnodes, per_node=world.local_size), key=key)
    return case, f"dry run, nothing is started: {world.source()}"


def refuse_sweep(config: DictConfig) -> None:
    """Refuse a dry run of jobs that somebody else starts.

    Raises:
        ConfigurationError: The launcher or the sweeper is not one that knows of dry runs.
    """
    chosen = {part: str(OmegaConf.select(config, f"hydra.{part}._target_")) for part in ("launcher", "sweeper")}
    key = f"{run_mode.node_of(config)[1]}.dry_run=true"
    if not chosen["sweeper"].startswith(_SWEEPERS):
        raise ConfigurationError(
            f"{key}: {chosen['sweeper']} chooses jobs by what others return, and a dry run returns nothing\n"
            "  try: one of its jobs, without -m"
        )
    if not run_mode.is_ours(config) and not chosen["sweeper"].startswith(_SWEEPERS[1]):
        raise ConfigurationError(
            f"{key}: {chosen['launcher']} would start the jobs of the sweep\n  try: hydra/launcher=torchrun"
        )


def check_sweep(config: DictConfig, key: str) -> None:
    """Refuse a job that asks for a dry run in a sweep that does not.

    Raises:
        ConfigurationError: With the override for all of them.
    """
    if not run_mode.is_dry(config):
        raise ConfigurationError(
            f"{key}.dry_run is for a sweep as a whole, not for some of its jobs\n  try: {key}.dry_run=true"
        )


def show(case: Case) -> str:
    """The report of rank 0 as plain text."""
    return text.show(report(case, 0))


def write(case: Case, folder: Path) -> str:
    """The report of rank 0, also left in a file in ``folder``."""
    said = show(case)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "parallelism.txt").write_text(f"{said}\n")
    return said


def _world(config: DictConfig, node: Any, key: str) -> World:
    """As the job would have it, except that a stated size counts, whoever launched this process."""
    imagined = simulation.read(node, key)
    if imagined is not None:
        return imagined
    degrees = read_degrees(node, key)
    world = world_module.read()
    if run_mode.may_start(world):
        world = _planned(config, node, key) if run_mode.is_ours(config) else world_module.plan(degrees)
    assert world is not None
    size = degrees.world_size
    if size is None or size == world.size:
        return world
    nodes = -(-size // world.local_size)
    return World(size, local_size=min(size, world.local_size), nnodes=nodes, sources={"size": f"{key}.world_size={size}"})


def _planned(config: DictConfig, node: Any, key: str) -> World:
    """What the launcher would start. It need not know yet where nodes meet."""
    options = run_mode.options_of(config)
    met = replace(options, rdzv_endpoint=options.rdzv_endpoint or "anywhere", rdzv_id=options.rdzv_id or "any")
    launch.check(met, options.nnodes)
    per_node = options.nproc_per_node if isinstance(options.nproc_per_node, int) else None
    degrees = read_degrees(node, key)
    found = world_module.plan(degrees, nproc_per_node=per_node, nnodes=options.nnodes)
    if per_node is not None and degrees.world_size is not None:
        return replace(found, local_size=min(per_node, found.size), nnodes=-(-found.size // per_node))
    launch.check(met, found.size)
    return found
