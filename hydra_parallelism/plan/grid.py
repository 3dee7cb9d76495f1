"""Where nodes and ranks stand in a picture, in pixels. Ranks stand in rows inside their node, nodes in rows on the page."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from .machine import Machine

__all__ = ["Grid", "arrange"]

_PAGE = 1080
"""Width that a page of few nodes may take: a browser's window less the panel beside it."""
_SIDES = {8: 104, 16: 84, 128: 48, 2048: 28}
"""Up to so many ranks -> side of a cell. 28 is what four digits need; more ranks are told by their titles."""
_SMALL = 10


@dataclass(frozen=True)
class Grid:
    """The arrangement."""

    nodes: int
    per_node: int
    cell: int
    """Side of a cell and the gap after it."""
    wide: int
    """Cells in a row of a node."""
    across: int
    """Nodes in a row of the page."""

    @property
    def has_numbers(self) -> bool:
        """Whether a cell has room for the number of its rank."""
        return self.cell > _SMALL

    @property
    def has_indices(self) -> bool:
        """Whether it has room for an index below that."""
        return self.cell > _SIDES[2048]

    @property
    def side(self) -> int:
        """Of the square that is drawn."""
        return self.cell - (1 if self.cell == _SMALL else 2)

    @property
    def head(self) -> int:
        """Height of a node's name."""
        return 17 if self.has_numbers else 12

    @property
    def gap(self) -> int:
        """Between nodes."""
        return 10 if self.has_indices else 8

    @property
    def node_width(self) -> int:
        """wide * cell and a rim."""
        return self.wide * self.cell + 8

    @property
    def node_height(self) -> int:
        """Rows of cells, a rim and the name."""
        return math.ceil(self.per_node / self.wide) * self.cell + 6 + self.head

    @property
    def width(self) -> int:
        """Of all nodes."""
        return self.across * (self.node_width + self.gap) - self.gap

    @property
    def height(self) -> int:
        """Of all nodes."""
        return math.ceil(self.nodes / self.across) * (self.node_height + self.gap) - self.gap

    def node_corner(self, node: int) -> tuple[int, int]:
        """Left and top of a node."""
        row, column = divmod(node, self.across)
        return column * (self.node_width + self.gap), row * (self.node_height + self.gap)

    def cell_corner(self, place: int) -> tuple[int, int]:
        """Left and top of a place, inside its node."""
        row, column = divmod(place, self.wide)
        return 5 + column * self.cell, self.head + 1 + row * self.cell

    def neighbours(self, world_size: int) -> Iterator[tuple[int, int]]:
        """Pairs of ranks side by side or one above the other, across the borders of nodes too."""
        rows = math.ceil(self.per_node / self.wide)
        at = {}
        for rank in range(world_size):
            node, place = divmod(rank, self.per_node)
            row, column = node // self.across * rows + place // self.wide, node % self.across * self.wide + place % self.wide
            at[row, column] = rank
        for (row, column), rank in at.items():
            for beside in ((row, column + 1), (row + 1, column)):
                if beside in at:
                    yield rank, at[beside]


def arrange(machine: Machine, world_size: int) -> Grid:
    """Choose the arrangement: cells as large as their number allows, and a power of two of nodes in a row.

    Ranks whose numbers differ by a power of two are what groups are made of most often; so they stand in a column.
    """
    cell = next((side for most, side in _SIDES.items() if world_size <= most), _SMALL)
    wide = math.ceil(math.sqrt(machine.per_node)) if machine.per_node > 8 else min(machine.per_node, 4)
    one = Grid(1, machine.per_node, cell, wide, 1)
    room = max(_PAGE, math.sqrt(machine.nodes * one.node_width * one.node_height))
    fits = max(1, int((room + one.gap) // (one.node_width + one.gap)))
    across = machine.nodes if machine.nodes <= fits else 2 ** (fits.bit_length() - 1)
    return Grid(machine.nodes, machine.per_node, cell, wide, across)
