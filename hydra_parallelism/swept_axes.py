"""The axes that a sweep lists: under which names, up to which degree, and the overrides that set them. Half of ``layouts``."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ._equation import FACTORS
from .constraints import nearest
from .errors import ConfigurationError
from .topology import BASE_AXES, DERIVED_AXES, Topology

__all__ = ["SweptAxis", "overrides_of", "parse_axes", "parse_limit", "refuse", "show"]

AXES_KEY = "hydra.sweeper.axes"

PATHS = dict(zip(BASE_AXES, FACTORS.values(), strict=True)) | {"ep": "ep_size"}
NAMES = dict(zip(BASE_AXES, FACTORS, strict=True)) | {"ep": "ep_size"}
AXIS_OF = {name: axis for names in (NAMES, PATHS) for axis, name in names.items()} | {axis: axis for axis in PATHS}


@dataclass(frozen=True)
class SweptAxis:
    """An axis whose degrees a sweep tries."""

    axis: str
    """Mesh axis, e.g. ``tp``."""
    limit: int | None = None
    """The largest degree to try."""


def parse_axes(values: Any, *, key: str = AXES_KEY) -> tuple[SweptAxis, ...]:
    """Read the axes of a sweep.

    Args:
        values: Names: a config key (``tp_size``, ``context_parallel.ring_degree`` or ``ring_degree``) or a mesh axis (``tp``,
            ``ring``), each with an upper limit if wanted: ``tp_size<=8``. One name need not be a list.
        key: Where they were written, for messages.

    Returns:
        The axes, in the order given.

    Raises:
        ConfigurationError: Names every unknown and every repeated entry; an unknown one with the nearest known name.
    """
    if isinstance(values, Mapping) or not isinstance(values, Iterable | SweptAxis):
        raise ConfigurationError(f"{key}={values}: must be a list of axes\n  try: {key}=[dp_shard,'tp_size<=8']")
    entries = [values] if isinstance(values, str | SweptAxis) else list(values)
    found: dict[str, SweptAxis] = {}
    problems = [] if entries else ["lists no axis; try [dp_replicate,dp_shard]"]
    for entry in entries:
        swept = entry if isinstance(entry, SweptAxis) else _parse_entry(entry)
        if isinstance(swept, str):
            problems.append(swept)
        elif swept.axis in found:
            problems.append(f"{NAMES[swept.axis]} is listed twice")
        else:
            found[swept.axis] = swept
    refuse(f"{key}={show(entries)} is not valid:", problems)
    return tuple(found.values())


def parse_limit(text: str, *, key: str = AXES_KEY) -> SweptAxis:
    """Read one axis with or without a limit: ``tp_size<=8``, ``tp``.

    Raises:
        ConfigurationError: No such axis, or the limit is no whole number of at least 1.
    """
    return parse_axes(text, key=key)[0]


def overrides_of(degrees: Topology | Mapping[str, int], axes: Iterable[str | SweptAxis], key: str = "parallelism") -> list[str]:
    """Hydra overrides that set the degrees of some axes, e.g. ``["parallelism.tp_size=2"]``, in the order of the axes.

    Args:
        degrees: A layout, or mesh axis -> degree.
        axes: What to set, as :func:`parse_axes` takes it.
        key: Dotted path of the config node.
    """
    sizes = degrees.degrees() if isinstance(degrees, Topology) else degrees
    return [f"{key}.{PATHS[swept.axis]}={sizes[swept.axis]}" for swept in parse_axes(axes)]


def _parse_entry(entry: Any) -> SweptAxis | str:
    """The axis, or what is wrong."""
    name, comparison, limit = (part.strip() for part in str(entry).partition("<="))
    if name in DERIVED_AXES:
        return f"{name!r} is made of other axes; list {' and '.join(NAMES[part] for part in DERIVED_AXES[name])}"
    if name not in AXIS_OF:
        return f"no axis {name!r}{nearest(name, AXIS_OF) or ';'} the axes are {', '.join(NAMES.values())}"
    if not comparison:
        return SweptAxis(AXIS_OF[name])
    if not (limit.isdecimal() and int(limit) >= 1):
        return f"{entry!r}: the limit must be a whole number of at least 1"
    return SweptAxis(AXIS_OF[name], int(limit))


def show(axes: Iterable[Any]) -> str:
    """A list as one types it for Hydra, where a limit needs quotes."""

    def text(entry: Any) -> str:
        if not isinstance(entry, SweptAxis):
            said = str(entry)
        else:
            said = NAMES[entry.axis] + (f"<={entry.limit}" if entry.limit else "")
        return repr(said) if "<" in said else said

    return f"[{','.join(map(text, axes))}]"


def refuse(title: str, problems: list[str]) -> None:
    """Raise all problems at once, if there are any."""
    if problems:
        raise ConfigurationError("\n  ".join([title, *problems]))
