"""Which stage of a pipeline holds what: arithmetic on names and sizes, without communication.

A model is seen as *units* in the order in which they run: what comes before its repeated blocks, the blocks, what comes after.
Stages are contiguous runs of units, and a schedule says how many stages one rank of ``pp`` holds and which:

=======================================================  =======  ==========================
schedule                                                 a rank   of rank 0, 1 with ``pp=2``
=======================================================  =======  ==========================
GPipe, 1F1B                                              1 stage  0 | 1
Interleaved1F1B, LoopedBFS, InterleavedZeroBubble        2, loop  0 2 | 1 3
ZBVZeroBubble, DualPipeV                                 2, V     0 3 | 1 2
=======================================================  =======  ==========================
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..balance import balance
from ..errors import ConfigurationError
from . import blocks

__all__ = [
    "Unit",
    "arrange",
    "balance",
    "choose_microbatches",
    "divide",
    "rank_of",
    "splits_backward",
    "stages_of",
    "stages_per_rank",
]

_SINGLE = ("GPipe", "1F1B")
_V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
_NEEDS_AS_MANY_AS_STAGES = ("1F1B", "DualPipeV")
_SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
_IN_ROUNDS = ("Interleaved1F1B", "InterleavedZeroBubble")


@dataclass(frozen=True)
class Unit:
    """A module (or a bare parameter) that goes to one stage as a whole."""

    name: str
    """Fully qualified, in the whole model."""
    size: int
    """How many parameters it holds."""
    is_block: bool = False
    """Whether it is a member of the repeated block list."""
    is_bare: bool = False
    """Whether it is a parameter that no module of its own holds, such as a table of positions."""


def stages_per_rank(schedule: str) -> int:
    """How many stages one rank of ``pp`` holds."""
    return 1 if schedule in _SINGLE else 2


def stages_of(rank: int, schedule: str, pp: int) -> tuple[int, ...]:
    """The stages of one rank of ``pp``, first to last."""
    if schedule in _V_SHAPED:
        return (rank, 2 * pp - 1 - rank)
    return tuple(range(rank, pp * stages_per_rank(schedule), pp))


def rank_of(stage: int, schedule: str, pp: int) -> int:
    """The rank of ``pp`` that holds a stage."""
    return next(rank for rank in range(pp) if stage in stages_of(rank, schedule, pp))


def splits_backward(schedule: str) -> bool:
    """Whether a schedule runs the backward of inputs and that of weights apart."""
    return schedule in _SPLIT_BACKWARD


def choose_microbatches(given: int | None, schedule: str, pp: int, key: str) -> int:
    """Micro-batches of one step: what was given, or twice the number of stages.

    Raises:
        ConfigurationError: A number that the schedule cannot run.
    """
    stages = pp * stages_per_rank(schedule)
    count = 2 * stages if given is None else given
    what = f"{key}.pipeline.microbatches={count} does not suit {key}.pipeline.schedule={schedule} at {key}.pp_size={pp}"
    if count < 1:
        raise ConfigurationError(f"{what}:\n  a step needs at least one\n  try: {key}.pipeline.microbatches={2 * stages}")
    if schedule in _NEEDS_AS_MANY_AS_STAGES and count < stages:
        raise ConfigurationError(
            f"{what}:\n  it has {stages} stages and needs at least as many micro-batches to keep them busy\n"
            f"  try: {key}.pipeline.microbatches={stages}, or {key}.pipeline.schedule=GPipe"
        )
    rounds = max(1, count // pp)
    if schedule in _IN_ROUNDS and count % rounds:
        raise ConfigurationError(
            f"{what}:\n  they go round in {count} // {pp} = {rounds} rounds, which does not divide {count}\n"
            f"  try: {key}.pipeline.microbatches={rounds * pp}"
        )
    return count


def arrange(units: Sequence[Unit], plan: Mapping[str, tuple[Sequence[str], Sequence[str]]]) -> list[Unit]:
    """Put units into the order they run in, by Transformers' plan of what modules read and write (``base_model_pp_plan``).

    A module that reads nothing that another one writes is first, one that writes nothing that another one reads is last. Units
    that the plan does not name stay where they are, and so does everything else that the plan leaves open.
    """
    planned = {unit.name: place for unit in units if (place := _place(unit.name, plan)) is not None}
    in_order = iter(sorted((unit for unit in units if unit.name in planned), key=lambda unit: planned[unit.name]))
    return [next(in_order) if unit.name in planned else unit for unit in units]


def _place(name: str, plan: Mapping[str, tuple[Sequence[str], Sequence[str]]]) -> int | None:
    mine = max((entry for entry in plan if f"{name}.".startswith(f"{entry}.")), key=len, default=None)
    if mine is None:
        return None
    reads, writes = plan[mine]
    written = {value for _, values in plan.values() for value in values}
    read = {value for values, _ in plan.values() for value in values}
    if not written & set(reads):
        return 0
    return 1 if read & set(writes) else 2


def divide(units: Sequence[Unit], split: Any, schedule: str, pp: int, key: str) -> tuple[tuple[str, ...], ...]:
    """Names of the units of each stage, in the order in which they run.

    Args:
        units: The model's units in the order in which they run.
        split: ``auto``, or a list with one list of unit names or patterns per stage.
        schedule: Name of the schedule, which says how many stages there are.
        pp: Ranks along ``pp``.
        key: Dotted path of the parallelism node, for messages.

    Raises:
        ConfigurationError: Too few blocks, a list of another length than there are stages, or a unit in no stage or in two.
    """
    stages = pp * stages_per_rank(schedule)
    if split == "auto":
        return _divide_evenly(units, stages, schedule, pp, key)
    if not isinstance(split, list | tuple) or not all(
        isinstance(names, list | tuple) and all(isinstance(name, str) for name in names) for names in split
    ):
        raise ConfigurationError(
            f"{key}.pipeline.split={split} is neither auto nor a list with one list of module names per stage\n"
            f"  try: {key}.pipeline.split=auto"
        )
    if len(split) != stages:
        raise ConfigurationError(
            f"{key}.pipeline.split names {len(split)} stages, but {key}.pp_size={pp} with {key}.pipeline.schedule={schedule} "
            f"has {pp} * {stages_per_rank(schedule)} = {stages}\n"
            f"  try: {key}.pipeline.split=auto, or {stages} lists"
        )
    return _divide_by_name(units, split, key)


def _divide_evenly(units: Sequence[Unit], stages: int, schedule: str, pp: int, key: str) -> tuple[tuple[str, ...], ...]:
    places = [at for at, unit in enumerate(units) if unit.is_block]
    if len(places) < stages:
        fits = max(1, len(places) // stages_per_rank(schedule))
        raise ConfigurationError(
            f"{key}.pp_size={pp} with {key}.pipeline.schedule={schedule} makes {pp} * {stages_per_rank(schedule)} = {stages} "
            f"stages, but the model has {len(places)} repeated blocks\n"
            f"  try: {key}.pp_size={fits}, or a schedule with one stage a rank: {key}.pipeline.schedule=1F1B"
        )
    first, last = places[0], places[-1]
    blocks = [unit for unit in units[first : last + 1] if unit.is_block]
    counts = balance(
        [unit.size for unit in blocks],
        stages,
        before=sum(unit.size for unit in units[:first]),
        after=sum(unit.size for unit in units[last + 1 :]),
    )
    cut, found = 0, []
    for stage, count in enumerate(counts):
        names = [unit.name for unit in blocks[cut : cut + count]]
        if stage == 0:
            names = [unit.name for unit in units[:first]] + names
        if stage == stages - 1:
            names += [unit.name for unit in units[last + 1 :]]
        found.append(tuple(names))
        cut += count
    return tuple(found)


def _divide_by_name(units: Sequence[Unit], split: Sequence[Sequence[str]], key: str) -> tuple[tuple[str, ...], ...]:
    owner: dict[str, int] = {}
    stages: list[tuple[str, ...]] = []
    for stage, patterns in enumerate(split):
        names: dict[str, None] = {}
        for pattern in patterns:
            names |= dict.fromkeys(_named(pattern, units, stage, key))
        for name in names:
            if name in owner:
                raise ConfigurationError(
                    f"{key}.pipeline.split puts {name} into two stages, {owner[name]} and {stage}\n"
                    f"  try: name it in one of them, or {key}.pipeline.split=auto"
                )
            owner[name] = stage
        stages.append(tuple(names))
    missing = [unit.name for unit in units if unit.name not in owner]
    empty = [str(stage) for stage, names in enumerate(stages) if not names]
    if missing or empty:
        what = f"leaves out {_some(missing)}" if missing else f"names nothing for stage {', '.join(empty)}"
        raise ConfigurationError(
            f"{key}.pipeline.split {what}; each of the {len(units)} modules of the model goes to exactly one of "
            f"{len(split)} stages\n  try: add it to a stage, or {key}.pipeline.split=auto"
        )
    return tuple(stages)


def _named(pattern: str, units: Sequence[Unit], stage: int, key: str) -> list[str]:
    hits = [unit.name for unit in units if blocks.matches(pattern, unit.name)]
    if hits:
        return hits
    inside = next((unit.name for unit in units if pattern.startswith(f"{unit.name}.")), None)
    if inside is not None:
        raise ConfigurationError(
            f"{key}.pipeline.split: {pattern!r} of stage {stage} is a part of {inside}, which goes to one stage as a whole\n"
            f"  try: name {inside}"
        )
    close = difflib.get_close_matches(pattern, [unit.name for unit in units], n=3, cutoff=0.4)
    names = ", ".join(close) or _some([unit.name for unit in units])
    raise ConfigurationError(
        f"{key}.pipeline.split: {pattern!r} of stage {stage} names no module of the model\n  try: one of {names}"
    )


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:6]) + (f" and {len(listed) - 6} more" if len(listed) > 6 else "")
