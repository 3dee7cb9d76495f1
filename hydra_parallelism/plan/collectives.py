"""What a collective costs in the alpha-beta model: a message of ``n`` bytes takes ``latency + n / bandwidth``. Pure.

Rings and pairwise exchange (Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication operations in
MPICH", IJHPCA 19(1)), the algorithms that move the fewest bytes. ``p`` ranks; bytes are those that one rank sends.
"""

from dataclasses import dataclass

from .machine import Link

__all__ = ["Cost", "all_gather", "all_reduce", "all_to_all", "reduce_scatter", "send"]


@dataclass(frozen=True)
class Cost:
    """Of one rank."""

    wire_bytes: float
    seconds: float

    def times(self, count: float) -> "Cost":
        """So many of it, one after the other."""
        return Cost(count * self.wire_bytes, count * self.seconds)


def all_gather(total: float, p: int, link: Link) -> Cost:
    """``p - 1`` steps of ``total / p`` bytes, ``total`` being the size of the result."""
    return _steps(p - 1, total / p, link)


def reduce_scatter(total: float, p: int, link: Link) -> Cost:
    """``p - 1`` steps of ``total / p`` bytes, ``total`` being the size of what goes in."""
    return _steps(p - 1, total / p, link)


def all_reduce(total: float, p: int, link: Link) -> Cost:
    """A reduce-scatter and an all-gather: ``2 * (p - 1)`` steps of ``total / p`` bytes."""
    return _steps(2 * (p - 1), total / p, link)


def all_to_all(local: float, p: int, link: Link) -> Cost:
    """``p - 1`` exchanges of ``local / p`` bytes, ``local`` being what one rank has."""
    return _steps(p - 1, local / p, link)


def send(size: float, link: Link) -> Cost:
    """One message."""
    return _steps(1, size, link)


def _steps(count: int, size: float, link: Link) -> Cost:
    return Cost(count * size, count * (link.latency_s + size / link.bytes_per_s))
