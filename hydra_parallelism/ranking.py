"""The results of a sweep, best first, and the table that shows them on the console.

Three tiers: jobs with the number to rank by, best first; jobs that ended well without it, or with ``nan`` (a diverged loss is
no result); jobs that failed. Within a tier equals keep the order in which they came.
"""

import difflib
import math
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence

from .errors import ConfigurationError
from .outcome import Row, Status

__all__ = ["labels", "layout_of", "objective_of", "one_line", "peak_mib", "places", "rank", "short", "shorten", "table"]

_KEY = "hydra.sweeper.objective"
_LEAST_LABEL, _LEAST_LABEL_ALONE = 24, 8
"""To how many characters layouts are cut before other columns are left out, and when there are none to leave out."""
_GAP = 2
_ALWAYS = 4
"""Columns that no table leaves out: place, layout, processes and the number ranked by."""


def objective_of(rows: Sequence[Row], objective: str | None) -> str | None:
    """The name of the number to rank by.

    Args:
        rows: The results.
        objective: As the user chose it; ``None`` takes the only number there is.

    Returns:
        The name; ``None`` when nothing was chosen and no job returned a number.

    Raises:
        ConfigurationError: Nothing was chosen among several numbers, or what was chosen is none of them.
    """
    names = list(dict.fromkeys(name for row in rows for name in row.numbers))
    if objective is None:
        if len(names) > 1:
            raise ConfigurationError(f"the jobs returned {', '.join(names)}: which one ranks them?\n  try: {_KEY}={names[0]}")
        return names[0] if names else None
    if names and objective not in names:
        near = difflib.get_close_matches(objective, names, n=1) or names
        raise ConfigurationError(f"{_KEY}={objective}: the jobs returned {', '.join(names)}\n  try: {_KEY}={near[0]}")
    return objective


def rank(rows: Sequence[Row], objective: str | None, maximize: bool) -> list[Row]:
    """Rows best first, failed ones last.

    Raises:
        ConfigurationError: See :func:`objective_of`.
    """
    name = objective_of(rows, objective)

    def order(row: Row) -> tuple[int, float]:
        value = _objective(row, name)
        if row.status is not Status.ok:
            return 2, 0.0
        return (1, 0.0) if math.isnan(value) else (0, -value if maximize else value)

    return sorted(rows, key=order)


def places(ranked: Sequence[Row], objective: str | None) -> list[int | None]:
    """The place of each row of :func:`rank`; equals share one, rows without a result have none."""
    found: list[int | None] = []
    for i, row in enumerate(ranked):
        value = _objective(row, objective)
        if row.status is not Status.ok or math.isnan(value):
            found.append(None)
        else:
            found.append(found[-1] if i and value == _objective(ranked[i - 1], objective) else i + 1)
    return found


def _objective(row: Row, name: str | None) -> float:
    return row.numbers.get(name, math.nan) if name is not None else math.nan


def layout_of(degrees: Mapping[str, int]) -> str:
    """A layout in short, as one would type it: ``dp_shard=4 tp_size=2``."""
    if not degrees:
        return "no layout"
    return " ".join(f"{name}={degree}" for name, degree in degrees.items() if degree != 1) or "one process"


def labels(rows: Sequence[Row]) -> list[str]:
    """What to call each row: its layout, and what else tells it from rows of the same layout."""
    of_layout: defaultdict[str, list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        of_layout[layout_of(row.degrees)].append(i)
    found = [""] * len(rows)
    for layout, members in of_layout.items():
        # Without a layout the overrides are all there is to tell a row by.
        others = [rows[i] for i in members] if rows[members[0]].degrees else rows
        extras = _differences([rows[i].overrides for i in members], [row.overrides for row in others])
        for i, extra in zip(members, extras, strict=True):
            # Equal overrides may still be different jobs: the script or its config changed before the sweep was resumed.
            alone = extras.count(extra) == 1
            found[i] = ", ".join(part for part in (layout, extra, "" if alone else f"job {rows[i].job}") if part)
    return found


def _differences(overrides: list[str], others: list[str]) -> list[str]:
    """Of each row's overrides those that the others do not all have too."""
    common = set(_split(others[0])).intersection(*map(_split, others[1:]))
    return [" ".join(override for override in _split(text) if override not in common) for text in overrides]


def _split(overrides: str) -> list[str]:
    try:
        return shlex.split(overrides)
    except ValueError:  # written by hand
        return overrides.split()


def short(number: float) -> str:
    """A number for people: four digits, or with thousands set apart."""
    rounded = abs(float(f"{number:.4g}"))
    return f"{number:,.0f}" if 1000 <= rounded < 1e12 else f"{number:.4g}"


def one_line(text: str) -> str:
    """The first line of a text, without what would move the cursor."""
    first = next((line for line in text.splitlines() if line.strip()), "")
    return "".join(mark if mark.isprintable() else " " for mark in first).strip()


def shorten(text: str, width: int) -> str:
    """A text cut in the middle: the ends of a label tell more than its middle."""
    if len(text) <= width:
        return text
    tail = max(width - 3, 0) // 2
    return f"{text[: max(width - 3 - tail, 0)]}...{text[len(text) - tail :]}"[:width]


def table(rows: Sequence[Row], objective: str | None, maximize: bool, width: int) -> str:
    """The ranked table, no line longer than ``width``.

    Columns: place, layout (with what tells rows of one layout apart), processes, the number ranked by, seconds, peak memory of
    the fullest rank, the other numbers, and how the job ended. An error that does not fit stands on a line of its own. When it
    gets tight the columns from the right go first, then the layouts are cut.

    Raises:
        ConfigurationError: See :func:`objective_of`.
    """
    name = objective_of(rows, objective)
    ranked = rank(rows, name, maximize)
    if not ranked:
        return "no jobs"
    columns = _columns(ranked, name)
    dropped: list[str] = []
    while len(columns) > _ALWAYS and _excess(columns, ranked, width) > max(_width(columns[1]) - _LEAST_LABEL, 0):
        dropped.insert(0, columns.pop()[0])
    room = max(_width(columns[1]) - max(_excess(columns, ranked, width), 0), _LEAST_LABEL_ALONE)
    columns[1] = [shorten(label, room) for label in columns[1]]
    head = f"by {one_line(name)}, {'highest' if maximize else 'lowest'} first:" if name else "no job returned a number:"
    foot = [f"no room for {', '.join(dropped)}: see results.csv"] if dropped else []
    return "\n".join(_cut(line, width) for line in (head, *_lines(columns, ranked, width), *foot))


def _columns(ranked: list[Row], objective: str | None) -> list[list[str]]:
    """All columns but the last, each with its head; what may be left out is on the right."""
    others = [name for name in dict.fromkeys(n for row in ranked for n in row.numbers) if name != objective]

    def numbers(name: str) -> list[str]:
        return [one_line(name), *(_cell(row.numbers.get(name)) for row in ranked)]

    found = [
        ["#", *(str(place or "-") for place in places(ranked, objective))],
        ["layout", *map(one_line, labels(ranked))],
        ["world", *(_cell(row.world) for row in ranked)],
    ]
    if objective is not None:
        found.append(numbers(objective))
    found.append(["seconds", *(_cell(row.seconds) for row in ranked)])
    if any(row.peak_memory for row in ranked):
        found.append(["peak MiB", *(peak_mib(row) for row in ranked)])
    return [*found, *map(numbers, others)]


def _cell(value: float | None) -> str:
    return "-" if value is None else short(value)


def peak_mib(row: Row) -> str:
    """Peak memory of the fullest rank in whole MiB, or a dash."""
    return f"{max(row.peak_memory) / 2**20:,.0f}" if row.peak_memory else "-"


def _width(column: list[str]) -> int:
    return max(map(len, column))


def _excess(columns: list[list[str]], ranked: list[Row], width: int) -> int:
    """By how much the columns and the words of the last one are too wide."""
    return sum(_width(column) + _GAP for column in columns) + _width(["status", *(row.status.words for row in ranked)]) - width


def _lines(columns: list[list[str]], ranked: list[Row], width: int) -> list[str]:
    widths = [_width(column) for column in columns]
    ends = [("status", ""), *((row.status.words, one_line(row.error)) for row in ranked)]
    lines = []
    for cells, (end, error) in zip(zip(*columns, strict=True), ends, strict=True):
        justified = [cell.ljust(w) if i == 1 else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths, strict=True))]
        line = (" " * _GAP).join([*justified, end])
        if error and len(line) + len(f": {error}") <= width:
            line, error = f"{line}: {error}", ""
        lines += [line, f"{' ' * (widths[0] + _GAP)}{error}"] if error else [line]
    return lines


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[: max(width - 3, 0)]}..."[:width]
