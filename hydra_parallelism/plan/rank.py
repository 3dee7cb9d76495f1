"""All layouts of a world, ordered by the estimated time of a step, those left out that memory or the model forbids. Pure."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .._equation import read_degrees
from ..errors import ConfigurationError
from ..layouts import enumerate_layouts
from ..swept_axes import NAMES, overrides_of
from ..topology import BASE_AXES, Topology
from .case import Case
from .composition import read_policies
from .duration import Duration, duration_of
from .memory import Memory, memory_of
from .model import Model
from .overrides import Composed

__all__ = ["Estimate", "Ranking", "as_data", "estimate", "need_work", "order", "rank", "rank_layouts", "show"]

_MOST_REASONS = 5


@dataclass(frozen=True)
class Estimate:
    """What a layout would cost."""

    topology: Topology
    memory: Memory
    duration: Duration


@dataclass
class Ranking:
    """The layouts of a world, judged."""

    fitting: list[Estimate] = field(default_factory=list)
    """Those that fit, fastest first."""
    too_large: list[Estimate] = field(default_factory=list)
    """Those that do not fit into memory, smallest first."""
    refused: dict[str, int] = field(default_factory=dict)
    """Why the model does not go with a layout -> how many layouts. Reasons that differ in numbers only are one, the first."""

    notes: list[str] = field(default_factory=list)
    """What the estimates do not see."""

    @property
    def considered(self) -> int:
        """All of them."""
        return len(self.fitting) + len(self.too_large) + sum(self.refused.values())


def need_work(model: Model | int | None, asker: str, key: str = "model") -> Model:
    """The model, if it says enough to compare steps.

    Raises:
        ConfigurationError: Its shape or ``batch`` is not known.
    """
    if not isinstance(model, Model):
        raise ConfigurationError(
            f"{asker} needs the shape of the model: {key}.hidden, layers, heads, ffn, vocab, sequence\n"
            f"  try: {key}.hidden=4096 {key}.layers=32 {key}.heads=32 {key}.ffn=14336 {key}.vocab=128256 {key}.sequence=8192"
        )
    if model.batch is None:
        raise ConfigurationError(
            f"{asker} compares layouts at the same work, and {key}.batch is not set: the sequences of a step of the optimizer "
            f"over all ranks\n  try: {key}.batch=1024"
        )
    return model


def order(found: Estimate) -> tuple[float, float, float]:
    """By what layouts are put in order: the time of a step, what is sent meanwhile, and what is held."""
    return found.duration.step, found.duration.data, found.memory.device


def estimate(case: Case, model: Model) -> Estimate:
    """What a layout costs.

    Raises:
        ConfigurationError: The model does not go with it.
    """
    return Estimate(case.topology, memory_of(model, case.topology, case.config), duration_of(case, model))


def rank(cases: Iterable[Case], model: Model) -> Ranking:
    """Judge layouts and put them in order. Of equally fast ones what sends less comes first, then what holds less."""
    found, kinds = Ranking(), dict[str, str]()
    for case in cases:
        try:
            judged = estimate(case, model)
        except ConfigurationError as error:
            reason = _first_reason(error)
            reason = kinds.setdefault(re.sub(r"\d+", "", reason), reason)
            found.refused[reason] = found.refused.get(reason, 0) + 1
            continue
        (found.fitting if judged.memory.device <= case.machine.memory else found.too_large).append(judged)
    found.fitting.sort(key=order)
    found.too_large.sort(key=lambda each: each.memory.device)
    found.refused = dict(sorted(found.refused.items(), key=lambda item: -item[1]))
    return found


def rank_layouts(composed: Composed, model: Model) -> Ranking:
    """Judge all layouts of a composed config's machine, over the axes whose degree it leaves at 1 or -1.

    Raises:
        ConfigurationError: The degrees that are set do not go into the world.
    """
    machine, policies = read_policies(composed)
    size = policies.world_size or machine.accelerators
    written = dict(zip(BASE_AXES, read_degrees(policies, "parallelism").factors.values(), strict=True))
    free = [axis for axis, degree in written.items() if degree in (1, -1) and axis != "cfg"]
    free += ["ep"] if model.experts > 1 and policies.ep_size in (1, -1) and not policies.enable_expert_parallel else []
    layouts = enumerate_layouts(size, free, fixed=policies, source=f"world_size={size}")
    found = rank((Case(layout, machine, policies, True) for layout in layouts), model)
    if policies.fsdp.mixed_precision is None:
        found.notes.append("float32 is computed in, but timed at the speed of bfloat16; parallelism/fsdp=bf16 computes in that")
    return found


def as_data(found: Ranking, model: Model, top: int) -> dict[str, Any]:
    """Plain data: what ``--format json`` prints."""
    tokens = (model.batch or 0) * model.sequence
    return {
        "params": model.params,
        "batch": model.batch,
        "considered": found.considered,
        "fitting": len(found.fitting),
        "layouts": [_row(each, tokens) for each in found.fitting[:top]],
        "too_large": len(found.too_large),
        "smallest_too_large": _row(found.too_large[0], tokens) if found.too_large else None,
        "refused": found.refused,
        "notes": found.notes,
    }


def show(found: dict[str, Any], room: float) -> str:
    """The same as a table. ``room`` is the memory of an accelerator in bytes."""
    head = ("#", "layout", "step ms", "tokens/s", "GB", "computing", "waiting", "idle", "data axes")
    rows = [head, *(_cells(number, row) for number, row in enumerate(found["layouts"], 1))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = ["  ".join(_justify(row, widths)).rstrip() for row in rows]
    counts = f"{found['fitting']:,} of {found['considered']:,} layouts fit, {found['too_large']:,} need more memory than "
    lines += ["", f"{counts}{room / 1e9:g} GB, {sum(found['refused'].values()):,} do not go with the model"]
    least = found["smallest_too_large"]
    if least:
        lines.append(f"  the least of what is too much: {least['layout']} needs {least['memory'] / 1e9:,.1f} GB")
    lines += [f"  {number:,} such as: {reason}" for reason, number in list(found["refused"].items())[:_MOST_REASONS]]
    return "\n".join([*lines, *(f"note: {note}" for note in found["notes"])])


def _cells(number: int, row: dict[str, Any]) -> tuple[str, ...]:
    times = [f"{1e3 * row[part]:,.1f}" for part in ("computing", "waiting", "idle", "data")]
    speed, memory = f"{row['tokens_per_s']:,.0f}", f"{row['memory'] / 1e9:,.1f}"
    return (str(number), row["layout"], f"{1e3 * row['seconds']:,.1f}", speed, memory, *times)


def _justify(row: tuple[str, ...], widths: list[int]) -> list[str]:
    """The layout to the left, numbers to the right."""
    pairs = enumerate(zip(row, widths, strict=True))
    return [cell.ljust(width) if column == 1 else cell.rjust(width) for column, (cell, width) in pairs]


def _first_reason(error: ConfigurationError) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    return lines[1] if lines[0].endswith(":") else lines[0]


def _row(each: Estimate, tokens: int) -> dict[str, Any]:
    axes = [axis for axis in (*BASE_AXES, "ep") if each.topology.size(axis) > 1]
    seconds = each.duration.step
    return {
        "layout": " ".join(f"{NAMES[axis]}={each.topology.size(axis)}" for axis in axes) or "one process",
        "overrides": overrides_of(each.topology, axes) if axes else [],
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        **vars(each.duration),
        "memory": each.memory.device,
    }
