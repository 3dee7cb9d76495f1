"""Cutting a row of blocks into pipeline stages. Pure arithmetic: a plan asks it as well as what cuts the model."""

from collections.abc import Sequence

__all__ = ["balance"]


def balance(sizes: Sequence[int], parts: int, *, before: int = 0, after: int = 0) -> list[int]:
    """Cut a row of blocks into contiguous parts of at least one block so that the largest part is as small as it can be.

    Dynamic programming over prefixes; of equally good cuts it prefers the one whose parts are more alike.

    Args:
        sizes: Parameters of each block.
        parts: How many parts; at most ``len(sizes)``.
        before: Parameters that come with the first part.
        after: Parameters that come with the last part.

    Returns:
        How many blocks each part has.
    """
    total = [0]
    for size in sizes:
        total.append(total[-1] + size)
    end = len(sizes)
    # best[j]: (largest part, sum of squares, cuts) of the first j blocks in the parts placed so far.
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for part in range(parts):
        extra = (before if part == 0 else 0) + (after if part == parts - 1 else 0)
        left = parts - 1 - part
        stops = [end] if left == 0 else range(part + 1, end - left + 1)
        found: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for stop in stops:
            options = []
            for start, (largest, squares, cuts) in best.items():
                if start < stop:
                    held = total[stop] - total[start] + extra
                    options.append((max(largest, held), squares + held * held, (*cuts, stop - start)))
            found[stop] = min(options)
        best = found
    return list(best[end][2])
