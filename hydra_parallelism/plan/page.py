"""The picture as a page for a browser: one file, no network. Pointing at a rank shows who is in its groups.

Everything that is known is worked out here and put into the page as JSON; ``page.js`` only shows it. ``page.html`` is the
frame and ``page.css`` the looks, light or dark as the reader's system is.
"""

import json
import re
from collections.abc import Sequence
from html import escape
from importlib import resources
from string import Template
from typing import Any

from ..topology import AXES
from .case import Case
from .colours import ALONE, BY, PALETTE, kinds, shades
from .drawing import STYLE, draw_nodes, judge, key_lines, named
from .grid import Grid, arrange
from .report import runs
from .text import Table, price_tables, spell, warnings_in

__all__ = ["show_page"]

_NUMBER = re.compile(r"[\d.,]+")
_SHRINK = 0.75
"""Numbers in cells can still be read; a narrower window scrolls."""


def show_page(case: Case, facts: dict[str, Any], axis: str, by: str = "group", command: str = "") -> str:
    """Make the page.

    Args:
        case: The layout and the machine.
        facts: Its report; warnings and, where there is a model, estimates are taken from it.
        axis: What cells are coloured by at first; the reader chooses among all axes of several ranks.
        by: ``group`` or ``index``, see :func:`~.drawing.draw`.
        command: What the user typed.

    Returns:
        An HTML document.

    Raises:
        ConfigurationError: No such axis, or more ranks than a picture can hold.
    """
    judge(case, axis)
    at = case.topology
    grid = arrange(case.machine, at.world_size)
    axes = [name for name in AXES if at.size(name) > 1 or name == axis]
    return Template(_part("page.html")).substitute(
        title=escape(named(case)),
        style=f"{STYLE}\n{_part('page.css')}",
        command=escape(command),
        warnings="\n".join(f'<p class="warning">{escape(text)}</p>' for text in warnings_in(facts)),
        key=escape("; ".join(key_lines(case, axis, by))),
        options="".join(f"<option{' selected' if name == axis else ''}>{name}</option>" for name in axes),
        width=grid.width + 4,
        height=grid.height + 4,
        least=round(_SHRINK * grid.width),
        edge=2 if grid.has_numbers else 1,
        picture="\n".join(draw_nodes(case, grid, axis, by)),
        estimates="\n".join(map(_table, price_tables(facts["price"], facts["rank"]["rank"]))) if "price" in facts else "",
        layout=_safe({**_shape(grid, by), "axes": _axes(case, grid, axes)}),
        script=_part("page.js"),
    )


def _part(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def _safe(data: dict[str, Any]) -> str:
    """JSON that no HTML parser takes for the end of the script."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _shape(grid: Grid, by: str) -> dict[str, Any]:
    return {"perNode": grid.per_node, "wide": grid.wide, "across": grid.across, "palette": PALETTE, "by": by}


def _axes(case: Case, grid: Grid, axes: Sequence[str]) -> dict[str, Any]:
    """Axis -> of each rank its group, of each group its ranks and nodes in words, of each kind its colour, and the key."""
    at, neighbours = case.topology, list(grid.neighbours(case.topology.world_size))
    found: dict[str, Any] = {}
    for axis in axes:
        groups = list(at.groups(axis))
        of_rank = {by: kinds(groups, by) for by in BY}
        alone = [ALONE] * at.world_size if at.size(axis) == 1 else None
        found[axis] = {
            "groups": of_rank["group"],
            "ranks": [spell(runs(ranks)) for ranks in groups],
            "nodes": [spell(runs(sorted({case.machine.node(rank) for rank in ranks}))) for ranks in groups],
            "shades": {by: alone or shades(of_rank[by], neighbours) for by in BY},
            "key": {by: key_lines(case, axis, by) for by in BY},
        }
    return found


def _table(table: Table) -> str:
    is_number = [_NUMBER.fullmatch(word) is not None for word in table.rows[0]]
    rows = "".join(_row(row, "td", is_number) for row in table.rows)
    return (
        f"<section><table><caption>{escape(table.title)}</caption><thead>{_row(table.head, 'th', is_number)}</thead>"
        f"<tbody>{rows}</tbody></table></section>"
    )


def _row(words: Sequence[str], kind: str, is_number: Sequence[bool]) -> str:
    marks = [' class="number"' if number else "" for number in is_number]
    return f"<tr>{''.join(f'<{kind}{mark}>{escape(word)}</{kind}>' for word, mark in zip(words, marks, strict=True))}</tr>"
