"""Who reads and draws what: seeds and samplers by the axes of the layout, not by the rank.

Ranks that work on the same samples (``tp``, ``cp`` and ``cfg`` peers, and the stages of a pipeline) must draw the same noise
and read the same batches; ranks along ``dp`` must not. Worked example, 8 ranks with ``dp_replicate=2, dp_shard=2, tp_size=2``:

=====  =======  ============================  ==================
ranks  dp_rank  ``seed_for(7)``               samples of 12
=====  =======  ============================  ==================
0, 1   0        hash of ``7`` and ``dp=0``    0, 4, 8
2, 3   1        hash of ``7`` and ``dp=1``    1, 5, 9
4, 5   2        hash of ``7`` and ``dp=2``    2, 6, 10
6, 7   3        hash of ``7`` and ``dp=3``    3, 7, 11
=====  =======  ============================  ==================
"""

import hashlib
import operator
from collections.abc import Sequence, Sized
from typing import Any

from torch.utils.data import Dataset, DistributedSampler

from .errors import ConfigurationError
from .runtime import ParallelContext, current

__all__ = ["distributed_sampler", "seed_for"]

_SEED_BITS = 63  # torch.manual_seed takes 64 bits with a sign


def seed_for(
    seed: int, *, across: str | Sequence[str] = "dp", purpose: str = "", context: ParallelContext | None = None
) -> int:
    """A seed for this rank: equal for ranks that agree along the named axes, unrelated for all others. Not collective.

    A hash of ``(seed, purpose, index along each named axis)`` and of nothing else, so it is the same in every run and process,
    and does not change when other axes do: dp rank 3 draws the same numbers under FSDP over 4 as under HSDP 2 x 2 with tensor
    parallelism inside. The hash (as in numpy's ``SeedSequence``) keeps neighbours apart: with ``seed + rank``, seed 1 on rank 0
    would be seed 0 on rank 1. So does each half of its bits: torch's CPU generator reads the low 32 only.

    Args:
        seed: Of the run, any whole number, the same on every rank.
        across: Axes along which ranks differ. ``("dp", "pp")`` sets stages apart too; ``()`` gives every rank the same.
        purpose: What the numbers are for, e.g. ``"dropout"``: seeds for other purposes are unrelated.
        context: The layout; ``None`` takes the running job's.

    Returns:
        A number from 0 to ``2**63 - 1``, for ``torch.manual_seed`` or ``torch.Generator().manual_seed``.

    Raises:
        ConfigurationError: ``seed`` is not a whole number, or an axis has no such name.

    Example:
        >>> torch.manual_seed(hydra_parallelism.seed_for(cfg.seed, purpose="dropout"))
    """
    try:
        number = operator.index(seed)
    except TypeError:
        raise ConfigurationError(f"a seed is a whole number, not {seed!r}\n  try: seed_for(0)") from None
    context = context or current()
    axes = (across,) if isinstance(across, str) else tuple(across)
    at = [f"{axis}={context.topology.index(axis, context.rank)}" for axis in sorted(axes)]
    digest = hashlib.sha256("\n".join([str(number), repr(purpose), *at]).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> (64 - _SEED_BITS)


def distributed_sampler(
    dataset: Dataset[Any],
    *,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    context: ParallelContext | None = None,
) -> "DistributedSampler[Any]":
    """A sampler that gives each ``dp_rank`` its own share, and its ``tp``, ``cp``, ``cfg`` and ``pp`` peers the same one.

    Args:
        dataset: With a length.
        shuffle: Draw a new order each epoch; call ``sampler.set_epoch(epoch)`` before each, or every epoch is alike.
        seed: Of the order, the same on every rank (not one of :func:`seed_for`, which differs along ``dp``).
        drop_last: Leave out what does not divide by ``dp_world_size``; otherwise the first samples come twice.
        context: The layout; ``None`` takes the running job's.

    Raises:
        ConfigurationError: The dataset has no length, or too few samples to give every rank one.
    """
    context = context or current()
    shares = context.dp_world_size
    if not isinstance(dataset, Sized):
        raise ConfigurationError(
            f"a sampler needs a dataset with a length, and {type(dataset).__name__} has none\n"
            f"  try: read every {shares}th sample from the dp_rank-th on, of {shares} = dp_world_size"
        )
    if len(dataset) < (shares if drop_last else 1):
        raise ConfigurationError(
            f"{len(dataset)} sample(s) do not give each of the dp_world_size={shares} = dp_replicate * dp_shard ranks one\n"
            f"  try: drop_last=False with at least 1 sample, or at most {max(len(dataset), 1)} data-parallel rank(s)"
        )
    return DistributedSampler(
        dataset, num_replicas=shares, rank=context.dp_rank, shuffle=shuffle, seed=seed, drop_last=drop_last
    )
