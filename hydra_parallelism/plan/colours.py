"""Which ranks have one colour in a picture: those of one group along an axis, or those at one index along it.

The colours are the "light" scheme that Paul Tol made for cells with black text ("Colour Schemes", SRON technical note, issue
3.2, 2021): told apart by colour-blind readers too. There are eight. Where an axis has more groups they come again, never on two
neighbours of the picture if that can be helped.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

__all__ = ["ALONE", "BY", "PALETTE", "kinds", "shades"]

PALETTE = ("#77aadd", "#ee8866", "#eedd88", "#44bb99", "#ffaabb", "#aaaa00", "#99ddff", "#bbcc33", "#dddddd")
ALONE = len(PALETTE) - 1
"""The colour of ranks along an axis of one rank."""

BY = ("group", "index")
"""What one colour may stand for."""


def kinds(groups: Sequence[Sequence[int]], by: str) -> list[int]:
    """Of each rank the number of its group; or its index in that group.

    Args:
        groups: All groups along an axis, by lowest rank.
        by: One of :data:`BY`.
    """
    found = [0] * sum(map(len, groups))
    for number, ranks in enumerate(groups):
        for index, rank in enumerate(ranks):
            found[rank] = number if by == "group" else index
    return found


def shades(kinds: Sequence[int], neighbours: Iterable[tuple[int, int]]) -> list[int]:
    """Of each kind the colour, as an index into :data:`PALETTE`.

    Colours go around; a kind takes the next one that the fewest kinds beside it have. (Greedy colouring of the graph of
    neighbours. It is not planar, a group lies in many places: rarely, eight are not enough.)

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
        in_turn = [(kind + step) % ALONE for step in range(ALONE)]
        found.append(min(in_turn, key=lambda shade: taken[shade]))
    return found
