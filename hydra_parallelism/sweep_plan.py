"""What a sweep over layouts will run: every combination composed, resolved and judged before the first job starts."""

import hashlib
import itertools
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.utils import filter_overrides
from omegaconf import DictConfig, OmegaConf

from . import interpolations, run_mode, simulation
from . import world as world_module
from ._equation import FACTORS, read_degrees
from .best import Estimator
from .constraints import ModelConstraints, splits_sequence, violations
from .errors import ConfigurationError
from .layouts import SweptAxis, count, enumerate_layouts, overrides_of, parse_axes
from .plan.rank import Estimate, order
from .ranking import layout_of
from .swept_axes import AXES_KEY, NAMES, show
from .topology import Topology, resolve
from .world import World

__all__ = ["Candidate", "Plan", "describe", "in_one_line", "keep_best", "make_plan"]

_MOST_LAYOUTS = 1000
"""An enumeration of more layouts needs ``max_jobs``: nobody runs them all, and composing them takes minutes."""
_FACTOR = f"(?:{'|'.join(FACTORS)})"


@dataclass
class Candidate:
    """One combination of the sweep."""

    overrides: list[str]
    label: str = ""
    """The overrides that tell it from the others, quoted as for a shell."""
    name: str = ""
    """The same for people, where an enumerated layout goes without saying: the tables show it."""
    topology: Topology = field(default_factory=Topology)
    fingerprint: str = ""
    reason: str = ""
    """Why it cannot be run; empty when it can."""
    twin: "Candidate | None" = None
    """The one that is run in its stead, because it comes to the same."""
    number: int | None = None
    """Its number among the jobs, which also names its folder."""
    is_done: bool = False
    """Whether an earlier run of this sweep has its result."""
    estimate: Estimate | None = None
    """What a plan says it costs, where that was asked for."""
    unpriced: str = ""
    """Why it has none."""

    @property
    def degrees(self) -> dict[str, int]:
        """By config name, outermost first."""
        return {NAMES[axis]: size for axis, size in self.topology.degrees().items()}


@dataclass
class Plan:
    """The combinations of a sweep, in order, and how many there would have been without limits."""

    candidates: list[Candidate]
    left_out: int = 0
    """How many more ``max_jobs`` leaves out, at most."""
    constrained: int = 0
    """How many enumerated layouts the constraints have left out so far."""
    slower: int = 0
    """How many are not among the best by estimate."""
    unfit: int = 0
    """How many do not fit into memory by estimate, or have none."""
    unpriced: str = ""
    """Why not, the first of them."""

    @property
    def runnable(self) -> list[Candidate]:
        """One for each layout that fits."""
        return [each for each in self.candidates if not each.reason and each.twin is None]


def make_plan(
    loader: ConfigLoader,
    config: DictConfig,
    combinations: Sequence[list[str]],
    *,
    axes: Any = None,
    model: ModelConstraints | None = None,
    max_jobs: int | None = None,
    estimator: Estimator | None = None,
) -> Plan:
    """Compose every combination, resolve its topology against its world, and judge it. Starts nothing.

    Args:
        loader: Hydra's.
        config: The sweep's.
        combinations: Overrides of each, from the sweeper's grammar.
        axes: Axes over which each combination is enumerated; ``None`` for none.
        model: What the model's numbers allow; ``None`` allows everything.
        max_jobs: How many to run at most.
        estimator: Prices each of them; ``None`` prices nothing.

    Raises:
        ConfigurationError: The launcher cannot run the jobs, or an enumeration is not possible or too long.
        hydra.errors.ConfigCompositionException: A combination names what the config does not have.
    """
    plan, seen, model = Plan([]), dict[str, Candidate](), model or ModelConstraints()
    swept = () if axes is None else parse_axes(axes)
    total, found = _expand(loader, config, combinations, swept, model, max_jobs)
    for overrides, layout, over_tp in found:
        if layout is not None and violations(layout, model, over_tp):
            plan.constrained += 1  # of thousands nobody wants to read why
            continue
        candidate = _judge(loader, config, overrides, model, estimator)
        plan.candidates.append(candidate)
        if not candidate.reason:
            candidate.twin = seen.get(candidate.fingerprint)
            seen.setdefault(candidate.fingerprint, candidate)
        if len(seen) == max_jobs:
            break
    plan.left_out = total - len(plan.candidates) - plan.constrained
    _label(plan.candidates, len(swept))
    return plan


def _expand(
    loader: ConfigLoader,
    config: DictConfig,
    combinations: Sequence[list[str]],
    axes: tuple[SweptAxis, ...],
    model: ModelConstraints,
    max_jobs: int | None,
) -> tuple[int, Iterator["_Entry"]]:
    """How many combinations there are with the enumerated axes, and all of them, lazily."""
    if not axes:
        return len(combinations), ((list(each), None, False) for each in combinations)
    total, found = 0, []
    for overrides in combinations:
        composed = loader.load_sweep_config(config, list(overrides))
        node, key = run_mode.node_of(composed)
        if node is None:
            raise ConfigurationError(f"{AXES_KEY}={show(axes)}: the config has no node {key!r}\n  try: parallelism=default")
        world = _stated_world(config, composed, node, key, axes)
        about: dict[str, Any] = {"fixed": node, "key": key, "source": world.source()}
        total += count(world.size, axes, **about)
        layouts = enumerate_layouts(world.size, axes, **about)
        found.append(_overriding(overrides, layouts, axes, key, splits_sequence(node, model)))
        if max_jobs is None and total > _MOST_LAYOUTS:
            raise ConfigurationError(
                f"{AXES_KEY}={show(axes)} gives {total:,} layouts of {world.source()}, more than {_MOST_LAYOUTS:,}\n"
                "  try: hydra.sweeper.max_jobs=20 for the first 20 of them, or limits such as 'tp_size<=8' in the list"
            )
    return total, itertools.chain.from_iterable(found)


_Entry = tuple[list[str], Topology | None, bool]
"""Overrides of a combination; the layout, if it is an enumerated one; whether the sequence is split over tp as well."""


def _overriding(
    overrides: list[str], layouts: Iterator[Topology], axes: tuple[SweptAxis, ...], key: str, over_tp: bool
) -> Iterator[_Entry]:
    return (([*overrides, *overrides_of(layout, axes, key)], layout, over_tp) for layout in layouts)


def _stated_world(config: DictConfig, composed: DictConfig, node: Any, key: str, axes: tuple[SweptAxis, ...]) -> World:
    """The number of processes that somebody named: the degrees cannot give it here."""
    is_counted = run_mode.is_ours(composed) and not run_mode.is_cluster(config) and read_degrees(node, key).world_size is None
    if not is_counted or isinstance(run_mode.options_of(composed).nproc_per_node, int):
        return _world_of(config, composed, node, key)
    found = world_module.count_accelerators()
    if not found:
        raise ConfigurationError(
            f"{AXES_KEY}={show(axes)} needs a number of processes, and there is no accelerator to count\n"
            "  try: hydra.launcher.nproc_per_node=4"
        )
    return World(found, local_size=found, sources={"size": f"world_size={found} (visible accelerators)"})


def keep_best(plan: Plan, top: int) -> None:
    """Keep of what can be run the best by estimate, best first. Of equal ones the order of the sweep decides."""
    priced = [(each.estimate, each) for each in plan.runnable if each.estimate is not None]
    unpriced = [each.unpriced for each in plan.runnable if each.estimate is None]
    best = [each for _, each in sorted(priced, key=lambda pair: order(pair[0]))]
    kept = {id(each) for each in best[:top]}
    others = [each for each in plan.candidates if each.reason or id(each.twin) in kept]
    plan.slower, plan.unfit, plan.unpriced = len(best[top:]), len(unpriced), next(iter(unpriced), "")
    plan.candidates = [*best[:top], *others]


def _judge(
    loader: ConfigLoader, config: DictConfig, overrides: list[str], model: ModelConstraints, estimator: Estimator | None
) -> Candidate:
    composed = loader.load_sweep_config(config, list(overrides))
    candidate = Candidate(list(overrides))
    node, key = run_mode.node_of(composed)
    if node is not None:
        simulation.refuse_sweeper(composed, simulation.read(node, key))
        read_degrees(node, key)  # what is valid on no world at all is a mistake, and no layout to skip
    try:
        if node is not None:
            world = _world_of(config, composed, node, key)
            candidate.topology = resolve(node, world.size, source=world.source(), key=key)
            interpolations.check(composed)
            candidate.reason = "; ".join(violations(candidate.topology, model, splits_sequence(node, model)))
    except ConfigurationError as error:
        candidate.reason = in_one_line(error)
        return candidate
    if not run_mode.is_ours(composed) and not run_mode.is_cluster(config) and candidate.topology.world_size > 1:
        raise ConfigurationError(_refusal(composed, candidate))
    candidate.fingerprint = _fingerprint(composed, key, candidate)
    if estimator is not None:
        try:
            candidate.estimate = estimator.judge(candidate.topology, node)
        except ConfigurationError as error:
            candidate.unpriced = in_one_line(error)
    return candidate


def _world_of(config: DictConfig, composed: DictConfig, node: Any, key: str) -> World:
    if run_mode.is_cluster(config):
        return run_mode.planned_on_cluster(config)
    if run_mode.is_ours(composed):
        return run_mode.planned(composed, node, key)
    return world_module.plan(read_degrees(node, key))


def _refusal(composed: DictConfig, candidate: Candidate) -> str:
    launcher = composed.hydra.runtime.choices.get("hydra/launcher")
    asked = " ".join(filter_overrides(candidate.overrides))
    return (
        f"hydra/launcher={launcher} runs each job in one process, but {asked or 'the config'} asks for "
        f"{candidate.topology.world_size} ({layout_of(candidate.degrees)})\n"
        "  try: hydra/launcher=torchrun"
    )


def in_one_line(error: ConfigurationError) -> str:
    """What is wrong, without the factors of 1 and without the remedy: a sweep has other layouts to run."""
    lines = [line.strip() for line in str(error).splitlines() if not line.lstrip().startswith("try:")]
    text = " ".join(lines[1:] if len(lines) > 1 and lines[0].endswith(":") else lines)
    return re.sub(rf"\b{_FACTOR}=1 \* |(?: \* {_FACTOR}=1)+(?=[: ])", "", text)


def _fingerprint(composed: DictConfig, key: str, candidate: Candidate) -> str:
    """Equal for jobs that come to the same: their configs are equal once the degrees are what they were resolved to."""
    plain = {str(name): _plain(composed, str(name)) for name in composed if name != "hydra"}
    node: Any = plain
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    if isinstance(node, dict):
        for name, path in FACTORS.items():
            inner = node
            for part in path.split(".")[:-1]:
                inner = inner.setdefault(part, {})
            inner[path.split(".")[-1]] = candidate.degrees[name]
        node |= {"ep_size": candidate.topology.ep, "enable_expert_parallel": False, "world_size": None}
    own = [override for override in candidate.overrides if override.lstrip("+~").startswith("hydra.")]
    # What the config does not hold and the task may see: ${hydra:runtime.choices.model}, variables of the environment.
    choices = {
        group: choice for group, choice in composed.hydra.runtime.choices.items() if not _is_about_layout(str(group), key)
    }
    text = json.dumps([plain, own, choices, _plain(composed.hydra.job, "env_set")], default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _is_about_layout(group: str, key: str) -> bool:
    return group.startswith("hydra/") or group.split("/")[0] == key.split(".")[-1]


def _plain(composed: DictConfig, name: str) -> Any:
    node = composed._get_node(name)
    if OmegaConf.is_config(node):
        return OmegaConf.to_container(node, resolve=False, enum_to_str=True)  # as written: ${now:} differs each time
    return node._value() if node is not None else None


def _label(candidates: list[Candidate], listed: int) -> None:
    """Name each by the overrides that not all have; the last ones, as many as axes are listed, are its layout."""
    own = [filter_overrides(each.overrides) for each in candidates]
    common = set(own[0]).intersection(*own[1:]) if len(own) > 1 else set()
    for candidate, overrides in zip(candidates, own, strict=True):
        typed = overrides[: len(overrides) - listed]
        candidate.label = _join(overrides, common)
        candidate.name = f"{layout_of(candidate.degrees)} {_join(typed, common)}".rstrip() if listed else candidate.label


def _join(overrides: Sequence[str], common: set[str]) -> str:
    return shlex.join(each for each in overrides if each not in common)


def describe(plan: Plan) -> str:
    """The table that a sweep prints before it starts: job, world, degrees, and what is not run and why."""
    rows = [("job", "world", "layout", "")]
    for each in plan.candidates:
        if each.reason:
            rows.append(("-", "-", "skipped", f"{each.label}: {each.reason}" if each.label else each.reason))
            continue
        chosen = each.twin or each
        note = f"same as job {chosen.number}, not run again" if each.twin else "has a result already" if each.is_done else ""
        told = each.name.removeprefix(layout_of(each.degrees)).strip()  # the column before says the layout
        text = ": ".join(part for part in (told, note) if part)
        rows.append(("-" if each.twin else str(each.number), str(each.topology.world_size), layout_of(each.degrees), text))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [
        f"  {job.rjust(widths[0])}  {world.rjust(widths[1])}  {layout.ljust(widths[2])}  {text}".rstrip()
        for job, world, layout, text in rows
    ]
    return "\n".join([_headline(plan), *lines])


def _headline(plan: Plan) -> str:
    todo = sum(not each.is_done for each in plan.runnable)
    counts = {
        "with a result already": len(plan.runnable) - todo,
        "equal to another": sum(each.twin is not None for each in plan.candidates),
        "skipped": sum(bool(each.reason) for each in plan.candidates),
        "left out by the constraints": plan.constrained,
        "left out by max_jobs": plan.left_out,
        "slower by estimate": plan.slower,
        "too large or impossible by estimate": plan.unfit,
    }
    return ", ".join([f"layouts: {todo} to run", *(f"{number} {what}" for what, number in counts.items() if number)])
