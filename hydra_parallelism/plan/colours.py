"""Which ranks have one colour in a picture: those of one group along an axis, or those at one index along it.

The colours are the "light" scheme that Paul Tol made for cells with black text ("Colour Schemes", SRON technical note, issue
3.2, 2021): told apart by colour-blind readers too. There are eight. Where an axis has more groups they come again, never on two
neighbours of the picture if that can be helped.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from ..topology import Topology

__all__ = ["ALONE", "BY", "PALETTE", "kinds", "shades"]

PALETTE = ("#77aadd", "#ee8866", "#eedd88", "#44bb99", "#ffaabb", "#aaaa00", "#99ddff", "#bbcc33", "#dddddd")
ALONE = len(PALETTE) - 1
"""The colour of ranks along an axis of one rank."""

BY = ("group", "index")
"""What one colour may stand for."""


def kinds(topology: Topology, axis: str, by: str) -> list[int]:
    """Of each rank the number of its group along an axis, counted by lowest rank; or its index in that group."""
    found = [0] * topology.world_size
    for number, ranks in enumerate(topology.groups(axis)):
        for index, rank in enumerate(ranks):
            found[rank] = number if by == "group" else index
    return found


def shades(kinds: Sequence[int], neighbours: Iterable[tuple[int, int]]) -> list[int]:
    """Of each kind the colour, as an index into :data:`PALETTE`. With as many colours as kinds each has its own.

    Args:
        kinds: Of each rank.
        neighbours: Pairs of ranks that should not look alike unless they are of one kind.
    """
    count = max(kinds) + 1
    if count <= ALONE:
        return list(range(count))
    beside: defaultdict[int, set[int]] = defaultdict(set)
    for one, other in neighbours:
        if kinds[one] != kinds[other]:
            beside[max(kinds[one], kinds[other])].add(min(kinds[one], kinds[other]))
    found: list[int] = []
    for kind in range(count):
        taken = Counter(found[other] for other in beside[kind])
        found.append(min((taken[(kind + turn) % ALONE], turn) for turn in range(ALONE))[1])
        found[kind] = (kind + found[kind]) % ALONE
    return found
