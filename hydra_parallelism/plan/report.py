"""All that is said about a case, as plain data: what ``--format json`` prints and the other formats show."""

from collections.abc import Iterator, Sequence
from typing import Any

from ..topology import BASE_AXES
from .advice import reductions, warnings_of
from .case import Case
from .placement import communicators, place

__all__ = ["report", "runs"]


_HEAD = 8
"""Rows of the grid that are listed before the chosen rank's and the last one."""


def report(case: Case, rank: int, *, whole: bool = False) -> dict[str, Any]:
    """Describe a case.

    Args:
        case: The layout and the machine.
        rank: Whose groups to list.
        whole: Whether to list the grid of a large world from end to end, and not only its beginning, where ``rank`` is, and
            its last row.

    Returns:
        Mappings, lists, strings and numbers only. Keys: ``world_size``, ``machine``, ``degrees``, ``rank``, ``grid``, ``axes``,
        ``communicators``, ``gradients``, ``warnings``. Ranks are lists of ``[first, last, step]``, both ends included: a group
        of 65,536 ranks is a line, too.

    Raises:
        ConfigurationError: The rank is not in the world.
    """
    at, machine = case.topology, case.machine
    return {
        "world_size": at.world_size,
        "machine": {"nodes": machine.nodes, "per_node": machine.per_node},
        "degrees": {**at.degrees(), "dp": at.dp, "cp": at.cp, "fsdp": at.fsdp, "dp_cp": at.dp_cp, "efsdp": at.efsdp},
        "rank": {"rank": rank, "node": machine.node(rank), "dp_rank": at.dp_rank(rank), **at.coordinate(rank)},
        "grid": list(_grid(case, rank, whole)),
        "axes": [
            {"axis": e.axis, "size": e.size, "ranks": runs(e.ranks), "nodes": runs(e.nodes), "inside_nodes": e.inside}
            for e in place(at, machine, rank)
        ],
        "communicators": [
            {"axes": list(e.axes), "kind": e.kind, "ranks": runs(e.ranks), "in_world": at.world_size // len(e.ranks)}
            for e in communicators(at, rank)
        ],
        "gradients": [vars(each) for each in reductions(case)],
        "warnings": warnings_of(case),
    }


def runs(numbers: Sequence[int]) -> list[list[int]]:
    """Ascending numbers as ``[first, last, step]`` with both ends, each as long as it goes."""
    found: list[list[int]] = []
    for number in numbers:
        if found and _continues(found[-1], number):
            last = found[-1]
            last[1], last[2] = number, number - last[1]
        else:
            found.append([number, number, 1])
    return found


def _continues(run: list[int], number: int) -> bool:
    first, last, step = run
    return first == last or number - last == step


def _grid(case: Case, rank: int, whole: bool) -> Iterator[dict[str, Any]]:
    """The ranks along the innermost axis that has several, one row for each place on the axes outside it."""
    at = case.topology
    axes = [axis for axis in BASE_AXES if at.size(axis) > 1]
    inner = at.size(axes[-1]) if axes else 1
    count, mine = at.world_size // inner, rank // inner
    # A gap of one row would take as much room as the row.
    listed = range(count) if whole or count <= 2 * _HEAD else sorted({*range(_HEAD), mine, count - 1})
    for first in (row * inner for row in listed):
        yield {
            "at": {axis: index for axis, index in at.coordinate(first).items() if axis in axes[:-1]},
            "ranks": [first, first + inner - 1],
            "nodes": [case.machine.node(first), case.machine.node(first + inner - 1)],
        }
