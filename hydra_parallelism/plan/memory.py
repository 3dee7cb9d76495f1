"""Bytes of the fullest rank, by formula. Pure.

``parallelize`` keeps parameters, gradients and Adam's two moments in float32: ``4 + 4 + 8`` bytes for each parameter that a
rank holds (Rajbhandari et al. 2020, "ZeRO", arXiv 1910.02054, section 3.1, with float32 in place of its mixed precision).
"""

from dataclasses import dataclass

from ..config import ParallelismConfig
from ..topology import Topology
from .model import Model
from .schedules import in_flight, microbatches_of
from .share import Share, calls_of, compute_bytes, fullest, refuse, share_of

__all__ = ["Memory", "activations", "gathered", "memory_of", "recomputed"]

_FLOAT32 = 4
_ADAM = 2 * _FLOAT32


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank."""

    parameters: float
    gradients: float
    optimizer: float
    gathered: float
    """Parameters that are whole for the time of their use, and one unit's gradient before it is reduced."""
    activations: float | None
    """``None`` when the shape of the model is not known."""
    on_host: bool
    """Whether the first three are in host memory (``fsdp.cpu_offload``)."""

    @property
    def device(self) -> float:
        """The sum of what is on the accelerator."""
        kept = 0.0 if self.on_host else self.parameters + self.gradients + self.optimizer
        return kept + self.gathered + (self.activations or 0.0)


def memory_of(model: Model | int, at: Topology, config: ParallelismConfig) -> Memory:
    """What the fullest rank needs.

    Args:
        model: The model, or only its number of parameters: then they are taken to divide evenly over pp, tp and fsdp.
        at: The layout.
        config: Policies: precision, resharding, offload, recomputation, schedule, inference.

    Raises:
        ConfigurationError: The model does not go with the layout, see :func:`.share.refuse`.
    """
    if isinstance(model, int):
        held, whole, active = model / (at.pp * at.tp * at.fsdp), 0.0, None
    else:
        refuse(model, at, config)
        share = fullest(model, at, config)
        # Experts are sharded over efsdp = fsdp * tp / ep ranks.
        over = at.efsdp if at.ep > 1 else at.fsdp
        held = (share.blocks * share.block + share.ends) / at.fsdp + share.blocks * share.experts / over
        whole = gathered(share, at, config, calls_of(model, at, config))
        active = 0.0 if config.inference else activations(model, at, config)
    trained = 0 if config.inference else 1
    return Memory(
        _FLOAT32 * held, trained * _FLOAT32 * held, trained * _ADAM * held, whole, active, on_host=config.fsdp.cpu_offload
    )


def gathered(share: Share, at: Topology, config: ParallelismConfig, calls: int = 1) -> float:
    """Bytes of parameters that are whole while they are used, and of gradients before they are reduced.

    The root stays whole (FSDP2 does not free it after forward). Of blocks two are whole, the one in use and the one that is
    fetched meanwhile (Zhao et al. 2023, "PyTorch FSDP", arXiv 2304.11277, section 3.3.2); all of them without
    ``reshard_after_forward``, and in a pipeline, where torch frees none between the backward passes of micro-batches. Of
    gradients one unit's is whole; all are in a pipeline and when the gradients of several ``calls`` are added up, since they
    are reduced once. Nothing of it when nothing is sharded and nothing cast.
    """
    if at.fsdp == 1 and config.fsdp.mixed_precision is None:
        return 0.0
    unit = share.block + share.experts
    trained, several = not config.inference, at.pp > 1 or calls > 1
    freed = config.fsdp.reshard_after_forward and not (at.pp > 1 and trained)
    whole = min(2, share.blocks) if freed else share.blocks
    gradient = _FLOAT32 * (share.params if several else max(unit, share.ends)) if trained else 0.0
    return compute_bytes(config) * (whole * unit + share.ends) + gradient


def activations(model: Model, at: Topology, config: ParallelismConfig) -> float:
    """Bytes kept for backward by the fullest rank.

    Korthikanti et al. 2022 (arXiv 2205.05198, section 4), with the width of the feed-forward part and the key/value heads as
    they are, no dropout, and attention that keeps no scores (Dao et al. 2022, arXiv 2205.14135). Numbers for each token:

    * not split by tp, unless the sequence is: the inputs of both norms and of both halves, ``4 * hidden``;
    * split by tp: queries and attention's result, ``2 * hidden``; keys and values, ``2 * kv_heads * head_dim``; inside the
      feed-forward part ``4 * ffn`` if gated (gate, its activation, up, their product), else ``2 * ffn``.

    With ``ffn = 4 * hidden``, ungated, that is the paper's ``34 * hidden`` bytes less 2 for masks of dropout. With experts the
    input and the inside of the feed-forward part count ``top_k`` times. A block that is recomputed keeps its input, ``hidden``,
    and one such block at a time has everything. The last stage has float32 logits, ``4 * vocab`` bytes (section 4.3); of them the loss keeps their log-softmax.
    """
    per_block = _kept_by_block(model, at, config) * model.tokens / at.cp * compute_bytes(config)
    return max(_of_stage(model, at, config, index, per_block) for index in range(at.pp))


def _of_stage(model: Model, at: Topology, config: ParallelismConfig, index: int, per_block: float) -> float:
    """Bytes that the ranks at an index along ``pp`` keep, at the time when that is most."""
    share, tokens = share_of(model, at, config, index), model.tokens / at.cp
    again = recomputed(config, share.blocks)
    of_input = model.hidden * tokens * compute_bytes(config)
    kept = (share.blocks - again) * per_block + again * of_input
    working = per_block - of_input if again else 0.0
    logits = 4.0 * model.vocab * tokens if share.last else 0.0
    if at.pp == 1:
        return kept + working + logits
    schedule, count = config.pipeline.schedule.name, microbatches_of(config.pipeline, at.pp)
    flying = in_flight(schedule, at.pp, count, index)
    # Logits go when their loss has gone backward, which 1F1B does at once.
    of_logits = count if schedule in ("GPipe", "LoopedBFS") else 1
    return flying * kept + working + of_logits * logits


def _kept_by_block(model: Model, at: Topology, config: ParallelismConfig) -> float:
    """Numbers that one block keeps for each token of this rank."""
    times = model.top_k if model.experts > 1 else 1
    between = 3 * model.hidden + times * model.hidden
    inside = 2 * model.hidden + 2 * model.kv_heads * model.head_dim
    feed_forward = times * (4 if model.gated else 2) * model.ffn
    split = at.tp if config.enable_sequence_parallel else 1
    return between / split + (inside + feed_forward) / at.tp


def recomputed(config: ParallelismConfig, blocks: int) -> int:
    """How many of some blocks are run forward again in backward."""
    chosen = config.activation_checkpointing
    if chosen == "none":
        return 0
    return blocks if chosen == "full" else blocks // int(chosen)
