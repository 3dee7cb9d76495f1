"""The picture of a layout: nodes as boxes, ranks as cells coloured by their index along one axis. SVG, made of plain text.

A cell of up to 128 ranks holds the number of its rank and of its place along the axis; of more ranks the number alone, and
beyond 4,096 the colour alone. Every cell has a title, which viewers show when it is pointed at: the rank and its coordinate.
"""

import colorsys
import math
from xml.sax.saxutils import escape

from ..errors import ConfigurationError
from ..topology import AXES, BASE_AXES, unknown_axis
from .case import Case

__all__ = ["draw"]

_MOST_RANKS = 16384
_MARGIN, _GAP, _HEAD, _LEGEND = 16, 10, 16, 26
_SHADES = 12
"""Colours that eyes tell apart; further along an axis they come again."""


def draw(case: Case, axis: str) -> str:
    """Draw a case.

    Args:
        case: The layout and the machine. Places without a rank stay empty.
        axis: Cells are of one colour where the index along this axis is the same.

    Returns:
        An SVG document.

    Raises:
        ConfigurationError: No such axis, or more ranks than a picture can hold.
    """
    at, machine = case.topology, case.machine
    if axis not in AXES:
        raise ConfigurationError(unknown_axis(axis))
    if at.world_size > _MOST_RANKS:
        raise ConfigurationError(f"--format svg: {at.world_size:,} ranks are more than the {_MOST_RANKS:,} that can be drawn")
    cell = _cell(at.world_size)
    wide = math.ceil(math.sqrt(machine.per_node)) if machine.per_node > 8 else min(machine.per_node, 4)
    width, height = wide * cell + _GAP, math.ceil(machine.per_node / wide) * cell + _GAP + _HEAD
    # As wide as it is high, about: a screen's shape.
    across = max(1, min(machine.nodes, math.ceil(math.sqrt(machine.nodes * 1.5 * height / width))))
    title = _title(case, axis)
    body = [_box(case, axis, node, cell, wide, (node % across * (width + _GAP), node // across * (height + _GAP)))
            for node in range(machine.nodes)]  # fmt: skip
    full = (
        max(across * (width + _GAP), 7 * len(title)) + 2 * _MARGIN,
        math.ceil(machine.nodes / across) * (height + _GAP) + 2 * _MARGIN + _LEGEND,
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {full[0]} {full[1]}" width="{full[0]}" height="{full[1]}" '
            'font-family="sans-serif">',
            f'<rect width="{full[0]}" height="{full[1]}" fill="#ffffff"/>',
            f'<text x="{_MARGIN}" y="{_MARGIN + 10}" font-size="13" fill="#222222">{escape(title)}</text>',
            f'<g transform="translate({_MARGIN} {_MARGIN + _LEGEND})">',
            *body,
            "</g>",
            "</svg>",
            "",
        ]
    )


def colour(index: int, size: int) -> str:
    """Of a place along an axis of some size: hues around the circle, light enough for black text."""
    hue = index % min(size, _SHADES) / min(size, _SHADES)
    lightness = 0.74 if index // _SHADES % 2 == 0 else 0.86  # the second round is paler
    return "#" + "".join(f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue, lightness, 0.65))


def _cell(world_size: int) -> int:
    """Side of a cell in pixels."""
    return 44 if world_size <= 128 else 26 if world_size <= 4096 else 9


def _title(case: Case, axis: str) -> str:
    at, machine = case.topology, case.machine
    factors = " * ".join(f"{base}={at.size(base)}" for base in BASE_AXES if at.size(base) > 1) or "1"
    return (
        f"{factors} = {at.world_size:,} rank(s) on {machine.nodes:,} node(s) of {machine.per_node}, "
        f"coloured by {axis} ({at.size(axis):,})"
    )


def _box(case: Case, axis: str, node: int, cell: int, wide: int, corner: tuple[int, int]) -> str:
    """One node with its ranks."""
    machine = case.machine
    rows = math.ceil(machine.per_node / wide)
    width, height = wide * cell + _GAP, rows * cell + _GAP + _HEAD
    first = node * machine.per_node
    cells = [
        _draw_cell(case, axis, first + place, cell, (_GAP // 2 + place % wide * cell, _HEAD + _GAP // 2 + place // wide * cell))
        for place in range(machine.per_node)
    ]
    label = f"node {node}" if width >= 50 else str(node)
    return (
        f'<g transform="translate({corner[0]} {corner[1]})">'
        f'<rect width="{width}" height="{height}" rx="4" fill="#f6f7f9" stroke="#8a94a0"/>'
        f'<text x="5" y="13" font-size="11" fill="#55606b">{label}</text>{"".join(cells)}</g>'
    )


def _draw_cell(case: Case, axis: str, rank: int, cell: int, corner: tuple[int, int]) -> str:
    x, y = corner
    side = cell - (2 if cell > 10 else 1)
    if rank >= case.topology.world_size:
        return f'<rect x="{x}" y="{y}" width="{side}" height="{side}" fill="none" stroke="#c9d0d7" stroke-dasharray="2 2"/>'
    at = case.topology
    index = at.index(axis, rank)
    place = ", ".join(f"{base}={i}" for base, i in at.coordinate(rank).items() if at.size(base) > 1)
    square = f'<rect x="{x}" y="{y}" width="{side}" height="{side}" rx="2" fill="{colour(index, at.size(axis))}"/>'
    words = ""
    if cell > 40:
        words = _write(x + side / 2, y + 19, 14, str(rank)) + _write(x + side / 2, y + 34, 9, f"at {index}")
    elif cell > 10:
        words = _write(x + side / 2, y + 16, 9, str(rank))
    return f"<g><title>rank {rank}: {place or 'alone'}</title>{square}{words}</g>"


def _write(x: float, y: float, size: int, text: str) -> str:
    return f'<text x="{x:g}" y="{y}" font-size="{size}" text-anchor="middle" fill="#222222">{text}</text>'
