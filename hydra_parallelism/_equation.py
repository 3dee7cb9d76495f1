"""Reading degrees out of a config, and the world-size equation with its messages. Private half of ``topology``."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .config import ContextParallelConfig, FSDPConfig, ParallelismConfig, PipelineConfig, RuntimeConfig, SimulateConfig
from .errors import ConfigurationError

FACTORS = {
    "pp_size": "pp_size",
    "dp_replicate": "dp_replicate",
    "dp_shard": "dp_shard",
    "cfg_parallel": "cfg_parallel",
    "ring_degree": "context_parallel.ring_degree",
    "ulysses_degree": "context_parallel.ulysses_degree",
    "tp_size": "tp_size",
}
"""Factor of the world -> path of its key below the parallelism node, outermost axis first."""

_SWITCHES = ("inference", "enable_expert_parallel")
_NESTED_KEYS = tuple(name for name, path in FACTORS.items() if path != name)
_OWN_KEYS = (
    *(name for name, path in FACTORS.items() if path == name),
    "context_parallel",
    "ep_size",
    "world_size",
    "activation_checkpointing",
    *_SWITCHES,
)

# Which degree to offer first when several single changes would make the equation hold: data axes are the cheapest to change.
_OFFER_ORDER = ("dp_shard", "dp_replicate", "tp_size", "pp_size", "ring_degree", "ulysses_degree", "cfg_parallel")


@dataclass(frozen=True)
class Degrees:
    """Degrees as the user wrote them, each a whole number in its range, at most one factor ``-1``."""

    key: str
    factors: dict[str, int]
    ep_size: int
    experts_follow_tp: bool
    world_size: int | None

    @property
    def untouched(self) -> bool:
        """Whether no degree was set: on N processes that means DDP over all of them."""
        return all(value == 1 for value in self.factors.values()) and self.ep_size == 1


def read_degrees(config: Any, key: str, *, inference: bool | None = None) -> Degrees:
    """Read and check the degrees one by one.

    Raises:
        ConfigurationError: Names every unknown key and every value that is out of range.
    """
    plain = _read_node(config, key, _OWN_KEYS)
    problems = _unknown_keys(config, ParallelismConfig, key)
    nested: dict[str, Any] = {}
    inner = plain.get("context_parallel", {})
    if _is_node(inner):
        nested = _read_node(inner, f"{key}.context_parallel", _NESTED_KEYS)
        problems += _unknown_keys(inner, ContextParallelConfig, f"{key}.context_parallel")
    else:
        problems.append(f"{key}.context_parallel={_show(inner)}: must be a mapping")
    problems += _unknown_nested_keys(config, key)
    factors: dict[str, int] = {}
    for name, path in FACTORS.items():
        factors[name] = (plain if path == name else nested).get(name, 1)
        problems += _judge(f"{key}.{path}", factors[name], sentinel=name != "cfg_parallel")
    ep_size, world_size = plain.get("ep_size", 1), plain.get("world_size")
    problems += _judge(f"{key}.ep_size", ep_size, sentinel=True)
    problems += _judge_world_size(f"{key}.world_size", world_size)
    problems += _judge_recompute(f"{key}.activation_checkpointing", plain.get("activation_checkpointing", "none"))
    for name in _SWITCHES:
        if not isinstance(plain.get(name, False), bool):
            problems.append(f"{key}.{name}={_show(plain[name])}: must be true or false")
    problems += _judge_guidance(factors["cfg_parallel"], plain.get("inference", False), inference, key)
    problems += _judge_sentinels(factors, key)
    if problems:
        raise ConfigurationError("\n  ".join([f"{key} is not valid:", *problems]))
    follow = plain.get("enable_expert_parallel", False) and ep_size == 1
    return Degrees(key, factors, ep_size, follow, world_size)


def solve(degrees: Degrees, world_size: int, source: str = "") -> dict[str, int]:
    """Fill in the ``-1`` and check the equation.

    Returns:
        Factor -> degree, in axis order, with product ``world_size``.

    Raises:
        ConfigurationError: The factors do not multiply to the world.
    """
    factors = dict(degrees.factors)
    if degrees.untouched:
        return {**factors, "dp_replicate": world_size}
    fixed = math.prod(value for value in factors.values() if value != -1)
    open_factors = [name for name, value in factors.items() if value == -1]
    if open_factors and world_size % fixed == 0:
        return {**factors, open_factors[0]: world_size // fixed}
    if not open_factors and fixed == world_size:
        return factors
    raise ConfigurationError(_misfit(degrees, fixed, world_size, source or f"world_size={world_size}"))


def _misfit(degrees: Degrees, fixed: int, world_size: int, source: str) -> str:
    equation = " * ".join(f"{name}={value}" for name, value in degrees.factors.items())
    open_factors = [name for name, value in degrees.factors.items() if value == -1]
    if open_factors:
        left_open, remainder = open_factors[0], f"{world_size} % {fixed} = {world_size % fixed}"
        verdict = f": {left_open} takes what is left, but the others multiply to {fixed} and {source}: {remainder}"
        below = world_size // fixed * fixed
        worlds = [n for n in (below, below + fixed) if n]
    else:
        verdict = f" = {fixed}, but {source}"
        worlds = [fixed]
    changes = _single_changes(degrees, fixed, world_size, bool(open_factors))
    start = f"start {' or '.join(map(str, worlds))} process{'' if worlds == [1] else 'es'}"
    remedy = ", or ".join([*changes[:2], start])
    return f"{degrees.key} does not fit the world:\n  {equation}{verdict}\n  try: {remedy}"


def _single_changes(degrees: Degrees, fixed: int, world_size: int, is_open: bool) -> list[str]:
    """Overrides of one degree that would make it fit, those that the user touched first."""
    offers: list[tuple[bool, str]] = []
    for name in _OFFER_ORDER:
        value = degrees.factors[name]
        rest = fixed // value if value != -1 else 0
        if not rest or world_size % rest:
            continue
        room = world_size // rest
        best = min(divisors(room), key=lambda n: (abs(n - value), n)) if is_open else room
        if best == value or (name == "cfg_parallel" and best > 2) or (is_open and value == 1):
            continue
        offers.append((value == 1, f"{degrees.key}.{FACTORS[name]}={best}"))
    touched = [text for untouched, text in offers if not untouched]
    return touched or [text for _, text in offers][:1]


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _read_node(node: Any, key: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Only the values that matter for the degrees: others may be interpolations that ask for degrees themselves."""
    if isinstance(node, ParallelismConfig | ContextParallelConfig):
        return {name: getattr(node, name) for name in names}
    if not _is_node(node):
        raise ConfigurationError(f"{key} must be a mapping or a ParallelismConfig, not {type(node).__name__}")
    present = set(node)  # and not ``in node``, which denies a key whose value is missing
    try:
        return {name: "???" if _is_missing(node, name) else node[name] for name in names if name in present}
    except OmegaConfBaseException as error:
        raise ConfigurationError(f"{key} cannot be read: {error}") from error


def _is_node(value: Any) -> bool:
    return isinstance(value, Mapping | DictConfig | ParallelismConfig | ContextParallelConfig)


def _is_missing(node: Any, name: str) -> bool:
    return isinstance(node, DictConfig) and OmegaConf.is_missing(node, name)


def _unknown_keys(node: Any, schema: type, key: str) -> list[str]:
    if isinstance(node, schema):
        return []
    known = {f.name for f in fields(schema)}
    problems = [f"{key}.{name}: no such key" for name in node if name not in known]
    if problems and "parallelism" in node:
        problems.append("this looks like a whole config: pass its parallelism node")
    return problems


def _unknown_nested_keys(node: Any, key: str) -> list[str]:
    problems: list[str] = []
    nested = {"fsdp": FSDPConfig, "pipeline": PipelineConfig, "runtime": RuntimeConfig, "simulate": SimulateConfig}
    for name, schema in nested.items():
        inner = getattr(node, name) if isinstance(node, ParallelismConfig) else node.get(name)
        if isinstance(inner, Mapping | DictConfig):
            problems += _unknown_keys(inner, schema, f"{key}.{name}")
    return problems


def _show(value: Any) -> str:
    return repr(value) if isinstance(value, str) and value != "???" else str(value)


def _judge_world_size(path: str, value: Any) -> list[str]:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return []
    return [f"{path}={_show(value)}: must be a whole number of at least 1, or null to ask the launcher"]


def _judge_recompute(path: str, value: Any) -> list[str]:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if value in ("none", "full") or (whole and value >= 1):
        return []
    return [f"{path}={_show(value)}: must be none, full, or a whole number n of at least 1 (every n-th block)"]


def _judge(path: str, value: Any, *, sentinel: bool) -> list[str]:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if whole and (value >= 1 or (sentinel and value == -1)):
        return []
    allowed = "a whole number of at least 1, or -1 for what is left" if sentinel else "1 or 2"
    return [f"{path}={_show(value)}: must be {allowed}"]


def _judge_guidance(degree: Any, declared: Any, inference: bool | None, key: str) -> list[str]:
    path = f"{key}.cfg_parallel"
    if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
        return []  # named by _judge already
    if degree > 2:
        return [f"{path}={degree}: must be 1 or 2 (a conditional and an unconditional branch)"]
    serving = declared is True if inference is None else inference
    if degree == 2 and not serving:
        return [f"{path}=2 is for inference only; if nothing is trained: {key}.inference=true"]
    return []


def _judge_sentinels(factors: Mapping[str, Any], key: str) -> list[str]:
    open_factors = [f"{key}.{FACTORS[name]}=-1" for name, value in factors.items() if value == -1 and name != "cfg_parallel"]
    if len(open_factors) < 2:
        return []
    return [f"{' and '.join(open_factors)}: only one degree may take what is left; try {open_factors[-1][:-2]}1"]
