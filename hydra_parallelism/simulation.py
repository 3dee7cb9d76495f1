"""``parallelism.simulate``: the world of which this process is to be one rank, without the others.

The numbers take the place of what a launcher says: resolvers, meshes and messages see the imagined world. That there is nobody
to wait for, :attr:`~.world.World.processes` tells. Pure, imports no torch.
"""

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from . import world as world_module
from ._equation import divisors
from .config import ParallelismConfig, SimulateConfig
from .errors import ConfigurationError
from .world import Launcher, World

__all__ = ["read", "refuse_launch", "refuse_sweeper"]

_DEFAULTS = SimulateConfig()
_BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


def read(config: Any, key: str) -> World | None:
    """The imagined world that a config asks for.

    Args:
        config: The parallelism node: a ``ParallelismConfig``, a mapping or a ``DictConfig``. Only ``simulate`` is looked at.
        key: Dotted path of the node, for messages.

    Returns:
        The world with this process as the named rank, ``None`` when nothing is to be simulated.

    Raises:
        ConfigurationError: A value is out of range, or a launcher has started several real ranks.
    """
    size, rank, per_node = _values(config, key)
    if size is None:
        if rank != 0:
            raise ConfigurationError(
                f"{key}.simulate.rank={rank} is a rank of no world: {key}.simulate.world_size is not set\n"
                f"  try: {key}.simulate.world_size={_power_above(rank)}"
            )
        return None
    _judge(size, rank, per_node, key)
    source = f"{key}.simulate.world_size={size}"
    real = world_module.read()
    if real is not None and real.size > 1:
        raise ConfigurationError(
            f"{source} makes one process one rank of a world without the others, but {real.source()} has started "
            f"{real.size} processes\n"
            f"  try: python ... {source} {key}.simulate.rank={real.rank}, or {key}.simulate.world_size=null"
        )
    local_size = min(size, per_node)
    sources = {"size": source, "rank": f"{key}.simulate.rank={rank}", "local_size": f"{key}.simulate.per_node={per_node}"}
    node_rank, local_rank = divmod(rank, local_size)
    return World(size, rank, local_rank, local_size, size // local_size, node_rank, Launcher.simulation, sources)


def refuse_launch(world: World, nproc_per_node: Any, nnodes: int, key: str) -> None:
    """Refuse launcher options that ask for processes beside the one that simulates.

    Raises:
        ConfigurationError: Names the option.
    """
    asked = [f"hydra.launcher.nproc_per_node={nproc_per_node}"] if nproc_per_node not in ("auto", 1) else []
    asked += [f"hydra.launcher.nnodes={nnodes}"] if nnodes > 1 else []
    if asked:
        raise ConfigurationError(
            f"{world.source()} needs one process for the whole world of {world.size}, but {' '.join(asked)} asks for more\n"
            f"  try: hydra.launcher.nproc_per_node=auto hydra.launcher.nnodes=1, or {key}.simulate.world_size=null"
        )


def refuse_sweeper(config: DictConfig, world: World | None) -> None:
    """Refuse a sweeper that decides by what jobs return: the numbers of a simulated rank mean nothing.

    Args:
        config: The app's whole config.
        world: What :func:`read` gave.

    Raises:
        ConfigurationError: Names the sweeper.
    """
    target = OmegaConf.select(config, "hydra.sweeper._target_")
    if world is not None and target not in (None, _BASIC_SWEEPER):
        chosen = OmegaConf.select(config, "hydra.runtime.choices.hydra/sweeper") or target
        raise ConfigurationError(
            f"hydra/sweeper={chosen} compares what its jobs return, and with {world.source()} losses and speeds mean nothing\n"
            "  try: hydra/sweeper=basic, or hydra-parallelism plan --rank"
        )


def _values(config: Any, key: str) -> tuple[Any, Any, Any]:
    node = config.simulate if isinstance(config, ParallelismConfig) else None
    if isinstance(config, Mapping | DictConfig):
        node = config.get("simulate")
    if node is None:
        return None, 0, _DEFAULTS.per_node
    if not isinstance(node, Mapping | DictConfig | SimulateConfig):
        raise ConfigurationError(f"{key}.simulate={node!r}: must be a mapping\n  try: {key}.simulate.world_size=4096")
    if isinstance(node, SimulateConfig):
        return node.world_size, node.rank, node.per_node
    try:
        return node.get("world_size"), node.get("rank", 0), node.get("per_node", _DEFAULTS.per_node)
    except OmegaConfBaseException as error:
        raise ConfigurationError(f"{key}.simulate cannot be read: {error}") from error


def _judge(size: Any, rank: Any, per_node: Any, key: str) -> None:
    problems = []
    for name, value, least in (("world_size", size, 1), ("rank", rank, 0), ("per_node", per_node, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            problems.append(f"{key}.simulate.{name}={value}: must be a whole number of at least {least}")
    if not problems and rank >= size:
        problems.append(
            f"{key}.simulate.rank={rank} must be less than {key}.simulate.world_size={size}\n"
            f"  try: {key}.simulate.rank={size - 1}"
        )
    if not problems and size > per_node and size % per_node:
        fits = max(n for n in divisors(size) if n <= per_node)
        above = -(-size // per_node) * per_node
        problems.append(
            f"{key}.simulate.world_size={size} does not fill nodes of {key}.simulate.per_node={per_node}: "
            f"{size} % {per_node} = {size % per_node}\n"
            f"  try: {key}.simulate.per_node={fits}, or {key}.simulate.world_size={above}"
        )
    if problems:
        raise ConfigurationError("\n  ".join([f"{key} is not valid:", *problems]))


def _power_above(rank: Any) -> int:
    return 1 << rank.bit_length() if isinstance(rank, int) else 8
