"""The picture of a layout: nodes as boxes, ranks as cells, one colour for each group along one axis. SVG, made of plain text.

Cells of up to 2,048 ranks hold the number of the rank, of up to 128 its index along the axis, too. Every cell has a title,
which viewers show when it is pointed at: the rank and its coordinate. Dark where the viewer is.
"""

import math
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from xml.sax.saxutils import escape

from .._equation import FACTORS
from ..errors import ConfigurationError
from ..topology import AXES, BASE_AXES, Topology, unknown_axis
from .case import Case
from .colours import ALONE, PALETTE, kinds, shades
from .grid import Grid, arrange
from .report import runs
from .text import spell

__all__ = ["STYLE", "default_axis", "draw", "draw_nodes", "judge", "key_lines", "named"]

_MOST_RANKS = 16384
_MARGIN, _LEAST = 16, 440
_LETTER = 7.4
"""Width of a letter of 13 pixels in the widest of the usual fonts."""

STYLE = """\
.page{fill:#fff}.node{fill:#f6f7f9;stroke:#8a94a0}.word{fill:#1f2933}.soft{fill:#4d5863}.void{fill:none;stroke:#b4bdc6}
.ink{fill:#1f2933;pointer-events:none}
@media (prefers-color-scheme:dark){.page{fill:#14181d}.node{fill:#222931;stroke:#6b7681}
.word{fill:#e6eaee}.soft{fill:#b0bac4}.void{stroke:#56616c}}"""
"""Of everything but the cells, whose colours suit both."""


def default_axis(topology: Topology) -> str:
    """The axis that is drawn unless one is chosen: who shares parameters; if nobody does, the first that has several ranks."""
    return next((axis for axis in ("fsdp", "dp", *AXES) if topology.size(axis) > 1), "fsdp")


def draw(case: Case, axis: str, by: str = "group") -> str:
    """Draw a case.

    Args:
        case: The layout and the machine. Places without a rank stay empty.
        axis: Cells are of one colour where they are in one group along this axis.
        by: ``group``, or ``index``: of one colour where the index along the axis is the same.

    Returns:
        An SVG document.

    Raises:
        ConfigurationError: No such axis, or more ranks than a picture can hold.
    """
    judge(case, axis)
    grid = arrange(case.machine, case.topology.world_size)
    width = max(grid.width, _LEAST)
    head = [
        *_wrapped(named(case), width, "word", bold=True),
        *(w for n in key_lines(case, axis, by) for w in _wrapped(n, width)),
    ]
    swatches = list(_swatches(case, axis, by, width))
    top = _MARGIN + 18 * len(head) + 6
    rows = max((row for row, _, _ in swatches), default=-1) + 1
    words = [
        f'<text y="{13 + 18 * line}" font-size="13" {style}>{escape(text)}</text>' for line, (text, style) in enumerate(head)
    ]
    full = width + 2 * _MARGIN, top + 22 * rows + 6 + grid.height + _MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {full[0]} {full[1]}" width="{full[0]}" height="{full[1]}" '
            'font-family="system-ui, sans-serif">',
            f"<title>{escape(named(case))}</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="page" width="{full[0]}" height="{full[1]}" fill="#ffffff"/>',
            f'<g transform="translate({_MARGIN} {_MARGIN})">{"".join(words)}</g>',
            f'<g transform="translate({_MARGIN} {top})">{"".join(swatch for _, _, swatch in swatches)}</g>',
            f'<g class="nodes" transform="translate({_MARGIN} {top + 22 * rows + 6})">',
            *draw_nodes(case, grid, axis, by),
            "</g>",
            "</svg>",
            "",
        ]
    )


def judge(case: Case, axis: str) -> None:
    """Refuse what cannot be drawn.

    Raises:
        ConfigurationError: No such axis, or more ranks than a picture can hold.
    """
    at = case.topology
    if axis not in AXES:
        raise ConfigurationError(unknown_axis(axis))
    if at.world_size > _MOST_RANKS:
        raise ConfigurationError(
            f"{at.world_size:,} ranks are more than the {_MOST_RANKS:,} that a picture can hold\n"
            f"  try: {_fewer(case)} (the same pattern, fewer times), or --format text"
        )


def _fewer(case: Case) -> str:
    """Overrides for a layout that fits, the data axes cut first."""
    at, smaller = case.topology, case.topology
    for axis in ("dp_replicate", "dp_shard", *BASE_AXES):
        size, ranks = smaller.size(axis), smaller.world_size
        if ranks > _MOST_RANKS and size > 1:
            fewer = (replace(smaller, **{axis: n}) for n in range(max(1, size * _MOST_RANKS // ranks), 0, -1) if size % n == 0)
            smaller = next((one for one in fewer if one.fsdp * one.tp % one.ep == 0), smaller)
    keys = dict(zip(BASE_AXES, FACTORS.values(), strict=True))
    words = [f"parallelism.{keys[axis]}={smaller.size(axis)}" for axis in BASE_AXES if smaller.size(axis) != at.size(axis)]
    if case.config.world_size is not None:
        words.append(f"parallelism.world_size={smaller.world_size}")
    if case.states_nodes:
        words.append(f"world.nodes={math.ceil(smaller.world_size / case.machine.per_node)}")
    return " ".join(words)


def named(case: Case) -> str:
    """The layout by the keys that a user types, and the machine."""
    at, machine = case.topology, case.machine
    sizes = zip(FACTORS, map(at.size, BASE_AXES), strict=True)
    factors = " * ".join(f"{key}={size}" for key, size in sizes if size > 1)
    experts = f", ep_size={at.ep}" if at.ep > 1 else ""
    ranks = f"{factors} = {at.world_size:,} ranks" if factors else "1 rank"
    return f"{ranks}{experts}, on {_count(machine.nodes, 'node')} of {machine.per_node:,}"


def key_lines(case: Case, axis: str, by: str) -> list[str]:
    """What the colours mean."""
    size, ranks = case.topology.size(axis), case.topology.world_size
    if size == 1:
        return [f"{axis}: every rank is alone"]
    groups = ranks // size
    if by == "index":
        what = f"one colour for each index in a group, 0 to {size - 1:,}; {_count(groups, 'group')}"
    else:
        what = f"one colour for each of {groups:,} groups of {size:,}" if groups > 1 else f"one group of all {size:,} ranks"
    again = (groups if by == "group" else size) > ALONE
    return [
        f"{axis}: {what}",
        *([f"small numbers: the index along {axis}"] if arrange(case.machine, ranks).has_indices else []),
        *([f"{ALONE} colours, which come again, seldom on two neighbours"] if again else []),
    ]


def draw_nodes(case: Case, grid: Grid, axis: str, by: str) -> Iterator[str]:
    """The nodes with their ranks, from the left top corner on."""
    at, per_node = case.topology, grid.per_node
    groups = list(at.groups(axis))
    kind, index = kinds(groups, by), kinds(groups, "index")
    colour = [ALONE] * len(kind) if at.size(axis) == 1 else shades(kind, grid.neighbours(at.world_size))
    word = "node " if grid.has_numbers and grid.node_width > 10 + 7 * len(f"node {grid.nodes - 1}") else "n"
    for node in range(grid.nodes):
        x, y = grid.node_corner(node)
        yield (
            f'<g transform="translate({x} {y})"><rect class="node" width="{grid.node_width}" height="{grid.node_height}" '
            f'rx="4" fill="#f6f7f9" stroke="#8a94a0"/>'
            f'<text class="soft" x="5" y="{grid.head - 4}" font-size="{11 if grid.has_numbers else 8}">{word}{node}</text>'
        )
        for place in range(per_node):
            rank, corner = node * per_node + place, grid.cell_corner(place)
            if rank < at.world_size:
                small = f"at {index[rank]}" if at.size(axis) > 1 else ""
                yield _cell(at, grid, rank, corner, PALETTE[colour[kind[rank]]], small)
            else:
                yield f'<rect class="void" {_square(grid, corner)} fill="none" stroke="#b4bdc6" stroke-dasharray="2 2"/>'
        yield "</g>"


def _cell(at: Topology, grid: Grid, rank: int, corner: tuple[int, int], fill: str, small: str) -> str:
    place = ", ".join(f"{axis}={i}" for axis, i in at.coordinate(rank).items() if at.size(axis) > 1)
    middle, side = corner[0] + grid.side / 2, grid.side
    words = ""
    if grid.has_indices:
        words = _write(middle, corner[1] + 0.5 * side, round(0.31 * side), f"{rank}")
        words += _write(middle, corner[1] + 0.82 * side, max(9, round(0.16 * side)), small, ' class="ink at"')
    elif grid.has_numbers:
        words = _write(middle, corner[1] + 16.5, 9, f"{rank}")
    square = f'<rect {_square(grid, corner)} fill="{fill}"/>'
    return f'<g class="cell"><title>rank {rank}: {place or "alone"}</title>{square}{words}</g>'


def _square(grid: Grid, corner: tuple[int, int]) -> str:
    return f'x="{corner[0]}" y="{corner[1]}" width="{grid.side}" height="{grid.side}" rx="{2 if grid.has_numbers else 1}"'


def _write(x: float, y: float, size: int, text: str, kind: str = ' class="ink"') -> str:
    return f'<text{kind} x="{x:g}" y="{y:.1f}" font-size="{size}" text-anchor="middle" fill="#1f2933">{text}</text>'


def _wrapped(text: str, width: int, kind: str = "soft", *, bold: bool = False) -> list[tuple[str, str]]:
    """Lines no wider than the picture, with their style."""
    style = f'class="{kind}" fill="#1f2933"' + (' font-weight="bold"' if bold else "")
    letter = _LETTER * (1.1 if bold else 1)
    return [(line, style) for line in textwrap.wrap(text, int(width / letter), break_on_hyphens=False)]


def _swatches(case: Case, axis: str, by: str, width: int) -> Iterator[tuple[int, int, str]]:
    """Row, column and drawing of each colour's meaning; none where colours come again."""
    at = case.topology
    count = at.world_size // at.size(axis) if by == "group" else at.size(axis)
    if at.size(axis) == 1 or count > ALONE:
        return
    names = [spell(runs(ranks)) for ranks in at.groups(axis)] if by == "group" else [f"{axis} {i}" for i in range(count)]
    step = 34 + math.ceil(max(map(len, names)) * _LETTER)
    rows = math.ceil(count / max(1, width // step))
    columns = math.ceil(count / rows)
    for number, name in enumerate(names):
        row, column = divmod(number, columns)
        yield (
            row,
            column,
            (
                f'<rect x="{column * step}" y="{22 * row}" width="14" height="14" rx="2" fill="{PALETTE[number]}"/>'
                f'<text class="word" x="{column * step + 20}" y="{22 * row + 12}" font-size="13" fill="#1f2933">{name}</text>'
            ),
        )


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")
