"""What a pipeline schedule costs: micro-batches in flight, and the bubble. ``p`` ranks, ``m`` micro-batches. Pure."""

from functools import lru_cache

from ..balance import balance
from ..config import PipelineConfig

__all__ = ["bubble", "divide", "in_flight", "microbatches_of", "sends", "splits_backward", "stages_of", "stages_per_rank"]

_ONE_STAGE = ("GPipe", "1F1B")
_FOLDED = ("ZBVZeroBubble", "DualPipeV")
"""The second half of the stages runs back over the ranks, in the shape of a V."""
_SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def stages_per_rank(schedule: str) -> int:
    """One, or two for the schedules that interleave."""
    return 1 if schedule in _ONE_STAGE else 2


def stages_of(schedule: str, p: int, rank: int) -> tuple[int, ...]:
    """The stages of a rank, first to last."""
    if stages_per_rank(schedule) == 1:
        return (rank,)
    return (rank, 2 * p - 1 - rank if schedule in _FOLDED else rank + p)


def splits_backward(schedule: str) -> bool:
    """Whether the backward of inputs and that of weights run apart; FSDP then keeps what it has gathered."""
    return schedule in _SPLIT_BACKWARD


@lru_cache(maxsize=512)
def divide(layers: int, stages: int, block: int, before: int, after: int) -> tuple[int, ...]:
    """Blocks of each stage, as ``pipeline.split=auto`` cuts equal ones: so that the largest stage is small.

    Args:
        layers: How many blocks; at least ``stages``.
        stages: How many stages.
        block: Parameters of a block.
        before: Parameters that come with the first stage.
        after: Parameters that come with the last one.
    """
    return tuple(balance([block] * layers, stages, before=before, after=after))


def microbatches_of(config: PipelineConfig, pp: int) -> int:
    """Micro-batches of a step: what is said, else twice the number of stages; 1 without a pipeline."""
    if pp == 1:
        return 1
    return config.microbatches or 2 * pp * stages_per_rank(config.schedule.name)


def in_flight(schedule: str, p: int, m: int, rank: int = 0) -> float:
    """Micro-batches whose activations a rank keeps, in units of all its blocks. Rank 0 keeps most.

    1F1B ``p - rank`` (Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1), of ZBV ``p`` on all (Qi et al. 2024, arXiv 2401.10241);
    interleaved with ``v=2`` stages on a rank ``p * (1 + (p - 1) / (p * v))`` (Korthikanti et al. 2022, arXiv 2205.05198,
    section 4.2.3); never more than ``m``, which GPipe and breadth-first schedules keep. DualPipeV is counted as ``m``, too: an
    upper bound.
    """
    if schedule == "1F1B":
        return min(m, p - rank)
    if schedule == "ZBVZeroBubble":
        return min(m, p)
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
        return min(m, p + (p - 1) / 2)
    return m


def bubble(schedule: str, p: int, m: int) -> float | None:
    """Idle time as a share of the time that computing takes.

    ``(p - 1) / m`` for GPipe and 1F1B, ``(p - 1) / (v * m)`` with ``v=2`` stages on a rank (Narayanan et al. 2021, arXiv
    2104.04473, sections 2.2.1 and 2.2.2). ``None`` for schedules that split backward: there it depends on
    how long the parts take.
    """
    if schedule in _ONE_STAGE:
        return (p - 1) / m
    if schedule in ("Interleaved1F1B", "LoopedBFS"):
        return (p - 1) / (2 * m)
    return None


def sends(schedule: str, p: int, rank: int) -> int:
    """Messages that a rank sends for one micro-batch: activations to the next stage, gradients to the one before.

    A stage sends nothing past the ends, and nothing to a stage on its own rank (the fold of a V).
    """
    count = stages_per_rank(schedule)
    last, own = p * count - 1, stages_of(schedule, p, rank)
    return sum(0 <= stage + step <= last and stage + step not in own for stage in own for step in (1, -1))
