"""What a model allows: whether its heads, layers, experts and batch can be split as a layout wants. Pure, like ``topology``."""

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from omegaconf.errors import OmegaConfBaseException

from ._equation import read_degrees
from .config import ParallelismConfig
from .errors import ConfigurationError
from .topology import Topology, resolve

__all__ = [
    "CONSTRAINTS_KEY",
    "Feasible",
    "ModelConstraints",
    "feasible",
    "judge",
    "read_constraints",
    "read_switch",
    "splits_sequence",
    "violations",
]

CONSTRAINTS_KEY = "hydra.sweeper.constraints"


@dataclass
class ModelConstraints:
    """Numbers of a model and its data that degrees must divide. ``null`` checks nothing."""

    num_heads: int | None = None
    """Attention (query) heads: divides by ``tp``, and what is left of it on each rank by ``ulysses``."""
    num_kv_heads: int | None = None
    """Key/value heads: the same, except that fewer heads than ranks may be replicated evenly."""
    seq_len: int | None = None
    """Tokens of a sequence: divides by ``ring * ulysses``, and that times ``tp`` with sequence parallelism; with a ring the
    quotient of ``ring`` alone is even."""
    num_experts: int | None = None
    """Experts of a layer: divides by ``ep``."""
    num_layers: int | None = None
    """Blocks of the model: divides by ``pp``."""
    global_batch: int | None = None
    """Samples of one optimizer step over all ranks: divides by ``dp_replicate * dp_shard``."""


def judge(topology: Topology, constraints: Any, *, sequence_parallel: bool = False, key: str = CONSTRAINTS_KEY) -> list[str]:
    """Say which constraints a layout violates.

    Args:
        topology: The layout.
        constraints: :class:`ModelConstraints`, or a mapping or ``DictConfig`` with its keys; ``None`` constrains nothing.
        sequence_parallel: Whether ``enable_sequence_parallel`` splits the sequence over ``tp`` as well.
        key: Dotted path of the constraints, for messages.

    Returns:
        One short reason with the numbers per violated constraint; empty when the model fits.

    Raises:
        ConfigurationError: The constraints are no whole numbers of at least 1.
    """
    return violations(topology, read_constraints(constraints, key), sequence_parallel)


def read_constraints(constraints: Any, key: str = CONSTRAINTS_KEY) -> ModelConstraints:
    """Read and check constraints in any form.

    Raises:
        ConfigurationError: Names every unknown key and every value that is no whole number of at least 1.
    """
    names = [f.name for f in fields(ModelConstraints)]
    if constraints is None:
        return ModelConstraints()
    if isinstance(constraints, ModelConstraints):
        values: dict[str, Any] = asdict(constraints)
    elif isinstance(constraints, Mapping):
        try:
            values = {str(name): constraints[name] for name in constraints}
        except OmegaConfBaseException as error:
            raise ConfigurationError(f"{key} cannot be read: {error}") from error
    else:
        raise ConfigurationError(f"{key} must be a mapping or ModelConstraints, not {type(constraints).__name__}")
    problems = [f"{key}.{name}: no such key{nearest(name, names)}" for name in values if name not in names]
    problems += [
        f"{key}.{name}={value}: must be a whole number of at least 1, or null to check nothing"
        for name, value in values.items()
        if name in names and value is not None and not is_positive(value)
    ]
    if problems:
        raise ConfigurationError("\n  ".join([f"{key} is not valid:", *problems]))
    return ModelConstraints(**values)


def violations(at: Topology, model: ModelConstraints, sequence_parallel: bool) -> list[str]:
    """What :func:`judge` says, for constraints that have been read: a sweep asks it of every layout."""
    found = [
        _heads("num_heads", model.num_heads, at, replicable=False),
        _heads("num_kv_heads", model.num_kv_heads, at, replicable=True),
        _sequence(model.seq_len, at, sequence_parallel),
        _indivisible("num_experts", model.num_experts, ep_size=at.ep),
    ]
    if model.num_layers is not None and model.num_layers < at.pp:
        found.append(f"num_layers={model.num_layers} is less than pp_size={at.pp}")
    else:
        found.append(_indivisible("num_layers", model.num_layers, pp_size=at.pp))
    found.append(_indivisible("global_batch", model.global_batch, dp_replicate=at.dp_replicate, dp_shard=at.dp_shard))
    return [reason for reason in found if reason]


def _indivisible(name: str, value: int | None, **factors: int) -> str:
    """Why a number does not divide by a product, empty when it does."""
    product = math.prod(factors.values())
    if value is None or value % product == 0:
        return ""
    above_one = [f"{factor}={size}" for factor, size in factors.items() if size > 1]
    return f"{name}={value} does not divide by {' * '.join(above_one)}" + (f" = {product}" if len(above_one) > 1 else "")


def _heads(name: str, heads: int | None, at: Topology, *, replicable: bool) -> str:
    """Tensor parallelism splits heads first; Ulysses trades what each of its ranks is left with."""
    said = f"{name}={heads}"
    for factor, size in (("tp_size", at.tp), ("ulysses_degree", at.ulysses)):
        if heads is None or size == 1:
            continue
        if replicable and size % heads == 0:
            return ""  # one head is left on each rank, which may be replicated over any number of them
        if heads % size:
            either = ", nor the other way round" if replicable and heads < size else ""
            return f"{said} does not divide by {factor}={size}{either}"
        heads //= size
        said += f" / {factor}={size} = {heads}"
    return ""


def _sequence(seq_len: int | None, at: Topology, sequence_parallel: bool) -> str:
    factors = {"ring_degree": at.ring, "ulysses_degree": at.ulysses, "tp_size": at.tp if sequence_parallel else 1}
    # Zig-zag: a causal mask leaves early tokens little to do, so each rank of the ring gets one early and one late piece,
    # and Ulysses cuts the two as one.
    if at.ring == 1 or at.ulysses * factors["tp_size"] % 2 == 0:
        return _indivisible("seq_len", seq_len, **factors)
    reason = _indivisible("seq_len", seq_len, pieces=2, **factors)
    return f"{reason} (a balanced ring gives each rank two pieces)" if reason else ""


@dataclass(frozen=True)
class Feasible:
    """Whether a config is possible. True as a condition when it is."""

    reasons: tuple[str, ...] = ()
    """Why not; empty when possible."""
    topology: Topology | None = None
    """The layout, also when only the constraints refuse it; ``None`` when the degrees do not fit the world."""

    def __bool__(self) -> bool:
        return not self.reasons


def feasible(config: Any, world_size: int, constraints: Any = None, *, key: str = "parallelism", source: str = "") -> Feasible:
    """Say whether a config fits a world and a model, without raising when it does not.

    Args:
        config: As :func:`~hydra_parallelism.topology.resolve` takes it.
        world_size: Number of processes.
        constraints: As :func:`judge` takes them.
        key: Dotted path of the config node, for messages.
        source: Where ``world_size`` comes from, for messages.

    Raises:
        ConfigurationError: The config or the constraints cannot be read, or a value is out of range on any world: a mistake to
            mend, which a search must not take for one more layout to avoid.
    """
    read_degrees(config, key)
    model = read_constraints(constraints)
    try:
        topology = resolve(config, world_size, key=key, source=source)
    except ConfigurationError as error:
        return Feasible((str(error),))
    return Feasible(tuple(violations(topology, model, splits_sequence(config, model))), topology)


def splits_sequence(config: Any, model: ModelConstraints) -> bool:
    """Whether ``tp`` divides the sequence too. Read only when it matters: it may be an interpolation that asks for degrees."""
    return model.seq_len is not None and read_switch(config, "enable_sequence_parallel")


def read_switch(config: Any, name: str) -> bool:
    """A yes or no of a config node in any form; no when it is not there."""
    return bool(getattr(config, name) if isinstance(config, ParallelismConfig) else config.get(name, False))


def nearest(name: object, known: Iterable[str]) -> str:
    """A hint at the known name that looks most like an unknown one."""
    near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def is_positive(value: Any) -> bool:
    """Whether a value is a whole number of at least 1, and no yes or no."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
