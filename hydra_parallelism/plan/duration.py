"""How long a step of training takes, by estimate: computing, messages, and the idle time of a pipeline. Pure.

What is assumed, all of it in the open:

* Matrix products run at ``world.tflops * world.efficiency``, in float32 too (``--rank`` says so). A token takes 6 operations
  for each parameter it is multiplied with, 2 forward and 4 backward, and ``12 * hidden * sequence`` a block for attention
  (Chowdhery et al. 2022, "PaLM", arXiv 2204.02311, appendix B), of which a causal mask leaves half. Blocks that are recomputed
  take a third more. Nothing else takes time: no norms, no optimizer, no loading of data.
* The messages of the data axes (``dp_replicate``, ``fsdp``, ``efsdp``) pass while the rank computes, as FSDP fetches the next
  unit and reduces the last one meanwhile (Zhao et al. 2023, arXiv 2304.11277, section 3.3): only what is longer than the
  computing is waited for. Those of all other axes are waited for, each in turn.
* A pipeline is as slow as its slowest stage and idles for the bubble's share of that. Schedules that split backward have no
  formula here and are given the bubble of interleaved 1F1B, which is more than theirs.
"""

from dataclasses import dataclass

from .case import Case
from .memory import recomputed
from .model import Model
from .schedules import bubble, microbatches_of
from .share import Share, calls_of, fitted, share_of
from .traffic import traffic

__all__ = ["DATA_AXES", "Duration", "duration_of", "flops"]

DATA_AXES = ("dp_replicate", "fsdp", "efsdp")


@dataclass(frozen=True)
class Duration:
    """Seconds of a step, of its slowest stage."""

    computing: float
    waiting: float
    """For messages that nothing hides."""
    idle: float
    """The pipeline's bubble."""
    data: float
    """Messages of the data axes, which computing hides as far as it goes."""

    @property
    def step(self) -> float:
        """computing + waiting + idle, or data if that is longer."""
        return max(self.computing + self.waiting + self.idle, self.data)


def duration_of(case: Case, model: Model) -> Duration:
    """Estimate a step (a forward pass under ``inference``).

    Raises:
        ConfigurationError: The model does not go with the layout, see :func:`.share.fitted`.
    """
    at, model = case.topology, fitted(model, case.topology, case.config)
    shares = [share_of(model, at, case.config, index) for index in range(at.pp)]
    # The ends, and the stage with most blocks: between them nothing is slower.
    stages = {0, at.pp - 1, max(range(at.pp), key=lambda index: shares[index].blocks)}
    return max((_of_stage(case, model, index, shares[index]) for index in sorted(stages)), key=lambda found: found.step)


def _of_stage(case: Case, model: Model, index: int, share: Share) -> Duration:
    moved = traffic(case, model, case.topology.rank(pp=index))
    data = sum(each.cost.seconds for each in moved if each.axis in DATA_AXES)
    waiting = sum(each.cost.seconds for each in moved if each.axis not in DATA_AXES)
    computing = flops(case, model, share) / (case.machine.flops * case.machine.efficiency)
    return Duration(computing, waiting, _bubble(case) * (computing + waiting), data)


def flops(case: Case, model: Model, share: Share) -> float:
    """Operations of a rank in a step."""
    at, config = case.topology, case.config
    calls = 1 if config.inference else calls_of(model, at, config)
    tokens = model.tokens / at.cp * microbatches_of(config.pipeline, at.pp) * calls
    attention = model.attention + model.hidden * model.sequence  # 12 * hidden * sequence, halved, for 6 operations each
    if model.experts > 1:
        # Beside several tp ranks experts at ep=1 are whole, and see the same tokens on each but for sequence parallelism.
        alone = at.ep > 1 or config.enable_sequence_parallel
        block = attention / at.tp + model.top_k * model.feed_forward / (at.tp if alone else 1)
    else:
        block = (attention + model.feed_forward) / at.tp
    again = 0 if config.inference else recomputed(config, share.blocks)
    passes = 2 if config.inference else 6
    head = model.embedding / at.tp if share.last else 0.0
    return tokens * (passes * (share.blocks * block + head) + 2 * again * block)


def _bubble(case: Case) -> float:
    p, pipeline = case.topology.pp, case.config.pipeline
    if p == 1 or case.config.inference:
        return 0.0
    count = microbatches_of(pipeline, p)
    known = bubble(pipeline.schedule.name, p, count)
    return (p - 1) / (2 * count) if known is None else known
