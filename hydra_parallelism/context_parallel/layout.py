"""Which part of a sequence each context-parallel rank holds. Whole numbers only: no torch, no processes.

A sequence is cut twice, first over ``ring`` and then, within a ring rank's piece, over ``ulysses``; rank ``i`` of ``cp`` has
ring index ``i // ulysses`` and Ulysses index ``i % ulysses``. Twelve tokens on ``ring=2, ulysses=2``:

==============  =====================  =======================
rank along cp   balanced               contiguous
==============  =====================  =======================
0 (ring 0)      0 1 2                  0 1 2
1 (ring 0)      9 10 11                3 4 5
2 (ring 1)      3 4 5                  6 7 8
3 (ring 1)      6 7 8                  9 10 11
==============  =====================  =======================

Balanced is the zig-zag order of causal ring attention: of ``2 * ring`` chunks, ring rank ``r`` holds chunks ``r`` and
``2 * ring - 1 - r``, an early one with little behind it and a late one with much, so that all ranks have equally much to do
(Striped Attention, arXiv 2311.09431, has the aim; the two-chunk order is that of Megatron-LM and of torch's own
``_HeadTailLoadBalancer``). Over ``ulysses`` a piece is cut contiguously, so that gathering it there restores it in order.
"""

import math
from dataclasses import dataclass

__all__ = ["Layout"]


@dataclass(frozen=True)
class Layout:
    """How sequences lie over ``ring * ulysses`` ranks."""

    ring: int
    """Ranks around the ring."""
    ulysses: int
    """Ranks that trade heads for sequence."""
    load_balance: bool = True
    """Zig-zag over the ring, instead of contiguous."""

    @property
    def cp(self) -> int:
        """Ranks that share one sequence: ring * ulysses."""
        return self.ring * self.ulysses

    @property
    def balanced(self) -> bool:
        """Whether the order is the zig-zag one: a ring of one has nothing to balance."""
        return self.load_balance and self.ring > 1

    @property
    def multiple(self) -> int:
        """What the length of a whole sequence must be a multiple of: ring * lcm(2, ulysses), or ring * ulysses unbalanced."""
        return self.ring * (math.lcm(2, self.ulysses) if self.balanced else self.ulysses)

    def fits(self, length: int) -> bool:
        """Whether a whole sequence of this length can be cut."""
        return length > 0 and length % self.multiple == 0

    def misfit(self, length: int) -> str:
        """The equation that a whole length breaks, and the nearest that can be cut: below, where there is one, and above."""
        terms = f"ring_degree={self.ring} * " + (
            f"lcm(2, ulysses_degree={self.ulysses})" if self.balanced else f"ulysses_degree={self.ulysses}"
        )
        below = length // self.multiple * self.multiple
        nearest = [n for n in (below, below + self.multiple) if n > 0 and n != length]
        wrong = "not 0" if length else "but it must be more than 0"
        return (
            f"{length} % ({terms}) = {length} % {self.multiple} = {length % self.multiple}, {wrong}\n"
            f"  try: pad or cut the sequence to {' or '.join(map(str, nearest))}"
        )

    def runs(self, length: int, rank: int) -> tuple[tuple[int, int], ...]:
        """Stretches ``(start, stop)`` of a whole sequence that a rank of the ``cp`` axis holds, in the order it holds them.

        Args:
            length: Of the whole sequence, one that :meth:`fits`.
            rank: Index along ``cp``.
        """
        index, part = divmod(rank, self.ulysses)
        size = length // self.cp
        found = []
        offset, end = part * size, (part + 1) * size  # within the ring rank's piece
        for start, stop in self._piece(length, index):
            first, last = max(offset, 0), min(end, stop - start)
            if first < last:
                found.append((start + first, start + last))
            offset, end = offset - (stop - start), end - (stop - start)
        return tuple(found)

    def _piece(self, length: int, index: int) -> tuple[tuple[int, int], ...]:
        """Stretches that a ring rank and its Ulysses peers hold together."""
        if not self.balanced:
            size = length // self.ring
            return ((index * size, (index + 1) * size),)
        size = length // (2 * self.ring)
        return tuple((chunk * size, (chunk + 1) * size) for chunk in (index, 2 * self.ring - 1 - index))
